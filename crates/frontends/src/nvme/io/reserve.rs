//! The reservation commands (Base 7.5 to 7.8) over the state machine in `reservation.rs`.

use std::{rc::Rc, sync::Arc};

use millrace_block::BlockError;
use millrace_engine::{Launch, TaskSlot};
use millrace_memory::{Access, Segment};
use millrace_nvme_spec::{
    command::Sqe,
    reservation::{
        AcquireCdw10, AcquireData, ChangePersistence, RegisterCdw10, RegisterData, ReleaseCdw10, ReleaseData, ReportCdw11,
    },
    status::Status,
};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        data,
        namespace::{Attached, Namespace},
        reservation::{Notices, Reservations},
        status::Completion,
    },
    task::{Finish, wait},
};

impl Controller {
    /// Reservation Register.
    pub(super) fn reservation_register(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
    ) -> Result<Outcome, Status> {
        let attached = self.reservable(sqe)?;
        let fields = RegisterCdw10::from_bits(sqe.cdw10);
        // There is no persistence through power loss, as Identify and Reservation Report say. It may be asked for, as the Linux kernel always does,
        // whose own target lets it, too; refused, its block layer could reserve nothing.
        if !matches!(fields.cptpl(), ChangePersistence::NO_CHANGE | ChangePersistence::CLEAR | ChangePersistence::SET) {
            return Err(self.invalid(10, 30));
        }
        let data: RegisterData = self.reservation_data(sqe)?;
        let (host, cntlid, session) = (self.host_key(), self.config.cntlid, self.config.session);
        self.change_reservations(slot, token, attached, |reservations| {
            let register = if session { Reservations::register_for_session } else { Reservations::register };
            register(reservations, host, cntlid, fields.rrega(), fields.iekey(), &data)
        })
    }

    /// Reservation Acquire.
    pub(super) fn reservation_acquire(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
    ) -> Result<Outcome, Status> {
        let attached = self.reservable(sqe)?;
        let fields = AcquireCdw10::from_bits(sqe.cdw10);
        if fields.iekey() {
            return Err(self.invalid(10, 3));
        }
        let data: AcquireData = self.reservation_data(sqe)?;
        let host = self.host_key();
        self.change_reservations(slot, token, attached, |reservations| {
            reservations.acquire(host, fields.racqa(), fields.rtype(), &data)
        })
    }

    /// Reservation Release.
    pub(super) fn reservation_release(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
    ) -> Result<Outcome, Status> {
        let attached = self.reservable(sqe)?;
        let fields = ReleaseCdw10::from_bits(sqe.cdw10);
        if fields.iekey() {
            return Err(self.invalid(10, 3));
        }
        let data: ReleaseData = self.reservation_data(sqe)?;
        let host = self.host_key();
        self.change_reservations(slot, token, attached, |reservations| {
            reservations.release(host, fields.rrela(), fields.rtype(), data.crkey)
        })
    }

    /// Reservation Report. Where whoever made a change was reset before the writes from before it had ended, it waits for them in his place: he
    /// learns by it that the change is made.
    pub(super) fn reservation_report(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
    ) -> Result<Outcome, Status> {
        let attached = self.reserving(sqe)?;
        let extended = ReportCdw11::from_bits(sqe.cdw11).eds();
        if extended != self.host_key().is_extended() {
            // Not an error that is final: the host asks once more, for the other format.
            return Ok(Outcome::Done(Completion { dw0: 0, status: Status::HOST_ID_INCONSISTENT_FORMAT }));
        }
        let asked = (u64::from(sqe.cdw10) + 1) * 4;
        self.check_size(asked)?;
        // An SGL describes all that was asked for; nothing beyond the report's end is written (Base 7.8, NUMD).
        self.resolve(sqe, asked, Access::Write)?;
        self.counters.other_commands += 1;
        self.count_moved(asked);
        let (sink, segments) = (&self.sink, &self.segments);
        let launched = slot.run(|cx| {
            if !attached.namespace.gate.owes_drain() {
                report_into(segments, &attached.namespace, extended);
                return Launch::Done(Completion::SUCCESS);
            }
            let attached = cx.scratch.keep(attached);
            let segments = cx.scratch.copy_slice(segments);
            let finish = Finish::of_reader(attached, sink, token);
            wait(cx, async move {
                // It changes nothing, so it may end early: its host asks again.
                if !attached.namespace.gate.drain(cx, || finish.goes_on()).await {
                    return finish.end(Err(BlockError::CalledOff));
                }
                report_into(segments, &attached.namespace, extended);
                finish.end(Ok(()));
            })
        });
        Ok(self.outcome(token, launched))
    }

    /// The namespace of a command about its reservations: one that can have some, as Identify says (RESCAP).
    fn reserving(&self, sqe: &Sqe) -> Result<Rc<Attached>, Status> {
        let attached = self.namespace(sqe.nsid)?;
        if attached.namespace.is_shared() { Ok(Rc::clone(attached)) } else { Err(self.invalid(1, 0)) }
    }

    /// The namespace of a command that changes its reservations. A guest may change them where it only reads (Base 8.1.16: write protection
    /// does not concern them); a session that only reads is a program that is to keep nobody from anything.
    fn reservable(&self, sqe: &Sqe) -> Result<Rc<Attached>, Status> {
        let attached = self.reserving(sqe)?;
        if self.config.session && attached.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry());
        }
        Ok(attached)
    }

    /// A session's client is gone, or a namespace is taken from it: whoever registered there through this controller is no registrant
    /// any more, and holds nothing. A guest's registrations stay, as the specification wants it.
    pub(crate) fn end_registrations(&self, namespace: &Arc<Namespace>) {
        if !self.config.session {
            return;
        }
        let ended = namespace.reservations().end_session(self.config.cntlid);
        namespace.registrations_ended(ended, &*self.host);
    }

    /// As [`Self::end_registrations`], of all namespaces.
    pub(crate) fn end_all_registrations(&self) {
        for (_, allocated) in self.namespaces.allocated() {
            self.end_registrations(&allocated.namespace);
        }
    }

    /// Whoever registered through this controller without a Host Identifier was its host until the reset that ends, or has ended: the host that
    /// comes after it is another one (Base 5.1.25.1.28), and has nothing of that.
    pub(crate) fn end_nameless(&self, namespace: &Arc<Namespace>) {
        let ended = namespace.reservations().end_controller(self.io.unique);
        namespace.registrations_ended(ended, &*self.host);
    }

    /// As [`Self::end_nameless`], of all namespaces.
    pub(crate) fn end_all_nameless(&self) {
        for (_, allocated) in self.namespaces.allocated() {
            self.end_nameless(&allocated.namespace);
        }
    }

    fn reservation_data<T: FromBytes + IntoBytes>(&mut self, sqe: &Sqe) -> Result<T, Status> {
        self.resolve(sqe, size_of::<T>() as u64, Access::Read)?;
        Ok(data::copy_value(&self.segments))
    }

    /// Carries out a change, tells the other registrants, and completes when no write of before it is under way any more:
    /// a host that was shut out cannot write after whoever shut it out was told so. (Its reads may still finish. For Preempt
    /// and Abort this stands for the abort, which is best effort.)
    fn change_reservations(
        &mut self,
        slot: TaskSlot<'_>,
        token: CommandToken,
        attached: Rc<Attached>,
        change: impl FnOnce(&mut Reservations) -> Result<Notices, Status>,
    ) -> Result<Outcome, Status> {
        let namespace = &attached.namespace;
        let (records, at, by) = (&self.records, token.record, self.io.unique);
        let (host, cntlid) = (self.host_key(), self.config.cntlid);
        let change = |reservations: &mut Reservations| {
            let notices = change(reservations)?;
            reservations.goes_on_by(&host, cntlid);
            Ok(notices)
        };
        let notices = {
            let mut ledger = namespace.reservations();
            // The worker before this one may have made the change, and ended while the command waited.
            let made = self.repeats && records.numbered(at).is_some_and(|number| ledger.has(by, number));
            let notices =
                if made { Notices::new() } else { ledger.change(by, |number| records.number(at, number), change)? };
            namespace.reservations_changed();
            notices
        };
        if let Some(notices) = namespace.notices.add(&notices) {
            self.host.reservation_notice(namespace, &notices);
        }
        self.counters.other_commands += 1;
        let sink = &self.sink;
        let launched = slot.run(|cx| {
            let attached = cx.scratch.keep(attached);
            let finish = Finish::new(attached, sink, token);
            wait(cx, async move {
                // Other guests' writes may take for ever, and this guest may be reset meanwhile: then who asks for the report waits for them.
                // Who only waits for this command's end gets no early one: the change is made, and its host must not take an error for a
                // change that is not.
                let drained = attached.namespace.gate.drain(cx, || finish.is_wanted()).await;
                finish.end(if drained { Ok(()) } else { Err(BlockError::CalledOff) });
            })
        });
        Ok(self.outcome(token, launched))
    }
}

/// What is registered and reserved now, to the guest.
fn report_into(segments: &[Segment], namespace: &Namespace, extended: bool) {
    let report = namespace.reservations().now().report(extended);
    data::copy_out(segments, &report);
}
