//! A leg that is a device: it becomes smaller by what is said of it alone, and larger with what it had.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use millrace_block::{
    BlockCount, BlockSize, Geometry, Request, Step, TaskContext, Usage, Volume, VolumeError,
    conformance::{Bench, SyncHarness},
};

use super::{SEED, disk, open, stack};
use crate::Reason;

struct Device {
    disk: Arc<dyn Volume>,
    blocks: AtomicU64,
}

impl Volume for Device {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn geometry(&self) -> Geometry {
        Geometry { blocks: BlockCount(self.blocks.load(Ordering::Relaxed)), ..self.disk.geometry() }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.disk.submit(cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        self.disk.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        assert!(blocks <= self.disk.geometry().blocks);
        self.blocks.store(blocks.0, Ordering::Relaxed);
        Ok(())
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.disk.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.disk.usage()
    }
}

#[test]
fn what_a_device_had_before_it_was_made_smaller_is_not_shown_again() {
    let disk = disk(240, BlockSize::B512);
    let blocks = AtomicU64::new(disk.geometry().blocks.0);
    let leg: Arc<dyn Volume> = Arc::new(Device { disk, blocks });
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
