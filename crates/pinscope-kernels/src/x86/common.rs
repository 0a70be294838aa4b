//! Steps that several types need, as ggml's x86 kernels do them.

use std::arch::x86_64::*;

/// ggml's `hsum_float_8`: the order of these additions is part of the result.
#[inline(always)]
pub unsafe fn sum_floats(x: __m256) -> f32 {
    let sum = _mm_add_ps(_mm256_extractf128_ps::<1>(x), _mm256_castps256_ps128(x));
    let sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)))
}

/// A half float's value.
#[inline(always)]
pub unsafe fn half(bits: u16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

/// A half float's value in all lanes.
#[inline(always)]
pub unsafe fn halves(bits: u16) -> __m256 {
    _mm256_cvtph_ps(_mm_set1_epi16(bits as i16))
}

/// 32 bytes from anywhere.
#[inline(always)]
pub unsafe fn load<T>(from: *const T) -> __m256i {
    _mm256_loadu_si256(from.cast())
}

/// 16 bytes twice: low nibbles below, high nibbles above.
#[inline(always)]
pub unsafe fn nibbles(from: *const u8) -> __m256i {
    let packed = _mm_loadu_si128(from.cast());
    let both =
        _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(packed), _mm_srli_epi16::<4>(packed));
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// 16 table values in both halves, for a shuffle.
#[inline(always)]
pub unsafe fn table(values: &[i8; 16]) -> __m256i {
    _mm256_broadcastsi128_si256(_mm_loadu_si128(values.as_ptr().cast()))
}

/// Products of signed bytes, summed in pairs: `size` and `sign` are the
/// weights' absolute values and the weights.
#[inline(always)]
pub unsafe fn signed_pairs(size: __m256i, sign: __m256i, x: __m256i) -> __m256i {
    _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, sign))
}

/// The sums of 32 inputs each, eight of them, of a block of 256.
#[inline(always)]
pub unsafe fn sums_of_32(bsums: &[i16; 16]) -> __m128i {
    let sums = load(bsums.as_ptr());
    _mm_hadd_epi16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums))
}
