//! What the instruction sets differ in: products of small integers, how many
//! rows of a tile lie side by side, and the features that must be enabled.
//!
//! All of it is exact, so no bit depends on it. ggml, too, has the same bits
//! whether it is compiled for AVX2 or for AVX-512 (looked at in 0.1.161 of
//! llama-cpp-sys-2, `arch/x86/quants.c` and `tiled/tiled-kernel.cpp`):
//! `vec_dot` of our seven types keeps its eight lanes and only takes `dpbusd`
//! for sums of four products; the tiled product has sixteen columns side by
//! side and still adds block after block to one sum. That last addition is
//! written as a product and a sum there, of which GCC makes the one operation
//! that AVX2's code asks for; clang does not, its ggml for AVX-512 has other
//! bits, and the probe then leaves such products to it. The ggml in our own
//! binary is compiled for AVX2 (the sys crate sets no AVX-512 flag).

use std::arch::x86_64::*;

use super::tile::{self, Lanes, Tile};
use crate::rows::{enabling, Path};
use crate::Product;

/// An instruction set.
pub trait Isa: Lanes + Path {
    /// Adds to each sum four products of an unsigned byte and a signed one;
    /// any two neighbours fit in 16 bits together.
    unsafe fn dot4(sums: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i;
    /// Adds to each sum two products of 16 bits.
    unsafe fn dot2(sums: __m256i, a: __m256i, b: __m256i) -> __m256i;
    /// [`tile::run`] with the instruction set enabled.
    unsafe fn tiles<T: Tile>(p: &Product);
}

/// AVX2, FMA and F16C.
pub struct Avx2;

impl Path for Avx2 {
    const NAME: &'static str = "avx2";
    enabling!("avx2,fma,f16c");
}

impl Isa for Avx2 {
    #[inline(always)]
    unsafe fn dot4(sums: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        let pairs = _mm256_maddubs_epi16(unsigned, signed);
        Self::dot2(sums, pairs, _mm256_set1_epi16(1))
    }
    #[inline(always)]
    unsafe fn dot2(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        _mm256_add_epi32(sums, _mm256_madd_epi16(a, b))
    }
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn tiles<T: Tile>(p: &Product) {
        tile::run::<Self, T>(p);
    }
}

/// AVX-512 with byte and word operations, short vectors and VNNI, besides AVX2.
///
/// Rows in `vec_dot`'s order keep registers of eight lanes: one column waits
/// for memory with AVX2 already, so wider ones would gain nothing there.
pub struct Avx512;

impl Path for Avx512 {
    const NAME: &'static str = "avx512";
    enabling!("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");
}

impl Isa for Avx512 {
    #[inline(always)]
    unsafe fn dot4(sums: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        _mm256_dpbusd_epi32(sums, unsigned, signed)
    }
    #[inline(always)]
    unsafe fn dot2(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        _mm256_dpwssd_epi32(sums, a, b)
    }
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn tiles<T: Tile>(p: &Product) {
        tile::run::<Self, T>(p);
    }
}
