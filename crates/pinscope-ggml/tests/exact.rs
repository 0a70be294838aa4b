//! Bits: whatever the budget, the logits are those of plain llama.cpp with
//! everything in RAM and weights not repacked.

mod common;

use common::{engine, model, one_at_a_time, run};
use pinscope::reader::ReaderKind;
use pinscope_models::synth::ExpertTypes;

/// Everything, half, a quarter, and the smallest arena that works.
const BUDGETS: [u64; 4] = [1000, 500, 250, 0];

fn is_exact(shape: &str, types: &[&str]) {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    for types in types {
        let experts = if types.is_empty() { ExpertTypes::Shape } else { types.parse().unwrap() };
        let path = model(dir.path(), shape, experts);
        let reference = run(&path, 1).unwrap();
        let varied: std::collections::HashSet<_> = reference.tokens.iter().collect();
        assert!(varied.len() > 1, "{shape} {types}: a model that says one thing proves little");
        for permille in BUDGETS {
            let engine = engine(&path, permille, ReaderKind::Auto);
            let got = run(&path, 1).unwrap_or_else(|e| panic!("{e}: {:?}", engine.take_error()));
            assert_eq!(got, reference, "{shape} {types} at {permille} permille");
            let stats = engine.stats();
            assert!(stats.decode.tokens >= common::DECODE as u64, "the device took part");
            assert!(permille == 1000 || stats.decode.misses > 0, "the budget was felt");
        }
    }
}

#[test]
fn qwen3moe_is_exact() {
    is_exact("tiny-qwen3moe", &[""]);
}

#[test]
fn gpt_oss_with_mxfp4_and_biases_is_exact() {
    is_exact("tiny-gpt-oss", &[""]);
}

#[test]
fn mixtral_is_exact() {
    is_exact("tiny-mixtral", &[""]);
}

#[test]
fn deepseek2_with_shared_experts_and_grouped_routing_is_exact() {
    is_exact("tiny-deepseek2", &[""]);
}

#[test]
fn olmoe_is_exact() {
    is_exact("tiny-olmoe", &[""]);
}

#[test]
fn fused_gate_and_up_is_exact() {
    is_exact("tiny-fused", &[""]);
}

#[test]
fn float_experts_are_exact() {
    is_exact("tiny-qwen3moe", &["F32", "F16", "BF16"]);
}

#[test]
fn block_quantised_experts_are_exact() {
    is_exact("tiny-qwen3moe", &["Q4_0", "Q8_0", "MXFP4", "IQ4_XS"]);
}

#[test]
fn k_quantised_experts_are_exact() {
    is_exact("tiny-qwen3moe", &["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]);
}

#[test]
fn experts_of_mixed_types_and_sizes_are_exact() {
    is_exact("tiny-qwen3moe", &["mixed"]);
}

#[test]
fn one_two_and_eight_threads_give_the_same_bits() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let reference = run(&path, 1).unwrap();
    for threads in [1, 2, 8] {
        let _engine = engine(&path, 250, ReaderKind::Auto);
        assert_eq!(run(&path, threads).unwrap(), reference, "{threads} threads");
    }
}

#[test]
fn the_thread_pool_reader_gives_the_same_bits() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let reference = run(&path, 1).unwrap();
    let _engine = engine(&path, 250, ReaderKind::Pread);
    assert_eq!(run(&path, 1).unwrap(), reference);
}

#[test]
fn one_wrong_byte_in_one_expert_is_noticed() {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", "F32".parse().unwrap());
    let reference = run(&path, 1).unwrap();
    let map = pinscope_ggml::read_map(&path).unwrap();
    let part = map.layers()[1].parts[0].clone();
    let bytes = std::fs::read(&path).unwrap();
    // Which experts the router likes is the model's secret: of six, one at
    // least is asked for in 235 tokens.
    let noticed = (0..6).filter(|e| {
        let mut bytes = bytes.clone();
        bytes[(part.offset + e * part.bytes + 3) as usize] ^= 1; // a weight's exponent
        std::fs::write(&path, bytes).unwrap();
        let _engine = engine(&path, 250, ReaderKind::Auto);
        run(&path, 1).unwrap().sha != reference.sha
    });
    assert!(noticed.count() > 0);
}
