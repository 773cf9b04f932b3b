//! Virtual time: whose turn it is by weight. A group has its turn among those that it stands beside, and a time of its own, in which
//! what is in it has turns.
//!
//! ```text
//!   the line's time ─┬─ volume a
//!                    ├─ gold's time ─┬─ volume b
//!                    │               └─ volume c
//!                    └─ acme's time ─── silver's time ─── volume d
//! ```

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::throttle::{DEEPEST, Group};

/// What a request costs at least, in bytes.
pub(super) const LEAST_COST: u64 = 4096;
/// Virtual time that 512 bytes cost at weight 1; weights up to this divide it.
const UNIT: u64 = 1024;
/// Places that a volume has turns in: those of the groups that it is in, and its own.
pub(super) const PLACES: usize = DEEPEST + 1;

/// When a turn is: not before the present.
fn start(finish: u64, clock: u64) -> u64 {
    finish.max(clock)
}

/// When the next turn is, after a request of so many bytes.
fn finish(start: u64, bytes: u64, weight: u64) -> u64 {
    let cost = bytes.max(LEAST_COST).div_ceil(512).saturating_mul(UNIT) / weight.max(1);
    start.saturating_add(cost.max(1))
}

/// The turns of a volume or group.
#[derive(Default)]
pub(super) struct Turns {
    /// When the next one is.
    finish: AtomicU64,
}

impl Turns {
    pub(super) fn next(&self, clock: u64) -> u64 {
        start(self.finish.load(Ordering::Relaxed), clock)
    }

    /// A request of so many bytes goes. There may be one on another shard, which goes as well.
    pub(super) fn went(&self, clock: u64, bytes: u64, weight: u32) {
        let next = |before| Some(finish(start(before, clock), bytes, u64::from(weight)));
        let _ = self.finish.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }
}

/// A group's place on a disk.
pub(super) struct Tier {
    pub group: Arc<Group>,
    pub turns: Turns,
    /// Virtual time in it: the turn of what went last.
    pub clock: AtomicU64,
}

impl Tier {
    pub(super) fn new(group: Arc<Group>) -> Self {
        Self { group, turns: Turns::default(), clock: AtomicU64::new(0) }
    }
}
