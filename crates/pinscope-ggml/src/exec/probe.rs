//! Small products by ggml, to compare our kernels' bits with.

use pinscope_kernels::{Kernel, Order, Product};

use super::group::blank;
use crate::backend::set_cpu_threads;
use crate::ffi::{self, Numbers};

/// Rows of the product: even, or ggml does not take two at a time where it can, but
/// not a multiple of what kernels take at a time.
const ROWS: usize = 22;

/// Has ggml's CPU backend compute products.
pub struct Prober {
    numbers: Numbers,
    cpu: *mut ffi::Backend,
    context: *mut ffi::Context,
    graph: *mut ffi::Graph,
}

impl Drop for Prober {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once; the graph lives in the context.
        unsafe {
            ffi::ggml_free(self.context);
            ffi::ggml_backend_free(self.cpu);
        }
    }
}

impl Prober {
    /// `None` when memory is out.
    pub fn new(numbers: Numbers) -> Option<Self> {
        // SAFETY: the CPU device exists, `ffi::check` has seen it; the rest
        // are plain allocations.
        unsafe {
            let cpu = ffi::ggml_backend_init_by_type(ffi::DEVICE_TYPE_CPU, std::ptr::null());
            let mem_size = ffi::ggml_graph_overhead_custom(1, false) + 4096;
            let params =
                ffi::InitParams { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true };
            let context = ffi::ggml_init(params);
            if cpu.is_null() || context.is_null() {
                return None;
            }
            // More threads would outlive this.
            set_cpu_threads(cpu, 1);
            let graph = ffi::ggml_new_graph_custom(context, 1, false);
            Some(Self { numbers, cpu, context, graph })
        }
    }

    /// Whether `kernel` gives the bits of ggml's operation, a product of that
    /// many columns with weights of the type.
    pub fn agrees(
        &self,
        op_and_type: (u32, u32),
        kernel: &Kernel,
        order: Order,
        columns: usize,
    ) -> bool {
        // Three blocks: some types take two at a time.
        let n_in = 3 * kernel.weight_type().block_len();
        self.both(op_and_type, kernel, order, (n_in, columns)).is_some_and(|(ours, theirs)| {
            ours.iter().zip(&theirs).all(|(a, b)| a.to_bits() == b.to_bits())
        })
    }

    fn both(
        &self,
        (op, type_): (u32, u32),
        kernel: &Kernel,
        order: Order,
        (n_in, columns): (usize, usize),
    ) -> Option<(Vec<f32>, Vec<f32>)> {
        let of = ffi::type_traits(type_)?;
        let (weights_from, inputs_from) =
            (of.from_float?, ffi::type_traits(of.vec_dot_type)?.from_float?);
        let kind = kernel.weight_type();
        let blocks = n_in / kind.block_len();
        let (row_bytes, column_bytes) =
            (blocks * kind.block_bytes(), blocks * kind.input_block_bytes());

        // A stream of numbers in -1 to 1 that has no short period.
        let mut state = 1u32;
        let mut floats = |n: usize| -> Vec<f32> {
            let next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            };
            std::iter::repeat_with(next).take(n).collect()
        };
        let (plain, inputs) = (floats(n_in * ROWS), floats(n_in * columns));
        let mut weights = vec![0u8; row_bytes * ROWS];
        let mut quantised = vec![0u8; column_bytes * columns];
        let quantise = |from: ffi::FromFloat, x: &[f32], out: &mut [u8], bytes: usize| {
            for (x, out) in x.chunks_exact(n_in).zip(out.chunks_exact_mut(bytes)) {
                // SAFETY: both have a row of `n_in` values.
                unsafe { from(x.as_ptr(), out.as_mut_ptr().cast(), n_in as i64) };
            }
        };
        quantise(weights_from, &plain, &mut weights, row_bytes);
        quantise(inputs_from, &inputs, &mut quantised, column_bytes);

        let mut ours = vec![0f32; ROWS * columns];
        let out: Vec<_> = ours.chunks_exact_mut(ROWS).map(|c| c.as_mut_ptr()).collect();
        let addresses: Vec<_> = quantised.chunks_exact(column_bytes).map(|c| c.as_ptr()).collect();
        let product = Product {
            n_in,
            weights: weights.as_ptr(),
            row_bytes,
            rows: 0..ROWS,
            columns: &addresses,
            out: &out,
        };
        // SAFETY: all lengths fit.
        unsafe { kernel.multiply(order, &product) };

        let mut theirs = vec![0f32; ROWS * columns];
        let mut ids = vec![0i32; columns];
        let n = |n: usize| n as i64;
        let numbers = &self.numbers;
        let a = weights.as_mut_ptr().cast();
        let mut a = blank(type_, [n(n_in), n(ROWS)], [kind.block_bytes(), row_bytes], a);
        let b = inputs.as_ptr().cast_mut().cast();
        let mut b = blank(numbers.f32, [n(n_in), n(columns)], [4, n_in * 4], b);
        let i = ids.as_mut_ptr().cast();
        let mut i = blank(numbers.i32, [n(columns), 1], [4, columns * 4], i);
        let c = theirs.as_mut_ptr().cast();
        let mut c = blank(numbers.f32, [n(ROWS), n(columns)], [4, ROWS * 4], c);
        [a.op, b.op, i.op] = [numbers.none; 3];
        c.op = op;
        c.flags = ffi::TENSOR_FLAG_COMPUTE;
        c.src[..2].copy_from_slice(&[&raw mut a, &raw mut b]);
        if op == numbers.mul_mat_id {
            c.src[2] = &raw mut i;
        }
        // SAFETY: graph, backend, tensors and their memory are alive.
        let status = unsafe {
            ffi::ggml_graph_clear(self.graph);
            ffi::ggml_graph_add_node(self.graph, &raw mut c);
            ffi::ggml_backend_graph_compute(self.cpu, self.graph)
        };
        (status == ffi::STATUS_SUCCESS).then_some((ours, theirs))
    }
}
