//! Q4_K and Q5_K: blocks of 256 with a scale and a minimum for each 32.

use std::arch::aarch64::*;
use std::marker::PhantomData;

use super::common::{add_64, half, nibbles, twice, two_sums, widened, Dot, Part};
use crate::blocks::{self, scales_and_mins, Q8K};
use crate::rows::Steps;

/// A block's scales.
#[derive(Clone, Copy)]
pub struct Row {
    d: f32,
    dmin: f32,
    scales: [int32x4_t; 4],
    mins: int16x8_t,
}

/// What a block of the input has once; sums are of 32.
#[derive(Clone, Copy)]
pub struct Column {
    d: f32,
    sums: int16x8_t,
}

#[inline(always)]
unsafe fn row(d: u16, dmin: u16, packed: [u8; 12]) -> Row {
    let (scales, mins) = scales_and_mins(packed);
    Row { d: half(d), dmin: half(dmin), scales: twice(widened(scales)), mins: widened(mins) }
}

#[inline(always)]
unsafe fn column(x: *const u8) -> Column {
    let x = &*x.cast::<Q8K>();
    let sums = x.bsums.as_ptr();
    Column { d: x.d, sums: vpaddq_s16(vld1q_s16(sums), vld1q_s16(sums.add(8))) }
}

/// A block's sum of weights and of minima.
#[inline(always)]
unsafe fn block_sums(sums: int32x4_t, row: &Row, column: &Column) -> (f32, f32) {
    let mins = vmull_s16(vget_low_s16(row.mins), vget_low_s16(column.sums));
    two_sums(sums, vmlal_high_s16(mins, row.mins, column.sums))
}

/// 4 bits.
pub struct Q4K<D>(PhantomData<D>);

impl<D: Dot> Steps for Q4K<D> {
    const LEN: usize = 256;
    const BYTES: usize = size_of::<blocks::Q4K>();
    const INPUT_BYTES: usize = size_of::<Q8K>();
    const PARTS: usize = 4;
    type Row = Row;
    type Column = Column;
    type Part = Part;
    type Sums = int32x4_t;
    type Total = f32;

    #[inline(always)]
    unsafe fn zero() -> (int32x4_t, f32) {
        (vdupq_n_s32(0), 0.0)
    }
    #[inline(always)]
    unsafe fn row(w: *const u8) -> Row {
        let w = &*w.cast::<blocks::Q4K>();
        row(w.d, w.dmin, w.scales)
    }
    #[inline(always)]
    unsafe fn column(x: *const u8) -> Column {
        column(x)
    }
    #[inline(always)]
    unsafe fn part(w: *const u8, row: &Row, j: usize) -> Part {
        let q = (*w.cast::<blocks::Q4K>()).qs.as_ptr().add(32 * j);
        let ([a, c], [b, d]) = (nibbles(q), nibbles(q.add(16)));
        Part { q: [a, b, c, d].map(|q| vreinterpretq_s8_u8(q)), scales: row.scales[j] }
    }
    #[inline(always)]
    unsafe fn add(sums: int32x4_t, part: &Part, x: *const u8, j: usize) -> int32x4_t {
        add_64::<D>(sums, part, x, j)
    }
    #[inline(always)]
    unsafe fn close(total: f32, sums: int32x4_t, row: &Row, column: &Column) -> f32 {
        let (sum, mins) = block_sums(sums, row, column);
        let total = (-(column.d * row.dmin)).mul_add(mins, total);
        (column.d * row.d).mul_add(sum, total)
    }
    #[inline(always)]
    unsafe fn finish(total: f32, _: Option<(*const u8, *const u8)>) -> f32 {
        total
    }
}

/// 5 bits.
pub struct Q5K<D>(PhantomData<D>);

/// 16 low and 16 high weights; their fifth bits are bits `2 * j` and
/// `2 * j + 1` of `high`.
#[inline(always)]
unsafe fn five(q: uint8x16_t, high: uint8x16_t, j: usize) -> [int8x16_t; 2] {
    let high = vshlq_u8(high, vdupq_n_s8(-2 * j as i8));
    let low = vsliq_n_u8::<4>(q, high);
    let upper = vsriq_n_u8::<4>(vshlq_n_u8::<3>(high), q);
    [low, upper].map(|q| vreinterpretq_s8_u8(vandq_u8(q, vdupq_n_u8(31))))
}

impl<D: Dot> Steps for Q5K<D> {
    const LEN: usize = 256;
    const BYTES: usize = size_of::<blocks::Q5K>();
    const INPUT_BYTES: usize = size_of::<Q8K>();
    const PARTS: usize = 4;
    type Row = Row;
    type Column = Column;
    type Part = Part;
    type Sums = int32x4_t;
    type Total = f32;

    #[inline(always)]
    unsafe fn zero() -> (int32x4_t, f32) {
        (vdupq_n_s32(0), 0.0)
    }
    #[inline(always)]
    unsafe fn row(w: *const u8) -> Row {
        let w = &*w.cast::<blocks::Q5K>();
        row(w.d, w.dmin, w.scales)
    }
    #[inline(always)]
    unsafe fn column(x: *const u8) -> Column {
        column(x)
    }
    #[inline(always)]
    unsafe fn part(w: *const u8, row: &Row, j: usize) -> Part {
        let w = &*w.cast::<blocks::Q5K>();
        let (q, high) = (w.qs.as_ptr().add(32 * j), w.qh.as_ptr());
        let [a, c] = five(vld1q_u8(q), vld1q_u8(high), j);
        let [b, d] = five(vld1q_u8(q.add(16)), vld1q_u8(high.add(16)), j);
        Part { q: [a, b, c, d], scales: row.scales[j] }
    }
    #[inline(always)]
    unsafe fn add(sums: int32x4_t, part: &Part, x: *const u8, j: usize) -> int32x4_t {
        add_64::<D>(sums, part, x, j)
    }
    #[inline(always)]
    unsafe fn close(total: f32, sums: int32x4_t, row: &Row, column: &Column) -> f32 {
        let (sum, mins) = block_sums(sums, row, column);
        total + (column.d * row.d).mul_add(sum, -(mins * (column.d * row.dmin)))
    }
    #[inline(always)]
    unsafe fn finish(total: f32, _: Option<(*const u8, *const u8)>) -> f32 {
        total
    }
}
