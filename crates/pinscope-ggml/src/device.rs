//! The device that ggml sees: which tensors and operations it takes.
//!
//! One ACCEL device with one buffer type. While an [`crate::Engine`] is active
//! it answers two different questions through ggml's one `supports_op`:
//!
//! - *Where should this weight live?* llama.cpp asks with the weight in an
//!   empty dummy buffer. The answer is yes for every tensor of the model's
//!   files: experts become reserved address space, dense weights are read
//!   straight into memory of our own (no page cache, not evicted).
//! - *Can you compute this?* Yes for products and for the usual operations
//!   around them, unless they have weights that are not ours, since each change
//!   of device costs time: a layer is ours but for fused attention and writes
//!   to the KV cache. What our kernels do not serve is computed by the CPU
//!   backend in the end.
//!
//! Without an active engine it answers no, and llama.cpp runs as without it,
//! unless a [`guest::Guide`] recognises the weight.

use std::ffi::{c_char, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use crate::engine::Shared;
use crate::ffi::{self, BufferType, Device, Incompatible, Numbers, Reg, Tensor};
use crate::{backend, buffer, guest};

/// The structs that ggml holds pointers to; made once, never freed.
struct Registered {
    numbers: Numbers,
    buffer_type: *mut BufferType,
}

// SAFETY: written before ggml sees them, read-only afterwards.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

static REGISTERED: OnceLock<Registered> = OnceLock::new();
static ACTIVE: RwLock<Option<Arc<Shared>>> = RwLock::new(None);

/// Registers the device with ggml; later calls do nothing.
pub(crate) fn register() -> Result<(), Incompatible> {
    static ONCE: std::sync::Once = std::sync::Once::new();
    let reg = make()?;
    // SAFETY: complete, and alive for the rest of the process.
    ONCE.call_once(|| unsafe { ffi::ggml_backend_register(reg) });
    Ok(())
}

/// Makes the device, once a process.
pub(crate) fn make() -> Result<*mut Reg, Incompatible> {
    // SAFETY: what was made is complete, and alive for the rest of the process.
    let reg = |r: &Registered| unsafe { (*(*r.buffer_type).device).reg };
    if let Some(made) = REGISTERED.get() {
        return Ok(reg(made));
    }
    let numbers = ffi::check()?;
    let made = REGISTERED.get_or_init(|| {
        let reg = Box::into_raw(Box::new(Reg {
            api_version: ffi::API_VERSION,
            iface: ffi::RegI {
                get_name: reg_name,
                get_device_count: reg_device_count,
                get_device: reg_device,
                get_proc_address: backend::proc_address,
            },
            context: std::ptr::null_mut(),
        }));
        let device = Box::into_raw(Box::new(Device {
            iface: ffi::DeviceI {
                get_name: device_name,
                get_description: device_description,
                get_memory: device_memory,
                get_type: device_type,
                get_props: device_props,
                init_backend: backend::init,
                get_buffer_type: device_buffer_type,
                get_host_buffer_type: std::ptr::null(),
                buffer_from_host_ptr: std::ptr::null(),
                supports_op,
                supports_buft,
                offload_op: std::ptr::null(),
                event_new: std::ptr::null(),
                event_free: std::ptr::null(),
                event_synchronize: std::ptr::null(),
            },
            reg,
            context: std::ptr::null_mut(),
        }));
        let buffer_type = Box::into_raw(Box::new(buffer::new_type(device)));
        // SAFETY: both were made above; ggml does not know them yet.
        unsafe {
            (*device).context = buffer_type.cast();
            (*reg).context = device.cast();
        }
        Registered { numbers, buffer_type }
    });
    Ok(reg(made))
}

/// Makes the device answer for `shared`; false when another one is active.
pub(crate) fn activate(shared: &Arc<Shared>) -> bool {
    let mut active = ACTIVE.write().unwrap_or_else(PoisonError::into_inner);
    let free = active.is_none();
    if free {
        *active = Some(Arc::clone(shared));
    }
    free
}

pub(crate) fn deactivate() {
    *ACTIVE.write().unwrap_or_else(PoisonError::into_inner) = None;
}

/// The active engine's part.
pub(crate) fn active() -> Option<Arc<Shared>> {
    ACTIVE.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Operation numbers of the ggml that is linked.
pub(crate) fn numbers() -> Option<Numbers> {
    REGISTERED.get().map(|r| r.numbers)
}

/// Whether a tensor lies in one of our buffers.
pub(crate) fn is_ours(t: &Tensor) -> bool {
    REGISTERED.get().is_some_and(|r| {
        // SAFETY: a tensor's buffer is null or alive.
        unsafe { t.buffer.as_ref() }.is_some_and(|b| b.buft == r.buffer_type)
    })
}

unsafe extern "C" fn reg_name(_: *mut Reg) -> *const c_char {
    c"PinScope".as_ptr()
}

unsafe extern "C" fn reg_device_count(_: *mut Reg) -> usize {
    1
}

unsafe extern "C" fn reg_device(reg: *mut Reg, _: usize) -> *mut Device {
    // SAFETY: ggml passes our registry, whose context is the device.
    unsafe { (*reg).context.cast() }
}

unsafe extern "C" fn device_name(_: *mut Device) -> *const c_char {
    c"PinScope".as_ptr()
}

unsafe extern "C" fn device_description(_: *mut Device) -> *const c_char {
    c"PinScope expert residency".as_ptr()
}

unsafe extern "C" fn device_memory(_: *mut Device, free: *mut usize, total: *mut usize) {
    // SAFETY: ggml passes two valid places.
    unsafe {
        *free = 0;
        *total = 0;
    }
}

unsafe extern "C" fn device_type(_: *mut Device) -> u32 {
    ffi::DEVICE_TYPE_ACCEL
}

unsafe extern "C" fn device_props(device: *mut Device, props: *mut ffi::DeviceProps) {
    // SAFETY: ggml passes our device and a place for the answer.
    unsafe {
        *props = ffi::DeviceProps {
            name: device_name(device),
            description: device_description(device),
            memory_free: 0,
            memory_total: 0,
            type_: ffi::DEVICE_TYPE_ACCEL,
            device_id: std::ptr::null(),
            caps: ffi::DeviceCaps {
                async_: false,
                host_buffer: false,
                // Else weights would stay in the page cache.
                buffer_from_host_ptr: false,
                events: false,
                mmap_support: true,
            },
        };
    }
}

unsafe extern "C" fn device_buffer_type(device: *mut Device) -> *mut BufferType {
    // SAFETY: ggml passes our device, whose context is the buffer type.
    unsafe { (*device).context.cast() }
}

unsafe extern "C" fn supports_buft(device: *mut Device, buft: *mut BufferType) -> bool {
    // SAFETY: ggml passes our device and a live buffer type.
    unsafe { buft == (*device).context.cast() || ffi::ggml_backend_buft_is_host(buft) }
}

unsafe extern "C" fn supports_op(_: *mut Device, op: *const Tensor) -> bool {
    // SAFETY: ggml passes a live tensor.
    let Some(op) = (unsafe { op.as_ref() }) else { return false };
    let Some(n) = numbers() else { return false };
    if let Some(weight) = to_be_placed(op) {
        // SAFETY: alive, see `to_be_placed`.
        let bytes = unsafe { ffi::ggml_nbytes(weight) } as u64;
        return match guest::guide() {
            Some(guide) => guest::wants(guide, weight.name(), bytes),
            None => active().is_some_and(|s| s.map.tensor(weight.name()).is_some()),
        };
    }
    let Some(shared) = active() else { return false };
    if op.op == n.mul_mat_id {
        shared.batch.fetch_max(usize::try_from(op.ne[2]).unwrap_or(0), Ordering::Relaxed);
    }
    let takes = n.is_between(op.op) || op.op == n.mul_mat || op.op == n.mul_mat_id;
    takes
        && (op.op != n.mul_mat_id || operands(op).next().is_some_and(is_ours))
        && !is_of_others(op)
}

/// Whether `op` has weights that are not ours, such as a second model's.
fn is_of_others(op: &Tensor) -> bool {
    operands(op).any(|t| {
        // SAFETY: a tensor's buffer is null or alive.
        let weights =
            unsafe { t.buffer.as_ref() }.is_some_and(|b| b.usage == ffi::BUFFER_USAGE_WEIGHTS);
        weights && !is_ours(t)
    })
}

fn operands(op: &Tensor) -> impl Iterator<Item = &Tensor> {
    // SAFETY: operands are null or alive.
    op.src.iter().filter_map(|&t| unsafe { t.as_ref() })
}

/// The weight whose place llama.cpp asks for, if `op` is such a question.
fn to_be_placed(op: &Tensor) -> Option<&Tensor> {
    // SAFETY: `is_ours` has seen the buffer, which is alive.
    operands(op).find(|&weight| is_ours(weight) && unsafe { (*weight.buffer).size } == 0)
}

/// The context pointer of our buffer type is unused; buffers have their own.
pub(crate) const NO_CONTEXT: *mut c_void = std::ptr::null_mut();
