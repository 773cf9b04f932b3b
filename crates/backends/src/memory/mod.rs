//! A volume in memory: fast, sparse, and gone when nobody holds its memory files any more. The keeper holds them, too, so that it
//! outlives a worker.
//!
//! Requests finish at once. Only what touches much memory without moving much data through the guest (erasing, copying) is
//! cut in pieces, so that the shard can serve others in between.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, ByteOffset, Geometry, Lba, Operation, Request, Step, TaskContext, Usage, Volume,
    VolumeError, check, future_bytes, yield_now,
};
use millrace_memory::{Access, ByteStore, OnFile, Reach};

use crate::{
    ahead::prefetch_ahead,
    shape::{Shape, blocks_after_format, blocks_in, bytes_in},
};

/// Bytes erased or copied without a break.
const AT_ONCE: u64 = 4 << 20;

/// See the module.
#[derive(Debug)]
pub struct MemoryVolume {
    name: String,
    store: ByteStore,
    shape: Shape,
    /// Held while the shape changes, never on the data path.
    changing: Mutex<()>,
}

impl MemoryVolume {
    /// A volume of `bytes` zeroes. Memory is taken as blocks are written, so that a volume may be larger than the machine's.
    ///
    /// # Errors
    /// [`VolumeError::BadSize`] for a size of 0, beyond 2^63, or not a multiple of 512; [`VolumeError::Io`] when
    /// the system has no address space for it.
    pub fn create(name: &str, bytes: u64, block_size: BlockSize) -> Result<Arc<Self>, VolumeError> {
        blocks_in(name, bytes, block_size)?;
        let store = ByteStore::new(bytes).map_err(|source| no_room(name, bytes, source))?;
        Ok(Self::over(name, store, Shape::new(block_size, bytes)))
    }

    /// As [`Self::create`], in memory files that may outlive this process: `files` are those that an earlier one was told of by
    /// `on_file`, in order; what was written is in them.
    ///
    /// # Errors
    /// As of [`Self::create`].
    pub fn in_files(
        name: &str,
        bytes: u64,
        block_size: BlockSize,
        files: &[OwnedFd],
        on_file: OnFile,
    ) -> Result<Arc<Self>, VolumeError> {
        blocks_in(name, bytes, block_size)?;
        let store = ByteStore::in_files(bytes, files, on_file).map_err(|source| no_room(name, bytes, source))?;
        Ok(Self::over(name, store, Shape::new(block_size, bytes)))
    }

    fn over(name: &str, store: ByteStore, shape: Shape) -> Arc<Self> {
        Arc::new(Self { name: name.to_owned(), store, shape, changing: Mutex::new(()) })
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Erases or copies a piece.
    fn work(&self, operation: Operation, offset: u64, source: u64, len: u64) {
        match operation {
            Operation::Copy { .. } => self.store.copy_within(source, offset, len),
            Operation::Deallocate | Operation::WriteZeroes { deallocate: true, .. } => self.store.discard(offset, len),
            Operation::WriteZeroes { deallocate: false, .. } => self.store.zero(offset, len),
            Operation::Read | Operation::Write { .. } | Operation::Flush | Operation::Compare => {}
        }
    }

    /// Erases or copies a range that is long. `request` was checked; the store never shrinks below what it had then.
    async fn work_in_pieces(&self, _: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let geometry = self.geometry();
        let (ByteOffset(offset), len) = check(&geometry, &request)?;
        let source = source_offset(&geometry, request.operation);
        let mut done = 0;
        while done < len {
            // Pieces end where huge pages do, so that these are given back whole.
            let piece = (len - done).min(AT_ONCE - (offset + done) % AT_ONCE);
            self.work(request.operation, offset + done, source + done, piece);
            done += piece;
            yield_now().await;
        }
        Ok(())
    }
}

fn no_room(volume: &str, bytes: u64, source: std::io::Error) -> VolumeError {
    let what = format!("{bytes} bytes of memory");
    VolumeError::Io { volume: volume.to_owned(), action: "reserve", path: what.into(), source }
}

fn source_offset(geometry: &Geometry, operation: Operation) -> u64 {
    match operation {
        Operation::Copy { source } => source.0 << geometry.block_size.shift(),
        _ => 0,
    }
}

impl Volume for MemoryVolume {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = self.shape.get();
        Geometry { block_size, blocks, read_only: false, volatile_cache: false, deallocate: true }
    }

    #[inline]
    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let geometry = self.geometry();
        let (ByteOffset(offset), len) = match check(&geometry, &request) {
            Ok(range) => range,
            Err(error) => return Step::Done(Err(error)),
        };
        match request.operation {
            Operation::Read => self.store.read(offset, request.segments),
            Operation::Write { .. } => self.store.write(offset, request.segments),
            Operation::Compare if !self.store.equals(offset, request.segments) => {
                return Step::Done(Err(BlockError::Miscompare));
            }
            Operation::Flush | Operation::Compare => {}
            Operation::WriteZeroes { .. } | Operation::Deallocate | Operation::Copy { .. } if len > AT_ONCE => {
                return Step::Wait(cx.scratch.place_future(self.work_in_pieces(cx, request)));
            }
            Operation::WriteZeroes { .. } | Operation::Deallocate | Operation::Copy { .. } => {
                self.work(request.operation, offset, source_offset(&geometry, request.operation), len);
            }
        }
        Step::Done(Ok(()))
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let geometry = self.geometry();
        let mut far = true;
        for (at, request) in requests.iter().enumerate() {
            let Ok((ByteOffset(offset), _)) = check(&geometry, request) else { return at };
            far = far && prefetch_ahead(self, requests, at);
            match request.operation {
                Operation::Read => self.store.read(offset, request.segments),
                Operation::Write { .. } => self.store.write(offset, request.segments),
                _ => return at,
            }
        }
        requests.len()
    }

    #[inline]
    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        let geometry = self.geometry();
        let range = geometry.byte_range(lba, count);
        range.is_none_or(|(ByteOffset(offset), len)| self.store.prefetch(offset, len))
    }

    fn settles_late(&self) -> bool {
        true
    }

    #[inline]
    fn reach(&self, lba: Lba, count: BlockCount, access: Access) -> Option<Reach<'_>> {
        let (ByteOffset(offset), len) = self.geometry().byte_range(lba, count)?;
        self.store.reach(offset, usize::try_from(len).ok()?, access)
    }

    #[inline]
    fn reached(&self, lba: Lba, count: BlockCount) {
        // Whatever the size is now: what is not on record reads as zeroes. The store does not shrink.
        let shift = self.geometry().block_size.shift();
        self.store.reached(lba.0 << shift, (count.0 << shift) as usize);
    }

    fn scratch_bytes(&self) -> usize {
        future_bytes(Self::work_in_pieces)
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let _one_at_a_time = self.change();
        let (block_size, _) = self.shape.get();
        let (before, after) = (self.shape.bytes(), bytes_in(&self.name, blocks, block_size)?);
        if after < before {
            self.shape.set(block_size, blocks);
            self.store.discard(after, before - after);
        } else {
            self.store.grow(after).map_err(|source| no_room(&self.name, after, source))?;
            // A write that was in flight during an earlier shrink may have left bytes here.
            self.store.discard(before, after - before);
            self.shape.set(block_size, blocks);
        }
        self.shape.settle();
        Ok(())
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let _one_at_a_time = self.change();
        let bytes = self.shape.room();
        let blocks = blocks_after_format(&self.name, bytes, block_size)?;
        self.store.discard(0, bytes);
        self.shape.set(block_size, blocks);
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage { allocated: self.store.allocated() }
    }
}
