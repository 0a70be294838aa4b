//! Keeps llama.cpp from reading a whole model at load, under `LD_PRELOAD`.
//!
//! llama.cpp maps a model with `MAP_POPULATE` and asks for all of it with
//! `WILLNEED`. With `LD_PRELOAD=libggml_pinscope.so` its calls come to the
//! functions below, which leave those hints out for the files of the model
//! that was taken over, and pass on everything else, in any program. Without
//! `LD_PRELOAD` nobody calls them: then the page cache is dropped after load.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use pinscope::map::ExpertMap;

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the mmap system call takes pages, not bytes, on 32-bit Linux");

/// Whether `FILES` has any: most programs that call `mmap` are not ours.
static ACTIVE: AtomicBool = AtomicBool::new(false);
/// Whether a mapping came through here.
static SEEN: AtomicBool = AtomicBool::new(false);
/// Device and inode of the model's files.
static FILES: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
/// Where they are mapped.
static RANGES: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());

/// Leaves read-ahead of the files of `map`, and of no others, out from now on.
pub fn set_model(map: &ExpertMap) {
    let files = map.files().iter().filter_map(|f| std::fs::metadata(&f.path).ok());
    let files = files.map(|meta| (meta.dev(), meta.ino())).collect();
    *FILES.lock().unwrap_or_else(PoisonError::into_inner) = files;
    ACTIVE.store(true, Ordering::Release);
}

/// Whether the program's calls come through here.
pub fn is_preloaded() -> bool {
    SEEN.load(Ordering::Relaxed)
}

/// Whether `fd` is one of the model's files.
fn is_model(fd: c_int) -> bool {
    if fd < 0 || !ACTIVE.load(Ordering::Acquire) {
        return false;
    }
    // SAFETY: a plain struct, which the kernel fills in.
    let (rc, stat) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &mut stat), stat)
    };
    let files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    rc == 0 && files.contains(&(stat.st_dev, stat.st_ino))
}

/// `mmap`, without `MAP_POPULATE` for the model's files.
///
/// # Safety
/// As for `mmap`.
#[no_mangle]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let model = is_model(fd);
    let flags = if model { flags & !libc::MAP_POPULATE } else { flags };
    // SAFETY: the caller's arguments, with one hint less; `syscall` sets errno
    // and returns -1 (MAP_FAILED) just as mmap does.
    let at = unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) };
    if model && at != -1 {
        SEEN.store(true, Ordering::Relaxed);
        let start = at as usize;
        let mut ranges = RANGES.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.retain(|r| r.end <= start || start + len <= r.start);
        ranges.push(start..start + len);
    }
    at as *mut c_void
}

/// The same under the name that `_FILE_OFFSET_BITS=64` gives it.
///
/// # Safety
/// As for `mmap64`.
#[no_mangle]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: by the caller's promise.
    unsafe { mmap(addr, len, prot, flags, fd, offset) }
}

/// `posix_madvise` that ignores `WILLNEED` for the model's files.
///
/// # Safety
/// As for `posix_madvise`.
#[no_mangle]
pub unsafe extern "C" fn posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    // DONTNEED is destructive in Linux and advisory in POSIX: glibc drops it.
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    if advice == libc::POSIX_MADV_WILLNEED && ACTIVE.load(Ordering::Acquire) {
        let ranges = RANGES.lock().unwrap_or_else(PoisonError::into_inner);
        if ranges.iter().any(|r| r.contains(&(addr as usize))) {
            return 0;
        }
    }
    // SAFETY: the caller's arguments; the other POSIX advice numbers equal
    // Linux's.
    unsafe { result(libc::syscall(libc::SYS_madvise, addr, len, advice)) }
}

/// `posix_fadvise` that ignores requests to read ahead in the model's files.
///
/// # Safety
/// As for `posix_fadvise`.
#[no_mangle]
pub unsafe extern "C" fn posix_fadvise(fd: c_int, offset: i64, len: i64, advice: c_int) -> c_int {
    let ahead = [libc::POSIX_FADV_WILLNEED, libc::POSIX_FADV_SEQUENTIAL].contains(&advice);
    if ahead && is_model(fd) {
        return 0;
    }
    // SAFETY: the caller's arguments.
    unsafe { result(libc::syscall(libc::SYS_fadvise64, fd, offset, len, advice)) }
}

/// The same under the name that `_FILE_OFFSET_BITS=64` gives it.
///
/// # Safety
/// As for `posix_fadvise64`.
#[no_mangle]
pub unsafe extern "C" fn posix_fadvise64(fd: c_int, offset: i64, len: i64, advice: c_int) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { posix_fadvise(fd, offset, len, advice) }
}

/// The posix_* functions return the error number.
fn result(ret: libc::c_long) -> c_int {
    if ret == 0 {
        return 0;
    }
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}
