//! Logistic regression that is refined with every token (Newton's method on
//! the log loss, the curvature summed up with forgetting). Some thousand
//! samples a token and seven coefficients: it has found its way after a few
//! tokens, and does not depend on a learning rate.

/// Coefficients and features: a constant, the logarithms of three rates, the
/// last weight, whether the last token chose the expert, and the echo.
pub(super) const FEATURES: usize = 7;
/// Which of them is the echo.
pub(super) const ECHO: usize = 6;

pub(super) type Features = [f64; FEATURES];
type Matrix = [Features; FEATURES];

/// Where learning starts: fitted to traces of the test models that
/// `pinscope-models` makes, and rounded.
const START: Features = [-1.6, 0.4, 0.2, 0.2, 0.2, 0.35, 0.5];
/// How far it is to be trusted: like a curvature that was seen already.
const TRUST: f64 = 10.0;
/// What is kept of the curvature after each lesson.
const KEPT: f64 = 0.998;
/// One batch in so many is learnt from.
const EVERY: u32 = 4;
/// Chances stay away from 0 and 1 by this.
const SURE: f64 = 1e-6;

pub(super) struct Learner {
    coefficients: Features,
    curvature: Matrix,
    /// Batches since the last lesson.
    batches: u32,
}

/// What one batch teaches.
pub(super) struct Lesson {
    slope: Features,
    curvature: Matrix,
}

impl Learner {
    pub fn new() -> Self {
        let mut curvature = [[0.0; FEATURES]; FEATURES];
        (0..FEATURES).for_each(|i| curvature[i][i] = TRUST);
        Self { coefficients: START, curvature, batches: 0 }
    }

    /// Chance that an expert with these features is chosen next, in (0, 1).
    pub fn chance(&self, features: &Features) -> f64 {
        let sum: f64 = self.coefficients.iter().zip(features).map(|(c, f)| c * f).sum();
        (1.0 / (1.0 + (-sum).exp())).clamp(SURE, 1.0 - SURE)
    }

    /// One that is deaf to echoes.
    #[cfg(test)]
    pub fn deaf() -> Self {
        let mut learner = Self::new();
        learner.coefficients[ECHO] = 0.0;
        learner.curvature[ECHO][ECHO] = f64::INFINITY;
        learner
    }

    /// One that stays as it begins, and is deaf.
    #[cfg(test)]
    pub fn frozen() -> Self {
        let mut learner = Self::deaf();
        (0..FEATURES).for_each(|i| learner.curvature[i][i] = f64::INFINITY);
        learner
    }

    /// Whether the batch at hand should be learnt from.
    pub fn due(&mut self) -> bool {
        // Counting to four alone would find the same layers in every token of
        // a model with a multiple of four; so the turn moves on now and then.
        self.batches = (self.batches + 1) % (EVERY * 16 + 1);
        self.batches % EVERY == 1
    }

    pub fn lesson(&self) -> Lesson {
        Lesson { slope: [0.0; FEATURES], curvature: [[0.0; FEATURES]; FEATURES] }
    }

    /// Takes a step to where the log loss is least.
    pub fn take(&mut self, lesson: Lesson) {
        for i in 0..FEATURES {
            for j in 0..FEATURES {
                // The lower half of a lesson is its upper half.
                let new = lesson.curvature[i.min(j)][i.max(j)];
                self.curvature[i][j] = self.curvature[i][j] * KEPT + new;
            }
            // What is forgotten is replaced by trust in where we are.
            self.curvature[i][i] += (1.0 - KEPT) * TRUST;
        }
        let step = solve(self.curvature, lesson.slope);
        if step.iter().all(|s| s.is_finite()) {
            self.coefficients.iter_mut().zip(step).for_each(|(c, s)| *c -= s);
        }
    }
}

impl Lesson {
    /// An expert with these features, that was given this `chance`, was
    /// chosen or not.
    pub fn add(&mut self, features: &Features, chance: f64, chosen: bool) {
        let wrong = chance - f64::from(u8::from(chosen));
        let spread = chance * (1.0 - chance);
        for i in 0..FEATURES {
            self.slope[i] += wrong * features[i];
            for j in i..FEATURES {
                self.curvature[i][j] += spread * features[i] * features[j];
            }
        }
    }
}

/// `a`^-1 `b` of a positive definite `a`, by elimination.
fn solve(mut a: Matrix, mut b: Features) -> Features {
    for i in 0..FEATURES {
        let pivot = a[i];
        for j in i + 1..FEATURES {
            let times = a[j][i] / pivot[i];
            a[j].iter_mut().zip(pivot).for_each(|(x, p)| *x -= times * p);
            b[j] -= times * b[i];
        }
    }
    for i in (0..FEATURES).rev() {
        let known: f64 = (i + 1..FEATURES).map(|k| a[i][k] * b[k]).sum();
        b[i] = (b[i] - known) / a[i][i];
    }
    b
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::splitmix::SplitMix64;

    #[test]
    fn elimination_solves_what_it_should() {
        let mut a = [[0.0; FEATURES]; FEATURES];
        for (i, row) in a.iter_mut().enumerate() {
            row.iter_mut().enumerate().for_each(|(j, x)| *x = 1.0 / (1.0 + i as f64 + j as f64));
            row[i] += 1.0;
        }
        let x = [1.0, -2.0, 3.0, 0.5, 0.0, 4.0, -0.5];
        let b = a.map(|row| row.iter().zip(x).map(|(a, x)| a * x).sum());
        solve(a, b).iter().zip(x).for_each(|(got, want)| assert!((got - want).abs() < 1e-9));
    }

    #[test]
    fn the_coefficients_that_made_the_choices_are_found() {
        let truth = [-3.0, 1.0, 0.0, 0.5, 0.0, -1.0, 0.5];
        let mut rng = SplitMix64(7);
        let mut uniform = || rng.below(1 << 20) as f64 / f64::from(1 << 20);
        let mut learner = Learner::new();
        for _ in 0..2000 {
            let mut lesson = learner.lesson();
            for _ in 0..64 {
                let f = [
                    1.0,
                    uniform() * 4.0 - 2.0,
                    uniform(),
                    uniform(),
                    uniform(),
                    uniform().round(),
                    uniform() * 4.0 - 2.0,
                ];
                let sum: f64 = f.iter().zip(truth).map(|(f, t)| f * t).sum();
                let chosen = uniform() < 1.0 / (1.0 + (-sum).exp());
                lesson.add(&f, learner.chance(&f), chosen);
            }
            learner.take(lesson);
        }
        for (got, want) in learner.coefficients.iter().zip(truth) {
            assert!((got - want).abs() < 0.25, "{:?}", learner.coefficients);
        }
    }

    #[test]
    fn every_layer_is_learnt_from_whatever_their_number() {
        for layers in [1, 3, 24, 36, 47, 48, 64, 94] {
            let mut learner = Learner::new();
            let mut seen = vec![false; layers];
            (0..layers * 200).for_each(|i| seen[i % layers] |= learner.due());
            assert!(seen.iter().all(|s| *s), "{layers} layers");
        }
    }
}
