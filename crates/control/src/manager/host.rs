//! What guests ask of the daemon: their own namespaces, formats, and what must be remembered of them.
//!
//! Controllers ask from their shards and must not wait, so that a thread of its own does the work; what has to do with files each device has
//! done by another one, for a file system that does not answer keeps it waiting.

use std::{
    collections::{BTreeMap, VecDeque},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_backends::BackendSpec;
use millrace_block::{BlockError, BlockSize, VolumeError};
use millrace_frontends::nvme::{Host, HostReply, Namespace, NewFormat, Status};
use millrace_services::Leaf;

use super::{
    Inner, Manager, Volume, WeakManager,
    volumes::{look, own_file_name},
};
use crate::{
    Name, Size,
    confine::tell_refused,
    error::ControlError,
    model::{Backend, LogicalBlock, VolumeSpec},
    store::{Changes, DeviceRecord, NamespaceRecord, StoreError},
};

/// How often the shards' load is measured.
const SAMPLING: Duration = Duration::from_secs(1);

/// Requests that are looked through at most for attachments that can be stored together.
const AT_ONCE: usize = 4096;

/// Names tried for a guest's namespace before its request is refused.
const NAMES: u32 = 100;

/// A guest's request.
pub(super) enum Request {
    Create { device: String, nsid: u32, bytes: u64, block_size: BlockSize, reply: HostReply<Arc<Namespace>> },
    Delete { device: String, nsid: u32, reply: HostReply<()> },
    Format { device: String, namespace: Arc<Namespace>, format: NewFormat, reply: HostReply<()> },
    Attachment { device: String, nsid: u32, attached: bool },
    Notice { namespace: Arc<Namespace>, notify: Vec<([u8; 16], u8)> },
}

impl Request {
    /// The device, of what has to do with files.
    fn needs_files(&self) -> Option<String> {
        match self {
            Self::Create { device, .. } | Self::Delete { device, .. } => Some(device.clone()),
            // A format has a thread of its own.
            Self::Format { .. } | Self::Attachment { .. } | Self::Notice { .. } => None,
        }
    }
}

/// The controllers' end.
pub(super) struct HostLink(Sender<Request>);

impl HostLink {
    pub(super) fn new() -> (Self, Receiver<Request>) {
        let (sender, receiver) = channel();
        (Self(sender), receiver)
    }

    fn send(&self, request: Request) {
        // While the daemon stops, nobody listens: the reply is dropped, and the controller takes that for a refusal.
        let _ = self.0.send(request);
    }
}

impl Host for HostLink {
    fn create_namespace(
        &self,
        device: &str,
        nsid: u32,
        bytes: u64,
        block_size: BlockSize,
        reply: HostReply<Arc<Namespace>>,
    ) {
        self.send(Request::Create { device: device.to_owned(), nsid, bytes, block_size, reply });
    }

    fn delete_namespace(&self, device: &str, nsid: u32, reply: HostReply<()>) {
        self.send(Request::Delete { device: device.to_owned(), nsid, reply });
    }

    fn format(&self, device: &str, namespace: Arc<Namespace>, format: NewFormat, reply: HostReply<()>) {
        self.send(Request::Format { device: device.to_owned(), namespace, format, reply });
    }

    fn attachment_changed(&self, device: &str, nsid: u32, attached: bool) {
        self.send(Request::Attachment { device: device.to_owned(), nsid, attached });
    }

    fn reservation_notice(&self, namespace: &Arc<Namespace>, notify: &[([u8; 16], u8)]) {
        self.send(Request::Notice { namespace: Arc::clone(namespace), notify: notify.to_vec() });
    }
}

/// Requests that have to do with files, device by device: those of one are answered in turn, in a thread that is there while there are any.
#[derive(Clone, Default)]
struct Turns(Arc<Mutex<BTreeMap<String, VecDeque<Request>>>>);

impl Turns {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, VecDeque<Request>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There are no more than a controller has commands of the kind in flight.
    fn add(&self, manager: &Arc<Manager>, device: &str, request: Request) {
        {
            let mut turns = self.lock();
            if let Some(waiting) = turns.get_mut(device) {
                waiting.push_back(request);
                return;
            }
            turns.insert(device.to_owned(), VecDeque::from([request]));
        }
        let (turns, manager, of) = (self.clone(), Arc::downgrade(manager), device.to_owned());
        let work = move || {
            while let Some(request) = turns.next(&of) {
                // Nobody listens: the reply goes, and the controller takes that for a refusal.
                if let Some(manager) = manager.upgrade() {
                    manager.answer(request);
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("millrace-guest".to_owned()).spawn(work) {
            // The replies go, which the guest is told as a failure.
            tracing::warn!(device, %error, "no thread for what a guest asks for");
            self.lock().remove(device);
        }
    }

    /// The next of a device; without one, its thread ends.
    fn next(&self, device: &str) -> Option<Request> {
        let mut turns = self.lock();
        let next = turns.get_mut(device).and_then(VecDeque::pop_front);
        if next.is_none() {
            turns.remove(device);
        }
        next
    }
}

/// What is to be done next.
pub(super) enum Turn {
    Request(Request),
    /// What has to be done again and again.
    Due,
    /// Nobody asks any more.
    Over,
}

/// The manager's end.
pub(super) struct HostThread {
    manager: WeakManager,
    requests: Receiver<Request>,
    /// Those that have been taken already.
    waiting: VecDeque<Request>,
    turns: Turns,
}

impl HostThread {
    pub(super) fn new(manager: WeakManager, requests: Receiver<Request>) -> Self {
        Self { manager, requests, waiting: VecDeque::new(), turns: Turns::default() }
    }

    /// Answers until the manager is gone.
    pub(super) fn run(mut self) {
        let measuring = measuring(self.manager.clone());
        let mut next = Instant::now() + SAMPLING;
        loop {
            let turn = self.turn(next);
            let Some(manager) = self.manager.upgrade() else { return };
            match turn {
                Turn::Request(Request::Attachment { device, nsid, attached }) => {
                    self.note_attachments(&manager, (device, nsid), attached);
                }
                Turn::Request(request) => match request.needs_files() {
                    Some(device) => self.turns.add(&manager, &device, request),
                    None => manager.answer(request),
                },
                Turn::Due => {
                    // Full: it is at it still.
                    let _ = measuring.try_send(());
                    manager.do_what_is_due();
                    next = Instant::now() + SAMPLING;
                }
                Turn::Over => return,
            }
        }
    }

    /// The clock is looked at first: guests that ask without a pause would put off for ever what is due.
    pub(super) fn turn(&mut self, next: Instant) -> Turn {
        let left = next.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Turn::Due;
        }
        if let Some(request) = self.waiting.pop_front() {
            return Turn::Request(request);
        }
        match self.requests.recv_timeout(left) {
            Ok(request) => Turn::Request(request),
            Err(RecvTimeoutError::Timeout) => Turn::Due,
            Err(RecvTimeoutError::Disconnected) => Turn::Over,
        }
    }

    /// Those that wait behind it are stored with it, of each namespace the last: many guests together ask sooner than each could be stored.
    pub(super) fn note_attachments(&mut self, manager: &Manager, first: (String, u32), attached: bool) {
        let mut latest = BTreeMap::from([(first, attached)]);
        for request in self.requests.try_iter().take(AT_ONCE) {
            if let Request::Attachment { device, nsid, attached } = request {
                latest.insert((device, nsid), attached);
            } else {
                self.waiting.push_back(request);
            }
        }
        manager.note_attachments(latest);
    }
}

/// Measures what volumes hold whenever it is told to: in a thread of its own, for a file system that does not answer keeps it waiting.
fn measuring(manager: WeakManager) -> SyncSender<()> {
    let (due, told) = sync_channel(1);
    let run = move || {
        for () in told {
            let Some(manager) = manager.upgrade() else { return };
            manager.measure_volumes();
        }
    };
    if let Err(error) = thread::Builder::new().name("millrace-measure".to_owned()).spawn(run) {
        tracing::error!(%error, "no thread to measure what volumes hold: what is told of it is old");
    }
    due
}

impl Manager {
    /// Does what is due each second.
    fn do_what_is_due(&self) {
        self.sample_loads();
        tell_refused();
        self.end_sessions();
        self.watch_volumes();
        self.note_legs(&mut self.peek());
        self.settle_copies();
        if self.account.is_due() {
            self.keep_account();
        }
        self.bury();
    }

    fn answer(self: &Arc<Self>, request: Request) {
        match request {
            Request::Create { device, nsid, bytes, block_size, reply } => {
                let result = self.create_namespace(&device, nsid, bytes, block_size);
                tracing::debug!(device, nsid, bytes, ?block_size, error = ?result.as_ref().err(), "guest creates a namespace");
                reply.send(result);
            }
            Request::Delete { device, nsid, reply } => {
                let result = self.delete_namespace(&device, nsid);
                tracing::debug!(device, nsid, ?result, "guest deletes a namespace");
                reply.send(result);
            }
            Request::Format { device, namespace, format, reply } => {
                tracing::debug!(device, volume = namespace.volume.name(), ?format, "guest formats a namespace");
                self.format(&device, namespace, format, reply);
            }
            Request::Attachment { device, nsid, attached } => self.note_attachments([((device, nsid), attached)].into()),
            Request::Notice { namespace, notify } => self.pass_notice(&namespace, &notify),
        }
    }

    fn create_namespace(
        &self,
        device: &str,
        nsid: u32,
        bytes: u64,
        block_size: BlockSize,
    ) -> Result<Arc<Namespace>, Status> {
        let room = self.peek().room_of(device);
        if let Some(room) = &room {
            look(room);
        }
        self.look_at_unopened();
        let mut inner = self.lock().map_err(|error| status_of(&error))?;
        let entry = inner.device(device).map_err(|error| status_of(&error))?;
        super::devices::free_nsid(&entry.record, Some(nsid)).map_err(|error| status_of(&error))?;
        let owner = entry.record.spec.name.clone();
        let used: u64 = inner
            .volumes
            .values()
            .filter(|volume| volume.record.created_by.as_ref() == Some(&owner))
            .map(|volume| volume.record.size().0)
            .sum();
        let nvme = entry.record.spec.kind.nvme().ok_or(Status::INVALID_FIELD.do_not_retry())?;
        if used.saturating_add(bytes) > nvme.ns_quota.0 {
            return Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY.do_not_retry());
        }
        let name = inner.name_for(&owner, nsid).ok_or(Status::NAMESPACE_ID_UNAVAILABLE.do_not_retry())?;
        let backend = match &nvme.ns_backend.0 {
            BackendSpec::File(directory) => BackendSpec::File(directory.join(own_file_name(&name))),
            other => other.clone(),
        };
        let spec = VolumeSpec {
            name: name.clone(),
            size: Some(Size(bytes)),
            stack: Backend(backend).into(),
            block_size: LogicalBlock(block_size),
            read_only: false,
            uuid: None,
        };
        let mut record = entry.record.clone();
        record.namespaces.push(NamespaceRecord { nsid, volume: name.clone(), read_only: false, attached: false });
        record.namespaces.sort_by_key(|namespace| namespace.nsid);
        let file = spec.stack.as_leaf().and_then(Leaf::file);
        if file.is_some_and(Path::exists) {
            tracing::warn!(device, volume = %name, "a file of that name exists already; the guest's request is refused");
            return Err(Status::NAMESPACE_ID_UNAVAILABLE.do_not_retry());
        }
        let not_stored = |error: StoreError| {
            tracing::warn!(device, volume = %name, %error, "a guest's namespace could not be stored");
            Status::INTERNAL_ERROR
        };
        self.store.apply(&Changes { put_files: file.into_iter().collect(), ..Changes::default() }).map_err(not_stored)?;
        let new = inner.make_volume(&spec, Some(owner)).map_err(|error| {
            tracing::warn!(device, volume = %name, %error, "a guest's namespace could not be created");
            self.is_done_with(file);
            status_of(&error)
        })?;
        let (put_volumes, put_devices) = (vec![&new.volume.record], vec![&record]);
        let remove_files = file.into_iter().collect();
        if let Err(error) = self.store.apply(&Changes { put_volumes, put_devices, remove_files, ..Changes::default() }) {
            new.undo(inner.keeper.as_ref());
            self.is_done_with(file);
            return Err(not_stored(error));
        }
        let namespace = new.volume.live().map(Arc::clone).map_err(|error| status_of(&error))?;
        inner.volumes.insert(name, new.volume);
        inner.set_record(device, record);
        self.retrace_all(&inner);
        Ok(namespace)
    }

    fn delete_namespace(&self, device: &str, nsid: u32) -> Result<(), Status> {
        let file = self.peek().own_file_of(device, nsid);
        if let Some(file) = &file {
            look(file);
        }
        let mut inner = self.lock().map_err(|error| status_of(&error))?;
        let entry = inner.device(device).map_err(|error| status_of(&error))?;
        let found = entry.record.namespaces.iter().find(|namespace| namespace.nsid == nsid);
        let name = found.map(|namespace| namespace.volume.clone()).ok_or(Status::INVALID_FIELD.do_not_retry())?;
        let owner = inner.volumes.get(&name).and_then(|volume| volume.record.created_by.as_ref());
        if owner != Some(&entry.record.spec.name) {
            // What the operator attached is not the guest's to destroy.
            return Err(Status::OPERATION_DENIED.do_not_retry());
        }
        inner.idle_volume(name.as_str()).map_err(|error| status_of(&error))?;
        inner.check_not_copied(&name).map_err(|error| status_of(&error))?;
        inner.check_disk_idle(name.as_str()).map_err(|error| status_of(&error))?;
        inner.check_room_idle(name.as_str()).map_err(|error| status_of(&error))?;
        inner.end_requests(&name).map_err(|error| status_of(&error))?;
        let mut record = entry.record.clone();
        record.namespaces.retain(|namespace| namespace.nsid != nsid);
        self.close_account(&inner, [&name]);
        let file = inner.volumes.get(&name).and_then(|volume| inner.removable_file(&volume.record));
        let (put_devices, remove_volumes, put_files) = (vec![&record], vec![&name], file.as_deref().into_iter().collect());
        if let Err(error) = self.store.apply(&Changes { put_devices, remove_volumes, put_files, ..Changes::default() }) {
            tracing::warn!(device, volume = %name, %error, "the deletion of a guest's namespace could not be stored");
            inner.admit_requests(&name);
            return Err(Status::INTERNAL_ERROR);
        }
        let gone = inner.volumes.remove(&name).map(|mut volume| {
            volume.close_for_good(true);
            inner.forget_kept(&name, volume.record.uuid);
            inner.late.forget_volume(&name);
            self.remove_own_file(&name, file.as_deref());
            volume
        });
        inner.set_record(device, record);
        self.retrace_all(&inner);
        drop(inner);
        // Its file is closed here: where that hangs, the operator's calls do not wait for it.
        drop(gone);
        Ok(())
    }

    /// Stores what guests have attached or detached, by device and namespace.
    fn note_attachments(&self, attachments: BTreeMap<(String, u32), bool>) {
        let Ok(mut inner) = self.lock() else { return };
        let mut changed: BTreeMap<String, DeviceRecord> = BTreeMap::new();
        for ((device, nsid), attached) in attachments {
            let Some(entry) = inner.devices.get(device.as_str()) else { continue };
            let record = changed.get(&device).unwrap_or(&entry.record);
            let Some(at) = record.namespaces.iter().position(|namespace| namespace.nsid == nsid) else { continue };
            if record.namespaces[at].attached != attached {
                changed.entry(device).or_insert_with(|| entry.record.clone()).namespaces[at].attached = attached;
            }
        }
        if changed.is_empty() {
            return;
        }
        let put_devices = changed.values().collect();
        if let Err(error) = self.store.apply(&Changes { put_devices, ..Changes::default() }) {
            let devices: Vec<_> = changed.keys().collect();
            tracing::warn!(?devices, %error, "what guests attached or detached could not be stored");
        }
        for (device, record) in changed {
            inner.set_record(&device, record);
        }
    }
}

impl Manager {
    /// Keeps what guests see of their volumes' use up to date, so that no shard has to ask the system below for it.
    fn measure_volumes(&self) {
        let live: Vec<_> = self.peek().volumes.values().filter_map(|volume| volume.live.as_ref().ok().cloned()).collect();
        for namespace in live {
            namespace.measure();
        }
    }

    /// Every device that has the namespace gets the notice, the one whose guest caused it as well: one host may use several.
    fn pass_notice(&self, namespace: &Arc<Namespace>, notify: &[([u8; 16], u8)]) {
        self.reach_users(namespace.volume.name());
        let inner = self.peek();
        for (device, nsid) in inner.users(namespace.volume.name()) {
            let Ok(live) = &device.live else { continue };
            if let Err(error) = live.reservation_notice(Arc::clone(namespace), notify.to_vec()) {
                tracing::warn!(device = %device.record.spec.name, nsid, %error, "a reservation notice was lost");
            }
        }
    }
}

impl Inner {
    /// A free name for the volume behind a guest's own namespace.
    fn name_for(&self, device: &Name, nsid: u32) -> Option<Name> {
        let uuid = self.devices.get(device)?.record.uuid.simple().to_string();
        // Room for the rest within a name's 64 characters. Other workers, which are not asked, choose other names.
        let stem = format!("{:.36}-{uuid:.8}", device.as_str());
        (0..NAMES).find_map(|attempt| {
            let text = match attempt {
                0 => format!("{stem}-ns{nsid}"),
                _ => format!("{stem}-ns{nsid}.{attempt}"),
            };
            text.parse().ok().filter(|name: &Name| !self.volumes.contains_key(name) && !self.creating.contains_key(name))
        })
    }

    /// Where files of a guest's own namespaces are made.
    fn room_of(&self, device: &str) -> Option<PathBuf> {
        match &self.devices.get(device)?.record.spec.kind.nvme()?.ns_backend.0 {
            BackendSpec::File(directory) => Some(directory.clone()),
            _ => None,
        }
    }

    /// The file of a guest's own namespace.
    fn own_file_of(&self, device: &str, nsid: u32) -> Option<PathBuf> {
        let namespaces = &self.devices.get(device)?.record.namespaces;
        let namespace = namespaces.iter().find(|namespace| namespace.nsid == nsid)?;
        self.volumes.get(&namespace.volume)?.record.own_file().map(Path::to_owned)
    }

    fn set_record(&mut self, device: &str, record: DeviceRecord) {
        if let Some(device) = self.devices.get_mut(device) {
            device.record = record;
        }
    }
}

/// What the guest is told.
pub(super) fn status_of(error: &ControlError) -> Status {
    let code = match error {
        ControlError::NsidTaken { .. } | ControlError::NsidRange { .. } | ControlError::VolumeExists { .. } => {
            Status::NAMESPACE_ID_UNAVAILABLE
        }
        ControlError::NoNsidFree { .. } => Status::NAMESPACE_ID_UNAVAILABLE,
        ControlError::Volume(VolumeError::BadSize { .. }) | ControlError::BadSize { .. } => Status::INVALID_FIELD,
        ControlError::Volume(VolumeError::BadBlockSize { .. }) => Status::INVALID_FORMAT,
        ControlError::Volume(VolumeError::Unsupported { .. }) | ControlError::ReadOnly { .. } => {
            Status::NAMESPACE_WRITE_PROTECTED
        }
        ControlError::Volume(VolumeError::Io { source, .. }) => {
            match source.raw_os_error().map(BlockError::from_write_errno) {
                Some(BlockError::NoSpace) => Status::NAMESPACE_INSUFFICIENT_CAPACITY,
                Some(BlockError::ReadOnly) => Status::NAMESPACE_WRITE_PROTECTED,
                _ => return Status::INTERNAL_ERROR,
            }
        }
        // Later it may go better.
        _ => return Status::INTERNAL_ERROR,
    };
    code.do_not_retry()
}

impl Volume {
    /// Bytes its medium holds for it at this moment. Asks the system below.
    pub(super) fn allocated(&self) -> Option<u64> {
        self.live.as_ref().ok().map(|namespace| namespace.volume.usage().allocated)
    }
}
