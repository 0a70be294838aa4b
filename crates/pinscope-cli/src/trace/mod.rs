//! `pinscope trace`: records routing, and shows what a recording holds.

mod show;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use pinscope::trace::{Recorder, Trace, TracedModel};
use pinscope_host::{Context, ContextOptions, HostError, Logits, Sampler, SamplerOptions, Token};

use crate::args::ModelArgs;
use crate::engine::{Caching, Prepared, Session};
use crate::profile::input::Source;
use crate::{interrupt, style};

/// Options of `pinscope trace`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    show: Option<Show>,
    #[command(flatten)]
    model: Option<ModelArgs>,
    /// Text to read, the beginning of each piece as a prompt and the rest
    /// token by token: a file, or a folder of files; may be given several times
    #[arg(long, value_name = "PATH", required_unless_present = "prompt")]
    text: Vec<PathBuf>,
    /// What to answer instead; the likeliest token is taken each time
    #[arg(short, long, conflicts_with = "text")]
    prompt: Option<String>,
    /// Tokens to generate, or most tokens of text [default: 256, all of the text]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    predict: Option<u32>,
    /// Tokens of each piece of text that are read as a prompt
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Where the trace goes
    #[arg(short, long, value_name = "FILE", required = true)]
    output: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Show {
    /// Show what a trace holds
    Show(show::Args),
}

/// Runs the subcommand. Ctrl-C ends the recording, not the program.
///
/// # Errors
/// Input that cannot be read, a model that cannot be run, a trace that cannot
/// be written or read.
pub fn main(args: &Args) -> Result<ExitCode, Box<dyn std::error::Error>> {
    match (&args.show, &args.model, &args.output) {
        (Some(Show::Show(args)), ..) => show::main(args).map(|()| ExitCode::SUCCESS),
        (None, Some(model), Some(output)) => record(args, model, output),
        _ => Err("give a model (-m) and a file (-o) to record, or `show` and a trace".into()),
    }
}

fn record(
    args: &Args,
    options: &ModelArgs,
    output: &Path,
) -> Result<ExitCode, Box<dyn std::error::Error>> {
    interrupt::install()?;
    let ram = crate::ram::Ram::bytes(options.ram.as_ref())?;
    let mut context = options.context_options();
    let prepared = Prepared::new(&options.model, ram, &context)?;
    context.n_ctx = prepared.n_ctx;
    let model = TracedModel::new(prepared.map(), prepared.profiled_model()?);
    let bar = style::bar("Loading", 1000);
    let caching = Caching { policy: options.policy, reader: options.reader, step_aside: false };
    let session = prepared.load(caching, &mut |done| bar.set_position((done * 1000.0) as u64));
    bar.finish_and_clear();
    let session = session?;
    let engine = session.engine().ok_or("PinScope stepped aside, so nothing can be recorded")?;

    let pieces = pieces(args, &session, context.n_ctx)?;
    let cannot_write = |e| format!("cannot write the trace {}: {e}", output.display());
    engine.record(Recorder::create(output, &model).map_err(cannot_write)?);
    let whole = run(args, &session, context, &pieces);
    engine.finish_recording().map_err(cannot_write)?;
    let whole = whole?;
    if !whole {
        style::note("Stopped: the trace has what was recorded until now.");
    }
    show::print(output, &Trace::load(output)?, args.json)?;
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::from(interrupt::EXIT_CODE) })
}

/// Tokens to read; of each piece the first ones as a prompt.
fn pieces(args: &Args, session: &Session, n_ctx: u32) -> Result<Vec<Vec<Token>>, String> {
    if let Some(prompt) = &args.prompt {
        let tokens = session.model.tokenize(prompt, true, false).map_err(|e| e.to_string())?;
        return match tokens.len() {
            0 => Err("the prompt is empty".into()),
            n if n >= n_ctx as usize => Err(format!(
                "the prompt has {n} tokens and the context holds {n_ctx}; give a larger one (-c)"
            )),
            _ => Ok(vec![tokens]),
        };
    }
    let source = Source { text: &args.text, chat: &[], room: n_ctx as usize };
    source.pieces(&session.model, args.predict.map(|n| n as usize))
}

/// Runs the pieces; false if Ctrl-C ended it.
fn run(
    args: &Args,
    session: &Session,
    options: ContextOptions,
    pieces: &[Vec<Token>],
) -> Result<bool, Box<dyn std::error::Error>> {
    let _guard = interrupt::answering();
    let stop = interrupt::stop_flag();
    let options = ContextOptions { abort: Some(std::sync::Arc::clone(&stop)), ..options };
    let mut context = Context::new(&session.model, options)?;
    let sampling = SamplerOptions { temp: 0.0, ignore_eog: true, ..SamplerOptions::default() };
    let mut sampler = Sampler::new(&session.model, &sampling)?;
    let generate = args.prompt.as_ref().map_or(0, |_| args.predict.unwrap_or(256) as usize);
    let bar =
        style::bar("Recording", (pieces.iter().map(Vec::len).sum::<usize>() + generate) as u64);
    for piece in pieces {
        context.clear();
        let mut held = 0;
        // False if it was stopped.
        let mut decode = |context: &mut Context, tokens: &[Token], logits| {
            bar.inc(tokens.len() as u64);
            let stopped = stop.load(std::sync::atomic::Ordering::Relaxed);
            match if stopped {
                Err(HostError::Aborted)
            } else {
                context.decode(tokens, held, logits)
            } {
                Ok(()) => Ok(true),
                Err(HostError::Aborted) => Ok(false),
                Err(error) => Err(session.explain(error)),
            }
            .inspect(|_| held += tokens.len() as u32)
        };
        let prompt = match args.prompt {
            Some(_) => piece.len(),
            None => piece.len().min(args.prompt_tokens as usize),
        };
        let (prompt, rest) = piece.split_at(prompt);
        let batches = prompt.chunks(context.n_batch() as usize).chain(rest.chunks(1));
        for batch in batches.collect::<Vec<_>>() {
            if !decode(&mut context, batch, Logits::Last)? {
                return Ok(false);
            }
        }
        let room = context.n_ctx() as usize - piece.len();
        for _ in 0..generate.min(room) {
            let token = sampler.sample(&context);
            if !decode(&mut context, &[token], Logits::Last)? {
                return Ok(false);
            }
        }
    }
    bar.finish_and_clear();
    Ok(true)
}
