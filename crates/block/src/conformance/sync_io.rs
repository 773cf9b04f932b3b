//! A shard's I/O without a shard: plain system calls, made late and badly on purpose.

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::Future,
    os::fd::AsRawFd,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use millrace_memory::{BufferPool, Segment};

use super::{Harness, Job, Random};
use crate::{
    BlockError, ByteOffset, IoOperation, Operation, Request, Scratch, ShardIo, Step, TaskContext, Transfer, Volume,
    clock::{self, SimulatedTime},
};

/// The part of an operation that outlives `poll_start`.
struct Pending {
    operation: Raw,
    /// Polls until it is carried out.
    delay: u32,
    /// When a sleep ends, where time is simulated.
    until: u64,
    /// What it answers without being carried out.
    answer: Option<i32>,
}

enum Raw {
    Read { fd: i32, offset: u64, segments: Vec<Segment> },
    Write { fd: i32, offset: u64, segments: Vec<Segment>, fua: bool },
    DataSync { fd: i32 },
    Allocate { fd: i32, mode: i32, offset: u64, len: u64 },
    Sleep(std::time::Duration),
}

struct State {
    pending: Vec<Option<Pending>>,
    random: Random,
    answers: VecDeque<i32>,
    started: u64,
    durable: u64,
    /// What the next one that makes data durable is told.
    loss: Option<i32>,
}

/// Carries out every operation by a direct system call, a few polls after it was started.
///
/// A rough one also moves less than it was asked to and asks for another try, as a system may.
pub struct SyncIo {
    rough: bool,
    /// Sleeps take no time.
    hasty: bool,
    state: RefCell<State>,
}

impl SyncIo {
    /// I/O whose delays, and roughness if any, come from a seed.
    pub fn new(seed: u64, rough: bool) -> Self {
        let (pending, random, answers) = (Vec::new(), Random::new(seed), VecDeque::new());
        let state = State { pending, random, answers, started: 0, durable: 0, loss: None };
        Self { rough, hasty: false, state: RefCell::new(state) }
    }

    /// The same, with sleeps that take no time.
    #[must_use]
    pub fn hasty(self) -> Self {
        Self { hasty: true, ..self }
    }

    /// Lets the operation after those already foretold answer `result` without being carried out; 0 carries it out.
    pub fn foretell(&self, result: i32) {
        self.state.borrow_mut().answers.push_back(result);
    }

    /// Lets the next operation that makes data durable be told of a loss, and only that one, as the system does: it is settled which as it
    /// starts, and known when it ends.
    pub fn lose(&self, errno: i32) {
        self.state.borrow_mut().loss = Some(-errno);
    }

    /// Operations started so far.
    pub fn started(&self) -> u64 {
        self.state.borrow().started
    }

    /// Those of them that make data durable: syncs, and writes with forced unit access.
    pub fn durable(&self) -> u64 {
        self.state.borrow().durable
    }

    /// When the first of the sleeps under way ends, in simulated time.
    pub fn next_wake(&self) -> Option<u64> {
        let state = self.state.borrow();
        let sleeps = state.pending.iter().flatten().filter(|pending| matches!(pending.operation, Raw::Sleep(_)));
        sleeps.map(|pending| pending.until).min()
    }

    fn carry_out(&self, raw: &Raw) -> i32 {
        let mut state = self.state.borrow_mut();
        if let Some(answer) = state.answers.pop_front().filter(|answer| *answer != 0) {
            return answer;
        }
        let mut most = usize::MAX;
        if self.rough {
            match state.random.below(8) {
                0 => return -libc::EINTR,
                1 => return -libc::EAGAIN,
                2..5 => most = 4096 * (1 + state.random.below(8) as usize),
                _ => {}
            }
        }
        drop(state);
        if (self.hasty || SimulatedTime::is_on()) && matches!(raw, Raw::Sleep(_)) {
            return 0;
        }
        raw.carry_out(most)
    }
}

/// At most `most` bytes of the segments, as the system wants them.
fn iovecs(segments: &[Segment], most: usize) -> Vec<libc::iovec> {
    let mut left = most;
    let mut out = Vec::new();
    for segment in segments {
        let len = segment.len().min(left);
        left -= len;
        if len > 0 || segment.is_empty() {
            out.push(libc::iovec { iov_base: segment.as_ptr().cast(), iov_len: len });
        }
    }
    out
}

fn iov_count(iovecs: &[libc::iovec]) -> libc::c_int {
    iovecs.len().try_into().expect("a list that memory holds")
}

impl Raw {
    fn of(operation: &IoOperation<'_>) -> Self {
        match *operation {
            IoOperation::Read { fd, offset, segments } => {
                Self::Read { fd: fd.as_raw_fd(), offset: offset.0, segments: segments.to_vec() }
            }
            IoOperation::Write { fd, offset, segments, fua } => {
                Self::Write { fd: fd.as_raw_fd(), offset: offset.0, segments: segments.to_vec(), fua }
            }
            IoOperation::DataSync { fd } => Self::DataSync { fd: fd.as_raw_fd() },
            IoOperation::Allocate { fd, mode, offset, len } => {
                Self::Allocate { fd: fd.as_raw_fd(), mode, offset: offset.0, len }
            }
            IoOperation::Sleep(time) => Self::Sleep(time),
        }
    }

    fn carry_out(&self, most: usize) -> i32 {
        let result = match *self {
            Self::Read { fd, offset, ref segments } => {
                let iovecs = iovecs(segments, most);
                // SAFETY: the vectors name memory that `poll_start`'s caller keeps until completion, which is not before this returns.
                unsafe { libc::preadv(fd, iovecs.as_ptr(), iov_count(&iovecs), offset.cast_signed()) }
            }
            Self::Write { fd, offset, ref segments, fua } => {
                let iovecs = iovecs(segments, most);
                let flags = if fua { libc::RWF_DSYNC } else { 0 };
                // SAFETY: as for a read.
                unsafe { libc::pwritev2(fd, iovecs.as_ptr(), iov_count(&iovecs), offset.cast_signed(), flags) }
            }
            // SAFETY: no memory is involved.
            Self::DataSync { fd } => unsafe { libc::fdatasync(fd) as isize },
            Self::Allocate { fd, mode, offset, len } => {
                // SAFETY: no memory is involved.
                unsafe { libc::fallocate(fd, mode, offset.cast_signed(), len.cast_signed()) as isize }
            }
            Self::Sleep(time) => {
                std::thread::sleep(time);
                0
            }
        };
        if result < 0 { -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) } else { result as i32 }
    }
}

// SAFETY: an operation is carried out once, between its start and the report of its completion, and is then forgotten.
unsafe impl ShardIo for SyncIo {
    unsafe fn poll_start(&self, operation: &IoOperation<'_>, _: &mut Context<'_>) -> Poll<u32> {
        let mut state = self.state.borrow_mut();
        state.started += 1;
        let durable = matches!(operation, IoOperation::DataSync { .. } | IoOperation::Write { fua: true, .. });
        state.durable += u64::from(durable);
        let answer = if durable { state.loss.take() } else { None };
        let until = match operation {
            IoOperation::Sleep(time) if SimulatedTime::is_on() => clock::now() + time.as_nanos() as u64,
            _ => 0,
        };
        let pending = Some(Pending { operation: Raw::of(operation), delay: state.random.below(3) as u32, until, answer });
        let token = state.pending.iter().position(Option::is_none).unwrap_or(state.pending.len());
        match state.pending.get_mut(token) {
            Some(free) => *free = pending,
            None => state.pending.push(pending),
        }
        Poll::Ready(token as u32)
    }

    fn poll_completion(&self, token: u32, cx: &mut Context<'_>) -> Poll<i32> {
        let pending = {
            let mut state = self.state.borrow_mut();
            let slot = state.pending.get_mut(token as usize).expect("a token of ours");
            let pending = slot.as_mut().expect("an operation that is under way");
            if pending.delay > 0 || pending.until > clock::now() {
                pending.delay = pending.delay.saturating_sub(1);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            slot.take().expect("it was just there")
        };
        Poll::Ready(pending.answer.unwrap_or_else(|| self.carry_out(&pending.operation)))
    }
}

/// Drives requests on one thread over a [`SyncIo`], each with exactly the scratch that the volume asks for.
pub struct SyncHarness {
    io: SyncIo,
    buffers: BufferPool,
    random: Random,
    /// Whether the next jobs are given to the volume together, as far as it does them at once. Every other time.
    together: bool,
}

impl SyncHarness {
    /// A harness whose order of things comes from a seed.
    pub fn new(seed: u64, rough: bool) -> Self {
        // Two buffers: requests in flight must be able to wait for one.
        let buffers = BufferPool::new(2).expect("memory for two buffers");
        Self { io: SyncIo::new(seed, rough), buffers, random: Random::new(!seed), together: false }
    }

    /// The I/O below.
    pub fn io(&self) -> &SyncIo {
        &self.io
    }
}

/// Gives reads and writes to a volume as front ends do: one by itself, or several; how many it has done.
fn do_at_once(volume: &dyn Volume, requests: &mut [Request<'_>]) -> usize {
    let shift = volume.geometry().block_size.shift();
    if let [Request { operation, lba, segments: [data], .. }] = requests
        && let Some(at) = lba.0.checked_mul(1 << shift)
    {
        let transfer = match *operation {
            Operation::Write { fua } => Transfer::Write { fua },
            _ => Transfer::Read,
        };
        return usize::from(volume.do_one(transfer, ByteOffset(at), *data));
    }
    volume.submit_many(requests)
}

impl Harness for SyncHarness {
    fn run(&mut self, volume: &Arc<dyn Volume>, jobs: &[Job]) -> Vec<Result<(), BlockError>> {
        let scratches: Vec<Scratch> = jobs.iter().map(|_| Scratch::new(volume.scratch_bytes())).collect();
        let moves = |job: &&Job| job.count.0 > 0 && matches!(job.operation, Operation::Read | Operation::Write { .. });
        let most = if self.together { jobs.len() } else { 0 };
        self.together = !self.together;
        let mut first: Vec<_> = jobs[..most].iter().take_while(moves).map(Job::request).collect();
        let done = do_at_once(&**volume, &mut first);
        let mut steps: Vec<Option<Step<'_>>> = (0..done).map(|_| Some(Step::Done(Ok(())))).collect();
        for (job, scratch) in jobs.iter().zip(&scratches).skip(done) {
            steps.push(Some(volume.submit(TaskContext::new(scratch, &self.buffers, &self.io), job.request())));
        }
        let mut results = vec![Ok(()); jobs.len()];
        let mut waiting = jobs.len();
        let mut cx = Context::from_waker(Waker::noop());
        while waiting > 0 {
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
        results
    }
}
