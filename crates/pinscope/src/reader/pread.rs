//! A pool of threads that call `pread`: for kernels and containers without
//! io_uring.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::queue::{Finished, WorkQueue};
use super::{
    check_request, Busy, ModelFiles, ReadDone, ReadError, ReadRequest, Reader, ReaderOptions,
};
use crate::arena::Arena;

const NAME: &str = "pread";

/// See the module.
pub(super) struct PreadReader {
    shared: Arc<Shared>,
    /// Submitted, but not yet visible to the threads.
    staged: Vec<ReadRequest>,
    /// Room to take over what is finished.
    taken: Vec<Finished>,
    outstanding: usize,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    files: Arc<ModelFiles>,
    arena: Arc<Arena>,
    state: Mutex<State>,
    /// There may be something to read, or it is time to stop.
    work: Condvar,
    /// A request is over.
    over: Condvar,
}

struct State {
    queue: WorkQueue,
    finished: Vec<Finished>,
    /// Threads without work, and whether the caller waits: waking somebody up
    /// costs a system call even if nobody sleeps.
    idle: usize,
    waits: bool,
    stop: bool,
}

impl PreadReader {
    pub fn open(
        files: Arc<ModelFiles>,
        arena: Arc<Arena>,
        options: ReaderOptions,
    ) -> Result<Self, ReadError> {
        let threads = options.threads.max(1);
        // One thread at least stays free for demand.
        let options = ReaderOptions { depth: threads, ..options };
        let queue = WorkQueue::new(options, threads - 1, threads);
        let shared = Arc::new(Shared {
            files,
            arena,
            state: Mutex::new(State {
                queue,
                finished: Vec::new(),
                idle: 0,
                waits: false,
                stop: false,
            }),
            work: Condvar::new(),
            over: Condvar::new(),
        });
        let mut reader = PreadReader {
            shared,
            staged: Vec::new(),
            taken: Vec::new(),
            outstanding: 0,
            threads: Vec::new(),
        };
        for i in 0..threads {
            let shared = reader.shared.clone();
            let spawned = std::thread::Builder::new()
                .name(format!("pinscope-read-{i}"))
                .spawn(move || shared.serve());
            match spawned {
                Ok(thread) => reader.threads.push(thread),
                Err(source) if i == 0 => {
                    return Err(ReadError::Unavailable {
                        reader: NAME,
                        source,
                        hint: " (raise the limit of threads, ulimit -u)",
                    })
                }
                Err(_) => break, // fewer threads do
            }
        }
        Ok(reader)
    }

    /// Lets the threads see what was submitted, and `change` in the queue.
    fn admit(&mut self, change: impl FnOnce(&mut WorkQueue)) {
        let mut state = self.shared.lock();
        for request in self.staged.drain(..) {
            state.queue.push(request);
        }
        state.queue.follow(&self.shared.files, |o| o.threads);
        change(&mut state.queue);
        if state.idle > 0 {
            self.shared.work.notify_all();
        }
    }
}

impl Reader for PreadReader {
    fn submit(&mut self, request: ReadRequest) -> Result<(), ReadError> {
        check_request(&request, &self.shared.files, &self.shared.arena)?;
        self.staged.push(request);
        self.outstanding += 1;
        Ok(())
    }

    fn kick(&mut self) {
        if !self.staged.is_empty() {
            self.admit(|_| {});
        }
    }

    fn reap(&mut self, done: &mut Vec<ReadDone>, block: bool) -> Result<(), ReadError> {
        self.kick();
        let mut state = self.shared.lock();
        while block && self.outstanding > 0 && state.finished.is_empty() {
            state.waits = true;
            state = self.shared.over.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waits = false;
        std::mem::swap(&mut state.finished, &mut self.taken);
        drop(state);
        self.outstanding -= self.taken.len();
        done.extend(self.taken.drain(..).map(|f| f.conclude(&self.shared.files)));
        Ok(())
    }

    fn cancel_queued_prefetches(&mut self, done: &mut Vec<ReadDone>) {
        let mut taken = std::mem::take(&mut self.taken);
        self.admit(|queue| queue.cancel_prefetches(|finished| taken.push(finished)));
        self.outstanding -= taken.len();
        done.extend(taken.drain(..).map(|f| f.conclude(&self.shared.files)));
        self.taken = taken;
    }

    fn promote(&mut self, tag: u64) {
        self.admit(|queue| queue.promote(tag));
    }

    fn busy(&self) -> Busy {
        self.shared.lock().queue.busy()
    }

    fn outstanding(&self) -> usize {
        self.outstanding
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

impl Drop for PreadReader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A panic in a thread was already printed.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One thread of the pool.
    fn serve(&self) {
        let mut state = self.lock();
        // The caller is woken up when the lock is free for it.
        let mut wake = false;
        while !state.stop {
            let next = state.queue.pop(Instant::now());
            let Some(chunk) = next else {
                if std::mem::take(&mut wake) {
                    self.over.notify_one();
                }
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            drop(state);
            if std::mem::take(&mut wake) {
                self.over.notify_one();
            }
            let result =
                self.files.read_pages(chunk.file, chunk.offset, &self.arena, chunk.dest, chunk.len);
            let now = Instant::now();
            state = self.lock();
            if let Some(finished) = state.queue.finish(chunk, result, (now, true), &self.files) {
                state.finished.push(finished);
                wake = std::mem::take(&mut state.waits);
            }
        }
    }
}
