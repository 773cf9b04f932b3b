//! A level: the caps that a volume has for itself, or that a group of them has together, with a bucket each.
//!
//! ```text
//!   request ─► this shard's leases, of every level ─ enough ─► taken: no clock, no lock, nothing shared is written
//!                    │ not enough, or void
//!                    └─► buckets of the levels that lack ─ all have enough ─► taken of all, with new leases
//!                                  │ one lacks
//!                                  └─► how long it will; who waits claims what it lacks
//! ```
//!
//! Tokens are taken of all caps of all levels together, at the moment when a request goes, or of none. So no cap is ever ahead of what
//! really went.
//!
//! Invariants:
//! * A lease is written by its own shard only. Leases and what a bucket holds are never more than the bucket, or its largest request.
//! * When a cap changes, its leases are void at once: who has some compares the level's generation, and under the lock the cap's.
//! * Claims: who waits at a bucket longest goes first there, and others leave what those need that wait longer. A claim lasts until its
//!   owner goes, or finds that it lacks tokens of a narrower bucket still. So whoever waits longest of all is held up by nobody: nobody
//!   starves.
//! * A level's mutex is tried, never waited for, by shards; it is held for some tens of instructions.

use std::{
    hint,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use millrace_block::{PerShard, ShardSlot, clock};

use super::bucket::{self, Division, Rate};
use crate::locks::OwnLines;

/// Levels over each other, a volume's own counted.
pub(super) const LEVELS: usize = 5;
/// The caps that there are.
pub(super) const CAPS: [&str; 6] = ["iops", "read_iops", "write_iops", "bandwidth", "read_bandwidth", "write_bandwidth"];
/// Tokens of a cap that is not there, for a shard.
const PLENTY: u64 = 1 << 62;
/// Looks at a mutex before it is somebody else's for now.
const TRIES: u32 = 64;
/// Claims on a bucket at most. Whoever waits longer than one of them takes its place.
const CLAIMS: usize = 32;
/// When to try again after that.
const BUSY: Duration = Duration::from_micros(10);
/// Nanoseconds after which the largest request counts half, when none like it has come. Leases are void when one does come again, so that
/// this is long beside what is at hand.
const FADES: u64 = 10_000_000_000;

/// Whether a cap is of bytes.
pub(super) fn counts_bytes(cap: usize) -> bool {
    cap >= 3
}

/// What a request takes of each cap that it meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cost {
    /// It writes.
    pub writes: bool,
    pub bytes: u64,
}

impl Cost {
    /// The caps that it meets, narrow ones first, with what it takes of each.
    #[inline]
    fn of_caps(self) -> [(usize, u64); 4] {
        let at = 1 + usize::from(self.writes);
        [(at, 1), (at + 3, self.bytes), (0, 1), (3, self.bytes)]
    }
}

/// What several requests take of all caps together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sum {
    /// Of reads, and of writes.
    pub requests: [u64; 2],
    pub bytes: [u64; 2],
}

impl Sum {
    #[inline]
    fn of_caps(&self) -> [u64; 6] {
        let ([reads, writes], [read, written]) = (self.requests, self.bytes);
        [reads + writes, reads, writes, read.saturating_add(written), read, written]
    }
}

/// Caps with their bucket.
pub(super) type Rates = [Option<Rate>; 6];

/// What a shard has at hand.
#[derive(Default)]
pub(super) struct Leases {
    /// When they were taken, in changes of the level.
    generation: AtomicU64,
    tokens: [AtomicU64; 6],
    /// Requests of the shard that wait here, reads and writes: of a volume's own level only.
    pub waiting: [AtomicU64; 2],
}

/// Who waits first in a queue: since when, and which queue's it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Front {
    pub since: u64,
    pub queue: usize,
}

#[derive(Clone, Copy)]
struct Claim {
    front: Front,
    tokens: u64,
}

#[derive(Default)]
struct Cap {
    rate: Option<Rate>,
    /// See [`bucket`].
    filled: u64,
    /// In the order in which they go.
    claims: Vec<Claim>,
    /// The level's generation when it changed last: older leases are void.
    changed: u64,
    /// Tokens of the largest request of late, up to a power of two.
    largest: u64,
    /// When one like that came, or when it faded.
    noted: u64,
    /// How the bucket is divided, for so many shards; `None`: to be found out.
    division: Option<(u64, Division)>,
}

#[derive(Default)]
struct State {
    caps: [Cap; 6],
}

/// See the module.
#[derive(Default)]
pub(super) struct Level {
    /// Changes of the caps so far.
    generation: AtomicU64,
    pub leases: PerShard<Leases>,
    state: OwnLines<Mutex<State>>,
    /// Requests that this level was the first to hold back.
    held_back: PerShard<AtomicU64>,
}

/// Up to a power of two.
fn rounded(tokens: u64) -> u64 {
    tokens.checked_next_power_of_two().unwrap_or(u64::MAX)
}

impl Cap {
    /// When its bucket filled, of one that is about to be divided anew: what was at hand may just have been spent, so that it holds no more
    /// than it did without.
    fn filled_without_leases(&self, now: u64) -> u64 {
        let least = self.division.map_or(0, |(_, division)| now.saturating_sub(division.rest.burst_ns));
        self.filled.max(least)
    }

    /// The largest request is forgotten by and by, and leases grow at the bucket's cost. None is void: what is at hand and what the bucket
    /// holds are no more than before, and whoever asks for more than there is room for is [noted](Level::note) first.
    fn fade(&mut self, now: u64, tokens: u64) {
        let times = now.saturating_sub(self.noted) / FADES;
        if times > 0 {
            let faded = self.largest.checked_shr(u32::try_from(times).unwrap_or(u32::MAX)).unwrap_or(0);
            (self.largest, self.noted, self.division) = (faded.max(rounded(tokens)), now, None);
        }
    }

    fn division(&mut self, rate: Rate) -> Division {
        let shards = ShardSlot::most() as u64;
        match self.division {
            Some((known, division)) if known == shards => division,
            _ => self.division.insert((shards, bucket::divide(rate, shards, self.largest))).1,
        }
    }

    /// How long it is until so many tokens may be taken by this one.
    fn wait(&mut self, now: u64, tokens: u64, front: Option<Front>) -> u64 {
        let Some(rate) = self.rate.filter(|_| tokens > 0) else { return 0 };
        let rest = self.division(rate).rest;
        let earlier = self.claims.iter().take_while(|claim| front.is_none_or(|front| claim.front < front));
        let kept = earlier.fold(0, |sum: u64, claim| sum.saturating_add(claim.tokens));
        bucket::wait(self.filled, now, tokens, kept, rest)
    }

    /// Claims tokens.
    fn claim(&mut self, front: Front, tokens: u64) {
        if let Err(at) = self.claims.binary_search_by_key(&front, |claim| claim.front) {
            self.claims.truncate(CLAIMS - 1);
            if at <= self.claims.len() {
                self.claims.insert(at, Claim { front, tokens });
            }
        }
    }

    fn forget(&mut self, front: Front) {
        self.claims.retain(|claim| claim.front != front);
    }

    /// Takes tokens, of the lease first; what is left of the lease, filled up as far as it can be.
    fn take(&mut self, now: u64, tokens: u64, lease: Option<u64>) -> u64 {
        let Some(rate) = self.rate else { return PLENTY };
        let at_hand = lease.unwrap_or(0);
        let missing = tokens.saturating_sub(at_hand);
        let Division { lease: most, rest } = self.division(rate);
        let mut left = at_hand - (tokens - missing);
        if missing > 0 {
            self.filled = bucket::take(self.filled, now, missing, rest);
        }
        if lease.is_some() && self.claims.is_empty() {
            let more = most.saturating_sub(left).min(bucket::held(self.filled, now, rest));
            if more > 0 {
                self.filled = bucket::take(self.filled, now, more, rest);
                left += more;
            }
        }
        left
    }
}

impl Leases {
    /// Whether nobody waits who came before.
    #[inline]
    pub(super) fn is_free(&self, cost: Cost) -> bool {
        self.waiting[usize::from(cost.writes)].load(Ordering::Relaxed) == 0
    }

    /// Whether there are tokens enough at hand.
    #[inline]
    fn suffice(&self, level: &Level, cost: Cost) -> bool {
        let has = |(cap, tokens): (usize, u64)| self.tokens[cap].load(Ordering::Relaxed) >= tokens;
        // All four are looked at: one branch is cheaper than four.
        let enough = cost.of_caps().map(has).into_iter().fold(true, |all, one| all & one);
        enough & (self.generation.load(Ordering::Relaxed) == level.generation.load(Ordering::Acquire))
    }

    #[inline]
    fn spend(&self, cost: Cost) {
        for (cap, tokens) in cost.of_caps() {
            self.tokens[cap].store(self.tokens[cap].load(Ordering::Relaxed) - tokens, Ordering::Relaxed);
        }
    }

    /// The same for several requests.
    #[inline]
    fn suffice_for(&self, level: &Level, sum: &Sum) -> bool {
        let tokens = self.tokens.iter().zip(sum.of_caps());
        let enough = tokens.fold(true, |all, (has, tokens)| all & (has.load(Ordering::Relaxed) >= tokens));
        enough & (self.generation.load(Ordering::Relaxed) == level.generation.load(Ordering::Acquire))
    }

    #[inline]
    fn spend_for(&self, sum: &Sum) {
        for (has, tokens) in self.tokens.iter().zip(sum.of_caps()) {
            has.store(has.load(Ordering::Relaxed) - tokens, Ordering::Relaxed);
        }
    }

    fn give_back(&self, sum: &Sum) {
        for (has, tokens) in self.tokens.iter().zip(sum.of_caps()) {
            has.store(has.load(Ordering::Relaxed) + tokens, Ordering::Relaxed);
        }
    }

    /// Tokens of a cap; none if it has changed since.
    fn at_hand(&self, caps: &[Cap; 6], cap: usize) -> u64 {
        let valid = self.generation.load(Ordering::Relaxed) >= caps[cap].changed;
        if valid { self.tokens[cap].load(Ordering::Relaxed) } else { 0 }
    }
}

impl Level {
    /// Sets its caps; `from`: levels of one kind, of which it takes over first the tokens that the one has that owes most. Nothing that was
    /// owed is forgiven. Of caps that stay as they are shards keep what they have at hand.
    pub(super) fn set(&self, rates: &Rates, from: &[&Level]) {
        let now = clock::now();
        let caps_of = |from: &&Level| from.lock().caps.each_ref().map(|cap| (cap.rate, cap.filled_without_leases(now)));
        let more = |one: (_, u64), other: (_, u64)| (one.0, one.1.max(other.1));
        let before = from.iter().map(caps_of).reduce(|all, these| std::array::from_fn(|cap| more(all[cap], these[cap])));
        let mut state = self.lock();
        let generation = self.generation.load(Ordering::Relaxed) + 1;
        for (at, (cap, rate)) in state.caps.iter_mut().zip(rates).enumerate() {
            if let Some(before) = &before {
                (cap.rate, cap.filled) = before[at];
            } else if cap.rate == *rate {
                continue;
            } else {
                cap.filled = cap.filled_without_leases(now);
            }
            cap.filled = match (cap.rate, *rate) {
                (Some(old), Some(new)) => bucket::changed(cap.filled, now, old, new),
                _ => 0,
            };
            (cap.rate, cap.changed, cap.largest, cap.noted, cap.division) = (*rate, generation, 0, now, None);
        }
        if state.caps.iter().any(|cap| cap.changed == generation) {
            self.generation.store(generation, Ordering::Release);
        }
    }

    /// Requests that it held back so far, of those that no narrower level did.
    pub(super) fn held_back(&self) -> u64 {
        self.held_back.sum(|count| count)
    }

    /// For threads that may wait.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        for _ in 0..TRIES {
            match self.state.0.try_lock() {
                Ok(state) => return Some(state),
                Err(TryLockError::Poisoned(state)) => return Some(state.into_inner()),
                Err(TryLockError::WouldBlock) => hint::spin_loop(),
            }
        }
        None
    }

    /// A request of so many tokens has come: leases that leave no room beside it are void.
    fn note(&self, cap: &mut Cap, now: u64, tokens: u64) {
        let Some(rate) = cap.rate else { return };
        if tokens <= cap.largest / 2 {
            cap.fade(now, tokens);
            return;
        }
        cap.noted = now;
        if tokens <= cap.largest {
            return;
        }
        let before = cap.division(rate);
        (cap.largest, cap.division) = (rounded(tokens), None);
        if cap.division(rate).lease < before.lease {
            // It gets room for what was at hand, and that may just have been spent: it holds no more than it did without.
            cap.filled = cap.filled.max(now.saturating_sub(before.rest.burst_ns));
            // Changes are under the lock, as this is.
            cap.changed = self.generation.fetch_add(1, Ordering::Release) + 1;
        }
    }

    /// Takes what a request needs and fills this shard's leases up.
    fn take(&self, state: &mut State, now: u64, cost: Cost) {
        let (leases, own) = self.leases.here();
        if own {
            for (at, cap) in state.caps.iter().enumerate() {
                let tokens = if cap.rate.is_some() { leases.at_hand(&state.caps, at) } else { PLENTY };
                leases.tokens[at].store(tokens, Ordering::Relaxed);
            }
            leases.generation.store(self.generation.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        for (at, tokens) in cost.of_caps() {
            let lease = own.then(|| leases.tokens[at].load(Ordering::Relaxed));
            let left = state.caps[at].take(now, tokens, lease);
            if own {
                leases.tokens[at].store(left, Ordering::Relaxed);
            }
        }
    }
}

/// A volume's own level and those above it.
pub(super) struct Chain {
    pub own: Level,
    pub above: Box<[Arc<Level>]>,
    /// While this is on nobody waits; what goes all the same is owed.
    pub hurry: AtomicBool,
}

/// Levels that are looked into.
type Open<'a> = [Option<MutexGuard<'a, State>>; LEVELS];

impl Chain {
    fn levels(&self) -> impl Iterator<Item = &Level> {
        std::iter::once(&self.own).chain(self.above.iter().map(|level| &**level))
    }

    /// Takes tokens that this shard has at hand, if nobody waits here. The common case.
    #[inline]
    pub(super) fn at_once(&self, cost: Cost) -> bool {
        let (leases, own) = self.own.leases.here();
        own && leases.is_free(cost) && self.spend(leases, cost)
    }

    /// Takes tokens that this shard has at hand.
    #[inline]
    pub(super) fn spend(&self, own: &Leases, cost: Cost) -> bool {
        if !own.suffice(&self.own, cost) || !(self.above.is_empty() || self.spend_above(cost)) {
            return false;
        }
        own.spend(cost);
        true
    }

    /// The same of the levels above.
    #[inline(never)]
    fn spend_above(&self, cost: Cost) -> bool {
        let enough = self.above.iter().all(|level| level.leases.here().0.suffice(level, cost));
        if enough {
            self.above.iter().for_each(|level| level.leases.here().0.spend(cost));
        }
        enough
    }

    /// Takes tokens for several requests that this shard has at hand, if nobody waits here.
    #[inline]
    pub(super) fn all_at_once(&self, sum: &Sum) -> bool {
        let (leases, own) = self.own.leases.here();
        let free = leases.waiting.iter().all(|waiting| waiting.load(Ordering::Relaxed) == 0);
        if !own || !free || !leases.suffice_for(&self.own, sum) {
            return false;
        }
        if !self.above.iter().all(|level| level.leases.here().0.suffice_for(level, sum)) {
            return false;
        }
        self.above.iter().for_each(|level| level.leases.here().0.spend_for(sum));
        leases.spend_for(sum);
        true
    }

    /// Gives back what was taken [at once](Self::all_at_once) for requests that did not go. Nobody else on this shard has taken a lease
    /// anew meanwhile; where a cap has changed, its leases are void with what is in them.
    #[cold]
    pub(super) fn give_back(&self, sum: &Sum) {
        self.levels().for_each(|level| level.leases.here().0.give_back(sum));
    }

    /// Takes what a request needs, or says how long that will not be possible. `front` is there when the request is the first of its
    /// queue: it has claims then. `first`: it is counted where it is held back.
    pub(super) fn pass(&self, cost: Cost, front: Option<Front>, first: bool) -> Result<(), Duration> {
        let mut open: Open<'_> = [const { None }; LEVELS];
        let hurry = self.hurry.load(Ordering::Relaxed);
        for (level, open) in self.levels().zip(&mut open) {
            let (leases, own) = level.leases.here();
            // Whoever waits may have claims anywhere.
            if front.is_some() || !own || !leases.suffice(level, cost) {
                *open = Some(level.try_lock().ok_or(BUSY)?);
            }
        }
        let now = clock::now();
        if !hurry && let Some((at, cap, wait)) = self.lacking(&mut open, now, cost, front) {
            if let Some(front) = front {
                stand(&mut open, (at, cap), cost, front);
            }
            if first && let Some(level) = self.levels().nth(at) {
                level.held_back.add(|count| count, 1);
            }
            return Err(Duration::from_nanos(wait));
        }
        for (level, open) in self.levels().zip(&mut open) {
            match open {
                Some(state) => {
                    if let Some(front) = front {
                        state.caps.iter_mut().for_each(|cap| cap.forget(front));
                    }
                    level.take(state, now, cost);
                }
                None => level.leases.here().0.spend(cost),
            }
        }
        Ok(())
    }

    /// The first cap, from narrow to wide, of which tokens are lacking, and how long they will be.
    fn lacking(&self, open: &mut Open<'_>, now: u64, cost: Cost, front: Option<Front>) -> Option<(usize, usize, u64)> {
        for (at, (level, open)) in self.levels().zip(open).enumerate() {
            let Some(state) = open else { continue };
            cost.of_caps().into_iter().for_each(|(cap, tokens)| level.note(&mut state.caps[cap], now, tokens));
            let (leases, own) = level.leases.here();
            for (cap, tokens) in cost.of_caps() {
                let at_hand = if own { leases.at_hand(&state.caps, cap) } else { 0 };
                let wait = state.caps[cap].wait(now, tokens.saturating_sub(at_hand), front);
                if wait > 0 {
                    return Some((at, cap, wait));
                }
            }
        }
        None
    }

    /// Gives up what somebody claims who goes away without having gone on.
    pub(super) fn forget(&self, front: Front) {
        for level in self.levels() {
            level.lock().caps.iter_mut().for_each(|cap| cap.forget(front));
        }
    }
}

/// Whoever waits first claims what it lacks, keeps what it claims of narrower buckets, and gives up what it claims of wider ones: nobody
/// else shall wait there for what it cannot use yet.
fn stand(open: &mut Open<'_>, lacks: (usize, usize), cost: Cost, front: Front) {
    let mut beyond = false;
    for (at, state) in open.iter_mut().enumerate() {
        let Some(state) = state else { continue };
        for (cap, tokens) in cost.of_caps() {
            if beyond {
                state.caps[cap].forget(front);
            } else if (at, cap) == lacks {
                state.caps[cap].claim(front, tokens);
                beyond = true;
            }
        }
    }
}
