//! The root of a named volume: a volume whose inside can be replaced while requests come in.
//!
//! ```text
//!   submit ─► enter ─► current ─► root.submit ─┬─ Done: leave
//!               │         │                    └─ Wait: leave when it ends
//!               │         └─ paused: wait outside, look again
//!   change ─► pause ─► barrier ─► nobody inside? ─► exchange ─► barrier ─► nobody inside ─► drop the old, resume
//! ```
//!
//! The word that says whether requests are paused also says whether they are traced, and whether the next flush is to tell of a loss: one look
//! tells that there is nothing special.
//!
//! Entering writes a counter of the calling shard's own; nothing that is shared is written per request. The price is paid by the
//! one who changes: `membarrier(2)` makes every thread of the process run a full memory barrier. After it, whoever entered
//! before is counted, and whoever enters later sees the pause. See docs/adr/0008-the-switch.md. Memory is not reached through a switch
//! ([`Volume::reach`]): whoever used it would not be counted.

#[cfg(test)]
mod tests;

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicPtr, AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_memory::Segment;
use thiserror::Error;

use crate::{
    Asker, BlockCount, BlockError, BlockSize, ByteOffset, Extent, Geometry, IoOperation, Lba, Metadata, MetadataFormat,
    Operation, Request, Step, TaggedRequest, TaskContext, Transfer, Usage, Volume, VolumeError, future_bytes,
    per_shard::{Inside, Presence},
    placed_bytes, tagged_bytes, trace,
};

/// How often a paused request looks whether it may go on.
const LOOK_AGAIN: Duration = Duration::from_micros(100);
/// How often a change looks whether requests have ended.
const DRAIN_LOOK: Duration = Duration::from_micros(20);

/// Why the inside of a volume was not exchanged. The old one goes on.
#[derive(Debug, Error)]
pub enum ChangeError<E> {
    /// Requests in flight did not end in time.
    #[error("{in_flight} requests did not end within {} ms", patience.as_millis())]
    Busy {
        /// How many were left.
        in_flight: u64,
        /// How long was waited.
        patience: Duration,
    },
    /// The system refuses the barrier that makes it safe.
    #[error("the system refuses membarrier(2): {0}")]
    Barrier(#[source] io::Error),
    /// What had to be done during the pause failed.
    #[error(transparent)]
    Refused(E),
}

/// Who keeps a volume's size and block size beyond the process. A volume may be given others by whoever it is a leg of, which asks nobody
/// else: so the switch does.
pub trait Ledger: Send + Sync {
    /// Resizes what the switch leads to, and keeps its new size. What is kept is never more than there is.
    ///
    /// # Errors
    /// The volume's, or that it could not be kept; then size and what is kept are as before.
    fn resize(&self, root: &dyn Volume, blocks: BlockCount) -> Result<(), VolumeError>;

    /// Formats what the switch leads to, and keeps its new block size.
    ///
    /// # Errors
    /// The volume's, or that it could not be kept.
    fn format(&self, root: &dyn Volume, block_size: BlockSize) -> Result<(), VolumeError>;
}

/// Requests wait outside.
const PAUSED: u32 = 1 << 31;
/// Requests are refused.
const CLOSED: u32 = 1 << 30;
/// Something that was acknowledged may be lost, and who knew it is gone: the next flush tells.
const UNTOLD: u32 = 1 << 29;

/// The same number as what is there has.
const SAME: u32 = u32::MAX;

struct Inner {
    root: Arc<dyn Volume>,
    /// [`PAUSED`], [`CLOSED`], [`UNTOLD`], and the root's number in the trace; 0: nothing special.
    state: AtomicU32,
}

impl Inner {
    #[inline]
    fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire)
    }

    fn is_paused(&self) -> bool {
        self.state() & PAUSED != 0
    }

    /// Whether reads and writes go on at once and together. Those that are recorded, or that wait for the end of a pause, do so one by one.
    #[inline]
    fn is_plain(&self) -> bool {
        self.state() & !UNTOLD == 0
    }

    /// Whether this request is the one that tells of a loss: the first flush after it, and no other.
    fn tells(&self, state: u32, request: &Request<'_>) -> bool {
        let may = state & UNTOLD != 0 && request.operation == Operation::Flush;
        may && self.state.fetch_and(!UNTOLD, Ordering::AcqRel) & UNTOLD != 0
    }

    /// Starts a request, recorded if it is to be.
    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let state = self.state();
        match state as u16 {
            _ if state & CLOSED != 0 => Step::Done(Err(BlockError::NotReady)),
            _ if self.tells(state, &request) => Step::Done(Err(BlockError::WriteFault { errno: 0 })),
            0 => self.root.submit(cx, request),
            place => trace::submit(place, &*self.root, cx, request),
        }
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        let state = self.state();
        match state as u16 {
            _ if state & CLOSED != 0 => Step::Done(Err(BlockError::NotReady)),
            0 => self.root.submit_tagged(cx, request),
            place => trace::submit_tagged(place, &*self.root, cx, request),
        }
    }
}

/// See the module.
pub struct Switch {
    name: String,
    current: AtomicPtr<Inner>,
    presence: Presence,
    /// The number in the trace of what the next change puts in, or [`SAME`].
    next: AtomicU32,
    /// One change at a time.
    changing: Mutex<()>,
    ledger: Option<Arc<dyn Ledger>>,
}

/// Somebody inside, with what is current for them.
struct Visit<'a> {
    inner: &'a Inner,
    _inside: Inside<'a>,
}

impl<'a> Visit<'a> {
    /// Leaves when a request has ended.
    #[inline(never)]
    fn leave_after(self, cx: TaskContext<'a>, step: Step<'a>) -> Step<'a> {
        match step {
            done @ Step::Done(_) => done,
            step @ Step::Wait(_) => Step::Wait(cx.scratch.place_future(follow(self, step))),
        }
    }
}

impl Switch {
    /// A switch that leads to `root`, whose shape nobody keeps.
    pub fn new(name: &str, root: Arc<dyn Volume>) -> Arc<Self> {
        Self::kept(name, root, None)
    }

    /// A switch that leads to `root`, whose size and block size are kept in a ledger.
    pub fn kept(name: &str, root: Arc<dyn Volume>, ledger: Option<Arc<dyn Ledger>>) -> Arc<Self> {
        let inner = Box::into_raw(Box::new(Inner { root, state: AtomicU32::new(0) }));
        let current = AtomicPtr::new(inner);
        Arc::new(Self {
            name: name.to_owned(),
            current,
            presence: Presence::default(),
            next: AtomicU32::new(SAME),
            changing: Mutex::default(),
            ledger,
        })
    }

    #[inline]
    fn visit(&self) -> Visit<'_> {
        let inside = self.presence.enter();
        // SAFETY: the pointer came from a box. `change` frees it only after it has put another in its place, run a barrier on
        // every thread, and seen nobody inside. We entered before we loaded it: so either that barrier came before our load, and
        // we have loaded the new pointer, or our entry is seen and the box is kept until `inside` is dropped. The reference
        // leaves this module only within futures and calls that end before `inside` does.
        let inner = unsafe { &*self.current.load(Ordering::Acquire) };
        Visit { inner, _inside: inside }
    }

    /// What it leads to now.
    pub fn root(&self) -> Arc<dyn Volume> {
        Arc::clone(&self.visit().inner.root)
    }

    /// Records requests from now on, under this number; 0: no more. Those in flight are recorded as they began.
    pub fn trace(&self, place: u16) {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        self.next.store(SAME, Ordering::Relaxed);
        let visit = self.visit();
        // Nobody else changes the number meanwhile.
        let before = u32::from(visit.inner.state() as u16);
        visit.inner.state.fetch_xor(before ^ u32::from(place), Ordering::Release);
    }

    /// From the next change on, requests are recorded under this number.
    pub fn trace_next(&self, place: u16) {
        self.next.store(place.into(), Ordering::Relaxed);
    }

    /// Requests inside.
    pub fn in_flight(&self) -> u64 {
        self.presence.count()
    }

    /// Refuses requests until it is [opened](Self::open) again. Those inside go on, and are all counted when this returns. Blocks; not to be
    /// called on a shard.
    pub fn close(&self) {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        self.visit().inner.state.fetch_or(CLOSED, Ordering::Release);
        while barrier().is_err() {
            thread::sleep(DRAIN_LOOK);
        }
    }

    /// Something that was acknowledged may be lost, and nobody below will tell: the next flush, and only that one, fails. What `between` of a
    /// [`change`](Self::change) notes is told in whichever graph is in force then.
    pub fn note_loss(&self) {
        self.visit().inner.state.fetch_or(UNTOLD, Ordering::AcqRel);
    }

    /// Whether a loss that was [noted](Self::note_loss) is yet to be told.
    pub fn is_untold(&self) -> bool {
        self.visit().inner.state() & UNTOLD != 0
    }

    /// Lets requests in again.
    pub fn open(&self) {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        self.visit().inner.state.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Replaces what the switch leads to. New requests wait, those in flight are waited for (at most so long), `between` is
    /// called while there are none, and then `root` is in force. Blocks; not to be called on a shard.
    ///
    /// Returns the length of the pause.
    ///
    /// # Errors
    /// See [`ChangeError`]; then the old root is in force again.
    pub fn change<E>(
        &self,
        root: &Arc<dyn Volume>,
        patience: Duration,
        between: impl FnOnce() -> Result<(), E>,
    ) -> Result<Duration, ChangeError<E>> {
        let _one_at_a_time = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        barrier().map_err(ChangeError::Barrier)?;
        let start = Instant::now();
        // SAFETY: only this function frees what `current` points to, and the lock makes this its only call.
        let old = unsafe { &*self.current.load(Ordering::Acquire) };
        let traced = u32::from(old.state() as u16);
        let next = Some(self.next.swap(SAME, Ordering::Relaxed)).filter(|next| *next != SAME).unwrap_or(traced);
        old.state.fetch_or(PAUSED, Ordering::Relaxed);
        let ready = self.drain(patience).and_then(|()| between().map_err(ChangeError::Refused));
        if let Err(error) = ready {
            old.state.fetch_and(!PAUSED, Ordering::Release);
            return Err(error);
        }
        let new = Box::into_raw(Box::new(Inner { root: Arc::clone(root), state: AtomicU32::new(next | PAUSED) }));
        // Release: whoever loads the pointer sees what it points to.
        let old = self.current.swap(new, Ordering::AcqRel);
        self.vacate();
        // SAFETY: from `new` or the last change; nobody is inside who could have loaded it, and nobody can load it any more.
        let old = unsafe { Box::from_raw(old) };
        // SAFETY: only this function frees what `current` points to.
        let new = unsafe { &*new };
        // Looked at last: nobody can note anything there any more.
        new.state.fetch_or(old.state() & (CLOSED | UNTOLD), Ordering::Relaxed);
        new.state.fetch_and(!PAUSED, Ordering::Release);
        let pause = start.elapsed();
        // It may be the last owner, and closing files takes time.
        drop(old);
        Ok(pause)
    }

    /// Waits until nobody is inside.
    fn drain<E>(&self, patience: Duration) -> Result<(), ChangeError<E>> {
        // The pause was stored before; now everybody who entered without seeing it is counted.
        barrier().map_err(ChangeError::Barrier)?;
        let end = Instant::now() + patience;
        loop {
            match self.presence.count() {
                // Copies that are settled together ([`Volume::settles_late`]) may outlast the visit in which they were made; what comes next
                // finds them after this.
                0 => return barrier().map_err(ChangeError::Barrier),
                in_flight if Instant::now() >= end => return Err(ChangeError::Busy { in_flight, patience }),
                _ => thread::sleep(DRAIN_LOOK),
            }
        }
    }

    /// Waits for those who only looked (at the geometry, at the pause): requests are paused.
    fn vacate(&self) {
        while barrier().is_err() || self.presence.count() > 0 {
            thread::sleep(DRAIN_LOOK);
        }
    }

    /// A request that is recorded, or that came during a pause.
    #[cold]
    fn submit_watched<'a>(&'a self, visit: Visit<'a>, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if visit.inner.is_paused() {
            drop(visit);
            return Step::Wait(cx.scratch.place_future(self.submit_later(cx, request)));
        }
        let step = visit.inner.submit(cx, request);
        visit.leave_after(cx, step)
    }

    /// A request that came during a pause.
    async fn submit_later(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        loop {
            let visit = self.visit();
            if !visit.inner.is_paused() {
                return visit.inner.submit(cx, request).await;
            }
            drop(visit);
            cx.io(IoOperation::Sleep(LOOK_AGAIN)).await;
        }
    }

    /// The same with metadata.
    async fn submit_tagged_later(&self, cx: TaskContext<'_>, request: TaggedRequest) -> Result<(), BlockError> {
        loop {
            let visit = self.visit();
            if !visit.inner.is_paused() {
                return visit.inner.submit_tagged(cx, request).await;
            }
            drop(visit);
            cx.io(IoOperation::Sleep(LOOK_AGAIN)).await;
        }
    }
}

/// Waits for a request, and leaves when it has ended. The order of the parameters matters: the last is dropped first.
async fn follow<'a>(_visit: Visit<'a>, step: Step<'a>) -> Result<(), BlockError> {
    step.await
}

/// Scratch bytes that the future of [`follow`] takes.
fn follow_bytes<'a, F: Future + 'a>(_: fn(Visit<'a>, Step<'a>) -> F) -> usize {
    placed_bytes::<F>()
}

impl Volume for Switch {
    fn name(&self) -> &str {
        &self.name
    }

    #[inline]
    fn geometry(&self) -> Geometry {
        self.visit().inner.root.geometry()
    }

    #[inline]
    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let visit = self.visit();
        if visit.inner.state() != 0 {
            return self.submit_watched(visit, cx, request);
        }
        let step = visit.inner.root.submit(cx, request);
        match step.at_once() {
            Ok(done) => done,
            Err(step) => visit.leave_after(cx, step),
        }
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let visit = self.visit();
        if visit.inner.is_plain() { visit.inner.root.submit_many(requests) } else { 0 }
    }

    /// One visit, in which the shape is asked for as well.
    fn do_one(&self, transfer: Transfer, at: ByteOffset, data: Segment) -> bool {
        let visit = self.visit();
        visit.inner.is_plain() && visit.inner.root.do_one(transfer, at, data)
    }

    #[inline]
    fn prefetch(&self, lba: Lba, count: BlockCount) -> bool {
        self.visit().inner.root.prefetch(lba, count)
    }

    fn call_off(&self, asker: Asker) {
        self.visit().inner.root.call_off(asker);
    }

    fn settles_late(&self) -> bool {
        self.visit().inner.root.settles_late()
    }

    fn metadata(&self) -> Metadata {
        self.visit().inner.root.metadata()
    }

    fn submit_tagged<'a>(&'a self, cx: TaskContext<'a>, request: TaggedRequest) -> Step<'a> {
        let visit = self.visit();
        if visit.inner.is_paused() {
            drop(visit);
            return Step::Wait(cx.scratch.place_future(self.submit_tagged_later(cx, request)));
        }
        let step = visit.inner.submit_tagged(cx, request);
        visit.leave_after(cx, step)
    }

    fn format_metadata(&self, format: Option<MetadataFormat>) -> Result<(), VolumeError> {
        self.root().format_metadata(format)
    }

    fn scratch_bytes(&self) -> usize {
        // What is current when the request comes may not be what is current now: whoever changes it checks the room.
        let own = future_bytes(Self::submit_later).max(tagged_bytes(Self::submit_tagged_later));
        self.root().scratch_bytes() + own.max(follow_bytes(follow)) + trace::submit_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let root = self.root();
        self.ledger.as_ref().map_or_else(|| root.resize(blocks), |ledger| ledger.resize(&*root, blocks))
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let root = self.root();
        self.ledger.as_ref().map_or_else(|| root.format(block_size), |ledger| ledger.format(&*root, block_size))
    }

    fn usage(&self) -> Usage {
        self.root().usage()
    }

    fn extent(&self, lba: Lba) -> Option<Extent> {
        self.root().extent(lba)
    }

    fn erases_by_key(&self) -> bool {
        self.root().erases_by_key()
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // SAFETY: from `new` or `change`; there is no other reference to the switch, so nobody is inside.
        drop(unsafe { Box::from_raw(*self.current.get_mut()) });
    }
}

impl std::fmt::Debug for Switch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switch").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Makes every thread of the process run a full memory barrier.
pub(crate) fn barrier() -> io::Result<()> {
    let call = |command: libc::c_int| {
        // SAFETY: the call takes numbers and touches no memory of ours.
        let result = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    match call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) {
        // The process has not said yet that it will use it.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            call(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)?;
            call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
        }
        result => result,
    }
}
