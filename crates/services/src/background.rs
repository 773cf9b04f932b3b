//! Work of services beside requests: resync, scrub, flush-back.

#[cfg(test)]
mod tests;

use std::{
    cell::RefCell,
    fmt,
    future::Future,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::sync_channel,
    },
    thread,
    time::{Duration, Instant},
};

use millrace_block::{IoOperation, TaskContext, yield_now};
use millrace_engine::{EngineError, Launch, ShardHandle};
use millrace_memory::BufferPool;

/// How long tasks are waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest sleep of a task before it looks whether it must stop.
const LOOK: Duration = Duration::from_millis(5);

/// Said after what a scrub has found that was ended before it was done.
pub(crate) const CUT_SHORT: &str = " (it was ended before it was done)";

/// The answer to the command that ends a scrub, if one was so far of so much.
pub(crate) fn scrub_ended(was: Option<u64>, of: u64) -> String {
    let Some(done) = was else { return "no scrub was running".to_owned() };
    format!("the scrub is ended, at {} %", done.saturating_mul(100).checked_div(of).unwrap_or(100))
}

/// Buffers of [`own_buffers`].
const OWN_BUFFERS: usize = 8;

thread_local! {
    static OWN: RefCell<Option<BufferPool>> = const { RefCell::new(None) };
}

/// Buffers that the calling shard's background tasks have among themselves. A task that holds something which requests wait for
/// does its own work with these: the shard's may all be with requests that wait for it.
pub(crate) fn own_buffers() -> io::Result<BufferPool> {
    OWN.with_borrow_mut(|own| match own {
        Some(pool) => Ok(pool.clone()),
        None => Ok(own.insert(BufferPool::new(OWN_BUFFERS)?).clone()),
    })
}

/// A future of one shard's.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

type Work = Box<dyn for<'a> FnOnce(TaskContext<'a>, Stop) -> LocalFuture<'a, ()> + Send>;

/// A task of a service. It runs on some shard, beside requests, and ends when it is done or told to stop.
pub struct Task {
    name: &'static str,
    work: Work,
}

impl Task {
    /// A task. `work` owns (or shares by `Arc`) what it needs, asks [`Stop::is_set`] between its steps, and sleeps by
    /// [`Stop::sleep`]: a step must not take longer than a second.
    pub fn new(
        name: &'static str,
        work: impl for<'a> FnOnce(TaskContext<'a>, Stop) -> LocalFuture<'a, ()> + Send + 'static,
    ) -> Self {
        Self { name, work: Box::new(work) }
    }

    /// What it does.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its future, for whoever runs tasks without a shard.
    pub fn begin(self, cx: TaskContext<'_>, stop: Stop) -> LocalFuture<'_, ()> {
        (self.work)(cx, stop)
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Task").field(&self.name).finish()
    }
}

/// Tells a task to end.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Whether it is told.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Tells it.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Sleeps so long, or until it is told.
    pub async fn sleep(&self, cx: TaskContext<'_>, time: Duration) {
        let mut left = time;
        while !self.is_set() && !left.is_zero() {
            let step = left.min(LOOK);
            cx.io(IoOperation::Sleep(step)).await;
            left -= step;
        }
    }
}

/// Keeps to a number of bytes per second.
pub(crate) struct Pace {
    rate: u64,
    start: Instant,
    bytes: u64,
}

impl Pace {
    pub(crate) fn new(rate: u64) -> Self {
        Self { rate, start: Instant::now(), bytes: 0 }
    }

    /// Waits until so many bytes more are allowed. In any case the shard does something else first: a leg in memory makes nobody wait, and
    /// with a rate that it does not reach nobody else would have a turn.
    pub(crate) async fn spend(&mut self, cx: TaskContext<'_>, stop: &Stop, bytes: u64) {
        yield_now().await;
        self.bytes += bytes;
        let due = Duration::from_nanos((u128::from(self.bytes) * 1_000_000_000 / u128::from(self.rate)) as u64);
        let ahead = due.saturating_sub(self.start.elapsed());
        if ahead > Duration::from_millis(1) {
            stop.sleep(cx, ahead).await;
        }
        if self.start.elapsed() > Duration::from_secs(1) {
            // What was not used is not saved up.
            *self = Self::new(self.rate);
        }
    }
}

/// Counts a task as running until it is dropped.
#[derive(Debug)]
pub struct Running(Arc<AtomicUsize>);

impl Running {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Release: pairs with the acquire of whoever waits for the end.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Where tasks run.
pub trait Spawner: Send + Sync {
    /// Starts a task. `running` is dropped when it has ended, or cannot run.
    fn spawn(&self, task: Task, stop: Stop, running: Running) -> Result<(), EngineError>;
}

/// Runs tasks on the engine's shards in turn.
#[derive(Debug)]
pub struct OnShards {
    shards: Vec<ShardHandle>,
    next: AtomicUsize,
}

impl OnShards {
    /// Tasks for these shards.
    pub fn new(shards: Vec<ShardHandle>) -> Self {
        Self { shards, next: AtomicUsize::new(0) }
    }
}

impl Spawner for OnShards {
    fn spawn(&self, task: Task, stop: Stop, running: Running) -> Result<(), EngineError> {
        let first = self.next.fetch_add(1, Ordering::Relaxed) % self.shards.len().max(1);
        let mut in_turn = self.shards[first..].iter().chain(&self.shards[..first]);
        // One that hangs is passed over while there is another.
        let answers = in_turn.clone().find(|shard| !shard.is_silent());
        let shard = answers.or_else(|| in_turn.next()).ok_or(EngineError::NoAnswer { shard: first })?;
        launch(shard, task, stop, running)
    }
}

fn launch(shard: &ShardHandle, task: Task, stop: Stop, running: Running) -> Result<(), EngineError> {
    let again = shard.clone();
    shard.call(move |shard| {
        let context = shard.context();
        let Some(slot) = context.reserve() else {
            // All slots are taken by requests: the task waits its turn in the mailbox.
            if let Err(error) = launch(&again, task, stop, running) {
                tracing::error!(%error, "a background task could not be started");
            }
            return;
        };
        let _ = slot.run(move |cx| {
            let future = task.begin(cx, stop);
            Launch::<()>::Wait(cx.scratch.place_future(async move {
                future.await;
                drop(running);
            }))
        });
    })
}

/// Does work on one of the spawner's shards, and waits for what comes of it. Not to be called on a shard.
///
/// # Errors
/// When there is no shard, or it ends before the work does.
pub(crate) fn on_shard<T: Send + 'static>(
    spawner: &dyn Spawner,
    work: impl for<'a> FnOnce(TaskContext<'a>) -> LocalFuture<'a, T> + Send + 'static,
) -> Result<T, EngineError> {
    let (answer, result) = sync_channel(1);
    let task = Task::new("work for another thread", move |cx, _| {
        let work = work(cx);
        Box::pin(async move {
            // Who asked waits: it is not gone.
            let _ = answer.send(work.await);
        })
    });
    spawner.spawn(task, Stop::default(), Running::new(&Arc::default()))?;
    result.recv().map_err(|_| EngineError::NoAnswer { shard: 0 })
}

/// The tasks of one service while it is in force.
#[derive(Debug, Default)]
pub struct Background {
    stop: Stop,
    running: Arc<AtomicUsize>,
}

impl Background {
    /// Starts tasks.
    pub fn start(tasks: Vec<Task>, spawner: &dyn Spawner) -> Self {
        let background = Self::default();
        for task in tasks {
            let name = task.name();
            let running = Running::new(&background.running);
            if let Err(error) = spawner.spawn(task, background.stop.clone(), running) {
                tracing::error!(task = name, %error, "a background task could not be started");
            }
        }
        background
    }

    /// Tells the tasks to end.
    pub fn tell(&self) {
        self.stop.set();
    }

    /// Ends the tasks and waits until they have; false when some do not.
    pub fn stop(&self) -> bool {
        self.tell();
        let end = Instant::now() + PATIENCE;
        while self.running.load(Ordering::Acquire) > 0 {
            if Instant::now() > end {
                return false;
            }
            thread::sleep(Duration::from_micros(100));
        }
        true
    }
}
