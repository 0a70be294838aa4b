//! Every reader brings the right bytes in the right order.

mod busy;
mod files;
mod forbidden;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;

use super::faulty::{FaultPlan, FaultyReader};
use super::*;
use crate::map::ModelFile;
use crate::splitmix::SplitMix64;

/// A file of random bytes whose last page is not full.
struct Fixture {
    path: PathBuf,
    bytes: Vec<u8>,
    _dir: tempfile::TempDir,
}

impl Fixture {
    fn new(len: usize) -> Fixture {
        Fixture::within(&std::env::temp_dir(), len)
    }

    fn within(parent: &std::path::Path, len: usize) -> Fixture {
        let dir = tempfile::tempdir_in(parent).unwrap();
        let mut rng = SplitMix64(len as u64);
        let bytes: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
        let path = dir.path().join("model.gguf");
        fs::write(&path, &bytes).unwrap();
        let _dir = dir;
        Fixture { path, bytes, _dir }
    }

    fn model(&self) -> Vec<ModelFile> {
        vec![ModelFile { path: self.path.clone(), len: self.bytes.len() as u64, header_len: 0 }]
    }

    fn files(&self) -> Arc<ModelFiles> {
        Arc::new(ModelFiles::open(&self.model()).unwrap())
    }
}

fn arena(len: usize) -> Arc<Arena> {
    Arc::new(Arena::new(len).unwrap())
}

/// The kinds that this machine allows.
fn kinds() -> Vec<ReaderKind> {
    let f = Fixture::new(1);
    let uring = open_reader(f.files(), arena(1), ReaderKind::Uring, Default::default());
    match uring {
        Ok(_) => vec![ReaderKind::Uring, ReaderKind::Pread],
        Err(e) => {
            eprintln!("without io_uring: {e}");
            vec![ReaderKind::Pread]
        }
    }
}

fn open(
    files: Arc<ModelFiles>,
    arena: &Arc<Arena>,
    kind: ReaderKind,
    o: ReaderOptions,
) -> Box<dyn Reader> {
    open_reader(files, arena.clone(), kind, o).unwrap().0
}

/// One read at a time, so that the order of completion is the order of
/// reading.
fn serial() -> ReaderOptions {
    ReaderOptions { chunk: 64 << 10, depth: 1, threads: 1, ..Default::default() }
}

/// Requests for `ranges` one behind the other in the arena, tagged by number.
fn requests(ranges: &[(u64, usize, ReadClass)]) -> Vec<ReadRequest> {
    let mut next = 0;
    let place = |(tag, &(offset, len, class)): (usize, &(u64, usize, ReadClass))| {
        let dest = next + (offset % ALIGN as u64) as usize;
        next = (dest + len).next_multiple_of(ALIGN);
        ReadRequest { tag: tag as u64, file: 0, offset, len, dest, class }
    };
    ranges.iter().enumerate().map(place).collect()
}

fn demand(offset: u64, len: usize) -> ReadRequest {
    requests(&[(offset, len, ReadClass::Demand)])[0]
}

fn drain(reader: &mut dyn Reader) -> Vec<ReadDone> {
    let mut done = Vec::new();
    while reader.outstanding() > 0 {
        let before = done.len();
        reader.reap(&mut done, true).unwrap();
        assert!(done.len() > before, "a blocking reap came back empty");
    }
    done
}

fn read_one(reader: &mut dyn Reader, request: ReadRequest) -> Result<(), ReadError> {
    reader.submit(request).unwrap();
    drain(reader).pop().unwrap().result
}

fn assert_in_place(f: &Fixture, arena: &Arena, r: &ReadRequest) {
    // SAFETY: callers have no reads outstanding.
    let got = unsafe { arena.bytes(r.dest..r.dest + r.len) };
    let from = r.offset as usize;
    assert!(got == &f.bytes[from..from + r.len], "wrong bytes for {r:?}");
}

const LEN: usize = 3_000_001;

fn ranges() -> impl Strategy<Value = Vec<(u64, usize, ReadClass)>> {
    let class = prop_oneof![Just(ReadClass::Demand), Just(ReadClass::Prefetch)];
    let len = prop_oneof![1..9000usize, 1..600_000usize];
    let range = (0..LEN, len, class, 0..4u8).prop_map(|(offset, len, class, at_end)| {
        let len = len.min(LEN - offset);
        let offset = if at_end == 0 { LEN - len } else { offset };
        (offset as u64, len, class)
    });
    prop::collection::vec(range, 1..20)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn every_reader_brings_the_bytes_of_the_file(
        ranges in ranges(),
        chunk_pages in 1usize..40,
        depth in 1usize..9,
        seed: u64,
    ) {
        thread_local!(static FILE: Fixture = Fixture::new(LEN));
        FILE.with(|f| {
            for (kind, faulty) in kinds().into_iter().flat_map(|k| [(k, false), (k, true)]) {
                let arena = arena(12 << 20);
                let options = ReaderOptions {
                    chunk: chunk_pages * ALIGN, depth, threads: 3, ..Default::default()
                };
                let mut reader = open(f.files(), &arena, kind, options);
                if faulty {
                    let plan = FaultPlan { seed, delay: 0.3, fail: 0.0, retry: 0.3, reorder: true };
                    reader = Box::new(FaultyReader::new(reader, plan));
                }
                let wanted = requests(&ranges);
                for r in &wanted {
                    reader.submit(*r).unwrap();
                    if r.tag % 3 == 0 {
                        reader.kick();
                    }
                }
                let mut tags: Vec<u64> = Vec::new();
                for done in drain(&mut *reader) {
                    done.result.unwrap();
                    tags.push(done.tag);
                }
                tags.sort();
                assert_eq!(tags, (0..wanted.len() as u64).collect::<Vec<_>>());
                for r in &wanted {
                    assert_in_place(f, &arena, r);
                }
            }
        });
    }
}

#[test]
fn reads_cross_the_registered_units_of_a_large_arena() {
    let f = Fixture::new(1 << 20);
    for kind in kinds() {
        let arena = arena(130 << 20);
        let mut reader = open(f.files(), &arena, kind, ReaderOptions::default());
        let mut r = demand(0, 1 << 20);
        r.dest = (64 << 20) - (512 << 10) + ALIGN;
        read_one(&mut *reader, r).unwrap();
        assert_in_place(&f, &arena, &r);
    }
}

#[test]
fn memory_around_the_pages_of_a_request_is_left_alone() {
    let f = Fixture::new(100_000);
    for kind in kinds() {
        let arena = arena(1 << 20);
        // SAFETY: no reader is open yet.
        unsafe { arena.ptr(0).write_bytes(0xAA, arena.len()) };
        let mut reader = open(f.files(), &arena, kind, ReaderOptions::default());
        let mut r = demand(5000, 10_000);
        r.dest = 40 * ALIGN + 5000 % ALIGN;
        read_one(&mut *reader, r).unwrap();
        assert_in_place(&f, &arena, &r);
        // SAFETY: nothing is outstanding.
        let bytes = unsafe { arena.bytes(0..arena.len()) };
        let (from, to) = (40 * ALIGN, 43 * ALIGN);
        assert!(bytes[..from].iter().all(|&b| b == 0xAA));
        assert!(bytes[to..].iter().all(|&b| b == 0xAA));
    }
}

#[test]
fn requests_that_break_the_rules_are_refused() {
    let f = Fixture::new(10_000);
    for kind in kinds() {
        let arena = arena(1);
        let mut reader = open(f.files(), &arena, kind, ReaderOptions::default());
        let good = demand(100, 9900);
        let bad = [
            ReadRequest { file: 1, ..good },
            ReadRequest { len: 0, ..good },
            ReadRequest { len: 9901, ..good },
            ReadRequest { dest: 101, ..good },
            ReadRequest { offset: u64::MAX - 4095 + 100, ..good },
            ReadRequest { dest: arena.len() - ALIGN + 100, ..good },
            ReadRequest { dest: usize::MAX - 4095 + 100, ..good },
        ];
        for r in bad {
            let e = reader.submit(r).unwrap_err();
            assert!(matches!(e, ReadError::Contract { .. }), "{e}");
        }
        assert_eq!(reader.outstanding(), 0);
        read_one(&mut *reader, good).unwrap();
    }
}

#[test]
fn a_prefetch_never_overtakes_a_demand() {
    let f = Fixture::new(2 << 20);
    for kind in kinds() {
        let arena = arena(8 << 20);
        let mut reader = open(f.files(), &arena, kind, serial());
        let class = |i| match i % 4 {
            3 => ReadClass::Demand,
            _ => ReadClass::Prefetch,
        };
        let ranges: Vec<_> = (0..16).map(|i| (i * 4096, 100_000, class(i))).collect();
        for r in requests(&ranges) {
            reader.submit(r).unwrap();
        }
        let order: Vec<u64> = drain(&mut *reader).iter().map(|d| d.tag).collect();
        assert_eq!(order, [3, 7, 11, 15, 0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]);
    }
}

#[test]
fn a_promoted_prefetch_goes_before_the_others() {
    let f = Fixture::new(2 << 20);
    for kind in kinds() {
        let arena = arena(8 << 20);
        let mut reader = open(f.files(), &arena, kind, serial());
        let ranges: Vec<_> = (0..6).map(|i| (i * 4096, 100_000, ReadClass::Prefetch)).collect();
        for r in requests(&ranges) {
            reader.submit(r).unwrap();
        }
        reader.promote(4);
        reader.promote(99);
        let order: Vec<u64> = drain(&mut *reader).iter().map(|d| d.tag).collect();
        // Those that the pool began before the promotion come first.
        assert!(order.iter().position(|&t| t == 4) <= Some(1), "{order:?}");
    }
}

#[test]
fn cancelled_prefetches_come_back_once_and_demand_stays() {
    let f = Fixture::new(2 << 20);
    for kind in kinds() {
        let arena = arena(40 << 20);
        let mut reader = open(f.files(), &arena, kind, serial());
        let class = |i| match i % 2 {
            0 => ReadClass::Demand,
            _ => ReadClass::Prefetch,
        };
        let ranges: Vec<_> = (0..20).map(|i| (i * 4096, 1_000_000, class(i))).collect();
        let all = requests(&ranges);
        for r in &all {
            reader.submit(*r).unwrap();
        }
        reader.kick();
        let mut done = Vec::new();
        reader.cancel_queued_prefetches(&mut done);
        done.extend(drain(&mut *reader));
        let by_tag: BTreeMap<u64, &ReadDone> = done.iter().map(|d| (d.tag, d)).collect();
        assert_eq!((by_tag.len(), done.len()), (20, 20));
        for r in &all {
            match (&by_tag[&r.tag].result, r.class) {
                (Ok(()), _) => assert_in_place(&f, &arena, r),
                (Err(ReadError::Cancelled), ReadClass::Prefetch) => {}
                other => panic!("{other:?}"),
            }
        }
        let cancelled = done.iter().filter(|d| d.result.is_err()).count();
        assert!(cancelled >= 9, "{cancelled}");
    }
}

#[test]
fn after_drop_nothing_writes_to_the_arena() {
    let f = Fixture::new(4 << 20);
    for kind in kinds() {
        for _ in 0..20 {
            let arena = arena(64 << 20);
            let mut reader = open(f.files(), &arena, kind, ReaderOptions::default());
            let ranges = [(0, 4 << 20, ReadClass::Demand); 15];
            for r in requests(&ranges) {
                reader.submit(r).unwrap();
            }
            reader.kick();
            drop(reader);
            // SAFETY: no reader is left.
            unsafe { arena.ptr(0).write_bytes(0x55, arena.len()) };
            std::thread::sleep(Duration::from_millis(2));
            // SAFETY: as above.
            let bytes = unsafe { arena.bytes(0..arena.len()) };
            assert!(bytes.iter().all(|&b| b == 0x55));
            arena.release(0..arena.len()).unwrap();
        }
    }
}

#[test]
fn injected_faults_fail_requests_and_change_no_bytes_of_the_others() {
    let f = Fixture::new(1 << 20);
    let arena = arena(16 << 20);
    let plan = FaultPlan { seed: 1, delay: 0.5, fail: 0.3, retry: 0.3, reorder: true };
    let inner = open(f.files(), &arena, ReaderKind::Pread, serial());
    let mut reader = FaultyReader::new(inner, plan);
    let ranges: Vec<_> = (0..100).map(|i| (i * 1000, 20_000, ReadClass::Demand)).collect();
    let all = requests(&ranges);
    for r in &all {
        reader.submit(*r).unwrap();
    }
    let done = drain(&mut reader);
    let order: Vec<u64> = done.iter().map(|d| d.tag).collect();
    assert!(!order.is_sorted());
    let failed = done.iter().filter(|d| d.result.is_err()).count();
    assert!((15..45).contains(&failed), "{failed} of 100 at p = 0.3");
    for d in done.iter().filter(|d| d.result.is_ok()) {
        assert_in_place(&f, &arena, &all[d.tag as usize]);
    }
}

#[test]
fn a_faulty_reader_reorders_what_is_ready_together() {
    let f = Fixture::new(1 << 20);
    let arena = arena(16 << 20);
    let inner = open(f.files(), &arena, ReaderKind::Pread, serial());
    let plan = FaultPlan { seed: 1, delay: 0.0, fail: 0.0, retry: 0.0, reorder: true };
    let mut reader = FaultyReader::new(inner, plan);
    let all = requests(&[(0, 1000, ReadClass::Demand); 20]);
    // One thread completes them in order; several wait for a reap if it lags.
    let reordered = (0..200).any(|_| {
        all.iter().for_each(|r| reader.submit(*r).unwrap());
        reader.kick();
        std::thread::sleep(Duration::from_millis(2));
        !drain(&mut reader).iter().map(|d| d.tag).is_sorted()
    });
    assert!(reordered);
}

#[test]
fn a_thread_may_hand_reads_over_and_end() {
    let f = Fixture::new(4 << 20);
    for kind in kinds() {
        let arena = arena(64 << 20);
        let reader = open(f.files(), &arena, kind, ReaderOptions::default());
        let all = requests(&[(0, 4 << 20, ReadClass::Demand); 15]);
        let begin = |mut reader: Box<dyn Reader>| {
            for r in &all {
                reader.submit(*r).unwrap();
            }
            reader.kick();
            reader
        };
        let mut reader = std::thread::scope(|s| s.spawn(|| begin(reader)).join().unwrap());
        assert!(drain(&mut *reader).iter().all(|d| d.result.is_ok()));
        all.iter().for_each(|r| assert_in_place(&f, &arena, r));
    }
}
