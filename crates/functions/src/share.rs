//! Sharing: a namespace is a window of the disks, with a limit.
//!
//! ```text
//!   disk    ├───────────────[ start ......... start + blocks ]──────────┤
//!   guest                     0 ◄── slba ──►  blocks
//! ```

use crate::{Command, Config, LBA_BITS, LBA_MASK};

/// Whether the blocks of a command lie within the window.
#[inline]
pub fn contains(command: &Command, config: &Config) -> bool {
    let last = (command.slba & LBA_MASK) + u64::from(command.nlb_z);
    (command.slba >> LBA_BITS == 0) & (last < config.blocks())
}

/// Where a command's first block is on the disks; a flush has none, and this means nothing.
#[inline]
pub fn submit(command: &Command, config: &Config) -> u64 {
    ((command.slba & LBA_MASK) + config.start()) & LBA_MASK
}
