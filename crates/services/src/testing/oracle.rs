//! What each block of a volume may hold.

use std::sync::Arc;

use millrace_block::{
    BlockCount, BlockError, Lba, Operation, Volume,
    conformance::{Harness, Job, Memory, Random},
};

/// Words of a block but for the first two, which are its number and its version: most of what crash tests do is to make these and to compare them.
struct Words {
    next: u64,
}

impl Words {
    fn of(lba: u64, version: u64) -> Self {
        Self { next: (lba << 32 ^ version).wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    #[inline]
    fn take(&mut self) -> u64 {
        self.next = self.next.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.next
    }
}

/// A block's content: stamped with its number and a version, so that a block in the wrong place or of another time is seen.
/// Version 0 is zeroes.
fn content(lba: u64, version: u64, block: usize) -> Vec<u8> {
    let mut bytes = vec![0; block];
    if version != 0
        && let Some(([first, second], rest)) = bytes.as_chunks_mut().0.split_first_chunk_mut()
    {
        let mut words = Words::of(lba, version);
        (*first, *second) = (lba.to_le_bytes(), version.to_le_bytes());
        for bytes in rest {
            *bytes = words.take().to_le_bytes();
        }
    }
    bytes
}

/// The version that a block holds; `None`: it is none of this block's.
fn version(lba: u64, found: &[u8]) -> Option<u64> {
    let ([first, version], rest) = found.as_chunks().0.split_first_chunk()?;
    let (first, version) = (u64::from_le_bytes(*first), u64::from_le_bytes(*version));
    // All of them, wherever the first difference is.
    let mut words = Words::of(lba, version);
    let good = match version {
        0 => first == 0 && rest.iter().fold(0, |differs, found| differs | u64::from_le_bytes(*found)) == 0,
        _ => {
            first == lba && rest.iter().fold(0, |differs, found| differs | (u64::from_le_bytes(*found) ^ words.take())) == 0
        }
    };
    good.then_some(version)
}

#[derive(Clone, Debug)]
struct Block {
    /// Versions it may hold after a crash, the first as of the last flush.
    may: Vec<u64>,
    /// From here on they are what it may hold now: the last one written, and those after it whose writes failed.
    now: usize,
    /// It may hold anything until it is written again.
    spoilt: bool,
}

impl Block {
    fn holds(version: u64) -> Self {
        Self { may: vec![version], now: 0, spoilt: false }
    }

    /// It holds this version and no other one.
    fn fix(&mut self, version: u64) {
        self.may.clear();
        self.may.push(version);
        (self.now, self.spoilt) = (0, false);
    }

    /// The version that was found, one of these; `None`: it may be anything.
    fn look(&self, number: u64, found: &[u8], may: &[u64]) -> Option<u64> {
        let is = version(number, found);
        let good = self.spoilt || is.is_some_and(|is| may.contains(&is));
        assert!(good, "block {number} holds version {is:?}, none of {may:?}: it begins {:?}", &found[..24]);
        is
    }

    fn written(&mut self) {
        (self.now, self.spoilt) = (self.may.len() - 1, false);
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
}

/// A request under way, and what it changes.
struct Pending {
    job: Job,
    /// Version it gives its blocks.
    version: Option<u64>,
    /// It makes durable what it writes (a write with forced unit access).
    fua: bool,
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
            blocks: vec![Block::holds(0); blocks as usize],
            block,
            next: 1,
            random: Random::new(seed),
            memory: Some(MEMORY.take().unwrap_or_else(|| Memory::new(((TOGETHER * LONGEST) as usize + 1) * 4096))),
            longest,
        }
    }

    /// Its versions begin here: so that no other oracle's data pass for its own.
    #[must_use]
    pub fn numbered_from(mut self, version: u64) -> Self {
        self.next = version.max(1);
        self
    }

    /// The volume has another size now; what it grew by reads as zeroes.
    pub fn resize(&mut self, blocks: u64) {
        self.blocks.resize(blocks as usize, Block::holds(0));
        self.longest = (blocks / TOGETHER).clamp(1, LONGEST);
    }

    fn segment(&self, slot: u64, count: u64) -> millrace_memory::Segment {
        let memory = self.memory.as_ref().expect("it is given back at the end");
        memory.segment((slot * self.longest) as usize * self.block, count as usize * self.block)
    }

    fn make_up(&mut self, slot: u64) -> Pending {
        // Each in its own part of the volume, so that no two meet.
        let part = self.blocks.len() as u64 / TOGETHER;
        let count = 1 + self.random.below(self.longest.min(part));
        let lba = slot * part + self.random.below(part - count + 1);
        let fua = self.random.below(6) == 0;
        let operation = match self.random.below(12) {
            0..7 => Operation::Write { fua },
            7 => Operation::WriteZeroes { fua, deallocate: self.random.below(2) == 0 },
            8 => Operation::Flush,
            _ => Operation::Read,
        };
        let mut job = Job { operation, lba: Lba(lba), count: BlockCount(count), segments: Vec::new() };
        let mut version = None;
        if operation.has_data() {
            job.segments = vec![self.segment(slot, count)];
        }
        match operation {
            Operation::Write { .. } => {
                version = Some(self.next);
                for at in 0..count {
                    job.segments[0].write_at(at as usize * self.block, &content(lba + at, self.next, self.block));
                }
                self.next += 1;
            }
            Operation::WriteZeroes { .. } => version = Some(0),
            _ => {}
        }
        Pending { job, version, fua }
    }

    /// Runs some random requests together; false when one of them failed. What a write that failed was to change is as it was or as it was to be.
    ///
    /// # Panics
    /// When a read delivers what the block cannot hold.
    pub fn step(&mut self, harness: &mut dyn Harness, volume: &Arc<dyn Volume>) -> bool {
        let together = 1 + self.random.below(TOGETHER);
        let pending: Vec<_> = (0..together).map(|slot| self.make_up(slot)).collect();
        for Pending { job, version, .. } in &pending {
            if let Some(version) = version {
                self.each(job, |block| block.may.push(*version));
            }
        }
        let jobs: Vec<_> = pending.iter().map(|pending| pending.job.clone()).collect();
        let results = harness.run(volume, &jobs);
        let flushed =
            pending.iter().zip(&results).any(|(one, result)| one.job.operation == Operation::Flush && result.is_ok());
        if flushed {
            // What had completed before it is durable; what went on beside it may be.
            self.blocks.iter_mut().for_each(|block| drop(block.may.drain(..std::mem::take(&mut block.now))));
        }
        for (Pending { job, version, fua }, result) in pending.iter().zip(&results) {
            match (job.operation, version) {
                (Operation::Read, _) if result.is_ok() => {
                    let mut data = vec![0; job.segments[0].len()];
                    job.segments[0].read_at(0, &mut data);
                    self.compare(job.lba.0, &data);
                }
                (_, Some(version)) if *fua && result.is_ok() => self.each(job, |block| block.fix(*version)),
                (_, Some(_)) if result.is_ok() => self.each(job, Block::written),
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
            block.look(number, found, &block.may[block.now..]);
        }
    }

    /// Compares what was read with what may be there after a crash. From now on there is nothing else.
    fn compare_and_fix(&mut self, lba: u64, data: &[u8]) {
        for (number, found) in (lba..).zip(data.chunks(self.block)) {
            let block = &mut self.blocks[number as usize];
            let is = block.look(number, found, &block.may);
            block.fix(is.unwrap_or(0));
            block.spoilt = is.is_none();
        }
    }

    /// Reads everything, twice: each block holds a version that it may hold, and the same both times. From now on it may hold
    /// that one only.
    ///
    /// # Panics
    /// When it does not, or cannot be read.
    pub fn check(&mut self, harness: &mut dyn Harness, volume: &Arc<dyn Volume>) {
        let mut lba = 0;
        while lba < self.blocks.len() as u64 {
            let count = self.longest.min(self.blocks.len() as u64 - lba);
            let segments = vec![self.segment(0, count)];
            let job = Job { operation: Operation::Read, lba: Lba(lba), count: BlockCount(count), segments };
            let mut known = Vec::new();
            for _ in 0..2 {
                job.segments[0].fill(0x5a);
                let result: Result<(), BlockError> = harness.run(volume, std::slice::from_ref(&job))[0];
                assert_eq!(result, Ok(()), "reading block {lba} and {count} more");
                let mut data = vec![0; job.segments[0].len()];
                job.segments[0].read_at(0, &mut data);
                if data != known {
                    self.compare_and_fix(lba, &data);
                    known = data;
                }
            }
            lba += count;
        }
    }

    /// Reads everything: no power was lost, so each block holds the last version that it was given, or one whose write failed since.
    /// False when it cannot be read.
    ///
    /// # Panics
    /// When it holds another one.
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
