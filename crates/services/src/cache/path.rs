//! The way of a request.

use std::{
    future::Future,
    sync::{TryLockError, atomic::Ordering},
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, ByteOffset, Geometry, Lba, Operation, Request, Scratch, Step, TaskContext, Usage,
    Volume, VolumeError, check, compare_by_reading, copy_by_bounce, future_bytes, helpers_scratch_bytes, placed_bytes,
    yield_now,
};
use millrace_memory::{BUFFER_SIZE, Segment, SegmentCursor};

use super::{
    Cache, Core, Part,
    policy::Lines,
    table::{Found, clear_bits, set_bits},
    unflushed::WRITTEN,
};
use crate::locks::{Locked, Ranges};

/// Segments of a request that are handed on as a list.
const SEGMENTS: usize = 32;
/// Turns of the shard that a write waits for the policy.
const TURNS: usize = 16;

/// Where the next bytes of a read come from.
enum Source {
    Fast { found: Found, len: u64 },
    Slow { len: u64 },
}

/// The lines of a cache, for its policy: those of which nothing is dirty, stored or in use can go.
struct Evictable<'a> {
    core: &'a Core,
}

impl Lines for Evictable<'_> {
    fn heat(&self, slot: u32) -> u8 {
        self.core.table.heat(slot)
    }

    fn set_heat(&self, slot: u32, heat: u8) {
        self.core.table.set_heat(slot, heat);
    }

    fn take_out(&self, slot: u32) -> Option<u64> {
        let (core, place) = (self.core, self.core.table.slot(slot));
        let line = place.line()?;
        // Who writes to the line or fills it has its blocks locked.
        let _range = core.ranges.try_lock(core.line_bytes(line))?;
        if !place.is_clean() {
            return None;
        }
        core.table.take_out(slot);
        Some(line)
    }
}

/// What came of the wish for a slot.
enum Room {
    Slot(u32),
    /// Somebody else has the policy.
    Busy,
    /// Nothing can go.
    Full,
}

impl Cache {
    /// The bytes of a request.
    pub(super) fn bytes_of(&self, request: &Request<'_>) -> std::ops::Range<u64> {
        let shift = self.shape().block_size.shift();
        // No overflow: the range was checked.
        request.lba.0 << shift..(request.lba.0 + request.count.0) << shift
    }

    /// The request's part of a line, when it lies within one.
    #[inline]
    fn only_part(&self, core: &Core, request: &Request<'_>) -> Option<Part> {
        let bytes = self.bytes_of(request);
        let part = core.part(bytes.start, bytes.end, self.shape().block_size.shift());
        (part.len == bytes.end - bytes.start).then_some(part)
    }

    /// Blocks that the fast leg is asked for.
    #[inline]
    fn readable(&self, core: &Core, slot: u32) -> u64 {
        let slot = core.table.slot(slot);
        if self.is_broken() { slot.dirty.load(Ordering::Acquire) } else { slot.valid.load(Ordering::Acquire) }
    }

    /// A slot for a line: its own, or a new one.
    fn room(&self, core: &Core, line: u64) -> Room {
        let mut policy = match core.policy.try_lock() {
            Ok(policy) => policy,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Room::Busy,
        };
        if let Some(found) = core.table.find(line) {
            return Room::Slot(found.slot);
        }
        let Some((slot, went)) = policy.slot(&Evictable { core }) else { return Room::Full };
        if went {
            self.counters.add(|here| &here.evicted, 1);
        }
        if !core.table.put_in(line, slot) {
            policy.give_back(slot);
            return Room::Full;
        }
        policy.came(slot, line);
        Room::Slot(slot)
    }

    /// A slot for a line, if there is one to be had without waiting.
    pub(super) fn slot_at_once(&self, core: &Core, line: u64) -> Option<u32> {
        let known = core.table.find(line).map(|found| found.slot);
        known.or_else(|| match self.room(core, line) {
            Room::Slot(slot) => Some(slot),
            Room::Busy | Room::Full => None,
        })
    }

    /// A slot for a line; `None` when nothing can go.
    async fn slot_for(&self, core: &Core, line: u64) -> Option<u32> {
        if let Some(found) = core.table.find(line) {
            return Some(found.slot);
        }
        for _ in 0..TURNS {
            match self.room(core, line) {
                Room::Slot(slot) => return Some(slot),
                Room::Full => return None,
                Room::Busy => yield_now().await,
            }
        }
        None
    }

    #[inline]
    fn read<'a>(&'a self, core: &'a Core, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Some(part) = self.only_part(core, &request)
            && let Some(found) = core.table.find(part.line)
            && self.readable(core, found.slot) & part.mask == part.mask
        {
            core.table.warm(found.slot);
            let lba = Self::place(core, found.slot, part.at, self.shape().block_size.shift());
            return match self.fast.submit(cx.deeper(), Request { lba, ..request }) {
                Step::Done(Ok(())) if core.table.is_still(found) => {
                    self.counters.add(|here| &here.read_hits, 1);
                    Step::Done(Ok(()))
                }
                Step::Done(_) => Step::Wait(cx.scratch.place_future(self.read_slowly(cx, request))),
                step @ Step::Wait(_) => Step::Wait(cx.scratch.place_future(self.follow_read(cx, request, found, step))),
            };
        }
        Step::Wait(cx.scratch.place_future(self.read_slowly(cx, request)))
    }

    async fn follow_read<'a>(
        &'a self,
        cx: TaskContext<'a>,
        request: Request<'a>,
        found: Found,
        step: Step<'a>,
    ) -> Result<(), BlockError> {
        let result = step.await;
        if result.is_ok() && self.core()?.table.is_still(found) {
            self.counters.add(|here| &here.read_hits, 1);
            return Ok(());
        }
        self.read_slowly(cx, request).await
    }

    /// A read that is no plain hit: piece by piece.
    async fn read_slowly(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let core = self.core()?;
        let bytes = self.bytes_of(&request);
        let long = bytes.end - bytes.start >= self.plan.around;
        if long {
            self.counters.add(|here| &here.passed_by, 1);
        }
        let mut cursor = SegmentCursor::new(request.segments);
        let mut at = bytes.start;
        while at < bytes.end {
            at += match self.source(core, at, bytes.end, long) {
                Source::Fast { found, len } => self.read_fast(cx, core, &mut cursor, at, len, found).await?,
                Source::Slow { len } if long || self.is_broken() => self.read_slow(cx, &mut cursor, at, len).await?,
                Source::Slow { len } => self.fill(cx, core, &mut cursor, at, len).await?,
            };
        }
        Ok(())
    }

    /// Where the bytes from `at` on are, and how many of them are in one piece.
    fn source(&self, core: &Core, at: u64, end: u64, long: bool) -> Source {
        let shift = self.shape().block_size.shift();
        let mut slow = 0;
        loop {
            let part = core.part(at + slow, end, shift);
            let found = core.table.find(part.line);
            let readable = found.map_or(0, |found| self.readable(core, found.slot)) >> (part.at >> shift);
            match found.filter(|_| readable & 1 == 1) {
                Some(found) if slow == 0 => {
                    let len = (u64::from(readable.trailing_ones()) << shift).min(part.len);
                    return Source::Fast { found, len };
                }
                Some(_) => return Source::Slow { len: slow },
                None => {
                    let missing = (u64::from(readable.trailing_zeros()) << shift).min(part.len);
                    slow += missing;
                    // What is filled belongs to one line.
                    if missing < part.len || at + slow == end || !(long || self.is_broken()) {
                        return Source::Slow { len: slow };
                    }
                }
            }
        }
    }

    /// Bytes that the fast leg has; returns how many were read, 0 when they are not there any more.
    async fn read_fast(
        &self,
        cx: TaskContext<'_>,
        core: &Core,
        cursor: &mut SegmentCursor<'_>,
        at: u64,
        len: u64,
        found: Found,
    ) -> Result<u64, BlockError> {
        let shift = self.shape().block_size.shift();
        let part = core.part(at, at + len, shift);
        let lba = Self::place(core, found.slot, part.at, shift);
        let before = cursor.clone();
        let result = self.pass(cx, &*self.fast, Operation::Read, lba, cursor, len).await;
        if !core.table.is_still(found) {
            *cursor = before;
            return Ok(0);
        }
        match result {
            Ok(done) => {
                core.table.warm(found.slot);
                self.counters.add(|here| &here.read_hits, 1);
                Ok(done)
            }
            Err(error @ (BlockError::Memory | BlockError::OutOfRange | BlockError::Miscompare)) => Err(error),
            Err(error) => {
                self.fast_failed("a read of the fast leg", error);
                *cursor = before;
                let only_here = core.table.slot(found.slot).dirty.load(Ordering::Acquire) & part.mask != 0;
                // What is clean is on the slow leg, too: it is looked for there now that the fast leg is known to fail.
                if only_here { Err(error) } else { Ok(0) }
            }
        }
    }

    /// Bytes that are read from the slow leg and not kept.
    async fn read_slow(
        &self,
        cx: TaskContext<'_>,
        cursor: &mut SegmentCursor<'_>,
        at: u64,
        len: u64,
    ) -> Result<u64, BlockError> {
        self.counters.add(|here| &here.read_misses, 1);
        let lba = Lba(at >> self.shape().block_size.shift());
        self.pass(cx, &*self.slow, Operation::Read, lba, cursor, len).await
    }

    /// Bytes of one line that are read from the slow leg and kept, if that can be done without waiting for anybody.
    async fn fill(
        &self,
        cx: TaskContext<'_>,
        core: &Core,
        cursor: &mut SegmentCursor<'_>,
        at: u64,
        len: u64,
    ) -> Result<u64, BlockError> {
        let shift = self.shape().block_size.shift();
        let len = len.min(BUFFER_SIZE as u64);
        let part = core.part(at, at + len, shift);
        let means = cx.buffers.try_take().and_then(|buffer| Some((buffer, core.ranges.try_lock(at..at + len)?)));
        let Some((buffer, range)) = means else { return self.read_slow(cx, cursor, at, len).await };
        let Some(slot) = self.slot_at_once(core, part.line) else {
            drop((buffer, range));
            return self.read_slow(cx, cursor, at, len).await;
        };
        if core.table.slot(slot).valid.load(Ordering::SeqCst) & part.mask != 0 {
            // Somebody brought some of it before the range was locked.
            return Ok(0);
        }
        let segments = [buffer.segment(len as usize)];
        let cx = cx.deeper();
        let read = Request {
            operation: Operation::Read,
            lba: Lba(at >> shift),
            count: BlockCount(len >> shift),
            segments: &segments,
        };
        self.slow.submit(cx.with_scratch(&cx.scratch.carve_rest()), read).await?;
        self.counters.add(|here| &here.read_misses, 1);
        cursor.copy_from(segments[0]);
        self.keep(cx, core, slot, part, &segments).await;
        drop((range, buffer));
        Ok(len)
    }

    /// Writes clean blocks to their slot. Their range is locked.
    pub(super) async fn keep(&self, cx: TaskContext<'_>, core: &Core, slot: u32, part: Part, segments: &[Segment]) {
        let shift = self.shape().block_size.shift();
        let (lba, count) = (Self::place(core, slot, part.at, shift), BlockCount(part.len >> shift));
        let write = Request { operation: Operation::Write { fua: false }, lba, count, segments };
        match self.fast.submit(cx.with_scratch(&cx.scratch.carve_rest()), write).await {
            Ok(()) => drop(set_bits(&core.table.slot(slot).valid, part.mask)),
            Err(error) => self.fast_failed("a write to the fast leg", error),
        }
    }

    /// Moves the cursor's next bytes, `len` at most, between the request's memory and a leg; returns how many. As all that goes to the legs,
    /// it goes a level down: copies wait for ranges with buffers of this level, and some requests take one themselves.
    pub(super) async fn pass(
        &self,
        cx: TaskContext<'_>,
        leg: &dyn Volume,
        operation: Operation,
        lba: Lba,
        cursor: &mut SegmentCursor<'_>,
        len: u64,
    ) -> Result<u64, BlockError> {
        let shift = self.shape().block_size.shift();
        let count = BlockCount(len >> shift);
        if cursor.remaining() as u64 == len && cursor.split_segment().is_none() {
            let request = Request { operation, lba, count, segments: cursor.whole_segments() };
            leg.submit(cx.deeper().with_scratch(&cx.scratch.carve_rest()), request).await?;
            cursor.skip(len as usize);
            return Ok(len);
        }
        let Some((list, used, bytes)) = gather(cursor, len, shift) else {
            return self.pass_by_buffer(cx, leg, operation, lba, cursor, len).await;
        };
        let segments = list.get(..used).unwrap_or(&[]);
        let request = Request { operation, lba, count: BlockCount(bytes >> shift), segments };
        leg.submit(cx.deeper().with_scratch(&cx.scratch.carve_rest()), request).await?;
        Ok(bytes)
    }

    /// [`Self::pass`] for memory in very many pieces.
    async fn pass_by_buffer(
        &self,
        cx: TaskContext<'_>,
        leg: &dyn Volume,
        operation: Operation,
        lba: Lba,
        cursor: &mut SegmentCursor<'_>,
        len: u64,
    ) -> Result<u64, BlockError> {
        let len = len.min(BUFFER_SIZE as u64);
        // The range may be locked: copies wait for it with buffers of this level. Their own data, one segment, never come here.
        let cx = cx.deeper();
        let buffer = cx.buffers.take().await;
        let cx = cx.deeper();
        let segments = [buffer.segment(len as usize)];
        if operation.is_write() {
            cursor.copy_to(segments[0]);
        }
        let count = BlockCount(len >> self.shape().block_size.shift());
        let request = Request { operation, lba, count, segments: &segments };
        leg.submit(cx.with_scratch(&cx.scratch.carve_rest()), request).await?;
        if !operation.is_write() {
            cursor.copy_from(segments[0]);
        }
        Ok(len)
    }

    /// A write: at once to a line that is there.
    #[inline]
    fn write<'a>(&'a self, core: &'a Core, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if self.writes_back()
            && let Some(part) = self.only_part(core, &request)
            && let Some(range) = core.ranges.try_lock(self.bytes_of(&request))
            // The range is locked: the line stays where it is.
            && let Some(found) = core.table.find(part.line)
        {
            let lba = Self::place(core, found.slot, part.at, self.shape().block_size.shift());
            let fua = request.operation == Operation::Write { fua: true };
            let below = Request { operation: Operation::Write { fua: false }, lba, ..request };
            // See `pass`.
            return match self.fast.submit(cx.deeper(), below) {
                Step::Done(Ok(())) if !fua => {
                    if self.written(core, found.slot, part.mask) {
                        drop(range);
                        return Step::Wait(cx.scratch.place_future(self.acknowledge(cx, true, false)));
                    }
                    Step::Done(Ok(()))
                }
                step => Step::Wait(cx.scratch.place_future(self.follow_write(cx, request, part, found.slot, range, step))),
            };
        }
        Step::Wait(cx.scratch.place_future(self.write_slowly(cx, request)))
    }

    async fn follow_write<'a>(
        &'a self,
        cx: TaskContext<'a>,
        request: Request<'a>,
        part: Part,
        slot: u32,
        range: Locked<'a>,
        step: Step<'a>,
    ) -> Result<(), BlockError> {
        let changed = match step.await {
            Ok(()) => self.written(self.core()?, slot, part.mask),
            Err(error @ (BlockError::Memory | BlockError::OutOfRange)) => {
                self.in_doubt(self.core()?, slot, part.mask);
                return Err(error);
            }
            Err(error) => {
                self.fast_failed("a write to the fast leg", error);
                drop(range);
                return self.write_slowly(cx, request).await;
            }
        };
        drop(range);
        let fua = request.operation == Operation::Write { fua: true };
        self.acknowledge(cx, changed || fua, fua).await
    }

    /// What the fast leg has of these blocks is not believed any more: some may have been written before a request failed, say. Those that are
    /// on the slow leg, too, are read there: otherwise they would change once more when their line goes. Their range is locked.
    pub(super) fn in_doubt(&self, core: &Core, slot: u32, mask: u64) {
        let place = core.table.slot(slot);
        let clean = mask & place.valid.load(Ordering::SeqCst) & !place.dirty.load(Ordering::SeqCst);
        if place.stored.load(Ordering::SeqCst) & clean != 0 && self.leave_to_slow() {
            // Of several the guest is told by one flush.
            self.failures.losses.add();
        }
        clear_bits(&place.valid, clean);
    }

    /// The fast leg has the newest data of these blocks, and the slow one does not. Their range is locked. Returns whether the table on the
    /// fast leg does not say so yet.
    #[inline]
    fn written(&self, core: &Core, slot: u32, mask: u64) -> bool {
        // Before the bits: who sees these knows that there is something to flush.
        self.fast_unflushed.add(WRITTEN);
        let place = core.table.slot(slot);
        let before = set_bits(&place.dirty, mask);
        if before == 0 {
            self.counters.add(|here| &here.dirty_lines, 1);
        }
        if before & mask != mask {
            core.table.need(core.page(slot, self.shape().block_size));
        }
        if !place.recent.load(Ordering::Relaxed) {
            place.recent.store(true, Ordering::Relaxed);
        }
        if set_bits(&place.valid, mask) & mask == mask {
            core.table.warm(slot);
            self.counters.add(|here| &here.write_hits, 1);
        } else {
            self.counters.add(|here| &here.write_misses, 1);
        }
        // After the dirty bits: see `Table::snapshot`.
        self.plan.ack_durable && place.durable.load(Ordering::SeqCst) & mask != mask
    }

    /// A write that is no plain hit: piece by piece.
    async fn write_slowly(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let core = self.core()?;
        let bytes = self.bytes_of(&request);
        let shift = self.shape().block_size.shift();
        let fua = request.operation == Operation::Write { fua: true };
        let long = bytes.end - bytes.start >= self.plan.around;
        if long {
            self.counters.add(|here| &here.passed_by, 1);
        }
        let mut cursor = SegmentCursor::new(request.segments);
        let (mut at, mut commit) = (bytes.start, false);
        while at < bytes.end {
            let part = core.part(at, bytes.end, shift);
            // Decided once: the fast leg may fail, or be resumed, at any time.
            let (around, back) = (long || self.is_broken(), self.writes_back());
            let len = if around { bytes.end - at } else { part.len.min(if back { u64::MAX } else { BUFFER_SIZE as u64 }) };
            commit |= if around {
                self.write_around(cx, core, &mut cursor, at, len, fua).await?
            } else if back {
                self.write_back(cx, core, &mut cursor, at, part, fua).await?
            } else {
                self.write_through(cx, core, &mut cursor, at, core.part(at, at + len, shift), fua).await?
            };
            at += len;
        }
        self.acknowledge(cx, commit, fua).await
    }

    /// A part of a line goes to the fast leg. Returns whether it takes a commit to make it durable.
    async fn write_back(
        &self,
        cx: TaskContext<'_>,
        core: &Core,
        cursor: &mut SegmentCursor<'_>,
        at: u64,
        part: Part,
        fua: bool,
    ) -> Result<bool, BlockError> {
        let shift = self.shape().block_size.shift();
        let range = core.ranges.lock(cx, at..at + part.len).await;
        let Some(slot) = self.slot_for(core, part.line).await else {
            drop(range);
            return self.write_around(cx, core, cursor, at, part.len, fua).await;
        };
        let before = cursor.clone();
        let mut done = 0;
        while done < part.len {
            let lba = Self::place(core, slot, part.at + done, shift);
            match self.pass(cx, &*self.fast, Operation::Write { fua: false }, lba, cursor, part.len - done).await {
                Ok(bytes) => done += bytes,
                Err(error @ (BlockError::Memory | BlockError::OutOfRange)) => {
                    self.in_doubt(core, slot, part.mask);
                    return Err(error);
                }
                Err(error) => {
                    self.fast_failed("a write to the fast leg", error);
                    drop(range);
                    *cursor = before;
                    return self.write_around(cx, core, cursor, at, part.len, fua).await;
                }
            }
        }
        let changed = self.written(core, slot, part.mask);
        drop(range);
        Ok(changed || fua)
    }

    /// Scratch bytes of everything but copies and compares.
    fn own_bytes(&self) -> usize {
        let leg = self.fast.scratch_bytes().max(self.slow.scratch_bytes()).next_multiple_of(8);
        let futures = [
            future_bytes(Self::read_slowly),
            future_bytes(Self::write_slowly),
            future_bytes(Self::erase),
            future_bytes(Self::flush),
            read_bytes(Self::follow_read),
            write_bytes(Self::follow_write),
            acknowledge_bytes(Self::acknowledge),
        ];
        let future = futures.into_iter().max().unwrap_or(0);
        // What was begun at once may still be there while a request is done slowly.
        leg + future + placed_bytes::<Scratch>() + leg
    }
}

/// The cursor's next bytes as a list, as many whole blocks as it has room for; `None`, and the cursor stays, when that is none.
fn gather(cursor: &mut SegmentCursor<'_>, len: u64, shift: u32) -> Option<([Segment; SEGMENTS], usize, u64)> {
    let mut wanted = len as usize;
    loop {
        let mut ahead = cursor.clone();
        let mut list = [ahead.clone().next_run(1)?; SEGMENTS];
        let (mut used, mut bytes) = (0, 0);
        while let Some(place) = list.get_mut(used)
            && let Some(run) = ahead.next_run(wanted - bytes)
        {
            *place = run;
            bytes += run.len();
            used += 1;
        }
        if bytes == wanted {
            *cursor = ahead;
            return Some((list, used, bytes as u64));
        }
        // Fewer next time, and whole blocks.
        wanted = bytes >> shift << shift;
        if wanted == 0 {
            return None;
        }
    }
}

/// Scratch bytes that the future of [`Cache::follow_read`] takes.
fn read_bytes<'a, F: Future>(_: fn(&'a Cache, TaskContext<'a>, Request<'a>, Found, Step<'a>) -> F) -> usize {
    placed_bytes::<F>()
}

/// Scratch bytes that the future of [`Cache::acknowledge`] takes.
fn acknowledge_bytes<'a, F: Future>(_: fn(&'a Cache, TaskContext<'a>, bool, bool) -> F) -> usize {
    placed_bytes::<F>()
}

/// Scratch bytes that the future of [`Cache::follow_write`] takes.
fn write_bytes<'a, F: Future>(
    _: fn(&'a Cache, TaskContext<'a>, Request<'a>, Part, u32, Locked<'a>, Step<'a>) -> F,
) -> usize {
    placed_bytes::<F>()
}

impl Volume for Cache {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        self.shape()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let (ByteOffset(_), bytes) = match check(&self.shape(), &request) {
            Ok(range) => range,
            Err(error) => return Step::Done(Err(error)),
        };
        let core = match self.core() {
            Ok(core) => core,
            Err(error) => return Step::Done(Err(error)),
        };
        match request.operation {
            Operation::Flush if !self.may_be_dirty.load(Ordering::Relaxed) && !self.failures.losses.is_untold() => {
                self.slow.submit(cx.deeper(), request)
            }
            Operation::Flush => Step::Wait(cx.scratch.place_future(self.flush(cx, request))),
            _ if bytes == 0 => Step::Done(Ok(())),
            Operation::Read => self.read(core, cx, request),
            Operation::Write { .. } => self.write(core, cx, request),
            Operation::WriteZeroes { .. } | Operation::Deallocate => {
                Step::Wait(cx.scratch.place_future(self.erase(cx, request)))
            }
            Operation::Compare => Step::Wait(cx.scratch.place_future(compare_by_reading(self, cx, request))),
            Operation::Copy { .. } => Step::Wait(cx.scratch.place_future(copy_by_bounce(self, cx, request))),
        }
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        let (Some(core), shift) = (self.core.get(), self.shape().block_size.shift()) else { return false };
        let Some((ByteOffset(start), len)) = self.shape().byte_range(lba, count).filter(|(_, len)| *len > 0) else {
            return false;
        };
        let part = core.part(start, start + len, shift);
        let Some(found) = core.table.find(part.line) else { return true };
        self.fast.prefetch(Self::place(core, found.slot, part.at, shift), BlockCount(part.len >> shift))
    }

    fn scratch_bytes(&self) -> usize {
        helpers_scratch_bytes(self.own_bytes())
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name.clone(), what: "resizing" })
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.format_legs(block_size)
    }

    /// What is dirty is on the fast leg alone: where nothing was written back yet, the slow one seems to hold nothing.
    fn usage(&self) -> Usage {
        let slow = self.slow.usage().allocated;
        let dirty = self.core.get().map_or(0, |core| self.dirty_lines() << core.plan.line_shift);
        Usage { allocated: slow + dirty.min(self.bytes.saturating_sub(slow)) }
    }

    fn erases_by_key(&self) -> bool {
        self.fast.erases_by_key() && self.slow.erases_by_key()
    }
}

/// Clears bits of the slots that blocks of a range of bytes are in. `clear` gets each slot and the mask.
pub(super) fn each_part(core: &Core, start: u64, end: u64, shift: u32, mut clear: impl FnMut(u32, u64)) {
    let mut at = start;
    while at < end {
        let part = core.part(at, end, shift);
        if let Some(found) = core.table.find(part.line) {
            clear(found.slot, part.mask);
        }
        at += part.len;
    }
}

/// Locks a range, and has no buffer while it waits.
pub(super) async fn lock_with_buffer<'a>(
    ranges: &'a Ranges,
    cx: TaskContext<'a>,
    bytes: std::ops::Range<u64>,
) -> (Locked<'a>, millrace_memory::BounceBuffer) {
    loop {
        let buffer = cx.buffers.take().await;
        if let Some(range) = ranges.try_lock(bytes.clone()) {
            return (range, buffer);
        }
        drop(buffer);
        drop(ranges.lock(cx, bytes.clone()).await);
    }
}
