//! The backend (one for each llama.cpp context) that computes sub-graphs.

use std::ffi::{c_char, c_void};

use crate::engine::Shared;
use crate::exec::{ExecError, Executor};
use crate::ffi::{self, Backend, Device, Graph, Reg};
use crate::{device, guest};

struct Context {
    /// ggml's CPU backend, which does the arithmetic.
    cpu: *mut Backend,
    executor: Executor,
}

static GUID: [u8; 16] = *b"pinscope-backend";

pub(crate) unsafe extern "C" fn init(device: *mut Device, _: *const c_char) -> *mut Backend {
    // SAFETY: the CPU device exists, `ffi::check` has seen it.
    let cpu = unsafe { ffi::ggml_backend_init_by_type(ffi::DEVICE_TYPE_CPU, std::ptr::null()) };
    let executor = device::numbers().filter(|_| !cpu.is_null()).and_then(|n| Executor::new(n, cpu));
    let Some(executor) = executor else {
        return std::ptr::null_mut();
    };
    let context = Box::into_raw(Box::new(Context { cpu, executor }));
    Box::into_raw(Box::new(Backend {
        guid: &GUID,
        iface: ffi::BackendI {
            get_name: name,
            free,
            set_tensor_async: std::ptr::null(),
            get_tensor_async: std::ptr::null(),
            set_tensor_2d_async: std::ptr::null(),
            get_tensor_2d_async: std::ptr::null(),
            cpy_tensor_async: std::ptr::null(),
            synchronize: std::ptr::null(),
            graph_plan_create: std::ptr::null(),
            graph_plan_free: std::ptr::null(),
            graph_plan_update: std::ptr::null(),
            graph_plan_compute: std::ptr::null(),
            graph_compute: compute,
            event_record: std::ptr::null(),
            event_wait: std::ptr::null(),
            graph_optimize: std::ptr::null(),
        },
        device,
        context: context.cast(),
    }))
}

unsafe extern "C" fn name(_: *mut Backend) -> *const c_char {
    c"PinScope".as_ptr()
}

unsafe extern "C" fn free(backend: *mut Backend) {
    // SAFETY: ggml frees a backend once; the executor goes before the CPU
    // backend that it computes with.
    unsafe {
        let context = Box::from_raw((*backend).context.cast::<Context>());
        let cpu = context.cpu;
        drop(context);
        ffi::ggml_backend_free(cpu);
        drop(Box::from_raw(backend));
    }
}

unsafe extern "C" fn compute(backend: *mut Backend, graph: *mut Graph) -> i32 {
    let Some(shared) = device::active() else {
        return ffi::STATUS_FAILED;
    };
    if shared.has_failed() {
        return ffi::STATUS_FAILED;
    }
    // SAFETY: ggml passes our backend, and no other thread computes with it.
    let context = unsafe { &mut *(*backend).context.cast::<Context>() };
    let mut home = shared.home();
    let Some(residency) = home.open(&shared) else {
        return ffi::STATUS_FAILED;
    };
    let Shared { map, routers, .. } = &*shared;
    let computed = context.executor.compute(graph, map, routers, residency, &device::is_ours);
    if let Some((guide, news)) = guest::guide().zip(residency.take_news()) {
        guide.say(&news);
    }
    match computed {
        Ok(()) => ffi::STATUS_SUCCESS,
        Err(ExecError::Status(status)) => status,
        Err(e) => {
            match guest::guide() {
                // The program hears of it, and the next computation may succeed.
                Some(guide) => guide.say(&e.to_string()),
                None => shared.fail(e),
            }
            ffi::STATUS_FAILED
        }
    }
}

type SetThreads = unsafe extern "C" fn(*mut Backend, i32);
type AbortCallback = unsafe extern "C" fn(*mut c_void) -> bool;
type SetAbort = unsafe extern "C" fn(*mut Backend, Option<AbortCallback>, *mut c_void);

const SET_THREADS: &std::ffi::CStr = c"ggml_backend_set_n_threads";
const SET_ABORT: &std::ffi::CStr = c"ggml_backend_set_abort_callback";

/// llama.cpp sets the number of threads and the abort callback of every
/// backend that offers these functions.
pub(crate) unsafe extern "C" fn proc_address(_: *mut Reg, name: *const c_char) -> *mut c_void {
    // SAFETY: ggml passes a terminated string.
    match unsafe { ffi::text(name) } {
        "ggml_backend_set_n_threads" => set_threads as SetThreads as *mut c_void,
        "ggml_backend_set_abort_callback" => set_abort as SetAbort as *mut c_void,
        _ => std::ptr::null_mut(),
    }
}

/// A function of ggml's CPU registry.
fn cpu_function(name: &std::ffi::CStr) -> *mut c_void {
    // SAFETY: the CPU device exists, `ffi::check` has seen it.
    unsafe {
        let cpu = ffi::ggml_backend_dev_by_type(ffi::DEVICE_TYPE_CPU);
        let reg = ffi::ggml_backend_dev_backend_reg(cpu);
        ffi::ggml_backend_reg_get_proc_address(reg, name.as_ptr())
    }
}

unsafe extern "C" fn set_threads(backend: *mut Backend, n: i32) {
    // SAFETY: ggml passes our backend.
    set_cpu_threads(unsafe { (*(*backend).context.cast::<Context>()).cpu }, n);
}

/// Sets with how many threads one of ggml's CPU backends computes.
pub(crate) fn set_cpu_threads(cpu: *mut Backend, n: i32) {
    let f = cpu_function(SET_THREADS);
    if !f.is_null() {
        // SAFETY: ggml's CPU backend has this function under this name.
        unsafe {
            let f: SetThreads = std::mem::transmute(f);
            f(cpu, n);
        }
    }
}

unsafe extern "C" fn set_abort(
    backend: *mut Backend,
    callback: Option<AbortCallback>,
    data: *mut c_void,
) {
    let f = cpu_function(SET_ABORT);
    if !f.is_null() {
        // SAFETY: as above.
        unsafe {
            let f: SetAbort = std::mem::transmute(f);
            f((*(*backend).context.cast::<Context>()).cpu, callback, data);
        }
    }
}
