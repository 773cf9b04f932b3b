//! What is known of blocks and pages, in memory, page by page as they are needed.

use std::sync::{
    OnceLock,
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
    /// Which of its pages the root on the leg leads to; 0: none.
    pub(super) rooted: AtomicU64,
}

impl Node {
    fn new(slots: u64) -> Self {
        Self {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            ready: AtomicBool::new(false),
            turn: Turn::default(),
            dirty: AtomicBool::new(false),
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
        self.dirty.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_dirty(&self) -> bool {
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

    /// As if nothing had ever been there.
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
struct Level(Box<[Shelf]>);

impl Level {
    fn new(nodes: u64) -> Self {
        Self((0..nodes.div_ceil(SHELF as u64)).map(|_| OnceLock::new()).collect())
    }

    #[inline]
    fn get(&self, number: u64) -> Option<&Node> {
        let (shelf, place) = (number as usize / SHELF, number as usize % SHELF);
        Some(&**self.0.get(shelf)?.get()?[place].get()?)
    }

    fn need(&self, number: u64) -> &Node {
        let (shelf, place) = (number as usize / SHELF, number as usize % SHELF);
        let shelf = self.0[shelf].get_or_init(|| (0..SHELF).map(|_| OnceLock::new()).collect());
        shelf[place].get_or_init(|| Box::new(Node::new(FAN)))
    }

    fn all(&self) -> impl Iterator<Item = (u64, &Node)> {
        let shelves = (0..).zip(&self.0).filter_map(|(number, shelf)| Some((number, shelf.get()?)));
        shelves.flat_map(|(number, shelf): (u64, _)| {
            let nodes = (number * SHELF as u64..).zip(shelf);
            nodes.filter_map(|(number, node)| Some((number, &**node.get()?)))
        })
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
        Self { levels, root: Node::new(BRANCHES) }
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

    /// Whether anything was changed since it was written last.
    pub(super) fn is_dirty(&self) -> bool {
        self.root.is_dirty() || (0..LEVELS).any(|level| self.all(level).any(|(_, node)| node.is_dirty()))
    }

    /// Forgets everything.
    pub(super) fn forget_all(&self) {
        for level in 0..LEVELS {
            self.all(level).for_each(|(_, node)| node.forget());
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

    #[test]
    fn locks_are_taken_together_or_not_at_all() {
        let node = Node::new(FAN);
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
        let node = Node::new(1);
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
