//! One hardware queue pair as a shard uses it: commands in flight, who waits for them, and buffers for what cannot go directly.
//!
//! Places in the queue and buffers are waited for in a [line](Line) each, and who comes later stands at its end, also when something is free that one
//! in the line was called for and has not fetched yet. A turn is a matter of where one stands, not of having been woken: no wake-up can be
//! used up by a task that it does not help, or by one that is no more. Whoever makes room, and whoever leaves the line with empty hands,
//! calls those whose turn it has become. While there is no queue all have their turn: each is told so.

use std::{
    future::poll_fn,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use millrace_block::{ByteOffset, IoOperation, TaskContext};
use millrace_driver::{
    Command, DmaBuffer, DmaRange, DriverError, PAGE_SIZE, QueueError, QueuePair, SglLimits,
    spec::{CommandId, QueueId, Status},
};
use millrace_memory::{Segment, SegmentCursor};

use super::{
    line::Line,
    table::{Entries, Table},
};

/// Entries of each queue.
pub(super) const ENTRIES: u32 = 128;
/// Bytes of a buffer for data that cannot go directly.
pub(super) const BOUNCE: usize = 64 << 10;
/// Such buffers.
pub(super) const BOUNCES: usize = 32;
/// How long a queue in which nothing completes is looked at without a break.
const SPIN: Duration = Duration::from_micros(100);
/// How often a miss asks for memory to be mapped, at first; half as often each time that nothing came of it.
const ASK: Duration = Duration::from_millis(5);
/// And in the end: what must not be pinned is never mapped, and missed by every request.
const SELDOM: Duration = Duration::from_millis(100);
/// Sleeps in a row that found something and were not ended by its interrupt, until interrupts are given up.
const UNHEARD: u32 = 3;
/// Completions that cannot be on one queue, until its controller is not believed any more.
pub(super) const STRANGE: u64 = 1000;

/// Where a command's data are.
pub(super) enum Data<'a> {
    /// There are none.
    None,
    /// Bytes from here on, as [`Lane::direct`] has found them to be within the device's reach.
    Direct(SegmentCursor<'a>, Reach),
    /// The first bytes of a buffer of the lane's.
    Bounce(&'a Bounce<'a>, usize),
}

/// How much of a request one command can move directly, and how it says where that is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reach {
    pub(super) len: usize,
    /// By an SGL: PRPs cannot say as much.
    sgl: bool,
}

/// What became of a command.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outcome {
    /// The controller answered.
    Status(Status),
    /// The controller was reset before it did: the command may or may not have been carried out, and touches nothing any more.
    Lost,
}

/// A command in flight: its slot, in the time of the queue that there was then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    slot: u16,
    generation: u64,
}

/// What became of an attempt to place a command.
pub(super) enum Begun {
    /// It is in flight.
    Flight(Ticket),
    /// There is no room yet, on the common lane: to be asked for again after a sleep.
    Full,
    /// There is no queue at the moment, or never again.
    Down,
    /// The namespace has other blocks than the command was made for.
    Changed,
    /// The command cannot be made: a bug of ours, or of the data's description.
    Refused(QueueError),
}

/// How a command that is in flight stands.
pub(super) enum Turn {
    Done(Outcome),
    /// Nothing completes: sleep a little, then look again.
    Nap,
    /// Nothing completes, and an interrupt will tell: [`Lane::sleep`], then look again.
    Sleep,
}

/// How tasks have waited for a physical controller beyond looking all the time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waits {
    /// Short sleeps between two looks.
    pub naps: u64,
    /// Sleeps until an interrupt.
    pub sleeps: u64,
    /// Those of them that were not ended by the look every 100 ms for interrupts that are lost.
    pub interrupts: u64,
}

/// A command from its begin until its task has seen its end: longer than the controller has it, and its identifier is taken.
#[derive(Debug, Default)]
struct Slot {
    /// When it began; `None`: there is none.
    begun: Option<Instant>,
    cid: CommandId,
    /// When the controller was asked to abort it.
    aborted: Option<Instant>,
    waker: Option<Waker>,
    status: Option<Status>,
}

/// What goes wrong with a queue itself. It is noted, and the watch tells of it: a controller may do it all the time, and who writes lines
/// meanwhile holds up every device of its shard.
#[derive(Default)]
struct Troubles {
    /// Since the watch has asked, and the last of them.
    new: u64,
    last: Option<QueueError>,
    /// Completions that cannot be, on this queue.
    strange: u64,
}

impl Troubles {
    fn note(&mut self, error: QueueError) {
        self.new += 1;
        self.strange += u64::from(matches!(error, QueueError::BadCompletion { .. }));
        self.last = Some(error);
    }
}

/// When misses ask for memory to be mapped.
#[derive(Debug, Default)]
struct Asking {
    /// When one did last, and how long none does from then on.
    last: Option<(Instant, Duration)>,
}

impl Asking {
    /// Whether a miss asks now.
    fn is_due(&mut self, now: Instant) -> bool {
        let pause = match self.last {
            Some((asked, pause)) if now.saturating_duration_since(asked) < pause => return false,
            Some((_, pause)) => (2 * pause).min(SELDOM),
            None => ASK,
        };
        self.last = Some((now, pause));
        true
    }

    /// The table has changed: so may what is missed.
    fn hurry(&mut self) {
        if let Some((_, pause)) = &mut self.last {
            *pause = ASK;
        }
    }
}

struct State {
    /// `None` while the controller is reset, and for good when it is gone.
    pair: Option<QueuePair>,
    slots: Vec<Slot>,
    free_slots: Vec<u16>,
    /// Whose slot it is, by command identifier.
    owners: Vec<u16>,
    /// Queues that were lost before this one.
    generation: u64,
    /// Tasks of theirs that sleep: only their own thread may wake them.
    stale: Vec<Waker>,
    /// The command whose task looks at the queue for all: it wakes itself, the others sleep.
    poller: Option<u16>,
    /// The event fd of the interrupt, if there is one.
    bell: Option<Arc<OwnedFd>>,
    /// It does not ring when it should.
    deaf: bool,
    /// The command whose task sleeps until the bell rings. While there is one the interrupt is on, and only then.
    sleeper: Option<u16>,
    /// The watch has rung.
    nudged: bool,
    /// Sleeps since the last interrupt at whose end something was there.
    unheard: u32,
    waits: Waits,
    /// Tasks that wait for a place in the queue, and for a buffer.
    place_line: Line,
    buffer_line: Line,
    /// Slots with a waker.
    waiting: usize,
    /// Free buffers.
    free: Vec<usize>,
    /// When something last completed, or began.
    progress: Instant,
    /// Mapped memory, as the table had it at that generation.
    entries: Entries,
    asking: Asking,
    /// Bytes moved directly, and by way of buffers.
    moved: (u64, u64),
    /// Commands that were begun.
    commands: u64,
    troubles: Troubles,
}

/// See the module.
pub(super) struct Lane {
    state: Mutex<State>,
    buffers: Vec<DmaBuffer>,
    /// All its tasks are of one thread, so that they can wake each other. On the common lane everybody looks for himself.
    exclusive: bool,
}

/// A command that takes longer than `patience` and that nobody was asked to abort: it is taken as asked for from now on.
fn overdue(slots: &mut [Slot], patience: Duration) -> Option<CommandId> {
    let late = |slot: &&mut Slot| slot.begun.is_some_and(|begun| begun.elapsed() > patience);
    let slot = slots.iter_mut().find(|slot| slot.status.is_none() && slot.aborted.is_none() && late(slot))?;
    slot.aborted = Some(Instant::now());
    Some(slot.cid)
}

/// How long a command has taken that is still there `patience` after it was asked to be aborted.
fn stuck(slots: &[Slot], patience: Duration) -> Option<Duration> {
    let stuck = |slot: &&Slot| slot.status.is_none() && slot.aborted.is_some_and(|aborted| aborted.elapsed() > patience);
    slots.iter().find(stuck).and_then(|slot| slot.begun).map(|begun| begun.elapsed())
}

impl Lane {
    /// A pair with an interrupt, for an exclusive lane, has one that can be masked.
    pub(super) fn new(mut pair: QueuePair, buffers: Vec<DmaBuffer>, exclusive: bool) -> Result<Self, DriverError> {
        let bell = pair.interrupt().filter(|_| exclusive).map(|fd| {
            let fd = fd.try_clone_to_owned()?;
            // A ring's read of it is to wait.
            rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::empty())?;
            Ok(Arc::new(fd))
        });
        let bell = bell.transpose().map_err(DriverError::EventFd)?;
        pair.mask_interrupt();
        let capacity = pair.capacity();
        // As many again may be completed and not seen yet.
        let slots = 2 * capacity as u16;
        let state = State {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            free_slots: (0..slots).rev().collect(),
            owners: vec![0; capacity],
            pair: Some(pair),
            generation: 0,
            stale: Vec::with_capacity(2 * capacity),
            poller: None,
            bell,
            deaf: false,
            sleeper: None,
            nudged: false,
            unheard: 0,
            waits: Waits::default(),
            place_line: Line::with_capacity(capacity),
            buffer_line: Line::with_capacity(capacity),
            waiting: 0,
            free: (0..buffers.len()).rev().collect(),
            progress: Instant::now(),
            entries: Entries::default(),
            asking: Asking::default(),
            moved: (0, 0),
            commands: 0,
            troubles: Troubles::default(),
        };
        Ok(Self { state: Mutex::new(state), buffers, exclusive })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes moved directly, and by way of buffers.
    pub(super) fn moved(&self) -> (u64, u64) {
        self.state().moved
    }

    /// Commands that were begun, those that were begun again among them.
    pub(super) fn commands(&self) -> u64 {
        self.state().commands
    }

    pub(super) fn waits(&self) -> Waits {
        self.state().waits
    }

    /// How often something went wrong with the queue since the last call, and what did last; `None`: nothing did.
    pub(super) fn troubles(&self) -> Option<(u64, QueueError)> {
        let mut state = self.state();
        let last = state.troubles.last.take()?;
        Some((std::mem::take(&mut state.troubles.new), last))
    }

    /// Whether the controller has completed too many commands that it does not have.
    pub(super) fn is_strange(&self) -> bool {
        self.state().troubles.strange >= STRANGE
    }

    /// Has a task that sleeps look: were its interrupt lost, it would sleep for ever.
    pub(super) fn nudge(&self) {
        let mut state = self.state();
        if state.sleeper.is_some() {
            state.nudged = true;
            state.ring();
        }
    }

    /// A command to abort: the controller has it for longer than `patience`, whatever others come and go meanwhile. Each is named once.
    pub(super) fn overdue(&self, patience: Duration) -> Option<(QueueId, CommandId)> {
        let mut state = self.state();
        let qid = state.pair.as_ref()?.id();
        overdue(&mut state.slots, patience).map(|cid| (qid, cid))
    }

    /// How long the controller has had a command that has not ended within `patience` of its abort.
    pub(super) fn stuck(&self, patience: Duration) -> Option<Duration> {
        stuck(&self.state().slots, patience)
    }

    /// Takes the queue away: nothing is placed any more. What is in flight is still the device's.
    pub(super) fn take_pair(&self) -> Option<QueuePair> {
        self.state().pair.take()
    }

    /// The device touches nothing any more: what was in flight is lost. Its tasks look by themselves: one of them always does, if it need be
    /// when the bell rings, and wakes the others.
    pub(super) fn lose(&self) {
        let mut guard = self.state();
        let state = &mut *guard;
        assert!(state.pair.is_none(), "commands of a queue that lives are not lost");
        state.generation += 1;
        state.poller = None;
        state.waiting = 0;
        state.stale.extend(state.slots.iter_mut().filter_map(|slot| std::mem::take(slot).waker));
        state.free_slots.clear();
        state.free_slots.extend((0..state.slots.len() as u16).rev());
        if state.sleeper.is_some() {
            state.nudged = true;
            state.ring();
        }
    }

    /// Puts a fresh queue in.
    pub(super) fn put_pair(&self, mut pair: QueuePair) {
        let mut state = self.state();
        // A reset of the function has taken the mask off.
        pair.mask_interrupt();
        assert!(pair.capacity() <= state.owners.len(), "the new queue is no larger");
        state.progress = Instant::now();
        state.troubles.strange = 0;
        state.pair = Some(pair);
    }

    /// How many bytes from here on one command can move directly: at most `most`, in pieces of `unit`; 0: none.
    pub(super) fn direct(&self, table: &Table, place: &SegmentCursor<'_>, most: usize, unit: usize) -> Reach {
        let mut guard = self.state();
        let state = &mut *guard;
        if state.entries.refresh(table) {
            state.asking.hurry();
        }
        let mut survey = Survey::new(state.pair.as_ref().and_then(QueuePair::sgl));
        let (mut place, mut miss) = (place.clone(), None);
        while let Some(run) = place.next_run(most - survey.seen) {
            let start = run.as_ptr() as usize;
            let Some(iova) = state.entries.find(start, run.len()) else {
                miss = Some(start);
                break;
            };
            if !survey.add(DmaRange { iova, len: run.len() }) {
                break;
            }
        }
        if let Some(address) = miss
            && state.asking.is_due(Instant::now())
        {
            table.ask(address);
        }
        survey.reach(unit)
    }

    /// For a task that wants a buffer.
    pub(super) fn for_buffer(&self) -> Standing<'_> {
        Standing { lane: self, number: None, line: State::for_buffer }
    }

    /// For a task that wants a place in the queue.
    pub(super) fn for_place(&self) -> Standing<'_> {
        Standing { lane: self, number: None, line: State::for_place }
    }

    /// Takes a buffer, when one is free. `None`: not yet, on the common lane; to be asked for again after a sleep.
    pub(super) async fn buffer(&self, standing: &mut Standing<'_>) -> Option<Bounce<'_>> {
        poll_fn(|cx| self.poll_buffer(&mut standing.number, cx)).await
    }

    fn poll_buffer(&self, number: &mut Option<u64>, cx: &mut Context<'_>) -> Poll<Option<Bounce<'_>>> {
        let mut guard = self.state();
        let state = &mut *guard;
        let (line, free) = state.for_buffer();
        if !line.may_take(*number, free) {
            return self.wait(line, number, None, cx);
        }
        line.leave(number);
        let index = state.free.pop().expect("a buffer was free");
        Poll::Ready(Some(Bounce { lane: self, index }))
    }

    /// Stands in a line. On the common lane nobody is called: the task is told to come again, and keeps its place meanwhile.
    fn wait<T>(&self, line: &mut Line, number: &mut Option<u64>, again: T, cx: &mut Context<'_>) -> Poll<T> {
        line.stand(number, self.exclusive.then(|| cx.waker().clone()));
        if self.exclusive { Poll::Pending } else { Poll::Ready(again) }
    }

    /// Places a command, when there is room, and tells the controller. `fits`: whether the namespace still has the blocks that it was made for.
    pub(super) async fn begin(
        &self,
        standing: &mut Standing<'_>,
        fits: &dyn Fn() -> bool,
        command: &Command,
        data: &Data<'_>,
    ) -> Begun {
        poll_fn(|cx| self.poll_begin(fits, command, data, &mut standing.number, cx)).await
    }

    fn poll_begin(
        &self,
        fits: &dyn Fn() -> bool,
        command: &Command,
        data: &Data<'_>,
        number: &mut Option<u64>,
        cx: &mut Context<'_>,
    ) -> Poll<Begun> {
        let mut guard = self.state();
        let state = &mut *guard;
        let (line, places) = state.for_place();
        if !line.may_take(*number, places) {
            return self.wait(line, number, Begun::Full, cx);
        }
        line.leave(number);
        let begun = self.place(state, fits, command, data);
        if !matches!(begun, Begun::Flight(_)) {
            state.call_for_places();
        }
        Poll::Ready(begun)
    }

    /// Places a command for which there is room, if there is a queue.
    fn place(&self, state: &mut State, fits: &dyn Fn() -> bool, command: &Command, data: &Data<'_>) -> Begun {
        let Some(pair) = &mut state.pair else { return Begun::Down };
        // A reset measures it before it brings the queue, under the same lock.
        if !fits() {
            return Begun::Changed;
        }
        let began = match data {
            Data::None => pair.submit_without_data(command),
            Data::Bounce(bounce, len) => {
                state.moved.1 += *len as u64;
                pair.submit(&command.with_data(self.buffers[bounce.index].slice(0, *len)))
            }
            Data::Direct(place, reach) => {
                state.moved.0 += reach.len as u64;
                let (mut place, mut left, entries) = (place.clone(), reach.len, &state.entries);
                let runs = std::iter::from_fn(|| {
                    let run = place.next_run(left)?;
                    left -= run.len();
                    // What `direct` found stays mapped while its request is in flight.
                    entries.find(run.as_ptr() as usize, run.len()).map(|iova| DmaRange { iova, len: run.len() })
                });
                if reach.sgl { pair.submit_sgl(command, runs) } else { pair.submit_runs(command, runs) }
            }
        };
        let cid = match began {
            Ok(cid) => cid,
            Err(error) => return Begun::Refused(error),
        };
        if let Err(error) = pair.ring() {
            // It lies in the queue, and the next one's ring would hand it over: it is in flight, and what it moves stays where it is. If
            // there is no other one, it is overdue some time.
            state.troubles.note(error);
        }
        let slot = state.free_slots.pop().expect("a slot was free");
        state.commands += 1;
        state.progress = Instant::now();
        state.slots[usize::from(slot)] = Slot { begun: Some(state.progress), cid, ..Slot::default() };
        state.owners[usize::from(cid.0)] = slot;
        Begun::Flight(Ticket { slot, generation: state.generation })
    }

    /// Looks for the end of a command.
    pub(super) fn poll_end(&self, ticket: Ticket, cx: &mut Context<'_>) -> Poll<Turn> {
        let mut guard = self.state();
        let state = &mut *guard;
        if ticket.generation != state.generation {
            state.stale.drain(..).for_each(Waker::wake);
            state.call_for_places();
            // A task of the new queue may rely on us, if we slept.
            state.pass_on();
            return Poll::Ready(Turn::Done(Outcome::Lost));
        }
        let (slot, at) = (ticket.slot, usize::from(ticket.slot));
        let is_poller = !self.exclusive || *state.poller.get_or_insert(slot) == slot;
        if is_poller {
            state.drain(self.exclusive.then_some(slot));
        }
        if let Some(status) = state.slots[at].status {
            state.waiting -= usize::from(std::mem::take(&mut state.slots[at]).waker.is_some());
            state.free_slots.push(slot);
            state.hand_on(slot);
            return Poll::Ready(Turn::Done(Outcome::Status(status)));
        }
        if !is_poller {
            state.waiting += usize::from(state.slots[at].waker.replace(cx.waker().clone()).is_none());
            return Poll::Pending;
        }
        if state.progress.elapsed() > SPIN {
            return state.rest(slot, cx);
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Sleeps until the interrupt comes, or somebody of ours rings in its place: after [`Turn::Sleep`]. Why interrupts are not used from
    /// now on, if so.
    pub(super) async fn sleep(&self, cx: TaskContext<'_>, ticket: Ticket) -> Option<String> {
        let bell = self.state().bell.clone()?;
        let segments = [Segment::sink()];
        let read = cx.io(IoOperation::Read { fd: bell.as_fd(), offset: ByteOffset(u64::MAX), segments: &segments }).await;
        self.state().woken(ticket, read)
    }
}

/// A request's memory, piece by piece, as a command could say where it is.
#[derive(Debug)]
struct Survey {
    limits: Option<SglLimits>,
    /// Bytes looked at, the pieces that they are in, and where the last one ends.
    seen: usize,
    pieces: usize,
    end: u64,
    /// Bytes from the start that PRPs can say, and that an SGL can.
    prps: usize,
    sgl: usize,
    /// Whether that is all so far.
    by_prps: bool,
    by_sgl: bool,
}

impl Survey {
    fn new(limits: Option<SglLimits>) -> Self {
        Self { limits, seen: 0, pieces: 0, end: 0, prps: 0, sgl: 0, by_prps: true, by_sgl: true }
    }

    /// Takes one more piece; false: no command can say more.
    #[inline]
    fn add(&mut self, DmaRange { iova, len }: DmaRange) -> bool {
        let (page, first) = (PAGE_SIZE as u64, self.seen == 0);
        self.by_prps &= iova.is_multiple_of(4) && (first || iova.is_multiple_of(page) && self.end.is_multiple_of(page));
        // An SGL counts neighbours as one.
        self.pieces += usize::from(first || iova != self.end);
        self.by_sgl &= self.limits.is_some_and(|SglLimits { granularity, pieces }| {
            self.pieces <= pieces && iova.is_multiple_of(granularity as u64) && len.is_multiple_of(granularity)
        });
        self.prps += if self.by_prps { len } else { 0 };
        self.sgl += if self.by_sgl { len } else { 0 };
        (self.seen, self.end) = (self.seen + len, iova + len as u64);
        self.by_prps || self.by_sgl
    }

    /// What one command can say, in units of so many bytes: by PRPs, unless an SGL says more.
    fn reach(&self, unit: usize) -> Reach {
        let (prps, sgl) = (self.prps - self.prps % unit, self.sgl - self.sgl % unit);
        Reach { len: prps.max(sgl), sgl: sgl > prps }
    }
}

impl State {
    /// The task that has looked for all finds that nothing comes: it sleeps, if no other does. Whoever begins something meanwhile looks in
    /// its place.
    fn rest(&mut self, slot: u16, cx: &mut Context<'_>) -> Poll<Turn> {
        self.poller = None;
        if self.sleeper.is_some() {
            // It calls us when our command has ended, or its own.
            self.waiting += usize::from(self.slots[usize::from(slot)].waker.replace(cx.waker().clone()).is_none());
            return Poll::Pending;
        }
        let wakes = self.bell.is_some() && !self.deaf && self.pair.as_mut().is_some_and(QueuePair::unmask_interrupt);
        if !wakes {
            self.waits.naps += 1;
            return Poll::Ready(Turn::Nap);
        }
        // The race: a command that the controller completes while the mask goes. It writes the entry, then looks at the mask; we have taken
        // the mask off, and look at the entry now. So it has seen no mask and the bell rings, or we find the entry here.
        if self.drain(Some(slot)) {
            self.mask();
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.sleeper = Some(slot);
        self.waits.sleeps += 1;
        Poll::Ready(Turn::Sleep)
    }

    /// The sleep is over; `read` is what reading the bell has said. Why there will be no other, if so.
    fn woken(&mut self, ticket: Ticket, read: i32) -> Option<String> {
        self.sleeper = None;
        self.mask();
        if usize::try_from(read) != Ok(size_of::<u64>()) {
            self.deaf = true;
            return Some(format!("their event fd cannot be read ({read})"));
        }
        if !std::mem::take(&mut self.nudged) {
            (self.unheard, self.waits.interrupts) = (0, self.waits.interrupts + 1);
        } else if ticket.generation == self.generation && self.drain(Some(ticket.slot)) {
            // Once or twice it may have come at the same time.
            self.unheard += 1;
            self.deaf = self.unheard >= UNHEARD;
        }
        self.deaf.then(|| "they do not come".to_owned())
    }

    fn mask(&mut self) {
        if let Some(pair) = &mut self.pair {
            pair.mask_interrupt();
        }
    }

    /// Ends the sleep.
    fn ring(&self) {
        let Some(bell) = &self.bell else { return };
        if let Err(error) = rustix::io::write(bell, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "a sleeping task cannot be woken");
        }
    }

    /// Takes what has completed, and wakes whose it is, all but `own`; whether there was any.
    fn drain(&mut self, own: Option<u16>) -> bool {
        let Some(pair) = &mut self.pair else { return false };
        let (mut any, mut sleeps, mut strange) = (false, false, false);
        loop {
            match pair.next_completion() {
                Ok(Some(cqe)) => {
                    any = true;
                    let owner = self.owners[usize::from(cqe.cid.0)];
                    let slot = &mut self.slots[usize::from(owner)];
                    slot.status = Some(cqe.status());
                    sleeps |= self.sleeper == Some(owner);
                    let waker = slot.waker.take();
                    self.waiting -= usize::from(waker.is_some());
                    if let Some(waker) = waker.filter(|_| own.is_some_and(|own| own != owner)) {
                        waker.wake();
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    // What it meant is never told: time will show, and reset the controller.
                    self.troubles.note(error);
                    strange = true;
                    break;
                }
            }
        }
        if any {
            self.progress = Instant::now();
        }
        // What cannot be takes room in the queue like any other.
        if (any || strange)
            && let Err(error) = pair.ring()
        {
            self.troubles.note(error);
        }
        if sleeps {
            // A controller that gathers interrupts may send none for what was taken before.
            self.ring();
        }
        any
    }

    /// A command is over: its task no longer looks at the queue, and there is room.
    fn hand_on(&mut self, slot: u16) {
        if self.poller == Some(slot) {
            self.poller = None;
        }
        self.pass_on();
        self.call_for_places();
    }

    /// Who waits for a place, and how many there are. Where there is no queue as many as like find that out at once.
    fn for_place(&mut self) -> (&mut Line, usize) {
        let places = |pair: &QueuePair| (pair.capacity() - pair.in_flight()).min(self.free_slots.len());
        (&mut self.place_line, self.pair.as_ref().map_or(usize::MAX, places))
    }

    /// Who waits for a buffer, and how many there are.
    fn for_buffer(&mut self) -> (&mut Line, usize) {
        (&mut self.buffer_line, self.free.len())
    }

    fn call_for_places(&mut self) {
        let (line, places) = self.for_place();
        line.call(places);
    }

    /// Somebody looks at the queue, if anybody waits.
    fn pass_on(&mut self) {
        if self.poller.is_none()
            && self.waiting > 0
            && let Some(waker) = self.slots.iter_mut().find_map(|slot| slot.waker.take())
        {
            self.waiting -= 1;
            waker.wake();
        }
    }
}

/// A buffer of a lane's that the device reaches; given back when dropped.
pub(super) struct Bounce<'a> {
    lane: &'a Lane,
    index: usize,
}

impl Bounce<'_> {
    pub(super) fn buffer(&self) -> &DmaBuffer {
        &self.lane.buffers[self.index]
    }
}

impl Drop for Bounce<'_> {
    fn drop(&mut self) {
        let mut state = self.lane.state();
        state.free.push(self.index);
        let (line, free) = state.for_buffer();
        line.call(free);
    }
}

/// A task's place in a line of the lane's, once it has had to wait; given up when dropped.
pub(super) struct Standing<'a> {
    lane: &'a Lane,
    /// `Some` while it stands there.
    number: Option<u64>,
    /// The line, and how many of what it is for are free.
    line: fn(&mut State) -> (&mut Line, usize),
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        if self.number.is_some() {
            // A task that is torn down: its turn is the next one's.
            let mut state = self.lane.state();
            let (line, free) = (self.line)(&mut state);
            line.leave(&mut self.number);
            line.call(free);
        }
    }
}

#[cfg(test)]
mod tests;
