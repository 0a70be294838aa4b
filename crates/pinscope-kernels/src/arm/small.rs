//! Q4_0, Q8_0 and MXFP4: blocks of 32 with one scale, inputs in `q8_0`. ggml
//! takes two at a time, and a last block without a partner apart.

use std::arch::aarch64::*;
use std::marker::PhantomData;

use super::common::{dot_32, half, nibbles, table, two_sums, Dot};
use crate::blocks;
use crate::rows::Steps;

/// Unpacked weights.
pub type Part = [int8x16_t; 2];

const INPUT_BLOCK: usize = size_of::<blocks::Q8_0>();

/// Sums of products with block `x` in the lanes of `D`.
#[inline(always)]
unsafe fn products<D: Dot>(part: &Part, x: *const u8) -> int32x4_t {
    dot_32::<D>(part, (*x.cast::<blocks::Q8_0>()).qs.as_ptr())
}

#[inline(always)]
unsafe fn input_scale(x: *const u8) -> f32 {
    half((*x.cast::<blocks::Q8_0>()).d)
}

/// `type_`: two blocks a step, with weights `unpack(block)` and the scale
/// `scale(block)`. `close` and `finish` add steps and end a row.
macro_rules! two_blocks {
    ($type_:ident, $total:ty, $zero:expr, $unpack:expr, $scale:expr, $close:expr, $finish:expr) => {
        #[doc = concat!("Weights of ", stringify!($type_), ".")]
        pub struct $type_<D>(PhantomData<D>);

        impl<D: Dot> Steps for $type_<D> {
            const LEN: usize = 64;
            const BYTES: usize = 2 * size_of::<blocks::$type_>();
            const INPUT_BYTES: usize = 2 * INPUT_BLOCK;
            const PARTS: usize = 2;
            type Row = [f32; 2];
            type Column = [f32; 2];
            type Part = Part;
            type Sums = [int32x4_t; 2];
            type Total = $total;

            #[inline(always)]
            unsafe fn zero() -> (Self::Sums, Self::Total) {
                ([vdupq_n_s32(0); 2], $zero)
            }
            #[inline(always)]
            unsafe fn row(w: *const u8) -> [f32; 2] {
                let w = w.cast::<blocks::$type_>();
                [$scale(&*w), $scale(&*w.add(1))]
            }
            #[inline(always)]
            unsafe fn column(x: *const u8) -> [f32; 2] {
                [input_scale(x), input_scale(x.add(INPUT_BLOCK))]
            }
            #[inline(always)]
            unsafe fn part(w: *const u8, _: &[f32; 2], j: usize) -> Part {
                $unpack(&*w.cast::<blocks::$type_>().add(j))
            }
            #[inline(always)]
            unsafe fn add(mut sums: Self::Sums, part: &Part, x: *const u8, j: usize) -> Self::Sums {
                sums[j] = products::<D>(part, x.add(j * INPUT_BLOCK));
                sums
            }
            #[inline(always)]
            unsafe fn close(
                total: Self::Total,
                sums: Self::Sums,
                row: &[f32; 2],
                column: &[f32; 2],
            ) -> Self::Total {
                $close(total, sums, [row[0] * column[0], row[1] * column[1]])
            }
            #[inline(always)]
            unsafe fn finish(total: Self::Total, rest: Option<(*const u8, *const u8)>) -> f32 {
                let rest = rest.map(|(w, x)| {
                    let w = &*w.cast::<blocks::$type_>();
                    let sum = vaddvq_s32(products::<D>(&$unpack(w), x)) as f32;
                    (sum, $scale(w), input_scale(x))
                });
                $finish(total, rest)
            }
        }
    };
}

/// Two times four sums, one for even and one for odd blocks.
type Lanes = [float32x4_t; 2];

/// Adds scaled sums; ggml rounds products here.
#[inline(always)]
unsafe fn add_lanes(total: Lanes, sums: [int32x4_t; 2], scales: [f32; 2]) -> Lanes {
    let scaled = |i: usize| vmulq_n_f32(vcvtq_f32_s32(sums[i]), scales[i]);
    [vaddq_f32(total[0], scaled(0)), vaddq_f32(total[1], scaled(1))]
}

/// All lanes, in ggml's order.
#[inline(always)]
unsafe fn sum_lanes(total: Lanes) -> f32 {
    let pairs = vpaddq_f32(total[0], total[1]);
    let sums = vpaddq_f32(pairs, pairs);
    vgetq_lane_f32::<0>(sums) + vgetq_lane_f32::<1>(sums)
}

two_blocks!(
    Q8_0,
    Lanes,
    [vdupq_n_f32(0.0); 2],
    |w: &blocks::Q8_0| [vld1q_s8(w.qs.as_ptr()), vld1q_s8(w.qs.as_ptr().add(16))],
    |w: &blocks::Q8_0| half(w.d),
    add_lanes,
    |total, rest: Option<(f32, f32, f32)>| match rest {
        Some((sum, w, x)) => sum.mul_add(w * x, sum_lanes(total)),
        None => sum_lanes(total),
    }
);

two_blocks!(
    Q4_0,
    Lanes,
    [vdupq_n_f32(0.0); 2],
    |w: &blocks::Q4_0| nibbles(w.qs.as_ptr())
        .map(|q| vsubq_s8(vreinterpretq_s8_u8(q), vdupq_n_s8(8))),
    |w: &blocks::Q4_0| half(w.d),
    add_lanes,
    |total, rest: Option<(f32, f32, f32)>| match rest {
        Some((sum, w, x)) => (sum * w).mul_add(x, sum_lanes(total)),
        None => sum_lanes(total),
    }
);

two_blocks!(
    Mxfp4,
    f32,
    0.0,
    |w: &blocks::Mxfp4| table(&blocks::FP4, nibbles(w.qs.as_ptr())),
    |w: &blocks::Mxfp4| blocks::e8m0_half(w.e),
    |total: f32, sums: [int32x4_t; 2], scales: [f32; 2]| {
        let (a, b) = two_sums(sums[0], sums[1]);
        total + b.mul_add(scales[1], a * scales[0])
    },
    |total: f32, rest: Option<(f32, f32, f32)>| match rest {
        Some((sum, w, x)) => sum.mul_add(w * x, total),
        None => total,
    }
);
