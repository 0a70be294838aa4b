//! AVX2 with FMA, and AVX-512 with VNNI: the loops that all types share, and
//! the choice of kernels.
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
mod rows;
mod small;
mod tile;

use isa::{Avx2, Avx512, Isa};

use super::{Kernel, Run, WeightType};

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
    let (vec_dot, tiled): (Run, Option<Run>) = match type_ {
        WeightType::Q4_0 => (rows::all::<I, small::Q4_0, 4, 2>, None),
        WeightType::Q8_0 => (rows::all::<I, small::Q8_0, 4, 1>, None),
        WeightType::Mxfp4 => (rows::all::<I, small::Mxfp4, 4, 4>, None),
        WeightType::Q4K => (rows::all::<I, k_mins::Q4K, 2, 1>, Some(I::tiles::<k_mins::Q4K>)),
        WeightType::Q5K => (rows::all::<I, k_mins::Q5K, 2, 1>, Some(I::tiles::<k_mins::Q5K>)),
        WeightType::Q6K => (rows::all::<I, q6_k::Q6K, 2, 1>, Some(I::tiles::<q6_k::Q6K>)),
        WeightType::Iq4Xs => (rows::all::<I, iq4_xs::Iq4Xs, 2, 1>, Some(I::tiles::<iq4_xs::Iq4Xs>)),
    };
    Kernel { type_, path: I::NAME, vec_dot, tiled }
}
