//! The manager: everything that exists, and every change to it.
//!
//! ```text
//!   API ───────────┐                            ┌─► shard: NvmeDevice, VirtioBlkDevice
//!   config file ───┼─► Manager: validate ─► act ┤                        ─► Store (one transaction) ─► Ok
//!   guests (Host) ─┘      one change at a time  └─► Volume                     │ failed: undo ─► Err
//! ```
//!
//! Invariants:
//! * A change that fails leaves the state as it was, in memory and on disk.
//! * What is on disk was true at some moment; a daemon that starts makes it true again, and shows what it cannot.
//! * The data path waits for nothing here: shards are called, and never call back in.
//! * A shard or a file system that hangs keeps waiting who needs it, and nobody else: shards are reached and files looked at before what exists is
//!   locked; a shard that hangs all the same is waited for once. What guests ask for that needs files is done beside the thread that answers them.

mod apps;
mod changes;
mod copies;
mod crew;
mod devices;
mod erasures;
mod format;
mod graphs;
mod groups;
mod growth;
mod host;
mod images;
mod late;
mod leaves;
mod limits;
mod looks;
mod migrations;
mod moves;
mod places;
mod restore;
mod sessions;
mod shapes;
mod shutdown;
mod traces;
mod upgrade;
mod views;
mod volumes;
mod waits;
mod warnings;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use millrace_engine::{Engine, Placement, ShardHandle, StatsSnapshot};
use millrace_frontends::nvme::{CardSpec, Host, Namespace};
use millrace_keeper::Link;
use uuid::Uuid;

use self::{
    copies::Copy,
    graphs::{LiveGraph, Means, Watched},
    groups::Group,
    host::{HostLink, HostThread},
    late::Late,
};
use crate::{
    Name,
    apps::AppUser,
    config::Declared,
    disks::Live,
    error::ControlError,
    model::VolumeSpec,
    store::{DeviceRecord, Store, VolumeRecord},
    usage::Account,
};
pub(crate) use apps::Others;
pub use apps::{AppSource, AppView};
pub use graphs::HistoryEntry;
pub(crate) use graphs::seconds_now;
pub use groups::GroupView;
pub(crate) use groups::ThrottleView;
pub(crate) use limits::Limit;
pub(crate) use moves::{RECEIVED, Step};
pub(crate) use places::{CHANGES, CHANGES_OF_ONE, ChangePlace, NoPlace, Object, Places, SUMS};
pub use restore::RestoreError;
pub(crate) use sessions::{Asker, Elsewhere, Granted, SESSIONS, SessionSpec};
pub(crate) use traces::{Ending, Target};
pub use views::{
    CopyView, DeviceCounters, DeviceView, MigrationView, NamespaceView, ShardView, State, Status, UserView, VolumeView,
    WorkerName, WorkerView,
};
pub(crate) use volumes::{settle_files, twin_name};

#[cfg(test)]
pub(crate) mod tests;

/// How often is looked whether volumes are still being resized.
const REST_LOOK: Duration = Duration::from_millis(5);

/// What the manager must know besides the state.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Where sockets go.
    pub(crate) run_dir: PathBuf,
    /// Where the state is kept; for status only. `None`: in memory.
    pub(crate) state_dir: Option<PathBuf>,
    /// How devices are spread over shards.
    pub(crate) placement: Placement,
    /// Who holds what must outlive this process.
    pub(crate) keeper: Option<Arc<Link>>,
    /// The cell that this worker serves; `None`: it is the daemon's own.
    pub(crate) cell: Option<Name>,
    /// Users whose applications may open volumes, as the configuration file says.
    pub(crate) apps: Vec<AppUser>,
    /// The engine that takes controllers' I/O queues, if one does.
    pub(crate) card: Option<CardSpec>,
    /// Who may connect to devices' sockets, beside our own user.
    pub(crate) socket_group: Option<millrace_sandbox::Group>,
}

/// Owner of volumes, devices and their stored state.
pub struct Manager {
    settings: Settings,
    inner: Mutex<Inner>,
    store: Arc<Store>,
    shards: Vec<ShardHandle>,
    /// Taken when the daemon stops.
    engine: Mutex<Option<Engine>>,
    host: Arc<dyn Host>,
    loads: Mutex<Vec<Load>>,
    account: Account,
    /// For threads of its own, which must not keep it alive.
    itself: WeakManager,
    started: Instant,
    upgraded: Mutex<upgrade::LastUpgrade>,
    /// The trace under way. Taken after what exists is locked.
    traced: Mutex<Option<Arc<traces::Running>>>,
    /// Volumes that do not answer. Taken before what exists is locked.
    waits: Mutex<waits::Waits>,
    /// For requests of the API that change something.
    places: Places,
}

/// What exists.
#[derive(Default)]
struct Inner {
    volumes: BTreeMap<Name, Volume>,
    groups: BTreeMap<Name, Group>,
    /// What commands said of users' applications, by the users' numbers.
    apps: BTreeMap<u32, AppUser>,
    /// Users' caps for their sessions here, by the users' numbers.
    limits: BTreeMap<u32, Arc<millrace_services::throttle::Group>>,
    devices: BTreeMap<Name, Device>,
    /// Volumes that are being formatted.
    formatting: BTreeSet<Name>,
    /// Volumes whose stack is being changed, or that are being made or opened with nothing locked, with the stack that they get.
    changing: BTreeMap<Name, millrace_services::Node>,
    /// Volumes that are being made, with the UUIDs that they get. Their names and stacks are among those that change.
    creating: BTreeMap<Name, VolumeSpec>,
    /// What those know whose graph a change has.
    watched: BTreeMap<Name, Watched>,
    /// The meters of those that are on the account meanwhile.
    metering: BTreeMap<Name, Arc<dyn millrace_services::Service>>,
    /// Volumes of which a service carries out a command.
    commanded: BTreeSet<Name>,
    /// Volumes that are being resized.
    resizing: BTreeSet<Name>,
    copies: BTreeMap<Name, Copy>,
    /// Volumes being migrated that a thread looks after.
    attended: BTreeSet<Name>,
    /// Volumes that were opened without what they were being migrated to, which is not stored yet.
    given_up: Vec<Name>,
    /// Volumes of which a growth that was under way was settled when they were opened, which is not stored yet.
    settled: Vec<Name>,
    /// What volumes are made with.
    means: Means,
    /// Devices whose guests do not go on yet.
    late: Late,
    /// Deleted devices whose commands have not finished, with their identities, under which the keeper holds what they need.
    retiring: Vec<(Uuid, Name, Live)>,
    /// Volumes that came from another worker and were never open here.
    received: BTreeSet<Uuid>,
    /// Those that are being opened.
    opening: BTreeSet<Name>,
    stopping: bool,
    /// Without a state, a volume's identity comes from its file, so that guests know it again.
    stateless: bool,
    /// Who holds what must outlive this process.
    keeper: Option<Arc<Link>>,
}

/// A volume: what is stored of it, and the thing itself or why there is none.
struct Volume {
    record: VolumeRecord,
    live: Result<Arc<Namespace>, String>,
    /// What it is made of; absent while it has failed or is being changed.
    graph: Option<LiveGraph>,
    /// It could not be opened, and that has found out that acknowledged writes may be lost.
    lost: bool,
}

/// A device: what is stored of it, and the thing itself or why there is none.
struct Device {
    record: DeviceRecord,
    live: Result<Live, String>,
    /// Namespaces that could not be shown, by identifier, with the reason.
    failed: BTreeMap<u32, String>,
    /// When it was made, or brought back.
    since: Instant,
}

/// How busy a shard was in the last sampling interval.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    last: StatsSnapshot,
    busy_permille: u32,
}

impl Manager {
    /// Brings back what is stored, adds what a configuration file declares, and answers guests from then on.
    pub(crate) fn start(
        settings: Settings,
        store: Store,
        engine: Engine,
        declared: Option<&Declared>,
    ) -> Result<Arc<Self>, RestoreError> {
        let (link, requests) = HostLink::new();
        let shards = engine.shards().to_vec();
        let store = Arc::new(store);
        let manager = Arc::new_cyclic(|itself| Self {
            inner: Mutex::new(Inner {
                stateless: settings.state_dir.is_none(),
                keeper: settings.keeper.clone(),
                means: Means::new(&shards, Some(&store)),
                ..Inner::default()
            }),
            account: Account::new(settings.state_dir.as_deref()),
            settings,
            store,
            loads: Mutex::new(vec![Load::default(); shards.len()]),
            shards,
            engine: Mutex::new(Some(engine)),
            host: Arc::new(link),
            itself: itself.clone(),
            started: Instant::now(),
            upgraded: Mutex::default(),
            traced: Mutex::default(),
            waits: Mutex::default(),
            places: Places::new(),
        });
        let restored = manager.settle_files().map_err(RestoreError::from).and_then(|()| manager.restore(declared));
        if let Err(error) = restored {
            if manager.settings.keeper.is_some() {
                // What is kept is another worker's to go on with: nothing of it may be put away in order.
                std::mem::forget(Arc::clone(&manager));
            }
            return Err(error);
        }
        let thread = HostThread::new(Arc::downgrade(&manager), requests);
        let spawned = thread::Builder::new().name("millrace-host".to_owned()).spawn(move || thread.run());
        spawned.map_err(RestoreError::Thread)?;
        Ok(manager)
    }

    /// Places for requests that change something.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// What exists, for one change.
    fn lock(&self) -> Result<MutexGuard<'_, Inner>, ControlError> {
        let inner = self.peek();
        if inner.stopping { Err(ControlError::Stopping) } else { Ok(inner) }
    }

    /// Also one that is being made.
    pub(crate) fn has_volume(&self, name: &str) -> bool {
        let inner = self.peek();
        inner.volumes.contains_key(name) || inner.creating.contains_key(name)
    }

    pub(crate) fn has_device(&self, name: &str) -> bool {
        self.peek().devices.contains_key(name)
    }

    /// What exists, to look at. A panic elsewhere leaves it whole: it is changed only after all that can fail.
    fn peek(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What exists while no volume is being resized: nothing may end in the middle of that. Nor, if it can be helped for so long, of a change.
    fn at_rest(&self, patience: Duration) -> MutexGuard<'_, Inner> {
        self.at_rest_within(patience, None)
    }

    /// The same, with an end to the wait for resizes, too: what is stored on their way lets the next start go on. Formats, whose guests go on
    /// waiting elsewhere when another worker follows, are waited for as well then.
    fn at_rest_within(&self, changes: Duration, resizes: Option<Duration>) -> MutexGuard<'_, Inner> {
        let begun = Instant::now();
        loop {
            let inner = self.peek();
            let waited = begun.elapsed();
            let is_whole = inner.resizing.is_empty() && (resizes.is_none() || inner.formatting.is_empty());
            let resized = is_whole || resizes.is_some_and(|limit| waited >= limit);
            if resized && (inner.changing.is_empty() || waited >= changes) {
                return inner;
            }
            drop(inner);
            thread::sleep(REST_LOOK);
        }
    }

    /// Measures how busy the shards are; called once a second.
    fn sample_loads(&self) {
        let mut loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        for (load, shard) in loads.iter_mut().zip(&self.shards) {
            let now = shard.stats();
            load.busy_permille = now.busy_permille_since(&load.last);
            load.last = now;
        }
    }
}

impl Inner {
    fn volume(&self, name: &str) -> Result<&Volume, ControlError> {
        self.volumes.get(name).ok_or_else(|| ControlError::NoVolume { name: name.to_owned() })
    }

    fn device(&self, name: &str) -> Result<&Device, ControlError> {
        self.devices.get(name).ok_or_else(|| ControlError::NoDevice { name: name.to_owned() })
    }

    /// Devices that have the volume, with its namespace identifier there.
    fn users<'a>(&'a self, volume: &'a str) -> impl Iterator<Item = (&'a Device, u32)> {
        self.devices.values().flat_map(move |device| {
            let here = device.record.namespaces.iter().filter(move |namespace| namespace.volume.as_str() == volume);
            here.map(move |namespace| (device, namespace.nsid))
        })
    }

    /// Tells every device that shows the volume that it has changed. A device that has failed shows nothing.
    fn notify(&self, volume: &str) {
        for (device, nsid) in self.users(volume) {
            let attached = device.record.namespaces.iter().any(|namespace| namespace.nsid == nsid && namespace.attached);
            let Ok(live) = &device.live else { continue };
            if !attached || device.failed.contains_key(&nsid) {
                continue;
            }
            if let Err(error) = live.namespace_changed(nsid) {
                tracing::warn!(device = %device.record.spec.name, nsid, %error, "the guest could not be told of a change");
            }
        }
    }
}

impl Volume {
    fn live(&self) -> Result<&Arc<Namespace>, ControlError> {
        self.live
            .as_ref()
            .map_err(|reason| ControlError::VolumeFailed { name: self.record.spec.name.clone(), reason: reason.clone() })
    }
}

impl Device {
    fn live(&self) -> Result<&Live, ControlError> {
        self.live
            .as_ref()
            .map_err(|reason| ControlError::DeviceFailed { name: self.record.spec.name.clone(), reason: reason.clone() })
    }
}

/// The manager, for the thread that must not keep it alive.
type WeakManager = Weak<Manager>;
