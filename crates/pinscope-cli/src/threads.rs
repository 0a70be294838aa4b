//! How many threads compute by default.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Physical cores that this process may run on: arithmetic gains nothing from
/// the second thread of a core.
pub fn default_threads() -> u32 {
    let allowed = std::thread::available_parallelism().map_or(1, |n| n.get());
    let cores = cores_below(Path::new("/")).unwrap_or(allowed);
    // A CPU quota may allow less than the affinity mask.
    u32::try_from(cores.clamp(1, allowed)).unwrap_or(1)
}

/// `None` if the kernel does not say which threads share a core.
fn cores_below(root: &Path) -> Option<usize> {
    let status = fs::read_to_string(root.join("proc/self/status")).ok()?;
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
    let siblings: BTreeSet<String> = cpus(list)?
        .map(|cpu| {
            let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            fs::read_to_string(root.join(file)).ok()
        })
        .collect::<Option<_>>()?;
    Some(siblings.len())
}

/// The numbers of a list such as `0-3,8`.
fn cpus(list: &str) -> Option<impl Iterator<Item = u32>> {
    let ranges = list
        .trim()
        .split(',')
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .collect::<Option<Vec<_>>>()?;
    Some(ranges.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_of_a_core_count_once() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/self/status", "Name: x\nCpus_allowed_list:\t0-2,5\n");
        for (cpu, siblings) in [(0, "0,4"), (1, "1,5"), (2, "2,6"), (5, "1,5")] {
            let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            write(&path, siblings);
        }
        assert_eq!(cores_below(root.path()), Some(3));
    }

    #[test]
    fn at_least_one_thread_computes() {
        assert!(default_threads() >= 1);
        assert_eq!(cores_below(Path::new("/nowhere")), None);
    }
}
