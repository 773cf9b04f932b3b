//! Read, Write, Compare and Flush: one request each (NVM 3.3.1, 3.3.4, 3.3.6; Base 7.2).

use std::rc::Rc;

use millrace_block::{BlockCount, BlockError, Lba, Metadata, Operation, Request, Step};
use millrace_engine::{Launch, TaskSlot};
use millrace_memory::Access;
use millrace_nvme_spec::{
    command::{NamespaceId, Sqe},
    status::Status,
};

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        namespace::Attached,
        reservation::Rights,
        status::Completion,
    },
    Blocks,
    task::{Finish, InFlight, of_result, outlive, wait},
};

impl Controller {
    /// Read, Write and Compare.
    #[inline]
    pub(super) fn transfer(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
        operation: Operation,
    ) -> Result<Outcome, Status> {
        let attached = Rc::clone(self.namespace(sqe.nsid)?);
        if let Metadata::Shown(format) = attached.namespace.volume.metadata() {
            return self.tagged_transfer(slot, token, sqe, operation, (attached, format));
        }
        let blocks = self.check_transfer(&attached, sqe, operation)?;
        self.count_transfer(operation, blocks.bytes);
        if operation.is_write() {
            Ok(self.submit_write(slot, token, attached, operation, blocks))
        } else if attached.namespace.uncorrectable.overlaps(blocks.lba, blocks.count) {
            Err(Status::UNRECOVERED_READ_ERROR)
        } else {
            Ok(self.submit(slot, token, attached, operation, blocks))
        }
    }

    /// Everything that can be wrong with a Read, Write or Compare; its data are in `self.segments` then.
    #[inline]
    pub(super) fn check_transfer(&mut self, attached: &Attached, sqe: &Sqe, operation: Operation) -> Result<Blocks, Status> {
        let geometry = attached.namespace.volume.geometry();
        let blocks = Blocks::of(&geometry, sqe)?;
        self.check_size(blocks.bytes)?;
        let rights = if operation.is_write() {
            attached.check_writable(&geometry)?;
            Rights::WRITE
        } else {
            Rights::READ
        };
        self.check_rights(attached, rights)?;
        let access = if operation == Operation::Read { Access::Write } else { Access::Read };
        self.resolve(sqe, blocks.bytes, access)?;
        Ok(blocks)
    }

    pub(super) fn count_transfer(&mut self, operation: Operation, bytes: u64) {
        self.count_moved(bytes);
        if operation.is_write() {
            self.counters.write_commands += 1;
            self.counters.bytes_written += bytes;
        } else {
            self.counters.read_commands += 1;
            self.counters.bytes_read += bytes;
        }
    }

    /// Submits a request that reads; `self.segments` is its data.
    fn submit(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        attached: Rc<Attached>,
        operation: Operation,
        blocks: Blocks,
    ) -> Outcome {
        let (segments, sink) = (self.segments.as_slice(), &self.sink);
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let segments = cx.scratch.copy_slice(segments);
            let request = Request { operation, lba: blocks.lba, count: blocks.count, segments };
            match attached.volume.submit(cx, request) {
                Step::Done(result) => Launch::Done(of_result(result)),
                Step::Wait(future) => {
                    let finish = Finish::of_reader(attached, sink, token);
                    wait(cx, async move { finish.end(future.await) })
                }
            }
        });
        self.outcome(token, launched)
    }

    /// Submits a request that changes data: through the gate, and with the rights that hold inside.
    pub(super) fn submit_write(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        attached: Rc<Attached>,
        operation: Operation,
        blocks: Blocks,
    ) -> Outcome {
        let this = &*self;
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let namespace = &attached.namespace;
            let segments = cx.scratch.copy_slice(&this.segments);
            let request = Request { operation, lba: blocks.lba, count: blocks.count, segments };
            let Some(entered) = namespace.gate.try_enter(blocks.range()) else {
                let finish = Finish::new(attached, &this.sink, token);
                let host = this.host_key();
                return wait(cx, async move {
                    let entered = namespace.gate.enter(cx, blocks.range(), || finish.goes_on()).await;
                    let Some(_entered) = entered else { return finish.end(Err(BlockError::CalledOff)) };
                    if !namespace.rights_of(&host).contain(Rights::WRITE) {
                        return finish.complete(Completion::error(Status::RESERVATION_CONFLICT));
                    }
                    let result = match namespace.unchanged(&blocks.geometry) {
                        Ok(()) => attached.volume.submit(cx, request).await,
                        Err(error) => Err(error),
                    };
                    namespace.written(result, blocks.lba, blocks.count);
                    finish.end(result);
                });
            };
            // A reservation may have changed since the check; whoever changed it waits for the writes inside the gate.
            if let Err(status) = this.check_rights(attached, Rights::WRITE) {
                return Launch::Done(Completion::error(status));
            }
            match attached.volume.submit(cx, request) {
                Step::Done(result) => {
                    namespace.written(result, blocks.lba, blocks.count);
                    Launch::Done(of_result(result))
                }
                Step::Wait(future) => {
                    let finish = Finish::new(attached, &this.sink, token);
                    wait(cx, async move {
                        let _entered = entered;
                        let result = future.await;
                        namespace.written(result, blocks.lba, blocks.count);
                        finish.end(result);
                    })
                }
            }
        });
        self.outcome(token, launched)
    }

    /// What a task's start means for its command.
    pub(super) fn outcome(&mut self, token: CommandToken, launched: millrace_engine::Outcome<'_, Completion>) -> Outcome {
        match launched {
            millrace_engine::Outcome::Done(completion, slot) => {
                drop(slot);
                Outcome::Done(completion)
            }
            millrace_engine::Outcome::Waiting => {
                self.io.running.insert(token);
                Outcome::Pending
            }
        }
    }

    /// Flush of one namespace, or of all of them.
    pub(super) fn flush(&mut self, slot: TaskSlot<'_>, token: CommandToken, sqe: &Sqe) -> Result<Outcome, Status> {
        if sqe.nsid == NamespaceId::BROADCAST {
            return self.flush_all(slot, token);
        }
        let attached = Rc::clone(self.namespace(sqe.nsid)?);
        self.check_rights(&attached, Rights::WRITE)?;
        self.counters.other_commands += 1;
        self.segments.clear();
        let geometry = attached.namespace.volume.geometry();
        let blocks = Blocks { lba: Lba(0), count: BlockCount(0), bytes: 0, geometry };
        Ok(self.submit(slot, token, attached, Operation::Flush, blocks))
    }

    fn flush_all(&mut self, slot: TaskSlot<'_>, token: CommandToken) -> Result<Outcome, Status> {
        for attached in self.namespaces.attached() {
            // Nobody knows yet whether it will erase what was written before; and while it does, the volume takes no requests.
            if attached.formatting.get() {
                return Err(Status::FORMAT_IN_PROGRESS);
            }
            self.check_rights(attached, Rights::WRITE)?;
        }
        self.counters.other_commands += 1;
        // Of what is under way a flush says nothing.
        Ok(self.write_caches_back(slot, token, false))
    }

    /// Makes durable what this controller has written to all attached namespaces and their replicas, with what is in flight if it `drains`
    /// them, and completes the command then. Other controllers' commands are theirs to flush, and may take as long as they like. A volume
    /// that is being formatted takes no requests, and has nothing that is to be kept.
    pub(crate) fn write_caches_back(&mut self, slot: TaskSlot<'_>, token: CommandToken, drains: bool) -> Outcome {
        // A list on the heap: this is no command of a data path.
        let all: Vec<Rc<Attached>> = self.written_to().filter(|attached| !self.erases(attached)).cloned().collect();
        let mut drained: Vec<Rc<Attached>> = Vec::new();
        if drains {
            drained.extend(all.iter().flat_map(|attached| self.namespaces.ways(attached)));
        }
        let sink = Rc::clone(&self.sink);
        let launched = slot.run(|cx| {
            wait(cx, async move {
                let finishes: Vec<_> = all.iter().map(|attached| InFlight::aside(attached)).collect();
                for attached in &drained {
                    outlive(cx, attached).await;
                }
                let mut outcome = Ok(());
                for attached in &all {
                    let request = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };
                    outcome = outcome.and(attached.namespace.volume.submit(cx, request).await);
                }
                drop(finishes);
                sink.push(token, of_result(outcome));
            })
        });
        self.outcome(token, launched)
    }
}
