//! The device as a guest of a program that does not know it.
//!
//! The plug-in hears of a model when llama.cpp asks where its weights should
//! live, and of the room that is left for experts when the first graph is
//! computed: by then the program has made its KV cache and buffers. What it
//! decides then is its own ([`Guide`]); this module brings the moments.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use pinscope::map::ExpertMap;
use pinscope::reader::{ModelFiles, ReadError};
use pinscope::residency::{Residency, Stats};

use crate::api::{self, Lookup};
use crate::engine::Shared;
use crate::ffi::Incompatible;
use crate::{device, watch};

/// Decides about models that programs load by themselves.
pub trait Guide: Send + Sync {
    /// The model that is being loaded now and should be taken over, if
    /// `tensor` with `bytes` bytes is one of its weights.
    fn model(&self, tensor: &str, bytes: u64) -> Option<Arc<ExpertMap>>;

    /// The weights of this model will be ours, each is told; nothing of them
    /// has been mapped or read yet.
    fn expected(&self, map: &ExpertMap);

    /// Whether the program has the model's files mapped; if not, it reads
    /// them into the addresses that the device gives out.
    fn is_mapped(&self, map: &ExpertMap) -> bool;

    /// The model of `map` is left to the program: another one is taken over.
    fn busy(&self, map: &ExpertMap);

    /// The model is taken over: its dense weights are about to be loaded. The
    /// device has opened its `files`, which the program may not have open.
    fn taken(&self, map: &ExpertMap, files: &ModelFiles);

    /// Makes the residency, at the first computation. `batch` is the largest
    /// batch that the program has prepared for, tokens.
    ///
    /// # Errors
    /// The reason, for the user: each computation fails then.
    fn residency(
        &self,
        map: &Arc<ExpertMap>,
        files: &Arc<ModelFiles>,
        batch: usize,
    ) -> Result<Residency, String>;

    /// Something for the user to read: what failed, or what the pins do. ggml
    /// has no way to pass a text on.
    fn say(&self, text: &str);

    /// The program has freed the model, or ends. No statistics where it never
    /// computed, or ends in the middle of a computation.
    fn released(&self, map: &ExpertMap, stats: Option<Stats>);
}

static GUIDE: OnceLock<Box<dyn Guide>> = OnceLock::new();

/// Makes the device for a program that was found to have a ggml; `lookup`
/// gives the address of its functions by name. Returns ggml's
/// `ggml_backend_reg_t`, which the program itself registers.
///
/// # Errors
/// [`Incompatible`] says what of ggml is not as expected.
pub fn serve(
    lookup: &dyn Fn(&std::ffi::CStr) -> *mut c_void,
    guide: Box<dyn Guide>,
) -> Result<*mut c_void, Incompatible> {
    let lookup: Lookup = lookup;
    api::find(lookup).map_err(Incompatible::missing)?;
    let reg = device::make()?;
    GUIDE.get_or_init(|| guide);
    Ok(reg.cast())
}

/// Tells the guide that the program ends, if a model is still loaded.
pub fn end() {
    if let (Some(guide), Some(shared)) = (guide(), device::active()) {
        device::deactivate();
        guide.released(&shared.map, shared.stats_now());
    }
}

pub(crate) fn guide() -> Option<&'static dyn Guide> {
    GUIDE.get().map(|g| &**g)
}

/// Whether a weight that the program loads should be ours.
pub(crate) fn wants(guide: &dyn Guide, tensor: &str, bytes: u64) -> bool {
    let Some(map) = guide.model(tensor, bytes) else { return false };
    let active = device::active();
    // One model at a time: while one is loaded, questions are about another.
    if active.as_ref().is_some_and(|a| !Arc::ptr_eq(&a.map, &map)) {
        guide.busy(&map);
    }
    if active.is_none() {
        guide.expected(&map);
    }
    active.is_none()
}

/// The model that a buffer for these weights (names and bytes) belongs to,
/// `None` where it is not ours. The first buffer makes it ours, until the last
/// one is freed.
///
/// # Errors
/// Its files cannot be opened; the guide has heard of it.
pub(crate) fn adopt(
    guide: &dyn Guide,
    weights: &[(&str, u64)],
) -> Result<Option<Arc<Shared>>, ReadError> {
    let find = || weights.iter().find_map(|&(name, bytes)| guide.model(name, bytes));
    if let Some(active) = device::active() {
        // A LoRA adapter or another model, unless it has tensors of this one.
        let known = |&(name, _): &(&str, _)| active.map.tensor(name).is_some();
        let same =
            weights.iter().any(known) && find().is_some_and(|map| Arc::ptr_eq(&map, &active.map));
        return Ok(same.then_some(active));
    }
    let Some(map) = find() else { return Ok(None) };
    let files = ModelFiles::open(map.files()).inspect_err(|e| guide.say(&e.to_string()))?;
    let shared = Arc::new(Shared::waiting(map, Arc::new(files)));
    if !device::activate(&shared) {
        return Ok(None); // another thread was faster
    }
    watch::start(&shared);
    guide.taken(&shared.map, &shared.files);
    Ok(Some(shared))
}

/// A buffer of the model's weights was freed.
pub(crate) fn buffer_freed(shared: &Arc<Shared>) {
    let Some(guide) = guide().filter(|_| shared.drop_buffer()) else { return };
    if device::active().is_some_and(|active| Arc::ptr_eq(&active, shared)) {
        device::deactivate();
        guide.released(&shared.map, shared.stats_now());
    }
}
