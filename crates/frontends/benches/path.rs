//! Cycles per I/O of the data path, without a client's and without other cores' cost.
//!
//! ```text
//!   cargo bench -p millrace-frontends --bench path -- [rounds=N] [FILTER…]
//! ```
//!
//! A filter is a part of a load's name: `stack-concat`, `4k-read`. More rounds are for profilers. With `--features stages` it also says where the time goes;
//! the time between batches counts as the loop's (`other`) then.
//!
//! One thread is guest and daemon in turn. The guest's part costs nothing that is measured: its entries lie in the submission
//! queue before, it stores one tail, and then the shard's passes are timed until all its commands are complete. What is left out
//! is what two cores cost each other. The minimum is what the code takes; the median says how noisy the machine is.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use millrace_backends::{FileOptions, FileVolume, MemoryVolume, NullVolume};
use millrace_block::{BlockSize, Switch, Volume, trace::Tap};
use millrace_engine::{
    Device, DeviceKey, EngineError, Shard, ShardConfig, ShardContext,
    stages::{self, Stage, StageTimes},
};
use millrace_frontends::nvme::{
    self, Config, DeviceError, Host, HostReply, Identity, Namespace, NewFormat, NvmeDevice, Status,
};
use millrace_memory::{Mapping, Segment};
use millrace_nvme_spec::{
    AdminOpcode, Cqe, NvmOpcode, Sqe,
    admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11},
    command::{CommandId, DataPointer, NamespaceId, QueueId},
    registers::offset,
};
use millrace_services::{
    Node, Reason, SharedObjects,
    background::{Running, Spawner, Stop, Task},
    graph::{Graph, LeafError, LeafRequest, Leaves, Plan},
};
use millrace_vfio_user::{Client, Listener, Mapping as DmaMapping, pci};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const BASE: u64 = 0x4000_0000;
const SIZE: u64 = 64 << 20;
/// Entries of the queues.
const ENTRIES: u32 = 1024;
const ADMIN_SQ: u64 = 0;
const ADMIN_CQ: u64 = 0x1000;
const SQ: u64 = 0x1_0000;
const CQ: u64 = 0x2_0000;
const LISTS: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
const PATIENCE: Duration = Duration::from_secs(20);

/// Nothing that a guest could ask for is there.
struct NoHost;

impl Host for NoHost {
    fn create_namespace(&self, _: &str, _: u32, _: u64, _: BlockSize, reply: HostReply<Arc<Namespace>>) {
        reply.send(Err(Status::INTERNAL_ERROR));
    }

    fn delete_namespace(&self, _: &str, _: u32, reply: HostReply<()>) {
        reply.send(Err(Status::INTERNAL_ERROR));
    }

    fn format(&self, _: &str, _: Arc<Namespace>, _: NewFormat, reply: HostReply<()>) {
        reply.send(Err(Status::INTERNAL_ERROR));
    }

    fn attachment_changed(&self, _: &str, _: u32, _: bool) {}

    fn reservation_notice(&self, _: &Arc<Namespace>, _: &[([u8; 16], u8)]) {}
}

/// The time stamp counter, or nanoseconds where there is none.
#[inline]
fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction only reads a counter.
    return unsafe {
        std::arch::x86_64::_mm_lfence();
        std::arch::x86_64::_rdtsc()
    };
    #[cfg(not(target_arch = "x86_64"))]
    {
        use std::sync::OnceLock;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// What two looks at the counter cost.
fn overhead() -> u64 {
    (0..1000).map(|_| ticks().wrapping_neg().wrapping_add(ticks())).min().unwrap_or(0)
}

/// The doorbells' file, and where in it they begin.
type Doorbells = (OwnedFd, u64);

/// Sets a guest up, on a thread of its own while the caller's runs the shard. The client stays connected for good.
fn wire(socket: &Path, memory: &File, interrupts: bool) -> Doorbells {
    let mut client = Client::connect(socket, PATIENCE).expect("a connection");
    let map = DmaMapping { address: BASE, size: SIZE, offset: 0, readable: true, writable: true };
    client.dma_map(&map, Some(memory.as_fd())).expect("mapped");
    let region = client.region_info(pci::REGION_BAR0).expect("BAR0");
    let doorbells = (region.fd.expect("shared doorbells"), region.offset + region.areas[0].offset);
    if interrupts {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let eventfd = rustix::event::eventfd(0, flags).expect("an eventfd");
        client.set_irq_eventfds(pci::IRQ_MSIX, 1, &[eventfd.as_fd()]).expect("wired");
    }
    let write =
        |client: &mut Client, at, bytes: &[u8]| client.region_write(pci::REGION_BAR0, at, bytes).expect("a register");
    write(&mut client, offset::AQA, &(63_u32 << 16 | 63).to_le_bytes());
    write(&mut client, offset::ASQ, &(BASE + ADMIN_SQ).to_le_bytes());
    write(&mut client, offset::ACQ, &(BASE + ADMIN_CQ).to_le_bytes());
    write(&mut client, offset::CC, &(4_u32 << 20 | 6 << 16 | 1).to_le_bytes());
    let guest = map_memory(memory);
    let bells = map_doorbells(&doorbells);
    let size = CreateQueueCdw10::new().with_qid(QueueId(1)).with_qsize_z((ENTRIES - 1) as u16).into_bits();
    let cq = CreateCqCdw11::new().with_pc(true).with_ien(interrupts).with_iv(1).into_bits();
    let sq = CreateSqCdw11::new().with_pc(true).with_cqid(QueueId(1)).into_bits();
    let creates = [(AdminOpcode::CREATE_IO_CQ, BASE + CQ, cq), (AdminOpcode::CREATE_IO_SQ, BASE + SQ, sq)];
    for (at, (opcode, base, cdw11)) in (0_u32..).zip(creates) {
        let mut create = Sqe::new_zeroed();
        (create.opcode, create.cid) = (opcode.0, CommandId(at as u16));
        (create.dptr, create.cdw10, create.cdw11) = (DataPointer::prps(base, 0), size, cdw11);
        guest.write_at(ADMIN_SQ as usize + at as usize * Sqe::SIZE, create.as_bytes());
        bells.store_u32(0, at + 1);
        let limit = Instant::now() + PATIENCE;
        let entry = ADMIN_CQ as usize + at as usize * Cqe::SIZE;
        while guest.load_u32(entry + 12) >> 16 & 1 == 0 {
            assert!(Instant::now() < limit, "no completion");
            thread::sleep(Duration::from_micros(20));
        }
        assert!(cqe_at(&guest, entry).status().is_success());
        bells.store_u32(4, at + 1);
    }
    std::mem::forget(client);
    doorbells
}

fn cqe_at(guest: &Segment, at: usize) -> Cqe {
    let mut bytes = [0; Cqe::SIZE];
    guest.read_at(at, &mut bytes);
    Cqe::read_from_bytes(&bytes).expect("16 bytes")
}

/// Maps for good.
fn keep(mapping: Mapping) -> Segment {
    let mapping = Box::leak(Box::new(mapping));
    // SAFETY: the mapping is writable and never unmapped.
    unsafe { mapping.segment(0, mapping.len()) }.expect("all of it")
}

fn map_memory(memory: &File) -> Segment {
    keep(Mapping::shared(memory.as_fd(), 0, SIZE as usize, true).expect("mapped"))
}

fn map_doorbells((fd, at): &Doorbells) -> Segment {
    keep(Mapping::shared(fd.as_fd(), *at, 4096, true).expect("mapped"))
}

/// A shard with one device, and its guest.
struct Rig {
    shard: Shard,
    guest: Segment,
    bells: Segment,
    tail: u32,
    seed: u64,
    /// The next block, while the volume is filled from end to end.
    filled: Option<u64>,
    _dir: tempfile::TempDir,
}

/// What is measured.
#[derive(Clone, Copy)]
struct Load {
    write: bool,
    bytes: u64,
    depth: u32,
    /// Bytes of the volume that are used, at random.
    span: u64,
}

impl Rig {
    fn new(volume: Arc<dyn Volume>, interrupts: bool, idle: usize) -> Self {
        let mut shard = Shard::new(&ShardConfig::new(0, None)).expect("a shard");
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("device");
        add(&mut shard, &socket, volume);
        let memory = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd"));
        memory.set_len(SIZE).expect("room");
        let file = memory.try_clone().expect("a descriptor");
        let doorbells = run_beside(&mut shard, move || wire(&socket, &file, interrupts));
        let guest = map_memory(&memory);
        guest.part(DATA as usize, (SIZE - DATA) as usize).expect("the data").fill(7);
        for number in 0..idle {
            let socket = dir.path().join(format!("idle-{number}"));
            let volume = NullVolume::create("idle", 1 << 30, BlockSize::B4096).expect("a volume");
            add(&mut shard, &socket, volume);
            let memory = memory.try_clone().expect("a descriptor");
            run_beside(&mut shard, move || wire(&socket, &memory, false));
        }
        let bells = map_doorbells(&doorbells);
        // Until those that are idle have gone cold.
        let cold = Instant::now() + Duration::from_millis(100);
        while idle > 0 && Instant::now() < cold {
            shard.poll();
        }
        Self { shard, guest, bells, tail: 0, seed: 1, filled: None, _dir: dir }
    }

    fn random(&mut self) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.seed >> 33
    }

    /// Writes the next commands into the queue.
    fn prepare(&mut self, load: Load) {
        for i in 0..load.depth {
            let slot = (self.tail + i) % ENTRIES;
            let mut sqe = Sqe::new_zeroed();
            sqe.opcode = if load.write { NvmOpcode::WRITE.0 } else { NvmOpcode::READ.0 };
            (sqe.cid, sqe.nsid) = (CommandId(slot as u16), NamespaceId(1));
            let room = (SIZE - DATA) / load.bytes;
            let buffer = BASE + DATA + u64::from(i) % room * load.bytes;
            sqe.dptr = self.data_pointer(i, buffer, load.bytes);
            let place = match &mut self.filled {
                Some(next) => std::mem::replace(next, *next + 1),
                None => self.random(),
            };
            sqe.set_cdw10_11(place % (load.span / load.bytes) * (load.bytes / 4096));
            sqe.cdw12 = (load.bytes / 4096 - 1) as u32;
            self.guest.write_at(SQ as usize + slot as usize * Sqe::SIZE, sqe.as_bytes());
        }
    }

    fn data_pointer(&self, slot: u32, buffer: u64, bytes: u64) -> DataPointer {
        match bytes / 4096 {
            1 => DataPointer::prps(buffer, 0),
            2 => DataPointer::prps(buffer, buffer + 4096),
            pages => {
                let list = LISTS + u64::from(slot % 256) * 4096;
                for page in 1..pages {
                    self.guest.write_value((list + (page - 1) * 8) as usize, &(buffer + page * 4096));
                }
                DataPointer::prps(buffer, BASE + list)
            }
        }
    }

    /// Writes all of the volume, so that every page is there.
    fn fill(&mut self, bytes: u64) {
        let load = Load { write: true, bytes: 128 << 10, depth: 32, span: bytes };
        self.filled = Some(0);
        (0..bytes >> 22).for_each(|_| _ = self.batch(load, 0));
        self.filled = None;
    }

    /// One batch: ticks from the doorbell to the last completion.
    fn batch(&mut self, load: Load, overhead: u64) -> u64 {
        self.prepare(load);
        let tail = (self.tail + load.depth) % ENTRIES;
        let last = CQ as usize + ((tail + ENTRIES - 1) % ENTRIES) as usize * Cqe::SIZE + 12;
        let before = self.guest.load_u32(last) >> 16 & 1;
        self.bells.store_u32(8, tail);
        let start = ticks();
        loop {
            self.shard.poll();
            // Completions come in any order; the entry that turns last is the last one.
            if self.guest.load_u32(last) >> 16 & 1 != before {
                break;
            }
        }
        let took = ticks() - start;
        assert!(cqe_at(&self.guest, last - 12).status().is_success(), "a command failed");
        self.tail = tail;
        self.bells.store_u32(12, tail);
        took.saturating_sub(overhead)
    }

    fn measure(&mut self, name: &str, load: Load, rounds: u64) {
        let overhead = overhead();
        let batches = rounds * if load.bytes > 4096 { 300 } else { 20_000 / u64::from(load.depth).max(4) + 200 };
        let before = stages::times();
        let mut all: Vec<u64> = (0..batches + 20).map(|_| self.batch(load, overhead)).skip(20).collect();
        all.sort_unstable();
        #[expect(clippy::cast_precision_loss, reason = "cycles of hours are exact")]
        let each = |at: usize| all[at] as f64 / f64::from(load.depth);
        let (least, median) = (each(0), each(all.len() / 2));
        println!("{name:<34} depth {:>3}  min {least:>9.1}  median {median:>9.1}  cycles per I/O", load.depth);
        if cfg!(feature = "stages") {
            print_stages(before, (batches + 20) * u64::from(load.depth));
        }
    }
}

/// What it costs a command that it is on record, alone: those that finish at once are not.
#[expect(clippy::cast_precision_loss, reason = "printed with one digit")]
fn measure_records(depth: usize, rounds: u64) {
    let (overhead, mut all, mut start) = (overhead(), Vec::new(), ticks());
    let exercised = nvme::exercise_records(20_000 * rounds, depth, || {
        all.push((ticks() - start).saturating_sub(overhead));
        start = ticks();
    });
    exercised.expect("shared memory for the records");
    all.sort_unstable();
    let each = |at: usize| all[at] as f64 / depth as f64;
    let (least, median) = (each(0), each(all.len() / 2));
    println!("{:<34} depth {depth:>3}  min {least:>9.1}  median {median:>9.1}  cycles per I/O", "records");
}

/// Prints where the time went, in ticks per command, without what counting took.
#[allow(clippy::cast_precision_loss)] // printed with one digit
fn print_stages(before: StageTimes, commands: u64) {
    for ((stage, before), after) in Stage::ALL.into_iter().zip(before).zip(stages::times()) {
        let ticks = after.net().saturating_sub(before.net());
        println!("    {:<12} {:>9.1}", stage.name(), ticks as f64 / commands as f64);
    }
}

fn add(shard: &mut Shard, socket: &Path, volume: Arc<dyn Volume>) -> DeviceKey {
    let make = |cx: &mut ShardContext<'_>| {
        let listener = Listener::bind(socket).expect("a socket");
        let mut device = NvmeDevice::new(Config::new("path"), listener, Arc::new(NoHost), cx)?;
        let identity = Identity { uuid: [1; 16], eui64: [0; 8] };
        device.attach(None, Namespace::new(volume, identity, false), false)?;
        Ok::<Box<dyn Device>, DeviceError>(Box::new(device))
    };
    shard.add_device_with(make).expect("a device")
}

/// Runs the shard until a thread is done.
fn run_beside<R: Send + 'static>(shard: &mut Shard, work: impl FnOnce() -> R + Send + 'static) -> R {
    let thread = thread::spawn(work);
    while !thread.is_finished() {
        shard.turn();
    }
    thread.join().expect("the guest is set up")
}

/// Opens the leaves of stacks.
struct InMemory;

impl Leaves for InMemory {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        let size = request.size.expect("a leaf is told its size");
        Ok(match &*request.leaf.spec {
            "null" => NullVolume::create(&request.name, size, request.block_size)?,
            "memory" => MemoryVolume::create(&request.name, size, request.block_size)?,
            other => panic!("no leaf {other}"),
        })
    }
}

/// Nothing is done beside requests.
struct Nowhere;

impl Spawner for Nowhere {
    fn spawn(&self, _: Task, _: Stop, _: Running) -> Result<(), EngineError> {
        Ok(())
    }
}

/// A stack of services behind its switch, as in the daemon. Its graph is there for good.
fn stack(text: &str, bytes: u64) -> Arc<dyn Volume> {
    let key = tempfile::NamedTempFile::new().expect("a file for a key");
    std::fs::write(key.path(), "5a".repeat(32)).expect("room for a key");
    let node: Node = text.replace("KEY", &key.path().display().to_string()).parse().expect("a stack");
    let plan = Plan { volume: "path", stack: &node, size: Some(bytes), block_size: BlockSize::B4096 };
    let spawner: Arc<dyn Spawner> = Arc::new(Nowhere);
    let mut graph = Graph::build(&plan, &InMemory, &SharedObjects::default(), &spawner, None).expect("a graph");
    graph.mount(Reason::Create).expect("it mounts");
    let switch = Switch::new("path", Arc::clone(graph.volume()));
    std::mem::forget(graph);
    switch
}

fn volume(kind: &str, bytes: u64) -> Arc<dyn Volume> {
    if let Some(text) = kind.strip_prefix("stack:") {
        return stack(text, bytes);
    }
    match kind {
        "null" => NullVolume::create("null", bytes, BlockSize::B4096).expect("a volume"),
        "tapped null" => Tap::new(NullVolume::create("null", bytes, BlockSize::B4096).expect("a volume")),
        "memory" => MemoryVolume::create("memory", bytes, BlockSize::B4096).expect("a volume"),
        path => {
            let file = File::create(path).expect("a file");
            let piece = vec![5; 1 << 20];
            for _ in 0..bytes >> 20 {
                std::io::Write::write_all(&mut &file, &piece).expect("room for the file");
            }
            let options =
                FileOptions { path: path.into(), size: Some(bytes), block_size: BlockSize::B4096, read_only: false };
            FileVolume::open("file", &options).expect("a volume")
        }
    }
}

/// Name, volume, its bytes, interrupts, idle devices beside.
type Case = (&'static str, &'static str, u64, bool, usize);

const CASES: [Case; 18] = [
    ("null", "null", 1 << 30, false, 0),
    // Where it can be watched, and is not.
    ("tapped-null", "tapped null", 1 << 30, false, 0),
    ("null-interrupts", "null", 1 << 30, true, 0),
    ("null-beside-999", "null", 1 << 30, false, 999),
    ("memory-64m", "memory", 64 << 20, false, 0),
    ("memory-8m", "memory", 8 << 20, false, 0),
    ("memory-1g", "memory", 1 << 30, false, 0),
    ("tmpfs-64m", "/dev/shm/millrace-path-bench", 64 << 20, false, 0),
    ("stack-null", "stack:null", 1 << 30, false, 0),
    ("stack-concat", "stack:concat(null(size=512M), null(size=512M))", 1 << 30, false, 0),
    ("stack-stripe", "stack:stripe(null, null)", 1 << 30, false, 0),
    ("stack-throttle", "stack:throttle(iops=1000M) | null", 1 << 30, false, 0),
    ("stack-meter", "stack:meter(tenant=bench) | null", 1 << 30, false, 0),
    ("stack-share-null", "stack:share | disk(extent=1M) | null(size=1100M)", 1 << 30, false, 0),
    ("stack-memory", "stack:memory", 64 << 20, false, 0),
    ("stack-share-memory", "stack:share | disk(extent=1M) | memory(size=80M)", 64 << 20, false, 0),
    ("stack-crypt-memory", "stack:crypt(key=file:KEY) | memory", 64 << 20, false, 0),
    ("stack-mirror-memory", "stack:mirror(memory, memory)", 64 << 20, false, 0),
];

/// Many devices take many descriptors.
fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // If it cannot be had, the case with many devices says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

fn main() {
    allow_descriptors();
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let (settings, filters): (Vec<_>, Vec<_>) = args.iter().partition(|arg| arg.contains('='));
    let rounds = settings.iter().find_map(|setting| setting.strip_prefix("rounds=")?.parse().ok()).unwrap_or(1);
    let wanted = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    if wanted("records") {
        for depth in [1, 32] {
            measure_records(depth, rounds);
        }
    }
    for (name, kind, bytes, interrupts, idle) in CASES {
        let loads = loads(name, bytes);
        let loads: Vec<_> = loads.into_iter().filter(|(name, _)| wanted(name)).collect();
        if loads.is_empty() {
            continue;
        }
        let mut rig = Rig::new(volume(kind, bytes), interrupts, idle);
        if !kind.contains("null") {
            rig.fill(bytes);
        }
        for (name, load) in loads {
            rig.measure(&name, load, rounds);
        }
        if kind.starts_with('/') {
            // A leftover is harmless.
            let _ = std::fs::remove_file(kind);
        }
    }
}

fn loads(case: &str, span: u64) -> Vec<(String, Load)> {
    let mut loads = Vec::new();
    for (what, write) in [("read", false), ("write", true)] {
        for depth in [1, 4, 32, 128] {
            loads.push((format!("{case}-4k-{what}"), Load { write, bytes: 4096, depth, span }));
        }
        for (bytes, depth) in [(8192, 32), (128 << 10, 32), (128 << 10, 256)] {
            loads.push((format!("{case}-{}k-{what}", bytes >> 10), Load { write, bytes, depth, span }));
        }
    }
    loads
}
