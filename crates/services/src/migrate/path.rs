//! The way of a request.

use std::{
    ops::Range,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Extent, Geometry, Lba, Operation, Request, Scratch, Step, TaskContext, Usage, Volume,
    VolumeError, check, future_bytes, placed_bytes,
};
use millrace_memory::{BUFFER_SIZE, BounceBuffer, Segment, SegmentCursor};

use super::{Move, NEW, OLD, Phase, common_bytes};
use crate::{legs::wait_for_all, locks::Locked};

/// Bytes that are erased at once: more would keep others from the range for too long.
pub(super) const ERASED_AT_ONCE: u64 = 16 << 20;
/// So few of them where others are always at work.
const ERASED_AT_LEAST: u64 = 256 << 10;
/// How long a format waits for the walk and for writes.
const PATIENCE: Duration = Duration::from_secs(10);

impl Move {
    /// The bytes of a request.
    fn bytes_of(&self, request: &Request<'_>) -> Range<u64> {
        let shift = self.old.geometry().block_size.shift();
        // No overflow: the range was checked.
        request.lba.0 << shift..(request.lba.0 + request.count.0) << shift
    }

    /// A write or an erasure.
    async fn write(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let has_data = request.operation.has_data();
        if has_data {
            // What lies before the walk is OLD's alone, as it is.
            let bytes = self.bytes_of(&request);
            let _range = self.ranges.lock(cx, bytes.clone()).await;
            self.fill(&bytes);
            if self.is_ahead(&bytes) {
                // A level down: copies wait for the range, and have buffers of this level.
                return self.old.submit(cx.deeper(), request).await;
            }
        }
        let shift = self.old.geometry().block_size.shift();
        let longest = if has_data { BUFFER_SIZE as u64 } else { ERASED_AT_ONCE } >> shift;
        let (mut most, mut data) = (longest, SegmentCursor::new(request.segments));
        let mut done = 0;
        while done < request.count.0 {
            let (lba, count) = (Lba(request.lba.0 + done), BlockCount(most.min(request.count.0 - done)));
            let arena = cx.scratch.carve(self.piece_bytes());
            let piece = Request { operation: request.operation, lba, count, segments: &[] };
            let written = self.write_piece(cx.with_scratch(&arena), piece, &mut data).await?;
            // Where others are at work more would not be had the next time either.
            most = if written < count.0 { written } else { (most * 2).min(longest) };
            done += written;
        }
        Ok(())
    }

    /// At most one buffer's length, its data the next of `data`: they are copied once, so that both legs get the same whatever the guest
    /// does meanwhile. Or an erasure, perhaps of the first blocks only. Of how many blocks it was.
    async fn write_piece(
        &self,
        cx: TaskContext<'_>,
        mut request: Request<'_>,
        data: &mut SegmentCursor<'_>,
    ) -> Result<u64, BlockError> {
        let mut bytes = self.bytes_of(&request);
        let (_range, buffer) = self.begin(cx, &mut bytes, request.operation.has_data()).await;
        self.fill(&bytes);
        let blocks = (bytes.end - bytes.start) >> self.old.geometry().block_size.shift();
        request.count = BlockCount(blocks);
        let segments;
        if let Some(buffer) = &buffer {
            segments = [buffer.segment((bytes.end - bytes.start) as usize)];
            data.copy_to(segments[0]);
            request.segments = &segments;
        }
        let cx = cx.deeper();
        if self.is_ahead(&bytes) {
            let arena = cx.scratch.carve(self.old.scratch_bytes());
            return self.old.submit(cx.with_scratch(&arena), request).await.map(|()| blocks);
        }
        if request.operation == Operation::Deallocate {
            // As zeroes, so that both read alike, whatever each of them makes of the advice.
            request.operation = Operation::WriteZeroes { fua: false, deallocate: true };
        }
        let written = self.both(cx, request).await;
        if written.is_err() {
            // Nobody knows what OLD has there now, and NEW may have something else.
            self.step_back(bytes.start);
        }
        written.map(|()| blocks)
    }

    /// Waits for a buffer and the range, which becomes shorter if an erasure's is never free. While it waits for one it has not the other,
    /// so nobody waits for it.
    async fn begin(&self, cx: TaskContext<'_>, bytes: &mut Range<u64>, data: bool) -> (Locked<'_>, Option<BounceBuffer>) {
        let least = if data { u64::MAX } else { ERASED_AT_LEAST };
        loop {
            let buffer = if data { Some(cx.buffers.take().await) } else { None };
            if let Some(range) = self.ranges.try_lock(bytes.clone()) {
                return (range, buffer);
            }
            drop(buffer);
            drop(self.ranges.lock_some(cx, bytes, least).await);
        }
    }

    /// To both legs; the answer is OLD's.
    async fn both(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let mut results = [Ok(()); 2];
        {
            // Each leg's request goes on beside the other, so it has a scratch of its own.
            let first = cx.scratch.carve(self.old.scratch_bytes());
            let second = cx.scratch.carve(self.new.scratch_bytes());
            let old = self.old.submit(cx.with_scratch(&first), request.clone());
            let new = self.new.submit(cx.with_scratch(&second), request);
            wait_for_all(&mut [Some(old), Some(new)], |leg, result| results[leg] = result).await;
        }
        if let Err(error) = results[NEW] {
            self.end_by(error);
        }
        results[OLD]
    }

    /// A copy: read from OLD, written as any write.
    async fn copy(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let Operation::Copy { source } = request.operation else { return Err(BlockError::Unsupported) };
        let shift = self.old.geometry().block_size.shift();
        let buffer = cx.buffers.take().await;
        let cx = cx.deeper();
        let mut done = 0;
        while done < request.count.0 {
            let count = BlockCount((BUFFER_SIZE as u64 >> shift).min(request.count.0 - done));
            let segments = [buffer.segment((count.0 << shift) as usize)];
            {
                let arena = cx.scratch.carve(self.old.scratch_bytes());
                let (operation, lba) = (Operation::Read, Lba(source.0 + done));
                let read = Request { operation, lba, count, segments: &segments };
                self.old.submit(cx.with_scratch(&arena), read).await?;
            }
            let arena = cx.scratch.carve(self.piece_bytes());
            let (operation, lba) = (Operation::Write { fua: false }, Lba(request.lba.0 + done));
            let write = Request { operation, lba, count, segments: &[] };
            self.write_piece(cx.with_scratch(&arena), write, &mut SegmentCursor::new(&segments)).await?;
            done += count.0;
        }
        Ok(())
    }

    /// Scratch bytes that [`Self::write_piece`] takes beside its future.
    fn piece_bytes(&self) -> usize {
        let arena = |leg: &dyn Volume| placed_bytes::<Scratch>() + leg.scratch_bytes().next_multiple_of(8);
        arena(&*self.old) + arena(&*self.new)
    }

    /// OLD was formatted, or a part of it was. To be called with everything locked.
    fn walk_anew(&self) {
        if let Some(holes) = self.holes.get() {
            // They were those of the blocks before.
            holes.forget();
        }
        self.step_back(0);
    }

    /// Locks everything; for who may wait, not on a shard.
    fn lock_all(&self) -> Result<Locked<'_>, VolumeError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.ranges.try_lock(0..self.bytes()) {
                Some(all) => return Ok(all),
                None if Instant::now() > deadline => {
                    let what = "formatting while it is being migrated";
                    return Err(VolumeError::Unsupported { volume: self.name.clone(), what });
                }
                None => thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}

impl Volume for Move {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        let old = self.old.geometry();
        let blocks = BlockCount(self.bytes() >> old.block_size.shift());
        if self.phase() == Phase::Ended {
            return Geometry { blocks, ..old };
        }
        let new = self.new.geometry();
        Geometry {
            blocks,
            volatile_cache: old.volatile_cache || new.volatile_cache,
            deallocate: old.deallocate && new.deallocate,
            ..old
        }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let geometry = self.geometry();
        if let Err(error) = check(&geometry, &request) {
            return Step::Done(Err(error));
        }
        // All that goes to the legs goes a level down: see `BufferPool`.
        let (phase, below) = (self.phase(), cx.deeper());
        match request.operation {
            _ if phase == Phase::Ended => self.old.submit(below, request),
            Operation::Read | Operation::Compare => self.old.submit(below, request),
            Operation::Flush if phase == Phase::Copying => self.old.submit(below, request),
            Operation::Flush => Step::Wait(cx.scratch.place_future(self.both(below, request))),
            _ if request.count.0 == 0 => Step::Done(Ok(())),
            Operation::Deallocate if !geometry.deallocate => Step::Done(Ok(())),
            Operation::Write { .. } | Operation::WriteZeroes { .. } | Operation::Deallocate => {
                Step::Wait(cx.scratch.place_future(self.write(cx, request)))
            }
            Operation::Copy { .. } => Step::Wait(cx.scratch.place_future(self.copy(cx, request))),
        }
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        self.old.prefetch(lba, count)
    }

    fn scratch_bytes(&self) -> usize {
        let own = future_bytes(Self::write).max(future_bytes(Self::copy)).max(future_bytes(Self::both));
        own + placed_bytes::<Scratch>() + self.piece_bytes() + size_of::<Segment>()
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name.clone(), what: "resizing while it is being migrated" })
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let _all = self.lock_all()?;
        if let Err(error) = self.old.format(block_size) {
            // A part of it may be erased: NEW has not what OLD has.
            self.walk_anew();
            return Err(error);
        }
        if self.phase() != Phase::Ended
            && let Err(error) = self.new.format(block_size)
        {
            self.end(format!("{} cannot be formatted: {error}", self.new.name()));
        }
        let bytes = if self.phase() == Phase::Ended {
            // The new leg's size is not what counts, and no longer known.
            self.old.geometry().bytes().min(self.bytes())
        } else {
            common_bytes(&*self.old, &*self.new)
        };
        self.bytes.store(bytes, Ordering::Relaxed);
        self.walk_anew();
        Ok(())
    }

    fn usage(&self) -> Usage {
        self.old.usage()
    }

    fn extent(&self, lba: Lba) -> Option<Extent> {
        self.old.extent(lba)
    }
}
