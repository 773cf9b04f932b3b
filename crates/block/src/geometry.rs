//! A volume's shape and abilities.

use crate::{BlockCount, ByteOffset, Lba};

/// Size of a logical block: 512 or 4096 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum BlockSize {
    /// 512 bytes.
    B512 = 9,
    /// 4096 bytes.
    B4096 = 12,
}

impl BlockSize {
    /// The block size of so many bytes, if there is one.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        match bytes {
            512 => Some(Self::B512),
            4096 => Some(Self::B4096),
            _ => None,
        }
    }

    /// Size in bytes.
    #[inline]
    pub fn bytes(self) -> u32 {
        1 << self.shift()
    }

    /// Power of two of the size in bytes (NVMe's LBADS).
    #[inline]
    pub fn shift(self) -> u32 {
        self as u32
    }
}

/// What a volume is at this moment. It changes by resize and reformat only, and the front ends are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of a logical block.
    pub block_size: BlockSize,
    /// Number of logical blocks.
    pub blocks: BlockCount,
    /// Writes are refused with [`BlockError::ReadOnly`](crate::BlockError::ReadOnly).
    pub read_only: bool,
    /// A completed write may still be lost on power loss until a flush: guests should flush.
    pub volatile_cache: bool,
    /// Deallocate gives space back. Deallocated blocks read as zeroes until written.
    pub deallocate: bool,
}

impl Geometry {
    /// Size in bytes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.blocks.0 << self.block_size.shift()
    }

    /// The blocks that bytes are, when these are whole blocks; they may lie beyond the volume.
    #[inline]
    pub fn whole_blocks(&self, ByteOffset(offset): ByteOffset, bytes: u64) -> Option<(Lba, BlockCount)> {
        let shift = self.block_size.shift();
        let whole = (offset | bytes) & ((1 << shift) - 1) == 0;
        whole.then_some((Lba(offset >> shift), BlockCount(bytes >> shift)))
    }

    /// Where the range lies in bytes, when it lies within the volume.
    #[inline]
    pub fn byte_range(&self, lba: Lba, count: BlockCount) -> Option<(ByteOffset, u64)> {
        let end = lba.0.checked_add(count.0)?;
        if end > self.blocks.0 {
            return None;
        }
        // No overflow: blocks << shift fits in u64 by construction of every volume, and end <= blocks.
        Some((ByteOffset(lba.0 << self.block_size.shift()), count.0 << self.block_size.shift()))
    }
}
