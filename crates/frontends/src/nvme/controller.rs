//! The controller: its parts, and one turn of its work.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
};

use millrace_block::{
    Lba,
    trace::{EventOperation, Fetched, Site},
};
use millrace_engine::{
    ShardContext, TaskSlot,
    stages::{self, Stage},
};
use millrace_memory::{GuestMemory, Segment, Shared};
use millrace_nvme_spec::{
    command::{QueueId, Sqe},
    nvm::ReadWriteCdw12,
    opcode::NvmOpcode,
    status::Status,
};

use super::{
    Config, Host,
    admin::AdminState,
    card::Port,
    errors::Subject,
    interrupts::Interrupts,
    io::IoState,
    keep::{self, Client, Kept},
    migration::Transfer,
    namespace::NamespaceTable,
    queue::{Active, QueueCaches},
    records::Records,
    registers::{Lifecycle, Phase},
    state::{self, DeviceState, DoorbellPage},
    status::Completion,
};

/// Commands taken from one submission queue before the next queue has its turn.
pub(crate) const BURST: u32 = 64;
/// Bytes after which a turn takes no more: a volume may move them all before anybody else on the shard has its turn.
const TURN_BYTES: u64 = 8 << 20;
/// The same for what administers, which has its turn in any case.
const ADMIN_BYTES: u64 = 1 << 20;
/// What a command costs of that which goes the long way, whatever it moves and however it ends: about as many bytes are moved in its time.
const LONG_WAY: u64 = 32 << 10;

/// The doorbell page's name in /proc.
const DOORBELLS: &str = "millrace-doorbells";

/// Names a command from acceptance to completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommandToken {
    pub(crate) sqid: u16,
    pub(crate) cid: u16,
    /// The controller's epoch when it was accepted: a completion from before a reset posts nothing.
    pub(crate) epoch: u32,
    /// What the Error Information log tells of it if it fails.
    pub(crate) subject: Subject,
    /// Where it is on record (`records.rs`).
    pub(crate) record: u16,
}

/// How far a command came at once.
#[must_use]
pub(crate) enum Outcome {
    /// It is finished; nothing was kept.
    Done(Completion),
    /// Its completion will come through the [`Sink`].
    Pending,
    /// It is finished or held without a completion of its own yet (an asynchronous event request, a delete that waits for
    /// other commands): whoever holds it calls [`Controller::complete`].
    Held,
}

/// Where tasks put their results for the controller's next turn.
#[derive(Debug, Default)]
pub(crate) struct Sink {
    results: RefCell<Vec<(CommandToken, Completion)>>,
    /// The controller's epoch, for tasks to see that nobody waits for them any more.
    epoch: Cell<u32>,
    /// Somebody waits until nothing is in flight, and has waited long enough.
    hurried: Cell<bool>,
    /// All I/O queues are being deleted.
    deleting: Cell<bool>,
}

impl Sink {
    pub(crate) fn push(&self, token: CommandToken, completion: Completion) {
        self.results.borrow_mut().push((token, completion));
    }

    /// The controller was reset: results of earlier epochs are dropped.
    pub(crate) fn begin_epoch(&self, epoch: u32) {
        self.epoch.set(epoch);
        self.hurried.set(false);
        self.deleting.set(false);
    }

    /// Commands that go piece by piece are called off, or no more.
    pub(crate) fn hurry(&self, on: bool) {
        self.hurried.set(on);
    }

    /// Whether they are.
    pub(crate) fn is_hurried(&self) -> bool {
        self.hurried.get()
    }

    /// All I/O queues are being deleted, and nobody waits for their commands; or no more.
    pub(crate) fn delete_all(&self, on: bool) {
        self.deleting.set(on);
    }

    /// Whether they are.
    pub(crate) fn deletes_all(&self) -> bool {
        self.deleting.get()
    }

    /// Whether an I/O command's result is still waited for: its controller was not reset since, its client is there, and its queue stays.
    pub(crate) fn wants(&self, token: CommandToken) -> bool {
        self.epoch.get() == token.epoch && !self.deleting.get()
    }

    /// Whether results wait for the next turn.
    #[inline]
    pub(crate) fn has_results(&self) -> bool {
        !self.results.borrow().is_empty()
    }
}

/// Counters of a controller's life, for logs, SMART and metrics.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
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
    /// I/O commands of all kinds.
    pub(crate) fn commands(&self) -> u64 {
        self.read_commands + self.write_commands + self.other_commands
    }

    /// Writes them where they outlive the process.
    pub(crate) fn store(&self, cells: &[state::Cell<u64>; 8]) {
        let Self { read_commands, write_commands, other_commands, bytes_read, bytes_written, .. } = *self;
        let Self { errors, media_errors, interrupts, .. } = *self;
        let words =
            [read_commands, write_commands, other_commands, bytes_read, bytes_written, errors, media_errors, interrupts];
        cells.iter().zip(words).for_each(|(cell, word)| cell.set(word));
    }

    /// Takes them from there.
    pub(crate) fn restore(&mut self, cells: &[state::Cell<u64>; 8]) {
        let [read_commands, write_commands, other_commands, bytes_read, bytes_written, errors, media_errors, interrupts] =
            cells.each_ref().map(state::Cell::get);
        *self = Self {
            read_commands,
            write_commands,
            other_commands,
            bytes_read,
            bytes_written,
            errors,
            media_errors,
            interrupts,
        };
    }
}

/// An NVMe controller. One shard owns it; unit tests drive it directly.
pub(crate) struct Controller {
    pub(crate) config: Rc<Config>,
    /// What the guest can observe.
    pub(crate) state: Shared<DeviceState>,
    pub(crate) doorbells: Shared<DoorbellPage>,
    pub(crate) memory: GuestMemory,
    /// Where the controller stands between disabled and ready (derived from state; see registers.rs).
    pub(crate) phase: Phase,
    /// What is under way between phases.
    pub(crate) lifecycle: Lifecycle,
    /// Translations of queue memory, dropped whenever the guest's memory map changes.
    pub(crate) caches: QueueCaches,
    pub(crate) interrupts: Interrupts,
    pub(crate) namespaces: NamespaceTable,
    pub(crate) admin: AdminState,
    pub(crate) io: IoState,
    /// Its function of a card, which has the I/O queues then.
    pub(crate) port: Option<Box<Port>>,
    pub(crate) host: std::sync::Arc<dyn Host>,
    /// Where what must outlive this process is put, if it is to.
    pub(crate) kept: Option<Kept>,
    /// Commands in flight, for a worker that takes over.
    pub(crate) records: Rc<Records>,
    /// Those that this one took over and has yet to carry out again.
    pub(crate) again: VecDeque<u16>,
    /// The command being started is one of those: it may have been carried out before, in part or as a whole.
    pub(crate) repeats: bool,
    /// The client, as it is remembered there.
    pub(crate) client: Option<Rc<Client>>,
    /// A saved state that is being read or written.
    pub(crate) transfer: Transfer,
    pub(crate) sink: Rc<Sink>,
    pub(crate) counters: Counters,
    /// Commands already counted for the shard's statistics.
    pub(crate) counted: u64,
    /// Commands accepted and not completed, of all epochs: what unmap and reset wait for.
    pub(crate) in_flight: u32,
    /// Segments of the command being started; its capacity is reused.
    pub(crate) segments: Vec<Segment>,
    /// Metadata of the command being started, where they have a buffer of their own.
    pub(crate) metadata: Vec<Segment>,
    /// Whether its requests are recorded; never those of the admin queue.
    pub(crate) trace: Site,
    /// Bytes that commands may still move in this turn.
    pub(crate) turn_bytes: u64,
    /// The same of admin commands.
    admin_bytes: u64,
    /// Where the round over the queues goes on.
    next_queue: usize,
    /// Results taken from the sink; its capacity is reused.
    finished: Vec<(CommandToken, Completion)>,
}

impl Controller {
    /// A disabled controller without memory, namespaces or interrupts.
    pub(crate) fn new(config: Config, host: std::sync::Arc<dyn Host>) -> std::io::Result<Self> {
        let state = Shared::<DeviceState>::new("millrace-device-state")?;
        state.version.set(state::layout().newest.into());
        state.shape.iter().zip(keep::shape(&config)).for_each(|(cell, word)| cell.set(word));
        state::commit();
        state.magic.set(state::MAGIC);
        let mut controller = Self::over(config, host, state, Shared::new(DOORBELLS)?, Records::new()?);
        controller.power_on();
        Ok(controller)
    }

    /// A controller over a state that is there.
    pub(crate) fn over(
        config: Config,
        host: std::sync::Arc<dyn Host>,
        state: Shared<DeviceState>,
        doorbells: Shared<DoorbellPage>,
        records: Records,
    ) -> Self {
        let config = Rc::new(config);
        Self {
            interrupts: Interrupts::new(config.vectors, &config.name),
            namespaces: NamespaceTable::new(config.namespaces),
            admin: AdminState::new(&config),
            io: IoState::new(&config),
            port: None,
            caches: QueueCaches::new(config.queues),
            segments: Vec::with_capacity(super::data::MAX_SEGMENTS),
            metadata: Vec::new(),
            finished: Vec::with_capacity(64),
            sink: Rc::default(),
            counters: Counters::default(),
            counted: 0,
            memory: config.new_memory(),
            phase: Phase::Disabled,
            lifecycle: Lifecycle::default(),
            in_flight: 0,
            trace: Site::default(),
            turn_bytes: TURN_BYTES,
            admin_bytes: ADMIN_BYTES,
            next_queue: 0,
            config,
            state,
            doorbells,
            host,
            kept: None,
            records: Rc::new(records),
            again: VecDeque::new(),
            repeats: false,
            client: None,
            transfer: Transfer::default(),
        }
    }

    /// Takes a doorbell page that no earlier client knows.
    pub(crate) fn renew_doorbells(&mut self) -> std::io::Result<()> {
        self.doorbells = Shared::new(DOORBELLS)?;
        self.put_doorbells();
        Ok(())
    }

    /// One turn: completions of tasks, then new commands of every queue, then interrupts. Returns the work done.
    pub(crate) fn turn(&mut self, cx: &mut ShardContext<'_>) -> usize {
        (self.turn_bytes, self.admin_bytes) = (TURN_BYTES, ADMIN_BYTES);
        let mut work = if self.sink.has_results() { self.reap() } else { 0 };
        self.call_off(cx);
        if self.lifecycle.maps_until.is_some_and(|until| cx.now() >= until) {
            self.lifecycle.maps_until = None;
        }
        if self.port.is_some() {
            work += self.card_turn(cx);
        }
        if (self.phase == Phase::Resetting || self.memory.has_retired()) && self.is_quiet() {
            self.drained();
        }
        if self.phase == Phase::Ready && self.memory.is_poisoned() {
            self.fail("the guest's memory was taken away (its file was truncated)");
        }
        if self.lifecycle.stopped {
            self.raise_interrupts(cx.now());
            return work;
        }
        work += self.advance_phase(cx);
        if self.lifecycle.maps_until.is_some() {
            // No command of the guest's is in flight, and whatever is done now may touch memory that is about to come.
            self.raise_interrupts(cx.now());
            return work;
        }
        if !self.again.is_empty() {
            work += self.redo(cx);
        }
        if self.phase == Phase::Ready {
            if self.lifecycle.takes() && self.again.is_empty() {
                work += self.take_commands(cx);
            }
            stages::enter(Stage::Other);
            work += self.admin_turn(cx);
        } else if self.has_answers() {
            // The host has done what it was asked for, whatever became of the controller.
            work += self.take_answers();
        }
        stages::enter(Stage::Interrupt);
        self.raise_interrupts(cx.now());
        stages::enter(Stage::Other);
        work
    }

    fn reap(&mut self) -> usize {
        let mut finished = std::mem::take(&mut self.finished);
        std::mem::swap(&mut *self.sink.results.borrow_mut(), &mut finished);
        let work = finished.len();
        for (token, completion) in finished.drain(..) {
            self.io.running.remove(token);
            self.complete(token, completion);
        }
        self.finished = finished;
        work
    }

    fn take_commands(&mut self, cx: &mut ShardContext<'_>) -> usize {
        stages::enter(Stage::Doorbells);
        let mut work = 0;
        let mut at = self.next_queue;
        for _ in 0..self.caches.active().len() {
            if at >= self.caches.active().len() {
                at = 0;
            }
            let Some(&Active { sqid, seen }) = self.caches.active().get(at) else { break };
            let tail = self.doorbell(usize::from(sqid) * 2, sqid);
            // The round begins with another queue each time, so that none waits for long; what administers has bytes of its own.
            if tail != seen && (self.turn_bytes > 0 || QueueId(sqid).is_admin()) {
                work += self.take_from(cx, sqid, tail);
                // What came since is seen by its other tail: the queue is not so large that the guest could go round it to this one.
                let empty = self.sq(sqid).head.get() == tail || self.pending_up_to(sqid, tail).is_none();
                // What is left is looked at again, also when the guest has gone round the queue to the same tail meanwhile.
                self.caches.set_seen(at, sqid, if empty { tail } else { Active::UNSEEN });
            }
            at += 1;
        }
        if work > 0 {
            self.next_queue += 1;
            if self.next_queue >= self.caches.active().len() {
                self.next_queue = 0;
            }
        }
        work
    }

    /// Takes up to [`BURST`] commands and the turn's bytes from one queue, of those before `tail`. The doorbell itself is not looked at again: the guest
    /// rings meanwhile, and to be seen the caller must know which tail was the last one.
    pub(crate) fn take_from(&mut self, cx: &mut ShardContext<'_>, sqid: u16, tail: u32) -> usize {
        let Some(pending) = self.pending_up_to(sqid, tail) else { return 0 };
        let budget = pending.min(BURST).min(self.arbitration_burst()).min(self.completion_room(sqid));
        let trace = self.traces(sqid);
        trace.seen(sqid, pending);
        let mut taken = 0;
        let is_admin = QueueId(sqid).is_admin();
        if (pending, budget) == (1, 1) && !is_admin && self.phase == Phase::Ready && self.do_only(sqid).is_some() {
            return 1;
        }
        while taken < budget && self.phase == Phase::Ready {
            if is_admin && self.admin_bytes == 0 {
                break;
            }
            if !is_admin {
                taken += self.run_batch(cx, sqid, pending - taken, budget - taken);
                if taken == budget || self.turn_bytes == 0 {
                    break;
                }
            }
            // The next one is not plain, or there is no task slot for it.
            let Some(slot) = cx.reserve().filter(|_| self.records.next().is_some()) else { break };
            let Some((sqe, token)) = self.accept(sqid) else { break };
            taken += 1;
            trace.fetched(sqid, token.cid, || fetched(&sqe));
            self.start(cx, slot, token, &sqe);
            // The command itself may have deleted the queue or reset the controller.
            if self.sq(sqid).entries.get() == 0 {
                break;
            }
        }
        taken as usize
    }

    pub(crate) fn start(&mut self, cx: &mut ShardContext<'_>, slot: TaskSlot<'_>, token: CommandToken, sqe: &Sqe) {
        let outcome = if QueueId(token.sqid).is_admin() {
            self.count_administered(LONG_WAY);
            self.admin_command(cx, slot, token, sqe)
        } else {
            self.count_moved(LONG_WAY);
            let _under = self.trace.under(sqe.nsid.0, token.sqid, token.cid);
            self.io_command(cx, slot, token, sqe)
        };
        if let Outcome::Done(completion) = outcome {
            self.complete(token, completion);
        }
        self.after_log_page();
    }

    /// How the commands of a queue are recorded.
    #[inline]
    pub(crate) fn traces(&self, sqid: u16) -> Site {
        if QueueId(sqid).is_admin() { Site::default() } else { self.trace }
    }

    /// Has the turn end once it has moved enough.
    #[inline]
    pub(crate) fn count_moved(&mut self, bytes: u64) {
        self.turn_bytes = self.turn_bytes.saturating_sub(bytes);
    }

    /// Has the admin queue's part of the turn end once it has moved enough, which the turn as a whole feels too.
    pub(crate) fn count_administered(&mut self, bytes: u64) {
        self.admin_bytes = self.admin_bytes.saturating_sub(bytes);
        self.count_moved(bytes);
    }

    /// Posts a command's completion, or drops it when the controller was reset since.
    pub(crate) fn complete(&mut self, token: CommandToken, mut completion: Completion) {
        self.in_flight = self.in_flight.checked_sub(1).expect("a command completes once");
        if token.epoch != self.state.epoch.get() {
            return;
        }
        if !completion.status.is_success() {
            self.counters.errors += 1;
            match completion.status.code() {
                Status::UNRECOVERED_READ_ERROR | Status::WRITE_FAULT => {
                    self.counters.media_errors += 1;
                    self.medium_failed();
                }
                // These count as well, but need not be the medium's: a guest may have sent them so.
                Status::GUARD_CHECK_ERROR | Status::APPLICATION_TAG_CHECK_ERROR | Status::REFERENCE_TAG_CHECK_ERROR => {
                    self.counters.media_errors += 1;
                }
                // It was called off, and its queue goes on: somebody could not wait for it. (What its queue's end ends is final.)
                Status::ABORTED_SQ_DELETION if !completion.status.dnr() && self.sq(token.sqid).deleting.get() == 0 => {
                    completion.status = Status::NAMESPACE_NOT_READY;
                }
                // It ends some time: the Do Not Retry bit shall be 0 (Base, generic status 84h).
                Status::FORMAT_IN_PROGRESS => completion.status = Status::FORMAT_IN_PROGRESS,
                _ => {}
            }
            // Linux asks for reservations in the one format first, and for the other at this very status without any more bits.
            let more = completion.status.code() != Status::HOST_ID_INCONSISTENT_FORMAT;
            completion.status = completion.status.with_more(more);
            self.note_error(token, completion.status);
        }
        self.post(token, completion);
    }
}

/// What a command of any kind asks for, as the trace has it.
#[cold]
fn fetched(sqe: &Sqe) -> Fetched {
    let blocks = ReadWriteCdw12::from_bits(sqe.cdw12);
    let (operation, has_range) = match sqe.nvm_opcode() {
        NvmOpcode::READ => (EventOperation::READ, true),
        NvmOpcode::WRITE => (EventOperation::WRITE.with_fua(blocks.fua()), true),
        NvmOpcode::COMPARE => (EventOperation::COMPARE, true),
        NvmOpcode::WRITE_ZEROES => (EventOperation::ZERO.with_fua(blocks.fua()), true),
        NvmOpcode::FLUSH => (EventOperation::FLUSH, false),
        // Their ranges are in lists.
        NvmOpcode::DATASET_MANAGEMENT => (EventOperation::DEALLOCATE, false),
        NvmOpcode::COPY => (EventOperation::COPY, false),
        _ => (EventOperation::OTHER, false),
    };
    let (lba, count) = if has_range { (sqe.cdw10_11(), u64::from(blocks.nlb_z()) + 1) } else { (0, 0) };
    Fetched { nsid: sqe.nsid.0, operation, lba: Lba(lba), count }
}
