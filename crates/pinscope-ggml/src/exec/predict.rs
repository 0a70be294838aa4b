//! Which experts the next layer will choose: its router, applied to the input
//! of this layer's experts.
//!
//! Layers change the residual stream little, so the next router mostly sees
//! what it will see in truth; Fate (arXiv 2502.12224) prefetches by this. It
//! needs no training, and costs a product with the router's matrix.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use pinscope::map::{ExpertMap, LayerExperts};

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

    fn of(&self, index: usize) -> Router {
        let routers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        routers.get(&index).copied().unwrap_or_default()
    }
}

/// Ranks experts by routers that were quantised to eight bits: a guess needs no
/// more, and the routers of a large model are tens of megabytes that would have
/// to be read a token.
#[derive(Default)]
pub(crate) struct Predictor {
    layers: Vec<Option<Quantised>>,
    input: Vec<u8>,
    scores: Vec<(f32, u32)>,
    ranked: Vec<u32>,
}

/// A layer's router with rows in the form of `vec_dot`.
struct Quantised {
    router: Router,
    rows: Vec<u8>,
    row_bytes: usize,
}

/// RAM that quantised routers take, bytes.
pub(crate) fn bytes(map: &ExpertMap) -> u64 {
    let of = |l: &LayerExperts| {
        let n_embd = l.parts.first().map_or(0, |p| p.ne[0]);
        u64::from(l.experts) * row_bytes(n_embd as usize) as u64
    };
    map.layers().iter().map(of).sum()
}

/// Values of a Q8_0 block, and its bytes.
const BLOCK: (usize, usize) = (32, 34);

fn row_bytes(n_embd: usize) -> usize {
    n_embd.div_ceil(BLOCK.0) * BLOCK.1
}

impl Predictor {
    /// The `k` experts that the router of layer `index` (`blk.N`) ranks
    /// highest for `input`, best first; empty where that cannot be said.
    ///
    /// # Safety
    /// The model's dense weights are in memory, those of one model always.
    pub unsafe fn rank(
        &mut self,
        numbers: &Numbers,
        routers: &Routers,
        index: usize,
        k: usize,
        input: &[f32],
    ) -> &[u32] {
        self.ranked.clear();
        if self.layers.len() <= index {
            self.layers.resize_with(index + 1, || None);
        }
        let Some(q8) = ffi::type_traits(numbers.q8_0) else { return &[] };
        let Some(quantise) = q8.from_float.filter(|_| input.len().is_multiple_of(BLOCK.0)) else {
            return &[];
        };
        let layer = self.layers[index].get_or_insert_with(|| {
            let router = routers.of(index);
            let row_bytes = row_bytes(router.n_embd);
            let mut rows = vec![0; row_bytes * router.experts];
            for (e, row) in rows.chunks_exact_mut(row_bytes.max(1)).enumerate() {
                // SAFETY: the matrix has a row of `n_embd` values for each
                // expert, and the row's room is that of as many in Q8_0.
                unsafe {
                    let from = (router.weights as *const f32).add(e * router.n_embd);
                    quantise(from, row.as_mut_ptr().cast(), router.n_embd as i64);
                }
            }
            Quantised { router, rows, row_bytes }
        });
        let router = layer.router;
        if router.weights == 0 || router.n_embd != input.len() {
            return &[];
        }
        self.input.resize(layer.row_bytes, 0);
        // SAFETY: the room is that of as many values in Q8_0.
        unsafe {
            quantise(input.as_ptr(), self.input.as_mut_ptr().cast(), input.len() as i64);
        }
        let value = |of: usize, e: usize| match of {
            0 => 0.0,
            // SAFETY: a bias has one value for each expert.
            _ => unsafe { *(of as *const f32).add(e) },
        };
        self.scores.clear();
        for (e, row) in layer.rows.chunks_exact(layer.row_bytes).enumerate() {
            let mut logit = 0f32;
            // SAFETY: row and input have `n_embd` values in Q8_0.
            unsafe {
                let (row, input) = (row.as_ptr().cast(), self.input.as_ptr().cast());
                (q8.vec_dot)(router.n_embd as i32, &mut logit, 0, row, 0, input, 0, 1);
            }
            logit += value(router.bias, e);
            let score = match router.probs_bias {
                0 => logit,
                b => 1.0 / (1.0 + (-logit).exp()) + value(b, e),
            };
            self.scores.push((score, e as u32));
        }
        self.scores.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        self.ranked.extend(self.scores.iter().take(k).map(|&(_, e)| e));
        &self.ranked
    }
}
