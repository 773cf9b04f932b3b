//! Reservations (Base 8.1.22): who may read and write a shared namespace. A pure state machine.
//!
//! ```text
//!   register ─► registrant ─ acquire ─► holder ─ release ─► registrant ─ unregister ─► nobody
//!                   └───────── preempt: takes the reservation over, and unregisters others ─────┘
//! ```
//!
//! It survives the worker (`ledger.rs`), but neither power loss nor a restart of the daemon (PTPL is not supported, and Identify
//! says so).

mod ledger;

pub(crate) use self::ledger::Ledger;
#[cfg(test)]
pub(crate) use self::ledger::ReservationState;
use millrace_nvme_spec::{
    command::ControllerId,
    log::ReservationNotificationType as Notice,
    reservation::{
        AcquireAction, AcquireData, RegisterAction, RegisterData, RegisteredController, RegisteredControllerExtended,
        RegistrantStatus, ReleaseAction, ReservationStatus, ReservationStatusExtended, ReservationType,
    },
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

/// Registrants of one namespace at most.
const MOST: usize = 256;

/// So many may register through one controller while there is any place; more only while half of all are free. A guest may call itself by as many
/// names as it likes, and is not to keep the others from registering by itself, without which they could not preempt it.
const ASSURED: usize = 8;

/// In place of a controller's identifier: it is there no more.
const GONE: u16 = 0xffff;

/// What a host may do with a namespace's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights(pub(crate) u8);

impl Rights {
    pub(crate) const NONE: Self = Self(0);
    /// Commands that read (Read, Compare, Verify, a copy's source).
    pub(crate) const READ: Self = Self(1);
    /// Commands that change data, and Flush.
    pub(crate) const WRITE: Self = Self(2);
    pub(crate) const ALL: Self = Self(3);

    #[inline]
    pub(crate) const fn contain(self, needed: Self) -> bool {
        self.0 & needed.0 == needed.0
    }
}

/// Who a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostKey {
    /// Host Identifier; one of 64 bits is in the first eight bytes.
    id: [u8; 16],
    /// The identifier has 128 bits.
    extended: bool,
    /// Tells hosts without an identifier apart: each is its controller's own.
    controller: u64,
}

impl HostKey {
    /// The host of a controller. `controller` is unique in this process and not 0.
    pub(crate) fn new(id: [u8; 16], extended: bool, controller: u64) -> Self {
        Self { id, extended, controller: if id == [0; 16] { controller } else { 0 } }
    }

    /// Whether its identifier has 128 bits.
    pub(crate) fn is_extended(&self) -> bool {
        self.extended
    }
}

/// Notifications that a change causes: host identifier and type.
pub(crate) type Notices = Vec<([u8; 16], u8)>;

#[derive(Clone, Copy, Debug)]
struct Registrant {
    host: HostKey,
    /// The controller it registered through, or [`GONE`].
    cntlid: u16,
    key: u64,
    /// That controller is a session's: it registers for no longer than it is there.
    session: bool,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    kind: ReservationType,
    /// Who acquired it. Every registrant holds a reservation of an All Registrants type.
    holder: HostKey,
}

/// Registrants, holder and type of one namespace's reservation.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    registrants: Vec<Registrant>,
    held: Option<Held>,
    generation: u32,
}

impl Reservations {
    /// What a host may do.
    pub(crate) fn rights(&self, host: &HostKey) -> Rights {
        let Some(held) = self.held else { return Rights::ALL };
        if self.holds(host) || (held.kind.admits_registrants() && self.find(host).is_some()) {
            Rights::ALL
        } else if held.kind.is_write_exclusive() {
            Rights::READ
        } else {
            Rights::NONE
        }
    }

    /// Reservation Register (Base 7.6).
    pub(crate) fn register(
        &mut self,
        host: HostKey,
        cntlid: u16,
        action: RegisterAction,
        ignore_key: bool,
        data: &RegisterData,
    ) -> Result<Notices, Status> {
        let known = self.find(&host).map(|r| r.key);
        let notices = match action {
            RegisterAction::REGISTER => self.add(host, cntlid, data.nrkey)?,
            // Where the key is ignored, it need not be there either (IEKEY): who is no registrant has nothing to lose, and becomes one.
            RegisterAction::UNREGISTER | RegisterAction::REPLACE if !ignore_key && known != Some(data.crkey) => {
                return Err(Status::RESERVATION_CONFLICT);
            }
            RegisterAction::UNREGISTER => self.unregister(&host),
            RegisterAction::REPLACE => match self.registrants.iter_mut().find(|r| r.host == host) {
                Some(registrant) => {
                    registrant.key = data.nrkey;
                    Notices::new()
                }
                None => self.add(host, cntlid, data.nrkey)?,
            },
            _ => return Err(Status::INVALID_FIELD),
        };
        self.generation = self.generation.wrapping_add(1);
        Ok(notices)
    }

    /// A host gives a command through this controller: where the one that it registered through is gone, this one takes its place.
    pub(crate) fn goes_on_by(&mut self, host: &HostKey, cntlid: u16) {
        if let Some(back) = self.registrants.iter_mut().find(|r| r.host == *host && r.cntlid == GONE) {
            back.cntlid = cntlid;
        }
    }

    /// As [`Self::register`], through a session's controller: who is new then goes with [`Self::end_session`].
    pub(crate) fn register_for_session(
        &mut self,
        host: HostKey,
        cntlid: u16,
        action: RegisterAction,
        ignore_key: bool,
        data: &RegisterData,
    ) -> Result<Notices, Status> {
        let known = self.find(&host).is_some();
        let notices = self.register(host, cntlid, action, ignore_key, data)?;
        if !known && let Some(new) = self.registrants.iter_mut().find(|r| r.host == host) {
            new.session = true;
        }
        Ok(notices)
    }

    /// A session's controller goes: so does all that was registered through it, under whichever identifier. `None`: nothing was.
    pub(crate) fn end_session(&mut self, cntlid: u16) -> Option<Notices> {
        self.end(|r| r.session && r.cntlid == cntlid)
    }

    /// A controller, known by this number, goes: so does all that was registered by the host that it was, one without an identifier. `None`:
    /// nothing was.
    pub(crate) fn end_controller(&mut self, controller: u64) -> Option<Notices> {
        self.end(|r| r.host.controller == controller)
    }

    /// Only those controllers are there that `is_there` says are: so what was registered by hosts that were others goes, those without an
    /// identifier. `None`: nothing was.
    pub(crate) fn end_others(&mut self, is_there: impl Fn(u16) -> bool) -> Option<Notices> {
        self.end(|r| r.host.controller != 0 && !is_there(r.cntlid))
    }

    /// Only those controllers are there that `is_there` says are. Who registered through another one under an identifier stays registered, for it may
    /// have more controllers, or come back; but it makes room where there is none. Whether that is anybody new.
    pub(crate) fn let_go(&mut self, is_there: impl Fn(u16) -> bool) -> bool {
        let mut any = false;
        let lasting = self.registrants.iter_mut().filter(|r| !r.session && r.host.controller == 0 && r.cntlid != GONE);
        for registrant in lasting.filter(|r| !is_there(r.cntlid)) {
            (registrant.cntlid, any) = (GONE, true);
        }
        any
    }

    fn end(&mut self, goes: impl Fn(&Registrant) -> bool) -> Option<Notices> {
        let hosts: Vec<HostKey> = self.registrants.iter().filter(|r| goes(r)).map(|r| r.host).collect();
        if hosts.is_empty() {
            return None;
        }
        self.generation = self.generation.wrapping_add(1);
        Some(hosts.iter().flat_map(|host| self.unregister(host)).collect())
    }

    fn add(&mut self, host: HostKey, cntlid: u16, key: u64) -> Result<Notices, Status> {
        if let Some(known) = self.find(&host) {
            return if known.key == key { Ok(Notices::new()) } else { Err(Status::RESERVATION_CONFLICT) };
        }
        if self.registrants.iter().any(|r| r.host.extended != host.extended) {
            return Err(Status::HOST_ID_INCONSISTENT_FORMAT);
        }
        let own = self.registrants.iter().filter(|r| r.cntlid == cntlid).count();
        if own >= ASSURED && self.registrants.len() >= MOST / 2 {
            return Err(Status::NOT_ENOUGH_RESOURCES);
        }
        let notices = if self.registrants.len() >= MOST { self.make_room()? } else { Notices::new() };
        self.registrants.push(Registrant { host, cntlid, key, session: false });
        Ok(notices)
    }

    /// Takes out one whose controller is gone, and who is not the one who holds the reservation.
    fn make_room(&mut self) -> Result<Notices, Status> {
        let holder = self.held.filter(|held| !held.kind.is_all_registrants()).map(|held| held.holder);
        let goes = |r: &Registrant| r.cntlid == GONE && Some(r.host) != holder;
        let at = self.registrants.iter().position(goes).ok_or(Status::NOT_ENOUGH_RESOURCES)?;
        let gone = self.registrants.remove(at);
        Ok(notice(&gone, Notice::REGISTRATION_PREEMPTED).into_iter().collect())
    }

    /// Takes a registrant out. Its reservation goes with it, which the remaining registrants are told where the type let
    /// them in.
    fn unregister(&mut self, host: &HostKey) -> Notices {
        self.registrants.retain(|r| r.host != *host);
        match self.held {
            Some(held) if self.has_lost_holder(held) => {
                self.held = None;
                if held.kind.admits_registrants() {
                    self.notices(Notice::RESERVATION_RELEASED, host)
                } else {
                    Notices::new()
                }
            }
            _ => Notices::new(),
        }
    }

    fn has_lost_holder(&self, held: Held) -> bool {
        if held.kind.is_all_registrants() { self.registrants.is_empty() } else { self.find(&held.holder).is_none() }
    }

    /// Reservation Acquire (Base 7.5).
    pub(crate) fn acquire(
        &mut self,
        host: HostKey,
        action: AcquireAction,
        kind: ReservationType,
        data: &AcquireData,
    ) -> Result<Notices, Status> {
        if !(ReservationType::WRITE_EXCLUSIVE.0..=ReservationType::EXCLUSIVE_ACCESS_ALL_REGISTRANTS.0).contains(&kind.0) {
            return Err(Status::INVALID_FIELD);
        }
        match action {
            AcquireAction::ACQUIRE => {
                self.registered(&host, data.crkey)?;
                match self.held {
                    None => self.held = Some(Held { kind, holder: host }),
                    Some(held) if held.kind == kind && self.holds(&host) => {}
                    Some(_) => return Err(Status::RESERVATION_CONFLICT),
                }
                Ok(Notices::new())
            }
            AcquireAction::PREEMPT | AcquireAction::PREEMPT_AND_ABORT => {
                self.registered(&host, data.crkey)?;
                let notices = self.preempt(host, kind, data.prkey)?;
                self.generation = self.generation.wrapping_add(1);
                Ok(notices)
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Preempt (Base 8.1.22.7).
    fn preempt(&mut self, host: HostKey, kind: ReservationType, key: u64) -> Result<Notices, Status> {
        let Some(held) = self.held else { return self.unregister_key(host, key) };
        let all = held.kind.is_all_registrants();
        let holder_key = self.find(&held.holder).map(|r| r.key);
        let takes_over = if all { key == 0 } else { holder_key == Some(key) };
        if !takes_over {
            // A key of 0 names no registrant except where everybody holds the reservation.
            return if key == 0 { Err(Status::INVALID_FIELD) } else { self.unregister_key(host, key) };
        }
        let goes = |r: &Registrant| r.host != host && (all || r.key == key);
        let mut notices: Notices = Vec::new();
        notices
            .extend(self.registrants.iter().filter(|r| goes(r)).filter_map(|r| notice(r, Notice::REGISTRATION_PREEMPTED)));
        self.registrants.retain(|r| !goes(r));
        self.held = Some(Held { kind, holder: host });
        if kind != held.kind {
            notices.extend(self.notices(Notice::RESERVATION_RELEASED, &host));
        }
        Ok(notices)
    }

    /// Unregisters every host with a key, the one that asks included.
    fn unregister_key(&mut self, host: HostKey, key: u64) -> Result<Notices, Status> {
        let mut notices: Notices = Vec::new();
        let goes = |r: &Registrant| r.key == key;
        if !self.registrants.iter().any(goes) {
            return Err(Status::RESERVATION_CONFLICT);
        }
        let others = self.registrants.iter().filter(|r| goes(r) && r.host != host);
        notices.extend(others.filter_map(|r| notice(r, Notice::REGISTRATION_PREEMPTED)));
        self.registrants.retain(|r| !goes(r));
        if self.held.is_some_and(|held| self.has_lost_holder(held)) {
            self.held = None;
        }
        Ok(notices)
    }

    /// Reservation Release (Base 7.7).
    pub(crate) fn release(
        &mut self,
        host: HostKey,
        action: ReleaseAction,
        kind: ReservationType,
        key: u64,
    ) -> Result<Notices, Status> {
        match action {
            ReleaseAction::RELEASE => {
                self.registered(&host, key)?;
                let Some(held) = self.held.filter(|_| self.holds(&host)) else { return Ok(Notices::new()) };
                if held.kind != kind {
                    return Err(Status::INVALID_FIELD);
                }
                self.held = None;
                let told = held.kind.admits_registrants();
                Ok(if told { self.notices(Notice::RESERVATION_RELEASED, &host) } else { Notices::new() })
            }
            ReleaseAction::CLEAR => {
                self.registered(&host, key)?;
                let notices = self.notices(Notice::RESERVATION_PREEMPTED, &host);
                self.registrants.clear();
                self.held = None;
                self.generation = self.generation.wrapping_add(1);
                Ok(notices)
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Reservation Report's data (Base 7.8), for hosts with identifiers of the length asked for.
    pub(crate) fn report(&self, extended: bool) -> Vec<u8> {
        let mut status = ReservationStatus::new_zeroed();
        status.generation = self.generation;
        status.rtype = self.held.map_or(ReservationType::NONE, |held| held.kind);
        // There are at most `MOST`.
        status.registrants = (self.registrants.len() as u16).into();
        let mut report = Vec::new();
        if extended {
            let mut header = ReservationStatusExtended::new_zeroed();
            header.status = status;
            report.extend_from_slice(header.as_bytes());
        } else {
            report.extend_from_slice(status.as_bytes());
        }
        for registrant in &self.registrants {
            let rcsts = RegistrantStatus::new().with_holds(self.holds(&registrant.host));
            let (cntlid, id) = (ControllerId(registrant.cntlid), registrant.host.id);
            if extended {
                let mut entry = RegisteredControllerExtended::new_zeroed();
                (entry.cntlid, entry.rcsts, entry.rkey, entry.hostid) = (cntlid, rcsts, registrant.key, id);
                report.extend_from_slice(entry.as_bytes());
            } else {
                let mut entry = RegisteredController::new_zeroed();
                let hostid = u64::from_le_bytes(id.first_chunk().copied().unwrap_or_default());
                (entry.cntlid, entry.rcsts, entry.rkey, entry.hostid) = (cntlid, rcsts, registrant.key, hostid);
                report.extend_from_slice(entry.as_bytes());
            }
        }
        report
    }

    fn find(&self, host: &HostKey) -> Option<&Registrant> {
        self.registrants.iter().find(|r| r.host == *host)
    }

    /// Whether the host is a registrant with this key.
    fn registered(&self, host: &HostKey, key: u64) -> Result<(), Status> {
        self.find(host).filter(|r| r.key == key).map(|_| ()).ok_or(Status::RESERVATION_CONFLICT)
    }

    fn holds(&self, host: &HostKey) -> bool {
        // Whoever acquired a reservation of all registrants may have unregistered since.
        self.held.is_some_and(
            |held| {
                if held.kind.is_all_registrants() { self.find(host).is_some() } else { held.holder == *host }
            },
        )
    }

    /// A notice to every registrant but one.
    fn notices(&self, kind: Notice, except: &HostKey) -> Notices {
        self.registrants.iter().filter(|r| r.host != *except).filter_map(|r| notice(r, kind)).collect()
    }
}

/// Hosts without an identifier cannot be named, and so not be told.
fn notice(registrant: &Registrant, kind: Notice) -> Option<([u8; 16], u8)> {
    (registrant.host.controller == 0).then_some((registrant.host.id, kind.0))
}

#[cfg(test)]
mod tests;
