//! What the kernel says is locked, against what was asked for.

use std::fs;

use super::*;
use crate::arena::HUGE_PAGE;

const PAGE: u64 = 4096;

/// A file on disk, of which nothing is cached.
struct Fixture {
    model: ModelFile,
    _dir: tempfile::TempDir,
}

impl Fixture {
    fn new(len: usize) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        fs::write(&path, vec![1u8; len]).unwrap();
        let model = ModelFile { path, len: len as u64, header_len: 0 };
        drop_cached(&model.path);
        Fixture { model, _dir: dir }
    }

    fn lock(&self, ranges: &[Range<u64>]) -> Result<LockedRanges, LockError> {
        let files = std::slice::from_ref(&self.model);
        LockedRanges::lock(files, &vec![ranges.to_vec()], &mut |_| true)
    }
}

fn drop_cached(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    // SAFETY: the descriptor is open.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// Byte ranges of the file at `path` that this process has mapped and locked
/// (flag `lo`), each with what the kernel counts as locked in it.
fn locked(path: &Path) -> Vec<(Range<u64>, u64)> {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut found: Vec<(Range<u64>, u64)> = Vec::new();
    let (mut ours, mut now) = (false, (0..0, 0));
    for line in smaps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[0] {
            "Locked:" => now.1 = words[1].parse::<u64>().unwrap() * 1024,
            "VmFlags:" if ours && words.contains(&"lo") => found.push(now.clone()),
            head if !head.ends_with(':') => {
                ours = words.last() == path.to_str().as_ref();
                let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
                let (start, end) = head.split_once('-').unwrap();
                let offset = hex(words[2]);
                now = (offset..offset + hex(end) - hex(start), 0);
            }
            _ => {}
        }
    }
    found.sort_by_key(|(range, _)| range.start);
    found
}

/// Numbers of the pages of the file that are in the page cache, seen through
/// a mapping of its own.
fn cached(path: &Path) -> Vec<u64> {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    let mapping = Mapping::new(&file, &(0..len)).unwrap();
    let mut seen = vec![0u8; len.div_ceil(PAGE) as usize];
    // SAFETY: one byte for each page of the mapping.
    let rc = unsafe { libc::mincore(mapping.base.as_ptr(), mapping.len, seen.as_mut_ptr()) };
    assert_eq!(rc, 0);
    (0..).zip(seen).filter(|(_, s)| s & 1 == 1).map(|(page, _)| page).collect()
}

/// As much as an ordinary user may lock.
const SMALL: u64 = 40 * PAGE;

#[test]
fn exactly_the_wanted_pages_are_locked_and_none_after_that() {
    let file = Fixture::new(16 << 20);
    let path = &file.model.path;
    let droppable = cached(path).is_empty();
    let end = 16 << 20;
    let wanted = [0..3 * PAGE, 8 * PAGE..9 * PAGE, 8 << 20..(8 << 20) + SMALL / 2];
    let ranges = [wanted[0].clone(), wanted[1].clone(), wanted[2].clone(), end - PAGE..end];
    let lock = file.lock(&ranges).unwrap();
    let want: Vec<_> = ranges.iter().map(|r| (r.clone(), r.end - r.start)).collect();
    assert_eq!(locked(path), want);

    drop_cached(path);
    let cached_now = cached(path);
    if !droppable {
        eprintln!("only smaps was looked at: this file system keeps everything in memory");
        return;
    }
    let pages: Vec<u64> = ranges.iter().flat_map(|r| r.start / PAGE..r.end / PAGE).collect();
    assert!(pages.iter().all(|p| cached_now.contains(p)), "{cached_now:?}");
    // The kernel caches in units of at most a huge page.
    let near = |p: u64| pages.iter().any(|q| p.abs_diff(*q) < HUGE_PAGE as u64 / PAGE);
    assert!(cached_now.iter().all(|&p| near(p)), "{cached_now:?}");

    drop(lock);
    assert!(locked(path).is_empty());
    drop_cached(path);
    assert!(cached(path).is_empty());
}

#[test]
fn a_last_page_that_the_file_fills_in_part_is_locked() {
    let file = Fixture::new(5 * PAGE as usize + 1);
    let _lock = file.lock(std::slice::from_ref(&(4 * PAGE..6 * PAGE))).unwrap();
    assert_eq!(locked(&file.model.path), [(4 * PAGE..6 * PAGE, 2 * PAGE)]);
}

#[test]
fn a_file_that_became_shorter_is_an_error_and_nothing_stays_locked() {
    let file = Fixture::new(16 * PAGE as usize);
    let path = &file.model.path;
    let shorten =
        |len| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
    // Cut after the first of two ranges was locked.
    let ranges = vec![vec![0..PAGE, 12 * PAGE..13 * PAGE]];
    let files = std::slice::from_ref(&file.model);
    let mut heard = Vec::new();
    let result = LockedRanges::lock(files, &ranges, &mut |bytes| {
        heard.push(bytes);
        shorten(4 * PAGE);
        true
    });
    assert!(matches!(&result, Err(LockError::Lock { locked: PAGE, .. })), "{result:?}");
    assert_eq!(heard, [PAGE]);
    assert!(locked(path).is_empty());
    let result = file.lock(std::slice::from_ref(&(0..PAGE)));
    assert!(matches!(&result, Err(LockError::Changed { found, .. }) if *found == 4 * PAGE));
}

#[test]
fn locking_stops_when_told_to() {
    let file = Fixture::new(16 * PAGE as usize);
    let ranges = vec![vec![0..PAGE, 2 * PAGE..3 * PAGE]];
    let files = std::slice::from_ref(&file.model);
    let result = LockedRanges::lock(files, &ranges, &mut |_| false);
    assert!(matches!(result, Err(LockError::Stopped)));
    assert!(locked(&file.model.path).is_empty());
}

#[test]
fn read_ahead_fills_the_page_cache_and_locks_nothing() {
    let file = Fixture::new(16 << 20);
    let files = std::slice::from_ref(&file.model);
    let mut heard = 0;
    read_ahead(files, &vec![vec![0..PAGE, 1 << 20..3 << 20]], &mut |bytes| {
        heard = bytes;
        true
    })
    .unwrap();
    assert_eq!(heard, PAGE + (2 << 20));
    assert!(locked(&file.model.path).is_empty());
    let wanted: Vec<u64> = (0..1).chain((1 << 20) / PAGE..(3 << 20) / PAGE).collect();
    // The last reads may still be on their way.
    let all_there = || {
        let cached = cached(&file.model.path);
        wanted.iter().all(|p| cached.contains(p))
    };
    let tries = (0..500).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        all_there()
    });
    assert!(tries, "{:?}", cached(&file.model.path));
}
