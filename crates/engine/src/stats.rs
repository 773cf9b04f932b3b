//! What a shard has done: plain counters of its own, published to everybody about once a millisecond.
#![forbid(unsafe_code)]

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use crate::stages::{self, Stage, StageTime, StageTimes};

/// What a pass does at most to be one that did little.
const LITTLE: usize = 2;
/// As many of those follow each other without a look at the clock, which costs as much as a request at a guest's pace.
const UNSEEN: u32 = 4;
/// Passes between two looks at the clock at most, while they do little.
const PASSES: u32 = 16;
/// So many times as many of both where passes are short, and nobody waits for the time.
const MORE: u32 = 4;
/// Passes are short while those between two looks take less, in nanoseconds: a part of the time in which a shard looks at its mailbox.
const SHORT: u64 = 10_000;

/// The shard's own counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) turns: Cell<u64>,
    pub(crate) busy_ns: Cell<u64>,
    pub(crate) idle_ns: Cell<u64>,
    pub(crate) sleeps: Cell<u64>,
    pub(crate) commands: Cell<u64>,
}

/// Tells time with work from time without, though the clock is not looked at in every pass.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// Passes begun since the last look, without the one that looked first: so `worked` may be one more.
    pub(crate) passes: u32,
    /// Passes since then that found work.
    pub(crate) worked: u32,
    /// What a pass without work took last, in nanoseconds.
    idle_pass: u64,
    /// Those between the last two looks took little time.
    is_short: bool,
}

impl Clock {
    /// Whether the pass that begins now is to look at the clock. `is_awaited`: somebody waits for the time.
    #[inline]
    pub(crate) fn is_due(&self, is_awaited: impl FnOnce() -> bool) -> bool {
        self.is_enough(self.passes, PASSES, is_awaited)
    }

    /// The pass that ends now found work. Whether the clock is to be looked at: after one that did little, there soon is another reason to.
    #[inline]
    pub(crate) fn work(&mut self, work: usize, is_awaited: impl FnOnce() -> bool) -> bool {
        self.worked += 1;
        work > LITTLE || self.is_enough(self.worked, UNSEEN, is_awaited)
    }

    #[inline]
    fn is_enough(&self, count: u32, few: u32, is_awaited: impl FnOnce() -> bool) -> bool {
        count >= few && (count >= few * MORE || !self.is_short || is_awaited())
    }

    /// Divides the time since the last look: busy, idle.
    pub(crate) fn book(&mut self, past: u64) -> (u64, u64) {
        self.is_short = past < SHORT;
        let [passes, worked] = [&mut self.passes, &mut self.worked].map(|count| u64::from(std::mem::take(count)));
        if worked > 0 {
            let idle = past.min(self.idle_pass * passes.saturating_sub(worked));
            return (past - idle, idle);
        }
        if passes > 1 {
            self.idle_pass = past / passes;
        }
        (0, past)
    }
}

/// The published copy. Each value is right by itself; they are not of one instant.
#[derive(Debug, Default)]
pub(crate) struct ShardStats {
    turns: AtomicU64,
    busy_ns: AtomicU64,
    idle_ns: AtomicU64,
    sleeps: AtomicU64,
    commands: AtomicU64,
    held_up: AtomicU64,
    tasks_started: AtomicU64,
    tasks_waiting: AtomicU64,
    devices: AtomicU64,
    stages: [[AtomicU64; 2]; Stage::COUNT],
}

impl ShardStats {
    pub(crate) fn publish(
        &self,
        counters: &Counters,
        held_up: u64,
        (tasks_started, tasks_waiting): (u64, usize),
        devices: usize,
    ) {
        self.turns.store(counters.turns.get(), Relaxed);
        self.busy_ns.store(counters.busy_ns.get(), Relaxed);
        self.idle_ns.store(counters.idle_ns.get(), Relaxed);
        self.sleeps.store(counters.sleeps.get(), Relaxed);
        self.commands.store(counters.commands.get(), Relaxed);
        self.held_up.store(held_up, Relaxed);
        self.tasks_started.store(tasks_started, Relaxed);
        self.tasks_waiting.store(tasks_waiting as u64, Relaxed);
        self.devices.store(devices as u64, Relaxed);
        if cfg!(feature = "stages") {
            for (cells, time) in self.stages.iter().zip(stages::times()) {
                cells[0].store(time.ticks, Relaxed);
                cells[1].store(time.entries, Relaxed);
            }
        }
    }

    pub(crate) fn snapshot(&self) -> StatsSnapshot {
        StatsSnapshot {
            turns: self.turns.load(Relaxed),
            busy: Duration::from_nanos(self.busy_ns.load(Relaxed)),
            idle: Duration::from_nanos(self.idle_ns.load(Relaxed)),
            sleeps: self.sleeps.load(Relaxed),
            commands: self.commands.load(Relaxed),
            held_up: self.held_up.load(Relaxed),
            tasks_started: self.tasks_started.load(Relaxed),
            tasks_waiting: self.tasks_waiting.load(Relaxed),
            devices: self.devices.load(Relaxed),
            stages: self
                .stages
                .each_ref()
                .map(|[ticks, entries]| StageTime { ticks: ticks.load(Relaxed), entries: entries.load(Relaxed) }),
        }
    }
}

/// What a shard has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatsSnapshot {
    /// Passes of its loop.
    pub turns: u64,
    /// Time spent in passes that found work.
    pub busy: Duration,
    /// Time spent looking in vain, and asleep.
    pub idle: Duration,
    /// Times it slept or napped.
    pub sleeps: u64,
    /// Commands its devices say they finished.
    pub commands: u64,
    /// Submissions that had to wait for a disk whose queue was full.
    pub held_up: u64,
    /// Tasks that had to wait; commands that finished at once are not among them.
    pub tasks_started: u64,
    /// Tasks that wait now.
    pub tasks_waiting: u64,
    /// Devices on it now.
    pub devices: u64,
    /// Where its time went, in a build with the feature `stages`; all 0 in others.
    pub stages: StageTimes,
}

impl StatsSnapshot {
    /// Share of the time since an earlier snapshot that did useful work, in thousandths.
    pub fn busy_permille_since(&self, earlier: &Self) -> u32 {
        let busy = self.busy.saturating_sub(earlier.busy).as_nanos();
        let idle = self.idle.saturating_sub(earlier.idle).as_nanos();
        u32::try_from((busy * 1000).checked_div(busy + idle).unwrap_or(0)).unwrap_or(1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_belongs_to_the_passes_that_took_it() {
        let mut clock = Clock { passes: 16, ..Clock::default() };
        assert_eq!(clock.book(1600), (0, 1600), "100 ns each");
        clock.passes = 10;
        let awaited = || true;
        assert!(!clock.work(1, awaited) && !clock.work(LITTLE, awaited), "the next reason to look is near");
        assert_eq!(clock.book(3000), (2200, 800), "two of ten worked");
        clock.passes = 1;
        assert!(clock.work(LITTLE + 1, awaited), "one that did much is looked at");
        assert_eq!(clock.book(700), (700, 0));
        assert_eq!(clock.book(5000), (0, 5000), "a sleep");
        assert_eq!((1..=UNSEEN).filter(|_| clock.work(1, awaited)).count(), 1, "only the last of some");
    }

    #[test]
    fn more_passes_go_by_unseen_while_they_are_short_and_nobody_waits() {
        let mut clock = Clock { passes: PASSES, ..Clock::default() };
        assert!(clock.is_due(|| false), "nothing is known of them");
        clock.book(SHORT - 1);
        clock.passes = PASSES;
        assert!(clock.is_due(|| true) && !clock.is_due(|| false));
        clock.passes = PASSES * MORE;
        assert!(clock.is_due(|| false), "at last");
        assert_eq!((1..=UNSEEN * MORE).filter(|_| clock.work(1, || false)).count(), 1, "only the last of them");
        clock.book(SHORT);
        clock.passes = PASSES;
        assert!(clock.is_due(|| false), "long ones");
        assert_eq!((1..=UNSEEN).filter(|_| clock.work(1, || false)).count(), 1);
    }
}
