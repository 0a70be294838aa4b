//! The routing traces of the BigMoeOnEdge project (CSV, `# route_trace v1`).
//!
//! Header lines give the model and the bytes of an expert in each layer; a row
//! is one choice: `turn,phase,step,layer,slot,expert,weight,...`, phase 0 being
//! the prompt, which went through the model as one batch.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::{Choice, Pass, Trace, TraceError, TracedLayer, TracedModel};

const FIRST_LINE: &str = "# route_trace v1";
const COLUMNS: &str = "turn,phase,step,layer,slot,expert,weight,";

const CAVEAT: &str = "a BigMoeOnEdge trace: one prompt, at most 128 generated tokens, recorded at \
                      a reduced number of experts a token, weights renormalised";

/// Whether a file that begins like this may be such a trace.
pub(super) fn is_start(start: &[u8]) -> bool {
    !start.is_empty() && FIRST_LINE.as_bytes().starts_with(start)
}

/// A batch under construction: tokens and sum of weights by expert.
#[derive(Default)]
struct Batch {
    steps: u32,
    last: Option<u64>,
    choices: BTreeMap<u32, (u32, f32)>,
}

/// `path` is for errors only.
pub(super) fn parse(from: impl Read, path: &Path) -> Result<Trace, TraceError> {
    let mut model = TracedModel {
        id: None,
        name: String::new(),
        experts_per_layer: 0,
        top_k: 0,
        layers: Vec::new(),
    };
    let mut passes: Vec<Pass> = Vec::new();
    let mut batch = Batch::default();
    // Turn, phase, token (of generated ones) and layer of the batch.
    let mut at: Option<[u64; 4]> = None;
    for (number, line) in BufReader::new(from).lines().enumerate() {
        let line = line.map_err(|source| TraceError::Read { path: path.to_owned(), source })?;
        let wrong = |why: String| TraceError::Line { path: path.to_owned(), line: number + 1, why };
        if number == 0 && line.trim_end() != FIRST_LINE {
            return Err(wrong(format!("it is not {FIRST_LINE:?}")));
        }
        if let Some(words) = line.strip_prefix('#') {
            header(words, &mut model).map_err(wrong)?;
            continue;
        }
        if line.is_empty() || line.starts_with(COLUMNS) {
            continue;
        }
        let row = row(&line, &model).map_err(wrong)?;
        let step = row.step;
        let key = [row.turn, row.phase, if row.phase == 0 { 0 } else { step }, row.layer];
        if at != Some(key) {
            finish(&mut batch, at, &mut passes);
            at = Some(key);
        }
        if batch.last != Some(step) {
            batch.last = Some(step);
            batch.steps += 1;
        }
        let choice = batch.choices.entry(row.expert).or_default();
        choice.0 += 1;
        choice.1 += row.weight;
    }
    finish(&mut batch, at, &mut passes);
    if model.layers.is_empty() || passes.is_empty() {
        let why = "it has no layers, or no choices".into();
        return Err(TraceError::NotATrace { path: path.to_owned(), why });
    }
    Ok(Trace { model, passes, cut: false, caveat: Some(CAVEAT) })
}

fn finish(batch: &mut Batch, at: Option<[u64; 4]>, passes: &mut Vec<Pass>) {
    let Some([_, phase, _, layer]) = at else { return };
    let Batch { steps, choices, .. } = std::mem::take(batch);
    let choices = choices.into_iter().map(|(expert, (tokens, weight))| Choice {
        expert,
        tokens,
        weight: weight / tokens as f32,
    });
    let choices = choices.collect();
    passes.push(Pass { layer: layer as u32, tokens: steps, decode: phase == 1, choices });
}

/// `key=value` words of a header line.
fn header(words: &str, model: &mut TracedModel) -> Result<(), String> {
    let (mut layer, mut bytes) = (None, None);
    for (key, value) in words.split_whitespace().filter_map(|w| w.split_once('=')) {
        let number = || -> Result<u32, String> {
            let number = value.parse().ok().filter(|n| *n <= 1 << 16);
            number.ok_or_else(|| format!("{key} is {value:?}, not a number in range"))
        };
        match key {
            "model" => model.name = value.to_owned(),
            "n_expert" => model.experts_per_layer = number()?,
            "n_expert_used" => model.top_k = number()?,
            "layer" => layer = Some(number()?),
            "expert_bytes" => {
                let size = value.parse().ok().filter(|n| (1..1u64 << 40).contains(n));
                bytes = Some(size.ok_or_else(|| format!("an expert of {value:?} bytes"))?);
            }
            _ => {}
        }
    }
    if let (Some(index), Some(bytes)) = (layer, bytes) {
        if index as usize != model.layers.len() {
            return Err(format!("layer {index} where {} was next", model.layers.len()));
        }
        let (experts, parts) = (model.experts_per_layer, vec![(0, bytes)]);
        if model.top_k == 0 || model.top_k > experts {
            return Err("the number of experts does not come first".into());
        }
        model.layers.push(TracedLayer { index, experts, parts });
    }
    Ok(())
}

struct Row {
    turn: u64,
    phase: u64,
    step: u64,
    layer: u64,
    expert: u32,
    weight: f32,
}

fn row(line: &str, model: &TracedModel) -> Result<Row, String> {
    let fields: Vec<&str> = line.split(',').collect();
    if fields.len() < 7 {
        return Err(format!("{} columns, and 7 are needed", fields.len()));
    }
    let number = |i: usize, below: u64| -> Result<u64, String> {
        let number = fields[i].parse().ok().filter(|n| *n < below);
        number.ok_or_else(|| {
            format!("{:?} in column {} is no number below {below}", fields[i], i + 1)
        })
    };
    let weight = fields[6].parse().ok().filter(|w: &f32| w.is_finite() && *w >= 0.0);
    Ok(Row {
        turn: number(0, u64::MAX)?,
        phase: number(1, 2)?,
        step: number(2, u64::MAX)?,
        layer: number(3, model.layers.len() as u64)?,
        expert: number(5, u64::from(model.experts_per_layer))? as u32,
        weight: weight.ok_or_else(|| format!("{:?} is no weight", fields[6]))?,
    })
}
