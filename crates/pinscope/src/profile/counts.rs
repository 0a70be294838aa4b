//! How often the router chose each expert.

/// Choices of one phase (prompts or generation).
///
/// Experts are counted at `layer * experts_per_layer + expert`, as in
/// [`ExpertId`](crate::policy::ExpertId). Counts are floats because profiles
/// are merged with weights.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseCounts {
    /// Tokens that were routed.
    pub tokens: f64,
    /// Tokens that chose the expert, for each expert.
    pub chosen: Vec<f64>,
    /// Sum of the weights with which they did; 0 where the model applies them
    /// elsewhere than to the experts' results.
    pub weight: Vec<f64>,
}

impl PhaseCounts {
    fn new(experts: usize) -> Self {
        Self { tokens: 0.0, chosen: vec![0.0; experts], weight: vec![0.0; experts] }
    }

    fn add(&mut self, other: &Self, factor: f64) {
        self.tokens += factor * other.tokens;
        for (to, from) in [(&mut self.chosen, &other.chosen), (&mut self.weight, &other.weight)] {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
        }
    }
}

/// Choices of both phases.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingCounts {
    /// Batches of more than one token.
    pub prefill: PhaseCounts,
    /// One token at a time.
    pub decode: PhaseCounts,
}

/// A prompt's counts weigh like this many generated tokens at most; see
/// [`RoutingCounts::rate`].
const PRIOR_TOKENS: f64 = 64.0;

impl RoutingCounts {
    /// No choices yet, of a model with `experts` experts in all its layers.
    pub fn new(experts: usize) -> Self {
        Self { prefill: PhaseCounts::new(experts), decode: PhaseCounts::new(experts) }
    }

    /// Experts that are counted.
    pub fn experts(&self) -> usize {
        self.decode.chosen.len()
    }

    /// Adds `factor` times what `other` counted for the same model.
    pub fn add(&mut self, other: &Self, factor: f64) {
        self.prefill.add(&other.prefill, factor);
        self.decode.add(&other.decode, factor);
    }

    /// Whether no token was counted.
    pub fn is_empty(&self) -> bool {
        self.prefill.tokens + self.decode.tokens <= 0.0
    }

    /// Choices a generated token to be expected of each expert, 0 to 1.
    ///
    /// What was generated counts most: prompts bring most experts in whatever
    /// is pinned, and waiting for single experts is what pins are to spare. But
    /// little text is generated while profiling, so the rates of prompts are
    /// taken as a prior that is worth `PRIOR_TOKENS` (64) tokens.
    pub fn rate(&self) -> Vec<f64> {
        let (prefill, decode) = (&self.prefill, &self.decode);
        let prior = PRIOR_TOKENS.min(prefill.tokens);
        let all = decode.tokens + prior;
        if all <= 0.0 {
            return vec![0.0; self.experts()];
        }
        let scale = if prior > 0.0 { prior / prefill.tokens } else { 0.0 };
        let both = decode.chosen.iter().zip(&prefill.chosen);
        both.map(|(decode, prefill)| (decode + scale * prefill) / all).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(prefill: (f64, [f64; 2]), decode: (f64, [f64; 2])) -> RoutingCounts {
        let phase = |(tokens, chosen): (f64, [f64; 2])| PhaseCounts {
            tokens,
            chosen: chosen.to_vec(),
            weight: vec![0.0; 2],
        };
        RoutingCounts { prefill: phase(prefill), decode: phase(decode) }
    }

    #[test]
    fn generated_tokens_outweigh_a_prompt_but_for_its_sixty_four() {
        // 640 prompt tokens at rates 1 and 0, 192 generated at 0 and 1:
        // the prompt is a quarter of 64 + 192.
        let c = counts((640.0, [640.0, 0.0]), (192.0, [0.0, 192.0]));
        assert_eq!(c.rate(), [0.25, 0.75]);
    }

    #[test]
    fn either_phase_alone_gives_its_own_rates() {
        assert_eq!(counts((10.0, [5.0, 1.0]), (0.0, [0.0; 2])).rate(), [0.5, 0.1]);
        assert_eq!(counts((0.0, [0.0; 2]), (8.0, [2.0, 8.0])).rate(), [0.25, 1.0]);
        assert_eq!(RoutingCounts::new(2).rate(), [0.0, 0.0]);
    }

    #[test]
    fn counts_add_up_with_a_factor() {
        let mut c = counts((1.0, [1.0, 0.0]), (2.0, [0.0, 2.0]));
        c.add(&counts((4.0, [2.0, 4.0]), (0.0, [0.0, 0.0])), 0.5);
        assert_eq!(c, counts((3.0, [2.0, 2.0]), (2.0, [0.0, 2.0])));
    }
}
