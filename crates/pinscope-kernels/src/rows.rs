//! Products in the order of ggml's `vec_dot`: a few rows times a few columns.
//!
//! Safety, for all unsafe functions below: they run on a processor with the
//! instruction set, and get addresses of whole blocks, which is the promise of
//! [`crate::Kernel::multiply`].

use crate::prefetch::prefetch;
use crate::Product;

/// An instruction set: code compiled for it, which [`enabling`] writes.
pub trait Path {
    /// As [`crate::Kernel::path`] says it.
    const NAME: &'static str;

    /// [`columns`] with the instruction set enabled.
    unsafe fn columns<S: Steps, const R: usize, const C: usize>(p: &Product, first: usize);
    /// [`block`] with the instruction set enabled: a function of its own.
    /// Measurements on x86 could not tell it from one that is inlined always.
    unsafe fn block<S: Steps, const R: usize, const C: usize>(
        p: &Product,
        row: usize,
        first: usize,
    );
}

/// The functions of a [`Path`] whose instruction set has these features.
macro_rules! enabling {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn columns<S: $crate::rows::Steps, const R: usize, const C: usize>(
            p: &$crate::Product,
            first: usize,
        ) {
            $crate::rows::columns::<Self, S, R, C>(p, first);
        }
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn block<S: $crate::rows::Steps, const R: usize, const C: usize>(
            p: &$crate::Product,
            row: usize,
            first: usize,
        ) {
            $crate::rows::block::<S, R, C>(p, row, first);
        }
    };
}
pub(crate) use enabling;

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

/// Rows between those in work and those that are asked for, with one column.
/// Blocks of 256 and Q8_0 wait for memory then, and one row after the other with
/// requests three rows ahead is what the processor's own prefetcher likes best: two
/// or four rows at once, which save loads of the input, gave 0.7 to 0.95 of the
/// bandwidth (two threads, 2 x Zen 3). The input stays in the first cache.
/// Nobody has measured it on ARM yet.
const ROWS_AHEAD: usize = 3;

/// All rows times all columns. Of several columns four at a time, with `R` rows;
/// a single one with `ONE` rows: one where memory is what is waited for, more
/// where it is arithmetic.
pub unsafe fn all<P: Path, S: Steps, const R: usize, const ONE: usize>(p: &Product) {
    let mut c = 0;
    while p.columns.len() - c >= 4 {
        P::columns::<S, R, 4>(p, c);
        c += 4;
    }
    match p.columns.len() - c {
        3 => P::columns::<S, R, 3>(p, c),
        2 => P::columns::<S, R, 2>(p, c),
        1 => P::columns::<S, ONE, 1>(p, c),
        _ => {}
    }
}

/// All rows times `C` columns from column `first` on, `R` rows at a time. Must
/// be inlined into a function that enables the instruction set, as
/// [`Path::columns`] does.
#[inline(always)]
pub unsafe fn columns<P: Path, S: Steps, const R: usize, const C: usize>(
    p: &Product,
    first: usize,
) {
    let mut row = p.rows.start;
    while row + R <= p.rows.end {
        P::block::<S, R, C>(p, row, first);
        row += R;
    }
    while row < p.rows.end {
        P::block::<S, 1, C>(p, row, first);
        row += 1;
    }
}

/// `R` rows times `C` columns; to be inlined as [`columns`].
#[inline(always)]
pub unsafe fn block<S: Steps, const R: usize, const C: usize>(
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
    let steps_a_line = (64 / S::BYTES).max(1);
    for step in 0..p.n_in / S::LEN {
        let mut heads = [S::row(w[0]); R];
        for r in 0..R {
            if first == 0 && step.is_multiple_of(steps_a_line) {
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
