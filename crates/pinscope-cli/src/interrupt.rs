//! Ctrl-C: stops an answer, not the program; twice at the prompt ends it.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

/// The exit code of a program that Ctrl-C ended: 128 + SIGINT.
pub const EXIT_CODE: u8 = 130;

/// Presses during one answer after which the program ends: something hangs.
const PATIENCE: u8 = 3;

static ANSWERING: AtomicBool = AtomicBool::new(false);
static AT_PROMPT: AtomicBool = AtomicBool::new(false);
static PRESSED: AtomicU8 = AtomicU8::new(0);
static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// The flag that a press raises while an answer is computed.
pub fn stop_flag() -> Arc<AtomicBool> {
    Arc::clone(STOP.get_or_init(Default::default))
}

/// Takes over Ctrl-C. Until [`answering`] it ends the program.
pub fn install() -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(|| {
        let pressed = PRESSED.fetch_add(1, Ordering::SeqCst) + 1;
        if ANSWERING.load(Ordering::SeqCst) {
            stop_flag().store(true, Ordering::SeqCst);
            if pressed < PATIENCE {
                return;
            }
        } else if pressed == 1 && AT_PROMPT.load(Ordering::SeqCst) {
            let _ = write!(std::io::stderr(), "\n(Ctrl-C again or /exit to leave)\n> ");
            return;
        }
        // SAFETY: ends the process at once; running destructors here would
        // race with the threads that compute.
        unsafe { libc::_exit(EXIT_CODE.into()) }
    })
}

/// An answer is computed until the guard is dropped.
pub fn answering() -> impl Drop {
    stop_flag().store(false, Ordering::SeqCst);
    PRESSED.store(0, Ordering::SeqCst);
    Guard::raise(&ANSWERING)
}

/// The user is asked for a line until the guard is dropped.
pub fn at_prompt() -> impl Drop {
    PRESSED.store(0, Ordering::SeqCst);
    Guard::raise(&AT_PROMPT)
}

struct Guard(&'static AtomicBool);

impl Guard {
    fn raise(flag: &'static AtomicBool) -> Guard {
        flag.store(true, Ordering::SeqCst);
        Guard(flag)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
