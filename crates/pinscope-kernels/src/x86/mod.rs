//! AVX2 with FMA: the loops that all types share, and the choice of kernels.
//!
//! Methods of the traits here are inlined into functions that enable the
//! instruction set; they cannot enable it themselves, since an attribute that
//! does so does not go together with `inline(always)`.
//!
//! Safety, for all unsafe functions below: they run on a processor with AVX2,
//! FMA and F16C, which [`kernels_for`] sees to, and get addresses of whole
//! blocks, which is the promise of [`Kernel::multiply`].

mod common;
mod iq4_xs;
mod k_mins;
mod q6_k;
mod rows;
mod small;
mod tile;

use super::{Kernel, WeightType};

/// Kernels that this processor can run.
pub fn kernels_for(type_: WeightType) -> Vec<Kernel> {
    let mut found = Vec::new();
    if is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
    {
        found.push(avx2(type_));
    }
    found
}

fn avx2(type_: WeightType) -> Kernel {
    let (vec_dot, tiled): (super::Run, Option<super::Run>) = match type_ {
        WeightType::Q4_0 => (rows::all::<small::Q4_0, 4>, None),
        WeightType::Q8_0 => (rows::all::<small::Q8_0, 4>, None),
        WeightType::Mxfp4 => (rows::all::<small::Mxfp4, 4>, None),
        WeightType::Q4K => (rows::all::<k_mins::Q4K, 2>, Some(tile::run::<k_mins::Q4K>)),
        WeightType::Q5K => (rows::all::<k_mins::Q5K, 2>, Some(tile::run::<k_mins::Q5K>)),
        WeightType::Q6K => (rows::all::<q6_k::Q6K, 2>, Some(tile::run::<q6_k::Q6K>)),
        WeightType::Iq4Xs => (rows::all::<iq4_xs::Iq4Xs, 2>, Some(tile::run::<iq4_xs::Iq4Xs>)),
    };
    Kernel { type_, path: "avx2", vec_dot, tiled }
}
