//! Traces of routing: which experts each layer of each token chose.
//!
//! A profile holds sums; a trace holds the order, which is what caching and
//! prediction are about. [`Recorder`] writes one while a model runs, a
//! [`Trace`] is one that was read, and [`simulate`](crate::simulate) replays
//! it. Traces that the BigMoeOnEdge project has published are read too.

mod big_moe_on_edge;
mod codec;
mod read;
mod record;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use record::Recorder;

use crate::layout::PAGE;
use crate::map::{ExpertMap, MapError, ModelFile, TensorInfo};
use crate::profile::{ModelId, ProfiledModel};

/// The routing of one model over some text.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Whose routing it is.
    pub model: TracedModel,
    /// What was chosen, in the order in which it was.
    pub passes: Vec<Pass>,
    /// The recording ended within a pass, of which nothing is here.
    pub cut: bool,
    /// What must be said wherever a figure from this trace is shown.
    pub caveat: Option<&'static str>,
}

/// What a trace knows of its model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedModel {
    /// Its identity; `None` in traces of other programs.
    pub id: Option<ModelId>,
    /// Name of its (first) file, for people.
    pub name: String,
    /// Experts of a layer, at most.
    pub experts_per_layer: u32,
    /// Experts that serve a token.
    pub top_k: u32,
    /// The layers with experts.
    pub layers: Vec<TracedLayer>,
}

/// A layer of a [`TracedModel`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedLayer {
    /// Its number in the model (`blk.N`).
    pub index: u32,
    /// How many experts it has.
    pub experts: u32,
    /// For each matrix of an expert: where that of expert 0 starts in the
    /// file, modulo a page, and its size, both in bytes.
    pub parts: Vec<(u64, u64)>,
}

impl TracedLayer {
    /// Size of one expert, bytes.
    pub fn expert_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.1).sum()
    }
}

/// One batch in one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Pass {
    /// Position in [`TracedModel::layers`].
    pub layer: u32,
    /// Tokens of the batch.
    pub tokens: u32,
    /// A generated token, not (the end of) a prompt.
    pub decode: bool,
    /// The experts that were chosen, each once.
    pub choices: Vec<Choice>,
}

/// An expert that a batch chose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Expert of the layer.
    pub expert: u32,
    /// Tokens of the batch that chose it, at least 1.
    pub tokens: u32,
    /// Mean weight with which they did; 0 if it is not known.
    pub weight: f32,
}

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TraceError {
    #[error("cannot read the trace {path}: {source}. `pinscope trace` makes one")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a trace of PinScope, nor one of BigMoeOnEdge: {why}. `pinscope trace` makes one")]
    NotATrace { path: PathBuf, why: String },
    #[error("{path} is a trace of version {found}, and this PinScope reads version {read}. Use the PinScope that made it, or record it anew", read = codec::VERSION)]
    Version { path: PathBuf, found: u32 },
    #[error("the trace {path} is cut off within its header. Record it anew")]
    NoHeader { path: PathBuf },
    #[error("the trace {path} is damaged in pass {pass}: {why}. Record it anew")]
    Damaged { path: PathBuf, pass: usize, why: &'static str },
    #[error("{path}, line {line}: {why}. A routing trace of BigMoeOnEdge was expected")]
    Line { path: PathBuf, line: usize, why: String },
}

impl TracedModel {
    /// The model of `map`, known as `model`.
    pub fn new(map: &ExpertMap, model: &ProfiledModel) -> Self {
        let layers = map.layers().iter().map(|l| TracedLayer {
            index: l.index as u32,
            experts: l.experts,
            parts: l.parts.iter().map(|p| (p.offset % PAGE, p.bytes)).collect(),
        });
        Self {
            id: Some(model.id),
            name: model.name.clone(),
            experts_per_layer: map.experts_per_layer(),
            top_k: map.top_k(),
            layers: layers.collect(),
        }
    }

    /// A map with the same experts, which lie elsewhere but just as well
    /// aligned: what a [`Layout`](crate::layout::Layout) is made of.
    ///
    /// # Errors
    /// A model that contradicts itself.
    pub fn map(&self) -> Result<ExpertMap, MapError> {
        let files =
            vec![ModelFile { path: self.name.clone().into(), len: u64::MAX, header_len: 0 }];
        let mut tensors = Vec::new();
        for layer in &self.layers {
            let names: &[&str] = match layer.parts.len() {
                1 => &["down"],
                2 => &["gate_up", "down"],
                _ => &["gate", "up", "down"],
            };
            for (name, &(offset, bytes)) in names.iter().zip(&layer.parts) {
                tensors.push(TensorInfo {
                    name: format!("blk.{}.ffn_{name}_exps.weight", layer.index),
                    file: 0,
                    offset,
                    size: bytes * u64::from(layer.experts),
                    ne: [1, 1, u64::from(layer.experts), 1],
                });
            }
        }
        ExpertMap::new(files, tensors, self.top_k)
    }
}

impl Trace {
    /// Tokens of prompts and generated ones.
    pub fn tokens(&self) -> (u64, u64) {
        let sum = |decode| {
            let first = self.passes.iter().filter(|p| p.layer == 0 && p.decode == decode);
            first.map(|p| u64::from(p.tokens)).sum()
        };
        (sum(false), sum(true))
    }
}
