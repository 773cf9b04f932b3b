//! How a command's task begins and ends.

use std::{cell::Cell, future::Future, rc::Rc};

use millrace_block::{
    BlockError, TaskContext,
    trace::{Carried, carry},
};
use millrace_engine::Launch;

use super::{
    super::{
        controller::{CommandToken, Sink},
        namespace::Attached,
        status::{Completion, of_block_error},
    },
    gate::pause,
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
pub(super) struct InFlight<'a> {
    attached: &'a Attached,
    lane: &'a Cell<u32>,
}

impl<'a> InFlight<'a> {
    #[inline]
    pub(super) fn new(attached: &'a Attached) -> Self {
        Self::on(attached, lane(attached, attached.turn.get()))
    }

    /// One that nobody [outlives](outlive): it waits for others itself, or writes nothing.
    pub(super) fn aside(attached: &'a Attached) -> Self {
        Self::on(attached, &attached.lanes[2])
    }

    #[inline]
    fn on(attached: &'a Attached, lane: &'a Cell<u32>) -> Self {
        attached.in_flight.set(attached.in_flight.get() + 1);
        lane.set(lane.get() + 1);
        Self { attached, lane }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let Self { attached, lane } = self;
        attached.in_flight.set(attached.in_flight.get() - 1);
        lane.set(lane.get() - 1);
        attached.finished.set(attached.finished.get().wrapping_add(1));
    }
}

/// Where commands are counted that begin in a turn.
#[inline]
fn lane(attached: &Attached, turn: u64) -> &Cell<u32> {
    &attached.lanes[(turn % 2) as usize]
}

/// Waits until every command has ended that may write and is in flight now on a namespace through this controller, whatever begins meanwhile.
pub(super) async fn outlive(cx: TaskContext<'_>, attached: &Attached) {
    let mut tries = 0;
    // The next turn's lane is that of the last one, which somebody may be waiting for.
    while lane(attached, attached.turn.get() + 1).get() > 0 {
        pause(cx, &mut tries).await;
    }
    let turn = attached.turn.get();
    attached.turn.set(turn + 1);
    // Whoever began another turn has found the lane empty.
    while attached.turn.get() == turn + 1 && lane(attached, turn).get() > 0 {
        pause(cx, &mut tries).await;
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

    /// Of one that writes nothing: nobody who wants writes to have ended need wait for it.
    pub(super) fn of_reader(attached: &'a Attached, sink: &Rc<Sink>, token: CommandToken) -> Self {
        Self { _in_flight: InFlight::aside(attached), sink: Rc::clone(sink), token }
    }

    /// Whether anybody still waits for the command.
    pub(super) fn is_wanted(&self) -> bool {
        self.sink.wants(self.token)
    }

    /// Whether it goes on: somebody waits for it, and nobody for its end alone.
    pub(super) fn goes_on(&self) -> bool {
        self.is_wanted() && !self.sink.is_hurried()
    }

    /// The error that it ends with where it does not.
    pub(super) fn check(&self) -> Result<(), BlockError> {
        if self.goes_on() { Ok(()) } else { Err(BlockError::CalledOff) }
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
