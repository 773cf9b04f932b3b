//! Disks that write less than a block as a whole.
//!
//! ```text
//!   volume: blocks of 4096 bytes     │        one        │
//!   disk:   sectors of 512 bytes     │ n │ n │ o │ n │ … │     a power cut leaves some of them old, some new
//! ```

use std::sync::Arc;

use millrace_block::{
    BlockCount, BlockSize, Geometry, Lba, Operation, Request, Step, TaskContext, Usage, Volume, VolumeError, check,
    conformance::CrashDisk,
};

/// Sectors of a block, as a power of two.
const SHIFT: u32 = 3;

/// What a power cut makes of a block whose last write was not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tearing {
    /// Nothing: disks write each block as a whole.
    Never,
    /// Disks tear it, and the volume does not show that: it is one of those that it may be.
    Hidden,
    /// Each sector of it is of one of those that it may be.
    Mixed,
    /// The same, but where the block may be zeroes a sector may be anything.
    Noisy,
    /// It is one of those that it may be, or cannot be read before it is written again.
    Told,
}

/// A disk with sectors of 512 bytes, as a volume of blocks of 4096 bytes.
pub(super) struct Sectors(pub(super) Arc<CrashDisk>);

impl Volume for Sectors {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn geometry(&self) -> Geometry {
        let disk = self.0.geometry();
        Geometry { block_size: BlockSize::B4096, blocks: BlockCount(disk.blocks.0 >> SHIFT), ..disk }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Err(error) = check(&self.geometry(), &request) {
            return Step::Done(Err(error));
        }
        let operation = match request.operation {
            Operation::Copy { source } => Operation::Copy { source: Lba(source.0 << SHIFT) },
            operation => operation,
        };
        let (lba, count) = (Lba(request.lba.0 << SHIFT), BlockCount(request.count.0 << SHIFT));
        self.0.submit(cx, Request { operation, lba, count, segments: request.segments })
    }

    fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.0.resize(BlockCount(blocks.0.saturating_mul(1 << SHIFT)))
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: self.name().to_owned(), what: "another block size" })
    }

    fn usage(&self) -> Usage {
        self.0.usage()
    }
}
