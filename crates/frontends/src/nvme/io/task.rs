//! How a command's task begins and ends.

use std::{future::Future, rc::Rc};

use millrace_block::{
    BlockError, TaskContext,
    trace::{Carried, carry},
};
use millrace_engine::Launch;

use super::super::{
    controller::{CommandToken, Sink},
    namespace::Attached,
    status::{Completion, of_block_error},
};

/// Scratch bytes that the future of a command takes at most, without its data's segments and its volume's own need.
pub(crate) const TASK_BYTES: usize = 1536;

/// A command that waits: `future` finishes it.
pub(super) fn wait<'a, F, R>(cx: TaskContext<'a>, future: F) -> Launch<'a, R>
where
    F: Future<Output = ()> + 'a,
{
    const { assert!(size_of::<Carried<F>>() <= TASK_BYTES, "a command's future fits the room that is planned for it") };
    Launch::Wait(cx.scratch.place_future(carry(future)))
}

/// Counts a command as in flight on its namespace: what format, detach and delete wait for.
pub(super) struct InFlight<'a>(&'a Attached);

impl<'a> InFlight<'a> {
    pub(super) fn new(attached: &'a Attached) -> Self {
        attached.in_flight.set(attached.in_flight.get() + 1);
        Self(attached)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
        self.0.finished.set(self.0.finished.get().wrapping_add(1));
    }
}

/// Hands in the completion of a command that waited.
pub(super) struct Finish<'a> {
    _in_flight: InFlight<'a>,
    sink: Rc<Sink>,
    token: CommandToken,
}

impl<'a> Finish<'a> {
    pub(super) fn new(attached: &'a Attached, sink: &Rc<Sink>, token: CommandToken) -> Self {
        Self { _in_flight: InFlight::new(attached), sink: Rc::clone(sink), token }
    }

    /// Whether anybody still waits for the command.
    pub(super) fn is_wanted(&self) -> bool {
        self.sink.wants(self.token)
    }

    /// Whether it is to end early, and to be tried again.
    pub(super) fn is_hurried(&self) -> bool {
        self.sink.is_hurried()
    }

    pub(super) fn end(self, result: Result<(), BlockError>) {
        self.complete(of_result(result));
    }

    pub(super) fn complete(self, completion: Completion) {
        self.sink.push(self.token, completion);
    }
}

/// The completion of a finished request.
pub(super) fn of_result(result: Result<(), BlockError>) -> Completion {
    match result {
        Ok(()) => Completion::SUCCESS,
        Err(error) => Completion { dw0: 0, status: of_block_error(error) },
    }
}
