//! Asynchronous events (Base 5.1.2) and Abort (Base 5.1.1).
//!
//! An event type that was reported stays silent until the host reads its log page, which then tells everything. Until an
//! event finds a request, it waits in a slot of its type: one report covers all events of a type.

use std::sync::Arc;

use millrace_nvme_spec::{
    admin::{AbortCdw10, AbortResult, AsyncEvent, AsyncEventDw0, AsyncEventType},
    command::{Cqe, NamespaceId, Sqe},
    features::AsyncEventFeature,
    log::{LogId, ReservationNotificationType},
    opcode::AdminOpcode,
    status::Status,
};

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        errors::Subject,
        namespace::Namespace,
        records,
        registers::Phase,
        state::{self, EVENT_REQUESTS},
        status::Completion,
    },
    Progress, done,
};

/// Marks a slot that holds an event; the bit is reserved in the completion's dword 0.
const PENDING: u32 = 1 << 31;

/// The event type that reading a log page clears.
fn cleared_by(lid: LogId) -> Option<AsyncEventType> {
    match lid {
        LogId::ERROR => Some(AsyncEventType::ERROR),
        LogId::SMART => Some(AsyncEventType::SMART),
        LogId::CHANGED_NAMESPACES => Some(AsyncEventType::NOTICE),
        LogId::RESERVATION => Some(AsyncEventType::IO_COMMAND_SPECIFIC),
        _ => None,
    }
}

impl Controller {
    /// Identifiers of the requests that wait.
    pub(crate) fn event_requests(&self) -> impl Iterator<Item = u16> {
        let events = &self.state.events;
        events.requests.iter().take(events.outstanding.get() as usize).map(state::Cell::get)
    }

    /// Asynchronous Event Request: waits for an event. Its place in the completion queue is lent to other commands meanwhile,
    /// or a small queue would fill up with promises.
    pub(super) fn async_event_request(&mut self, token: CommandToken) -> Progress {
        let events = &self.state.events;
        let count = events.outstanding.get();
        let Some(place) = events.requests.get(count as usize) else {
            return Err(Status::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED);
        };
        place.set(token.cid);
        state::commit();
        events.outstanding.set(count + 1);
        self.records.release(token.record);
        let cq = self.cq(0);
        cq.promised.set(cq.promised.get().saturating_sub(1));
        Ok(Outcome::Held)
    }

    /// Completes a request, which takes it out of the list. `false`: the completion queue has no room for it now.
    fn finish_request(&mut self, at: u32, completion: Completion) -> bool {
        if self.completion_room(0) == 0 {
            return false;
        }
        let cid = self.state.events.requests[at as usize].get();
        let cq = self.cq(0);
        cq.promised.set(cq.promised.get() + 1);
        let (epoch, subject) = (self.state.epoch.get(), Subject::of_opcode(AdminOpcode::ASYNC_EVENT_REQUEST));
        self.complete(CommandToken { sqid: 0, cid, epoch, subject, record: records::NONE }, completion);
        true
    }

    /// A request's completion entry is posted, or cannot be: it leaves the list, and its event is told.
    pub(crate) fn settle_event_request(&self, cid: u16, completion: Completion) {
        let Some(at) = self.event_requests().position(|waiting| waiting == cid) else { return };
        let events = &self.state.events;
        let last = events.outstanding.get() - 1;
        if completion.status.is_success() {
            let kind = completion.dw0 & 7;
            events.masked.set(events.masked.get() | 1 << kind);
            if let Some(slot) = events.pending.get(kind as usize) {
                slot.set(0);
            }
        }
        // Between any two of these stores the list has one identifier twice, which `mend_event_requests` puts right.
        for i in at..last as usize {
            events.requests[i].set(events.requests[i + 1].get());
        }
        state::commit();
        events.outstanding.set(last);
    }

    /// After the last worker's death: a completion entry of no command on record was posted by it.
    pub(crate) fn forget_event_request(&self, cid: u16, cqe: &Cqe) {
        self.settle_event_request(cid, Completion { dw0: cqe.dw0, status: cqe.status() });
    }

    /// After the last worker's death: it may have ended while a request left the list.
    pub(crate) fn mend_event_requests(&self) {
        let mut ids: Vec<u16> = Vec::new();
        for id in self.event_requests() {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        let events = &self.state.events;
        events.requests.iter().zip(&ids).for_each(|(place, id)| place.set(*id));
        events.outstanding.set(ids.len() as u32);
    }

    /// Whether a command is an event request that waits in the list.
    pub(crate) fn is_waiting_event_request(&self, sqe: &Sqe) -> bool {
        sqe.admin_opcode() == AdminOpcode::ASYNC_EVENT_REQUEST && self.event_requests().any(|waiting| waiting == sqe.cid.0)
    }

    /// Whether an event and a request may have found each other.
    #[inline]
    pub(super) fn has_events(&self) -> bool {
        let events = &self.state.events;
        events.outstanding.get() != 0 && events.pending.iter().fold(0, |any, slot| any | slot.get()) != 0
    }

    /// Completes waiting requests with pending events. Returns work done.
    pub(super) fn deliver_events(&mut self) -> usize {
        let mut work = 0;
        for kind in 0..self.state.events.pending.len() {
            if self.phase != Phase::Ready {
                break;
            }
            let events = &self.state.events;
            let pending = events.pending[kind].get();
            if pending == 0 || events.outstanding.get() == 0 || events.masked.get() & 1 << kind != 0 {
                continue;
            }
            if !self.finish_request(0, Completion::with_result(pending & !PENDING)) {
                break;
            }
            work += 1;
        }
        work
    }

    /// An event has happened.
    fn raise(&self, event: AsyncEvent) {
        let events = &self.state.events;
        let kind = usize::from(event.kind.0);
        // While its type is masked, the log page that the host has yet to read tells it.
        if events.masked.get() & 1 << kind == 0
            && let Some(slot) = events.pending.get(kind)
        {
            slot.set(event.dw0().into_bits() | PENDING);
        }
    }

    /// The host has read a log page: what it told is no longer pending, and may be reported again when it happens again.
    pub(super) fn clear_events(&self, lid: LogId) {
        let Some(kind) = cleared_by(lid) else { return };
        let events = &self.state.events;
        events.masked.set(events.masked.get() & !(1 << kind.0));
        let slot = &events.pending[usize::from(kind.0)];
        if AsyncEventDw0::from_bits(slot.get() & !PENDING).lid() == lid {
            slot.set(0);
        }
    }

    /// No event, no request: after a reset.
    pub(super) fn reset_events(&self) {
        let events = &self.state.events;
        events.outstanding.set(0);
        events.masked.set(0);
        events.pending.iter().for_each(|slot| slot.set(0));
    }

    /// Asynchronous Event Configuration as it stands.
    pub(super) fn event_configuration(&self) -> AsyncEventFeature {
        AsyncEventFeature::from_bits(self.state.features.async_events.get())
    }

    /// Critical warnings that are present and reported by events.
    pub(super) fn reported_warnings(&self) -> u8 {
        self.critical_warning().into_bits() & self.event_configuration().critical_warnings().into_bits()
    }

    /// After a change of thresholds or of the events' configuration: warnings that were not reported before make an event.
    pub(super) fn warnings_changed(&self, before: u8) {
        if self.reported_warnings() & !before != 0 {
            // The composite temperature is the only one that can change.
            self.raise(AsyncEvent::TEMPERATURE_THRESHOLD);
        }
    }

    /// A doorbell was written with a value outside its queue, or for a queue that does not exist.
    pub(crate) fn invalid_doorbell(&mut self, qid: u16, _value: u32) {
        let exists = self.sq_exists(qid) || self.cq_exists(qid);
        let event = if exists { AsyncEvent::INVALID_DOORBELL_VALUE } else { AsyncEvent::INVALID_DOORBELL_REGISTER };
        self.log_doorbell_error(qid);
        self.raise(event);
    }

    /// What is below a volume has failed. Of the kinds of event there are, only transient errors make no host reset the controller.
    #[cold]
    pub(crate) fn medium_failed(&self) {
        self.raise(AsyncEvent::TRANSIENT_INTERNAL_ERROR);
    }

    /// A namespace was attached, detached, resized or formatted other than by this guest's command.
    pub(crate) fn namespace_changed(&mut self, nsid: u32) {
        if let Some(word) = self.state.logs.changed_namespaces.get(nsid as usize / 64) {
            word.set(word.get() | 1 << (nsid % 64));
        }
        if self.event_configuration().namespace_attribute() {
            self.raise(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
        }
    }

    /// Another host changed the reservations of a namespace. `notify` names the hosts that are told, and what.
    pub(crate) fn reservation_notice(&mut self, namespace: &Arc<Namespace>, notify: &[([u8; 16], u8)]) {
        if let Some(more) = namespace.notices.arrived() {
            self.host.reservation_notice(namespace, &more);
        }
        let host = self.state.features.host_id.each_ref().map(state::Cell::get);
        let shown = self.namespaces.attached().filter(|attached| Arc::ptr_eq(&attached.namespace, namespace));
        for nsid in shown.map(|attached| attached.nsid) {
            // Bit n of the mask is of type n.
            let mask = self.state.features.namespaces.get(nsid as usize).map_or(0, |n| n.reservation_mask.get());
            let ours = notify.iter().filter(|(told, kind)| *told == host && mask & 1 << (kind & 7) == 0);
            for &(_, kind) in ours {
                self.log_notice(NamespaceId(nsid), ReservationNotificationType(kind));
                self.raise(AsyncEvent::RESERVATION_LOG_PAGE_AVAILABLE);
            }
        }
    }

    /// Abort: only event requests can be, for everything else is on its way and finishes soon.
    pub(super) fn abort(&mut self, sqe: &Sqe) -> Outcome {
        let cdw10 = AbortCdw10::from_bits(sqe.cdw10);
        let at = if cdw10.sqid().is_admin() { self.event_requests().position(|cid| cid == cdw10.cid().0) } else { None };
        let aborted =
            at.is_some_and(|at| self.finish_request(at as u32, Completion { dw0: 0, status: Status::ABORT_REQUESTED }));
        done(AbortResult::new().with_not_aborted(!aborted).into_bits())
    }
}

/// Asynchronous Event Request Limit (AERL).
pub(super) const AERL_Z: u8 = EVENT_REQUESTS as u8 - 1;
