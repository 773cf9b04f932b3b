//! Keeps writes and fused pairs of one namespace apart, over all its controllers and shards.
//!
//! The rule: a Compare-and-Write pair is atomic against every other pair and against every command that changes the
//! namespace's data. Reads pass freely: they see each block as it was before or after the pair, never in between.
//!
//! ```text
//!   a write:  enter ─► submit ─► leave              one atomic addition each while there are no pairs
//!   a pair:   lock range ─► drain ─► compare ─► write ─► unlock
//!                           └ no new writes enter until those inside have left; then only those outside the range do
//! ```
//!
//! Who must wait looks again on a later turn of its shard: pairs are rare, and a waker cannot cross shards. A task holds no
//! bounce buffer while it waits here, because a write inside may need one.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use millrace_block::{BlockCount, IoOperation, Lba, TaskContext, yield_now};

/// A range of blocks: first, and past the last.
pub(crate) type Range = (u64, u64);

/// The range of a command, which was checked to lie within its volume.
pub(super) fn range(lba: Lba, count: BlockCount) -> Range {
    (lba.0, lba.0.saturating_add(count.0))
}

/// One pair's range.
const PAIR: u64 = 1 << 32;
/// Somebody waits for the writes inside to leave.
const DRAIN: u64 = 1 << 63;
/// Writes inside.
const WRITES: u64 = PAIR - 1;

/// Turns that a waiting task looks again at once, before it sleeps between looks.
const EAGER: u32 = 16;
const NAP: Duration = Duration::from_micros(50);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct WriteGate {
    /// [`DRAIN`], number of pairs, number of writes inside.
    ///
    /// Every step is an acquire-release operation on this word, which orders it against all others: a write that enters
    /// either is seen by a drain that begins later, or sees what its beginner did before.
    state: AtomicU64,
    pairs: Mutex<Vec<Range>>,
}

impl WriteGate {
    fn pairs(&self) -> MutexGuard<'_, Vec<Range>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters for a write, unless a pair is in the way.
    #[inline]
    pub(super) fn try_enter(&self, range: Range) -> Option<Entered<'_>> {
        let before = self.state.fetch_add(1, Ordering::AcqRel);
        let entered = Entered(self);
        if before < PAIR {
            return Some(entered);
        }
        self.is_open(before, range).then_some(entered)
    }

    #[cold]
    fn is_open(&self, state: u64, range: Range) -> bool {
        state & DRAIN == 0 && !self.pairs().iter().any(|&pair| overlap(pair, range))
    }

    /// Enters for a write, waiting for pairs in the way.
    pub(super) async fn enter(&self, cx: TaskContext<'_>, range: Range) -> Entered<'_> {
        let mut tries = 0;
        loop {
            if let Some(entered) = self.try_enter(range) {
                return entered;
            }
            pause(cx, &mut tries).await;
        }
    }

    /// Locks a range for a pair: until the lock is dropped, no write overlaps it.
    pub(super) async fn lock(&self, cx: TaskContext<'_>, range: Range) -> PairLock<'_> {
        let mut tries = 0;
        while !self.begin(Some(range)) {
            pause(cx, &mut tries).await;
        }
        let lock = PairLock { gate: self, range };
        self.drained(cx).await;
        lock
    }

    /// Waits until every write that is inside now has left.
    pub(super) async fn drain(&self, cx: TaskContext<'_>) {
        let mut tries = 0;
        while !self.begin(None) {
            pause(cx, &mut tries).await;
        }
        self.drained(cx).await;
    }

    /// Closes the gate for a drain; false when it must be tried again.
    fn begin(&self, range: Option<Range>) -> bool {
        let mut pairs = self.pairs();
        let busy = self.state.load(Ordering::Acquire) & DRAIN != 0;
        if busy || range.is_some_and(|range| pairs.iter().any(|&pair| overlap(pair, range))) {
            return false;
        }
        pairs.extend(range);
        // The mutex is held: nobody else sets DRAIN in between.
        self.state.fetch_add(DRAIN + if range.is_some() { PAIR } else { 0 }, Ordering::AcqRel);
        true
    }

    /// Waits for the writes inside, then opens the gate.
    async fn drained(&self, cx: TaskContext<'_>) {
        let _open = Opener(self);
        let mut tries = 0;
        while self.state.load(Ordering::Acquire) & WRITES != 0 {
            pause(cx, &mut tries).await;
        }
    }
}

/// Ends a drain, also when its task is torn down.
struct Opener<'a>(&'a WriteGate);

impl Drop for Opener<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!DRAIN, Ordering::AcqRel);
    }
}

/// A write inside the gate.
#[derive(Debug)]
pub(super) struct Entered<'a>(&'a WriteGate);

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.state.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A pair's range, locked.
#[derive(Debug)]
pub(super) struct PairLock<'a> {
    gate: &'a WriteGate,
    range: Range,
}

impl Drop for PairLock<'_> {
    fn drop(&mut self) {
        let mut pairs = self.gate.pairs();
        if let Some(at) = pairs.iter().position(|&pair| pair == self.range) {
            pairs.swap_remove(at);
        }
        self.gate.state.fetch_sub(PAIR, Ordering::AcqRel);
    }
}

fn overlap(a: Range, b: Range) -> bool {
    a.0 < b.1 && b.0 < a.1
}

async fn pause(cx: TaskContext<'_>, tries: &mut u32) {
    *tries += 1;
    if *tries <= EAGER {
        yield_now().await;
    } else {
        cx.io(IoOperation::Sleep(NAP)).await;
    }
}

#[cfg(test)]
mod tests;
