//! What outlives the worker, and how the next one goes on.
//!
//! ```text
//!   kept for a device:  LISTENER  STATE (state.rs)  RECORDS (records.rs)  DOORBELLS
//!   and for its client: CONNECTION  CLIENT (ClientState)  MEMORY…  VECTOR…  PIN  PIN_UNMASK
//! ```
//!
//! What goes with the client is let go of in one step when it leaves: a worker that finds no connection finds no client, and brings
//! the controller back to power-on, as its predecessor was about to.
//!
//! Rules of order: a descriptor is put before it is said to be there, and said to be gone before it is dropped. A request of the
//! client that was cut short is in the socket still, and is handled again: whatever of it was done must not be in its way.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    rc::Rc,
    sync::Arc,
};

use millrace_keeper::{Held, Key, Kind, Layout, Link};
use millrace_memory::{GuestAddress, GuestMemory, MAX_REGIONS, MapError, Protection, Shared};
use millrace_vfio_user::{Capabilities, Errno, Keep, Resumed};
use zerocopy::FromBytes;

use super::{
    Host,
    card::Port,
    config::{Config, DoorbellMode},
    controller::Controller,
    records::Records,
    registers::Reset,
    state::{self, Cell, DeviceState, VECTORS},
};
use crate::eventfd::Eventfd;

/// Version of [`ClientState`]'s layout.
const CLIENT_LAYOUT: Layout = Layout { name: "client", oldest: 1, newest: 1 };
/// What devices and namespaces leave to the next worker, beside descriptors; of the page of doorbells the specification is the layout.
pub fn layouts() -> [Layout; 4] {
    [state::layout(), super::records::LAYOUT, CLIENT_LAYOUT, super::lasting::LAYOUT]
}

/// Why a device is no longer served.
pub(crate) const OUT_OF_SERVICE: &str = "it has ended the process that serves it twice in a row";
/// Workers in a row that a device may end.
const STRIKES: u32 = 2;
/// A worker that served so long has not ended by what its predecessor ended by.
const FORGIVEN_MILLIS: u64 = 60_000;
/// Set in a region's flags: the region is there.
const VALID: u32 = 1;
const READ: u32 = 2;
const WRITE: u32 = 4;
/// It has a descriptor.
const FILE: u32 = 8;
/// Set beside a message's identifier and command.
const HANDLING: u64 = 1 << 63;

/// A device's place with the keeper.
#[derive(Clone, Debug)]
pub struct Kept {
    link: Arc<Link>,
    owner: [u8; 16],
}

/// A region of the client's memory.
#[derive(Debug, FromBytes)]
#[repr(C)]
struct RegionState {
    address: Cell<u64>,
    size: Cell<u64>,
    offset: Cell<u64>,
    /// [`VALID`] and others; stored last.
    flags: Cell<u32>,
    reserved: Cell<u32>,
}

/// What is remembered of a client.
#[derive(Debug, FromBytes)]
#[repr(C)]
struct ClientState {
    version: Cell<u32>,
    /// 1 when the version was negotiated.
    negotiated: Cell<u32>,
    /// The client's capabilities then.
    max_msg_fds: Cell<u64>,
    pgsizes: Cell<u64>,
    max_data_xfer_size: Cell<u32>,
    max_dma_maps: Cell<u32>,
    write_multiple: Cell<u32>,
    /// 1 while the client wants to know which pages are written.
    logging: Cell<u32>,
    /// The request being handled: [`HANDLING`], command << 16, message id; or 0.
    handling: Cell<u64>,
    /// Replies that were sent when it began.
    replies: Cell<u64>,
    /// Vectors masked by the client.
    masked: [Cell<u64>; VECTORS / 64],
    /// Whether the pin has masked itself.
    pin_masked: Cell<u32>,
    /// Regions in use lie below this.
    regions: Cell<u32>,
    memory: [RegionState; MAX_REGIONS],
}

/// Logged, and nothing more: without its keeper this process ends soon.
fn said(result: Result<(), millrace_keeper::LinkError>) {
    if let Err(error) = result {
        tracing::error!(%error, "the keeper could not be told");
    }
}

impl Kept {
    /// The place of the device with this identifier.
    pub fn new(link: Arc<Link>, owner: [u8; 16]) -> Self {
        Self { link, owner }
    }

    fn key(&self, kind: Kind) -> Key {
        Key::of(self.owner, kind)
    }

    pub(crate) fn put(&self, kind: Kind, fd: BorrowedFd<'_>) {
        said(self.link.put(self.key(kind), fd));
    }

    /// What the device's last worker left.
    pub(crate) fn take(&self, kind: Kind) -> Option<Held> {
        self.link.take(self.key(kind))
    }

    /// Whether the last worker left a client that nobody took yet.
    fn has_client(&self) -> bool {
        self.link.is_held(self.key(Kind::CONNECTION))
    }

    /// The client is gone.
    pub(crate) fn drop_client(&self) {
        said(self.link.drop_kinds(self.owner, Kind::CONNECTION, Kind::LAST_OF_CLIENT));
        for kind in Kind::CONNECTION.0..=Kind::LAST_OF_CLIENT.0 {
            drop(self.link.take_all(self.owner, Kind(kind)));
        }
    }

    /// The state that the last worker left, if it is this device's.
    pub(crate) fn take_state(&self, config: &Config) -> Option<Shared<DeviceState>> {
        let held = self.take(Kind::STATE)?;
        let why = match Shared::<DeviceState>::from_file(held.fd) {
            Ok(state) if state.magic.get() != state::MAGIC || !state.is_understood() => "it was left by another version",
            Ok(state) if state.shape.each_ref().map(Cell::get) != shape(config) => "the device has other settings now",
            Ok(state) => return Some(state),
            Err(_) => "it has another size",
        };
        tracing::error!(device = config.name, why, "the device's state cannot be gone on with: its guest loses it");
        None
    }

    /// The version that a state region is to have now.
    fn state_version(&self) -> u16 {
        self.link.version_of(&state::layout())
    }

    /// Whether the worker before this one ended by a fault of its own, and how long it had served.
    pub(crate) fn fault(&self) -> Option<u64> {
        let predecessor = self.link.predecessor()?;
        predecessor.was_faulty().then_some(predecessor.served_millis)
    }
}

/// By which number reservations know the controller with this identifier: the same for every worker, and for no other controller.
pub(crate) fn lasting_number(cntlid: u16) -> u64 {
    1 << 32 | u64::from(cntlid)
}

/// What of the settings a state depends on.
pub(crate) fn shape(config: &Config) -> [u32; 8] {
    let shared = u32::from(config.doorbells == DoorbellMode::Shared);
    let (queues, vectors) = (u32::from(config.queues), u32::from(config.vectors));
    [queues, config.queue_entries, vectors, config.namespaces, u32::from(config.mdts), shared, 0, 0]
}

/// A part of what the last worker left, or a line in the log.
fn understood<T>(config: &Config, what: &str, left: io::Result<T>) -> Option<T> {
    let told = |error: &io::Error| {
        tracing::error!(device = config.name, what, %error, "what was left of the device cannot be gone on with: its guest loses it");
    };
    left.inspect_err(told).ok()
}

impl Controller {
    /// A controller whose guest does not notice when this process ends: goes on with what the last worker left, or begins. The
    /// latter's client, if it had one, comes with what is to be known for its connection.
    pub(crate) fn kept(config: Config, host: Arc<dyn Host>, kept: &Kept) -> io::Result<(Self, Option<TakenClient>)> {
        let state = kept.take_state(&config);
        let doorbells = kept.take(Kind::DOORBELLS);
        let doorbells = doorbells.and_then(|held| understood(&config, "doorbells", Shared::from_file(held.fd)));
        let records = kept.take(Kind::RECORDS);
        let records = records.and_then(|held| understood(&config, "records", Records::from_file(held.fd)));
        let Some(((state, doorbells), records)) = state.zip(doorbells).zip(records) else {
            if kept.link.is_on_trial() && kept.has_client() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "what the old binary left of it is not understood"));
            }
            kept.drop_client();
            let mut controller = Self::new(config, host)?;
            controller.join_card().map_err(io::Error::other)?;
            controller.state.convert(kept.state_version());
            controller.kept = Some(kept.clone());
            controller.io.set_unique(lasting_number(controller.config.cntlid));
            kept.put(Kind::STATE, controller.state.as_fd());
            kept.put(Kind::RECORDS, controller.records.as_fd());
            controller.put_doorbells();
            return Ok((controller, None));
        };
        let mut controller = Self::over(config, host, state, doorbells, records);
        controller.join_card().map_err(io::Error::other)?;
        controller.kept = Some(kept.clone());
        controller.io.set_unique(lasting_number(controller.config.cntlid));
        let taken = Client::take(kept);
        let mapped =
            taken.as_ref().map(|(client, ..)| client.map_regions(&mut controller.memory, controller.port.as_deref_mut()));
        if let Some((client, ..)) = &taken {
            controller.interrupts.take_over(client.take_wiring());
            controller.remember(client);
            if client.state.logging.get() != 0 {
                controller.resume_logging();
            }
        }
        controller.count_strike(kept.fault());
        controller.state.convert(kept.state_version());
        if let Some(takeovers) = controller.state.count_takeover() {
            tracing::debug!(device = controller.config.name, takeovers, "takes over");
        }
        controller.resume_kept(taken.is_some());
        controller.lost_card();
        if let Some(Err(error)) = mapped {
            tracing::error!(device = controller.config.name, %error, "the guest's memory could not be mapped again");
            controller.fail("the guest's memory could not be mapped again");
        }
        if controller.is_out_of_service() {
            controller.fail(OUT_OF_SERVICE);
        }
        if taken.is_none() {
            // It left while nobody was there, or its leaving was cut short.
            kept.drop_client();
            if !controller.awaits_guest() {
                controller.leave_migration();
                controller.reset(Reset::PowerOn);
                controller.renew_doorbells()?;
            }
        }
        Ok((controller, taken))
    }

    /// Goes on where the worker before this one stood, whose client is still there or not.
    fn resume_kept(&mut self, has_client: bool) {
        self.resume();
        self.resume_migration();
        if has_client {
            // Those, too, whose vectors the client had just taken away, to wire them anew.
            self.raise_all();
            // That worker may have ended when the last of the memory was there, and before it went on.
            self.release();
        }
    }

    /// The worker before this one may have ended between a change of the operator's and the notice of it: its guest is to look again at all that
    /// it has, and at what it was told of and that was not stored.
    pub(crate) fn tell_changes(&mut self) {
        for nsid in 1..=self.namespaces.largest() {
            let lost = self.was_attached(nsid) && self.namespaces.allocation(nsid).is_none();
            if lost {
                self.note_attached(nsid, false);
            }
            if lost || self.namespaces.get(nsid).is_some() {
                self.namespace_changed(nsid);
            }
        }
    }

    /// The state is to be left as a worker of this version understands it, or the newest one when nobody else takes over.
    pub(crate) fn convert_state(&self, version: Option<u16>) {
        let newest = self.kept.as_ref().map_or_else(|| state::layout().newest, Kept::state_version);
        self.state.convert(version.unwrap_or(newest));
    }

    /// Remembers whether a namespace is attached.
    pub(crate) fn note_attached(&self, nsid: u32, attached: bool) {
        if let Some(word) = self.state.attached.get(nsid as usize / 64) {
            let bit = 1 << (nsid % 64);
            word.set(if attached { word.get() | bit } else { word.get() & !bit });
        }
    }

    /// Whether a namespace was attached when the last worker ended.
    pub(crate) fn was_attached(&self, nsid: u32) -> bool {
        self.state.attached.get(nsid as usize / 64).is_some_and(|word| word.get() >> (nsid % 64) & 1 != 0)
    }

    /// The page that doorbells are in is another one.
    pub(crate) fn put_doorbells(&self) {
        if let Some(kept) = &self.kept {
            kept.put(Kind::DOORBELLS, self.doorbells.as_fd());
        }
    }

    /// A client's wiring and memory are remembered from now on.
    pub(crate) fn remember(&mut self, client: &Rc<Client>) {
        self.interrupts.remember(Rc::clone(client));
        self.client = Some(Rc::clone(client));
    }

    /// The client is gone, and what is kept of it goes.
    pub(crate) fn forget_client(&mut self) {
        self.give_up_saved();
        if let Some(kept) = self.kept.as_ref().filter(|_| self.client.take().is_some()) {
            kept.drop_client();
        }
    }

    /// Whether it has ended so many workers that it is served no more, until its client leaves.
    pub(crate) fn is_out_of_service(&self) -> bool {
        self.state.survival.strikes.get() >= STRIKES
    }

    /// Whether the last worker ended while it worked on this device, by a fault of its own.
    fn count_strike(&self, fault: Option<u64>) {
        let survival = &self.state.survival;
        // Whatever it ended by: what it was working on then says nothing of a later fault.
        let was_busy = survival.busy.replace(0) != 0;
        let struck = fault.is_some() && was_busy;
        let before = if fault.is_some_and(|served| served < FORGIVEN_MILLIS) { survival.strikes.get() } else { 0 };
        survival.strikes.set(if struck { before + 1 } else { before });
    }
}

/// A client that the last worker had: what is remembered, its socket, and where its connection goes on.
pub(crate) type TakenClient = (Rc<Client>, OwnedFd, Resumed);

/// The connected client, as it is remembered.
pub(crate) struct Client {
    kept: Kept,
    state: Shared<ClientState>,
    /// Replies that were sent; the keeper counts them too.
    replies: std::cell::Cell<u64>,
}

/// What a client had with the worker before this one.
pub(crate) struct Wiring {
    pub(crate) vectors: Vec<(usize, OwnedFd)>,
    pub(crate) masked: [u64; VECTORS / 64],
    pub(crate) pin: Option<OwnedFd>,
    pub(crate) pin_masked: bool,
    pub(crate) unmask: Option<OwnedFd>,
}

impl Client {
    /// A client that has just come.
    pub(crate) fn begin(kept: &Kept, connection: BorrowedFd<'_>) -> io::Result<Rc<Self>> {
        let state = Shared::<ClientState>::new("millrace-client")?;
        state.version.set(CLIENT_LAYOUT.newest.into());
        kept.put(Kind::CLIENT, state.as_fd());
        // From here on it exists.
        kept.put(Kind::CONNECTION, connection);
        Ok(Rc::new(Self { kept: kept.clone(), state, replies: std::cell::Cell::new(0) }))
    }

    /// The client that the last worker had, with what is to be known for its connection.
    fn take(kept: &Kept) -> Option<TakenClient> {
        let (connection, client) = (kept.take(Kind::CONNECTION)?, kept.take(Kind::CLIENT)?);
        let state = Shared::<ClientState>::from_file(client.fd).ok()?;
        if state.version.get() != u32::from(CLIENT_LAYOUT.newest) {
            return None;
        }
        let handling = Some(state.handling.get()).filter(|handling| handling & HANDLING != 0);
        let resumed = Resumed {
            capabilities: (state.negotiated.get() != 0).then(|| Capabilities {
                max_msg_fds: usize::try_from(state.max_msg_fds.get()).unwrap_or(usize::MAX),
                max_data_xfer_size: state.max_data_xfer_size.get(),
                max_dma_maps: state.max_dma_maps.get(),
                pgsizes: state.pgsizes.get(),
                write_multiple: state.write_multiple.get() != 0,
            }),
            handling: handling.map(|handling| (handling as u16, (handling >> 16) as u16)),
            replied: connection.replies > state.replies.get(),
        };
        let client = Self { kept: kept.clone(), state, replies: std::cell::Cell::new(connection.replies) };
        Some((Rc::new(client), connection.fd, resumed))
    }

    fn slots(&self) -> impl Iterator<Item = (u32, &RegionState)> {
        (0..).zip(self.state.memory.iter().take(self.state.regions.get() as usize))
    }

    fn slot_key(&self, kind: Kind, slot: u32) -> Key {
        Key { slot, ..self.kept.key(kind) }
    }

    /// A region was mapped.
    pub(crate) fn add_region(&self, address: u64, size: u64, protection: Protection, backing: Option<(&OwnedFd, u64)>) {
        let free = self.slots().find(|(_, region)| region.flags.get() & VALID == 0).map(|(slot, _)| slot);
        let slot = free.unwrap_or(self.state.regions.get());
        // The table has room for as many as can be mapped.
        let Some(region) = self.state.memory.get(slot as usize) else { return };
        region.address.set(address);
        region.size.set(size);
        region.offset.set(backing.map_or(0, |(_, offset)| offset));
        if let Some((fd, _)) = backing {
            said(self.kept.link.put(self.slot_key(Kind::MEMORY, slot), fd.as_fd()));
        }
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        self.state.regions.set(self.state.regions.get().max(slot + 1));
        state::commit();
        region
            .flags
            .set(VALID | flag(protection.read, READ) | flag(protection.write, WRITE) | flag(backing.is_some(), FILE));
    }

    /// The regions of a range go.
    pub(crate) fn remove_range(&self, address: u64, size: u64) {
        let last = address.saturating_add(size - 1);
        let is_inside = |region: &RegionState| {
            let (first, size) = (region.address.get(), region.size.get());
            first >= address && first.saturating_add(size.saturating_sub(1)) <= last
        };
        for (slot, region) in self.slots() {
            if region.flags.get() & VALID != 0 && is_inside(region) {
                region.flags.set(0);
                said(self.kept.link.drop_one(self.slot_key(Kind::MEMORY, slot)));
            }
        }
    }

    /// Every region goes.
    pub(crate) fn remove_regions(&self) {
        self.state.regions.set(0);
        said(self.kept.link.drop_kinds(self.kept.owner, Kind::MEMORY, Kind::MEMORY));
        self.state.memory.iter().for_each(|region| region.flags.set(0));
    }

    /// Maps what the last worker had mapped.
    pub(crate) fn map_regions(&self, memory: &mut GuestMemory, mut port: Option<&mut Port>) -> Result<(), MapError> {
        let mut files: std::collections::BTreeMap<_, _> =
            self.kept.link.take_all(self.kept.owner, Kind::MEMORY).into_iter().collect();
        for (slot, region) in self.slots() {
            let flags = region.flags.get();
            if flags & VALID == 0 {
                continue;
            }
            let (address, size) = (region.address.get(), region.size.get());
            let protection = Protection { read: flags & READ != 0, write: flags & WRITE != 0 };
            // One of a region that has gone, whose worker ended before it had let go of it, is no other region's.
            let file = if flags & FILE == 0 { None } else { files.remove(&slot) };
            let backing = match &file {
                Some(held) => Some((held.fd.as_fd(), region.offset.get())),
                None if flags & FILE == 0 => None,
                None => return Err(MapError::Missing { addr: address, size }),
            };
            memory.map_again(GuestAddress(address), size, protection, backing)?;
            if let Some(port) = &mut port {
                port.map(memory, address, size)?;
            }
        }
        for slot in files.into_keys() {
            said(self.kept.link.drop_one(self.slot_key(Kind::MEMORY, slot)));
        }
        Ok(())
    }

    /// A vector has another event descriptor.
    pub(crate) fn set_vector(&self, vector: usize, eventfd: Option<&Eventfd>) {
        self.set_eventfd(Kind::VECTOR, vector as u32, eventfd);
    }

    /// The pin has another event descriptor, or another one that unmasks it.
    pub(crate) fn set_pin(&self, kind: Kind, eventfd: Option<&Eventfd>) {
        self.set_eventfd(kind, 0, eventfd);
    }

    fn set_eventfd(&self, kind: Kind, slot: u32, eventfd: Option<&Eventfd>) {
        let key = self.slot_key(kind, slot);
        said(match eventfd {
            Some(fd) => self.kept.link.put(key, fd.as_fd()),
            None => self.kept.link.drop_one(key),
        });
    }

    /// The client wants to know which pages are written, or no more.
    pub(crate) fn set_logging(&self, on: bool) {
        self.state.logging.set(u32::from(on));
    }

    /// The client masked or unmasked vectors.
    pub(crate) fn set_masked(&self, masked: &[u64; VECTORS / 64]) {
        self.state.masked.iter().zip(masked).for_each(|(cell, word)| cell.set(*word));
    }

    /// The pin was masked or unmasked.
    pub(crate) fn set_pin_masked(&self, masked: bool) {
        self.state.pin_masked.set(u32::from(masked));
    }

    /// The interrupts that the last worker had wired.
    pub(crate) fn take_wiring(&self) -> Wiring {
        let vectors = self.kept.link.take_all(self.kept.owner, Kind::VECTOR);
        Wiring {
            vectors: vectors.into_iter().map(|(slot, held)| (slot as usize, held.fd)).collect(),
            masked: self.state.masked.each_ref().map(Cell::get),
            pin: self.kept.take(Kind::PIN).map(|held| held.fd),
            pin_masked: self.state.pin_masked.get() != 0,
            unmask: self.kept.take(Kind::PIN_UNMASK).map(|held| held.fd),
        }
    }
}

impl Keep for Client {
    fn begin(&self, id: u16, command: u16) {
        self.state.replies.set(self.replies.get());
        state::commit();
        self.state.handling.set(HANDLING | u64::from(command) << 16 | u64::from(id));
        state::commit();
    }

    fn negotiated(&self, capabilities: &Capabilities) {
        let state = &self.state;
        state.max_msg_fds.set(capabilities.max_msg_fds as u64);
        state.max_data_xfer_size.set(capabilities.max_data_xfer_size);
        state.max_dma_maps.set(capabilities.max_dma_maps);
        state.pgsizes.set(capabilities.pgsizes);
        state.write_multiple.set(u32::from(capabilities.write_multiple));
        state::commit();
        state.negotiated.set(1);
    }

    fn reply(&self, parts: &[&[u8]; 3], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        self.kept.link.reply(self.kept.key(Kind::CONNECTION), parts, fds).map_err(|_| Errno::PIPE)?;
        self.replies.set(self.replies.get() + 1);
        Ok(())
    }

    fn done(&self) {
        self.state.handling.set(0);
    }
}

#[cfg(test)]
mod tests;
