//! Whether predicting pays at all.
//!
//! Where nearly everything is in RAM, or the disk has no idle time, a
//! prediction costs more than the waiting that it saves. What both cost is
//! known only from trying: so one token in [`PROBE_EVERY`] is computed the
//! other way, and the way that costs less stays.

/// One token in so many is computed the way that is not preferred.
const PROBE_EVERY: u64 = 16;
/// How much a token counts against the mean so far.
const FRESH: f64 = 0.1;
/// A way must cost this much less than the other to be changed to: waiting
/// varies from token to token.
const CLEARLY: f64 = 0.95;

/// Compares tokens with prediction and without.
#[derive(Debug)]
pub(super) struct Worth {
    /// Mean cost of a token without and with prediction, nanoseconds.
    cost: [Option<f64>; 2],
    preferred: bool,
    /// How the token at hand is computed.
    predicting: bool,
    tokens: u64,
}

impl Worth {
    /// Prediction is thought to pay until it is known.
    pub fn new() -> Self {
        Self { cost: [None; 2], preferred: true, predicting: true, tokens: 0 }
    }

    /// Whether this token's layers are worth a prediction.
    pub fn predicts(&self) -> bool {
        self.predicting
    }

    /// A token is over, which waited, predicted and read ahead for `ns`
    /// nanoseconds. Decides about the next one.
    pub fn token(&mut self, ns: u64) {
        let mean = &mut self.cost[usize::from(self.predicting)];
        let ns = ns as f64;
        *mean = Some(mean.map_or(ns, |m| m + FRESH * (ns - m)));
        if let [Some(without), Some(with)] = self.cost {
            self.preferred = match self.preferred {
                true => with * CLEARLY < without,
                false => with < without * CLEARLY,
            };
        }
        self.tokens += 1;
        let probe = self.tokens.is_multiple_of(PROBE_EVERY);
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
            worth.token(if predicts { with } else { without });
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
    fn it_comes_back_when_it_pays_again() {
        let mut worth = Worth::new();
        predicted(&mut worth, 3000, 1000);
        predicted(&mut worth, 1000, 3000);
        assert!(predicted(&mut worth, 1000, 3000) >= 930);
    }
}
