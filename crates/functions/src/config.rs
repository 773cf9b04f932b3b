//! What the operator set for a guest's function: eight words, as the engine's registers hold them (`docs/hardware.md`, 3000h).
//!
//! ```text
//!  word           63      48 47   46   45      44        43       42      41      40  39 32 31                0
//!  0 namespace   │  disks   │  ·   ·  cache  replicate throttle  share  read only on │ LBADS│       NSID       │
//!  1 blocks      │    0     │                  blocks of the namespace                                        │
//!  2 share       │    0     │                  first block on the disks                                       │
//!  3 iops        │       burst, as time             │                    time of a command                   │
//!  4 bytes       │       burst, as time             │    0   │           time of a block  (24 bits)          │
//!  5 cache       │ fast disks│                 first block of the cache on the fast disk                      │
//!  6 copy        │ target disks │              first block on the target, of the namespace's block 0            │
//!  7 copied      │    0     │                  blocks to copy                                                  │
//! ```

use crate::{LBA_MASK, throttle::Cap};

/// See the module. Field *i* is word *i*.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Namespace, switches, disks.
    pub namespace: u64,
    /// Blocks of the namespace.
    pub blocks: u64,
    /// The window's first block on the disks.
    pub share: u64,
    /// Cap on commands per second.
    pub iops: u64,
    /// Cap on bytes per second.
    pub bytes: u64,
    /// Where the cache is.
    pub cache: u64,
    /// Where a copy goes.
    pub copy: u64,
    /// Blocks to copy.
    pub copied: u64,
}

impl Config {
    /// Bit of the first word: there is such a namespace.
    pub const ENABLED: u64 = 1 << 40;
    /// Bit of the first word: nothing may be written.
    pub const READ_ONLY: u64 = 1 << 41;
    /// Bit of the first word: the namespace is a window of the disks.
    pub const SHARE: u64 = 1 << 42;
    /// Bit of the first word: there are caps.
    pub const THROTTLE: u64 = 1 << 43;
    /// Bit of the first word: every disk has all data.
    pub const REPLICATE: u64 = 1 << 44;
    /// Bit of the first word: there is a cache.
    pub const CACHE: u64 = 1 << 45;

    /// Whether a bit of the first word is set.
    #[inline]
    pub fn has(&self, bit: u64) -> bool {
        self.namespace & bit != 0
    }

    /// Namespace identifier.
    #[inline]
    pub fn nsid(&self) -> u32 {
        self.namespace as u32
    }

    /// Blocks are of 4096 bytes, not 512.
    #[inline]
    pub fn large_blocks(&self) -> bool {
        self.namespace & (4 << 32) != 0
    }

    /// The disks, a bit each.
    #[inline]
    pub fn disks(&self) -> u16 {
        (self.namespace >> 48) as u16
    }

    /// Blocks of the namespace.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.blocks & LBA_MASK
    }

    /// First block on the disks.
    #[inline]
    pub fn start(&self) -> u64 {
        if self.has(Self::SHARE) { self.share & LBA_MASK } else { 0 }
    }

    /// First block of the cache, on the fast disk.
    #[inline]
    pub fn cache_start(&self) -> u64 {
        self.cache & LBA_MASK
    }

    /// First block of a copy, on the target.
    #[inline]
    pub fn target_start(&self) -> u64 {
        self.copy & LBA_MASK
    }

    /// Blocks to copy.
    #[inline]
    pub fn to_copy(&self) -> u64 {
        self.copied & LBA_MASK
    }

    /// Cap on commands.
    #[inline]
    pub fn iops(&self) -> Cap {
        Cap { time: self.iops & 0xffff_ffff, burst: self.iops >> 32 }
    }

    /// Cap on blocks.
    #[inline]
    pub fn bytes(&self) -> Cap {
        Cap { time: self.bytes & 0xff_ffff, burst: self.bytes >> 32 }
    }
}
