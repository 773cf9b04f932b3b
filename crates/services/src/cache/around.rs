//! What changes the slow leg: writes that go through or pass the cache by, and erasures.

use std::sync::atomic::Ordering;

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, TaskContext, Volume};
use millrace_memory::SegmentCursor;

use super::{
    Cache, Core, Part,
    path::{each_part, lock_with_buffer},
    table::{Slot, clear_bits, set_bits},
    unflushed::{BESIDE, WRITTEN},
};

/// Bytes that are erased at once: more would keep others from the range for too long.
const ERASED_AT_ONCE: u64 = 16 << 20;
/// The same at least, where others are always at work: whole blocks of any size.
const ERASED_AT_LEAST: u64 = 4096;

impl Cache {
    /// Clean blocks of a range that is about to be written on the slow leg are not valid any more. The range is locked.
    fn hide(&self, core: &Core, start: u64, end: u64, shift: u32) {
        // A flush that fails from now on may lose it.
        self.slow_unflushed.add(WRITTEN | BESIDE);
        each_part(core, start, end, shift, |slot, mask| self.in_doubt(core, slot, mask));
    }

    /// Requests wrote these bytes to the slow leg. Their range is locked. Returns whether the table on the fast leg may call some of them
    /// dirty, so that it takes a commit to make this durable.
    pub(super) fn forget(&self, core: &Core, start: u64, end: u64) -> bool {
        self.slow_unflushed.add(WRITTEN | BESIDE);
        let (block_size, mut commit) = (self.shape().block_size, false);
        each_part(core, start, end, block_size.shift(), |slot, mask| {
            let place = core.table.slot(slot);
            clear_bits(&place.valid, mask);
            let before = self.no_longer_dirty(place, mask);
            // Dirty blocks that a commit is just about to store: it looks at them again after it has said so.
            if (place.stored.load(Ordering::SeqCst) | before) & mask != 0 {
                core.table.need(core.page(slot, block_size));
                commit = true;
            }
        });
        commit
    }

    /// Returns the bits before.
    fn no_longer_dirty(&self, place: &Slot, mask: u64) -> u64 {
        let before = clear_bits(&place.dirty, mask);
        if before & mask != 0 && before & !mask == 0 {
            self.counters.add(|here| &here.dirty_lines, u64::MAX);
        }
        before
    }

    /// Dirty blocks of a line were written to the slow leg, since it had failed to flush so often. Their range is locked. Until it is flushed
    /// they count as stored, so that their line stays. Returns false, and they are dirty, when it failed meanwhile and may have lost them.
    pub(super) fn written_back(&self, core: &Core, slot: u32, mask: u64, failures: u64) -> bool {
        self.slow_unflushed.add(WRITTEN);
        let place = core.table.slot(slot);
        // Before the bits: a commit that began earlier, and sees them at its end, leaves them. One that begins later flushes them.
        place.moved.store(self.commits.started.load(Ordering::SeqCst), Ordering::SeqCst);
        set_bits(&place.stored, mask);
        self.no_longer_dirty(place, mask);
        core.table.need(core.page(slot, self.shape().block_size));
        // Last: a flush that fails later than this finds them stored and clean, and makes them dirty.
        let is_there = self.failures.of_slow() == failures;
        if !is_there {
            self.dirty_again(core, slot, mask);
        }
        is_there
    }

    /// What the slow leg may have lost is dirty again. Its range is locked.
    pub(super) fn dirty_again(&self, core: &Core, slot: u32, mask: u64) {
        if mask != 0 && set_bits(&core.table.slot(slot).dirty, mask) == 0 {
            self.counters.add(|here| &here.dirty_lines, 1);
        }
        core.table.need(core.page(slot, self.shape().block_size));
    }

    /// Bytes that go to the slow leg alone. Returns whether it takes a commit to make them durable.
    pub(super) async fn write_around(
        &self,
        cx: TaskContext<'_>,
        core: &Core,
        cursor: &mut SegmentCursor<'_>,
        at: u64,
        len: u64,
        fua: bool,
    ) -> Result<bool, BlockError> {
        let shift = self.shape().block_size.shift();
        let _range = core.ranges.lock(cx, at..at + len).await;
        self.hide(core, at, at + len, shift);
        let mut done = 0;
        while done < len {
            let lba = Lba((at + done) >> shift);
            done += self.pass(cx, &*self.slow, Operation::Write { fua }, lba, cursor, len - done).await?;
        }
        Ok(self.forget(core, at, at + len))
    }

    /// A part of a line that goes to both legs. Returns whether it takes a commit to make it durable.
    pub(super) async fn write_through(
        &self,
        cx: TaskContext<'_>,
        core: &Core,
        cursor: &mut SegmentCursor<'_>,
        at: u64,
        part: Part,
        fua: bool,
    ) -> Result<bool, BlockError> {
        let shift = self.shape().block_size.shift();
        // Copied once, so that both legs get the same whatever the guest does meanwhile.
        let (range, buffer) = lock_with_buffer(&core.ranges, cx, at..at + part.len).await;
        let segments = [buffer.segment(part.len as usize)];
        cursor.copy_to(segments[0]);
        let cx = cx.deeper();
        let known = core.table.find(part.line);
        let hit =
            known.is_some_and(|found| core.table.slot(found.slot).valid.load(Ordering::Relaxed) & part.mask == part.mask);
        self.hide(core, at, at + part.len, shift);
        let (lba, count) = (Lba(at >> shift), BlockCount(part.len >> shift));
        let write = Request { operation: Operation::Write { fua }, lba, count, segments: &segments };
        self.slow.submit(cx.with_scratch(&cx.scratch.carve_rest()), write).await?;
        let commit = self.forget(core, at, at + part.len);
        if hit {
            self.counters.add(|here| &here.write_hits, 1);
        } else {
            self.counters.add(|here| &here.write_misses, 1);
        }
        if let Some(slot) = self.slot_at_once(core, part.line) {
            if hit {
                core.table.warm(slot);
            }
            self.keep(cx, core, slot, part, &segments).await;
        }
        drop((range, buffer));
        Ok(commit)
    }

    /// Zeroes, or space given back.
    pub(super) async fn erase(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let core = self.core()?;
        let operation = match request.operation {
            Operation::Deallocate if !self.shape().deallocate => return Ok(()),
            // As zeroes, so that it reads alike whether it was in the cache or not.
            Operation::Deallocate => Operation::WriteZeroes { fua: false, deallocate: true },
            other => other,
        };
        let fua = matches!(operation, Operation::WriteZeroes { fua: true, .. });
        let (bytes, shift) = (self.bytes_of(&request), self.shape().block_size.shift());
        let (mut at, mut most, mut commit) = (bytes.start, ERASED_AT_ONCE, false);
        while at < bytes.end {
            let wanted = most.min(bytes.end - at);
            let mut piece = at..at + wanted;
            let _range = core.ranges.lock_some(cx, &mut piece, ERASED_AT_LEAST).await;
            let len = piece.end - piece.start;
            // Where others are at work more would not be had the next time either.
            most = if len < wanted { len } else { (most * 2).min(ERASED_AT_ONCE) };
            self.hide(core, at, at + len, shift);
            let piece = Request { operation, lba: Lba(at >> shift), count: BlockCount(len >> shift), segments: &[] };
            self.slow.submit(cx.deeper().with_scratch(&cx.scratch.carve_rest()), piece).await?;
            commit |= self.forget(core, at, at + len);
            at += len;
        }
        self.look_again();
        self.acknowledge(cx, commit, fua).await
    }
}
