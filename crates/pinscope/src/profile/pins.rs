//! How many experts to pin, and which.

use super::{hottest, Profile};
use crate::layout::Layout;
use crate::map::ExpertMap;
use crate::policy::ExpertId;

/// Below this, pins would serve hardly more than as many experts taken at
/// random do: the router is flat.
const FLAT: f64 = 0.15;

/// What is pinned, and what that promises.
#[derive(Debug, Clone, PartialEq)]
pub struct PinPlan {
    /// Experts to pin, the hottest first.
    pub pins: Vec<ExpertId>,
    /// Share of the expert slots that pins may take, 0 to 1.
    pub share: f64,
    /// Share of a generated token's choices that pins should serve, as held-out
    /// traffic says.
    pub promise: f64,
    /// Choices a token to be expected of every expert, 0 to 1.
    pub rate: Vec<f64>,
    /// Pins can promise little: experts are used about equally.
    pub flat: bool,
}

impl PinPlan {
    /// Chooses pins for the model of `map` in an arena cut as `layout`, whose
    /// profile is `profile`. `share` overrides the planner's choice.
    ///
    /// The planner pins the part of the arena by which the hottest experts beat
    /// chance: with room for a share `u` of all experts that held-out traffic
    /// uses for `c` of its choices, that is `(c - u) / (1 - u)`. A flat router
    /// gives 0, and the cache policy keeps the room; one that always uses the
    /// same experts gives 1.
    pub fn new(profile: &Profile, map: &ExpertMap, layout: &Layout, share: Option<f64>) -> Self {
        let slots: u64 = layout.classes.iter().map(|c| c.slots).sum();
        let room = slots as f64 / map.expert_count().max(1) as f64;
        let coverage = profile.coverage(0..map.layers().len());
        let served = coverage.held_out(room).unwrap_or_else(|| coverage.own(room));
        let lift = if room < 1.0 { ((served - room) / (1.0 - room)).clamp(0.0, 1.0) } else { 1.0 };
        let share = share.unwrap_or(lift).clamp(0.0, 1.0);

        // Where all experts have a place, none needs protection.
        let slots: Vec<u64> =
            layout.classes.iter().map(|c| if c.is_full() { 0 } else { c.slots }).collect();
        let rate = profile.rate();
        let pins = choose_pins(&hottest(&rate), map, layout, &slots, share);
        let promise = promise(profile, map, layout, &slots, share);
        Self { pins, share, promise, rate, flat: lift < FLAT }
    }
}

/// The first of `order` that may be pinned, with `slots` in each size class of
/// `layout` of which pins may take a `share`.
pub(crate) fn choose_pins(
    order: &[ExpertId],
    map: &ExpertMap,
    layout: &Layout,
    slots: &[u64],
    share: f64,
) -> Vec<ExpertId> {
    let free = Layout::passing_slots(map);
    let quota = |&n: &u64| ((n as f64 * share) as u64).min(n.saturating_sub(free));
    let mut left: Vec<u64> = slots.iter().map(quota).collect();
    let mut taken = Vec::new();
    for &id in order {
        let layer = (id.0 / map.experts_per_layer()) as usize;
        let left = &mut left[layout.class_of_layer[layer]];
        if *left > 0 {
            *left -= 1;
            taken.push(id);
        }
    }
    taken
}

/// Share of one half's choices that pins after the other half serve; mean of both.
fn promise(profile: &Profile, map: &ExpertMap, layout: &Layout, slots: &[u64], share: f64) -> f64 {
    let [a, b] = profile.halves();
    let (a, b) = (a.rate(), b.rate());
    let judge = |chooser: &[f64], judge: &[f64]| {
        let all: f64 = judge.iter().sum();
        let pins = choose_pins(&hottest(chooser), map, layout, slots, share);
        let served: f64 = pins.iter().map(|id| judge[id.0 as usize]).sum();
        (all > 0.0).then(|| served / all)
    };
    let known: Vec<f64> = match (judge(&a, &b), judge(&b, &a)) {
        (Some(x), Some(y)) => vec![x, y],
        // Only one half has traffic: its own word is all there is.
        _ => [judge(&a, &a), judge(&b, &b)].into_iter().flatten().collect(),
    };
    known.iter().sum::<f64>() / known.len().max(1) as f64
}
