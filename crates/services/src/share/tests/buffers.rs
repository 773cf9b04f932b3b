//! Who waits for a turn may hold buffers, and who has one may need some.

use std::sync::atomic::Ordering;

use millrace_block::{
    BlockCount, Lba, Request, Scratch, ShardSlot, TaskContext,
    conformance::{Memory, SyncIo},
};
use millrace_memory::BufferPool;

use super::*;
use crate::testing::waiting::{Gate, come_on, end_all};

/// Takes a buffer for each write: what is below it is not memory.
const CRYPT: &str = concat!("crypt(key=\"file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key\")");

/// Two writes of `one`, of which the first is on the disk and has the only buffer above it, and one of `other`, which waits for its
/// turn: all end when the disk answers.
fn all_end(gate: &Gate, one: &Graph, other: &Graph) {
    let (io, buffers, memory) = (SyncIo::new(SEED, false).hasty(), BufferPool::new(1).unwrap(), Memory::new(4096));
    // They are polled in this order: the first gives back a turn and a buffer, and each of the others comes to have one of the two.
    let (graphs, segments) = ([one, other, one], [memory.segment(0, 4096)]);
    let scratches = graphs.map(|graph| Scratch::new(graph.volume().scratch_bytes()));
    let write = |at: usize| {
        let (operation, count) = (Operation::Write { fua: false }, BlockCount(8));
        let request = Request { operation, lba: Lba(0), count, segments: &segments };
        graphs[at].volume().submit(TaskContext::new(&scratches[at], &buffers, &io), request)
    };
    gate.open.store(false, Ordering::Relaxed);
    let mut steps = [0, 1, 2].map(|at| Some(write(at)));
    come_on(&mut steps);
    gate.open.store(true, Ordering::Relaxed);
    end_all(&mut steps);
}

#[test]
fn who_has_a_turn_needs_no_buffer_of_those_who_wait_for_theirs() {
    let _own = ShardSlot::claim();
    let gate = Gate::before(memory(16 << 20), Operation::is_write);
    let leg: Arc<dyn Volume> = Arc::<Gate>::clone(&gate);
    let pool = Pool::open(&leg, &format!("disk(extent=16K, depth=1) | {CRYPT}"), Reason::Create).unwrap();
    let plain = pool.create("plain", EXTENT);
    let enciphered = pool.volume("enciphered", &format!("{CRYPT} | share"), Some(EXTENT), Reason::Create).unwrap();
    all_end(&gate, &enciphered, &plain);
    // The same where it is another disk that is above.
    let make = |name: &str, stack: &str, below: &Graph, size: u64| {
        let made = make(name, stack, below.volume(), Some(size), &pool.shared, &pool.kept, Reason::Create);
        made.unwrap_or_else(|error| panic!("{error}"))
    };
    let stack = format!("disk(extent=16K) | {CRYPT} | share | volume:pool");
    let inner = make("inner", &stack, &pool.disk, 4 * EXTENT);
    let above = make("above", "share | volume:inner", &inner, EXTENT);
    all_end(&gate, &above, &plain);
}
