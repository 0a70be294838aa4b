//! Filling the arena before the first token: all experts where they fit, the
//! pinned ones where not.

use super::{Residency, ResidencyError, State};

impl Residency {
    /// Loads every expert that has a slot of its own, in the order of the
    /// file; for models that fit. Nothing else is read meanwhile. `progress`
    /// hears of 0.0 to 1.0.
    ///
    /// # Errors
    /// A failed read.
    pub fn load_all(&mut self, progress: &mut dyn FnMut(f32)) -> Result<(), ResidencyError> {
        let all = self.map.layers().len();
        for layer in 0..all {
            if self.layout.mirror[layer].is_none() {
                continue;
            }
            progress(layer as f32 / all as f32);
            let all = (0..self.map.layers()[layer].experts).collect();
            self.load_now(layer, all)?;
        }
        progress(1.0);
        Ok(())
    }
    /// Loads the pinned experts, in the order of the file. `progress` hears of
    /// 0.0 to 1.0.
    ///
    /// # Errors
    /// A failed read.
    pub fn load_pins(&mut self, progress: &mut dyn FnMut(f32)) -> Result<(), ResidencyError> {
        let all = self.map.layers().len();
        for layer in 0..all {
            progress(layer as f32 / all as f32);
            let experts = 0..self.map.layers()[layer].experts;
            let pinned = experts.filter(|&e| self.is_pinned[self.id(layer, e).0 as usize]);
            let pinned = pinned.collect();
            self.load_now(layer, pinned)?;
        }
        progress(1.0);
        Ok(())
    }

    /// Loads those of the `experts` of a layer that are not in RAM.
    fn load_now(&mut self, layer: usize, mut experts: Vec<u32>) -> Result<(), ResidencyError> {
        experts.retain(|&e| self.state[self.id(layer, e).0 as usize] == State::Absent);
        self.pass.reset(layer, false);
        for &expert in &experts {
            let id = self.id(layer, expert);
            self.in_use[id.0 as usize] = true;
        }
        self.pass.waiting.extend(experts);
        self.load_waiting()?;
        let mut ready = Vec::new();
        loop {
            self.take_ready(false, &mut ready)?;
            if ready.is_empty() {
                return Ok(());
            }
            self.finish(&ready)?;
        }
    }
}
