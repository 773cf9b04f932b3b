//! What encryption costs in both modes: 4 KiB at random places, on memory, one request after the other.
//! `cargo bench -p millrace-services --bench crypt`

#![allow(clippy::cast_precision_loss, reason = "three digits are shown")]

mod common;

use std::{
    hint::black_box,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use millrace_block::{
    BlockCount, BlockSize, Lba, Operation, Request, Scratch, TaskContext, Volume,
    conformance::{Memory, Random, SyncIo},
};
use millrace_memory::BufferPool;

/// Bytes of a volume.
const SIZE: u64 = 256 << 20;
/// Pages of the client's memory.
const PAGES: u64 = 32;
const KEY: &str = concat!("file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key");

/// Does requests of so many bytes at these places.
struct Client {
    io: SyncIo,
    buffers: BufferPool,
    scratch: Scratch,
    memory: Memory,
    shift: u32,
}

impl Client {
    fn new(volume: &Arc<dyn Volume>) -> Self {
        Self {
            io: SyncIo::new(1, false),
            buffers: BufferPool::new(32).expect("buffers"),
            scratch: Scratch::new(volume.scratch_bytes()),
            memory: Memory::new(PAGES as usize * 4096),
            shift: volume.geometry().block_size.shift(),
        }
    }

    fn request(&mut self, volume: &Arc<dyn Volume>, operation: Operation, offset: u64, segment: (usize, usize)) {
        let segments = [self.memory.segment(segment.0, segment.1)];
        let (lba, count) = (Lba(offset >> self.shift), BlockCount((segment.1 >> self.shift) as u64));
        let request = Request { operation, lba, count, segments: &segments };
        {
            let mut step = volume.submit(TaskContext::new(&self.scratch, &self.buffers, &self.io), request);
            let mut cx = Context::from_waker(Waker::noop());
            let result = loop {
                if let Poll::Ready(result) = Pin::new(&mut step).poll(&mut cx) {
                    break result;
                }
            };
            black_box(result).expect("memory does not fail");
        }
        self.scratch.reset();
    }
}

/// Nanoseconds per request.
fn measure(volume: &Arc<dyn Volume>, operation: Operation) -> f64 {
    const BATCH: u64 = 20_000;
    let mut client = Client::new(volume);
    let mut random = Random::new(7);
    let mut best = f64::MAX;
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        let start = Instant::now();
        for number in 0..BATCH {
            let offset = random.below(SIZE / 4096) << 12;
            client.request(volume, operation, offset, ((number % PAGES) as usize * 4096, 4096));
        }
        best = best.min(start.elapsed().as_nanos() as f64 / BATCH as f64);
    }
    best
}

/// Every page is there.
fn fill(volume: &Arc<dyn Volume>) {
    let mut client = Client::new(volume);
    client.memory.segment(0, 1 << 16).fill(1);
    for at in 0..SIZE >> 16 {
        client.request(volume, Operation::Write { fua: false }, at << 16, (0, 1 << 16));
    }
}

fn main() {
    // `cargo test` runs benches, too, with this word: nothing to measure then.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let modes = [
        ("memory", "memory".to_owned()),
        ("crypt", format!("crypt(key=\"{KEY}\", memory)")),
        ("crypt(mode=authenticated)", format!("crypt(mode=authenticated, key=\"{KEY}\", memory)")),
    ];
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        for (name, stack) in &modes {
            let graph = common::volume(stack, SIZE, block_size);
            let volume = graph.volume();
            fill(volume);
            let write = measure(volume, Operation::Write { fua: false });
            let read = measure(volume, Operation::Read);
            println!(
                "{name:26} {:4}   write {write:7.1} ns ({:.2} M/s)   read {read:7.1} ns ({:.2} M/s)",
                block_size.bytes(),
                1e3 / write,
                1e3 / read
            );
        }
    }
}
