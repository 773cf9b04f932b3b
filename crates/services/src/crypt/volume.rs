//! The path of a request.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
};
use std::time::Duration;

use millrace_block::{
    BlockCount, BlockError, BlockSize, Epochs, Geometry, Held, IoOperation, Lba, Operation, Request, Scratch, Step,
    TaskContext, TaskFuture, Usage, Visit, Volume, VolumeError, check, compare_by_reading, copy_by_bounce, future_bytes,
    held_bytes, helpers_scratch_bytes, pieces, placed_bytes, submit_held,
};
use millrace_cipher::{KeySource, Run, Secret, foresee};
use millrace_memory::{Access, BUFFER_SIZE, BounceBuffer, SegmentCursor, Target};

use super::{CryptPlan, control::Control, header::OFFSET, keys::Keys};
use crate::{
    flushes::Flushes,
    legs::{Leg, resize_leg},
    service::Keeps,
};

/// How often a request looks whether its blocks are re-enciphered.
const LOOK_AGAIN: Duration = Duration::from_micros(100);

/// The service.
pub(super) struct Crypt {
    pub(super) name: String,
    pub(super) leg: Leg,
    /// Bytes that stand at the leg in the stack, and whether it opens with a smaller size than it had.
    sizing: (u64, Keeps),
    /// Where the key-encryption key came from, and the key.
    pub(super) source: KeySource,
    pub(super) kek: Secret<32>,
    pub(super) discard: bool,
    /// Bytes a second; 0: no limit.
    pub(super) rekey_rate: u64,
    pub(super) blocks: AtomicU64,
    /// Block size and abilities, so that a request need not ask the leg.
    shape: AtomicU8,
    /// `None` while it is not in force.
    pub(super) keys: Epochs<Option<Keys>>,
    pub(super) control: Mutex<Control>,
    pub(super) flushes: Flushes,
    /// How many flushes the leg had refused when the last chunk was re-enciphered in its place.
    pub(super) home_failed: AtomicU64,
    /// Somebody works on header or keys.
    pub(super) busy: AtomicBool,
}

fn pack(geometry: &Geometry) -> u8 {
    let flags = [geometry.block_size == BlockSize::B4096, geometry.read_only, geometry.volatile_cache, geometry.deallocate];
    flags.iter().enumerate().fold(0, |sum, (bit, flag)| sum | u8::from(*flag) << bit)
}

type KeysVisit<'a> = Visit<'a, Option<Keys>>;

/// A visit of keys that are there.
fn keys<'v>(visit: &'v KeysVisit<'_>) -> Result<&'v Keys, BlockError> {
    visit.as_ref().ok_or(BlockError::NotReady)
}

impl Crypt {
    pub(super) fn new(
        name: String,
        (leg, sizing): (Leg, (u64, Keeps)),
        size: u64,
        plan: &CryptPlan,
        kek: Secret<32>,
    ) -> Self {
        let geometry = leg.geometry();
        Self {
            name,
            source: plan.key.clone(),
            kek,
            discard: plan.discard,
            rekey_rate: plan.rekey_rate,
            blocks: AtomicU64::new(size >> geometry.block_size.shift()),
            shape: AtomicU8::new(pack(&geometry)),
            leg,
            sizing,
            keys: Epochs::new(None),
            control: Mutex::default(),
            flushes: Flushes::default(),
            home_failed: AtomicU64::new(0),
            busy: AtomicBool::new(false),
        }
    }

    /// Asks the leg again what it can.
    pub(super) fn look_again(&self) {
        self.shape.store(pack(&self.leg.geometry()), Ordering::Relaxed);
    }

    /// A request as the leg gets it.
    fn below<'r>(&self, request: &Request<'r>) -> Request<'r> {
        // No overflow: `check` found the range within the volume, and the leg is that much longer.
        Request { lba: Lba(request.lba.0 + (OFFSET >> self.geometry().block_size.shift())), ..request.clone() }
    }

    /// Keys that no re-keying is changing for these blocks.
    async fn enter<'a>(&'a self, cx: TaskContext<'_>, request: &Request<'_>) -> Result<KeysVisit<'a>, BlockError> {
        loop {
            let visit = self.keys.visit();
            if !keys(&visit)?.is_blocked(request.lba.0, request.count.0, request.operation == Operation::Read)? {
                return Ok(visit);
            }
            drop(visit);
            cx.io(IoOperation::Sleep(LOOK_AGAIN)).await;
        }
    }

    /// The same, and a buffer. Who has keys waits for no buffer: others may have them all, copies, whose inner requests wait for blocks
    /// that the re-keying has, and that one waits for whoever has keys. Nor does who waits for blocks have a buffer.
    async fn enter_with_buffer<'a>(
        &'a self,
        cx: TaskContext<'_>,
        request: &Request<'_>,
    ) -> Result<(KeysVisit<'a>, BounceBuffer), BlockError> {
        loop {
            drop(self.enter(cx, request).await?);
            let buffer = cx.buffers.take().await;
            let visit = self.keys.visit();
            if !keys(&visit)?.is_blocked(request.lba.0, request.count.0, request.operation == Operation::Read)? {
                return Ok((visit, buffer));
            }
        }
    }

    /// Does the first of these where the leg is memory; whether it did.
    #[inline]
    fn do_at_once(&self, keys: &Keys, run: &mut Run<'_>, geometry: &Geometry, requests: &[Request<'_>]) -> bool {
        let request = &requests[0];
        if check(geometry, request).is_err() || !keys.are_whole(request.segments) {
            return false;
        }
        let below = self.below(request);
        match request.operation {
            Operation::Read => {
                let Some(reach) = self.leg.reach(below.lba, below.count, Access::Read) else { return false };
                let next = requests.get(1).filter(|next| next.operation == Operation::Read);
                if let Some(next) = next {
                    self.prefetch(next.lba, next.count);
                }
                keys.decrypt_in(run, request.lba.0, reach.segment, request.segments, next.map(|next| next.lba.0));
            }
            Operation::Write { .. } => {
                let Some(reach) = self.leg.reach(below.lba, below.count, Access::Write) else { return false };
                let next = requests.get(1).filter(|next| next.operation.is_write()).map(|next| next.lba.0);
                keys.encrypt_in(run, request.lba.0, request.segments, reach, next);
                self.leg.reached(below.lba, below.count);
            }
            _ => return false,
        }
        true
    }

    fn read<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let visit = self.keys.visit();
        let whole = |keys: &&Keys| keys.are_whole(request.segments);
        let Some(keys) = visit.as_ref().filter(|keys| keys.next.is_none()).filter(whole) else {
            drop(visit);
            return wait(cx, self.read_slowly(cx, request));
        };
        let below = self.below(&request);
        if let Some(reach) = self.leg.reach(below.lba, below.count, Access::Read) {
            keys.decrypt_in(&mut keys.current.run(), request.lba.0, reach.segment, request.segments, None);
            return Step::Done(Ok(()));
        }
        // A level down, as wherever keys are held: the leg may wait for a buffer, and those of this level may be with copies that wait
        // for the keys to change.
        match self.leg.submit(cx.deeper(), below) {
            Step::Done(Ok(())) => {
                decrypt_in_place(keys, &request);
                Step::Done(Ok(()))
            }
            Step::Done(error) => Step::Done(error),
            Step::Wait(step) => wait(cx, finish_read(visit, request, step)),
        }
    }

    /// A read whose segments have parts of blocks, or while keys change.
    async fn read_slowly(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let visit = self.enter(cx, &request).await?;
        if keys(&visit)?.are_whole(request.segments) {
            self.leg.submit(cx.deeper(), self.below(&request)).await?;
            decrypt_in_place(keys(&visit)?, &request);
            return Ok(());
        }
        drop(visit);
        let (visit, buffer) = self.enter_with_buffer(cx, &request).await?;
        let (keys, geometry) = (keys(&visit)?, self.geometry());
        let mut cursor = SegmentCursor::new(request.segments);
        for (at, count) in pieces(&geometry, request.count, BUFFER_SIZE as u64) {
            let segments = [buffer.segment((count.0 << geometry.block_size.shift()) as usize)];
            let lba = Lba(request.lba.0 + at);
            let piece = Request { operation: Operation::Read, lba, count, segments: &segments };
            self.piece(cx, &piece).await?;
            keys.decrypt(lba.0, segments[0], segments[0]);
            cursor.copy_from(segments[0]);
        }
        Ok(())
    }

    /// One of many: what the leg leaves in the scratch goes with each.
    async fn piece(&self, cx: TaskContext<'_>, piece: &Request<'_>) -> Result<(), BlockError> {
        self.leg.submit(cx.deeper().with_scratch(&cx.scratch.carve_rest()), self.below(piece)).await
    }

    fn write<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let len = millrace_memory::total_len(request.segments);
        let visit = self.keys.visit();
        let keys = visit.as_ref().filter(|keys| keys.next.is_none());
        // By way of a buffer nothing plain reaches the leg; what is not whole blocks would.
        let whole = |keys: &&Keys| keys.are_whole(request.segments);
        if let Some(keys) = keys.filter(whole) {
            let below = self.below(&request);
            if let Some(reach) = self.leg.reach(below.lba, below.count, Access::Write) {
                keys.encrypt_in(&mut keys.current.run(), request.lba.0, request.segments, reach, None);
                self.leg.reached(below.lba, below.count);
                return Step::Done(Ok(()));
            }
        }
        let Some((keys, buffer)) = keys.filter(|_| len <= BUFFER_SIZE).and_then(|keys| Some((keys, cx.buffers.try_take()?)))
        else {
            drop(visit);
            return wait(cx, self.write_slowly(cx, request));
        };
        let piece = buffer.segment(len);
        keys.encrypt_near(request.lba.0, request.segments, piece);
        let held = submit_held(&*self.leg, cx.deeper(), &self.below(&request), &[piece]);
        match held.done() {
            Some(result) => Step::Done(result),
            None => wait(cx, finish_write(visit, buffer, held)),
        }
    }

    /// A write that is long, must wait for a buffer, or comes while keys change.
    async fn write_slowly(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let (visit, buffer) = self.enter_with_buffer(cx, &request).await?;
        let (keys, geometry) = (keys(&visit)?, self.geometry());
        let mut cursor = SegmentCursor::new(request.segments);
        for (at, count) in pieces(&geometry, request.count, BUFFER_SIZE as u64) {
            let segments = [buffer.segment((count.0 << geometry.block_size.shift()) as usize)];
            let lba = Lba(request.lba.0 + at);
            cursor.copy_to(segments[0]);
            keys.encrypt_near(lba.0, &segments, segments[0]);
            let piece = Request { operation: request.operation, lba, count, segments: &segments };
            self.piece(cx, &piece).await?;
        }
        Ok(())
    }

    /// Makes blocks read as zeroes, openly: the leg's are zeroes then.
    fn erase<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if !self.discard {
            return match request.operation {
                Operation::WriteZeroes { .. } => wait(cx, self.write_zeroes(cx, request)),
                // It is not offered: see the geometry.
                _ => Step::Done(Ok(())),
            };
        }
        let visit = self.keys.visit();
        if visit.as_ref().is_none_or(|keys| keys.next.is_some()) {
            drop(visit);
            return wait(cx, self.erase_slowly(cx, request));
        }
        match self.leg.submit(cx.deeper(), self.below(&request)) {
            Step::Done(result) => Step::Done(result),
            Step::Wait(step) => wait(cx, self.finish_erase(visit, step)),
        }
    }

    async fn finish_erase(&self, _visit: KeysVisit<'_>, step: TaskFuture<'_>) -> Result<(), BlockError> {
        let result = step.await;
        // An attempt may have shown that the leg cannot give blocks back.
        self.look_again();
        result
    }

    async fn erase_slowly(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let _visit = self.enter(cx, &request).await?;
        self.leg.submit(cx.deeper(), self.below(&request)).await
    }

    /// Writes enciphered zeroes, so that nobody sees where they are.
    async fn write_zeroes(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let (visit, buffer) = self.enter_with_buffer(cx, &request).await?;
        let (keys, geometry) = (keys(&visit)?, self.geometry());
        let fua = matches!(request.operation, Operation::WriteZeroes { fua: true, .. });
        for (at, count) in pieces(&geometry, request.count, BUFFER_SIZE as u64) {
            let segments = [buffer.segment((count.0 << geometry.block_size.shift()) as usize)];
            let lba = Lba(request.lba.0 + at);
            segments[0].fill(0);
            keys.encrypt_near(lba.0, &segments, segments[0]);
            let piece = Request { operation: Operation::Write { fua }, lba, count, segments: &segments };
            self.piece(cx, &piece).await?;
        }
        Ok(())
    }
}

fn wait<'a>(cx: TaskContext<'a>, future: impl Future<Output = Result<(), BlockError>> + 'a) -> Step<'a> {
    let future: TaskFuture<'a> = cx.scratch.place_future(future);
    Step::Wait(future)
}

fn decrypt_in_place(keys: &Keys, request: &Request<'_>) {
    let mut lba = request.lba.0;
    for segment in request.segments {
        keys.decrypt(lba, *segment, *segment);
        lba += (segment.len() / keys.unit) as u64;
    }
}

async fn finish_read(visit: KeysVisit<'_>, request: Request<'_>, step: TaskFuture<'_>) -> Result<(), BlockError> {
    step.await?;
    decrypt_in_place(keys(&visit)?, &request);
    Ok(())
}

async fn finish_write(_visit: KeysVisit<'_>, _buffer: BounceBuffer, held: Held<'_>) -> Result<(), BlockError> {
    held.await
}

impl Volume for Crypt {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        let shape = self.shape.load(Ordering::Relaxed);
        Geometry {
            block_size: if shape & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 },
            blocks: BlockCount(self.blocks.load(Ordering::Relaxed)),
            read_only: shape & 2 != 0,
            volatile_cache: shape & 4 != 0,
            deallocate: shape & 8 != 0 && self.discard,
        }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Err(error) = check(&self.geometry(), &request) {
            return Step::Done(Err(error));
        }
        match request.operation {
            Operation::Flush => self.flushes.of_guest(cx.deeper(), &*self.leg, request),
            _ if request.count.0 == 0 => Step::Done(Ok(())),
            Operation::Read => self.read(cx, request),
            Operation::Write { .. } => self.write(cx, request),
            Operation::WriteZeroes { .. } | Operation::Deallocate => self.erase(cx, request),
            Operation::Compare => wait(cx, compare_by_reading(self, cx, request)),
            Operation::Copy { .. } => wait(cx, copy_by_bounce(self, cx, request)),
        }
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let visit = self.keys.visit();
        let Some(keys) = visit.as_ref().filter(|keys| keys.next.is_none()) else { return 0 };
        let (geometry, mut run) = (self.geometry(), keys.current.run());
        let done = (0..requests.len()).take_while(|at| self.do_at_once(keys, &mut run, &geometry, &requests[*at..]));
        done.count()
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        let before = OFFSET >> self.geometry().block_size.shift();
        let Some(lba) = lba.0.checked_add(before).map(Lba) else { return false };
        match self.leg.reach(lba, count, Access::Read) {
            Some(reach) if reach.target == Target::Far && foresee(reach.segment) => true,
            _ => self.leg.prefetch(lba, count),
        }
    }

    fn settles_late(&self) -> bool {
        // Who re-enciphers blocks waits until nobody uses the keys before, and until those who did have settled: `Retired::is_free`.
        self.leg.settles_late()
    }

    fn scratch_bytes(&self) -> usize {
        let slow = future_bytes(Self::read_slowly)
            .max(future_bytes(Self::write_slowly))
            .max(future_bytes(Self::erase_slowly))
            .max(future_bytes(Self::write_zeroes));
        // These come after what the leg has placed, and their parts are smaller than a slow one's of the same request.
        let quick = held_bytes(1) + FINISH_BYTES;
        let own = (slow + placed_bytes::<Scratch>()).max(quick);
        helpers_scratch_bytes(self.leg.scratch_bytes() + own)
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let geometry = self.geometry();
        let shift = geometry.block_size.shift();
        let bad = |why| VolumeError::BadSize { volume: self.name.clone(), size: blocks.0.saturating_mul(1 << shift), why };
        if blocks.0 == 0 {
            return Err(bad("a volume has at least one block"));
        }
        let whole = blocks.0.checked_add(OFFSET >> shift).filter(|whole| whole.leading_zeros() > shift);
        let whole = BlockCount(whole.ok_or_else(|| bad("it is too large"))?);
        // No re-keying ends meanwhile: what it grows by would have the key that is forgotten then.
        let _claim = self.claim_for_size(blocks)?;
        let (had, (stated, keeps)) = (self.leg.geometry().blocks, self.sizing);
        resize_leg(&self.leg, whole, stated)?;
        // What a file, or a leg that keeps its size, grows by reads as zeroes, and it can give that back as long as nobody has written
        // there. A device shows again what it had.
        let is_new = keeps != Keeps::Nothing || self.leg.as_file().is_some();
        let end = if is_new { whole.min(had) } else { whole };
        if let Err(error) = self.erase_reused(geometry.blocks, end) {
            if let Err(error) = resize_leg(&self.leg, had, stated) {
                tracing::warn!(volume = self.name, %error, "its leg has not the size that it had");
            }
            return Err(error);
        }
        self.blocks.store(blocks.0, Ordering::Relaxed);
        Ok(())
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.erase_all(block_size)
    }

    fn usage(&self) -> Usage {
        self.leg.usage()
    }

    fn erases_by_key(&self) -> bool {
        true
    }
}

/// Room for the futures that finish a request which has started: the largest is checked by the tests' harness, which gives each
/// request exactly what is asked for.
const FINISH_BYTES: usize = 320;
