//! Where processes of one user find each other's adverts.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// `$XDG_RUNTIME_DIR/pinscope`, or a folder of this user below `/tmp`.
pub(super) fn folder_path() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|p| p.is_dir()) {
        Some(runtime) => runtime.join("pinscope"),
        None => PathBuf::from(format!("/tmp/pinscope-{}", user())),
    }
}

fn user() -> u32 {
    // SAFETY: cannot fail.
    unsafe { libc::geteuid() }
}

/// The folder, made if it is missing; if it cannot be used, which and why.
pub(super) fn own_folder() -> Result<PathBuf, (PathBuf, String)> {
    let path = folder_path();
    if let Err(e) = DirBuilder::new().mode(0o700).create(&path) {
        if e.kind() != io::ErrorKind::AlreadyExists {
            return Err((path, e.to_string()));
        }
    }
    match check_own(&path) {
        Ok(()) => Ok(path),
        Err(why) => Err((path, why)),
    }
}

/// Whether nobody else can write to the folder; if not, why.
pub(super) fn check_own(path: &Path) -> Result<(), String> {
    let meta = fs::symlink_metadata(path).map_err(|e| e.to_string())?;
    if !meta.is_dir() {
        return Err("it is not a folder".into());
    }
    if meta.uid() != user() {
        return Err(format!("it belongs to user {}, not to user {}", meta.uid(), user()));
    }
    if meta.mode() & 0o022 != 0 {
        return Err(format!("others may write to it (mode {:o})", meta.mode() & 0o7777));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        dir
    }

    #[test]
    fn a_folder_that_others_could_write_to_is_not_trusted() {
        let dir = folder();
        assert_eq!(check_own(dir.path()), Ok(()));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(check_own(dir.path()).is_err());
        let other = folder();
        let link = other.path().join("link");
        symlink(other.path(), &link).unwrap();
        assert!(check_own(&link).is_err());
        assert!(check_own(Path::new("/nowhere")).is_err());
    }
}
