//! Products in the order of ggml's `vec_dot`: a few rows times a few columns.

use super::common::prefetch;
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
    unsafe fn add(sums: Self::Sums, part: &Self::Part, x: *const u8, j: usize) -> Self::Sums;
    /// Adds a step's integer sums to the totals.
    unsafe fn close(
        total: Self::Total,
        sums: Self::Sums,
        row: &Self::Row,
        column: &Self::Column,
    ) -> Self::Total;
    /// The result; `rest` is the place of weights and inputs after the last
    /// step, where half a step remains.
    unsafe fn finish(total: Self::Total, rest: Option<(*const u8, *const u8)>) -> f32;
}

/// Rows between the one in work and the one that is asked for, with one column.
/// One row after the other and three ahead is what an x86 processor liked
/// best; nobody has measured it on ARM yet.
const ROWS_AHEAD: usize = 3;

/// Rows that are multiplied with several columns at once. With four columns
/// their sums, two rows' weights and the inputs fit in 32 registers.
const ROWS: usize = 2;

/// All rows times all columns. Of several columns four at a time.
///
/// Inlined, as all below, into a function that enables the instruction set.
///
/// # Safety
/// As for [`crate::Kernel::multiply`].
#[inline(always)]
pub unsafe fn all<S: Steps>(p: &Product) {
    let mut c = 0;
    while p.columns.len() - c >= 4 {
        columns::<S, ROWS, 4>(p, c);
        c += 4;
    }
    match p.columns.len() - c {
        3 => columns::<S, ROWS, 3>(p, c),
        2 => columns::<S, ROWS, 2>(p, c),
        1 => columns::<S, 1, 1>(p, c),
        _ => {}
    }
}

/// All rows times `C` columns from column `c` on, `R` rows at a time.
#[inline(always)]
unsafe fn columns<S: Steps, const R: usize, const C: usize>(p: &Product, c: usize) {
    let mut row = p.rows.start;
    while row + R <= p.rows.end {
        block::<S, R, C>(p, row, c);
        row += R;
    }
    while row < p.rows.end {
        block::<S, 1, C>(p, row, c);
        row += 1;
    }
}

#[inline(always)]
unsafe fn block<S: Steps, const R: usize, const C: usize>(p: &Product, row: usize, first: usize) {
    let mut w = [p.weights.wrapping_add(row * p.row_bytes); R];
    for (r, w) in w.iter_mut().enumerate() {
        *w = w.wrapping_add(r * p.row_bytes);
    }
    let mut x = [std::ptr::null::<u8>(); C];
    x.copy_from_slice(&p.columns[first..first + C]);
    let (no_sums, no_total) = S::zero();
    let mut total = [[no_total; C]; R];
    let ahead = if C == 1 { ROWS_AHEAD } else { R } * p.row_bytes;
    for _ in 0..p.n_in / S::LEN {
        let mut heads = [S::row(w[0]); R];
        for r in 0..R {
            if first == 0 {
                prefetch(w[r].wrapping_add(ahead), S::BYTES);
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
                    sums[r][c] = S::add(sums[r][c], &parts[r], x[c], j);
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
            *p.out[first + c].add(row + r) = S::finish(total[r][c], half.then_some((w[r], x[c])));
        }
    }
}
