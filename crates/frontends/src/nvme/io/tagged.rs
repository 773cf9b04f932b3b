//! Commands on namespaces with metadata: blocks and metadata go by way of a buffer of the shard's, where protection information is
//! checked, inserted and stripped.
//!
//! ```text
//!   write:  guest ─ copied once ─► buffer: blocks │ metadata ─► checked, or made (PRACT) ─► Volume::submit_tagged
//!   read:   Volume::submit_tagged ─► buffer ─► checked ─► guest, with the metadata or without (PRACT)
//! ```
//!
//! What is checked is what is written and what is delivered, whatever the guest does to its memory meanwhile. A write of several
//! buffers is checked as a whole before the first of them goes to the volume, so that one which fails its check changes nothing.

use std::rc::Rc;

use millrace_block::{
    BlockCount, BlockError, Geometry, Lba, METADATA_SIZE, Metadata, MetadataFormat, Operation, Request, TaggedRequest,
    TaskContext, yield_now,
};
use millrace_engine::TaskSlot;
use millrace_memory::{Access, BUFFER_SIZE, BounceBuffer, Segment, SegmentCursor};
use millrace_nvme_spec::{
    command::Sqe,
    log::ParameterErrorLocation as Location,
    nvm::{ProtectionTuple, ReadWriteCdw12},
    opcode::NvmOpcode,
    status::Status,
};

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        data,
        namespace::{Attached, Namespace},
        reservation::{HostKey, Rights},
        status::Completion,
    },
    Blocks, gate,
    long::{Failure, Writer, check_wanted},
    protect::Protection,
    task::{Finish, wait},
};

/// Largest block.
const BLOCK: usize = 4096;

/// Where a command says what to do with protection information: PRINFO.
pub(super) const PRINFO: Location = Location::dword(12, 26);

/// A command's blocks, with the guest's memory and what is to be done with metadata.
#[derive(Clone, Copy)]
pub(super) struct Transfer<'a> {
    pub(super) operation: Operation,
    pub(super) blocks: Blocks,
    pub(super) protection: Protection,
    pub(super) data: &'a [Segment],
    /// Where metadata have a buffer of their own.
    pub(super) metadata: &'a [Segment],
}

/// The guest's memory, from some block on.
struct Guest<'a> {
    data: SegmentCursor<'a>,
    metadata: SegmentCursor<'a>,
    protection: Protection,
}

impl<'a> Guest<'a> {
    fn of(transfer: &Transfer<'a>) -> Self {
        let Transfer { protection, data, metadata, .. } = *transfer;
        Self { data: SegmentCursor::new(data), metadata: SegmentCursor::new(metadata), protection }
    }

    /// Where the next metadata are; `None` when they are not moved.
    fn tags(&mut self) -> Option<&mut SegmentCursor<'a>> {
        match (self.protection.acts(), self.protection.is_extended()) {
            (true, _) => None,
            (false, true) => Some(&mut self.data),
            (false, false) => Some(&mut self.metadata),
        }
    }
}

/// Some blocks and their metadata in a buffer.
struct Piece {
    _buffer: BounceBuffer,
    data: Segment,
    metadata: Segment,
    unit: usize,
    lba: Lba,
    count: u64,
}

/// A block in our own memory.
type Bytes = [u8; BLOCK];

impl Piece {
    async fn take(cx: TaskContext<'_>, geometry: &Geometry, lba: Lba, count: u64) -> Self {
        let buffer = cx.buffers.take().await;
        let unit = geometry.block_size.bytes() as usize;
        let all = buffer.segment(BUFFER_SIZE);
        let part = |at, unit| all.part(at, count as usize * unit).expect("a piece fits a buffer");
        let data = part(0, unit);
        Self { _buffer: buffer, data, metadata: part(data.len(), METADATA_SIZE), unit, lba, count }
    }

    /// A block and its metadata.
    fn part(&self, number: u64) -> (Segment, Segment) {
        let part = |all: Segment, unit: usize| all.part(number as usize * unit, unit).expect("a block of the piece");
        (part(self.data, self.unit), part(self.metadata, METADATA_SIZE))
    }

    /// Checks a block; `first` is the number of the piece's first block within its command.
    fn check(&self, protection: &Protection, number: u64, first: u64) -> Result<(), Status> {
        if !protection.checks() {
            return Ok(());
        }
        let ((data, tag), mut bytes): (_, Bytes) = (self.part(number), [0; BLOCK]);
        data.read_at(0, &mut bytes[..self.unit]);
        protection.check(tag.read_value::<ProtectionTuple>(0), &bytes[..self.unit], first + number)
    }

    /// Makes a block's protection information.
    fn protect(&self, protection: &Protection, number: u64, first: u64) {
        let ((data, tag), mut bytes): (_, Bytes) = (self.part(number), [0; BLOCK]);
        data.read_at(0, &mut bytes[..self.unit]);
        tag.write_value(0, &protection.make(&bytes[..self.unit], first + number));
    }

    /// Takes the next blocks from the guest, with metadata that are right.
    fn gather(&self, guest: &mut Guest<'_>, first: u64) -> Result<(), Status> {
        for number in 0..self.count {
            let (data, tag) = self.part(number);
            guest.data.copy_to(data);
            let protection = guest.protection;
            match guest.tags() {
                Some(tags) => {
                    tags.copy_to(tag);
                    self.check(&protection, number, first)?;
                }
                None => self.protect(&protection, number, first),
            }
        }
        Ok(())
    }

    /// Gives the blocks to the guest.
    fn scatter(&self, guest: &mut Guest<'_>, first: u64) -> Result<(), Status> {
        for number in 0..self.count {
            self.check(&guest.protection, number, first)?;
            let (data, tag) = self.part(number);
            guest.data.copy_from(data);
            if let Some(tags) = guest.tags() {
                tags.copy_from(tag);
            }
        }
        Ok(())
    }

    /// Compares the blocks with the guest's. Protection information are not compared but checked, on both sides.
    fn compare(&self, guest: &mut Guest<'_>, first: u64) -> Result<(), Failure> {
        for number in 0..self.count {
            let protection = guest.protection;
            self.check(&protection, number, first).map_err(Failure::Check)?;
            let ((data, tag), mut bytes): (_, Bytes) = (self.part(number), [0; BLOCK]);
            let bytes = &mut bytes[..self.unit];
            take(&mut guest.data, bytes);
            let mut tuple = [0; METADATA_SIZE];
            if let Some(tags) = guest.tags() {
                take(tags, &mut tuple);
                protection.check(zerocopy::transmute!(tuple), bytes, first + number).map_err(Failure::Check)?;
            }
            let (mut here, mut own): (Bytes, _) = ([0; BLOCK], [0; METADATA_SIZE]);
            let here = &mut here[..self.unit];
            data.read_at(0, here);
            tag.read_at(0, &mut own);
            if here != bytes || protection.format.protection == 0 && own != tuple {
                return Err(BlockError::Miscompare.into());
            }
        }
        Ok(())
    }

    async fn submit(&self, cx: TaskContext<'_>, attached: &Attached, operation: Operation) -> Result<(), BlockError> {
        let (lba, count) = (self.lba, BlockCount(self.count));
        let request = TaggedRequest { operation, lba, count, data: self.data, metadata: self.metadata };
        attached.volume.submit_tagged(cx.deeper(), request).await
    }
}

/// Copies the next bytes out.
fn take(cursor: &mut SegmentCursor<'_>, out: &mut [u8]) {
    let mut done = 0;
    while let Some(run) = cursor.next_run(out.len() - done) {
        run.read_at(0, &mut out[done..done + run.len()]);
        done += run.len();
    }
}

/// Cuts a number of blocks in pieces that fit a buffer with their metadata: how many come before each, and how many it has.
fn pieces(geometry: &Geometry, count: BlockCount) -> impl Iterator<Item = (u64, u64)> + use<> {
    let most = in_buffer(geometry);
    (0..count.0.div_ceil(most)).map(move |i| (i * most, most.min(count.0 - i * most)))
}

/// Blocks that fit a buffer with their metadata.
fn in_buffer(geometry: &Geometry) -> u64 {
    (BUFFER_SIZE / (geometry.block_size.bytes() as usize + METADATA_SIZE)) as u64
}

/// Bytes that a command's data pointer stands for, and its metadata pointer.
fn lengths(blocks: &Blocks, protection: &Protection) -> (u64, u64) {
    let metadata = blocks.count.0 * METADATA_SIZE as u64;
    match (protection.acts(), protection.is_extended()) {
        (true, _) => (blocks.bytes, 0),
        (false, true) => (blocks.bytes + metadata, 0),
        (false, false) => (blocks.bytes, metadata),
    }
}

/// Whether the volume is what the command was checked against: it may have been formatted while the command waited.
fn unchanged(namespace: &Namespace, geometry: &Geometry, format: MetadataFormat) -> Result<(), BlockError> {
    namespace.unchanged(geometry)?;
    if namespace.volume.metadata() == Metadata::Shown(format) { Ok(()) } else { Err(BlockError::NotReady) }
}

/// Carries out a read, write or compare; a write inside the gate. Whoever has waited for a buffer may find that nobody waits for the command any
/// more: it is not to stand at a throttle then.
pub(super) async fn carry_out(
    cx: TaskContext<'_>,
    attached: &Attached,
    transfer: &Transfer<'_>,
    finish: &Finish<'_>,
) -> Result<(), Failure> {
    let Transfer { operation, blocks, protection, .. } = *transfer;
    unchanged(&attached.namespace, &blocks.geometry, protection.format)?;
    let is_long = blocks.count.0 > in_buffer(&blocks.geometry);
    if is_long && operation.is_write() && protection.checks() && !protection.acts() {
        let mut guest = Guest::of(transfer);
        for (first, count) in pieces(&blocks.geometry, blocks.count) {
            let piece = Piece::take(cx, &blocks.geometry, blocks.lba, count).await;
            finish.check()?;
            piece.gather(&mut guest, first).map_err(Failure::Check)?;
            drop(piece);
            yield_now().await;
        }
    }
    let mut guest = Guest::of(transfer);
    for (first, count) in pieces(&blocks.geometry, blocks.count) {
        let piece = Piece::take(cx, &blocks.geometry, Lba(blocks.lba.0 + first), count).await;
        finish.check()?;
        if operation.is_write() {
            piece.gather(&mut guest, first).map_err(Failure::Check)?;
            piece.submit(cx, attached, operation).await?;
        } else {
            piece.submit(cx, attached, Operation::Read).await?;
            match operation {
                Operation::Compare => piece.compare(&mut guest, first)?,
                _ => piece.scatter(&mut guest, first).map_err(Failure::Check)?,
            }
        }
        drop(piece);
        if is_long {
            yield_now().await;
        }
    }
    Ok(())
}

/// Carries out a command with its metadata, if it has any.
pub(super) async fn carry_out_either(
    cx: TaskContext<'_>,
    attached: &Attached,
    request: Request<'_>,
    blocks: Blocks,
    tagged: Option<(Protection, &[Segment])>,
    finish: &Finish<'_>,
) -> Result<(), Failure> {
    match tagged {
        None => Ok(attached.volume.submit(cx, request).await?),
        Some((protection, metadata)) => {
            let transfer = Transfer { operation: request.operation, blocks, protection, data: request.segments, metadata };
            cx.scratch.place_future(carry_out(cx, attached, &transfer, finish)).await
        }
    }
}

/// Reads blocks and checks them.
pub(super) async fn verify(
    cx: TaskContext<'_>,
    attached: &Attached,
    blocks: Blocks,
    protection: Protection,
    finish: &Finish<'_>,
) -> Result<(), Failure> {
    for (first, count) in pieces(&blocks.geometry, blocks.count) {
        check_wanted(finish, attached)?;
        unchanged(&attached.namespace, &blocks.geometry, protection.format)?;
        let piece = Piece::take(cx, &blocks.geometry, Lba(blocks.lba.0 + first), count).await;
        finish.check()?;
        piece.submit(cx, attached, Operation::Read).await?;
        (0..count).try_for_each(|number| piece.check(&protection, number, first)).map_err(Failure::Check)?;
        drop(piece);
        yield_now().await;
    }
    Ok(())
}

/// Writes zeroes, with protection information of their own (PRACT) or metadata that are zeroes too.
pub(super) async fn zero(
    cx: TaskContext<'_>,
    writer: &Writer<'_>,
    fua: bool,
    blocks: Blocks,
    protection: Protection,
) -> Result<(), Failure> {
    for (first, count) in pieces(&blocks.geometry, blocks.count) {
        let lba = Lba(blocks.lba.0 + first);
        let _entered = enter(cx, writer, lba, count, protection.format).await?;
        let piece = Piece::take(cx, &blocks.geometry, lba, count).await;
        writer.finish.check()?;
        piece.data.fill(0);
        piece.metadata.fill(0);
        if protection.acts() {
            (0..count).for_each(|number| piece.protect(&protection, number, first));
        }
        write(cx, writer, &piece, Operation::Write { fua }).await?;
        drop(piece);
        yield_now().await;
    }
    Ok(())
}

/// The two sides of a copy, from the source's and the target's first block on.
#[derive(Clone, Copy)]
pub(super) struct Sides {
    pub(super) read: Protection,
    pub(super) write: Protection,
    /// Blocks of the command that come before.
    pub(super) before: u64,
}

/// Copies blocks with their metadata, from the same namespace or another one.
pub(super) async fn copy(
    cx: TaskContext<'_>,
    writer: &Writer<'_>,
    source: &Attached,
    (from, to, count): (Lba, Lba, BlockCount),
    sides: Sides,
) -> Result<(), Failure> {
    for (first, count) in pieces(&writer.geometry, count) {
        let (from, to) = (Lba(from.0 + first), Lba(to.0 + first));
        if source.namespace.uncorrectable.overlaps(from, BlockCount(count)) {
            return Err(BlockError::ReadFault { errno: 0 }.into());
        }
        let _entered = enter(cx, writer, to, count, sides.write.format).await?;
        check_wanted(writer.finish, source)?;
        unchanged(&source.namespace, &writer.geometry, sides.read.format)?;
        let mut piece = Piece::take(cx, &writer.geometry, from, count).await;
        writer.finish.check()?;
        piece.submit(cx, source, Operation::Read).await?;
        let before = sides.before + first;
        for number in 0..count {
            piece.check(&sides.read, number, first).map_err(Failure::Check)?;
            if sides.write.acts() {
                piece.protect(&sides.write, number, before);
            } else {
                piece.check(&sides.write, number, before).map_err(Failure::Check)?;
            }
        }
        piece.lba = to;
        write(cx, writer, &piece, Operation::Write { fua: false }).await?;
        drop(piece);
        yield_now().await;
    }
    Ok(())
}

/// Enters the gate for a piece of a long command, if it may still be written.
async fn enter<'w>(
    cx: TaskContext<'_>,
    writer: &'w Writer<'_>,
    lba: Lba,
    count: u64,
    format: MetadataFormat,
) -> Result<gate::Entered<'w>, Failure> {
    writer.check_wanted()?;
    // The gate before the buffer: a write inside may wait for a buffer.
    let entered = writer.enter(cx, lba, BlockCount(count)).await?;
    unchanged(&writer.attached.namespace, &writer.geometry, format)?;
    Ok(entered)
}

async fn write(cx: TaskContext<'_>, writer: &Writer<'_>, piece: &Piece, operation: Operation) -> Result<(), Failure> {
    let namespace = &writer.attached.namespace;
    let result = piece.submit(cx, writer.attached, operation).await;
    namespace.written(result, piece.lba, BlockCount(piece.count));
    Ok(result?)
}

/// A write of one command, with the rights that hold inside the gate.
async fn write_inside(
    cx: TaskContext<'_>,
    attached: &Attached,
    host: &HostKey,
    transfer: &Transfer<'_>,
    finish: &Finish<'_>,
) -> Completion {
    let (namespace, blocks) = (&attached.namespace, transfer.blocks);
    let entered = namespace.gate.enter(cx, blocks.range(), || finish.goes_on()).await;
    let Some(_entered) = entered else { return Failure::Volume(BlockError::CalledOff).into() };
    if !namespace.rights_of(host).contain(Rights::WRITE) {
        return Failure::Reservation.into();
    }
    let result = carry_out(cx, attached, transfer, finish).await;
    if result.is_ok() {
        namespace.written(Ok(()), blocks.lba, blocks.count);
    }
    Failure::completion(result)
}

impl Controller {
    /// Read, Write and Compare on a namespace with metadata.
    pub(super) fn tagged_transfer(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
        operation: Operation,
        (attached, format): (Rc<Attached>, MetadataFormat),
    ) -> Result<Outcome, Status> {
        let (blocks, protection) = self.check_tagged(&attached, format, sqe, operation)?;
        self.count_transfer(operation, blocks.bytes);
        let is_write = operation.is_write();
        if !is_write && attached.namespace.uncorrectable.overlaps(blocks.lba, blocks.count) {
            return Err(Status::UNRECOVERED_READ_ERROR);
        }
        let (host, sink, segments, metadata) = (self.host_key(), &self.sink, &self.segments, &self.metadata);
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let (data, metadata) = (cx.scratch.copy_slice(segments), cx.scratch.copy_slice(metadata));
            let transfer = Transfer { operation, blocks, protection, data, metadata };
            let finish = Finish::new(attached, sink, token);
            wait(cx, async move {
                let completion = if is_write {
                    write_inside(cx, attached, &host, &transfer, &finish).await
                } else {
                    Failure::completion(carry_out(cx, attached, &transfer, &finish).await)
                };
                finish.complete(completion);
            })
        });
        Ok(self.outcome(token, launched))
    }

    /// Everything that can be wrong with a Read, Write or Compare on a namespace with metadata; its data and metadata are in
    /// `self.segments` and `self.metadata` then.
    pub(super) fn check_tagged(
        &mut self,
        attached: &Attached,
        format: MetadataFormat,
        sqe: &Sqe,
        operation: Operation,
    ) -> Result<(Blocks, Protection), Status> {
        let geometry = attached.namespace.volume.geometry();
        let blocks = Blocks::of(&geometry, sqe)?;
        let protection = self.protection(format, sqe)?;
        let (bytes, separate) = lengths(&blocks, &protection);
        // MDTS includes metadata that come with the blocks.
        self.check_size(bytes)?;
        let rights = if operation.is_write() {
            attached.check_writable(&geometry)?;
            Rights::WRITE
        } else {
            Rights::READ
        };
        self.check_rights(attached, rights)?;
        let access = if operation == Operation::Read { Access::Write } else { Access::Read };
        self.resolve(sqe, bytes, access)?;
        data::resolve_metadata(&self.memory, sqe, separate, access, &mut self.metadata)?;
        Ok((blocks, protection))
    }

    /// Marks the guest's memory that a read in flight may yet write to, data and metadata: translating it does. `false`: what that is
    /// cannot be said any more.
    pub(crate) fn mark_read(&mut self, sqe: &Sqe) -> bool {
        let known = self.namespaces.in_use(sqe.nsid.0).into_iter().map(|attached| self.mark_read_of(&attached, sqe).is_ok());
        // Of all of them: which one it is is not on record.
        known.fold(false, |known, this| known | this)
    }

    fn mark_read_of(&mut self, attached: &Attached, sqe: &Sqe) -> Result<(), Status> {
        let volume = &attached.namespace.volume;
        let (geometry, count) = (volume.geometry(), u64::from(ReadWriteCdw12::from_bits(sqe.cdw12).nlb_z()) + 1);
        // The volume may have shrunk since, so that the range is not checked.
        let bytes = count << geometry.block_size.shift();
        let blocks = Blocks { lba: Lba(sqe.cdw10_11()), count: BlockCount(count), bytes, geometry };
        let (bytes, separate) = match volume.metadata() {
            Metadata::Shown(format) => lengths(&blocks, &Protection::of(format, sqe)?),
            Metadata::Hidden | Metadata::Never => (bytes, 0),
        };
        data::resolve(&self.memory, self.page_size(), sqe, bytes, Access::Write, &mut self.segments)?;
        data::resolve_metadata(&self.memory, sqe, separate, Access::Write, &mut self.metadata)
    }

    /// What a command wants done with protection information.
    pub(super) fn protection(&self, format: MetadataFormat, sqe: &Sqe) -> Result<Protection, Status> {
        let protection = Protection::of(format, sqe).map_err(|status| self.refuse(PRINFO, status))?;
        // Verify has no data to act on, Write Zeroes none to check.
        let fits = match sqe.nvm_opcode() {
            NvmOpcode::VERIFY => !protection.acts(),
            NvmOpcode::WRITE_ZEROES => !protection.checks(),
            _ => true,
        };
        if fits { Ok(protection) } else { Err(self.refuse(PRINFO, Status::INVALID_PROTECTION_INFORMATION)) }
    }
}
