//! Random work against a model of a disk.

use super::{
    Bench, Job, Random,
    bench::{MOST, gather, scatter},
    checks::Promises,
    data::random_cut,
};
use crate::{BlockCount, BlockError, Lba, Operation};

const STEPS: usize = 300;
/// Blocks that are worked on: few, so that requests meet.
const SPAN: u64 = 600;
/// Requests in flight at most; each has its own part of the memory.
const TOGETHER: usize = 4;
const LARGEST: u64 = 130;

/// What a request that was just run must have answered and read.
struct Expected {
    result: Result<(), BlockError>,
    data: Option<Vec<u8>>,
}

struct Work<'a, 'b> {
    bench: &'a mut Bench<'b>,
    random: Random,
    model: Vec<u8>,
    block: usize,
}

impl Work<'_, '_> {
    fn bytes(&self, lba: u64, count: u64) -> std::ops::Range<usize> {
        lba as usize * self.block..(lba + count) as usize * self.block
    }

    /// Makes up a request within `lba..lba + count`, and applies it to the model.
    fn make_up(&mut self, slot: usize, lba: u64, count: u64) -> (Job, Expected) {
        let fua = self.random.below(10) == 0;
        let deallocates = self.bench.volume.geometry().deallocate;
        let operation = match self.random.below(14) {
            0..5 => Operation::Read,
            5..9 => Operation::Write { fua },
            9 => Operation::WriteZeroes { fua, deallocate: self.random.below(2) == 0 },
            10 if deallocates => Operation::Deallocate,
            11 if count > 1 => Operation::Copy { source: Lba(lba + count - count / 2) },
            12 => Operation::Flush,
            _ => Operation::Compare,
        };
        let count = if matches!(operation, Operation::Copy { .. }) { count / 2 } else { count };
        let range = self.bytes(lba, count);
        let mut job = Job::new(operation, lba, count);
        let mut expected = Expected { result: Ok(()), data: None };
        if operation.has_data() {
            job.segments = random_cut(self.bench, &mut self.random, slot * (MOST / TOGETHER), range.len());
        }
        match operation {
            Operation::Read => expected.data = Some(self.model[range].to_vec()),
            Operation::Write { .. } => {
                let data = self.random.bytes(range.len());
                scatter(&job.segments, &data);
                self.model[range].copy_from_slice(&data);
            }
            Operation::WriteZeroes { .. } | Operation::Deallocate => self.model[range].fill(0),
            Operation::Copy { source } => {
                let from = self.bytes(source.0, count);
                self.model.copy_within(from, range.start);
            }
            Operation::Compare => {
                let mut data = self.model[range].to_vec();
                if self.random.below(2) == 0 {
                    let at = self.random.below(data.len() as u64) as usize;
                    data[at] ^= 1;
                    expected.result = Err(BlockError::Miscompare);
                }
                scatter(&job.segments, &data);
            }
            Operation::Flush => {}
        }
        (job, expected)
    }

    fn step(&mut self, step: usize) {
        let together = 1 + self.random.below(TOGETHER as u64);
        let part = SPAN / together;
        let (mut jobs, mut expected) = (Vec::new(), Vec::new());
        for slot in 0..together {
            // Each in its own part, so that the outcome does not depend on their order.
            let count = 1 + self.random.below(part.min(LARGEST));
            let lba = slot * part + self.random.below(part - count + 1);
            let (job, outcome) = self.make_up(slot as usize, lba, count);
            jobs.push(job);
            expected.push(outcome);
        }
        let results = self.bench.jobs(&jobs);
        for ((job, expected), result) in jobs.iter().zip(expected).zip(results) {
            let (operation, lba, count) = (job.operation, job.lba, job.count);
            assert_eq!(result, expected.result, "step {step}: {operation:?} of {count} at {lba}");
            let matches = expected.data.is_none_or(|data| data == gather(&job.segments));
            assert!(matches, "step {step}: {operation:?} of {count} at {lba} has the wrong data");
        }
    }
}

pub(super) fn random_work(bench: &mut Bench<'_>, promises: &Promises) {
    let block = bench.block();
    let model = bench.write_random(0, SPAN);
    let random = bench.random.clone();
    let mut work = Work { bench, random, model, block };
    for step in 0..STEPS {
        work.step(step);
        if promises.resizes && step % 50 == 49 {
            let blocks = if promises.shrinks {
                SPAN + work.random.below(2 * SPAN)
            } else {
                // Some grow by more than a little only.
                work.bench.blocks() + SPAN + work.random.below(SPAN)
            };
            work.bench.volume.resize(BlockCount(blocks)).expect("resize");
        }
    }
    let Work { bench, model, .. } = work;
    bench.expect(0, &model);
}
