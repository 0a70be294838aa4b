//! How a pin daemon tells others what it keeps in the page cache.
//!
//! A small file in the user's runtime folder says so, and the daemon holds an
//! exclusive `flock` on it as long as it lives: whoever gets a lock on the file
//! knows that the daemon is gone, even if it was killed.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::folder::{check_own, folder_path, own_folder};
use crate::map::ModelFile;
use crate::policy::ExpertId;
use crate::profile::ModelId;

/// Version of the file's format.
const VERSION: u32 = 1;

/// Hexadecimal digits of a model's id in a file name.
const NAME_DIGITS: usize = 16;

/// Times that a claim tries: somebody may be looking at the file for a moment.
const TRIES: u32 = 10;

/// Why a daemon cannot advertise itself.
#[derive(Debug, Error)]
pub enum AdvertError {
    /// Another daemon pins this model.
    #[error("process {pid} pins this model already; stop it first (kill {pid})")]
    Taken {
        /// Its process id.
        pid: u32,
    },
    /// The runtime folder cannot be used.
    #[error("cannot use the folder {}: {why}; remove it, or set XDG_RUNTIME_DIR to a folder of your own", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The advert cannot be written.
    #[error("cannot write {}: {source}; without it no second daemon would know of this one", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What the file says.
#[derive(Debug, Serialize, Deserialize)]
struct Content {
    version: u32,
    pid: u32,
    model: ModelNames,
    /// [`ExpertId`]s whose pages are all locked; none before that is done.
    experts: Vec<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ModelNames {
    /// A [`ModelId`].
    id: String,
    /// The first file, for people.
    path: PathBuf,
    /// Device and inode of each file: a copy of the model has pages of its own.
    files: Vec<(u64, u64)>,
}

/// A daemon's claim on a model. Nobody else can pin the model while this lives;
/// the file is removed at its end.
#[derive(Debug)]
pub struct Advert {
    path: PathBuf,
    content: Content,
    /// Carries the lock.
    file: File,
}

/// What a living daemon keeps locked.
#[derive(Debug)]
pub struct Pinned {
    /// The daemon's process id.
    pub pid: u32,
    /// Experts whose pages are all locked, hottest first.
    pub experts: Vec<ExpertId>,
    file: File,
}

impl Pinned {
    /// Whether the daemon still lives: one system call.
    pub fn alive(&self) -> bool {
        is_locked(&self.file)
    }
}

impl Advert {
    /// Claims the model `id`, which is in `files`, for this process, before
    /// anything is locked.
    ///
    /// # Errors
    /// [`AdvertError::Taken`] if another daemon has it, be it in other files,
    /// and if the runtime folder is not usable or not ours alone.
    pub fn claim(id: ModelId, files: &[ModelFile]) -> Result<Advert, AdvertError> {
        let folder = own_folder().map_err(|(path, why)| AdvertError::Folder { path, why })?;
        Advert::claim_in(&folder, &id.to_string(), files)
    }

    pub(crate) fn claim_in(
        folder: &Path,
        id: &str,
        files: &[ModelFile],
    ) -> Result<Advert, AdvertError> {
        let path = folder.join(file_name(id));
        let fail = |source| AdvertError::Write { path: path.clone(), source };
        let content = Content {
            version: VERSION,
            pid: std::process::id(),
            model: ModelNames {
                id: id.to_owned(),
                path: files.first().map(|f| f.path.clone()).unwrap_or_default(),
                files: identities(files).map_err(fail)?,
            },
            experts: Vec::new(),
        };
        let temporary = Temporary::write(folder, &content).map_err(fail)?;
        let mut owner = None;
        for _ in 0..TRIES {
            // A link, unlike a rename, never replaces what is there.
            match fs::hard_link(&temporary.path, &path) {
                Ok(()) => {
                    let file = temporary.file.try_clone().map_err(fail)?;
                    return Ok(Advert { path: path.clone(), content, file });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(fail(e)),
            }
            if !remove_if_stale(&path).map_err(fail)? {
                // A daemon, or somebody who looks whether it is one.
                owner = read(&path).map(|(content, _)| content.pid);
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        match owner {
            Some(pid) => Err(AdvertError::Taken { pid }),
            None => Err(fail(io::Error::other("another program holds it"))),
        }
    }

    /// Says that all pages of `experts` are locked now, hottest first.
    ///
    /// # Errors
    /// [`AdvertError::Write`]; the model stays claimed.
    pub fn publish(&mut self, experts: &[ExpertId]) -> Result<(), AdvertError> {
        let fail = |source| AdvertError::Write { path: self.path.clone(), source };
        self.content.experts = experts.iter().map(|e| e.0).collect();
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        let temporary = Temporary::write(folder, &self.content).map_err(fail)?;
        let file = temporary.file.try_clone().map_err(fail)?;
        fs::rename(&temporary.path, &self.path).map_err(fail)?;
        self.file = file;
        Ok(())
    }

    /// What a living daemon of this user keeps locked of these very `files` of
    /// the model `id`, if there is one that is ready.
    pub fn find(id: ModelId, files: &[ModelFile]) -> Option<Pinned> {
        Advert::find_in(&folder_path(), &id.to_string(), files)
    }

    pub(crate) fn find_in(folder: &Path, id: &str, files: &[ModelFile]) -> Option<Pinned> {
        // Somebody else's folder could promise anything.
        check_own(folder).ok()?;
        let (content, file) = read(&folder.join(file_name(id)))?;
        let fits = content.version == VERSION
            && content.model.id == id
            && content.model.files == identities(files).ok()?;
        if !fits || content.experts.is_empty() || !is_locked(&file) {
            return None;
        }
        let experts = content.experts.into_iter().map(ExpertId).collect();
        Some(Pinned { pid: content.pid, experts, file })
    }
}

impl Drop for Advert {
    fn drop(&mut self) {
        // The lock is still held, so the file is still ours.
        let _ = fs::remove_file(&self.path);
    }
}

/// A written and locked file that has not got its name yet.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    fn write(folder: &Path, content: &Content) -> io::Result<Temporary> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(
            ".{}.{}.{number}",
            file_name(&content.model.id),
            std::process::id()
        ));
        // A daemon with our process id may have been killed here.
        let _ = fs::remove_file(&path);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let mut temporary = Temporary { path, file };
        temporary.file.write_all(&serde_json::to_vec(content)?)?;
        temporary.file.try_lock()?;
        Ok(temporary)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Gone already if it was renamed.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes the advert of a daemon that is gone; false if it lives.
fn remove_if_stale(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(e) => return Err(e),
    };
    if let Err(e) = file.try_lock() {
        return match e {
            TryLockError::WouldBlock => Ok(false),
            TryLockError::Error(e) => Err(e),
        };
    }
    // Another daemon may have replaced it meanwhile; that one is alive.
    match fs::metadata(path) {
        Ok(meta) if meta.ino() == file.metadata()?.ino() => fs::remove_file(path).map(|()| true),
        Ok(_) => Ok(false),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(e) => Err(e),
    }
}

fn read(path: &Path) -> Option<(Content, File)> {
    let mut file = File::open(path).ok()?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).ok()?;
    Some((serde_json::from_slice(&text).ok()?, file))
}

/// Whether somebody holds the daemon's lock. What cannot be asked is not relied on.
fn is_locked(file: &File) -> bool {
    match file.try_lock_shared() {
        Ok(()) => {
            let _ = file.unlock();
            false
        }
        Err(e) => matches!(e, TryLockError::WouldBlock),
    }
}

/// Device and inode of each file.
fn identities(files: &[ModelFile]) -> io::Result<Vec<(u64, u64)>> {
    files.iter().map(|f| fs::metadata(&f.path).map(|m| (m.dev(), m.ino()))).collect()
}

fn file_name(id: &str) -> String {
    let short: String = id.chars().take(NAME_DIGITS).collect();
    format!("pin-{short}.json")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const ID: &str = "0123456789abcdef0123456789abcdef";
    /// Another model whose file has the same name.
    const TWIN: &str = "0123456789abcdefffffffffffffffff";

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        dir
    }

    /// Any file will do.
    fn model() -> [ModelFile; 1] {
        [ModelFile { path: "/proc/self/exe".into(), len: 0, header_len: 0 }]
    }

    fn claim(dir: &tempfile::TempDir) -> Result<Advert, AdvertError> {
        Advert::claim_in(dir.path(), ID, &model())
    }

    fn find(dir: &tempfile::TempDir) -> Option<Pinned> {
        Advert::find_in(dir.path(), ID, &model())
    }

    fn files(dir: &tempfile::TempDir) -> usize {
        fs::read_dir(dir.path()).unwrap().count()
    }

    #[test]
    fn experts_are_found_once_published_and_until_the_daemon_ends() {
        let dir = folder();
        let mut advert = claim(&dir).unwrap();
        assert!(find(&dir).is_none());
        let experts = [ExpertId(7), ExpertId(3)];
        advert.publish(&experts).unwrap();
        let found = find(&dir).unwrap();
        assert_eq!((found.pid, &found.experts[..]), (std::process::id(), &experts[..]));
        assert!(found.alive());
        assert!(Advert::find_in(dir.path(), TWIN, &model()).is_none());
        let copy = [ModelFile { path: "/proc/self/maps".into(), ..model()[0].clone() }];
        assert!(Advert::find_in(dir.path(), ID, &copy).is_none());
        assert_eq!(files(&dir), 1);
        drop(advert);
        assert!(!found.alive());
        assert!(find(&dir).is_none());
        assert_eq!(files(&dir), 0);
    }

    #[test]
    fn a_second_daemon_is_told_the_first_ones_process_id() {
        let dir = folder();
        let mut first = claim(&dir).unwrap();
        for published in [false, true] {
            match claim(&dir) {
                Err(AdvertError::Taken { pid }) => assert_eq!(pid, std::process::id()),
                other => panic!("published: {published}: {other:?}"),
            }
            first.publish(&[ExpertId(1)]).unwrap();
        }
        drop(first);
        assert!(claim(&dir).is_ok());
    }

    #[test]
    fn what_a_killed_daemon_left_is_not_believed_and_is_replaced() {
        let dir = folder();
        let path = dir.path().join(file_name(ID));
        let stale = Content {
            version: VERSION,
            pid: 1,
            model: ModelNames {
                id: ID.into(),
                path: "/m.gguf".into(),
                files: identities(&model()).unwrap(),
            },
            experts: vec![5],
        };
        fs::write(&path, serde_json::to_vec(&stale).unwrap()).unwrap();
        assert!(find(&dir).is_none());
        fs::write(&path, "{\"version\":1,\"pi").unwrap();
        assert!(find(&dir).is_none());
        let mut advert = claim(&dir).unwrap();
        advert.publish(&[ExpertId(2)]).unwrap();
        assert_eq!(find(&dir).unwrap().experts, [ExpertId(2)]);
    }

    #[test]
    fn only_one_of_many_daemons_that_start_at_once_gets_the_model() {
        let dir = folder();
        fs::write(dir.path().join(file_name(ID)), "left behind").unwrap();
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| claim(&dir))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 1, "{results:?}");
        assert_eq!(files(&dir), 1);
    }
}
