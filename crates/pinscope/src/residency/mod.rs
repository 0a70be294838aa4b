//! Which experts are in RAM, and how they get there.
//!
//! [`Residency`] joins the map, the arena, a reader and a policy. The executor
//! of a layer opens a *pass* with the experts that the router chose, takes
//! them as they become ready (those in RAM at once, the others in the order in
//! which they land), and gives each back when it is computed:
//!
//! ```text
//! begin(layer, demand) ── take_ready ── compute ── finish ──┐
//!                             └──────── until None ─────────┘
//! ```
//!
//! An expert is never evicted while it is read or computed. A layer may need
//! more experts than there are slots (long prompts): those that do not fit
//! wait until others are finished, so the pass runs in waves by itself.

mod drift;
mod load;
mod pins;
mod prefetch;
mod record;
mod shared;
mod shrink;
mod stats;
mod warm;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

pub use stats::{Counters, Stats};

use crate::arena::{Arena, ArenaError};
use crate::layout::{Layout, TooSmall};
use crate::map::ExpertMap;
use crate::memory::swaps;
use crate::pin;
use crate::policy::{self, ExpertId, Policy, PolicyKind, PolicyShape};
use crate::profile::RoutingCounts;
use crate::reader::{self, ModelFiles, ReadDone, ReadError, Reader, ReaderKind, ReaderOptions};
use crate::trace::Recorder;

/// What a pass needs of one expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Demand {
    /// Expert of the layer.
    pub expert: u32,
    /// Tokens of the batch that chose it.
    pub tokens: u32,
    /// Sum of the weights with which they did; 0 if they are not known.
    pub weight: f32,
}

/// Why a [`Residency`] could not be made, or a pass not be finished.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ResidencyError {
    #[error(transparent)]
    TooSmall(#[from] TooSmall),
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(
        "all expert slots of layer {layer} are in use and none is being read: this is a bug in \
         PinScope, please report it"
    )]
    Stuck { layer: usize },
}

/// How a [`Residency`] is set up.
#[derive(Debug, Clone)]
pub struct ResidencyOptions {
    /// Arena for experts, bytes.
    pub arena_bytes: u64,
    /// Who gives way.
    pub policy: PolicyKind,
    /// How bytes are read.
    pub reader: ReaderKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    /// Parts still to come, and whether one of them failed.
    Loading {
        slot: u64,
        parts: u8,
        failed: bool,
    },
    Resident {
        slot: u64,
    },
    /// In the page cache, where a pin daemon keeps it.
    Shared,
}

/// Slots of one size class and who is in them.
struct Pool {
    policy: Box<dyn Policy>,
    free: Vec<u64>,
    /// Slots from this one on have been given back to the system.
    held: u64,
    full: bool,
}

/// Experts of the pass that is open.
#[derive(Default)]
struct Pass {
    layer: usize,
    /// Missing, not yet given a slot.
    waiting: VecDeque<u32>,
    /// In RAM, not yet taken.
    ready: VecDeque<u32>,
    /// Being read.
    loading: usize,
    /// Taken, not yet finished.
    taken: usize,
    decode: bool,
}

/// The experts of one model in an arena of fixed size.
pub struct Residency {
    map: Arc<ExpertMap>,
    layout: Layout,
    // The reader writes into the arena until it is dropped: it goes first.
    reader: Box<dyn Reader>,
    arena: Arc<Arena>,
    pools: Vec<Pool>,
    state: Vec<State>,
    in_use: Vec<bool>,
    /// Experts that the next layer is predicted to need, and whether they were
    /// prefetched for it: they give way only when nothing else can.
    expected: Vec<(ExpertId, bool)>,
    is_expected: Vec<bool>,
    /// By expert: never gives way. See [`pins`].
    is_pinned: Vec<bool>,
    shared: Option<shared::Shared>,
    pins: Option<pins::Pins>,
    news: Option<String>,
    admission: prefetch::Admission,
    /// Bytes on their way, and when the first of them was asked for.
    on_the_way: u64,
    asked: Instant,
    asked_bytes: u64,
    pass: Pass,
    /// The batch at hand is one token.
    decoding: bool,
    /// There was a pass: `pass` says which was the last one.
    begun: bool,
    done: Vec<ReadDone>,
    stats: Stats,
    routing: RoutingCounts,
    recorder: Option<Recorder>,
}

/// Tags of reads: expert and part in one number.
const PARTS_PER_EXPERT: u64 = 8;

impl Residency {
    /// Cuts the arena and opens a reader of the model's `files`.
    ///
    /// Returns notes for the user too: what the system refused and what is
    /// done instead.
    ///
    /// # Errors
    /// An arena that is too small, or memory and a reader that the system refuses.
    pub fn new(
        map: Arc<ExpertMap>,
        files: Arc<ModelFiles>,
        options: &ResidencyOptions,
    ) -> Result<(Self, Vec<String>), ResidencyError> {
        let layout = Layout::new(&map, options.arena_bytes)?;
        let arena = Arc::new(Arena::new(usize::try_from(layout.used()).unwrap_or(usize::MAX))?);
        // Memory that is swapped out would be read from the disk after all, and
        // written to it before.
        let unlocked = match swaps() {
            true => {
                pin::lockable_bytes();
                arena.try_lock(0..arena.len()).err()
            }
            false => None,
        };
        arena.populate_ahead();
        let (reader, mut notes) = reader::open_reader(
            files,
            Arc::clone(&arena),
            options.reader,
            ReaderOptions::default(),
        )?;
        notes.extend(unlocked.map(|e| format!("{e}. Experts may be swapped out")));
        let residency = Self::with_reader(map, layout, arena, reader, options.policy);
        Ok((residency, notes))
    }

    /// The same with a reader of one's own; for tests that inject faults.
    pub fn with_reader(
        map: Arc<ExpertMap>,
        layout: Layout,
        arena: Arc<Arena>,
        reader: Box<dyn Reader>,
        kind: PolicyKind,
    ) -> Self {
        let per_layer = map.experts_per_layer();
        let ids = map.layers().len() * per_layer as usize;
        let pools = layout
            .classes
            .iter()
            .map(|c| Pool {
                policy: policy::build(
                    kind,
                    PolicyShape {
                        layers: map.layers().len() as u32,
                        experts_per_layer: per_layer,
                        top_k: map.top_k(),
                        capacity: c.slots as usize,
                    },
                ),
                // Taken from the end: low slots first.
                free: (0..c.slots).rev().collect(),
                held: c.slots,
                full: c.is_full(),
            })
            .collect();
        Self {
            map,
            layout,
            reader,
            arena,
            pools,
            state: vec![State::Absent; ids],
            in_use: vec![false; ids],
            expected: Vec::new(),
            is_expected: vec![false; ids],
            is_pinned: vec![false; ids],
            shared: None,
            pins: None,
            news: None,
            admission: prefetch::Admission::new(),
            on_the_way: 0,
            asked: Instant::now(),
            asked_bytes: 0,
            pass: Pass::default(),
            decoding: true,
            begun: false,
            done: Vec::new(),
            stats: Stats::default(),
            routing: RoutingCounts::new(ids),
            recorder: None,
        }
    }

    /// The model's map.
    pub fn map(&self) -> &ExpertMap {
        &self.map
    }

    /// The arena's cut.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What happened so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// What the router chose since the last call.
    pub fn take_routing(&mut self) -> RoutingCounts {
        let none = RoutingCounts::new(self.routing.experts());
        std::mem::replace(&mut self.routing, none)
    }

    /// Opens a pass through `layer` (a position in [`ExpertMap::layers`]) for
    /// a batch of `tokens`. Reads of missing experts are on their way when it
    /// returns. `demand` lists each expert once.
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
        self.pass = Pass { layer, decode: self.decoding, ..Pass::default() };
        self.begun = true;
        self.collect(false)?;
        if layer == 0 {
            self.check_daemon();
        }
        if !again {
            self.watch(layer, tokens, demand);
        }
        let class = self.layout.class_of_layer[layer];
        self.judge_predictions(layer, demand);
        if !again {
            self.pools[class].policy.on_pass(layer as u32, tokens as u32);
        }
        for d in demand {
            let id = self.id(layer, d.expert);
            self.in_use[id.0 as usize] = true;
            if !again {
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
                State::Loading { .. } => {
                    self.counters().misses += 1;
                    self.pass.loading += 1;
                    for part in 0..self.map.layers()[layer].parts.len() {
                        self.reader.promote(u64::from(id.0) * PARTS_PER_EXPERT + part as u64);
                    }
                }
                State::Absent => {
                    self.counters().misses += 1;
                    self.pass.waiting.push_back(d.expert);
                }
            }
        }
        self.load_waiting()
    }

    /// Accounts for what the router chose in a layer.
    fn watch(&mut self, layer: usize, tokens: usize, demand: &[Demand]) {
        if layer == 0 {
            for pool in &mut self.pools {
                pool.policy.on_token();
            }
            self.counters().tokens += tokens as u64;
        }
        if self.pass.decode {
            self.admission.layer_begins(Instant::now());
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

    /// Experts of the open pass that are ready to compute, each once; an empty
    /// list when the pass has no more. Waits for the disk only when nothing
    /// is ready.
    ///
    /// # Errors
    /// A failed read of an expert of this pass. The pass is over then, and no
    /// read of it is on its way any more.
    pub fn take_ready(&mut self, out: &mut Vec<u32>) -> Result<(), ResidencyError> {
        out.clear();
        let taken = self.collect(false).and_then(|()| {
            self.load_waiting()?;
            // A slot may also come free when a prefetch lands.
            while self.pass.ready.is_empty()
                && (self.pass.loading > 0
                    || (!self.pass.waiting.is_empty() && self.reader.outstanding() > 0))
            {
                self.wait()?;
                self.load_waiting()?;
            }
            if self.pass.ready.is_empty() && !self.pass.waiting.is_empty() && self.pass.taken == 0 {
                let layer = self.map.layers()[self.pass.layer].index;
                return Err(ResidencyError::Stuck { layer });
            }
            Ok(())
        });
        if let Err(e) = taken {
            self.abort();
            return Err(e);
        }
        out.extend(self.pass.ready.drain(..));
        self.pass.taken += out.len();
        Ok(())
    }

    /// Gives back experts that were taken: they may be evicted from now on,
    /// and experts that waited for a slot are read.
    ///
    /// # Errors
    /// When the system refuses a read.
    pub fn finish(&mut self, experts: &[u32]) -> Result<(), ResidencyError> {
        for &e in experts {
            let id = self.id(self.pass.layer, e);
            self.in_use[id.0 as usize] = false;
        }
        self.pass.taken -= experts.len();
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
        self.pass = Pass::default();
        self.begun = false;
        self.in_use.fill(false);
        self.expected.clear();
        self.is_expected.fill(false);
    }

    /// Address of a part's bytes of an expert that was taken and not finished.
    pub fn part_ptr(&self, layer: usize, part: usize, expert: u32) -> Option<*mut u8> {
        match self.state[self.id(layer, expert).0 as usize] {
            State::Resident { slot } => {
                let at = self.part_position(layer, part, expert, slot);
                Some(self.arena.ptr(at as usize))
            }
            State::Shared => self.shared_ptr(layer, part, expert),
            State::Absent | State::Loading { .. } => None,
        }
    }

    /// Whether all experts of `layer` have room of their own and lie in it as
    /// they do in the file, one part after the other.
    pub fn is_mirrored(&self, layer: usize) -> bool {
        self.layout.mirror[layer].is_some() && self.shared.is_none()
    }

    /// Address of expert 0 of a part of a mirrored layer; expert `e` follows
    /// at `e` times the part's bytes. Null for other layers.
    pub fn mirror_ptr(&self, layer: usize, part: usize) -> *mut u8 {
        match &self.layout.mirror[layer] {
            Some(parts) => self.arena.ptr(parts[part] as usize),
            None => std::ptr::null_mut(),
        }
    }

    /// Waits until something lands.
    fn wait(&mut self) -> Result<(), ResidencyError> {
        let start = Instant::now();
        let result = self.collect(true);
        let waited = start.elapsed();
        self.counters().wait_ns += waited.as_nanos() as u64;
        let all = self.on_the_way == 0;
        let bytes = if all { self.asked_bytes } else { 0 };
        self.admission.waited(waited, bytes, self.asked.elapsed());
        result
    }

    fn counters(&mut self) -> &mut Counters {
        if self.pass.decode {
            &mut self.stats.decode
        } else {
            &mut self.stats.prompt
        }
    }

    fn class_of(&self, id: ExpertId) -> usize {
        self.layout.class_of_layer[(id.0 / self.map.experts_per_layer()) as usize]
    }

    fn id(&self, layer: usize, expert: u32) -> ExpertId {
        ExpertId(layer as u32 * self.map.experts_per_layer() + expert)
    }
}

#[cfg(test)]
mod tests;
