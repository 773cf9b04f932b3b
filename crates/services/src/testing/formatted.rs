//! A leg whose formats are a test's.

use std::sync::Arc;

use millrace_block::{BlockCount, BlockSize, Geometry, Request, Step, TaskContext, Usage, Volume, VolumeError};

/// Shows a leg as it is, and leaves its formats to a function, which has the leg.
pub(crate) struct Formatted<F> {
    inner: Arc<dyn Volume>,
    format: F,
}

impl<F> Formatted<F>
where
    F: Fn(&Arc<dyn Volume>, BlockSize) -> Result<(), VolumeError> + Send + Sync + 'static,
{
    /// Over this leg.
    pub(crate) fn over(inner: &Arc<dyn Volume>, format: F) -> Arc<dyn Volume> {
        Arc::new(Self { inner: Arc::clone(inner), format })
    }
}

impl<F: Fn(&Arc<dyn Volume>, BlockSize) -> Result<(), VolumeError> + Send + Sync> Volume for Formatted<F> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.inner.submit(cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        self.inner.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.inner.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        (self.format)(&self.inner, block_size)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}
