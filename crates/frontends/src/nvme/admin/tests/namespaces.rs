//! Namespace Management, Namespace Attachment, Format NVM.

use std::sync::Arc;

use millrace_backends::{
    MemoryVolume,
    fault::{FaultVolume, Kind},
};
use millrace_block::{BlockSize, Volume};
use millrace_nvme_spec::{
    admin::NamespaceManagementData,
    command::{ControllerId, Cqe, Sqe},
    features::FeatureId,
    identify::{
        Cns, ControllerList, FormattedLbaSize, IdentifyController, IdentifyNamespace, NamespaceSharing, ProtectionSettings,
    },
    opcode::{AdminOpcode, NvmOpcode},
    registers::offset,
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    super::super::{
        fixture::{FakeGuest, HeldVolume, HostCall, identity, sqe},
        namespace::{Allocated, Namespace},
    },
    Gated, admin, boot_with_all, code, expect, read_block, reading, with,
};

const MEBIBYTE: u64 = 1 << 20;

/// What a creation of `blocks` asks for.
fn data(blocks: u64, format: u8) -> NamespaceManagementData {
    let mut data = NamespaceManagementData::new_zeroed();
    (data.nsze, data.ncap, data.flbas) = (blocks, blocks, FormattedLbaSize::new().with_index(format));
    data
}

fn create(guest: &mut FakeGuest, data: &NamespaceManagementData) -> Cqe {
    guest.command_writing(0, admin(AdminOpcode::NAMESPACE_MANAGEMENT, 0), data.as_bytes())
}

/// The same, for who does not wait for it.
fn creation(guest: &mut FakeGuest, data: &NamespaceManagementData) -> Sqe {
    let page = guest.alloc_pages(1);
    guest.write_value(page, data);
    let mut sqe = admin(AdminOpcode::NAMESPACE_MANAGEMENT, 0);
    sqe.dptr.prp1 = page;
    sqe
}

fn delete(nsid: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::NAMESPACE_MANAGEMENT, nsid);
    sqe.cdw10 = 1;
    sqe
}

fn attachment(guest: &mut FakeGuest, select: u32, nsid: u32, controllers: &[u16]) -> Status {
    let list = ControllerList::new(controllers.iter().copied().map(ControllerId));
    let mut sqe = admin(AdminOpcode::NAMESPACE_ATTACHMENT, nsid);
    sqe.cdw10 = select;
    code(&guest.command_writing(0, sqe, list.as_bytes()))
}

fn format(nsid: u32, cdw10: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::FORMAT_NVM, nsid);
    sqe.cdw10 = cdw10;
    sqe
}

fn identify(guest: &mut FakeGuest, nsid: u32) -> IdentifyNamespace {
    let mut sqe = admin(AdminOpcode::IDENTIFY, nsid);
    sqe.cdw10 = u32::from(Cns::ALLOCATED_NAMESPACE.0);
    reading(guest, sqe)
}

fn capacity_left(guest: &mut FakeGuest) -> u128 {
    let mut sqe = admin(AdminOpcode::IDENTIFY, 0);
    sqe.cdw10 = u32::from(Cns::CONTROLLER.0);
    reading::<IdentifyController>(guest, sqe).unvmcap.get()
}

#[test]
fn a_guest_creates_attaches_detaches_and_deletes() {
    let mut guest = boot_with_all();
    guest.add_memory_volume(1, MEBIBYTE, BlockSize::B512);
    let cqe = create(&mut guest, &data(1024, 1));
    assert_eq!((code(&cqe), cqe.dw0), (Status::SUCCESS, 2));
    assert_eq!(guest.host.take_calls(), [HostCall::Create { nsid: 2, bytes: 4 * MEBIBYTE, block_size: BlockSize::B4096 }]);
    assert_eq!(capacity_left(&mut guest), u128::from(12 * MEBIBYTE));
    let id = identify(&mut guest, 2);
    assert_eq!((id.nsze, id.flbas.index()), (1024, 1));
    guest.make_queues(1, 16);
    let mut read = read_block(&mut guest, 2);
    assert_eq!(code(&guest.command(1, read)), Status::INVALID_FIELD, "not attached yet");
    assert_eq!(attachment(&mut guest, 0, 2, &[1]), Status::SUCCESS);
    assert_eq!(code(&guest.command(1, read)), Status::SUCCESS);
    assert_eq!(attachment(&mut guest, 0, 2, &[1]), Status::NAMESPACE_ALREADY_ATTACHED);
    assert_eq!(attachment(&mut guest, 1, 2, &[1]), Status::SUCCESS);
    assert_eq!(attachment(&mut guest, 1, 2, &[1]), Status::NAMESPACE_NOT_ATTACHED);
    let changes = [true, false].map(|attached| HostCall::AttachmentChanged { nsid: 2, attached });
    assert_eq!(guest.host.take_calls(), changes);
    assert_eq!(code(&guest.command(1, read)), Status::INVALID_FIELD);
    expect(&mut guest, delete(2), Status::SUCCESS);
    assert_eq!(guest.host.take_calls(), [HostCall::Delete { nsid: 2 }]);
    assert_eq!(identify(&mut guest, 2).nsze, 0);
    assert_eq!(capacity_left(&mut guest), u128::from(16 * MEBIBYTE));
    read.nsid.0 = 1;
    assert_eq!(code(&guest.command(1, read)), Status::SUCCESS, "the other one is untouched");
}

#[test]
fn creations_that_cannot_be_are_refused() {
    let mut guest = boot_with_all();
    let good = data(2048, 0);
    let thin = with(&good, |data| data.ncap = 1);
    for (data, status) in vec![
        (data(0, 0), Status::INVALID_FIELD),
        (with(&good, |data| data.ncap = 4096), Status::INVALID_FIELD),
        (thin, Status::THIN_PROVISIONING_NOT_SUPPORTED),
        (data(2048, 2), Status::INVALID_FORMAT),
        (data(2048, 63), Status::INVALID_FORMAT),
        (with(&good, |data| data.flbas = FormattedLbaSize::new().with_metadata_extended(true)), Status::INVALID_FORMAT),
        (with(&good, |data| data.dps = ProtectionSettings::new().with_pit(1)), Status::INVALID_FIELD),
        (with(&good, |data| data.nmic = NamespaceSharing::new().with_shared(true)), Status::INVALID_FIELD),
        (with(&good, |data| data.anagrpid = 1), Status::ANA_GROUP_ID_INVALID),
        (with(&good, |data| data.nvmsetid = 1), Status::INVALID_FIELD),
        (with(&good, |data| data.endgid = 1), Status::INVALID_FIELD),
        (data(16 * 2048 + 1, 0), Status::NAMESPACE_INSUFFICIENT_CAPACITY),
        (data(u64::MAX, 1), Status::NAMESPACE_INSUFFICIENT_CAPACITY),
    ] {
        assert_eq!(code(&create(&mut guest, &data)), status);
    }
    for (nsid, cdw10, cdw11, status) in [
        (1, 0, 0, Status::INVALID_FIELD),
        (0, 2, 0, Status::INVALID_FIELD),
        (0, 0, 2 << 24, Status::IO_COMMAND_SET_NOT_SUPPORTED),
    ] {
        let mut sqe = admin(AdminOpcode::NAMESPACE_MANAGEMENT, nsid);
        (sqe.cdw10, sqe.cdw11) = (cdw10, cdw11);
        assert_eq!(code(&guest.command_writing(0, sqe, good.as_bytes())), status);
    }
    assert_eq!(guest.host.take_calls(), []);
    assert_eq!(guest.controller.namespaces.allocated().count(), 0);
}

#[test]
fn the_quota_holds_for_creations_under_way() {
    let mut guest = boot_with_all();
    guest.host.hold();
    let sqe = creation(&mut guest, &data(10 * 2048, 0));
    let first = guest.submit(0, sqe);
    expect(&mut guest, sqe, Status::NAMESPACE_INSUFFICIENT_CAPACITY);
    guest.host.release();
    let cqe = guest.wait_for(0, first);
    assert_eq!((code(&cqe), cqe.dw0), (Status::SUCCESS, 1));
    expect(&mut guest, sqe, Status::NAMESPACE_INSUFFICIENT_CAPACITY);
    // All identifiers in use.
    for nsid in 2..=64 {
        guest.add_memory_volume(nsid, MEBIBYTE, BlockSize::B512);
    }
    assert_eq!(code(&create(&mut guest, &data(8, 0))), Status::NAMESPACE_ID_UNAVAILABLE);
}

/// The worker that made it had no time to say so: what it made counts in the quota.
#[test]
fn a_creation_that_is_carried_out_again_finds_what_it_made() {
    let mut guest = boot_with_all();
    let volume = MemoryVolume::create("made", 10 * MEBIBYTE, BlockSize::B512).expect("a volume");
    let allocated = Allocated { namespace: Namespace::new(volume, identity(1), false), read_only: false, by_guest: true };
    guest.controller.namespaces.allocate(1, allocated).expect("a free identifier");
    let page = guest.alloc_pages(1);
    guest.write_value(page, &data(10 * 2048, 0));
    let mut sqe = admin(AdminOpcode::NAMESPACE_MANAGEMENT, 0);
    (sqe.dptr.prp1, sqe.cid.0) = (page, 77);
    let record = guest.controller.records.take(&sqe, 0, 0).expect("a free record");
    guest.controller.records.accept(record);
    guest.controller.records.number(record, 1);
    guest.controller.recover_records();
    let cqe = guest.wait_for(0, 77);
    assert_eq!((code(&cqe), cqe.dw0), (Status::SUCCESS, 1));
    assert_eq!(guest.host.take_calls(), []);
}

#[test]
fn a_creation_outlives_a_reset() {
    let mut guest = boot_with_all();
    guest.host.hold();
    let creation = creation(&mut guest, &data(2048, 0));
    guest.submit(0, creation);
    guest.step();
    guest.step();
    guest.disable();
    guest.enable();
    assert_eq!(guest.controller.in_flight, 0);
    guest.host.release();
    guest.step_until("the namespace", |guest| guest.controller.namespaces.allocation(1).is_some());
    assert!(guest.poll(0).is_none(), "the command is forgotten");
    expect(&mut guest, delete(1), Status::SUCCESS);
}

/// Nobody may enable the controller again: its shard has nothing to look for.
#[test]
fn an_answer_is_taken_while_the_controller_is_disabled() {
    let mut guest = boot_with_all();
    guest.host.hold();
    let creation = creation(&mut guest, &data(2048, 0));
    guest.submit(0, creation);
    guest.step_until("the host to be asked", |guest| !guest.host.take_calls().is_empty());
    guest.disable();
    guest.host.release();
    guest.step_until("the answer", |guest| guest.controller.namespaces.allocation(1).is_some());
    assert!(!guest.controller.has_answers() && !guest.controller.has_jobs());
}

/// The daemon's record is there before the device has heard of it.
#[test]
fn a_namespace_that_is_taken_away_while_it_is_created_does_not_come() {
    let mut guest = boot_with_all();
    assert!(!guest.controller.withdraw_creation(1));
    guest.host.hold();
    let creation = creation(&mut guest, &data(2048, 0));
    let cid = guest.submit(0, creation);
    guest.step_until("the host to be asked", |guest| !guest.host.take_calls().is_empty());
    assert!(guest.controller.withdraw_creation(1));
    guest.host.release();
    assert_eq!(code(&guest.wait_for(0, cid)), Status::INTERNAL_ERROR);
    assert_eq!(guest.controller.namespaces.allocated().count(), 0);
    assert_eq!(create(&mut guest, &data(8, 0)).dw0, 1, "its identifier is free");
}

#[test]
fn a_reset_ends_the_deletion_of_many_after_the_one_under_way() {
    let mut guest = boot_with_all();
    for wanted in 1..=2 {
        assert_eq!(create(&mut guest, &data(8, 0)).dw0, wanted);
        assert_eq!(attachment(&mut guest, 0, wanted, &[1]), Status::SUCCESS);
    }
    guest.host.take_calls();
    guest.host.hold();
    guest.submit(0, delete(u32::MAX));
    let mut calls = Vec::new();
    guest.step_until("the host to be asked", |guest| {
        calls.extend(guest.host.take_calls());
        calls.contains(&HostCall::Delete { nsid: 2 })
    });
    guest.disable();
    guest.host.release();
    guest.step_until("the answer", |guest| !guest.controller.has_jobs());
    guest.enable();
    for _ in 0..10 {
        guest.step();
    }
    assert_eq!(guest.controller.namespaces.attached().map(|attached| attached.nsid).collect::<Vec<_>>(), [1]);
    assert!(!guest.host.take_calls().contains(&HostCall::Delete { nsid: 1 }));
}

#[test]
fn deletions_that_cannot_be_are_refused() {
    let mut guest = boot_with_all();
    guest.add_memory_volume(3, MEBIBYTE, BlockSize::B512);
    assert_eq!(create(&mut guest, &data(8, 0)).dw0, 1);
    for (nsid, status) in [
        (0, Status::INVALID_NAMESPACE_OR_FORMAT),
        (65, Status::INVALID_NAMESPACE_OR_FORMAT),
        (2, Status::INVALID_FIELD),
        // The operator's.
        (3, Status::OPERATION_DENIED),
        (u32::MAX, Status::OPERATION_DENIED),
    ] {
        expect(&mut guest, delete(nsid), status);
    }
    assert_eq!(guest.controller.namespaces.allocated().count(), 2);
}

#[test]
fn all_namespaces_are_deleted_at_once() {
    let mut guest = boot_with_all();
    for wanted in 1..=3 {
        assert_eq!(create(&mut guest, &data(8, 0)).dw0, wanted);
    }
    assert_eq!(attachment(&mut guest, 0, 2, &[1]), Status::SUCCESS);
    guest.host.take_calls();
    expect(&mut guest, delete(u32::MAX), Status::SUCCESS);
    assert_eq!(guest.host.take_calls(), [3, 2, 1].map(|nsid| HostCall::Delete { nsid }));
    assert_eq!(guest.controller.namespaces.allocated().count(), 0);
    assert_eq!(guest.controller.namespaces.attached().count(), 0);
}

#[test]
fn a_deletion_waits_for_commands_in_flight() {
    let mut guest = boot_with_all();
    let volume = Gated::create(MEBIBYTE);
    let namespace = Namespace::new(volume.clone(), identity(1), false);
    let allocated = Allocated { namespace, read_only: false, by_guest: true };
    guest.controller.namespaces.allocate(1, allocated).expect("a free identifier");
    guest.controller.namespaces.attach(1).expect("an attachment");
    guest.make_queues(1, 16);
    let read = read_block(&mut guest, 1);
    let in_flight = guest.submit(1, read);
    guest.step();
    let deletion = guest.submit(0, delete(1));
    for _ in 0..50 {
        guest.step();
    }
    assert!(guest.poll(0).is_none());
    assert_eq!(guest.host.take_calls(), [], "its blocks are in use");
    assert_eq!(code(&guest.command(1, read)), Status::INVALID_FIELD, "new commands no longer find it");
    // Whoever else wants something of it comes too early.
    expect(&mut guest, delete(1), Status::NAMESPACE_NOT_READY);
    assert_eq!(attachment(&mut guest, 0, 1, &[1]), Status::NAMESPACE_NOT_READY);
    volume.open();
    assert_eq!(code(&guest.wait_for(1, in_flight)), Status::SUCCESS);
    assert_eq!(code(&guest.wait_for(0, deletion)), Status::SUCCESS);
    assert_eq!(guest.host.take_calls(), [HostCall::Delete { nsid: 1 }]);
}

#[test]
fn attachments_that_cannot_be_are_refused() {
    let mut guest = boot_with_all();
    assert_eq!(create(&mut guest, &data(8, 0)).dw0, 1);
    guest.host.take_calls();
    for (select, nsid, controllers, status) in [
        (2, 1, &[1][..], Status::INVALID_FIELD),
        (0, 0, &[1], Status::INVALID_NAMESPACE_OR_FORMAT),
        (0, 65, &[1], Status::INVALID_NAMESPACE_OR_FORMAT),
        (0, u32::MAX, &[1], Status::INVALID_FIELD),
        (0, 2, &[1], Status::INVALID_FIELD),
        (0, 1, &[], Status::CONTROLLER_LIST_INVALID),
        (0, 1, &[2], Status::CONTROLLER_LIST_INVALID),
        (0, 1, &[1, 2], Status::CONTROLLER_LIST_INVALID),
        (0, 1, &[1, 1], Status::CONTROLLER_LIST_INVALID),
        (1, 1, &[1], Status::NAMESPACE_NOT_ATTACHED),
    ] {
        assert_eq!(attachment(&mut guest, select, nsid, controllers), status, "{select} {nsid} {controllers:?}");
    }
    // A count beyond the list.
    let sqe = admin(AdminOpcode::NAMESPACE_ATTACHMENT, 1);
    assert_eq!(code(&guest.command_writing(0, sqe, &[0xff; 4096])), Status::CONTROLLER_LIST_INVALID);
    assert_eq!(guest.host.take_calls(), []);
}

#[test]
fn a_format_erases_and_changes_the_block_size() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, MEBIBYTE, BlockSize::B512);
    guest.make_queues(1, 16);
    let mut write = sqe(NvmOpcode::WRITE.0, 1);
    write.cdw12 = 7;
    assert_eq!(code(&guest.command_writing(1, write, &[0x5a; 4096])), Status::SUCCESS);
    // Block 1 is marked as bad, which a format ends.
    let mut bad = sqe(NvmOpcode::WRITE_UNCORRECTABLE.0, 1);
    bad.cdw10 = 1;
    assert_eq!(code(&guest.command(1, bad)), Status::SUCCESS);
    // User Data Erase, format 1.
    expect(&mut guest, format(1, 1 | 1 << 9), Status::SUCCESS);
    assert_eq!(guest.host.take_calls(), [HostCall::Format { uuid: identity(1).uuid, block_size: BlockSize::B4096 }]);
    let id = identify(&mut guest, 1);
    assert_eq!((id.nsze, id.flbas.index()), (256, 1));
    let (cqe, bytes) = guest.command_reading(1, sqe(NvmOpcode::READ.0, 1), 4096);
    assert_eq!(code(&cqe), Status::SUCCESS);
    assert!(bytes.iter().all(|byte| *byte == 0));
    let attached = guest.controller.namespaces.get(1).expect("it is still attached");
    assert_eq!(attached.geometry.get(), attached.namespace.volume.geometry());
}

#[test]
fn a_cryptographic_erase_needs_a_key() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, MEBIBYTE, BlockSize::B512);
    let attributes = |guest: &mut FakeGuest| {
        let mut sqe = admin(AdminOpcode::IDENTIFY, 0);
        sqe.cdw10 = u32::from(Cns::CONTROLLER.0);
        reading::<IdentifyController>(guest, sqe).fna
    };
    assert!(!attributes(&mut guest).cryptographic_erase());
    let inner = MemoryVolume::create("keyed", MEBIBYTE, BlockSize::B512).expect("a volume");
    guest.add_namespace(2, &Namespace::new(HeldVolume::new(inner), identity(2), false));
    assert!(attributes(&mut guest).cryptographic_erase());
    expect(&mut guest, format(1, 2 << 9), Status::INVALID_FIELD);
    assert_eq!(guest.host.take_calls(), []);
    expect(&mut guest, format(2, 2 << 9), Status::SUCCESS);
    assert_eq!(guest.host.take_calls(), [HostCall::Format { uuid: identity(2).uuid, block_size: BlockSize::B512 }]);
}

#[test]
fn a_format_waits_for_what_went_another_way_and_ends_for_those_who_come_then() {
    let mut guest = FakeGuest::boot();
    let volume = Gated::create(MEBIBYTE);
    guest.add_namespace(1, &Namespace::new(volume.clone(), identity(1), false));
    guest.make_queues(1, 16);
    let read = read_block(&mut guest, 1);
    let in_flight = guest.submit(1, read);
    guest.step();
    guest.controller.namespaces.lead(1, Some(volume.clone()));
    let formatting = guest.submit(0, format(1, 1));
    guest.step();
    guest.step();
    assert_eq!(guest.host.take_calls(), [], "a command is in flight on the way before");
    guest.controller.namespaces.lead(1, None);
    assert_eq!(code(&guest.command(1, read)), Status::FORMAT_IN_PROGRESS);
    volume.open();
    assert_eq!(code(&guest.wait_for(1, in_flight)), Status::SUCCESS);
    assert_eq!(code(&guest.wait_for(0, formatting)), Status::SUCCESS);
    assert_eq!(code(&guest.command(1, read)), Status::SUCCESS);
    let attached = guest.controller.namespaces.get(1).expect("it is still attached");
    assert_eq!(attached.geometry.get(), attached.namespace.volume.geometry());
}

#[test]
fn formats_that_cannot_be_are_refused() {
    let mut guest = FakeGuest::boot();
    let namespace = guest.add_memory_volume(1, MEBIBYTE, BlockSize::B512);
    guest.controller.namespaces.allocate(2, Allocated { namespace, read_only: true, by_guest: false }).expect("free");
    guest.controller.namespaces.attach(2).expect("an attachment");
    for (nsid, cdw10, status) in [
        (0, 0, Status::INVALID_NAMESPACE_OR_FORMAT),
        (65, 0, Status::INVALID_NAMESPACE_OR_FORMAT),
        (3, 0, Status::INVALID_FIELD),
        (u32::MAX, 0, Status::INVALID_FIELD),
        (1, 2, Status::INVALID_FORMAT),
        (1, 1 << 12, Status::INVALID_FORMAT),
        // Protection information; cryptographic erase; reserved.
        (1, 1 << 5, Status::INVALID_FORMAT),
        (1, 2 << 9, Status::INVALID_FIELD),
        (1, 3 << 9, Status::INVALID_FIELD),
        (2, 0, Status::NAMESPACE_WRITE_PROTECTED),
    ] {
        expect(&mut guest, format(nsid, cdw10), status);
    }
    assert_eq!(guest.host.take_calls(), []);
}

#[test]
fn a_format_keeps_commands_out() {
    let mut guest = FakeGuest::boot();
    let volume = Gated::create(MEBIBYTE);
    guest.add_namespace(1, &Namespace::new(volume.clone(), identity(1), false));
    guest.make_queues(1, 16);
    guest.host.hold();
    let read = read_block(&mut guest, 1);
    let in_flight = guest.submit(1, read);
    guest.step();
    guest.submit(0, format(1, 1));
    guest.step();
    guest.step();
    assert_eq!(guest.host.take_calls(), [], "a command is in flight");
    // It may be tried again: all of the status.
    let for_now = Status::FORMAT_IN_PROGRESS.with_more(true);
    assert_eq!(guest.command(1, read).status(), for_now);
    volume.open();
    assert_eq!(code(&guest.wait_for(1, in_flight)), Status::SUCCESS);
    guest.step_until("the host to be asked", |guest| !guest.host.take_calls().is_empty());
    assert_eq!(guest.command(1, read).status(), for_now);
    assert_eq!(guest.admin(format(1, 0)).status(), for_now);
    // A reset forgets the command, not the format.
    guest.disable();
    guest.enable();
    guest.make_queues(1, 16);
    assert_eq!(guest.command(1, read).status(), for_now);
    guest.host.release();
    guest.step_until("the format", |guest| {
        let attached = guest.controller.namespaces.get(1).expect("it is attached");
        !attached.formatting.get()
    });
    assert_eq!(volume.geometry().block_size, BlockSize::B4096);
    assert_eq!(code(&guest.command(1, read)), Status::SUCCESS);
}

/// A guest with two volumes that count their flushes.
fn with_flushes() -> (FakeGuest, [Arc<FaultVolume>; 2]) {
    let mut guest = FakeGuest::boot();
    let volumes = [1, 2].map(|nsid| {
        let volume = FaultVolume::new(MemoryVolume::create("inner", MEBIBYTE, BlockSize::B512).expect("a volume"), 1);
        guest.add_volume(nsid, Arc::clone(&volume) as Arc<dyn Volume>);
        volume
    });
    guest.make_queues(1, 16);
    (guest, volumes)
}

/// The volume takes no requests while it is formatted.
#[test]
fn a_format_keeps_flushes_of_all_namespaces_out() {
    let (mut guest, volumes) = with_flushes();
    let flushes = || volumes.each_ref().map(|volume| volume.requests(Kind::Flush));
    guest.host.hold();
    let formatting = guest.submit(0, format(1, 1));
    guest.step_until("the host to be asked", |guest| !guest.host.take_calls().is_empty());
    let flush = sqe(NvmOpcode::FLUSH.0, u32::MAX);
    let for_now = Status::FORMAT_IN_PROGRESS.with_more(true);
    assert_eq!(guest.command(1, flush).status(), for_now);
    let mut off = admin(AdminOpcode::SET_FEATURES, 0);
    off.cdw10 = FeatureId::VOLATILE_WRITE_CACHE.0.into();
    assert_eq!(guest.admin(off).status(), for_now);
    assert!(guest.controller.write_cache_enabled(), "nothing has changed");
    assert_eq!(flushes(), [0, 0]);
    guest.host.release();
    assert_eq!(code(&guest.wait_for(0, formatting)), Status::SUCCESS);
    assert_eq!(code(&guest.command(1, flush)), Status::SUCCESS);
    assert_eq!(flushes(), [1, 1]);
    expect(&mut guest, off, Status::SUCCESS);
    assert_eq!(flushes(), [2, 2]);
}

#[test]
fn a_shutdown_during_a_format_flushes_the_other_namespaces() {
    let (mut guest, volumes) = with_flushes();
    guest.host.hold();
    guest.submit(0, format(1, 1));
    guest.step_until("the host to be asked", |guest| !guest.host.take_calls().is_empty());
    shut_down(&mut guest);
    assert_eq!(volumes.each_ref().map(|volume| volume.requests(Kind::Flush)), [0, 1]);
    guest.host.release();
    guest.step_until("the format", |guest| {
        let attached = guest.controller.namespaces.get(1).expect("it is attached");
        !attached.formatting.get()
    });
}

#[test]
fn what_takes_the_place_of_what_is_being_formatted_is_flushed() {
    let (mut guest, _) = with_flushes();
    guest.host.hold();
    guest.submit(0, format(1, 1));
    guest.step_until("the host to be asked", |guest| !guest.host.take_calls().is_empty());
    guest.controller.namespaces.detach(1);
    guest.controller.namespaces.release(1);
    let instead = FaultVolume::new(MemoryVolume::create("instead", MEBIBYTE, BlockSize::B512).expect("a volume"), 1);
    guest.add_volume(1, Arc::clone(&instead) as Arc<dyn Volume>);
    shut_down(&mut guest);
    assert_eq!(instead.requests(Kind::Flush), 1);
    guest.host.release();
}

#[test]
fn a_format_does_not_wait_for_what_was_there_before() {
    let mut guest = FakeGuest::boot();
    let before = Gated::create(MEBIBYTE);
    guest.add_namespace(1, &Namespace::new(before.clone(), identity(1), false));
    guest.make_queues(1, 16);
    let read = read_block(&mut guest, 1);
    let in_flight = guest.submit(1, read);
    guest.step();
    guest.controller.namespaces.detach(1);
    guest.controller.namespaces.release(1);
    guest.add_memory_volume(1, MEBIBYTE, BlockSize::B512);
    assert_eq!(code(&guest.command(0, format(1, 1))), Status::SUCCESS);
    before.open();
    guest.wait_for(1, in_flight);
}

/// It may never be: a reset calls the format off.
#[test]
fn a_shutdown_flushes_what_is_yet_to_be_formatted() {
    let (mut guest, [_, counts]) = with_flushes();
    let volume = HeldVolume::new(Arc::clone(&counts) as Arc<dyn Volume>);
    guest.add_volume(3, Arc::clone(&volume) as Arc<dyn Volume>);
    volume.hold();
    let read = read_block(&mut guest, 3);
    guest.submit(1, read);
    guest.step_until("the read", |_| volume.waiting() == 1);
    guest.submit(0, format(3, 1));
    guest.step();
    guest.step();
    // No turn between the two: the read is in flight when the shutdown begins.
    volume.release();
    shut_down(&mut guest);
    assert_eq!(guest.host.take_calls(), [], "it was not formatted");
    assert_eq!(counts.requests(Kind::Flush), 2, "as namespace 2, and as namespace 3");
    guest.disable();
    let attached = guest.controller.namespaces.get(3).expect("it is attached");
    assert!(!attached.formatting.get());
}

fn shut_down(guest: &mut FakeGuest) {
    let cc = guest.read32(offset::CC);
    guest.write32(offset::CC, cc | 1 << 14);
    guest.step_until("the shutdown", |guest| guest.read32(offset::CSTS) >> 2 & 3 == 2);
}

/// An operator's attachment there was not stored, and its worker is gone.
#[test]
fn a_new_namespace_is_not_attached_whatever_was_there_before() {
    let mut guest = boot_with_all();
    guest.controller.note_attached(1, true);
    let created = create(&mut guest, &data(2048, 0));
    assert_eq!((code(&created), created.dw0), (Status::SUCCESS, 1));
    assert!(!guest.controller.was_attached(1), "a successor does not find it attached");
}

#[test]
fn a_reset_takes_back_what_nobody_was_asked_for() {
    let mut guest = boot_with_all();
    let volumes = [1_u32, 2].map(|nsid| {
        let volume = Gated::create(MEBIBYTE);
        let namespace = Namespace::new(volume.clone(), identity(nsid), false);
        let allocated = Allocated { namespace, read_only: false, by_guest: true };
        guest.controller.namespaces.allocate(nsid, allocated).expect("a free identifier");
        guest.controller.namespaces.attach(nsid).expect("an attachment");
        guest.controller.note_attached(nsid, true);
        volume
    });
    guest.make_queues(1, 16);
    let reads = [1, 2].map(|nsid| read_block(&mut guest, nsid));
    for read in reads {
        guest.submit(1, read);
    }
    guest.step();
    guest.submit(0, format(1, 1));
    guest.submit(0, delete(2));
    guest.step();
    guest.step();
    assert_eq!(guest.host.take_calls(), [], "commands are in flight on both");
    let cc = guest.read32(offset::CC);
    guest.write32(offset::CC, cc & !1);
    guest.step();
    for volume in &volumes {
        volume.open();
    }
    guest.step_until("the reset", |guest| guest.read32(offset::CSTS) & 1 == 0);
    guest.enable();
    guest.make_queues(1, 16);
    for read in reads {
        assert_eq!(code(&guest.command(1, read)), Status::SUCCESS);
    }
    assert_eq!(guest.host.take_calls(), []);
    assert_eq!(volumes[0].geometry().block_size, BlockSize::B512);
    assert!(guest.controller.was_attached(2), "a successor finds it attached too");
    // Both can be had again.
    expect(&mut guest, format(1, 1), Status::SUCCESS);
    expect(&mut guest, delete(2), Status::SUCCESS);
    assert!(!guest.controller.was_attached(2));
}
