//! A range of one volume to the same place of another, some pieces at a time.

use std::{cell::Cell, ops::Range};

use millrace_block::{
    BlockCount, BlockError, Lba, METADATA_SIZE, NO_METADATA, Operation, Request, Scratch, ScratchBox, Step, TaggedRequest,
    TaskContext, Volume, all, placed_bytes, yield_now,
};
use millrace_memory::{BUFFER_SIZE, BounceBuffer, Segment};

/// Bytes of a piece.
pub(crate) const PIECE: u64 = BUFFER_SIZE as u64;
/// Bytes of a piece's data where their metadata come with them: whole blocks of any size, and both fit a buffer.
const TAGGED_PIECE: usize = 60 << 10;
/// Room for their metadata, if they are of the smallest blocks.
const TAGS: usize = TAGGED_PIECE / 512 * METADATA_SIZE;
const _: () = assert!(TAGGED_PIECE + TAGS <= BUFFER_SIZE);
/// Pieces at a time, at most.
const LANES: usize = 8;
/// Bytes of a task's memory that lanes may take together; one lane may take more.
const ROOM: usize = 24 << 10;
/// Bytes that are looked at together for whether they are zeroes.
const LOOK: usize = 4096;

/// Which volume failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Target,
}

/// Why a piece was not copied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    pub(crate) side: Side,
    /// Byte at which the piece begins.
    pub(crate) offset: u64,
    pub(crate) error: BlockError,
}

/// What was done with the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Written.
    pub(crate) written: u64,
    /// Read as zeroes and made so on the target, without data.
    pub(crate) zeroes: u64,
}

/// From where to where.
#[derive(Clone, Copy)]
pub(crate) struct Ends<'a> {
    pub(crate) source: &'a dyn Volume,
    pub(crate) target: &'a dyn Volume,
    /// The target may have most of it: it is read first, and written where it differs.
    pub(crate) compare: bool,
    /// Blocks go with their metadata: both volumes keep them, with blocks of one size. Not together with `compare`.
    pub(crate) tagged: bool,
}

/// Memory of a piece.
#[derive(Clone, Copy)]
struct Memory {
    data: Segment,
    /// Room for the blocks' metadata; `None`: they are left alone.
    metadata: Option<Segment>,
}

impl Memory {
    /// A buffer's, for so many bytes of data.
    fn of(buffer: &BounceBuffer, len: usize, tagged: bool) -> Self {
        if !tagged {
            return Self { data: buffer.segment(len), metadata: None };
        }
        assert!(len <= TAGGED_PIECE, "metadata lie behind the data");
        let metadata = buffer.segment(BUFFER_SIZE).part(TAGGED_PIECE, TAGS);
        Self { data: buffer.segment(len), metadata: Some(metadata.expect("both fit a buffer")) }
    }

    /// The metadata of so many blocks.
    fn tags(self, count: BlockCount) -> Option<Segment> {
        let len = count.0 as usize * METADATA_SIZE;
        self.metadata.map(|all| all.part(0, len).expect("room for those of the smallest blocks"))
    }
}

#[derive(Default)]
struct Tally {
    written: Cell<u64>,
    zeroes: Cell<u64>,
    /// What failed first.
    failed: Cell<Option<Failure>>,
}

fn add(counter: &Cell<u64>, bytes: usize) {
    counter.set(counter.get() + bytes as u64);
}

fn is_zero(segment: Segment) -> bool {
    let mut bytes = [0; LOOK];
    (0..segment.len()).step_by(LOOK).all(|at| {
        let bytes = &mut bytes[..LOOK.min(segment.len() - at)];
        segment.read_at(at, bytes);
        crate::legs::is_zero(bytes)
    })
}

/// Whether no block has metadata.
fn is_absent(tags: Segment) -> bool {
    (0..tags.len()).step_by(METADATA_SIZE).all(|at| {
        let mut tag = [0; METADATA_SIZE];
        tags.read_at(at, &mut tag);
        tag == NO_METADATA
    })
}

impl Ends<'_> {
    async fn ask(
        self,
        cx: TaskContext<'_>,
        side: Side,
        operation: Operation,
        at: u64,
        memory: Memory,
    ) -> Result<(), BlockError> {
        let volume = if side == Side::Source { self.source } else { self.target };
        let data = memory.data;
        let shift = volume.geometry().block_size.shift();
        let (lba, count) = (Lba(at >> shift), BlockCount(data.len() as u64 >> shift));
        let segments = [data];
        let segments = if operation.has_data() { &segments[..] } else { &[] };
        let arena = cx.scratch.carve_rest();
        let cx = cx.with_scratch(&arena);
        let step = match memory.tags(count) {
            Some(metadata) => volume.submit_tagged(cx, TaggedRequest { operation, lba, count, data, metadata }),
            None => volume.submit(cx, Request { operation, lba, count, segments }),
        };
        step.await
    }

    /// The same memory, without metadata if no block of the target's would get any: a plain request leaves them so, for less.
    fn needed(self, memory: Memory) -> Memory {
        let shift = self.target.geometry().block_size.shift();
        let tags = memory.tags(BlockCount(memory.data.len() as u64 >> shift));
        if tags.is_some_and(is_absent) { Memory { metadata: None, ..memory } } else { memory }
    }

    /// One piece.
    async fn piece(self, cx: TaskContext<'_>, tally: &Tally, at: u64, memory: Memory) -> Result<(), BlockError> {
        let failed = |side| move |error: BlockError| (side, error);
        let result = async {
            self.ask(cx, Side::Source, Operation::Read, at, memory).await.map_err(failed(Side::Source))?;
            let target = failed(Side::Target);
            if self.compare {
                match self.ask(cx, Side::Target, Operation::Compare, at, memory).await {
                    Ok(()) => return Ok(()),
                    // What cannot be read may be written.
                    Err(BlockError::Miscompare | BlockError::ReadFault { .. }) => {}
                    Err(error) => return Err(target(error)),
                }
            }
            let memory = self.needed(memory);
            let (operation, counter) = if memory.metadata.is_none() && is_zero(memory.data) {
                (Operation::WriteZeroes { fua: false, deallocate: true }, &tally.zeroes)
            } else {
                (Operation::Write { fua: false }, &tally.written)
            };
            self.ask(cx, Side::Target, operation, at, memory).await.map_err(target)?;
            add(counter, memory.data.len());
            Ok(())
        };
        result.await.map_err(|(side, error)| {
            tally.failed.set(tally.failed.get().or(Some(Failure { side, offset: at, error })));
            error
        })
    }

    /// One piece after the other, from `next` on, until one of any lane's fails.
    async fn lane(
        self,
        cx: TaskContext<'_>,
        tally: &Tally,
        (next, end): (&Cell<u64>, u64),
        buffer: &BounceBuffer,
    ) -> Result<(), BlockError> {
        let most = if self.tagged { TAGGED_PIECE as u64 } else { PIECE };
        while next.get() < end && tally.failed.get().is_none() {
            let at = next.get();
            let len = most.min(end - at);
            next.set(at + len);
            self.piece(cx, tally, at, Memory::of(buffer, len as usize, self.tagged)).await?;
            // Places in memory make nobody wait, and requests do.
            yield_now().await;
        }
        Ok(())
    }

    /// Scratch bytes of one lane.
    fn lane_bytes(self) -> usize {
        let inner = self.source.scratch_bytes().max(self.target.scratch_bytes());
        placed_bytes::<Scratch>() + inner.next_multiple_of(8) + lane_bytes(Self::lane)
    }
}

type Lane<'a, F> = fn(Ends<'a>, TaskContext<'a>, &'a Tally, (&'a Cell<u64>, u64), &'a BounceBuffer) -> F;

fn lane_bytes<F: Future>(_: Lane<'_, F>) -> usize {
    placed_bytes::<F>()
}

/// Copies a range of bytes, whole blocks of both volumes, with `cx`'s buffers. It is on the target after a flush.
pub(crate) async fn copy(cx: TaskContext<'_>, ends: Ends<'_>, range: Range<u64>) -> Result<Moved, Failure> {
    assert!(!(ends.compare && ends.tagged), "metadata are not compared");
    let each = ends.lane_bytes();
    let lanes = (ROOM / each).clamp(1, LANES);
    // One may be waited for, not more: others may wait for their second, too.
    let mut buffers: [Option<BounceBuffer>; LANES] = Default::default();
    buffers[0] = Some(cx.buffers.take().await);
    for place in &mut buffers[1..lanes] {
        *place = cx.buffers.try_take();
    }
    let (tally, below, next) = (Tally::default(), cx.deeper(), Cell::new(range.start));
    let mut arenas: [Option<ScratchBox<'_, Scratch>>; LANES] = Default::default();
    for (arena, _) in arenas.iter_mut().zip(&buffers).filter(|(_, buffer)| buffer.is_some()) {
        *arena = Some(cx.scratch.carve(each));
    }
    let mut steps: [Option<Step<'_>>; LANES] = Default::default();
    for (step, (arena, buffer)) in steps.iter_mut().zip(arenas.iter().zip(&buffers)) {
        let (Some(arena), Some(buffer)) = (arena, buffer) else { continue };
        let lane = ends.lane(below.with_scratch(arena), &tally, (&next, range.end), buffer);
        *step = Some(Step::Wait(arena.place_future(lane)));
    }
    let ended = all(&mut steps).await;
    if let Some(failure) = tally.failed.get() {
        return Err(failure);
    }
    assert!(ended.is_ok(), "who fails says where");
    Ok(Moved { written: tally.written.get(), zeroes: tally.zeroes.get() })
}
