//! A leg as a block device is: what lies beyond a new end stays there, and is seen again when it grows.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use millrace_block::{
    BlockCount, BlockSize, Geometry, Request, Step, TaskContext, Usage, Volume, VolumeError,
    conformance::{Bench, SyncHarness},
};

use crate::{graph::Graph, legs};

/// See the module.
pub struct Device {
    all: Arc<dyn Volume>,
    blocks: AtomicU64,
}

impl Device {
    /// A device that may be as large as `all`, and has so many blocks.
    pub fn over(all: Arc<dyn Volume>, blocks: u64) -> Arc<dyn Volume> {
        Arc::new(Self { all, blocks: AtomicU64::new(blocks) })
    }
}

impl Volume for Device {
    fn name(&self) -> &str {
        self.all.name()
    }

    fn geometry(&self) -> Geometry {
        Geometry { blocks: BlockCount(self.blocks.load(Ordering::Relaxed)), ..self.all.geometry() }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        match millrace_block::check(&self.geometry(), &request) {
            Ok(_) => self.all.submit(cx, request),
            Err(error) => Step::Done(Err(error)),
        }
    }

    fn scratch_bytes(&self) -> usize {
        self.all.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let has = self.all.geometry();
        if blocks > has.blocks {
            let size = blocks.0 << has.block_size.shift();
            return Err(VolumeError::BadSize { volume: self.name().to_owned(), size, why: "the device is smaller" });
        }
        self.blocks.store(blocks.0, Ordering::Relaxed);
        Ok(())
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.all.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.all.usage()
    }
}

/// Opens a volume of 500 blocks of 512 bytes on the first `blocks` of `all`, where something else was, and lets it grow over that and over
/// what it had there itself: both read as zeroes.
pub fn grow_over_what_was_there(
    all: &Arc<dyn Volume>,
    blocks: u64,
    seed: u64,
    open: impl FnOnce(&Arc<dyn Volume>) -> Graph,
) -> Graph {
    let start = blocks << 9;
    legs::write(all, start, vec![0xaa; (all.geometry().bytes() - start) as usize]).unwrap();
    let graph = open(&Device::over(Arc::clone(all), blocks));
    let bench = |test: &dyn Fn(&mut Bench<'_>)| {
        test(&mut Bench::new(&mut SyncHarness::new(seed, false), Arc::clone(graph.volume()), seed));
    };
    bench(&|bench| bench.write(0, &vec![1; 500 * 512]).unwrap());
    graph.volume().resize(BlockCount(2500)).unwrap();
    bench(&|bench| {
        bench.expect_zeroes(500, 2000);
        bench.write(400, &vec![2; 1700 * 512]).unwrap();
    });
    graph.volume().resize(BlockCount(450)).unwrap();
    graph.volume().resize(BlockCount(2500)).unwrap();
    bench(&|bench| {
        bench.expect(0, &[vec![1; 400 * 512], vec![2; 50 * 512]].concat());
        bench.expect_zeroes(450, 2050);
        bench.write(2400, &[3; 512]).unwrap();
        bench.expect(2400, &[3; 512]);
    });
    graph
}
