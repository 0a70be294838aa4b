//! What the user asks for, from the environment: a library has no command line.

use std::path::PathBuf;

use pinscope::memory::{parse_ram, Memory};
use pinscope::policy::PolicyKind;
use pinscope::reader::ReaderKind;

/// Who keeps the experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The device, in an arena of its own.
    Arena,
    /// The page cache: the device takes nothing, hot pages are locked.
    Mapped,
}

/// The settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Memory of the whole process, bytes (`PINSCOPE_RAM`).
    pub ram: u64,
    /// Which expert gives way (`PINSCOPE_POLICY`).
    pub policy: PolicyKind,
    /// How experts are read (`PINSCOPE_READER`).
    pub reader: ReaderKind,
    /// What to pin (`PINSCOPE_PROFILE`).
    pub profile: Option<PathBuf>,
    /// `PINSCOPE_MODE`.
    pub mode: Mode,
}

impl Settings {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// Which variable is wrong and what it may be.
    pub fn from_environment() -> Result<Self, String> {
        let memory =
            Memory::now().map_err(|e| format!("cannot see how much memory there is: {e}"))?;
        Self::new(memory, &|name| {
            let value = std::env::var_os(name)?;
            Some(value.to_string_lossy().into_owned()).filter(|v| !v.is_empty())
        })
    }

    fn new(memory: Memory, get: &dyn Fn(&str) -> Option<String>) -> Result<Self, String> {
        let ram = match get("PINSCOPE_RAM") {
            None => memory.default_ram(),
            Some(text) => {
                parse_ram(&text, memory.total).map_err(|e| format!("PINSCOPE_RAM: {e}"))?
            }
        };
        let policy = match get("PINSCOPE_POLICY") {
            None => PolicyKind::default(),
            Some(name) => name.parse().map_err(|e| format!("PINSCOPE_POLICY: {e}"))?,
        };
        let reader = match get("PINSCOPE_READER").as_deref() {
            None | Some("auto") => ReaderKind::Auto,
            Some("uring") => ReaderKind::Uring,
            Some("pread") => ReaderKind::Pread,
            Some(other) => {
                return Err(format!("PINSCOPE_READER: \"{other}\" is not auto, uring or pread"))
            }
        };
        let profile = get("PINSCOPE_PROFILE").map(PathBuf::from);
        let mode = match get("PINSCOPE_MODE").as_deref() {
            None | Some("arena") => Mode::Arena,
            Some("mapped") => Mode::Mapped,
            Some(other) => {
                return Err(format!("PINSCOPE_MODE: \"{other}\" is not arena or mapped"))
            }
        };
        Ok(Self { ram, policy, reader, profile, mode })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn read(set: &[(&str, &str)]) -> Result<Settings, String> {
        let memory = Memory { total: 16 * GIB, available: 8 * GIB };
        Settings::new(memory, &|name| {
            set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        })
    }

    #[test]
    fn without_settings_the_program_s_defaults_hold() {
        let memory = Memory { total: 16 * GIB, available: 8 * GIB };
        let want = Settings {
            ram: memory.default_ram(),
            policy: PolicyKind::default(),
            reader: ReaderKind::Auto,
            profile: None,
            mode: Mode::Arena,
        };
        assert_eq!(read(&[]), Ok(want));
    }

    #[test]
    fn each_variable_is_read() {
        let got = read(&[
            ("PINSCOPE_RAM", "25%"),
            ("PINSCOPE_POLICY", "lru"),
            ("PINSCOPE_READER", "pread"),
            ("PINSCOPE_PROFILE", "/p"),
            ("PINSCOPE_MODE", "mapped"),
        ]);
        let want = Settings {
            ram: 4 * GIB,
            policy: PolicyKind::Lru,
            reader: ReaderKind::Pread,
            profile: Some("/p".into()),
            mode: Mode::Mapped,
        };
        assert_eq!(got, Ok(want));
    }

    #[test]
    fn a_wrong_value_names_its_variable() {
        for (name, value) in [
            ("PINSCOPE_RAM", "lots"),
            ("PINSCOPE_POLICY", "best"),
            ("PINSCOPE_READER", "owl"),
            ("PINSCOPE_MODE", "fast"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert!(error.starts_with(name) && error.contains(value), "{error}");
        }
    }
}
