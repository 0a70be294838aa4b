//! Setting a model up under a memory budget: plan, register, load.

use std::path::{Path, PathBuf};

use pinscope::map::ExpertMap;
use pinscope::memory::own_bytes;
use pinscope::plan::{Fixed, Plan, RamTooSmall};
use pinscope::policy::PolicyKind;
use pinscope::reader::ReaderKind;
use pinscope::residency::Stats;
use pinscope_ggml::{read_map, scratch_bytes, Engine, EngineOptions, ReadMapError};
use pinscope_host::{ContextOptions, HostError, Model, ModelOptions};

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
    #[error("cannot read how much memory this process uses: {0}")]
    Footprint(#[from] std::io::Error),
}

/// A model that was looked at and planned for, but not loaded.
pub struct Prepared {
    path: PathBuf,
    map: ExpertMap,
    /// The context that was planned for, tokens.
    pub n_ctx: u32,
    /// What the RAM goes to; see [`Plan::check`].
    pub plan: Plan,
}

/// How experts are kept and read.
#[derive(Debug, Clone, Copy)]
pub struct Caching {
    pub policy: PolicyKind,
    pub reader: ReaderKind,
    /// Leave a model that fits to plain llama.cpp.
    pub step_aside: bool,
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
        let skeleton =
            Model::load(path, ModelOptions { no_alloc: true, ..ModelOptions::default() })?;
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
            // The program and the vocabulary are in memory just now.
            process: own_bytes()?,
        };
        drop(skeleton);
        let plan = Plan::new(&map, fixed, ram);
        Ok(Self { path: path.to_owned(), map, n_ctx, plan })
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
        let aside = caching.step_aside && self.plan.fits_all;
        let engine = if aside {
            None
        } else {
            Some(Engine::register(EngineOptions {
                map: self.map,
                arena_bytes: self.plan.arena_bytes,
                policy: caching.policy,
                reader: caching.reader,
            })?)
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
        if let Some(engine) = engine.as_ref().filter(|_| self.plan.fits_all) {
            engine.load_all(progress).map_err(|e| SetupError::Load(e.to_string()))?;
        }
        Ok(Session { model, engine, plan: self.plan })
    }
}

/// A loaded model and, unless it fits in RAM, the engine that has its experts.
pub struct Session {
    // The model goes first: its experts are the engine's.
    pub model: Model,
    engine: Option<Engine>,
    pub plan: Plan,
}

impl Session {
    /// Counters of the engine; `None` when PinScope stepped aside.
    pub fn stats(&self) -> Option<Stats> {
        self.engine.as_ref().map(Engine::stats)
    }

    /// What the user should know of this run.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.plan.warnings.clone();
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
