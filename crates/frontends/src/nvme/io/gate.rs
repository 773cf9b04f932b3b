//! Keeps writes and fused pairs of one namespace apart, over all its controllers and shards.
//!
//! The rule: a Compare-and-Write pair is atomic against every other pair and against every command that changes the
//! namespace's data. Reads pass freely: they see each block as it was before or after the pair, never in between.
//!
//! ```text
//!   a write:  enter ─► submit ─► leave              its shard's own counter, once for a batch, while there are no pairs
//!   a pair:   lock range ─► drain ─► compare ─► write ─► unlock
//!                           └ no new writes enter until those inside have left; then only those outside the range do
//!   a change: drain, which waits for the pairs inside too: nothing of before it is under way any more
//! ```
//!
//! Each shard counts its writes in a lane of its own, so that no cache line is written by several shards while there is neither
//! pair nor drain. Who wants the gate empty looks at all lanes.
//!
//! The race between a write that enters and a drain that begins: the write counts itself, then looks at the state; the drain
//! changes the state, then looks at the lanes. All four are sequentially consistent, so that at least one sees the other: the
//! write steps back, or the drain waits for it.
//!
//! Who must wait looks again on a later turn of its shard: pairs are rare, and a waker cannot cross shards. A task holds no
//! bounce buffer while it waits here, because a write inside may need one. It waits for other guests' requests, too, which may take for ever:
//! so it looks each time whether it is still to wait, and a guest's reset ends whatever of its own stands here. A drain that ends so is owed
//! yet: what it waited for may still be under way, which whoever asks how things stand must not be told otherwise.

use std::{
    cell::Cell,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
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
const PAIR: u64 = 1;
/// Somebody waits for the writes inside to leave.
const DRAIN: u64 = 1 << 63;

/// Lanes of a gate. With more shards than these, some share one.
const LANES: usize = 16;

/// Turns that a waiting task looks again at once, before it sleeps between looks.
const EAGER: u32 = 16;
const NAP: Duration = Duration::from_micros(50);

/// Writes inside, of one shard.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Lane(AtomicU64);

/// The calling thread's lane.
#[inline]
fn lane_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) });
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            // Relaxed: only that threads spread over the lanes counts.
            number.set(NEXT.fetch_add(1, Ordering::Relaxed) % LANES);
        }
        number.get()
    })
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct WriteGate {
    /// [`DRAIN`], and the number of pairs.
    ///
    /// Who enters and finds it zero also sees what the last drain's beginner did before: it was stored (release) by the drain's
    /// end, or a later pair's.
    state: AtomicU64,
    lanes: [Lane; LANES],
    pairs: Mutex<Vec<Range>>,
    /// A drain was cut short, and none has come to its end since.
    owed: AtomicBool,
}

impl WriteGate {
    /// Whether a drain was cut short: writes from before it may be under way yet.
    pub(super) fn owes_drain(&self) -> bool {
        // Acquire: with it comes what the drain was for.
        self.owed.load(Ordering::Acquire)
    }

    fn pairs(&self) -> MutexGuard<'_, Vec<Range>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters for a write, unless a pair is in the way.
    #[inline]
    pub(super) fn try_enter(&self, range: Range) -> Option<Entered<'_>> {
        let entered = self.count_in();
        match self.state.load(Ordering::SeqCst) {
            0 => Some(entered),
            state => self.is_open(state, range).then_some(entered),
        }
    }

    /// Enters for any number of writes, unless there is any pair or drain.
    #[inline]
    pub(super) fn try_enter_all(&self) -> Option<Entered<'_>> {
        let entered = self.count_in();
        (self.state.load(Ordering::SeqCst) == 0).then_some(entered)
    }

    /// Enters once more: for whom this thread keeps inside already.
    pub(super) fn enter_again(&self) -> Entered<'_> {
        self.count_in()
    }

    /// Leaves for a write of this thread whose [`Entered`] was forgotten.
    #[inline]
    pub(super) fn leave(&self) {
        drop(Entered(&self.lanes[lane_number()]));
    }

    #[inline]
    fn count_in(&self) -> Entered<'_> {
        let lane = &self.lanes[lane_number()];
        // Sequentially consistent: the write's half of the race in the module's head.
        lane.0.fetch_add(1, Ordering::SeqCst);
        Entered(lane)
    }

    #[cold]
    fn is_open(&self, state: u64, range: Range) -> bool {
        state & DRAIN == 0 && !self.pairs().iter().any(|&pair| overlap(pair, range))
    }

    fn is_empty(&self) -> bool {
        // The drain's half of the race in the module's head.
        self.lanes.iter().all(|lane| lane.0.load(Ordering::SeqCst) == 0)
    }

    /// Enters for a write, waiting for pairs in the way while `goes_on` says so; `None` when it does no more.
    pub(super) async fn enter(&self, cx: TaskContext<'_>, range: Range, goes_on: impl Fn() -> bool) -> Option<Entered<'_>> {
        let mut tries = 0;
        while goes_on() {
            if let Some(entered) = self.try_enter(range) {
                return Some(entered);
            }
            pause(cx, &mut tries).await;
        }
        None
    }

    /// Locks a range for a pair: until the lock is dropped, no write overlaps it. `None` as in [`enter`](Self::enter).
    pub(super) async fn lock(&self, cx: TaskContext<'_>, range: Range, goes_on: impl Fn() -> bool) -> Option<PairLock<'_>> {
        let mut tries = 0;
        while !self.begin(Some(range)) {
            if !goes_on() {
                return None;
            }
            pause(cx, &mut tries).await;
        }
        let lock = PairLock { gate: self, range };
        let drained = self.drained(cx, |_| true, goes_on).await;
        drained.then_some(lock)
    }

    /// Waits until every write and every pair that is inside now has left; `false`: `goes_on` has said no before, and it is
    /// [owed](Self::owes_drain).
    pub(super) async fn drain(&self, cx: TaskContext<'_>, goes_on: impl Fn() -> bool) -> bool {
        let mut tries = 0;
        while !self.begin(None) {
            if !goes_on() {
                self.owed.store(true, Ordering::Release);
                return false;
            }
            pause(cx, &mut tries).await;
        }
        // No pair begins meanwhile, and one that runs needs nothing of the gate.
        let drained = self.drained(cx, |state| state == DRAIN, goes_on).await;
        if !drained {
            self.owed.store(true, Ordering::Release);
        }
        drained
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
        self.state.fetch_add(DRAIN + if range.is_some() { PAIR } else { 0 }, Ordering::SeqCst);
        true
    }

    /// Waits for the writes inside, and for a state that will do, while it is to go on; then opens the gate. Whether they have left.
    async fn drained(&self, cx: TaskContext<'_>, will_do: fn(u64) -> bool, goes_on: impl Fn() -> bool) -> bool {
        let _open = Opener(self);
        let mut tries = 0;
        while goes_on() {
            let state = self.state.load(Ordering::Acquire);
            if self.is_empty() && will_do(state) {
                if state == DRAIN {
                    // Nothing is inside. While the gate is closed: a drain that is owed from now on is another one.
                    self.owed.store(false, Ordering::Relaxed);
                }
                return true;
            }
            pause(cx, &mut tries).await;
        }
        false
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
pub(super) struct Entered<'a>(&'a Lane);

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: who finds the lane empty also finds the write done.
        self.0.0.fetch_sub(1, Ordering::Release);
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

/// Lets others go on before another look.
pub(super) async fn pause(cx: TaskContext<'_>, tries: &mut u32) {
    *tries += 1;
    if *tries <= EAGER {
        yield_now().await;
    } else {
        cx.io(IoOperation::Sleep(NAP)).await;
    }
}

#[cfg(test)]
mod tests;
