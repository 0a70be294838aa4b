//! One pass through one layer: what it needs, in the order in which that lands.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{Demand, Residency, ResidencyError, State, PARTS_PER_EXPERT};
use crate::reader::ReadError;
use crate::timeline::Activity;

/// What of an expert can be computed.
///
/// The down projection is needed last, and read last: while it is on its way,
/// gate and up can be computed. So no more than a third of an expert's work is
/// left when the last byte lands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// All of it.
    Whole,
    /// Gate and up; the expert comes once more, as [`Stage::Second`].
    First,
    /// What is left after [`Stage::First`].
    Second,
}

/// Experts of the pass that is open.
#[derive(Default)]
pub(super) struct Pass {
    pub layer: usize,
    /// Missing, not yet given a slot.
    pub waiting: VecDeque<u32>,
    /// Being read.
    pub loading: usize,
    pub decode: bool,
    /// In RAM, not yet taken.
    ready: VecDeque<u32>,
    /// In RAM but for the down projection, not taken as such.
    begun: Vec<u32>,
    /// Taken as [`Stage::First`], still being read.
    half: Vec<u32>,
    /// Taken as [`Stage::First`], in RAM now.
    second: Vec<u32>,
    /// Taken for good, not yet finished.
    taken: usize,
    /// Experts of the pass, all together.
    asked: usize,
}

impl Pass {
    /// Starts over and keeps what memory the lists have.
    pub fn reset(&mut self, layer: usize, decode: bool) {
        (self.layer, self.decode, self.loading, self.taken) = (layer, decode, 0, 0);
        self.waiting.clear();
        self.ready.clear();
        self.begun.clear();
        self.half.clear();
        self.second.clear();
    }

    /// Nothing is left to take or to give back.
    fn is_over(&self) -> bool {
        self.taken + self.loading + self.waiting.len() + self.ready.len() + self.second.len() == 0
    }

    /// Experts that can be computed now.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    /// All parts of an expert are there.
    pub fn landed(&mut self, expert: u32) {
        self.loading -= 1;
        match self.half.iter().position(|&e| e == expert) {
            Some(at) => self.second.push(self.half.swap_remove(at)),
            None => {
                self.begun.retain(|&e| e != expert);
                self.ready.push_back(expert);
            }
        }
    }

    /// All parts of an expert are there but the one that is needed last.
    pub fn all_but_last_landed(&mut self, expert: u32) {
        self.begun.push(expert);
    }

    /// A read failed that nobody had asked for when it began: once more.
    pub fn again(&mut self, expert: u32) {
        self.loading -= 1;
        self.begun.retain(|&e| e != expert);
        self.waiting.push_back(expert);
    }
}

impl Residency {
    /// Opens a pass through `layer` (a position in [`ExpertMap::layers`]) for
    /// a batch of `tokens`. Reads of missing experts are on their way when it
    /// returns. `demand` lists each expert once.
    ///
    /// [`ExpertMap::layers`]: crate::map::ExpertMap::layers
    ///
    /// # Errors
    /// When the system refuses a read.
    pub fn begin(
        &mut self,
        layer: usize,
        tokens: usize,
        demand: &[Demand],
    ) -> Result<(), ResidencyError> {
        debug_assert!(self.pass.waiting.is_empty() && self.pass.taken == 0);
        // With LoRA and the like a layer is several passes.
        let again = layer == self.pass.layer && self.map.layers().len() > 1 && self.begun;
        if layer == 0 || tokens > 1 {
            // The last layer sees only the tokens that produce output: one
            // token there can be the end of a prompt.
            self.decoding = tokens <= 1;
        }
        self.pass.reset(layer, self.decoding);
        self.begun = true;
        self.collect(false)?;
        if layer == 0 {
            self.check_daemon();
        }
        if !again {
            self.watch(layer, tokens, demand);
        }
        let token = self.counters().tokens;
        self.clock.pass(layer, token, self.decoding);
        self.judge_predictions(layer, demand);
        let class = self.layout.class_of_layer[layer];
        // Where all experts fit nobody has to give way.
        let judged = !again && !self.pools[class].full;
        if judged {
            self.pools[class].policy.on_pass(layer as u32, tokens as u32);
        }
        self.pass.asked = demand.len();
        let (bytes, parts) = {
            let experts = &self.map.layers()[layer];
            (experts.expert_bytes(), experts.parts.len())
        };
        for d in demand {
            let id = self.id(layer, d.expert);
            self.in_use[id.0 as usize] = true;
            if judged {
                let weight = d.weight / d.tokens.max(1) as f32;
                self.pools[class].policy.on_select(id, d.tokens, weight);
            }
            match self.state[id.0 as usize] {
                State::Resident { .. } | State::Shared => {
                    let shared = self.state[id.0 as usize] == State::Shared;
                    let pinned = shared || self.is_pinned[id.0 as usize];
                    self.counters().hits += 1;
                    self.counters().pinned_hits += u64::from(pinned);
                    self.pass.ready.push_back(d.expert);
                }
                State::Loading { missing, failed, .. } => {
                    self.counters().misses += 1;
                    self.counters().bytes_needed += bytes;
                    self.pass.loading += 1;
                    if !failed && missing == last_part(parts) {
                        self.pass.all_but_last_landed(d.expert);
                    }
                    for part in 0..parts {
                        self.reader.promote(u64::from(id.0) * PARTS_PER_EXPERT + part as u64);
                    }
                }
                State::Absent => {
                    self.counters().misses += 1;
                    self.counters().bytes_needed += bytes;
                    self.pass.waiting.push_back(d.expert);
                }
            }
        }
        if !again {
            // What was predicted for this layer and is still in the queue was
            // predicted wrongly, or is a demand read by now.
            self.drop_queued_prefetches()?;
        }
        self.load_waiting()
    }

    /// Accounts for what the router chose in a layer.
    fn watch(&mut self, layer: usize, tokens: usize, demand: &[Demand]) {
        if layer == 0 {
            for pool in self.pools.iter_mut().filter(|p| !p.full) {
                pool.policy.on_token();
            }
            self.counters().tokens += tokens as u64;
        }
        if layer == 0 && self.pass.decode {
            self.judge_worth();
        }
        if self.pass.decode {
            self.admission.layer_begins(Instant::now());
            self.admission.disk(self.reader.busy());
        }
        let first = self.id(layer, 0).0 as usize;
        let phase = match self.pass.decode {
            true => &mut self.routing.decode,
            false => &mut self.routing.prefill,
        };
        if layer == 0 {
            phase.tokens += tokens as f64;
        }
        for d in demand {
            phase.chosen[first + d.expert as usize] += f64::from(d.tokens);
            phase.weight[first + d.expert as usize] += f64::from(d.weight);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.pass(layer, tokens, self.pass.decode, demand);
        }
        self.watch_pins(layer, tokens, demand);
    }

    /// Experts of the open pass that can be computed, as far as the stage that
    /// is returned; an empty list when the pass has no more. Each expert comes
    /// once as a whole or, if `in_stages`, once in each of two stages. Waits
    /// for the disk only when nothing can be computed.
    ///
    /// # Errors
    /// A failed read of an expert of this pass. The pass is over then, and no
    /// read of it is on its way any more.
    pub fn take_ready(
        &mut self,
        in_stages: bool,
        out: &mut Vec<u32>,
    ) -> Result<Stage, ResidencyError> {
        out.clear();
        let taken = self.collect(false).and_then(|()| self.next_stage(in_stages));
        let stage = match taken {
            Ok(stage) => stage,
            Err(e) => {
                self.abort();
                return Err(e);
            }
        };
        match stage {
            Stage::Whole => out.extend(self.pass.ready.drain(..)),
            Stage::Second => out.append(&mut self.pass.second),
            Stage::First => {
                self.pass.half.extend_from_slice(&self.pass.begun);
                out.append(&mut self.pass.begun);
            }
        }
        if stage != Stage::First {
            self.pass.taken += out.len();
        }
        Ok(stage)
    }

    /// Waits until a stage has experts, or the pass no more.
    fn next_stage(&mut self, in_stages: bool) -> Result<Stage, ResidencyError> {
        self.load_waiting()?;
        loop {
            if self.pass.loading == 0 {
                self.release_held()?;
            }
            if !self.pass.ready.is_empty() {
                return Ok(Stage::Whole);
            }
            if !self.pass.second.is_empty() {
                return Ok(Stage::Second);
            }
            if in_stages && !self.pass.begun.is_empty() {
                return Ok(Stage::First);
            }
            // A slot may also come free when a prefetch lands.
            let slot_may_come = !self.pass.waiting.is_empty() && self.reader.outstanding() > 0;
            if self.pass.loading == 0 && !slot_may_come {
                break;
            }
            self.wait()?;
            self.load_waiting()?;
        }
        if !self.pass.waiting.is_empty() && self.pass.taken == 0 {
            let layer = self.map.layers()[self.pass.layer].index;
            return Err(ResidencyError::Stuck { layer });
        }
        Ok(Stage::Whole)
    }

    /// Gives back experts that were taken as a whole or for the second stage:
    /// they may be evicted from now on, and experts that waited for a slot are
    /// read.
    ///
    /// # Errors
    /// When the system refuses a read.
    pub fn finish(&mut self, experts: &[u32]) -> Result<(), ResidencyError> {
        for &e in experts {
            let id = self.id(self.pass.layer, e);
            self.in_use[id.0 as usize] = false;
        }
        self.pass.taken -= experts.len();
        if self.pass.decode && self.pass.is_over() {
            let now = Instant::now();
            let all = Duration::from_nanos(self.clock.splits()[1].ns(Activity::Experts));
            let computed = all.saturating_sub(self.computed);
            self.computed = all;
            self.admission.layer_ends(now, self.pass.asked, computed);
        }
        self.load_waiting()
    }

    /// Ends the open pass in any state: nothing is in use afterwards, and no
    /// read is on its way.
    pub fn abort(&mut self) {
        self.pass.waiting.clear();
        while self.reader.outstanding() > 0 {
            // One read's failure is no matter now; a reader that has broken
            // gives nothing back any more.
            if let Err(ResidencyError::Read(ReadError::Broken { .. })) = self.collect(true) {
                break;
            }
        }
        self.pass.reset(0, false);
        self.begun = false;
        self.in_use.fill(false);
        self.expected.clear();
        self.is_expected.fill(false);
    }

    /// Waits until something lands.
    fn wait(&mut self) -> Result<(), ResidencyError> {
        let start = Instant::now();
        let result = self.collect(true);
        self.admission.waited(start.elapsed());
        result
    }
}

/// The part that is needed last, as a bit.
pub(super) fn last_part(parts: usize) -> u8 {
    1 << (parts - 1)
}
