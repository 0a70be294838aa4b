//! Where the bytes of every expert are.
//!
//! An [`ExpertMap`] is built from the tensor table of a GGUF file (or of the
//! parts of a split model). This module knows names, shapes and byte ranges,
//! and nothing of ggml: whoever reads the header (`pinscope-ggml`) hands the
//! table in as [`TensorInfo`].

use std::collections::BTreeMap;
use std::path::PathBuf;

/// One tensor as the file header describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// GGUF name, for example `blk.3.ffn_gate_exps.weight`.
    pub name: String,
    /// Index into the list of files.
    pub file: u16,
    /// Absolute position in that file, bytes.
    pub offset: u64,
    /// Size, bytes.
    pub size: u64,
    /// Elements in each dimension, fastest first; the last one of an expert
    /// tensor counts experts.
    pub ne: [u64; 4],
}

/// One model file, as it was when the header was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFile {
    /// Path, as given or as derived for the parts of a split model.
    pub path: PathBuf,
    /// Length, bytes.
    pub len: u64,
}
