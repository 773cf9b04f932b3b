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

use crate::throttle::Group;

/// What a request costs at least, in bytes.
pub(super) const LEAST_COST: u64 = 4096;
/// Virtual time that 512 bytes cost at weight 1.
const UNIT: u64 = 1024;

/// When a turn is: not before the present.
fn start(finish: u64, clock: u64) -> u64 {
    finish.max(clock)
}

/// What a request of so many bytes costs, and what is left of it because times are whole numbers: the next one's. `rest` is what was left of
/// the one before.
fn cost(bytes: u64, weight: u64, rest: u64) -> (u64, u64) {
    let (units, weight) = (bytes.max(LEAST_COST).div_ceil(512), weight.max(1));
    let cost = units.saturating_mul(UNIT).saturating_add(rest);
    (cost / weight, cost % weight)
}

/// The turns of a volume or group.
#[derive(Default)]
pub(super) struct Turns {
    /// When the next one is.
    finish: AtomicU64,
    /// What the last cost left.
    rest: AtomicU64,
}

impl Turns {
    pub(super) fn next(&self, clock: u64) -> u64 {
        start(self.finish.load(Ordering::Relaxed), clock)
    }

    /// A request of so many bytes goes. There may be one on another shard, which goes as well.
    pub(super) fn went(&self, clock: u64, bytes: u64, weight: u32) {
        // Two at once may lose what is left, or use it twice: less than the least step of time.
        let (cost, rest) = cost(bytes, u64::from(weight), self.rest.load(Ordering::Relaxed));
        self.rest.store(rest, Ordering::Relaxed);
        self.moves(clock, cost);
    }

    /// The next turn is so much later.
    pub(super) fn moves(&self, clock: u64, cost: u64) {
        let next = |before| Some(start(before, clock).saturating_add(cost));
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
