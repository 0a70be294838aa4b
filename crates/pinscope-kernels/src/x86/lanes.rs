//! Rows of a tile side by side: eight with AVX2, sixteen with AVX-512.

use std::arch::x86_64::*;
use std::mem::offset_of;

use super::common::load;
use super::isa::{Avx2, Avx512};
use super::tile::{Lanes, Panel, Tile};
use crate::blocks::Q8K;

/// The inputs that are multiplied with weights `32 * i` to `32 * i + 31`.
#[inline(always)]
unsafe fn inputs(column: *const u8, block: usize, i: usize) -> *const i32 {
    (*column.cast::<Q8K>().add(block)).qs.as_ptr().add(32 * i).cast()
}

/// 32 bytes of the first panel, `place` bytes from its start.
#[inline(always)]
unsafe fn one(panels: &[Panel], place: usize) -> __m256i {
    load(panels.as_ptr().cast::<u8>().add(place))
}

impl Lanes for Avx2 {
    const PANELS: usize = 1;
    const UNSIGNED: bool = false;
    type Ints = __m256i;
    type Floats = __m256;

    #[inline(always)]
    unsafe fn zero() -> (__m256i, __m256) {
        (_mm256_setzero_si256(), _mm256_setzero_ps())
    }
    #[inline(always)]
    unsafe fn multiply<T: Tile>(
        sums: &mut [__m256i],
        panels: &[Panel],
        i: usize,
        columns: &[*const u8],
        block: usize,
    ) {
        let mut q = [_mm256_setzero_si256(); 8];
        for (g, q) in q.iter_mut().enumerate() {
            *q = one(panels, offset_of!(Panel, q) + 32 * (8 * i + g));
        }
        let at = offset_of!(Panel, scales) + 32 * T::SCALES * i;
        let scales = [one(panels, at), one(panels, at + 32 * (T::SCALES - 1))];
        for (sum, &x) in sums.iter_mut().zip(columns) {
            let products = T::products(&q, scales, inputs(x, block, i));
            *sum = _mm256_add_epi32(*sum, products);
        }
    }
    #[inline(always)]
    unsafe fn times_pairs<const N: usize>(
        panels: &[Panel],
        place: usize,
        sums: [i32; N],
        shift: i32,
    ) -> __m256i {
        let mut total = _mm256_setzero_si256();
        for (k, pair) in sums.into_iter().enumerate() {
            let factors = one(panels, place + 32 * k);
            let products = _mm256_madd_epi16(factors, _mm256_set1_epi32(pair));
            total = _mm256_add_epi32(total, products);
        }
        _mm256_sll_epi32(total, _mm_cvtsi32_si128(shift))
    }
    #[inline(always)]
    unsafe fn close<T: Tile>(
        total: __m256,
        sums: __m256i,
        offset: __m256i,
        panels: &[Panel],
        x: f32,
    ) -> __m256 {
        let d = _mm256_castsi256_ps(one(panels, offset_of!(Panel, d)));
        let scaled = if T::MINS {
            let dmin = _mm256_castsi256_ps(one(panels, offset_of!(Panel, dmin)));
            let scaled = _mm256_mul_ps(d, _mm256_cvtepi32_ps(sums));
            _mm256_fnmadd_ps(dmin, _mm256_cvtepi32_ps(offset), scaled)
        } else {
            _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, offset)))
        };
        _mm256_fmadd_ps(scaled, _mm256_set1_ps(x), total)
    }
    #[inline(always)]
    unsafe fn store(total: __m256, values: &mut [f32; 16]) {
        _mm256_storeu_ps(values.as_mut_ptr(), total);
    }
}

/// 32 bytes of each panel, `place` bytes from its start.
#[inline(always)]
unsafe fn both(panels: &[Panel], place: usize) -> __m512i {
    let low = _mm512_castsi256_si512(one(panels, place));
    _mm512_inserti64x4::<1>(low, one(&panels[1..], place))
}

impl Lanes for Avx512 {
    const PANELS: usize = 2;
    const UNSIGNED: bool = true;
    type Ints = __m512i;
    type Floats = __m512;

    #[inline(always)]
    unsafe fn zero() -> (__m512i, __m512) {
        (_mm512_setzero_si512(), _mm512_setzero_ps())
    }
    /// Four products and their sum are one instruction here, for which weights
    /// must be unsigned: signed ones are moved up by 128.
    #[inline(always)]
    unsafe fn multiply<T: Tile>(
        sums: &mut [__m512i],
        panels: &[Panel],
        i: usize,
        columns: &[*const u8],
        block: usize,
    ) {
        let moved = _mm512_set1_epi8(if T::SIGNED { -128 } else { 0 });
        let (mut q, mut scales) = ([_mm512_setzero_si512(); 8], [_mm512_setzero_si512(); 2]);
        for (g, q) in q.iter_mut().enumerate() {
            *q = _mm512_xor_si512(both(panels, offset_of!(Panel, q) + 32 * (8 * i + g)), moved);
        }
        for (s, scale) in scales.iter_mut().enumerate().take(T::SCALES) {
            // Of each scale, which is there twice, one with 32 bits.
            let pair = both(panels, offset_of!(Panel, scales) + 32 * (T::SCALES * i + s));
            *scale = _mm512_srai_epi32::<16>(pair);
        }
        for (sum, &x) in sums.iter_mut().zip(columns) {
            let mut x = inputs(x, block, i);
            for (q, &scale) in q.chunks_exact(8 / T::SCALES).zip(&scales) {
                let mut products = _mm512_setzero_si512();
                for &q in q {
                    let four = _mm512_set1_epi32(x.read_unaligned());
                    products = _mm512_dpbusd_epi32(products, q, four);
                    x = x.add(1);
                }
                *sum = _mm512_add_epi32(*sum, _mm512_mullo_epi32(products, scale));
            }
        }
    }
    #[inline(always)]
    unsafe fn times_pairs<const N: usize>(
        panels: &[Panel],
        place: usize,
        sums: [i32; N],
        shift: i32,
    ) -> __m512i {
        let mut total = _mm512_setzero_si512();
        for (k, pair) in sums.into_iter().enumerate() {
            let factors = both(panels, place + 32 * k);
            total = _mm512_dpwssd_epi32(total, factors, _mm512_set1_epi32(pair));
        }
        _mm512_sll_epi32(total, _mm_cvtsi32_si128(shift))
    }
    #[inline(always)]
    unsafe fn close<T: Tile>(
        total: __m512,
        sums: __m512i,
        offset: __m512i,
        panels: &[Panel],
        x: f32,
    ) -> __m512 {
        let d = _mm512_castsi512_ps(both(panels, offset_of!(Panel, d)));
        let scaled = if T::MINS {
            let dmin = _mm512_castsi512_ps(both(panels, offset_of!(Panel, dmin)));
            let scaled = _mm512_mul_ps(d, _mm512_cvtepi32_ps(sums));
            _mm512_fnmadd_ps(dmin, _mm512_cvtepi32_ps(offset), scaled)
        } else {
            _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, offset)))
        };
        _mm512_fmadd_ps(scaled, _mm512_set1_ps(x), total)
    }
    #[inline(always)]
    unsafe fn store(total: __m512, values: &mut [f32; 16]) {
        _mm512_storeu_ps(values.as_mut_ptr(), total);
    }
}
