//! Metadata through the suites, through power cuts, and what it promises beyond them.

mod bad;
mod changes;
mod promise;

use std::sync::Arc;

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Lba, METADATA_SIZE, NO_METADATA, Operation, Request, Step, TaggedRequest,
    TaskContext, Usage, Volume, VolumeError, compare_by_reading,
    conformance::{self, Job, Subject, SyncHarness, Wanted},
    copy_by_bounce, future_bytes, helpers_scratch_bytes,
};
use millrace_memory::{BUFFER_SIZE, SegmentCursor};

use super::page::leg_bytes;
use crate::{
    Reason,
    graph::Graph,
    testing::{CrashTest, Tearing, crash_test, subject},
};

const SEED: u64 = 0x6d65_7461;
const STACK: &str = "metadata(disk:0)";

/// A volume whose blocks are written with metadata made of their data, and whose reads fail the test when a block comes with
/// another one's: what plain requests find out of data, these find out of both.
struct Woven {
    volume: Arc<dyn Volume>,
    /// They fail instead, as where a guest finds by its guard that a block was torn.
    torn: bool,
}

/// The metadata of a block of these bytes.
fn tag_of(block: &[u8]) -> [u8; METADATA_SIZE] {
    let words = block.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    let sum = words.fold(0x6d65_7461_u64, |sum, word| sum.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word);
    sum.to_le_bytes()
}

impl Woven {
    fn over(volume: &Arc<dyn Volume>) -> Arc<dyn Volume> {
        Arc::new(Self { volume: Arc::clone(volume), torn: false })
    }

    fn over_torn(volume: &Arc<dyn Volume>) -> Arc<dyn Volume> {
        Arc::new(Self { volume: Arc::clone(volume), torn: true })
    }

    async fn transfer(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let unit = self.geometry().block_size.bytes() as usize;
        let most = (BUFFER_SIZE / (unit + METADATA_SIZE)) as u64;
        let mut cursor = SegmentCursor::new(request.segments);
        let (mut lba, end) = (request.lba.0, request.lba.0 + request.count.0);
        while lba < end {
            let count = most.min(end - lba);
            let buffer = cx.buffers.take().await;
            let all = buffer.segment(BUFFER_SIZE);
            let data = all.part(0, count as usize * unit).unwrap();
            let metadata = all.part(data.len(), count as usize * METADATA_SIZE).unwrap();
            let operation = request.operation;
            if operation.is_write() {
                cursor.copy_to(data);
                let mut block = vec![0; unit];
                for at in 0..count as usize {
                    data.read_at(at * unit, &mut block);
                    metadata.write_at(at * METADATA_SIZE, &tag_of(&block));
                }
            }
            let tagged = TaggedRequest { operation, lba: Lba(lba), count: BlockCount(count), data, metadata };
            self.volume.submit_tagged(cx.deeper().with_scratch(&cx.scratch.carve_rest()), tagged).await?;
            if !operation.is_write() {
                let (mut block, mut tag) = (vec![0; unit], [0; METADATA_SIZE]);
                for at in 0..count as usize {
                    data.read_at(at * unit, &mut block);
                    metadata.read_at(at * METADATA_SIZE, &mut tag);
                    let good = tag == tag_of(&block) || tag == NO_METADATA && crate::legs::is_zero(&block);
                    if self.torn && !good {
                        return Err(BlockError::ReadFault { errno: 0 });
                    }
                    assert!(good, "block {} has metadata {tag:02x?} of other data: {:02x?}", lba + at as u64, &block[..24]);
                }
                cursor.copy_from(data);
            }
            lba += count;
        }
        Ok(())
    }
}

impl Volume for Woven {
    fn name(&self) -> &str {
        self.volume.name()
    }

    fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Err(error) = millrace_block::check(&self.geometry(), &request) {
            return Step::Done(Err(error));
        }
        match request.operation {
            Operation::Read | Operation::Write { .. } => Step::Wait(cx.scratch.place_future(self.transfer(cx, request))),
            Operation::Compare => Step::Wait(cx.scratch.place_future(compare_by_reading(self, cx, request))),
            Operation::Copy { .. } => Step::Wait(cx.scratch.place_future(copy_by_bounce(self, cx, request))),
            _ => self.volume.submit(cx, request),
        }
    }

    fn scratch_bytes(&self) -> usize {
        let inner = self.volume.scratch_bytes() + size_of::<millrace_block::Scratch>();
        helpers_scratch_bytes(inner + future_bytes(Self::transfer))
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.volume.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.volume.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.volume.usage()
    }
}

fn memory(wanted: Wanted, _: usize) -> Arc<dyn Volume> {
    MemoryVolume::create("disk", wanted.blocks << wanted.block_size.shift(), wanted.block_size).unwrap()
}

fn leg_blocks(blocks: u64, block_size: BlockSize) -> u64 {
    leg_bytes(blocks, block_size).unwrap() >> block_size.shift()
}

fn disk(blocks: u64, block_size: BlockSize) -> Arc<dyn Volume> {
    memory(Wanted { block_size, blocks: leg_blocks(blocks, block_size), read_only: false }, 0)
}

fn open(disk: &Arc<dyn Volume>, reason: Reason) -> Result<Graph, String> {
    crate::testing::graph(STACK, std::slice::from_ref(disk), None, reason, &Arc::default())
        .map_err(|error| error.to_string())
}

fn held(wanted: Wanted, leg: usize) -> Arc<dyn Volume> {
    let volume = FaultVolume::new(memory(wanted, leg), SEED);
    volume.hold_writes();
    volume
}

#[test]
fn without_metadata_it_conforms() {
    for make_leg in [memory, held] {
        let mut make = subject(STACK, 1, leg_blocks, make_leg);
        conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
    }
}

#[test]
fn with_metadata_it_conforms_and_every_block_keeps_its_own() {
    for make_leg in [memory, held] {
        let mut make = subject(STACK, 1, leg_blocks, make_leg);
        let mut make = |wanted| Some(Woven::over(&make(wanted)?));
        conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
    }
}

#[test]
fn metadata_pass_a_gate_that_lets_them_wait() {
    const STACK: &str = "throttle(iops=20000, burst=1ms) | meter(tenant=t) | metadata(disk:0)";
    let mut make = subject(STACK, 1, leg_blocks, memory);
    let volume = Woven::over(&make(Wanted { block_size: BlockSize::B512, blocks: 400, read_only: false }).unwrap());
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = conformance::Bench::new(&mut harness, volume, SEED);
    for _ in 0..20 {
        let jobs: Vec<_> = (0..8).map(|lba| job(&bench, Operation::Write { fua: false }, lba * 7, lba as u8)).collect();
        assert!(bench.jobs(&jobs).iter().all(Result::is_ok));
    }
    bench.expect(49, &[7; 512]);
}

#[test]
fn blocks_and_metadata_survive_power_cuts_together() {
    for (block_size, points) in [(BlockSize::B512, 8000), (BlockSize::B4096, 2000)] {
        crash_test(&CrashTest {
            block_size,
            points,
            blocks: leg_blocks(180, block_size),
            settle: 1,
            steps: 25,
            seed: SEED,
            verify: &|graph, _| assert_eq!(graph.services("metadata")[0].1.status().facts.len(), 1, "nothing is lost"),
            view: &Woven::over,
            ..CrashTest::new(STACK, 1)
        });
    }
}

/// Only a block that was not flushed is ever another one than its metadata say.
#[test]
fn a_block_that_the_disk_tears_does_not_pass_for_one_that_was_written() {
    crash_test(&CrashTest {
        blocks: leg_blocks(180, BlockSize::B4096),
        tearing: Tearing::Told,
        steps: 25,
        points: 500,
        seed: SEED,
        settle: 1,
        view: &Woven::over_torn,
        ..CrashTest::new(STACK, 1)
    });
}

/// A job that reads or writes a whole block of one byte.
fn job(bench: &conformance::Bench<'_>, operation: Operation, lba: u64, byte: u8) -> Job {
    let segment = bench.memory.segment(0, bench.block());
    segment.fill(byte);
    Job { operation, lba: Lba(lba), count: BlockCount(1), segments: vec![segment] }
}
