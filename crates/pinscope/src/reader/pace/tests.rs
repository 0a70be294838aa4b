//! The pace against devices that are simulated here.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::splitmix::SplitMix64;

const MIB: usize = 1 << 20;

/// A device that reads one chunk after the other.
struct Device {
    now: Instant,
    /// When the last one that it has is read.
    free: Instant,
    has: VecDeque<(Instant, usize, ReadClass)>,
    /// Bytes a second.
    rate: f64,
}

impl Device {
    fn new(rate: f64) -> Device {
        let now = Instant::now();
        Device { now, free: now, has: VecDeque::new(), rate }
    }

    fn take(&mut self, pace: &mut Pace, len: usize, class: ReadClass) {
        pace.handed(self.now, len, class);
        self.free = self.free.max(self.now) + Duration::from_secs_f64(len as f64 / self.rate);
        self.has.push_back((self.free, len, class));
    }

    /// Waits for the next chunk to be read.
    fn give(&mut self, pace: &mut Pace) -> bool {
        let Some((at, len, class)) = self.has.pop_front() else { return false };
        self.now = self.now.max(at);
        pace.back(self.now, len, len, class, true);
        true
    }

    /// A layer that asks for `chunks` and waits for all of them.
    fn demand(&mut self, pace: &mut Pace, chunks: usize) {
        for _ in 0..chunks {
            self.take(pace, MIB, ReadClass::Demand);
        }
        while self.give(pace) {}
    }

    /// As much prefetch as the pace admits now, and how long a demand read
    /// would wait for it.
    fn fill(&mut self, pace: &mut Pace) -> Duration {
        loop {
            match pace.prefetch_room(MIB) {
                0 => return self.free.saturating_duration_since(self.now),
                len => self.take(pace, len, ReadClass::Prefetch),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn demand_waits_for_two_milliseconds_of_prefetch_whatever_the_device_became(
        rates in prop::collection::vec(1.3e8..5e9f64, 1..5),
        chunks in 2usize..12,
    ) {
        let mut pace = Pace::new(1_000_000_000);
        let mut device = Device::new(1e9);
        for rate in rates {
            device.rate = rate;
            for _ in 0..300 / chunks {
                device.demand(&mut pace, chunks);
            }
            let waits = device.fill(&mut pace).as_secs_f64();
            prop_assert!((1e-3..2.1e-3).contains(&waits), "{} ms at {:e} B/s", waits * 1e3, rate);
            while device.give(&mut pace) {}
        }
    }

    #[test]
    fn busy_time_is_the_union_of_the_times_in_flight(seed: u64, steps in 1usize..200) {
        let mut rng = SplitMix64(seed);
        let mut pace = Pace::new(1_000_000_000);
        let mut now = Instant::now();
        let mut flying = 0u32;
        // Counted microsecond by microsecond instead of from end to end.
        let (mut bytes, mut nanoseconds) = (0u64, 0u64);
        for _ in 0..steps {
            for _ in 0..rng.below(200) {
                now += Duration::from_micros(1);
                nanoseconds += if flying > 0 { 1000 } else { 0 };
            }
            let class = ReadClass::Demand;
            if flying > 0 && rng.chance(0.6) {
                flying -= 1;
                bytes += 4096;
                pace.back(now, 4096, 4096, class, true);
            } else {
                flying += 1;
                pace.handed(now, 4096, class);
            }
        }
        while flying > 0 {
            now += Duration::from_micros(1);
            (nanoseconds, bytes, flying) = (nanoseconds + 1000, bytes + 4096, flying - 1);
            pace.back(now, 4096, 4096, ReadClass::Demand, true);
        }
        // A chunk that is back in no time at all began no stretch of its own.
        let busy = pace.busy();
        prop_assert_eq!(busy.nanoseconds, nanoseconds);
        prop_assert!(busy.bytes <= bytes && bytes - busy.bytes <= 4096 * steps as u64);
    }
}

#[test]
fn a_time_that_nobody_saw_end_is_not_measured() {
    let mut pace = Pace::new(1_000_000_000);
    let mut now = Instant::now();
    pace.handed(now, MIB, ReadClass::Prefetch);
    // Read in a millisecond, looked at after a second of arithmetic.
    now += Duration::from_secs(1);
    pace.back(now, MIB, MIB, ReadClass::Prefetch, false);
    assert_eq!(pace.busy(), Busy::default());
    pace.handed(now, MIB, ReadClass::Demand);
    now += Duration::from_millis(1);
    pace.back(now, MIB, MIB, ReadClass::Demand, true);
    assert_eq!(pace.busy(), Busy { bytes: MIB as u64, nanoseconds: 1_000_000 });
}

#[test]
fn prefetches_alone_do_not_talk_each_other_down() {
    let mut pace = Pace::new(2_000_000_000);
    let mut device = Device::new(0.2e9);
    let before = pace.prefetch_room(MIB);
    for _ in 0..100 {
        device.fill(&mut pace);
        while device.give(&mut pace) {}
    }
    assert_eq!(pace.prefetch_room(MIB), before);
}

#[test]
fn a_first_idea_of_the_bandwidth_gives_way_to_what_was_measured() {
    let mut pace = Pace::new(1_000_000_000);
    pace.expect(100_000_000);
    assert_eq!(pace.prefetch_room(MIB), LEAST / SHARES);
    let mut device = Device::new(4e9);
    (0..100).for_each(|_| device.demand(&mut pace, 8));
    pace.expect(100_000_000);
    assert_eq!(pace.prefetch_room(MIB), MIB);
}
