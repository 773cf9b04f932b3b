//! What is known of all blocks, in memory, group by group as they are needed.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use super::page::{BLOCKS, Candidate, Entry};

/// Groups of a shelf.
const SHELF: usize = 4096;
/// Shelves: groups for 5 TiB of 512-byte blocks, 40 TiB of larger ones.
const SHELVES: usize = 16_384;

/// Blocks that a table has room for.
pub(super) const MOST_BLOCKS: u64 = (SHELF * SHELVES) as u64 * BLOCKS;

/// Somebody changes the block.
const LOCKED: u32 = 1 << 31;

/// The slot of the newest candidate.
const NEWEST: u32 = 1;
/// A write of the block failed: whether its data are the newest is not known.
const DOUBT: u32 = 1 << 7;
/// Above this, a mark counts changes of slots: a mark that is the same as before says that the slots are.
const CHANGE: u32 = 1 << 8;

/// Where the kind of a slot's candidate is in a mark; kind 0 is an empty slot.
fn kind_shift(slot: usize) -> u32 {
    1 + 2 * slot as u32
}

/// One block: two slots for candidates, and a mark that says what they hold.
#[derive(Debug, Default)]
struct Block {
    /// Counts changes; with [`LOCKED`].
    version: AtomicU32,
    mark: AtomicU32,
    tags: [AtomicU64; 2],
    checksums: [AtomicU32; 2],
}

impl Block {
    fn candidate(&self, mark: u32, slot: usize) -> Option<Candidate> {
        let (tag, checksum) = (self.tags[slot].load(Ordering::SeqCst), self.checksums[slot].load(Ordering::SeqCst));
        Candidate::of((mark >> kind_shift(slot)) as u8, tag, checksum)
    }

    /// What is known, as of one moment.
    fn entry(&self) -> (Entry, u32) {
        loop {
            let mark = self.mark.load(Ordering::SeqCst);
            let newest = (mark & NEWEST) as usize;
            let entry = Entry {
                newest: self.candidate(mark, newest).unwrap_or(Candidate::Absent),
                other: self.candidate(mark, 1 - newest),
            };
            if self.mark.load(Ordering::SeqCst) == mark {
                return (entry, mark);
            }
        }
    }

    /// Fills a slot that the mark calls empty; returns its kind for the mark.
    fn put(&self, slot: usize, candidate: Candidate) -> u32 {
        let (kind, tag, checksum) = candidate.parts();
        self.tags[slot].store(tag, Ordering::SeqCst);
        self.checksums[slot].store(checksum, Ordering::SeqCst);
        u32::from(kind) << kind_shift(slot)
    }
}

/// A group's blocks.
pub(super) struct Group {
    blocks: Box<[Block]>,
    /// Its pages were read.
    ready: AtomicBool,
    /// Somebody reads or writes its pages.
    busy: AtomicBool,
    /// Its page has more than the newest metadata, or could have fewer.
    pub(super) touched: AtomicBool,
    /// Of the page that counts on the leg, and is durable there.
    pub(super) sequence: AtomicU64,
    /// Counts those who need a new page.
    pub(super) wanted: AtomicU64,
    /// Up to whom there is one.
    pub(super) done: AtomicU64,
}

/// Whoever has it may read and write a group's pages.
pub(super) struct Claim<'a>(&'a Group);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire of who claims it next.
        self.0.busy.store(false, Ordering::Release);
    }
}

impl Default for Group {
    fn default() -> Self {
        let group = Self {
            blocks: (0..BLOCKS).map(|_| Block::default()).collect(),
            ready: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            touched: AtomicBool::new(false),
            sequence: AtomicU64::new(0),
            wanted: AtomicU64::new(0),
            done: AtomicU64::new(0),
        };
        group.forget();
        group
    }
}

impl Group {
    fn block(&self, at: u64) -> &Block {
        &self.blocks[at as usize]
    }

    fn range(&self, at: u64, count: u64) -> &[Block] {
        &self.blocks[at as usize..(at + count) as usize]
    }

    /// Whether its pages were read.
    pub(super) fn is_ready(&self) -> bool {
        // Acquire: pairs with the release of who has read them.
        self.ready.load(Ordering::Acquire)
    }

    pub(super) fn set_ready(&self) {
        self.ready.store(true, Ordering::Release);
    }

    /// Whether somebody reads or writes its pages.
    pub(super) fn is_claimed(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    pub(super) fn try_claim(&self) -> Option<Claim<'_>> {
        (!self.busy.swap(true, Ordering::Acquire)).then(|| Claim(self))
    }

    /// Locks `count` blocks from `at` on, or none of them.
    pub(super) fn try_lock(&self, at: u64, count: u64) -> bool {
        let blocks = self.range(at, count);
        let taken = blocks.iter().position(|block| block.version.fetch_or(LOCKED, Ordering::SeqCst) & LOCKED != 0);
        if let Some(taken) = taken {
            for block in &blocks[..taken] {
                block.version.fetch_and(!LOCKED, Ordering::SeqCst);
            }
        }
        taken.is_none()
    }

    /// Gives locked blocks back, changed.
    pub(super) fn unlock(&self, at: u64, count: u64) {
        for block in self.range(at, count) {
            let next = (block.version.load(Ordering::SeqCst) & !LOCKED).wrapping_add(1) & !LOCKED;
            block.version.store(next, Ordering::SeqCst);
        }
    }

    /// A number that is another one when any of these blocks has changed since; `None` while one is being changed.
    pub(super) fn version(&self, at: u64, count: u64) -> Option<u64> {
        self.range(at, count).iter().try_fold(0, |sum, block| {
            let version = block.version.load(Ordering::SeqCst);
            (version & LOCKED == 0).then_some(sum + u64::from(version))
        })
    }

    /// What is known of a block.
    pub(super) fn entry(&self, at: u64) -> Entry {
        self.block(at).entry().0
    }

    /// What a page says of a block: its newest metadata alone, when `settled` (all data are durable) and there is no doubt.
    pub(super) fn entry_for_page(&self, at: u64, settled: bool) -> Entry {
        let (entry, mark) = self.block(at).entry();
        match entry.newest {
            _ if !settled || mark & DOUBT != 0 => entry,
            Candidate::Value { tag: super::page::NO_TAG, .. } => Entry::FRESH,
            newest => Entry { newest, other: None },
        }
    }

    /// Whether these blocks have no metadata, and no page says otherwise.
    pub(super) fn is_plain(&self, at: u64, count: u64) -> bool {
        (at..at + count).all(|at| self.entry(at) == Entry::FRESH)
    }

    /// Whether it is not known if the data of a block are the newest.
    pub(super) fn is_doubtful(&self, at: u64) -> bool {
        self.block(at).mark.load(Ordering::SeqCst) & DOUBT != 0
    }

    /// The blocks' data are about to become others: what they were may still be what the leg has.
    ///
    /// Whoever calls this, or what follows, has the block locked, or is alone.
    pub(super) fn offer(&self, at: u64, candidate: Candidate) {
        let block = self.block(at);
        let mark = block.mark.load(Ordering::SeqCst);
        let slot = 1 - (mark & NEWEST) as usize;
        let kept = (mark & !(CHANGE - 1)).wrapping_add(CHANGE) | mark & 3 << kind_shift(1 - slot);
        // Empty while it changes: a page that is made now has what was the newest.
        block.mark.store(kept | (1 - slot) as u32, Ordering::SeqCst);
        let kind = block.put(slot, candidate);
        block.mark.store(kept | kind | slot as u32, Ordering::SeqCst);
    }

    /// What was offered came to nothing: no data were written.
    pub(super) fn withdraw(&self, at: u64) {
        self.block(at).mark.fetch_xor(NEWEST, Ordering::SeqCst);
    }

    /// Whether what was offered came to pass is not known.
    pub(super) fn doubt(&self, at: u64) {
        self.block(at).mark.fetch_or(DOUBT, Ordering::SeqCst);
    }

    /// Nothing can be known of the block's data: they are called the newest.
    pub(super) fn trust(&self, at: u64) {
        self.block(at).mark.fetch_and(!DOUBT, Ordering::SeqCst);
    }

    /// The data of a block have this checksum: its metadata are those that belong to them.
    pub(super) fn resolve(&self, at: u64, data: u32) {
        let block = self.block(at);
        let (entry, mark) = block.entry();
        let other = !entry.newest.belongs(data) && entry.other.is_some_and(|other| other.belongs(data));
        block.mark.store((mark ^ u32::from(other)) & !DOUBT, Ordering::SeqCst);
    }

    /// Takes what pages say of a block.
    pub(super) fn set(&self, at: u64, entry: Entry) {
        let block = self.block(at);
        block.mark.store(0, Ordering::SeqCst);
        let kinds = block.put(0, entry.newest) | entry.other.map_or(0, |other| block.put(1, other));
        block.mark.store(kinds, Ordering::SeqCst);
    }

    /// As if it had never been written.
    pub(super) fn forget(&self) {
        (0..BLOCKS).for_each(|at| self.set(at, Entry::FRESH));
        self.sequence.store(0, Ordering::Relaxed);
        self.touched.store(false, Ordering::Relaxed);
        self.ready.store(false, Ordering::Release);
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
        shelf[place].get_or_init(Box::default)
    }

    /// All groups that were needed before, with their numbers.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, &Group)> {
        let shelves = (0..).zip(&self.0).filter_map(|(number, shelf)| Some((number, shelf.get()?)));
        shelves.flat_map(|(number, shelf): (u64, _)| {
            let groups = (number * SHELF as u64..).zip(shelf);
            groups.filter_map(|(number, group)| Some((number, &**group.get()?)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(tag: u64) -> Candidate {
        Candidate::Value { tag, checksum: tag as u32 * 3 }
    }

    #[test]
    fn groups_are_found_where_they_are() {
        let table = Table::default();
        let last = (SHELF * SHELVES) as u64 - 1;
        assert!(table.get(5).is_none() && table.get(u64::MAX >> 20).is_none() && table.all().next().is_none());
        for number in [5, 5000, last] {
            table.need(number).offer(7, value(number));
        }
        assert!(table.all().all(|(number, group)| group.entry(7).newest == value(number)));
        assert!(table.all().map(|(number, _)| number).eq([5, 5000, last]));
        assert!(table.get(5).is_some() && table.get(6).is_none());
    }

    #[test]
    fn locks_are_taken_together_or_not_at_all_and_every_change_is_seen() {
        let group = Group::default();
        let before = group.version(0, BLOCKS).unwrap();
        assert!(group.try_lock(2, 3));
        assert_eq!((group.version(4, 1), group.version(0, 2), group.version(5, 9)), (None, Some(0), Some(0)));
        assert!(!group.try_lock(0, 3), "one of them is somebody's");
        assert_eq!(group.version(0, 2), Some(0), "and the others were given back");
        group.unlock(2, 3);
        assert_eq!(group.version(0, BLOCKS), Some(before + 3));
    }

    #[test]
    fn a_block_has_its_newest_metadata_and_those_before() {
        let group = Group::default();
        let entry = |newest, other| Entry { newest, other };
        assert!(group.is_plain(0, BLOCKS));
        group.offer(9, value(1));
        assert_eq!(group.entry(9), entry(value(1), Some(Candidate::Absent)));
        group.offer(9, value(2));
        assert_eq!(group.entry(9), entry(value(2), Some(value(1))));
        group.withdraw(9);
        assert_eq!(group.entry(9), entry(value(1), Some(value(2))), "a page may have what was offered");
        assert_eq!(group.entry_for_page(9, true), entry(value(1), None));
        group.offer(9, value(4));
        group.doubt(9);
        assert_eq!(group.entry_for_page(9, true), entry(value(4), Some(value(1))), "not while there is doubt");
        group.resolve(9, 3);
        assert_eq!((group.entry(9).newest, group.is_doubtful(9)), (value(1), false));
        group.resolve(9, 77);
        assert_eq!(group.entry(9).newest, value(1), "rotten data are nobody's");
        group.offer(9, Candidate::Value { tag: super::super::page::NO_TAG, checksum: 5 });
        assert_eq!(group.entry_for_page(9, true), Entry::FRESH);
        assert!(!group.is_plain(9, 1) && group.is_plain(0, 9) && group.is_plain(10, BLOCKS - 10));
    }
}
