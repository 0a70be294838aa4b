//! Whether predicting pays at all.
//!
//! Where nearly everything is in RAM, or the disk has no idle time, a
//! prediction costs more than the waiting that it saves. What both cost is
//! known only from trying: so one token in [`PROBE_EVERY`] is computed the
//! other way, and the way that costs less stays.
//!
//! A token's cost depends far more on how many of its experts are missing
//! than on prediction, so it is counted a byte that was missing; and nothing is
//! decided on fewer than [`ENOUGH`] tokens of each kind.

/// One token in so many is computed the way that is not preferred.
const PROBE_EVERY: u64 = 16;
/// The same as long as there are not [`ENOUGH`] of them.
const PROBE_EVERY_AT_FIRST: u64 = 4;
/// Tokens of a kind that are needed for a decision.
const ENOUGH: u64 = 4;
/// How much a token counts against the mean so far.
const FRESH: f64 = 0.1;
/// A way must cost this much less than the other to be changed to: waiting
/// varies from token to token.
const CLEARLY: f64 = 0.95;

/// Tokens of a kind.
#[derive(Debug, Clone, Copy, Default)]
struct Kind {
    tokens: u64,
    /// Means: nanoseconds of a token, and bytes that it missed.
    ns: f64,
    missing: f64,
}

impl Kind {
    fn add(&mut self, ns: u64, missing: u64) {
        self.tokens += 1;
        // The first ones count alike.
        let weight = FRESH.max(1.0 / self.tokens as f64);
        self.ns += weight * (ns as f64 - self.ns);
        self.missing += weight * (missing as f64 - self.missing);
    }

    /// Nanoseconds a missing byte. Nothing missing is no reason to divide by
    /// nothing.
    fn cost(&self) -> f64 {
        self.ns / self.missing.max(1.0)
    }
}

/// Compares tokens with prediction and without.
#[derive(Debug)]
pub(super) struct Worth {
    /// Without and with prediction.
    kinds: [Kind; 2],
    preferred: bool,
    /// How the token at hand is computed.
    predicting: bool,
    since_probe: u64,
}

impl Worth {
    /// Prediction is thought to pay until it is known.
    pub fn new() -> Self {
        Self { kinds: [Kind::default(); 2], preferred: true, predicting: true, since_probe: 0 }
    }

    /// Whether this token's layers are worth a prediction.
    pub fn predicts(&self) -> bool {
        self.predicting
    }

    /// A token is over, which waited, predicted and read ahead for `ns`
    /// nanoseconds, and whose experts' `missing` bytes were not in RAM, or only
    /// because of a prediction. Decides about the next one.
    pub fn token(&mut self, ns: u64, missing: u64) {
        self.kinds[usize::from(self.predicting)].add(ns, missing);
        let [without, with] = self.kinds;
        if without.tokens.min(with.tokens) >= ENOUGH {
            self.preferred = match self.preferred {
                true => with.cost() * CLEARLY < without.cost(),
                false => with.cost() < without.cost() * CLEARLY,
            };
        }
        self.since_probe += 1;
        let known = self.kinds[usize::from(!self.preferred)].tokens >= ENOUGH;
        let probe = self.since_probe >= if known { PROBE_EVERY } else { PROBE_EVERY_AT_FIRST };
        if probe {
            self.since_probe = 0;
        }
        self.predicting = self.preferred != probe;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of 1,000 that were predicted, at these costs.
    fn predicted(worth: &mut Worth, with: u64, without: u64) -> usize {
        let token = |_: &usize| {
            let predicts = worth.predicts();
            worth.token(if predicts { with } else { without }, 100);
            predicts
        };
        (0..1000).filter(token).count()
    }

    #[test]
    fn prediction_that_pays_goes_on_but_for_the_probes() {
        assert!(predicted(&mut Worth::new(), 1000, 3000) >= 930);
    }

    #[test]
    fn prediction_that_does_not_pay_is_switched_off_but_for_the_probes() {
        assert!(predicted(&mut Worth::new(), 3000, 1000) <= 90);
    }

    #[test]
    fn texts_that_miss_more_do_not_speak_against_the_way_they_were_computed() {
        // Every other token misses ten times as much; prediction saves a fifth.
        let mut worth = Worth::new();
        let predicted = (0..1000u64).filter(|i| {
            let missing = [50, 500][usize::from(i % 32 < 16)];
            let predicts = worth.predicts();
            worth.token(missing * if predicts { 8 } else { 10 }, missing);
            predicts
        });
        assert!(predicted.count() >= 930);
    }

    #[test]
    fn it_comes_back_when_it_pays_again() {
        let mut worth = Worth::new();
        predicted(&mut worth, 3000, 1000);
        predicted(&mut worth, 1000, 3000);
        assert!(predicted(&mut worth, 1000, 3000) >= 930);
    }
}
