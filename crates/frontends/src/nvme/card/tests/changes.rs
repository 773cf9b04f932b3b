//! What changes while a guest's commands are in flight: sizes, write cache, namespaces, replicas, queues.

use millrace_backends::fault::{FaultVolume, Kind};
use millrace_block::{BlockCount, Metadata, MetadataFormat};
use millrace_nvme_spec::features::FeatureId;

use super::*;
use crate::nvme::{
    Namespace,
    fixture::{TaggedMemory, identity},
};

/// Bytes of a command's data: one page, and a list of the others.
const LEN: usize = 32 << 10;
/// CC.SHN: a normal shutdown.
const SHN_NORMAL: u32 = 1 << 14;

fn replicating() -> FakeGuest {
    FakeGuest::on_card(test_card(2), StorageFunctions { replicate: true, ..StorageFunctions::default() })
}

fn volume(name: &str, bytes: u64, block_size: BlockSize) -> Arc<Namespace> {
    let volume = MemoryVolume::create(name, bytes, block_size).expect("a volume");
    Namespace::new(volume, identity(9), false)
}

fn held(bytes: u64, block_size: BlockSize) -> Arc<HeldVolume> {
    HeldVolume::new(MemoryVolume::create("held", bytes, block_size).expect("a volume"))
}

fn flush(guest: &mut FakeGuest) -> Status {
    guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)).status()
}

/// Each change comes when commands are at every stage of their way. Every read has all of its data: had one been sized for other blocks,
/// its list would be too short.
#[test]
fn sizes_and_the_write_cache_change_with_full_queues() {
    let mut guest = guest();
    let blocks = 1024;
    let namespace = guest.add_memory_volume(1, blocks * 4096, BlockSize::B4096);
    (1..=4).for_each(|qid| guest.create_queues(qid, 64));
    let content = pattern(5, LEN);
    assert!(guest.command_writing(1, command(NvmOpcode::WRITE, 0, 8), &content).status().is_success());
    let mut buffers = Vec::new();
    for _ in 0..4 * 63 {
        let at = guest.alloc_pages(LEN as u64 / PAGE);
        buffers.push((at, guest.prps(at, LEN as u64)));
    }
    let nothing = vec![0; LEN];
    for round in 0..8_u64 {
        for (qid, mine) in (1..=4).zip(buffers.chunks(63)) {
            for (at, pointer) in mine {
                guest.write(*at, &nothing);
                let mut sqe = command(NvmOpcode::READ, 0, 8);
                sqe.dptr = *pointer;
                guest.push(qid, sqe);
            }
            guest.ring(qid);
        }
        for change in 1..=8 {
            namespace.resize(BlockCount(blocks + round * 8 + change)).expect("it grows");
            guest.step();
        }
        let mut features = sqe(AdminOpcode::SET_FEATURES.0, 0);
        (features.cdw10, features.cdw11) = (FeatureId::VOLATILE_WRITE_CACHE.0.into(), (round % 2) as u32);
        assert!(guest.admin(features).status().is_success());
        for qid in 1..=4 {
            (0..63).for_each(|_| assert!(guest.wait(qid).status().is_success(), "round {round}, queue {qid}"));
        }
        assert!(buffers.iter().all(|(at, _)| guest.read(*at, LEN) == content), "round {round}: data are missing");
    }
    assert_eq!(guest.controller.counters.errors, 0);
}

#[test]
fn another_namespace_is_shown_when_the_commands_of_the_one_before_have_ended() {
    let mut guest = FakeGuest::on_card(test_card(2), StorageFunctions::default());
    let held = held(1 << 20, BlockSize::B4096);
    guest.add_volume(1, Arc::clone(&held) as _);
    guest.create_queues(1, 64);
    held.hold();
    let mut sqe = command(NvmOpcode::READ, 0, 1);
    sqe.dptr = DataPointer::prps(guest.alloc_pages(1), 0);
    for _ in 0..5 {
        guest.push(1, sqe);
    }
    guest.ring(1);
    guest.step_until("commands at the disk", |_| held.waiting() == 5);
    let attached = guest.controller.namespaces.detach(1).expect("it is attached");
    guest.controller.detach_from_card(&attached);
    guest.controller.namespaces.release(1);
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let cid = guest.submit(1, sqe);
    for _ in 0..100 {
        guest.step();
    }
    assert!(guest.poll(1).is_none(), "it waits for those before it");
    assert_eq!(attached.in_flight.get(), 1, "its volume is in use");
    held.release();
    assert!(guest.wait_for(1, cid).status().is_success(), "the other one is shown");
    (0..5).for_each(|_| assert!(guest.wait(1).status().is_success(), "they ended as if nothing had been"));
    assert_eq!(attached.in_flight.get(), 0);
}

#[test]
fn a_namespace_that_was_never_shown_can_be_detached() {
    let (mut first, mut second) = (guest(), guest());
    let tagged = TaggedMemory::new(1 << 20, BlockSize::B512, Metadata::Shown(MetadataFormat::default()));
    second.add_volume(1, tagged);
    second.settle();
    first.add_memory_volume(1, 1 << 20, BlockSize::B512);
    first.create_queues(1, 16);
    assert!(flush(&mut first).is_success(), "the one with metadata took no disk");
    for _ in 0..2 {
        let attached = second.controller.namespaces.detach(1).expect("it is attached");
        second.controller.detach_from_card(&attached);
        second.settle();
        assert_eq!(attached.in_flight.get(), 0, "nobody waits for it");
        second.controller.namespaces.release(1);
        // Nor is there a disk for this one.
        second.add_memory_volume(1, 1 << 20, BlockSize::B512);
        second.settle();
    }
}

#[test]
fn a_replica_that_does_not_fit_is_refused_and_the_guest_goes_on() {
    let mut guest = replicating();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.create_queues(1, 16);
    for (name, bytes, block_size, why) in [
        ("coarse", 1 << 20, BlockSize::B4096, "blocks have another size"),
        ("good", 1 << 20, BlockSize::B512, ""),
        ("third", 1 << 20, BlockSize::B512, "all disks"),
    ] {
        let nsid = if name == "third" { 3 } else { 2 };
        let joined = guest.controller.join_replica(nsid, &volume(name, bytes, block_size));
        match joined {
            Ok(()) => assert_eq!(name, "good"),
            Err(error) => assert!(!why.is_empty() && error.contains(name) && error.contains(why), "{error}"),
        }
        assert!(write(&mut guest, 1, 0, &pattern(4, 4096)).is_success(), "after {name}");
    }
    for _ in 0..2 {
        assert_eq!(read(&mut guest, 1, 0, 4096), (Status::SUCCESS, pattern(4, 4096)), "from either");
    }
}

fn is_leaving(guest: &FakeGuest, nsid: u32) -> bool {
    guest.controller.port.as_ref().is_some_and(|port| port.is_replica_leaving(nsid))
}

#[test]
fn a_replica_is_in_use_until_its_commands_have_ended() {
    let mut guest = replicating();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let held = held(1 << 20, BlockSize::B512);
    let replica = Namespace::new(Arc::clone(&held) as _, identity(9), false);
    guest.controller.join_replica(2, &replica).expect("it fits");
    guest.create_queues(1, 16);
    held.hold();
    let mut sqe = command(NvmOpcode::WRITE, 0, 8);
    sqe.dptr = DataPointer::prps(guest.alloc_pages(1), 0);
    guest.submit(1, sqe);
    guest.step_until("a command at the replica", |_| held.waiting() == 1);
    assert!(guest.controller.remove_replica(2));
    for _ in 0..100 {
        guest.step();
    }
    assert!(is_leaving(&guest, 2) && guest.poll(1).is_none(), "its command is in flight");
    assert!(guest.controller.join_replica(2, &replica).is_err_and(|why| why.contains("in flight")));
    held.release();
    assert!(guest.wait(1).status().is_success());
    guest.step_until("the end of the replica", |guest| !is_leaving(guest, 2));
    assert!(write(&mut guest, 1, 0, &pattern(1, 4096)).is_success());
    guest.controller.join_replica(2, &replica).expect("its disk is free");
}

/// A guest that has written to its volume, and to a replica that loses with the power what was not flushed.
fn with_a_cached_replica() -> (FakeGuest, Arc<FaultVolume>) {
    let mut guest = replicating();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let fault = FaultVolume::new(MemoryVolume::create("cached", 1 << 20, BlockSize::B512).expect("a volume"), 1);
    fault.hold_writes();
    let replica = Namespace::new(Arc::clone(&fault) as _, identity(9), false);
    guest.controller.join_replica(2, &replica).expect("it fits");
    guest.create_queues(1, 16);
    assert!(write(&mut guest, 1, 0, &pattern(1, LEN)).is_success());
    assert_eq!(fault.requests(Kind::Flush), 0);
    (guest, fault)
}

fn begin_shutdown(guest: &mut FakeGuest) {
    let cc = guest.read32(offset::CC);
    guest.write32(offset::CC, cc | SHN_NORMAL);
}

fn wait_for_shutdown(guest: &mut FakeGuest) {
    // CSTS.SHST: complete.
    guest.step_until("shutdown", |guest| guest.read32(offset::CSTS) >> 2 & 3 == 2);
}

#[test]
fn a_shutdown_makes_replicas_durable_too() {
    let (mut guest, fault) = with_a_cached_replica();
    begin_shutdown(&mut guest);
    wait_for_shutdown(&mut guest);
    assert_eq!((fault.requests(Kind::Flush), fault.power_loss()), (1, 0));
}

#[test]
fn turning_the_write_cache_off_makes_replicas_durable_too() {
    let (mut guest, fault) = with_a_cached_replica();
    let mut features = sqe(AdminOpcode::SET_FEATURES.0, 0);
    features.cdw10 = FeatureId::VOLATILE_WRITE_CACHE.0.into();
    assert!(guest.admin(features).status().is_success());
    assert_eq!((fault.requests(Kind::Flush), fault.power_loss()), (1, 0));
}

#[test]
fn volumes_that_go_while_a_shutdown_flushes_them_are_in_use_until_then() {
    let mut guest = replicating();
    let (first, second) = (held(1 << 20, BlockSize::B512), held(1 << 20, BlockSize::B512));
    guest.add_volume(1, Arc::clone(&first) as _);
    let replica = Namespace::new(Arc::clone(&second) as _, identity(9), false);
    guest.controller.join_replica(2, &replica).expect("it fits");
    first.hold();
    second.hold();
    begin_shutdown(&mut guest);
    guest.step_until("flushes of both", |_| (first.waiting(), second.waiting()) == (1, 1));
    assert!(guest.controller.remove_replica(2));
    let attached = guest.controller.namespaces.detach(1).expect("it is attached");
    guest.controller.detach_from_card(&attached);
    assert!(attached.in_flight.get() == 1 && is_leaving(&guest, 2), "their flushes are in flight");
    first.release();
    second.release();
    wait_for_shutdown(&mut guest);
    guest.step_until("the end of the replica", |guest| !is_leaving(guest, 2));
    assert_eq!(attached.in_flight.get(), 0);
}

#[test]
fn the_guest_is_told_of_as_many_blocks_as_its_smallest_replica_has() {
    let mut guest = replicating();
    guest.add_memory_volume(1, 2 << 20, BlockSize::B512);
    let replica = volume("smaller", 1 << 20, BlockSize::B512);
    // What Identify says, and whether an event has told of a change.
    let told = |guest: &mut FakeGuest| {
        let mut identify = sqe(AdminOpcode::IDENTIFY.0, 1);
        identify.cdw10 = IdentifyCdw10::new().with_cns(Cns::NAMESPACE).into_bits();
        let (_, data) = guest.command_reading(0, identify, 4096);
        let changed = &guest.controller.state.logs.changed_namespaces[0];
        let is_changed = changed.get() == 1 << 1;
        changed.set(0);
        (IdentifyNamespace::read_from_bytes(&data).expect("4096 bytes").nsze, is_changed)
    };
    assert_eq!(told(&mut guest), (4096, false));
    guest.controller.join_replica(2, &replica).expect("it fits");
    assert_eq!(told(&mut guest), (2048, true));
    replica.resize(BlockCount(3072)).expect("it grows");
    guest.controller.replica_changed(2);
    assert_eq!(told(&mut guest), (3072, true));
    assert!(guest.controller.remove_replica(2));
    assert_eq!(told(&mut guest), (4096, true));
}

#[test]
fn a_completion_queue_has_one_submission_queue_in_its_life() {
    let mut guest = guest();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.create_queues(1, 16);
    assert!(flush(&mut guest).is_success());
    let mut delete = sqe(AdminOpcode::DELETE_IO_SQ.0, 0);
    delete.cdw10 = 1;
    assert!(guest.admin(delete).status().is_success());
    let mut create = sqe(AdminOpcode::CREATE_IO_SQ.0, 0);
    create.dptr = DataPointer::prps(guest.alloc_pages(1), 0);
    create.cdw10 = CreateQueueCdw10::new().with_qid(QueueId(1)).with_qsize_z(15).into_bits();
    create.cdw11 = CreateSqCdw11::new().with_pc(true).with_cqid(QueueId(1)).into_bits();
    assert_eq!(guest.admin(create).status().code(), Status::COMPLETION_QUEUE_INVALID);
    let mut delete = sqe(AdminOpcode::DELETE_IO_CQ.0, 0);
    delete.cdw10 = 1;
    assert!(guest.admin(delete).status().is_success());
    guest.create_queues(1, 16);
    assert!(flush(&mut guest).is_success(), "with a new one it can be had again");
}

/// Others have all slots of the core: what was rung for is still to be taken.
#[test]
fn who_waits_for_a_slot_is_not_quiet() {
    let (mut first, mut second) = (guest(), guest());
    let held = held(1 << 20, BlockSize::B512);
    let namespace = first.add_volume(1, Arc::clone(&held) as _);
    second.add_namespace(1, &namespace);
    (1..=2).for_each(|qid| first.create_queues(qid, 64));
    second.create_queues(1, 16);
    held.hold();
    let mut sqe = command(NvmOpcode::READ, 0, 1);
    sqe.dptr = DataPointer::prps(first.alloc_pages(1), 0);
    for qid in 1..=2 {
        for _ in 0..50 {
            first.push(qid, sqe);
        }
        first.ring(qid);
    }
    first.step_until("commands in all slots", |_| held.waiting() > 50);
    for _ in 0..100 {
        first.step();
    }
    sqe.dptr = DataPointer::prps(second.alloc_pages(1), 0);
    second.submit(1, sqe);
    for _ in 0..100 {
        second.step();
    }
    assert!(second.poll(1).is_none() && !second.controller.is_quiet(), "it will be taken");
    held.release();
    let (mut ended, mut others) = (0, 0);
    first.step_until("the ends of all", |first| {
        second.step();
        ended += (1..=2).filter_map(|qid| first.poll(qid)).filter(|cqe| cqe.status().is_success()).count();
        others += usize::from(second.poll(1).is_some_and(|cqe| cqe.status().is_success()));
        (ended, others) == (100, 1)
    });
    first.settle();
    second.settle();
    assert!(second.controller.is_quiet());
}
