//! What a residency counts.

use crate::timeline::Split;

/// Work of one phase, summed up since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tokens that went through the first layer with experts.
    pub tokens: u64,
    /// Experts that a pass needed and found in RAM.
    pub hits: u64,
    /// Of those, experts that were pinned.
    pub pinned_hits: u64,
    /// Experts that a pass needed and had to wait for.
    pub misses: u64,
    /// Bytes read from the model's files for experts.
    pub bytes_read: u64,
    /// Bytes of experts that were needed and had to be read, by demand or
    /// before: `bytes_read` without prefetches in vain.
    pub bytes_needed: u64,
    /// Where the time went.
    pub split: Split,
    /// What prediction was good for.
    pub prediction: Prediction,
}

/// How well missing experts were foretold. Only layers count for which
/// something was predicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Experts that a layer chose.
    pub chosen: u64,
    /// Of those, predicted ones.
    pub chosen_right: u64,
    /// Predicted experts that were not in RAM when they were predicted.
    pub missing: u64,
    /// Of those, chosen by the router.
    pub missing_right: u64,
    /// Chosen experts that were not in RAM at that time.
    pub missing_chosen: u64,
    /// Experts read before their layer asked for them.
    pub prefetched: u64,
    /// Of those, chosen by the router.
    pub prefetch_used: u64,
    /// Of the prefetched, taken back before the disk had them.
    pub dropped: u64,
}

impl Counters {
    /// Share of needed experts that were in RAM, 0 to 1; 1 when none was needed.
    pub fn hit_rate(&self) -> f64 {
        match self.hits + self.misses {
            0 => 1.0,
            all => self.hits as f64 / all as f64,
        }
    }

    /// What happened since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            tokens: self.tokens - earlier.tokens,
            hits: self.hits - earlier.hits,
            pinned_hits: self.pinned_hits - earlier.pinned_hits,
            misses: self.misses - earlier.misses,
            bytes_read: self.bytes_read - earlier.bytes_read,
            bytes_needed: self.bytes_needed - earlier.bytes_needed,
            split: self.split.since(&earlier.split),
            prediction: self.prediction.since(&earlier.prediction),
        }
    }
}

impl Prediction {
    /// Share of the chosen experts that were predicted.
    pub fn recall(&self) -> Option<f64> {
        share(self.chosen_right, self.chosen)
    }

    /// Share of the missing experts that were predicted.
    pub fn recall_on_misses(&self) -> Option<f64> {
        share(self.missing_right, self.missing_chosen)
    }

    /// Share of the missing experts that were predicted rightly.
    pub fn precision_on_misses(&self) -> Option<f64> {
        share(self.missing_right, self.missing)
    }

    fn since(&self, earlier: &Self) -> Self {
        Self {
            chosen: self.chosen - earlier.chosen,
            chosen_right: self.chosen_right - earlier.chosen_right,
            missing: self.missing - earlier.missing,
            missing_right: self.missing_right - earlier.missing_right,
            missing_chosen: self.missing_chosen - earlier.missing_chosen,
            prefetched: self.prefetched - earlier.prefetched,
            prefetch_used: self.prefetch_used - earlier.prefetch_used,
            dropped: self.dropped - earlier.dropped,
        }
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// Counters of prompts and of generation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Passes with more than one token.
    pub prompt: Counters,
    /// Passes with one token.
    pub decode: Counters,
    /// Times that pins moved to what was hot then.
    pub repins: u64,
    /// Bytes of the arena that are given back to the system now.
    pub given_back: u64,
}
