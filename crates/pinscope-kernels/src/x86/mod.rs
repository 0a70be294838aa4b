//! AVX2 with FMA, and AVX-512 with VNNI: the loops of tiles that all types
//! share, and the choice of kernels.
//!
//! Methods of most traits here are inlined into functions that enable the
//! instruction set ([`isa`]); they cannot enable it themselves, since an
//! attribute that does so does not go together with `inline(always)`.
//!
//! Safety, for all unsafe functions below: they run on a processor with AVX2,
//! FMA and F16C, or with all that [`Avx512`] says, which [`kernels_for`] sees
//! to, and get addresses of whole blocks, which is the promise of
//! [`Kernel::multiply`].

mod common;
mod iq4_xs;
mod isa;
mod k_mins;
mod lanes;
mod q6_k;
mod small;
mod tile;

use isa::{Avx2, Avx512, Isa};

use super::rows::{self, Steps};
use super::{Kernel, Run, WeightType};
use tile::Tile;

/// Kernels that this processor can run, the best first.
pub fn kernels_for(type_: WeightType) -> Vec<Kernel> {
    let mut found = Vec::new();
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    if avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
    {
        found.push(kernel::<Avx512>(type_));
    }
    if avx2 {
        found.push(kernel::<Avx2>(type_));
    }
    found
}

fn kernel<I: Isa>(type_: WeightType) -> Kernel {
    // Blocks of 32 need no registers for sums from step to step: four rows. A
    // single column waits for memory with 8 bits, for arithmetic with 4.
    let (vec_dot, tiled): (Run, Option<Run>) = match type_ {
        WeightType::Q4_0 => (rows::all::<I, small::Q4_0<I>, 4, 2>, None),
        WeightType::Q8_0 => (rows::all::<I, small::Q8_0<I>, 4, 1>, None),
        WeightType::Mxfp4 => (rows::all::<I, small::Mxfp4<I>, 4, 4>, None),
        WeightType::Q4K => of_256::<I, k_mins::Q4K<I>>(),
        WeightType::Q5K => of_256::<I, k_mins::Q5K<I>>(),
        WeightType::Q6K => of_256::<I, q6_k::Q6K<I>>(),
        WeightType::Iq4Xs => of_256::<I, iq4_xs::Iq4Xs<I>>(),
    };
    Kernel { type_, path: I::NAME, vec_dot, tiled }
}

/// Both orders of a type with blocks of 256.
fn of_256<I: Isa, T: Steps + Tile>() -> (Run, Option<Run>) {
    (rows::all::<I, T, 2, 1>, Some(I::tiles::<T>))
}
