//! What a physical NVMe controller must do under the driver and the back end, run inside a nested machine by `tests/tests/physical.rs`.
//! It overwrites the disk.
//!
//! `nvme-nested CHECK ADDRESS`, `nvme-nested virtio SOCKET`, or `nvme-nested fastpath VOLUME`: each check prints what it has seen, and panics when that is wrong.

use std::{
    env,
    os::{fd::AsFd, unix::fs::FileExt},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_backends::{NvmePlace, NvmeVolume, Waits};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Lba, Operation, Volume,
    conformance::{self, Harness, Job, Subject, SyncHarness, Wanted},
};
use millrace_driver::{
    Command, Controller, DmaBuffer, DmaRange, Namespace, Options, QueueOptions, QueuePair, VfioPci, spec::NamespaceId,
};
use millrace_memory::{Access, GuestAddress, GuestMemory, Mapping, Protection, Segment};
use rustix::fs::MemfdFlags;
use shard::ShardHarness;

#[path = "nvme-nested/fastpath.rs"]
mod fastpath;
#[path = "nvme-nested/huge.rs"]
mod huge;
#[path = "../src/tests/shard.rs"]
mod shard;
#[path = "nvme-nested/virtio.rs"]
mod virtio;

const SEED: u64 = 61;
const MIB: u64 = 1 << 20;

fn main() {
    let arguments: Vec<String> = env::args().collect();
    let [_, check, place] = &arguments[..] else { panic!("nvme-nested CHECK ADDRESS|SOCKET|VOLUME") };
    tracing_to_stderr();
    match check.as_str() {
        // A daemon has the controller.
        "virtio" => virtio::virtio(Path::new(place)),
        "fastpath" => fastpath::fastpath(place),
        _ => on_controller(check, &place.parse::<NvmePlace>().expect("an address")),
    }
    println!("{check}: well");
}

/// A check of the controller itself.
fn on_controller(check: &str, place: &NvmePlace) {
    match check {
        "refused" => refused(place),
        "driver" => driver(place),
        "conform" => conform(place),
        "namespaces" => namespaces(place),
        "direct" => direct(place),
        "huge" => huge::huge(place),
        "shards" => shards(place),
        "waits" => waits(place),
        "silent" => silent(place),
        "reset" => reset(place),
        "unplug" => unplug(place),
        "sizes" => sizes(place),
        _ => panic!("no such check: {check}"),
    }
}

/// What is logged is of use when a check fails.
fn tracing_to_stderr() {
    std::panic::set_hook(Box::new(|panic| println!("MILLRACE-FAIL {panic}")));
}

fn open(place: &NvmePlace, size: Option<u64>, block_size: BlockSize) -> Arc<NvmeVolume> {
    NvmeVolume::open("disk", place, size, block_size).unwrap_or_else(|error| panic!("{error}"))
}

/// Numbers that look random: the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// A controller that the kernel drives is not taken, and the operator is told what to do.
fn refused(place: &NvmePlace) {
    let error = NvmeVolume::open("disk", place, None, BlockSize::B512).unwrap_err().to_string();
    println!("refused: {error}");
    for word in ["bound to nvme", "driver_override", "unbind", &place.address.to_string()] {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
}

/// The driver alone: registers, interrupts, every size of transfer, what the IOMMU refuses, resets.
fn driver(place: &NvmePlace) {
    let function = VfioPci::open(place.address).unwrap_or_else(|error| panic!("{error}"));
    let second = VfioPci::open(place.address).err().expect("a function has one owner").to_string();
    assert!(second.contains("in use"), "{second}");
    println!("driver: by {}", function.iommu().interface());
    let mut controller = Controller::attach(function, &Options::default()).expect("its registers");
    controller.start().expect("it comes up");
    let identity = controller.identity().expect("who it is");
    println!("driver: model {:?}", String::from_utf8_lossy(&identity.mn).trim_end());
    println!("driver: {} queues, {} bytes at once", controller.io_queues(), controller.max_transfer());
    let vectors = controller.transport().vectors().expect("its vectors");
    println!("driver: {vectors} vectors");
    controller.enable_vectors(2).expect("interrupts");
    let nsid = NamespaceId(place.nsid);
    let namespace = controller.namespace(nsid).expect("the namespace");
    let with_interrupts = QueueOptions { entries: 16, id: None, vector: Some(1) };
    let mut loud = controller.create_queue_pair(&with_interrupts).expect("a queue with an interrupt");
    let mut quiet =
        controller.create_queue_pair(&QueueOptions { entries: 1024, ..QueueOptions::default() }).expect("a polled queue");
    println!("driver: submission queues {} the controller", if quiet.is_in_controller() { "in" } else { "out of" });
    let buffer = controller.memory().alloc(controller.max_transfer() as usize + 4096).expect("memory");
    let block = namespace.block_size() as usize;
    let mut seen = 0;
    for len in [block, 4096, 2 * 4096, 3 * 4096, 64 << 10, controller.max_transfer() as usize] {
        for offset in [0, 4, 512, 4092] {
            let data: Vec<u8> = (0..len).map(|at| (at / 7 + len + offset) as u8).collect();
            buffer.write_at(offset, &data);
            let write = namespace.write(Lba(8), buffer.slice(offset, len)).expect("a write");
            quiet.execute(&write).unwrap_or_else(|error| panic!("{len} bytes at {offset}: {error}"));
            buffer.fill(0xee);
            let read = namespace.read(Lba(8), buffer.slice(offset, len)).expect("a read");
            loud.execute(&read).unwrap_or_else(|error| panic!("{len} bytes at {offset}: {error}"));
            assert!(buffer.read_vec(offset, len) == data, "{len} bytes at {offset}");
            if offset > 0 {
                assert_eq!(buffer.read_vec(offset - 1, 1), [0xee], "nothing was written before them");
            }
            seen += loud.wait_interrupt(Duration::from_secs(5)).expect("an interrupt's event fd");
        }
    }
    pieces(&mut quiet, &namespace, &buffer);
    println!("driver: {seen} interrupts");
    assert!(seen >= 12, "{seen} interrupts for 24 reads that were waited for");
    masked(&mut loud, &namespace.read(Lba(0), buffer.slice(0, block)).expect("a read"));
    // Memory that was never given to it.
    let outside = DmaRange { iova: 1 << 35, len: 4096 };
    let stray = quiet.execute_any(&namespace.read(Lba(0), outside).expect("a read")).expect("an answer");
    // QEMU's controller calls it a success; who runs this looks for the fault that the IOMMU has reported.
    println!("driver: a read to memory that is not mapped, at {:#x}: {}", outside.iova, stray.status());
    // It goes on after that, after a reset of the function, and of the controller.
    quiet.execute(&namespace.read(Lba(0), buffer.slice(0, block)).expect("a read")).expect("it goes on");
    controller.reset().expect("a reset");
    drop((loud, quiet));
    for round in 0..2 {
        controller.start().unwrap_or_else(|error| panic!("round {round}: it comes up again: {error}"));
        let mut queue = controller.create_queue_pair(&QueueOptions::default()).expect("a queue");
        queue.execute(&namespace.read(Lba(0), buffer.slice(0, block)).expect("a read")).expect("it reads");
        controller.delete_queue_pair(queue).expect("a queue less");
    }
    controller.shutdown().expect("it shuts down");
}

/// An interrupt that is masked does not come, and comes when the mask goes.
fn masked(queue: &mut QueuePair, command: &Command) {
    let raised = |queue: &QueuePair, patience| queue.wait_interrupt(patience).expect("an interrupt's event fd");
    while raised(queue, Duration::from_millis(50)) > 0 {}
    queue.mask_interrupt();
    for _ in 0..3 {
        queue.execute(command).expect("an answer");
    }
    assert_eq!(raised(queue, Duration::from_millis(200)), 0, "it is masked");
    assert!(queue.unmask_interrupt(), "the mask goes");
    assert_eq!(raised(queue, Duration::from_secs(5)), 1, "it was pending");
    queue.execute(command).expect("an answer");
    assert_eq!(raised(queue, Duration::from_secs(5)), 1, "it is not masked");
}

/// Data in pieces, as an SGL: written in as many as go, and read back in others.
fn pieces(queue: &mut QueuePair, namespace: &Namespace, buffer: &DmaBuffer) {
    let limits = queue.sgl().expect("it takes SGLs");
    println!("driver: SGLs of {} pieces of {} bytes or multiples", limits.pieces, limits.granularity);
    let (len, unit) = (64 << 10, limits.granularity);
    let data: Vec<u8> = (0..len).map(|at| (at / 11 + at) as u8).collect();
    let mut run = |command: &Command, count: usize, each: usize| {
        // Apart from each other by one unit; the last has what is left.
        let piece = |i| if i + 1 < count { each } else { len - each * i };
        let at = |i: usize| 1024 + unit + i * (each + unit);
        let cid =
            queue.submit_sgl(command, (0..count).map(|i| buffer.slice(at(i), piece(i)))).expect("pieces that can be said");
        queue.ring().expect("a doorbell");
        let status = queue.wait_for(cid).expect("an answer").status();
        assert!(status.is_success(), "{count} pieces: {status}");
        (0..count).map(|i| at(i)..at(i) + piece(i)).collect::<Vec<_>>()
    };
    let any = DmaRange { iova: 0, len };
    for (count, each) in [(1, len), (2, 8 * unit), (limits.pieces, 20 * unit), (limits.pieces, len / limits.pieces)] {
        let mut from = &data[..];
        for i in 0..count {
            let (now, later) = from.split_at(if i + 1 < count { each } else { from.len() });
            buffer.write_at(1024 + unit + i * (each + unit), now);
            from = later;
        }
        run(&namespace.write(Lba(8), any).expect("a write"), count, each);
        buffer.fill(0xee);
        let places = run(&namespace.read(Lba(8), any).expect("a read"), count, each);
        let mut expected = vec![0xee; buffer.len()];
        let mut from = &data[..];
        for place in places {
            let (now, later) = from.split_at(place.len());
            expected[place].copy_from_slice(now);
            from = later;
        }
        assert!(buffer.read_vec(0, buffer.len()) == expected, "{count} pieces: other data, or bytes beside them");
    }
}

/// The suite that every volume passes, with and without an engine.
fn conform(place: &NvmePlace) {
    for on_a_shard in [false, true] {
        let mut make = |wanted: Wanted| -> Option<Arc<dyn Volume>> {
            let bytes = wanted.blocks << wanted.block_size.shift();
            (!wanted.read_only).then(|| open(place, Some(bytes), wanted.block_size) as _)
        };
        let mut subject = Subject::new(SEED, &mut make);
        subject.starts_zeroed = false;
        subject.formats = false;
        if on_a_shard {
            conformance::run(&mut ShardHarness::new(), &mut subject);
        } else {
            conformance::run(&mut SyncHarness::new(SEED, false), &mut subject);
        }
    }
}

/// Two namespaces of the controller: the second passes the suite too, then both are used at once, each by a shard.
fn namespaces(place: &NvmePlace) {
    let other = NvmePlace { nsid: 2, ..*place };
    conform(&other);
    let volumes = [place, &other].map(|place| open(place, None, BlockSize::B512));
    thread::scope(|scope| {
        for (volume, seed) in volumes.iter().zip(SEED..) {
            let blocks: Arc<dyn Volume> = volume.clone();
            scope.spawn(move || {
                let guest = Guest::new(8 * MIB);
                // The same blocks of both.
                verified(&blocks, &mut ShardHarness::new(), &guest, &mut Random(seed), (0, 4096), 150);
                guest.give_up();
            });
        }
    });
    println!("namespaces: moved {:?}", volumes[0].moved());
    assert_eq!(volumes[0].moved(), volumes[1].moved(), "the controller is one for both");
}

/// A guest's memory, and what is in it.
struct Guest {
    memory: GuestMemory,
    size: u64,
}

impl Guest {
    fn new(size: u64) -> Self {
        Self::of(size, MemfdFlags::empty())
    }

    /// Of pages as a memory file's flags say.
    fn of(size: u64, pages: MemfdFlags) -> Self {
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC | pages).expect("memory");
        rustix::fs::ftruncate(&file, size).expect("memory");
        let mut memory = GuestMemory::new();
        let protection = Protection { read: true, write: true };
        memory.map(GuestAddress(0), size, protection, Some((file.as_fd(), 0))).expect("a region");
        Self { memory, size }
    }

    fn segment(&self, at: u64, len: u64) -> Segment {
        self.memory.translate(GuestAddress(at), len, Access::Write).expect("memory of the guest's")
    }

    /// Memory for a request: pages from anywhere, one run at any place, or pieces of any length at any byte.
    fn some(&self, random: &mut Random, len: u64) -> Vec<Segment> {
        let pages = self.size / 4096;
        let kind = random.below(4);
        if kind == 0 {
            let at = random.below(self.size - len) & !3;
            return vec![self.segment(at, len)];
        }
        // No page twice: what a write sends must be what was put there.
        let mut taken = Vec::new();
        let mut left = len;
        let mut segments = Vec::new();
        while left > 0 {
            let page = random.below(pages);
            if !taken.contains(&page) {
                taken.push(page);
                let (offset, part) = match kind {
                    1 => (1 + random.below(2000), (1 + random.below(2000)).min(left)),
                    _ => (0, left.min(4096)),
                };
                segments.push(self.segment(page * 4096 + offset, part));
                left -= part;
            }
        }
        segments
    }

    fn give_up(mut self) {
        self.memory.unmap_all();
        // SAFETY: the requests that used it have ended.
        drop(unsafe { self.memory.reclaim() });
    }
}

fn fill(segments: &[Segment], random: &mut Random) -> Vec<u8> {
    let mut all = Vec::new();
    for segment in segments {
        let bytes: Vec<u8> = (0..segment.len()).map(|_| random.below(256) as u8).collect();
        segment.write_at(0, &bytes);
        all.extend(bytes);
    }
    all
}

fn contents(segments: &[Segment]) -> Vec<u8> {
    segments
        .iter()
        .flat_map(|segment| {
            let mut bytes = vec![0; segment.len()];
            segment.read_at(0, &mut bytes);
            bytes
        })
        .collect()
}

fn job(operation: Operation, lba: u64, segments: &[Segment]) -> Job {
    let count = millrace_memory::total_len(segments) as u64 / 512;
    Job { segments: segments.to_vec(), ..Job::new(operation, lba, count) }
}

/// Writes and reads of any shape against a copy of what the disk must hold; the last is forgotten when all is well.
fn verified(
    volume: &Arc<dyn Volume>,
    harness: &mut dyn Harness,
    guest: &Guest,
    random: &mut Random,
    (first, blocks): (u64, u64),
    rounds: usize,
) {
    let mut model = vec![0_u8; (blocks * 512) as usize];
    let erase = Job::new(Operation::WriteZeroes { fua: false, deallocate: true }, first, blocks);
    assert_eq!(harness.run(volume, &[erase]), [Ok(())]);
    for round in 0..rounds {
        let count = 1 + random.below(if round % 8 == 0 { 512 } else { 24 }).min(blocks - 1);
        let lba = random.below(blocks - count + 1);
        let segments = guest.some(random, count * 512);
        let range = (lba * 512) as usize..((lba + count) * 512) as usize;
        let fua = random.below(4) == 0;
        let operation = match random.below(8) {
            0 => Operation::WriteZeroes { fua, deallocate: random.below(2) == 0 },
            1..=3 => Operation::Read,
            _ => Operation::Write { fua },
        };
        let what = format!("round {round}: {operation:?} of {count} at {lba} in {} pieces", segments.len());
        let done = match operation {
            Operation::Write { .. } => {
                let data = fill(&segments, random);
                model[range].copy_from_slice(&data);
                harness.run(volume, &[job(operation, first + lba, &segments)])
            }
            Operation::Read => {
                for segment in &segments {
                    segment.fill(0xa5);
                }
                let done = harness.run(volume, &[job(operation, first + lba, &segments)]);
                assert!(contents(&segments) == model[range], "{what}: other data");
                done
            }
            _ => {
                model[range].fill(0);
                harness.run(volume, &[Job::new(operation, first + lba, count)])
            }
        };
        assert_eq!(done, [Ok(())], "{what}");
    }
    // All of it once more, in large reads beside each other.
    let chunk = 256.min(blocks);
    let jobs: Vec<Job> = (0..blocks / chunk)
        .map(|i| {
            let at = i * chunk * 512 % (guest.size / 2);
            job(Operation::Read, first + i * chunk, &[guest.segment(at, chunk * 512)])
        })
        .collect();
    for (i, one) in jobs.iter().enumerate() {
        assert_eq!(harness.run(volume, std::slice::from_ref(one)), [Ok(())]);
        let from = i * (chunk * 512) as usize;
        assert!(contents(&one.segments) == model[from..from + (chunk * 512) as usize], "chunk {i}: other data at the end");
    }
    assert_eq!(harness.run(volume, &[Job::new(Operation::Flush, 0, 0)]), [Ok(())]);
}

/// Data of guests do not bounce, once their memory is mapped; and it is unmapped before it goes.
fn direct(place: &NvmePlace) {
    let volume = open(place, None, BlockSize::B512);
    let (mut harness, mut random) = (ShardHarness::new(), Random(SEED));
    for life in 0..3 {
        let guest = Guest::new(16 * MIB);
        straight(&volume, &mut harness, &guest, &mut random, 1024 * life);
        guest.give_up();
    }
}

/// A guest's life: its memory is mapped, and from then on no byte bounces.
fn straight(volume: &Arc<NvmeVolume>, harness: &mut ShardHarness, guest: &Guest, random: &mut Random, first: u64) {
    let blocks: Arc<dyn Volume> = volume.clone();
    // The first miss asks for it.
    let patience = Instant::now() + Duration::from_secs(30);
    loop {
        let before = volume.moved();
        assert_eq!(harness.run(&blocks, &[job(Operation::Read, 0, &[guest.segment(0, 4096)])]), [Ok(())]);
        let after = volume.moved();
        if after.0 > before.0 {
            assert_eq!((after.0 - before.0, after.1), (4096, before.1));
            break;
        }
        assert!(Instant::now() < patience, "the memory was never mapped");
    }
    let before = volume.moved();
    one_command_each(volume, harness, guest, random);
    verified(&blocks, harness, guest, random, (first, 4096), 300);
    let after = volume.moved();
    println!("blocks from {first} on: {} bytes directly, {} by buffers", after.0 - before.0, after.1 - before.1);
    assert!(after.0 > before.0);
    assert_eq!(after.1, before.1, "what PRPs cannot say an SGL does");
}

/// A request is one command, wherever its memory lies: whole pages are a list of PRPs, pieces at odd places an SGL.
fn one_command_each(volume: &Arc<NvmeVolume>, harness: &mut ShardHarness, guest: &Guest, random: &mut Random) {
    let blocks: Arc<dyn Volume> = volume.clone();
    let pages: Vec<Segment> = (0..16).map(|i| guest.segment(i * 8192, 4096)).collect();
    let pieces: Vec<Segment> = (0..16).map(|i| guest.segment(i * 8192 + 2 * i + 1, 511 + 2 * (i % 2))).collect();
    for segments in [pages, pieces] {
        let mut commands_of = |operation| {
            let before = volume.commands();
            assert_eq!(harness.run(&blocks, &[job(operation, 0, &segments)]), [Ok(())]);
            volume.commands() - before
        };
        let data = fill(&segments, random);
        assert_eq!(commands_of(Operation::Write { fua: false }), 1, "{segments:?}");
        for segment in &segments {
            segment.fill(0);
        }
        assert_eq!(commands_of(Operation::Read), 1, "{segments:?}");
        assert!(contents(&segments) == data, "other data in {segments:?}");
    }
}

/// Several shards on queues of their own, at once.
fn shards(place: &NvmePlace) {
    let volume = open(place, None, BlockSize::B512);
    thread::scope(|scope| {
        for shard in 0..3_u64 {
            let blocks: Arc<dyn Volume> = volume.clone();
            scope.spawn(move || {
                let guest = Guest::new(8 * MIB);
                verified(&blocks, &mut ShardHarness::new(), &guest, &mut Random(SEED + shard), (8192 * shard, 4096), 200);
                guest.give_up();
            });
        }
    });
    println!("shards: moved {:?}", volume.moved());
    assert_eq!(volume.queues_used(), 3, "each has a queue pair of its own");
}

/// Reads one after the other.
fn reads(blocks: &Arc<dyn Volume>, guest: &Guest, count: u64) {
    let mut harness = ShardHarness::new();
    for at in 0..count {
        assert_eq!(harness.run(blocks, &[job(Operation::Read, at * 8, &[guest.segment(at * 4096, 4096)])]), [Ok(())]);
    }
}

fn since(before: Waits, after: Waits) -> Waits {
    Waits {
        naps: after.naps - before.naps,
        sleeps: after.sleeps - before.sleeps,
        interrupts: after.interrupts - before.interrupts,
    }
}

/// Commands that take milliseconds are slept for, and ended by their interrupts.
fn waits(place: &NvmePlace) {
    let volume = open(place, None, BlockSize::B512);
    let blocks: Arc<dyn Volume> = volume.clone();
    let guest = Guest::new(8 * MIB);
    // What it lets through before it begins to count.
    reads(&blocks, &guest, 50);
    let (before, started, count) = (volume.waits(), Instant::now(), 100);
    reads(&blocks, &guest, count);
    let (seen, took) = (since(before, volume.waits()), started.elapsed());
    println!("waits: {count} reads in {took:?}: {seen:?}");
    assert!(took > Duration::from_millis(5) * count as u32, "its commands do not take long");
    assert_eq!(seen.naps, 0);
    // While this machine waits for a processor of its host's, some end before they are slept for.
    assert!(seen.interrupts >= count / 4, "they are ended by interrupts");
    // One that is pending from before, its own, and perhaps a look of the watch.
    assert!(seen.sleeps <= 2 * count + took.as_millis() as u64 / 100 + 2);
    assert!(seen.sleeps - seen.interrupts <= took.as_millis() as u64 / 100 + 1, "no interrupt was lost");
    verified(&blocks, &mut ShardHarness::new(), &guest, &mut Random(SEED), (0, 4096), 150);
    // On queues of their own, and several in flight on each.
    thread::scope(|scope| {
        for _ in 0..2 {
            let blocks = Arc::clone(&blocks);
            scope.spawn(move || {
                let guest = Guest::new(MIB);
                let places: Vec<Segment> = (0..32).map(|i| guest.segment(i * 4096, 4096)).collect();
                let jobs: Vec<Job> =
                    places.iter().zip(0..).map(|(place, i)| job(Operation::Read, i * 8, &[*place])).collect();
                for _ in 0..5 {
                    assert!(ShardHarness::new().run(&blocks, &jobs).iter().all(Result::is_ok));
                }
                guest.give_up();
            });
        }
    });
    let all = volume.waits();
    println!("waits: in all {all:?}");
    assert_eq!(all.naps, 0);
    guest.give_up();
}

/// Interrupts that do not come are noticed by the watch, and are done without from then on.
fn silent(place: &NvmePlace) {
    let volume = open(place, None, BlockSize::B512);
    let blocks: Arc<dyn Volume> = volume.clone();
    let guest = Guest::new(8 * MIB);
    mask_function(place);
    let (before, started) = (volume.waits(), Instant::now());
    reads(&blocks, &guest, 100);
    let (seen, took) = (since(before, volume.waits()), started.elapsed());
    println!("silent: 100 reads in {took:?}: {seen:?}");
    assert_eq!(seen.interrupts, 0);
    assert!((3..10).contains(&seen.sleeps) && seen.naps > 100, "it was given up after three");
    guest.give_up();
}

fn tell_waits(check: &str, volume: &NvmeVolume) {
    let Waits { naps, sleeps, interrupts } = volume.waits();
    if interrupts > 0 {
        println!("{check}: {sleeps} sleeps, {interrupts} ended by interrupt, {naps} naps");
    }
}

/// Sets the Function Mask in MSI-X Message Control behind the driver's back: no interrupt leaves the device.
fn mask_function(place: &NvmePlace) {
    let path = format!("/sys/bus/pci/devices/{}/config", place.address);
    let config = std::fs::File::options().read(true).write(true).open(path).expect("its configuration space");
    let byte = |at: u64| {
        let mut byte = [0];
        config.read_exact_at(&mut byte, at).expect("a byte of it");
        byte[0]
    };
    let mut at = byte(0x34);
    while byte(at.into()) != 0x11 {
        at = byte(u64::from(at) + 1);
        assert_ne!(at, 0, "it has MSI-X");
    }
    let control = u64::from(at) + 3;
    config.write_all_at(&[byte(control) | 0x40], control).expect("a byte more");
    assert_eq!(byte(control) & 0xc0, 0xc0, "enabled, and masked");
}

/// Resets in the middle of I/O are not seen above.
fn reset(place: &NvmePlace) {
    let volume = open(place, None, BlockSize::B512);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let loads: Vec<_> = (0..2_u64)
            .map(|load| {
                let blocks: Arc<dyn Volume> = volume.clone();
                let ended = &ended;
                scope.spawn(move || {
                    let guest = Guest::new(8 * MIB);
                    let (mut harness, mut random, mut rounds) = (ShardHarness::new(), Random(SEED + load), 0);
                    // Many in flight, each at its own place, with what tells it apart.
                    while !ended.load(Ordering::Relaxed) {
                        rounds += 1;
                        let places: Vec<Segment> = (0..48).map(|i| guest.segment(i * 8192, 4096)).collect();
                        let data: Vec<Vec<u8>> = places.iter().map(|place| fill(&[*place], &mut random)).collect();
                        let at = |i: usize| 65_536 * load + i as u64 * 8;
                        let writes: Vec<Job> = places
                            .iter()
                            .enumerate()
                            .map(|(i, place)| job(Operation::Write { fua: false }, at(i), &[*place]))
                            .collect();
                        assert!(harness.run(&blocks, &writes).iter().all(Result::is_ok), "round {rounds}");
                        for place in &places {
                            place.fill(0);
                        }
                        let reads: Vec<Job> =
                            places.iter().enumerate().map(|(i, place)| job(Operation::Read, at(i), &[*place])).collect();
                        assert!(harness.run(&blocks, &reads).iter().all(Result::is_ok), "round {rounds}");
                        for (place, data) in places.iter().zip(&data) {
                            assert!(contents(&[*place]) == *data, "round {rounds}: other data");
                        }
                    }
                    guest.give_up();
                    rounds
                })
            })
            .collect();
        for wanted in 1..=5 {
            volume.reset();
            let patience = Instant::now() + Duration::from_secs(60);
            while volume.resets() < wanted {
                assert!(Instant::now() < patience, "reset {wanted} never came");
                thread::sleep(Duration::from_millis(10));
            }
            thread::sleep(Duration::from_millis(300));
        }
        ended.store(true, Ordering::Relaxed);
        let rounds: Vec<usize> = loads.into_iter().map(|load| load.join().expect("a load")).collect();
        println!("reset: {} resets under {rounds:?} rounds", volume.resets());
    });
    tell_waits("reset", &volume);
}

/// A namespace grows, and its volume can; it shrinks below its volume, which then has an end that fails.
fn sizes(place: &NvmePlace) {
    let volume = open(place, None, BlockSize::B512);
    let blocks: Arc<dyn Volume> = volume.clone();
    let mut harness = ShardHarness::new();
    // Not a guest's, so that it is not mapped: this machine's IOMMU knows few regions for a controller that is a socket.
    let memory = Mapping::anonymous(4096).expect("memory");
    let mut write = |at: u64| {
        // SAFETY: the requests end before this function does.
        let place = unsafe { memory.segment(0, 4096) }.expect("all of it");
        let job = job(Operation::Write { fua: false }, at * MIB / 512, &[place]);
        harness.run(&blocks, &[job])[0]
    };
    let resize = |mib: u64| volume.resize(BlockCount(mib * MIB / 512));
    assert_eq!(volume.geometry().blocks.0 * 512, 64 * MIB);
    assert!(resize(65).is_err(), "the namespace is smaller");
    println!("MILLRACE-MARK await 96");
    let patience = Instant::now() + Duration::from_secs(60);
    while resize(96).is_err() {
        assert!(Instant::now() < patience, "it does not grow");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!((write(0), write(95)), (Ok(()), Ok(())));
    assert!(resize(97).is_err(), "it is not larger");
    println!("MILLRACE-MARK await 32");
    let patience = Instant::now() + Duration::from_secs(60);
    while volume.present().0 * 512 != 32 * MIB {
        assert!(Instant::now() < patience, "it does not tell that it is smaller");
        assert_eq!(write(0), Ok(()));
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(volume.geometry().blocks.0 * 512, 96 * MIB, "the volume stays as it is");
    let fault = Err(BlockError::WriteFault { errno: libc::EIO });
    assert_eq!((write(31), write(32), write(95)), (Ok(()), fault, fault));
    resize(32).expect("as small as its namespace");
    assert_eq!(write(31), Ok(()));
}

/// The controller is taken away in the middle of I/O: errors, and no more.
fn unplug(place: &NvmePlace) {
    let volume = open(place, None, BlockSize::B512);
    let blocks: Arc<dyn Volume> = volume.clone();
    let guest = Guest::new(8 * MIB);
    let mut harness = ShardHarness::new();
    let jobs: Vec<Job> =
        (0..32).map(|i| job(Operation::Write { fua: false }, i * 16, &[guest.segment(i * 8192, 8192)])).collect();
    let patience = Instant::now() + Duration::from_secs(120);
    let mut rounds = 0;
    let errors = loop {
        let results = harness.run(&blocks, &jobs);
        if results.iter().any(Result::is_err) {
            break results;
        }
        rounds += 1;
        if rounds == 20 {
            println!("MILLRACE-MARK busy");
        }
        assert!(Instant::now() < patience, "it is still there");
    };
    tell_waits("unplug", &volume);
    println!("unplug: after {rounds} rounds: {:?}", errors.iter().find(|result| result.is_err()));
    let gone = Err(BlockError::WriteFault { errno: libc::ENODEV });
    assert!(errors.iter().all(|result| result.is_ok() || *result == gone), "{errors:?}");
    assert!(harness.run(&blocks, &jobs).iter().all(|result| *result == gone), "all fail from now on");
    let read = job(Operation::Read, 0, &[guest.segment(0, 4096)]);
    assert_eq!(harness.run(&blocks, &[read]), [Err(BlockError::ReadFault { errno: libc::ENODEV })]);
    guest.give_up();
    drop(blocks);
    drop(volume);
    let patience = Instant::now() + Duration::from_secs(60);
    while std::path::Path::new(&format!("/sys/bus/pci/devices/{}", place.address)).exists() {
        assert!(Instant::now() < patience, "the system does not get the device back");
        thread::sleep(Duration::from_millis(20));
    }
    let error = NvmeVolume::open("disk", place, None, BlockSize::B512).unwrap_err().to_string();
    println!("unplug: then: {error}");
    assert!(error.contains("there is no PCI function"), "{error}");
}
