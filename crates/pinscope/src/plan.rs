//! What a given amount of RAM is used for, decided before anything is loaded.
//!
//! `--ram` is a promise on the whole process. Dense weights, KV cache, compute
//! buffers and the program itself come first; experts get the rest. The planner
//! refuses, with the smallest amount that works, what cannot work.

use crate::arena::HUGE_PAGE;
use crate::layout::Layout;
use crate::map::ExpertMap;
use crate::memory::format_bytes;
use serde::Serialize;

/// What comes on top of the process as it was when the plan was made: thread
/// stacks, queues of reads, sampling, rounding of weights to pages, and air.
const SLACK_BYTES: u64 = 24 << 20;

/// What the kernel needs to map a byte of arena, as a divisor: 8 bytes of page
/// table for a 4 KiB page, and as much again for registered buffers.
const PAGE_TABLE_DIVISOR: u64 = 256;

/// What a model needs besides its experts, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fixed {
    /// KV cache at the wanted context.
    pub kv: u64,
    /// Compute buffers.
    pub compute: u64,
    /// Logits.
    pub output: u64,
    /// The program with the model's vocabulary and tables, as measured.
    pub process: u64,
}

/// The division of the RAM; all sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// What was given.
    pub ram_bytes: u64,
    /// Weights outside of experts.
    pub dense_bytes: u64,
    /// KV cache.
    pub kv_bytes: u64,
    /// Compute buffers.
    pub compute_bytes: u64,
    /// Logits.
    pub output_bytes: u64,
    /// Program, vocabulary and page tables.
    pub overhead_bytes: u64,
    /// Left for experts: the arena. 0 when the RAM is below
    /// [`smallest_ram_bytes`](Self::smallest_ram_bytes).
    pub arena_bytes: u64,
    /// Experts that fit at once.
    pub experts_resident: u64,
    /// Experts of the model.
    pub experts_total: u64,
    /// Bytes of all experts.
    pub expert_bytes_total: u64,
    /// Experts that one token uses.
    pub experts_per_token: u64,
    /// Room that the experts of one token need.
    pub token_demand_bytes: u64,
    /// Room that the experts of one token in one layer need (the largest layer).
    pub layer_demand_bytes: u64,
    /// Smallest RAM that works at all.
    pub smallest_ram_bytes: u64,
    /// Smallest RAM in which everything fits.
    pub full_ram_bytes: u64,
    /// Every expert has a place: nothing is read twice.
    pub fits_all: bool,
    /// What the user should know before running this.
    pub warnings: Vec<String>,
}

/// The RAM cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} of RAM are too few for this model: {} go to what must be there (dense weights, \
     KV cache, buffers) and experts need at least {}. The smallest --ram that works is {}M; \
     a shorter context (-c) or smaller batches (-ub) lower it",
    format_bytes(*.ram),
    format_bytes(*.fixed),
    format_bytes(smallest.saturating_sub(*.fixed)),
    smallest.div_ceil(1 << 20)
)]
pub struct RamTooSmall {
    /// What was given, bytes.
    pub ram: u64,
    /// Everything but experts, bytes.
    pub fixed: u64,
    /// What works, bytes.
    pub smallest: u64,
}

impl Plan {
    /// Divides `ram` bytes for the model of `map`.
    pub fn new(map: &ExpertMap, fixed: Fixed, ram: u64) -> Plan {
        let slots = Layout::slot_bytes(map);
        let used: Vec<u64> =
            map.layers().iter().map(|l| u64::from(l.experts.min(map.top_k()))).collect();
        let demands = || slots.iter().zip(&used).map(|(slot, used)| slot * used);

        let must = map.dense_bytes()
            + fixed.kv
            + fixed.compute
            + fixed.output
            + fixed.process
            + SLACK_BYTES;
        let with_arena = |arena: u64| must + arena + arena / PAGE_TABLE_DIVISOR;
        let round = |bytes: u64| bytes.next_multiple_of(HUGE_PAGE as u64);
        let smallest_arena = round(Layout::min_bytes(map));
        let full_arena = round(Layout::full_bytes(map));

        let fits_all = with_arena(full_arena) <= ram;
        let arena_bytes = if fits_all {
            full_arena
        } else if with_arena(smallest_arena) <= ram {
            // arena + arena / d <= left, in whole huge pages, never below the smallest.
            let left = ram - must;
            let arena = left - left.div_ceil(PAGE_TABLE_DIVISOR + 1);
            (arena / HUGE_PAGE as u64 * HUGE_PAGE as u64).clamp(smallest_arena, full_arena)
        } else {
            0
        };
        let experts_resident = Layout::new(map, arena_bytes)
            .map_or(0, |layout| layout.classes.iter().map(|c| c.slots).sum());

        let mut plan = Plan {
            ram_bytes: ram,
            dense_bytes: map.dense_bytes(),
            kv_bytes: fixed.kv,
            compute_bytes: fixed.compute,
            output_bytes: fixed.output,
            overhead_bytes: fixed.process + SLACK_BYTES + arena_bytes / PAGE_TABLE_DIVISOR,
            arena_bytes,
            experts_resident,
            experts_total: map.expert_count(),
            expert_bytes_total: map.expert_bytes_total(),
            experts_per_token: used.iter().sum(),
            token_demand_bytes: demands().sum(),
            layer_demand_bytes: demands().max().unwrap_or(0),
            smallest_ram_bytes: with_arena(smallest_arena),
            full_ram_bytes: with_arena(full_arena),
            fits_all,
            warnings: Vec::new(),
        };
        plan.warnings = plan.find_warnings();
        plan
    }

    /// Everything but experts, bytes.
    pub fn fixed_bytes(&self) -> u64 {
        self.dense_bytes
            + self.kv_bytes
            + self.compute_bytes
            + self.output_bytes
            + self.overhead_bytes
    }

    /// Whether the plan can be carried out.
    ///
    /// # Errors
    /// [`RamTooSmall`], with the smallest amount that works.
    pub fn check(&self) -> Result<(), RamTooSmall> {
        if self.ram_bytes >= self.smallest_ram_bytes {
            return Ok(());
        }
        Err(RamTooSmall {
            ram: self.ram_bytes,
            fixed: self.fixed_bytes(),
            smallest: self.smallest_ram_bytes,
        })
    }

    fn find_warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.arena_bytes > 0 && !self.fits_all && self.arena_bytes < self.token_demand_bytes {
            warnings.push(format!(
                "Experts get {}, which is below one token's demand of {}: a plain \
                 least-recently-used cache would hit nothing. The default policy still does, \
                 but expect most experts to be read for each token.",
                format_bytes(self.arena_bytes),
                format_bytes(self.token_demand_bytes)
            ));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::{ModelFile, TensorInfo};

    const MIB: u64 = 1 << 20;

    /// 4 layers of 16 experts, 2 for a token; an expert has 3 parts of 1 MiB,
    /// page-aligned. 10 MiB of dense weights.
    fn map() -> ExpertMap {
        let mut tensors = vec![TensorInfo {
            name: "token_embd.weight".into(),
            file: 0,
            offset: 0,
            size: 10 * MIB,
            ne: [1, 1, 1, 1],
        }];
        for layer in 0..4 {
            for (part, name) in ["gate", "up", "down"].iter().enumerate() {
                tensors.push(TensorInfo {
                    name: format!("blk.{layer}.ffn_{name}_exps.weight"),
                    file: 0,
                    offset: (10 + (layer * 3 + part as u64) * 16) * MIB,
                    size: 16 * MIB,
                    ne: [1, 1, 16, 1],
                });
            }
        }
        let files = vec![ModelFile { path: "m".into(), len: 202 * MIB, header_len: 0 }];
        ExpertMap::new(files, tensors, 2).unwrap()
    }

    fn fixed() -> Fixed {
        Fixed { kv: 4 * MIB, compute: 3 * MIB, output: 2 * MIB, process: 25 * MIB }
    }

    /// 10 + 4 + 3 + 2 + 25 + 24.
    const MUST: u64 = 68 * MIB;

    #[test]
    fn the_arena_gets_what_is_left_in_whole_huge_pages() {
        // Left: 60 MiB, less 1/257 for page tables = 59.77, in huge pages 58.
        let plan = Plan::new(&map(), fixed(), MUST + 60 * MIB);
        assert_eq!(plan.arena_bytes, 58 * MIB);
        assert_eq!(plan.experts_resident, 19);
        assert_eq!((plan.experts_total, plan.experts_per_token), (64, 8));
        assert_eq!(plan.token_demand_bytes, 24 * MIB);
        assert_eq!(plan.layer_demand_bytes, 6 * MIB);
        assert_eq!(plan.fixed_bytes(), MUST + 58 * MIB / 256);
        assert!(plan.fixed_bytes() + plan.arena_bytes <= plan.ram_bytes);
        assert!(!plan.fits_all && plan.warnings.is_empty());
        assert_eq!(plan.check(), Ok(()));
    }

    #[test]
    fn a_budget_below_one_token_is_warned_of() {
        let plan = Plan::new(&map(), fixed(), MUST + 12 * MIB);
        assert_eq!(plan.arena_bytes, 10 * MIB);
        assert_eq!(plan.warnings.len(), 1);
        assert!(plan.warnings[0].contains("24 MiB"), "{:?}", plan.warnings);
    }

    #[test]
    fn the_smallest_ram_works_and_a_byte_less_does_not() {
        // Two experts of the one size, 6 MiB, and 1/256 of it.
        let smallest = MUST + 6 * MIB + 24576;
        let plan = Plan::new(&map(), fixed(), smallest);
        assert_eq!(plan.smallest_ram_bytes, smallest);
        assert_eq!((plan.arena_bytes, plan.experts_resident), (6 * MIB, 2));
        assert_eq!(plan.check(), Ok(()));

        let plan = Plan::new(&map(), fixed(), smallest - 1);
        assert_eq!((plan.arena_bytes, plan.experts_resident), (0, 0));
        let error = plan.check().unwrap_err();
        assert_eq!(error.smallest, smallest);
        assert!(error.to_string().contains("--ram that works is 75M"), "{error}");
    }

    #[test]
    fn with_enough_ram_everything_fits_and_no_more_is_taken() {
        let full = MUST + 192 * MIB + 192 * MIB / 256;
        let plan = Plan::new(&map(), fixed(), full);
        assert!(plan.fits_all);
        assert_eq!(plan.full_ram_bytes, full);
        assert_eq!((plan.arena_bytes, plan.experts_resident), (192 * MIB, 64));
        assert!(!Plan::new(&map(), fixed(), full - 1).fits_all);
        assert_eq!(Plan::new(&map(), fixed(), 10 * full).arena_bytes, 192 * MIB);
    }

    #[test]
    fn every_amount_between_is_kept() {
        for ram in (MUST + 7 * MIB..MUST + 200 * MIB).step_by(777_777) {
            let plan = Plan::new(&map(), fixed(), ram);
            assert!(plan.fixed_bytes() + plan.arena_bytes <= ram, "{ram}");
            // Nothing large is left over.
            let left = ram - plan.fixed_bytes() - plan.arena_bytes;
            assert!(plan.fits_all || left < 3 * MIB, "{ram}: {left}");
        }
    }
}
