//! Requests in simulated time: nothing takes any, but for sleeps.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Waker},
};

use millrace_block::{
    Asker, BlockCount, Lba, Operation, Request, Scratch, Step, TaskContext, Volume,
    clock::{self, SimulatedTime},
    conformance::{Memory, SyncIo},
};
use millrace_memory::{BufferPool, Segment};

/// Who keeps so many requests in flight on a volume: reads or writes of so many blocks.
#[derive(Clone)]
pub struct Load {
    /// The volume.
    pub volume: Arc<dyn Volume>,
    /// Requests in flight.
    pub depth: usize,
    /// They write.
    pub writes: bool,
    /// Those that do write zeroes, of blocks that may be given back.
    pub zeroes: bool,
    /// What each moves.
    pub blocks: u64,
    /// Requests in all.
    pub most: u64,
    /// The device that it is.
    pub asker: Asker,
}

impl Load {
    /// A load that goes on and on.
    pub fn new(volume: &Arc<dyn Volume>, depth: usize, writes: bool, blocks: u64) -> Self {
        Self { volume: Arc::clone(volume), depth, writes, zeroes: false, blocks, most: u64::MAX, asker: Asker::NOBODY }
    }

    /// Each of those in flight, and no more.
    #[must_use]
    pub fn once(self) -> Self {
        Self { most: self.depth as u64, ..self }
    }

    fn request<'a>(&self, segments: &'a [Segment]) -> Request<'a> {
        let operation = match (self.writes, self.zeroes) {
            (false, _) => Operation::Read,
            (true, false) => Operation::Write { fua: false },
            (true, true) => Operation::WriteZeroes { fua: false, deallocate: true },
        };
        let segments = if operation.has_data() { segments } else { &[] };
        Request { operation, lba: Lba(0), count: BlockCount(self.blocks), segments }
    }
}

/// Drives loads for a time; how many requests of each ended meanwhile. What still waits at the end goes on until it ends.
///
/// # Panics
/// When there is no memory.
pub fn drive(time: &SimulatedTime, loads: &[Load], length: u64) -> Vec<u64> {
    let (io, buffers) = (SyncIo::new(1, false), BufferPool::new(1).unwrap());
    let bytes = |load: &Load| (load.blocks << load.volume.geometry().block_size.shift()) as usize;
    let memories: Vec<_> = loads.iter().map(|load| Memory::new(bytes(load))).collect();
    let segments: Vec<_> = loads.iter().zip(&memories).map(|(load, memory)| [memory.segment(0, bytes(load))]).collect();
    let scratch = |load: &Load| Scratch::new(load.volume.scratch_bytes());
    let scratches: Vec<Vec<_>> = loads.iter().map(|load| (0..load.depth).map(|_| scratch(load)).collect()).collect();
    let mut steps: Vec<Vec<Option<Step<'_>>>> = loads.iter().map(|load| (0..load.depth).map(|_| None).collect()).collect();
    let end = clock::now() + length;
    let mut counts = vec![0; loads.len()];
    let mut left: Vec<_> = loads.iter().map(|load| load.most).collect();
    let mut cx = Context::from_waker(Waker::noop());
    // A sleep that is over ends at the second look, at the latest at the third.
    let mut idle = 0;
    let mut went = true;
    while went || steps.iter().flatten().any(Option::is_some) {
        went = false;
        for (at, steps) in steps.iter_mut().enumerate() {
            let before = loads[at].asker.enter();
            for (slot, place) in steps.iter_mut().enumerate() {
                let running = clock::now() < end;
                if place.is_none() && running && left[at] > 0 {
                    left[at] -= 1;
                    *place = Some(
                        loads[at]
                            .volume
                            .submit(TaskContext::new(&scratches[at][slot], &buffers, &io), loads[at].request(&segments[at])),
                    );
                }
                let ready = place.as_mut().is_some_and(|step| Pin::new(step).poll(&mut cx).is_ready());
                if ready {
                    counts[at] += u64::from(running);
                    *place = None;
                    went = true;
                }
            }
            before.enter();
        }
        idle = if went { 0 } else { idle + 1 };
        if idle > 3
            && let Some(next) = io.next_wake()
        {
            time.advance_to(next);
            idle = 0;
        }
    }
    counts
}
