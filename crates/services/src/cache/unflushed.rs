//! What the legs have not made durable yet, and what was lost where a flush of one failed.
//!
//! A leg may drop what it could not make durable, and its next flush succeeds all the same:
//! * what was written back is on the fast leg still, and becomes dirty again before the slow leg is flushed once more;
//! * what requests wrote to the slow leg, or, dirty, to the fast one, is nowhere else: the guest is told at its next flush, whoever asked
//!   for the one that failed.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use millrace_block::{BlockError, TaskContext, yield_now};

use super::{Cache, Core};
use crate::losses::Losses;

/// Something was written.
pub(super) const WRITTEN: u8 = 1;
/// It was, by requests and not from the fast leg.
pub(super) const BESIDE: u8 = 2;
/// Turns of the shard that a line in use is waited for.
const TURNS: usize = 64;

/// What a leg has not made durable yet.
#[derive(Debug, Default)]
pub(super) struct Unflushed(AtomicU8);

impl Unflushed {
    pub(super) fn new(what: u8) -> Self {
        Self(AtomicU8::new(what))
    }

    /// Adds to it, without a write where nothing changes.
    #[inline]
    pub(super) fn add(&self, what: u8) {
        if self.0.load(Ordering::SeqCst) & what != what {
            self.0.fetch_or(what, Ordering::SeqCst);
        }
    }

    /// A flush begins: what is written from now on asks for another one.
    pub(super) fn take(&self) -> u8 {
        self.0.swap(0, Ordering::SeqCst)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }

    fn has(&self, what: u8) -> bool {
        self.0.load(Ordering::SeqCst) & what != 0
    }
}

/// Flushes that failed.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Of the slow leg, all of them.
    slow: AtomicU64,
    /// What was written back may not be there: see [`Cache::take_back`].
    suspect: AtomicBool,
    /// After which a guest may miss something.
    pub(super) losses: Losses,
}

impl Failures {
    /// How often the slow leg has failed to flush.
    pub(super) fn of_slow(&self) -> u64 {
        self.slow.load(Ordering::SeqCst)
    }
}

impl Cache {
    /// Flushes the slow leg, if it was written since its last flush.
    pub(super) async fn flush_slow(&self, cx: TaskContext<'_>, core: &Core) -> Result<(), BlockError> {
        self.take_back(core).await?;
        let what = self.slow_unflushed.take();
        if what == 0 {
            return Ok(());
        }
        let flushed = self.flush_leg(cx, &*self.slow).await;
        if let Err(error) = flushed {
            self.slow_unflushed.add(WRITTEN);
            self.failures.slow.fetch_add(1, Ordering::SeqCst);
            self.failures.suspect.store(true, Ordering::SeqCst);
            // What was added meanwhile may be lost, too, and the next flush asks for it in vain.
            if what & BESIDE != 0 || self.slow_unflushed.has(BESIDE) {
                self.failures.losses.add();
            }
            // One text, which is logged once however often it happens.
            self.note(format!(
                "a flush of the slow leg failed: what was written back is dirty again, and of what requests wrote there the guest is told at its \
                 next flush: {error}"
            ));
            // Otherwise before the next flush.
            let _ = self.take_back(core).await;
        }
        flushed
    }

    /// Of blocks that were written back the slow leg alone has the data from now on: they cannot become dirty again. To be called before
    /// they are taken away from the fast leg, with their range locked. Returns whether a flush that has failed may have lost them.
    pub(super) fn leave_to_slow(&self) -> bool {
        self.slow_unflushed.add(WRITTEN | BESIDE);
        self.failures.suspect.load(Ordering::SeqCst)
    }

    /// What was written back, and a failed flush may have lost, becomes dirty again. Called with the turn to commit.
    ///
    /// # Errors
    ///
    /// A line is in use for long: nothing may be flushed before it is dirty, for then it would count as written back.
    async fn take_back(&self, core: &Core) -> Result<(), BlockError> {
        if !self.failures.suspect.load(Ordering::SeqCst) {
            return Ok(());
        }
        for slot in 0..core.table.len() {
            let place = core.table.slot(slot);
            let is_stored = || place.stored.load(Ordering::SeqCst) & !place.dirty.load(Ordering::SeqCst) != 0;
            let mut turns = 0;
            while is_stored() {
                // What is stored does not go.
                let Some(line) = place.line() else { break };
                // Who has the line may wait for a buffer, and who has one for this turn.
                if let Some(_range) = core.ranges.try_lock(core.line_bytes(line)) {
                    let again = place.stored.load(Ordering::SeqCst) & place.valid.load(Ordering::SeqCst);
                    self.dirty_again(core, slot, again);
                    break;
                }
                if turns == TURNS {
                    return Err(BlockError::WriteFault { errno: 0 });
                }
                turns += 1;
                yield_now().await;
            }
        }
        self.failures.suspect.store(false, Ordering::SeqCst);
        Ok(())
    }
}
