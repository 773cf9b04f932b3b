//! Several inner requests at once, without allocating.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
};

use crate::{BlockError, Request, Scratch, ScratchBox, Step, TaskContext, Volume, placed_bytes};

/// Waits for all of the steps; each is dropped as it ends. The answer is the first error in their order.
pub async fn all(steps: &mut [Option<Step<'_>>]) -> Result<(), BlockError> {
    let mut worst: Option<(usize, BlockError)> = None;
    poll_fn(|cx| {
        let mut waiting = false;
        for (at, place) in steps.iter_mut().enumerate() {
            let Some(step) = place else { continue };
            match Pin::new(step).poll(cx) {
                Poll::Pending => waiting = true,
                Poll::Ready(result) => {
                    *place = None;
                    if let Err(error) = result
                        && worst.is_none_or(|(first, _)| at < first)
                    {
                        worst = Some((at, error));
                    }
                }
            }
        }
        if waiting { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    worst.map_or(Ok(()), |(_, error)| Err(error))
}

/// Submits `count` inner requests, each with `scratch` bytes of its own, and waits for all: "write all legs, wait for all". The
/// answer is the first error in their order.
///
/// `piece` names the volume and the request of each number below `count`.
pub async fn submit_together<'a>(
    cx: TaskContext<'a>,
    count: usize,
    scratch: usize,
    piece: impl Fn(usize) -> (&'a dyn Volume, Request<'a>),
) -> Result<(), BlockError> {
    let mut arenas = cx.scratch.place_list(count, |_| None::<ScratchBox<'_, Scratch>>);
    // Backwards: they are dropped forwards, and room comes back in the reverse order of its taking.
    for arena in arenas.as_pin_mut().get_mut().iter_mut().rev() {
        *arena = Some(cx.scratch.carve(scratch));
    }
    let mut steps = cx.scratch.place_list(count, |at| {
        let (volume, request) = piece(at);
        let arena = arenas.get(at).and_then(Option::as_ref).expect("an arena was carved for each");
        Some(volume.submit(cx.with_scratch(arena), request))
    });
    all(steps.as_pin_mut().get_mut()).await
}

/// Scratch bytes that [`submit_together`] takes, beside its future (which is part of the caller's).
pub fn together_bytes(count: usize, scratch: usize) -> usize {
    let each = placed_bytes::<Scratch>()
        + scratch.next_multiple_of(8)
        + size_of::<Option<ScratchBox<'_, Scratch>>>()
        + size_of::<Option<Step<'_>>>();
    count * each
}
