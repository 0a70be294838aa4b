//! Against a file of random bytes: whatever is asked for, in whatever order
//! reads land, every expert that is handed out has the bytes of the file.

use std::collections::HashSet;
use std::io::Write;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::map::{ModelFile, TensorInfo};
use crate::reader::faulty::{FaultPlan, FaultyReader};
use crate::reader::ReaderOptions;

const EXPERTS: u32 = 6;

/// Three layers, one of them of another size, with sizes that are no multiple
/// of a page.
fn model(dir: &Path) -> (Arc<ExpertMap>, Vec<u8>) {
    let mut bytes = vec![0u8; 96];
    let mut tensors = Vec::new();
    for (layer, sizes) in
        [[5000, 5000, 3000], [5000, 5000, 9000], [5000, 5000, 3000]].iter().enumerate()
    {
        for (name, size) in ["gate", "up", "down"].iter().zip(sizes) {
            let size = *size as usize * EXPERTS as usize;
            tensors.push(TensorInfo {
                name: format!("blk.{layer}.ffn_{name}_exps.weight"),
                file: 0,
                offset: bytes.len() as u64,
                size: size as u64,
                ne: [1, 1, EXPERTS.into(), 1],
            });
            let seed = bytes.len();
            bytes.extend((0..size).map(|i| (((i + seed) * 2_654_435_761) >> 13) as u8));
        }
    }
    let path = dir.join("model");
    std::fs::File::create(&path).unwrap().write_all(&bytes).unwrap();
    let files = vec![ModelFile { path, len: bytes.len() as u64, header_len: 0 }];
    (Arc::new(ExpertMap::new(files, tensors, 2).unwrap()), bytes)
}

fn residency(map: &Arc<ExpertMap>, arena: u64, plan: FaultPlan) -> Residency {
    let layout = Layout::new(map, arena).unwrap();
    let arena = Arc::new(Arena::new(layout.used() as usize).unwrap());
    let files = Arc::new(ModelFiles::open(map.files()).unwrap());
    let options = ReaderOptions { chunk: 4096, ..ReaderOptions::default() };
    let (reader, _) =
        reader::open_reader(files, Arc::clone(&arena), ReaderKind::Auto, options).unwrap();
    let reader = Box::new(FaultyReader::new(reader, plan));
    Residency::with_reader(Arc::clone(map), layout, arena, reader, PolicyKind::default())
}

/// One pass; checks the bytes of each expert while it is taken.
fn pass(
    r: &mut Residency,
    file: &[u8],
    layer: usize,
    experts: &[u32],
) -> Result<(), ResidencyError> {
    let demand: Vec<_> =
        experts.iter().map(|&expert| Demand { expert, tokens: 1, weight: 0.5 }).collect();
    let mut left: HashSet<u32> = experts.iter().copied().collect();
    r.begin(layer, 1, &demand)?;
    // A predictor of no use at all must do no harm either.
    let wild: Vec<u32> = experts.iter().map(|e| (e * 5 + 1) % EXPERTS).collect();
    r.predict((layer + 1) % 3, &wild)?;
    let mut ready = Vec::new();
    let mut half = HashSet::new();
    // Either way, from pass to pass.
    let in_stages = experts[0].is_multiple_of(2);
    loop {
        let stage = r.take_ready(in_stages, &mut ready)?;
        if ready.is_empty() {
            break;
        }
        for &e in &ready {
            match stage {
                Stage::First => assert!(in_stages && half.insert(e), "expert {e} came half twice"),
                Stage::Second => assert!(half.remove(&e), "expert {e} had no first stage"),
                Stage::Whole => assert!(!half.contains(&e), "expert {e} came half and whole"),
            }
            let whole = stage != Stage::First;
            assert!(!whole || left.remove(&e), "expert {e} was not asked for, or came twice");
            let parts = r.map().layers()[layer].parts.clone();
            let there = parts.len() - usize::from(!whole);
            for (i, part) in parts[..there].iter().enumerate() {
                let at = (part.offset + u64::from(e) * part.bytes) as usize;
                let want = &file[at..at + part.bytes as usize];
                let ptr = r.part_ptr(layer, i, e).unwrap();
                // SAFETY: the expert is taken, so its bytes are in the arena
                // and nothing is read into them.
                let got = unsafe { std::slice::from_raw_parts(ptr, want.len()) };
                assert!(got == want, "layer {layer} expert {e} part {i} has wrong bytes");
            }
        }
        // One at a time, so that experts that wait for a slot get it late.
        for e in ready.iter().filter(|_| stage != Stage::First) {
            r.finish(&[*e])?;
        }
    }
    assert!(left.is_empty() && half.is_empty(), "experts {left:?} never became ready");
    Ok(())
}

fn passes() -> impl Strategy<Value = Vec<(usize, Vec<u32>)>> {
    let experts = prop::collection::hash_set(0..EXPERTS, 1..=EXPERTS as usize);
    let pass = (0..3usize, experts.prop_map(|s| s.into_iter().collect()));
    prop::collection::vec(pass, 1..30)
}

mod order;
mod pins;
mod record;
mod shared;
mod shrink;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_expert_handed_out_has_the_bytes_of_the_file(
        passes in passes(), permille in 0u64..=1000, seed: u64,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (map, file) = model(dir.path());
        let arena = Layout::min_bytes(&map).max(Layout::full_bytes(&map) * permille / 1000);
        let plan = FaultPlan { seed, delay: 0.3, fail: 0.0, retry: 0.1, reorder: true };
        let mut r = residency(&map, arena, plan);
        for (layer, experts) in &passes {
            pass(&mut r, &file, *layer, experts).unwrap();
        }
        let asked: usize = passes.iter().map(|(_, e)| e.len()).sum();
        let c = r.stats().decode;
        prop_assert_eq!(c.hits + c.misses, asked as u64);
    }

    #[test]
    fn a_failed_read_fails_its_pass_and_nothing_else(
        passes in passes(), permille in 0u64..=1000, seed: u64,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (map, file) = model(dir.path());
        let arena = Layout::min_bytes(&map).max(Layout::full_bytes(&map) * permille / 1000);
        let plan = FaultPlan { seed, delay: 0.2, fail: 0.15, retry: 0.1, reorder: true };
        let mut r = residency(&map, arena, plan);
        for (layer, experts) in &passes {
            match pass(&mut r, &file, *layer, experts) {
                Ok(()) => {}
                Err(ResidencyError::Read(_)) => r.abort(),
                Err(e) => panic!("{e}"),
            }
        }
    }
}

#[test]
fn a_second_pass_over_the_same_experts_reads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    let plan = FaultPlan { seed: 1, delay: 0.0, fail: 0.0, retry: 0.0, reorder: false };
    let mut r = residency(&map, Layout::full_bytes(&map) / 2, plan);
    pass(&mut r, &file, 0, &[1, 4]).unwrap();
    let first = r.stats().decode;
    assert_eq!((first.hits, first.misses, first.bytes_read), (0, 2, 2 * 13_000));
    pass(&mut r, &file, 0, &[4, 1]).unwrap();
    let second = r.stats().decode.since(&first);
    assert_eq!((second.hits, second.misses, second.bytes_read), (2, 0, 0));
}

#[test]
fn when_everything_fits_it_can_be_loaded_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    let plan = FaultPlan { seed: 1, delay: 0.0, fail: 0.0, retry: 0.0, reorder: false };
    let mut r = residency(&map, Layout::full_bytes(&map), plan);
    pass(&mut r, &file, 1, &[0]).unwrap();
    let mut heard = Vec::new();
    r.load_all(&mut |p| heard.push(p)).unwrap();
    assert!(heard.is_sorted() && heard.last() == Some(&1.0));
    assert_eq!(r.stats().prompt.bytes_read + r.stats().decode.bytes_read, map.expert_bytes_total());
    let before = r.stats().decode;
    for layer in 0..3 {
        pass(&mut r, &file, layer, &[0, 1, 2, 3, 4, 5]).unwrap();
    }
    assert_eq!(r.stats().decode.since(&before).misses, 0);
}
