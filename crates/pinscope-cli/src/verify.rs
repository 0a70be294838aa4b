//! `pinscope verify`: the same tokens with everything in memory and under a
//! budget, each in a fresh process, and a comparison of every bit.

use std::path::PathBuf;
use std::process::ExitCode;

use pinscope::memory::format_bytes;
use pinscope::timeline::Activity;
use pinscope_ggml::read_map;
use serde::Serialize;

use crate::args::ModelArgs;
use crate::launch::{launch, Contender, Decode, Job, Outcome, Setup};
use crate::pinning::Pinning;
use crate::ram::Ram;
use crate::style;
use crate::text;

/// Options of `pinscope verify`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    pinning: Pinning,
    /// Where the prompt comes from [default: a built-in text]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of the prompt; the logits of each are compared
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..))]
    prompt_tokens: u32,
    /// Tokens to generate after it, always the likeliest
    #[arg(long, value_name = "N", default_value_t = 32)]
    tokens: u32,
    /// Compare with this file instead of the model itself: a copy that was
    /// altered must be found different
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `verify` found; the JSON that it prints.
#[derive(Debug, Serialize)]
struct Verdict {
    /// All logits and all tokens are the same, bit for bit.
    identical: bool,
    /// SHA-256 over all logits, everything in memory and not repacked.
    sha256_reference: String,
    /// SHA-256 over all logits under the budget.
    sha256_budget: String,
    sha256_tokens_reference: String,
    sha256_tokens_budget: String,
    /// Position (0 is the first prompt token) of the first logits that differ.
    first_difference: Option<usize>,
    prompt_tokens: usize,
    decoded_tokens: usize,
    /// Most memory used under the budget, page cache included if
    /// `counted_by_cgroup`.
    peak_bytes: u64,
    limit_bytes: u64,
    counted_by_cgroup: bool,
    /// How often the kernel had to hold the process below the limit; 0: it
    /// stayed there by itself.
    limit_hits: Option<u64>,
    reference_peak_bytes: u64,
    /// Share of needed experts that were in memory while decoding.
    hit_rate: f64,
    bytes_read_per_token: f64,
    wait_ms_per_token: f64,
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    notes: Vec<String>,
}

impl Verdict {
    fn new(reference: &Outcome, budget: &Outcome, limit_bytes: u64) -> Verdict {
        let (r, b) = (&reference.report, &budget.report);
        let differ = r.vectors.iter().zip(&b.vectors).position(|(x, y)| x != y);
        let tokens = b.decode.tokens.max(1) as f64;
        let cache = b.cache.unwrap_or_default();
        let hash = |outcome: &Outcome| outcome.report.sha256_logits.clone().unwrap_or_default();
        Verdict {
            identical: r.sha256_logits.is_some()
                && r.sha256_logits == b.sha256_logits
                && r.sha256_tokens == b.sha256_tokens,
            sha256_reference: hash(reference),
            sha256_budget: hash(budget),
            sha256_tokens_reference: r.sha256_tokens.clone(),
            sha256_tokens_budget: b.sha256_tokens.clone(),
            first_difference: differ,
            prompt_tokens: b.prefill.tokens,
            decoded_tokens: b.decode.tokens,
            peak_bytes: budget.peak_bytes,
            limit_bytes,
            counted_by_cgroup: budget.no_cgroup.is_none(),
            limit_hits: budget.limit_hits,
            reference_peak_bytes: reference.peak_bytes,
            hit_rate: cache.hit_rate(),
            bytes_read_per_token: cache.bytes_read as f64 / tokens,
            wait_ms_per_token: cache.ms(Activity::Wait) / tokens,
            prefill_tokens_per_second: b.prefill.rate(),
            decode_tokens_per_second: b.decode.rate(),
            notes: notes(budget),
        }
    }
}

/// Runs the subcommand; exit code 1 means that something differs or went wrong.
pub fn main(args: &Args) -> ExitCode {
    match verify(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            style::note(&format!("pinscope: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn verify(args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    let limit = Ram::bytes(args.model.ram.as_ref())?;
    let budget_job = job(args, limit)?;
    let reference_job = Job {
        contender: Contender::Resident,
        model: args.reference.clone().unwrap_or_else(|| budget_job.model.clone()),
        ram: None,
        ..budget_job.clone()
    };
    // The budget first: what cannot work is refused before the long run.
    let budget = run(&budget_job, Some(limit))?;
    let reference = run(&reference_job, None)?;

    let verdict = Verdict::new(&reference, &budget, limit);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&verdict)?);
    } else {
        print_table(&verdict);
    }
    Ok(verdict.identical)
}

fn job(args: &Args, limit: u64) -> Result<Job, Box<dyn std::error::Error>> {
    let model = &args.model;
    // Before anything else: this refuses what is no Mixture of Experts.
    read_map(&model.model)?;
    let tokens = text::tokens(&model.model, args.text.as_deref(), args.prompt_tokens as usize)?;
    let context = model.context_options();
    Ok(Job {
        model: model.model.clone(),
        contender: match args.pinning.profile {
            Some(_) => Contender::PinscopeProfile,
            None => Contender::Pinscope,
        },
        ram: Some(limit),
        setup: Setup {
            threads: context.threads,
            n_ubatch: context.n_ubatch.min(args.prompt_tokens),
            policy: model.policy,
            reader: model.reader,
            // Plain llama.cpp against itself would prove nothing.
            step_aside: false,
            pinning: args.pinning.clone(),
        },
        n_ctx: model.ctx.unwrap_or(0).max(args.prompt_tokens + args.tokens),
        prompt: tokens,
        decode: Decode::Greedy(args.tokens as usize),
        hash_logits: true,
        max_decode_seconds: None,
        plan_only: false,
    })
}

fn run(job: &Job, limit: Option<u64>) -> Result<Outcome, Box<dyn std::error::Error>> {
    let map = read_map(&job.model)?;
    Ok(launch(job, job.contender.name(), map.files(), limit)?)
}

/// What the user should know of how a run went.
fn notes(outcome: &Outcome) -> Vec<String> {
    let mut notes = outcome.report.notes.clone();
    if let Some(why) = &outcome.no_cgroup {
        notes.push(format!(
            "Not limited by a cgroup ({why}): the peak is what the process had mapped in."
        ));
    }
    notes
}

fn print_table(v: &Verdict) {
    let mut table = style::table();
    table.set_header(["", "everything in memory", "under the budget"]);
    let mut row = |name: &str, reference: &str, budget: &str| {
        table.add_row([name, reference, budget]);
    };
    let short = |hash: &str| hash.get(..32).unwrap_or(hash).to_owned();
    row("Logits, SHA-256", &short(&v.sha256_reference), &short(&v.sha256_budget));
    row("Tokens, SHA-256", &short(&v.sha256_tokens_reference), &short(&v.sha256_tokens_budget));
    row("Peak memory", &format_bytes(v.reference_peak_bytes), &format_bytes(v.peak_bytes));
    row("Memory limit", "none", &format_bytes(v.limit_bytes));
    row("Hit rate", "", &format!("{:.1} %", v.hit_rate * 100.0));
    row("Read a token", "", &format!("{:.1} MB", v.bytes_read_per_token / 1e6));
    println!("{table}");
    let amount = format!(
        "{} logits vectors ({} of the prompt, {} decoded)",
        v.prompt_tokens + v.decoded_tokens,
        v.prompt_tokens,
        v.decoded_tokens
    );
    match (v.identical, v.first_difference) {
        (true, _) => println!("Identical, bit for bit: {amount}."),
        (false, Some(at)) => {
            println!("DIFFERENT: {amount}, the first difference is at token {at}.")
        }
        (false, None) => println!("DIFFERENT: {amount}."),
    }
    for note in &v.notes {
        println!("Note: {note}");
    }
}
