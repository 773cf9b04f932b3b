//! Saving the tree, so that the log need not be kept.
//!
//! ```text
//!   epoch e+1 begins ─► writers of e have ended ─► what failed is logged again ─► flush (their data) ─► changed pages, from the
//!   groups up, each in the place that the root does not lead to ─► flush ─► header with the root, twice ─► the operator's place
//! ```
//!
//! A page may have records of writers of e+1: the log of e+1 has what their blocks were before.
//!
//! The log has room for so many doubts only. Of blocks beyond that what is known stays in memory, and their pages say what they said before;
//! but not before the log is full, when every write would fail otherwise: until then nothing is saved, and the log has all. (Their pages may
//! lie in the same part of the leg as they do, so that nothing may depend on writing those.)
//!
//! A header that could not be stored may be there all the same. So that root is stored again before any page is written: a page that
//! it leads to is never overwritten.

use std::sync::atomic::Ordering;

use millrace_block::{BlockError, Operation, TaskContext, Volume, yield_now};
use millrace_memory::{BUFFER_SIZE, Segment};

use super::{
    header::Header,
    layout::{LEVELS, PAGE, blocks_under, page_start},
    page::{Change, Place, Record, encode_tree},
    table::Node,
    volume::Authenticated,
};
use crate::locks::until;

/// Changed nodes that are looked at before the shard does something else.
const LOOKED_AT: usize = 1024;

/// A root that is being stored.
#[derive(Clone, Debug)]
pub(super) struct Root {
    epoch: u64,
    records: Vec<Record>,
    /// Blocks before this one have the new key, while the volume is re-keyed.
    rekeyed: u64,
    /// Pages that it leads to and the one before did not.
    pages: Vec<Place>,
}

impl Root {
    /// The header with it.
    pub(super) fn of(&self, header: &Header) -> Header {
        header.with_root(self.epoch, self.records.clone(), self.rekeyed)
    }
}

impl Authenticated {
    /// Saves the tree, unless somebody has begun another epoch since this one. Whoever calls it holds nothing: it waits for all
    /// writers.
    pub(super) async fn save(&self, cx: TaskContext<'_>, seen: u64) -> Result<(), BlockError> {
        let _turn = self.saving.take(cx).await;
        if self.log.epoch().0 > seen {
            return Ok(());
        }
        self.save_now(cx.with_buffers(cx.buffers.of(&self.save_buffers))).await
    }

    /// [`Self::save`] for whoever has the turn.
    pub(super) async fn save_now(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        self.save_giving_up(cx, self.log.is_full()).await
    }

    /// The same; whether doubts that have no room may be given up is the caller's to say.
    pub(super) async fn save_giving_up(&self, cx: TaskContext<'_>, gives_up: bool) -> Result<(), BlockError> {
        let unfinished = self.control().unfinished.clone();
        if let Some(root) = unfinished {
            self.store_root(cx, root).await?;
        }
        // What is said to be done is done before the pages that say so are written.
        let rekeyed = self.rekeying.done();
        let mut epoch = self.log.epoch().0;
        if epoch == self.rooted.load(Ordering::SeqCst) {
            epoch = self.log.next_epoch();
        }
        until(cx, || self.log.is_over(epoch.wrapping_sub(1)).then_some(())).await;
        if self.control().carried != epoch {
            // Whenever it is tried: of many doubts too many may be left while the leg fails, and none when it is well again.
            self.settle_all(cx).await?;
            self.carry_doubts(gives_up)?;
            self.control().carried = epoch;
        }
        self.commit_all(cx).await?;
        self.flushes.flush_alone(cx, &*self.leg).await?;
        let failed = self.write_again();
        self.save_pages(cx).await?;
        self.flushes.flush_alone(cx, &*self.leg).await?;
        // Otherwise the next save writes them again.
        self.flushes.check(failed)?;
        let root = self.make_root(epoch, rekeyed);
        self.store_root(cx, root).await
    }

    /// Behind the volume's last block. What is known of others, from before it was made shorter, has no room on the leg, and is forgotten
    /// before it grows again.
    fn end(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Finds out what blocks hold whose writes failed, where they can be read.
    async fn settle_all(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let doubtful: Vec<u64> = self.doubts().range(..self.end()).map(|(lba, _)| *lba).collect();
        for lba in doubtful {
            let settled = match self.ready(cx, lba).await {
                Ok(node) => self.settle(cx, node, lba).await,
                Err(error) => Err(error),
            };
            match settled {
                Ok(()) | Err(BlockError::ReadFault { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What is to be carried over of blocks of which it is not known what they hold.
    fn doubtful(&self) -> Vec<Change> {
        let (doubts, given_up) = (self.doubts(), self.given_up());
        let mut changes = Vec::new();
        for (lba, records) in doubts.range(..self.end()).filter(|(lba, _)| !given_up.contains(*lba)) {
            changes.extend(records.windows(2).map(|two| Change { lba: *lba, old: two[0], new: two[1] }));
        }
        changes
    }

    /// Whether more is in doubt than the log can carry over.
    pub(super) fn is_overburdened(&self) -> bool {
        self.doubtful().len() > self.log.room()
    }

    /// Blocks of which it is not known what they hold stay so, whatever becomes of the log before.
    fn carry_doubts(&self, gives_up: bool) -> Result<(), BlockError> {
        let (mut changes, room) = (self.doubtful(), self.log.room());
        if changes.len() > room && gives_up {
            self.give_up_doubts(room);
            changes = self.doubtful();
        }
        if changes.len() > room || !self.log.carry(&changes) {
            return Err(BlockError::WriteFault { errno: 0 });
        }
        Ok(())
    }

    /// Of the last blocks in doubt, which have no room in the log, what is known stays in memory alone.
    fn give_up_doubts(&self, mut room: usize) {
        let (doubts, mut given_up) = (self.doubts(), self.given_up());
        for (lba, records) in doubts.range(..self.end()) {
            if given_up.contains(lba) {
                continue;
            }
            if let Some(left) = room.checked_sub(records.len().saturating_sub(1)) {
                room = left;
            } else {
                given_up.insert(*lba);
            }
        }
        let (volume, leg, blocks, given_up) = (&self.name, self.leg.name(), doubts.len(), given_up.len());
        tracing::error!(
            volume,
            leg,
            blocks,
            given_up,
            "writes of too many blocks failed that cannot be read now: those given up that are not read before the volume is closed, or the \
             process dies, have what was saved of them last, or cannot be read before they are written again"
        );
    }

    /// Makes durable what waits in the log's queue.
    async fn commit_all(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let all = self.log.behind_all();
        if self.log.is_durable(&all) {
            return Ok(());
        }
        let buffer = cx.buffers.take().await;
        self.commit(cx.deeper(), buffer.segment(PAGE), &all).await
    }

    /// Pages that no root leads to yet, and that a flush which the leg has refused since may have lost, are written again. How many it has
    /// refused so far.
    fn write_again(&self) -> u64 {
        let failed = self.flushes.failed();
        let mut control = self.control();
        if control.unrooted_failed != failed {
            control.unrooted_failed = failed;
            std::mem::take(&mut control.unrooted)
                .into_iter()
                .filter_map(|place| self.table.get(place))
                .for_each(Node::touch);
        }
        failed
    }

    async fn save_pages(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        let buffer = cx.buffers.take().await;
        let segment = buffer.segment(BUFFER_SIZE).part(0, PAGE).expect("a page is smaller than a buffer");
        for level in 0..LEVELS {
            let end = self.end().div_ceil(blocks_under(level));
            // Those above are changed by it: each level is asked when the one below is done.
            for (looked_at, (place, node)) in self.table.to_save(level, end).enumerate() {
                if node.take_dirty()
                    && let Err(error) = self.save_page(cx.deeper(), segment, place, node).await
                {
                    node.touch();
                    return Err(error);
                }
                if looked_at % LOOKED_AT == LOOKED_AT - 1 {
                    yield_now().await;
                }
            }
        }
        Ok(())
    }

    async fn save_page(&self, cx: TaskContext<'_>, segment: Segment, place: Place, node: &Node) -> Result<(), BlockError> {
        let (sequence, tag) = {
            let visit = self.sealer.visit();
            let force = visit.as_ref().ok_or(BlockError::NotReady)?;
            let sequence = force.next(node.rooted.load(Ordering::SeqCst));
            let (page, tag) = encode_tree(&force.sealer, &force.uuid, place, sequence, |at| node.record(at));
            segment.write_at(0, &page);
            (sequence, tag)
        };
        let start = page_start(place.level, place.number, self.block_size()) + sequence % 2 * PAGE as u64;
        self.transfer(cx, Operation::Write { fua: false }, start, segment).await?;
        let (above, at) = self.table.above(place);
        above.set(at, Record { version: sequence, tag });
        above.touch();
        self.control().unrooted.push(place);
        Ok(())
    }

    /// The root for what was saved.
    pub(super) fn make_root(&self, epoch: u64, rekeyed: u64) -> Root {
        let node = &self.table.root;
        let mut records: Vec<_> = (0..node.len()).map(|at| node.record(at)).collect();
        let used = records.iter().rposition(|record| *record != Record::FRESH).map_or(0, |last| last + 1);
        records.truncate(used);
        let pages = std::mem::take(&mut self.control().unrooted);
        Root { epoch, records, rekeyed, pages }
    }

    pub(super) async fn store_root(&self, cx: TaskContext<'_>, root: Root) -> Result<(), BlockError> {
        let (mut generation, content) = {
            let visit = self.sealer.visit();
            let force = visit.as_ref().ok_or(BlockError::NotReady)?;
            let mut control = self.control();
            let header = control.header.as_ref().ok_or(BlockError::NotReady)?;
            let content = root.of(header).content(&force.sealer);
            control.unfinished = Some(root.clone());
            (control.generation, content)
        };
        let stored = Header::store_in(cx, &*self.leg, &self.flushes, &mut generation, &content).await;
        self.note_store(generation, stored.is_ok());
        stored?;
        if let Some(anchor) = &self.anchor {
            // Behind the header: one that it does not know yet is opened, one of before is not.
            let uuid = self.sealer.visit().as_ref().map(|force| force.uuid).ok_or(BlockError::NotReady)?;
            anchor.store_in(cx, uuid, root.epoch).await?;
        }
        for place in &root.pages {
            let (above, at) = self.table.above(*place);
            if let Some(node) = self.table.get(*place) {
                node.rooted.store(above.record(at).version, Ordering::SeqCst);
            }
        }
        self.table.root.take_dirty();
        let mut control = self.control();
        control.unfinished = None;
        if let Some(header) = &mut control.header {
            *header = root.of(header);
        }
        self.rooted.store(root.epoch, Ordering::SeqCst);
        Ok(())
    }
}
