//! What a guest may have lost that was acknowledged: it is told so at its next flush, once, whoever found it out.
//!
//! A leg may drop what it could not make durable, and its next flush succeeds all the same. So a flush of a service's own that a leg has
//! refused is a guest's matter, too.

use std::sync::atomic::{AtomicU64, Ordering};

use millrace_block::BlockError;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    lost: AtomicU64,
    told: AtomicU64,
}

impl Losses {
    /// How often something was lost.
    pub(crate) fn count(&self) -> u64 {
        self.lost.load(Ordering::SeqCst)
    }

    /// The guest may have lost something that was acknowledged.
    pub(crate) fn add(&self) {
        self.lost.fetch_add(1, Ordering::SeqCst);
    }

    /// Of the service in whose place this one comes, what was not told yet.
    pub(crate) fn take_over(&self, before: &Self) {
        if before.is_untold() {
            self.add();
        }
    }

    /// Whether the guest's next flush has to fail.
    #[inline]
    pub(crate) fn is_untold(&self) -> bool {
        self.count() != self.told.load(Ordering::Relaxed)
    }

    /// The end of a guest's flush, before which so often something was `lost`: an error where that, or something since, was not told yet.
    pub(crate) fn tell(&self, lost: u64) -> Result<(), BlockError> {
        let now = self.count();
        if lost == now && !self.is_untold() {
            return Ok(());
        }
        let told = self.told.fetch_max(now, Ordering::SeqCst);
        if told < now || lost < now { Err(BlockError::WriteFault { errno: 0 }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_told_once() {
        let losses = Losses::default();
        let before = losses.count();
        assert!(!losses.is_untold() && losses.tell(before).is_ok());
        losses.add();
        assert!(losses.is_untold());
        // Of a flush that began before, and of the next one, which begins after.
        assert!(losses.tell(before).is_err());
        assert!(!losses.is_untold() && losses.tell(losses.count()).is_ok());
        assert!(losses.tell(before).is_err(), "another that began before may miss the same");
        let next = Losses::default();
        next.take_over(&losses);
        assert!(!next.is_untold(), "it was told");
        losses.add();
        next.take_over(&losses);
        assert!(next.is_untold());
    }
}
