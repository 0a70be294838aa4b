//! One measured run in a fresh process: what to do ([`Job`]), how it went
//! ([`Report`]), and the parent's side of it. The child's side is `worker.rs`.
//!
//! A fresh process per run keeps one contender's page cache, heap and threads
//! out of the next one's figures, and lets the kernel limit and measure each.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use pinscope::map::ModelFile;
use pinscope::memory::format_bytes;
use pinscope::policy::PolicyKind;
use pinscope::reader::ReaderKind;
use pinscope::residency::Counters;
use pinscope::timeline::Activity;
use serde::{Deserialize, Serialize};

use crate::cgroup::MemoryGroup;
use crate::pinning::Pinning;
use crate::sidecar::Sidecar;
use crate::style;

/// Who does the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contender {
    /// Our device, experts in an arena of bounded size.
    Pinscope,
    /// The same with pins by a profile.
    PinscopeProfile,
    /// Without a profile and without reading ahead.
    PinscopeNoPrefetch,
    /// Plain llama.cpp under a memory limit: the page cache decides.
    Mmap,
    /// The same beside `pinscope pin`, both under the limit.
    MmapPin,
    /// Plain llama.cpp, everything in memory, weights as they are in the file.
    Resident,
    /// Plain llama.cpp as it comes: everything in memory, weights repacked.
    ResidentRepacked,
}

impl Contender {
    /// PinScope itself.
    pub fn is_ours(self) -> bool {
        matches!(
            self,
            Contender::Pinscope | Contender::PinscopeProfile | Contender::PinscopeNoPrefetch
        )
    }

    /// Plain llama.cpp that lives from the page cache.
    pub fn is_mmap(self) -> bool {
        matches!(self, Contender::Mmap | Contender::MmapPin)
    }

    /// The name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Contender::Pinscope => "pinscope",
            Contender::PinscopeProfile => "pinscope-profile",
            Contender::PinscopeNoPrefetch => "no-prefetch",
            Contender::Mmap => "mmap",
            Contender::MmapPin => "mmap-pin",
            Contender::Resident => "resident",
            Contender::ResidentRepacked => "resident-repacked",
        }
    }
}

/// What to decode after the prompt.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decode {
    /// These tokens, whatever the model would have said: the same work for all.
    Forced(Vec<i32>),
    /// As many tokens as this, each the likeliest after the one before.
    Greedy(usize),
}

/// How a contender computes, the same for all, and how [`Contender::Pinscope`]
/// keeps and reads its experts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    pub threads: u32,
    /// Tokens computed at once in the prompt.
    pub n_ubatch: u32,
    #[serde(with = "by_name")]
    pub policy: PolicyKind,
    #[serde(with = "ReaderName")]
    pub reader: ReaderKind,
    /// Leave a model that fits to plain llama.cpp.
    pub step_aside: bool,
    pub pinning: Pinning,
}

/// One run, complete: a child needs nothing else.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// The model, or the first part of a split one.
    pub model: PathBuf,
    pub contender: Contender,
    /// Memory for the whole process, bytes (our contenders only).
    pub ram: Option<u64>,
    pub setup: Setup,
    /// Context length, tokens.
    pub n_ctx: u32,
    pub prompt: Vec<i32>,
    pub decode: Decode,
    /// Hash every logits vector: of all prompt tokens and all decoded ones.
    pub hash_logits: bool,
    /// Stop decoding after about this long.
    pub max_decode_seconds: Option<f64>,
    /// Only see whether `ram` is enough; nothing is loaded.
    pub plan_only: bool,
}

/// How [`ReaderKind`] is written in a job.
#[derive(Serialize, Deserialize)]
#[serde(remote = "ReaderKind")]
enum ReaderName {
    Auto,
    Uring,
    Pread,
}

/// Writes a value in its `Display` form and reads it with `FromStr`.
mod by_name {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A timed stretch of work.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Phase {
    pub tokens: usize,
    /// Time in llama.cpp's decode calls alone, without hashing.
    pub seconds: f64,
}

impl Phase {
    /// Adds a pass of so many tokens.
    pub fn add(&mut self, tokens: usize, seconds: f64) {
        self.tokens += tokens;
        self.seconds += seconds;
    }

    /// Tokens a second; 0 for an empty phase.
    pub fn rate(&self) -> f64 {
        if self.seconds > 0.0 {
            self.tokens as f64 / self.seconds
        } else {
            0.0
        }
    }
}

/// What the expert cache did in one phase.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct CacheUse {
    pub hits: u64,
    pub misses: u64,
    pub bytes_read: u64,
    /// Without what was read in vain.
    pub bytes_needed: u64,
    /// Time of each of [`Activity::ALL`], nanoseconds.
    pub split_ns: [u64; Activity::ALL.len()],
    pub recall: Option<f64>,
    pub recall_on_misses: Option<f64>,
    pub precision_on_misses: Option<f64>,
}

impl From<Counters> for CacheUse {
    fn from(c: Counters) -> CacheUse {
        CacheUse {
            hits: c.hits,
            misses: c.misses,
            bytes_read: c.bytes_read,
            bytes_needed: c.bytes_needed,
            split_ns: Activity::ALL.map(|a| c.split.ns(a)),
            recall: c.prediction.recall(),
            recall_on_misses: c.prediction.recall_on_misses(),
            precision_on_misses: c.prediction.precision_on_misses(),
        }
    }
}

impl CacheUse {
    /// Share of needed experts that were in memory, 0 to 1; 1 when none was needed.
    pub fn hit_rate(&self) -> f64 {
        match self.hits + self.misses {
            0 => 1.0,
            needed => self.hits as f64 / needed as f64,
        }
    }

    /// Milliseconds of an activity.
    pub fn ms(&self, activity: Activity) -> f64 {
        let at = Activity::ALL.iter().position(|&a| a == activity);
        at.map_or(0.0, |at| self.split_ns[at] as f64 / 1e6)
    }
}

/// Decoded tokens of a [`Window`].
pub const WINDOW: usize = 32;

/// What became of the experts that some tokens in a row needed.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Window {
    /// In memory.
    pub hits: u64,
    /// Of those, pinned.
    pub pinned_hits: u64,
    pub misses: u64,
}

/// What a child measured of itself.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    pub load_seconds: f64,
    pub prefill: Phase,
    pub decode: Phase,
    /// Decoding ended early, at [`Job::max_decode_seconds`].
    pub capped: bool,
    /// Of decoding; `None` for plain llama.cpp, or when all experts fit and we
    /// stepped aside.
    pub cache: Option<CacheUse>,
    /// Of the prompt.
    pub prompt_cache: Option<CacheUse>,
    /// What the disk gave while it was read from, bytes a second.
    pub disk_rate: Option<f64>,
    /// The same over [`WINDOW`] tokens at a time.
    pub windows: Vec<Window>,
    /// Times that pins moved.
    pub repins: u64,
    /// Most memory the process had mapped in (VmHWM), bytes.
    pub process_peak_bytes: u64,
    /// The tokens that were decoded.
    pub tokens: Vec<i32>,
    /// SHA-256 over all logits in order, hex; with [`Job::hash_logits`].
    pub sha256_logits: Option<String>,
    /// SHA-256 over `tokens`, hex.
    pub sha256_tokens: String,
    /// The first 16 hex digits of each single logits vector's SHA-256.
    pub vectors: Vec<String>,
    /// What the user should know of this run (a fallback that was taken).
    pub notes: Vec<String>,
}

/// One line that a child prints.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Message {
    Progress { what: String, done: u64, total: u64 },
    Report(Box<Report>),
    Error(String),
}

/// A finished run, with what was seen from outside.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub report: Report,
    /// Most memory used; with the page cache it caused, where a cgroup counted.
    pub peak_bytes: u64,
    /// Why no cgroup counted or limited this run; `None` when one did.
    pub no_cgroup: Option<String>,
    /// How often the limit was met (see [`MemoryGroup::limit_hits`]).
    pub limit_hits: Option<u64>,
}

/// A run that gave no report.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("cannot start a child process for the {who} run: {source}")]
    Start { who: &'static str, source: std::io::Error },
    #[error("{0}")]
    Child(String),
    #[error("the {who} run was killed (signal {signal}){hint}")]
    Killed { who: &'static str, signal: i32, hint: String },
    #[error("the {who} run ended ({status}) without a result; its last words, if any, are above")]
    NoReport { who: &'static str, status: ExitStatus },
}

/// Runs `job` in a fresh process that may use `limit` bytes (`None`: counted
/// only), where a cgroup can be had; a terminal shows `label` and how far it is.
///
/// The page cache of the model's `files` is dropped first: pages that are there
/// already would be free for whoever comes next, and counted for nobody.
pub fn launch(
    job: &Job,
    label: &str,
    files: &[ModelFile],
    limit: Option<u64>,
) -> Result<Outcome, LaunchError> {
    if job.contender.is_ours() && limit.is_some() {
        // Below its limit a process can be too small to say that it is: the
        // plan is tried without one.
        let trial = Job { plan_only: true, ..job.clone() };
        run_child(&trial, label, None, limit)?;
    }
    for file in files {
        drop_page_cache(&file.path);
    }
    let (group, no_cgroup) = match MemoryGroup::create(limit) {
        Ok(group) => (Some(group), None),
        Err(why) => (None, Some(why)),
    };
    let started = Instant::now();
    let _sidecar = match (job.contender, limit) {
        (Contender::MmapPin, Some(limit)) => {
            Some(Sidecar::start(job, group.as_ref(), limit).map_err(LaunchError::Child)?)
        }
        _ => None,
    };
    let pinned_after = started.elapsed().as_secs_f64();
    let mut report = run_child(job, label, group.as_ref(), limit)?;
    if job.contender == Contender::MmapPin {
        report.load_seconds += pinned_after;
    }
    Ok(Outcome {
        // A cgroup sees page cache that is not mapped, the process sees mapped
        // pages (of libraries) that others have paid for: the larger counts.
        peak_bytes: group
            .as_ref()
            .and_then(MemoryGroup::peak_bytes)
            .unwrap_or(0)
            .max(report.process_peak_bytes),
        limit_hits: group.as_ref().and_then(MemoryGroup::limit_hits),
        no_cgroup,
        report,
    })
}

fn run_child(
    job: &Job,
    label: &str,
    group: Option<&MemoryGroup>,
    limit: Option<u64>,
) -> Result<Report, LaunchError> {
    let who = job.contender.name();
    let start_error = |source| LaunchError::Start { who, source };
    let mut child = start(job, group).map_err(start_error)?;
    let last = converse(label, &mut child);
    let status = child.wait().map_err(start_error)?;
    match last {
        Some(Message::Report(report)) => Ok(*report),
        Some(Message::Error(text)) => Err(LaunchError::Child(text)),
        _ => Err(ended_without_report(who, status, limit)),
    }
}

fn start(job: &Job, group: Option<&MemoryGroup>) -> std::io::Result<Child> {
    // The very program that runs now, even if its file was replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("pinscope").arg("worker").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = match group {
        Some(group) => group.spawn(&mut command)?,
        None => command.spawn()?,
    };
    if let Some(mut stdin) = child.stdin.take() {
        // A child that is gone already tells more by its exit status.
        let _ = stdin.write_all(&serde_json::to_vec(job)?);
    }
    Ok(child)
}

/// Reads the child's messages to the end; the last one that is no progress counts.
fn converse(label: &str, child: &mut Child) -> Option<Message> {
    let bar = style::bar("", 1);
    let mut last = None;
    for line in BufReader::new(child.stdout.take()?).lines() {
        match serde_json::from_str(&line.ok()?) {
            Ok(Message::Progress { what, done, total }) => {
                bar.set_message(format!("{label}: {what}"));
                bar.set_length(total);
                bar.set_position(done);
            }
            Ok(message) => last = Some(message),
            Err(_) => {}
        }
    }
    bar.finish_and_clear();
    last
}

fn ended_without_report(who: &'static str, status: ExitStatus, limit: Option<u64>) -> LaunchError {
    use std::os::unix::process::ExitStatusExt;
    match status.signal() {
        Some(signal) => LaunchError::Killed {
            who,
            signal,
            hint: match (signal, limit) {
                (libc::SIGKILL, Some(bytes)) => {
                    format!(
                        ": most likely it needed more than its limit of {}",
                        format_bytes(bytes)
                    )
                }
                (libc::SIGKILL, None) => ": most likely the machine ran out of memory".into(),
                _ => String::new(),
            },
        },
        None => LaunchError::NoReport { who, status },
    }
}

/// Asks the kernel to forget what it cached of a file. Not being able to
/// matters for the figures only, so there is no error.
fn drop_page_cache(path: &Path) {
    use std::os::fd::AsRawFd;
    if let Ok(file) = std::fs::File::open(path) {
        // Pages not yet written cannot be dropped: a model made a moment ago.
        let _ = file.sync_all();
        // SAFETY: the descriptor is open for the length of the call.
        unsafe {
            libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED);
        }
    }
}
