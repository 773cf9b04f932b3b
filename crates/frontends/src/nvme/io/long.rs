//! Commands that touch much without moving data through the guest: Write Zeroes, Dataset Management, Verify, Write
//! Uncorrectable (NVM 3.3.3, 3.3.5, 3.3.7, 3.3.8).
//!
//! They go piece by piece, with a turn for others between two pieces, so that none of them keeps its shard from its guests.
//! Each piece begins with a look whether anybody still waits for the command, and whether the namespace is still attached: after a
//! reset, when the client has gone or the volume may be another one's, it stops there.

use std::{rc::Rc, time::Instant};

use millrace_block::{BlockCount, BlockError, Geometry, Lba, Metadata, Operation, Request, TaskContext, pieces, yield_now};
use millrace_engine::{Launch, TaskSlot};
use millrace_memory::{Access, BUFFER_SIZE};
use millrace_nvme_spec::{
    command::Sqe,
    nvm::{DatasetManagementCdw10, DatasetManagementCdw11, DatasetRange, WriteZeroesCdw12},
    status::Status,
};
use zerocopy::IntoBytes;

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        data,
        namespace::Attached,
        reservation::{HostKey, Rights},
        status::Completion,
    },
    Blocks, gate,
    protect::Protection,
    tagged,
    task::{Finish, of_result, wait},
    uncorrectable::CHANGE_BYTES,
};
pub(super) use crate::pace::{PIECE, Pace};

/// A command that changes data piece by piece.
pub(super) struct Writer<'a> {
    pub(super) attached: &'a Attached,
    pub(super) host: HostKey,
    /// The volume's shape when the command was checked.
    pub(super) geometry: Geometry,
    pub(super) finish: &'a Finish<'a>,
}

/// Why a piece failed.
pub(super) enum Failure {
    Volume(BlockError),
    /// Protection information are not what they should be.
    Check(Status),
    /// A reservation took the right away since the command began.
    Reservation,
    /// The namespace was detached since, and its volume may be another one's.
    Detached,
}

impl From<BlockError> for Failure {
    fn from(error: BlockError) -> Self {
        Self::Volume(error)
    }
}

impl From<Failure> for Completion {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Volume(error) => of_result(Err(error)),
            Failure::Check(status) => Self::error(status),
            Failure::Reservation => Self::error(Status::RESERVATION_CONFLICT),
            Failure::Detached => Self::error(Status::INVALID_NAMESPACE_OR_FORMAT),
        }
    }
}

impl Failure {
    /// The completion of a command that ended so.
    pub(super) fn completion(result: Result<(), Self>) -> Completion {
        result.err().map_or(Completion::SUCCESS, Completion::from)
    }
}

/// Whether a command goes on with this namespace.
pub(super) fn check_wanted(finish: &Finish<'_>, attached: &Attached) -> Result<(), Failure> {
    finish.check()?;
    if attached.gone.get() { Err(Failure::Detached) } else { Ok(()) }
}

impl Writer<'_> {
    /// Carries out one piece inside the gate.
    pub(super) async fn piece(
        &self,
        cx: TaskContext<'_>,
        operation: Operation,
        lba: Lba,
        count: BlockCount,
    ) -> Result<(), Failure> {
        self.check_wanted()?;
        let namespace = &self.attached.namespace;
        let _entered = self.enter(cx, lba, count).await?;
        namespace.unchanged(&self.geometry)?;
        let request = Request { operation, lba, count, segments: &[] };
        let result = self.attached.volume.submit(cx, request).await;
        // Blocks that were deallocated read as zeroes only where the volume says so.
        if operation != Operation::Deallocate || self.geometry.deallocate {
            namespace.written(result, lba, count);
        }
        Ok(result?)
    }

    /// Whether it is worth going on.
    pub(super) fn check_wanted(&self) -> Result<(), Failure> {
        check_wanted(self.finish, self.attached)
    }

    /// Enters the gate for a piece, if it may still be written then.
    pub(super) async fn enter(
        &self,
        cx: TaskContext<'_>,
        lba: Lba,
        count: BlockCount,
    ) -> Result<gate::Entered<'_>, Failure> {
        let namespace = &self.attached.namespace;
        let entered = namespace.gate.enter(cx, gate::range(lba, count), || self.finish.goes_on()).await;
        let entered = entered.ok_or(BlockError::CalledOff)?;
        if !namespace.rights_of(&self.host).contain(Rights::WRITE) {
            return Err(Failure::Reservation);
        }
        Ok(entered)
    }

    /// Carries out an operation on a range that was checked.
    async fn pieces(
        &self,
        cx: TaskContext<'_>,
        operation: Operation,
        lba: Lba,
        count: BlockCount,
        pace: &mut Pace,
    ) -> Result<(), Failure> {
        let mut done = 0;
        while done < count.0 {
            let most = (pace.bytes >> self.geometry.block_size.shift()).max(1);
            let piece = most.min(count.0 - done);
            let begun = Instant::now();
            self.piece(cx, operation, Lba(lba.0 + done), BlockCount(piece)).await?;
            // What is smaller than it might be says nothing of the size.
            if piece == most {
                pace.adjust(begun.elapsed());
            }
            done += piece;
            yield_now().await;
        }
        Ok(())
    }
}

impl Controller {
    /// Write Zeroes.
    pub(super) fn write_zeroes(&mut self, slot: TaskSlot<'_>, token: CommandToken, sqe: &Sqe) -> Result<Outcome, Status> {
        let attached = Rc::clone(self.namespace(sqe.nsid)?);
        let geometry = attached.namespace.volume.geometry();
        let fields = WriteZeroesCdw12::from_bits(sqe.cdw12);
        if fields.nsz() {
            // Namespace Zeroes is not supported, and Identify Namespace says so.
            return Err(self.invalid(12, 23));
        }
        let blocks = Blocks::of(&geometry, sqe)?;
        attached.check_writable(&geometry)?;
        self.check_rights(&attached, Rights::WRITE)?;
        let fua = self.durable(fields.fua());
        if let Metadata::Shown(format) = attached.namespace.volume.metadata() {
            let protection = self.protection(format, sqe)?;
            self.counters.write_commands += 1;
            return Ok(self.zero_tagged(slot, token, attached, fua, blocks, protection));
        }
        self.counters.write_commands += 1;
        let operation = Operation::WriteZeroes { fua, deallocate: fields.deac() };
        if blocks.bytes <= PIECE {
            // A volume may write them all at once.
            self.count_moved(blocks.bytes);
            self.segments.clear();
            return Ok(self.submit_write(slot, token, attached, operation, blocks));
        }
        let (host, sink) = (self.host_key(), &self.sink);
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let finish = Finish::new(attached, sink, token);
            wait(cx, async move {
                let writer = Writer { attached, host, geometry, finish: &finish };
                let result = writer.pieces(cx, operation, blocks.lba, blocks.count, &mut Pace::new()).await;
                finish.complete(Failure::completion(result));
            })
        });
        Ok(self.outcome(token, launched))
    }

    /// Write Zeroes on a namespace with metadata.
    fn zero_tagged(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        attached: Rc<Attached>,
        fua: bool,
        blocks: Blocks,
        protection: Protection,
    ) -> Outcome {
        let (host, sink) = (self.host_key(), &self.sink);
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let finish = Finish::new(attached, sink, token);
            wait(cx, async move {
                let writer = Writer { attached, host, geometry: blocks.geometry, finish: &finish };
                let result = tagged::zero(cx, &writer, fua, blocks, protection).await;
                finish.complete(Failure::completion(result));
            })
        });
        self.outcome(token, launched)
    }

    /// Dataset Management: deallocation is carried out, the other attributes are hints that we have no use for.
    pub(super) fn dataset_management(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
    ) -> Result<Outcome, Status> {
        let attached = Rc::clone(self.namespace(sqe.nsid)?);
        let geometry = attached.namespace.volume.geometry();
        let deallocate = DatasetManagementCdw11::from_bits(sqe.cdw11).ad();
        if deallocate {
            attached.check_writable(&geometry)?;
        }
        self.check_rights(&attached, Rights::WRITE)?;
        let count = usize::from(DatasetManagementCdw10::from_bits(sqe.cdw10).nr_z()) + 1;
        self.resolve(sqe, (count * size_of::<DatasetRange>()) as u64, Access::Read)?;
        self.counters.other_commands += 1;
        let (host, sink, segments) = (self.host_key(), &self.sink, &self.segments);
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let ranges = cx.scratch.place_slice(count, DatasetRange::default());
            data::copy_in(segments, ranges.as_mut_bytes());
            let ranges = &*ranges;
            let is_outside = |r: &DatasetRange| geometry.byte_range(Lba(r.slba), BlockCount(r.length.into())).is_none();
            if ranges.iter().any(is_outside) {
                return Launch::Done(Completion::error(Status::LBA_OUT_OF_RANGE));
            }
            if !deallocate {
                return Launch::Done(Completion::SUCCESS);
            }
            let finish = Finish::new(attached, sink, token);
            wait(cx, async move {
                let writer = Writer { attached, host, geometry, finish: &finish };
                let result = deallocate_all(cx, &writer, ranges).await;
                finish.complete(Failure::completion(result));
            })
        });
        Ok(self.outcome(token, launched))
    }

    /// Verify: the blocks are read, and what was read goes nowhere.
    pub(super) fn verify(&mut self, slot: TaskSlot<'_>, token: CommandToken, sqe: &Sqe) -> Result<Outcome, Status> {
        let attached = Rc::clone(self.namespace(sqe.nsid)?);
        let geometry = attached.namespace.volume.geometry();
        let blocks = Blocks::of(&geometry, sqe)?;
        self.check_rights(&attached, Rights::READ)?;
        let protection = match attached.namespace.volume.metadata() {
            Metadata::Shown(format) => Some(self.protection(format, sqe)?),
            _ => None,
        };
        if attached.namespace.uncorrectable.overlaps(blocks.lba, blocks.count) {
            return Err(Status::UNRECOVERED_READ_ERROR);
        }
        self.counters.read_commands += 1;
        self.counters.bytes_read += blocks.bytes;
        let sink = &self.sink;
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let finish = Finish::new(attached, sink, token);
            wait(cx, async move {
                let result = match protection {
                    Some(protection) => tagged::verify(cx, attached, blocks, protection, &finish).await,
                    None => read_through(cx, attached, blocks, &finish).await,
                };
                finish.complete(Failure::completion(result));
            })
        });
        Ok(self.outcome(token, launched))
    }

    /// Write Uncorrectable: through the gate as a write, so that whom a reservation has shut out marks nothing any more.
    pub(super) fn write_uncorrectable(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
    ) -> Result<Outcome, Status> {
        let attached = Rc::clone(self.namespace(sqe.nsid)?);
        let geometry = attached.namespace.volume.geometry();
        let blocks = Blocks::of(&geometry, sqe)?;
        attached.check_writable(&geometry)?;
        self.check_rights(&attached, Rights::WRITE)?;
        self.counters.write_commands += 1;
        self.count_moved(CHANGE_BYTES);
        let (host, sink) = (self.host_key(), &self.sink);
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            if let Some(_entered) = attached.namespace.gate.try_enter(blocks.range()) {
                return Launch::Done(mark(attached, &host, &blocks));
            }
            let finish = Finish::new(attached, sink, token);
            wait(cx, async move {
                let entered = attached.namespace.gate.enter(cx, blocks.range(), || finish.goes_on()).await;
                let Some(_entered) = entered else { return finish.end(Err(BlockError::CalledOff)) };
                finish.complete(mark(attached, &host, &blocks));
            })
        });
        Ok(self.outcome(token, launched))
    }
}

/// Marks blocks as uncorrectable, inside the gate: a reservation, or the volume's shape, may have changed since the command was checked.
fn mark(attached: &Attached, host: &HostKey, blocks: &Blocks) -> Completion {
    let namespace = &attached.namespace;
    if !namespace.rights_of(host).contain(Rights::WRITE) {
        return Failure::Reservation.into();
    }
    match namespace.unchanged(&blocks.geometry) {
        Ok(()) if namespace.uncorrectable.mark(blocks.lba, blocks.count) => Completion::SUCCESS,
        Ok(()) => Completion::error(Status::WRITE_FAULT),
        Err(error) => of_result(Err(error)),
    }
}

/// Deallocates ranges that were checked. A volume that cannot is not asked again: deallocation is a wish.
async fn deallocate_all(cx: TaskContext<'_>, writer: &Writer<'_>, ranges: &[DatasetRange]) -> Result<(), Failure> {
    let mut pace = Pace::new();
    for range in ranges {
        let (lba, count) = (Lba(range.slba), BlockCount(range.length.into()));
        match writer.pieces(cx, Operation::Deallocate, lba, count, &mut pace).await {
            Err(Failure::Volume(BlockError::Unsupported)) => return Ok(()),
            other => other?,
        }
    }
    Ok(())
}

async fn read_through(cx: TaskContext<'_>, attached: &Attached, blocks: Blocks, finish: &Finish<'_>) -> Result<(), Failure> {
    let geometry = blocks.geometry;
    for (at, count) in pieces(&geometry, blocks.count, BUFFER_SIZE as u64) {
        check_wanted(finish, attached)?;
        attached.namespace.unchanged(&geometry)?;
        let buffer = cx.buffers.take().await;
        let segments = [buffer.segment((count.0 << geometry.block_size.shift()) as usize)];
        let lba = Lba(blocks.lba.0 + at);
        let request = Request { operation: Operation::Read, lba, count, segments: &segments };
        attached.volume.submit(cx.deeper(), request).await?;
        drop(buffer);
        yield_now().await;
    }
    Ok(())
}
