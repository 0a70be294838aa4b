//! What a residency counts.

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
    /// Time in which arithmetic waited for bytes, nanoseconds.
    pub wait_ns: u64,
    /// Experts read before their layer asked for them.
    pub prefetched: u64,
    /// Of those, chosen by the router when their layer came.
    pub prefetch_used: u64,
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
            wait_ns: self.wait_ns - earlier.wait_ns,
            prefetched: self.prefetched - earlier.prefetched,
            prefetch_used: self.prefetch_used - earlier.prefetch_used,
        }
    }
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
