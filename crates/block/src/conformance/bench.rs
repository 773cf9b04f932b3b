//! A volume on the bench: bytes in, bytes out.

use std::{mem::ManuallyDrop, sync::Arc};

use millrace_memory::{Mapping, Segment};

use super::{Harness, Job, Random};
use crate::{BlockCount, BlockError, Operation, Volume};

/// Memory to read to and write from. It is never unmapped, so that its segments may be copied freely.
#[derive(Debug)]
pub struct Memory(ManuallyDrop<Mapping>);

impl Memory {
    /// Zeroed, page-aligned memory.
    pub fn new(bytes: usize) -> Self {
        Self(ManuallyDrop::new(Mapping::anonymous(bytes).expect("memory for the test")))
    }

    /// A piece of it.
    pub fn segment(&self, offset: usize, len: usize) -> Segment {
        // SAFETY: the mapping is writable and never unmapped.
        unsafe { self.0.segment(offset, len) }.expect("a piece of the test's memory")
    }

    /// A copy of its bytes.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.segment(offset, len).read_at(0, &mut bytes);
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.0.discard(0, self.0.len());
    }
}

/// Joins what lies in the segments.
pub(super) fn gather(segments: &[Segment]) -> Vec<u8> {
    let mut out = Vec::new();
    for segment in segments {
        let at = out.len();
        out.resize(at + segment.len(), 0);
        segment.read_at(0, &mut out[at..]);
    }
    out
}

/// Spreads bytes over the segments.
pub(super) fn scatter(segments: &[Segment], mut data: &[u8]) {
    for segment in segments {
        let (here, rest) = data.split_at(segment.len());
        segment.write_at(0, here);
        data = rest;
    }
    assert!(data.is_empty(), "the segments hold the data");
}

/// A volume, something to drive it with, and memory for its data.
pub struct Bench<'a> {
    harness: &'a mut dyn Harness,
    /// The volume.
    pub volume: Arc<dyn Volume>,
    /// Memory for the data of one request, and as much again.
    pub memory: Memory,
    /// For the check's own choices.
    pub random: Random,
}

/// Data of one request at most.
pub(super) const MOST: usize = 8 << 20;

impl<'a> Bench<'a> {
    /// Puts a volume on the bench.
    pub fn new(harness: &'a mut dyn Harness, volume: Arc<dyn Volume>, seed: u64) -> Self {
        Self { harness, volume, memory: Memory::new(2 * MOST), random: Random::new(seed) }
    }

    /// Bytes of a block.
    pub fn block(&self) -> usize {
        self.volume.geometry().block_size.bytes() as usize
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.volume.geometry().blocks.0
    }

    /// Runs requests together.
    pub fn jobs(&mut self, jobs: &[Job]) -> Vec<Result<(), BlockError>> {
        let results = self.harness.run(&self.volume, jobs);
        assert_eq!(results.len(), jobs.len(), "a result for every request");
        results
    }

    /// Runs one request.
    pub fn job(&mut self, job: Job) -> Result<(), BlockError> {
        self.jobs(&[job])[0]
    }

    /// Runs a request without data.
    pub fn plain(&mut self, operation: Operation, lba: u64, count: u64) -> Result<(), BlockError> {
        self.job(Job::new(operation, lba, count))
    }

    /// Runs a request with data in these segments.
    pub fn moving(&mut self, operation: Operation, lba: u64, segments: &[Segment]) -> Result<(), BlockError> {
        let count = BlockCount((millrace_memory::total_len(segments) / self.block()) as u64);
        let job = Job { operation, lba: crate::Lba(lba), count, segments: segments.to_vec() };
        self.job(job)
    }

    /// Writes bytes.
    pub fn write(&mut self, lba: u64, data: &[u8]) -> Result<(), BlockError> {
        let segment = self.memory.segment(0, data.len());
        segment.write_at(0, data);
        self.moving(Operation::Write { fua: false }, lba, &[segment])
    }

    /// Writes `count` blocks of random bytes and returns them.
    pub fn write_random(&mut self, lba: u64, count: u64) -> Vec<u8> {
        let len = count as usize * self.block();
        let data = self.random.bytes(len);
        self.write(lba, &data).expect("a write within the volume");
        data
    }

    /// Reads bytes, into memory that held others before.
    pub fn read(&mut self, lba: u64, count: u64) -> Vec<u8> {
        let segment = self.memory.segment(0, count as usize * self.block());
        segment.fill(0xa5);
        self.moving(Operation::Read, lba, &[segment]).expect("a read within the volume");
        self.memory.bytes(0, segment.len())
    }

    /// Fails unless the blocks from `lba` on hold these bytes.
    #[track_caller]
    pub fn expect(&mut self, lba: u64, data: &[u8]) {
        let block = self.block();
        let found = self.read(lba, (data.len() / block) as u64);
        let differ = found.chunks(block).zip(data.chunks(block)).position(|(found, data)| found != data);
        assert_eq!(differ.map(|at| lba + at as u64), None, "{}: first block that differs", self.volume.name());
    }

    /// Fails unless the blocks read as zeroes.
    #[track_caller]
    pub fn expect_zeroes(&mut self, lba: u64, count: u64) {
        let zeroes = vec![0; count as usize * self.block()];
        self.expect(lba, &zeroes);
    }
}
