//! The cache that a replay works on.

use super::{Counts, Outcome, Room, Warm};
use crate::policy::{ExpertId, Policy, PolicyShape};
use crate::profile::hottest;
use crate::trace::{Pass, Trace};

/// Who decides, in the cache's view; implemented by policies and by the one
/// that knows the future.
pub(super) trait Decider {
    /// A pass of the trace begins: its choices in all pools are known.
    fn begin(&mut self, number: usize, pass: &Pass, ids: &[ExpertId]);
    fn insert(&mut self, pool: usize, e: ExpertId);
    fn remove(&mut self, pool: usize, e: ExpertId);
    fn victim(
        &mut self,
        pool: usize,
        e: ExpertId,
        busy: &dyn Fn(ExpertId) -> bool,
    ) -> Option<ExpertId>;
}

/// Replays `trace` with policies that `build` makes, one for each pool.
pub fn replay(
    trace: &Trace,
    room: &Room,
    build: &mut dyn FnMut(PolicyShape) -> Box<dyn Policy>,
    warm: Warm,
) -> Outcome {
    let shape = |pool| PolicyShape {
        layers: room.cost.len() as u32,
        experts_per_layer: room.experts_per_layer,
        top_k: trace.model.top_k,
        capacity: room.capacity(pool),
    };
    let mut pools: Vec<_> = (0..room.budget.len()).map(|pool| build(shape(pool))).collect();
    for (i, &rate) in warm.rates.unwrap_or_default().iter().enumerate() {
        let layer = i / room.experts_per_layer as usize;
        pools[room.pool_of_layer[layer]].warm(ExpertId(i as u32), rate);
    }
    run(trace, room, &mut Policies { pools, pool_of_layer: &room.pool_of_layer }, warm)
}

struct Policies<'a> {
    pools: Vec<Box<dyn Policy>>,
    pool_of_layer: &'a [usize],
}

impl Decider for Policies<'_> {
    fn begin(&mut self, _number: usize, pass: &Pass, ids: &[ExpertId]) {
        if pass.layer == 0 {
            self.pools.iter_mut().for_each(|p| p.on_token());
        }
        let policy = &mut self.pools[self.pool_of_layer[pass.layer as usize]];
        policy.on_pass(pass.layer, pass.tokens);
        for (c, &id) in pass.choices.iter().zip(ids) {
            policy.on_select(id, c.tokens, c.weight);
        }
    }
    fn insert(&mut self, pool: usize, e: ExpertId) {
        self.pools[pool].on_insert(e);
    }
    fn remove(&mut self, pool: usize, e: ExpertId) {
        self.pools[pool].on_remove(e);
    }
    fn victim(
        &mut self,
        pool: usize,
        e: ExpertId,
        busy: &dyn Fn(ExpertId) -> bool,
    ) -> Option<ExpertId> {
        self.pools[pool].victim(e, busy)
    }
}

/// Replays `trace`, of which the passes of `warm` are not counted.
pub(super) fn run(trace: &Trace, room: &Room, decider: &mut dyn Decider, warm: Warm) -> Outcome {
    let mut cache = Cache {
        room,
        decider,
        used: vec![0; room.budget.len()],
        resident: vec![false; room.ids()],
        in_use: vec![false; room.ids()],
    };
    for e in warm.rates.map(hottest).unwrap_or_default() {
        cache.fill(e);
    }
    let mut outcome = Outcome::default();
    for (number, pass) in trace.passes.iter().enumerate() {
        let counts = match pass.decode {
            true => &mut outcome.decode,
            false => &mut outcome.prompt,
        };
        let mut ignored = Counts::default();
        let counts = if number < warm.passes { &mut ignored } else { counts };
        cache.pass(number, pass, counts);
    }
    outcome
}

struct Cache<'a> {
    room: &'a Room,
    decider: &'a mut dyn Decider,
    /// By pool.
    used: Vec<u64>,
    /// By expert.
    resident: Vec<bool>,
    in_use: Vec<bool>,
}

impl Cache<'_> {
    fn pass(&mut self, number: usize, pass: &Pass, counts: &mut Counts) {
        let layer = pass.layer as usize;
        let first = pass.layer * self.room.experts_per_layer;
        let ids: Vec<_> = pass.choices.iter().map(|c| ExpertId(first + c.expert)).collect();
        self.decider.begin(number, pass, &ids);
        if layer == 0 {
            counts.tokens += u64::from(pass.tokens);
        }
        ids.iter().for_each(|id| self.in_use[id.0 as usize] = true);
        let (there, missing): (Vec<_>, Vec<_>) =
            ids.iter().copied().partition(|id| self.resident[id.0 as usize]);
        counts.hits += there.len() as u64;
        for e in missing {
            counts.misses += 1;
            counts.bytes += self.room.bytes[layer];
            self.load(layer, e, &ids);
        }
        ids.iter().for_each(|id| self.in_use[id.0 as usize] = false);
    }

    /// Makes room for `e` and puts it there.
    fn load(&mut self, layer: usize, e: ExpertId, ids: &[ExpertId]) {
        let (pool, cost) = (self.room.pool_of_layer[layer], self.room.cost[layer]);
        while self.used[pool] + cost > self.room.budget[pool] {
            let in_use = &self.in_use;
            let busy = |v: ExpertId| in_use[v.0 as usize];
            let Some(victim) = self.decider.victim(pool, e, &busy) else {
                // The next wave: what was read is computed.
                let waits = |id: &&ExpertId| self.resident[id.0 as usize];
                let computed: Vec<_> = ids.iter().filter(waits).collect();
                if computed.iter().all(|id| !self.in_use[id.0 as usize]) {
                    return; // no room for a single expert
                }
                computed.iter().for_each(|id| self.in_use[id.0 as usize] = false);
                continue;
            };
            self.decider.remove(pool, victim);
            self.resident[victim.0 as usize] = false;
            self.used[pool] -= self.room.cost[(victim.0 / self.room.experts_per_layer) as usize];
        }
        self.put(pool, cost, e);
    }

    /// Puts `e` there if there is room.
    fn fill(&mut self, e: ExpertId) {
        let layer = (e.0 / self.room.experts_per_layer) as usize;
        let (pool, cost) = (self.room.pool_of_layer[layer], self.room.cost[layer]);
        if self.used[pool] + cost <= self.room.budget[pool] {
            self.put(pool, cost, e);
        }
    }

    fn put(&mut self, pool: usize, cost: u64, e: ExpertId) {
        self.used[pool] += cost;
        self.resident[e.0 as usize] = true;
        self.decider.insert(pool, e);
    }
}
