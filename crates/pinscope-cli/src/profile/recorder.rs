//! Profiles of real traffic: `--update-profile`.

use std::path::PathBuf;

use pinscope::profile::{Profile, ProfileError, ProfiledModel};

use crate::args::RunArgs;
use crate::engine::{Prepared, Session, SetupError};

/// Adds conversations to a profile as they happen.
pub struct Recorder {
    path: PathBuf,
    model: ProfiledModel,
}

impl Recorder {
    /// A recorder if `--update-profile` asks for one.
    ///
    /// # Errors
    /// A model whose header cannot be read, and a profile there that is of
    /// another model: better known before the first answer.
    pub fn new(args: &RunArgs, prepared: &Prepared) -> Result<Option<Self>, SetupError> {
        let Some(path) = args.pinning.profile.clone().filter(|_| args.update_profile) else {
            return Ok(None);
        };
        let recorder = Self { path, model: prepared.profiled_model()?.clone() };
        if !recorder.is_first() {
            Profile::load_for(&recorder.path, &recorder.model)?;
        }
        Ok(Some(recorder))
    }

    /// Whether there is no profile yet.
    pub fn is_first(&self) -> bool {
        !self.path.exists()
    }

    /// Writes down what the router chose since the last call.
    ///
    /// # Errors
    /// [`ProfileError`]; the file is as it was then.
    pub fn keep(&self, session: &Session) -> Result<(), ProfileError> {
        let counts = session.take_routing().filter(|c| !c.is_empty());
        counts.map_or(Ok(()), |piece| Profile::append(&self.path, &self.model, &[piece]))
    }
}
