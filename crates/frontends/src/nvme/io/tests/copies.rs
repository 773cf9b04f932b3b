//! Copy.

use std::sync::atomic::{AtomicU64, Ordering};

use millrace_block::{METADATA_SIZE, Metadata, MetadataFormat, NO_METADATA, Request, Step, TaskContext, Volume};
use millrace_nvme_spec::{
    command::NamespaceId,
    nvm::{CopyCdw12, CopyFormat, CopyRange, CopySourceOptions, ProtectionCdw15, ProtectionInfo, ProtectionTuple},
};

use super::super::limits::{MCL, MSRC_Z, MSSRL};
use super::*;
use crate::nvme::fixture::TaggedMemory;

fn copy(guest: &mut FakeGuest, format: CopyFormat, target: u64, ranges: &[CopyRange]) -> Cqe {
    let mut sqe = sqe(NvmOpcode::COPY.0, 1);
    sqe.set_cdw10_11(target);
    sqe.cdw12 = CopyCdw12::new().with_nr_z((ranges.len() - 1) as u8).with_format(format).into_bits();
    guest.command_writing(1, sqe, ranges.as_bytes())
}

fn own(slba: u64, blocks: u64) -> CopyRange {
    CopyRange::new(NamespaceId::NONE, slba, (blocks - 1) as u16)
}

fn other(nsid: u32, slba: u64, blocks: u64) -> CopyRange {
    CopyRange::new(NamespaceId(nsid), slba, (blocks - 1) as u16)
}

/// The host enables format 2h.
fn enable_format_2(guest: &FakeGuest) {
    guest.controller.state.features.host_behavior.set(u32::from(super::super::limits::CDFE) << 16);
}

#[test]
fn ranges_become_one() {
    let mut guest = guest(BlockSize::B512);
    let data = pattern(1 << 20, 9);
    succeeds(write(&mut guest, 0, &data));
    succeeds(copy(&mut guest, CopyFormat::SLBA_32, 8000, &[own(10, 1), own(0, 3), own(2000, 40), own(10, 1)]));
    let block = |n: usize, count: usize| &data[n * 512..(n + count) * 512];
    let expected = [block(10, 1), block(0, 3), block(2000, 40), block(10, 1)].concat();
    assert_eq!(read(&mut guest, 8000, expected.len()), expected);
    // Long enough for several pieces, and forced.
    let mut sqe = sqe(NvmOpcode::COPY.0, 1);
    sqe.set_cdw10_11(8192);
    sqe.cdw12 = CopyCdw12::new().with_fua(true).into_bits();
    succeeds(guest.command_writing(1, sqe, [own(0, 6000)].as_bytes()));
    assert_eq!(read(&mut guest, 8192, 1 << 20), data);
}

#[test]
fn limits_are_what_identify_says() {
    let mut guest = guest(BlockSize::B512);
    let too_long = Status::COMMAND_SIZE_LIMIT_EXCEEDED;
    fails(copy(&mut guest, CopyFormat::SLBA_32, 0, &[own(0, u64::from(MSSRL) + 1)]), too_long);
    fails(copy(&mut guest, CopyFormat::SLBA_32, 0, &vec![own(0, 1); usize::from(MSRC_Z) + 2]), too_long);
    succeeds(copy(&mut guest, CopyFormat::SLBA_32, 1000, &vec![own(0, 1); usize::from(MSRC_Z) + 1]));
    guest.add_memory_volume(2, 1 << 30, BlockSize::B512);
    enable_format_2(&guest);
    let ranges = vec![other(2, 0, u64::from(MSSRL)); (MCL / u32::from(MSSRL)) as usize + 1];
    let cqe = copy(&mut guest, CopyFormat::NSID_SLBA_32, 0, &ranges);
    fails(cqe, too_long);
    assert_eq!(cqe.dw0, ranges.len() as u32 - 1);
}

#[test]
fn wrong_ranges_are_named() {
    let mut guest = guest(BlockSize::B512);
    let end = SIZE / 512;
    let cqe = copy(&mut guest, CopyFormat::SLBA_32, 100, &[own(0, 4), own(end - 1, 2)]);
    fails(cqe, Status::LBA_OUT_OF_RANGE);
    assert_eq!(cqe.dw0, 1);
    fails(copy(&mut guest, CopyFormat::SLBA_32, end - 1, &[own(0, 2)]), Status::LBA_OUT_OF_RANGE);
    fails(copy(&mut guest, CopyFormat::SLBA_32, u64::MAX, &[own(0, 2)]), Status::LBA_OUT_OF_RANGE);
    let cqe = copy(&mut guest, CopyFormat::SLBA_32, 100, &[own(0, 4), own(105, 4)]);
    fails(cqe, Status::OVERLAPPING_IO_RANGE);
    assert_eq!(cqe.dw0, 1);
    succeeds(guest.command(1, command(NvmOpcode::WRITE_UNCORRECTABLE, 50, 1)));
    let cqe = copy(&mut guest, CopyFormat::SLBA_32, 100, &[own(0, 4), own(48, 4)]);
    fails(cqe, Status::UNRECOVERED_READ_ERROR);
    assert_eq!(cqe.dw0, 1);
}

#[test]
fn formats_that_are_not_there_or_not_enabled() {
    let mut guest = guest(BlockSize::B512);
    for format in [CopyFormat::SLBA_40, CopyFormat::NSID_SLBA_32, CopyFormat::NSID_SLBA_40, CopyFormat(4), CopyFormat(15)] {
        fails(copy(&mut guest, format, 100, &[other(1, 0, 1)]), Status::INVALID_FIELD);
    }
    enable_format_2(&guest);
    succeeds(copy(&mut guest, CopyFormat::NSID_SLBA_32, 100, &[other(1, 0, 1)]));
}

#[test]
fn across_namespaces() {
    let mut guest = guest(BlockSize::B512);
    guest.add_memory_volume(2, SIZE, BlockSize::B512);
    guest.add_memory_volume(3, SIZE, BlockSize::B4096);
    enable_format_2(&guest);
    let data = pattern(1 << 20, 9);
    let mut to_two = command(NvmOpcode::WRITE, 0, 2048);
    to_two.nsid = NamespaceId(2);
    succeeds(guest.command_writing(1, to_two, &data));
    succeeds(copy(&mut guest, CopyFormat::NSID_SLBA_32, 8, &[other(2, 0, 2000), other(1, 5000, 4), other(2, 7, 1)]));
    assert_eq!(read(&mut guest, 8, 2000 * 512), &data[..2000 * 512]);
    assert_eq!(read(&mut guest, 2008, 5 * 512), [&[0; 2048], &data[7 * 512..][..512]].concat());
    let mut across = |range| copy(&mut guest, CopyFormat::NSID_SLBA_32, 0, &[range]);
    fails(across(other(3, 0, 1)), Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT);
    fails(across(other(4, 0, 1)), Status::INVALID_FIELD);
    fails(across(other(0, 0, 1)), Status::INVALID_NAMESPACE_OR_FORMAT);
    let mut fast = other(2, 0, 1);
    fast.sopt = CopySourceOptions::new().with_fco(true);
    fails(across(fast), Status::FAST_COPY_NOT_POSSIBLE);
    // The same blocks of another namespace do not overlap.
    succeeds(across(other(2, 0, 8)));
}

/// More than fit one buffer with their metadata.
const PROTECTED: u64 = 300;
const TAG: u16 = 0x4d52;

/// The protection information of blocks of zeroes, whose guard is 0.
fn zeroes_tuples(kind: u8, reference: u32) -> Vec<[u8; METADATA_SIZE]> {
    let reference = |at| if kind == 3 { reference } else { reference + at };
    let tuple = |at| ProtectionTuple::new(0, TAG, reference(at));
    (0..PROTECTED as u32).map(|at| tuple(at).as_bytes().try_into().unwrap()).collect()
}

#[test]
fn protection_information_comes_across_namespaces_as_it_is_or_is_made_anew() {
    for kind in 1..=3 {
        let format = MetadataFormat { protection: kind, ..MetadataFormat::default() };
        let [target, source] = [(); 2].map(|()| TaggedMemory::new(SIZE, BlockSize::B512, Metadata::Shown(format)));
        let mut guest = FakeGuest::boot();
        guest.add_volume(1, Arc::clone(&target) as Arc<dyn Volume>);
        guest.add_volume(2, Arc::clone(&source) as Arc<dyn Volume>);
        guest.make_queues(1, 64);
        enable_format_2(&guest);
        let tuples = zeroes_tuples(kind, 40);
        source.tags()[40..][..tuples.len()].copy_from_slice(&tuples);
        let mut copy = |to: u64, infos: [ProtectionInfo; 2]| {
            let mut range = other(2, 40, PROTECTED);
            (range.eilbrt, range.elbat, range.elbatm) = (40, TAG, 0xffff);
            let mut sqe = sqe(NvmOpcode::COPY.0, 1);
            sqe.set_cdw10_11(to);
            let cdw12 = CopyCdw12::new().with_format(CopyFormat::NSID_SLBA_32);
            sqe.cdw12 = cdw12.with_prinfor(infos[0]).with_prinfow(infos[1]).into_bits();
            sqe.cdw14 = to as u32;
            sqe.cdw15 = ProtectionCdw15::new().with_lbat(TAG).with_lbatm(0xffff).into_bits();
            guest.command_writing(1, sqe, [range].as_bytes())
        };
        let checks = ProtectionInfo::new().with_check_guard(true).with_check_application(true);
        let checks = checks.with_check_reference(kind != 3);
        // At the same blocks they are right as they are.
        succeeds(copy(40, [checks, checks]));
        assert_eq!(target.tags()[40..][..tuples.len()], tuples);
        // Elsewhere those of types 1 and 2 are not, and are made anew.
        if kind != 3 {
            fails(copy(1000, [checks, checks]), Status::REFERENCE_TAG_CHECK_ERROR);
        }
        let act = checks.with_pract(true);
        succeeds(copy(1000, [act, act]));
        assert_eq!(target.tags()[1000..][..tuples.len()], zeroes_tuples(kind, 1000));
        // What fails its check is not spread.
        source.tags()[50][0] ^= 1;
        fails(copy(2000, [act, act]), Status::GUARD_CHECK_ERROR);
        assert!(target.tags()[2000..][..tuples.len()].iter().all(|tag| *tag == NO_METADATA));
    }
}

/// A volume that leaves something in the scratch for each write, as a mirror does.
struct Untidy {
    inner: Arc<dyn Volume>,
    overflows: AtomicU64,
}

impl Volume for Untidy {
    millrace_block::passes_on!(inner);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let segments = cx.scratch.copy_slice(request.segments);
        self.overflows.fetch_add(cx.scratch.overflows(), Ordering::Relaxed);
        self.inner.submit(cx, Request { segments, ..request })
    }

    fn scratch_bytes(&self) -> usize {
        1024 + self.inner.scratch_bytes()
    }
}

#[test]
fn nothing_piles_up_over_the_pieces_of_a_copy_from_another_namespace() {
    let mut guest = FakeGuest::boot();
    let inner = MemoryVolume::create("inner", SIZE, BlockSize::B512).expect("a volume");
    let untidy = Arc::new(Untidy { inner, overflows: AtomicU64::new(0) });
    guest.add_volume(1, Arc::clone(&untidy) as Arc<dyn Volume>);
    guest.add_memory_volume(2, SIZE, BlockSize::B512);
    guest.make_queues(1, 64);
    enable_format_2(&guest);
    let data = pattern(2000 * 512, 5);
    let mut to_two = command(NvmOpcode::WRITE, 0, 2000);
    to_two.nsid = NamespaceId(2);
    succeeds(guest.command_writing(1, to_two, &data));
    // Far more pieces than a scratch has places.
    succeeds(copy(&mut guest, CopyFormat::NSID_SLBA_32, 0, &[other(2, 0, 2000); 8]));
    assert_eq!(untidy.overflows.load(Ordering::Relaxed), 0);
    for at in [0, 14_000] {
        assert_eq!(read(&mut guest, at, data.len()), data);
    }
}
