//! The path of a request. A request that lies in several groups goes group by group.

use std::sync::{
    Arc, Mutex, Weak,
    atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Held, Lba, Operation, Request, Scratch, Step, TaskContext, TaskFuture,
    Usage, Volume, VolumeError, check, compare_by_reading, copy_by_bounce, future_bytes, held_bytes, helpers_scratch_bytes,
    submit_held,
};
use millrace_memory::{
    Access, BUFFER_SIZE, BounceBuffer, DESK_SIZE, Desk, Lent, Segment, SegmentCursor, Target, settle_streams,
};

use super::{
    IntegrityPlan,
    control::Control,
    entry::{self, LOCKED, LOST, UNKNOWN, ZERO},
    page::{BLOCKS, block_start},
    table::{Group, State, Table},
};
use crate::{
    flushes::Flushes,
    legs::Leg,
    locks::{Turn, until},
    told::is_told,
};

/// Room for the futures that finish a request which has started (the tests' harness finds out when it is too little).
const FINISH_BYTES: usize = 384;

/// The service.
pub(super) struct Integrity {
    /// For work of the control plane, which must own what it uses.
    pub(super) me: Weak<Self>,
    pub(super) name: String,
    pub(super) leg: Leg,
    /// Bytes that stand at the leg in the stack.
    pub(super) stated: u64,
    pub(super) plan: IntegrityPlan,
    pub(super) blocks: AtomicU64,
    /// Block size and abilities, so that a request need not ask the leg.
    shape: AtomicU8,
    pub(super) table: Table,
    pub(super) flushes: Flushes,
    /// Nothing was written since the leg was prepared or erased: all blocks are zeroes.
    pub(super) blank: AtomicBool,
    /// A format or an erasure ended half-way, or it could not come into force: no request is answered.
    pub(super) closed: AtomicBool,
    /// Work on all of the volume at once: the background task's, or the operator's.
    pub(super) turn: Turn,
    pub(super) control: Mutex<Control>,
    /// Blocks that did not match, and that had lost their checksums, since it came into force.
    pub(super) mismatches: AtomicU64,
    /// Blocks whose checksums were made anew after a crash.
    pub(super) adopted: AtomicU64,
    /// Blocks that could not be read then.
    pub(super) unread: AtomicU64,
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
    /// The first block, counted from the group's first.
    pub(super) fn at(self) -> u64 {
        self.lba % BLOCKS
    }

    /// It in parts that a desk has room for.
    fn desks(self, block_size: BlockSize) -> impl Iterator<Item = Self> {
        let (step, end) = (DESK_SIZE as u64 >> block_size.shift(), self.lba + self.count);
        (self.lba..end).step_by(step as usize).map(move |lba| Self { lba, count: step.min(end - lba) })
    }

    /// The memory of this part of a whole, of which the whole's is given.
    #[inline]
    fn of(self, whole: Self, memory: Lent<'_>, block_size: BlockSize) -> Lent<'_> {
        let [at, len] = [self.lba - whole.lba, self.count].map(|blocks| (blocks << block_size.shift()) as usize);
        memory.part(at, len).expect("a part of what was asked for")
    }
}

impl Integrity {
    pub(super) fn new(name: String, (leg, stated): (Leg, u64), blocks: u64, plan: IntegrityPlan) -> Arc<Self> {
        let shape = AtomicU8::new(pack(&leg.geometry()));
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            name,
            leg,
            stated,
            plan,
            blocks: AtomicU64::new(blocks),
            shape,
            table: Table::default(),
            flushes: Flushes::default(),
            blank: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            turn: Turn::default(),
            control: Mutex::default(),
            mismatches: AtomicU64::new(0),
            adopted: AtomicU64::new(0),
            unread: AtomicU64::new(0),
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

    /// A request for blocks of one group, as the leg gets it.
    fn below<'r>(&self, request: &Request<'r>) -> Request<'r> {
        let block_size = self.block_size();
        Request { lba: Lba(block_start(request.lba.0, block_size) >> block_size.shift()), ..request.clone() }
    }

    /// Compares blocks with their checksums: `Err` has the first one that does not match, or that somebody writes.
    fn look_at(&self, group: &Group, piece: Piece, segments: &[Segment]) -> Result<(), u64> {
        let block_size = self.block_size();
        let (mut cursor, mut desk) = (SegmentCursor::new(segments), Desk::new());
        piece.desks(block_size).try_for_each(|part| {
            let data = desk.load(&mut cursor, (part.count << block_size.shift()) as usize);
            compare(group, part, data, block_size)
        })
    }

    /// A read where the leg is memory: each block is loaded once, compared, and delivered if it is well. Whether all are.
    fn read_at_once(&self, group: &Group, piece: Piece, request: &Request<'_>) -> Option<bool> {
        let block_size = self.block_size();
        let below = self.below(request);
        let reach = self.leg.reach(below.lba, below.count, Access::Read)?;
        let (mut desk, mut to) = (Desk::new(), SegmentCursor::new(request.segments));
        Some(piece.desks(block_size).all(|part| {
            let data = desk.load_all(part.of(piece, reach.segment, block_size));
            let is_well = compare(group, part, data, block_size).is_ok();
            if is_well {
                desk.store(&mut to, Target::Guest);
            }
            is_well
        }))
    }

    /// A write where the leg is memory and nobody is in the way: each block is loaded once, written, and its checksum made while that is
    /// under way. Whether it was.
    fn write_at_once(&self, group: &Group, piece: Piece, request: &Request<'_>) -> bool {
        let block_size = self.block_size();
        let below = self.below(request);
        let Some(reach) = self.leg.reach(below.lba, below.count, Access::Write) else { return false };
        if !lock_now(group, piece) {
            return false;
        }
        let (mut desk, mut from) = (Desk::new(), SegmentCursor::new(request.segments));
        for part in piece.desks(block_size) {
            desk.load(&mut from, (part.count << block_size.shift()) as usize);
            desk.store_all(part.of(piece, reach.segment, block_size), reach.target);
            note_next(group, part, desk.bytes(), block_size);
        }
        self.leg.reached(below.lba, below.count);
        // The entries are ordinary stores, by which others learn that the data are there.
        settle_streams();
        group.unlock_noted(piece.at(), piece.count);
        touch(group);
        true
    }

    fn read<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let piece = Piece { lba: request.lba.0, count: request.count.0 };
        let group = self.table.get(piece.lba / BLOCKS).filter(|group| group.state() != State::Unread);
        let Some(group) = group.filter(|_| piece.at() + piece.count <= BLOCKS) else {
            return wait(cx, self.read_slowly(cx, request));
        };
        match self.read_at_once(group, piece, &request) {
            Some(true) => return Step::Done(Ok(())),
            Some(false) => return wait(cx, self.read_slowly(cx, request)),
            None => {}
        }
        match self.leg.submit(cx.deeper(), self.below(&request)) {
            Step::Done(Ok(())) if self.look_at(group, piece, request.segments).is_ok() => Step::Done(Ok(())),
            Step::Done(Ok(())) => wait(cx, self.read_slowly(cx, request)),
            Step::Done(error) => Step::Done(noted(group, error)),
            Step::Wait(step) => wait(cx, self.finish_read(cx, group, request, step)),
        }
    }

    /// Does the first of these where the leg is memory; whether it did.
    #[inline]
    fn do_at_once(&self, geometry: &Geometry, requests: &[Request<'_>]) -> bool {
        let request = &requests[0];
        let piece = Piece { lba: request.lba.0, count: request.count.0 };
        if check(geometry, request).is_err() || self.closed.load(Ordering::Relaxed) || piece.at() + piece.count > BLOCKS {
            return false;
        }
        let Some(group) = self.table.get(piece.lba / BLOCKS) else { return false };
        match request.operation {
            Operation::Read => {
                if let Some(next) = requests.get(1).filter(|next| next.operation == Operation::Read) {
                    self.prefetch(next.lba, next.count);
                }
                group.state() != State::Unread && self.read_at_once(group, piece, request) == Some(true)
            }
            Operation::Write { .. } => {
                let is_short = millrace_memory::total_len(request.segments) <= BUFFER_SIZE;
                is_short && group.state() == State::Open && self.write_at_once(group, piece, request)
            }
            _ => false,
        }
    }

    async fn finish_read(
        &self,
        cx: TaskContext<'_>,
        group: &Group,
        request: Request<'_>,
        step: TaskFuture<'_>,
    ) -> Result<(), BlockError> {
        noted(group, step.await)?;
        let piece = Piece { lba: request.lba.0, count: request.count.0 };
        match self.look_at(group, piece, request.segments) {
            Ok(()) => Ok(()),
            Err(_) => self.read_slowly(cx, request).await,
        }
    }

    /// A read by way of a buffer: what is checked there is what is delivered.
    async fn read_slowly(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let shift = self.block_size().shift();
        let mut cursor = SegmentCursor::new(request.segments);
        let (mut lba, end) = (request.lba.0, request.lba.0 + request.count.0);
        while lba < end {
            let count = (end - lba).min(BLOCKS - lba % BLOCKS).min(BUFFER_SIZE as u64 >> shift);
            let group = self.ready(cx, lba / BLOCKS).await?;
            self.read_checked(cx, group, Piece { lba, count }, &mut cursor).await?;
            lba += count;
        }
        Ok(())
    }

    /// Reads blocks of one group, until they match or it is sure that one does not.
    async fn read_checked(
        &self,
        cx: TaskContext<'_>,
        group: &Group,
        piece: Piece,
        out: &mut SegmentCursor<'_>,
    ) -> Result<(), BlockError> {
        let shift = self.block_size().shift();
        loop {
            writers_gone(cx, group, piece).await;
            let buffer = cx.buffers.take().await;
            let segments = [buffer.segment((piece.count << shift) as usize)];
            noted(group, self.read_leg(cx.deeper(), piece, &segments).await)?;
            let Err(lba) = self.look_at(group, piece, &segments) else {
                out.copy_from(segments[0]);
                return Ok(());
            };
            // Once more, alone: it may have been written meanwhile, or come over badly. Nobody writes it now: an entry may be the same
            // before a write and after an erasure.
            let (one, segments) = (Piece { lba, count: 1 }, [buffer.segment(1 << shift)]);
            if group.lock(one.at(), 1) == 0 {
                continue;
            }
            let known = group.entry(one.at()) & !LOCKED;
            let result = self.read_leg(cx.deeper(), one, &segments).await;
            let is_wrong = result.is_ok() && !is_good(known, lba, segments[0]);
            group.unlock(one.at(), 1);
            noted(group, result)?;
            if is_wrong {
                group.suspect();
                self.report(lba, known);
                return Err(BlockError::ReadFault { errno: 0 });
            }
        }
    }

    async fn read_leg(&self, cx: TaskContext<'_>, piece: Piece, segments: &[Segment]) -> Result<(), BlockError> {
        let (lba, count) = (Lba(piece.lba), BlockCount(piece.count));
        let request = Request { operation: Operation::Read, lba, count, segments };
        self.submit_one(cx, request).await
    }

    /// One of several requests to the leg that follow each other: what it leaves in the scratch goes with its arena.
    async fn submit_one(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let arena = cx.scratch.carve_rest();
        self.leg.submit(cx.with_scratch(&arena), self.below(&request)).await
    }

    /// A block is not what it should be.
    fn report(&self, lba: u64, known: u64) {
        let count = self.mismatches.fetch_add(1, Ordering::Relaxed) + 1;
        if is_told(count) {
            let what = if known == LOST { "its checksum is lost" } else { "it does not match its checksum" };
            tracing::error!(volume = self.name, leg = self.leg.name(), lba, count, "a block cannot be trusted: {what}");
        }
    }

    fn write<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let piece = Piece { lba: request.lba.0, count: request.count.0 };
        let len = millrace_memory::total_len(request.segments);
        let group = self.table.get(piece.lba / BLOCKS).filter(|group| group.state() == State::Open);
        let fits = piece.at() + piece.count <= BLOCKS && len <= BUFFER_SIZE;
        if let Some(group) = group.filter(|_| fits)
            && self.write_at_once(group, piece, &request)
        {
            return Step::Done(Ok(()));
        }
        let Some((group, buffer)) = group.filter(|_| fits).and_then(|group| Some((group, cx.buffers.try_take()?))) else {
            return wait(cx, self.write_slowly(cx, request));
        };
        if !lock_now(group, piece) {
            drop(buffer);
            return wait(cx, self.write_slowly(cx, request));
        }
        let data = buffer.segment(len);
        SegmentCursor::new(request.segments).copy_to(data);
        let held = submit_held(&*self.leg, cx.deeper(), &self.below(&request), &[data]);
        match held.done() {
            Some(result) => {
                self.written(group, piece, data, result);
                Step::Done(result)
            }
            None => wait(cx, self.finish_write(group, piece, buffer, held)),
        }
    }

    async fn finish_write(
        &self,
        group: &Group,
        piece: Piece,
        buffer: BounceBuffer,
        held: Held<'_>,
    ) -> Result<(), BlockError> {
        let result = held.await;
        let len = (piece.count as usize) << self.block_size().shift();
        self.written(group, piece, buffer.segment(len), result);
        result
    }

    /// A write has ended: records its checksums, and gives the locks back.
    fn written(&self, group: &Group, piece: Piece, data: Segment, result: Result<(), BlockError>) {
        let block_size = self.block_size();
        let (data, mut desk) = ([data], Desk::new());
        let mut cursor = SegmentCursor::new(&data);
        for part in piece.desks(block_size) {
            if result.is_ok() {
                let data = desk.load(&mut cursor, (part.count << block_size.shift()) as usize);
                note_next(group, part, data, block_size);
            } else {
                // It may hold the old data, the new, or anything: the guest was told.
                (0..part.count).for_each(|number| group.note(part.at() + number, UNKNOWN));
            }
        }
        settle_streams();
        group.unlock_noted(piece.at(), piece.count);
        touch(group);
    }

    /// A write that is long, goes to a group that is not open, or meets another.
    async fn write_slowly(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let shift = self.block_size().shift();
        let mut cursor = SegmentCursor::new(request.segments);
        let (mut lba, end) = (request.lba.0, request.lba.0 + request.count.0);
        while lba < end {
            let count = (end - lba).min(BLOCKS - lba % BLOCKS).min(BUFFER_SIZE as u64 >> shift);
            let piece = Piece { lba, count };
            let (group, buffer) = loop {
                let group = self.open(cx, lba / BLOCKS).await?;
                // Before the locks: who waits for these has no buffer, but others may.
                let buffer = cx.buffers.take().await;
                if lock_now(group, piece) {
                    break (group, buffer);
                }
                drop(buffer);
                writers_gone(cx, group, piece).await;
            };
            let segments = [buffer.segment((count << shift) as usize)];
            cursor.copy_to(segments[0]);
            let part =
                Request { operation: request.operation, lba: Lba(lba), count: BlockCount(count), segments: &segments };
            let result = self.submit_one(cx.deeper(), part).await;
            self.written(group, piece, segments[0], result);
            result?;
            lba += count;
        }
        Ok(())
    }

    /// Locks the entries of blocks in a group that is open then.
    async fn lock(&self, cx: TaskContext<'_>, piece: Piece) -> Result<&Group, BlockError> {
        loop {
            let group = self.open(cx, piece.lba / BLOCKS).await?;
            if lock_now(group, piece) {
                return Ok(group);
            }
            writers_gone(cx, group, piece).await;
        }
    }

    /// Makes blocks zeroes.
    async fn erase(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        // What may be ignored would leave old data where zeroes are promised.
        let operation = match request.operation {
            Operation::Deallocate => Operation::WriteZeroes { fua: false, deallocate: true },
            other => other,
        };
        let (mut lba, end) = (request.lba.0, request.lba.0 + request.count.0);
        while lba < end {
            let piece = Piece { lba, count: (end - lba).min(BLOCKS - lba % BLOCKS) };
            lba += piece.count;
            if self.is_zero(cx, piece).await? && !is_forced(request.operation) {
                continue;
            }
            let group = self.lock(cx, piece).await?;
            let part = Request { operation, lba: Lba(piece.lba), count: BlockCount(piece.count), ..request };
            // Deeper, as all that goes to the leg under a lock: those who wait for it may have this level's buffers.
            let result = self.submit_one(cx.deeper(), part).await;
            let after = if result.is_ok() { ZERO } else { UNKNOWN };
            for at in 0..piece.count {
                group.set(piece.at() + at, after);
            }
            touch(group);
            result?;
        }
        self.look_again();
        Ok(())
    }

    /// Whether blocks are known to be zeroes, and nothing was found that speaks against it.
    async fn is_zero(&self, cx: TaskContext<'_>, piece: Piece) -> Result<bool, BlockError> {
        let group = self.ready(cx, piece.lba / BLOCKS).await?;
        Ok(!group.is_suspect() && (0..piece.count).all(|at| group.entry(piece.at() + at) == ZERO))
    }
}

/// What became of a read; one that failed is noted, so that an erasure of what was read is not left out.
fn noted(group: &Group, read: Result<(), BlockError>) -> Result<(), BlockError> {
    read.inspect_err(|_| group.suspect())
}

/// Whether a block in memory of ours is what an entry that is not locked says.
fn is_good(known: u64, lba: u64, data: Segment) -> bool {
    entry::matches(known, lba, Desk::new().load(&mut SegmentCursor::new(&[data]), data.len()))
}

/// Compares blocks with their checksums: `Err` has the first one that does not match, or that somebody writes.
#[inline]
fn compare(group: &Group, part: Piece, data: &[u8], block_size: BlockSize) -> Result<(), u64> {
    for (number, block) in (0..).zip(data.chunks_exact(block_size.bytes() as usize)) {
        let (lba, known) = (part.lba + number, group.entry(part.at() + number));
        if known & LOCKED != 0 || !entry::matches(known, lba, block) {
            return Err(lba);
        }
    }
    Ok(())
}

/// Notes the next checksums of blocks that are locked.
#[inline]
fn note_next(group: &Group, part: Piece, data: &[u8], block_size: BlockSize) {
    for (number, block) in (0..).zip(data.chunks_exact(block_size.bytes() as usize)) {
        let at = part.at() + number;
        group.note(at, entry::next(group.entry(at), part.lba + number, block));
    }
}

/// Waits until nobody writes these blocks.
async fn writers_gone(cx: TaskContext<'_>, group: &Group, piece: Piece) {
    until(cx, || (!group.is_locked(piece.at(), piece.count)).then_some(())).await;
}

/// Locks entries without waiting, or none of them; the group is open then.
fn lock_now(group: &Group, piece: Piece) -> bool {
    let locked = group.lock(piece.at(), piece.count);
    if locked == piece.count && group.state() == State::Open {
        return true;
    }
    group.unlock(piece.at(), locked);
    false
}

fn touch(group: &Group) {
    if !group.touched.load(Ordering::Relaxed) {
        group.touched.store(true, Ordering::Relaxed);
    }
}

/// Whether an erasure makes durable what may not be, though it changes nothing.
fn is_forced(operation: Operation) -> bool {
    matches!(operation, Operation::WriteZeroes { fua: true, .. })
}

fn wait<'a>(cx: TaskContext<'a>, future: impl Future<Output = Result<(), BlockError>> + 'a) -> Step<'a> {
    let future: TaskFuture<'a> = cx.scratch.place_future(future);
    Step::Wait(future)
}

impl Volume for Integrity {
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
            deallocate: shape & 8 != 0,
        }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let geometry = self.geometry();
        if let Err(error) = check(&geometry, &request) {
            return Step::Done(Err(error));
        }
        if self.closed.load(Ordering::Relaxed) {
            return Step::Done(Err(BlockError::NotReady));
        }
        match request.operation {
            Operation::Flush => self.flushes.of_guest(cx.deeper(), &*self.leg, request),
            _ if request.count.0 == 0 => Step::Done(Ok(())),
            Operation::Read => self.read(cx, request),
            Operation::Write { .. } => self.write(cx, request),
            // It would leave the blocks as they are, or not: nobody knows.
            Operation::Deallocate if !geometry.deallocate => Step::Done(Ok(())),
            Operation::WriteZeroes { .. } | Operation::Deallocate => wait(cx, self.erase(cx, request)),
            Operation::Compare => wait(cx, compare_by_reading(self, cx, request)),
            Operation::Copy { .. } => wait(cx, copy_by_bounce(self, cx, request)),
        }
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let geometry = self.geometry();
        (0..requests.len()).take_while(|at| self.do_at_once(&geometry, &requests[*at..])).count()
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        let block_size = self.block_size();
        // It is not checked; beyond the end of what there is, nothing comes of it.
        let lba = if lba.0 < self.blocks.load(Ordering::Relaxed) { block_start(lba.0, block_size) } else { 0 };
        self.leg.prefetch(Lba(lba >> block_size.shift()), count)
    }

    fn scratch_bytes(&self) -> usize {
        let slow = future_bytes(Self::read_slowly).max(future_bytes(Self::write_slowly)).max(future_bytes(Self::erase));
        let leg = size_of::<Scratch>() + self.leg.scratch_bytes();
        helpers_scratch_bytes(leg + slow + held_bytes(1) + FINISH_BYTES)
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.resize_to(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.erase_all(block_size)
    }

    fn usage(&self) -> Usage {
        // The header is not the volume's: a mirror takes blank legs for equal ones.
        if self.blank.load(Ordering::Relaxed) { Usage::default() } else { self.leg.usage() }
    }

    fn erases_by_key(&self) -> bool {
        self.leg.erases_by_key()
    }
}
