//! Products in the order of ggml's `vec_dot`: a few rows times a few columns.

use std::arch::x86_64::*;

use super::common;
use super::isa::Isa;
use crate::Product;

/// How weights of one type are multiplied, a step (one or two blocks) at a time.
pub trait Steps {
    /// Weights in a step.
    const LEN: usize;
    /// Bytes of a step in a row.
    const BYTES: usize;
    /// Bytes of a step in a quantised input.
    const INPUT_BYTES: usize;
    /// Pieces into which a step is unpacked.
    const PARTS: usize;
    /// What a row's step has once: scales.
    type Row: Copy;
    /// What an input's step has once.
    type Column: Copy;
    /// Unpacked weights.
    type Part: Copy;
    /// Integer sums.
    type Sums: Copy;
    /// Floating-point sums.
    type Total: Copy;

    unsafe fn zero() -> (Self::Sums, Self::Total);
    unsafe fn row(w: *const u8) -> Self::Row;
    unsafe fn column(x: *const u8) -> Self::Column;
    unsafe fn part(w: *const u8, row: &Self::Row, j: usize) -> Self::Part;
    /// Adds the products of part `j` with the input's step `x`.
    unsafe fn add<I: Isa>(
        sums: Self::Sums,
        part: &Self::Part,
        x: *const u8,
        j: usize,
    ) -> Self::Sums;
    /// Adds a step's integer sums to the totals.
    unsafe fn close(
        total: Self::Total,
        sums: Self::Sums,
        row: &Self::Row,
        column: &Self::Column,
    ) -> Self::Total;
    /// The result; `rest` is the place of weights and inputs after the last
    /// step, where half a step remains.
    unsafe fn finish<I: Isa>(total: Self::Total, rest: Option<(*const u8, *const u8)>) -> f32;
}

/// Rows between those in work and those that are asked for, with one column.
/// Blocks of 256 and Q8_0 wait for memory then, and one row after the other with
/// requests three rows ahead is what the processor's own prefetcher likes best: two
/// or four rows at once, which save loads of the input, gave 0.7 to 0.95 of the
/// bandwidth (two threads, 2 x Zen 3). The input stays in the first cache.
const ROWS_AHEAD: usize = 3;

/// All rows times all columns. Of several columns four at a time, with `R` rows:
/// two for blocks of 256, four for blocks of 32, whose sums need no registers
/// from step to step. A single one with `ONE` rows: one where memory is what is
/// waited for, more for 4 bits in blocks of 32, where it is arithmetic.
///
/// # Safety
/// As for [`crate::Kernel::multiply`], on a processor with this instruction set.
pub unsafe fn all<I: Isa, S: Steps, const R: usize, const ONE: usize>(p: &Product) {
    let mut c = 0;
    while p.columns.len() - c >= 4 {
        I::columns::<S, R, 4>(p, c);
        c += 4;
    }
    match p.columns.len() - c {
        3 => I::columns::<S, R, 3>(p, c),
        2 => I::columns::<S, R, 2>(p, c),
        1 => I::columns::<S, ONE, 1>(p, c),
        _ => {}
    }
}

/// All rows times `C` columns from column `first` on, `R` rows at a time. Must
/// be inlined into a function that enables the instruction set, as
/// [`Isa::columns`] does.
#[inline(always)]
pub unsafe fn columns<I: Isa, S: Steps, const R: usize, const C: usize>(p: &Product, first: usize) {
    let mut row = p.rows.start;
    while row + R <= p.rows.end {
        I::block::<S, R, C>(p, row, first);
        row += R;
    }
    while row < p.rows.end {
        I::block::<S, 1, C>(p, row, first);
        row += 1;
    }
}

/// `R` rows times `C` columns; to be inlined as [`columns`].
#[inline(always)]
pub unsafe fn block<I: Isa, S: Steps, const R: usize, const C: usize>(
    p: &Product,
    row: usize,
    first: usize,
) {
    let mut w = [p.weights.wrapping_add(row * p.row_bytes); R];
    for (r, w) in w.iter_mut().enumerate() {
        *w = w.wrapping_add(r * p.row_bytes);
    }
    let mut x = [std::ptr::null::<u8>(); C];
    x.copy_from_slice(&p.columns[first..first + C]);
    let (no_sums, no_total) = S::zero();
    let mut total = [[no_total; C]; R];
    let ahead = if C == 1 { ROWS_AHEAD } else { R } * p.row_bytes;
    for step in 0..p.n_in / S::LEN {
        let mut heads = [S::row(w[0]); R];
        for r in 0..R {
            if first == 0 {
                prefetch::<S>(w[r].wrapping_add(ahead), step);
            }
            heads[r] = S::row(w[r]);
        }
        let mut sums = [[no_sums; C]; R];
        for j in 0..S::PARTS {
            let mut parts = [S::part(w[0], &heads[0], j); R];
            for r in 1..R {
                parts[r] = S::part(w[r], &heads[r], j);
            }
            for c in 0..C {
                for r in 0..R {
                    sums[r][c] = S::add::<I>(sums[r][c], &parts[r], x[c], j);
                }
            }
        }
        for c in 0..C {
            let column = S::column(x[c]);
            for r in 0..R {
                total[r][c] = S::close(total[r][c], sums[r][c], &heads[r], &column);
            }
        }
        for w in &mut w {
            *w = w.wrapping_add(S::BYTES);
        }
        for x in &mut x {
            *x = x.wrapping_add(S::INPUT_BYTES);
        }
    }
    let half = !p.n_in.is_multiple_of(S::LEN);
    for c in 0..C {
        for r in 0..R {
            *p.out[first + c].add(row + r) =
                S::finish::<I>(total[r][c], half.then_some((w[r], x[c])));
        }
    }
}

/// Asks for a step's bytes ahead of their use.
#[inline(always)]
unsafe fn prefetch<S: Steps>(at: *const u8, step: usize) {
    if S::BYTES > 64 {
        common::prefetch(at, S::BYTES);
    } else if step.is_multiple_of(64 / S::BYTES) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
}
