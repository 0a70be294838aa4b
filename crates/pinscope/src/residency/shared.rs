//! Experts that a pin daemon keeps in the page cache: used where they are, in a
//! mapping of the model's files, instead of being read a second time.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::{Residency, State};
use crate::pin::Pinned;

/// Mappings of a model's files, and the daemon that makes them worth having.
pub(super) struct Shared {
    files: Vec<Mapping>,
    daemon: Pinned,
}

struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: a read-only mapping that only this value unmaps.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(path: &std::path::Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        // SAFETY: a new read-only mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        match base {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            base => Ok(Self { base: base.cast(), len }),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, unmapped once.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

impl Residency {
    /// Uses the experts that `daemon` keeps in the page cache, as long as it
    /// lives. Returns how many it are.
    ///
    /// # Errors
    /// A file that cannot be mapped; everything is as before then.
    pub fn share(&mut self, daemon: Pinned) -> io::Result<usize> {
        let files = self.map.files().iter().map(|f| Mapping::new(&f.path));
        let files = files.collect::<io::Result<Vec<_>>>()?;
        let whole = files.iter().zip(self.map.files()).all(|(m, f)| m.len as u64 == f.len);
        if !whole {
            return Err(io::Error::other("a model file has changed its length"));
        }
        let mut shared = 0;
        for id in &daemon.experts {
            if let Some(state @ State::Absent) = self.state.get_mut(id.0 as usize) {
                *state = State::Shared;
                shared += 1;
            }
        }
        self.shared = Some(Shared { files, daemon });
        Ok(shared)
    }

    /// What the daemon kept is read like everything else once it is gone: its
    /// pages may go at any time. Called between passes.
    pub(super) fn check_daemon(&mut self) {
        if self.shared.as_ref().is_none_or(|s| s.daemon.alive()) {
            return;
        }
        for state in self.state.iter_mut().filter(|s| **s == State::Shared) {
            *state = State::Absent;
        }
        self.shared = None;
    }

    /// Address of a part's bytes of a shared expert.
    pub(super) fn shared_ptr(&self, layer: usize, part: usize, expert: u32) -> Option<*mut u8> {
        let p = &self.map.layers()[layer].parts[part];
        let file = self.shared.as_ref()?.files.get(usize::from(p.file))?;
        let offset = usize::try_from(p.offset + u64::from(expert) * p.bytes).ok()?;
        // SAFETY: the map places the part inside its file, which is mapped whole.
        Some(unsafe { file.base.add(offset) })
    }
}
