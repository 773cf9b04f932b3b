//! Which lines are where: looked at by every request, without a lock.
//!
//! ```text
//!   line ─ hash ─► bucket: 8 words, one cache line ─ tag matches ─► slot: line, valid, dirty, stored, turn
//! ```
//!
//! Only whoever has the policy puts lines in and takes them out; everybody looks. Who reads a slot's data without a lock notes its
//! `turn` before and compares it after: a slot that was given to another line meanwhile has another one.
//!
//! * `valid`: blocks whose newest data the slot has.
//! * `dirty`: those of them that the slow leg does not have. Set and cleared by who has the blocks' range locked.
//! * `stored`: blocks that the table on the fast leg may call dirty after a crash, and those that were written back since the slow leg was
//!   flushed. Cleared by who has the turn to commit. A line goes only when it has neither dirty nor stored blocks.
//! * `moved`: the last commit that had begun when blocks were written back: a later one has them flushed.
//! * `durable`: blocks that the table on the fast leg does call dirty, and goes on doing so while they are.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use super::policy::{HOTTEST, hash};

/// The number of no line.
const NONE: u64 = u64::MAX;
/// Words of a bucket.
const WAYS: usize = 8;
/// Slots for each bucket, so that few buckets overflow.
const LOAD: usize = 3;

/// A place for a line on the fast leg.
#[derive(Debug)]
pub(super) struct Slot {
    line: AtomicU64,
    pub(super) valid: AtomicU64,
    pub(super) dirty: AtomicU64,
    pub(super) stored: AtomicU64,
    pub(super) durable: AtomicU64,
    pub(super) moved: AtomicU64,
    turn: AtomicU32,
    heat: AtomicU8,
    /// Written since upkeep looked.
    pub(super) recent: AtomicBool,
}

/// Tags and slots: the tag in the upper half, the slot's number and one in the lower.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket([AtomicU64; WAYS]);

/// Where a line was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) slot: u32,
    turn: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    slots: Box<[Slot]>,
    buckets: Box<[Bucket]>,
    /// Pages of the table on the fast leg that must be stored: a bit for each slot's page, 64 to a word.
    needed: Box<[AtomicU64]>,
}

/// What is to be stored of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// The line's number and one; 0: none.
    pub(super) line: u64,
    pub(super) dirty: u64,
    pub(super) valid: u64,
}

impl Slot {
    fn new() -> Self {
        Self {
            line: AtomicU64::new(NONE),
            valid: AtomicU64::new(0),
            dirty: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            turn: AtomicU32::new(0),
            heat: AtomicU8::new(0),
            recent: AtomicBool::new(false),
        }
    }

    /// Whether nothing of it is only here, in memory or by the table on the fast leg.
    pub(super) fn is_clean(&self) -> bool {
        self.dirty.load(Ordering::SeqCst) | self.stored.load(Ordering::SeqCst) == 0
    }

    /// The line that is here.
    pub(super) fn line(&self) -> Option<u64> {
        Some(self.line.load(Ordering::Acquire)).filter(|line| *line != NONE)
    }
}

/// Bits that are set are cleared, or the other way round, without a write where nothing changes. Returns the bits before.
pub(super) fn set_bits(word: &AtomicU64, mask: u64) -> u64 {
    let before = word.load(Ordering::SeqCst);
    if before & mask == mask { before } else { word.fetch_or(mask, Ordering::SeqCst) }
}

/// Clears bits. Returns the bits before.
pub(super) fn clear_bits(word: &AtomicU64, mask: u64) -> u64 {
    let before = word.load(Ordering::SeqCst);
    if before & mask == 0 { before } else { word.fetch_and(!mask, Ordering::SeqCst) }
}

impl Table {
    /// An empty table for so many slots.
    pub(super) fn new(slots: u32) -> Self {
        let count = slots as usize;
        Self {
            slots: (0..count).map(|_| Slot::new()).collect(),
            buckets: (0..count.div_ceil(LOAD).max(1)).map(|_| Bucket::default()).collect(),
            needed: (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Bytes of memory that it takes for each line, roughly.
    pub(super) const BYTES_PER_LINE: usize = size_of::<Slot>() + size_of::<Bucket>().div_ceil(LOAD);

    /// Number of slots.
    pub(super) fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// A slot.
    #[inline]
    pub(super) fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    #[inline]
    fn bucket(&self, line: u64) -> (&Bucket, u64) {
        let hash = hash(line);
        // The upper half chooses the bucket, the lower is the tag.
        let at = ((hash >> 32) * self.buckets.len() as u64) >> 32;
        (&self.buckets[at as usize], hash << 32)
    }

    /// Where a line is.
    #[inline]
    pub(super) fn find(&self, line: u64) -> Option<Found> {
        let (bucket, tag) = self.bucket(line);
        for word in &bucket.0 {
            let word = word.load(Ordering::Acquire);
            let number = word as u32;
            if number == 0 || word & !u64::from(u32::MAX) != tag {
                continue;
            }
            let slot = self.slot(number - 1);
            // The turn before the line: should the line go in between, the turn has changed at the end.
            let turn = slot.turn.load(Ordering::Acquire);
            if slot.line.load(Ordering::Acquire) == line {
                return Some(Found { slot: number - 1, turn });
            }
        }
        None
    }

    /// Whether the line was there all the time since it was found.
    #[inline]
    pub(super) fn is_still(&self, found: Found) -> bool {
        // Closes the race with `take_out`, whose fence stands between its new turn and the next line's data: if any of those were read,
        // the new turn is seen here.
        fence(Ordering::Acquire);
        self.slot(found.slot).turn.load(Ordering::Relaxed) == found.turn
    }

    /// Counts a use. When it is hot already, nothing is written.
    #[inline]
    pub(super) fn warm(&self, slot: u32) {
        let heat = &self.slot(slot).heat;
        let now = heat.load(Ordering::Relaxed);
        if now < HOTTEST {
            heat.store(now + 1, Ordering::Relaxed);
        }
    }

    pub(super) fn heat(&self, slot: u32) -> u8 {
        self.slot(slot).heat.load(Ordering::Relaxed)
    }

    pub(super) fn set_heat(&self, slot: u32, heat: u8) {
        self.slot(slot).heat.store(heat, Ordering::Relaxed);
    }

    /// Puts a line into a slot that holds nothing; false when its bucket is full. Only for who has the policy.
    pub(super) fn put_in(&self, line: u64, slot: u32) -> bool {
        let (bucket, tag) = self.bucket(line);
        let Some(word) = bucket.0.iter().find(|word| word.load(Ordering::Relaxed) == 0) else { return false };
        let place = self.slot(slot);
        place.heat.store(0, Ordering::Relaxed);
        place.recent.store(false, Ordering::Relaxed);
        place.line.store(line, Ordering::Release);
        // Release: who finds it sees its line.
        word.store(tag | u64::from(slot + 1), Ordering::Release);
        true
    }

    /// Takes a line out of its slot. Only for who has the policy and the line's range, when nothing of it is dirty or stored.
    pub(super) fn take_out(&self, slot: u32) {
        let place = self.slot(slot);
        let Some(line) = place.line() else { return };
        let (bucket, tag) = self.bucket(line);
        let own = tag | u64::from(slot + 1);
        if let Some(word) = bucket.0.iter().find(|word| word.load(Ordering::Relaxed) == own) {
            word.store(0, Ordering::Release);
        }
        // The line before the turn: who has seen the new turn does not see the old line any more.
        place.line.store(NONE, Ordering::SeqCst);
        place.turn.fetch_add(1, Ordering::SeqCst);
        place.valid.store(0, Ordering::SeqCst);
        // See `is_still`: the new turn is there before the next line's data.
        fence(Ordering::SeqCst);
    }

    /// Forgets everything. No request is in flight.
    pub(super) fn clear(&self) {
        for slot in 0..self.len() {
            self.take_out(slot);
            let slot = self.slot(slot);
            slot.dirty.store(0, Ordering::SeqCst);
            slot.stored.store(0, Ordering::SeqCst);
            slot.durable.store(0, Ordering::SeqCst);
            slot.moved.store(0, Ordering::SeqCst);
        }
        self.needed.iter().for_each(|word| word.store(0, Ordering::SeqCst));
    }

    /// Says that a page of the table on the fast leg is not as it should be.
    pub(super) fn need(&self, page: u32) {
        set_bits(&self.needed[page as usize / 64], 1 << (page % 64));
    }

    /// The next page, from this one on, that must be stored; it need not any more.
    pub(super) fn take_needed(&self, from: u32) -> Option<u32> {
        let mut from = from;
        while let Some(word) = self.needed.get(from as usize / 64) {
            let first = from / 64 * 64;
            let set = word.load(Ordering::SeqCst) & (u64::MAX << (from % 64));
            if set != 0 {
                let page = first + set.trailing_zeros();
                word.fetch_and(!(1 << (page % 64)), Ordering::SeqCst);
                return Some(page);
            }
            from = first + 64;
        }
        None
    }

    /// What is to be stored of a slot. From now on its dirty blocks count as stored, because they may be as soon as this is written.
    pub(super) fn snapshot(&self, slot: u32) -> Entry {
        let place = self.slot(slot);
        loop {
            let turn = place.turn.load(Ordering::SeqCst);
            let Some(line) = place.line() else { return Entry::default() };
            let dirty = place.dirty.load(Ordering::SeqCst);
            set_bits(&place.stored, dirty);
            clear_bits(&place.durable, !dirty);
            if place.dirty.load(Ordering::SeqCst) & !dirty != 0 {
                // Somebody who made them dirty in between may have seen them durable, which they would not be after this.
                continue;
            }
            // Once more: what became clean before it counted as stored may be on its way out, and must not be called dirty.
            let dirty = dirty & place.dirty.load(Ordering::SeqCst);
            let valid = place.valid.load(Ordering::SeqCst);
            if place.turn.load(Ordering::SeqCst) == turn {
                return Entry { line: line + 1, dirty, valid };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_until_they_go() {
        let table = Table::new(1000);
        let mut there = Vec::new();
        for slot in 0..1000 {
            if table.put_in(u64::from(slot) * 977, slot) {
                there.push(slot);
            }
        }
        assert!(there.len() > 985, "few buckets overflow: {}", there.len());
        for slot in &there {
            assert_eq!(table.find(u64::from(*slot) * 977).map(|found| found.slot), Some(*slot));
        }
        assert!((1..100).all(|line| table.find(line).is_none()));
        let found = table.find(0).unwrap();
        assert!(table.is_still(found));
        table.take_out(0);
        assert!(!table.is_still(found) && table.find(0).is_none());
        assert!(table.put_in(0, 0));
        assert!(!table.is_still(found) && table.find(0).is_some());
        table.clear();
        assert!((0..1000).all(|line| table.find(line * 977).is_none()));
    }

    #[test]
    fn pages_are_needed_once() {
        let table = Table::new(1000);
        for page in [3, 64, 700] {
            table.need(page);
        }
        assert_eq!((table.take_needed(0), table.take_needed(4), table.take_needed(65)), (Some(3), Some(64), Some(700)));
        assert_eq!((table.take_needed(0), table.take_needed(5000)), (None, None));
    }

    #[test]
    fn what_became_clean_is_not_stored_as_dirty() {
        let table = Table::new(4);
        assert!(table.put_in(9, 2));
        assert_eq!(table.snapshot(1), Entry::default());
        set_bits(&table.slot(2).valid, 0b111);
        set_bits(&table.slot(2).dirty, 0b11);
        assert_eq!(table.snapshot(2), Entry { line: 10, dirty: 0b11, valid: 0b111 });
        assert_eq!(table.slot(2).stored.load(Ordering::Relaxed), 0b11);
        assert_eq!(clear_bits(&table.slot(2).dirty, 0b1), 0b11);
        assert_eq!(table.snapshot(2).dirty, 0b10);
        assert_eq!(table.slot(2).stored.load(Ordering::Relaxed), 0b11, "only a commit takes it back");
    }
}
