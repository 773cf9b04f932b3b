//! What the next worker makes of what is left.

use millrace_block::BlockSize;
use millrace_nvme_spec::{
    features::FeatureId,
    opcode::AdminOpcode,
    reservation::{AcquireAction, AcquireData, RegisterAction, RegisterData, ReservationType},
};

use super::*;
use crate::nvme::{
    Namespace,
    fixture::{FakeGuest, MEMORY_BASE, MEMORY_SIZE, sqe, test_config},
    reservation::{HostKey, Rights},
};

/// A worker was killed while a device was polled; the next one ended by another one's fault before it came to that device.
#[test]
fn a_kill_is_no_part_of_a_later_fault() {
    let guest = FakeGuest::new(test_config());
    let survival = &guest.controller.state.survival;
    survival.busy.set(1);
    guest.controller.count_strike(None);
    guest.controller.count_strike(Some(0));
    assert_eq!(survival.strikes.get(), 0);
    for strikes in 1..3 {
        survival.busy.set(1);
        guest.controller.count_strike(Some(0));
        assert_eq!(survival.strikes.get(), strikes);
    }
}

/// A client takes all its vectors away and wires them anew; its worker ends in between.
#[test]
fn interrupts_of_vectors_that_are_wired_later_outlive_the_worker() {
    let mut guest = FakeGuest::boot();
    guest.create_queues(1, 16);
    guest.settle();
    guest.controller.interrupts = crate::nvme::interrupts::Interrupts::new(9, "test");
    guest.controller.resume_kept(true);
    assert_eq!(guest.controller.interrupts.pending_word(0), 0b11);
    guest.step();
    assert_eq!(guest.controller.interrupts.pending_word(0), 0b11, "until they are wired");
}

/// A worker may end when the last of a restored machine's memory is there, and before the device goes on.
#[test]
fn a_restored_state_goes_on_when_its_memory_is_there_already() {
    let config = || Config { migration: true, ..test_config() };
    let mut source = FakeGuest::new(config());
    source.enable();
    let state = source.controller.save();
    let mut guest = FakeGuest::new(config());
    guest.controller.memory.unmap_all();
    guest.controller.hold_saved(&state).expect("it fits");
    guest.controller.resume_kept(true);
    assert!(guest.controller.awaits_guest(), "there is no memory");
    let all = Protection { read: true, write: true };
    let backing = Some((guest.memory.as_fd(), 0));
    guest.controller.memory.map(GuestAddress(MEMORY_BASE), MEMORY_SIZE, all, backing).expect("mapped");
    guest.controller.resume_kept(true);
    assert!(!guest.controller.awaits_guest());
}

#[test]
fn what_changed_without_a_word_is_told() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(2, 1 << 20, BlockSize::B512);
    // An attachment that was not stored.
    for nsid in [2, 5] {
        guest.controller.note_attached(nsid, true);
    }
    let mut events = sqe(AdminOpcode::SET_FEATURES.0, 0);
    (events.cdw10, events.cdw11) = (FeatureId::ASYNC_EVENT_CONFIGURATION.0.into(), 1 << 8);
    assert!(guest.admin(events).status().is_success());
    guest.submit(0, sqe(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0));
    guest.settle();
    guest.controller.tell_changes();
    assert_eq!(guest.wait(0).dw0 & 7, 2, "a notice");
    assert_eq!(guest.controller.state.logs.changed_namespaces[0].get(), 1 << 2 | 1 << 5);
    assert_eq!([2, 5].map(|nsid| guest.controller.was_attached(nsid)), [true, false]);
}

/// A host registers through a controller.
fn register(namespace: &Namespace, id: [u8; 16], cntlid: u16) -> HostKey {
    let host = HostKey::new(id, false, lasting_number(cntlid));
    let data = RegisterData { crkey: 0, nrkey: 5 };
    let registered = namespace.reservations().change(
        lasting_number(cntlid),
        |_| {},
        |reservations| reservations.register(host, cntlid, RegisterAction::REGISTER, false, &data),
    );
    registered.expect("there is room");
    host
}

/// A host takes the reservation, through controller 7.
fn acquire(namespace: &Namespace, host: HostKey) {
    let (kind, data) = (ReservationType::EXCLUSIVE_ACCESS, AcquireData { crkey: 5, prkey: 0 });
    let acquired = namespace.reservations().change(
        lasting_number(7),
        |_| {},
        |reservations| reservations.acquire(host, AcquireAction::ACQUIRE, kind, &data),
    );
    acquired.expect("nobody holds it");
}

/// A device was deleted while the volume was not there, and its worker ended before the volume came back.
#[test]
fn who_has_the_namespace_no_more_when_it_comes_back_is_not_registered() {
    let mut guest = FakeGuest::boot();
    let namespace = guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let [gone, stays] = [7, 9].map(|cntlid| register(&namespace, [0; 16], cntlid));
    register(&namespace, [8; 16], 8);
    acquire(&namespace, gone);
    let version = namespace.reservation_version();
    namespace.forget_other_controllers(|cntlid| cntlid == 9, &*guest.host);
    assert_eq!(namespace.rights_of(&stays), Rights::ALL, "nobody holds it any more");
    assert_eq!(namespace.reservations().now().report(false)[5], 2, "who has it, and who has an identifier");
    let then = namespace.reservation_version();
    assert_ne!(then, version, "attachments ask again");
    namespace.forget_other_controllers(|cntlid| cntlid == 9, &*guest.host);
    assert_eq!(namespace.reservation_version(), then, "nothing has changed");
}

/// A host without an identifier is its controller; the device that gets its number later is another one.
#[test]
fn a_reservation_goes_with_the_controller_that_its_host_was() {
    let mut guest = FakeGuest::boot();
    let namespace = guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let [gone, stays] = [([0; 16], 7), ([8; 16], 8)].map(|(id, cntlid)| register(&namespace, id, cntlid));
    acquire(&namespace, gone);
    assert_eq!([gone, stays].map(|host| namespace.rights_of(&host)), [Rights::ALL, Rights::NONE]);
    let version = namespace.reservation_version();
    namespace.forget_controller(7, &*guest.host);
    assert_eq!(namespace.rights_of(&stays), Rights::ALL, "nobody holds it any more");
    assert_ne!(namespace.reservation_version(), version, "attachments ask again");
    namespace.forget_controller(8, &*guest.host);
    assert_eq!(namespace.reservations().now().report(false)[5], 1, "who has an identifier stays registered");
}
