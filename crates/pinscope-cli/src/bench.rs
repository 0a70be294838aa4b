//! `pinscope bench`: speed over a forced token stream, the same work for every
//! contender, each in a fresh process, in alternating order, medians.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;

use pinscope::map::ModelFile;
use pinscope::memory::{format_bytes, parse_ram};
use pinscope::policy::PolicyKind;
use pinscope::reader::ReaderKind;
use pinscope_ggml::read_map;
use serde::Serialize;

use crate::args::parse_reader;
use crate::launch::{launch, Contender, Decode, Job, Outcome, Setup};
use crate::threads::default_threads;
use crate::{style, text};

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
    /// limits, resident with everything in memory (repacked and not)
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
    #[arg(long, value_name = "NAME", default_value = "lfu")]
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
    Resident,
}

/// A contender and its memory: one row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    contender: Contender,
    /// Limit on the process with its page cache, bytes; `None`: no limit.
    ram: Option<u64>,
}

/// Figures of one run, or the medians of several.
#[derive(Debug, Clone, Serialize)]
struct Figures {
    contender: &'static str,
    /// Bytes; `null` for contenders without a limit.
    ram: Option<u64>,
    prefill_tokens_per_second: f64,
    /// Decode.
    tokens_per_second: f64,
    ms_per_token: f64,
    decoded_tokens: usize,
    /// Decoding ended at `--mmap-seconds`.
    capped: bool,
    hit_rate: Option<f64>,
    bytes_per_token: Option<f64>,
    wait_ms_per_token: Option<f64>,
    load_seconds: f64,
    peak_bytes: u64,
    /// Why the kernel neither limited nor counted this run's page cache.
    no_cgroup: Option<String>,
    sha256_logits: Option<String>,
}

impl Figures {
    fn of(entry: Entry, outcome: &Outcome) -> Figures {
        let report = &outcome.report;
        let tokens = report.decode.tokens.max(1) as f64;
        Figures {
            contender: entry.contender.name(),
            ram: entry.ram,
            prefill_tokens_per_second: report.prefill.rate(),
            tokens_per_second: report.decode.rate(),
            ms_per_token: report.decode.seconds * 1e3 / tokens,
            decoded_tokens: report.decode.tokens,
            capped: report.capped,
            hit_rate: report.cache.map(|c| c.hit_rate()),
            bytes_per_token: report.cache.map(|c| c.bytes_read as f64 / tokens),
            wait_ms_per_token: report.cache.map(|c| c.wait_ns as f64 / 1e6 / tokens),
            load_seconds: report.load_seconds,
            peak_bytes: outcome.peak_bytes,
            no_cgroup: outcome.no_cgroup.clone(),
            sha256_logits: report.sha256_logits.clone(),
        }
    }

    fn is_of(&self, entry: Entry) -> bool {
        self.contender == entry.contender.name() && self.ram == entry.ram
    }

    /// Each figure's median over `runs` of one entry; `None` without runs.
    fn median(runs: &[Figures]) -> Option<Figures> {
        let first = runs.first()?;
        let of = |get: &dyn Fn(&Figures) -> f64| median(runs.iter().map(get).collect());
        let maybe = |get: &dyn Fn(&Figures) -> Option<f64>| {
            let known: Vec<f64> = runs.iter().filter_map(get).collect();
            (!known.is_empty()).then(|| median(known))
        };
        Some(Figures {
            prefill_tokens_per_second: of(&|f| f.prefill_tokens_per_second),
            tokens_per_second: of(&|f| f.tokens_per_second),
            ms_per_token: of(&|f| f.ms_per_token),
            decoded_tokens: of(&|f| f.decoded_tokens as f64) as usize,
            capped: runs.iter().any(|f| f.capped),
            hit_rate: maybe(&|f| f.hit_rate),
            bytes_per_token: maybe(&|f| f.bytes_per_token),
            wait_ms_per_token: maybe(&|f| f.wait_ms_per_token),
            load_seconds: of(&|f| f.load_seconds),
            peak_bytes: of(&|f| f.peak_bytes as f64) as u64,
            ..first.clone()
        })
    }
}

/// The middle value; of an even number the mean of the two middle ones.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// The JSON of `--json`.
#[derive(Serialize)]
struct Results {
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
struct Failed {
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
    if args.json {
        println!("{}", serde_json::to_string_pretty(&results)?);
    } else {
        print_table(&results);
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
        if mmap {
            entries.push(Entry { contender: Contender::Mmap, ram });
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
                max_decode_seconds: (entry.contender == Contender::Mmap)
                    .then_some(args.mmap_seconds),
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

fn print_table(results: &Results) {
    let rate = |name: &str| {
        results.medians.iter().find(|f| f.contender == name).map(|f| f.tokens_per_second)
    };
    let resident = rate(Contender::Resident.name());
    let repacked = rate(Contender::ResidentRepacked.name());
    let mut table = style::table();
    table.set_header([
        "",
        "RAM",
        "prefill tok/s",
        "decode tok/s",
        "of resident",
        "of repacked",
        "ms a token",
        "hit rate",
        "MB a token",
        "wait ms",
        "peak",
        "tokens",
    ]);
    for f in &results.medians {
        let maybe = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |v| format!("{v:.digits$}"))
        };
        table.add_row([
            f.contender.to_owned(),
            f.ram.map_or_else(|| "no limit".to_owned(), format_bytes),
            format!("{:.1}", f.prefill_tokens_per_second),
            format!("{:.2}", f.tokens_per_second),
            maybe(resident.map(|r| f.tokens_per_second / r), 2),
            maybe(repacked.map(|r| f.tokens_per_second / r), 2),
            format!("{:.1}", f.ms_per_token),
            f.hit_rate.map_or_else(|| "-".to_owned(), |h| format!("{:.1} %", h * 100.0)),
            maybe(f.bytes_per_token.map(|b| b / 1e6), 1),
            maybe(f.wait_ms_per_token, 1),
            format_bytes(f.peak_bytes),
            format!("{}{}", f.decoded_tokens, if f.capped { " (time limit)" } else { "" }),
        ]);
    }
    style::numbers_right(&mut table);
    println!("{table}");
    footnotes(results).iter().for_each(|note| println!("{note}"));
}

/// What the table does not say.
fn footnotes(results: &Results) -> Vec<String> {
    let row = |contender: &str, ram: Option<u64>| match ram {
        Some(ram) => format!("{contender} {}", format_bytes(ram)),
        None => contender.to_owned(),
    };
    let mut notes: Vec<String> = results
        .failed
        .iter()
        .map(|f| format!("{} did not run: {}", row(f.contender, f.ram), f.reason))
        .collect();
    if let Some(why) = results.runs.iter().find_map(|f| f.no_cgroup.as_ref()) {
        notes.push(format!(
            "Not limited by a cgroup ({why}): mmap may use all memory, peaks are what processes had mapped in."
        ));
    }
    if results.medians.iter().any(|f| f.capped) {
        notes.push("time limit: decoding with mmap ended at --mmap-seconds.".into());
    }
    let mut by_hash = BTreeMap::<(&str, usize), BTreeSet<String>>::new();
    for f in &results.runs {
        if let Some(hash) = &f.sha256_logits {
            by_hash.entry((hash, f.decoded_tokens)).or_default().insert(row(f.contender, f.ram));
        }
    }
    for ((hash, tokens), rows) in by_hash {
        let rows = rows.into_iter().collect::<Vec<_>>().join(", ");
        let hash = hash.get(..16).unwrap_or(hash);
        notes.push(format!("Logits of the prompt and {tokens} tokens, SHA-256 {hash}: {rows}"));
    }
    notes
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

    #[test]
    fn medians_are_taken_figure_by_figure() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        let run = |rate: f64, wait: Option<f64>| Figures {
            contender: "pinscope",
            ram: Some(1),
            prefill_tokens_per_second: 10.0 * rate,
            tokens_per_second: rate,
            ms_per_token: 1e3 / rate,
            decoded_tokens: 8,
            capped: false,
            hit_rate: Some(0.5),
            bytes_per_token: None,
            wait_ms_per_token: wait,
            load_seconds: 0.0,
            peak_bytes: 7,
            no_cgroup: None,
            sha256_logits: None,
        };
        let runs = [run(5.0, Some(1.0)), run(4.0, Some(9.0)), run(100.0, Some(2.0))];
        let m = Figures::median(&runs).unwrap();
        assert_eq!((m.tokens_per_second, m.ms_per_token), (5.0, 200.0));
        assert_eq!((m.wait_ms_per_token, m.bytes_per_token), (Some(2.0), None));
        assert!(Figures::median(&[]).is_none());
    }
}
