//! The engine of one model, as programs see it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pinscope::map::ExpertMap;
use pinscope::pin::Pinned;
use pinscope::policy::PolicyKind;
use pinscope::profile::{PinPlan, RoutingCounts};
use pinscope::reader::{tune_ahead, Busy, ModelFiles, ReadError, ReaderKind};
use pinscope::residency::{Residency, ResidencyError, ResidencyOptions, Stats};
use pinscope::timeline::chrome;
use pinscope::trace::Recorder;

use crate::exec::predict::Routers;
use crate::ffi::Incompatible;
use crate::{api, device, guest, watch};

/// How an [`Engine`] is set up.
#[derive(Debug)]
pub struct EngineOptions {
    /// The model.
    pub map: ExpertMap,
    /// RAM for experts, bytes.
    pub arena_bytes: u64,
    /// Which expert gives way to another.
    pub policy: PolicyKind,
    /// How experts are read.
    pub reader: ReaderKind,
    /// Experts that do not give way.
    pub pins: Option<PinPlan>,
    /// Let pins follow the traffic.
    pub repin: bool,
    /// Read experts before they are asked for, where that costs nothing.
    pub prefetch: bool,
}

/// Why an [`Engine`] could not be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EngineError {
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("an engine is already active in this process: drop it before the next one is made")]
    Busy,
}

/// Takes over the experts of the next model that llama.cpp loads in this
/// process, and its dense weights too, until it is dropped.
///
/// Drop it after the model: buffers of the model keep what they need, but
/// experts cannot be computed any more.
pub struct Engine {
    shared: Arc<Shared>,
    notes: Vec<String>,
}

/// What the device's callbacks share with the [`Engine`].
pub(crate) struct Shared {
    pub map: Arc<ExpertMap>,
    pub files: Arc<ModelFiles>,
    pub routers: Routers,
    /// The largest batch that llama.cpp has prepared for, tokens.
    pub batch: AtomicUsize,
    home: Mutex<Home>,
    error: Mutex<Option<String>>,
    /// Dense weights that were read, and the time that took.
    dense: Mutex<Busy>,
    /// Buffers of weights that are alive.
    buffers: AtomicUsize,
}

/// The residency, or what is in its place.
pub(crate) enum Home {
    Made(Box<Residency>),
    /// Made by the [`guest::Guide`] at the first computation.
    Waiting,
    /// The guide could not make one, and has said why.
    Refused,
}

impl Home {
    /// The residency of `shared`, made now where it waits for that; `None`
    /// where there is none.
    pub fn open(&mut self, shared: &Shared) -> Option<&mut Residency> {
        if let (Home::Waiting, Some(guide)) = (&*self, guest::guide()) {
            let batch = shared.batch.load(Ordering::Relaxed);
            *self = match guide.residency(&shared.map, &shared.files, batch) {
                Ok(residency) => Home::Made(Box::new(residency)),
                Err(reason) => {
                    guide.say(&reason);
                    Home::Refused
                }
            };
        }
        self.made()
    }

    /// The residency, if it was made.
    pub fn made(&mut self) -> Option<&mut Residency> {
        match self {
            Home::Made(residency) => Some(residency),
            Home::Waiting | Home::Refused => None,
        }
    }
}

impl Shared {
    fn new(map: Arc<ExpertMap>, files: Arc<ModelFiles>, home: Home) -> Self {
        Self {
            files,
            map,
            routers: Routers::default(),
            batch: AtomicUsize::new(0),
            home: Mutex::new(home),
            error: Mutex::new(None),
            dense: Mutex::new(Busy::default()),
            buffers: AtomicUsize::new(0),
        }
    }

    /// Without a residency, until the first computation.
    pub fn waiting(map: Arc<ExpertMap>, files: Arc<ModelFiles>) -> Self {
        Self::new(map, files, Home::Waiting)
    }

    pub fn home(&self) -> MutexGuard<'_, Home> {
        self.home.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What happened so far; `None` where nothing did, or where a computation
    /// is going on.
    pub fn stats_now(&self) -> Option<Stats> {
        Some(self.home.try_lock().ok()?.made()?.stats())
    }

    /// Counts a buffer of weights.
    pub fn add_buffer(&self) {
        self.buffers.fetch_add(1, Ordering::Relaxed);
    }

    /// A buffer is gone; true if it was the last one.
    pub fn drop_buffer(&self) -> bool {
        self.buffers.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Counts dense weights that were read.
    pub fn dense_read(&self, bytes: usize, took: Duration) {
        let mut dense = self.dense.lock().unwrap_or_else(PoisonError::into_inner);
        dense.bytes += bytes as u64;
        dense.nanoseconds += took.as_nanos() as u64;
    }

    /// Keeps the first error for [`Engine::take_error`]; ggml's callbacks have
    /// no way to return a text.
    pub fn fail(&self, error: impl std::fmt::Display) {
        let mut slot = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.is_none() {
            let reason = error.to_string();
            if let Some(guide) = guest::guide() {
                guide.say(&reason);
            }
            *slot = Some(reason);
        }
    }

    pub fn has_failed(&self) -> bool {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

impl Engine {
    /// Registers the device with ggml (once a process) and makes it
    /// responsible for the model of `options`.
    ///
    /// # Errors
    /// A ggml that does not fit, an arena that is too small, files that cannot
    /// be opened, or an engine that is active already.
    pub fn register(options: EngineOptions) -> Result<Self, EngineError> {
        api::link();
        device::register()?;
        let map = Arc::new(options.map);
        let files = Arc::new(ModelFiles::open(map.files())?);
        if map.expert_bytes_total() > options.arena_bytes {
            // While llama.cpp reads the vocabulary the disk has nothing to do.
            let part = map.layers()[0].parts[0].bytes;
            tune_ahead(&files, options.reader, usize::try_from(part).unwrap_or(usize::MAX));
        }
        let (mut residency, notes) = Residency::new(
            Arc::clone(&map),
            Arc::clone(&files),
            &ResidencyOptions {
                arena_bytes: options.arena_bytes,
                policy: options.policy,
                reader: options.reader,
                prefetch: options.prefetch,
            },
        )?;
        if let Some(pins) = &options.pins {
            residency.pin(pins, options.repin);
        }
        Self::with_residency(map, files, residency, notes)
    }

    /// The same with a residency of one's own; for tests that inject faults.
    ///
    /// # Errors
    /// As [`Engine::register`].
    pub fn with_residency(
        map: Arc<ExpertMap>,
        files: Arc<ModelFiles>,
        residency: Residency,
        notes: Vec<String>,
    ) -> Result<Self, EngineError> {
        api::link();
        device::register()?;
        let shared = Arc::new(Shared::new(map, files, Home::Made(Box::new(residency))));
        if !device::activate(&shared) {
            return Err(EngineError::Busy);
        }
        watch::start(&shared);
        Ok(Self { shared, notes })
    }

    /// Loads all experts that fit for good; for models that fit. `progress`
    /// hears of 0.0 to 1.0.
    ///
    /// # Errors
    /// A failed read.
    pub fn load_all(&self, progress: &mut dyn FnMut(f32)) -> Result<(), ResidencyError> {
        match self.shared.home().made() {
            Some(residency) => residency.load_all(progress),
            None => Ok(()),
        }
    }

    /// Uses experts that a pin daemon keeps in the page cache. Returns how
    /// many.
    ///
    /// # Errors
    /// Files that cannot be mapped; everything is as before then.
    pub fn share(&self, daemon: Pinned) -> std::io::Result<usize> {
        self.shared.home().made().map_or(Ok(0), |residency| residency.share(daemon))
    }

    /// Loads the pinned experts. `progress` hears of 0.0 to 1.0.
    ///
    /// # Errors
    /// A failed read.
    pub fn load_pins(&self, progress: &mut dyn FnMut(f32)) -> Result<(), ResidencyError> {
        match self.shared.home().made() {
            Some(residency) => residency.load_pins(progress),
            None => Ok(()),
        }
    }

    /// What the router chose since the last call.
    pub fn take_routing(&self) -> RoutingCounts {
        let none = || RoutingCounts::new(0);
        self.shared.home().made().map_or_else(none, Residency::take_routing)
    }

    /// Writes what the router chooses from now on to `recorder`.
    pub fn record_trace(&self, recorder: Recorder) {
        if let Some(residency) = self.shared.home().made() {
            residency.record_trace(recorder);
        }
    }

    /// Ends the recording of a trace, if there is one.
    ///
    /// # Errors
    /// What kept any part of it from being written.
    pub fn finish_trace(&self) -> std::io::Result<()> {
        self.shared.home().made().map_or(Ok(()), Residency::finish_trace)
    }

    /// What the user should hear of the pins since the last call.
    pub fn take_news(&self) -> Option<String> {
        self.shared.home().made()?.take_news()
    }

    /// Records where the time goes from now on.
    pub fn record_timeline(&self, recorder: chrome::Recorder) {
        if let Some(residency) = self.shared.home().made() {
            residency.record_timeline(recorder);
        }
    }

    /// Ends the recording of a timeline, if there is one.
    ///
    /// # Errors
    /// What kept its file from being written.
    pub fn finish_timeline(&self) -> std::io::Result<Option<chrome::Summary>> {
        self.shared.home().made().map_or(Ok(None), Residency::finish_timeline)
    }

    /// What happened so far.
    pub fn stats(&self) -> Stats {
        self.shared.home().made().map(|r| r.stats()).unwrap_or_default()
    }

    /// Bytes a second that the disk gave when it was measured at the start, if
    /// it was.
    pub fn disk_rate_at_start(&self) -> Option<f64> {
        self.shared.files.tuned().map(|options| options.bandwidth as f64)
    }

    /// Dense weights that were read so far, and the time that took.
    pub fn dense_read(&self) -> Busy {
        *self.shared.dense.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes a second that the disk showed at start; `None` where that was not
    /// measured, or is not yet.
    pub fn disk_bandwidth(&self) -> Option<u64> {
        self.shared.files.tuned().map(|options| options.bandwidth)
    }

    /// Why a load or a decode failed, if it was this engine's doing; clears
    /// it, so that the next decode may succeed.
    pub fn take_error(&self) -> Option<String> {
        self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// What the system refused and what is done instead, for the user to know.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        device::deactivate();
    }
}
