//! Models of a given shape with random weights and realistic routing.
//!
//! Three things make the routing behave like that of trained models: all token
//! embeddings share a direction, and router rows have random components along it, so
//! some experts are popular; and a layer's output is small against the residual stream,
//! so neighbouring layers see nearly the same state.

mod fill;
mod plan;
mod shape;

use std::path::{Path, PathBuf};

pub use fill::Content;
pub use shape::{Arch, Latent, Realism, Shape};

use crate::error::Error;
#[cfg(test)]
use crate::gguf::Value;
use crate::gguf::{Header, TensorType};
use crate::model_file::{write_model, Progress};
use fill::Filler;

/// The formats of the expert tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertTypes {
    /// The one that the shape names.
    Shape,
    /// This one everywhere.
    All(TensorType),
    /// Changing between layers and between gate, up and down.
    Mixed,
}

impl std::str::FromStr for ExpertTypes {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text.eq_ignore_ascii_case("mixed") {
            return Ok(Self::Mixed);
        }
        TensorType::parse(text).map(Self::All)
    }
}

/// Choices that do not change the shape.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Formats of the expert tensors.
    pub experts: ExpertTypes,
    /// Number of files.
    pub parts: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { seed: 1, experts: ExpertTypes::Shape, parts: 1 }
    }
}

/// Writes a model of `shape` to `out` (or to `out`'s parts) and returns the file names.
///
/// # Errors
/// When a type does not fit the shape or the disk refuses the file; then no file is left.
pub fn write(
    shape: &Shape,
    options: &Options,
    out: &Path,
    progress: Progress,
) -> Result<Vec<PathBuf>, Error> {
    write_with(shape, &plan::values(shape), options, out, progress)
}

fn write_with(
    shape: &Shape,
    values: &Header,
    options: &Options,
    out: &Path,
    progress: Progress,
) -> Result<Vec<PathBuf>, Error> {
    let plan = plan::tensors(shape, options.experts)?;
    let infos: Vec<_> = plan.iter().map(|(info, _)| info.clone()).collect();
    let mut filler = Filler::new(options.seed, shape.embd as usize);
    write_model(
        out,
        values,
        &infos,
        options.parts,
        |index, file| filler.fill(&infos[index], &plan[index].1, file),
        progress,
    )
}

/// A small dense model of the llama architecture.
#[cfg(test)]
pub(crate) fn write_dense(out: &Path) {
    let shape = Shape::named("tiny-mixtral").expect("it exists");
    let shape = Shape { dense_layers: shape.layers, ..shape };
    let mut values = plan::values(&shape);
    values.set("llama.expert_count", &Value::U32(0));
    values.set("llama.expert_used_count", &Value::U32(0));
    write_with(&shape, &values, &Options::default(), out, &mut |_, _| ()).expect("written");
}
