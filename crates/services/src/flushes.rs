//! Flushes of a leg, which those who need one at the same time have together.
//!
//! A leg may drop what it could not make durable, and its next flush succeeds all the same. So one that it has refused, whoever asked for it,
//! is the matter of all who had written before: a service asks how many have [failed](Flushes::failed) before it writes, and the guest is told
//! at its next flush.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use millrace_block::{BlockError, Request, Step, TaskContext, Volume};

use crate::{
    legs::{self, Leg},
    locks::{OwnLines, Turn, until_at_last},
    losses::Losses,
    record::Region,
    service::ServiceError,
};

/// The longest nap of who waits for another's flush, in looks of [`until_at_last`]: a millisecond.
const LONGEST_NAP: u32 = 20;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    turn: Turn,
    /// Counts those who need one.
    wanted: AtomicU64,
    /// Up to whom it was done.
    done: AtomicU64,
    losses: OwnLines<Losses>,
}

impl Flushes {
    /// How many the leg has refused.
    pub(crate) fn failed(&self) -> u64 {
        self.losses.0.count()
    }

    /// An error where the leg has refused one since so many had `failed`.
    pub(crate) fn check(&self, failed: u64) -> Result<(), BlockError> {
        if self.failed() == failed { Ok(()) } else { Err(BlockError::WriteFault { errno: 0 }) }
    }

    /// Makes durable what was written since so many had `failed`.
    pub(crate) async fn flush(&self, cx: TaskContext<'_>, leg: &dyn Volume, failed: u64) -> Result<(), BlockError> {
        // SeqCst: whoever flushes loads `wanted` after it has the turn, and flushes for everybody who had come by then.
        let mine = self.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        let is_done = || self.done.load(Ordering::SeqCst) >= mine;
        let look = || if is_done() { Some(None) } else { self.turn.try_take().map(Some) };
        let turn = until_at_last(cx, LONGEST_NAP, look).await;
        if turn.is_some() && !is_done() {
            let all = self.wanted.load(Ordering::SeqCst);
            self.flush_alone(cx, leg).await?;
            self.done.fetch_max(all, Ordering::SeqCst);
        }
        self.check(failed)
    }

    /// A flush of the service's own.
    pub(crate) async fn flush_alone(&self, cx: TaskContext<'_>, leg: &dyn Volume) -> Result<(), BlockError> {
        let flushed = legs::flush(cx, leg).await;
        if flushed.is_err() {
            self.losses.0.add();
        }
        flushed
    }

    /// The leg has refused a flush that was not asked for by way of this: the guest is told at its next one.
    pub(crate) fn note_refused(&self) {
        self.losses.0.add();
    }

    /// Makes bytes of the leg read as zeroes, durably, on the calling thread. What a guest writes meanwhile waits in the leg as well, so that
    /// the flush at the end is one of the service's own.
    pub(crate) fn erase(&self, leg: &Leg, offset: u64, len: u64) -> Result<(), ServiceError> {
        let on = Arc::clone(leg);
        let erased = legs::block_on(move |cx| {
            Box::pin(async move {
                legs::clear_all(cx, &*on, offset, len).await?;
                Ok::<_, BlockError>(legs::flush(cx, &*on).await)
            })
        })?;
        self.told_of(leg, "erase", erased)
    }

    /// Replaces a copy of a record of the leg, durably, on the calling thread. The flush is one of the service's own, as after [`Self::erase`].
    pub(crate) fn store(&self, leg: &Leg, region: &Region, generation: u64, content: &[u8]) -> Result<(), ServiceError> {
        let (offset, copy) = region.copy(generation, content);
        self.write(leg, offset, copy)
    }

    /// Writes bytes of the leg, as [`Self::store`].
    pub(crate) fn write(&self, leg: &Leg, offset: u64, data: Vec<u8>) -> Result<(), ServiceError> {
        let on = Arc::clone(leg);
        let written = legs::block_on(move |cx| {
            Box::pin(async move {
                legs::write_bytes(cx, &*on, offset, data).await?;
                Ok::<_, BlockError>(legs::flush(cx, &*on).await)
            })
        })?;
        self.told_of(leg, "write", written)
    }

    /// What became of work on the leg, and of the flush behind it.
    fn told_of(
        &self,
        leg: &Leg,
        what: &'static str,
        done: Result<Result<(), BlockError>, BlockError>,
    ) -> Result<(), ServiceError> {
        let done = done.and_then(|flushed| flushed.inspect_err(|_| self.note_refused()));
        done.map_err(|source| ServiceError::Leg { what, leg: leg.name().to_owned(), source })
    }

    /// A guest's flush, which is its leg's.
    pub(crate) fn of_guest<'a>(&'a self, cx: TaskContext<'a>, leg: &'a dyn Volume, request: Request<'a>) -> Step<'a> {
        let lost = self.losses.0.count();
        match leg.submit(cx, request) {
            Step::Done(flushed) => Step::Done(self.tell(lost, flushed)),
            step @ Step::Wait(_) => Step::Wait(cx.scratch.place_future(self.tell_later(lost, step))),
        }
    }

    async fn tell_later(&self, lost: u64, step: Step<'_>) -> Result<(), BlockError> {
        self.tell(lost, step.await)
    }

    fn tell(&self, lost: u64, flushed: Result<(), BlockError>) -> Result<(), BlockError> {
        if flushed.is_err() {
            // The guest is told by this one.
            self.losses.0.add();
        }
        let told = self.losses.0.tell(lost);
        flushed.and(told)
    }

    /// Whether the guest's next flush has to fail.
    pub(crate) fn is_untold(&self) -> bool {
        self.losses.0.is_untold()
    }

    /// Of the service in whose place this one comes, what was not told yet.
    pub(crate) fn take_over(&self, before: &Self) {
        self.losses.0.take_over(&before.losses.0);
    }
}
