//! One namespace's reservations as they outlive the worker, and who changed them last.
//!
//! A command that changes reservations waits, on record, until writes of before have finished. Whether it made its change before the
//! worker ended is seen by a number: each controller counts its changes here, in the order in which its commands were accepted, and
//! puts the number on record first.

use millrace_nvme_spec::{reservation::ReservationType, status::Status};
use zerocopy::FromBytes;

use super::{
    super::{lasting::Lasting, state::Cell},
    Held, HostKey, MOST, Notices, Registrant, Reservations,
};

/// Controllers whose changes are counted; of more, those that changed something last.
const COUNTED: usize = 256;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    reservations: Reservations,
    /// Per controller the number of its changes; the one that made the last change comes last.
    counts: Vec<(u64, u64)>,
    lasting: Lasting<ReservationState>,
}

/// The layout.
#[derive(FromBytes)]
#[repr(C)]
pub(crate) struct ReservationState {
    generation: Cell<u32>,
    /// Type of the reservation; 0: none is held.
    kind: Cell<u8>,
    reserved: Cell<u8>,
    registrants: Cell<u16>,
    counted: Cell<u64>,
    holder: RegistrantState,
    list: [RegistrantState; MOST],
    counts: [[Cell<u64>; 2]; COUNTED],
}

#[derive(FromBytes)]
#[repr(C)]
struct RegistrantState {
    id: [Cell<u8>; 16],
    controller: Cell<u64>,
    key: Cell<u64>,
    extended: Cell<u16>,
    cntlid: Cell<u16>,
    /// 1: registered through a session's controller.
    session: Cell<u32>,
}

impl RegistrantState {
    fn host(&self) -> HostKey {
        HostKey {
            id: self.id.each_ref().map(Cell::get),
            extended: self.extended.get() != 0,
            controller: self.controller.get(),
        }
    }

    fn set_host(&self, host: &HostKey) {
        for (to, from) in self.id.iter().zip(host.id) {
            to.set(from);
        }
        self.extended.set(u16::from(host.extended));
        self.controller.set(host.controller);
    }
}

impl ReservationState {
    fn store(&self, reservations: &Reservations, counts: &[(u64, u64)]) {
        self.generation.set(reservations.generation);
        self.kind.set(reservations.held.map_or(0, |held| held.kind.0));
        if let Some(held) = reservations.held {
            self.holder.set_host(&held.holder);
        }
        // There are at most `MOST`.
        self.registrants.set(reservations.registrants.len() as u16);
        for (to, from) in self.list.iter().zip(&reservations.registrants) {
            to.set_host(&from.host);
            to.key.set(from.key);
            to.cntlid.set(from.cntlid);
            to.session.set(u32::from(from.session));
        }
        self.counted.set(counts.len() as u64);
        for ([controller, count], from) in self.counts.iter().zip(counts) {
            controller.set(from.0);
            count.set(from.1);
        }
    }

    fn load(&self) -> (Reservations, Vec<(u64, u64)>) {
        let registrant = |from: &RegistrantState| Registrant {
            host: from.host(),
            cntlid: from.cntlid.get(),
            key: from.key.get(),
            session: from.session.get() != 0,
        };
        let registrants = self.list.iter().take(usize::from(self.registrants.get())).map(registrant).collect();
        let kind = ReservationType(self.kind.get());
        let held = (kind != ReservationType::NONE).then(|| Held { kind, holder: self.holder.host() });
        let counted = usize::try_from(self.counted.get()).unwrap_or(COUNTED);
        let counts = self.counts.iter().take(counted).map(|[controller, count]| (controller.get(), count.get()));
        (Reservations { registrants, held, generation: self.generation.get() }, counts.collect())
    }
}

impl Ledger {
    /// What the worker before this one left, and the next one finds.
    pub(crate) fn over(lasting: Lasting<ReservationState>) -> Self {
        let (reservations, counts) = lasting.last().map(ReservationState::load).unwrap_or_default();
        Self { reservations, counts, lasting }
    }

    /// The namespace is one guest's own, and takes no commands about reservations: nobody could release those that an older version let it have.
    pub(crate) fn forget(mut self) -> Self {
        if !self.reservations.registrants.is_empty() || self.reservations.held.is_some() {
            self.reservations = Reservations::default();
            self.store();
        }
        self
    }

    /// The reservations as they are.
    pub(crate) fn now(&self) -> &Reservations {
        &self.reservations
    }

    /// Makes a controller's change. `note` is told its number before it can outlive this process.
    pub(crate) fn change(
        &mut self,
        controller: u64,
        note: impl FnOnce(u64),
        change: impl FnOnce(&mut Reservations) -> Result<Notices, Status>,
    ) -> Result<Notices, Status> {
        let notices = change(&mut self.reservations)?;
        let number = self.count_of(controller) + 1;
        note(number);
        self.counts.retain(|(other, _)| *other != controller);
        if self.counts.len() == COUNTED {
            self.counts.remove(0);
        }
        self.counts.push((controller, number));
        self.store();
        Ok(notices)
    }

    /// A session's controller goes, and what was registered through it. It is no command's change, and can be made twice: none is counted.
    pub(crate) fn end_session(&mut self, cntlid: u16) -> Option<Notices> {
        let notices = self.reservations.end_session(cntlid)?;
        self.store();
        Some(notices)
    }

    /// A controller goes for good, and what was registered by the host that it was. Its changes stay counted: numbers only grow.
    pub(crate) fn end_controller(&mut self, controller: u64) -> Option<Notices> {
        let notices = self.reservations.end_controller(controller)?;
        self.store();
        Some(notices)
    }

    /// The same of all controllers that are not there any more.
    pub(crate) fn end_others(&mut self, is_there: impl Fn(u16) -> bool) -> Option<Notices> {
        let notices = self.reservations.end_others(is_there)?;
        self.store();
        Some(notices)
    }

    /// See [`Reservations::let_go`].
    pub(crate) fn let_go(&mut self, is_there: impl Fn(u16) -> bool) {
        if self.reservations.let_go(is_there) {
            self.store();
        }
    }

    fn store(&mut self) {
        let Self { reservations, counts, lasting } = self;
        lasting.replace(|state| state.store(reservations, counts));
    }

    /// Whether a controller has made its change of this number.
    pub(crate) fn has(&self, controller: u64, number: u64) -> bool {
        number <= self.count_of(controller)
    }

    fn count_of(&self, controller: u64) -> u64 {
        self.counts.iter().find(|(other, _)| *other == controller).map_or(0, |(_, count)| *count)
    }
}

#[cfg(test)]
impl Ledger {
    pub(crate) fn lasting(&self) -> &Lasting<ReservationState> {
        &self.lasting
    }
}
