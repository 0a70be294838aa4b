//! Records activities and reads as a trace that Perfetto (ui.perfetto.dev) and
//! chrome://tracing show: the "JSON Array Format" of Chrome's trace events.
//!
//! Events are written as they come, so memory does not grow; the file ends at
//! [`MAX_BYTES`]. The array needs no closing bracket to be read: the recording
//! of a program that was killed is a recording.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use super::Activity;
use crate::policy::ExpertId;

/// Bytes after which a recording ends; about 1,500 tokens of a model with 48
/// layers.
pub const MAX_BYTES: u64 = 64 << 20;

/// What a recording came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Bytes in the file.
    pub bytes: u64,
    /// It ended early, at [`MAX_BYTES`].
    pub full: bool,
}

/// Writes one trace.
pub struct Recorder<W: Write + Send = BufWriter<File>> {
    out: W,
    start: Instant,
    bytes: u64,
    layer: usize,
    token: u64,
    /// The first failure: nothing is written after it.
    failed: Option<io::Error>,
}

impl Recorder {
    /// Begins a trace in a new file at `path`.
    ///
    /// # Errors
    /// A file that cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self::new(BufWriter::with_capacity(1 << 16, File::create(path)?)))
    }
}

impl<W: Write + Send> Recorder<W> {
    fn new(out: W) -> Self {
        let start = Instant::now();
        let mut new = Self { out, start, bytes: 0, layer: 0, token: 0, failed: None };
        new.event(format_args!(
            "[{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":1,\"args\":{{\"name\":\"compute\"}}}}"
        ));
        new
    }

    /// Later spans belong to this layer of this token.
    pub(super) fn pass(&mut self, layer: usize, token: u64) {
        (self.layer, self.token) = (layer, token);
    }

    /// An activity that is over.
    pub(super) fn span(&mut self, activity: Activity, from: Instant, to: Instant) {
        let (ts, dur) = (self.micros(from), to.duration_since(from).as_nanos() as f64 / 1e3);
        let (name, layer, token) = (activity.name(), self.layer, self.token);
        self.event(format_args!(
            ",\n{{\"name\":\"{name}\",\"ph\":\"X\",\"pid\":1,\"tid\":1,\"ts\":{ts:.1},\"dur\":{dur:.1},\
             \"args\":{{\"layer\":{layer},\"token\":{token}}}}}"
        ));
    }

    /// The reading of an expert begins; `in_flight` bytes are on their way with it.
    pub(crate) fn read_begins(&mut self, id: ExpertId, prefetch: bool, in_flight: u64) {
        let ts = self.micros(Instant::now());
        let class = if prefetch { "prefetch" } else { "demand" };
        self.event(format_args!(
            ",\n{{\"name\":\"read\",\"cat\":\"disk\",\"ph\":\"b\",\"id\":{id},\"pid\":1,\"tid\":2,\"ts\":{ts:.1},\
             \"args\":{{\"expert\":{id},\"class\":\"{class}\"}}}}",
            id = id.0
        ));
        self.in_flight(ts, in_flight);
    }

    /// The reading of an expert is over, as far as the program has seen.
    pub(crate) fn read_ends(&mut self, id: ExpertId, in_flight: u64) {
        let ts = self.micros(Instant::now());
        self.event(format_args!(
            ",\n{{\"name\":\"read\",\"cat\":\"disk\",\"ph\":\"e\",\"id\":{id},\"pid\":1,\"tid\":2,\"ts\":{ts:.1}}}",
            id = id.0
        ));
        self.in_flight(ts, in_flight);
    }

    fn in_flight(&mut self, ts: f64, bytes: u64) {
        self.event(format_args!(
            ",\n{{\"name\":\"bytes in flight\",\"ph\":\"C\",\"pid\":1,\"ts\":{ts:.1},\"args\":{{\"bytes\":{bytes}}}}}"
        ));
    }

    fn micros(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.start).as_nanos() as f64 / 1e3
    }

    fn event(&mut self, text: std::fmt::Arguments) {
        if self.failed.is_some() || self.bytes >= MAX_BYTES {
            return;
        }
        let mut counted = Counted { out: &mut self.out, bytes: 0 };
        let written = counted.write_fmt(text);
        self.bytes += counted.bytes;
        self.failed = written.err();
    }

    /// Closes the array and the file.
    pub(super) fn finish(mut self) -> io::Result<Summary> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let summary = Summary { bytes: self.bytes + 3, full: self.bytes >= MAX_BYTES };
        self.out.write_all(b"\n]\n").and_then(|()| self.out.flush())?;
        Ok(summary)
    }
}

/// Counts what goes through.
struct Counted<'a, W> {
    out: &'a mut W,
    bytes: u64,
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let n = self.out.write(buf)?;
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::Value;

    use super::*;

    #[test]
    fn a_trace_is_json_with_the_spans_in_microseconds() {
        let mut out = Vec::new();
        let mut recorder = Recorder::new(&mut out);
        let t = recorder.start;
        recorder.pass(7, 42);
        recorder.span(Activity::Wait, t + Duration::from_micros(3), t + Duration::from_micros(5));
        recorder.read_begins(ExpertId(9), true, 4096);
        recorder.read_ends(ExpertId(9), 0);
        let summary = recorder.finish().unwrap();
        assert_eq!((summary.bytes, summary.full), (out.len() as u64, false));
        let events: Vec<Value> = serde_json::from_slice(&out).unwrap();
        let span = events.iter().find(|e| e["ph"] == "X").unwrap();
        assert_eq!((span["ts"].as_f64(), span["dur"].as_f64()), (Some(3.0), Some(2.0)));
        assert_eq!(
            (span["args"]["layer"].as_u64(), span["args"]["token"].as_u64()),
            (Some(7), Some(42))
        );
        let of = |ph: &str| events.iter().filter(|e| e["ph"] == ph).count();
        assert_eq!((of("b"), of("e"), of("C")), (1, 1, 2));
    }

    #[test]
    fn a_recording_ends_at_its_limit_and_says_so() {
        let mut recorder = Recorder::new(io::sink());
        let t = recorder.start;
        while recorder.bytes < MAX_BYTES {
            recorder.span(Activity::Rest, t, t);
        }
        recorder.span(Activity::Rest, t, t);
        let summary = recorder.finish().unwrap();
        assert!(summary.full && summary.bytes < MAX_BYTES + 200);
    }

    #[test]
    fn a_full_disk_is_an_error_at_the_end() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut recorder = Recorder::new(Full);
        let t = recorder.start;
        recorder.span(Activity::Rest, t, t);
        assert_eq!(recorder.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
