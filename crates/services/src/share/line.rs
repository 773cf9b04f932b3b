//! The line before a disk: who goes next when there are more requests than the disk shall have at once.
//!
//! ```text
//!   request ─► nobody waits, and there is room? ── yes ─► disk           (nothing shared is written)
//!                  │ no
//!                  └─► queue of its volume on its shard ─ front ─► room, and no volume's turn is earlier? ─► disk
//! ```
//!
//! Turns are kept in virtual time (start-time fair queueing, which is deficit round-robin without rounds): a request that goes
//! moves its volume's turn on by what it costs, divided by the volume's weight; the volume whose turn is earliest goes next. Who
//! had nothing to do meanwhile begins at the present: nobody saves up, nobody starves.
//!
//! Invariants:
//! * A queue is touched by its own shard only. Its mutex is there because the type must be shared, and never contended; requests
//!   that need not wait do not touch it.
//! * Somebody who can go is always awake: a request's end wakes the front whose turn is earliest, and with several shards, whose
//!   ends are not heard here, fronts look on every pass.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::{Poll, Waker},
};

use millrace_block::{Epochs, PerShard, ReplaceError};

/// What a request costs at least, in bytes.
pub(super) const LEAST_COST: u64 = 4096;
/// Virtual time that 512 bytes cost at weight 1; weights up to this divide it.
pub(super) const UNIT: u64 = 1024;

/// When a volume's turn is: not before the present.
fn start(finish: u64, clock: u64) -> u64 {
    finish.max(clock)
}

/// When its next turn is, after a request of so many bytes.
fn finish(start: u64, bytes: u64, weight: u64) -> u64 {
    let cost = bytes.max(LEAST_COST).div_ceil(512).saturating_mul(UNIT) / weight.max(1);
    start.saturating_add(cost.max(1))
}

/// A request that waits.
struct Waiter {
    number: u64,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Queue {
    waiters: VecDeque<Waiter>,
    next: u64,
}

impl Queue {
    /// Where a waiter stands. They come in the order of their numbers.
    fn find(&self, number: u64) -> Option<usize> {
        self.waiters.binary_search_by_key(&number, |waiter| waiter.number).ok()
    }
}

/// A volume in the line.
#[derive(Default)]
pub(super) struct Member {
    weight: AtomicU32,
    /// When its next turn is.
    finish: AtomicU64,
    /// Requests that wait, on all shards.
    waiting: AtomicU64,
    /// Requests that have waited.
    waited: PerShard<AtomicU64>,
    queues: PerShard<Mutex<Queue>>,
}

impl Member {
    pub(super) fn set_weight(&self, weight: u32) {
        self.weight.store(weight, Ordering::Relaxed);
    }

    /// Requests that had to wait so far.
    pub(super) fn waited(&self) -> u64 {
        self.waited.sum(|count| count)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queues.here().0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, clock: u64) -> u64 {
        start(self.finish.load(Ordering::Relaxed), clock)
    }
}

/// What a shard has on the disk.
#[derive(Default)]
struct Here {
    in_flight: AtomicU64,
    /// It is counted in [`Line::shards`].
    known: AtomicBool,
}

/// See the module.
pub(super) struct Line {
    depth: AtomicU64,
    /// A shard's even part of it.
    even: AtomicU64,
    /// Shards that have ever had a request on the disk.
    shards: AtomicU64,
    /// Requests that wait.
    waiting: AtomicU64,
    /// Virtual time: the turn of the request that went last.
    clock: AtomicU64,
    here: PerShard<Here>,
    members: Epochs<Vec<Arc<Member>>>,
    changing: Mutex<()>,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            depth: AtomicU64::new(u64::MAX),
            even: AtomicU64::new(u64::MAX),
            shards: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            here: PerShard::default(),
            members: Epochs::new(Vec::new()),
            changing: Mutex::default(),
        }
    }
}

/// A request on the disk; dropping it lets the next one go.
pub(super) struct Flight<'a>(&'a Line);

impl Drop for Flight<'_> {
    #[inline]
    fn drop(&mut self) {
        // Minus one.
        self.0.here.add(|here| &here.in_flight, u64::MAX);
        if self.0.waiting.load(Ordering::Relaxed) > 0 {
            self.0.wake_next();
        }
    }
}

/// A place in the line; dropping it leaves.
struct Place<'a> {
    line: &'a Line,
    member: &'a Member,
    number: u64,
}

impl Line {
    /// How many requests the disk has at most; with several shards a few more for a moment.
    pub(super) fn set_depth(&self, depth: u64) {
        self.depth.store(depth, Ordering::Relaxed);
        self.divide();
    }

    /// Divides the depth among the shards. Two that do this at once may leave an old division for as long as nothing changes: a bit
    /// more is in flight then, or a shard looks at the others' without need.
    fn divide(&self) {
        let shards = self.shards.load(Ordering::Relaxed).max(1);
        self.even.store(self.depth.load(Ordering::Relaxed) / shards, Ordering::Relaxed);
    }

    /// Requests on the disk that did not finish at once.
    pub(super) fn in_flight(&self) -> u64 {
        self.here.sum(|here| &here.in_flight)
    }

    /// Lets a volume in, or out, one change after the other.
    pub(super) fn change(&self, change: impl FnOnce(&mut Vec<Arc<Member>>)) -> Result<(), ReplaceError> {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut members = self.members.visit().clone();
        change(&mut members);
        self.members.replace(members)?.wait();
        Ok(())
    }

    /// Whether a request may go at once.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0 && self.has_room()
    }

    /// Whether this shard may have one more request on the disk. Up to its even part of the depth it need not look what the others have.
    #[inline]
    fn has_room(&self) -> bool {
        let (here, _) = self.here.here();
        let mine = here.in_flight.load(Ordering::Relaxed);
        mine < self.even.load(Ordering::Relaxed)
            || (self.shards.load(Ordering::Relaxed) > 1 && self.in_flight() < self.depth.load(Ordering::Relaxed))
    }

    /// A request is on the disk from now on.
    #[inline]
    pub(super) fn go(&self) -> Flight<'_> {
        let (here, _) = self.here.here();
        if !here.known.load(Ordering::Relaxed) && !here.known.swap(true, Ordering::Relaxed) {
            self.shards.fetch_add(1, Ordering::Relaxed);
            self.divide();
        }
        self.here.add(|here| &here.in_flight, 1);
        Flight(self)
    }

    /// Waits for a turn of this volume's for a request of so many bytes.
    pub(super) async fn wait<'a>(&'a self, member: &'a Member, bytes: u64) -> Flight<'a> {
        let place = Place::take(self, member);
        poll_fn(|cx| place.poll(bytes, cx.waker())).await
    }

    /// The front of a volume's queue goes, if it may.
    fn try_go(&self, member: &Member, bytes: u64) -> Option<Flight<'_>> {
        if !self.has_room() {
            return None;
        }
        let clock = self.clock.load(Ordering::Relaxed);
        let turn = member.start(clock);
        for other in self.members.visit().iter() {
            let waits = !std::ptr::eq(&raw const **other, member) && other.waiting.load(Ordering::Relaxed) > 0;
            // Of equal turns the one that comes first in memory: everybody agrees.
            let mine = (turn, &raw const *member);
            if waits && (other.start(clock), Arc::as_ptr(other)) < mine {
                return None;
            }
        }
        let weight = u64::from(member.weight.load(Ordering::Relaxed));
        // The same volume may have a front on another shard, which goes as well.
        let next = |before| Some(finish(start(before, clock), bytes, weight));
        let _ = member.finish.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        self.clock.fetch_max(turn, Ordering::Relaxed);
        Some(self.go())
    }

    /// Wakes the front on this shard whose turn is earliest.
    #[cold]
    fn wake_next(&self) {
        let clock = self.clock.load(Ordering::Relaxed);
        let members = self.members.visit();
        let waiting = members.iter().filter(|member| member.waiting.load(Ordering::Relaxed) > 0);
        let here = waiting.filter(|member| !member.queue().waiters.is_empty());
        let next = here.min_by_key(|member| (member.start(clock), Arc::as_ptr(member)));
        let waker = next.and_then(|member| member.queue().waiters.front()?.waker.clone());
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<'a> Place<'a> {
    fn take(line: &'a Line, member: &'a Member) -> Self {
        let number = {
            let mut queue = member.queue();
            let number = queue.next;
            queue.next += 1;
            queue.waiters.push_back(Waiter { number, waker: None });
            number
        };
        member.waited.add(|count| count, 1);
        member.waiting.fetch_add(1, Ordering::Relaxed);
        line.waiting.fetch_add(1, Ordering::Relaxed);
        Self { line, member, number }
    }

    fn poll(&self, bytes: u64, waker: &Waker) -> Poll<Flight<'a>> {
        let own = self.line.here.here().1;
        let is_front = {
            let mut queue = self.member.queue();
            let me = queue.find(self.number);
            if own && let Some(me) = me.and_then(|at| queue.waiters.get_mut(at)) {
                // Stays on this shard, as wakers must.
                me.waker = Some(waker.clone());
            }
            queue.waiters.front().is_some_and(|front| front.number == self.number)
        };
        if is_front && let Some(flight) = self.line.try_go(self.member, bytes) {
            return Poll::Ready(flight);
        }
        let alone = own && self.line.shards.load(Ordering::Relaxed) <= 1;
        if !own || (is_front && !alone) {
            waker.wake_by_ref();
            // Whose turn is earlier may be asleep here since this shard was the only one: then nobody else looks on every pass.
            self.line.wake_next();
        }
        Poll::Pending
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut queue = self.member.queue();
        if let Some(at) = queue.find(self.number) {
            queue.waiters.remove(at);
        }
        drop(queue);
        self.member.waiting.fetch_sub(1, Ordering::Relaxed);
        // There may be room for one more.
        if self.line.waiting.fetch_sub(1, Ordering::Relaxed) > 1 {
            self.line.wake_next();
        }
    }
}
