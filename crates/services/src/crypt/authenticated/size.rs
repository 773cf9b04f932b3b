//! Another size, another block size, and erasure: beside the path of requests, on a thread that may wait.

use std::{sync::atomic::Ordering, thread, time::Duration};

use millrace_block::{BlockCount, BlockError, BlockSize, TaskContext, Volume as _, VolumeError};

use super::{
    layout::{FAN, LEVELS, MOST_BLOCKS, OFFSET, block_start, blocks_under, leg_bytes},
    page::{Place, Record},
    volume::Authenticated,
};
use crate::{
    legs,
    locks::{Taken, until},
    service::ServiceError,
};

/// How often it is looked whether a save has ended.
const LOOK: Duration = Duration::from_micros(100);

impl Authenticated {
    /// Keeps others from saving.
    pub(super) fn take_saving(&self) -> Taken<'_> {
        loop {
            if let Some(turn) = self.saving.try_take() {
                return turn;
            }
            thread::sleep(LOOK);
        }
    }

    fn failed(&self, action: &'static str, error: &ServiceError) -> VolumeError {
        let source = std::io::Error::other(error.to_string());
        VolumeError::Io { volume: self.name.clone(), action, path: self.leg.name().into(), source }
    }

    /// Erases all data, first of all by forgetting the key. No request is in flight.
    pub(super) fn erase_all(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let geometry = self.geometry();
        if geometry.read_only {
            return Err(VolumeError::Unsupported { volume: self.name.clone(), what: "formatting while read-only" });
        }
        let blocks = geometry.bytes() >> block_size.shift();
        let bad = |why| VolumeError::BadBlockSize { volume: self.name.clone(), block_size: block_size.bytes(), why };
        if blocks == 0 {
            return Err(bad("the volume is smaller than a block"));
        }
        let needed = leg_bytes(blocks, block_size).ok_or_else(|| bad("the volume is too large"))?;
        let _pause = self.pause_rekeying();
        let _saving = self.take_saving();
        let failed = |error: ServiceError| self.failed("format", &error);
        let forget =
            |block_size, erasing| self.forget_key(block_size, erasing).inspect_err(|_| self.keep_header()).map_err(failed);
        if block_size == geometry.block_size {
            forget(block_size, true)?;
            return self.complete_erasure().map_err(failed);
        }
        // Smaller blocks have more tags.
        let has = self.leg.geometry();
        if has.bytes() < needed {
            self.leg.resize(BlockCount(needed.next_multiple_of(4096) >> has.block_size.shift()))?;
        }
        // The leg loses the key at once, and memory when the leg has taken the other blocks: it may refuse them.
        self.store_new_key(geometry.block_size).inspect_err(|_| self.keep_header()).map_err(failed)?;
        // It forgets everything, the header too.
        self.leg.format(block_size).inspect_err(|_| self.keep_if_untouched())?;
        self.look_again();
        self.blocks.store(blocks, Ordering::Relaxed);
        forget(block_size, false)
    }

    /// Gives back what a format has made nobody's. Until the header says that this is done, a block that was never written is known by its
    /// record alone: after a crash in its first write, what is there may be of before.
    pub(super) fn complete_erasure(&self) -> Result<(), ServiceError> {
        self.give_back()?;
        self.end_erasure()
    }

    /// Makes the blocks zeroes on the leg: nobody could read them any more.
    pub(super) fn give_back(&self) -> Result<(), ServiceError> {
        self.erase_leg(OFFSET, self.leg.geometry().bytes().saturating_sub(OFFSET))
    }

    fn erase_leg(&self, from: u64, len: u64) -> Result<(), ServiceError> {
        self.flushes.erase(&self.leg, from, len)
    }

    pub(super) fn resize_to(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let block_size = self.block_size();
        let size = blocks.0.saturating_mul(u64::from(block_size.bytes()));
        let bad = |why| VolumeError::BadSize { volume: self.name.clone(), size, why };
        if blocks.0 == 0 {
            return Err(bad("a volume has at least one block"));
        }
        let needed = leg_bytes(blocks.0, block_size).filter(|_| blocks.0 <= MOST_BLOCKS);
        let needed = BlockCount(needed.ok_or_else(|| bad("it is too large"))? >> block_size.shift());
        let before = self.blocks.load(Ordering::Relaxed);
        if blocks.0 >= before {
            self.forget_beyond(before).map_err(|error| self.failed("lengthen", &error))?;
            legs::resize_leg(&self.leg, needed, self.settled.stated)?;
            let (from, end) = (block_start(before, block_size), needed.0 << block_size.shift());
            self.erase_leg(from, end.saturating_sub(from)).map_err(|error| self.failed("lengthen", &error))?;
            self.blocks.store(blocks.0, Ordering::Relaxed);
            return Ok(());
        }
        // A save leaves out what lies beyond the end, and re-keying ends there: neither takes it for what it is before that is sure.
        let _pause = self.pause_rekeying();
        let _saving = self.take_saving();
        // Requests to what goes fail from now on.
        self.blocks.store(blocks.0, Ordering::Relaxed);
        let resized = legs::resize_leg(&self.leg, needed, self.settled.stated);
        resized.inspect_err(|_| self.blocks.store(before, Ordering::Relaxed))
    }

    /// Before the volume grows: blocks beyond its end, which it may have had before it was made shorter, are zeroes, durably.
    fn forget_beyond(&self, end: u64) -> Result<(), ServiceError> {
        let _pause = self.pause_rekeying();
        self.block_on("lengthen", move |volume, cx| {
            Box::pin(async move {
                let _saving = volume.saving.take(cx).await;
                volume.cut(cx, end).await?;
                volume.save_now(cx).await
            })
        })
    }

    async fn cut(&self, cx: TaskContext<'_>, end: u64) -> Result<(), BlockError> {
        if !end.is_multiple_of(FAN) {
            let node = self.ready(cx, end).await?;
            let beyond = (end % FAN) as usize..node.len();
            // Writers from before the volume was made shorter.
            until(cx, || node.try_lock(beyond.clone()).then_some(())).await;
            beyond.for_each(|at| node.set(at, Record { tag: Record::FRESH.tag, ..node.record(at) }));
            node.touch();
        }
        for level in 0..LEVELS {
            let first = end.div_ceil(blocks_under(level));
            for (_, node) in self.table.all(level).filter(|(place, _)| place.number >= first) {
                until(cx, || node.try_lock(0..node.len()).then_some(())).await;
                node.forget();
            }
            // What the page above says of these.
            let above = match level + 1 {
                LEVELS => &self.table.root,
                _ if first.is_multiple_of(FAN) => continue,
                level => self.ready_page(cx, Place { level, number: first / FAN }).await?,
            };
            let from = if level + 1 == LEVELS { first } else { first % FAN };
            for at in from as usize..above.len() {
                if above.record(at) != Record::FRESH {
                    above.set(at, Record::FRESH);
                    above.touch();
                }
            }
        }
        // Those of writers from before, too: they have ended.
        self.doubts().retain(|lba, _| *lba < end);
        self.given_up().retain(|lba| *lba < end);
        Ok(())
    }
}
