//! Readers allocate nothing once they are warm.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use pinscope::arena::Arena;
use pinscope::map::ModelFile;
use pinscope::reader::{
    open_reader, ModelFiles, ReadClass, ReadDone, ReadRequest, Reader, ReaderKind, ReaderOptions,
    ALIGN,
};

/// Counts allocations of all threads.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const FILE: u64 = 4 << 20;
const REQUEST: usize = 20_000;

/// Reads `requests` in rounds of 50. Every other one is a prefetch; one of
/// those is asked for after all, and what waits of the others is taken back.
fn work(reader: &mut dyn Reader, done: &mut Vec<ReadDone>, requests: u64) {
    for round in 0..requests / 50 {
        for i in 0..50 {
            let offset = (round * 50 + i) * 7919 % (FILE - REQUEST as u64);
            let place = i as usize * (REQUEST / ALIGN + 3) * ALIGN;
            let request = ReadRequest {
                tag: i,
                file: 0,
                offset,
                len: REQUEST,
                dest: place + (offset % ALIGN as u64) as usize,
                class: [ReadClass::Demand, ReadClass::Prefetch][i as usize % 2],
            };
            reader.submit(request).unwrap();
        }
        reader.kick();
        reader.promote(31);
        reader.reap(done, false).unwrap();
        reader.cancel_queued_prefetches(done);
        while reader.outstanding() > 0 {
            reader.reap(done, true).unwrap();
        }
        assert_eq!(done.len(), 50);
        done.clear();
    }
}

#[test]
fn ten_thousand_requests_allocate_nothing_after_the_first_ones() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(FILE).unwrap();
    let model = ModelFile { path: file.path().into(), len: FILE, header_len: 0 };
    let files = Arc::new(ModelFiles::open(&[model]).unwrap());
    let arena = Arc::new(Arena::new(8 << 20).unwrap());
    for kind in [ReaderKind::Auto, ReaderKind::Pread] {
        let options = ReaderOptions::default();
        let (mut reader, _) = open_reader(files.clone(), arena.clone(), kind, options).unwrap();
        let mut done = Vec::with_capacity(64);
        work(reader.as_mut(), &mut done, 500);
        // The test runner's own thread allocates, too, and at any time: but not
        // again and again.
        let allocations = (0..4).map(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            work(reader.as_mut(), &mut done, 10_000);
            ALLOCATIONS.load(Ordering::Relaxed) - before
        });
        assert_eq!(allocations.min(), Some(0), "{}", reader.name());
    }
}
