//! The shard's io_uring.
//!
//! Operations are collected and submitted once a turn. The kernel runs completions only when the shard asks for them
//! (deferred task work), and says in the ring's shared flags when it should ask: a turn without I/O makes no system call. A thread that
//! does not turn all the time is interrupted instead, or it would keep the files of requests that have ended for good.
//!
//! An operation that finds the ring full is kept, and goes to the kernel when those that were started before it have gone and one has
//! completed. So it has its place from the start, whoever comes later and however many they are: no task is woken for an entry that
//! another could take first, and none has to come back for it.
//!
//! A sleeping shard is woken by an eventfd: the ring's own descriptor does not wake an epoll for work that is deferred. While
//! the shard is awake the eventfd is switched off in the shared flags. No wake-up is lost: the shard switches it on, then looks for
//! completions and deferred work; the kernel announces work, then looks at the switch. See [`Ring::arm`].

use std::{
    cell::RefCell,
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::atomic::{Ordering, fence},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use io_uring::{EnterFlags, IoUring, opcode, register::Restriction, squeue, types::Fd, types::FsyncFlags};
use millrace_block::{IoOperation, ShardIo};
use millrace_memory::Segment;

use rustix::event::{EventfdFlags, eventfd};

use crate::{pace::Pace, timers::Timers};

/// Marks a token as a timer's.
const TIMER: u32 = 1 << 31;

/// Threads of the kernel's at most that wait for disks in a shard's place.
const MOST_WORKERS: u32 = 1024;

/// Segments of one operation at most (`UIO_MAXIOV`): who has more, splits.
pub const MAX_SEGMENTS: usize = 1024;
/// Segments that a list has room for from the start: 128 KiB in pages.
const ROOM: usize = 32;

enum Op {
    Free,
    /// The kernel has it (or will, at the turn's end), or it waits for its turn.
    Flight(Option<Waker>),
    Done(i32),
}

struct Inner {
    uring: IoUring,
    /// All whose results were not fetched, by token. They may be more than the ring has entries.
    ops: Vec<Op>,
    /// Where the kernel finds the segments of each, if they are several. The room is kept for those that have the token next.
    lists: Vec<Vec<libc::iovec>>,
    free: Vec<u32>,
    /// Operations that the kernel has, or will at the turn's end.
    in_flight: usize,
    /// As many are at most: entries of the submission queue. Completion entries are twice that, so none overflows.
    entries: usize,
    /// Operations that wait for an entry, in the order of their starts. While there are any the ring is full.
    waiting: VecDeque<squeue::Entry>,
    pace: Pace,
    /// So many submissions are refused from now on.
    #[cfg(test)]
    refusals: u32,
}

impl Inner {
    /// Starts an operation, at once if the ring has room.
    fn start(&mut self, operation: &IoOperation<'_>) -> u32 {
        if self.free.is_empty() {
            self.free.push(self.ops.len() as u32);
            self.ops.push(Op::Free);
            self.lists.push(Vec::new());
        }
        let token = self.free[self.free.len() - 1];
        // It panics where a caller asks for too much: the token is still free then.
        let entry = entry(operation, &mut self.lists[token as usize]).user_data(u64::from(token));
        self.free.pop();
        self.ops[token as usize] = Op::Flight(None);
        if self.in_flight < self.entries {
            self.push(entry);
        } else {
            self.waiting.push_back(entry);
        }
        token
    }

    /// Offers the kernel what is queued. It may refuse all of it, for now.
    fn offer(&mut self) -> io::Result<usize> {
        #[cfg(test)]
        if let Some(left) = self.refusals.checked_sub(1) {
            self.refusals = left;
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        self.uring.submit()
    }

    fn push(&mut self, entry: squeue::Entry) {
        let entry = if self.pace.is_aside() { entry.flags(squeue::Flags::ASYNC) } else { entry };
        // SAFETY: who started the operation keeps file and memory valid until its completion, its list is the token's, and it was not pushed before.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        assert!(pushed.is_ok(), "there are as many submission entries as operations in flight at most");
        self.in_flight += 1;
    }

    /// An operation is over, and what has waited longest goes in its place. Returns whom to wake.
    fn complete(&mut self, token: u64, result: i32) -> Option<Waker> {
        let waker = match std::mem::replace(&mut self.ops[token as usize], Op::Done(result)) {
            Op::Flight(waker) => waker,
            Op::Free | Op::Done(_) => panic!("the ring completed an operation twice"),
        };
        self.in_flight -= 1;
        if let Some(next) = self.waiting.pop_front() {
            self.push(next);
        }
        waker
    }
}

/// One shard's asynchronous I/O and timers.
pub(crate) struct Ring {
    inner: RefCell<Inner>,
    timers: RefCell<Timers>,
    /// The eventfd that ends a sleep.
    bell: OwnedFd,
}

impl Ring {
    /// `turns` and `witness`: see [`ShardConfig`](crate::ShardConfig).
    pub(crate) fn new(entries: u32, tasks: usize, turns: bool, witness: Option<&OwnedFd>) -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mut uring = build(entries, Some(&bell), turns, witness)?;
        uring.completion().disable_eventfd();
        // A task has one operation under way as a rule. Where more have several, or of many segments, the lists grow, once.
        let entries = uring.params().sq_entries() as usize;
        let inner = Inner {
            uring,
            ops: (0..tasks).map(|_| Op::Free).collect(),
            lists: (0..tasks).map(|_| Vec::with_capacity(ROOM)).collect(),
            free: (0..tasks as u32).rev().collect(),
            in_flight: 0,
            entries,
            waiting: VecDeque::with_capacity(tasks.saturating_sub(entries)),
            pace: Pace::default(),
            #[cfg(test)]
            refusals: 0,
        };
        Ok(Self { inner: RefCell::new(inner), timers: RefCell::new(Timers::new(tasks)), bell })
    }

    /// Readable when completions came while the ring was armed.
    pub(crate) fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    /// Switches the bell on before a sleep. `false`: there are completions already, do not sleep.
    pub(crate) fn arm(&self) -> bool {
        let inner = &mut *self.inner.borrow_mut();
        inner.uring.completion().enable_eventfd();
        // Closes the race between our "switch on, then look for work" and the kernel's "announce work, then look at the switch":
        // the store must be visible before the loads below. The kernel's side of the pair is the full barrier of its atomic
        // update of the list of deferred work, or of its completion tail, before it looks.
        fence(Ordering::SeqCst);
        // The flag that tells of deferred work is set between that and the look, and only on x86 is this a barrier of its own: elsewhere the
        // kernel may find the bell off while the flag cannot be seen here yet. So there the kernel is asked, who looks at the list.
        if cfg!(not(target_arch = "x86_64")) && inner.in_flight > 0 {
            // SAFETY: nothing is pointed to.
            let asked = unsafe { inner.uring.submitter().enter::<libc::sigset_t>(0, 0, EnterFlags::GETEVENTS.bits(), None) };
            if asked.is_err() {
                // It was interrupted: another turn, then again.
                return false;
            }
        }
        inner.uring.completion().is_empty() && !inner.uring.submission().taskrun()
    }

    /// Switches the bell off after a sleep.
    pub(crate) fn disarm(&self) {
        self.inner.borrow_mut().uring.completion().disable_eventfd();
    }

    /// Silences the bell; to be followed by a turn.
    pub(crate) fn silence(&self) {
        let mut count = [0; 8];
        // It may be silent already, and cannot fail otherwise.
        let _ = rustix::io::read(&self.bell, &mut count);
    }

    /// Whether there is neither an operation nor a timer: nothing to submit, reap or fire.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight() == 0 && self.timers.borrow().next().is_none()
    }

    /// Operations the kernel has. While it has none, none waits either.
    pub(crate) fn in_flight(&self) -> usize {
        self.inner.borrow().in_flight
    }

    /// Submissions that had to wait for a disk.
    pub(crate) fn held_up(&self) -> u64 {
        self.inner.borrow().pace.held_up
    }

    /// Hands collected operations to the kernel, and lets it run completions if it wants to.
    pub(crate) fn submit(&self) -> io::Result<()> {
        let inner = &mut *self.inner.borrow_mut();
        let queue = inner.uring.submission();
        if queue.is_empty() && !queue.taskrun() {
            return Ok(());
        }
        drop(queue);
        inner.pace.begin(sleeps);
        let began = Instant::now();
        let result = inner.offer();
        if inner.pace.end(began, Instant::now(), inner.in_flight, sleeps) {
            tracing::debug!("a disk's queue is full: requests go to it by way of the kernel's threads");
        }
        match result {
            Ok(_) => Ok(()),
            // The kernel is short of memory or was interrupted: the entries stay queued, the next turn tries again.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::EINTR)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Whether the kernel has refused operations that are to be offered again: it will not ring for them.
    pub(crate) fn is_refused(&self) -> bool {
        !self.inner.borrow_mut().uring.submission().is_empty()
    }

    /// The kernel refuses so many submissions.
    #[cfg(test)]
    pub(crate) fn refuse(&self, submissions: u32) {
        self.inner.borrow_mut().refusals = submissions;
    }

    /// Submissions that are still to be refused.
    #[cfg(test)]
    pub(crate) fn refusals(&self) -> u32 {
        self.inner.borrow().refusals
    }

    /// Takes completions and wakes their tasks; returns their number.
    pub(crate) fn reap(&self) -> usize {
        let mut reaped = 0;
        loop {
            let mut inner = self.inner.borrow_mut();
            let Some(entry) = inner.uring.completion().next() else { return reaped };
            let waker = inner.complete(entry.user_data(), entry.result());
            // A waker may do anything: no borrow is held meanwhile.
            drop(inner);
            reaped += 1;
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Fires the timers that are due; returns their number.
    pub(crate) fn fire_timers(&self, now: Instant) -> usize {
        let mut fired = 0;
        loop {
            // The borrow ends before the waker runs.
            let waker = self.timers.borrow_mut().fire(now);
            let Some(waker) = waker else { return fired };
            fired += 1;
            waker.wake();
        }
    }

    /// The first timer's deadline.
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.timers.borrow().next()
    }
}

/// A ring that is not enabled yet.
pub(crate) fn prepare(entries: u32, turns: bool) -> io::Result<IoUring> {
    let interrupted = || IoUring::builder().setup_r_disabled().dontfork().build(entries);
    let deferred = || {
        IoUring::builder()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .dontfork()
            .build(entries)
    };
    let uring = match turns.then(deferred) {
        Some(Ok(uring)) => uring,
        // Before Linux 6.1 the kernel interrupts the thread for each completion instead.
        Some(Err(e)) if e.raw_os_error() != Some(libc::EINVAL) => return Err(e),
        _ => interrupted()?,
    };
    // All that goes by way of the kernel's threads stands in one line, whichever disk it is for. There would be a few threads for each
    // processor, which one slow disk can keep waiting; with one for each operation nobody stands behind another's. They are started as they
    // are needed, and end.
    match uring.submitter().register_iowq_max_workers(&mut [entries.min(MOST_WORKERS), 0]) {
        // Before Linux 5.15 it stays at those few.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
        result => result?,
    }
    Ok(uring)
}

/// Builds the ring and gives up every operation it will not need: a seccomp filter does not see what a ring does.
pub(crate) fn build(entries: u32, bell: Option<&OwnedFd>, turns: bool, witness: Option<&OwnedFd>) -> io::Result<IoUring> {
    let uring = prepare(entries, turns)?;
    let allowed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::Readv::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
    ];
    if let Some(bell) = bell {
        uring.submitter().register_eventfd(bell.as_raw_fd())?;
    }
    if let Some(witness) = witness {
        // A ring's own files go with the ring, after the last of its operations.
        uring.submitter().register_files(&[witness.as_raw_fd()])?;
    }
    let mut restrictions: Vec<_> = allowed.map(Restriction::sqe_op).into();
    restrictions.push(Restriction::sqe_flags_allowed(squeue::Flags::ASYNC.bits()));
    uring.submitter().register_restrictions(&mut restrictions)?;
    uring.submitter().register_enable_rings()?;
    Ok(uring)
}

/// How often the calling thread has given up its processor to wait for something.
fn sleeps() -> u64 {
    // SAFETY: an all-zero answer is a valid value, and the system writes one to the place given.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage.ru_nvcsw.unsigned_abs()
    }
}

/// What the kernel is told of an operation. Several segments are put down in `list`, which stays as it is until the completion.
fn entry(operation: &IoOperation<'_>, list: &mut Vec<libc::iovec>) -> squeue::Entry {
    match *operation {
        IoOperation::Read { fd, offset, segments: [one] } => {
            opcode::Read::new(number(fd), one.as_ptr(), length(one)).offset(offset.0).build()
        }
        IoOperation::Read { fd, offset, segments } => {
            let (list, count) = put_down(list, segments);
            opcode::Readv::new(number(fd), list, count).offset(offset.0).build()
        }
        IoOperation::Write { fd, offset, segments: [one], fua } => {
            opcode::Write::new(number(fd), one.as_ptr(), length(one)).offset(offset.0).rw_flags(write_flags(fua)).build()
        }
        IoOperation::Write { fd, offset, segments, fua } => {
            let (list, count) = put_down(list, segments);
            opcode::Writev::new(number(fd), list, count).offset(offset.0).rw_flags(write_flags(fua)).build()
        }
        IoOperation::DataSync { fd } => opcode::Fsync::new(number(fd)).flags(FsyncFlags::DATASYNC).build(),
        IoOperation::Allocate { fd, mode, offset, len } => {
            opcode::Fallocate::new(number(fd), len).offset(offset.0).mode(mode).build()
        }
        IoOperation::Sleep(_) => unreachable!("sleeps are timers"),
    }
}

fn number(fd: BorrowedFd<'_>) -> Fd {
    Fd(fd.as_raw_fd())
}

fn write_flags(fua: bool) -> i32 {
    if fua { libc::RWF_DSYNC } else { 0 }
}

fn length(segment: &Segment) -> u32 {
    u32::try_from(segment.len()).expect("a segment of an operation is shorter than 4 GiB")
}

/// Makes `list` one of these segments; where it is, and how long.
fn put_down(list: &mut Vec<libc::iovec>, segments: &[Segment]) -> (*const libc::iovec, u32) {
    assert!(segments.len() <= MAX_SEGMENTS, "{} segments in one operation: the caller must split", segments.len());
    list.clear();
    list.extend(segments.iter().map(|one| libc::iovec { iov_base: one.as_ptr().cast(), iov_len: one.len() }));
    (list.as_ptr(), list.len() as u32)
}

// SAFETY: the kernel uses an operation's memory from submission until its completion entry, and `reap` is the only place that
// reports one. A token, and with it the list, is not given out again before its result was fetched.
unsafe impl ShardIo for Ring {
    unsafe fn poll_start(&self, operation: &IoOperation<'_>, cx: &mut Context<'_>) -> Poll<u32> {
        if let IoOperation::Sleep(duration) = operation {
            // Not the turn's time stamp, which may be old: never less than was asked for. A year is for ever.
            let deadline = Instant::now() + (*duration).min(Duration::from_secs(365 * 24 * 3600));
            return Poll::Ready(self.timers.borrow_mut().start(deadline, cx.waker()) | TIMER);
        }
        Poll::Ready(self.inner.borrow_mut().start(operation))
    }

    fn poll_completion(&self, token: u32, cx: &mut Context<'_>) -> Poll<i32> {
        if token & TIMER != 0 {
            return self.timers.borrow_mut().poll(token & !TIMER, cx).map(|()| 0);
        }
        let inner = &mut *self.inner.borrow_mut();
        let op = &mut inner.ops[token as usize];
        match op {
            Op::Done(result) => {
                let result = *result;
                *op = Op::Free;
                inner.free.push(token);
                Poll::Ready(result)
            }
            Op::Flight(Some(waker)) => {
                waker.clone_from(cx.waker());
                Poll::Pending
            }
            Op::Flight(waker) => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
            Op::Free => panic!("operation {token} was polled after its end"),
        }
    }
}
