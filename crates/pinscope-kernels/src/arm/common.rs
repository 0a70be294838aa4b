//! Steps that several types need.

use std::arch::aarch64::*;
use std::arch::asm;

use crate::blocks::Q8K;

/// Products of signed bytes, summed up in four lanes.
pub trait Dot {
    /// `sums` and the products of `a` and `b`; those of `b` are not -128. Which
    /// products come to which lane is part of the result of some types.
    unsafe fn dot(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t;
}

/// The dot product instruction: four neighbours a lane.
pub struct Sdot;

impl Dot for Sdot {
    #[inline(always)]
    unsafe fn dot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // `vdotq_s32` is not stable.
        asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sums, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
        sums
    }
}

/// Long products: two neighbours of each half a lane, as in ggml without dot
/// products.
pub struct Long;

impl Dot for Long {
    #[inline(always)]
    unsafe fn dot(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // 2 products of 128 * 127 fit in 16 bits.
        let two = vmlal_high_s8(vmull_s8(vget_low_s8(a), vget_low_s8(b)), a, b);
        vpadalq_s16(sums, two)
    }
}

/// The sum of the products of 32 weights, in four lanes.
#[inline(always)]
pub unsafe fn dot_32<D: Dot>(q: &[int8x16_t], x: *const i8) -> int32x4_t {
    D::dot(D::dot(vdupq_n_s32(0), q[0], vld1q_s8(x)), q[1], vld1q_s8(x.add(16)))
}

/// 64 weights, and their scales.
#[derive(Clone, Copy)]
pub struct Part {
    pub q: [int8x16_t; 4],
    pub scales: int32x4_t,
}

/// Adds scaled products of part `j` of a block with a scale for each 32 weights.
#[inline(always)]
pub unsafe fn add_64<D: Dot>(sums: int32x4_t, part: &Part, x: *const u8, j: usize) -> int32x4_t {
    let x = (*x.cast::<Q8K>()).qs.as_ptr().add(64 * j);
    let both = vpaddq_s32(dot_32::<D>(&part.q[..2], x), dot_32::<D>(&part.q[2..], x.add(32)));
    vmlaq_s32(sums, both, part.scales)
}

/// Eight scales, each twice, two to a register.
#[inline(always)]
pub unsafe fn twice(scales: int16x8_t) -> [int32x4_t; 4] {
    let (a, b) = (vzip1q_s16(scales, scales), vzip2q_s16(scales, scales));
    [vmovl_s16(vget_low_s16(a)), vmovl_high_s16(a), vmovl_s16(vget_low_s16(b)), vmovl_high_s16(b)]
}

/// Eight bytes as 16 bits each.
#[inline(always)]
pub unsafe fn widened(bytes: u64) -> int16x8_t {
    vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(bytes)))
}

/// Two sums over four lanes each, as floats.
#[inline(always)]
pub unsafe fn two_sums(a: int32x4_t, b: int32x4_t) -> (f32, f32) {
    let pairs = vpaddq_s32(a, b);
    let sums = vcvtq_f32_s32(vpaddq_s32(pairs, pairs));
    (vgetq_lane_f32::<0>(sums), vgetq_lane_f32::<1>(sums))
}

/// Low and high nibbles.
#[inline(always)]
pub unsafe fn nibbles(from: *const u8) -> [uint8x16_t; 2] {
    let q = vld1q_u8(from);
    [vandq_u8(q, vdupq_n_u8(15)), vshrq_n_u8::<4>(q)]
}

/// Values at 32 places of a table.
#[inline(always)]
pub unsafe fn table(values: &[i8; 16], places: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    let values = vld1q_s8(values.as_ptr());
    [vqtbl1q_s8(values, places[0]), vqtbl1q_s8(values, places[1])]
}

/// A half float's value.
#[inline(always)]
pub unsafe fn half(bits: u16) -> f32 {
    let value: f32;
    // The intrinsic is younger than the Rust that the workspace asks for.
    asm!("fcvt {0:s}, {1:h}", lateout(vreg) value, in(vreg) bits,
        options(pure, nomem, nostack, preserves_flags));
    value
}
