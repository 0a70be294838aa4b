//! What is still to be read, for every kind of reader: requests cut into
//! chunks, demand before prefetch, and the book-keeping that ends a request
//! only when all of its chunks are back.

use std::collections::{HashMap, VecDeque};
use std::io;

use super::{ModelFiles, ReadClass, ReadDone, ReadError, ReadRequest, ReaderOptions, ALIGN};
use crate::arena::REGISTER_UNIT;

/// Times a chunk is tried again after `EINTR` or `EAGAIN`.
const RETRIES: u32 = 1000;

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
    request: u64,
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
    /// Chunks queued or handed out.
    chunks: usize,
    error: Option<ReadError>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct WorkQueue {
    options: ReaderOptions,
    pending: HashMap<u64, Pending>,
    next_id: u64,
    demand: VecDeque<Chunk>,
    prefetch: VecDeque<Chunk>,
    in_flight: usize,
    prefetch_in_flight: usize,
}

impl WorkQueue {
    pub fn new(options: ReaderOptions) -> Self {
        let chunk = options.chunk.next_multiple_of(ALIGN).max(ALIGN);
        WorkQueue {
            options: ReaderOptions {
                chunk,
                depth: options.depth.max(1),
                prefetch_depth: options.prefetch_depth.max(1),
                ..options
            },
            pending: HashMap::new(),
            next_id: 0,
            demand: VecDeque::new(),
            prefetch: VecDeque::new(),
            in_flight: 0,
            prefetch_in_flight: 0,
        }
    }

    /// Queues a request that was checked.
    pub fn push(&mut self, request: ReadRequest) {
        let id = self.next_id;
        self.next_id += 1;
        let skew = request.dest % ALIGN;
        let mut dest = request.dest - skew;
        let mut offset = request.offset - skew as u64;
        let wanted_end = request.dest + request.len;
        let end = wanted_end.next_multiple_of(ALIGN);
        let mut chunks = 0;
        while dest < end {
            let unit_end = (dest / REGISTER_UNIT + 1) * REGISTER_UNIT;
            let len = self.options.chunk.min(end - dest).min(unit_end - dest);
            self.queue(request.class).push_back(Chunk {
                file: request.file,
                offset,
                dest,
                len,
                want: len.min(wanted_end - dest),
                request: id,
                class: request.class,
                retries: 0,
            });
            chunks += 1;
            dest += len;
            offset += len as u64;
        }
        self.pending.insert(id, Pending { request, chunks, error: None });
    }

    /// The next chunk to read, if one may be read now.
    pub fn pop(&mut self) -> Option<Chunk> {
        if self.in_flight >= self.options.depth {
            return None;
        }
        let chunk = match self.demand.pop_front() {
            Some(chunk) => chunk,
            None if self.prefetch_in_flight >= self.options.prefetch_depth => return None,
            None => self.prefetch.pop_front()?,
        };
        self.in_flight += 1;
        self.prefetch_in_flight += (chunk.class == ReadClass::Prefetch) as usize;
        Some(chunk)
    }

    /// Takes back a chunk handed out by [`WorkQueue::pop`] with the number of
    /// bytes read. Returns its request when this was the last chunk of it.
    pub fn finish(
        &mut self,
        chunk: Chunk,
        result: io::Result<usize>,
        files: &ModelFiles,
    ) -> Option<Finished> {
        self.in_flight -= 1;
        self.prefetch_in_flight -= (chunk.class == ReadClass::Prefetch) as usize;
        let pending = self.pending.get_mut(&chunk.request)?;
        let class = pending.request.class;
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
        let failed = pending.error.is_some();
        match rest {
            Some(rest) if !failed => {
                self.queue(class).push_front(Chunk { class, ..rest });
                return None;
            }
            _ => pending.chunks -= 1,
        }
        if failed {
            let queue = self.queue(class);
            let before = queue.len();
            queue.retain(|c| c.request != chunk.request);
            let dropped = before - queue.len();
            self.pending.get_mut(&chunk.request)?.chunks -= dropped;
        }
        self.take_if_over(chunk.request)
    }

    /// Drops every queued prefetch chunk; requests that had nothing in flight
    /// are over.
    pub fn cancel_prefetches(&mut self) -> Vec<Finished> {
        let mut over = Vec::new();
        for chunk in std::mem::take(&mut self.prefetch) {
            if let Some(pending) = self.pending.get_mut(&chunk.request) {
                pending.chunks -= 1;
                pending.fail(ReadError::Cancelled);
                over.extend(self.take_if_over(chunk.request));
            }
        }
        over
    }

    /// Makes the prefetch `tag` a demand read.
    pub fn promote(&mut self, tag: u64) {
        let wanted = |p: &Pending| {
            p.request.tag == tag && p.request.class == ReadClass::Prefetch && p.error.is_none()
        };
        let Some((&id, pending)) = self.pending.iter_mut().find(|(_, p)| wanted(p)) else {
            return;
        };
        pending.request.class = ReadClass::Demand;
        let demand = &mut self.demand;
        self.prefetch.retain(|c| {
            if c.request == id {
                demand.push_back(Chunk { class: ReadClass::Demand, ..*c });
            }
            c.request != id
        });
    }

    /// Chunks handed out and not yet back.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn queue(&mut self, class: ReadClass) -> &mut VecDeque<Chunk> {
        match class {
            ReadClass::Demand => &mut self.demand,
            ReadClass::Prefetch => &mut self.prefetch,
        }
    }

    fn take_if_over(&mut self, id: u64) -> Option<Finished> {
        if self.pending.get(&id)?.chunks > 0 {
            return None;
        }
        let Pending { request, error, .. } = self.pending.remove(&id)?;
        Some(Finished {
            tag: request.tag,
            file: request.file,
            offset: request.offset,
            len: request.len,
            error,
        })
    }
}

impl Pending {
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

/// `ECANCELED`: the thread that handed the read to io_uring has ended.
fn is_transient(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::ModelFile;

    const CHUNK: usize = 4 * ALIGN;

    /// A queue with one demand request of `len` bytes at offset 100, and the
    /// chunks that it hands out for it.
    fn started(len: usize) -> (WorkQueue, ModelFiles, Vec<Chunk>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let model = ModelFile { path: file.path().into(), len: 0, header_len: 0 };
        let files = ModelFiles::open(&[model]).unwrap();
        let options = ReaderOptions { chunk: CHUNK, depth: 3, prefetch_depth: 1, threads: 1 };
        let mut queue = WorkQueue::new(options);
        let class = ReadClass::Demand;
        queue.push(ReadRequest { tag: 7, file: 0, offset: 100, len, dest: ALIGN + 100, class });
        let chunks = std::iter::from_fn(|| queue.pop()).collect();
        (queue, files, chunks)
    }

    fn os_error(code: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(code))
    }

    #[test]
    fn a_request_is_cut_into_whole_pages_and_the_last_need_not_be_full() {
        let (_, _, chunks) = started(2 * CHUNK);
        let cut: Vec<_> = chunks.iter().map(|c| (c.offset, c.dest, c.len, c.want)).collect();
        let (c, u) = (CHUNK as u64, ALIGN);
        let last = (2 * c, u + 2 * CHUNK, ALIGN, 100);
        assert_eq!(cut, [(0, u, CHUNK, CHUNK), (c, u + CHUNK, CHUNK, CHUNK), last]);
    }

    #[test]
    fn a_failed_request_ends_only_when_its_last_chunk_is_back_and_reads_no_more() {
        let (mut queue, files, chunks) = started(10 * CHUNK);
        assert_eq!(chunks.len(), 3);
        assert!(queue.finish(chunks[1], os_error(libc::EIO), &files).is_none());
        assert_eq!(queue.pop(), None, "a chunk of a failed request was handed out");
        // A short read of a failed request is not continued either.
        assert!(queue.finish(chunks[0], Ok(ALIGN), &files).is_none());
        assert_eq!(queue.pop(), None);
        let over = queue.finish(chunks[2], Ok(CHUNK), &files).unwrap();
        assert_eq!(over.tag, 7);
        assert!(matches!(over.error, Some(ReadError::Io { .. })));
        assert_eq!(queue.in_flight(), 0);
    }

    #[test]
    fn a_short_read_goes_on_where_it_stopped_before_anything_else() {
        let (mut queue, files, chunks) = started(5 * CHUNK - 100);
        assert!(queue.finish(chunks[0], Ok(2 * ALIGN + 512), &files).is_none());
        let rest = queue.pop().unwrap();
        let at = (2 * ALIGN as u64, ALIGN + 2 * ALIGN, CHUNK - 2 * ALIGN);
        assert_eq!((rest.offset, rest.dest, rest.len), at);
        for chunk in [chunks[2], rest, chunks[1]] {
            assert!(queue.finish(chunk, Ok(chunk.len), &files).is_none());
        }
        let last = [queue.pop().unwrap(), queue.pop().unwrap()];
        assert!(queue.finish(last[0], Ok(CHUNK), &files).is_none());
        assert!(queue.finish(last[1], Ok(CHUNK), &files).unwrap().error.is_none());
    }

    #[test]
    fn interrupted_reads_are_repeated_but_not_for_ever() {
        for code in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
            let (mut queue, files, chunks) = started(100);
            let mut chunk = chunks[0];
            for _ in 0..RETRIES {
                assert!(queue.finish(chunk, os_error(code), &files).is_none());
                chunk = queue.pop().unwrap();
            }
            let over = queue.finish(chunk, os_error(code), &files).unwrap();
            assert!(matches!(over.error, Some(ReadError::Io { .. })));
        }
    }

    #[test]
    fn the_last_page_may_end_after_the_wanted_bytes_and_not_before() {
        let wanted = 100 + 100; // from the start of the page
        for (got, enough) in [(wanted, true), (ALIGN, true), (wanted - 1, false), (0, false)] {
            let (mut queue, files, chunks) = started(100);
            let over = queue.finish(chunks[0], Ok(got), &files).unwrap();
            assert_eq!(over.error.is_none(), enough, "{got} bytes");
        }
    }
}
