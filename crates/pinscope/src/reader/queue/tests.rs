use super::*;
use crate::map::ModelFile;

const CHUNK: usize = 4 * ALIGN;

/// A queue with one demand request of `len` bytes at offset 100, and the
/// chunks that it hands out for it.
fn started(len: usize) -> (WorkQueue, ModelFiles, Vec<Chunk>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let model = ModelFile { path: file.path().into(), len: 0, header_len: 0 };
    let files = ModelFiles::open(&[model]).unwrap();
    let options = ReaderOptions { chunk: CHUNK, depth: 3, ..Default::default() };
    let mut queue = WorkQueue::new(options, 3, 3);
    let class = ReadClass::Demand;
    queue.push(ReadRequest { tag: 7, file: 0, offset: 100, len, dest: ALIGN + 100, class });
    let chunks = std::iter::from_fn(|| pop(&mut queue)).collect();
    (queue, files, chunks)
}

fn pop(queue: &mut WorkQueue) -> Option<Chunk> {
    queue.pop(Instant::now())
}

fn back(
    queue: &mut WorkQueue,
    chunk: Chunk,
    result: io::Result<usize>,
    files: &ModelFiles,
) -> Option<Finished> {
    queue.finish(chunk, result, (Instant::now(), true), files)
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
    assert!(back(&mut queue, chunks[1], os_error(libc::EIO), &files).is_none());
    assert_eq!(pop(&mut queue), None, "a chunk of a failed request was handed out");
    // A short read of a failed request is not continued either.
    assert!(back(&mut queue, chunks[0], Ok(ALIGN), &files).is_none());
    assert_eq!(pop(&mut queue), None);
    let over = back(&mut queue, chunks[2], Ok(CHUNK), &files).unwrap();
    assert_eq!(over.tag, 7);
    assert!(matches!(over.error, Some(ReadError::Io { .. })));
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn a_short_read_goes_on_where_it_stopped_before_anything_else() {
    let (mut queue, files, chunks) = started(5 * CHUNK - 100);
    assert!(back(&mut queue, chunks[0], Ok(2 * ALIGN + 512), &files).is_none());
    let rest = pop(&mut queue).unwrap();
    let at = (2 * ALIGN as u64, ALIGN + 2 * ALIGN, CHUNK - 2 * ALIGN);
    assert_eq!((rest.offset, rest.dest, rest.len), at);
    for chunk in [chunks[2], rest, chunks[1]] {
        assert!(back(&mut queue, chunk, Ok(chunk.len), &files).is_none());
    }
    let last = [pop(&mut queue).unwrap(), pop(&mut queue).unwrap()];
    assert!(back(&mut queue, last[0], Ok(CHUNK), &files).is_none());
    assert!(back(&mut queue, last[1], Ok(CHUNK), &files).unwrap().error.is_none());
}

#[test]
fn interrupted_reads_are_repeated_but_not_for_ever() {
    for code in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
        let (mut queue, files, chunks) = started(100);
        let mut chunk = chunks[0];
        for _ in 0..RETRIES {
            assert!(back(&mut queue, chunk, os_error(code), &files).is_none());
            chunk = pop(&mut queue).unwrap();
        }
        let over = back(&mut queue, chunk, os_error(code), &files).unwrap();
        assert!(matches!(over.error, Some(ReadError::Io { .. })));
    }
}

#[test]
fn the_last_page_may_end_after_the_wanted_bytes_and_not_before() {
    let wanted = 100 + 100; // from the start of the page
    for (got, enough) in [(wanted, true), (ALIGN, true), (wanted - 1, false), (0, false)] {
        let (mut queue, files, chunks) = started(100);
        let over = back(&mut queue, chunks[0], Ok(got), &files).unwrap();
        assert_eq!(over.error.is_none(), enough, "{got} bytes");
    }
}

#[test]
fn prefetches_in_flight_are_bounded_in_bytes_and_leave_all_lanes_to_demand() {
    let class = ReadClass::Prefetch;
    let request = ReadRequest { tag: 1, file: 0, offset: 0, len: 40 << 20, dest: 0, class };
    for bandwidth in [50_000_000, 1_000_000_000, 3_000_000_000] {
        let options = ReaderOptions { bandwidth, depth: 16, ..Default::default() };
        let mut queue = WorkQueue::new(options, 16, 16);
        queue.push(request);
        let taken: usize = std::iter::from_fn(|| pop(&mut queue)).map(|c| c.len).sum();
        let limit = (bandwidth as usize / 500).max(256 << 10);
        assert!((limit * 3 / 4..=limit).contains(&taken), "{taken} bytes of {limit}");
        queue.push(ReadRequest { class: ReadClass::Demand, ..request });
        assert_eq!(std::iter::from_fn(|| pop(&mut queue)).count(), 16);
    }
}

#[test]
fn a_cancelled_prefetch_ends_with_its_last_chunk_and_a_promoted_one_is_read_whole() {
    let (_, files, _) = started(1);
    for promoted in [false, true] {
        let mut queue = WorkQueue::new(ReaderOptions::default(), 16, 16);
        let class = ReadClass::Prefetch;
        let request = ReadRequest { tag: 5, file: 0, offset: 0, len: 12 << 20, dest: 0, class };
        queue.push(request);
        let first = pop(&mut queue).unwrap();
        let mut read = first.len;
        if promoted {
            queue.promote(5);
        }
        let mut over = 0;
        queue.cancel_prefetches(|_| over += 1);
        assert_eq!(over, 0, "a chunk is in flight");
        let mut finished = back(&mut queue, first, Ok(first.len), &files);
        while let Some(chunk) = pop(&mut queue) {
            assert!(finished.is_none());
            read += chunk.len;
            finished = back(&mut queue, chunk, Ok(chunk.len), &files);
        }
        let error = finished.unwrap().error;
        assert_eq!(
            (read, error.is_none()),
            (if promoted { 12 << 20 } else { first.len }, promoted)
        );
    }
}

#[test]
fn what_was_measured_to_suit_the_files_is_followed() {
    let (mut queue, files, chunks) = started(100 * CHUNK);
    queue.follow(&files, |o| o.depth);
    assert!(back(&mut queue, chunks[0], Ok(CHUNK), &files).is_none());
    assert_eq!(pop(&mut queue).map(|c| c.len), Some(CHUNK));
    let suits = ReaderOptions { chunk: 2 * CHUNK, depth: 1, ..Default::default() };
    files.set_tuned(suits);
    queue.follow(&files, |o| o.depth);
    assert!(back(&mut queue, chunks[1], Ok(CHUNK), &files).is_none());
    assert_eq!(pop(&mut queue), None, "two are in flight where one should be");
    assert!(back(&mut queue, chunks[2], Ok(CHUNK), &files).is_none());
    let last = Chunk { dest: chunks[2].dest + CHUNK, ..chunks[2] };
    assert!(back(&mut queue, last, Ok(CHUNK), &files).is_none());
    assert_eq!(pop(&mut queue).map(|c| c.len), Some(2 * CHUNK));
}
