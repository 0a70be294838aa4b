//! Choosing the next token from the logits.

use crate::{Context, HostError, Model, Token};
use llama_cpp_sys_2 as sys;
use std::ptr::NonNull;

/// Sampling options; the defaults are those of llama.cpp's programs.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerOptions {
    /// Temperature; 0 or less takes the most likely token.
    pub temp: f32,
    /// Keep the k most likely tokens; 0 or less keeps all.
    pub top_k: i32,
    /// Keep the most likely tokens that together have this probability.
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the most likely one.
    pub min_p: f32,
    /// Divide the logits of recent tokens by this; 1 changes nothing.
    pub repeat_penalty: f32,
    /// How many tokens count as recent.
    pub repeat_last_n: i32,
    /// Seed; [`u32::MAX`] draws one.
    pub seed: u32,
    /// Never choose a token that ends the answer.
    pub ignore_eog: bool,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        SamplerOptions {
            temp: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            seed: u32::MAX,
            ignore_eog: false,
        }
    }
}

/// A chain of llama.cpp's samplers, in the order of its programs: penalties,
/// top-k, top-p, min-p, temperature, draw.
#[derive(Debug)]
pub struct Sampler {
    chain: NonNull<sys::llama_sampler>,
}

// SAFETY: a sampler is plain memory without ties to a thread.
unsafe impl Send for Sampler {}

impl Drop for Sampler {
    fn drop(&mut self) {
        // SAFETY: the chain is ours, and it owns the samplers added to it.
        unsafe { sys::llama_sampler_free(self.chain.as_ptr()) }
    }
}

impl Sampler {
    /// Builds the chain.
    ///
    /// # Errors
    /// [`HostError::Sampler`] for a value that is not a number, or a repeat
    /// penalty of 0 or less.
    pub fn new(model: &Model, o: &SamplerOptions) -> Result<Sampler, HostError> {
        let error = |reason: &str| HostError::Sampler { reason: reason.to_owned() };
        if ![o.temp, o.top_p, o.min_p, o.repeat_penalty].iter().all(|v| v.is_finite()) {
            return Err(error("temperature, top-p, min-p and penalty are numbers"));
        }
        if o.repeat_penalty <= 0.0 {
            return Err(error("the repeat penalty is above 0 (1 changes nothing)"));
        }
        // SAFETY: the parameters are a plain struct; the chain owns every
        // sampler that is added, and all values were checked above.
        unsafe {
            let params = sys::llama_sampler_chain_default_params();
            let chain = NonNull::new(sys::llama_sampler_chain_init(params))
                .ok_or_else(|| error("llama.cpp made no sampler"))?;
            let add = |s| sys::llama_sampler_chain_add(chain.as_ptr(), s);
            if o.ignore_eog {
                let never = never_end(model);
                let n_vocab = model.n_vocab() as i32;
                let n = never.len() as i32;
                // Copies the list.
                add(sys::llama_sampler_init_logit_bias(n_vocab, n, never.as_ptr()));
            }
            if o.repeat_penalty != 1.0 && o.repeat_last_n > 0 {
                add(sys::llama_sampler_init_penalties(
                    model.n_vocab() as i32,
                    o.repeat_last_n,
                    o.repeat_penalty,
                    0.0,
                    0.0,
                ));
            }
            if o.temp <= 0.0 {
                add(sys::llama_sampler_init_greedy());
            } else {
                add(sys::llama_sampler_init_top_k(o.top_k));
                add(sys::llama_sampler_init_top_p(o.top_p, 1));
                add(sys::llama_sampler_init_min_p(o.min_p, 1));
                add(sys::llama_sampler_init_temp(o.temp));
                add(sys::llama_sampler_init_dist(o.seed));
            }
            Ok(Sampler { chain })
        }
    }

    /// Draws a token from the last output of the last decode and remembers it.
    ///
    /// # Panics
    /// If the last decode was asked for no logits, or failed.
    pub fn sample(&mut self, context: &Context) -> Token {
        assert!(context.outputs() > 0, "the last decode produced no logits");
        // SAFETY: both pointers are valid and the last decode has an output.
        unsafe { sys::llama_sampler_sample(self.chain.as_ptr(), context.as_ptr(), -1) }
    }

    /// Remembers a token that was not drawn here (the prompt), for the repeat
    /// penalty.
    pub fn accept(&mut self, token: Token) {
        // SAFETY: the chain is valid; samplers only record the number.
        unsafe { sys::llama_sampler_accept(self.chain.as_ptr(), token) }
    }
}

fn never_end(model: &Model) -> Vec<sys::llama_logit_bias> {
    (0..model.n_vocab() as Token)
        .filter(|&token| model.is_eog(token))
        .map(|token| sys::llama_logit_bias { token, bias: f32::NEG_INFINITY })
        .collect()
}
