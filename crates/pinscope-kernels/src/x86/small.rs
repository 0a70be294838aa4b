//! Q4_0, Q8_0 and MXFP4: blocks of 32 with one scale, inputs in `q8_0`.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::common::{halves, load, nibbles, sum_floats, table};
use super::isa::Isa;
use crate::blocks;
use crate::rows::Steps;

/// Products of 32 signed weights, sums of four each.
#[inline(always)]
unsafe fn signed<I: Isa>(weights: __m256i, x: *const u8) -> __m256i {
    let x = load((*x.cast::<blocks::Q8_0>()).qs.as_ptr());
    let zero = _mm256_setzero_si256();
    I::dot4(zero, _mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights))
}

/// The same of weights that were raised `by` so much that none is negative.
/// What that adds depends on the input alone: for several rows it is
/// computed once.
#[inline(always)]
unsafe fn raised<I: Isa>(weights: __m256i, by: i8, x: *const u8) -> __m256i {
    let x = load((*x.cast::<blocks::Q8_0>()).qs.as_ptr());
    let zero = _mm256_setzero_si256();
    _mm256_sub_epi32(I::dot4(zero, weights, x), I::dot4(zero, _mm256_set1_epi8(by), x))
}

#[inline(always)]
unsafe fn scaled(total: __m256, sums: __m256i, row: __m256, column: __m256) -> __m256 {
    _mm256_fmadd_ps(_mm256_mul_ps(row, column), _mm256_cvtepi32_ps(sums), total)
}

#[inline(always)]
unsafe fn input_scale(x: *const u8) -> __m256 {
    halves((*x.cast::<blocks::Q8_0>()).d)
}

/// `type_`: one block a step, whose weights are `unpack(block)`, and whose sums
/// with an input are `products(weights, input)`.
macro_rules! one_block {
    ($type_:ident, $unpack:expr, $products:expr) => {
        impl<I: Isa> Steps for $type_<I> {
            const LEN: usize = 32;
            const BYTES: usize = size_of::<blocks::$type_>();
            const INPUT_BYTES: usize = size_of::<blocks::Q8_0>();
            const PARTS: usize = 1;
            type Row = __m256;
            type Column = __m256;
            type Part = __m256i;
            type Sums = __m256i;
            type Total = __m256;

            #[inline(always)]
            unsafe fn zero() -> (__m256i, __m256) {
                (_mm256_setzero_si256(), _mm256_setzero_ps())
            }
            #[inline(always)]
            unsafe fn row(w: *const u8) -> __m256 {
                halves((*w.cast::<blocks::$type_>()).d)
            }
            #[inline(always)]
            unsafe fn column(x: *const u8) -> __m256 {
                input_scale(x)
            }
            #[inline(always)]
            unsafe fn part(w: *const u8, _: &__m256, _: usize) -> __m256i {
                $unpack(&*w.cast::<blocks::$type_>())
            }
            #[inline(always)]
            unsafe fn add(_: __m256i, part: &__m256i, x: *const u8, _: usize) -> __m256i {
                $products(*part, x)
            }
            #[inline(always)]
            unsafe fn close(total: __m256, sums: __m256i, row: &__m256, column: &__m256) -> __m256 {
                scaled(total, sums, *row, *column)
            }
            #[inline(always)]
            unsafe fn finish(total: __m256, _: Option<(*const u8, *const u8)>) -> f32 {
                sum_floats(total)
            }
        }
    };
}

/// 8 bits.
pub struct Q8_0<I>(PhantomData<I>);
one_block!(Q8_0, |block: &blocks::Q8_0| load(block.qs.as_ptr()), signed::<I>);

/// 4 bits.
pub struct Q4_0<I>(PhantomData<I>);
one_block!(Q4_0, |block: &blocks::Q4_0| nibbles(block.qs.as_ptr()), |weights, x| raised::<I>(
    weights, 8, x
));

/// 4-bit floats. ggml adds even and odd blocks apart, and a last block
/// without a partner as one number.
pub struct Mxfp4<I>(PhantomData<I>);

const HALF_STEP: usize = size_of::<blocks::Mxfp4>();
const INPUT_BLOCK: usize = size_of::<blocks::Q8_0>();

/// Most that a weight is below zero.
const BELOW: i8 = 12;
const RAISED: [i8; 16] = {
    let mut table = blocks::FP4;
    let mut i = 0;
    while i < 16 {
        table[i] += BELOW;
        i += 1;
    }
    table
};

/// Scales by their exponents.
static SCALES: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut e = 0;
    while e < 256 {
        table[e] = blocks::e8m0_half(e as u8);
        e += 1;
    }
    table
};

impl<I> Mxfp4<I> {
    /// Weights, raised by [`BELOW`].
    #[inline(always)]
    unsafe fn unpack(w: *const u8) -> __m256i {
        let places = nibbles((*w.cast::<blocks::Mxfp4>()).qs.as_ptr());
        _mm256_shuffle_epi8(table(&RAISED), places)
    }

    #[inline(always)]
    unsafe fn scale(w: *const u8) -> __m256 {
        _mm256_broadcast_ss(&SCALES[usize::from((*w.cast::<blocks::Mxfp4>()).e)])
    }
}

impl<I: Isa> Steps for Mxfp4<I> {
    const LEN: usize = 64;
    const BYTES: usize = 2 * HALF_STEP;
    const INPUT_BYTES: usize = 2 * INPUT_BLOCK;
    const PARTS: usize = 2;
    type Row = [__m256; 2];
    type Column = [__m256; 2];
    type Part = __m256i;
    type Sums = [__m256i; 2];
    type Total = [__m256; 2];

    #[inline(always)]
    unsafe fn zero() -> (Self::Sums, Self::Total) {
        ([_mm256_setzero_si256(); 2], [_mm256_setzero_ps(); 2])
    }
    #[inline(always)]
    unsafe fn row(w: *const u8) -> [__m256; 2] {
        [Self::scale(w), Self::scale(w.add(HALF_STEP))]
    }
    #[inline(always)]
    unsafe fn column(x: *const u8) -> [__m256; 2] {
        [input_scale(x), input_scale(x.add(INPUT_BLOCK))]
    }
    #[inline(always)]
    unsafe fn part(w: *const u8, _: &[__m256; 2], j: usize) -> __m256i {
        Self::unpack(w.add(j * HALF_STEP))
    }
    #[inline(always)]
    unsafe fn add(mut sums: Self::Sums, part: &__m256i, x: *const u8, j: usize) -> Self::Sums {
        sums[j] = raised::<I>(*part, BELOW, x.add(j * INPUT_BLOCK));
        sums
    }
    #[inline(always)]
    unsafe fn close(
        total: Self::Total,
        sums: Self::Sums,
        row: &[__m256; 2],
        column: &[__m256; 2],
    ) -> Self::Total {
        [scaled(total[0], sums[0], row[0], column[0]), scaled(total[1], sums[1], row[1], column[1])]
    }
    #[inline(always)]
    unsafe fn finish(total: Self::Total, rest: Option<(*const u8, *const u8)>) -> f32 {
        let sum = sum_floats(_mm256_add_ps(total[0], total[1]));
        let Some((w, x)) = rest else { return sum };
        let sums = raised::<I>(Self::unpack(w), BELOW, x);
        let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
        let sums = _mm_hadd_epi32(sums, sums);
        let integer = _mm_cvtsi128_si32(_mm_hadd_epi32(sums, sums));
        let scale = _mm256_cvtss_f32(_mm256_mul_ps(input_scale(x), Self::scale(w)));
        scale.mul_add(integer as f32, sum)
    }
}
