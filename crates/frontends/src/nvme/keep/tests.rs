//! What the next worker makes of what is left.

use std::{
    io::{IoSlice, Read},
    mem::MaybeUninit,
    os::unix::net::UnixStream,
};

use millrace_backends::MemoryVolume;
use millrace_block::BlockSize;
use millrace_engine::Device;
use millrace_memory::{Access, AccessError, PAGE_SIZE};
use millrace_nvme_spec::{
    features::FeatureId,
    opcode::AdminOpcode,
    reservation::{AcquireAction, AcquireData, RegisterAction, RegisterData, ReservationType},
};
use millrace_vfio_user::Listener;
use rustix::{
    fs::{MemfdFlags, memfd_create},
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg, socketpair,
    },
};
use zerocopy::IntoBytes;

use super::*;
use crate::nvme::{
    Namespace, NvmeDevice,
    cut::at_every_store,
    fixture::{FakeGuest, HostCall, MEMORY_BASE, MEMORY_SIZE, identity, sqe, test_config},
    io::UncorrectableRanges,
    lasting::Lasting,
    registers::Phase,
    reservation::{HostKey, Ledger, Rights},
};

// Of what keeper and worker say to each other: what is looked at here.
const DROP: u32 = 1;
const DROP_ONE: u32 = 2;
const HELD: u32 = 5;
const BEGIN: u32 = 6;

const OWNER: [u8; 16] = [7; 16];

/// The keeper's end of a worker's link.
struct FakeKeeper(UnixStream);

impl FakeKeeper {
    /// The link of a worker that takes over from one that left this.
    fn holding(held: &[(Key, BorrowedFd<'_>)]) -> (Arc<Link>, Self) {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.expect("a socket");
        let keeper = Self(UnixStream::from(theirs));
        for (key, fd) in held {
            keeper.say(HELD, *key, &[*fd]);
        }
        keeper.say(BEGIN, Key::of_daemon(Kind(0)), &[]);
        let link = Link::begin(ours, &[]).expect("a link");
        keeper.0.set_nonblocking(true).expect("a socket");
        (Arc::new(link), keeper)
    }

    fn say(&self, what: u32, key: Key, fds: &[BorrowedFd<'_>]) {
        let message = [[what, key.kind.0, key.slot, 1].as_bytes(), &key.owner, &[0; 32]].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        sendmsg(&self.0, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).expect("sent");
    }

    /// What it was told since the last call, and of which slots.
    fn take_told(&mut self) -> Vec<(u32, u32)> {
        let (mut told, mut message) = (Vec::new(), [0; 64]);
        while self.0.read(&mut message).is_ok_and(|read| read > 0) {
            let word = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().expect("four bytes"));
            told.push((word(0), word(8)));
        }
        told
    }
}

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

/// An enabled controller that was restored and waits for its memory.
fn restored() -> FakeGuest {
    let config = || Config { migration: true, ..test_config() };
    let mut source = FakeGuest::new(config());
    source.enable();
    let state = source.controller.save();
    let mut guest = FakeGuest::new(config());
    guest.controller.memory.unmap_all();
    guest.controller.hold_saved(&state).expect("it fits");
    guest
}

/// A worker may end when the last of a restored machine's memory is there, and before the device goes on.
#[test]
fn a_restored_state_goes_on_when_its_memory_is_there_already() {
    let mut guest = restored();
    guest.controller.resume_kept(true);
    assert!(guest.controller.awaits_guest(), "there is no memory");
    let all = Protection { read: true, write: true };
    let backing = Some((guest.memory.as_fd(), 0));
    guest.controller.memory.map(GuestAddress(MEMORY_BASE), MEMORY_SIZE, all, backing).expect("mapped");
    guest.controller.resume_kept(true);
    assert!(!guest.controller.awaits_guest());
}

/// A worker ends while a restored state waits for its guest. The next one cannot bring a namespace back at first that this guest has, and
/// attaches one that its configuration has and the one before did not: that guest has not detached it.
#[test]
fn a_restored_state_waits_for_its_namespaces() {
    let mut before = restored();
    before.controller.note_attached(3, true);
    let Controller { state, records, doorbells, .. } = &before.controller;
    let regions = [(Kind::STATE, state.as_fd()), (Kind::RECORDS, records.as_fd()), (Kind::DOORBELLS, doorbells.as_fd())];
    let (link, _keeper) = FakeKeeper::holding(&regions.map(|(kind, fd)| (Key::of(OWNER, kind), fd)));
    let (kept, dir) = (Kept::new(link, OWNER), tempfile::tempdir().expect("a directory"));
    let host = Arc::clone(&before.host) as Arc<dyn Host>;
    let made = before.shard.add_device_with(|cx| {
        let listener = Listener::bind(&dir.path().join("disk")).expect("a socket");
        let device = NvmeDevice::kept(Config { migration: true, ..test_config() }, listener, host, &kept, cx);
        device.map(|device| Box::new(device) as Box<dyn Device>)
    });
    let [third, fourth, fifth] = [3, 4, 5].map(|nsid| {
        let volume = MemoryVolume::create(&format!("volume-{nsid}"), 1 << 20, BlockSize::B512).expect("a volume");
        Namespace::new(volume, identity(nsid), false)
    });
    before.host.take_calls();
    let told = before.shard.with_device(made.expect("a device"), |device: &mut NvmeDevice, cx| {
        let missed = device.misses(&[3, 4]);
        for (nsid, namespace) in [(3, third), (4, fourth)] {
            device.restore_attached(nsid, namespace, false).expect("a free identifier");
        }
        device.attach(Some(5), fifth, false).expect("a free identifier");
        device.resume(cx);
        let shown: Vec<_> = device.status().namespaces.iter().map(|shown| (shown.nsid, shown.attached)).collect();
        (missed, device.misses(&[3, 4]), shown)
    });
    let shown = vec![(3, true), (4, false), (5, true)];
    assert_eq!(told, Some((Some(vec![3]), None, shown)), "as the state has them, and not before they are there");
    assert_eq!(before.host.take_calls(), [HostCall::AttachmentChanged { nsid: 4, attached: false }]);
}

/// Its machine leaves before the state that an operator restored goes on, and the worker ends meanwhile. The next one would take a state
/// without a client for one whose machine is still to come.
#[test]
fn a_restored_state_goes_before_its_client() {
    let mut guest = restored();
    let (link, mut keeper) = FakeKeeper::holding(&[]);
    let kept = Kept::new(link, OWNER);
    let client = Client::begin(&kept, guest.memory.as_fd()).expect("a client");
    guest.controller.kept = Some(kept);
    guest.controller.remember(&client);
    keeper.take_told();
    let drops = Rc::new(std::cell::Cell::new(0));
    let counted = Rc::clone(&drops);
    at_every_store(Some(Box::new(move || {
        let found = keeper.take_told().iter().filter(|(what, _)| *what == DROP).count();
        counted.set(counted.get() + found);
    })));
    guest.controller.forget_client();
    assert_eq!(drops.get(), 0, "before every store the client is there");
    guest.controller.state.survival.busy.set(0);
    assert_eq!(drops.get(), 1, "and after them it is not");
    at_every_store(None);
    assert!(!guest.controller.awaits_guest());
    guest.controller.resume_kept(false);
    assert_eq!(guest.controller.phase, Phase::Disabled, "whoever goes on from here begins at power-on");
}

/// A worker ended after a region of the client's had gone, and before it let go of its file: the next one in that place has none.
#[test]
fn a_file_of_a_region_that_has_gone_is_no_other_regions() {
    let file = memfd_create("left", MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, PAGE_SIZE).expect("room");
    let key = |slot| Key { owner: OWNER, kind: Kind::MEMORY, slot };
    let (link, mut keeper) = FakeKeeper::holding(&[0, 1, 9].map(|slot| (key(slot), file.as_fd())));
    let state = Shared::new("millrace-client").expect("a state");
    let client = Client { kept: Kept::new(link, OWNER), state, replies: std::cell::Cell::new(0) };
    let all = Protection { read: true, write: true };
    client.add_region(MEMORY_BASE, PAGE_SIZE, all, None);
    client.add_region(MEMORY_BASE + PAGE_SIZE, PAGE_SIZE, all, Some((&file, 0)));
    keeper.take_told();
    let mut memory = GuestMemory::new();
    client.map_regions(&mut memory, None).expect("mapped");
    let reach = |address| memory.translate(GuestAddress(address), 8, Access::Write);
    assert!(matches!(reach(MEMORY_BASE), Err(AccessError::NoDescriptor(_))));
    assert!(reach(MEMORY_BASE + PAGE_SIZE).is_ok());
    assert_eq!(keeper.take_told(), [(DROP_ONE, 0), (DROP_ONE, 9)], "nobody has them any more");
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

/// An older version let it register; from now on nobody could release what is held.
#[test]
fn what_was_reserved_of_a_guests_own_namespace_is_forgotten() {
    let lasting = Lasting::alone();
    let file = lasting.file().try_clone_to_owned().expect("a descriptor");
    let over = |shared, ledger| {
        let volume = MemoryVolume::create("own", 1 << 20, BlockSize::B512).expect("a volume");
        Namespace::over(volume, identity(1), shared, ledger, UncorrectableRanges::default())
    };
    let namespace = over(true, Ledger::over(lasting));
    let holder = register(&namespace, [8; 16], 7);
    acquire(&namespace, holder);
    let stranger = HostKey::new([9; 16], false, 1);
    // The last one: it is adopted by its operator.
    for (shared, rights) in [(true, Rights::NONE), (false, Rights::ALL), (true, Rights::ALL)] {
        let left = Lasting::over(file.try_clone().expect("a descriptor"));
        assert_eq!(over(shared, Ledger::over(left)).rights_of(&stranger), rights, "shared: {shared}");
    }
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
