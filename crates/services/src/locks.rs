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

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use millrace_block::{IoOperation, TaskContext, yield_now};

/// Power of two of the bytes of a unit.
const UNIT_SHIFT: u32 = 12;
/// Words of the table; a power of two.
const WORDS: u64 = 4096;
/// Turns of the shard before a waiting task sleeps.
const TURNS: u32 = 16;
/// How long it then sleeps before it looks again.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// Waits until `look` finds something that a task of another shard may bring about.
pub(crate) async fn until<T>(cx: TaskContext<'_>, mut look: impl FnMut() -> Option<T>) -> T {
    let mut turns = 0;
    loop {
        if let Some(found) = look() {
            return found;
        }
        if turns < TURNS {
            turns += 1;
            yield_now().await;
        } else {
            cx.io(IoOperation::Sleep(LOOK_AGAIN)).await;
        }
    }
}

/// Lets one task at a time do something.
#[derive(Debug, Default)]
pub(crate) struct Turn(AtomicBool);

/// The task whose turn it is; dropping it ends the turn.
#[derive(Debug)]
pub(crate) struct Taken<'a>(&'a AtomicBool);

impl Turn {
    /// Takes the turn if it is nobody's.
    pub(crate) fn try_take(&self) -> Option<Taken<'_>> {
        // Acquire: pairs with the release of whose turn it was before.
        let free = self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free.then(|| Taken(&self.0))
    }

    /// Takes the turn, waiting for it.
    pub(crate) async fn take(&self, cx: TaskContext<'_>) -> Taken<'_> {
        until(cx, || self.try_take()).await
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
pub(crate) struct Ranges(Box<[AtomicU64]>);

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
        Self((0..WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    /// Locks a range of bytes if nothing in it is locked.
    ///
    /// SeqCst: whoever holds the lock looks next whether its range is marked; whoever takes a mark away looks next whether the
    /// range is locked ([`Self::quiesce`]). One of the two sees the other.
    #[inline]
    pub(crate) fn try_lock(&self, bytes: Range<u64>) -> Option<Locked<'_>> {
        let units = units(&bytes);
        for (at, (word, bits)) in spans(units.clone()).enumerate() {
            let before = self.0[word].fetch_or(bits, Ordering::SeqCst);
            if before & bits != 0 {
                self.0[word].fetch_and(!(bits & !before), Ordering::Release);
                for (word, bits) in spans(units).take(at) {
                    self.0[word].fetch_and(!bits, Ordering::Release);
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

    /// Waits until everything that was locked in the range when this was called has been unlocked.
    pub(crate) async fn quiesce(&self, cx: TaskContext<'_>, bytes: Range<u64>) {
        for (word, bits) in spans(units(&bytes)) {
            // SeqCst: see `try_lock`.
            let mut waiting = self.0[word].load(Ordering::SeqCst) & bits;
            until(cx, || {
                waiting &= self.0[word].load(Ordering::Acquire);
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
            self.ranges.0[word].fetch_and(!bits, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
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
            prop_assert!(ranges.0.iter().all(|word| word.load(Ordering::Relaxed) == 0), "nothing is left behind");
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
}
