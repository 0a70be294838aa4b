//! Where a token's time goes, and what the machine would allow.
//!
//! A token cannot take less than its arithmetic, nor less than its missing
//! bytes take from the disk; the two can overlap. So the limit is the larger of
//! both, and the efficiency is the limit divided by the time that was measured.

use std::collections::BTreeMap;

use pinscope::timeline::Activity;
use serde::Serialize;

use super::figures::median;
use crate::launch::{CacheUse, Phase};
use crate::style;

/// Figures of a token, or of a token of the prompt; times in milliseconds.
#[derive(Debug, Clone, Serialize)]
pub struct Efficiency {
    /// Time of each [`Activity`] by its name.
    pub split_ms: BTreeMap<&'static str, f64>,
    pub measured_ms: f64,
    /// What was computed, without waiting and keeping books.
    pub arithmetic_ms: f64,
    /// What the disk needs for the experts that were missing and needed.
    pub disk_ms: Option<f64>,
    /// The larger of both by the measured time, 0 to 1.
    pub efficiency: Option<f64>,
    pub needed_bytes: f64,
    /// Bytes a second.
    pub disk_rate: Option<f64>,
    /// Of the chosen experts, those that had been predicted.
    pub recall: Option<f64>,
    /// Of the chosen experts that were not in RAM, those that had been predicted.
    pub recall_on_misses: Option<f64>,
    /// Of the predicted experts that were not in RAM, those that were chosen.
    pub precision_on_misses: Option<f64>,
}

impl Efficiency {
    /// Of what happened in `phase`.
    pub fn of(cache: &CacheUse, phase: Phase, disk_rate: Option<f64>) -> Self {
        let tokens = phase.tokens.max(1) as f64;
        let measured_ms = phase.seconds * 1e3 / tokens;
        // The program's own time between two tokens is "rest" for the engine
        // and no part of the phase.
        let all: f64 = Activity::ALL.iter().map(|&a| cache.ms(a)).sum::<f64>() / tokens;
        let between = (all - measured_ms).max(0.0);
        let ms = |a: Activity| {
            let ms = cache.ms(a) / tokens;
            if a == Activity::Rest {
                (ms - between).max(0.0)
            } else {
                ms
            }
        };
        let arithmetic_ms = ms(Activity::Rest) + ms(Activity::Experts);
        let needed_bytes = cache.bytes_needed as f64 / tokens;
        // The disk can do at least what it did.
        let did = cache.bytes_read as f64 / phase.seconds.max(1e-9);
        let disk_rate = disk_rate.map(|rate| rate.max(did));
        let disk_ms = disk_rate.map(|rate| needed_bytes / rate * 1e3);
        Self {
            split_ms: Activity::ALL.map(|a| (a.name(), ms(a))).into(),
            measured_ms,
            arithmetic_ms,
            disk_ms,
            efficiency: disk_ms.map(|disk| disk.max(arithmetic_ms) / measured_ms),
            needed_bytes,
            disk_rate,
            recall: cache.recall,
            recall_on_misses: cache.recall_on_misses,
            precision_on_misses: cache.precision_on_misses,
        }
    }

    /// Each figure's median; `None` without runs.
    pub fn median<'a>(runs: impl Iterator<Item = &'a Efficiency> + Clone) -> Option<Efficiency> {
        let of = |get: &dyn Fn(&Efficiency) -> f64| median(runs.clone().map(get).collect());
        let maybe = |get: &dyn Fn(&Efficiency) -> Option<f64>| {
            let known: Vec<f64> = runs.clone().filter_map(get).collect();
            (!known.is_empty()).then(|| median(known))
        };
        runs.clone().next()?;
        let split = |a: Activity| of(&|e| e.split_ms.get(a.name()).copied().unwrap_or(0.0));
        Some(Efficiency {
            split_ms: Activity::ALL.map(|a| (a.name(), split(a))).into(),
            measured_ms: of(&|e| e.measured_ms),
            arithmetic_ms: of(&|e| e.arithmetic_ms),
            disk_ms: maybe(&|e| e.disk_ms),
            efficiency: maybe(&|e| e.efficiency),
            needed_bytes: of(&|e| e.needed_bytes),
            disk_rate: maybe(&|e| e.disk_rate),
            recall: maybe(&|e| e.recall),
            recall_on_misses: maybe(&|e| e.recall_on_misses),
            precision_on_misses: maybe(&|e| e.precision_on_misses),
        })
    }
}

/// A table with a row for each of `rows`, which have a name.
pub fn table(rows: &[(String, &Efficiency)]) -> comfy_table::Table {
    let mut table = style::table();
    let mut header = vec![String::new(), "ms a token".into()];
    header.extend(Activity::ALL.map(|a| a.name().to_owned()));
    header.extend(
        ["disk ms", "disk MB/s", "efficiency", "recall", "on misses", "precision"]
            .map(String::from),
    );
    table.set_header(header);
    for (name, e) in rows {
        let maybe = |value: Option<f64>, scale: f64, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |v| format!("{:.digits$}", v * scale))
        };
        let mut row = vec![name.clone(), format!("{:.1}", e.measured_ms)];
        let split = |a: Activity| e.split_ms.get(a.name()).copied().unwrap_or(0.0);
        row.extend(Activity::ALL.map(|a| format!("{:.1}", split(a))));
        row.extend([
            maybe(e.disk_ms, 1.0, 1),
            maybe(e.disk_rate, 1e-6, 0),
            maybe(e.efficiency, 1.0, 2),
            maybe(e.recall, 1.0, 2),
            maybe(e.recall_on_misses, 1.0, 2),
            maybe(e.precision_on_misses, 1.0, 2),
        ]);
        table.add_row(row);
    }
    style::numbers_right(&mut table);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_the_larger_of_arithmetic_and_disk() {
        // Ten tokens of 20 ms: 8 experts, 4 rest (and 1 between tokens), 8 waiting.
        let mut cache = CacheUse { bytes_needed: 10 * 15_000_000, ..CacheUse::default() };
        for (at, activity) in Activity::ALL.iter().enumerate() {
            cache.split_ns[at] = 10_000_000
                * match activity {
                    Activity::Rest => 5,
                    Activity::Experts | Activity::Wait => 8,
                    _ => 0,
                };
        }
        let phase = Phase { tokens: 10, seconds: 0.2 };
        let slow = Efficiency::of(&cache, phase, Some(1e9));
        assert_eq!((slow.arithmetic_ms, slow.disk_ms), (12.0, Some(15.0)));
        assert_eq!(slow.efficiency, Some(0.75));
        let fast = Efficiency::of(&cache, phase, Some(3e9));
        assert_eq!((fast.disk_ms, fast.efficiency), (Some(5.0), Some(0.6)));
        assert_eq!(Efficiency::of(&cache, phase, None).efficiency, None);
        // A disk that was measured in a bad moment did more than that.
        cache.bytes_read = 200_000_000;
        assert_eq!(Efficiency::of(&cache, phase, Some(0.5e9)).efficiency, Some(0.75));
    }
}
