//! Whether a predicted expert is worth reading before it is asked for.
//!
//! A read that nobody asked for yet is only free while the disk has nothing
//! else to do; on a busy disk it delays the reads that arithmetic waits for
//! (other engines lost 20 to 30 % that way). So a prefetch is admitted only
//! into the time in which the disk would idle until the next layer asks: the
//! time of a layer without waiting, less what the reads on their way need.
//! Both are measured as the run goes. A predictor that is mostly wrong is not
//! listened to.

use std::time::{Duration, Instant};

use super::{Demand, Residency, ResidencyError, State};
use crate::reader::ReadClass;

/// How much a new measurement counts against the mean so far.
const FRESH: f64 = 0.05;
/// Share of prefetched experts that must be used for prefetching to go on.
const MIN_PRECISION: f64 = 0.3;
/// Below [`MIN_PRECISION`], one prefetch in this many layers still goes out:
/// else a change for the better would not be seen.
const PROBE_EVERY: u32 = 64;

/// Measures layers, disk and predictor, and admits prefetches.
#[derive(Debug)]
pub(super) struct Admission {
    /// Bytes a second of reads that arithmetic waited for.
    bandwidth: f64,
    /// Seconds from one layer to the next without waiting.
    layer_seconds: f64,
    /// Share of prefetched experts that the next layer used.
    precision: f64,
    last_layer: Option<Instant>,
    waited: Duration,
    since_probe: u32,
}

impl Admission {
    pub fn new() -> Self {
        Self {
            // A slow SSD and a small model: little is admitted until the
            // truth is known, after some tens of layers.
            bandwidth: 0.5e9,
            layer_seconds: 0.5e-3,
            precision: 0.6,
            last_layer: None,
            waited: Duration::ZERO,
            since_probe: 0,
        }
    }

    /// A layer of a token begins at `now`.
    pub fn layer_begins(&mut self, now: Instant) {
        if let Some(last) = self.last_layer.replace(now) {
            let busy = now.duration_since(last).saturating_sub(self.waited).as_secs_f64();
            // The user's thinking time between two answers is no layer.
            if busy < 1.0 {
                self.layer_seconds += FRESH * (busy - self.layer_seconds);
            }
        }
        self.waited = Duration::ZERO;
    }

    /// Arithmetic waited until `bytes`, all that was on its way, had landed
    /// `took` after it was asked for.
    pub fn waited(&mut self, waited: Duration, bytes: u64, took: Duration) {
        self.waited += waited;
        let seconds = took.as_secs_f64();
        if bytes > 0 && seconds > 0.0 {
            self.bandwidth += FRESH * (bytes as f64 / seconds - self.bandwidth);
        }
    }

    /// A prefetched expert's layer came, and the router chose it or not.
    pub fn judged(&mut self, used: bool) {
        self.precision += FRESH * (f64::from(u8::from(used)) - self.precision);
    }

    /// How many bytes more may be read before the next layer, with `on_the_way`
    /// still to land.
    pub fn budget(&mut self, on_the_way: u64) -> u64 {
        if self.precision < MIN_PRECISION {
            self.since_probe += 1;
            if self.since_probe < PROBE_EVERY {
                return 0;
            }
            self.since_probe = 0;
        }
        let idle = self.layer_seconds - on_the_way as f64 / self.bandwidth;
        (idle.max(0.0) * self.bandwidth) as u64
    }
}

impl Residency {
    /// Whether any expert of `layer` is not in RAM: else predictions are idle.
    pub fn lacks_some(&self, layer: usize) -> bool {
        let first = self.id(layer, 0).0 as usize;
        let experts = self.map.layers()[layer].experts as usize;
        self.state[first..first + experts].contains(&State::Absent)
    }

    /// Tells which experts of `layer`, the one after the open pass's, will
    /// probably be needed, the most probable first. They are kept if they are
    /// in RAM, and read if that costs the open pass nothing.
    ///
    /// # Errors
    /// When the system refuses a read.
    pub fn predict(&mut self, layer: usize, ranked: &[u32]) -> Result<(), ResidencyError> {
        let class = self.layout.class_of_layer[layer];
        let bytes = self.map.layers()[layer].expert_bytes();
        // A few experts more than the layers in question need, or prefetches
        // would only chase each other out.
        let roomy = self.layout.classes[class].slots as usize > 4 * ranked.len();
        let waiting = self.pass.waiting.len() as u64 * bytes;
        let mut budget = self.admission.budget(self.on_the_way + waiting);
        for &expert in ranked {
            let id = self.id(layer, expert);
            let mut prefetched = false;
            self.is_expected[id.0 as usize] = true;
            // Half an expert in time is worth it: the rest is on its way then.
            if self.state[id.0 as usize] == State::Absent && roomy && budget * 2 >= bytes {
                if let Some(slot) = self.slot_for(layer, expert) {
                    self.load(layer, expert, slot, ReadClass::Prefetch)?;
                    self.counters().prefetched += 1;
                    budget = budget.saturating_sub(bytes);
                    prefetched = true;
                }
            }
            self.expected.push((id, prefetched));
        }
        self.reader.kick();
        Ok(())
    }

    /// Compares what was predicted for `layer` with what it asks for.
    pub(super) fn judge_predictions(&mut self, layer: usize, demand: &[Demand]) {
        for (id, prefetched) in std::mem::take(&mut self.expected) {
            self.is_expected[id.0 as usize] = false;
            let used = demand.iter().any(|d| self.id(layer, d.expert) == id);
            if prefetched {
                self.admission.judged(used);
                self.counters().prefetch_used += u64::from(used);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk of 1 GB/s and layers of 2 ms.
    fn measured() -> Admission {
        let mut a = Admission::new();
        let start = Instant::now();
        for i in 0..500u32 {
            a.layer_begins(start + i * Duration::from_millis(3));
            let ms = Duration::from_millis;
            a.waited(ms(1), 1_000_000, ms(1));
        }
        a
    }

    #[test]
    fn the_budget_is_the_idle_time_of_the_disk() {
        let mut a = measured();
        let near = |got: u64, want: f64| (got as f64 - want).abs() < 0.02e6;
        assert!(near(a.budget(0), 2e6));
        assert!(near(a.budget(500_000), 1.5e6));
    }

    #[test]
    fn a_busy_disk_leaves_no_budget() {
        assert_eq!(measured().budget(2_100_000), 0);
    }

    #[test]
    fn a_wrong_predictor_is_only_probed() {
        let mut a = measured();
        (0..100).for_each(|_| a.judged(false));
        let admitted = (0..640).filter(|_| a.budget(0) > 0).count();
        assert_eq!(admitted, 10);
        (0..100).for_each(|_| a.judged(true));
        assert!(a.budget(0) > 0);
    }

    #[test]
    fn a_pause_between_answers_is_no_layer() {
        let mut a = measured();
        let before = a.layer_seconds;
        a.layer_begins(a.last_layer.unwrap() + Duration::from_secs(60));
        assert_eq!(a.layer_seconds, before);
    }
}
