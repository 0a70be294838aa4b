//! Has programs load the library that would not look for it, under `LD_PRELOAD`.
//!
//! Where ggml's CPU part is linked into a program instead of being a library
//! of its own, llama.cpp's `llama_backend_init` finds a backend already there
//! and looks no further: `llama-server` then ignores `GGML_BACKEND_PATH`.
//! With `LD_PRELOAD` its call comes here first.

use std::ffi::{c_char, c_void, CStr};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether ggml has asked for our backend.
static LOADED: AtomicBool = AtomicBool::new(false);

/// ggml has found the library.
pub fn note_loaded() {
    LOADED.store(true, Ordering::Relaxed);
}

/// llama.cpp's `llama_backend_init`, and then, if `GGML_BACKEND_PATH` is set
/// and was not looked at, ggml's `ggml_backend_load`.
///
/// # Safety
/// As for `llama_backend_init`.
#[no_mangle]
pub unsafe extern "C" fn llama_backend_init() {
    // SAFETY: the functions have these types in llama.cpp and ggml, the path
    // is terminated, and null is `None`.
    unsafe {
        let find = |from: *mut c_void, name: &CStr| libc::dlsym(from, name.as_ptr());
        let init = find(libc::RTLD_NEXT, c"llama_backend_init");
        if let Some(init) = std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn()>>(init)
        {
            init();
        }
        type Load = unsafe extern "C" fn(*const c_char) -> *mut c_void;
        let load = find(libc::RTLD_DEFAULT, c"ggml_backend_load");
        let load = std::mem::transmute::<*mut c_void, Option<Load>>(load);
        let path = libc::getenv(c"GGML_BACKEND_PATH".as_ptr());
        if let Some(load) = load.filter(|_| !path.is_null() && !LOADED.load(Ordering::Relaxed)) {
            load(path);
        }
    }
}
