//! Sparse upcycling: a dense model becomes a Mixture of Experts (Komatsuzaki et al.
//! 2022, <https://arxiv.org/abs/2212.05055>).
//!
//! Every expert is a slightly perturbed copy of the layer's dense network. The routers are
//! not trained but clustered: their rows are the directions into which the network's
//! inputs fall on a real text, so different words go to different experts.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use half::f16;
use pinscope_host::{Model, ModelOptions, TensorView};
use rand::rngs::SmallRng;
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

use crate::disk::PartialFile;
use crate::error::Error;
use crate::gguf::{Header, TensorInfo, TensorType, Value};
use crate::kmeans;
use crate::model_file::{write_model, StoredModel};
use crate::states::{run_over, ByLayer};

/// The node whose values enter the dense network.
const INPUT: &str = "ffn_norm";
/// Tokens that are seen together as one text.
const WINDOW: usize = 512;
/// Fewer tokens than this for each expert make no sensible clusters.
const TOKENS_PER_EXPERT: usize = 16;

/// How to make the experts.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Experts in a layer.
    pub experts: u32,
    /// Experts that a token uses.
    pub top_k: u32,
    /// Standard deviation of the perturbation against that of the weights.
    pub noise: f32,
    /// Sharpness of the routers: the logit of a state at mean distance in the direction
    /// of a router row.
    pub temperature: f32,
    /// Type of the experts.
    pub ty: TensorType,
    /// Tokens of the text to run at most.
    pub tokens: usize,
    /// Seed of clusters and perturbations.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            experts: 32,
            top_k: 4,
            noise: 0.05,
            temperature: 12.0,
            ty: TensorType::Q8_0,
            tokens: 16_000,
            seed: 0,
        }
    }
}

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The dense model reads the text; counted in tokens.
    Reading,
    /// Router rows are looked for; counted in layers.
    Clustering,
    /// The new model is written; counted in bytes.
    Writing,
}

/// Makes a Mixture of Experts of the dense llama-architecture model `base`, with routers
/// that fit `text`, and writes it to `out`.
///
/// # Errors
/// When the base is no such model, the text is too short for that many experts, the type
/// does not fit the network's rows, or the disk refuses the file.
pub fn upcycle(
    base: &Path,
    text: &str,
    options: &Options,
    out: &Path,
    progress: &mut dyn FnMut(Stage, u64, u64),
) -> Result<PathBuf, Error> {
    let dense = StoredModel::open(base)?;
    check(base, &dense, options)?;
    let (states, width) = read_text(base, text, options, &mut |done, total| {
        progress(Stage::Reading, done, total);
    })?;
    let routers = routers(states, width, options, &mut |done, total| {
        progress(Stage::Clustering, done, total);
    });
    let mut plan = Vec::new();
    for (index, info) in dense.tensors.iter().enumerate() {
        match dense_part(&info.name) {
            None => plan.push((info.clone(), Source::Copy(index))),
            Some((layer, part)) => {
                let name = format!("blk.{layer}.ffn_{part}_exps.weight");
                let ne = [&info.ne[..], &[u64::from(options.experts)]].concat();
                let ty = options.ty;
                plan.push((TensorInfo { name, ty, ne }, Source::Experts(index)));
            }
        }
    }
    for layer in routers.keys() {
        let info = TensorInfo {
            name: format!("blk.{layer}.ffn_gate_inp.weight"),
            ty: TensorType::F32,
            ne: vec![width as u64, u64::from(options.experts)],
        };
        plan.push((info, Source::Router(*layer)));
    }
    let mut values = Header::default();
    values.copy_values(&dense.header);
    values.set("llama.expert_count", &Value::U32(options.experts));
    values.set("llama.expert_used_count", &Value::U32(options.top_k));
    let name = dense.header.get_str("general.name").unwrap_or_else(|| "model".into());
    let name = format!("{name} upcycled to {} experts", options.experts);
    values.set("general.name", &Value::Str(name));
    let (new, sources): (Vec<_>, Vec<_>) = plan.into_iter().unzip();
    let mut files = write_model(
        out,
        &values,
        &new,
        1,
        |index, file| match sources[index] {
            Source::Copy(old) => file.write(&dense.read(old)?),
            Source::Router(layer) => file.write(&TensorType::F32.encode(&routers[&layer])),
            Source::Experts(old) => write_experts(&dense.floats(old)?, old as u64, options, file),
        },
        &mut |done, total| progress(Stage::Writing, done, total),
    )?;
    Ok(files.remove(0))
}

/// Where the data of a new tensor comes from; indices are those of the base's tensors.
enum Source {
    Copy(usize),
    Experts(usize),
    Router(u32),
}

/// Layer and part (`gate`, `up` or `down`) of a dense network's matrix.
fn dense_part(name: &str) -> Option<(u32, &str)> {
    let (layer, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
    let part = tensor.strip_prefix("ffn_")?.strip_suffix(".weight")?;
    matches!(part, "gate" | "up" | "down").then_some((layer.parse().ok()?, part))
}

fn check(base: &Path, dense: &StoredModel, options: &Options) -> Result<(), Error> {
    if dense.header.get_integer("split.count").is_some_and(|parts| parts > 1) {
        return Err(Error::bad_model(base, "split models are not upcycled; join the parts first"));
    }
    let bad = |reason: &str| Err(Error::bad_model(base, reason));
    let arch = dense.header.get_str("general.architecture").unwrap_or_default();
    if arch != "llama" {
        return bad(&format!(
            "its architecture is '{arch}'; upcycling needs a dense 'llama' model"
        ));
    }
    if dense.header.get_integer("llama.expert_count").is_some_and(|n| n > 0) {
        return bad("it is a Mixture of Experts already; give a dense model");
    }
    if dense.tensors.iter().any(|t| t.name.contains(".ffn_") && t.name.ends_with(".bias")) {
        return bad("its networks have biases, which llama.cpp's llama experts cannot have");
    }
    if dense.header.alignment() != Header::default().alignment() {
        return bad("its data alignment is not GGUF's default");
    }
    if options.top_k == 0 || options.top_k > options.experts {
        return Err(Error::Usage(format!(
            "a token cannot use {} of {} experts",
            options.top_k, options.experts
        )));
    }
    let matrices = dense.tensors.iter().filter(|t| dense_part(&t.name).is_some());
    let block = options.ty.block() as u64;
    if let Some(odd) = matrices.clone().find(|t| t.ne[0] % block != 0) {
        return Err(Error::Usage(format!(
            "{} has rows of {} elements, which {} cannot hold (a multiple of {block} is needed); choose another --type",
            odd.name, odd.ne[0], options.ty
        )));
    }
    match matrices.count() {
        0 => bad("it has no dense networks"),
        _ => Ok(()),
    }
}

/// Runs the dense model and keeps what enters each layer's network, as half floats: at
/// full precision the states would be the largest thing in memory. Also returns the
/// length of one state.
fn read_text(
    base: &Path,
    text: &str,
    options: &Options,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(ByLayer<Vec<f16>>, usize), Error> {
    let model = Model::load(base, ModelOptions { repack: true, ..ModelOptions::default() })?;
    let mut tokens = model.tokenize(text, false, false)?;
    tokens.truncate(options.tokens);
    let needed = options.experts as usize * TOKENS_PER_EXPERT;
    if tokens.len() < needed {
        return Err(Error::Usage(format!(
            "the text has {} tokens; {} experts need at least {needed}: give a longer text or fewer experts",
            tokens.len(),
            options.experts
        )));
    }
    let states = Rc::new(RefCell::new(ByLayer::<Vec<f16>>::new()));
    let kept = Rc::clone(&states);
    let see = Rc::new(RefCell::new(move |_: &str, layer, values: &TensorView| {
        let values = values.f32().unwrap_or_default();
        let halves = values.into_iter().map(f16::from_f32);
        kept.borrow_mut().entry(layer).or_default().extend(halves);
    }));
    run_over(&model, &tokens, WINDOW, &[INPUT], see, progress)?;
    let states = states.take();
    let expected = tokens.len() * model.n_embd();
    let complete = states.values().all(|s| s.len() == expected);
    if states.len() != model.n_layer() || !complete {
        return Err(Error::bad_model(base, format!("node {INPUT} was not seen in every layer")));
    }
    Ok((states, model.n_embd()))
}

/// A router for each layer: its rows one after the other.
fn routers(
    states: ByLayer<Vec<f16>>,
    width: usize,
    options: &Options,
    progress: &mut dyn FnMut(u64, u64),
) -> ByLayer<Vec<f32>> {
    let total = states.len() as u64;
    let mut states: Vec<_> = states.into_iter().collect();
    let mut routers = ByLayer::new();
    let threads = rayon::current_num_threads();
    while !states.is_empty() {
        let group: Vec<_> = states.drain(..threads.min(states.len())).collect();
        routers.par_extend(group.into_par_iter().map(|(layer, states)| {
            let points: Vec<f32> = states.iter().map(|v| v.to_f32()).collect();
            let seed = options.seed ^ u64::from(layer);
            let found = kmeans::cluster(points, width, options.experts as usize, seed);
            let scale = options.temperature / found.distance;
            let rows = found.centroids.into_iter().flatten();
            (layer, rows.map(|v| v * scale).collect())
        }));
        progress(routers.len() as u64, total);
    }
    routers
}

/// Writes all experts of one matrix.
fn write_experts(
    dense: &[f32],
    matrix: u64,
    options: &Options,
    file: &mut PartialFile,
) -> Result<(), Error> {
    let count = dense.len() as f32;
    let mean = dense.iter().sum::<f32>() / count;
    let variance = dense.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / count;
    let noise = variance.sqrt() * options.noise;
    let perturbed = |expert: u32| {
        let stream = options.seed ^ (matrix << 32) ^ u64::from(expert);
        let mut rng = SmallRng::seed_from_u64(stream);
        let values: Vec<f32> = dense.iter().map(|v| v + noise * unit_normal(&mut rng)).collect();
        options.ty.encode(&values)
    };
    let threads = rayon::current_num_threads() as u32;
    for first in (0..options.experts).step_by(threads as usize) {
        let group = first..options.experts.min(first + threads);
        let experts: Vec<Vec<u8>> = group.into_par_iter().map(perturbed).collect();
        experts.iter().try_for_each(|bytes| file.write(bytes))?;
    }
    Ok(())
}

fn unit_normal(rng: &mut SmallRng) -> f32 {
    StandardNormal.sample(rng)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_dense_matrices_become_experts() {
        assert_eq!(dense_part("blk.12.ffn_gate.weight"), Some((12, "gate")));
        assert_eq!(dense_part("blk.0.ffn_down.weight"), Some((0, "down")));
        assert_eq!(dense_part("blk.0.ffn_norm.weight"), None);
        assert_eq!(dense_part("blk.0.attn_q.weight"), None);
        assert_eq!(dense_part("token_embd.weight"), None);
    }

    use crate::TEXT;
    use pinscope_host::{Context, ContextOptions, Logits};

    fn last_logits(path: &Path) -> Vec<f32> {
        let model = Model::load(path, ModelOptions::default()).unwrap();
        let tokens = model.tokenize(&TEXT[..200], false, false).unwrap();
        let mut context = Context::new(&model, ContextOptions::default()).unwrap();
        context.decode(&tokens, 0, Logits::Last).unwrap();
        context.logits(0).to_vec()
    }

    fn distance(a: &[f32], b: &[f32]) -> f32 {
        let sum = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>();
        sum(&mut a.iter().zip(b).map(|(x, y)| x - y)) / sum(&mut a.iter().copied())
    }

    /// The experts' weights sum to one, so equal experts must act as the dense network.
    #[test]
    fn unperturbed_experts_compute_what_the_dense_model_computes() {
        let dir = tempfile::tempdir().unwrap();
        let (base, out) = (dir.path().join("dense.gguf"), dir.path().join("moe.gguf"));
        crate::synth::write_dense(&base);
        let options = Options { experts: 8, top_k: 2, noise: 0.0, ..Options::default() };
        let mut stages = Vec::new();
        let file =
            upcycle(&base, TEXT, &options, &out, &mut |stage, _, _| stages.push(stage)).unwrap();
        stages.dedup();
        assert_eq!(stages, [Stage::Reading, Stage::Clustering, Stage::Writing]);
        let exact = distance(&last_logits(&base), &last_logits(&file));
        assert!(exact < 1e-3, "relative distance {exact}");
        let report = crate::routing::measure(&file, TEXT, 300, &mut |_, _| ()).unwrap();
        assert_eq!((report.experts, report.top_k, report.layers), (8, 2, 4));
        // Clusters spread the tokens: no two experts take nearly everything.
        assert!(report.overall.top_k_share < 0.8, "{:?}", report.overall);

        let noisy = Options { noise: 0.5, ..options };
        upcycle(&base, TEXT, &noisy, &out, &mut |_, _, _| ()).unwrap();
        let changed = distance(&last_logits(&base), &last_logits(&out));
        assert!(changed > 10.0 * exact, "noise changed only {changed}");
    }

    #[test]
    fn a_text_too_short_for_the_experts_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("dense.gguf");
        crate::synth::write_dense(&base);
        let out = dir.path().join("moe.gguf");
        let short = upcycle(&base, "few words", &Options::default(), &out, &mut |_, _, _| ());
        assert!(short.unwrap_err().to_string().contains("at least 512"));
        let many = Options { top_k: 33, ..Options::default() };
        let many = upcycle(&base, TEXT, &many, &out, &mut |_, _, _| ());
        assert!(many.unwrap_err().to_string().contains("33 of 32"));
        assert!(!out.exists());
    }
}
