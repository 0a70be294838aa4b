//! The bits are ggml's, for every type, kernel and shape.

mod common;

use common::{kernels, same_bits, Case, Fill, FILLS};
use pinscope_kernels::{Order, WeightType};

/// Blocks in a row: odd and even, one and many.
const BLOCKS: [usize; 5] = [1, 2, 3, 8, 11];

#[test]
fn one_column_has_the_bits_of_vec_dot_for_any_number_of_rows() {
    for type_ in WeightType::ALL {
        for kernel in kernels(type_) {
            for (i, &blocks) in BLOCKS.iter().enumerate() {
                for rows in [1, 2, 3, 5, 8, 96] {
                    for fill in FILLS {
                        let n_in = blocks * type_.block_len();
                        let case = Case::new(type_, n_in, rows, 1, fill, 7 + i as u64);
                        let got = case.ours(&kernel, Order::VecDot, 0..rows);
                        let what = format!("{kernel:?} {blocks} blocks {rows} rows {fill:?}");
                        same_bits(&got, &case.vec_dot(), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn many_columns_have_the_bits_of_vec_dot() {
    for type_ in WeightType::ALL {
        for kernel in kernels(type_) {
            for columns in 1..=33 {
                for fill in [Fill::Usual, Fill::AnyScale] {
                    let n_in = 3 * type_.block_len();
                    let case = Case::new(type_, n_in, 7, columns, fill, columns as u64);
                    let got = case.ours(&kernel, Order::VecDot, 0..7);
                    let what = format!("{kernel:?} {columns} columns {fill:?}");
                    same_bits(&got, &case.vec_dot(), &what);
                }
            }
        }
    }
}

#[test]
fn a_wide_matrix_with_1408_rows_has_the_bits_of_vec_dot() {
    for type_ in WeightType::ALL {
        for kernel in kernels(type_) {
            let case = Case::new(type_, 512, 1408, 5, Fill::Usual, 99);
            same_bits(
                &case.ours(&kernel, Order::VecDot, 0..1408),
                &case.vec_dot(),
                &format!("{kernel:?}"),
            );
        }
    }
}

#[test]
fn rows_may_begin_and_end_anywhere_and_no_others_are_written() {
    for type_ in WeightType::ALL {
        for kernel in kernels(type_) {
            let case = Case::new(type_, 2 * type_.block_len(), 23, 9, Fill::Usual, 3);
            for order in [Order::VecDot, Order::Tiled] {
                let all = case.ours(&kernel, order, 0..23);
                for (first, end) in [(0, 1), (1, 1), (5, 17), (7, 8), (13, 23), (2, 19)] {
                    let got = case.ours(&kernel, order, first..end);
                    let mut want = vec![f32::NAN; got.len()];
                    for c in 0..9 {
                        let rows = c * 23 + first..c * 23 + end;
                        want[rows.clone()].copy_from_slice(&all[rows]);
                    }
                    let nan = |v: &[f32]| v.iter().filter(|v| v.is_nan()).count();
                    assert_eq!(nan(&got), nan(&want), "{kernel:?} {first}..{end}");
                    same_bits(&got, &want, &format!("{kernel:?} {order:?} {first}..{end}"));
                }
            }
        }
    }
}

/// ggml takes its tiled product for eight columns and more of the types that
/// have one, and `vec_dot` for the others.
#[test]
fn products_have_the_bits_of_mul_mat_id() {
    for type_ in WeightType::ALL {
        for kernel in kernels(type_) {
            for columns in [1, 7, 8, 9, 16, 17, 33, 100, 300] {
                for (rows, fill) in [(1, Fill::AnyScale), (16, Fill::Usual), (99, Fill::Ones)] {
                    let blocks = [1, 8][columns % 2];
                    let n_in = blocks * type_.block_len();
                    let case = Case::new(type_, n_in, rows, columns, fill, columns as u64);
                    let tiled = columns >= 8 && kernel.has(Order::Tiled);
                    let order = if tiled { Order::Tiled } else { Order::VecDot };
                    let got = case.ours(&kernel, order, 0..rows);
                    let what = format!("{kernel:?} {columns} columns {rows} rows {fill:?}");
                    same_bits(&got, &case.mul_mat_id(1 + columns as i32 % 2), &what);
                }
            }
        }
    }
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(400))]

    #[test]
    fn any_shape_has_ggmls_bits(
        type_ in 0..WeightType::ALL.len(),
        blocks in 1usize..13,
        rows in 1usize..40,
        columns in 1usize..70,
        fill in 0..FILLS.len(),
        seed in 1u64..,
    ) {
        let type_ = WeightType::ALL[type_];
        let case = Case::new(type_, blocks * type_.block_len(), rows, columns, FILLS[fill], seed);
        for kernel in kernels(type_) {
            let tiled = columns >= 8 && kernel.has(Order::Tiled);
            let order = if tiled { Order::Tiled } else { Order::VecDot };
            let got = case.ours(&kernel, order, 0..rows);
            same_bits(&got, &case.mul_mat_id(1), &format!("{kernel:?} {order:?}"));
        }
    }
}
