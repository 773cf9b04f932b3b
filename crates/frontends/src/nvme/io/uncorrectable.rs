//! Ranges that Write Uncorrectable marked (NVM 3.3.7): reading them fails until they are written again.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use millrace_block::{BlockCount, Lba};

/// Ranges that one namespace remembers at most.
const MOST: usize = 16_384;

/// See the module. Shared by all controllers of a namespace; it costs one look while there are none.
#[derive(Debug, Default)]
pub(crate) struct UncorrectableRanges {
    /// Number of ranges. Relaxed: a command that overlaps another in time may see either.
    count: AtomicUsize,
    /// First block to past the last; neither overlapping nor touching.
    ranges: Mutex<BTreeMap<u64, u64>>,
}

impl UncorrectableRanges {
    fn ranges(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no block is marked.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Whether a block of the range is marked.
    #[inline]
    pub(super) fn overlaps(&self, lba: Lba, count: BlockCount) -> bool {
        !self.is_empty() && self.overlaps_slowly(lba, count)
    }

    #[cold]
    fn overlaps_slowly(&self, lba: Lba, count: BlockCount) -> bool {
        let end = lba.0.saturating_add(count.0);
        self.ranges().range(..end).next_back().is_some_and(|(_, &marked_end)| marked_end > lba.0)
    }

    /// Marks a range. False: too many ranges are marked.
    pub(super) fn mark(&self, lba: Lba, count: BlockCount) -> bool {
        let (mut start, mut end) = (lba.0, lba.0.saturating_add(count.0));
        let mut ranges = self.ranges();
        if ranges.len() >= MOST {
            return false;
        }
        // Everything that overlaps or touches becomes one range.
        while let Some((&other, &other_end)) = ranges.range(..=end).next_back().filter(|&(_, &e)| e >= start) {
            ranges.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        ranges.insert(start, end);
        self.count.store(ranges.len(), Ordering::Relaxed);
        true
    }

    /// The range was written: its blocks can be read again.
    #[inline]
    pub(crate) fn clear(&self, lba: Lba, count: BlockCount) {
        if !self.is_empty() {
            self.clear_slowly(lba, count);
        }
    }

    #[cold]
    fn clear_slowly(&self, lba: Lba, count: BlockCount) {
        let (start, end) = (lba.0, lba.0.saturating_add(count.0));
        let mut ranges = self.ranges();
        while let Some((&other, &other_end)) = ranges.range(..end).next_back().filter(|&(_, &e)| e > start) {
            ranges.remove(&other);
            if other < start {
                ranges.insert(other, start);
            }
            // A guest that splits ranges for ever loses marks rather than takes memory.
            if other_end > end && ranges.len() < MOST {
                ranges.insert(end, other_end);
            }
        }
        self.count.store(ranges.len(), Ordering::Relaxed);
    }

    /// The namespace was formatted: nothing is marked any more.
    pub(crate) fn clear_all(&self) {
        let mut ranges = self.ranges();
        ranges.clear();
        self.count.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
