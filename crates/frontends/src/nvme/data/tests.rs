//! Random layouts against a model that knows nothing but the specification's pictures, and every mistake by its status.

use std::{
    fs::File,
    os::{fd::AsFd, unix::fs::FileExt},
    rc::Rc,
    sync::atomic::{AtomicBool, Ordering},
};

use millrace_memory::{Protection, total_len};
use millrace_nvme_spec::{
    command::{CommandFlags, DataPointer},
    sgl::SglIdentifier,
};
use proptest::prelude::*;
use zerocopy::FromZeros;

use super::*;

/// Two regions that adjoin in the guest, from different files; nothing else is mapped.
const BASE: u64 = 0x10_0000;
const HALF: u64 = 4 << 20;
const END: u64 = BASE + 2 * HALF;
/// Lists go into the last megabyte, data before it.
const LISTS: u64 = END - (1 << 20);

struct Guest {
    memory: GuestMemory,
    files: [File; 2],
}

impl Guest {
    /// Every word of the memory is a hash of its address.
    fn new() -> Self {
        let both = Protection { read: true, write: true };
        let mut memory = GuestMemory::new();
        let files = [0, 1].map(|half| {
            let start = BASE + half * HALF;
            let file = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"));
            let bytes: Vec<u8> = (start..start + HALF).step_by(8).flat_map(|addr| word(addr).to_le_bytes()).collect();
            file.write_all_at(&bytes, 0).expect("room");
            memory.map(GuestAddress(start), HALF, both, Some((file.as_fd(), 0))).expect("it is mapped");
            file
        });
        Self { memory, files }
    }

    fn put<T: IntoBytes + zerocopy::Immutable>(&self, addr: u64, value: &T) {
        let file = &self.files[usize::from(addr >= BASE + HALF)];
        file.write_all_at(value.as_bytes(), (addr - BASE) % HALF).expect("mapped");
    }

    fn resolve(&self, page_size: u64, sqe: &Sqe, len: u64) -> Result<Vec<Segment>, Status> {
        let mut segments = Vec::new();
        resolve(&self.memory, page_size, sqe, len, Access::Read, &mut segments)?;
        assert_eq!(total_len(&segments) as u64, len);
        assert!(segments.len() <= MAX_SEGMENTS);
        assert!(segments.windows(2).all(|pair| !pair[0].adjoins(&pair[1])), "neighbours are merged");
        Ok(segments)
    }

    /// The bytes a command moves.
    fn data(&self, page_size: u64, sqe: &Sqe, len: u64) -> Result<Vec<u8>, Status> {
        let segments = self.resolve(page_size, sqe, len)?;
        let mut bytes = vec![0; len as usize];
        copy_in(&segments, &mut bytes);
        Ok(bytes)
    }
}

/// One guest for all cases of a test: each writes the lists that it uses.
fn shared() -> Rc<Guest> {
    thread_local!(static GUEST: Rc<Guest> = Rc::new(Guest::new()));
    GUEST.with(Rc::clone)
}

fn word(addr: u64) -> u64 {
    addr.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}

fn expected(addr: u64, len: u64) -> impl Iterator<Item = u8> {
    (addr..addr + len).map(|at| word(at & !7).to_le_bytes()[(at & 7) as usize])
}

fn prp_command(prp1: u64, prp2: u64) -> Sqe {
    let mut sqe = Sqe::new_zeroed();
    sqe.dptr = DataPointer::prps(prp1, prp2);
    sqe
}

fn sgl_command(first: SglDescriptor) -> Sqe {
    let mut sqe = Sqe::new_zeroed();
    sqe.flags = CommandFlags::new().with_psdt(Psdt::SGL_MPTR_CONTIGUOUS);
    sqe.dptr = first.into();
    sqe
}

/// A transfer by PRPs: the pages in order, and where the lists lie.
#[derive(Clone, Debug)]
struct PrpLayout {
    page_size: u64,
    /// Offset in the first page, a multiple of 4.
    offset: u64,
    len: u64,
    /// Page numbers.
    pages: Vec<u64>,
    /// Offset of the first list in its page, a multiple of 8.
    list_offset: u64,
}

fn prp_layouts() -> impl Strategy<Value = PrpLayout> {
    (prop_oneof![3 => Just(12_u32), 1 => 13_u32..=16], any::<u16>(), 1_u64..=2 << 20, any::<u16>(), any::<bool>())
        .prop_flat_map(|(shift, offset, len, list_offset, sorted)| {
            let page_size = 1_u64 << shift;
            let offset = (u64::from(offset) % page_size) & !3;
            let count = (offset + len).div_ceil(page_size) as usize;
            let list_offset = (u64::from(list_offset) % page_size) & !7;
            let pool = (LISTS - BASE) / page_size;
            let pages = proptest::collection::vec(0..pool, count).prop_map(move |mut pages| {
                if sorted {
                    let first = pages[0] % (pool - pages.len() as u64 + 1);
                    pages = (first..first + pages.len() as u64).collect();
                }
                pages.iter().map(|page| BASE.next_multiple_of(page_size) + page * page_size).collect()
            });
            (pages, Just((page_size, offset, len, list_offset)))
        })
        .prop_filter_map("within the memory", |(pages, (page_size, offset, len, list_offset))| {
            let pages: Vec<u64> = pages;
            let fits = pages.iter().all(|page| page + page_size <= LISTS);
            fits.then_some(PrpLayout { page_size, offset, len, pages, list_offset })
        })
}

/// Writes the lists as the specification draws them; returns the command and the addresses of all entries that hold pages.
fn write_prps(guest: &Guest, layout: &PrpLayout) -> (Sqe, Vec<u64>) {
    let (first, rest) = layout.pages.split_first().expect("a page");
    let prp1 = first + layout.offset;
    let size = layout.page_size;
    let mut entries = Vec::new();
    let prp2 = match rest {
        [] => 0xdead_beef,
        [only] => *only,
        _ => {
            let list = LISTS.next_multiple_of(size) + layout.list_offset;
            let (mut at, mut next_page) = (list, list - layout.list_offset + size);
            for (i, page) in rest.iter().enumerate() {
                let is_last_of_list = (at + 8).is_multiple_of(size);
                if is_last_of_list && i + 1 < rest.len() {
                    guest.put(at, &next_page);
                    (at, next_page) = (next_page, next_page + size);
                }
                guest.put(at, page);
                entries.push(at);
                at += 8;
            }
            list
        }
    };
    (prp_command(prp1, prp2), entries)
}

fn prp_model(layout: &PrpLayout) -> Vec<u8> {
    let mut left = layout.len;
    let mut bytes = Vec::new();
    for (i, page) in layout.pages.iter().enumerate() {
        let offset = if i == 0 { layout.offset } else { 0 };
        let len = left.min(layout.page_size - offset);
        bytes.extend(expected(page + offset, len));
        left -= len;
    }
    bytes
}

/// A transfer by an SGL: blocks, cut in segments.
#[derive(Clone, Debug)]
struct SglLayout {
    segments: Vec<Vec<(u64, u32)>>,
}

fn sgl_layouts() -> impl Strategy<Value = SglLayout> {
    let block = (BASE..LISTS - 10_000, prop_oneof![1 => Just(0_u32), 4 => 1_u32..9000]);
    let segment = proptest::collection::vec(block, 1..40);
    proptest::collection::vec(segment, 1..6).prop_map(|segments| SglLayout { segments })
}

/// Writes the segments; returns the first descriptor, and the addresses of all descriptors by segment.
fn write_sgl(guest: &Guest, layout: &SglLayout) -> (SglDescriptor, Vec<Vec<u64>>) {
    let mut at = LISTS + 8;
    let count = layout.segments.len();
    let mut places = Vec::new();
    for (i, blocks) in layout.segments.iter().enumerate() {
        let more = u64::from(i + 1 < count);
        places.push((0..blocks.len() as u64 + more).map(|n| at + n * 16).collect::<Vec<u64>>());
        at += (blocks.len() as u64 + more) * 16 + 24;
    }
    let lead = |i: usize| {
        let kind = if i + 1 == count { SglType::LAST_SEGMENT } else { SglType::SEGMENT };
        SglDescriptor::new(kind, places[i][0], places[i].len() as u32 * 16)
    };
    for (i, blocks) in layout.segments.iter().enumerate() {
        let blocks = blocks.iter().map(|&(addr, len)| SglDescriptor::data_block(addr, len));
        let next = (i + 1 < count).then(|| lead(i + 1));
        for (descriptor, &place) in blocks.chain(next).zip(&places[i]) {
            guest.put(place, &descriptor);
        }
    }
    (lead(0), places)
}

fn sgl_len(layout: &SglLayout) -> u64 {
    layout.segments.iter().flatten().map(|&(_, len)| u64::from(len)).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn prps_name_the_bytes_that_the_model_names(layout in prp_layouts()) {
        let guest = shared();
        let (sqe, _) = write_prps(&guest, &layout);
        prop_assert_eq!(guest.data(layout.page_size, &sqe, layout.len), Ok(prp_model(&layout)));
    }

    #[test]
    fn a_list_entry_with_an_offset_or_without_memory_is_refused(
        layout in prp_layouts(), which in any::<prop::sample::Index>(), unmapped in any::<bool>(), offset in 1_u64..4096,
    ) {
        let guest = shared();
        let (sqe, entries) = write_prps(&guest, &layout);
        prop_assume!(!entries.is_empty());
        let at = entries[which.index(entries.len())];
        let (entry, status) = if unmapped {
            (END.next_multiple_of(layout.page_size), Status::DATA_TRANSFER_ERROR)
        } else {
            (BASE.next_multiple_of(layout.page_size) + offset, Status::PRP_OFFSET_INVALID)
        };
        guest.put(at, &entry);
        prop_assert_eq!(guest.data(layout.page_size, &sqe, layout.len), Err(status.do_not_retry()));
    }

    #[test]
    fn sgls_name_the_bytes_that_the_model_names(layout in sgl_layouts(), mptr in any::<bool>()) {
        let guest = shared();
        let (first, _) = write_sgl(&guest, &layout);
        let mut sqe = sgl_command(first);
        if mptr {
            sqe.flags.set_psdt(Psdt::SGL_MPTR_SGL);
        }
        let model: Vec<u8> = layout.segments.iter().flatten().flat_map(|&(a, l)| expected(a, l.into())).collect();
        prop_assert_eq!(guest.data(4096, &sqe, sgl_len(&layout)), Ok(model));
    }

    #[test]
    fn an_sgl_of_another_length_than_the_data_is_refused(layout in sgl_layouts(), more in 1_u64..5000) {
        let guest = shared();
        let (first, _) = write_sgl(&guest, &layout);
        let invalid = Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        let len = sgl_len(&layout);
        prop_assert_eq!(guest.data(4096, &sgl_command(first), len + more), invalid.clone());
        prop_assume!(len > more);
        prop_assert_eq!(guest.data(4096, &sgl_command(first), len - more), invalid);
    }

    #[test]
    fn garbage_costs_a_status_and_bounded_work(
        psdt in 0_u8..4, prp1 in BASE - 64..END + 64, prp2 in any::<u64>(), near in any::<bool>(),
        words in proptest::collection::vec((0_u64..512, BASE - 64..END + 64), 0..64), len in 1_u64..=1 << 20,
    ) {
        let guest = shared();
        for &(at, value) in &words {
            guest.put(LISTS + at * 8, &value);
        }
        let mut sqe = prp_command(prp1, if near { LISTS + prp2 % 4096 } else { prp2 });
        sqe.flags.set_psdt(psdt.into());
        match guest.resolve(4096, &sqe, len) {
            Ok(_) => prop_assert!(psdt != 3),
            Err(status) => prop_assert!(status.dnr() && !status.is_success()),
        }
    }
}

fn refuses(guest: &Guest, sqe: &Sqe, len: u64, status: Status) {
    assert_eq!(guest.resolve(4096, sqe, len).map(|s| s.len()), Err(status.do_not_retry()));
}

#[test]
fn one_and_two_pages_need_no_list() {
    let guest = Guest::new();
    let one = guest.resolve(4096, &prp_command(BASE + 512, u64::MAX), 3584).expect("within the page");
    assert_eq!(one.len(), 1);
    let merged = guest.resolve(4096, &prp_command(BASE, BASE + 4096), 8192).expect("two neighbours");
    assert_eq!(merged.len(), 1);
    let two = guest.resolve(4096, &prp_command(BASE + 4096, BASE), 8192).expect("two pages");
    assert_eq!(two.len(), 2);
    assert_eq!(guest.resolve(4096, &prp_command(3, 3), 0).expect("no data, no pointers").len(), 0);
}

#[test]
fn wrong_prps_have_their_statuses() {
    let guest = Guest::new();
    refuses(&guest, &prp_command(BASE + 2, 0), 512, Status::PRP_OFFSET_INVALID);
    refuses(&guest, &prp_command(BASE, BASE + 4100), 8192, Status::PRP_OFFSET_INVALID);
    refuses(&guest, &prp_command(BASE, LISTS + 4), 16384, Status::PRP_OFFSET_INVALID);
    // Null, outside, over the end, at the end of the address space.
    refuses(&guest, &prp_command(0, 0), 512, Status::DATA_TRANSFER_ERROR);
    refuses(&guest, &prp_command(END, 0), 512, Status::DATA_TRANSFER_ERROR);
    refuses(&guest, &prp_command(BASE, END), 8192, Status::DATA_TRANSFER_ERROR);
    refuses(&guest, &prp_command(u64::MAX - 3, 0), 8, Status::DATA_TRANSFER_ERROR);
    refuses(&guest, &prp_command(BASE, 0), 16384, Status::DATA_TRANSFER_ERROR);
    // A list over the end of memory: it starts in the last page, and goes on in a page that is not there.
    let last = END - 4096;
    for at in (last..END - 8).step_by(8) {
        guest.put(at, &BASE);
    }
    guest.put(END - 8, &END);
    refuses(&guest, &prp_command(BASE, last), 4096 * 600, Status::DATA_TRANSFER_ERROR);
    // A second list must start with its page.
    guest.put(END - 8, &(LISTS + 8));
    refuses(&guest, &prp_command(BASE, last), 4096 * 600, Status::PRP_OFFSET_INVALID);
}

#[test]
fn a_list_that_leads_to_itself_ends_with_the_data() {
    let guest = Guest::new();
    for at in (LISTS..LISTS + 4096).step_by(8) {
        guest.put(at, &LISTS);
    }
    // Each entry is the list's own page: as data it is as good as any.
    let segments = guest.resolve(4096, &prp_command(BASE, LISTS), 4096 * 900).expect("899 pages of lists");
    assert_eq!(segments.len(), 900);
    refuses(&guest, &prp_command(BASE, LISTS), 4096 * 2000, Status::INVALID_FIELD);
}

#[test]
fn wrong_sgls_have_their_statuses() {
    let guest = Guest::new();
    let block = SglDescriptor::data_block(BASE, 512);
    let check = |first: SglDescriptor, status| refuses(&guest, &sgl_command(first), 512, status);
    // Segments of no, odd and misaligned size and place.
    check(SglDescriptor::last_segment(LISTS, 0), Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    check(SglDescriptor::segment(LISTS, 0), Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    check(SglDescriptor::last_segment(LISTS, 24), Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    check(SglDescriptor::last_segment(LISTS + 4, 16), Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    // Outside, overlong, wrapping.
    check(SglDescriptor::last_segment(END, 16), Status::DATA_TRANSFER_ERROR);
    check(SglDescriptor::data_block(END - 8, 512), Status::DATA_TRANSFER_ERROR);
    check(SglDescriptor::data_block(u64::MAX - 8, 512), Status::DATA_TRANSFER_ERROR);
    check(SglDescriptor::last_segment(u64::MAX - 7, 32), Status::DATA_TRANSFER_ERROR);
    check(SglDescriptor::data_block(BASE, u32::MAX), Status::DATA_SGL_LENGTH_INVALID);
    check(SglDescriptor::last_segment(LISTS, !15), Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS);
    // Types and sub types that we do not have.
    for kind in [SglType::BIT_BUCKET, SglType::KEYED_DATA_BLOCK, SglType::TRANSPORT_DATA_BLOCK, SglType(9), SglType(15)] {
        check(SglDescriptor::new(kind, BASE, 512), Status::SGL_DESCRIPTOR_TYPE_INVALID);
        guest.put(LISTS, &SglDescriptor::new(kind, BASE, 512));
        check(SglDescriptor::last_segment(LISTS, 16), Status::SGL_DESCRIPTOR_TYPE_INVALID);
    }
    let offset = SglIdentifier::new().with_subtype(SglSubtype::OFFSET);
    check(SglDescriptor { identifier: offset, ..block }, Status::SGL_DESCRIPTOR_TYPE_INVALID);
    // A segment that leads to itself.
    guest.put(LISTS, &SglDescriptor::segment(LISTS, 16));
    check(SglDescriptor::segment(LISTS, 16), Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS);
    // Leading on from the middle of a segment, from the last segment, and not leading on at all.
    guest.put(LISTS, &SglDescriptor::last_segment(LISTS + 64, 16));
    guest.put(LISTS + 16, &block);
    check(SglDescriptor::segment(LISTS, 32), Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS);
    check(SglDescriptor::last_segment(LISTS, 16), Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    guest.put(LISTS, &block);
    check(SglDescriptor::segment(LISTS, 16), Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
    // PSDT 3.
    let mut sqe = sgl_command(block);
    sqe.flags.set_psdt(Psdt(3));
    refuses(&guest, &sqe, 512, Status::INVALID_FIELD);
    // More pieces than a request can have.
    for i in 0..2048 {
        guest.put(LISTS + i * 16, &SglDescriptor::data_block(BASE + i * 4096 % HALF, 1));
    }
    let many = SglDescriptor::last_segment(LISTS, 2048 * 16);
    refuses(&guest, &sgl_command(many), 2048, Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS);
}

#[test]
fn memory_that_may_not_be_written_takes_no_data() {
    let mut guest = Guest::new();
    let read_only = Protection { read: true, write: false };
    let file = Some((guest.files[0].as_fd(), 0));
    guest.memory.map(GuestAddress(END), 4096, read_only, file).expect("it is mapped");
    guest.memory.map(GuestAddress(END + 4096), 4096, Protection { read: true, write: true }, None).expect("it is known");
    let mut segments = Vec::new();
    let mut to_guest = |addr| resolve(&guest.memory, 4096, &prp_command(addr, 0), 512, Access::Write, &mut segments);
    assert_eq!(to_guest(END), Err(Status::DATA_TRANSFER_ERROR.do_not_retry()));
    assert_eq!(to_guest(END + 4096), Err(Status::DATA_TRANSFER_ERROR.do_not_retry()));
    assert_eq!(to_guest(BASE), Ok(()));
    refuses(&guest, &prp_command(END + 4096, 0), 512, Status::DATA_TRANSFER_ERROR);
}

#[test]
fn copies_end_with_the_shorter_side() {
    let guest = Guest::new();
    let segments = guest.resolve(4096, &prp_command(BASE + 4092, BASE + 8192), 12).expect("two pieces");
    copy_out(&segments, &[7; 20]);
    let mut bytes = [0; 20];
    copy_in(&segments, &mut bytes);
    assert_eq!(bytes, [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(copy_value::<u64>(&segments), 0x0707_0707_0707_0707);
    assert_eq!(expected(BASE + 8200, 8).collect::<Vec<_>>(), {
        let mut after = [0; 8];
        guest.memory.read(GuestAddress(BASE + 8200), &mut after).expect("mapped");
        after
    });
}

/// Stops the other thread, also when an assertion fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn lists_that_change_while_they_are_read_are_right_or_refused() {
    let guest = Guest::new();
    guest.put(LISTS, &BASE);
    guest.put(LISTS + 8, &(BASE + 8192));
    let list = SglDescriptor::data_block(BASE, 512);
    guest.put(LISTS + 16, &list);
    let files = guest.files.each_ref().map(|file| file.try_clone().expect("a descriptor"));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The other side of the memory: an entry and a length that are now right, now wrong.
            let at = |addr: u64| (addr - BASE) % HALF;
            while !stop.load(Ordering::Relaxed) {
                for (entry, length) in [(END, u32::MAX), (BASE, 512), (BASE + 1, 0)] {
                    files[1].write_all_at(&entry.to_le_bytes(), at(LISTS)).expect("mapped");
                    files[1].write_all_at(&length.to_le_bytes(), at(LISTS + 24)).expect("mapped");
                }
            }
        });
        let _stop = Stop(&stop);
        let mut seen = [0; 3];
        // Until every answer was seen, and a while longer.
        while seen.iter().any(|&count| count < 100) {
            let prps = prp_command(BASE + 4096, LISTS);
            match guest.resolve(4096, &prps, 12288) {
                Ok(_) => seen[0] += 1,
                Err(status) => {
                    assert!([Status::DATA_TRANSFER_ERROR, Status::PRP_OFFSET_INVALID].contains(&status.code()), "{status}");
                    seen[1] += 1;
                }
            }
            match guest.resolve(4096, &sgl_command(SglDescriptor::last_segment(LISTS + 16, 16)), 512) {
                Ok(_) => seen[0] += 1,
                Err(status) => {
                    assert_eq!(status.code(), Status::DATA_SGL_LENGTH_INVALID);
                    seen[2] += 1;
                }
            }
        }
    });
}
