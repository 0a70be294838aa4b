//! Keeps llama.cpp from reading the whole model file at load.
//!
//! llama.cpp maps a model with `MAP_POPULATE` and asks for all of it with
//! `WILLNEED`; no parameter turns that off. A binary that is linked with
//! `--wrap=mmap`, `--wrap=posix_madvise` and `--wrap=posix_fadvise` (see the
//! `build.rs` of pinscope-cli) calls the three functions below instead. They
//! change something only on a thread that is inside
//! [`Model::load`](crate::Model::load) without `read_ahead`, so a loader on
//! another thread, or plain llama.cpp in the same process, is left alone.
//!
//! The real calls go to the kernel directly and not through `__real_mmap`:
//! that symbol exists only under `--wrap`, and a test binary without the link
//! arguments must still link.

use std::cell::Cell;
use std::ffi::{c_int, c_void};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the mmap system call takes pages, not bytes, on 32-bit Linux");

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Suppresses read-ahead on this thread until it is dropped.
pub(crate) struct Quiet {
    before: bool,
}

impl Quiet {
    pub(crate) fn new() -> Quiet {
        Quiet { before: QUIET.replace(true) }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        QUIET.set(self.before);
    }
}

/// `mmap` without `MAP_POPULATE` for files while read-ahead is suppressed.
///
/// # Safety
/// As for `mmap`.
#[no_mangle]
pub unsafe extern "C" fn __wrap_mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let mut flags = flags;
    if QUIET.get() && fd >= 0 {
        flags &= !libc::MAP_POPULATE;
    }
    // SAFETY: the caller's arguments, with one hint less; `syscall` sets errno
    // and returns -1 (MAP_FAILED) just as mmap does.
    unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) as *mut c_void }
}

/// `posix_madvise` that ignores `WILLNEED` while read-ahead is suppressed.
///
/// # Safety
/// As for `posix_madvise`.
#[no_mangle]
pub unsafe extern "C" fn __wrap_posix_madvise(
    addr: *mut c_void,
    len: usize,
    advice: c_int,
) -> c_int {
    // DONTNEED is destructive in Linux and advisory in POSIX: glibc drops it.
    if advice == libc::POSIX_MADV_DONTNEED || (QUIET.get() && advice == libc::POSIX_MADV_WILLNEED) {
        return 0;
    }
    // SAFETY: the caller's arguments; the other POSIX advice numbers equal
    // Linux's.
    unsafe { result(libc::syscall(libc::SYS_madvise, addr, len, advice)) }
}

/// `posix_fadvise` that does nothing while read-ahead is suppressed.
///
/// # Safety
/// As for `posix_fadvise`.
#[no_mangle]
pub unsafe extern "C" fn __wrap_posix_fadvise(
    fd: c_int,
    offset: i64,
    len: i64,
    advice: c_int,
) -> c_int {
    if QUIET.get() {
        return 0;
    }
    // SAFETY: the caller's arguments.
    unsafe { result(libc::syscall(libc::SYS_fadvise64, fd, offset, len, advice)) }
}

/// The posix_* functions return the error number and leave errno alone.
fn result(ret: libc::c_long) -> c_int {
    if ret == 0 {
        return 0;
    }
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// Pages of a fresh private file mapping that are present in the page table
    /// right after `mmap` asked for `MAP_POPULATE`.
    fn rss_growth_of_a_populated_mapping(quiet: bool) -> usize {
        const LEN: usize = 64 << 20;
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let len = LEN.min(file.metadata().unwrap().len() as usize);
        let _quiet = quiet.then(Quiet::new);
        // SAFETY: a fresh read-only mapping, removed below.
        unsafe {
            let addr = __wrap_mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_POPULATE,
                file.as_raw_fd(),
                0,
            );
            assert_ne!(addr, libc::MAP_FAILED);
            let pages = referenced_kib(addr as usize);
            libc::munmap(addr, len);
            pages
        }
    }

    fn referenced_kib(start: usize) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let head = format!("{start:x}-");
        let mut lines = smaps.lines().skip_while(|l| !l.starts_with(&head));
        let rss = lines.find(|l| l.starts_with("Rss:")).unwrap();
        rss.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn a_file_mapping_is_populated_only_when_read_ahead_is_allowed() {
        assert_eq!(rss_growth_of_a_populated_mapping(true), 0);
        assert!(rss_growth_of_a_populated_mapping(false) > 0);
    }

    #[test]
    fn bad_advice_is_reported_as_an_error_number() {
        // SAFETY: an address that is not mapped is refused, nothing is touched.
        let got = unsafe { __wrap_posix_madvise(4096 as *mut c_void, 4096, 0) };
        assert_eq!(got, libc::ENOMEM);
    }
}
