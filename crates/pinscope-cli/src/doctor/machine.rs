//! What the kernel says of this machine without measuring.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pinscope::pressure::avg10;

/// What is set and what there is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Machine {
    /// Memory of the machine, whatever a cgroup allows, bytes.
    pub memory: u64,
    pub swap: u64,
    pub swap_used: u64,
    /// Soft and hard limit on locked memory, as the kernel prints them.
    pub memlock: Option<(String, String)>,
    /// Share of time in the last 10 s in which some task, or all, waited for
    /// memory, percent; `None` without PSI.
    pub pressure: Option<(f64, f64)>,
    /// `always`, `madvise` or `never`; `None` for kernels without huge pages.
    pub huge_pages: Option<String>,
}

impl Machine {
    /// Asks the kernel.
    pub fn now() -> Machine {
        Machine::below(Path::new("/"))
    }

    /// As [`now`](Self::now), with another root for `/proc` and `/sys`.
    fn below(root: &Path) -> Machine {
        let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let info = read("proc/meminfo");
        let bytes = |name| kib(&info, name).unwrap_or(0);
        let pressure = read("proc/pressure/memory");
        let limits = read("proc/self/limits");
        let memlock = limits.lines().find_map(|l| l.strip_prefix("Max locked memory"));
        let mut memlock = memlock.unwrap_or_default().split_whitespace().map(str::to_owned);
        let thp = read("sys/kernel/mm/transparent_hugepage/enabled");
        Machine {
            memory: bytes("MemTotal:"),
            swap: bytes("SwapTotal:"),
            swap_used: bytes("SwapTotal:").saturating_sub(bytes("SwapFree:")),
            memlock: memlock.next().zip(memlock.next()),
            pressure: avg10(&pressure, "some").zip(avg10(&pressure, "full")),
            huge_pages: thp.split(['[', ']']).nth(1).map(str::to_owned),
        }
    }
}

/// The value of a `Name:   123 kB` line, bytes.
pub fn kib(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|l| l.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The file system that a file is on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// As in `/proc/mounts`, such as `ext4`.
    pub kind: String,
    /// Its bytes come over a network.
    pub network: bool,
    /// A spinning disk; `None` where the kernel does not say.
    pub rotational: Option<bool>,
}

impl FileSystem {
    /// That of `path`; `None` if it cannot be found out.
    pub fn of(path: &Path) -> Option<FileSystem> {
        let path = path.canonicalize().ok()?;
        let kind = kind_of(&fs::read_to_string("/proc/self/mountinfo").ok()?, &path)?;
        Some(FileSystem {
            network: is_network(&kind),
            kind,
            rotational: rotational(fs::metadata(path).ok()?.dev()),
        })
    }
}

/// Type of the mount that `path` is below: the longest, and of equal ones the last.
fn kind_of(mountinfo: &str, path: &Path) -> Option<String> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        // The kernel writes blanks in names as octal numbers.
        let point = PathBuf::from(left.split(' ').nth(4)?.replace("\\040", " "));
        let depth = path.starts_with(&point).then(|| point.components().count())?;
        Some((depth, right.split(' ').next()?.to_owned()))
    });
    mounts.max_by_key(|(depth, _)| *depth).map(|(_, kind)| kind)
}

fn is_network(kind: &str) -> bool {
    const NETWORK: [&str; 10] =
        ["nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "afs"];
    NETWORK.contains(&kind) || kind.starts_with("fuse.")
}

fn rotational(device: u64) -> Option<bool> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let dir = format!("/sys/dev/block/{major}:{minor}");
    // A partition has no queue of its own; its disk is one folder up.
    let text = fs::read_to_string(format!("{dir}/queue/rotational"))
        .or_else(|_| fs::read_to_string(format!("{dir}/../queue/rotational")));
    Some(text.ok()?.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_prints_is_understood() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/meminfo", "MemTotal: 100 kB\nSwapTotal:   20 kB\nSwapFree: 5 kB\n");
        write(
            "proc/self/limits",
            "Limit   Soft Limit  Hard Limit  Units\nMax locked memory  8388608  unlimited  bytes\n",
        );
        write(
            "proc/pressure/memory",
            "some avg10=12.50 avg60=0.00 total=1\nfull avg10=3.00 avg60=0.00 total=1\n",
        );
        write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        let want = Machine {
            memory: 102_400,
            swap: 20_480,
            swap_used: 15_360,
            memlock: Some(("8388608".into(), "unlimited".into())),
            pressure: Some((12.5, 3.0)),
            huge_pages: Some("madvise".into()),
        };
        assert_eq!(Machine::below(root.path()), want);
        assert_eq!(Machine::below(Path::new("/nowhere")), Machine::default());
    }

    #[test]
    fn the_innermost_mount_says_what_a_file_is_on() {
        let mounts = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
                      2 1 0:50 / /mnt/my\\040models rw - nfs4 server:/x rw\n\
                      3 1 0:51 / /mnt rw - tmpfs tmpfs rw\n";
        let kind = |path| kind_of(mounts, Path::new(path));
        assert_eq!(kind("/mnt/my models/a.gguf").as_deref(), Some("nfs4"));
        assert_eq!(kind("/mnt/other").as_deref(), Some("tmpfs"));
        assert_eq!(kind("/home/x").as_deref(), Some("ext4"));
        assert!(is_network("nfs4") && is_network("fuse.sshfs") && !is_network("fuseblk"));
    }
}
