//! Namespaces: what a volume is to the controllers that show it.

use std::{
    cell::Cell,
    collections::BTreeMap,
    rc::{Rc, Weak},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use millrace_block::{
    Asker, BlockCount, BlockError, BlockSize, Geometry, Lba, Metadata, MetadataFormat, Volume, VolumeError,
};
use millrace_engine::RemoteSender;
use millrace_keeper::{Kind, Link};
use millrace_nvme_spec::{command::NamespaceId, status::Status};

use super::{
    io::{UncorrectableRanges, WriteGate},
    keep::lasting_number,
    lasting::Lasting,
    reservation::{HostKey, Ledger, Notices, Rights},
};
use crate::virtio_blk::WriteModes;

/// Globally unique identifiers of a namespace; they stay with the volume, whichever controller shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// UUID (RFC 9562), also shown as NGUID.
    pub uuid: [u8; 16],
    /// EUI-64; all zero when it has none.
    pub eui64: [u8; 8],
}

/// A volume as a namespace. One object serves every controller that has it attached, on any shard.
pub struct Namespace {
    /// Where the blocks are.
    pub volume: Arc<dyn Volume>,
    /// Its identifiers.
    pub identity: Identity,
    /// Whether more than one controller may attach it (NMIC). Relaxed: it changes while nobody has it attached.
    shared: AtomicBool,
    pub(crate) reservations: Mutex<Ledger>,
    /// Counts changes of reservations; an attachment whose copy is older asks `reservations` again.
    pub(crate) reservation_version: AtomicU64,
    pub(crate) notices: NoticeQueue,
    pub(crate) uncorrectable: UncorrectableRanges,
    /// Keeps writes and fused pairs apart.
    pub(crate) gate: WriteGate,
    /// The write cache modes of the virtio disks that show it.
    pub write_modes: Arc<WriteModes>,
    /// Bytes that the medium held for the volume when it was last asked.
    pub(crate) allocated: AtomicU64,
}

/// What one namespace's registrants are still to be told. One message at most is on its way through the [`Host`]; what comes
/// meanwhile goes with the next, so that guests that change reservations in a loop fill no queue.
#[derive(Default)]
pub(crate) struct NoticeQueue(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    on_its_way: bool,
    notices: Notices,
}

/// Notices kept while a message is on its way; a controller's log holds fewer.
const MOST_NOTICES: usize = 256;

impl NoticeQueue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds notices; the answer is to be sent now.
    pub(crate) fn add(&self, notices: &Notices) -> Option<Notices> {
        let mut waiting = self.lock();
        for notice in notices {
            if waiting.notices.len() < MOST_NOTICES && !waiting.notices.contains(notice) {
                waiting.notices.push(*notice);
            }
        }
        waiting.next()
    }

    /// A message that is still on its way may have found nobody to arrive at: no more is waited for it.
    pub(crate) fn lost(&self) {
        self.lock().on_its_way = false;
    }

    /// A message has arrived; the answer is to be sent now.
    pub(crate) fn arrived(&self) -> Option<Notices> {
        let mut waiting = self.lock();
        waiting.on_its_way = false;
        waiting.next()
    }
}

impl Waiting {
    fn next(&mut self) -> Option<Notices> {
        if self.on_its_way || self.notices.is_empty() {
            return None;
        }
        self.on_its_way = true;
        Some(std::mem::take(&mut self.notices))
    }
}

impl Namespace {
    /// A namespace over `volume`, without reservations.
    pub fn new(volume: Arc<dyn Volume>, identity: Identity, shared: bool) -> Arc<Self> {
        Self::over(volume, identity, shared, Ledger::default(), UncorrectableRanges::default())
    }

    /// As [`Self::new`], with the reservations and marks that the worker before this one left, which outlive this one too.
    pub fn kept(volume: Arc<dyn Volume>, identity: Identity, shared: bool, link: &Arc<Link>) -> Arc<Self> {
        let reservations = Ledger::over(Lasting::with(link, identity.uuid, Kind::RESERVATIONS));
        let marks = UncorrectableRanges::over(Lasting::with(link, identity.uuid, Kind::UNCORRECTABLE));
        Self::over(volume, identity, shared, reservations, marks)
    }

    pub(crate) fn over(
        volume: Arc<dyn Volume>,
        identity: Identity,
        shared: bool,
        reservations: Ledger,
        uncorrectable: UncorrectableRanges,
    ) -> Arc<Self> {
        let allocated = AtomicU64::new(volume.usage().allocated);
        let reservations = if shared { reservations } else { reservations.forget() };
        Arc::new(Self {
            allocated,
            volume,
            identity,
            shared: AtomicBool::new(shared),
            reservations: Mutex::new(reservations),
            reservation_version: AtomicU64::new(1),
            notices: NoticeQueue::default(),
            uncorrectable,
            gate: WriteGate::default(),
            write_modes: Arc::default(),
        })
    }

    /// Whether more than one controller may attach it.
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
    }

    /// From now on more than one controller may attach it. It is attached to none.
    pub fn share(&self) {
        self.shared.store(true, Ordering::Relaxed);
    }

    /// Tells every attachment that what it knows of the reservations is old.
    pub(crate) fn reservations_changed(&self) {
        // Release: pairs with the acquire in `reservation_version`; the change was made under the mutex.
        self.reservation_version.fetch_add(1, Ordering::Release);
    }

    /// What the reservations' version is now.
    #[inline]
    pub(crate) fn reservation_version(&self) -> u64 {
        // Acquire: pairs with the release in `reservations_changed`.
        self.reservation_version.load(Ordering::Acquire)
    }

    /// The reservations, locked for a moment.
    pub(crate) fn reservations(&self) -> MutexGuard<'_, Ledger> {
        self.reservations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the reservations allow a host.
    pub(crate) fn rights_of(&self, host: &HostKey) -> Rights {
        self.reservations().now().rights(host)
    }

    /// No controller has this identifier any more: what a host without an identifier of its own had registered through it goes with it. The device
    /// that gets the number next is another host. What one with an identifier had registered stays, as long as there is room.
    pub fn forget_controller(self: &Arc<Self>, cntlid: u16, host: &dyn Host) {
        let ended = self.reservations().end_controller(lasting_number(cntlid));
        self.reservations().let_go(|other| other != cntlid);
        self.registrations_ended(ended, host);
    }

    /// As [`Self::forget_controller`], of all controllers that do not have the namespace: they may have gone while nobody had its volume open, and
    /// their identifiers be those of others by now.
    pub fn forget_other_controllers(self: &Arc<Self>, has: impl Fn(u16) -> bool, host: &dyn Host) {
        let ended = self.reservations().end_others(&has);
        self.reservations().let_go(&has);
        self.registrations_ended(ended, host);
    }

    /// Tells of registrations that have ended by nobody's command, if any have.
    pub(crate) fn registrations_ended(self: &Arc<Self>, ended: Option<Notices>, host: &dyn Host) {
        let Some(notices) = ended else { return };
        self.reservations_changed();
        if let Some(notices) = self.notices.add(&notices) {
            host.reservation_notice(self, &notices);
        }
    }

    /// Whether the volume still has the block size that a command was checked against: another controller may have formatted
    /// it while the command waited.
    pub(crate) fn unchanged(&self, geometry: &Geometry) -> Result<(), BlockError> {
        if self.volume.geometry().block_size == geometry.block_size { Ok(()) } else { Err(BlockError::NotReady) }
    }

    /// Asks the volume how much of it is in use, which may wait for the system below: not on a shard. Guests see what was
    /// measured last.
    pub fn measure(&self) {
        self.allocated.store(self.volume.usage().allocated, Ordering::Relaxed);
    }

    /// What was [measured](Self::measure) last, in bytes.
    pub fn measured(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Grows or shrinks the volume. Devices that show it are told by [`NvmeDevice::namespace_changed`](super::NvmeDevice).
    ///
    /// # Errors
    /// The volume's; nothing has changed then.
    pub fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        // Blocks marked uncorrectable beyond the end are gone, and are new ones if the volume grows. (A mark that was checked
        // before the end moved may come after it: so the next growth looks again.)
        self.forget_marks_beyond(self.volume.geometry().blocks);
        self.volume.resize(blocks)?;
        self.forget_marks_beyond(blocks);
        self.measure();
        Ok(())
    }

    fn forget_marks_beyond(&self, end: BlockCount) {
        self.uncorrectable.clear(Lba(end.0), BlockCount(u64::MAX - end.0));
    }

    /// A request that changes data has ended: blocks marked uncorrectable can be read again where it succeeded.
    #[inline]
    pub(crate) fn written(&self, result: Result<(), BlockError>, lba: Lba, count: BlockCount) {
        if result.is_ok() {
            self.uncorrectable.clear(lba, count);
        }
    }
}

/// A namespace as one controller sees it. Commands in flight keep it alive.
pub(crate) struct Attached {
    pub(crate) nsid: u32,
    pub(crate) namespace: Arc<Namespace>,
    /// Where this controller's reads and writes go: the namespace's volume, or what [leads](NamespaceTable::lead) to it.
    pub(crate) volume: Arc<dyn Volume>,
    /// The operator attached it read-only.
    pub(crate) read_only: bool,
    /// The volume's shape as last told to this controller's guest.
    pub(crate) geometry: Cell<Geometry>,
    /// This controller's rights under the reservations (bits in reservation.rs), and the version they belong to.
    pub(crate) rights: Cell<(u64, u8)>,
    /// Commands in flight on it through this controller: what format, detach and delete wait for.
    pub(crate) in_flight: Cell<u32>,
    /// Commands that were in flight on it, and are no more: while some are and this stands still, the volume does not answer.
    pub(crate) finished: Cell<u64>,
    /// Those in flight by when they began: in turns that go to the first two lanes one after the other, or, in the third, without a turn, for
    /// they wait for others themselves, or write nothing.
    pub(crate) lanes: [Cell<u32>; 3],
    /// The present turn.
    pub(crate) turn: Cell<u64>,
    /// It is attached no more: what is in flight goes no further than the piece that it is at.
    pub(crate) gone: Cell<bool>,
    /// It is being formatted: no command but those in flight reaches it.
    pub(crate) formatting: Cell<bool>,
    /// Batches for which commands are submitted one by one, for the volume did none when it was asked to do them at once.
    pub(crate) apart: Cell<u32>,
}

impl Attached {
    /// Whether it shows this namespace.
    pub(crate) fn is_of(&self, namespace: &Arc<Namespace>) -> bool {
        Arc::ptr_eq(&self.namespace, namespace)
    }

    /// With nothing in flight.
    pub(crate) fn new(nsid: u32, namespace: &Arc<Namespace>, read_only: bool) -> Self {
        Self {
            nsid,
            namespace: Arc::clone(namespace),
            volume: Arc::clone(&namespace.volume),
            read_only,
            geometry: Cell::new(namespace.volume.geometry()),
            rights: Cell::new((0, 0)),
            in_flight: Cell::new(0),
            finished: Cell::new(0),
            lanes: [const { Cell::new(0) }; 3],
            turn: Cell::new(0),
            gone: Cell::new(false),
            formatting: Cell::new(false),
            apart: Cell::new(0),
        }
    }

    /// Whether this controller may change the namespace's data.
    pub(crate) fn check_writable(&self, geometry: &Geometry) -> Result<(), Status> {
        if self.read_only || geometry.read_only { Err(Status::NAMESPACE_WRITE_PROTECTED.do_not_retry()) } else { Ok(()) }
    }
}

/// What one subsystem knows: namespaces that exist for this guest, attached to its controller or not.
pub(crate) struct NamespaceTable {
    /// By namespace identifier; the index is `nsid`. `None`: not attached.
    attached: Vec<Option<Rc<Attached>>>,
    /// Those that were detached while commands were in flight on them, which keep them alive.
    leaving: Vec<Weak<Attached>>,
    /// Every namespace that exists for this guest.
    allocated: BTreeMap<u32, Allocated>,
    /// Identifiers of namespaces that are being created.
    reserved: Vec<u32>,
    /// What leads to namespaces' volumes, of those that this controller does not go straight to.
    ways: BTreeMap<u32, Arc<dyn Volume>>,
}

/// A namespace that exists.
#[derive(Clone)]
pub(crate) struct Allocated {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) read_only: bool,
    /// The guest created it itself, within its quota.
    pub(crate) by_guest: bool,
}

impl NamespaceTable {
    pub(crate) fn new(largest: u32) -> Self {
        let attached = vec![None; largest as usize + 1];
        Self { attached, leaving: Vec::new(), allocated: BTreeMap::new(), reserved: Vec::new(), ways: BTreeMap::new() }
    }

    /// Largest identifier (NN).
    pub(crate) fn largest(&self) -> u32 {
        self.attached.len() as u32 - 1
    }

    /// The attached namespace of this identifier: the lookup of every I/O command.
    #[inline]
    pub(crate) fn get(&self, nsid: u32) -> Option<&Rc<Attached>> {
        self.attached.get(nsid as usize)?.as_ref()
    }

    /// The attached namespace that a command names, or the status for naming none (Base 3.2.1.2 to 3.2.1.4).
    #[inline]
    pub(crate) fn require(&self, nsid: u32) -> Result<&Rc<Attached>, Status> {
        let usable = self.get(nsid).filter(|attached| !attached.formatting.get());
        usable.ok_or_else(|| self.refusal(nsid).do_not_retry())
    }

    /// 0 and beyond NN are invalid; inactive identifiers, and the broadcast value where it means nothing, are invalid fields.
    #[cold]
    fn refusal(&self, nsid: u32) -> Status {
        if nsid == 0 || (nsid > self.largest() && nsid != NamespaceId::BROADCAST.0) {
            Status::INVALID_NAMESPACE_OR_FORMAT
        } else if self.get(nsid).is_some() {
            Status::FORMAT_IN_PROGRESS
        } else {
            Status::INVALID_FIELD
        }
    }

    /// Attached namespaces in order of their identifiers.
    pub(crate) fn attached(&self) -> impl Iterator<Item = &Rc<Attached>> {
        self.attached.iter().flatten()
    }

    /// Existing namespaces in order of their identifiers.
    pub(crate) fn allocated(&self) -> impl Iterator<Item = (u32, &Allocated)> {
        self.allocated.iter().map(|(&nsid, allocated)| (nsid, allocated))
    }

    /// The existing namespace of this identifier.
    pub(crate) fn allocation(&self, nsid: u32) -> Option<&Allocated> {
        self.allocated.get(&nsid)
    }

    /// The lowest identifier that is free.
    pub(crate) fn free_nsid(&self) -> Option<u32> {
        (1..=self.largest()).find(|nsid| !self.is_taken(*nsid))
    }

    fn is_taken(&self, nsid: u32) -> bool {
        self.allocated.contains_key(&nsid) || self.reserved.contains(&nsid)
    }

    /// Keeps the lowest free identifier for a namespace that is about to be created.
    pub(crate) fn reserve(&mut self) -> Option<u32> {
        let nsid = self.free_nsid()?;
        self.reserved.push(nsid);
        Some(nsid)
    }

    /// The namespace has been created, or will not be: its identifier is free, to be allocated at once.
    pub(crate) fn unreserve(&mut self, nsid: u32) {
        self.reserved.retain(|&reserved| reserved != nsid);
    }

    /// Makes a namespace exist. Fails with the status for Namespace Management when the identifier is taken or too large.
    pub(crate) fn allocate(&mut self, nsid: u32, allocated: Allocated) -> Result<(), Status> {
        if nsid == 0 || nsid > self.largest() || self.is_taken(nsid) {
            return Err(Status::NAMESPACE_ID_UNAVAILABLE.do_not_retry());
        }
        self.allocated.insert(nsid, allocated);
        Ok(())
    }

    /// Makes a namespace exist no more; it must not be attached.
    pub(crate) fn release(&mut self, nsid: u32) -> Option<Allocated> {
        assert!(self.get(nsid).is_none(), "an attached namespace is detached before it goes");
        self.ways.remove(&nsid);
        self.allocated.remove(&nsid)
    }

    /// Attaches an existing namespace.
    pub(crate) fn attach(&mut self, nsid: u32) -> Result<(), Status> {
        let allocated = self.allocated.get(&nsid).ok_or(Status::INVALID_FIELD.do_not_retry())?;
        let place = self.attached.get_mut(nsid as usize).ok_or(Status::INVALID_FIELD.do_not_retry())?;
        if place.is_some() {
            return Err(Status::NAMESPACE_ALREADY_ATTACHED.do_not_retry());
        }
        allocated.namespace.notices.lost();
        let mut attached = Attached::new(nsid, &allocated.namespace, allocated.read_only);
        if let Some(way) = self.ways.get(&nsid) {
            attached.volume = Arc::clone(way);
        }
        *place = Some(Rc::new(attached));
        Ok(())
    }

    /// Has this controller's reads and writes go to a namespace's volume by way of another one, which leads there; `None`: straight. Those
    /// in flight end on the way that they went.
    pub(crate) fn lead(&mut self, nsid: u32, way: Option<Arc<dyn Volume>>) {
        let Some(allocated) = self.allocated.get(&nsid) else { return };
        let volume = Arc::clone(way.as_ref().unwrap_or(&allocated.namespace.volume));
        match way {
            Some(way) => self.ways.insert(nsid, way),
            None => self.ways.remove(&nsid),
        };
        let Some(before) = self.attached.get_mut(nsid as usize).and_then(Option::take) else { return };
        let mut now = Attached::new(nsid, &before.namespace, before.read_only);
        // Of what it has its guest has been told; and who ends the format looks at who is attached then.
        (now.geometry, now.formatting) = (before.geometry.clone(), before.formatting.clone());
        now.volume = volume;
        self.attached[nsid as usize] = Some(Rc::new(now));
        self.leave(&before);
    }

    /// Detaches a namespace: new commands no longer find it, those in flight finish, those that go piece by piece at the next one.
    pub(crate) fn detach(&mut self, nsid: u32) -> Option<Rc<Attached>> {
        let attached = self.attached.get_mut(nsid as usize)?.take()?;
        attached.gone.set(true);
        // Those that went another way, too.
        self.left(nsid).for_each(|left| left.gone.set(true));
        self.leave(&attached);
        Some(attached)
    }

    fn leave(&mut self, attached: &Rc<Attached>) {
        self.leaving.retain(|leaving| leaving.strong_count() > 0);
        self.leaving.push(Rc::downgrade(attached));
    }

    /// Nobody waits any more for what is in flight: what only waits for its turn ends at once.
    pub(crate) fn call_off(&self, asker: Asker) {
        self.attached().for_each(|attached| attached.volume.call_off(asker));
        // What went another way, and waits there.
        self.leaving.iter().filter_map(Weak::upgrade).for_each(|left| left.volume.call_off(asker));
    }

    /// What commands of this identifier may be in flight on: the attached namespace, and those that were attached before it.
    pub(crate) fn in_use(&self, nsid: u32) -> Vec<Rc<Attached>> {
        self.get(nsid).cloned().into_iter().chain(self.left(nsid)).collect()
    }

    /// What commands may be in flight on for an attached namespace: it, and what else led there before.
    pub(crate) fn ways(&self, attached: &Rc<Attached>) -> impl Iterator<Item = Rc<Attached>> {
        let (now, namespace) = (Rc::clone(attached), Arc::clone(&attached.namespace));
        let others = self.left(attached.nsid).filter(move |left| left.is_of(&namespace) && !Rc::ptr_eq(left, &now));
        others.chain([Rc::clone(attached)])
    }

    /// What was detached from this identifier, and has commands in flight.
    pub(crate) fn left(&self, nsid: u32) -> impl Iterator<Item = Rc<Attached>> {
        let leaving = self.leaving.iter().filter_map(Weak::upgrade);
        leaving.filter(move |left| left.nsid == nsid && left.in_flight.get() > 0)
    }
}

/// What a format makes of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewFormat {
    /// Its block size.
    pub block_size: BlockSize,
    /// How its metadata are shown; `None`: not at all.
    pub metadata: Option<MetadataFormat>,
}

impl NewFormat {
    /// Erases the volume and gives it this format. May take long: not called on a shard.
    ///
    /// # Errors
    /// The volume's.
    pub fn apply(&self, volume: &dyn Volume) -> Result<(), VolumeError> {
        volume.format(self.block_size)?;
        if volume.metadata() == Metadata::Never { Ok(()) } else { volume.format_metadata(self.metadata) }
    }
}

/// What the host answered.
pub type HostReply<T> = RemoteSender<Result<T, Status>>;

/// What a controller asks of the daemon around it: work that takes long, or that must be remembered across restarts. Calls
/// return at once; answers come through the reply, from any thread.
pub trait Host: Send + Sync {
    /// Creates a volume of `bytes` for a guest's own namespace, within the quota the controller has already checked.
    fn create_namespace(&self, device: &str, nsid: u32, bytes: u64, block_size: BlockSize, reply: HostReply<Arc<Namespace>>);

    /// Destroys the volume behind a namespace that this guest created.
    fn delete_namespace(&self, device: &str, nsid: u32, reply: HostReply<()>);

    /// Erases a volume and gives it a format ([`NewFormat::apply`]); remembers the block size.
    fn format(&self, device: &str, namespace: Arc<Namespace>, format: NewFormat, reply: HostReply<()>);

    /// The guest attached or detached a namespace: to be remembered, and told to other controllers.
    fn attachment_changed(&self, device: &str, nsid: u32, attached: bool);

    /// Reservations of a shared namespace changed; `notify` says which registrants (by host identifier) get which
    /// notification (reservation log page types, Base 5.1.12.1.17). One call for a namespace at a time: the next comes when
    /// `NvmeDevice::reservation_notice` was called for this one, on any device that shows the namespace.
    fn reservation_notice(&self, namespace: &Arc<Namespace>, notify: &[([u8; 16], u8)]);
}
