//! Q6_K: blocks of 256 with a scale for each 16.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::offset_of;

use super::common::{half, load, sum_floats};
use super::isa::Isa;
use super::tile::{self, Lanes, Panel, Tile};
use crate::blocks::{self, Q8K};
use crate::rows::Steps;

/// A block's scales.
#[derive(Clone, Copy)]
pub struct Row {
    d: f32,
    /// In order, 16 bits each, for the offset of 32.
    scales: __m256i,
    /// Even ones in the lower half, odd ones in the upper.
    halves: __m256i,
}

/// 128 weights, 32 a register, and their scales.
#[derive(Clone, Copy)]
pub struct Part {
    q: [__m256i; 4],
    scales: [__m256i; 4],
}

/// 128 weights from low and high bits, not offset.
#[inline(always)]
unsafe fn six(a: __m256i, b: __m256i, high: __m256i) -> [__m256i; 4] {
    let low = _mm256_set1_epi8(15);
    let two = _mm256_set1_epi8(0x30);
    let join = |nibbles: __m256i, bits: __m256i| {
        _mm256_or_si256(_mm256_and_si256(nibbles, low), _mm256_and_si256(bits, two))
    };
    [
        join(a, _mm256_slli_epi16::<4>(high)),
        join(b, _mm256_slli_epi16::<2>(high)),
        join(_mm256_srli_epi16::<4>(a), high),
        join(_mm256_srli_epi16::<4>(b), _mm256_srli_epi16::<2>(high)),
    ]
}

/// 6 bits.
pub struct Q6K<I>(PhantomData<I>);

impl<I: Isa> Steps for Q6K<I> {
    const LEN: usize = 256;
    const BYTES: usize = size_of::<blocks::Q6K>();
    const INPUT_BYTES: usize = size_of::<Q8K>();
    const PARTS: usize = 2;
    type Row = Row;
    type Column = (f32, __m256i);
    type Part = Part;
    type Sums = __m256i;
    type Total = __m256;

    #[inline(always)]
    unsafe fn zero() -> (__m256i, __m256) {
        (_mm256_setzero_si256(), _mm256_setzero_ps())
    }
    #[inline(always)]
    unsafe fn row(w: *const u8) -> Row {
        let w = &*w.cast::<blocks::Q6K>();
        let scales = _mm_loadu_si128(w.scales.as_ptr().cast());
        let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        Row {
            d: half(w.d),
            scales: _mm256_cvtepi8_epi16(scales),
            halves: _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, order)),
        }
    }
    #[inline(always)]
    unsafe fn column(x: *const u8) -> (f32, __m256i) {
        let x = &*x.cast::<Q8K>();
        (x.d, load(x.bsums.as_ptr()))
    }
    #[inline(always)]
    unsafe fn part(w: *const u8, row: &Row, j: usize) -> Part {
        let w = &*w.cast::<blocks::Q6K>();
        let low = w.ql.as_ptr().add(64 * j);
        let q = six(load(low), load(low.add(32)), load(w.qh.as_ptr().add(32 * j)));
        let mut scales = [row.halves; 4];
        for (i, scale) in scales.iter_mut().enumerate() {
            let at = 2 * (4 * j + i) as i16;
            *scale = _mm256_shuffle_epi8(*scale, _mm256_set1_epi16(at | (at + 1) << 8));
        }
        Part { q, scales }
    }
    #[inline(always)]
    unsafe fn add(mut sums: __m256i, part: &Part, x: *const u8, j: usize) -> __m256i {
        let x = (*x.cast::<Q8K>()).qs.as_ptr().add(128 * j);
        for i in 0..4 {
            let pairs = _mm256_maddubs_epi16(part.q[i], load(x.add(32 * i)));
            sums = I::dot2(sums, part.scales[i], pairs);
        }
        sums
    }
    #[inline(always)]
    unsafe fn close(total: __m256, sums: __m256i, row: &Row, column: &(f32, __m256i)) -> __m256 {
        // ggml subtracts the offset in these lanes: rounding depends on it.
        let offset = _mm256_slli_epi32::<5>(_mm256_madd_epi16(column.1, row.scales));
        let sums = _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, offset));
        _mm256_fmadd_ps(_mm256_set1_ps(column.0 * row.d), sums, total)
    }
    #[inline(always)]
    unsafe fn finish(total: __m256, _: Option<(*const u8, *const u8)>) -> f32 {
        sum_floats(total)
    }
}

impl<I> Tile for Q6K<I> {
    const BYTES: usize = size_of::<blocks::Q6K>();
    const SCALES: usize = 2;
    const MINS: bool = false;
    const SIGNED: bool = false;

    #[inline(always)]
    unsafe fn unpack(panel: &mut Panel, rows: &[*const u8; 8]) {
        for (r, w) in rows.iter().enumerate() {
            let w = &*w.cast::<blocks::Q6K>();
            panel.d[r] = half(w.d);
            for (i, &scale) in w.scales.iter().enumerate() {
                panel.scales[i][r] = [i16::from(scale); 2];
                panel.mins[i / 2][r][i % 2] = i16::from(scale);
            }
        }
        for j in 0..2 {
            let a = tile::transposed(rows, 64 * j);
            let b = tile::transposed(rows, 64 * j + 32);
            let high = tile::transposed(rows, 128 + 32 * j);
            for g in 0..8 {
                for (i, q) in six(a[g], b[g], high[g]).into_iter().enumerate() {
                    panel.set(32 * j + 8 * i + g, q);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn products(q: &[__m256i; 8], scales: [__m256i; 2], x: *const i32) -> __m256i {
        let mut sums = _mm256_setzero_si256();
        for g in (0..8).step_by(2) {
            // 2 pairs of 63 * 127 fit in 16 bits.
            let four =
                _mm256_add_epi16(tile::pairs(q[g], x.add(g)), tile::pairs(q[g + 1], x.add(g + 1)));
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(scales[g / 4], four));
        }
        sums
    }
    #[inline(always)]
    unsafe fn offset<L: Lanes>(panels: &[Panel], x: &Q8K) -> L::Ints {
        L::times_pairs(panels, offset_of!(Panel, mins), tile::pairs_of_sums(x), 5)
    }
}
