//! How a running program does: what it faults, reads and keeps.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::{Duration, Instant};

use pinscope::memory::parse_ram;
use pinscope::pin::page_size;
use serde::Serialize;

use super::machine::kib;

/// Time between the two looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Bytes of a file that are looked at at a time.
const WINDOW: u64 = 1 << 30;

/// A look at a process, counters since its start.
#[derive(Debug, Clone, PartialEq, Default)]
struct Look {
    name: String,
    /// Page faults served from memory, and from the disk.
    minor_faults: u64,
    major_faults: u64,
    /// Bytes that came from the disk for it; `None` if that is kept from us.
    read_bytes: Option<u64>,
    resident: u64,
    peak: u64,
    swapped: u64,
    locked: u64,
}

/// What was seen.
#[derive(Debug, Clone, Serialize)]
pub struct Process {
    pub pid: u32,
    pub name: String,
    pub minor_faults_per_second: f64,
    /// Each waits for the disk.
    pub major_faults_per_second: f64,
    /// `null` if the kernel does not tell us.
    pub read_bytes_per_second: Option<f64>,
    pub resident_bytes: u64,
    pub peak_bytes: u64,
    pub swapped_bytes: u64,
    pub locked_bytes: u64,
    /// The `--ram` that it was started with; `null` if there is none.
    pub ram_bytes: Option<u64>,
    /// The model files that it has open or mapped.
    pub models: Vec<Cached>,
}

/// How much of a file is in the page cache.
#[derive(Debug, Clone, Serialize)]
pub struct Cached {
    pub path: PathBuf,
    pub bytes: u64,
    /// `null` if the file is not ours to ask about.
    pub cached_bytes: Option<u64>,
}

/// Looks at process `pid` twice, a second apart. Shares in its `--ram` are
/// shares of `total` bytes.
///
/// # Errors
/// There is no such process, or it ends meanwhile, in words for the user.
pub fn watch(pid: u32, total: u64) -> Result<Process, String> {
    let dir = PathBuf::from(format!("/proc/{pid}"));
    let look = || {
        Look::at(&dir).map_err(|e| {
            format!(
                "cannot look at process {pid}: {e}; give the id of a running process with --pid"
            )
        })
    };
    let (before, start) = (look()?, Instant::now());
    std::thread::sleep(INTERVAL);
    let (now, seconds) = (look()?, start.elapsed().as_secs_f64());
    let cmdline = fs::read(dir.join("cmdline")).unwrap_or_default();
    let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / seconds;
    Ok(Process {
        pid,
        minor_faults_per_second: rate(before.minor_faults, now.minor_faults),
        major_faults_per_second: rate(before.major_faults, now.major_faults),
        read_bytes_per_second: before.read_bytes.zip(now.read_bytes).map(|(b, n)| rate(b, n)),
        resident_bytes: now.resident,
        peak_bytes: now.peak,
        swapped_bytes: now.swapped,
        locked_bytes: now.locked,
        ram_bytes: ram(&cmdline, total),
        models: models(&dir).into_iter().map(Cached::of).collect(),
        name: program(&cmdline).unwrap_or(now.name),
    })
}

/// What the program was called as: its name in the kernel may be another.
fn program(cmdline: &[u8]) -> Option<String> {
    let path = cmdline.split(|byte| *byte == 0).next().filter(|path| !path.is_empty())?;
    Some(Path::new(OsStr::from_bytes(path)).file_name()?.to_string_lossy().into_owned())
}

impl Look {
    fn at(dir: &Path) -> io::Result<Look> {
        let read = |name: &str| fs::read_to_string(dir.join(name));
        let parsed = Look::parse(&read("stat")?, &read("status")?, read("io").ok().as_deref());
        parsed.ok_or_else(|| io::Error::other("its /proc files have not the expected form"))
    }

    fn parse(stat: &str, status: &str, io: Option<&str>) -> Option<Look> {
        // The name may have blanks and parentheses; it ends at the last one.
        let (head, fields) = stat.rsplit_once(") ")?;
        let field = |n: usize| fields.split(' ').nth(n)?.parse().ok();
        let read_bytes = io.and_then(|io| io.lines().find_map(|l| l.strip_prefix("read_bytes: ")));
        // A kernel thread has no memory.
        let bytes = |name| kib(status, name).unwrap_or(0);
        Some(Look {
            name: head.split_once('(')?.1.to_owned(),
            minor_faults: field(7)?,
            major_faults: field(9)?,
            read_bytes: read_bytes.and_then(|n| n.trim().parse().ok()),
            resident: bytes("VmRSS:"),
            peak: bytes("VmHWM:"),
            swapped: bytes("VmSwap:"),
            locked: bytes("VmLck:"),
        })
    }
}

/// The `--ram` of a command line. That of `pinscope pin` is for the pages that
/// it keeps, not for the process.
fn ram(cmdline: &[u8], total: u64) -> Option<u64> {
    let line = String::from_utf8_lossy(cmdline);
    if line.split('\0').nth(1) == Some("pin") {
        return None;
    }
    let mut words = line.split('\0');
    let text = words.find_map(|word| match word.strip_prefix("--ram") {
        Some("") => Some(None),
        Some(rest) => rest.strip_prefix('=').map(Some),
        None => None,
    })?;
    parse_ram(text.or_else(|| words.next())?, total).ok()
}

/// GGUF files that the process has open or mapped.
fn models(dir: &Path) -> Vec<PathBuf> {
    let open = fs::read_dir(dir.join("fd")).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = open.filter_map(|fd| fs::read_link(fd.path()).ok()).collect();
    let maps = fs::read_to_string(dir.join("maps")).unwrap_or_default();
    paths.extend(maps.lines().filter_map(|l| l.find('/').map(|at| PathBuf::from(&l[at..]))));
    paths.retain(|p| p.extension().is_some_and(|e| e == "gguf"));
    paths.sort();
    paths.dedup();
    paths
}

impl Cached {
    fn of(path: PathBuf) -> Cached {
        let bytes = fs::metadata(&path).map_or(0, |m| m.len());
        Cached { cached_bytes: cached_bytes(&path, bytes).ok(), bytes, path }
    }
}

/// Bytes of a file that are in the page cache, by looking at mappings of it.
fn cached_bytes(path: &Path, len: u64) -> io::Result<u64> {
    let file = File::open(path)?;
    let mut pages = 0;
    for start in (0..len).step_by(WINDOW as usize) {
        let window = WINDOW.min(len - start) as usize;
        let mut seen = vec![0u8; window.div_ceil(page_size() as usize)];
        // SAFETY: a fresh mapping that is never read, with one byte for each
        // page of it, unmapped at the end.
        let rc = unsafe {
            let fd = file.as_raw_fd();
            let offset = libc::off_t::try_from(start).map_err(io::Error::other)?;
            let base =
                libc::mmap(ptr::null_mut(), window, libc::PROT_READ, libc::MAP_SHARED, fd, offset);
            if base == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let rc = libc::mincore(base, window, seen.as_mut_ptr().cast());
            libc::munmap(base, window);
            rc
        };
        if rc != 0 {
            return Err(io::Error::other("the kernel does not say what is cached"));
        }
        pages += seen.iter().filter(|s| *s & 1 == 1).count() as u64;
    }
    Ok((pages * page_size()).min(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_figures_are_understood_whatever_the_name() {
        let stat = "7 (a (b) c) S 1 7 7 0 -1 4194560 1001 2 30 4 5 6 0";
        let status = "Name:\tx\nVmHWM:\t 9 kB\nVmLck:\t 2 kB\nVmRSS:\t 8 kB\nVmSwap:\t 1 kB\n";
        let want = Look {
            name: "a (b) c".into(),
            minor_faults: 1001,
            major_faults: 30,
            read_bytes: Some(4096),
            resident: 8192,
            peak: 9216,
            swapped: 1024,
            locked: 2048,
        };
        assert_eq!(Look::parse(stat, status, Some("rchar: 1\nread_bytes: 4096\n")), Some(want));
        assert_eq!(Look::parse("7 (x", "", None), None);
    }

    #[test]
    fn name_and_budget_are_read_from_the_command_line() {
        assert_eq!(ram(b"pinscope\0run\0--ram\08G\0", 0), Some(8 << 30));
        assert_eq!(ram(b"pinscope\0run\0--ram=50%\0-m\0x\0", 1000), Some(500));
        assert_eq!(ram(b"llama-cli\0-m\0x\0", 0), None);
        assert_eq!(ram(b"pinscope\0--ram", 0), None);
        assert_eq!(ram(b"pinscope\0pin\0--ram\08G\0", 0), None);
        assert_eq!(program(b"/usr/bin/pinscope\0run\0").as_deref(), Some("pinscope"));
        assert_eq!(program(b""), None);
    }

    #[test]
    fn a_file_just_written_is_cached_and_one_never_read_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        fs::write(&path, vec![1u8; 100_000]).unwrap();
        assert_eq!(cached_bytes(&path, 100_000).unwrap(), 100_000);
        let hole = dir.path().join("hole.gguf");
        File::create(&hole).unwrap().set_len(100_000).unwrap();
        assert_eq!(cached_bytes(&hole, 100_000).unwrap(), 0);
    }

    #[test]
    fn this_process_can_be_watched_and_one_that_is_not_there_cannot() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("open.gguf");
        fs::write(&path, b"GGUF").unwrap();
        let _open = File::open(&path).unwrap();
        let seen = watch(std::process::id(), 0).unwrap();
        assert!(seen.resident_bytes > 0 && seen.peak_bytes >= seen.resident_bytes);
        let path = path.canonicalize().unwrap();
        assert!(seen.models.iter().any(|m| m.path == path && m.bytes == 4));
        assert!(watch(u32::MAX, 0).unwrap_err().contains("--pid"));
    }
}
