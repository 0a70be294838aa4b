//! llama.cpp's log: nothing is printed, the last complaints are kept.
//!
//! Everything is per thread. llama.cpp logs from the thread that called it, so
//! an error message never mixes with that of a load on another thread.

use llama_cpp_sys_2 as sys;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_void, CStr};
use std::io::Write;
use std::sync::Once;

/// Complaints kept for the next error message.
const KEEP: usize = 8;

#[derive(Default)]
struct Log {
    /// The line being written: llama.cpp logs in pieces.
    line: String,
    complaint: bool,
    complaints: VecDeque<String>,
    capture: Option<Vec<String>>,
}

impl Log {
    fn push(&mut self, level: sys::ggml_log_level, text: &str) {
        if level != sys::GGML_LOG_LEVEL_CONT {
            self.end_line();
            self.complaint =
                level == sys::GGML_LOG_LEVEL_WARN || level == sys::GGML_LOG_LEVEL_ERROR;
        }
        let mut rest = text;
        while let Some((head, tail)) = rest.split_once('\n') {
            self.line.push_str(head);
            self.end_line();
            rest = tail;
        }
        self.line.push_str(rest);
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = line.trim();
        if line.is_empty() {
            return;
        }
        if self.complaint {
            if self.complaints.len() == KEEP {
                self.complaints.pop_front();
            }
            self.complaints.push_back(line.to_owned());
        }
        if let Some(lines) = &mut self.capture {
            lines.push(line.to_owned());
        }
    }
}

thread_local! {
    static LOG: RefCell<Log> = RefCell::default();
}

unsafe extern "C" fn on_log(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a NUL-terminated string that lives for the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // A thread that is ending, or a log from inside a log, has nowhere to keep it.
    let _ = LOG.try_with(|log| {
        if let Ok(mut log) = log.try_borrow_mut() {
            log.push(level, &text);
        }
    });
}

/// llama.cpp asserts on some contradictions in a file's header, and on bugs. It
/// would print a stack trace and abort; the user gets a paragraph instead.
unsafe extern "C" fn on_assert(message: *const c_char) {
    // SAFETY: ggml passes a NUL-terminated string.
    let message = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    let _ = writeln!(
        std::io::stderr(),
        "llama.cpp gave up: {}. The model file is damaged or of a kind that this version of \
         llama.cpp does not handle; if other programs run it, please report this.",
        message.trim()
    );
    // SAFETY: ends the process at once, as the caller would after this.
    unsafe { libc::_exit(1) }
}

/// Starts llama.cpp and takes over its log; further calls do nothing.
pub fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: called once, before any other llama.cpp function of this
        // crate; the callbacks are static functions without user data.
        unsafe {
            sys::llama_log_set(Some(on_log), std::ptr::null_mut());
            sys::ggml_set_abort_callback(Some(on_assert));
            sys::llama_backend_init();
        }
    });
}

/// The last warnings and errors of llama.cpp on this thread, oldest first, in
/// one line; they are then forgotten. Empty if there were none.
pub fn last_errors() -> String {
    LOG.with_borrow_mut(|log| {
        log.end_line();
        Vec::from(std::mem::take(&mut log.complaints)).join("; ")
    })
}

/// Runs `work` and returns the lines that llama.cpp logged on this thread.
pub(crate) fn capture<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    LOG.with_borrow_mut(|log| {
        log.end_line();
        log.capture = Some(Vec::new());
    });
    let value = work();
    let lines = LOG.with_borrow_mut(|log| {
        log.end_line();
        log.capture.take()
    });
    (value, lines.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_and_only_complaints_are_kept_up_to_a_bound() {
        let mut log = Log::default();
        log.push(sys::GGML_LOG_LEVEL_INFO, "fine\n");
        log.push(sys::GGML_LOG_LEVEL_ERROR, "half ");
        log.push(sys::GGML_LOG_LEVEL_CONT, "and half\nsecond\n");
        assert_eq!(log.complaints, ["half and half", "second"]);
        for i in 0..20 {
            log.push(sys::GGML_LOG_LEVEL_WARN, &format!("w{i}\n"));
        }
        assert_eq!(log.complaints.len(), KEEP);
        assert_eq!(log.complaints.back().map(String::as_str), Some("w19"));
    }
}
