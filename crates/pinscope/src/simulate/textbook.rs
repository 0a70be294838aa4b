//! The least recently used expert of all layers gives way: the yardstick that
//! published figures are measured by. (The policy `lru` counts in tokens.)

use std::collections::BTreeSet;

use crate::policy::{ExpertId, Policy, PolicyShape};

/// See the module.
pub fn textbook_lru(shape: PolicyShape) -> Box<dyn Policy> {
    let ids = shape.layers as usize * shape.experts_per_layer as usize;
    Box::new(Textbook { now: 0, used: vec![0; ids], order: BTreeSet::new() })
}

struct Textbook {
    now: u64,
    used: Vec<u64>,
    /// Residents by last use.
    order: BTreeSet<(u64, u32)>,
}

impl Policy for Textbook {
    fn name(&self) -> &'static str {
        "lru (textbook)"
    }

    fn on_select(&mut self, e: ExpertId, _tokens: u32, _weight: f32) {
        self.now += 1;
        let resident = self.order.remove(&(self.used[e.0 as usize], e.0));
        self.used[e.0 as usize] = self.now;
        if resident {
            self.order.insert((self.now, e.0));
        }
    }

    fn on_token(&mut self) {}

    fn on_insert(&mut self, e: ExpertId) {
        self.order.insert((self.used[e.0 as usize], e.0));
    }

    fn on_remove(&mut self, e: ExpertId) {
        self.order.remove(&(self.used[e.0 as usize], e.0));
    }

    fn victim(&mut self, _: ExpertId, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId> {
        let idle = self.order.iter().find(|(_, id)| !busy(ExpertId(*id)));
        idle.map(|&(_, id)| ExpertId(id))
    }
}
