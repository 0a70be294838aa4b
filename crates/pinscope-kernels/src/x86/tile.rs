//! Products in the order of ggml's tiled kernel: one sum a result, to which a
//! block adds its exact integer sum. So rows can lie side by side in the lanes
//! of a register: eight are unpacked into a panel, one or two panels are then
//! multiplied with all columns, and no lanes are summed up at the end.

use std::arch::x86_64::*;

use super::common::load;
use crate::blocks::Q8K;
use crate::prefetch::prefetch;
use crate::Product;

/// Columns that are multiplied with a panel before the next block of rows is
/// unpacked: their block and the panels fit in the first cache.
const COLUMNS: usize = 48;

/// A block of each of eight rows.
#[repr(C, align(32))]
pub struct Panel {
    /// Four weights of each row, in order; unsigned unless the type says else.
    pub q: [[u8; 32]; 64],
    /// Scales in order, each twice.
    pub scales: [Pairs; 16],
    /// What the sums of inputs are multiplied with, in pairs.
    pub mins: [Pairs; 8],
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

/// Two numbers for each of eight rows.
pub type Pairs = [[i16; 2]; 8];

/// How weights of one type are laid out in a panel and multiplied.
pub trait Tile {
    /// Bytes of a block.
    const BYTES: usize;
    /// Scales for 32 weights: one or two.
    const SCALES: usize;
    /// Whether a block has minima with a scale of their own; otherwise
    /// [`Tile::offset`] is subtracted from the sums.
    const MINS: bool;
    /// Whether weights in a panel are signed.
    const SIGNED: bool;

    unsafe fn unpack(panel: &mut Panel, rows: &[*const u8; 8]);
    /// Scaled sums of 32 products: four at a time in `q` times those at `x`.
    unsafe fn products(q: &[__m256i; 8], scales: [__m256i; 2], x: *const i32) -> __m256i;
    /// What comes from the sums of inputs.
    unsafe fn offset<L: Lanes>(panels: &[Panel], x: &Q8K) -> L::Ints;
}

/// Rows side by side, one in each lane of a register.
pub trait Lanes: Sized {
    /// How many panels lie side by side.
    const PANELS: usize;
    /// Whether [`Lanes::multiply`] takes signed weights as 128 too large, which
    /// [`Tile::offset`] must make good.
    const UNSIGNED: bool;
    /// An integer of each row.
    type Ints: Copy;
    /// A floating-point number of each row.
    type Floats: Copy;

    unsafe fn zero() -> (Self::Ints, Self::Floats);
    /// Adds to each column's sums the scaled products of weights `32 * i` to
    /// `32 * i + 31` with the column's block.
    unsafe fn multiply<T: Tile>(
        sums: &mut [Self::Ints],
        panels: &[Panel],
        i: usize,
        columns: &[*const u8],
        block: usize,
    );
    /// `N` of a panel's [`Pairs`], `place` bytes from its start, times pairs of
    /// sums of 16 bits, summed up, times two to the power of `shift`.
    unsafe fn times_pairs<const N: usize>(
        panels: &[Panel],
        place: usize,
        sums: [i32; N],
        shift: i32,
    ) -> Self::Ints;
    /// Adds a block's sums to the totals; `x` is the scale of its inputs.
    unsafe fn close<T: Tile>(
        total: Self::Floats,
        sums: Self::Ints,
        offset: Self::Ints,
        panels: &[Panel],
        x: f32,
    ) -> Self::Floats;
    unsafe fn store(total: Self::Floats, values: &mut [f32; 16]);
}

/// Products of unsigned weights with the same four inputs in each row, in pairs.
#[inline(always)]
pub unsafe fn pairs(q: __m256i, x: *const i32) -> __m256i {
    _mm256_maddubs_epi16(q, _mm256_set1_epi32(x.read_unaligned()))
}

/// A block's sums of 16 inputs, in pairs.
#[inline(always)]
pub unsafe fn pairs_of_sums(x: &Q8K) -> [i32; 8] {
    x.bsums.as_ptr().cast::<[i32; 8]>().read_unaligned()
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

/// All rows times all columns. Must be inlined into a function that enables
/// the instruction set, as [`super::isa::Isa::tiles`] does.
#[inline(always)]
pub unsafe fn run<L: Lanes, T: Tile>(p: &Product) {
    let mut panels = std::mem::MaybeUninit::<[Panel; 2]>::zeroed().assume_init();
    let mut row = p.rows.start;
    while row < p.rows.end {
        for first in (0..p.columns.len()).step_by(COLUMNS) {
            let n = COLUMNS.min(p.columns.len() - first);
            rows::<L, T>(p, row, first, n, &mut panels[..L::PANELS]);
        }
        row += 8 * L::PANELS;
    }
}

/// Up to eight rows a panel times `n` columns from `first` on.
#[inline(always)]
unsafe fn rows<L: Lanes, T: Tile>(
    p: &Product,
    row: usize,
    first: usize,
    n: usize,
    panels: &mut [Panel],
) {
    let n_rows = (p.rows.end - row).min(8 * L::PANELS);
    let mut w = [[p.weights; 8]; 2];
    for (r, w) in w.as_flattened_mut().iter_mut().enumerate() {
        // Rows that are missing are computed as the last one, and dropped.
        *w = w.add((row + r.min(n_rows - 1)) * p.row_bytes);
    }
    let columns = &p.columns[first..first + n];
    let (no_sums, no_total) = L::zero();
    let mut totals = [no_total; COLUMNS];
    for block in 0..p.n_in / 256 {
        for (panel, w) in panels.iter_mut().zip(&mut w) {
            T::unpack(panel, w);
            for w in w {
                if first == 0 {
                    prefetch(w.wrapping_add(8 * L::PANELS * p.row_bytes), T::BYTES);
                }
                *w = w.wrapping_add(T::BYTES);
            }
        }
        let mut sums = [no_sums; COLUMNS];
        for i in 0..8 {
            L::multiply::<T>(&mut sums[..n], panels, i, columns, block);
        }
        for ((total, &sums), x) in totals.iter_mut().zip(&sums).zip(columns) {
            let x = &*x.cast::<Q8K>().add(block);
            let offset = T::offset::<L>(panels, x);
            *total = L::close::<T>(*total, sums, offset, panels, x.d);
        }
    }
    for (&total, out) in totals.iter().zip(&p.out[first..first + n]) {
        let mut values = [0f32; 16];
        L::store(total, &mut values);
        std::ptr::copy_nonoverlapping(values.as_ptr(), out.add(row), n_rows);
    }
}
