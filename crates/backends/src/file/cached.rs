//! What direct I/O leaves in the page cache: zeroes at the edges of a range, and copies that the system makes.
//!
//! Until a flush has made it durable, a durable write may be told in the next flush's place that the disk has lost it.

use std::sync::atomic::{AtomicU64, Ordering};

use millrace_memory::PAGE_SIZE;

/// Whether a range with these edges cuts a page, or a block of the file system's, which it zeroes in the page cache then. XFS's blocks may be
/// larger than pages, and its realtime extents any number of blocks. Of who tells too large a block, one flush more is wanted.
pub(super) fn cuts(edges: [u64; 2], block: u64) -> bool {
    edges.iter().any(|edge| !edge.is_multiple_of(PAGE_SIZE) || !edge.is_multiple_of(block.max(1)))
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Cached {
    /// Counts the work that puts something there.
    begun: AtomicU64,
    ended: AtomicU64,
    /// So much of it, from the first on, is durable.
    durable: AtomicU64,
}

/// Work that puts something there, until this is dropped.
#[must_use]
pub(super) struct Putting<'a>(&'a Cached);

impl Drop for Putting<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

impl Cached {
    /// Something is about to be put there.
    pub(super) fn begin(&self) -> Putting<'_> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        Putting(self)
    }

    /// How much work is durable when a flush that begins after this has succeeded. While any is under way none is counted: which of it has
    /// ended is not known.
    pub(super) fn covered(&self) -> u64 {
        // SeqCst, and in this order: where both are equal, nothing was under way at the first look.
        let ended = self.ended.load(Ordering::SeqCst);
        if self.begun.load(Ordering::SeqCst) == ended { ended } else { 0 }
    }

    /// Such a flush has succeeded.
    pub(super) fn made_durable(&self, covered: u64) {
        self.durable.fetch_max(covered, Ordering::SeqCst);
    }

    /// How much is durable before a write begins.
    #[inline]
    pub(super) fn durable(&self) -> u64 {
        // Acquire: the write comes after it.
        self.durable.load(Ordering::Acquire)
    }

    /// Whether something that was not durable may have been there since so much was. Not since now: a flush may have passed a write that has
    /// been told and has not said so yet.
    pub(super) fn held_any(&self, durable: u64) -> bool {
        self.begun.load(Ordering::SeqCst) != durable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_may_cut_blocks_that_are_larger_than_pages() {
        for (edges, block, expected) in [
            ([4096, 8192], 4096, false),
            ([4096, 8704], 4096, true),
            ([512, 8192], 512, true),
            ([4096, 8192], 512, false),
            // A punch of one page in a block of four.
            ([4096, 8192], 16384, true),
            ([16384, 49152], 16384, false),
            // Three blocks make an extent: no bits say whether it is cut.
            ([4096, 12288], 12288, true),
            ([12288, 36864], 12288, false),
            // Of a size that makes no sense, and of one that is not told.
            ([5000, 10000], 5000, true),
            ([4096, 8192], 0, false),
        ] {
            assert_eq!(cuts(edges, block), expected, "{edges:?} of {block}");
        }
    }

    #[test]
    fn a_flush_makes_durable_what_had_ended_when_it_began() {
        let cached = Cached::default();
        let before = cached.durable();
        assert!(!cached.held_any(before));
        let under_way = cached.begin();
        assert!(cached.held_any(before));
        let covered = cached.covered();
        drop(under_way);
        cached.made_durable(covered);
        assert!(cached.held_any(cached.durable()), "it was under way as the flush began");
        let covered = cached.covered();
        drop(cached.begin());
        cached.made_durable(covered);
        assert!(cached.held_any(cached.durable()), "the second came after the flush had begun");
        cached.made_durable(cached.covered());
        assert!(!cached.held_any(cached.durable()));
        assert!(cached.held_any(before), "a write that began before may have been told");
    }
}
