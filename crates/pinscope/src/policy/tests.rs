//! What holds for every policy, and the plain models that they are checked
//! against.

use proptest::prelude::*;

use super::*;
use crate::splitmix::SplitMix64;

pub(super) fn shape(layers: u32, experts_per_layer: u32, capacity: usize) -> PolicyShape {
    PolicyShape { layers, experts_per_layer, top_k: 3.min(experts_per_layer), capacity }
}

/// A cache of sets under a policy, with the rules of the trait checked.
struct Cache<'a> {
    policy: &'a mut dyn Policy,
    resident: Vec<ExpertId>,
    shape: PolicyShape,
}

impl Cache<'_> {
    /// One layer of a token. Returns hits. `check` sees each victim and whom
    /// it was chosen from.
    fn layer(
        &mut self,
        wanted: &[ExpertId],
        mut check: impl FnMut(ExpertId, &[ExpertId]),
    ) -> usize {
        let mut hits = 0;
        self.policy.on_pass(wanted[0].0 / self.shape.experts_per_layer, 1);
        wanted.iter().for_each(|&e| self.policy.on_select(e, 1, 1.0));
        for &e in wanted {
            if self.resident.contains(&e) {
                hits += 1;
                continue;
            }
            if self.resident.len() == self.shape.capacity {
                let free = |r: &&ExpertId| !wanted.contains(r);
                let candidates: Vec<_> = self.resident.iter().filter(free).copied().collect();
                let victim = self.policy.victim(e, &|r| wanted.contains(&r));
                let Some(victim) = victim else {
                    assert!(candidates.is_empty());
                    continue;
                };
                assert!(candidates.contains(&victim), "busy or not resident: {victim:?}");
                check(victim, &candidates);
                self.resident.retain(|r| *r != victim);
                self.policy.on_remove(victim);
            }
            self.resident.push(e);
            self.policy.on_insert(e);
        }
        hits
    }
}

/// Runs 60 skewed random tokens; now and then a layer is left out. `check`
/// sees the history (experts of each token, the current one last), a victim
/// and the experts it was chosen from.
pub(super) fn drive(
    policy: &mut dyn Policy,
    shape: PolicyShape,
    seed: u64,
    mut check: impl FnMut(&[Vec<ExpertId>], ExpertId, &[ExpertId]),
) {
    let mut rng = SplitMix64(seed);
    let mut cache = Cache { policy, resident: Vec::new(), shape };
    let mut history: Vec<Vec<ExpertId>> = Vec::new();
    for _ in 0..60 {
        history.push(Vec::new());
        for l in (0..shape.layers).filter(|_| !rng.chance(0.05)).collect::<Vec<_>>() {
            let per_layer = shape.experts_per_layer as usize;
            let pick = |_| rng.below(per_layer).min(rng.below(per_layer)) as u32;
            let mut wanted: Vec<_> =
                (0..3).map(pick).map(|e| ExpertId(l * shape.experts_per_layer + e)).collect();
            wanted.sort();
            wanted.dedup();
            history.last_mut().unwrap().extend(&wanted);
            cache.layer(&wanted, |victim, candidates| check(&history, victim, candidates));
        }
        cache.policy.on_token();
    }
}

/// Hit rate of the second half of 40 tokens that all want experts 0..k of
/// every layer.
fn cyclic_hit_rate(policy: &mut dyn Policy, shape: PolicyShape, k: u32) -> f64 {
    let mut cache = Cache { policy, resident: Vec::new(), shape };
    let (mut hits, mut wanted) = (0, 0);
    for token in 0..40 {
        for l in 0..shape.layers {
            let experts: Vec<_> =
                (0..k).map(|e| ExpertId(l * shape.experts_per_layer + e)).collect();
            let hit = cache.layer(&experts, |_, _| {});
            if token >= 20 {
                hits += hit;
                wanted += experts.len();
            }
        }
        cache.policy.on_token();
    }
    hits as f64 / wanted as f64
}

/// The textbook LRU over all layers.
#[derive(Default)]
struct GlobalLru(Vec<ExpertId>);

impl Policy for GlobalLru {
    fn name(&self) -> &'static str {
        "global lru"
    }
    fn on_select(&mut self, e: ExpertId, _: u32, _: f32) {
        if let Some(at) = self.0.iter().position(|r| *r == e) {
            self.0.remove(at);
            self.0.push(e);
        }
    }
    fn on_token(&mut self) {}
    fn on_insert(&mut self, e: ExpertId) {
        self.0.push(e);
    }
    fn on_remove(&mut self, e: ExpertId) {
        self.0.retain(|r| *r != e);
    }
    fn victim(&mut self, _: ExpertId, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId> {
        self.0.iter().copied().find(|e| !busy(*e))
    }
}

#[test]
fn below_one_tokens_demand_a_global_lru_hits_nothing_and_ours_do() {
    // 12 layers x 4 experts a token = 48; room for 24.
    let shape = shape(12, 16, 24);
    assert_eq!(cyclic_hit_rate(&mut GlobalLru::default(), shape, 4), 0.0);
    for kind in [PolicyKind::Adaptive, PolicyKind::Lru, PolicyKind::Lfu] {
        let rate = cyclic_hit_rate(&mut *build(kind, shape), shape, 4);
        // Belady keeps all but the layer at work: (24 - 4) / 48.
        assert!(rate >= 20.0 / 48.0 - 1e-9, "{kind}: {rate}");
    }
}

#[test]
fn with_room_for_a_tokens_demand_every_policy_hits_always_on_a_cyclic_stream() {
    let shape = shape(12, 16, 48);
    for kind in PolicyKind::ALL {
        assert_eq!(cyclic_hit_rate(&mut *build(kind, shape), shape, 4), 1.0, "{kind}");
    }
}

proptest! {
    #[test]
    fn a_victim_is_always_resident_and_never_busy(seed: u64, capacity in 1usize..30) {
        let shape = shape(4, 8, capacity);
        for kind in PolicyKind::ALL {
            // The checks are in `Cache::layer`.
            drive(&mut *build(kind, shape), shape, seed, |_, _, _| {});
        }
    }

    /// Residents that left for another reason than a victim's are forgotten.
    #[test]
    fn removing_any_resident_is_allowed_at_any_time(seed: u64) {
        let shape = shape(2, 16, 8);
        for kind in PolicyKind::ALL {
            let mut policy = build(kind, shape);
            let mut rng = SplitMix64(seed);
            let mut resident: Vec<ExpertId> = Vec::new();
            for _ in 0..200 {
                let e = ExpertId(rng.below(32) as u32);
                policy.on_select(e, 1 + rng.below(3) as u32, 1.0);
                if let Some(at) = resident.iter().position(|r| *r == e) {
                    resident.swap_remove(at);
                    policy.on_remove(e);
                } else if resident.len() < 8 {
                    resident.push(e);
                    policy.on_insert(e);
                }
                let victim = policy.victim(e, &|_| false);
                prop_assert_eq!(victim.is_some(), !resident.is_empty());
                prop_assert!(victim.is_none_or(|v| resident.contains(&v)));
                prop_assert_eq!(policy.victim(e, &|_| true), None);
            }
        }
    }
}

#[test]
fn names_are_read_back_and_unknown_ones_list_the_choices() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.to_string().parse::<PolicyKind>().unwrap(), kind);
        assert_eq!(build(kind, shape(1, 1, 1)).name(), kind.to_string());
    }
    let e = "belady".parse::<PolicyKind>().unwrap_err().to_string();
    assert!(e.contains("adaptive, lru, lfu, s3fifo, random"), "{e}");
}
