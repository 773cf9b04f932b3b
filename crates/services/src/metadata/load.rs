//! The groups' pages: read when a group is needed, written before its blocks are, and once more when the volume is closed.

use std::sync::atomic::Ordering;

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, TaskContext, Volume as _, yield_now};

use super::{
    page::{BLOCKS, Candidate, Entry, Found, PAGE, PAGES, Page, choose, encode, group_start},
    table::{Claim, Group},
    volume::{Means, Piece, Tagged},
};
use crate::locks::until;

/// Groups that are closed with one flush, and at all while a guest waits.
const CLOSED_TOGETHER: usize = 256;

/// What to do where a group's metadata, if there are any, are in a page that cannot be read, which may be for a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// Fail, and try again the next time.
    Fails,
    /// Go on without them: blocks are about to be written, and have to have their page.
    IsLost,
}

impl Tagged {
    pub(super) fn uuid(&self) -> [u8; 16] {
        self.control().uuid
    }

    /// Blocks that a group has.
    fn blocks_of(&self, number: u64) -> u64 {
        self.blocks().saturating_sub(number * BLOCKS).min(BLOCKS)
    }

    /// A group whose pages were read.
    pub(super) async fn ready(&self, cx: TaskContext<'_>, number: u64, unread: Unread) -> Result<&Group, BlockError> {
        let group = self.table.need(number);
        while !group.is_ready() {
            if group.is_claimed() {
                until(cx, || (!group.is_claimed()).then_some(())).await;
                continue;
            }
            let buffer = cx.buffers.take().await;
            if let Some(claim) = group.try_claim()
                && !group.is_ready()
            {
                self.load(Means { cx: cx.deeper(), buffer: &buffer }, number, (group, &claim), unread).await?;
            }
        }
        Ok(group)
    }

    async fn read_pages(&self, means: Means<'_>, number: u64, from: usize, len: usize) -> Result<Vec<u8>, BlockError> {
        let shift = self.block_size().shift();
        let segments = [means.buffer.segment(len)];
        let lba = Lba((group_start(number, self.block_size()) + from as u64) >> shift);
        let request =
            Request { operation: Operation::Read, lba, count: BlockCount(len as u64 >> shift), segments: &segments };
        // One of several: what it leaves in the scratch goes with its arena.
        let arena = means.cx.scratch.carve_rest();
        self.leg().submit(means.cx.with_scratch(&arena), request).await?;
        let mut bytes = vec![0; len];
        segments[0].read_at(0, &mut bytes);
        Ok(bytes)
    }

    /// What a group's pages on the leg say.
    async fn find(&self, means: Means<'_>, number: u64, unread: Unread) -> Result<Found, BlockError> {
        let uuid = self.uuid();
        match self.read_pages(means, number, 0, PAGES as usize).await {
            // One of them may be there.
            Err(BlockError::ReadFault { .. }) => {}
            bytes => {
                let bytes = bytes?;
                let (first, second) = bytes.split_at(PAGE);
                return Ok(choose([Some(first), Some(second)], &uuid, number));
            }
        }
        let first = self.read_pages(means, number, 0, PAGE).await;
        let second = self.read_pages(means, number, PAGE, PAGE).await;
        let fault = match (&first, &second) {
            (Ok(_), Ok(_)) => None,
            (Ok(_), Err(fault @ BlockError::ReadFault { .. })) | (Err(fault @ BlockError::ReadFault { .. }), Ok(_)) => {
                Some(*fault)
            }
            (Err(error), _) | (_, Err(error)) => return Err(*error),
        };
        let found = choose([first.as_deref().ok(), second.as_deref().ok()], &uuid, number);
        match fault {
            Some(fault) if matches!(found, Found::Unread { .. }) && unread == Unread::Fails => Err(fault),
            _ => Ok(found),
        }
    }

    async fn load(
        &self,
        means: Means<'_>,
        number: u64,
        (group, _): (&Group, &Claim<'_>),
        unread: Unread,
    ) -> Result<(), BlockError> {
        let (volume, leg) = (self.name(), self.leg().name());
        let (first, count) = (number * BLOCKS, self.blocks_of(number));
        let found = self.find(means, number, unread).await?;
        if let Found::Unread { sequence } = &found {
            group.sequence.store(*sequence, Ordering::Relaxed);
        }
        match found {
            Found::Fresh => {}
            Found::Lost | Found::Unread { .. } => {
                tracing::error!(volume, leg, first, count, "the metadata of these blocks are whole in neither place");
                (0..count).for_each(|at| group.set(at, Entry::LOST));
                self.lost.fetch_add(count, Ordering::Relaxed);
            }
            Found::Pages { newer, older, alone, unread } => {
                if alone {
                    let what = if unread { "cannot be read" } else { "is damaged" };
                    tracing::warn!(volume, leg, first, count, "one copy of these blocks' metadata {what}");
                }
                for at in 0..count {
                    self.take(means, group, Piece { lba: first + at, count: 1 }, (&newer, older.as_ref()), alone).await?;
                    if at % 32 == 31 {
                        yield_now().await;
                    }
                }
                if unread {
                    // The next start may read it: nothing takes its place before there is something to write.
                    group.touched.store(false, Ordering::Relaxed);
                }
                group.sequence.store(newer.sequence, Ordering::Relaxed);
            }
        }
        group.set_ready();
        Ok(())
    }

    /// Takes a block's metadata from the pages: of several candidates, those that belong to its data. A page whose successor is
    /// damaged may be too old. An entry without other ones was made when the data were durable: they are the newest's, or rotten.
    async fn take(
        &self,
        means: Means<'_>,
        group: &Group,
        piece: Piece,
        (newer, older): (&Page, Option<&Page>),
        alone: bool,
    ) -> Result<(), BlockError> {
        let at = piece.lba % BLOCKS;
        let pages = [Some(newer), older].into_iter().flatten().map(|page| page.entries[at as usize]);
        let all = pages.flat_map(|entry| [Some(entry.newest), entry.other]).flatten();
        let Entry { newest, other } = newer.entries[at as usize];
        let mut others = all.clone().filter(|candidate| *candidate != newest);
        let is_sure = match newest {
            Candidate::Value { .. } => !alone && (other.is_none() || others.next().is_none()),
            Candidate::Absent | Candidate::Lost => !alone,
        };
        if is_sure {
            group.set(at, Entry { newest, other: None });
            return Ok(());
        }
        group.touched.store(true, Ordering::Relaxed);
        let segments = [means.buffer.segment(self.block_size().bytes() as usize)];
        let data = match self.move_blocks(means.cx, Operation::Read, piece, &segments).await {
            Ok(()) => self.checksum_at(segments[0], 0),
            // Whoever reads it is told.
            Err(BlockError::ReadFault { .. }) => {
                let other = all.clone().find(|candidate| *candidate != newest);
                group.set(at, Entry { newest, other });
                group.doubt(at);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let found = all.clone().find(|candidate| candidate.belongs(data));
        let chosen = found.unwrap_or(if alone { Candidate::Lost } else { newest });
        if chosen == Candidate::Lost {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        let other = match found {
            // Its data are durable since the volume was opened.
            Some(Candidate::Value { .. }) => None,
            // What a page on the leg may still say.
            _ => all.clone().find(|candidate| *candidate != chosen),
        };
        group.set(at, Entry { newest: chosen, other });
        Ok(())
    }

    /// Makes what is in the table durable in a group's page.
    pub(super) async fn commit(&self, means: Means<'_>, number: u64, group: &Group) -> Result<(), BlockError> {
        let mine = group.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        let is_done = || group.done.load(Ordering::SeqCst) >= mine;
        let claim = until(means.cx, || if is_done() { Some(None) } else { group.try_claim().map(Some) }).await;
        if claim.is_none() || is_done() {
            return Ok(());
        }
        // SeqCst: who wanted one by now has put his metadata into the table before.
        let all = group.wanted.load(Ordering::SeqCst);
        group.touched.store(true, Ordering::Relaxed);
        let failed = self.flushes.failed();
        self.write_page(means, number, group, false).await?;
        self.flushes.flush(means.cx, &**self.leg(), failed).await?;
        group.sequence.fetch_add(1, Ordering::Relaxed);
        group.done.fetch_max(all, Ordering::SeqCst);
        Ok(())
    }

    /// Writes a group's next page. Once it is durable, and not before, it is the one that counts: until then the next one is written
    /// in the same place, so that the other page stays whole.
    async fn write_page(&self, means: Means<'_>, number: u64, group: &Group, settled: bool) -> Result<(), BlockError> {
        let sequence = group.sequence.load(Ordering::Relaxed) + 1;
        let segments = [means.buffer.segment(PAGE)];
        segments[0].write_at(0, &encode(&self.uuid(), number, sequence, |at| group.entry_for_page(at, settled)));
        let shift = self.block_size().shift();
        let start = group_start(number, self.block_size()) + (sequence % 2) * PAGE as u64;
        let (lba, count) = (Lba(start >> shift), BlockCount(PAGE as u64 >> shift));
        let operation = Operation::Write { fua: false };
        let arena = means.cx.scratch.carve_rest();
        self.leg().submit(means.cx.with_scratch(&arena), Request { operation, lba, count, segments: &segments }).await
    }

    /// Has every page say no more than the newest metadata, so that the next start need not look at the data. No request is in flight. In a
    /// change guests wait: of many groups some are left as after a crash.
    pub(super) async fn close_all(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let buffer = cx.buffers.take().await;
        let means = Means { cx: cx.deeper(), buffer: &buffer };
        let most = if self.hurried.load(Ordering::Relaxed) { CLOSED_TOGETHER } else { usize::MAX };
        let touched = self.table.all().filter(|(_, group)| group.is_ready() && group.touched.load(Ordering::Relaxed));
        let touched: Vec<_> = touched.take(most).collect();
        if touched.is_empty() {
            return Ok(());
        }
        // The newest metadata belong to data that are durable.
        self.flushes.flush_alone(means.cx, &**self.leg()).await?;
        for some in touched.chunks(CLOSED_TOGETHER) {
            for (number, group) in some {
                self.write_page(means, *number, group, true).await?;
            }
            self.flushes.flush_alone(means.cx, &**self.leg()).await?;
            for (_, group) in some {
                group.sequence.fetch_add(1, Ordering::Relaxed);
                group.touched.store(false, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}
