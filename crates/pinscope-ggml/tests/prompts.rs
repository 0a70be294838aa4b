//! Prompts of any length have plain llama.cpp's bits: few columns of an expert
//! and many are added in different orders.

mod common;

use std::path::Path;

use common::{engine, model, model_with_dense, one_at_a_time};
use pinscope::reader::ReaderKind;
use pinscope_host::{Context, ContextOptions, Logits, Model, ModelOptions, Token};

/// Below, at and above the eight columns of an expert from which ggml adds in
/// another order; more than our kernels take at a time.
const PROMPTS: [usize; 5] = [1, 7, 8, 33, 512];

/// Bits of the logits of all tokens of a prompt, for each of [`PROMPTS`].
fn logits(path: &Path, threads: u32) -> Vec<Vec<u32>> {
    let model = Model::load(path, ModelOptions::default()).unwrap();
    let vocab = model.n_vocab().min(256);
    PROMPTS
        .map(|n| {
            let options = ContextOptions {
                n_ctx: 512,
                n_batch: 512,
                n_ubatch: 512,
                threads,
                threads_batch: threads,
                ..Default::default()
            };
            let mut ctx = Context::new(&model, options).unwrap();
            let prompt: Vec<_> = (0..n).map(|i| ((i * i * 31 + 7 * i) % vocab) as Token).collect();
            ctx.decode(&prompt, 0, Logits::All).unwrap();
            (0..n)
                .flat_map(|i| ctx.logits(i).iter().map(|l| l.to_bits()).collect::<Vec<_>>())
                .collect()
        })
        .into()
}

fn prompts_are_exact(types: &str) {
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    are_exact(&model(dir.path(), "tiny-qwen3moe", types.parse().unwrap()), types);
}

fn prompts_are_exact_with_dense(types: &[&str], shape: &str) {
    let _turn = one_at_a_time();
    for types in types {
        let dir = tempfile::tempdir().unwrap();
        are_exact(&model_with_dense(dir.path(), shape, types), types);
    }
}

fn are_exact(path: &Path, types: &str) {
    let reference = logits(path, 2);
    for (permille, threads) in [(1000, 2), (0, 1), (0, 8)] {
        let _engine = engine(path, permille, ReaderKind::Auto);
        for (n, (got, want)) in PROMPTS.iter().zip(logits(path, threads).iter().zip(&reference)) {
            assert!(got == want, "{types}: {n} tokens at {permille} permille, {threads} threads");
        }
    }
}

#[test]
fn prompts_with_q4_k_are_exact() {
    prompts_are_exact("Q4_K");
}

#[test]
fn prompts_with_q5_k_are_exact() {
    prompts_are_exact("Q5_K");
}

#[test]
fn prompts_with_q6_k_are_exact() {
    prompts_are_exact("Q6_K");
}

#[test]
fn prompts_with_mxfp4_are_exact() {
    prompts_are_exact("MXFP4");
}

#[test]
fn prompts_with_q8_0_are_exact() {
    prompts_are_exact("Q8_0");
}

#[test]
fn prompts_with_k_quantised_dense_weights_are_exact() {
    prompts_are_exact_with_dense(&["Q4_K", "Q5_K", "Q6_K"], "tiny-qwen3moe");
}

#[test]
fn prompts_with_block_quantised_dense_weights_are_exact() {
    prompts_are_exact_with_dense(&["Q4_0", "IQ4_XS", "MXFP4", "F16"], "tiny-qwen3moe");
}

#[test]
fn prompts_with_quantised_shared_experts_and_dense_layers_are_exact() {
    prompts_are_exact_with_dense(&["Q4_K", "Q8_0"], "tiny-deepseek2");
}
