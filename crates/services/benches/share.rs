//! What a share costs: 4 KiB requests at random places of a volume that moves nothing, one after the other, bare and through a share of
//! a disk, each behind its switch as in the daemon. `cargo bench -p millrace-services --bench share`

#![allow(clippy::cast_precision_loss, reason = "one digit is shown")]

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_backends::NullVolume;
use millrace_block::{
    BlockCount, BlockSize, Lba, Operation, Request, Scratch, ShardSlot, Step, Switch, TaskContext, Volume,
    conformance::{Memory, Random, SyncIo},
};
use millrace_memory::BufferPool;
use millrace_services::{
    Node, Reason, SharedObjects,
    background::{Running, Spawner, Stop, Task},
    graph::{Graph, LeafError, LeafRequest, Leaves, Plan},
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

/// A volume in force behind its switch.
fn volume(name: &str, stack: &str, below: &Arc<dyn Volume>, shared: &SharedObjects) -> (Graph, Arc<dyn Volume>) {
    let node: Node = stack.parse().expect("a stack");
    let plan = Plan { volume: name, stack: &node, size: Some(SIZE), block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::new(Nowhere);
    let mut graph = Graph::build(&plan, &Below(Arc::clone(below)), shared, &spawner, None).expect("a graph");
    graph.mount(Reason::Create).expect("it mounts");
    let switch = Switch::new(name, Arc::clone(graph.volume()));
    (graph, switch)
}

/// Nanoseconds per request.
fn measure(volume: &Arc<dyn Volume>) -> f64 {
    let (io, buffers) = (SyncIo::new(1, false), BufferPool::new(2).expect("buffers"));
    let mut scratch = Scratch::new(volume.scratch_bytes());
    let memory = Memory::new(4096);
    let mut random = Random::new(7);
    let mut run = |requests: u64| {
        let start = Instant::now();
        for _ in 0..requests {
            let segments = [memory.segment(0, 4096)];
            let lba = Lba(random.below(SIZE / 4096) * 8);
            let request = Request { operation: Operation::Read, lba, count: BlockCount(8), segments: &segments };
            match volume.submit(TaskContext::new(&scratch, &buffers, &io), request) {
                Step::Done(result) => black_box(result).expect("nothing fails"),
                Step::Wait(_) => panic!("nothing waits"),
            }
            scratch.reset();
        }
        start.elapsed()
    };
    let mut best = f64::MAX;
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        best = best.min(run(100_000).as_nanos() as f64 / 100_000.0);
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
    let null: Arc<dyn Volume> = NullVolume::create("null", SIZE + (1 << 20), BlockSize::B512).expect("a volume");
    let (_bare, bare) = volume("bare", "null(size=64G)", &null, &shared);
    let (_disk, disk) = volume("pool", "disk | null", &null, &shared);
    let (_share, share) = volume("v", "share | volume:pool", &disk, &shared);
    let [bare, disk, share] = [&bare, &disk, &share].map(measure);
    println!(
        "null, bare {bare:.1} ns; a disk on it {disk:.1} ns; a share of the disk {share:.1} ns: {:.1} ns more",
        share - bare
    );
}
