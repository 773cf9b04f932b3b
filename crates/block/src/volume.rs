//! The one trait behind every namespace and virtio disk.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use crate::{BlockCount, BlockError, BlockSize, Geometry, Lba, Request, ScratchBox, TaskContext, VolumeError};

/// A request that waits, placed in its task's scratch.
pub type TaskFuture<'a, O = Result<(), BlockError>> = ScratchBox<'a, dyn Future<Output = O> + 'a>;

/// How far a request came at once.
#[must_use]
pub enum Step<'a> {
    /// It is finished.
    Done(Result<(), BlockError>),
    /// It waits: await it.
    Wait(TaskFuture<'a>),
}

impl Future for Step<'_> {
    type Output = Result<(), BlockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Done(result) => Poll::Ready(*result),
            Self::Wait(future) => future.as_pin_mut().poll(cx),
        }
    }
}

/// How much of a volume is in use, for metrics and Identify.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes the medium really holds for this volume.
    pub allocated: u64,
}

/// A named, sized store of blocks: a back end, or a service over other volumes.
///
/// One object serves all shards; `submit` is called on any of them. Every implementation passes the conformance suite.
pub trait Volume: Send + Sync {
    /// The operator's name for it: in every message about it.
    fn name(&self) -> &str;

    /// Its shape at this moment.
    fn geometry(&self) -> Geometry;

    /// Starts a request.
    ///
    /// The range is checked against the volume's present size (a shrink may have overtaken the front end's check); the
    /// segments' length is the caller's promise ([`Request::assert_lengths`]).
    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a>;

    /// A read of this range will be submitted soon: a volume whose data lie in memory brings them near. It is a hint; the range
    /// is not checked. Returns whether it is any use: who gets `false` need not ask again for a while. A service that passes
    /// reads on may pass this on as well.
    fn prefetch(&self, _lba: Lba, _count: BlockCount) -> bool {
        false
    }

    /// Scratch bytes a request needs at most, inner volumes included: what its futures and lists take.
    fn scratch_bytes(&self) -> usize;

    /// Grows or shrinks the volume. Called beside the data path; requests in flight beyond a new end may fail with
    /// [`BlockError::OutOfRange`]. On error nothing has changed.
    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError>;

    /// Erases the volume's data and gives it a block size, its size in bytes (rounded down) unchanged (NVMe Format). Called
    /// beside the data path, with no request in flight.
    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError>;

    /// Space in use. May ask the system below and wait for it: not called on a shard.
    fn usage(&self) -> Usage;

    /// Whether a [format](Self::format) first of all destroys the one key under which all of its data are enciphered, wherever
    /// they are (NVMe's Cryptographic Erase). Who says nothing does not promise it.
    fn erases_by_key(&self) -> bool {
        false
    }
}
