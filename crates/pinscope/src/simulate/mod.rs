//! Replays of a trace through a cache policy, without a model and without I/O.
//!
//! A [`Room`] says what fits; [`replay`] gives it to a policy, [`belady`] to
//! the one that knows the future. Experts come and go by the rules of
//! [`Residency`](crate::residency::Residency): a layer's experts are all
//! announced, those that are there are in use, and each missing one takes a
//! free place or that of a victim that is not in use; a pass that needs more
//! than there is runs in waves. Prefetches and pins are not simulated.

mod belady;
mod cache;
mod room;
#[cfg(test)]
mod tests;
mod textbook;

pub use belady::belady;
pub use cache::replay;
pub use room::{NoRoom, Room};
pub use textbook::textbook_lru;

/// What happened to the experts that passes asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens.
    pub tokens: u64,
    /// Asked for and there.
    pub hits: u64,
    /// Asked for and read.
    pub misses: u64,
    /// Read, bytes.
    pub bytes: u64,
}

impl Counts {
    /// Share of what was asked for that was there, 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
    }

    /// Bytes that a token reads.
    pub fn bytes_a_token(&self) -> f64 {
        self.bytes as f64 / self.tokens.max(1) as f64
    }
}

/// What a replay counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Of prompts.
    pub prompt: Counts,
    /// Of generated tokens.
    pub decode: Counts,
}

/// What the cache knows before the first pass that counts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Warm<'a> {
    /// Choices a token to expect of each expert, as a profile says; the
    /// hottest are there at the start.
    pub rates: Option<&'a [f64]>,
    /// Passes that are replayed first and not counted.
    pub passes: usize,
}
