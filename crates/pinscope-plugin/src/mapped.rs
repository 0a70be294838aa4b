//! `PINSCOPE_MODE=mapped`: llama.cpp computes on its own mapping of the model,
//! and we keep the pages that are used most in memory.
//!
//! This is what `pinscope pin` does, inside the process: dense tensors and the
//! experts that the profile names hottest are locked, by a thread, beside the
//! loading of the model. They stay locked until the program ends or loads
//! another model.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use pinscope::map::ExpertMap;
use pinscope::memory::{format_bytes, Memory};
use pinscope::pin::{lockable_bytes, page_size, LockedRanges, Selection, HOW_TO_RAISE};

use crate::guide::{name, profile_of};
use crate::say;
use crate::settings::Settings;

/// What is locked in this process.
#[derive(Clone, Default)]
pub struct Mapped {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    model: Option<Arc<ExpertMap>>,
    locked: Option<LockedRanges>,
}

impl Mapped {
    /// Locks pages of the model of `map` in place of those of an earlier one;
    /// further calls for the same model do nothing.
    pub fn keep(&self, map: &Arc<ExpertMap>, settings: &Settings) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &Arc<ExpertMap>| known.files() == map.files();
        if state.model.as_ref().is_some_and(same) {
            return;
        }
        *state = State { model: Some(Arc::clone(map)), locked: None };
        let (mapped, map, settings) = (self.clone(), Arc::clone(map), settings.clone());
        let work = move || mapped.lock(&map, &settings);
        if let Err(e) = std::thread::Builder::new().name("pinscope".into()).spawn(work) {
            say(&format!("cannot lock pages of the model, no thread: {e}"));
        }
    }

    fn lock(&self, map: &Arc<ExpertMap>, settings: &Settings) {
        let selection = choose(map, settings);
        let is_current = || {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.model.as_ref().is_some_and(|m| Arc::ptr_eq(m, map))
        };
        let locked = LockedRanges::lock(map.files(), &selection.ranges(), &mut |_| is_current());
        match locked {
            Ok(locked) => {
                let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                if state.model.as_ref().is_some_and(|m| Arc::ptr_eq(m, map)) {
                    state.locked = Some(locked);
                    say(&summary(map, &selection));
                }
            }
            Err(_) if !is_current() => {} // another model is loaded instead
            Err(e) => say(&e.to_string()),
        }
    }
}

/// Which pages are kept: what the settings, the limit on locked memory and the
/// free memory allow.
fn choose(map: &ExpertMap, settings: &Settings) -> Selection {
    let room = Memory::now().map_or(u64::MAX, |m| m.default_ram());
    let budget = settings.ram.min(lockable_bytes().unwrap_or(u64::MAX)).min(room);
    if budget < settings.ram {
        say(&format!(
            "only {} may be locked, by the free memory or RLIMIT_MEMLOCK: {HOW_TO_RAISE}",
            format_bytes(budget)
        ));
    }
    let hottest = |path: &Path| match profile_of(path, map) {
        Ok(profile) => profile.hottest(),
        Err(why) => {
            say(&format!("PINSCOPE_PROFILE: {why}. Only dense tensors are locked"));
            Vec::new()
        }
    };
    let mut order = settings.profile.as_deref().map(hottest).unwrap_or_default();
    // Nobody knows which of the others are hot, unless all of them fit.
    let mut everything = order.clone();
    everything.extend(map.expert_ids());
    let all = Selection::new(map, &everything, budget, page_size());
    if all.experts().len() as u64 == map.expert_count() {
        order = everything;
    }
    Selection::new(map, &order, budget, page_size())
}

fn summary(map: &ExpertMap, selection: &Selection) -> String {
    let dense = if selection.dense_complete() { "all" } else { "a part of the" };
    format!(
        "keeps {} of {} in memory: {dense} dense tensors and {} of {} experts",
        format_bytes(selection.bytes()),
        name(map),
        selection.experts().len(),
        map.expert_count()
    )
}
