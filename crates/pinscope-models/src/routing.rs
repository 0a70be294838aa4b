//! How a model routes a text: the figures that caching and prefetching live on.

use std::cell::RefCell;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use pinscope_host::{Model, ModelOptions, TensorView};
use serde::Serialize;

use crate::error::Error;
use crate::model_file::StoredModel;
use crate::states::{run_over, ByLayer};

/// Window in which distinct experts are counted.
const ACTIVE_WINDOW: usize = 128;

/// Nodes of llama.cpp's graphs: the router's choice, and the state that enters the router
/// under the names that the architectures give it.
const CHOICE: &str = "ffn_moe_topk";
const NODES: [&str; 3] = [CHOICE, "ffn_norm", "attn_post_norm"];

/// Figures of one layer or the mean over several; shares are between 0 and 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Share of a token's experts that the token before it used too.
    pub previous_token_overlap: f64,
    /// Share of choices that fall on the k most popular experts (k experts a token).
    pub top_k_share: f64,
    /// Share of choices that fall on the most popular tenth of the experts.
    pub top_10_percent_share: f64,
    /// The same for a quarter.
    pub top_25_percent_share: f64,
    /// The same for half.
    pub top_50_percent_share: f64,
    /// Share of the next layer's choices that its router makes already from this layer's
    /// input; absent for routers that are not a plain top-k, and for the last layer.
    pub next_layer_accuracy: Option<f64>,
    /// Mean number of distinct experts in 128 consecutive tokens; absent for shorter texts.
    pub active_in_128_tokens: Option<f64>,
}

/// The routing of one text.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The model.
    pub model: PathBuf,
    /// Tokens measured.
    pub tokens: usize,
    /// Experts in a layer.
    pub experts: usize,
    /// Experts that a token uses.
    pub top_k: usize,
    /// Layers with experts.
    pub layers: usize,
    /// Means over the first, middle and last third of those layers.
    pub thirds: Vec<Figures>,
    /// Mean over all of them.
    pub overall: Figures,
}

/// What one layer did: for each token the chosen experts, and the state they were chosen by.
#[derive(Default)]
struct Layer {
    choices: Vec<Vec<usize>>,
    states: Vec<Vec<f32>>,
}

/// A router: for each expert its row, and a bias.
struct Router {
    rows: Vec<Vec<f32>>,
    bias: Vec<f32>,
}

impl Router {
    /// The `k` best experts for a state.
    fn choose(&self, state: &[f32], k: usize) -> HashSet<usize> {
        let dot = |row: &[f32]| row.iter().zip(state).map(|(a, b)| a * b).sum::<f32>();
        let mut scores: Vec<(f32, usize)> = (self.rows.iter().zip(&self.bias).enumerate())
            .map(|(expert, (row, bias))| (dot(row) + bias, expert))
            .collect();
        scores.sort_by(|a, b| b.0.total_cmp(&a.0));
        scores.iter().take(k).map(|(_, expert)| *expert).collect()
    }
}

/// Runs the model over the first `limit` tokens of `text` with plain llama.cpp.
///
/// # Errors
/// When the model cannot be run, has no experts, or the text has fewer than two tokens.
pub fn measure(
    path: &Path,
    text: &str,
    limit: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Report, Error> {
    let model = Model::load(path, ModelOptions::default())?;
    let number = |key: &str| -> Option<usize> {
        let arch = model.meta("general.architecture")?;
        model.meta(&format!("{arch}.{key}"))?.parse().ok()
    };
    let experts = number("expert_count").filter(|n| *n > 0).ok_or_else(|| {
        Error::bad_model(path, "a dense model: it has no experts whose routing could be measured")
    })?;
    let mut tokens = model.tokenize(text, true, false)?;
    tokens.truncate(limit.min(model.n_ctx_train() as usize));
    if tokens.len() < 2 {
        return Err(Error::Usage("the text must have at least two tokens".into()));
    }
    let layers = Rc::new(RefCell::new(ByLayer::<Layer>::new()));
    let seen = Rc::clone(&layers);
    let see = Rc::new(RefCell::new(move |node: &str, layer, values: &TensorView| {
        let mut seen = seen.borrow_mut();
        let layer = seen.entry(layer).or_default();
        let width = values.ne[0] as usize;
        if node == CHOICE {
            let ids = values.i32().unwrap_or_default();
            let choices = ids.chunks(width).map(|c| c.iter().map(|e| *e as usize).collect());
            layer.choices.extend(choices);
        } else {
            let states = values.f32().unwrap_or_default();
            layer.states.extend(states.chunks(width).map(<[f32]>::to_vec));
        }
    }));
    run_over(&model, &tokens, tokens.len(), &NODES, see, progress)?;
    let mut layers = layers.borrow_mut();
    layers.retain(|_, layer| layer.choices.len() == tokens.len());
    let Some(first) = layers.values().next() else {
        return Err(Error::bad_model(path, "no router was seen while it ran"));
    };
    let top_k = first.choices[0].len();
    let routers = routers(path)?;
    let figures: Vec<Figures> = layers
        .iter()
        .map(|(index, layer)| {
            let next = layers.get(&(index + 1)).zip(routers.get(&(index + 1)));
            layer_figures(layer, experts, next)
        })
        .collect();
    let third = |n: usize| figures.len() * n / 3..figures.len() * (n + 1) / 3;
    Ok(Report {
        model: path.to_path_buf(),
        tokens: tokens.len(),
        experts,
        top_k,
        layers: figures.len(),
        thirds: (0..3).map(|n| mean(&figures[third(n)])).collect(),
        overall: mean(&figures),
    })
}

/// The routers that choose simply the k greatest of W x + b.
fn routers(path: &Path) -> Result<ByLayer<Router>, Error> {
    let mut found = ByLayer::new();
    let model = StoredModel::open(path)?;
    for (index, info) in model.tensors.iter().enumerate() {
        let layer = info.name.strip_prefix("blk.");
        let layer = layer.and_then(|n| n.strip_suffix(".ffn_gate_inp.weight"));
        let Some(layer) = layer.and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        if model.position(&format!("blk.{layer}.exp_probs_b.bias")).is_some() {
            continue;
        }
        let weights = model.floats(index)?;
        let rows: Vec<_> = weights.chunks(info.ne[0] as usize).map(<[f32]>::to_vec).collect();
        let bias = match model.position(&format!("blk.{layer}.ffn_gate_inp.bias")) {
            Some(bias) => model.floats(bias)?,
            None => vec![0.0; rows.len()],
        };
        found.insert(layer, Router { rows, bias });
    }
    Ok(found)
}

fn layer_figures(layer: &Layer, experts: usize, next: Option<(&Layer, &Router)>) -> Figures {
    let choices = &layer.choices;
    let k = choices[0].len();
    let total = (choices.len() * k) as f64;
    let shared = choices.windows(2).map(|w| w[1].iter().filter(|e| w[0].contains(e)).count());
    let mut popularity = vec![0usize; experts];
    for expert in choices.iter().flatten() {
        popularity[*expert] += 1;
    }
    popularity.sort_unstable_by(|a, b| b.cmp(a));
    let share = |n: usize| popularity[..n].iter().sum::<usize>() as f64 / total;
    let percent = |p: usize| share((experts * p).div_ceil(100));
    let active = choices.chunks_exact(ACTIVE_WINDOW).map(|window| {
        let distinct: HashSet<_> = window.iter().flatten().collect();
        distinct.len() as f64
    });
    let windows = choices.len() / ACTIVE_WINDOW;
    let accuracy =
        next.filter(|(next, _)| layer.states.len() == next.choices.len()).map(|(next, router)| {
            let hits = layer.states.iter().zip(&next.choices).map(|(state, actual)| {
                let guess = router.choose(state, k);
                actual.iter().filter(|e| guess.contains(e)).count()
            });
            hits.sum::<usize>() as f64 / total
        });
    Figures {
        previous_token_overlap: shared.sum::<usize>() as f64 / (total - k as f64),
        top_k_share: share(k),
        top_10_percent_share: percent(10),
        top_25_percent_share: percent(25),
        top_50_percent_share: percent(50),
        next_layer_accuracy: accuracy,
        active_in_128_tokens: (windows > 0).then(|| active.sum::<f64>() / windows as f64),
    }
}

/// The mean of each figure over the layers that have it.
fn mean(figures: &[Figures]) -> Figures {
    let of = |get: &dyn Fn(&Figures) -> Option<f64>| {
        let values: Vec<f64> = figures.iter().filter_map(get).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let always = |get: fn(&Figures) -> f64| of(&|f| Some(get(f))).unwrap_or_default();
    Figures {
        previous_token_overlap: always(|f| f.previous_token_overlap),
        top_k_share: always(|f| f.top_k_share),
        top_10_percent_share: always(|f| f.top_10_percent_share),
        top_25_percent_share: always(|f| f.top_25_percent_share),
        top_50_percent_share: always(|f| f.top_50_percent_share),
        next_layer_accuracy: of(&|f| f.next_layer_accuracy),
        active_in_128_tokens: of(&|f| f.active_in_128_tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_hand_made_layer() {
        // Four experts, two a token: overlaps 1/2, 0, 1; expert 0 three times, 1 thrice, 2 and 3 once.
        let layer = Layer {
            choices: vec![vec![0, 1], vec![1, 2], vec![0, 3], vec![3, 0]],
            states: Vec::new(),
        };
        let figures = layer_figures(&layer, 4, None);
        assert_eq!(figures.previous_token_overlap, 0.5);
        assert_eq!(figures.top_k_share, 5.0 / 8.0);
        assert_eq!(figures.top_25_percent_share, 3.0 / 8.0);
        assert_eq!(figures.active_in_128_tokens, None);
        assert_eq!(figures.next_layer_accuracy, None);
    }

    #[test]
    fn next_layer_accuracy_counts_hits_of_its_router_on_this_state() {
        let router = Router {
            rows: vec![vec![1.0, 0.0], vec![0.0, 1.0], vec![0.5, 0.5]],
            bias: vec![0.0, 0.0, 0.4],
        };
        // The states choose {0, 2} and {1, 2}.
        let layer =
            Layer { choices: vec![vec![0, 1]; 2], states: vec![vec![3.0, 0.0], vec![0.0, 3.0]] };
        let next = Layer { choices: vec![vec![2, 0], vec![2, 0]], states: Vec::new() };
        let figures = layer_figures(&layer, 3, Some((&next, &router)));
        assert_eq!(figures.next_layer_accuracy, Some(3.0 / 4.0));
    }

    #[test]
    fn a_figure_that_no_layer_has_stays_absent_in_the_mean() {
        let some = Figures { next_layer_accuracy: Some(0.5), ..Figures::default() };
        assert_eq!(mean(&[some.clone(), Figures::default()]).next_layer_accuracy, Some(0.5));
        assert_eq!(mean(&[Figures::default()]).next_layer_accuracy, None);
    }
}
