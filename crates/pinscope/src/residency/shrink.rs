//! Giving memory back to the system while others need it, and taking it again.
//!
//! The arena shrinks from the end of each size class, by whole slots; the
//! coldest experts go, wherever they are, and hotter ones that lie in the way
//! move to their places. Nothing is read for it.

use super::{Residency, ResidencyError, State};
use crate::layout::{Layout, PAGE};
use crate::policy::ExpertId;
use crate::reader::ReadError;

impl Residency {
    /// Gives at least `bytes` of the arena back to the system if the layers
    /// can do without. Returns how many bytes it was.
    ///
    /// # Errors
    /// Reads that were on their way and failed, and a kernel that does not take
    /// the memory. What was given back until then stays so.
    pub fn give_back(&mut self, bytes: u64) -> Result<u64, ResidencyError> {
        self.settle()?;
        let keep = Layout::passing_slots(&self.map);
        let mut given = 0;
        while given < bytes {
            let spare = |class: usize| {
                let pool = &self.pools[class];
                let stride = self.layout.classes[class].stride;
                if pool.full {
                    0
                } else {
                    pool.held.saturating_sub(keep) * stride
                }
            };
            let Some(class) = (0..self.pools.len()).max_by_key(|&c| spare(c)) else { break };
            if spare(class) == 0 {
                break;
            }
            let stride = self.layout.classes[class].stride;
            let slots = (bytes - given).min(spare(class)).div_ceil(stride);
            let held = self.pools[class].held - slots;
            self.vacate(class, held);
            let range = self.slots_range(class, held, held + slots);
            self.reader.forget(range.clone());
            self.arena.release(range)?;
            given += slots * stride;
            self.stats.given_back += slots * stride;
        }
        Ok(given)
    }

    /// Takes up to `bytes` of what was given back. They fill again as experts
    /// are asked for. Returns how many bytes it was.
    pub fn take_again(&mut self, bytes: u64) -> u64 {
        let mut taken = 0;
        for class in 0..self.pools.len() {
            let (stride, all) = {
                let c = &self.layout.classes[class];
                (c.stride, c.slots)
            };
            let held = self.pools[class].held;
            let slots = (all - held).min((bytes - taken) / stride);
            if slots == 0 {
                continue;
            }
            self.pools[class].free.splice(0..0, (held..held + slots).rev());
            self.pools[class].held += slots;
            let released: Vec<_> = (0..self.pools.len()).map(|c| self.released_range(c)).collect();
            self.arena.reuse(self.slots_range(class, held, held + slots), &released);
            taken += slots * stride;
        }
        self.stats.given_back -= taken;
        self.apply_pins();
        taken
    }

    /// Waits until no read is on its way. What a prefetch failed with is no
    /// matter here.
    fn settle(&mut self) -> Result<(), ResidencyError> {
        while self.reader.outstanding() > 0 {
            match self.collect(true) {
                Err(e @ ResidencyError::Read(ReadError::Broken { .. })) => return Err(e),
                _ => continue,
            }
        }
        Ok(())
    }

    /// Empties the slots of a class from `held` on.
    fn vacate(&mut self, class: usize, held: u64) {
        let pool = &mut self.pools[class];
        pool.held = held;
        pool.free.retain(|&slot| slot < held);
        // Pins must leave room in what is left.
        self.apply_pins();
        let above = |state: &State| match *state {
            State::Resident { slot } if slot >= held => Some(slot),
            _ => None,
        };
        for i in 0..self.state.len() {
            let id = ExpertId(i as u32);
            if self.class_of(id) != class {
                continue;
            }
            // Each round either finds a place for the expert or evicts one.
            while above(&self.state[i]).is_some() {
                if let Some(slot) = self.pools[class].free.pop() {
                    self.move_to(id, slot);
                } else if !self.evict_coldest(class, id) {
                    // All that is left is pinned: it goes, pinned or not.
                    self.state[i] = State::Absent;
                }
            }
        }
    }

    /// Frees the slot of the coldest expert of a class that is not pinned.
    fn evict_coldest(&mut self, class: usize, wanting: ExpertId) -> bool {
        let in_use = &self.in_use;
        let pool = &mut self.pools[class];
        let Some(coldest) = pool.policy.victim(wanting, &|v| in_use[v.0 as usize]) else {
            return false;
        };
        pool.policy.on_remove(coldest);
        let was = std::mem::replace(&mut self.state[coldest.0 as usize], State::Absent);
        if let State::Resident { slot } = was {
            if slot < pool.held {
                pool.free.push(slot);
            }
        }
        true
    }

    /// Copies an expert's bytes to a free slot.
    fn move_to(&mut self, id: ExpertId, slot: u64) {
        let State::Resident { slot: old } = self.state[id.0 as usize] else { return };
        let per_layer = self.map.experts_per_layer();
        let (layer, expert) = ((id.0 / per_layer) as usize, id.0 % per_layer);
        for part in 0..self.map.layers()[layer].parts.len() {
            let bytes = self.map.layers()[layer].parts[part].bytes as usize;
            let from = self.part_position(layer, part, expert, old) as usize;
            let to = self.part_position(layer, part, expert, slot) as usize;
            self.arena.note_use(to + bytes);
            // SAFETY: both are this expert's slots, which nothing is read into
            // (see `settle`) and nobody computes on (no pass is open).
            unsafe {
                std::ptr::copy_nonoverlapping(self.arena.ptr(from), self.arena.ptr(to), bytes);
            }
        }
        self.state[id.0 as usize] = State::Resident { slot };
    }

    /// Bytes of a class that are given back; may be empty.
    fn released_range(&self, class: usize) -> std::ops::Range<usize> {
        self.slots_range(class, self.pools[class].held, self.layout.classes[class].slots)
    }

    /// Bytes of some slots in the arena.
    fn slots_range(&self, class: usize, from: u64, to: u64) -> std::ops::Range<usize> {
        let c = &self.layout.classes[class];
        debug_assert_eq!(c.stride % PAGE, 0);
        (c.base + from * c.stride) as usize..(c.base + to * c.stride) as usize
    }
}
