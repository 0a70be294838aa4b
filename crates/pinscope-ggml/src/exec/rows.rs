//! The products of a group as one node.
//!
//! ggml's own operation for this costs a few barriers and a re-quantised input
//! for every expert and part. Here all experts of a group are one node, inputs
//! are quantised once a layer, and threads take pieces of all experts' rows
//! until none is left.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use pinscope_kernels::Product;

use super::kernels::Kernels;
use crate::ffi::Tensor;

/// Rows that a thread takes at a time at most and at least; kernels like
/// multiples of eight. Pieces shrink towards the end, so that threads finish
/// together.
const MOST: usize = 128;
const LEAST: usize = 16;

/// An expert of a group.
#[derive(Debug, Clone)]
pub struct Expert {
    /// Its matrix.
    pub weights: *const u8,
    /// Its columns in the group.
    pub columns: Range<usize>,
}

/// Inputs that are to be quantised.
pub struct Inputs {
    /// For the type of weights that they are multiplied with.
    pub kernels: Kernels,
    /// Values of an input.
    pub n: usize,
    /// F32 values, and room for the result.
    pub rows: Vec<(*const f32, *mut u8)>,
}

impl Inputs {
    /// Quantises rows `first`, `first + step` and so on.
    ///
    /// # Safety
    /// Inputs and rooms are valid, and nobody else uses the rooms of these
    /// rows now.
    pub unsafe fn quantise(&self, first: usize, step: usize) {
        for &(values, room) in self.rows.iter().skip(first).step_by(step) {
            // SAFETY: by the caller's promise.
            unsafe { self.kernels.quantise(values, room, self.n) };
        }
    }
}

/// What is multiplied with what, and where the results go.
#[derive(Default)]
pub struct Lists {
    /// The experts of the group.
    pub experts: Vec<Expert>,
    /// Quantised input of each column.
    pub inputs: Vec<*const u8>,
    /// Result of each column, F32.
    pub out: Vec<*mut f32>,
}

/// The products of one part for all columns of a group.
pub struct Products {
    type_: u32,
    kernels: Kernels,
    n_in: usize,
    n_out: usize,
    row_bytes: usize,
    lists: Lists,
    next: AtomicUsize,
}

impl Products {
    /// Products with `weights` (one expert's matrix as a template for all).
    pub fn new(weights: &Tensor, kernels: Kernels, lists: Lists) -> Self {
        Self {
            type_: weights.type_,
            kernels,
            n_in: weights.ne[0] as usize,
            n_out: weights.ne[1] as usize,
            row_bytes: weights.nb[1],
            lists,
            next: AtomicUsize::new(0),
        }
    }

    /// Whether products with `weights` can be added: of the same type and shape.
    pub fn take_also(&self, weights: &Tensor) -> bool {
        let shape = (weights.ne[0] as usize, weights.ne[1] as usize, weights.nb[1]);
        self.type_ == weights.type_ && shape == (self.n_in, self.n_out, self.row_bytes)
    }

    /// What is multiplied, while nobody computes it.
    pub fn lists(&mut self) -> &mut Lists {
        &mut self.lists
    }

    /// The lists, empty, for other products.
    pub fn into_lists(self) -> Lists {
        let Lists { mut experts, mut inputs, mut out } = self.lists;
        experts.clear();
        inputs.clear();
        out.clear();
        Lists { experts, inputs, out }
    }

    /// The next piece for one of `threads` threads: an expert, and rows of it.
    fn take(&self, threads: usize) -> Option<(&Expert, Range<usize>)> {
        let all = self.lists.experts.len() * self.n_out;
        let end = |first: usize| {
            let piece = ((all - first) / (2 * threads)).clamp(LEAST, MOST).next_multiple_of(8);
            let expert_end = (first / self.n_out + 1) * self.n_out;
            (first + piece).min(expert_end)
        };
        let taken = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |first| {
            (first < all).then(|| end(first))
        });
        let first = taken.ok()?;
        let expert = &self.lists.experts[first / self.n_out];
        let row = first % self.n_out;
        Some((expert, row..row + end(first) - first))
    }

    /// Computes rows until none is left, as one of `threads` threads.
    ///
    /// # Safety
    /// All inputs are quantised; weights and results are valid.
    unsafe fn run(&self, threads: usize) {
        while let Some((expert, rows)) = self.take(threads) {
            let product = Product {
                n_in: self.n_in,
                weights: expert.weights,
                row_bytes: self.row_bytes,
                rows,
                columns: &self.lists.inputs[expert.columns.clone()],
                out: &self.lists.out[expert.columns.clone()],
            };
            // SAFETY: by the caller's promise; each row is taken once.
            unsafe { self.kernels.multiply(&product) };
        }
    }
}

/// ggml's callback for a node that computes [`Products`].
unsafe extern "C" fn run_node(_: *mut Tensor, _ith: i32, nth: i32, products: *mut c_void) {
    // SAFETY: `params` was given the products, which outlive the graph.
    unsafe { (*products.cast::<Products>()).run(nth as usize) }
}

/// ggml's callback for a node that quantises [`Inputs`].
unsafe extern "C" fn quantise_node(_: *mut Tensor, ith: i32, nth: i32, inputs: *mut c_void) {
    // SAFETY: as above; threads take different rows.
    unsafe { (*inputs.cast::<Inputs>()).quantise(ith as usize, nth as usize) }
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
#[derive(Debug, Clone, Copy)]
pub enum Work {
    /// Quantise inputs, which earlier nodes or graphs compute.
    Quantise(*mut Inputs),
    /// Multiply.
    Multiply(*mut Products),
}

/// Operation parameters of a node that does `work`.
pub fn params(work: Work) -> [i32; 16] {
    let params = match work {
        Work::Quantise(inputs) => {
            CustomParams { function: quantise_node, n_tasks: ALL_THREADS, data: inputs.cast() }
        }
        Work::Multiply(products) => {
            CustomParams { function: run_node, n_tasks: ALL_THREADS, data: products.cast() }
        }
    };
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
