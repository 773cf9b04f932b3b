//! What one leg cannot read is read elsewhere, and that leg is given it again: the blocks that it cannot read, and no others. Those beside
//! them may be right on that leg alone.

use std::sync::atomic::Ordering;

use millrace_block::{BlockError, Operation, Request, TaskContext};
use millrace_memory::{BUFFER_SIZE, Segment, SegmentCursor};

use super::Mirror;
use crate::{
    members::{state::legs_of, why::Why},
    told::is_told,
};

impl Mirror {
    /// Leg `leg` could not read what another one could: gives it the data again, and drops it when that does not help.
    pub(super) async fn rewrite(&self, cx: TaskContext<'_>, request: Request<'_>, leg: usize, error: BlockError) {
        let bytes = self.bytes_of(&request);
        let mut at = bytes.start;
        while at < bytes.end && self.masks().readable >> leg & 1 == 1 {
            let len = (bytes.end - at).min(BUFFER_SIZE as u64);
            let buffer = cx.buffers.take().await;
            let Some(range) = self.members.ranges.try_lock(at..at + len) else {
                drop(buffer);
                drop(self.members.ranges.lock(cx, at..at + len).await);
                continue;
            };
            let segment = buffer.segment(len as usize);
            // The last block of a longer request may be there.
            let healed = self.repair(cx.deeper(), leg, at, segment, request.count.0 == 1).await;
            drop((range, buffer));
            if healed.is_err() {
                // What cannot be recorded stays as it is: the leg is still there, and is not the only one to read.
                _ = self.members.drop_legs(cx, 1 << leg, Why::Failed(error)).await;
            }
            at += len;
        }
    }

    /// No leg can read all of a request: delivers each block from a leg that can.
    pub(super) async fn salvage(
        &self,
        cx: TaskContext<'_>,
        request: Request<'_>,
        error: BlockError,
    ) -> Result<(), BlockError> {
        let (bytes, block) = (self.bytes_of(&request), u64::from(self.shape().block_size.bytes()));
        if bytes.end - bytes.start <= block || self.masks().readable.count_ones() < 2 {
            return Err(error);
        }
        {
            let buffer = cx.buffers.take().await;
            let mut cursor = SegmentCursor::new(request.segments);
            for at in (bytes.start..bytes.end).step_by(block as usize) {
                let segment = buffer.segment(block as usize);
                self.read_any(cx.deeper(), self.masks().readable, at, segment).await?;
                match request.operation {
                    Operation::Compare if !cursor.equals(segment) => return Err(BlockError::Miscompare),
                    Operation::Compare => {}
                    _ => _ = cursor.copy_from(segment),
                }
            }
        }
        for leg in legs_of(self.masks().readable) {
            self.rewrite(cx, request.clone(), leg, error).await;
        }
        Ok(())
    }

    /// Reads a piece from the first of these legs that can.
    async fn read_any(&self, cx: TaskContext<'_>, legs: u8, at: u64, segment: Segment) -> Result<(), BlockError> {
        let mut result = Err(BlockError::NotReady);
        for leg in legs_of(legs) {
            result = self.transfer(cx, leg, Operation::Read, at, segment).await;
            if result.is_ok() {
                break;
            }
        }
        result
    }

    /// Gives `leg` again from other good legs what it cannot read of a piece. Returns how many blocks that were. The range is locked.
    /// `unread`: it is one block, and the leg could not read it. Nothing to repair it with is not the leg's fault.
    pub(super) async fn repair(
        &self,
        cx: TaskContext<'_>,
        leg: usize,
        at: u64,
        segment: Segment,
        unread: bool,
    ) -> Result<u64, BlockError> {
        let others = self.masks().readable & !(1 << leg);
        let block = self.shape().block_size.bytes() as usize;
        let mut given = 0;
        for offset in (0..segment.len()).step_by(block) {
            let part = segment.part(offset, block).expect("a block of the piece");
            let place = at + offset as u64;
            let is_there = !unread && self.transfer(cx, leg, Operation::Read, place, part).await.is_ok();
            if !is_there && self.read_any(cx, others, place, part).await.is_ok() {
                self.give(cx, leg, place, part).await?;
                given += 1;
            }
        }
        Ok(given)
    }

    /// Writes a piece to a leg, and reads it there. Durably: what was found must not come back with a power cut.
    async fn give(&self, cx: TaskContext<'_>, leg: usize, at: u64, segment: Segment) -> Result<(), BlockError> {
        self.transfer(cx, leg, Operation::Write { fua: true }, at, segment).await?;
        self.transfer(cx, leg, Operation::Read, at, segment).await?;
        let count = self.counters.repaired.fetch_add(1, Ordering::Relaxed) + 1;
        if is_told(count) {
            let shift = self.shape().block_size.shift();
            tracing::warn!(
                mirror = self.name,
                leg = self.members.leg_name(leg),
                lba = at >> shift,
                blocks = segment.len() >> shift,
                count,
                "a leg could not be read, and was given the data of another one"
            );
        }
        Ok(())
    }
}
