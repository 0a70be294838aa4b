//! Products in the order of ggml's tiled kernel: one sum a result, to which a
//! block adds its exact integer sum. So eight rows can lie side by side in
//! the lanes of a register: they are unpacked into a panel, which is then
//! multiplied with all columns, and no lanes are summed up at the end.

use std::arch::x86_64::*;

use super::common::{load, prefetch};
use crate::blocks::Q8K;
use crate::Product;

/// Columns that are multiplied with a panel before the next block of rows is
/// unpacked: their block and the panel fit in the first cache.
const COLUMNS: usize = 48;

/// A block of each of eight rows.
#[repr(C, align(32))]
pub struct Panel {
    /// Four weights of each row, in order; unsigned unless the type says else.
    q: [[u8; 32]; 64],
    /// Scales in order, each twice.
    pub scales: [[[i16; 2]; 8]; 16],
    /// What the sums of inputs are multiplied with, in pairs.
    pub mins: [[[i16; 2]; 8]; 8],
    pub d: [f32; 8],
    pub dmin: [f32; 8],
}

impl Panel {
    /// Sets four weights of each row.
    #[inline(always)]
    pub unsafe fn set(&mut self, group: usize, q: __m256i) {
        _mm256_storeu_si256(self.q[group].as_mut_ptr().cast(), q);
    }
}

/// How weights of one type are laid out in a panel and multiplied.
pub trait Tile {
    /// Bytes of a block.
    const BYTES: usize;
    /// Scales for 32 weights: one or two.
    const SCALES: usize;
    /// Whether a block has minima with a scale of their own; otherwise
    /// [`Tile::offset`] is subtracted from the sums.
    const MINS: bool;

    unsafe fn unpack(panel: &mut Panel, rows: &[*const u8; 8]);
    /// Scaled sums of 32 products: four at a time in `q` times those at `x`.
    unsafe fn products(q: &[__m256i; 8], scales: [__m256i; 2], x: *const i32) -> __m256i;
    /// What comes from the sums of inputs.
    unsafe fn offset(panel: &Panel, x: &Q8K) -> __m256i;
}

/// Products of unsigned weights with the same four inputs in each row, in pairs.
#[inline(always)]
pub unsafe fn pairs(q: __m256i, x: *const i32) -> __m256i {
    _mm256_maddubs_epi16(q, _mm256_set1_epi32(x.read_unaligned()))
}

/// Pairs of 16 bits times pairs of sums, summed up.
#[inline(always)]
pub unsafe fn times_pairs(mins: &[[[i16; 2]; 8]], sums: &[i32]) -> __m256i {
    let mut total = _mm256_setzero_si256();
    for (mins, &pair) in mins.iter().zip(sums) {
        let product = _mm256_madd_epi16(load(mins.as_ptr()), _mm256_set1_epi32(pair));
        total = _mm256_add_epi32(total, product);
    }
    total
}

/// 32 bytes of each row from `offset` on; result `i` has bytes `4 * i` to
/// `4 * i + 3` of all rows.
#[inline(always)]
pub unsafe fn transposed(rows: &[*const u8; 8], offset: usize) -> [__m256i; 8] {
    let mut r = [_mm256_setzero_si256(); 8];
    for (r, row) in r.iter_mut().zip(rows) {
        *r = load(row.add(offset));
    }
    // Words, then pairs of words, then halves.
    let mut s = r;
    for i in 0..4 {
        s[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..2 {
        for k in 0..2 {
            r[4 * i + 2 * k] = _mm256_unpacklo_epi64(s[4 * i + k], s[4 * i + 2 + k]);
            r[4 * i + 2 * k + 1] = _mm256_unpackhi_epi64(s[4 * i + k], s[4 * i + 2 + k]);
        }
    }
    for i in 0..4 {
        s[i] = _mm256_permute2x128_si256::<0x20>(r[i], r[4 + i]);
        s[4 + i] = _mm256_permute2x128_si256::<0x31>(r[i], r[4 + i]);
    }
    s
}

/// All rows times all columns.
///
/// # Safety
/// As for [`crate::Kernel::multiply`], on a processor with AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn run<T: Tile>(p: &Product) {
    let mut panel = std::mem::MaybeUninit::<Panel>::zeroed().assume_init();
    let mut row = p.rows.start;
    while row < p.rows.end {
        for first in (0..p.columns.len()).step_by(COLUMNS) {
            let n = COLUMNS.min(p.columns.len() - first);
            rows::<T>(p, row, first, n, &mut panel);
        }
        row += 8;
    }
}

/// Up to eight rows times `n` columns from `first` on.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<T: Tile>(p: &Product, row: usize, first: usize, n: usize, panel: &mut Panel) {
    let n_rows = (p.rows.end - row).min(8);
    let mut w = [p.weights; 8];
    for (r, w) in w.iter_mut().enumerate() {
        // Rows that are missing are computed as the last one, and dropped.
        *w = w.add((row + r.min(n_rows - 1)) * p.row_bytes);
    }
    let columns = &p.columns[first..first + n];
    let mut totals = [_mm256_setzero_ps(); COLUMNS];
    for block in 0..p.n_in / 256 {
        T::unpack(panel, &w);
        for w in &mut w {
            if first == 0 {
                prefetch(w.wrapping_add(8 * p.row_bytes), T::BYTES);
            }
            *w = w.wrapping_add(T::BYTES);
        }
        let mut sums = [_mm256_setzero_si256(); COLUMNS];
        for i in 0..8 {
            let mut q = [_mm256_setzero_si256(); 8];
            for (g, q) in q.iter_mut().enumerate() {
                *q = load(panel.q[8 * i + g].as_ptr());
            }
            let at = T::SCALES * i;
            let scales =
                [load(panel.scales[at].as_ptr()), load(panel.scales[at + T::SCALES - 1].as_ptr())];
            for (sum, x) in sums.iter_mut().zip(columns) {
                let x = (*x.cast::<Q8K>().add(block)).qs.as_ptr().add(32 * i);
                *sum = _mm256_add_epi32(*sum, T::products(&q, scales, x.cast()));
            }
        }
        let (d, dmin) = (_mm256_loadu_ps(panel.d.as_ptr()), _mm256_loadu_ps(panel.dmin.as_ptr()));
        for ((total, sum), x) in totals.iter_mut().zip(&sums).zip(columns) {
            let x = &*x.cast::<Q8K>().add(block);
            let offset = T::offset(panel, x);
            let scaled = if T::MINS {
                let scaled = _mm256_mul_ps(d, _mm256_cvtepi32_ps(*sum));
                _mm256_fnmadd_ps(dmin, _mm256_cvtepi32_ps(offset), scaled)
            } else {
                _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_sub_epi32(*sum, offset)))
            };
            *total = _mm256_fmadd_ps(scaled, _mm256_set1_ps(x.d), *total);
        }
    }
    for (total, out) in totals.iter().zip(&p.out[first..first + n]) {
        let mut values = [0f32; 8];
        _mm256_storeu_ps(values.as_mut_ptr(), *total);
        std::ptr::copy_nonoverlapping(values.as_ptr(), out.add(row), n_rows);
    }
}
