//! Volumes: create, resize, delete.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::{Arc, mpsc::sync_channel},
    thread,
    time::Duration,
};

use millrace_block::{BlockCount, Switch, Volume as _};
use millrace_engine::DiskKey;
use millrace_frontends::nvme::{Identity, Namespace};
use millrace_keeper::Link;
use millrace_services::{
    Leaf, Node, Service,
    graph::{self, Stored},
};
use uuid::Uuid;

use super::{
    HistoryEntry, Inner, Manager, Volume, VolumeView,
    graphs::{LiveGraph, Materials},
    shapes::told,
    warnings,
};
use crate::{
    Name, Size,
    error::ControlError,
    model::VolumeSpec,
    store::{Changes, Store, StoreError, VolumeRecord},
};

/// How long requests of a guest that is gone are waited for.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long the files of a deleted volume are waited for.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// A volume that was just made and is not known to anyone yet.
pub(super) struct NewVolume {
    pub(super) volume: Volume,
    /// What its making did to files.
    pub(super) files: Vec<FileChange>,
}

impl NewVolume {
    /// Leaves nothing of it behind.
    pub(super) fn undo(mut self, keeper: Option<&Arc<Link>>) {
        self.volume.close_for_good(false);
        forget_kept(keeper, &self.volume.record.spec.name, self.volume.record.uuid);
        drop(self.volume);
        self.files.into_iter().for_each(FileChange::undo);
    }
}

/// A volume that is being made: nobody else takes its name, its UUID or its legs as long as this lives, and what exists is not locked when this
/// goes.
struct Creating<'a> {
    manager: &'a Manager,
    name: Name,
    uuid: Uuid,
    materials: Materials,
}

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        let mut inner = self.manager.peek();
        inner.creating.remove(&self.name);
        inner.changing.remove(&self.name);
    }
}

/// A volume that is being resized: it is marked as long as this lives, and what exists is not locked when this goes.
struct Resizing<'a> {
    manager: &'a Manager,
    name: Name,
    namespace: Arc<Namespace>,
    blocks: BlockCount,
}

impl Drop for Resizing<'_> {
    fn drop(&mut self) {
        self.manager.peek().resizing.remove(&self.name);
    }
}

/// What tells one file or device from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileIdentity {
    File {
        device: u64,
        inode: u64,
    },
    /// It may have several nodes; its number is what counts.
    Device(u64),
}

impl FileIdentity {
    /// Of what is at a path now.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        if found.file_type().is_block_device() {
            return Some(Self::Device(found.rdev()));
        }
        Some(Self::File { device: found.dev(), inode: found.ino() })
    }

    /// The disk that it is on.
    pub(super) fn disk(self) -> DiskKey {
        match self {
            Self::File { device, .. } | Self::Device(device) => DiskKey(device),
        }
    }
}

/// Looks at the files of a stack, to be done while nothing is locked: a file system that does not answer keeps whoever names it waiting, and
/// nobody else.
pub(super) fn look_at_files(stack: &Node) {
    for path in stack.leaves().into_iter().filter_map(Leaf::file) {
        look(path);
    }
}

/// Looks at a path, to be done while nothing is locked: where a file system does not answer, whoever looks hangs.
pub(super) fn look(path: &Path) {
    #[cfg(test)]
    super::tests::before_look(path);
    let _ = fs::metadata(path);
}

/// Closes a volume that is no more, to be done while nothing is locked. Where a file system does not answer, it is closed when that does: it is
/// deleted all the same, and others' changes may wait for who deletes it.
fn close(name: &Name, gone: Volume) {
    let (done, closed) = sync_channel(1);
    let close = move || {
        drop(gone);
        // Who waited may have waited for long enough.
        let _ = done.send(());
    };
    // Where there is no thread, what it was to do is dropped here, and the volume with it.
    let spawned = thread::Builder::new().name("millrace-close".to_owned()).spawn(close);
    if spawned.is_ok() && closed.recv_timeout(CLOSE_LIMIT).is_err() {
        tracing::warn!(volume = %name, "the volume is deleted, and what it lies on does not answer: its files stay locked until it does");
    }
}

/// What the making of a volume does to its file.
pub(super) enum FileChange {
    None,
    Created(PathBuf),
    /// It was so many bytes long before.
    Lengthened(PathBuf, u64),
}

impl FileChange {
    /// What opening a file as so much of a volume is going to do.
    pub(super) fn foresee(path: &Path, size: Option<Size>) -> Self {
        match fs::metadata(path) {
            Ok(found) if found.is_file() && size.is_some_and(|size| size.0 > found.len()) => {
                Self::Lengthened(path.to_owned(), found.len())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::Created(path.to_owned()),
            _ => Self::None,
        }
    }

    /// Takes it back; the volume must be closed.
    pub(super) fn undo(self) {
        let (path, result) = match self {
            Self::None => return,
            Self::Created(path) => (path.clone(), fs::remove_file(&path)),
            Self::Lengthened(path, length) => {
                let file = fs::OpenOptions::new().write(true).open(&path);
                (path, file.and_then(|file| file.set_len(length)))
            }
        };
        // It may not have come to that.
        if let Err(error) = result.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
        {
            tracing::warn!(path = %path.display(), %error, "the file of a volume that could not be created is not as it was");
        }
    }
}

impl Manager {
    /// Creates a volume.
    pub fn create_volume(&self, spec: &VolumeSpec) -> Result<VolumeView, ControlError> {
        let warning = self.look_before_creation(spec);
        let creating = self.begin_creation(spec)?;
        // The lock is free: what it lies on may have to be erased, and its key be fetched.
        #[cfg(test)]
        super::tests::before_look(Path::new(spec.name.as_str()));
        let new = creating.materials.make_volume(spec, None, creating.uuid)?;
        let stored = self.lock().and_then(|inner| {
            let changes = Changes { put_volumes: vec![&new.volume.record], ..Changes::default() };
            self.store.apply(&changes)?;
            Ok(inner)
        });
        let mut inner = match stored {
            Ok(inner) => inner,
            Err(error) => {
                new.undo(creating.materials.keeper());
                return Err(error);
            }
        };
        tracing::info!(volume = %spec.name, stack = %spec.stack, size = %new.volume.record.size(), "volume created");
        if let Some(warning) = &warning {
            tracing::warn!(volume = %spec.name, "{warning}");
        }
        inner.volumes.insert(spec.name.clone(), new.volume);
        self.attend_migrations(&mut inner);
        Ok(VolumeView { warning, ..inner.volume_view(spec.name.as_str())? })
    }

    /// Checks and marks a volume that is to be made.
    fn begin_creation(&self, spec: &VolumeSpec) -> Result<Creating<'_>, ControlError> {
        let mut inner = self.lock()?;
        let uuid = inner.check_new(spec)?;
        let (name, materials) = (spec.name.clone(), inner.materials(spec));
        inner.creating.insert(name.clone(), VolumeSpec { uuid: Some(uuid), ..spec.clone() });
        inner.changing.insert(name.clone(), spec.stack.clone());
        Ok(Creating { manager: self, name, uuid, materials })
    }

    /// Grows a volume, or shrinks it if that is meant (`shrink`), and tells the guests that see it.
    pub fn resize_volume(&self, name: &str, size: Size, shrink: bool) -> Result<VolumeView, ControlError> {
        let resizing = self.begin_resize(name, size, shrink)?;
        // The lock is free: what a volume grows by may have to be written. What is stored changes on the way ([`shapes`](super::shapes)).
        let done = resizing.namespace.resize(resizing.blocks);
        self.reach_users(name);
        let mut inner = self.peek();
        self.settle_sizes(&inner, name);
        self.follow_shapes(&mut inner, name);
        self.retrace_all(&inner);
        done.map_err(told)?;
        tracing::info!(volume = name, %size, "volume resized");
        inner.notify(name);
        inner.volume_view(name)
    }

    /// Marks a volume: nobody else changes it, nor what it is made of, nor what is made of it.
    fn begin_resize(&self, name: &str, size: Size, shrink: bool) -> Result<Resizing<'_>, ControlError> {
        let mut inner = self.lock()?;
        let volume = inner.idle_volume(name)?;
        inner.check_resizable(volume)?;
        inner.check_not_copied(&volume.record.spec.name)?;
        inner.check_below_idle(name)?;
        inner.check_disk_idle(name)?;
        inner.check_shares_idle(name)?;
        let namespace = Arc::clone(volume.live()?);
        let blocks = wanted_blocks(volume, &namespace, size, shrink)?;
        inner.check_first_sizes(volume, size.0)?;
        let name = volume.record.spec.name.clone();
        self.settle_sizes(&inner, name.as_str());
        inner.resizing.insert(name.clone());
        Ok(Resizing { manager: self, name, namespace, blocks })
    }

    /// Writes the account of a volume and of those that it is made of: the time until now is at the sizes that they have now.
    fn settle_sizes(&self, inner: &Inner, name: &str) {
        let below = inner.below(name);
        for name in below.iter().map(Name::as_str).chain([name]) {
            self.settle_volume(inner, name);
        }
    }

    /// Deletes a volume that no device has. Its file stays, unless it was made for a guest's own namespace.
    pub fn delete_volume(&self, name: &str) -> Result<(), ControlError> {
        self.measure_now(name);
        let mut inner = self.lock()?;
        let volume = inner.idle_volume(name)?;
        let name = volume.record.spec.name.clone();
        inner.check_not_below(&name)?;
        inner.check_not_copied(&name)?;
        inner.check_disk_idle(name.as_str())?;
        inner.check_room_idle(name.as_str())?;
        let users: Vec<_> =
            inner.users(name.as_str()).map(|(device, nsid)| (device.record.spec.name.clone(), nsid)).collect();
        if !users.is_empty() {
            return Err(ControlError::VolumeAttached { name, users });
        }
        let file = inner.removable_file(&volume.record);
        inner.end_requests(&name)?;
        self.close_account(&inner, [&name]);
        let put_files = file.as_deref().into_iter().collect();
        let changes = Changes { remove_volumes: vec![&name], put_files, ..Changes::default() };
        self.store.apply(&changes).inspect_err(|_| inner.admit_requests(&name))?;
        let gone = inner.volumes.remove(&name).map(|mut volume| {
            volume.close_for_good(true);
            inner.forget_kept(&name, volume.record.uuid);
            inner.late.forget_volume(&name);
            self.remove_own_file(&name, file.as_deref());
            volume
        });
        tracing::info!(volume = %name, "volume deleted");
        drop(inner);
        if let Some(gone) = gone {
            close(&name, gone);
        }
        Ok(())
    }
}

impl Inner {
    /// The file that goes with a volume. One whose file system does not answer stays: who removes it has what exists locked.
    pub(super) fn removable_file(&self, record: &VolumeRecord) -> Option<PathBuf> {
        let (name, path) = (&record.spec.name, record.own_file()?);
        if self.late.may_hang(name) {
            tracing::warn!(volume = %name, path = %path.display(), "its file stays behind: the file system does not answer");
            return None;
        }
        Some(path.to_owned())
    }

    /// Waits for the requests of devices that have the volume no more: a guest that was detached, or is gone, may have left some, held back by a
    /// throttle, say. Where the volume was there may be another one's blocks later.
    pub(super) fn end_requests(&self, name: &Name) -> Result<(), ControlError> {
        let Some(live) = self.volumes.get(name).and_then(|volume| volume.graph.as_ref()) else { return Ok(()) };
        // What it is made of may hold back as well.
        let below = self.services_below(name);
        graph::hurry(&below, true);
        let in_flight = live.graph.drain(&live.switch, PATIENCE);
        graph::hurry(&below, false);
        if in_flight > 0 {
            return Err(ControlError::RequestsLeft { name: name.clone(), in_flight });
        }
        Ok(())
    }

    /// The services of the volumes that a volume is made of, and of the disk that it is a part of: others' requests there are let go as well.
    pub(super) fn services_below(&self, name: &Name) -> Vec<Arc<dyn Service>> {
        let graphs =
            self.below_with(name.as_str(), true).into_iter().filter_map(|name| self.volumes.get(&name)?.graph.as_ref());
        graphs.flat_map(|live| live.graph.all_services()).collect()
    }

    /// The volume stays after all: requests may come again.
    pub(super) fn admit_requests(&self, name: &Name) {
        if let Some(live) = self.volumes.get(name).and_then(|volume| volume.graph.as_ref()) {
            live.switch.open();
        }
    }

    /// Makes a volume, without telling anyone.
    pub(super) fn make_volume(&self, spec: &VolumeSpec, created_by: Option<Name>) -> Result<NewVolume, ControlError> {
        let uuid = self.check_new(spec)?;
        self.materials(spec).make_volume(spec, created_by, uuid)
    }

    /// Whether a volume can be made; the UUID that it gets.
    fn check_new(&self, spec: &VolumeSpec) -> Result<Uuid, ControlError> {
        spec.validate()?;
        let name = &spec.name;
        if self.volumes.contains_key(name) || self.creating.contains_key(name) {
            return Err(ControlError::VolumeExists { name: name.clone() });
        }
        spec.check_sizes()?;
        self.check_leaves(spec)?;
        if let Some(uuid) = spec.uuid {
            self.check_unused("volume", name, uuid)?;
        }
        Ok(match spec.stack.leaves().into_iter().find_map(Leaf::file) {
            _ if spec.uuid.is_some() => spec.uuid.unwrap_or_default(),
            Some(path) if self.stateless => Uuid::new_v5(&Uuid::NAMESPACE_OID, path.as_os_str().as_bytes()),
            _ => Uuid::new_v4(),
        })
    }

    /// Whether a volume that goes can give its room on a disk back at once: what exists is locked when it does.
    pub(super) fn check_room_idle(&self, name: &str) -> Result<(), ControlError> {
        let is_disk = |below: &Name| self.volumes.get(below).is_some_and(|below| below.record.spec.stack.is_disk());
        self.below_with(name, true).iter().filter(|below| is_disk(below)).try_for_each(|disk| {
            self.check_shares_idle(disk.as_str())?;
            match self.resizing.iter().find(|by| self.is_over(by.as_str(), disk.as_str())) {
                Some(by) => Err(ControlError::Resizing { name: disk.clone(), by: by.clone() }),
                None => Ok(()),
            }
        })
    }

    /// Nothing else is known by a UUID that is asked for.
    pub(super) fn check_unused(&self, kind: &'static str, name: &Name, uuid: Uuid) -> Result<(), ControlError> {
        if uuid.is_nil() {
            // To guests it means none, and the keeper has what is the daemon's own under it.
            return Err(ControlError::invalid(
                kind,
                name,
                "the UUID of zeroes names nothing; leave it out, or give another",
            ));
        }
        if let Some((_, old, _)) = self.retiring.iter().find(|(theirs, ..)| *theirs == uuid) {
            // Its burial would take what the keeper holds for the new one.
            let why = format!(
                "device {old}, which is deleted, had the UUID {uuid}, and its commands have not finished; try again then"
            );
            return Err(ControlError::untimely(kind, name, why));
        }
        let volumes = self.volumes.values().map(|volume| (volume.record.uuid, &volume.record.spec.name));
        let devices = self.devices.values().map(|device| (device.record.uuid, &device.record.spec.name));
        let coming = self.creating.values().filter_map(|spec| Some((spec.uuid?, &spec.name)));
        match volumes.chain(devices).chain(coming).find(|(theirs, _)| *theirs == uuid) {
            Some((_, other)) => Err(ControlError::untimely(kind, name, format!("{other} has the UUID {uuid} already"))),
            None => Ok(()),
        }
    }

    /// What the keeper has of a volume goes.
    pub(super) fn forget_kept(&self, name: &Name, uuid: Uuid) {
        forget_kept(self.keeper.as_ref(), name, uuid);
    }

    /// The file lock tells the same later, without the other's name. Of the others' files counts what they were when they were opened: a file
    /// system that does not answer now is not asked. What could not be opened has no lock, and is looked at.
    pub(super) fn check_file_is_free(&self, spec: &VolumeSpec, path: &Path) -> Result<(), ControlError> {
        let taken = |other: &Name| {
            Err(ControlError::FileTaken { name: spec.name.clone(), path: path.to_owned(), other: other.clone() })
        };
        // Of those that are being made, the path tells: their files may not be there yet, and have a lock when they are.
        let has = |other: &VolumeSpec| other.stack.leaves().into_iter().filter_map(Leaf::file).any(|theirs| theirs == path);
        let mut coming = self.creating.values().filter(|other| !(spec.read_only && other.read_only));
        if let Some(other) = coming.find(|&other| has(other)) {
            return taken(&other.name);
        }
        let Some(identity) = FileIdentity::of(path) else { return Ok(()) };
        let others = self.volumes.values().filter(|other| other.record.spec.name != spec.name);
        let other = others.into_iter().find(|other| {
            let is_it = |theirs: &Path| match other.graph.as_ref().and_then(|live| live.files.get(theirs)) {
                Some(opened) => *opened == identity,
                // Only the path tells then; that it is not written twice, its lock.
                None if self.may_not_answer(&other.record.spec.name) => false,
                None => FileIdentity::of(theirs) == Some(identity),
            };
            let mut theirs = other.record.spec.stack.leaves().into_iter().filter_map(Leaf::file);
            theirs.any(|theirs| theirs == path || is_it(theirs)) && !(spec.read_only && other.record.spec.read_only)
        });
        match other {
            Some(other) => taken(&other.record.spec.name),
            None => Ok(()),
        }
    }

    /// Whether the files of a volume that is not open may hang whoever looks at them.
    fn may_not_answer(&self, name: &Name) -> bool {
        self.late.is_unheard(name) || self.opening.contains(name)
    }

    /// Opens a stored volume. Unlike a new one, it must be there in full: a file is neither made nor lengthened. Where it cannot be opened, the
    /// record tells of losses that were found out.
    pub(super) fn reopen(&self, record: &mut VolumeRecord) -> Result<LiveGraph, ControlError> {
        self.materials(&record.spec).reopen(record)
    }
}

impl Materials {
    /// See [`Inner::make_volume`]; its name and legs are free.
    fn make_volume(&self, spec: &VolumeSpec, created_by: Option<Name>, uuid: Uuid) -> Result<NewVolume, ControlError> {
        let size = spec.size.map(|size| size.0);
        let leaves = spec.stack.leaves().len();
        let made = self.make_graph(spec, size, spec.block_size.0, (uuid, (0..).take(leaves).collect()), None, &mut false)?;
        let geometry = made.live.switch.geometry();
        let mut spec = spec.clone();
        // A size that was not asked for is the file's, less what makes no whole block.
        let own_size = spec.size.is_none() && spec.stack.as_leaf().is_none();
        spec.size = Some(Size(geometry.bytes()));
        let owns_file = created_by.is_some() && matches!(made.files[..], [FileChange::Created(_)]);
        let history = vec![HistoryEntry::now(&spec.stack)];
        let record = VolumeRecord { created_by, owns_file, own_size, history, ..VolumeRecord::new(spec, uuid) };
        let live = Ok(namespace(Arc::<Switch>::clone(&made.live.switch), &record, self.keeper()));
        Ok(NewVolume { volume: Volume { record, live, graph: Some(made.live), lost: false }, files: made.files })
    }

    /// See [`Inner::reopen`].
    pub(super) fn reopen(&self, record: &mut VolumeRecord) -> Result<LiveGraph, ControlError> {
        let size = (!record.own_size).then_some(record.size().0);
        let leaves = (record.uuid, record.leaf_numbers());
        let stored = Stored { size: record.size().0, out_of_use: &record.out_of_use };
        let block_size = record.block_size().0;
        let made = self.make_graph(&record.spec, size, block_size, leaves, Some(stored), &mut record.untold)?;
        let (has, size) = (made.live.switch.geometry().bytes(), record.size());
        if has != size.0 {
            record.untold |= made.live.is_untold();
            return Err(ControlError::BadSize {
                name: record.spec.name.clone(),
                size,
                why: format!("its legs have changed their sizes, and it has {}", Size(has)),
            });
        }
        Ok(made.live)
    }
}

impl Volume {
    /// Takes it out of force; no request may be in flight. Its files stay open until it is dropped.
    pub(super) fn close(&mut self) {
        if let Some(live) = &mut self.graph {
            live.graph.unmount();
            self.record.untold = live.is_untold();
            self.record.out_of_use = live.graph.out_of_use();
        }
    }

    /// The same for a volume that is deleted, or, when not `stored`, does not come to be. Its files stay open until it is dropped.
    pub(super) fn close_for_good(&mut self, stored: bool) {
        if let Some(live) = &mut self.graph {
            live.graph.discard(stored);
        }
    }
}

/// What the keeper has of a volume goes.
pub(super) fn forget_kept(keeper: Option<&Arc<Link>>, name: &Name, uuid: Uuid) {
    let Some(keeper) = keeper else { return };
    if let Err(error) = keeper.drop_owner(uuid.into_bytes()) {
        tracing::warn!(volume = %name, %error, "the keeper could not be told that the volume is gone");
    }
}

/// The volume as guests see it.
pub(super) fn namespace(
    volume: Arc<dyn millrace_block::Volume>,
    record: &VolumeRecord,
    keeper: Option<&Arc<Link>>,
) -> Arc<Namespace> {
    let identity = Identity { uuid: record.uuid.into_bytes(), eui64: [0; 8] };
    let shared = record.created_by.is_none();
    match keeper {
        Some(keeper) => Namespace::kept(volume, identity, shared, keeper),
        None => Namespace::new(volume, identity, shared),
    }
}

/// The name of the file that is made for a guest's namespace.
pub(super) fn own_file_name(volume: &Name) -> String {
    format!("{volume}.img")
}

/// The name of a volume that a guest made and whose name another worker's volume has.
pub(crate) fn twin_name(old: &str, uuid: Uuid) -> String {
    format!("{old:.51}-{:.12}", uuid.simple().to_string())
}

/// The number of blocks of a size asked for; one that loses data must be meant. What exists is locked: the size of now is that of then.
fn wanted_blocks(volume: &Volume, namespace: &Namespace, size: Size, shrink: bool) -> Result<BlockCount, ControlError> {
    let name = volume.record.spec.name.clone();
    let geometry = namespace.volume.geometry();
    let block = u64::from(geometry.block_size.bytes());
    if geometry.read_only {
        return Err(ControlError::ReadOnly { name });
    }
    if size.0 < block {
        return Err(ControlError::BadSize { name, size, why: format!("it is smaller than one block of {block} bytes") });
    }
    if !size.0.is_multiple_of(block) {
        return Err(ControlError::BadSize {
            name,
            size,
            why: format!("it is not a multiple of the block size, {block} bytes"),
        });
    }
    let has = Size(geometry.bytes());
    if size < has && !shrink {
        return Err(ControlError::WouldShrink { name, has, size });
    }
    Ok(BlockCount(size.0 / block))
}

impl Manager {
    /// Looks at the files of what could not be opened, to be done while nothing is locked: they are compared with a file that is named anew.
    pub(super) fn look_at_unopened(&self) {
        let mut unopened: Vec<PathBuf> = Vec::new();
        let inner = self.peek();
        // What does not answer is not asked again.
        let heard = inner.volumes.values().filter(|volume| !inner.may_not_answer(&volume.record.spec.name));
        for volume in heard {
            let is_unopened = |path: &&Path| volume.graph.as_ref().is_none_or(|live| !live.files.contains_key(*path));
            let files = volume.record.spec.stack.leaves().into_iter().filter_map(Leaf::file);
            unopened.extend(files.filter(is_unopened).map(Path::to_owned));
        }
        drop(inner);
        for path in &unopened {
            look(path);
        }
    }

    /// Looks at the files of a volume that is to be, while nothing is locked; what is odd about them.
    pub(crate) fn look_before_creation(&self, spec: &VolumeSpec) -> Option<String> {
        look_at_files(&spec.stack);
        self.look_at_unopened();
        warnings::of(spec)
    }

    /// Measures what a volume holds, for its last line in the account. Asks the system below: nothing is locked meanwhile.
    pub(crate) fn measure_now(&self, name: &str) {
        let live = self.peek().volumes.get(name).and_then(|volume| volume.live.as_ref().ok().cloned());
        if let Some(namespace) = live {
            namespace.measure();
        }
    }

    /// Removes the file of a volume that is deleted, as the store has been told.
    pub(super) fn remove_own_file(&self, name: &Name, file: Option<&Path>) {
        let Some(path) = file else { return };
        if let Err(error) = fs::remove_file(path) {
            tracing::warn!(volume = %name, path = %path.display(), %error, "its file stays behind");
        }
        self.is_done_with(Some(path));
    }

    /// What was to be done with a guest's file is done, or will not be.
    pub(super) fn is_done_with(&self, file: Option<&Path>) {
        if let Some(path) = file {
            is_done_with(&self.store, path);
        }
    }

    /// Removes files of guests' namespaces that were not there yet, or not any more, when the worker before this one ended: they would
    /// be in the way of others.
    pub(super) fn settle_files(&self) -> Result<(), StoreError> {
        let (volumes, _) = self.store.load()?;
        settle_files(&self.store, &volumes.iter().collect::<Vec<_>>())
    }
}

/// Removes the files that a state says are to be settled, but for those that one of these volumes has.
pub(crate) fn settle_files(store: &Store, volumes: &[&VolumeRecord]) -> Result<(), StoreError> {
    for path in store.load_files()? {
        let has = |record: &&VolumeRecord| {
            let leaves = record.spec.stack.leaves();
            leaves.into_iter().filter_map(Leaf::file).any(|file| file == path)
        };
        if !volumes.iter().any(has) {
            match fs::remove_file(&path) {
                Ok(()) => {
                    tracing::info!(path = %path.display(), "the file of a guest's namespace that is none is removed");
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => tracing::warn!(path = %path.display(), %error, "a file of no namespace stays behind"),
            }
        }
        is_done_with(store, &path);
    }
    Ok(())
}

fn is_done_with(store: &Store, path: &Path) {
    if let Err(error) = store.apply(&Changes { remove_files: vec![path], ..Changes::default() }) {
        tracing::warn!(path = %path.display(), %error, "it is not stored that the file is settled; the next start looks after it");
    }
}

impl VolumeRecord {
    /// That of a new volume.
    pub(crate) fn new(spec: VolumeSpec, uuid: Uuid) -> Self {
        Self {
            spec,
            formatted: None,
            uuid,
            created_by: None,
            owns_file: false,
            own_size: false,
            growing: None,
            lengths: BTreeMap::new(),
            memory_leaves: Vec::new(),
            out_of_use: Vec::new(),
            untold: false,
            history: Vec::new(),
        }
    }

    /// The size it has now.
    pub(crate) fn size(&self) -> Size {
        self.spec.size.unwrap_or_default()
    }

    /// The file that was made for a guest's namespace, wherever it is in the stack. Where several could be it, none is: a file that stays
    /// behind costs less than one that goes.
    pub(super) fn own_file(&self) -> Option<&Path> {
        let own = own_file_name(&self.spec.name);
        let is_own = |path: &&Path| {
            path.file_name().is_some_and(|name| *name == *own)
                || path
                    .file_stem()
                    .is_some_and(|stem| twin_name(&stem.to_string_lossy(), self.uuid) == self.spec.name.as_str())
        };
        let mut found = self.spec.stack.leaves().into_iter().filter_map(Leaf::file).filter(is_own);
        let path = found.next().filter(|_| self.owns_file)?;
        found.next().is_none().then_some(path)
    }

    /// After a change of its stack: a file that is no longer part of it does not go with it.
    pub(super) fn keep_own_file(&mut self, before: &Self) {
        let stays = |own: &Path| self.spec.stack.leaves().into_iter().filter_map(Leaf::file).any(|path| path == own);
        self.owns_file = before.own_file().is_some_and(stays);
    }
}
