//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use pinscope::policy::PolicyKind;
use pinscope::reader::ReaderKind;
use pinscope_host::{ContextOptions, SamplerOptions};

use crate::pinning::Pinning;
use crate::ram::Ram;
use crate::threads::default_threads;
use crate::{bench, doctor, pin, plot_cmd, profile, simulate, trace, verify};

/// Runs Mixture-of-Experts models that are larger than memory, bit for bit.
#[derive(Debug, Parser)]
#[command(name = "pinscope", version, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer a prompt, or chat when there is none
    Run(RunArgs),
    /// Show what the RAM would be used for, without loading the model
    Plan(PlanArgs),
    /// Find out which experts your text uses, for pins
    Profile(profile::Args),
    /// Keep a model's hottest pages in the page cache, for other programs too
    Pin(pin::Args),
    /// Record which experts each token uses, for simulate
    Trace(trace::Args),
    /// Replay traces through cache policies, without the model
    Simulate(simulate::Args),
    /// Measure what decides speed on this machine, and say what would help most
    Doctor(doctor::Args),
    /// Check that a memory budget does not change a bit of the output
    Verify(verify::Args),
    /// Measure speed at several budgets, against plain llama.cpp too
    Bench(bench::Args),
    /// Draw what several `bench --json` showed
    Plot(plot_cmd::Args),
    /// One measured run; started by verify and bench
    #[command(hide = true)]
    Worker,
}

/// Which model, and how much memory it may use.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// The GGUF file; the first one if the model has several parts
    #[arg(short, long, value_name = "FILE")]
    pub model: PathBuf,
    /// Memory for the whole process: 10G or 10GiB (2^30 bytes each), 10400M,
    /// 60% [default: what is free less a tenth]
    #[arg(long, value_name = "AMOUNT")]
    pub ram: Option<Ram>,
    /// Context, tokens [default: what the model was trained for, at most 4096]
    #[arg(short, long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
    /// Most prompt tokens in one piece
    #[arg(short, long, value_name = "TOKENS", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: u32,
    /// Most prompt tokens computed at once; less needs less memory
    #[arg(long = "ubatch", value_name = "TOKENS",
          default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub ubatch: u32,
    /// Threads that compute [default: physical cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: Option<u32>,
    /// Which expert gives way to another
    #[arg(long, value_name = "NAME", default_value_t)]
    pub policy: PolicyKind,
    /// How experts are read: auto, uring, pread
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parse_reader)]
    pub reader: ReaderKind,
}

/// Accepts `-ub` for `--ubatch`, as llama.cpp's programs do.
pub fn with_llama_spelling(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    args.map(|arg| if arg == "-ub" { "--ubatch".into() } else { arg })
}

impl ModelArgs {
    /// The context that a generator needs: one row of logits at a time.
    /// `n_ctx` 0 stands for the default.
    pub fn context_options(&self) -> ContextOptions {
        let threads = self.threads.unwrap_or_else(default_threads);
        ContextOptions {
            n_ctx: self.ctx.unwrap_or(0),
            n_batch: self.batch,
            n_ubatch: self.ubatch.min(self.batch),
            max_outputs: 1,
            threads,
            threads_batch: threads,
            ..ContextOptions::default()
        }
    }
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub pinning: Pinning,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// What to answer; chat when absent
    #[arg(short, long)]
    pub prompt: Option<String>,
    /// A LoRA adapter (GGUF) to apply; may be given several times
    #[arg(long, value_name = "FILE")]
    pub lora: Vec<PathBuf>,
    /// Most tokens in an answer [default: as many as fit]
    #[arg(short = 'n', long, value_name = "TOKENS")]
    pub predict: Option<usize>,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long, requires = "prompt")]
    pub raw: bool,
    /// Do not let the model end its answer
    #[arg(long)]
    pub ignore_eos: bool,
    #[command(flatten)]
    pub pinning: Pinning,
    /// Add what is asked and answered now to the profile, which is made if
    /// there is none
    #[arg(long, requires = "profile", help_heading = "Pins")]
    pub update_profile: bool,
    /// Write where the time of each layer of each token goes, for
    /// ui.perfetto.dev (JSON, 64 MB at most)
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// The defaults are those of llama.cpp's programs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    temp: f32,
    /// Choose among the K likeliest tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = 40)]
    top_k: i32,
    /// Choose among the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    top_p: f32,
    /// Choose among tokens at least this likely, relative to the likeliest
    #[arg(long, value_name = "P", default_value_t = 0.05)]
    min_p: f32,
    /// Make recent tokens less likely; 1 does nothing
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    repeat_penalty: f32,
    /// The same seed gives the same answer [default: a new one each time]
    #[arg(long, value_name = "N")]
    seed: Option<u32>,
}

impl RunArgs {
    pub fn sampler_options(&self) -> SamplerOptions {
        let s = &self.sampling;
        SamplerOptions {
            temp: s.temp,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repeat_penalty: s.repeat_penalty,
            seed: s.seed.unwrap_or(u32::MAX),
            ignore_eog: self.ignore_eos,
            ..SamplerOptions::default()
        }
    }
}

pub fn parse_reader(name: &str) -> Result<ReaderKind, String> {
    match name {
        "auto" => Ok(ReaderKind::Auto),
        "uring" => Ok(ReaderKind::Uring),
        "pread" => Ok(ReaderKind::Pread),
        _ => Err("choose one of auto, uring, pread".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_micro_batch_may_be_spelled_as_in_llama_cpp() {
        let line = ["pinscope", "plan", "-m", "x", "-b", "8", "-ub", "4"].map(OsString::from);
        match Cli::parse_from(with_llama_spelling(line.into_iter())).command {
            Command::Plan(args) => assert_eq!((args.model.batch, args.model.ubatch), (8, 4)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn unsuitable_values_are_usage_errors() {
        for bad in [
            &["run", "-m", "x", "--ram", "10"][..],
            &["run", "-m", "x", "-c", "0"],
            &["run", "-m", "x", "--reader", "carrier-pigeon"],
            &["run", "-m", "x", "--policy", "carrier-pigeon"],
            &["run", "-m", "x", "--raw"],
            &["plan"],
        ] {
            let line = ["pinscope"].iter().chain(bad);
            assert!(Cli::try_parse_from(line).is_err(), "{bad:?}");
        }
    }
}
