//! How fast memory can be read.

use std::hint::black_box;
use std::time::Instant;

use pinscope::arena::{Arena, ArenaError};

/// Most bytes that are read at a time: more than caches hold.
const BUFFER: u64 = 256 << 20;

/// Passes; the fastest counts, since nothing makes memory faster than it is.
const PASSES: usize = 5;

/// Bytes a second that one thread and `threads` threads read, in memory like
/// that of experts, at most a tenth of `available` bytes.
///
/// # Errors
/// There is no such memory.
pub fn bandwidth(threads: usize, available: u64) -> Result<(f64, f64), ArenaError> {
    let arena = Arena::new(BUFFER.min(available / 10).max(1 << 20) as usize)?;
    // SAFETY: the arena is this function's own. It is written, or the kernel
    // has one page of zeros for all of it.
    let bytes = unsafe {
        arena.ptr(0).write_bytes(1, arena.len());
        arena.bytes(0..arena.len())
    };
    Ok((best(bytes, 1), best(bytes, threads)))
}

fn best(bytes: &[u8], threads: usize) -> f64 {
    let pass = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            let mut parts = bytes.chunks(bytes.len().div_ceil(threads.max(1)));
            let own = parts.next().unwrap_or_default();
            for part in parts {
                scope.spawn(|| black_box(sum(part)));
            }
            black_box(sum(own));
        });
        bytes.len() as f64 / start.elapsed().as_secs_f64()
    };
    (0..PASSES).map(|_| pass()).fold(0.0, f64::max)
}

/// Adds up words, several sums side by side, so that additions do not wait for
/// each other.
fn sum(bytes: &[u8]) -> u64 {
    const WORDS: usize = 16;
    const WORD: usize = size_of::<u64>();
    let mut sums = [0u64; WORDS];
    for chunk in bytes.chunks_exact(WORDS * WORD) {
        for (i, sum) in sums.iter_mut().enumerate() {
            let mut word = [0; WORD];
            word.copy_from_slice(&chunk[i * WORD..][..WORD]);
            *sum = sum.wrapping_add(u64::from_ne_bytes(word));
        }
    }
    sums.iter().fold(0, |all, s| all.wrapping_add(*s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read() {
        let bytes: Vec<u8> = (0..1600u64).flat_map(u64::to_ne_bytes).collect();
        assert_eq!(sum(&bytes), 1599 * 1600 / 2);
    }
}
