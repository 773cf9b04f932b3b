//! Creating and deleting queues; shadow doorbells.

use std::sync::{Arc, atomic::Ordering};

use millrace_backends::{
    MemoryVolume,
    fault::{FaultVolume, Kind},
};
use millrace_block::{BlockSize, Volume};
use millrace_nvme_spec::{
    admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11, DeleteQueueCdw10},
    command::{DataPointer, QueueId, Sqe},
    features::{FeatureId, NumberOfQueuesFeature},
    opcode::{AdminOpcode, NvmOpcode},
    registers::offset,
    status::Status,
};

use super::{
    super::super::fixture::{FakeGuest, HeldVolume, MEMORY_BASE, MEMORY_SIZE, PAGE, identity, sqe},
    super::super::namespace::Namespace,
    Gated, admin, boot_with_all, code, expect, read_block,
};

fn create_cq(qid: u16, qsize_z: u16, base: u64) -> Sqe {
    let mut sqe = admin(AdminOpcode::CREATE_IO_CQ, 0);
    sqe.cdw10 = CreateQueueCdw10::new().with_qid(QueueId(qid)).with_qsize_z(qsize_z).into_bits();
    sqe.cdw11 = CreateCqCdw11::new().with_pc(true).with_ien(true).with_iv(1).into_bits();
    sqe.dptr = DataPointer::prps(base, 0);
    sqe
}

fn create_sq(qid: u16, qsize_z: u16, base: u64, cqid: u16) -> Sqe {
    let mut sqe = admin(AdminOpcode::CREATE_IO_SQ, 0);
    sqe.cdw10 = CreateQueueCdw10::new().with_qid(QueueId(qid)).with_qsize_z(qsize_z).into_bits();
    sqe.cdw11 = CreateSqCdw11::new().with_pc(true).with_cqid(QueueId(cqid)).into_bits();
    sqe.dptr = DataPointer::prps(base, 0);
    sqe
}

fn delete(opcode: AdminOpcode, qid: u16) -> Sqe {
    let mut sqe = admin(opcode, 0);
    sqe.cdw10 = DeleteQueueCdw10::new().with_qid(QueueId(qid)).into_bits();
    sqe
}

const DELETE_SQ: AdminOpcode = AdminOpcode::DELETE_IO_SQ;
const DELETE_CQ: AdminOpcode = AdminOpcode::DELETE_IO_CQ;

#[test]
fn completion_queues_that_cannot_be_are_refused() {
    let mut guest = FakeGuest::boot();
    let base = guest.alloc_pages(16);
    let largest = guest.controller.config.queue_entries;
    for (qid, qsize_z, base, status) in [
        (0, 15, base, Status::INVALID_QUEUE_IDENTIFIER),
        (9, 15, base, Status::INVALID_QUEUE_IDENTIFIER),
        (u16::MAX, 15, base, Status::INVALID_QUEUE_IDENTIFIER),
        (1, 0, base, Status::INVALID_QUEUE_SIZE),
        (1, largest as u16, base, Status::INVALID_QUEUE_SIZE),
        (1, u16::MAX, base, Status::INVALID_QUEUE_SIZE),
        (1, 15, base + 16, Status::PRP_OFFSET_INVALID),
        (1, 15, base + 1, Status::PRP_OFFSET_INVALID),
        (1, 15, 0, Status::INVALID_FIELD),
        (1, 15, u64::MAX - 0xfff, Status::INVALID_FIELD),
        // Its last entries lie beyond the guest's memory.
        (1, 256, MEMORY_BASE + MEMORY_SIZE - PAGE, Status::INVALID_FIELD),
        (1, largest as u16 - 1, base, Status::SUCCESS),
    ] {
        expect(&mut guest, create_cq(qid, qsize_z, base), status);
    }
    expect(&mut guest, create_cq(1, 15, base), Status::INVALID_QUEUE_IDENTIFIER);
    let mut scattered = create_cq(2, 15, base);
    scattered.cdw11 &= !1;
    expect(&mut guest, scattered, Status::INVALID_FIELD);
    for vector in [9, u16::MAX] {
        let mut sqe = create_cq(2, 15, base);
        sqe.cdw11 = CreateCqCdw11::new().with_pc(true).with_ien(true).with_iv(vector).into_bits();
        expect(&mut guest, sqe, Status::INVALID_INTERRUPT_VECTOR);
    }
}

#[test]
fn submission_queues_that_cannot_be_are_refused() {
    let mut guest = FakeGuest::boot();
    let (base, cq) = (guest.alloc_pages(16), guest.alloc_pages(1));
    expect(&mut guest, create_cq(1, 15, cq), Status::SUCCESS);
    for (qid, qsize_z, base, cqid, status) in [
        (0, 15, base, 1, Status::INVALID_QUEUE_IDENTIFIER),
        (9, 15, base, 1, Status::INVALID_QUEUE_IDENTIFIER),
        (1, 15, base, 0, Status::INVALID_QUEUE_IDENTIFIER),
        (1, 15, base, 9, Status::INVALID_QUEUE_IDENTIFIER),
        (1, 15, base, 2, Status::COMPLETION_QUEUE_INVALID),
        (1, 0, base, 1, Status::INVALID_QUEUE_SIZE),
        (1, 1024, base, 1, Status::INVALID_QUEUE_SIZE),
        (1, 15, base + 64, 1, Status::PRP_OFFSET_INVALID),
        (1, 15, 0x1000, 1, Status::INVALID_FIELD),
        (1, 15, base, 1, Status::SUCCESS),
        (1, 15, base, 1, Status::INVALID_QUEUE_IDENTIFIER),
    ] {
        expect(&mut guest, create_sq(qid, qsize_z, base, cqid), status);
    }
    let mut scattered = create_sq(2, 15, base, 1);
    scattered.cdw11 &= !1;
    expect(&mut guest, scattered, Status::INVALID_FIELD);
}

#[test]
fn queues_need_entry_sizes_in_the_configuration() {
    let mut guest = FakeGuest::boot();
    let base = guest.alloc_pages(2);
    let cc = guest.read32(offset::CC);
    guest.write32(offset::CC, cc & !(0xf << 20));
    expect(&mut guest, create_cq(1, 15, base), Status::INVALID_QUEUE_SIZE);
    guest.write32(offset::CC, cc & !(0xf << 16));
    expect(&mut guest, create_cq(1, 15, base), Status::SUCCESS);
    expect(&mut guest, create_sq(1, 15, base + PAGE, 1), Status::INVALID_QUEUE_SIZE);
    guest.write32(offset::CC, cc);
    expect(&mut guest, create_sq(1, 15, base + PAGE, 1), Status::SUCCESS);
}

#[test]
fn only_granted_queues_can_be_created() {
    let mut guest = FakeGuest::boot();
    let base = guest.alloc_pages(4);
    let mut sqe = admin(AdminOpcode::SET_FEATURES, 0);
    sqe.cdw10 = u32::from(FeatureId::NUMBER_OF_QUEUES.0);
    sqe.cdw11 = NumberOfQueuesFeature::new().with_nsq_z(0).with_ncq_z(1).into_bits();
    assert_eq!(expect(&mut guest, sqe, Status::SUCCESS), sqe.cdw11);
    expect(&mut guest, create_cq(2, 15, base), Status::SUCCESS);
    expect(&mut guest, create_cq(3, 15, base), Status::INVALID_QUEUE_IDENTIFIER);
    expect(&mut guest, create_sq(2, 15, base, 2), Status::INVALID_QUEUE_IDENTIFIER);
    expect(&mut guest, create_sq(1, 15, base, 3), Status::INVALID_QUEUE_IDENTIFIER);
    expect(&mut guest, create_sq(1, 15, base, 2), Status::SUCCESS);
    // Now that queues exist, their number is settled.
    expect(&mut guest, sqe, Status::COMMAND_SEQUENCE_ERROR);
}

#[test]
fn queues_are_deleted_in_order() {
    let mut guest = FakeGuest::boot();
    guest.create_queues(1, 16);
    for (opcode, qid, status) in [
        (DELETE_CQ, 1, Status::INVALID_QUEUE_DELETION),
        (DELETE_CQ, 0, Status::INVALID_QUEUE_IDENTIFIER),
        (DELETE_SQ, 0, Status::INVALID_QUEUE_IDENTIFIER),
        (DELETE_SQ, 2, Status::INVALID_QUEUE_IDENTIFIER),
        (DELETE_SQ, u16::MAX, Status::INVALID_QUEUE_IDENTIFIER),
        (DELETE_CQ, u16::MAX, Status::INVALID_QUEUE_IDENTIFIER),
        (DELETE_SQ, 1, Status::SUCCESS),
        (DELETE_SQ, 1, Status::INVALID_QUEUE_IDENTIFIER),
        (DELETE_CQ, 1, Status::SUCCESS),
        (DELETE_CQ, 1, Status::INVALID_QUEUE_IDENTIFIER),
    ] {
        expect(&mut guest, delete(opcode, qid), status);
    }
    // The identifiers are free again, and a new queue works.
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.create_queues(1, 8);
    let read = read_block(&mut guest, 1);
    assert_eq!(code(&guest.command(1, read)), Status::SUCCESS);
}

#[test]
fn deletion_waits_for_commands_in_flight() {
    let mut guest = FakeGuest::boot();
    let volume = Gated::create(1 << 20);
    guest.add_namespace(1, &Namespace::new(volume.clone(), identity(1), false));
    guest.create_queues(1, 16);
    let read = read_block(&mut guest, 1);
    let reads: Vec<u16> = (0..5).map(|_| guest.submit(1, read)).collect();
    guest.step();
    let deletion = guest.submit(0, delete(DELETE_SQ, 1));
    for _ in 0..50 {
        guest.step();
    }
    assert!(guest.poll(0).is_none(), "the commands in flight keep the queue");
    // Meanwhile it takes no commands, cannot be deleted twice, nor its completion queue.
    guest.submit(1, read);
    expect(&mut guest, delete(DELETE_SQ, 1), Status::INVALID_QUEUE_IDENTIFIER);
    expect(&mut guest, delete(DELETE_CQ, 1), Status::INVALID_QUEUE_DELETION);
    volume.open();
    assert_eq!(code(&guest.wait_for(0, deletion)), Status::SUCCESS);
    for cid in reads {
        assert_eq!(code(&guest.wait_for(1, cid)), Status::SUCCESS);
    }
    assert!(guest.poll(1).is_none(), "the command that came after the deletion is gone");
    expect(&mut guest, delete(DELETE_CQ, 1), Status::SUCCESS);
    assert_eq!(guest.controller.in_flight, 0);
}

/// As long as a queue goes on its commands may be among those in flight.
#[test]
fn commands_are_called_off_when_the_last_queue_goes() {
    for idle_first in [false, true] {
        let mut guest = FakeGuest::boot();
        let volume = Gated::create(1 << 20);
        guest.add_namespace(1, &Namespace::new(volume.clone(), identity(1), false));
        guest.create_queues(1, 16);
        guest.create_queues(2, 16);
        let read = read_block(&mut guest, 1);
        guest.submit(2, read);
        guest.step();
        for (at, sqid) in if idle_first { [1, 2] } else { [2, 1] }.into_iter().enumerate() {
            guest.submit(0, delete(DELETE_SQ, sqid));
            (0..5).for_each(|_| _ = guest.step());
            assert_eq!(volume.called_off.load(Ordering::Acquire), at == 1, "idle first: {idle_first}");
        }
        volume.open();
    }
}

#[test]
fn a_long_command_ends_when_the_last_queue_goes() {
    let mut guest = FakeGuest::boot();
    let fault = FaultVolume::new(MemoryVolume::create("inner", 8 << 20, BlockSize::B512).expect("a volume"), 1);
    let volume = HeldVolume::new(Arc::clone(&fault) as Arc<dyn Volume>);
    guest.add_namespace(1, &Namespace::new(Arc::clone(&volume) as Arc<dyn Volume>, identity(1), false));
    guest.create_queues(1, 16);
    volume.hold();
    let mut verify = sqe(NvmOpcode::VERIFY.0, 1);
    verify.cdw12 = (8 << 20) / 512 - 1;
    let cid = guest.submit(1, verify);
    guest.step_until("its first piece", |_| volume.waiting() == 1);
    let deletion = guest.submit(0, delete(DELETE_SQ, 1));
    (0..20).for_each(|_| _ = guest.step());
    volume.release();
    assert_eq!(code(&guest.wait_for(0, deletion)), Status::SUCCESS);
    let status = guest.wait_for(1, cid).status();
    assert_eq!((status.code(), status.dnr()), (Status::ABORTED_SQ_DELETION, false));
    assert_eq!(fault.requests(Kind::Read), 1, "no piece after it");
    // Commands of new queues are wanted again.
    expect(&mut guest, delete(DELETE_CQ, 1), Status::SUCCESS);
    guest.create_queues(1, 16);
    assert_eq!(code(&guest.command(1, verify)), Status::SUCCESS);
}

#[test]
fn a_reset_ends_a_deletion_that_waits() {
    let mut guest = FakeGuest::boot();
    let volume = Gated::create(1 << 20);
    guest.add_namespace(1, &Namespace::new(volume.clone(), identity(1), false));
    guest.create_queues(1, 16);
    let read = read_block(&mut guest, 1);
    guest.submit(1, read);
    guest.submit(0, delete(DELETE_SQ, 1));
    guest.step();
    guest.step();
    guest.write32(offset::CC, 0);
    volume.open();
    guest.disable();
    assert_eq!(guest.controller.in_flight, 0);
    guest.enable();
    guest.create_queues(1, 16);
    let read = read_block(&mut guest, 1);
    assert_eq!(code(&guest.command(1, read)), Status::SUCCESS);
}

#[test]
fn shadow_doorbells_are_checked_and_start_where_the_queues_are() {
    let config = |shadow, events| {
        let mut sqe = admin(AdminOpcode::DOORBELL_BUFFER_CONFIG, 0);
        sqe.dptr = DataPointer::prps(shadow, events);
        sqe
    };
    let mut guest = boot_with_all();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.create_queues(1, 16);
    let read = read_block(&mut guest, 1);
    for _ in 0..3 {
        guest.command(1, read);
    }
    let (shadow, events) = (guest.alloc_pages(1), guest.alloc_pages(1));
    for (shadow, events) in [(0, events), (shadow, 0), (shadow + 4, events), (shadow, events + 2048), (shadow, shadow)] {
        expect(&mut guest, config(shadow, events), Status::INVALID_FIELD);
    }
    expect(&mut guest, config(shadow, 0x1000), Status::INVALID_FIELD);
    expect(&mut guest, config(shadow, events), Status::SUCCESS);
    assert_eq!(guest.read_value::<[u32; 4]>(shadow), [0, 0, 3, 3]);
    // From now on the shadow counts.
    guest.push(1, read);
    guest.write_value(shadow + 8, &4u32);
    assert_eq!(code(&guest.wait_shadow(1, shadow)), Status::SUCCESS);
    // Other pages begin where these are, and not where the guest rang last.
    let (shadow, events) = (guest.alloc_pages(1), guest.alloc_pages(1));
    guest.push(1, read);
    expect(&mut guest, config(shadow, events), Status::SUCCESS);
    assert_eq!(guest.read_value::<[u32; 4]>(shadow), [0, 0, 4, 4]);
    guest.settle();
    assert!(guest.poll(1).is_none(), "nothing is carried out again");
    guest.write_value(shadow + 8, &5u32);
    assert_eq!(code(&guest.wait(1)), Status::SUCCESS);
    // A reset ends it.
    guest.disable();
    guest.enable();
    guest.create_queues(1, 16);
    let read = read_block(&mut guest, 1);
    assert_eq!(code(&guest.command(1, read)), Status::SUCCESS);
}
