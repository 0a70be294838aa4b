//! Places all over a model's files, to measure reading at.

use std::sync::atomic::{AtomicU64, Ordering};

use super::ALIGN;

/// Places to read at, never the same twice for as long as the files allow.
#[derive(Debug)]
pub struct Places {
    /// Number and length of each file that is long enough, bytes.
    files: Vec<(u16, u64)>,
    run: usize,
    next: AtomicU64,
}

impl Places {
    /// Places with `run` bytes each, in whole pages, or as many as the longest
    /// file has, in files of these lengths; `None` if no file has a page.
    pub fn new(lens: impl IntoIterator<Item = u64>, run: usize) -> Option<Places> {
        let files: Vec<(u16, u64)> = (0u16..).zip(lens).collect();
        let longest = files.iter().map(|&(_, len)| len).max()?;
        let run = run.min(usize::try_from(longest).unwrap_or(usize::MAX)) / ALIGN * ALIGN;
        let files = files.into_iter().filter(|&(_, len)| len >= run as u64).collect();
        (run > 0).then_some(Places { files, run, next: AtomicU64::new(0) })
    }

    /// Bytes at each place, whole pages.
    pub fn run(&self) -> usize {
        self.run
    }

    /// The next file and offset: steps of the golden ratio spread evenly over
    /// everything and do not come back.
    pub fn next(&self) -> (u16, u64) {
        const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
        let at = self.next.fetch_add(1, Ordering::Relaxed).wrapping_mul(GOLDEN);
        let total: u64 = self.files.iter().map(|(_, len)| len).sum();
        let mut at = ((u128::from(at) * u128::from(total)) >> 64) as u64;
        let (mut file, mut len) = self.files[0];
        for &(next, its_len) in &self.files {
            (file, len) = (next, its_len);
            if at < len {
                break;
            }
            at -= len;
        }
        let last = (len - self.run as u64) / ALIGN as u64;
        (file, (at / ALIGN as u64).min(last) * ALIGN as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_whole_pages_inside_all_files_that_are_long_enough() {
        let lens = [100 * 4096 + 7, 5000, 50 * 4096];
        let places = Places::new(lens, 10_000).unwrap();
        assert_eq!(places.run(), 8192);
        let mut count = [0; 3];
        for _ in 0..300 {
            let (number, offset) = places.next();
            count[usize::from(number)] += 1;
            assert_eq!(offset % 4096, 0);
            assert!(offset + 8192 <= lens[usize::from(number)]);
        }
        assert_eq!(count[1], 0);
        assert!((190..=210).contains(&count[0]), "{count:?}");
        assert!(Places::new([100], 10_000).is_none());
        assert!(Places::new([], 10_000).is_none());
    }
}
