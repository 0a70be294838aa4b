//! What is still to be read, for every kind of reader: requests cut into
//! chunks, demand before prefetch, and the book-keeping that ends a request
//! only when all of its chunks are back.
//!
//! Requests are cut when their turn comes, so that the size of a chunk can
//! follow the device. Nothing is allocated once as many requests were
//! outstanding as ever will be.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::pace::Pace;
use super::{Busy, ModelFiles, ReadClass, ReadDone, ReadError, ReadRequest, ReaderOptions, ALIGN};
use crate::arena::REGISTER_UNIT;

/// Times a chunk is tried again after `EINTR` or `EAGAIN`.
const RETRIES: u32 = 1000;
/// Outstanding requests that there is room for from the start.
const ROOM: usize = 1024;

/// Some whole pages of one request, inside one [`REGISTER_UNIT`] of the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    pub file: u16,
    /// Position in the file and in the arena, bytes; multiples of [`ALIGN`].
    pub offset: u64,
    pub dest: usize,
    /// Bytes to read; a multiple of [`ALIGN`].
    pub len: usize,
    /// Bytes that must come; less than `len` only in the last page.
    want: usize,
    request: u32,
    /// As what it was handed out.
    class: ReadClass,
    retries: u32,
}

/// A request none of whose memory is touched any more.
#[derive(Debug)]
pub(super) struct Finished {
    tag: u64,
    file: u16,
    offset: u64,
    len: usize,
    error: Option<ReadError>,
}

impl Finished {
    /// The verdict: also checks that the file is still the same one, and keeps
    /// the page cache out of the way where it had to be used.
    pub fn conclude(self, files: &ModelFiles) -> ReadDone {
        files.drop_cached(self.file, self.offset, self.len);
        let result = match self.error {
            Some(error) => Err(error),
            None => files.check_unchanged(self.file),
        };
        ReadDone { tag: self.tag, result }
    }
}

#[derive(Debug)]
struct Pending {
    request: ReadRequest,
    /// Where the next chunk goes in the arena; at the request's end when all
    /// are cut.
    next: usize,
    /// Chunks cut and not over.
    chunks: usize,
    error: Option<ReadError>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct WorkQueue {
    chunk: usize,
    depth: usize,
    /// The largest depth that there may ever be.
    most: usize,
    tuned: bool,
    /// Prefetch chunks that may be handed out at once.
    prefetch_lanes: usize,
    pace: Pace,
    pending: Vec<Option<Pending>>,
    free: Vec<u32>,
    /// Requests that are not cut to their end.
    demand: VecDeque<u32>,
    prefetch: VecDeque<u32>,
    /// Chunks to be read once more, or the rest of them.
    again: Vec<Chunk>,
    in_flight: usize,
    prefetch_in_flight: usize,
}

impl WorkQueue {
    /// A queue that hands out `options.depth` demand chunks at once, whatever
    /// is in flight of prefetches, and of those at most `prefetch_lanes`, as
    /// long as no more than `options.depth` chunks are in flight.
    /// Neither number will ever be above `most`.
    pub fn new(options: ReaderOptions, prefetch_lanes: usize, most: usize) -> Self {
        WorkQueue {
            chunk: whole_pages(options.chunk),
            depth: options.depth.clamp(1, most),
            most,
            tuned: false,
            prefetch_lanes: prefetch_lanes.clamp(1, most),
            pace: Pace::new(options.bandwidth),
            pending: Vec::with_capacity(ROOM),
            free: Vec::with_capacity(ROOM),
            demand: VecDeque::with_capacity(ROOM),
            prefetch: VecDeque::with_capacity(ROOM),
            again: Vec::with_capacity(most),
            in_flight: 0,
            prefetch_in_flight: 0,
        }
    }

    /// Goes on with what was measured to suit the files, once that is known;
    /// `depth_of` says how many chunks at once it means.
    pub fn follow(&mut self, files: &ModelFiles, depth_of: fn(&ReaderOptions) -> usize) {
        if self.tuned {
            return;
        }
        if let Some(options) = files.tuned() {
            self.tuned = true;
            self.chunk = whole_pages(options.chunk);
            self.depth = depth_of(&options).clamp(1, self.most);
            self.pace.expect(options.bandwidth);
        }
    }

    /// Queues a request that was checked.
    pub fn push(&mut self, request: ReadRequest) {
        let next = request.dest - request.dest % ALIGN;
        let pending = Some(Pending { request, next, chunks: 0, error: None });
        let id = match self.free.pop() {
            Some(id) => {
                self.pending[id as usize] = pending;
                id
            }
            None => {
                self.pending.push(pending);
                (self.pending.len() - 1) as u32
            }
        };
        self.queue(request.class).push_back(id);
    }

    /// The next chunk to read, if one may be read now.
    pub fn pop(&mut self, now: Instant) -> Option<Chunk> {
        let chunk = self.next_chunk()?;
        self.in_flight += 1;
        self.prefetch_in_flight += (chunk.class == ReadClass::Prefetch) as usize;
        self.pace.handed(now, chunk.len, chunk.class);
        Some(chunk)
    }

    fn next_chunk(&mut self) -> Option<Chunk> {
        if self.in_flight - self.prefetch_in_flight < self.depth {
            if let Some(chunk) = self.repeat(ReadClass::Demand) {
                return Some(chunk);
            }
            if let Some(&id) = self.demand.front() {
                return self.cut(id, self.chunk);
            }
        }
        if self.in_flight >= self.depth || self.prefetch_in_flight >= self.prefetch_lanes {
            return None;
        }
        let most = match self.pace.prefetch_room(self.chunk) {
            0 => return None,
            most => most,
        };
        if let Some(chunk) = self.repeat(ReadClass::Prefetch) {
            return Some(chunk);
        }
        let &id = self.prefetch.front()?;
        self.cut(id, most)
    }

    fn repeat(&mut self, class: ReadClass) -> Option<Chunk> {
        let at = self.again.iter().position(|c| c.class == class)?;
        Some(self.again.swap_remove(at))
    }

    /// Cuts at most `most` bytes from a request at the front of its queue.
    fn cut(&mut self, id: u32, most: usize) -> Option<Chunk> {
        let pending = self.pending[id as usize].as_mut()?;
        let request = pending.request;
        let wanted_end = request.dest + request.len;
        let end = wanted_end.next_multiple_of(ALIGN);
        let dest = pending.next;
        let unit_end = (dest / REGISTER_UNIT + 1) * REGISTER_UNIT;
        let len = most.min(end - dest).min(unit_end - dest);
        pending.next += len;
        pending.chunks += 1;
        if pending.next == end {
            self.queue(request.class).pop_front();
        }
        Some(Chunk {
            file: request.file,
            // `offset` and `dest` of a request agree modulo a page.
            offset: request.offset - (request.dest % ALIGN) as u64
                + (dest - request.dest / ALIGN * ALIGN) as u64,
            dest,
            len,
            want: len.min(wanted_end - dest),
            request: id,
            class: request.class,
            retries: 0,
        })
    }

    /// Takes back a chunk handed out by [`WorkQueue::pop`] with the number of
    /// bytes read. Returns its request when this was the last chunk of it.
    /// `seen`: see [`Pace::back`].
    pub fn finish(
        &mut self,
        chunk: Chunk,
        result: io::Result<usize>,
        (now, seen): (Instant, bool),
        files: &ModelFiles,
    ) -> Option<Finished> {
        self.in_flight -= 1;
        self.prefetch_in_flight -= (chunk.class == ReadClass::Prefetch) as usize;
        let got = result.as_ref().map_or(0, |&got| got);
        self.pace.back(now, chunk.len, got, chunk.class, seen);
        let pending = self.pending[chunk.request as usize].as_mut()?;
        let rest = match result {
            Ok(got) if got >= chunk.want => None,
            Ok(got) if got >= ALIGN => Some(chunk.after(got / ALIGN * ALIGN)),
            // Less than a page comes only at the end of a file.
            Ok(got) => {
                pending.fail(files.truncated(chunk.file, chunk.offset, chunk.want, got));
                None
            }
            Err(e) if is_transient(&e) && chunk.retries < RETRIES => {
                Some(Chunk { retries: chunk.retries + 1, ..chunk })
            }
            Err(source) => {
                pending.fail(files.io_error(chunk.file, chunk.offset, chunk.len, source));
                None
            }
        };
        let class = pending.request.class;
        if pending.error.is_none() {
            if let Some(rest) = rest {
                self.again.push(Chunk { class, ..rest });
                return None;
            }
        }
        pending.chunks -= 1;
        if pending.error.is_some() {
            self.abandon(chunk.request);
        }
        self.take_if_over(chunk.request)
    }

    /// Nothing more of a request that failed is read.
    fn abandon(&mut self, id: u32) {
        let Some(pending) = self.pending[id as usize].as_mut() else { return };
        let class = pending.request.class;
        pending.next = pending.end();
        let before = self.again.len();
        self.again.retain(|c| c.request != id);
        pending.chunks -= before - self.again.len();
        self.queue(class).retain(|&queued| queued != id);
    }

    /// Drops every prefetch chunk that is not handed out; `over` hears of
    /// requests that had nothing in flight.
    pub fn cancel_prefetches(&mut self, mut over: impl FnMut(Finished)) {
        for id in 0..self.pending.len() {
            let Some(pending) = &mut self.pending[id] else { continue };
            let id = id as u32;
            let waits = pending.next < pending.end() || self.again.iter().any(|c| c.request == id);
            if pending.request.class == ReadClass::Prefetch && waits {
                pending.fail(ReadError::Cancelled);
                self.abandon(id);
                if let Some(finished) = self.take_if_over(id) {
                    over(finished);
                }
            }
        }
    }

    /// Makes the prefetch `tag` a demand read.
    pub fn promote(&mut self, tag: u64) {
        let wanted = |p: &Pending| {
            p.request.tag == tag && p.request.class == ReadClass::Prefetch && p.error.is_none()
        };
        let Some(at) = self.pending.iter().position(|p| p.as_ref().is_some_and(wanted)) else {
            return;
        };
        let id = at as u32;
        if let Some(pending) = &mut self.pending[at] {
            pending.request.class = ReadClass::Demand;
        }
        for chunk in self.again.iter_mut().filter(|c| c.request == id) {
            chunk.class = ReadClass::Demand;
        }
        if let Some(at) = self.prefetch.iter().position(|&queued| queued == id) {
            self.prefetch.remove(at);
            self.demand.push_back(id);
        }
    }

    /// Whether there is nothing to hand out.
    pub fn is_idle(&self) -> bool {
        self.demand.is_empty() && self.prefetch.is_empty() && self.again.is_empty()
    }

    /// Chunks handed out and not yet back.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// See [`super::Reader::busy`].
    pub fn busy(&self) -> Busy {
        self.pace.busy()
    }

    fn queue(&mut self, class: ReadClass) -> &mut VecDeque<u32> {
        match class {
            ReadClass::Demand => &mut self.demand,
            ReadClass::Prefetch => &mut self.prefetch,
        }
    }

    fn take_if_over(&mut self, id: u32) -> Option<Finished> {
        let slot = &mut self.pending[id as usize];
        if !slot.as_ref().is_some_and(|p| p.chunks == 0 && p.next == p.end()) {
            return None;
        }
        let Pending { request, error, .. } = slot.take()?;
        self.free.push(id);
        let ReadRequest { tag, file, offset, len, .. } = request;
        Some(Finished { tag, file, offset, len, error })
    }
}

impl Pending {
    /// One past the last page, in the arena.
    fn end(&self) -> usize {
        (self.request.dest + self.request.len).next_multiple_of(ALIGN)
    }

    /// Keeps the first error.
    fn fail(&mut self, error: ReadError) {
        self.error.get_or_insert(error);
    }
}

impl Chunk {
    /// What is left when the first `got` bytes (whole pages) have come.
    fn after(self, got: usize) -> Chunk {
        Chunk {
            offset: self.offset + got as u64,
            dest: self.dest + got,
            len: self.len - got,
            want: self.want - got,
            ..self
        }
    }
}

fn whole_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN).max(ALIGN)
}

/// `ECANCELED`: the thread that handed the read to io_uring has ended.
fn is_transient(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED))
}

#[cfg(test)]
mod tests;
