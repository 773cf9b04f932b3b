//! Discard and write zeroes: what a guest has done to ranges of blocks, without data.
//!
//! A volume may do with a range at once what takes long: ranges go piece by piece, and those of a disk share its turn with its long transfers
//! ([`super::long`]).

use millrace_block::{BlockError, Operation, Request, TaskContext};
use millrace_engine::{Outcome, TaskSlot};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    super::{
        config::{MAX_DISCARD, MAX_RANGES, MAX_ZEROES},
        disk::{Core, DESCRIPTOR_BYTES},
    },
    Attached, Ending, Range, SECTOR, UNMAP, blocks,
    long::move_piece,
    wait,
};
use crate::pace::{PIECE, Pace};

/// Bytes that take about as long to move as a volume takes for a range, however short.
const RANGE_BYTES: u64 = 32 << 10;

impl Range {
    fn bytes(&self) -> u64 {
        u64::from(self.sectors) * SECTOR
    }
}

impl Core {
    /// Discard and write zeroes: one range after the other.
    pub(super) fn ranges<'s>(
        &mut self,
        slot: TaskSlot<'s>,
        ending: Ending,
        first: usize,
        zeroes: bool,
    ) -> Outcome<'s, Result<(), BlockError>> {
        let Some(attached) = &self.attached else { return Outcome::Done(Err(BlockError::NotReady), slot) };
        if attached.read_only {
            return Outcome::Done(Err(BlockError::ReadOnly), slot);
        }
        let mut list = [Range::new_zeroed(); MAX_RANGES as usize];
        let ranges = match self.copy_ranges(first, zeroes, &mut list) {
            Ok(ranges) => ranges,
            Err(error) => return Outcome::Done(Err(error), slot),
        };
        self.followed += cost(ranges, zeroes) / DESCRIPTOR_BYTES;
        let (fua, changed) = (!self.write_back(), self.buffers.ranges.as_slice());
        slot.run_with(attached, |cx, attached| {
            let ranges = cx.scratch.copy_slice(ranges);
            let changed = cx.scratch.copy_slice(changed);
            wait(cx, async move {
                let result = each_range(cx, attached, ranges, zeroes, fua).await;
                ending.push(&attached.sink, changed, result);
            })
        })
    }

    /// Copies the ranges out and checks what can be checked without the volume.
    fn copy_ranges<'r>(
        &self,
        first: usize,
        zeroes: bool,
        list: &'r mut [Range; MAX_RANGES as usize],
    ) -> Result<&'r [Range], BlockError> {
        let bytes = usize::try_from(self.buffers.readable_bytes).map_err(|_| BlockError::OutOfRange)?;
        if bytes == 0 || !bytes.is_multiple_of(size_of::<Range>()) {
            return Err(BlockError::OutOfRange);
        }
        let ranges = list.get_mut(..bytes / size_of::<Range>()).ok_or(BlockError::OutOfRange)?;
        let mut room = ranges.as_mut_bytes();
        for segment in self.buffers.readable.get(first..).unwrap_or(&[]) {
            let (now, later) = room.split_at_mut_checked(segment.len()).ok_or(BlockError::OutOfRange)?;
            segment.read_at(0, now);
            room = later;
        }
        let (allowed, most) = if zeroes { (UNMAP, MAX_ZEROES) } else { (0, MAX_DISCARD) };
        if ranges.iter().any(|range| range.flags & !allowed != 0) {
            return Err(BlockError::Unsupported);
        }
        // A driver must not ask for more (virtio 1.3, 5.2.6.1). What it is told then is not said; QEMU tells this.
        if ranges.iter().any(|range| range.sectors > most) {
            return Err(BlockError::OutOfRange);
        }
        Ok(ranges)
    }
}

/// What ranges cost their disk's turn, in bytes: a volume may write zeroes, all that wait for no turn of their own, before anybody else has its turn.
fn cost(ranges: &[Range], zeroes: bool) -> u64 {
    let bytes = total(ranges);
    let written = if zeroes && bytes <= PIECE { bytes } else { 0 };
    ranges.len() as u64 * RANGE_BYTES + written
}

fn total(ranges: &[Range]) -> u64 {
    ranges.iter().map(Range::bytes).sum()
}

/// All as a whole first: a request that cannot be does nothing.
fn check(attached: &Attached, ranges: &[Range]) -> Result<(), BlockError> {
    let geometry = attached.volume.geometry();
    let is_inside = |range: &Range| {
        let place = blocks(&geometry, range.sector, range.bytes());
        place.is_some_and(|(lba, count)| geometry.byte_range(lba, count).is_some())
    };
    if ranges.iter().all(is_inside) { Ok(()) } else { Err(BlockError::OutOfRange) }
}

/// What is short waits for no turn.
async fn at_once(
    cx: TaskContext<'_>,
    attached: &Attached,
    operation: Operation,
    (sector, bytes): (u64, u64),
) -> Result<(), BlockError> {
    let (lba, count) = blocks(&attached.volume.geometry(), sector, bytes).ok_or(BlockError::OutOfRange)?;
    let scratch = cx.scratch.carve_rest();
    attached.volume.submit(cx.with_scratch(&scratch), Request { operation, lba, count, segments: &[] }).await
}

async fn each_range(
    cx: TaskContext<'_>,
    attached: &Attached,
    ranges: &[Range],
    zeroes: bool,
    fua: bool,
) -> Result<(), BlockError> {
    check(attached, ranges)?;
    let operation = |range: &Range| {
        let deallocate = range.flags & UNMAP != 0;
        if zeroes { Operation::WriteZeroes { fua, deallocate } } else { Operation::Deallocate }
    };
    if total(ranges) <= PIECE {
        for range in ranges {
            at_once(cx, attached, operation(range), (range.sector, range.bytes())).await?;
        }
        return Ok(());
    }
    let mut pace = Pace::new();
    for range in ranges {
        let operation = operation(range);
        let (mut sector, mut left) = (range.sector, range.bytes());
        while left > 0 {
            let whole = pace.bytes;
            // A piece ends at a multiple of its size: what a volume can give back as one is not cut. No overflow: all of it lies within the
            // volume.
            let bytes = left.min(whole - sector * SECTOR % whole);
            let took = move_piece(cx, attached, operation, (sector, bytes), &[]).await?;
            // What is smaller than it might be says nothing of the size.
            if bytes == whole {
                pace.adjust(took);
            }
            (sector, left) = (sector + bytes / SECTOR, left - bytes);
        }
    }
    Ok(())
}
