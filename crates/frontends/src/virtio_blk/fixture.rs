//! A front end and its guest's driver for tests: memory in a memfd, a socket, rings of either kind, on a real shard.
//!
//! ```text
//!   let mut driver = FakeDriver::new(Setup::default());    // a disk of 64 MiB of memory, a shard, no connection
//!   driver.connect();                                      // negotiation, memory table, queues
//!   let answer = driver.request(kind::OUT, 0, &[&data], &[]);
//! ```

use std::{
    fs::File,
    io::{IoSlice, IoSliceMut, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use millrace_backends::MemoryVolume;
use millrace_block::{BlockSize, Geometry, IoOperation, Operation, Request, Step, TaskContext, Volume};
use millrace_engine::{DeviceKey, Shard, ShardConfig, ShardContext};
use millrace_vfio_user::Listener;
use rustix::{
    event::{EventfdFlags, eventfd},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
        sendmsg,
    },
};
use tempfile::TempDir;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::{
    Config, Kind, VirtioBlkDevice, WriteModes,
    config::feature,
    message::{ConfigHead, Header, Inflight, Region, VringAddr, VringState, code, protocol},
    request::Header as RequestHeader,
    ring::feature as ring_feature,
};

/// Where the guest's memory begins, for the guest and for the front end's process.
pub(crate) const GUEST_BASE: u64 = 0x10_0000;
pub(crate) const USER_BASE: u64 = 0x7f00_0000_0000;
/// Bytes of the guest's memory.
pub(crate) const MEMORY: u64 = 16 << 20;
/// Entries of each queue.
pub(crate) const QUEUE: u16 = 64;
/// Bytes set aside for each queue's parts.
const QUEUE_BYTES: u64 = 0x4000;
/// Turns after which a test gives up waiting: far more than anything takes.
const PATIENCE: usize = 2_000_000;

/// What a test wants.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) packed: bool,
    pub(crate) features: u64,
    pub(crate) protocol: u64,
    pub(crate) queues: u16,
    /// Negotiates the record of requests under way.
    pub(crate) inflight: bool,
    /// Split rings are said to begin at what the guest has offered last, as Cloud Hypervisor does also when it connects again.
    pub(crate) begins_at_offered: bool,
}

impl Default for Setup {
    fn default() -> Self {
        let features = feature::VERSION_1
            | feature::FLUSH
            | feature::CONFIG_WCE
            | feature::DISCARD
            | feature::WRITE_ZEROES
            | feature::PROTOCOL_FEATURES
            | ring_feature::INDIRECT
            | ring_feature::EVENT_IDX;
        Self { packed: false, features, protocol: protocol::ALL, queues: 1, inflight: true, begins_at_offered: false }
    }
}

impl Setup {
    pub(crate) fn packed() -> Self {
        Self { packed: true, ..Self::default() }
    }

    fn chosen(&self) -> u64 {
        self.features | if self.packed { ring_feature::PACKED } else { 0 }
    }
}

/// The driver's side of a queue.
pub(crate) struct DriverQueue {
    index: u16,
    packed: bool,
    /// Guest address of its parts.
    pub(crate) base: u64,
    /// Next index of the available ring, or position and wrap counter.
    pub(crate) next: u16,
    pub(crate) wrap: bool,
    used: u16,
    used_wrap: bool,
    free: Vec<u16>,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    pub(crate) err: OwnedFd,
    /// Descriptors of each buffer name, for a packed ring.
    taken: Vec<u16>,
}

/// A piece of a chain: guest address, length, whether the device writes it.
pub(crate) type Piece = (u64, u32, bool);

/// The whole.
pub(crate) struct FakeDriver {
    pub(crate) shard: Shard,
    pub(crate) key: DeviceKey,
    pub(crate) setup: Setup,
    pub(crate) memory: File,
    pub(crate) stream: Option<UnixStream>,
    pub(crate) queues: Vec<DriverQueue>,
    pub(crate) volume: Arc<Watched>,
    /// What `GET_INFLIGHT_FD` gave.
    pub(crate) inflight: Option<(OwnedFd, Inflight)>,
    /// As QEMU it asks for the configuration when it begins, and not when it connects again.
    pub(crate) knows_config: bool,
    next: u64,
    /// Of all disks on the volume.
    modes: Arc<WriteModes>,
    /// The disk's name.
    name: &'static str,
    dir: TempDir,
}

impl FakeDriver {
    pub(crate) fn new(setup: Setup) -> Self {
        let volume = MemoryVolume::create("disk", 64 << 20, BlockSize::B512).expect("a volume");
        Self::over(setup, Watched::over(volume))
    }

    /// On another volume.
    pub(crate) fn over(setup: Setup, volume: Arc<Watched>) -> Self {
        Self::named("disk", setup, volume, Arc::default())
    }

    /// The machine goes on at another disk of the same volume, with its memory and its rings.
    pub(crate) fn migrated(mut self) -> (Self, Self) {
        let name = if self.name == "disk" { "another" } else { "disk" };
        let mut target = Self::named(name, self.setup, Arc::clone(&self.volume), Arc::clone(&self.modes));
        for index in 0..self.queues.len() as u32 {
            self.get::<VringState>(code::GET_VRING_BASE, VringState { index, num: 0 }.as_bytes());
        }
        std::mem::swap(&mut self.memory, &mut target.memory);
        std::mem::swap(&mut self.queues, &mut target.queues);
        std::mem::swap(&mut self.next, &mut target.next);
        (self, target)
    }

    fn named(name: &'static str, setup: Setup, volume: Arc<Watched>, modes: Arc<WriteModes>) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let mut shard = Shard::new(&ShardConfig { tasks: 64, ..ShardConfig::new(0, None) }).expect("a shard");
        let shown = (Arc::clone(&volume) as Arc<dyn Volume>, Arc::clone(&modes));
        let key = start_device(&mut shard, &dir, name, Some(shown), None);
        let memory = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"));
        memory.set_len(MEMORY).expect("room for the guest");
        let next = GUEST_BASE + QUEUE_BYTES * u64::from(setup.queues);
        let queues = (0..setup.queues).map(|index| DriverQueue::new(index, setup.packed)).collect();
        Self {
            shard,
            key,
            setup,
            memory,
            stream: None,
            queues,
            volume,
            inflight: None,
            knows_config: false,
            next,
            modes,
            name,
            dir,
        }
    }

    /// The daemon dies and comes again: another shard, another device on the same volume and path.
    pub(crate) fn restart_daemon(&mut self) {
        self.restart_daemon_with(Some(Arc::clone(&self.volume) as Arc<dyn Volume>), None);
    }

    /// The same, on another volume, or on none and with what is known of the last one.
    pub(crate) fn restart_daemon_with(&mut self, volume: Option<Arc<dyn Volume>>, kind: Option<Kind>) {
        // What the old one had in flight is dropped with its process; here its shard finishes it, unseen by the guest.
        let mut shard = Shard::new(&ShardConfig { tasks: 64, ..ShardConfig::new(0, None) }).expect("a shard");
        self.stream = None;
        let old = std::mem::replace(&mut self.shard, Shard::new(&ShardConfig::new(1, None)).expect("a shard"));
        std::mem::forget(old);
        std::fs::remove_file(self.dir.path().join("sock")).expect("the old socket");
        self.modes = Arc::default();
        let shown = volume.map(|volume| (volume, Arc::clone(&self.modes)));
        self.key = start_device(&mut shard, &self.dir, self.name, shown, kind);
        self.shard = shard;
    }

    pub(crate) fn device<R>(&mut self, call: impl FnOnce(&mut VirtioBlkDevice, &mut ShardContext<'_>) -> R) -> R {
        self.shard.with_device(self.key, call).expect("the device is there")
    }

    // ---- time -------------------------------------------------------------------------------------------------------

    /// Turns until there is nothing to do at once.
    pub(crate) fn settle(&mut self) {
        for _ in 0..64 {
            self.shard.turn();
        }
        self.until("rest", |driver| driver.shard.turn() == 0);
    }

    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        for turn in 0..PATIENCE {
            if done(self) {
                return;
            }
            self.shard.turn();
            if turn > 1000 {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        panic!("waited in vain for {what}");
    }

    // ---- messages ---------------------------------------------------------------------------------------------------

    pub(crate) fn open(&mut self) {
        let stream = UnixStream::connect(self.dir.path().join("sock")).expect("the device listens");
        stream.set_nonblocking(true).expect("a socket");
        self.stream = Some(stream);
    }

    /// Sends bytes as they are.
    pub(crate) fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let stream = self.stream.as_ref().expect("connected");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        // A connection that the device has ended already takes nothing.
        let _ = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    pub(crate) fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let header = Header { request, flags: 1 | flags, size: payload.len() as u32 };
        self.send_raw(&[header.as_bytes(), payload].concat(), fds);
    }

    /// The next answer; `None` when the device has closed the connection.
    pub(crate) fn answer(&mut self) -> Option<(Header, Vec<u8>, Option<OwnedFd>)> {
        for _ in 0..PATIENCE {
            self.shard.turn();
            let mut bytes = [0; 1024];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let stream = self.stream.as_ref().expect("connected");
            let received = match recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => received.bytes,
                Err(rustix::io::Errno::AGAIN) => continue,
                Err(_) => 0,
            };
            if received == 0 {
                return None;
            }
            let (header, rest) = Header::read_from_prefix(&bytes[..received]).expect("a whole header");
            assert_eq!(rest.len(), header.size as usize, "one answer at a time");
            let fd = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
                _ => None,
            });
            return Some((header, rest.to_vec(), fd));
        }
        panic!("no answer came");
    }

    /// Whether an answer, or the end of the connection, waits to be read.
    pub(crate) fn is_answered(&self) -> bool {
        let stream = self.stream.as_ref().expect("connected");
        rustix::net::recv(stream, &mut [0; 1][..], RecvFlags::PEEK) != Err(rustix::io::Errno::AGAIN)
    }

    /// Asks for one value.
    pub(crate) fn get<T: FromBytes>(&mut self, request: u32, payload: &[u8]) -> T {
        self.send(request, 0, payload, &[]);
        let (header, payload, _) = self.answer().expect("an answer");
        assert_eq!((header.request, header.flags), (request, 5));
        T::read_from_bytes(&payload).unwrap_or_else(|_| panic!("as many bytes as the value has"))
    }

    /// Tells something, and waits for word; whether it was accepted. `None`: the connection ended.
    pub(crate) fn tell(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Option<bool> {
        self.send(request, 8, payload, fds);
        let (header, payload, _) = self.answer()?;
        assert_eq!((header.request, header.flags), (request, 5));
        Some(payload == 0_u64.as_bytes())
    }

    fn must(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.tell(request, payload, fds), Some(true), "message {request}");
    }

    pub(crate) fn region() -> Region {
        Region { guest: GUEST_BASE, size: MEMORY, user: USER_BASE, offset: 0 }
    }

    /// All of the negotiation, as QEMU does it.
    pub(crate) fn connect(&mut self) {
        self.negotiate();
        if self.setup.inflight {
            self.join_inflight();
        }
        for index in 0..self.queues.len() {
            self.start_queue(index);
        }
    }

    /// The end of the negotiation once more, after a reset.
    pub(crate) fn resume(&mut self) {
        if self.setup.inflight {
            self.join_inflight();
        }
        (0..self.queues.len()).for_each(|index| self.start_queue(index));
    }

    /// Starts a queue that may be refused.
    pub(crate) fn try_start_queue(&mut self, index: usize) {
        let queue = &self.queues[index];
        let (number, base, addr) = (u32::from(queue.index), queue.start(self.setup.packed), queue.addr());
        let kick = queue.kick.try_clone().expect("a descriptor");
        let state = |num: u32| VringState { index: number, num };
        self.must(code::SET_VRING_NUM, state(QUEUE.into()).as_bytes(), &[]);
        self.must(code::SET_VRING_BASE, state(base).as_bytes(), &[]);
        self.must(code::SET_VRING_ADDR, addr.as_bytes(), &[]);
        self.must(code::SET_VRING_ENABLE, state(1).as_bytes(), &[]);
        self.tell(code::SET_VRING_KICK, u64::from(number).as_bytes(), &[kick.as_fd()]);
    }

    /// Tells of a running queue's descriptors once more.
    pub(crate) fn start_again(&mut self, index: usize) {
        let queue = &self.queues[index];
        let number = u32::from(queue.index);
        let kick = queue.kick.try_clone().expect("a descriptor");
        let addr = queue.addr();
        self.must(code::SET_VRING_ADDR, addr.as_bytes(), &[]);
        self.must(code::SET_VRING_KICK, u64::from(number).as_bytes(), &[kick.as_fd()]);
        self.must(code::SET_VRING_ENABLE, VringState { index: number, num: 1 }.as_bytes(), &[]);
    }

    /// Makes a head of a split ring available, whatever it leads to.
    pub(crate) fn publish(&mut self, queue: usize, head: u16) {
        let mut state = self.queues.remove(queue);
        state.publish_split(self, head);
        self.queues.insert(queue, state);
    }

    /// Zeroes all rings, as a driver does before it starts.
    pub(crate) fn wipe_queues(&self) {
        self.write(GUEST_BASE, &vec![0; (QUEUE_BYTES * u64::from(self.setup.queues)) as usize]);
    }

    pub(crate) fn negotiate(&mut self) {
        self.open();
        let offered: u64 = self.get(code::GET_FEATURES, &[]);
        assert_eq!(self.setup.chosen() & !offered, 0, "everything is offered: {offered:#x}");
        let offered: u64 = self.get(code::GET_PROTOCOL_FEATURES, &[]);
        assert_eq!(self.setup.protocol & !offered, 0);
        self.send(code::SET_PROTOCOL_FEATURES, 0, self.setup.protocol.as_bytes(), &[]);
        self.send(code::SET_OWNER, 0, &[], &[]);
        let features = self.setup.chosen();
        self.must(code::SET_FEATURES, features.as_bytes(), &[]);
        let table = [1_u32.as_bytes(), 0_u32.as_bytes(), Self::region().as_bytes()].concat();
        let memory = self.memory.try_clone().expect("a descriptor");
        self.must(code::SET_MEM_TABLE, &table, &[memory.as_fd()]);
        if self.setup.protocol & protocol::CONFIG != 0 && !std::mem::replace(&mut self.knows_config, true) {
            let head = ConfigHead { offset: 0, size: 60, flags: 0 };
            let _: [u8; 72] = self.get(code::GET_CONFIG, &[head.as_bytes(), &[0; 60]].concat());
        }
    }

    pub(crate) fn join_inflight(&mut self) {
        if self.inflight.is_none() {
            let wanted = Inflight { queues: self.setup.queues, queue_size: QUEUE, ..Inflight::new_zeroed() };
            self.send(code::GET_INFLIGHT_FD, 0, wanted.as_bytes(), &[]);
            let (_, payload, fd) = self.answer().expect("an answer");
            let what = Inflight::read_from_bytes(&payload).expect("a record");
            self.inflight = Some((fd.expect("a descriptor"), what));
        }
        let (fd, what) = self.inflight.as_ref().expect("a record");
        let (fd, what) = (fd.try_clone().expect("a descriptor"), *what);
        self.must(code::SET_INFLIGHT_FD, what.as_bytes(), &[fd.as_fd()]);
    }

    pub(crate) fn start_queue(&mut self, index: usize) {
        self.set_up_queue(index);
        let state = VringState { index: self.queues[index].index.into(), num: 1 };
        self.must(code::SET_VRING_ENABLE, state.as_bytes(), &[]);
    }

    /// All but that it is enabled.
    pub(crate) fn set_up_queue(&mut self, index: usize) {
        let queue = &self.queues[index];
        let (number, addr) = (u32::from(queue.index), queue.addr());
        let base = if self.setup.begins_at_offered { queue.next.into() } else { queue.start(self.setup.packed) };
        let fds = [&queue.kick, &queue.call, &queue.err].map(|fd| fd.try_clone().expect("a descriptor"));
        let state = |num: u32| VringState { index: number, num };
        self.must(code::SET_VRING_NUM, state(QUEUE.into()).as_bytes(), &[]);
        self.must(code::SET_VRING_BASE, state(base).as_bytes(), &[]);
        self.must(code::SET_VRING_ADDR, addr.as_bytes(), &[]);
        let word = u64::from(number);
        self.must(code::SET_VRING_ERR, word.as_bytes(), &[fds[2].as_fd()]);
        self.must(code::SET_VRING_KICK, word.as_bytes(), &[fds[0].as_fd()]);
        self.must(code::SET_VRING_CALL, word.as_bytes(), &[fds[1].as_fd()]);
    }

    // ---- memory -----------------------------------------------------------------------------------------------------

    /// Address of so many fresh bytes.
    pub(crate) fn alloc(&mut self, len: u64) -> u64 {
        let addr = self.next;
        self.next += len.next_multiple_of(16);
        assert!(self.next <= GUEST_BASE + MEMORY, "the guest is out of memory");
        addr
    }

    /// Everything that was allocated is free again.
    pub(crate) fn free_all(&mut self) {
        self.next = GUEST_BASE + QUEUE_BYTES * u64::from(self.setup.queues);
    }

    pub(crate) fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_exact_at(&mut bytes, addr - GUEST_BASE).expect("guest memory");
        bytes
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, addr - GUEST_BASE).expect("guest memory");
    }

    pub(crate) fn write_value<T: IntoBytes + Immutable>(&self, addr: u64, value: &T) {
        self.write(addr, value.as_bytes());
    }

    pub(crate) fn read_value<T: FromBytes>(&self, addr: u64) -> T {
        T::read_from_bytes(&self.read(addr, size_of::<T>())).unwrap_or_else(|_| panic!("as many bytes as the value has"))
    }

    // ---- requests ---------------------------------------------------------------------------------------------------

    /// Makes a chain available; its name.
    pub(crate) fn submit(&mut self, queue: usize, pieces: &[Piece]) -> u16 {
        let mut state = self.queues.remove(queue);
        let name = if self.setup.packed { state.submit_packed(self, pieces) } else { state.submit_split(self, pieces) };
        self.queues.insert(queue, state);
        name
    }

    /// Makes a chain available that is one indirect table.
    pub(crate) fn submit_indirect(&mut self, queue: usize, table: u64, len: u32) -> u16 {
        let piece = [(table, len, false)];
        let (base, next, wrap) = (self.queues[queue].base, self.queues[queue].next, self.queues[queue].wrap);
        if self.setup.packed {
            let name = self.submit(queue, &piece);
            let mark: u16 = if wrap { 1 << 7 } else { 1 << 15 };
            self.write_value(base + u64::from(next) * 16 + 14, &(4 | mark));
            return name;
        }
        let mut state = self.queues.remove(queue);
        let name = state.free.pop().expect("a free descriptor");
        state.taken[usize::from(name)] = 1;
        self.write_value(base + u64::from(name) * 16, &[table, u64::from(len) | 4 << 32]);
        state.publish_split(self, name);
        self.queues.insert(queue, state);
        name
    }

    /// Writes an indirect table of these pieces.
    pub(crate) fn write_table(&self, table: u64, pieces: &[Piece]) {
        for (index, &(addr, len, write)) in pieces.iter().enumerate() {
            let more = index + 1 < pieces.len();
            let write = if write { 2_u16 } else { 0 };
            let words: [u16; 2] = if self.setup.packed {
                [7, write]
            } else {
                [write | u16::from(more), if more { index as u16 + 1 } else { 0 }]
            };
            let place = table + index as u64 * 16;
            self.write_value(place, &addr);
            self.write_value(place + 8, &len);
            self.write_value(place + 12, &words);
        }
    }

    pub(crate) fn kick(&mut self, queue: usize) {
        let mut kick = File::from(self.queues[queue].kick.try_clone().expect("a descriptor"));
        kick.write_all(&1_u64.to_ne_bytes()).expect("a kick");
    }

    /// The next used chain: its name and the bytes written.
    pub(crate) fn next_used(&mut self, queue: usize) -> Option<(u16, u32)> {
        let mut state = self.queues.remove(queue);
        let used = if self.setup.packed { state.used_packed(self) } else { state.used_split(self) };
        self.queues.insert(queue, state);
        used
    }

    /// Waits for the next used chain.
    pub(crate) fn wait_used(&mut self, queue: usize) -> (u16, u32) {
        let mut used = None;
        self.until("a used chain", |driver| {
            used = driver.next_used(queue);
            used.is_some()
        });
        used.expect("waited for")
    }

    /// Puts a request's parts into memory: its pieces and where its status will be.
    pub(crate) fn prepare(&mut self, kind: u32, sector: u64, out: &[u8], into: u32) -> (Vec<Piece>, u64, u64) {
        let header = self.alloc(16);
        self.write_value(header, &RequestHeader { kind, reserved: 0, sector });
        let mut pieces = vec![(header, 16, false)];
        if !out.is_empty() {
            let data = self.alloc(out.len() as u64);
            self.write(data, out);
            pieces.push((data, out.len() as u32, false));
        }
        let data = self.alloc(u64::from(into).max(1));
        if into > 0 {
            pieces.push((data, into, true));
        }
        let status = self.alloc(1);
        self.write(status, &[0xff]);
        pieces.push((status, 1, true));
        (pieces, data, status)
    }

    /// One request and its end: status, and what was read.
    pub(crate) fn request(&mut self, kind: u32, sector: u64, out: &[u8], into: u32) -> (u8, Vec<u8>) {
        self.free_all();
        let (pieces, data, status) = self.prepare(kind, sector, out, into);
        let name = self.submit(0, &pieces);
        let (used, len) = self.wait_used(0);
        assert_eq!(used, name, "the chain comes back under its name");
        let code = self.read(status, 1)[0];
        assert_eq!(len, if code == 0 { into + 1 } else { 1 }, "bytes written");
        (code, self.read(data, into as usize))
    }

    /// How often the guest was interrupted since the last call.
    pub(crate) fn interrupts(&self, queue: usize) -> u64 {
        drain(&self.queues[queue].call)
    }
}

/// What an eventfd has counted.
pub(crate) fn drain(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(fd, &mut count) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(_) => 0,
    }
}

type Shown = (Arc<dyn Volume>, Arc<WriteModes>);

fn start_device(shard: &mut Shard, dir: &TempDir, name: &str, shown: Option<Shown>, kind: Option<Kind>) -> DeviceKey {
    let listener = Listener::bind(&dir.path().join("sock")).expect("a socket");
    let config = Config { queues: 4, migration: true, ..Config::new(name) };
    let key = shard.add_device_with(|cx| {
        let mut device = VirtioBlkDevice::new(config, kind, listener, shown.is_some(), cx)?;
        shown.map_or(Ok(()), |(volume, modes)| device.attach(volume, modes, false, cx))?;
        Ok::<_, super::DeviceError>(Box::new(device) as Box<dyn millrace_engine::Device>)
    });
    key.expect("a device")
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

/// Offsets of the parts within a queue's bytes.
pub(crate) const AVAIL: u64 = 0x1000;
pub(crate) const USED: u64 = 0x2000;

impl DriverQueue {
    fn new(index: u16, packed: bool) -> Self {
        Self {
            index,
            packed,
            base: GUEST_BASE + QUEUE_BYTES * u64::from(index),
            next: 0,
            wrap: packed,
            used: 0,
            used_wrap: packed,
            free: (0..QUEUE).rev().collect(),
            kick: event(),
            call: event(),
            err: event(),
            taken: vec![0; usize::from(QUEUE)],
        }
    }

    /// The driver starts anew.
    pub(crate) fn forget(&mut self) {
        *self = Self { kick: event(), call: event(), err: event(), ..Self::new(self.index, self.packed) };
    }

    /// As the front end knows it after it lost its back end: what was used.
    fn start(&self, packed: bool) -> u32 {
        if packed {
            let half = u32::from(self.used) | u32::from(self.used_wrap) << 15;
            half | half << 16
        } else {
            self.used.into()
        }
    }

    pub(crate) fn addr(&self) -> VringAddr {
        let user = self.base - GUEST_BASE + USER_BASE;
        let (desc, avail, used) = (user, user + AVAIL, user + USED);
        VringAddr { index: self.index.into(), flags: 0, desc, avail, used, log: 0 }
    }

    fn submit_split(&mut self, driver: &FakeDriver, pieces: &[Piece]) -> u16 {
        let names: Vec<u16> = pieces.iter().map(|_| self.free.pop().expect("a free descriptor")).collect();
        for (at, (addr, len, write)) in pieces.iter().enumerate() {
            let next = names.get(at + 1).copied();
            let flags = u16::from(next.is_some()) | if *write { 2 } else { 0 };
            let words = [u64::from(*len) | u64::from(flags) << 32 | u64::from(next.unwrap_or(0)) << 48];
            driver.write_value(self.base + u64::from(names[at]) * 16, addr);
            driver.write_value(self.base + u64::from(names[at]) * 16 + 8, &words);
        }
        self.taken[usize::from(names[0])] = names.len() as u16;
        self.publish_split(driver, names[0]);
        names[0]
    }

    /// Makes a head available, whatever it leads to.
    pub(crate) fn publish_split(&mut self, driver: &FakeDriver, head: u16) {
        driver.write_value(self.base + AVAIL + 4 + u64::from(self.next % QUEUE) * 2, &head);
        self.next = self.next.wrapping_add(1);
        driver.write_value(self.base + AVAIL + 2, &self.next);
    }

    fn used_split(&mut self, driver: &FakeDriver) -> Option<(u16, u32)> {
        let index: u16 = driver.read_value(self.base + USED + 2);
        if index == self.used {
            return None;
        }
        let [id, len]: [u32; 2] = driver.read_value(self.base + USED + 4 + u64::from(self.used % QUEUE) * 8);
        self.used = self.used.wrapping_add(1);
        let mut at = id as u16;
        for _ in 0..self.taken[usize::from(id as u16)] {
            self.free.push(at);
            at = driver.read_value(self.base + u64::from(at) * 16 + 14);
        }
        Some((id as u16, len))
    }

    fn submit_packed(&mut self, driver: &FakeDriver, pieces: &[Piece]) -> u16 {
        let name = self.free.pop().expect("a free name");
        self.taken[usize::from(name)] = pieces.len() as u16;
        let mut first = None;
        for (at, (addr, len, write)) in pieces.iter().enumerate() {
            let place = self.base + u64::from(self.next) * 16;
            let more = u16::from(at + 1 < pieces.len());
            let mark = if self.wrap { 1 << 7 } else { 1 << 15 };
            let flags = more | if *write { 2 } else { 0 } | mark;
            driver.write_value(place, addr);
            driver.write_value(place + 8, &[u64::from(*len) as u32]);
            driver.write_value(place + 12, &name);
            match first {
                None => first = Some((place + 14, flags)),
                Some(_) => driver.write_value(place + 14, &flags),
            }
            self.next += 1;
            if self.next == QUEUE {
                (self.next, self.wrap) = (0, !self.wrap);
            }
        }
        let (place, flags) = first.expect("a piece");
        driver.write_value(place, &flags);
        name
    }

    fn used_packed(&mut self, driver: &FakeDriver) -> Option<(u16, u32)> {
        let place = self.base + u64::from(self.used) * 16;
        let flags: u16 = driver.read_value(place + 14);
        let (available, used) = (flags & 1 << 7 != 0, flags & 1 << 15 != 0);
        if available != used || used != self.used_wrap {
            return None;
        }
        let (len, name): (u32, u16) = (driver.read_value(place + 8), driver.read_value(place + 12));
        self.used += self.taken[usize::from(name)];
        if self.used >= QUEUE {
            (self.used, self.used_wrap) = (self.used - QUEUE, !self.used_wrap);
        }
        self.free.push(name);
        Some((name, len))
    }
}

/// A request as the volume saw it: what, first block, blocks, pieces of memory.
pub(crate) type Seen = (Operation, u64, u64, usize);

/// A volume that remembers its requests, and can keep them waiting.
pub(crate) struct Watched {
    inner: Arc<dyn Volume>,
    pub(crate) seen: Mutex<Vec<Seen>>,
    held: AtomicBool,
    /// Requests that it does together at most.
    pub(crate) together: AtomicUsize,
    /// Requests that it did so.
    pub(crate) did: AtomicUsize,
    /// Done with every request that comes alone.
    pub(crate) look: Mutex<Option<Look>>,
}

type Look = Box<dyn FnMut() + Send>;

impl Watched {
    pub(crate) fn over(inner: Arc<dyn Volume>) -> Arc<Self> {
        let (seen, held) = (Mutex::default(), AtomicBool::new(false));
        let (together, did, look) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::default());
        Arc::new(Self { inner, seen, held, together, did, look })
    }

    /// From now on requests wait, or no longer.
    pub(crate) fn hold(&self, held: bool) {
        self.held.store(held, Ordering::SeqCst);
    }

    /// What it saw since the last call.
    pub(crate) fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().expect("no test panicked"))
    }
}

impl Volume for Watched {
    millrace_block::passes_on!(inner but geometry);

    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.inner.geometry() }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let seen = (request.operation, request.lba.0, request.count.0, request.segments.len());
        self.seen.lock().expect("no test panicked").push(seen);
        if let Some(look) = &mut *self.look.lock().expect("no test panicked") {
            look();
        }
        if !self.held.load(Ordering::SeqCst) {
            return self.inner.submit(cx, request);
        }
        Step::Wait(cx.scratch.place_future(async move {
            while self.held.load(Ordering::SeqCst) {
                // Looks again every so often, so that a test may stop stepping at any time.
                cx.io(IoOperation::Sleep(Duration::from_micros(50))).await;
            }
            self.inner.submit(cx, request).await
        }))
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let most = self.together.load(Ordering::SeqCst).min(requests.len());
        let done = self.inner.submit_many(&mut requests[..most]);
        self.did.fetch_add(done, Ordering::SeqCst);
        done
    }

    fn scratch_bytes(&self) -> usize {
        1024 + self.inner.scratch_bytes()
    }
}
