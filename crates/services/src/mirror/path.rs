//! The way of a request.

use std::{future::Future, sync::atomic::Ordering};

use millrace_block::{
    BlockCount, BlockError, BlockSize, ByteOffset, Geometry, Lba, Operation, Request, Scratch, ScratchBox, Step,
    TaskContext, Usage, Volume, VolumeError, check, future_bytes, placed_bytes,
};
use millrace_memory::{Access, BUFFER_SIZE, BounceBuffer, Places, Segment, SegmentCursor, copy_to_all};

use super::{Mirror, balance::Queued};
use crate::{
    legs::{largest_scratch, wait_for_all, whole_blocks},
    locks::Locked,
    members::{
        is_fault, region_shift,
        state::{MOST_LEGS, legs_of},
        why::Why,
    },
};

/// Bytes that are erased at once: more would keep others from the range for too long.
const ERASED_AT_ONCE: u64 = 16 << 20;
/// So few of them where others are always at work.
const ERASED_AT_LEAST: u64 = 256 << 10;

/// A write under way.
pub(super) struct Writing<'a> {
    /// Nobody else writes there. `None` for a flush.
    range: Option<Locked<'a>>,
    is_flush: bool,
    /// Its data, when they were copied.
    buffer: Option<BounceBuffer>,
    /// The legs it goes to.
    legs: u8,
    /// The legs that have it.
    done: u8,
    /// The legs that failed.
    faulty: u8,
    error: Option<BlockError>,
    /// An error that is no leg's fault.
    refused: Option<BlockError>,
}

impl<'a> Writing<'a> {
    fn new(range: Option<Locked<'a>>, buffer: Option<BounceBuffer>, legs: u8) -> Self {
        Self { range, is_flush: false, buffer, legs, done: 0, faulty: 0, error: None, refused: None }
    }

    fn note(&mut self, leg: usize, result: Result<(), BlockError>) {
        match result {
            Ok(()) => self.done |= 1 << leg,
            Err(error) if is_fault(error) => {
                self.faulty |= 1 << leg;
                self.error.get_or_insert(error);
            }
            Err(error) => {
                self.refused.get_or_insert(error);
            }
        }
    }
}

impl Mirror {
    /// The bytes of a request.
    pub(super) fn bytes_of(&self, request: &Request<'_>) -> std::ops::Range<u64> {
        let shift = self.shape().block_size.shift();
        // No overflow: the range was checked.
        request.lba.0 << shift..(request.lba.0 + request.count.0) << shift
    }

    /// Locks and looks; `None` when something must be waited for.
    #[inline]
    fn begin(&self, request: &Request<'_>) -> Option<Writing<'_>> {
        let bytes = self.bytes_of(request);
        let range = self.members.ranges.try_lock(bytes.clone())?;
        // After the lock: see `Ranges::try_lock`.
        self.members.is_marked(&bytes).then(|| Writing::new(Some(range), None, self.masks().writable))
    }

    /// Copies the data, where that is wanted, so that all legs get the same; `None` when no buffer is free.
    #[inline]
    fn hold_still<'a>(
        &self,
        cx: TaskContext<'a>,
        writing: &mut Writing<'_>,
        mut request: Request<'a>,
    ) -> Option<Request<'a>> {
        if self.plan.stable && request.operation.has_data() {
            let copied = cx.buffers.try_take()?;
            let len = millrace_memory::total_len(request.segments) as u64;
            request.segments = copy(cx, &copied, &mut SegmentCursor::new(request.segments), len);
            writing.buffer = Some(copied);
        }
        Some(request)
    }

    /// Waits for the mark, a buffer and the range, which becomes shorter if an erasure's is never free. While it waits for one it has none of
    /// the others, so nobody waits for it.
    async fn begin_later(
        &self,
        cx: TaskContext<'_>,
        bytes: &mut std::ops::Range<u64>,
        operation: Operation,
    ) -> Result<(Locked<'_>, Option<BounceBuffer>), BlockError> {
        let needs_buffer = self.plan.stable && operation.has_data();
        let least = if operation.has_data() { u64::MAX } else { ERASED_AT_LEAST };
        loop {
            self.members.mark(cx, bytes).await?;
            let buffer = if needs_buffer { Some(cx.buffers.take().await) } else { None };
            if let Some(range) = self.members.ranges.try_lock(bytes.clone()) {
                // After the lock: see `Ranges::try_lock`.
                if self.members.is_marked(bytes) {
                    return Ok((range, buffer));
                }
                continue;
            }
            drop(buffer);
            drop(self.members.ranges.lock_some(cx, bytes, least).await);
        }
    }

    /// A write to legs that are memory: one pass's, so that they have the same whatever the guest does meanwhile. Whether it was done.
    #[inline]
    fn write_at_once(&self, writing: &mut Writing<'_>, request: &Request<'_>) -> bool {
        let mut places = Places::new();
        for leg in legs_of(writing.legs) {
            let Some(place) = self.legs[leg].reach(request.lba, request.count, Access::Write) else { return false };
            places.add(&place);
        }
        copy_to_all(request.segments, &places);
        legs_of(writing.legs).for_each(|leg| self.legs[leg].reached(request.lba, request.count));
        writing.done = writing.legs;
        // Else it is written once more, the long way.
        self.may_acknowledge(writing)
    }

    /// A write that ends here and now, by a shard that is nearly always the only one to write. Whether it was done.
    #[inline]
    fn write_alone(&self, request: &Request<'_>) -> bool {
        let bytes = self.bytes_of(request);
        let Some(_held) = self.members.ranges.try_hold(&bytes) else { return false };
        // After the lock: see `Ranges::try_lock`.
        self.members.is_marked(&bytes) && self.write_at_once(&mut Writing::new(None, None, self.masks().writable), request)
    }

    /// A write of at most one buffer's length.
    #[inline]
    fn write<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if self.write_alone(&request) {
            return Step::Done(Ok(()));
        }
        if let Some(mut writing) = self.begin(&request) {
            if self.write_at_once(&mut writing, &request) {
                self.members.ranges.could_hold();
                return Step::Done(Ok(()));
            }
            writing.done = 0;
            if let Some(request) = self.hold_still(cx, &mut writing, request.clone()) {
                return self.write_legs(cx, writing, request);
            }
        }
        Step::Wait(cx.scratch.place_future(self.write_later(cx, request)))
    }

    /// A write that must wait for something before it goes to the legs.
    async fn write_later(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        self.write_piece(cx, request.clone(), &mut SegmentCursor::new(request.segments)).await.map(|_| ())
    }

    /// A write whose data are the cursor's next, or an erasure, perhaps of the first blocks only: of how many.
    async fn write_piece<'a>(
        &'a self,
        cx: TaskContext<'a>,
        request: Request<'a>,
        cursor: &mut SegmentCursor<'_>,
    ) -> Result<u64, BlockError> {
        let mut bytes = self.bytes_of(&request);
        let (range, buffer) = self.begin_later(cx, &mut bytes, request.operation).await?;
        let (mut request, len) = (request, bytes.end - bytes.start);
        request.count = BlockCount(len >> self.shape().block_size.shift());
        if let Some(buffer) = &buffer {
            request.segments = copy(cx, buffer, cursor, len);
        }
        let (writing, count) = (Writing::new(Some(range), buffer, self.masks().writable), request.count.0);
        self.write_legs(cx, writing, request).await.map(|()| count)
    }

    /// Write all legs, wait for all.
    #[inline]
    fn write_legs<'a>(&'a self, cx: TaskContext<'a>, mut writing: Writing<'a>, request: Request<'a>) -> Step<'a> {
        for leg in legs_of(writing.legs) {
            match self.legs[leg].submit(cx.deeper(), request.clone()) {
                Step::Done(result) => self.note(&mut writing, leg, result),
                step @ Step::Wait(_) => {
                    return Step::Wait(cx.scratch.place_future(self.wait_for_legs(cx, writing, request, leg, step)));
                }
            }
        }
        if self.may_acknowledge(&writing) {
            return Step::Done(Ok(()));
        }
        Step::Wait(cx.scratch.place_future(self.settle(cx, writing)))
    }

    /// Leg `first` makes us wait: writes the legs after it, and waits for all.
    async fn wait_for_legs<'a>(
        &'a self,
        cx: TaskContext<'a>,
        mut writing: Writing<'a>,
        request: Request<'a>,
        first: usize,
        step: Step<'a>,
    ) -> Result<(), BlockError> {
        {
            let scratch = largest_scratch(&self.legs);
            let rest = writing.legs & (u16::MAX << (first + 1)) as u8;
            // Each leg's request goes on beside the others, so it has a scratch of its own.
            let mut arenas: [Option<ScratchBox<'_, Scratch>>; MOST_LEGS] = Default::default();
            legs_of(rest).for_each(|leg| arenas[leg] = Some(cx.scratch.carve(scratch)));
            let mut steps: [Option<Step<'_>>; MOST_LEGS] = Default::default();
            steps[first] = Some(step);
            for leg in legs_of(rest) {
                let arena = arenas[leg].as_ref().expect("an arena was carved for each");
                steps[leg] = Some(self.legs[leg].submit(cx.deeper().with_scratch(arena), request.clone()));
            }
            wait_for_all(&mut steps, |leg, result| self.note(&mut writing, leg, result)).await;
        }
        self.settle(cx, writing).await
    }

    /// What a leg says.
    #[inline]
    fn note(&self, writing: &mut Writing<'_>, leg: usize, result: Result<(), BlockError>) {
        if writing.is_flush && result.is_err_and(is_fault) {
            // At once: the other legs may take long, and this one says it to nobody else.
            self.members.note_refused(leg);
        }
        writing.note(leg, result);
    }

    /// The legs of a flush that refused another one, whatever they say to this.
    #[inline]
    fn doubtful(&self, writing: &Writing<'_>) -> u8 {
        if writing.is_flush { self.members.refused() & writing.legs } else { 0 }
    }

    /// Whether every leg has it or is known, after a crash too, not to have it.
    fn may_acknowledge(&self, writing: &Writing<'_>) -> bool {
        let masks = self.masks();
        writing.refused.is_none()
            && writing.done & masks.readable != 0
            && self.members.unrecorded(writing.legs, writing.faulty) == 0
            && self.doubtful(writing) == 0
    }

    /// A write that did not go well on all legs.
    async fn settle(&self, cx: TaskContext<'_>, mut writing: Writing<'_>) -> Result<(), BlockError> {
        // Nothing that others wait for is kept while the legs' tables are written, but the range.
        writing.buffer = None;
        if writing.done & self.masks().readable != 0 && writing.refused.is_none() {
            let missed = self.members.unrecorded(writing.legs, writing.faulty | self.doubtful(&writing));
            let why = if writing.is_flush { Why::Flush } else { Why::Missed };
            let why = writing.error.map_or(why, Why::Failed);
            let recorded = self.members.drop_legs(cx, missed, why).await;
            if recorded.is_ok() && writing.done & self.masks().readable != 0 {
                return Ok(());
            }
        }
        if writing.is_flush {
            // What each has lost that refused it nobody knows, but where it can be.
            self.members.note_unflushed(writing.legs);
        } else if let (Some(range), Some(intent)) = (&writing.range, self.intent()) {
            let bytes = range.bytes();
            intent.suspect(&intent.regions_of(bytes.start, bytes.end.min(self.members.bytes())));
        }
        Err(writing.refused.or(writing.error).unwrap_or(BlockError::WriteFault { errno: 0 }))
    }

    /// A write of more than a buffer's length, or an erasure: piece by piece.
    async fn in_pieces(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let shape = self.shape();
        let operation = match request.operation {
            // As zeroes, so that all legs read alike, whatever each of them makes of the advice.
            Operation::Deallocate if !shape.deallocate => return Ok(()),
            Operation::Deallocate => Operation::WriteZeroes { fua: false, deallocate: true },
            other => other,
        };
        let whole = self.bytes_of(&request);
        self.members.mark(cx, &whole).await?;
        let longest = if operation.has_data() { BUFFER_SIZE as u64 } else { ERASED_AT_ONCE } >> shape.block_size.shift();
        let (mut most, mut cursor) = (longest, SegmentCursor::new(request.segments));
        let mut done = 0;
        while done < request.count.0 {
            let count = BlockCount(most.min(request.count.0 - done));
            let lba = Lba(request.lba.0 + done);
            let arena = cx.scratch.carve(self.piece_bytes());
            let cx = cx.with_scratch(&arena);
            let written = self.write_piece(cx, Request { operation, lba, count, segments: &[] }, &mut cursor).await?;
            // Where others are at work more would not be had the next time either.
            most = if written < count.0 { written } else { (most * 2).min(longest) };
            done += written;
        }
        if !operation.has_data() {
            self.look_again(shape.block_size);
        }
        Ok(())
    }

    /// A copy: read from one leg, written to all.
    async fn copy(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let Operation::Copy { source } = request.operation else { return Err(BlockError::Unsupported) };
        let shift = self.shape().block_size.shift();
        let buffer = cx.buffers.take().await;
        let cx = cx.deeper();
        let mut done = 0;
        while done < request.count.0 {
            let count = BlockCount((BUFFER_SIZE as u64 >> shift).min(request.count.0 - done));
            let segments = [buffer.segment((count.0 << shift) as usize)];
            // No overflow: both ranges were checked.
            let (from, to) = (Lba(source.0 + done), Lba(request.lba.0 + done));
            for (operation, lba) in [(Operation::Read, from), (Operation::Write { fua: false }, to)] {
                let arena = cx.scratch.carve(self.piece_bytes());
                self.submit(cx.with_scratch(&arena), Request { operation, lba, count, segments: &segments }).await?;
            }
            done += count.0;
        }
        Ok(())
    }

    /// A request that reaches into what the mirror grew by, and is the first.
    async fn open_up(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let arena = cx.scratch.carve_rest();
        // Once in a mirror's growth: on the heap, for all others would have to have the room for it.
        Box::pin(self.members.open_up(cx.with_scratch(&arena))).await?;
        drop(arena);
        let arena = cx.scratch.carve_rest();
        self.submit(cx.with_scratch(&arena), request).await
    }

    /// A flush of all legs.
    fn flush<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let losses = self.members.losses.count();
        let writing = Writing { is_flush: true, ..Writing::new(None, None, self.masks().writable) };
        match self.write_legs(cx, writing, request) {
            Step::Done(result) => Step::Done(result.and(self.members.losses.tell(losses))),
            step @ Step::Wait(_) => Step::Wait(cx.scratch.place_future(self.tell(losses, step))),
        }
    }

    async fn tell(&self, losses: u64, step: Step<'_>) -> Result<(), BlockError> {
        let flushed = step.await;
        flushed.and(self.members.losses.tell(losses))
    }

    /// A read or compare: of one leg.
    #[inline]
    fn read<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let Some(leg) = self.leg_to_read(&request) else { return Step::Done(Err(BlockError::NotReady)) };
        match self.legs[leg].submit(cx.deeper(), request.clone()) {
            Step::Done(result) if !result.is_err_and(is_fault) => Step::Done(result),
            step => {
                let queued = self.balance.queue(leg);
                Step::Wait(cx.scratch.place_future(self.follow_read(cx, request, queued, leg, step)))
            }
        }
    }

    /// The leg for a read; where legs may differ it is always the same.
    #[inline]
    fn leg_to_read(&self, request: &Request<'_>) -> Option<usize> {
        let readable = self.masks().readable;
        let bytes = self.bytes_of(request);
        if readable == 0 {
            None
        } else if self.intent()?.is_settled(bytes.start, bytes.end) {
            Some(self.balance.choose(readable))
        } else {
            Some(readable.trailing_zeros() as usize)
        }
    }

    async fn follow_read<'a>(
        &'a self,
        cx: TaskContext<'a>,
        request: Request<'a>,
        queued: Queued<'a>,
        leg: usize,
        step: Step<'a>,
    ) -> Result<(), BlockError> {
        let first = match step.await {
            Err(error) if is_fault(error) => error,
            result => return result,
        };
        drop(queued);
        self.counters.read_errors.fetch_add(1, Ordering::Relaxed);
        let bytes = self.bytes_of(&request);
        // Where legs may differ, another one counts for blocks that the first cannot read, and for no others.
        let settled = self.intent().is_some_and(|intent| intent.is_settled(bytes.start, bytes.end));
        let whole = if settled || request.count.0 == 1 { self.masks().readable & !(1 << leg) } else { 0 };
        for other in legs_of(whole) {
            let arena = cx.scratch.carve(self.legs[other].scratch_bytes());
            let result = self.legs[other].submit(cx.deeper().with_scratch(&arena), request.clone()).await;
            drop(arena);
            if !result.is_err_and(is_fault) {
                self.rewrite(cx, request, leg, first).await;
                return result;
            }
        }
        self.salvage(cx, request, first).await
    }

    /// Reads or writes a piece of one leg.
    pub(super) async fn transfer(
        &self,
        cx: TaskContext<'_>,
        leg: usize,
        operation: Operation,
        at: u64,
        segment: Segment,
    ) -> Result<(), BlockError> {
        let shift = self.shape().block_size.shift();
        let (lba, count) = (Lba(at >> shift), BlockCount(segment.len() as u64 >> shift));
        let arena = cx.scratch.carve_rest();
        self.legs[leg].submit(cx.with_scratch(&arena), Request { operation, lba, count, segments: &[segment] }).await
    }

    /// Scratch bytes of a read or write of one buffer's length.
    fn piece_bytes(&self) -> usize {
        let inner = largest_scratch(&self.legs).next_multiple_of(8);
        let read = read_bytes(Self::follow_read) + 2 * (placed_bytes::<Scratch>() + inner);
        self.write_bytes().max(read)
    }

    /// Scratch bytes of a write of one buffer's length.
    fn write_bytes(&self) -> usize {
        let each = placed_bytes::<Scratch>() + largest_scratch(&self.legs).next_multiple_of(8);
        // One more than legs: for the tables after a failure.
        let legs = (self.legs.len() + 1) * each;
        legs + size_of::<Segment>() + future_bytes(Self::write_later) + wait_bytes(Self::wait_for_legs)
    }
}

/// Copies the next `len` bytes to the buffer; the list that names them there.
fn copy<'a>(cx: TaskContext<'a>, buffer: &BounceBuffer, from: &mut SegmentCursor<'_>, len: u64) -> &'a [Segment] {
    let segment = buffer.segment(len as usize);
    from.copy_to(segment);
    cx.scratch.place_slice(1, segment)
}

/// Scratch bytes that the future of [`Mirror::wait_for_legs`] takes.
fn wait_bytes<'a, F: Future>(_: fn(&'a Mirror, TaskContext<'a>, Writing<'a>, Request<'a>, usize, Step<'a>) -> F) -> usize {
    placed_bytes::<F>()
}

/// Scratch bytes that the future of [`Mirror::follow_read`] takes.
fn read_bytes<'a, F: Future>(_: fn(&'a Mirror, TaskContext<'a>, Request<'a>, Queued<'a>, usize, Step<'a>) -> F) -> usize {
    placed_bytes::<F>()
}

impl Volume for Mirror {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        self.shape()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let shape = self.shape();
        let (ByteOffset(offset), bytes) = match check(&shape, &request) {
            Ok(range) => range,
            Err(error) => return Step::Done(Err(error)),
        };
        // No overflow: the ranges were checked.
        let end = match request.operation {
            Operation::Copy { source } => offset.max(source.0 << shape.block_size.shift()) + bytes,
            _ => offset + bytes,
        };
        match request.operation {
            Operation::Flush => self.flush(cx, request),
            _ if request.count.0 == 0 => Step::Done(Ok(())),
            _ if !self.members.is_ready(end) => Step::Wait(cx.scratch.place_future(self.open_up(cx, request))),
            Operation::Read | Operation::Compare => self.read(cx, request),
            Operation::Write { .. } if bytes <= BUFFER_SIZE as u64 || !self.plan.stable => self.write(cx, request),
            Operation::Write { .. } | Operation::WriteZeroes { .. } | Operation::Deallocate => {
                Step::Wait(cx.scratch.place_future(self.in_pieces(cx, request)))
            }
            Operation::Copy { .. } => Step::Wait(cx.scratch.place_future(self.copy(cx, request))),
        }
    }

    fn settles_late(&self) -> bool {
        // A range is unlocked by an atomic operation, which settles, or was held by the only shard that writes: whoever else locks one, or
        // waits until none is locked, makes every processor settle first (`Ranges::try_hold`).
        self.legs.iter().all(|leg| leg.settles_late())
    }

    fn scratch_bytes(&self) -> usize {
        let long = future_bytes(Self::in_pieces).max(future_bytes(Self::copy));
        let scratch = placed_bytes::<Scratch>();
        future_bytes(Self::open_up) + scratch + long + scratch + self.piece_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let geometry = self.shape();
        let size = blocks.0.saturating_mul(u64::from(geometry.block_size.bytes()));
        let (before, ready) = (geometry.bytes(), self.members.ready());
        let smaller = || VolumeError::Unsupported { volume: self.name.clone(), what: "making it smaller" };
        match size.cmp(&self.members.bytes()) {
            _ if size == before => Ok(()),
            _ if size == ready => self.members.take_back()?.then_some(()).ok_or_else(smaller),
            std::cmp::Ordering::Greater => {
                // It is opened with its setting again.
                let fits = region_shift(self.plan.region_shift, size);
                fits.map_err(|error| VolumeError::Refused { volume: self.name.clone(), why: error.to_string() })?;
                self.members.grow(size)
            }
            _ => Err(smaller()),
        }
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let bytes = whole_blocks(&self.name, self.members.bytes(), block_size)?;
        self.members.format_legs(block_size, bytes, || self.look_again(block_size))
    }

    fn usage(&self) -> Usage {
        let readable = self.masks().readable.max(1);
        let leg = readable.trailing_zeros() as usize;
        self.legs.get(leg).map_or(Usage::default(), |leg| leg.usage())
    }
}
