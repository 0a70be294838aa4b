//! Finds the model that the program is loading, by the files it has open.
//!
//! llama.cpp tells a device names and shapes of weights, not where they come
//! from. But its loader holds the model's files open, so the model is the one
//! among this process's open GGUF files that has a tensor of that name and size.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pinscope::map::ExpertMap;
use pinscope_ggml::{read_open_map, ReadMapError};

/// A file as it is now; a changed one is another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct FileId {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

/// A model whose first part is this file.
#[derive(Clone)]
struct Found {
    first: FileId,
    map: Arc<ExpertMap>,
}

/// Remembers what was found, since llama.cpp asks for every single weight.
#[derive(Default)]
struct Memory {
    /// What was open when `models` were looked for, sorted.
    open: Vec<FileId>,
    models: Vec<Found>,
    /// Open files of other kinds.
    others: HashSet<FileId>,
    /// Files that were spoken of.
    refused: HashSet<FileId>,
    /// Descriptors that are the device's and not the program's.
    ours: Vec<RawFd>,
}

/// Finds models among the open files of this process.
#[derive(Default)]
pub struct Discovery {
    memory: Mutex<Memory>,
}

impl Discovery {
    /// Does not take these descriptors for the program's from now on.
    pub fn ignore(&self, ours: Vec<RawFd>) {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).ours = ours;
    }

    /// The open model that has the tensor `name` of `bytes` bytes. `refuse`
    /// hears once why a file with that tensor's model cannot be used.
    pub fn find(
        &self,
        name: &str,
        bytes: u64,
        refuse: &dyn Fn(&ReadMapError),
    ) -> Option<Arc<ExpertMap>> {
        if name.is_empty() {
            return None; // a question about no weight of a file
        }
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Memory { others, ours, .. } = &mut *memory;
        let files = open_models(others, ours);
        let open: Vec<FileId> = files.iter().map(|f| f.0).collect();
        if open != memory.open {
            memory.look(&files, refuse);
            memory.open = open;
        }
        let has = |map: &ExpertMap| map.tensor(name).is_some_and(|t| t.size == bytes);
        memory.models.iter().find(|m| has(&m.map)).map(|m| Arc::clone(&m.map))
    }
}

impl Memory {
    /// Reads the headers of files that are new.
    fn look(&mut self, files: &[(FileId, PathBuf)], refuse: &dyn Fn(&ReadMapError)) {
        let paths: Vec<PathBuf> = files.iter().map(|f| f.1.clone()).collect();
        let before = std::mem::take(&mut self.models);
        for (first, path) in files {
            if let Some(known) = before.iter().find(|m| m.first == *first) {
                self.models.push(known.clone());
                continue;
            }
            match read_open_map(path, &paths) {
                Ok(map) => self.models.push(Found { first: *first, map: Arc::new(map) }),
                Err(ReadMapError::NotFirst { .. }) => {}
                Err(e) if self.refused.insert(*first) => refuse(&e),
                Err(_) => {}
            }
        }
    }
}

/// The GGUF files that the program has open, each once, sorted.
fn open_models(others: &mut HashSet<FileId>, ours: &[RawFd]) -> Vec<(FileId, PathBuf)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let link = entry.path();
        let number = entry.file_name().to_str().and_then(|n| n.parse().ok());
        if number.is_none_or(|fd| ours.contains(&fd)) {
            continue;
        }
        let Some((id, path)) = identify(&link) else { continue };
        if others.contains(&id) {
            continue;
        }
        if is_gguf(&link) {
            found.push((id, path));
        } else {
            others.insert(id);
        }
    }
    found.sort();
    found.dedup_by_key(|f| f.0);
    found
}

/// Identity and path of the regular file behind a descriptor's link; `None`
/// for anything else, and for a file that was deleted.
fn identify(link: &Path) -> Option<(FileId, PathBuf)> {
    let path = fs::read_link(link).ok().filter(|p| p.is_absolute())?;
    let meta = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
    let id = FileId {
        device: meta.dev(),
        inode: meta.ino(),
        len: meta.len(),
        modified: (meta.mtime(), meta.mtime_nsec()),
    };
    Some((id, path))
}

fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut f| f.read_exact(&mut magic)).is_ok() && &magic == b"GGUF"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn an_open_gguf_file_is_seen_once_and_only_while_it_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        fs::write(&path, b"GGUF and more").unwrap();
        fs::write(dir.path().join("b.gguf"), b"not one").unwrap();
        let ours = File::open(&path).unwrap();
        let seen = || {
            let all = open_models(&mut HashSet::new(), &[ours.as_raw_fd()]);
            all.into_iter().map(|f| f.1).filter(|p| p.starts_with(dir.path())).collect::<Vec<_>>()
        };
        let first = File::open(&path).unwrap();
        let second = File::open(&path).unwrap();
        let _other = File::open(dir.path().join("b.gguf")).unwrap();
        assert_eq!(seen(), std::slice::from_ref(&path));
        drop((first, second));
        assert!(seen().is_empty());
    }
}
