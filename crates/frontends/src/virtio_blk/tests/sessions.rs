//! Front ends: what they ask, in any order, and how they leave.

use std::{
    io::Write as _,
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use millrace_backends::{MemoryVolume, NullVolume};
use millrace_block::{Asker, BlockCount, BlockError, BlockSize, IoOperation, Operation, Request, Step, TaskContext, Volume};
use millrace_engine::{Device, Readiness};
use rustix::fs::ftruncate;
use zerocopy::IntoBytes;

use super::super::{
    DeviceError, DevicePhase, Kind,
    config::feature,
    fixture::{FakeDriver, GUEST_BASE, MEMORY, QUEUE, Setup, USER_BASE, Watched, drain},
    message::{ConfigHead, Header, Region, VringState, code, protocol},
    request::kind,
};

fn state(index: u32, num: u32) -> VringState {
    VringState { index, num }
}

fn space(driver: &mut FakeDriver) -> Vec<u8> {
    let head = ConfigHead { offset: 0, size: 60, flags: 0 };
    let answer: [u8; 72] = driver.get(code::GET_CONFIG, &[head.as_bytes(), &[0; 60]].concat());
    answer[12..].to_vec()
}

fn capacity(driver: &mut FakeDriver) -> u64 {
    u64::from_le_bytes(space(driver)[..8].try_into().expect("eight bytes"))
}

#[test]
fn a_resize_is_told_on_the_back_ends_channel() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    assert_eq!(capacity(&mut driver), 64 << 11);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a channel");
    assert_eq!(driver.tell(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]), Some(true));
    millrace_block::Volume::resize(&*driver.volume, millrace_block::BlockCount(96 << 11)).expect("room");
    driver.device(|device, _| device.volume_changed());
    let mut message = [0; 12];
    std::io::Read::read_exact(&mut &ours, &mut message).expect("word of the change");
    assert_eq!(message, Header { request: code::BACKEND_CONFIG_CHANGE, flags: 1, size: 0 }.as_bytes());
    assert_eq!(capacity(&mut driver), 96 << 11);
    assert_eq!(driver.request(kind::IN, (96 << 11) - 1, &[], 512).0, 0);
    // What is no channel takes no channel's place.
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    let memory = driver.memory.try_clone().expect("a descriptor");
    for fd in [null.as_fd(), memory.as_fd()] {
        assert_eq!(driver.tell(code::SET_BACKEND_REQ_FD, &[], &[fd]), Some(false));
    }
    // A channel that nobody reads costs nothing, and is told once there is room.
    for _ in 0..10_000 {
        driver.device(|device, _| device.volume_changed());
    }
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
}

/// QEMU passes over word that comes while its device does not run, and asks by itself only when it is made.
#[test]
fn a_change_while_the_queues_are_stopped_is_told_again_when_they_start() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a channel");
    ours.set_nonblocking(true).expect("a socket");
    assert_eq!(driver.tell(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]), Some(true));
    let is_told = || std::io::Read::read_exact(&mut &ours, &mut [0; 12]).is_ok();
    let stop = |driver: &mut FakeDriver| {
        assert_eq!(driver.tell(code::SET_VRING_ENABLE, state(0, 0).as_bytes(), &[]), Some(true));
        driver.get::<VringState>(code::GET_VRING_BASE, state(0, 0).as_bytes());
    };
    stop(&mut driver);
    driver.resume();
    assert!(!is_told(), "nothing has changed");
    stop(&mut driver);
    driver.volume.resize(BlockCount(96 << 11)).expect("room");
    driver.device(|device, _| device.volume_changed());
    assert_eq!([is_told(), is_told()], [true, false]);
    driver.resume();
    assert_eq!([is_told(), is_told()], [true, false]);
    // QEMU may have stopped again before it looked.
    stop(&mut driver);
    driver.resume();
    assert_eq!([is_told(), is_told()], [true, false]);
    assert_eq!(capacity(&mut driver), 96 << 11);
    stop(&mut driver);
    driver.resume();
    assert!(!is_told(), "it has asked");
}

pub(super) fn blank(block_size: BlockSize) -> Arc<dyn Volume> {
    MemoryVolume::create("other", 64 << 20, block_size).expect("a volume")
}

/// A volume that gives nothing back.
pub(super) fn without_discard() -> Arc<dyn Volume> {
    NullVolume::create("null", 64 << 20, BlockSize::B512).expect("a volume")
}

fn attach(driver: &mut FakeDriver, volume: Arc<dyn Volume>) -> Result<(), DeviceError> {
    driver.device(|device, cx| device.attach(volume, Arc::default(), false, cx))
}

/// A guest reads the block size once, when it starts: whatever is attached later must have it.
#[test]
fn a_disk_without_a_volume_keeps_its_block_size() {
    for (size, other) in [(BlockSize::B4096, BlockSize::B512), (BlockSize::B512, BlockSize::B4096)] {
        let mut driver = FakeDriver::over(Setup::default(), Watched::over(blank(size)));
        driver.connect();
        assert_eq!(space(&mut driver)[20..24], size.bytes().to_le_bytes());
        driver.device(|device, _| device.detach());
        assert_eq!(capacity(&mut driver), 0);
        assert_eq!(space(&mut driver)[20..24], size.bytes().to_le_bytes());
        assert_eq!(driver.request(kind::IN, 0, &[], 4096).0, 1, "it has no blocks");
        assert!(matches!(attach(&mut driver, blank(other)), Err(DeviceError::OtherKind { .. })));
        attach(&mut driver, blank(size)).expect("the kind it had");
        assert_eq!(capacity(&mut driver), 64 << 11);
        assert_eq!(driver.request(kind::OUT, 8, &[7; 4096], 0).0, 0);
        assert_eq!(driver.request(kind::IN, 8, &[], 4096), (0, vec![7; 4096]));
        // The one in place of the other, without a pause.
        assert!(matches!(attach(&mut driver, blank(other)), Err(DeviceError::OtherKind { .. })));
        attach(&mut driver, blank(size)).expect("the kind it has");
    }
}

/// A daemon that comes again to a disk without a volume and knows nothing of it has the guest's record alone.
#[test]
fn a_guest_gets_its_volume_back_after_a_restart_without_it() {
    let mut driver = FakeDriver::over(Setup::default(), Watched::over(blank(BlockSize::B4096)));
    driver.connect();
    driver.device(|device, _| device.detach());
    driver.restart_daemon_with(None, None);
    driver.connect();
    attach(&mut driver, blank(BlockSize::B4096)).expect("nobody was told of another");
    assert_eq!(driver.request(kind::IN, 8, &[], 4096).0, 0);
    // A guest that started on the empty disk was told.
    driver.restart_daemon_with(None, None);
    driver.queues[0].forget();
    driver.wipe_queues();
    driver.inflight = None;
    driver.connect();
    assert_eq!(space(&mut driver)[20..24], 512_u32.to_le_bytes());
    assert!(matches!(attach(&mut driver, blank(BlockSize::B4096)), Err(DeviceError::OtherKind { .. })));
    attach(&mut driver, blank(BlockSize::B512)).expect("what it was told");
}

/// What a guest was told of a disk that never had a volume: the next daemon is not told, nor asked, again.
#[test]
fn a_disk_that_never_had_a_volume_keeps_its_block_size() {
    for told_late in [false, true] {
        let mut driver = FakeDriver::new(Setup::default());
        driver.restart_daemon_with(None, None);
        driver.knows_config = told_late;
        driver.connect();
        if told_late {
            assert_eq!(space(&mut driver)[20..24], 512_u32.to_le_bytes());
        }
        driver.restart_daemon_with(None, None);
        driver.connect();
        assert!(matches!(attach(&mut driver, blank(BlockSize::B4096)), Err(DeviceError::OtherKind { .. })));
        attach(&mut driver, blank(BlockSize::B512)).expect("what it was told");
        assert_eq!(driver.request(kind::IN, 8, &[], 4096).0, 0);
    }
}

/// A disk that shows a volume, and what a guest chose of what it offers.
pub(super) fn disk_of_kind(volume: Arc<dyn Volume>, read_only: bool) -> FakeDriver {
    let not_there = if read_only { feature::DISCARD | feature::WRITE_ZEROES } else { feature::DISCARD };
    let setup = Setup { features: Setup::default().features & !not_there, ..Setup::default() };
    let mut driver = FakeDriver::over(setup, Watched::over(volume));
    show(&mut driver, read_only).expect("nobody is there");
    driver
}

/// Shows the disk's volume, once more.
fn show(driver: &mut FakeDriver, read_only: bool) -> Result<(), DeviceError> {
    let volume = Arc::clone(&driver.volume);
    driver.device(|device, cx| device.attach(volume, Arc::default(), read_only, cx))
}

fn offered(driver: &mut FakeDriver) -> u64 {
    driver.get(code::GET_FEATURES, &[])
}

/// What a front end is offered that comes while there is no volume is what the guest was offered, also by the next daemon.
#[test]
fn a_disk_without_a_volume_offers_what_it_offered() {
    for (volume, read_only, other) in
        [(blank(BlockSize::B4096), true, BlockSize::B512), (without_discard(), false, BlockSize::B4096)]
    {
        let kind = Kind::new(&volume.geometry(), read_only);
        let mut driver = disk_of_kind(volume, read_only);
        driver.connect();
        let before = offered(&mut driver);
        // All but the capacity.
        let told = space(&mut driver)[8..].to_vec();
        assert_eq!((before & feature::RO != 0, before & feature::DISCARD), (read_only, 0));
        driver.device(|device, _| device.detach());
        for restarts in [false, true] {
            driver.stream = None;
            driver.settle();
            if restarts {
                driver.restart_daemon_with(None, Some(kind));
            }
            driver.connect();
            assert_eq!((offered(&mut driver), &space(&mut driver)[8..]), (before, &told[..]), "restarted: {restarts}");
            // It is of no other kind, and its own volume comes back to it.
            assert!(matches!(show(&mut driver, !read_only), Err(DeviceError::OtherKind { .. })));
            assert!(matches!(attach(&mut driver, blank(other)), Err(DeviceError::OtherKind { .. })));
            show(&mut driver, read_only).expect("the kind it was");
            assert_eq!(driver.request(kind::OUT, 8, &[7; 4096], 0).0, u8::from(read_only));
            driver.device(|device, _| device.detach());
        }
        // Without a front end there is nobody to whom it must stay the same, and then it is what it was last.
        driver.stream = None;
        driver.settle();
        attach(&mut driver, blank(BlockSize::B512)).expect("nobody is there");
        driver.device(|device, _| device.detach());
        driver.open();
        assert_eq!(offered(&mut driver) & (feature::RO | feature::DISCARD), feature::DISCARD);
    }
}

/// The first 64 sectors.
fn discard(driver: &mut FakeDriver) -> u8 {
    driver.request(kind::DISCARD, 0, &[0_u64.as_bytes(), 64_u32.as_bytes(), 0_u32.as_bytes()].concat(), 0).0
}

/// A volume may come to a place that gives nothing back while its guest runs: that one goes on with what it was told, whoever connects again.
#[test]
fn a_guest_that_was_told_of_discard_goes_on_where_there_is_none() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    assert_eq!(discard(&mut driver), 0);
    driver.restart_daemon_with(Some(without_discard()), None);
    driver.setup.features &= !feature::DISCARD;
    driver.negotiate();
    assert_eq!(offered(&mut driver) & feature::DISCARD, 0, "none is told of what does nothing");
    assert_eq!(driver.tell(code::SET_FEATURES, Setup::default().features.as_bytes(), &[]), Some(true));
    driver.resume();
    assert_eq!(driver.request(kind::OUT, 8, &[7; 4096], 0).0, 0);
    assert_eq!(driver.request(kind::IN, 8, &[], 4096).0, 0);
    assert_eq!(discard(&mut driver), 0);
    // What cannot be written never had it.
    let mut driver = disk_of_kind(blank(BlockSize::B512), true);
    driver.connect();
    let features = driver.setup.features | feature::DISCARD;
    assert_eq!(driver.tell(code::SET_FEATURES, features.as_bytes(), &[]), Some(false));
}

/// The guest's own volume may have become one that gives nothing back, or one that does.
#[test]
fn a_volume_is_attached_whether_it_gives_space_back_or_not() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    for volume in [without_discard(), blank(BlockSize::B512)] {
        driver.device(|device, _| device.detach());
        attach(&mut driver, volume).expect("the kind it was");
        assert_eq!(driver.request(kind::OUT, 8, &[7; 4096], 0).0, 0);
        assert_eq!(discard(&mut driver), 0);
        // To a front end that asks once more: it is offered less, or more, than its guest was told.
        offered(&mut driver);
    }
}

/// Before a front end has asked: the guest behind it may have.
#[test]
fn a_front_end_that_connects_again_is_taken_for_the_guest_that_was_there() {
    let mut driver = disk_of_kind(blank(BlockSize::B512), true);
    driver.connect();
    driver.device(|device, _| device.detach());
    driver.stream = None;
    driver.settle();
    driver.open();
    driver.until("a connection", |driver| driver.device(|device, _| device.status().connected));
    assert!(matches!(show(&mut driver, false), Err(DeviceError::OtherKind { .. })));
    show(&mut driver, true).expect("the kind it was");
}

#[test]
fn the_write_cache_mode_is_the_guests_and_outlives_the_daemon() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    assert_eq!(space(&mut driver)[32], 1);
    driver.request(kind::OUT, 0, &[1; 512], 0);
    let head = ConfigHead { offset: 32, size: 1, flags: 0 };
    assert_eq!(driver.tell(code::SET_CONFIG, &[head.as_bytes(), &[0]].concat(), &[]), Some(true));
    driver.request(kind::OUT, 0, &[1; 512], 0);
    driver.restart_daemon();
    driver.connect();
    assert_eq!(space(&mut driver)[32], 0);
    driver.request(kind::OUT, 0, &[1; 512], 0);
    let writes: Vec<bool> = driver.volume.take_seen().iter().map(|seen| seen.0 == Operation::Write { fua: true }).collect();
    assert_eq!(writes, [false, true, true]);
    // Nothing else can be written.
    for (offset, byte) in [(0, 1), (32, 2), (33, 0)] {
        let head = ConfigHead { offset, size: 1, flags: 0 };
        assert_eq!(driver.tell(code::SET_CONFIG, &[head.as_bytes(), &[byte]].concat(), &[]), Some(false));
    }
}

/// The guest chooses its write cache mode.
pub(super) fn choose(driver: &mut FakeDriver, write_back: bool) {
    let head = ConfigHead { offset: 32, size: 1, flags: 0 };
    let chosen = driver.tell(code::SET_CONFIG, &[head.as_bytes(), &[write_back.into()]].concat(), &[]);
    assert_eq!(chosen, Some(true));
}

/// Whether the next write is durable when it ends.
pub(super) fn is_durable(driver: &mut FakeDriver) -> bool {
    driver.volume.take_seen();
    driver.request(kind::OUT, 0, &[1; 512], 0);
    driver.volume.take_seen()[0].0 == Operation::Write { fua: true }
}

/// QEMU passes on what a guest writes before its driver is ready, and tells the features only then.
#[test]
fn the_write_cache_mode_is_chosen_before_the_features_are_told() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.open();
    let offered: u64 = driver.get(code::GET_FEATURES, &[]);
    driver.send(code::SET_PROTOCOL_FEATURES, 0, protocol::ALL.as_bytes(), &[]);
    choose(&mut driver, false);
    assert_eq!(space(&mut driver)[32], 0);
    assert_eq!(driver.tell(code::SET_FEATURES, (offered & !feature::CONFIG_WCE).as_bytes(), &[]), Some(true));
    // It did not take the feature after all.
    let head = ConfigHead { offset: 32, size: 1, flags: 0 };
    assert_eq!(driver.tell(code::SET_CONFIG, &[head.as_bytes(), &[1]].concat(), &[]), Some(false));
    assert_eq!(space(&mut driver)[32], 0);
}

/// Its monitor keeps the mode over a reset, and tells it the guest that comes then.
#[test]
fn the_write_cache_mode_outlives_a_reset() {
    for message in [code::RESET_DEVICE, code::SET_STATUS] {
        let mut driver = FakeDriver::new(Setup::default());
        driver.connect();
        choose(&mut driver, false);
        let payload = if message == code::SET_STATUS { 0_u64.as_bytes().to_vec() } else { Vec::new() };
        assert_eq!(driver.tell(message, &payload, &[]), Some(true));
        driver.queues[0].forget();
        driver.wipe_queues();
        driver.inflight = None;
        driver.resume();
        assert!(is_durable(&mut driver));
        // The record that was made after the reset has it, too.
        driver.restart_daemon();
        driver.connect();
        assert!(is_durable(&mut driver));
    }
}

/// Its monitor asks for the mode once. What it, and the guest, know of it then is not to be had after a reset and a restart, nor without a record.
#[test]
fn the_write_cache_mode_is_the_safe_one_where_nobody_can_know_it() {
    for inflight in [true, false] {
        let mut driver = FakeDriver::new(Setup { inflight, ..Setup::default() });
        driver.connect();
        choose(&mut driver, false);
        if inflight {
            assert_eq!(driver.tell(code::RESET_DEVICE, &[], &[]), Some(true));
            driver.queues[0].forget();
            driver.wipe_queues();
            driver.inflight = None;
        }
        driver.restart_daemon();
        driver.connect();
        assert!(is_durable(&mut driver), "with a record: {inflight}");
        choose(&mut driver, true);
        assert!(!is_durable(&mut driver));
    }
}

/// Nobody tells the new disk in what mode the guest is that goes on there.
#[test]
fn the_write_cache_mode_goes_with_a_machine_that_migrates() {
    for setup in [Setup::default(), Setup::packed(), Setup { inflight: false, ..Setup::default() }] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        assert!(!is_durable(&mut driver));
        choose(&mut driver, false);
        let (mut first, mut driver) = driver.migrated();
        driver.connect();
        assert!(is_durable(&mut driver));
        // Back again; the first one's monitor is a new one.
        first.stream = None;
        first.settle();
        let (_second, mut driver) = driver.migrated();
        driver.connect();
        assert!(is_durable(&mut driver));
        // And a guest that chose the other mode since then.
        choose(&mut driver, true);
        let (mut first, mut driver) = driver.migrated();
        driver.connect();
        first.stream = None;
        first.settle();
        assert!(!is_durable(&mut driver));
    }
}

/// A saved machine goes on at its own disk, behind a new monitor, which asks for the configuration. It has used one queue alone.
#[test]
fn the_write_cache_mode_stays_with_a_machine_that_was_saved() {
    for setup in [Setup::default(), Setup::packed()] {
        for (used, is_killed, write_back) in [(0, false, false), (1, false, false), (1, true, false), (1, false, true)] {
            let mut driver = FakeDriver::new(Setup { queues: 2, ..setup });
            driver.connect();
            if !write_back {
                choose(&mut driver, false);
            }
            let (pieces, ..) = driver.prepare(kind::OUT, 0, &[1; 512], 0);
            driver.submit(used, &pieces);
            driver.wait_used(used);
            let stopped = if is_killed { 0 } else { 2 };
            for index in 0..stopped {
                driver.get::<VringState>(code::GET_VRING_BASE, state(index, 0).as_bytes());
            }
            driver.stream = None;
            driver.settle();
            (driver.inflight, driver.knows_config) = (None, false);
            driver.connect();
            assert_eq!(is_durable(&mut driver), !write_back, "packed: {}, queue {used}", setup.packed);
        }
    }
}

/// A ring that has gone round stands where rings begin.
#[test]
fn the_write_cache_mode_goes_with_a_ring_that_has_gone_round() {
    let mut driver = FakeDriver::new(Setup::packed());
    driver.connect();
    choose(&mut driver, false);
    // Two descriptors each: twice around.
    for _ in 0..QUEUE {
        assert_eq!(driver.request(kind::FLUSH, 0, &[], 0).0, 0);
    }
    assert_eq!((driver.queues[0].next, driver.queues[0].wrap), (0, true));
    let (_first, mut driver) = driver.migrated();
    driver.connect();
    assert!(is_durable(&mut driver));
}

/// A guest that begins has the mode that its monitor was told, whatever other disks' guests have.
#[test]
fn the_write_cache_mode_is_taken_from_nobody_by_a_guest_that_begins() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.request(kind::OUT, 0, &[1; 512], 0);
        choose(&mut driver, false);
        let (mut first, mut second) = driver.migrated();
        second.connect();
        // What was the first one's guest's went to the second: another one begins at the first.
        first.stream = None;
        first.settle();
        (first.inflight, first.knows_config) = (None, false);
        first.connect();
        assert_eq!(space(&mut first)[32], 1);
        assert!(!is_durable(&mut first));
        assert!(is_durable(&mut second));
    }
}

/// A driver that cannot flush is not left with data that must be.
#[test]
fn who_cannot_flush_gets_durable_writes() {
    let setup = Setup { features: Setup::default().features & !(1 << 9), ..Setup::default() };
    let mut driver = FakeDriver::new(setup);
    driver.connect();
    driver.request(kind::OUT, 0, &[1; 512], 0);
    assert_eq!(driver.volume.take_seen(), [(Operation::Write { fua: true }, 0, 1, 1)]);
}

/// Closing it would wait until its other side has read all of it, or for an hour.
#[test]
fn a_descriptor_whose_end_waits_is_waited_for_by_no_shard() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("an address");
    let bytes = vec![0; 65_536];
    let lingering = || {
        let mut ours = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let theirs = listener.accept().expect("a connection").0;
        ours.set_nonblocking(true).expect("a socket");
        while ours.write(&bytes).is_ok_and(|written| written > 0) {}
        rustix::net::sockopt::set_socket_linger(&ours, Some(Duration::from_secs(3600))).expect("a socket");
        (ours, theirs)
    };
    let region = Region { guest: 1 << 40, size: 4096, user: 1 << 40, offset: 0 };
    let messages = [
        (code::ADD_MEM_REG, [0_u64.as_bytes(), region.as_bytes()].concat()),
        (code::SET_VRING_CALL, 0_u64.as_bytes().to_vec()),
    ];
    let peers = messages.map(|(message, payload)| {
        let (ours, theirs) = lingering();
        driver.send(message, 8, &payload, &[ours.as_fd()]);
        // The one in the message is the last one.
        drop(ours);
        assert_eq!(driver.answer().expect("an answer").1, 1_u64.as_bytes());
        theirs
    });
    // One that nobody has received when the connection ends, behind a message that ends it.
    let (ours, theirs) = lingering();
    driver.send_raw(&[0xff; 12], &[]);
    driver.send_raw(&[0], &[ours.as_fd()]);
    drop(ours);
    driver.until("the end of the connection", |driver| !driver.device(|device, _| device.status().connected));
    driver.connect();
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
    drop((peers, theirs));
}

/// The memory table changes under requests in flight: the change waits for them, and the queues go on in the new memory.
#[test]
fn a_memory_table_waits_for_what_uses_the_old_one() {
    for one_by_one in [false, true] {
        let mut driver = FakeDriver::new(Setup::default());
        driver.connect();
        driver.volume.hold(true);
        let (pieces, ..) = driver.prepare(kind::OUT, 3, &[7; 512], 0);
        driver.submit(0, &pieces);
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 1);
        let region = FakeDriver::region();
        let memory = driver.memory.try_clone().expect("a descriptor");
        if one_by_one {
            driver.send(code::REM_MEM_REG, 8, &[0_u64.as_bytes(), region.as_bytes()].concat(), &[]);
        } else {
            let table = [1_u32.as_bytes(), 0_u32.as_bytes(), region.as_bytes()].concat();
            driver.send(code::SET_MEM_TABLE, 8, &table, &[memory.as_fd()]);
        }
        for _ in 0..1000 {
            driver.shard.turn();
        }
        assert_eq!(driver.next_used(0), None, "the request still waits");
        driver.volume.hold(false);
        let (header, payload, _) = driver.answer().expect("an answer");
        assert!(header.request == code::SET_MEM_TABLE || one_by_one);
        assert_eq!(payload, 0_u64.as_bytes());
        driver.wait_used(0);
        if one_by_one {
            // Its ring was in the memory that went, and goes on when that comes back; other memory does not do.
            let (pieces, ..) = driver.prepare(kind::IN, 3, &[], 512);
            let offered = driver.submit(0, &pieces);
            let other = Region { guest: 1 << 40, size: 4096, user: 1 << 40, offset: 0 };
            for (region, used) in [(other, None), (region, Some((offered, 513)))] {
                let region = [0_u64.as_bytes(), region.as_bytes()].concat();
                assert_eq!(driver.tell(code::ADD_MEM_REG, &region, &[memory.as_fd()]), Some(true));
                driver.settle();
                assert_eq!(driver.next_used(0), used);
            }
        }
        assert_eq!(driver.request(kind::IN, 3, &[], 512), (0, vec![7; 512]));
    }
}

#[test]
fn a_queue_is_stopped_when_its_requests_have_ended() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.request(kind::OUT, 3, &[7; 512], 0);
        driver.volume.hold(true);
        let (pieces, ..) = driver.prepare(kind::OUT, 3, &[8; 512], 0);
        driver.submit(0, &pieces);
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 1);
        driver.send(code::GET_VRING_BASE, 0, state(0, 0).as_bytes(), &[]);
        for _ in 0..1000 {
            driver.shard.turn();
        }
        // Made available after the stop was asked for: it stays in the queue.
        let (late, ..) = driver.prepare(kind::IN, 3, &[], 512);
        let late = driver.submit(0, &late);
        driver.volume.hold(false);
        let (_, payload, _) = driver.answer().expect("an answer");
        let base = u32::from_le_bytes(payload[4..].try_into().expect("a base"));
        let expected = if setup.packed { 0x8006_8006 } else { 2 };
        assert_eq!(base, expected, "two requests of three descriptors went");
        assert!(driver.next_used(0).is_some());
        driver.settle();
        assert_eq!(driver.next_used(0), None);
        driver.start_queue(0);
        assert_eq!(driver.wait_used(0), (late, 513));
    }
}

#[test]
fn a_queue_is_disabled_when_its_requests_have_ended() {
    for setup in [Setup::default(), Setup::packed()] {
        let mut driver = FakeDriver::new(setup);
        driver.connect();
        driver.volume.hold(true);
        let (pieces, ..) = driver.prepare(kind::OUT, 3, &[8; 512], 0);
        let early = driver.submit(0, &pieces);
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 1);
        driver.send(code::SET_VRING_ENABLE, 8, state(0, 0).as_bytes(), &[]);
        for _ in 0..1000 {
            driver.shard.turn();
        }
        let (late, ..) = driver.prepare(kind::IN, 3, &[], 512);
        let late = driver.submit(0, &late);
        driver.volume.hold(false);
        let (_, payload, _) = driver.answer().expect("an answer");
        assert_eq!(payload, 0_u64.as_bytes());
        assert_eq!(driver.next_used(0), Some((early, 1)), "it has ended when the answer comes");
        driver.settle();
        assert_eq!(driver.next_used(0), None, "nothing new was taken");
        assert_eq!(driver.tell(code::SET_VRING_ENABLE, state(0, 1).as_bytes(), &[]), Some(true));
        assert_eq!(driver.wait_used(0), (late, 513));
    }
}

#[test]
fn settings_of_a_running_queue_and_queues_that_are_not_there_are_refused() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    assert_eq!(driver.tell(code::SET_VRING_NUM, state(0, 8).as_bytes(), &[]), Some(false));
    assert_eq!(driver.tell(code::SET_VRING_BASE, state(0, 8).as_bytes(), &[]), Some(false));
    for message in [code::SET_VRING_NUM, code::SET_VRING_BASE, code::SET_VRING_ENABLE] {
        assert_eq!(driver.tell(message, state(4, 1).as_bytes(), &[]), Some(false));
    }
    for message in [code::SET_VRING_KICK, code::SET_VRING_CALL, code::SET_VRING_ERR] {
        let kick = driver.queues[0].kick.try_clone().expect("a descriptor");
        assert_eq!(driver.tell(message, 200_u64.as_bytes(), &[kick.as_fd()]), Some(false), "no queue 200");
        let memory = driver.memory.try_clone().expect("a descriptor");
        assert_eq!(driver.tell(message, 0_u64.as_bytes(), &[memory.as_fd()]), Some(false), "no eventfd");
    }
    let sizes = [0, 3, 15, 65_536, 1 << 31];
    for size in sizes {
        assert_eq!(driver.tell(code::SET_VRING_NUM, state(1, size).as_bytes(), &[]), Some(true));
        let addr = super::super::message::VringAddr { index: 1, ..driver.queues[0].addr() };
        assert_eq!(driver.tell(code::SET_VRING_ADDR, addr.as_bytes(), &[]), Some(true));
        let kick = driver.queues[0].kick.try_clone().expect("a descriptor");
        assert_eq!(driver.tell(code::SET_VRING_KICK, 1_u64.as_bytes(), &[kick.as_fd()]), Some(false), "{size} entries");
    }
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
    // Enabled twice, kicked twice: as once.
    driver.start_again(0);
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
}

#[test]
fn parts_of_a_queue_outside_memory_or_askew_are_refused() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let good = driver.queues[0].addr();
    let end = USER_BASE + MEMORY;
    for (what, addr) in [
        ("descriptors below", super::super::message::VringAddr { desc: USER_BASE - 16, ..good }),
        ("descriptors over the end", super::super::message::VringAddr { desc: end - 16, ..good }),
        ("used ring outside", super::super::message::VringAddr { used: end, ..good }),
        ("used ring over the end", super::super::message::VringAddr { used: end - 64, ..good }),
        ("used ring askew", super::super::message::VringAddr { used: good.used + 2, ..good }),
        ("available ring askew", super::super::message::VringAddr { avail: good.avail + 1, ..good }),
        ("descriptors at the end of all addresses", super::super::message::VringAddr { desc: u64::MAX - 15, ..good }),
    ] {
        let addr = super::super::message::VringAddr { index: 1, ..addr };
        driver.tell(code::SET_VRING_NUM, state(1, QUEUE.into()).as_bytes(), &[]);
        driver.tell(code::SET_VRING_ADDR, addr.as_bytes(), &[]);
        let kick = driver.queues[0].kick.try_clone().expect("a descriptor");
        assert_eq!(driver.tell(code::SET_VRING_KICK, 1_u64.as_bytes(), &[kick.as_fd()]), Some(false), "{what}");
    }
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
}

#[test]
fn memory_that_is_none_or_overlaps_is_refused() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    let memory = driver.memory.try_clone().expect("a descriptor");
    let fresh = Region { guest: 1 << 40, size: 4096, user: 1 << 40, offset: 0 };
    for (what, region, fd) in [
        ("not memory", fresh, null.as_fd()),
        ("longer than its file", Region { size: MEMORY + 4096, ..fresh }, memory.as_fd()),
        ("no length", Region { size: 0, ..fresh }, memory.as_fd()),
        ("within a page", Region { guest: fresh.guest + 100, ..fresh }, memory.as_fd()),
        ("guest addresses twice", Region { guest: GUEST_BASE, ..fresh }, memory.as_fd()),
        ("user addresses twice", Region { user: USER_BASE + 4096, ..fresh }, memory.as_fd()),
        ("over the end of all addresses", Region { user: u64::MAX - 4095, ..fresh }, memory.as_fd()),
        ("an offset over the end", Region { offset: u64::MAX - 4095, ..fresh }, memory.as_fd()),
    ] {
        let payload = [0_u64.as_bytes(), region.as_bytes()].concat();
        assert_eq!(driver.tell(code::ADD_MEM_REG, &payload, &[fd]), Some(false), "{what}");
    }
    // One may end within a page, and goes as it came.
    let payload = [0_u64.as_bytes(), Region { size: 100, ..fresh }.as_bytes()].concat();
    for _ in 0..2 {
        assert_eq!(driver.tell(code::ADD_MEM_REG, &payload, &[memory.as_fd()]), Some(true));
        assert_eq!(driver.tell(code::REM_MEM_REG, &payload, &[]), Some(true));
    }
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
}

#[test]
fn features_that_were_not_offered_or_not_negotiated_are_refused() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    let features = driver.setup.features;
    assert_eq!(driver.tell(code::SET_FEATURES, (features | 1 << 33).as_bytes(), &[]), Some(false));
    assert_eq!(driver.tell(code::SET_FEATURES, (features | 1 << 34).as_bytes(), &[]), Some(false), "while a queue runs");
    assert_eq!(driver.tell(code::SET_PROTOCOL_FEATURES, (1_u64 << 63).as_bytes(), &[]), Some(false));
    let without = Setup { protocol: protocol::ALL & !protocol::CONFIG, ..driver.setup };
    let mut driver = FakeDriver::new(without);
    driver.connect();
    let head = ConfigHead { offset: 0, size: 8, flags: 0 };
    assert_eq!(driver.tell(code::GET_CONFIG, &[head.as_bytes(), &[0; 8]].concat(), &[]), Some(false));
}

/// A front end that is gone with requests in flight, and one that comes before they have ended.
#[test]
fn a_front_end_that_leaves_makes_room_for_the_next() {
    let mut driver = FakeDriver::new(Setup::default());
    for round in 0..20_u64 {
        driver.queues[0].forget();
        driver.inflight = None;
        driver.wipe_queues();
        driver.connect();
        driver.request(kind::OUT, round, &[round as u8; 512], 0);
        driver.volume.hold(true);
        for sector in 0..4 {
            let (pieces, ..) = driver.prepare(kind::OUT, 100 + sector, &[9; 512], 0);
            driver.submit(0, &pieces);
        }
        driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 4);
        driver.stream = None;
        for _ in 0..100 {
            driver.shard.turn();
        }
        assert!(!driver.device(|device, cx| device.is_idle(cx)));
        driver.volume.hold(false);
        driver.until("idle", |driver| driver.device(|device, cx| device.is_idle(cx) && !device.status().connected));
    }
    assert_eq!(driver.device(|device, _| device.status().phase), DevicePhase::Stopped);
}

/// As behind a throttle that lets nothing through: requests wait until it is opened, or they are called off.
struct Shut {
    inner: Arc<dyn Volume>,
    is_open: AtomicBool,
    /// How often who waits was called off.
    calls: AtomicUsize,
    /// Who waits does not hear of it.
    is_deaf: AtomicBool,
}

impl Volume for Shut {
    millrace_block::passes_on!(inner);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let calls = self.calls.load(Ordering::SeqCst);
        Step::Wait(cx.scratch.place_future(async move {
            while !self.is_open.load(Ordering::SeqCst) {
                if self.calls.load(Ordering::SeqCst) != calls && !self.is_deaf.load(Ordering::SeqCst) {
                    return Err(BlockError::CalledOff);
                }
                // Looks again every so often, so that a test may stop stepping at any time.
                cx.io(IoOperation::Sleep(Duration::from_micros(50))).await;
            }
            self.inner.submit(cx, request).await
        }))
    }

    fn call_off(&self, _: Asker) {
        self.calls.fetch_add(1, Ordering::SeqCst);
    }

    fn scratch_bytes(&self) -> usize {
        1024 + self.inner.scratch_bytes()
    }
}

/// A disk whose five writes, to the sectors from 10 on, are held back: what holds them, and the writes' names and where their statuses will be.
fn held_back(setup: Setup) -> (FakeDriver, Arc<Shut>, Vec<(u16, u64)>) {
    let mut driver = FakeDriver::new(setup);
    driver.connect();
    let [is_open, is_deaf] = [(); 2].map(|()| AtomicBool::new(false));
    let shut = Arc::new(Shut { inner: blank(BlockSize::B512), is_open, calls: AtomicUsize::new(0), is_deaf });
    attach(&mut driver, Arc::clone(&shut) as Arc<dyn Volume>).expect("of the same kind");
    let mut writes = Vec::new();
    for sector in 10..15 {
        let (pieces, _, status) = driver.prepare(kind::OUT, sector, &[sector as u8; 512], 0);
        writes.push((driver.submit(0, &pieces), status));
    }
    driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 5);
    (driver, shut, writes)
}

/// The front end goes, and the next one has room before anything is let through; then these end, once each.
fn leave_and_come_back(driver: &mut FakeDriver, shut: &Shut, writes: Vec<(u16, u64)>) {
    driver.stream = None;
    driver.until("room for the next", |driver| driver.device(|device, cx| device.is_idle(cx) && !device.status().connected));
    assert!(!shut.is_open.load(Ordering::SeqCst));
    shut.is_open.store(true, Ordering::SeqCst);
    driver.connect();
    for (name, status) in writes {
        assert_eq!(driver.wait_used(0), (name, 1));
        assert_eq!(driver.read(status, 1), [0]);
    }
}

/// A front end that is gone keeps nobody waiting at a throttle's pace; and when it is back, what it had asked for is done.
#[test]
fn what_a_front_end_left_held_back_waits_on_record() {
    for setup in [Setup::default(), Setup::packed()] {
        let (mut driver, shut, writes) = held_back(setup);
        leave_and_come_back(&mut driver, &shut, writes);
        assert_eq!(driver.device(|device, _| device.status().counters.errors), 0);
        for sector in 10..15 {
            assert_eq!(driver.request(kind::IN, sector, &[], 512), (0, vec![sector as u8; 512]));
        }
        driver.settle();
        assert_eq!(driver.next_used(0), None, "nothing ends twice");
    }
}

/// A front end is killed while a message of its waits for what is held back: nobody reads its socket then.
#[test]
fn a_front_end_that_is_gone_while_its_message_waits_makes_room() {
    for setup in [Setup::default(), Setup::packed()] {
        let (mut driver, shut, writes) = held_back(setup);
        driver.send(code::GET_VRING_BASE, 0, state(0, 0).as_bytes(), &[]);
        for _ in 0..100 {
            driver.shard.turn();
        }
        assert!(!driver.is_answered());
        assert_eq!(shut.calls.load(Ordering::SeqCst), 0, "it is there");
        let readiness = driver.device(Device::arm);
        assert!(matches!(readiness, Readiness::Until(_)), "its shard must not sleep over it: {readiness:?}");
        driver.device(|device, _| Device::disarm(device));
        leave_and_come_back(&mut driver, &shut, writes);
        driver.settle();
        assert_eq!(driver.next_used(0), None, "nothing ends twice");
    }
}

/// Where what was called off takes its time, it is called off again, for more may have come to wait; but not in every turn.
#[test]
fn what_a_front_end_left_is_called_off_now_and_then() {
    const TURNS: usize = 1000;
    let (mut driver, shut, _) = held_back(Setup::default());
    shut.is_deaf.store(true, Ordering::SeqCst);
    driver.stream = None;
    driver.until("it is called off", |_| shut.calls.load(Ordering::SeqCst) > 0);
    for _ in 0..TURNS {
        driver.shard.turn();
    }
    let calls = shut.calls.load(Ordering::SeqCst);
    assert!(calls < TURNS / 2, "{calls} times");
    driver.until("it is called off again", |_| shut.calls.load(Ordering::SeqCst) > calls);
    shut.is_open.store(true, Ordering::SeqCst);
    driver.until("idle", |driver| driver.device(|device, cx| device.is_idle(cx)));
}

/// A request of many pieces may wait with a later one.
#[test]
fn what_a_deleted_disk_had_taken_is_called_off_now_and_then() {
    let (mut driver, shut, _) = held_back(Setup::default());
    shut.is_deaf.store(true, Ordering::SeqCst);
    driver.device(crate::virtio_blk::VirtioBlkDevice::close);
    let calls = shut.calls.load(Ordering::SeqCst);
    let readiness = driver.device(Device::arm);
    assert!(matches!(readiness, Readiness::Until(_)), "its shard must not sleep over it: {readiness:?}");
    driver.device(|device, _| Device::disarm(device));
    driver.until("it is called off again", |_| shut.calls.load(Ordering::SeqCst) > calls);
    shut.is_deaf.store(false, Ordering::SeqCst);
    driver.until("idle", |driver| driver.device(|device, cx| device.is_idle(cx)));
    assert!(!shut.is_open.load(Ordering::SeqCst), "nothing was let through");
}

/// Nobody would do it again.
#[test]
fn what_is_on_no_record_is_finished() {
    let (mut driver, shut, _) = held_back(Setup { inflight: false, ..Setup::default() });
    driver.stream = None;
    driver.until("the end of the connection", |driver| !driver.device(|device, _| device.status().connected));
    for _ in 0..100 {
        driver.shard.turn();
    }
    assert!(!driver.device(|device, cx| device.is_idle(cx)));
    assert_eq!(shut.calls.load(Ordering::SeqCst), 0);
    shut.is_open.store(true, Ordering::SeqCst);
    driver.until("idle", |driver| driver.device(|device, cx| device.is_idle(cx)));
    assert_eq!((0..5).filter_map(|_| driver.next_used(0)).count(), 5);
}

#[test]
fn garbage_ends_the_connection_and_nothing_else() {
    let mut driver = FakeDriver::new(Setup::default());
    let lies: [(&str, Vec<u8>); 6] = [
        ("another version", [1_u32, 2, 0].as_bytes().to_vec()),
        ("a reply", [1_u32, 5, 0].as_bytes().to_vec()),
        ("a giant", [5_u32, 1, 1 << 30].as_bytes().to_vec()),
        ("an unknown request", [999_u32, 1, 0].as_bytes().to_vec()),
        ("a table of a million regions", [[5_u32, 1, 8].as_bytes(), [1_000_000_u32, 0].as_bytes()].concat()),
        ("a region without its memory", [[5_u32, 1, 40].as_bytes(), [1_u32, 0].as_bytes(), &[0; 32]].concat()),
    ];
    for (what, bytes) in lies {
        driver.open();
        driver.send_raw(&bytes, &[]);
        assert!(driver.answer().is_none(), "{what}");
    }
    // Half a message, and then silence: the next front end waits until this one goes.
    driver.open();
    driver.send_raw(&[1, 0, 0], &[]);
    for _ in 0..100 {
        driver.shard.turn();
    }
    // More descriptors than a message may have, and where none belong.
    driver.open();
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    driver.send_raw(Header { request: code::GET_FEATURES, flags: 1, size: 0 }.as_bytes(), &[null.as_fd(); 12]);
    assert!(driver.answer().is_none());
    driver.connect();
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
}

/// The file of the guest's memory is cut short: the device fails, the connection ends, the process lives.
#[test]
fn memory_that_is_taken_away_costs_the_device_only() {
    let mut driver = FakeDriver::new(Setup::default());
    driver.connect();
    driver.request(kind::IN, 0, &[], 512);
    ftruncate(&driver.memory, 0).expect("truncating");
    driver.kick(0);
    driver.until("the end of the connection", |driver| !driver.device(|device, _| device.status().connected));
    driver.memory.set_len(MEMORY).expect("room for the guest");
    driver.queues[0].forget();
    driver.inflight = None;
    driver.connect();
    assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
}

#[test]
fn a_reset_makes_a_failed_disk_whole() {
    for message in [code::RESET_DEVICE, code::SET_STATUS] {
        let mut driver = FakeDriver::new(Setup::default());
        driver.connect();
        assert_eq!(driver.get::<u64>(code::GET_STATUS, &[]), 0);
        assert_eq!(driver.tell(code::SET_STATUS, 0xf_u64.as_bytes(), &[]), Some(true));
        driver.publish(0, 99);
        driver.until("failure", |driver| driver.device(|device, _| device.status().phase) == DevicePhase::Failed);
        assert_eq!(driver.get::<u64>(code::GET_STATUS, &[]), 0x4f, "it needs a reset");
        assert_eq!(drain(&driver.queues[0].err), 1);
        let payload = if message == code::SET_STATUS { 0_u64.as_bytes().to_vec() } else { Vec::new() };
        assert_eq!(driver.tell(message, &payload, &[]), Some(true));
        assert_eq!(driver.get::<u64>(code::GET_STATUS, &[]), 0);
        driver.queues[0].forget();
        driver.wipe_queues();
        driver.inflight = None;
        driver.resume();
        assert_eq!(driver.request(kind::IN, 0, &[], 512).0, 0);
    }
}
