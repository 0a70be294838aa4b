//! Which model a profile belongs to.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};

use sha2::{Digest, Sha256};

use crate::map::ExpertMap;

/// A model's identity: SHA-256 over the headers of all its files.
///
/// Headers hold names, shapes, places and the vocabulary, so a renamed or
/// moved model stays the same and another quantisation is another model.
/// Weights are not looked at: that would be a full read of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelId([u8; 32]);

impl ModelId {
    /// Reads the headers of the model of `map`.
    ///
    /// # Errors
    /// A file that cannot be read, or ends before its header does.
    pub fn of(map: &ExpertMap) -> io::Result<Self> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 16];
        for model in map.files() {
            let mut file = File::open(&model.path)?;
            hash.update(model.header_len.to_le_bytes());
            let mut left = model.header_len;
            while left > 0 {
                let piece = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                file.read_exact(&mut buffer[..piece])?;
                hash.update(&buffer[..piece]);
                left -= piece as u64;
            }
        }
        Ok(Self(hash.finalize().into()))
    }

    /// The inverse of [`ModelId::as_bytes`].
    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// What is written to binary files.
    pub(crate) fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The inverse of its text: 64 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let mut id = [0; 32];
        let digits = text.as_bytes();
        if digits.len() != 64 || !text.is_ascii() {
            return None;
        }
        for (byte, pair) in id.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(id))
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
