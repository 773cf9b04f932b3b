//! The disk itself: its queues, its memory, and one turn of its work. It knows nothing of sockets.

use std::{cell::Cell, rc::Rc, sync::Arc};

use millrace_block::{Asker, BlockCount, BlockError, Geometry, Volume, trace::Site};
use millrace_engine::{ShardContext, TaskSlot, reaper};
use millrace_memory::Unsettled;
use thiserror::Error;

use super::{
    Config, Kind,
    config::feature,
    dirty::DirtyLog,
    inflight::InflightRegion,
    memory::MemoryTable,
    message::VringAddr,
    modes::WriteModes,
    queue::Queue,
    request::{Attached, Finished, RequestError, Sink},
    ring::{AHEAD, Buffers, Done, FEW, Plain, Ring, RingError},
};
use crate::eventfd::HasBlocked;

/// Requests taken from one queue before the next queue has its turn.
const BURST: usize = 128;
/// Requests that are given back before more are taken: the guest makes new ones of these meanwhile. With all of a turn's given back at its
/// end, guest and device would wait for each other by turns.
const GIVE_BACK: usize = AHEAD;
/// Bytes after which a turn takes no more: a volume may move them all before anybody else on the shard has its turn.
const BURST_BYTES: u64 = 8 << 20;
/// Bytes that take about as long to move as a descriptor takes to follow.
pub(crate) const DESCRIPTOR_BYTES: u64 = 256;

/// Why a disk has failed: a guest's or a front end's fault.
#[derive(Debug, Error)]
pub(crate) enum Fault {
    #[error("queue {queue}: {source}")]
    Ring {
        queue: u16,
        #[source]
        source: RingError,
    },
    #[error("queue {queue}: {source}")]
    Request {
        queue: u16,
        #[source]
        source: RequestError,
    },
    #[error("memory was taken away (its file was truncated)")]
    Poisoned,
}

/// Counters of a disk's life.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) read_commands: u64,
    pub(crate) write_commands: u64,
    pub(crate) other_commands: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    pub(crate) errors: u64,
    pub(crate) media_errors: u64,
    pub(crate) interrupts: u64,
}

impl Counters {
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes_read + self.bytes_written
    }
}

/// What requests of all queues share.
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) memory: MemoryTable,
    pub(crate) buffers: Buffers,
    /// What was looked at ahead; the room is reused.
    ahead: Vec<(u16, Option<Plain>)>,
    pub(crate) attached: Option<Rc<Attached>>,
    /// What the volume was that was taken away, or what a guest was told of a disk that never had one: guests learn it once, when they
    /// start, so that a disk without a volume keeps it.
    pub(crate) kind: Option<Kind>,
    /// Features that the guest and its front end chose.
    pub(crate) features: u64,
    /// The write cache mode that the guest chose.
    pub(crate) write_cache: bool,
    /// Where changes of memory are logged, while they are.
    pub(crate) log: Option<Rc<DirtyLog>>,
    pub(crate) counters: Counters,
    /// Descriptors that were followed, and what takes as long as to follow so many.
    pub(crate) followed: u64,
    /// No more is taken in this turn once so much is spent.
    pub(crate) until: u64,
    /// Requests that wait for the volume.
    pub(crate) in_flight: u32,
    /// Whether requests are recorded.
    pub(crate) trace: Site,
}

impl Core {
    /// Whether a feature was chosen.
    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// What turns have cost so far, in bytes: those that were moved, and what was done for requests that move few. Pages that are logged are
    /// not counted by themselves: there are no more of them than bytes and descriptors pay for.
    #[inline]
    pub(crate) fn spent(&self) -> u64 {
        self.counters.bytes() + self.followed * DESCRIPTOR_BYTES
    }

    /// Takes what is there of a queue, until `most` are taken or the turn's bytes are spent, and starts it; counts it in `taken`. Not inlined: the
    /// look at an idle queue and the way of a request by itself are short, and have the registers.
    #[inline(never)]
    fn take(
        &mut self,
        cx: &ShardContext<'_>,
        queue: &mut Queue,
        number: u16,
        taken: &mut usize,
        most: usize,
    ) -> Result<(), Fault> {
        let Some(ring) = &mut queue.ring else { return Ok(()) };
        let of_ring = |source| Fault::Ring { queue: number, source };
        let mut slot: Option<TaskSlot<'_>> = None;
        let mut geometry = None;
        // Before anything is given back, everything is settled: at the end of this.
        let mut unsettled: Option<Unsettled> = None;
        while *taken < most && (!queue.stopping || ring.has_left_over()) && ring.has_more().map_err(of_ring)? {
            // Where what changes is logged, every request goes the long way.
            let room = if self.buffers.keep_ranges { 0 } else { AHEAD.min(most - *taken) };
            let found = ring.look_ahead(&self.memory, &mut self.ahead, room).map_err(of_ring)?;
            if self.trace.is_on() && !ring.has_left_over() {
                // After what was looked at, so that it counts; what comes later is seen, and taken, the next time.
                self.trace.seen(number, ring.pending().map_err(of_ring)?);
            }
            let mut done = 0;
            if found > 1 {
                done = self.do_together::<AHEAD>(geometry.get_or_insert_with(|| self.begin(found, &mut unsettled)));
            } else if found == 1 && (*taken > 0 || !queue.done.is_empty()) {
                // Others were there, so that the volume was not asked for it by itself.
                done = self.do_together::<1>(geometry.get_or_insert_with(|| self.begin(found, &mut unsettled)));
            }
            for at in 0..done {
                let Some((head, Some(plain))) = self.ahead.get(at).copied() else { break };
                ring.take_plain(head).map_err(of_ring)?;
                *taken += 1;
                queue.done.push(self.end_plain(number, head, &plain));
            }
            for at in done..found.max(1) {
                if self.spent() >= self.until {
                    return Ok(());
                }
                let Some(free) = slot.take().or_else(|| cx.reserve()) else { return Ok(()) };
                let (done, free) = if let Some((head, plain, sector)) = self.transfer_ahead(at) {
                    ring.take_plain(head).map_err(of_ring)?;
                    *taken += 1;
                    let geometry = geometry.get_or_insert_with(|| self.begin(found, &mut unsettled));
                    self.start_plain(free, number, head, &plain, sector, geometry)
                } else {
                    let Some(token) = ring.take(&self.memory, &mut self.buffers).map_err(of_ring)? else { return Ok(()) };
                    *taken += 1;
                    self.start(free, number, token).map_err(|source| Fault::Request { queue: number, source })?
                };
                match done {
                    Some(done) => queue.done.push(done),
                    None => queue.waiting += 1,
                }
                slot = free;
            }
            // Who has few requests under way waits for these: whether more have come is seen when they are answered.
            if (1..=usize::from(FEW)).contains(&found) && ring.is_drained() {
                break;
            }
        }
        Ok(())
    }

    /// Before the first of so many requests that were looked at ahead in a turn: what is copied may be settled later, if the volume allows that, and
    /// there is more than one. The volume's shape.
    fn begin(&self, found: usize, unsettled: &mut Option<Unsettled>) -> Geometry {
        let late = found > 1 && self.attached.as_ref().is_some_and(|attached| attached.volume.settles_late());
        *unsettled = late.then(Unsettled::new);
        self.geometry()
    }

    /// What was found ahead at a place, if it is a read or write: its head, and the sector where it begins.
    #[inline]
    pub(crate) fn transfer_ahead(&self, at: usize) -> Option<(u16, Plain, u64)> {
        let (head, plain) = *self.ahead.get(at)?;
        let plain = plain?;
        Some((head, plain, plain.sector()?))
    }

    /// The shape of what is shown; a disk without a volume has no blocks.
    fn geometry(&self) -> Geometry {
        self.attached.as_ref().map_or_else(|| self.nothing(), |attached| attached.volume.geometry())
    }

    fn nothing(&self) -> Geometry {
        let Kind { block_size, read_only, deallocate } = self.kind.unwrap_or_default();
        Geometry { block_size, blocks: BlockCount(0), read_only, volatile_cache: true, deallocate }
    }

    /// Records what a queue gives back.
    #[cold]
    fn trace_ends(&self, queue: u16, ended: &[Done], calls: bool) {
        for done in ended {
            self.trace.completed(queue, done.token, done.status, calls.then_some(queue));
        }
        if calls {
            self.trace.interrupted(queue);
        }
    }

    /// Whether a write may end before it is durable (virtio 1.3, 5.2.5.2 and 5.2.6.2): a driver that cannot flush must not need to.
    pub(crate) fn write_back(&self) -> bool {
        self.has(feature::FLUSH) && (self.write_cache || !self.has(feature::CONFIG_WCE))
    }
}

/// A virtio disk.
pub(crate) struct Disk {
    pub(crate) core: Core,
    pub(crate) queues: Vec<Queue>,
    pub(crate) sink: Rc<Sink>,
    /// The modes of all disks that show the volume.
    modes: Option<Arc<WriteModes>>,
    /// Whether the write cache mode is this front end's guest's, whatever other disks know.
    mode_known: bool,
    /// The front end has asked for the configuration, and so knows the mode that a guest begins with.
    mode_told: bool,
    /// The front end's log, whether it is in use or not.
    pub(crate) log: Option<Rc<DirtyLog>>,
    pub(crate) inflight: Option<InflightRegion>,
    /// Nothing new is taken: the front end waits for rest, or is gone.
    pub(crate) paused: bool,
    /// Nothing new is taken ever again here: another worker is about to go on.
    pub(crate) held: bool,
    /// The guest, or its front end, broke the rules; nothing works before a reset.
    pub(crate) failed: bool,
    /// The front end took memory away; nothing of its works before it connects again.
    lost: bool,
    /// The front end is gone, and requests that were called off since then are left on record, undone.
    leaves_undone: bool,
    /// Volumes that were taken away with requests in flight.
    leaving: Vec<Rc<Attached>>,
    /// Where the round over the queues goes on.
    first: usize,
    /// Ends taken from the sink; the room is reused.
    finished: Vec<Finished>,
    /// Requests counted for the shard's statistics.
    counted: Cell<u64>,
    pub(crate) has_blocked: HasBlocked,
}

impl Disk {
    pub(crate) fn new(config: Config, kind: Option<Kind>) -> Self {
        let queues = (0..config.queues).map(|_| Queue::default()).collect();
        Self {
            core: Core {
                memory: MemoryTable::new(config.pin_memory),
                config,
                buffers: Buffers::new(),
                ahead: Vec::with_capacity(AHEAD),
                attached: None,
                kind,
                features: 0,
                write_cache: true,
                log: None,
                counters: Counters::default(),
                followed: 0,
                until: 0,
                in_flight: 0,
                trace: Site::default(),
            },
            queues,
            sink: Rc::default(),
            modes: None,
            mode_known: false,
            mode_told: false,
            log: None,
            inflight: None,
            paused: true,
            held: false,
            failed: false,
            lost: false,
            leaves_undone: false,
            leaving: Vec::new(),
            first: 0,
            finished: Vec::with_capacity(64),
            counted: Cell::new(0),
            has_blocked: HasBlocked::default(),
        }
    }

    // ---- the volume ---------------------------------------------------------------------------------------------------

    /// Shows a volume from now on.
    pub(crate) fn attach(&mut self, volume: Arc<dyn Volume>, modes: Arc<WriteModes>, read_only: bool) {
        self.detach();
        self.modes = Some(modes);
        if self.running() > 0 {
            self.note_mode();
        }
        self.core.attached = Some(Rc::new(Attached::new(volume, read_only, &self.sink)));
    }

    /// Shows the volume no more; requests in flight on it finish. Whether there was one.
    pub(crate) fn detach(&mut self) -> bool {
        self.forget_mode();
        self.core.kind = self.kind();
        let was = self.core.attached.take();
        let had = was.is_some();
        self.leaving.extend(was);
        had
    }

    /// Whether no request is in flight any more on volumes that were taken away.
    pub(crate) fn is_detached(&mut self) -> bool {
        self.leaving.retain(|attached| Rc::strong_count(attached) > 1);
        self.leaving.is_empty()
    }

    /// The shape of what is shown; a disk without a volume has no blocks.
    pub(crate) fn geometry(&self) -> Geometry {
        self.core.geometry()
    }

    /// What the disk is. One that never had a volume, and told nobody, may become anything.
    pub(crate) fn kind(&self) -> Option<Kind> {
        let shown = self.core.attached.as_ref();
        shown.map(|attached| Kind::new(&attached.volume.geometry(), attached.read_only)).or(self.core.kind)
    }

    /// A guest is told what the disk is.
    pub(crate) fn tell_kind(&mut self) {
        self.mode_told = true;
        self.core.kind = self.kind().or_else(|| Some(Kind::default()));
        self.note_block_size();
    }

    /// Keeps the block size where this disk's next process finds it: of a disk that never had a volume nobody else knows what was told.
    fn note_block_size(&self) {
        if let Some((region, kind)) = self.inflight.as_ref().zip(self.kind()) {
            region.set_block_size(kind.block_size);
        }
    }

    /// What the guest is offered.
    pub(crate) fn offered(&self) -> u64 {
        self.core.config.features(self.kind().unwrap_or_default())
    }

    /// What the front end is offered of the protocol.
    pub(crate) fn protocol(&self) -> u64 {
        self.core.config.protocol()
    }

    // ---- turns --------------------------------------------------------------------------------------------------------

    /// One turn: ends of tasks, then new requests of every queue, then what the guest is told of both. Returns the work done.
    pub(crate) fn turn(&mut self, cx: &mut ShardContext<'_>) -> Result<usize, Fault> {
        let mut work = if self.sink.results.borrow().is_empty() { 0 } else { self.reap() };
        if !self.lost && self.is_poisoned() {
            self.lost = true;
            return Err(Fault::Poisoned);
        }
        self.core.until = self.core.spent() + BURST_BYTES;
        let count = self.queues.len();
        let mut outcome = Ok(());
        for at in 0..count {
            let index = self.first + at;
            let index = if index >= count { index - count } else { index };
            match self.serve(cx, index) {
                Ok(done) => work += done,
                Err(fault) => outcome = outcome.and(Err(fault)),
            }
        }
        if work > 0 {
            self.first = if self.first + 1 >= count { 0 } else { self.first + 1 };
            let Counters { read_commands, write_commands, other_commands, .. } = self.core.counters;
            let total = read_commands + write_commands + other_commands;
            cx.count_commands(total - self.counted.replace(total));
        }
        outcome.map(|()| work)
    }

    fn is_poisoned(&self) -> bool {
        self.core.memory.guest.is_poisoned()
            || self.inflight.as_ref().is_some_and(InflightRegion::is_poisoned)
            || self.log.as_ref().is_some_and(|log| log.is_poisoned())
    }

    #[inline(never)]
    fn reap(&mut self) -> usize {
        let mut finished = std::mem::take(&mut self.finished);
        std::mem::swap(&mut *self.sink.results.borrow_mut(), &mut finished);
        let work = finished.len();
        for Finished { queue, done, result } in finished.drain(..) {
            self.core.in_flight = self.core.in_flight.checked_sub(1).expect("a request ends once");
            let Some(queue) = self.queues.get_mut(usize::from(queue)) else { continue };
            queue.waiting -= 1;
            if self.leaves_undone && matches!(result, Err(BlockError::CalledOff)) {
                continue;
            }
            self.core.count_error(result);
            queue.done.push(done);
        }
        self.finished = finished;
        work
    }

    /// One queue: takes requests, gives back what has ended, one by itself or some at a time, tells the guest once.
    #[inline]
    fn serve(&mut self, cx: &ShardContext<'_>, index: usize) -> Result<usize, Fault> {
        let (queue, core) = (&mut self.queues[index], &mut self.core);
        let Some(ring) = &mut queue.ring else {
            queue.done.clear();
            return Ok(0);
        };
        let number = index as u16;
        let of_ring = |source| Fault::Ring { queue: number, source };
        let is_open = queue.enabled && !self.paused && !self.held && !self.failed;
        let mut is_answered = false;
        if queue.done.is_empty() {
            // Of an idle queue no more is asked.
            let may_take = is_open && (!queue.stopping || ring.has_left_over());
            if !may_take || !ring.has_more().map_err(of_ring)? {
                return Ok(0);
            }
            is_answered = core.do_only(ring, number).map_err(of_ring)?;
        }
        let (mut taken, mut ended, mut outcome) = (0, 0, Ok(()));
        if is_answered {
            (taken, ended) = (1, 1);
        } else {
            // A trace tells of each request whether its guest was interrupted for it, which is known at the end.
            let mut most = if core.trace.is_on() { BURST } else { GIVE_BACK };
            loop {
                if is_open {
                    outcome = core.take(cx, queue, number, &mut taken, most);
                }
                ended += queue.give_back(core.log.as_deref());
                if taken < most || most == BURST || outcome.is_err() {
                    break;
                }
                queue.done.clear();
                most = BURST.min(most + GIVE_BACK);
            }
        }
        if ended > 0 {
            let calls = queue.ring.as_mut().is_some_and(Ring::wants_call);
            if core.trace.is_on() {
                core.trace_ends(number, &queue.done, calls);
            }
            queue.done.clear();
            if calls && queue.call() {
                core.counters.interrupts += 1;
            }
        }
        outcome.map(|()| taken.max(ended))
    }

    /// Whether nothing touches the guest's memory any more.
    pub(crate) fn is_quiet(&self) -> bool {
        self.core.in_flight == 0 && self.queues.iter().all(|queue| queue.done.is_empty())
    }

    /// The front end is gone, and did not wait for what it had asked for: what only waits for its turn ends at once, undone, and stays on record for
    /// whoever connects with that. Without a record, nobody would do it: then it is finished.
    pub(crate) fn call_off(&mut self, asker: Asker) {
        let is_kept = |queue: &Queue| queue.waiting == 0 || queue.ring.as_ref().is_some_and(Ring::is_on_record);
        self.leaves_undone = self.queues.iter().all(is_kept);
        if self.leaves_undone {
            let shown = self.core.attached.iter().chain(&self.leaving);
            shown.for_each(|attached| attached.volume.call_off(asker));
        }
    }

    /// Nothing works before a reset.
    pub(crate) fn fail(&mut self) {
        self.failed = true;
        self.queues.iter().for_each(Queue::report_failure);
    }

    // ---- the front end's settings ---------------------------------------------------------------------------------------

    /// Features were chosen. Changes of memory are logged from now on, or no longer.
    pub(crate) fn set_features(&mut self, features: u64) {
        self.core.features = features;
        self.apply_log();
    }

    /// The front end's log.
    pub(crate) fn set_log(&mut self, log: DirtyLog) {
        self.log = Some(Rc::new(log));
        self.apply_log();
    }

    fn apply_log(&mut self) {
        let log = self.log.clone().filter(|_| self.core.has(feature::LOG_ALL));
        // Kept with every request while there is a log. None that began before it ends after it has begun: the log begins at rest
        // (`must_wait` sees to that, whether the log or its feature comes last).
        self.core.buffers.keep_ranges = log.is_some();
        self.sink.log.borrow_mut().clone_from(&log);
        if let Some(log) = log.as_deref().filter(|_| self.core.log.is_none()) {
            // A worker may have died between a change of a ring and its mark.
            self.queues.iter().filter_map(|queue| queue.ring.as_ref()).for_each(|ring| ring.mark(log));
        }
        self.core.log = log;
    }

    /// Where a queue's parts are; a queue that runs goes on there.
    pub(crate) fn set_addr(&mut self, addr: VringAddr) -> Result<(), RingError> {
        let Some(queue) = self.queues.get_mut(addr.index as usize) else { return Ok(()) };
        if let Some(ring) = &mut queue.ring {
            ring.relocate(&self.core.memory, &addr)?;
        }
        queue.addr = Some(addr);
        // Its memory has gone, and this may be in what is there.
        if queue.is_displaced() {
            let _ = self.make_ring(addr.index as usize);
        }
        Ok(())
    }

    /// Starts a queue.
    pub(crate) fn start_queue(&mut self, index: usize) -> Result<(), RingError> {
        let Some(queue) = self.queues.get(index) else { return Ok(()) };
        let (runs, begins) = (queue.ring.is_some(), queue.begins(self.core.features));
        self.make_ring(index)?;
        // A ring that was used as often as its positions have values stands where rings begin, too.
        let is_fresh = || self.queues.get(index).and_then(|queue| queue.ring.as_ref()).is_none_or(Ring::is_fresh);
        let begins = begins && (runs || is_fresh());
        self.settle_mode(begins);
        Ok(())
    }

    /// Stops a queue, at rest; where it would go on. Whose guest has used it may go on at another disk, or here behind another front end.
    pub(crate) fn stop_queue(&mut self, index: usize) -> Option<u32> {
        let queue = self.queues.get_mut(index)?;
        let ran = queue.ring.is_some() || queue.is_displaced();
        let is_fresh = queue.ring.as_ref().is_none_or(Ring::is_fresh);
        let base = queue.stop();
        if ran && !(is_fresh && queue.begins(self.core.features)) {
            // Behind this front end it goes on as it was, whatever other disks know by then. A front end that has not asked knows no more than before.
            self.mode_known |= self.mode_told;
            self.note_guest();
        }
        Some(base)
    }

    fn make_ring(&mut self, index: usize) -> Result<(), RingError> {
        let record = self.inflight.as_ref().map(|region| (region, index));
        let Some(queue) = self.queues.get_mut(index) else { return Ok(()) };
        queue.start(&self.core.memory, self.core.features, record)?;
        if let Some(ring) = &mut queue.ring {
            let log = self.core.log.as_deref();
            if let Some(log) = log {
                // As where the log begins.
                ring.mark(log);
            }
            // We look by ourselves until the shard goes to sleep.
            ring.disarm(log);
        }
        Ok(())
    }

    /// There is more memory: queues go on whose rings were in memory that had gone, if that is all there again.
    pub(crate) fn memory_came(&mut self) {
        for index in 0..self.queues.len() {
            if self.queues[index].is_displaced() {
                // The rest of it may be still to come. Whose guest it is, is known: the mode stays.
                let _ = self.make_ring(index);
            }
        }
    }

    /// The memory table has changed, at rest: queues find their parts again, and what was unmapped goes.
    pub(crate) fn memory_changed(&mut self) -> Result<(), RingError> {
        assert!(self.is_quiet(), "memory goes at rest");
        let mut outcome = Ok(());
        for queue in &mut self.queues {
            let Some((ring, addr)) = queue.ring.as_mut().zip(queue.addr) else { continue };
            if let Err(error) = ring.relocate(&self.core.memory, &addr) {
                queue.displace();
                outcome = Err(error);
            }
        }
        if self.core.memory.guest.has_retired() {
            // SAFETY: the regions were unmapped before now and nothing is in flight: no task holds a segment. The rings' own were
            // found again above, or dropped.
            let regions = unsafe { self.core.memory.guest.reclaim() };
            // Unmapping a large guest takes milliseconds.
            reaper::drop_later(Box::new(regions));
        }
        outcome
    }

    /// Back to the state of a disk that no guest has seen; at rest. The front end's memory stays, and its descriptors, and the write
    /// cache mode: QEMU and Cloud Hypervisor keep what the last guest chose, and tell the next one that.
    pub(crate) fn reset(&mut self) {
        for index in 0..self.queues.len() {
            self.stop_queue(index);
            self.queues[index].enabled = false;
        }
        self.failed = false;
    }

    /// The front end is gone, and everything of its; at rest.
    pub(crate) fn forget_front_end(&mut self) {
        for index in 0..self.queues.len() {
            self.stop_queue(index);
        }
        self.queues.iter_mut().for_each(|queue| *queue = Queue::default());
        self.core.memory.clear();
        // Without queues nothing can be wrong.
        let _ = self.memory_changed();
        // A new front end's memory is not poisoned by what the last one did to its own.
        self.core.memory = MemoryTable::new(self.core.config.pin_memory);
        (self.log, self.inflight, self.paused) = (None, None, true);
        (self.failed, self.lost, self.leaves_undone) = (false, false, false);
        (self.core.write_cache, self.mode_known, self.mode_told) = (true, false, false);
        self.set_features(0);
    }

    // ---- the write cache mode -------------------------------------------------------------------------------------------

    /// The guest chose a write cache mode.
    pub(crate) fn set_write_cache(&mut self, on: bool) {
        (self.core.write_cache, self.mode_known) = (on, true);
        self.note_mode();
    }

    /// A queue has started. A guest that does not begin there, and has said nothing here, comes from another disk, or it was saved. A front end
    /// that has not asked here knows what an earlier process told it, or what the guest chose then, and asks no more: where no record says what
    /// that is, it may be that the guest never flushes.
    fn settle_mode(&mut self, begins: bool) {
        if !self.mode_known && !self.mode_told && self.core.has(feature::CONFIG_WCE) {
            (self.core.write_cache, self.mode_known) = (false, true);
        } else if !self.mode_known && !begins {
            let name = &self.core.config.name;
            self.core.write_cache &= self.modes.as_ref().is_none_or(|modes| modes.take_up(name));
            self.mode_known = true;
        }
        self.note_mode();
    }

    /// Keeps the mode where this disk's next process and the volume's other disks find it.
    fn note_mode(&self) {
        self.note_block_size();
        if let Some(region) = &self.inflight {
            region.set_write_back(self.core.write_cache);
        }
        // A queue that was never used begins, also where its guest goes on at the next one: what was known of it is still wanted then.
        if self.mode_known {
            self.note_guest();
        }
    }

    fn note_guest(&self) {
        if let Some(modes) = &self.modes {
            modes.note(&self.core.config.name, self.core.write_cache);
        }
    }

    /// This disk's guest goes on at no other one.
    pub(crate) fn forget_mode(&mut self) {
        if let Some(modes) = self.modes.take() {
            modes.forget(&self.core.config.name);
        }
    }

    /// The record of requests under way, which may be an earlier process's.
    pub(crate) fn set_inflight(&mut self, region: InflightRegion) {
        if let Some(on) = region.write_back() {
            (self.core.write_cache, self.mode_known) = (on, true);
        }
        if self.kind().is_none()
            && let Some(block_size) = region.block_size()
        {
            self.core.kind = Some(Kind { block_size, ..Kind::default() });
        }
        self.inflight = Some(region);
    }

    // ---- sleeping -------------------------------------------------------------------------------------------------------

    /// Asks the guest to kick. Returns whether there is something to take already.
    pub(crate) fn arm(&mut self) -> bool {
        if self.paused || self.held || self.failed {
            return false;
        }
        let log = self.core.log.as_deref();
        let mut found = false;
        for queue in self.queues.iter_mut().filter(|queue| queue.enabled) {
            let Some(ring) = &mut queue.ring else { continue };
            // Before a stop is answered, too: they wait for slots, and nobody says when there are some.
            found |= ring.has_left_over();
            if !queue.stopping {
                queue.armed = true;
                found |= ring.arm(log);
            }
        }
        found
    }

    /// Kicks are not needed any more.
    pub(crate) fn disarm(&mut self) {
        let log = self.core.log.as_deref();
        for queue in self.queues.iter_mut().filter(|queue| queue.armed) {
            queue.armed = false;
            if let Some(ring) = &mut queue.ring {
                ring.disarm(log);
            }
        }
    }

    /// Whether a queue can only be served by looking: its guest has no way to kick.
    pub(crate) fn must_look(&self) -> bool {
        !self.paused
            && !self.held
            && self.queues.iter().any(|queue| queue.enabled && queue.ring.is_some() && queue.kick.is_none())
    }

    /// Queues that run.
    pub(crate) fn running(&self) -> usize {
        self.queues.iter().filter(|queue| queue.enabled && queue.ring.is_some()).count()
    }

    /// Requests under way, those of earlier processes that were not taken yet included.
    pub(crate) fn under_way(&self) -> u32 {
        self.queues.iter().filter_map(|queue| queue.ring.as_ref()).map(|ring| u32::from(Ring::in_flight(ring))).sum()
    }
}
