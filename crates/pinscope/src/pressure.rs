//! Whether other programs need the memory that experts have.
//!
//! The kernel's own word is pressure stall information (PSI): the share of time
//! in which somebody waited for memory. Where it has none, what is available
//! must do. Somebody may also wait because of a limit of their own (a cgroup):
//! PSI counts only when the machine as a whole is short too.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use crate::memory::Memory;

/// Below this share of the machine's memory, what is available is too little.
const LOW: f64 = 0.03;
/// Below this share, stalls are ours to relieve.
const SHORT: f64 = 0.10;
/// Share that should be available after memory was given back; above it, by
/// what is taken at once, memory is taken again.
const COMFORT: f64 = 0.08;
/// Stalls that matter, percent of the last ten seconds.
const STALLS: f64 = 10.0;
/// Calm that lasts so long is believed.
const CALM: Duration = Duration::from_secs(10);
/// Share of the machine's memory that is taken again at once.
const STEP: f64 = 0.02;

/// How the machine is doing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// The machine's memory, bytes.
    pub total: u64,
    /// What is free or can be freed, bytes.
    pub available: u64,
    /// Share of the last ten seconds in which some task waited for memory,
    /// percent; 0 on kernels that do not tell.
    pub stalls: f64,
}

impl Reading {
    /// What the kernel says now, of the whole machine.
    ///
    /// # Errors
    /// `/proc/meminfo` cannot be read.
    pub fn now() -> io::Result<Self> {
        let Memory { total, available } = Memory::of_machine()?;
        let psi = fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
        Ok(Self { total, available, stalls: some_avg10(&psi) })
    }
}

/// Share of the last ten seconds in which tasks waited, percent: of the line
/// `kind` ("some" or "full") of the kernel's pressure file.
pub fn avg10(psi: &str, kind: &str) -> Option<f64> {
    let line = psi.lines().find(|l| l.split_whitespace().next() == Some(kind))?;
    line.split_whitespace().find_map(|f| f.strip_prefix("avg10="))?.parse().ok()
}

/// The same for "some"; 0 where the kernel does not tell.
fn some_avg10(psi: &str) -> f64 {
    avg10(psi, "some").unwrap_or(0.0)
}

/// What to do with the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// As it is.
    Stay,
    /// Give so many bytes back.
    GiveBack(u64),
    /// Up to so many bytes may be taken again.
    TakeAgain(u64),
}

/// Watches readings over time.
#[derive(Debug, Default)]
pub struct Pressure {
    calm_since: Option<Instant>,
}

impl Pressure {
    /// Advice on the reading of `now`.
    pub fn judge(&mut self, reading: Reading, now: Instant) -> Advice {
        let part = |share: f64| (share * reading.total as f64) as u64;
        let Reading { available, stalls, .. } = reading;
        let short = available < part(LOW) || (available < part(SHORT) && stalls >= STALLS);
        if short {
            self.calm_since = None;
            return Advice::GiveBack(part(COMFORT).saturating_sub(available).max(part(LOW)));
        }
        if available < part(COMFORT + STEP) || stalls >= 1.0 {
            self.calm_since = None;
            return Advice::Stay;
        }
        if now.duration_since(*self.calm_since.get_or_insert(now)) < CALM {
            return Advice::Stay;
        }
        Advice::TakeAgain(part(STEP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn at(available: u64, stalls: f64) -> Reading {
        Reading { total: 100 * GB, available, stalls }
    }

    #[test]
    fn too_little_memory_is_brought_back_to_comfort() {
        let mut p = Pressure::default();
        assert_eq!(p.judge(at(2 * GB, 0.0), Instant::now()), Advice::GiveBack(6 * GB));
        // Stalls make it too little earlier, but not on a machine with plenty.
        assert_eq!(p.judge(at(7 * GB, 20.0), Instant::now()), Advice::GiveBack(3 * GB));
        assert_eq!(p.judge(at(7 * GB, 0.0), Instant::now()), Advice::Stay);
        assert_eq!(p.judge(at(50 * GB, 90.0), Instant::now()), Advice::Stay);
    }

    #[test]
    fn memory_is_taken_again_only_after_a_calm_that_lasts() {
        let mut p = Pressure::default();
        let start = Instant::now();
        let after = |s| start + Duration::from_secs(s);
        assert_eq!(p.judge(at(50 * GB, 0.0), start), Advice::Stay);
        assert_eq!(p.judge(at(50 * GB, 0.0), after(9)), Advice::Stay);
        assert_eq!(p.judge(at(50 * GB, 0.0), after(10)), Advice::TakeAgain(2 * GB));
        // Trouble in between starts the wait anew.
        assert_eq!(p.judge(at(50 * GB, 5.0), after(11)), Advice::Stay);
        assert_eq!(p.judge(at(50 * GB, 0.0), after(12)), Advice::Stay);
        assert_eq!(p.judge(at(50 * GB, 0.0), after(21)), Advice::Stay);
        assert_eq!(p.judge(at(50 * GB, 0.0), after(22)), Advice::TakeAgain(2 * GB));
    }

    #[test]
    fn what_is_taken_again_does_not_have_to_be_given_back() {
        let mut p = Pressure::default();
        let start = Instant::now();
        let mut available = 11 * GB;
        for s in 0..1000 {
            match p.judge(at(available, 0.0), start + Duration::from_secs(s)) {
                Advice::TakeAgain(n) => available -= n,
                Advice::GiveBack(_) => panic!("after {s} s with {available}"),
                Advice::Stay => {}
            }
        }
        assert!(available >= 8 * GB);
    }

    #[test]
    fn the_kernels_line_is_read_and_its_absence_is_calm() {
        let psi = "some avg10=12.34 avg60=0.00 avg300=0.00 total=1\nfull avg10=1.00 avg60=0 avg300=0 total=1\n";
        assert_eq!(some_avg10(psi), 12.34);
        assert_eq!(some_avg10(""), 0.0);
        assert!(Reading::now().unwrap().available > 0);
    }
}
