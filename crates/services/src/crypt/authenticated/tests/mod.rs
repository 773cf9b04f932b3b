//! The authenticated mode through the suites, through power cuts, and against those who can write to the leg.

mod bad;
mod crashes;
mod readers;
mod rekey;
mod root;
mod tamper;
mod trouble;

use std::sync::Arc;

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Lba, Operation, Volume,
    conformance::{self, Bench, Subject, SyncHarness, Wanted},
};

use super::layout::{FAN, block_start, leg_bytes, page_start};
use crate::{
    Reason,
    graph::Graph,
    legs,
    testing::{CrashTest, Tearing, crash_test, subject},
};

const SEED: u64 = 0x7365_616c;
/// A block was not what was written there.
const CHANGED: Result<(), BlockError> = Err(BlockError::ReadFault { errno: 0 });

/// A stack over `disk:0` with a key of the tests'.
fn stack(settings: &str) -> String {
    let key = concat!("file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key");
    format!("crypt(mode=authenticated, {settings}key=\"{key}\", disk:0)")
}

/// A stack over `disk:0` with its root in `disk:1` as well.
fn rooted(settings: &str) -> String {
    stack(settings).replace("disk:0", "disk:1, disk:0")
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

fn open_stack(stack: &str, disk: &Arc<dyn Volume>, reason: Reason) -> Result<Graph, String> {
    crate::testing::graph(stack, std::slice::from_ref(disk), None, reason, &Arc::default())
        .map_err(|error| error.to_string())
}

fn open(disk: &Arc<dyn Volume>, reason: Reason) -> Result<Graph, String> {
    open_stack(&stack(""), disk, reason)
}

/// Ends it in an orderly way; its tasks never ran.
fn close(mut graph: Graph) {
    graph.tasks.clear();
    graph.unmount();
}

/// The process dies.
fn kill(mut graph: Graph) {
    graph.tasks.clear();
}

fn on_bench(graph: &Graph, test: impl FnOnce(&mut Bench<'_>)) {
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED));
}

fn read(bench: &mut Bench<'_>, lba: u64) -> Result<(), BlockError> {
    let segment = bench.memory.segment(0, bench.block());
    bench.moving(Operation::Read, lba, &[segment])
}

/// A block as it lies on the leg.
fn raw(disk: &Arc<dyn Volume>, lba: u64) -> Vec<u8> {
    let block_size = disk.geometry().block_size;
    legs::read(disk, block_start(lba, block_size), block_size.bytes() as usize).unwrap()
}

/// Changes a block behind its back.
fn put_raw(disk: &Arc<dyn Volume>, lba: u64, block: &[u8]) {
    legs::write(disk, block_start(lba, disk.geometry().block_size), block.to_vec()).unwrap();
}

/// Blocks of a part of a leg with blocks of 512 bytes, which is larger than the log has room for doubts.
const ILL: u64 = 8 * FAN;

/// So many groups of the leg can be neither read nor written, blocks and pages.
fn fall_ill(faulty: &FaultVolume, groups: u64) {
    let [start, end] = [0, groups].map(|group| page_start(0, group, BlockSize::B512) / 512);
    let range = Some((Lba(start), BlockCount(end - start)));
    for kind in [Kind::Write, Kind::Read] {
        faulty.add(Rule { range, ..Rule::new(kind, When::Always, Effect::Fail(BlockError::ReadFault { errno: 5 })) });
    }
}

/// Their writes fail.
fn write_ill(bench: &mut Bench<'_>) {
    for piece in 0..ILL / 24 {
        assert!(bench.write(piece * 24, &[7; 24 * 512]).is_err());
    }
}

#[test]
fn it_conforms() {
    for settings in ["", "discard=false, "] {
        let stack = stack(settings);
        let mut make = subject(&stack, 1, leg_blocks, memory);
        conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
    }
}

#[test]
fn it_conforms_over_a_leg_that_waits_and_holds_writes() {
    let waiting = |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED);
        volume.hold_writes();
        volume
    };
    for (stack, legs) in [(stack(""), 1), (rooted(""), 2)] {
        let mut make = subject(&stack, legs, leg_blocks, waiting);
        conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
    }
}

/// Nothing that a power cut leaves is taken for somebody's work.
fn nothing_is_called_changed(graph: &Graph) {
    let status = graph.services("crypt")[0].1.status();
    assert_eq!((status.facts[2].1.as_str(), status.facts[3].1.as_str()), ("0", "0"), "{status:?}");
}

#[test]
fn flushed_data_survive_power_cuts_and_nothing_is_called_changed() {
    let cases = [
        ("save-after=1ms, ", BlockSize::B512, 6000, 25),
        ("save-after=1ms, ", BlockSize::B4096, 2000, 25),
        ("save-after=1ms, discard=false, ", BlockSize::B512, 1000, 25),
        // Only writers that find the log full save.
        ("save-after=10m, ", BlockSize::B512, 2000, 90),
    ];
    for (settings, block_size, points, steps) in cases {
        let stack = stack(settings);
        crash_test(&CrashTest {
            block_size,
            points,
            blocks: leg_blocks(200, block_size),
            settle: 200,
            steps,
            seed: SEED,
            verify: &|graph, _| nothing_is_called_changed(graph),
            ..CrashTest::new(&stack, 1)
        });
    }
}

#[test]
fn a_block_that_the_disk_tears_is_not_delivered() {
    for (stack, disks) in [(stack("save-after=1ms, "), 1), (rooted("save-after=1ms, "), 2)] {
        crash_test(&CrashTest {
            blocks: leg_blocks(60, BlockSize::B4096),
            tearing: Tearing::Told,
            steps: 20,
            points: 400,
            seed: SEED,
            settle: 200,
            ..CrashTest::new(&stack, disks)
        });
    }
}
