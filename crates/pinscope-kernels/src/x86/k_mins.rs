//! Q4_K and Q5_K: blocks of 256 with a scale and a minimum for each 32.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::offset_of;

use super::common::{load, sum_floats, sums_of_32};
use super::isa::Isa;
use super::tile::{self, Lanes, Panel, Tile};
use crate::blocks::{self, scales_and_mins, Q8K};
use crate::rows::Steps;

/// A block's scales.
#[derive(Clone, Copy)]
pub struct Row {
    d: f32,
    dmin: f32,
    /// Eight bytes, four times.
    scales: __m256i,
    /// Eight of 16 bits.
    mins: __m128i,
}

/// What a block of the input has once.
#[derive(Clone, Copy)]
pub struct Column {
    d: f32,
    sums: __m128i,
}

/// 32 low and 32 high weights, and their scales.
#[derive(Clone, Copy)]
pub struct Part {
    q: [__m256i; 2],
    scales: [__m256i; 2],
}

/// Both halves of the sum: of scaled weights, and of minima.
#[derive(Clone, Copy)]
pub struct Q4Total(__m256, __m128);

/// ggml adds a block's minima as one number here.
#[derive(Clone, Copy)]
pub struct Q5Total(__m256, f32);

#[inline(always)]
unsafe fn row(halves: *const u16, packed: [u8; 12]) -> Row {
    let (scales, mins) = scales_and_mins(packed);
    let d = _mm_cvtph_ps(_mm_cvtsi32_si128(halves.cast::<i32>().read_unaligned()));
    Row {
        d: _mm_cvtss_f32(d),
        dmin: _mm_cvtss_f32(_mm_movehdup_ps(d)),
        scales: _mm256_set1_epi64x(scales as i64),
        mins: _mm_cvtepu8_epi16(_mm_cvtsi64_si128(mins as i64)),
    }
}

#[inline(always)]
unsafe fn column(x: *const u8) -> Column {
    let x = &*x.cast::<Q8K>();
    Column { d: x.d, sums: sums_of_32(&x.bsums) }
}

/// Byte `i` of the scales as 16 bits in all lanes.
#[inline(always)]
unsafe fn scale(scales: __m256i, i: usize) -> __m256i {
    _mm256_shuffle_epi8(scales, _mm256_set1_epi16(i as i16 | 0x8000u16 as i16))
}

#[inline(always)]
unsafe fn add<I: Isa>(sums: __m256i, part: &Part, x: *const u8, j: usize) -> __m256i {
    let x = (*x.cast::<Q8K>()).qs.as_ptr().add(64 * j);
    let low = _mm256_maddubs_epi16(part.q[0], load(x));
    let high = _mm256_maddubs_epi16(part.q[1], load(x.add(32)));
    I::dot2(I::dot2(sums, part.scales[0], low), part.scales[1], high)
}

#[inline(always)]
unsafe fn scaled(total: __m256, sums: __m256i, row: &Row, column: &Column) -> __m256 {
    _mm256_fmadd_ps(_mm256_set1_ps(column.d * row.d), _mm256_cvtepi32_ps(sums), total)
}

/// 4 bits.
pub struct Q4K<I>(PhantomData<I>);

impl<I: Isa> Steps for Q4K<I> {
    const LEN: usize = 256;
    const BYTES: usize = size_of::<blocks::Q4K>();
    const INPUT_BYTES: usize = size_of::<Q8K>();
    const PARTS: usize = 4;
    type Row = Row;
    type Column = Column;
    type Part = Part;
    type Sums = __m256i;
    type Total = Q4Total;

    #[inline(always)]
    unsafe fn zero() -> (__m256i, Q4Total) {
        (_mm256_setzero_si256(), Q4Total(_mm256_setzero_ps(), _mm_setzero_ps()))
    }
    #[inline(always)]
    unsafe fn row(w: *const u8) -> Row {
        let w = &*w.cast::<blocks::Q4K>();
        row(&w.d, w.scales)
    }
    #[inline(always)]
    unsafe fn column(x: *const u8) -> Column {
        column(x)
    }
    #[inline(always)]
    unsafe fn part(w: *const u8, row: &Row, j: usize) -> Part {
        let q = load((*w.cast::<blocks::Q4K>()).qs.as_ptr().add(32 * j));
        let low = _mm256_set1_epi8(15);
        Part {
            q: [_mm256_and_si256(q, low), _mm256_and_si256(_mm256_srli_epi16::<4>(q), low)],
            scales: [scale(row.scales, 2 * j), scale(row.scales, 2 * j + 1)],
        }
    }
    #[inline(always)]
    unsafe fn add(sums: __m256i, part: &Part, x: *const u8, j: usize) -> __m256i {
        add::<I>(sums, part, x, j)
    }
    #[inline(always)]
    unsafe fn close(total: Q4Total, sums: __m256i, row: &Row, column: &Column) -> Q4Total {
        let mins = _mm_cvtepi32_ps(_mm_madd_epi16(row.mins, column.sums));
        Q4Total(
            scaled(total.0, sums, row, column),
            _mm_fmadd_ps(_mm_set1_ps(-column.d * row.dmin), mins, total.1),
        )
    }
    #[inline(always)]
    unsafe fn finish(total: Q4Total, _: Option<(*const u8, *const u8)>) -> f32 {
        let mins = _mm_add_ps(total.1, _mm_movehl_ps(total.1, total.1));
        let mins = _mm_add_ss(mins, _mm_movehdup_ps(mins));
        sum_floats(total.0) + _mm_cvtss_f32(mins)
    }
}

/// 5 bits.
pub struct Q5K<I>(PhantomData<I>);

/// Moves bit `i` of each byte to bit 4; other bits are rubbish.
#[inline(always)]
unsafe fn bit_to_4(bits: __m256i, i: usize) -> __m256i {
    if i < 4 {
        _mm256_sll_epi16(bits, _mm_cvtsi32_si128(4 - i as i32))
    } else {
        _mm256_srl_epi16(bits, _mm_cvtsi32_si128(i as i32 - 4))
    }
}

/// Five bits of nibbles and their high bits.
#[inline(always)]
unsafe fn five(nibbles: __m256i, high: __m256i, i: usize) -> __m256i {
    let fifth = _mm256_and_si256(bit_to_4(high, i), _mm256_set1_epi8(16));
    _mm256_or_si256(_mm256_and_si256(nibbles, _mm256_set1_epi8(15)), fifth)
}

impl<I: Isa> Steps for Q5K<I> {
    const LEN: usize = 256;
    const BYTES: usize = size_of::<blocks::Q5K>();
    const INPUT_BYTES: usize = size_of::<Q8K>();
    const PARTS: usize = 4;
    type Row = Row;
    type Column = Column;
    type Part = Part;
    type Sums = __m256i;
    type Total = Q5Total;

    #[inline(always)]
    unsafe fn zero() -> (__m256i, Q5Total) {
        (_mm256_setzero_si256(), Q5Total(_mm256_setzero_ps(), 0.0))
    }
    #[inline(always)]
    unsafe fn row(w: *const u8) -> Row {
        let w = &*w.cast::<blocks::Q5K>();
        row(&w.d, w.scales)
    }
    #[inline(always)]
    unsafe fn column(x: *const u8) -> Column {
        column(x)
    }
    #[inline(always)]
    unsafe fn part(w: *const u8, row: &Row, j: usize) -> Part {
        let w = &*w.cast::<blocks::Q5K>();
        let (q, high) = (load(w.qs.as_ptr().add(32 * j)), load(w.qh.as_ptr()));
        Part {
            q: [five(q, high, 2 * j), five(_mm256_srli_epi16::<4>(q), high, 2 * j + 1)],
            scales: [scale(row.scales, 2 * j), scale(row.scales, 2 * j + 1)],
        }
    }
    #[inline(always)]
    unsafe fn add(sums: __m256i, part: &Part, x: *const u8, j: usize) -> __m256i {
        add::<I>(sums, part, x, j)
    }
    #[inline(always)]
    unsafe fn close(total: Q5Total, sums: __m256i, row: &Row, column: &Column) -> Q5Total {
        let mins = _mm_madd_epi16(row.mins, column.sums);
        let mins = _mm_add_epi32(mins, _mm_unpackhi_epi64(mins, mins));
        let mins = _mm_add_epi32(mins, _mm_shuffle_epi32::<0b01>(mins));
        // The compilers that build ggml make one operation of this, and of
        // nothing else in these kernels.
        let mins = (-column.d * row.dmin).mul_add(_mm_cvtsi128_si32(mins) as f32, total.1);
        Q5Total(scaled(total.0, sums, row, column), mins)
    }
    #[inline(always)]
    unsafe fn finish(total: Q5Total, _: Option<(*const u8, *const u8)>) -> f32 {
        sum_floats(total.0) + total.1
    }
}

/// Fills what a panel has besides the weights.
#[inline(always)]
unsafe fn heads(panel: &mut Panel, r: usize, halves: *const u16, packed: [u8; 12]) {
    let (scales, mins) = scales_and_mins(packed);
    let d = _mm_cvtph_ps(_mm_cvtsi32_si128(halves.cast::<i32>().read_unaligned()));
    panel.d[r] = _mm_cvtss_f32(d);
    panel.dmin[r] = _mm_cvtss_f32(_mm_movehdup_ps(d));
    let (scales, mins) = (scales.to_le_bytes(), mins.to_le_bytes());
    for i in 0..8 {
        panel.scales[i][r] = [i16::from(scales[i]); 2];
        panel.mins[i / 2][r][i % 2] = i16::from(mins[i]);
    }
}

/// Sums of minima times sums of inputs.
#[inline(always)]
unsafe fn minima<L: Lanes>(panels: &[Panel], x: &Q8K) -> L::Ints {
    let mut pairs = [0i32; 4];
    _mm_storeu_si128(pairs.as_mut_ptr().cast(), sums_of_32(&x.bsums));
    L::times_pairs(panels, offset_of!(Panel, mins), pairs, 0)
}

impl<I> Tile for Q4K<I> {
    const BYTES: usize = size_of::<blocks::Q4K>();
    const SCALES: usize = 1;
    const MINS: bool = true;
    const SIGNED: bool = false;

    #[inline(always)]
    unsafe fn unpack(panel: &mut Panel, rows: &[*const u8; 8]) {
        for (r, w) in rows.iter().enumerate() {
            let w = &*w.cast::<blocks::Q4K>();
            heads(panel, r, &w.d, w.scales);
        }
        let low = _mm256_set1_epi8(15);
        for j in 0..4 {
            let q = tile::transposed(rows, size_of::<u16>() * 2 + 12 + 32 * j);
            for (g, q) in q.into_iter().enumerate() {
                panel.set(16 * j + g, _mm256_and_si256(q, low));
                panel.set(16 * j + 8 + g, _mm256_and_si256(_mm256_srli_epi16::<4>(q), low));
            }
        }
    }
    #[inline(always)]
    unsafe fn products(q: &[__m256i; 8], scales: [__m256i; 2], x: *const i32) -> __m256i {
        // 8 pairs of 15 * 127 fit in 16 bits.
        let mut sums = tile::pairs(q[0], x);
        for (g, &q) in q.iter().enumerate().skip(1) {
            sums = _mm256_add_epi16(sums, tile::pairs(q, x.add(g)));
        }
        _mm256_madd_epi16(scales[0], sums)
    }
    #[inline(always)]
    unsafe fn offset<L: Lanes>(panels: &[Panel], x: &Q8K) -> L::Ints {
        minima::<L>(panels, x)
    }
}

impl<I> Tile for Q5K<I> {
    const BYTES: usize = size_of::<blocks::Q5K>();
    const SCALES: usize = 1;
    const MINS: bool = true;
    const SIGNED: bool = false;

    #[inline(always)]
    unsafe fn unpack(panel: &mut Panel, rows: &[*const u8; 8]) {
        for (r, w) in rows.iter().enumerate() {
            let w = &*w.cast::<blocks::Q5K>();
            heads(panel, r, &w.d, w.scales);
        }
        let high = tile::transposed(rows, 16);
        for j in 0..4 {
            let q = tile::transposed(rows, 48 + 32 * j);
            for g in 0..8 {
                panel.set(16 * j + g, five(q[g], high[g], 2 * j));
                let upper = _mm256_srli_epi16::<4>(q[g]);
                panel.set(16 * j + 8 + g, five(upper, high[g], 2 * j + 1));
            }
        }
    }
    #[inline(always)]
    unsafe fn products(q: &[__m256i; 8], scales: [__m256i; 2], x: *const i32) -> __m256i {
        // 4 pairs of 31 * 127 fit in 16 bits.
        let mut sums = [tile::pairs(q[0], x), tile::pairs(q[4], x.add(4))];
        for g in 1..4 {
            sums[0] = _mm256_add_epi16(sums[0], tile::pairs(q[g], x.add(g)));
            sums[1] = _mm256_add_epi16(sums[1], tile::pairs(q[4 + g], x.add(4 + g)));
        }
        let low = _mm256_madd_epi16(scales[0], sums[0]);
        _mm256_add_epi32(low, _mm256_madd_epi16(scales[0], sums[1]))
    }
    #[inline(always)]
    unsafe fn offset<L: Lanes>(panels: &[Panel], x: &Q8K) -> L::Ints {
        minima::<L>(panels, x)
    }
}
