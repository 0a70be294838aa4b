//! How experts get slots and bytes.

use super::pass::last_part;
use super::{Residency, ResidencyError, State, PARTS_PER_EXPERT};
use crate::layout::PAGE;
use crate::policy::ExpertId;
use crate::reader::{ReadClass, ReadDone, ReadError, ReadRequest};
use crate::timeline::Activity;

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
        self.kick();
        Ok(())
    }

    pub(super) fn kick(&mut self) {
        if self.reader.outstanding() == 0 {
            return;
        }
        let outer = self.clock.enter(Activity::Submit);
        self.reader.kick();
        self.clock.enter(outer);
    }

    /// A free slot, or that of the expert that gives way.
    pub(super) fn slot_for(&mut self, layer: usize, expert: u32) -> Option<u64> {
        let outer = self.clock.enter(Activity::Evict);
        let slot = self.find_slot(layer, expert);
        self.clock.enter(outer);
        slot
    }

    fn find_slot(&mut self, layer: usize, expert: u32) -> Option<u64> {
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
        let outer = self.clock.enter(Activity::Submit);
        let id = self.id(layer, expert);
        if !self.is_pinned[id.0 as usize] {
            self.pools[self.layout.class_of_layer[layer]].policy.on_insert(id);
        }
        let parts = self.map.layers()[layer].parts.len();
        let prefetch = class == ReadClass::Prefetch;
        self.state[id.0 as usize] =
            State::Loading { slot, missing: all_parts(parts), failed: false, prefetch };
        // In the order of use, the down projection last.
        for i in 0..parts {
            let part = &self.map.layers()[layer].parts[i];
            let (file, bytes) = (part.file, part.bytes);
            let offset = part.offset + u64::from(expert) * bytes;
            let dest = self.part_position(layer, i, expert, slot);
            self.arena.note_use((dest + bytes) as usize);
            self.reader.submit(ReadRequest {
                tag: u64::from(id.0) * PARTS_PER_EXPERT + i as u64,
                file,
                offset,
                len: bytes as usize,
                dest: dest as usize,
                class,
            })?;
            self.on_the_way += bytes;
        }
        let in_flight = self.on_the_way;
        if let Some(recorder) = self.clock.recorder() {
            recorder.read_begins(id, prefetch, in_flight);
        }
        self.clock.enter(outer);
        Ok(())
    }

    /// Takes what the reader has finished into account; waits for something
    /// to finish if `block`.
    pub(super) fn collect(&mut self, block: bool) -> Result<(), ResidencyError> {
        if self.reader.outstanding() == 0 {
            return Ok(());
        }
        let outer = self.clock.enter(if block { Activity::Wait } else { Activity::Submit });
        let mut done = std::mem::take(&mut self.done);
        let result = self.reader.reap(&mut done, block).map_err(ResidencyError::from);
        let failed = self.account(&mut done);
        self.done = done;
        self.clock.enter(outer);
        result.and(failed)
    }

    /// Takes back prefetches that the disk does not have yet.
    pub(super) fn drop_queued_prefetches(&mut self) -> Result<(), ResidencyError> {
        if self.reader.outstanding() == 0 {
            return Ok(());
        }
        let outer = self.clock.enter(Activity::Submit);
        let mut done = std::mem::take(&mut self.done);
        self.reader.cancel_queued_prefetches(&mut done);
        let failed = self.account(&mut done);
        self.done = done;
        self.clock.enter(outer);
        failed
    }

    /// Accounts for reads that are over. Fails with the first one that an open
    /// pass needed.
    fn account(&mut self, done: &mut Vec<ReadDone>) -> Result<(), ResidencyError> {
        let per_layer = self.map.experts_per_layer() as usize;
        let mut result = Ok(());
        for read in done.drain(..) {
            let id = (read.tag / PARTS_PER_EXPERT) as usize;
            let State::Loading { slot, missing, failed, prefetch } = self.state[id] else {
                continue;
            };
            let part = (read.tag % PARTS_PER_EXPERT) as usize;
            let parts = &self.map.layers()[id / per_layer].parts;
            let (bytes, last) = (parts[part].bytes, last_part(parts.len()));
            self.on_the_way -= bytes;
            let first_failure = read.result.is_err() && !failed;
            let failed = failed || first_failure;
            let missing = missing & !(1 << part);
            self.state[id] = State::Loading { slot, missing, failed, prefetch };
            match read.result {
                Ok(()) => self.counters().bytes_read += bytes,
                // Nobody wanted it any more.
                Err(ReadError::Cancelled) => {
                    self.counters().prediction.dropped += u64::from(first_failure);
                }
                Err(e) if self.in_use[id] => result = result.and(Err(e.into())),
                Err(_) => {}
            }
            if missing == 0 {
                self.landed(id, slot, failed);
            } else if missing == last && !failed && self.in_use[id] {
                self.pass.all_but_last_landed((id % per_layer) as u32);
            }
        }
        result
    }

    /// All parts of an expert are back.
    fn landed(&mut self, id: usize, slot: u64, failed: bool) {
        let per_layer = self.map.experts_per_layer() as usize;
        let (layer, expert) = (id / per_layer, (id % per_layer) as u32);
        let in_flight = self.on_the_way;
        if let Some(recorder) = self.clock.recorder() {
            recorder.read_ends(ExpertId(id as u32), in_flight);
        }
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
            match failed {
                // A prefetch of which a part had failed, or was taken back,
                // before the layer asked for it: read again, now in earnest.
                // (The failure of a read that was asked for ends the pass, and
                // this with it.)
                true => self.pass.again(expert),
                false => self.pass.landed(expert),
            }
        }
    }
}

/// All parts of an expert, a bit each.
fn all_parts(parts: usize) -> u8 {
    (last_part(parts) << 1).wrapping_sub(1)
}
