//! What each block of a volume may hold.

use std::sync::Arc;

use millrace_block::{
    BlockCount, BlockError, Lba, Operation, Volume,
    conformance::{Harness, Job, Memory, Random},
};

use super::Tearing;

/// What a disk writes as a whole where it tears blocks.
const SECTOR: usize = 512;

/// What a block holds: the number and the version that it was written with, so that a block in the wrong place or of another time is
/// seen. A copy has its source's. Version 0 is zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    lba: u64,
    version: u64,
}

/// Words of a block but for the first two, which are its stamp: most of what crash tests do is to make these and to compare them.
struct Words {
    next: u64,
}

impl Words {
    fn of(stamp: Stamp) -> Self {
        Self { next: (stamp.lba << 32 ^ stamp.version).wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    #[inline]
    fn take(&mut self) -> u64 {
        self.next = self.next.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.next
    }
}

impl Stamp {
    const ZEROES: Self = Self { lba: 0, version: 0 };

    /// The block that has it.
    fn content(self, block: usize) -> Vec<u8> {
        let mut bytes = vec![0; block];
        if self.version != 0
            && let Some(([first, second], rest)) = bytes.as_chunks_mut().0.split_first_chunk_mut()
        {
            let mut words = Words::of(self);
            (*first, *second) = (self.lba.to_le_bytes(), self.version.to_le_bytes());
            for bytes in rest {
                *bytes = words.take().to_le_bytes();
            }
        }
        bytes
    }

    /// The stamp of a block; `None`: nobody wrote it like that.
    fn of(found: &[u8]) -> Option<Self> {
        let ([lba, version], rest) = found.as_chunks().0.split_first_chunk()?;
        let stamp = Self { lba: u64::from_le_bytes(*lba), version: u64::from_le_bytes(*version) };
        // All of them, wherever the first difference is.
        let mut words = Words::of(stamp);
        let differs = match stamp.version {
            0 => rest.iter().fold(stamp.lba, |differs, found| differs | u64::from_le_bytes(*found)),
            _ => rest.iter().fold(0, |differs, found| differs | (u64::from_le_bytes(*found) ^ words.take())),
        };
        (differs == 0).then_some(stamp)
    }
}

#[derive(Clone, Debug)]
struct Block {
    /// What it may hold after a crash, the first as of the last flush.
    may: Vec<Stamp>,
    /// From here on it is what it may hold now: what it was given last, and what it was to be given after that by requests that failed.
    now: usize,
    /// From here on it is what the last request was to give it.
    given: usize,
    /// It may hold anything until it is written again.
    spoilt: bool,
    /// What a power cut made of it: it holds this until it is written again.
    torn: Option<Box<[u8]>>,
}

impl Block {
    fn holds(stamp: Stamp) -> Self {
        Self { may: vec![stamp], now: 0, given: 0, spoilt: false, torn: None }
    }

    /// It holds this and nothing else.
    fn fix(&mut self, stamp: Stamp) {
        self.may.clear();
        self.may.push(stamp);
        (self.now, self.given, self.spoilt, self.torn) = (0, 0, false, None);
    }

    /// Whether a copy of it would be known.
    fn is_known(&self) -> bool {
        !self.spoilt && self.torn.is_none()
    }

    /// Nobody wrote what it holds.
    fn tear(&mut self, found: &[u8]) {
        self.may.clear();
        (self.now, self.given, self.torn) = (0, 0, Some(found.into()));
    }

    /// Whether it may hold what a power cut has torn like this.
    fn may_be_torn(&self, found: &[u8], tearing: Tearing) -> bool {
        if self.may.len() < 2 || !matches!(tearing, Tearing::Mixed | Tearing::Noisy) || Stamp::of(found).is_some() {
            return false;
        }
        let noise = tearing == Tearing::Noisy && self.may.contains(&Stamp::ZEROES);
        let all: Vec<_> = self.may.iter().map(|stamp| stamp.content(found.len())).collect();
        let mut sectors = (0..found.len()).step_by(SECTOR).map(|at| at..at + SECTOR);
        sectors.all(|sector| noise || all.iter().any(|content| content[sector.clone()] == found[sector.clone()]))
    }

    /// What was found, one of these; `None`: it may be anything.
    fn look(&self, number: u64, found: &[u8], may: &[Stamp]) -> Option<Stamp> {
        let is = Stamp::of(found);
        if self.torn.as_deref() == Some(found) {
            return None;
        }
        let good = self.spoilt || is.is_some_and(|is| may.contains(&is));
        assert!(good, "block {number} holds {is:?}, none of {may:?}: it begins {:?}", &found[..24]);
        is
    }

    /// What it may hold now.
    fn now(&self) -> &[Stamp] {
        &self.may[self.now..]
    }

    /// A request begins that gives it one of these.
    fn give(&mut self, stamps: &[Stamp]) {
        self.given = self.may.len();
        self.may.extend_from_slice(stamps);
    }

    /// The request has given it what it was to give.
    fn written(&mut self) {
        (self.now, self.spoilt, self.torn) = (self.given, false, None);
    }

    /// What it may hold now is durable.
    fn flushed(&mut self) {
        self.may.drain(..self.now);
        self.given -= self.now;
        self.now = 0;
    }

    /// The request has given it what it was to give, durably.
    fn hardened(&mut self) {
        self.written();
        self.flushed();
    }
}

/// Works on a volume, and knows what it may hold.
pub struct Oracle {
    blocks: Vec<Block>,
    block: usize,
    next: u64,
    random: Random,
    /// Taken from and given back to the thread.
    memory: Option<Memory>,
    /// Longest request in blocks.
    longest: u64,
    /// What power cuts make of blocks.
    tearing: Tearing,
}

/// Requests in flight together.
const TOGETHER: u64 = 4;
/// Longest request in blocks.
const LONGEST: u64 = 40;

thread_local! {
    /// Memory for the data of one oracle after the other: it is never unmapped.
    static MEMORY: std::cell::Cell<Option<Memory>> = const { std::cell::Cell::new(None) };
}

impl Drop for Oracle {
    fn drop(&mut self) {
        MEMORY.set(self.memory.take());
    }
}

impl Oracle {
    /// For a fresh volume of this many blocks that reads as zeroes.
    pub fn new(seed: u64, blocks: u64, block: usize) -> Self {
        let longest = (blocks / TOGETHER).clamp(1, LONGEST);
        Self {
            blocks: vec![Block::holds(Stamp::ZEROES); blocks as usize],
            block,
            next: 1,
            random: Random::new(seed),
            memory: Some(MEMORY.take().unwrap_or_else(|| Memory::new(((TOGETHER * LONGEST) as usize + 1) * 4096))),
            longest,
            tearing: Tearing::Never,
        }
    }

    /// Blocks that were not flushed may be torn by power cuts: whole sectors of 512 bytes are written.
    #[must_use]
    pub fn torn(mut self, tearing: Tearing) -> Self {
        self.tearing = tearing;
        self
    }

    /// Its versions begin here: so that no other oracle's data pass for its own.
    #[must_use]
    pub fn numbered_from(mut self, version: u64) -> Self {
        self.next = version.max(1);
        self
    }

    /// The volume has another size now; what it grew by reads as zeroes.
    pub fn resize(&mut self, blocks: u64) {
        self.blocks.resize(blocks as usize, Block::holds(Stamp::ZEROES));
        self.longest = (blocks / TOGETHER).clamp(1, LONGEST);
    }

    fn segment(&self, slot: u64, count: u64) -> millrace_memory::Segment {
        let memory = self.memory.as_ref().expect("it is given back at the end");
        memory.segment((slot * self.longest) as usize * self.block, count as usize * self.block)
    }

    /// Makes up a request, and notes what it is to give its blocks.
    fn make_up(&mut self, slot: u64) -> Job {
        // Each in its own part of the volume, so that no two meet.
        let part = self.blocks.len() as u64 / TOGETHER;
        let count = 1 + self.random.below(self.longest.min(part));
        let lba = slot * part + self.random.below(part - count + 1);
        let fua = self.random.below(6) == 0;
        let mut job = match self.random.below(16) {
            0..8 => Job::new(Operation::Write { fua }, lba, count),
            8 => {
                let deallocate = self.random.below(2) == 0;
                Job::new(Operation::WriteZeroes { fua, deallocate }, lba, count)
            }
            9 => Job::new(Operation::Flush, lba, count),
            10 => Job::new(Operation::Deallocate, lba, count),
            11 | 12 => self.make_up_copy(lba, count),
            _ => Job::new(Operation::Read, lba, count),
        };
        if job.operation.has_data() {
            job.segments = vec![self.segment(slot, count)];
        }
        match job.operation {
            Operation::Write { .. } => {
                for at in 0..count {
                    let stamp = Stamp { lba: lba + at, version: self.next };
                    job.segments[0].write_at(at as usize * self.block, &stamp.content(self.block));
                    self.blocks[(lba + at) as usize].give(&[stamp]);
                }
                self.next += 1;
            }
            Operation::WriteZeroes { .. } | Operation::Deallocate => self.each(&job, |block| block.give(&[Stamp::ZEROES])),
            Operation::Copy { source } => {
                for at in 0..job.count.0 {
                    let stamps = self.blocks[(source.0 + at) as usize].now().to_vec();
                    self.blocks[(job.lba.0 + at) as usize].give(&stamps);
                }
            }
            _ => {}
        }
        job
    }

    /// A copy of one half of these blocks to the other; a read where there are no halves, or nobody knows what a copy would have.
    fn make_up_copy(&mut self, lba: u64, count: u64) -> Job {
        let half = count / 2;
        let halves = [lba, lba + count - half];
        let to = self.random.below(2) as usize;
        let (source, target) = (halves[1 - to], halves[to]);
        let is_known = self.blocks[source as usize..(source + half) as usize].iter().all(Block::is_known);
        if half > 0 && is_known {
            Job::new(Operation::Copy { source: Lba(source) }, target, half)
        } else {
            Job::new(Operation::Read, lba, count)
        }
    }

    /// Runs some random requests together; false when one of them failed. What a write that failed was to change is as it was or as it was to be.
    ///
    /// # Panics
    /// When a read delivers what the block cannot hold.
    pub fn step(&mut self, harness: &mut dyn Harness, volume: &Arc<dyn Volume>) -> bool {
        let together = 1 + self.random.below(TOGETHER);
        let jobs: Vec<_> = (0..together).map(|slot| self.make_up(slot)).collect();
        let before = volume.geometry();
        let results = harness.run(volume, &jobs);
        // The volume may have been changed meanwhile.
        let deallocates = before.deallocate && volume.geometry().deallocate;
        let flushed = jobs.iter().zip(&results).any(|(job, result)| job.operation == Operation::Flush && result.is_ok());
        if flushed {
            // What had completed before it is durable; what went on beside it may be.
            self.blocks.iter_mut().for_each(Block::flushed);
        }
        for (job, _) in jobs.iter().zip(&results).filter(|(_, result)| result.is_ok()) {
            match job.operation {
                Operation::Read => {
                    let mut data = vec![0; job.segments[0].len()];
                    job.segments[0].read_at(0, &mut data);
                    self.compare(job.lba.0, &data);
                }
                Operation::Write { fua: true } | Operation::WriteZeroes { fua: true, .. } => self.each(job, Block::hardened),
                // An advice that may be taken or not: they are zeroes, or as they were.
                Operation::Deallocate if !deallocates => {}
                operation if operation.is_write() => self.each(job, Block::written),
                _ => {}
            }
        }
        results.iter().all(Result::is_ok)
    }

    fn each(&mut self, job: &Job, change: impl Fn(&mut Block)) {
        let range = job.lba.0 as usize..(job.lba.0 + job.count.0) as usize;
        self.blocks[range].iter_mut().for_each(change);
    }

    /// Compares what was read with what may be there now.
    fn compare(&self, lba: u64, data: &[u8]) {
        for (number, found) in (lba..).zip(data.chunks(self.block)) {
            let block = &self.blocks[number as usize];
            block.look(number, found, block.now());
        }
    }

    /// Compares what was read with what may be there after a crash. From now on there is nothing else.
    fn compare_and_fix(&mut self, lba: u64, data: &[u8]) {
        for (number, found) in (lba..).zip(data.chunks(self.block)) {
            let (block, tearing) = (&mut self.blocks[number as usize], self.tearing);
            if block.may_be_torn(found, tearing) {
                block.tear(found);
            }
            let is = block.look(number, found, &block.may);
            if block.torn.as_deref() != Some(found) {
                block.fix(is.unwrap_or(Stamp::ZEROES));
                block.spoilt = is.is_none();
            }
        }
    }

    /// Reads everything, twice: each block holds what it may hold, and the same both times. From now on it may hold that only. What may not be
    /// readable because it was torn is written once more.
    ///
    /// # Panics
    /// When it does not, or cannot be read.
    pub fn check(&mut self, harness: &mut dyn Harness, volume: &Arc<dyn Volume>) {
        let (mut lba, mut lost) = (0, Vec::new());
        while lba < self.blocks.len() as u64 {
            let count = self.longest.min(self.blocks.len() as u64 - lba);
            if let Err(error) = self.check_range(harness, volume, lba, count) {
                assert!(self.tearing == Tearing::Told, "reading block {lba} and {count} more: {error}");
                lost.extend((lba..lba + count).filter(|lba| self.is_lost(harness, volume, *lba)));
            }
            lba += count;
        }
        for lba in lost {
            self.write_again(harness, volume, lba);
        }
    }

    fn read(
        &self,
        harness: &mut dyn Harness,
        volume: &Arc<dyn Volume>,
        lba: u64,
        count: u64,
    ) -> Result<Vec<u8>, BlockError> {
        let segments = vec![self.segment(0, count)];
        segments[0].fill(0x5a);
        let job = Job { operation: Operation::Read, lba: Lba(lba), count: BlockCount(count), segments };
        harness.run(volume, std::slice::from_ref(&job))[0]?;
        let mut data = vec![0; job.segments[0].len()];
        job.segments[0].read_at(0, &mut data);
        Ok(data)
    }

    /// [`Self::check`] of a range, but for what cannot be read.
    fn check_range(
        &mut self,
        harness: &mut dyn Harness,
        volume: &Arc<dyn Volume>,
        lba: u64,
        count: u64,
    ) -> Result<(), BlockError> {
        let mut known = Vec::new();
        for _ in 0..2 {
            let data = self.read(harness, volume, lba, count)?;
            if data != known {
                self.compare_and_fix(lba, &data);
                known = data;
            }
        }
        Ok(())
    }

    /// Whether a block cannot be read, which is so of one that was not flushed alone.
    fn is_lost(&mut self, harness: &mut dyn Harness, volume: &Arc<dyn Volume>, lba: u64) -> bool {
        let is_lost = self.check_range(harness, volume, lba, 1).is_err();
        assert!(!is_lost || self.blocks[lba as usize].may.len() > 1, "block {lba} cannot be read");
        is_lost
    }

    /// As a guest does that finds what it was writing torn.
    fn write_again(&mut self, harness: &mut dyn Harness, volume: &Arc<dyn Volume>, lba: u64) {
        let stamp = Stamp { lba, version: self.next };
        self.next += 1;
        let segments = vec![self.segment(0, 1)];
        segments[0].write_at(0, &stamp.content(self.block));
        let operation = Operation::Write { fua: true };
        let job = Job { operation, lba: Lba(lba), count: BlockCount(1), segments };
        let written: Result<(), BlockError> = harness.run(volume, std::slice::from_ref(&job))[0];
        assert_eq!(written, Ok(()), "writing block {lba} once more");
        self.blocks[lba as usize].fix(stamp);
    }

    /// Reads everything: no power was lost, so each block holds what it was given last, or was to be given since by requests that failed.
    /// False when it cannot be read.
    ///
    /// # Panics
    /// When it holds something else.
    pub fn expect_last(&self, harness: &mut dyn Harness, volume: &Arc<dyn Volume>) -> bool {
        let blocks = self.blocks.len() as u64;
        for lba in (0..blocks).step_by(self.longest as usize) {
            let count = self.longest.min(blocks - lba);
            let segments = vec![self.segment(0, count)];
            let job = Job { operation: Operation::Read, lba: Lba(lba), count: BlockCount(count), segments };
            if harness.run(volume, std::slice::from_ref(&job))[0].is_err() {
                return false;
            }
            let mut data = vec![0; job.segments[0].len()];
            job.segments[0].read_at(0, &mut data);
            self.compare(lba, &data);
        }
        true
    }

    /// Blocks that were written since the last flush may hold anything now: more was lost at once than the volume protects them
    /// from.
    pub fn forgive(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.spoilt |= block.may.len() > 1);
    }
}
