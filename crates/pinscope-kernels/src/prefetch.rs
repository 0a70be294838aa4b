//! Requests for memory ahead of its use.

/// Asks for `bytes` bytes; the address may be anything. Processors' own
/// prefetchers stop at each page, a few rows on. Does nothing on processors for
/// which there are no kernels.
#[inline(always)]
pub fn prefetch(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        let at = at.wrapping_add(line);
        // SAFETY: all processors of these kinds have it, and it reads nothing.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            use std::arch::x86_64::*;
            _mm_prefetch::<_MM_HINT_T0>(at.cast());
        }
        // SAFETY: as above. `_prefetch` is not stable.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) at,
                options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = at;
    }
}
