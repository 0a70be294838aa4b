//! Recording what the router chooses; see [`trace`](crate::trace).

use std::io;

use super::Residency;
use crate::trace::Recorder;

impl Residency {
    /// Writes every pass from now on to `recorder`.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// Ends the recording, if there is one.
    ///
    /// # Errors
    /// What kept any part of it from being written.
    pub fn finish_recording(&mut self) -> io::Result<()> {
        self.recorder.take().map_or(Ok(()), Recorder::finish)
    }
}
