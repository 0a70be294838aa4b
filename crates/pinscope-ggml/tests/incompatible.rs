//! A ggml of another version is refused before any of it is used.

use std::ffi::{c_char, c_void, CStr};
use std::sync::Arc;

use pinscope::map::ExpertMap;
use pinscope::reader::ModelFiles;
use pinscope::residency::{Residency, Stats};
use pinscope_ggml::{serve, Guide};
use pinscope_host as _; // the functions that `build.rs` has calls go through

/// A guide that must not be asked anything.
struct Nobody;

impl Guide for Nobody {
    fn model(&self, _: &str, _: u64) -> Option<Arc<ExpertMap>> {
        unreachable!()
    }
    fn expected(&self, _: &ExpertMap) {
        unreachable!()
    }
    fn is_mapped(&self, _: &ExpertMap) -> bool {
        unreachable!()
    }
    fn busy(&self, _: &ExpertMap) {
        unreachable!()
    }
    fn taken(&self, _: &ExpertMap, _: &ModelFiles) {
        unreachable!()
    }
    fn residency(
        &self,
        _: &Arc<ExpertMap>,
        _: &Arc<ModelFiles>,
        _: usize,
    ) -> Result<Residency, String> {
        unreachable!()
    }
    fn say(&self, _: &str) {
        unreachable!()
    }
    fn released(&self, _: &ExpertMap, _: Option<Stats>) {
        unreachable!()
    }
}

/// What a ggml of a later version might say.
extern "C" fn tensor_overhead() -> usize {
    500
}

/// Any other function: it must not be called.
extern "C" fn other() -> *const c_char {
    std::process::abort()
}

/// A device for the CPU is asked for together with the size of a tensor.
extern "C" fn no_device(_: u32) -> *mut c_void {
    std::ptr::null_mut()
}

fn later_version(name: &CStr) -> *mut c_void {
    match name.to_bytes() {
        b"ggml_tensor_overhead" => tensor_overhead as extern "C" fn() -> usize as *mut c_void,
        b"ggml_backend_dev_by_type" => {
            no_device as extern "C" fn(u32) -> *mut c_void as *mut c_void
        }
        _ => other as extern "C" fn() -> *const c_char as *mut c_void,
    }
}

// One test: a process has one ggml.
#[test]
fn a_missing_function_and_a_tensor_of_another_size_are_refused_by_name() {
    let lacks_one = |name: &CStr| match name.to_bytes() {
        b"gguf_get_val_str" => std::ptr::null_mut(),
        _ => later_version(name),
    };
    let error = serve(&lacks_one, Box::new(Nobody)).unwrap_err().to_string();
    assert!(error.contains("no function gguf_get_val_str"), "{error}");

    let error = serve(&later_version, Box::new(Nobody)).unwrap_err().to_string();
    assert!(error.contains("a tensor takes 500 bytes instead of 368"), "{error}");
}
