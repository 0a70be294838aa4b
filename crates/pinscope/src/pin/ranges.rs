//! Which pages of a model's files are worth keeping, within a budget.
//!
//! Every token needs all dense tensors, so they come first; then experts,
//! hottest first. Weights do not begin or end at pages: a page counts once,
//! however many weights share it.

use std::ops::Range;

use super::pages::Pages;
use crate::map::ExpertMap;
use crate::policy::ExpertId;

/// Page ranges of each file, bytes; disjoint, in order, not touching.
pub type FileRanges = Vec<Vec<Range<u64>>>;

/// The pages that were chosen, and whose they are.
#[derive(Debug, Clone)]
pub struct Selection {
    page: u64,
    /// For each file: all that is selected, and the dense part of it.
    all: Vec<Pages>,
    dense: Vec<Pages>,
    dense_complete: bool,
    chosen: Vec<bool>,
    experts: Vec<ExpertId>,
    bytes: u64,
}

impl Selection {
    /// Chooses pages of `page` bytes of the model of `map`: dense tensors, then
    /// the experts of `order` (hottest first) that still fit in `budget` bytes.
    ///
    /// If not even the dense tensors fit, as many of their pages as do are
    /// chosen, in the order of the files, and no experts. Ids that the model
    /// does not have, and repeated ones, are passed over.
    pub fn new(map: &ExpertMap, order: &[ExpertId], budget: u64, page: u64) -> Selection {
        let files = map.files().len();
        let mut selection = Selection {
            page,
            all: vec![Pages::default(); files],
            dense: vec![Pages::default(); files],
            dense_complete: false,
            chosen: vec![false; map.layers().len() * map.experts_per_layer() as usize],
            experts: Vec::new(),
            bytes: 0,
        };
        selection.extend(map, order, budget);
        selection
    }

    /// Goes on as if the budget had been `budget` bytes in all.
    pub fn extend(&mut self, map: &ExpertMap, order: &[ExpertId], budget: u64) {
        self.dense_complete = self.add_dense(map, budget);
        if !self.dense_complete {
            return;
        }
        for &id in order {
            let Some(pages) = self.pages_of(map, id) else { continue };
            let missing: Vec<(usize, Range<u64>)> = pages
                .iter()
                .enumerate()
                .flat_map(|(file, p)| p.ranges().map(move |r| (file, r)))
                .flat_map(|(file, r)| self.all[file].missing(r).into_iter().map(move |m| (file, m)))
                .collect();
            let new: u64 = missing.iter().map(|(_, r)| r.end - r.start).sum();
            if self.bytes + new > budget {
                continue;
            }
            for (file, range) in missing {
                self.all[file].insert(range);
            }
            self.bytes += new;
            self.chosen[id.0 as usize] = true;
            self.experts.push(id);
        }
    }

    /// Everything that is selected.
    pub fn ranges(&self) -> FileRanges {
        self.all.iter().map(|p| p.ranges().collect()).collect()
    }

    /// The part of it that dense tensors need.
    pub fn dense_ranges(&self) -> FileRanges {
        self.dense.iter().map(|p| p.ranges().collect()).collect()
    }

    /// What is selected here and not in `other`, ranges of the same files.
    pub fn beyond(&self, other: &FileRanges) -> FileRanges {
        let less = |(all, other): (&Pages, &Vec<Range<u64>>)| {
            let mut without = Pages::default();
            for range in other {
                without.insert(range.clone());
            }
            all.ranges().flat_map(|r| without.missing(r)).collect()
        };
        self.all.iter().zip(other).map(less).collect()
    }

    /// Experts with all their bytes selected, hottest first.
    pub fn experts(&self) -> &[ExpertId] {
        &self.experts
    }

    /// Whether every dense tensor is selected.
    pub fn dense_complete(&self) -> bool {
        self.dense_complete
    }

    /// Size of all selected pages; a multiple of the page size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Selects dense tensors up to the budget; whether all fitted.
    fn add_dense(&mut self, map: &ExpertMap, budget: u64) -> bool {
        let mut tensors: Vec<_> = map.dense_tensors().collect();
        tensors.sort_unstable_by_key(|t| (t.file, t.offset));
        for tensor in tensors {
            let file = usize::from(tensor.file);
            for mut gap in self.all[file].missing(self.widen(tensor.offset, tensor.size)) {
                let room = budget.saturating_sub(self.bytes) / self.page * self.page;
                let cut = gap.end - gap.start > room;
                gap.end = gap.end.min(gap.start + room);
                self.bytes += gap.end - gap.start;
                self.all[file].insert(gap.clone());
                self.dense[file].insert(gap);
                if cut {
                    return false;
                }
            }
        }
        true
    }

    /// The pages of an expert in each file; `None` if there is no such expert
    /// or it is selected already.
    fn pages_of(&self, map: &ExpertMap, id: ExpertId) -> Option<Vec<Pages>> {
        if *self.chosen.get(id.0 as usize)? {
            return None;
        }
        let per_layer = map.experts_per_layer();
        let layer = map.layers().get((id.0 / per_layer) as usize)?;
        let expert = id.0 % per_layer;
        if expert >= layer.experts {
            return None;
        }
        let mut pages = vec![Pages::default(); self.all.len()];
        for part in &layer.parts {
            let offset = part.offset + u64::from(expert) * part.bytes;
            pages[usize::from(part.file)].insert(self.widen(offset, part.bytes));
        }
        Some(pages)
    }

    /// The whole pages around `bytes` bytes at `offset`.
    fn widen(&self, offset: u64, bytes: u64) -> Range<u64> {
        if bytes == 0 {
            return offset..offset;
        }
        let start = offset / self.page * self.page;
        start..(offset + bytes).next_multiple_of(self.page)
    }
}

#[cfg(test)]
mod tests;
