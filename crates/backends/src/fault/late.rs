//! A volume whose reads take their time.

use std::sync::Arc;

use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Operation, Request, Step, TaskContext, Usage, Volume, VolumeError,
    future_bytes, yield_now,
};

/// Waits some turns before it reads, and some before it hands over what it has read.
pub struct Late {
    inner: Arc<dyn Volume>,
    before: u32,
    after: u32,
}

impl Late {
    /// Over a volume, with so many turns.
    pub fn new(inner: Arc<dyn Volume>, before: u32, after: u32) -> Arc<Self> {
        Arc::new(Self { inner, before, after })
    }

    async fn read(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        for _ in 0..self.before {
            yield_now().await;
        }
        let result = self.inner.submit(cx, request).await;
        for _ in 0..self.after {
            yield_now().await;
        }
        result
    }
}

impl Volume for Late {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        match request.operation {
            Operation::Read => Step::Wait(cx.scratch.place_future(self.read(cx, request))),
            _ => self.inner.submit(cx, request),
        }
    }

    fn scratch_bytes(&self) -> usize {
        future_bytes(Self::read) + self.inner.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.inner.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.inner.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}
