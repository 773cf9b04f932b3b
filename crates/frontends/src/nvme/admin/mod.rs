//! The admin command set (Base 5).

use millrace_engine::{ShardContext, TaskSlot};
use millrace_nvme_spec::{command::Sqe, status::Status};

use super::{
    Config,
    controller::{CommandToken, Controller, Outcome},
    status::Completion,
};

/// What the admin commands remember beside the state region.
pub(crate) struct AdminState {}

impl AdminState {
    pub(crate) fn new(_config: &Config) -> Self {
        Self {}
    }
}

impl Controller {
    /// Starts an admin command. `slot` is the task it may wait in.
    pub(crate) fn admin_command(
        &mut self,
        _cx: &mut ShardContext<'_>,
        _slot: TaskSlot,
        _token: CommandToken,
        _sqe: &Sqe,
    ) -> Outcome {
        Outcome::Done(Completion::error(Status::INVALID_OPCODE))
    }

    /// Remembers a failed command for the Error Information log.
    pub(crate) fn note_error(&mut self, _token: CommandToken, _completion: Completion) {}

    /// A doorbell was written with a value outside its queue: an asynchronous error event (Base 5.1.2).
    pub(crate) fn invalid_doorbell(&mut self, _qid: u16, _value: u32) {}

    /// Completes waiting asynchronous event requests with pending events. Returns work done.
    pub(crate) fn deliver_events(&mut self) -> usize {
        0
    }
}
