//! A queue pair driven at next to no cost per I/O: for measuring targets that are faster than an ordinary driver.
//!
//! Every command identifier has its entry, ready but for the address, from the start; a command that begins costs one copy of
//! it. Completions are taken as many at a time as are there, and the head doorbell is rung only when the controller could
//! otherwise run out of entries. What the controller writes is checked all the same, with one comparison.

use millrace_block::Lba;
use millrace_nvme_spec::{CommandId, Sqe};

use super::{CompletionQueue, QueueError, QueuePair, next};
use crate::command::Command;

/// Bits of a completion's second word that are the same in every good one: SQ identifier, phase and status.
const FIXED: u64 = 0xffff_0000_ffff_0000;
const PHASE: u64 = 1 << 48;

/// A queue pair with one command per identifier, all of them made beforehand.
///
/// ```text
///   begin(cid, lba) … ring ──► controller ──► take(at least n) ──► the identifiers that are free again
/// ```
pub struct LeanQueue {
    queue: QueuePair,
    /// By command identifier.
    ready: Box<[Sqe]>,
    busy: Box<[bool]>,
    in_flight: usize,
    /// What was last written to each slot of the submission queue: a slot that would be written the same again is left alone.
    slots: Box<[(u16, Lba)]>,
    /// Completions taken since the head doorbell was rung, and how many may be.
    unrung: u32,
    most_unrung: u32,
}

impl LeanQueue {
    /// Takes over an unused queue pair. Command identifier `n` will stand for `commands[n]`.
    ///
    /// # Errors
    /// [`QueueError::Full`] for more commands than the queue holds, [`QueueError::Prp`] for data that PRPs cannot describe.
    ///
    /// # Panics
    /// When the queue has commands in flight, or there is no command.
    pub fn new(queue: QueuePair, commands: &[Command]) -> Result<Self, QueueError> {
        assert!(queue.in_flight() == 0 && !commands.is_empty(), "a fresh queue, and something to do on it");
        if commands.len() > queue.capacity() {
            return Err(QueueError::Full { qid: queue.id, capacity: queue.capacity() });
        }
        let ready = commands.iter().zip(0..).map(|(command, cid)| {
            let mut sqe = Sqe { cid: CommandId(cid), ..command.sqe };
            if let Some(data) = command.data {
                let pointer = queue.lists.prps(sqe.cid, data);
                sqe.dptr = pointer.map_err(|source| QueueError::Prp { qid: queue.id, source })?;
            }
            Ok(sqe)
        });
        let ready = ready.collect::<Result<Box<[Sqe]>, QueueError>>()?;
        // The controller takes entries that are consumed but not rung for occupied. Even so the commands in flight must fit.
        let spare = queue.capacity() - commands.len();
        Ok(Self {
            busy: vec![false; ready.len()].into(),
            in_flight: 0,
            slots: vec![(u16::MAX, Lba(u64::MAX)); queue.entries() as usize].into(),
            unrung: 0,
            most_unrung: if queue.interrupt.is_some() { 0 } else { (spare / 2) as u32 },
            ready,
            queue,
        })
    }

    /// The number of commands there are, which is the most that can be in flight.
    pub fn depth(&self) -> usize {
        self.ready.len()
    }

    /// Commands in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The queue pair, to ask whether its controller is still there or to wait for an interrupt.
    pub fn queue(&self) -> &QueuePair {
        &self.queue
    }

    /// Places the command of this identifier, at this address, without ringing.
    ///
    /// # Panics
    /// When it is in flight.
    #[inline]
    pub fn begin(&mut self, cid: u16, lba: Lba) {
        let busy = &mut self.busy[usize::from(cid)];
        assert!(!*busy, "command {cid} is in flight");
        *busy = true;
        self.in_flight += 1;
        let sq = &mut self.queue.sq;
        let slot = &mut self.slots[usize::from(sq.tail)];
        if *slot == (cid, lba) {
            // No more commands are in flight than the ring has entries but one: the controller has long fetched this one.
            sq.tail = next(sq.tail, sq.ring.entries());
            return;
        }
        *slot = (cid, lba);
        let mut sqe = self.ready[usize::from(cid)];
        sqe.set_cdw10_11(lba.0);
        sq.push(sqe);
    }

    /// Tells the controller of what was begun, and of what was taken if it may need the room.
    ///
    /// # Errors
    /// Only where doorbells are messages.
    #[inline]
    pub fn ring(&mut self) -> Result<(), QueueError> {
        let qid = self.queue.id;
        let failed = |source| QueueError::Transport { qid, source };
        if self.unrung > self.most_unrung {
            self.unrung = 0;
            self.queue.cq.ring().map_err(failed)?;
        }
        self.queue.sq.ring().map_err(failed)
    }

    /// Takes all completions that are there, once there are `at_least` (or as many as commands in flight, if that is less),
    /// and puts the identifiers that they free into `taken`, in their order. Looks at a single entry when there are fewer.
    ///
    /// # Errors
    /// [`QueueError::Failed`] for a command that failed, [`QueueError::BadCompletion`] for a completion that cannot be.
    #[inline]
    pub fn take(&mut self, at_least: usize, taken: &mut Vec<u16>) -> Result<(), QueueError> {
        taken.clear();
        let qid = self.queue.id;
        let cq = &mut self.queue.cq;
        if self.in_flight == 0 || !cq.has(at_least.clamp(1, self.in_flight)) {
            return Ok(());
        }
        let mut expected = cq.good(qid.0);
        while self.in_flight > 0 {
            // Acquire: see `CompletionQueue::pop`.
            let high = cq.ring.load_word(u32::from(cq.head), 1);
            if (high ^ expected) & FIXED != 0 {
                if (high ^ expected) & PHASE != 0 {
                    break;
                }
                return Err(self.explain());
            }
            let cid = (high >> 32) as u16;
            match self.busy.get_mut(usize::from(cid)) {
                Some(busy) if *busy => *busy = false,
                _ => return Err(self.explain()),
            }
            taken.push(cid);
            self.in_flight -= 1;
            cq.head = next(cq.head, cq.ring.entries());
            if cq.head == 0 {
                cq.phase = !cq.phase;
                expected = cq.good(qid.0);
            }
        }
        self.unrung += taken.len() as u32;
        Ok(())
    }

    /// What is wrong with the completion at the head.
    #[cold]
    fn explain(&mut self) -> QueueError {
        let qid = self.queue.id;
        let cqe = self.queue.cq.pop().expect("its phase was seen");
        let entry = self.ready.get(usize::from(cqe.cid.0));
        let status = cqe.status();
        match (entry, self.busy.get(usize::from(cqe.cid.0))) {
            (Some(sqe), Some(true)) if cqe.sqid == qid && !status.is_success() => {
                QueueError::Failed { qid, opcode: sqe.opcode, cqe, status }
            }
            _ => QueueError::BadCompletion { qid, cqe },
        }
    }
}

impl CompletionQueue {
    /// Whether the next `count` completions are there. They come in order: the last of them tells.
    #[inline]
    fn has(&self, count: usize) -> bool {
        let entries = self.ring.entries() as usize;
        let last = usize::from(self.head) + count - 1;
        let (index, phase) = if last < entries { (last, self.phase) } else { (last - entries, !self.phase) };
        let high = self.ring.load_word(index as u32, 1);
        (high & PHASE != 0) == phase
    }

    /// The second word of a good completion on the queue's present pass, but for the command and the SQ head.
    #[inline]
    fn good(&self, sqid: u16) -> u64 {
        u64::from(sqid) << 16 | if self.phase { PHASE } else { 0 }
    }
}
