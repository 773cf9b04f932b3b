//! After a process died, or the power went: of the records that the log has of a block, it has the one under which it opens.

use std::{collections::BTreeMap, iter, slice, sync::atomic::Ordering};

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, TaskContext, Volume, submit_together, yield_now};
use millrace_cipher::Sealer;
use millrace_memory::{BUFFER_SIZE, Segment};

use super::{
    layout::{FAN, LOG_PAGES, PAGE, block_start, log_start},
    page::{Change, Place, Record, decode_log},
    table::Node,
    volume::Authenticated,
};
use crate::legs;

/// Pages that are read at once.
const AT_ONCE: u64 = (BUFFER_SIZE / PAGE) as u64;

/// Blocks that are read at once, at most: each has scratch of its own.
const BLOCKS_AT_ONCE: usize = 15;

type Candidates = BTreeMap<u64, Vec<Record>>;

impl Authenticated {
    /// Completes what the log has. Nobody else is there.
    pub(super) async fn recover(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let epoch = self.rooted.load(Ordering::SeqCst);
        let mut candidates = Candidates::new();
        // The next epoch may have begun.
        let first = self.read_log(cx, epoch, &mut candidates).await?;
        let next = self.read_log(cx, epoch + 1, &mut candidates).await?;
        if first + next == 0 {
            return Ok(());
        }
        let read_only = self.geometry().read_only;
        if !read_only {
            // What the leg shows now counts from here on, so that it must not go away again.
            self.flushes.flush_alone(cx, &*self.leg).await?;
        }
        let blocks = self.blocks.load(Ordering::Relaxed);
        let all: Vec<_> = candidates.range(..blocks).map(|(lba, records)| (*lba, records.as_slice())).collect();
        let at_once = (BUFFER_SIZE / self.block_size().bytes() as usize - 1).clamp(1, BLOCKS_AT_ONCE);
        let mut foreign = 0_u64;
        for some in all.chunks(at_once) {
            foreign += self.recover_blocks(cx, some).await?;
            yield_now().await;
        }
        let (volume, written) = (&self.name, candidates.len());
        tracing::info!(
            volume,
            written,
            "it was not closed in an orderly way: blocks that were being written were looked at"
        );
        if foreign > 0 {
            let leg = self.leg.name();
            tracing::error!(volume, leg, foreign, "blocks are none of those that were being written: they cannot be read");
        }
        // Neither half of the log is free before another root is there: the second one goes on behind its last page.
        self.log.reset(epoch + 1, next);
        // More in doubt than can be carried over keeps nobody out: the log has all of it.
        if read_only || self.is_overburdened() { Ok(()) } else { self.save_now(cx).await }
    }

    /// Reads the pages of the log that were written in an epoch, and says behind which page there is none. They were written one
    /// after the other: behind many that are not there is none.
    async fn read_log(&self, cx: TaskContext<'_>, epoch: u64, candidates: &mut Candidates) -> Result<u64, BlockError> {
        let (mut end, mut passed_over) = (0, None);
        for first in (0..LOG_PAGES).step_by(AT_ONCE as usize) {
            let before = end;
            for (number, changes) in (first..).zip(self.read_changes(cx, epoch, first).await) {
                let changes = match changes {
                    Ok(changes) => changes,
                    // The one before is not there, and so this one is not.
                    Err(error @ BlockError::ReadFault { .. }) if number > end => {
                        passed_over.get_or_insert((number, error));
                        continue;
                    }
                    Err(error) => return Err(self.unreadable(epoch, number, error)),
                };
                let Some(changes) = changes else { continue };
                if let Some((bad, error)) = passed_over {
                    return Err(self.unreadable(epoch, bad, error));
                }
                end = number + 1;
                for change in changes {
                    let records = candidates.entry(change.lba).or_default();
                    for record in [change.old, change.new] {
                        // The newest one is the last.
                        records.retain(|known| *known != record);
                        records.push(record);
                    }
                }
            }
            if end == before {
                break;
            }
        }
        Ok(end)
    }

    /// The changes of some pages of the log, `None` of one that is none. Such a one is read twice: it may have come over badly, or another leg
    /// below may have it right.
    async fn read_changes(
        &self,
        cx: TaskContext<'_>,
        epoch: u64,
        first: u64,
    ) -> Vec<Result<Option<Vec<Change>>, BlockError>> {
        let mut all = Vec::new();
        for (number, page) in (first..).zip(self.read_pages(cx, epoch, first).await) {
            all.push(page.and_then(|page| self.changes_of(epoch, number, &page)));
        }
        if all.contains(&Ok(None)) {
            let again = self.read_pages(cx, epoch, first).await;
            for ((number, changes), page) in (first..).zip(&mut all).zip(again) {
                if *changes == Ok(None)
                    && let Ok(page) = page
                {
                    *changes = self.changes_of(epoch, number, &page);
                }
            }
        }
        all
    }

    fn changes_of(&self, epoch: u64, number: u64, page: &[u8]) -> Result<Option<Vec<Change>>, BlockError> {
        let visit = self.sealer.visit();
        let force = visit.as_ref().ok_or(BlockError::NotReady)?;
        let decode = |sealer: &Sealer| decode_log(sealer, &force.uuid, (epoch, number), page);
        Ok(decode(&force.sealer).or_else(|| decode(force.old.as_ref()?)))
    }

    /// Some pages of the log: each by itself where they cannot be read together.
    async fn read_pages(&self, cx: TaskContext<'_>, epoch: u64, first: u64) -> Vec<Result<Vec<u8>, BlockError>> {
        let count = AT_ONCE.min(LOG_PAGES - first);
        if let Ok(bytes) = legs::read_bytes(cx, &*self.leg, log_start(epoch, first), count as usize * PAGE).await {
            return bytes.chunks(PAGE).map(|page| Ok(page.to_vec())).collect();
        }
        let mut pages = Vec::new();
        for number in first..first + count {
            pages.push(legs::read_bytes(cx, &*self.leg, log_start(epoch, number), PAGE).await);
        }
        pages
    }

    /// A page of the log that may say what blocks are.
    fn unreadable(&self, epoch: u64, number: u64, error: BlockError) -> BlockError {
        let (volume, leg, byte) = (&self.name, self.leg.name(), log_start(epoch, number));
        tracing::error!(volume, leg, byte, %error, "a page of the log cannot be read, and blocks may be what it alone says: bring the leg in order");
        error
    }

    /// Gives blocks the records that they have, and says how many have none of them.
    async fn recover_blocks(&self, cx: TaskContext<'_>, blocks: &[(u64, &[Record])]) -> Result<u64, BlockError> {
        let mut there = Vec::new();
        for (lba, records) in blocks {
            match self.ready(cx, *lba).await {
                Ok(_) => there.push((*lba, *records)),
                Err(BlockError::ReadFault { .. }) => {
                    // Who reads it is told. What the tree has of it comes first when its page can be read.
                    self.doubts().insert(*lba, records.to_vec());
                    self.rekeying.go_back(*lba);
                }
                Err(error) => return Err(error),
            }
        }
        let blocks = &there[..];
        if blocks.is_empty() {
            return Ok(0);
        }
        let unit = self.block_size().bytes() as usize;
        let buffer = cx.buffers.take().await;
        let part = |at| buffer.segment(BUFFER_SIZE).part(at * unit, unit).expect("as many as there is room for");
        let (data, work): (Vec<_>, _) = ((0..blocks.len()).map(part).collect(), part(blocks.len()));
        let shift = self.block_size().shift();
        let read = |at: usize| {
            let lba = Lba(block_start(blocks[at].0, self.block_size()) >> shift);
            let segments = slice::from_ref(&data[at]);
            (&*self.leg as &dyn Volume, Request { operation: Operation::Read, lba, count: BlockCount(1), segments })
        };
        let all = submit_together(cx.deeper(), blocks.len(), self.leg.scratch_bytes(), read).await;
        let mut foreign = 0;
        for ((lba, records), data) in blocks.iter().zip(&data) {
            if all.is_err() {
                let start = block_start(*lba, self.block_size());
                match self.transfer(cx.deeper(), Operation::Read, start, *data).await {
                    Ok(()) => {}
                    Err(BlockError::ReadFault { .. }) => {
                        // Whoever reads it is told; it may come back.
                        self.leave_in_doubt(*lba, records);
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            }
            foreign += u64::from(!self.recover_block(*lba, records, *data, work)?);
        }
        Ok(foreign)
    }

    /// The record that the tree has of a block, whose page was read, and the others that it may have.
    fn all_records(&self, lba: u64, records: &[Record]) -> (&Node, usize, Vec<Record>) {
        let node = self.table.get(Place { level: 0, number: lba / FAN }).expect("its page was read");
        let at = (lba % FAN) as usize;
        let known = node.record(at);
        (node, at, iter::once(known).chain(records.iter().copied().filter(|record| *record != known)).collect())
    }

    fn leave_in_doubt(&self, lba: u64, records: &[Record]) {
        let (node, at, all) = self.all_records(lba, records);
        self.doubts().insert(lba, all);
        node.doubt(at);
        self.rekeying.go_back(lba);
    }

    /// Gives a block the record that it has; false when it has none of them. `data` is what is there.
    fn recover_block(&self, lba: u64, records: &[Record], data: Segment, work: Segment) -> Result<bool, BlockError> {
        let (node, at, all) = self.all_records(lba, records);
        let known = all[0];
        let newest = records.last().copied().unwrap_or(known);
        let (found, record) = {
            let visit = self.sealer.visit();
            let force = visit.as_ref().ok_or(BlockError::NotReady)?;
            let found = force.choose(lba, data, work, &all).or_else(|| self.not_erased(&all));
            let record = found.unwrap_or(newest);
            if force.is_old(record.version) {
                self.rekeying.go_back(lba);
            }
            (found, record)
        };
        if record != known {
            node.set(at, record);
            node.touch();
        }
        Ok(found.is_some())
    }
}
