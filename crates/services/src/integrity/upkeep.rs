//! The groups' pages: read when a group is needed, opened before its first write, closed when it is idle.
//!
//! Who waits here for a claim, for a writer or for the turn to flush has no buffer meanwhile: those who are waited for may need
//! one, and these may be the last.

use std::sync::atomic::Ordering;

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, TaskContext, Volume, yield_now};
use millrace_memory::{BUFFER_SIZE, BounceBuffer, Segment};

use super::{
    entry::{self, LOST, UNKNOWN},
    page::{BLOCKS, Found, PAGE, PAGES, Page, block_start, choose, group_start},
    table::{Claim, Group, State},
    volume::{Integrity, Piece},
};
use crate::{background::Stop, locks::until};

/// Groups that are closed with one flush.
const CLOSED_TOGETHER: usize = 64;
/// Groups that are looked at before the shard does something else.
const LOOKED_AT: usize = 1024;

/// What the work on pages is done with.
#[derive(Clone, Copy)]
pub(super) struct Means<'a> {
    /// For the leg: of the level below the buffer's.
    pub(super) cx: TaskContext<'a>,
    pub(super) buffer: &'a BounceBuffer,
}

impl Integrity {
    fn uuid(&self) -> [u8; 16] {
        self.control().uuid
    }

    /// Blocks that a group has.
    pub(super) fn blocks_of(&self, number: u64) -> u64 {
        self.blocks.load(Ordering::Relaxed).saturating_sub(number * BLOCKS).min(BLOCKS)
    }

    /// A group's claim, with a buffer for the work; `None` when somebody else had it, and has given it back since.
    async fn claim<'g>(&self, cx: TaskContext<'_>, group: &'g Group) -> Option<(BounceBuffer, Claim<'g>)> {
        if group.is_claimed() {
            until(cx, || (!group.is_claimed()).then_some(())).await;
            return None;
        }
        let buffer = cx.buffers.take().await;
        group.try_claim().map(|claim| (buffer, claim))
    }

    /// A group whose page was read.
    pub(super) async fn ready(&self, cx: TaskContext<'_>, number: u64) -> Result<&Group, BlockError> {
        let group = self.table.need(number);
        while group.state() == State::Unread {
            if let Some((buffer, claim)) = self.claim(cx, group).await
                && group.state() == State::Unread
            {
                self.load(Means { cx: cx.deeper(), buffer: &buffer }, number, group, &claim).await?;
            }
        }
        Ok(group)
    }

    /// What a group's pages on the leg say.
    pub(super) async fn find(&self, means: Means<'_>, number: u64) -> Result<Found, BlockError> {
        let start = group_start(number, self.block_size());
        let bytes = match self.read_by(means, start, PAGES as usize).await {
            // One of them may be there.
            Err(BlockError::ReadFault { .. }) => {
                let first = self.read_by(means, start, PAGE).await;
                let second = self.read_by(means, start + PAGE as u64, PAGE).await;
                match (first, second) {
                    (Ok(first), Err(BlockError::ReadFault { .. })) => [first, vec![0xff; PAGE]].concat(),
                    (Err(BlockError::ReadFault { .. }), Ok(second)) => [vec![0xff; PAGE], second].concat(),
                    (first, second) => [first?, second?].concat(),
                }
            }
            bytes => bytes?,
        };
        Ok(choose(&bytes, &self.uuid(), number))
    }

    async fn load(&self, means: Means<'_>, number: u64, group: &Group, _: &Claim<'_>) -> Result<(), BlockError> {
        let (first, count) = (number * BLOCKS, self.blocks_of(number));
        match self.find(means, number).await? {
            Found::Fresh => group.set_state(State::Closed),
            Found::Lost => {
                tracing::error!(
                    volume = self.name,
                    leg = self.leg.name(),
                    first,
                    count,
                    "the checksums of these blocks are damaged in both places: they cannot be read before they are written"
                );
                (0..BLOCKS).for_each(|at| group.set(at, LOST));
                group.set_state(State::Closed);
            }
            Found::Page { page, alone } => {
                for (at, entry) in (0..BLOCKS).zip(&page.entries) {
                    group.set(at, *entry);
                }
                group.sequence.store(page.sequence, Ordering::Relaxed);
                if alone {
                    let (volume, leg) = (&self.name, self.leg.name());
                    tracing::warn!(volume, leg, first, count, "one copy of these blocks' checksums is damaged");
                }
                if alone || page.open {
                    self.recover(means, number, group).await?;
                }
                // A damaged page might read otherwise the next time: only one that says so counts as open.
                group.set_state(if page.open && !alone { State::Open } else { State::Closed });
            }
        }
        Ok(())
    }

    /// The group was in use when the process died: what does not match was written and not recorded.
    async fn recover(&self, means: Means<'_>, number: u64, group: &Group) -> Result<(), BlockError> {
        let most = (BUFFER_SIZE >> self.block_size().shift()) as u64;
        let blocks = self.blocks_of(number);
        let (mut at, mut adopted) = (0, 0);
        while at < blocks {
            let piece = Piece { lba: number * BLOCKS + at, count: (blocks - at).min(most) };
            adopted += match self.adopt(means, group, piece).await {
                Err(BlockError::ReadFault { .. }) => self.adopt_each(means, group, piece).await?,
                adopted => adopted?,
            };
            at += piece.count;
            yield_now().await;
        }
        group.touched.store(true, Ordering::Relaxed);
        if adopted > 0 && self.adopted.fetch_add(adopted, Ordering::Relaxed) == 0 {
            let volume = &self.name;
            tracing::warn!(
                volume,
                "it was not closed in an orderly way: blocks that were being written are taken as they are (volume show counts them)"
            );
        }
        Ok(())
    }

    /// [`Self::adopt`] block by block, where not all of them can be read.
    async fn adopt_each(&self, means: Means<'_>, group: &Group, piece: Piece) -> Result<u64, BlockError> {
        let (mut adopted, mut unread) = (0, 0);
        for lba in piece.lba..piece.lba + piece.count {
            match self.adopt(means, group, Piece { lba, count: 1 }).await {
                Ok(count) => adopted += count,
                Err(BlockError::ReadFault { .. }) => {
                    unread += 1;
                    // Whoever reads it now is told. The leg may have it later on, as it was or as it was being written.
                    if group.entry(lba % BLOCKS) != LOST {
                        group.set(lba % BLOCKS, UNKNOWN);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if unread > 0 && self.unread.fetch_add(unread, Ordering::Relaxed) == 0 {
            tracing::warn!(
                volume = self.name,
                leg = self.leg.name(),
                first = piece.lba,
                "it was not closed in an orderly way, and its leg fails to read blocks: they are not checked until they are \
                 written again (volume show counts them)"
            );
        }
        Ok(adopted)
    }

    /// Takes blocks as they are; returns how many did not match.
    async fn adopt(&self, means: Means<'_>, group: &Group, piece: Piece) -> Result<u64, BlockError> {
        let data = self.read_blocks(means, piece.lba, piece.count).await?;
        let mut adopted = 0;
        for (lba, data) in (piece.lba..).zip(data.chunks(self.block_size().bytes() as usize)) {
            let known = group.entry(lba % BLOCKS);
            if known != LOST && !entry::matches(known, lba, data) {
                group.set(lba % BLOCKS, entry::next(known, lba, data));
                adopted += 1;
            }
        }
        Ok(adopted)
    }

    /// Blocks of one group, unchecked.
    pub(super) async fn read_blocks(&self, means: Means<'_>, lba: u64, count: u64) -> Result<Vec<u8>, BlockError> {
        let block_size = self.block_size();
        self.read_by(means, block_start(lba, block_size), (count << block_size.shift()) as usize).await
    }

    async fn read_by(&self, means: Means<'_>, start: u64, len: usize) -> Result<Vec<u8>, BlockError> {
        let segments = [means.buffer.segment(len)];
        self.move_by(means, Operation::Read, start, &segments).await?;
        let mut bytes = vec![0; len];
        segments[0].read_at(0, &mut bytes);
        Ok(bytes)
    }

    async fn move_by(
        &self,
        means: Means<'_>,
        operation: Operation,
        start: u64,
        data: &[Segment; 1],
    ) -> Result<(), BlockError> {
        let shift = self.block_size().shift();
        let (lba, count) = (Lba(start >> shift), BlockCount((data[0].len() >> shift) as u64));
        // One of several: what it leaves in the scratch goes with its arena.
        let arena = means.cx.scratch.carve_rest();
        self.leg.submit(means.cx.with_scratch(&arena), Request { operation, lba, count, segments: data }).await
    }

    /// Writes a group's next page. Once it is durable, and not before, it is the one that counts: until then the next one is written
    /// in the same place, so that the other page stays whole.
    async fn write_page(&self, means: Means<'_>, number: u64, group: &Group, open: bool) -> Result<(), BlockError> {
        let sequence = group.sequence.load(Ordering::Relaxed) + 1;
        let page = Page { sequence, open, entries: group.snapshot() };
        let start = group_start(number, self.block_size()) + (sequence % 2) * PAGE as u64;
        let segments = [means.buffer.segment(PAGE)];
        segments[0].write_at(0, &page.encode(&self.uuid(), number));
        self.move_by(means, Operation::Write { fua: false }, start, &segments).await
    }

    /// A group that may be written: its page says so, durably.
    pub(super) async fn open(&self, cx: TaskContext<'_>, number: u64) -> Result<&Group, BlockError> {
        loop {
            let group = self.ready(cx, number).await?;
            if group.state() == State::Open {
                return Ok(group);
            }
            let Some((buffer, _claim)) = self.claim(cx, group).await else { continue };
            if group.state() == State::Closed {
                self.blank.store(false, Ordering::Relaxed);
                let failed = self.flushes.failed();
                self.write_page(Means { cx: cx.deeper(), buffer: &buffer }, number, group, true).await?;
                drop(buffer);
                self.flushes.flush(cx.deeper(), &*self.leg, failed).await?;
                group.sequence.fetch_add(1, Ordering::Relaxed);
                group.touched.store(true, Ordering::Relaxed);
                group.set_state(State::Open);
            }
        }
    }

    /// Closes groups that were not written for a while, or all of them. `means` are a background task's own, or nobody else is there.
    pub(super) async fn close_idle(&self, means: Means<'_>, stop: &Stop, all: bool) -> Result<(), BlockError> {
        let end = self.blocks.load(Ordering::Relaxed).div_ceil(BLOCKS);
        let mut from = 0;
        while from < end && (all || !stop.is_set()) {
            let mut idle: Vec<(u64, &Group, Claim<'_>)> = Vec::new();
            let mut looked_at = 0;
            while looked_at < LOOKED_AT && idle.len() < CLOSED_TOGETHER {
                let next = self.table.next(from..end);
                from = next.as_ref().map_or(end, |(number, _)| number + 1);
                looked_at += 1;
                let Some((number, group)) = next else { break };
                if group.state() != State::Open || (group.touched.swap(false, Ordering::Relaxed) && !all) {
                    continue;
                }
                if let Some(claim) = group.try_claim() {
                    group.set_state(State::Closing);
                    idle.push((number, group, claim));
                }
            }
            if !idle.is_empty() {
                self.close(means, &idle).await?;
            }
            yield_now().await;
        }
        Ok(())
    }

    /// Nothing new is written to these groups: waits for what goes on, makes it durable, and records it.
    async fn close(&self, means: Means<'_>, idle: &[(u64, &Group, Claim<'_>)]) -> Result<(), BlockError> {
        for (_, group, _) in idle {
            until(means.cx, || (!group.is_locked(0, BLOCKS)).then_some(())).await;
        }
        if let Err(error) = self.flushes.flush_alone(means.cx, &*self.leg).await {
            for (_, group, _) in idle {
                group.set_state(State::Open);
            }
            return Err(error);
        }
        let failed = self.flushes.failed();
        let (mut result, mut written) = (Ok(()), 0);
        for (number, group, _) in idle {
            if result.is_ok() {
                result = self.write_page(means, *number, group, false).await;
                written += 1;
            }
        }
        if result.is_ok() {
            result = self.flushes.flush_alone(means.cx, &*self.leg).await.and_then(|()| self.flushes.check(failed));
        }
        for (at, (_, group, _)) in idle.iter().enumerate() {
            if result.is_ok() {
                group.sequence.fetch_add(1, Ordering::Relaxed);
            }
            // A page that could not be written, or made durable, may be there all the same: the next write must have it say "open"
            // again.
            group.set_state(if at < written { State::Closed } else { State::Open });
        }
        result
    }
}
