//! The bits are ggml's, for every type, kernel and shape.

mod common;

use common::{kernels, same_bits, Case, Fill, FILLS};
use pinscope_kernels::{Order, WeightType};

/// Blocks in a row: odd and even, one and many.
const BLOCKS: [usize; 5] = [1, 2, 3, 8, 11];

/// Linux says which instructions there are, and may be used.
#[test]
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn the_widest_path_that_the_processor_has_comes_first() {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let flags = cpu.lines().find(|l| l.starts_with("flags")).unwrap();
    let has = |wanted: &[&str]| wanted.iter().all(|w| flags.split(' ').any(|f| f == *w));
    let avx2 = has(&["avx2", "fma", "f16c"]);
    let avx512 = avx2 && has(&["avx512f", "avx512bw", "avx512vl", "avx512_vnni"]);
    let want = match (avx512, avx2) {
        (true, _) => vec!["avx512", "avx2"],
        (false, true) => vec!["avx2"],
        _ => vec![],
    };
    for type_ in WeightType::ALL {
        let paths: Vec<_> = pinscope_kernels::kernels_for(type_).iter().map(|k| k.path()).collect();
        assert_eq!(paths, want, "{type_:?}");
    }
}

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

/// Sums of Q4_0 and Q8_0 as ggml forms them on ARM, in plain Rust: `lane` is
/// where the product of a block's weight is added.
#[cfg(target_arch = "aarch64")]
fn four_lanes(case: &Case, lane: fn(usize) -> usize) -> Vec<f32> {
    // SAFETY: a plain function.
    let scale = |block: &[u8]| unsafe {
        llama_cpp_sys_2::ggml_fp16_to_fp32(u16::from_le_bytes([block[0], block[1]]))
    };
    let weight = |block: &[u8], i: usize| match case.type_ {
        WeightType::Q8_0 => i32::from(block[2 + i] as i8),
        _ => i32::from(block[2 + i % 16] >> (i / 16 * 4) & 15) - 8,
    };
    let (block_bytes, blocks) = (case.type_.block_bytes(), case.n_in / 32);
    let mut out = Vec::new();
    for x in case.inputs.chunks_exact(34 * blocks) {
        for w in case.weights.chunks_exact(case.row_bytes()) {
            let (mut total, mut rest) = ([[0.0f32; 4]; 2], None);
            for (b, (w, x)) in w.chunks_exact(block_bytes).zip(x.chunks_exact(34)).enumerate() {
                let mut sums = [0i32; 4];
                for i in 0..32 {
                    sums[lane(i)] += weight(w, i) * i32::from(x[2 + i] as i8);
                }
                if b + 1 == blocks && b % 2 == 0 {
                    rest = Some((sums.iter().sum::<i32>() as f32, scale(w), scale(x)));
                } else {
                    let scale = scale(w) * scale(x);
                    total[b % 2].iter_mut().zip(sums).for_each(|(t, s)| *t += s as f32 * scale);
                }
            }
            let [a, b] = total.map(|t| (t[0] + t[1]) + (t[2] + t[3]));
            out.push(match (rest, case.type_) {
                (None, _) => a + b,
                (Some((sum, w, x)), WeightType::Q8_0) => sum.mul_add(w * x, a + b),
                (Some((sum, w, x)), _) => (sum * w).mul_add(x, a + b),
            });
        }
    }
    out
}

/// The ggml that is linked shows only one of the two ways to fill lanes.
#[test]
#[cfg(target_arch = "aarch64")]
fn both_ways_to_fill_lanes_have_the_bits_of_a_model() {
    for type_ in [WeightType::Q4_0, WeightType::Q8_0] {
        for kernel in pinscope_kernels::kernels_for(type_) {
            let lane = match kernel.path() {
                "dotprod" => |i| i / 4 % 4,
                _ => |i| i / 2 % 4,
            };
            for blocks in BLOCKS {
                let case = Case::new(type_, 32 * blocks, 7, 6, Fill::Usual, blocks as u64);
                let got = case.ours(&kernel, Order::VecDot, 0..7);
                same_bits(&got, &four_lanes(&case, lane), &format!("{kernel:?} {blocks} blocks"));
            }
        }
    }
}

proptest::proptest! {
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
