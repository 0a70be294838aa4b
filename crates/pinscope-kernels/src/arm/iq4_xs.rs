//! IQ4_XS: blocks of 256 whose weights are places in a table, with a scale for
//! each 32.

use std::arch::aarch64::*;
use std::marker::PhantomData;

use super::common::{add_64, half, nibbles, table, twice, widened, Dot, Part};
use crate::blocks::{self, iq4_xs_scales, Q8K};
use crate::rows::Steps;

/// 4 bits, not evenly spaced.
pub struct Iq4Xs<D>(PhantomData<D>);

impl<D: Dot> Steps for Iq4Xs<D> {
    const LEN: usize = 256;
    const BYTES: usize = size_of::<blocks::Iq4Xs>();
    const INPUT_BYTES: usize = size_of::<Q8K>();
    const PARTS: usize = 4;
    /// A block's scale, and eight for 32 weights each.
    type Row = (f32, [int32x4_t; 4]);
    type Column = f32;
    type Part = Part;
    type Sums = int32x4_t;
    type Total = f32;

    #[inline(always)]
    unsafe fn zero() -> (int32x4_t, f32) {
        (vdupq_n_s32(0), 0.0)
    }
    #[inline(always)]
    unsafe fn row(w: *const u8) -> Self::Row {
        let w = &*w.cast::<blocks::Iq4Xs>();
        let scales = widened(iq4_xs_scales(w.scales_l, w.scales_h));
        (half(w.d), twice(vsubq_s16(scales, vdupq_n_s16(32))))
    }
    #[inline(always)]
    unsafe fn column(x: *const u8) -> f32 {
        (*x.cast::<Q8K>()).d
    }
    #[inline(always)]
    unsafe fn part(w: *const u8, row: &Self::Row, j: usize) -> Part {
        let q = (*w.cast::<blocks::Iq4Xs>()).qs.as_ptr().add(32 * j);
        let [a, b] = table(&blocks::IQ4, nibbles(q));
        let [c, d] = table(&blocks::IQ4, nibbles(q.add(16)));
        Part { q: [a, b, c, d], scales: row.1[j] }
    }
    #[inline(always)]
    unsafe fn add(sums: int32x4_t, part: &Part, x: *const u8, j: usize) -> int32x4_t {
        add_64::<D>(sums, part, x, j)
    }
    #[inline(always)]
    unsafe fn close(total: f32, sums: int32x4_t, row: &Self::Row, column: &f32) -> f32 {
        (row.0 * column).mul_add(vaddvq_s32(sums) as f32, total)
    }
    #[inline(always)]
    unsafe fn finish(total: f32, _: Option<(*const u8, *const u8)>) -> f32 {
        total
    }
}
