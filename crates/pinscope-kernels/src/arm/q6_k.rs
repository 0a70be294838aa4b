//! Q6_K: blocks of 256 with a scale for each 16.

use std::arch::aarch64::*;
use std::marker::PhantomData;

use super::common::{half, Dot, Part};
use crate::blocks::{self, Q8K};
use crate::rows::Steps;

/// A block's scales: for the weights, and 32 times as much for their offset.
#[derive(Clone, Copy)]
pub struct Row {
    d: f32,
    scales: [int32x4_t; 4],
    offsets: [int16x8_t; 2],
}

/// A block's scale, and sums of 16 inputs.
pub type Column = (f32, [int16x8_t; 2]);

/// 6 bits.
pub struct Q6K<D>(PhantomData<D>);

impl<D: Dot> Steps for Q6K<D> {
    const LEN: usize = 256;
    const BYTES: usize = size_of::<blocks::Q6K>();
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
        let w = &*w.cast::<blocks::Q6K>();
        let scales = vld1q_s8(w.scales.as_ptr());
        let (a, b) = (vmovl_s8(vget_low_s8(scales)), vmovl_high_s8(scales));
        Row {
            d: half(w.d),
            scales: [
                vmovl_s16(vget_low_s16(a)),
                vmovl_high_s16(a),
                vmovl_s16(vget_low_s16(b)),
                vmovl_high_s16(b),
            ],
            offsets: [vshlq_n_s16::<5>(a), vshlq_n_s16::<5>(b)],
        }
    }
    #[inline(always)]
    unsafe fn column(x: *const u8) -> Column {
        let x = &*x.cast::<Q8K>();
        let sums = x.bsums.as_ptr();
        (x.d, [vld1q_s16(sums), vld1q_s16(sums.add(8))])
    }
    /// Even parts are low nibbles of 64 bytes, odd ones their high nibbles.
    #[inline(always)]
    unsafe fn part(w: *const u8, row: &Row, j: usize) -> Part {
        let w = &*w.cast::<blocks::Q6K>();
        let (low, high) = (w.ql.as_ptr().add(32 * (j & 2)), w.qh.as_ptr().add(16 * (j & 2)));
        let mut q = [vdupq_n_s8(0); 4];
        for (i, q) in q.iter_mut().enumerate() {
            let (nibbles, bits) = (vld1q_u8(low.add(16 * i)), vld1q_u8(high.add(16 * (i % 2))));
            // Two bits for even parts are lowest here, for odd ones two nibbles higher.
            let bits = if i < 2 { bits } else { vshrq_n_u8::<2>(bits) };
            let six = if j % 2 == 0 {
                vsliq_n_u8::<4>(nibbles, bits)
            } else {
                vsriq_n_u8::<4>(bits, nibbles)
            };
            *q = vreinterpretq_s8_u8(vandq_u8(six, vdupq_n_u8(63)));
        }
        Part { q, scales: row.scales[j] }
    }
    #[inline(always)]
    unsafe fn add(sums: int32x4_t, part: &Part, x: *const u8, j: usize) -> int32x4_t {
        let x = (*x.cast::<Q8K>()).qs.as_ptr().add(64 * j);
        let mut dots = [vdupq_n_s32(0); 4];
        for (i, dot) in dots.iter_mut().enumerate() {
            *dot = D::dot(*dot, part.q[i], vld1q_s8(x.add(16 * i)));
        }
        let four = vpaddq_s32(vpaddq_s32(dots[0], dots[1]), vpaddq_s32(dots[2], dots[3]));
        vmlaq_s32(sums, four, part.scales)
    }
    #[inline(always)]
    unsafe fn close(total: f32, mut sums: int32x4_t, row: &Row, column: &Column) -> f32 {
        for (&offsets, &inputs) in row.offsets.iter().zip(&column.1) {
            sums = vmlsl_s16(sums, vget_low_s16(offsets), vget_low_s16(inputs));
            sums = vmlsl_high_s16(sums, offsets, inputs);
        }
        (row.d * column.0).mul_add(vaddvq_s32(sums) as f32, total)
    }
    #[inline(always)]
    unsafe fn finish(total: f32, _: Option<(*const u8, *const u8)>) -> f32 {
        total
    }
}
