//! The region table against a plain model of it.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use proptest::prelude::*;
use rustix::fs::MemfdFlags;

use super::memory_file;
use crate::{Access, AccessError, GuestAddress, GuestMemory, MAX_REGIONS, MapError, PAGE_SIZE, Protection};

const ALL: Protection = Protection { read: true, write: true };

#[test]
fn bad_maps_are_refused() {
    let file = memory_file(&[0; 8192]);
    let mut memory = GuestMemory::new();
    let backing = |offset| Some((file.as_fd(), offset));
    for (addr, size) in [(0, 0), (1, 4096), (4096, 4095), (4096, u64::MAX), (u64::MAX - 4095, 8192), (0, u64::MAX)] {
        let result = memory.map(GuestAddress(addr), size, ALL, backing(0));
        assert!(matches!(result, Err(MapError::BadRange { .. })), "{addr:#x}+{size:#x}: {result:?}");
    }
    for offset in [4096, 8192, u64::MAX - 4095, u64::MAX] {
        let result = memory.map(GuestAddress(0), 8192, ALL, backing(offset));
        assert!(matches!(result, Err(MapError::ShortFile { file: 8192, .. })), "{offset:#x}: {result:?}");
    }
    let result = memory.map(GuestAddress(0), 4096, ALL, backing(1));
    assert!(matches!(result, Err(MapError::BadRange { .. })), "an offset within a page: {result:?}");
    let open = |path: &str| rustix::fs::open(path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    for path in ["/proc/self/exe", "/dev/zero", "/"] {
        let result = memory.map(GuestAddress(0), 4096, ALL, Some((open(path).as_fd(), 0)));
        assert!(matches!(result, Err(MapError::NotMemory { .. })), "{path}: {result:?}");
    }
    let read_only = open(&format!("/proc/self/fd/{}", file.as_raw_fd()));
    let result = memory.map(GuestAddress(0), 4096, ALL, Some((read_only.as_fd(), 0)));
    assert!(matches!(result, Err(MapError::Kernel { .. })), "a file that may only be read: {result:?}");
    let readable = Protection { read: true, write: false };
    memory.map(GuestAddress(0), 4096, readable, Some((read_only.as_fd(), 0))).unwrap();
    assert_eq!(memory.read_value::<[u8; 4]>(GuestAddress(0)), Ok([0; 4]));
    assert_eq!(memory.write_value(GuestAddress(0), &0_u8), Err(AccessError::Denied(0)));
    assert_eq!(memory.regions().count(), 1);
}

#[test]
fn the_last_page_of_the_address_space_is_like_any_other() {
    let mut memory = GuestMemory::new();
    let last = GuestAddress(u64::MAX - 4095);
    memory.map(last, 4096, ALL, Some((memory_file(&[7; 4096]).as_fd(), 0))).unwrap();
    assert_eq!(memory.read_value::<[u8; 4]>(GuestAddress(u64::MAX - 3)), Ok([7; 4]));
    assert!(memory.read(GuestAddress(u64::MAX - 3), &mut [0; 5]).is_err());
    let again = memory.map(GuestAddress(last.0 - 4096), 8192, ALL, None);
    assert!(matches!(again, Err(MapError::Overlap { .. })), "{again:?}");
    memory.map(GuestAddress(last.0 - 4096), 4096, ALL, None).unwrap();
    memory.unmap(last, 4096).unwrap();
}

#[test]
fn a_device_has_a_limit_of_regions() {
    let mut memory = GuestMemory::new();
    for page in 0..MAX_REGIONS as u64 {
        memory.map(GuestAddress(page * 8192), 4096, ALL, None).unwrap();
    }
    let more = memory.map(GuestAddress(u64::MAX - 4095), 4096, ALL, None);
    assert!(matches!(more, Err(MapError::TooMany(MAX_REGIONS))), "{more:?}");
}

#[test]
fn a_table_for_several_devices_has_the_room_that_it_was_made_with() {
    let mut memory = GuestMemory::with_room(2);
    for page in 0..2 {
        memory.map(GuestAddress(page * 8192), 4096, ALL, None).unwrap();
    }
    let more = memory.map(GuestAddress(4096), 4096, ALL, None);
    assert!(matches!(more, Err(MapError::TooMany(2))), "{more:?}");
}

#[test]
fn a_region_that_was_lent_stays_until_both_have_let_go() {
    let (mut lender, mut other) = (GuestMemory::new(), GuestMemory::new());
    lender.map(GuestAddress(0x10000), 0x4000, ALL, Some((memory_file(&[7; 0x4000]).as_fd(), 0))).unwrap();
    lender.map(GuestAddress(0x20000), 4096, ALL, None).unwrap();
    for (addr, size) in [(0xf000, 4096), (0x10000, 0x5000), (0x13000, 0x2000), (0x20000, 4096), (0x11000, u64::MAX)] {
        assert!(lender.lend(GuestAddress(addr), size).is_none(), "{addr:#x}+{size:#x}");
    }
    let piece = lender.lend(GuestAddress(0x11000), 0x2000).unwrap();
    assert!(piece.is_writable());
    other.map_lent(GuestAddress(0x5000), &piece).unwrap();
    let again = other.map_lent(GuestAddress(0x6000), &piece);
    assert!(matches!(again, Err(MapError::Overlap { .. })), "{again:?}");
    drop(piece);
    other.write_value(GuestAddress(0x5000), &[9_u8; 4]).unwrap();
    assert_eq!(lender.read_value::<[u8; 4]>(GuestAddress(0x11000)), Ok([9; 4]));
    assert!(other.read(GuestAddress(0x6fff), &mut [0; 2]).is_err(), "no more than was lent");
    lender.unmap(GuestAddress(0x10000), 0x4000).unwrap();
    // SAFETY: no segment of it is in use.
    drop(unsafe { lender.reclaim() });
    assert_eq!(other.read_value::<[u8; 4]>(GuestAddress(0x5000)), Ok([9; 4]));
    other.unmap_all();
    // SAFETY: as above.
    assert_eq!(unsafe { other.reclaim() }.len(), 1);
}

#[test]
fn what_was_lent_and_is_taken_away_is_the_lenders_loss() {
    let (mut lender, mut other) = (GuestMemory::new(), GuestMemory::new());
    let file = memory_file(&[7; 4096]);
    lender.map(GuestAddress(0), 4096, ALL, Some((file.as_fd(), 0))).unwrap();
    other.map_lent(GuestAddress(0x5000), &lender.lend(GuestAddress(0), 4096).unwrap()).unwrap();
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert_eq!(other.read_value::<[u8; 4]>(GuestAddress(0x5000)), Ok([0; 4]));
    assert!(lender.is_poisoned() && !other.is_poisoned());
}

/// QEMU announces the parts of one file around the VGA hole, whose edges are not those of huge pages.
#[test]
fn parts_of_huge_pages_are_mapped_and_unmapped() {
    const HUGE: u64 = 2 << 20;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = rustix::fs::memfd_create("test", flags).unwrap();
    rustix::fs::ftruncate(&file, 2 * HUGE).unwrap();
    let mut memory = GuestMemory::new();
    let backing = |offset| Some((file.as_fd(), offset));
    if matches!(memory.map(GuestAddress(0), 0xa_0000, ALL, backing(0)), Err(MapError::Kernel { .. })) {
        eprintln!("not tested: this system has no huge pages free");
        return;
    }
    memory.map(GuestAddress(0xc_0000), HUGE, ALL, backing(0xc_0000)).unwrap();
    memory.write(GuestAddress(0xa_0000 - 1), &[1]).unwrap();
    memory.write(GuestAddress(0xc_0000 + HUGE - 4), &[2; 4]).unwrap();
    assert!(
        memory.read(GuestAddress(0xc_0000 + HUGE - 4), &mut [0; 5]).is_err(),
        "the rest of the page is not the region's"
    );
    let whole = crate::Mapping::shared(file.as_fd(), 0, 2 * HUGE as usize, false).unwrap();
    // SAFETY: the mapping lives to the test's end, and the segment is only read.
    let whole = unsafe { whole.segment(0, 2 * HUGE as usize) }.unwrap();
    assert_eq!(whole.read_value::<u8>(0xa_0000 - 1), 1);
    assert_eq!(whole.read_value::<[u8; 4]>(0xc_0000 + HUGE as usize - 4), [2; 4]);
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert_eq!(memory.read_value::<u8>(GuestAddress(0x9_0000)), Ok(0));
    assert!(memory.is_poisoned());
    memory.unmap_all();
    // SAFETY: no segment of these regions is left.
    drop(unsafe { memory.reclaim() });
}

#[test]
fn unmapping_cuts_no_region_and_pages_go_at_reclaim() {
    let file = memory_file(&[7; 16384]);
    let mut memory = GuestMemory::new();
    memory.map(GuestAddress(4096), 16384, ALL, Some((file.as_fd(), 0))).unwrap();
    for (addr, size) in [(4096, 4096), (8192, 4096), (8192, 12288), (8192, 1 << 20), (0, 16384)] {
        let result = memory.unmap(GuestAddress(addr), size);
        assert!(matches!(result, Err(MapError::Cut { .. })), "{addr:#x}+{size:#x}: {result:?}");
    }
    for (addr, size) in [(0, 0), (8192, u64::MAX)] {
        let result = memory.unmap(GuestAddress(addr), size);
        assert!(matches!(result, Err(MapError::BadRange { .. })), "{addr:#x}+{size:#x}: {result:?}");
    }
    for (addr, size) in [(0, 4096), (20480, 4096)] {
        assert!(matches!(memory.has_regions(GuestAddress(addr), size), Ok(false)), "{addr:#x}+{size:#x}");
        memory.unmap(GuestAddress(addr), size).unwrap();
    }
    let segment = memory.translate(GuestAddress(8192), 4096, Access::Read).unwrap();
    assert!(!memory.has_retired());
    memory.unmap(GuestAddress(4096), 16384).unwrap();
    let gone = memory.translate(GuestAddress(8192), 4096, Access::Read);
    assert!(matches!(gone, Err(AccessError::Unmapped { addr: 8192, len: 4096 })), "{gone:?}");
    assert_eq!(segment.read_value::<u8>(4095), 7, "a request in flight still has its memory");
    assert!(memory.has_retired());
    // SAFETY: the segment is not used any more.
    assert_eq!(unsafe { memory.reclaim() }.len(), 1);
    assert!(!memory.has_retired());
}

/// Memory that was mapped block by block goes by one call.
#[test]
fn a_range_is_unmapped_with_all_its_regions() {
    let mut memory = GuestMemory::new();
    let file = memory_file(&[7; 4096]);
    // Two neighbours, a hole, one more without a file, and two outside.
    for page in [0, 2, 3, 5, 7] {
        let backing = (page != 5).then(|| (file.as_fd(), 0));
        memory.map(GuestAddress(page * 4096), 4096, ALL, backing).unwrap();
    }
    assert!(memory.has_regions(GuestAddress(4096), 6 * 4096).unwrap());
    memory.unmap(GuestAddress(4096), 6 * 4096).unwrap();
    let left: Vec<u64> = memory.regions().map(|(addr, ..)| addr.0 / 4096).collect();
    assert_eq!(left, [0, 7]);
    // SAFETY: there is no segment.
    assert_eq!(unsafe { memory.reclaim() }.len(), 2);
    memory.unmap(GuestAddress(4096), 6 * 4096).unwrap();
    assert!(!memory.has_retired());
    memory.unmap(GuestAddress(0), u64::MAX).unwrap();
    assert_eq!(memory.regions().count(), 0);
}

#[test]
fn a_region_may_end_within_a_page_when_its_peer_may_say_so() {
    const SIZE: u64 = 4096 + 0x310;
    let mut memory = GuestMemory::new();
    let exact = memory.map(GuestAddress(0), SIZE, ALL, Some((memory_file(&[7; SIZE as usize]).as_fd(), 0)));
    assert!(matches!(exact, Err(MapError::BadRange { .. })), "{exact:?}");
    let short = memory.map_to_page_end(GuestAddress(0), SIZE, ALL, (memory_file(&[7; SIZE as usize - 1]).as_fd(), 0));
    assert!(matches!(short, Err(MapError::ShortFile { .. })), "{short:?}");
    for wrong in [0, u64::MAX - 100] {
        let result = memory.map_to_page_end(GuestAddress(0), wrong, ALL, (memory_file(&[7; 4096]).as_fd(), 0));
        assert!(matches!(result, Err(MapError::BadRange { .. })), "{wrong}: {result:?}");
    }
    let whole = memory.map_to_page_end(GuestAddress(0), SIZE, ALL, (memory_file(&[7; SIZE as usize]).as_fd(), 0)).unwrap();
    assert_eq!(whole, 8192);
    assert_eq!(memory.read_value::<[u8; 2]>(GuestAddress(SIZE - 1)), Ok([7, 0]), "the file's last page");
    assert!(memory.read_value::<[u8; 2]>(GuestAddress(whole - 1)).is_err());
    let next = memory.map(GuestAddress(4096), 4096, ALL, None);
    assert!(matches!(next, Err(MapError::Overlap { .. })), "{next:?}");
    memory.unmap(GuestAddress(0), whole).unwrap();
}

#[test]
fn writes_over_an_edge_change_nothing() {
    let file = memory_file(&[1; 4096]);
    let mut memory = GuestMemory::new();
    memory.map(GuestAddress(0), 4096, ALL, Some((file.as_fd(), 0))).unwrap();
    assert!(memory.write(GuestAddress(4000), &[2; 97]).is_err());
    assert_eq!(memory.read_value::<[u8; 96]>(GuestAddress(4000)), Ok([1; 96]));
    assert!(memory.write(GuestAddress(4000), &[2; 96]).is_ok());
    assert!(memory.read(GuestAddress(u64::MAX - 1), &mut [0; 4]).is_err(), "past the end of the address space");
}

/// Guest pages the property test works on, from [`BASE`] on.
const SPAN: u64 = 24;
/// Near the end of the address space, so that sums come close to overflow.
const BASE: u64 = u64::MAX - 4095 - SPAN * PAGE_SIZE;

#[derive(Clone, Debug)]
enum Step {
    Map { page: u64, pages: u64, protection: Protection, backed: bool },
    Unmap { page: u64, pages: u64 },
    UnmapExisting(prop::sample::Index),
    UnmapAll,
    Reclaim,
    Translate { addr: u64, len: u64, write: bool },
    Write { addr: u64, len: usize },
    Read { addr: u64, len: usize },
}

fn steps() -> impl Strategy<Value = Step> {
    let place = || (0..SPAN, 1_u64..6);
    let addr = || BASE - 10..BASE + SPAN * PAGE_SIZE + 10;
    let protection =
        prop_oneof![4 => Just((true, true)), 1 => Just((true, false)), 1 => Just((false, true)), 1 => Just((false, false))]
            .prop_map(|(read, write)| Protection { read, write });
    prop_oneof![
        6 => (place(), protection, prop::bool::weighted(0.9))
            .prop_map(|((page, pages), protection, backed)| Step::Map { page, pages, protection, backed }),
        1 => place().prop_map(|(page, pages)| Step::Unmap { page, pages }),
        2 => any::<prop::sample::Index>().prop_map(Step::UnmapExisting),
        1 => Just(Step::UnmapAll),
        1 => Just(Step::Reclaim),
        6 => (addr(), prop_oneof![0..9000_u64, any::<u64>()], any::<bool>())
            .prop_map(|(addr, len, write)| Step::Translate { addr, len, write }),
        3 => (addr(), 0_usize..9000).prop_map(|(addr, len)| Step::Write { addr, len }),
        3 => (addr(), 0_usize..9000).prop_map(|(addr, len)| Step::Read { addr, len }),
    ]
}

struct ModelRegion {
    start: u64,
    size: u64,
    protection: Protection,
    file: Option<(OwnedFd, Vec<u8>)>,
}

#[derive(Default)]
struct Model {
    regions: Vec<ModelRegion>,
    made: u8,
}

impl Model {
    fn at(&mut self, addr: u64) -> Option<&mut ModelRegion> {
        self.regions.iter_mut().find(|r| addr >= r.start && addr - r.start < r.size)
    }

    /// Byte `i` of an access, or why it cannot be reached.
    fn byte(&mut self, addr: u64, i: u64, len: u64, access: Access) -> Result<&mut u8, AccessError> {
        let addr = addr.checked_add(i).ok_or(AccessError::Unmapped { addr, len })?;
        let region = self.at(addr).ok_or(AccessError::Unmapped { addr, len })?;
        let allowed = if access == Access::Read { region.protection.read } else { region.protection.write };
        if !allowed {
            return Err(AccessError::Denied(addr));
        }
        let offset = (addr - region.start) as usize;
        region.file.as_mut().map(|(_, content)| &mut content[offset]).ok_or(AccessError::NoDescriptor(addr))
    }

    fn map(&mut self, memory: &mut GuestMemory, page: u64, pages: u64, protection: Protection, backed: bool) {
        let (start, size) = (BASE + page * PAGE_SIZE, pages * PAGE_SIZE);
        self.made = self.made.wrapping_add(1);
        // The region begins at the file's second page.
        let content: Vec<u8> = (0..size).map(|i| (i % 251) as u8 ^ self.made).collect();
        let file = backed.then(|| memory_file(&[vec![0xee; 4096], content.clone()].concat()));
        let backing = file.as_ref().map(|file| (file.as_fd(), PAGE_SIZE));
        let result = memory.map(GuestAddress(start), size, protection, backing);
        let last = start.checked_add(size - 1);
        let overlaps =
            self.regions.iter().any(|r| start <= r.start + (r.size - 1) && last.is_none_or(|last| r.start <= last));
        match result {
            Ok(()) => assert!(!overlaps && last.is_some()),
            Err(MapError::Overlap { .. }) => return assert!(overlaps),
            Err(MapError::BadRange { .. }) => return assert!(last.is_none()),
            Err(error) => panic!("{error}"),
        }
        self.regions.push(ModelRegion { start, size, protection, file: file.map(|f| (f, content)) });
    }

    fn unmap(&mut self, memory: &mut GuestMemory, start: u64, size: u64) {
        let last = start.checked_add(size - 1);
        let meets = |r: &ModelRegion| r.start + (r.size - 1) >= start && last.is_none_or(|last| r.start <= last);
        let is_inside = |r: &ModelRegion| r.start >= start && last.is_some_and(|last| r.start + (r.size - 1) <= last);
        let cuts = self.regions.iter().any(|r| meets(r) && !is_inside(r));
        match memory.unmap(GuestAddress(start), size) {
            Ok(()) => assert!(!cuts && last.is_some()),
            Err(MapError::Cut { .. }) => return assert!(cuts),
            Err(MapError::BadRange { .. }) => return assert!(last.is_none()),
            Err(error) => panic!("{error}"),
        }
        self.regions.retain(|r| !is_inside(r));
    }

    fn translate(&mut self, memory: &GuestMemory, addr: u64, len: u64, access: Access) {
        let found = memory.translate_some(GuestAddress(addr), len, access);
        let whole = memory.translate(GuestAddress(addr), len, access);
        let expected = self.byte(addr, 0, len, access).map(|byte| *byte);
        let Ok(segment) = found else {
            assert_eq!((found.err(), whole.err()), (expected.err(), expected.err()));
            return;
        };
        let first = expected.expect("reachable in the model too");
        let region = self.at(addr).expect("it is reachable");
        assert_eq!(segment.len() as u64, len.min(region.size - (addr - region.start)));
        assert_eq!(whole.is_ok(), segment.len() as u64 == len);
        // A region that may not be read may still be written, and looking at what was written is the test's business.
        if len > 0 && (access == Access::Read || region.protection.read) {
            assert_eq!(segment.read_value::<u8>(0), first);
        }
    }

    fn write(&mut self, memory: &GuestMemory, addr: u64, data: &[u8]) {
        let len = data.len() as u64;
        let error = (0..len).find_map(|i| self.byte(addr, i, len, Access::Write).err());
        let result = memory.write(GuestAddress(addr), data);
        assert_eq!(result.is_err(), error.is_some(), "{result:?} {error:?}");
        if result.is_ok() {
            (0..len).zip(data).for_each(|(i, byte)| *self.byte(addr, i, len, Access::Write).unwrap() = *byte);
        }
        // Nothing but this was written, in any file.
        for (file, content) in self.regions.iter().filter_map(|r| r.file.as_ref()) {
            let mut bytes = vec![0; content.len() + 1];
            assert_eq!(rustix::io::pread(file, &mut bytes, PAGE_SIZE).unwrap(), content.len());
            assert!(bytes[..content.len()] == **content);
        }
    }

    fn read(&mut self, memory: &GuestMemory, addr: u64, len: usize) {
        let mut found = vec![0; len];
        let result = memory.read(GuestAddress(addr), &mut found);
        let expected: Result<Vec<u8>, _> =
            (0..len as u64).map(|i| self.byte(addr, i, len as u64, Access::Read).map(|byte| *byte)).collect();
        assert_eq!(result.is_err(), expected.is_err(), "{result:?}");
        assert!(expected.is_err() || expected == Ok(found));
    }

    fn step(&mut self, memory: &mut GuestMemory, step: &Step) {
        match *step {
            Step::Map { page, pages, protection, backed } => self.map(memory, page, pages, protection, backed),
            Step::Unmap { page, pages } => self.unmap(memory, BASE + page * PAGE_SIZE, pages * PAGE_SIZE),
            Step::UnmapExisting(ref index) => {
                if !self.regions.is_empty() {
                    let region = index.get(&self.regions);
                    let (start, size) = (region.start, region.size);
                    self.unmap(memory, start, size);
                }
            }
            Step::UnmapAll => {
                memory.unmap_all();
                self.regions.clear();
            }
            // SAFETY: the test keeps no segment from one step to the next.
            Step::Reclaim => drop(unsafe { memory.reclaim() }),
            Step::Translate { addr, len, write } => {
                self.translate(memory, addr, len, if write { Access::Write } else { Access::Read });
            }
            Step::Write { addr, len } => {
                let data: Vec<u8> = (0..len).map(|i| (i % 253) as u8 ^ self.made.wrapping_mul(7)).collect();
                self.write(memory, addr, &data);
            }
            Step::Read { addr, len } => self.read(memory, addr, len),
        }
        let mut mine: Vec<_> = self.regions.iter().map(|r| (r.start, r.size, r.protection, r.file.is_some())).collect();
        mine.sort_by_key(|r| r.0);
        assert!(memory.regions().map(|(addr, size, protection, fd)| (addr.0, size, protection, fd)).eq(mine));
    }
}

proptest! {
    #[test]
    fn the_table_behaves_as_its_model(steps in prop::collection::vec(steps(), 1..50)) {
        let (mut memory, mut model) = (GuestMemory::new(), Model::default());
        for step in steps {
            model.step(&mut memory, &step);
        }
        memory.unmap_all();
        // SAFETY: no segment is left.
        drop(unsafe { memory.reclaim() });
    }
}

/// The pages of a range that are in the log, and forgotten now.
fn written(memory: &GuestMemory, addr: u64, pages: u64) -> Vec<u64> {
    let mut bitmap = vec![0; pages.div_ceil(8) as usize];
    memory.take_written(GuestAddress(addr), pages * 4096, 4096, &mut bitmap);
    (0..pages).filter(|page| bitmap[(page / 8) as usize] & 1 << (page % 8) != 0).collect()
}

#[test]
fn what_is_translated_for_writing_is_logged_while_there_is_a_log() {
    const BASE: u64 = 1 << 32;
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 16 << 20).unwrap();
    let mut memory = GuestMemory::new();
    memory.map(GuestAddress(BASE), 16 << 20, ALL, Some((file.as_fd(), 0))).unwrap();
    let write = |memory: &GuestMemory, page: u64, len: u64| {
        memory.translate(GuestAddress(BASE + page * 4096 + 8), len, Access::Write).unwrap();
    };
    // Known translations before the log begins do not stay known.
    write(&memory, 3, 8);
    assert_eq!(written(&memory, BASE, 4096), [], "there is no log yet");
    memory.log_writes(true);
    assert!(memory.logs_writes());
    for _ in 0..2 {
        write(&memory, 3, 8);
        write(&memory, 600, 2 * 4096);
        memory.translate(GuestAddress(BASE + 4096), 8, Access::Read).unwrap();
        memory.write_value(GuestAddress(BASE + 5 * 4096 - 4), &0_u64).unwrap();
        assert!(memory.write(GuestAddress(BASE + (16 << 20) - 4), &[0; 8]).is_err());
        assert_eq!(written(&memory, BASE, 100), [3, 4, 5]);
        assert_eq!(written(&memory, BASE, 4096), [600, 601, 602, 4095], "what was not told yet is; a refused write may be");
    }
    memory.mark_written(GuestAddress(BASE - 4096), 8192);
    assert_eq!(written(&memory, BASE - 8192, 100), [2], "what is not mapped is not written");
    let mut coarse = [0];
    write(&memory, 17, 8);
    memory.take_written(GuestAddress(BASE), 8 * 65536, 65536, &mut coarse);
    assert_eq!(coarse, [2]);
    memory.log_writes(false);
    write(&memory, 3, 8);
    memory.log_writes(true);
    assert_eq!(written(&memory, BASE, 4096), []);
}

#[test]
fn all_that_is_mapped_may_have_been_written_however_much_it_is() {
    const BASE: u64 = 1 << 62;
    const SIZE: u64 = 1 << 40;
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, SIZE).unwrap();
    let mut memory = GuestMemory::new();
    // As many addresses as one likes, for nothing.
    memory.map(GuestAddress(0), BASE, ALL, None).unwrap();
    memory.map(GuestAddress(BASE), SIZE, ALL, Some((file.as_fd(), 0))).unwrap();
    memory.log_writes(true);
    memory.mark_written(GuestAddress(0), u64::MAX);
    assert_eq!(written(&memory, BASE - 8192, 4), [2, 3], "without a file nothing is written");
    assert_eq!(written(&memory, BASE + SIZE - 4096, 100), [0]);
    let mut coarse = [0; 9];
    memory.take_written(GuestAddress(BASE), SIZE, SIZE / 64, &mut coarse);
    assert_eq!(coarse, [255, 255, 255, 255, 255, 255, 255, 255, 0]);
    memory.mark_written(GuestAddress(BASE), SIZE);
    let mut short = [0];
    memory.take_written(GuestAddress(BASE), SIZE, SIZE / 64, &mut short);
    assert_eq!((short, written(&memory, BASE, 4096)), ([255], vec![]), "what the bitmap has no room for is forgotten");
}
