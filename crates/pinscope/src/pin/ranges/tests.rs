//! Selections against sets of page numbers.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::map::{ModelFile, TensorInfo};

const PAGE: u64 = 16;

/// What a random model is made of.
#[derive(Debug, Clone)]
struct Sketch {
    /// Dense or not, and bytes (of one expert), of every tensor.
    tensors: Vec<(bool, u64)>,
    files: u16,
    experts: u32,
}

impl Sketch {
    /// Tensors lie one behind the other, each at a multiple of 4 bytes, so that
    /// they share pages.
    fn map(&self) -> Option<ExpertMap> {
        let mut ends = vec![5u64; usize::from(self.files)];
        let mut tensors = Vec::new();
        for (i, &(dense, size)) in self.tensors.iter().enumerate() {
            let file = i as u16 % self.files;
            let end = &mut ends[usize::from(file)];
            let layer = i / 6;
            let role = ["gate", "up", "down"][i % 3];
            let (name, size, n) = if dense {
                (format!("dense.{i}"), size, 1)
            } else {
                let n = u64::from(self.experts);
                (format!("blk.{layer}.ffn_{role}_exps.weight"), size * n, n)
            };
            let offset = end.next_multiple_of(4);
            *end = offset + size;
            if tensors.iter().all(|t: &TensorInfo| t.name != name) {
                tensors.push(TensorInfo { name, file, offset, size, ne: [1, 1, n, 1] });
            }
        }
        let files =
            ends.iter().map(|&len| ModelFile { path: "m".into(), len, header_len: 0 }).collect();
        ExpertMap::new(files, tensors, 1).ok()
    }
}

/// Numbers of the pages of `bytes` bytes at `offset`, byte by byte.
fn page_numbers(file: u16, offset: u64, bytes: u64) -> BTreeSet<(u16, u64)> {
    (offset..offset + bytes).map(|b| (file, b / PAGE)).collect()
}

fn numbers(ranges: &FileRanges) -> BTreeSet<(u16, u64)> {
    let mut set = BTreeSet::new();
    for (file, ranges) in ranges.iter().enumerate() {
        for range in ranges {
            assert!(range.start % PAGE == 0 && range.end % PAGE == 0, "{range:?}");
            set.extend(page_numbers(file as u16, range.start, range.end - range.start));
        }
        assert!(ranges.windows(2).all(|w| w[0].end < w[1].start), "not joined: {ranges:?}");
    }
    set
}

/// The pages that should be selected, and the experts.
fn brute_force(
    map: &ExpertMap,
    order: &[ExpertId],
    budget: u64,
) -> (BTreeSet<(u16, u64)>, Vec<ExpertId>) {
    let mut pages = BTreeSet::new();
    let mut dense: Vec<_> = map.dense_tensors().collect();
    dense.sort_by_key(|t| (t.file, t.offset));
    for tensor in dense {
        for page in page_numbers(tensor.file, tensor.offset, tensor.size) {
            if !pages.contains(&page) && (pages.len() as u64 + 1) * PAGE > budget {
                return (pages, Vec::new());
            }
            pages.insert(page);
        }
    }
    let mut experts = Vec::new();
    for &id in order {
        let layer = &map.layers()[(id.0 / map.experts_per_layer()) as usize];
        let expert = u64::from(id.0 % map.experts_per_layer());
        let mut with = pages.clone();
        for part in &layer.parts {
            with.extend(page_numbers(part.file, part.offset + expert * part.bytes, part.bytes));
        }
        if with.len() as u64 * PAGE <= budget && !experts.contains(&id) {
            pages = with;
            experts.push(id);
        }
    }
    (pages, experts)
}

proptest! {
    #[test]
    fn selected_are_exactly_the_distinct_pages_that_fit(
        tensors in proptest::collection::vec((any::<bool>(), 1u64..50), 1..30),
        files in 1u16..4,
        experts in 1u32..6,
        order in proptest::collection::vec(any::<u32>(), 0..20),
        budget in 0u64..3000,
        more in 0u64..1000,
    ) {
        let Some(map) = (Sketch { tensors, files, experts }).map() else { return Ok(()) };
        let ids = map.layers().len() as u32 * map.experts_per_layer();
        let order: Vec<_> = order.into_iter().map(|id| ExpertId(id % ids)).collect();

        let mut selection = Selection::new(&map, &order, budget, PAGE);
        let (pages, experts) = brute_force(&map, &order, budget);
        prop_assert_eq!(numbers(&selection.ranges()), pages.clone());
        prop_assert_eq!(selection.experts(), &experts[..]);
        prop_assert_eq!(selection.bytes(), pages.len() as u64 * PAGE);
        prop_assert!(selection.bytes() <= budget);

        let dense: BTreeSet<_> =
            map.dense_tensors().flat_map(|t| page_numbers(t.file, t.offset, t.size)).collect();
        prop_assert_eq!(selection.dense_complete(), dense.is_subset(&pages));
        prop_assert!(numbers(&selection.dense_ranges()).is_subset(&dense));

        // With a larger budget everything stays and only new pages are beyond.
        let before = selection.ranges();
        selection.extend(&map, &order, budget + more);
        let beyond = numbers(&selection.beyond(&before));
        prop_assert!(beyond.is_disjoint(&pages));
        let both: BTreeSet<_> = beyond.union(&pages).copied().collect();
        prop_assert_eq!(both, numbers(&selection.ranges()));
        prop_assert!(selection.bytes() <= budget + more);
    }
}

/// One file: 24 dense bytes, then two experts of 8 bytes in each of two parts.
fn small() -> ExpertMap {
    let tensor = |name: &str, offset, size, n| TensorInfo {
        name: name.into(),
        file: 0,
        offset,
        size,
        ne: [1, 1, n, 1],
    };
    let tensors = vec![
        tensor("dense", 20, 24, 1),
        tensor("blk.0.ffn_up_exps.weight", 44, 16, 2),
        tensor("blk.0.ffn_down_exps.weight", 84, 16, 2),
    ];
    ExpertMap::new(vec![ModelFile { path: "m".into(), len: 100, header_len: 0 }], tensors, 1)
        .unwrap()
}

#[test]
fn a_page_that_dense_weights_and_an_expert_share_is_paid_once() {
    // Dense: bytes 20 to 44, pages 1 and 2. Expert 0: 44 to 52 (pages 2 and 3)
    // and 84 to 92 (page 5). Expert 1: 52 to 60 (page 3), 92 to 100 (5 and 6).
    let order = [ExpertId(0), ExpertId(1)];
    let selection = Selection::new(&small(), &order, 4 * PAGE, PAGE);
    assert_eq!(selection.ranges(), [vec![16..64, 80..96]]);
    assert_eq!(selection.dense_ranges()[0], std::slice::from_ref(&(16..48)));
    assert_eq!((selection.bytes(), selection.experts()), (64, &order[..1]));
    let all = Selection::new(&small(), &order, 5 * PAGE, PAGE);
    assert_eq!(all.ranges(), [vec![16..64, 80..112]]);
    assert_eq!(all.experts(), order);
}

#[test]
fn an_expert_that_does_not_fit_is_passed_over_for_one_that_does() {
    // Next to the dense pages expert 1 needs 3, 5 and 6; expert 0 only 3 and 5.
    let order = [ExpertId(1), ExpertId(0)];
    let selection = Selection::new(&small(), &order, 4 * PAGE, PAGE);
    assert_eq!(selection.experts(), [ExpertId(0)]);
}

#[test]
fn ids_that_the_model_does_not_have_are_passed_over() {
    let order = [ExpertId(2), ExpertId(u32::MAX), ExpertId(1)];
    let selection = Selection::new(&small(), &order, 1000, PAGE);
    assert_eq!(selection.experts(), [ExpertId(1)]);
}
