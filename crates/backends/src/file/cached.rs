//! What direct I/O leaves in the page cache: zeroes at the edges of a range, and copies that the system makes.
//!
//! Until a flush has made it durable, a durable write may be told in the next flush's place that the disk has lost it.

use std::sync::atomic::{AtomicU64, Ordering};

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
