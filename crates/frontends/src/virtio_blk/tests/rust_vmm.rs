//! The disk and rust-vmm's own front end, in the order in which Cloud Hypervisor and Firecracker speak through it. It waits until all of an
//! answer is there, and takes none that it does not expect.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::{fd::AsRawFd as _, unix::net::UnixStream},
    thread,
};

use millrace_memory::PeerBytes;
use vhost::{
    VhostBackend as _, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend as _, VhostUserProtocolFeatures as Protocol,
        message::{
            VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserHeaderFlag,
            VhostUserInflight,
        },
    },
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    super::{
        config::feature,
        fixture::{FakeDriver, GUEST_BASE, MEMORY, QUEUE, Setup, USED, USER_BASE},
        request::kind,
        ring::feature as ring_feature,
        state::SIZE,
    },
    sessions::is_durable,
};

/// A machine monitor.
struct Monitor {
    front: Frontend,
    /// What it wants of the protocol.
    protocol: Protocol,
    /// What its guest wants of the disk.
    features: u64,
    memory: File,
    ring: VringConfigData,
    kick: EventFd,
    call: EventFd,
    /// The record of requests under way.
    inflight: Option<(VhostUserInflight, File)>,
    /// The disk's state, as it was saved.
    state: Vec<u8>,
}

/// Connects to the disk.
fn front(driver: &mut FakeDriver) -> Frontend {
    driver.open();
    let stream = driver.stream.take().expect("connected");
    stream.set_nonblocking(false).expect("a socket");
    Frontend::from_stream(stream, 1)
}

/// What Cloud Hypervisor wants for a disk.
fn cloud_hypervisor() -> Protocol {
    Protocol::CONFIG
        | Protocol::MQ
        | Protocol::CONFIGURE_MEM_SLOTS
        | Protocol::REPLY_ACK
        | Protocol::INFLIGHT_SHMFD
        | Protocol::LOG_SHMFD
        | Protocol::DEVICE_STATE
}

impl Monitor {
    /// One whose guest is this driver.
    fn connect(driver: &mut FakeDriver, protocol: Protocol) -> Self {
        let addr = driver.queues[0].addr();
        let event = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        Self {
            front: front(driver),
            protocol,
            features: driver.setup.features,
            memory: driver.memory.try_clone().expect("a descriptor"),
            ring: VringConfigData {
                queue_max_size: QUEUE,
                queue_size: QUEUE,
                flags: 0,
                desc_table_addr: addr.desc,
                used_ring_addr: addr.used,
                avail_ring_addr: addr.avail,
                log_addr: None,
            },
            kick: event(),
            call: event(),
            inflight: None,
            state: Vec::new(),
        }
    }

    /// As every connection begins.
    fn begin(&mut self) {
        self.front.set_owner().expect("an owner");
        let offered = self.front.get_features().expect("features");
        assert_eq!(self.features & !offered, 0);
    }

    fn choose_protocol(&mut self) {
        self.front.set_protocol_features(self.protocol).expect("the protocol's features");
        if self.protocol.contains(Protocol::REPLY_ACK) {
            self.front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
    }

    /// When the machine is made: what the disk can do.
    fn look(&mut self) {
        self.begin();
        let offered = self.front.get_protocol_features().expect("the protocol's features");
        assert!(offered.contains(self.protocol));
        self.choose_protocol();
        if self.protocol.contains(Protocol::MQ) {
            assert_eq!(self.front.get_queue_num().expect("queues"), 4);
        }
        assert_eq!(self.space()[..8], (64_u64 << 11).to_le_bytes());
    }

    fn space(&mut self) -> Vec<u8> {
        let (_, space) = self.front.get_config(0, 60, VhostUserConfigFlags::WRITABLE, &[0; 60]).expect("the configuration");
        space
    }

    /// When the guest's driver is ready, or was before: its ring goes on at `base`.
    fn start(&mut self, base: u16) {
        let Self { front, protocol, features, memory, ring, kick, call, inflight, .. } = self;
        front.set_features(*features).expect("features");
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_BASE,
            memory_size: MEMORY,
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: memory.as_raw_fd(),
        };
        front.set_mem_table(&[region]).expect("memory");
        front.set_vring_num(0, QUEUE).expect("a size");
        if protocol.contains(Protocol::INFLIGHT_SHMFD) {
            let (what, file) = inflight.get_or_insert_with(|| {
                let wanted = VhostUserInflight { num_queues: 1, queue_size: QUEUE, ..VhostUserInflight::default() };
                front.get_inflight_fd(&wanted).expect("a record")
            });
            front.set_inflight_fd(what, file.as_raw_fd()).expect("the record");
        }
        front.set_vring_addr(0, ring).expect("a ring");
        front.set_vring_base(0, base).expect("where it goes on");
        front.set_vring_call(0, call).expect("interrupts");
        front.set_vring_kick(0, kick).expect("kicks");
        front.set_vring_enable(0, true).expect("a queue");
    }

    /// When the machine is paused and leaves, or its guest resets the disk. Everything has ended then, up to `base`.
    fn stop(&mut self, base: u16) {
        self.front.set_vring_enable(0, false).expect("a queue");
        assert_eq!(self.front.get_vring_base(0).expect("where it goes on"), u32::from(base));
    }

    /// The channel for the disk's state: the disk has a better one than it is given.
    fn channel(&mut self, direction: VhostTransferStateDirection) -> File {
        let (_ours, theirs) = UnixStream::pair().expect("a channel");
        let given = self.front.set_device_state_fd(direction, VhostTransferStatePhase::STOPPED, theirs.into());
        given.expect("a transfer").expect("a channel of the disk's")
    }

    fn save(&mut self) {
        self.channel(VhostTransferStateDirection::SAVE).read_to_end(&mut self.state).expect("the state");
        assert_eq!(self.state.len(), SIZE);
        self.front.check_device_state().expect("all of it");
    }

    fn load(&mut self) {
        self.channel(VhostTransferStateDirection::LOAD).write_all(&self.state).expect("room for the state");
        self.front.check_device_state().expect("a disk that takes it");
    }
}

/// Has the monitor speak on a thread of its own, while the disk has its turns.
fn speak(driver: &mut FakeDriver, mut monitor: Monitor, words: impl FnOnce(&mut Monitor) + Send + 'static) -> Monitor {
    let speaker = thread::spawn(move || {
        words(&mut monitor);
        monitor
    });
    driver.until("the last answer", |_| speaker.is_finished());
    speaker.join().unwrap_or_else(|_| panic!("the monitor did not hear what it expects"))
}

/// The guest works, and is interrupted.
fn write_and_read(driver: &mut FakeDriver, monitor: &Monitor, sector: u64) {
    assert_eq!(driver.request(kind::OUT, sector, &[7; 512], 0).0, 0);
    assert_eq!(driver.request(kind::IN, sector, &[], 512), (0, vec![7; 512]));
    assert!(monitor.call.read().is_ok_and(|count| count > 0));
}

#[test]
fn cloud_hypervisors_guest_has_its_disk_over_resets_and_restarts() {
    let mut driver = FakeDriver::new(Setup::default());
    let monitor = Monitor::connect(&mut driver, cloud_hypervisor());
    let monitor = speak(&mut driver, monitor, |monitor| {
        monitor.look();
        monitor.start(0);
    });
    write_and_read(&mut driver, &monitor, 3);
    // The guest starts anew.
    let base = driver.queues[0].next;
    let monitor = speak(&mut driver, monitor, move |monitor| {
        monitor.stop(base);
        monitor.inflight = None;
    });
    driver.queues[0].forget();
    driver.wipe_queues();
    let monitor = speak(&mut driver, monitor, |monitor| monitor.start(0));
    write_and_read(&mut driver, &monitor, 4);
    // The daemon dies with a request under way. It connects again at what was offered last.
    driver.volume.hold(true);
    driver.free_all();
    let (pieces, ..) = driver.prepare(kind::OUT, 5, &[8; 512], 0);
    let taken = driver.submit(0, &pieces);
    driver.until("in flight", |driver| driver.device(|device, _| device.status().in_flight) == 1);
    driver.restart_daemon();
    driver.volume.hold(false);
    let base = driver.queues[0].next;
    let monitor = Monitor { front: front(&mut driver), ..monitor };
    let monitor = speak(&mut driver, monitor, move |monitor| {
        monitor.begin();
        monitor.choose_protocol();
        monitor.start(base);
    });
    assert_eq!(driver.wait_used(0), (taken, 1));
    assert_eq!(driver.request(kind::IN, 5, &[], 512), (0, vec![8; 512]));
    write_and_read(&mut driver, &monitor, 6);
}

/// A snapshot: the machine goes on, and another one goes on from it.
#[test]
fn cloud_hypervisors_snapshot_has_the_write_cache_mode() {
    for write_back in [false, true] {
        let mut driver = FakeDriver::new(Setup::default());
        let monitor = Monitor::connect(&mut driver, cloud_hypervisor());
        let monitor = speak(&mut driver, monitor, move |monitor| {
            monitor.look();
            monitor.front.set_config(32, VhostUserConfigFlags::WRITABLE, &[u8::from(write_back)]).expect("a mode");
            monitor.start(0);
        });
        write_and_read(&mut driver, &monitor, 3);
        let base = driver.queues[0].next;
        let monitor = speak(&mut driver, monitor, move |monitor| {
            monitor.stop(base);
            monitor.save();
            monitor.start(base);
        });
        assert_eq!(is_durable(&mut driver), !write_back);
        write_and_read(&mut driver, &monitor, 4);
        // It does not ask for the configuration, which is in its snapshot.
        let mut restored = FakeDriver::new(Setup::default());
        let state = monitor.state;
        let monitor = Monitor { state, ..Monitor::connect(&mut restored, cloud_hypervisor()) };
        let monitor = speak(&mut restored, monitor, |monitor| {
            monitor.begin();
            monitor.choose_protocol();
            monitor.load();
            monitor.start(0);
        });
        assert_eq!(is_durable(&mut restored), !write_back);
        write_and_read(&mut restored, &monitor, 4);
    }
}

/// It waits for as long an answer as its message was.
#[test]
fn cloud_hypervisors_migration_has_its_log() {
    let mut driver = FakeDriver::new(Setup::default());
    let monitor = Monitor::connect(&mut driver, cloud_hypervisor());
    let (log, file) = PeerBytes::create("log", 4096).expect("a log");
    let used = driver.queues[0].base + USED;
    let monitor = speak(&mut driver, monitor, move |monitor| {
        monitor.look();
        monitor.start(0);
        let region = VhostUserDirtyLogRegion { mmap_size: 4096, mmap_offset: 0, mmap_handle: file.as_raw_fd() };
        monitor.front.set_log_base(0, Some(region)).expect("a log");
        monitor.front.set_features(monitor.features | feature::LOG_ALL).expect("logging");
        let ring = VringConfigData { flags: 1, log_addr: Some(used), ..monitor.ring };
        monitor.front.set_vring_addr(0, &ring).expect("a ring that is logged");
    });
    write_and_read(&mut driver, &monitor, 3);
    let pages: [u8; 4096] = log.read_value(0);
    let page = used / 4096;
    assert_eq!(pages[(page / 8) as usize] >> (page % 8) & 1, 1, "the used ring has changed");
}

/// It asks for no answers and keeps no record.
#[test]
fn firecrackers_guest_has_its_disk() {
    let features = feature::VERSION_1 | feature::FLUSH | feature::PROTOCOL_FEATURES | ring_feature::EVENT_IDX;
    let mut driver = FakeDriver::new(Setup { features, ..Setup::default() });
    let monitor = Monitor::connect(&mut driver, Protocol::CONFIG);
    let monitor = speak(&mut driver, monitor, |monitor| {
        monitor.look();
        monitor.start(0);
        // As when it is told that the disk has grown.
        monitor.space();
    });
    write_and_read(&mut driver, &monitor, 3);
    assert!(!is_durable(&mut driver), "its guest flushes");
}
