//! ggml's functions, and where they come from.
//!
//! A program that contains llama.cpp links them ([`link`]). The plug-in must
//! not: it is loaded into programs whose ggml may lack some of them, or may
//! not be visible to it, and `LD_PRELOAD` puts it into programs without ggml.
//! It looks them up by name ([`find`]), and what is missing is a reason to
//! stay away instead of a failure of the dynamic linker.

use std::ffi::{c_char, c_void, CStr};
use std::sync::OnceLock;

use crate::ffi::{
    Backend, Buffer, BufferI, BufferType, Context, Device, Gguf, GgufInitParams, Graph, InitParams,
    Reg, Tensor, TypeTraits,
};

/// Gives the address of a function by its name, null where there is none.
pub(crate) type Lookup<'a> = &'a dyn Fn(&CStr) -> *mut c_void;

type TraitsOf = unsafe extern "C" fn(u32) -> *const TypeTraits;

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Uses the ggml that this binary is linked with. Entry points of this crate
/// call it before anything else, except those of the plug-in.
pub(crate) fn link() {
    FUNCTIONS.get_or_init(Functions::linked);
}

/// Uses the ggml whose functions `lookup` finds.
///
/// # Errors
/// The name of the first function that is missing.
pub(crate) fn find(lookup: Lookup) -> Result<(), &'static str> {
    let found = Functions::found(lookup)?;
    FUNCTIONS.get_or_init(|| found);
    Ok(())
}

fn functions() -> &'static Functions {
    FUNCTIONS.get().expect("every entry point of this crate calls `link` or `find` first")
}

/// Kernels for the products of single rows with weights of a type; `None`
/// where ggml's CPU library does not let us see them.
pub(crate) fn type_traits(type_: u32) -> Option<&'static TypeTraits> {
    // SAFETY: ggml has constant traits for each of its types.
    functions().type_traits.and_then(|of| unsafe { of(type_).as_ref() })
}

/// Declares functions of ggml once for both ways to find them.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)?;)*) => {
        mod linked {
            use super::*;
            extern "C" {
                $(pub fn $name($($arg: $type),*) $(-> $out)?;)*
                pub fn ggml_get_type_traits_cpu(type_: u32) -> *const TypeTraits;
            }
        }

        struct Functions {
            type_traits: Option<TraitsOf>,
            $($name: unsafe extern "C" fn($($type),*) $(-> $out)?,)*
        }

        impl Functions {
            fn linked() -> Self {
                Self {
                    type_traits: Some(linked::ggml_get_type_traits_cpu),
                    $($name: linked::$name,)*
                }
            }

            fn found(lookup: Lookup) -> Result<Self, &'static str> {
                // SAFETY: ggml's functions have these types under these names
                // in the version that `ffi::check` asks for, and a null is
                // exactly the `None` of an optional function.
                unsafe {
                    Ok(Self {
                        type_traits: std::mem::transmute::<*mut c_void, Option<TraitsOf>>(
                            lookup(c"ggml_get_type_traits_cpu"),
                        ),
                        $($name: std::mem::transmute::<
                            *mut c_void,
                            Option<unsafe extern "C" fn($($type),*) $(-> $out)?>,
                        >(lookup(name(concat!(stringify!($name), "\0"))))
                        .ok_or(stringify!($name))?,)*
                    })
                }
            }
        }

        $(pub(crate) unsafe fn $name($($arg: $type),*) $(-> $out)? {
            // SAFETY: by the caller's promise.
            unsafe { (functions().$name)($($arg),*) }
        })*
    };
}

/// A name with its terminator as a C string.
fn name(terminated: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(terminated.as_bytes()).unwrap_or(c"")
}

functions! {
    fn ggml_op_name(op: u32) -> *const c_char;
    fn ggml_type_name(type_: u32) -> *const c_char;
    fn ggml_tensor_overhead() -> usize;
    fn ggml_nbytes(tensor: *const Tensor) -> usize;
    fn ggml_init(params: InitParams) -> *mut Context;
    fn ggml_free(ctx: *mut Context);
    fn ggml_get_tensor(ctx: *mut Context, name: *const c_char) -> *mut Tensor;
    fn ggml_new_graph_custom(ctx: *mut Context, size: usize, grads: bool) -> *mut Graph;
    fn ggml_graph_overhead_custom(size: usize, grads: bool) -> usize;
    fn ggml_graph_clear(graph: *mut Graph);
    fn ggml_graph_add_node(graph: *mut Graph, tensor: *mut Tensor);
    fn ggml_graph_n_nodes(graph: *mut Graph) -> i32;
    fn ggml_graph_node(graph: *mut Graph, i: i32) -> *mut Tensor;

    fn ggml_backend_register(reg: *mut Reg);
    fn ggml_backend_dev_by_type(type_: u32) -> *mut Device;
    fn ggml_backend_dev_name(device: *mut Device) -> *const c_char;
    fn ggml_backend_dev_backend_reg(device: *mut Device) -> *mut Reg;
    fn ggml_backend_reg_get_proc_address(reg: *mut Reg, name: *const c_char) -> *mut c_void;
    fn ggml_backend_init_by_type(type_: u32, params: *const c_char) -> *mut Backend;
    fn ggml_backend_free(backend: *mut Backend);
    fn ggml_backend_graph_compute(backend: *mut Backend, graph: *mut Graph) -> i32;
    fn ggml_backend_buft_is_host(buft: *mut BufferType) -> bool;
    fn ggml_backend_buffer_init(
        buft: *mut BufferType,
        iface: BufferI,
        context: *mut c_void,
        size: usize,
    ) -> *mut Buffer;
    fn ggml_backend_tensor_alloc(
        buffer: *mut Buffer,
        tensor: *mut Tensor,
        addr: *mut c_void,
    ) -> i32;

    fn gguf_init_from_file(path: *const c_char, params: GgufInitParams) -> *mut Gguf;
    fn gguf_free(gguf: *mut Gguf);
    fn gguf_get_data_offset(gguf: *const Gguf) -> usize;
    fn gguf_get_n_tensors(gguf: *const Gguf) -> i64;
    fn gguf_get_tensor_name(gguf: *const Gguf, i: i64) -> *const c_char;
    fn gguf_get_tensor_offset(gguf: *const Gguf, i: i64) -> usize;
    fn gguf_get_tensor_size(gguf: *const Gguf, i: i64) -> usize;
    fn gguf_find_key(gguf: *const Gguf, key: *const c_char) -> i64;
    fn gguf_get_kv_type(gguf: *const Gguf, key: i64) -> u32;
    fn gguf_get_arr_type(gguf: *const Gguf, key: i64) -> u32;
    fn gguf_get_arr_n(gguf: *const Gguf, key: i64) -> usize;
    fn gguf_get_arr_data(gguf: *const Gguf, key: i64) -> *const c_void;
    fn gguf_get_val_u16(gguf: *const Gguf, key: i64) -> u16;
    fn gguf_get_val_u32(gguf: *const Gguf, key: i64) -> u32;
    fn gguf_get_val_i32(gguf: *const Gguf, key: i64) -> i32;
    fn gguf_get_val_str(gguf: *const Gguf, key: i64) -> *const c_char;
}
