//! Writing big files: whole or not at all, and without filling the page cache.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Bytes gathered before a write.
const BUFFER: usize = 4 << 20;
/// Bytes between two requests to write back and forget cached pages.
const WINDOW: u64 = 64 << 20;

/// A file under a temporary name beside its target. It gets its real name by
/// [`PartialFile::publish`] and vanishes when dropped before that.
pub struct PartialFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
    buffer: Vec<u8>,
    size: u64,
    written: u64,
    flushed: u64,
    published: bool,
}

impl PartialFile {
    /// Creates the temporary file and reserves `size` bytes for it.
    ///
    /// # Errors
    /// [`Error::NoRoom`] when the disk cannot hold `size` bytes, [`Error::Usage`] when
    /// `target` exists and is no regular file, [`Error::Io`] otherwise.
    pub fn create(target: &Path, size: u64) -> Result<Self, Error> {
        if std::fs::metadata(target).is_ok_and(|m| !m.is_file()) {
            return Err(Error::Usage(format!(
                "{} exists and is not a regular file; give the name of a file to write",
                target.display()
            )));
        }
        let Some(name) = target.file_name() else {
            return Err(Error::Usage(format!("{} names no file", target.display())));
        };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.partial", std::process::id()));
        let temporary = target.with_file_name(hidden);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(|e| Error::write(target, size, e))?;
        let partial = Self {
            file,
            temporary,
            target: target.to_path_buf(),
            buffer: Vec::with_capacity(BUFFER),
            size,
            written: 0,
            flushed: 0,
            published: false,
        };
        reserve(&partial.file, size).map_err(|e| partial.error(e))?;
        Ok(partial)
    }

    /// Bytes written so far.
    pub fn position(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    /// When the disk refuses them.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let take = bytes.len().min(BUFFER - self.buffer.len());
            self.buffer.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.buffer.len() == BUFFER {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Appends zeros up to `position`.
    ///
    /// # Errors
    /// When the disk refuses them.
    pub fn pad_to(&mut self, position: u64) -> Result<(), Error> {
        let missing = position.checked_sub(self.position()).expect("only forward");
        self.write(&vec![0u8; missing as usize])
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.file.write_all(&self.buffer).map_err(|e| self.error(e))?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        if self.written - self.flushed >= WINDOW {
            self.forget_cached();
        }
        Ok(())
    }

    /// Starts write-back of the newest window and drops the one before it, which has
    /// had time to reach the disk. So at most two windows stay in the page cache.
    fn forget_cached(&mut self) {
        let previous = self.flushed.saturating_sub(WINDOW);
        write_back(&self.file, self.flushed, self.written - self.flushed, false);
        write_back(&self.file, previous, self.flushed - previous, true);
        drop_cache(&self.file, previous, self.flushed - previous);
        self.flushed = self.written;
    }

    fn error(&self, source: io::Error) -> Error {
        Error::write(&self.target, self.size, source)
    }

    /// Gives the file its real name, replacing what had it.
    ///
    /// # Errors
    /// When the last bytes cannot be written or the name cannot be taken.
    pub fn publish(mut self) -> Result<PathBuf, Error> {
        self.flush()?;
        self.file
            .set_len(self.written)
            .and_then(|()| self.file.sync_data())
            .and_then(|()| std::fs::rename(&self.temporary, &self.target))
            .map_err(|e| self.error(e))?;
        drop_cache(&self.file, 0, self.written);
        self.published = true;
        Ok(self.target.clone())
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.published {
            // Nothing more can be done about a temporary file that cannot be removed.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Reserves disk blocks, so that a full disk shows before the work and not after it.
fn reserve(file: &File, size: u64) -> io::Result<()> {
    // SAFETY: a plain system call on an open descriptor.
    let rc = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, size as libc::off_t) };
    if rc == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINTR) => Ok(()),
        _ => Err(error),
    }
}

/// Starts, or with `wait` also awaits, write-back of a range. Only a hint: a real write
/// error shows again in `sync_data`.
fn write_back(file: &File, offset: u64, len: u64, wait: bool) {
    let mut flags = libc::SYNC_FILE_RANGE_WRITE;
    if wait {
        flags |= libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    }
    if len > 0 {
        // SAFETY: a plain system call on an open descriptor.
        unsafe { libc::sync_file_range(file.as_raw_fd(), offset as i64, len as i64, flags) };
    }
}

fn drop_cache(file: &File, offset: u64, len: u64) {
    // SAFETY: a plain system call on an open descriptor; only a hint.
    unsafe {
        libc::posix_fadvise(file.as_raw_fd(), offset as i64, len as i64, libc::POSIX_FADV_DONTNEED)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_file_holds_exactly_what_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a.gguf");
        let mut partial = PartialFile::create(&target, 100).unwrap();
        partial.write(b"abc").unwrap();
        partial.pad_to(8).unwrap();
        partial.write(b"d").unwrap();
        assert!(!target.exists());
        partial.publish().unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"abc\0\0\0\0\0d");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn dropped_file_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let mut partial = PartialFile::create(&dir.path().join("a.gguf"), 100).unwrap();
        partial.write(b"abc").unwrap();
        drop(partial);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_device_as_target_is_refused_and_not_replaced() {
        let error = PartialFile::create(Path::new("/dev/full"), 1).err().unwrap();
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }

    #[test]
    fn a_disk_that_fills_up_while_writing_is_named_as_such() {
        let dir = tempfile::tempdir().unwrap();
        let mut partial = PartialFile::create(&dir.path().join("a.gguf"), 100).unwrap();
        partial.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = partial.write(&vec![1; 2 * BUFFER]).unwrap_err();
        assert!(matches!(error, Error::NoRoom { needed: 100, .. }), "{error}");
    }

    #[test]
    fn a_size_that_no_disk_has_is_refused_before_writing() {
        let dir = tempfile::tempdir().unwrap();
        let error = PartialFile::create(&dir.path().join("a.gguf"), 1 << 60).err().unwrap();
        assert!(matches!(error, Error::NoRoom { .. }), "{error}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
