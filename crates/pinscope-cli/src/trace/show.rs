//! What a trace holds: figures that say how well it could be cached.

use std::collections::HashSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use pinscope::memory::format_bytes;
use pinscope::trace::Trace;
use serde::Serialize;

/// Options of `pinscope trace show`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trace; one of BigMoeOnEdge (CSV) will do too
    file: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    trace: String,
    model: String,
    model_id: Option<String>,
    layers: usize,
    experts_per_layer: u32,
    top_k: u32,
    /// Of all experts, bytes.
    expert_bytes: u64,
    /// What a generated token asks for, bytes.
    bytes_a_token: f64,
    prompts: usize,
    prompt_tokens: u64,
    generated_tokens: u64,
    passes: usize,
    cut: bool,
    /// Share of a generated token's choices that the token before made, too.
    overlap: f64,
    /// Share of all experts that generated tokens chose at all.
    touched: f64,
    caveat: Option<&'static str>,
}

/// Runs the subcommand.
///
/// # Errors
/// A trace that cannot be read.
pub fn main(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    Ok(print(&args.file, &Trace::load(&args.file)?, args.json)?)
}

/// Prints what `trace` from `path` holds.
pub fn print(path: &Path, trace: &Trace, json: bool) -> io::Result<()> {
    let r = report(path, trace);
    let mut out = io::stdout().lock();
    if json {
        return writeln!(out, "{}", serde_json::to_string_pretty(&r)?);
    }
    writeln!(
        out,
        "{}: {} with {} layers of {} experts, {} for each token, {} in all.\n\
         {} prompts of {} tokens together, {} generated tokens, {} passes.\n\
         A generated token asks for {}; {:.1} % of its choices are those of the token before; \
         {:.1} % of the experts are ever chosen.",
        r.trace,
        r.model,
        r.layers,
        r.experts_per_layer,
        r.top_k,
        format_bytes(r.expert_bytes),
        r.prompts,
        r.prompt_tokens,
        r.generated_tokens,
        r.passes,
        format_bytes(r.bytes_a_token as u64),
        100.0 * r.overlap,
        100.0 * r.touched,
    )?;
    if r.cut {
        writeln!(out, "The recording ended within a pass, which is left out.")?;
    }
    r.caveat.map_or(Ok(()), |caveat| writeln!(out, "Note: {caveat}."))
}

fn report(path: &Path, trace: &Trace) -> Report {
    let model = &trace.model;
    let (prompt_tokens, generated_tokens) = trace.tokens();
    let mut last: Vec<HashSet<u32>> = vec![HashSet::new(); model.layers.len()];
    let mut touched = HashSet::new();
    let (mut again, mut chosen, mut bytes, mut prompts) = (0, 0, 0, 0);
    let mut before = true;
    for pass in &trace.passes {
        let layer = pass.layer as usize;
        prompts += usize::from(layer == 0 && !pass.decode && before);
        if layer == 0 {
            before = pass.decode;
        }
        let now: HashSet<u32> = pass.choices.iter().map(|c| c.expert).collect();
        if pass.decode {
            let had = &last[layer];
            if !had.is_empty() {
                again += now.intersection(had).count();
                chosen += now.len();
            }
            bytes += now.len() as u64 * model.layers[layer].expert_bytes();
            touched.extend(now.iter().map(|&e| (layer, e)));
        }
        // The experts of a prompt are those of many tokens.
        last[layer] = if pass.decode { now } else { HashSet::new() };
    }
    let experts: u64 = model.layers.iter().map(|l| u64::from(l.experts)).sum();
    Report {
        trace: path.display().to_string(),
        model: model.name.clone(),
        model_id: model.id.map(|id| id.to_string()),
        layers: model.layers.len(),
        experts_per_layer: model.experts_per_layer,
        top_k: model.top_k,
        expert_bytes: model.layers.iter().map(|l| u64::from(l.experts) * l.expert_bytes()).sum(),
        bytes_a_token: bytes as f64 / generated_tokens.max(1) as f64,
        prompts,
        prompt_tokens,
        generated_tokens,
        passes: trace.passes.len(),
        cut: trace.cut,
        overlap: again as f64 / chosen.max(1) as f64,
        touched: touched.len() as f64 / experts.max(1) as f64,
        caveat: trace.caveat,
    }
}
