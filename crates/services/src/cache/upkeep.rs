//! Work beside requests: dirty lines are written back.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use millrace_block::{BlockCount, BlockError, IoOperation, Lba, Operation, Request, TaskContext, Volume, yield_now};
use millrace_memory::{BUFFER_SIZE, BounceBuffer, BufferPool};

use super::{Cache, Core};
use crate::{
    background::Stop,
    locks::{Locked, Taken},
};

/// How often lines are looked at.
const PERIOD: Duration = Duration::from_millis(100);
/// In so many periods all lines are looked at once. What was not written for one such time is written back.
const PERIODS: u32 = 50;
/// How long a leg that failed is left alone.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// Lines that are sorted, so that the slow leg gets them in its own order.
const SORTED: usize = 32;
/// Lines that are looked at before the shard has another turn.
const LOOKS: u32 = 4096;
/// Passes over everything in which all that is dirty must become clean, while writes go through.
const PASSES: usize = 5;
/// How often a line is looked at that requests have before it is left for the next time,
const TRIES: u32 = 400;
/// and how long nobody does in between: in all as long as a slow leg takes for a write.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// Lines that a leg refuses one after the other before the others are left for the next time.
const REFUSALS: u32 = 64;
/// A full cache is given room whenever so large a part of it was written back,
const SETTLED: u64 = 50;
/// and a small one, which would be flushed all the time, when that was what may be written back in such a part of a second,
const SETTLED_TIME: u64 = 4;
/// or so large a part of it.
const SETTLED_SMALL: u64 = 8;
/// Periods that a change may take between the end of the call to leave and its own.
pub(super) const LEAVE_PERIODS: u32 = 100;

/// A buffer of the deepest pool, which nothing below takes.
async fn deepest_buffer(cx: TaskContext<'_>) -> BounceBuffer {
    let deepest = (0..BufferPool::LEVELS).fold(cx, |cx, _| cx.deeper());
    deepest.buffers.take().await
}

/// Keeps to the rate.
struct Pace {
    rate: u64,
    owed: Duration,
}

impl Pace {
    async fn spend(&mut self, cx: TaskContext<'_>, stop: &Stop, bytes: u64, hurries: impl Fn() -> bool) {
        // Legs in memory make nobody wait.
        yield_now().await;
        self.owed += Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(self.rate)) as u64);
        while self.owed >= Duration::from_millis(1) && !stop.is_set() && !hurries() {
            let step = self.owed.min(PERIOD);
            stop.sleep(cx, step).await;
            self.owed -= step;
        }
    }
}

impl Cache {
    /// The task.
    pub(super) async fn upkeep(self: Arc<Self>, cx: TaskContext<'_>, stop: Stop) {
        let Some(core) = self.core.get() else { return };
        // Of its own, for all that is below, too: requests that wait for a line hold the shard's.
        let pool = match BufferPool::new(2) {
            Ok(pool) => pool,
            Err(error) => {
                tracing::error!(name = self.name, %error, "no memory for writing back");
                return;
            }
        };
        let cx = cx.with_buffers(&pool);
        let (mut hand, mut leaving, mut told) = (0, 0, false);
        while !stop.is_set() {
            let result = if self.flushing.left.load(Ordering::Acquire) > 0 {
                self.flush_everything(cx, &stop, core, &mut hand).await
            } else if self.is_void() && self.is_in_force() && !told {
                let result = self.say_void(cx).await;
                told = result.is_ok();
                result
            } else if self.dirty_lines() > 0 {
                self.round(cx, &stop, core, &mut hand).await
            } else {
                Ok(())
            };
            told &= self.is_void();
            leaving = self.look_at_leaving(leaving);
            stop.sleep(cx, if result.is_ok() { PERIOD } else { TRY_AGAIN }).await;
        }
    }

    /// Lets writes go to the fast leg again when a change was called off after the call to leave, for nobody says so. `looks`: how often in a
    /// row it was found waiting for the change's end; how often it is then.
    pub(super) fn look_at_leaving(&self, looks: u32) -> u32 {
        let waits = self.leaving.load(Ordering::Relaxed) && !self.draining.load(Ordering::Relaxed);
        let looks = if waits { looks + 1 } else { 0 };
        if looks > LEAVE_PERIODS {
            self.leaving.store(false, Ordering::Relaxed);
        }
        looks
    }

    /// Looks at the next lines, and writes back those that were not written lately.
    pub(super) async fn round(
        &self,
        cx: TaskContext<'_>,
        stop: &Stop,
        core: &Core,
        hand: &mut u32,
    ) -> Result<(), BlockError> {
        let slots = core.table.len();
        // When there is little room left, whatever is dirty.
        let crowded = self.dirty_lines() > u64::from(slots) * 7 / 10;
        let mut pace = Pace { rate: self.plan.rate, owed: Duration::ZERO };
        let (mut left, mut cleaned) = (if crowded { slots } else { slots / PERIODS + 1 }, 0);
        let settled = self.settled(core);
        let hurries = || self.flushing.left.load(Ordering::Relaxed) > 0;
        let mut result = Ok(());
        while left > 0 && result.is_ok() && !stop.is_set() && !hurries() {
            let mut chosen = [(0_u64, 0_u32); SORTED];
            let (mut used, mut looks) = (0, 0);
            while left > 0 && used < SORTED && looks < LOOKS {
                let slot = *hand % slots;
                looks += 1;
                (*hand, left) = ((slot + 1) % slots, left - 1);
                let place = core.table.slot(slot);
                let recent = place.recent.swap(false, Ordering::Relaxed);
                if place.dirty.load(Ordering::Relaxed) == 0 || (recent && !crowded) {
                    continue;
                }
                if let Some(line) = place.line() {
                    chosen[used] = (line, slot);
                    used += 1;
                }
            }
            if looks == LOOKS {
                yield_now().await;
            }
            let chosen = &mut chosen[..used];
            chosen.sort_unstable();
            for (_, slot) in &*chosen {
                match self.write_line_back(cx, core, *slot, false).await {
                    Ok(bytes) => {
                        cleaned += bytes;
                        pace.spend(cx, stop, bytes, hurries).await;
                    }
                    Err(error) => result = Err(error),
                }
            }
            if crowded && cleaned > settled {
                result = result.and(self.commit_moved(cx).await);
                cleaned = 0;
            }
        }
        // Now lines that were written back can go.
        if cleaned > 0 { result.and(self.commit_moved(cx).await) } else { result }
    }

    /// Bytes that are written back before a full cache is given room.
    fn settled(&self, core: &Core) -> u64 {
        let all = u64::from(core.table.len()) << core.plan.line_shift;
        (all / SETTLED).max((self.plan.rate / SETTLED_TIME).min(all / SETTLED_SMALL))
    }

    /// What the command asks for. A line that cannot be moved is left to the rounds, which try it again and keep to the rate.
    pub(super) async fn flush_everything(
        &self,
        cx: TaskContext<'_>,
        stop: &Stop,
        core: &Core,
        hand: &mut u32,
    ) -> Result<(), BlockError> {
        // All of them, whatever the command says: where it is given again meanwhile, its word is another one than this.
        let slots = core.table.len();
        let left = self.flushing.left.fetch_min(slots, Ordering::AcqRel).min(slots);
        let (looked, result) = self.clean_all(cx, stop, core, hand, left).await;
        // Unless it was set meanwhile.
        let _ = self.flushing.left.compare_exchange(left, left - looked, Ordering::AcqRel, Ordering::Relaxed);
        result
    }

    /// Writes lines back, those of the next `left` slots, and makes that durable. One that cannot be moved keeps no other where it is: its error
    /// is told at the end. Also returns how many slots were looked at.
    async fn clean_all(
        &self,
        cx: TaskContext<'_>,
        stop: &Stop,
        core: &Core,
        hand: &mut u32,
        left: u32,
    ) -> (u32, Result<(), BlockError>) {
        let slots = core.table.len();
        let (mut result, mut moved, mut refused, mut looked) = (Ok(()), 0_u64, 0, 0);
        // A leg that is gone is not waited for line by line.
        while looked < left && refused < REFUSALS {
            if stop.is_set() {
                return (looked, result);
            }
            let slot = *hand % slots;
            (*hand, looked) = ((slot + 1) % slots, looked + 1);
            match self.clean_line(cx, core, slot).await {
                Ok(0) => {}
                Ok(_) => {
                    (moved, refused) = (moved + 1, 0);
                    self.flushing.done.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => (result, refused) = (result.and(Err(error)), refused + 1),
            }
        }
        (looked, if result.is_err() && moved == 0 { result } else { result.and(self.commit_moved(cx).await) })
    }

    /// Writes back everything, and again what became dirty meanwhile, but not for ever.
    pub(super) async fn drain(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let core = self.core()?;
        let stop = Stop::default();
        for _ in 0..PASSES {
            let mut hand = self.flushing.hand.load(Ordering::Relaxed);
            let (_, result) = self.clean_all(cx, &stop, core, &mut hand, core.table.len()).await;
            self.flushing.hand.store(hand, Ordering::Relaxed);
            result?;
            if self.dirty_lines() == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Makes durable what was written back.
    async fn commit_moved(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let _turn = self.moving.take(cx).await;
        self.commit(cx).await
    }

    /// Writes the next of all lines back, and now and then lets the shard do something else: legs in memory make nobody wait.
    pub(super) async fn clean_line(&self, cx: TaskContext<'_>, core: &Core, slot: u32) -> Result<u64, BlockError> {
        let bytes = self.write_line_back(cx, core, slot, true).await;
        if bytes != Ok(0) || slot.is_multiple_of(LOOKS) {
            yield_now().await;
        }
        bytes
    }

    /// A line that nobody else has, and the turn to move it. One that is in use is left alone, or waited for a while: under a steady load all of
    /// it is never free at once. Others may have the turn meanwhile.
    async fn take_line<'a>(
        &'a self,
        cx: TaskContext<'_>,
        core: &'a Core,
        bytes: Range<u64>,
        patient: bool,
    ) -> Option<(Taken<'a>, Locked<'a>)> {
        for _ in 0..if patient { TRIES } else { 1 } {
            let turn = self.moving.take(cx).await;
            if let Some(range) = core.ranges.try_lock(bytes.clone()) {
                return Some((turn, range));
            }
            drop(turn);
            if patient {
                cx.io(IoOperation::Sleep(LOOK_AGAIN)).await;
            }
        }
        None
    }

    /// Writes a line's dirty blocks to the slow leg; how many bytes: none where others have the line.
    async fn write_line_back(&self, cx: TaskContext<'_>, core: &Core, slot: u32, patient: bool) -> Result<u64, BlockError> {
        let place = core.table.slot(slot);
        let Some(line) = place.line().filter(|_| place.dirty.load(Ordering::SeqCst) != 0) else { return Ok(0) };
        let buffer = deepest_buffer(cx).await;
        let bytes = core.line_bytes(line);
        let taken = self.take_line(cx, core, bytes.clone(), patient).await;
        if taken.is_none() || place.line() != Some(line) {
            return Ok(0);
        }
        let shift = self.shape().block_size.shift();
        let (mut left, mut written) = (place.dirty.load(Ordering::SeqCst), 0);
        while left != 0 {
            let first = left.trailing_zeros();
            let count = (left >> first).trailing_ones().min((BUFFER_SIZE >> shift) as u32);
            let (at, len) = (u64::from(first) << shift, u64::from(count) << shift);
            let segments = [buffer.segment(len as usize)];
            let request =
                |operation, lba| Request { operation, lba, count: BlockCount(u64::from(count)), segments: &segments };
            let read = request(Operation::Read, Self::place(core, slot, at, shift));
            if let Err(error) = self.fast.submit(cx.with_scratch(&cx.scratch.carve_rest()), read).await {
                self.fast_failed("a read of dirty data", error);
                return Err(error);
            }
            let failures = self.failures.of_slow();
            let write = request(Operation::Write { fua: false }, Lba((bytes.start + at) >> shift));
            if let Err(error) = self.slow.submit(cx.with_scratch(&cx.scratch.carve_rest()), write).await {
                self.note(format!("a line could not be written back to the slow leg: {error}"));
                return Err(error);
            }
            let mask = u64::MAX >> (64 - count) << first;
            if !self.written_back(core, slot, mask, failures) {
                break;
            }
            left &= !mask;
            written += len;
        }
        self.counters.add(|here| &here.written_back, 1);
        Ok(written)
    }
}
