//! The admin command set (Base 5).
//!
//! ```text
//!   admin_command ── effects.rs: is the opcode supported? ─┬─ identify.rs, logs.rs, features.rs ──► data for the guest
//!                                                          ├─ queues.rs      create, delete, shadow doorbells
//!                                                          ├─ space.rs       FastPath's front, on a card
//!                                                          ├─ events.rs      asynchronous event requests, Abort
//!                                                          └─ namespaces.rs, format.rs ──► jobs.rs ──► Host
//!   every turn: admin_turn ── finished jobs, drained queues, events that found a request
//! ```
//!
//! Invariants:
//! * A command that waits here (an event request, a queue's deletion, a job) never touches guest memory while it waits.
//! * What a job does to the controller is done in the controller's turn: the host's answer comes through an inbox.
//! * What Identify and the effects log advertise is what the dispatcher accepts: both read the table in effects.rs.

mod effects;
mod events;
mod features;
mod format;
mod identify;
mod jobs;
mod logs;
mod namespaces;
mod queues;
mod space;

pub(super) use queues::is_reachable;

use std::{cell::Cell, rc::Rc, time::Instant};

use millrace_engine::{ShardContext, TaskSlot};
use millrace_memory::Access;
use millrace_nvme_spec::{
    command::{Fuse, NamespaceId, Psdt, Sqe},
    log::LogId,
    log::ParameterErrorLocation,
    opcode::AdminOpcode,
    status::Status,
};
use rustix::time::{ClockId, clock_gettime};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    Config,
    controller::{CommandToken, Controller, Outcome},
    data,
    errors::parameter,
    namespace::Attached,
    registers::Phase,
    status::Completion,
};

/// What the admin commands remember beside the state region.
pub(crate) struct AdminState {
    /// Delete I/O Submission Queue commands that wait for their queue's commands.
    deletions: Vec<(CommandToken, u16)>,
    /// Who turned the write cache off, until nothing is in flight on the card; and when what still waits there is called off.
    settling: Vec<(CommandToken, Instant)>,
    /// Work on namespaces under way.
    jobs: jobs::Jobs,
    busy: logs::BusyClock,
    /// A log page whose events are told when the command that read it has completed.
    log_read: Option<LogId>,
    /// How often the guest may still attach and detach: the daemon stores each change.
    attachments: namespaces::AttachmentBudget,
    /// The parameter for which the command that is being started is refused (see errors.rs).
    pub(super) refused: Cell<ParameterErrorLocation>,
}

impl AdminState {
    pub(crate) fn new(_config: &Config) -> Self {
        Self {
            deletions: Vec::new(),
            settling: Vec::new(),
            jobs: jobs::Jobs::default(),
            busy: logs::BusyClock::default(),
            log_read: None,
            attachments: namespaces::AttachmentBudget::default(),
            refused: Cell::new(ParameterErrorLocation::NONE),
        }
    }
}

/// How a command ended or goes on; an error is completed with Do Not Retry.
type Progress = Result<Outcome, Status>;

/// Finished, with dword 0.
fn done(dw0: u32) -> Outcome {
    Outcome::Done(Completion::with_result(dw0))
}

/// Milliseconds of the system's monotonic clock, which goes on when this process does not.
pub(crate) fn monotonic_millis() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
}

impl Controller {
    /// Starts an admin command. What waits does so in a job, but for the flush of who turns the write cache off.
    pub(crate) fn admin_command(
        &mut self,
        _cx: &mut ShardContext<'_>,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
    ) -> Outcome {
        let progress = self.check_admin(token, sqe).and_then(|()| match sqe.admin_opcode() {
            AdminOpcode::IDENTIFY => self.identify(sqe),
            AdminOpcode::GET_LOG_PAGE => self.get_log_page(sqe),
            AdminOpcode::GET_FEATURES => self.get_features(sqe),
            AdminOpcode::SET_FEATURES => self.set_features(slot, token, sqe),
            AdminOpcode::CREATE_IO_CQ => self.create_io_cq(sqe),
            AdminOpcode::CREATE_IO_SQ => self.create_io_sq(sqe),
            AdminOpcode::DELETE_IO_CQ => self.delete_io_cq(sqe),
            AdminOpcode::DELETE_IO_SQ => self.delete_io_sq(token, sqe),
            AdminOpcode::ABORT => Ok(self.abort(sqe)),
            AdminOpcode::ASYNC_EVENT_REQUEST => self.async_event_request(token),
            AdminOpcode::DOORBELL_BUFFER_CONFIG => self.doorbell_buffer_config(sqe),
            AdminOpcode::NAMESPACE_MANAGEMENT => self.namespace_management(token, sqe),
            AdminOpcode::NAMESPACE_ATTACHMENT => self.namespace_attachment(token, sqe),
            AdminOpcode::FORMAT_NVM => self.format_nvm(token, sqe),
            AdminOpcode::OPEN_SPACE => self.open_space(sqe),
            _ => Err(Status::INVALID_OPCODE),
        });
        progress.unwrap_or_else(|status| Outcome::Done(Completion::error(status)))
    }

    /// What holds for every admin command.
    fn check_admin(&self, token: CommandToken, sqe: &Sqe) -> Result<(), Status> {
        if effects::admin(&self.config, sqe.admin_opcode()).is_none() {
            return Err(Status::INVALID_OPCODE);
        }
        // Neither fused operations nor SGLs exist in the admin queue of a PCIe controller (Base 4.1.1).
        if sqe.flags.fuse() != Fuse::NORMAL {
            return Err(self.refuse(parameter::FUSE, Status::INVALID_FIELD));
        }
        if sqe.flags.psdt() != Psdt::PRP {
            return Err(self.refuse(parameter::PSDT, Status::INVALID_FIELD));
        }
        let request = sqe.admin_opcode() == AdminOpcode::ASYNC_EVENT_REQUEST;
        if self.holds(token.cid) || request && self.event_requests().any(|waiting| waiting == token.cid) {
            return Err(Status::CID_CONFLICT);
        }
        Ok(())
    }

    /// Whether an admin command of this identifier waits. Event requests do not count: SPDK takes theirs for its last commands
    /// before a shutdown, and how far a controller searches for conflicts is its own affair (Base, Command ID Conflict).
    fn holds(&self, cid: u16) -> bool {
        self.admin.deletions.iter().any(|(token, _)| token.cid == cid)
            || self.admin.settling.iter().any(|(token, _)| token.cid == cid)
            || self.admin.jobs.tokens().any(|token| token.cid == cid)
            || self.io.running.contains(0, cid)
    }

    /// Whether there is work on namespaces under way, or a queue's deletion.
    pub(crate) fn has_jobs(&self) -> bool {
        !self.admin.jobs.is_empty() || !self.admin.deletions.is_empty()
    }

    /// Whether a job's answer is there, of which nobody else tells.
    pub(crate) fn has_answers(&self) -> bool {
        self.admin.jobs.has_answers()
    }

    /// Whether something waits for turns to find that it can go on.
    pub(crate) fn waits_for_turns(&self) -> bool {
        !(self.lifecycle.stopped || self.again.is_empty()) || self.admin.jobs.has_unasked()
    }

    /// Commands that wait without touching guest memory and without a task of theirs that does.
    pub(crate) fn admin_parked(&self) -> u32 {
        let waiting = self.admin.deletions.len() + self.admin.settling.len() + self.admin.jobs.tokens().count();
        self.state.events.outstanding.get() + waiting as u32
    }

    /// Whether who turned the write cache off on a card can go on.
    pub(crate) fn has_settled(&self) -> bool {
        !self.admin.settling.is_empty() && self.phase == Phase::Ready && self.is_card_quiet()
    }

    /// The admin commands' part of a turn: what waited and need not wait any more. Returns work done.
    #[inline]
    pub(crate) fn admin_turn(&mut self, cx: &mut ShardContext<'_>) -> usize {
        self.count_busy_time(cx.now());
        let AdminState { jobs, deletions, settling, .. } = &self.admin;
        if jobs.is_empty() && deletions.is_empty() && settling.is_empty() && !self.has_events() {
            return 0;
        }
        self.run_jobs(cx) + self.finish_deletions() + self.finish_settling(cx) + self.deliver_events()
    }

    /// Controller Level Reset: forgets the commands that wait, which are not completed, and sets features and events to their
    /// defaults. Returns how many commands it forgot.
    pub(crate) fn admin_reset(&mut self) -> u32 {
        let parked = self.admin_parked();
        self.admin.deletions.clear();
        self.forget_settling();
        self.reset_jobs();
        self.reset_events();
        self.reset_features();
        parked
    }

    /// Copies data of a command to the guest.
    fn send(&mut self, sqe: &Sqe, bytes: &[u8]) -> Result<(), Status> {
        let page_size = self.page_size();
        data::resolve(&self.memory, page_size, sqe, bytes.len() as u64, Access::Write, &mut self.segments)?;
        data::copy_out(&self.segments, bytes);
        Ok(())
    }

    /// Copies a command's data out of guest memory.
    fn fetch<T: FromBytes + IntoBytes>(&mut self, sqe: &Sqe) -> Result<T, Status> {
        let page_size = self.page_size();
        data::resolve(&self.memory, page_size, sqe, size_of::<T>() as u64, Access::Read, &mut self.segments)?;
        Ok(data::copy_value(&self.segments))
    }

    /// Whether a namespace of this identifier may exist (Base 3.2.1); the broadcast value names none where it means nothing.
    fn check_valid(&self, nsid: NamespaceId) -> Result<(), Status> {
        match nsid {
            NamespaceId::BROADCAST => Err(self.invalid(1, 0)),
            NamespaceId(1..) if nsid.0 <= self.namespaces.largest() => Ok(()),
            _ => Err(Status::INVALID_NAMESPACE_OR_FORMAT),
        }
    }

    /// The attached namespace that a command names (Base 3.2.1.5).
    fn active(&self, nsid: NamespaceId) -> Result<&Rc<Attached>, Status> {
        self.check_valid(nsid)?;
        self.namespaces.get(nsid.0).ok_or_else(|| self.invalid(1, 0))
    }
}

#[cfg(test)]
mod tests;
