//! The products of one token: each expert has one column.
//!
//! ggml's own operation for this costs a few barriers and a re-quantised input
//! for every expert and part, which is a fortieth of a token's time when a
//! layer's experts lie scattered in the arena. Here all experts of a group are
//! one node, and memory is asked for a few rows ahead. It calls the same `vec_dot` of ggml on the same quantised input
//! for each row, as `ggml_compute_forward_mul_mat_id` does for fewer than
//! eight columns, so the bits are the same.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::ffi::{self, Tensor, TypeTraits};

/// Rows that a thread takes at a time: few enough that threads finish
/// together, enough that taking them costs nothing.
const CHUNK: usize = 64;

/// Rows ahead of the one in work whose bytes are asked for. The processor's
/// own prefetcher stops at each page, a few rows on: asking early gave 1.2 to
/// 1.3 times the bandwidth (Q4_K, 2 x Zen 3, 3 rows; 2 to 6 were alike).
const ROWS_AHEAD: usize = 3;

/// Asks for the cache lines of a row; the address may be anything.
#[inline]
fn prefetch(row: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: a prefetch reads nothing and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (row, bytes);
}

/// What the product of one column needs.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// The expert's matrix.
    pub weights: *const u8,
    /// Its input, F32.
    pub input: *const f32,
    /// Room for the quantised input; equal addresses mean equal inputs.
    pub quantised: *mut u8,
    /// Its result, F32.
    pub out: *mut f32,
}

/// ggml's functions for weights of one type.
#[derive(Clone, Copy)]
pub struct Kernels {
    traits: &'static TypeTraits,
    /// Brings the input into the form that the product takes; `None` for F32.
    from_float: Option<ffi::FromFloat>,
}

/// The kernels for weights of `type_`; `None` where ggml's CPU library hides
/// them from us, and products must be ggml's own nodes.
pub fn kernels(type_: u32) -> Option<Kernels> {
    let traits = ffi::type_traits(type_)?;
    let from_float = ffi::type_traits(traits.vec_dot_type)?.from_float;
    Some(Kernels { traits, from_float })
}

/// The products of one part for all columns of a group.
pub struct Products {
    traits: &'static TypeTraits,
    from_float: Option<ffi::FromFloat>,
    n_in: usize,
    n_out: usize,
    row_bytes: usize,
    columns: Vec<Column>,
    next: AtomicUsize,
}

/// Bytes that a quantised input of `n` values takes at most, whatever the
/// type: none is wider than F32 and a scale a block.
pub fn quantised_bytes(n: usize) -> usize {
    n * 4 + 64
}

impl Products {
    /// Products with `weights` (one expert's matrix as a template for all),
    /// computed with `kernels`.
    pub fn new(weights: &Tensor, kernels: Kernels, mut columns: Vec<Column>) -> Self {
        let Kernels { traits, from_float } = kernels;
        if from_float.is_none() {
            // F32 weights take the input as it is.
            columns.iter_mut().for_each(|c| c.quantised = c.input.cast_mut().cast());
        }
        Self {
            traits,
            from_float,
            n_in: weights.ne[0] as usize,
            n_out: weights.ne[1] as usize,
            row_bytes: weights.nb[1],
            columns,
            next: AtomicUsize::new(0),
        }
    }

    /// Quantises the inputs of columns `first`, `first + step` and so on;
    /// columns that share an input after the first of them are left out.
    ///
    /// # Safety
    /// Inputs and rooms are valid, and nobody else uses the rooms of these
    /// columns now.
    pub unsafe fn quantise(&self, first: usize, step: usize) {
        let Some(from_float) = self.from_float else { return };
        for i in (first..self.columns.len()).step_by(step) {
            let c = self.columns[i];
            if i == 0 || self.columns[i - 1].quantised != c.quantised {
                // SAFETY: by the caller's promise; the room holds any type.
                unsafe { from_float(c.input, c.quantised.cast(), self.n_in as i64) };
            }
        }
    }

    /// Computes rows until none is left. Any number of threads may do so at once.
    ///
    /// # Safety
    /// All inputs are quantised; weights and results are valid.
    unsafe fn run(&self) {
        let chunks = self.n_out.div_ceil(CHUNK);
        loop {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(c) = self.columns.get(chunk / chunks) else { return };
            let first = chunk % chunks * CHUNK;
            for row in first..(first + CHUNK).min(self.n_out) {
                let weights = c.weights.wrapping_add(row * self.row_bytes);
                prefetch(weights.wrapping_add(ROWS_AHEAD * self.row_bytes), self.row_bytes);
                // SAFETY: by the caller's promise; each row is taken once.
                unsafe {
                    (self.traits.vec_dot)(
                        self.n_in as i32,
                        c.out.add(row),
                        0,
                        weights.cast(),
                        0,
                        c.quantised.cast(),
                        0,
                        1,
                    );
                }
            }
        }
    }
}

/// ggml's callback for a node that computes [`Products`].
unsafe extern "C" fn run_node(_: *mut Tensor, _ith: i32, _nth: i32, products: *mut c_void) {
    // SAFETY: `node` was given the products, which outlive the graph.
    unsafe { (*products.cast::<Products>()).run() }
}

/// ggml's callback for a node that quantises the inputs of [`Products`].
unsafe extern "C" fn quantise_node(_: *mut Tensor, ith: i32, nth: i32, products: *mut c_void) {
    // SAFETY: as above; threads take different columns.
    unsafe { (*products.cast::<Products>()).quantise(ith as usize, nth as usize) }
}

/// The layout of ggml's `struct ggml_custom_op_params`.
#[repr(C)]
struct CustomParams {
    function: unsafe extern "C" fn(*mut Tensor, i32, i32, *mut c_void),
    n_tasks: i32,
    data: *mut c_void,
}

/// `GGML_N_TASKS_MAX`: as many as there are threads.
const ALL_THREADS: i32 = -1;

/// What a node of this module does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Quantise the inputs, which earlier nodes compute.
    Quantise,
    /// Multiply.
    Multiply,
}

/// Operation parameters of a node that does `work` on `products`.
pub fn params(work: Work, products: *mut Products) -> [i32; 16] {
    let function = match work {
        Work::Quantise => quantise_node,
        Work::Multiply => run_node,
    };
    let params = CustomParams { function, n_tasks: ALL_THREADS, data: products.cast() };
    let mut out = [0; 16];
    // SAFETY: plain bytes, and 24 of them fit in 64.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(&params).cast::<u8>(),
            out.as_mut_ptr().cast::<u8>(),
            std::mem::size_of::<CustomParams>(),
        );
    }
    out
}
