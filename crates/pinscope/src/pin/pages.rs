//! A set of pages of one file, as few ranges as possible.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges that do not touch; keys are starts, values are ends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Pages(BTreeMap<u64, u64>);

impl Pages {
    /// The parts of `range` that are not in the set.
    pub fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        let before = self.0.range(..=at).next_back();
        for (&start, &end) in before.into_iter().chain(self.0.range(at + 1..)) {
            if start >= range.end {
                break;
            }
            if start > at {
                gaps.push(at..start);
            }
            at = at.max(end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// Adds `range`, joined with what it overlaps or touches.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = range;
        // From the end: every range that begins at or before our end and does
        // not stop short of our start.
        while let Some((&s, &e)) = self.0.range(..=end).next_back().filter(|(_, &e)| e >= start) {
            self.0.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.0.insert(start, end);
    }

    /// The ranges, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().map(|(&start, &end)| start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn range() -> impl Strategy<Value = Range<u64>> {
        (0u64..60, 0u64..12).prop_map(|(start, len)| start..start + len)
    }

    proptest! {
        #[test]
        fn a_set_of_ranges_has_the_numbers_that_were_inserted(
            inserted in proptest::collection::vec(range(), 0..20), asked in range()
        ) {
            let mut pages = Pages::default();
            let mut numbers = BTreeSet::new();
            for range in inserted {
                pages.insert(range.clone());
                numbers.extend(range);
            }
            let ranges: Vec<_> = pages.ranges().collect();
            prop_assert!(ranges.windows(2).all(|w| w[0].end < w[1].start), "{ranges:?}");
            prop_assert_eq!(ranges.into_iter().flatten().collect::<BTreeSet<_>>(), numbers.clone());
            let missing: Vec<u64> = pages.missing(asked.clone()).into_iter().flatten().collect();
            let want: Vec<u64> = asked.filter(|n| !numbers.contains(n)).collect();
            prop_assert_eq!(missing, want);
        }
    }
}
