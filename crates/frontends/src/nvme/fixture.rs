//! A guest for tests: its memory in a memfd, its queues, and a controller on a real shard.
//!
//! ```text
//!   let mut guest = FakeGuest::boot();                  // memory mapped, controller enabled
//!   guest.add_memory_volume(1, 64 << 20, BlockSize::B512);
//!   guest.make_queues(1, 64);                           // or create_queues: by admin commands
//!   let cqe = guest.command(1, sqe);                    // submit, ring, step, wait
//! ```

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use millrace_backends::MemoryVolume;
use millrace_block::{
    Asker, BlockCount, BlockError, BlockSize, Geometry, IoOperation, METADATA_SIZE, Metadata, MetadataFormat, NO_METADATA,
    Operation, Request, Step, TaggedRequest, TaskContext, Usage, Volume, VolumeError,
};
use millrace_engine::{Shard, ShardConfig};
use millrace_memory::{GuestAddress, Protection};
use millrace_nvme_spec::{
    admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11},
    command::{CommandId, Cqe, DataPointer, NamespaceId, QueueId, Sqe},
    opcode::AdminOpcode,
    registers::offset,
    status::Status,
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::{
    CardSpec, Config, Host, HostReply, Identity, MakeEngine, Namespace, NewFormat, StorageFunctions, controller::Controller,
    namespace::Allocated, registers::Phase,
};

/// First address of the guest's memory: addresses below are not mapped.
pub(crate) const MEMORY_BASE: u64 = 0x100_0000;
/// Bytes of the guest's memory: one region.
pub(crate) const MEMORY_SIZE: u64 = 64 << 20;
/// The guest's page size.
pub(crate) const PAGE: u64 = 4096;
/// Turns after which a test gives up waiting: far more than anything takes.
const PATIENCE: usize = 1_000_000;

/// The guest's side of a queue pair.
#[derive(Clone, Debug)]
pub(crate) struct QueuePair {
    pub(crate) sq_base: u64,
    pub(crate) cq_base: u64,
    pub(crate) entries: u32,
    pub(crate) tail: u32,
    pub(crate) head: u32,
    phase: bool,
    next_cid: u16,
    /// Completions that were read while another was awaited.
    early: VecDeque<Cqe>,
}

/// A guest with one controller.
pub(crate) struct FakeGuest {
    pub(crate) controller: Controller,
    pub(crate) shard: Shard,
    pub(crate) host: Arc<TestHost>,
    pub(crate) memory: File,
    pub(crate) queues: BTreeMap<u16, QueuePair>,
    next_page: u64,
}

impl FakeGuest {
    /// Of the usual size for tests: 8 queue pairs, 9 vectors, 64 namespaces; memory mapped and the controller enabled.
    pub(crate) fn boot() -> Self {
        let mut guest = Self::new(test_config());
        guest.enable();
        guest
    }

    /// A controller that is not enabled yet, with the guest's memory mapped.
    pub(crate) fn new(config: Config) -> Self {
        let memfd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let memory = File::from(memfd);
        memory.set_len(MEMORY_SIZE).expect("room for the guest");
        let host = Arc::new(TestHost::default());
        let mut controller = Controller::new(config, Arc::clone(&host) as Arc<dyn Host>).expect("a controller");
        let all = Protection { read: true, write: true };
        let backing = Some((memory.as_fd(), 0));
        controller.memory.map(GuestAddress(MEMORY_BASE), MEMORY_SIZE, all, backing).expect("memory is mapped");
        let shard = Shard::new(&ShardConfig { tasks: 64, ..ShardConfig::new(0, None) }).expect("a shard");
        Self { controller, shard, host, memory, queues: BTreeMap::new(), next_page: MEMORY_BASE }
    }

    /// With its I/O queues on a card; guests of one test share it. Enabled, with the memory mapped there too.
    pub(crate) fn on_card(card: CardSpec, functions: StorageFunctions) -> Self {
        let mut guest = Self::new(Config { card: Some(card), functions, ..test_config() }.limited());
        guest.controller.join_card().expect("a function of the card");
        guest.map_on_card(MEMORY_BASE, MEMORY_SIZE, 0);
        guest.enable();
        guest
    }

    /// Part of the guest's memory becomes reachable for the card.
    pub(crate) fn map_on_card(&mut self, address: u64, size: u64, offset: u64) {
        let Controller { memory, port, .. } = &mut self.controller;
        if memory.lend(GuestAddress(address), size).is_none() {
            let all = Protection { read: true, write: true };
            memory.map(GuestAddress(address), size, all, Some((self.memory.as_fd(), offset))).expect("memory is mapped");
        }
        port.as_mut().expect("a guest on a card").map(memory, address, size).expect("memory is mapped");
    }

    /// The same machine with its other controller: memory and queues are as they are there.
    pub(crate) fn move_from(&mut self, other: &Self) {
        let mut bytes = vec![0; (other.next_page - MEMORY_BASE) as usize];
        other.memory.read_exact_at(&mut bytes, 0).expect("guest memory");
        self.memory.write_all_at(&bytes, 0).expect("guest memory");
        (self.queues, self.next_page) = (other.queues.clone(), other.next_page);
    }

    // ---- time -------------------------------------------------------------------------------------------------------

    /// One turn of the controller, then of its shard (ring, tasks, mailbox). Returns the work done.
    pub(crate) fn step(&mut self) -> usize {
        let work = self.controller.turn(&mut self.shard.context());
        work + self.shard.turn()
    }

    /// Steps until there is nothing to do at once.
    pub(crate) fn settle(&mut self) {
        self.step_until("rest", |guest| guest.step() == 0);
    }

    /// Steps until `done`.
    pub(crate) fn step_until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        for turn in 0..PATIENCE {
            if done(self) {
                return;
            }
            self.step();
            if turn > 1000 {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        panic!("waited in vain for {what}");
    }

    // ---- memory -----------------------------------------------------------------------------------------------------

    /// Address of `count` contiguous fresh zeroed pages.
    pub(crate) fn alloc_pages(&mut self, count: u64) -> u64 {
        let addr = self.next_page;
        self.next_page += count * PAGE;
        assert!(self.next_page <= MEMORY_BASE + MEMORY_SIZE, "the guest is out of memory");
        addr
    }

    /// Where memory begins that nothing was allocated from.
    pub(crate) fn used_memory(&self) -> u64 {
        self.next_page
    }

    /// The guest reads its memory.
    pub(crate) fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_exact_at(&mut bytes, addr - MEMORY_BASE).expect("guest memory");
        bytes
    }

    /// The guest writes its memory.
    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, addr - MEMORY_BASE).expect("guest memory");
    }

    /// The guest reads a value.
    pub(crate) fn read_value<T: FromBytes>(&self, addr: u64) -> T {
        let bytes = self.read(addr, size_of::<T>());
        let Ok(value) = T::read_from_bytes(&bytes) else { panic!("as many bytes as the value has") };
        value
    }

    /// The guest writes a value.
    pub(crate) fn write_value<T: IntoBytes + Immutable>(&self, addr: u64, value: &T) {
        self.write(addr, value.as_bytes());
    }

    /// PRPs for `len` bytes at `addr`, with lists in fresh pages where needed (chained when they do not fit one).
    pub(crate) fn prps(&mut self, addr: u64, len: u64) -> DataPointer {
        let first = PAGE - addr % PAGE;
        let pages: Vec<u64> = (addr + first..addr + len.max(1)).step_by(PAGE as usize).collect();
        let second = match pages.as_slice() {
            [] => 0,
            [only] => *only,
            pages => self.prp_list(pages),
        };
        DataPointer::prps(addr, second)
    }

    fn prp_list(&mut self, pages: &[u64]) -> u64 {
        const ENTRIES: usize = PAGE as usize / 8;
        let list = self.alloc_pages(1);
        if pages.len() <= ENTRIES {
            self.write(list, pages.as_bytes());
        } else {
            let (here, rest) = pages.split_at(ENTRIES - 1);
            self.write(list, here.as_bytes());
            let next = self.prp_list(rest);
            self.write_value(list + (ENTRIES as u64 - 1) * 8, &next);
        }
        list
    }

    // ---- registers --------------------------------------------------------------------------------------------------

    pub(crate) fn read32(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.controller.register_read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(crate) fn read64(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.controller.register_read(offset, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    pub(crate) fn write32(&mut self, offset: u64, value: u32) {
        self.controller.register_write(offset, &value.to_le_bytes());
    }

    pub(crate) fn write64(&mut self, offset: u64, value: u64) {
        self.controller.register_write(offset, &value.to_le_bytes());
    }

    /// Enables the controller with an admin queue of 64 entries in fresh pages, as Linux does.
    pub(crate) fn enable(&mut self) {
        let entries = 64;
        let pair = self.new_pair(entries);
        self.write32(offset::AQA, (entries - 1) << 16 | (entries - 1));
        self.write64(offset::ASQ, pair.sq_base);
        self.write64(offset::ACQ, pair.cq_base);
        self.queues = BTreeMap::from([(0, pair)]);
        // IOCQES 16 bytes, IOSQES 64 bytes, 4 KiB pages.
        self.write32(offset::CC, 4 << 20 | 6 << 16 | 1);
        self.step_until("ready", |guest| guest.read32(offset::CSTS) & 1 != 0);
        assert_eq!(self.controller.phase, Phase::Ready);
    }

    /// Clears CC.EN and waits for CSTS.RDY to fall.
    pub(crate) fn disable(&mut self) {
        let cc = self.read32(offset::CC);
        self.write32(offset::CC, cc & !1);
        self.step_until("not ready", |guest| guest.read32(offset::CSTS) & 1 == 0);
        self.queues.clear();
    }

    // ---- namespaces -------------------------------------------------------------------------------------------------

    /// Attaches a memory volume.
    pub(crate) fn add_memory_volume(&mut self, nsid: u32, bytes: u64, block_size: BlockSize) -> Arc<Namespace> {
        let volume = MemoryVolume::create(&format!("volume-{nsid}"), bytes, block_size).expect("a volume");
        self.add_volume(nsid, volume)
    }

    /// Attaches any volume.
    pub(crate) fn add_volume(&mut self, nsid: u32, volume: Arc<dyn Volume>) -> Arc<Namespace> {
        let namespace = Namespace::new(volume, identity(nsid), false);
        self.add_namespace(nsid, &namespace);
        namespace
    }

    /// Attaches a namespace, which other guests may have too.
    pub(crate) fn add_namespace(&mut self, nsid: u32, namespace: &Arc<Namespace>) {
        let allocated = Allocated { namespace: Arc::clone(namespace), read_only: false, by_guest: false };
        self.controller.namespaces.allocate(nsid, allocated).expect("a free identifier");
        self.controller.namespaces.attach(nsid).expect("an attachment");
    }

    // ---- queues -----------------------------------------------------------------------------------------------------

    /// Memory for a queue pair.
    pub(crate) fn new_pair(&mut self, entries: u32) -> QueuePair {
        let sq_base = self.alloc_pages((u64::from(entries) * Sqe::SIZE as u64).div_ceil(PAGE));
        let cq_base = self.alloc_pages((u64::from(entries) * Cqe::SIZE as u64).div_ceil(PAGE));
        QueuePair { sq_base, cq_base, entries, tail: 0, head: 0, phase: true, next_cid: 1, early: VecDeque::new() }
    }

    /// Makes an I/O queue pair without asking by admin commands; it interrupts by the vector of its own number.
    pub(crate) fn make_queues(&mut self, qid: u16, entries: u32) {
        let pair = self.new_pair(entries);
        self.controller.create_cq(qid, pair.cq_base, entries, Some(qid));
        self.controller.create_sq(qid, pair.sq_base, entries, qid, 0);
        self.queues.insert(qid, pair);
    }

    /// Creates an I/O queue pair by admin commands; it interrupts by the vector of its own number.
    pub(crate) fn create_queues(&mut self, qid: u16, entries: u32) {
        let pair = self.new_pair(entries);
        let size = CreateQueueCdw10::new().with_qid(QueueId(qid)).with_qsize_z((entries - 1) as u16).into_bits();
        let cq = CreateCqCdw11::new().with_pc(true).with_ien(true).with_iv(qid).into_bits();
        let sq = CreateSqCdw11::new().with_pc(true).with_cqid(QueueId(qid)).into_bits();
        for (opcode, base, cdw11) in
            [(AdminOpcode::CREATE_IO_CQ, pair.cq_base, cq), (AdminOpcode::CREATE_IO_SQ, pair.sq_base, sq)]
        {
            let mut sqe = sqe(opcode.0, 0);
            (sqe.dptr, sqe.cdw10, sqe.cdw11) = (DataPointer::prps(base, 0), size, cdw11);
            let status = self.admin(sqe).status();
            assert!(status.is_success(), "{opcode}: {status}");
        }
        self.queues.insert(qid, pair);
    }

    fn pair(&mut self, qid: u16) -> &mut QueuePair {
        self.queues.get_mut(&qid).expect("a queue pair that the guest has made")
    }

    /// Writes a command into the queue without ringing; returns its identifier (a fresh one, whatever `sqe` says).
    pub(crate) fn push(&mut self, qid: u16, mut sqe: Sqe) -> u16 {
        let pair = self.pair(qid);
        sqe.cid = CommandId(pair.next_cid);
        pair.next_cid = pair.next_cid.wrapping_add(1);
        self.push_as_is(qid, &sqe);
        sqe.cid.0
    }

    /// Writes a command into the queue without ringing, its identifier as it is.
    pub(crate) fn push_as_is(&mut self, qid: u16, sqe: &Sqe) {
        let pair = self.pair(qid);
        let addr = pair.sq_base + u64::from(pair.tail) * Sqe::SIZE as u64;
        pair.tail = (pair.tail + 1) % pair.entries;
        self.write_value(addr, sqe);
    }

    /// Rings the submission queue's doorbell with the guest's tail.
    pub(crate) fn ring(&mut self, qid: u16) {
        let tail = self.pair(qid).tail;
        self.doorbell(usize::from(qid) * 2, tail);
    }

    /// Writes any doorbell with any value.
    pub(crate) fn doorbell(&mut self, index: usize, value: u32) {
        self.controller.doorbells.words[index].store(value, Ordering::Release);
    }

    /// Submits a command and rings.
    pub(crate) fn submit(&mut self, qid: u16, sqe: Sqe) -> u16 {
        let cid = self.push(qid, sqe);
        self.ring(qid);
        cid
    }

    /// The next completion, if it is there; the guest's head moves and rings. Does not step.
    pub(crate) fn poll(&mut self, qid: u16) -> Option<Cqe> {
        if let Some(cqe) = self.pair(qid).early.pop_front() {
            return Some(cqe);
        }
        self.poll_queue(qid)
    }

    fn poll_queue(&mut self, qid: u16) -> Option<Cqe> {
        let pair = self.pair(qid);
        let (addr, phase) = (pair.cq_base + u64::from(pair.head) * Cqe::SIZE as u64, pair.phase);
        let cqe: Cqe = self.read_value(addr);
        if cqe.phase() != phase {
            return None;
        }
        let pair = self.pair(qid);
        pair.head += 1;
        if pair.head == pair.entries {
            (pair.head, pair.phase) = (0, !phase);
        }
        let head = pair.head;
        self.doorbell(usize::from(qid) * 2 + 1, head);
        Some(cqe)
    }

    /// Steps until the queue has a completion.
    pub(crate) fn wait(&mut self, qid: u16) -> Cqe {
        let mut found = None;
        self.step_until("a completion", |guest| {
            found = guest.poll(qid);
            found.is_some()
        });
        found.expect("stepped until it was there")
    }

    /// As [`Self::wait`], for a guest that keeps its heads in a shadow doorbell page.
    pub(crate) fn wait_shadow(&mut self, qid: u16, shadow: u64) -> Cqe {
        let cqe = self.wait(qid);
        let head = self.pair(qid).head;
        self.write_value(shadow + u64::from(qid) * 8 + 4, &head);
        cqe
    }

    /// Steps until the command of this identifier is completed; others that come first are kept for [`Self::poll`].
    pub(crate) fn wait_for(&mut self, qid: u16, cid: u16) -> Cqe {
        let early = &mut self.pair(qid).early;
        if let Some(at) = early.iter().position(|cqe| cqe.cid.0 == cid) {
            return early.remove(at).expect("found there");
        }
        let mut found = None;
        self.step_until("a completion", |guest| {
            while let Some(cqe) = guest.poll_queue(qid) {
                if cqe.cid.0 == cid {
                    found = Some(cqe);
                    return true;
                }
                guest.pair(qid).early.push_back(cqe);
            }
            false
        });
        found.expect("stepped until it was there")
    }

    /// Submits a command and waits for it.
    pub(crate) fn command(&mut self, qid: u16, sqe: Sqe) -> Cqe {
        let cid = self.submit(qid, sqe);
        self.wait_for(qid, cid)
    }

    /// Submits an admin command and waits for it.
    pub(crate) fn admin(&mut self, sqe: Sqe) -> Cqe {
        self.command(0, sqe)
    }

    /// A command with a fresh buffer of `len` bytes for what it returns: the completion and the bytes.
    pub(crate) fn command_reading(&mut self, qid: u16, mut sqe: Sqe, len: usize) -> (Cqe, Vec<u8>) {
        let buffer = self.alloc_pages((len as u64).div_ceil(PAGE));
        sqe.dptr = self.prps(buffer, len as u64);
        let cqe = self.command(qid, sqe);
        (cqe, self.read(buffer, len))
    }

    /// A command with `data` in a fresh buffer.
    pub(crate) fn command_writing(&mut self, qid: u16, mut sqe: Sqe, data: &[u8]) -> Cqe {
        let buffer = self.alloc_pages((data.len() as u64).div_ceil(PAGE));
        self.write(buffer, data);
        sqe.dptr = self.prps(buffer, data.len() as u64);
        self.command(qid, sqe)
    }
}

/// A card with so many disks, whose engine is the software one; or with the feature `sim` the simulated one.
pub(crate) fn test_card(ssds: u8) -> CardSpec {
    #[cfg(feature = "sim")]
    let (engine, make): (_, MakeEngine) = ("fvm-sim", |shape| Ok(Box::new(millrace_engine_model::SimEngine::new(shape)?)));
    #[cfg(not(feature = "sim"))]
    let (engine, make): (_, MakeEngine) = ("fvm-soft", |shape| Ok(Box::new(millrace_engine_model::SoftEngine::new(shape))));
    CardSpec { engine, make, cores: 1, ssds, latency: 100 }
}

/// A zeroed command with its opcode and namespace.
pub(crate) fn sqe(opcode: u8, nsid: u32) -> Sqe {
    let mut sqe = Sqe::new_zeroed();
    sqe.opcode = opcode;
    sqe.nsid = NamespaceId(nsid);
    sqe
}

/// The usual configuration for tests.
pub(crate) fn test_config() -> Config {
    Config { queues: 8, vectors: 9, namespaces: 64, ..Config::new("test") }
}

/// An identity that differs by number.
pub(crate) fn identity(number: u32) -> Identity {
    let mut uuid = [0x11; 16];
    uuid[..4].copy_from_slice(&number.to_be_bytes());
    Identity { uuid, eui64: [0; 8] }
}

/// What a controller asked of its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostCall {
    Create { nsid: u32, bytes: u64, block_size: BlockSize },
    Delete { nsid: u32 },
    Format { uuid: [u8; 16], block_size: BlockSize },
    AttachmentChanged { nsid: u32, attached: bool },
    ReservationNotice { uuid: [u8; 16], notify: Vec<([u8; 16], u8)> },
}

type Work = Box<dyn FnOnce() + Send>;

/// The daemon around the controller: does what it is asked with memory volumes, at once, or when told to.
#[derive(Default)]
pub(crate) struct TestHost {
    calls: Mutex<Vec<HostCall>>,
    /// Where work waits while it is held back.
    held: Mutex<Option<Vec<Work>>>,
}

impl TestHost {
    /// What was asked since the last call.
    pub(crate) fn take_calls(&self) -> Vec<HostCall> {
        std::mem::take(&mut *self.calls.lock().expect("no panic"))
    }

    /// From now on, work waits for [`Self::release`].
    pub(crate) fn hold(&self) {
        self.held.lock().expect("no panic").get_or_insert_default();
    }

    /// Does the work that waits, and all later work at once.
    pub(crate) fn release(&self) {
        let work = self.held.lock().expect("no panic").take();
        work.into_iter().flatten().for_each(|work| work());
    }

    fn note(&self, call: HostCall) {
        self.calls.lock().expect("no panic").push(call);
    }

    fn work(&self, work: impl FnOnce() + Send + 'static) {
        match &mut *self.held.lock().expect("no panic") {
            Some(held) => held.push(Box::new(work)),
            None => work(),
        }
    }
}

impl Host for TestHost {
    fn create_namespace(&self, _: &str, nsid: u32, bytes: u64, block_size: BlockSize, reply: HostReply<Arc<Namespace>>) {
        self.note(HostCall::Create { nsid, bytes, block_size });
        self.work(move || {
            let volume = MemoryVolume::create(&format!("created-{nsid}"), bytes, block_size);
            let namespace = volume.map(|volume| Namespace::new(volume, identity(nsid), false));
            reply.send(namespace.map_err(|_| Status::NAMESPACE_INSUFFICIENT_CAPACITY));
        });
    }

    fn delete_namespace(&self, _: &str, nsid: u32, reply: HostReply<()>) {
        self.note(HostCall::Delete { nsid });
        self.work(move || reply.send(Ok(())));
    }

    fn format(&self, _: &str, namespace: Arc<Namespace>, format: NewFormat, reply: HostReply<()>) {
        self.note(HostCall::Format { uuid: namespace.identity.uuid, block_size: format.block_size });
        self.work(move || reply.send(format.apply(&*namespace.volume).map_err(|_| Status::INTERNAL_ERROR)));
    }

    fn attachment_changed(&self, _: &str, nsid: u32, attached: bool) {
        self.note(HostCall::AttachmentChanged { nsid, attached });
    }

    fn reservation_notice(&self, namespace: &Arc<Namespace>, notify: &[([u8; 16], u8)]) {
        self.note(HostCall::ReservationNotice { uuid: namespace.identity.uuid, notify: notify.to_vec() });
    }
}

/// A volume whose requests wait while it is held: for what happens meanwhile.
pub(crate) struct HeldVolume {
    inner: Arc<dyn Volume>,
    held: AtomicBool,
    waiting: AtomicUsize,
}

impl HeldVolume {
    pub(crate) fn new(inner: Arc<dyn Volume>) -> Arc<Self> {
        Arc::new(Self { inner, held: AtomicBool::new(false), waiting: AtomicUsize::new(0) })
    }

    /// From now on, requests wait.
    pub(crate) fn hold(&self) {
        self.held.store(true, Ordering::SeqCst);
    }

    /// Requests go on.
    pub(crate) fn release(&self) {
        self.held.store(false, Ordering::SeqCst);
    }

    /// Requests that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    async fn wait(&self, cx: TaskContext<'_>) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        while self.held.load(Ordering::SeqCst) {
            // Looks again every so often, so that a test may stop stepping at any time.
            cx.io(IoOperation::Sleep(Duration::from_micros(50))).await;
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Volume for HeldVolume {
    millrace_block::passes_on!(inner but geometry);

    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.inner.geometry() }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if !self.held.load(Ordering::SeqCst) {
            return self.inner.submit(cx, request);
        }
        Step::Wait(cx.scratch.place_future(async move {
            self.wait(cx).await;
            self.inner.submit(cx, request).await
        }))
    }

    fn metadata(&self) -> Metadata {
        self.inner.metadata()
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        if !self.held.load(Ordering::SeqCst) {
            return self.inner.submit_tagged(cx, request);
        }
        Step::Wait(cx.scratch.place_future(async move {
            self.wait(cx).await;
            self.inner.submit_tagged(cx, request).await
        }))
    }

    fn scratch_bytes(&self) -> usize {
        1024 + self.inner.scratch_bytes()
    }

    fn erases_by_key(&self) -> bool {
        true
    }
}

/// A volume whose requests stand in line until they are called off, as at a throttle that lets nothing through. A call concerns those that stand
/// there then.
pub(crate) struct Line {
    inner: Arc<dyn Volume>,
    /// Requests do not come to the line yet.
    shut: AtomicBool,
    came: AtomicUsize,
    calls: AtomicUsize,
}

impl Line {
    pub(crate) fn new(inner: Arc<dyn Volume>) -> Arc<Self> {
        Arc::new(Self { inner, shut: AtomicBool::new(false), came: AtomicUsize::new(0), calls: AtomicUsize::new(0) })
    }

    /// Whether requests have to wait before they come to the line.
    pub(crate) fn shut(&self, on: bool) {
        self.shut.store(on, Ordering::SeqCst);
    }

    /// Requests that have come to the line.
    pub(crate) fn came(&self) -> usize {
        self.came.load(Ordering::SeqCst)
    }

    fn stand<'a>(&'a self, cx: TaskContext<'a>) -> Step<'a> {
        Step::Wait(cx.scratch.place_future(async move {
            while self.shut.load(Ordering::SeqCst) {
                cx.io(IoOperation::Sleep(Duration::from_micros(50))).await;
            }
            let call = self.calls.load(Ordering::SeqCst);
            self.came.fetch_add(1, Ordering::SeqCst);
            while self.calls.load(Ordering::SeqCst) == call {
                cx.io(IoOperation::Sleep(Duration::from_micros(50))).await;
            }
            Err(BlockError::CalledOff)
        }))
    }
}

impl Volume for Line {
    millrace_block::passes_on!(inner);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, _: Request<'a>) -> Step<'a> {
        self.stand(cx)
    }

    fn metadata(&self) -> Metadata {
        self.inner.metadata()
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, _: TaggedRequest) -> Step<'a> {
        self.stand(cx)
    }

    fn call_off(&self, _: Asker) {
        self.calls.fetch_add(1, Ordering::SeqCst);
    }

    fn scratch_bytes(&self) -> usize {
        1024 + self.inner.scratch_bytes()
    }
}

/// A volume in memory that keeps metadata.
pub(crate) struct TaggedMemory {
    inner: Arc<dyn Volume>,
    tags: Mutex<Vec<[u8; METADATA_SIZE]>>,
    shown: Mutex<Metadata>,
}

impl TaggedMemory {
    pub(crate) fn new(bytes: u64, block_size: BlockSize, metadata: Metadata) -> Arc<Self> {
        let inner = MemoryVolume::create("tagged", bytes, block_size).expect("a volume");
        let tags = vec![NO_METADATA; inner.geometry().blocks.0 as usize];
        Arc::new(Self { inner, tags: Mutex::new(tags), shown: Mutex::new(metadata) })
    }

    pub(crate) fn tags(&self) -> MutexGuard<'_, Vec<[u8; METADATA_SIZE]>> {
        self.tags.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Volume for TaggedMemory {
    fn name(&self) -> &'static str {
        "tagged"
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if request.operation.is_write() {
            self.tags()[request.lba.0 as usize..][..request.count.0 as usize].fill(NO_METADATA);
        }
        self.inner.submit(cx, request)
    }

    fn metadata(&self) -> Metadata {
        *self.shown.lock().expect("no panic")
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        let TaggedRequest { operation, lba, count, data, metadata } = request;
        let places = (lba.0 as usize..).zip(0..count.0 as usize);
        for (lba, at) in places {
            let tag = &mut self.tags()[lba];
            if operation == Operation::Read {
                metadata.write_at(at * METADATA_SIZE, tag);
            } else {
                metadata.read_at(at * METADATA_SIZE, tag);
            }
        }
        self.inner.submit(cx, Request { operation, lba, count, segments: cx.scratch.copy_slice(&[data]) })
    }

    fn format_metadata(&self, format: Option<MetadataFormat>) -> Result<(), VolumeError> {
        *self.shown.lock().expect("no panic") = format.map_or(Metadata::Hidden, Metadata::Shown);
        Ok(())
    }

    fn scratch_bytes(&self) -> usize {
        self.inner.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.inner.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.inner.format(block_size)?;
        *self.tags() = vec![NO_METADATA; self.geometry().blocks.0 as usize];
        Ok(())
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}
