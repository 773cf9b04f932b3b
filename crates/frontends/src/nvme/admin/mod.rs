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
        _slot: TaskSlot<'_>,
        _token: CommandToken,
        _sqe: &Sqe,
    ) -> Outcome {
        Outcome::Done(Completion::error(Status::INVALID_OPCODE))
    }

    /// Remembers a failed command for the Error Information log.
    pub(crate) fn note_error(&mut self, _token: CommandToken, _completion: Completion) {}

    /// A doorbell was written with a value outside its queue: an asynchronous error event (Base 5.1.2).
    pub(crate) fn invalid_doorbell(&mut self, _qid: u16, _value: u32) {}

    /// The controller is being reset, or powered on: feature values and events go back to their defaults, and whatever is held
    /// (event requests, deletes that wait) is forgotten. Returns the number of held commands that will never complete now.
    pub(crate) fn admin_reset(&mut self) -> u32 {
        self.state.events.outstanding.replace(0)
    }

    /// Admin commands held until something happens that may never happen (asynchronous event requests): nothing waits for
    /// these, an unmap for instance. Commands that wait for other commands are not among them.
    pub(crate) fn admin_parked(&self) -> u32 {
        self.state.events.outstanding.get()
    }

    /// A namespace was attached, detached or has another size: the guest is told by an event, and by the changed namespace log.
    pub(crate) fn namespace_changed(&mut self, _nsid: u32) {}

    /// Completes waiting asynchronous event requests with pending events. Returns work done.
    pub(crate) fn deliver_events(&mut self) -> usize {
        0
    }
}
