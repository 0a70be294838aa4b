//! Which experts the next layer will choose: its router, applied to the input
//! of this layer's experts.
//!
//! Layers change the residual stream little, so the next router mostly sees
//! what it will see in truth; Fate (arXiv 2502.12224) prefetches by this. It
//! needs no training, and costs a product with the router's matrix.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::ffi::{self, Numbers, Tensor};

/// Addresses of the model's routers in the buffer of dense weights.
#[derive(Default)]
pub(crate) struct Routers(Mutex<HashMap<usize, Router>>);

/// The router of a layer. Null addresses stand for what the model lacks.
#[derive(Debug, Clone, Copy, Default)]
struct Router {
    /// F32 `[n_embd, experts]`.
    weights: usize,
    n_embd: usize,
    experts: usize,
    /// F32 `[experts]`, added to the logits.
    bias: usize,
    /// F32 `[experts]`, added to the probabilities (DeepSeek).
    probs_bias: usize,
}

impl Routers {
    /// Takes note of a dense tensor that was given its address.
    pub fn note(&self, t: &Tensor, f32: u32) {
        let Some((layer, tensor)) = t.name().strip_prefix("blk.").and_then(|n| n.split_once('.'))
        else {
            return;
        };
        let Some(layer) = layer.parse().ok().filter(|_: &usize| t.type_ == f32) else { return };
        let mut routers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let router: &mut Router = routers.entry(layer).or_default();
        match tensor {
            "ffn_gate_inp.weight" => {
                router.weights = t.data as usize;
                router.n_embd = t.ne[0] as usize;
                router.experts = t.ne[1] as usize;
            }
            "ffn_gate_inp.bias" => router.bias = t.data as usize,
            "exp_probs_b.bias" => router.probs_bias = t.data as usize,
            _ => {}
        }
    }

    /// The `k` experts that the router of layer `index` (`blk.N`) ranks
    /// highest for `input`, best first; empty where that cannot be said.
    ///
    /// # Safety
    /// The model's dense weights are in memory, and `input` has `n_embd`
    /// values.
    pub unsafe fn rank(
        &self,
        numbers: &Numbers,
        index: usize,
        k: usize,
        input: *const f32,
        n_embd: usize,
    ) -> Vec<u32> {
        let router = {
            let routers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            routers.get(&index).copied().unwrap_or_default()
        };
        if router.weights == 0 || router.n_embd != n_embd {
            return Vec::new();
        }
        let Some(traits) = ffi::type_traits(numbers.f32) else { return Vec::new() };
        let value = |of: usize, e: usize| match of {
            0 => 0.0,
            // SAFETY: a bias has one value for each expert.
            _ => unsafe { *(of as *const f32).add(e) },
        };
        let mut scores: Vec<(f32, u32)> = (0..router.experts)
            .map(|e| {
                let mut logit = 0f32;
                // SAFETY: row `e` of the matrix and the input have `n_embd`
                // values.
                unsafe {
                    (traits.vec_dot)(
                        n_embd as i32,
                        &mut logit,
                        0,
                        (router.weights as *const f32).add(e * n_embd).cast(),
                        0,
                        input.cast(),
                        0,
                        1,
                    );
                }
                logit += value(router.bias, e);
                let score = match router.probs_bias {
                    0 => logit,
                    b => 1.0 / (1.0 + (-logit).exp()) + value(b, e),
                };
                (score, e as u32)
            })
            .collect();
        scores.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        scores.truncate(k);
        scores.into_iter().map(|(_, e)| e).collect()
    }
}
