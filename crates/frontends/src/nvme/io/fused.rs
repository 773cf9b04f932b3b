//! Compare and Write as one (Base 3.4.2, NVM 3.4.1): neighbours in one submission queue, which succeed or fail together.
//!
//! The first command of a pair is held until its neighbour is taken, which it is in the same or the next turn: a first command
//! without a neighbour in the queue is refused at once. A held command has not touched memory, and so is not counted among
//! the commands that unmap and reset wait for; and it promises no completion entry: halves that held the last ones would keep
//! each other's seconds out for ever. Its second is taken when there is room for both.

use std::rc::Rc;

use millrace_block::{BlockError, Metadata, Operation, Request};
use millrace_engine::TaskSlot;
use millrace_memory::Segment;
use millrace_nvme_spec::{
    command::{Fuse, Sqe},
    nvm::ReadWriteCdw12,
    opcode::NvmOpcode,
    status::Status,
};

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        errors::parameter,
        namespace::Attached,
        reservation::Rights,
        status::Completion,
    },
    Blocks,
    long::Failure,
    protect::Protection,
    tagged::carry_out_either,
    task::{Finish, of_result, wait},
};

/// First commands that wait for their second. At most one for each submission queue.
#[derive(Debug, Default)]
pub(super) struct Held(Vec<(CommandToken, Sqe)>);

impl Held {
    /// Whether any command is held.
    #[inline]
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    fn of(&self, sqid: u16) -> u32 {
        u32::from(self.any() && self.0.iter().any(|(token, _)| token.sqid == sqid))
    }

    fn take(&mut self, sqid: u16) -> Option<(CommandToken, Sqe)> {
        let at = self.0.iter().position(|(token, _)| token.sqid == sqid)?;
        Some(self.0.swap_remove(at))
    }
}

/// One of the two, checked.
type Half = (Rc<Attached>, Blocks, Option<Protection>);

/// What the first one compares with.
#[derive(Default)]
struct Expected {
    data: Vec<Segment>,
    metadata: Vec<Segment>,
    protection: Option<Protection>,
}

impl Controller {
    /// A command that is one of a pair, or follows one that is.
    #[cold]
    pub(super) fn fused_command(&mut self, slot: TaskSlot<'_>, token: CommandToken, sqe: &Sqe) -> Outcome {
        let first = self.take_held(token.sqid);
        match (sqe.flags.fuse(), first) {
            (Fuse::SECOND, Some((first_token, first))) => self.pair(slot, (first_token, &first), (token, sqe)),
            (Fuse::SECOND, None) if self.repeats => self.second_again(slot, token, sqe),
            (Fuse::SECOND, None) => Outcome::Done(Completion::error(Status::ABORTED_MISSING_FUSED)),
            (fuse, first) => {
                if let Some((first, _)) = first {
                    self.complete(first, Completion::error(Status::ABORTED_MISSING_FUSED));
                }
                match fuse {
                    Fuse::NORMAL => self.single_command(slot, token, sqe),
                    Fuse::FIRST => self.hold(token, sqe),
                    _ => Outcome::Done(Completion::error(self.refuse(parameter::FUSE, Status::INVALID_FIELD))),
                }
            }
        }
    }

    /// The first command that a queue holds, with its completion's place, which `completion_room` has kept.
    fn take_held(&mut self, sqid: u16) -> Option<(CommandToken, Sqe)> {
        let held = self.io.fused.take(sqid)?;
        let promised = &self.cq(self.sq(sqid).cq.get()).promised;
        promised.set(promised.get() + 1);
        Some(held)
    }

    /// The next command of the queue is no second: the first that waits for one has none.
    #[cold]
    pub(super) fn abort_lone(&mut self, sqid: u16) {
        if let Some((first, _)) = self.take_held(sqid) {
            self.complete(first, Completion::error(Status::ABORTED_MISSING_FUSED));
        }
    }

    fn hold(&mut self, token: CommandToken, sqe: &Sqe) -> Outcome {
        let fits_two = self.cq(self.sq(token.sqid).cq.get()).entries.get() > 2;
        // Both are made known by one doorbell write.
        let follows = self.pending_entries(token.sqid).is_some() || self.redoes(token.sqid);
        if !fits_two || !follows {
            return Outcome::Done(Completion::error(Status::ABORTED_MISSING_FUSED));
        }
        let promised = &self.cq(self.sq(token.sqid).cq.get()).promised;
        promised.set(promised.get().saturating_sub(1));
        self.io.fused.0.push((token, *sqe));
        Outcome::Held
    }

    /// Ends the command that a submission queue holds, because the queue is about to go; without a completion if there is no
    /// room for one (Base 5.2.4 leaves that to us).
    pub(crate) fn abort_held(&mut self, sqid: u16) {
        let Some((token, _)) = self.io.fused.take(sqid) else { return };
        if self.completion_room(sqid) > 0 {
            let promised = &self.cq(self.sq(sqid).cq.get()).promised;
            promised.set(promised.get() + 1);
            return self.complete(token, Completion::error(Status::ABORTED_SQ_DELETION));
        }
        let in_flight = &self.sq(sqid).in_flight;
        in_flight.set(in_flight.get().saturating_sub(1));
        self.in_flight -= 1;
        self.records.release(token.record);
    }

    /// Commands that a submission queue holds: one or none.
    #[inline]
    pub(crate) fn io_held_by(&self, sqid: u16) -> u32 {
        self.io.fused.of(sqid)
    }

    /// Commands that are held: accepted, but without any hold on memory.
    pub(crate) fn io_parked(&self) -> u32 {
        self.io.fused.0.len() as u32
    }

    /// The controller is reset: forgets what is held, and returns how many commands that is.
    pub(crate) fn io_reset(&mut self) -> u32 {
        self.io.fused.0.drain(..).len() as u32
    }

    /// Both commands are there. Whatever is wrong with one aborts the other.
    fn pair(&mut self, slot: TaskSlot<'_>, first: (CommandToken, &Sqe), second: (CommandToken, &Sqe)) -> Outcome {
        let failed = Completion::error(Status::ABORTED_FAILED_FUSED);
        let (attached, blocks, expected) = match self.check_half(first.1, NvmOpcode::COMPARE, Operation::Compare) {
            Ok((attached, blocks, protection)) => {
                (attached, blocks, Expected { data: self.segments.clone(), metadata: self.metadata.clone(), protection })
            }
            Err(status) => {
                self.complete(first.0, Completion::error(status));
                return Outcome::Done(failed);
            }
        };
        let write = Operation::Write { fua: self.durable(ReadWriteCdw12::from_bits(second.1.cdw12).fua()) };
        let (target, written, protection) = match self.check_half(second.1, NvmOpcode::WRITE, write) {
            Ok(checked) => checked,
            Err(status) => {
                self.complete(first.0, failed);
                return Outcome::Done(Completion::error(status));
            }
        };
        if !Rc::ptr_eq(&attached, &target) || blocks.range() != written.range() {
            self.complete(first.0, Completion::error(self.invalid(10, 0)));
            return Outcome::Done(Completion::error(self.invalid(10, 0)));
        }
        if attached.namespace.uncorrectable.overlaps(blocks.lba, blocks.count) {
            self.complete(first.0, Completion::error(Status::UNRECOVERED_READ_ERROR));
            return Outcome::Done(failed);
        }
        self.count_transfer(Operation::Compare, blocks.bytes);
        self.count_transfer(write, blocks.bytes);
        self.launch_pair(slot, (Some(first.0), second.0), attached, blocks, (write, protection), expected)
    }

    /// The second of a pair whose first was completed by a worker that has ended: its Compare had succeeded, and this is the write,
    /// or it had not.
    #[cold]
    fn second_again(&mut self, slot: TaskSlot<'_>, token: CommandToken, sqe: &Sqe) -> Outcome {
        if !self.records.is_compared(token.record) {
            return Outcome::Done(Completion::error(Status::ABORTED_FAILED_FUSED));
        }
        let write = Operation::Write { fua: self.durable(ReadWriteCdw12::from_bits(sqe.cdw12).fua()) };
        match self.check_half(sqe, NvmOpcode::WRITE, write) {
            Ok((attached, blocks, protection)) => {
                self.count_transfer(write, blocks.bytes);
                self.launch_pair(slot, (None, token), attached, blocks, (write, protection), Expected::default())
            }
            Err(status) => Outcome::Done(Completion::error(status)),
        }
    }

    /// Everything that can be wrong with one of the two; its data are in `self.segments` then, its metadata in `self.metadata`.
    fn check_half(&mut self, sqe: &Sqe, opcode: NvmOpcode, operation: Operation) -> Result<Half, Status> {
        if sqe.nvm_opcode() != opcode {
            return Err(self.refuse(parameter::OPCODE, Status::INVALID_FIELD));
        }
        let attached = Rc::clone(self.namespace(sqe.nsid)?);
        if let Metadata::Shown(format) = attached.namespace.volume.metadata() {
            let (blocks, protection) = self.check_tagged(&attached, format, sqe, operation)?;
            return Ok((attached, blocks, Some(protection)));
        }
        let blocks = self.check_transfer(&attached, sqe, operation)?;
        Ok((attached, blocks, None))
    }

    fn launch_pair(
        &mut self,
        slot: TaskSlot<'_>,
        (first, second): (Option<CommandToken>, CommandToken),
        attached: Rc<Attached>,
        blocks: Blocks,
        (write, protection): (Operation, Option<Protection>),
        expected: Expected,
    ) -> Outcome {
        let (host, sink, segments, metadata) = (self.host_key(), &self.sink, &self.segments, &self.metadata);
        let records = Rc::clone(&self.records);
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let (segments, metadata) = (cx.scratch.copy_slice(segments), cx.scratch.copy_slice(metadata));
            let first = first.map(|token| Finish::new(attached, sink, token));
            let (record, compared) = (second.record, records.is_compared(second.record));
            let second = Finish::new(attached, sink, second);
            wait(cx, async move {
                let namespace = &attached.namespace;
                let locked = namespace.gate.lock(cx, blocks.range(), || second.goes_on()).await;
                let Some(_locked) = locked else {
                    let off = of_result(Err(BlockError::CalledOff));
                    let is_whole = first.is_some();
                    end(first, off);
                    return second.complete(if is_whole { Completion::error(Status::ABORTED_FAILED_FUSED) } else { off });
                };
                if !compared && !namespace.rights_of(&host).contain(Rights::ALL) {
                    end(first, Completion::error(Status::RESERVATION_CONFLICT));
                    return second.complete(Completion::error(Status::ABORTED_FAILED_FUSED));
                }
                let request = |operation, segments| Request { operation, lba: blocks.lba, count: blocks.count, segments };
                let Expected { data, metadata: tags, protection: expected } = &expected;
                let compare = request(Operation::Compare, data);
                let result = match namespace.unchanged(&blocks.geometry) {
                    Ok(()) if compared => Ok(()),
                    Ok(()) => {
                        let tagged = expected.map(|it| (it, &**tags));
                        carry_out_either(cx, attached, compare, blocks, tagged, &second).await
                    }
                    Err(error) => Err(error.into()),
                };
                if result.is_ok() {
                    // From here on only the write is carried out again: what it is compared with may be what it wrote.
                    records.set_compared(record);
                }
                let failed = result.is_err();
                end(first, Failure::completion(result));
                if failed {
                    return second.complete(Completion::error(Status::ABORTED_FAILED_FUSED));
                }
                let tagged = protection.map(|protection| (protection, metadata));
                let result = carry_out_either(cx, attached, request(write, segments), blocks, tagged, &second).await;
                if result.is_ok() {
                    namespace.written(Ok(()), blocks.lba, blocks.count);
                }
                second.complete(Failure::completion(result));
            })
        });
        if matches!(launched, millrace_engine::Outcome::Waiting)
            && let Some(first) = first
        {
            self.io.running.insert(first);
        }
        self.outcome(second, launched)
    }
}

/// Ends a pair's first command, if it has not ended yet.
fn end(first: Option<Finish<'_>>, completion: Completion) {
    if let Some(first) = first {
        first.complete(completion);
    }
}
