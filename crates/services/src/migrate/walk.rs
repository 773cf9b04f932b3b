//! The walk over OLD: what it has comes to NEW, piece by piece.

use std::sync::{Arc, atomic::Ordering};

use millrace_block::{TaskContext, Volume, yield_now};
use millrace_memory::BufferPool;

use super::{Move, Phase, holes::Holes, path::ERASED_AT_ONCE};
use crate::{
    background::{Pace, Stop},
    copy::lanes::{self, Ends, Failure, Moved, Side},
    legs,
};

/// Buffers of the walk's own, for all that is below, too: writes that wait for it hold the shard's.
const BUFFERS: usize = 4;
/// How often is looked whether there is something to be walked over again.
const LOOK: std::time::Duration = std::time::Duration::from_millis(10);

impl Move {
    /// The task.
    pub(super) async fn walk(self: Arc<Self>, cx: TaskContext<'_>, stop: Stop) {
        let pool = match BufferPool::new(BUFFERS) {
            Ok(pool) => pool,
            Err(error) => return self.end(format!("there is no memory to copy with: {error}")),
        };
        let cx = cx.with_buffers(&pool);
        let mut pace = self.plan.rate.map(Pace::new);
        while !stop.is_set() {
            let (at, phase) = (self.mark(), self.phase());
            match phase {
                Phase::Ended => return,
                _ if at < self.bytes() => {
                    // First: who sees it flushed looks at the mark.
                    self.enter(Phase::Copying);
                    let len = self.step(cx, at).await;
                    match &mut pace {
                        Some(pace) => pace.spend(cx, &stop, len).await,
                        // Places in memory make nobody wait.
                        None => yield_now().await,
                    }
                }
                Phase::Flushed => stop.sleep(cx, LOOK).await,
                Phase::Copying | Phase::Flushing => self.flush_new(cx).await,
            }
        }
    }

    /// Copies the piece at the mark; how many bytes that are.
    pub(super) async fn step(&self, cx: TaskContext<'_>, at: u64) -> u64 {
        let compare = self.compare.load(Ordering::Relaxed);
        if let Some(holes) = self.holes.get()
            && let Some(len) = self.step_over(cx, at, holes, compare).await
        {
            return len;
        }
        let Some(end) = self.still(at, (at / self.plan.piece + 1).saturating_mul(self.plan.piece)) else { return 0 };
        let _range = self.ranges.lock(cx, at..end).await;
        let Some(end) = self.still(at, end) else { return 0 };
        let ends = Ends { source: &*self.old, target: &*self.new, compare, tagged: false };
        match lanes::copy(cx, ends, at..end).await {
            Ok(Moved { written, zeroes }) => {
                self.counters.written.fetch_add(written, Ordering::Relaxed);
                self.counters.zeroes.fetch_add(zeroes, Ordering::Relaxed);
                // Not when it was sent back meanwhile.
                let _ = self.mark.compare_exchange(at, end, Ordering::SeqCst, Ordering::SeqCst);
            }
            Err(Failure { side, offset, error }) => {
                let (leg, what) = match side {
                    Side::Source => (&self.old, "read"),
                    Side::Target => (&self.new, "written"),
                };
                self.end(format!("{} cannot be {what} at byte {offset}: {error}", leg.name()));
            }
        }
        end - at
    }

    /// Where a piece at the mark ends; `None` when the mark is elsewhere. A format may come while the piece's range is waited for, and make
    /// the volume shorter.
    fn still(&self, at: u64, end: u64) -> Option<u64> {
        let end = end.min(self.bytes());
        (self.mark() == at && at < end).then_some(end)
    }

    /// Goes over a hole at the mark, if one is there; how many bytes were made zeroes.
    async fn step_over(&self, cx: TaskContext<'_>, at: u64, holes: &Holes, compare: bool) -> Option<u64> {
        // What NEW may have already is read before it is written, even if it should be zeroes.
        let find = |most| if compare { at } else { holes.end_in_old(at, most) };
        let end = find(ERASED_AT_ONCE).max(holes.end_in_both(at, ERASED_AT_ONCE)).min(self.bytes());
        if end <= at {
            return None;
        }
        let mut bytes = at..end;
        let _range = self.ranges.lock_some(cx, &mut bytes, self.plan.piece).await;
        let Some(end) = self.still(at, bytes.end) else { return Some(0) };
        // Somebody may have written there meanwhile.
        let (nothing, zeroes) = (holes.end_in_both(at, end - at).min(end), find(end - at).min(end));
        let (end, cleared) = if nothing > at { (nothing, 0) } else { (zeroes, zeroes - at) };
        if end == at {
            return Some(0);
        }
        if cleared > 0
            && let Err(error) = legs::clear(cx, &*self.new, at, cleared).await
        {
            self.end_by(error);
            return Some(0);
        }
        self.counters.zeroes.fetch_add(cleared, Ordering::Relaxed);
        self.counters.holes.fetch_add(end - at, Ordering::Relaxed);
        // Not when it was sent back meanwhile.
        let _ = self.mark.compare_exchange(at, end, Ordering::SeqCst, Ordering::SeqCst);
        Some(cleared)
    }

    /// The mark is at the end: makes NEW durable.
    pub(super) async fn flush_new(&self, cx: TaskContext<'_>) {
        self.enter(Phase::Flushing);
        match legs::flush(cx, &*self.new).await {
            Ok(()) => self.enter(Phase::Flushed),
            Err(error) => self.end_by(error),
        }
    }
}
