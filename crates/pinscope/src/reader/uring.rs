//! Reading with io_uring: no threads of our own, registered files and memory,
//! completions collected without a system call.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use io_uring::{opcode, squeue, types, IoUring};

use super::queue::{Chunk, WorkQueue};
use super::{
    check_request, Busy, ModelFiles, ReadDone, ReadError, ReadRequest, Reader, ReaderOptions,
};
use crate::arena::{memlock_limit, Arena, REGISTER_UNIT};

const NAME: &str = "io_uring";
/// Reads at once, at most: what tuning may find best.
const DEPTH: usize = 64;

/// See the module.
pub(super) struct UringReader {
    ring: IoUring,
    files: Arc<ModelFiles>,
    arena: Arc<Arena>,
    queue: WorkQueue,
    memory: Registered,
    /// What the kernel has, by the number it was given.
    flying: Vec<Option<Chunk>>,
    free: Vec<u32>,
    /// Over, and not given back yet.
    early: Vec<ReadDone>,
    outstanding: usize,
}

/// Which units of the arena are registered with the ring, so that the kernel
/// need not look up their pages for every read.
struct Registered {
    units: Vec<bool>,
    /// Cleared when the kernel refuses one (`RLIMIT_MEMLOCK`, old kernels).
    more: bool,
}

impl UringReader {
    pub fn open(
        files: Arc<ModelFiles>,
        arena: Arc<Arena>,
        options: ReaderOptions,
        notes: &mut Vec<String>,
    ) -> Result<Self, ReadError> {
        // Demand finds room beside as many prefetches.
        let entries = 2 * DEPTH;
        let unavailable = |source: io::Error| {
            ReadError::Unavailable {
            reader: NAME,
            hint: match source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => {
                    " (forbidden by a container's seccomp filter or by sysctl kernel.io_uring_disabled)"
                }
                Some(libc::ENOSYS) => " (this kernel has none)",
                _ => "",
            },
            source,
        }
        };
        let ring = IoUring::new(entries as u32).map_err(unavailable)?;
        ring.submitter().register_files(&files.fds()).map_err(unavailable)?;
        let units = arena.len().div_ceil(REGISTER_UNIT);
        let table = ring.submitter().register_buffers_sparse(units as u32);
        let mut reader = UringReader {
            ring,
            files,
            arena,
            queue: WorkQueue::new(options, DEPTH, DEPTH),
            memory: Registered { units: vec![false; units], more: true },
            flying: vec![None; entries],
            free: (0..entries as u32).rev().collect(),
            early: Vec::with_capacity(entries),
            outstanding: 0,
        };
        // The first unit now, to learn whether it works at all.
        if let Err(e) = table.and_then(|()| reader.register(0)) {
            reader.memory.more = false;
            notes.push(format!(
                "expert memory is not registered with io_uring ({e}; RLIMIT_MEMLOCK is {} bytes), so reads cost a little more CPU",
                memlock_limit()
            ));
        }
        Ok(reader)
    }

    /// Registers one unit of the arena.
    fn register(&mut self, unit: usize) -> io::Result<()> {
        let start = unit * REGISTER_UNIT;
        let len = REGISTER_UNIT.min(self.arena.len() - start);
        let iov = libc::iovec { iov_base: self.arena.ptr(start).cast(), iov_len: len };
        // SAFETY: the memory is the arena's, which this reader keeps alive
        // longer than the ring (see `drop`) and which refuses to release
        // registered units.
        unsafe {
            self.ring.submitter().register_buffers_update(unit as u32, &[iov], None)?;
        }
        self.memory.units[unit] = true;
        self.arena.set_registered(unit, true);
        Ok(())
    }

    fn is_registered(&mut self, unit: usize) -> bool {
        if !self.memory.units[unit] && self.memory.more && !self.arena.has_hole(unit) {
            self.memory.more = self.register(unit).is_ok();
        }
        self.memory.units[unit]
    }

    fn entry(&mut self, chunk: &Chunk) -> squeue::Entry {
        let file = types::Fixed(u32::from(chunk.file));
        let ptr = self.arena.ptr(chunk.dest);
        let len = chunk.len as u32;
        let unit = chunk.dest / REGISTER_UNIT;
        if self.is_registered(unit) {
            opcode::ReadFixed::new(file, ptr, len, unit as u16).offset(chunk.offset).build()
        } else {
            opcode::Read::new(file, ptr, len).offset(chunk.offset).build()
        }
    }

    /// Puts queued chunks into the submission queue, as many as may be in
    /// flight.
    fn fill(&mut self) {
        if self.queue.is_idle() {
            return;
        }
        let now = Instant::now();
        while let Some(chunk) = self.queue.pop(now) {
            // At most `2 * DEPTH` are handed out: there is a free number.
            let Some(number) = self.free.pop() else { return };
            let entry = self.entry(&chunk).user_data(u64::from(number));
            self.flying[number as usize] = Some(chunk);
            // SAFETY: the target lies inside the arena (`check_request`) and
            // stays mapped until the read is back (`drop`); the file is
            // registered. The queue has room for as many entries.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            debug_assert!(pushed.is_ok());
        }
    }

    /// Hands the submission queue to the kernel and waits for `want`
    /// completions. Trouble that passes is not an error.
    fn enter(&mut self, want: usize) -> io::Result<()> {
        if want == 0 && self.ring.submission().is_empty() {
            return Ok(());
        }
        match self.ring.submit_and_wait(want) {
            Ok(_) => Ok(()),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(e),
            },
        }
    }

    /// Takes completions from the ring; true if there were any. `seen`: the
    /// first of them is what was waited for.
    fn collect(&mut self, done: &mut Vec<ReadDone>, seen: bool) -> bool {
        let mut any = false;
        let mut now = None;
        while let Some(entry) = { self.ring.completion().next() } {
            any = true;
            let number = entry.user_data() as usize;
            let Some(chunk) = self.flying.get_mut(number).and_then(Option::take) else {
                continue;
            };
            self.free.push(number as u32);
            let result = usize::try_from(entry.result())
                .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
            let now = *now.get_or_insert_with(Instant::now);
            if let Some(finished) = self.queue.finish(chunk, result, (now, seen), &self.files) {
                self.outstanding -= 1;
                done.push(finished.conclude(&self.files));
            }
        }
        any
    }
}

impl Reader for UringReader {
    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadError> {
        check_request(&request, &self.files, &self.arena)?;
        self.queue.push(request);
        self.outstanding += 1;
        Ok(())
    }

    fn kick(&mut self) {
        // What is over makes room, and must not pass for being in flight until
        // the reads that begin now are over.
        let mut early = std::mem::take(&mut self.early);
        self.collect(&mut early, false);
        self.early = early;
        self.queue.follow(&self.files, |o| o.depth);
        self.fill();
        // What fails stays in the submission queue; `reap` reports it.
        let _ = self.enter(0);
    }

    fn reap(&mut self, done: &mut Vec<ReadDone>, block: bool) -> Result<(), ReadError> {
        let broken = |source| ReadError::Broken { reader: NAME, source };
        let before = done.len();
        done.append(&mut self.early);
        let mut waited = false;
        loop {
            self.collect(done, waited);
            self.fill();
            let wait = block && done.len() == before && self.queue.in_flight() > 0;
            self.enter(wait as usize).map_err(broken)?;
            if !wait {
                return Ok(());
            }
            waited = true;
        }
    }

    fn cancel_queued_prefetches(&mut self, done: &mut Vec<ReadDone>) {
        self.queue.cancel_prefetches(|finished| {
            self.outstanding -= 1;
            done.push(finished.conclude(&self.files));
        });
    }

    fn promote(&mut self, tag: u64) {
        self.queue.promote(tag);
    }

    fn forget(&mut self, range: Range<usize>) {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        for unit in range.start / REGISTER_UNIT..range.end.div_ceil(REGISTER_UNIT) {
            if !self.memory.units[unit] {
                continue;
            }
            // SAFETY: an empty entry; the kernel lets go of the unit's pages.
            let freed = unsafe {
                self.ring.submitter().register_buffers_update(unit as u32, &[nothing], None)
            };
            if freed.is_ok() {
                self.memory.units[unit] = false;
                self.arena.set_registered(unit, false);
            }
        }
    }

    fn busy(&self) -> Busy {
        self.queue.busy()
    }

    fn outstanding(&self) -> usize {
        self.outstanding + self.early.len()
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

impl Drop for UringReader {
    /// Waits until the kernel writes to the arena no more.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.queue.in_flight() > 0 {
            if !self.collect(&mut done, false) && self.enter(1).is_err() {
                // Nothing is known about the reads any more: the memory must
                // never be used for anything else.
                std::mem::forget(self.arena.clone());
                return;
            }
        }
        if self.ring.submitter().unregister_buffers().is_ok() {
            for (unit, _) in self.memory.units.iter().enumerate().filter(|(_, &r)| r) {
                self.arena.set_registered(unit, false);
            }
        }
    }
}
