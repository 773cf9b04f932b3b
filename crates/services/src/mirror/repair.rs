//! What one leg cannot read is read elsewhere, and that leg is given it again: the blocks that it cannot read, and no others. Those beside
//! them may be right on that leg alone.
//!
//! Neighbours are given together: a disk whose sectors are larger than the volume's blocks heals one that went bad when all of it is
//! written, and refuses a part.

use std::{ops::Range, sync::atomic::Ordering};

use millrace_block::{BlockError, Operation, Request, TaskContext};
use millrace_memory::{BUFFER_SIZE, Segment, SegmentCursor};

use super::Mirror;
use crate::{
    locks::UNIT,
    members::{intent::Intent, state::legs_of, why::Why},
    told::is_told,
};

/// Bytes that are given again at once: beside them a buffer has room for a unit.
const AT_ONCE: u64 = BUFFER_SIZE as u64 - UNIT;

impl Mirror {
    /// Leg `leg` could not read what another one could: gives it the data again, and drops it when that does not help.
    pub(super) async fn rewrite(&self, cx: TaskContext<'_>, request: Request<'_>, leg: usize, error: BlockError) {
        let bytes = self.bytes_of(&request);
        let mut at = bytes.start;
        while at < bytes.end && self.masks().readable >> leg & 1 == 1 {
            let len = (bytes.end - at).min(AT_ONCE);
            let buffer = cx.buffers.take().await;
            let Some(range) = self.members.ranges.try_lock(at..at + len) else {
                drop(buffer);
                drop(self.members.ranges.lock(cx, at..at + len).await);
                continue;
            };
            let (segment, all) = (buffer.segment(len as usize), buffer.segment(BUFFER_SIZE));
            let room = all.part(AT_ONCE as usize, UNIT as usize);
            // The last block of a longer request may be there.
            let healed = self.repair(cx.deeper(), leg, at, segment, room, request.count.0 == 1).await;
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
    /// `unread`: it is one block, and the leg could not read it. Nothing to repair it with is not the leg's fault. `room`: for a unit, which may be
    /// the piece's own.
    pub(super) async fn repair(
        &self,
        cx: TaskContext<'_>,
        leg: usize,
        at: u64,
        segment: Segment,
        room: Option<Segment>,
        unread: bool,
    ) -> Result<u64, BlockError> {
        let others = self.masks().readable & !(1 << leg);
        let block = self.shape().block_size.bytes() as usize;
        // Neighbours that are to be given, up to here.
        let (mut given, mut run) = (0, 0_usize);
        for offset in (0..segment.len()).step_by(block) {
            let part = segment.part(offset, block).expect("a block of the piece");
            let place = at + offset as u64;
            let is_there = !unread && self.transfer(cx, leg, Operation::Read, place, part).await.is_ok();
            if !is_there && self.read_any(cx, others, place, part).await.is_ok() {
                run += block;
            } else if run > 0 {
                given += self.give_run(cx, leg, at, segment, offset - run..offset, room).await?;
                run = 0;
            }
        }
        if run > 0 {
            given += self.give_run(cx, leg, at, segment, segment.len() - run..segment.len(), room).await?;
        }
        Ok(given)
    }

    /// Gives these bytes of a piece to a leg; how many blocks it was given.
    async fn give_run(
        &self,
        cx: TaskContext<'_>,
        leg: usize,
        at: u64,
        segment: Segment,
        run: Range<usize>,
        room: Option<Segment>,
    ) -> Result<u64, BlockError> {
        let part = segment.part(run.start, run.len()).expect("a part of the piece");
        let bytes = at + run.start as u64..at + run.end as u64;
        let len = match (self.give(cx, leg, bytes.start, part).await, room) {
            (Ok(()), _) => bytes.end - bytes.start,
            (Err(error), None) => return Err(error),
            (Err(error), Some(room)) => self.give_units(cx, leg, bytes, room).await.map_err(|()| error)?,
        };
        Ok(len >> self.shape().block_size.shift())
    }

    /// Gives a leg all of the units around bytes of which it refuses these alone, as a disk does whose sectors are larger: it can read nothing else
    /// of such a sector either. How many bytes; an error when the leg may not stay. The range is locked, by whole units.
    async fn give_units(&self, cx: TaskContext<'_>, leg: usize, bytes: Range<u64>, room: Segment) -> Result<u64, ()> {
        let (first, end) = (bytes.start / UNIT * UNIT, bytes.end.next_multiple_of(UNIT));
        let is_settled = |intent: &Intent| intent.is_settled(first, end);
        let is_more = (first, end) != (bytes.start, bytes.end);
        if !is_more || end > self.members.ready() || !self.intent().is_some_and(is_settled) {
            return Err(());
        }
        let mut given = 0;
        for unit in (first..end).step_by(UNIT as usize) {
            if self.read_unit(cx, leg, unit, &bytes, room).await? {
                self.give(cx, leg, unit, room).await.map_err(|_| ())?;
                given += UNIT;
            }
        }
        Ok(given)
    }

    /// Reads a unit from the others, of which `leg` can read nothing, so far as it is not `asked` for it. False when the others differ in what was
    /// not asked for, or none of them can read it: that may be undecided, and so is given to no leg. Then the unit stays as it is, which is not the
    /// leg's fault.
    async fn read_unit(
        &self,
        cx: TaskContext<'_>,
        leg: usize,
        unit: u64,
        asked: &Range<u64>,
        room: Segment,
    ) -> Result<bool, ()> {
        let others = self.masks().readable & !(1 << leg);
        let block = self.shape().block_size.bytes() as usize;
        for place in (unit..unit + UNIT).step_by(block) {
            let part = room.part((place - unit) as usize, block).expect("a block of the unit");
            let is_asked = asked.contains(&place);
            // What it can read may be right on it alone.
            if !is_asked && self.transfer(cx, leg, Operation::Read, place, part).await.is_ok() {
                return Err(());
            }
            if self.read_any(cx, others, place, part).await.is_err() {
                // What was asked for was read a moment ago.
                return if is_asked { Err(()) } else { Ok(false) };
            }
            for other in legs_of(if is_asked { 0 } else { others }) {
                if self.transfer(cx, other, Operation::Compare, place, part).await == Err(BlockError::Miscompare) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Writes a piece to a leg, and reads it there. Durably: what was found must not come back with a power cut.
    async fn give(&self, cx: TaskContext<'_>, leg: usize, at: u64, segment: Segment) -> Result<(), BlockError> {
        self.transfer(cx, leg, Operation::Write { fua: true }, at, segment).await?;
        self.transfer(cx, leg, Operation::Read, at, segment).await?;
        let shift = self.shape().block_size.shift();
        let blocks = segment.len() as u64 >> shift;
        let before = self.counters.repaired.fetch_add(blocks, Ordering::Relaxed);
        if (before + 1..=before + blocks).any(is_told) {
            tracing::warn!(
                mirror = self.name,
                leg = self.members.leg_name(leg),
                lba = at >> shift,
                blocks,
                count = before + blocks,
                "a leg could not be read, and was given the data of another one"
            );
        }
        Ok(())
    }
}
