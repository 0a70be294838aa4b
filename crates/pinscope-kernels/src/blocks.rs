//! Blocks as they lie in memory (ggml-common.h), and what all instruction sets
//! do alike with them.

/// Scales of 16 bits are IEEE half floats, as bits.
type Half = u16;

/// 32 weights of 4 bits, `d * (q - 8)`: low nibbles first, then high ones.
#[repr(C)]
pub struct Q4_0 {
    pub d: Half,
    pub qs: [u8; 16],
}

/// 32 weights of 8 bits; inputs for blocks of 32 have this form, too.
#[repr(C)]
pub struct Q8_0 {
    pub d: Half,
    pub qs: [i8; 32],
}

/// 32 weights that are places in [`FP4`], times a power of two.
#[repr(C)]
pub struct Mxfp4 {
    pub e: u8,
    pub qs: [u8; 16],
}

/// 256 weights of 4 bits, `d * scale * q - dmin * min` with a scale and a
/// minimum for each 32.
#[repr(C)]
pub struct Q4K {
    pub d: Half,
    pub dmin: Half,
    pub scales: [u8; 12],
    pub qs: [u8; 128],
}

/// As [`Q4K`], with a fifth bit in `qh`.
#[repr(C)]
pub struct Q5K {
    pub d: Half,
    pub dmin: Half,
    pub scales: [u8; 12],
    pub qh: [u8; 32],
    pub qs: [u8; 128],
}

/// 256 weights of 6 bits, `d * scale * (q - 32)` with a scale for each 16.
#[repr(C)]
pub struct Q6K {
    pub ql: [u8; 128],
    pub qh: [u8; 64],
    pub scales: [i8; 16],
    pub d: Half,
}

/// 256 weights that are places in [`IQ4`], with a scale for each 32.
#[repr(C)]
pub struct Iq4Xs {
    pub d: Half,
    pub scales_h: u16,
    pub scales_l: [u8; 4],
    pub qs: [u8; 128],
}

/// Inputs for blocks of 256; `bsums` are sums of 16.
#[repr(C)]
pub struct Q8K {
    pub d: f32,
    pub qs: [i8; 256],
    pub bsums: [i16; 16],
}

/// ggml's `kvalues_fp4`: twice the values of E2M1.
pub const FP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// ggml's `kvalues_iq4nl`.
pub const IQ4: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Half of the power of two that an MXFP4 block's exponent means: [`FP4`] has
/// twice the values. ggml's `e8m0_to_fp32_half`.
#[inline(always)]
pub const fn e8m0_half(e: u8) -> f32 {
    let bits = if e < 2 { 0x0020_0000 << e } else { (e as u32 - 1) << 23 };
    f32::from_bits(bits)
}

/// The eight scales and the eight minima of a [`Q4K`] or [`Q5K`] block, each
/// six bits, a byte each, first one lowest.
#[inline(always)]
pub fn scales_and_mins(packed: [u8; 12]) -> (u64, u64) {
    const LOW6: u32 = 0x3f3f_3f3f;
    const LOW4: u32 = 0x0f0f_0f0f;
    const LOW2: u32 = 0x0303_0303;
    let word =
        |i: usize| u32::from_le_bytes([packed[i], packed[i + 1], packed[i + 2], packed[i + 3]]);
    let (a, b, c) = (word(0), word(4), word(8));
    let scales = (c & LOW4) | (((a >> 6) & LOW2) << 4);
    let mins = ((c >> 4) & LOW4) | (((b >> 6) & LOW2) << 4);
    (u64::from(a & LOW6) | u64::from(scales) << 32, u64::from(b & LOW6) | u64::from(mins) << 32)
}

/// The eight scales of an [`Iq4Xs`] block, a byte each, first one lowest,
/// 32 too large.
#[inline(always)]
pub fn iq4_xs_scales(low: [u8; 4], high: u16) -> u64 {
    // Four bits to each byte, and two.
    let mut l = u64::from(u32::from_le_bytes(low));
    l = (l | l << 16) & 0x0000_ffff_0000_ffff;
    l = (l | l << 8) & 0x00ff_00ff_00ff_00ff;
    l = (l | l << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    let mut h = u64::from(high);
    h = (h | h << 24) & 0x0000_00ff_0000_00ff;
    h = (h | h << 12) & 0x000f_000f_000f_000f;
    h = (h | h << 6) & 0x0303_0303_0303_0303;
    l | h << 4
}
