//! Runs of tiny models, with and without the engine.

#![allow(dead_code)] // each test binary uses its share

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pinscope::policy::PolicyKind;
use pinscope::reader::ReaderKind;
use pinscope_ggml::{read_map, Engine, EngineOptions};
use pinscope_host::{Context, ContextOptions, HostError, Logits, Model, ModelOptions, Token};
use pinscope_models::gguf::TensorType;
use pinscope_models::synth::{self, ExpertTypes, Shape};
use sha2::{Digest, Sha256};

/// Tokens of the prompt, in uneven batches, and of the forced continuation.
pub const PROMPT: usize = 203;
pub const DECODE: usize = 32;

/// ggml knows one PinScope device a process: one engine at a time.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a tiny model.
pub fn model(dir: &Path, shape: &str, experts: ExpertTypes) -> PathBuf {
    let out = dir.join(format!("{shape}.gguf"));
    write(&Shape::named(shape).unwrap(), experts, &out);
    out
}

/// The same with another type of the weights that are not experts'.
pub fn model_with_dense(dir: &Path, shape: &str, dense: &str) -> PathBuf {
    let out = dir.join(format!("{shape}-{dense}.gguf"));
    let dense_type = TensorType::parse(dense).unwrap();
    let shape = Shape { dense_type, ..Shape::named(shape).unwrap() };
    write(&shape, ExpertTypes::Shape, &out);
    out
}

fn write(shape: &Shape, experts: ExpertTypes, out: &Path) {
    let options = synth::Options { experts, ..synth::Options::default() };
    synth::write(shape, &options, out, &mut |_, _| {}).unwrap();
}

/// What a run computed.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// SHA-256 of the logits of every token.
    pub sha: String,
    /// Most likely tokens of the continuation.
    pub tokens: Vec<usize>,
}

/// Runs the forced token stream through `path` in this process, with whatever
/// engine is active.
pub fn run(path: &Path, threads: u32) -> Result<Outcome, HostError> {
    run_with(path, ContextOptions { threads, threads_batch: threads, ..Default::default() }, None)
}

/// The same with a choice of context and a LoRA adapter.
pub fn run_with(
    path: &Path,
    options: ContextOptions,
    lora: Option<&Path>,
) -> Result<Outcome, HostError> {
    run_again_if(&|| false, path, options, lora)
}

/// The same; a batch that fails is computed again if `again` says so.
pub fn run_again_if(
    again: &dyn Fn() -> bool,
    path: &Path,
    options: ContextOptions,
    lora: Option<&Path>,
) -> Result<Outcome, HostError> {
    let model = Model::load(path, ModelOptions::default())?;
    let options = ContextOptions { n_ctx: 512, n_batch: 128, n_ubatch: 64, ..options };
    let mut ctx = Context::new(&model, options)?;
    if let Some(lora) = lora {
        ctx.set_loras(&[(model.load_lora(lora)?, 1.0)])?;
    }
    let n = model.n_vocab();
    let mut stream = (0..PROMPT + DECODE).scan(12345u64, |x, _| {
        *x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some(((*x >> 33) as usize % n.min(256)) as Token)
    });
    let mut sha = Sha256::new();
    let mut tokens = Vec::new();
    let mut pos = 0;
    let mut feed = |batch: &[Token], tokens: &mut Vec<usize>, keep: bool| {
        // Pieces of a long prompt have no output: their last layer is empty.
        let silent = batch.len() == 7;
        while let Err(e) = ctx.decode(batch, pos, if silent { Logits::None } else { Logits::All }) {
            if !again() {
                return Err(e);
            }
            assert!(ctx.truncate(pos));
        }
        pos += batch.len() as u32;
        for i in 0..if silent { 0 } else { batch.len() } {
            let logits = ctx.logits(i);
            assert!(logits.len() == n && logits.iter().all(|l| l.is_finite()), "bad logits");
            logits.iter().for_each(|l| sha.update(l.to_le_bytes()));
            if keep {
                let best = (0..n).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
                tokens.extend(best);
            }
        }
        Ok::<_, HostError>(())
    };
    let mut left = PROMPT;
    for size in [1, 7, 64, 100].into_iter().cycle() {
        let batch: Vec<_> = stream.by_ref().take(size.min(left)).collect();
        left -= batch.len();
        feed(&batch, &mut tokens, false)?;
        if left == 0 {
            break;
        }
    }
    for token in stream {
        feed(&[token], &mut tokens, true)?;
    }
    let sha = sha.finalize().iter().map(|b| format!("{b:02x}")).collect();
    Ok(Outcome { sha, tokens })
}

/// An engine with `permille` of the arena in which everything fits, or the
/// smallest that works.
pub fn engine(path: &Path, permille: u64, reader: ReaderKind) -> Engine {
    let map = read_map(path).unwrap();
    let full = pinscope::layout::Layout::full_bytes(&map);
    let least = pinscope::layout::Layout::min_bytes(&map);
    let arena_bytes = least.max(full * permille / 1000);
    Engine::register(EngineOptions {
        map,
        arena_bytes,
        policy: PolicyKind::default(),
        reader,
        pins: None,
        repin: false,
        prefetch: true,
    })
    .unwrap()
}
