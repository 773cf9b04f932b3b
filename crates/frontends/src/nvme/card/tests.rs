//! Guests on an engine: the software one, or with the feature `sim` the simulated one (`make hw-test`).

mod alike;
mod calls;
mod changes;
mod several;
mod space;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_backends::MemoryVolume;
use millrace_block::BlockSize;
use millrace_nvme_spec::{
    admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11, IdentifyCdw10},
    command::{DataPointer, NamespaceId, QueueId, Sqe},
    identify::{Cns, IdentifyController, IdentifyNamespace},
    opcode::{AdminOpcode, NvmOpcode},
    registers::offset,
    status::Status,
};
use zerocopy::FromBytes;

use super::{Card, StorageFunctions};
use crate::nvme::{
    fixture::{FakeGuest, HeldVolume, MEMORY_BASE, MEMORY_SIZE, PAGE, sqe, test_card},
    namespace::Allocated,
    registers::{Phase, Reset},
};

fn guest() -> FakeGuest {
    FakeGuest::on_card(test_card(1), StorageFunctions::default())
}

fn command(opcode: NvmOpcode, lba: u64, blocks: u32) -> Sqe {
    let mut sqe = sqe(opcode.0, 1);
    sqe.set_cdw10_11(lba);
    sqe.cdw12 = blocks - 1;
    sqe
}

fn write(guest: &mut FakeGuest, qid: u16, lba: u64, data: &[u8]) -> Status {
    let sqe = command(NvmOpcode::WRITE, lba, data.len() as u32 / 512);
    guest.command_writing(qid, sqe, data).status()
}

fn read(guest: &mut FakeGuest, qid: u16, lba: u64, len: usize) -> (Status, Vec<u8>) {
    let sqe = command(NvmOpcode::READ, lba, len as u32 / 512);
    let (cqe, data) = guest.command_reading(qid, sqe, len);
    (cqe.status(), data)
}

/// Bytes that differ from page to page and from `seed` to `seed`.
fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| seed ^ (at / 512) as u8 ^ (at as u8).rotate_left(3)).collect()
}

#[test]
fn data_come_back_through_engine_and_disk() {
    let mut guest = guest();
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    for qid in 1..=4 {
        guest.create_queues(qid, 64);
    }
    for (seed, len) in [(1, 512), (2, 4096), (3, 8192), (4, 12288), (5, 65536), (6, 131_072)] {
        for qid in 1..=4_u16 {
            let data = pattern(seed * 4 + qid as u8, len);
            let lba = u64::from(qid) * 2048;
            assert!(write(&mut guest, qid, lba, &data).is_success());
            assert_eq!(read(&mut guest, qid, lba, len), (Status::SUCCESS, data));
        }
    }
    assert!(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().is_success());
    assert!(guest.command(1, command(NvmOpcode::WRITE_ZEROES, 2048, 8)).status().is_success());
    assert_eq!(read(&mut guest, 1, 2048, 4096).1, vec![0; 4096]);
    let same = guest.command_writing(2, command(NvmOpcode::COMPARE, 2048, 8), &[0; 4096]);
    assert!(same.status().is_success());
    let other = guest.command_writing(2, command(NvmOpcode::COMPARE, 2048, 8), &[1; 4096]);
    assert_eq!(other.status().code(), Status::COMPARE_FAILURE);
    let counters = guest.controller.counters;
    assert_eq!((counters.write_commands, counters.errors), (24, 1));
}

/// Commands of all queues at once, more than fit in flight, round the queues many times.
#[test]
fn full_queues_go_round() {
    let mut guest = guest();
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    (1..=4).for_each(|qid| guest.create_queues(qid, 64));
    let buffer = guest.alloc_pages(1);
    for _ in 0..20 {
        for qid in 1..=4 {
            for at in 0..63 {
                let mut sqe = command(NvmOpcode::READ, at * 8, 8);
                sqe.dptr = DataPointer::prps(buffer, 0);
                guest.push(qid, sqe);
            }
            guest.ring(qid);
        }
        for qid in 1..=4 {
            (0..63).for_each(|_| assert!(guest.wait(qid).status().is_success()));
        }
    }
    guest.settle();
    assert!(guest.controller.is_quiet());
}

#[test]
fn only_what_the_engine_can_is_offered() {
    let mut guest = guest();
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    assert_eq!(guest.read64(offset::CAP) & 0xffff, 63, "MQES");
    let mut identify = sqe(AdminOpcode::IDENTIFY.0, 0);
    identify.cdw10 = IdentifyCdw10::new().with_cns(Cns::CONTROLLER).into_bits();
    let (_, data) = guest.command_reading(0, identify, 4096);
    let id = IdentifyController::read_from_bytes(&data).expect("4096 bytes");
    assert_eq!((id.mdts, id.nn), (5, 1));
    assert!(id.oncs.compare() && id.oncs.write_zeroes());
    assert!(!id.oncs.dataset_management() && !id.oncs.reservations() && !id.oncs.copy() && !id.oncs.verify());
    assert_eq!(guest.admin(sqe(AdminOpcode::FORMAT_NVM.0, 1)).status().code(), Status::INVALID_OPCODE);
    guest.create_queues(1, 64);
    for opcode in [NvmOpcode::DATASET_MANAGEMENT, NvmOpcode::VERIFY, NvmOpcode::COPY, NvmOpcode::RESERVATION_REPORT] {
        assert_eq!(guest.command(1, sqe(opcode.0, 1)).status().code(), Status::INVALID_OPCODE, "{opcode}");
    }
    // Larger than a page, beyond the last, and with another's completion queue.
    let base = guest.alloc_pages(2);
    let create = |qid: u16, entries: u32| CreateQueueCdw10::new().with_qid(QueueId(qid)).with_qsize_z((entries - 1) as u16);
    let mut cq = sqe(AdminOpcode::CREATE_IO_CQ.0, 0);
    cq.dptr = DataPointer::prps(base, 0);
    cq.cdw11 = CreateCqCdw11::new().with_pc(true).into_bits();
    cq.cdw10 = create(2, 65).into_bits();
    assert_eq!(guest.admin(cq).status().code(), Status::INVALID_QUEUE_SIZE);
    cq.cdw10 = create(5, 64).into_bits();
    assert_eq!(guest.admin(cq).status().code(), Status::INVALID_QUEUE_IDENTIFIER);
    cq.cdw10 = create(2, 64).into_bits();
    assert!(guest.admin(cq).status().is_success());
    let mut sq = sqe(AdminOpcode::CREATE_IO_SQ.0, 0);
    sq.dptr = DataPointer::prps(base + PAGE, 0);
    sq.cdw10 = create(2, 64).into_bits();
    sq.cdw11 = CreateSqCdw11::new().with_pc(true).with_cqid(QueueId(1)).into_bits();
    assert_eq!(guest.admin(sq).status().code(), Status::INVALID_QUEUE_IDENTIFIER);
}

#[test]
fn what_is_not_mapped_is_not_touched() {
    let mut guest = guest();
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    guest.create_queues(1, 64);
    let data = guest.alloc_pages(1);
    // Two pages within one of 2 MiB, with a hole between them; and nothing at all.
    let port = guest.controller.port.as_mut().expect("it is on a card");
    port.unmap(MEMORY_BASE, MEMORY_SIZE);
    for (at, size) in [(MEMORY_BASE, 32 << 20), (MEMORY_BASE + (33 << 20), 4096), (MEMORY_BASE + (33 << 20) + 8192, 4096)] {
        guest.map_on_card(at, size, at - MEMORY_BASE);
    }
    let island = MEMORY_BASE + (33 << 20);
    let cases = [
        (data, Status::SUCCESS),
        (island, Status::SUCCESS),
        (island + 8192, Status::SUCCESS),
        (island + 4096, Status::DATA_TRANSFER_ERROR),
        (island + 12288, Status::DATA_TRANSFER_ERROR),
        (MEMORY_BASE + (40 << 20), Status::DATA_TRANSFER_ERROR),
        (MEMORY_BASE - 4096, Status::DATA_TRANSFER_ERROR),
        (0, Status::DATA_TRANSFER_ERROR),
        (1 << 30, Status::DATA_TRANSFER_ERROR),
        (1 << 40 | MEMORY_BASE, Status::DATA_TRANSFER_ERROR),
        (u64::MAX - 4095, Status::DATA_TRANSFER_ERROR),
    ];
    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE] {
        for (at, expected) in cases {
            let mut sqe = command(opcode, 0, 8);
            sqe.dptr = DataPointer::prps(at, 0);
            assert_eq!(guest.command(1, sqe).status().code(), expected, "{opcode} {at:#x}");
        }
    }
}

#[test]
fn reset_waits_for_the_disk_and_begins_anew() {
    for kind in [Reset::Controller, Reset::Function] {
        let mut guest = guest();
        let memory = MemoryVolume::create("held", 8 << 20, BlockSize::B512).expect("a volume");
        let held = HeldVolume::new(memory);
        guest.add_volume(1, Arc::clone(&held) as _);
        guest.create_queues(1, 64);
        held.hold();
        let buffer = guest.alloc_pages(1);
        for at in 0..10 {
            let mut sqe = command(NvmOpcode::READ, at, 1);
            sqe.dptr = DataPointer::prps(buffer, 0);
            guest.push(1, sqe);
        }
        guest.ring(1);
        guest.step_until("commands at the disk", |_| held.waiting() == 10);
        match kind {
            Reset::Controller => guest.write32(offset::CC, 0),
            kind => guest.controller.reset(kind),
        }
        for _ in 0..100 {
            guest.step();
        }
        assert_eq!(guest.controller.phase, Phase::Resetting, "its memory is in use");
        held.release();
        guest.step_until("the end of the reset", |guest| guest.controller.phase == Phase::Disabled);
        guest.write32(offset::CC, 0);
        guest.enable();
        guest.create_queues(1, 32);
        assert!(write(&mut guest, 1, 5, &pattern(1, 4096)).is_success());
        assert_eq!(read(&mut guest, 1, 5, 4096), (Status::SUCCESS, pattern(1, 4096)));
    }
}

#[test]
fn a_queue_is_deleted_when_its_commands_have_ended() {
    let mut guest = guest();
    let memory = MemoryVolume::create("held", 8 << 20, BlockSize::B512).expect("a volume");
    let held = HeldVolume::new(memory);
    guest.add_volume(1, Arc::clone(&held) as _);
    guest.create_queues(1, 64);
    guest.create_queues(2, 64);
    held.hold();
    for _ in 0..5 {
        guest.push(1, sqe(NvmOpcode::FLUSH.0, 1));
    }
    guest.ring(1);
    guest.step_until("commands at the disk", |_| held.waiting() == 5);
    let mut delete = sqe(AdminOpcode::DELETE_IO_SQ.0, 0);
    delete.cdw10 = 1;
    let cid = guest.submit(0, delete);
    for _ in 0..100 {
        guest.step();
    }
    assert!(guest.poll(0).is_none(), "it waits");
    held.release();
    assert!(guest.wait_for(0, cid).status().is_success());
    (0..5).for_each(|_| assert!(guest.wait(1).status().is_success(), "they were completed before"));
    assert!(guest.command(2, sqe(NvmOpcode::FLUSH.0, 1)).status().is_success(), "the other goes on");
}

#[test]
fn doorbells_that_make_no_sense_are_told() {
    let mut guest = guest();
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    guest.create_queues(1, 16);
    guest.create_queues(2, 16);
    let cid = guest.submit(0, sqe(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0));
    guest.doorbell(2, 16);
    let event = guest.wait_for(0, cid);
    // Error status, invalid doorbell write value, with its log page.
    assert_eq!(event.dw0, 1 << 16 | 1 << 8);
    assert!(guest.command(2, sqe(NvmOpcode::FLUSH.0, 1)).status().is_success(), "the other queue goes on");
}

#[test]
fn a_queue_whose_memory_goes_fails_its_controller_alone() {
    let (mut guest, mut neighbour) = (guest(), guest());
    let namespace = guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    neighbour.add_namespace(1, &namespace);
    guest.create_queues(1, 16);
    neighbour.create_queues(1, 16);
    guest.controller.port.as_mut().expect("it is on a card").unmap(MEMORY_BASE, MEMORY_SIZE);
    guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
    guest.step_until("failure", |guest| guest.read32(offset::CSTS) & 2 != 0);
    assert!(neighbour.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().is_success());
}

#[test]
fn a_completion_queue_whose_memory_goes_fails_its_controller() {
    let mut guest = guest();
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    guest.create_queues(1, 16);
    let hole = guest.queues[&1].cq_base;
    guest.controller.port.as_mut().expect("it is on a card").unmap(MEMORY_BASE, MEMORY_SIZE);
    for (from, to) in [(MEMORY_BASE, hole), (hole + PAGE, MEMORY_BASE + MEMORY_SIZE)] {
        guest.map_on_card(from, to - from, from - MEMORY_BASE);
    }
    guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
    guest.step_until("failure", |guest| guest.read32(offset::CSTS) & 2 != 0);
}

#[test]
fn all_regions_of_a_range_go_together() {
    let mut guest = guest();
    guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    guest.create_queues(1, 64);
    let data = guest.alloc_pages(1);
    guest.controller.port.as_mut().expect("it is on a card").unmap(MEMORY_BASE, MEMORY_SIZE);
    let (first, second) = (MEMORY_BASE + (32 << 20), MEMORY_BASE + (34 << 20));
    for (at, size) in [(MEMORY_BASE, 32 << 20), (first, 4096), (second, 4096)] {
        guest.map_on_card(at, size, at - MEMORY_BASE);
    }
    let mut read_into = |at: u64| {
        let mut sqe = command(NvmOpcode::READ, 0, 8);
        sqe.dptr = DataPointer::prps(at, 0);
        if at == 0 {
            // Nowhere: the others go.
            guest.settle();
            guest.controller.port.as_mut().expect("it is on a card").unmap(first, 4 << 20);
        }
        guest.command(1, sqe).status().code()
    };
    let (there, gone) = (Status::SUCCESS, Status::DATA_TRANSFER_ERROR);
    assert_eq!([data, first, second].map(&mut read_into), [there; 3]);
    assert_eq!([0, data, first, second].map(&mut read_into), [gone, there, gone, gone]);
}

#[test]
fn a_guest_that_takes_its_memory_away_fails_alone() {
    let (mut guest, mut neighbour) = (guest(), guest());
    let namespace = guest.add_memory_volume(1, 8 << 20, BlockSize::B512);
    neighbour.add_namespace(1, &namespace);
    guest.create_queues(1, 16);
    neighbour.create_queues(1, 16);
    let buffer = MEMORY_BASE + MEMORY_SIZE - (1 << 20);
    guest.memory.set_len(MEMORY_SIZE - (2 << 20)).expect("a shorter file");
    let mut sqe = command(NvmOpcode::READ, 0, 8);
    sqe.dptr = DataPointer::prps(buffer, 0);
    guest.submit(1, sqe);
    guest.step_until("failure", |guest| guest.read32(offset::CSTS) & 2 != 0);
    assert!(write(&mut neighbour, 1, 0, &pattern(7, 4096)).is_success());
    assert_eq!(read(&mut neighbour, 1, 0, 4096), (Status::SUCCESS, pattern(7, 4096)));
    assert_eq!(neighbour.read32(offset::CSTS) & 2, 0);
}

#[test]
fn namespaces_come_change_and_go() {
    let mut guest = guest();
    guest.create_queues(1, 16);
    let invalid = Status::INVALID_NAMESPACE_OR_FORMAT;
    assert_eq!(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().code(), invalid);
    let namespace = guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    assert_eq!(read(&mut guest, 1, 2048, 512).0.code(), Status::LBA_OUT_OF_RANGE);
    namespace.resize(millrace_block::BlockCount(4096)).expect("it grows");
    assert!(read(&mut guest, 1, 4095, 512).0.is_success());
    let attached = guest.controller.namespaces.detach(1).expect("it is attached");
    guest.controller.detach_from_card(&attached);
    assert_eq!(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().code(), invalid);
    assert_eq!(attached.in_flight.get(), 0, "nothing is in flight");
    guest.controller.namespaces.release(1);
    // Another volume takes the disk's place, read-only.
    let other = MemoryVolume::create("other", 1 << 20, BlockSize::B4096).expect("a volume");
    let other = crate::nvme::Namespace::new(other, crate::nvme::fixture::identity(7), false);
    let allocated = Allocated { namespace: other, read_only: true, by_guest: false };
    guest.controller.namespaces.allocate(1, allocated).expect("it is free");
    guest.controller.namespaces.attach(1).expect("it is there");
    assert!(guest.command_reading(1, command(NvmOpcode::READ, 255, 1), 4096).0.status().is_success());
    let refused = guest.command_writing(1, command(NvmOpcode::WRITE, 0, 1), &[1; 4096]).status();
    assert_eq!(refused, Status::from_bits(millrace_functions::status::READ_ONLY));
}

#[test]
fn two_guests_share_a_disk_in_windows_of_their_own() {
    let window = |first, blocks| StorageFunctions { window: Some((first, blocks)), ..StorageFunctions::default() };
    let mut first = FakeGuest::on_card(test_card(1), window(0, 1000));
    let mut second = FakeGuest::on_card(test_card(1), window(1000, 500));
    let namespace = first.add_memory_volume(1, 1 << 20, BlockSize::B512);
    second.add_namespace(1, &namespace);
    first.create_queues(1, 16);
    second.create_queues(3, 16);
    let mut identify = sqe(AdminOpcode::IDENTIFY.0, 1);
    identify.cdw10 = IdentifyCdw10::new().with_cns(Cns::NAMESPACE).into_bits();
    let size = |guest: &mut FakeGuest| {
        let (_, data) = guest.command_reading(0, identify, 4096);
        IdentifyNamespace::read_from_bytes(&data).expect("4096 bytes").nsze
    };
    assert_eq!((size(&mut first), size(&mut second)), (1000, 500));
    assert!(write(&mut first, 1, 992, &pattern(1, 4096)).is_success());
    assert!(write(&mut second, 3, 0, &pattern(2, 4096)).is_success());
    assert_eq!(read(&mut first, 1, 992, 4096).1, pattern(1, 4096));
    assert_eq!(read(&mut second, 3, 0, 4096).1, pattern(2, 4096));
    assert_eq!(read(&mut first, 1, 999, 1024).0.code(), Status::LBA_OUT_OF_RANGE);
    assert_eq!(read(&mut second, 3, 500, 512).0.code(), Status::LBA_OUT_OF_RANGE);
    // What lies where on the volume, as one guest without a window sees it.
    let mut whole = guest();
    whole.add_namespace(1, &namespace);
    whole.create_queues(1, 16);
    assert_eq!(read(&mut whole, 1, 1000, 4096).1, pattern(2, 4096));
}

#[test]
fn replicas_have_all_data() {
    let functions = StorageFunctions { replicate: true, ..StorageFunctions::default() };
    let mut guest = FakeGuest::on_card(test_card(2), functions);
    let first = guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let volume = MemoryVolume::create("replica", 1 << 20, BlockSize::B512).expect("a volume");
    let replica = crate::nvme::Namespace::new(volume, crate::nvme::fixture::identity(9), false);
    guest.controller.join_replica(2, &replica).expect("it fits");
    guest.create_queues(1, 16);
    assert!(write(&mut guest, 1, 8, &pattern(3, 8192)).is_success());
    for _ in 0..4 {
        assert_eq!(read(&mut guest, 1, 8, 8192).1, pattern(3, 8192), "from either");
    }
    assert!(guest.controller.remove_replica(2));
    guest.settle();
    for volume in [first, replica] {
        let mut plain = FakeGuest::boot();
        plain.add_namespace(1, &volume);
        plain.create_queues(1, 16);
        assert_eq!(read(&mut plain, 1, 8, 8192).1, pattern(3, 8192));
    }
}

#[test]
fn a_card_without_a_disk_left_shows_nothing_and_says_so() {
    let (mut first, mut second) = (guest(), guest());
    first.add_memory_volume(1, 1 << 20, BlockSize::B512);
    first.create_queues(1, 16);
    assert!(first.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().is_success());
    second.add_memory_volume(1, 1 << 20, BlockSize::B512);
    second.create_queues(1, 16);
    let status = second.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().code();
    assert_eq!(status, Status::INVALID_NAMESPACE_OR_FORMAT);
    // The disk is free again when the first guest's device goes.
    drop(first);
    second.settle();
    assert!(second.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().is_success());
}

/// Whatever a guest writes to its doorbells, the queues of another function on the same card go on.
#[test]
fn doorbells_reach_no_other_function() {
    let (mut bad, mut neighbour) = (guest(), guest());
    let namespace = bad.add_memory_volume(1, 1 << 20, BlockSize::B512);
    neighbour.add_namespace(1, &namespace);
    bad.create_queues(1, 16);
    (1..=4).for_each(|qid| neighbour.create_queues(qid, 16));
    let buffer = neighbour.alloc_pages(1);
    for round in 0..30_u32 {
        for qid in 1..=4 {
            for at in 0..10 {
                let mut sqe = command(NvmOpcode::READ, at, 1);
                sqe.dptr = DataPointer::prps(buffer, 0);
                neighbour.push(qid, sqe);
            }
            neighbour.ring(qid);
        }
        // All but the admin queue's.
        for index in 2..bad.controller.doorbells.words.len() {
            bad.doorbell(index, round.wrapping_mul(0x9e37_79b9) >> (index % 24));
            bad.step();
        }
        for qid in 1..=4 {
            (0..10).for_each(|_| assert!(neighbour.wait(qid).status().is_success(), "round {round}, queue {qid}"));
        }
    }
    assert_eq!((neighbour.controller.phase, neighbour.controller.counters.errors), (Phase::Ready, 0));
    assert!(bad.controller.port.as_ref().expect("it is on a card").status(1).stopped(), "its own queue has heard of it");
}

#[test]
fn the_clock_stands_still_when_nothing_is_pending() {
    let mut guest = guest();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.create_queues(1, 16);
    assert!(write(&mut guest, 1, 0, &pattern(1, 4096)).is_success());
    guest.settle();
    let card = Card::of_shard(&test_card(1)).expect("the guest's");
    let now = || card.borrow().engine.now();
    let (before, end) = (now(), Instant::now() + Duration::from_secs(1));
    while Instant::now() < end {
        assert_eq!(guest.step(), 0, "nothing is to be done");
    }
    assert_eq!(now(), before, "cycles of an idle second");
    assert_eq!(read(&mut guest, 1, 0, 4096), (Status::SUCCESS, pattern(1, 4096)));
    assert!(now() > before, "it goes on");
}

#[test]
fn functions_of_the_card_are_counted() {
    let guests: Vec<FakeGuest> = (0..16).map(|_| guest()).collect();
    let mut one_more =
        FakeGuest::new(crate::nvme::Config { card: Some(test_card(1)), ..crate::nvme::fixture::test_config() });
    assert!(one_more.controller.join_card().is_err_and(|why| why.contains("taken")));
    drop(guests);
    assert_eq!(one_more.controller.join_card(), Ok(()));
}

#[test]
fn who_takes_over_fails_what_was_on_the_engine() {
    let mut guest = guest();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.controller.lost_card();
    assert_eq!(guest.controller.phase, Phase::Ready, "nothing was");
    guest.create_queues(1, 16);
    guest.controller.lost_card();
    assert_eq!(guest.controller.phase, Phase::Failed);
    guest.disable();
    guest.enable();
    guest.create_queues(1, 16);
    assert!(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status().is_success(), "a reset helps");
}

#[test]
fn storage_functions_have_a_written_form() {
    for text in ["", "share=0+4096", "iops=1000,bytes=1048576", "share=4096+1,iops=1,bytes=2,replicate"] {
        let functions: StorageFunctions = text.parse().expect(text);
        assert_eq!(functions.to_string(), text);
    }
    for text in ["share", "share=1", "share=1+0", "iops=0", "bytes=-1", "replicate=2", "cache"] {
        assert!(text.parse::<StorageFunctions>().is_err(), "{text}");
    }
}

#[test]
fn caps_that_an_engine_does_not_count_are_told() {
    for (text, block, least) in [
        ("iops=1", 512, "iops=2 "),
        ("iops=2,bytes=244140", 512, "bytes=244141 "),
        ("iops=2,bytes=244141", 4096, "bytes=1953126 "),
    ] {
        let functions: StorageFunctions = text.parse().expect(text);
        let told = functions.check_caps(block).expect_err(text);
        assert!(told.contains(least), "{told}");
    }
    let least: StorageFunctions = "iops=2,bytes=244141".parse().expect("caps");
    assert_eq!(least.check(), Ok(()));
    // Word 3 and 4: the time of a command in 32 bits, of a block in 24.
    let [iops, bytes] = least.caps(512);
    assert_eq!((iops as u32, bytes as u32), (4_000_000_000, 16_777_190));
}

#[test]
fn commands_name_their_namespace() {
    let mut guest = guest();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.create_queues(1, 16);
    for nsid in [0, 2, 0xffff_fffe] {
        let mut sqe = command(NvmOpcode::READ, 0, 1);
        sqe.nsid = NamespaceId(nsid);
        assert_eq!(guest.command(1, sqe).status().code(), Status::INVALID_NAMESPACE_OR_FORMAT, "{nsid:#x}");
    }
}
