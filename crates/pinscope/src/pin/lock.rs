//! Keeping page ranges of files in the page cache, for every program.
//!
//! A read-only shared mapping has the page cache's own pages, and locking it
//! keeps them there. The mapping is never read or written here: a file that
//! becomes shorter shows as an error of `mlock`, not as a signal.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

use thiserror::Error;

use super::ranges::FileRanges;
use crate::map::ModelFile;
use crate::memory::format_bytes;

/// Bytes that are locked at a time; as many are read ahead meanwhile.
const PIECE: u64 = 64 << 20;

/// What kept pages from being locked. Nothing stays locked then.
#[derive(Debug, Error)]
pub enum LockError {
    /// A file cannot be opened.
    #[error("cannot open model file {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file is not as long as it was.
    #[error("model file {} had {expected} bytes when its header was read and has {found} now; leave the file alone and start again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its length when the header was read, bytes.
        expected: u64,
        /// Its length now, bytes.
        found: u64,
    },
    /// The kernel does not map a range.
    #[error("cannot map bytes {start} to {end} of {}: {source}; if memory is not short, the limit on mappings may be (sysctl vm.max_map_count; {ranges} are needed), so ask for fewer experts with a smaller --ram", path.display())]
    Map {
        /// The file.
        path: PathBuf,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Mappings needed in all.
        ranges: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel does not lock a range.
    #[error("cannot lock bytes {start} to {end} of {}, after {}: {source}; either memory is short (use a smaller --ram), or the limit on locked memory is (ulimit -l), or the file was cut short or cannot be read", path.display(), format_bytes(*locked))]
    Lock {
        /// The file.
        path: PathBuf,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// What was locked before, bytes.
        locked: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The caller's callback said so.
    #[error("stopped")]
    Stopped,
}

/// Pages that stay in memory until this is dropped.
#[derive(Debug)]
pub struct LockedRanges {
    mappings: Vec<Mapping>,
}

impl LockedRanges {
    /// Locks `ranges` (whole pages) of `files`, in the order of the files, and
    /// so reads what is not cached. `progress` hears how many bytes are locked
    /// and says whether to go on.
    ///
    /// # Errors
    /// See [`LockError`].
    pub fn lock(
        files: &[ModelFile],
        ranges: &FileRanges,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<LockedRanges, LockError> {
        let count = ranges.iter().map(Vec::len).sum();
        let mut locked = LockedRanges { mappings: Vec::with_capacity(count) };
        let mut owners = Vec::with_capacity(count);
        for (file, ranges) in files.iter().zip(ranges) {
            let open = open(file)?;
            for range in ranges {
                let mapping = Mapping::new(&open, range).map_err(|source| LockError::Map {
                    path: file.path.clone(),
                    start: range.start,
                    end: range.end,
                    ranges: count,
                    source,
                })?;
                locked.mappings.push(mapping);
                owners.push((file.path.as_path(), range.start));
            }
        }
        locked.lock_mapped(&owners, progress)?;
        Ok(locked)
    }

    /// `owners` has the file and the first byte of every mapping.
    fn lock_mapped(
        &self,
        owners: &[(&Path, u64)],
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), LockError> {
        let pieces = || self.mappings.iter().zip(owners).flat_map(|(m, &o)| m.pieces(o));
        // The same pieces, a window ahead.
        let mut ahead = pieces();
        let (mut advised, mut locked) = (0, 0);
        for piece in pieces() {
            while advised < locked + 2 * PIECE {
                let Some(next) = ahead.next() else { break };
                next.advise();
                advised += next.len as u64;
            }
            piece.lock().map_err(|source| LockError::Lock {
                path: piece.path.to_owned(),
                start: piece.offset,
                end: piece.offset + piece.len as u64,
                locked,
                source,
            })?;
            locked += piece.len as u64;
            if !progress(locked) {
                return Err(LockError::Stopped);
            }
        }
        Ok(())
    }
}

/// Has the kernel read `ranges` of `files` into the page cache, without
/// keeping them there, and without waiting for the last of them.
/// `progress` as for [`LockedRanges::lock`].
///
/// # Errors
/// [`LockError::Open`], [`LockError::Changed`], [`LockError::Stopped`]. A
/// kernel that does not take the hint costs time later and is no error.
pub fn read_ahead(
    files: &[ModelFile],
    ranges: &FileRanges,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<(), LockError> {
    let mut done = 0;
    for (file, ranges) in files.iter().zip(ranges) {
        let open = open(file)?;
        for range in ranges {
            for start in range.clone().step_by(PIECE as usize) {
                let len = PIECE.min(range.end - start);
                // SAFETY: a hint on an open descriptor; touches no memory.
                unsafe {
                    libc::readahead(open.as_raw_fd(), start as libc::off64_t, len as usize);
                }
                done += len;
                if !progress(done) {
                    return Err(LockError::Stopped);
                }
            }
        }
    }
    Ok(())
}

fn open(file: &ModelFile) -> Result<File, LockError> {
    let fail = |source| LockError::Open { path: file.path.clone(), source };
    let open = File::open(&file.path).map_err(fail)?;
    let found = open.metadata().map_err(fail)?.len();
    if found != file.len {
        return Err(LockError::Changed { path: file.path.clone(), expected: file.len, found });
    }
    Ok(open)
}

/// A read-only shared mapping of a page range, which nothing ever reads.
#[derive(Debug)]
struct Mapping {
    base: NonNull<libc::c_void>,
    len: usize,
}

// SAFETY: the mapping is only an address range for the kernel; nothing here
// reads or writes through it.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(file: &File, range: &Range<u64>) -> io::Result<Mapping> {
        let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
        let offset = libc::off_t::try_from(range.start).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address that the kernel picks.
        let base = unsafe {
            let fd = file.as_raw_fd();
            libc::mmap(ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, offset)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Mapping { base, len })
    }

    /// Cuts the mapping, which begins at byte `owner.1` of file `owner.0`.
    fn pieces<'a>(&self, owner: (&'a Path, u64)) -> impl Iterator<Item = Piece<'a>> {
        let (base, len) = (self.base.as_ptr() as usize, self.len);
        (0..len).step_by(PIECE as usize).map(move |at| Piece {
            path: owner.0,
            offset: owner.1 + at as u64,
            address: base + at,
            len: (PIECE as usize).min(len - at),
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; unmapping unlocks it too.
        unsafe { libc::munmap(self.base.as_ptr(), self.len) };
    }
}

/// Some whole pages of a mapping.
struct Piece<'a> {
    path: &'a Path,
    /// In the file, bytes.
    offset: u64,
    address: usize,
    len: usize,
}

impl Piece<'_> {
    /// Best effort: without it, locking reads more slowly.
    fn advise(&self) {
        // SAFETY: inside a mapping of ours; starts reads, touches nothing.
        unsafe { libc::madvise(self.address as *mut _, self.len, libc::MADV_WILLNEED) };
    }

    fn lock(&self) -> io::Result<()> {
        // SAFETY: inside a mapping of ours; locking changes no contents.
        match unsafe { libc::mlock(self.address as *const _, self.len) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests;
