//! What the operator decides about a disk, and what of it the guest reads: features and configuration space.

use millrace_block::{BlockSize, Geometry};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::{message::protocol, ring::feature as ring};

/// Feature bits (virtio 1.3, 5.2.3 and 6; vhost-user.rst).
pub(crate) mod feature {
    pub(crate) const SEG_MAX: u64 = 1 << 2;
    pub(crate) const RO: u64 = 1 << 5;
    pub(crate) const BLK_SIZE: u64 = 1 << 6;
    pub(crate) const FLUSH: u64 = 1 << 9;
    pub(crate) const TOPOLOGY: u64 = 1 << 10;
    pub(crate) const CONFIG_WCE: u64 = 1 << 11;
    pub(crate) const MQ: u64 = 1 << 12;
    pub(crate) const DISCARD: u64 = 1 << 13;
    pub(crate) const WRITE_ZEROES: u64 = 1 << 14;
    pub(crate) const LOG_ALL: u64 = 1 << 26;
    pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(crate) const VERSION_1: u64 = 1 << 32;
}

/// Ranges one discard or write-zeroes request may have.
pub(crate) const MAX_RANGES: u32 = 32;
/// Sectors one range of a discard may have: 1 GiB.
pub(crate) const MAX_DISCARD: u32 = 1 << 21;
/// Sectors one range of a write-zeroes may have: 32 MiB, as one NVMe command of 512-byte blocks.
pub(crate) const MAX_ZEROES: u32 = 1 << 16;
/// Pieces of memory a guest is told that a request may have: with header and status a queue of 128 is full, QEMU's usual size.
const SEGMENTS: u32 = 126;

/// What a guest learns once of its disk's volume, when it starts: whatever takes the volume's place must be like it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Size of a logical block.
    pub block_size: BlockSize,
    /// The volume cannot be written, or not through this disk.
    pub read_only: bool,
    /// Deallocate gives space back. Where not, it does nothing: in this alone, what takes the volume's place may be unlike it.
    pub deallocate: bool,
}

impl Kind {
    /// The kind of a disk that shows a volume of this shape.
    pub fn new(geometry: &Geometry, read_only: bool) -> Self {
        let Geometry { block_size, deallocate, .. } = *geometry;
        Self { block_size, read_only: read_only || geometry.read_only, deallocate }
    }
}

/// What a disk says that has had no volume yet.
impl Default for Kind {
    fn default() -> Self {
        Self { block_size: BlockSize::B512, read_only: false, deallocate: true }
    }
}

/// What a guest may use of a disk that offers so much. A volume may stop giving space back while its guest runs, as where it goes to another
/// device: a guest that was told of discard goes on with it, and it does nothing.
pub(crate) fn acceptable(offered: u64) -> u64 {
    if offered & feature::WRITE_ZEROES != 0 { offered | feature::DISCARD } else { offered }
}

/// A disk's fixed properties.
#[derive(Clone, Debug)]
pub struct Config {
    /// The operator's name for the device.
    pub name: String,
    /// What the guest reads as the disk's identity (VIRTIO_BLK_T_GET_ID): at most 20 printable ASCII characters.
    pub serial: String,
    /// Request queues, 1 to [`Config::MAX_QUEUES`].
    pub queues: u16,
    /// The front end may move the disk's state (`VHOST_USER_PROTOCOL_F_DEVICE_STATE`).
    pub migration: bool,
    /// The guest gives no pages of its memory back, as to a balloon: a physical disk may keep it mapped.
    pub pin_memory: bool,
}

impl Config {
    /// Most queues.
    pub const MAX_QUEUES: u16 = 256;
    /// Longest serial.
    pub const MAX_SERIAL: usize = 20;

    /// A disk of the usual size.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            serial: format!("MR-{name}").chars().filter(char::is_ascii).take(Self::MAX_SERIAL).collect(),
            queues: 16,
            migration: false,
            pin_memory: false,
        }
    }

    /// What the front end is offered of the protocol.
    pub(crate) fn protocol(&self) -> u64 {
        if self.migration { protocol::ALL } else { protocol::ALL & !protocol::DEVICE_STATE }
    }

    /// What is out of its range, if anything is.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let printable = self.serial.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        if !(1..=Self::MAX_QUEUES).contains(&self.queues) {
            Err("queues must be 1 to 256")
        } else if self.serial.len() > Self::MAX_SERIAL || !printable {
            Err("the serial must be at most 20 printable ASCII characters")
        } else {
            Ok(())
        }
    }

    /// The serial as the guest reads it.
    pub(crate) fn serial_bytes(&self) -> [u8; Self::MAX_SERIAL] {
        let mut bytes = [0; Self::MAX_SERIAL];
        for (to, from) in bytes.iter_mut().zip(self.serial.bytes()) {
            *to = from;
        }
        bytes
    }

    /// What we offer for a volume of this kind.
    pub(crate) fn features(&self, kind: Kind) -> u64 {
        use feature::{
            BLK_SIZE, CONFIG_WCE, DISCARD, FLUSH, LOG_ALL, MQ, PROTOCOL_FEATURES, RO, SEG_MAX, TOPOLOGY, VERSION_1,
            WRITE_ZEROES,
        };
        let mut features = SEG_MAX | BLK_SIZE | TOPOLOGY | FLUSH | CONFIG_WCE | VERSION_1 | LOG_ALL | PROTOCOL_FEATURES;
        features |= ring::INDIRECT | ring::EVENT_IDX | ring::PACKED;
        if self.queues > 1 {
            features |= MQ;
        }
        if kind.read_only {
            return features | RO;
        }
        features |= WRITE_ZEROES;
        if kind.deallocate { features | DISCARD } else { features }
    }

    /// The configuration space for a volume of this shape.
    pub(crate) fn space(&self, geometry: &Geometry, write_back: bool) -> Space {
        let block = geometry.block_size.bytes();
        // Blocks of 512 bytes are eight to a page: whole pages are what media and caches like.
        let physical_exponent = if block == 512 { 3 } else { 0 };
        Space {
            capacity: geometry.bytes() / SECTOR,
            seg_max: SEGMENTS,
            blk_size: block,
            physical_exponent,
            min_io_size: 1 << physical_exponent,
            write_back: write_back.into(),
            num_queues: self.queues,
            max_discard_sectors: MAX_DISCARD,
            max_discard_segments: MAX_RANGES,
            discard_alignment: 4096 / SECTOR as u32,
            max_zeroes_sectors: MAX_ZEROES,
            max_zeroes_segments: MAX_RANGES,
            zeroes_may_unmap: geometry.deallocate.into(),
            ..Space::new_zeroed()
        }
    }
}

/// The unit of the protocol, whatever a volume's blocks are.
pub(crate) const SECTOR: u64 = 512;

/// Configuration space (virtio 1.3, 5.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoBytes, Immutable, FromZeros)]
#[repr(C)]
pub(crate) struct Space {
    pub(crate) capacity: u64,
    size_max: u32,
    seg_max: u32,
    geometry: [u8; 4],
    pub(crate) blk_size: u32,
    physical_exponent: u8,
    alignment_offset: u8,
    min_io_size: u16,
    opt_io_size: u32,
    pub(crate) write_back: u8,
    unused0: u8,
    pub(crate) num_queues: u16,
    max_discard_sectors: u32,
    max_discard_segments: u32,
    discard_alignment: u32,
    max_zeroes_sectors: u32,
    max_zeroes_segments: u32,
    zeroes_may_unmap: u8,
    unused1: [u8; 3],
    /// Limits of secure erase, which is not offered.
    secure_erase: [u32; 3],
}

impl Space {
    /// Where the write cache mode is: the one byte that a driver may write.
    pub(crate) const WRITE_BACK_AT: u32 = 32;

    /// `len` bytes from `offset` on; what lies beyond reads as zeroes.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        self.as_bytes().iter().copied().chain(std::iter::repeat(0)).skip(offset).take(len).collect()
    }
}

#[cfg(test)]
mod tests {
    use millrace_block::BlockCount;

    use super::*;

    #[test]
    fn the_state_is_offered_where_the_operator_says_so() {
        let usual = Config::new("disk");
        let moved = Config { migration: true, ..usual.clone() };
        assert_eq!((usual.protocol() & protocol::DEVICE_STATE, moved.protocol()), (0, protocol::ALL));
    }

    fn geometry(block_size: BlockSize) -> Geometry {
        Geometry { block_size, blocks: BlockCount(1000), read_only: false, volatile_cache: true, deallocate: true }
    }

    #[test]
    fn fields_lie_where_the_specification_has_them() {
        use std::mem::offset_of;
        assert_eq!(offset_of!(Space, blk_size), 20);
        assert_eq!(offset_of!(Space, write_back), Space::WRITE_BACK_AT as usize);
        assert_eq!(offset_of!(Space, num_queues), 34);
        assert_eq!(offset_of!(Space, max_discard_sectors), 36);
        assert_eq!(offset_of!(Space, zeroes_may_unmap), 56);
        assert_eq!(size_of::<Space>(), 72);
    }

    #[test]
    fn capacity_is_in_sectors_whatever_the_blocks_are() {
        let config = Config::new("disk");
        assert_eq!(config.space(&geometry(BlockSize::B512), true).capacity, 1000);
        let space = config.space(&geometry(BlockSize::B4096), false);
        assert_eq!((space.capacity, space.blk_size, space.write_back), (8000, 4096, 0));
        assert_eq!(space.read(32, 4), [0, 0, 16, 0]);
        assert_eq!(space.read(58, 6), [0; 6]);
    }

    #[test]
    fn what_cannot_be_written_offers_no_writes() {
        let config = Config::new("disk");
        let shape = geometry(BlockSize::B512);
        for (shape, read_only) in [(shape, true), (Geometry { read_only: true, ..shape }, false)] {
            let features = config.features(Kind::new(&shape, read_only));
            assert_eq!(features & (feature::RO | feature::DISCARD | feature::WRITE_ZEROES), feature::RO);
        }
        let features = config.features(Kind::new(&shape, false));
        assert_eq!(features & feature::RO, 0);
        assert_ne!(features & feature::DISCARD, 0);
    }
}
