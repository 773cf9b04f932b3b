//! What volumes share: the check every request gets, and commands that a back end cannot do itself.

use std::{future::Future, task::Poll};

use millrace_memory::{BUFFER_SIZE, SegmentCursor};

use crate::{
    BlockCount, BlockError, ByteOffset, Geometry, Lba, METADATA_SIZE, Operation, Request, Scratch, TaggedRequest,
    TaskContext, Volume, placed_bytes,
};

/// Checks a request against a volume's present geometry; returns its range in bytes (an empty one for a flush).
///
/// # Errors
/// [`BlockError::ReadOnly`] for a write to a read-only volume, [`BlockError::OutOfRange`] for a range, or a copy's source,
/// that does not lie within it.
///
/// # Panics
/// When the segments do not match the range ([`Request::assert_lengths`]).
#[inline]
pub fn check(geometry: &Geometry, request: &Request<'_>) -> Result<(ByteOffset, u64), BlockError> {
    if request.operation == Operation::Flush {
        return Ok((ByteOffset(0), 0));
    }
    if geometry.read_only && request.operation.is_write() {
        return Err(BlockError::ReadOnly);
    }
    if let Operation::Copy { source } = request.operation {
        geometry.byte_range(source, request.count).ok_or(BlockError::OutOfRange)?;
    }
    let range = geometry.byte_range(request.lba, request.count).ok_or(BlockError::OutOfRange)?;
    request.assert_lengths(geometry);
    Ok(range)
}

/// Checks a request with metadata against a volume's present geometry.
///
/// # Errors
/// As [`check`].
///
/// # Panics
/// When the memory does not match the range, or the operation is neither a read nor a write.
pub fn check_tagged(geometry: &Geometry, request: &TaggedRequest) -> Result<(), BlockError> {
    let TaggedRequest { operation, lba, count, data, metadata } = *request;
    assert!(matches!(operation, Operation::Read | Operation::Write { .. }), "{operation:?} with metadata");
    check(geometry, &Request { operation, lba, count, segments: &[data] })?;
    assert_eq!(metadata.len() as u64, count.0 * METADATA_SIZE as u64, "metadata match the range of {request:?}");
    Ok(())
}

/// Lets the shard do something else before a long piece of work goes on.
pub fn yield_now() -> impl Future<Output = ()> {
    let mut yielded = false;
    std::future::poll_fn(move |cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
}

/// Scratch bytes that placing the future of an async method takes.
pub fn future_bytes<'a, V, F>(_method: fn(&'a V, TaskContext<'a>, Request<'a>) -> F) -> usize
where
    V: ?Sized + 'a,
    F: Future + 'a,
{
    placed_bytes::<F>()
}

/// Scratch bytes that placing the future of an async method for [`TaggedRequest`]s takes.
pub fn tagged_bytes<'a, V, F>(_method: fn(&'a V, TaskContext<'a>, TaggedRequest) -> F) -> usize
where
    V: ?Sized + 'a,
    F: Future + 'a,
{
    placed_bytes::<F>()
}

/// Scratch bytes that [`compare_by_reading`] and [`copy_by_bounce`] take on a volume whose own reads and writes need `inner`.
pub fn helpers_scratch_bytes(inner: usize) -> usize {
    let inner = inner + placed_bytes::<Scratch>();
    inner + future_bytes::<dyn Volume, _>(compare_by_reading).max(future_bytes::<dyn Volume, _>(copy_by_bounce))
}

/// Cuts a range in pieces of at most `bytes`, and at least a block: how many blocks into it each starts, and how many it has.
pub fn pieces(geometry: &Geometry, count: BlockCount, bytes: u64) -> impl Iterator<Item = (u64, BlockCount)> + use<> {
    let most = (bytes >> geometry.block_size.shift()).max(1);
    (0..count.0.div_ceil(most)).map(move |i| (i * most, BlockCount(most.min(count.0 - i * most))))
}

/// [`Operation::Compare`] by way of reads into one of the shard's buffers. `request` was checked.
pub async fn compare_by_reading(volume: &dyn Volume, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
    let geometry = volume.geometry();
    let buffer = cx.buffers.take().await;
    let cx = cx.deeper();
    let mut expected = SegmentCursor::new(request.segments);
    for (at, count) in pieces(&geometry, request.count, BUFFER_SIZE as u64) {
        let segments = [buffer.segment((count.0 << geometry.block_size.shift()) as usize)];
        // No overflow: the whole range was checked.
        let lba = Lba(request.lba.0 + at);
        let read = Request { operation: Operation::Read, lba, count, segments: &segments };
        volume.submit(cx.with_scratch(&cx.scratch.carve_rest()), read).await?;
        if !expected.equals(segments[0]) {
            return Err(BlockError::Miscompare);
        }
    }
    Ok(())
}

/// [`Operation::Copy`] by way of one of the shard's buffers. `request` was checked; another operation is refused.
pub async fn copy_by_bounce(volume: &dyn Volume, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
    let Operation::Copy { source } = request.operation else { return Err(BlockError::Unsupported) };
    let geometry = volume.geometry();
    let buffer = cx.buffers.take().await;
    let cx = cx.deeper();
    for (at, count) in pieces(&geometry, request.count, BUFFER_SIZE as u64) {
        let segments = [buffer.segment((count.0 << geometry.block_size.shift()) as usize)];
        // No overflow: both ranges were checked.
        let (from, to) = (Lba(source.0 + at), Lba(request.lba.0 + at));
        let read = Request { operation: Operation::Read, lba: from, count, segments: &segments };
        volume.submit(cx.with_scratch(&cx.scratch.carve_rest()), read).await?;
        let write = Operation::Write { fua: false };
        let write = Request { operation: write, lba: to, count, segments: &segments };
        volume.submit(cx.with_scratch(&cx.scratch.carve_rest()), write).await?;
    }
    Ok(())
}
