//! Tokens a second to be expected, from what the machine was measured to do.
//!
//! A token takes as long as the longer of two things that PinScope lets overlap:
//! arithmetic, which is bound by reading weights from memory, and reading from
//! the disk what is not in memory.

use serde::Serialize;

/// Share of the measured memory bandwidth that ggml's kernels reach with few
/// cores: without repacking they are bound by instructions as much as by memory.
pub const EFFICIENCY: f64 = 0.5;

/// The exponent of the hit rate that is assumed without a profile: room for a
/// share `u` of the experts serves `u` to this power of the choices. In
/// published models the 8 most popular of 128 experts serve 0.35 to 0.42.
const CONCENTRATION: f64 = 0.35;

/// What a token needs of the model, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Demand {
    /// Dense weights that every token reads.
    pub dense: u64,
    /// Experts that a token uses.
    pub experts: u64,
}

/// What the machine gives, bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rates {
    /// Reading memory with all threads that compute.
    pub memory: f64,
    /// Reading the model as PinScope does.
    pub disk: f64,
}

/// What limits the speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    Arithmetic,
    Disk,
}

/// A prediction.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speed {
    pub tokens_per_second: f64,
    pub arithmetic_ms: f64,
    pub disk_ms: f64,
    pub bound: Bound,
}

/// Share of choices that room for a share `u` (0 to 1) of all experts serves,
/// for a model that nobody has profiled.
pub fn assumed_hit_rate(u: f64) -> f64 {
    u.clamp(0.0, 1.0).powf(CONCENTRATION)
}

/// The speed when a share `hit_rate` of choices is in memory.
pub fn speed(demand: Demand, rates: Rates, hit_rate: f64) -> Speed {
    let arithmetic = (demand.dense + demand.experts) as f64 / (rates.memory * EFFICIENCY);
    let disk = (1.0 - hit_rate) * demand.experts as f64 / rates.disk;
    Speed {
        tokens_per_second: 1.0 / arithmetic.max(disk),
        arithmetic_ms: 1e3 * arithmetic,
        disk_ms: 1e3 * disk,
        bound: if disk > arithmetic { Bound::Disk } else { Bound::Arithmetic },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand { dense: 700_000_000, experts: 1_000_000_000 };
    const RATES: Rates = Rates { memory: 34e9, disk: 1e9 };

    #[test]
    fn with_all_hits_memory_is_the_limit() {
        // 1.7 GB at half of 34 GB/s: 100 ms.
        let speed = speed(DEMAND, RATES, 1.0);
        assert!((speed.tokens_per_second - 10.0).abs() < 1e-9);
        assert_eq!((speed.disk_ms, speed.bound), (0.0, Bound::Arithmetic));
    }

    #[test]
    fn misses_that_take_longer_than_arithmetic_are_the_limit() {
        // A quarter of 1 GB at 1 GB/s: 250 ms.
        let speed = speed(DEMAND, RATES, 0.75);
        assert!((speed.tokens_per_second - 4.0).abs() < 1e-9);
        assert_eq!(speed.bound, Bound::Disk);
        assert!((speed.arithmetic_ms - 100.0).abs() < 1e-9);
    }

    #[test]
    fn the_assumed_hit_rate_is_that_of_published_models() {
        let popular = assumed_hit_rate(8.0 / 128.0);
        assert!((0.35..=0.42).contains(&popular), "{popular}");
        assert_eq!((assumed_hit_rate(0.0), assumed_hit_rate(1.0)), (0.0, 1.0));
    }
}
