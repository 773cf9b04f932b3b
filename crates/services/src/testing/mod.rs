//! What the tests of services share.
//!
//! ```text
//!   Rig: disks on one Power ─► Graph of an expression over disk:0, disk:1 … ─► Session: requests and background tasks, interleaved
//!   crash_test: workload ─ cut at every write boundary ─► restart ─► mount ─► Oracle: every block is one it may be
//!   random_stacks: a random stack over disks that lose power behaves like a plain disk
//!   random_stacks_with_errors: also where the disks give errors, but for the errors that reach the guest
//!   each_leg_fails_in_turn: a leg's errors are the guest's
//! ```

mod crash;
mod device;
mod errors;
#[cfg(test)]
mod files;
mod formats;
#[cfg(test)]
mod formatted;
mod long;
mod oracle;
mod random;
#[cfg(test)]
pub(crate) mod sector;
mod tables;
mod timed;
mod torn;
#[cfg(test)]
pub(crate) mod waiting;

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use millrace_block::{
    BlockError, BlockSize, Scratch, Step, TaskContext, Volume,
    conformance::{CrashDisk, Harness, Job, Power, Random, SyncIo, Wanted},
};
use millrace_engine::EngineError;
use millrace_memory::BufferPool;

#[cfg(test)]
pub(crate) use self::tables::answers_nobody_without;
pub(crate) use self::tables::change_record;
use self::torn::Sectors;
pub use self::{
    crash::{CrashTest, crash_test},
    device::{Device, grow_over_what_was_there},
    errors::each_leg_fails_in_turn,
    formats::FormatCut,
    long::{NO_CUT, cases, every_cut, every_seed, seeds},
    oracle::Oracle,
    random::{RandomStacks, random_stacks, random_stacks_with_errors},
    timed::{Load, drive},
    torn::Tearing,
};
#[cfg(test)]
pub(crate) use self::{files::open_file, formatted::Formatted};
use crate::{
    Node, Reason, SharedObjects,
    background::{LocalFuture, Running, Spawner, Stop, Task},
    graph::{Graph, GraphError, LeafError, LeafRequest, Leaves, Plan, Tree},
};

/// Background tasks that one session can have at once.
const TASKS: usize = 32;
/// Turns after which is looked whether there is still something to do.
const AT_ONCE: usize = 100;
/// How long requests may take together before they are said to stand still: far longer than any do on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

thread_local! {
    /// A thread that works for this one, always the same: each has a shard of its own.
    static HELPER: Sender<Box<dyn FnOnce() + Send>> = {
        let (give, take) = channel::<Box<dyn FnOnce() + Send>>();
        std::thread::spawn(move || take.iter().for_each(|work| work()));
        give
    };
}

/// Has something done on another thread, such as what waits for background tasks that this one runs.
///
/// # Panics
/// When what was done before on that thread has panicked.
pub fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (answer, result) = channel();
    // Who asked may have panicked meanwhile.
    let work = move || drop(answer.send(work()));
    HELPER.with(|helper| helper.send(Box::new(work))).expect("the helper is there");
    result
}

type Waiting = (Task, Stop, Running);

/// Keeps tasks for a session to run.
#[derive(Default)]
pub struct Kept(Mutex<Vec<Waiting>>);

impl Spawner for Kept {
    fn spawn(&self, task: Task, stop: Stop, running: Running) -> Result<(), EngineError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((task, stop, running));
        Ok(())
    }
}

impl Kept {
    /// Forgets tasks that were not run: the power is gone.
    pub fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Volumes by number, for leaves `disk:0`, `disk:1` and so on.
pub struct Disks(pub Vec<Arc<dyn Volume>>);

impl Leaves for Disks {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        let number = request.leaf.spec.strip_prefix("disk:").and_then(|number| number.parse::<usize>().ok());
        let disk = number.and_then(|number| self.0.get(number));
        disk.cloned().ok_or_else(|| LeafError::Refused(format!("there is no {}", request.leaf.spec)))
    }
}

/// Makes a volume of an expression over these disks and mounts it.
///
/// # Panics
/// When the expression is no stack.
pub fn graph(
    stack: &str,
    disks: &[Arc<dyn Volume>],
    size: Option<u64>,
    reason: Reason,
    spawner: &Arc<Kept>,
) -> Result<Graph, GraphError> {
    let block_size = disks.first().map_or(BlockSize::B512, |disk| disk.geometry().block_size);
    graph_of_blocks(block_size, stack, disks, size, reason, spawner)
}

/// [`graph`] of a volume whose blocks have this size, whatever the disks' have.
///
/// # Panics
/// When the expression is no stack.
pub fn graph_of_blocks(
    block_size: BlockSize,
    stack: &str,
    disks: &[Arc<dyn Volume>],
    size: Option<u64>,
    reason: Reason,
    spawner: &Arc<Kept>,
) -> Result<Graph, GraphError> {
    let node: Node = stack.parse().expect("a stack");
    graph_of_plan(&Plan { volume: "test", stack: &node, size, block_size }, disks, reason, spawner)
}

/// [`graph`] of a volume of any name.
///
/// # Errors
/// Why there is none.
pub fn graph_of_plan(
    plan: &Plan<'_>,
    disks: &[Arc<dyn Volume>],
    reason: Reason,
    spawner: &Arc<Kept>,
) -> Result<Graph, GraphError> {
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::clone(spawner);
    let mut graph = Graph::build(plan, &Disks(disks.to_vec()), &SharedObjects::default(), &spawner, None)?;
    graph.mount(reason)?;
    Ok(graph)
}

/// Volumes of an expression for the conformance suite: `legs` are made by `make_leg`, each with so many bytes more than an equal
/// share as `extra` says (what the service keeps for itself).
pub fn subject<'a>(
    stack: &'a str,
    legs: usize,
    leg_blocks: impl Fn(u64, BlockSize) -> u64 + 'a,
    mut make_leg: impl FnMut(Wanted, usize) -> Arc<dyn Volume> + 'a,
) -> impl FnMut(Wanted) -> Option<Arc<dyn Volume>> + 'a {
    move |wanted| {
        if wanted.read_only {
            return None;
        }
        let blocks = leg_blocks(wanted.blocks, wanted.block_size);
        let legs: Vec<_> = (0..legs).map(|leg| make_leg(Wanted { blocks, ..wanted }, leg)).collect();
        let size = wanted.blocks << wanted.block_size.shift();
        let made = graph(stack, &legs, Some(size), Reason::Create, &Arc::default());
        let graph = made.unwrap_or_else(|error| panic!("{stack}: {error}"));
        // Its tasks do not run here: the volume stays, they are told to end with the graph.
        Some(Arc::clone(graph.volume()))
    }
}

/// Whether something is being done beside requests that comes to an end.
fn is_busy(tree: &Tree) -> bool {
    tree.status.as_ref().is_some_and(|status| !status.progress.is_empty()) || tree.over.iter().any(is_busy)
}

/// A thread's means for requests and tasks.
pub struct Bench {
    io: SyncIo,
    buffers: BufferPool,
    scratches: Vec<Scratch>,
}

thread_local! {
    /// The buffers of this thread's benches: memory of buffers is never given back.
    static BUFFERS: BufferPool = BufferPool::new(2).expect("memory for buffers");
}

impl Bench {
    /// Means whose order of things comes from a seed.
    ///
    /// # Panics
    /// When there is no memory.
    pub fn new(seed: u64) -> Self {
        let io = SyncIo::new(seed, false).hasty();
        let scratches = (0..TASKS).map(|_| Scratch::new(32 << 10)).collect();
        Self { io, buffers: BUFFERS.with(BufferPool::clone), scratches }
    }

    fn context<'a>(&'a self, scratch: &'a Scratch) -> TaskContext<'a> {
        TaskContext::new(scratch, &self.buffers, &self.io)
    }
}

/// Requests and background tasks of one volume, driven in a random order by one thread.
pub struct Session<'a> {
    bench: &'a Bench,
    kept: Arc<Kept>,
    random: Random,
    background: Vec<(LocalFuture<'a, ()>, Running)>,
    /// Tasks started so far.
    started: usize,
    /// Scratches for requests, and what each has.
    spare: (usize, Vec<Scratch>),
}

impl<'a> Session<'a> {
    /// A session that runs the tasks kept by `kept`.
    pub fn new(bench: &'a Bench, kept: &Arc<Kept>, seed: u64) -> Self {
        Self {
            bench,
            kept: Arc::clone(kept),
            random: Random::new(!seed),
            background: Vec::new(),
            started: 0,
            spare: Default::default(),
        }
    }

    fn start_tasks(&mut self) {
        let waiting = std::mem::take(&mut *self.kept.0.lock().unwrap_or_else(PoisonError::into_inner));
        for (task, stop, running) in waiting {
            let scratch = &self.bench.scratches[self.started % TASKS];
            self.started += 1;
            self.background.push((task.begin(self.bench.context(scratch), stop), running));
        }
    }

    /// Gives one background task a turn.
    fn turn(&mut self) {
        if self.background.is_empty() {
            return;
        }
        let at = self.random.below(self.background.len() as u64) as usize;
        if self.background[at].0.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            drop(self.background.swap_remove(at));
        }
    }

    /// Lets background tasks work, for so many turns or until there are none.
    pub fn settle(&mut self, turns: usize) {
        self.start_tasks();
        for _ in 0..turns {
            if self.background.is_empty() {
                return;
            }
            self.turn();
        }
    }

    /// Lets background tasks work, for so many turns or until the volume has none that come to an end, and some turns more.
    pub fn settle_until_done(&mut self, volume: &Graph, turns: usize) {
        let mut left = turns;
        while left > 0 && is_busy(&volume.tree()) {
            self.settle(AT_ONCE.min(left));
            left = left.saturating_sub(AT_ONCE);
        }
        self.settle(AT_ONCE.min(left));
    }

    /// So many scratches of this size.
    fn scratches(&mut self, count: usize, bytes: usize) -> Vec<Scratch> {
        if self.spare.0 != bytes {
            self.spare = (bytes, Vec::new());
        }
        (0..count).map(|_| self.spare.1.pop().unwrap_or_else(|| Scratch::new(bytes))).collect()
    }

    /// Background tasks that have not ended.
    pub fn busy(&self) -> usize {
        self.background.len()
    }
}

impl Harness for Session<'_> {
    fn run(&mut self, volume: &Arc<dyn Volume>, jobs: &[Job]) -> Vec<Result<(), BlockError>> {
        self.start_tasks();
        let mut scratches = self.scratches(jobs.len(), volume.scratch_bytes());
        let mut steps: Vec<Option<Step<'_>>> = Vec::new();
        for (job, scratch) in jobs.iter().zip(&scratches) {
            steps.push(Some(volume.submit(self.bench.context(scratch), job.request())));
        }
        let mut results = vec![Ok(()); jobs.len()];
        let mut waiting = jobs.len();
        let mut cx = Context::from_waker(Waker::noop());
        let (end, mut looks) = (Instant::now() + PATIENCE, 0_u32);
        while waiting > 0 {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1 << 16) && Instant::now() >= end {
                // What is in flight must not be dropped: that would end the process, and the seed would not be told.
                std::mem::forget((steps, std::mem::take(&mut self.background)));
                std::mem::forget(scratches);
                panic!("{waiting} of {} requests wait for ever, or for each other", jobs.len());
            }
            if self.random.below(3) == 0 {
                self.turn();
            }
            let at = self.random.below(jobs.len() as u64) as usize;
            let Some(step) = &mut steps[at] else { continue };
            if let Poll::Ready(result) = Pin::new(step).poll(&mut cx) {
                results[at] = result;
                steps[at] = None;
                waiting -= 1;
            }
        }
        drop(steps);
        for (scratch, job) in scratches.iter().zip(jobs) {
            assert_eq!(scratch.overflows(), 0, "{} asks for too little scratch for {job:?}", volume.name());
        }
        scratches.iter_mut().for_each(Scratch::reset);
        self.spare.1.append(&mut scratches);
        results
    }
}

/// Disks on one power.
pub struct Rig {
    /// What they are plugged into.
    pub power: Arc<Power>,
    /// The disks.
    pub disks: Vec<Arc<CrashDisk>>,
    /// Tasks of the volume over them.
    pub kept: Arc<Kept>,
    /// Blocks of the volumes are eight of the disks'.
    torn: bool,
}

impl Rig {
    /// So many equal disks.
    pub fn new(seed: u64, disks: usize, blocks: u64, block_size: BlockSize) -> Self {
        let power = Power::new(seed);
        let disks = (0..disks).map(|number| CrashDisk::new(&format!("disk:{number}"), &power, blocks, block_size)).collect();
        Self { power, disks, kept: Arc::default(), torn: false }
    }

    /// So many equal disks of so many blocks of 4096 bytes, of which they write 512 as a whole.
    pub fn torn(seed: u64, disks: usize, blocks: u64) -> Self {
        Self { torn: true, ..Self::new(seed, disks, blocks * 8, BlockSize::B512) }
    }

    /// The disks as volumes.
    pub fn volumes(&self) -> Vec<Arc<dyn Volume>> {
        let volume = |disk: &Arc<CrashDisk>| -> Arc<dyn Volume> {
            let disk = Arc::clone(disk);
            if self.torn { Arc::new(Sectors(disk)) } else { disk }
        };
        self.disks.iter().map(volume).collect()
    }

    /// After a power cut: the disks come back with what is left.
    pub fn restart(&self) {
        self.kept.forget();
        self.disks.iter().for_each(|disk| {
            disk.restart();
        });
        self.power.give_back();
    }
}
