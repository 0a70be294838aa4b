//! `pinscope profile`: which experts a text uses.

pub mod input;
mod recorder;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use pinscope::layout::Layout;
use pinscope::profile::{PinPlan, Profile};
use pinscope_host::SamplerOptions;

pub use recorder::Recorder;

use crate::args::ModelArgs;
use crate::engine::{Caching, Prepared};
use crate::generate::{Ended, Generator};
use crate::ram::Ram;
use crate::{interrupt, plot, style};

/// Options of `pinscope profile`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text like what the model will work on: a file, or a folder of files;
    /// may be given several times
    #[arg(long, value_name = "PATH", required_unless_present_any = ["chat", "merge"])]
    text: Vec<PathBuf>,
    /// Conversations, one a line: {"messages": [{"role": "user", "content": "..."}, ...]}
    #[arg(long, value_name = "FILE.jsonl")]
    chat: Vec<PathBuf>,
    /// Most tokens of input; they are taken evenly from all of it [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// Tokens to generate after each piece of input
    #[arg(long, value_name = "N", default_value_t = 48)]
    generate: u32,
    /// Add this profile, times WEIGHT if one is given; may be given several times
    #[arg(long, value_name = "PROFILE[=WEIGHT]", value_parser = weighted)]
    merge: Vec<(PathBuf, f64)>,
    /// Where the profile goes [default: the model's name with .profile.json, in
    /// this folder]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Draw how much of the traffic the hottest experts serve
    #[arg(long, value_name = "FILE.svg", value_parser = plot::check_name)]
    plot: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// `PROFILE` or `PROFILE=WEIGHT`.
fn weighted(text: &str) -> Result<(PathBuf, f64), String> {
    let Some((path, weight)) = text.rsplit_once('=') else { return Ok((text.into(), 1.0)) };
    match weight.parse::<f64>() {
        Ok(weight) if weight > 0.0 && weight.is_finite() => Ok((path.into(), weight)),
        _ => Err(format!("the weight {weight:?} is no number above 0")),
    }
}

/// Runs the subcommand. Ctrl-C ends the counting, not the program: what was
/// counted is kept.
///
/// # Errors
/// Input that cannot be read, a model that cannot be run, profiles of other
/// models.
pub fn main(args: &Args) -> Result<ExitCode, Box<dyn std::error::Error>> {
    interrupt::install()?;
    let ram = Ram::bytes(args.model.ram.as_ref())?;
    let mut context = args.model.context_options();
    let prepared = Prepared::new(&args.model.model, ram, &context)?;
    context.n_ctx = prepared.n_ctx;
    let mut profile = Profile::new(prepared.profiled_model()?.clone());
    for (path, weight) in &args.merge {
        profile.merge(&Profile::load(path)?, *weight)?;
    }
    let layout = Layout::new(prepared.map(), prepared.plan.arena_bytes).ok();
    let map = prepared.map().clone();
    let mut complete = true;
    if !args.text.is_empty() || !args.chat.is_empty() {
        complete = count(args, prepared, context, &mut profile)?;
    }
    if profile.halves().iter().all(|h| h.is_empty()) {
        return Err("nothing was counted, so no profile is written; give more text".into());
    }
    let output = args.output.clone().unwrap_or_else(|| {
        let name = args.model.model.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        PathBuf::from(name + ".profile.json")
    });
    profile.save(&output)?;
    // Where everything fits, nothing needs to be pinned.
    let layout = layout.filter(|layout| !layout.classes.iter().all(|c| c.is_full()));
    let pins = layout.map(|layout| PinPlan::new(&profile, &map, &layout, None));
    if let Some(path) = &args.plot {
        show::draw(&profile, path)?;
    }
    match args.json {
        true => show::print_json(&profile, &output, pins.as_ref())?,
        false => show::print(&profile, &output, pins.as_ref(), ram)?,
    }
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::from(interrupt::EXIT_CODE) })
}

/// Runs the input and counts; false if Ctrl-C ended it.
fn count(
    args: &Args,
    prepared: Prepared,
    context: pinscope_host::ContextOptions,
    profile: &mut Profile,
) -> Result<bool, Box<dyn std::error::Error>> {
    let bar = style::bar("Loading", 1000);
    let caching = Caching {
        policy: args.model.policy,
        reader: args.model.reader,
        step_aside: false,
        prefetch: true,
    };
    let session = prepared.load(caching, &mut |done| bar.set_position((done * 1000.0) as u64));
    bar.finish_and_clear();
    let session = session?;
    let room = (context.n_ctx as usize).saturating_sub(args.generate as usize + 1).max(1);
    let source = input::Source { text: &args.text, chat: &args.chat, room };
    let pieces = source.pieces(&session.model, args.tokens.map(|n| n as usize))?;

    let sampling = SamplerOptions { seed: 1, ..SamplerOptions::default() };
    let mut generator = Generator::new(&session, context, &[], &sampling)?.quiet();
    let bar = style::bar("Profiling", pieces.iter().map(|p| p.len() as u64).sum());
    for piece in &pieces {
        let generate = Some(args.generate as usize);
        generator.clear();
        let answer = generator.answer(piece, generate, &mut std::io::sink())?;
        if let Some(counts) = session.take_routing() {
            profile.record(&counts);
        }
        if answer.ended == Ended::Stopped {
            bar.finish_and_clear();
            style::note("Stopped: the profile has what was counted until now.");
            return Ok(false);
        }
        bar.inc(piece.len() as u64);
    }
    bar.finish_and_clear();
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_may_follow_a_profile() {
        assert_eq!(weighted("a.json"), Ok(("a.json".into(), 1.0)));
        assert_eq!(weighted("a=b.json=0.5"), Ok(("a=b.json".into(), 0.5)));
        assert!(weighted("a.json=0").is_err() && weighted("a.json=lots").is_err());
    }
}
