//! How experts get slots and bytes.

use std::sync::Arc;
use std::time::Instant;

use super::{Residency, ResidencyError, State, PARTS_PER_EXPERT};
use crate::layout::PAGE;
use crate::policy::ExpertId;
use crate::reader::{ReadClass, ReadRequest};

impl Residency {
    /// Position of a part in the arena, congruent to its position in the file.
    pub(super) fn part_position(&self, layer: usize, part: usize, expert: u32, slot: u64) -> u64 {
        let class = &self.layout.classes[self.layout.class_of_layer[layer]];
        let p = &self.map.layers()[layer].parts[part];
        if let Some(parts) = &self.layout.mirror[layer] {
            return parts[part] + u64::from(expert) * p.bytes;
        }
        let offset = p.offset + u64::from(expert) * p.bytes;
        class.base + slot * class.stride + class.part_start[part] + offset % PAGE
    }

    /// Gives slots to waiting experts, as far as there are any, and reads them.
    pub(super) fn load_waiting(&mut self) -> Result<(), ResidencyError> {
        let layer = self.pass.layer;
        while let Some(&expert) = self.pass.waiting.front() {
            let Some(slot) = self.slot_for(layer, expert) else { break };
            self.pass.waiting.pop_front();
            self.pass.loading += 1;
            self.load(layer, expert, slot, ReadClass::Demand)?;
        }
        self.reader.kick();
        Ok(())
    }

    /// A free slot, or that of the expert that gives way.
    pub(super) fn slot_for(&mut self, layer: usize, expert: u32) -> Option<u64> {
        let class = self.layout.class_of_layer[layer];
        let id = self.id(layer, expert);
        let pool = &mut self.pools[class];
        if pool.full {
            return Some(self.layout.first_rank[layer] + u64::from(expert));
        }
        if let Some(slot) = pool.free.pop() {
            return Some(slot);
        }
        let (state, in_use, expected) = (&self.state, &self.in_use, &self.is_expected);
        let busy = |v: ExpertId| {
            in_use[v.0 as usize] || !matches!(state[v.0 as usize], State::Resident { .. })
        };
        let wanted = |v: ExpertId| expected[v.0 as usize] || busy(v);
        let victim = pool.policy.victim(id, &wanted).or_else(|| pool.policy.victim(id, &busy))?;
        pool.policy.on_remove(victim);
        let State::Resident { slot } =
            std::mem::replace(&mut self.state[victim.0 as usize], State::Absent)
        else {
            debug_assert!(false, "a policy gave a victim that is not resident");
            return None;
        };
        Some(slot)
    }

    pub(super) fn load(
        &mut self,
        layer: usize,
        expert: u32,
        slot: u64,
        class: ReadClass,
    ) -> Result<(), ResidencyError> {
        let id = self.id(layer, expert);
        let map = Arc::clone(&self.map);
        let parts = &map.layers()[layer].parts;
        if !self.is_pinned[id.0 as usize] {
            self.pools[self.layout.class_of_layer[layer]].policy.on_insert(id);
        }
        self.state[id.0 as usize] =
            State::Loading { slot, parts: parts.len() as u8, failed: false };
        for (i, part) in parts.iter().enumerate() {
            let dest = self.part_position(layer, i, expert, slot);
            self.arena.note_use((dest + part.bytes) as usize);
            self.reader.submit(ReadRequest {
                tag: u64::from(id.0) * PARTS_PER_EXPERT + i as u64,
                file: part.file,
                offset: part.offset + u64::from(expert) * part.bytes,
                len: part.bytes as usize,
                dest: dest as usize,
                class,
            })?;
            self.counters().bytes_read += part.bytes;
            if self.on_the_way == 0 {
                (self.asked, self.asked_bytes) = (Instant::now(), 0);
            }
            self.on_the_way += part.bytes;
            self.asked_bytes += part.bytes;
        }
        Ok(())
    }

    /// Takes what the reader has finished into account; waits for something
    /// to finish if `block`.
    pub(super) fn collect(&mut self, block: bool) -> Result<(), ResidencyError> {
        let mut done = std::mem::take(&mut self.done);
        let mut result = self.reader.reap(&mut done, block);
        for read in done.drain(..) {
            let id = (read.tag / PARTS_PER_EXPERT) as usize;
            let State::Loading { slot, parts, failed } = self.state[id] else { continue };
            let failed = failed || read.result.is_err();
            let per_layer = self.map.experts_per_layer() as usize;
            let part = (read.tag % PARTS_PER_EXPERT) as usize;
            self.on_the_way -= self.map.layers()[id / per_layer].parts[part].bytes;
            if result.is_ok() && self.in_use[id] {
                result = read.result;
            }
            self.state[id] = State::Loading { slot, parts: parts - 1, failed };
            if parts == 1 {
                self.landed(id, slot, failed);
            }
        }
        self.done = done;
        Ok(result?)
    }

    /// All parts of an expert are back.
    fn landed(&mut self, id: usize, slot: u64, failed: bool) {
        let per_layer = self.map.experts_per_layer() as usize;
        let (layer, expert) = (id / per_layer, (id % per_layer) as u32);
        if failed {
            let pool = &mut self.pools[self.layout.class_of_layer[layer]];
            if !self.is_pinned[id] {
                pool.policy.on_remove(ExpertId(id as u32));
            }
            if !pool.full {
                pool.free.push(slot);
            }
            self.state[id] = State::Absent;
        } else {
            self.state[id] = State::Resident { slot };
        }
        if layer == self.pass.layer && self.in_use[id] {
            self.pass.loading -= 1;
            if failed {
                // A prefetch of which a part had failed before the layer asked
                // for it: read again, now in earnest. (The failure of a read
                // that was asked for ends the pass, and this with it.)
                self.pass.waiting.push_back(expert);
            } else {
                self.pass.ready.push_back(expert);
            }
        }
    }
}
