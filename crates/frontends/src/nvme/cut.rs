//! The worker's death at every store: the model test of docs/survival.md.
//!
//! A guest on a real controller submits commands. Before every store to a region that outlives the worker, what would outlive it
//! there is copied: the regions, the guest's memory, the volume. Another controller takes over each copy. In each, every command must
//! complete exactly once, and the disk must hold what it may.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs::File,
    os::{fd::AsFd, unix::fs::FileExt},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, ByteOffset, Geometry, Lba, METADATA_SIZE, Metadata, MetadataFormat, Operation,
    Request, Step, TaggedRequest, TaskContext, Usage, Volume, VolumeError, check, yield_now,
};
use millrace_memory::{ByteStore, GuestAddress, Protection, Shared};
use millrace_nvme_spec::{
    admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11},
    command::{CommandFlags, Cqe, DataPointer, Fuse, NamespaceId, QueueId, Sqe},
    nvm::{CopyCdw12, CopyFormat, CopyRange},
    opcode::{AdminOpcode, NvmOpcode},
    reservation::{AcquireAction, AcquireData, RegisterAction, RegisterData, ReleaseAction, ReservationType},
};
use rustix::fs::{MemfdFlags, SealFlags};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    Host, Identity, Namespace,
    controller::Controller,
    fixture::{FakeGuest, MEMORY_BASE, MEMORY_SIZE, PAGE, TestHost, sqe, test_config},
    io::{RangeState, UncorrectableRanges},
    lasting::Lasting,
    namespace::Allocated,
    records::Records,
    reservation::{HostKey, Ledger, ReservationState, Reservations},
};

thread_local! {
    static HOOK: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A store is about to be made.
pub(crate) fn before_store() {
    if INSIDE.replace(true) {
        return;
    }
    HOOK.with(|hook| {
        if let Some(hook) = &mut *hook.borrow_mut() {
            hook();
        }
    });
    INSIDE.set(false);
}

/// Has this called before every store of this thread from now on; without one, nothing.
pub(crate) fn at_every_store(hook: Option<Box<dyn FnMut()>>) {
    HOOK.set(hook);
}

const BLOCK: u64 = 512;
const BLOCKS: u64 = 64;
/// Bytes of a disk, and of one that keeps metadata, which lie behind its blocks.
const PLAIN: usize = (BLOCKS * BLOCK) as usize;
const TAGGED: usize = PLAIN + BLOCKS as usize * METADATA_SIZE;
/// Where blocks are marked as uncorrectable: four, before those of the pairs.
const MARKS: u64 = BLOCKS - 12;
const ENTRIES: u32 = 32;
/// What copies read: a block with other contents than the rest.
const SOURCE: u64 = MARKS - 1;
const SOURCE_BYTE: u8 = 0xcc;
/// The controller, to reservations; and a key that nobody registers.
const HOST: u64 = 1 << 32;
const NOBODYS_KEY: u64 = 0xdead;
/// Commands of one run. All completions fit their queue, so that each is still there at the end.
const COMMANDS: usize = 12;

/// A disk that outlives the worker.
struct Disk {
    store: ByteStore,
    file: File,
    len: usize,
    /// All commands finish at once, none does, or every other one.
    late: u8,
    count: AtomicU64,
}

impl Disk {
    fn new(data: &[u8], late: u8) -> Arc<Self> {
        let file = File::from(rustix::fs::memfd_create("disk", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(data, 0).unwrap();
        let files = [file.try_clone().unwrap().into()];
        let store = ByteStore::in_files(data.len() as u64, &files, Box::new(|_, _| Ok(()))).unwrap();
        Arc::new(Self { store, file, len: data.len(), late, count: AtomicU64::new(0) })
    }

    fn contents(&self) -> Vec<u8> {
        contents(&self.file, self.len)
    }

    fn act(&self, request: &Request<'_>) -> Result<(), BlockError> {
        let (ByteOffset(at), len) = check(&self.geometry(), request)?;
        match request.operation {
            Operation::Read => self.store.read(at, request.segments),
            Operation::Write { .. } => self.store.write(at, request.segments),
            Operation::Compare if !self.store.equals(at, request.segments) => return Err(BlockError::Miscompare),
            Operation::WriteZeroes { .. } | Operation::Deallocate => self.store.zero(at, len),
            Operation::Copy { source } => self.store.copy_within(source.0 * BLOCK, at, len),
            Operation::Flush | Operation::Compare => {}
        }
        Ok(())
    }

    fn act_tagged(&self, request: &TaggedRequest) {
        let TaggedRequest { operation, lba, data, metadata, .. } = *request;
        for (at, part) in [(lba.0 * BLOCK, data), (PLAIN as u64 + lba.0 * METADATA_SIZE as u64, metadata)] {
            match operation {
                Operation::Read => self.store.read(at, &[part]),
                _ => self.store.write(at, &[part]),
            }
        }
    }

    /// Does something at once, or later.
    fn answer<'a>(&self, cx: TaskContext<'a>, act: impl FnOnce() -> Result<(), BlockError> + 'a) -> Step<'a> {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        if self.late == 0 || self.late == 2 && count.is_multiple_of(2) {
            return Step::Done(act());
        }
        Step::Wait(cx.scratch.place_future(async move {
            for _ in 0..=count % 3 {
                yield_now().await;
            }
            act()
        }))
    }
}

impl Volume for Disk {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn geometry(&self) -> Geometry {
        let block_size = BlockSize::B512;
        Geometry { block_size, blocks: BlockCount(BLOCKS), read_only: false, volatile_cache: true, deallocate: true }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.answer(cx, move || self.act(&request))
    }

    fn metadata(&self) -> Metadata {
        if self.len == PLAIN { Metadata::Never } else { Metadata::Shown(MetadataFormat::default()) }
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        self.answer(cx, move || {
            self.act_tagged(&request);
            Ok(())
        })
    }

    fn scratch_bytes(&self) -> usize {
        1024
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: "disk".to_owned(), what: "resizing" })
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        Err(VolumeError::Unsupported { volume: "disk".to_owned(), what: "formatting" })
    }

    fn usage(&self) -> Usage {
        Usage { allocated: 0 }
    }
}

/// What outlives the worker.
struct Copy {
    state: Vec<u8>,
    records: Vec<u8>,
    doorbells: Vec<u8>,
    memory: Vec<u8>,
    disk: Vec<u8>,
    tagged: Vec<u8>,
    reservations: Region,
    marks: Region,
}

/// A region whose type only its owner knows. What a run uses of a large one lies at the starts of its two places.
struct Region {
    file: File,
    len: u64,
}

impl Region {
    fn of<S: FromBytes>(lasting: &Lasting<S>) -> Self {
        Self { file: lasting.file().try_clone_to_owned().unwrap().into(), len: lasting.file_len() as u64 }
    }

    fn copy(&self) -> Self {
        let file = rustix::fs::memfd_create("copy", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, self.len).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let file = File::from(file);
        let mut bytes = vec![0; 4096];
        for page in (0..self.len / 4096).filter(|page| self.len <= 1 << 16 || page % (self.len / 8192) < 2) {
            self.file.read_exact_at(&mut bytes, page * 4096).unwrap();
            file.write_all_at(&bytes, page * 4096).unwrap();
        }
        Self { file, len: self.len }
    }

    fn lasting<S: FromBytes>(&self) -> Lasting<S> {
        Lasting::over(self.file.try_clone().unwrap().into())
    }
}

fn contents(file: &impl AsFd, len: usize) -> Vec<u8> {
    let file = File::from(file.as_fd().try_clone_to_owned().unwrap());
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn restored<T: FromBytes>(bytes: &[u8]) -> Shared<T> {
    let shared = Shared::<T>::new("copy").unwrap();
    File::from(shared.as_fd().try_clone_to_owned().unwrap()).write_all_at(bytes, 0).unwrap();
    shared
}

/// A fused pair: its block, what it compares with, what it writes, and its commands.
type Pair = (u64, u8, u8, [(u16, u16); 2]);

/// What a command may do to a block: each write that was submitted, and zeroes.
#[derive(Default)]
struct Expected {
    /// Commands by queue and identifier.
    commands: Vec<(u16, u16)>,
    /// Per block, the bytes it may be filled with; the first is what it was before.
    values: BTreeMap<u64, Vec<u8>>,
    pairs: Vec<Pair>,
    /// As `values`, of the disk with metadata: each block's and its metadata's.
    tagged: BTreeMap<u64, Vec<u8>>,
    /// Reads there: where blocks and metadata go, and how many.
    reads: Vec<(u64, u64, u64)>,
    /// Changes of reservations, and whether they fail.
    reservations: Vec<((u16, u16), bool)>,
    /// Blocks marked as uncorrectable.
    marks: Vec<u64>,
    /// Event requests, which wait.
    events: Vec<u16>,
    /// Queues that were created, and whether they were deleted again.
    queues: Vec<(u16, bool)>,
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

struct Run {
    guest: FakeGuest,
    disk: Arc<Disk>,
    tagged: Arc<Disk>,
    expected: Expected,
    random: Random,
    /// Before the first command.
    next_value: u8,
    namespace: Arc<Namespace>,
    cntlid: u16,
    /// What the reservations come to: all of them, the host's key, and whether it holds them.
    model: Reservations,
    key: u64,
    holds: bool,
}

fn attach(
    controller: &mut Controller,
    disk: &Arc<Disk>,
    reservations: Lasting<ReservationState>,
    marks: Lasting<RangeState>,
) -> Arc<Namespace> {
    let identity = Identity { uuid: [1; 16], eui64: [0; 8] };
    let (reservations, marks) = (Ledger::over(reservations), UncorrectableRanges::over(marks));
    let namespace = Namespace::over(Arc::clone(disk) as Arc<dyn Volume>, identity, true, reservations, marks);
    let allocated = Allocated { namespace: Arc::clone(&namespace), read_only: false, by_guest: false };
    controller.io.set_unique(HOST);
    controller.namespaces.allocate(1, allocated).unwrap();
    controller.namespaces.attach(1).unwrap();
    controller.note_attached(1, true);
    namespace
}

/// As namespace 2, with metadata in buffers of their own.
fn attach_tagged(controller: &mut Controller, disk: &Arc<Disk>) {
    let identity = Identity { uuid: [2; 16], eui64: [0; 8] };
    let namespace = Namespace::new(Arc::clone(disk) as Arc<dyn Volume>, identity, false);
    controller.namespaces.allocate(2, Allocated { namespace, read_only: false, by_guest: false }).unwrap();
    controller.namespaces.attach(2).unwrap();
    controller.note_attached(2, true);
}

impl Run {
    fn new(seed: u64, late: u8) -> Self {
        let mut data = vec![0xee; PLAIN];
        data[(SOURCE * BLOCK) as usize..][..BLOCK as usize].fill(SOURCE_BYTE);
        let (disk, tagged) = (Disk::new(&data, late), Disk::new(&vec![0xee; TAGGED], late));
        let mut guest = FakeGuest::boot();
        attach_tagged(&mut guest.controller, &tagged);
        let namespace = attach(&mut guest.controller, &disk, Lasting::alone(), Lasting::alone());
        guest.create_queues(1, ENTRIES);
        guest.create_queues(2, ENTRIES);
        let (expected, model, cntlid) = (Expected::default(), Reservations::default(), guest.controller.config.cntlid);
        let random = Random(seed | 1);
        Self { guest, disk, tagged, expected, random, next_value: 1, namespace, cntlid, model, key: 0, holds: false }
    }

    fn buffer(&mut self, byte: u8, blocks: u64) -> DataPointer {
        let at = self.guest.alloc_pages(1);
        self.guest.write(at, &vec![byte; (blocks * BLOCK) as usize]);
        DataPointer::prps(at, 0)
    }

    fn push(&mut self, qid: u16, sqe: Sqe) -> u16 {
        let cid = self.guest.push(qid, sqe);
        self.expected.commands.push((qid, cid));
        cid
    }

    fn io(&mut self, opcode: NvmOpcode, lba: u64, blocks: u64, byte: u8) -> Sqe {
        let mut command = sqe(opcode.0, 1);
        command.cdw10 = lba as u32;
        command.cdw12 = (blocks - 1) as u32;
        command.dptr = self.buffer(byte, blocks);
        command
    }

    fn fresh(&mut self, lba: u64, blocks: u64) -> u8 {
        let byte = self.next_value;
        self.next_value += 1;
        for block in lba..lba + blocks {
            self.expected.values.entry(block).or_insert_with(|| vec![0xee]).push(byte);
        }
        byte
    }

    /// One command, or a pair, of any kind.
    fn submit(&mut self) {
        let qid = 1 + self.random.below(2) as u16;
        // The last blocks are the copies' source, the marks' and the pairs': nobody else writes there.
        let (lba, blocks) = (self.random.below(SOURCE - 4), 1 + self.random.below(4));
        match self.random.below(20) {
            18.. => self.tagged(qid),
            16 => self.copy(),
            17 => self.event_request(),
            12..15 => self.reservation(),
            15 => self.mark(),
            0..4 => {
                let byte = self.fresh(lba, blocks);
                let command = self.io(NvmOpcode::WRITE, lba, blocks, byte);
                self.push(qid, command);
            }
            4..6 => {
                let command = self.io(NvmOpcode::READ, lba, blocks, 0x77);
                self.push(qid, command);
            }
            6 => drop(self.push(qid, sqe(NvmOpcode::FLUSH.0, 1))),
            7 => {
                (lba..lba + blocks)
                    .for_each(|block| self.expected.values.entry(block).or_insert_with(|| vec![0xee]).push(0));
                let mut command = sqe(NvmOpcode::WRITE_ZEROES.0, 1);
                (command.cdw10, command.cdw12) = (lba as u32, (blocks - 1) as u32);
                self.push(qid, command);
            }
            8 => {
                // A range beyond the end fails, once.
                let command = self.io(NvmOpcode::READ, BLOCKS, 1, 0);
                self.push(qid, command);
            }
            9 => {
                self.push(0, sqe(AdminOpcode::IDENTIFY.0, 0));
            }
            10 => self.queue_pair(),
            _ => self.pair(qid),
        }
    }

    /// A change of the reservations, or one that fails whatever is in flight beside it. All are in one queue: so they have an order.
    fn reservation(&mut self) {
        let host = HostKey::new([0; 16], false, HOST);
        let (key, fails) = (self.key, self.random.below(5) == 0);
        let (opcode, cdw10, words) = match (key, self.random.below(3), self.holds) {
            _ if fails => (NvmOpcode::RESERVATION_ACQUIRE, 1 << 8, [NOBODYS_KEY, 0]),
            (0, ..) => {
                self.key = 1;
                let data = RegisterData { crkey: 0, nrkey: 1 };
                self.model.register(host, self.cntlid, RegisterAction::REGISTER, false, &data).unwrap();
                (NvmOpcode::RESERVATION_REGISTER, 0, [0, 1])
            }
            (_, 0, _) => {
                self.key += 1;
                let data = RegisterData { crkey: key, nrkey: key + 1 };
                self.model.register(host, self.cntlid, RegisterAction::REPLACE, false, &data).unwrap();
                (NvmOpcode::RESERVATION_REGISTER, 2, [key, key + 1])
            }
            (_, 1, _) => {
                (self.key, self.holds) = (0, false);
                let data = RegisterData { crkey: key, nrkey: 0 };
                self.model.register(host, self.cntlid, RegisterAction::UNREGISTER, false, &data).unwrap();
                (NvmOpcode::RESERVATION_REGISTER, 1, [key, 0])
            }
            (.., false) => {
                self.holds = true;
                let data = AcquireData { crkey: key, prkey: 0 };
                self.model.acquire(host, AcquireAction::ACQUIRE, ReservationType::WRITE_EXCLUSIVE, &data).unwrap();
                (NvmOpcode::RESERVATION_ACQUIRE, 1 << 8, [key, 0])
            }
            (.., true) => {
                self.holds = false;
                self.model.release(host, ReleaseAction::RELEASE, ReservationType::WRITE_EXCLUSIVE, key).unwrap();
                (NvmOpcode::RESERVATION_RELEASE, 1 << 8, [key, 0])
            }
        };
        let mut command = sqe(opcode.0, 1);
        let at = self.guest.alloc_pages(1);
        self.guest.write(at, words.as_bytes());
        (command.dptr, command.cdw10) = (DataPointer::prps(at, 0), cdw10);
        let cid = self.push(1, command);
        self.expected.reservations.push(((1, cid), fails));
    }

    /// A copy of the source block, twice, to two blocks.
    fn copy(&mut self) {
        let (qid, target) = (1 + self.random.below(2) as u16, self.random.below(SOURCE - 2));
        for block in [target, target + 1] {
            self.expected.values.entry(block).or_insert_with(|| vec![0xee]).push(SOURCE_BYTE);
        }
        let mut command = sqe(NvmOpcode::COPY.0, 1);
        command.set_cdw10_11(target);
        command.cdw12 = CopyCdw12::new().with_nr_z(1).with_format(CopyFormat::SLBA_32).into_bits();
        let at = self.guest.alloc_pages(1);
        self.guest.write(at, [CopyRange::new(NamespaceId::NONE, SOURCE, 0); 2].as_bytes());
        command.dptr = DataPointer::prps(at, 0);
        self.push(qid, command);
    }

    /// A write or read of blocks with metadata: one byte throughout.
    fn tagged(&mut self, qid: u16) {
        let (lba, blocks) = (self.random.below(BLOCKS - 4), 1 + self.random.below(4));
        let is_write = self.random.below(2) == 0;
        let (opcode, byte) = if is_write { (NvmOpcode::WRITE, self.next_value) } else { (NvmOpcode::READ, 0x77) };
        let mut command = self.io(opcode, lba, blocks, byte);
        (command.nsid, command.mptr) = (NamespaceId(2), self.guest.alloc_pages(1) + 20);
        self.guest.write(command.mptr, &vec![byte; blocks as usize * METADATA_SIZE]);
        if is_write {
            self.next_value += 1;
            (lba..lba + blocks).for_each(|block| self.expected.tagged.entry(block).or_insert_with(|| vec![0xee]).push(byte));
        } else {
            self.expected.reads.push((command.dptr.prp1, command.mptr, blocks));
        }
        self.push(qid, command);
    }

    fn event_request(&mut self) {
        if self.expected.events.len() == 3 {
            return;
        }
        let cid = self.guest.push(0, sqe(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0));
        self.expected.events.push(cid);
    }

    /// A block marked as uncorrectable, where nobody writes.
    fn mark(&mut self) {
        let mut command = sqe(NvmOpcode::WRITE_UNCORRECTABLE.0, 1);
        let block = MARKS + self.random.below(4);
        command.cdw10 = block as u32;
        self.push(2, command);
        self.expected.marks.push(block);
    }

    /// Compare and Write of a block of its own.
    fn pair(&mut self, qid: u16) {
        let block = BLOCKS - 1 - self.expected.pairs.len() as u64;
        if block < BLOCKS - 8 {
            return;
        }
        let (old, new) = (if self.random.below(4) == 0 { 0x55 } else { 0xee }, self.next_value);
        self.next_value += 1;
        let fuse = |fuse| CommandFlags::new().with_fuse(fuse);
        let mut compare = self.io(NvmOpcode::COMPARE, block, 1, old);
        compare.flags = fuse(Fuse::FIRST);
        let mut write = self.io(NvmOpcode::WRITE, block, 1, new);
        write.flags = fuse(Fuse::SECOND);
        let ids = [(qid, self.push(qid, compare)), (qid, self.push(qid, write))];
        self.expected.pairs.push((block, old, new, ids));
    }

    /// Creation of a completion queue and of its submission queue: the latter needs the former. Every other time they are deleted
    /// again.
    fn queue_pair(&mut self) {
        if self.expected.commands.iter().filter(|(qid, _)| *qid == 0).count() > 4 {
            return;
        }
        let qid = 3 + self.expected.queues.len() as u16;
        let size = CreateQueueCdw10::new().with_qid(QueueId(qid)).with_qsize_z(15).into_bits();
        let cq = CreateCqCdw11::new().with_pc(true).with_ien(true).with_iv(qid).into_bits();
        let sq = CreateSqCdw11::new().with_pc(true).with_cqid(QueueId(qid)).into_bits();
        for (opcode, cdw11) in [(AdminOpcode::CREATE_IO_CQ, cq), (AdminOpcode::CREATE_IO_SQ, sq)] {
            let mut command = sqe(opcode.0, 0);
            let base = self.guest.alloc_pages(1);
            (command.dptr, command.cdw10, command.cdw11) = (DataPointer::prps(base, 0), size, cdw11);
            self.push(0, command);
        }
        let deleted = self.random.below(2) == 0;
        for opcode in [AdminOpcode::DELETE_IO_SQ, AdminOpcode::DELETE_IO_CQ].into_iter().filter(|_| deleted) {
            let mut command = sqe(opcode.0, 0);
            command.cdw10 = u32::from(qid);
            self.push(0, command);
        }
        self.expected.queues.push((qid, deleted));
    }

    /// Everything that would outlive the worker now.
    fn copier(&self) -> impl FnMut() -> Copy + use<> {
        let controller = &self.guest.controller;
        let clone = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned().unwrap();
        let (state, records, doorbells) =
            (clone(&controller.state), clone(&*controller.records), clone(&controller.doorbells));
        let memory = self.guest.memory.try_clone().unwrap();
        let (disk, tagged) = (Arc::clone(&self.disk), Arc::clone(&self.tagged));
        let reservations = Region::of(self.namespace.reservations().lasting());
        let marks = self.namespace.uncorrectable.with_lasting(Region::of);
        let state_len = controller.state.file_len() as usize;
        let used = (self.guest.used_memory() - MEMORY_BASE) as usize;
        let doorbell_len = controller.doorbells.file_len() as usize;
        move || Copy {
            state: contents(&state, state_len),
            records: contents(&records, RECORD_BYTES),
            doorbells: contents(&doorbells, doorbell_len),
            memory: contents(&memory, used),
            disk: disk.contents(),
            tagged: tagged.contents(),
            reservations: reservations.copy(),
            marks: marks.copy(),
        }
    }
}

/// Bytes of the records that a run uses: the header and a few dozen.
const RECORD_BYTES: usize = 8192;

/// What is there when all is done.
struct After {
    memory: Vec<u8>,
    /// The page at address 0, where nothing is.
    lowest: Vec<u8>,
    disk: Vec<u8>,
    tagged: Vec<u8>,
    /// Report of the reservations.
    report: Vec<u8>,
    namespace: Arc<Namespace>,
    /// Event requests that wait.
    events: Vec<u16>,
    /// Queues that there are.
    queues: Vec<u16>,
}

/// A worker takes over, and runs until nothing is to be done.
fn take_over(copy: &Copy, guest: &mut FakeGuest) -> After {
    let (disk, tagged) = (Disk::new(&copy.disk, 2), Disk::new(&copy.tagged, 2));
    let [memory, lowest] =
        ["copy", "lowest"].map(|name| File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap()));
    memory.set_len(MEMORY_SIZE).unwrap();
    memory.write_all_at(&copy.memory, 0).unwrap();
    lowest.set_len(PAGE).unwrap();
    let host = Arc::new(TestHost::default()) as Arc<dyn Host>;
    let records = Records::from_bytes(&copy.records);
    let mut controller = Controller::over(test_config(), host, restored(&copy.state), restored(&copy.doorbells), records);
    let all = Protection { read: true, write: true };
    for (base, size, file) in [(MEMORY_BASE, MEMORY_SIZE, &memory), (0, PAGE, &lowest)] {
        controller.memory.map(GuestAddress(base), size, all, Some((file.as_fd(), 0))).unwrap();
    }
    controller.resume();
    attach_tagged(&mut controller, &tagged);
    let namespace = attach(&mut controller, &disk, copy.reservations.lasting(), copy.marks.lasting());
    controller.redo_pairs(&mut guest.shard.context());
    let old = std::mem::replace(&mut guest.controller, controller);
    let mut idle = 0;
    while idle < 3 {
        idle = if guest.step() == 0 { idle + 1 } else { 0 };
    }
    let mut gone = std::mem::replace(&mut guest.controller, old);
    let (mut events, queues) =
        (gone.event_requests().collect::<Vec<_>>(), (3..8).filter(|qid| gone.sq_exists(*qid)).collect());
    events.sort_unstable();
    // Nothing is in flight: the memory may go, and does on another thread.
    gone.memory.unmap_all();
    gone.drained();
    drop(gone);
    let report = namespace.reservations().now().report(false);
    let (memory, lowest) = (contents(&memory, copy.memory.len()), contents(&lowest, PAGE as usize));
    After { memory, lowest, disk: disk.contents(), tagged: tagged.contents(), report, namespace, events, queues }
}

/// What is there after a takeover must be what there may be.
fn verify(run: &Expected, queues: &BTreeMap<u16, (u64, u32)>, first: &BTreeMap<u16, u32>, after: &After, note: &str) {
    let (memory, disk) = (&after.memory, &after.disk);
    let mut seen: BTreeMap<(u16, u16), Vec<Cqe>> = BTreeMap::new();
    for (&qid, &(base, entries)) in queues {
        for index in first[&qid]..entries {
            let at = (base - MEMORY_BASE) as usize + index as usize * Cqe::SIZE;
            let cqe = Cqe::read_from_bytes(&memory[at..at + Cqe::SIZE]).unwrap();
            if cqe.phase() {
                seen.entry((qid, cqe.cid.0)).or_default().push(cqe);
            }
        }
    }
    for command in &run.commands {
        let count = seen.get(command).map_or(0, Vec::len);
        assert_eq!(count, 1, "{note}: command {command:?} completed {count} times");
    }
    assert_eq!(seen.len(), run.commands.len(), "{note}: completions of nothing");
    for (command, fails) in &run.reservations {
        assert_eq!(seen[command][0].status().is_success(), !fails, "{note}: reservation command {command:?}");
    }
    let mut events = run.events.clone();
    events.sort_unstable();
    assert_eq!(after.events, events, "{note}: event requests");
    let queues: Vec<u16> = run.queues.iter().filter(|(_, deleted)| !deleted).map(|(qid, _)| *qid).collect();
    assert_eq!(after.queues, queues, "{note}: queues");
    for &block in &run.marks {
        let marked = after.namespace.uncorrectable.overlaps(Lba(block), BlockCount(1));
        assert!(marked, "{note}: block {block} has lost its mark");
    }
    for (&block, values) in &run.values {
        let bytes = &disk[(block * BLOCK) as usize..][..BLOCK as usize];
        let one = bytes[0];
        assert!(bytes.iter().all(|byte| *byte == one), "{note}: block {block} is torn");
        assert!(values[1..].contains(&one), "{note}: block {block} holds {one:#x}, not one of {values:x?}");
    }
    for &(block, old, new, [first, second]) in &run.pairs {
        let byte = disk[(block * BLOCK) as usize];
        let status = |command| seen[&command][0].status();
        let (first, second) = (status(first), status(second));
        if old == 0xee {
            assert!(first.is_success() && second.is_success(), "{note}: pair on {block}: {first}, {second}");
            assert_eq!(byte, new, "{note}: a pair's write");
        } else {
            assert!(!first.is_success() && !second.is_success(), "{note}: pair on {block}: {first}, {second}");
            assert_eq!(byte, 0xee, "{note}: a pair that did not match");
        }
    }
}

/// Blocks with metadata must be whole, on the disk and where they were read, and nothing be where no command points.
fn verify_tagged(run: &Expected, after: &After, note: &str) {
    let metadata = |block: u64| block as usize * METADATA_SIZE;
    for (&block, values) in &run.tagged {
        let bytes = &after.tagged[(block * BLOCK) as usize..][..BLOCK as usize];
        let (one, tag) = (bytes[0], &after.tagged[PLAIN + metadata(block)..][..METADATA_SIZE]);
        assert!(bytes.iter().all(|byte| *byte == one), "{note}: tagged block {block} is torn");
        assert!(values[1..].contains(&one), "{note}: tagged block {block} holds {one:#x}, not one of {values:x?}");
        assert_eq!(tag, [one; METADATA_SIZE], "{note}: the metadata of block {block}");
    }
    for &(data, tags, blocks) in &run.reads {
        let [data, tags] = [data, tags].map(|at| &after.memory[(at - MEMORY_BASE) as usize..]);
        for block in 0..blocks {
            let one = data[(block * BLOCK) as usize];
            assert_eq!(tags[metadata(block)..][..METADATA_SIZE], [one; METADATA_SIZE], "{note}: metadata that were read");
        }
    }
    assert!(after.lowest.iter().all(|byte| *byte == 0), "{note}: the page at address 0");
}

/// A run of random commands, and a takeover before each of its stores. Returns how many there were.
fn cut_everywhere(seed: u64, late: u8, spare: &mut FakeGuest) -> usize {
    let mut run = Run::new(seed, late);
    while run.expected.commands.len() < COMMANDS {
        run.submit();
    }
    let queues: BTreeMap<u16, (u64, u32)> =
        run.guest.queues.iter().map(|(qid, pair)| (*qid, (pair.cq_base, pair.entries))).collect();
    let first = run.guest.queues.iter().map(|(qid, pair)| (*qid, pair.head)).collect();
    let (mut copier, copies) = (run.copier(), Rc::new(RefCell::new(Vec::new())));
    let into = Rc::clone(&copies);
    for qid in 0..3 {
        run.guest.ring(qid);
    }
    HOOK.set(Some(Box::new(move || into.borrow_mut().push(copier()))));
    run.guest.settle();
    HOOK.set(None);
    let copies = copies.take();
    INSIDE.set(true);
    for (at, copy) in copies.iter().enumerate() {
        let after = take_over(copy, spare);
        let note = format!("seed {seed}, kind {late}, store {at}");
        verify(&run.expected, &queues, &first, &after, &note);
        verify_tagged(&run.expected, &after, &note);
        assert_eq!(after.report, run.model.report(false), "{note}: reservations");
    }
    INSIDE.set(false);
    copies.len()
}

/// Cut points of the usual run; `MILLRACE_CUTS` says another number.
fn cuts() -> usize {
    std::env::var("MILLRACE_CUTS").ok().map_or(100_000, |cuts| cuts.parse().expect("MILLRACE_CUTS is a number"))
}

/// Half of the cuts: every other run, of so many.
fn cut_every_other(first: u64) {
    let start = std::env::var("MILLRACE_CUT_SEED").ok().map(|seed| seed.parse().expect("MILLRACE_CUT_SEED is a number"));
    let start = start.unwrap_or_else(|| u64::from(std::process::id()) << 20);
    println!("every other seed from {start} on: MILLRACE_CUT_SEED={start} repeats it");
    let mut spare = FakeGuest::new(test_config());
    let (mut done, mut seed) = (0, start + first);
    while done < cuts().div_ceil(2) {
        done += cut_everywhere(seed, (seed % 3) as u8, &mut spare);
        seed += 2;
    }
    println!("{done} cuts, {} runs", (seed - start) / 2);
}

// Two tests, to be run side by side.

#[test]
fn a_worker_may_end_before_any_store() {
    cut_every_other(0);
}

#[test]
fn a_worker_may_end_before_any_store_of_the_other_runs() {
    cut_every_other(1);
}
