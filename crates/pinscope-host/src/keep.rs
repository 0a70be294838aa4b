//! Keeping the dense weights of a mapped model in RAM.
//!
//! llama.cpp can lock a model only as a whole, experts included. Here the
//! ranges that matter are found in the process's own mappings of the file, read
//! in large pieces, and locked where the system allows it.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const PAGE: u64 = 4096;

/// What became of the ranges, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kept {
    /// Read into memory.
    pub resident: u64,
    /// Of those, locked: the kernel may not drop them.
    pub locked: u64,
}

/// Reads `ranges` (bytes of the file at `path`) through the mappings that this
/// process has of it, and locks them. Ranges that are not mapped are skipped: a
/// loader that copied them needs no mapping.
///
/// Locking is refused where `RLIMIT_MEMLOCK` is low; the ranges are then in RAM
/// all the same, but may be dropped when memory is short. Compare the two
/// figures of the result.
///
/// # Errors
/// The file or `/proc/self/maps` cannot be read, or a range cannot (an I/O
/// error of the disk).
pub fn keep_in_ram(path: &Path, ranges: &[Range<u64>]) -> io::Result<Kept> {
    let inode = fs::metadata(path)?.ino();
    let maps = fs::read_to_string("/proc/self/maps")?;
    let mut pieces = Vec::new();
    for mapping in maps.lines().filter_map(parse_mapping).filter(|m| m.inode == inode) {
        pieces.extend(ranges.iter().filter_map(|range| mapping.piece(range)));
    }
    // All reads are started before the first is waited for.
    for piece in &pieces {
        advise(piece, libc::MADV_WILLNEED)?;
    }
    let mut kept = Kept::default();
    for piece in &pieces {
        let len = piece.end - piece.start;
        // SAFETY: locking changes no contents, and the pages are mapped.
        if unsafe { libc::mlock(piece.start as *const _, len) } == 0 {
            kept.locked += len as u64;
        } else {
            advise(piece, libc::MADV_POPULATE_READ)?;
        }
        kept.resident += len as u64;
    }
    Ok(kept)
}

fn advise(piece: &Range<usize>, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: both kinds of advice leave the contents as they are; a wrong
    // address is refused by the kernel.
    let rc = unsafe { libc::madvise(piece.start as *mut _, piece.end - piece.start, advice) };
    let error = io::Error::last_os_error();
    // Kernels before 5.14 do not know POPULATE_READ: read when used.
    if rc == 0 || error.raw_os_error() == Some(libc::EINVAL) {
        return Ok(());
    }
    Err(error)
}

/// A line of `/proc/self/maps`.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    addr: Range<u64>,
    offset: u64,
    inode: u64,
}

impl Mapping {
    /// Addresses of the whole pages of a range of the file, as far as mapped.
    fn piece(&self, range: &Range<u64>) -> Option<Range<usize>> {
        let mapped = self.offset..self.offset + (self.addr.end - self.addr.start);
        let start = (range.start / PAGE * PAGE).max(mapped.start);
        let end = range.end.next_multiple_of(PAGE).min(mapped.end);
        let at = |offset: u64| (self.addr.start + (offset - self.offset)) as usize;
        (start < end).then(|| at(start)..at(end))
    }
}

/// `addr-addr perms offset dev inode path`, the first two and the third in hex.
fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let offset = fields.nth(1)?;
    let inode = fields.nth(1)?;
    Some(Mapping { addr: hex(start)?..hex(end)?, offset: hex(offset)?, inode: inode.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_mapping_is_parsed_and_cut_to_whole_pages() {
        let line = "7f0000000000-7f0000010000 r--s 00002000 08:01 77   /m (deleted) x.gguf";
        let mapping = parse_mapping(line).unwrap();
        assert_eq!(mapping.inode, 77);
        // File bytes 0x2000..0x12000 are mapped.
        let piece = |range| mapping.piece(&range);
        assert_eq!(piece(0x2001..0x3001), Some(0x7f00_0000_0000..0x7f00_0000_2000));
        assert_eq!(piece(0..0x3000), Some(0x7f00_0000_0000..0x7f00_0000_1000));
        assert_eq!(piece(0x11000..0x99000), Some(0x7f00_0000_f000..0x7f00_0001_0000));
        assert_eq!(piece(0..0x2000), None);
        assert_eq!(parse_mapping("nonsense"), None);
    }

    #[test]
    fn exactly_the_wanted_pages_of_a_mapped_file_become_resident() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![1u8; 64 * PAGE as usize]).unwrap();
        file.as_file().sync_all().unwrap();
        let len = 64 * PAGE as usize;
        // SAFETY: a fresh read-only mapping, removed below.
        let addr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_file().as_raw_fd(),
                0,
            )
        };
        assert_ne!(addr, libc::MAP_FAILED);
        let range = 8 * PAGE..12 * PAGE;
        let kept = keep_in_ram(file.path(), &[range, 70 * PAGE..80 * PAGE]).unwrap();
        assert_eq!(kept.resident, 4 * PAGE);
        assert!(kept.locked == 0 || kept.locked == kept.resident);
        let rss = rss_kib(addr as usize);
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(addr, len) };
        assert_eq!(rss, 16);
    }

    fn rss_kib(start: usize) -> u64 {
        // Locking may have split the mapping: sum what lies in its 64 pages.
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        let mut sum = 0;
        for line in smaps.lines() {
            if let Some((addr, _)) = line.split_once('-') {
                if let Ok(addr) = usize::from_str_radix(addr, 16) {
                    inside = (start..start + 64 * PAGE as usize).contains(&addr);
                }
            }
            if let Some(kib) = line.strip_prefix("Rss:").filter(|_| inside) {
                sum += kib.split_whitespace().next().unwrap().parse::<u64>().unwrap();
            }
        }
        sum
    }
}
