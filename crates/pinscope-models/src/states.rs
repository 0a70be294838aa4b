//! Running a model over a text and keeping what its layers saw.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use pinscope_host::{Context, ContextOptions, Logits, Model, TensorObserver, TensorView, Token};

use crate::error::Error;

/// Tokens computed at once.
const BATCH: usize = 128;

/// Values that one graph node produced, layer by layer, in token order.
pub type ByLayer<T> = BTreeMap<u32, T>;

/// Splits `ffn_norm-12` into name and layer.
pub fn layer_node(name: &str) -> Option<(&str, u32)> {
    let (base, layer) = name.rsplit_once('-')?;
    Some((base, layer.parse().ok()?))
}

struct Watch<F> {
    nodes: &'static [&'static str],
    see: Rc<RefCell<F>>,
}

impl<F: FnMut(&str, u32, &TensorView)> TensorObserver for Watch<F> {
    fn wants(&mut self, name: &str) -> bool {
        layer_node(name).is_some_and(|(base, _)| self.nodes.contains(&base))
    }

    fn observe(&mut self, name: &str, tensor: &TensorView) {
        if let Some((base, layer)) = layer_node(name) {
            (self.see.borrow_mut())(base, layer, tensor);
        }
    }
}

/// Decodes `tokens` in windows of `window` tokens, each with an empty context before it,
/// and calls `see(node, layer, values)` for each of the `nodes` in every batch.
///
/// # Errors
/// When llama.cpp cannot make the context or compute.
pub fn run_over<F: FnMut(&str, u32, &TensorView) + 'static>(
    model: &Model,
    tokens: &[Token],
    window: usize,
    nodes: &'static [&'static str],
    see: Rc<RefCell<F>>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Error> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let mut context = Context::new(
        model,
        ContextOptions {
            n_ctx: window as u32,
            n_batch: BATCH as u32,
            n_ubatch: BATCH as u32,
            threads,
            threads_batch: threads,
            on_tensor: Some(Box::new(Watch { nodes, see })),
            ..ContextOptions::default()
        },
    )?;
    let mut done = 0;
    for text in tokens.chunks(window) {
        context.clear();
        for (index, batch) in text.chunks(BATCH).enumerate() {
            // Without logits the last layer would see only some of the tokens.
            context.decode(batch, (index * BATCH) as u32, Logits::All)?;
            done += batch.len() as u64;
            progress(done, tokens.len() as u64);
        }
    }
    Ok(())
}
