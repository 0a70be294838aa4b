//! IQ4_XS: blocks of 256 whose weights are places in a table, with a scale for
//! each 32.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::offset_of;

use super::common::{half, load, nibbles, signed_pairs, sum_floats, table};
use super::isa::Isa;
use super::tile::{self, Lanes, Panel, Tile};
use crate::blocks::{self, iq4_xs_scales, Q8K};
use crate::rows::Steps;

/// Weights and their scale.
pub type Part = (__m256i, __m256i);

/// A block's scale, and eight for 32 weights each, in both halves.
pub type Row = (f32, __m256i);

/// 4 bits, not evenly spaced.
pub struct Iq4Xs<I>(PhantomData<I>);

impl<I: Isa> Steps for Iq4Xs<I> {
    const LEN: usize = 256;
    const BYTES: usize = size_of::<blocks::Iq4Xs>();
    const INPUT_BYTES: usize = size_of::<Q8K>();
    const PARTS: usize = 8;
    type Row = Row;
    type Column = f32;
    type Part = Part;
    type Sums = __m256i;
    type Total = __m256;

    #[inline(always)]
    unsafe fn zero() -> (__m256i, __m256) {
        (_mm256_setzero_si256(), _mm256_setzero_ps())
    }
    #[inline(always)]
    unsafe fn row(w: *const u8) -> Row {
        let w = &*w.cast::<blocks::Iq4Xs>();
        let scales = _mm_cvtsi64_si128(iq4_xs_scales(w.scales_l, w.scales_h) as i64);
        let scales = _mm_sub_epi16(_mm_cvtepu8_epi16(scales), _mm_set1_epi16(32));
        (half(w.d), _mm256_broadcastsi128_si256(scales))
    }
    #[inline(always)]
    unsafe fn column(x: *const u8) -> f32 {
        (*x.cast::<Q8K>()).d
    }
    #[inline(always)]
    unsafe fn part(w: *const u8, row: &Row, j: usize) -> Part {
        let w = &*w.cast::<blocks::Iq4Xs>();
        let places = nibbles(w.qs.as_ptr().add(16 * j));
        let weights = _mm256_shuffle_epi8(table(&blocks::IQ4), places);
        let at = 2 * j as i16;
        (weights, _mm256_shuffle_epi8(row.1, _mm256_set1_epi16(at | (at + 1) << 8)))
    }
    #[inline(always)]
    unsafe fn add(sums: __m256i, part: &Part, x: *const u8, j: usize) -> __m256i {
        let x = load((*x.cast::<Q8K>()).qs.as_ptr().add(32 * j));
        let pairs = signed_pairs(_mm256_abs_epi8(part.0), part.0, x);
        I::dot2(sums, pairs, part.1)
    }
    #[inline(always)]
    unsafe fn close(total: __m256, sums: __m256i, row: &Row, column: &f32) -> __m256 {
        _mm256_fmadd_ps(_mm256_set1_ps(row.0 * column), _mm256_cvtepi32_ps(sums), total)
    }
    #[inline(always)]
    unsafe fn finish(total: __m256, _: Option<(*const u8, *const u8)>) -> f32 {
        sum_floats(total)
    }
}

impl<I> Tile for Iq4Xs<I> {
    const BYTES: usize = size_of::<blocks::Iq4Xs>();
    const SCALES: usize = 1;
    const MINS: bool = false;
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn unpack(panel: &mut Panel, rows: &[*const u8; 8]) {
        for (r, w) in rows.iter().enumerate() {
            let w = &*w.cast::<blocks::Iq4Xs>();
            panel.d[r] = half(w.d);
            let scales = iq4_xs_scales(w.scales_l, w.scales_h).to_le_bytes();
            for (i, scale) in scales.into_iter().enumerate() {
                panel.scales[i][r] = [i16::from(scale) - 32; 2];
            }
        }
        let (values, low) = (table(&blocks::IQ4), _mm256_set1_epi8(15));
        for j in 0..4 {
            let q = tile::transposed(rows, 8 + 32 * j);
            for (g, q) in q.into_iter().enumerate() {
                // 16 bytes hold 32 weights: low nibbles first.
                let at = 16 * j + 8 * (g / 4) + g % 4;
                let upper = _mm256_srli_epi16::<4>(q);
                panel.set(at, _mm256_shuffle_epi8(values, _mm256_and_si256(q, low)));
                panel.set(at + 4, _mm256_shuffle_epi8(values, _mm256_and_si256(upper, low)));
            }
        }
    }
    #[inline(always)]
    unsafe fn products(q: &[__m256i; 8], scales: [__m256i; 2], x: *const i32) -> __m256i {
        let mut sums = _mm256_setzero_si256();
        for (g, &q) in q.iter().enumerate() {
            let x = _mm256_set1_epi32(x.add(g).read_unaligned());
            let pairs = signed_pairs(_mm256_abs_epi8(q), q, x);
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(scales[0], pairs));
        }
        sums
    }
    #[inline(always)]
    unsafe fn offset<L: Lanes>(panels: &[Panel], x: &Q8K) -> L::Ints {
        if !L::UNSIGNED {
            return L::zero().0;
        }
        // Each scale is there twice, as are the sums of its 32 inputs.
        L::times_pairs(panels, offset_of!(Panel, scales), tile::pairs_of_sums(x), 7)
    }
}
