//! Least frequently used with ageing, counting selections: hit or miss.
//!
//! Counting only hits penalises an expert that is selected again and again
//! but evicted before its second hit (observed in the ds4 engine). A count
//! fades by [`DECAY`] each time a token reaches its layer; the layer whose
//! turn is over is thus not preferred to the one whose turn is next, and among
//! equals the layer that is needed again last gives way (below one token's
//! demand a count common to all layers hits as little as a plain LRU).

use std::collections::BTreeSet;

use super::{ExpertId, Policy, PolicyShape};

pub(super) const NAME: &str = "lfu";

/// What is left of a count after a token; half of it after 14.
pub(super) const DECAY: f64 = 0.95;

/// Increments are scaled back before they leave the range of `f64`.
const LARGEST_STEP: f64 = 1e100;

/// See the module.
pub(super) struct Lfu {
    shape: PolicyShape,
    decay: f64,
    layers: Vec<Layer>,
    /// Faded counts of all experts, in units of their layer's `step`.
    count: Vec<f64>,
    resident: Vec<bool>,
}

struct Layer {
    /// Residents by count; bits of positive floats sort like the floats.
    order: BTreeSet<(u64, u32)>,
    /// What one selection adds. It grows instead of all counts shrinking.
    step: f64,
    /// Not reached by the current token yet.
    fresh: bool,
}

impl Lfu {
    /// `decay` in (0, 1): what is left of a count after a token.
    pub fn new(shape: PolicyShape, decay: f64) -> Self {
        let layer = || Layer { order: BTreeSet::new(), step: 1.0, fresh: true };
        Lfu {
            shape,
            decay,
            layers: (0..shape.layers).map(|_| layer()).collect(),
            count: vec![0.0; shape.ids()],
            resident: vec![false; shape.ids()],
        }
    }

    fn key(&self, e: ExpertId) -> (u64, u32) {
        (self.count[e.0 as usize].to_bits(), e.0)
    }

    /// Starts a token in a layer: all its counts fade.
    fn tick(&mut self, l: usize) {
        let layer = &mut self.layers[l];
        layer.step /= self.decay;
        if layer.step < LARGEST_STEP {
            return;
        }
        let (scale, per_layer) = (1.0 / layer.step, self.shape.experts_per_layer as usize);
        layer.step = 1.0;
        let counts = &mut self.count[l * per_layer..(l + 1) * per_layer];
        counts.iter_mut().for_each(|c| *c *= scale);
        let old = std::mem::take(&mut layer.order);
        self.layers[l].order = old.into_iter().map(|(_, id)| self.key(ExpertId(id))).collect();
    }
}

impl Policy for Lfu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn on_select(&mut self, e: ExpertId, tokens: u32, _weight: f32) {
        let l = self.shape.layer(e);
        if std::mem::take(&mut self.layers[l].fresh) {
            self.tick(l);
        }
        // A batch counts as if its last `tokens` tokens all had chosen it, so
        // a long prompt weighs no more than a long run of tokens.
        let times = match tokens {
            1 => 1.0,
            n => (1.0 - self.decay.powf(f64::from(n))) / (1.0 - self.decay),
        };
        let old = self.key(e);
        self.count[e.0 as usize] += times * self.layers[l].step;
        if self.resident[e.0 as usize] {
            let new = self.key(e);
            self.layers[l].order.remove(&old);
            self.layers[l].order.insert(new);
        }
    }

    fn warm(&mut self, e: ExpertId, rate: f64) {
        // The limit of 1 + d + d^2 + ... selections at that rate.
        let l = self.shape.layer(e);
        let old = self.key(e);
        self.count[e.0 as usize] = rate / (1.0 - self.decay) * self.layers[l].step;
        if self.resident[e.0 as usize] {
            let new = self.key(e);
            self.layers[l].order.remove(&old);
            self.layers[l].order.insert(new);
        }
    }

    fn on_token(&mut self) {
        self.layers.iter_mut().for_each(|l| l.fresh = true);
    }

    fn on_insert(&mut self, e: ExpertId) {
        let key = self.key(e);
        self.layers[self.shape.layer(e)].order.insert(key);
        self.resident[e.0 as usize] = true;
    }

    fn on_remove(&mut self, e: ExpertId) {
        let key = self.key(e);
        self.layers[self.shape.layer(e)].order.remove(&key);
        self.resident[e.0 as usize] = false;
    }

    fn victim(&mut self, incoming: ExpertId, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId> {
        let mut best: Option<(f64, u32)> = None;
        for l in self.shape.furthest_first(self.shape.layer(incoming)) {
            let layer = &self.layers[l];
            if let Some(&(bits, id)) = layer.order.iter().find(|(_, id)| !busy(ExpertId(*id))) {
                let count = f64::from_bits(bits) / layer.step;
                if best.is_none_or(|(least, _)| count < least) {
                    best = Some((count, id));
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

    /// The faded count from the plain history: tokens that reached the layer,
    /// newest first, weigh 1, d, d^2, ...
    fn faded(history: &[Vec<ExpertId>], shape: PolicyShape, e: ExpertId, d: f64) -> f64 {
        let layer = shape.layer(e);
        let reached = history.iter().filter(|t| t.iter().any(|x| shape.layer(*x) == layer));
        let weigh = |(age, t): (usize, &Vec<ExpertId>)| match t.contains(&e) {
            true => d.powi(age as i32),
            false => 0.0,
        };
        reached.rev().enumerate().map(weigh).sum()
    }

    proptest! {
        #[test]
        fn the_victim_has_the_least_faded_count_even_when_counts_were_rescaled(
            seed: u64,
            capacity in 3usize..30,
            // The smallest makes a step larger than LARGEST_STEP in 50 tokens.
            decay in prop_oneof![Just(0.001), Just(0.5), 0.9..0.999],
        ) {
            let shape = shape(4, 8, capacity);
            drive(&mut Lfu::new(shape, decay), shape, seed, |history, victim, candidates| {
                let count = |e: &ExpertId| faded(history, shape, *e, decay);
                let least = candidates.iter().map(count).fold(f64::MAX, f64::min);
                assert!(count(&victim) <= least * (1.0 + 1e-9) + 1e-90);
            });
        }
    }

    #[test]
    fn a_miss_counts_like_a_hit() {
        let shape = shape(1, 4, 2);
        let mut lfu = Lfu::new(shape, DECAY);
        let [often, once, incoming] = [0, 1, 2].map(ExpertId);
        for _ in 0..3 {
            lfu.on_select(often, 1, 1.0); // never resident
            lfu.on_token();
        }
        lfu.on_select(once, 1, 1.0);
        lfu.on_insert(once);
        lfu.on_insert(often);
        assert_eq!(lfu.victim(incoming, &|_| false), Some(once));
    }

    #[test]
    fn a_long_prompt_weighs_no_more_than_an_endless_run() {
        let shape = shape(1, 4, 2);
        let mut lfu = Lfu::new(shape, DECAY);
        let [prompt, run] = [0, 1].map(ExpertId);
        lfu.on_select(prompt, 100_000, 1.0);
        for e in [prompt, run] {
            lfu.on_insert(e);
        }
        let overtakes = |_: &usize| {
            lfu.on_token();
            lfu.on_select(run, 1, 1.0);
            lfu.victim(ExpertId(2), &|_| false) == Some(prompt)
        };
        // After n tokens 0.95^n of the prompt's count is left, and the run has
        // the other part of the same limit: 0.95^14 is the first below half.
        assert_eq!((1..100).find(overtakes), Some(14));
    }
}
