//! Recording what happens: what the router chooses, and where the time goes.

use std::io;

use super::Residency;
use crate::timeline::chrome;
use crate::trace;

impl Residency {
    /// Writes what every pass from now on chooses to `recorder`; see
    /// [`trace`].
    pub fn record_trace(&mut self, recorder: trace::Recorder) {
        self.recorder = Some(recorder);
    }

    /// Ends the recording of a trace, if there is one.
    ///
    /// # Errors
    /// What kept any part of it from being written.
    pub fn finish_trace(&mut self) -> io::Result<()> {
        self.recorder.take().map_or(Ok(()), trace::Recorder::finish)
    }

    /// Writes where the time goes from now on to `recorder`; see
    /// [`timeline`](crate::timeline).
    pub fn record_timeline(&mut self, recorder: chrome::Recorder) {
        self.clock.record(recorder);
    }

    /// Ends the recording of a timeline, if there is one.
    ///
    /// # Errors
    /// What kept its file from being written.
    pub fn finish_timeline(&mut self) -> io::Result<Option<chrome::Summary>> {
        self.clock.finish_recording()
    }
}
