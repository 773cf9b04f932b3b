//! What the operator is shown.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{PoisonError, mpsc::channel},
    time::{Duration, Instant},
};

use millrace_engine::stages::{Stage, StageTime, StageTimes};
use millrace_services::{Health, Node, graph::Tree};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Device, Inner, Manager, Volume};
use crate::{
    Name, Size,
    cells::MAIN,
    devices::LiveStatus,
    disks::Live,
    error::ControlError,
    model::{CopyState, GroupCaps, LogicalBlock, NvmeSpec, VirtioBlkSpec},
    store::{CopyRecord, NamespaceRecord},
    upgrade::UpgradeView,
};

/// How long devices may take to say what they are doing: less than the daemon waits for one of its workers.
const PATIENCE: Duration = Duration::from_millis(1500);

/// Whether something works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It does.
    Ready,
    /// It does not; the reason stands beside it.
    Failed,
}

/// A volume.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VolumeView {
    /// Its name.
    #[schema(value_type = String)]
    pub name: Name,
    /// What it is made of, as an expression.
    #[schema(value_type = String)]
    pub stack: Node,
    /// The same as a tree, with how each service is doing.
    #[schema(value_type = Object)]
    pub tree: Tree,
    /// Its size in bytes.
    #[schema(value_type = u64)]
    pub size: Size,
    /// Size of its logical blocks in bytes.
    #[schema(value_type = u32)]
    pub block_size: LogicalBlock,
    /// It is never written.
    pub read_only: bool,
    /// Bytes that its medium held for it when that was measured last, about a second ago; absent while it has failed.
    pub allocated: Option<u64>,
    /// What guests know it by.
    pub uuid: String,
    /// The device whose guest created it, while it is a namespace there.
    #[schema(value_type = Option<String>)]
    pub created_by: Option<Name>,
    /// Whether it works.
    pub state: State,
    /// Why it does not.
    pub reason: Option<String>,
    /// How well its services are doing: good, degraded (it works with less than it promises) or failed.
    #[serde(default)]
    #[schema(value_type = String)]
    pub health: Health,
    /// The service that is not good, with the legs that it goes without.
    #[serde(default)]
    pub unwell: Option<String>,
    /// The devices that have it.
    pub attached_to: Vec<UserView>,
    /// Where it is going, while it is being migrated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationView>,
    /// What about it is probably not meant (its files, its key, its cache); only in the answer to its creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// A volume on its way to another place.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct MigrationView {
    /// What has its data.
    #[schema(value_type = String)]
    pub from: Node,
    /// What is to have them.
    #[schema(value_type = String)]
    pub to: Node,
    /// Bytes per second at most; absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate: Option<Size>,
    /// Bytes that are there.
    pub done: u64,
    /// Of so many.
    pub total: u64,
    /// Why it has failed; it is taken out soon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A copy.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct CopyView {
    /// Its name.
    #[schema(value_type = String)]
    pub name: Name,
    /// The volume that is read.
    #[schema(value_type = String)]
    pub source: Name,
    /// The volume that is written.
    #[schema(value_type = String)]
    pub target: Name,
    /// How it is doing.
    pub state: CopyState,
    /// Why it has failed.
    pub reason: Option<String>,
    /// Bytes per second at most; absent: no limit.
    #[schema(value_type = Option<u64>)]
    pub rate: Option<Size>,
    /// Bytes to copy.
    pub bytes: u64,
    /// Bytes that it is past.
    pub done: u64,
    /// Bytes of these that were read and written.
    pub moved: u64,
    /// Bytes of these that the system has copied by itself, or that source and target share.
    pub offloaded: u64,
    /// Bytes of these that held nothing, or zeroes.
    pub skipped: u64,
}

impl CopyView {
    pub(super) fn of(record: &CopyRecord) -> Self {
        let record = record.clone();
        Self {
            name: record.name,
            source: record.source,
            target: record.target,
            state: record.state,
            reason: record.reason,
            rate: record.rate,
            bytes: record.bytes,
            done: record.done,
            moved: record.moved,
            offloaded: record.offloaded,
            skipped: record.skipped,
        }
    }
}

/// A device that has a volume.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct UserView {
    /// Its name.
    #[schema(value_type = String)]
    pub device: Name,
    /// The namespace identifier there.
    pub nsid: u32,
}

/// A device.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct DeviceView {
    /// Its name.
    #[schema(value_type = String)]
    pub name: Name,
    /// Its properties, of an NVMe controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvme: Option<NvmeSpec>,
    /// Its properties, of a virtio disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtio_blk: Option<VirtioBlkSpec>,
    /// Where its guest connects.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// The shard it lives on; absent while it has failed.
    pub shard: Option<usize>,
    /// Controller identifier, of an NVMe controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cntlid: Option<u16>,
    /// Serial number that the guest sees.
    pub serial: String,
    /// NVMe qualified name of its subsystem, of an NVMe controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnqn: Option<String>,
    /// Whether it works.
    pub state: State,
    /// Why it does not.
    pub reason: Option<String>,
    /// Whether a client is connected.
    pub connected: bool,
    /// Where it stands. A controller: disabled, ready, resetting, shut down or failed (the guest must reset it). A virtio disk:
    /// stopped, running or failed. Absent while the device has failed.
    pub phase: Option<String>,
    /// Version of the layout in which its state outlives the daemon's worker; absent of a virtio disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_layout: Option<u32>,
    /// What it has done.
    pub counters: DeviceCounters,
    /// Its namespaces; of a virtio disk its volume, with identifier 1.
    pub namespaces: Vec<NamespaceView>,
    /// Of an application's session: its user's number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_of_uid: Option<u32>,
    /// Of an application's session: its user's caps.
    #[serde(default, skip_serializing_if = "GroupCaps::is_empty")]
    pub session_caps: GroupCaps,
    /// Of an application's session whose user has caps: requests of all his sessions in this worker that they held back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_held_back: Option<u64>,
    /// Whose it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tenant: Option<Name>,
    /// The worker that serves it.
    pub worker: WorkerName,
}

/// A worker, by its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WorkerName {
    /// "main", or the tenant or device that it is for.
    pub name: String,
    /// Its process.
    pub pid: u32,
}

/// A worker, with what it serves.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct WorkerView {
    /// "main", or the tenant or device that it is for.
    pub name: String,
    /// Its process; 0 while it does not answer.
    pub pid: u32,
    /// Its shards.
    pub shards: Vec<ShardView>,
    /// Number of volumes.
    pub volumes: usize,
    /// Number of devices.
    pub devices: usize,
    /// Number of devices with a client.
    pub connected: usize,
}

/// What a device has done since the daemon started.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct DeviceCounters {
    /// Read commands.
    pub read_commands: u64,
    /// Write commands.
    pub write_commands: u64,
    /// Other commands.
    pub other_commands: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Commands that ended with an error.
    pub errors: u64,
    /// Errors of the medium.
    pub media_errors: u64,
    /// Interrupts raised.
    pub interrupts: u64,
}

/// A namespace of a device.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct NamespaceView {
    /// Its identifier.
    pub nsid: u32,
    /// Its volume.
    #[schema(value_type = String)]
    pub volume: Name,
    /// The device's guest cannot write it.
    pub read_only: bool,
    /// False when the guest itself detached it from its controller.
    pub attached: bool,
    /// The guest created it.
    pub created_by_guest: bool,
    /// Whether it works.
    pub state: State,
    /// Why it does not.
    pub reason: Option<String>,
}

/// A shard.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ShardView {
    /// Its number.
    pub index: usize,
    /// Devices on it.
    pub devices: u64,
    /// Share of the last second in which it did useful work, in thousandths.
    pub busy_permille: u32,
    /// Time spent with work since it started, in nanoseconds.
    pub busy_ns: u64,
    /// Time spent looking in vain and asleep since it started, in nanoseconds.
    pub idle_ns: u64,
    /// Passes of its loop.
    pub turns: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Submissions to a disk that had to wait because its queue was full.
    #[serde(default)]
    pub held_up: u64,
    /// Commands finished.
    pub commands: u64,
    /// Tasks that wait now.
    pub tasks_waiting: u64,
    /// Where its time went: only in a build with the feature `stages`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageView>,
}

/// A stage of the data path on one shard.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StageView {
    /// Its name.
    pub stage: String,
    /// Ticks of the time stamp counter spent in it since the shard started.
    pub ticks: u64,
    /// How often it was entered.
    pub entries: u64,
}

/// The stages that the shard counts, if it counts them.
fn stages(times: &StageTimes) -> Vec<StageView> {
    let view = |(stage, time): (Stage, &StageTime)| StageView {
        stage: stage.name().to_owned(),
        ticks: time.net(),
        entries: time.entries,
    };
    if cfg!(feature = "stages") { Stage::ALL.into_iter().zip(times).map(view).collect() } else { Vec::new() }
}

/// The daemon.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// Where sockets are.
    #[schema(value_type = String)]
    pub run_dir: PathBuf,
    /// Where the state is; absent when it is kept in memory only.
    #[schema(value_type = Option<String>)]
    pub state_dir: Option<PathBuf>,
    /// Its shards.
    pub shards: Vec<ShardView>,
    /// Number of volumes.
    pub volumes: usize,
    /// Number of devices.
    pub devices: usize,
    /// Number of devices with a client.
    pub connected: usize,
    /// What does not work, each with its reason.
    pub failed: Vec<String>,
    /// What works with less than it promises (a mirror without one leg), each with the service.
    #[serde(default)]
    pub degraded: Vec<String>,
    /// The last upgrade since it started; absent when there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<UpgradeView>,
    /// Its workers, the one that answers here first. The numbers above are sums over all of them, the shards the first one's.
    pub workers: Vec<WorkerView>,
}

impl Manager {
    /// All volumes, by name.
    pub fn volumes(&self) -> Vec<VolumeView> {
        let inner = self.peek();
        inner.volumes.values().map(|volume| inner.view(volume)).collect()
    }

    /// One volume.
    pub fn volume(&self, name: &str) -> Result<VolumeView, ControlError> {
        self.peek().volume_view(name)
    }

    /// All devices, by name.
    pub fn devices(&self) -> Vec<DeviceView> {
        let mut statuses = self.ask(|_| true);
        let inner = self.peek();
        // One that was made meanwhile is in the next list.
        let view = |(name, device)| Some(self.view(&inner, device, statuses.remove(name)?));
        inner.devices.iter().filter_map(view).collect()
    }

    /// One device.
    pub fn device(&self, name: &str) -> Result<DeviceView, ControlError> {
        self.device_within(PATIENCE, name)
    }

    /// The same for who waits for so long.
    pub(super) fn device_within(&self, patience: Duration, name: &str) -> Result<DeviceView, ControlError> {
        let asked = self.ask_within(patience, |device| device.record.spec.name.as_str() == name);
        let status = asked.into_values().next();
        let inner = self.peek();
        let device = inner.device(name)?;
        Ok(self.view(&inner, device, status.unwrap_or_else(|| device.live().and_then(Live::status))))
    }

    /// Asks devices what they are doing. What exists is not locked while they answer: a shard that hangs keeps nobody else waiting.
    pub(super) fn ask(&self, wanted: impl Fn(&Device) -> bool) -> BTreeMap<Name, Result<LiveStatus, ControlError>> {
        self.ask_within(PATIENCE, wanted)
    }

    fn ask_within(
        &self,
        patience: Duration,
        wanted: impl Fn(&Device) -> bool,
    ) -> BTreeMap<Name, Result<LiveStatus, ControlError>> {
        let (answers, answered) = channel();
        let ask = |(name, device): (&Name, &Device)| {
            let asked = device.live().and_then(|live| live.ask_status(answers.clone()).map(|()| live.shard()));
            let silent = |shard| ControlError::Silent { device: name.clone(), shard, millis: patience.as_millis() as u64 };
            (name.clone(), Err(asked.map_or_else(|error| error, silent)))
        };
        let mut statuses: BTreeMap<_, _> =
            self.peek().devices.iter().filter(|(_, device)| wanted(device)).map(ask).collect();
        drop(answers);
        let until = Instant::now() + patience;
        while let Ok((name, status)) = answered.recv_timeout(until.saturating_duration_since(Instant::now())) {
            statuses.insert(name, status);
        }
        statuses
    }

    /// One namespace.
    pub fn namespace(&self, device: &str, nsid: u32) -> Result<NamespaceView, ControlError> {
        self.peek().namespace_view(device, nsid)
    }

    /// All shards.
    pub fn shards(&self) -> Vec<ShardView> {
        let loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        let nanos = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let view = |(shard, load): (&millrace_engine::ShardHandle, &super::Load)| {
            let stats = shard.stats();
            ShardView {
                index: shard.index(),
                devices: stats.devices,
                busy_permille: load.busy_permille,
                busy_ns: nanos(stats.busy),
                idle_ns: nanos(stats.idle),
                turns: stats.turns,
                sleeps: stats.sleeps,
                held_up: stats.held_up,
                commands: stats.commands,
                tasks_waiting: stats.tasks_waiting,
                stages: stages(&stats.stages),
            }
        };
        self.shards.iter().zip(loads.iter()).map(view).collect()
    }

    /// The daemon.
    pub fn status(&self) -> Status {
        self.status_with(&self.volumes(), &self.devices())
    }

    /// The daemon, for who has asked for these already.
    pub(crate) fn status_with(&self, volumes: &[VolumeView], devices: &[DeviceView]) -> Status {
        let (mut failed, mut degraded) = (Vec::new(), Vec::new());
        let mut note = |kind, name: &Name, reason: &Option<String>| {
            // Many a reason begins with that itself.
            let itself = format!("{kind} {name}: ");
            let reason = reason.as_ref().map(|reason| reason.strip_prefix(&*itself).unwrap_or(reason));
            failed.extend(reason.map(|reason| format!("{itself}{reason}")));
        };
        for volume in volumes {
            note("volume", &volume.name, &volume.reason);
            match (volume.health, &volume.unwell) {
                (Health::Degraded, Some(what)) => degraded.push(format!("volume {}: {what}", volume.name)),
                (health, Some(what)) => note("volume", &volume.name, &Some(format!("{what} is {health}"))),
                (_, None) => {}
            }
        }
        for copy in self.copies() {
            note("copy", &copy.name, &copy.reason);
        }
        for device in devices {
            note("device", &device.name, &device.reason);
            for namespace in &device.namespaces {
                let reason = namespace.reason.as_ref().map(|reason| format!("namespace {}: {reason}", namespace.nsid));
                note("device", &device.name, &reason);
            }
        }
        let shards = self.shards();
        let connected = devices.iter().filter(|device| device.connected).count();
        let worker = self.worker();
        let worker = WorkerView {
            name: worker.name,
            pid: worker.pid,
            shards: shards.clone(),
            volumes: volumes.len(),
            devices: devices.len(),
            connected,
        };
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            run_dir: self.settings.run_dir.clone(),
            state_dir: self.settings.state_dir.clone(),
            shards,
            volumes: volumes.len(),
            devices: devices.len(),
            connected,
            failed,
            degraded,
            upgrade: self.last_upgrade().ok(),
            workers: vec![worker],
        }
    }

    /// This process.
    fn worker(&self) -> WorkerName {
        let name = self.settings.cell.as_ref().map_or(MAIN, Name::as_str);
        WorkerName { name: name.to_owned(), pid: std::process::id() }
    }

    fn view(&self, inner: &Inner, device: &Device, status: Result<LiveStatus, ControlError>) -> DeviceView {
        let record = &device.record;
        let controller = record.spec.kind.nvme().map(|_| record.spec.controller_config(record.cntlid, record.uuid));
        let (status, reason) = match status {
            Ok(status) => (Some(status), None),
            Err(ControlError::DeviceFailed { reason, .. }) => (None, Some(reason)),
            Err(error) => (None, Some(error.to_string())),
        };
        let fault = status.as_ref().and_then(|status| status.fault);
        let reason = reason.or_else(|| fault.map(str::to_owned)).or_else(|| inner.why_late(device));
        let limited = record.session.as_ref().filter(|_| record.is_limited());
        DeviceView {
            name: record.spec.name.clone(),
            nvme: record.spec.kind.nvme().cloned(),
            virtio_blk: record.spec.kind.virtio_blk().cloned(),
            socket: device.live.as_ref().map_or_else(|_| self.socket(&record.spec), |live| live.socket().clone()),
            shard: device.live.as_ref().ok().map(Live::shard),
            cntlid: controller.as_ref().map(|config| config.cntlid),
            serial: record.spec.serial(),
            subnqn: controller.map(|config| config.subnqn),
            state: state(reason.as_ref()),
            reason,
            connected: status.as_ref().is_some_and(|status| status.connected),
            phase: status.as_ref().map(|status| status.phase.to_owned()),
            state_layout: status.as_ref().and_then(|status| status.state_layout),
            counters: status.map(|status| status.counters).unwrap_or_default(),
            namespaces: record.namespaces.iter().map(|namespace| inner.show(device, namespace)).collect(),
            session_of_uid: record.session.as_ref().map(|session| session.uid),
            session_caps: record.session.as_ref().map(|session| session.caps.clone()).unwrap_or_default(),
            session_held_back: limited.map(|session| inner.held_back_of(session.uid)),
            tenant: record.spec.tenant.clone(),
            worker: self.worker(),
        }
    }
}

impl Inner {
    pub(super) fn volume_view(&self, name: &str) -> Result<VolumeView, ControlError> {
        Ok(self.view(self.volume(name)?))
    }

    pub(super) fn namespace_view(&self, device: &str, nsid: u32) -> Result<NamespaceView, ControlError> {
        let device = self.device(device)?;
        let found = device.record.namespaces.iter().find(|namespace| namespace.nsid == nsid);
        let missing = || ControlError::NotAttached { device: device.record.spec.name.clone(), nsid };
        Ok(self.show(device, found.ok_or_else(missing)?))
    }

    fn view(&self, volume: &Volume) -> VolumeView {
        let record = &volume.record;
        let users = self.users(record.spec.name.as_str());
        let reason = volume.live.as_ref().err().cloned();
        let tree = volume.graph.as_ref().map_or_else(|| Tree::of(&record.spec.stack), super::graphs::LiveGraph::tree);
        let (health, unwell) = super::graphs::unwell(&tree).unzip();
        // One that is not open has no services to ask.
        let health = health.unwrap_or(if reason.is_some() { Health::Failed } else { Health::Good });
        VolumeView {
            name: record.spec.name.clone(),
            stack: record.spec.stack.clone(),
            tree,
            size: record.size(),
            block_size: record.block_size(),
            read_only: record.spec.read_only,
            allocated: volume.live.as_ref().ok().map(|namespace| namespace.measured()),
            uuid: record.uuid.to_string(),
            created_by: record.created_by.clone(),
            state: state(reason.as_ref()),
            reason,
            health,
            unwell,
            attached_to: users.map(|(user, nsid)| UserView { device: user.record.spec.name.clone(), nsid }).collect(),
            migration: super::migrations::view(volume),
            warning: None,
        }
    }

    fn show(&self, device: &Device, namespace: &NamespaceRecord) -> NamespaceView {
        let volume = self.volumes.get(&namespace.volume);
        let reason = device.failed.get(&namespace.nsid).cloned();
        let volume_read_only = volume.is_some_and(|volume| volume.record.spec.read_only);
        NamespaceView {
            nsid: namespace.nsid,
            volume: namespace.volume.clone(),
            read_only: namespace.read_only || volume_read_only,
            attached: namespace.attached,
            created_by_guest: volume.is_some_and(|volume| volume.record.created_by.is_some()),
            state: state(reason.as_ref()),
            reason,
        }
    }
}

fn state(reason: Option<&String>) -> State {
    if reason.is_some() { State::Failed } else { State::Ready }
}
