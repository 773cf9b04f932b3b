use millrace_nvme_spec::identify::{LbaFormat, ProtectionSettings};
use zerocopy::FromZeros;

use super::*;
use crate::dma::DmaMemory;

fn namespace() -> Namespace {
    let mut identify = Box::new(IdentifyNamespace::new_zeroed());
    identify.nsze = 1000;
    identify.lbaf[0].lbads = 9;
    (identify.mssrl, identify.mcl, identify.msrc_z) = (30, 50, 2);
    Namespace::new(NamespaceId(7), identify, 64 << 10).unwrap()
}

fn data(len: usize) -> DmaRange {
    DmaRange { iova: 1 << 32, len }
}

#[test]
fn a_read_carries_its_range() {
    let command = namespace().read(Lba(900), data(100 * 512)).unwrap();
    assert_eq!((command.sqe.nsid, command.sqe.nvm_opcode()), (NamespaceId(7), NvmOpcode::READ));
    assert_eq!((command.sqe.cdw10_11(), command.sqe.cdw12, command.data), (900, 99, Some(data(51_200))));
    let fua = namespace().write_fua(Lba(0), data(512)).unwrap();
    assert_eq!(fua.sqe.cdw12, 1 << 30);
    let zeroes = namespace().write_zeroes(Lba(1), BlockCount(2), true).unwrap();
    assert_eq!((zeroes.sqe.cdw10_11(), zeroes.sqe.cdw12), (1, 1 | 1 << 25));
    let durable = namespace().write_zeroes_fua(Lba(1), BlockCount(2), false).unwrap();
    assert_eq!(durable.sqe.cdw12, 1 | 1 << 30);
}

#[test]
fn ranges_outside_the_namespace_are_refused() {
    let ns = namespace();
    assert!(matches!(ns.read(Lba(1000), data(512)), Err(CommandError::OutOfRange { .. })));
    assert!(matches!(ns.write(Lba(999), data(1024)), Err(CommandError::OutOfRange { .. })));
    assert!(matches!(ns.compare(Lba(u64::MAX), data(512)), Err(CommandError::OutOfRange { .. })));
    assert!(matches!(ns.read(Lba(0), data(0)), Err(CommandError::BadCount(_))));
    assert!(matches!(ns.verify(Lba(0), BlockCount(65_537)), Err(CommandError::BadCount(_))));
    assert!(matches!(ns.read(Lba(0), data(1000)), Err(CommandError::BufferLength { len: 1000, expected: 512 })));
    assert!(matches!(ns.read(Lba(0), data(65 << 10)), Err(CommandError::TooLarge { .. })));
}

#[test]
fn range_lists_lie_at_the_start_of_the_buffer() {
    let buffer = DmaMemory::new(0x10_0000, 4096).unwrap().alloc(4096).unwrap();
    let ns = namespace();
    let ranges = [(Lba(5), BlockCount(6)), (Lba(100), BlockCount(1))];
    let command = ns.deallocate(&ranges, &buffer).unwrap();
    assert_eq!((command.sqe.cdw10, command.sqe.cdw11), (1, 4));
    assert_eq!(command.data, Some(DmaRange { iova: 0x10_0000, len: 32 }));
    let second = buffer.read_value::<DatasetRange>(16);
    assert_eq!((second.length, second.slba), (1, 100));
    let command = ns.copy(&ranges, Lba(993), &buffer).unwrap();
    assert_eq!((command.sqe.cdw10_11(), command.sqe.cdw12), (993, 1));
    let first = buffer.read_value::<CopyRange>(0);
    assert_eq!((first.slba, first.nlb_z), (5, 5));
    assert!(matches!(ns.copy(&ranges, Lba(994), &buffer), Err(CommandError::OutOfRange { .. })));
    assert_eq!(ns.deallocate(&[], &buffer).unwrap_err(), CommandError::BadRangeCount(0));
    let many = vec![(Lba(0), BlockCount(1)); 257];
    assert_eq!(ns.deallocate(&many, &buffer).unwrap_err(), CommandError::BadRangeCount(257));
}

#[test]
fn a_copy_is_no_longer_than_the_controller_takes() {
    let buffer = DmaMemory::new(0x10_0000, 4096).unwrap().alloc(4096).unwrap();
    let ns = namespace();
    assert_eq!(ns.most_copied(), BlockCount(30));
    let copy = |counts: &[u64]| {
        let ranges: Vec<_> = counts.iter().map(|count| (Lba(0), BlockCount(*count))).collect();
        ns.copy(&ranges, Lba(500), &buffer)
    };
    let too_long = |count, limit| Some(CommandError::CopyTooLong { count: BlockCount(count), limit: BlockCount(limit) });
    assert_eq!(copy(&[30, 10, 10]).unwrap().sqe.cdw12, 2);
    assert_eq!(copy(&[31]).err(), too_long(31, 30));
    assert_eq!(copy(&[30, 10, 11]).err(), too_long(51, 50));
    assert_eq!(copy(&[1; 4]).err(), Some(CommandError::BadRangeCount(4)));
    assert_eq!(copy(&[0]).err(), Some(CommandError::BadCount(BlockCount(0))));
}

#[test]
fn the_upper_bits_of_the_format_index_count_only_past_16_formats() {
    let mut identify = Box::new(IdentifyNamespace::new_zeroed());
    identify.nsze = 8;
    identify.flbas.set_index_low(1);
    identify.flbas.set_index_high(1);
    identify.lbaf[1].lbads = 9;
    identify.lbaf[17].lbads = 12;
    let block_size = |identify: &IdentifyNamespace| {
        Namespace::new(NamespaceId(1), Box::new(identify.clone()), 4096).map(|namespace| namespace.block_size())
    };
    assert_eq!(block_size(&identify), Some(512));
    identify.nlbaf_z = 63;
    assert_eq!(block_size(&identify), Some(4096));
    identify.lbaf[17] = LbaFormat { lbads: 0, ..identify.lbaf[17] };
    assert_eq!(block_size(&identify), None, "not an available format");
}

#[test]
fn protection_information_are_left_to_the_controller_or_moved() {
    let mut identify = Box::new(IdentifyNamespace::new_zeroed());
    identify.nsze = 1000;
    identify.lbaf[0] = LbaFormat { ms: 8, lbads: 9, ..LbaFormat::default() };
    assert!(Namespace::new(NamespaceId(1), identify.clone(), 64 << 10).is_none(), "metadata that nobody would make");
    identify.dps = identify.dps.with_pit(1);
    let ns = Namespace::new(NamespaceId(1), identify, 64 << 10).unwrap();
    let info = |command: Command| ReadWriteCdw12::from_bits(command.sqe.cdw12).prinfo();
    let (act, guard) = (ProtectionInfo::new().with_pract(true), ProtectionInfo::new().with_check_guard(true));
    assert_eq!(info(ns.write(Lba(7), data(512)).unwrap()), act);
    assert_eq!(info(ns.read(Lba(7), data(512)).unwrap()), act.with_check_guard(true));
    assert_eq!(info(ns.verify(Lba(7), BlockCount(1)).unwrap()), guard);
    assert_eq!(ns.write_zeroes(Lba(7), BlockCount(1), false).unwrap().sqe.cdw14, 7);
    let metadata = DmaRange { iova: 1 << 33, len: 16 };
    let wanted = Protection { info: guard, reference: 9, application: 2, mask: 3 };
    let range = (Lba(7), BlockCount(2));
    let command = ns.protected(NvmOpcode::READ, range, data(1024), Metadata::Separate(metadata), &wanted).unwrap();
    assert_eq!((command.sqe.mptr, command.sqe.cdw14, command.sqe.cdw15), (1 << 33, 9, 0x3_0002));
    assert_eq!((info(command), command.data), (guard, Some(data(1024))));
    assert!(ns.protected(NvmOpcode::READ, range, data(1040), Metadata::Extended, &wanted).is_ok());
    for (len, form) in [(1024, Metadata::Extended), (1040, Metadata::None), (512, Metadata::Separate(metadata))] {
        let error = ns.protected(NvmOpcode::READ, range, data(len), form, &wanted).unwrap_err();
        assert!(matches!(error, CommandError::BufferLength { .. }));
    }
}

#[test]
fn clones_follow_the_size_of_the_same_blocks() {
    let ns = namespace();
    let clone = ns.clone();
    let later = |nsze, lbads| {
        let mut identify = Box::new(IdentifyNamespace::new_zeroed());
        identify.nsze = nsze;
        identify.lbaf[0].lbads = lbads;
        Namespace::new(NamespaceId(7), identify, 64 << 10).unwrap()
    };
    assert!(ns.follow(&later(1001, 9)));
    assert!(clone.read(Lba(1000), data(512)).is_ok());
    assert!(!ns.follow(&later(125, 12)), "other blocks");
    assert!(matches!(clone.read(Lba(0), data(512)), Err(CommandError::OutOfRange { .. })));
    // The same blocks, and eight bytes at the end of each.
    let mut identify = Box::new(IdentifyNamespace::new_zeroed());
    (identify.nsze, identify.lbaf[0]) = (1001, LbaFormat { ms: 8, lbads: 9, ..LbaFormat::default() });
    identify.dps = ProtectionSettings::new().with_pit(1);
    assert!(!ns.follow(&Namespace::new(NamespaceId(7), identify, 64 << 10).unwrap()));
    assert!(matches!(clone.read(Lba(0), data(512)), Err(CommandError::OutOfRange { .. })));
    assert!(ns.follow(&later(1001, 9)) && clone.read(Lba(0), data(512)).is_ok());
    ns.forsake();
    assert!(matches!(clone.read(Lba(0), data(512)), Err(CommandError::OutOfRange { .. })));
    assert!(ns.follow(&later(10, 9)));
    assert!(matches!(clone.read(Lba(10), data(512)), Err(CommandError::OutOfRange { size: BlockCount(10), .. })));
}

#[test]
fn another_namespace_under_the_same_identifier_is_not_followed() {
    let with = |nguid: [u8; 16], eui64: [u8; 8]| {
        let mut identify = namespace().identify().clone();
        (identify.nguid, identify.eui64) = (nguid, eui64);
        Namespace::new(NamespaceId(7), Box::new(identify), 64 << 10).unwrap()
    };
    let ns = with([1; 16], [2; 8]);
    // One that does not say who it is may be the same.
    for same in [with([1; 16], [2; 8]), with([0; 16], [2; 8]), with([1; 16], [0; 8]), namespace()] {
        assert!(ns.follow(&same) && namespace().follow(&ns));
    }
    for other in [with([3; 16], [2; 8]), with([1; 16], [3; 8]), with([3; 16], [0; 8])] {
        assert!(!ns.follow(&other));
        assert_eq!(ns.size(), BlockCount(0));
        assert!(ns.follow(&with([1; 16], [2; 8])) && ns.size() == BlockCount(1000), "it is back");
    }
}
