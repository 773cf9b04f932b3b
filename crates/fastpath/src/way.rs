//! How commands reach the volume: a queue pair of our own, or the front of the daemon's engine.

use std::os::fd::BorrowedFd;

use millrace_driver::{
    Command, Controller, DriverError, QueueError, QueueOptions, QueuePair,
    spec::{CommandId, Cqe, status::Status},
};

use crate::{error::Error, space::Options};

/// Requests that an engine's space holds.
pub(crate) const ENGINE_DEPTH: u16 = 32;
/// Bytes of memory that an engine can name: the last page of its table, of 2 MiB, is the space's own.
pub(crate) const ENGINE_MEMORY: usize = (1 << 30) - (2 << 20);

#[expect(clippy::large_enum_variant, reason = "a space has one, and its queue is not to be behind a pointer")]
pub(crate) enum Way {
    Queue(QueuePair),
    Engine(millrace_driver::Space),
}

impl Way {
    pub(crate) fn open(controller: &mut Controller, options: &Options) -> Result<Self, Error> {
        if options.engine {
            return controller.open_space().map(Self::Engine).map_err(refused);
        }
        if options.events {
            controller.enable_vectors(1)?;
        }
        let vector = options.events.then_some(0);
        // A controller on an engine has short queues: more requests wait here.
        let entries = (u32::from(options.depth) + 1).min(controller.max_queue_entries());
        let queue = QueueOptions { entries, id: None, vector };
        Ok(Self::Queue(controller.create_queue_pair(&queue)?))
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        match self {
            Self::Queue(queue) => queue.in_flight(),
            Self::Engine(space) => space.in_flight(),
        }
    }

    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        match self {
            Self::Queue(queue) => queue.capacity(),
            Self::Engine(space) => space.capacity(),
        }
    }

    #[inline]
    pub(crate) fn submit(&mut self, command: &Command) -> Result<CommandId, QueueError> {
        match self {
            Self::Queue(queue) => queue.submit(command),
            Self::Engine(space) => space.submit(command),
        }
    }

    /// Tells of what is new, where that is not said with each command.
    #[inline]
    pub(crate) fn ring(&mut self) -> Result<(), QueueError> {
        match self {
            Self::Queue(queue) => queue.ring(),
            Self::Engine(_) => Ok(()),
        }
    }

    #[inline]
    pub(crate) fn next_completion(&mut self) -> Result<Option<Cqe>, QueueError> {
        match self {
            Self::Queue(queue) => queue.next_completion(),
            Self::Engine(space) => space.next_completion(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), QueueError> {
        match self {
            Self::Queue(queue) => queue.check(),
            Self::Engine(space) => space.check(),
        }
    }

    pub(crate) fn interrupt(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Queue(queue) => queue.interrupt(),
            Self::Engine(_) => None,
        }
    }
}

/// Why there is no space of the engine's.
fn refused(error: DriverError) -> Error {
    let status = match &error {
        DriverError::Queue(error) => error.status().map(Status::code),
        _ => None,
    };
    match status {
        Some(Status::INVALID_OPCODE) => Error::NoEngine("it has no engine (serve --engine)"),
        Some(Status::NOT_ENOUGH_RESOURCES) => Error::NoEngine("others have all spaces of its engine"),
        _ => error.into(),
    }
}
