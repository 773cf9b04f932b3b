//! A leg as a block device is: what lies beyond a new end stays there, and is seen again when it grows.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use millrace_block::{BlockCount, BlockSize, Geometry, Request, Step, TaskContext, Usage, Volume, VolumeError};

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
