//! A volume that spoils another one, for tests: errors, delays, torn, lost and corrupted data, and power losses.
//!
//! ```text
//!   submit ─► rules: does one strike? ─► fail, delay, tear, lose, corrupt
//!                │ no                       (from the seed, so that a run can be repeated)
//!                ├─► writes are held? ─► cache of unflushed blocks ── flush ─► inner volume
//!                │                        └─ power_loss: each block keeps some unflushed version, or none
//!                └─► inner volume
//! ```
//!
//! Unlike the other volumes it allocates and locks: it serves tests only, and is compiled for them only.

mod cache;
mod late;
mod rules;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, IoOperation, Lba, Operation, Request, Scratch, Step, TaskContext, Usage,
    Volume, VolumeError, check, compare_by_reading, copy_by_bounce, future_bytes, placed_bytes, yield_now,
};
use millrace_memory::{BUFFER_SIZE, SegmentCursor};

use self::{cache::Cache, rules::Rules};
pub use self::{
    late::Late,
    rules::{Effect, Kind, Rule, When},
};

/// Blocks a held erasure may have; longer ones go to the inner volume at once.
const HELD_ERASURE: u64 = 1 << 16;

#[derive(Debug)]
struct State {
    rules: Rules,
    /// `Some` while writes are held.
    cache: Option<Cache>,
    /// Somebody moves blocks from the cache, or past it, to the inner volume.
    writing_through: bool,
}

/// Whoever has it may write to the inner volume while writes are held: one at a time, or the older version of a block could come
/// after the newer.
struct Turn<'a>(&'a FaultVolume);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state().writing_through = false;
    }
}

/// See the module.
pub struct FaultVolume {
    inner: Arc<dyn Volume>,
    state: Mutex<State>,
    requests: [AtomicU64; Kind::COUNT],
    faults: AtomicU64,
}

impl std::fmt::Debug for FaultVolume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultVolume").field("inner", &self.inner.name()).field("state", &self.state).finish_non_exhaustive()
    }
}

impl FaultVolume {
    /// Wraps a volume. Without rules and held writes, all requests are simply passed on.
    pub fn new(inner: Arc<dyn Volume>, seed: u64) -> Arc<Self> {
        let state = Mutex::new(State { rules: Rules::new(seed), cache: None, writing_through: false });
        Arc::new(Self { inner, state, requests: [const { AtomicU64::new(0) }; Kind::COUNT], faults: AtomicU64::new(0) })
    }

    /// Puts a rule in force.
    pub fn add(&self, rule: Rule) {
        self.state().rules.add(rule);
    }

    /// Ends all rules.
    pub fn clear(&self) {
        self.state().rules.clear();
    }

    /// From now on keeps writes from the inner volume until they are flushed (or are FUA), so that a power loss can take
    /// them. Compares and copies are then made of reads and writes, which the rules see too.
    pub fn hold_writes(&self) {
        self.state().cache.get_or_insert_default();
    }

    /// Takes the power away and gives it back: each block falls back to some version since the last flush, or to what it held
    /// then. Returns the number of blocks that lost something. No request may be in flight.
    pub fn power_loss(&self) -> u64 {
        let state = &mut *self.state();
        state.cache.as_mut().map_or(0, |cache| cache.power_loss(&mut state.rules.random))
    }

    /// Requests of a kind so far.
    pub fn requests(&self, kind: Kind) -> u64 {
        self.requests[kind as usize].load(Ordering::Relaxed)
    }

    /// Requests so far that a rule struck.
    pub fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_cache<R>(&self, f: impl FnOnce(&mut Cache) -> R) -> Option<R> {
        self.state().cache.as_mut().map(f)
    }

    async fn turn(&self) -> Turn<'_> {
        while std::mem::replace(&mut self.state().writing_through, true) {
            yield_now().await;
        }
        Turn(self)
    }

    async fn run(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let verdict = self.state().rules.judge(&request);
        self.faults.fetch_add(u64::from(verdict.is_some()), Ordering::Relaxed);
        match verdict {
            Some(Effect::Fail(error)) => return Err(error),
            Some(Effect::Forget(error)) => {
                if request.operation == Operation::Flush {
                    self.power_loss();
                }
                return Err(error);
            }
            Some(Effect::Lose) => return Ok(()),
            Some(Effect::Tear) => return self.tear(cx, request).await,
            Some(Effect::Delay(time)) => {
                cx.io(IoOperation::Sleep(time)).await;
            }
            Some(Effect::Corrupt) | None => {}
        }
        if self.with_cache(|_| ()).is_some() {
            self.run_held(cx, request.clone()).await?;
        } else {
            self.inner.submit(cx, request.clone()).await?;
        }
        if verdict == Some(Effect::Corrupt) && request.operation == Operation::Read {
            self.corrupt(&request);
        }
        Ok(())
    }

    /// Writes some of the blocks, then fails.
    async fn tear(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        if matches!(request.operation, Operation::Write { .. }) {
            let block = self.geometry().block_size.bytes() as usize;
            let mut data = SegmentCursor::new(request.segments);
            for i in 0..request.count.0 {
                let buffer = cx.buffers.take().await;
                let segments = [buffer.segment(block)];
                data.copy_to(segments[0]);
                let reaches = self.state().rules.random.below(2) == 0;
                if reaches {
                    let part = Request { lba: Lba(request.lba.0 + i), count: BlockCount(1), segments: &segments, ..request };
                    self.put(cx, part).await?;
                }
            }
        }
        Err(BlockError::WriteFault { errno: 0 })
    }

    fn corrupt(&self, request: &Request<'_>) {
        let len = millrace_memory::total_len(request.segments) as u64;
        if len == 0 {
            return;
        }
        let (at, bit) = {
            let random = &mut self.state().rules.random;
            (random.below(len) as usize, random.below(8))
        };
        let mut cursor = SegmentCursor::new(request.segments);
        cursor.skip(at);
        if let Some(byte) = cursor.next_run(1) {
            byte.write_value(0, &(byte.read_value::<u8>(0) ^ 1 << bit));
        }
    }

    /// A write, to the cache if writes are held and this one may be.
    async fn put(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let block = self.geometry().block_size.bytes() as usize;
        let held = request.operation == Operation::Write { fua: false }
            && self
                .with_cache(|cache| {
                    let mut data = SegmentCursor::new(request.segments);
                    for i in 0..request.count.0 {
                        cache.write(request.lba.0 + i, take_bytes(&mut data, block));
                    }
                })
                .is_some();
        if !held {
            let _turn = self.turn().await;
            self.inner.submit(cx, request.clone()).await?;
            self.with_cache(|cache| cache.forget(request.lba.0, request.count.0));
        }
        Ok(())
    }

    /// A request while writes are held.
    async fn run_held(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let geometry = self.geometry();
        let block = geometry.block_size.bytes() as usize;
        match request.operation {
            Operation::Read => {
                // Before as well: a flush beside this read may move blocks to the inner volume after that was read.
                let latest = |cache: &mut Cache, i: u64| cache.latest(request.lba.0 + i).map(Box::<[u8]>::from);
                let before: Option<Vec<_>> =
                    self.with_cache(|cache| (0..request.count.0).map(|i| latest(cache, i)).collect());
                self.inner.submit(cx, request.clone()).await?;
                for (i, before) in (0..).zip(before.into_iter().flatten()) {
                    let data = self.with_cache(|cache| latest(cache, i)).flatten().or(before);
                    if let Some(data) = data {
                        give_bytes(&request, i as usize * block, &data);
                    }
                }
                Ok(())
            }
            Operation::Write { .. } => self.put(cx, request).await,
            Operation::WriteZeroes { fua: false, .. } | Operation::Deallocate
                if request.count.0 <= HELD_ERASURE
                    && (request.operation != Operation::Deallocate || geometry.deallocate) =>
            {
                self.with_cache(|cache| {
                    for i in 0..request.count.0 {
                        cache.write(request.lba.0 + i, vec![0; block].into());
                    }
                });
                Ok(())
            }
            Operation::WriteZeroes { .. } | Operation::Deallocate => {
                let _turn = self.turn().await;
                self.inner.submit(cx, request.clone()).await?;
                if geometry.deallocate || request.operation != Operation::Deallocate {
                    self.with_cache(|cache| cache.forget(request.lba.0, request.count.0));
                }
                Ok(())
            }
            Operation::Flush => self.flush(cx, request).await,
            Operation::Compare => compare_by_reading(self, cx, request).await,
            Operation::Copy { .. } => copy_by_bounce(self, cx, request).await,
        }
    }

    /// Writes the held blocks to the inner volume, neighbours together, and flushes that.
    async fn flush(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        // Before the turn: who has a buffer may be waiting for theirs.
        let buffer = cx.buffers.take().await;
        let _turn = self.turn().await;
        let Some(snapshot) = self.with_cache(|cache| cache.snapshot()) else { return Ok(()) };
        let block = self.geometry().block_size.bytes() as usize;
        let mut left = &snapshot.blocks[..];
        while let Some((first, _)) = left.first() {
            let adjoin = |(i, (lba, _)): (usize, &(u64, Box<[u8]>))| *lba == first + i as u64;
            let run = left.iter().enumerate().take(BUFFER_SIZE / block).take_while(|entry| adjoin(*entry)).count();
            let (now, rest) = left.split_at(run);
            let segments = [buffer.segment(run * block)];
            for (i, (_, data)) in now.iter().enumerate() {
                segments[0].write_at(i * block, data);
            }
            let (lba, count) = (Lba(*first), BlockCount(run as u64));
            let write = Request { operation: Operation::Write { fua: false }, lba, count, segments: &segments };
            self.inner.submit(cx, write).await?;
            left = rest;
        }
        drop(buffer);
        self.inner.submit(cx, request).await?;
        self.with_cache(|cache| cache.flushed(snapshot.mark));
        Ok(())
    }
}

/// The next `len` bytes, as memory of our own.
fn take_bytes(data: &mut SegmentCursor<'_>, len: usize) -> Box<[u8]> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while let Some(run) = data.next_run(len - done) {
        run.read_at(0, &mut bytes[done..done + run.len()]);
        done += run.len();
    }
    bytes.into()
}

/// Puts bytes at an offset in the request's memory.
fn give_bytes(request: &Request<'_>, offset: usize, mut bytes: &[u8]) {
    let mut cursor = SegmentCursor::new(request.segments);
    cursor.skip(offset);
    while let Some(run) = cursor.next_run(bytes.len()) {
        let (now, rest) = bytes.split_at(run.len());
        run.write_at(0, now);
        bytes = rest;
    }
}

impl Volume for FaultVolume {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn geometry(&self) -> Geometry {
        let held = self.with_cache(|_| ()).is_some();
        let inner = self.inner.geometry();
        Geometry { volatile_cache: inner.volatile_cache || held, ..inner }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Err(error) = check(&self.geometry(), &request) {
            return Step::Done(Err(error));
        }
        self.requests[Kind::of(request.operation) as usize].fetch_add(1, Ordering::Relaxed);
        Step::Wait(cx.scratch.place_future(self.run(cx, request)))
    }

    fn scratch_bytes(&self) -> usize {
        // A compare or copy while writes are held runs a read or write of ours within itself.
        2 * future_bytes(Self::run) + placed_bytes::<Scratch>() + self.inner.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.inner.resize(blocks)?;
        self.with_cache(|cache| cache.forget(blocks.0, u64::MAX));
        Ok(())
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.inner.format(block_size)?;
        self.with_cache(|cache| cache.forget(0, u64::MAX));
        Ok(())
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}
