//! Addresses that take writes and forget them.
//!
//! A program that does not map the model (`--no-mmap`) reads all of it into
//! the addresses that the device gave out, experts included. Those have no
//! memory, and must not have: one small piece is mapped over and over instead.

/// Size of the piece, unless that would take too many mappings.
const PIECE: usize = 2 << 20;
/// Mappings at most; the kernel allows a process 65530 by default.
const MAPPINGS: usize = 1 << 13;

/// Replaces the mappings of `len` bytes from `base` on, whole pages; false
/// when the system has no memory for it.
///
/// # Safety
/// The range is mapped, and nobody uses it now.
pub unsafe fn forget_writes(base: *mut u8, len: usize) -> bool {
    let piece = len.div_ceil(MAPPINGS).next_multiple_of(PIECE);
    // SAFETY: a new file in memory, closed below; mappings keep it alive.
    // They replace what is mapped inside the caller's range.
    unsafe {
        let fd = libc::memfd_create(c"pinscope-sink".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return false;
        }
        let mut done = libc::ftruncate(fd, piece as libc::off_t) == 0;
        for start in (0..len).step_by(piece) {
            done = done
                && libc::mmap(
                    base.add(start).cast(),
                    piece.min(len - start),
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED | libc::MAP_FIXED,
                    fd,
                    0,
                ) != libc::MAP_FAILED;
        }
        libc::close(fd);
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_go_nowhere_and_take_the_memory_of_one_piece() {
        let len = 5 * PIECE + 4096;
        // SAFETY: a mapping of this test's own; every access is inside it.
        unsafe {
            let base = libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
            .cast::<u8>();
            assert!(forget_writes(base, len));
            std::ptr::write_bytes(base, 7, len);
            // The same memory everywhere: the last piece is seen in the first.
            // Volatile, since the compiler may hold them for different places.
            base.add(5 * PIECE).write_volatile(9);
            assert_eq!((base.read_volatile(), base.add(PIECE).read_volatile()), (9, 9));
            libc::munmap(base.cast(), len);
        }
    }
}
