//! An inner request with a list of segments of its own.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use millrace_memory::Segment;

use crate::{BlockError, Request, ScratchBox, Step, TaskContext, Volume};

/// A request to an inner volume that has started, and the list of segments that it borrows.
#[must_use = "a request that waits must be awaited"]
pub struct Held<'a> {
    // Dropped before the list.
    step: Step<'a>,
    _list: ScratchBox<'a, [Segment]>,
}

impl Held<'_> {
    /// Its result, if it finished at once.
    #[inline]
    pub fn done(&self) -> Option<Result<(), BlockError>> {
        match self.step {
            Step::Done(result) => Some(result),
            Step::Wait(_) => None,
        }
    }
}

impl Future for Held<'_> {
    type Output = Result<(), BlockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.step).poll(cx)
    }
}

/// Scratch bytes that the list of a [`Held`] request takes.
pub fn held_bytes(segments: usize) -> usize {
    segments * size_of::<Segment>()
}

/// Submits a request whose segments are made up here (a buffer in the place of the guest's memory), without a future around it
/// when it finishes at once. `request.segments` is not looked at.
#[inline]
pub fn submit_held<'a>(
    volume: &'a dyn Volume,
    cx: TaskContext<'a>,
    request: &Request<'_>,
    segments: &[Segment],
) -> Held<'a> {
    let list = cx.scratch.place_list(segments.len(), |at| segments[at]);
    let borrowed: *const [Segment] = &raw const *list;
    // SAFETY: the list stays where it is (it lies in the scratch) and is not written again until `Held` drops it. What borrows it
    // is the step, which is dropped before it and cannot be taken out of `Held`. A volume has no other place to put something of
    // the request's lifetime: it is `'static`, and what it places in the scratch is the step's.
    let segments: &'a [Segment] = unsafe { &*borrowed };
    let &Request { operation, lba, count, .. } = request;
    let step = volume.submit(cx, Request { operation, lba, count, segments });
    Held { step, _list: list }
}
