//! Judging what was found: one line for each thing that decides speed.

use pinscope::memory::format_bytes;
use serde::Serialize;

use super::disk::Reading;
use super::process::Process;
use super::Findings;

/// How good a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Good,
    Fair,
    Poor,
    /// Nobody can tell.
    Unknown,
}

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    pub what: &'static str,
    pub found: String,
    pub verdict: Verdict,
}

/// From the best bound down: good from `good` on, fair from `fair` on.
fn at_least(value: f64, good: f64, fair: f64) -> Verdict {
    match value {
        v if v >= good => Verdict::Good,
        v if v >= fair => Verdict::Fair,
        _ => Verdict::Poor,
    }
}

/// Good up to `good`, fair up to `fair`.
fn at_most(value: f64, good: f64, fair: f64) -> Verdict {
    at_least(-value, -good, -fair)
}

/// Judges everything.
pub fn checks(f: &Findings) -> Vec<Check> {
    let mut all = disk(f);
    all.extend([memory_bandwidth(f), memory(f), locked(f), huge_pages(f), swap(f), pressure(f)]);
    all.extend(f.process.iter().flat_map(process));
    all
}

fn rate(bytes_per_second: f64) -> String {
    format!("{:.2} GB/s", bytes_per_second / 1e9)
}

fn disk(f: &Findings) -> Vec<Check> {
    let with = |r: &Reading| format!("{} ({} at once)", rate(r.rate), r.depth);
    let line = |what, direct: bool, small: bool| {
        let own = f.disk.readings.first().map_or(0, |r| r.chunk);
        let rows: Vec<&Reading> = f
            .disk
            .readings
            .iter()
            .filter(|r| r.direct == direct && (r.chunk < own) == small)
            .collect();
        let best = rows.iter().map(|r| r.rate).fold(0.0, f64::max);
        let found: Vec<String> = rows.iter().map(|r| with(r)).collect();
        Check { what, found: found.join(", "), verdict: at_least(best, 2e9, 0.5e9) }
    };
    let uring = f.disk.reader == "io_uring";
    let system = f.file_system.as_ref().map(|system| {
        let (kind, verdict) = match (system.network, system.rotational) {
            (true, _) => (", over a network", Verdict::Fair),
            (_, Some(true)) => (", a spinning disk or a virtual one", Verdict::Unknown),
            _ => ("", Verdict::Good),
        };
        Check { what: "File system", found: format!("{}{kind}", system.kind), verdict }
    });
    let mut lines = vec![
        line("Disk, as PinScope reads (1 MiB)", true, false),
        line("Disk, small reads (128 KiB)", true, true),
        line("Disk, through the page cache", false, false),
    ];
    lines.extend(system);
    lines.push(Check {
        what: "Reader",
        found: match &f.disk.notes[..] {
            [] => f.disk.reader.to_owned(),
            notes => format!("{}: {}", f.disk.reader, notes.join("; ")),
        },
        verdict: match uring && f.disk.notes.is_empty() {
            true => Verdict::Good,
            false => Verdict::Fair,
        },
    });
    lines
}

fn memory_bandwidth(f: &Findings) -> Check {
    let (one, all) = f.bandwidth;
    Check {
        what: "Memory bandwidth",
        found: format!("{} (1 thread), {} ({} threads)", rate(one), rate(all), f.threads),
        verdict: at_least(one.max(all), 40e9, 15e9),
    }
}

fn memory(f: &Findings) -> Check {
    let limit = match f.memory.total < f.machine.memory {
        true => format!(", limited by a cgroup to {}", format_bytes(f.memory.total)),
        false => String::new(),
    };
    Check {
        what: "Memory",
        found: format!(
            "{}{limit}; {} free or easily freed",
            format_bytes(f.machine.memory),
            format_bytes(f.memory.available)
        ),
        verdict: match &f.outlook {
            None => Verdict::Unknown,
            Some(o) if f.memory.available >= o.case.full_ram => Verdict::Good,
            Some(o) if f.memory.available >= 2 * o.case.smallest_ram => Verdict::Fair,
            Some(_) => Verdict::Poor,
        },
    }
}

fn locked(f: &Findings) -> Check {
    let found = match (f.lockable, &f.machine.memlock) {
        (None, _) => "no limit".to_owned(),
        (Some(bytes), Some((soft, hard))) => {
            format!("{} (limits: {soft} soft, {hard} hard)", format_bytes(bytes))
        }
        (Some(bytes), None) => format_bytes(bytes),
    };
    let wanted = f.outlook.as_ref().map_or(1 << 30, |o| o.case.locks);
    let verdict = match f.lockable {
        None => Verdict::Good,
        Some(bytes) if bytes >= wanted => Verdict::Good,
        // Nothing is swapped out where there is no swap.
        Some(_) if f.machine.swap == 0 => Verdict::Fair,
        Some(_) => Verdict::Poor,
    };
    Check { what: "Memory that may be locked", found, verdict }
}

fn huge_pages(f: &Findings) -> Check {
    let (huge, used) = f.disk.huge;
    let mode = f.machine.huge_pages.as_deref().unwrap_or("not supported");
    Check {
        what: "Huge pages",
        found: format!("{mode}; {} of {} got them", format_bytes(huge), format_bytes(used)),
        verdict: match used {
            0 => Verdict::Unknown,
            _ => at_least(huge as f64 / used as f64, 0.9, 0.5),
        },
    }
}

fn swap(f: &Findings) -> Check {
    let (there, used) = (f.machine.swap, f.machine.swap_used);
    Check {
        what: "Swap",
        found: match there {
            0 => "none".into(),
            _ => format!("{} of {} in use", format_bytes(used), format_bytes(there)),
        },
        verdict: match (there, f.lockable) {
            (0, _) | (_, None) => Verdict::Good,
            _ if used == 0 => Verdict::Fair,
            _ => Verdict::Poor,
        },
    }
}

fn pressure(f: &Findings) -> Check {
    Check {
        what: "Memory pressure",
        found: match f.machine.pressure {
            None => "this kernel does not say (no PSI)".into(),
            Some((some, full)) => {
                format!("some task waited {some:.1} % of the last 10 s, all of them {full:.1} %")
            }
        },
        verdict: match f.machine.pressure {
            None => Verdict::Unknown,
            Some((some, _)) => at_most(some, 1.0, 10.0),
        },
    }
}

fn process(p: &Process) -> Vec<Check> {
    let resident =
        p.ram_bytes.map_or(String::new(), |ram| format!(" of --ram {}", format_bytes(ram)));
    let mut lines = vec![
        Check {
            what: "Process",
            found: format!("{} ({})", p.pid, p.name),
            verdict: Verdict::Unknown,
        },
        Check {
            what: "  page faults",
            found: format!(
                "{:.0} a second, and {:.0} that wait for the disk",
                p.minor_faults_per_second, p.major_faults_per_second
            ),
            verdict: at_most(p.major_faults_per_second, 10.0, 200.0),
        },
        Check {
            what: "  memory",
            found: format!(
                "{}{resident}, {} at most, {} locked, {} swapped out",
                format_bytes(p.resident_bytes),
                format_bytes(p.peak_bytes),
                format_bytes(p.locked_bytes),
                format_bytes(p.swapped_bytes)
            ),
            verdict: match p.ram_bytes {
                _ if p.swapped_bytes > 0 => Verdict::Poor,
                Some(ram) if p.peak_bytes > ram => Verdict::Poor,
                _ => Verdict::Good,
            },
        },
    ];
    lines.push(match p.read_bytes_per_second {
        Some(bytes) => {
            Check { what: "  reads from the disk", found: rate(bytes), verdict: Verdict::Good }
        }
        None => Check {
            what: "  reads from the disk",
            found: "hidden from this user".into(),
            verdict: Verdict::Unknown,
        },
    });
    lines.extend(p.models.iter().map(|m| Check {
        what: "  page cache",
        found: match m.cached_bytes {
            Some(cached) => format!(
                "{} of {}'s {}",
                format_bytes(cached),
                m.path.display(),
                format_bytes(m.bytes)
            ),
            None => format!("{} cannot be looked at", m.path.display()),
        },
        verdict: Verdict::Unknown,
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_itself_belongs_to_the_better_verdict() {
        use Verdict::{Fair, Good, Poor};
        assert_eq!([3.0, 2.0, 1.0, 0.9].map(|v| at_least(v, 2.0, 1.0)), [Good, Good, Fair, Poor]);
        assert_eq!([0.0, 1.0, 2.0, 2.1].map(|v| at_most(v, 1.0, 2.0)), [Good, Good, Fair, Poor]);
    }

    #[test]
    fn a_process_that_swaps_faults_or_breaks_its_promise_is_poor() {
        let fine = Process {
            pid: 1,
            name: "pinscope".into(),
            minor_faults_per_second: 5000.0,
            major_faults_per_second: 0.0,
            read_bytes_per_second: None,
            resident_bytes: 90,
            peak_bytes: 100,
            swapped_bytes: 0,
            locked_bytes: 0,
            ram_bytes: Some(100),
            models: Vec::new(),
        };
        let verdict = |p: &Process, what: &str| {
            process(p).into_iter().find(|c| c.what.trim() == what).unwrap().verdict
        };
        assert_eq!(verdict(&fine, "memory"), Verdict::Good);
        assert_eq!(verdict(&fine, "page faults"), Verdict::Good);
        assert_eq!(verdict(&fine, "reads from the disk"), Verdict::Unknown);
        let over = Process { peak_bytes: 101, ..fine.clone() };
        assert_eq!(verdict(&over, "memory"), Verdict::Poor);
        let swaps = Process { swapped_bytes: 1, ram_bytes: None, ..fine.clone() };
        assert_eq!(verdict(&swaps, "memory"), Verdict::Poor);
        let faults = Process { major_faults_per_second: 1000.0, ..fine };
        assert_eq!(verdict(&faults, "page faults"), Verdict::Poor);
    }
}
