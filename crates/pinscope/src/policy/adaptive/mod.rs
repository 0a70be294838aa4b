//! PinScope's own: who gives way is the expert that is expected to be needed
//! last, by a small model of re-use that learns while it runs.
//!
//! For each expert of a layer a logistic regression says how likely the next
//! token is to choose it, from what was seen: how often it was chosen, faded
//! at three rates; whether the last token chose it, and with what weight; and
//! what tokens did that were like the one at work ([`echo`]). Its
//! coefficients follow the traffic ([`learner`]), so one default serves models
//! whose tokens repeat each other and models whose tokens do not. A prompt
//! counts like as many tokens as it has, each choosing at the prompt's mean
//! rate. With a chance p of being chosen at the next opportunity and r at those
//! after it, of which no echo tells, the next choice is (1 - p) / r opportunities
//! further than the next, less what is over of this token: the layer at work is
//! reached last, the one behind it next.
//!
//! The idea of mending a fixed score online is that of LeCaR and Cacheus
//! (Rodriguez et al., FAST 2021); the features are those of LFU with ageing.

mod echo;
mod learner;

use std::ops::Range;

use self::echo::{Echo, Whose, VOTES};
use self::learner::{Features, Learner, ECHO};
use super::{ExpertId, Policy, PolicyShape};

pub(super) const NAME: &str = "adaptive";

/// Counts fade to these parts with each token: half-lives of 7, 34 and 346.
const KEPT: [f64; 3] = [0.9, 0.98, 0.998];
/// What a weight still says after each token that did not choose the expert.
const WEIGHT_KEPT: f64 = 0.7;
/// After that many tokens it says nothing.
const WEIGHT_AGE: f64 = 6.0;
/// A profile weighs as much as this many tokens.
const WARM_TOKENS: f64 = 256.0;

/// See the module.
pub(super) struct Adaptive {
    shape: PolicyShape,
    /// Of the next opportunity.
    learner: Learner,
    /// Of any, deaf to echoes.
    usual: Learner,
    echo: Echo,
    layers: Vec<Layer>,
    experts: Vec<Expert>,
    /// The batch whose choices are being told: layer and tokens.
    open: Option<(usize, u32)>,
    choices: Vec<(ExpertId, u32, f32)>,
    /// Memory for [`Adaptive::learn`]: a token allocates nothing.
    chosen: Vec<bool>,
    votes: Vec<f32>,
}

#[derive(Default)]
struct Layer {
    /// Residents by the opportunities that they are expected to miss, most
    /// first.
    order: Vec<(f64, u32)>,
    /// Tokens that reached the layer, faded like the counts.
    seen: [f64; 3],
    /// The same, not faded.
    clock: f64,
    /// All votes of the echo.
    votes: f64,
}

#[derive(Clone)]
struct Expert {
    /// Choices, faded.
    counts: [f64; 3],
    /// On the clock of the layer, when it was last chosen.
    used: f64,
    /// With what weight, relative to the mean of those chosen with it.
    weight: f64,
    /// Votes of the echo.
    votes: f64,
    resident: bool,
}

impl Adaptive {
    pub fn new(shape: PolicyShape) -> Self {
        // All its experts may be resident: the list need not grow later.
        let room = shape.experts_per_layer as usize;
        let layer = || Layer { order: Vec::with_capacity(room), ..Layer::default() };
        let never =
            Expert { counts: [0.0; 3], used: -1e9, weight: 0.0, votes: 0.0, resident: false };
        Self {
            shape,
            learner: Learner::new(),
            usual: Learner::new(),
            echo: Echo::new(shape.layers as usize, room),
            layers: (0..shape.layers).map(|_| layer()).collect(),
            experts: vec![never; shape.ids()],
            open: None,
            choices: Vec::new(),
            chosen: Vec::new(),
            votes: vec![0.0; room],
        }
    }

    fn features(&self, layer: &Layer, e: &Expert) -> Features {
        let share = f64::from(self.shape.top_k.max(1)) / f64::from(self.shape.experts_per_layer);
        // Rates relative to that of an average expert, as if one token more
        // had been seen that chose all equally.
        let rate = |i: usize| ((e.counts[i] / share + 1.0) / (layer.seen[i] + 1.0)).ln();
        let age = layer.clock - e.used;
        let weight = if age < WEIGHT_AGE { e.weight * WEIGHT_KEPT.powi(age as i32) } else { 0.0 };
        let echo = ((e.votes / share + 1.0) / (layer.votes + 1.0)).ln();
        [1.0, rate(0), rate(1), rate(2), weight, f64::from(u8::from(age < 0.5)), echo]
    }

    /// That the expert is chosen at the next opportunity, and at one of which
    /// no echo tells.
    fn chances(&self, id: u32) -> (f64, f64) {
        let layer = &self.layers[self.shape.layer(ExpertId(id))];
        let mut features = self.features(layer, &self.experts[id as usize]);
        let next = self.learner.chance(&features);
        features[ECHO] = 0.0;
        (next, self.usual.chance(&features))
    }

    /// Opportunities that the expert is expected to miss.
    fn missed(&self, id: u32) -> f64 {
        let (next, later) = self.chances(id);
        (1.0 - next) / later
    }

    /// Ends the batch at hand: learns from it, counts it, and orders the
    /// residents of its layer anew.
    fn close(&mut self) {
        let Some((l, tokens)) = self.open.take() else { return };
        let mut choices = std::mem::take(&mut self.choices);
        let per_layer = self.shape.experts_per_layer as usize;
        let ids = l * per_layer..(l + 1) * per_layer;
        if tokens == 1 && self.layers[l].clock > 0.0 && self.learner.due() {
            self.learn(&ids, &choices);
        }
        self.count(l, tokens, &ids, &choices);
        if tokens == 1 {
            self.echo.chose(l, choices.iter().map(|(e, ..)| e.0 as usize - ids.start));
        }
        choices.clear();
        self.choices = choices;

        self.arrange(l, Whose::Next);
        // By now more is known of the token than when those layers were
        // reached that come in a quarter of a round: once more for them.
        let ahead = (l + self.layers.len() / 4) % self.layers.len();
        if ahead != l {
            self.arrange(ahead, if ahead > l { Whose::This } else { Whose::Next });
        }
    }

    /// Orders the residents of a layer anew, by what is expected of a token.
    fn arrange(&mut self, l: usize, whose: Whose) {
        let mut votes = std::mem::take(&mut self.votes);
        let any = self.echo.expect(l, whose, &mut votes);
        self.layers[l].votes = if any { VOTES } else { 0.0 };
        let first = l * votes.len();
        for (e, votes) in self.experts[first..].iter_mut().zip(&votes) {
            e.votes = f64::from(*votes);
        }
        self.votes = votes;

        let mut order = std::mem::take(&mut self.layers[l].order);
        for entry in &mut order {
            entry.0 = self.missed(entry.1);
        }
        order.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        self.layers[l].order = order;
    }

    fn learn(&mut self, ids: &Range<usize>, choices: &[(ExpertId, u32, f32)]) {
        let first = ids.start as u32;
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.clear();
        chosen.resize(ids.len(), false);
        choices.iter().for_each(|(e, ..)| chosen[(e.0 - first) as usize] = true);
        let layer = &self.layers[self.shape.layer(ExpertId(first))];
        let (mut lesson, mut usual) = (self.learner.lesson(), self.usual.lesson());
        for (e, &chosen) in self.experts[ids.clone()].iter().zip(&chosen) {
            let mut features = self.features(layer, e);
            lesson.add(&features, self.learner.chance(&features), chosen);
            features[ECHO] = 0.0;
            usual.add(&features, self.usual.chance(&features), chosen);
        }
        self.learner.take(lesson);
        self.usual.take(usual);
        self.chosen = chosen;
    }

    fn count(
        &mut self,
        l: usize,
        tokens: u32,
        ids: &Range<usize>,
        choices: &[(ExpertId, u32, f32)],
    ) {
        let n = f64::from(tokens);
        // What is kept of a count, and what a choice by every token adds.
        let kept = KEPT.map(|k| k.powf(n));
        let full: [f64; 3] = std::array::from_fn(|i| (1.0 - kept[i]) / (1.0 - KEPT[i]));
        for e in &mut self.experts[ids.clone()] {
            (0..3).for_each(|i| e.counts[i] *= kept[i]);
        }
        let layer = &mut self.layers[l];
        (0..3).for_each(|i| layer.seen[i] = layer.seen[i] * kept[i] + full[i]);
        layer.clock += n;
        let weights: f64 = choices.iter().map(|c| f64::from(c.2)).sum();
        let mean = weights / choices.len().max(1) as f64;
        for &(id, by, weight) in choices {
            let e = &mut self.experts[id.0 as usize];
            let by = f64::from(by).min(n);
            (0..3).for_each(|i| e.counts[i] += by / n * full[i]);
            // Spread over the batch, the last choice was about this long ago.
            e.used = layer.clock - (n / (by + 1.0)).floor().min(n - 1.0);
            let relative = f64::from(weight) / mean;
            let most = choices.len() as f64;
            e.weight = if relative.is_finite() { relative.clamp(0.0, most) } else { 1.0 };
        }
    }

    fn open(&mut self, layer: usize, tokens: u32) {
        self.close();
        self.open = Some((layer, tokens.max(1)));
    }
}

impl Policy for Adaptive {
    fn name(&self) -> &'static str {
        NAME
    }

    fn on_pass(&mut self, layer: u32, tokens: u32) {
        self.open(layer as usize, tokens);
    }

    fn on_select(&mut self, e: ExpertId, tokens: u32, weight: f32) {
        let layer = self.shape.layer(e);
        if self.open.is_none_or(|(open, _)| open != layer) {
            self.open(layer, tokens);
        }
        self.choices.push((e, tokens, weight));
    }

    fn warm(&mut self, e: ExpertId, rate: f64) {
        let l = self.shape.layer(e);
        let seen: [f64; 3] =
            std::array::from_fn(|i| (1.0 - KEPT[i].powf(WARM_TOKENS)) / (1.0 - KEPT[i]));
        if self.layers[l].clock == 0.0 {
            self.layers[l].seen = seen;
            self.layers[l].clock = WARM_TOKENS;
        }
        self.experts[e.0 as usize].counts = seen.map(|seen| seen * rate);
        if self.experts[e.0 as usize].resident {
            self.on_remove(e);
            self.on_insert(e);
        }
    }

    fn on_token(&mut self) {
        self.close();
        self.echo.token();
    }

    fn on_insert(&mut self, e: ExpertId) {
        self.close();
        let missed = self.missed(e.0);
        let order = &mut self.layers[self.shape.layer(e)].order;
        order.insert(order.partition_point(|(m, _)| *m > missed), (missed, e.0));
        self.experts[e.0 as usize].resident = true;
    }

    fn on_remove(&mut self, e: ExpertId) {
        let order = &mut self.layers[self.shape.layer(e)].order;
        if let Some(at) = order.iter().position(|(_, id)| *id == e.0) {
            order.remove(at);
        }
        self.experts[e.0 as usize].resident = false;
    }

    fn victim(&mut self, incoming: ExpertId, busy: &dyn Fn(ExpertId) -> bool) -> Option<ExpertId> {
        self.close();
        let layers = f64::from(self.shape.layers);
        let mut best: Option<(f64, u32)> = None;
        for (back, l) in self.shape.furthest_first(self.shape.layer(incoming)).enumerate() {
            let last = self.layers[l].order.iter().find(|(_, id)| !busy(ExpertId(*id)));
            if let Some(&(missed, id)) = last {
                // Tokens until it is needed: the first is this or the next
                // one, the rest of which is `back` layers short of a whole.
                let away = missed - back as f64 / layers;
                if best.is_none_or(|(furthest, _)| away > furthest) {
                    best = Some((away, id));
                }
            }
        }
        best.map(|(_, id)| ExpertId(id))
    }
}

#[cfg(test)]
mod tests;
