//! A test double: a reader whose completions come late, out of order, twice
//! read or failed, repeatably from a seed. For the tests of whoever uses
//! readers; nothing in the product opens it.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;

use super::{Busy, ReadDone, ReadError, ReadRequest, Reader};
use crate::splitmix::SplitMix64;

/// What goes wrong, and how often. Probabilities are for each completion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FaultPlan {
    /// Same seed and same completions, same faults.
    pub seed: u64,
    /// Held back for up to 8 reaps.
    pub delay: f64,
    /// Reported as failed with `EIO`.
    pub fail: f64,
    /// Read once more (at most twice) before it is reported, as after a
    /// transient error: its memory stays in use.
    pub retry: f64,
    /// Completions that are ready together come in random order.
    pub reorder: bool,
}

/// Wraps a reader; see the module.
pub struct FaultyReader {
    inner: Box<dyn Reader>,
    plan: FaultPlan,
    rng: SplitMix64,
    /// What the inner reader has, by the tag used there.
    inside: HashMap<u64, Inside>,
    next: u64,
    /// Completed inside, reported after so many more reaps.
    held: Vec<(u32, ReadDone)>,
}

struct Inside {
    request: ReadRequest,
    retries_left: u32,
}

impl FaultyReader {
    /// Makes `inner` fail as planned.
    pub fn new(inner: Box<dyn Reader>, plan: FaultPlan) -> Self {
        FaultyReader {
            inner,
            plan,
            rng: SplitMix64(plan.seed),
            inside: HashMap::new(),
            next: 0,
            held: Vec::new(),
        }
    }

    fn pass_on(&mut self, request: ReadRequest, retries_left: u32) -> Result<(), ReadError> {
        let tag = self.next;
        self.inner.submit(ReadRequest { tag, ..request })?;
        self.next += 1;
        let inside = Inside { request, retries_left };
        self.inside.insert(tag, inside);
        Ok(())
    }

    /// Gives one inner completion its fate.
    fn received(&mut self, done: ReadDone) -> Result<(), ReadError> {
        let Some(Inside { request, retries_left }) = self.inside.remove(&done.tag) else {
            return Ok(());
        };
        if done.result.is_ok() && retries_left > 0 && self.rng.chance(self.plan.retry) {
            self.pass_on(request, retries_left - 1)?;
            self.inner.kick();
            return Ok(());
        }
        let failed = done.result.is_ok() && self.rng.chance(self.plan.fail);
        let result = match failed {
            true => Err(ReadError::Io {
                path: PathBuf::from("(injected by FaultyReader)"),
                offset: request.offset,
                len: request.len,
                source: io::Error::from_raw_os_error(libc::EIO),
            }),
            false => done.result,
        };
        let reaps = match self.rng.chance(self.plan.delay) {
            true => 1 + self.rng.below(8) as u32,
            false => 0,
        };
        let tag = request.tag;
        self.held.push((reaps, ReadDone { tag, result }));
        Ok(())
    }

    /// Moves what is due to `done`; the next due one at least if `any`.
    fn release(&mut self, done: &mut Vec<ReadDone>, any: bool) {
        if self.plan.reorder {
            for i in (1..self.held.len()).rev() {
                self.held.swap(i, self.rng.below(i + 1));
            }
        }
        if any {
            let soonest = self.held.iter().map(|h| h.0).min().unwrap_or(0);
            self.held.iter_mut().for_each(|h| h.0 -= soonest);
        }
        for (reaps, report) in std::mem::take(&mut self.held) {
            match reaps {
                0 => done.push(report),
                n => self.held.push((n - 1, report)),
            }
        }
    }
}

impl Reader for FaultyReader {
    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadError> {
        self.pass_on(request, 2)
    }

    fn kick(&mut self) {
        self.inner.kick();
    }

    fn reap(&mut self, done: &mut Vec<ReadDone>, block: bool) -> Result<(), ReadError> {
        let before = done.len();
        loop {
            let mut inner = Vec::new();
            self.inner.reap(&mut inner, block && self.held.is_empty())?;
            for report in inner {
                self.received(report)?;
            }
            self.release(done, block);
            if !block || done.len() > before || self.outstanding() == 0 {
                return Ok(());
            }
        }
    }

    fn cancel_queued_prefetches(&mut self, done: &mut Vec<ReadDone>) {
        let mut inner = Vec::new();
        self.inner.cancel_queued_prefetches(&mut inner);
        for report in inner {
            if let Some(Inside { request, .. }) = self.inside.remove(&report.tag) {
                let (tag, result) = (request.tag, report.result);
                done.push(ReadDone { tag, result });
            }
        }
    }

    fn promote(&mut self, tag: u64) {
        let wanted = self.inside.iter().find(|(_, i)| i.request.tag == tag);
        if let Some((&inner, _)) = wanted {
            self.inner.promote(inner);
        }
    }

    fn forget(&mut self, range: Range<usize>) {
        self.inner.forget(range);
    }

    fn busy(&self) -> Busy {
        self.inner.busy()
    }

    fn outstanding(&self) -> usize {
        self.inside.len() + self.held.len()
    }

    fn name(&self) -> &'static str {
        "faulty"
    }
}
