//! `pinscope pin` from outside: what the kernel says of its process.

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{assert_refused, folder, make, program, tiny};
use pinscope::map::ExpertMap;
use pinscope::profile::{Profile, ProfiledModel, RoutingCounts};
use pinscope_ggml::read_map;
use serde_json::Value;
use tempfile::TempDir;

const PAGE: u64 = 4096;

/// A page of one of a model's files.
type Page = (usize, u64);

/// A running `pinscope pin` that has said that it is ready.
struct Daemon {
    child: Child,
    report: Value,
}

impl Daemon {
    fn start(mut command: Command) -> Daemon {
        let mut child =
            command.arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let report = serde_json::from_str(&line).unwrap_or_else(|e| {
            let mut text = String::new();
            child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
            panic!("{e}: {text}")
        });
        Daemon { child, report }
    }

    fn number(&self, name: &str) -> u64 {
        self.report.pointer(name).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {name}"))
    }

    /// Sends a signal and returns the exit code.
    fn stop(mut self, signal: libc::c_int) -> Option<i32> {
        // SAFETY: signals our own child, which has not been waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
        self.child.wait().unwrap().code()
    }

    /// Pages of `map`'s files that the process has locked, from the kernel.
    fn locked(&self, map: &ExpertMap) -> BTreeSet<Page> {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", self.child.id())).unwrap();
        let names: Vec<_> = map.files().iter().map(|f| f.path.canonicalize().unwrap()).collect();
        let mut pages = BTreeSet::new();
        let (mut file, mut range, mut locked) = (None, 0..0, 0);
        for line in smaps.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match (words[0], file) {
                ("Locked:", Some(_)) => locked = words[1].parse::<u64>().unwrap() * 1024,
                ("VmFlags:", Some(file)) if words.contains(&"lo") => {
                    assert_eq!(locked, range.end - range.start, "locked in part: {range:?}");
                    pages.extend((range.start / PAGE..range.end / PAGE).map(|page| (file, page)));
                }
                (head, _) if !head.ends_with(':') => {
                    let path = words.last().unwrap();
                    file = names.iter().position(|n| n.to_str() == Some(path));
                    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
                    let (start, end) = head.split_once('-').unwrap();
                    range = hex(words[2])..hex(words[2]) + hex(end) - hex(start);
                }
                _ => {}
            }
        }
        pages
    }
}

/// `pinscope pin -m MODEL ARGUMENTS` with a runtime folder of its own.
fn pin(model: &Path, runtime: &TempDir, arguments: &[&str]) -> Command {
    let model = model.to_str().unwrap();
    let mut command = program(&[&["pin", "-m", model], arguments].concat());
    command.env("XDG_RUNTIME_DIR", runtime.path());
    command
}

/// Adverts left in the runtime folder.
fn adverts(runtime: &TempDir) -> usize {
    fs::read_dir(runtime.path().join("pinscope")).unwrap().count()
}

/// A profile in which these experts (`layer * experts + expert`) are the only
/// ones used, the first one most.
fn profile(map: &ExpertMap, hottest: &[usize]) -> tempfile::NamedTempFile {
    let model = ProfiledModel::of(map).unwrap();
    let mut counts = RoutingCounts::new(model.experts());
    counts.decode.tokens = 100.0;
    for (rank, &expert) in hottest.iter().enumerate() {
        counts.decode.chosen[expert] = 90.0 - rank as f64;
    }
    let mut profile = Profile::new(model);
    profile.record(&counts);
    let file = tempfile::NamedTempFile::new_in(folder()).unwrap();
    profile.save(file.path()).unwrap();
    file
}

/// Pages of `len` bytes at `offset`, byte by byte.
fn pages_of(file: u16, offset: u64, len: u64) -> impl Iterator<Item = Page> {
    (offset..offset + len).map(move |byte| (usize::from(file), byte / PAGE))
}

/// Pages of all dense tensors and of these experts, while they fit in `budget`.
fn expected(map: &ExpertMap, hottest: &[usize], budget: u64) -> (BTreeSet<Page>, usize) {
    let mut pages: BTreeSet<Page> =
        map.dense_tensors().flat_map(|t| pages_of(t.file, t.offset, t.size)).collect();
    let mut fitted = 0;
    for &id in hottest {
        let layer = &map.layers()[id / map.experts_per_layer() as usize];
        let expert = id as u64 % u64::from(map.experts_per_layer());
        let mut with = pages.clone();
        for part in &layer.parts {
            with.extend(pages_of(part.file, part.offset + expert * part.bytes, part.bytes));
        }
        if with.len() as u64 * PAGE <= budget {
            pages = with;
            fitted += 1;
        }
    }
    (pages, fitted)
}

/// Pages that are cached although the kernel was asked to drop all of them.
fn stuck(map: &ExpertMap) -> BTreeSet<Page> {
    let mut pages = BTreeSet::new();
    for (number, file) in map.files().iter().enumerate() {
        let open = File::open(&file.path).unwrap();
        open.sync_all().unwrap();
        let mut seen = vec![0u8; file.len.div_ceil(PAGE) as usize];
        let (len, fd) = (file.len as usize, open.as_raw_fd());
        // SAFETY: a fresh mapping, one byte for each page of it, then unmapped.
        unsafe {
            libc::posix_fadvise(fd, 0, 0, libc::POSIX_FADV_DONTNEED);
            let base =
                libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
            assert_ne!(base, libc::MAP_FAILED);
            assert_eq!(libc::mincore(base, len, seen.as_mut_ptr().cast()), 0);
            libc::munmap(base, len);
        }
        pages.extend((0..).zip(seen).filter(|(_, s)| s & 1 == 1).map(|(page, _)| (number, page)));
    }
    pages
}

/// Every third expert, from the last one on.
fn some_experts(map: &ExpertMap) -> Vec<usize> {
    (0..map.expert_count() as usize).rev().step_by(3).collect()
}

#[test]
fn dense_tensors_and_the_hottest_experts_are_locked_page_by_page_until_the_end() {
    // Files of their own: other tests pin the common one meanwhile.
    for (shape, parts) in [("tiny-qwen3moe", 1), ("tiny-mixtral", 3)] {
        let model = make(shape, parts, &folder().join(format!("pin-{shape}.gguf")));
        let map = read_map(&model).unwrap();
        let hottest = some_experts(&map);
        // Room for about half of them; below what an ordinary user may lock.
        let dense = expected(&map, &[], u64::MAX).0.len() as u64 * PAGE;
        let wish = expected(&map, &hottest, u64::MAX).0.len() as u64 * PAGE;
        let mib = (dense + (wish - dense) / 2) >> 20;
        // Experts that the profile never saw may fill a gap, as the file has them.
        let rest = (0..map.expert_count() as usize).filter(|e| !hottest.contains(e));
        let order: Vec<usize> = hottest.iter().copied().chain(rest).collect();
        let (pages, fitted) = expected(&map, &order, mib << 20);
        assert!(fitted > 0 && fitted < hottest.len(), "{fitted} of {}", hottest.len());

        let profile = profile(&map, &hottest);
        let path = profile.path().to_str().unwrap();
        let ram = format!("{mib}M");
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            let runtime = tempfile::tempdir().unwrap();
            let droppable = stuck(&map).is_empty();
            let daemon = Daemon::start(pin(&model, &runtime, &["--profile", path, "--ram", &ram]));
            assert_eq!(daemon.locked(&map), pages);
            assert_eq!(daemon.number("/locked_bytes"), pages.len() as u64 * PAGE);
            assert_eq!(daemon.number("/experts_locked"), fitted as u64);
            assert!(stuck(&map).is_superset(&pages));
            assert_eq!(adverts(&runtime), 1);

            assert_eq!(daemon.stop(signal), Some(0));
            if droppable {
                assert!(stuck(&map).is_empty());
            } else {
                eprintln!("not looked at: what is cached on a file system in memory");
            }
            assert_eq!(adverts(&runtime), 0);
        }
    }
}

#[test]
fn without_a_profile_exactly_the_dense_tensors_are_locked() {
    let map = read_map(tiny()).unwrap();
    let runtime = tempfile::tempdir().unwrap();
    let (pages, _) = expected(&map, &[], u64::MAX);
    let ram = format!("{}M", (pages.len() as u64 * PAGE).div_ceil(1 << 20) + 1);
    let daemon = Daemon::start(pin(tiny(), &runtime, &["--ram", &ram]));
    assert_eq!(daemon.locked(&map), pages);
    assert!(daemon.report["notes"][0].as_str().unwrap().contains("--profile"));
    assert_eq!(daemon.stop(libc::SIGTERM), Some(0));
}

#[test]
fn a_second_daemon_is_refused_and_a_killed_one_is_not_in_the_way() {
    let runtime = tempfile::tempdir().unwrap();
    let start = || pin(tiny(), &runtime, &["--ram", "4M"]);
    let first = Daemon::start(start());
    let pid = format!("process {}", first.child.id());
    assert_refused(&start().output().unwrap(), &[&pid, "already"]);
    assert_eq!(first.stop(libc::SIGKILL), None);
    assert_eq!(adverts(&runtime), 1);
    let second = Daemon::start(start());
    assert_eq!(second.stop(libc::SIGTERM), Some(0));
    assert_eq!(adverts(&runtime), 0);
}

/// Lets the program lock `bytes` at most, whoever runs it.
fn with_limit(mut command: Command, bytes: u64) -> Command {
    const CAP_IPC_LOCK: libc::c_ulong = 14;
    // SAFETY: two system calls on values, between fork and exec.
    unsafe {
        command.pre_exec(move || {
            // The superuser's next program gets no more than the bounding set.
            // Others may not do this and need not.
            libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0);
            let limit = libc::rlimit { rlim_cur: bytes / 2, rlim_max: bytes };
            match libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    command
}

#[test]
fn under_a_low_limit_the_hottest_that_may_be_is_locked_and_the_rest_can_be_warmed() {
    let map = read_map(tiny()).unwrap();
    let hottest = some_experts(&map);
    let (dense, _) = expected(&map, &[], u64::MAX);
    let profile = profile(&map, &hottest);
    let path = profile.path().to_str().unwrap();
    // The dense tensors and a few experts; the soft limit, half of it, is not enough.
    let limit = dense.len() as u64 * PAGE + (1 << 20);
    let (pages, fitted) = expected(&map, &hottest, limit);
    assert!(fitted > 0 && fitted < hottest.len());

    let runtime = tempfile::tempdir().unwrap();
    stuck(&map);
    let arguments = ["--profile", path, "--ram", "1G", "--warm"];
    let daemon = Daemon::start(with_limit(pin(tiny(), &runtime, &arguments), limit));
    if daemon.report["lockable_bytes"].is_null() {
        eprintln!("skipped: this user's right to lock memory cannot be taken away");
        return;
    }
    assert_eq!(daemon.number("/lockable_bytes"), limit);
    let locked = daemon.locked(&map);
    assert!(locked.is_superset(&pages) && locked.len() as u64 * PAGE <= limit);
    assert_eq!(daemon.number("/experts_locked") + daemon.number("/warm_experts"), 128);
    let note = daemon.report["notes"][0].as_str().unwrap();
    for how in ["ulimit -l", "limits.conf", "LimitMEMLOCK", "CAP_IPC_LOCK"] {
        assert!(note.contains(how), "{note}");
    }
    assert_eq!(daemon.stop(libc::SIGTERM), Some(0));

    let refused = with_limit(pin(tiny(), &runtime, &["--ram", "1G"]), 0).output().unwrap();
    assert_refused(&refused, &["nothing can be locked", "ulimit -l"]);
}

#[test]
fn a_profile_of_another_model_is_refused() {
    let other = make("tiny-mixtral", 1, &folder().join("pin-other.gguf"));
    let profile = profile(&read_map(&other).unwrap(), &[1]);
    let runtime = tempfile::tempdir().unwrap();
    let path = profile.path().to_str().unwrap();
    let output = pin(tiny(), &runtime, &["--ram", "1G", "--profile", path]).output().unwrap();
    assert_refused(&output, &["pin-other.gguf", "tiny.gguf"]);
}
