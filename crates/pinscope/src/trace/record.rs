//! Writing traces, while the model runs.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use super::{codec, Choice, TracedModel};
use crate::residency::Demand;

/// More than this waits for no token's end; bytes.
const MOST_PENDING: usize = 1 << 20;

/// Writes what the router chooses to a file, token by token: when the process
/// is killed, the tokens before the last one are there.
pub struct Recorder {
    out: Box<dyn Write + Send>,
    pending: Vec<u8>,
    body: Vec<u8>,
    failed: Option<io::Error>,
}

impl Recorder {
    /// Starts a trace of `model` at `path`. A file that is there is replaced.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path, model: &TracedModel) -> io::Result<Self> {
        Self::new(Box::new(File::create(path)?), model)
    }

    /// The same to any sink.
    pub(super) fn new(mut out: Box<dyn Write + Send>, model: &TracedModel) -> io::Result<Self> {
        out.write_all(&codec::header(model))?;
        Ok(Self { out, pending: Vec::new(), body: Vec::new(), failed: None })
    }

    /// Takes note of what a batch of `tokens` chose in `layer`. The model
    /// goes on whether or not it can be written; [`Recorder::finish`] tells.
    pub fn pass(&mut self, layer: usize, tokens: usize, decode: bool, demand: &[Demand]) {
        if layer == 0 || self.pending.len() > MOST_PENDING {
            self.flush();
        }
        if self.failed.is_some() {
            return;
        }
        let choices = demand.iter().map(|d| Choice {
            expert: d.expert,
            tokens: d.tokens.max(1),
            weight: d.weight / d.tokens.max(1) as f32,
        });
        let pass = (layer as u32, tokens.max(1) as u32, decode);
        codec::put_pass(&mut self.pending, &mut self.body, pass, choices);
    }

    /// Writes what is left.
    ///
    /// # Errors
    /// What kept any part of the trace from being written; what is there up to
    /// then can be read.
    pub fn finish(mut self) -> io::Result<()> {
        self.flush();
        self.failed.take().map_or(Ok(()), Err)
    }

    fn flush(&mut self) {
        if self.failed.is_none() {
            self.failed = self.out.write_all(&self.pending).err();
        }
        self.pending.clear();
    }
}
