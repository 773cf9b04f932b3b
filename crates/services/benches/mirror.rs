//! What a mirror costs, and what integrity costs on its legs: 4 KiB at random places, on memory, one request after the other.
//! `cargo bench -p millrace-services --bench mirror -- [FILTER…]`; a filter is a part of a stack. As front ends do, the thread has a shard's
//! place, and settles what was copied once for so many requests as they take at once.

#![allow(clippy::cast_precision_loss, reason = "three digits are shown")]

mod common;

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_block::{
    BlockCount, BlockSize, Lba, Operation, Request, Scratch, ShardSlot, Step, TaskContext, Volume,
    conformance::{Memory, Random, SyncIo},
};
use millrace_memory::{BufferPool, Unsettled};

/// Bytes of a volume.
const SIZE: u64 = 1 << 30;
/// Pages of the client's memory: as many as requests in flight in the comparison.
const PAGES: u64 = 32;

/// Nanoseconds per request.
fn measure(volume: &Arc<dyn Volume>, operation: Operation) -> f64 {
    let (io, buffers) = (SyncIo::new(1, false), BufferPool::new(32).expect("buffers"));
    let mut scratch = Scratch::new(volume.scratch_bytes());
    let memory = Memory::new(PAGES as usize * 4096);
    let mut random = Random::new(7);
    let shift = volume.geometry().block_size.shift();
    let mut run = |requests: u64| {
        let start = Instant::now();
        let unsettled = volume.settles_late().then(Unsettled::new);
        for number in 0..requests {
            let segments = [memory.segment((number % PAGES) as usize * 4096, 4096)];
            let lba = Lba(random.below(SIZE / 4096) << 12 >> shift);
            let request = Request { operation, lba, count: BlockCount(4096 >> shift), segments: &segments };
            match volume.submit(TaskContext::new(&scratch, &buffers, &io), request) {
                Step::Done(result) => black_box(result).expect("memory does not fail"),
                Step::Wait(_) => panic!("memory answers at once"),
            }
            scratch.reset();
            if let Some(unsettled) = unsettled.as_ref().filter(|_| number % PAGES == PAGES - 1) {
                unsettled.settle();
            }
        }
        drop(unsettled);
        start.elapsed()
    };
    let (mut best, mut requests) = (f64::MAX, 0);
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        best = best.min(run(100_000).as_nanos() as f64 / 100_000.0);
        requests += 100_000;
    }
    black_box(requests);
    best
}

/// Every page is there, and every region is marked.
fn fill(volume: &Arc<dyn Volume>) {
    let (io, buffers) = (SyncIo::new(1, false), BufferPool::new(32).expect("buffers"));
    let mut scratch = Scratch::new(volume.scratch_bytes());
    let memory = Memory::new(1 << 16);
    memory.segment(0, 1 << 16).fill(1);
    let shift = volume.geometry().block_size.shift();
    for at in 0..SIZE >> 16 {
        let segments = [memory.segment(0, 1 << 16)];
        let operation = Operation::Write { fua: false };
        let request =
            Request { operation, lba: Lba(at << 16 >> shift), count: BlockCount(1 << 16 >> shift), segments: &segments };
        let mut step = volume.submit(TaskContext::new(&scratch, &buffers, &io), request);
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        while std::pin::Pin::new(&mut step).poll(&mut cx).is_pending() {}
        drop(step);
        scratch.reset();
    }
}

fn main() {
    // `cargo test` runs benches, too, with this word: nothing to measure then.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let _place = ShardSlot::claim();
    let filters: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let wanted = |stack: &str| filters.is_empty() || filters.iter().any(|filter| stack.contains(filter.as_str()));
    let mirrors =
        ["memory", "mirror(memory, memory)", "mirror(stable=false, memory, memory)", "mirror(memory, memory, memory)"];
    let integrity = ["memory", "integrity(memory)", "mirror(integrity(memory), integrity(memory))"];
    let of = |size: BlockSize| move |stack| (size, stack);
    let small = mirrors.into_iter().chain(integrity.into_iter().skip(1)).map(of(BlockSize::B512));
    for (block_size, stack) in small.chain(integrity.into_iter().map(of(BlockSize::B4096))) {
        if !wanted(stack) {
            continue;
        }
        let graph = common::volume(stack, SIZE, block_size);
        let volume = graph.volume();
        fill(volume);
        let write = measure(volume, Operation::Write { fua: false });
        let read = measure(volume, Operation::Read);
        println!(
            "{stack:46} {:4}   write {write:6.1} ns ({:.2} M/s)   read {read:6.1} ns ({:.2} M/s)",
            block_size.bytes(),
            1e3 / write,
            1e3 / read
        );
    }
}
