//! The device on a running shard, with real clients on its socket.

use std::{
    fs::File,
    io::Write,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use millrace_backends::MemoryVolume;
use millrace_block::{Asker, BlockError, BlockSize, IoOperation, Request, Step, TaskContext, Volume};
use millrace_engine::{Device as _, DeviceKey, Engine, ShardConfig};
use millrace_memory::{GuestAddress, Protection};
use millrace_nvme_spec::{
    AdminOpcode, Cqe, NvmOpcode, Sqe,
    admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11},
    command::{CommandId, DataPointer, QueueId},
    registers::offset,
    reservation::{RegisterAction, RegisterData},
    status::Status,
};
use millrace_vfio_user::{Client, DmaMap, DmaUnmap, Errno, Mapping, RegionFlags, pci};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use zerocopy::{FromBytes, IntoBytes};

use super::*;
use crate::nvme::{
    Namespace, StorageFunctions,
    fixture::{FakeGuest, HeldVolume, Line, MEMORY_BASE, MEMORY_SIZE, TestHost, identity, sqe, test_card, test_config},
    pci::{BAR0_SIZE, BAR4_SIZE},
};

/// Longer than anything takes.
const PATIENCE: Duration = Duration::from_secs(30);
const BASE: u64 = 0x10_0000;
const SIZE: u64 = 1 << 20;
const ENTRIES: u32 = 16;

// ---- the daemon's side ----------------------------------------------------------------------------------------------

/// A shard with devices, as the daemon has it.
struct Daemon {
    engine: Engine,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        let engine = Engine::start(vec![ShardConfig::new(0, None)]).expect("a shard");
        Self { engine, dir: tempfile::tempdir().expect("a directory") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn add(&self, config: Config) -> DeviceKey {
        let path = self.path(&config.name);
        let make = move |cx: &mut ShardContext<'_>| {
            let listener = Listener::bind(&path).expect("a socket");
            let device = NvmeDevice::new(config, listener, Arc::new(TestHost::default()), cx)?;
            Ok::<Box<dyn millrace_engine::Device>, DeviceError>(Box::new(device))
        };
        let added = self.engine.shards()[0].call_wait(move |shard| shard.add_device_with(make));
        added.expect("an answer").expect("a device")
    }

    fn with<R: Send + 'static>(
        &self,
        key: DeviceKey,
        call: impl FnOnce(&mut NvmeDevice, &mut ShardContext<'_>) -> R + Send + 'static,
    ) -> R {
        let answer = self.engine.shards()[0].call_wait(move |shard| shard.with_device(key, call));
        answer.expect("an answer").expect("a device that works")
    }

    fn status(&self, key: DeviceKey) -> DeviceStatus {
        self.with(key, |device, _| device.status())
    }

    /// Waits for a state of the device.
    fn until(&self, key: DeviceKey, what: &str, done: impl Fn(&DeviceStatus) -> bool) -> DeviceStatus {
        let limit = Instant::now() + PATIENCE;
        loop {
            let status = self.status(key);
            if done(&status) {
                return status;
            }
            assert!(Instant::now() < limit, "waited in vain for {what}: {status:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Attaches a volume whose requests can be held.
    fn attach_held(&self, key: DeviceKey) -> Arc<HeldVolume> {
        let volume = HeldVolume::new(MemoryVolume::create("held", 1 << 20, BlockSize::B512).expect("a volume"));
        let namespace = Namespace::new(Arc::clone(&volume) as Arc<dyn Volume>, identity(1), false);
        self.with(key, move |device, _| device.attach(None, namespace, false)).expect("attached");
        volume
    }
}

/// A volume whose requests wait until they are called off, as at a throttle that lets nothing through.
struct Shut {
    inner: Arc<MemoryVolume>,
    waiting: AtomicUsize,
    called_off: AtomicBool,
}

impl Volume for Shut {
    millrace_block::passes_on!(inner);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, _: Request<'a>) -> Step<'a> {
        Step::Wait(cx.scratch.place_future(async move {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            while !self.called_off.load(Ordering::SeqCst) {
                cx.io(IoOperation::Sleep(Duration::from_micros(50))).await;
            }
            Err(BlockError::CalledOff)
        }))
    }

    fn call_off(&self, _: Asker) {
        self.called_off.store(true, Ordering::SeqCst);
    }

    fn scratch_bytes(&self) -> usize {
        1024 + self.inner.scratch_bytes()
    }
}

/// A guest with its queues, and a volume that can be held.
fn with_queues(mode: DoorbellMode) -> (Daemon, DeviceKey, Arc<HeldVolume>, Guest) {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", mode));
    let volume = daemon.attach_held(key);
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    guest.create_queues();
    (daemon, key, volume, guest)
}

/// DMA_UNMAP of [`SIZE`] bytes, without a reply.
fn unmap_message(address: u64) -> Vec<u8> {
    let mut message = [7_u16, 3].map(u16::to_le_bytes).concat();
    message.extend([40_u32, 0x10, 0, 24, 0].map(u32::to_le_bytes).concat());
    message.extend([address, SIZE].map(u64::to_le_bytes).concat());
    message
}

fn config(name: &str, doorbells: DoorbellMode) -> Config {
    Config { name: name.to_owned(), doorbells, ..test_config() }
}

// ---- the guest's side -----------------------------------------------------------------------------------------------

/// A guest on the other end of the socket, with one admin and one I/O queue.
struct Guest {
    client: Client,
    memory: File,
    /// The doorbells' file, where they are shared.
    doorbells: Option<(File, u64)>,
    tails: [u32; 2],
    heads: [u32; 2],
}

impl Guest {
    fn connect(path: &std::path::Path) -> Self {
        let mut client = Client::connect(path, PATIENCE).expect("a connection");
        let memory = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"));
        memory.set_len(2 * SIZE).expect("room");
        let map = Mapping { address: BASE, size: SIZE, offset: 0, readable: true, writable: true };
        client.dma_map(&map, Some(memory.as_fd())).expect("mapped");
        let region = client.region_info(pci::REGION_BAR0).expect("BAR0");
        let doorbells = region.fd.map(|fd| (File::from(fd), region.offset + region.areas[0].offset));
        Self { client, memory, doorbells, tails: [0; 2], heads: [0; 2] }
    }

    fn read32(&mut self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.client.region_read(pci::REGION_BAR0, at, &mut bytes).expect("a register");
        u32::from_le_bytes(bytes)
    }

    fn write32(&mut self, at: u64, value: u32) {
        self.client.region_write(pci::REGION_BAR0, at, &value.to_le_bytes()).expect("a register");
    }

    fn enable(&mut self) {
        self.write32(offset::AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1));
        self.client.region_write(pci::REGION_BAR0, offset::ASQ, &BASE.to_le_bytes()).expect("ASQ");
        self.client.region_write(pci::REGION_BAR0, offset::ACQ, &(BASE + 0x1000).to_le_bytes()).expect("ACQ");
        self.write32(offset::CC, 4 << 20 | 6 << 16 | 1);
        assert_eq!(self.read32(offset::CSTS), 1);
    }

    fn create_queues(&mut self) {
        let size = CreateQueueCdw10::new().with_qid(QueueId(1)).with_qsize_z(ENTRIES as u16 - 1).into_bits();
        let cq = CreateCqCdw11::new().with_pc(true).with_ien(true).with_iv(1).into_bits();
        let sq = CreateSqCdw11::new().with_pc(true).with_cqid(QueueId(1)).into_bits();
        for (opcode, base, cdw11) in
            [(AdminOpcode::CREATE_IO_CQ, BASE + 0x3000, cq), (AdminOpcode::CREATE_IO_SQ, BASE + 0x2000, sq)]
        {
            let mut create = sqe(opcode.0, 0);
            (create.dptr, create.cdw10, create.cdw11) = (DataPointer::prps(base, 0), size, cdw11);
            self.submit(0, create);
            assert!(self.wait(0).status().is_success());
        }
    }

    fn ring(&mut self, index: u64, value: u32) {
        match &self.doorbells {
            Some((file, at)) => file.write_all_at(value.as_bytes(), at + index * 4).expect("the doorbell page"),
            None => self.write32(offset::DOORBELLS + index * 4, value),
        }
    }

    fn submit(&mut self, qid: usize, mut sqe: Sqe) {
        let tail = &mut self.tails[qid];
        sqe.cid = CommandId(*tail as u16);
        let at = qid as u64 * 0x2000 + u64::from(*tail) * 64;
        *tail = (*tail + 1) % ENTRIES;
        let value = *tail;
        self.memory.write_all_at(sqe.as_bytes(), at).expect("guest memory");
        self.ring(qid as u64 * 2, value);
    }

    fn poll(&mut self, qid: usize) -> Option<Cqe> {
        let head = self.heads[qid];
        let mut bytes = [0; 16];
        let at = qid as u64 * 0x2000 + 0x1000 + u64::from(head % ENTRIES) * 16;
        self.memory.read_exact_at(&mut bytes, at).expect("guest memory");
        let cqe = Cqe::read_from_bytes(&bytes).expect("16 bytes");
        if cqe.phase() != (head / ENTRIES).is_multiple_of(2) {
            return None;
        }
        self.heads[qid] += 1;
        self.ring(qid as u64 * 2 + 1, (head + 1) % ENTRIES);
        Some(cqe)
    }

    fn wait(&mut self, qid: usize) -> Cqe {
        let limit = Instant::now() + PATIENCE;
        loop {
            if let Some(cqe) = self.poll(qid) {
                return cqe;
            }
            assert!(Instant::now() < limit, "no completion");
            thread::sleep(Duration::from_micros(20));
        }
    }

    fn flush(&mut self) -> Cqe {
        self.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
        self.wait(1)
    }

    /// A second region, next to the first.
    fn map_more(&mut self) {
        let map = Mapping { address: BASE + SIZE, size: SIZE, offset: SIZE, readable: true, writable: true };
        self.client.dma_map(&map, Some(self.memory.as_fd())).expect("mapped");
    }
}

fn wait_readable(fd: &OwnedFd) {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let timeout = Timespec { tv_sec: 30, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(1), "the eventfd is signalled");
}

const MODES: [DoorbellMode; 2] = [DoorbellMode::Shared, DoorbellMode::Messages];

// ---- tests ----------------------------------------------------------------------------------------------------------

#[test]
fn a_client_finds_the_function_and_shares_the_doorbells_only_when_told() {
    let daemon = Daemon::start();
    for (name, mode) in [("shared", DoorbellMode::Shared), ("messages", DoorbellMode::Messages)] {
        daemon.add(config(name, mode));
        let mut client = Client::connect(&daemon.path(name), PATIENCE).expect("a connection");
        let info = client.device_info().expect("info");
        assert_eq!((info.reset, info.regions, info.irqs), (true, 9, 5));
        let sizes: Vec<u64> = (0..9).map(|index| client.region_info(index).expect("a region").size).collect();
        assert_eq!(sizes, [0x2000, 0, 0, 0, 0x4000, 0, 0, 4096, 0]);
        let bar0 = client.region_info(pci::REGION_BAR0).expect("BAR0");
        assert!(bar0.flags.contains(RegionFlags::READ_WRITE));
        assert_eq!(bar0.fd.is_some(), mode == DoorbellMode::Shared);
        let areas: Vec<(u64, u64)> = bar0.areas.iter().map(|area| (area.offset, area.size)).collect();
        assert_eq!(areas, if bar0.fd.is_some() { vec![(0x1000, 0x1000)] } else { vec![] });
        let counts: Vec<u32> = (0..5).map(|index| client.irq_info(index).expect("a type").count).collect();
        assert_eq!(counts, [1, 0, 9, 1, 1]);
        let mut ids = [0; 4];
        client.region_read(pci::REGION_CONFIG, 0, &mut ids).expect("configuration space");
        assert_eq!(ids, *b"RM\x01\x00");
    }
}

/// What Cloud Hypervisor asks of a device, by its own client, which waits forever for more than a refusal has.
#[test]
fn cloud_hypervisors_client_is_never_refused() {
    const EVENTFD: u32 = 0x24;
    const NONE: u32 = 0x21;
    const UNMASK: u32 = 0x11;
    let daemon = Daemon::start();
    daemon.add(config("disk", DoorbellMode::Shared));
    let mut client = vfio_user::Client::new(&daemon.path("disk")).expect("a connection");
    let doorbells = client.region(pci::REGION_BAR0).expect("BAR0");
    assert!(doorbells.file_offset.is_some() && doorbells.sparse_areas.len() == 1);
    // Its guest may look everywhere.
    for (region, size) in [(pci::REGION_CONFIG, 4096), (pci::REGION_BAR0, BAR0_SIZE), (pci::REGION_BAR0 + 4, BAR4_SIZE)] {
        assert_eq!(client.region(region).expect("a region").size, size);
        let mut word = [0xff; 4];
        for at in (0..size).step_by(4) {
            client.region_read(region, at, &mut word).expect("four bytes");
        }
        assert_eq!(word, [0; 4], "the last word of region {region}");
    }
    // BARs that do not exist are measured as well.
    for bar in 0..6 {
        client.region_write(pci::REGION_CONFIG, 0x10 + 4 * bar, &[0xff; 4]).expect("a BAR");
    }
    let wires: Vec<OwnedFd> = (0..9).map(|_| eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")).collect();
    let wires: Vec<i32> = wires.iter().map(AsRawFd::as_raw_fd).collect();
    assert_eq!(client.get_irq_info(pci::IRQ_INTX).expect("a type").count, 1);
    client.set_irqs(pci::IRQ_INTX, EVENTFD, 0, 1, &wires[..1]).expect("a line");
    client.set_irqs(pci::IRQ_INTX, UNMASK, 0, 1, &[]).expect("unmasked");
    client.set_irqs(pci::IRQ_INTX, NONE, 0, 0, &[]).expect("no line");
    client.set_irqs(pci::IRQ_MSIX, EVENTFD, 0, 9, &wires).expect("vectors");
    let memory = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"));
    memory.set_len(SIZE).expect("memory");
    client.dma_map(0, BASE, SIZE, memory.as_raw_fd()).expect("mapped");
    client.dma_unmap(BASE, SIZE).expect("unmapped");
    client.reset().expect("a reset");
    client.set_irqs(pci::IRQ_MSIX, NONE, 0, 0, &[]).expect("no vectors");
    client.shutdown().expect("the end");
}

#[test]
fn commands_and_interrupts_flow_by_shared_doorbells_and_by_messages() {
    for mode in MODES {
        let daemon = Daemon::start();
        let key = daemon.add(config("disk", mode));
        daemon.attach_held(key);
        let mut guest = Guest::connect(&daemon.path("disk"));
        assert_eq!(guest.doorbells.is_some(), mode == DoorbellMode::Shared);
        let wire = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        guest.client.set_irq_eventfds(pci::IRQ_MSIX, 1, &[wire.as_fd()]).expect("wired");
        guest.enable();
        guest.create_queues();
        for _ in 0..50 {
            guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
            wait_readable(&wire);
            rustix::io::read(&wire, &mut [0; 8]).expect("a count");
            assert!(guest.wait(1).status().is_success());
        }
        let status = daemon.status(key);
        assert_eq!((status.connected, status.phase, status.queues), (true, DevicePhase::Ready, 1));
        assert_eq!((status.in_flight, status.memory_regions, status.memory_bytes), (0, 1, SIZE));
        assert!(status.counters.interrupts >= 50);
    }
}

/// A guest that keeps its doorbells in memory, as Linux does, and rings only when our event index asks for it; the device sleeps
/// in between. A lost wake-up would end the test by its patience.
#[test]
fn shadow_doorbells_and_sleep_lose_no_wakeup() {
    const SHADOW: u64 = 0x8000;
    const EVENTS: u64 = 0x9000;
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Messages));
    daemon.attach_held(key);
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    let mut configure = sqe(AdminOpcode::DOORBELL_BUFFER_CONFIG.0, 0);
    configure.dptr = DataPointer::prps(BASE + SHADOW, BASE + EVENTS);
    guest.submit(0, configure);
    assert!(guest.wait(0).status().is_success());
    guest.create_queues();
    let read = |memory: &File, at: u64| {
        let mut word = [0; 4];
        memory.read_exact_at(&mut word, at).expect("guest memory");
        u32::from_le_bytes(word)
    };
    let mut rings = 0;
    // A doorbell's store and its event index, of SQ 1 (8) and CQ 1 (12).
    let mut store = |guest: &mut Guest, at: u64, old: u32, new: u32| {
        guest.memory.write_all_at(new.as_bytes(), SHADOW + at).expect("guest memory");
        // The guest's side of the race (shadow.rs).
        std::sync::atomic::fence(Ordering::SeqCst);
        let event = read(&guest.memory, EVENTS + at);
        if (new.wrapping_sub(event).wrapping_sub(1) & 0xffff) < (new.wrapping_sub(old) & 0xffff) {
            guest.write32(offset::DOORBELLS + at, new);
            rings += 1;
        }
    };
    for round in 0_u32..5000 {
        let (slot, next) = (round % ENTRIES, (round + 1) % ENTRIES);
        let mut flush = sqe(NvmOpcode::FLUSH.0, 1);
        flush.cid = CommandId(slot as u16);
        guest.memory.write_all_at(flush.as_bytes(), 0x2000 + u64::from(slot) * 64).expect("guest memory");
        // Pauses of all lengths around that after which the device goes to sleep.
        for _ in 0..round * 7 % 900 {
            std::hint::spin_loop();
        }
        store(&mut guest, 8, slot, next);
        let limit = Instant::now() + PATIENCE;
        let done = 0x3000 + u64::from(slot) * 16 + 12;
        while (read(&guest.memory, done) >> 16 & 1 == 1) != (round / ENTRIES).is_multiple_of(2) {
            assert!(Instant::now() < limit, "round {round}: no completion after {rings} rings");
            std::hint::spin_loop();
        }
        store(&mut guest, 12, slot, next);
    }
}

#[test]
fn a_client_that_leaves_at_any_moment_makes_room_for_the_next() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    daemon.attach_held(key);
    for stage in (0..5).cycle().take(20) {
        let mut guest = Guest::connect(&daemon.path("disk"));
        assert_eq!((guest.read32(offset::CSTS), guest.read32(offset::CC)), (0, 0), "as after power-on");
        if stage > 0 {
            guest.enable();
        }
        if stage > 1 {
            guest.create_queues();
        }
        if stage > 2 {
            guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
        }
        if stage > 3 {
            assert!(guest.wait(1).status().is_success());
        }
    }
    let status = daemon.until(key, "the last to be gone", |status| !status.connected);
    assert_eq!((status.phase, status.memory_regions, status.in_flight), (DevicePhase::Disabled, 0, 0));
}

#[test]
fn doorbells_that_the_last_client_kept_ring_for_nobody() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    let mut last = Guest::connect(&daemon.path("disk"));
    let (stale, at) = last.doorbells.take().expect("shared doorbells");
    drop(last);
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    stale.write_all_at(9_u32.as_bytes(), at).expect("its page is still there");
    guest.submit(0, sqe(AdminOpcode::ABORT.0, 0));
    assert!(guest.wait(0).status().is_success());
    let head = daemon.with(key, |device, _| device.controller.sq(0).head.get());
    assert_eq!(head, 1, "one command, not nine");
}

#[test]
fn a_second_client_is_turned_away_and_the_first_goes_on() {
    let (daemon, _, _, mut guest) = with_queues(DoorbellMode::Messages);
    for _ in 0..100 {
        assert!(Client::connect(&daemon.path("disk"), PATIENCE).is_err());
    }
    assert!(guest.flush().status().is_success());
}

#[test]
fn unmap_waits_for_commands_in_flight_and_keeps_nobody_else_waiting() {
    for mode in MODES {
        let daemon = Daemon::start();
        let (key, other) = (daemon.add(config("disk", mode)), daemon.add(config("other", mode)));
        let (volume, _) = (daemon.attach_held(key), daemon.attach_held(other));
        let mut guest = Guest::connect(&daemon.path("disk"));
        guest.enable();
        guest.create_queues();
        guest.map_more();
        volume.hold();
        guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
        daemon.until(key, "the flush", |status| status.in_flight == 1 && volume.waiting() == 1);
        thread::scope(|scope| {
            scope.spawn(|| {
                daemon.until(key, "the unmap to wait", |_| daemon.with(key, |device, _| device.controller.lifecycle.paused));
                // The other device's guest goes through its whole life meanwhile.
                let mut neighbour = Guest::connect(&daemon.path("other"));
                neighbour.enable();
                neighbour.create_queues();
                assert!(neighbour.flush().status().is_success());
                let status = daemon.status(key);
                assert_eq!((status.memory_regions, status.in_flight), (2, 1));
                volume.release();
            });
            let unmap = DmaUnmap::Range { address: BASE + SIZE, size: SIZE };
            guest.client.dma_unmap(unmap).expect("unmapped");
        });
        assert_eq!(daemon.status(key).memory_regions, 1);
        assert!(guest.wait(1).status().is_success(), "the command that was waited for is completed");
        assert!(guest.flush().status().is_success(), "commands are taken again");
    }
}

/// The guest's reset, which would end them all, cannot come before the unmap is answered.
#[test]
fn an_unmap_has_what_only_waits_for_its_turn_called_off() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    let inner = MemoryVolume::create("inner", 1 << 20, BlockSize::B512).expect("a volume");
    let volume = Arc::new(Shut { inner, waiting: AtomicUsize::new(0), called_off: AtomicBool::new(false) });
    let namespace = Namespace::new(Arc::clone(&volume) as Arc<dyn Volume>, identity(1), false);
    daemon.with(key, move |device, _| device.attach(None, namespace, false)).expect("attached");
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    guest.create_queues();
    guest.map_more();
    guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
    daemon.until(key, "the flush", |_| volume.waiting.load(Ordering::SeqCst) == 1);
    guest.client.dma_unmap(DmaUnmap::Range { address: BASE + SIZE, size: SIZE }).expect("unmapped");
    let status = guest.wait(1).status();
    assert_eq!((status.code(), status.dnr()), (Status::NAMESPACE_NOT_READY, false), "the guest may try again");
    let status = daemon.status(key);
    assert_eq!((status.phase, status.memory_regions, status.in_flight), (DevicePhase::Ready, 1, 0));
    assert!(!guest.flush().status().is_success(), "commands are taken again");
}

/// A worker that takes over without a client resets its device before it has namespaces.
#[test]
fn a_namespace_that_was_away_when_its_controller_was_reset_has_nothing_of_its_host() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    let volume = MemoryVolume::create("volume", 1 << 20, BlockSize::B512).expect("a volume");
    let namespace = Namespace::new(volume, identity(1), true);
    let of_before = Arc::clone(&namespace);
    daemon.with(key, move |device, _| {
        let (host, data) = (device.controller.host_key(), RegisterData { crkey: 0, nrkey: 5 });
        let registered = of_before.reservations().change(
            1,
            |_| {},
            |reservations| reservations.register(host, 1, RegisterAction::REGISTER, false, &data),
        );
        registered.expect("there is room");
        device.attach(None, of_before, false).expect("attached");
    });
    assert_eq!(namespace.reservations().now().report(false)[5], 0, "registrants");
}

/// It was detached, or its volume missing, while its guest started anew.
#[test]
fn a_namespace_that_comes_to_an_enabled_controller_has_nothing_of_its_host_before_a_reset() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    let volume = MemoryVolume::create("volume", 1 << 20, BlockSize::B512).expect("a volume");
    let namespace = Namespace::new(volume, identity(1), true);
    let left = daemon.with(key, move |device, _| {
        assert!(device.controller.cc().en() && device.controller.lifecycle.was_reset);
        let (host, data) = (device.controller.host_key(), RegisterData { crkey: 0, nrkey: 5 });
        // After a takeover without a reset the guest is the host that it was.
        [true, false].map(|was_reset| {
            device.controller.lifecycle.was_reset = was_reset;
            let registered = namespace.reservations().change(
                1,
                |_| {},
                |reservations| reservations.register(host, 1, RegisterAction::REGISTER, false, &data),
            );
            registered.expect("there is room");
            let nsid = device.attach(None, Arc::clone(&namespace), false).expect("attached");
            device.detach(nsid).expect("detached");
            namespace.reservations().now().report(false)[5]
        })
    });
    assert_eq!(left, [0, 1], "registrants");
}

/// What waits in the engine of a card, too. (The simulated one's time goes too slowly for a cap that outlasts an unmap's patience.)
#[cfg(not(feature = "sim"))]
#[test]
fn an_unmap_has_what_waits_for_a_cap_called_off() {
    let daemon = Daemon::start();
    let functions = StorageFunctions { iops: Some(2), ..StorageFunctions::default() };
    let key = daemon.add(Config { card: Some(test_card(1)), functions, ..config("disk", DoorbellMode::Shared) });
    let volume = MemoryVolume::create("volume", 1 << 20, BlockSize::B512).expect("a volume");
    let namespace = Namespace::new(volume, identity(1), false);
    daemon.with(key, move |device, _| device.attach(None, namespace, false)).expect("attached");
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    guest.create_queues();
    guest.map_more();
    let mut read = sqe(NvmOpcode::READ.0, 1);
    read.dptr = DataPointer::prps(BASE + 0x8000, 0);
    (1..ENTRIES).for_each(|_| guest.submit(1, read));
    assert!(guest.wait(1).status().is_success(), "the first does not wait");
    guest.client.dma_unmap(DmaUnmap::Range { address: BASE + SIZE, size: SIZE }).expect("unmapped");
    let ends: Vec<Status> = (2..ENTRIES).map(|_| guest.wait(1).status()).collect();
    let is_off = |status: &Status| (status.code(), status.dnr()) == (Status::INTERNAL_ERROR, false);
    assert!(ends.iter().any(is_off) && ends.iter().all(|status| status.is_success() || is_off(status)), "{ends:?}");
    let status = daemon.status(key);
    assert_eq!((status.phase, status.memory_regions), (DevicePhase::Ready, 1));
    guest.submit(1, read);
    assert!(guest.wait(1).status().is_success(), "the volume is there again");
}

/// A client that splits a region sends the unmap and the maps in one go, however many they are.
#[test]
fn no_command_is_taken_between_an_unmap_and_what_was_sent_behind_it() {
    let (daemon, key, _, mut guest) = with_queues(DoorbellMode::Shared);
    guest.map_more();
    guest.memory.write_all_at(sqe(NvmOpcode::FLUSH.0, 1).as_bytes(), 0x2000).expect("guest memory");
    guest.tails[1] = 1;
    // Those after the first find nothing to do.
    let messages = unmap_message(BASE + SIZE).repeat(MESSAGES + 8);
    let socket = guest.client.as_fd().try_clone_to_owned().expect("a descriptor");
    let (page, at) = guest.doorbells.as_ref().expect("shared doorbells");
    let (page, at) = (page.try_clone().expect("a descriptor"), at + 8);
    let (regions, head) = daemon.with(key, move |device, cx| {
        assert_eq!(rustix::io::write(&socket, &messages), Ok(messages.len()));
        page.write_all_at(&1_u32.to_le_bytes(), at).expect("the doorbell page");
        device.event(cx, CLIENT);
        let regions = device.controller.memory.regions().count();
        // The turn, then the messages that are left.
        device.poll(cx);
        (regions, device.controller.sq(1).head.get())
    });
    assert_eq!((regions, head), (1, 0));
    assert!(guest.wait(1).status().is_success());
}

/// QEMU sends each part of a changed memory map as a message of its own: the socket may be empty in between.
#[test]
fn no_command_is_taken_between_an_unmap_and_maps_that_are_not_sent_yet() {
    let (daemon, key, _, mut guest) = with_queues(DoorbellMode::Shared);
    guest.memory.write_all_at(sqe(NvmOpcode::FLUSH.0, 1).as_bytes(), 0x2000).expect("guest memory");
    guest.tails[1] = 1;
    // The memory that the queues are in.
    let unmap = unmap_message(BASE);
    let socket = guest.client.as_fd().try_clone_to_owned().expect("a descriptor");
    let memory = guest.memory.try_clone().expect("a descriptor");
    let (page, at) = guest.doorbells.as_ref().expect("shared doorbells");
    let (page, at) = (page.try_clone().expect("a descriptor"), at + 8);
    let seen = daemon.with(key, move |device, cx| {
        assert_eq!(rustix::io::write(&socket, &unmap), Ok(unmap.len()));
        page.write_all_at(&1_u32.to_le_bytes(), at).expect("the doorbell page");
        device.event(cx, CLIENT);
        let regions = device.controller.memory.regions().count();
        // The shard's time stands still within a call.
        device.poll(cx);
        device.poll(cx);
        let all = Protection { read: true, write: true };
        let mapped = device.controller.memory.map(GuestAddress(BASE), SIZE, all, Some((memory.as_fd(), 0)));
        mapped.expect("mapped again");
        (regions, device.controller.sq(1).head.get(), device.status().phase)
    });
    assert_eq!(seen, (0, 0, DevicePhase::Ready));
    assert!(guest.wait(1).status().is_success(), "it is taken once the memory is there");
}

/// As virtio-mem does, or a vIOMMU: for seconds, and longer.
#[test]
fn commands_are_taken_while_memory_goes_and_comes_without_a_pause() {
    let (_daemon, _, _, mut guest) = with_queues(DoorbellMode::Shared);
    guest.map_more();
    let (limit, mut submitted, mut ended) = (Instant::now() + PATIENCE, 0, 0);
    // Many: a thread that is stopped for a moment now and then makes a pause, too.
    while ended < 300 {
        assert!(Instant::now() < limit, "{ended} commands have ended");
        guest.client.dma_unmap(DmaUnmap::Range { address: BASE + SIZE, size: SIZE }).expect("unmapped");
        if submitted == ended {
            guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
            submitted += 1;
        }
        guest.map_more();
        if let Some(cqe) = guest.poll(1) {
            assert!(cqe.status().is_success());
            ended += 1;
        }
    }
}

/// What comes to a throttle late: its machine has gone by then.
#[test]
fn what_a_killed_guest_left_is_called_off_whenever_its_turn_comes() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    let line = Line::new(MemoryVolume::create("inner", 1 << 20, BlockSize::B512).expect("a volume"));
    line.shut(true);
    let namespace = Namespace::new(Arc::clone(&line) as Arc<dyn Volume>, identity(1), false);
    daemon.with(key, move |device, _| device.attach(None, namespace, false)).expect("attached");
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    guest.create_queues();
    guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
    daemon.until(key, "the flush", |status| status.in_flight == 1);
    drop(guest);
    daemon.until(key, "its end", |status| !status.connected);
    assert_eq!(daemon.status(key).in_flight, 1);
    line.shut(false);
    daemon.until(key, "the command's end", |status| status.in_flight == 0);
    Guest::connect(&daemon.path("disk")).enable();
}

#[test]
fn regions_are_unmapped_as_a_whole_and_several_at_once() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    let mut guest = Guest::connect(&daemon.path("disk"));
    for (address, size) in [(BASE, SIZE / 2), (BASE + 0x1000, 0x1000), (0, BASE + 0x1000)] {
        let error = guest.client.dma_unmap(DmaUnmap::Range { address, size }).expect_err("part of a region");
        assert_eq!(error.refused(), Some(Errno::INVAL));
    }
    guest.client.dma_unmap(DmaUnmap::Range { address: 0, size: BASE }).expect("there is nothing");
    guest.map_more();
    assert_eq!(daemon.status(key).memory_regions, 2);
    guest.client.dma_unmap(DmaUnmap::Range { address: 0, size: BASE + 4 * SIZE }).expect("both");
    assert_eq!(daemon.status(key).memory_regions, 0);
    guest.map_more();
    let map = Mapping { address: BASE, size: SIZE, offset: 0, readable: true, writable: true };
    guest.client.dma_map(&map, Some(guest.memory.as_fd())).expect("mapped");
    let overlap = Mapping { address: BASE + 0x1000, size: 0x1000, offset: 0, readable: true, writable: true };
    let error = guest.client.dma_map(&overlap, Some(guest.memory.as_fd())).expect_err("overlap");
    assert_eq!(error.refused(), Some(Errno::EXIST));
    let short = Mapping { address: 4 * BASE, size: 4 * SIZE, offset: 0, readable: true, writable: true };
    let error = guest.client.dma_map(&short, Some(guest.memory.as_fd())).expect_err("a short file");
    assert_eq!(error.refused(), Some(Errno::INVAL));
    guest.client.dma_unmap(DmaUnmap::All).expect("everything");
    assert_eq!(daemon.status(key).memory_regions, 0);
}

/// A memory file may be as long as it likes: its addresses here are others', too.
#[test]
fn a_program_maps_less_than_a_guest_and_no_client_all_there_is() {
    let daemon = Daemon::start();
    daemon.add(config("disk", DoorbellMode::Shared));
    let session = daemon.add(Config { session: true, ..config("session", DoorbellMode::Shared) });
    for (name, most, regions) in [("disk", 32_u64 << 40, 100_u64), ("session", 2 << 40, 64)] {
        let mut guest = Guest::connect(&daemon.path(name));
        let mut map = |address, size, file: &File| {
            let map = Mapping { address, size, offset: 0, readable: true, writable: true };
            guest.client.dma_map(&map, Some(file.as_fd())).map_err(|error| error.refused())
        };
        let file = File::from(rustix::fs::memfd_create("sparse", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"));
        file.set_len(1 << 47).expect("a length");
        for size in [1 << 46, most] {
            assert_eq!(map(1 << 47, size, &file), Err(Some(Errno::NOSPC)), "{name}: {size:#x}, beside what it has");
        }
        // It has one already.
        for region in 1..regions {
            assert_eq!(map(1 << 32 | region << 12, 4096, &file), Ok(()), "{name}: {region}");
        }
        let more = if name == "session" { Err(Some(Errno::NOSPC)) } else { Ok(()) };
        assert_eq!(map(1 << 40, 4096, &file), more, "{name}");
    }
    // The next client is a program, too.
    daemon.until(session, "the client's end", |status| !status.connected && status.memory_regions == 0);
    let mut next = Guest::connect(&daemon.path("session"));
    next.map_more();
    let most = daemon.with(session, |device, _| device.controller.memory.room());
    assert_eq!(most, 64);
}

/// A device whose guest has a flush in flight that the volume holds.
fn with_a_flush_in_flight(mode: DoorbellMode) -> (Daemon, DeviceKey, Arc<HeldVolume>, Guest) {
    let (daemon, key, volume, mut guest) = with_queues(mode);
    volume.hold();
    guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
    daemon.until(key, "the flush", |_| volume.waiting() == 1);
    (daemon, key, volume, guest)
}

#[test]
fn a_clients_reset_is_answered_when_nothing_is_in_flight() {
    let (daemon, key, volume, mut guest) = with_a_flush_in_flight(DoorbellMode::Shared);
    thread::scope(|scope| {
        scope.spawn(|| {
            let status = daemon.until(key, "the reset", |status| status.phase == DevicePhase::Resetting);
            assert_eq!(status.in_flight, 1);
            volume.release();
        });
        guest.client.reset().expect("reset");
    });
    let status = daemon.status(key);
    assert_eq!((status.phase, status.in_flight, status.memory_regions), (DevicePhase::Disabled, 0, 1));
    assert_eq!(guest.read32(offset::CSTS), 0);
    guest.client.reset().expect("again, with nothing to do");
}

#[test]
fn a_killed_guests_commands_drain_before_the_next_guest_is_served() {
    let (daemon, key, volume, guest) = with_a_flush_in_flight(DoorbellMode::Shared);
    drop(guest);
    let status = daemon.until(key, "the disconnect", |status| !status.connected);
    assert_eq!((status.phase, status.memory_regions), (DevicePhase::Resetting, 0));
    let mut guest = thread::scope(|scope| {
        scope.spawn(|| {
            // The backlog takes the next one; it is not served while memory of the last guest may be in use.
            thread::sleep(Duration::from_millis(20));
            assert!(!daemon.status(key).connected);
            volume.release();
        });
        Guest::connect(&daemon.path("disk"))
    });
    guest.enable();
    guest.create_queues();
    assert!(guest.flush().status().is_success());
}

#[test]
fn garbage_on_the_socket_costs_its_sender_only() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    let mut state = 7_u32;
    for round in 0..50 {
        let mut stream = UnixStream::connect(daemon.path("disk")).expect("a connection");
        let mut garbage = vec![0; 1 + round * 13];
        for byte in &mut garbage {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        // The device may hang up before everything is written.
        let _ = stream.write_all(&garbage);
    }
    daemon.until(key, "the last to be gone", |status| !status.connected);
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
}

#[test]
fn a_guest_that_truncates_its_memory_fails_its_own_device_only() {
    let daemon = Daemon::start();
    let (key, other) = (daemon.add(config("disk", DoorbellMode::Shared)), daemon.add(config("other", DoorbellMode::Shared)));
    daemon.attach_held(other);
    let mut guest = Guest::connect(&daemon.path("disk"));
    let mut neighbour = Guest::connect(&daemon.path("other"));
    neighbour.enable();
    neighbour.create_queues();
    guest.enable();
    guest.memory.set_len(0).expect("truncated");
    guest.ring(0, 1);
    daemon.until(key, "fatal status", |status| status.phase == DevicePhase::Failed);
    assert_eq!(guest.read32(offset::CSTS), 3);
    assert!(neighbour.flush().status().is_success());
    // The next client's memory is its own.
    drop(guest);
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    guest.submit(0, sqe(AdminOpcode::ABORT.0, 0));
    assert!(guest.wait(0).status().is_success());
    assert_eq!(daemon.status(key).phase, DevicePhase::Ready);
}

#[test]
fn namespaces_come_and_go_by_the_operators_word() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    let volume = daemon.attach_held(key);
    let another = |number| {
        Namespace::new(MemoryVolume::create("other", 1 << 20, BlockSize::B4096).expect("a volume"), identity(number), false)
    };
    let (second, third, fourth) = (another(2), another(3), another(4));
    daemon.with(key, move |device, _| {
        assert_eq!(device.attach(None, second, true).expect("the next free"), 2);
        assert!(matches!(device.attach(Some(2), third, false), Err(DeviceError::Nsid { nsid: 2, largest: 64, .. })));
        assert!(matches!(device.attach(Some(65), Arc::clone(&fourth), false), Err(DeviceError::Nsid { nsid: 65, .. })));
        assert!(matches!(device.detach(3), Err(DeviceError::Missing { nsid: 3, .. })));
        device.restore(5, fourth, false).expect("restored");
    });
    let expected = |nsid, volume: &str, attached, read_only, by_guest| NamespaceStatus {
        nsid,
        volume: volume.to_owned(),
        attached,
        read_only,
        by_guest,
        in_flight: 0,
        finished: 0,
    };
    let namespaces = [
        expected(1, "held", true, false, false),
        expected(2, "other", true, true, false),
        expected(5, "other", false, false, true),
    ];
    assert_eq!(daemon.status(key).namespaces, namespaces);
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    guest.create_queues();
    volume.hold();
    guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
    daemon.until(key, "the flush", |_| volume.waiting() == 1);
    daemon.with(key, |device, _| device.detach(1)).expect("detached");
    assert!(!daemon.with(key, |device, _| device.is_detached(1)), "a command is in flight");
    assert!(!guest.flush().status().is_success(), "new commands do not find it");
    volume.release();
    assert!(guest.wait(1).status().is_success(), "the one in flight finishes");
    assert!(daemon.with(key, |device, _| device.is_detached(1)));
}

#[test]
fn a_waiting_device_says_what_its_guest_misses_and_tells_it_what_it_lost() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    daemon.with(key, |device, _| {
        device.controller.note_attached(2, true);
        assert_eq!(device.misses(&[1, 2]), None, "it does not wait");
        device.waits = true;
        assert_eq!(device.misses(&[1, 2]), Some(vec![2]), "the guest had detached the other one, or never had it");
        device.give_up(1);
        device.give_up(2);
        assert_eq!(device.misses(&[1, 2]), Some(vec![]));
        assert_eq!(device.controller.state.logs.changed_namespaces[0].get(), 1 << 2);
    });
    // A guest that is gone waits for nothing.
    drop(guest);
    let limit = Instant::now() + PATIENCE;
    while daemon.with(key, |device, _| device.misses(&[])).is_some() {
        assert!(Instant::now() < limit, "waited in vain for the guest's end");
    }
    daemon.with(key, NvmeDevice::resume);
    daemon.until(key, "nobody", |status| !status.connected);
}

#[test]
fn a_first_volume_has_to_fit_the_replicas_that_are_there() {
    let daemon = Daemon::start();
    let functions = StorageFunctions { replicate: true, ..StorageFunctions::default() };
    let key = daemon.add(Config { card: Some(test_card(2)), functions, ..config("disk", DoorbellMode::Shared) });
    let volume = |name: &str, bytes: u64, block_size| {
        Namespace::new(MemoryVolume::create(name, bytes, block_size).expect("a volume"), identity(1), false)
    };
    let replica = volume("second", 1 << 20, BlockSize::B512);
    let good = volume("good", 1 << 20, BlockSize::B512);
    let bad = [
        (volume("larger", 2 << 20, BlockSize::B512), "it is smaller"),
        (volume("coarse", 1 << 20, BlockSize::B4096), "its blocks have another size"),
    ];
    daemon.with(key, move |device, _| {
        assert_eq!(device.attach(Some(2), replica, false).expect("nothing is to be compared with"), 2);
        for (first, why) in bad {
            let error = device.attach(Some(1), first, false).expect_err(why).to_string();
            assert!(error.contains("second") && error.contains(why), "{error}");
        }
        assert_eq!(device.attach(Some(1), good, false).expect("it fits"), 1);
    });
}

/// The worker before this one may have ended between a change of the operator's and the notice of it.
#[test]
fn a_device_that_takes_over_tells_its_guest_to_look_again() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    daemon.attach_held(key);
    let told = daemon.with(key, |device, cx| {
        let told = |device: &NvmeDevice| device.controller.state.logs.changed_namespaces[0].replace(0);
        told(device);
        // An attachment that was not stored.
        device.controller.note_attached(5, true);
        [true, false].map(|waits| {
            device.waits = waits;
            device.resume(cx);
            told(device)
        })
    });
    assert_eq!(told, [1 << 1 | 1 << 5, 0]);
    // Without a guest nobody has seen it; it is not to be there for the next one, either.
    let namespace =
        Namespace::new(MemoryVolume::create("own", 1 << 20, BlockSize::B512).expect("a volume"), identity(6), false);
    let attached = daemon.with(key, move |device, _| {
        device.controller.note_attached(6, true);
        device.restore(6, namespace, false).expect("a free identifier");
        device.controller.was_attached(6)
    });
    assert!(!attached);
}

/// Its worker has ended when the last of the machine's memory was mapped, and before it answered.
#[test]
fn a_restored_state_goes_on_though_its_last_map_comes_twice() {
    let config = || Config { migration: true, ..test_config() };
    let mut source = FakeGuest::new(config());
    source.enable();
    let state = source.controller.save();
    let mut guest = FakeGuest::new(config());
    guest.controller.hold_saved(&state).expect("it fits");
    let map = DmaMap { address: MEMORY_BASE, size: MEMORY_SIZE, offset: 0, readable: true, writable: true, fd: None };
    let (mut waiting, mut log) = (None, LogLimit::default());
    let mut function = Function { controller: &mut guest.controller, waiting: &mut waiting, log: &mut log, again: true };
    assert_eq!(millrace_vfio_user::Device::dma_map(&mut function, map), Ok(()));
    assert!(!guest.controller.awaits_guest());
}

/// The device has done more since it was saved.
#[test]
fn a_restored_states_commands_are_not_counted_once_more() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    daemon.attach_held(key);
    let counted = |commands: u64| {
        let limit = Instant::now() + PATIENCE;
        while daemon.engine.shards()[0].stats().commands != commands {
            assert!(Instant::now() < limit, "{commands} commands: {:?}", daemon.engine.shards()[0].stats());
            thread::sleep(Duration::from_millis(1));
        }
    };
    let mut guest = Guest::connect(&daemon.path("disk"));
    guest.enable();
    guest.create_queues();
    assert!(guest.flush().status().is_success());
    let state = daemon.with(key, |device, _| device.save_state()).expect("nothing is in flight");
    let (tails, heads) = (guest.tails, guest.heads);
    for _ in 0..3 {
        assert!(guest.flush().status().is_success());
    }
    counted(4);
    drop(guest);
    daemon.until(key, "the guest's end", |status| !status.connected);
    daemon.with(key, move |device, _| device.restore_state(&state)).expect("nobody is connected");
    let mut guest = Guest::connect(&daemon.path("disk"));
    (guest.tails, guest.heads) = (tails, heads);
    assert!(guest.flush().status().is_success());
    counted(5);
}

#[test]
fn a_device_on_an_engine_is_neither_saved_nor_restored() {
    let daemon = Daemon::start();
    let key = daemon.add(Config { card: Some(test_card(1)), ..config("disk", DoorbellMode::Shared) });
    assert_eq!(daemon.with(key, |device, _| device.restore_state(&[])), Err(SavedStateError::Engine));
    let mut client = Client::connect(&daemon.path("disk"), PATIENCE).expect("a connection");
    client.device_info().expect("a device");
    assert_eq!(daemon.with(key, |device, _| device.save_state()), Err(SavedStateError::Engine));
}

#[test]
fn a_device_sleeps_as_deeply_as_its_guest_allows() {
    let daemon = Daemon::start();
    let readiness = |key| {
        daemon.with(key, |device, cx| {
            let readiness = device.arm(cx);
            device.disarm();
            readiness
        })
    };
    let (shared, messages) =
        (daemon.add(config("shared", DoorbellMode::Shared)), daemon.add(config("messages", DoorbellMode::Messages)));
    daemon.attach_held(messages);
    assert_eq!((readiness(shared), readiness(messages)), (Readiness::Block, Readiness::Block), "without a guest");
    let mut guest = Guest::connect(&daemon.path("shared"));
    assert_eq!(readiness(shared), Readiness::Block, "not enabled");
    guest.enable();
    assert_eq!(readiness(shared), Readiness::Nap, "only looking finds a doorbell");
    let mut guest = Guest::connect(&daemon.path("messages"));
    let wire = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    guest.client.set_irq_eventfds(pci::IRQ_MSIX, 1, &[wire.as_fd()]).expect("wired");
    guest.enable();
    guest.create_queues();
    assert_eq!(readiness(messages), Readiness::Block, "doorbells come as messages");
    // A coalesced interrupt that is due later than this test looks.
    daemon.with(messages, |device, _| device.controller.state.features.interrupt_coalescing.set(255 << 8 | 255));
    guest.submit(1, sqe(NvmOpcode::FLUSH.0, 1));
    daemon.with(messages, |device, cx| {
        device.poll(cx);
        let until = device.controller.interrupts.next_deadline();
        assert_eq!(Some(device.arm(cx)), until.map(Readiness::Until));
        device.disarm();
    });
    assert!(guest.wait(1).status().is_success());
    wait_readable(&wire);
}

/// A job on a namespace that waits for commands, or for a task slot, may have nothing that wakes its device.
#[test]
fn a_device_with_a_job_that_waits_is_looked_at() {
    let (daemon, key, volume, mut guest) = with_a_flush_in_flight(DoorbellMode::Messages);
    guest.submit(0, sqe(AdminOpcode::FORMAT_NVM.0, 1));
    daemon.until(key, "the format", |status| status.in_flight == 2);
    let readiness = daemon.with(key, |device, cx| {
        let readiness = device.arm(cx);
        let looks = device.may_have_work();
        device.disarm();
        (readiness, looks)
    });
    assert_eq!(readiness, (Readiness::Nap, true));
    volume.release();
    assert!(guest.wait(1).status().is_success());
    assert!(guest.wait(0).status().is_success());
}

/// A device that is looked at in turn with others: what a look says before and after every doorbell.
#[test]
fn a_look_at_an_armed_device_finds_every_doorbell() {
    let daemon = Daemon::start();
    let key = daemon.add(config("disk", DoorbellMode::Shared));
    daemon.attach_held(key);
    let mut guest = Guest::connect(&daemon.path("disk"));
    let wire = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    guest.client.set_irq_eventfds(pci::IRQ_MSIX, 1, &[wire.as_fd()]).expect("wired");
    guest.enable();
    guest.create_queues();
    // An armed device's answers before and after a doorbell, and after the turn that it leads to.
    let look = |guest: &mut Guest, qid: usize, mut sqe: Sqe| {
        let tail = guest.tails[qid];
        sqe.cid = CommandId(tail as u16);
        guest.tails[qid] = (tail + 1) % ENTRIES;
        guest.memory.write_all_at(sqe.as_bytes(), qid as u64 * 0x2000 + u64::from(tail) * 64).expect("guest memory");
        let (page, at) = guest.doorbells.as_ref().expect("shared doorbells");
        let (page, at) = (page.try_clone().expect("a descriptor"), at + qid as u64 * 8);
        let answers = daemon.with(key, move |device, cx| {
            let mut ask = |cx: &mut ShardContext<'_>, ring: bool| {
                let readiness = device.arm(cx);
                if ring {
                    page.write_all_at(&(tail + 1).to_le_bytes(), at).expect("the doorbell page");
                }
                let found = device.may_have_work();
                device.disarm();
                device.poll(cx);
                (readiness, found)
            };
            ask(cx, false);
            [ask(cx, false), ask(cx, true), ask(cx, false)]
        });
        guest.wait(qid);
        answers
    };
    let told = [false, true, false].map(|found| (Readiness::Nap, found));
    assert_eq!(look(&mut guest, 0, sqe(AdminOpcode::KEEP_ALIVE.0, 0)), told);
    assert_eq!(look(&mut guest, 1, sqe(NvmOpcode::FLUSH.0, 1)), told);
    // A coalesced interrupt that is due later: it has its time, and no doorbell.
    daemon.with(key, |device, _| device.controller.state.features.interrupt_coalescing.set(255 << 8 | 255));
    let answers = look(&mut guest, 1, sqe(NvmOpcode::FLUSH.0, 1));
    assert_eq!(answers, [false, true, true].map(|found| (Readiness::Nap, found)));
    wait_readable(&wire);
}

#[test]
fn a_closed_device_lets_nobody_in_and_can_be_removed_when_idle() {
    let (daemon, key, volume, mut guest) = with_a_flush_in_flight(DoorbellMode::Shared);
    daemon.with(key, NvmeDevice::close);
    assert!(!daemon.with(key, |device, _| device.is_idle()));
    assert!(guest.client.device_info().is_err(), "the client was let go");
    volume.release();
    daemon.until(key, "idleness", |_| daemon.with(key, |device, _| device.is_idle()));
    daemon.engine.shards()[0].call_wait(move |shard| shard.remove_device(key).is_some()).expect("removed");
    assert!(!daemon.path("disk").exists(), "the socket went with it");
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let daemon = Daemon::start();
    let refused = |change: fn(&mut Config)| {
        let mut config = config("bad", DoorbellMode::Shared);
        change(&mut config);
        let path = daemon.path("bad");
        let make = move |cx: &mut ShardContext<'_>| {
            let listener = Listener::bind(&path).expect("a socket");
            NvmeDevice::new(config, listener, Arc::new(TestHost::default()), cx)
                .map(|_| ())
                .map_err(|error| error.to_string())
        };
        let answer = daemon.engine.shards()[0].call_wait(move |shard| make(&mut shard.context()));
        answer.expect("an answer").expect_err("refused")
    };
    assert_eq!(refused(|config| config.queues = 0), "device bad: I/O queue pairs must be 1 to 256");
    assert_eq!(refused(|config| config.vectors = 258), "device bad: interrupt vectors must be 1 to 257");
    assert_eq!(refused(|config| config.queue_entries = 1), "device bad: queue entries must be 2 to 65536");
    assert_eq!(
        refused(|config| config.mdts = 0),
        "device bad: the largest transfer (MDTS) must be 1 to 9: 8 KiB to 2 MiB",
        "0 has another meaning"
    );
    assert_eq!(
        refused(|config| "é".clone_into(&mut config.serial)),
        "device bad: the serial number must be at most 20 printable ASCII characters"
    );
}
