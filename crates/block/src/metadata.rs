//! A few bytes that a volume may keep with each block: what NVMe calls metadata.

use millrace_memory::Segment;

use crate::{BlockCount, Lba, Operation};

/// Bytes of metadata with each block.
pub const METADATA_SIZE: usize = 8;

/// The metadata of a block that has none: as protection information, it says that nothing is to be checked.
pub const NO_METADATA: [u8; METADATA_SIZE] = [0xff; METADATA_SIZE];

/// What a volume keeps with each of its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Metadata {
    /// Nothing.
    #[default]
    Never,
    /// It could keep metadata, and its present format does not show them.
    Hidden,
    /// Metadata.
    Shown(MetadataFormat),
}

impl Metadata {
    /// How they are shown, if they are.
    pub fn shown(self) -> Option<MetadataFormat> {
        match self {
            Self::Shown(format) => Some(format),
            Self::Never | Self::Hidden => None,
        }
    }
}

/// How metadata are shown to guests. The volume stores it and looks at nothing of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetadataFormat {
    /// Type of the protection information that they are, 1 to 3; 0: they are the guest's own.
    pub protection: u8,
    /// They are transferred at the end of each block, not in a buffer of their own.
    pub extended: bool,
    /// Protection information is in the first bytes of the metadata, not in the last: with as many bytes as it has, the same.
    pub first: bool,
}

impl MetadataFormat {
    /// As a number below 16.
    pub fn bits(self) -> u8 {
        self.protection & 3 | u8::from(self.extended) << 2 | u8::from(self.first) << 3
    }

    /// The format of [`Self::bits`].
    pub fn from_bits(bits: u8) -> Option<Self> {
        let format = Self { protection: bits & 3, extended: bits & 4 != 0, first: bits & 8 != 0 };
        (bits < 16).then_some(format)
    }
}

/// A read or write of blocks with their metadata.
#[derive(Clone, Copy, Debug)]
pub struct TaggedRequest {
    /// Read or write; nothing else.
    pub operation: Operation,
    /// First block.
    pub lba: Lba,
    /// Number of blocks.
    pub count: BlockCount,
    /// The blocks' memory, one after the other: the caller's own, which nobody else changes meanwhile.
    pub data: Segment,
    /// The metadata's, [`METADATA_SIZE`] bytes for each block.
    pub metadata: Segment,
}
