//! Ranges that Write Uncorrectable marked (NVM 3.3.7): reading them fails until they are written again. They outlive the worker.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use millrace_block::{BlockCount, Lba};
use zerocopy::FromBytes;

use super::super::{lasting::Lasting, state::Cell};

/// Ranges that one namespace remembers at most.
const MOST: usize = 16_384;

/// Bytes that a change moves at most: the list is written anew.
pub(super) const CHANGE_BYTES: u64 = size_of::<RangeState>() as u64;

/// The ranges as they outlive the worker.
#[derive(FromBytes)]
#[repr(C)]
pub(crate) struct RangeState {
    count: Cell<u64>,
    /// First block and past the last.
    ranges: [[Cell<u64>; 2]; MOST],
}

/// See the module. Shared by all controllers of a namespace; it costs one look while there are none.
#[derive(Debug, Default)]
pub(crate) struct UncorrectableRanges {
    /// Number of ranges. Relaxed: a command that overlaps another in time may see either.
    count: AtomicUsize,
    ranges: Mutex<Ranges>,
}

#[derive(Debug, Default)]
struct Ranges {
    /// First block to past the last; neither overlapping nor touching.
    map: BTreeMap<u64, u64>,
    lasting: Lasting<RangeState>,
}

impl UncorrectableRanges {
    /// Those that the worker before this one left, and changes of which the next one finds.
    pub(crate) fn over(lasting: Lasting<RangeState>) -> Self {
        let map: BTreeMap<u64, u64> = lasting.last().map_or_else(BTreeMap::new, |state| {
            let count = usize::try_from(state.count.get()).unwrap_or(MOST);
            state.ranges.iter().take(count).map(|[start, end]| (start.get(), end.get())).collect()
        });
        Self { count: AtomicUsize::new(map.len()), ranges: Mutex::new(Ranges { map, lasting }) }
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// After every change.
    fn settle(&self, ranges: &mut Ranges) {
        self.count.store(ranges.map.len(), Ordering::Relaxed);
        let Ranges { map, lasting } = ranges;
        lasting.replace(|state| {
            state.count.set(map.len() as u64);
            for ([first, past], (start, end)) in state.ranges.iter().zip(map) {
                first.set(*start);
                past.set(*end);
            }
        });
    }

    /// Whether no block is marked.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Whether a block of the range is marked.
    #[inline]
    pub(crate) fn overlaps(&self, lba: Lba, count: BlockCount) -> bool {
        !self.is_empty() && self.overlaps_slowly(lba, count)
    }

    #[cold]
    fn overlaps_slowly(&self, lba: Lba, count: BlockCount) -> bool {
        let end = lba.0.saturating_add(count.0);
        self.ranges().map.range(..end).next_back().is_some_and(|(_, &marked_end)| marked_end > lba.0)
    }

    /// Marks a range. False: too many ranges are marked.
    pub(super) fn mark(&self, lba: Lba, count: BlockCount) -> bool {
        let (mut start, mut end) = (lba.0, lba.0.saturating_add(count.0));
        let mut ranges = self.ranges();
        if ranges.map.len() >= MOST {
            return false;
        }
        // Everything that overlaps or touches becomes one range.
        while let Some((&other, &other_end)) = ranges.map.range(..=end).next_back().filter(|&(_, &e)| e >= start) {
            ranges.map.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        ranges.map.insert(start, end);
        self.settle(&mut ranges);
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
        let mut changed = false;
        while let Some((&other, &other_end)) = ranges.map.range(..end).next_back().filter(|&(_, &e)| e > start) {
            changed = true;
            ranges.map.remove(&other);
            if other < start {
                ranges.map.insert(other, start);
            }
            // A guest that splits ranges for ever loses marks rather than takes memory.
            if other_end > end && ranges.map.len() < MOST {
                ranges.map.insert(end, other_end);
            }
        }
        if changed {
            self.settle(&mut ranges);
        }
    }

    /// The namespace was formatted: nothing is marked any more.
    pub(crate) fn clear_all(&self) {
        let mut ranges = self.ranges();
        if !ranges.map.is_empty() {
            ranges.map.clear();
            self.settle(&mut ranges);
        }
    }
}

#[cfg(test)]
impl UncorrectableRanges {
    pub(crate) fn with_lasting<R>(&self, look: impl FnOnce(&Lasting<RangeState>) -> R) -> R {
        look(&self.ranges().lasting)
    }
}

#[cfg(test)]
mod tests;
