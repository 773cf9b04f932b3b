//! What the functions promise, one at a time and in the chain.

mod cache;
mod chain;
mod copy;
mod replicate;
mod throttle;

use crate::{Command, Config, opcode};

/// A read of one block.
fn read(slba: u64) -> Command {
    Command { slba, nsid: 1, now: 1000, nlb_z: 0, opcode: opcode::READ, function: 3, queue: 0 }
}

/// A namespace of 1000 blocks on these disks.
fn config(switches: u64, disks: u16) -> Config {
    Config {
        namespace: 1 | (9 << 32) | Config::ENABLED | switches | (u64::from(disks) << 48),
        blocks: 1000,
        ..Config::default()
    }
}
