//! The one block of memory that experts live in.
//!
//! Readers write into it through the kernel (in place, no bounce copy), the
//! executor reads from it. It is reserved once and never moves; memory is
//! taken when a page is first read into, or shortly before that.

use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

/// Size and alignment of a huge page on x86-64 and (4 KiB granule) aarch64.
pub const HUGE_PAGE: usize = 2 << 20;

/// How far memory is populated ahead of its use: as much as a prompt's first
/// layers may want, not so much that it delays the loading of the model.
const AHEAD: usize = 1 << 30;

/// Unit in which a reader registers the arena with the kernel.
pub(crate) const REGISTER_UNIT: usize = 64 << 20;

/// What can go wrong with the arena.
#[derive(Debug, Error)]
pub enum ArenaError {
    /// An arena of no bytes, or of more than the address space holds.
    #[error("an arena of {len} bytes is not possible; ask for at least 1 and at most half the address space")]
    Size {
        /// Bytes asked for.
        len: usize,
    },
    /// The kernel gave no address space.
    #[error("cannot reserve {len} bytes for experts: {source}; use a smaller --ram or raise the address space limit (ulimit -v)")]
    Map {
        /// Bytes asked for.
        len: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The memory could not be locked.
    #[error("cannot lock {len} bytes of expert memory (limit RLIMIT_MEMLOCK {limit} bytes): {source}; raise it (ulimit -l) or run unlocked, which only matters when the machine swaps")]
    Lock {
        /// Bytes to lock.
        len: usize,
        /// Soft limit of the process, bytes; `u64::MAX` if unlimited.
        limit: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The memory is registered with the kernel for reading.
    #[error("arena bytes {start}..{end} are registered with an open io_uring reader; close the reader before giving them back")]
    Registered {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
    },
    /// The kernel refused to take memory back.
    #[error("the kernel did not take back arena bytes {start}..{end}: {source}")]
    Release {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Whether the kernel gives arenas transparent huge pages: with pages of 4 KiB
/// a part of an expert is hundreds of entries of the processor's page tables.
pub fn huge_pages() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|s| s.contains("[always]") || s.contains("[madvise]"))
}

/// A private anonymous mapping, aligned to [`HUGE_PAGE`].
///
/// Who may touch which bytes is decided outside: a range that is being read
/// into is touched by nobody else until the reader reports it done.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
    registered: Vec<AtomicBool>,
    /// Units of which a part was released: neither populated nor registered,
    /// which would take the memory again.
    holes: Vec<AtomicBool>,
    /// Memory is to be locked as it is used.
    locked: AtomicBool,
    /// End of what was used so far, bytes.
    used: AtomicUsize,
}

// SAFETY: the arena is plain memory at a fixed address; every access through
// `ptr` or `bytes` is unsafe and carries its own proof.
unsafe impl Send for Arena {}
// SAFETY: as above; the safe methods only read constants or call the kernel.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves `len` bytes, rounded up to whole huge pages. No memory is
    /// taken yet.
    ///
    /// # Errors
    /// [`ArenaError::Size`] for 0 or absurd sizes, [`ArenaError::Map`] if the
    /// kernel has no address space.
    pub fn new(len: usize) -> Result<Arena, ArenaError> {
        if len == 0 || len > isize::MAX as usize / 2 {
            return Err(ArenaError::Size { len });
        }
        let len = len.next_multiple_of(HUGE_PAGE);
        let base = map_aligned(len).map_err(|source| ArenaError::Map { len, source })?;
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
            // Best effort: kernels without huge pages refuse the first. The
            // second keeps a fork from copying pages pinned by io_uring.
            // SAFETY: exactly the mapping made above.
            unsafe { libc::madvise(base.as_ptr().cast(), len, advice) };
        }
        let units = len.div_ceil(REGISTER_UNIT);
        let flags = || (0..units).map(|_| AtomicBool::new(false)).collect();
        Ok(Arena {
            base,
            len,
            registered: flags(),
            holes: flags(),
            locked: AtomicBool::new(false),
            used: AtomicUsize::new(0),
        })
    }

    /// Has the kernel take and clear the memory [`AHEAD`] of its use, by a
    /// thread of the lowest priority, until all is taken or the arena is
    /// dropped.
    ///
    /// Clearing a page is most of the cost of a first read into it, in virtual
    /// machines by far; done here it overlaps with the loading of the model.
    /// Without the thread, or on kernels before 5.14, reads do it themselves.
    pub fn populate_ahead(self: &Arc<Self>) {
        let arena = Arc::downgrade(self);
        let work = move || {
            // SAFETY: changes the priority of this thread (0) alone.
            unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
            let mut at = 0;
            while let Some(arena) = arena.upgrade().filter(|a| at < a.len) {
                if at > arena.used.load(Ordering::Relaxed) + AHEAD {
                    drop(arena);
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                }
                if !arena.has_hole(at / REGISTER_UNIT) {
                    // SAFETY: a whole huge page inside the mapping; populating
                    // leaves the contents of memory that is in use as they are.
                    let rc = unsafe {
                        libc::madvise(arena.ptr(at).cast(), HUGE_PAGE, libc::MADV_POPULATE_WRITE)
                    };
                    if rc != 0 {
                        return;
                    }
                }
                at += HUGE_PAGE;
            }
        };
        // Best effort, see above.
        drop(std::thread::Builder::new().name("arena".into()).spawn(work));
    }

    /// The arena is in use up to `end`, for [`Arena::populate_ahead`].
    pub fn note_use(&self, end: usize) {
        self.used.fetch_max(end, Ordering::Relaxed);
    }

    /// Size, bytes; a multiple of [`HUGE_PAGE`].
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Address of the byte at `offset`. One past the end is allowed.
    ///
    /// # Panics
    /// If `offset` is beyond the end.
    pub fn ptr(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "arena offset {offset} of {} bytes", self.len);
        // SAFETY: within the mapping or one past it.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// The bytes of `range`.
    ///
    /// # Safety
    /// Nobody, the kernel included, writes to the range while the slice lives.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.check(&range);
        // SAFETY: inside the mapping (zero-filled by the kernel until written
        // to); the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.ptr(range.start), range.len()) }
    }

    /// Keeps the pages of `range` in RAM from the moment they are first read
    /// into (so nothing is populated now).
    ///
    /// # Errors
    /// [`ArenaError::Lock`], mostly because of `RLIMIT_MEMLOCK`; the arena
    /// works on unlocked.
    pub fn try_lock(&self, range: Range<usize>) -> Result<(), ArenaError> {
        self.check(&range);
        // SAFETY: inside the mapping; locking changes no contents.
        let rc = unsafe {
            libc::mlock2(
                self.ptr(range.start).cast(),
                range.len(),
                libc::MLOCK_ONFAULT as libc::c_uint,
            )
        };
        if rc == 0 {
            self.locked.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let source = io::Error::last_os_error();
        Err(ArenaError::Lock { len: range.len(), limit: memlock_limit(), source })
    }

    /// Gives the whole pages inside `range` back to the kernel; they read as
    /// zeros afterwards, and are taken again one by one when they are written
    /// to.
    ///
    /// # Errors
    /// [`ArenaError::Registered`] while an io_uring reader has any of them
    /// registered: the kernel would go on writing to the pages given back.
    pub fn release(&self, range: Range<usize>) -> Result<(), ArenaError> {
        self.check(&range);
        let start = range.start.next_multiple_of(crate::reader::ALIGN);
        let end = range.end / crate::reader::ALIGN * crate::reader::ALIGN;
        if start >= end {
            return Ok(());
        }
        let units = start / REGISTER_UNIT..end.div_ceil(REGISTER_UNIT);
        if self.registered[units].iter().any(|r| r.load(Ordering::Acquire)) {
            return Err(ArenaError::Registered { start, end });
        }
        for hole in &self.holes[start / REGISTER_UNIT..end.div_ceil(REGISTER_UNIT)] {
            hole.store(true, Ordering::Release);
        }
        // SAFETY: inside the mapping; the owner of the range asked for it.
        // Locked pages would be kept, and huge pages be put together again.
        let rc = unsafe {
            let at = self.ptr(start).cast();
            libc::munlock(at, end - start);
            libc::madvise(at, end - start, libc::MADV_NOHUGEPAGE);
            libc::madvise(at, end - start, libc::MADV_DONTNEED)
        };
        if rc == 0 {
            return Ok(());
        }
        let source = io::Error::last_os_error();
        Err(ArenaError::Release { start, end, source })
    }

    /// What was released is used again, but for the ranges that
    /// `still_released` lists.
    pub fn reuse(&self, range: Range<usize>, still_released: &[Range<usize>]) {
        self.check(&range);
        for (unit, hole) in self.holes.iter().enumerate() {
            let (start, end) = (unit * REGISTER_UNIT, (unit + 1) * REGISTER_UNIT);
            let still = still_released.iter().any(|r| r.start < end && start < r.end);
            hole.store(still, Ordering::Release);
        }
        let start = range.start.next_multiple_of(HUGE_PAGE).min(range.end);
        // SAFETY: inside the mapping. Huge pages are a wish.
        unsafe {
            libc::madvise(self.ptr(start).cast(), range.end - start, libc::MADV_HUGEPAGE);
        }
        if self.locked.load(Ordering::Relaxed) {
            // The limit allowed as much before.
            let _ = self.try_lock(range);
        }
    }

    /// Whether part of a unit of [`REGISTER_UNIT`] bytes is released.
    pub(crate) fn has_hole(&self, unit: usize) -> bool {
        self.holes[unit].load(Ordering::Acquire)
    }

    /// Notes that a reader registered unit `unit` with the kernel, or no
    /// longer has it registered.
    pub(crate) fn set_registered(&self, unit: usize, registered: bool) {
        self.registered[unit].store(registered, Ordering::Release);
    }

    fn check(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "arena range {range:?} of {} bytes",
            self.len
        );
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`, and its last owner.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Maps `len` bytes at a multiple of [`HUGE_PAGE`]: maps one huge page more
/// and trims both ends.
fn map_aligned(len: usize) -> io::Result<NonNull<u8>> {
    let total = len + HUGE_PAGE;
    // SAFETY: a new private anonymous mapping at an address the kernel picks.
    let raw = unsafe {
        libc::mmap(
            ptr::null_mut(),
            total,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if raw == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let raw: *mut u8 = raw.cast();
    let head = raw.align_offset(HUGE_PAGE);
    // SAFETY: both trimmed parts are page-aligned and inside the new mapping,
    // which nobody knows yet; `head` < HUGE_PAGE keeps `len` bytes between.
    let base = unsafe {
        if head > 0 {
            libc::munmap(raw.cast(), head);
        }
        let base = raw.add(head);
        if head < HUGE_PAGE {
            libc::munmap(base.add(len).cast(), HUGE_PAGE - head);
        }
        base
    };
    NonNull::new(base).ok_or_else(|| io::Error::other("the kernel mapped address 0"))
}

/// The soft `RLIMIT_MEMLOCK`, bytes.
pub(crate) fn memlock_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes one rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    limit.rlim_cur
}

#[cfg(test)]
mod tests;
