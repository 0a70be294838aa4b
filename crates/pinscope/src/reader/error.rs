//! What can go wrong when model files are read.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::ReadRequest;

/// Why a read, or reading as such, failed.
#[derive(Debug, Error)]
pub enum ReadError {
    /// A file cannot be opened.
    #[error("cannot open model file {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file is no longer what it was when its header was read.
    #[error("model file {} changed while in use ({what}), so its bytes can no longer be trusted; leave the file alone and start again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// What differs, with both values.
        what: String,
    },
    /// The file ended before the last wanted byte.
    #[error("model file {} ended early: wanted {wanted} bytes at {offset}, got {got}; it was cut short while in use, get it again and start again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Where the read began, bytes.
        offset: u64,
        /// Bytes wanted.
        wanted: usize,
        /// Bytes that came.
        got: usize,
    },
    /// The device or file system failed.
    #[error("reading {len} bytes at {offset} of model file {} failed: {source}; check the disk (dmesg) and the file", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Where the read began, bytes.
        offset: u64,
        /// Length of the read, bytes.
        len: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// A request that breaks the rules of [`ReadRequest`]: a bug of the
    /// caller.
    #[error(
        "read request refused: {why} ({request:?}); this is a bug in pinscope, please report it"
    )]
    Contract {
        /// The request.
        request: ReadRequest,
        /// Which rule it breaks.
        why: String,
    },
    /// The prefetch was taken back before it was read.
    #[error("the prefetch was cancelled before it was read")]
    Cancelled,
    /// A kind of reader does not work on this machine.
    #[error("{reader} cannot be used here: {source}{hint}")]
    Unavailable {
        /// Name of the reader.
        reader: &'static str,
        /// What the kernel said.
        source: io::Error,
        /// What to do, in parentheses, or empty.
        hint: &'static str,
    },
    /// The connection to the kernel broke; nothing can be read any more.
    #[error("{reader} stopped working: {source}; start again with another reader")]
    Broken {
        /// Name of the reader.
        reader: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}
