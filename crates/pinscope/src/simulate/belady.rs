//! The best that any policy could do (Belady 1966): whoever is needed again
//! last gives way.
//!
//! With slots of one size that is exactly the fewest reads, counting prompts
//! and generated tokens alike. With a pool shared by several sizes it is very
//! close to it and no strict bound.

use std::collections::{BTreeSet, VecDeque};

use super::cache::{run, Decider};
use super::{Outcome, Room, Warm};
use crate::policy::ExpertId;
use crate::trace::{Pass, Trace};

/// Replays `trace` with the future known.
pub fn belady(trace: &Trace, room: &Room, warm: Warm) -> Outcome {
    let mut uses = vec![VecDeque::new(); room.ids()];
    for (number, pass) in trace.passes.iter().enumerate() {
        for c in &pass.choices {
            let id = pass.layer * room.experts_per_layer + c.expert;
            uses[id as usize].push_back(number);
        }
    }
    let order = vec![BTreeSet::new(); room.budget.len()];
    run(trace, room, &mut Clairvoyant { uses, order, pool_of_layer: &room.pool_of_layer }, warm)
}

struct Clairvoyant<'a> {
    /// By expert: passes to come that want it.
    uses: Vec<VecDeque<usize>>,
    /// By pool: residents by next use.
    order: Vec<BTreeSet<(usize, u32)>>,
    pool_of_layer: &'a [usize],
}

impl Clairvoyant<'_> {
    fn key(&self, e: ExpertId) -> (usize, u32) {
        (self.uses[e.0 as usize].front().copied().unwrap_or(usize::MAX), e.0)
    }
}

impl Decider for Clairvoyant<'_> {
    fn begin(&mut self, _number: usize, pass: &Pass, ids: &[ExpertId]) {
        let pool = self.pool_of_layer[pass.layer as usize];
        for &id in ids {
            let old = self.key(id);
            self.uses[id.0 as usize].pop_front();
            if self.order[pool].remove(&old) {
                let new = self.key(id);
                self.order[pool].insert(new);
            }
        }
    }
    fn insert(&mut self, pool: usize, e: ExpertId) {
        let key = self.key(e);
        self.order[pool].insert(key);
    }
    fn remove(&mut self, pool: usize, e: ExpertId) {
        let key = self.key(e);
        self.order[pool].remove(&key);
    }
    fn victim(
        &mut self,
        pool: usize,
        _e: ExpertId,
        busy: &dyn Fn(ExpertId) -> bool,
    ) -> Option<ExpertId> {
        let last = self.order[pool].iter().rev().find(|(_, id)| !busy(ExpertId(*id)));
        last.map(|&(_, id)| ExpertId(id))
    }
}
