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
mod rows;
mod small;

use std::arch::is_aarch64_feature_detected;

use super::{Kernel, Product, Run, WeightType};
use common::{Dot, Long, Sdot};
use rows::Steps;

/// Kernels that this processor can run.
pub fn kernels_for(type_: WeightType) -> Vec<Kernel> {
    let mut found = Vec::new();
    if is_aarch64_feature_detected!("dotprod") {
        found.push(kernel::<Sdot>(type_, "dotprod"));
    }
    if is_aarch64_feature_detected!("neon") {
        found.push(kernel::<Long>(type_, "neon"));
    }
    found
}

/// An instruction set: its products, and code compiled for it.
trait Path: Dot {
    unsafe fn all<S: Steps>(p: &Product);
}

impl Path for Sdot {
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn all<S: Steps>(p: &Product) {
        rows::all::<S>(p);
    }
}

impl Path for Long {
    #[target_feature(enable = "neon")]
    unsafe fn all<S: Steps>(p: &Product) {
        rows::all::<S>(p);
    }
}

fn kernel<P: Path>(type_: WeightType, path: &'static str) -> Kernel {
    let vec_dot: Run = match type_ {
        WeightType::Q4_0 => P::all::<small::Q4_0<P>>,
        WeightType::Q8_0 => P::all::<small::Q8_0<P>>,
        WeightType::Mxfp4 => P::all::<small::Mxfp4<P>>,
        WeightType::Q4K => P::all::<k_mins::Q4K<P>>,
        WeightType::Q5K => P::all::<k_mins::Q5K<P>>,
        WeightType::Q6K => P::all::<q6_k::Q6K<P>>,
        WeightType::Iq4Xs => P::all::<iq4_xs::Iq4Xs<P>>,
    };
    Kernel { type_, path, vec_dot, tiled: None }
}
