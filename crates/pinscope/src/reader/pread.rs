//! A pool of threads that call `pread`: for kernels and containers without
//! io_uring.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::queue::{Finished, WorkQueue};
use super::{check_request, ModelFiles, ReadDone, ReadError, ReadRequest, Reader, ReaderOptions};
use crate::arena::Arena;

const NAME: &str = "pread";

/// See the module.
pub(super) struct PreadReader {
    shared: Arc<Shared>,
    /// Submitted, but not yet visible to the threads.
    staged: Vec<ReadRequest>,
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
        let queue = WorkQueue::new(ReaderOptions {
            depth: threads,
            prefetch_depth: options.prefetch_depth.min(threads - 1).max(1),
            ..options
        });
        let shared = Arc::new(Shared {
            files,
            arena,
            state: Mutex::new(State { queue, finished: Vec::new(), stop: false }),
            work: Condvar::new(),
            over: Condvar::new(),
        });
        let mut reader =
            PreadReader { shared, staged: Vec::new(), outstanding: 0, threads: Vec::new() };
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

    /// Locks the state, with everything submitted in the queue.
    fn admit(&mut self) -> MutexGuard<'_, State> {
        let mut state = self.shared.lock();
        for request in self.staged.drain(..) {
            state.queue.push(request);
        }
        state
    }

    fn conclude(&mut self, finished: Vec<Finished>, done: &mut Vec<ReadDone>) {
        self.outstanding -= finished.len();
        done.extend(finished.into_iter().map(|f| f.conclude(&self.shared.files)));
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
            drop(self.admit());
            self.shared.work.notify_all();
        }
    }

    fn reap(&mut self, done: &mut Vec<ReadDone>, block: bool) -> Result<(), ReadError> {
        self.kick();
        let finished = {
            let mut state = self.shared.lock();
            while block && self.outstanding > 0 && state.finished.is_empty() {
                state = self.shared.over.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            std::mem::take(&mut state.finished)
        };
        self.conclude(finished, done);
        Ok(())
    }

    fn cancel_queued_prefetches(&mut self, done: &mut Vec<ReadDone>) {
        let finished = self.admit().queue.cancel_prefetches();
        self.shared.work.notify_all();
        self.conclude(finished, done);
    }

    fn promote(&mut self, tag: u64) {
        self.admit().queue.promote(tag);
        self.shared.work.notify_all();
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
        while !state.stop {
            let Some(chunk) = state.queue.pop() else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let result =
                self.files.read_pages(chunk.file, chunk.offset, &self.arena, chunk.dest, chunk.len);
            state = self.lock();
            let finished = state.queue.finish(chunk, result, &self.files);
            if let Some(finished) = finished {
                state.finished.push(finished);
                self.over.notify_all();
            }
        }
    }
}
