//! Another size, another block size, and erasure: beside the path of requests, on a thread that may wait.

use std::sync::{Arc, atomic::Ordering};

use millrace_block::{BlockCount, BlockError, BlockSize, TaskContext, Volume as _, VolumeError};

use super::{
    control::Phase,
    load::Unread,
    page::{BLOCKS, Candidate, NO_TAG, OFFSET, REGION, block_start, checksum_of, group_start, leg_bytes},
    table::MOST_BLOCKS,
    volume::{Means, Tagged},
};
use crate::{legs, locks::until, pieces::Map as _, service::ServiceError};

impl Tagged {
    pub(super) fn failed(&self, action: &'static str, error: &ServiceError) -> VolumeError {
        let source = std::io::Error::other(error.to_string());
        VolumeError::Io { volume: self.name().to_owned(), action, path: self.leg().name().into(), source }
    }

    /// Erases everything and gives the volume a block size. No request is in flight.
    pub(super) fn erase_all(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let blocks = self.geometry().bytes() >> block_size.shift();
        let needed = leg_bytes(blocks, block_size);
        let volume = || self.name().to_owned();
        let bad = |why| VolumeError::BadBlockSize { volume: volume(), block_size: block_size.bytes(), why };
        if blocks == 0 {
            return Err(bad("the volume is smaller than a block"));
        }
        let Some(needed) = needed.filter(|_| blocks <= MOST_BLOCKS) else { return Err(bad("the volume is too large")) };
        if self.geometry().read_only {
            return Err(VolumeError::Unsupported { volume: volume(), what: "formatting while read-only" });
        }
        if block_size == self.block_size() {
            return self.erase_blocks().map_err(|error| self.failed("format", &error));
        }
        // Smaller blocks have more metadata.
        let has = self.leg().geometry();
        if has.bytes() < needed {
            self.leg().resize(BlockCount(needed.next_multiple_of(4096) >> has.block_size.shift()))?;
        }
        self.close_until_whole(|| {
            // The leg forgets everything, the header too.
            self.leg().format(block_size)?;
            self.forget_all();
            self.mapped.look_anew(block_size);
            self.mapped.map().set_blocks(blocks);
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
        let untouched = || matches!(REGION.load(self.leg()), Ok(Some(found)) if found.generation == generation);
        if let Err(error) = &done
            && !untouched()
        {
            let (volume, leg) = (self.name(), self.leg().name());
            tracing::error!(volume, leg, %error, "a format or an erasure ended half-way: no request is answered until one succeeds");
        } else {
            self.closed.store(done.is_err() && was_closed, Ordering::Relaxed);
        }
        done
    }

    /// Makes all blocks zeroes without metadata, with a header that says so until it is done.
    pub(super) fn erase_blocks(&self) -> Result<(), ServiceError> {
        self.close_until_whole(|| self.erase_marked())
    }

    fn erase_marked(&self) -> Result<(), ServiceError> {
        self.store(Phase::Erasing)?;
        let leg = Arc::clone(self.leg());
        let len = leg.geometry().bytes().saturating_sub(OFFSET);
        let result = legs::block_on(move |cx| Box::pin(async move { legs::erase(cx, &*leg, OFFSET, len).await }))?;
        result.map_err(|source| ServiceError::Leg { what: "erase", leg: self.leg().name().to_owned(), source })?;
        self.forget_all();
        self.store(Phase::InUse)?;
        self.blank.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Forgets what is in memory.
    pub(super) fn forget_all(&self) {
        self.table.all().for_each(|(_, group)| group.forget());
    }

    pub(super) fn resize_to(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let block_size = self.block_size();
        let size = blocks.0.saturating_mul(u64::from(block_size.bytes()));
        let bad = |why| VolumeError::BadSize { volume: self.name().to_owned(), size, why };
        if blocks.0 == 0 {
            return Err(bad("a volume has at least one block"));
        }
        let needed = leg_bytes(blocks.0, block_size).filter(|_| blocks.0 <= MOST_BLOCKS);
        let needed = BlockCount(needed.ok_or_else(|| bad("it is too large"))? >> block_size.shift());
        let before = self.blocks();
        if blocks.0 < before {
            // Requests to what goes fail from now on.
            self.mapped.map().set_blocks(blocks.0);
        } else {
            self.forget_beyond(before).map_err(|error| self.failed("lengthen", &error))?;
        }
        if let Err(error) = legs::resize_leg(self.leg(), needed, self.stated) {
            self.mapped.map().set_blocks(before);
            return Err(error);
        }
        if blocks.0 > before {
            self.clear_groups(before, needed).map_err(|error| self.failed("lengthen", &error))?;
        }
        self.mapped.map().set_blocks(blocks.0);
        Ok(())
    }

    /// Makes zeroes of what the leg has got beyond the volume's end. A device keeps what was there, and what looks like pages would count.
    fn clear_groups(&self, end: u64, leg: BlockCount) -> Result<(), ServiceError> {
        let block_size = self.block_size();
        let from =
            if end.is_multiple_of(BLOCKS) { group_start(end / BLOCKS, block_size) } else { block_start(end, block_size) };
        let len = (leg.0 << block_size.shift()).saturating_sub(from);
        self.flushes.erase(self.leg(), from, len)
    }

    /// Before the volume grows: blocks beyond its end, which it may have had before it was made shorter, are zeroes without
    /// metadata. Groups beyond the end get new pages: `clear_groups`.
    fn forget_beyond(&self, end: u64) -> Result<(), ServiceError> {
        self.block_on("lengthen", move |volume, cx| {
            Box::pin(async move {
                if !end.is_multiple_of(BLOCKS) {
                    volume.cut_group(cx, end / BLOCKS, end % BLOCKS).await?;
                }
                for (_, group) in volume.table.all().filter(|(number, _)| *number >= end.div_ceil(BLOCKS)) {
                    let _claim = until(cx, || group.try_claim()).await;
                    until(cx, || group.version(0, BLOCKS)).await;
                    group.forget();
                }
                Ok(())
            })
        })
    }

    /// The blocks of a group from `at` on have no metadata.
    async fn cut_group(&self, cx: TaskContext<'_>, number: u64, at: u64) -> Result<(), BlockError> {
        let group = self.ready(cx, number, Unread::Fails).await?;
        until(cx, || group.try_lock(at, BLOCKS - at).then_some(())).await;
        let buffer = cx.buffers.take().await;
        let zeroes = vec![0; self.block_size().bytes() as usize];
        // Also where the table knows of none: pages that were read while the volume was shorter may say more.
        for at in at..BLOCKS {
            group.trust(at);
            group.offer(at, Candidate::Value { tag: NO_TAG, checksum: checksum_of(&zeroes) });
        }
        let result = self.commit(Means { cx: cx.deeper(), buffer: &buffer }, number, group).await;
        group.unlock(at, BLOCKS - at);
        result
    }
}
