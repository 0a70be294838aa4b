//! NEON, with dot products (ARMv8.2) where the processor has them.
//!
//! In ggml's kernels for ARM, blocks of 256 and MXFP4 sum up integers and then
//! add one float a block, so every way to form the integers gives ggml's bits,
//! SVE and ggml's path for i8mm included: MUL_MAT_ID takes one row and one
//! column at a time there, too. Q4_0 and Q8_0 keep four floats side by side,
//! and which products meet in a lane depends on how ggml was compiled:
//! llama-cpp-sys-2 gives `-march=armv8-a`, without dot products, unless Rust
//! is told `target-cpu=native`. So both kernels of these are offered; the
//! caller takes the one that agrees. With SVE, neither does.
//!
//! Where C leaves open whether `a * b + c` rounds once, it is done as GCC does.
//!
//! Safety, for all unsafe functions below: they run on a processor that
//! [`kernels_for`] has looked at, and get addresses of whole blocks, which is
//! the promise of [`Kernel::multiply`].

mod common;
mod iq4_xs;
mod k_mins;
mod q6_k;
mod small;

use std::arch::is_aarch64_feature_detected;

use super::rows::{self, enabling, Path};
use super::{Kernel, Run, WeightType};
use common::{Dot, Long, Sdot};

/// Rows that are multiplied with several columns at once. With four columns
/// their sums, two rows' weights and the inputs fit in 32 registers.
const ROWS: usize = 2;

/// Kernels that this processor can run.
pub fn kernels_for(type_: WeightType) -> Vec<Kernel> {
    let mut found = Vec::new();
    if is_aarch64_feature_detected!("dotprod") {
        found.push(kernel::<Sdot>(type_));
    }
    if is_aarch64_feature_detected!("neon") {
        found.push(kernel::<Long>(type_));
    }
    found
}

impl Path for Sdot {
    const NAME: &'static str = "dotprod";
    enabling!("neon,dotprod");
}

impl Path for Long {
    const NAME: &'static str = "neon";
    enabling!("neon");
}

fn kernel<P: Path + Dot>(type_: WeightType) -> Kernel {
    let vec_dot: Run = match type_ {
        WeightType::Q4_0 => rows::all::<P, small::Q4_0<P>, ROWS, 1>,
        WeightType::Q8_0 => rows::all::<P, small::Q8_0<P>, ROWS, 1>,
        WeightType::Mxfp4 => rows::all::<P, small::Mxfp4<P>, ROWS, 1>,
        WeightType::Q4K => rows::all::<P, k_mins::Q4K<P>, ROWS, 1>,
        WeightType::Q5K => rows::all::<P, k_mins::Q5K<P>, ROWS, 1>,
        WeightType::Q6K => rows::all::<P, q6_k::Q6K<P>, ROWS, 1>,
        WeightType::Iq4Xs => rows::all::<P, iq4_xs::Iq4Xs<P>, ROWS, 1>,
    };
    Kernel { type_, path: P::NAME, vec_dot, tiled: None }
}
