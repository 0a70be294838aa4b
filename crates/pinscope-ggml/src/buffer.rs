//! Buffers of the device: where weights and results lie.
//!
//! A buffer of weights is one range of addresses. Dense weights come first and
//! are read into memory when llama.cpp sets them; what it passes is ignored,
//! so the file's mapping is never touched. Experts follow as address space
//! that nothing may touch: they live in the arena. Any other buffer (results,
//! LoRA adapters) is plain memory.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Instant;

use crate::device::{self, NO_CONTEXT};
use crate::engine::Shared;
use crate::ffi::{self, Buffer, BufferType, Device, Tensor};
use crate::{guest, sink};

const ALIGNMENT: usize = 64;
const PAGE: usize = 4096;

struct Context {
    base: *mut u8,
    len: usize,
    /// Bytes from `base` on that are memory; the rest is address space.
    memory: usize,
    /// Set for buffers of file-backed weights.
    shared: Option<Arc<Shared>>,
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            guest::buffer_freed(shared);
        }
        // SAFETY: mapped in `make`, unmapped once.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// The device's only buffer type.
pub(crate) fn new_type(device: *mut Device) -> BufferType {
    BufferType {
        iface: ffi::BufferTypeI {
            get_name: type_name,
            alloc_buffer: alloc,
            alloc_buffer_n: alloc_tensors,
            get_alignment: alignment,
            get_max_size: std::ptr::null(),
            get_alloc_size: std::ptr::null(),
            get_alloc_size_n: std::ptr::null(),
            is_host,
        },
        device,
        context: NO_CONTEXT,
    }
}

unsafe extern "C" fn type_name(_: *mut BufferType) -> *const c_char {
    c"PinScope".as_ptr()
}

unsafe extern "C" fn alignment(_: *mut BufferType) -> usize {
    ALIGNMENT
}

unsafe extern "C" fn is_host(_: *mut BufferType) -> bool {
    true
}

unsafe extern "C" fn alloc(buft: *mut BufferType, size: usize) -> *mut Buffer {
    make(buft, size, size, None)
}

/// Lays out `tensors` and gives them their addresses.
unsafe extern "C" fn alloc_tensors(
    buft: *mut BufferType,
    tensors: *mut *mut Tensor,
    n: i32,
) -> *mut Buffer {
    // SAFETY: ggml passes `n` live tensors.
    let tensors = unsafe { std::slice::from_raw_parts(tensors, usize::try_from(n).unwrap_or(0)) };
    let shared = match guest::guide() {
        None => device::active(),
        Some(guide) => {
            // SAFETY: alive, see above.
            let weights =
                tensors.iter().map(|&t| unsafe { ((*t).name(), ffi::ggml_nbytes(t) as u64) });
            match guest::adopt(guide, &weights.collect::<Vec<_>>()) {
                Ok(shared) => shared,
                Err(_) => return std::ptr::null_mut(),
            }
        }
    };
    let is_expert =
        |t: &Tensor| shared.as_ref().is_some_and(|s| s.map.expert_tensor(t.name()).is_some());
    let mut place = Vec::with_capacity(tensors.len());
    let mut end = 0usize;
    let mut memory = 0;
    for experts in [false, true] {
        for &tensor in tensors {
            // SAFETY: alive, see above. Views and tensors that have their
            // address are not ours to place.
            let t = unsafe { &*tensor };
            if !t.data.is_null() || !t.view_src.is_null() || is_expert(t) != experts {
                continue;
            }
            // As far from a page's start as in the file: O_DIRECT reads whole
            // pages into place.
            let info = shared.as_ref().and_then(|s| s.map.tensor(t.name()));
            let start = match info {
                Some(info) => next_page(end) + (info.offset as usize) % PAGE,
                None => end.next_multiple_of(ALIGNMENT),
            };
            place.push((tensor, start));
            // SAFETY: alive, see above.
            end = start + unsafe { ffi::ggml_nbytes(t) };
        }
        end = next_page(end);
        if !experts {
            memory = end;
        }
    }
    let file_backed = shared.filter(|s| {
        // SAFETY: alive, see above.
        place.iter().any(|&(t, _)| s.map.tensor(unsafe { &*t }.name()).is_some())
    });
    let buffer = make(buft, end, memory, file_backed);
    if buffer.is_null() {
        return buffer;
    }
    for (tensor, start) in place {
        // SAFETY: the buffer was made with room for every tensor.
        unsafe {
            let base = buffer_context(buffer).base;
            ffi::ggml_backend_tensor_alloc(buffer, tensor, base.add(start).cast());
            let shared = buffer_context(buffer).shared.as_ref();
            if let (Some(shared), Some(n)) = (shared, device::numbers()) {
                shared.routers.note(&*tensor, n.f32);
            }
        }
    }
    buffer
}

fn next_page(at: usize) -> usize {
    at.next_multiple_of(PAGE)
}

/// A buffer of `len` bytes of addresses, the first `memory` of them usable.
/// Null when the system has none to give; llama.cpp reports that.
fn make(
    buft: *mut BufferType,
    len: usize,
    memory: usize,
    shared: Option<Arc<Shared>>,
) -> *mut Buffer {
    let len = next_page(len.max(1));
    // SAFETY: an anonymous mapping at an address of the kernel's choice.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return std::ptr::null_mut();
    }
    let memory = next_page(memory).min(len);
    // SAFETY: the range was mapped above. Huge pages are a wish: without them
    // all works, with more TLB misses. Locking too: where the limit forbids
    // it, the weights may be swapped but are not wrong.
    let failed = memory > 0
        && unsafe {
            let denied = libc::mprotect(base, memory, libc::PROT_READ | libc::PROT_WRITE) != 0;
            libc::madvise(base, memory, libc::MADV_HUGEPAGE);
            if shared.is_some() {
                libc::mlock2(base, memory, libc::MLOCK_ONFAULT as _);
            }
            denied
        };
    if let Some(shared) = &shared {
        shared.add_buffer();
    }
    let read_into = |s: &Shared| guest::guide().is_some_and(|guide| !guide.is_mapped(&s.map));
    let failed = failed
        || (memory < len && shared.as_deref().is_some_and(read_into))
            // SAFETY: mapped above, and nobody knows of it yet.
            && unsafe { !sink::forget_writes(base.cast::<u8>().add(memory), len - memory) };
    let context = Box::into_raw(Box::new(Context { base: base.cast(), len, memory, shared }));
    if failed {
        // SAFETY: made above, given to nobody.
        drop(unsafe { Box::from_raw(context) });
        return std::ptr::null_mut();
    }
    let iface = ffi::BufferI {
        free_buffer,
        get_base,
        init_tensor: std::ptr::null(),
        memset_tensor,
        set_tensor,
        get_tensor,
        set_tensor_2d: std::ptr::null(),
        get_tensor_2d: std::ptr::null(),
        cpy_tensor: std::ptr::null(),
        clear,
        reset: std::ptr::null(),
    };
    // SAFETY: all required callbacks are there; ggml owns the context until
    // `free_buffer`.
    unsafe { ffi::ggml_backend_buffer_init(buft, iface, context.cast(), len) }
}

/// # Safety
/// `buffer` is one of ours and alive.
unsafe fn buffer_context<'a>(buffer: *mut Buffer) -> &'a Context {
    // SAFETY: by the caller's promise; the context is made in `make`.
    unsafe { &*(*buffer).context.cast::<Context>() }
}

unsafe extern "C" fn free_buffer(buffer: *mut Buffer) {
    // SAFETY: ggml frees a buffer once.
    drop(unsafe { Box::from_raw((*buffer).context.cast::<Context>()) });
}

unsafe extern "C" fn get_base(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: ggml passes one of our buffers.
    unsafe { buffer_context(buffer).base.cast() }
}

unsafe extern "C" fn memset_tensor(
    buffer: *mut Buffer,
    tensor: *mut Tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml passes a tensor of this buffer and a range inside it.
    unsafe {
        if address_is_memory(buffer_context(buffer), &*tensor) {
            std::ptr::write_bytes((*tensor).data.cast::<u8>().add(offset), value, size);
        }
    }
}

fn address_is_memory(context: &Context, t: &Tensor) -> bool {
    (t.data as usize) < context.base as usize + context.memory
}

unsafe extern "C" fn set_tensor(
    buffer: *mut Buffer,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml passes a tensor of this buffer, a range inside it, and as
    // many bytes of data.
    unsafe {
        let (context, t) = (buffer_context(buffer), &*tensor);
        if !address_is_memory(context, t) {
            return; // an expert: it is read when the router asks for it
        }
        let to = t.data.cast::<u8>().add(offset);
        if let Some(shared) = &context.shared {
            if let Some(info) = shared.map.tensor(t.name()).filter(|i| i.size == size as u64) {
                // Whole pages: those at either end are this tensor's alone,
                // as `alloc_tensors` laid it out.
                let skew = info.offset as usize % PAGE;
                let left = shared.map.files()[usize::from(info.file)].len - info.offset;
                let len = next_page(skew + size).min(skew + left as usize);
                let pages = std::slice::from_raw_parts_mut(to.sub(skew), len);
                let began = Instant::now();
                match shared.files.read_into(info.file, info.offset - skew as u64, pages) {
                    Ok(()) => shared.dense_read(len, began.elapsed()),
                    Err(e) => shared.fail(e),
                }
                return;
            }
        }
        std::ptr::copy_nonoverlapping(data.cast::<u8>(), to, size);
    }
}

unsafe extern "C" fn get_tensor(
    buffer: *mut Buffer,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: ggml passes a tensor of this buffer, a range inside it, and
    // room for as many bytes.
    unsafe {
        let (context, t) = (buffer_context(buffer), &*tensor);
        if address_is_memory(context, t) {
            let from = t.data.cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(from, data.cast::<u8>(), size);
        } else if let Some(shared) = &context.shared {
            let to = std::slice::from_raw_parts_mut(data.cast::<u8>(), size);
            let read = shared
                .map
                .tensor(t.name())
                .map(|info| shared.files.read_into(info.file, info.offset + offset as u64, to));
            if let Some(Err(e)) = read {
                shared.fail(e);
            }
        }
    }
}

unsafe extern "C" fn clear(buffer: *mut Buffer, value: u8) {
    // SAFETY: ggml passes one of our buffers.
    unsafe {
        let context = buffer_context(buffer);
        // A fresh mapping is zero already; writing would only make it resident.
        if value != 0 {
            std::ptr::write_bytes(context.base, value, context.memory);
        }
    }
}
