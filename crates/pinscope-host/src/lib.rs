//! A small safe layer over llama.cpp: load, decode, sample, chat.
//!
//! It sits on `llama-cpp-sys-2` and not on the safe crate `llama-cpp-2`: that
//! one cannot switch weight repacking off, cannot lend a tensor observer to a
//! context, cannot load a model without allocating it and cannot keep
//! llama.cpp from reading the whole file at start. PinScope needs all four.
//!
//! Unsafe code lives in `model`, `context`, `lora`, `measure`, `sampler`, `skeleton`,
//! `log` and `wrap`.

mod chat;
mod context;
mod log;
mod lora;
mod measure;
mod model;
mod sampler;
mod skeleton;
mod tensor;
pub mod wrap;

pub use chat::ChatMessage;
pub use context::{Context, ContextOptions, Logits};
pub use log::{init, last_errors};
pub use lora::Lora;
pub use measure::ContextCost;
pub use model::{Model, ModelOptions};
pub use sampler::{Sampler, SamplerOptions};
pub use skeleton::Skeleton;
pub use tensor::{TensorObserver, TensorView};

use std::path::PathBuf;

/// A token id, an index into the model's vocabulary.
pub type Token = i32;

/// What can go wrong between PinScope and llama.cpp.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The file is not there, not readable, not a GGUF, or llama.cpp refused it.
    #[error("cannot load {path}: {reason}")]
    Load {
        /// The file as it was given.
        path: PathBuf,
        /// What is wrong and, where known, what to do.
        reason: String,
    },
    /// The progress callback of [`ModelOptions::progress`] said stop.
    #[error("loading was cancelled")]
    Cancelled,
    /// No context could be made for this model with these options.
    #[error("cannot make a context: {reason}")]
    Context {
        /// What is wrong.
        reason: String,
    },
    /// The tokens do not fit behind those already in the context.
    #[error(
        "the context is full: {pos} + {tokens} tokens do not fit in {n_ctx}; \
         ask for a larger context (-c) or a shorter text"
    )]
    ContextFull {
        /// Position of the first new token.
        pos: u32,
        /// How many were to be added.
        tokens: usize,
        /// Size of the context.
        n_ctx: u32,
    },
    /// llama.cpp could not compute the batch.
    #[error("decode failed: {reason}")]
    Decode {
        /// What is wrong.
        reason: String,
    },
    /// The text cannot be cut into tokens of this model.
    #[error("cannot tokenize: {reason}")]
    Tokenize {
        /// What is wrong.
        reason: String,
    },
    /// The chat cannot be written in the model's template.
    #[error("cannot apply the chat template: {reason}")]
    Template {
        /// What is wrong.
        reason: String,
    },
    /// A sampling option is outside of its range.
    #[error("bad sampling option: {reason}")]
    Sampler {
        /// Which one, and what is allowed.
        reason: String,
    },
    /// [`ContextOptions::abort`] became true while decoding.
    #[error("stopped on request")]
    Aborted,
}
