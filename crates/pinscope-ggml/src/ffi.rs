//! ggml's C interface, as far as a backend device needs it.
//!
//! ggml keeps the structs of a backend (`ggml-backend-impl.h`) out of its
//! public headers and hence out of the bindings, and the plug-in must not link
//! llama.cpp at all: so the declarations stand here, by hand, for ggml 0.26
//! (`GGML_BACKEND_API_VERSION` 3). [`check`] compares them with the library
//! that is really there before any of them is used; the tests compare them
//! with the bindings of `llama-cpp-sys-2`.

use std::ffi::{c_char, c_void, CStr};

pub(crate) use crate::api::*;

/// `GGML_BACKEND_API_VERSION` that the declarations below follow.
pub const API_VERSION: i32 = 3;

/// `GGML_OP_COUNT`; ggml reads out of bounds for the name of a number above.
const OP_COUNT: u32 = 101;
/// At most `GGML_TYPE_COUNT`; ggml reads out of bounds for the name of a number above.
pub const TYPE_COUNT: u32 = 40;
pub const MAX_SRC: usize = 10;
pub const STATUS_SUCCESS: i32 = 0;
pub const STATUS_FAILED: i32 = -1;
pub const DEVICE_TYPE_CPU: u32 = 0;
pub const DEVICE_TYPE_ACCEL: u32 = 3;
pub const TENSOR_FLAG_COMPUTE: i32 = 16;

/// An optional callback that this device does not implement.
pub type Unused = *const c_void;

/// `struct ggml_tensor`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub type_: u32,
    pub buffer: *mut Buffer,
    pub ne: [i64; 4],
    pub nb: [usize; 4],
    pub op: u32,
    pub op_params: [i32; 16],
    pub flags: i32,
    pub src: [*mut Tensor; MAX_SRC],
    pub view_src: *mut Tensor,
    pub view_offs: usize,
    pub data: *mut c_void,
    pub name: [c_char; 64],
    pub extra: *mut c_void,
    pub padding: [u8; 8],
}

/// `struct ggml_cgraph`; only ggml looks inside.
#[repr(C)]
pub struct Graph {
    _private: [u8; 0],
}

/// `struct ggml_context`; only ggml looks inside.
#[repr(C)]
pub struct Context {
    _private: [u8; 0],
}

/// `struct ggml_init_params`.
#[repr(C)]
pub struct InitParams {
    pub mem_size: usize,
    pub mem_buffer: *mut c_void,
    pub no_alloc: bool,
}

/// `struct ggml_backend_buffer_type_i`.
#[repr(C)]
pub struct BufferTypeI {
    pub get_name: unsafe extern "C" fn(*mut BufferType) -> *const c_char,
    pub alloc_buffer: unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer,
    pub alloc_buffer_n: unsafe extern "C" fn(*mut BufferType, *mut *mut Tensor, i32) -> *mut Buffer,
    pub get_alignment: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub get_max_size: Unused,
    pub get_alloc_size: Unused,
    pub get_alloc_size_n: Unused,
    pub is_host: unsafe extern "C" fn(*mut BufferType) -> bool,
}

/// `struct ggml_backend_buffer_type`.
#[repr(C)]
pub struct BufferType {
    pub iface: BufferTypeI,
    pub device: *mut Device,
    pub context: *mut c_void,
}

/// `struct ggml_backend_buffer_i`.
#[repr(C)]
pub struct BufferI {
    pub free_buffer: unsafe extern "C" fn(*mut Buffer),
    pub get_base: unsafe extern "C" fn(*mut Buffer) -> *mut c_void,
    pub init_tensor: Unused,
    pub memset_tensor: unsafe extern "C" fn(*mut Buffer, *mut Tensor, u8, usize, usize),
    pub set_tensor: unsafe extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize),
    pub get_tensor: unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize),
    pub set_tensor_2d: Unused,
    pub get_tensor_2d: Unused,
    pub cpy_tensor: Unused,
    pub clear: unsafe extern "C" fn(*mut Buffer, u8),
    pub reset: Unused,
}

/// `struct ggml_backend_buffer`.
#[repr(C)]
pub struct Buffer {
    pub iface: BufferI,
    pub buft: *mut BufferType,
    pub context: *mut c_void,
    pub size: usize,
    pub usage: u32,
}

/// `GGML_BACKEND_BUFFER_USAGE_WEIGHTS`.
pub const BUFFER_USAGE_WEIGHTS: u32 = 1;

/// `struct ggml_backend_i`.
#[repr(C)]
pub struct BackendI {
    pub get_name: unsafe extern "C" fn(*mut Backend) -> *const c_char,
    pub free: unsafe extern "C" fn(*mut Backend),
    pub set_tensor_async: Unused,
    pub get_tensor_async: Unused,
    pub set_tensor_2d_async: Unused,
    pub get_tensor_2d_async: Unused,
    pub cpy_tensor_async: Unused,
    pub synchronize: Unused,
    pub graph_plan_create: Unused,
    pub graph_plan_free: Unused,
    pub graph_plan_update: Unused,
    pub graph_plan_compute: Unused,
    pub graph_compute: unsafe extern "C" fn(*mut Backend, *mut Graph) -> i32,
    pub event_record: Unused,
    pub event_wait: Unused,
    pub graph_optimize: Unused,
}

/// `struct ggml_backend`.
#[repr(C)]
pub struct Backend {
    pub guid: *const [u8; 16],
    pub iface: BackendI,
    pub device: *mut Device,
    pub context: *mut c_void,
}

/// `struct ggml_backend_dev_caps`.
#[repr(C)]
pub struct DeviceCaps {
    pub async_: bool,
    pub host_buffer: bool,
    pub buffer_from_host_ptr: bool,
    pub events: bool,
    pub mmap_support: bool,
}

/// `struct ggml_backend_dev_props`.
#[repr(C)]
pub struct DeviceProps {
    pub name: *const c_char,
    pub description: *const c_char,
    pub memory_free: usize,
    pub memory_total: usize,
    pub type_: u32,
    pub device_id: *const c_char,
    pub caps: DeviceCaps,
}

/// `struct ggml_backend_device_i`.
#[repr(C)]
pub struct DeviceI {
    pub get_name: unsafe extern "C" fn(*mut Device) -> *const c_char,
    pub get_description: unsafe extern "C" fn(*mut Device) -> *const c_char,
    pub get_memory: unsafe extern "C" fn(*mut Device, *mut usize, *mut usize),
    pub get_type: unsafe extern "C" fn(*mut Device) -> u32,
    pub get_props: unsafe extern "C" fn(*mut Device, *mut DeviceProps),
    pub init_backend: unsafe extern "C" fn(*mut Device, *const c_char) -> *mut Backend,
    pub get_buffer_type: unsafe extern "C" fn(*mut Device) -> *mut BufferType,
    pub get_host_buffer_type: Unused,
    pub buffer_from_host_ptr: Unused,
    pub supports_op: unsafe extern "C" fn(*mut Device, *const Tensor) -> bool,
    pub supports_buft: unsafe extern "C" fn(*mut Device, *mut BufferType) -> bool,
    pub offload_op: Unused,
    pub event_new: Unused,
    pub event_free: Unused,
    pub event_synchronize: Unused,
}

/// `struct ggml_backend_device`.
#[repr(C)]
pub struct Device {
    pub iface: DeviceI,
    pub reg: *mut Reg,
    pub context: *mut c_void,
}

/// `struct ggml_backend_reg_i`.
#[repr(C)]
pub struct RegI {
    pub get_name: unsafe extern "C" fn(*mut Reg) -> *const c_char,
    pub get_device_count: unsafe extern "C" fn(*mut Reg) -> usize,
    pub get_device: unsafe extern "C" fn(*mut Reg, usize) -> *mut Device,
    pub get_proc_address: unsafe extern "C" fn(*mut Reg, *const c_char) -> *mut c_void,
}

/// `struct ggml_backend_reg`.
#[repr(C)]
pub struct Reg {
    pub api_version: i32,
    pub iface: RegI,
    pub context: *mut c_void,
}

/// `ggml_vec_dot_t`: a row of weights times a quantised row.
pub type VecDot = unsafe extern "C" fn(
    n: i32,
    out: *mut f32,
    out_stride: usize,
    weights: *const c_void,
    weights_stride: usize,
    input: *const c_void,
    input_stride: usize,
    rows: i32,
);

/// `ggml_from_float_t`: quantises `n` values.
pub type FromFloat = unsafe extern "C" fn(*const f32, *mut c_void, n: i64);

/// `struct ggml_type_traits_cpu`.
#[repr(C)]
pub struct TypeTraits {
    pub from_float: Option<FromFloat>,
    pub vec_dot: VecDot,
    pub vec_dot_type: u32,
    pub nrows: i64,
}

/// `struct gguf_context`; only ggml looks inside.
#[repr(C)]
pub struct Gguf {
    _private: [u8; 0],
}

/// `struct gguf_init_params`.
#[repr(C)]
pub struct GgufInitParams {
    pub no_alloc: bool,
    pub ctx: *mut *mut Context,
}

/// A C string of ggml as text; empty for null and for bytes that are not UTF-8.
///
/// # Safety
/// `s` is null or points to a terminated string that outlives the result.
pub unsafe fn text<'a>(s: *const c_char) -> &'a str {
    if s.is_null() {
        return "";
    }
    // SAFETY: not null, and terminated by the caller's promise.
    unsafe { CStr::from_ptr(s) }.to_str().unwrap_or("")
}

impl Tensor {
    /// The tensor's name; empty if it is not UTF-8.
    pub fn name(&self) -> &str {
        let len = self.name.iter().position(|&c| c == 0).unwrap_or(self.name.len());
        // SAFETY: `c_char` and `u8` have one layout, and `len` is in bounds.
        let bytes = unsafe { std::slice::from_raw_parts(self.name.as_ptr().cast::<u8>(), len) };
        std::str::from_utf8(bytes).unwrap_or("")
    }
}

/// Numbers of the ops and types that this device handles, looked up by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    pub none: u32,
    pub mul_mat: u32,
    pub mul_mat_id: u32,
    pub add_id: u32,
    pub add: u32,
    pub mul: u32,
    pub glu: u32,
    pub unary: u32,
    pub clamp: u32,
    pub scale: u32,
    pub sqr: u32,
    pub view: u32,
    pub reshape: u32,
    pub get_rows: u32,
    pub set_rows: u32,
    pub custom: u32,
    pub f32: u32,
    pub i32: u32,
    pub i64: u32,
    pub q8_0: u32,
    /// Operations that may be computed between products, a bit each.
    between: u128,
}

/// What llama.cpp computes in a layer besides products. Left out is what it
/// wants on the layer's own device, and replaces by other operations when it
/// is not (fused attention), and what writes to the KV cache, of which nobody can
/// tell to which model it belongs.
const BETWEEN: [&str; 23] = [
    "NONE", "ADD", "ADD_ID", "SUB", "MUL", "DIV", "SQR", "SQRT", "SCALE", "CLAMP", "SUM_ROWS",
    "UNARY", "GLU", "NORM", "RMS_NORM", "ROPE", "SOFT_MAX", "ARGSORT", "VIEW", "RESHAPE",
    "PERMUTE", "CONT", "GET_ROWS",
];

impl Numbers {
    /// Whether `op` may be computed between products.
    pub fn is_between(&self, op: u32) -> bool {
        op < u128::BITS && self.between >> op & 1 == 1
    }
}

/// Why this build of PinScope cannot work with the ggml that is there.
#[derive(Debug, thiserror::Error)]
#[error(
    "this ggml is not the one that PinScope was made for: {0}. Use the llama.cpp version that \
     the README names"
)]
pub struct Incompatible(String);

impl Incompatible {
    /// ggml lacks a function.
    pub(crate) fn missing(function: &str) -> Self {
        Self(format!("it has no function {function}"))
    }
}

/// Compares the declarations of this module with the ggml that is linked.
///
/// # Errors
/// [`Incompatible`] says what differs; nothing of ggml may be used then.
pub fn check() -> Result<Numbers, Incompatible> {
    // SAFETY: these functions take no state and may be called at any time.
    let (overhead, cpu) =
        unsafe { (ggml_tensor_overhead(), ggml_backend_dev_by_type(DEVICE_TYPE_CPU)) };
    let ours = std::mem::size_of::<Tensor>() + 32; // struct ggml_object
    if overhead != ours {
        return Err(Incompatible(format!("a tensor takes {overhead} bytes instead of {ours}")));
    }
    if cpu.is_null() {
        return Err(Incompatible("it has no CPU device".into()));
    }
    // SAFETY: a device's registry is alive for the whole process; its first
    // field is the API version in every version of the interface.
    let version = unsafe { (*ggml_backend_dev_backend_reg(cpu)).api_version };
    if version != API_VERSION {
        return Err(Incompatible(format!(
            "its backend interface has version {version} instead of {API_VERSION}"
        )));
    }
    // SAFETY: the interface version fits, so the device's first callback is
    // `get_name` and the fourth `get_type`.
    let (by_struct, by_call, kind) = unsafe {
        (((*cpu).iface.get_name)(cpu), ggml_backend_dev_name(cpu), ((*cpu).iface.get_type)(cpu))
    };
    if by_struct != by_call || kind != DEVICE_TYPE_CPU {
        return Err(Incompatible("its device structure has another layout".into()));
    }
    let op = |name: &str| {
        (0..OP_COUNT)
            // SAFETY: op numbers below GGML_OP_COUNT have a name.
            .find(|&op| unsafe { text(ggml_op_name(op)) } == name)
            .ok_or_else(|| Incompatible(format!("it has no operation {name}")))
    };
    let type_ = |name: &str| {
        (0..TYPE_COUNT)
            // SAFETY: `ggml_type_name` answers null or a constant for any number.
            .find(|&t| unsafe { text(ggml_type_name(t)) } == name)
            .ok_or_else(|| Incompatible(format!("it has no type {name}")))
    };
    Ok(Numbers {
        none: op("NONE")?,
        mul_mat: op("MUL_MAT")?,
        mul_mat_id: op("MUL_MAT_ID")?,
        add_id: op("ADD_ID")?,
        add: op("ADD")?,
        mul: op("MUL")?,
        glu: op("GLU")?,
        unary: op("UNARY")?,
        clamp: op("CLAMP")?,
        scale: op("SCALE")?,
        sqr: op("SQR")?,
        view: op("VIEW")?,
        reshape: op("RESHAPE")?,
        get_rows: op("GET_ROWS")?,
        set_rows: op("SET_ROWS")?,
        custom: op("CUSTOM")?,
        f32: type_("f32")?,
        i32: type_("i32")?,
        i64: type_("i64")?,
        q8_0: type_("q8_0")?,
        between: BETWEEN.iter().try_fold(0, |all, name| Ok(all | 1 << op(name)?))?,
    })
}
