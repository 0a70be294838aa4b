//! What the command line says of profiles and pins.

use std::path::PathBuf;

use clap::Args;
use pinscope::memory::format_bytes;
use pinscope::profile::PinPlan;
use serde::{Deserialize, Serialize};

/// Which experts stay in RAM for good.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Pins")]
pub struct Pinning {
    /// Load the experts that this profile finds hot first, and pin them
    /// (`pinscope profile` makes one)
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Share of the memory for experts that pins may take, 0 to 1 [default:
    /// by how much the profile's hot experts beat chance]
    #[arg(long, value_name = "SHARE", requires = "profile", value_parser = share)]
    pub pin_share: Option<f64>,
    /// Leave pins where they are when the text is unlike the profiled one
    #[arg(long, requires = "profile")]
    pub no_repin: bool,
}

/// A share of the command line.
pub fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("give a number from 0 to 1, such as 0.5".into()),
    }
}

/// One sentence about the pins of a plan; `bytes` is what they take.
pub fn describe(plan: &PinPlan, bytes: u64) -> String {
    let what = format!(
        "{} experts ({}) are pinned and should serve {:.0} % of what generation asks for",
        plan.pins.len(),
        format_bytes(bytes),
        100.0 * plan.promise
    );
    match plan.flat {
        true => format!(
            "{what}. The router is flat: experts are used about equally, so pins will not help"
        ),
        false => what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_from_nothing_to_all() {
        assert_eq!((share("0"), share("1"), share("0.25")), (Ok(0.0), Ok(1.0), Ok(0.25)));
        for bad in ["-0.1", "1.1", "NaN", "half", ""] {
            assert!(share(bad).is_err(), "{bad}");
        }
    }
}
