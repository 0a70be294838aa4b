//! How fast a model's bytes come from the disk: read as PinScope reads experts,
//! from places all over the files, and in other ways for comparison.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pinscope::arena::Arena;
use pinscope::map::ModelFile;
use pinscope::reader::{
    open_reader, ModelFiles, Places, ReadClass, ReadError, ReadRequest, Reader, ReaderKind,
    ReaderOptions,
};
use serde::Serialize;

use super::machine::kib;

/// Time for each way of reading.
const TIME: Duration = Duration::from_millis(1200);

/// Time in which the arena's memory is taken and the disk wakes up.
const WARM_UP: Duration = Duration::from_millis(400);

/// Bytes of a small read.
const SMALL: usize = 128 << 10;

/// Memory that is read into, bytes.
const ARENA: usize = 64 << 20;

/// Size of the file that is written where there is no model, bytes.
const TEMPORARY: u64 = 256 << 20;

/// A way of reading and what came of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Reading {
    /// Bytes of a read.
    pub chunk: usize,
    /// Reads at once.
    pub depth: usize,
    /// Past the page cache.
    pub direct: bool,
    /// Bytes a second.
    pub rate: f64,
}

/// What was found out about reading.
#[derive(Debug)]
pub struct Disk {
    /// The first one is PinScope's own way.
    pub readings: Vec<Reading>,
    /// Name of the reader that was used.
    pub reader: &'static str,
    /// Why reading is not as it should be.
    pub notes: Vec<String>,
    /// Expert memory that got huge pages, and all that was used, bytes.
    pub huge: (u64, u64),
}

impl Disk {
    /// Bytes a second that PinScope gets.
    pub fn own_rate(&self) -> f64 {
        self.readings.first().map_or(0.0, |r| r.rate)
    }
}

/// Reads `files` in runs of `run` bytes. What is read through the page cache is
/// dropped from it before and after.
///
/// # Errors
/// A file that cannot be read, in words for the user.
pub fn measure(files: &[ModelFile], run: usize) -> Result<Disk, String> {
    let places = Places::new(files.iter().map(|f| f.len), run.min(ARENA / 4))
        .ok_or("the file is too small to measure anything")?;
    let arena = Arc::new(Arena::new(ARENA).map_err(text)?);
    let opened = Arc::new(ModelFiles::open(files).map_err(text)?);
    let plain = open_plain(files).map_err(text)?;
    let own = ReaderOptions::default();
    let mut readings = Vec::new();
    let (mut name, mut notes) = ("", Vec::new());
    for (chunk, depth, time) in [
        (own.chunk, own.depth, WARM_UP),
        (own.chunk, own.depth, TIME),
        (own.chunk, 1, TIME),
        (SMALL, own.depth, TIME),
        (SMALL, 1, TIME),
    ] {
        let options = ReaderOptions { chunk, depth, threads: own.threads.min(depth), ..own };
        let files = Arc::clone(&opened);
        let (mut reader, why) =
            open_reader(files, Arc::clone(&arena), ReaderKind::Auto, options).map_err(text)?;
        let slots = (ARENA / places.run()).min(2 * depth * chunk / places.run() + 2);
        let rate = through_reader(reader.as_mut(), &places, &plain, slots, time).map_err(text)?;
        (name, notes) = (reader.name(), why);
        if time == TIME {
            readings.push(Reading { chunk, depth, direct: true, rate });
        }
    }
    for depth in [own.depth, 1] {
        let rate = through_page_cache(&plain, &places, own.chunk, depth).map_err(text)?;
        readings.push(Reading { chunk: own.chunk, depth, direct: false, rate });
    }
    Ok(Disk { readings, reader: name, notes, huge: huge_bytes(&arena) })
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Bytes a second of PinScope's own reader with `slots` runs under way.
fn through_reader(
    reader: &mut dyn Reader,
    places: &Places,
    plain: &[File],
    slots: usize,
    time: Duration,
) -> Result<f64, ReadError> {
    let start = Instant::now();
    let mut free: Vec<usize> = (0..slots).collect();
    let (mut bytes, mut done) = (0, Vec::new());
    loop {
        while start.elapsed() < time {
            let Some(slot) = free.pop() else { break };
            let (file, offset) = places.next();
            forget(&plain[usize::from(file)], offset, places.run());
            reader.submit(ReadRequest {
                tag: slot as u64,
                file,
                offset,
                len: places.run(),
                dest: slot * places.run(),
                class: ReadClass::Demand,
            })?;
        }
        reader.kick();
        if reader.outstanding() == 0 {
            return Ok(bytes as f64 / start.elapsed().as_secs_f64());
        }
        reader.reap(&mut done, true)?;
        for read in done.drain(..) {
            read.result?;
            bytes += places.run();
            free.push(read.tag as usize);
        }
    }
}

/// Bytes a second of `depth` threads that read as other programs do.
fn through_page_cache(
    files: &[File],
    places: &Places,
    chunk: usize,
    depth: usize,
) -> io::Result<f64> {
    let start = Instant::now();
    let work = || -> io::Result<usize> {
        let mut buffer = vec![0; chunk];
        let mut bytes = 0;
        while start.elapsed() < TIME {
            let (file, offset) = places.next();
            let file = &files[usize::from(file)];
            forget(file, offset, places.run());
            for at in (0..places.run()).step_by(chunk) {
                let piece = &mut buffer[..chunk.min(places.run() - at)];
                file.read_exact_at(piece, offset + at as u64)?;
            }
            forget(file, offset, places.run());
            bytes += places.run();
        }
        Ok(bytes)
    };
    let bytes: io::Result<usize> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..depth).map(|_| scope.spawn(work)).collect();
        let ended = threads.into_iter().map(|t| t.join());
        ended.map(|r| r.unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))).sum()
    });
    Ok(bytes? as f64 / start.elapsed().as_secs_f64())
}

/// Opens the files without read-ahead beyond what is asked for.
fn open_plain(files: &[ModelFile]) -> io::Result<Vec<File>> {
    let open = |file: &ModelFile| {
        let open = File::open(&file.path)?;
        advise(&open, 0, 0, libc::POSIX_FADV_RANDOM);
        Ok(open)
    };
    files.iter().map(open).collect()
}

/// Drops a range from the page cache.
fn forget(file: &File, offset: u64, len: usize) {
    advise(file, offset, len, libc::POSIX_FADV_DONTNEED);
}

/// Best effort: advice that is not taken makes figures a little too good.
fn advise(file: &File, offset: u64, len: usize, advice: libc::c_int) {
    let range = (libc::off_t::try_from(offset), libc::off_t::try_from(len));
    if let (Ok(offset), Ok(len)) = range {
        // SAFETY: a system call on an open descriptor; touches no memory.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, advice) };
    }
}

/// Of the arena's memory that was used: what is in huge pages, and all of it.
fn huge_bytes(arena: &Arena) -> (u64, u64) {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let entry = mapping(&smaps, arena.ptr(0) as u64).unwrap_or_default();
    (kib(entry, "AnonHugePages:").unwrap_or(0), kib(entry, "Rss:").unwrap_or(0))
}

/// The lines about the mapping that has `address`.
fn mapping(smaps: &str, address: u64) -> Option<&str> {
    let mut found = None;
    let mut at = 0;
    for line in smaps.split_inclusive('\n') {
        let range = line.split(' ').next().and_then(|r| r.split_once('-'));
        let number = |text| u64::from_str_radix(text, 16).ok();
        if let Some((start, end)) = range.and_then(|(s, e)| number(s).zip(number(e))) {
            if let Some(start) = found {
                return smaps.get(start..at);
            }
            found = (start..end).contains(&address).then_some(at);
        }
        at += line.len();
    }
    found.and_then(|start| smaps.get(start..))
}

/// A file to read where there is no model, and the folder that it is in: the
/// current one or, where that cannot be written to, the one for temporary
/// files. It has no name, so that nothing is left of it whatever happens.
///
/// # Errors
/// Neither has room.
pub fn temporary() -> io::Result<(File, ModelFile, PathBuf)> {
    let (mut file, folder) = match tempfile::tempfile_in(".") {
        Ok(file) => (file, PathBuf::from(".")),
        Err(_) => (tempfile::tempfile()?, std::env::temp_dir()),
    };
    // Not zeros, which some disks do not store.
    let mut state = 1u64;
    let mut block = Vec::with_capacity(1 << 20);
    while block.len() < 1 << 20 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        block.extend((state >> 32).to_le_bytes());
    }
    for _ in 0..TEMPORARY / block.len() as u64 {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    Ok((file, ModelFile { path, len: TEMPORARY, header_len: 0 }, folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_right_mapping_are_found() {
        let smaps = "1000-3000 rw-p 00000000 00:00 0\nRss: 1 kB\n\
                     3000-4000 rw-p 00000000 00:00 0\nRss: 2 kB\n";
        let rss = |address| kib(mapping(smaps, address)?, "Rss:");
        assert_eq!(rss(0x2fff), Some(1024));
        assert_eq!(rss(0x3000), Some(2048));
        assert_eq!(rss(0x4000), None);
    }
}
