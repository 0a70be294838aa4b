//! A small seeded random number generator (SplitMix64, Steele et al. 2014),
//! for choices that must repeat from run to run.

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n` (> 0); the bias for small `n` does not matter here.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// True with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        ((self.next_u64() >> 11) as f64) < p * (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_the_published_sequence() {
        let mut rng = SplitMix64(1234567);
        let got: Vec<u64> = (0..3).map(|_| rng.next_u64()).collect();
        // Test vector of the reference implementation (Vigna, splitmix64.c).
        assert_eq!(got, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }
}
