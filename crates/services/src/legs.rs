//! What services do with their legs: compare their shapes, and read and write them where no shard is at hand.

use std::{cell::RefCell, future::poll_fn, pin::Pin, rc::Rc, sync::Arc, task::Poll};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Lba, Operation, Request, Step, TaskContext, Volume, VolumeError, trace::Tap,
};
use millrace_engine::{EngineError, Launch, Shard, ShardConfig};
use millrace_memory::BUFFER_SIZE;

use crate::{background::LocalFuture, losses::Losses, service::ServiceError};

/// What a service is over: a volume, behind the place where its requests can be watched. Of a known type, so that going past that place is
/// a look at a word and not a call.
pub type Leg = Arc<Tap>;

/// Bytes that are erased with one request.
pub(crate) const ERASED_AT_ONCE: u64 = 1 << 30;

/// The block size that all legs have.
///
/// # Errors
/// When they differ.
pub fn common_block_size(legs: &[Leg]) -> Result<BlockSize, ServiceError> {
    let mut sizes = legs.iter().map(|leg| leg.geometry().block_size);
    let first = sizes.next().ok_or_else(|| ServiceError::Legs("there is no leg".to_owned()))?;
    match sizes.position(|size| size != first) {
        None => Ok(first),
        Some(at) => Err(ServiceError::Legs(format!(
            "leg 0 has blocks of {} bytes and leg {} of {}: they must be alike",
            first.bytes(),
            at + 1,
            legs[at + 1].geometry().block_size.bytes()
        ))),
    }
}

/// How many of a volume's bytes are whole blocks of this size.
///
/// # Errors
/// When there is none.
pub(crate) fn whole_blocks(volume: &str, bytes: u64, block_size: BlockSize) -> Result<u64, VolumeError> {
    let (volume, why) = (volume.to_owned(), "the volume is smaller than one block");
    match bytes >> block_size.shift() << block_size.shift() {
        0 => Err(VolumeError::BadBlockSize { volume, block_size: block_size.bytes(), why }),
        bytes => Ok(bytes),
    }
}

/// Gives a leg so many blocks; of the bytes that stand at it in the stack (`stated`) it keeps those that it has, for it is told these when it
/// is opened again, however small the volume is.
pub(crate) fn resize_leg(leg: &Leg, blocks: BlockCount, stated: u64) -> Result<(), VolumeError> {
    let has = leg.geometry();
    let kept = stated.div_ceil(u64::from(has.block_size.bytes())).min(has.blocks.0);
    match BlockCount(blocks.0.max(kept)) {
        // Not even asked: a file would lose what makes no whole block, and is told that as well.
        blocks if blocks == has.blocks => Ok(()),
        blocks => leg.resize(blocks),
    }
}

/// What legs can do together: what each of them can, and a volatile cache if any has one.
pub fn common_geometry(legs: &[Leg], block_size: BlockSize, blocks: BlockCount) -> Geometry {
    let all = legs.iter().map(|leg| leg.geometry());
    let start = Geometry { block_size, blocks, read_only: false, volatile_cache: false, deallocate: true };
    all.fold(start, |sum, leg| Geometry {
        read_only: sum.read_only || leg.read_only,
        volatile_cache: sum.volatile_cache || leg.volatile_cache,
        deallocate: sum.deallocate && leg.deallocate,
        ..sum
    })
}

/// Whether an erasure may cost a leg what a write of as many bytes does: it is not to give the blocks back, or the leg cannot, and writes zeroes.
pub(crate) fn writes_zeroes(operation: Operation, leg: &(impl Volume + ?Sized)) -> bool {
    matches!(operation, Operation::WriteZeroes { deallocate, .. } if !deallocate || !leg.geometry().deallocate)
}

/// The largest scratch that a request to one of the legs needs.
pub fn largest_scratch(legs: &[Leg]) -> usize {
    legs.iter().map(|leg| leg.scratch_bytes()).max().unwrap_or(0)
}

thread_local! {
    /// A shard of this thread's own, without a loop: it turns while work is waited for.
    static OWN: RefCell<Option<Shard>> = const { RefCell::new(None) };
}

/// Does work that waits for I/O on the calling thread, which must not be a shard's.
///
/// # Errors
/// When the thread cannot have a ring.
pub fn block_on<T: 'static>(work: impl for<'a> FnOnce(TaskContext<'a>) -> LocalFuture<'a, T>) -> Result<T, EngineError> {
    Ok(block_on_all([work])?.pop().expect("a result for each piece of work"))
}

/// [`block_on`] for several pieces of work, side by side as far as the thread's shard has slots; their results, in their order.
fn block_on_all<T: 'static, W>(works: impl IntoIterator<Item = W>) -> Result<Vec<T>, EngineError>
where
    W: for<'a> FnOnce(TaskContext<'a>) -> LocalFuture<'a, T>,
{
    // Taken out, so that work which itself blocks gets another one.
    let mut shard = match OWN.take() {
        Some(shard) => shard,
        None => Shard::new(&ShardConfig::of_thread())?,
    };
    let mut works = works.into_iter().peekable();
    let results = Rc::new(RefCell::new(Vec::<Option<T>>::new()));
    while works.peek().is_some() || results.borrow().iter().any(Option::is_none) {
        let context = shard.context();
        while works.peek().is_some()
            && let Some(slot) = context.reserve()
        {
            let (work, out, at) = (works.next().expect("there is one"), Rc::clone(&results), results.borrow().len());
            results.borrow_mut().push(None);
            let _ = slot.run(|cx| {
                let future = work(cx);
                Launch::<()>::Wait(cx.scratch.place_future(async move {
                    let value = future.await;
                    out.borrow_mut()[at] = Some(value);
                }))
            });
        }
        if results.borrow().iter().any(Option::is_none) {
            shard.turn_or_sleep();
        }
    }
    OWN.set(Some(shard));
    Ok(results.take().into_iter().map(|value| value.expect("all have ended")).collect())
}

/// Moves `len` bytes at a byte offset, both multiples of the block size.
async fn transfer(
    cx: TaskContext<'_>,
    leg: &(impl Volume + ?Sized),
    operation: Operation,
    offset: u64,
    data: &mut [u8],
) -> Result<(), BlockError> {
    let shift = leg.geometry().block_size.shift();
    let buffer = cx.buffers.take().await;
    let cx = cx.deeper();
    let mut at = offset;
    for piece in data.chunks_mut(BUFFER_SIZE) {
        let segments = [buffer.segment(piece.len())];
        if operation.is_write() {
            segments[0].write_at(0, piece);
        }
        let (lba, count) = (Lba(at >> shift), BlockCount((piece.len() >> shift) as u64));
        let request = Request { operation, lba, count, segments: &segments };
        leg.submit(cx.with_scratch(&cx.scratch.carve_rest()), request).await?;
        if !operation.is_write() {
            segments[0].read_at(0, piece);
        }
        at += piece.len() as u64;
    }
    Ok(())
}

/// Reads bytes of a leg into memory. For tasks and mounts; a data path moves segments.
pub async fn read_bytes(
    cx: TaskContext<'_>,
    leg: &(impl Volume + ?Sized),
    offset: u64,
    len: usize,
) -> Result<Vec<u8>, BlockError> {
    let mut data = vec![0; len];
    transfer(cx, leg, Operation::Read, offset, &mut data).await?;
    Ok(data)
}

/// Writes bytes to a leg. They are durable after a flush, not before.
pub async fn write_bytes(
    cx: TaskContext<'_>,
    leg: &(impl Volume + ?Sized),
    offset: u64,
    mut data: Vec<u8>,
) -> Result<(), BlockError> {
    transfer(cx, leg, Operation::Write { fua: false }, offset, &mut data).await
}

/// Makes what was written to a leg durable.
pub async fn flush(cx: TaskContext<'_>, leg: &(impl Volume + ?Sized)) -> Result<(), BlockError> {
    let request = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };
    leg.submit(cx.with_scratch(&cx.scratch.carve_rest()), request).await
}

/// Makes bytes of a leg read as zeroes, durably; both numbers are multiples of the block size.
pub async fn erase(cx: TaskContext<'_>, leg: &(impl Volume + ?Sized), offset: u64, len: u64) -> Result<(), BlockError> {
    clear_all(cx, leg, offset, len).await?;
    flush(cx, leg).await
}

/// [`erase`], not yet durably.
pub(crate) async fn clear_all(
    cx: TaskContext<'_>,
    leg: &(impl Volume + ?Sized),
    offset: u64,
    len: u64,
) -> Result<(), BlockError> {
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(ERASED_AT_ONCE);
        clear(cx, leg, offset + done, piece).await?;
        done += piece;
    }
    Ok(())
}

/// Makes bytes of a leg read as zeroes, with one request.
pub(crate) async fn clear(
    cx: TaskContext<'_>,
    leg: &(impl Volume + ?Sized),
    offset: u64,
    len: u64,
) -> Result<(), BlockError> {
    let shift = leg.geometry().block_size.shift();
    let operation = Operation::WriteZeroes { fua: false, deallocate: true };
    let (lba, count) = (Lba(offset >> shift), BlockCount(len >> shift));
    let request = Request { operation, lba, count, segments: &[] };
    leg.submit(cx.with_scratch(&cx.scratch.carve_rest()), request).await
}

/// Whether all bytes are zeroes. With few early ends, so that the compiler makes vectors of it.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(512).all(|part| part.iter().fold(0, |sum, byte| sum | byte) == 0)
}

/// Waits until every step has ended, and hands on their results.
pub(crate) async fn wait_for_all(steps: &mut [Option<Step<'_>>], mut note: impl FnMut(usize, Result<(), BlockError>)) {
    poll_fn(|cx| {
        let mut waiting = false;
        for (leg, place) in steps.iter_mut().enumerate() {
            let Some(step) = place else { continue };
            match Pin::new(step).poll(cx) {
                Poll::Pending => waiting = true,
                Poll::Ready(result) => {
                    *place = None;
                    note(leg, result);
                }
            }
        }
        if waiting { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
}

/// [`read_bytes`] on the calling thread.
///
/// # Errors
/// [`ServiceError::Leg`] with what the leg said.
pub fn read(leg: &Arc<impl Volume + ?Sized + 'static>, offset: u64, len: usize) -> Result<Vec<u8>, ServiceError> {
    let volume = Arc::clone(leg);
    let result = block_on(move |cx| Box::pin(async move { read_bytes(cx, &*volume, offset, len).await }))?;
    result.map_err(|source| ServiceError::Leg { what: "read", leg: leg.name().to_owned(), source })
}

/// [`write_bytes`] on the calling thread, made durable.
///
/// # Errors
/// [`ServiceError::Leg`] with what the leg said.
pub fn write(leg: &Arc<impl Volume + ?Sized + 'static>, offset: u64, data: Vec<u8>) -> Result<(), ServiceError> {
    let volume = Arc::clone(leg);
    let result = block_on(move |cx| {
        Box::pin(async move {
            write_bytes(cx, &*volume, offset, data).await?;
            flush(cx, &*volume).await
        })
    })?;
    result.map_err(|source| ServiceError::Leg { what: "write", leg: leg.name().to_owned(), source })
}

/// What is to be written to a leg, each piece durable before the next one: where, and what.
pub(crate) type Stores = Vec<(u64, Vec<u8>)>;

type OnLeg = Box<dyn for<'a> FnOnce(TaskContext<'a>) -> LocalFuture<'a, Result<(), BlockError>>>;

/// Writes to several legs side by side on the calling thread, and waits for all; what each of them said.
///
/// # Errors
/// When the thread cannot have a ring.
pub(crate) fn store_on_all<'a>(
    stores: impl Iterator<Item = (&'a Leg, Stores)>,
) -> Result<Vec<Result<(), ServiceError>>, ServiceError> {
    on_all("write", stores, |leg, writes| {
        Box::new(move |cx| {
            Box::pin(async move {
                for (offset, data) in writes {
                    write_bytes(cx, &*leg, offset, data).await?;
                    flush(cx, &*leg).await?;
                }
                Ok(())
            })
        })
    })
}

type Reading = Box<dyn for<'a> FnOnce(TaskContext<'a>) -> LocalFuture<'a, Result<Vec<u8>, BlockError>>>;

/// Reads `len` bytes at each of these places on the calling thread, side by side as far as its shard has slots; the first `kept` of each, in
/// their order.
///
/// # Errors
/// When the thread cannot have a ring.
pub(crate) fn read_beginnings(
    places: impl Iterator<Item = (Leg, u64)>,
    len: usize,
    kept: usize,
) -> Result<Vec<Result<Vec<u8>, ServiceError>>, ServiceError> {
    let one = |(leg, offset): (Leg, u64)| {
        let name = leg.name().to_owned();
        let work: Reading = Box::new(move |cx| {
            Box::pin(async move {
                let mut bytes = read_bytes(cx, &*leg, offset, len).await?;
                bytes.truncate(kept);
                bytes.shrink_to_fit();
                Ok(bytes)
            })
        });
        (name, work)
    };
    let (names, works): (Vec<_>, Vec<_>) = places.map(one).unzip();
    let said =
        |(leg, result): (String, Result<_, _>)| result.map_err(|source| ServiceError::Leg { what: "read", leg, source });
    Ok(names.into_iter().zip(block_on_all(works)?).map(said).collect())
}

/// Flushes legs side by side on the calling thread, and waits for all; what each of them said.
///
/// # Errors
/// When the thread cannot have a ring.
pub(crate) fn flush_all<'a>(legs: impl Iterator<Item = &'a Leg>) -> Result<Vec<Result<(), ServiceError>>, ServiceError> {
    on_all("flush", legs.map(|leg| (leg, ())), |leg, ()| Box::new(move |cx| Box::pin(async move { flush(cx, &*leg).await })))
}

/// [`flush_all`], of which the guest is told what a leg refuses: from when the leg has said so, for its next flush, which may be the guest's
/// and beside the others of these, may succeed.
pub(crate) fn flush_all_telling<'a>(
    legs: impl Iterator<Item = &'a Leg>,
    losses: &Arc<Losses>,
) -> Result<Vec<Result<(), ServiceError>>, ServiceError> {
    on_all("flush", legs.map(|leg| (leg, Arc::clone(losses))), |leg, losses| {
        Box::new(move |cx| Box::pin(async move { flush(cx, &*leg).await.inspect_err(|_| losses.add()) }))
    })
}

fn on_all<'a, D>(
    what: &'static str,
    legs: impl Iterator<Item = (&'a Leg, D)>,
    work: impl Fn(Leg, D) -> OnLeg,
) -> Result<Vec<Result<(), ServiceError>>, ServiceError> {
    let (legs, works): (Vec<_>, Vec<_>) = legs.map(|(leg, data)| (leg, work(Arc::clone(leg), data))).unzip();
    let said = |(leg, result): (&Leg, Result<(), BlockError>)| {
        result.map_err(|source| ServiceError::Leg { what, leg: leg.name().to_owned(), source })
    };
    Ok(legs.into_iter().zip(block_on_all(works)?).map(said).collect())
}
