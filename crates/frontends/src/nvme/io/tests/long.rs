//! Write Zeroes, Dataset Management, Verify, Write Uncorrectable.

use millrace_nvme_spec::nvm::{DatasetRange, WriteZeroesCdw12};

use crate::pace::LARGEST_PIECE;

use super::{
    super::{
        super::registers::Reset,
        long::{PIECE, Pace},
    },
    *,
};

fn dsm(guest: &mut FakeGuest, attributes: u32, ranges: &[(u64, u32)]) -> Cqe {
    let ranges: Vec<_> =
        ranges.iter().map(|&(slba, length)| DatasetRange { context_attributes: 0xffff_ffff, length, slba }).collect();
    let mut sqe = sqe(NvmOpcode::DATASET_MANAGEMENT.0, 1);
    (sqe.cdw10, sqe.cdw11) = (ranges.len() as u32 - 1, attributes);
    guest.command_writing(1, sqe, ranges.as_bytes())
}

#[test]
fn zeroes_over_little_and_much() {
    for deac in [false, true] {
        let mut guest = guest(BlockSize::B512);
        let data = pattern(1 << 20, 5);
        for at in 0..4 {
            succeeds(write(&mut guest, at * 2048, &data));
        }
        for (slba, blocks) in [(3, 5), (2000, 5000)] {
            let mut sqe = command(NvmOpcode::WRITE_ZEROES, slba, blocks);
            sqe.cdw12 |= WriteZeroesCdw12::new().with_deac(deac).with_fua(true).into_bits();
            succeeds(guest.command(1, sqe));
        }
        let seen = [0, 2048, 4096, 6144].map(|at| read(&mut guest, at, 1 << 20)).concat();
        for (block, bytes) in seen.chunks(512).enumerate() {
            let zeroed = (3..8).contains(&block) || (2000..7000).contains(&block);
            let written = &data[block % 2048 * 512..][..512];
            assert!(bytes == if zeroed { &[0; 512] } else { written }, "block {block}");
        }
    }
    let mut guest = guest(BlockSize::B512);
    let mut sqe = command(NvmOpcode::WRITE_ZEROES, 0, 1);
    sqe.cdw12 |= WriteZeroesCdw12::new().with_nsz(true).into_bits();
    fails(guest.command(1, sqe), Status::INVALID_FIELD);
}

#[test]
fn a_long_command_fails_where_its_volume_does() {
    let (mut guest, fault) = faulty_guest();
    fault.add(Rule::new(Kind::WriteZeroes, When::Nth(2), Effect::Fail(BlockError::NoSpace)));
    fails(guest.command(1, command(NvmOpcode::WRITE_ZEROES, 0, 8192)), Status::CAPACITY_EXCEEDED);
    assert_eq!(fault.requests(Kind::WriteZeroes), 2, "in pieces, and no further");
    fault.clear();
    fault.add(Rule::new(Kind::Read, When::Nth(3), Effect::Fail(BlockError::ReadFault { errno: 5 })));
    fails(guest.command(1, command(NvmOpcode::VERIFY, 0, 8192)), Status::UNRECOVERED_READ_ERROR);
    fault.clear();
    succeeds(guest.command(1, command(NvmOpcode::VERIFY, 0, 8192)));
    fault.add(Rule::new(Kind::Deallocate, When::Always, Effect::Fail(BlockError::Unsupported)));
    succeeds(dsm(&mut guest, 4, &[(0, 4), (10, 4)]));
    fault.clear();
    fault.add(Rule::new(Kind::Deallocate, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })));
    fails(dsm(&mut guest, 4, &[(0, 4)]), Status::WRITE_FAULT);
    assert_eq!(in_flight(&guest), 0);
}

/// Commands that go piece by piece, and what a piece is to the volume.
const LONG: [(NvmOpcode, Kind); 2] = [(NvmOpcode::WRITE_ZEROES, Kind::WriteZeroes), (NvmOpcode::VERIFY, Kind::Read)];

/// One of them over all of the namespace, of which the first pieces are done.
fn begun(opcode: NvmOpcode, kind: Kind) -> (FakeGuest, Arc<FaultVolume>, u16) {
    let (mut guest, fault) = faulty_guest();
    let cid = guest.submit(1, command(opcode, 0, SIZE / 512));
    guest.step_until("the first piece", |_| fault.requests(kind) > 0);
    assert_eq!(in_flight(&guest), 1, "pieces are left");
    (guest, fault, cid)
}

#[test]
fn a_long_command_stops_when_its_controller_is_reset() {
    for (opcode, kind) in LONG {
        let (mut guest, fault, _) = begun(opcode, kind);
        let before = fault.requests(kind);
        guest.controller.reset(Reset::Controller);
        guest.step_until("the end", |guest| guest.controller.is_quiet());
        assert_eq!(fault.requests(kind), before, "{opcode}: no piece after the reset");
        assert_eq!(in_flight(&guest), 0);
    }
}

/// Whoever waits for its guest's commands, and has waited long enough.
#[test]
fn a_long_command_that_is_hurried_ends_at_its_next_piece_and_may_be_tried_again() {
    for (opcode, kind) in LONG {
        let (mut guest, fault, cid) = begun(opcode, kind);
        let before = fault.requests(kind);
        guest.controller.hurry(&guest.shard.context());
        assert_eq!(guest.wait_for(1, cid).status(), Status::NAMESPACE_NOT_READY.with_more(true));
        assert_eq!(fault.requests(kind), before, "{opcode}: no piece after it");
        guest.controller.sink.hurry(false);
        succeeds(guest.command(1, command(opcode, 0, SIZE / 512)));
    }
}

/// What is in flight ends on the way that it went.
#[test]
fn commands_go_the_way_that_their_namespace_is_led_to() {
    let (mut guest, fault, cid) = begun(NvmOpcode::WRITE_ZEROES, Kind::WriteZeroes);
    let straight: Arc<dyn millrace_block::Volume> = fault;
    let way = FaultVolume::new(straight, 1);
    guest.controller.namespaces.lead(1, Some(Arc::clone(&way) as Arc<dyn millrace_block::Volume>));
    assert_eq!(guest.controller.namespaces.left(1).count(), 1);
    succeeds(guest.wait_for(1, cid));
    assert_eq!(way.requests(Kind::WriteZeroes), 0, "it was begun before");
    let came = |way: &FaultVolume| [Kind::Read, Kind::Write, Kind::WriteZeroes].map(|kind| way.requests(kind));
    succeeds(write(&mut guest, 0, &pattern(4096, 1)));
    assert!(read(&mut guest, 0, 4096) == pattern(4096, 1));
    succeeds(guest.command(1, command(NvmOpcode::VERIFY, 0, 8)));
    succeeds(guest.command(1, command(NvmOpcode::WRITE_ZEROES, 8, 8)));
    assert_eq!(came(&way), [2, 1, 1]);
    // Attached anew it is led to as before, and then straight again.
    guest.controller.namespaces.detach(1).expect("it is attached");
    guest.controller.namespaces.attach(1).expect("it is there");
    read(&mut guest, 0, 4096);
    assert_eq!(came(&way), [3, 1, 1]);
    guest.controller.namespaces.lead(1, None);
    read(&mut guest, 0, 4096);
    succeeds(write(&mut guest, 0, &pattern(4096, 2)));
    assert_eq!(came(&way), [3, 1, 1]);
}

/// The volume may be another guest's by then.
#[test]
fn a_long_command_stops_when_its_namespace_is_detached() {
    for (opcode, kind) in LONG {
        let (mut guest, fault, cid) = begun(opcode, kind);
        let before = fault.requests(kind);
        guest.controller.namespaces.detach(1).expect("it is attached");
        fails(guest.wait_for(1, cid), Status::INVALID_NAMESPACE_OR_FORMAT);
        assert_eq!(fault.requests(kind), before, "{opcode}: no piece after it");
        assert_eq!(guest.controller.namespaces.left(1).count(), 0);
    }
}

#[test]
fn pieces_grow_where_the_volume_is_quick() {
    let mut pace = Pace::new();
    let mut sizes = Vec::new();
    for millis in [1, 1, 10, 100, 100, 100] {
        pace.adjust(Duration::from_millis(millis));
        sizes.push(pace.bytes / PIECE);
    }
    assert_eq!(sizes, [2, 4, 4, 2, 1, 1]);
    (0..20).for_each(|_| pace.adjust(Duration::ZERO));
    assert_eq!(pace.bytes, LARGEST_PIECE);
}

#[test]
fn others_are_served_while_a_long_command_runs() {
    let mut guest = guest(BlockSize::B512);
    let long = guest.submit(1, command(NvmOpcode::VERIFY, 0, 16384));
    let mut short = command(NvmOpcode::READ, 0, 1);
    let buffer = guest.alloc_pages(1);
    short.dptr = guest.prps(buffer, 512);
    let short = guest.submit(1, short);
    let first = guest.wait(1);
    succeeds(first);
    assert_eq!(first.cid.0, short, "the short one comes first");
    succeeds(guest.wait_for(1, long));
}

#[test]
fn deallocation_of_many_ranges() {
    let mut guest = guest(BlockSize::B512);
    let data = pattern(1 << 20, 5);
    succeeds(write(&mut guest, 0, &data));
    // As many ranges as a command can have: every eighth block, and one of nothing.
    let mut ranges: Vec<(u64, u32)> = (0..255).map(|i| (i * 8, 1)).collect();
    ranges.push((SIZE / 512, 0));
    succeeds(dsm(&mut guest, 4, &ranges));
    let seen = read(&mut guest, 0, 1 << 20);
    for (block, bytes) in seen.chunks(512).enumerate() {
        let gone = block % 8 == 0 && block / 8 < 255;
        assert!(bytes == if gone { &[0; 512] } else { &data[block * 512..][..512] }, "block {block}");
    }
    succeeds(dsm(&mut guest, 4, &[(0, (SIZE / 512) as u32)]));
    assert_eq!(read(&mut guest, 0, 1 << 20), vec![0; 1 << 20]);
}

#[test]
fn hints_change_nothing_and_wrong_ranges_refuse_all() {
    let mut guest = guest(BlockSize::B512);
    let data = pattern(4096, 5);
    succeeds(write(&mut guest, 0, &data));
    succeeds(dsm(&mut guest, 3, &[(0, 8)]));
    for wrong in [(SIZE / 512, 1), (u64::MAX, 1), (u64::MAX - 5, u32::MAX), (1, u32::MAX)] {
        fails(dsm(&mut guest, 4, &[(0, 8), wrong]), Status::LBA_OUT_OF_RANGE);
    }
    assert_eq!(read(&mut guest, 0, 4096), data);
}

#[test]
fn uncorrectable_blocks_fail_until_they_are_written() {
    let mut guest = guest(BlockSize::B512);
    let data = pattern(4096, 5);
    succeeds(write(&mut guest, 0, &data));
    succeeds(guest.command(1, command(NvmOpcode::WRITE_UNCORRECTABLE, 2, 3)));
    for (slba, blocks, bad) in [(0, 2, false), (0, 3, true), (4, 1, true), (5, 3, false), (0, 8, true)] {
        let len = blocks as usize * 512;
        for opcode in [NvmOpcode::READ, NvmOpcode::VERIFY] {
            let (cqe, _) = guest.command_reading(1, command(opcode, slba, blocks), len);
            assert_eq!(cqe.status().code() == Status::UNRECOVERED_READ_ERROR, bad, "{opcode} {slba} {blocks}");
            assert!(bad || cqe.status().is_success());
        }
        let part = &data[slba as usize * 512..][..len];
        let cqe = guest.command_writing(1, command(NvmOpcode::COMPARE, slba, blocks), part);
        assert_eq!(cqe.status().code() == Status::UNRECOVERED_READ_ERROR, bad);
    }
    succeeds(write(&mut guest, 2, &data[..512]));
    assert_eq!(read(&mut guest, 2, 512), &data[..512]);
    succeeds(guest.command(1, command(NvmOpcode::WRITE_ZEROES, 3, 1)));
    assert_eq!(read(&mut guest, 3, 512), [0; 512]);
    succeeds(dsm(&mut guest, 4, &[(4, 1)]));
    assert_eq!(read(&mut guest, 4, 512), [0; 512], "deallocated blocks read as zeroes");
}
