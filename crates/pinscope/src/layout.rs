//! How the arena is cut into slots.
//!
//! A slot holds one expert with all its parts, each at the same distance from
//! the slot's start modulo a page as its bytes have from the start of the file:
//! so O_DIRECT reads whole pages into place and nothing is copied. GGUF aligns
//! tensors to 32 bytes only, hence a part takes up to two pages more than its
//! bytes.
//!
//! Experts of one model differ in size between layers (mixed quantisation).
//! Layers whose experts have the same sizes form a [`SizeClass`]; each class has
//! its own slots, in proportion to the bytes of its experts, so that no slot
//! is larger than what it holds.
//!
//! A class in which all experts fit has no slots at all: its parts mirror the
//! file, expert after expert at the file's own distance. Then llama.cpp's
//! sub-graphs work on them as they are. Two experts may share a page there;
//! reads of whole pages write the same bytes into it twice.

use crate::map::{ExpertMap, Part};

/// Page size that reads are aligned to, bytes.
pub const PAGE: u64 = 4096;

/// Slots that a class gets at least: one expert is computed while the next
/// one is read.
const MIN_SLOTS: u64 = 2;

/// Layers whose experts have slots of one shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeClass {
    /// Start of each part's room within a slot, bytes.
    pub part_start: Vec<u64>,
    /// Distance between slots, bytes; a multiple of [`PAGE`].
    pub stride: u64,
    /// Experts of all layers of the class.
    pub experts: u64,
    /// Slots that the arena has for them.
    pub slots: u64,
    /// Position of slot 0 in the arena, bytes.
    pub base: u64,
}

/// The arena's cut for one model and one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The classes, in the order of their slots in the arena.
    pub classes: Vec<SizeClass>,
    /// Class of each layer of [`ExpertMap::layers`].
    pub class_of_layer: Vec<usize>,
    /// Rank of each layer's expert 0 among the experts of its class.
    pub first_rank: Vec<u64>,
    /// For each layer whose class is full: position of each part's expert 0
    /// in the arena, bytes.
    pub mirror: Vec<Option<Vec<u64>>>,
}

/// The arena is too small to compute anything.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{given} bytes for experts are too few: this model needs at least {needed}, \
     two experts of each size. Give more RAM, or a shorter context (-c)"
)]
pub struct TooSmall {
    /// Bytes offered.
    pub given: u64,
    /// Bytes needed.
    pub needed: u64,
}

impl Layout {
    /// Cuts `bytes` of arena for the experts of `map`.
    ///
    /// # Errors
    /// [`TooSmall`] when a class would have less than its minimum.
    pub fn new(map: &ExpertMap, bytes: u64) -> Result<Self, TooSmall> {
        let mut layout = Self::shapes(map);
        let needed = layout.classes.iter().map(|c| c.min_slots() * c.stride).sum();
        if bytes < needed {
            return Err(TooSmall { given: bytes, needed });
        }
        let total: u64 = layout.classes.iter().map(|c| c.experts * c.stride).sum();
        for c in &mut layout.classes {
            let share = u128::from(c.experts) * u128::from(bytes) / u128::from(total.max(1));
            c.slots = c.min_slots().max(u64::try_from(share).unwrap_or(u64::MAX).min(c.experts));
        }
        // Minimum shares of small classes may have overdrawn the sum.
        while layout.used() > bytes {
            let Some(c) = layout
                .classes
                .iter_mut()
                .filter(|c| c.slots > c.min_slots())
                .max_by_key(|c| c.slots * c.stride)
            else {
                break;
            };
            c.slots -= 1;
        }
        let mut left = bytes - layout.used();
        for c in &mut layout.classes {
            let more = (left / c.stride).min(c.experts - c.slots);
            c.slots += more;
            left -= more * c.stride;
        }
        let mut base = 0;
        for c in &mut layout.classes {
            c.base = base;
            base += c.slots * c.stride;
        }
        layout.mirror_full_classes(map);
        Ok(layout)
    }

    /// Smallest arena that works for `map`, bytes.
    pub fn min_bytes(map: &ExpertMap) -> u64 {
        Self::shapes(map).classes.iter().map(|c| c.min_slots() * c.stride).sum()
    }

    /// Arena in which all experts of `map` fit, bytes.
    pub fn full_bytes(map: &ExpertMap) -> u64 {
        Self::shapes(map).classes.iter().map(|c| c.experts * c.stride).sum()
    }

    /// Slots of a size that are neither pinned nor given back: what a token
    /// needs of one layer, and as much for what is read ahead.
    pub(crate) fn passing_slots(map: &ExpertMap) -> u64 {
        2 * u64::from(map.top_k())
    }

    /// Size of a slot of each layer of `map`, bytes.
    pub fn slot_bytes(map: &ExpertMap) -> Vec<u64> {
        let shapes = Self::shapes(map);
        shapes.class_of_layer.iter().map(|&c| shapes.classes[c].stride).collect()
    }

    /// Bytes of the arena that slots take.
    pub fn used(&self) -> u64 {
        self.classes.iter().map(|c| c.slots * c.stride).sum()
    }

    fn mirror_full_classes(&mut self, map: &ExpertMap) {
        let mut next: Vec<u64> = self.classes.iter().map(|c| c.base).collect();
        for (l, layer) in map.layers().iter().enumerate() {
            let class = self.class_of_layer[l];
            if !self.classes[class].is_full() {
                continue;
            }
            let parts = layer.parts.iter().map(|p| {
                let start = next[class] + p.offset % PAGE;
                next[class] = (start + u64::from(layer.experts) * p.bytes).next_multiple_of(PAGE);
                start
            });
            self.mirror[l] = Some(parts.collect());
        }
    }

    /// Classes without slots: layers whose experts have the same sizes. Where
    /// their parts lie differently on pages, a slot has room for the worst.
    fn shapes(map: &ExpertMap) -> Self {
        let mut rooms: Vec<(Vec<u64>, Vec<u64>)> = Vec::new();
        let mut class_of_layer = Vec::new();
        for layer in map.layers() {
            let bytes: Vec<u64> = layer.parts.iter().map(|p| p.bytes).collect();
            let room = layer.parts.iter().map(|p| part_room(p, layer.experts)).collect();
            match rooms.iter().position(|(b, _)| *b == bytes) {
                None => {
                    class_of_layer.push(rooms.len());
                    rooms.push((bytes, room));
                }
                Some(class) => {
                    class_of_layer.push(class);
                    let worst = rooms[class].1.iter_mut().zip(room);
                    worst.for_each(|(worst, room)| *worst = room.max(*worst));
                }
            }
        }
        let class = |(_, rooms): (_, Vec<u64>)| {
            let mut stride = 0;
            let start = |room: &u64| {
                stride += room;
                stride - room
            };
            let part_start = rooms.iter().map(start).collect();
            SizeClass { part_start, stride, experts: 0, slots: 0, base: 0 }
        };
        let mut classes: Vec<SizeClass> = rooms.into_iter().map(class).collect();
        let mut first_rank = Vec::new();
        for (layer, &class) in map.layers().iter().zip(&class_of_layer) {
            first_rank.push(classes[class].experts);
            classes[class].experts += u64::from(layer.experts);
        }
        Self { classes, class_of_layer, first_rank, mirror: vec![None; map.layers().len()] }
    }
}

/// Whole pages that a part of any expert touches, bytes.
fn part_room(part: &Part, experts: u32) -> u64 {
    let end = |e: u64| (part.offset + e * part.bytes) % PAGE + part.bytes;
    (0..u64::from(experts)).map(end).max().unwrap_or(0).next_multiple_of(PAGE)
}

impl SizeClass {
    fn min_slots(&self) -> u64 {
        MIN_SLOTS.min(self.experts)
    }

    /// Whether every expert of the class has a slot of its own.
    pub fn is_full(&self) -> bool {
        self.slots == self.experts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::{ModelFile, TensorInfo};
    use proptest::prelude::*;

    /// `sizes`: bytes of the gate, up and down matrix of an expert, per layer.
    fn map(sizes: &[[u64; 3]], experts: u64) -> ExpertMap {
        let mut offset = 64;
        let mut tensors = Vec::new();
        for (i, parts) in sizes.iter().enumerate() {
            for (name, bytes) in ["gate", "up", "down"].iter().zip(parts) {
                let size = bytes * experts;
                tensors.push(TensorInfo {
                    name: format!("blk.{i}.ffn_{name}_exps.weight"),
                    file: 0,
                    offset,
                    size,
                    ne: [1, 1, experts, 1],
                });
                offset += size;
            }
        }
        let files = vec![ModelFile { path: "m".into(), len: offset, header_len: 0 }];
        ExpertMap::new(files, tensors, 1).unwrap()
    }

    #[test]
    fn a_part_gets_the_pages_that_its_file_position_touches() {
        // 64 + 4096 bytes from offset 64 touch two pages; from a page boundary, one.
        let layout = Layout::new(&map(&[[4096, 4096, 4096]], 2), 1 << 20).unwrap();
        assert_eq!(layout.classes[0].part_start, [0, 8192, 16384]);
        assert_eq!(layout.classes[0].stride, 24576);
        assert!(layout.classes[0].is_full());
    }

    #[test]
    fn too_small_an_arena_names_what_it_needs() {
        let map = map(&[[4096, 4096, 4096]], 8);
        assert_eq!(Layout::new(&map, 49_151), Err(TooSmall { given: 49_151, needed: 49_152 }));
        assert_eq!(Layout::new(&map, 49_152).unwrap().classes[0].slots, 2);
    }

    proptest! {
        #[test]
        fn slots_stay_in_the_arena_and_hold_their_experts(
            sizes in prop::collection::vec(prop::array::uniform3(1u64..40_000), 1..6),
            experts in 1u64..12,
            permille in 0u64..1400,
        ) {
            let map = map(&sizes, experts);
            let bytes = Layout::full_bytes(&map) * permille / 1000;
            match Layout::new(&map, bytes) {
                Err(e) => prop_assert!(bytes < e.needed),
                Ok(layout) => {
                    prop_assert!(layout.used() <= bytes);
                    let mut end = 0;
                    for c in &layout.classes {
                        prop_assert_eq!(c.base, end);
                        end += c.slots * c.stride;
                        prop_assert!(c.slots >= 1 && c.slots <= c.experts);
                    }
                    // What is left over would not hold another expert.
                    for c in layout.classes.iter().filter(|c| !c.is_full()) {
                        prop_assert!(bytes - layout.used() < c.stride);
                    }
                    for (l, layer) in map.layers().iter().enumerate() {
                        let c = &layout.classes[layout.class_of_layer[l]];
                        if let Some(parts) = &layout.mirror[l] {
                            for (start, part) in parts.iter().zip(&layer.parts) {
                                prop_assert_eq!(start % PAGE, part.offset % PAGE);
                                prop_assert!(*start >= c.base);
                                let end = start + experts * part.bytes;
                                prop_assert!(end <= c.base + c.slots * c.stride);
                            }
                        }
                        for (p, part) in layer.parts.iter().enumerate() {
                            let end = c.part_start.get(p + 1).copied().unwrap_or(c.stride);
                            for e in 0..experts {
                                let at = part.offset + e * part.bytes;
                                prop_assert!(c.part_start[p] + at % PAGE + part.bytes <= end);
                            }
                        }
                    }
                }
            }
        }
    }
}
