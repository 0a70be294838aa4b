//! Whether a predicted expert is worth reading before it is asked for.
//!
//! A read that nobody asked for yet is only free while the disk has nothing
//! else to do; on a busy disk it delays the reads that arithmetic waits for
//! (other engines lost 20 to 30 % that way). So a prefetch is admitted only
//! into the time in which the disk would idle until the next layer asks. Where
//! arithmetic is the longer part, that is the time of a layer less what the
//! reads on their way need. Where the disk is, it is the time from the last
//! read's landing to the next layer's demand, in which attention is computed;
//! prefetches are held back until that read has landed.
//! All of it is measured as the run goes. The queue puts prefetches behind
//! demand, and what the disk has not begun when the next layer asks is taken
//! back. A predictor that is mostly wrong is not listened to, and one that does
//! not pay is switched off (see [`super::worth`]). A prompt needs
//! most of the next layer's experts, and has the time to read them: there all
//! that is predicted is read, in the order of the file.

use std::time::{Duration, Instant};

use super::{Demand, Residency, ResidencyError, State};
use crate::policy::ExpertId;
use crate::reader::{Busy, ReadClass};
use crate::timeline::Activity;

/// How much a new measurement counts against the mean so far.
const FRESH: f64 = 0.05;
/// Bytes that a measurement of the disk takes, so that it is one.
const MEASURED: u64 = 4 << 20;
/// Share of prefetched experts that must be used for prefetching to go on.
const MIN_PRECISION: f64 = 0.3;
/// Below [`MIN_PRECISION`], one prefetch in this many layers still goes out:
/// else a change for the better would not be seen.
const PROBE_EVERY: u32 = 64;

/// Measures layers, disk and predictor, and admits prefetches.
#[derive(Debug)]
pub(super) struct Admission {
    /// Bytes a second of the disk while it is busy.
    bandwidth: f64,
    /// What it had done when that was last measured.
    disk: Busy,
    /// Seconds from one layer to the next without waiting.
    layer_seconds: f64,
    /// Of these, seconds from the end of a layer's experts on.
    rest_seconds: f64,
    /// Seconds that one expert is computed.
    expert_seconds: f64,
    /// Share of prefetched experts that the next layer used.
    precision: f64,
    last_layer: Option<Instant>,
    last_end: Option<Instant>,
    waited: Duration,
    since_probe: u32,
}

impl Admission {
    pub fn new() -> Self {
        Self {
            // A slow SSD and a small model: little is admitted until the
            // truth is known, after some tens of layers.
            bandwidth: 0.5e9,
            disk: Busy::default(),
            layer_seconds: 0.5e-3,
            rest_seconds: 0.1e-3,
            expert_seconds: 0.05e-3,
            precision: 0.6,
            last_layer: None,
            last_end: None,
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
        if let Some(end) = self.last_end.take() {
            let rest = now.duration_since(end).as_secs_f64();
            if rest < 1.0 {
                self.rest_seconds += FRESH * (rest - self.rest_seconds);
            }
        }
        self.waited = Duration::ZERO;
    }

    /// The experts of a layer, so many, are computed at `now`; that took
    /// `computed` without waiting.
    pub fn layer_ends(&mut self, now: Instant, experts: usize, computed: Duration) {
        self.last_end = Some(now);
        if experts > 0 {
            let each = computed.as_secs_f64() / experts as f64;
            self.expert_seconds += FRESH * (each - self.expert_seconds);
        }
    }

    /// Whether arithmetic will wait for the `on_the_way` bytes that it asked
    /// for, with `ready` experts to compute until then.
    pub fn will_wait(&self, on_the_way: u64, ready: usize) -> bool {
        on_the_way as f64 / self.bandwidth > ready as f64 * self.expert_seconds
    }

    /// Arithmetic waited so long.
    pub fn waited(&mut self, waited: Duration) {
        self.waited += waited;
    }

    /// Takes note of what the disk has done since the start.
    pub fn disk(&mut self, busy: Busy) {
        let since = busy.since(&self.disk);
        if let Some(rate) = since.bandwidth().filter(|_| since.bytes >= MEASURED) {
            self.bandwidth += FRESH * (rate - self.bandwidth);
            self.disk = busy;
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
        (idle.max(self.rest_seconds) * self.bandwidth) as u64
    }
}

impl Residency {
    /// Whether it is worth while to [`predict`](Self::predict) what `layer`,
    /// the next one, needs: some of its experts are not in RAM, and what is
    /// predicted is put to use.
    pub fn wants_prediction(&self, layer: usize) -> bool {
        let pays = !self.pass.decode || self.worth.predicts();
        self.prefetch && pays && self.lacks_some(layer)
    }

    /// A token ends: what did it cost that its predictions could change?
    pub(super) fn judge_worth(&mut self) {
        let [_, split] = self.clock.splits();
        let spent = [Activity::Wait, Activity::Predict, Activity::Evict, Activity::Submit];
        let spent = spent.map(|a| split.ns(a)).iter().sum();
        let missed = self.stats.decode.bytes_needed;
        self.worth.token(spent - self.spent.0, missed - self.spent.1);
        self.spent = (spent, missed);
    }

    fn lacks_some(&self, layer: usize) -> bool {
        let first = self.id(layer, 0).0 as usize;
        let experts = self.map.layers()[layer].experts as usize;
        self.state[first..first + experts].contains(&State::Absent)
    }

    /// Tells which experts of `layer`, the one after the open pass's, will
    /// probably be needed, the first one to read first. They are kept if they are
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
        // Two reads at a time share the disk: where arithmetic will wait for
        // what it asked for, what nobody asked for yet begins after that.
        let (decode, ready) = (self.pass.decode, self.pass.ready());
        let hold = decode
            && self.pass.loading > 0
            && self.admission.will_wait(self.on_the_way + waiting, ready);
        let mut budget = match decode {
            _ if !roomy => 0,
            true => self.admission.budget(self.on_the_way + waiting),
            // A prompt computes long on what it reads: the queue sees to it
            // that the layer at hand is read first, and that is all it needs.
            false => u64::MAX,
        };
        for &expert in ranked {
            let id = self.id(layer, expert);
            let mut fate = Fate::Known;
            self.is_expected[id.0 as usize] = true;
            if self.state[id.0 as usize] == State::Absent {
                fate = Fate::Missing;
                // Half an expert in time is worth it: the rest is on its way then.
                if budget.saturating_mul(2) >= bytes {
                    budget = budget.saturating_sub(bytes);
                    fate = Fate::Held;
                }
            }
            self.expected.push((id, fate));
        }
        match hold {
            true => Ok(()),
            false => self.release_held(),
        }
    }

    /// Reads the predicted experts that were held back until now.
    pub(super) fn release_held(&mut self) -> Result<(), ResidencyError> {
        let mut any = false;
        for at in 0..self.expected.len() {
            let (id, Fate::Held) = self.expected[at] else { continue };
            let per_layer = self.map.experts_per_layer();
            let (layer, expert) = ((id.0 / per_layer) as usize, id.0 % per_layer);
            self.expected[at].1 = Fate::Missing;
            if let Some(slot) = self.slot_for(layer, expert) {
                self.load(layer, expert, slot, ReadClass::Prefetch)?;
                self.expected[at].1 = Fate::Prefetched;
                any = true;
            }
        }
        if any {
            self.kick();
        }
        Ok(())
    }

    /// Compares what was predicted for `layer` with what it asks for.
    pub(super) fn judge_predictions(&mut self, layer: usize, demand: &[Demand]) {
        if self.expected.is_empty() {
            return;
        }
        let bytes = self.map.layers()[layer].expert_bytes();
        let absent = |r: &Self, id: ExpertId| {
            matches!(r.state[id.0 as usize], State::Absent | State::Loading { .. })
        };
        let mut seen = self.counters().prediction;
        seen.chosen += demand.len() as u64;
        let missed = demand.iter().filter(|d| absent(self, self.id(layer, d.expert))).count();
        seen.missing_chosen += missed as u64;
        let mut needed = 0;
        for at in 0..self.expected.len() {
            let (id, fate) = self.expected[at];
            self.is_expected[id.0 as usize] = false;
            let used = demand.iter().any(|d| self.id(layer, d.expert) == id);
            seen.chosen_right += u64::from(used);
            if fate != Fate::Known {
                seen.missing += 1;
                seen.missing_right += u64::from(used);
            }
            if fate == Fate::Prefetched {
                if self.pass.decode {
                    self.admission.judged(used);
                }
                seen.prefetched += 1;
                seen.prefetch_used += u64::from(used);
                if used && !absent(self, id) {
                    // It landed in time, and counts as a hit.
                    seen.missing_chosen += 1;
                    needed += bytes;
                }
            }
        }
        self.expected.clear();
        self.counters().prediction = seen;
        self.counters().bytes_needed += needed;
    }
}

/// What became of a predicted expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// In RAM or being read already.
    Known,
    /// Not in RAM, and left there.
    Missing,
    /// Not in RAM, to be read when the disk has time.
    Held,
    /// Not in RAM, and read.
    Prefetched,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk of 1 GB/s and layers of 2 ms, of which `rest` are not experts.
    fn measured_with(rest: Duration) -> Admission {
        let mut a = Admission::new();
        let start = Instant::now();
        for i in 0..500u32 {
            let ms = Duration::from_millis;
            a.layer_begins(start + i * ms(3));
            a.waited(ms(1));
            let n = u64::from(i + 1);
            a.disk(Busy { bytes: n * 5_000_000, nanoseconds: n * 5_000_000 });
            a.layer_ends(start + (i + 1) * ms(3) - rest, 4, ms(1));
        }
        a
    }

    fn measured() -> Admission {
        measured_with(Duration::ZERO)
    }

    #[test]
    fn the_budget_is_the_idle_time_of_the_disk() {
        let mut a = measured();
        let near = |got: u64, want: f64| (got as f64 - want).abs() < 0.02e6;
        assert!(near(a.budget(0), 2e6));
        assert!(near(a.budget(500_000), 1.5e6));
    }

    #[test]
    fn a_busy_disk_has_the_time_of_attention_and_no_more() {
        assert!(measured().budget(2_100_000) < 100);
        let got = measured_with(Duration::from_micros(500)).budget(2_100_000);
        assert!((got as f64 - 0.5e6).abs() < 1e3, "{got}");
    }

    #[test]
    fn arithmetic_waits_when_what_it_asked_for_takes_longer_than_what_is_ready() {
        // Experts of 0.25 ms and 250 kB.
        assert!(measured().will_wait(1_100_000, 4));
        assert!(!measured().will_wait(900_000, 4));
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
