//! The declared state on disk: `state.redb` in the state directory (format: docs/formats/state.md).

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs, io,
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use millrace_block::Geometry;
use millrace_frontends::virtio_blk;
use redb::{AccessGuard, Database, ReadableDatabase, ReadableTable, StorageError, TableDefinition};
use rustix::{
    fs::{CWD, RenameFlags, renameat_with},
    io::Errno,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;
use uuid::Uuid;

use crate::{
    Name, Size,
    apps::AppUser,
    manager::HistoryEntry,
    model::{CopySpec, CopyState, DeviceSpec, GroupCaps, GroupSpec, LogicalBlock, VolumeSpec},
};

mod room;
#[cfg(test)]
pub(crate) mod tests;

/// What this program writes and understands.
pub(crate) const LAYOUT_VERSION: u64 = 1;

/// The file's name in the state directory.
pub(crate) const FILE: &str = "state.redb";

/// The ending of its name while it is made.
const MAKING: &str = "new";

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const VOLUMES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("volumes");
const DEVICES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("devices");
const COPIES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("copies");
const GROUPS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("groups");
/// Keys are users' numbers, as text.
const APPS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("apps");
/// Keys are names of volumes that have come from another worker and were not opened.
const RECEIVED: TableDefinition<'_, &str, ()> = TableDefinition::new("received");
/// Keys are paths, as bytes.
const FILES: TableDefinition<'_, &[u8], ()> = TableDefinition::new("files");
const VERSION: &str = "layout_version";

/// Why the state could not be read or written.
#[derive(Debug, Error)]
pub enum StoreError {
    /// Another process has it open.
    #[error("{}: another daemon has this state open; stop it, or choose another --state-dir", path.display())]
    InUse {
        /// The database.
        path: PathBuf,
    },
    /// It was written by another version of the program.
    #[error(
        "{}: its layout has version {found}, and this program understands version {LAYOUT_VERSION}; use the program that wrote \
         it, or choose another --state-dir", path.display()
    )]
    Version {
        /// The database.
        path: PathBuf,
        /// The version it has.
        found: u64,
    },
    /// It is there, and has nothing in it.
    #[error(
        "{}: it is empty, and what the daemon had is not in it; put a copy back, or delete it to begin with nothing (a first start of an \
         earlier version that was cut short leaves one, too)", path.display()
    )]
    Empty {
        /// The database.
        path: PathBuf,
    },
    /// An object in it cannot be understood.
    #[error("{}: the stored {kind} {name} cannot be read: {source}", path.display())]
    Record {
        /// The database.
        path: PathBuf,
        /// "volume", "device", "copy", "group" or "user".
        kind: &'static str,
        /// The object's name.
        name: String,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A new one cannot be put in its place.
    #[error("{}: there is none, and a new one cannot be put there: {source}", path.display())]
    Make {
        /// The database.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// What is in it is not what was written.
    #[error("{}: it is damaged ({what}): put a copy back, or delete it to begin with nothing", path.display())]
    Damaged {
        /// The database.
        path: PathBuf,
        /// What it said.
        what: String,
    },
    /// The database panicked when something was to be stored.
    #[error(
        "{}: storing a change ended in a panic ({what}), and the change is not made; the log has more. If that happens again, stop the \
         daemon and put a copy back", path.display()
    )]
    Panicked {
        /// The database.
        path: PathBuf,
        /// What the panic said.
        what: String,
    },
    /// The database failed.
    #[error("{}: {source}", path.display())]
    Database {
        /// The database.
        path: PathBuf,
        /// What it said.
        #[source]
        source: Box<redb::Error>,
    },
}

/// A volume as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VolumeRecord {
    /// As declared, with the size it has now.
    pub(crate) spec: VolumeSpec,
    /// The block size it has now, when a guest formatted it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) formatted: Option<LogicalBlock>,
    /// What guests know it by.
    pub(crate) uuid: Uuid,
    /// The device whose guest created it, as a namespace of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) created_by: Option<Name>,
    /// Its file was made for a guest's namespace and goes with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) owns_file: bool,
    /// Its size follows from its legs: they are not told theirs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) own_size: bool,
    /// The size that it is being given, larger than its own: it may have either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) growing: Option<Size>,
    /// How long its files were before that, where it was not told its size: no more than this follows from it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) lengths: BTreeMap<PathBuf, u64>,
    /// What the keeper knows its leaves in memory by, from left to right; empty: 0, 1, 2 and so on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) memory_leaves: Vec<u32>,
    /// Legs that were out of use when that was looked at last ([`Graph::out_of_use`](millrace_services::graph::Graph::out_of_use)): what
    /// they hold may be old, and those that know it may be gone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) out_of_use: Vec<String>,
    /// Writes that were acknowledged may be lost, and the guest is yet to be told, at its next flush.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) untold: bool,
    /// Its stacks, the latest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) history: Vec<HistoryEntry>,
}

impl VolumeRecord {
    /// The block size it has now.
    pub(crate) fn block_size(&self) -> LogicalBlock {
        self.formatted.unwrap_or(self.spec.block_size)
    }
}

/// A device as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceRecord {
    /// As declared.
    pub(crate) spec: DeviceSpec,
    /// Its controller identifier, unlike any other device's.
    pub(crate) cntlid: u16,
    /// What its subsystem is named after: no two devices of a guest may have one name, whichever daemons they come from.
    pub(crate) uuid: Uuid,
    /// Its namespaces, in order of their identifiers.
    pub(crate) namespaces: Vec<NamespaceRecord>,
    /// Whose application it was made for; it goes with that application.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) session: Option<SessionRecord>,
    /// What the volume is, or was, that a virtio disk shows or showed last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) disk_kind: Option<DiskKind>,
}

impl DeviceRecord {
    /// The device shows a volume of this shape, or showed it until now: a virtio disk stays such a one until it shows another.
    pub(crate) fn note_kind(&mut self, geometry: &Geometry, read_only: bool) {
        if self.spec.kind.virtio_blk().is_some() {
            self.disk_kind = Some(virtio_blk::Kind::new(geometry, read_only).into());
        }
    }
}

/// What a virtio disk's guest learns once of its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskKind {
    pub(crate) block_size: LogicalBlock,
    pub(crate) read_only: bool,
    pub(crate) discard: bool,
}

impl From<virtio_blk::Kind> for DiskKind {
    fn from(kind: virtio_blk::Kind) -> Self {
        let virtio_blk::Kind { block_size, read_only, deallocate } = kind;
        Self { block_size: LogicalBlock(block_size), read_only, discard: deallocate }
    }
}

impl From<DiskKind> for virtio_blk::Kind {
    fn from(kind: DiskKind) -> Self {
        let DiskKind { block_size, read_only, discard } = kind;
        Self { block_size: block_size.0, read_only, deallocate: discard }
    }
}

/// The application that a device was made for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionRecord {
    /// Its user's number.
    pub(crate) uid: u32,
    /// Its user's caps.
    #[serde(default, skip_serializing_if = "GroupCaps::is_empty")]
    pub(crate) caps: GroupCaps,
}

/// A namespace of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamespaceRecord {
    pub(crate) nsid: u32,
    pub(crate) volume: Name,
    pub(crate) read_only: bool,
    /// Cleared by a guest that detached it from its controller.
    pub(crate) attached: bool,
}

/// A copy as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CopyRecord {
    pub(crate) name: Name,
    pub(crate) source: Name,
    pub(crate) target: Name,
    /// Bytes per second at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate: Option<Size>,
    pub(crate) state: CopyState,
    /// Why it has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// When it was begun, in seconds since 1970.
    pub(crate) begun: u64,
    /// Bytes to copy.
    pub(crate) bytes: u64,
    /// Bytes from the first one on that are durable on the target.
    pub(crate) done: u64,
    /// What was done with them.
    pub(crate) moved: u64,
    pub(crate) offloaded: u64,
    pub(crate) skipped: u64,
}

impl CopyRecord {
    /// A copy that begins now.
    pub(crate) fn new(name: Name, spec: &CopySpec, bytes: u64) -> Self {
        Self {
            name,
            source: spec.source.clone(),
            target: spec.target.clone(),
            rate: spec.rate.filter(|rate| rate.0 > 0),
            state: CopyState::Running,
            reason: None,
            begun: crate::manager::seconds_now(),
            bytes,
            done: 0,
            moved: 0,
            offloaded: 0,
            skipped: 0,
        }
    }

    /// Nothing of it is on the target, as far as anybody can tell.
    pub(crate) fn forget_progress(&mut self) {
        (self.done, self.moved, self.offloaded, self.skipped) = (0, 0, 0, 0);
    }
}

/// Several changes, stored together or not at all.
#[derive(Debug, Default)]
pub(crate) struct Changes<'a> {
    pub(crate) put_volumes: Vec<&'a VolumeRecord>,
    pub(crate) put_devices: Vec<&'a DeviceRecord>,
    pub(crate) put_copies: Vec<&'a CopyRecord>,
    pub(crate) remove_volumes: Vec<&'a Name>,
    pub(crate) remove_devices: Vec<&'a Name>,
    pub(crate) remove_copies: Vec<&'a Name>,
    pub(crate) put_groups: Vec<&'a GroupSpec>,
    pub(crate) remove_groups: Vec<&'a Name>,
    /// What commands said of users' applications.
    pub(crate) put_apps: Vec<&'a AppUser>,
    pub(crate) remove_apps: Vec<u32>,
    /// Volumes that have come from another worker, and were not opened; no more, as those that are removed.
    pub(crate) put_received: Vec<&'a Name>,
    pub(crate) remove_received: Vec<&'a Name>,
    /// Files that are about to be made or removed.
    pub(crate) put_files: Vec<&'a Path>,
    pub(crate) remove_files: Vec<&'a Path>,
}

impl Changes<'_> {
    /// What they come to, in order.
    fn entries(&self) -> Vec<Entry> {
        let put =
            |table, key: &str, record: Vec<u8>| Entry { place: Place::Record(table, key.to_owned()), value: Some(record) };
        let gone = |table, key: &str| Entry { place: Place::Record(table, key.to_owned()), value: None };
        let mut entries: Vec<Entry> = Vec::new();
        entries.extend(self.remove_volumes.iter().map(|name| gone(VOLUMES, name.as_str())));
        entries.extend(self.put_volumes.iter().map(|record| put(VOLUMES, record.spec.name.as_str(), encode(record))));
        // What is no more waits for nothing.
        let opened = self.remove_volumes.iter().chain(&self.remove_received);
        let received = |name: &Name, value| Entry { place: Place::Received(name.as_str().to_owned()), value };
        entries.extend(opened.map(|name| received(name, None)));
        entries.extend(self.put_received.iter().map(|name| received(name, Some(Vec::new()))));
        entries.extend(self.remove_devices.iter().map(|name| gone(DEVICES, name.as_str())));
        entries.extend(self.put_devices.iter().map(|record| put(DEVICES, record.spec.name.as_str(), encode(record))));
        entries.extend(self.remove_copies.iter().map(|name| gone(COPIES, name.as_str())));
        entries.extend(self.put_copies.iter().map(|record| put(COPIES, record.name.as_str(), encode(record))));
        entries.extend(self.remove_groups.iter().map(|name| gone(GROUPS, name.as_str())));
        entries.extend(self.put_groups.iter().map(|spec| put(GROUPS, spec.name.as_str(), encode(spec))));
        entries.extend(self.remove_apps.iter().map(|uid| gone(APPS, &uid.to_string())));
        entries.extend(self.put_apps.iter().map(|app| put(APPS, &app.uid.to_string(), encode(app))));
        let file = |path: &Path, value| Entry { place: Place::File(path.as_os_str().as_bytes().to_vec()), value };
        entries.extend(self.remove_files.iter().map(|path| file(path, None)));
        entries.extend(self.put_files.iter().map(|path| file(path, Some(Vec::new()))));
        entries
    }
}

/// Where something is stored: a table and its key there.
#[derive(Clone)]
enum Place {
    Record(TableDefinition<'static, &'static str, &'static [u8]>, String),
    Received(String),
    File(Vec<u8>),
}

/// What is stored there, or is to be; `None`: nothing. Where there are keys only, no bytes.
struct Entry {
    place: Place,
    value: Option<Vec<u8>>,
}

/// Stores these, and tells what was there: what takes it back, in the order for that.
fn exchange(transaction: &redb::WriteTransaction, entries: &[Entry]) -> Result<Vec<Entry>, redb::Error> {
    let mut before = Vec::with_capacity(entries.len());
    for Entry { place, value } in entries {
        let had = match place {
            Place::Record(table, key) => {
                let mut table = transaction.open_table(*table)?;
                let had = match value {
                    Some(value) => table.insert(key.as_str(), value.as_slice())?,
                    None => table.remove(key.as_str())?,
                };
                had.map(|had| had.value().to_vec())
            }
            Place::Received(name) => {
                let mut table = transaction.open_table(RECEIVED)?;
                let had = match value {
                    Some(_) => table.insert(name.as_str(), ())?,
                    None => table.remove(name.as_str())?,
                };
                had.map(|_| Vec::new())
            }
            Place::File(path) => {
                let mut table = transaction.open_table(FILES)?;
                let had = match value {
                    Some(_) => table.insert(path.as_slice(), ())?,
                    None => table.remove(path.as_slice())?,
                };
                had.map(|_| Vec::new())
            }
        };
        before.push(Entry { place: place.clone(), value: had });
    }
    before.reverse();
    Ok(before)
}

/// Whether this is what is stored.
fn is_there(transaction: &redb::ReadTransaction, Entry { place, value }: &Entry) -> Result<bool, redb::Error> {
    let found = match place {
        Place::Record(table, key) => transaction.open_table(*table)?.get(key.as_str())?.map(|found| found.value().to_vec()),
        Place::Received(name) => transaction.open_table(RECEIVED)?.get(name.as_str())?.map(|_| Vec::new()),
        Place::File(path) => transaction.open_table(FILES)?.get(path.as_slice())?.map(|_| Vec::new()),
    };
    Ok(found == *value)
}

/// How the database is opened.
type Opener = Box<dyn Fn() -> Result<Database, redb::DatabaseError> + Send + Sync>;

#[derive(Default)]
struct Slot {
    /// `None` after a failure (the file system was full, for instance): the database works again only when it was opened anew.
    database: Option<Database>,
    /// What takes back a change that has failed: where only its last sync did, the file has it all the same, while the daemon goes on
    /// without it. Nothing is read or stored before this is done.
    undo: Vec<Entry>,
}

/// The open state.
pub(crate) struct Store {
    slot: Mutex<Slot>,
    opener: Opener,
    path: PathBuf,
}

impl Store {
    /// Opens the state in `directory`, making it when there is none.
    pub(crate) fn open(directory: &Path) -> Result<Self, StoreError> {
        let path = directory.join(FILE);
        match fs::metadata(&path) {
            Ok(found) if found.len() == 0 => return Err(StoreError::Empty { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if let Some(made) = Self::make(directory, &path)? {
                    return Ok(made);
                }
            }
            _ => {}
        }
        Self::prepare(opener(&path), path)
    }

    /// Makes a state with nothing in it. It has another name until it is whole, so that a start that is cut short leaves none.
    ///
    /// `None`: another daemon has made one meanwhile.
    fn make(directory: &Path, path: &Path) -> Result<Option<Self>, StoreError> {
        let new = path.with_extension(MAKING);
        let make = || {
            let file = new.clone();
            Self::prepare(Box::new(move || Database::create(&file)), new.clone())
        };
        let failed = |source| StoreError::Make { path: path.to_owned(), source };
        let made = match make() {
            // Whoever makes it now has it locked; so this is what such a start has left.
            Err(error) if !matches!(error, StoreError::InUse { .. }) && new.exists() => {
                fs::remove_file(&new).map_err(failed)?;
                make()
            }
            made => made,
        };
        let mut made = made?;
        // It stays open, and locked with it.
        if !put_in_place(directory, &new, path).map_err(failed)? {
            return Ok(None);
        }
        (made.opener, made.path) = (opener(path), path.to_owned());
        Ok(Some(made))
    }

    /// A state that is forgotten with the process.
    pub(crate) fn in_memory() -> Result<Self, StoreError> {
        let backend = redb::backends::InMemoryBackend::new;
        Self::prepare(Box::new(move || Database::builder().create_with_backend(backend())), "state in memory".into())
    }

    fn prepare(opener: Opener, path: PathBuf) -> Result<Self, StoreError> {
        let store = Self { slot: Mutex::default(), opener, path };
        let version = store.transact(|transaction| {
            let mut meta = transaction.open_table(META)?;
            let found = meta.get(VERSION)?.map(|version| version.value());
            if found.is_none() {
                meta.insert(VERSION, LAYOUT_VERSION)?;
                transaction.open_table(VOLUMES)?;
                transaction.open_table(DEVICES)?;
            }
            if found.is_none_or(|found| found == LAYOUT_VERSION) {
                // Younger than the others: earlier programs pass it over.
                transaction.open_table(COPIES)?;
                // States of earlier programs have no such table.
                transaction.open_table(GROUPS)?;
                transaction.open_table(FILES)?;
                transaction.open_table(APPS)?;
                transaction.open_table(RECEIVED)?;
            }
            Ok(found.unwrap_or(LAYOUT_VERSION))
        })?;
        if version == LAYOUT_VERSION {
            Ok(store)
        } else {
            Err(StoreError::Version { path: store.path.clone(), found: version })
        }
    }

    /// Everything that is stored.
    pub(crate) fn load(&self) -> Result<(Vec<VolumeRecord>, Vec<DeviceRecord>), StoreError> {
        Ok((self.read_all(VOLUMES, "volume")?, self.read_all(DEVICES, "device")?))
    }

    /// One volume.
    pub(crate) fn volume(&self, name: &Name) -> Result<Option<VolumeRecord>, StoreError> {
        self.volume_in(&mut self.slot(), name)
    }

    fn volume_in(&self, slot: &mut Slot, name: &Name) -> Result<Option<VolumeRecord>, StoreError> {
        let bytes = self.read_in(slot, |database| {
            let table = database.begin_read()?.open_table(VOLUMES)?;
            Ok(table.get(name.as_str())?.map(|bytes| bytes.value().to_owned()))
        })?;
        bytes.map(|bytes| self.decode("volume", name.as_str(), &bytes)).transpose()
    }

    /// Changes some fields of what is stored of volumes, all of them or none. Nothing else is stored meanwhile: who owns the other fields does
    /// not find them as they were before. What is not stored stays so.
    pub(crate) fn amend<'a>(
        &self,
        names: impl IntoIterator<Item = &'a Name>,
        change: impl Fn(&mut VolumeRecord),
    ) -> Result<(), StoreError> {
        let mut slot = self.slot();
        let mut changed = Vec::new();
        for name in names {
            let Some(before) = self.volume_in(&mut slot, name)? else { continue };
            let mut after = before.clone();
            change(&mut after);
            if after != before {
                changed.push(after);
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        self.apply_in(&mut slot, &Changes { put_volumes: changed.iter().collect(), ..Changes::default() })
    }

    /// Where it is, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn decode<T: DeserializeOwned>(&self, kind: &'static str, name: &str, bytes: &[u8]) -> Result<T, StoreError> {
        let wrong = |source| StoreError::Record { path: self.path.clone(), kind, name: name.to_owned(), source };
        serde_json::from_slice(bytes).map_err(wrong)
    }

    /// All copies that are stored.
    pub(crate) fn load_copies(&self) -> Result<Vec<CopyRecord>, StoreError> {
        self.read_all(COPIES, "copy")
    }

    /// The groups that are stored.
    pub(crate) fn load_groups(&self) -> Result<Vec<GroupSpec>, StoreError> {
        self.read_all(GROUPS, "group")
    }

    /// What commands said of users' applications.
    pub(crate) fn load_apps(&self) -> Result<Vec<AppUser>, StoreError> {
        self.read_all(APPS, "user")
    }

    /// Volumes that have come from another worker, and were not opened.
    pub(crate) fn load_received(&self) -> Result<BTreeSet<Name>, StoreError> {
        let names: Vec<String> = self.read(|database| {
            let table = database.begin_read()?.open_table(RECEIVED)?;
            table.iter()?.map(|entry| Ok(entry?.0.value().to_owned())).collect::<Result<_, redb::Error>>()
        })?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// Files that were about to be made or removed.
    pub(crate) fn load_files(&self) -> Result<Vec<PathBuf>, StoreError> {
        self.read(|database| {
            let table = database.begin_read()?.open_table(FILES)?;
            let path = |entry: Result<(AccessGuard<'_, &[u8]>, AccessGuard<'_, ()>), StorageError>| {
                Ok(PathBuf::from(OsStr::from_bytes(entry?.0.value())))
            };
            table.iter()?.map(path).collect()
        })
    }

    fn read_all<T: DeserializeOwned>(
        &self,
        table: TableDefinition<'_, &str, &[u8]>,
        kind: &'static str,
    ) -> Result<Vec<T>, StoreError> {
        let stored = self.read(|database| {
            let table = database.begin_read()?.open_table(table)?;
            let entry = |entry: Result<(AccessGuard<'_, &str>, AccessGuard<'_, &[u8]>), StorageError>| {
                let (name, bytes) = entry?;
                Ok((name.value().to_owned(), bytes.value().to_owned()))
            };
            table.iter()?.map(entry).collect::<Result<Vec<_>, redb::Error>>()
        })?;
        stored.into_iter().map(|(name, bytes)| self.decode(kind, &name, &bytes)).collect()
    }

    /// Stores changes as one: when it returns `Ok` they survive a power loss, otherwise nothing has changed.
    ///
    /// A change that fails is taken back in the file as well. Only a process that ends before it could do that leaves it in doubt.
    pub(crate) fn apply(&self, changes: &Changes<'_>) -> Result<(), StoreError> {
        self.apply_in(&mut self.slot(), changes)
    }

    fn apply_in(&self, slot: &mut Slot, changes: &Changes<'_>) -> Result<(), StoreError> {
        let entries = changes.entries();
        let mut before = Vec::new();
        let stored = self.change(slot, |transaction| {
            before = exchange(transaction, &entries)?;
            Ok(())
        });
        if stored.is_err() && !before.is_empty() {
            slot.undo = before;
            match self.reopen(slot) {
                Ok(database) => slot.database = Some(database),
                Err(error) => {
                    tracing::error!(%error, "what could not be stored is not taken back yet: that comes before all else");
                }
            }
        }
        stored
    }

    fn transact<T>(&self, change: impl FnOnce(&redb::WriteTransaction) -> Result<T, redb::Error>) -> Result<T, StoreError> {
        self.change(&mut self.slot(), change)
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(
        &self,
        slot: &mut Slot,
        change: impl FnOnce(&redb::WriteTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, StoreError> {
        let panicked = |what| StoreError::Panicked { path: self.path.clone(), what };
        self.call(slot, panicked, |database| {
            let transaction = database.begin_write()?;
            let value = change(&transaction)?;
            transaction.commit()?;
            Ok(value)
        })
    }

    fn read<T>(&self, look: impl FnOnce(&Database) -> Result<T, redb::Error>) -> Result<T, StoreError> {
        self.read_in(&mut self.slot(), look)
    }

    fn read_in<T>(&self, slot: &mut Slot, look: impl FnOnce(&Database) -> Result<T, redb::Error>) -> Result<T, StoreError> {
        self.call(slot, |what| self.damaged(what), look)
    }

    /// Does something with the open database. `panicked` says what it is when that panics.
    fn call<T>(
        &self,
        slot: &mut Slot,
        panicked: impl FnOnce(String) -> StoreError,
        call: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, StoreError> {
        let database = match slot.database.take() {
            Some(database) => database,
            None => self.reopen(slot)?,
        };
        let error = match unpanicked(|| call(&database)) {
            Ok(Ok(value)) => {
                slot.database = Some(database);
                return Ok(value);
            }
            Ok(Err(error)) => self.failed(error),
            Err(what) => panicked(what),
        };
        close(database);
        Err(error)
    }

    /// Opens the database, and takes back what has failed before.
    fn reopen(&self, slot: &mut Slot) -> Result<Database, StoreError> {
        let opened = unpanicked(&self.opener).map_err(|what| self.damaged(what))?;
        let database = opened.map_err(|error| self.failed(error.into()))?;
        if slot.undo.is_empty() {
            return Ok(database);
        }
        let undone = unpanicked(|| -> Result<(), redb::Error> {
            // Most changes fail before anything of them is in the file, for want of room: undoing those would take some.
            let found = database.begin_read()?;
            if slot
                .undo
                .iter()
                .map(|entry| is_there(&found, entry))
                .collect::<Result<Vec<_>, _>>()?
                .iter()
                .all(|there| *there)
            {
                return Ok(());
            }
            let transaction = database.begin_write()?;
            exchange(&transaction, &slot.undo)?;
            transaction.commit()?;
            Ok(())
        });
        let error = match undone {
            Ok(Ok(())) => {
                slot.undo.clear();
                return Ok(database);
            }
            Ok(Err(error)) => self.failed(error),
            Err(what) => StoreError::Panicked { path: self.path.clone(), what },
        };
        close(database);
        Err(error)
    }

    fn failed(&self, error: redb::Error) -> StoreError {
        match error {
            redb::Error::DatabaseAlreadyOpen => StoreError::InUse { path: self.path.clone() },
            redb::Error::Corrupted(what) => self.damaged(what),
            source => StoreError::Database { path: self.path.clone(), source: Box::new(source) },
        }
    }

    fn damaged(&self, what: String) -> StoreError {
        StoreError::Damaged { path: self.path.clone(), what }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let slot = self.slot.get_mut().unwrap_or_else(PoisonError::into_inner);
        slot.database.take().into_iter().for_each(close);
    }
}

/// How a state that is there is opened. Its pages are compared with their checksums then or never, and a bit that has changed in a number
/// makes another number of it.
fn opener(path: &Path) -> Opener {
    let path = path.to_owned();
    Box::new(move || Database::builder().set_check_integrity_on_open(true).open(&path))
}

/// Gives a new state its name, and makes that durable; whether it has it.
fn put_in_place(directory: &Path, new: &Path, path: &Path) -> io::Result<bool> {
    match renameat_with(CWD, new, CWD, path, RenameFlags::NOREPLACE) {
        // Another daemon was quicker, and its state is the one that counts.
        Err(Errno::EXIST) => {
            fs::remove_file(new)?;
            return Ok(false);
        }
        // A file system that cannot refuse to replace.
        Err(Errno::INVAL | Errno::NOSYS) => fs::rename(new, path)?,
        renamed => renamed?,
    }
    fs::File::open(directory)?.sync_all()?;
    Ok(true)
}

/// What is damaged may have it panic as it closes, too.
fn close(database: Database) {
    let _ = catch_unwind(AssertUnwindSafe(move || drop(database)));
}

/// The database takes some kinds of damage for its own fault, and panics: what that said, then.
fn unpanicked<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| words(&*panic))
}

/// What a panic said.
pub(crate) fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a word".to_owned())
}

fn encode(record: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(record).expect("records have text for keys and nothing that JSON lacks")
}
