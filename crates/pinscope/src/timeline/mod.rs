//! Where the time of a token goes.
//!
//! At any moment the thread that computes does one [`Activity`]; a
//! [`Stopwatch`] is told of each change, so that the times add up to the whole
//! and nothing is counted twice. Changing costs a reading of the clock, some
//! tens of nanoseconds, ten times a layer. The same changes can be recorded as
//! a picture, see [`chrome`].

pub mod chrome;

use std::time::Instant;

use chrome::Recorder;

/// What the computing thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// All that is not experts: attention, router, sampling, the program's own.
    Rest,
    /// Finding out what a layer needs and building its sub-graphs.
    Plan,
    /// Guessing what the next layer needs.
    Predict,
    /// Choosing who gives way.
    Evict,
    /// Handing reads to the kernel and collecting them.
    Submit,
    /// The experts' arithmetic.
    Experts,
    /// Waiting for bytes, with nothing to compute.
    Wait,
}

impl Activity {
    /// All of them, in the order of reports.
    pub const ALL: [Activity; 7] = [
        Activity::Rest,
        Activity::Experts,
        Activity::Wait,
        Activity::Plan,
        Activity::Predict,
        Activity::Evict,
        Activity::Submit,
    ];

    /// A word for reports.
    pub fn name(self) -> &'static str {
        match self {
            Activity::Rest => "rest",
            Activity::Plan => "plan",
            Activity::Predict => "predict",
            Activity::Evict => "evict",
            Activity::Submit => "submit",
            Activity::Experts => "experts",
            Activity::Wait => "wait",
        }
    }
}

/// Nanoseconds of each activity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split([u64; Activity::ALL.len()]);

impl Split {
    /// Nanoseconds of one activity.
    pub fn ns(&self, activity: Activity) -> u64 {
        self.0[activity as usize]
    }

    /// What was added since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] - earlier.0[i]))
    }
}

/// Pauses longer than this are the user's and belong to no activity.
const PAUSE_NS: u64 = 5_000_000_000;

/// Adds up activities, for prompts and for generation.
pub struct Stopwatch {
    current: Activity,
    since: Instant,
    decoding: bool,
    prompt: Split,
    decode: Split,
    recorder: Option<Box<Recorder>>,
}

impl Default for Stopwatch {
    fn default() -> Self {
        Self {
            current: Activity::Rest,
            since: Instant::now(),
            decoding: false,
            prompt: Split::default(),
            decode: Split::default(),
            recorder: None,
        }
    }
}

impl Stopwatch {
    /// Ends the current activity and begins `next`. Returns the one that
    /// ended, to go back to it.
    pub fn enter(&mut self, next: Activity) -> Activity {
        if next == self.current {
            return next;
        }
        let now = Instant::now();
        let ns = u64::try_from(now.duration_since(self.since).as_nanos()).unwrap_or(u64::MAX);
        if self.current != Activity::Rest || ns < PAUSE_NS {
            let split = if self.decoding { &mut self.decode } else { &mut self.prompt };
            split.0[self.current as usize] += ns;
            if let Some(recorder) = &mut self.recorder {
                recorder.span(self.current, self.since, now);
            }
        }
        self.since = now;
        std::mem::replace(&mut self.current, next)
    }

    /// A pass through `layer` begins. What came before it, since the layer
    /// before, was done for this pass.
    pub fn pass(&mut self, layer: usize, token: u64, decoding: bool) {
        self.decoding = decoding;
        if let Some(recorder) = &mut self.recorder {
            recorder.pass(layer, token);
        }
    }

    /// Times of prompts and of generation so far.
    pub fn splits(&self) -> [Split; 2] {
        [self.prompt, self.decode]
    }

    /// Records from now on.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(Box::new(recorder));
    }

    /// Ends the recording, if there is one.
    ///
    /// # Errors
    /// What kept the file from being written, now or earlier.
    pub fn finish_recording(&mut self) -> std::io::Result<Option<chrome::Summary>> {
        self.recorder.take().map(|r| r.finish()).transpose()
    }

    /// The recorder, if there is one.
    pub(crate) fn recorder(&mut self) -> Option<&mut Recorder> {
        self.recorder.as_deref_mut()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_add_up_and_belong_to_the_phase_that_is_on() {
        let mut watch = Stopwatch::default();
        let begun = watch.since;
        let nap = || std::thread::sleep(Duration::from_millis(2));
        watch.pass(0, 0, false);
        watch.enter(Activity::Plan);
        nap();
        let outer = watch.enter(Activity::Evict);
        nap();
        assert_eq!(watch.enter(outer), Activity::Evict);
        watch.enter(Activity::Rest);
        watch.pass(0, 1, true);
        watch.enter(Activity::Wait);
        nap();
        watch.enter(Activity::Rest);
        let [prompt, decode] = watch.splits();
        let all = |s: Split| Activity::ALL.iter().map(|&a| s.ns(a)).sum::<u64>();
        let total = watch.since.duration_since(begun).as_nanos() as u64;
        assert_eq!(all(prompt) + all(decode), total);
        assert!(prompt.ns(Activity::Evict) >= 2_000_000 && prompt.ns(Activity::Wait) == 0);
        assert!(decode.ns(Activity::Wait) >= 2_000_000 && decode.ns(Activity::Evict) == 0);
    }

    #[test]
    fn a_name_for_each_activity_and_each_in_the_list() {
        let mut names = Activity::ALL.map(Activity::name).to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Activity::ALL.len());
        // `Split` is indexed by the enum's own numbers.
        assert!(Activity::ALL.iter().all(|&a| (a as usize) < Activity::ALL.len()));
    }
}
