//! The readable reference, ggml and our kernels agree on every bit, in both
//! orders. The reference is x86's.
#![cfg(target_arch = "x86_64")]

mod common;
#[path = "common/reference.rs"]
mod reference;

use common::{same_bits, Case, FILLS};
use pinscope_kernels::{kernels_for, Order, WeightType};

const ROWS: usize = 19;

fn by_reference(case: &Case, order: Order) -> Vec<f32> {
    let row = |c: usize, r: usize| {
        let weights = &case.weights[r * case.row_bytes()..][..case.row_bytes()];
        let column = case.inputs.len() / case.columns;
        let inputs = &case.inputs[c * column..][..column];
        reference::product(case.type_, order, weights, inputs)
    };
    (0..case.columns).flat_map(|c| (0..case.rows).map(move |r| row(c, r))).collect()
}

fn agree(order: Order, columns: usize, ggml: fn(&Case) -> Vec<f32>) {
    for type_ in WeightType::ALL {
        if order == Order::Tiled && type_.block_len() != 256 {
            continue;
        }
        for blocks in [1, 2, 3, 8] {
            for fill in FILLS {
                let n_in = blocks * type_.block_len();
                let case = Case::new(type_, n_in, ROWS, columns, fill, 5 + blocks as u64);
                let want = by_reference(&case, order);
                let what = format!("{type_:?} {order:?} {blocks} blocks {fill:?}");
                same_bits(&ggml(&case), &want, &format!("ggml {what}"));
                for kernel in kernels_for(type_) {
                    let got = case.ours(&kernel, order, 0..ROWS);
                    same_bits(&got, &want, &format!("{} {what}", kernel.path()));
                }
            }
        }
    }
}

#[test]
fn reference_vec_dot_and_kernels_agree() {
    agree(Order::VecDot, 6, Case::vec_dot);
}

#[test]
fn reference_tiled_product_and_kernels_agree() {
    agree(Order::Tiled, 9, |case| case.mul_mat_id(1));
}

#[test]
fn the_two_orders_differ() {
    for type_ in WeightType::ALL.into_iter().filter(|t| t.block_len() == 256) {
        let case = Case::new(type_, 2048, ROWS, 1, FILLS[0], 1);
        let (a, b) = (by_reference(&case, Order::VecDot), by_reference(&case, Order::Tiled));
        assert!(a.iter().zip(&b).any(|(a, b)| a.to_bits() != b.to_bits()), "{type_:?}");
    }
}
