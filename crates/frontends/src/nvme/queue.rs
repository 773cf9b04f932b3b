//! Submission and completion queues in guest memory: taking entries, promising and posting completions (Base 3.3, 4.2).

use std::sync::atomic::{Ordering, fence};

use millrace_memory::{Access, GuestAddress, Segment};
use millrace_nvme_spec::command::{CommandId, Cqe, QueueId, Sqe};
use millrace_nvme_spec::status::StatusField;

use super::{
    controller::{CommandToken, Controller},
    errors::Subject,
    records,
    state::{self, CqState, SqState},
    status::Completion,
};

/// Offset of a completion entry's status and phase tag.
const STATUS_AT: usize = 14;

/// What is remembered about queues beside their state: recomputable at any time.
#[derive(Debug)]
pub(crate) struct QueueCaches {
    sq: Vec<Option<Segment>>,
    cq: Vec<Option<Segment>>,
    shadow: Option<(Segment, Segment)>,
    /// Submission queues that exist, admin first.
    active: Vec<Active>,
    /// Per SQ and per CQ: the last doorbell value that was refused, so that it is reported once.
    refused_tails: Vec<Option<u32>>,
    refused_heads: Vec<Option<u32>>,
}

/// A submission queue to look at. Eight lie in a cache line, so that a look at many idle queues touches little.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Active {
    pub(crate) sqid: u16,
    /// The doorbell's value with which it was found to have nothing to take: it is not looked at before that changes.
    pub(crate) seen: u32,
}

impl Active {
    /// No doorbell's valid value.
    pub(crate) const UNSEEN: u32 = u32::MAX;
}

impl QueueCaches {
    pub(crate) fn new(queues: u16) -> Self {
        let count = usize::from(queues) + 1;
        Self {
            sq: vec![None; count],
            cq: vec![None; count],
            shadow: None,
            active: Vec::with_capacity(count),
            refused_tails: vec![None; count],
            refused_heads: vec![None; count],
        }
    }

    /// The submission queues that exist.
    pub(crate) fn active(&self) -> &[Active] {
        &self.active
    }

    /// A queue was found to have nothing to take while its doorbell was `tail`; or else [`Active::UNSEEN`].
    pub(crate) fn set_seen(&mut self, at: usize, sqid: u16, tail: u32) {
        if let Some(active) = self.active.get_mut(at).filter(|active| active.sqid == sqid) {
            active.seen = tail;
        }
    }

    /// Forgets every translation: the guest's memory map changed.
    pub(crate) fn forget_translations(&mut self) {
        self.sq.fill(None);
        self.cq.fill(None);
        self.shadow = None;
    }
}

impl Controller {
    /// A submission queue's state. `sqid` is one of ours, never a guest's unchecked number.
    pub(crate) fn sq(&self, sqid: u16) -> &SqState {
        &self.state.sq[usize::from(sqid)]
    }

    /// A completion queue's state.
    pub(crate) fn cq(&self, cqid: u16) -> &CqState {
        &self.state.cq[usize::from(cqid)]
    }

    /// Whether the guest may name this submission queue.
    pub(crate) fn sq_exists(&self, sqid: u16) -> bool {
        sqid <= self.config.queues && self.sq(sqid).entries.get() != 0
    }

    /// Whether the guest may name this completion queue.
    pub(crate) fn cq_exists(&self, cqid: u16) -> bool {
        cqid <= self.config.queues && self.cq(cqid).entries.get() != 0
    }

    /// Makes a completion queue; the caller has checked every argument.
    pub(crate) fn create_cq(&mut self, cqid: u16, base: u64, entries: u32, vector: Option<u16>) {
        self.doorbells.words[usize::from(cqid) * 2 + 1].store(0, Ordering::Relaxed);
        // Before the queue is there: who takes over meanwhile finds it made, and does not do this again.
        self.write_shadow(usize::from(cqid) * 2 + 1, 0);
        let cq = self.cq(cqid);
        cq.base.set(base);
        cq.rewind();
        cq.head.set(0);
        cq.promised.set(0);
        cq.users.set(0);
        cq.vector.set(vector.unwrap_or(0));
        cq.interrupts.set(u16::from(vector.is_some()));
        // What an earlier queue left in the memory may have this one's phase tag, and a guest may clear it only after this: who takes
        // over meanwhile must not find it posted here.
        if let Ok(first) = self.memory.translate(GuestAddress(base), Cqe::SIZE as u64, Access::Write) {
            first.store_u16(STATUS_AT, 0);
        }
        state::commit();
        cq.entries.set(entries);
        self.caches.cq[usize::from(cqid)] = None;
        self.caches.refused_heads[usize::from(cqid)] = None;
    }

    /// Makes a submission queue; the caller has checked every argument.
    pub(crate) fn create_sq(&mut self, sqid: u16, base: u64, entries: u32, cqid: u16, priority: u8) {
        self.doorbells.words[usize::from(sqid) * 2].store(0, Ordering::Relaxed);
        // As for a completion queue.
        self.write_shadow(usize::from(sqid) * 2, 0);
        let sq = self.sq(sqid);
        sq.base.set(base);
        sq.head.set(0);
        sq.in_flight.set(0);
        sq.cq.set(cqid);
        sq.priority.set(priority);
        sq.deleting.set(0);
        state::commit();
        sq.entries.set(entries);
        let cq = self.cq(cqid);
        cq.users.set(cq.users.get() + 1);
        self.caches.sq[usize::from(sqid)] = None;
        self.caches.refused_tails[usize::from(sqid)] = None;
        self.refresh_active();
    }

    /// Removes a submission queue that has nothing in flight.
    pub(crate) fn remove_sq(&mut self, sqid: u16) {
        let sq = self.sq(sqid);
        sq.entries.set(0);
        let cq = self.cq(sq.cq.get());
        cq.users.set(cq.users.get().saturating_sub(1));
        self.leave_space();
        self.refresh_active();
    }

    /// Removes a completion queue that no submission queue uses.
    pub(crate) fn remove_cq(&mut self, cqid: u16) {
        self.cq(cqid).entries.set(0);
    }

    /// Removes every queue at once (controller reset).
    pub(crate) fn remove_all_queues(&mut self) {
        for sq in &self.state.sq {
            sq.entries.set(0);
        }
        for cq in &self.state.cq {
            cq.entries.set(0);
        }
        self.caches.forget_translations();
        self.leave_space();
        self.refresh_active();
    }

    /// Rebuilds the list of queues to look at from the state.
    pub(crate) fn refresh_active(&mut self) {
        self.caches.active.clear();
        let count = usize::from(self.config.queues) + 1;
        // Those of a card look for themselves.
        let count = if self.port.is_some() { 1 } else { count };
        let exists = |(_, sq): &(usize, &SqState)| sq.entries.get() != 0;
        let ids = self.state.sq.iter().take(count).enumerate().filter(exists);
        self.caches.active.extend(ids.map(|(id, _)| Active { sqid: id as u16, seen: Active::UNSEEN }));
    }

    /// Entries the guest has added since the head; `None` when there are none or the doorbell is refused.
    pub(crate) fn pending_entries(&mut self, sqid: u16) -> Option<u32> {
        let tail = self.doorbell(usize::from(sqid) * 2, sqid);
        self.pending_up_to(sqid, tail)
    }

    /// As [`Self::pending_entries`], where the doorbell has just been read.
    pub(crate) fn pending_up_to(&mut self, sqid: u16, tail: u32) -> Option<u32> {
        let (head, entries) = (self.sq(sqid).head.get(), self.sq(sqid).entries.get());
        if tail == head || entries == 0 || self.sq(sqid).deleting.get() != 0 {
            return None;
        }
        if tail >= entries {
            if self.caches.refused_tails[usize::from(sqid)].replace(tail) != Some(tail) {
                self.invalid_doorbell(sqid, tail);
            }
            return None;
        }
        // Acquire, on our side of the submission race: the tail was read before this, the entries are read after. The
        // guest's side writes the entries, then the doorbell.
        fence(Ordering::Acquire);
        Some(if tail > head { tail - head } else { entries - head + tail })
    }

    /// A doorbell's value: from the shadow page where the guest uses one (never for the admin queue), else from the page. A guest that
    /// uses the shadow page leaves old values in the other one: where the first is not mapped, nothing new is known.
    #[inline]
    pub(crate) fn doorbell(&mut self, index: usize, qid: u16) -> u32 {
        if self.state.registers.shadow_doorbells.get() != 0 && qid != 0 {
            return match self.shadow_segments() {
                Some((shadow, _)) => shadow.load_u32(index * 4),
                None if index.is_multiple_of(2) => self.sq(qid).head.get(),
                None => self.cq(qid).head.get(),
            };
        }
        self.doorbells.words[index].load(Ordering::Relaxed)
    }

    /// The shadow doorbell and event index pages, translated.
    pub(crate) fn shadow_segments(&mut self) -> Option<(Segment, Segment)> {
        if self.caches.shadow.is_none() {
            let len = (u64::from(self.config.queues) + 1) * 8;
            let registers = &self.state.registers;
            let shadow = GuestAddress(registers.shadow_doorbells.get());
            let events = GuestAddress(registers.event_indexes.get());
            let translate = |addr, access| self.memory.translate(addr, len, access).ok();
            self.caches.shadow = translate(shadow, Access::Write).zip(translate(events, Access::Write));
        }
        self.caches.shadow
    }

    fn write_shadow(&mut self, index: usize, value: u32) {
        if self.state.registers.shadow_doorbells.get() != 0
            && let Some((shadow, events)) = self.shadow_segments()
        {
            shadow.store_u32(index * 4, value);
            events.store_u32(index * 4, value);
        }
    }

    /// Completions that can still be promised for commands of this queue. A first command of a pair that is held gets its
    /// place back before its second is taken.
    pub(crate) fn completion_room(&mut self, sqid: u16) -> u32 {
        let cqid = self.sq(sqid).cq.get();
        let kept = self.io_held_by(sqid);
        let room = self.free_entries(cqid);
        if room > kept {
            return room - kept;
        }
        // Only a queue that looks full is worth reading the guest's head for.
        let head = self.doorbell(usize::from(cqid) * 2 + 1, cqid);
        let cq = self.cq(cqid);
        if head < cq.entries.get() {
            cq.head.set(head);
        } else if self.caches.refused_heads[usize::from(cqid)].replace(head) != Some(head) {
            self.invalid_doorbell(cqid, head);
        }
        self.free_entries(cqid).saturating_sub(kept)
    }

    /// How far the guest has consumed a completion queue, as its doorbell says now.
    pub(crate) fn consumed(&mut self, cqid: u16) -> u32 {
        let head = self.doorbell(usize::from(cqid) * 2 + 1, cqid);
        let cq = self.cq(cqid);
        if head < cq.entries.get() {
            cq.head.set(head);
        }
        cq.head.get()
    }

    fn free_entries(&self, cqid: u16) -> u32 {
        let cq = self.cq(cqid);
        let (entries, head, tail) = (cq.entries.get(), cq.head.get(), cq.tail());
        let used = if tail >= head { tail - head } else { entries - head + tail };
        (entries.saturating_sub(1)).saturating_sub(used).saturating_sub(cq.promised.get())
    }

    /// Copies the next entry out and counts it as accepted. `None`: the queue's memory is gone, and the controller failed.
    pub(crate) fn accept(&mut self, sqid: u16) -> Option<(Sqe, CommandToken)> {
        let head = self.sq(sqid).head.get();
        let Some(sqe) = self.read_entry(sqid, head) else {
            self.fail("a submission queue's memory is not mapped");
            return None;
        };
        let record = self.put_on_record(sqid, head, &sqe)?;
        let epoch = self.state.epoch.get();
        Some((sqe, CommandToken { sqid, cid: sqe.cid.0, epoch, subject: Subject::of(&sqe), record }))
    }

    /// Counts the command at `index` as accepted, promises its completion, and puts it on record. `None`: there is no record free,
    /// and the command is still in the queue.
    pub(crate) fn put_on_record(&mut self, sqid: u16, index: u32, sqe: &Sqe) -> Option<u16> {
        let next = index + 1;
        let record = self.records.take(sqe, sqid, index)?;
        self.accept_up_to(sqid, if next == self.sq(sqid).entries.get() { 0 } else { next });
        self.records.accept(record);
        Some(record)
    }

    /// Counts the one command before `head` as accepted, and promises its completion.
    fn accept_up_to(&mut self, sqid: u16, head: u32) {
        let sq = self.sq(sqid);
        let cq = self.cq(sq.cq.get());
        cq.promised.set(cq.promised.get() + 1);
        sq.in_flight.set(sq.in_flight.get() + 1);
        state::commit();
        sq.head.set(head);
        self.in_flight += 1;
    }

    /// The memory of a submission queue and of its completion queue, where each lies in one piece.
    pub(crate) fn ring_segments(&mut self, sqid: u16) -> Option<(Segment, Segment)> {
        let sq = &self.state.sq[usize::from(sqid)];
        let cqid = usize::from(sq.cq.get());
        if let (Some(sq), Some(cq)) = (self.caches.sq[usize::from(sqid)], self.caches.cq[cqid]) {
            return Some((sq, cq));
        }
        let cq = &self.state.cq[cqid];
        let ring = |base: u64, entries: u32, size: usize, access| {
            self.memory.translate(GuestAddress(base), u64::from(entries) * size as u64, access).ok()
        };
        self.caches.sq[usize::from(sqid)] = ring(sq.base.get(), sq.entries.get(), Sqe::SIZE, Access::Read);
        self.caches.cq[cqid] = ring(cq.base.get(), cq.entries.get(), Cqe::SIZE, Access::Write);
        self.caches.sq[usize::from(sqid)].zip(self.caches.cq[cqid])
    }

    fn read_entry(&mut self, sqid: u16, index: u32) -> Option<Sqe> {
        let sq = &self.state.sq[usize::from(sqid)];
        let cache = &mut self.caches.sq[usize::from(sqid)];
        let bytes = u64::from(sq.entries.get()) * Sqe::SIZE as u64;
        if cache.is_none() {
            *cache = self.memory.translate(GuestAddress(sq.base.get()), bytes, Access::Read).ok();
        }
        let offset = u64::from(index) * Sqe::SIZE as u64;
        match cache {
            Some(segment) => Some(segment.read_value(offset as usize)),
            // A queue over several regions: entry by entry.
            None => self.memory.read_value(GuestAddress(sq.base.get().checked_add(offset)?)).ok(),
        }
    }

    /// Writes a completion into its queue and asks for the interrupt.
    pub(crate) fn post(&mut self, token: CommandToken, completion: Completion) {
        let sq = self.sq(token.sqid);
        let (cqid, sqhd) = (sq.cq.get(), sq.head.get() as u16);
        let cq = self.cq(cqid);
        let (index, phase) = (cq.tail(), cq.phase());
        let cqe = Cqe {
            dw0: completion.dw0,
            dw1: 0,
            sqhd,
            sqid: QueueId(token.sqid),
            cid: CommandId(token.cid),
            status: StatusField::new(completion.status, phase),
        };
        if !self.write_entry(cqid, index, &cqe) {
            self.fail("a completion queue's memory is not mapped");
            if token.record == records::NONE {
                // It is in flight no more, and so must not be in the list of those that wait.
                self.settle_event_request(token.cid, completion);
            }
            return;
        }
        // From here on it is completed: what follows is done by a successor too, which finds the entry (`records.rs`).
        match token.record {
            records::NONE => self.settle_event_request(token.cid, completion),
            record => self.records.release(record),
        }
        state::commit();
        let cq = self.cq(cqid);
        cq.advance();
        state::commit();
        cq.promised.set(cq.promised.get().saturating_sub(1));
        let sq = self.sq(token.sqid);
        sq.in_flight.set(sq.in_flight.get().saturating_sub(1));
        let vector = (self.cq(cqid).interrupts.get() != 0).then(|| self.cq(cqid).vector.get());
        self.traces(token.sqid).completed(token.sqid, token.cid, completion.status.code().into_bits(), vector);
        if let Some(vector) = vector {
            self.interrupts.pend(vector, 1);
        }
    }

    fn write_entry(&mut self, cqid: u16, index: u32, cqe: &Cqe) -> bool {
        let cq = &self.state.cq[usize::from(cqid)];
        let cache = &mut self.caches.cq[usize::from(cqid)];
        let bytes = u64::from(cq.entries.get()) * Cqe::SIZE as u64;
        if cache.is_none() {
            *cache = self.memory.translate(GuestAddress(cq.base.get()), bytes, Access::Write).ok();
        }
        let offset = index as usize * Cqe::SIZE;
        if let Some(segment) = cache {
            segment.publish(offset, cqe, 12);
            return true;
        }
        let Some(addr) = cq.base.get().checked_add(offset as u64) else { return false };
        match self.memory.translate(GuestAddress(addr), Cqe::SIZE as u64, Access::Write) {
            Ok(segment) => {
                segment.publish(0, cqe, 12);
                true
            }
            Err(_) => false,
        }
    }

    /// Whether a doorbell of a submission queue has moved since there was nothing to take, or was never looked at.
    pub(crate) fn has_news(&mut self) -> bool {
        (0..self.caches.active.len()).any(|at| {
            let Active { sqid, seen } = self.caches.active[at];
            self.doorbell(usize::from(sqid) * 2, sqid) != seen
        })
    }

    /// Whether any queue has entries to take, and room for their completions: the last look before sleeping. A queue without
    /// room is looked at again when the guest has moved its head, which the doorbell tells as well.
    pub(crate) fn can_take(&mut self) -> bool {
        (0..self.caches.active.len()).any(|i| {
            let Some(&Active { sqid, .. }) = self.caches.active.get(i) else { return false };
            self.pending_entries(sqid).is_some() && self.completion_room(sqid) > 0
        })
    }
}
