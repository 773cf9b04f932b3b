//! I/O queues: creation, deletion (Base 5.2.1 to 5.2.4) and the shadow doorbells (Base 5.2.5).

use millrace_memory::{Access, GuestAddress, GuestMemory};
use millrace_nvme_spec::{
    admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11, DeleteQueueCdw10},
    command::{Cqe, QueueId, Sqe},
    features::NumberOfQueuesFeature,
    status::Status,
};

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        errors::parameter,
        state,
        status::Completion,
    },
    Progress, done,
};

/// One of the two kinds of queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Submission,
    Completion,
}

impl Controller {
    /// Create I/O Completion Queue (Base 5.2.1).
    pub(super) fn create_io_cq(&mut self, sqe: &Sqe) -> Progress {
        let cdw11 = CreateCqCdw11::from_bits(sqe.cdw11);
        let (cqid, entries) = self.check_create(sqe, Kind::Completion, cdw11.pc())?;
        if cdw11.iv() >= self.config.vectors {
            return Err(Status::INVALID_INTERRUPT_VECTOR);
        }
        let base = self.queue_base(sqe, entries, Kind::Completion)?;
        if self.cq_exists(cqid) {
            let same = (self.cq(cqid).base.get(), self.cq(cqid).entries.get()) == (base, entries);
            return if same { Ok(done(0)) } else { Err(Status::INVALID_QUEUE_IDENTIFIER) };
        }
        self.create_cq(cqid, base, entries, cdw11.ien().then_some(cdw11.iv()));
        if let Some(port) = &mut self.port {
            port.begin_cq(cqid);
        }
        Ok(done(0))
    }

    /// Create I/O Submission Queue (Base 5.2.2).
    pub(super) fn create_io_sq(&mut self, sqe: &Sqe) -> Progress {
        let cdw11 = CreateSqCdw11::from_bits(sqe.cdw11);
        let (sqid, entries) = self.check_create(sqe, Kind::Submission, cdw11.pc())?;
        let cqid = cdw11.cqid();
        // On a card, completion queue n is submission queue n's.
        if !self.is_granted(cqid, Kind::Completion) || self.port.is_some() && cqid.0 != sqid {
            return Err(Status::INVALID_QUEUE_IDENTIFIER);
        }
        if !self.cq_exists(cqid.0) {
            return Err(Status::COMPLETION_QUEUE_INVALID);
        }
        let base = self.queue_base(sqe, entries, Kind::Submission)?;
        if self.sq_exists(sqid) {
            let same = (self.sq(sqid).base.get(), self.sq(sqid).entries.get()) == (base, entries);
            return if same { Ok(done(0)) } else { Err(Status::INVALID_QUEUE_IDENTIFIER) };
        }
        // A card's engine begins at the first entry, where the guest would go on after the last one that it has read.
        if self.port.as_ref().is_some_and(|port| port.is_used(cqid.0)) {
            return Err(Status::COMPLETION_QUEUE_INVALID);
        }
        self.create_sq(sqid, base, entries, cqid.0, cdw11.qprio().0);
        self.call_off_deleted();
        self.begin_on_card(sqid);
        Ok(done(0))
    }

    /// Whether an I/O queue of this identifier is within what Number of Queues granted.
    fn is_granted(&self, qid: QueueId, kind: Kind) -> bool {
        let granted = NumberOfQueuesFeature::from_bits(self.state.features.queues.get());
        let last_z = if kind == Kind::Completion { granted.ncq_z() } else { granted.nsq_z() };
        // Identifier 0 is the admin queue's; n + 1 I/O queues end with identifier n + 1.
        !qid.is_admin() && qid.0 - 1 <= last_z && qid.0 <= self.config.queues
    }

    /// What both kinds have in common. Returns the identifier and the number of entries.
    fn check_create(&self, sqe: &Sqe, kind: Kind, contiguous: bool) -> Result<(u16, u32), Status> {
        let cdw10 = CreateQueueCdw10::from_bits(sqe.cdw10);
        let qid = cdw10.qid();
        let exists = match kind {
            Kind::Submission => self.sq_exists(qid.0),
            Kind::Completion => self.cq_exists(qid.0),
        };
        // A command that is carried out again may find its own queue: the caller looks.
        if !self.is_granted(qid, kind) || exists && !self.repeats {
            return Err(Status::INVALID_QUEUE_IDENTIFIER);
        }
        let entries = u32::from(cdw10.qsize_z()) + 1;
        let (size_log2, required) = match kind {
            Kind::Submission => (self.cc().iosqes(), Sqe::SIZE_LOG2),
            Kind::Completion => (self.cc().iocqes(), Cqe::SIZE_LOG2),
        };
        if entries < 2 || entries > self.config.queue_entries || size_log2 != required {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        // CAP.CQR is set.
        if contiguous { Ok((qid.0, entries)) } else { Err(self.invalid(11, 0)) }
    }

    /// Where the queue lies: PRP1, page-aligned, all of it in memory that we can reach as we must.
    fn queue_base(&self, sqe: &Sqe, entries: u32, kind: Kind) -> Result<u64, Status> {
        let base = sqe.dptr.prp1;
        if !base.is_multiple_of(self.page_size()) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        let (entry, access) = match kind {
            Kind::Submission => (Sqe::SIZE, Access::Read),
            Kind::Completion => (Cqe::SIZE, Access::Write),
        };
        if is_reachable(&self.memory, base, u64::from(entries) * entry as u64, access) {
            Ok(base)
        } else {
            Err(self.refuse(parameter::DPTR, Status::INVALID_FIELD))
        }
    }

    /// Delete I/O Completion Queue (Base 5.2.3).
    pub(super) fn delete_io_cq(&mut self, sqe: &Sqe) -> Progress {
        let cqid = DeleteQueueCdw10::from_bits(sqe.cdw10).qid();
        if self.repeats && !cqid.is_admin() && !self.cq_exists(cqid.0) {
            return Ok(done(0));
        }
        if cqid.is_admin() || !self.cq_exists(cqid.0) {
            return Err(Status::INVALID_QUEUE_IDENTIFIER);
        }
        if self.cq(cqid.0).users.get() != 0 {
            return Err(Status::INVALID_QUEUE_DELETION);
        }
        self.remove_cq(cqid.0);
        Ok(done(0))
    }

    /// Delete I/O Submission Queue (Base 5.2.4): takes no more commands at once, and completes when those in flight have.
    pub(super) fn delete_io_sq(&mut self, token: CommandToken, sqe: &Sqe) -> Progress {
        let sqid = DeleteQueueCdw10::from_bits(sqe.cdw10).qid();
        if self.repeats && !sqid.is_admin() && !self.sq_exists(sqid.0) {
            return Ok(done(0));
        }
        if sqid.is_admin() || !self.sq_exists(sqid.0) || self.sq(sqid.0).deleting.get() != 0 {
            return Err(Status::INVALID_QUEUE_IDENTIFIER);
        }
        // The first command of a fused pair would wait for its second for ever.
        self.abort_held(sqid.0);
        if let Some(port) = &mut self.port {
            port.stop(sqid.0);
        }
        if self.is_sq_idle(sqid.0) {
            self.remove_sq(sqid.0);
            self.call_off_deleted();
            return Ok(done(0));
        }
        self.sq(sqid.0).deleting.set(1);
        self.admin.deletions.push((token, sqid.0));
        self.call_off_deleted();
        Ok(Outcome::Held)
    }

    /// Requests are not told apart by their queues: those in flight are called off once no queue goes on, and commands that go piece by
    /// piece end at the next one. To be looked at whenever a queue comes or goes.
    fn call_off_deleted(&mut self) {
        let goes_on = |sqid| self.sq_exists(sqid) && self.sq(sqid).deleting.get() == 0;
        let all = !self.admin.deletions.is_empty() && !(1..=self.config.queues).any(goes_on);
        self.sink.delete_all(all);
        self.lifecycle.called_off |= all;
    }

    /// Removes queues whose last command has completed.
    pub(super) fn finish_deletions(&mut self) -> usize {
        let mut work = 0;
        while let Some(at) = self.admin.deletions.iter().position(|&(_, sqid)| self.is_sq_idle(sqid)) {
            let (token, sqid) = self.admin.deletions.swap_remove(at);
            self.remove_sq(sqid);
            self.complete(token, Completion::SUCCESS);
            work += 1;
        }
        if work > 0 {
            self.call_off_deleted();
        }
        work
    }

    /// Doorbell Buffer Config (Base 5.2.5).
    pub(super) fn doorbell_buffer_config(&mut self, sqe: &Sqe) -> Progress {
        let page_size = self.page_size();
        let (shadow, events) = (sqe.dptr.prp1, sqe.dptr.prp2);
        let usable = |base: u64| {
            base != 0 && base.is_multiple_of(page_size) && is_reachable(&self.memory, base, page_size, Access::Write)
        };
        if !usable(shadow) || !usable(events) || shadow == events {
            return Err(self.refuse(parameter::DPTR, Status::INVALID_FIELD));
        }
        // Before they are the ones that count: a worker that takes over carries the command out again, and finds the positions there.
        self.fill_shadow_doorbells([shadow, events]);
        // Forgets the pages of an earlier configuration.
        self.caches.forget_translations();
        self.state.registers.event_indexes.set(events);
        state::commit();
        self.state.registers.shadow_doorbells.set(shadow);
        Ok(done(0))
    }

    /// Gives the queues that exist their positions in pages that are to be the shadow doorbells and event indexes. They are in the shadow doorbells of
    /// before, if there are any: what was rung then is old.
    fn fill_shadow_doorbells(&mut self, pages: [u64; 2]) {
        let len = (u64::from(self.config.queues) + 1) * 8;
        let pages = pages.map(|page| self.memory.translate(GuestAddress(page), len, Access::Write));
        let [Ok(shadow), Ok(events)] = pages else { return };
        for qid in 1..=self.config.queues {
            for (exists, index) in [(self.sq_exists(qid), qid * 2), (self.cq_exists(qid), qid * 2 + 1)] {
                if exists {
                    let value = self.doorbell(usize::from(index), qid);
                    shadow.store_u32(usize::from(index) * 4, value);
                    events.store_u32(usize::from(index) * 4, value);
                }
            }
        }
    }
}

/// Whether all of a range lies in regions that allow the access.
pub(crate) fn is_reachable(memory: &GuestMemory, base: u64, len: u64, access: Access) -> bool {
    let mut done = 0;
    while done < len {
        let Some(at) = base.checked_add(done) else { return false };
        match memory.translate_some(GuestAddress(at), len - done, access) {
            Ok(segment) => done += segment.len() as u64,
            Err(_) => return false,
        }
    }
    true
}
