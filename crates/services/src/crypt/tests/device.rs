//! A leg that is a device: it becomes smaller by what is said of it alone, and larger with what it had.

use std::sync::Arc;

use millrace_block::{
    BlockCount, BlockSize,
    conformance::{Bench, SyncHarness},
};

use super::{SEED, disk, open, stack};
use crate::{Reason, testing::Device};

#[test]
fn what_a_device_had_before_it_was_made_smaller_is_not_shown_again() {
    let disk = disk(240, BlockSize::B512);
    let blocks = disk.geometry().blocks.0;
    let leg = Device::over(disk, blocks);
    let graph = open(&stack(""), &leg, Reason::Create).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let data = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(0, 240);
    for blocks in [100, 240] {
        graph.volume().resize(BlockCount(blocks)).unwrap();
    }
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.expect(0, &data[..100 * 512]);
    bench.expect(100, &vec![0; 140 * 512]);
}
