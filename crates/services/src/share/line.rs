//! The line before a disk: who goes next when there are more requests than the disk shall have at once.
//!
//! ```text
//!   request ─► nobody waits, and there is room? ── yes ─► disk           (nothing shared is written)
//!                  │ no
//!                  └─► queue of its volume on its shard ─ front ─► room, and no volume's turn is earlier? ─► disk
//! ```
//!
//! Guarantees come first, but for one turn of [`BY_WEIGHT`]: a volume that lacks what it is due by now goes before the others. All other
//! turns are kept in virtual time (start-time fair queueing, which is deficit round-robin without rounds): a request that goes
//! moves its volume's turn on by what it costs, divided by the volume's weight; the volume whose turn is earliest goes next. Who
//! had nothing to do meanwhile begins at the present: nobody saves up, nobody starves. Volumes in a group have one turn together beside
//! the others, and turns among themselves in a time of the group's (`turns.rs`).
//!
//! A request that goes because it is guaranteed moves none of these turns: what guarantees leave of the disk is divided by weight. If it did, a
//! guarantee above its group's part would put off the group's turn further and further, and whoever else is in it would starve.
//! Those that lack something have turns among themselves, in a time of their own, with guarantees for weights.
//!
//! Latency: when the disk takes longer than some volume's target, those that have none, or a looser one, may have half as much on the
//! disk as they have, and again half after the next look; when targets are met they get more by and by. It takes nobody's guarantee away.
//!
//! Invariants:
//! * Requests that need not wait do not touch a queue.
//! * Somebody who can go is always awake: a request's end wakes the front whose turn is earliest, and with several shards, whose
//!   ends are not heard here, fronts look on every pass.

use std::{
    cmp,
    collections::BTreeMap,
    future::poll_fn,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    task::{Poll, Waker},
};

use millrace_block::{Epochs, PerShard, ReplaceError, clock};

use super::member::{Member, Minimum};
use crate::throttle::Weight;

/// Of so many turns one goes by weight to those that lack nothing, whatever is guaranteed: who has no guarantee does not starve.
pub(super) const BY_WEIGHT: u64 = 8;
/// How often it is looked at whether latency targets are met.
const WINDOW_NS: u64 = 50_000_000;

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
    /// Shards that have ever had a request here.
    shards: AtomicU64,
    /// Requests that wait.
    waiting: AtomicU64,
    /// Virtual time: the turn of the request that went last.
    clock: AtomicU64,
    /// What the disk can do per second, operations and bytes; 0: that is not known.
    able: [AtomicU64; 2],
    /// Somebody has a guarantee.
    guarantees: AtomicBool,
    /// Virtual time among those that lack what is guaranteed to them: the turn of the one that went last.
    owed: AtomicU64,
    /// Requests in a row that went because they were guaranteed.
    guaranteed: AtomicU64,
    /// Somebody has a latency target.
    targets: AtomicBool,
    /// Somebody is limited because of another one's target.
    limited: AtomicBool,
    /// When targets are looked at again.
    judgement: AtomicU64,
    here: PerShard<Here>,
    members: Epochs<Vec<Arc<Member>>>,
    /// One comes or goes at a time; and what is reserved for those that are on their way.
    changing: Mutex<Vec<Minimum>>,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            depth: AtomicU64::new(u64::MAX),
            even: AtomicU64::new(u64::MAX),
            shards: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            able: Default::default(),
            guarantees: AtomicBool::new(false),
            owed: AtomicU64::new(0),
            guaranteed: AtomicU64::new(0),
            targets: AtomicBool::new(false),
            limited: AtomicBool::new(false),
            judgement: AtomicU64::new(0),
            here: PerShard::default(),
            members: Epochs::new(Vec::new()),
            changing: Mutex::default(),
        }
    }
}

/// A request on the disk; dropping it lets the next one go.
pub(super) struct Flight<'a> {
    line: &'a Line,
    member: &'a Member,
    /// When it began; 0: nobody asks.
    began: u64,
}

impl Drop for Flight<'_> {
    #[inline]
    fn drop(&mut self) {
        // Minus one.
        self.line.here.add(|here| &here.in_flight, u64::MAX);
        self.member.ends();
        if self.line.targets.load(Ordering::Relaxed) {
            self.line.look(self.member, self.began);
        }
        if self.line.waiting.load(Ordering::Relaxed) > 0 {
            self.line.wake_next();
        }
    }
}

/// A part of what can be guaranteed that is kept for a volume on its way in; dropping it gives it back.
pub(super) struct Reserved<'a> {
    line: &'a Line,
    minimum: Minimum,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        let mut reserved = self.line.changing();
        if let Some(at) = reserved.iter().position(|minimum| *minimum == self.minimum) {
            reserved.swap_remove(at);
        }
    }
}

/// Whether a disk that can do so much can guarantee so much; 0: it is not known what it can do.
fn possible(able: Minimum, guaranteed: Minimum) -> Result<(), String> {
    for (able, guaranteed, what) in
        [(able.iops, guaranteed.iops, "operations"), (able.bandwidth, guaranteed.bandwidth, "bytes")]
    {
        let most = able - able / BY_WEIGHT;
        if able > 0 && guaranteed > most {
            return Err(format!(
                "{guaranteed} {what} per second would be guaranteed in all; of a disk that does {able}, {most} can be"
            ));
        }
    }
    Ok(())
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

    fn changing(&self) -> MutexGuard<'_, Vec<Minimum>> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a volume in, or out, one change after the other.
    pub(super) fn change(&self, change: impl FnOnce(&mut Vec<Arc<Member>>)) -> Result<(), ReplaceError> {
        let _one_at_a_time = self.changing();
        let mut members = self.members.visit().clone();
        change(&mut members);
        self.guarantees.store(members.iter().any(|member| !member.minimum().is_none()), Ordering::Relaxed);
        self.targets.store(members.iter().any(|member| member.latency().is_some()), Ordering::Relaxed);
        for member in &members {
            member.set_unlimited();
        }
        self.limited.store(false, Ordering::Relaxed);
        self.members.replace(members)?.wait();
        Ok(())
    }

    /// What is guaranteed to all volumes together.
    pub(super) fn guaranteed(&self) -> Minimum {
        self.members.visit().iter().fold(Minimum::default(), |sum, member| sum.and(member.minimum()))
    }

    /// The groups of its volumes by name, with their weights and how many volumes are in each.
    pub(super) fn groups(&self) -> BTreeMap<String, (Weight, usize)> {
        let mut groups = BTreeMap::new();
        for tier in self.members.visit().iter().flat_map(|member| member.tiers()) {
            groups.entry(tier.group.name().to_owned()).or_insert((tier.group.weight(), 0)).1 += 1;
        }
        groups
    }

    /// What the disk can do per second, as far as that is known. With more than a part of it guaranteed already, `excess` says whether it is
    /// so all the same.
    pub(super) fn set_able(&self, able: Minimum, excess: impl FnOnce(String) -> Result<(), String>) -> Result<(), String> {
        possible(able, self.taken(&self.changing())).or_else(excess)?;
        self.able[0].store(able.iops, Ordering::Relaxed);
        self.able[1].store(able.bandwidth, Ordering::Relaxed);
        Ok(())
    }

    fn able(&self) -> Minimum {
        let [iops, bandwidth] = self.able.each_ref().map(|able| able.load(Ordering::Relaxed));
        Minimum { iops, bandwidth }
    }

    /// What is guaranteed to volumes, and kept for those on their way.
    fn taken(&self, reserved: &[Minimum]) -> Minimum {
        reserved.iter().fold(self.guaranteed(), |sum, other| sum.and(*other))
    }

    /// Whether more is guaranteed than the disk can keep.
    pub(super) fn exceeds(&self) -> bool {
        possible(self.able(), self.guaranteed()).is_err()
    }

    /// Keeps so much for a volume that is about to come in: its extents may be cleared for minutes first. Where it is more than can be guaranteed
    /// beside what is already, `excess` says whether it comes all the same.
    pub(super) fn reserve(
        &self,
        minimum: Minimum,
        excess: impl FnOnce(String) -> Result<(), String>,
    ) -> Result<Reserved<'_>, String> {
        let mut reserved = self.changing();
        if !minimum.is_none() {
            possible(self.able(), self.taken(&reserved).and(minimum)).or_else(excess)?;
        }
        reserved.push(minimum);
        Ok(Reserved { line: self, minimum })
    }

    /// Whether a request of this volume may go at once.
    #[inline]
    pub(super) fn is_open(&self, member: &Member) -> bool {
        let free = self.waiting.load(Ordering::Relaxed) == 0 && self.has_room();
        free && (!self.limited.load(Ordering::Relaxed) || member.has_room())
    }

    /// Whether this shard may have one more request on the disk. Up to its even part of the depth it need not look what the others have.
    #[inline]
    fn has_room(&self) -> bool {
        let (here, _) = self.here.here();
        let mine = here.in_flight.load(Ordering::Relaxed);
        mine < self.even.load(Ordering::Relaxed)
            || (self.shards.load(Ordering::Relaxed) > 1 && self.in_flight() < self.depth.load(Ordering::Relaxed))
    }

    /// Counts this shard, before anything of it is to be seen here.
    #[inline]
    fn know_shard(&self) {
        let (here, _) = self.here.here();
        if !here.known.load(Ordering::Relaxed) && !here.known.swap(true, Ordering::Relaxed) {
            self.shards.fetch_add(1, Ordering::Relaxed);
            // Pairs with the fence in `Place::is_alone`: who sees a request of this shard, waiting or on the disk, sees the shard.
            fence(Ordering::Release);
            self.divide();
        }
    }

    /// A request of so many bytes is on the disk from now on.
    #[inline]
    pub(super) fn go<'a>(&'a self, member: &'a Member, bytes: u64) -> Flight<'a> {
        self.know_shard();
        self.here.add(|here| &here.in_flight, 1);
        member.begins();
        if self.guarantees.load(Ordering::Relaxed) && !member.minimum().is_none() {
            member.had(clock::now(), bytes);
        }
        // Erasures take the disk as long as they do: neighbours can do nothing about it.
        let timed = bytes > 0 && self.targets.load(Ordering::Relaxed) && member.latency().is_some();
        Flight { line: self, member, began: if timed { clock::now() } else { 0 } }
    }

    /// Waits for a turn of this volume's for a request of so many bytes.
    pub(super) async fn wait<'a>(&'a self, member: &'a Member, bytes: u64) -> Flight<'a> {
        let place = Place::take(self, member);
        poll_fn(|cx| place.poll(bytes, cx.waker())).await
    }

    /// The front of a volume's queue goes, if it may.
    fn try_go<'a>(&'a self, member: &'a Member, bytes: u64) -> Option<Flight<'a>> {
        if !self.has_room() {
            return None;
        }
        let present = self.present();
        if !present.has_room(member) {
            return None;
        }
        for other in self.members.visit().iter() {
            let waits = !std::ptr::eq(&raw const **other, member) && other.waiting.load(Ordering::Relaxed) > 0;
            if waits && present.has_room(other) && present.order(other, member).is_lt() {
                return None;
            }
        }
        if present.is_overdue(member) {
            self.owed.fetch_max(member.turned_owed(present.owed, bytes), Ordering::Relaxed);
            self.guaranteed.fetch_add(1, Ordering::Relaxed);
        } else {
            member.turned(&self.clock, bytes);
            self.guaranteed.store(0, Ordering::Relaxed);
        }
        Some(self.go(member, bytes))
    }

    /// What decides whose turn it is, at this moment.
    fn present(&self) -> Present {
        Present {
            clock: self.clock.load(Ordering::Relaxed),
            owed: self.owed.load(Ordering::Relaxed),
            now: self.guarantees.load(Ordering::Relaxed).then(clock::now),
            by_weight: self.guaranteed.load(Ordering::Relaxed) + 1 >= BY_WEIGHT,
        }
    }

    /// Wakes the front on this shard whose turn is earliest.
    #[cold]
    fn wake_next(&self) {
        let present = self.present();
        let members = self.members.visit();
        let several = self.shards.load(Ordering::Relaxed) > 1;
        let here = members.iter().filter(|member| member.waiting.load(Ordering::Relaxed) > 0 && !member.queue().is_empty());
        let mut next: Option<&Arc<Member>> = None;
        for member in here {
            if present.has_room(member) {
                if next.is_none_or(|best| present.order(member, best).is_lt()) {
                    next = Some(member);
                }
            } else if several {
                // Room that others make on another shard is not heard of here: its front looks on every pass.
                wake_front(member);
            }
        }
        if let Some(member) = next {
            wake_front(member);
        }
    }

    /// A request has left the disk while somebody has a latency target: was it late, and are targets met?
    #[cold]
    fn look(&self, member: &Member, began: u64) {
        if began == 0 && !self.limited.load(Ordering::Relaxed) {
            return;
        }
        let now = clock::now();
        if let Some(target) = member.latency().filter(|_| began > 0) {
            member.took(now.saturating_sub(began), target);
        }
        let due = self.judgement.load(Ordering::Relaxed);
        let mine = || self.judgement.compare_exchange(due, now + WINDOW_NS, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if now < due || !mine() {
            return;
        }
        let members = self.members.visit();
        // The tightest of those that are missed.
        let missed = members.iter().filter_map(|member| member.missed()).min();
        let depth = self.depth.load(Ordering::Relaxed);
        let limited = members.iter().filter(|member| member.adjust(missed, depth)).count() > 0;
        self.limited.store(limited, Ordering::Relaxed);
    }
}

/// What decides whose turn it is.
struct Present {
    clock: u64,
    /// Virtual time among those that lack what is guaranteed to them.
    owed: u64,
    /// The time, when somebody has a guarantee.
    now: Option<u64>,
    /// This turn is for those that lack nothing.
    by_weight: bool,
}

impl Present {
    /// Whether a volume lacks what is guaranteed to it.
    fn is_overdue(&self, member: &Member) -> bool {
        self.now.is_some_and(|now| member.is_overdue(now))
    }

    /// Whether a volume may have one more request on the disk: another one's target does not keep it from what is guaranteed to it.
    fn has_room(&self, member: &Member) -> bool {
        member.has_room() || self.is_overdue(member)
    }

    /// Who goes first: those that lack what is guaranteed to them, or in a turn by weight those that do not.
    fn order(&self, one: &Member, other: &Member) -> cmp::Ordering {
        match (self.is_overdue(one), self.is_overdue(other)) {
            (false, false) => one.order(other, self.clock),
            (true, true) => one.order_owed(other, self.owed),
            (lacks, _) if lacks != self.by_weight => cmp::Ordering::Less,
            _ => cmp::Ordering::Greater,
        }
    }
}

impl<'a> Place<'a> {
    fn take(line: &'a Line, member: &'a Member) -> Self {
        line.know_shard();
        let number = member.enter();
        line.waiting.fetch_add(1, Ordering::Relaxed);
        Self { line, member, number }
    }

    fn poll(&self, bytes: u64, waker: &Waker) -> Poll<Flight<'a>> {
        let own = self.line.here.here().1;
        let is_front = {
            let mut queue = self.member.queue();
            if own {
                queue.waits(self.number, waker);
            }
            queue.is_first(self.number)
        };
        if is_front && let Some(flight) = self.line.try_go(self.member, bytes) {
            return Poll::Ready(flight);
        }
        let alone = own && self.is_alone();
        if !own || (is_front && !alone) {
            waker.wake_by_ref();
        }
        // Whose turn is earlier may be asleep here: it came first, or was the only one, or what is guaranteed to it fell due since.
        if !own || (is_front && (!alone || self.line.has_room())) {
            self.line.wake_next();
        }
        Poll::Pending
    }

    /// Whether everything that this request may wait for ends on this shard, and so wakes it.
    fn is_alone(&self) -> bool {
        // Pairs with the fence in `Line::know_shard`: a refusal because of another shard's request is not followed by sleep.
        fence(Ordering::Acquire);
        self.line.shards.load(Ordering::Relaxed) <= 1
    }
}

fn wake_front(member: &Member) {
    let front = member.queue().first();
    if let Some(waker) = front {
        waker.wake();
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.member.leave(self.number);
        // There may be room for one more.
        if self.line.waiting.fetch_sub(1, Ordering::Relaxed) > 1 {
            self.line.wake_next();
        }
    }
}
