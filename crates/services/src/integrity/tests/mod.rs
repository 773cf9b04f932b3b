//! Integrity through the suites, through power cuts, and what it promises beyond them.

mod bad;
mod promise;
mod trouble;

use std::sync::Arc;

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockSize, Volume,
    conformance::{self, Subject, SyncHarness, Wanted},
};

use super::page::leg_bytes;
use crate::{
    Reason,
    graph::Graph,
    testing::{CrashTest, Tearing, crash_test, subject},
};

const SEED: u64 = 0x696e_7465;
const STACK: &str = "integrity(close-after=1ms, disk:0)";

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

/// Ends it in an orderly way; its tasks never ran.
fn close(mut graph: Graph) {
    graph.tasks.clear();
    graph.unmount();
}

#[test]
fn it_conforms() {
    let mut make = subject(STACK, 1, leg_blocks, memory);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn it_conforms_over_a_leg_that_waits_and_holds_writes() {
    let waiting = |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED);
        volume.hold_writes();
        volume
    };
    let mut make = subject(STACK, 1, leg_blocks, waiting);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn flushed_data_survive_power_cuts_and_nothing_is_called_rotten() {
    for (block_size, points) in [(BlockSize::B512, 8000), (BlockSize::B4096, 2000)] {
        let blocks = leg_blocks(520, block_size);
        crash_test(&CrashTest {
            block_size,
            points,
            blocks,
            settle: 40,
            steps: 25,
            seed: SEED,
            verify: &|graph, _| {
                let status = graph.services("integrity")[0].1.status();
                assert_eq!(status.facts[1].1, "0", "{status:?}");
            },
            ..CrashTest::new(STACK, 1)
        });
    }
}

#[test]
fn what_the_disk_tears_is_taken_as_it_is_and_not_called_rotten() {
    crash_test(&CrashTest {
        blocks: leg_blocks(100, BlockSize::B4096),
        tearing: Tearing::Mixed,
        steps: 25,
        points: 500,
        seed: SEED,
        settle: 40,
        verify: &|graph, _| {
            let status = graph.services("integrity")[0].1.status();
            assert_eq!(status.facts[1].1, "0", "{status:?}");
        },
        ..CrashTest::new(STACK, 1)
    });
}
