//! Tokens of the past that chose like the one at work, and what they and their
//! successors chose elsewhere: words come back, and with them most of what the
//! router does.
//!
//! Likeness is the number of experts that both tokens chose, the layers reached
//! last counting most. Its fourth power makes a vote of it, so that a few tokens
//! decide; where nobody is alike, everybody votes and says what is usual.

/// Tokens that are remembered.
const TOKENS: usize = 256;
/// What is left of a likeness with each further layer.
const KEPT: f32 = 0.9;
/// All votes together: as if so many tokens had been seen.
pub(super) const VOTES: f64 = 4.0;
/// Whoever is less alike than this part of the most alike has no vote; it
/// would be a hundredth of the heaviest.
const LIGHT: f32 = 0.33;

pub(super) struct Echo {
    layers: usize,
    /// Words of a set of experts.
    words: usize,
    /// Sets of the chosen, by layer and token (a ring).
    sets: Vec<u64>,
    /// Where the token at work is in the ring, and how far that is in use.
    at: usize,
    held: usize,
    /// Whether it chose anything.
    begun: bool,
    likeness: Vec<f32>,
    /// Place in the ring and weight of those who are alike.
    votes: Vec<(usize, f32)>,
}

/// Whose choice is expected.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    /// That of the token at work, in a layer to come.
    This,
    /// That of the token after it.
    Next,
}

impl Echo {
    pub fn new(layers: usize, experts_per_layer: usize) -> Self {
        let words = experts_per_layer.div_ceil(64);
        Self {
            layers,
            words,
            sets: vec![0; TOKENS * layers * words],
            at: 0,
            held: 1,
            begun: false,
            likeness: vec![0.0; TOKENS],
            votes: Vec::with_capacity(TOKENS),
        }
    }

    fn set(&self, token: usize, layer: usize) -> &[u64] {
        let from = self.start(token, layer);
        &self.sets[from..from + self.words]
    }

    fn start(&self, token: usize, layer: usize) -> usize {
        (layer * TOKENS + token) * self.words
    }

    /// The next token begins; the oldest is forgotten.
    pub fn token(&mut self) {
        if !std::mem::take(&mut self.begun) {
            return;
        }
        self.at = (self.at + 1) % TOKENS;
        self.held = self.held.max(self.at + 1);
        for layer in 0..self.layers {
            let from = self.start(self.at, layer);
            self.sets[from..from + self.words].fill(0);
        }
        self.likeness.fill(0.0);
        self.votes.clear();
    }

    /// The token at work chose these `experts` of `layer`.
    pub fn chose(&mut self, layer: usize, experts: impl Iterator<Item = usize>) {
        self.begun = true;
        let from = self.start(self.at, layer);
        experts.for_each(|e| self.sets[from + e / 64] |= 1 << (e % 64));
        let here = self.start(0, layer)..self.start(self.held, layer);
        let now = &self.sets[from..from + self.words];
        for (likeness, then) in self.likeness.iter_mut().zip(self.sets[here].chunks(self.words)) {
            let both: u32 = then.iter().zip(now).map(|(a, b)| (a & b).count_ones()).sum();
            *likeness = *likeness * KEPT + both as f32;
        }
        self.likeness[self.at] = 0.0;
        self.votes.clear();
        let vote = |likeness: f32| (likeness * likeness) * (likeness * likeness);
        let least = self.likeness[..self.held].iter().copied().fold(0.0, f32::max) * LIGHT;
        let mut all = 0.0;
        for (token, &likeness) in self.likeness[..self.held].iter().enumerate() {
            if likeness > least {
                self.votes.push((token, vote(likeness)));
                all += vote(likeness);
            }
        }
        self.votes.iter_mut().for_each(|(_, vote)| *vote *= VOTES as f32 / all);
    }

    /// Adds up in `votes` who is expected to be chosen in `layer`; returns
    /// whether anybody voted.
    pub fn expect(&self, layer: usize, whose: Whose, votes: &mut [f32]) -> bool {
        votes.fill(0.0);
        for &(token, vote) in &self.votes {
            let of = match whose {
                Whose::This => token,
                Whose::Next => (token + 1) % TOKENS,
            };
            for (word, &set) in self.set(of, layer).iter().enumerate() {
                let mut left = set;
                while left != 0 {
                    votes[word * 64 + left.trailing_zeros() as usize] += vote;
                    left &= left - 1;
                }
            }
        }
        !self.votes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Token = Vec<Vec<usize>>;

    /// The same from the plain history: all layers of `past`, and the `now`
    /// that the token at work has reached.
    fn expected(past: &[Token], now: &[Vec<usize>], layer: usize, whose: Whose) -> Vec<f64> {
        let past = &past[past.len().saturating_sub(TOKENS - 1)..];
        let alike = |t: &Token| {
            let mut likeness = 0.0f64;
            for (a, b) in t.iter().zip(now) {
                likeness = likeness * 0.9 + b.iter().filter(|e| a.contains(e)).count() as f64;
            }
            likeness
        };
        let alike: Vec<f64> = past.iter().map(alike).collect();
        let most = alike.iter().copied().fold(0.0, f64::max);
        let vote = |l: &f64| if *l > most * 0.33 { l.powi(4) } else { 0.0 };
        let votes: Vec<f64> = alike.iter().map(vote).collect();
        let all: f64 = votes.iter().sum();
        let mut sums = vec![0.0; 70];
        for (t, vote) in votes.iter().enumerate().filter(|(_, v)| **v > 0.0) {
            let chose: &[usize] = match whose {
                Whose::This => &past[t][layer],
                Whose::Next => past.get(t + 1).map_or(&now[layer], |next| &next[layer]),
            };
            chose.iter().for_each(|e| sums[*e] += vote / all * 4.0);
        }
        sums
    }

    fn token() -> impl Strategy<Value = Token> {
        let experts = proptest::collection::btree_set(0..70usize, 8);
        proptest::collection::vec(experts.prop_map(|s| s.into_iter().collect()), 3)
    }

    fn tell(echo: &mut Echo, token: &[Vec<usize>]) {
        echo.token();
        for (layer, chosen) in token.iter().enumerate() {
            echo.chose(layer, chosen.iter().copied());
        }
    }

    proptest! {
        #[test]
        fn votes_are_those_of_the_plain_history(
            few in proptest::collection::vec(token(), 1..6),
            turns in proptest::collection::vec(0..6usize, 1..300),
        ) {
            let past: Vec<Token> = turns.iter().map(|t| few[t % few.len()].clone()).collect();
            let now = &few[0][..2];
            let mut echo = Echo::new(3, 70);
            past.iter().for_each(|t| tell(&mut echo, t));
            tell(&mut echo, now);
            for (layer, whose) in [(2, Whose::This), (0, Whose::Next), (1, Whose::Next)] {
                let mut got = vec![0.0; 70];
                echo.expect(layer, whose, &mut got);
                let want = expected(&past, now, layer, whose);
                for (e, (got, want)) in got.iter().zip(want).enumerate() {
                    prop_assert!((f64::from(*got) - want).abs() < 1e-3, "{e}: {got}, not {want}");
                }
            }
        }
    }

    #[test]
    fn nobody_votes_before_there_is_a_past_and_none_is_no_number() {
        let mut echo = Echo::new(2, 70);
        let mut votes = vec![1.0; 70];
        tell(&mut echo, &[vec![1], vec![2]]);
        assert!(!echo.expect(1, Whose::Next, &mut votes));
        assert_eq!(votes, [0.0; 70]);
        // Nothing alike.
        tell(&mut echo, &[vec![3], vec![4]]);
        assert!(!echo.expect(1, Whose::This, &mut votes));
        assert_eq!(votes, [0.0; 70]);
    }
}
