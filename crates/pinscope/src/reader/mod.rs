//! Readers bring byte ranges of the model files into the arena.
//!
//! A reader is driven by one caller at a time: [`Reader::submit`] queues,
//! [`Reader::kick`] hands queued work to the kernel, [`Reader::reap`] collects
//! what is done. Whole pages are read in place with `O_DIRECT`; nothing is
//! copied.

mod error;
pub mod faulty;
mod file;
mod pace;
mod places;
mod pread;
mod queue;
mod tune;
mod uring;

use std::ops::Range;
use std::sync::Arc;

use crate::arena::Arena;

pub use error::ReadError;
pub use file::ModelFiles;
pub use places::Places;
pub use tune::{tune, tune_ahead};

/// Unit of reading: file offsets, arena offsets and lengths given to the
/// kernel are multiples of it.
pub const ALIGN: usize = 4096;

/// How urgent a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadClass {
    /// Arithmetic waits for it.
    Demand,
    /// It may be wanted later.
    Prefetch,
}

/// One byte range wanted in the arena.
///
/// `dest` and `offset` agree modulo [`ALIGN`], and the whole pages around
/// `dest..dest + len` belong to the request: what lies beside the wanted bytes
/// is overwritten with the file's neighbouring bytes (or not, where the file
/// ends).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRequest {
    /// Given back in [`ReadDone`]; meaningless to the reader.
    pub tag: u64,
    /// Index into the files that the reader was opened with.
    pub file: u16,
    /// First wanted byte in the file.
    pub offset: u64,
    /// Wanted bytes, at least 1.
    pub len: usize,
    /// Arena offset of the first wanted byte.
    pub dest: usize,
    /// How urgent it is.
    pub class: ReadClass,
}

/// A request that is over: the reader touches its memory no more.
#[derive(Debug)]
pub struct ReadDone {
    /// The request's tag.
    pub tag: u64,
    /// `Ok` only if every wanted byte is in place and the file is unchanged.
    pub result: Result<(), ReadError>,
}

/// What the device did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Busy {
    /// Bytes read.
    pub bytes: u64,
    /// Time in which at least one read was in flight, nanoseconds. Times of
    /// which it was not seen when they ended count neither here nor in
    /// `bytes`.
    pub nanoseconds: u64,
}

impl Busy {
    /// Bytes a second while busy; `None` before anything was measured.
    pub fn bandwidth(&self) -> Option<f64> {
        (self.nanoseconds > 0).then(|| self.bytes as f64 * 1e9 / self.nanoseconds as f64)
    }

    /// What happened since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Busy {
            bytes: self.bytes - earlier.bytes,
            nanoseconds: self.nanoseconds - earlier.nanoseconds,
        }
    }
}

/// Reads model files into an arena, most urgent first.
pub trait Reader: Send {
    /// Queues a request. Demand goes before every queued prefetch, and in the
    /// order of submission otherwise.
    ///
    /// # Errors
    /// [`ReadError::Contract`] for a request that breaks the rules of
    /// [`ReadRequest`]; nothing is queued then.
    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadError>;

    /// Hands queued work to the kernel now, as much as it should have at once.
    /// Cheap; a failure shows up in the next [`Reader::reap`].
    fn kick(&mut self);

    /// Appends everything that is done to `done` and hands on queued work.
    /// With `block`, waits until there is something, unless nothing is
    /// outstanding.
    ///
    /// # Errors
    /// Only if reading as such no longer works ([`ReadError::Broken`]); the
    /// failure of one request is in its [`ReadDone`].
    fn reap(&mut self, done: &mut Vec<ReadDone>, block: bool) -> Result<(), ReadError>;

    /// Takes back every prefetch that the kernel does not have yet, as
    /// [`ReadError::Cancelled`]; those it has in part follow in a later
    /// [`Reader::reap`].
    fn cancel_queued_prefetches(&mut self, done: &mut Vec<ReadDone>);

    /// Makes the prefetch `tag`, if still outstanding, a demand read (behind
    /// those already queued).
    fn promote(&mut self, tag: u64);

    /// Lets go of what the reader holds of the arena's `range`, so that it can
    /// be released; nothing of it is being read. Readers that hold nothing do
    /// nothing.
    fn forget(&mut self, _range: Range<usize>) {}

    /// How much was read since the start and how long that took; cheap.
    fn busy(&self) -> Busy;

    /// Requests submitted and not yet given back.
    fn outstanding(&self) -> usize;

    /// Name for reports.
    fn name(&self) -> &'static str;
}

/// Which reader to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReaderKind {
    /// io_uring where the kernel allows it, the pread pool otherwise.
    Auto,
    /// io_uring or an error.
    Uring,
    /// A pool of threads that call `pread`.
    Pread,
}

/// How much is read at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReaderOptions {
    /// Bytes of one read of the kernel; a multiple of [`ALIGN`].
    pub chunk: usize,
    /// Demand reads that the kernel has at once (io_uring).
    pub depth: usize,
    /// Threads of the pread pool.
    pub threads: usize,
    /// Bytes a second that the device is thought to read until it has shown
    /// what it does; prefetches in flight depend on it.
    pub bandwidth: u64,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        // Larger reads are no faster, smaller ones cost more CPU.
        ReaderOptions { chunk: 1 << 20, depth: 16, threads: 4, bandwidth: 1_000_000_000 }
    }
}

/// What the user should be told once about how reading works here; one
/// sentence each, empty when everything is as it should be.
pub type ReaderNotes = Vec<String>;

/// Opens a reader of `files` into `arena`. When [`tune_ahead`] has found out
/// what suits these files, the reader goes on with that instead of `options`.
///
/// # Errors
/// [`ReadError::Unavailable`] if the kind asked for does not work here; `Auto`
/// falls back first, and says why in the notes.
pub fn open_reader(
    files: impl Into<Arc<ModelFiles>>,
    arena: Arc<Arena>,
    kind: ReaderKind,
    options: ReaderOptions,
) -> Result<(Box<dyn Reader>, ReaderNotes), ReadError> {
    let files = files.into();
    let mut notes: ReaderNotes = files.notes().to_vec();
    if kind != ReaderKind::Pread {
        match uring::UringReader::open(files.clone(), arena.clone(), options, &mut notes) {
            Ok(reader) => return Ok((Box::new(reader), notes)),
            Err(e) if kind == ReaderKind::Uring => return Err(e),
            Err(e) => notes.push(format!("{e}; reading with a pool of threads instead")),
        }
    }
    let reader = pread::PreadReader::open(files, arena, options)?;
    Ok((Box::new(reader), notes))
}

/// Checks a request against the rules of [`ReadRequest`].
fn check_request(r: &ReadRequest, files: &ModelFiles, arena: &Arena) -> Result<(), ReadError> {
    let broken = |why: String| Err(ReadError::Contract { request: *r, why });
    let Some(size) = files.size(r.file) else {
        return broken(format!("there are {} files", files.count()));
    };
    if r.len == 0 {
        return broken("it wants no bytes".into());
    }
    if r.offset.checked_add(r.len as u64).is_none_or(|e| e > size) {
        return broken(format!("the file has {size} bytes"));
    }
    if r.offset % ALIGN as u64 != (r.dest % ALIGN) as u64 {
        return broken(format!("offset and dest differ modulo {ALIGN}"));
    }
    let end = r.dest.checked_add(r.len);
    if end.is_none_or(|e| e > arena.len()) {
        return broken(format!("the arena has {} bytes", arena.len()));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
