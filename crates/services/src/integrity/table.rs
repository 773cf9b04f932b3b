//! The entries of all blocks, in memory, group by group as they are needed.

use std::{
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
};

use super::{
    entry::{LOCKED, ZERO},
    page::BLOCKS,
};

/// Groups of a shelf.
const SHELF: usize = 4096;
/// Shelves: groups for 16 TiB of 512-byte blocks.
const SHELVES: usize = 16384;

/// Blocks that a table has room for.
pub(super) const MOST_BLOCKS: u64 = (SHELF * SHELVES) as u64 * BLOCKS;

/// Where a group is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// Its page was not read yet.
    Unread = 0,
    /// The page on the leg says everything. Nothing may be written before it says "open".
    Closed = 1,
    /// The page on the leg says "open".
    Open = 2,
    /// It is being closed: nothing new may be written.
    Closing = 3,
}

/// A group's entries.
pub(super) struct Group {
    entries: Box<[AtomicU64]>,
    state: AtomicU8,
    /// Of the page that counts on the leg, and is durable there.
    pub(super) sequence: AtomicU64,
    /// Somebody reads or writes its pages.
    busy: AtomicBool,
    /// Something was written since this was last looked at.
    pub(super) touched: AtomicBool,
    suspect: AtomicBool,
}

/// Whoever has it may read and write a group's pages.
pub(super) struct Claim<'a>(&'a Group);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire of who claims it next.
        self.0.busy.store(false, Ordering::Release);
    }
}

impl Group {
    fn new() -> Self {
        Self {
            entries: (0..BLOCKS).map(|_| AtomicU64::new(ZERO)).collect(),
            state: AtomicU8::new(State::Unread as u8),
            sequence: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            touched: AtomicBool::new(false),
            suspect: AtomicBool::new(false),
        }
    }

    /// A block of it could not be read, or is not what it should be.
    pub(super) fn suspect(&self) {
        self.suspect.store(true, Ordering::Relaxed);
    }

    /// Whether one that is known to be zeroes may not be.
    pub(super) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// Whether somebody reads or writes its pages.
    pub(super) fn is_claimed(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    pub(super) fn try_claim(&self) -> Option<Claim<'_>> {
        (!self.busy.swap(true, Ordering::Acquire)).then(|| Claim(self))
    }

    /// Its state. Sequentially consistent, as is [`Self::set_state`]: a writer locks an entry and then looks whether the group is
    /// still open; who closes it says so first and then looks for locked entries. One of the two sees the other.
    #[inline]
    pub(super) fn state(&self) -> State {
        match self.state.load(Ordering::SeqCst) {
            0 => State::Unread,
            1 => State::Closed,
            2 => State::Open,
            _ => State::Closing,
        }
    }

    pub(super) fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::SeqCst);
    }

    /// The entry of a block; `at` counts from the group's first.
    #[inline]
    pub(super) fn entry(&self, at: u64) -> u64 {
        self.entries[at as usize].load(Ordering::SeqCst)
    }

    /// Puts an entry in its place; whoever does so has locked it, or is alone.
    #[inline]
    pub(super) fn set(&self, at: u64, entry: u64) {
        self.entries[at as usize].store(entry, Ordering::SeqCst);
    }

    /// Notes the next entry of a block that the caller has locked, and still has.
    #[inline]
    pub(super) fn note(&self, at: u64, entry: u64) {
        self.entries[at as usize].store(entry | LOCKED, Ordering::Relaxed);
    }

    /// Gives locks back, with the entries that were [noted](Self::note). Nobody else changes an entry that is locked, so that it takes no
    /// operation with a lock of its own. Release: whoever finds the entry finds what it says of the blocks before it (a reader, a writer's
    /// lock, and who closes the group: all load with acquire at least); what went past the caches the caller has settled.
    #[inline]
    pub(super) fn unlock_noted(&self, at: u64, count: u64) {
        for entry in &self.entries[at as usize..(at + count) as usize] {
            entry.store(entry.load(Ordering::Relaxed) & !LOCKED, Ordering::Release);
        }
    }

    /// Locks the entries of `count` blocks from `at` on, as many as nobody else has, the lowest first. Returns how many.
    #[inline]
    pub(super) fn lock(&self, at: u64, count: u64) -> u64 {
        let entries = &self.entries[at as usize..(at + count) as usize];
        let taken = entries.iter().position(|entry| entry.fetch_or(LOCKED, Ordering::SeqCst) & LOCKED != 0);
        taken.map_or(count, |taken| taken as u64)
    }

    /// Gives locks back, with the entries as they were.
    pub(super) fn unlock(&self, at: u64, count: u64) {
        for entry in &self.entries[at as usize..(at + count) as usize] {
            entry.fetch_and(!LOCKED, Ordering::SeqCst);
        }
    }

    /// Whether somebody writes one of these blocks.
    pub(super) fn is_locked(&self, at: u64, count: u64) -> bool {
        self.entries[at as usize..(at + count) as usize].iter().any(|entry| entry.load(Ordering::SeqCst) & LOCKED != 0)
    }

    /// All entries.
    pub(super) fn snapshot(&self) -> Box<[u64]> {
        self.entries.iter().map(|entry| entry.load(Ordering::SeqCst)).collect()
    }

    /// As if it had never been written.
    pub(super) fn forget(&self, state: State) {
        for entry in &self.entries {
            entry.store(ZERO, Ordering::SeqCst);
        }
        self.sequence.store(0, Ordering::Relaxed);
        self.suspect.store(false, Ordering::Relaxed);
        self.set_state(state);
    }
}

type Shelf = OnceLock<Box<[OnceLock<Box<Group>>]>>;

/// All groups that were needed so far. They stay.
pub(super) struct Table(Box<[Shelf]>);

impl Default for Table {
    fn default() -> Self {
        Self((0..SHELVES).map(|_| OnceLock::new()).collect())
    }
}

impl Table {
    /// A group, if it was needed before.
    #[inline]
    pub(super) fn get(&self, group: u64) -> Option<&Group> {
        let (shelf, place) = (group as usize / SHELF, group as usize % SHELF);
        Some(&**self.0.get(shelf)?.get()?[place].get()?)
    }

    /// A group.
    ///
    /// # Panics
    /// When it lies beyond [`MOST_BLOCKS`].
    pub(super) fn need(&self, group: u64) -> &Group {
        let (shelf, place) = (group as usize / SHELF, group as usize % SHELF);
        let shelf = self.0[shelf].get_or_init(|| (0..SHELF).map(|_| OnceLock::new()).collect());
        shelf[place].get_or_init(|| Box::new(Group::new()))
    }

    /// The first group of these numbers that was needed before.
    pub(super) fn next(&self, numbers: Range<u64>) -> Option<(u64, &Group)> {
        let mut number = numbers.start as usize;
        while number < (numbers.end as usize).min(SHELF * SHELVES) {
            let Some(shelf) = self.0[number / SHELF].get() else {
                number = (number / SHELF + 1) * SHELF;
                continue;
            };
            if let Some(group) = shelf[number % SHELF].get() {
                return Some((number as u64, group));
            }
            number += 1;
        }
        None
    }

    /// All groups from this number on that were needed before.
    pub(super) fn from(&self, first: u64) -> impl Iterator<Item = (u64, &Group)> {
        let mut next = first;
        std::iter::from_fn(move || {
            let found = self.next(next..u64::MAX);
            next = found.as_ref().map_or(u64::MAX, |(number, _)| number + 1);
            found
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_where_they_are() {
        let table = Table::default();
        let last = (SHELF * SHELVES) as u64 - 1;
        assert!(table.get(5).is_none() && table.get(u64::MAX >> 20).is_none() && table.from(0).next().is_none());
        for number in [5, 5000, last] {
            table.need(number).set(7, number);
        }
        assert!(table.from(0).all(|(number, group)| group.entry(7) == number));
        assert!(table.from(0).map(|(number, _)| number).eq([5, 5000, last]));
        assert_eq!(table.next(6..5001).map(|(number, _)| number), Some(5000));
        assert!(table.next(6..5000).is_none() && table.from(last + 1).next().is_none());
    }

    #[test]
    fn locks_are_taken_from_the_lowest_on_and_given_back() {
        let group = Group::new();
        group.set(3, 0x4d);
        assert_eq!((group.lock(2, 3), group.is_locked(4, 1), group.entry(3)), (3, true, 0x4d | LOCKED));
        assert_eq!(group.lock(0, 5), 2, "up to the one that somebody has");
        group.unlock(0, 2);
        group.set(3, 78);
        assert_eq!(group.lock(3, 1), 1);
        group.unlock(2, 3);
        assert_eq!((group.is_locked(0, BLOCKS), group.entry(3)), (false, 78));
    }
}
