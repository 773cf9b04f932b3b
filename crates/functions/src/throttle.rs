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
const AHEAD_MASK: u64 = (1 << AHEAD_BITS) - 1;

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
    /// It came too early.
    pub early: bool,
    /// If so, when to ask again.
    pub until: u32,
    /// If not, the bucket of commands from then on.
    pub iops: u64,
    /// The bucket of blocks.
    pub bytes: u64,
}

/// A bucket, at some time.
#[derive(Clone, Copy)]
struct Bucket {
    /// When it is full again; now, if it is full and something is to be taken.
    full: u64,
    /// It is further ahead than it may be.
    early: bool,
    /// If so, by so many whole units; less one.
    units_z: u32,
}

impl Bucket {
    #[inline]
    fn new(full: u64, now: u64, cap: &Cap, takes: bool) -> Self {
        let ahead = full.wrapping_sub(now) & TIME_MASK;
        let is_full = ahead >> AHEAD_BITS != 0;
        let room = cap.burst.wrapping_sub(ahead & AHEAD_MASK);
        Self {
            full: if is_full & takes { now } else { full },
            early: !is_full & (room >> 63 != 0),
            units_z: (!room >> FRACTION) as u32 & (AHEAD_MASK >> FRACTION) as u32,
        }
    }

    /// When it is full again after something was taken.
    #[inline]
    fn taken(&self, time: u64) -> u64 {
        (self.full + time) & TIME_MASK
    }
}

/// Asks both buckets: all commands are counted but flushes, and of their blocks those that move. Who waits for both waits for commands first.
#[inline]
pub fn submit(command: &Command, state: &State, config: &Config) -> Turn {
    let now = u64::from(command.now) << FRACTION;
    let (iops, bytes) = (config.iops(), config.bytes());
    let counted = config.has(Config::THROTTLE) & !command.is_flush();
    let moves = config.has(Config::THROTTLE) & command.moves_data();
    let (commands, blocks) =
        (Bucket::new(state.iops(), now, &iops, counted), Bucket::new(state.bytes(), now, &bytes, moves));
    let units_z = if commands.early { commands.units_z } else { blocks.units_z };
    // MDTS is 256 blocks at most.
    let count = u64::from(command.nlb_z & 0xff) + 1;
    Turn {
        early: (counted & commands.early) | (moves & blocks.early),
        until: command.now.wrapping_add(units_z).wrapping_add(1),
        iops: commands.taken(if counted { iops.time } else { 0 }),
        bytes: blocks.taken(if moves { count * bytes.time } else { 0 }),
    }
}
