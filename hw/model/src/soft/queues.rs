//! A core's queues: positions, doorbells, whose turn it is.

use std::collections::VecDeque;

use crate::map::{Fault, QueueBase, QueueSizes, QueueStatus};

/// A queue pair of a guest.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    pub(super) base: QueueBase,
    pub(super) sizes: QueueSizes,
    pub(super) cq_base: QueueBase,
    pub(super) sq_head: u8,
    sq_tail: u8,
    cq_tail: u8,
    cq_head: u8,
    phase: bool,
    pub(super) in_flight: u8,
    stopped: bool,
}

impl Queue {
    /// Word 0 is written.
    pub(super) fn set_base(&mut self, base: QueueBase) {
        if base.enabled() {
            (self.sq_head, self.sq_tail, self.cq_tail, self.cq_head) = (0, 0, 0, 0);
            (self.phase, self.stopped) = (true, false);
        }
        self.base = base;
    }

    pub(super) fn status(&self) -> QueueStatus {
        QueueStatus::new()
            .with_sq_head(self.sq_head)
            .with_sq_tail(self.sq_tail)
            .with_cq_tail(self.cq_tail)
            .with_cq_head(self.cq_head)
            .with_phase(self.phase)
            .with_in_flight(self.in_flight)
            .with_stopped(self.stopped)
    }

    /// Entries of the completion queue that are neither taken by an entry nor promised to a command.
    fn room(&self) -> u8 {
        let entries = self.sizes.cq();
        let used = distance(self.cq_head, self.cq_tail, entries);
        (entries.saturating_sub(1)).saturating_sub(used).saturating_sub(self.in_flight)
    }

    /// Whether a command can be taken.
    fn is_eligible(&self) -> bool {
        self.base.enabled() && !self.stopped && self.sq_head != self.sq_tail && self.room() > 0
    }

    /// A doorbell; the answer is the fault's code when it is refused, and the queue stops.
    fn ring(&mut self, completion: bool, value: u16) -> Option<u16> {
        if !self.base.enabled() || self.stopped {
            return None;
        }
        let within = |entries: u8| u8::try_from(value).ok().filter(|value| *value < entries);
        let code = if completion {
            let entries = self.sizes.cq();
            let used = distance(self.cq_head, self.cq_tail, entries);
            match within(entries).filter(|head| distance(self.cq_head, *head, entries) <= used) {
                Some(head) => return self.set_head(head),
                None => Fault::CQ_HEAD,
            }
        } else {
            match within(self.sizes.sq()) {
                Some(tail) => {
                    self.sq_tail = tail;
                    return None;
                }
                None => Fault::SQ_TAIL,
            }
        };
        self.stopped = true;
        Some(code)
    }

    fn set_head(&mut self, head: u8) -> Option<u16> {
        self.cq_head = head;
        None
    }

    /// Takes the place of the next completion: its index and phase tag.
    pub(super) fn advance(&mut self) -> (u8, bool) {
        let at = (self.cq_tail, self.phase);
        self.cq_tail += 1;
        if self.cq_tail >= self.sizes.cq() {
            (self.cq_tail, self.phase) = (0, !self.phase);
        }
        self.in_flight -= 1;
        at
    }
}

fn distance(from: u8, to: u8, entries: u8) -> u8 {
    if to >= from { to - from } else { (entries - from) + to }
}

/// All queues of a core.
#[derive(Debug)]
pub(super) struct Queues {
    all: Vec<Queue>,
    faults: VecDeque<Fault>,
    /// Whose turn it is, and how many more commands it may take.
    turn: usize,
    left: u8,
    per_function: usize,
    pub(super) weights: Vec<u8>,
}

impl Queues {
    pub(super) fn new(functions: u8, pairs: u8) -> Self {
        let (functions, per_function) = (usize::from(functions), usize::from(pairs));
        let all = vec![Queue::default(); functions * per_function];
        Self { all, faults: VecDeque::new(), turn: 0, left: 0, per_function, weights: vec![1; functions] }
    }

    pub(super) fn get(&self, queue: usize) -> Option<&Queue> {
        self.all.get(queue)
    }

    pub(super) fn get_mut(&mut self, queue: usize) -> Option<&mut Queue> {
        self.all.get_mut(queue)
    }

    /// The vector of a queue's interrupts, if it has any.
    pub(super) fn vector(&self, queue: usize) -> Option<u8> {
        self.get(queue).filter(|queue| queue.sizes.interrupts()).map(|queue| queue.sizes.vector())
    }

    pub(super) fn ring(&mut self, queue: u16, completion: bool, value: u16) {
        let code = self.all.get_mut(usize::from(queue)).and_then(|queue| queue.ring(completion, value));
        self.faults.extend(code.map(|code| Fault::new().with_valid(true).with_code(code).with_queue(queue)));
    }

    /// A queue's memory could not be read.
    pub(super) fn stop(&mut self, queue: usize) {
        if let Some(known) = self.all.get_mut(queue) {
            known.stopped = true;
            let fault = Fault::new().with_valid(true).with_code(Fault::SQ_READ).with_queue(queue as u16);
            self.faults.push_back(fault);
        }
    }

    pub(super) fn has_fault(&self) -> bool {
        !self.faults.is_empty()
    }

    pub(super) fn take_fault(&mut self) -> Fault {
        self.faults.pop_front().unwrap_or_default()
    }

    /// The queue that the next command is taken from: each function's weight of commands at a time.
    pub(super) fn next(&mut self) -> Option<usize> {
        if self.left > 0 && self.all.get(self.turn).is_some_and(Queue::is_eligible) {
            self.left -= 1;
            return Some(self.turn);
        }
        let count = self.all.len();
        let next = (1..=count).map(|step| (self.turn + step) % count).find(|at| self.all[*at].is_eligible())?;
        (self.turn, self.left) = (next, self.weights[next / self.per_function].max(1) - 1);
        Some(next)
    }

    /// The entry that the next command of a queue lies in: its host address. It counts as taken.
    pub(super) fn take(&mut self, at: usize) -> u64 {
        let queue = &mut self.all[at];
        let address = (queue.base.page() << 12) + u64::from(queue.sq_head) * 64;
        queue.sq_head = if queue.sq_head + 1 >= queue.sizes.sq() { 0 } else { queue.sq_head + 1 };
        queue.in_flight += 1;
        address
    }
}
