//! What a throttle costs where nothing has to wait: 4 KiB requests at random places of a volume that moves nothing, one after the other,
//! bare and through throttles that allow more than comes. `cargo bench -p millrace-services --bench throttle`

#![allow(clippy::cast_precision_loss, reason = "one digit is shown")]

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_backends::NullVolume;
use millrace_block::{
    BlockCount, BlockSize, Lba, Operation, Request, Scratch, ShardSlot, Step, TaskContext, Volume,
    conformance::{Memory, Random, SyncIo},
};
use millrace_memory::BufferPool;
use millrace_services::{
    Node, Reason, Settings, SharedObjects,
    background::{Running, Spawner, Stop, Task},
    graph::{Graph, LeafError, LeafRequest, Leaves, Plan},
    throttle::{Caps, Group},
};

/// Bytes of a volume.
const SIZE: u64 = 64 << 30;

/// Whatever the leaf is called: this volume.
struct Below(Arc<dyn Volume>);

impl Leaves for Below {
    fn open(&self, _: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        Ok(Arc::clone(&self.0))
    }
}

struct Nowhere;

impl Spawner for Nowhere {
    fn spawn(&self, _: Task, _: Stop, _: Running) -> Result<(), millrace_engine::EngineError> {
        Ok(())
    }
}

/// A volume in force.
fn volume(stack: &str, below: &Arc<dyn Volume>, shared: &SharedObjects) -> Graph {
    let node: Node = stack.parse().expect("a stack");
    let plan = Plan { volume: "v", stack: &node, size: Some(SIZE), block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::new(Nowhere);
    let mut graph = Graph::build(&plan, &Below(Arc::clone(below)), shared, &spawner, None).expect("a graph");
    graph.mount(Reason::Create).expect("it mounts");
    graph
}

/// Nanoseconds per request: the best of many rounds in some seconds.
fn measure(volumes: &[&Arc<dyn Volume>]) -> Vec<f64> {
    let (io, buffers) = (SyncIo::new(1, false), BufferPool::new(2).expect("buffers"));
    let memory = Memory::new(4096);
    let mut random = Random::new(7);
    let lbas: Vec<_> = (0..4096).map(|_| Lba(random.below(SIZE / 4096) * 8)).collect();
    let round = |volume: &Arc<dyn Volume>| {
        let mut scratch = Scratch::new(volume.scratch_bytes());
        let start = Instant::now();
        for lba in &lbas {
            let segments = [memory.segment(0, 4096)];
            let request = Request { operation: Operation::Read, lba: *lba, count: BlockCount(8), segments: &segments };
            match volume.submit(TaskContext::new(&scratch, &buffers, &io), request) {
                Step::Done(result) => black_box(result).expect("nothing fails"),
                Step::Wait(_) => panic!("nothing waits"),
            }
            scratch.reset();
        }
        start.elapsed().as_nanos() as f64 / lbas.len() as f64
    };
    // By turns, so that what else the machine does falls on all alike.
    let mut best = vec![f64::MAX; volumes.len()];
    let end = Instant::now() + Duration::from_secs(8);
    while Instant::now() < end {
        for (volume, best) in volumes.iter().zip(&mut best) {
            *best = best.min(round(volume));
        }
    }
    best
}

fn main() {
    // `cargo test` runs benches, too, with this word: nothing to measure then.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let _own = ShardSlot::claim();
    let shared = SharedObjects::default();
    let mut caps = Settings::default();
    caps.add("iops", "500M");
    let caps = Caps::read(&caps).expect("caps");
    let daemon = Group::declare(&shared, "daemon", None, &caps).expect("a group");
    let _gold = Group::declare(&shared, "gold", Some(&daemon), &caps).expect("a group");
    let null: Arc<dyn Volume> = NullVolume::create("null", SIZE, BlockSize::B512).expect("a volume");
    let stacks = [
        "meter | null",
        "throttle(iops=500M) | null",
        "throttle(iops=500M, read_iops=500M, bandwidth=3T, read_bandwidth=3T) | null",
        "throttle(iops=500M, group=daemon) | null",
        "throttle(iops=500M, group=gold) | null",
    ];
    let graphs = stacks.map(|stack| volume(stack, &null, &shared));
    let volumes: Vec<_> = std::iter::once(&null).chain(graphs.iter().map(Graph::volume)).collect();
    let times = measure(&volumes);
    println!("bare: {:.1} ns", times[0]);
    for (stack, time) in stacks.iter().zip(&times[1..]) {
        println!("{stack}: {time:.1} ns, {:.1} ns more", time - times[0]);
    }
}
