//! The model files, opened for reading past the page cache where possible.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::{ReadError, ReaderOptions, ALIGN};
use crate::arena::Arena;
use crate::map::ModelFile;

/// Bytes that [`ModelFiles::read_into`] reads at once, and how many threads do.
const PIECE: usize = 1 << 20;
const THREADS: usize = 4;

/// The files of one model, as they were when opened.
#[derive(Debug)]
pub struct ModelFiles {
    files: Vec<OpenFile>,
    notes: Vec<String>,
    /// How they are best read, once that was measured.
    tuned: OnceLock<ReaderOptions>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: File,
    /// Opened with `O_DIRECT`.
    direct: bool,
    stamp: Stamp,
}

/// Tells whether contents may have changed. The change time is left out on
/// purpose: a rename, a hard link or a chmod sets it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    size: u64,
    mtime: (i64, i64),
}

impl ModelFiles {
    /// Opens every file, with `O_DIRECT` where its file system takes that.
    ///
    /// # Errors
    /// [`ReadError::Open`], or [`ReadError::Changed`] if a file is not as long
    /// as it was when its header was read.
    pub fn open(files: &[ModelFile]) -> Result<ModelFiles, ReadError> {
        Self::open_with(files, true)
    }

    /// As if the file system refused `O_DIRECT`.
    #[cfg(test)]
    pub(super) fn open_buffered(files: &[ModelFile]) -> Result<ModelFiles, ReadError> {
        Self::open_with(files, false)
    }

    fn open_with(files: &[ModelFile], direct: bool) -> Result<ModelFiles, ReadError> {
        let mut opened = ModelFiles {
            files: Vec::with_capacity(files.len()),
            notes: Vec::new(),
            tuned: OnceLock::new(),
        };
        for ModelFile { path, len, .. } in files {
            let f = OpenFile::open(path, direct)
                .map_err(|source| ReadError::Open { path: path.clone(), source })?;
            if f.stamp.size != *len {
                let what = format!("{len} bytes before, {} bytes now", f.stamp.size);
                return Err(f.changed(what));
            }
            if !f.direct && opened.notes.is_empty() {
                opened.notes.push(format!(
                    "the file system of {} does not take O_DIRECT: reading through the page cache, and dropping from it what was read",
                    path.display()
                ));
            }
            opened.files.push(f);
        }
        Ok(opened)
    }

    /// Number of files.
    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// What the user should know about these files.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What was measured to suit these files, with the bandwidth that their
    /// device showed; see [`super::tune_ahead`].
    pub fn tuned(&self) -> Option<ReaderOptions> {
        self.tuned.get().copied()
    }

    /// Tells readers of these files what suits them; the first word counts.
    pub(super) fn set_tuned(&self, options: ReaderOptions) {
        let _ = self.tuned.set(options);
    }

    /// Lengths of all files, bytes.
    pub(super) fn lens(&self) -> impl Iterator<Item = u64> + '_ {
        self.files.iter().map(|f| f.stamp.size)
    }

    /// Length of file `file`, bytes, if there is such a file.
    pub(super) fn size(&self, file: u16) -> Option<u64> {
        self.files.get(usize::from(file)).map(|f| f.stamp.size)
    }

    /// The descriptors, in order.
    pub fn fds(&self) -> Vec<RawFd> {
        self.files.iter().map(|f| f.file.as_raw_fd()).collect()
    }

    /// Errors if `file` is no longer the file that was opened.
    ///
    /// # Errors
    /// [`ReadError::Changed`] if its length or modification time differ,
    /// [`ReadError::Io`] if it cannot be asked.
    pub fn check_unchanged(&self, file: u16) -> Result<(), ReadError> {
        let f = self.get(file);
        let meta = f.file.metadata().map_err(|source| self.io_error(file, 0, 0, source))?;
        let now = Stamp::of(&meta);
        if now == f.stamp {
            return Ok(());
        }
        Err(f.changed(if now.size != f.stamp.size {
            format!("{} bytes before, {} bytes now", f.stamp.size, now.size)
        } else {
            format!("modified at {} s before, {} s now", f.stamp.mtime.0, now.mtime.0)
        }))
    }

    /// Reads `dst.len()` bytes at `offset` of `file` at disk speed. In place
    /// where `dst` and `offset` agree modulo [`ALIGN`], with one copy
    /// otherwise; several threads for large ranges.
    ///
    /// # Errors
    /// [`ReadError::Truncated`], [`ReadError::Io`], [`ReadError::Changed`];
    /// `dst` holds anything then.
    pub fn read_into(&self, file: u16, offset: u64, dst: &mut [u8]) -> Result<(), ReadError> {
        let len = dst.len();
        let pieces = Mutex::new(split(offset, dst).into_iter());
        let next = || {
            let mut pieces = pieces.lock().unwrap_or_else(PoisonError::into_inner);
            pieces.next()
        };
        let work = || -> Result<(), ReadError> {
            let mut bounce = Bounce::default();
            while let Some((offset, dst)) = next() {
                self.read_piece(file, offset, dst, &mut bounce)?;
            }
            Ok(())
        };
        let helpers = THREADS.min(len.div_ceil(PIECE)).saturating_sub(1);
        std::thread::scope(|scope| {
            // Fewer threads than hoped for only read more slowly.
            let helpers: Vec<_> = (0..helpers)
                .filter_map(|_| std::thread::Builder::new().spawn_scoped(scope, work).ok())
                .collect();
            let mut result = work();
            for helper in helpers {
                let theirs = helper.join().unwrap_or_else(|_| {
                    Err(self.io_error(file, offset, len, io::Error::other("a thread panicked")))
                });
                result = result.and(theirs);
            }
            result
        })?;
        self.drop_cached(file, offset, len);
        self.check_unchanged(file)
    }

    /// One `pread` of whole pages into the arena; bytes read. The memory must
    /// belong to the caller's request.
    pub(super) fn read_pages(
        &self,
        file: u16,
        offset: u64,
        arena: &Arena,
        dest: usize,
        len: usize,
    ) -> io::Result<usize> {
        assert!(dest + len <= arena.len(), "a read beyond the arena");
        let fd = self.get(file).file.as_raw_fd();
        // SAFETY: the target lies inside the arena, and no reference to those
        // bytes exists while their request is outstanding (`Arena::bytes`).
        let rc = unsafe {
            libc::pread(
                fd,
                arena.ptr(dest).cast(),
                len,
                offset.try_into().map_err(io::Error::other)?,
            )
        };
        usize::try_from(rc).map_err(|_| io::Error::last_os_error())
    }

    /// Drops a range that was read through the page cache from it.
    pub(super) fn drop_cached(&self, file: u16, offset: u64, len: usize) {
        let f = self.get(file);
        if !f.direct {
            let start = offset / ALIGN as u64 * ALIGN as u64;
            let end = (offset + len as u64).next_multiple_of(ALIGN as u64);
            advise(&f.file, start, end - start, libc::POSIX_FADV_DONTNEED);
        }
    }

    pub(super) fn io_error(
        &self,
        file: u16,
        offset: u64,
        len: usize,
        source: io::Error,
    ) -> ReadError {
        ReadError::Io { path: self.get(file).path.clone(), offset, len, source }
    }

    pub(super) fn truncated(&self, file: u16, offset: u64, wanted: usize, got: usize) -> ReadError {
        ReadError::Truncated { path: self.get(file).path.clone(), offset, wanted, got }
    }

    fn get(&self, file: u16) -> &OpenFile {
        &self.files[usize::from(file)]
    }

    fn read_piece(
        &self,
        file: u16,
        offset: u64,
        dst: &mut [u8],
        bounce: &mut Bounce,
    ) -> Result<(), ReadError> {
        let skew = (offset % ALIGN as u64) as usize;
        if !self.get(file).direct {
            return self.read_full(file, offset, dst, dst.len());
        }
        if dst.as_ptr() as usize % ALIGN != skew {
            return self.read_bounced(file, offset, dst, bounce);
        }
        // In place, but for parts of pages at either end.
        let head = (ALIGN - skew) % ALIGN;
        let (head, rest) = dst.split_at_mut(head.min(dst.len()));
        let (body, tail) = rest.split_at_mut(rest.len() / ALIGN * ALIGN);
        let body_at = offset + head.len() as u64;
        let tail_at = body_at + body.len() as u64;
        self.read_bounced(file, offset, head, bounce)?;
        self.read_full(file, body_at, body, body.len())?;
        self.read_bounced(file, tail_at, tail, bounce)
    }

    fn read_bounced(
        &self,
        file: u16,
        offset: u64,
        dst: &mut [u8],
        bounce: &mut Bounce,
    ) -> Result<(), ReadError> {
        if dst.is_empty() {
            return Ok(());
        }
        let skew = (offset % ALIGN as u64) as usize;
        let need = skew + dst.len();
        let pages = bounce.pages(need.next_multiple_of(ALIGN));
        self.read_full(file, offset - skew as u64, pages, need)?;
        dst.copy_from_slice(&pages[skew..need]);
        Ok(())
    }

    /// Reads into `buf` until at least `need` bytes are there.
    fn read_full(
        &self,
        file: u16,
        offset: u64,
        buf: &mut [u8],
        need: usize,
    ) -> Result<(), ReadError> {
        let f = self.get(file);
        let mut got = 0;
        while got < need {
            match f.file.read_at(&mut buf[got..], offset + got as u64) {
                Ok(0) => return Err(self.truncated(file, offset, need, got)),
                // Part of a page comes only at the end of the file.
                Ok(n) if f.direct && n % ALIGN != 0 && got + n < need => {
                    return Err(self.truncated(file, offset, need, got + n));
                }
                Ok(n) => got += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.io_error(file, offset, need, e)),
            }
        }
        Ok(())
    }
}

impl OpenFile {
    fn open(path: &Path, direct: bool) -> io::Result<OpenFile> {
        let with_flags = |flags| OpenOptions::new().read(true).custom_flags(flags).open(path);
        let direct = match with_flags(libc::O_DIRECT) {
            _ if !direct => None,
            // Some file systems refuse O_DIRECT only when reading, or want
            // more than page alignment.
            Ok(file) => takes_direct(&file)?.then_some(file),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => None,
            Err(e) => return Err(e),
        };
        let is_direct = direct.is_some();
        let file = match direct {
            Some(file) => file,
            None => {
                let file = with_flags(0)?;
                // No read-ahead beyond what is asked for.
                advise(&file, 0, 0, libc::POSIX_FADV_RANDOM);
                file
            }
        };
        let stamp = Stamp::of(&file.metadata()?);
        Ok(OpenFile { path: path.to_path_buf(), file, direct: is_direct, stamp })
    }

    fn changed(&self, what: String) -> ReadError {
        ReadError::Changed { path: self.path.clone(), what }
    }
}

impl Stamp {
    fn of(meta: &Metadata) -> Stamp {
        Stamp { size: meta.size(), mtime: (meta.mtime(), meta.mtime_nsec()) }
    }
}

/// A page-aligned buffer that grows when needed.
#[derive(Default)]
struct Bounce(Vec<u8>);

impl Bounce {
    fn pages(&mut self, len: usize) -> &mut [u8] {
        if self.0.len() < len + ALIGN {
            self.0 = vec![0; len + ALIGN];
        }
        let start = self.0.as_ptr().align_offset(ALIGN);
        &mut self.0[start..start + len]
    }
}

/// Cuts `dst` where the file offset is a multiple of [`PIECE`].
fn split(offset: u64, mut dst: &mut [u8]) -> Vec<(u64, &mut [u8])> {
    let mut pieces = Vec::with_capacity(dst.len() / PIECE + 2);
    let mut at = offset;
    while !dst.is_empty() {
        let len = (PIECE - (at % PIECE as u64) as usize).min(dst.len());
        let (piece, rest) = dst.split_at_mut(len);
        pieces.push((at, piece));
        at += len as u64;
        dst = rest;
    }
    pieces
}

/// Whether a direct read of one aligned page works.
fn takes_direct(file: &File) -> io::Result<bool> {
    match file.read_at(Bounce::default().pages(ALIGN), 0) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Best effort: advice that is not taken costs only memory or time.
fn advise(file: &File, offset: u64, len: u64, advice: libc::c_int) {
    if let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) {
        // SAFETY: a system call on an open descriptor; touches no memory.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, advice) };
    }
}
