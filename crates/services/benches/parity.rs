//! What parity costs: whole stripes at random places, and 4 KiB, on memory, one request after the other.
//! `cargo bench -p millrace-services --bench parity`

mod common;

use std::{
    hint::black_box,
    pin::Pin,
    sync::Arc,
    task::{Context, Waker},
    time::{Duration, Instant},
};

use millrace_block::{
    BlockCount, BlockSize, Lba, Operation, Request, Scratch, TaskContext, Volume,
    conformance::{Memory, Random, SyncIo},
};
use millrace_memory::BufferPool;

/// Bytes of a volume.
const SIZE: u64 = 1 << 30;
/// Bytes of the client's memory.
const CLIENT: usize = 1 << 20;

struct Client {
    io: SyncIo,
    buffers: BufferPool,
    scratch: Scratch,
    memory: Memory,
}

impl Client {
    fn new(volume: &Arc<dyn Volume>) -> Self {
        let (io, buffers) = (SyncIo::new(1, false), BufferPool::new(32).expect("buffers"));
        Self { io, buffers, scratch: Scratch::new(volume.scratch_bytes()), memory: Memory::new(CLIENT) }
    }

    fn request(&mut self, volume: &Arc<dyn Volume>, operation: Operation, at: u64, from: usize, bytes: usize) {
        let segments = [self.memory.segment(from, bytes)];
        let request = Request { operation, lba: Lba(at >> 9), count: BlockCount(bytes as u64 >> 9), segments: &segments };
        let mut step = volume.submit(TaskContext::new(&self.scratch, &self.buffers, &self.io), request);
        let mut cx = Context::from_waker(Waker::noop());
        let result = loop {
            match Pin::new(&mut step).poll(&mut cx) {
                std::task::Poll::Ready(result) => break result,
                std::task::Poll::Pending => {}
            }
        };
        black_box(result).expect("memory does not fail");
        drop(step);
        self.scratch.reset();
    }

    /// Nanoseconds per request of so many bytes, at multiples of as many: the best of many short runs.
    fn measure(&mut self, volume: &Arc<dyn Volume>, operation: Operation, bytes: usize) -> u64 {
        const REQUESTS: u64 = 10_000;
        let (mut best, end, mut random) = (u64::MAX, Instant::now() + Duration::from_secs(2), Random::new(7));
        let places = CLIENT / bytes;
        while Instant::now() < end {
            let start = Instant::now();
            for number in 0..REQUESTS {
                let at = random.below(SIZE / bytes as u64) * bytes as u64;
                self.request(volume, operation, at, (number as usize % places) * bytes, bytes);
            }
            best = best.min(start.elapsed().as_nanos() as u64 / REQUESTS);
        }
        best
    }
}

/// Nanoseconds that the bytes of a write of one chunk of 4 KiB to three legs take, nothing but copies: what the data were and the parity to
/// a buffer, data and parity to their places.
fn copies() -> u64 {
    const CHUNK: usize = 4096;
    const WRITES: u64 = 10_000;
    let mut legs = [1_u8, 2, 3].map(|byte| vec![byte; SIZE as usize / 2]);
    let (mut buffer, client) = (vec![4_u8; 2 * CHUNK], vec![5_u8; CLIENT]);
    let (mut best, end, mut random) = (u64::MAX, Instant::now() + Duration::from_secs(2), Random::new(7));
    while Instant::now() < end {
        let start = Instant::now();
        for number in 0..WRITES as usize {
            let row = random.below(SIZE / 2 / CHUNK as u64) as usize;
            let [data, parity] = [0, 1].map(|part| (row + part) % 3);
            let (at, from) = (row * CHUNK, number * CHUNK % CLIENT);
            buffer[..CHUNK].copy_from_slice(&legs[data][at..at + CHUNK]);
            buffer[CHUNK..].copy_from_slice(&legs[parity][at..at + CHUNK]);
            legs[data][at..at + CHUNK].copy_from_slice(&client[from..from + CHUNK]);
            legs[parity][at..at + CHUNK].copy_from_slice(&buffer[CHUNK..]);
        }
        black_box((&mut legs, &mut buffer));
        best = best.min(start.elapsed().as_nanos() as u64 / WRITES);
    }
    best
}

fn main() {
    // `cargo test` runs benches, too, with this word: nothing to measure then.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let stacks = [
        ("memory", 8 << 10),
        ("stripe(chunk=4K, memory, memory)", 8 << 10),
        ("parity(chunk=4K, memory, memory, memory)", 8 << 10),
        ("parity(chunk=16K, memory, memory, memory, memory, memory)", 64 << 10),
        ("parity(redundancy=2, chunk=16K, memory, memory, memory, memory, memory, memory)", 64 << 10),
    ];
    for (stack, whole) in stacks {
        let graph = common::volume(stack, SIZE, BlockSize::B512);
        let volume = graph.volume();
        let mut client = Client::new(volume);
        client.memory.segment(0, CLIENT).fill(1);
        // Every page is there, and every region is marked.
        for at in (0..SIZE).step_by(whole) {
            client.request(volume, Operation::Write { fua: false }, at, 0, whole);
        }
        let write = client.measure(volume, Operation::Write { fua: false }, whole);
        let small = client.measure(volume, Operation::Write { fua: false }, 4096);
        let read = client.measure(volume, Operation::Read, 4096);
        println!("{stack}: write of {} KiB {write} ns, of 4 KiB {small} ns; read of 4 KiB {read} ns", whole >> 10);
    }
    println!("the bytes of a write of 4 KiB to parity over three legs, nothing but copies: {} ns", copies());
}
