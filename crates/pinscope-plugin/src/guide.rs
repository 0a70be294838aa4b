//! What the plug-in does at each moment of a model's life.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pinscope::map::{ExpertMap, MapError};
use pinscope::memory::{format_bytes, Footprint};
use pinscope::pin::Advert;
use pinscope::profile::{ModelId, PinPlan, Profile, ProfiledModel};
use pinscope::reader::ModelFiles;
use pinscope::residency::{Residency, ResidencyOptions, Stats};
use pinscope::timeline::Activity;
use pinscope_ggml::{Guide, ReadMapError};

use crate::discover::Discovery;
use crate::mapped::Mapped;
use crate::settings::{Mode, Settings};
use crate::{budget, quiet, say};

/// Takes over the first Mixture of Experts that the program loads, and the
/// next one when that is freed.
pub struct PluginGuide {
    settings: Settings,
    discovery: Discovery,
    mapped: Mapped,
    /// Second models that were spoken of.
    left: Mutex<HashSet<PathBuf>>,
}

impl PluginGuide {
    /// A guide that has seen nothing yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            discovery: Discovery::default(),
            mapped: Mapped::default(),
            left: Mutex::default(),
        }
    }
}

impl Guide for PluginGuide {
    fn model(&self, tensor: &str, bytes: u64) -> Option<Arc<ExpertMap>> {
        let found = self.discovery.find(tensor, bytes, &|why| match why {
            ReadMapError::Map(MapError::Dense { path }) => {
                say(&format!("{path} is a dense model, PinScope has nothing to do"));
            }
            why => say(&format!("{why}. The program runs without PinScope")),
        });
        if self.settings.mode == Mode::Arena {
            return found;
        }
        if let Some(map) = found {
            quiet::set_model(&map);
            self.mapped.keep(&map, &self.settings);
        }
        None
    }

    fn expected(&self, map: &ExpertMap) {
        quiet::set_model(map);
    }

    fn is_mapped(&self, map: &ExpertMap) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        map.files().iter().filter_map(|f| std::fs::metadata(&f.path).ok()).any(|meta| {
            let inode = meta.ino().to_string();
            maps.lines().any(|line| line.split_whitespace().nth(4) == Some(&inode))
        })
    }

    fn busy(&self, map: &ExpertMap) {
        let path = map.files()[0].path.clone();
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        if left.insert(path) {
            say(&format!("{} is a second model and runs without PinScope", name(map)));
        }
    }

    fn taken(&self, map: &ExpertMap, files: &ModelFiles) {
        self.discovery.ignore(files.fds());
        say(&format!(
            "takes over the {} experts ({}) of {}, with {} for the whole process",
            map.expert_count(),
            format_bytes(map.expert_bytes_total()),
            name(map),
            format_bytes(self.settings.ram)
        ));
    }

    fn residency(
        &self,
        map: &Arc<ExpertMap>,
        files: &Arc<ModelFiles>,
        batch: usize,
    ) -> Result<Residency, String> {
        if !quiet::is_preloaded() {
            drop_page_cache(map);
        }
        let used = budget::used_bytes()
            .map_err(|e| format!("cannot see how much memory this process uses: {e}"))?;
        let plan = budget::plan(map, self.settings.ram, used, batch)?;
        let options = ResidencyOptions {
            arena_bytes: plan.arena_bytes,
            policy: self.settings.policy,
            reader: self.settings.reader,
            prefetch: true,
        };
        let (mut residency, notes) = Residency::new(Arc::clone(map), Arc::clone(files), &options)
            .map_err(|e| e.to_string())?;
        plan.warnings.iter().chain(&notes).for_each(|note| say(note));
        let daemon = ModelId::of(map).ok().and_then(|id| Advert::find(id, map.files()));
        if let Some(daemon) = daemon {
            let pid = daemon.pid;
            // What cannot be mapped is read like everything else.
            if let Ok(n) = residency.share(daemon) {
                say(&format!("uses {n} experts where process {pid} (pinscope pin) keeps them"));
            }
        }
        if plan.fits_all {
            residency.load_all(&mut |_| {}).map_err(|e| e.to_string())?;
        } else if let Some(path) = &self.settings.profile {
            match pins(path, &residency) {
                Ok(pins) => {
                    let experts = pins.pins.len();
                    say(&format!("pins the {experts} experts that the profile names hottest"));
                    residency.pin(&pins, true);
                    residency.load_pins(&mut |_| {}).map_err(|e| e.to_string())?;
                }
                Err(why) => say(&format!("PINSCOPE_PROFILE: {why}. Nothing is pinned")),
            }
        }
        Ok(residency)
    }

    fn say(&self, text: &str) {
        say(text);
    }

    fn released(&self, map: &ExpertMap, stats: Option<Stats>) {
        self.discovery.ignore(Vec::new());
        if let Some(stats) = stats {
            say(&format!("{}: {}", name(map), summary(&stats)));
        }
    }
}

/// What the profile at `path` would pin.
fn pins(path: &Path, residency: &Residency) -> Result<PinPlan, String> {
    let profile = profile_of(path, residency.map())?;
    Ok(PinPlan::new(&profile, residency.map(), residency.layout(), None))
}

/// The profile at `path`.
///
/// # Errors
/// Why it cannot be read, or that it is of another model than that of `map`.
pub fn profile_of(path: &Path, map: &ExpertMap) -> Result<Profile, String> {
    let model = ProfiledModel::of(map).map_err(|e| e.to_string())?;
    Profile::load_for(path, &model).map_err(|e| e.to_string())
}

/// File name of the model, as messages give it.
pub fn name(map: &ExpertMap) -> String {
    let path = &map.files()[0].path;
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// What a run was like, in one line.
fn summary(stats: &Stats) -> String {
    let (prompt, decode) = (&stats.prompt, &stats.decode);
    let seconds =
        [prompt, decode].map(|c| c.split.ns(Activity::Wait)).iter().sum::<u64>() as f64 / 1e9;
    let peak = Footprint::now().map_or_else(|_| "?".into(), |f| format_bytes(f.peak));
    format!(
        "{} tokens of prompts and {} one by one; {:.1} % and {:.1} % of their experts were in \
         memory; {} read, {seconds:.1} s waited for; {peak} of memory at most",
        prompt.tokens,
        decode.tokens,
        prompt.hit_rate() * 100.0,
        decode.hit_rate() * 100.0,
        format_bytes(prompt.bytes_read + decode.bytes_read),
    )
}

/// Drops what llama.cpp's read-ahead has left in the page cache. What is
/// still mapped somewhere stays.
fn drop_page_cache(map: &ExpertMap) {
    for file in map.files() {
        if let Ok(file) = File::open(&file.path) {
            // SAFETY: an open descriptor; the whole file.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        }
    }
}
