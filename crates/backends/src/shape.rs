//! Size and block size of a volume, changed as one.

use std::sync::atomic::{AtomicU64, Ordering};

use millrace_block::{BlockCount, BlockSize, VolumeError};

/// The largest volume in bytes: what a file offset can name.
const MAX_BYTES: u64 = i64::MAX as u64;

/// A block size and a number of blocks, read and replaced together.
#[derive(Debug)]
pub(crate) struct Shape {
    packed: AtomicU64,
    /// Bytes that there are, if they make no whole number of blocks: those of another size may use more of them, as they do when the volume
    /// is opened anew.
    room: AtomicU64,
}

fn pack(block_size: BlockSize, blocks: BlockCount) -> u64 {
    assert!(blocks.0 <= MAX_BYTES >> block_size.shift(), "sizes are checked before they are set");
    blocks.0 << 1 | u64::from(block_size == BlockSize::B4096)
}

impl Shape {
    /// As many blocks as fit into so many bytes.
    pub(crate) fn new(block_size: BlockSize, bytes: u64) -> Self {
        let blocks = BlockCount(bytes >> block_size.shift());
        Self { packed: AtomicU64::new(pack(block_size, blocks)), room: AtomicU64::new(bytes) }
    }

    /// Acquire: pairs with the release in [`Self::set`]; whoever sees a larger volume also sees the room made for it.
    #[inline]
    pub(crate) fn get(&self) -> (BlockSize, BlockCount) {
        let packed = self.packed.load(Ordering::Acquire);
        let block_size = if packed & 1 == 0 { BlockSize::B512 } else { BlockSize::B4096 };
        (block_size, BlockCount(packed >> 1))
    }

    /// Release: pairs with the acquire in [`Self::get`].
    pub(crate) fn set(&self, block_size: BlockSize, blocks: BlockCount) {
        self.packed.store(pack(block_size, blocks), Ordering::Release);
    }

    /// Bytes that a format may use. Whoever changes the shape keeps others from it.
    pub(crate) fn room(&self) -> u64 {
        self.room.load(Ordering::Relaxed)
    }

    /// After a resize: there are as many bytes as the blocks have.
    pub(crate) fn settle(&self) {
        self.room.store(self.bytes(), Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> u64 {
        let (block_size, blocks) = self.get();
        blocks.0 << block_size.shift()
    }
}

/// The number of blocks in a size asked for: of larger blocks, as many as fit. The size of a leg stands in its stack, and a format to larger
/// blocks leaves it there.
pub(crate) fn blocks_in(volume: &str, bytes: u64, block_size: BlockSize) -> Result<BlockCount, VolumeError> {
    let bad = |why| Err(VolumeError::BadSize { volume: volume.to_owned(), size: bytes, why });
    if bytes == 0 {
        return bad("it is empty");
    }
    if !bytes.is_multiple_of(u64::from(BlockSize::B512.bytes())) {
        return bad("it is not a multiple of the block size (512 bytes at least)");
    }
    if bytes > MAX_BYTES {
        return bad("it is larger than a file can be");
    }
    if bytes < u64::from(block_size.bytes()) {
        return bad("it is smaller than one block");
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
