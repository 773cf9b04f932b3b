//! A submission queue and its completion queue.

mod fused;
mod lean;
mod lists;

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use millrace_nvme_spec::{
    CommandId, Cqe, QueueId, Sqe,
    command::Psdt,
    registers::Doorbell,
    status::{Status, StatusField},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

pub use fused::Fused;
pub use lean::LeanQueue;
pub(crate) use lists::Lists;

use crate::{
    cid::CidTable,
    cmb::{ControllerMemory, ControllerPages},
    command::Command,
    dma::{DmaBuffer, DmaError, DmaMemory, DmaRange},
    doorbell::{Bell, Doorbells},
    prp::PrpError,
    sgl::{SglError, SglLimits},
    shared::{SharedRing, device_fence},
    transport::{SharedTransport, TransportError},
    vectors::VectorMask,
};

/// Why a queue pair could not do what was asked.
#[derive(Debug, Error)]
pub enum QueueError {
    /// As many commands are in flight as the queue holds.
    #[error("queue {qid}: all {capacity} commands are in flight")]
    Full {
        /// The queue.
        qid: QueueId,
        /// Commands it holds.
        capacity: usize,
    },
    /// The data cannot be described by PRPs.
    #[error("queue {qid}")]
    Prp {
        /// The queue.
        qid: QueueId,
        /// Why.
        #[source]
        source: PrpError,
    },
    /// The data cannot be described by SGL descriptors.
    #[error("queue {qid}")]
    Sgl {
        /// The queue.
        qid: QueueId,
        /// Why.
        #[source]
        source: SglError,
    },
    /// The controller completed a command that is not in flight, or one of another queue, or reports an impossible head.
    #[error("queue {qid}: completion of command {} (SQ {}, head {}) that cannot be", cqe.cid, cqe.sqid, cqe.sqhd)]
    BadCompletion {
        /// The queue it arrived on.
        qid: QueueId,
        /// The entry.
        cqe: Cqe,
    },
    /// The command completed with an error.
    #[error("queue {qid}: command with opcode {opcode:#04x}")]
    Failed {
        /// The queue.
        qid: QueueId,
        /// Its opcode.
        opcode: u8,
        /// The completion, whose status is `status`.
        cqe: Cqe,
        /// What the controller answered.
        #[source]
        status: Status,
    },
    /// The command did not complete in time; it is still in flight.
    #[error("queue {qid}: command {cid} did not complete within {waited:?}")]
    Timeout {
        /// The queue.
        qid: QueueId,
        /// The command.
        cid: CommandId,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The doorbell could not be rung, or the controller is gone.
    #[error("queue {qid}")]
    Transport {
        /// The queue.
        qid: QueueId,
        /// Why.
        #[source]
        source: TransportError,
    },
    /// Waiting for an interrupt failed.
    #[error("queue {qid}: waiting for an interrupt")]
    Interrupt {
        /// The queue.
        qid: QueueId,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
}

impl QueueError {
    /// The status, when it was the controller that refused.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Failed { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// The host's half of a submission queue.
pub(crate) struct SubmissionQueue {
    ring: SharedRing<Sqe>,
    /// The ring lies in the controller's memory.
    in_controller: bool,
    tail: u16,
    rung: u16,
    bell: Bell,
}

impl SubmissionQueue {
    pub(crate) fn new(ring: SharedRing<Sqe>, in_controller: bool, bell: Bell) -> Self {
        Self { ring, in_controller, tail: 0, rung: 0, bell }
    }

    #[inline]
    fn push(&mut self, sqe: Sqe) {
        if self.in_controller {
            self.ring.write_words(u32::from(self.tail), sqe);
        } else {
            self.ring.write(u32::from(self.tail), sqe);
        }
        self.tail = next(self.tail, self.ring.entries());
    }

    #[inline]
    fn ring(&mut self) -> Result<(), TransportError> {
        if self.tail != self.rung {
            if self.in_controller {
                device_fence();
            }
            self.bell.ring(self.rung, self.tail)?;
            self.rung = self.tail;
        }
        Ok(())
    }
}

/// The host's half of a completion queue.
pub(crate) struct CompletionQueue {
    ring: SharedRing<Cqe>,
    head: u16,
    rung: u16,
    /// Phase Tag of an entry that is new on this pass (Base 4.2.4).
    phase: bool,
    bell: Bell,
}

impl CompletionQueue {
    pub(crate) fn new(ring: SharedRing<Cqe>, bell: Bell) -> Self {
        Self { ring, head: 0, rung: 0, phase: true, bell }
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Cqe> {
        let index = u32::from(self.head);
        // Acquire, on the word that holds the Phase Tag: pairs with the controller's store of it, which comes after its
        // stores of the data and of Dwords 0 and 1.
        let high = self.ring.load_word(index, 1);
        let status = StatusField((high >> 48) as u16);
        if status.phase() != self.phase {
            return None;
        }
        let low = self.ring.load_word(index, 0);
        self.head = next(self.head, self.ring.entries());
        if self.head == 0 {
            self.phase = !self.phase;
        }
        Some(Cqe {
            dw0: low as u32,
            dw1: (low >> 32) as u32,
            sqhd: high as u16,
            sqid: QueueId((high >> 16) as u16),
            cid: CommandId((high >> 32) as u16),
            status,
        })
    }

    #[inline]
    fn ring(&mut self) -> Result<(), TransportError> {
        if self.head != self.rung {
            self.bell.ring(self.rung, self.head)?;
            self.rung = self.head;
        }
        Ok(())
    }
}

#[inline]
fn next(index: u16, entries: u32) -> u16 {
    if u32::from(index) + 1 == entries { 0 } else { index + 1 }
}

/// A submission queue and its completion queue, of equal size, used by one thread.
///
/// Per I/O: [`submit`](Self::submit) writes the entry, [`ring`](Self::ring) tells the controller of all that is new, and
/// [`next_completion`](Self::next_completion) takes one completion. The `…_raw` calls do what they are told, so that tests
/// can do harm on purpose.
///
/// It is useless once its controller was disabled or reset.
pub struct QueuePair {
    id: QueueId,
    sq: SubmissionQueue,
    cq: CompletionQueue,
    cids: CidTable,
    lists: Lists,
    /// Completions that arrived while another one was waited for.
    stash: VecDeque<Cqe>,
    /// Completions that cannot be and were passed over since somebody asked, and the last of them.
    passed_over: Option<(u64, Cqe)>,
    interrupt: Option<OwnedFd>,
    mask: Option<VectorMask>,
    transport: SharedTransport,
    timeout: Duration,
    /// Kept for their lives and addresses.
    memory: QueueMemory,
}

/// The rings' pages.
#[derive(Debug)]
pub(crate) struct QueueMemory {
    sq: SubmissionPages,
    cq: DmaBuffer,
}

#[derive(Debug)]
enum SubmissionPages {
    Ours(DmaBuffer),
    Controllers(ControllerPages),
}

impl QueueMemory {
    /// Pages for `entries` entries in each ring, those of ours zeroed; of the controller's memory for the submission queue, if it is
    /// given and has room.
    pub(crate) fn new(memory: &DmaMemory, controllers: Option<&ControllerMemory>, entries: u32) -> Result<Self, DmaError> {
        let bytes = entries as usize * Sqe::SIZE;
        let sq = match controllers.and_then(|controllers| controllers.alloc(bytes)) {
            Some(pages) => SubmissionPages::Controllers(pages),
            None => SubmissionPages::Ours(memory.alloc(bytes)?),
        };
        let cq = memory.alloc(entries as usize * Cqe::SIZE)?;
        Ok(Self { sq, cq })
    }
}

/// What a queue pair is made from.
pub(crate) struct QueueParts<'a> {
    pub(crate) id: QueueId,
    pub(crate) entries: u32,
    pub(crate) memory: QueueMemory,
    pub(crate) lists: Lists,
    pub(crate) doorbells: &'a Doorbells,
    pub(crate) interrupt: Option<OwnedFd>,
    pub(crate) mask: Option<VectorMask>,
    pub(crate) transport: SharedTransport,
    pub(crate) timeout: Duration,
}

impl QueuePair {
    /// Joins the parts. The controller need not know the queue yet.
    pub(crate) fn new(parts: QueueParts<'_>) -> Self {
        let QueueParts { id, entries, memory, lists, doorbells, interrupt, mask, transport, timeout } = parts;
        assert!((2..=0x1_0000).contains(&entries), "a queue of {entries} entries");
        let (sq, in_controller) = match &memory.sq {
            SubmissionPages::Ours(buffer) => (buffer.ring(entries), false),
            SubmissionPages::Controllers(pages) => (pages.ring(entries), true),
        };
        let sq = sq.expect("the ring's pages were allocated for its entries");
        let cq = memory.cq.ring(entries).expect("the ring's pages were allocated for its entries");
        Self {
            id,
            sq: SubmissionQueue::new(sq, in_controller, doorbells.bell(Doorbell::SqTail(id))),
            cq: CompletionQueue::new(cq, doorbells.bell(Doorbell::CqHead(id))),
            // One entry stays free, or a full queue would look empty (Base 3.3.1.2.1).
            cids: CidTable::new((entries - 1) as u16),
            lists,
            stash: VecDeque::with_capacity(entries as usize),
            passed_over: None,
            interrupt,
            mask,
            transport,
            timeout,
            memory,
        }
    }

    /// The identifier, the same for both queues.
    pub fn id(&self) -> QueueId {
        self.id
    }

    /// Entries of each queue.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.sq.ring.entries()
    }

    /// Commands that may be in flight: one less than the entries. Command identifiers are below it.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.entries() as usize - 1
    }

    /// Commands in flight that [`submit`](Self::submit) put there.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.cids.in_flight()
    }

    /// Where the submission queue lies.
    pub fn sq_range(&self) -> DmaRange {
        match &self.memory.sq {
            SubmissionPages::Ours(buffer) => buffer.range(),
            SubmissionPages::Controllers(pages) => pages.range(),
        }
    }

    /// Whether the submission queue lies in the controller's memory.
    pub fn is_in_controller(&self) -> bool {
        self.sq.in_controller
    }

    /// Where the completion queue lies.
    pub fn cq_range(&self) -> DmaRange {
        self.memory.cq.range()
    }

    /// The rings' pages, to look at or spoil: submission queue, if it is in memory of ours, and completion queue.
    pub fn buffers(&self) -> (Option<&DmaBuffer>, &DmaBuffer) {
        let sq = match &self.memory.sq {
            SubmissionPages::Ours(buffer) => Some(buffer),
            SubmissionPages::Controllers(_) => None,
        };
        (sq, &self.memory.cq)
    }

    /// Places a command in the queue, without ringing. Identifiers of `n` commands in flight are `0..n`.
    ///
    /// # Errors
    /// [`QueueError::Full`], or [`QueueError::Prp`] for data no PRPs can describe.
    #[inline]
    pub fn submit(&mut self, command: &Command) -> Result<CommandId, QueueError> {
        let sqe = self.prepare(command)?;
        self.sq.push(sqe);
        Ok(sqe.cid)
    }

    /// A command's entry, with an identifier of its own and its data described. It is not in the queue yet.
    #[inline]
    fn prepare(&mut self, command: &Command) -> Result<Sqe, QueueError> {
        let Some(cid) = self.cids.take() else {
            return Err(QueueError::Full { qid: self.id, capacity: self.capacity() });
        };
        let mut sqe = command.sqe;
        sqe.cid = cid;
        if let Some(data) = command.data {
            match self.lists.prps(cid, data) {
                Ok(pointer) => sqe.dptr = pointer,
                Err(source) => {
                    self.cids.release(cid);
                    return Err(QueueError::Prp { qid: self.id, source });
                }
            }
        }
        Ok(sqe)
    }

    /// As [`submit`](Self::submit), with the command's data pointer as it is, whatever the command says of data.
    ///
    /// # Errors
    /// [`QueueError::Full`].
    pub fn submit_without_data(&mut self, command: &Command) -> Result<CommandId, QueueError> {
        self.submit(&Command { data: None, ..*command })
    }

    /// As [`submit`](Self::submit), for data in several runs of device addresses: each but the first starts at a page, each but the last
    /// ends at one. The command's own data are not looked at.
    ///
    /// # Errors
    /// As of [`submit`](Self::submit).
    pub fn submit_runs(
        &mut self,
        command: &Command,
        runs: impl IntoIterator<Item = DmaRange>,
    ) -> Result<CommandId, QueueError> {
        let Some(cid) = self.cids.take() else {
            return Err(QueueError::Full { qid: self.id, capacity: self.capacity() });
        };
        match self.lists.prps_of_runs(cid, runs) {
            Ok(dptr) => {
                self.sq.push(Sqe { cid, dptr, ..command.sqe });
                Ok(cid)
            }
            Err(source) => {
                self.cids.release(cid);
                Err(QueueError::Prp { qid: self.id, source })
            }
        }
    }

    /// What [`submit_sgl`](Self::submit_sgl) can say; `None`: the controller takes PRPs only.
    #[inline]
    pub fn sgl(&self) -> Option<SglLimits> {
        self.lists.sgl()
    }

    /// As [`submit`](Self::submit), for data in pieces of any length, in the order of their bytes, which go as an SGL. Of the command's own
    /// data the length counts: the pieces have as many bytes. Metadata, if any, are in one buffer.
    ///
    /// # Errors
    /// [`QueueError::Full`], or [`QueueError::Sgl`] for pieces beyond [`sgl`](Self::sgl).
    pub fn submit_sgl(
        &mut self,
        command: &Command,
        pieces: impl IntoIterator<Item = DmaRange>,
    ) -> Result<CommandId, QueueError> {
        let Some(cid) = self.cids.take() else {
            return Err(QueueError::Full { qid: self.id, capacity: self.capacity() });
        };
        match self.lists.descriptors(cid, command.data.map_or(0, |data| data.len), pieces) {
            Ok(dptr) => {
                let flags = command.sqe.flags.with_psdt(Psdt::SGL_MPTR_CONTIGUOUS);
                self.sq.push(Sqe { cid, dptr, flags, ..command.sqe });
                Ok(cid)
            }
            Err(source) => {
                self.cids.release(cid);
                Err(QueueError::Sgl { qid: self.id, source })
            }
        }
    }

    /// Tells the controller of the completions taken and the commands placed since the last call.
    ///
    /// # Errors
    /// Only where doorbells are messages.
    #[inline]
    pub fn ring(&mut self) -> Result<(), QueueError> {
        // The head first: a controller that waits for room to complete has it before it sees more commands.
        let qid = self.id;
        let is_new = self.sq.tail != self.sq.rung;
        let rung = self.cq.ring().and_then(|()| self.sq.ring());
        if is_new && !self.sq.in_controller {
            // The next command's entry is on its way while the program does something else.
            self.sq.ring.prefetch_to_write(u32::from(self.sq.tail));
        }
        rung.map_err(|source| QueueError::Transport { qid, source })
    }

    /// Writes any value to the submission queue's tail doorbell, past any shadow. The driver's own tail stays.
    pub fn ring_tail_raw(&mut self, value: u32) -> Result<(), QueueError> {
        self.sq.bell.write(value).map_err(|source| QueueError::Transport { qid: self.id, source })
    }

    /// Takes the next completion if there is one, without telling the controller: see [`ring`](Self::ring).
    ///
    /// # Errors
    /// [`QueueError::BadCompletion`] for one that cannot be.
    #[inline]
    pub fn next_completion(&mut self) -> Result<Option<Cqe>, QueueError> {
        let cqe = match self.stash.pop_front() {
            Some(cqe) => Some(cqe),
            None => self.poll_ring()?,
        };
        if let Some(cqe) = &cqe {
            self.cids.free(cqe.cid);
        }
        Ok(cqe)
    }

    /// Its identifier is free when it is handed out: while it is kept, no other command is to be taken for it.
    #[inline]
    fn poll_ring(&mut self) -> Result<Option<Cqe>, QueueError> {
        let Some(cqe) = self.cq.pop() else { return Ok(None) };
        let possible = cqe.sqid == self.id && u32::from(cqe.sqhd) < self.entries();
        if possible && self.cids.complete(cqe.cid) {
            return Ok(Some(cqe));
        }
        Err(QueueError::BadCompletion { qid: self.id, cqe })
    }

    /// The next completion of a command that is in flight. Those that cannot be, but for the awaited command's own, are nobody's: they are
    /// passed over, and counted. `None`: there is none, or before it as many of those as the queue holds.
    fn poll_past(&mut self, awaited: Option<CommandId>) -> Result<Option<Cqe>, QueueError> {
        for _ in 0..self.entries() {
            match self.poll_ring() {
                Err(QueueError::BadCompletion { cqe, .. }) if awaited != Some(cqe.cid) => {
                    let before = self.passed_over.map_or(0, |(times, _)| times);
                    self.passed_over = Some((before + 1, cqe));
                    // It takes room in the queue like any other.
                    self.ring()?;
                }
                polled => return polled,
            }
        }
        Ok(None)
    }

    /// As [`next_completion`](Self::next_completion), but those that cannot be are passed over.
    pub(crate) fn next_possible(&mut self) -> Result<Option<Cqe>, QueueError> {
        let cqe = match self.stash.pop_front() {
            Some(cqe) => Some(cqe),
            None => self.poll_past(None)?,
        };
        if let Some(cqe) = &cqe {
            self.cids.free(cqe.cid);
        }
        Ok(cqe)
    }

    /// How many completions that cannot be were passed over since the last call, while others were waited for, and the last of them; `None`:
    /// there were none.
    pub fn take_passed_over(&mut self) -> Option<(u64, QueueError)> {
        let (times, cqe) = self.passed_over.take()?;
        Some((times, QueueError::BadCompletion { qid: self.id, cqe }))
    }

    /// Takes the next completion whatever it says.
    fn next_completion_raw(&mut self) -> Option<Cqe> {
        let cqe = self.stash.pop_front().or_else(|| self.cq.pop())?;
        self.cids.complete(cqe.cid);
        self.cids.free(cqe.cid);
        Some(cqe)
    }

    /// Waits for any completion whatever it says, and tells the controller. `None` when `timeout` passes without one.
    pub fn wait_raw(&mut self, timeout: Duration) -> Result<Option<Cqe>, QueueError> {
        let mut backoff = Backoff::new();
        loop {
            if let Some(cqe) = self.next_completion_raw() {
                self.ring()?;
                return Ok(Some(cqe));
            }
            if backoff.waited() >= timeout {
                return Ok(None);
            }
            self.pause(&mut backoff)?;
        }
    }

    /// Submits a command, rings, and waits for its completion. Completions of others are kept for
    /// [`next_completion`](Self::next_completion).
    ///
    /// # Errors
    /// [`QueueError::Failed`] when its status is not success.
    pub fn execute(&mut self, command: &Command) -> Result<Cqe, QueueError> {
        let cqe = self.execute_any(command)?;
        let status = cqe.status();
        if status.is_success() {
            return Ok(cqe);
        }
        Err(QueueError::Failed { qid: self.id, opcode: command.sqe.opcode, cqe, status })
    }

    /// As [`execute`](Self::execute), but whatever the status is.
    pub fn execute_any(&mut self, command: &Command) -> Result<Cqe, QueueError> {
        let cid = self.submit(command)?;
        self.ring()?;
        self.wait_for(cid)
    }

    /// Waits for the completion of one command, whatever its status. Completions that cannot be are passed over: who gave the command up for
    /// one would take its end for something else. [`take_passed_over`](Self::take_passed_over) tells of them.
    ///
    /// # Errors
    /// [`QueueError::BadCompletion`] for one that cannot be and has the command's own identifier.
    pub fn wait_for(&mut self, cid: CommandId) -> Result<Cqe, QueueError> {
        if let Some(at) = self.stash.iter().position(|cqe| cqe.cid == cid)
            && let Some(cqe) = self.stash.remove(at)
        {
            self.cids.free(cid);
            return Ok(cqe);
        }
        let mut backoff = Backoff::new();
        loop {
            match self.poll_past(Some(cid))? {
                Some(cqe) if cqe.cid == cid => {
                    self.cids.free(cid);
                    self.ring()?;
                    return Ok(cqe);
                }
                Some(other) => self.stash.push_back(other),
                None if backoff.waited() >= self.timeout => {
                    return Err(QueueError::Timeout { qid: self.id, cid, waited: self.timeout });
                }
                None => self.pause(&mut backoff)?,
            }
        }
    }

    /// Takes the completion of one command if it has come; those of others are kept, those that cannot be passed over. Does not wait.
    pub(crate) fn take(&mut self, cid: CommandId) -> Result<bool, QueueError> {
        while let Some(cqe) = self.poll_past(None)? {
            self.stash.push_back(cqe);
        }
        self.ring()?;
        let at = self.stash.iter().position(|cqe| cqe.cid == cid);
        let taken = at.and_then(|at| self.stash.remove(at)).is_some();
        if taken {
            self.cids.free(cid);
        }
        Ok(taken)
    }

    fn pause(&self, backoff: &mut Backoff) -> Result<(), QueueError> {
        if backoff.pause() {
            self.check()?;
        }
        Ok(())
    }

    /// Fails when the controller's process is gone: shared memory alone does not tell.
    pub fn check(&self) -> Result<(), QueueError> {
        self.transport.get().check().map_err(|source| QueueError::Transport { qid: self.id, source })
    }

    /// The event fd that the completion queue's interrupt signals, if it has one.
    pub fn interrupt(&self) -> Option<BorrowedFd<'_>> {
        self.interrupt.as_ref().map(AsFd::as_fd)
    }

    /// Has the completion queue raise no interrupt until it is [unmasked](Self::unmask_interrupt): nothing where it has none, or where
    /// [its vector cannot be masked](crate::Controller::masks_vectors).
    #[inline]
    pub fn mask_interrupt(&mut self) {
        if let Some(mask) = &self.mask {
            mask.set();
        }
    }

    /// Has it raise interrupts again; false: it will not. One for what came meanwhile may follow at once, also when that was taken.
    ///
    /// To sleep without missing anything: unmask, then look, then sleep. What the controller completed before it saw the mask go is found by
    /// the look; for what it completes later it sends a message.
    #[inline]
    pub fn unmask_interrupt(&mut self) -> bool {
        self.mask.as_ref().is_some_and(VectorMask::clear)
    }

    /// Sleeps until the completion queue's interrupt; how often it was raised since the last call, 0 when `timeout` passes
    /// or the queue has no interrupt.
    pub fn wait_interrupt(&self, timeout: Duration) -> Result<u64, QueueError> {
        let failed = |errno: rustix::io::Errno| QueueError::Interrupt { qid: self.id, source: errno.into() };
        let Some(fd) = &self.interrupt else { return Ok(0) };
        let timeout = Timespec::try_from(timeout).map_err(|_| failed(rustix::io::Errno::INVAL))?;
        if poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)).map_err(failed)? == 0 {
            return Ok(0);
        }
        let mut count = [0; 8];
        rustix::io::read(fd, &mut count).map_err(failed)?;
        Ok(u64::from_ne_bytes(count))
    }
}

/// Waits that begin as a spin and end as sleeps.
struct Backoff {
    start: Instant,
    rounds: u32,
}

impl Backoff {
    fn new() -> Self {
        Self { start: Instant::now(), rounds: 0 }
    }

    fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    /// Waits a little; true when it slept, so that something slower is worth looking at.
    fn pause(&mut self) -> bool {
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds < 1000 {
            std::hint::spin_loop();
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
        true
    }
}

#[cfg(test)]
mod tests;
