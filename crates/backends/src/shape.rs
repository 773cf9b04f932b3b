//! Size and block size of a volume, changed as one.

use std::sync::atomic::{AtomicU64, Ordering};

use millrace_block::{BlockCount, BlockSize, VolumeError};

/// The largest volume in bytes: what a file offset can name.
const MAX_BYTES: u64 = i64::MAX as u64;

/// A block size and a number of blocks, read and replaced together.
#[derive(Debug)]
pub(crate) struct Shape(AtomicU64);

fn pack(block_size: BlockSize, blocks: BlockCount) -> u64 {
    assert!(blocks.0 <= MAX_BYTES >> block_size.shift(), "sizes are checked before they are set");
    blocks.0 << 1 | u64::from(block_size == BlockSize::B4096)
}

impl Shape {
    pub(crate) fn new(block_size: BlockSize, blocks: BlockCount) -> Self {
        Self(AtomicU64::new(pack(block_size, blocks)))
    }

    /// Acquire: pairs with the release in [`Self::set`]; whoever sees a larger volume also sees the room made for it.
    #[inline]
    pub(crate) fn get(&self) -> (BlockSize, BlockCount) {
        let packed = self.0.load(Ordering::Acquire);
        let block_size = if packed & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 };
        (block_size, BlockCount(packed >> 1))
    }

    /// Release: pairs with the acquire in [`Self::get`].
    pub(crate) fn set(&self, block_size: BlockSize, blocks: BlockCount) {
        self.0.store(pack(block_size, blocks), Ordering::Release);
    }

    pub(crate) fn bytes(&self) -> u64 {
        let (block_size, blocks) = self.get();
        blocks.0 << block_size.shift()
    }
}

/// The number of blocks in a size asked for.
pub(crate) fn blocks_in(volume: &str, bytes: u64, block_size: BlockSize) -> Result<BlockCount, VolumeError> {
    let bad = |why| Err(VolumeError::BadSize { volume: volume.to_owned(), size: bytes, why });
    if bytes == 0 {
        return bad("it is empty");
    }
    if !bytes.is_multiple_of(u64::from(block_size.bytes())) {
        return bad("it is not a multiple of the block size");
    }
    if bytes > MAX_BYTES {
        return bad("it is larger than a file can be");
    }
    Ok(BlockCount(bytes >> block_size.shift()))
}

/// The size in bytes of so many blocks.
pub(crate) fn bytes_in(volume: &str, blocks: BlockCount, block_size: BlockSize) -> Result<u64, VolumeError> {
    let bytes = blocks.0.saturating_mul(u64::from(block_size.bytes()));
    blocks_in(volume, bytes, block_size).map(|_| bytes)
}

/// The number of blocks after a format: as many as fit.
pub(crate) fn blocks_after_format(volume: &str, bytes: u64, block_size: BlockSize) -> Result<BlockCount, VolumeError> {
    match bytes >> block_size.shift() {
        0 => Err(VolumeError::BadBlockSize {
            volume: volume.to_owned(),
            block_size: block_size.bytes(),
            why: "the volume is smaller than one block",
        }),
        blocks => Ok(BlockCount(blocks)),
    }
}
