//! A volume in the line before its disk: its weight and groups, what is guaranteed to it, how late its requests may be, and what these
//! decide.
//!
//! The decisions are small functions of numbers: whether a volume has what is guaranteed, how deep it may go; `turns.rs`: whose turn it is.

use std::{
    cmp, fmt,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use millrace_block::PerShard;

use super::turns::{LEAST_COST, Tier, Turns};
use crate::{
    queue::{Queue, Waiters},
    throttle::{Weight, time_of},
};

/// How far back a guarantee looks: what a volume did not ask for before is not made up for.
const MEMORY_NS: u64 = 100_000_000;
/// A target is missed when more than one of so many requests is late.
const LATE: u64 = 10;

/// What is set on a share beside its room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub weight: Weight,
    /// What it gets at least of a saturated disk, per second; 0: nothing is guaranteed.
    pub minimum: Minimum,
    /// How long the disk shall take for its requests.
    pub latency: Option<Duration>,
}

/// Operations and bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Minimum {
    pub iops: u64,
    pub bandwidth: u64,
}

impl Minimum {
    pub(super) fn is_none(self) -> bool {
        self == Self::default()
    }

    /// Whether it is as much as another one.
    pub(super) fn covers(self, other: Self) -> bool {
        self.iops >= other.iops && self.bandwidth >= other.bandwidth
    }

    /// Whether a disk that can do so much can do what another one can; 0: nobody knows.
    pub(super) fn is_able_as(self, other: Self) -> bool {
        // What is not known is more than anything.
        let known = |able: Self| [able.iops, able.bandwidth].map(|able| able.wrapping_sub(1));
        known(self).iter().zip(known(other)).all(|(able, other)| *able >= other)
    }

    pub(super) fn and(self, other: Self) -> Self {
        let (iops, bandwidth) = (self.iops.saturating_add(other.iops), self.bandwidth.saturating_add(other.bandwidth));
        Self { iops, bandwidth }
    }
}

impl fmt::Display for Minimum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} operations and {} bytes per second", self.iops, self.bandwidth)
    }
}

/// What a request of so many bytes is of each part of what is guaranteed.
fn tokens(bytes: u64) -> [u64; 2] {
    // An erasure moves no bytes, and takes a turn all the same.
    [1, if bytes == 0 { LEAST_COST } else { bytes }]
}

/// When what is guaranteed falls due again, after so much of it was had. Neither what was left nor what was had beyond it counts for long.
fn due(due: u64, now: u64, tokens: u64, per_second: u64) -> u64 {
    let present = now.saturating_sub(MEMORY_NS)..=now.saturating_add(MEMORY_NS);
    due.clamp(*present.start(), *present.end()).saturating_add(time_of(tokens, per_second))
}

/// How deep a volume may go after a while in which somebody's target, tighter than its own, was missed, or nobody's. `has` is what it has
/// on the disk, `depth` what the disk has at most.
fn limit(limit: u64, missed: bool, has: u64, depth: u64) -> u64 {
    match (missed, limit) {
        (true, limit) => (limit.min(has.min(depth)) / 2).max(1),
        (false, limit) if limit.saturating_add(limit / 4 + 1) >= depth => u64::MAX,
        (false, limit) => limit + limit / 4 + 1,
    }
}

/// Whether so many late ones are too many.
fn is_missed(seen: u64, late: u64) -> bool {
    late.saturating_mul(LATE) > seen
}

/// What a shard has of a volume on the disk, and how its requests went that have a target.
#[derive(Default)]
struct Here {
    in_flight: AtomicU64,
    seen: AtomicU64,
    late: AtomicU64,
}

/// See the module.
pub(super) struct Member {
    weight: AtomicU32,
    /// The groups that it is in, each in the one before it.
    tiers: Box<[Arc<Tier>]>,
    turns: Turns,
    minimum: [AtomicU64; 2],
    /// 0: there is no target.
    latency_ns: AtomicU64,
    /// When its next operation and its next bytes fall due, of what is guaranteed.
    due: [AtomicU64; 2],
    /// Its turns beside others that lack what is guaranteed to them.
    owed: Turns,
    /// What it may have on the disk, for others' targets.
    limit: AtomicU64,
    /// What was seen of its target when it was last looked at: requests, and late ones.
    judged: [AtomicU64; 2],
    /// Requests that wait, on all shards.
    pub waiting: AtomicU64,
    /// Requests that have waited.
    waited: PerShard<AtomicU64>,
    queues: PerShard<Queue>,
    here: PerShard<Here>,
}

impl Default for Member {
    fn default() -> Self {
        Self {
            weight: AtomicU32::new(1),
            tiers: Box::default(),
            turns: Turns::default(),
            minimum: Default::default(),
            latency_ns: AtomicU64::new(0),
            due: Default::default(),
            owed: Turns::default(),
            limit: AtomicU64::new(u64::MAX),
            judged: Default::default(),
            waiting: AtomicU64::new(0),
            waited: PerShard::default(),
            queues: PerShard::default(),
            here: PerShard::default(),
        }
    }
}

impl Member {
    /// A volume in groups, each in the one before it.
    pub(super) fn new(tiers: Box<[Arc<Tier>]>) -> Self {
        Self { tiers, ..Self::default() }
    }

    pub(super) fn set(&self, terms: &Terms) {
        self.weight.store(terms.weight.get(), Ordering::Relaxed);
        self.minimum[0].store(terms.minimum.iops, Ordering::Relaxed);
        self.minimum[1].store(terms.minimum.bandwidth, Ordering::Relaxed);
        self.latency_ns.store(terms.latency.map_or(0, |time| time.as_nanos() as u64), Ordering::Relaxed);
    }

    pub(super) fn minimum(&self) -> Minimum {
        let [iops, bandwidth] = self.minimum.each_ref().map(|minimum| minimum.load(Ordering::Relaxed));
        Minimum { iops, bandwidth }
    }

    pub(super) fn latency(&self) -> Option<u64> {
        Some(self.latency_ns.load(Ordering::Relaxed)).filter(|latency| *latency > 0)
    }

    /// Requests that had to wait so far.
    pub(super) fn waited(&self) -> u64 {
        self.waited.sum(|count| count)
    }

    /// Requests on the disk whose time was looked at, and those of them that were late.
    pub(super) fn lateness(&self) -> (u64, u64) {
        (self.here.sum(|here| &here.seen), self.here.sum(|here| &here.late))
    }

    /// What it may have on the disk; `None`: as much as there is.
    pub(super) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|limit| *limit < u64::MAX)
    }

    pub(super) fn set_unlimited(&self) {
        self.limit.store(u64::MAX, Ordering::Relaxed);
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.here.sum(|here| &here.in_flight)
    }

    /// Whether it may have one more request on the disk.
    pub(super) fn has_room(&self) -> bool {
        self.limit().is_none_or(|limit| self.in_flight() < limit)
    }

    pub(super) fn queue(&self) -> MutexGuard<'_, Waiters> {
        self.queues.here().0.lock()
    }

    /// A request begins to wait; its number in the queue.
    pub(super) fn enter(&self) -> u64 {
        self.waited.add(|count| count, 1);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.queue().enter()
    }

    /// A request waits no more.
    pub(super) fn leave(&self, number: u64) {
        self.queue().leave(number);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// The groups that it is in, each in the one before it.
    pub(super) fn tiers(&self) -> &[Arc<Tier>] {
        &self.tiers
    }

    /// How many groups it is in together with another volume.
    fn together(&self, other: &Self) -> usize {
        self.tiers.iter().zip(&other.tiers).take_while(|(mine, other)| Arc::ptr_eq(mine, other)).count()
    }

    /// Virtual time in a place of it, which is that of the line before all groups.
    fn clock(&self, place: usize, line: u64) -> u64 {
        place.checked_sub(1).map_or(line, |around| self.tiers[around].clock.load(Ordering::Relaxed))
    }

    /// Its turns in a place: those of a group that it is in, or its own in the last one.
    fn turns(&self, place: usize) -> &Turns {
        self.tiers.get(place).map_or(&self.turns, |tier| &tier.turns)
    }

    /// Whose turn is earlier by weight: that of the groups where they part, or their own. Of equal turns the one that comes first in
    /// memory: everybody agrees.
    pub(super) fn order(&self, other: &Self, line: u64) -> cmp::Ordering {
        let place = self.together(other);
        let clock = self.clock(place, line);
        let key = |member: &Self| (member.turns(place).next(clock), std::ptr::from_ref(member.turns(place)));
        key(self).cmp(&key(other))
    }

    /// Whether it lacks a part of what is guaranteed to it.
    pub(super) fn is_overdue(&self, now: u64) -> bool {
        let is_due = |due: &AtomicU64| due.load(Ordering::Relaxed) <= now;
        self.minimum.iter().zip(&self.due).any(|(minimum, due)| minimum.load(Ordering::Relaxed) > 0 && is_due(due))
    }

    /// Whose turn is earlier of two that lack what is guaranteed to them.
    pub(super) fn order_owed(&self, other: &Self, owed: u64) -> cmp::Ordering {
        let key = |member: &Self| (member.owed.next(owed), std::ptr::from_ref(member));
        key(self).cmp(&key(other))
    }

    /// A request of so many bytes goes because that is guaranteed; when its turn was. Each moves on by the time in which it is due so much: what the
    /// disk cannot do is then missing to each in proportion.
    pub(super) fn turned_owed(&self, owed: u64, bytes: u64) -> u64 {
        let turn = self.owed.next(owed);
        let parts = self.minimum.iter().map(|minimum| minimum.load(Ordering::Relaxed)).zip(tokens(bytes));
        // Of two parts the one that falls behind first is what it goes for.
        let cost = parts.filter(|(minimum, _)| *minimum > 0).map(|(minimum, tokens)| time_of(tokens, minimum)).min();
        self.owed.moves(owed, cost.unwrap_or_default());
        turn
    }

    /// A request of so many bytes goes, and nobody who waits has an earlier turn: virtual time in each place is at least that of its turn there.
    pub(super) fn turned(&self, line: &AtomicU64, bytes: u64) {
        for place in 0..=self.tiers.len() {
            let clock = place.checked_sub(1).map_or(line, |around| &self.tiers[around].clock);
            let own = || self.weight.load(Ordering::Relaxed);
            let weight = self.tiers.get(place).map_or_else(own, |tier| tier.group.weight().get());
            let (now, turns) = (clock.load(Ordering::Relaxed), self.turns(place));
            clock.fetch_max(turns.next(now), Ordering::Relaxed);
            turns.went(now, bytes, weight);
        }
    }

    /// A request of so many bytes goes: it is a part of what is guaranteed.
    pub(super) fn had(&self, now: u64, bytes: u64) {
        for ((minimum, had), tokens) in self.minimum.iter().zip(&self.due).zip(tokens(bytes)) {
            let minimum = minimum.load(Ordering::Relaxed);
            if minimum > 0 {
                let _ = had.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| Some(due(at, now, tokens, minimum)));
            }
        }
    }

    #[inline]
    pub(super) fn begins(&self) {
        self.here.add(|here| &here.in_flight, 1);
    }

    #[inline]
    pub(super) fn ends(&self) {
        // Minus one.
        self.here.add(|here| &here.in_flight, u64::MAX);
    }

    /// The disk took so long for a request that has a target.
    pub(super) fn took(&self, time: u64, target: u64) {
        self.here.add(|here| &here.seen, 1);
        self.here.add(|here| &here.late, u64::from(time > target));
    }

    /// Its target, if it was missed since the last look.
    pub(super) fn missed(&self) -> Option<u64> {
        let (seen, late) = self.lateness();
        let before = [&self.judged[0], &self.judged[1]].map(|judged| judged.load(Ordering::Relaxed));
        self.judged[0].store(seen, Ordering::Relaxed);
        self.judged[1].store(late, Ordering::Relaxed);
        let (seen, late) = (seen.saturating_sub(before[0]), late.saturating_sub(before[1]));
        self.latency().filter(|_| is_missed(seen, late))
    }

    /// Goes less deep if a target was missed that is tighter than its own, deeper if none was; whether it is limited now.
    pub(super) fn adjust(&self, missed: Option<u64>, depth: u64) -> bool {
        let old = self.limit.load(Ordering::Relaxed);
        let new = match missed {
            Some(target) if self.latency().is_none_or(|own| own > target) => limit(old, true, self.in_flight(), depth),
            Some(_) => old,
            None => limit(old, false, 0, depth),
        };
        self.limit.store(new, Ordering::Relaxed);
        new < u64::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_falls_fast_and_rises_slowly_until_there_is_none() {
        let mut now = limit(u64::MAX, true, 60, 256);
        assert_eq!(now, 30);
        for _ in 0..9 {
            now = limit(now, true, 60, 256);
        }
        assert_eq!(now, 1, "nobody starves");
        let mut rises = Vec::new();
        while now < u64::MAX {
            now = limit(now, false, 0, 256);
            rises.push(now);
        }
        assert_eq!(rises[..6], [2, 3, 4, 6, 8, 11]);
        assert!(rises.len() > 15 && rises[rises.len() - 2] < 256);
        assert_eq!(limit(u64::MAX, true, 0, 256), 1, "who has nothing there now may have one");
        assert_eq!(limit(u64::MAX, false, 9, 256), u64::MAX);
    }

    #[test]
    fn a_target_is_missed_by_more_than_a_tenth() {
        assert!(!is_missed(0, 0) && !is_missed(10, 1) && !is_missed(1000, 100));
        assert!(is_missed(1, 1) && is_missed(10, 2) && is_missed(1000, 101));
    }

    #[test]
    fn a_guarantee_is_due_at_its_rate_and_not_for_long_ago() {
        let (iops, second) = (100, 1_000_000_000);
        // Nothing was asked for for ten seconds: a tenth of a second is made up for.
        let mut at = 0;
        let mut had = 0;
        while at <= 10 * second {
            at = due(at, 10 * second, 1, iops);
            had += 1;
        }
        assert_eq!(had, 11);
        assert_eq!(at, 10 * second + second / 100);
    }
}
