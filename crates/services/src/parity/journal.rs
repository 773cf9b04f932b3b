//! The journal: rows that are about to be written in part, as they will be. docs/formats/parity.md.
//!
//! ```text
//!   rows whose P is on leg 1:  ring 1 ─► its slots lie on leg 1 (and, with Q, once more on the leg after it)
//!   ring:   void … tail ……………………… head          numbers only grow; number n is in slot n % slots
//!                   │ on their legs, or │ free
//!                   │ not yet durable   │
//! ```
//!
//! An entry says what every part that changes will hold, and is durable before any of them is written. After a crash the entries
//! from the tail on are carried out again, in their order. The tail moves when everything before it is durable in its place; each
//! entry says where it was. `void` is how far the legs themselves know that entries are of no more use.
//!
//! A slot is overwritten only when the legs know, by something else than what it holds, that all before its entry are void: else a
//! crash in the middle could leave an older entry of the same rows as the last one.
//!
//! Rows of one ring have their parity on the same legs, so that entries of one row never lie in two rings: their order is that of
//! the ring, on each leg by itself.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering, fence},
    },
};

use crc_fast::{CrcAlgorithm, Digest};
use millrace_block::{BlockError, Volume};
use millrace_memory::Segment;

use super::Layout;
use crate::{
    legs::{self, Leg, Stores},
    members::state::Id,
    record::Region,
    service::ServiceError,
};

/// Bytes of a slot.
pub(super) const SLOT: u64 = 64 << 10;
/// Of them, bytes before the data.
pub(super) const HEADER: usize = 4096;
/// Of them, bytes that are used.
const USED: usize = 80;
const MAGIC: [u8; 8] = *b"MPJOURNL";
const VERSION: u32 = 1;
/// What an error says that is of a leg which cannot be spared.
pub(super) const HAS_TO_STAY: &str = "use the journal of";
/// Bytes of the record that says how far entries are void.
pub(super) const VOID_RECORD: u64 = 8192;

/// What an entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) set: Id,
    pub(super) ring: u32,
    pub(super) number: u64,
    /// The ring's tail when it was written.
    pub(super) tail: u64,
    pub(super) stripe: u64,
    /// First byte of the rows within their chunks.
    pub(super) row: u32,
    /// Bytes of each part.
    pub(super) len: u32,
    /// Data parts that it has.
    pub(super) first: u32,
    pub(super) count: u32,
    /// Parity parts after them.
    pub(super) parity: u32,
}

fn feed(digest: &mut Digest, segment: &Segment) {
    let mut piece = [0; 2048];
    for at in (0..segment.len()).step_by(piece.len()) {
        let piece = &mut piece[..(segment.len() - at).min(2048)];
        segment.read_at(at, piece);
        digest.update(piece);
    }
}

impl Entry {
    /// Its header, without the checksum.
    fn bytes(&self) -> [u8; USED] {
        let mut bytes = [0; USED];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&[0; 4]);
        put(&self.set);
        put(&self.number.to_le_bytes());
        put(&self.tail.to_le_bytes());
        put(&self.stripe.to_le_bytes());
        for number in [self.ring, self.row, self.len, self.first, self.count, self.parity] {
            put(&number.to_le_bytes());
        }
        bytes
    }

    /// Writes the header for these data, which the parts follow on the leg in this order.
    pub(super) fn write(&self, header: &Segment, parts: &[Segment]) {
        let mut bytes = self.bytes();
        let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
        digest.update(&bytes);
        for part in parts {
            feed(&mut digest, part);
        }
        bytes[12..16].copy_from_slice(&(digest.finalize() as u32).to_le_bytes());
        header.fill(0);
        header.write_at(0, &bytes);
    }

    fn decode(header: &[u8]) -> Option<(Self, u32)> {
        let word = |at: usize| Some(u32::from_le_bytes(header.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_le_bytes(header.get(at..at + 8)?.try_into().ok()?));
        if header.get(..8) != Some(&MAGIC[..]) || word(8)? != VERSION {
            return None;
        }
        let entry = Self {
            set: header.get(16..32)?.try_into().ok()?,
            number: long(32)?,
            tail: long(40)?,
            stripe: long(48)?,
            ring: word(56)?,
            row: word(60)?,
            len: word(64)?,
            first: word(68)?,
            count: word(72)?,
            parity: word(76)?,
        };
        Some((entry, word(12)?))
    }

    /// Whether it can be of this volume, of so many bytes on each leg.
    fn fits(&self, layout: &Layout, leg_bytes: u64) -> bool {
        let within = u64::from(self.row) + u64::from(self.len) <= layout.chunk && self.stripe < leg_bytes / layout.chunk;
        let parts = u64::from(self.count) + u64::from(self.parity);
        let data = u64::from(self.first) + u64::from(self.count) <= layout.data() as u64;
        let room = parts * u64::from(self.len) <= SLOT - HEADER as u64;
        within && data && room && self.parity as usize == layout.parity && self.len > 0 && self.len.is_multiple_of(512)
    }

    fn payload(&self) -> usize {
        (self.count + self.parity) as usize * self.len as usize
    }

    /// The parts it has, with their numbers in the stripe.
    pub(super) fn parts(&self, layout: &Layout) -> impl Iterator<Item = usize> + use<> {
        let (first, count, data) = (self.first as usize, self.count as usize, layout.data());
        (first..first + count).chain(data..data + layout.parity)
    }
}

/// Of a slot that is being taken: more than of any entry.
const TAKING: u64 = u64::MAX;

/// A slot in memory.
#[derive(Debug, Default)]
struct Slot {
    /// Twice the number of its entry, and one more when that is in its place on all legs; or [`TAKING`].
    state: AtomicU64,
    /// Bytes of the legs that it is about.
    start: AtomicU64,
    end: AtomicU64,
}

/// The entries of rows that have their parity on the same legs.
#[derive(Debug)]
pub(super) struct Ring {
    head: AtomicU64,
    tail: AtomicU64,
    void: AtomicU64,
    known: AtomicU64,
    slots: Box<[Slot]>,
}

impl Ring {
    fn new(slots: u64) -> Self {
        let slots = (0..slots).map(|_| Slot::default()).collect();
        let [head, tail, void, known] = [const { AtomicU64::new(1) }; 4];
        Self { head, tail, void, known, slots }
    }

    fn slot(&self, number: u64) -> &Slot {
        &self.slots[(number % self.slots.len() as u64) as usize]
    }

    /// Begins with nothing in it; the next entry has this number.
    fn start(&self, next: u64) {
        self.slots.iter().for_each(|slot| slot.state.store(0, Ordering::Relaxed));
        for place in [&self.tail, &self.void, &self.known, &self.head] {
            place.store(next, Ordering::Release);
        }
    }

    /// A number for an entry about these bytes of the legs, if there is room. Whoever has one writes the entry, then the parts,
    /// then calls [`Self::done`].
    pub(super) fn try_take(&self, bytes: &Range<u64>) -> Option<u64> {
        let mut number = self.head.load(Ordering::Relaxed);
        loop {
            // Acquire: pairs with the release of whoever moved the tail, after the slot's last use. It may have passed the number, which is
            // then not the next one any more.
            let taken = number.saturating_sub(self.tail.load(Ordering::Acquire));
            if taken >= self.slots.len() as u64 || !self.is_told(number) {
                return None;
            }
            match self.head.compare_exchange_weak(number, number + 1, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(found) => number = found,
            }
        }
        let slot = self.slot(number);
        // Whoever reads the new bytes must not take them for those of the entry before, which may still be on its leg.
        slot.state.store(TAKING, Ordering::Relaxed);
        // Release: pairs with the fence of `is_live_of`.
        fence(Ordering::Release);
        slot.start.store(bytes.start, Ordering::Relaxed);
        slot.end.store(bytes.end, Ordering::Relaxed);
        // Release: pairs with the acquire of who looks for what is on its way.
        slot.state.store(number * 2, Ordering::Release);
        Some(number)
    }

    /// Whether the slot's last entry may go. A crash while it is overwritten leaves neither; those before it, which may still be in
    /// their slots because they are overwritten in any order, must not be carried out then: something else on the legs must
    /// say that they are void. That is the record, or an entry with a later tail, which is not the one that goes.
    fn is_told(&self, number: u64) -> bool {
        let slots = self.slots.len() as u64;
        number <= self.void.load(Ordering::Acquire) + slots || number < self.known.load(Ordering::Acquire) + slots
    }

    /// Whether there would be room if the legs knew the tail.
    pub(super) fn lacks_record(&self) -> bool {
        // In this order: the tail moves on meanwhile, but not past a head that is looked at later.
        let (tail, head) = (self.tail(), self.head());
        head - tail < self.slots.len() as u64 && !self.is_told(head)
    }

    /// An entry that says this tail is durable on all its legs.
    pub(super) fn told(&self, tail: u64) {
        self.known.fetch_max(tail, Ordering::Release);
    }

    /// The tail, for an entry.
    pub(super) fn tail(&self) -> u64 {
        self.tail.load(Ordering::Acquire)
    }

    /// The entry's parts have been written (and may not be durable).
    pub(super) fn done(&self, number: u64) {
        self.slot(number).state.store(number * 2 + 1, Ordering::Release);
    }

    /// The first number whose parts have not all been written.
    pub(super) fn written(&self) -> u64 {
        let (mut number, head) = (self.tail.load(Ordering::Acquire), self.head.load(Ordering::Acquire));
        while number < head && self.slot(number).state.load(Ordering::Acquire) == number * 2 + 1 {
            number += 1;
        }
        number
    }

    /// What was written before this number is durable.
    pub(super) fn advance(&self, number: u64) {
        self.tail.fetch_max(number, Ordering::Release);
    }

    /// The next number.
    pub(super) fn head(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    /// Whether everything has been written.
    pub(super) fn is_quiet(&self) -> bool {
        self.written() == self.head()
    }

    /// Everything is durable and void.
    pub(super) fn restart(&self) {
        self.start(self.head());
    }

    /// Whether the legs know that every entry is void.
    pub(super) fn is_void(&self) -> bool {
        self.void.load(Ordering::Acquire) == self.head()
    }

    /// The legs know it of everything before this number.
    pub(super) fn voided(&self, number: u64) {
        self.void.fetch_max(number, Ordering::Release);
    }

    /// Whether some leg may have an entry that touches these bytes of the legs and would be carried out again after a crash. The
    /// caller has the bytes locked, so that no new one comes.
    pub(super) fn is_live(&self, bytes: &Range<u64>) -> bool {
        self.is_live_of(self.head(), bytes)
    }

    /// The same of the entries before this head, which may have moved on.
    fn is_live_of(&self, head: u64, bytes: &Range<u64>) -> bool {
        let from = self.void.load(Ordering::Acquire).max(self.known.load(Ordering::Acquire));
        // An entry whose slot is about to be overwritten is not known here any more, and may still be on its leg.
        head.saturating_sub(from) > self.slots.len() as u64
            || (from..head).any(|number| {
                let slot = self.slot(number);
                let state = slot.state.load(Ordering::Acquire);
                let meets = slot.start.load(Ordering::Relaxed) < bytes.end && bytes.start < slot.end.load(Ordering::Relaxed);
                // Acquire: pairs with the fence of who takes the slot. Bytes of a later entry, and the state is no longer this one's.
                fence(Ordering::Acquire);
                slot.state.load(Ordering::Relaxed) / 2 > number || (state / 2 == number && meets)
            })
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Journal {
    layout: Layout,
    rings: Box<[Ring]>,
    slots: u64,
    /// Stores so far of the record that says what is void, for each leg.
    generations: Box<[AtomicU64]>,
    /// Tells the entries from those of other volumes: two halves.
    set: [AtomicU64; 2],
}

/// The headers in a leg's slots, copy after copy.
type Headers = Vec<Result<Vec<u8>, ServiceError>>;

/// What a leg has of a ring.
#[derive(Debug, Default)]
struct Found {
    entries: Vec<(Entry, Vec<u8>)>,
    void: u64,
}

impl Journal {
    pub(super) fn new(layout: Layout, bytes: u64) -> Self {
        let slots = bytes / SLOT;
        let rings = (0..layout.legs).map(|_| Ring::new(slots)).collect();
        Self {
            layout,
            rings,
            slots,
            generations: (0..layout.legs).map(|_| AtomicU64::new(0)).collect(),
            set: Default::default(),
        }
    }

    /// What entries are told from others by. Set before requests come.
    pub(super) fn name(&self, set: Id) {
        for (half, bytes) in self.set.iter().zip(set.chunks_exact(8)) {
            half.store(u64::from_le_bytes(bytes.try_into().expect("eight bytes")), Ordering::Relaxed);
        }
    }

    /// See [`Self::name`].
    pub(super) fn set(&self) -> Id {
        let mut set = [0; 16];
        for (bytes, half) in set.chunks_exact_mut(8).zip(&self.set) {
            bytes.copy_from_slice(&half.load(Ordering::Relaxed).to_le_bytes());
        }
        set
    }

    /// Bytes of it on a leg.
    pub(super) fn bytes(layout: &Layout, bytes: u64) -> u64 {
        VOID_RECORD + layout.parity as u64 * bytes
    }

    pub(super) fn rings(&self) -> &[Ring] {
        &self.rings
    }

    /// The ring of a stripe.
    pub(super) fn ring_of(&self, stripe: u64) -> usize {
        self.layout.leg(stripe, self.layout.data())
    }

    /// The ring whose `copy`-th copy is on a leg.
    fn ring_on(&self, leg: usize, copy: usize) -> usize {
        (leg + self.layout.legs - copy) % self.layout.legs
    }

    /// Where a slot is, from the beginning of the journal on a leg.
    pub(super) fn place(&self, copy: usize, number: u64) -> u64 {
        VOID_RECORD + (copy as u64 * self.slots + number % self.slots) * SLOT
    }

    fn void_region(offset: u64) -> Region {
        Region { magic: *b"MPJNVOID", version: 1, offset, len: VOID_RECORD }
    }

    /// What a leg is told: entries before these numbers are void.
    fn void_content(&self, leg: usize, number: impl Fn(usize) -> u64) -> Vec<u8> {
        let copies = (0..self.layout.parity).map(|copy| number(self.ring_on(leg, copy)));
        copies.flat_map(u64::to_le_bytes).collect()
    }

    /// The record for a leg, its number, and its content: everything before these numbers, one for each ring, is void.
    pub(super) fn void_record(&self, leg: usize, journal: u64, before: &[u64]) -> (Region, u64, Vec<u8>) {
        let generation = self.generations[leg].fetch_add(1, Ordering::Relaxed) + 1;
        (Self::void_region(journal), generation, self.void_content(leg, |ring| before[ring]))
    }

    /// Makes a leg that comes back forget all its entries, durably. Numbers do not tell them from new ones: a ring that no leg was read
    /// of begins anew. Nobody reads the leg's journal before this has returned, so that its parts may become durable in any order.
    pub(super) fn forget(&self, leg: usize, volume: &Leg, journal: u64) -> Result<(), ServiceError> {
        let stores = self.voiding_stores(leg, volume, journal);
        let (on, len) = (Arc::clone(volume), self.layout.parity as u64 * self.slots * SLOT);
        let forgotten = legs::block_on(move |cx| {
            Box::pin(async move {
                for (offset, record) in stores {
                    legs::write_bytes(cx, &*on, offset, record).await?;
                }
                legs::erase(cx, &*on, journal + VOID_RECORD, len).await
            })
        });
        forgotten?.map_err(|source| ServiceError::Leg {
            what: "erase the journal of",
            leg: volume.name().to_owned(),
            source,
        })
    }

    /// What tells a leg that everything it has is void, in both copies.
    pub(super) fn voiding_stores(&self, leg: usize, volume: &Leg, journal: u64) -> Stores {
        let region = Self::void_region(journal);
        let before = region.load(volume).ok().flatten().map_or(0, |found| found.generation);
        self.generations[leg].fetch_max(before, Ordering::Relaxed);
        let content = self.void_content(leg, |ring| self.rings[ring].head());
        let generation = self.generations[leg].fetch_add(2, Ordering::Relaxed);
        vec![region.copy(generation + 1, &content), region.copy(generation + 2, &content)]
    }

    /// Reads what is in the slots of these legs, each with where its journal begins: side by side, for in a change requests wait for it.
    fn headers(&self, on: &[(usize, Leg, u64)]) -> Result<Vec<Headers>, ServiceError> {
        let slots = (0..self.layout.parity).flat_map(|copy| (0..self.slots).map(move |slot| self.place(copy, slot)));
        let places = slots.flat_map(|place| on.iter().map(move |(_, leg, journal)| (Arc::clone(leg), journal + place)));
        let mut all: Vec<Headers> = on.iter().map(|_| Vec::new()).collect();
        for (number, header) in legs::read_beginnings(places, HEADER, USED)?.into_iter().enumerate() {
            all[number % on.len()].push(header);
        }
        Ok(all)
    }

    /// Looks what a leg has; and, where it has entries, what is wrong with the record of which of them are void.
    fn look(
        &self,
        leg: usize,
        volume: &Leg,
        journal: u64,
        headers: Headers,
        (set, bytes): (Id, u64),
    ) -> Result<(Vec<Found>, Option<String>), ServiceError> {
        let (record, wrong) = match Self::void_region(journal).load(volume) {
            // There is none where the volume came into force by a change, and was never quiet since: all entries count.
            Ok(record) => (record, None),
            Err(ServiceError::Content { what, .. }) => (None, Some(what)),
            Err(error) => return Err(error),
        };
        let generation = record.as_ref().map_or(0, |record| record.generation);
        self.generations[leg].store(generation, Ordering::Relaxed);
        let (mut found, mut headers) = (Vec::new(), headers.into_iter());
        for copy in 0..self.layout.parity {
            let ring = self.ring_on(leg, copy);
            let content = record.as_ref().map_or(&[][..], |record| &record.content);
            let void = content.get(copy * 8..copy * 8 + 8).and_then(|bytes| bytes.try_into().ok());
            let mut here = Found { entries: Vec::new(), void: void.map_or(0, u64::from_le_bytes) };
            for (slot, header) in (0..self.slots).zip(headers.by_ref()) {
                let at = journal + self.place(copy, slot);
                let Some((entry, crc)) = Entry::decode(&header?) else { continue };
                let ours = entry.set == set && entry.ring as usize == ring && entry.number % self.slots == slot;
                if !ours || entry.number < here.void || !entry.fits(&self.layout, bytes) {
                    continue;
                }
                let payload = legs::read(volume, at + HEADER as u64, entry.payload())?;
                let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
                digest.update(&entry.bytes());
                digest.update(&payload);
                // One that does not fit was being written when the power went: its parts were not begun.
                if digest.finalize() as u32 == crc {
                    here.entries.push((entry, payload));
                }
            }
            found.push(here);
        }
        let wrong = wrong.filter(|_| found.iter().any(|here| !here.entries.is_empty()));
        Ok((found, wrong))
    }

    /// The entries of these legs that are to be carried out again, in their order for each ring; each ring begins after them.
    /// `without` says whether it goes on without a leg that cannot be read, or whose record of what is void is damaged.
    pub(super) fn load(
        &self,
        legs: impl Iterator<Item = (usize, Leg, u64)>,
        set: Id,
        bytes: u64,
        mut without: impl FnMut(usize, BlockError) -> Result<(), ServiceError>,
    ) -> Result<Vec<(Entry, Vec<u8>)>, ServiceError> {
        let mut rings: Vec<Found> = (0..self.rings.len()).map(|_| Found::default()).collect();
        let mut voids = vec![0_u64; self.rings.len()];
        let mut looked = Vec::new();
        let legs: Vec<_> = legs.collect();
        let headers = self.headers(&legs)?;
        for ((leg, volume, journal), headers) in legs.into_iter().zip(headers) {
            match self.look(leg, &volume, journal, headers, (set, bytes)) {
                Err(ServiceError::Leg { source, .. }) => without(leg, source)?,
                result => looked.push((leg, volume, result?)),
            }
        }
        // Those that cannot be read have to go; after them one with such a record may have to stay.
        for (leg, volume, (here, wrong)) in looked {
            if let Some(what) = wrong {
                // What its entries say may be older than what was written past the journal since. One that has to stay has perhaps the
                // only ones that are of use.
                let volume = volume.name();
                tracing::warn!(leg, volume, what, "what is void of the journal cannot be read");
                match without(leg, BlockError::ReadFault { errno: 0 }) {
                    Ok(()) => continue,
                    Err(ServiceError::Leg { what: HAS_TO_STAY, .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            for (copy, found) in here.into_iter().enumerate() {
                let ring = self.ring_on(leg, copy);
                voids[ring] = voids[ring].max(found.void);
                for (entry, payload) in found.entries {
                    if !rings[ring].entries.iter().any(|(known, _)| known.number == entry.number) {
                        rings[ring].entries.push((entry, payload));
                    }
                }
            }
        }
        let mut all = Vec::new();
        for (at, found) in rings.into_iter().enumerate() {
            let last = found.entries.iter().map(|(entry, _)| entry.number).max().unwrap_or(0);
            let tail = found.entries.iter().map(|(entry, _)| entry.tail).max().unwrap_or(0);
            let mut live: Vec<_> = found.entries.into_iter().filter(|(entry, _)| entry.number >= tail).collect();
            live.sort_by_key(|(entry, _)| entry.number);
            all.append(&mut live);
            self.rings[at].start(last.max(voids[at]).max(1) + 1);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_gives_each_number_once_and_keeps_what_is_not_durable() {
        let ring = Ring::new(4);
        let bytes = |at: u64| at * 4096..at * 4096 + 4096;
        let numbers: Vec<_> = (0..4).map(|at| ring.try_take(&bytes(at)).unwrap()).collect();
        assert_eq!(numbers, [1, 2, 3, 4]);
        assert_eq!(ring.try_take(&bytes(9)), None, "it is full");
        ring.done(2);
        assert_eq!(ring.written(), 1, "the first is not in its place");
        ring.done(1);
        assert_eq!(ring.written(), 3);
        ring.advance(3);
        assert_eq!((ring.try_take(&bytes(9)), ring.tail()), (Some(5), 3));
        // Entry 1 was in the slot that 5 is about to have.
        assert!(ring.is_live(&bytes(0)) && ring.is_live(&bytes(1)) && ring.is_live(&bytes(9)));
        assert_eq!(ring.try_take(&bytes(8)), None, "should 2 be torn by it, nothing would tell that 1 is void");
        assert!(ring.lacks_record());
        ring.told(3);
        assert!(!ring.is_live(&bytes(0)) && !ring.is_live(&bytes(1)) && ring.is_live(&bytes(2)));
        assert_eq!(ring.try_take(&bytes(8)), Some(6));
        assert!(!ring.lacks_record(), "there is no room");
        ring.voided(4);
        assert!(!ring.is_live(&bytes(2)) && ring.is_live(&bytes(3)));
    }

    /// It may still be on its leg, whatever its slot in memory says.
    #[test]
    fn an_entry_whose_slot_is_being_taken_is_live() {
        let ring = Ring::new(2);
        let bytes = |at: u64| at * 4096..at * 4096 + 4096;
        for number in 1..3 {
            assert_eq!(ring.try_take(&bytes(number)), Some(number));
            ring.done(number);
        }
        ring.advance(3);
        let head = ring.head();
        // Half of what taking it does.
        let slot = ring.slot(3);
        slot.state.store(TAKING, Ordering::Relaxed);
        slot.start.store(9 * 4096, Ordering::Relaxed);
        slot.end.store(10 * 4096, Ordering::Relaxed);
        assert!(ring.is_live_of(head, &bytes(1)));
        // All of it, and who asks has looked at the head before.
        assert_eq!(ring.try_take(&bytes(9)), Some(3));
        assert!(ring.is_live_of(head, &bytes(1)) && ring.is_live(&bytes(1)));
    }

    #[test]
    fn no_entry_is_missed_while_others_are_taken() {
        const LAST: u64 = 20_000;
        let ring = Ring::new(1);
        let bytes = |at: u64| at % 64 * 4096..at % 64 * 4096 + 4096;
        // The last entry that is on its leg.
        let placed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=LAST {
                    assert_eq!(ring.try_take(&bytes(number)), Some(number));
                    ring.done(number);
                    ring.advance(number + 1);
                    ring.voided(number);
                    placed.store(number, Ordering::Release);
                }
            });
            loop {
                let number = placed.load(Ordering::Acquire);
                let live = number == 0 || ring.is_live(&bytes(number));
                assert!(live || ring.void.load(Ordering::Acquire) > number, "entry {number} was missed");
                if number == LAST {
                    break;
                }
            }
        });
    }

    /// Others take entries, and the tail moves past what somebody has just looked at.
    #[test]
    fn entries_are_taken_while_the_tail_moves() {
        const EACH: u64 = 50_000;
        let (ring, taken) = (Ring::new(4), AtomicU64::new(0));
        let done = || taken.load(Ordering::Relaxed) == 2 * EACH;
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut own = 0;
                    while own < EACH {
                        if let Some(number) = ring.try_take(&(0..4096)) {
                            ring.done(number);
                            own += 1;
                        }
                        ring.lacks_record();
                    }
                    taken.fetch_add(own, Ordering::Relaxed);
                });
            }
            while !done() {
                ring.advance(ring.written());
                ring.voided(ring.tail());
            }
        });
        assert_eq!(ring.head(), 2 * EACH + 1, "each number was given once");
    }

    #[test]
    fn headers_read_back_and_nonsense_does_not_fit() {
        let layout = Layout { chunk: 65536, legs: 5, parity: 2 };
        let entry = Entry {
            set: [7; 16],
            ring: 3,
            number: 99,
            tail: 95,
            stripe: 12,
            row: 4096,
            len: 8192,
            first: 1,
            count: 2,
            parity: 2,
        };
        let mut bytes = entry.bytes().to_vec();
        bytes[12..16].copy_from_slice(&5_u32.to_le_bytes());
        assert_eq!(Entry::decode(&bytes), Some((entry, 5)));
        assert!(entry.fits(&layout, 65536 * 13) && !entry.fits(&layout, 65536 * 12));
        assert_eq!(entry.parts(&layout).collect::<Vec<_>>(), [1, 2, 3, 4]);
        for wrong in [
            Entry { row: 61440, ..entry },
            Entry { first: 2, ..entry },
            Entry { len: 16384, ..entry },
            Entry { len: 0, ..entry },
            Entry { parity: 1, ..entry },
            Entry { first: u32::MAX, count: u32::MAX, ..entry },
        ] {
            assert!(!wrong.fits(&layout, 65536 * 13), "{wrong:?}");
        }
        for cut in 0..USED {
            assert_eq!(Entry::decode(&bytes[..cut]), None);
        }
        bytes[8] = 2;
        assert_eq!(Entry::decode(&bytes), None, "another version");
    }
}
