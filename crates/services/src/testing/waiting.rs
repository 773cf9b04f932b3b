//! Tests that do something while something else waits: nothing is left to how long things take.

use std::{
    future::poll_fn,
    ops::Range,
    pin::Pin,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use millrace_backends::fault::{FaultVolume, Kind};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Geometry, Lba, Operation, Request, Scratch, Step, TaskContext, Usage, Volume,
    VolumeError,
    clock::{self, SimulatedTime},
    conformance::{Memory, SyncIo},
    future_bytes, yield_now,
};
use millrace_memory::BufferPool;

use crate::{
    background::Stop,
    locks::{Ranges, UNIT},
    members::intent::Intent,
};

/// The longest wait before a hang is called one: far longer than anything takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// Rounds of looks at all requests without an end of any, before they are said to wait for each other: what they wait for else takes some
/// looks and no time.
const ROUNDS: usize = 10_000;

/// Looks at requests one after the other; whether any has ended.
fn look(steps: &mut [Option<Step<'_>>]) -> bool {
    let (mut cx, mut ended) = (Context::from_waker(Waker::noop()), false);
    for place in steps {
        if let Some(Poll::Ready(result)) = place.as_mut().map(|step| Pin::new(step).poll(&mut cx)) {
            result.expect("it ends well");
            (*place, ended) = (None, true);
        }
    }
    ended
}

/// Lets requests come as far as they can, now that a gate is closed.
pub(crate) fn come_on(steps: &mut [Option<Step<'_>>]) {
    for _ in 0..100 {
        look(steps);
    }
}

/// Looks at requests again and again, until all have ended well.
///
/// # Panics
/// When they wait for each other.
pub(crate) fn end_all(steps: &mut [Option<Step<'_>>]) {
    let mut idle = 0;
    while steps.iter().any(Option::is_some) && idle < ROUNDS {
        idle = if look(steps) { 0 } else { idle + 1 };
    }
    // What waits for ever must not be dropped in the middle of it.
    let left: Vec<_> = steps.iter_mut().filter_map(Option::take).collect();
    let count = left.len();
    std::mem::forget(left);
    assert_eq!(count, 0, "so many wait for each other");
}

/// Copies eight blocks, which waits for what is read behind the gate with a level's only buffer in its hands, and meanwhile writes where they
/// go, from so many pieces of memory, which takes a buffer below: both end when the gate is open.
pub(crate) fn copy_and_write(volume: &Arc<dyn Volume>, gate: &Gate, from: u64, to: u64, pieces: usize) {
    let (io, buffers, room) = (SyncIo::new(1, false).hasty(), BufferPool::new(1).unwrap(), Memory::new(4096));
    let scratches = [(); 2].map(|()| Scratch::new(volume.scratch_bytes()));
    let len = 4096 / pieces;
    let segments: Vec<_> = (0..pieces).map(|at| room.segment(at * len, len)).collect();
    let work = [(Operation::Copy { source: Lba(from) }, &segments[..0]), (Operation::Write { fua: false }, &segments[..])];
    let submit = |at: usize| {
        let (operation, segments) = work[at];
        let request = Request { operation, lba: Lba(to), count: BlockCount(8), segments };
        volume.submit(TaskContext::new(&scratches[at], &buffers, &io), request)
    };
    gate.open.store(false, Ordering::Relaxed);
    let mut steps = [Some(submit(0)), None];
    come_on(&mut steps);
    steps[1] = Some(submit(1));
    come_on(&mut steps);
    gate.open.store(true, Ordering::Relaxed);
    end_all(&mut steps);
}

/// Writes a block, for which nothing else has to happen first.
pub(crate) fn write_at_once(volume: &Arc<dyn Volume>, lba: u64) {
    let (io, buffers, room) = (SyncIo::new(1, false).hasty(), BufferPool::new(2).unwrap(), Memory::new(512));
    let (scratch, segments) = (Scratch::new(volume.scratch_bytes()), [room.segment(0, 512)]);
    let (operation, count) = (Operation::Write { fua: false }, BlockCount(1));
    let request = Request { operation, lba: Lba(lba), count, segments: &segments };
    end_all(&mut [Some(volume.submit(TaskContext::new(&scratch, &buffers, &io), request))]);
}

/// Waits until it is so.
pub(crate) fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < end, "waited {PATIENCE:?} in vain: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Has something erased while somebody has a part of it, until some of the rest is erased on that leg.
pub(crate) fn erase_beside(ranges: &Ranges, part: Range<u64>, leg: &FaultVolume, erase: impl FnOnce() + Send) {
    thread::scope(|scope| {
        let held = ranges.try_lock(part).expect("nobody has it");
        let before = leg.requests(Kind::WriteZeroes);
        let erasure = scope.spawn(erase);
        until("some of it is erased", || leg.requests(Kind::WriteZeroes) > before);
        drop(held);
        erasure.join().expect("it ends well");
    });
}

/// Has somebody at work in the first two units all the time, who has one of them before it lets the other go, until `meanwhile` is over.
pub(crate) fn keep_busy(ranges: &Ranges, meanwhile: impl FnOnce()) {
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (is_over, began) = (AtomicBool::new(false), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            // It ends by itself, so that who waits for it in vain is seen to.
            let end = Instant::now() + 2 * PATIENCE;
            let mut held = ranges.try_lock(0..UNIT).expect("nobody has it");
            began.wait();
            for unit in [1, 0].into_iter().cycle() {
                let next = loop {
                    if is_over.load(Ordering::Relaxed) || Instant::now() > end {
                        return;
                    }
                    if let Some(next) = ranges.try_lock(unit * UNIT..(unit + 1) * UNIT) {
                        break next;
                    }
                    std::hint::spin_loop();
                };
                drop(std::mem::replace(&mut held, next));
            }
        });
        // Also when it panics.
        let _over = Over(&is_over);
        began.wait();
        meanwhile();
    });
}

/// Has half of what is stale brought in order, and then tells the work to stop.
pub(crate) async fn stop_half_way<T>(intent: &Intent, stop: &Stop, mut work: Pin<Box<impl Future<Output = T>>>) -> T {
    let half = intent.stale() / 2;
    poll_fn(|task| {
        if intent.stale() <= half {
            stop.set();
        }
        work.as_mut().poll(task)
    })
    .await
}

/// Writes the first blocks. Where a rule delays it on that leg it stands still until `meanwhile` is over, however long that takes.
pub(crate) fn write_around(volume: &Arc<dyn Volume>, leg: &FaultVolume, data: &[u8], meanwhile: impl FnOnce()) {
    // This thread's sleeps, and so the delay, last until its clock is moved.
    let time = SimulatedTime::new();
    let (io, buffers) = (SyncIo::new(1, false), BufferPool::new(2).unwrap());
    let (scratch, room) = (Scratch::new(volume.scratch_bytes()), Memory::new(data.len()));
    let segments = [room.segment(0, data.len())];
    segments[0].write_at(0, data);
    let (operation, count) = (Operation::Write { fua: false }, BlockCount(data.len() as u64 / 512));
    let request = Request { operation, lba: Lba(0), count, segments: &segments };
    let before = leg.faults();
    let mut write = volume.submit(TaskContext::new(&scratch, &buffers, &io), request);
    let mut cx = Context::from_waker(Waker::noop());
    let mut has_ended = || Pin::new(&mut write).poll(&mut cx).map(|result| result.expect("a write")).is_ready();
    until("the leg delays the write", || {
        assert!(!has_ended(), "the leg did not delay it");
        leg.faults() > before
    });
    meanwhile();
    until("the write ends", || {
        time.advance_to(clock::now() + 1_000_000_000);
        has_ended()
    });
}

/// Flushes, and does something else when that has come as far as it can before a gate that is closed, and is open again meanwhile. What the flush
/// said.
pub(crate) fn flush_around(volume: &Arc<dyn Volume>, gate: &Gate, meanwhile: impl FnOnce()) -> Result<(), BlockError> {
    let (io, buffers) = (SyncIo::new(1, false).hasty(), BufferPool::new(2).unwrap());
    let scratch = Scratch::new(volume.scratch_bytes());
    let request = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };
    gate.open.store(false, Ordering::Relaxed);
    let mut flush = volume.submit(TaskContext::new(&scratch, &buffers, &io), request);
    let mut cx = Context::from_waker(Waker::noop());
    let mut look = || Pin::new(&mut flush).poll(&mut cx);
    for _ in 0..100 {
        assert!(look().is_pending(), "it waits before the gate");
    }
    gate.open.store(true, Ordering::Relaxed);
    meanwhile();
    for _ in 0..ROUNDS {
        if let Poll::Ready(result) = look() {
            return result;
        }
    }
    panic!("the flush does not end");
}

/// A volume where requests of one kind take until it is opened: or for long, so that a test of who waits for them ends.
pub(crate) struct Gate {
    volume: Arc<dyn Volume>,
    holds: fn(Operation) -> bool,
    pub(crate) open: AtomicBool,
}

impl Gate {
    /// An open one.
    pub(crate) fn before(volume: Arc<dyn Volume>, holds: fn(Operation) -> bool) -> Arc<Self> {
        Arc::new(Self { volume, holds, open: AtomicBool::new(true) })
    }

    async fn wait(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let end = Instant::now() + PATIENCE;
        while !self.open.load(Ordering::Relaxed) && Instant::now() < end {
            yield_now().await;
        }
        self.volume.submit(cx, request).await
    }
}

impl Volume for Gate {
    fn name(&self) -> &str {
        self.volume.name()
    }

    fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if (self.holds)(request.operation) {
            return Step::Wait(cx.scratch.place_future(self.wait(cx, request)));
        }
        self.volume.submit(cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        future_bytes(Self::wait) + self.volume.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.volume.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.volume.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.volume.usage()
    }
}
