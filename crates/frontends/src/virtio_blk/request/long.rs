//! Requests of more bytes than a volume may move at once: the shard has other devices.
//!
//! A request's length is limited by its lengths' 32 bits only, and volumes in memory copy all of what they get before they return. So
//! a long one goes piece by piece; and all long requests of a disk together have one piece in a turn that is moved at once, however
//! many there are.

use std::{
    cell::Cell,
    future::poll_fn,
    pin::Pin,
    rc::Rc,
    task::Poll,
    time::{Duration, Instant},
};

use millrace_block::{BlockError, Operation, Request, TaskContext, Transfer, yield_now};
use millrace_engine::{Outcome, TaskSlot};
use millrace_memory::Segment;

use super::{Attached, Data, Ending, SECTOR, blocks, wait};

/// Bytes of the largest request that the volume gets whole. No system asks for more as it is set up at first.
pub(super) const AT_ONCE: u64 = 4 << 20;

/// As `Core::launch`, for a long one; `attached` may be written if the transfer is a write.
#[cold]
pub(super) fn launch<'s>(
    slot: TaskSlot<'s>,
    attached: &Rc<Attached>,
    ending: Ending,
    transfer: Transfer,
    &Data { sector, bytes, pieces, changed }: &Data<'_>,
) -> Outcome<'s, Result<(), BlockError>> {
    let Some(&some) = pieces.first() else { return Outcome::Done(Err(BlockError::OutOfRange), slot) };
    slot.run_with(attached, |cx, attached| {
        let segments = cx.scratch.place_slice(pieces.len(), some);
        segments.copy_from_slice(pieces);
        let changed = cx.scratch.copy_slice(changed);
        wait(cx, async move {
            let result = carry_out(cx, attached, transfer, (sector, bytes), segments).await;
            ending.push(&attached.sink, changed, result);
        })
    })
}

async fn carry_out(
    cx: TaskContext<'_>,
    attached: &Attached,
    transfer: Transfer,
    (mut sector, mut left): (u64, u64),
    mut segments: &mut [Segment],
) -> Result<(), BlockError> {
    let geometry = attached.volume.geometry();
    // As a whole first: one that cannot be does nothing.
    let range = blocks(&geometry, sector, left).and_then(|(lba, count)| geometry.byte_range(lba, count));
    range.ok_or(BlockError::OutOfRange)?;
    while left > 0 {
        let bytes = left.min(AT_ONCE);
        let (used, rest) = cut(segments, bytes as usize);
        let piece = segments.get(..used).unwrap_or(&[]);
        move_piece(cx, attached, transfer.into(), (sector, bytes), piece).await?;
        let begun = rest.is_some();
        segments = std::mem::take(&mut segments).get_mut(used - usize::from(begun)..).unwrap_or(&mut []);
        if let Some((first, rest)) = segments.first_mut().zip(rest) {
            *first = rest;
        }
        // No overflow: both lie within the volume.
        (sector, left) = (sector + bytes / SECTOR, left - bytes);
    }
    Ok(())
}

/// Has the first segments be of so many bytes together: how many they are, and what was cut off the last of them.
fn cut(segments: &mut [Segment], bytes: usize) -> (usize, Option<Segment>) {
    let mut room = bytes;
    for (at, segment) in segments.iter_mut().enumerate() {
        let len = segment.len();
        if len >= room {
            let rest = segment.part(room, len - room).filter(|rest| !rest.is_empty());
            *segment = segment.part(0, room).expect("it is longer");
            return (at + 1, rest);
        }
        room -= len;
    }
    unreachable!("a request has as many bytes as its segments");
}

/// One piece, in a turn for it; how long the volume took.
pub(super) async fn move_piece(
    cx: TaskContext<'_>,
    attached: &Attached,
    operation: Operation,
    (sector, bytes): (u64, u64),
    segments: &[Segment],
) -> Result<Duration, BlockError> {
    let turn = Turn::take(attached).await;
    // The blocks may have another size since the last piece.
    let (lba, count) = blocks(&attached.volume.geometry(), sector, bytes).ok_or(BlockError::OutOfRange)?;
    let scratch = cx.scratch.carve_rest();
    let request = Request { operation, lba, count, segments };
    let begun = Instant::now();
    let mut step = attached.volume.submit(cx.with_scratch(&scratch), request);
    match poll_fn(|context| Poll::Ready(Pin::new(&mut step).poll(context))).await {
        Poll::Ready(result) => {
            let took = begun.elapsed();
            yield_now().await;
            result.map(|()| took)
        }
        Poll::Pending => {
            drop(turn);
            step.await.map(|()| begun.elapsed())
        }
    }
}

/// The right to move a piece in this turn.
struct Turn<'a>(&'a Cell<bool>);

impl<'a> Turn<'a> {
    async fn take(attached: &'a Attached) -> Self {
        while attached.moved.replace(true) {
            yield_now().await;
        }
        Self(&attached.moved)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}
