//! ggml's own products, and random weights.

#![allow(dead_code)] // tests and the benchmark use their share

use std::ffi::{c_int, c_void, CStr};

use llama_cpp_sys_2 as ggml;
use pinscope_kernels::{kernels_for, Kernel, Order, Product, WeightType};

/// ggml's number of a type.
pub fn number(type_: WeightType) -> u32 {
    // SAFETY: `ggml_type_name` answers null or a constant string.
    let is = |&t: &u32| unsafe {
        let name = ggml::ggml_type_name(t);
        !name.is_null() && CStr::from_ptr(name).to_bytes() == type_.name().as_bytes()
    };
    (0..ggml::GGML_TYPE_COUNT).find(is).expect("ggml knows the type")
}

/// Our kernels that have the bits of the ggml that is linked: on ARM those of
/// two types depend on the instructions that ggml is compiled for.
pub fn kernels(type_: WeightType) -> Vec<Kernel> {
    let mut kernels = kernels_for(type_);
    if cfg!(target_arch = "aarch64") && matches!(type_, WeightType::Q4_0 | WeightType::Q8_0) {
        // SAFETY: these answer constants.
        let theirs = unsafe {
            match (ggml::ggml_cpu_has_sve(), ggml::ggml_cpu_has_dotprod()) {
                (0, 0) => "neon",
                (0, _) => "dotprod",
                _ => "sve",
            }
        };
        kernels.retain(|kernel| kernel.path() == theirs);
    }
    kernels
}

/// xorshift64*: the same numbers everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 33) % n
    }

    /// Uniform in -1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// What quants and scales are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Random bytes, scales of a usual size.
    Usual,
    /// Random bytes, scales from all of the finite half floats.
    AnyScale,
    /// All bits of the quants clear.
    Zeros,
    /// All bits of the quants set.
    Ones,
}

pub const FILLS: [Fill; 4] = [Fill::Usual, Fill::AnyScale, Fill::Zeros, Fill::Ones];

fn half(random: &mut Random, fill: Fill) -> [u8; 2] {
    const ENDS: [u16; 8] = [0, 0x8000, 1, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff];
    let bits = match (fill, random.below(4)) {
        (Fill::AnyScale, 0) => ENDS[random.below(8) as usize],
        (Fill::AnyScale, _) => {
            let bits = random.next() as u16;
            if bits & 0x7c00 == 0x7c00 {
                bits & !0x0400
            } else {
                bits
            }
        }
        _ => 0x2000 + random.below(0x0c00) as u16 + ((random.below(2) as u16) << 15),
    };
    bits.to_le_bytes()
}

/// `rows` rows of `n_in` weights.
pub fn weights(type_: WeightType, n_in: usize, rows: usize, fill: Fill, seed: u64) -> Vec<u8> {
    let mut random = Random(seed | 1);
    let bytes = type_.block_bytes();
    let mut out = vec![0; rows * n_in / type_.block_len() * bytes];
    for block in out.chunks_exact_mut(bytes) {
        for byte in &mut *block {
            *byte = match fill {
                Fill::Zeros => 0,
                Fill::Ones => 0xff,
                _ => random.next() as u8,
            };
        }
        let halves: &[usize] = match type_ {
            WeightType::Q4K | WeightType::Q5K => &[0, 2],
            WeightType::Q6K => &[208],
            WeightType::Mxfp4 => &[],
            _ => &[0],
        };
        for &at in halves {
            block[at..at + 2].copy_from_slice(&half(&mut random, fill));
        }
        if type_ == WeightType::Mxfp4 {
            block[0] = match fill {
                // Powers of two that are no normal numbers, too.
                Fill::AnyScale if random.below(2) == 0 => random.below(4) as u8,
                Fill::AnyScale => random.below(200) as u8,
                _ => 110 + random.below(20) as u8,
            };
        }
    }
    out
}

/// Inputs as ggml quantises them; each column has values of its own size, and
/// some are zero.
pub fn inputs(type_: WeightType, n_in: usize, columns: usize, seed: u64) -> (Vec<f32>, Vec<u8>) {
    let mut random = Random(seed | 1);
    let mut values = Vec::with_capacity(n_in * columns);
    for c in 0..columns {
        let size = [1.0f32, 1e-3, 300.0, 0.0][if c == 5 { 3 } else { c % 3 }];
        values.extend((0..n_in).map(|_| match random.below(50) {
            0 => size * 4.0,
            1 => -size * 4.0,
            _ => random.float() * size,
        }));
    }
    let bytes = n_in / type_.block_len() * type_.input_block_bytes();
    let mut out = vec![0; bytes * columns];
    // SAFETY: ggml's traits are constant; lengths are as they should be.
    unsafe {
        ggml::ggml_cpu_init();
        let of = (*ggml::ggml_get_type_traits_cpu(number(type_))).vec_dot_type;
        let from_float = (*ggml::ggml_get_type_traits_cpu(of)).from_float.unwrap();
        for (x, q) in values.chunks_exact(n_in).zip(out.chunks_exact_mut(bytes)) {
            from_float(x.as_ptr(), q.as_mut_ptr().cast(), n_in as i64);
        }
    }
    (values, out)
}

/// Everything of one test: a matrix and quantised columns.
pub struct Case {
    pub type_: WeightType,
    pub n_in: usize,
    pub rows: usize,
    pub weights: Vec<u8>,
    pub values: Vec<f32>,
    pub inputs: Vec<u8>,
    pub columns: usize,
}

impl Case {
    pub fn new(
        type_: WeightType,
        n_in: usize,
        rows: usize,
        columns: usize,
        fill: Fill,
        seed: u64,
    ) -> Self {
        let weights = weights(type_, n_in, rows, fill, seed);
        let (values, inputs) = inputs(type_, n_in, columns, seed ^ 0xabcdef);
        Self { type_, n_in, rows, weights, values, inputs, columns }
    }

    pub fn row_bytes(&self) -> usize {
        self.n_in / self.type_.block_len() * self.type_.block_bytes()
    }

    pub fn column(&self, c: usize) -> *const u8 {
        let bytes = self.n_in / self.type_.block_len() * self.type_.input_block_bytes();
        self.inputs[c * bytes..].as_ptr()
    }

    /// Our results, column by column; rows that are not asked for are NaN.
    pub fn ours(&self, kernel: &Kernel, order: Order, rows: std::ops::Range<usize>) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.rows * self.columns];
        let columns: Vec<_> = (0..self.columns).map(|c| self.column(c)).collect();
        let outs: Vec<_> = out.chunks_exact_mut(self.rows).map(|c| c.as_mut_ptr()).collect();
        // SAFETY: all lengths fit.
        unsafe {
            kernel.multiply(
                order,
                &Product {
                    n_in: self.n_in,
                    weights: self.weights.as_ptr(),
                    row_bytes: self.row_bytes(),
                    rows,
                    columns: &columns,
                    out: &outs,
                },
            );
        }
        out
    }

    /// Results of ggml's `vec_dot`.
    pub fn vec_dot(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.columns];
        // SAFETY: ggml's traits are constant; all lengths fit.
        unsafe {
            let dot = (*ggml::ggml_get_type_traits_cpu(number(self.type_))).vec_dot.unwrap();
            for (c, out) in out.chunks_exact_mut(self.rows).enumerate() {
                for (row, out) in out.iter_mut().enumerate() {
                    let w = self.weights[row * self.row_bytes()..].as_ptr();
                    let (n, x) = (self.n_in as c_int, self.column(c));
                    dot(n, out, 0, w.cast(), 0, x.cast(), 0, 1);
                }
            }
        }
        out
    }

    /// Results of ggml's MUL_MAT_ID with this matrix as the only expert.
    pub fn mul_mat_id(&self, threads: i32) -> Vec<f32> {
        let mut out = vec![0.0f32; self.rows * self.columns];
        let (n, rows, columns) = (self.n_in as i64, self.rows as i64, self.columns as i64);
        let ids = vec![0i32; self.columns];
        // SAFETY: tensors get memory that outlives the computation.
        unsafe {
            let params = ggml::ggml_init_params {
                mem_size: 1 << 20,
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            };
            let ctx = ggml::ggml_init(params);
            let a = ggml::ggml_new_tensor_3d(ctx, number(self.type_), n, rows, 1);
            let b = ggml::ggml_new_tensor_3d(ctx, ggml::GGML_TYPE_F32, n, 1, columns);
            let i = ggml::ggml_new_tensor_2d(ctx, ggml::GGML_TYPE_I32, 1, columns);
            (*a).data = self.weights.as_ptr().cast_mut().cast::<c_void>();
            (*b).data = self.values.as_ptr().cast_mut().cast();
            (*i).data = ids.as_ptr().cast_mut().cast();
            let product = ggml::ggml_mul_mat_id(ctx, a, b, i);
            (*product).data = out.as_mut_ptr().cast();
            let graph = ggml::ggml_new_graph(ctx);
            ggml::ggml_build_forward_expand(graph, product);
            let cpu = ggml::ggml_backend_cpu_init();
            ggml::ggml_backend_cpu_set_n_threads(cpu, threads);
            assert_eq!(ggml::ggml_backend_graph_compute(cpu, graph), ggml::GGML_STATUS_SUCCESS);
            ggml::ggml_backend_free(cpu);
            ggml::ggml_free(ctx);
        }
        out
    }
}

/// Fails unless all bits are equal. One NaN is as good as another.
pub fn same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
        assert!(same, "{what}: place {i} is {g:e} instead of {w:e}");
    }
}
