//! How fast the device is, and how much may be read ahead because of it.
//!
//! A read that was handed to the kernel cannot be taken back, so a demand read
//! waits for the prefetches that went before it. How long depends on the
//! device, which becomes slower at times (heat, other load): prefetches in
//! flight are therefore limited to the bytes that it reads in [`AHEAD`], by
//! what it showed last. Demand has no such limit: it waits for nothing but
//! other demand, and all of that is needed.
//!
//! Pure: the clock is the caller's.

use std::time::{Duration, Instant};

use super::{Busy, ReadClass, ALIGN};

/// Time that the prefetches in flight may take, seconds: about as long as a
/// layer computes.
const AHEAD: f64 = 2e-3;
/// Prefetch in flight that any device may have, bytes.
const LEAST: usize = 256 << 10;
/// Prefetches that share the limit, so that it is kept while one ends and the
/// next begins.
const SHARES: usize = 4;
/// Bytes after which an earlier bandwidth counts for a third.
const MEMORY: f64 = 32e6;
/// Where reading does not pause, it is looked at this often.
const LOOK: Duration = Duration::from_millis(20);

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    /// Bytes a second while busy.
    bandwidth: f64,
    in_flight: usize,
    /// Of those, what arithmetic wants.
    demanded: usize,
    /// Of prefetches in flight, bytes.
    prefetching: usize,
    stretch: Stretch,
    busy: Busy,
}

/// A time in which something was in flight.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    began: Option<Instant>,
    bytes: u64,
    /// Arithmetic wanted some of it: the device had all it can do at once.
    demand: bool,
}

const NONE: Stretch = Stretch { began: None, bytes: 0, demand: false };

impl Pace {
    /// `bandwidth` counts until there is a measured one, bytes a second.
    pub fn new(bandwidth: u64) -> Pace {
        Pace {
            bandwidth: bandwidth as f64,
            in_flight: 0,
            demanded: 0,
            prefetching: 0,
            stretch: NONE,
            busy: Busy::default(),
        }
    }

    /// A better idea of the bandwidth than the device has shown so far.
    pub fn expect(&mut self, bandwidth: u64) {
        if self.busy.bytes == 0 {
            self.bandwidth = bandwidth as f64;
        }
    }

    /// How many bytes the next prefetch may have; 0: not now.
    pub fn prefetch_room(&self, chunk: usize) -> usize {
        let limit = ((self.bandwidth * AHEAD) as usize).max(LEAST);
        let share = (limit / SHARES / ALIGN * ALIGN).clamp(ALIGN, chunk);
        match self.prefetching + share <= limit {
            true => share,
            false => 0,
        }
    }

    /// A chunk goes to the kernel.
    pub fn handed(&mut self, now: Instant, len: usize, class: ReadClass) {
        if self.in_flight == 0 {
            self.stretch = Stretch { began: Some(now), ..NONE };
        }
        self.in_flight += 1;
        match class {
            ReadClass::Demand => {
                self.demanded += 1;
                self.stretch.demand = true;
            }
            ReadClass::Prefetch => self.prefetching += len,
        }
    }

    /// It is back, with `got` bytes. `seen`: it came just now, not some time
    /// since the kernel was asked last; what ends unseen measures nothing.
    pub fn back(&mut self, now: Instant, len: usize, got: usize, class: ReadClass, seen: bool) {
        self.in_flight -= 1;
        match class {
            ReadClass::Demand => self.demanded -= 1,
            ReadClass::Prefetch => self.prefetching -= len,
        }
        self.stretch.bytes += got as u64;
        let Some(began) = self.stretch.began else { return };
        let took = now.saturating_duration_since(began);
        if seen && (self.in_flight == 0 || took >= LOOK) {
            self.learn(took);
            let began = (self.in_flight > 0).then_some(now);
            self.stretch = Stretch { began, bytes: 0, demand: self.demanded > 0 };
        } else if self.in_flight == 0 {
            self.stretch = NONE;
        }
    }

    /// Bytes and time of all stretches that were seen to end.
    pub fn busy(&self) -> Busy {
        self.busy
    }

    fn learn(&mut self, took: Duration) {
        let Stretch { bytes, demand, .. } = self.stretch;
        if bytes == 0 || took.is_zero() {
            return;
        }
        self.busy.bytes += bytes;
        self.busy.nanoseconds += took.as_nanos() as u64;
        let rate = bytes as f64 / took.as_secs_f64();
        // Prefetches alone are few in flight by our own doing: a device that
        // is faster than thought shows, a slower one does not.
        if demand || rate > self.bandwidth {
            let weight = 1.0 - (-(bytes as f64) / MEMORY).exp();
            self.bandwidth += weight * (rate - self.bandwidth);
        }
    }
}

#[cfg(test)]
mod tests;
