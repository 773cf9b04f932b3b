//! Work beside requests: dirty lines are written back.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, TaskContext, Volume, yield_now};
use millrace_memory::{BUFFER_SIZE, BounceBuffer, BufferPool};

use super::{Cache, Core};
use crate::background::Stop;

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
    async fn spend(&mut self, cx: TaskContext<'_>, stop: &Stop, bytes: u64) {
        // Legs in memory make nobody wait.
        yield_now().await;
        self.owed += Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(self.rate)) as u64);
        if self.owed >= Duration::from_millis(1) {
            stop.sleep(cx, self.owed).await;
            self.owed = Duration::ZERO;
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
            let result = if self.flushing.wanted.load(Ordering::Acquire) {
                self.flush_everything(cx, &stop, core).await
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
        let mut result = Ok(());
        while left > 0 && result.is_ok() && !stop.is_set() {
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
                        pace.spend(cx, stop, bytes).await;
                    }
                    Err(error) => result = Err(error),
                }
            }
        }
        // Now lines that were written back can go.
        if cleaned > 0 { result.and(self.commit_moved(cx).await) } else { result }
    }

    /// What the command asks for.
    async fn flush_everything(&self, cx: TaskContext<'_>, stop: &Stop, core: &Core) -> Result<(), BlockError> {
        for slot in 0..core.table.len() {
            if stop.is_set() {
                return Ok(());
            }
            if self.clean_line(cx, core, slot).await? > 0 {
                self.flushing.done.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.commit_moved(cx).await?;
        self.flushing.wanted.store(false, Ordering::Release);
        Ok(())
    }

    /// Writes back everything, and again what became dirty meanwhile, but not for ever.
    pub(super) async fn drain(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let core = self.core()?;
        for _ in 0..PASSES {
            for slot in 0..core.table.len() {
                self.clean_line(cx, core, slot).await?;
            }
            self.commit_moved(cx).await?;
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
        let bytes = self.write_line_back(cx, core, slot, true).await?;
        if bytes > 0 || slot.is_multiple_of(LOOKS) {
            yield_now().await;
        }
        Ok(bytes)
    }

    /// Writes a line's dirty blocks to the slow leg; how many bytes. A line that is in use is left alone, or waited for.
    async fn write_line_back(&self, cx: TaskContext<'_>, core: &Core, slot: u32, patient: bool) -> Result<u64, BlockError> {
        let place = core.table.slot(slot);
        let Some(line) = place.line().filter(|_| place.dirty.load(Ordering::SeqCst) != 0) else { return Ok(0) };
        let buffer = deepest_buffer(cx).await;
        let _turn = self.moving.take(cx).await;
        let bytes = core.line_bytes(line);
        let range =
            if patient { Some(core.ranges.lock(cx, bytes.clone()).await) } else { core.ranges.try_lock(bytes.clone()) };
        if range.is_none() || place.line() != Some(line) {
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
