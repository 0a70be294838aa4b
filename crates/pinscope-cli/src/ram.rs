//! The `--ram` of the command line.

use std::str::FromStr;

use pinscope::memory::{parse_ram, Memory, RamError};

/// What was asked for, before the machine is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ram(String);

impl FromStr for Ram {
    type Err = RamError;

    fn from_str(text: &str) -> Result<Self, RamError> {
        // The form is checked here, so that a typing error is a usage error.
        parse_ram(text, u64::MAX).map(|_| Ram(text.to_owned()))
    }
}

impl Ram {
    /// Bytes: what `given` says, or what is free less a margin.
    ///
    /// # Errors
    /// The machine does not tell how much memory it has.
    pub fn bytes(given: Option<&Ram>) -> Result<u64, Box<dyn std::error::Error>> {
        let memory = Memory::now()?;
        match given {
            Some(Ram(text)) => Ok(parse_ram(text, memory.total)?),
            None => Ok(memory.default_ram()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_one_of_the_machine_and_the_default_leaves_a_margin() {
        let total = Memory::now().unwrap().total;
        let half = "50%".parse().unwrap();
        assert_eq!(Ram::bytes(Some(&half)).unwrap(), total / 2);
        assert!(Ram::bytes(None).unwrap() < total);
        assert!("10".parse::<Ram>().is_err());
    }
}
