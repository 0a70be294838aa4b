//! A token in steady state costs no memory: PinScope allocates nothing, and the
//! kernel has no page to find.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{engine, model, one_at_a_time};
use pinscope::reader::ReaderKind;
use pinscope_host::{Context, ContextOptions, Logits, Model, ModelOptions};
use pinscope_models::synth::ExpertTypes;

/// Counts what the thread that decodes allocates from Rust; llama.cpp's own
/// allocations are none of this allocator's.
struct Counting;

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

fn count() {
    COUNTED.with(|c| c.set(c.get().map(|n| n + 1)));
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Page faults of this process that needed no disk.
fn minor_faults() -> i64 {
    // SAFETY: fills in a plain struct.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &mut usage), 0);
        usage.ru_minflt
    }
}

#[test]
fn a_thousand_tokens_allocate_nothing_and_fault_nothing() {
    const WARM: u32 = 1000;
    const TOKENS: u32 = 1000;
    let _turn = one_at_a_time();
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let engine = engine(&path, 400, ReaderKind::Auto);
    let model = Model::load(&path, ModelOptions::default()).unwrap();
    let options = ContextOptions { n_ctx: 64, n_batch: 8, n_ubatch: 8, ..Default::default() };
    let mut context = Context::new(&model, options).unwrap();
    let mut token = |i: u32| {
        let (token, position) = ((i * 7919 % 251) as i32, i % 64);
        if position == 0 {
            context.clear();
        }
        context.decode(&[token], position, Logits::Last).unwrap();
    };
    (0..WARM).for_each(&mut token);
    let (before, misses) = (minor_faults(), engine.stats().decode.misses);
    COUNTED.set(Some(0));
    (WARM..WARM + TOKENS).for_each(&mut token);
    let (allocations, faults) = (COUNTED.take().unwrap(), minor_faults() - before);
    assert!(engine.stats().decode.misses > misses, "everything was in RAM: nothing is tested");
    assert_eq!(allocations, 0);
    // Of all threads, the test runner's among them: some fault now and then.
    assert!(faults < i64::from(TOKENS) / 100, "{faults} page faults");
}
