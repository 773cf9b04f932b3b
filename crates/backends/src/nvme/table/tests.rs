use std::{os::fd::AsFd, sync::mpsc::sync_channel};

use millrace_memory::{Access, GuestAddress, GuestMemory, Protection};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

/// What an IOMMU was asked for.
#[derive(Default)]
struct Done {
    /// The next free address.
    next: u64,
    /// Bytes that may be mapped yet.
    room: usize,
    parts: Vec<(u64, Range<usize>)>,
    refused: usize,
    unmapped: Vec<DmaRange>,
}

/// An IOMMU with room for so much.
struct Fake(Mutex<Done>);

impl Fake {
    fn done(&self) -> MutexGuard<'_, Done> {
        self.0.lock().unwrap()
    }
}

impl Mapper for Fake {
    fn interface(&self) -> &'static str {
        "a test"
    }
    fn place(&self, region: &Region) -> Result<DmaRange, VfioError> {
        let mut done = self.done();
        done.next += 1 << 40;
        Ok(DmaRange { iova: done.next, len: region.len() })
    }
    fn map_part(&self, _: &Region, iova: u64, part: Range<usize>) -> Result<(), VfioError> {
        let mut done = self.done();
        let Some(room) = done.room.checked_sub(part.len()) else {
            done.refused += 1;
            return Err(VfioError::NoReset("ffff:ff:1f.7".parse().unwrap()));
        };
        done.room = room;
        done.parts.push((iova, part));
        Ok(())
    }
    fn unmap(&self, range: DmaRange) -> Result<(), VfioError> {
        let mut done = self.done();
        done.room += range.len;
        done.unmapped.push(range);
        Ok(())
    }
}

/// A table over an IOMMU with room for so much.
fn table(room: usize) -> (Arc<Table>, Arc<Fake>) {
    let fake = Arc::new(Fake(Mutex::new(Done { room, ..Done::default() })));
    let mapper: Arc<dyn Mapper> = Arc::<Fake>::clone(&fake);
    let table = Arc::new(Table::new(Some(mapper), sync_channel(64).0));
    (table, fake)
}

/// A guest's memory, which costs nothing, and where it is.
fn guest(size: usize) -> (GuestMemory, usize) {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, size as u64).unwrap();
    let mut memory = GuestMemory::new();
    let all = Protection { read: true, write: true };
    memory.map(GuestAddress(0), size as u64, all, Some((file.as_fd(), 0))).unwrap();
    let start = memory.translate(GuestAddress(0), 4096, Access::Read).unwrap().as_ptr() as usize;
    (memory, start)
}

/// The memory there goes, as far as the table hears of it: in truth it stays, for who lets it go must vouch that nobody uses it.
fn end(table: &Table, start: usize) {
    with_region(start, |region| table.going(region)).expect("there is memory");
}

/// As a lane finds it.
fn find(table: &Table, start: usize, len: usize) -> Option<u64> {
    let mut entries = Entries::default();
    entries.refresh(table);
    entries.find(start, len)
}

#[test]
fn large_memory_is_mapped_piece_by_piece_and_found_as_one() {
    let (table, fake) = table(usize::MAX);
    let (_memory, start) = guest(3 * GIB);
    table.map(start + GIB, Instant::now());
    let parts = std::mem::take(&mut fake.done().parts);
    assert!(parts.len() >= 3 && parts.iter().all(|(iova, part)| *iova == 1 << 40 && part.len() <= GIB), "{parts:?}");
    assert_eq!((parts[0].1.start, parts[parts.len() - 1].1.end), (0, 3 * GIB));
    assert!(parts.windows(2).all(|two| two[0].1.end == two[1].1.start), "{parts:?}");
    // From one piece into the next.
    assert_eq!(find(&table, start + parts[0].1.end - 4096, 8192), Some((1 << 40) + parts[0].1.end as u64 - 4096));
    assert_eq!(find(&table, start + 3 * GIB - 4096, 8192), None, "it ends before");
    table.map(start, Instant::now());
    assert!(fake.done().parts.is_empty(), "it is mapped once");
    end(&table, start);
    assert_eq!(fake.done().unmapped, [DmaRange { iova: 1 << 40, len: 3 * GIB }]);
    assert_eq!(find(&table, start, 4096), None);
}

/// A balloon puts other pages in the place of some: the device would go on with those that it knows.
#[test]
fn memory_that_must_not_be_pinned_is_never_mapped() {
    let (table, fake) = table(usize::MAX);
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, MIB as u64).unwrap();
    let mut memory = GuestMemory::new().unpinned();
    memory.map(GuestAddress(0), MIB as u64, Protection { read: true, write: true }, Some((file.as_fd(), 0))).unwrap();
    let start = memory.translate(GuestAddress(0), 4096, Access::Read).unwrap().as_ptr() as usize;
    table.map(start, Instant::now());
    assert_eq!(find(&table, start, 4096), None);
    assert!(fake.done().parts.is_empty());
    assert!(table.changing().failed.is_empty(), "that is no failure");
}

#[test]
fn memory_that_goes_between_two_pieces_takes_what_was_mapped_with_it() {
    let (table, fake) = table(usize::MAX);
    let (_memory, start) = guest(3 * GIB);
    let piece = |table: &Table| {
        let mut state = table.changing();
        with_region(start, |region| table.map_piece(&mut state, region, Instant::now()))
    };
    assert_eq!((piece(&table), find(&table, start, 4096)), (Some(true), None), "not all of it is there");
    let mapped = fake.done().parts[0].1.end;
    end(&table, start);
    assert_eq!(fake.done().unmapped, [DmaRange { iova: 1 << 40, len: mapped }]);
    assert!(table.changing().partial.is_none());
    // As well when all goes.
    let (_memory, start) = guest(3 * GIB);
    let mut state = table.changing();
    assert_eq!(with_region(start, |region| table.map_piece(&mut state, region, Instant::now())), Some(true));
    drop(state);
    table.clear();
    assert_eq!(fake.done().unmapped.len(), 2);
    table.map(start, Instant::now());
    assert_eq!(fake.done().parts.len(), 2, "nothing is mapped any more");
}

#[test]
fn what_could_not_be_mapped_is_tried_again_ever_more_seldom() {
    let (table, fake) = table(0);
    let (_memory, start) = guest(MIB);
    // Ahead of what the clock says meanwhile.
    let began = Instant::now() + Duration::from_secs(3600);
    let refused_at = |seconds| {
        table.map(start, began + Duration::from_secs(seconds));
        fake.done().refused
    };
    assert_eq!([0, 1, 9, 10, 11, 29, 30, 69, 70].map(refused_at), [1, 1, 1, 2, 2, 2, 3, 3, 4]);
    // In the end as often as this.
    let mut at = 70;
    for wait in [80, 160, 320, 640, 640, 640] {
        at += wait;
        let before = fake.done().refused;
        assert_eq!((refused_at(at - 1), refused_at(at)), (before, before + 1), "{wait} s later");
    }
    fake.done().room = MIB;
    table.map(start, began + Duration::from_secs(at + 639));
    assert_eq!(find(&table, start, MIB), None);
    table.map(start, began + Duration::from_secs(at + 640));
    assert_eq!(find(&table, start + 4096, 4096), Some(fake.done().next + 4096));
    assert_eq!(fake.done().unmapped.iter().map(|range| range.len).sum::<usize>(), 0, "and nothing was mapped meanwhile");
}

#[test]
fn memory_that_does_not_fit_gives_its_first_pieces_back() {
    let (table, fake) = table(2 * GIB);
    let (_memory, start) = guest(4 * GIB);
    table.map(start, Instant::now());
    let done = fake.done();
    assert_eq!((done.refused, done.room, done.unmapped.len()), (1, 2 * GIB, 1));
    assert_eq!(done.unmapped[0].len, done.parts[done.parts.len() - 1].1.end);
    drop(done);
    assert_eq!(find(&table, start, 4096), None);
}

#[test]
fn room_that_has_come_is_not_waited_for_as_long() {
    let (table, fake) = table(MIB);
    let ((_first, at_first), (_second, at_second)) = (guest(MIB), guest(MIB));
    let began = Instant::now() + Duration::from_secs(3600);
    table.map(at_first, began);
    for seconds in [0, 10, 30] {
        table.map(at_second, began + Duration::from_secs(seconds));
    }
    assert_eq!(fake.done().refused, 3);
    end(&table, at_first);
    table.map(at_second, began + Duration::from_secs(39));
    assert_eq!(find(&table, at_second, MIB), None);
    table.map(at_second, began + Duration::from_secs(40));
    assert!(find(&table, at_second, MIB).is_some());
}

#[test]
fn the_list_is_by_address_and_what_failed_is_not_in_it() {
    let (table, fake) = table(7 * MIB);
    let mut guests: Vec<_> = (0..8).map(|_| guest(MIB)).collect();
    // Neither up nor down.
    guests.sort_by_key(|(_, start)| *start);
    let order = [4, 1, 6, 0, 7, 2, 5, 3];
    let places = order.map(|at| {
        table.map(guests[at].1, Instant::now());
        (guests[at].1, fake.done().next)
    });
    let list = table.list();
    assert!(list.len() == 7 && list.is_sorted_by_key(|entry| entry.start), "{list:?}");
    for (start, iova) in &places[..7] {
        assert_eq!(find(&table, start + 512, MIB - 512), Some(iova + 512));
    }
    assert_eq!(find(&table, places[7].0, 1), None, "there was no room for it");
    // One from the middle, and the one that failed.
    guests[3..5].iter().for_each(|(_, start)| end(&table, *start));
    assert!(table.list().len() == 6 && table.list().is_sorted_by_key(|entry| entry.start));
    assert!(table.changing().failed.is_empty(), "it ends with its region");
    assert_eq!(find(&table, places[0].0, 1), None);
    assert_eq!(find(&table, places[4].0, MIB), Some(places[4].1), "the last is found as before");
}

#[test]
fn memory_is_found_among_that_of_many() {
    let list = (1..=30_000).map(|i| Entry { start: i * 8192, iova: (1 << 40) + (i * 4096) as u64, len: 4096 }).collect();
    let entries = Entries { list, generation: 0 };
    for i in [1, 2, 14_999, 29_999, 30_000] {
        let iova = (1 << 40) + i as u64 * 4096;
        assert_eq!(entries.find(i * 8192, 4096), Some(iova));
        assert_eq!(entries.find(i * 8192 + 4095, 1), Some(iova + 4095));
        assert_eq!(entries.find(i * 8192 + 4095, 2), None, "it ends before");
        assert_eq!(entries.find(i * 8192 + 4096, 1), None, "between two");
        assert_eq!(entries.find(i * 8192, usize::MAX), None);
    }
    assert_eq!((entries.find(8191, 1), entries.find(0, 0), Entries::default().find(4096, 1)), (None, None, None));
}

#[test]
fn what_is_asked_for_is_mapped_while_there_is_a_table() {
    let (asks, asked) = sync_channel(1);
    let fake = Arc::new(Fake(Mutex::new(Done { room: MIB, ..Done::default() })));
    let mapper: Arc<dyn Mapper> = Arc::<Fake>::clone(&fake);
    let table = Arc::new(Table::new(Some(mapper), asks));
    let (_memory, start) = guest(MIB);
    table.ask(start);
    table.ask(start);
    let seen = Arc::downgrade(&table);
    let thread = std::thread::spawn(move || serve(&seen, &asked));
    // The next one fits once the first was taken; it is known by then, or being mapped.
    while table.asks.send(start).is_err() || fake.done().parts.is_empty() {}
    drop(table);
    thread.join().unwrap();
    assert_eq!(fake.done().parts.iter().map(|(_, part)| part.len()).sum::<usize>(), MIB, "once");
}
