//! Another size, another block size, and erasure: beside the path of requests, on a thread that may wait.

use std::{sync::atomic::Ordering, thread, time::Duration};

use millrace_block::{BlockCount, BlockError, BlockSize, TaskContext, Volume as _, VolumeError};

use super::{
    control::Phase,
    entry::ZERO,
    page::{BLOCKS, OFFSET, REGION, block_start, group_start, leg_bytes},
    table::{MOST_BLOCKS, State},
    volume::Integrity,
};
use crate::{
    legs,
    locks::{Taken, until},
    service::ServiceError,
};

/// How often it is looked whether the background task has ended its step.
const LOOK: Duration = Duration::from_micros(100);

impl Integrity {
    /// Keeps the background task from its work.
    fn take_turn(&self) -> Taken<'_> {
        loop {
            if let Some(turn) = self.turn.try_take() {
                return turn;
            }
            thread::sleep(LOOK);
        }
    }

    fn failed(&self, action: &'static str, error: &ServiceError) -> VolumeError {
        let source = std::io::Error::other(error.to_string());
        VolumeError::Io { volume: self.name.clone(), action, path: self.leg.name().into(), source }
    }

    /// Erases everything and gives the volume a block size. No request is in flight.
    pub(super) fn erase_all(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let bytes = self.geometry().bytes();
        let blocks = bytes >> block_size.shift();
        let needed = leg_bytes(blocks, block_size);
        let bad = |why| VolumeError::BadBlockSize { volume: self.name.clone(), block_size: block_size.bytes(), why };
        if blocks == 0 {
            return Err(bad("the volume is smaller than a block"));
        }
        let Some(needed) = needed.filter(|_| blocks <= MOST_BLOCKS) else { return Err(bad("the volume is too large")) };
        if self.geometry().read_only {
            return Err(VolumeError::Unsupported { volume: self.name.clone(), what: "formatting while read-only" });
        }
        let _turn = self.take_turn();
        self.control().scrub = None;
        if block_size == self.block_size() {
            return self.erase_blocks().map_err(|error| self.failed("format", &error));
        }
        // Smaller blocks have more checksums.
        let has = self.leg.geometry();
        if has.bytes() < needed {
            self.leg.resize(BlockCount(needed.next_multiple_of(4096) >> has.block_size.shift()))?;
        }
        self.close_until_whole(|| {
            // The leg forgets everything, the header too.
            self.leg.format(block_size)?;
            self.forget_all();
            self.look_again();
            self.blocks.store(blocks, Ordering::Relaxed);
            self.store(Phase::InUse).map_err(|error| self.failed("format", &error))
        })
    }

    /// Does what may end half-way: then no request is answered until this, or a mount, succeeds. What was written meanwhile would be erased
    /// when the volume is opened.
    fn close_until_whole<E: std::fmt::Display>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let was_closed = self.closed.swap(true, Ordering::Relaxed);
        let generation = self.control().generation;
        let done = work();
        // A leg that refuses a block size has done nothing yet, or has begun where the header was.
        let untouched = || matches!(REGION.load(&self.leg), Ok(Some(found)) if found.generation == generation);
        if let Err(error) = &done
            && !untouched()
        {
            let (volume, leg) = (&self.name, self.leg.name());
            tracing::error!(volume, leg, %error, "a format or an erasure ended half-way: no request is answered until one succeeds");
        } else {
            self.closed.store(done.is_err() && was_closed, Ordering::Relaxed);
        }
        done
    }

    /// Makes all blocks zeroes, with a header that says so until it is done.
    pub(super) fn erase_blocks(&self) -> Result<(), ServiceError> {
        self.close_until_whole(|| self.erase_marked())
    }

    fn erase_marked(&self) -> Result<(), ServiceError> {
        self.store(Phase::Erasing)?;
        let leg = std::sync::Arc::clone(&self.leg);
        let len = leg.geometry().bytes().saturating_sub(OFFSET);
        let result = legs::block_on(move |cx| Box::pin(async move { legs::erase(cx, &*leg, OFFSET, len).await }))?;
        result.map_err(|source| ServiceError::Leg { what: "erase", leg: self.leg.name().to_owned(), source })?;
        self.forget_all();
        self.store(Phase::InUse)?;
        self.blank.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Forgets what is in memory.
    pub(super) fn forget_all(&self) {
        self.table.from(0).for_each(|(_, group)| group.forget(State::Unread));
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
        let _turn = self.take_turn();
        let before = self.blocks.load(Ordering::Relaxed);
        if blocks.0 < before {
            // Requests to what goes fail from now on.
            self.blocks.store(blocks.0, Ordering::Relaxed);
        } else {
            self.forget_beyond(before).map_err(|error| self.failed("lengthen", &error))?;
        }
        if let Err(error) = legs::resize_leg(&self.leg, needed, self.stated) {
            self.blocks.store(before, Ordering::Relaxed);
            return Err(error);
        }
        if blocks.0 > before {
            self.clear_groups(before, needed).map_err(|error| self.failed("lengthen", &error))?;
        }
        self.blocks.store(blocks.0, Ordering::Relaxed);
        Ok(())
    }

    /// Makes zeroes of what the leg has got beyond the volume's end. A device keeps what was there, and what looks like pages would count.
    fn clear_groups(&self, end: u64, leg: BlockCount) -> Result<(), ServiceError> {
        let block_size = self.block_size();
        let from =
            if end.is_multiple_of(BLOCKS) { group_start(end / BLOCKS, block_size) } else { block_start(end, block_size) };
        let len = (leg.0 << block_size.shift()).saturating_sub(from);
        self.flushes.erase(&self.leg, from, len)
    }

    /// Before the volume grows: blocks beyond its end, which it may have had before it was made shorter, are zeroes. Groups beyond
    /// the end get new pages: `clear_groups`.
    fn forget_beyond(&self, end: u64) -> Result<(), ServiceError> {
        self.block_on("lengthen", move |volume, cx| {
            Box::pin(async move {
                if !end.is_multiple_of(BLOCKS) {
                    volume.cut_group(cx, end / BLOCKS, end % BLOCKS).await?;
                }
                for (_, group) in volume.table.from(end.div_ceil(BLOCKS)) {
                    let _claim = until(cx, || group.try_claim()).await;
                    until(cx, || (!group.is_locked(0, BLOCKS)).then_some(())).await;
                    group.forget(State::Unread);
                }
                Ok(())
            })
        })
    }

    /// The blocks of a group from `at` on are zeroes.
    async fn cut_group(&self, cx: TaskContext<'_>, number: u64, at: u64) -> Result<(), BlockError> {
        let group = self.open(cx, number).await?;
        for at in at..BLOCKS {
            until(cx, || (group.lock(at, 1) == 1).then_some(())).await;
            group.set(at, ZERO);
        }
        Ok(())
    }
}
