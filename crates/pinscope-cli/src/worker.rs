//! The hidden `pinscope worker`: does one [`Job`] from standard input and
//! prints what it measured. See `launch.rs` for the other side.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::Instant;

use pinscope::memory::Footprint;
use pinscope::residency::{Counters, Stats};
use pinscope_host::{Context, ContextOptions, HostError, Logits, Model, ModelOptions};
use sha2::{Digest, Sha256};

use crate::engine::{Caching, Prepared, Session};
use crate::launch::{Contender, Decode, Job, Message, Phase, Report, Window, WINDOW};

/// Entry point of the subcommand.
pub fn main() -> ExitCode {
    let (message, code) = match read_job().and_then(|job| work(&job)) {
        Ok(report) => (Message::Report(Box::new(report)), ExitCode::SUCCESS),
        Err(text) => (Message::Error(text), ExitCode::FAILURE),
    };
    say(&message);
    code
}

fn read_job() -> Result<Job, String> {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|e| format!("cannot read the job from standard input: {e}"))?;
    serde_json::from_str(&text).map_err(|e| {
        format!("`pinscope worker` is started by `verify` and `bench`, not by hand: {e}")
    })
}

/// Prints one message; a parent that has gone away wants no answer.
fn say(message: &Message) {
    if let Ok(line) = serde_json::to_string(message) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

fn progress(what: &str, done: usize, total: usize) {
    say(&Message::Progress { what: what.into(), done: done as u64, total: total as u64 });
}

fn work(job: &Job) -> Result<Report, String> {
    if job.plan_only {
        let prepared = prepare(job)?;
        return prepared.plan.check().map(|()| Report::default()).map_err(text);
    }
    let started = Instant::now();
    let loaded = Loaded::new(job)?;
    let mut context = Context::new(loaded.model(), context_options(job)).map_err(text)?;
    let load_seconds = started.elapsed().as_secs_f64();

    let mut work = Work::new(job, &mut context, &loaded);
    let at_start = loaded.stats();
    work.prefill()?;
    let before = loaded.stats();
    work.decode()?;
    let now = loaded.stats();
    let since = |a: Option<Stats>, b: Option<Stats>, of: fn(&Stats) -> Counters| {
        a.zip(b).map(|(a, b)| of(&b).since(&of(&a)).into())
    };
    let cache = since(before, now, |s| s.decode);
    let prompt_cache = since(at_start, before, |s| s.prompt);
    let Work { prefill, decode, capped, tokens, hashes, windows, .. } = work;
    drop(context);

    let (sha256_logits, vectors) = match hashes {
        Some(hashes) => (Some(hex(&hashes.all.finalize())), hashes.vectors),
        None => (None, Vec::new()),
    };
    Ok(Report {
        load_seconds,
        prefill,
        decode,
        capped,
        cache,
        prompt_cache,
        disk_rate: None,
        windows,
        repins: loaded.repins(),
        process_peak_bytes: Footprint::now().map_err(text)?.peak,
        sha256_tokens: hex(&Sha256::digest(bytes_of(&tokens, i32::to_le_bytes))),
        tokens,
        sha256_logits,
        vectors,
        notes: loaded.notes(),
    })
}

fn prepare(job: &Job) -> Result<Prepared, String> {
    let ram = job.ram.ok_or("a budget is missing from the job")?;
    let mut prepared = Prepared::new(&job.model, ram, &context_options(job)).map_err(text)?;
    if job.contender == Contender::PinscopeProfile {
        prepared.pin(&job.setup.pinning).map_err(text)?;
    }
    Ok(prepared)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A loaded model, with our device or without.
enum Loaded {
    Budgeted(Box<Session>),
    Plain(Model),
}

impl Loaded {
    fn new(job: &Job) -> Result<Loaded, String> {
        let mut hear = |done: f32| progress("loading", (done * 100.0) as usize, 100);
        if job.contender.is_ours() {
            let caching = Caching {
                policy: job.setup.policy,
                reader: job.setup.reader,
                step_aside: job.setup.step_aside,
                prefetch: job.contender != Contender::PinscopeNoPrefetch,
            };
            return prepare(job)?
                .load(caching, &mut hear)
                .map(|s| Loaded::Budgeted(Box::new(s)))
                .map_err(text);
        }
        let mut go_on = |done| {
            hear(done);
            true
        };
        let options = ModelOptions {
            repack: job.contender == Contender::ResidentRepacked,
            // Below the model's size, reading it all at start is work for
            // nothing: it does not stay.
            read_ahead: !job.contender.is_mmap(),
            progress: Some(&mut go_on),
            ..ModelOptions::default()
        };
        Model::load(&job.model, options).map(Loaded::Plain).map_err(text)
    }

    fn model(&self) -> &Model {
        match self {
            Loaded::Budgeted(session) => &session.model,
            Loaded::Plain(model) => model,
        }
    }

    fn stats(&self) -> Option<Stats> {
        match self {
            Loaded::Budgeted(session) => session.stats(),
            Loaded::Plain(_) => None,
        }
    }

    /// Counters of all one-token passes so far.
    fn counters(&self) -> Option<Counters> {
        Some(self.stats()?.decode)
    }

    fn repins(&self) -> u64 {
        self.stats().map_or(0, |s| s.repins)
    }

    fn notes(&self) -> Vec<String> {
        match self {
            Loaded::Budgeted(session) => session.notes(),
            Loaded::Plain(_) => Vec::new(),
        }
    }

    fn explain(&self, error: HostError) -> String {
        match self {
            Loaded::Budgeted(session) => session.explain(error),
            Loaded::Plain(_) => error.to_string(),
        }
    }
}

/// What both the planner and llama.cpp must know of the context of `job`.
pub fn context_options(job: &Job) -> ContextOptions {
    ContextOptions {
        n_ctx: job.n_ctx,
        n_batch: job.setup.n_ubatch,
        n_ubatch: job.setup.n_ubatch,
        max_outputs: if job.hash_logits { job.setup.n_ubatch } else { 1 },
        threads: job.setup.threads,
        threads_batch: job.setup.threads,
        ..ContextOptions::default()
    }
}

/// The work itself, and what came of it so far.
struct Work<'a, 'm> {
    job: &'a Job,
    context: &'a mut Context<'m>,
    loaded: &'a Loaded,
    prefill: Phase,
    decode: Phase,
    capped: bool,
    /// What the model found likeliest after the prompt and after each token.
    tokens: Vec<i32>,
    windows: Vec<Window>,
    hashes: Option<LogitsHash>,
}

impl<'a, 'm> Work<'a, 'm> {
    fn new(job: &'a Job, context: &'a mut Context<'m>, loaded: &'a Loaded) -> Self {
        Work {
            job,
            context,
            loaded,
            prefill: Phase::default(),
            decode: Phase::default(),
            capped: false,
            tokens: Vec::new(),
            windows: Vec::new(),
            hashes: job.hash_logits.then(LogitsHash::default),
        }
    }

    fn prefill(&mut self) -> Result<(), String> {
        let total = self.job.prompt.len();
        for chunk in self.job.prompt.chunks(self.job.setup.n_ubatch as usize) {
            let done = self.prefill.tokens;
            progress("prompt", done, total);
            let last = done + chunk.len() == total;
            let logits = match (self.hashes.is_some(), last) {
                (true, _) => Logits::All,
                (false, true) => Logits::Last,
                (false, false) => Logits::None,
            };
            let seconds = self.pass(chunk, done, logits)?;
            self.prefill.add(chunk.len(), seconds);
        }
        Ok(())
    }

    /// One token after the other, until all are done or time is up.
    fn decode(&mut self) -> Result<(), String> {
        let total = match &self.job.decode {
            Decode::Forced(forced) => forced.len(),
            Decode::Greedy(count) => *count,
        };
        let mut before = self.loaded.counters();
        while self.decode.tokens < total {
            let done = self.decode.tokens;
            if done > 0 && done.is_multiple_of(WINDOW) {
                let now = self.loaded.counters();
                self.windows
                    .extend(now.zip(before).map(|(now, before)| window(now.since(&before))));
                before = now;
            }
            self.capped = self.job.max_decode_seconds.is_some_and(|max| self.decode.seconds >= max);
            if self.capped {
                break;
            }
            progress("tokens", done, total);
            let next = match &self.job.decode {
                Decode::Forced(forced) => forced.get(done),
                Decode::Greedy(_) => self.tokens.last(),
            };
            let next = *next.ok_or("nothing to continue from: the prompt is empty")?;
            let seconds = self.pass(&[next], self.job.prompt.len() + done, Logits::Last)?;
            self.decode.add(1, seconds);
        }
        Ok(())
    }

    /// Decodes `tokens` at `position` and returns the time that took, seconds;
    /// looks at the logits outside of that time.
    fn pass(&mut self, tokens: &[i32], position: usize, logits: Logits) -> Result<f64, String> {
        let started = Instant::now();
        self.context
            .decode(tokens, position as u32, logits)
            .map_err(|error| self.loaded.explain(error))?;
        let seconds = started.elapsed().as_secs_f64();
        let rows = match logits {
            Logits::All => tokens.len(),
            Logits::Last => 1,
            Logits::None => return Ok(seconds),
        };
        if let Some(hashes) = &mut self.hashes {
            (0..rows).for_each(|row| hashes.add(self.context.logits(row)));
        }
        let end = position + tokens.len();
        if end >= self.job.prompt.len() {
            self.tokens.extend(likeliest(self.context.logits(rows - 1)));
        }
        Ok(seconds)
    }
}

fn window(c: Counters) -> Window {
    Window { hits: c.hits, pinned_hits: c.pinned_hits, misses: c.misses }
}

/// SHA-256 of all logits vectors, together and one by one.
#[derive(Default)]
struct LogitsHash {
    all: Sha256,
    vectors: Vec<String>,
}

impl LogitsHash {
    fn add(&mut self, logits: &[f32]) {
        let bytes = bytes_of(logits, f32::to_le_bytes);
        self.all.update(&bytes);
        let mut first = hex(&Sha256::digest(&bytes));
        first.truncate(16);
        self.vectors.push(first);
    }
}

fn bytes_of<T: Copy>(values: &[T], to_bytes: fn(T) -> [u8; 4]) -> Vec<u8> {
    values.iter().flat_map(|&v| to_bytes(v)).collect()
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The likeliest token; the first one of several.
fn likeliest(logits: &[f32]) -> Option<i32> {
    let mut best: Option<(usize, f32)> = None;
    for (token, &value) in logits.iter().enumerate() {
        if best.is_none_or(|(_, most)| value > most) {
            best = Some((token, value));
        }
    }
    best.map(|(token, _)| token as i32)
}
