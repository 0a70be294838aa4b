//! The one change that would help most, chosen by the numbers.

use pinscope::memory::format_bytes;
use serde::Serialize;

use super::estimate::{speed, Demand, Rates};

/// A fast disk of today (PCIe 4), bytes a second.
const FAST_DISK: f64 = 5e9;

/// A usual local disk (NVMe, PCIe 3), bytes a second.
const LOCAL_DISK: f64 = 2e9;

/// What huge pages are taken to save of arithmetic: fewer address look-ups.
const HUGE_PAGE_GAIN: f64 = 1.05;

/// Share of time in which some task waits for memory from which on other
/// changes are not worth discussing, percent, if also less than this share of
/// memory is available. With more, tasks wait at the limit of a cgroup.
const PRESSURE: f64 = 10.0;
const SHORT: f64 = 0.1;

/// A gain below this is lost in the noise of measuring.
const WORTHWHILE: f64 = 1.05;

/// What the advice is made from.
#[derive(Debug, Clone)]
pub struct Situation {
    /// The model at the budget in question; `None` without a model.
    pub model: Option<Case>,
    pub rates: Rates,
    /// Kind of the network file system that the model is on, if it is.
    pub network: Option<String>,
    /// Expert memory got huge pages.
    pub huge_pages: bool,
    /// Swap that there is, bytes.
    pub swap: u64,
    /// What may be locked, bytes; `None`: no limit.
    pub lockable: Option<u64>,
    /// Share of time in which some task waits for memory, percent.
    pub pressure: f64,
    /// Share of the memory that is free or easily freed, 0 to 1.
    pub available: f64,
}

/// A model and a budget.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub demand: Demand,
    /// Memory for the whole process, bytes.
    pub ram: u64,
    /// With this much everything fits.
    pub full_ram: u64,
    /// Below this nothing runs.
    pub smallest_ram: u64,
    /// What the machine could give now.
    pub free_ram: u64,
    /// Share of choices served at `ram` and at `free_ram`.
    pub hit_rate: f64,
    pub free_hit_rate: f64,
    /// What PinScope would lock at `ram`.
    pub locks: u64,
}

/// The advice.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Advice {
    /// What to do.
    pub change: String,
    /// The figures behind it.
    pub why: String,
    /// How many times faster a token is said to come; `null` if that is unknown.
    pub gain: Option<f64>,
}

impl Advice {
    fn new(change: impl Into<String>, why: impl Into<String>, gain: Option<f64>) -> Advice {
        Advice { change: change.into(), why: why.into(), gain }
    }
}

/// The change that helps most; of two that help about equally, the cheaper one.
pub fn advise(s: &Situation) -> Advice {
    if s.pressure >= PRESSURE && s.available < SHORT {
        return Advice::new(
            "End other programs that use memory, or give PinScope a smaller --ram",
            format!("tasks wait for memory {:.0} % of the time just now", s.pressure),
            None,
        );
    }
    let Some(case) = &s.model else { return without_model(s) };
    if case.ram < case.smallest_ram {
        return Advice::new(
            format!("Give it --ram {}M at least", case.smallest_ram.div_ceil(1 << 20)),
            format!("{} do not hold what every token needs", format_bytes(case.ram)),
            None,
        );
    }
    let mut best: Option<Advice> = None;
    // Cheapest first: a later one must be clearly better.
    for advice in settings(s).into_iter().chain(changes(s, case)) {
        let gain = |a: &Advice| a.gain.unwrap_or(1.0);
        if gain(&advice) >= WORTHWHILE * best.as_ref().map_or(1.0, gain) {
            best = Some(advice);
        }
    }
    best.unwrap_or_else(|| {
        let now = speed(case.demand, s.rates, case.hit_rate);
        Advice::new(
            "Nothing small: arithmetic is the limit. More cores or faster memory, or a smaller \
             quantisation, would help",
            format!(
                "arithmetic takes {:.0} ms a token, the disk {:.0} ms meanwhile",
                now.arithmetic_ms, now.disk_ms
            ),
            None,
        )
    })
}

/// Settings of the machine. Their gains are assumed, not predicted.
fn settings(s: &Situation) -> Vec<Advice> {
    let mut found = Vec::new();
    if !s.huge_pages {
        found.push(Advice::new(
            "Allow huge pages: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            "expert memory got none, so reading it costs more address look-ups",
            Some(HUGE_PAGE_GAIN),
        ));
    }
    let locks = s.model.map_or(0, |case| case.locks);
    if s.swap > 0 && s.lockable.is_some_and(|lockable| lockable < locks) {
        found.push(Advice::new(
            "Turn swap off (swapoff -a), or raise the limit on locked memory (ulimit -l)",
            format!(
                "the kernel may swap weights out: there are {} of swap, and {} may not be locked",
                format_bytes(s.swap),
                format_bytes(locks)
            ),
            Some(1.1),
        ));
    }
    found
}

/// Changes whose gain the estimate predicts.
fn changes(s: &Situation, case: &Case) -> Vec<Advice> {
    let now = speed(case.demand, s.rates, case.hit_rate);
    let gain = |rates: Rates, hit_rate: f64| {
        Some(speed(case.demand, rates, hit_rate).tokens_per_second / now.tokens_per_second)
    };
    let with_disk = |disk: f64| Rates { disk: disk.max(s.rates.disk), ..s.rates };
    let missing = format!(
        "{} a token are missing, which takes {:.0} ms at {:.1} GB/s; arithmetic takes {:.0} ms",
        format_bytes(((1.0 - case.hit_rate) * case.demand.experts as f64) as u64),
        now.disk_ms,
        s.rates.disk / 1e9,
        now.arithmetic_ms
    );
    let mut found = Vec::new();
    if case.free_ram > case.ram {
        let ram = case.free_ram.min(case.full_ram);
        found.push(Advice::new(
            format!("Give it more of the memory that is free: --ram {}M", ram >> 20),
            &missing,
            gain(s.rates, case.free_hit_rate),
        ));
    }
    match &s.network {
        Some(kind) => found.push(Advice::new(
            format!("Copy the model from the network file system ({kind}) to a local disk"),
            &missing,
            gain(with_disk(LOCAL_DISK), case.hit_rate),
        )),
        None => found.push(Advice::new(
            format!("A faster disk, such as an NVMe one of {:.0} GB/s", FAST_DISK / 1e9),
            &missing,
            gain(with_disk(FAST_DISK), case.hit_rate),
        )),
    }
    if case.full_ram > case.free_ram {
        found.push(Advice::new(
            format!("More memory: with --ram {} everything fits", format_bytes(case.full_ram)),
            &missing,
            gain(s.rates, 1.0),
        ));
    }
    found
}

/// What can be said of a machine alone.
fn without_model(s: &Situation) -> Advice {
    if let Some(advice) = settings(s).into_iter().next() {
        return advice;
    }
    let figures = format!(
        "the disk reads {:.1} GB/s, memory {:.1} GB/s",
        s.rates.disk / 1e9,
        s.rates.memory / 1e9
    );
    if s.rates.disk < LOCAL_DISK / 2.0 {
        return Advice::new("A faster disk", figures, None);
    }
    Advice::new(
        "Nothing stands out; name a model with -m to learn what decides its speed",
        figures,
        None,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// 100 ms of arithmetic; half of 1 GB missing at 1 GB/s: 500 ms.
    fn disk_bound() -> Situation {
        Situation {
            model: Some(Case {
                demand: Demand { dense: 700_000_000, experts: 1_000_000_000 },
                ram: 8 * GIB,
                full_ram: 20 * GIB,
                smallest_ram: 2 * GIB,
                free_ram: 8 * GIB,
                hit_rate: 0.5,
                free_hit_rate: 0.5,
                locks: 7 * GIB,
            }),
            rates: Rates { memory: 34e9, disk: 1e9 },
            network: None,
            huge_pages: true,
            swap: 0,
            lockable: None,
            pressure: 0.0,
            available: 0.5,
        }
    }

    fn with(change: impl FnOnce(&mut Situation, &mut Case)) -> Advice {
        let mut situation = disk_bound();
        let mut case = situation.model.unwrap();
        change(&mut situation, &mut case);
        situation.model = Some(case);
        advise(&situation)
    }

    #[test]
    fn a_slow_disk_is_named_with_what_a_fast_one_gives() {
        // 500 ms become 100, the arithmetic: more memory would give no more.
        let advice = with(|_, _| {});
        assert!(advice.change.contains("faster disk"), "{advice:?}");
        assert!((advice.gain.unwrap() - 5.0).abs() < 1e-9);
        assert!(advice.why.contains("477 MiB"), "{advice:?}");
    }

    #[test]
    fn memory_that_is_free_is_taken_before_anything_is_bought() {
        let advice = with(|_, case| {
            case.free_ram = 30 * GIB;
            case.free_hit_rate = 1.0;
        });
        assert!(advice.change.contains("--ram 20480M"), "{advice:?}");
    }

    #[test]
    fn memory_is_named_where_no_disk_is_fast_enough() {
        // Memory of 340 GB/s: 10 ms of arithmetic, and 100 from a fast disk.
        let advice = with(|s, _| s.rates.memory = 340e9);
        assert!(advice.change.contains("More memory"), "{advice:?}");
        assert!((advice.gain.unwrap() - 50.0).abs() < 1e-6);
    }

    #[test]
    fn a_network_file_system_is_left_first() {
        let advice = with(|s, case| {
            s.network = Some("nfs4".into());
            s.rates.disk = 0.1e9;
            case.full_ram = case.ram;
        });
        assert!(advice.change.contains("nfs4"), "{advice:?}");
        assert!((advice.gain.unwrap() - 20.0).abs() < 1e-6);
    }

    #[test]
    fn settings_matter_when_arithmetic_is_the_limit() {
        let huge = with(|s, case| {
            case.hit_rate = 1.0;
            s.huge_pages = false;
        });
        assert!(huge.change.contains("transparent_hugepage"), "{huge:?}");
        let swap = with(|s, case| {
            case.hit_rate = 1.0;
            (s.swap, s.lockable) = (GIB, Some(8 << 20));
        });
        assert!(swap.change.contains("swapoff"), "{swap:?}");
        // Without swap, or with enough that may be locked, the limit does no harm.
        let neither = with(|s, case| {
            case.hit_rate = 1.0;
            (s.swap, s.lockable) = (GIB, Some(7 * GIB));
        });
        assert!(neither.change.contains("arithmetic is the limit"), "{neither:?}");
    }

    #[test]
    fn what_cannot_work_and_what_makes_figures_worthless_come_first() {
        let small = with(|_, case| case.ram = GIB);
        assert!(small.change.contains("--ram 2048M at least"), "{small:?}");
        let pressure = with(|s, _| (s.pressure, s.available) = (30.0, 0.05));
        assert!(pressure.change.contains("other programs"), "{pressure:?}");
        let elsewhere = with(|s, _| s.pressure = 30.0);
        assert_eq!(elsewhere, advise(&disk_bound()));
    }

    #[test]
    fn without_a_model_the_machine_is_judged_alone() {
        let alone = Situation { model: None, ..disk_bound() };
        assert!(advise(&alone).change.contains("-m"));
        let slow = Situation { rates: Rates { disk: 0.2e9, ..alone.rates }, ..alone };
        assert_eq!(advise(&slow).change, "A faster disk");
    }
}
