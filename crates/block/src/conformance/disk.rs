//! A disk whose power can be cut at every write.
//!
//! ```text
//!   write ─► volatile: versions of each block since it was last durable ─ flush ─► medium
//!              │ power cut: each block by itself keeps one of its versions, or the medium's
//!              ▼
//!   Power: counts writes and flushes of all disks on it; at the chosen one it goes away, in the middle of it
//! ```
//!
//! So unflushed writes are lost, torn between blocks, and out of order, all from a seed.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use millrace_memory::{Segment, SegmentCursor};

use super::Random;
use crate::{
    BlockCount, BlockError, BlockSize, Geometry, Operation, Request, Step, TaskContext, Usage, Volume, VolumeError, check,
    compare_by_reading, copy_by_bounce, future_bytes, placed_bytes, yield_now,
};

/// What several disks are plugged into.
#[derive(Debug)]
pub struct Power {
    /// Writes and flushes so far.
    boundaries: AtomicU64,
    /// The one at which the power goes.
    cut: AtomicU64,
    random: Mutex<Random>,
}

impl Power {
    /// Power that stays until it is told otherwise.
    pub fn new(seed: u64) -> Arc<Self> {
        let (boundaries, cut) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
        Arc::new(Self { boundaries, cut, random: Mutex::new(Random::new(seed)) })
    }

    /// Lets the power go at this write or flush, counted from now and from 0.
    pub fn cut_at(&self, boundary: u64) {
        self.cut.store(self.boundaries().saturating_add(boundary), Ordering::Relaxed);
    }

    /// Writes and flushes so far.
    pub fn boundaries(&self) -> u64 {
        self.boundaries.load(Ordering::Relaxed)
    }

    /// Whether it is gone.
    pub fn is_gone(&self) -> bool {
        self.boundaries() > self.cut.load(Ordering::Relaxed)
    }

    /// Gives it back; each disk must be told ([`CrashDisk::restart`]).
    pub fn give_back(&self) {
        self.cut.store(u64::MAX, Ordering::Relaxed);
    }

    /// Passes a boundary: `Err` when the power is gone, `Ok(true)` when it goes now.
    fn pass(&self) -> Result<bool, BlockError> {
        if self.is_gone() {
            return Err(BlockError::NotReady);
        }
        let number = self.boundaries.fetch_add(1, Ordering::Relaxed);
        Ok(number >= self.cut.load(Ordering::Relaxed))
    }

    fn below(&self, limit: u64) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).below(limit)
    }
}

#[derive(Debug)]
struct Medium {
    durable: Vec<u8>,
    /// Versions of blocks that are not durable, oldest first.
    volatile: BTreeMap<u64, Vec<Box<[u8]>>>,
    block_size: BlockSize,
}

/// See the module.
#[derive(Debug)]
pub struct CrashDisk {
    name: String,
    power: Arc<Power>,
    medium: Mutex<Medium>,
}

impl CrashDisk {
    /// A disk of zeroes.
    pub fn new(name: &str, power: &Arc<Power>, blocks: u64, block_size: BlockSize) -> Arc<Self> {
        let durable = vec![0; (blocks << block_size.shift()) as usize];
        let medium = Mutex::new(Medium { durable, volatile: BTreeMap::new(), block_size });
        Arc::new(Self { name: name.to_owned(), power: Arc::clone(power), medium })
    }

    fn medium(&self) -> MutexGuard<'_, Medium> {
        self.medium.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Comes back after a power cut: decides what of the unflushed writes is there. Returns the blocks that lost their last
    /// version.
    pub fn restart(&self) -> u64 {
        let medium = &mut *self.medium();
        let mut lost = 0;
        for (lba, versions) in std::mem::take(&mut medium.volatile) {
            let chosen = self.power.below(versions.len() as u64 + 1) as usize;
            lost += u64::from(chosen < versions.len());
            if let Some(version) = chosen.checked_sub(1).and_then(|at| versions.get(at)) {
                medium.settle(lba, version);
            }
        }
        lost
    }

    /// Is opened with blocks of this size from now on, as a file is: what lies on the medium stays. All of it must be durable.
    pub fn open_with(&self, block_size: BlockSize) {
        let medium = &mut *self.medium();
        assert!(medium.volatile.is_empty(), "the disk came back before");
        medium.block_size = block_size;
    }

    /// Everything that is durable, as it lies on the medium.
    pub fn durable(&self) -> Vec<u8> {
        self.medium().durable.clone()
    }

    /// Spoils bytes on the medium: rot, or a foreign tool.
    pub fn spoil(&self, offset: usize, bytes: &[u8]) {
        let medium = &mut *self.medium();
        let block = medium.block_size.bytes() as usize;
        medium.durable[offset..offset + bytes.len()].copy_from_slice(bytes);
        let blocks = (offset / block) as u64..=((offset + bytes.len() - 1) / block) as u64;
        medium.volatile.retain(|lba, _| !blocks.contains(lba));
    }

    async fn run(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        // Others may come in between.
        for _ in 0..self.power.below(3) {
            yield_now().await;
        }
        match request.operation {
            Operation::Read if self.power.is_gone() => Err(BlockError::NotReady),
            Operation::Read => {
                self.medium().read(&request);
                Ok(())
            }
            Operation::Compare => compare_by_reading(self, cx, request).await,
            Operation::Copy { .. } => copy_by_bounce(self, cx, request).await,
            Operation::Write { .. } | Operation::WriteZeroes { .. } | Operation::Deallocate => self.write(&request),
            Operation::Flush => {
                if self.power.pass()? {
                    // In the middle of the flush: some of it became durable.
                    let medium = &mut *self.medium();
                    let reached: Vec<u64> = medium.volatile.keys().copied().filter(|_| self.power.below(2) == 0).collect();
                    for lba in reached {
                        medium.harden(lba);
                    }
                    return Err(BlockError::NotReady);
                }
                let medium = &mut *self.medium();
                let all: Vec<u64> = medium.volatile.keys().copied().collect();
                for lba in all {
                    medium.harden(lba);
                }
                Ok(())
            }
        }
    }

    fn write(&self, request: &Request<'_>) -> Result<(), BlockError> {
        let cut = self.power.pass()?;
        let fua = matches!(request.operation, Operation::Write { fua: true } | Operation::WriteZeroes { fua: true, .. });
        let medium = &mut *self.medium();
        let block = medium.block_size.bytes() as usize;
        let mut cursor = SegmentCursor::new(request.segments);
        for lba in request.lba.0..request.lba.0 + request.count.0 {
            let mut data = vec![0; block];
            if request.operation.has_data() {
                take(&mut cursor, &mut data);
            }
            medium.volatile.entry(lba).or_default().push(data.into());
            if fua && !cut {
                medium.harden(lba);
            }
        }
        if cut { Err(BlockError::NotReady) } else { Ok(()) }
    }
}

impl Medium {
    fn settle(&mut self, lba: u64, data: &[u8]) {
        let at = (lba << self.block_size.shift()) as usize;
        self.durable[at..at + data.len()].copy_from_slice(data);
    }

    /// Makes a block's last version durable.
    fn harden(&mut self, lba: u64) {
        if let Some(last) = self.volatile.remove(&lba).and_then(|mut versions| versions.pop()) {
            self.settle(lba, &last);
        }
    }

    fn read(&self, request: &Request<'_>) {
        let block = self.block_size.bytes() as usize;
        let mut cursor = SegmentCursor::new(request.segments);
        for lba in request.lba.0..request.lba.0 + request.count.0 {
            let at = lba as usize * block;
            let data = self.volatile.get(&lba).and_then(|versions| versions.last());
            give(&mut cursor, data.map_or(&self.durable[at..at + block], |data| data));
        }
    }
}

fn take(cursor: &mut SegmentCursor<'_>, bytes: &mut [u8]) {
    let mut done = 0;
    while let Some(run) = cursor.next_run(bytes.len() - done) {
        run.read_at(0, &mut bytes[done..done + run.len()]);
        done += run.len();
    }
}

fn give(cursor: &mut SegmentCursor<'_>, bytes: &[u8]) {
    let mut done = 0;
    while let Some(run) = cursor.next_run(bytes.len() - done) {
        run.write_at(0, &bytes[done..done + Segment::len(&run)]);
        done += run.len();
    }
}

impl Volume for CrashDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        let medium = self.medium();
        let blocks = BlockCount(medium.durable.len() as u64 >> medium.block_size.shift());
        Geometry { block_size: medium.block_size, blocks, read_only: false, volatile_cache: true, deallocate: true }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        match check(&self.geometry(), &request) {
            Err(error) => Step::Done(Err(error)),
            Ok(_) => Step::Wait(cx.scratch.place_future(self.run(cx, request))),
        }
    }

    fn scratch_bytes(&self) -> usize {
        // A compare or copy runs a read or write of ours within itself.
        2 * future_bytes(Self::run) + placed_bytes::<crate::Scratch>()
    }

    /// It is durable at once. When the power goes in the middle of it, it was done or not.
    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let no_power = || VolumeError::Refused { volume: self.name.clone(), why: "the power is gone".to_owned() };
        let medium = &mut *self.medium();
        let bytes = blocks.0.saturating_mul(u64::from(medium.block_size.bytes()));
        if bytes == 0 || bytes > 1 << 30 {
            return Err(VolumeError::BadSize { volume: self.name.clone(), size: bytes, why: "not for this disk" });
        }
        let cut = self.power.pass().map_err(|_| no_power())?;
        if !cut || self.power.below(2) == 0 {
            medium.durable.resize(bytes as usize, 0);
            medium.volatile.retain(|lba, _| *lba < blocks.0);
        }
        if cut { Err(no_power()) } else { Ok(()) }
    }

    /// It is durable at once. When the power goes in the middle of it, some blocks are erased, and they have the old size or the new one.
    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let bytes = self.medium().durable.len() >> block_size.shift() << block_size.shift();
        if bytes == 0 {
            let why = "the volume is smaller than one block";
            return Err(VolumeError::BadBlockSize { volume: self.name.clone(), block_size: block_size.bytes(), why });
        }
        let no_power = || VolumeError::Refused { volume: self.name.clone(), why: "the power is gone".to_owned() };
        let cut = self.power.pass().map_err(|_| no_power())?;
        if cut {
            self.restart();
        }
        let medium = &mut *self.medium();
        if cut {
            medium.durable.chunks_mut(512).filter(|_| self.power.below(2) == 0).for_each(|sector| sector.fill(0));
            if self.power.below(2) == 0 {
                medium.durable.truncate(bytes);
                medium.block_size = block_size;
            }
            return Err(no_power());
        }
        medium.durable = vec![0; bytes];
        medium.volatile.clear();
        medium.block_size = block_size;
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage { allocated: self.medium().durable.len() as u64 }
    }
}
