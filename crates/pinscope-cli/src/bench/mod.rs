//! `pinscope bench`: speed over a forced token stream, the same work for every
//! contender, each in a fresh process, in alternating order, medians.

mod curve;
mod efficiency;
mod figures;
mod growth;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use pinscope::map::ModelFile;
use pinscope::memory::{format_bytes, parse_ram};
use pinscope::policy::PolicyKind;
use pinscope::reader::ReaderKind;
use pinscope_ggml::read_map;
use serde::Serialize;

use crate::args::parse_reader;
use crate::launch::{launch, Contender, Decode, Job, Setup};
use crate::pinning::Pinning;
use crate::threads::default_threads;
use crate::{plot, style, text};

use figures::Figures;

/// Options of `pinscope bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The GGUF file; the first one if the model has several parts
    #[arg(short, long, value_name = "FILE")]
    model: PathBuf,
    /// Memory for the whole process: 10G, 10400M, or a share of the model's
    /// file size; several with commas
    #[arg(long, value_name = "AMOUNTS", value_delimiter = ',', default_value = "25%,57%,100%")]
    ram: Vec<String>,
    /// Plain llama.cpp of the same build to compare with: mmap under the same
    /// limits, mmap-pin beside `pinscope pin` with --profile, resident with
    /// everything in memory (repacked and not); or PinScope that reads
    /// nothing ahead (no-prefetch)
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    against: Vec<Rival>,
    /// Tokens to decode one by one
    #[arg(long, value_name = "N", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Tokens of the prompt before them
    #[arg(long, value_name = "N", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Where the tokens come from [default: a built-in text on many subjects]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Runs of each contender; medians are shown
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Decode no longer than this with mmap, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    mmap_seconds: f64,
    /// Hash all logits too (the prompt's as well, which costs prefill speed)
    /// and say whether the contenders agree
    #[arg(long)]
    hash: bool,
    #[command(flatten)]
    pinning: Pinning,
    /// Draw the hit rates of PinScope's runs token by token
    #[arg(long, value_name = "FILE.svg", value_parser = plot::check_name)]
    hit_plot: Option<PathBuf>,
    /// Draw milliseconds a token against the memory of PinScope's runs
    #[arg(long, value_name = "FILE.svg", value_parser = plot::check_name)]
    plot: Option<PathBuf>,
    /// Keep the device at work even if the whole model fits
    #[arg(long)]
    no_step_aside: bool,
    /// Most prompt tokens computed at once
    #[arg(long, value_name = "TOKENS",
          default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
    ubatch: u32,
    /// Threads that compute [default: physical cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// Which expert gives way to another
    #[arg(long, value_name = "NAME", default_value_t)]
    policy: PolicyKind,
    /// How experts are read: auto, uring, pread
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parse_reader)]
    reader: ReaderKind,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A choice of `--against`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Rival {
    Mmap,
    MmapPin,
    Resident,
    NoPrefetch,
}

/// A contender and its memory: one row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    contender: Contender,
    /// Limit on the process with its page cache, bytes; `None`: no limit.
    ram: Option<u64>,
}

/// The JSON of `--json`.
#[derive(Serialize)]
pub struct Results {
    model: String,
    model_bytes: u64,
    threads: u32,
    prompt_tokens: u32,
    decode_tokens: u32,
    /// Every run, in the order in which they ran.
    runs: Vec<Figures>,
    /// One for each contender and amount of memory.
    medians: Vec<Figures>,
    /// Rows that could not run, and why.
    failed: Vec<Failed>,
}

/// An entry without figures.
#[derive(Debug, Clone, Serialize)]
pub struct Failed {
    contender: &'static str,
    ram: Option<u64>,
    reason: String,
}

/// Runs the subcommand.
pub fn main(args: &Args) -> ExitCode {
    match bench(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            style::note(&format!("pinscope: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn bench(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let map = read_map(&args.model)?;
    let model_bytes = map.files().iter().map(|f| f.len).sum();
    let entries = entries(args, model_bytes)?;
    let (prompt, forced) = {
        let count = args.prompt as usize + args.tokens as usize;
        let mut tokens = text::tokens(&args.model, args.text.as_deref(), count)?;
        let forced = tokens.split_off(args.prompt as usize);
        (tokens, forced)
    };
    let job = Job {
        model: args.model.clone(),
        contender: Contender::Pinscope,
        ram: None,
        setup: Setup {
            threads: args.threads.unwrap_or_else(default_threads),
            n_ubatch: args.ubatch.min(args.prompt),
            policy: args.policy,
            reader: args.reader,
            step_aside: !args.no_step_aside,
            pinning: args.pinning.clone(),
        },
        n_ctx: args.prompt + args.tokens,
        prompt,
        decode: Decode::Forced(forced),
        hash_logits: args.hash,
        max_decode_seconds: None,
        plan_only: false,
    };
    let (runs, failed) = run_all(args, &entries, &job, map.files());
    let medians = entries
        .iter()
        .filter_map(|e| {
            let own: Vec<Figures> = runs.iter().filter(|f| f.is_of(*e)).cloned().collect();
            Figures::median(&own)
        })
        .collect();
    let results = Results {
        model: args.model.display().to_string(),
        model_bytes,
        threads: job.setup.threads,
        prompt_tokens: args.prompt,
        decode_tokens: args.tokens,
        runs,
        medians,
        failed,
    };
    if let Some(path) = &args.hit_plot {
        curve::draw(&results, path)?;
    }
    if let Some(path) = &args.plot {
        growth::draw(&results, path)?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&results)?);
    } else {
        table::print(&results);
    }
    match results.medians.is_empty() {
        true => Err("no contender could run; the reasons are above".into()),
        false => Ok(()),
    }
}

/// The rows: PinScope and mmap at each amount of memory, then the resident ones.
fn entries(args: &Args, model_bytes: u64) -> Result<Vec<Entry>, Box<dyn std::error::Error>> {
    let mut entries = Vec::new();
    let mmap = args.against.contains(&Rival::Mmap);
    for text in &args.ram {
        let ram = Some(amount(text, model_bytes)?);
        entries.push(Entry { contender: Contender::Pinscope, ram });
        if args.pinning.profile.is_some() {
            entries.push(Entry { contender: Contender::PinscopeProfile, ram });
        }
        if args.against.contains(&Rival::NoPrefetch) {
            entries.push(Entry { contender: Contender::PinscopeNoPrefetch, ram });
        }
        if mmap {
            entries.push(Entry { contender: Contender::Mmap, ram });
        }
        if args.against.contains(&Rival::MmapPin) {
            if args.pinning.profile.is_none() {
                return Err("--against mmap-pin needs a profile: add --profile FILE".into());
            }
            entries.push(Entry { contender: Contender::MmapPin, ram });
        }
    }
    if args.against.contains(&Rival::Resident) {
        entries.push(Entry { contender: Contender::Resident, ram: None });
        entries.push(Entry { contender: Contender::ResidentRepacked, ram: None });
    }
    Ok(entries)
}

/// Bytes: an amount, or a share of the model's size, which may be above 100 %.
fn amount(text: &str, model_bytes: u64) -> Result<u64, Box<dyn std::error::Error>> {
    match text.trim().strip_suffix('%').map(|number| number.trim().parse::<f64>()) {
        Some(Ok(percent)) if percent > 0.0 => Ok((model_bytes as f64 * percent / 100.0) as u64),
        _ => Ok(parse_ram(text, model_bytes)?),
    }
}

/// All runs, forwards and backwards in turn, so that no entry always has the
/// machine in the same state; an entry that failed is not tried again.
fn run_all(
    args: &Args,
    entries: &[Entry],
    job: &Job,
    files: &[ModelFile],
) -> (Vec<Figures>, Vec<Failed>) {
    let (mut runs, mut failed) = (Vec::new(), Vec::<Failed>::new());
    for round in 0..args.repeat {
        let mut order = entries.to_vec();
        if round % 2 == 1 {
            order.reverse();
        }
        for entry in order {
            let contender = entry.contender.name();
            if failed.iter().any(|f| f.contender == contender && f.ram == entry.ram) {
                continue;
            }
            let job = Job {
                contender: entry.contender,
                ram: entry.ram,
                max_decode_seconds: entry.contender.is_mmap().then_some(args.mmap_seconds),
                ..job.clone()
            };
            let ram = entry.ram.map_or(String::new(), |ram| format!(" {}", format_bytes(ram)));
            let label = format!("{} of {}: {contender}{ram}", round + 1, args.repeat);
            match launch(&job, &label, files, entry.ram) {
                Ok(outcome) => runs.push(Figures::of(entry, &outcome)),
                Err(error) => {
                    failed.push(Failed { contender, ram: entry.ram, reason: error.to_string() });
                }
            }
        }
    }
    (runs, failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_one_of_the_models_size_and_may_be_above_it() {
        assert_eq!(amount("25%", 2000).unwrap(), 500);
        assert_eq!(amount("120 %", 2000).unwrap(), 2400);
        assert_eq!(amount("2M", 2000).unwrap(), 2 << 20);
        assert!(amount("0%", 2000).is_err());
        assert!(amount("many", 2000).is_err());
    }
}
