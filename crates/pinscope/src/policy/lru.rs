//! Least recently used, where "when" is counted in tokens.
//!
//! A plain LRU orders by time within the token too: below one token's demand
//! it throws out exactly what the next layers need and hits 0 % of the time.
//! Here each layer has its own clock, which ticks when a token reaches the
//! layer; whoever was not used for most ticks gives way, and among equals the
//! layer that is needed again last.

use super::list::{Links, List};
use super::{ExpertId, Policy, PolicyShape};

pub(super) const NAME: &str = "lru";

/// See the module.
pub(super) struct Lru {
    shape: PolicyShape,
    links: Links,
    layers: Vec<Layer>,
    /// Time of the last use, on the clock of the expert's layer.
    used: Vec<u64>,
    resident: Vec<bool>,
}

struct Layer {
    /// Residents, used last first.
    order: List,
    clock: u64,
    /// Not reached by the current token yet.
    fresh: bool,
}

impl Lru {
    pub fn new(shape: PolicyShape) -> Self {
        let layer = || Layer { order: List::new(), clock: 0, fresh: true };
        Lru {
            shape,
            links: Links::new(shape.ids()),
            layers: (0..shape.layers).map(|_| layer()).collect(),
            used: vec![0; shape.ids()],
            resident: vec![false; shape.ids()],
        }
    }

    fn touch(&mut self, e: ExpertId) {
        let layer = &mut self.layers[self.shape.layer(e)];
        if self.resident[e.0 as usize] {
            self.links.remove(&mut layer.order, e.0);
        }
        self.links.push_front(&mut layer.order, e.0);
        self.used[e.0 as usize] = layer.clock;
        self.resident[e.0 as usize] = true;
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        NAME
    }

    fn on_select(&mut self, e: ExpertId, _tokens: u32, _weight: f32) {
        let layer = &mut self.layers[self.shape.layer(e)];
        layer.clock += u64::from(std::mem::take(&mut layer.fresh));
        if self.resident[e.0 as usize] {
            self.touch(e);
        }
    }

    fn on_token(&mut self) {
        self.layers.iter_mut().for_each(|l| l.fresh = true);
    }

    fn on_insert(&mut self, e: ExpertId) {
        self.touch(e);
    }

    fn on_remove(&mut self, e: ExpertId) {
        if std::mem::take(&mut self.resident[e.0 as usize]) {
            let layer = self.shape.layer(e);
            self.links.remove(&mut self.layers[layer].order, e.0);
        }
    }

    fn victim(&mut self, incoming: ExpertId, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId> {
        let mut best: Option<(u64, u32)> = None;
        for l in self.shape.furthest_first(self.shape.layer(incoming)) {
            let layer = &self.layers[l];
            let oldest = self.links.oldest_first(&layer.order).find(|&id| !busy(ExpertId(id)));
            if let Some(id) = oldest {
                let age = layer.clock - self.used[id as usize];
                if best.is_none_or(|(oldest, _)| age > oldest) {
                    best = Some((age, id));
                }
            }
        }
        best.map(|(_, id)| ExpertId(id))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{drive, shape};
    use super::*;

    /// Tokens that reached the layer since each expert's last use, counted
    /// from the plain history.
    fn ages(history: &[Vec<ExpertId>], shape: PolicyShape, e: ExpertId) -> usize {
        let reached =
            history.iter().filter(|t| t.iter().any(|x| shape.layer(*x) == shape.layer(e)));
        reached.rev().take_while(|t| !t.contains(&e)).count()
    }

    proptest! {
        #[test]
        fn the_victim_is_unused_for_most_tokens(seed: u64, capacity in 3usize..30) {
            let shape = shape(4, 8, capacity);
            drive(&mut Lru::new(shape), shape, seed, |history, victim, candidates| {
                let age = |e: &ExpertId| ages(history, shape, *e);
                assert_eq!(age(&victim), candidates.iter().map(age).max().unwrap());
            });
        }
    }
}
