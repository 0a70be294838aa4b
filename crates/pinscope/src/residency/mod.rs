//! Which experts are in RAM, and how they get there.
//!
//! [`Residency`] joins the map, the arena, a reader and a policy. The executor
//! of a layer opens a *pass* with the experts that the router chose, takes
//! them as they become ready (those in RAM at once, the others in the order in
//! which they land), and gives each back when it is computed:
//!
//! ```text
//! begin(layer, demand) ── take_ready ── compute ── finish ──┐
//!                             └─── until nothing comes ─────┘
//! ```
//!
//! An expert is never evicted while it is read or computed. A layer may need
//! more experts than there are slots (long prompts): those that do not fit
//! wait until others are finished, so the pass runs in waves by itself.

mod drift;
mod load;
mod pass;
mod pins;
mod prefetch;
mod record;
mod shared;
mod shrink;
mod stats;
mod warm;
mod worth;

use std::sync::Arc;
use std::time::Duration;

pub use pass::Stage;
pub use stats::{Counters, Prediction, Stats};

use crate::arena::{Arena, ArenaError};
use crate::layout::{Layout, TooSmall};
use crate::map::ExpertMap;
use crate::memory::swaps;
use crate::pin;
use crate::policy::{self, ExpertId, Policy, PolicyKind, PolicyShape};
use crate::profile::RoutingCounts;
use crate::reader::{self, ModelFiles, ReadDone, ReadError, Reader, ReaderKind, ReaderOptions};
use crate::timeline::{Activity, Stopwatch};
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
    /// Read experts before they are asked for, where that costs nothing.
    pub prefetch: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    /// Parts still to come, a bit each, and whether one of them failed.
    Loading {
        slot: u64,
        missing: u8,
        failed: bool,
        prefetch: bool,
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
    /// Experts that the next layer is predicted to need: they give way only
    /// when nothing else can.
    expected: Vec<(ExpertId, prefetch::Fate)>,
    is_expected: Vec<bool>,
    /// By expert: never gives way. See [`pins`].
    is_pinned: Vec<bool>,
    shared: Option<shared::Shared>,
    pins: Option<pins::Pins>,
    news: Option<String>,
    /// Read what is predicted.
    prefetch: bool,
    worth: worth::Worth,
    admission: prefetch::Admission,
    /// Bytes on their way.
    on_the_way: u64,
    pass: pass::Pass,
    clock: Stopwatch,
    /// Time of decoded experts' arithmetic until the last layer ended.
    computed: Duration,
    /// Nanoseconds that waiting and reading ahead cost, and bytes that decoded
    /// tokens missed, until the last token ended.
    spent: (u64, u64),
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
        let mut residency = Self::with_reader(map, layout, arena, reader, options.policy);
        residency.prefetch = options.prefetch;
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
            prefetch: true,
            worth: worth::Worth::new(),
            admission: prefetch::Admission::new(),
            on_the_way: 0,
            pass: pass::Pass::default(),
            clock: Stopwatch::default(),
            computed: Duration::ZERO,
            spent: (0, 0),
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
        let mut stats = self.stats;
        [stats.prompt.split, stats.decode.split] = self.clock.splits();
        stats.disk = self.reader.busy();
        stats
    }

    /// Tells what the computing thread does from now on; returns what it did
    /// until now.
    pub fn enter(&mut self, activity: Activity) -> Activity {
        self.clock.enter(activity)
    }

    /// What the router chose since the last call.
    pub fn take_routing(&mut self) -> RoutingCounts {
        let none = RoutingCounts::new(self.routing.experts());
        std::mem::replace(&mut self.routing, none)
    }

    /// Address of a part's bytes of an expert that was taken and not finished;
    /// `None` for parts that are not in RAM.
    pub fn part_ptr(&self, layer: usize, part: usize, expert: u32) -> Option<*mut u8> {
        let slot = match self.state[self.id(layer, expert).0 as usize] {
            State::Resident { slot } => slot,
            State::Loading { slot, missing, .. } if missing & (1 << part) == 0 => slot,
            State::Shared => return self.shared_ptr(layer, part, expert),
            State::Absent | State::Loading { .. } => return None,
        };
        let at = self.part_position(layer, part, expert, slot);
        Some(self.arena.ptr(at as usize))
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
