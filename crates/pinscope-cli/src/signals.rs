//! Waiting to be told to stop: Ctrl-C, `kill`, a terminal that is closed.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// The signals that ask a program to end, held back so that it can clean up.
pub struct StopSignals(libc::sigset_t);

impl StopSignals {
    /// From now on these signals wait until they are asked for, for this
    /// thread and all that it starts.
    ///
    /// # Errors
    /// What the kernel says; it has no reason to.
    pub fn hold() -> io::Result<StopSignals> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` fills the set in; the others are told of it then.
        let (set, rc) = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            let set = set.assume_init();
            (set, libc::pthread_sigmask(libc::SIG_BLOCK, &set, ptr::null_mut()))
        };
        match rc {
            0 => Ok(StopSignals(set)),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }

    /// Whether one has come; each is reported once.
    pub fn arrived(&self) -> bool {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: reads the set and the time; nothing is written.
        unsafe { libc::sigtimedwait(&self.0, ptr::null_mut(), &now) > 0 }
    }

    /// Sleeps until one comes.
    pub fn wait(&self) {
        // Fails only when a debugger or the like interrupts it.
        // SAFETY: reads the set; nothing is written.
        while unsafe { libc::sigwaitinfo(&self.0, ptr::null_mut()) } <= 0 {}
    }
}
