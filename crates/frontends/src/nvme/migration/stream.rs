//! The saved state's bytes: docs/formats/device-state.md.
//!
//! One list of fields serves both ways, so that what is written is what is read. Nothing of the state region's layout is in it.

use millrace_memory::Shared;
use millrace_nvme_spec::{
    command::{Cqe, Sqe},
    registers::{Configuration, ControllerStatus, ShutdownStatus},
};
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::super::{
    admin::monotonic_millis,
    config::Config,
    controller::Controller,
    keep::shape,
    namespace::Allocated,
    pci,
    records::RECORDS,
    registers::{CC_FIELDS, MPS_MAX},
    state::{Cell, DeviceState},
};

const _: () = assert!(cfg!(target_endian = "little"), "numbers are written as they lie in memory");

const MAGIC: u64 = u64::from_le_bytes(*b"MRDEVICE");
/// Version of the stream; any change of it is a new one.
const VERSION: u32 = 1;
/// Bytes before what the checksum covers: magic, version, checksum.
const HEAD: usize = 16;
/// No counter of a real device comes near.
const LARGEST_COUNT: u64 = 1 << 60;

const READ_ONLY: u8 = 1;
const ATTACHED: u8 = 2;

/// Why a device's state is not saved, or a saved one not taken. Nothing has changed then.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SavedStateError {
    /// No guest is connected.
    #[error("no guest is connected: there is no state to save")]
    NoGuest,
    /// Commands are in flight, or the guest rings.
    #[error("commands are in flight, or its guest rings: pause the machine first")]
    Running,
    /// A guest is connected, or just leaving.
    #[error("a guest is connected: a state is restored before its machine connects")]
    Connected,
    /// What the device does is not all here.
    #[error("the device's queues are in its engine: only one without an engine is saved and restored")]
    Engine,
    /// Not a saved state.
    #[error("it is no saved state of a device")]
    Magic,
    /// Saved by another version.
    #[error("it is of version {found}; this daemon knows version {VERSION}")]
    Version {
        /// Its version.
        found: u32,
    },
    /// Cut short, or longer than it says.
    #[error("it has {found} bytes and says that it has {length}: a part is missing")]
    Length {
        /// Bytes that are there.
        found: u64,
        /// Bytes that it says.
        length: u64,
    },
    /// Damaged.
    #[error("it is damaged: its checksum does not fit")]
    Checksum,
    /// Of a device with other settings.
    #[error("it is of a device with other settings: {what} is {theirs} there and {ours} here")]
    Shape {
        /// Which setting.
        what: &'static str,
        /// Of the saved device.
        theirs: String,
        /// Of this one.
        ours: String,
    },
    /// Other namespaces.
    #[error("namespace {nsid}: {what}")]
    Namespace {
        /// Its identifier.
        nsid: u32,
        /// What differs.
        what: &'static str,
    },
    /// It says something that cannot be.
    #[error("it contradicts itself: {what}")]
    Inconsistent {
        /// What.
        what: &'static str,
    },
}

use SavedStateError as Error;

impl Error {
    /// Whether the same may be done at another time.
    pub fn is_untimely(&self) -> bool {
        matches!(self, Self::NoGuest | Self::Running | Self::Connected)
    }
}

const CUT: Error = Error::Inconsistent { what: "it ends in the middle of a field" };

/// A plain number.
trait Plain: Copy + FromBytes + IntoBytes + Immutable {}
impl<T: Copy + FromBytes + IntoBytes + Immutable> Plain for T {}

/// One way over the fields.
trait Fields {
    fn field<T: Plain>(&mut self, cell: &Cell<T>) -> Result<(), Error>;
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn put<T: Plain>(&mut self, value: T) {
        self.0.extend_from_slice(value.as_bytes());
    }

    fn text(&mut self, text: &str) {
        // Settings are checked to be shorter.
        let bytes = text.as_bytes().get(..255).unwrap_or(text.as_bytes());
        self.put(bytes.len() as u8);
        self.0.extend_from_slice(bytes);
    }
}

impl Fields for Writer {
    fn field<T: Plain>(&mut self, cell: &Cell<T>) -> Result<(), Error> {
        self.put(cell.get());
        Ok(())
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn get<T: Plain>(&mut self) -> Result<T, Error> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| CUT)?;
        self.0 = rest;
        Ok(value)
    }

    fn text(&mut self) -> Result<String, Error> {
        let len = usize::from(self.get::<u8>()?);
        let (text, rest) = self.0.split_at_checked(len).ok_or(CUT)?;
        self.0 = rest;
        Ok(String::from_utf8_lossy(text).into_owned())
    }
}

impl Fields for Reader<'_> {
    fn field<T: Plain>(&mut self, cell: &Cell<T>) -> Result<(), Error> {
        cell.set(self.get()?);
        Ok(())
    }
}

fn all<'a, T: Plain + 'a>(fields: &mut impl Fields, cells: impl IntoIterator<Item = &'a Cell<T>>) -> Result<(), Error> {
    cells.into_iter().try_for_each(|cell| fields.field(cell))
}

/// Every field of a device of this configuration, in the stream's order.
fn controller(state: &DeviceState, config: &Config, fields: &mut impl Fields) -> Result<(), Error> {
    let DeviceState { registers, features, events, logs, pci, sq, cq, msix, counters, .. } = state;
    let queues = usize::from(config.queues) + 1;
    all(fields, [&registers.cc, &registers.csts, &registers.aqa, &registers.interrupt_mask])?;
    all(fields, [&registers.asq, &registers.acq, &registers.shadow_doorbells, &registers.event_indexes])?;
    all(fields, [&features.arbitration, &features.power_state, &features.temperature_over, &features.temperature_under])?;
    all(fields, [&features.write_cache, &features.queues, &features.interrupt_coalescing, &features.write_atomicity])?;
    all(fields, [&features.async_events, &features.host_behavior, &features.timestamp_origin, &features.host_id_size])?;
    all(fields, &features.host_id)?;
    for namespace in features.namespaces.iter().take(config.namespaces as usize + 1) {
        all(fields, [&namespace.time_limited_recovery, &namespace.reservation_mask])?;
    }
    all(fields, &features.coalescing_disabled)?;
    all(fields, &events.requests)?;
    all(fields, [&events.outstanding, &events.masked])?;
    all(fields, &events.pending)?;
    all(fields, [&logs.error_count, &logs.busy_micros, &logs.power_cycles, &logs.unsafe_shutdowns])?;
    all(fields, logs.errors.iter().flatten())?;
    all(fields, &logs.changed_namespaces)?;
    all(fields, [&logs.notices_logged, &logs.notices_read])?;
    all(fields, &logs.notices)?;
    all(fields, pci)?;
    for sq in sq.iter().take(queues) {
        fields.field(&sq.base)?;
        all(fields, [&sq.entries, &sq.head])?;
        fields.field(&sq.cq)?;
        fields.field(&sq.priority)?;
    }
    for cq in cq.iter().take(queues) {
        fields.field(&cq.base)?;
        all(fields, [&cq.entries, &cq.position, &cq.head])?;
        all(fields, [&cq.vector, &cq.interrupts])?;
    }
    all(fields, msix.iter().take(config.vectors.into()).flatten())?;
    all(fields, counters)
}

/// A namespace as it was.
#[derive(Debug)]
struct SavedNamespace {
    nsid: u32,
    uuid: [u8; 16],
    blocks: u64,
    shift: u8,
    flags: u8,
}

impl SavedNamespace {
    fn of(nsid: u32, allocated: &Allocated, attached: bool) -> Self {
        let geometry = allocated.namespace.volume.geometry();
        let flag = |on: bool, bit| if on { bit } else { 0 };
        Self {
            nsid,
            uuid: allocated.namespace.identity.uuid,
            blocks: geometry.blocks.0,
            shift: geometry.block_size.shift() as u8,
            flags: flag(allocated.read_only || geometry.read_only, READ_ONLY) | flag(attached, ATTACHED),
        }
    }

    /// What of it differs from the one that is here.
    fn differs(&self, here: &Self) -> Option<&'static str> {
        match self {
            _ if self.uuid != here.uuid => Some("another volume is shown here (its UUID differs)"),
            _ if (self.blocks, self.shift) != (here.blocks, here.shift) => Some("its size or block size differs here"),
            _ if (self.flags ^ here.flags) & READ_ONLY != 0 => Some("it is read-only on one side alone"),
            _ => None,
        }
    }
}

/// A state that was checked, and can be taken.
pub(super) struct Saved {
    state: Shared<DeviceState>,
    namespaces: Vec<SavedNamespace>,
    powered_millis: u64,
    timestamp: u64,
    doorbells: Vec<u32>,
    commands: Vec<(u16, u32, Sqe)>,
}

impl Controller {
    /// The state of a controller in which nothing is in flight.
    pub(crate) fn save(&self) -> Vec<u8> {
        self.counters.store(&self.state.counters);
        let (config, now) = (&*self.config, monotonic_millis());
        let mut out = Writer::default();
        for word in shape(config) {
            out.put(word);
        }
        for text in [&config.serial, &config.model, &config.subnqn] {
            out.text(text);
        }
        let namespaces: Vec<_> = self.namespaces.allocated().collect();
        out.put(namespaces.len() as u32);
        for (nsid, allocated) in namespaces {
            let saved = SavedNamespace::of(nsid, allocated, self.namespaces.get(nsid).is_some());
            out.put(saved.nsid);
            out.put(saved.uuid);
            out.put(saved.blocks);
            out.put([saved.shift, saved.flags]);
        }
        let features = &self.state.features;
        out.put(now.saturating_sub(self.state.logs.powered_on.get()));
        out.put(features.timestamp.get().wrapping_add(now.saturating_sub(features.timestamp_taken.get())));
        controller(&self.state, config, &mut out).expect("writing to memory");
        for word in self.doorbells.words.iter().take((usize::from(config.queues) + 1) * 2) {
            // Relaxed: the guest stands still, or will find its doorbells as they are now.
            out.put(word.load(std::sync::atomic::Ordering::Relaxed));
        }
        let commands = self.records.placed();
        out.put(commands.len() as u32);
        for (sqid, index, sqe) in commands {
            out.put(sqid);
            out.put(index);
            out.put(sqe);
        }
        let length = (HEAD + size_of::<u64>() + out.0.len()) as u64;
        let covered = [length.as_bytes(), &out.0].concat();
        [MAGIC.as_bytes(), VERSION.as_bytes(), checksum(&covered).as_bytes(), &covered].concat()
    }

    /// Checks a saved state against this controller, in all that it says.
    pub(super) fn parse_saved(&self, bytes: &[u8]) -> Result<Saved, Error> {
        let mut input = Reader(bytes);
        let (magic, version) = (input.get::<u64>(), input.get::<u32>());
        if magic != Ok(MAGIC) {
            return Err(Error::Magic);
        }
        match version? {
            VERSION => {}
            found => return Err(Error::Version { found }),
        }
        let sum = input.get::<u32>()?;
        let covered = input.0;
        let (found, length) = (bytes.len() as u64, input.get::<u64>()?);
        if found != length {
            return Err(Error::Length { found, length });
        }
        if checksum(covered) != sum {
            return Err(Error::Checksum);
        }
        self.check_shape(&mut input)?;
        let namespaces = self.check_namespaces(&mut input)?;
        let (powered_millis, timestamp) = (input.get()?, input.get()?);
        let failed = |_| Error::Inconsistent { what: "there is no memory to check it in" };
        let state = Shared::<DeviceState>::new("millrace-saved-state").map_err(failed)?;
        controller(&state, &self.config, &mut input)?;
        check_state(&state, &self.config).map_or(Ok(()), |what| Err(Error::Inconsistent { what }))?;
        let words = (usize::from(self.config.queues) + 1) * 2;
        let doorbells = (0..words).map(|_| input.get()).collect::<Result<_, _>>()?;
        let count: u32 = input.get()?;
        if count as usize > RECORDS {
            return Err(Error::Inconsistent { what: "there are more commands than a controller has in flight" });
        }
        let commands: Vec<(u16, u32, Sqe)> =
            (0..count).map(|_| Ok((input.get()?, input.get()?, input.get()?))).collect::<Result<_, Error>>()?;
        let known = |(sqid, index, _): &(u16, u32, Sqe)| {
            let sq = state.sq.get(usize::from(*sqid)).filter(|_| *sqid <= self.config.queues);
            sq.is_some_and(|sq| *index < sq.entries.get())
        };
        if !commands.iter().all(known) || !input.0.is_empty() {
            return Err(Error::Inconsistent {
                what: "there are commands of queues that do not exist, or something follows",
            });
        }
        Ok(Saved { state, namespaces, powered_millis, timestamp, doorbells, commands })
    }

    fn check_shape(&self, input: &mut Reader<'_>) -> Result<(), Error> {
        const SETTINGS: [&str; 8] = [
            "the number of queues",
            "the number of queue entries",
            "the number of vectors",
            "the largest namespace identifier",
            "MDTS",
            "whether doorbells are shared",
            "a setting",
            "a setting",
        ];
        for (ours, what) in shape(&self.config).into_iter().zip(SETTINGS) {
            let theirs: u32 = input.get()?;
            if theirs != ours {
                return Err(Error::Shape { what, theirs: theirs.to_string(), ours: ours.to_string() });
            }
        }
        let config = &self.config;
        let names = [("the serial number", &config.serial), ("the model", &config.model), ("the subsystem", &config.subnqn)];
        for (what, ours) in names {
            let theirs = input.text()?;
            if theirs != *ours {
                return Err(Error::Shape { what, theirs, ours: ours.clone() });
            }
        }
        Ok(())
    }

    /// The same namespaces must exist here; attached or not is the saved state's to say.
    fn check_namespaces(&self, input: &mut Reader<'_>) -> Result<Vec<SavedNamespace>, Error> {
        let count: u32 = input.get()?;
        let mut saved: Vec<SavedNamespace> = Vec::new();
        for _ in 0..count.min(self.namespaces.largest()) {
            let (nsid, uuid, blocks, [shift, flags]) = (input.get()?, input.get()?, input.get()?, input.get::<[u8; 2]>()?);
            let namespace = SavedNamespace { nsid, uuid, blocks, shift, flags };
            let wrong = |what| Error::Namespace { nsid, what };
            if saved.last().is_some_and(|last| last.nsid >= nsid) {
                return Err(wrong("it is there twice, or out of order"));
            }
            let Some(allocated) = self.namespaces.allocation(nsid) else { return Err(wrong("it does not exist here")) };
            if let Some(what) = namespace.differs(&SavedNamespace::of(nsid, allocated, false)) {
                return Err(wrong(what));
            }
            saved.push(namespace);
        }
        let mut here = self.namespaces.allocated();
        match here.find(|(nsid, _)| saved.iter().all(|saved| saved.nsid != *nsid)) {
            Some((nsid, _)) => Err(Error::Namespace { nsid, what: "it exists here alone" }),
            None if saved.len() != count as usize => Err(Error::Inconsistent { what: "it has too many namespaces" }),
            None => Ok(saved),
        }
    }

    /// Takes a checked state. The controller is as after power-on.
    pub(super) fn adopt(&mut self, saved: &Saved) {
        // What is read-only in configuration space is this device's.
        for (at, (theirs, ours)) in saved.state.pci.iter().zip(&self.state.pci).enumerate() {
            let mask = pci::writable(at);
            theirs.set(ours.get() & !mask | theirs.get() & mask);
        }
        let mut fields = Writer::default();
        controller(&saved.state, &self.config, &mut fields).expect("writing to memory");
        controller(&self.state, &self.config, &mut Reader(&fields.0)).expect("as many fields as were written");
        let now = monotonic_millis();
        self.state.logs.powered_on.set(now.saturating_sub(saved.powered_millis));
        self.state.features.timestamp.set(saved.timestamp);
        self.state.features.timestamp_taken.set(now);
        for (word, value) in self.doorbells.words.iter().zip(&saved.doorbells) {
            // Relaxed: the guest does not run.
            word.store(*value, std::sync::atomic::Ordering::Relaxed);
        }
        for (sqid, index, sqe) in &saved.commands {
            if let Some(record) = self.records.take(sqe, *sqid, *index) {
                self.records.accept(record);
            }
        }
        for namespace in &saved.namespaces {
            self.attach_as(namespace.nsid, namespace.flags & ATTACHED != 0);
        }
    }

    fn attach_as(&mut self, nsid: u32, attached: bool) {
        if self.namespaces.get(nsid).is_some() == attached {
            return;
        }
        if attached {
            // It exists, and is not attached.
            let _ = self.namespaces.attach(nsid);
        } else {
            self.namespaces.detach(nsid);
        }
        self.note_attached(nsid, attached);
        self.host.attachment_changed(&self.config.name, nsid, attached);
    }
}

fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// What is wrong with a state, if anything is: it comes from outside, and what the controller relies on must hold.
fn check_state(state: &DeviceState, config: &Config) -> Option<&'static str> {
    let DeviceState { registers, features, events, logs, counters, .. } = state;
    let cc = Configuration::from_bits(registers.cc.get());
    let csts = ControllerStatus::from_bits(registers.csts.get());
    let page = |address: &Cell<u64>| address.get().is_multiple_of(4096);
    let small = |count: &Cell<u64>| count.get() < LARGEST_COUNT;
    let counts = [&logs.error_count, &logs.busy_micros, &logs.power_cycles, &logs.unsafe_shutdowns, &logs.notices_logged];
    let exists = |entries: &Cell<u32>| entries.get() != 0;
    let any_queue = state.sq.iter().any(|sq| exists(&sq.entries)) || state.cq.iter().any(|cq| exists(&cq.entries));
    let admin =
        state.sq.first().is_some_and(|sq| exists(&sq.entries)) && state.cq.first().is_some_and(|cq| exists(&cq.entries));
    let rules = [
        (cc.into_bits() & !CC_FIELDS == 0 && cc.mps() <= MPS_MAX, "its configuration register"),
        (csts.cfs() || csts.rdy() == cc.en(), "it is ready and not enabled, or the other way round"),
        (csts.shst() != ShutdownStatus::OCCURRING, "a shutdown is under way"),
        (if csts.rdy() { admin } else { csts.cfs() || !any_queue }, "its admin queues"),
        (
            [&registers.asq, &registers.acq, &registers.shadow_doorbells, &registers.event_indexes].into_iter().all(page),
            "an address",
        ),
        ((registers.shadow_doorbells.get() == 0) == (registers.event_indexes.get() == 0), "its shadow doorbells"),
        (events.outstanding.get() as usize <= events.requests.len(), "its event requests"),
        (matches!(features.host_id_size.get(), 0 | 8 | 16), "its host identifier"),
        (logs.notices_read.get() <= logs.notices_logged.get(), "its notices"),
        (counts.into_iter().chain(counters).all(small), "its counters"),
    ];
    let broken = rules.into_iter().find(|(holds, _)| !holds).map(|(_, what)| what);
    let queues = usize::from(config.queues) + 1;
    broken.or_else(|| (0..queues).find_map(|qid| check_queues(state, config, qid)))
}

fn check_queues(state: &DeviceState, config: &Config, qid: usize) -> Option<&'static str> {
    let (sq, cq) = (state.sq.get(qid)?, state.cq.get(qid)?);
    let most = if qid == 0 { 4096 } else { config.queue_entries };
    let fits = |base: u64, entries: u32, size: usize| {
        (2..=most).contains(&entries)
            && base.is_multiple_of(4096)
            && base.checked_add(u64::from(entries) * size as u64).is_some()
    };
    let sq_holds = || {
        let target = usize::from(sq.cq.get());
        fits(sq.base.get(), sq.entries.get(), Sqe::SIZE)
            && sq.head.get() < sq.entries.get()
            && (qid == 0) == (target == 0)
            && target <= usize::from(config.queues)
            && state.cq.get(target).is_some_and(|cq| cq.entries.get() != 0)
            && sq.priority.get() < 4
    };
    let cq_holds = || {
        fits(cq.base.get(), cq.entries.get(), Cqe::SIZE)
            && cq.tail() < cq.entries.get()
            && cq.head.get() < cq.entries.get()
            && cq.vector.get() < config.vectors
            && cq.interrupts.get() < 2
    };
    if sq.entries.get() != 0 && !sq_holds() {
        return Some("a submission queue");
    }
    (cq.entries.get() != 0 && !cq_holds()).then_some("a completion queue")
}
