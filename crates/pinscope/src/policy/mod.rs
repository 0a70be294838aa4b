//! Which resident expert gives way to the next one.
//!
//! A policy is told what the router chose and what came and went, and names a
//! victim. It never touches bytes. To add one: one file, one line in each
//! list below.

mod adaptive;
mod lfu;
mod list;
mod lru;
mod random;
mod s3fifo;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// An expert of the model: `layer * experts_per_layer + expert`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertId(pub u32);

/// What a policy needs to know of the model and the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyShape {
    /// Layers with experts.
    pub layers: u32,
    /// Experts of one layer.
    pub experts_per_layer: u32,
    /// Experts of a layer that a token chooses.
    pub top_k: u32,
    /// Experts that can be resident.
    pub capacity: usize,
}

impl PolicyShape {
    /// Experts in the model: ids are below it.
    fn ids(self) -> usize {
        self.layers as usize * self.experts_per_layer as usize
    }

    fn layer(self, e: ExpertId) -> usize {
        (e.0 / self.experts_per_layer) as usize
    }

    /// Layers from the one that wants memory, last one used first: the layer
    /// behind it is needed again after all others, itself after that one's
    /// successor and so on. For equal experts the first is Belady's choice.
    fn furthest_first(self, wanting: usize) -> impl Iterator<Item = usize> {
        let layers = self.layers as usize;
        (1..=layers).map(move |back| (wanting + layers - back) % layers)
    }
}

/// Decides who gives way. Works for any order of calls; experts inserted and
/// not removed are the residents.
pub trait Policy: Send {
    /// The policy's name, as [`PolicyKind`] prints it.
    fn name(&self) -> &'static str;

    /// A batch of `tokens` reaches `layer`; its choices follow. The last layer
    /// may see fewer tokens of a batch than the others.
    fn on_pass(&mut self, _layer: u32, _tokens: u32) {}

    /// The router chose `e`, resident or not, for `tokens` tokens of this
    /// batch (at least 1) with mean weight `weight`.
    fn on_select(&mut self, e: ExpertId, tokens: u32, weight: f32);

    /// Expect `e` to be chosen `rate` times a token (0 to 1), as a profile
    /// says, before anything was. Policies without a memory ignore it.
    fn warm(&mut self, _e: ExpertId, _rate: f64) {}

    /// One token, or one prompt batch, is over or the next one begins.
    fn on_token(&mut self);

    /// `e` takes a place (its bytes may still be on their way).
    fn on_insert(&mut self, e: ExpertId);

    /// `e` gave its place up.
    fn on_remove(&mut self, e: ExpertId);

    /// The resident that should give way to `incoming`, never one that is
    /// busy; `None` if all are. Removes nothing. Costs at most a step for
    /// each layer and each busy expert (amortised), not for each resident.
    fn victim(&mut self, incoming: ExpertId, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId>;
}

/// The policies there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Needed last, by what was learnt of the traffic.
    #[default]
    Adaptive,
    /// Least recently used, in tokens.
    Lru,
    /// Least often used, with ageing.
    Lfu,
    /// Small, main and ghost queue.
    S3Fifo,
    /// Any one, from a fixed seed.
    Random,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [PolicyKind; 5] = [
        PolicyKind::Adaptive,
        PolicyKind::Lru,
        PolicyKind::Lfu,
        PolicyKind::S3Fifo,
        PolicyKind::Random,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Adaptive => adaptive::NAME,
            PolicyKind::Lru => lru::NAME,
            PolicyKind::Lfu => lfu::NAME,
            PolicyKind::S3Fifo => s3fifo::NAME,
            PolicyKind::Random => random::NAME,
        }
    }
}

/// Makes a policy.
pub fn build(kind: PolicyKind, shape: PolicyShape) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Adaptive => Box::new(adaptive::Adaptive::new(shape)),
        PolicyKind::Lru => Box::new(lru::Lru::new(shape)),
        PolicyKind::Lfu => Box::new(lfu::Lfu::new(shape, lfu::DECAY)),
        PolicyKind::S3Fifo => Box::new(s3fifo::S3Fifo::new(shape)),
        PolicyKind::Random => Box::new(random::Random::new(shape, random::SEED)),
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no policy's.
#[derive(Debug, Error)]
#[error("there is no cache policy {given:?}; use one of {}", PolicyKind::ALL.map(PolicyKind::name).join(", "))]
pub struct UnknownPolicy {
    given: String,
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(s: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|k| k.name() == s);
        found.ok_or_else(|| UnknownPolicy { given: s.to_string() })
    }
}
