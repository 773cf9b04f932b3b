//! Commands in flight, on record: what a worker that takes over carries out again.
//!
//! ```text
//!   accept:    record (taking) ─► SQ head ─► record (accepted)
//!   complete:  CQE ─► record freed ─► CQ tail
//! ```
//!
//! A command is on record from before it leaves its submission queue until after its completion entry is in the guest's memory. A
//! worker that takes over ([`Controller::recover`]):
//! 1. goes on along each completion queue, from the tail in the state region, over entries that have the phase tag of the coming
//!    pass: they are posted. It frees their records, and takes their SQHD for the submission queue's head.
//! 2. A record that is still being taken was accepted if the head has moved past it, and is dropped otherwise: the entry is in the
//!    queue still.
//! 3. All other records are commands that were accepted and not completed. They are carried out again, in the order in which they
//!    were accepted, before any other command is taken.
//!
//! Commands that finish at once (`io/batch.rs`, `io/only.rs`) are never on record: they lie in their queue until they are posted.
//!
//! A record is the submission queue entry itself, one cache line. What has to be known beside it lies in its dwords 2 and 3, neither
//! of which any command here uses. docs/survival.md says why it may be carried out again, command by command.

use std::{
    cell::RefCell,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use millrace_engine::ShardContext;
use millrace_keeper::Layout;
use millrace_memory::{GuestAddress, Shared};
use millrace_nvme_spec::command::{Cqe, Fuse, QueueId, Sqe};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    controller::{CommandToken, Controller},
    errors::Subject,
    registers::Phase,
    state::{self, Cell},
};

/// Commands of a controller that may be in flight and not completed at once.
pub(crate) const RECORDS: usize = 4096;
/// Of a command that has no record.
pub(crate) const NONE: u16 = u16::MAX;

/// Version of the layout. 2: the first one. Before it the tag lay in place of the metadata pointer, so that what was left so cannot be
/// carried out again.
pub(crate) const LAYOUT: Layout = Layout { name: "commands-in-flight", oldest: 2, newest: 2 };
const WORDS: usize = Sqe::SIZE / 8;
/// The word of the tag, in place of dwords 2 and 3.
const TAG: usize = 1;
/// States in the tag.
const STATE: u64 = 3;
const TAKING: u64 = 1;
const ACCEPTED: u64 = 2;
/// The command's first half, a Compare, has succeeded: its write may have begun.
const COMPARED: u64 = 1 << 2;
/// The command has a number of its own in its last word.
const NUMBERED: u64 = 1 << 3;
/// Dwords 14 and 15, which no command that gets a number uses.
const LAST: usize = 7;

/// The region: a header of one cache line, then the records.
#[derive(Debug, FromBytes)]
#[repr(C, align(64))]
struct Table {
    version: Cell<u64>,
    /// Records in use lie below this.
    used: Cell<u64>,
    reserved: [Cell<u64>; 6],
    records: [[Cell<u64>; WORDS]; RECORDS],
}

/// The tag's fields: state and flags, sqid (12 bits), index, and the command's place in the order of all.
fn tag(sqid: u16, index: u32, count: u32, state: u64) -> u64 {
    state | u64::from(sqid) << 4 | u64::from(index & 0xffff) << 16 | u64::from(count) << 32
}

const _: () = assert!(state::QUEUES <= 1 << 12, "a queue's identifier fits the tag");

/// See the module.
#[derive(Debug)]
pub(crate) struct Records {
    table: Shared<Table>,
    /// Free records; the one used last is used next, whose cache line is near.
    free: RefCell<Vec<u16>>,
    /// Counts commands.
    count: std::cell::Cell<u32>,
}

impl AsFd for Records {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.table.as_fd()
    }
}

impl Records {
    pub(crate) fn new() -> io::Result<Self> {
        let table = Shared::<Table>::new("millrace-commands")?;
        table.version.set(LAYOUT.newest.into());
        Ok(Self::over(table))
    }

    /// Those that the worker before this one left.
    pub(crate) fn from_file(file: OwnedFd) -> io::Result<Self> {
        let table = Shared::<Table>::from_file(file)?;
        if table.version.get() != u64::from(LAYOUT.newest) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "records of another version"));
        }
        Ok(Self::over(table))
    }

    /// As they lay in the region's file.
    #[cfg(test)]
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let table = Shared::<Table>::new("copy").expect("shared memory");
        let file = std::fs::File::from(table.as_fd().try_clone_to_owned().expect("a descriptor"));
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).expect("room for them");
        Self::over(table)
    }

    fn over(table: Shared<Table>) -> Self {
        let records = Self { table, free: RefCell::default(), count: std::cell::Cell::new(0) };
        let newest = records.present().map(|at| records.order(at)).max();
        records.count.set(newest.map_or(0, |newest| newest.wrapping_add(1)));
        records.sort_free();
        records
    }

    fn sort_free(&self) {
        let mut free = self.free.borrow_mut();
        free.clear();
        free.extend((0..RECORDS as u16).rev().filter(|at| self.state_of(*at) == 0));
    }

    fn word(&self, at: u16, word: usize) -> &Cell<u64> {
        &self.table.records[usize::from(at)][word]
    }

    fn state_of(&self, at: u16) -> u64 {
        if u64::from(at) >= self.table.used.get() { 0 } else { self.word(at, TAG).get() & STATE }
    }

    fn order(&self, at: u16) -> u32 {
        (self.word(at, TAG).get() >> 32) as u32
    }

    /// The record that the next command gets, if there is one.
    #[inline]
    pub(crate) fn next(&self) -> Option<u16> {
        self.free.borrow().last().copied()
    }

    /// Puts a command on record that is about to be taken from its queue's entry `index`.
    pub(crate) fn take(&self, sqe: &Sqe, sqid: u16, index: u32) -> Option<u16> {
        let at = self.free.borrow_mut().pop()?;
        let used = &self.table.used;
        used.set(used.get().max(u64::from(at) + 1));
        let words = <[u64; WORDS]>::read_from_bytes(sqe.as_bytes()).expect("an entry is eight words");
        let count = self.count.get();
        self.count.set(count.wrapping_add(1));
        for (number, word) in words.into_iter().enumerate().filter(|(number, _)| *number != TAG) {
            self.word(at, number).set(word);
        }
        state::commit();
        self.word(at, TAG).set(tag(sqid, index, count, TAKING));
        state::commit();
        Some(at)
    }

    /// The queue's head has moved past it.
    #[inline]
    pub(crate) fn accept(&self, at: u16) {
        state::commit();
        let word = self.word(at, TAG);
        word.set(word.get() & !STATE | ACCEPTED);
    }

    /// It is completed: its completion entry is posted.
    #[inline]
    pub(crate) fn release(&self, at: u16) {
        if at == NONE {
            return;
        }
        state::commit();
        self.word(at, TAG).set(0);
        state::commit();
        self.free.borrow_mut().push(at);
    }

    /// The controller was reset: nothing is in flight that anybody waits for.
    pub(crate) fn clear(&self) {
        self.present().for_each(|at| self.word(at, TAG).set(0));
        self.sort_free();
    }

    /// Remembers that a pair's Compare has succeeded, by its second command: from now on only its write is carried out again.
    pub(crate) fn set_compared(&self, at: u16) {
        let word = self.word(at, TAG);
        word.set(word.get() | COMPARED);
        state::commit();
    }

    /// Whether it was remembered.
    pub(crate) fn is_compared(&self, at: u16) -> bool {
        at != NONE && self.word(at, TAG).get() & COMPARED != 0
    }

    /// Remembers a number for a command: of the change of reservations, or of the namespace, that it is about to make.
    pub(crate) fn number(&self, at: u16, number: u64) {
        if at == NONE {
            return;
        }
        self.word(at, LAST).set(number);
        state::commit();
        let word = self.word(at, TAG);
        word.set(word.get() | NUMBERED);
        state::commit();
    }

    /// What was remembered.
    pub(crate) fn numbered(&self, at: u16) -> Option<u64> {
        (at != NONE && self.word(at, TAG).get() & NUMBERED != 0).then(|| self.word(at, LAST).get())
    }

    fn present(&self) -> impl Iterator<Item = u16> {
        (0..RECORDS as u16).take(self.table.used.get() as usize).filter(|at| self.state_of(*at) != 0)
    }

    /// Commands on record, by their submission queues.
    pub(crate) fn commands(&self) -> Vec<(u16, Sqe)> {
        self.present().map(|at| (self.sqid(at), self.sqe(at))).collect()
    }

    /// Commands on record, in the order of their acceptance, with their places in their queues.
    pub(crate) fn placed(&self) -> Vec<(u16, u32, Sqe)> {
        let mut present: Vec<u16> = self.present().collect();
        present.sort_by_key(|at| self.order(*at).wrapping_sub(self.count.get()));
        present.into_iter().map(|at| (self.sqid(at), self.index(at), self.sqe(at))).collect()
    }

    fn sqid(&self, at: u16) -> u16 {
        (self.word(at, TAG).get() >> 4) as u16 & 0xfff
    }

    fn index(&self, at: u16) -> u32 {
        (self.word(at, TAG).get() >> 16) as u32 & 0xffff
    }

    /// The command as it was taken, but for what no command uses.
    pub(crate) fn sqe(&self, at: u16) -> Sqe {
        let mut words: [u64; WORDS] = std::array::from_fn(|word| self.word(at, word).get());
        words[TAG] = 0;
        Sqe::read_from_bytes(words.as_bytes()).unwrap_or_default()
    }
}

/// Puts so many commands on record at a time, accepts and releases them; `lap` is called after each batch. For the benchmark `path`.
#[doc(hidden)]
pub fn exercise(batches: u64, depth: usize, mut lap: impl FnMut()) -> io::Result<()> {
    let (records, sqe) = (Records::new()?, Sqe::default());
    let mut taken = Vec::with_capacity(depth);
    for _ in 0..batches {
        taken.extend((0..depth).filter_map(|index| records.take(std::hint::black_box(&sqe), 1, index as u32)));
        for at in &taken {
            records.accept(*at);
        }
        for at in taken.drain(..) {
            records.release(at);
        }
        lap();
    }
    Ok(())
}

impl Controller {
    /// Finds what is in flight by what the last worker left: see the module.
    pub(crate) fn recover(&mut self) {
        for cqid in 0..=self.config.queues {
            if self.cq_exists(cqid) {
                self.follow_completions(cqid);
            }
        }
        self.recover_records();
    }

    /// Finds what is in flight by what is on record alone.
    pub(crate) fn recover_records(&mut self) {
        self.mend_event_requests();
        let mut again: Vec<u16> = Vec::new();
        for at in self.records.present().collect::<Vec<_>>() {
            let sqid = self.records.sqid(at);
            let taken = self.records.state_of(at) == ACCEPTED
                || self.sq_exists(sqid) && self.sq(sqid).head.get() != self.records.index(at);
            if !self.sq_exists(sqid) || !taken || self.is_event_request(at) {
                self.records.release(at);
                continue;
            }
            self.records.accept(at);
            again.push(at);
        }
        again.sort_by_key(|at| self.records.order(*at).wrapping_sub(self.records.count.get()));
        self.again = again.into();
        self.recount();
    }

    /// Goes on over the completion entries that the last worker had written, and not counted.
    fn follow_completions(&mut self, cqid: u16) {
        for _ in 0..self.cq(cqid).entries.get() {
            let cq = self.cq(cqid);
            let place = cq.base.get().checked_add(u64::from(cq.tail()) * Cqe::SIZE as u64);
            let found = place.and_then(|place| self.memory.read_value::<Cqe>(GuestAddress(place)).ok());
            let Some(cqe) = found.filter(|cqe| cqe.phase() == cq.phase()) else { return };
            let QueueId(sqid) = cqe.sqid;
            if self.sq_exists(sqid) && self.sq(sqid).cq.get() == cqid {
                if u32::from(cqe.sqhd) < self.sq(sqid).entries.get() {
                    self.sq(sqid).head.set(u32::from(cqe.sqhd));
                }
                let posted =
                    self.records.present().find(|&at| self.records.sqid(at) == sqid && self.records.sqe(at).cid == cqe.cid);
                match posted {
                    Some(at) => self.records.release(at),
                    None if sqid == 0 => self.forget_event_request(cqe.cid.0, &cqe),
                    None => {}
                }
            }
            state::commit();
            self.cq(cqid).advance();
        }
    }

    /// What is counted of commands in flight: those that are carried out again.
    pub(crate) fn recount(&mut self) {
        for cq in &self.state.cq {
            cq.promised.set(0);
            cq.users.set(0);
        }
        for sq in &self.state.sq {
            sq.in_flight.set(0);
            sq.deleting.set(0);
            if let Some(cq) = self.state.cq.get(usize::from(sq.cq.get())).filter(|_| sq.entries.get() != 0) {
                cq.users.set(cq.users.get() + 1);
            }
        }
        for &at in &self.again {
            let sq = self.sq(self.records.sqid(at));
            sq.in_flight.set(sq.in_flight.get() + 1);
            let cq = self.cq(sq.cq.get());
            cq.promised.set(cq.promised.get() + 1);
        }
        self.in_flight = self.state.events.outstanding.get() + self.again.len() as u32;
    }

    /// Carries out again what was in flight, as far as there are task slots and the turn's bytes go. Returns work done.
    pub(crate) fn redo(&mut self, cx: &mut ShardContext<'_>) -> usize {
        let mut work = 0;
        while let Some(&at) = self.again.front().filter(|_| self.turn_bytes > 0) {
            if !matches!(self.phase, Phase::Ready | Phase::ShuttingDown) {
                self.forget_again();
                break;
            }
            let Some(slot) = cx.reserve() else { break };
            self.again.pop_front();
            self.redo_one(cx, slot, at);
            work += 1;
        }
        work
    }

    fn redo_one(&mut self, cx: &mut ShardContext<'_>, slot: millrace_engine::TaskSlot<'_>, at: u16) {
        let sqe = self.records.sqe(at);
        let (sqid, epoch) = (self.records.sqid(at), self.state.epoch.get());
        let token = CommandToken { sqid, cid: sqe.cid.0, epoch, subject: Subject::of(&sqe), record: at };
        self.repeats = true;
        self.start(cx, slot, token, &sqe);
        self.repeats = false;
    }

    /// Begins with the writes of pairs whose Compare has succeeded: before anybody else, on any controller, may write there. Where their
    /// namespace is not there (yet), nobody can.
    pub(crate) fn redo_pairs(&mut self, cx: &mut ShardContext<'_>) {
        let is_there = |at: &u16| self.namespaces.get(self.records.sqe(*at).nsid.0).is_some();
        let begun = |at: &u16| self.records.is_compared(*at) && is_there(at);
        let seconds: Vec<u16> = self.again.iter().copied().filter(begun).collect();
        for second in seconds {
            let sqid = self.records.sqid(second);
            let entries = self.sq(sqid).entries.get().max(1);
            let before = (self.records.index(second) + entries - 1) % entries;
            let is_first = |at: &u16| {
                let records = &self.records;
                records.sqid(*at) == sqid && records.index(*at) == before && records.sqe(*at).flags.fuse() == Fuse::FIRST
            };
            let first = self.again.iter().copied().find(is_first);
            for at in first.into_iter().chain([second]) {
                // Right after the start of a shard all its slots are free, and there are few pairs: otherwise they come later.
                let Some(slot) = cx.reserve() else { return };
                self.redo_one(cx, slot, at);
                self.again.retain(|other| *other != at);
            }
        }
    }

    /// Whether the second command of a pair is among what is to be carried out again.
    pub(crate) fn redoes(&self, sqid: u16) -> bool {
        self.again.iter().any(|at| self.records.sqid(*at) == sqid)
    }

    /// How many are to be carried out again of which nothing has begun: all, while the controller stands still. It came to stand when
    /// only first halves of pairs were on record, or was given a state, of which nothing was ever begun here.
    pub(crate) fn standing(&self) -> u32 {
        if self.lifecycle.stopped { self.again.len() as u32 } else { 0 }
    }

    /// Nobody waits any more for what was to be carried out again.
    pub(crate) fn forget_again(&mut self) {
        self.in_flight -= self.again.len() as u32;
        self.again.clear();
    }

    /// Whether a record is of an event request that is in its list already.
    fn is_event_request(&self, at: u16) -> bool {
        let sqe = self.records.sqe(at);
        self.records.sqid(at) == 0 && self.is_waiting_event_request(&sqe)
    }
}

#[cfg(test)]
mod tests;
