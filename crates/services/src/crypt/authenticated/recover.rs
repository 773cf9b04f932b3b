//! After a process died, or the power went: of the records that the log has of a block, it has the one under which it opens.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use millrace_block::{BlockError, Operation, TaskContext, Volume as _, yield_now};
use millrace_cipher::Sealer;
use millrace_memory::BUFFER_SIZE;

use super::{
    layout::{FAN, LOG_PAGES, PAGE, block_start, log_start},
    page::{Record, decode_log},
    volume::Authenticated,
};
use crate::legs;

/// Pages that are read at once.
const AT_ONCE: u64 = (BUFFER_SIZE / PAGE) as u64;

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
            legs::flush(cx, &*self.leg).await?;
        }
        let blocks = self.blocks.load(Ordering::Relaxed);
        let mut foreign = 0_u64;
        for (lba, records) in candidates.range(..blocks) {
            foreign += u64::from(!self.recover_block(cx, *lba, records).await?);
            if lba % 64 == 0 {
                yield_now().await;
            }
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
        if read_only { Ok(()) } else { self.save_now(cx).await }
    }

    /// Reads the pages of the log that were written in an epoch, and says behind which page there is none. They were written one
    /// after the other: behind many that are not there is none.
    async fn read_log(&self, cx: TaskContext<'_>, epoch: u64, candidates: &mut Candidates) -> Result<u64, BlockError> {
        let mut end = 0;
        for first in (0..LOG_PAGES).step_by(AT_ONCE as usize) {
            let count = AT_ONCE.min(LOG_PAGES - first);
            let bytes = legs::read_bytes(cx, &*self.leg, log_start(epoch, first), count as usize * PAGE).await?;
            let before = end;
            for (number, page) in (first..).zip(bytes.chunks(PAGE)) {
                let changes = {
                    let visit = self.sealer.visit();
                    let force = visit.as_ref().ok_or(BlockError::NotReady)?;
                    let decode = |sealer: &Sealer| decode_log(sealer, &force.uuid, (epoch, number), page);
                    decode(&force.sealer).or_else(|| decode(force.old.as_ref()?))
                };
                let Some(changes) = changes else { continue };
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

    /// Gives a block the record that it has; false when it has none of them.
    async fn recover_block(&self, cx: TaskContext<'_>, lba: u64, records: &[Record]) -> Result<bool, BlockError> {
        let node = self.ready(cx, lba).await?;
        let at = (lba % FAN) as usize;
        let known = node.record(at);
        let mut all = vec![known];
        all.extend(records.iter().filter(|record| **record != known));
        let unit = self.block_size().bytes() as usize;
        let buffer = cx.buffers.take().await;
        let both = buffer.segment(2 * unit);
        let (data, work) = (both.part(0, unit).expect("half of it"), both.part(unit, unit).expect("half of it"));
        match self.transfer(cx.deeper(), Operation::Read, block_start(lba, self.block_size()), data).await {
            Ok(()) => {}
            Err(BlockError::ReadFault { .. }) => {
                // Whoever reads it is told; it may come back.
                self.doubts().insert(lba, all);
                node.doubt(at);
                self.rekeying.go_back(lba);
                return Ok(true);
            }
            Err(error) => return Err(error),
        }
        let newest = records.last().copied().unwrap_or(known);
        let (found, record) = {
            let visit = self.sealer.visit();
            let force = visit.as_ref().ok_or(BlockError::NotReady)?;
            let found = force.choose(lba, data, work, &all);
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
