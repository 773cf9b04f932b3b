//! Pages of the tree: read when they are needed, each by the record that the page above has of it.
//!
//! Who waits here for another one who reads has no buffer meanwhile: that one may need one, and it may be the last.

use std::sync::atomic::Ordering;

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, TaskContext, Volume};
use millrace_memory::Segment;

use super::{
    layout::{FAN, LEVELS, PAGE, blocks_under, page_start},
    page::{Place, Record, decode_tree},
    table::Node,
    volume::Authenticated,
};
use crate::{locks::until, told::is_told};

/// How often a page is read that is not the one that is known: it may have come over badly, or another leg below may have it right.
const READS: u32 = 3;

impl Authenticated {
    /// The node that has the records of a block's group.
    pub(super) async fn ready(&self, cx: TaskContext<'_>, lba: u64) -> Result<&Node, BlockError> {
        let group = Place { level: 0, number: lba / FAN };
        if let Some(node) = self.table.get(group).filter(|node| node.is_ready()) {
            return Ok(node);
        }
        self.ready_above(cx, group).await?;
        self.ready_at(cx, group).await
    }

    /// Reads the pages above a page.
    async fn ready_above(&self, cx: TaskContext<'_>, place: Place) -> Result<(), BlockError> {
        for level in (place.level + 1..LEVELS).rev() {
            let number = place.number * blocks_under(place.level) / blocks_under(level);
            self.ready_at(cx, Place { level, number }).await?;
        }
        Ok(())
    }

    /// The node of any page, those above it read first.
    pub(super) async fn ready_page(&self, cx: TaskContext<'_>, place: Place) -> Result<&Node, BlockError> {
        self.ready_above(cx, place).await?;
        self.ready_at(cx, place).await
    }

    /// Whether nothing was ever written to the group of a block.
    pub(super) async fn is_untouched(&self, cx: TaskContext<'_>, lba: u64) -> Result<bool, BlockError> {
        let group = Place { level: 0, number: lba / FAN };
        if self.table.get(group).is_some_and(Node::is_ready) {
            return Ok(false);
        }
        self.ready_above(cx, group).await?;
        let first = group.number * FAN;
        if self.doubts().range(first..first + FAN).next().is_some() {
            return Ok(false);
        }
        let (above, at) = self.table.above(group);
        Ok(above.record(at) == Record::FRESH && !self.table.get(group).is_some_and(Node::is_ready))
    }

    /// The node of a page whose page above was read.
    async fn ready_at(&self, cx: TaskContext<'_>, place: Place) -> Result<&Node, BlockError> {
        let node = self.table.need(place);
        while !node.is_ready() {
            if self.sealer.visit().is_none() {
                // What was written is not known without the tree.
                return Err(BlockError::NotReady);
            }
            let buffer = cx.buffers.take().await;
            let Some(_turn) = node.turn.try_take() else {
                drop(buffer);
                // Whoever has it is done with it when it is free again.
                until(cx, || (node.is_ready() || node.turn.try_take().is_some()).then_some(())).await;
                continue;
            };
            if node.is_ready() {
                break;
            }
            let (above, at) = self.table.above(place);
            let known = above.record(at);
            if known == Record::FRESH {
                if place.level == 0 {
                    self.take_up_doubts(node, place.number * FAN);
                }
                node.set_ready();
            } else {
                self.load(cx.deeper(), buffer.segment(PAGE), place, node, &known).await?;
            }
        }
        Ok(node)
    }

    /// Reads a page. If it is not the one that is known, however often it is read, all that it covers is lost.
    async fn load(
        &self,
        cx: TaskContext<'_>,
        segment: Segment,
        place: Place,
        node: &Node,
        known: &Record,
    ) -> Result<(), BlockError> {
        let start = page_start(place.level, place.number, self.block_size()) + known.version % 2 * PAGE as u64;
        let is_known = known != &Record::LOST;
        let (mut reads, mut is_filled) = (0, false);
        while is_known && !is_filled && reads < READS {
            self.transfer(cx, Operation::Read, start, segment).await?;
            is_filled = self.fill(segment, place, node, known)?;
            reads += 1;
        }
        if !is_filled {
            (0..node.len()).for_each(|at| node.set(at, Record::LOST));
            if is_known {
                self.report_page(place);
            }
        }
        if place.level == 0 {
            self.take_up_doubts(node, place.number * FAN);
        }
        node.rooted.store(known.version, Ordering::SeqCst);
        node.set_ready();
        Ok(())
    }

    /// Of blocks that the log had something of while their page could not be read, it is not known what they hold: perhaps what the page says.
    fn take_up_doubts(&self, node: &Node, first: u64) {
        for (lba, records) in self.doubts().range_mut(first..first + FAN) {
            let at = (lba - first) as usize;
            let known = node.record(at);
            records.retain(|record| *record != known);
            records.insert(0, known);
            node.doubt(at);
        }
    }

    /// A page is not the one that was written; what lies under it was reported with it.
    fn report_page(&self, place: Place) {
        let pages = self.pages_lost.fetch_add(1, Ordering::Relaxed) + 1;
        if !is_told(pages) {
            return;
        }
        let (first, count) = (place.number * blocks_under(place.level), blocks_under(place.level));
        let (volume, leg, level) = (&self.name, self.leg.name(), place.level);
        tracing::error!(
            volume,
            leg,
            level,
            first,
            count,
            pages,
            "the page with these blocks' tags is not the one that was written: they cannot be read before they are written again"
        );
    }

    /// Takes a page's records, if it is the one that is known.
    fn fill(&self, segment: Segment, place: Place, node: &Node, known: &Record) -> Result<bool, BlockError> {
        let mut page = [0; PAGE];
        segment.read_at(0, &mut page);
        let visit = self.sealer.visit();
        let force = visit.as_ref().ok_or(BlockError::NotReady)?;
        let Some(records) = decode_tree(force.of(known.version), place, known, &page) else { return Ok(false) };
        records.enumerate().for_each(|(at, record)| node.set(at, record));
        Ok(true)
    }

    /// Moves bytes at a byte of the leg.
    pub(super) async fn transfer(
        &self,
        cx: TaskContext<'_>,
        operation: Operation,
        start: u64,
        data: Segment,
    ) -> Result<(), BlockError> {
        let shift = self.block_size().shift();
        let (lba, count) = (Lba(start >> shift), BlockCount((data.len() >> shift) as u64));
        let segments = [data];
        let request = Request { operation, lba, count, segments: &segments };
        self.leg.submit(cx.with_scratch(&cx.scratch.carve_rest()), request).await
    }
}
