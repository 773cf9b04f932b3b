//! Making dirty data durable, and clean lines durably clean.
//!
//! ```text
//!   turn ─► pages that changed: copied ─► slow leg flushed, fast leg flushed ─► pages written ─► fast leg flushed ─► stored = copied
//! ```
//!
//! A block that the copy calls dirty was written to the fast leg before the copy was made, so the first flush makes it durable before
//! its page is written. A block that it does not call dirty any more was written to the slow leg before, so that flush covers it, too. From
//! the copy until the end such blocks count as stored, so that their line stays.

use std::sync::atomic::Ordering;

use millrace_block::{BlockCount, BlockError, BlockSize, Lba, Operation, Request, TaskContext, Volume};
use millrace_memory::{BUFFER_SIZE, Segment};

use super::{
    Cache, Core,
    disk::{TABLE, dirty_at, encode_page},
    table::{Slot, clear_bits, set_bits},
    unflushed::WRITTEN,
};
use crate::locks::until;

/// Pages that are stored together.
const TOGETHER: usize = 32;
/// Largest page.
const LARGEST_PAGE: usize = 4096;

/// Pages under way.
struct Batch {
    numbers: [u32; TOGETHER],
    used: usize,
    /// What a page has, from its copy until it is stored.
    block_size: BlockSize,
}

impl Batch {
    /// Where a page of it is copied to.
    fn place(&self, staging: Segment, at: usize) -> Segment {
        let bytes = self.block_size.bytes() as usize;
        staging.part(at * bytes, bytes).expect("a batch fits a buffer")
    }

    fn pages(&self) -> &[u32] {
        self.numbers.get(..self.used).unwrap_or(&[])
    }
}

impl Cache {
    /// A guest's flush.
    pub(super) async fn flush(&self, cx: TaskContext<'_>, _: Request<'_>) -> Result<(), BlockError> {
        let lost = self.failures.losses.count();
        let committed = self.commit(cx).await;
        committed.and(self.failures.losses.tell(lost))
    }

    /// The end of a write that changed what the table on the fast leg should say: waits until it says so, if that was asked for.
    pub(super) async fn acknowledge(&self, cx: TaskContext<'_>, changed: bool, fua: bool) -> Result<(), BlockError> {
        if !changed || !(fua || (self.plan.ack_durable && !self.is_broken())) {
            return Ok(());
        }
        let committed = self.commit(cx).await;
        // Without forced unit access the data need only be there. A fast leg that failed is told of by the status and by the next flush.
        if fua || !self.is_broken() { committed } else { Ok(()) }
    }

    /// Makes everything durable that was written before. Requests that come together share one commit.
    pub(super) async fn commit(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let core = self.core()?;
        self.commit_of(cx, core).await
    }

    /// [`Self::commit`] of a cache that takes no requests any more, too.
    pub(super) async fn commit_of(&self, cx: TaskContext<'_>, core: &Core) -> Result<(), BlockError> {
        // A commit that starts from now on has what was written so far.
        let ticket = self.commits.started.load(Ordering::SeqCst);
        let done = || self.commits.finished.load(Ordering::SeqCst) > ticket;
        // Before the turn: who has that must not wait for a buffer.
        let buffer = cx.buffers.take().await;
        let turn = until(cx, || if done() { Some(None) } else { self.commits.turn.try_take().map(Some) }).await;
        if turn.is_none() || done() {
            return Ok(());
        }
        let number = self.commits.started.fetch_add(1, Ordering::SeqCst) + 1;
        // Two levels down: who waits for the turn has a buffer of this level, and of the next if it is a copy's.
        self.commit_pages(cx.deeper().deeper(), core, buffer.segment(BUFFER_SIZE), number).await?;
        self.commits.finished.store(number, Ordering::SeqCst);
        Ok(())
    }

    async fn commit_pages(&self, cx: TaskContext<'_>, core: &Core, staging: Segment, number: u64) -> Result<(), BlockError> {
        let mark = self.mark()?;
        let block_size = self.shape().block_size;
        let most = (BUFFER_SIZE / block_size.bytes() as usize).min(TOGETHER);
        let mut from = 0;
        loop {
            let mut batch = Batch { numbers: [0; TOGETHER], used: 0, block_size };
            while batch.used < most
                && let Some(page) = core.table.take_needed(from)
            {
                from = page + 1;
                // Nothing on a leg that failed is called dirty by a page of clean slots: it need not be reached.
                if self.is_broken() && self.is_clean(core, page) {
                    continue;
                }
                batch.numbers[batch.used] = page;
                batch.used += 1;
            }
            for (at, number) in batch.pages().iter().enumerate() {
                Self::copy_page(core, mark, *number, batch.place(staging, at));
            }
            let stored = self.store_batch(cx, core, &batch, staging).await;
            if stored.is_err() {
                // They are as they were, or not: the next commit stores them.
                batch.pages().iter().for_each(|page| core.table.need(*page));
                return stored;
            }
            Self::settle(core, &batch, staging, number);
            if batch.used < most {
                return Ok(());
            }
        }
    }

    /// What its pages carry; an error when no superblock names them.
    pub(super) fn mark(&self) -> Result<u64, BlockError> {
        self.superblock().as_ref().map(|(superblock, _)| superblock.mark()).ok_or(BlockError::NotReady)
    }

    /// Copies what the pages are to say.
    pub(super) fn copy_page(core: &Core, mark: u64, number: u32, to: Segment) {
        let mut page = [0; LARGEST_PAGE];
        let page = &mut page[..to.len()];
        let last = core.table.len();
        encode_page(page, core.plan.part(to.len()), number, mark, |slot| {
            if slot < last { core.table.snapshot(slot) } else { super::table::Entry::default() }
        });
        to.write_at(0, page);
    }

    /// Whether no slot of a page has dirty or stored blocks.
    fn is_clean(&self, core: &Core, page: u32) -> bool {
        let count = core.plan.per_page(self.shape().block_size);
        let slots = page * count..((page + 1) * count).min(core.table.len());
        slots.map(|slot| core.table.slot(slot)).all(Slot::is_clean)
    }

    async fn store_batch(
        &self,
        cx: TaskContext<'_>,
        core: &Core,
        batch: &Batch,
        staging: Segment,
    ) -> Result<(), BlockError> {
        self.flush_slow(cx, core).await?;
        if batch.used == 0 && self.is_broken() && self.dirty_lines() == 0 {
            // Nothing that counts is on the leg that failed.
            return Ok(());
        }
        let flushed = if self.fast_unflushed.take() == 0 { Ok(()) } else { self.flush_leg(cx, &*self.fast).await };
        if let Err(error) = flushed {
            self.fast_flush_failed(error);
            return flushed;
        }
        // One or two are made durable one by one.
        let fua = batch.used <= 2;
        for (at, number) in batch.pages().iter().enumerate() {
            let lba = Lba((TABLE >> batch.block_size.shift()) + u64::from(*number));
            let segments = [batch.place(staging, at)];
            let write = Request { operation: Operation::Write { fua }, lba, count: BlockCount(1), segments: &segments };
            let written = self.fast.submit(cx.with_scratch(&cx.scratch.carve_rest()), write).await;
            if let Err(error) = written {
                self.fast_failed("a write to the table on the fast leg", error);
                return written;
            }
        }
        if fua {
            return Ok(());
        }
        let flushed = self.flush_leg(cx, &*self.fast).await;
        if let Err(error) = flushed {
            self.fast_flush_failed(error);
        }
        flushed
    }

    /// Dirty blocks that it had not made durable may be gone, and its next flush would not tell.
    fn fast_flush_failed(&self, error: BlockError) {
        self.fast_unflushed.add(WRITTEN);
        if self.dirty_lines() > 0 {
            self.failures.losses.add();
        }
        self.fast_failed("a flush of the fast leg", error);
    }

    /// The pages are durable.
    fn settle(core: &Core, batch: &Batch, staging: Segment, number: u64) {
        let block_size = batch.block_size;
        let (bytes, count) = (block_size.bytes() as usize, core.plan.per_page(block_size));
        let part = core.plan.part(bytes);
        for (at, page_number) in batch.pages().iter().enumerate() {
            let mut page = [0; LARGEST_PAGE];
            let page = &mut page[..bytes];
            batch.place(staging, at).read_at(0, page);
            for place in 0..count {
                let slot = page_number * count + place;
                if slot < core.table.len() {
                    let (slot, dirty) = (core.table.slot(slot), dirty_at(page, part, place));
                    slot.durable.store(dirty, Ordering::SeqCst);
                    // Before its commit's number: see `written_back`. And that once more, for who came in between.
                    let gone = slot.stored.load(Ordering::SeqCst) & !dirty;
                    let has_come = || slot.moved.load(Ordering::SeqCst) >= number;
                    if !has_come() {
                        clear_bits(&slot.stored, gone);
                        if has_come() {
                            set_bits(&slot.stored, gone);
                        }
                    }
                }
            }
        }
    }

    pub(super) async fn flush_leg(&self, cx: TaskContext<'_>, leg: &dyn Volume) -> Result<(), BlockError> {
        let request = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };
        leg.submit(cx.with_scratch(&cx.scratch.carve_rest()), request).await
    }
}
