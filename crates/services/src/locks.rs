//! Locks of ranges of blocks between tasks of any shards, without a mutex: bits in a table of atomics.
//!
//! ```text
//!   units (4 KiB):  0 1 2 … 63 │ 64 … 127 │ …            a range sets the bits of its units, all or none
//!   words:             w(0)    │   w(1)   │ … 4096 of them, spread so that neighbours are not on one cache line
//! ```
//!
//! Two ranges 1 GiB apart share bits: then one waits for the other without need, which is slower and not wrong. Who does not get
//! a range holds nothing while it waits, so no circle of waiting tasks can close. A shard that writes where no other shard writes
//! touches words that no other shard touches.
//!
//! Where one shard does nearly all, its requests that end at once need not set bits, which costs two atomic operations and waits for what
//! was copied past the caches: they only look at them ([`Ranges::try_hold`], [`Bias`]).

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, Ordering, fence},
    time::Duration,
};

use millrace_block::{Bias, Favoured, IoOperation, TaskContext, yield_now};

use crate::background::Stop;

/// Power of two of the bytes of a unit.
const UNIT_SHIFT: u32 = 12;
/// Bytes of a unit: what a range is rounded outwards to.
pub(crate) const UNIT: u64 = 1 << UNIT_SHIFT;
/// Words of the table; a power of two.
const WORDS: u64 = 4096;
/// Turns of the shard before a waiting task sleeps.
const TURNS: u32 = 16;
/// How long it then sleeps before it looks again.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// Looks of [`Ranges::lock_some`] until it asks for less.
const LOOKS: u32 = 32;
/// After so many requests a shard that was alone need not set bits; if that does not last, after twice as many, up to the second number.
/// Taking it back is a few system calls.
const PATIENCE: (u64, u64) = (1 << 10, 1 << 20);

/// Waits until `look` finds something that a task of another shard may bring about.
pub(crate) fn until<T>(cx: TaskContext<'_>, look: impl FnMut() -> Option<T>) -> impl Future<Output = T> {
    until_at_last(cx, 1, look)
}

/// [`until`] for what may take long and many wait for: who has waited long looks less often, down to once in so many times [`LOOK_AGAIN`].
pub(crate) async fn until_at_last<T>(cx: TaskContext<'_>, longest: u32, mut look: impl FnMut() -> Option<T>) -> T {
    let mut turns = 0_u32;
    loop {
        if let Some(found) = look() {
            return found;
        }
        if turns < TURNS {
            yield_now().await;
        } else {
            cx.io(IoOperation::Sleep(LOOK_AGAIN * (1 + (turns - TURNS) / 4).min(longest))).await;
        }
        turns = turns.saturating_add(1);
    }
}

/// On lines of its own: whoever looks at it does not wait for who changes what is beside it.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct OwnLines<T>(pub(crate) T);

/// Lets one task at a time do something.
#[derive(Debug, Default)]
pub(crate) struct Turn(AtomicBool);

/// The task whose turn it is; dropping it ends the turn.
#[derive(Debug)]
pub(crate) struct Taken<'a>(&'a AtomicBool);

impl Turn {
    /// Takes the turn if it is nobody's.
    pub(crate) fn try_take(&self) -> Option<Taken<'_>> {
        // Looked at first: many who wait for it do not take the line from each other.
        let may_be_free = !self.0.load(Ordering::Relaxed);
        // Acquire: pairs with the release of whose turn it was before.
        let free = may_be_free && self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then(|| Taken(&self.0))
    }

    /// Takes the turn, waiting for it.
    pub(crate) async fn take(&self, cx: TaskContext<'_>) -> Taken<'_> {
        until(cx, || self.try_take()).await
    }

    /// Takes the turn on a thread that may sleep meanwhile.
    pub(crate) fn take_and_wait(&self) -> Taken<'_> {
        loop {
            if let Some(taken) = self.try_take() {
                return taken;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire of whose turn is next.
        self.0.store(false, Ordering::Release);
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Ranges {
    words: Box<[AtomicU64]>,
    bias: Bias,
}

/// A locked range; dropping it unlocks it.
#[derive(Debug)]
pub(crate) struct Locked<'a> {
    ranges: &'a Ranges,
    units: Range<u64>,
}

/// The units that a range of bytes touches.
fn units(bytes: &Range<u64>) -> Range<u64> {
    bytes.start >> UNIT_SHIFT..bytes.end.div_ceil(1 << UNIT_SHIFT)
}

/// The words that units lie in, with their bits; each word once.
fn spans(units: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let (first, end) = (units.start / 64, units.end.div_ceil(64));
    let wide = end - first > WORDS;
    (first..end.min(first + WORDS)).map(move |chunk| {
        let (from, to) = (units.start.max(chunk * 64) - chunk * 64, units.end.min(chunk * 64 + 64) - chunk * 64);
        let bits = if wide { u64::MAX } else { u64::MAX >> (64 - (to - from)) << from };
        // An odd factor permutes the words.
        ((chunk.wrapping_mul(9) & (WORDS - 1)) as usize, bits)
    })
}

impl Ranges {
    /// A table in which nothing is locked.
    pub(crate) fn new() -> Self {
        Self::with_patience(PATIENCE)
    }

    fn with_patience((least, most): (u64, u64)) -> Self {
        Self { words: (0..WORDS).map(|_| AtomicU64::new(0)).collect(), bias: Bias::new(least, most) }
    }

    /// As [`Self::try_lock`], for a shard that nearly always is the only one, and for what ends at once. Ordinary stores: what was copied
    /// may be settled later ([`Volume::settles_late`](millrace_block::Volume::settles_late)), for whoever locks next on another shard makes
    /// every processor settle first. The same holds for [`Self::quiesce`].
    #[inline]
    pub(crate) fn try_hold(&self, bytes: &Range<u64>) -> Option<Favoured<'_>> {
        let inside = self.bias.enter()?;
        // SeqCst: see `Bias::enter`. These are this shard's own locks, and those from before it was favoured.
        let free = spans(units(bytes)).all(|(word, bits)| self.words[word].load(Ordering::SeqCst) & bits == 0);
        free.then_some(inside)
    }

    /// A range was locked for what ended at once, so that [`Self::try_hold`] would have done.
    #[inline]
    pub(crate) fn could_hold(&self) {
        self.bias.count();
    }

    /// Locks a range of bytes if nothing in it is locked.
    ///
    /// SeqCst: whoever holds the lock looks next whether its range is marked; whoever takes a mark away looks next whether the
    /// range is locked ([`Self::quiesce`]). One of the two sees the other.
    #[inline]
    pub(crate) fn try_lock(&self, bytes: Range<u64>) -> Option<Locked<'_>> {
        if !self.bias.is_open() && !self.bias.withdraw() {
            return None;
        }
        let locked = self.try_set(units(&bytes))?;
        // After the bits: the favour may have been given meanwhile, to a shard that did not see them.
        self.bias.is_open().then_some(locked)
    }

    #[inline]
    fn try_set(&self, units: Range<u64>) -> Option<Locked<'_>> {
        for (at, (word, bits)) in spans(units.clone()).enumerate() {
            let before = self.words[word].fetch_or(bits, Ordering::SeqCst);
            if before & bits != 0 {
                self.words[word].fetch_and(!(bits & !before), Ordering::Release);
                for (word, bits) in spans(units).take(at) {
                    self.words[word].fetch_and(!bits, Ordering::Release);
                }
                return None;
            }
        }
        Some(Locked { ranges: self, units })
    }

    /// Locks a range of bytes, waiting until nothing in it is locked.
    pub(crate) async fn lock(&self, cx: TaskContext<'_>, bytes: Range<u64>) -> Locked<'_> {
        until(cx, || self.try_lock(bytes.clone())).await
    }

    /// As [`Self::lock`], for who can do with less: where others are always at work the whole of a long range is never free. `bytes` is made
    /// shorter, by multiples of `least`, down to that, until it can be had.
    pub(crate) async fn lock_some(&self, cx: TaskContext<'_>, bytes: &mut Range<u64>, least: u64) -> Locked<'_> {
        let mut looks = 0_u32;
        until(cx, || self.try_some(bytes, least, &mut looks)).await
    }

    /// As [`Self::lock_some`], down to a unit, for background work, which begins at a unit's first byte: one unit alone is had like any request
    /// has its own. `None`: it is told to stop.
    pub(crate) async fn lock_some_until(
        &self,
        cx: TaskContext<'_>,
        bytes: &mut Range<u64>,
        stop: &Stop,
    ) -> Option<Locked<'_>> {
        let mut looks = 0_u32;
        until(cx, || {
            if stop.is_set() {
                return Some(None);
            }
            self.try_some(bytes, UNIT, &mut looks).map(Some)
        })
        .await
    }

    /// A look of [`Self::lock_some`].
    fn try_some(&self, bytes: &mut Range<u64>, least: u64, looks: &mut u32) -> Option<Locked<'_>> {
        let locked = self.try_lock(bytes.clone());
        *looks += 1;
        if locked.is_none() && looks.is_multiple_of(LOOKS) {
            let len = bytes.end - bytes.start;
            bytes.end = bytes.start + (len / 2 / least * least).max(least).min(len);
        }
        locked
    }

    /// Waits until everything that was locked in the range when this was called has been unlocked.
    pub(crate) async fn quiesce(&self, cx: TaskContext<'_>, bytes: Range<u64>) {
        // What the caller changed for those who come is before the look at who is there.
        fence(Ordering::SeqCst);
        until(cx, || (self.bias.is_open() || self.bias.withdraw()).then_some(())).await;
        for (word, bits) in spans(units(&bytes)) {
            // SeqCst: see `try_lock`.
            let mut waiting = self.words[word].load(Ordering::SeqCst) & bits;
            until(cx, || {
                waiting &= self.words[word].load(Ordering::Acquire);
                (waiting == 0).then_some(())
            })
            .await;
        }
    }
}

impl Locked<'_> {
    /// The bytes, rounded outwards to units.
    pub(crate) fn bytes(&self) -> Range<u64> {
        self.units.start << UNIT_SHIFT..self.units.end << UNIT_SHIFT
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        for (word, bits) in spans(self.units.clone()) {
            // Release: what was done under the lock is seen by the next holder.
            self.ranges.words[word].fetch_and(!bits, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use millrace_backends::MemoryVolume;
    use millrace_block::{BlockCount, BlockSize, Lba, ShardSlot, Volume, conformance::Memory};
    use millrace_memory::{Access, Places, Unsettled, copy_to_all};
    use proptest::prelude::*;

    use super::*;

    const SPAN: u64 = WORDS * 64;

    fn naive(units: &Range<u64>) -> std::collections::BTreeSet<u64> {
        units.clone().take(SPAN as usize).map(|unit| unit % SPAN).collect()
    }

    proptest! {
        #[test]
        fn ranges_exclude_each_other_exactly_when_they_share_units(
            one in 0..3 * SPAN, len in 1..200_u64, two in 0..400_u64, other in 1..200_u64, far in 0..3_u64,
        ) {
            let ranges = Ranges::new();
            let first = one << UNIT_SHIFT..(one + len) << UNIT_SHIFT;
            let start = one.saturating_sub(200) + two + far * SPAN;
            let second = start << UNIT_SHIFT..(start + other) << UNIT_SHIFT;
            let meet = !naive(&units(&first)).is_disjoint(&naive(&units(&second)));
            let held = ranges.try_lock(first.clone()).unwrap();
            prop_assert!(ranges.try_lock(first).is_none());
            prop_assert_eq!(ranges.try_lock(second.clone()).is_none(), meet);
            drop(held);
            prop_assert!(ranges.words.iter().all(|word| word.load(Ordering::Relaxed) == 0), "nothing is left behind");
            prop_assert!(ranges.try_lock(second).is_some());
        }
    }

    #[test]
    fn a_huge_range_locks_everything_and_bytes_are_rounded_outwards() {
        let ranges = Ranges::new();
        let all = ranges.try_lock(5..1 << 50).unwrap();
        assert!(ranges.try_lock((1 << 55)..(1 << 55) + 1).is_none());
        drop(all);
        let one = ranges.try_lock(4095..4097).unwrap();
        assert!(ranges.try_lock(0..1).is_none() && ranges.try_lock(8191..8192).is_none());
        assert!(ranges.try_lock(8192..8193).is_some());
        drop(one);
        assert!(ranges.try_lock(0..8192).is_some());
    }

    #[test]
    fn who_can_do_with_less_gets_what_is_free_before_a_locked_range() {
        fn lock_some(ranges: &Arc<Ranges>) -> Range<u64> {
            let ranges = Arc::clone(ranges);
            let work = crate::legs::block_on(move |cx| {
                Box::pin(async move {
                    let mut bytes = 0..16 << 20;
                    drop(ranges.lock_some(cx, &mut bytes, 1 << 18).await);
                    bytes
                })
            });
            work.unwrap()
        }
        let ranges = Arc::new(Ranges::new());
        let held = ranges.try_lock((1 << 20) + 5..(1 << 20) + 6).unwrap();
        assert_eq!(lock_some(&ranges), 0..1 << 20);
        drop(held);
        assert_eq!(lock_some(&ranges), 0..16 << 20);
    }

    #[test]
    fn background_work_gets_one_unit_of_a_range_that_is_never_free_and_ends_when_it_is_told() {
        fn lock(ranges: &Arc<Ranges>, stop: &Stop) -> Option<Range<u64>> {
            let (ranges, stop) = (Arc::clone(ranges), stop.clone());
            let work = crate::legs::block_on(move |cx| {
                Box::pin(async move {
                    let mut bytes = 0..16 * UNIT + 5;
                    let locked = ranges.lock_some_until(cx, &mut bytes, &stop).await.is_some();
                    locked.then_some(bytes)
                })
            });
            work.unwrap()
        }
        let (ranges, stop) = (Arc::new(Ranges::new()), Stop::default());
        assert_eq!(lock(&ranges, &stop), Some(0..16 * UNIT + 5));
        let second = ranges.try_lock(UNIT..UNIT + 1).unwrap();
        assert_eq!(lock(&ranges, &stop), Some(0..UNIT));
        let first = ranges.try_lock(0..1).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| lock(&ranges, &stop));
            // It most probably waits by then.
            std::thread::sleep(Duration::from_millis(20));
            stop.set();
            assert_eq!(waits.join().unwrap(), None);
        });
        drop((first, second));
    }

    #[test]
    fn threads_never_hold_one_range_together() {
        let (ranges, inside) = (Ranges::new(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for number in 0..4 {
                let (ranges, inside) = (&ranges, &inside);
                scope.spawn(move || {
                    let mut held = 0;
                    while held < 2000 {
                        // Different ranges that all touch unit 70.
                        let Some(lock) = ranges.try_lock((60 + number) << 12..(71 + number) << 12) else { continue };
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        inside.fetch_sub(1, Ordering::Relaxed);
                        held += 1;
                        drop(lock);
                    }
                });
            }
        });
    }

    /// What threads do with one range: hold it where they may, else lock it.
    fn with_range(ranges: &Ranges, bytes: &Range<u64>, work: impl FnOnce()) -> bool {
        if let Some(_held) = ranges.try_hold(bytes) {
            work();
            return true;
        }
        let Some(_locked) = ranges.try_lock(bytes.clone()) else { return false };
        work();
        ranges.could_hold();
        true
    }

    /// Copies to two places past the caches, which it never settles, again and again; what others copied there must be in both.
    fn copy_to_two(ranges: &Ranges, volume: &dyn Volume, inside: &AtomicBool) -> u64 {
        let _place = ShardSlot::claim();
        let _unsettled = Unsettled::new();
        let reach = |lba| volume.reach(Lba(lba), BlockCount(8), Access::Write).expect("it is memory");
        let (one, two, mut places) = (reach(0), reach(800), Places::new());
        places.add(&one);
        places.add(&two);
        let memory = Memory::new(4096);
        let own = memory.segment(0, 4096);
        let (mut done, mut favoured) = (0_u32, 0);
        while done < 20_000 {
            own.fill((done % 251) as u8);
            let worked = with_range(ranges, &(0..4096), || {
                assert!(!inside.swap(true, Ordering::Relaxed));
                assert!(one.segment.equals(&two.segment), "the last one's copies are there");
                inside.store(false, Ordering::Relaxed);
                copy_to_all(&[own], &places);
            });
            done += u32::from(worked);
            favoured += u64::from(ranges.bias.enter().is_some());
        }
        favoured
    }

    #[test]
    fn a_range_that_is_held_is_nobody_elses_and_what_was_copied_is_seen() {
        let (ranges, inside) = (Ranges::with_patience((1, 1)), AtomicBool::new(false));
        // Large enough to be in no cache.
        let volume = MemoryVolume::create("test", 32 << 20, BlockSize::B512).unwrap();
        let favoured: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| copy_to_two(&ranges, &*volume, &inside))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(favoured > 0);
    }

    #[test]
    fn who_waits_for_those_who_hold_finds_none_that_saw_the_mark() {
        let (ranges, taken_away) = (Arc::new(Ranges::with_patience((1, 1))), Arc::new(AtomicBool::new(false)));
        let (marked, over) = (Arc::new(AtomicBool::new(true)), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _place = ShardSlot::claim();
                while !over.load(Ordering::Relaxed) {
                    with_range(&ranges, &(0..4096), || {
                        if marked.load(Ordering::SeqCst) {
                            (0..20).for_each(|_| assert!(!taken_away.load(Ordering::SeqCst), "it is still at work"));
                        }
                    });
                }
            });
            for _ in 0..3000 {
                let (ranges, marked, taken_away) = (Arc::clone(&ranges), Arc::clone(&marked), Arc::clone(&taken_away));
                let work = crate::legs::block_on(move |cx| {
                    Box::pin(async move {
                        marked.store(false, Ordering::SeqCst);
                        ranges.quiesce(cx, 0..4096).await;
                        taken_away.store(true, Ordering::SeqCst);
                        yield_now().await;
                        taken_away.store(false, Ordering::SeqCst);
                        marked.store(true, Ordering::SeqCst);
                    })
                });
                work.unwrap();
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
