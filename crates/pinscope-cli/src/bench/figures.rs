//! What one run showed, and medians over several.

use pinscope::timeline::Activity;
use serde::Serialize;

use super::efficiency::Efficiency;
use super::Entry;
use crate::launch::{Outcome, Window};

/// Figures of one run, or the medians of several.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    pub contender: &'static str,
    /// Bytes; `null` for contenders without a limit.
    pub ram: Option<u64>,
    pub prefill_tokens_per_second: f64,
    /// Decode.
    pub tokens_per_second: f64,
    pub ms_per_token: f64,
    pub decoded_tokens: usize,
    /// Decoding ended at `--mmap-seconds`.
    pub capped: bool,
    pub hit_rate: Option<f64>,
    pub bytes_per_token: Option<f64>,
    pub wait_ms_per_token: Option<f64>,
    /// Where a token's time went, and how near that is to what the machine
    /// can do.
    pub efficiency: Option<Efficiency>,
    /// The same for the prompt.
    pub prefill_efficiency: Option<Efficiency>,
    /// Of the needed experts, those that were found pinned.
    pub pinned_hit_rate: Option<f64>,
    /// Times that pins moved.
    pub repins: u64,
    /// Hits and misses as decoding went on.
    pub windows: Vec<Window>,
    pub load_seconds: f64,
    pub peak_bytes: u64,
    /// Why the kernel neither limited nor counted this run's page cache.
    pub no_cgroup: Option<String>,
    pub sha256_logits: Option<String>,
}

impl Figures {
    pub fn of(entry: Entry, outcome: &Outcome) -> Figures {
        let report = &outcome.report;
        let tokens = report.decode.tokens.max(1) as f64;
        Figures {
            contender: entry.contender.name(),
            ram: entry.ram,
            prefill_tokens_per_second: report.prefill.rate(),
            tokens_per_second: report.decode.rate(),
            ms_per_token: report.decode.seconds * 1e3 / tokens,
            decoded_tokens: report.decode.tokens,
            capped: report.capped,
            hit_rate: report.cache.map(|c| c.hit_rate()),
            bytes_per_token: report.cache.map(|c| c.bytes_read as f64 / tokens),
            wait_ms_per_token: report.cache.map(|c| c.ms(Activity::Wait) / tokens),
            efficiency: report.cache.map(|c| Efficiency::of(&c, report.decode, report.disk_rate)),
            prefill_efficiency: report
                .prompt_cache
                .map(|c| Efficiency::of(&c, report.prefill, report.disk_rate)),
            pinned_hit_rate: pinned_hit_rate(&report.windows),
            repins: report.repins,
            windows: report.windows.clone(),
            load_seconds: report.load_seconds,
            peak_bytes: outcome.peak_bytes,
            no_cgroup: outcome.no_cgroup.clone(),
            sha256_logits: report.sha256_logits.clone(),
        }
    }

    pub fn is_of(&self, entry: Entry) -> bool {
        self.contender == entry.contender.name() && self.ram == entry.ram
    }

    /// Each figure's median over `runs` of one entry; `None` without runs.
    pub fn median(runs: &[Figures]) -> Option<Figures> {
        let first = runs.first()?;
        let of = |get: &dyn Fn(&Figures) -> f64| median(runs.iter().map(get).collect());
        let maybe = |get: &dyn Fn(&Figures) -> Option<f64>| {
            let known: Vec<f64> = runs.iter().filter_map(get).collect();
            (!known.is_empty()).then(|| median(known))
        };
        Some(Figures {
            prefill_tokens_per_second: of(&|f| f.prefill_tokens_per_second),
            tokens_per_second: of(&|f| f.tokens_per_second),
            ms_per_token: of(&|f| f.ms_per_token),
            decoded_tokens: of(&|f| f.decoded_tokens as f64) as usize,
            capped: runs.iter().any(|f| f.capped),
            hit_rate: maybe(&|f| f.hit_rate),
            bytes_per_token: maybe(&|f| f.bytes_per_token),
            wait_ms_per_token: maybe(&|f| f.wait_ms_per_token),
            efficiency: Efficiency::median(runs.iter().filter_map(|f| f.efficiency.as_ref())),
            prefill_efficiency: Efficiency::median(
                runs.iter().filter_map(|f| f.prefill_efficiency.as_ref()),
            ),
            pinned_hit_rate: maybe(&|f| f.pinned_hit_rate),
            load_seconds: of(&|f| f.load_seconds),
            peak_bytes: of(&|f| f.peak_bytes as f64) as u64,
            ..first.clone()
        })
    }
}

/// `None` when nothing was pinned.
fn pinned_hit_rate(windows: &[Window]) -> Option<f64> {
    let pinned: u64 = windows.iter().map(|w| w.pinned_hits).sum();
    let all: u64 = windows.iter().map(|w| w.hits + w.misses).sum();
    (pinned > 0).then(|| pinned as f64 / all as f64)
}

/// The middle value; of an even number the mean of the two middle ones.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_taken_figure_by_figure() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        let run = |rate: f64, wait: Option<f64>| Figures {
            contender: "pinscope",
            ram: Some(1),
            prefill_tokens_per_second: 10.0 * rate,
            tokens_per_second: rate,
            ms_per_token: 1e3 / rate,
            decoded_tokens: 8,
            capped: false,
            hit_rate: Some(0.5),
            bytes_per_token: None,
            wait_ms_per_token: wait,
            efficiency: None,
            prefill_efficiency: None,
            pinned_hit_rate: None,
            repins: 0,
            windows: Vec::new(),
            load_seconds: 0.0,
            peak_bytes: 7,
            no_cgroup: None,
            sha256_logits: None,
        };
        let runs = [run(5.0, Some(1.0)), run(4.0, Some(9.0)), run(100.0, Some(2.0))];
        let m = Figures::median(&runs).unwrap();
        assert_eq!((m.tokens_per_second, m.ms_per_token), (5.0, 200.0));
        assert_eq!((m.wait_ms_per_token, m.bytes_per_token), (Some(2.0), None));
        assert!(Figures::median(&[]).is_none());
    }
}
