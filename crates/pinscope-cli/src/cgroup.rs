//! A child process under a memory limit that counts the page cache it causes.
//!
//! Only the kernel can keep and measure such a promise, so this makes a memory
//! cgroup (version 1 or 2) below or beside our own, where we may. Where we may
//! not, [`MemoryGroup::create`] says why and callers report "not limited by a
//! cgroup" instead of pretending.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Which files a group has: the two kernel interfaces differ in name only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    fn limit_file(self) -> &'static str {
        match self {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        }
    }

    fn peak_file(self) -> &'static str {
        match self {
            Version::V1 => "memory.max_usage_in_bytes",
            Version::V2 => "memory.peak",
        }
    }
}

/// A memory cgroup of our own; removed when dropped (its processes must have ended).
#[derive(Debug)]
pub struct MemoryGroup {
    dir: PathBuf,
    version: Version,
}

impl MemoryGroup {
    /// Makes a group that may use `limit` bytes (`None`: measured, not limited),
    /// page cache counted, swap not available.
    ///
    /// # Errors
    /// The reason, in words for the user, why there is no such group here.
    pub fn create(limit: Option<u64>) -> Result<MemoryGroup, String> {
        let mounts = read_proc("/proc/self/mountinfo")?;
        let own = read_proc("/proc/self/cgroup")?;
        let parents = candidate_parents(&mounts, &own);
        let mut reason = "no memory cgroup is mounted".to_string();
        for (parent, version) in parents {
            match MemoryGroup::create_in(&parent, version, limit) {
                Ok(group) => return Ok(group),
                Err(why) => reason = why,
            }
        }
        Err(reason)
    }

    fn create_in(parent: &Path, version: Version, limit: Option<u64>) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let hands_memory_down = version == Version::V1
            || fs::read_to_string(parent.join("cgroup.subtree_control"))
                .is_ok_and(|c| c.split_whitespace().any(|name| name == "memory"));
        if !hands_memory_down {
            return Err(format!("{} does not delegate memory", parent.display()));
        }
        remove_left_behind(parent);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = parent.join(format!("pinscope-{}-{number}", std::process::id()));
        fs::create_dir(&dir).map_err(|e| format!("cannot make {}: {e}", dir.display()))?;
        let group = MemoryGroup { dir, version };
        if let Some(bytes) = limit {
            group.write(version.limit_file(), bytes)?;
        }
        // Swapping would let a run use more than the limit; where the kernel
        // counts no swap these files are missing, and that is fine.
        let _ = match version {
            Version::V1 => group.write("memory.swappiness", 0),
            Version::V2 => group.write("memory.swap.max", 0),
        };
        Ok(group)
    }

    /// Starts `command` inside the group: it joins before it is executed, so
    /// that every page it causes is counted. It is killed if we die first.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let procs = CString::new(self.dir.join("cgroup.procs").as_os_str().as_bytes())?;
        // SAFETY: between fork and exec only async-signal-safe calls (open,
        // write, close) are made, on a string that was allocated before the fork.
        unsafe {
            command.pre_exec(move || join_group(&procs));
        }
        command.spawn()
    }

    /// Most bytes that the group ever used at once, page cache included; `None`
    /// where the kernel does not count it (version 2 before Linux 5.19).
    pub fn peak_bytes(&self) -> Option<u64> {
        self.read(self.version.peak_file())?.trim().parse().ok()
    }

    /// How often the limit was met and the kernel had to take pages back (or to
    /// kill); 0 means that the process stayed below it by itself.
    pub fn limit_hits(&self) -> Option<u64> {
        match self.version {
            Version::V1 => self.read("memory.failcnt")?.trim().parse().ok(),
            Version::V2 => {
                let events = self.read("memory.events")?;
                let max = events.lines().find_map(|line| line.strip_prefix("max "))?;
                max.trim().parse().ok()
            }
        }
    }

    fn read(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.dir.join(file)).ok()
    }

    fn write(&self, file: &str, value: u64) -> Result<(), String> {
        let path = self.dir.join(file);
        fs::write(&path, value.to_string())
            .map_err(|e| format!("cannot write {}: {e}", path.display()))
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // The kernel lets go of an ended process a moment after `wait` returns.
        for _ in 0..50 {
            match fs::remove_dir(&self.dir) {
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                _ => return,
            }
        }
    }
}

/// Removes the groups of programs that ended without doing so (Ctrl-C).
fn remove_left_behind(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|n| n.strip_prefix("pinscope-")?.split('-').next());
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // The kernel refuses where something still runs.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Writes "0" (the calling process) to the group's `cgroup.procs`.
fn join_group(procs: &CString) -> io::Result<()> {
    // SAFETY: `procs` is a valid C string, the descriptor is ours alone, and
    // the buffer outlives the call; prctl with these arguments takes no pointer.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let fd = libc::open(procs.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let written = libc::write(fd, b"0".as_ptr().cast(), 1);
        let error = io::Error::last_os_error();
        libc::close(fd);
        if written == 1 {
            Ok(())
        } else {
            Err(error)
        }
    }
}

fn read_proc(path: &str) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("cannot read {path}: {e}"))
}

/// Directories in which a group could be made, best first.
///
/// Version 1: below our own group. Version 2: a group with processes cannot
/// have children that share out memory, so its ancestors are tried as well.
fn candidate_parents(mountinfo: &str, own: &str) -> Vec<(PathBuf, Version)> {
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let (Some(root), Some(mount)) = (left.get(3), left.get(4)) else {
            continue;
        };
        let version = match right.first() {
            Some(&"cgroup")
                if right.last().is_some_and(|o| o.split(',').any(|x| x == "memory")) =>
            {
                Version::V1
            }
            Some(&"cgroup2") => Version::V2,
            _ => continue,
        };
        let Some(path) = own_path(own, version) else {
            continue;
        };
        // In a container the mount may show a subtree only.
        let inside = path.strip_prefix(*root).unwrap_or(path);
        let dir = Path::new(mount).join(inside.trim_start_matches('/'));
        match version {
            Version::V1 => found.push((dir, version)),
            Version::V2 => {
                let below_mount = dir.ancestors().take_while(|d| d.starts_with(mount));
                found.extend(below_mount.map(|d| (d.to_path_buf(), version)));
            }
        }
    }
    found
}

/// Our own group's path from `/proc/self/cgroup` (`id:controllers:path`).
fn own_path(own: &str, version: Version) -> Option<&str> {
    own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let ours = match version {
            Version::V1 => controllers.split(',').any(|c| c == "memory"),
            Version::V2 => controllers.is_empty(),
        };
        ours.then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_1_groups_are_made_below_our_own() {
        let mounts = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                      41 31 0:38 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n";
        let own = "9:pids:/\n4:memory:/user/job\n";
        let want = vec![(PathBuf::from("/sys/fs/cgroup/memory/user/job"), Version::V1)];
        assert_eq!(candidate_parents(mounts, own), want);
    }

    #[test]
    fn version_2_groups_may_be_made_beside_our_own() {
        let mounts = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let own = "0::/user.slice/a.scope\n";
        let dirs: Vec<PathBuf> =
            candidate_parents(mounts, own).into_iter().map(|(dir, _)| dir).collect();
        let want =
            ["/sys/fs/cgroup/user.slice/a.scope", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"];
        assert_eq!(dirs, want.map(PathBuf::from));
    }

    #[test]
    fn a_container_that_sees_a_subtree_only_is_understood() {
        let mounts = "35 31 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let own = "4:memory:/docker/ab/inner\n";
        let found = candidate_parents(mounts, own);
        assert_eq!(found[0].0, PathBuf::from("/sys/fs/cgroup/memory/inner"));
    }

    #[test]
    fn groups_of_ended_programs_are_removed_and_those_of_running_ones_kept() {
        let parent = tempfile::tempdir().unwrap();
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let dir = |pid: u32| parent.path().join(format!("pinscope-{pid}-0"));
        let other = parent.path().join("other");
        for d in [&dir(child.id()), &dir(std::process::id()), &other] {
            fs::create_dir(d).unwrap();
        }
        remove_left_behind(parent.path());
        assert!(!dir(child.id()).exists());
        assert!(dir(std::process::id()).exists() && other.exists());
    }

    /// Where this machine lets us make a group, a child that writes 40 MB of
    /// page cache is seen to use at least that and never more than its limit.
    #[test]
    fn page_cache_counts_against_the_limit() {
        let limit = 24 << 20;
        let group = match MemoryGroup::create(Some(limit)) {
            Ok(group) => group,
            Err(why) => return eprintln!("not tested here: {why}"),
        };
        let file = std::env::temp_dir().join(format!("pinscope-cgroup-{}", std::process::id()));
        let mut dd = Command::new("dd");
        dd.args(["if=/dev/zero", "bs=1M", "count=40", "status=none"]);
        dd.arg(format!("of={}", file.display()));
        let status = group.spawn(&mut dd).unwrap().wait().unwrap();
        let _ = fs::remove_file(&file);
        assert!(status.success());
        if let Some(peak) = group.peak_bytes() {
            assert!((limit / 2..=limit).contains(&peak), "peak {peak}");
        }
        if let Some(hits) = group.limit_hits() {
            assert!(hits > 0, "40 MB went through 24 MB without meeting the limit");
        }
        let dir = group.dir.clone();
        drop(group);
        assert!(!dir.exists(), "the group outlived its owner");
    }
}
