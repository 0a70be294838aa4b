//! What can go wrong while models are made or measured.

use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate. Every message says what happened and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The disk (or a quota, or a file size limit) has no room for the file.
    #[error("no room for {path}: {needed} bytes are needed ({source}). Free some space or choose another disk; nothing was left behind")]
    NoRoom {
        /// The file that was being written.
        path: PathBuf,
        /// Bytes that the file needs in all.
        needed: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// Any other failure of a file operation.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The input is not a GGUF file, or not one that this command can use.
    #[error("{path}: {reason}")]
    BadModel {
        /// The file.
        path: PathBuf,
        /// What was expected and what was found.
        reason: String,
    },
    /// An option that contradicts the shape, the base model or another option.
    #[error("{0}")]
    Usage(String),
    /// llama.cpp refused something.
    #[error(transparent)]
    Host(#[from] pinscope_host::HostError),
}

impl Error {
    /// Wraps an I/O error; a full disk becomes [`Error::NoRoom`].
    pub(crate) fn write(path: &Path, needed: u64, source: io::Error) -> Self {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let path = path.to_path_buf();
        match source.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => Self::NoRoom { path, needed, source },
            _ => Self::Io { action: "write", path, source },
        }
    }

    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        Self::Io { action: "read", path: path.to_path_buf(), source }
    }

    pub(crate) fn bad_model(path: &Path, reason: impl Into<String>) -> Self {
        Self::BadModel { path: path.to_path_buf(), reason: reason.into() }
    }
}
