//! What a cache costs: 4 KiB at random places that the cache has, on memory, one request after the other.
//! `cargo bench -p millrace-services --bench cache`

#![allow(clippy::cast_precision_loss, reason = "three digits are shown")]

mod common;

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_block::{
    BlockCount, BlockSize, Lba, Operation, Request, Scratch, Step, TaskContext, Volume,
    conformance::{Memory, Random, SyncIo},
};
use millrace_memory::BufferPool;

/// Bytes of a volume, and of a fast leg.
const SIZE: u64 = 1 << 30;
/// Bytes of it that are used: they fit in the cache.
const USED: u64 = 1 << 29;
/// Pages of the client's memory: as many as requests in flight in the comparison.
const PAGES: u64 = 32;

/// Drives a request that waits to its end: what goes to two legs does.
fn finish(mut step: Step<'_>) {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    loop {
        if let std::task::Poll::Ready(result) = std::pin::Pin::new(&mut step).poll(&mut cx) {
            return result.expect("memory does not fail");
        }
    }
}

/// Nanoseconds per request.
fn measure(volume: &Arc<dyn Volume>, operation: Operation) -> f64 {
    let (io, buffers) = (SyncIo::new(1, false), BufferPool::new(32).expect("buffers"));
    let mut scratch = Scratch::new(volume.scratch_bytes());
    let memory = Memory::new(PAGES as usize * 4096);
    let mut random = Random::new(7);
    let mut run = |requests: u64| {
        let start = Instant::now();
        for number in 0..requests {
            let segments = [memory.segment((number % PAGES) as usize * 4096, 4096)];
            let lba = Lba(random.below(USED / 4096) * 8);
            let request = Request { operation, lba, count: BlockCount(8), segments: &segments };
            match volume.submit(TaskContext::new(&scratch, &buffers, &io), request) {
                Step::Done(result) => black_box(result).expect("memory does not fail"),
                Step::Wait(step) => finish(Step::Wait(step)),
            }
            scratch.reset();
        }
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

/// Every page is there, and in the cache.
fn fill(volume: &Arc<dyn Volume>) {
    let (io, buffers) = (SyncIo::new(1, false), BufferPool::new(32).expect("buffers"));
    let mut scratch = Scratch::new(volume.scratch_bytes());
    let memory = Memory::new(1 << 16);
    memory.segment(0, 1 << 16).fill(1);
    for at in 0..USED >> 16 {
        let segments = [memory.segment(0, 1 << 16)];
        let operation = Operation::Write { fua: false };
        let request = Request { operation, lba: Lba(at << 7), count: BlockCount(128), segments: &segments };
        finish(volume.submit(TaskContext::new(&scratch, &buffers, &io), request));
        scratch.reset();
    }
}

fn main() {
    // `cargo test` runs benches, too, with this word: nothing to measure then.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    for stack in ["memory", "cache(mode=through, memory, memory)", "cache(mode=back, memory, memory)"] {
        let graph = common::volume(stack, SIZE, BlockSize::B512);
        let volume = graph.volume();
        fill(volume);
        let write = measure(volume, Operation::Write { fua: false });
        let read = measure(volume, Operation::Read);
        println!("{stack:40} write {write:6.1} ns ({:.2} M/s)   read {read:6.1} ns ({:.2} M/s)", 1e3 / write, 1e3 / read);
    }
}
