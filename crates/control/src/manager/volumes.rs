//! Volumes: create, resize, delete.

use std::{
    fs, io,
    os::{
        fd::BorrowedFd,
        unix::{
            ffi::OsStrExt,
            fs::{FileTypeExt, MetadataExt},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use millrace_backends::{BackendSpec, FileOptions, FileVolume, MemoryVolume};
use millrace_block::{BlockCount, BlockSize, VolumeError};
use millrace_frontends::nvme::{Identity, Namespace};
use millrace_keeper::{Key, Kind, Link};
use uuid::Uuid;

use super::{Inner, Manager, Volume, VolumeView};
use crate::{
    Name, Size,
    error::ControlError,
    model::{VolumeChange, VolumeSpec},
    store::{Changes, VolumeRecord},
};

/// How long the requests of a dead worker may keep a file, and how often is looked.
const FILE_PATIENCE: Duration = Duration::from_secs(60);
const FILE_LOOK: Duration = Duration::from_millis(1);

/// A volume that was just made and is not known to anyone yet.
pub(super) struct NewVolume {
    pub(super) volume: Volume,
    /// What its making did to its file.
    pub(super) file: FileChange,
}

impl NewVolume {
    /// Leaves nothing of it behind.
    pub(super) fn undo(self) {
        drop(self.volume);
        self.file.undo();
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
    /// What opening a volume of this size is going to do.
    fn foresee(spec: &VolumeSpec) -> Self {
        let Some(path) = spec.backend.path() else { return Self::None };
        match fs::metadata(path) {
            Ok(found) if found.is_file() && spec.size.is_some_and(|size| size.0 > found.len()) => {
                Self::Lengthened(path.clone(), found.len())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::Created(path.clone()),
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
        if let Err(error) = result {
            tracing::warn!(path = %path.display(), %error, "the file of a volume that could not be created is not as it was");
        }
    }
}

impl Manager {
    /// Creates a volume.
    pub fn create_volume(&self, spec: &VolumeSpec) -> Result<VolumeView, ControlError> {
        let mut inner = self.lock()?;
        let new = inner.make_volume(spec, None)?;
        let changes = Changes { put_volumes: vec![&new.volume.record], ..Changes::default() };
        if let Err(error) = self.store.apply(&changes) {
            new.undo();
            return Err(error.into());
        }
        tracing::info!(volume = %spec.name, backend = %spec.backend.0, size = %new.volume.record.size(), "volume created");
        inner.volumes.insert(spec.name.clone(), new.volume);
        inner.volume_view(spec.name.as_str())
    }

    /// Grows or shrinks a volume, and tells the guests that see it.
    pub fn resize_volume(&self, name: &str, change: &VolumeChange) -> Result<VolumeView, ControlError> {
        let mut inner = self.lock()?;
        let volume = inner.idle_volume(name)?;
        let namespace = Arc::clone(volume.live()?);
        let (before, blocks) = (volume.record.clone(), wanted_blocks(volume, &namespace, change.size)?);
        let mut after = before.clone();
        after.spec.size = Some(change.size);
        let put = |record| self.store.apply(&Changes { put_volumes: vec![record], ..Changes::default() });
        // What is stored is never more than there is: a volume that came back too large would be enlarged without a word.
        if change.size < before.size() {
            put(&after)?;
            if let Err(error) = namespace.resize(blocks) {
                if let Err(error) = put(&before) {
                    tracing::error!(volume = name, %error, "the stored size is smaller than the volume");
                }
                return Err(error.into());
            }
        } else {
            let blocks_before = namespace.volume.geometry().blocks;
            namespace.resize(blocks)?;
            if let Err(error) = put(&after) {
                if let Err(error) = namespace.resize(blocks_before) {
                    tracing::error!(volume = name, %error, "the volume is larger than its stored size");
                }
                return Err(error.into());
            }
        }
        tracing::info!(volume = name, size = %change.size, "volume resized");
        if let Some(volume) = inner.volumes.get_mut(name) {
            volume.record = after;
        }
        inner.notify(name);
        inner.volume_view(name)
    }

    /// Deletes a volume that no device has. Its file stays, unless it was made for a guest's own namespace.
    pub fn delete_volume(&self, name: &str) -> Result<(), ControlError> {
        let mut inner = self.lock()?;
        let volume = inner.idle_volume(name)?;
        let name = volume.record.spec.name.clone();
        let users: Vec<_> =
            inner.users(name.as_str()).map(|(device, nsid)| (device.record.spec.name.clone(), nsid)).collect();
        if !users.is_empty() {
            return Err(ControlError::VolumeAttached { name, users });
        }
        self.store.apply(&Changes { remove_volumes: vec![&name], ..Changes::default() })?;
        if let Some(volume) = inner.volumes.remove(&name) {
            inner.forget_kept(&volume.record);
            remove_own_file(&volume.record);
        }
        tracing::info!(volume = %name, "volume deleted");
        Ok(())
    }
}

impl Inner {
    /// Makes a volume, without telling anyone.
    pub(super) fn make_volume(&self, spec: &VolumeSpec, created_by: Option<Name>) -> Result<NewVolume, ControlError> {
        spec.validate()?;
        let name = &spec.name;
        if self.volumes.contains_key(name) {
            return Err(ControlError::VolumeExists { name: name.clone() });
        }
        if let Some(path) = spec.backend.path() {
            self.check_file_is_free(spec, path)?;
        }
        let file = FileChange::foresee(spec);
        let uuid = match spec.backend.path() {
            Some(path) if self.stateless => Uuid::new_v5(&Uuid::NAMESPACE_OID, path.as_os_str().as_bytes()),
            _ => Uuid::new_v4(),
        };
        let volume = open(spec, spec.block_size.0, uuid, self.keeper.as_ref())?;
        let geometry = volume.geometry();
        let mut spec = spec.clone();
        // A size that was not asked for is the file's, less what makes no whole block.
        spec.size = Some(Size(geometry.bytes()));
        let owns_file = created_by.is_some() && matches!(file, FileChange::Created(_));
        let record = VolumeRecord { spec, formatted: None, uuid, created_by, owns_file };
        let live = Ok(namespace(volume, &record));
        Ok(NewVolume { volume: Volume { record, live }, file })
    }

    /// What the keeper has of a volume goes.
    pub(super) fn forget_kept(&self, record: &VolumeRecord) {
        let Some(keeper) = &self.keeper else { return };
        if let Err(error) = keeper.drop_owner(record.uuid.into_bytes()) {
            tracing::warn!(volume = %record.spec.name, %error, "the keeper could not be told that the volume is gone");
        }
    }

    /// The file lock tells the same later, without the other's name.
    fn check_file_is_free(&self, spec: &VolumeSpec, path: &Path) -> Result<(), ControlError> {
        let Some(identity) = file_identity(path) else { return Ok(()) };
        let other = self.volumes.values().find(|other| {
            let theirs = other.record.spec.backend.path().and_then(|path| file_identity(path));
            theirs == Some(identity) && !(spec.read_only && other.record.spec.read_only)
        });
        match other {
            Some(other) => Err(ControlError::FileTaken {
                name: spec.name.clone(),
                path: path.to_owned(),
                other: other.record.spec.name.clone(),
            }),
            None => Ok(()),
        }
    }
}

/// Opens a volume's back end.
pub(super) fn open(
    spec: &VolumeSpec,
    block_size: BlockSize,
    uuid: Uuid,
    keeper: Option<&Arc<Link>>,
) -> Result<Arc<dyn millrace_block::Volume>, ControlError> {
    let (name, size) = (spec.name.as_str(), spec.size.map(|size| size.0));
    Ok(match (&spec.backend.0, keeper, size) {
        (BackendSpec::Memory, Some(keeper), Some(size)) => kept_memory(name, size, block_size, uuid, keeper)?,
        (backend, ..) => match backend {
            BackendSpec::File(path) if spec.read_only => {
                FileVolume::open(name, &FileOptions { path: path.clone(), size, block_size, read_only: true })?
            }
            backend => millrace_backends::open(backend, name, size, block_size)?,
        },
    })
}

/// Opens a stored volume. After a worker's death its file stays locked until the kernel has finished its requests: nothing may be
/// done to the file before, or what the dead one wrote could come after what its successor writes.
fn open_freed(record: &VolumeRecord, keeper: Option<&Arc<Link>>) -> Result<Arc<dyn millrace_block::Volume>, ControlError> {
    let succeeds = keeper.is_some_and(|keeper| keeper.predecessor().is_some());
    let deadline = Instant::now() + if succeeds { FILE_PATIENCE } else { Duration::ZERO };
    loop {
        match open(&record.spec, record.block_size().0, record.uuid, keeper) {
            Err(ControlError::Volume(VolumeError::InUse { .. })) if Instant::now() < deadline => thread::sleep(FILE_LOOK),
            result => return result,
        }
    }
}

/// A volume in memory files that the keeper holds.
fn kept_memory(
    name: &str,
    size: u64,
    block_size: BlockSize,
    uuid: Uuid,
    keeper: &Arc<Link>,
) -> Result<Arc<dyn millrace_block::Volume>, VolumeError> {
    let owner = uuid.into_bytes();
    let files: Vec<_> = keeper.take_all(owner, Kind::BLOCKS).into_iter().map(|(_, held)| held.fd).collect();
    let keeper = Arc::clone(keeper);
    let put = move |slot, file: BorrowedFd<'_>| {
        keeper.put(Key { owner, kind: Kind::BLOCKS, slot }, file).map_err(io::Error::other)
    };
    Ok(MemoryVolume::in_files(name, size, block_size, &files, Box::new(put))?)
}

/// Opens a stored volume. Unlike a new one, it must be there in full: a file is neither made nor lengthened.
pub(super) fn reopen(record: &VolumeRecord, keeper: Option<&Arc<Link>>) -> Result<Arc<Namespace>, ControlError> {
    if let Some(path) = record.spec.backend.path() {
        let failed = |action, source| {
            let (volume, path) = (record.spec.name.to_string(), path.clone());
            ControlError::Volume(VolumeError::Io { volume, action, path, source })
        };
        let found = fs::metadata(path).map_err(|error| failed("open", error))?;
        if found.is_file() && found.len() < record.size().0 {
            let (length, size) = (Size(found.len()), record.size());
            let why = format!("the file has {length} and the volume {size}: part of its data is missing");
            return Err(failed("use", io::Error::other(why)));
        }
    }
    Ok(namespace(open_freed(record, keeper)?, record))
}

/// The volume as guests see it.
pub(super) fn namespace(volume: Arc<dyn millrace_block::Volume>, record: &VolumeRecord) -> Arc<Namespace> {
    let identity = Identity { uuid: record.uuid.into_bytes(), eui64: [0; 8] };
    Namespace::new(volume, identity, record.created_by.is_none())
}

/// Removes the file of a guest's own namespace.
pub(super) fn remove_own_file(record: &VolumeRecord) {
    let Some(path) = record.spec.backend.path().filter(|_| record.owns_file) else { return };
    if let Err(error) = fs::remove_file(path) {
        tracing::warn!(volume = %record.spec.name, path = %path.display(), %error, "its file stays behind");
    }
}

/// What tells one file or device from another.
pub(super) fn file_identity(path: &Path) -> Option<(u64, u64)> {
    let found = fs::metadata(path).ok()?;
    let device = found.file_type().is_block_device();
    // A block device may have several nodes; its number is what counts.
    Some(if device { (u64::MAX, found.rdev()) } else { (found.dev(), found.ino()) })
}

/// The number of blocks of a size asked for.
fn wanted_blocks(volume: &Volume, namespace: &Namespace, size: Size) -> Result<BlockCount, ControlError> {
    let name = volume.record.spec.name.clone();
    let geometry = namespace.volume.geometry();
    let block = u64::from(geometry.block_size.bytes());
    if geometry.read_only {
        return Err(ControlError::ReadOnly { name });
    }
    if size.0 < block {
        return Err(ControlError::BadSize { name, size, why: "it is smaller than one block" });
    }
    if !size.0.is_multiple_of(block) {
        return Err(ControlError::BadSize { name, size, why: "it is not a multiple of the block size" });
    }
    Ok(BlockCount(size.0 / block))
}

impl VolumeRecord {
    /// The size it has now.
    pub(crate) fn size(&self) -> Size {
        self.spec.size.unwrap_or_default()
    }
}
