//! The loop: one thread, all queues.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use hdrhistogram::Histogram;
use millrace_block::Lba;
use millrace_driver::{DmaBuffer, Namespace, PAGE_SIZE, QueuePair, spec::Cqe};

use super::{
    BenchArgs, BenchError, Rw, Target,
    pattern::Stamp,
    tracker::Tracker,
    workload::{Kind, Rng, Workload},
};

/// Rounds over all queues between looks at the clock.
const ROUNDS_PER_CHECK: u32 = 64;
/// Idle rounds after which it is slept: the target may need the core, and what comes after so long will not be measured wrong by so little.
const ROUNDS_BEFORE_SLEEP: u32 = 8192;
const SLEEP: Duration = Duration::from_micros(50);
/// How long nothing may complete.
const STALL_LIMIT: Duration = Duration::from_secs(30);
/// Longest latency that the histograms tell apart, in nanoseconds.
const MAX_LATENCY: u64 = 100_000_000_000;

/// Set by Ctrl-C; a second one ends the process.
pub(super) fn interrupt_flag() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let shared = Arc::clone(&flag);
    std::thread::spawn(move || {
        // Without the handler Ctrl-C simply ends the process: no reason to fail the run.
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
        runtime.block_on(async {
            if tokio::signal::ctrl_c().await.is_ok() {
                shared.store(true, Ordering::Relaxed);
            }
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(130);
            }
        });
    });
    flag
}

/// Counts and latencies of one kind of command.
#[derive(Debug)]
pub(super) struct Counts {
    pub(super) commands: u64,
    /// Nanoseconds, sampled.
    pub(super) latency: Histogram<u64>,
}

impl Counts {
    fn new() -> Self {
        let latency = Histogram::new_with_bounds(1, MAX_LATENCY, 3).expect("constant bounds are valid");
        Self { commands: 0, latency }
    }
}

/// What a run gave.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) elapsed: Duration,
    pub(super) interrupted: bool,
    pub(super) reads: Counts,
    pub(super) writes: Counts,
    /// Blocks compared, the last pass included.
    pub(super) checked_blocks: u64,
    /// Writes in the place of reads, of units that this run had not written.
    pub(super) initialised: u64,
    /// Everything written was read once more at the end.
    pub(super) final_pass: bool,
    pub(super) seed: u64,
}

/// What a run gave, and what ended it early.
pub(super) struct Outcome {
    pub(super) measured: Measured,
    pub(super) failure: Option<BenchError>,
}

/// A place for one command in flight: a piece of the queue's buffer.
#[derive(Clone, Copy)]
struct Slot {
    kind: Kind,
    unit: u64,
    /// What the unit holds once the command succeeds.
    generation: u32,
    start: Option<Instant>,
}

/// One queue and what is in flight on it.
struct Lane {
    queue: QueuePair,
    buffer: DmaBuffer,
    workload: Workload,
    tracker: Option<Tracker>,
    slots: Vec<Slot>,
    /// The slot of every command in flight, by command identifier.
    slot_of: Vec<u16>,
    active: usize,
    /// Where the last pass is; `None` before it.
    final_unit: Option<u64>,
}

/// What all lanes share.
struct Shared<'a> {
    namespace: &'a Namespace,
    bs: usize,
    stride: usize,
    blocks_per_unit: u64,
    sample: u32,
    until_sample: u32,
    counting: bool,
    scratch: Vec<u8>,
    measured: Measured,
}

/// A run in progress.
pub(super) struct Worker<'a> {
    lanes: Vec<Lane>,
    shared: Shared<'a>,
    interrupt: Arc<AtomicBool>,
    qd: usize,
}

impl<'a> Worker<'a> {
    pub(super) fn new(args: &BenchArgs, target: &'a mut Target, interrupt: Arc<AtomicBool>) -> Result<Self, BenchError> {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let seed = Rng::new(since_epoch.as_nanos() as u64 ^ u64::from(std::process::id()) << 32).next();
        let units = target.units;
        let bs = args.bs as usize;
        let mut lanes = Vec::new();
        for (index, (queue, buffer)) in target.queues.drain(..).enumerate() {
            let part = |index: usize| index as u64 * units / u64::from(args.queues);
            let (first, count) = match args.rw {
                Rw::Randread | Rw::Randwrite | Rw::Randrw if !args.verify => (0, units),
                _ => (part(index), part(index + 1) - part(index)),
            };
            if args.verify && count < u64::from(args.qd) {
                return Err(BenchError::RangeTooSmall { units, bs: args.bs, queues: args.queues, qd: args.qd });
            }
            fill_random(&buffer, seed ^ index as u64);
            let idle = Slot { kind: Kind::Read, unit: 0, generation: 0, start: None };
            lanes.push(Lane {
                slot_of: vec![0; queue.capacity()],
                slots: vec![idle; args.qd as usize],
                workload: Workload::new(args.rw, args.rwmixread, seed.rotate_left(index as u32), first, count),
                tracker: args.verify.then(|| Tracker::new(first, count)),
                active: 0,
                final_unit: None,
                queue,
                buffer,
            });
        }
        let measured = Measured {
            elapsed: Duration::ZERO,
            interrupted: false,
            reads: Counts::new(),
            writes: Counts::new(),
            checked_blocks: 0,
            initialised: 0,
            final_pass: false,
            seed,
        };
        let shared = Shared {
            namespace: &target.namespace,
            bs,
            stride: bs.next_multiple_of(PAGE_SIZE),
            blocks_per_unit: args.bs / u64::from(target.namespace.block_size()),
            sample: args.sample,
            until_sample: 1,
            counting: true,
            scratch: vec![0; bs],
            measured,
        };
        Ok(Self { lanes, shared, interrupt, qd: args.qd as usize })
    }

    /// Runs for `time`, then reads back what was written if that is to be verified.
    pub(super) fn run(mut self, time: Duration) -> Outcome {
        let started = Instant::now();
        let mut failure = self.timed(started, time).err();
        if self.shared.counting {
            // It failed before time was up.
            self.shared.measured.elapsed = started.elapsed();
            self.shared.counting = false;
        }
        if failure.is_none() && self.lanes.iter().any(|lane| lane.tracker.is_some()) && !self.shared.measured.interrupted {
            failure = self.read_back().err();
            self.shared.measured.final_pass = failure.is_none() && !self.shared.measured.interrupted;
        }
        Outcome { measured: self.shared.measured, failure }
    }

    fn timed(&mut self, started: Instant, time: Duration) -> Result<(), BenchError> {
        for lane in &mut self.lanes {
            lane.begin(&mut self.shared, self.qd)?;
        }
        let mut watch = Watch::new(started);
        loop {
            let completed = self.round(true)?;
            if watch.due(completed) {
                let now = Instant::now();
                let interrupted = self.interrupt.load(Ordering::Relaxed);
                if now.duration_since(started) >= time || interrupted {
                    self.shared.measured.elapsed = now.duration_since(started);
                    self.shared.measured.interrupted = interrupted;
                    self.shared.counting = false;
                    break;
                }
                watch.check(now, &self.lanes)?;
            }
        }
        self.drain(&mut watch)
    }

    fn read_back(&mut self) -> Result<(), BenchError> {
        for lane in &mut self.lanes {
            lane.final_unit = Some(lane.workload.first());
            lane.begin(&mut self.shared, self.qd)?;
        }
        let mut watch = Watch::new(Instant::now());
        while self.lanes.iter().any(|lane| lane.active > 0) {
            let completed = self.round(true)?;
            if watch.due(completed) {
                watch.check(Instant::now(), &self.lanes)?;
                if self.interrupt.load(Ordering::Relaxed) {
                    self.shared.measured.interrupted = true;
                    return self.drain(&mut watch);
                }
            }
        }
        Ok(())
    }

    fn drain(&mut self, watch: &mut Watch) -> Result<(), BenchError> {
        while self.lanes.iter().any(|lane| lane.active > 0) {
            let completed = self.round(false)?;
            if watch.due(completed) {
                watch.check(Instant::now(), &self.lanes)?;
            }
        }
        Ok(())
    }

    /// Takes what has completed on every queue, and with `refill` puts new commands in their places.
    #[inline]
    fn round(&mut self, refill: bool) -> Result<usize, BenchError> {
        let mut completed = 0;
        for lane in &mut self.lanes {
            completed += lane.poll(&mut self.shared, refill)?;
        }
        Ok(completed)
    }
}

impl Lane {
    fn begin(&mut self, shared: &mut Shared<'_>, qd: usize) -> Result<(), BenchError> {
        for slot in 0..qd {
            self.refill(shared, slot as u16)?;
        }
        Ok(self.queue.ring()?)
    }

    #[inline]
    fn poll(&mut self, shared: &mut Shared<'_>, refill: bool) -> Result<usize, BenchError> {
        let mut completed = 0;
        // No more than a full queue per call, so that other queues have their turn.
        while completed < self.slots.len() {
            let Some(cqe) = self.queue.next_completion()? else { break };
            completed += 1;
            self.active -= 1;
            let slot = self.slot_of[usize::from(cqe.cid.0)];
            self.complete(shared, slot, &cqe)?;
            if refill {
                self.refill(shared, slot)?;
            }
        }
        if completed > 0 {
            self.queue.ring()?;
        }
        Ok(completed)
    }

    #[inline]
    fn complete(&mut self, shared: &mut Shared<'_>, index: u16, cqe: &Cqe) -> Result<(), BenchError> {
        let slot = self.slots[usize::from(index)];
        let status = cqe.status();
        if !status.is_success() {
            let what = if slot.kind == Kind::Read { "read" } else { "write" };
            let lba = Lba(slot.unit * shared.blocks_per_unit);
            return Err(BenchError::Io { what, lba, bytes: shared.bs as u64, status });
        }
        if shared.counting {
            let counts = if slot.kind == Kind::Read { &mut shared.measured.reads } else { &mut shared.measured.writes };
            counts.commands += 1;
            if let Some(start) = slot.start {
                counts.latency.saturating_record(start.elapsed().as_nanos() as u64);
            }
        }
        if let Some(tracker) = &mut self.tracker {
            if slot.kind == Kind::Read {
                self.buffer.read_at(usize::from(index) * shared.stride, &mut shared.scratch);
                shared.check(slot.unit, slot.generation)?;
            }
            tracker.release(slot.unit, slot.generation);
        }
        Ok(())
    }

    /// Places the next command, if there is one.
    #[inline]
    fn refill(&mut self, shared: &mut Shared<'_>, index: u16) -> Result<(), BenchError> {
        let Some((kind, unit, generation)) = self.choose(shared) else { return Ok(()) };
        let offset = usize::from(index) * shared.stride;
        if self.tracker.is_some() && kind == Kind::Write {
            shared.fill(unit, generation);
            self.buffer.write_at(offset, &shared.scratch);
        }
        let lba = Lba(unit * shared.blocks_per_unit);
        let data = self.buffer.slice(offset, shared.bs);
        let command = match kind {
            Kind::Read => shared.namespace.read(lba, data)?,
            Kind::Write => shared.namespace.write(lba, data)?,
        };
        let start = shared.sample();
        let cid = self.queue.submit(&command)?;
        self.slot_of[usize::from(cid.0)] = index;
        self.slots[usize::from(index)] = Slot { kind, unit, generation, start };
        self.active += 1;
        Ok(())
    }

    /// Kind, unit, and the generation that the unit holds afterwards.
    #[inline]
    fn choose(&mut self, shared: &mut Shared<'_>) -> Option<(Kind, u64, u32)> {
        let Some(tracker) = &mut self.tracker else {
            let (kind, unit) = self.workload.next();
            return Some((kind, unit, 0));
        };
        if let Some(from) = self.final_unit {
            let unit = tracker.next_known(from)?;
            self.final_unit = Some(unit + 1);
            let reserved = tracker.reserve(unit);
            assert_eq!(reserved, unit, "the last pass meets every unit once");
            return Some((Kind::Read, unit, tracker.generation(unit)));
        }
        let (kind, unit) = self.workload.next();
        let unit = tracker.reserve(unit);
        let generation = tracker.generation(unit);
        match kind {
            Kind::Read if generation != 0 => Some((Kind::Read, unit, generation)),
            Kind::Read => {
                shared.measured.initialised += 1;
                Some((Kind::Write, unit, tracker.next_generation(unit)))
            }
            Kind::Write => Some((Kind::Write, unit, tracker.next_generation(unit))),
        }
    }
}

impl Shared<'_> {
    #[inline]
    fn sample(&mut self) -> Option<Instant> {
        self.until_sample -= 1;
        if self.until_sample > 0 {
            return None;
        }
        self.until_sample = self.sample;
        Some(Instant::now())
    }

    fn stamp(&self, unit: u64, block: usize, generation: u32) -> Stamp {
        let lba = Lba(unit * self.blocks_per_unit + block as u64);
        Stamp { seed: self.measured.seed, lba, generation: u64::from(generation) }
    }

    fn fill(&mut self, unit: u64, generation: u32) {
        let block_size = self.namespace.block_size() as usize;
        let mut scratch = std::mem::take(&mut self.scratch);
        for (index, block) in scratch.chunks_exact_mut(block_size).enumerate() {
            self.stamp(unit, index, generation).fill(block);
        }
        self.scratch = scratch;
    }

    fn check(&mut self, unit: u64, generation: u32) -> Result<(), BenchError> {
        let block_size = self.namespace.block_size() as usize;
        for (index, block) in self.scratch.chunks_exact(block_size).enumerate() {
            self.stamp(unit, index, generation).check(block)?;
        }
        self.measured.checked_blocks += self.blocks_per_unit;
        Ok(())
    }
}

/// Looks at the clock now and then, and notices a target that is gone or stuck.
pub(super) struct Watch {
    rounds: u32,
    idle: u32,
    completed: bool,
    progress: Instant,
    alive: Instant,
}

impl Watch {
    pub(super) fn new(now: Instant) -> Self {
        Self { rounds: 0, idle: 0, completed: false, progress: now, alive: now }
    }

    /// Whether it is time for a look; waits a little when nothing goes on.
    #[inline]
    fn due(&mut self, completed: usize) -> bool {
        if completed > 0 {
            self.completed = true;
            self.idle = 0;
        } else {
            self.idle = self.idle.saturating_add(1);
            if self.idle <= ROUNDS_BEFORE_SLEEP {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(SLEEP);
            }
        }
        self.rounds += 1;
        if self.rounds < ROUNDS_PER_CHECK {
            return false;
        }
        self.rounds = 0;
        true
    }

    /// Counts completions of a round.
    #[inline]
    pub(super) fn saw(&mut self, completed: usize) {
        self.completed |= completed > 0;
    }

    /// How long nothing has completed, once that is too long.
    pub(super) fn stalled(&mut self, now: Instant) -> Option<Duration> {
        if std::mem::take(&mut self.completed) {
            self.progress = now;
        }
        let waited = now.duration_since(self.progress);
        (waited >= STALL_LIMIT).then_some(waited)
    }

    /// Whether it is time to ask the transport: a dead target leaves shared memory as it was, and only its socket tells.
    pub(super) fn ask(&mut self, now: Instant) -> bool {
        let due = now.duration_since(self.progress.max(self.alive)) >= Duration::from_millis(100);
        if due {
            self.alive = now;
        }
        due
    }

    fn check(&mut self, now: Instant, lanes: &[Lane]) -> Result<(), BenchError> {
        if let Some(waited) = self.stalled(now) {
            return Err(BenchError::Stalled { waited, in_flight: lanes.iter().map(|lane| lane.active).sum() });
        }
        if self.ask(now)
            && let Some(lane) = lanes.first()
        {
            lane.queue.check()?;
        }
        Ok(())
    }
}

pub(super) fn fill_random(buffer: &DmaBuffer, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut page = [0; PAGE_SIZE];
    for offset in (0..buffer.len()).step_by(PAGE_SIZE) {
        page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next().to_le_bytes()));
        buffer.write_at(offset, &page);
    }
}
