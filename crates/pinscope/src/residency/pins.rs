//! Experts that never give way: HotPin's part of the residency.
//!
//! A pinned expert is unknown to its pool's policy, so it can be no victim and
//! costs nothing there. It need not be resident: one that is not is read
//! when it is asked for, and stays then. So pins move without a pause.

use super::drift::{Drift, Heat};
use super::{Demand, Residency, State};
use crate::policy::ExpertId;
use crate::profile::{choose_pins, hottest, PinPlan};

/// What is pinned, and whether it should be.
pub(super) struct Pins {
    /// Share of the slots that pins may take.
    share: f64,
    /// Experts by heat, those that fit are pinned; as they were last chosen.
    order: Vec<ExpertId>,
    drift: Drift,
    heat: Heat,
    /// Follow the traffic.
    repin: bool,
    told: bool,
}

impl Residency {
    /// Pins the experts of `plan`; nothing is read yet (see
    /// [`load_pins`](Self::load_pins)). With `repin`, pins move when traffic
    /// is no longer what the profile promised.
    pub fn pin(&mut self, plan: &PinPlan, repin: bool) {
        let per_layer = self.map.experts_per_layer();
        for (i, &rate) in plan.rate.iter().enumerate() {
            let class = self.layout.class_of_layer[i / per_layer as usize];
            self.pools[class].policy.warm(ExpertId(i as u32), rate);
        }
        self.pins = Some(Pins {
            share: plan.share,
            order: hottest(&plan.rate),
            drift: Drift::new(plan.promise),
            heat: Heat::new(&plan.rate),
            repin,
            told: false,
        });
        self.apply_pins();
    }

    /// What the user should hear of the pins since the last call.
    pub fn take_news(&mut self) -> Option<String> {
        self.news.take()
    }

    /// Pins the hottest experts that fit in the slots there are, and lets go
    /// of the others.
    pub(super) fn apply_pins(&mut self) {
        let Some(pins) = &self.pins else { return };
        let slots: Vec<u64> = self.pools.iter().map(|p| if p.full { 0 } else { p.held }).collect();
        let chosen = choose_pins(&pins.order, &self.map, &self.layout, &slots, pins.share);
        let mut pinned = vec![false; self.is_pinned.len()];
        chosen.iter().for_each(|id| pinned[id.0 as usize] = true);
        for (i, now) in pinned.into_iter().enumerate() {
            if std::mem::replace(&mut self.is_pinned[i], now) == now {
                continue;
            }
            if matches!(self.state[i], State::Absent | State::Shared) {
                continue; // unknown to the policy
            }
            let id = ExpertId(i as u32);
            let class = self.class_of(id);
            let policy = &mut self.pools[class].policy;
            match now {
                true => policy.on_remove(id),
                false => policy.on_insert(id),
            }
        }
    }

    /// Takes note of what a layer chose.
    pub(super) fn watch_pins(&mut self, layer: usize, tokens: usize, demand: &[Demand]) {
        let Some(pins) = &mut self.pins else { return };
        let first = layer as u32 * self.map.experts_per_layer();
        let mut drifted = None;
        if layer == 0 {
            pins.heat.token(tokens);
            drifted = pins.drift.token();
        }
        let mut pinned = 0;
        for d in demand {
            let id = ExpertId(first + d.expert);
            pins.heat.chosen(id, d.tokens);
            pinned += u32::from(self.is_pinned[id.0 as usize]);
        }
        if self.decoding && !self.pools[self.layout.class_of_layer[layer]].full {
            pins.drift.layer(pinned, demand.len() as u32);
        }
        if let Some((served, promised)) = drifted {
            self.drifted(served, promised);
        }
    }

    fn drifted(&mut self, served: f64, promised: f64) {
        let Some(pins) = &mut self.pins else { return };
        if !std::mem::replace(&mut pins.told, true) {
            let what = match pins.repin {
                true => "they follow what is hot now",
                false => "--no-repin keeps them where they are",
            };
            self.news = Some(format!(
                "The pinned experts serve {:.0} % of what is asked for; the profile promised {:.0} %. \
                 This text is unlike the profiled one: {what}.",
                100.0 * served,
                100.0 * promised
            ));
        }
        if !pins.repin {
            // Said once, that is all.
            pins.drift = Drift::new(0.0);
            return;
        }
        pins.order = hottest(pins.heat.values());
        self.apply_pins();
        let Some(pins) = &mut self.pins else { return };
        let heat = pins.heat.values();
        let kept: f64 = (0..heat.len()).filter(|&i| self.is_pinned[i]).map(|i| heat[i]).sum();
        let all: f64 = heat.iter().sum();
        pins.drift = Drift::new(if all > 0.0 { kept / all } else { 0.0 });
        self.stats.repins += 1;
    }
}
