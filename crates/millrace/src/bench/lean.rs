//! The lean client: whatever it costs is missing in the target's numbers, so it costs next to nothing.
//!
//! One thread goes round all queues of all controllers. On each it looks at one completion queue entry; when that is there, a
//! whole batch is: it takes the batch, begins as many commands, and rings once.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use millrace_block::Lba;
use millrace_driver::{Command, DmaBuffer, LeanQueue, SECTOR};

use super::{
    BenchArgs, BenchError, Rw, Target,
    lane::{self, Ring},
    lean_report::LeanReport,
    stages::StageWatch,
    worker::{self, Watch},
    workload::{Rng, Workload},
};

/// Batches on all queues between looks at the clock.
const ROUNDS_PER_CHECK: usize = 256;
/// Before the measurement, so that caches, predictors and an adaptive target are where they will be.
const WARM: Duration = Duration::from_millis(50);
/// Longest latency that the histogram tells apart, in nanoseconds.
const MAX_LATENCY: u64 = 100_000_000_000;
/// No command is watched.
const NONE: u32 = u32::MAX;

/// One queue, and what is in flight on it.
struct Lane {
    queue: Ring,
    /// Index of its controller.
    device: usize,
    addresses: Workload,
    /// Every identifier keeps the address that it was given first.
    still: bool,
    blocks_per_unit: u64,
    batch: usize,
    taken: Vec<u16>,
    /// Identifiers that wait for their time, when commands are paced.
    free: Vec<u16>,
    /// When each command began, or was due. Only where every command is timed.
    begun: Vec<Instant>,
    /// Where few commands are timed: the one that is, since when, and whether the next batch is to have one.
    watched: (u32, Instant),
    watch_next: bool,
    commands: u64,
    /// Kept for its life: commands point to it.
    _buffer: Option<DmaBuffer>,
}

/// What a run gave.
pub(super) struct Measured {
    pub(super) elapsed: Duration,
    /// Commands completed, by controller.
    pub(super) commands: Vec<u64>,
    pub(super) latency: Histogram<u64>,
    pub(super) interrupts: u64,
}

/// All queues, and what is counted over all.
struct Lean {
    lanes: Vec<Lane>,
    latency: Histogram<u64>,
    interrupts: u64,
}

/// Runs the lean client and prints its results.
pub(super) fn run(args: &BenchArgs, watch: Option<&StageWatch>) -> Result<(), BenchError> {
    if args.rw == Rw::Randrw {
        return Err(BenchError::Mixed);
    }
    if args.lean.virtio {
        let mut lean = Lean::on_virtio(args)?;
        let measured = lean.measure(args)?;
        return print(&LeanReport::new(args, "virtio-blk".to_owned(), &measured), args, watch);
    }
    let targets = args.places().into_iter().map(|place| Target::connect(args, place));
    let mut targets = targets.collect::<Result<Vec<_>, _>>()?;
    let mut lean = Lean::new(args, &mut targets)?;
    let measured = lean.measure(args)?;
    let model = targets.first().map(Target::model).unwrap_or_default();
    print(&LeanReport::new(args, model, &measured), args, watch)?;
    targets.iter_mut().for_each(Target::shutdown);
    Ok(())
}

/// What was measured is told whatever has become of the daemon.
fn print(report: &LeanReport, args: &BenchArgs, watch: Option<&StageWatch>) -> Result<(), BenchError> {
    let stages = watch.map(StageWatch::end).transpose();
    report.print(args.json, stages.as_ref().ok().and_then(Option::as_ref)).map_err(BenchError::Output)?;
    stages.map(drop)
}

impl Lean {
    fn new(args: &BenchArgs, targets: &mut [Target]) -> Result<Self, BenchError> {
        let mut lanes = Vec::new();
        for (device, target) in targets.iter_mut().enumerate() {
            let blocks_per_unit = args.bs / u64::from(target.namespace.block_size());
            let parts = u64::from(args.queues);
            for (index, (queue, buffer)) in std::mem::take(&mut target.queues).into_iter().enumerate() {
                let commands = commands(args, target, &buffer)?;
                worker::fill_random(&buffer, index as u64);
                let part = |index: usize| index as u64 * target.units / parts;
                let (first, count) = match args.rw {
                    Rw::Randread | Rw::Randwrite | Rw::Randrw => (0, target.units),
                    Rw::Read | Rw::Write => (part(index), part(index + 1) - part(index)),
                };
                let seed = Rng::new((device as u64) << 32 | index as u64).next();
                let queue = Ring::Nvme(LeanQueue::new(queue, &commands)?);
                let addresses = Workload::new(args.rw, 0, seed, first, count);
                lanes.push(Lane::new(args, device, queue, addresses, blocks_per_unit, Some(buffer)));
            }
        }
        Ok(Self::of(lanes))
    }

    /// Virtio disks, with one queue each.
    fn on_virtio(args: &BenchArgs) -> Result<Self, BenchError> {
        let mut lanes = Vec::new();
        for (device, socket) in args.sockets.iter().enumerate() {
            let (queue, units) = lane::connect_virtio(args, socket)?;
            worker::fill_random(queue.data(), device as u64);
            let addresses = Workload::new(args.rw, 0, Rng::new((device as u64) << 32).next(), 0, units);
            lanes.push(Lane::new(args, device, Ring::Virtio(queue), addresses, args.bs / SECTOR, None));
        }
        Ok(Self::of(lanes))
    }

    fn of(lanes: Vec<Lane>) -> Self {
        let latency = Histogram::new_with_bounds(1, MAX_LATENCY, 3).expect("constant bounds are valid");
        Self { lanes, latency, interrupts: 0 }
    }

    fn measure(&mut self, args: &BenchArgs) -> Result<Measured, BenchError> {
        match args.lean.rate {
            Some(rate) => self.paced(Pace::new(rate, args.lean.uneven), args.time),
            None if args.lean.interrupts => self.interrupted(args.time),
            None if args.lean.latency => self.closed::<true>(args.time),
            None => self.closed::<false>(args.time),
        }
    }

    /// As many commands in flight as there may be, all the time. `TIMED`: the latency of every one.
    fn closed<const TIMED: bool>(&mut self, time: Duration) -> Result<Measured, BenchError> {
        for lane in &mut self.lanes {
            lane.begin_all()?;
        }
        let mut elapsed = Duration::ZERO;
        for time in [WARM, time] {
            self.reset();
            let start = Instant::now();
            let mut watch = Watch::new(start);
            let rounds = (ROUNDS_PER_CHECK / self.lanes.len()).max(1);
            elapsed = loop {
                let mut completed = 0;
                for _ in 0..rounds {
                    for lane in &mut self.lanes {
                        completed += lane.turn::<TIMED>(&mut self.latency)?;
                    }
                }
                let now = Instant::now();
                let elapsed = now.duration_since(start);
                if elapsed >= time {
                    break elapsed;
                }
                if !TIMED {
                    self.lanes.iter_mut().for_each(|lane| lane.watch_next = lane.watched.0 == NONE);
                }
                self.look(&mut watch, now, completed)?;
            };
        }
        Ok(self.finish(elapsed))
    }

    /// As [`closed`](Self::closed), every command timed, but asleep until an interrupt when there is nothing to take.
    fn interrupted(&mut self, time: Duration) -> Result<Measured, BenchError> {
        for lane in &mut self.lanes {
            lane.begin_all()?;
        }
        let mut elapsed = Duration::ZERO;
        for time in [WARM, time] {
            self.reset();
            let start = Instant::now();
            let mut watch = Watch::new(start);
            elapsed = loop {
                let mut completed = 0;
                for lane in &mut self.lanes {
                    completed += lane.turn::<true>(&mut self.latency)?;
                }
                let now = Instant::now();
                let elapsed = now.duration_since(start);
                if elapsed >= time {
                    break elapsed;
                }
                self.look(&mut watch, now, completed)?;
                if completed == 0
                    && let [lane] = &self.lanes[..]
                {
                    self.interrupts += lane.queue.wait_interrupt(Duration::from_millis(100))?;
                }
            };
        }
        Ok(self.finish(elapsed))
    }

    /// Commands at a pace, whatever the target does. A command that finds no room begins late, but counts from when it was due.
    fn paced(&mut self, mut pace: Pace, time: Duration) -> Result<Measured, BenchError> {
        for lane in &mut self.lanes {
            lane.free.extend((0..lane.queue.depth() as u16).rev());
        }
        let mut elapsed = Duration::ZERO;
        let mut turn = 0;
        for time in [WARM, time] {
            self.reset();
            let start = Instant::now();
            let mut due = start;
            let mut watch = Watch::new(start);
            elapsed = loop {
                let mut completed = 0;
                for lane in &mut self.lanes {
                    completed += lane.collect(&mut self.latency)?;
                }
                let now = Instant::now();
                let lanes = self.lanes.len();
                while due <= now {
                    let Some(lane) =
                        (0..lanes).map(|step| (turn + step) % lanes).find(|lane| !self.lanes[*lane].free.is_empty())
                    else {
                        break;
                    };
                    self.lanes[lane].begin_due(due)?;
                    turn = (lane + 1) % lanes;
                    due += pace.next();
                }
                let elapsed = now.duration_since(start);
                if elapsed >= time {
                    break elapsed;
                }
                if self.lanes.iter().any(|lane| lane.queue.in_flight() > 0) {
                    self.look(&mut watch, now, completed)?;
                } else {
                    watch = Watch::new(now);
                }
            };
        }
        Ok(self.finish(elapsed))
    }

    fn reset(&mut self) {
        self.latency.reset();
        self.interrupts = 0;
        self.lanes.iter_mut().for_each(|lane| lane.commands = 0);
    }

    /// Notices a target that is gone or stuck.
    fn look(&self, watch: &mut Watch, now: Instant, completed: usize) -> Result<(), BenchError> {
        watch.saw(completed);
        if let Some(waited) = watch.stalled(now) {
            return Err(BenchError::Stalled {
                waited,
                in_flight: self.lanes.iter().map(|lane| lane.queue.in_flight()).sum(),
            });
        }
        if completed == 0 && watch.ask(now) {
            self.lanes.iter().try_for_each(|lane| lane.queue.check())?;
        }
        Ok(())
    }

    fn finish(&self, elapsed: Duration) -> Measured {
        let devices = self.lanes.iter().map(|lane| lane.device + 1).max().unwrap_or(0);
        let mut commands = vec![0; devices];
        for lane in &self.lanes {
            commands[lane.device] += lane.commands;
        }
        Measured { elapsed, commands, latency: self.latency.clone(), interrupts: self.interrupts }
    }
}

/// How far apart commands begin.
struct Pace {
    mean: Duration,
    uneven: Option<Rng>,
}

impl Pace {
    fn new(rate: u64, uneven: bool) -> Self {
        let mean = Duration::from_nanos((1_000_000_000 / rate).max(1));
        Self { mean, uneven: uneven.then(|| Rng::new(rate)) }
    }

    /// Always the same, or exponentially distributed.
    fn next(&mut self) -> Duration {
        let Some(rng) = &mut self.uneven else { return self.mean };
        // Above 0, at most 1.
        let uniform = (f64::from((rng.next() >> 32) as u32) + 1.0) / (f64::from(u32::MAX) + 1.0);
        self.mean.mul_f64(-uniform.ln())
    }
}

impl Lane {
    fn new(
        args: &BenchArgs,
        device: usize,
        queue: Ring,
        addresses: Workload,
        blocks_per_unit: u64,
        buffer: Option<DmaBuffer>,
    ) -> Self {
        let (qd, now) = (args.qd as usize, Instant::now());
        Self {
            queue,
            device,
            addresses,
            still: args.lean.still,
            blocks_per_unit,
            batch: args.lean.batch.unwrap_or(qd / 4).clamp(1, qd),
            taken: Vec::with_capacity(qd),
            free: Vec::with_capacity(qd),
            begun: vec![now; qd],
            watched: (NONE, now),
            watch_next: false,
            commands: 0,
            _buffer: buffer,
        }
    }

    fn begin_all(&mut self) -> Result<(), BenchError> {
        for cid in 0..self.queue.depth() as u16 {
            self.begin(cid);
        }
        self.queue.ring()
    }

    #[inline]
    fn begin(&mut self, cid: u16) {
        let unit = if self.still { self.addresses.fixed(cid) } else { self.addresses.next().1 };
        self.queue.begin(cid, unit * self.blocks_per_unit);
    }

    /// Takes a batch, if there is one, and begins as many commands; how many.
    #[inline]
    fn turn<const TIMED: bool>(&mut self, latency: &mut Histogram<u64>) -> Result<usize, BenchError> {
        let mut taken = std::mem::take(&mut self.taken);
        let result = self.queue.take(self.batch, &mut taken);
        if TIMED && !taken.is_empty() {
            let now = Instant::now();
            for &cid in &taken {
                let begun = std::mem::replace(&mut self.begun[usize::from(cid)], now);
                latency.saturating_record(now.duration_since(begun).as_nanos() as u64);
            }
        }
        for &cid in &taken {
            if !TIMED && u32::from(cid) == self.watched.0 {
                latency.saturating_record(self.watched.1.elapsed().as_nanos() as u64);
                self.watched.0 = NONE;
            }
            self.begin(cid);
        }
        if !TIMED
            && self.watch_next
            && let Some(cid) = taken.last()
        {
            self.watched = (u32::from(*cid), Instant::now());
            self.watch_next = false;
        }
        let completed = taken.len();
        self.taken = taken;
        self.commands += completed as u64;
        result?;
        if completed > 0 {
            self.queue.ring()?;
        }
        Ok(completed)
    }

    /// Takes what has completed, without beginning anything; how many.
    fn collect(&mut self, latency: &mut Histogram<u64>) -> Result<usize, BenchError> {
        self.queue.take(1, &mut self.taken)?;
        if !self.taken.is_empty() {
            let now = Instant::now();
            for &cid in &self.taken {
                let waited = now.saturating_duration_since(self.begun[usize::from(cid)]);
                latency.saturating_record(waited.as_nanos() as u64);
                self.free.push(cid);
            }
            self.commands += self.taken.len() as u64;
        }
        Ok(self.taken.len())
    }

    /// Begins one command that was due at this time.
    fn begin_due(&mut self, due: Instant) -> Result<(), BenchError> {
        let Some(cid) = self.free.pop() else { return Ok(()) };
        self.begun[usize::from(cid)] = due;
        self.begin(cid);
        self.queue.ring()
    }
}

/// The command of every identifier; addresses come later.
fn commands(args: &BenchArgs, target: &Target, buffer: &DmaBuffer) -> Result<Vec<Command>, BenchError> {
    let stride = buffer.len() / args.qd as usize;
    let make = |cid: u32| {
        let data = buffer.slice(cid as usize * stride, args.bs as usize);
        let command = match args.rw {
            Rw::Randread | Rw::Read | Rw::Randrw => target.namespace.read(Lba(0), data),
            Rw::Randwrite | Rw::Write => target.namespace.write(Lba(0), data),
        };
        Ok(command?)
    };
    (0..args.qd).map(make).collect()
}
