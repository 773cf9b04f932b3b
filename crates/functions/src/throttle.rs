//! Throttling: token buckets for commands and bytes, without a division.
//!
//! ```text
//!            burst                      owes
//!   ├──────────────────────┤─────────────────┤
//!   now                                      when the bucket is full again: the state
//! ```
//!
//! A bucket's state is one time: when all that was taken will have flowed in again. What is taken is `time` of that for each unit. A command goes
//! while that lies no more than `burst` ahead; what it then takes beyond the burst is owed, and those behind it wait the longer. So over any time no
//! more goes than the rate, one burst and one command.
//!
//! Times have 32 bits of units of 64 cycles and 12 bits of fraction; they wrap. What lies further ahead than a bucket can owe lies in the past. That errs
//! when a function was idle for a multiple of 2^32 units (36 minutes at 125 MHz), give or take one second: its first commands wait that second at most.

use crate::{Command, Config, State};

/// Bits of a unit's fraction.
pub const FRACTION: u32 = 12;
/// All bits of a time.
pub const TIME_MASK: u64 = (1 << (32 + FRACTION)) - 1;
/// Bits of what a bucket can be ahead: burst and largest command have 32 each.
const AHEAD_BITS: u32 = 33;

/// A cap: both in units of 64 cycles with [`FRACTION`]. No time at all means no cap.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cap {
    /// In which one more may go.
    pub time: u64,
    /// That may be ahead.
    pub burst: u64,
}

/// What a command takes of both buckets, or how long it waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Whole units until it goes; 0: now.
    pub wait: u32,
    /// The bucket of commands from then on, if it goes.
    pub iops: u64,
    /// The bucket of blocks.
    pub bytes: u64,
}

/// How far a bucket is ahead of now.
#[inline]
fn ahead(full: u64, now: u64) -> u64 {
    let ahead = full.wrapping_sub(now) & TIME_MASK;
    if ahead >> AHEAD_BITS == 0 { ahead } else { 0 }
}

/// Asks both buckets. All commands are counted but flushes; of their blocks those that move.
#[inline]
pub fn submit(command: &Command, state: &State, config: &Config) -> Turn {
    if !config.has(Config::THROTTLE) || command.is_flush() {
        return Turn { wait: 0, iops: state.iops(), bytes: state.bytes() };
    }
    let now = u64::from(command.now) << FRACTION;
    let (iops, bytes) = (config.iops(), config.bytes());
    let (commands_ahead, blocks_ahead) = (ahead(state.iops(), now), ahead(state.bytes(), now));
    let wait = commands_ahead.saturating_sub(iops.burst).max(blocks_ahead.saturating_sub(bytes.burst));
    // MDTS is 256 blocks at most.
    let blocks = if command.moves_data() { u64::from(command.nlb_z & 0xff) + 1 } else { 0 };
    Turn {
        wait: if wait == 0 { 0 } else { (wait >> FRACTION) as u32 + 1 },
        iops: (now + commands_ahead + iops.time) & TIME_MASK,
        bytes: (now + blocks_ahead + blocks * bytes.time) & TIME_MASK,
    }
}
