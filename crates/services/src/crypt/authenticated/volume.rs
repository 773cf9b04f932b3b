//! The path of a request. One that lies in several groups, or is long, goes piece by piece.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Epochs, Geometry, Lba, Operation, Request, Scratch, ScratchBox, Step, TaskContext,
    TaskFuture, Usage, Volume, VolumeError, check, compare_by_reading, copy_by_bounce, future_bytes, helpers_scratch_bytes,
    placed_bytes,
};
use millrace_cipher::{Sealer, Secret};
use millrace_memory::{BUFFER_SIZE, Owner, Segment, SegmentCursor};

use super::{
    Settled,
    anchor::Anchor,
    control::Control,
    layout::{FAN, PAGE, block_start, log_start},
    log::{Entered, Log, Refused},
    page::{CHANGES, Change, Record, TURNED, Uuid, binding},
    rekey::Rekeying,
    table::{Node, Table},
};
use crate::{
    flushes::Flushes,
    legs::Leg,
    locks::{Turn, until},
    told::is_told,
};

/// Bytes of data in a buffer: behind them is room for a page of the log.
pub(super) const DATA: usize = BUFFER_SIZE - PAGE;
/// Records that are kept of a block whose writes fail: what it had before, and those of the last attempts.
const CANDIDATES: usize = 5;
/// Largest block.
const BLOCK: usize = 4096;

/// What enciphers, and knows its own.
#[derive(Debug)]
pub(super) struct Force {
    pub(super) sealer: Arc<Sealer>,
    /// [`TURNED`] or 0: what is sealed now has this in its version.
    pub(super) turned: u64,
    /// Of the key before, while the volume is re-keyed.
    pub(super) old: Option<Arc<Sealer>>,
    pub(super) uuid: Uuid,
}

impl Force {
    /// Whether this version is of the key before.
    pub(super) fn is_old(&self, version: u64) -> bool {
        self.old.is_some() && version & TURNED != self.turned
    }

    /// What a version is sealed with.
    pub(super) fn of(&self, version: u64) -> &Sealer {
        match &self.old {
            Some(old) if self.is_old(version) => old,
            _ => &self.sealer,
        }
    }

    /// The version after this one, which is of the key of now.
    pub(super) fn next(&self, version: u64) -> u64 {
        ((version & !TURNED) + 1) | self.turned
    }

    /// Seals a block where it is, as the successor of what this record is about.
    pub(super) fn seal(&self, lba: u64, old: &Record, data: Segment) -> Record {
        let version = self.next(old.version);
        let (nonce, extra) = binding(&self.uuid, lba, version);
        Record { version, tag: self.sealer.seal(&nonce, &extra, data) }
    }

    /// Opens a block where it is; false when it is not the one of this record.
    pub(super) fn open(&self, lba: u64, record: &Record, data: Segment) -> bool {
        let (nonce, extra) = binding(&self.uuid, lba, record.version);
        self.of(record.version).open(&nonce, &extra, &record.tag, data).is_ok()
    }

    /// The newest of these records that a block on the leg has. `work` is room for a block.
    pub(super) fn choose(&self, lba: u64, data: Segment, work: Segment, records: &[Record]) -> Option<Record> {
        let mut block = [0; BLOCK];
        let block = &mut block[..data.len()];
        data.read_at(0, block);
        let is_zero = crate::legs::is_zero(block);
        let has = |record: &&Record| {
            work.write_at(0, block);
            if record.is_zero() { is_zero } else { self.open(lba, record, work) }
        };
        records.iter().rev().find(has).copied()
    }
}

/// The service.
pub(super) struct Authenticated {
    /// For work of the control plane, which must own what it uses.
    pub(super) me: Weak<Self>,
    pub(super) name: String,
    pub(super) leg: Leg,
    /// The operator's place for the root.
    pub(super) anchor: Option<Anchor>,
    pub(super) settled: Settled,
    pub(super) kek: Secret<32>,
    pub(super) blocks: AtomicU64,
    /// Block size and abilities, so that a request need not ask the leg.
    shape: AtomicU8,
    /// `None` while it is not in force.
    pub(super) sealer: Epochs<Option<Force>>,
    pub(super) table: Table,
    pub(super) log: Log,
    pub(super) flushes: Flushes,
    /// Who saves the tree.
    pub(super) saving: Turn,
    /// Has the buffers of saves: who waits for one may have all of the shard's, and of its background tasks'.
    pub(super) save_buffers: Owner,
    pub(super) rekeying: Rekeying,
    /// What the header says of an erasure.
    pub(super) erasing: AtomicBool,
    /// The epoch of the root on the leg.
    pub(super) rooted: AtomicU64,
    pub(super) control: Mutex<Control>,
    /// The records that blocks may have whose writes failed, oldest first.
    doubts: Mutex<BTreeMap<u64, Vec<Record>>>,
    /// Of these, those that the log has no room for: what is known of them is in memory alone.
    given_up: Mutex<BTreeSet<u64>>,
    /// Blocks that were not what they should be, and pages of the tree, since it came into force.
    pub(super) mismatches: AtomicU64,
    pub(super) pages_lost: AtomicU64,
}

fn pack(geometry: &Geometry) -> u8 {
    let flags = [geometry.block_size == BlockSize::B4096, geometry.read_only, geometry.volatile_cache, geometry.deallocate];
    flags.iter().enumerate().fold(0, |sum, (bit, flag)| sum | u8::from(*flag) << bit)
}

/// A part of a request within one group.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) lba: u64,
    pub(super) count: u64,
}

impl Piece {
    /// The first piece of a range, of so many blocks at most.
    fn first(lba: u64, end: u64, most: u64) -> Self {
        Self { lba, count: (end - lba).min(FAN - lba % FAN).min(most) }
    }

    /// Its blocks, counted from the group's first.
    pub(super) fn range(self) -> Range<usize> {
        let at = (self.lba % FAN) as usize;
        at..at + self.count as usize
    }
}

/// Locked blocks; dropping it gives them back as they were.
pub(super) struct Lock<'a> {
    node: &'a Node,
    range: Range<usize>,
}

impl<'a> Lock<'a> {
    pub(super) fn take(node: &'a Node, range: Range<usize>) -> Option<Self> {
        // Not `then_some`: a lock that was not taken must not be dropped, which would give away somebody else's.
        node.try_lock(range.clone()).then(|| Self { node, range })
    }

    /// Gives the blocks back with these records.
    pub(super) fn change(mut self, new: &[Record]) {
        for (at, record) in self.range.clone().zip(new) {
            self.node.set(at, *record);
        }
        self.range = 0..0;
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        self.node.unlock(self.range.clone());
    }
}

/// What blocks become.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// What the guest has.
    Guest(&'a SegmentCursor<'a>),
    /// Zeroes that nobody sees.
    HiddenZeroes,
    /// Zeroes that everybody sees.
    Nothing,
}

impl Authenticated {
    /// The service over a leg, with a place for its root or without.
    pub(super) fn new(
        name: String,
        (leg, anchor): (Leg, Option<Anchor>),
        blocks: u64,
        settled: Settled,
        kek: Secret<32>,
    ) -> Arc<Self> {
        let shape = AtomicU8::new(pack(&leg.geometry()));
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            name,
            leg,
            anchor,
            settled,
            kek,
            blocks: AtomicU64::new(blocks),
            shape,
            sealer: Epochs::new(None),
            table: Table::default(),
            log: Log::default(),
            flushes: Flushes::default(),
            saving: Turn::default(),
            save_buffers: Owner::default(),
            rekeying: Rekeying::default(),
            erasing: AtomicBool::new(false),
            rooted: AtomicU64::new(0),
            control: Mutex::default(),
            doubts: Mutex::default(),
            given_up: Mutex::default(),
            mismatches: AtomicU64::new(0),
            pages_lost: AtomicU64::new(0),
        })
    }

    /// Asks the leg again what it can.
    pub(super) fn look_again(&self) {
        self.shape.store(pack(&self.leg.geometry()), Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn block_size(&self) -> BlockSize {
        if self.shape.load(Ordering::Relaxed) & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 }
    }

    pub(super) fn doubts(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<Record>>> {
        self.doubts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn given_up(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.given_up.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is known what a block holds.
    fn end_doubt(&self, lba: u64) {
        self.doubts().remove(&lba);
        self.given_up().remove(&lba);
    }

    /// Blocks of a piece with data at most.
    pub(super) fn most(&self) -> u64 {
        (CHANGES as u64).min(DATA as u64 >> self.block_size().shift())
    }

    /// A request to the leg for blocks of one group.
    pub(super) async fn submit_piece(
        &self,
        cx: TaskContext<'_>,
        operation: Operation,
        piece: Piece,
        segments: &[Segment],
    ) -> Result<(), BlockError> {
        let block_size = self.block_size();
        let lba = Lba(block_start(piece.lba, block_size) >> block_size.shift());
        let request = Request { operation, lba, count: BlockCount(piece.count), segments };
        self.leg.submit(cx.with_scratch(&cx.scratch.carve_rest()), request).await
    }

    async fn read(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let mut cursor = SegmentCursor::new(request.segments);
        let (mut lba, end) = (request.lba.0, request.lba.0 + request.count.0);
        while lba < end {
            if self.is_untouched(cx, lba).await? {
                // Its records need no room in memory.
                let group = Piece::first(lba, end, FAN);
                cursor.fill((group.count << self.block_size().shift()) as usize, 0);
                lba += group.count;
                continue;
            }
            let piece = Piece::first(lba, end, self.most());
            let node = self.ready(cx, lba).await?;
            self.read_piece(cx, node, piece, &mut cursor).await?;
            lba += piece.count;
        }
        Ok(())
    }

    /// Reads blocks of one group: together as far as nobody changes them, and each of the others alone, so that this ends however often they
    /// are written meanwhile.
    async fn read_piece(
        &self,
        cx: TaskContext<'_>,
        node: &Node,
        mut piece: Piece,
        out: &mut SegmentCursor<'_>,
    ) -> Result<(), BlockError> {
        let shift = self.block_size().shift();
        while piece.count > 0 {
            let free = piece.range().take_while(|at| !node.is_locked(*at..*at + 1)).count() as u64;
            let mut done = 0;
            if free > 0 {
                let buffer = cx.buffers.take().await;
                let data = buffer.segment((free << shift) as usize);
                done = self.fetch(cx.deeper(), node, Piece { count: free, ..piece }, data).await?;
                out.copy_from(data.part(0, (done << shift) as usize).expect("no more than was read"));
            }
            if done < piece.count {
                self.read_alone(cx, node, piece.lba + done, out).await?;
                done += 1;
            }
            piece = Piece { lba: piece.lba + done, count: piece.count - done };
        }
        Ok(())
    }

    /// Reads a block that somebody was changing, or that did not open: once more, for it may have come over badly or been written meanwhile,
    /// and then while nobody may change it.
    async fn read_alone(
        &self,
        cx: TaskContext<'_>,
        node: &Node,
        lba: u64,
        out: &mut SegmentCursor<'_>,
    ) -> Result<(), BlockError> {
        let one = Piece { lba, count: 1 };
        let at = one.range().start;
        let mut is_last = false;
        loop {
            until(cx, || (!node.is_locked(one.range())).then_some(())).await;
            let buffer = cx.buffers.take().await;
            let lock = if is_last { Lock::take(node, one.range()) } else { None };
            if is_last && lock.is_none() {
                continue;
            }
            if node.look(at).doubtful {
                drop((lock, buffer));
                self.settle(cx, node, lba).await?;
                continue;
            }
            let data = buffer.segment(1 << self.block_size().shift());
            if self.fetch(cx.deeper(), node, one, data).await? == 1 {
                out.copy_from(data);
                return Ok(());
            }
            if lock.is_some() {
                self.report(lba, node.record(at) == Record::LOST);
                return Err(BlockError::ReadFault { errno: 0 });
            }
            is_last = true;
        }
    }

    /// Reads blocks of one group and opens them: how many of the first ones are what is known of them. One that somebody is changing is as good
    /// as others if it still is that: its write has not ended.
    async fn fetch(&self, cx: TaskContext<'_>, node: &Node, piece: Piece, data: Segment) -> Result<u64, BlockError> {
        let is_zero = |at| {
            let seen = node.look(at);
            seen.record.is_zero() && !seen.doubtful
        };
        if piece.range().all(is_zero) {
            data.fill(0);
            return Ok(piece.count);
        }
        self.submit_piece(cx, Operation::Read, piece, &[data]).await?;
        let visit = self.sealer.visit();
        let force = visit.as_ref().ok_or(BlockError::NotReady)?;
        let unit = self.block_size().bytes() as usize;
        let opens = |(number, at): &(usize, usize)| {
            let seen = node.look(*at);
            let block = data.part(number * unit, unit).expect("a block of the piece");
            if !seen.doubtful && seen.record.is_zero() {
                block.fill(0);
                return true;
            }
            !seen.doubtful && force.open(piece.lba + *number as u64, &seen.record, block)
        };
        Ok(piece.range().enumerate().take_while(opens).count() as u64)
    }

    /// A block is not what was written.
    pub(super) fn report(&self, lba: u64, lost: bool) {
        let count = self.mismatches.fetch_add(1, Ordering::Relaxed) + 1;
        if is_told(count) {
            let what = if lost { "its tag is lost" } else { "it is not what was written there last" };
            tracing::error!(volume = self.name, leg = self.leg.name(), lba, count, "a block cannot be trusted: {what}");
        }
    }

    /// The record of a block that has none of these: where an erasure was cut off, a block that may never have been written need not be zeroes.
    /// (After a power cut a block that the disk has torn looks the same as one of whose writes none was durable.)
    pub(super) fn not_erased(&self, records: &[Record]) -> Option<Record> {
        let is_fresh = |record: &&Record| **record == Record::FRESH;
        if self.erasing.load(Ordering::Relaxed) { records.iter().find(is_fresh).copied() } else { None }
    }

    /// Finds out which record a block has whose write failed.
    pub(super) async fn settle(&self, cx: TaskContext<'_>, node: &Node, lba: u64) -> Result<(), BlockError> {
        let piece = Piece { lba, count: 1 };
        loop {
            until(cx, || (!node.is_locked(piece.range())).then_some(())).await;
            let buffer = cx.buffers.take().await;
            let Some(lock) = Lock::take(node, piece.range()) else { continue };
            let Some(records) = self.doubts().get(&lba).cloned() else { return Ok(()) };
            let unit = self.block_size().bytes() as usize;
            let both = buffer.segment(2 * unit);
            let (data, work) = (both.part(0, unit).expect("half of it"), both.part(unit, unit).expect("half of it"));
            self.submit_piece(cx.deeper(), Operation::Read, piece, &[data]).await?;
            let found = {
                let visit = self.sealer.visit();
                let force = visit.as_ref().ok_or(BlockError::NotReady)?;
                force.choose(lba, data, work, &records)
            };
            // Who reads one that has none of them is told.
            let found = found.or_else(|| self.not_erased(&records));
            let last = records.last().copied().unwrap_or(Record::LOST);
            self.end_doubt(lba);
            lock.change(&[found.unwrap_or(last)]);
            node.touch();
            return Ok(());
        }
    }

    async fn write(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let mut cursor = SegmentCursor::new(request.segments);
        let (mut lba, end) = (request.lba.0, request.lba.0 + request.count.0);
        while lba < end {
            let piece = Piece::first(lba, end, self.most());
            self.put(cx, request.operation, piece, Source::Guest(&cursor)).await?;
            cursor.skip((piece.count << self.block_size().shift()) as usize);
            lba += piece.count;
        }
        Ok(())
    }

    /// Makes blocks zeroes.
    async fn erase(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let fua = matches!(request.operation, Operation::WriteZeroes { fua: true, .. });
        let keep = matches!(request.operation, Operation::WriteZeroes { deallocate: false, .. });
        let (mut lba, end) = (request.lba.0, request.lba.0 + request.count.0);
        while lba < end {
            if !self.settled.discard {
                let piece = Piece::first(lba, end, self.most());
                self.put(cx, Operation::Write { fua }, piece, Source::HiddenZeroes).await?;
                lba += piece.count;
                continue;
            }
            let group = Piece::first(lba, end, FAN);
            let piece = Piece::first(lba, end, CHANGES as u64);
            if self.is_untouched(cx, lba).await? {
                lba += group.count;
                continue;
            }
            if fua || !self.is_zero(cx, piece).await? {
                let operation = Operation::WriteZeroes { fua, deallocate: !keep };
                self.put(cx, operation, piece, Source::Nothing).await?;
            }
            lba += piece.count;
        }
        self.look_again();
        Ok(())
    }

    /// Whether blocks are known to be zeroes.
    async fn is_zero(&self, cx: TaskContext<'_>, piece: Piece) -> Result<bool, BlockError> {
        let node = self.ready(cx, piece.lba).await?;
        Ok(piece.range().map(|at| node.look(at)).all(|seen| seen.record.is_zero() && !seen.locked && !seen.doubtful))
    }

    /// Gives blocks of one group other data.
    async fn put(
        &self,
        cx: TaskContext<'_>,
        operation: Operation,
        piece: Piece,
        source: Source<'_>,
    ) -> Result<(), BlockError> {
        loop {
            let node = self.ready(cx, piece.lba).await?;
            until(cx, || (!node.is_locked(piece.range())).then_some(())).await;
            let buffer = cx.buffers.take().await;
            let Some(lock) = Lock::take(node, piece.range()) else { continue };
            let all = buffer.segment(BUFFER_SIZE);
            let page = all.part(DATA, PAGE).expect("the end of the buffer");
            let bytes = if operation.has_data() { (piece.count << self.block_size().shift()) as usize } else { 0 };
            let data = buffer.segment(bytes);
            let new = self.seal_piece(cx, node, piece, source, data)?;
            let change = |number: usize| {
                let old = node.record(piece.range().start + number);
                Change { lba: piece.lba + number as u64, old, new: new[number] }
            };
            // Two levels down: who waits for the log's turn has a buffer of this level, and of the next if it is a copy's.
            let below = cx.deeper().deeper();
            let entered = match self.enter(below, page, new.len(), change).await? {
                Ok(entered) => entered,
                Err(full) => {
                    drop((lock, new, buffer));
                    self.save(cx, full).await?;
                    continue;
                }
            };
            self.commit(below, page, &entered).await?;
            let segments = [data];
            let segments = if operation.has_data() { &segments[..] } else { &[] };
            let result = self.submit_piece(cx.deeper(), operation, piece, segments).await;
            self.written(lock, piece, &new, result);
            drop(entered);
            return result;
        }
    }

    /// Seals what blocks are to hold, in the buffer, and says which records they have then.
    fn seal_piece<'a>(
        &self,
        cx: TaskContext<'a>,
        node: &Node,
        piece: Piece,
        source: Source<'_>,
        data: Segment,
    ) -> Result<ScratchBox<'a, [Record]>, BlockError> {
        let unit = self.block_size().bytes() as usize;
        match source {
            Source::Guest(cursor) => {
                cursor.clone().copy_to(data);
            }
            Source::HiddenZeroes => data.fill(0),
            Source::Nothing => {}
        }
        let visit = self.sealer.visit();
        let force = visit.as_ref().ok_or(BlockError::NotReady)?;
        Ok(cx.scratch.place_list(piece.count as usize, |number| {
            let old = node.record(piece.range().start + number);
            if matches!(source, Source::Nothing) {
                return old.zeroed();
            }
            let block = data.part(number * unit, unit).expect("a block of the piece");
            force.seal(piece.lba + number as u64, &old, block)
        }))
    }

    /// Puts changes into the queue of the log; `Err` with the epoch whose log is full.
    pub(super) async fn enter(
        &self,
        cx: TaskContext<'_>,
        page: Segment,
        count: usize,
        change: impl Fn(usize) -> Change,
    ) -> Result<Result<Entered<'_>, u64>, BlockError> {
        loop {
            match self.log.enter(count, &change) {
                Ok(entered) => return Ok(Ok(entered)),
                Err(Refused::Full(epoch)) => return Ok(Err(epoch)),
                Err(Refused::Queue) => {
                    let has_room = || self.log.has_room(count);
                    let turn = until(cx, || if has_room() { Some(None) } else { self.log.turn.try_take().map(Some) }).await;
                    if turn.is_some() {
                        self.write_log(cx, page).await?;
                    }
                }
            }
        }
    }

    /// Makes a writer's changes durable, with those of others who wait; or another one does so.
    pub(super) async fn commit(&self, cx: TaskContext<'_>, page: Segment, entered: &Entered<'_>) -> Result<(), BlockError> {
        let is_done = || self.log.is_durable(entered);
        while !is_done() {
            let turn = until(cx, || if is_done() { Some(None) } else { self.log.turn.try_take().map(Some) }).await;
            if turn.is_some() && !is_done() {
                self.write_log(cx, page).await?;
            }
        }
        Ok(())
    }

    /// Writes a page of the log. Whoever calls this has the turn.
    async fn write_log(&self, cx: TaskContext<'_>, page: Segment) -> Result<(), BlockError> {
        let filled = {
            let visit = self.sealer.visit();
            let force = visit.as_ref().ok_or(BlockError::NotReady)?;
            self.log.fill(&force.sealer, &force.uuid).map(|(out, bytes)| {
                page.write_at(0, &bytes);
                out
            })
        };
        let Some(out) = filled else { return Ok(()) };
        self.transfer(cx, Operation::Write { fua: true }, log_start(out.epoch, out.number), page).await?;
        self.log.written(out);
        Ok(())
    }

    /// A write has ended.
    pub(super) fn written(&self, lock: Lock<'_>, piece: Piece, new: &[Record], result: Result<(), BlockError>) {
        let (node, range) = (lock.node, piece.range());
        if result.is_ok() {
            if range.clone().any(|at| node.look(at).doubtful) {
                (piece.lba..piece.lba + piece.count).for_each(|lba| self.end_doubt(lba));
            }
            lock.change(new);
            node.touch();
            return;
        }
        // Its page says what it said before, and may lie where the leg fails, too: it need not be saved.
        // It may hold the old data or the new: the guest was told. Whoever reads it next finds out.
        let mut doubts = self.doubts();
        for ((lba, at), new) in (piece.lba..).zip(range).zip(new) {
            let records = doubts.entry(lba).or_insert_with(|| vec![node.record(at)]);
            // A guest that tries again writes the same.
            records.retain(|known| known != new);
            records.push(*new);
            if records.len() > CANDIDATES {
                // Or one that always writes something else. What had one of these, and came to pass all the same, cannot be read.
                records.remove(1);
            }
            node.doubt(at);
        }
    }
}

fn wait<'a>(cx: TaskContext<'a>, future: impl Future<Output = Result<(), BlockError>> + 'a) -> Step<'a> {
    let future: TaskFuture<'a> = cx.scratch.place_future(future);
    Step::Wait(future)
}

impl Volume for Authenticated {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        let shape = self.shape.load(Ordering::Relaxed);
        Geometry {
            block_size: self.block_size(),
            blocks: BlockCount(self.blocks.load(Ordering::Relaxed)),
            read_only: shape & 2 != 0,
            volatile_cache: shape & 4 != 0,
            deallocate: shape & 8 != 0 && self.settled.discard,
        }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let geometry = self.geometry();
        if let Err(error) = check(&geometry, &request) {
            return Step::Done(Err(error));
        }
        match request.operation {
            Operation::Flush => self.flushes.of_guest(cx.deeper(), &*self.leg, request),
            _ if request.count.0 == 0 => Step::Done(Ok(())),
            Operation::Read => wait(cx, self.read(cx, request)),
            Operation::Write { .. } => wait(cx, self.write(cx, request)),
            // It would leave the blocks as they are, or not: nobody knows.
            Operation::Deallocate if !geometry.deallocate => Step::Done(Ok(())),
            Operation::WriteZeroes { .. } | Operation::Deallocate => wait(cx, self.erase(cx, request)),
            Operation::Compare => wait(cx, compare_by_reading(self, cx, request)),
            Operation::Copy { .. } => wait(cx, copy_by_bounce(self, cx, request)),
        }
    }

    fn scratch_bytes(&self) -> usize {
        let futures = future_bytes(Self::read).max(future_bytes(Self::write)).max(future_bytes(Self::erase));
        let own = futures + CHANGES * size_of::<Record>() + placed_bytes::<Scratch>();
        let legs = self.leg.scratch_bytes().max(self.anchor.as_ref().map_or(0, Anchor::scratch_bytes));
        helpers_scratch_bytes(legs + own)
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.resize_to(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.erase_all(block_size)
    }

    fn usage(&self) -> Usage {
        self.leg.usage()
    }

    fn erases_by_key(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_not_had_gives_nobody_elses_away() {
        let table = Table::default();
        let node = table.need(super::super::page::Place { level: 0, number: 0 });
        let held = Lock::take(node, 5..9).expect("nobody has it");
        for range in [5..9, 0..6, 8..20] {
            assert!(Lock::take(node, range).is_none());
        }
        assert!((5..9).all(|at| node.is_locked(at..at + 1)) && !node.is_locked(0..5) && !node.is_locked(9..20));
        drop(held);
        assert!(!node.is_locked(0..20));
    }
}
