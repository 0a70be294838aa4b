//! Any resident, each with the same probability: what the others must beat.

use super::{ExpertId, Policy, PolicyShape};
use crate::splitmix::SplitMix64;

pub(super) const NAME: &str = "random";

/// Runs repeat.
pub(super) const SEED: u64 = 0x9142_5C0F;

const NOWHERE: u32 = u32::MAX;

/// See the module.
pub(super) struct Random {
    rng: SplitMix64,
    residents: Vec<ExpertId>,
    /// Index of each resident in `residents`.
    position: Vec<u32>,
}

impl Random {
    pub fn new(shape: PolicyShape, seed: u64) -> Self {
        Random {
            rng: SplitMix64(seed),
            residents: Vec::with_capacity(shape.capacity.min(shape.ids())),
            position: vec![NOWHERE; shape.ids()],
        }
    }
}

impl Policy for Random {
    fn name(&self) -> &'static str {
        NAME
    }

    fn on_select(&mut self, _: ExpertId, _tokens: u32, _weight: f32) {}

    fn on_token(&mut self) {}

    fn on_insert(&mut self, e: ExpertId) {
        self.position[e.0 as usize] = self.residents.len() as u32;
        self.residents.push(e);
    }

    fn on_remove(&mut self, e: ExpertId) {
        let at = std::mem::replace(&mut self.position[e.0 as usize], NOWHERE);
        if at != NOWHERE {
            self.residents.swap_remove(at as usize);
            if let Some(moved) = self.residents.get(at as usize) {
                self.position[moved.0 as usize] = at;
            }
        }
    }

    fn victim(&mut self, _: ExpertId, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId> {
        let n = self.residents.len();
        if n == 0 {
            return None;
        }
        // Where it hits a busy one, the next that is not.
        let start = self.rng.below(n);
        (0..n).map(|i| self.residents[(start + i) % n]).find(|e| !busy(*e))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shape;
    use super::*;

    #[test]
    fn every_resident_is_chosen_about_equally_often() {
        let mut policy = Random::new(shape(1, 8, 8), SEED);
        (0..8).for_each(|id| policy.on_insert(ExpertId(id)));
        let mut times = [0; 8];
        for _ in 0..8000 {
            times[policy.victim(ExpertId(0), &|_| false).unwrap().0 as usize] += 1;
        }
        assert!(times.iter().all(|t| (850..1150).contains(t)), "{times:?}");
    }
}
