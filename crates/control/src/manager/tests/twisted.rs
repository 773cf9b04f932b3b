//! Volumes that do one thing otherwise than the one below.

use millrace_block::{BlockCount, Geometry, Request, Step as Begun, TaskContext, Usage, Volume as Blocks, VolumeError};
use millrace_frontends::nvme::Identity;

use super::*;

/// What is done otherwise.
pub(super) trait Twist: Send + Sync + 'static {
    fn submit<'a>(&'a self, below: &'a dyn Blocks, cx: TaskContext<'a>, request: Request<'a>) -> Begun<'a> {
        below.submit(cx, request)
    }

    fn resize(&self, below: &dyn Blocks, blocks: BlockCount) -> Result<(), VolumeError> {
        below.resize(blocks)
    }
}

pub(super) struct Twisted<T> {
    pub(super) below: Arc<dyn Blocks>,
    pub(super) twist: T,
}

impl<T: Twist> Blocks for Twisted<T> {
    fn name(&self) -> &str {
        self.below.name()
    }

    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Begun<'a> {
        self.twist.submit(&*self.below, cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        self.below.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.twist.resize(&*self.below, blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.below.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.below.usage()
    }
}

impl Rig {
    /// Puts it above a volume.
    pub(super) fn twist(&self, name: &str, twist: impl Twist) {
        let mut inner = self.peek();
        let volume = inner.volumes.get_mut(name).unwrap();
        let plain = volume.live().unwrap();
        let (identity, below) = (Identity { ..plain.identity }, Arc::clone(&plain.volume));
        volume.live = Ok(Namespace::new(Arc::new(Twisted { below, twist }), identity, true));
    }
}
