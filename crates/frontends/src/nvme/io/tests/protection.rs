//! Namespaces with metadata and protection information.

use millrace_block::{METADATA_SIZE, Metadata, MetadataFormat, NO_METADATA, Volume};
use millrace_nvme_spec::{
    command::NamespaceId,
    identify::{Cns, IdentifyNamespace},
    nvm::{
        CopyCdw12, CopyRange, DatasetManagementCdw11, DatasetRange, ProtectionCdw15, ProtectionInfo, ProtectionTuple,
        WriteZeroesCdw12,
    },
    opcode::AdminOpcode,
};

use super::{super::protect::guard, *};
use crate::nvme::fixture::TaggedMemory;

fn form(protection: u8, extended: bool) -> MetadataFormat {
    MetadataFormat { protection, extended, first: false }
}

fn tagged_guest(block_size: BlockSize, format: MetadataFormat) -> (FakeGuest, Arc<TaggedMemory>) {
    let mut guest = FakeGuest::boot();
    let volume = TaggedMemory::new(SIZE, block_size, Metadata::Shown(format));
    guest.add_volume(1, Arc::clone(&volume) as Arc<dyn Volume>);
    guest.make_queues(1, 64);
    (guest, volume)
}

fn all_checks(kind: u8) -> ProtectionInfo {
    let tags = ProtectionInfo::new().with_check_guard(true).with_check_application(true);
    tags.with_check_reference(kind != 3)
}

const TAG: u16 = 0x4d52;

/// A command on blocks with metadata.
#[derive(Clone, Copy)]
struct Io {
    opcode: NvmOpcode,
    slba: u64,
    blocks: u64,
    info: ProtectionInfo,
    reference: u32,
    application: ProtectionCdw15,
    /// How metadata in a buffer of their own are pointed to.
    psdt: Psdt,
}

impl Io {
    fn new(opcode: NvmOpcode, slba: u64, blocks: u64, info: ProtectionInfo) -> Self {
        let application = ProtectionCdw15::new().with_lbat(TAG).with_lbatm(0xffff);
        Self { opcode, slba, blocks, info, reference: slba as u32, application, psdt: Psdt::PRP }
    }

    fn sqe(&self) -> Sqe {
        let mut sqe = command(self.opcode, self.slba, self.blocks);
        sqe.cdw12 = ReadWriteCdw12::from_bits(sqe.cdw12).with_prinfo(self.info).into_bits();
        (sqe.cdw14, sqe.cdw15) = (self.reference, self.application.into_bits());
        sqe
    }

    /// Puts the pointers to memory with these data and metadata into a command; returns where they are.
    fn point(&self, guest: &mut FakeGuest, sqe: &mut Sqe, data: &[u8], tags: &[u8], extended: bool) -> (u64, u64) {
        let unit = data.len() / self.blocks as usize;
        let together = extended && !self.info.pract();
        let blocks = data.chunks(unit).zip(tags.chunks(METADATA_SIZE));
        let data = if together { blocks.flat_map(|(data, tag)| [data, tag].concat()).collect() } else { data.to_vec() };
        let at = guest.alloc_pages((data.len() as u64 + 64).div_ceil(PAGE)) + 60;
        // Not at the start of its page: metadata need a dword's alignment only.
        let metadata = guest.alloc_pages((tags.len() as u64 + 100).div_ceil(PAGE)) + 20;
        guest.write(at, &data);
        guest.write(metadata, tags);
        sqe.flags = CommandFlags::new().with_psdt(self.psdt);
        sqe.dptr = match self.psdt {
            Psdt::PRP => guest.prps(at, data.len() as u64),
            _ => SglDescriptor::data_block(at, data.len() as u32).into(),
        };
        sqe.mptr = metadata;
        if self.psdt == Psdt::SGL_MPTR_SGL {
            // In two parts, by way of a segment.
            let (half, list) = ((tags.len() / 2) as u32, guest.alloc_pages(1));
            let parts = [(metadata, half), (metadata + u64::from(half), tags.len() as u32 - half)];
            let parts = parts.map(|(at, len)| SglDescriptor::data_block(at, len));
            guest.write(list + 64, parts.as_bytes());
            guest.write_value(list, &SglDescriptor::last_segment(list + 64, 32));
            sqe.mptr = list;
        }
        (at, metadata)
    }

    /// Runs it; the data and the metadata that the guest has then.
    fn run(&self, guest: &mut FakeGuest, format: MetadataFormat, data: &[u8], tags: &[u8]) -> (Cqe, Vec<u8>, Vec<u8>) {
        let mut sqe = self.sqe();
        let (at, metadata) = self.point(guest, &mut sqe, data, tags, format.extended);
        let cqe = guest.command(1, sqe);
        if format.extended && !self.info.pract() {
            let unit = data.len() / self.blocks as usize;
            let all = guest.read(at, data.len() + tags.len());
            let blocks: Vec<_> = all.chunks(unit + METADATA_SIZE).map(|block| block.split_at(unit)).collect();
            let data = blocks.iter().flat_map(|(data, _)| data.to_vec()).collect();
            return (cqe, data, blocks.iter().flat_map(|(_, tag)| tag.to_vec()).collect());
        }
        (cqe, guest.read(at, data.len()), guest.read(metadata, tags.len()))
    }
}

/// The protection information of blocks.
fn tuples(kind: u8, data: &[u8], unit: usize, reference: u32) -> Vec<u8> {
    let blocks = data.chunks(unit).enumerate();
    let reference = |at| if kind == 3 { reference } else { reference.wrapping_add(at) };
    let tuples = blocks.map(|(at, data)| ProtectionTuple::new(guard(data), TAG, reference(at as u32)));
    tuples.flat_map(|tuple| tuple.as_bytes().to_vec()).collect()
}

/// Every type, form and block size.
fn each(test: impl Fn(u8, MetadataFormat, BlockSize)) {
    for kind in 1..=3 {
        for extended in [false, true] {
            for block_size in [BlockSize::B512, BlockSize::B4096] {
                test(kind, form(kind, extended), block_size);
            }
        }
    }
}

#[test]
fn what_was_written_is_read_with_its_metadata_and_without() {
    each(|kind, format, block_size| {
        let (mut guest, _) = tagged_guest(block_size, format);
        let unit = block_size.bytes() as usize;
        // Up to the largest transfer, metadata at the end of blocks counted.
        let most = (1 << 20) / (unit + if format.extended { METADATA_SIZE } else { 0 });
        for psdt in [Psdt::PRP, Psdt::SGL_MPTR_CONTIGUOUS, Psdt::SGL_MPTR_SGL] {
            for (slba, blocks) in [(0, 1), (7, 3), (100, 130), (200, most as u64)] {
                let data = pattern(blocks as usize * unit, slba as u8);
                let tags = tuples(kind, &data, unit, slba as u32);
                let io = |opcode, info| Io { psdt, ..Io::new(opcode, slba, blocks, info) };
                let (blank, no_tags) = (vec![0; data.len()], vec![0; tags.len()]);
                succeeds(io(NvmOpcode::WRITE, all_checks(kind)).run(&mut guest, format, &data, &tags).0);
                let (cqe, found, found_tags) =
                    io(NvmOpcode::READ, all_checks(kind)).run(&mut guest, format, &blank, &no_tags);
                succeeds(cqe);
                assert!(found == data && found_tags == tags, "{format:?} {block_size:?} {psdt:?}: {blocks} from {slba}");
                succeeds(io(NvmOpcode::COMPARE, all_checks(kind)).run(&mut guest, format, &data, &tags).0);
                // The controller strips, and inserts the same.
                let act = all_checks(kind).with_pract(true);
                let (cqe, found, _) = io(NvmOpcode::READ, act).run(&mut guest, format, &blank, &[]);
                succeeds(cqe);
                assert!(found == data);
                let other = pattern(data.len(), 99);
                succeeds(io(NvmOpcode::WRITE, act).run(&mut guest, format, &other, &[]).0);
                let (cqe, found, found_tags) =
                    io(NvmOpcode::READ, all_checks(kind)).run(&mut guest, format, &blank, &no_tags);
                succeeds(cqe);
                assert!(found == other && found_tags == tuples(kind, &other, unit, slba as u32));
                succeeds(io(NvmOpcode::COMPARE, act).run(&mut guest, format, &other, &[]).0);
                succeeds(guest.command(1, io(NvmOpcode::VERIFY, all_checks(kind)).sqe()));
            }
        }
        assert_eq!(in_flight(&guest), 0);
    });
}

#[test]
fn a_transfer_beyond_mdts_with_its_metadata_is_refused() {
    let format = form(1, true);
    let (mut guest, _) = tagged_guest(BlockSize::B4096, format);
    let write = |info| Io::new(NvmOpcode::WRITE, 0, 256, info);
    let (data, tags) = (vec![0; 1 << 20], vec![0; 256 * METADATA_SIZE]);
    fails(write(ProtectionInfo::new()).run(&mut guest, format, &data, &tags).0, Status::INVALID_FIELD);
    succeeds(write(ProtectionInfo::new().with_pract(true)).run(&mut guest, format, &data, &[]).0);
}

/// Three blocks of 512 bytes with everything right.
fn three(kind: u8) -> (Vec<u8>, Vec<u8>) {
    let data = pattern(3 * 512, 5);
    let tags = tuples(kind, &data, 512, 40);
    (data, tags)
}

#[test]
fn every_check_has_its_status_on_both_ways() {
    each(|kind, format, block_size| {
        if block_size != BlockSize::B512 {
            return;
        }
        let (mut guest, volume) = tagged_guest(block_size, format);
        let (data, tags) = three(kind);
        let io = |opcode, info| Io::new(opcode, 40, 3, info);
        let none = ProtectionInfo::new();
        let checks = [
            (0, none.with_check_guard(true), Status::GUARD_CHECK_ERROR),
            (2, none.with_check_application(true), Status::APPLICATION_TAG_CHECK_ERROR),
            (7, none.with_check_reference(true), Status::REFERENCE_TAG_CHECK_ERROR),
        ];
        for (byte, check, status) in checks.into_iter().filter(|(_, check, _)| kind != 3 || !check.check_reference()) {
            let mut wrong = tags.clone();
            wrong[METADATA_SIZE + byte] ^= 0x10;
            succeeds(io(NvmOpcode::WRITE, all_checks(kind)).run(&mut guest, format, &data, &tags).0);
            fails(io(NvmOpcode::WRITE, check).run(&mut guest, format, &data, &wrong).0, status);
            let (cqe, _, kept) = io(NvmOpcode::READ, all_checks(kind)).run(&mut guest, format, &[0; 1536], &[0; 24]);
            succeeds(cqe);
            assert_eq!(kept, tags, "a write that fails its check changes nothing");
            fails(io(NvmOpcode::COMPARE, check).run(&mut guest, format, &data, &wrong).0, status);
            // Without the check it is written as it is, and found by whoever checks.
            succeeds(io(NvmOpcode::WRITE, none).run(&mut guest, format, &data, &wrong).0);
            let (cqe, _, found) = io(NvmOpcode::READ, none).run(&mut guest, format, &[0; 1536], &[0; 24]);
            succeeds(cqe);
            assert_eq!(found, wrong);
            fails(io(NvmOpcode::READ, check).run(&mut guest, format, &[0; 1536], &[0; 24]).0, status);
            fails(io(NvmOpcode::READ, check.with_pract(true)).run(&mut guest, format, &[0; 1536], &[]).0, status);
            fails(guest.command(1, io(NvmOpcode::VERIFY, check).sqe()), status);
            fails(io(NvmOpcode::COMPARE, check).run(&mut guest, format, &data, &tags).0, status);
            // Bits that the mask leaves out do not count.
            if byte == 2 {
                let masked = Io {
                    application: ProtectionCdw15::new().with_lbat(TAG).with_lbatm(0x0fff),
                    ..io(NvmOpcode::READ, check)
                };
                succeeds(masked.run(&mut guest, format, &[0; 1536], &[0; 24]).0);
            }
            // Nor does anything where the application tag says so; of type 3, with the reference tag.
            let mut escaped = wrong.clone();
            escaped[METADATA_SIZE + 2..METADATA_SIZE + if kind == 3 { 8 } else { 4 }].fill(0xff);
            if byte == 0 {
                succeeds(io(NvmOpcode::WRITE, check).run(&mut guest, format, &data, &escaped).0);
                succeeds(io(NvmOpcode::READ, check).run(&mut guest, format, &[0; 1536], &[0; 24]).0);
            }
        }
        assert!(guest.controller.counters.media_errors > 0);
        // A bit that flips below.
        succeeds(io(NvmOpcode::WRITE, all_checks(kind)).run(&mut guest, format, &data, &tags).0);
        volume.tags()[41][1] ^= 1;
        let read = io(NvmOpcode::READ, all_checks(kind)).run(&mut guest, format, &[0; 1536], &[0; 24]);
        fails(read.0, Status::GUARD_CHECK_ERROR);
        assert_eq!(&read.1[..512], &data[..512], "the blocks before it came");
    });
}

#[test]
fn a_long_write_that_fails_its_check_changes_nothing() {
    let format = form(2, false);
    let (mut guest, _) = tagged_guest(BlockSize::B4096, format);
    let data = pattern(100 * 4096, 1);
    let mut tags = tuples(2, &data, 4096, 0);
    tags[99 * METADATA_SIZE] ^= 1;
    let io = |opcode| Io::new(opcode, 0, 100, all_checks(2));
    fails(io(NvmOpcode::WRITE).run(&mut guest, format, &data, &tags).0, Status::GUARD_CHECK_ERROR);
    let (cqe, found, found_tags) = io(NvmOpcode::READ).run(&mut guest, format, &vec![1; data.len()], &vec![0; tags.len()]);
    succeeds(cqe);
    assert!(found.iter().all(|byte| *byte == 0) && found_tags.iter().all(|byte| *byte == 0xff), "never written");
}

#[test]
fn fields_that_do_not_fit_the_type_are_refused() {
    let reference = ProtectionInfo::new().with_check_reference(true);
    for (kind, wrong) in [(1, true), (2, false), (3, true)] {
        let format = form(kind, false);
        let (mut guest, _) = tagged_guest(BlockSize::B512, format);
        for opcode in [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::COMPARE] {
            let io = Io { reference: 41, ..Io::new(opcode, 40, 3, reference) };
            let (data, _) = three(kind);
            let tags = tuples(kind, &data, 512, 41);
            let (cqe, _, _) = io.run(&mut guest, format, &data, &tags);
            if wrong {
                fails(cqe, Status::INVALID_PROTECTION_INFORMATION);
            } else if opcode != NvmOpcode::COMPARE {
                succeeds(cqe);
            }
        }
        let zeroes = |guest: &mut FakeGuest, info| {
            let mut sqe = Io::new(NvmOpcode::WRITE_ZEROES, 40, 3, ProtectionInfo::new()).sqe();
            sqe.cdw12 = WriteZeroesCdw12::new().with_nlb_z(2).with_prinfo(info).into_bits();
            guest.command(1, sqe)
        };
        let guard = ProtectionInfo::new().with_check_guard(true);
        fails(zeroes(&mut guest, guard), Status::INVALID_PROTECTION_INFORMATION);
        let act = ProtectionInfo::new().with_pract(true);
        fails(guest.command(1, Io::new(NvmOpcode::VERIFY, 40, 3, act).sqe()), Status::INVALID_PROTECTION_INFORMATION);
    }
}

#[test]
fn bad_metadata_pointers_are_refused() {
    let format = form(1, false);
    let (mut guest, _) = tagged_guest(BlockSize::B512, format);
    let (data, tags) = three(1);
    for (psdt, mptr, status) in [
        (Psdt::PRP, MEMORY_BASE + 2, Status::INVALID_FIELD),
        (Psdt::PRP, 0, Status::DATA_TRANSFER_ERROR),
        (Psdt::SGL_MPTR_CONTIGUOUS, MEMORY_BASE + MEMORY_SIZE - 23, Status::DATA_TRANSFER_ERROR),
        (Psdt::SGL_MPTR_CONTIGUOUS, u64::MAX - 3, Status::DATA_TRANSFER_ERROR),
        (Psdt::SGL_MPTR_SGL, MEMORY_BASE + 4, Status::INVALID_SGL_SEGMENT_DESCRIPTOR),
        (Psdt::SGL_MPTR_SGL, 8, Status::DATA_TRANSFER_ERROR),
    ] {
        let io = Io { psdt, ..Io::new(NvmOpcode::WRITE, 40, 3, ProtectionInfo::new()) };
        let mut sqe = io.sqe();
        io.point(&mut guest, &mut sqe, &data, &tags, false);
        sqe.mptr = mptr;
        fails(guest.command(1, sqe), status);
    }
    for len in [23, 25] {
        let io = Io { psdt: Psdt::SGL_MPTR_SGL, ..Io::new(NvmOpcode::WRITE, 40, 3, ProtectionInfo::new()) };
        let mut sqe = io.sqe();
        let (_, metadata) = io.point(&mut guest, &mut sqe, &data, &tags, false);
        guest.write_value(sqe.mptr, &SglDescriptor::data_block(metadata, len));
        fails(guest.command(1, sqe), Status::METADATA_SGL_LENGTH_INVALID);
    }
}

#[test]
fn erased_blocks_have_the_metadata_that_they_should() {
    each(|kind, format, block_size| {
        let (mut guest, volume) = tagged_guest(block_size, format);
        let unit = block_size.bytes() as usize;
        let data = pattern(300 * unit, 5);
        let act = ProtectionInfo::new().with_pract(true);
        let write = |guest: &mut FakeGuest, slba, blocks: u64| {
            succeeds(
                Io::new(NvmOpcode::WRITE, slba, blocks, act).run(guest, format, &data[..blocks as usize * unit], &[]).0,
            );
        };
        (0..600).step_by(100).for_each(|slba| write(&mut guest, slba, 100));
        // Long enough for several buffers.
        let zeroes = |guest: &mut FakeGuest, slba, blocks: u64, info| {
            let mut sqe = Io::new(NvmOpcode::WRITE_ZEROES, slba, blocks, info).sqe();
            let cdw12 = WriteZeroesCdw12::new().with_nlb_z(blocks as u16 - 1).with_deac(true).with_prinfo(info);
            sqe.cdw12 = cdw12.into_bits();
            succeeds(guest.command(1, sqe));
        };
        zeroes(&mut guest, 10, 200, act);
        zeroes(&mut guest, 300, 3, ProtectionInfo::new());
        assert_eq!(volume.tags()[10..210].concat(), tuples(kind, &vec![0; 200 * unit], unit, 10));
        assert_eq!(volume.tags()[300..303].concat(), [0; 24]);
        let read = Io::new(NvmOpcode::READ, 10, 200, all_checks(kind));
        let (cqe, found, _) = read.run(&mut guest, format, &vec![1; 200 * unit], &vec![0; 1600]);
        succeeds(cqe);
        assert!(found.iter().all(|byte| *byte == 0));
        let mut sqe = sqe(NvmOpcode::DATASET_MANAGEMENT.0, 1);
        sqe.cdw11 = DatasetManagementCdw11::new().with_ad(true).into_bits();
        let range = DatasetRange { context_attributes: 0, length: 5, slba: 400 };
        succeeds(guest.command_writing(1, sqe, range.as_bytes()));
        assert_eq!(volume.tags()[400..405].concat(), [0xff; 40]);
        // Which says that there is nothing to check.
        let read = Io { reference: 400, ..Io::new(NvmOpcode::READ, 400, 5, all_checks(kind)) };
        succeeds(read.run(&mut guest, format, &vec![1; 5 * unit], &[0; 40]).0);
        succeeds(guest.command(1, command(NvmOpcode::WRITE_UNCORRECTABLE, 500, 1)));
        fails(guest.command(1, Io::new(NvmOpcode::VERIFY, 499, 5, all_checks(kind)).sqe()), Status::UNRECOVERED_READ_ERROR);
        write(&mut guest, 500, 1);
        succeeds(guest.command(1, Io::new(NvmOpcode::VERIFY, 500, 1, all_checks(kind)).sqe()));
    });
}

fn copy(guest: &mut FakeGuest, target: u64, infos: [ProtectionInfo; 2], ranges: &[CopyRange]) -> Cqe {
    let mut sqe = Io::new(NvmOpcode::COPY, target, 1, ProtectionInfo::new()).sqe();
    let cdw12 = CopyCdw12::new().with_nr_z(ranges.len() as u8 - 1).with_prinfor(infos[0]).with_prinfow(infos[1]);
    sqe.cdw12 = cdw12.into_bits();
    guest.command_writing(1, sqe, ranges.as_bytes())
}

#[test]
fn a_copy_checks_what_it_reads_and_makes_or_checks_what_it_writes() {
    each(|kind, format, block_size| {
        let (mut guest, volume) = tagged_guest(block_size, format);
        let unit = block_size.bytes() as usize;
        let data = pattern(150 * unit, 5);
        let act = all_checks(kind).with_pract(true);
        succeeds(Io::new(NvmOpcode::WRITE, 40, 150, act).run(&mut guest, format, &data, &[]).0);
        let range = |slba: u64, blocks: u16| {
            let mut range = CopyRange::new(NamespaceId::NONE, slba, blocks - 1);
            (range.eilbrt, range.elbat, range.elbatm) = (if kind == 3 { 40 } else { slba as u32 }, TAG, 0xffff);
            range
        };
        let ranges = [range(140, 10), range(40, 140)];
        succeeds(copy(&mut guest, 1000, [act, act], &ranges));
        let copied = [&data[100 * unit..110 * unit], &data[..140 * unit]].concat();
        let tags = tuples(kind, &copied, unit, 1000);
        let read = Io::new(NvmOpcode::READ, 1000, 150, all_checks(kind));
        let (cqe, found, found_tags) = read.run(&mut guest, format, &vec![0; copied.len()], &vec![0; tags.len()]);
        succeeds(cqe);
        assert!(found == copied && found_tags == tags);
        // As they are: the guard and the application tag fit any place.
        let tags_only = ProtectionInfo::new().with_check_guard(true).with_check_application(true);
        succeeds(copy(&mut guest, 500, [tags_only, tags_only], &ranges));
        let all = volume.tags().clone();
        assert_eq!(all[510..650], all[40..180]);
        if kind != 3 {
            let reference = ProtectionInfo::new().with_check_reference(true);
            fails(copy(&mut guest, 500, [tags_only, reference], &ranges), Status::REFERENCE_TAG_CHECK_ERROR);
        }
        let mut other = range(40, 140);
        other.elbat = 1;
        let cqe = copy(&mut guest, 500, [act, act], &[range(140, 10), other]);
        fails(cqe, Status::APPLICATION_TAG_CHECK_ERROR);
        assert_eq!(cqe.dw0, 1, "the range that was not copied");
        fails(copy(&mut guest, 500, [act, tags_only], &ranges), Status::INVALID_FIELD);
        volume.tags()[50][0] ^= 1;
        fails(copy(&mut guest, 500, [act, act], &ranges), Status::GUARD_CHECK_ERROR);
    });
}

#[test]
fn a_copy_goes_between_namespaces_of_one_format_only() {
    let (mut guest, _) = tagged_guest(BlockSize::B512, form(1, false));
    guest.add_memory_volume(2, SIZE, BlockSize::B512);
    let other = TaggedMemory::new(SIZE, BlockSize::B512, Metadata::Shown(form(1, false)));
    guest.add_volume(3, Arc::clone(&other) as Arc<dyn Volume>);
    guest.controller.state.features.host_behavior.set(u32::from(super::super::limits::CDFE) << 16);
    let mut across = |nsid| {
        let act = ProtectionInfo::new().with_pract(true);
        let mut sqe = Io::new(NvmOpcode::COPY, 0, 1, act).sqe();
        let format = millrace_nvme_spec::nvm::CopyFormat::NSID_SLBA_32;
        sqe.cdw12 = CopyCdw12::new().with_format(format).with_prinfor(act).with_prinfow(act).into_bits();
        guest.command_writing(1, sqe, CopyRange::new(NamespaceId(nsid), 100, 9).as_bytes())
    };
    fails(across(2), Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT);
    succeeds(across(3));
}

#[test]
fn metadata_of_the_guests_own_are_neither_looked_at_nor_lost() {
    for extended in [false, true] {
        let format = form(0, extended);
        let (mut guest, _) = tagged_guest(BlockSize::B512, format);
        let (data, tags) = (pattern(1536, 7), pattern(24, 9));
        // PRINFO says nothing here.
        let io = |opcode| Io::new(opcode, 40, 3, ProtectionInfo::from_bits(7));
        succeeds(io(NvmOpcode::WRITE).run(&mut guest, format, &data, &tags).0);
        let (cqe, found, found_tags) = io(NvmOpcode::READ).run(&mut guest, format, &[0; 1536], &[0; 24]);
        succeeds(cqe);
        assert_eq!((found, found_tags), (data.clone(), tags.clone()));
        succeeds(io(NvmOpcode::COMPARE).run(&mut guest, format, &data, &tags).0);
        let other = pattern(24, 10);
        fails(io(NvmOpcode::COMPARE).run(&mut guest, format, &data, &other).0, Status::COMPARE_FAILURE);
    }
}

#[test]
fn a_fused_pair_compares_and_writes_with_metadata() {
    each(|kind, format, block_size| {
        let (mut guest, volume) = tagged_guest(block_size, format);
        let unit = block_size.bytes() as usize;
        let (old, new) = (vec![0; 2 * unit], pattern(2 * unit, 3));
        let pair = |guest: &mut FakeGuest, old: &[u8], wrong: bool| {
            let halves = [(NvmOpcode::COMPARE, Fuse::FIRST, old), (NvmOpcode::WRITE, Fuse::SECOND, &new)];
            let cids = halves.map(|(opcode, fuse, data)| {
                let mut tags = tuples(kind, data, unit, 4);
                tags[8] ^= u8::from(wrong && opcode == NvmOpcode::WRITE);
                let io = Io::new(opcode, 4, 2, all_checks(kind));
                let mut sqe = io.sqe();
                io.point(guest, &mut sqe, data, &tags, format.extended);
                sqe.flags = sqe.flags.with_fuse(fuse);
                guest.push(1, sqe)
            });
            guest.ring(1);
            cids.map(|cid| guest.wait_for(1, cid))
        };
        let [compare, write] = pair(&mut guest, &old, true);
        succeeds(compare);
        fails(write, Status::GUARD_CHECK_ERROR);
        pair(&mut guest, &old, false).into_iter().for_each(succeeds);
        assert_eq!(volume.tags()[4..6].concat(), tuples(kind, &new, unit, 4));
        let [compare, write] = pair(&mut guest, &old, false);
        fails(compare, Status::COMPARE_FAILURE);
        fails(write, Status::ABORTED_FAILED_FUSED);
        assert_eq!(in_flight(&guest), 0);
    });
}

fn identify(guest: &mut FakeGuest) -> IdentifyNamespace {
    let mut sqe = sqe(AdminOpcode::IDENTIFY.0, 1);
    sqe.cdw10 = u32::from(Cns::NAMESPACE.0);
    let (cqe, bytes) = guest.command_reading(0, sqe, 4096);
    succeeds(cqe);
    zerocopy::FromBytes::read_from_bytes(&bytes).expect("4096 bytes")
}

#[test]
fn a_guest_formats_with_metadata_and_sees_what_it_got() {
    let mut guest = FakeGuest::boot();
    let volume = TaggedMemory::new(SIZE, BlockSize::B512, Metadata::Hidden);
    guest.add_volume(1, Arc::clone(&volume) as Arc<dyn Volume>);
    guest.make_queues(1, 64);
    let id = identify(&mut guest);
    assert_eq!((id.nlbaf_z, id.flbas.into_bits(), id.dps.into_bits()), (3, 0, 0));
    assert_eq!((id.mc.into_bits(), id.dpc.into_bits()), (3, 0x1f));
    assert_eq!(
        id.lbaf[..4].iter().map(|format| (format.ms, format.lbads)).collect::<Vec<_>>(),
        [(0, 9), (0, 12), (8, 9), (8, 12)]
    );
    succeeds(write(&mut guest, 0, &[1; 512]));
    let mut format = |cdw10: u32| {
        let mut sqe = sqe(AdminOpcode::FORMAT_NVM.0, 1);
        sqe.cdw10 = cdw10;
        let cqe = guest.admin(sqe);
        let status = cqe.status().code();
        (status, identify(&mut guest).flbas.into_bits(), identify(&mut guest).dps.into_bits())
    };
    // LBAF, MSET, PI and PIL.
    assert_eq!(format(2 | 1 << 5), (Status::SUCCESS, 2, 1));
    assert_eq!(format(3 | 1 << 4 | 2 << 5 | 1 << 8), (Status::SUCCESS, 0x13, 0xa));
    assert_eq!(format(3 | 3 << 5), (Status::SUCCESS, 3, 3));
    assert_eq!(format(2 | 1 << 4), (Status::SUCCESS, 0x12, 0));
    for wrong in [4, 2 | 4 << 5, 1 << 5] {
        assert_eq!(format(wrong), (Status::INVALID_FORMAT, 0x12, 0));
    }
    assert_eq!(format(0), (Status::SUCCESS, 0, 0));
    // Without metadata the volume is like any other.
    succeeds(write(&mut guest, 0, &[2; 512]));
    assert_eq!(read(&mut guest, 0, 512), [2; 512]);
    assert_eq!(volume.tags()[0], NO_METADATA);
}
