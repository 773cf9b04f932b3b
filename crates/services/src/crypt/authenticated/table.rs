//! What is known of blocks and pages, in memory, page by page as they are needed.

use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::{
    layout::{BRANCHES, FAN, LEVELS},
    page::{Place, Record},
};
use crate::locks::Turn;

/// Nodes of a shelf.
const SHELF: usize = 4096;

/// Somebody changes the block.
const LOCKED: u64 = 1 << 63;
/// A write of the block failed: which of several records it has is not known.
const DOUBT: u64 = 1 << 62;
/// The tag is being exchanged, which takes some instructions.
const TURNING: u64 = 1 << 61;
const FLAGS: u64 = LOCKED | DOUBT | TURNING;

/// A record that any shard may look at while another one exchanges it.
#[derive(Debug, Default)]
struct Slot {
    version: AtomicU64,
    tag: [AtomicU64; 2],
}

/// A record as of one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) record: Record,
    /// Somebody is changing the block.
    pub(super) locked: bool,
    /// See [`DOUBT`].
    pub(super) doubtful: bool,
}

impl Slot {
    fn look(&self) -> Seen {
        loop {
            let word = self.version.load(Ordering::SeqCst);
            let halves = [0, 1].map(|half| self.tag[half].load(Ordering::SeqCst));
            if word & TURNING == 0 && self.version.load(Ordering::SeqCst) == word {
                let tag = (u128::from(halves[1]) << 64 | u128::from(halves[0])).to_le_bytes();
                let record = Record { version: word & !FLAGS, tag };
                return Seen { record, locked: word & LOCKED != 0, doubtful: word & DOUBT != 0 };
            }
            std::hint::spin_loop();
        }
    }

    /// Exchanges the record, and takes all marks from it.
    fn set(&self, record: Record) {
        let tag = u128::from_le_bytes(record.tag);
        self.version.fetch_or(TURNING, Ordering::SeqCst);
        self.tag[0].store(tag as u64, Ordering::SeqCst);
        self.tag[1].store((tag >> 64) as u64, Ordering::SeqCst);
        self.version.store(record.version & !FLAGS, Ordering::SeqCst);
    }
}

/// A page's records.
#[derive(Debug)]
pub(super) struct Node {
    slots: Box<[Slot]>,
    /// Its page was read.
    ready: AtomicBool,
    /// Who reads its page.
    pub(super) turn: Turn,
    /// It was changed since it was written last.
    dirty: AtomicBool,
    /// It is in its level's list of those.
    listed: AtomicBool,
    /// That list, and its number there; the root is in none.
    list: Option<(Arc<Changed>, u64)>,
    /// Which of its pages the root on the leg leads to; 0: none.
    pub(super) rooted: AtomicU64,
}

/// Numbers of the nodes of a level that were changed since they were saved, each once; some may have been forgotten since. Who saves looks at
/// these alone: of a large volume there are millions of others. A node takes the lock once for each save.
#[derive(Debug, Default)]
struct Changed(Mutex<Vec<u64>>);

impl Changed {
    fn lock(&self) -> MutexGuard<'_, Vec<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    fn new(slots: u64, list: Option<(Arc<Changed>, u64)>) -> Self {
        Self {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            ready: AtomicBool::new(false),
            turn: Turn::default(),
            dirty: AtomicBool::new(false),
            listed: AtomicBool::new(false),
            list,
            rooted: AtomicU64::new(0),
        }
    }

    /// Whether its page was read.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        // Acquire: pairs with the release of who has read it.
        self.ready.load(Ordering::Acquire)
    }

    pub(super) fn set_ready(&self) {
        self.ready.store(true, Ordering::Release);
    }

    /// It was changed, and is to be saved.
    pub(super) fn touch(&self) {
        // SeqCst: who finds it listed has said before that it is dirty, and who takes it from the list looks for that afterwards.
        self.dirty.store(true, Ordering::SeqCst);
        if let Some((list, number)) = &self.list
            // A look first: an exchange takes the cache line from whoever else writes there.
            && !self.listed.load(Ordering::SeqCst)
        {
            // Under the lock: who finds it listed may be the last writer that a save waits for, and that save must find it in the list then,
            // whoever is putting it there.
            let mut numbers = list.lock();
            if !self.listed.swap(true, Ordering::SeqCst) {
                numbers.push(*number);
            }
        }
    }

    fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::SeqCst)
    }

    /// Whether it was changed; from now on it counts as saved. (Who changes it does so before it says that.)
    pub(super) fn take_dirty(&self) -> bool {
        self.dirty.swap(false, Ordering::SeqCst)
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// What is known of a block or page.
    #[inline]
    pub(super) fn look(&self, at: usize) -> Seen {
        self.slots[at].look()
    }

    pub(super) fn record(&self, at: usize) -> Record {
        self.look(at).record
    }

    /// Exchanges a record, and gives its lock back. Whoever does so has locked it, or is alone.
    pub(super) fn set(&self, at: usize, record: Record) {
        self.slots[at].set(record);
    }

    /// Locks blocks, all or none of them.
    #[inline]
    pub(super) fn try_lock(&self, range: std::ops::Range<usize>) -> bool {
        let slots = &self.slots[range];
        let taken = slots.iter().position(|slot| slot.version.fetch_or(LOCKED, Ordering::SeqCst) & LOCKED != 0);
        if let Some(taken) = taken {
            slots[..taken].iter().for_each(Slot::unlock);
        }
        taken.is_none()
    }

    /// Gives locks back, with the records as they were.
    pub(super) fn unlock(&self, range: std::ops::Range<usize>) {
        self.slots[range].iter().for_each(Slot::unlock);
    }

    /// Whether somebody changes one of these blocks.
    #[inline]
    pub(super) fn is_locked(&self, range: std::ops::Range<usize>) -> bool {
        self.slots[range].iter().any(|slot| slot.version.load(Ordering::SeqCst) & LOCKED != 0)
    }

    /// Marks a block, which is locked, as one whose record is not known.
    pub(super) fn doubt(&self, at: usize) {
        self.slots[at].version.fetch_or(DOUBT, Ordering::SeqCst);
    }

    /// As if nothing had ever been there. It may stay listed: who takes it from the list finds that it is not dirty.
    pub(super) fn forget(&self) {
        self.slots.iter().for_each(|slot| slot.set(Record::FRESH));
        self.rooted.store(0, Ordering::SeqCst);
        self.dirty.store(false, Ordering::SeqCst);
        self.ready.store(false, Ordering::Release);
    }
}

impl Slot {
    fn unlock(&self) {
        self.version.fetch_and(!LOCKED, Ordering::SeqCst);
    }
}

type Shelf = OnceLock<Box<[OnceLock<Box<Node>>]>>;

/// All nodes of one level that were needed so far. They stay.
#[derive(Debug)]
struct Level {
    shelves: Box<[Shelf]>,
    changed: Arc<Changed>,
}

impl Level {
    fn new(nodes: u64) -> Self {
        let shelves = (0..nodes.div_ceil(SHELF as u64)).map(|_| OnceLock::new()).collect();
        Self { shelves, changed: Arc::default() }
    }

    #[inline]
    fn get(&self, number: u64) -> Option<&Node> {
        let (shelf, place) = (number as usize / SHELF, number as usize % SHELF);
        Some(&**self.shelves.get(shelf)?.get()?[place].get()?)
    }

    fn need(&self, number: u64) -> &Node {
        let (shelf, place) = (number as usize / SHELF, number as usize % SHELF);
        let shelf = self.shelves[shelf].get_or_init(|| (0..SHELF).map(|_| OnceLock::new()).collect());
        shelf[place].get_or_init(|| Box::new(Node::new(FAN, Some((Arc::clone(&self.changed), number)))))
    }

    fn all(&self) -> impl Iterator<Item = (u64, &Node)> {
        let shelves = (0..).zip(&self.shelves).filter_map(|(number, shelf)| Some((number, shelf.get()?)));
        shelves.flat_map(|(number, shelf): (u64, _)| {
            let nodes = (number * SHELF as u64..).zip(shelf);
            nodes.filter_map(|(number, node)| Some((number, &**node.get()?)))
        })
    }

    /// Takes all from the list of those that were changed.
    fn take_changed(&self) -> Vec<u64> {
        // Drained: the list keeps its room for those to come.
        let numbers: Vec<_> = self.changed.lock().drain(..).collect();
        let nodes = numbers.iter().filter_map(|number| self.get(*number));
        nodes.for_each(|node| node.listed.store(false, Ordering::SeqCst));
        numbers
    }
}

/// Nodes of a level that are to be saved, in their order. What is left when it is dropped stays to be saved.
pub(super) struct ToSave<'a> {
    table: &'a Table,
    level: usize,
    /// The last one is the next.
    left: Vec<u64>,
}

impl<'a> Iterator for ToSave<'a> {
    type Item = (Place, &'a Node);

    fn next(&mut self) -> Option<Self::Item> {
        let place = Place { level: self.level, number: self.left.pop()? };
        Some((place, self.table.need(place)))
    }
}

impl Drop for ToSave<'_> {
    fn drop(&mut self) {
        for (_, node) in self.by_ref().filter(|(_, node)| node.is_dirty()) {
            node.touch();
        }
    }
}

/// The tree.
#[derive(Debug)]
pub(super) struct Table {
    levels: [Level; LEVELS],
    /// The header's records, of the branches.
    pub(super) root: Node,
}

impl Default for Table {
    fn default() -> Self {
        let levels = [BRANCHES * FAN * FAN, BRANCHES * FAN, BRANCHES].map(Level::new);
        Self { levels, root: Node::new(BRANCHES, None) }
    }
}

impl Table {
    /// A node, if it was needed before.
    #[inline]
    pub(super) fn get(&self, place: Place) -> Option<&Node> {
        self.levels[place.level].get(place.number)
    }

    /// A node.
    pub(super) fn need(&self, place: Place) -> &Node {
        self.levels[place.level].need(place.number)
    }

    /// The node that has a page's record, and which of its records that is. It must have been needed before.
    pub(super) fn above(&self, place: Place) -> (&Node, usize) {
        if place.level + 1 == LEVELS {
            return (&self.root, place.number as usize);
        }
        let above = Place { level: place.level + 1, number: place.number / FAN };
        (self.need(above), (place.number % FAN) as usize)
    }

    /// All nodes of a level that were needed before.
    pub(super) fn all(&self, level: usize) -> impl Iterator<Item = (Place, &Node)> {
        self.levels[level].all().map(move |(number, node)| (Place { level, number }, node))
    }

    /// The nodes of a level before this one that were changed since they were saved; some may not have been. Others stay to be saved.
    pub(super) fn to_save(&self, level: usize, end: u64) -> ToSave<'_> {
        let mut left = self.levels[level].take_changed();
        left.sort_unstable_by(|one, other| other.cmp(one));
        // Dropped at once.
        let beyond = left.partition_point(|number| *number >= end);
        drop(ToSave { table: self, level, left: left.drain(..beyond).collect() });
        ToSave { table: self, level, left }
    }

    /// Whether anything may have been changed since it was written last.
    pub(super) fn is_dirty(&self) -> bool {
        self.root.is_dirty() || self.levels.iter().any(|level| !level.changed.lock().is_empty())
    }

    /// Forgets everything.
    pub(super) fn forget_all(&self) {
        for level in 0..LEVELS {
            self.all(level).for_each(|(_, node)| node.forget());
            self.levels[level].take_changed();
        }
        self.root.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_found_where_they_are() {
        let table = Table::default();
        let last = BRANCHES * FAN * FAN - 1;
        let place = |number| Place { level: 0, number };
        assert!(table.get(place(5)).is_none() && table.all(0).next().is_none());
        for number in [5, 5000, last] {
            table.need(place(number)).set(7, Record { version: number, ..Record::LOST });
            let (above, at) = table.above(place(number));
            above.set(at, Record { version: number, ..Record::LOST });
        }
        assert!(table.all(0).map(|(place, _)| place.number).eq([5, 5000, last]));
        assert!(table.all(0).all(|(place, node)| node.record(7).version == place.number));
        assert!(table.all(1).map(|(place, _)| place.number).eq([0, 5000 / FAN, last / FAN]));
        let (root, at) = table.above(Place { level: 2, number: BRANCHES - 1 });
        assert_eq!((root.len() as u64, at as u64), (BRANCHES, BRANCHES - 1));
    }

    /// Of a volume of which much is in memory, what is looked at is what was changed.
    #[test]
    fn who_saves_looks_at_what_was_changed_and_at_nothing_else() {
        let table = Table::default();
        let place = |number| Place { level: 0, number };
        let numbers = |end| table.to_save(0, end).map(|(place, node)| (place.number, node.take_dirty())).collect::<Vec<_>>();
        (0..10_000).for_each(|number| _ = table.need(place(number)));
        assert!(!table.is_dirty() && numbers(u64::MAX).is_empty());
        for number in [7000, 3, 7000, 9999, 500] {
            table.need(place(number)).touch();
        }
        // Beyond the volume's end.
        assert_eq!(numbers(9999), [(3, true), (500, true), (7000, true)]);
        assert!(table.is_dirty());
        assert_eq!(numbers(u64::MAX), [(9999, true)]);
        assert!(!table.is_dirty());

        // A save that fails: what it has not come to, and what it could not write.
        (0..5).for_each(|number| table.need(place(number)).touch());
        let mut some = table.to_save(0, u64::MAX);
        let (first, second) = (some.next().unwrap(), some.next().unwrap());
        assert!((first.0.number, second.0.number) == (0, 1) && first.1.take_dirty() && second.1.take_dirty());
        second.1.touch();
        drop(some);
        assert_eq!(numbers(u64::MAX), [1, 2, 3, 4].map(|number| (number, true)));

        // What was forgotten, and changed again.
        (0..3).for_each(|number| table.need(place(number)).touch());
        table.need(place(1)).forget();
        table.need(place(2)).forget();
        table.need(place(2)).touch();
        assert_eq!(numbers(u64::MAX), [(0, true), (1, false), (2, true)]);
        table.need(place(4)).touch();
        table.forget_all();
        assert!(!table.is_dirty());
        table.need(place(4)).touch();
        assert_eq!(numbers(u64::MAX), [(4, true)]);
    }

    #[test]
    fn locks_are_taken_together_or_not_at_all() {
        let node = Node::new(FAN, None);
        let record = |version| Record { version, tag: [version as u8; 16] };
        node.set(3, record(9));
        assert!(node.try_lock(2..5) && node.is_locked(4..5) && !node.is_locked(5..9));
        assert_eq!(node.look(3), Seen { record: record(9), locked: true, doubtful: false });
        assert!(!node.try_lock(0..3), "one of them is somebody's");
        assert!(!node.is_locked(0..2), "and the others were given back");
        node.doubt(3);
        node.unlock(2..5);
        assert_eq!(node.look(3), Seen { record: record(9), locked: false, doubtful: true });
        assert!(node.try_lock(3..4));
        node.set(3, record(10));
        assert_eq!(node.look(3), Seen { record: record(10), locked: false, doubtful: false });
    }

    #[test]
    fn a_record_is_seen_whole_while_others_exchange_it() {
        let node = Node::new(1, None);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for version in 0..20_000_u64 {
                    node.set(0, Record { version, tag: u128::from(version).wrapping_mul(1 << 64 | 1).to_le_bytes() });
                }
            });
            while node.record(0).version < 19_999 {
                let Record { version, tag } = node.record(0);
                assert_eq!(u128::from_le_bytes(tag), u128::from(version).wrapping_mul(1 << 64 | 1));
            }
        });
    }
}
