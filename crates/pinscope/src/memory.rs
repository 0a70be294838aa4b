//! How much memory this process may use, and how much it does.
//!
//! Everything is read from `/proc` and from the memory cgroups, version 1 and
//! 2: a limit may stand on any ancestor of the process's own group, so the
//! whole path up to the root is looked at.

use std::fs;
use std::io;
use std::path::Path;

/// Left free by the default of `--ram`: a tenth of what is available, at least
/// this many bytes. llama.cpp, the kernel and other programs need air.
const MARGIN_MIN: u64 = 512 << 20;

/// What this process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// The machine's memory or the tightest cgroup limit, whichever is less, bytes.
    pub total: u64,
    /// What is free or can be freed within it, bytes.
    pub available: u64,
}

impl Memory {
    /// What the kernel says now.
    ///
    /// # Errors
    /// `/proc/meminfo` cannot be read or lacks `MemTotal` or `MemAvailable`.
    pub fn now() -> io::Result<Memory> {
        Memory::below(Path::new("/"))
    }

    /// What the machine has, without regard to cgroups.
    ///
    /// # Errors
    /// As [`now`](Self::now).
    pub fn of_machine() -> io::Result<Memory> {
        Memory::in_meminfo(Path::new("/"))
    }

    fn in_meminfo(root: &Path) -> io::Result<Memory> {
        let info = fs::read_to_string(root.join("proc/meminfo"))?;
        let field = |name: &str| {
            kib_field(&info, name)
                .ok_or_else(|| io::Error::other(format!("/proc/meminfo has no {name}")))
        };
        Ok(Memory { total: field("MemTotal:")?, available: field("MemAvailable:")? })
    }

    /// As [`now`](Self::now), with another root for `/proc` and `/sys`.
    fn below(root: &Path) -> io::Result<Memory> {
        let mut memory = Memory::in_meminfo(root)?;
        // No file, no cgroups.
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        for line in groups.lines() {
            let Some((files, mount, path)) = memory_group(line) else {
                continue;
            };
            let mount = root.join(mount);
            for ancestor in Path::new(path).ancestors() {
                let dir = mount.join(ancestor.strip_prefix("/").unwrap_or(ancestor));
                if let Some((limit, used)) = files.read(&dir) {
                    memory.total = memory.total.min(limit);
                    memory.available = memory.available.min(limit.saturating_sub(used));
                }
            }
        }
        Ok(memory)
    }

    /// The default of `--ram`: what is available less a margin.
    pub fn default_ram(&self) -> u64 {
        self.available.saturating_sub(MARGIN_MIN.max(self.available / 10))
    }
}

/// Names of the files of a cgroup; the two versions differ in little else.
struct GroupFiles {
    limit: &'static str,
    usage: &'static str,
    /// Page cache in `memory.stat`, which the kernel takes back on demand.
    cache: [&'static str; 2],
}

const V1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};

const V2: GroupFiles = GroupFiles {
    limit: "memory.max",
    usage: "memory.current",
    cache: ["inactive_file", "active_file"],
};

impl GroupFiles {
    /// Limit and use of a group; `None` if it has no limit (`max`) or is not
    /// visible here, as the outer groups of a container are.
    fn read(&self, dir: &Path) -> Option<(u64, u64)> {
        let number = |file: &str| -> Option<u64> {
            fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()
        };
        let limit = number(self.limit)?;
        let used = number(self.usage)?;
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let cache: u64 = self.cache.iter().filter_map(|c| stat_field(&stat, c)).sum();
        Some((limit, used.saturating_sub(cache)))
    }
}

/// Files, mount point and path of the memory group that a line of
/// `/proc/self/cgroup` names, if it names one.
fn memory_group(line: &str) -> Option<(GroupFiles, &'static str, &str)> {
    let mut fields = line.splitn(3, ':');
    let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    if number == "0" && controllers.is_empty() {
        return Some((V2, "sys/fs/cgroup", path));
    }
    let is_memory = controllers.split(',').any(|c| c == "memory");
    is_memory.then_some((V1, "sys/fs/cgroup/memory", path))
}

/// Whether the machine has somewhere to swap to.
pub fn swaps() -> bool {
    // A header, then a line for each device.
    fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}

/// What this process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Resident now (anonymous, file-backed and shared pages), bytes.
    pub now: u64,
    /// The most that was ever resident at once, bytes.
    pub peak: u64,
}

impl Footprint {
    /// What the kernel says now. Page cache that is not mapped is not counted;
    /// only a cgroup sees that.
    ///
    /// # Errors
    /// `/proc/self/status` cannot be read or has not the expected fields.
    pub fn now() -> io::Result<Footprint> {
        parse_status(&fs::read_to_string("/proc/self/status")?)
            .ok_or_else(|| io::Error::other("/proc/self/status lacks Rss or VmHWM lines"))
    }
}

/// What this process has of its own now, with the whole program file: a figure
/// that is the same in every run that did the same. The resident size is not;
/// it depends on what of the program was cached, and the kernel counts it in
/// batches.
///
/// # Errors
/// `/proc/self/smaps_rollup` (Linux 4.14) or the program file cannot be read.
pub fn own_bytes() -> io::Result<u64> {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup")?;
    let anonymous = kib_field(&rollup, "Anonymous:")
        .ok_or_else(|| io::Error::other("/proc/self/smaps_rollup has no Anonymous line"))?;
    Ok(anonymous + fs::metadata("/proc/self/exe")?.len())
}

fn parse_status(status: &str) -> Option<Footprint> {
    let now = ["RssAnon:", "RssFile:", "RssShmem:"]
        .iter()
        .map(|name| kib_field(status, name))
        .sum::<Option<u64>>()?;
    let peak = kib_field(status, "VmHWM:")?;
    // The kernel updates the mark lazily.
    Some(Footprint { now, peak: peak.max(now) })
}

/// The value of a `Name:   123 kB` line, bytes.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: u64 = rest.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The value of a `name 123` line.
fn stat_field(text: &str, name: &str) -> Option<u64> {
    text.lines().filter_map(|l| l.split_once(' ')).find(|(n, _)| *n == name)?.1.trim().parse().ok()
}

/// A `--ram` that is not an amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RamError {
    /// The text has not the form of an amount.
    #[error("\"{text}\" is not an amount of memory; write it like 10G, 10400M, 1.5GiB or 60%")]
    Form {
        /// What was given.
        text: String,
    },
    /// Zero, or more than everything.
    #[error("\"{text}\" is not between 0 and 100 %")]
    Percent {
        /// What was given.
        text: String,
    },
}

/// Reads an amount of memory, bytes.
///
/// `K`, `M`, `G` and `T`, with or without `iB`, are powers of 1024, as tools
/// that limit memory have it: `10G` is 10 × 2^30 bytes. With a plain `B`, as in
/// `10GB`, they are powers of 1000. A share such as `60%` is one of `total`.
/// Fractions are allowed, a bare number is not: nobody means 10 bytes.
///
/// # Errors
/// [`RamError`] names the accepted forms.
pub fn parse_ram(text: &str, total: u64) -> Result<u64, RamError> {
    let form = || RamError::Form { text: text.to_owned() };
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(form)?;
    let (number, unit) = trimmed.split_at(digits);
    let number: f64 = number.parse().map_err(|_| form())?;
    let unit = unit.trim().to_ascii_lowercase();
    if unit == "%" {
        if number <= 0.0 || number > 100.0 {
            return Err(RamError::Percent { text: text.to_owned() });
        }
        return Ok((total as f64 * number / 100.0) as u64);
    }
    let (prefix, suffix) = unit.split_at_checked(1).ok_or_else(form)?;
    let power = match prefix {
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(form()),
    };
    let base: f64 = match suffix {
        "" | "ib" => 1024.0,
        "b" => 1000.0,
        _ => return Err(form()),
    };
    let bytes = number * base.powi(power);
    if bytes < 1.0 || bytes >= u64::MAX as f64 {
        return Err(form());
    }
    Ok(bytes as u64)
}

/// An amount of memory for people: `1.50 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        1 | 2 => format!("{value:.0} {}", UNITS[unit]),
        _ => format!("{value:.2} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A root with 16 GiB of memory, 8 of them available, and these files.
    fn machine(files: &[(&str, &str)]) -> Memory {
        let root = tempfile::tempdir().unwrap();
        let meminfo = "MemTotal:       16777216 kB\nMemFree: 5 kB\nMemAvailable:    8388608 kB\n";
        for (path, text) in files.iter().chain(&[("proc/meminfo", meminfo)]) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Memory::below(root.path()).unwrap()
    }

    #[test]
    fn without_cgroups_the_machine_counts() {
        let memory = machine(&[]);
        assert_eq!((memory.total, memory.available), (16 * GIB, 8 * GIB));
        // A tenth of 8 GiB is more than the least margin.
        assert_eq!(memory.default_ram(), 8 * GIB - 8 * GIB / 10);
    }

    #[test]
    fn a_version_2_limit_on_an_ancestor_counts_and_its_page_cache_does_not() {
        let memory = machine(&[
            ("proc/self/cgroup", "0::/user.slice/run\n"),
            ("sys/fs/cgroup/user.slice/run/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/run/memory.current", "1\n"),
            ("sys/fs/cgroup/user.slice/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "2147483648\n"),
            (
                "sys/fs/cgroup/user.slice/memory.stat",
                "anon 5\nfile 9\ninactive_file 1073741824\nactive_file 536870912\n",
            ),
        ]);
        assert_eq!(memory.total, 4 * GIB);
        assert_eq!(memory.available, 4 * GIB - (2 * GIB - GIB - GIB / 2));
    }

    #[test]
    fn a_version_1_limit_at_the_mount_counts_when_the_path_is_not_visible() {
        let memory = machine(&[
            ("proc/self/cgroup", "4:cpu:/x\n3:memory:/docker/abc\n0::/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "268435456\n"),
            ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\ntotal_active_file 0\n"),
        ]);
        assert_eq!(memory.total, GIB);
        assert_eq!(memory.available, GIB - GIB / 4);
        assert_eq!(memory.default_ram(), GIB - GIB / 4 - MARGIN_MIN);
    }

    #[test]
    fn an_unlimited_version_1_group_changes_nothing() {
        let memory = machine(&[
            ("proc/self/cgroup", "3:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "268435456\n"),
        ]);
        assert_eq!((memory.total, memory.available), (16 * GIB, 8 * GIB));
    }

    #[test]
    fn an_overdrawn_group_has_nothing_available() {
        let memory = machine(&[
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "100\n"),
            ("sys/fs/cgroup/memory.current", "200\n"),
        ]);
        assert_eq!((memory.available, memory.default_ram()), (0, 0));
    }

    #[test]
    fn amounts_are_read_as_documented() {
        let read = |text| parse_ram(text, 1000);
        assert_eq!(read("10G"), Ok(10 * GIB));
        assert_eq!(read("10GiB"), Ok(10 * GIB));
        assert_eq!(read("10 gib"), Ok(10 * GIB));
        assert_eq!(read("10GB"), Ok(10_000_000_000));
        assert_eq!(read("10400M"), Ok(10400 << 20));
        assert_eq!(read("1.5G"), Ok(3 * GIB / 2));
        assert_eq!(read("60%"), Ok(600));
        assert_eq!(read("100%"), Ok(1000));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "10", "G", "10X", "10Gi", "-1G", "1.2.3G", "0G", "1e3M", "∞", "10Gé"] {
            let got = parse_ram(text, 1000);
            assert!(matches!(got, Err(RamError::Form { .. })), "{text}: {got:?}");
        }
        for text in ["0%", "101%"] {
            let got = parse_ram(text, 1000);
            assert!(matches!(got, Err(RamError::Percent { .. })), "{text}");
        }
    }

    #[test]
    fn a_status_is_summed_and_the_peak_is_never_below_it() {
        let status = "VmHWM:\t     100 kB\nRssAnon:\t 60 kB\nRssFile:\t 50 kB\nRssShmem:\t 1 kB\n";
        let want = Footprint { now: 111 * 1024, peak: 111 * 1024 };
        assert_eq!(parse_status(status), Some(want));
        assert_eq!(parse_status("VmHWM: 1 kB\n"), None);
        assert!(Footprint::now().unwrap().now > 0);
    }

    #[test]
    fn own_bytes_are_the_program_and_what_it_wrote() {
        let program = fs::metadata("/proc/self/exe").unwrap().len();
        // Other tests use memory meanwhile, so only the least is certain.
        let block = std::hint::black_box(vec![1u8; 16 << 20]);
        assert!(own_bytes().unwrap() >= program + block.len() as u64);
    }

    #[test]
    fn amounts_are_printed_in_the_largest_unit_that_fits() {
        assert_eq!(format_bytes(1023), "1023 B");
        assert_eq!(format_bytes(10 << 20), "10 MiB");
        assert_eq!(format_bytes(3 * GIB / 2), "1.50 GiB");
    }
}
