//! Setting a model up under a memory budget: plan, register, load.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use pinscope::layout::Layout;
use pinscope::map::ExpertMap;
use pinscope::memory::{format_bytes, own_bytes};
use pinscope::pin::Advert;
use pinscope::plan::{Fixed, Plan, RamTooSmall};
use pinscope::policy::PolicyKind;
use pinscope::profile::{PinPlan, Profile, ProfileError, ProfiledModel, RoutingCounts};
use pinscope::reader::ReaderKind;
use pinscope::residency::Stats;
use pinscope::timeline::chrome::Recorder;
use pinscope_ggml::{read_map, scratch_bytes, Engine, EngineOptions, ReadMapError};
use pinscope_host::{ContextOptions, HostError, Model, ModelOptions, Skeleton};
use serde::{Deserialize, Serialize};

use crate::pinning::{self, Pinning};

/// Context when none is asked for, at most; tokens.
const DEFAULT_CTX: u32 = 4096;

/// Why a model could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error(transparent)]
    Map(#[from] ReadMapError),
    #[error(transparent)]
    Ram(#[from] RamTooSmall),
    #[error(transparent)]
    Engine(#[from] pinscope_ggml::EngineError),
    #[error(transparent)]
    Host(#[from] HostError),
    /// The device could not read dense weights.
    #[error("cannot load the model: {0}")]
    Load(String),
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error("cannot read the model's header: {0}")]
    Header(std::io::Error),
    #[error("cannot read how much memory this process uses: {0}")]
    Footprint(#[from] std::io::Error),
}

/// A timeline that could not be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot write the timeline {}: {source}. Give --timeline a file in a folder that exists and \
     has room", path.display()
)]
pub struct TimelineError {
    path: PathBuf,
    source: std::io::Error,
}

/// A model that was looked at and planned for, but not loaded.
pub struct Prepared {
    path: PathBuf,
    map: ExpertMap,
    /// The context that was planned for, tokens.
    pub n_ctx: u32,
    /// What the RAM goes to; see [`Plan::check`].
    pub plan: Plan,
    /// What is pinned; see [`Prepared::pin`].
    pub pins: Option<PinPlan>,
    repin: bool,
    /// Read once, when it is asked for: a header has some megabytes.
    model: OnceCell<ProfiledModel>,
}

/// How experts are kept and read.
#[derive(Debug, Clone, Copy)]
pub struct Caching {
    pub policy: PolicyKind,
    pub reader: ReaderKind,
    /// Leave a model that fits to plain llama.cpp.
    pub step_aside: bool,
    /// Read experts before they are asked for, where that costs nothing.
    pub prefetch: bool,
}

impl Prepared {
    /// Reads the headers of the model at `path` and plans `ram` bytes for it
    /// with a context like `context` (0 tokens stand for the default).
    ///
    /// # Errors
    /// A file that is not a sound Mixture-of-Experts model. A budget that is
    /// too small is none here: [`Prepared::load`] refuses it.
    pub fn new(path: &Path, ram: u64, context: &ContextOptions) -> Result<Self, SetupError> {
        let map = read_map(path)?;
        let Skeleton { model: skeleton, vocabulary_bytes } = Skeleton::load(path)?;
        let n_ctx = match context.n_ctx {
            0 => DEFAULT_CTX.min(skeleton.n_ctx_train().max(1)),
            n => n,
        };
        // `on_tensor` and `abort` cost nothing that is worth measuring.
        let cost = skeleton.measure(&ContextOptions {
            n_ctx,
            n_batch: context.n_batch,
            n_ubatch: context.n_ubatch,
            max_outputs: context.max_outputs,
            threads: context.threads,
            threads_batch: context.threads_batch,
            ..ContextOptions::default()
        })?;
        let fixed = Fixed {
            kv: cost.kv,
            compute: cost.compute + scratch_bytes(&map, context.n_ubatch as usize),
            output: cost.output,
            process: own_bytes()? + vocabulary_bytes,
        };
        drop(skeleton);
        let plan = Plan::new(&map, fixed, ram);
        Ok(Self {
            path: path.to_owned(),
            map,
            n_ctx,
            plan,
            pins: None,
            repin: true,
            model: OnceCell::new(),
        })
    }

    /// Where the model's experts are.
    pub fn map(&self) -> &ExpertMap {
        &self.map
    }

    /// The model as a profile knows it.
    ///
    /// # Errors
    /// [`SetupError::Header`].
    pub fn profiled_model(&self) -> Result<&ProfiledModel, SetupError> {
        if let Some(known) = self.model.get() {
            return Ok(known);
        }
        let model = ProfiledModel::of(&self.map).map_err(SetupError::Header)?;
        Ok(self.model.get_or_init(|| model))
    }

    /// Chooses what to pin, if there is a profile and not everything fits.
    ///
    /// # Errors
    /// A profile that cannot be read or is of another model.
    pub fn pin(&mut self, pinning: &Pinning) -> Result<(), SetupError> {
        let Some(path) = &pinning.profile else { return Ok(()) };
        let profile = Profile::load_for(path, self.profiled_model()?)?;
        self.repin = !pinning.no_repin;
        if let Ok(layout) = Layout::new(&self.map, self.plan.arena_bytes) {
            if !self.plan.fits_all {
                self.pins = Some(PinPlan::new(&profile, &self.map, &layout, pinning.pin_share));
            }
        }
        Ok(())
    }

    /// What the pins take, bytes.
    pub fn pinned_bytes(&self) -> u64 {
        let layers = self.map.layers();
        let layer = |id: u32| &layers[(id / self.map.experts_per_layer()) as usize];
        self.pins.iter().flat_map(|p| &p.pins).map(|id| layer(id.0).expert_bytes()).sum()
    }

    /// Loads the model within the plan. `progress` hears of 0.0 to 1.0.
    ///
    /// # Errors
    /// A budget that is too small, and whatever the system refuses.
    pub fn load(
        self,
        caching: Caching,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Session, SetupError> {
        self.plan.check()?;
        let pins = self.pins.as_ref().map(|p| pinning::describe(p, self.pinned_bytes()));
        let daemon = Advert::find(self.profiled_model()?.id, self.map.files());
        let aside = caching.step_aside && self.plan.fits_all;
        let engine = if aside {
            None
        } else {
            Some(Engine::register(EngineOptions {
                map: self.map,
                arena_bytes: self.plan.arena_bytes,
                policy: caching.policy,
                reader: caching.reader,
                pins: self.pins,
                repin: self.repin,
                prefetch: caching.prefetch,
            })?)
        };
        let shared = match (&engine, daemon) {
            (Some(engine), Some(daemon)) => {
                let pid = daemon.pid;
                // What cannot be mapped is read like everything else.
                engine.share(daemon).ok().map(|n| (n, pid))
            }
            _ => None,
        };
        let mut hear = |done| {
            progress(done);
            true
        };
        let options = ModelOptions {
            // Plain llama.cpp reads everything now, the device when asked.
            read_ahead: aside,
            progress: Some(&mut hear),
            ..ModelOptions::default()
        };
        let model = Model::load(&self.path, options);
        if let Some(reason) = engine.as_ref().and_then(Engine::take_error) {
            return Err(SetupError::Load(reason));
        }
        let model = model?;
        if let Some(engine) = &engine {
            if self.plan.fits_all { engine.load_all(progress) } else { engine.load_pins(progress) }
                .map_err(|e| SetupError::Load(e.to_string()))?;
        }
        let shared = shared.map(|(n, pid)| {
            format!("{n} experts are used where process {pid} (pinscope pin) keeps them.")
        });
        Ok(Session { model, engine, plan: self.plan, pins, shared })
    }
}

/// Where the time from the start of the work to the first prompt token went.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Start {
    /// Headers and the plan.
    pub plan_seconds: f64,
    /// The vocabulary, dense weights and pinned experts.
    pub model_seconds: f64,
    /// Of that, reading dense weights.
    pub dense_seconds: f64,
    pub dense_bytes: u64,
    /// The context: KV cache and buffers.
    pub context_seconds: f64,
    /// Bytes a second that scattered reads of the model's file had meanwhile;
    /// `null` where that was not measured.
    pub disk_bandwidth: Option<u64>,
}

/// A loaded model and, unless it fits in RAM, the engine that has its experts.
pub struct Session {
    // The model goes first: its experts are the engine's.
    pub model: Model,
    engine: Option<Engine>,
    pub plan: Plan,
    /// What is pinned, in words.
    pins: Option<String>,
    /// What a pin daemon keeps for us, in words.
    shared: Option<String>,
}

impl Session {
    /// Counters of the engine; `None` when PinScope stepped aside.
    pub fn stats(&self) -> Option<Stats> {
        self.engine.as_ref().map(Engine::stats)
    }

    /// How the start went, as far as the engine knows: [`Start`] without the
    /// times that others took. `None` when PinScope stepped aside.
    pub fn start(&self) -> Option<Start> {
        let engine = self.engine.as_ref()?;
        let dense = engine.dense_read();
        Some(Start {
            dense_seconds: dense.nanoseconds as f64 / 1e9,
            dense_bytes: dense.bytes,
            disk_bandwidth: engine.disk_bandwidth(),
            ..Start::default()
        })
    }

    /// Bytes a second that the disk can give: the most of what it gave at the
    /// start and, while it was busy, since `earlier`.
    pub fn disk_rate(&self, earlier: &Stats) -> Option<f64> {
        let engine = self.engine.as_ref()?;
        let since = engine.stats().disk.since(&earlier.disk).bandwidth();
        [engine.disk_rate_at_start(), since].into_iter().flatten().reduce(f64::max)
    }

    /// What the router chose since the last call; `None` when PinScope stepped
    /// aside.
    pub fn take_routing(&self) -> Option<RoutingCounts> {
        self.engine.as_ref().map(Engine::take_routing)
    }

    /// Records where the time goes from now on, in a new file.
    ///
    /// # Errors
    /// [`TimelineError`].
    pub fn record_timeline(&self, path: &Path) -> Result<(), TimelineError> {
        let recorder =
            Recorder::create(path).map_err(|e| TimelineError { path: path.into(), source: e })?;
        if let Some(engine) = &self.engine {
            engine.record_timeline(recorder);
        }
        Ok(())
    }

    /// Ends the recording into `path`; says what it came to.
    ///
    /// # Errors
    /// [`TimelineError`].
    pub fn finish_timeline(&self, path: &Path) -> Result<String, TimelineError> {
        let finish = |e: &Engine| e.finish_timeline();
        let summary = self.engine.as_ref().map_or(Ok(None), finish);
        let summary = summary.map_err(|e| TimelineError { path: path.into(), source: e })?;
        let (bytes, full) = summary.map_or((0, false), |s| (s.bytes, s.full));
        let full = if full { ", where it stopped recording" } else { "" };
        let path = path.display();
        Ok(format!("{path}: {}{full}; open it in ui.perfetto.dev.", format_bytes(bytes)))
    }

    /// The engine, unless PinScope stepped aside.
    pub fn engine(&self) -> Option<&Engine> {
        self.engine.as_ref()
    }

    /// What the user should hear since the last call.
    pub fn take_news(&self) -> Option<String> {
        self.engine.as_ref()?.take_news()
    }

    /// What the user should know of this run.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.plan.warnings.clone();
        notes.extend(self.shared.clone());
        notes.extend(self.pins.iter().map(|pins| format!("Profile: {pins}.")));
        match &self.engine {
            Some(engine) => notes.extend_from_slice(engine.notes()),
            None => notes.push(
                "All experts fit in RAM: PinScope steps aside and llama.cpp runs the model as it is."
                    .into(),
            ),
        }
        notes
    }

    /// The reason for a failed decode: the engine's where it has one.
    pub fn explain(&self, error: HostError) -> String {
        match self.engine.as_ref().and_then(Engine::take_error) {
            Some(reason) => reason,
            None => error.to_string(),
        }
    }
}
