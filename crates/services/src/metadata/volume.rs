//! The path of a request. One that lies in several groups goes group by group.

use std::sync::{
    Arc, Mutex, Weak,
    atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Lba, METADATA_SIZE, Metadata, MetadataFormat, Operation, Request, Step,
    TaggedRequest, TaskContext, TaskFuture, Usage, Volume, VolumeError, check, check_tagged, copy_by_bounce, future_bytes,
    helpers_scratch_bytes, tagged_bytes,
};
use millrace_memory::{BUFFER_SIZE, BounceBuffer, Segment, SegmentCursor};

use super::{
    MetadataPlan,
    control::Control,
    load::Unread,
    page::{BLOCKS, Candidate, NO_TAG, block_start, blocks_in, checksum_of},
    table::{Group, Table},
};
use crate::{
    flushes::Flushes,
    legs::Leg,
    locks::until,
    pieces::{Map, Mapped, Place},
};

/// Largest block.
const BLOCK: usize = 4096;
/// Room for the future that ends a plain write which has started (the tests' harness finds out when it is too little).
const FINISH_BYTES: usize = 256;

/// Where blocks are.
pub(super) struct Groups {
    blocks: AtomicU64,
    block_size: AtomicU8,
}

impl Groups {
    fn block_size(&self) -> BlockSize {
        if self.block_size.load(Ordering::Relaxed) == BlockSize::B512 as u8 { BlockSize::B512 } else { BlockSize::B4096 }
    }
}

impl Map for Groups {
    fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    fn locate(&self, lba: u64) -> Place {
        let block_size = self.block_size();
        Place { leg: 0, lba: block_start(lba, block_size) >> block_size.shift(), run: BLOCKS - lba % BLOCKS }
    }

    fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    fn capacity(&self, legs: &[Leg]) -> u64 {
        blocks_in(legs[0].geometry().bytes(), self.block_size())
    }

    fn enlarge(&self, _: &str, legs: &[Leg], blocks: u64) -> Result<(), VolumeError> {
        legs[0].resize(BlockCount(block_start(blocks, self.block_size()) >> self.block_size().shift()))
    }

    fn formatted(&self, _: &[Leg], block_size: BlockSize) {
        self.block_size.store(block_size as u8, Ordering::Relaxed);
    }
}

/// The service.
pub(super) struct Tagged {
    /// For work of the control plane, which must own what it uses.
    pub(super) me: Weak<Self>,
    pub(super) plan: MetadataPlan,
    /// Bytes that stand at the leg in the stack.
    pub(super) stated: u64,
    /// The blocks, without metadata.
    pub(super) mapped: Mapped<Groups>,
    pub(super) table: Table,
    pub(super) flushes: Flushes,
    /// Guests wait for a change.
    pub(super) hurried: AtomicBool,
    /// Nothing was written since the leg was prepared or erased.
    pub(super) blank: AtomicBool,
    /// A format or an erasure ended half-way, or it did not come into force: no request is answered.
    pub(super) closed: AtomicBool,
    /// How metadata are shown ([`MetadataFormat::bits`]), or [`Self::HIDDEN`].
    pub(super) shown: AtomicU8,
    pub(super) control: Mutex<Control>,
    /// Blocks whose metadata were lost, since it came into force.
    pub(super) lost: AtomicU64,
}

/// What work on a group's pages is done with.
#[derive(Clone, Copy)]
pub(super) struct Means<'a> {
    /// For the leg: of the level below the buffer's.
    pub(super) cx: TaskContext<'a>,
    pub(super) buffer: &'a BounceBuffer,
}

/// A part of a request within one group.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) lba: u64,
    pub(super) count: u64,
}

impl Piece {
    /// The pieces of a range, of so many blocks at most.
    fn all(lba: Lba, count: BlockCount, most: u64) -> impl Iterator<Item = Self> {
        let (mut lba, end) = (lba.0, lba.0 + count.0);
        std::iter::from_fn(move || {
            let piece = Self { lba, count: (end - lba).min(BLOCKS - lba % BLOCKS).min(most) };
            lba += piece.count;
            (piece.count > 0).then_some(piece)
        })
    }

    fn group(self) -> u64 {
        self.lba / BLOCKS
    }

    /// The first block, counted from the group's first.
    fn at(self) -> u64 {
        self.lba % BLOCKS
    }

    /// Its blocks, counted from the group's first.
    fn places(self) -> std::ops::Range<u64> {
        self.at()..self.at() + self.count
    }
}

impl Tagged {
    pub(super) const HIDDEN: u8 = 0xff;

    pub(super) fn new(name: String, (leg, stated): (Leg, u64), blocks: u64, plan: MetadataPlan) -> Arc<Self> {
        let block_size = leg.geometry().block_size;
        let groups = Groups { blocks: AtomicU64::new(blocks), block_size: AtomicU8::new(block_size as u8) };
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            plan,
            stated,
            mapped: Mapped::new(name, vec![leg], groups, block_size),
            table: Table::default(),
            flushes: Flushes::default(),
            hurried: AtomicBool::new(false),
            blank: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            shown: AtomicU8::new(plan.format.bits()),
            control: Mutex::default(),
            lost: AtomicU64::new(0),
        })
    }

    pub(super) fn leg(&self) -> &Leg {
        &self.mapped.legs()[0]
    }

    pub(super) fn block_size(&self) -> BlockSize {
        self.mapped.map().block_size()
    }

    pub(super) fn blocks(&self) -> u64 {
        self.mapped.map().blocks()
    }

    /// A request for blocks of one group, at the leg.
    pub(super) async fn move_blocks(
        &self,
        cx: TaskContext<'_>,
        operation: Operation,
        piece: Piece,
        data: &[Segment],
    ) -> Result<(), BlockError> {
        let (lba, count) = (Lba(self.mapped.map().locate(piece.lba).lba), BlockCount(piece.count));
        // One of several: what it leaves in the scratch goes with its arena.
        let arena = cx.scratch.carve_rest();
        self.leg().submit(cx.with_scratch(&arena), Request { operation, lba, count, segments: data }).await
    }

    /// The checksum of a block that lies in memory of ours.
    pub(super) fn checksum_at(&self, data: Segment, number: u64) -> u32 {
        let (mut block, unit) = ([0; BLOCK], self.block_size().bytes() as usize);
        data.read_at(number as usize * unit, &mut block[..unit]);
        checksum_of(&block[..unit])
    }

    // ---- changes --------------------------------------------------------------------------------------------------------------

    fn write<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let piece = Piece { lba: request.lba.0, count: request.count.0 };
        let group = self.table.get(piece.group()).filter(|group| group.is_ready());
        let Some(group) = group.filter(|_| piece.at() + piece.count <= BLOCKS) else {
            return wait(cx, self.write_slowly(cx, request));
        };
        if !group.try_lock(piece.at(), piece.count) {
            return wait(cx, self.write_slowly(cx, request));
        }
        if !group.is_plain(piece.at(), piece.count) {
            group.unlock(piece.at(), piece.count);
            return wait(cx, self.write_slowly(cx, request));
        }
        self.not_blank();
        match self.mapped.submit(below(cx), request) {
            Step::Done(result) => {
                group.unlock(piece.at(), piece.count);
                Step::Done(result)
            }
            Step::Wait(step) => wait(cx, async move {
                let result = step.await;
                group.unlock(piece.at(), piece.count);
                result
            }),
        }
    }

    fn not_blank(&self) {
        if self.blank.load(Ordering::Relaxed) {
            self.blank.store(false, Ordering::Relaxed);
        }
    }

    /// A write without metadata by way of a buffer: what the checksum is of is what is written.
    async fn write_slowly(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let shift = self.block_size().shift();
        let mut cursor = SegmentCursor::new(request.segments);
        for piece in Piece::all(request.lba, request.count, BUFFER_SIZE as u64 >> shift) {
            let buffer = cx.buffers.take().await;
            let data = buffer.segment((piece.count << shift) as usize);
            cursor.copy_to(data);
            self.change(cx.deeper(), piece, request.operation, Some(data), None).await?;
        }
        Ok(())
    }

    async fn write_tagged(&self, cx: TaskContext<'_>, request: TaggedRequest) -> Result<(), BlockError> {
        for piece in Piece::all(request.lba, request.count, u64::MAX) {
            let (data, metadata) = self.parts(&request, piece);
            self.change(cx, piece, request.operation, Some(data), Some(metadata)).await?;
        }
        Ok(())
    }

    /// A piece's part of a request's memory.
    fn parts(&self, request: &TaggedRequest, piece: Piece) -> (Segment, Segment) {
        let part = |all: Segment, unit: usize| {
            let part = all.part((piece.lba - request.lba.0) as usize * unit, piece.count as usize * unit);
            part.expect("a piece lies within its request")
        };
        (part(request.data, self.block_size().bytes() as usize), part(request.metadata, METADATA_SIZE))
    }

    /// Makes blocks zeroes.
    async fn erase(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        // What may be ignored would leave old data where zeroes are promised.
        let operation = match request.operation {
            Operation::Deallocate => Operation::WriteZeroes { fua: false, deallocate: true },
            other => other,
        };
        for piece in Piece::all(request.lba, request.count, u64::MAX) {
            self.change(cx.deeper(), piece, operation, None, None).await?;
        }
        // The attempt may have shown that the leg cannot deallocate.
        self.mapped.look_anew(self.block_size());
        Ok(())
    }

    /// Changes blocks of one group. `data` are memory of ours, and `None` for zeroes; without `tags` the blocks have none after it.
    async fn change(
        &self,
        cx: TaskContext<'_>,
        piece: Piece,
        operation: Operation,
        data: Option<Segment>,
        tags: Option<Segment>,
    ) -> Result<(), BlockError> {
        self.not_blank();
        let group = self.ready(cx, piece.group(), Unread::IsLost).await?;
        let buffer = loop {
            // Before the locks: who waits for these has no buffer, but others may.
            let buffer = cx.buffers.take().await;
            if group.try_lock(piece.at(), piece.count) {
                break buffer;
            }
            drop(buffer);
            until(cx, || group.version(piece.at(), piece.count)).await;
        };
        let means = Means { cx: cx.deeper(), buffer: &buffer };
        let result = self.change_locked(means, group, piece, operation, data, tags).await;
        group.unlock(piece.at(), piece.count);
        result
    }

    async fn change_locked(
        &self,
        means: Means<'_>,
        group: &Group,
        piece: Piece,
        operation: Operation,
        data: Option<Segment>,
        tags: Option<Segment>,
    ) -> Result<(), BlockError> {
        match self.settle_doubts(means, group, piece).await {
            // What cannot be read is about to be written.
            Err(BlockError::ReadFault { .. }) => piece.places().for_each(|at| group.trust(at)),
            result => result?,
        }
        let plain = tags.is_none() && group.is_plain(piece.at(), piece.count);
        if !plain {
            self.offer(group, piece, data, tags);
            if let Err(error) = self.commit(means, piece.group(), group).await {
                piece.places().for_each(|at| group.withdraw(at));
                return Err(error);
            }
        }
        let data = data.as_slice();
        let result = self.move_blocks(means.cx, operation, piece, data).await;
        if result.is_err() && !plain {
            piece.places().for_each(|at| group.doubt(at));
        }
        result
    }

    /// Puts the new metadata into the table, with the checksums of the data to which they belong.
    fn offer(&self, group: &Group, piece: Piece, data: Option<Segment>, tags: Option<Segment>) {
        let zeroes = [0; BLOCK];
        for number in 0..piece.count {
            let checksum = match data {
                Some(data) => self.checksum_at(data, number),
                None => checksum_of(&zeroes[..self.block_size().bytes() as usize]),
            };
            let tag = tags.map_or(NO_TAG, |tags| {
                let mut tag = [0; METADATA_SIZE];
                tags.read_at(number as usize * METADATA_SIZE, &mut tag);
                u64::from_le_bytes(tag)
            });
            group.offer(piece.at() + number, Candidate::Value { tag, checksum });
        }
    }

    /// Finds out what blocks hold of which a write failed; they are locked.
    async fn settle_doubts(&self, means: Means<'_>, group: &Group, piece: Piece) -> Result<(), BlockError> {
        for at in piece.places().filter(|at| group.is_doubtful(*at)) {
            let one = Piece { lba: piece.lba - piece.at() + at, count: 1 };
            let segments = [means.buffer.segment(self.block_size().bytes() as usize)];
            self.move_blocks(means.cx, Operation::Read, one, &segments).await?;
            group.resolve(at, self.checksum_at(segments[0], 0));
        }
        Ok(())
    }

    // ---- reads ----------------------------------------------------------------------------------------------------------------

    async fn read_tagged(&self, cx: TaskContext<'_>, request: TaggedRequest) -> Result<(), BlockError> {
        for piece in Piece::all(request.lba, request.count, u64::MAX) {
            let group = self.ready(cx, piece.group(), Unread::Fails).await?;
            let (data, metadata) = self.parts(&request, piece);
            loop {
                let before = until(cx, || group.version(piece.at(), piece.count)).await;
                if piece.places().any(|at| group.is_doubtful(at)) {
                    self.clear_up(cx, group, piece).await?;
                    continue;
                }
                self.move_blocks(cx.deeper(), Operation::Read, piece, &[data]).await?;
                let found = read_tags(group, piece, metadata);
                // A write that came between may have changed either.
                if group.version(piece.at(), piece.count) == Some(before) {
                    found?;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Finds out what blocks hold of which a write failed.
    async fn clear_up(&self, cx: TaskContext<'_>, group: &Group, piece: Piece) -> Result<(), BlockError> {
        let buffer = cx.buffers.take().await;
        if !group.try_lock(piece.at(), piece.count) {
            return Ok(());
        }
        let result = self.settle_doubts(Means { cx: cx.deeper(), buffer: &buffer }, group, piece).await;
        group.unlock(piece.at(), piece.count);
        result
    }
}

/// Copies blocks' metadata from the table.
fn read_tags(group: &Group, piece: Piece, out: Segment) -> Result<(), BlockError> {
    for (number, at) in piece.places().enumerate() {
        let tag = match group.entry(at).newest {
            Candidate::Value { tag, .. } => tag,
            Candidate::Absent => NO_TAG,
            Candidate::Lost => return Err(BlockError::ReadFault { errno: 0 }),
        };
        out.write_at(number * METADATA_SIZE, &tag.to_le_bytes());
    }
    Ok(())
}

/// What a plain request has at the leg, two levels down: a copy waits for blocks with two buffers in its hands. (One with metadata has come a
/// level deeper.)
#[inline]
fn below(cx: TaskContext<'_>) -> TaskContext<'_> {
    cx.deeper().deeper()
}

fn wait<'a>(cx: TaskContext<'a>, future: impl Future<Output = Result<(), BlockError>> + 'a) -> Step<'a> {
    let future: TaskFuture<'a> = cx.scratch.place_future(future);
    Step::Wait(future)
}

impl Volume for Tagged {
    fn name(&self) -> &str {
        self.mapped.name()
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        self.mapped.geometry()
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
            Operation::Flush => self.flushes.of_guest(below(cx), &**self.leg(), request),
            _ if request.count.0 == 0 => Step::Done(Ok(())),
            Operation::Read | Operation::Compare => self.mapped.submit(below(cx), request),
            Operation::Write { .. } => self.write(cx, request),
            // It would leave the blocks as they are, or not: nobody knows.
            Operation::Deallocate if !geometry.deallocate => Step::Done(Ok(())),
            Operation::WriteZeroes { .. } | Operation::Deallocate => wait(cx, self.erase(cx, request)),
            Operation::Copy { .. } => wait(cx, copy_by_bounce(self, cx, request)),
        }
    }

    fn metadata(&self) -> Metadata {
        match self.shown.load(Ordering::Relaxed) {
            Self::HIDDEN => Metadata::Hidden,
            bits => MetadataFormat::from_bits(bits).map_or(Metadata::Hidden, Metadata::Shown),
        }
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        if let Err(error) = check_tagged(&self.geometry(), &request) {
            return Step::Done(Err(error));
        }
        if self.closed.load(Ordering::Relaxed) {
            return Step::Done(Err(BlockError::NotReady));
        }
        if request.operation.is_write() {
            wait(cx, self.write_tagged(cx, request))
        } else {
            wait(cx, self.read_tagged(cx, request))
        }
    }

    fn format_metadata(&self, format: Option<MetadataFormat>) -> Result<(), VolumeError> {
        self.show(format)
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        let lba = if lba.0 < self.blocks() { lba.0 } else { 0 };
        self.leg().prefetch(Lba(self.mapped.map().locate(lba).lba), count)
    }

    fn scratch_bytes(&self) -> usize {
        let slow = future_bytes(Self::write_slowly).max(future_bytes(Self::erase));
        let tagged = tagged_bytes(Self::write_tagged).max(tagged_bytes(Self::read_tagged));
        let own = self.leg().scratch_bytes() + slow.max(tagged) + size_of::<millrace_block::Scratch>();
        helpers_scratch_bytes(own.max(self.mapped.scratch_bytes() + FINISH_BYTES))
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.resize_to(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.erase_all(block_size)
    }

    fn usage(&self) -> Usage {
        // The header is not the volume's: a mirror takes blank legs for equal ones.
        if self.blank.load(Ordering::Relaxed) { Usage::default() } else { self.leg().usage() }
    }

    fn erases_by_key(&self) -> bool {
        self.leg().erases_by_key()
    }
}
