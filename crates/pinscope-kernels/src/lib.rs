//! Products of expert weights as they lie in a GGUF file with inputs that ggml
//! quantised, several rows or columns at a time.
//!
//! The bits are ggml's: sums of integers are exact, so they may be formed in
//! any order, and floating-point numbers are added in the order in which ggml
//! adds them (see [`Order`]). What is saved is everything around: inputs and
//! scales are loaded once for a few rows, weights unpacked once for a few
//! columns, and memory is asked for ahead.
//!
//! Why `std::arch`: `std::simd` is not stable, and pulp and gemm (looked at in
//! 2026) have no integer dot products, on which all of this rests; ggml's own
//! `vec_dot` unpacks a row anew for each column.

#[cfg(target_arch = "aarch64")]
mod arm;
mod blocks;
mod prefetch;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod rows;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

pub use prefetch::prefetch;

/// Types of weights that have kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum WeightType {
    Q4_0,
    Q8_0,
    Mxfp4,
    Q4K,
    Q5K,
    Q6K,
    Iq4Xs,
}

impl WeightType {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Q4K, Self::Q5K, Self::Q6K, Self::Iq4Xs, Self::Q8_0, Self::Q4_0, Self::Mxfp4];

    /// ggml's name of the type, as `ggml_type_name` gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "q4_0",
            Self::Q8_0 => "q8_0",
            Self::Mxfp4 => "mxfp4",
            Self::Q4K => "q4_K",
            Self::Q5K => "q5_K",
            Self::Q6K => "q6_K",
            Self::Iq4Xs => "iq4_xs",
        }
    }

    /// The type of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.name() == name)
    }

    /// Weights in a block; a row holds whole blocks.
    pub fn block_len(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q8_0 | Self::Mxfp4 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 => size_of::<blocks::Q4_0>(),
            Self::Q8_0 => size_of::<blocks::Q8_0>(),
            Self::Mxfp4 => size_of::<blocks::Mxfp4>(),
            Self::Q4K => size_of::<blocks::Q4K>(),
            Self::Q5K => size_of::<blocks::Q5K>(),
            Self::Q6K => size_of::<blocks::Q6K>(),
            Self::Iq4Xs => size_of::<blocks::Iq4Xs>(),
        }
    }

    /// Bytes of a quantised input that belong to one block of weights: a
    /// block of ggml's type `q8_0` or `q8_K`.
    pub fn input_block_bytes(self) -> usize {
        match self.block_len() {
            32 => size_of::<blocks::Q8_0>(),
            _ => size_of::<blocks::Q8K>(),
        }
    }
}

/// In which order floating-point numbers are added, that is whose bits come out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// ggml's `vec_dot` of the type: eight sums side by side through a row.
    VecDot,
    /// ggml's tiled product, which it takes for eight columns and more of the
    /// types with blocks of 256: one sum, to which blocks are added.
    Tiled,
}

/// One matrix times some columns.
#[derive(Debug, Clone)]
pub struct Product<'a> {
    /// Weights in a row; whole blocks.
    pub n_in: usize,
    /// The matrix's first row.
    pub weights: *const u8,
    /// Bytes from a row to the next.
    pub row_bytes: usize,
    /// Rows to compute.
    pub rows: Range<usize>,
    /// Quantised inputs, as ggml's `from_float` of the type's `vec_dot_type`
    /// makes them.
    pub columns: &'a [*const u8],
    /// Result of each column, F32; row `r` is written to place `r`.
    pub out: &'a [*mut f32],
}

type Run = unsafe fn(&Product);

/// The kernels for one type of weights on this processor.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    type_: WeightType,
    path: &'static str,
    vec_dot: Run,
    tiled: Option<Run>,
}

impl Kernel {
    /// The type of the weights.
    pub fn weight_type(&self) -> WeightType {
        self.type_
    }

    /// The instruction set in use.
    pub fn path(&self) -> &'static str {
        self.path
    }

    /// Whether there is a kernel with this order.
    pub fn has(&self, order: Order) -> bool {
        order == Order::VecDot || self.tiled.is_some()
    }

    /// Computes `product`. An order that [`Kernel::has`] denies is computed
    /// as [`Order::VecDot`].
    ///
    /// # Safety
    /// Rows, columns and results are valid and as long as the product says;
    /// rows lie where the type's blocks may lie (two bytes' alignment); nobody
    /// else uses the results' rows.
    pub unsafe fn multiply(&self, order: Order, product: &Product) {
        debug_assert!(product.n_in.is_multiple_of(self.type_.block_len()));
        debug_assert_eq!(product.columns.len(), product.out.len());
        let run = match order {
            Order::VecDot => self.vec_dot,
            Order::Tiled => self.tiled.unwrap_or(self.vec_dot),
        };
        // SAFETY: by the caller's promise; the path fits the processor.
        unsafe { run(product) }
    }
}

/// The best kernel for weights of `type_` on this processor; `None` where
/// ggml should do it.
pub fn kernel_for(type_: WeightType) -> Option<Kernel> {
    kernels_for(type_).into_iter().next()
}

/// All kernels for weights of `type_` that run here, the best first.
pub fn kernels_for(type_: WeightType) -> Vec<Kernel> {
    #[cfg(target_arch = "x86_64")]
    return x86::kernels_for(type_);
    #[cfg(target_arch = "aarch64")]
    return arm::kernels_for(type_);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = type_;
        Vec::new()
    }
}
