//! A volume without data, for measuring what everything above it costs.
//!
//! Requests are checked and then succeed at once. Reads leave the memory as it is, and every compare finds its data.

use std::sync::Arc;

use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Request, Step, TaskContext, Usage, Volume, VolumeError, check,
};

use crate::shape::{Shape, blocks_after_format, blocks_in, bytes_in};

/// See the module.
#[derive(Debug)]
pub struct NullVolume {
    name: String,
    shape: Shape,
}

impl NullVolume {
    /// A volume of `bytes` bytes that holds none of them.
    ///
    /// # Errors
    /// [`VolumeError::BadSize`] for a size of 0, beyond 2^63, or not a multiple of 512.
    pub fn create(name: &str, bytes: u64, block_size: BlockSize) -> Result<Arc<Self>, VolumeError> {
        blocks_in(name, bytes, block_size)?;
        Ok(Arc::new(Self { name: name.to_owned(), shape: Shape::new(block_size, bytes) }))
    }
}

impl Volume for NullVolume {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = self.shape.get();
        Geometry { block_size, blocks, read_only: false, volatile_cache: false, deallocate: false }
    }

    #[inline]
    fn submit<'a>(&'a self, _: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let result: Result<(), BlockError> = check(&self.geometry(), &request).map(|_| ());
        Step::Done(result)
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let geometry = self.geometry();
        requests.iter().take_while(|request| check(&geometry, request).is_ok()).count()
    }

    fn scratch_bytes(&self) -> usize {
        0
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let (block_size, _) = self.shape.get();
        bytes_in(&self.name, blocks, block_size)?;
        self.shape.set(block_size, blocks);
        self.shape.settle();
        Ok(())
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let blocks = blocks_after_format(&self.name, self.shape.room(), block_size)?;
        self.shape.set(block_size, blocks);
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage { allocated: 0 }
    }
}
