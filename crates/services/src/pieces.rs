//! Services that only move blocks about: each block of the volume is a block of some leg.
//!
//! ```text
//!   request ─► Map::locate ─┬─ all of it in one piece ──► that leg, at once
//!                           └─ several pieces ─► rounds: up to WIDTH requests together, neighbours on a leg joined
//! ```

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Lba, Operation, Request, Step, TaskContext, Usage, Volume, VolumeError,
    check, copy_by_bounce, future_bytes, helpers_scratch_bytes, submit_together, together_bytes, yield_now,
};
use millrace_memory::{Access, BUFFER_SIZE, Reach, Segment, SegmentCursor};

use crate::{
    legs::{Leg, block_on, common_geometry, flush_all_telling, largest_scratch},
    losses::Losses,
    service::{Keeps, ServiceError},
};

/// Requests to legs that go on together for one request.
const WIDTH: usize = 8;
/// Segments that each of them can have.
const SEGMENTS: usize = 32;
/// Requests whose legs are found before any is submitted.
const TOGETHER: usize = 16;
/// Pieces of a round at most, so that a huge erasure does not keep the shard.
const PIECES: usize = 1024;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The leg.
    pub leg: usize,
    /// The block there.
    pub lba: u64,
    /// Blocks from this one on that follow each other there, this one counted.
    pub run: u64,
}

/// Where the blocks of a volume are.
pub trait Map: Send + Sync + 'static {
    /// Number of blocks.
    fn blocks(&self) -> u64;

    /// Where a block is; asked for blocks that exist only.
    fn locate(&self, lba: u64) -> Place;

    /// Sets the number of blocks, within the capacity.
    fn set_blocks(&self, blocks: u64);

    /// How many blocks the legs have room for.
    fn capacity(&self, legs: &[Leg]) -> u64;

    /// Whether the volume may have so many blocks: opened with that size, it must find all of them where they are now. `name` is the
    /// volume's, for errors.
    fn check_size(&self, _name: &str, _blocks: u64) -> Result<(), VolumeError> {
        Ok(())
    }

    /// Before the volume has so many blocks, for which its legs have room: legs that open with no other size than they had are to have the one
    /// that they are told next time. `name` is the volume's, for errors. On error nothing has changed.
    fn fit(&self, _name: &str, _legs: &[Leg], _blocks: u64) -> Result<(), VolumeError> {
        Ok(())
    }

    /// Enlarges legs so that there is room for so many blocks; `name` is the volume's, for errors. On error nothing has changed.
    fn enlarge(&self, name: &str, legs: &[Leg], blocks: u64) -> Result<(), VolumeError>;

    /// The legs have another block size now, and their old data are gone: takes the new shape.
    fn formatted(&self, legs: &[Leg], block_size: BlockSize);
}

/// Gives legs these sizes, with which they will be opened, where they open with no other than they had. One such may refuse, or take back what
/// it grew by and nobody has used; one that is made of such and others would lose something of the others, and is not asked. On error all
/// are as they were. `name` is the volume's.
pub(crate) fn fit_legs(name: &str, legs: &[Leg], sizes: &[(usize, Keeps, BlockCount)]) -> Result<(), VolumeError> {
    let mut done = Vec::new();
    for &(at, keeps, blocks) in sizes {
        let (leg, before) = (&legs[at], legs[at].geometry());
        if keeps == Keeps::Nothing || before.blocks == blocks {
            continue;
        }
        let fitted = match keeps {
            Keeps::Size => leg.resize(blocks).map_err(|error| error.to_string()),
            _ => Err("a part of it keeps its size".to_owned()),
        };
        let Err(why) = fitted else {
            done.push((at, before.blocks));
            continue;
        };
        give_back(name, legs, &done);
        let (leg, has) = (leg.name(), before.bytes());
        return Err(VolumeError::Refused {
            volume: name.to_owned(),
            why: format!(
                "leg {at} ({leg}) has {has} bytes and would have to have {}, or not open again ({why}): make another volume of \
                 that size, and copy",
                blocks.0 << before.block_size.shift()
            ),
        });
    }
    Ok(())
}

/// Gives legs the sizes back that they had.
pub(crate) fn give_back(name: &str, legs: &[Leg], sizes: &[(usize, BlockCount)]) {
    for &(leg, blocks) in sizes.iter().rev() {
        if let Err(error) = legs[leg].resize(blocks) {
            tracing::warn!(volume = name, leg, %error, "a leg has not the size that it had");
        }
    }
}

/// The largest volume in bytes: what a file offset can name.
const MAX_BYTES: u64 = i64::MAX as u64;

/// A volume whose blocks are those of its legs, in another order.
pub struct Mapped<M: Map> {
    name: String,
    legs: Vec<Leg>,
    map: M,
    /// Block size and abilities, so that a request need not ask every leg.
    shape: AtomicU8,
    /// Flushes of its own that legs have refused.
    losses: Arc<Losses>,
}

/// The bit of a shape that says that nothing is written.
const READ_ONLY: u8 = 2;

fn pack(geometry: &Geometry) -> u8 {
    let flags = [geometry.block_size == BlockSize::B4096, geometry.read_only, geometry.volatile_cache, geometry.deallocate];
    flags.iter().enumerate().fold(0, |sum, (bit, flag)| sum | u8::from(*flag) << bit)
}

fn unpack(shape: u8, blocks: u64) -> Geometry {
    Geometry {
        block_size: if shape & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 },
        blocks: BlockCount(blocks),
        read_only: shape & READ_ONLY != 0,
        volatile_cache: shape & 4 != 0,
        deallocate: shape & 8 != 0,
    }
}

/// A request to a leg, in the making.
struct Branch {
    leg: usize,
    lba: u64,
    count: u64,
    segments: [Segment; SEGMENTS],
    used: usize,
}

impl Branch {
    /// Appends the cursor's next bytes; false, and nothing is done, when the list has no room for them.
    fn append(&mut self, cursor: &mut SegmentCursor<'_>, len: usize) -> bool {
        let (before, used) = (cursor.clone(), self.used);
        let last = used.checked_sub(1).map(|at| self.segments[at]);
        let mut left = len;
        while let Some(run) = cursor.next_run(left) {
            left -= run.len();
            match self.used.checked_sub(1).map(|at| &mut self.segments[at]) {
                Some(last) if last.adjoins(&run) => last.extend_over(&run),
                _ if self.used == SEGMENTS => {
                    *cursor = before;
                    self.used = used;
                    if let Some(last) = last {
                        self.segments[used - 1] = last;
                    }
                    return false;
                }
                _ => {
                    self.segments[self.used] = run;
                    self.used += 1;
                }
            }
        }
        true
    }

    fn adjoins(&self, place: &Place) -> bool {
        self.leg == place.leg && self.lba + self.count == place.lba
    }
}

impl<M: Map> Mapped<M> {
    /// A volume over these legs, which have one block size.
    pub fn new(name: String, legs: Vec<Leg>, map: M, block_size: BlockSize) -> Self {
        let geometry = common_geometry(&legs, block_size, BlockCount(map.blocks()));
        Self { name, legs, map, shape: AtomicU8::new(pack(&geometry)), losses: Arc::default() }
    }

    /// Its legs.
    pub fn legs(&self) -> &[Leg] {
        &self.legs
    }

    /// Its map.
    pub fn map(&self) -> &M {
        &self.map
    }

    /// Of the service in whose place this one comes, what the guest was not told yet.
    pub(crate) fn take_over(&self, before: &Self) {
        self.losses.take_over(&before.losses);
    }

    /// Whether the guest's next flush has to fail.
    pub(crate) fn is_untold(&self) -> bool {
        self.losses.is_untold()
    }

    /// Asks the legs again what they can: an attempt to erase may have shown that one of them cannot.
    fn look_again(&self) {
        let now = self.geometry();
        self.shape.store(pack(&common_geometry(&self.legs, now.block_size, now.blocks)), Ordering::Relaxed);
    }

    /// The legs have this block size now, and the map knows it.
    fn take_shape(&self, block_size: BlockSize) {
        let geometry = common_geometry(&self.legs, block_size, BlockCount(self.map.blocks()));
        self.shape.store(pack(&geometry), Ordering::Relaxed);
    }

    /// The legs were formatted, or looked at again, by whoever has them: takes their shape.
    pub(crate) fn look_anew(&self, block_size: BlockSize) {
        self.map.formatted(&self.legs, block_size);
        self.take_shape(block_size);
    }

    /// Where a request's blocks are, if they are data in one piece.
    #[inline]
    fn place(&self, request: &Request<'_>) -> Option<Place> {
        let Request { operation, lba, count, .. } = request;
        if operation.has_data() { self.piece(*lba, *count, operation.is_write()) } else { None }
    }

    /// Where these blocks are, if they are in one piece and may be used so.
    #[inline]
    fn piece(&self, Lba(lba): Lba, BlockCount(count): BlockCount, writes: bool) -> Option<Place> {
        let within = count > 0 && lba.checked_add(count).is_some_and(|end| end <= self.map.blocks());
        // The leg it goes to may be one that can be written.
        let refused = writes && self.shape.load(Ordering::Relaxed) & READ_ONLY != 0;
        if !within || refused {
            return None;
        }
        let place = self.map.locate(lba);
        (count <= place.run).then_some(place)
    }

    /// Requests to these legs. All go together, or each alone: where one leg ends and another begins cannot be foreseen, and a branch on it
    /// would be taken wrongly half of the time.
    #[inline]
    fn submit_placed(&self, requests: &mut [Request<'_>], legs: &[usize]) -> usize {
        let Some(&first) = legs.first() else { return 0 };
        if legs.iter().fold(0, |differ, leg| differ | (leg ^ first)) == 0 {
            return self.legs[first].submit_many(requests);
        }
        let each = legs.iter().zip(requests.chunks_mut(1));
        each.map(|(leg, request)| self.legs[*leg].submit_many(request)).take_while(|done| *done == 1).count()
    }

    /// What is not data in one piece.
    #[inline(never)]
    fn submit_pieces<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Err(error) = check(&self.geometry(), &request) {
            return Step::Done(Err(error));
        }
        match request.operation {
            Operation::Flush => Step::Wait(cx.scratch.place_future(self.flush(cx, request))),
            _ if request.count.0 == 0 => Step::Done(Ok(())),
            Operation::Copy { .. } => Step::Wait(cx.scratch.place_future(copy_by_bounce(self, cx, request))),
            _ => Step::Wait(cx.scratch.place_future(self.split(cx, request))),
        }
    }

    fn width(&self) -> usize {
        self.legs.len().min(WIDTH)
    }

    /// A request of several pieces. `request` was checked.
    async fn split(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let Some(&template) = request.segments.first() else { return self.split_plain(cx, request).await };
        let mut branches = cx.scratch.place_list(self.width(), |_| Branch {
            leg: 0,
            lba: 0,
            count: 0,
            segments: [template; SEGMENTS],
            used: 0,
        });
        let shift = self.geometry().block_size.shift();
        let mut cursor = SegmentCursor::new(request.segments);
        let (mut lba, end) = (request.lba.0, request.lba.0 + request.count.0);
        while lba < end {
            let (count, next) = self.fill(branches.as_pin_mut().get_mut(), &mut cursor, lba, end, shift);
            if count == 0 {
                // One block of more segments than fit: by way of a buffer.
                lba = self.bounce(cx, request.operation, &mut cursor, lba, end, shift).await?;
                continue;
            }
            let (legs, branches) = (&self.legs, &branches);
            let piece = |at: usize| -> (&dyn Volume, Request<'_>) {
                let branch = &branches[at];
                let segments = branch.segments.get(..branch.used).unwrap_or(&[]);
                let (lba, count) = (Lba(branch.lba), BlockCount(branch.count));
                (&*legs[branch.leg], Request { operation: request.operation, lba, count, segments })
            };
            submit_together(cx, count, largest_scratch(legs), piece).await?;
            lba = next;
        }
        Ok(())
    }

    /// Fills a round: how many branches it has, and the first block that is not in it.
    fn fill(
        &self,
        branches: &mut [Branch],
        cursor: &mut SegmentCursor<'_>,
        mut lba: u64,
        end: u64,
        shift: u32,
    ) -> (usize, u64) {
        let mut used = 0;
        for _ in 0..PIECES {
            if lba == end {
                break;
            }
            let place = self.map.locate(lba);
            let mut run = place.run.min(end - lba);
            let at = match branches[..used].iter().position(|branch| branch.adjoins(&place)) {
                Some(at) => at,
                None if used < branches.len() => {
                    let branch = &mut branches[used];
                    (branch.leg, branch.lba, branch.count, branch.used) = (place.leg, place.lba, 0, 0);
                    used
                }
                None => break,
            };
            // The whole run if its segments fit, else half of it, and so on.
            while run > 0 && !branches[at].append(cursor, (run << shift) as usize) {
                run /= 2;
            }
            if run == 0 {
                break;
            }
            branches[at].count += run;
            used = used.max(at + 1);
            lba += run;
        }
        (used, lba)
    }

    /// Some blocks in very many segments; returns the first block that is left.
    async fn bounce(
        &self,
        cx: TaskContext<'_>,
        operation: Operation,
        cursor: &mut SegmentCursor<'_>,
        lba: u64,
        end: u64,
        shift: u32,
    ) -> Result<u64, BlockError> {
        let place = self.map.locate(lba);
        let count = place.run.min(end - lba).min(BUFFER_SIZE as u64 >> shift);
        let buffer = cx.buffers.take().await;
        let segments = [buffer.segment((count << shift) as usize)];
        if operation != Operation::Read {
            cursor.copy_to(segments[0]);
        }
        let request = Request { operation, lba: Lba(place.lba), count: BlockCount(count), segments: &segments };
        let arena = cx.scratch.carve_rest();
        self.legs[place.leg].submit(cx.deeper().with_scratch(&arena), request).await?;
        if operation == Operation::Read {
            cursor.copy_from(segments[0]);
        }
        Ok(lba + count)
    }

    /// A request without data: erasing.
    async fn split_plain(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let mut branches = cx.scratch.place_list(self.width(), |_| (0, 0, 0));
        let (mut lba, end) = (request.lba.0, request.lba.0 + request.count.0);
        while lba < end {
            let list = branches.as_pin_mut().get_mut();
            let mut used = 0;
            for _ in 0..PIECES {
                if lba == end {
                    break;
                }
                let place = self.map.locate(lba);
                let run = place.run.min(end - lba);
                let adjoins = |(leg, lba, count): &(usize, u64, u64)| *leg == place.leg && lba + count == place.lba;
                match list[..used].iter().position(adjoins) {
                    Some(at) => list[at].2 += run,
                    None if used < list.len() => {
                        list[used] = (place.leg, place.lba, run);
                        used += 1;
                    }
                    None => break,
                }
                lba += run;
            }
            let (legs, branches) = (&self.legs, &branches);
            let piece = |at: usize| -> (&dyn Volume, Request<'_>) {
                let (leg, lba, count): (usize, u64, u64) = branches[at];
                let (lba, count) = (Lba(lba), BlockCount(count));
                (&*legs[leg], Request { operation: request.operation, lba, count, segments: &[] })
            };
            submit_together(cx, used, largest_scratch(legs), piece).await?;
            yield_now().await;
        }
        self.look_again();
        Ok(())
    }

    /// Erases blocks, those beyond the present end as well, on the calling thread.
    fn erase(&self, from: u64, to: u64, operation: Operation) -> Result<(), VolumeError> {
        let mut ranges: Vec<(usize, u64, u64)> = Vec::new();
        let mut lba = from;
        while lba < to {
            let place = self.map.locate(lba);
            let run = place.run.min(to - lba);
            match ranges.iter_mut().find(|(leg, lba, count)| *leg == place.leg && *lba + *count == place.lba) {
                Some((_, _, count)) => *count += run,
                None => ranges.push((place.leg, place.lba, run)),
            }
            lba += run;
        }
        if ranges.is_empty() {
            return Ok(());
        }
        let legs = self.legs.clone();
        let result = block_on(move |cx| {
            Box::pin(async move {
                for (leg, lba, count) in ranges {
                    let request = Request { operation, lba: Lba(lba), count: BlockCount(count), segments: &[] };
                    legs[leg].submit(cx, request).await?;
                }
                Ok::<_, BlockError>(())
            })
        });
        let failed =
            |source| VolumeError::Io { volume: self.name.clone(), action: "erase", path: "its legs".into(), source };
        result.map_err(|error| failed(io::Error::other(error)))?.map_err(|error| failed(io::Error::other(error)))
    }

    /// A flush of all legs on the calling thread. What a guest has written waits in them as well: it is told of one that was refused.
    fn flush_own(&self) -> Result<(), VolumeError> {
        let failed = |error: ServiceError| VolumeError::Io {
            volume: self.name.clone(),
            action: "flush",
            path: "its legs".into(),
            source: io::Error::other(error),
        };
        let flushed = flush_all_telling(self.legs.iter(), &self.losses).map_err(failed)?;
        flushed.into_iter().collect::<Result<(), _>>().map_err(failed)
    }

    /// A guest's flush, of all legs.
    async fn flush(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let (losses, mut result) = (self.losses.count(), Ok(()));
        for legs in self.legs.chunks(WIDTH) {
            let piece = |at: usize| -> (&dyn Volume, Request<'_>) { (&*legs[at], request.clone()) };
            result = result.and(submit_together(cx, legs.len(), largest_scratch(legs), piece).await);
        }
        result.and(self.losses.tell(losses))
    }
}

impl<M: Map> Volume for Mapped<M> {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        unpack(self.shape.load(Ordering::Relaxed), self.map.blocks())
    }

    #[inline]
    fn submit<'a>(&'a self, cx: TaskContext<'a>, mut request: Request<'a>) -> Step<'a> {
        match self.place(&request) {
            Some(place) => {
                // All else is the leg's to check: its blocks are as large, and so many.
                request.lba = Lba(place.lba);
                self.legs[place.leg].submit(cx, request)
            }
            None => self.submit_pieces(cx, request),
        }
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let mut done = 0;
        for some in requests.chunks_mut(TOGETHER) {
            let (mut legs, mut count) = ([0; TOGETHER], 0);
            for (request, leg) in some.iter_mut().zip(&mut legs) {
                let Some(place) = self.place(request) else { break };
                (request.lba, *leg) = (Lba(place.lba), place.leg);
                count += 1;
            }
            let here = self.submit_placed(&mut some[..count], &legs[..count]);
            done += here;
            if here < some.len() {
                break;
            }
        }
        done
    }

    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        // It is not checked; beyond the end there is nothing to bring near.
        let lba = if lba.0 < self.map.blocks() { lba.0 } else { 0 };
        let place = self.map.locate(lba);
        self.legs[place.leg].prefetch(Lba(place.lba), BlockCount(count.0.min(place.run)))
    }

    #[inline]
    fn reach(&self, lba: Lba, count: BlockCount, access: Access) -> Option<Reach<'_>> {
        let place = self.piece(lba, count, access == Access::Write)?;
        self.legs[place.leg].reach(Lba(place.lba), count, access)
    }

    #[inline]
    fn reached(&self, lba: Lba, count: BlockCount) {
        // Whatever the volume has become meanwhile: it has been written, and the leg must know.
        let place = self.map.locate(lba.0);
        self.legs[place.leg].reached(Lba(place.lba), count);
    }

    fn settles_late(&self) -> bool {
        self.legs.iter().all(|leg| leg.settles_late())
    }

    fn scratch_bytes(&self) -> usize {
        let inner = largest_scratch(&self.legs);
        let width = self.width();
        let together = together_bytes(width, inner) + width * size_of::<Branch>();
        let own = future_bytes(Self::split).max(future_bytes(Self::flush)) + together;
        helpers_scratch_bytes(own.max(inner))
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let (name, geometry) = (&self.name, self.geometry());
        if geometry.read_only {
            return Err(VolumeError::Unsupported { volume: name.clone(), what: "resizing while read-only" });
        }
        let size = blocks.0.saturating_mul(u64::from(geometry.block_size.bytes()));
        let bad = |why| Err(VolumeError::BadSize { volume: name.clone(), size, why });
        match size {
            0 => return bad("it is empty"),
            size if size > MAX_BYTES => return bad("it is larger than a file can be"),
            _ => {}
        }
        let (before, after) = (geometry.blocks.0, blocks.0);
        self.map.check_size(name, after)?;
        let room = self.map.capacity(&self.legs);
        if after <= room {
            self.map.fit(name, &self.legs, after)?;
        }
        if after < before {
            self.map.set_blocks(after);
            // Only to give the space back: what is shown again later is erased then.
            if let Err(error) = self.erase(after, before, Operation::Deallocate) {
                tracing::debug!(volume = name, %error, "what a volume was shortened by was not given back");
            }
            return Ok(());
        }
        if before < after.min(room) {
            self.erase(before, after.min(room), Operation::WriteZeroes { fua: false, deallocate: true })?;
            // What is there instead must not come back where the power fails: zeroes will have been read.
            self.flush_own()?;
        }
        if after > room {
            self.map.enlarge(name, &self.legs, after)?;
        }
        self.map.set_blocks(after);
        Ok(())
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let (before, bytes) = (self.geometry().block_size, self.geometry().bytes());
        if bytes >> block_size.shift() == 0 {
            let (volume, why) = (self.name.clone(), "the volume is smaller than one block");
            return Err(VolumeError::BadBlockSize { volume, block_size: block_size.bytes(), why });
        }
        // What has all that its legs have, has it afterwards: it is opened like that, and who is above counts on it.
        let has_all = self.map.blocks() == self.map.capacity(&self.legs);
        for (at, leg) in self.legs.iter().enumerate() {
            if let Err(error) = leg.format(block_size) {
                for done in &self.legs[..at] {
                    if let Err(error) = done.format(before) {
                        tracing::error!(volume = self.name, leg = done.name(), %error, "its block size is not what it was");
                    }
                }
                return Err(error);
            }
        }
        self.map.formatted(&self.legs, block_size);
        let room = self.map.capacity(&self.legs);
        self.map.set_blocks(if has_all { room } else { (bytes >> block_size.shift()).min(room) });
        self.take_shape(block_size);
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage { allocated: self.legs.iter().map(|leg| leg.usage().allocated).sum() }
    }

    fn erases_by_key(&self) -> bool {
        self.legs.iter().all(|leg| leg.erases_by_key())
    }
}
