//! What a service adds to a request that it only passes on: 4 KiB requests at random places of a volume that moves nothing, one after the
//! other, each stack behind its switch as in the daemon, in turns. `cargo bench -p millrace-services --bench hops [-- FILTER…]`
//!
//! One core does it all and everything is in its caches: what two cores cost each other is not in it.

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

/// Requests of a sample.
const REQUESTS: u32 = 20_000;

/// What leaves are.
struct Below {
    null: Arc<dyn Volume>,
    pool: Arc<dyn Volume>,
}

impl Leaves for Below {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        if request.leaf.spec.starts_with("volume:") {
            return Ok(Arc::clone(&self.pool));
        }
        match request.size {
            Some(size) => Ok(NullVolume::create("null", size, request.block_size)?),
            None => Ok(Arc::clone(&self.null)),
        }
    }
}

struct Nowhere;

impl Spawner for Nowhere {
    fn spawn(&self, _: Task, _: Stop, _: Running) -> Result<(), millrace_engine::EngineError> {
        Ok(())
    }
}

/// A volume in force behind its switch.
fn volume(name: &str, stack: &str, below: &Below, shared: &SharedObjects) -> (Graph, Arc<dyn Volume>) {
    let node: Node = stack.parse().expect("a stack");
    let plan = Plan { volume: name, stack: &node, size: Some(SIZE), block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::new(Nowhere);
    let mut graph = Graph::build(&plan, below, shared, &spawner, None).expect("a graph");
    graph.mount(Reason::Create).expect("it mounts");
    let switch = Switch::new(name, Arc::clone(graph.volume()));
    (graph, switch)
}

/// A client of a volume.
struct Client {
    volume: Arc<dyn Volume>,
    io: SyncIo,
    buffers: BufferPool,
    scratch: Scratch,
    memory: Memory,
    random: Random,
    best: f64,
    all: Vec<f64>,
}

impl Client {
    fn new(volume: &Arc<dyn Volume>) -> Self {
        Self {
            volume: Arc::clone(volume),
            io: SyncIo::new(1, false),
            buffers: BufferPool::new(2).expect("buffers"),
            scratch: Scratch::new(volume.scratch_bytes()),
            memory: Memory::new(4096),
            random: Random::new(7),
            best: f64::MAX,
            all: Vec::new(),
        }
    }

    fn sample(&mut self) {
        let start = Instant::now();
        for _ in 0..REQUESTS {
            let segments = [self.memory.segment(0, 4096)];
            let lba = Lba(self.random.below(SIZE / 4096) * 8);
            let request = Request { operation: Operation::Read, lba, count: BlockCount(8), segments: &segments };
            match self.volume.submit(TaskContext::new(&self.scratch, &self.buffers, &self.io), request) {
                Step::Done(result) => black_box(result).expect("nothing fails"),
                Step::Wait(_) => panic!("nothing waits"),
            }
            self.scratch.reset();
        }
        let each = start.elapsed().as_nanos() as f64 / f64::from(REQUESTS);
        self.best = self.best.min(each);
        self.all.push(each);
    }

    fn median(&mut self) -> f64 {
        self.all.sort_unstable_by(f64::total_cmp);
        self.all[self.all.len() / 2]
    }
}

/// Stacks; `null` is a volume that does nothing, `volume:pool` a disk on such a one.
const STACKS: [&str; 9] = [
    "null",
    "concat(null(size=32G), null(size=32G))",
    "stripe(null, null)",
    "throttle(iops=1000M) | null",
    "meter(tenant=bench) | null",
    "volume:pool",
    "share | volume:pool",
    "meter(tenant=bench) | throttle(iops=1000M) | null",
    "meter(tenant=bench) | throttle(iops=1000M) | concat(null(size=32G), null(size=32G))",
];

fn main() {
    // `cargo test` runs benches, too, with this word: nothing to measure then.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let filters: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let wanted = |stack: &str| filters.is_empty() || filters.iter().any(|filter| stack.contains(filter.as_str()));
    let _own = ShardSlot::claim();
    let shared = SharedObjects::default();
    let null: Arc<dyn Volume> = NullVolume::create("null", SIZE + (1 << 20), BlockSize::B512).expect("a volume");
    let (_graph, pool) = volume("pool", "disk | null", &Below { null: Arc::clone(&null), pool: null.clone() }, &shared);
    let below = Below { null, pool };
    let stacks: Vec<&str> = STACKS.into_iter().filter(|stack| *stack == "null" || wanted(stack)).collect();
    let volumes: Vec<_> = stacks.iter().map(|stack| volume(stack, stack, &below, &shared)).collect();
    let mut clients: Vec<_> = volumes.iter().map(|(_, volume)| Client::new(volume)).collect();
    let end = Instant::now() + Duration::from_secs(2) * clients.len() as u32;
    while Instant::now() < end {
        clients.iter_mut().for_each(Client::sample);
    }
    let (bare, middle) = (clients[0].best, clients[0].median());
    for (stack, client) in stacks.iter().zip(&mut clients) {
        let (best, median) = (client.best, client.median());
        println!("{stack:<86} {best:>6.1} ns ({:>+6.1})  median {median:>6.1} ({:>+6.1})", best - bare, median - middle);
    }
}
