//! Whether traffic still is what the pins were chosen for, and what it is now.

use crate::policy::ExpertId;

/// What is left of an expert's heat after a token; half of it after 69. Slower
/// than a cache's own memory, since pins are for what lasts longer than a
/// sentence, but by the time that drift is noticed (about 100 tokens) what the
/// profile said must weigh less than what came since.
const DECAY: f64 = 0.99;
/// Steps are scaled back before they leave the range of `f64`.
const LARGEST_STEP: f64 = 1e100;

/// Choices of late, of each expert.
pub(super) struct Heat {
    /// In units of `step`, which grows instead of all values shrinking.
    values: Vec<f64>,
    step: f64,
}

impl Heat {
    /// Starts as if traffic had always had these `rate`s (choices a token).
    pub fn new(rate: &[f64]) -> Self {
        Self { values: rate.iter().map(|r| r / (1.0 - DECAY)).collect(), step: 1.0 }
    }

    /// `tokens` go through the model: what was before fades.
    pub fn token(&mut self, tokens: usize) {
        self.step /= DECAY.powf(tokens as f64);
        if self.step > LARGEST_STEP {
            self.values.iter_mut().for_each(|v| *v /= self.step);
            self.step = 1.0;
        }
    }

    /// `tokens` of them chose `id`.
    pub fn chosen(&mut self, id: ExpertId, tokens: u32) {
        self.values[id.0 as usize] += f64::from(tokens) * self.step;
    }

    /// Heat of all experts; only ratios mean anything.
    pub fn values(&self) -> &[f64] {
        &self.values
    }
}

/// Tokens over which the live rate is averaged, and for which it must stay low.
const PATIENCE: u32 = 64;
/// Below this part of what was promised, pins are not worth their place.
const LOW: f64 = 0.75;

/// Compares what pins serve with what they promised.
pub(super) struct Drift {
    promise: f64,
    /// Share of choices that pins served, averaged over [`PATIENCE`] tokens.
    served: f64,
    low_for: u32,
    pinned: u32,
    chosen: u32,
}

impl Drift {
    pub fn new(promise: f64) -> Self {
        Self { promise, served: promise, low_for: 0, pinned: 0, chosen: 0 }
    }

    /// A layer of a generated token chose `chosen` experts, `pinned` of them pinned.
    pub fn layer(&mut self, pinned: u32, chosen: u32) {
        self.pinned += pinned;
        self.chosen += chosen;
    }

    /// A generated token is complete. `Some((served, promised))` when the pins
    /// have served too little for too long.
    pub fn token(&mut self) -> Option<(f64, f64)> {
        let (pinned, chosen) = (std::mem::take(&mut self.pinned), std::mem::take(&mut self.chosen));
        if chosen == 0 {
            return None;
        }
        let share = f64::from(pinned) / f64::from(chosen);
        self.served += (share - self.served) / f64::from(PATIENCE);
        self.low_for = if self.served < LOW * self.promise { self.low_for + 1 } else { 0 };
        (self.low_for >= PATIENCE).then_some((self.served, self.promise))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens until the pins are found to have drifted, with `pinned` of 100
    /// choices pinned.
    fn until_drift(drift: &mut Drift, pinned: u32) -> Option<usize> {
        (1..10_000).find(|_| {
            drift.layer(pinned, 100);
            drift.token().is_some()
        })
    }

    #[test]
    fn pins_that_serve_what_they_promised_never_drift() {
        assert_eq!(until_drift(&mut Drift::new(0.6), 60), None);
        assert_eq!(until_drift(&mut Drift::new(0.6), 46), None);
    }

    #[test]
    fn pins_that_serve_nothing_have_drifted_after_some_tokens() {
        // The mean falls below 0.75 after n tokens, (63/64)^n < 0.75: n = 19.
        assert_eq!(until_drift(&mut Drift::new(0.6), 0), Some(19 + 63));
    }

    #[test]
    fn a_short_excursion_is_no_drift() {
        let mut drift = Drift::new(0.6);
        for _ in 0..50 {
            (0..40).for_each(|_| drift.layer(0, 10));
            assert_eq!(drift.token(), None);
            (0..200).for_each(|_| {
                drift.layer(60, 100);
                assert_eq!(drift.token(), None);
            });
        }
    }

    #[test]
    fn heat_is_the_faded_count_however_long_it_runs() {
        let mut heat = Heat::new(&[0.5, 0.0]);
        // Chosen in half of the tokens, like its start; the other in the last one.
        for t in 0..200_000 {
            heat.token(1);
            if t % 2 == 0 {
                heat.chosen(ExpertId(0), 1);
            }
        }
        heat.chosen(ExpertId(1), 1);
        let ratio = heat.values()[0] / heat.values()[1];
        assert!((ratio / 50.0 - 1.0).abs() < 0.02, "{ratio}");
        heat.token(69);
        heat.chosen(ExpertId(1), 1);
        let ratio = heat.values()[0] / heat.values()[1];
        assert!((ratio / (25.0 / 1.5) - 1.0).abs() < 0.02, "{ratio}");
    }
}
