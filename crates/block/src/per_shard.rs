//! Values of which every shard has its own, so that no cache line is written by two.

use std::{
    cell::Cell,
    marker::PhantomData,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// Places of a value.
const SLOTS: usize = 64;
/// The place of threads that have none of their own. Only there several threads write, so only there writes are atomic.
pub(crate) const SHARED: usize = SLOTS - 1;

thread_local! {
    static SLOT: Cell<usize> = const { Cell::new(SHARED) };
    /// Whether the thread is a shard's all the time: what there is little of is for these.
    static STAYS: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread's place.
#[inline]
pub(crate) fn own_slot() -> usize {
    SLOT.get()
}

static TAKEN: Mutex<[bool; SHARED]> = Mutex::new([false; SHARED]);
/// Most places that were ever taken at once.
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The calling thread's claim to a place of its own. A shard claims one when it starts; when there are too many shards, the
/// last ones share the common place, which is slower and not wrong.
#[derive(Debug)]
pub struct ShardSlot {
    slot: usize,
    /// It stays on its thread.
    _local: PhantomData<*const ()>,
}

impl ShardSlot {
    /// Claims a place for the calling thread, which is a shard's all the time, if it has none.
    pub fn claim() -> Self {
        Self::claim_for(true)
    }

    /// Claims a place for the calling thread, which is a shard's while it waits for something, if it has none.
    pub fn claim_in_passing() -> Self {
        Self::claim_for(false)
    }

    fn claim_for(stays: bool) -> Self {
        let mut slot = SHARED;
        if SLOT.get() == SHARED {
            let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((at, place)) = taken.iter_mut().enumerate().find(|(_, taken)| !**taken) {
                *place = true;
                slot = at;
                SLOT.set(at);
                STAYS.set(stays);
                MOST.fetch_max(at + 1, Ordering::Relaxed);
            }
        }
        Self { slot, _local: PhantomData }
    }

    /// Whether the calling thread has a place of its own, and is a shard's all the time.
    #[inline]
    pub fn stays() -> bool {
        STAYS.get()
    }

    /// The most threads that ever had a place of their own at once; 1 at least.
    pub fn most() -> usize {
        MOST.load(Ordering::Relaxed).max(1)
    }
}

impl Drop for ShardSlot {
    fn drop(&mut self) {
        if self.slot != SHARED {
            SLOT.set(SHARED);
            STAYS.set(false);
            // The lock orders what this thread wrote before what the place's next owner writes.
            TAKEN.lock().unwrap_or_else(PoisonError::into_inner)[self.slot] = false;
        }
    }
}

/// Two lines: processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded<T>(T);

/// A value for each shard.
#[derive(Debug)]
pub struct PerShard<T>(Box<[Padded<T>; SLOTS]>);

impl<T: Default> Default for PerShard<T> {
    fn default() -> Self {
        Self(Box::new(std::array::from_fn(|_| Padded::default())))
    }
}

impl<T> PerShard<T> {
    /// The calling thread's value, and whether no other thread writes it.
    #[inline]
    pub fn here(&self) -> (&T, bool) {
        let slot = SLOT.get() % SLOTS;
        (&self.0[slot].0, slot != SHARED)
    }

    /// The value in a place.
    pub(crate) fn of(&self, slot: usize) -> &T {
        &self.0[slot].0
    }

    /// All values, those of shards that do not exist as well.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|padded| &padded.0)
    }
}

impl<T> PerShard<T> {
    /// Adds to one of the calling thread's counters.
    #[inline]
    pub fn add(&self, counter: impl FnOnce(&T) -> &AtomicU64, count: u64) {
        let (here, own) = self.here();
        bump(counter(here), own, count);
    }

    /// Adds to several of the calling thread's counters.
    #[inline]
    pub fn add_all<const N: usize>(&self, counters: impl FnOnce(&T) -> [&AtomicU64; N], counts: [u64; N]) {
        let (here, own) = self.here();
        for (counter, count) in counters(here).into_iter().zip(counts) {
            bump(counter, own, count);
        }
    }

    /// The sum of a counter over all shards: each shard's part is right at some moment during the call.
    pub fn sum(&self, counter: impl Fn(&T) -> &AtomicU64) -> u64 {
        self.iter().fold(0, |sum, here| sum.wrapping_add(counter(here).load(Ordering::Relaxed)))
    }
}

/// Adds to a counter. Relaxed: it orders nothing.
#[inline]
fn bump(counter: &AtomicU64, own: bool, count: u64) {
    if own {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    } else {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

/// Counts who is inside something.
#[derive(Debug, Default)]
pub(crate) struct Presence(PerShard<AtomicU64>);

/// Somebody who is inside; dropping it leaves.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    presence: &'a Presence,
    slot: usize,
    _local: PhantomData<*const ()>,
}

impl Presence {
    /// Enters. What is loaded after it is not loaded before it, as far as a process-wide barrier can tell.
    #[inline]
    pub(crate) fn enter(&self) -> Inside<'_> {
        let slot = SLOT.get() % SLOTS;
        bump(&self.0.0[slot].0, slot != SHARED, 1);
        // The processor may still load early what comes next; whoever waits for us to leave makes every processor run a full
        // barrier first (see `Switch`), which is the other side of this race.
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
        Inside { presence: self, slot, _local: PhantomData }
    }

    /// How many are inside. Acquire: pairs with the release of those who left.
    pub(crate) fn count(&self) -> u64 {
        self.0.iter().fold(0, |sum, here| sum.wrapping_add(here.load(Ordering::Acquire)))
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        let counter = &self.presence.0.0[self.slot].0;
        if self.slot == SHARED {
            counter.fetch_sub(1, Ordering::Release);
        } else if SLOT.get() == self.slot {
            counter.store(counter.load(Ordering::Relaxed).wrapping_sub(1), Ordering::Release);
        }
        // Otherwise the thread has given its place away meanwhile: then we are never seen to leave, which is safe.
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Of two tests, one takes all places and the other needs one.
    static PLACES: Mutex<()> = Mutex::new(());

    #[test]
    fn threads_count_apart_and_lose_nothing() {
        let _places = PLACES.lock();
        let counters: Arc<PerShard<AtomicU64>> = Arc::default();
        let threads: Vec<_> = (0..80)
            .map(|number| {
                let counters = Arc::clone(&counters);
                std::thread::spawn(move || {
                    // More threads than places, and some that claim none.
                    let claim = (number % 8 != 0).then(ShardSlot::claim);
                    for _ in 0..1000 {
                        counters.add(|counter| counter, 1);
                    }
                    drop(claim);
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(counters.sum(|counter| counter), 80_000);
    }

    #[test]
    fn a_second_claim_changes_nothing() {
        let first = ShardSlot::claim();
        let slot = SLOT.get();
        drop(ShardSlot::claim());
        assert_eq!(SLOT.get(), slot);
        drop(first);
        assert_eq!(SLOT.get(), SHARED);
    }

    #[test]
    fn who_claims_in_passing_does_not_stay() {
        let _places = PLACES.lock();
        let passing = ShardSlot::claim_in_passing();
        assert!(SLOT.get() != SHARED && !ShardSlot::stays());
        drop(ShardSlot::claim());
        assert!(!ShardSlot::stays(), "a second claim changes nothing");
        drop(passing);
        let staying = ShardSlot::claim();
        drop(ShardSlot::claim_in_passing());
        assert!(ShardSlot::stays());
        drop(staying);
        assert!(!ShardSlot::stays());
    }

    #[test]
    fn presence_is_seen_until_it_ends() {
        let presence = Presence::default();
        let (one, two) = (presence.enter(), presence.enter());
        assert_eq!(presence.count(), 2);
        drop((one, two));
        let claim = ShardSlot::claim();
        let three = presence.enter();
        assert_eq!(presence.count(), 1);
        drop(three);
        let lost = presence.enter();
        drop(claim);
        drop(lost);
        assert_eq!(presence.count(), 1, "who lost its place is never seen to leave");
    }
}
