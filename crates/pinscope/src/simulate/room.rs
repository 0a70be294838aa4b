//! What fits into a number of bytes.

use crate::layout::{Layout, TooSmall};
use crate::map::{ExpertMap, MapError};
use crate::trace::TracedModel;

/// Room for experts: pools, the layers that share each, and what an expert
/// costs of its pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    pub(super) pool_of_layer: Vec<usize>,
    /// By layer.
    pub(super) cost: Vec<u64>,
    /// By pool.
    pub(super) budget: Vec<u64>,
    /// By layer: read for a missing expert.
    pub(super) bytes: Vec<u64>,
    pub(super) experts_per_layer: u32,
}

/// Why there is no room.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum NoRoom {
    #[error(transparent)]
    TooSmall(#[from] TooSmall),
    #[error("the trace's model contradicts itself: {0}")]
    Model(#[from] MapError),
}

impl Room {
    /// The room that PinScope makes of `bytes`: slots of each size.
    ///
    /// # Errors
    /// Too few bytes, or no such model.
    pub fn slots(model: &TracedModel, bytes: u64) -> Result<Self, NoRoom> {
        let map = model.map()?;
        let layout = Layout::new(&map, bytes)?;
        Ok(Self {
            pool_of_layer: layout.class_of_layer,
            cost: vec![1; map.layers().len()],
            budget: layout.classes.iter().map(|c| c.slots).collect(),
            ..Self::shared(&map, bytes)
        })
    }

    /// One pool of `bytes` that all sizes share without a gap: what no real
    /// memory is, to compare with.
    pub fn shared(map: &ExpertMap, bytes: u64) -> Self {
        let size: Vec<u64> = map.layers().iter().map(|l| l.expert_bytes()).collect();
        Self {
            pool_of_layer: vec![0; size.len()],
            cost: size.clone(),
            budget: vec![bytes],
            bytes: size,
            experts_per_layer: map.experts_per_layer(),
        }
    }

    /// Layers and experts of each.
    pub(super) fn ids(&self) -> usize {
        self.cost.len() * self.experts_per_layer as usize
    }

    /// Experts that a pool can hold, about.
    pub(super) fn capacity(&self, pool: usize) -> usize {
        let layers = self.pool_of_layer.iter().zip(&self.cost).filter(|(p, _)| **p == pool);
        let (n, sum) = layers.fold((0, 0), |(n, sum), (_, cost)| (n + 1, sum + cost));
        (self.budget[pool] * n / sum.max(1)) as usize
    }
}
