//! What is found ahead of its turn in rings of both kinds.

use std::os::fd::OwnedFd;

use millrace_memory::{Access, GuestAddress, Segment};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::{
    super::{inflight::InflightRegion, message::Region},
    chain::flag,
    *,
};

const GUEST: u64 = 0x10_0000;
const SIZE: u64 = 1 << 16;
const TABLES: u64 = GUEST + 0x4000;
const HEADERS: u64 = GUEST + 0x8000;
const DATA: u64 = GUEST + 0xa000;
const ENTRIES: u32 = 8;

fn file() -> OwnedFd {
    let fd = memfd_create("rings", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, SIZE).unwrap();
    fd
}

const fn region(guest: u64) -> Region {
    Region { guest, size: SIZE, user: guest, offset: 0 }
}

struct Rig {
    memory: MemoryTable,
    ring: Ring,
    packed: bool,
}

impl Rig {
    fn new(packed: bool) -> Self {
        Self::with(packed, feature::INDIRECT)
    }

    fn with(packed: bool, features: u64) -> Self {
        let mut memory = MemoryTable::new(false);
        memory.add(region(GUEST), file().into()).unwrap();
        let addr = VringAddr { index: 0, flags: 0, desc: GUEST, avail: GUEST + 0x1000, used: GUEST + 0x2000, log: 0 };
        let kind = if packed { feature::PACKED } else { 0 };
        let base = if packed { 0x8000_8000 } else { 0 };
        let setup = Setup { size: ENTRIES, addr, base, features: features | kind };
        let ring = Ring::new(&memory, &setup).unwrap();
        Self { memory, ring, packed }
    }

    fn at(&self, addr: u64, len: usize) -> Segment {
        self.memory.guest.translate(GuestAddress(addr), len as u64, Access::Write).unwrap()
    }

    /// A descriptor with its name or link, as the ring's kind has them.
    fn descriptor(&self, at: u64, addr: u64, len: u32, flags: u16, more: u16) {
        let [third, fourth] = if self.packed { [more, flags] } else { [flags, more] };
        let rest = u64::from(len) | u64::from(third) << 32 | u64::from(fourth) << 48;
        self.at(at, 16).write_at(0, &[addr.to_le_bytes(), rest.to_le_bytes()].concat());
    }

    /// Request `number` is a read or write of `len` bytes, in an indirect table of its own.
    fn request(&self, number: u64, kind: u32, len: u32) {
        let (table, header) = (TABLES + number * 64, HEADERS + number * 64);
        self.table(table, [header, DATA + number * 512, header + 32], kind, len);
        self.header(header, kind, number);
        self.available(number, table, 48, flag::INDIRECT);
    }

    /// An indirect table of a read or write: where header, data and status are.
    fn table(&self, table: u64, [header, data, status]: [u64; 3], kind: u32, len: u32) {
        let (next, write) = if self.packed { (0, flag::WRITE) } else { (flag::NEXT, flag::WRITE) };
        let direction = if kind == 0 { write } else { 0 };
        self.descriptor(table, header, 16, next, u16::from(!self.packed));
        self.descriptor(table + 16, data, len, next | direction, if self.packed { 0 } else { 2 });
        self.descriptor(table + 32, status, 1, write, 0);
    }

    fn header(&self, header: u64, kind: u32, sector: u64) {
        self.at(header, 16).write_at(0, &[u64::from(kind).to_le_bytes(), sector.to_le_bytes()].concat());
    }

    /// Makes the table available as the ring's request `number`, by the same descriptor as the last one if it is a split ring.
    fn available_again(&self, number: u64, table: u64) {
        self.available(number, table, 48, flag::INDIRECT);
        if !self.packed {
            self.descriptor(GUEST, table, 48, flag::INDIRECT, 0);
            self.at(GUEST + 0x1000 + 4 + number * 2, 2).write_at(0, &[0, 0]);
        }
    }

    /// Takes the one request that is there and gives it back: what it was.
    fn take_only(&mut self) -> Plain {
        assert!(self.ring.has_more().unwrap() && self.ring.has_one());
        let (token, plain) = self.ring.only(&self.memory).expect("it is plain");
        self.ring.take_plain(token).unwrap();
        self.ring.give_back(&[Done { token, status: 0, len: 513 }], None);
        plain
    }

    /// Makes the descriptor of a request available in its place of the ring's first round.
    fn available(&self, number: u64, addr: u64, len: u32, flags: u16) {
        let flags = if self.packed { flags | flag::AVAIL } else { flags };
        self.descriptor(GUEST + number * 16, addr, len, flags, number as u16);
        if !self.packed {
            let index = (number as u16 + 1).to_le_bytes();
            self.at(GUEST + 0x1000 + 4 + number * 2, 2).write_at(0, &(number as u16).to_le_bytes());
            self.at(GUEST + 0x1000 + 2, 2).write_at(0, &index);
        }
    }

    /// Makes request `number` available in a packed ring that goes round, and takes it.
    fn pass_on(&mut self, number: u64) -> Done {
        let (place, first_round) = (number % u64::from(ENTRIES), (number / u64::from(ENTRIES)).is_multiple_of(2));
        let round = if first_round { flag::AVAIL } else { flag::USED };
        self.descriptor(GUEST + place * 16, TABLES, 48, flag::INDIRECT | round, place as u16);
        let token = self.ring.take(&self.memory, &mut Buffers::new()).unwrap().expect("it is available");
        Done { token, status: 0, len: 513 }
    }

    fn look(&mut self, most: usize) -> Vec<(u16, Option<Plain>)> {
        let mut ahead = Vec::new();
        let count = self.ring.look_ahead(&self.memory, &mut ahead, most).unwrap();
        assert_eq!(count, ahead.len());
        ahead
    }
}

#[test]
fn plain_requests_are_found_ahead_and_taken_as_they_are_otherwise() {
    for packed in [false, true] {
        let (mut quick, mut slow) = (Rig::new(packed), Rig::new(packed));
        for rig in [&quick, &slow] {
            for number in 0..6 {
                rig.request(number, (number % 2) as u32, 512);
            }
        }
        let mut buffers = Buffers::new();
        for (most, from) in [(4, 0), (16, 4)] {
            let found = quick.look(most);
            assert_eq!(found.len(), if from == 0 { 4 } else { 2 }, "packed: {packed}");
            for (at, (token, plain)) in found.into_iter().enumerate() {
                let number = (from + at) as u64;
                let plain = plain.expect("it is plain");
                assert_eq!((plain.sector(), plain.writable), (Some(number), number.is_multiple_of(2)));
                assert_eq!(plain.data.as_ptr(), quick.at(DATA + number * 512, 512).as_ptr());
                assert_eq!(plain.status.as_ptr(), quick.at(HEADERS + number * 64 + 32, 1).as_ptr());
                quick.ring.take_plain(token).unwrap();
                assert_eq!(slow.ring.take(&slow.memory, &mut buffers).unwrap(), Some(token), "under the same name");
            }
        }
        assert!(quick.look(16).is_empty());
        assert_eq!((quick.ring.base(), quick.ring.in_flight()), (slow.ring.base(), slow.ring.in_flight()));
        // They are given back alike.
        let batch: Vec<_> = [3, 0, 5].map(|token| Done { token, status: 0, len: 513 }).to_vec();
        for rig in [&mut quick, &mut slow] {
            rig.ring.give_back(&batch, None);
        }
        let picture = |rig: &Rig| [GUEST, GUEST + 0x2000].map(|at| rig.at(at, 128).read_words::<16>(0));
        assert_eq!(picture(&quick), picture(&slow));
    }
}

#[test]
fn one_by_itself_is_found_and_not_taken() {
    for packed in [false, true] {
        let mut rig = Rig::new(packed);
        rig.request(0, 0, 512);
        assert!(rig.ring.has_more().unwrap() && rig.ring.has_one());
        let (token, plain) = rig.ring.only(&rig.memory).expect("it is plain");
        assert_eq!((plain.sector(), plain.writable), (Some(0), true));
        assert_eq!(plain.data.as_ptr(), rig.at(DATA, 512).as_ptr());
        assert_eq!(plain.status.as_ptr(), rig.at(HEADERS + 32, 1).as_ptr());
        assert_eq!(rig.ring.in_flight(), 0);
        rig.ring.take_plain(token).unwrap();
        assert!(!rig.ring.has_more().unwrap());
        rig.request(1, 0, 512);
        rig.request(2, 1, 512);
        assert!(rig.ring.has_more().unwrap() && !rig.ring.has_one(), "two");
        // A chain of the ring's own; a table where none may be.
        let (mut chain, mut table) = (Rig::new(packed), Rig::with(packed, 0));
        chain.available(0, HEADERS, 16, 0);
        table.request(0, 0, 512);
        for rig in [&mut chain, &mut table] {
            assert!(rig.ring.has_more().unwrap() && rig.ring.has_one());
            assert!(rig.ring.only(&rig.memory).is_none());
        }
    }
    // A head that is in use, and one that is none.
    for head in [0_u16, ENTRIES as u16] {
        let mut rig = Rig::new(false);
        rig.request(0, 0, 512);
        rig.ring.take(&rig.memory, &mut Buffers::new()).unwrap().expect("it is available");
        rig.at(GUEST + 0x1000 + 6, 2).write_at(0, &head.to_le_bytes());
        rig.at(GUEST + 0x1000 + 2, 2).write_at(0, &2_u16.to_le_bytes());
        assert!(rig.ring.has_more().unwrap() && rig.ring.has_one());
        assert!(rig.ring.only(&rig.memory).is_none(), "head {head}");
    }
}

/// One request after the other at the same place, of which a word is another one each time.
#[test]
fn one_that_lies_where_the_last_one_did_is_what_it_says_itself() {
    const FAR: u64 = GUEST + SIZE;
    for packed in [false, true] {
        let mut rig = Rig::new(packed);
        rig.memory.add(region(FAR), file().into()).unwrap();
        let places = [HEADERS, DATA, HEADERS + 32];
        // Where header, data and status are, the type, the length, and the sector.
        let rounds = [
            (places, 0, 512, 0),
            (places, 0, 512, 7),
            ([HEADERS, DATA + 4096, HEADERS + 32], 0, 512, 7),
            ([HEADERS + 64, DATA + 4096, HEADERS + 32], 0, 512, 8),
            ([HEADERS + 64, DATA + 4096, HEADERS + 40], 0, 512, 8),
            ([HEADERS + 64, DATA + 4096, HEADERS + 40], 0, 1024, 8),
            ([HEADERS + 64, DATA + 4096, HEADERS + 40], 1, 1024, 8),
        ];
        for (number, (places, kind, len, sector)) in (0..).zip(rounds) {
            rig.table(TABLES, places, kind, len);
            rig.header(places[0], kind, sector);
            rig.available_again(number, TABLES);
            let plain = rig.take_only();
            assert_eq!((plain.sector(), plain.writable), (Some(sector), kind == 0), "packed: {packed}, {number}");
            assert_eq!(plain.data.as_ptr(), rig.at(places[1], 1).as_ptr());
            assert_eq!((plain.data.len(), plain.status.as_ptr()), (len as usize, rig.at(places[2], 1).as_ptr()));
        }
    }
    // Another table, whose memory is then another one at the same place: what was found in the old one may be unmapped.
    for packed in [false, true] {
        let mut rig = Rig::new(packed);
        let mut seen = Vec::new();
        for number in 0..4 {
            if number % 2 == 0 {
                if number > 0 {
                    rig.memory.remove(&region(FAR)).unwrap();
                }
                rig.memory.add(region(FAR), file().into()).unwrap();
                rig.table(FAR, [FAR + 64, FAR + 4096, FAR + 96], 0, 512);
                rig.header(FAR + 64, 0, number);
            }
            rig.available_again(number, FAR);
            let plain = rig.take_only();
            assert_eq!(plain.sector(), Some(number / 2 * 2), "packed: {packed}");
            assert_eq!(plain.data.as_ptr(), rig.at(FAR + 4096, 1).as_ptr());
            seen.push(plain.status.as_ptr());
        }
        assert!(seen[0] == seen[1] && seen[1] != seen[2] && seen[2] == seen[3]);
        // Data that lie nowhere.
        rig.table(FAR, [FAR + 64, FAR + SIZE, FAR + 96], 0, 512);
        rig.available_again(4, FAR);
        assert!(rig.ring.has_more().unwrap() && rig.ring.only(&rig.memory).is_none());
    }
}

#[test]
fn what_is_not_plain_is_left_for_its_turn() {
    for packed in [false, true] {
        let mut rig = Rig::new(packed);
        rig.request(0, 0, 512);
        // In the ring itself, a table of another length, data of no length.
        rig.available(1, HEADERS + 64, 16, 0);
        rig.request(2, 0, 512);
        let found = rig.look(16);
        assert!(found[0].1.is_some());
        if packed {
            // Where the next one begins is known when it is taken.
            assert_eq!(found.len(), 1);
        } else {
            assert!(found[1].1.is_none() && found[2].1.is_some());
        }
        for (len, flags) in [(32, flag::INDIRECT), (48, flag::INDIRECT | flag::NEXT), (48, 0)] {
            let mut rig = Rig::new(packed);
            rig.request(0, 0, 512);
            rig.available(0, TABLES, len, flags);
            assert!(rig.look(16).iter().all(|(_, plain)| plain.is_none()), "{len} {flags:#x}");
        }
        let mut rig = Rig::new(packed);
        rig.request(0, 0, 0);
        assert!(rig.look(16).iter().all(|(_, plain)| plain.is_none()));
    }
}

#[test]
fn a_packed_descriptor_that_changes_after_it_was_looked_at_fails_its_ring() {
    let mut rig = Rig::new(true);
    for number in 0..3 {
        rig.request(number, 0, 512);
    }
    let found = rig.look(16);
    assert_eq!(found.len(), 3);
    // The first is two now, which takes the place of the second.
    rig.available(0, HEADERS, 16, flag::NEXT);
    rig.available(1, HEADERS + 32, 1, flag::WRITE);
    rig.ring.take(&rig.memory, &mut Buffers::new()).unwrap();
    assert!(matches!(rig.ring.take_plain(found[1].0), Err(RingError::Changed)));
    // More than there is room for.
    let mut rig = Rig::new(true);
    for number in 0..u64::from(ENTRIES) {
        rig.request(number, 0, 512);
    }
    let found = rig.look(16);
    assert_eq!(found.len(), ENTRIES as usize);
    for (token, _) in &found {
        rig.ring.take_plain(*token).unwrap();
    }
    assert!(rig.look(16).is_empty(), "a full ring shows what was taken, and nothing new");
    assert!(matches!(rig.ring.take_plain(found[0].0), Err(RingError::Changed)));
}

/// However far the ring goes before it looks whether to interrupt, over its end and all the way round.
#[test]
fn a_packed_ring_interrupts_when_it_has_passed_the_place_that_the_guest_wishes() {
    let size = u64::from(ENTRIES);
    for (start, passed) in (0..2 * size).flat_map(|start| (1..=3 * size).map(move |passed| (start, passed))) {
        for wish in (start + passed).saturating_sub(size)..start + passed + size {
            let mut rig = Rig::with(true, feature::INDIRECT | feature::EVENT_IDX);
            rig.request(0, 0, 512);
            let mut number = 0;
            let mut go = |rig: &mut Rig, to: u64| {
                while number < to {
                    let batch: Vec<_> = (number..to.min(number + 5)).map(|number| rig.pass_on(number)).collect();
                    rig.ring.give_back(&batch, None);
                    number += batch.len() as u64;
                }
            };
            go(&mut rig, start);
            rig.ring.wants_call();
            go(&mut rig, start + passed);
            let wrap = u16::from((wish / size).is_multiple_of(2)) << 15;
            rig.at(GUEST + 0x1000, 4).write_at(0, &[(wish % size) as u16 | wrap, 2].map(u16::to_le_bytes).concat());
            // Of places a round and more back the guest wishes none.
            let expected = (start..start + passed).contains(&wish);
            assert_eq!(rig.ring.wants_call(), expected, "from {start}, {passed} passed, {wish} wished");
            assert!(!rig.ring.wants_call(), "once");
        }
    }
}

/// The process dies while it puts a batch into the ring, behind the batch's first: nothing of it is seen, and it is done again.
#[test]
fn a_packed_batch_that_was_half_written_is_taken_back() {
    let (file, what) = InflightRegion::create(1, ENTRIES as u16).unwrap();
    let record = || InflightRegion::open(&what, &file).unwrap().record(0).unwrap();
    let mut rig = Rig::new(true);
    rig.ring.recover(record()).unwrap();
    for number in 0..4 {
        rig.request(number, 0, 512);
    }
    let mut batch: Vec<_> = (0..3).map(|number| rig.pass_on(number)).collect();
    let picture = |rig: &Rig| -> Vec<u16> { (0..3).map(|at| rig.at(GUEST + at * 16 + 14, 2).load_u16(0)).collect() };
    let before = picture(&rig);
    // One that is none ends it in the middle.
    batch.push(Done { token: 7, status: 0, len: 0 });
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rig.ring.give_back(&batch, None)));
    assert!(ended.is_err() && picture(&rig) != before, "something was written");
    let setup = Setup {
        size: ENTRIES,
        addr: VringAddr { index: 0, flags: 0, desc: GUEST, avail: GUEST + 0x1000, used: GUEST + 0x2000, log: 0 },
        base: 0x8000_8000,
        features: feature::INDIRECT | feature::PACKED,
    };
    let mut next = Ring::new(&rig.memory, &setup).unwrap();
    next.recover(record()).unwrap();
    let used = |flags: &u16| (flags & flag::AVAIL != 0) == (flags & flag::USED != 0);
    assert!(!picture(&rig).iter().any(used), "{:?}", picture(&rig));
    assert_eq!(next.in_flight(), 3);
    let mut buffers = Buffers::new();
    let again: Vec<_> = (0..3).map(|_| next.take(&rig.memory, &mut buffers).unwrap().expect("it is done again")).collect();
    assert_eq!(again, batch[..3].iter().map(|done| done.token).collect::<Vec<_>>());
}

/// As many as there are chains, of one descriptor or of more.
#[test]
fn what_waits_is_counted_in_requests() {
    for packed in [false, true] {
        let mut rig = Rig::new(packed);
        assert_eq!(rig.ring.pending().unwrap(), 0);
        for number in 0..5 {
            rig.request(number, 0, 512);
        }
        assert_eq!(rig.ring.pending().unwrap(), 5);
        for left in [4, 3] {
            rig.ring.take(&rig.memory, &mut Buffers::new()).unwrap().expect("it is available");
            assert_eq!(rig.ring.pending().unwrap(), left, "packed: {packed}");
        }
    }
    let mut rig = Rig::new(true);
    for (number, flags) in (0..).zip([flag::NEXT, flag::NEXT, 0, 0, flag::NEXT, flag::NEXT]) {
        rig.available(number, HEADERS, 16, flags);
    }
    assert_eq!(rig.ring.pending().unwrap(), 3, "three, one, and two that go on beyond what is available");
    // As many as the ring has, and no end.
    for number in 0..u64::from(ENTRIES) {
        rig.available(number, HEADERS, 16, flag::NEXT);
    }
    assert_eq!(rig.ring.pending().unwrap(), 1);
}

/// Where a ring stands does not say how often it went round; its memory does.
#[test]
fn a_ring_that_went_round_is_not_fresh() {
    for packed in [false, true] {
        let mut rig = Rig::new(packed);
        assert!(rig.ring.is_fresh());
        for number in 0..u64::from(ENTRIES) {
            rig.request(number, 0, 512);
            let token = rig.ring.take(&rig.memory, &mut Buffers::new()).unwrap().expect("it is available");
            rig.ring.give_back(&[Done { token, status: 0, len: 513 }], None);
        }
        assert!(!rig.ring.is_fresh(), "packed: {packed}");
    }
    let mut rig = Rig::new(true);
    rig.request(0, 0, 512);
    let begins = rig.ring.base();
    for number in 0..u64::from(ENTRIES) * 2 {
        let done = rig.pass_on(number);
        rig.ring.give_back(&[done], None);
    }
    assert_eq!(rig.ring.base(), begins);
    assert!(!rig.ring.is_fresh());
}
