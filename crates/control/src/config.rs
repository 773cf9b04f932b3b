//! The configuration file: TOML that declares volumes and devices, and settings of the daemon (docs/formats/config.md).
//!
//! What it declares is made sure of at start: created when it is not there, compared when it is. Objects that were created by
//! the API stand beside it. A difference is an error, for either side may be the one that is meant.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::Range,
    path::{Path, PathBuf},
};

use millrace_block::BlockSize;
use millrace_sandbox::{Mode, Policy};
use millrace_services::migrate::stacks::{self, Stays};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use toml::Spanned;

use crate::{
    Name, Size,
    api::Operator,
    apps::{self, AppUser},
    error::ControlError,
    model::{AttachSpec, DeviceKind, DeviceKindError, DeviceSpec, GroupSpec, NvmeSpec, VirtioBlkSpec, VolumeSpec},
    store::{DeviceRecord, VolumeRecord},
};

#[cfg(test)]
mod tests;

/// Why a configuration file cannot be used. Nothing has been changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It is not TOML, or says what it cannot say.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// What is wrong there.
        message: String,
    },
    /// A name is given to two objects of one kind.
    #[error("{}:{line}: {kind} {name} is declared already, on line {first}", path.display())]
    Twice {
        /// The file.
        path: PathBuf,
        /// The line of the second.
        line: usize,
        /// "volume", "device", "group" or "user".
        kind: &'static str,
        /// The name.
        name: Name,
        /// The line of the first.
        first: usize,
    },
    /// A device's volume is neither declared nor stored.
    #[error("{}:{line}: device {device}: volume {volume} is neither declared here nor known to the daemon", path.display())]
    NoVolume {
        /// The file.
        path: PathBuf,
        /// The line of the device.
        line: usize,
        /// The device.
        device: Name,
        /// The volume.
        volume: Name,
    },
    /// An object exists already and is another one.
    #[error(
        "{}:{line}: {kind} {name} exists already, and differs: {difference}; make the file agree, or start without the file \
         and change or delete the {kind}", path.display()
    )]
    Differs {
        /// The file.
        path: PathBuf,
        /// The line of the object.
        line: usize,
        /// "volume" or "device".
        kind: &'static str,
        /// Its name.
        name: Name,
        /// In what, with both values.
        difference: String,
    },
    /// An object cannot be made.
    #[error("{}:{line}: {source}", path.display())]
    Apply {
        /// The file.
        path: PathBuf,
        /// The line of the object.
        line: usize,
        /// Why.
        #[source]
        source: Box<ControlError>,
    },
}

/// What a line of the file says.
#[derive(Clone, Debug)]
pub(crate) struct Located<T> {
    pub(crate) line: usize,
    pub(crate) value: T,
}

/// A device with what it shows, as declared.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "DeclaredForm")]
pub(crate) struct DeclaredDevice {
    name: Name,
    kind: DeviceKind,
    socket: Option<PathBuf>,
    shard: Option<usize>,
    tenant: Option<Name>,
    /// Its namespaces, or a virtio disk's volume.
    pub(crate) attach: Vec<AttachSpec>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeclaredForm {
    name: Name,
    #[serde(default)]
    nvme: Option<NvmeSpec>,
    #[serde(default)]
    virtio_blk: Option<VirtioBlkSpec>,
    #[serde(default)]
    socket: Option<PathBuf>,
    #[serde(default)]
    shard: Option<usize>,
    #[serde(default)]
    tenant: Option<Name>,
    #[serde(default)]
    attach: Vec<AttachSpec>,
}

impl TryFrom<DeclaredForm> for DeclaredDevice {
    type Error = DeviceKindError;

    fn try_from(form: DeclaredForm) -> Result<Self, DeviceKindError> {
        let DeclaredForm { name, nvme, virtio_blk, socket, shard, tenant, attach } = form;
        Ok(Self { name, kind: DeviceKind::of(nvme, virtio_blk)?, socket, shard, tenant, attach })
    }
}

impl DeclaredDevice {
    pub(crate) fn spec(&self) -> DeviceSpec {
        let Self { name, kind, socket, shard, tenant, .. } = self.clone();
        DeviceSpec { name, kind, socket, shard, tenant }
    }

    /// Each volume once: a second entry would be of no effect at first, and a difference at the next start.
    fn check_attached(&self) -> Result<(), ControlError> {
        let mut seen = BTreeSet::new();
        match self.attach.iter().find(|attach| !seen.insert(&attach.volume)) {
            Some(AttachSpec { volume, .. }) => {
                let why =
                    format!("volume {volume} is attached twice: a device shows a volume once, leave one of the entries out");
                Err(ControlError::invalid("device", &self.name, why))
            }
            None => Ok(()),
        }
    }
}

/// What shards do while there is no work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PollingMode {
    /// They spin for a while, then sleep, until shortly before work is expected where that can be told.
    #[default]
    Adaptive,
    /// They sleep at once.
    Interrupt,
    /// They spin for ever.
    Spin,
}

/// How devices are spread over shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlacementMode {
    /// Each device to the least loaded shard.
    #[default]
    Device,
    /// Devices of one disk together.
    Disk,
}

/// Which devices have a worker of their own (docs/isolation.md).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IsolationMode {
    /// None: one worker serves all.
    #[default]
    Shared,
    /// Those of each tenant together.
    Tenant,
    /// Each.
    Device,
}

impl IsolationMode {
    /// The cell that a device belongs to; `None`: the daemon's own worker serves it.
    pub(crate) fn cell_of(self, device: &DeviceSpec) -> Option<Name> {
        match self {
            Self::Shared => None,
            Self::Tenant => device.tenant.clone(),
            Self::Device => Some(device.name.clone()),
        }
    }
}

/// What the daemon gives up (docs/sandbox.md).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxTable {
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<Mode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    allow: Vec<PathBuf>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    key_commands: Vec<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Size>,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<u64>,
}

impl SandboxTable {
    /// These settings, below those of the command line: what is set there counts, and paths and programs add up.
    pub fn under(self, mut line: Policy, mode: Option<Mode>) -> Policy {
        line.mode = mode.or(self.mode).unwrap_or_default();
        line.allow.extend(self.allow);
        line.key_commands.extend(self.key_commands);
        line.user = line.user.or(self.user);
        line.memory = line.memory.or(self.memory.map(|size| size.0));
        line.files = line.files.or(self.files);
        line
    }
}

/// What a configuration file sets of the daemon itself. It holds as long as the daemon runs, whatever becomes of the file and of workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FileSettings {
    pub(crate) shards: Option<String>,
    pub(crate) polling: Option<PollingMode>,
    pub(crate) placement: Option<PlacementMode>,
    pub(crate) isolation: Option<IsolationMode>,
    pub(crate) worker_shards: Option<String>,
    pub(crate) socket_group: Option<String>,
    pub(crate) apps: Vec<AppUser>,
    pub(crate) operators: Vec<Operator>,
    /// The sandbox's table as text: what workers give up they are told in another way, and one of an earlier version need not know all
    /// that is in it. `None`: whoever began did not say.
    sandbox: Option<String>,
}

impl FileSettings {
    /// Who may connect to devices' sockets, beside the daemon's user: a group's name or number.
    pub fn socket_group(&self) -> Option<&str> {
        self.socket_group.as_deref()
    }

    /// What is otherwise in another file, by the keys' names.
    pub(crate) fn differences(&self, other: &Self) -> Vec<&'static str> {
        let sandboxes = self.sandbox.as_ref().zip(other.sandbox.as_ref());
        let same = [
            ("shards", self.shards == other.shards),
            ("polling", self.polling == other.polling),
            ("placement", self.placement == other.placement),
            ("isolation", self.isolation == other.isolation),
            ("worker_shards", self.worker_shards == other.worker_shards),
            ("socket_group", self.socket_group == other.socket_group),
            ("app", self.apps == other.apps),
            ("operator", self.operators == other.operators),
            ("sandbox", sandboxes.is_none_or(|(ours, theirs)| ours == theirs)),
        ];
        same.into_iter().filter(|(_, same)| !same).map(|(key, _)| key).collect()
    }
}

/// A configuration file, understood.
#[derive(Clone, Debug)]
pub struct Declared {
    path: PathBuf,
    /// Its setting of shards, as text for `millrace_engine::parse_shards`.
    pub shards: Option<String>,
    /// Its setting of polling.
    pub polling: Option<PollingMode>,
    /// Its setting of placement.
    pub placement: Option<PlacementMode>,
    /// Its setting of isolation.
    pub isolation: Option<IsolationMode>,
    /// Its setting of the other workers' shards, as text for `millrace_engine::parse_shards`.
    pub worker_shards: Option<String>,
    /// Its setting of the group that may connect to devices' sockets: a name or number.
    pub socket_group: Option<String>,
    /// Users whose applications may open volumes.
    pub apps: Vec<AppUser>,
    /// Who may use the API, beside root and the daemon's user.
    pub operators: Vec<Operator>,
    /// What the daemon gives up.
    pub sandbox: SandboxTable,
    pub(crate) groups: Vec<Located<GroupSpec>>,
    pub(crate) volumes: Vec<Located<VolumeSpec>>,
    pub(crate) devices: Vec<Located<DeclaredDevice>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    shards: Option<Spanned<String>>,
    #[serde(default)]
    polling: Option<PollingMode>,
    #[serde(default)]
    placement: Option<PlacementMode>,
    #[serde(default)]
    isolation: Option<IsolationMode>,
    #[serde(default)]
    worker_shards: Option<Spanned<String>>,
    #[serde(default)]
    socket_group: Option<String>,
    #[serde(default)]
    app: Vec<Spanned<AppUser>>,
    #[serde(default)]
    operator: Vec<Operator>,
    #[serde(default)]
    sandbox: SandboxTable,
    #[serde(default)]
    group: Vec<Spanned<GroupSpec>>,
    #[serde(default)]
    volume: Vec<Spanned<VolumeSpec>>,
    #[serde(default)]
    device: Vec<Spanned<DeclaredDevice>>,
}

impl Declared {
    /// Reads and checks a file. Relative paths in it start from its directory.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError::Read { path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(failed)?;
        let absolute = std::path::absolute(path).map_err(failed)?;
        Self::parse(&text, path, absolute.parent().unwrap_or(Path::new("/")))
    }

    /// What it sets of the daemon itself.
    pub fn settings(&self) -> FileSettings {
        FileSettings {
            shards: self.shards.clone(),
            polling: self.polling,
            placement: self.placement,
            isolation: self.isolation,
            worker_shards: self.worker_shards.clone(),
            socket_group: self.socket_group.clone(),
            apps: self.apps.clone(),
            operators: self.operators.clone(),
            sandbox: serde_json::to_string(&self.sandbox).ok(),
        }
    }

    fn parse(text: &str, path: &Path, base: &Path) -> Result<Self, ConfigError> {
        let wrong = |span: Range<usize>, message: String| {
            let (line, column) = position(text, span.start);
            ConfigError::Parse { path: path.to_owned(), line, column, message }
        };
        let file: File = toml::from_str(text)
            .map_err(|error| wrong(error.span().unwrap_or_default(), error.message().replace('\n', ", ")))?;
        for (key, shards) in [("shards", &file.shards), ("worker_shards", &file.worker_shards)] {
            let Some(shards) = shards else { continue };
            if let Err(error) = millrace_engine::parse_shards(shards.get_ref()) {
                return Err(wrong(shards.span(), format!("{key}: {error}")));
            }
        }
        let apps: Vec<Located<AppUser>> = file.app.into_iter().map(|app| locate(text, app)).collect();
        let mut declared = Self {
            path: path.to_owned(),
            shards: file.shards.map(Spanned::into_inner),
            polling: file.polling,
            placement: file.placement,
            isolation: file.isolation,
            worker_shards: file.worker_shards.map(Spanned::into_inner),
            socket_group: file.socket_group,
            apps: apps.iter().map(|app| app.value.clone()).collect(),
            operators: file.operator,
            sandbox: file.sandbox,
            groups: file.group.into_iter().map(|group| locate(text, group)).collect(),
            volumes: file.volume.into_iter().map(|volume| locate(text, volume)).collect(),
            devices: file.device.into_iter().map(|device| locate(text, device)).collect(),
        };
        declared.resolve(base);
        declared.check_apps(&apps)?;
        declared.check()?;
        Ok(declared)
    }

    fn resolve(&mut self, base: &Path) {
        for path in self.sandbox.allow.iter_mut().chain(&mut self.sandbox.key_commands) {
            *path = base.join(&*path);
        }
        for volume in &mut self.volumes {
            volume.value.stack = volume.value.stack.clone().resolved(base);
        }
        for device in &mut self.devices {
            let device = &mut device.value;
            device.kind = device.kind.clone().resolved(base);
            device.socket = device.socket.as_ref().map(|socket| base.join(socket));
        }
    }

    /// What can be found out without touching anything.
    fn check(&self) -> Result<(), ConfigError> {
        self.check_names("group", self.groups.iter().map(|group| (group.line, &group.value.name)))?;
        for Located { line, value: group } in &self.groups {
            group.read().map_err(|error| self.failed(*line, error))?;
            self.check_within(group).map_err(|error| self.failed(*line, error))?;
        }
        self.check_names("volume", self.volumes.iter().map(|volume| (volume.line, &volume.value.name)))?;
        self.check_names("device", self.devices.iter().map(|device| (device.line, &device.value.name)))?;
        for Located { line, value: device } in &self.devices {
            device.check_attached().map_err(|error| self.failed(*line, error))?;
        }
        let mut files: BTreeMap<&Path, &VolumeSpec> = BTreeMap::new();
        for Located { line, value: volume } in &self.volumes {
            volume.validate().map_err(|error| self.failed(*line, error))?;
            for path in volume.stack.leaves().into_iter().filter_map(millrace_services::Leaf::file) {
                match files.insert(path, volume) {
                    Some(other) if !(volume.read_only && other.read_only) => {
                        let (name, other, path) = (volume.name.clone(), other.name.clone(), path.to_owned());
                        return Err(self.failed(*line, ControlError::FileTaken { name, path, other }));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// A group is not within itself, not by way of others either: none of them could be made first.
    fn check_within(&self, group: &GroupSpec) -> Result<(), ControlError> {
        let mut way = vec![&group.name];
        let mut within = group.within.as_ref();
        while let Some(name) = within {
            if *name == group.name {
                let names = way.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
                let why = format!("groups are within each other: {names}; take \"within\" from one of them");
                return Err(ControlError::invalid("group", &group.name, why));
            }
            if way.contains(&name) {
                break;
            }
            way.push(name);
            within =
                self.groups.iter().find(|other| other.value.name == *name).and_then(|other| other.value.within.as_ref());
        }
        Ok(())
    }

    /// Each user once: the second entry would be of no effect. Which volumes there will be, nobody knows yet.
    fn check_apps(&self, apps: &[Located<AppUser>]) -> Result<(), ConfigError> {
        let names: Vec<(usize, Name)> = apps.iter().map(|app| (app.line, apps::name(app.value.uid))).collect();
        self.check_names("user", names.iter().map(|(line, name)| (*line, name)))?;
        apps.iter().try_for_each(|app| app.value.validate().map_err(|error| self.failed(app.line, error)))
    }

    fn check_names<'a>(
        &self,
        kind: &'static str,
        names: impl Iterator<Item = (usize, &'a Name)>,
    ) -> Result<(), ConfigError> {
        let mut lines: BTreeMap<&Name, usize> = BTreeMap::new();
        for (line, name) in names {
            if let Some(first) = lines.insert(name, line) {
                return Err(ConfigError::Twice { path: self.path.clone(), line, kind, name: name.clone(), first });
            }
        }
        Ok(())
    }

    /// The file as far as it declares these.
    pub(crate) fn part(&self, volumes: &BTreeSet<Name>, devices: &BTreeSet<Name>) -> Self {
        let mut part = self.clone();
        part.volumes.retain(|volume| volumes.contains(&volume.value.name));
        part.devices.retain(|device| devices.contains(&device.value.name));
        part
    }

    /// An object of the file could not be made.
    pub(crate) fn failed(&self, line: usize, source: ControlError) -> ConfigError {
        ConfigError::Apply { path: self.path.clone(), line, source: Box::new(source) }
    }

    /// Compares what is stored already with what is declared. What guests may change themselves is no difference.
    pub(crate) fn compare(
        &self,
        groups: &[GroupSpec],
        volumes: &[VolumeRecord],
        devices: &[DeviceRecord],
    ) -> Result<(), ConfigError> {
        let differs = |line, kind, name: &Name, difference: Option<String>| match difference {
            Some(difference) => {
                Err(ConfigError::Differs { path: self.path.clone(), line, kind, name: name.clone(), difference })
            }
            None => Ok(()),
        };
        for Located { line, value: spec } in &self.groups {
            if let Some(stored) = groups.iter().find(|stored| stored.name == spec.name) {
                differs(*line, "group", &spec.name, group_difference(spec, stored))?;
            }
        }
        for Located { line, value: spec } in &self.volumes {
            if let Some(record) = volumes.iter().find(|record| record.spec.name == spec.name) {
                differs(*line, "volume", &spec.name, volume_difference(spec, &record.spec))?;
            }
        }
        for Located { line, value: device } in &self.devices {
            if let Some(record) = devices.iter().find(|record| record.spec.name == device.name) {
                differs(*line, "device", &device.name, device_difference(device, record))?;
            }
            let known = |volume: &Name| {
                let declared = self.volumes.iter().any(|declared| declared.value.name == *volume);
                declared || volumes.iter().any(|record| record.spec.name == *volume)
            };
            if let Some(attach) = device.attach.iter().find(|attach| !known(&attach.volume)) {
                let (path, line, device, volume) = (self.path.clone(), *line, device.name.clone(), attach.volume.clone());
                return Err(ConfigError::NoVolume { path, line, device, volume });
            }
        }
        Ok(())
    }
}

fn locate<T>(text: &str, object: Spanned<T>) -> Located<T> {
    Located { line: position(text, object.span().start).0, value: object.into_inner() }
}

/// Line and column of a byte, from 1.
fn position(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

fn group_difference(declared: &GroupSpec, stored: &GroupSpec) -> Option<String> {
    let text = |spec: &GroupSpec| {
        let within = spec.within.as_ref().map(|within| format!("within {within}"));
        let caps = spec.caps.settings().into_iter().map(|(name, value)| format!("{name}={value}"));
        let weight = (spec.weight > 1).then(|| format!("weight={}", spec.weight));
        within.into_iter().chain(caps).chain(weight).collect::<Vec<_>>().join(", ")
    };
    (declared != stored).then(|| format!("it is ({}) in the file and ({}) in the state", text(declared), text(stored)))
}

fn volume_difference(declared: &VolumeSpec, stored: &VolumeSpec) -> Option<String> {
    let differ = |what, here: String, there: String| {
        (here != there).then(|| format!("{what} is {here} in the file and {there} in the state"))
    };
    let size = declared.size.zip(stored.size);
    // A volume on its way is where the file says, or is going there.
    let is_on_its_way = stacks::migration(&stored.stack).is_some()
        && [Stays::Old, Stays::New].into_iter().any(|stays| stacks::without(&stored.stack, stays) == declared.stack);
    (if is_on_its_way { None } else { differ("stack", declared.stack.to_string(), stored.stack.to_string()) })
        .or_else(|| {
            let size = size.filter(|(here, there)| *there != after_formats(*here));
            size.and_then(|(here, there)| differ("size", here.to_string(), there.to_string()))
        })
        .or_else(|| {
            let (here, there) = (declared.block_size.0.bytes(), stored.block_size.0.bytes());
            differ("block_size", here.to_string(), there.to_string())
        })
        .or_else(|| differ("read_only", declared.read_only.to_string(), stored.read_only.to_string()))
}

/// What guests leave of a size when they format it: whole blocks of the largest size.
fn after_formats(size: Size) -> Size {
    let block = u64::from(BlockSize::B4096.bytes());
    Size(size.0 / block * block)
}

fn device_difference(declared: &DeclaredDevice, record: &DeviceRecord) -> Option<String> {
    let (spec, stored) = (declared.spec(), &record.spec);
    if spec.kind != stored.kind {
        let text = |kind: &DeviceKind| match kind {
            DeviceKind::Nvme(nvme) => format!("nvme {}", serde_json::to_string(nvme).unwrap_or_default()),
            DeviceKind::VirtioBlk(disk) => format!("virtio_blk {}", serde_json::to_string(disk).unwrap_or_default()),
        };
        return Some(format!("it is {} in the file and {} in the state", text(&spec.kind), text(&stored.kind)));
    }
    if spec.socket != stored.socket {
        return Some(format!("socket is {:?} in the file and {:?} in the state", spec.socket, stored.socket));
    }
    if spec.tenant != stored.tenant {
        let text = |tenant: &Option<Name>| tenant.as_ref().map_or("nobody".to_owned(), Name::to_string);
        return Some(format!("tenant is {} in the file and {} in the state", text(&spec.tenant), text(&stored.tenant)));
    }
    if spec.shard != stored.shard {
        return Some(format!("shard is {:?} in the file and {:?} in the state", spec.shard, stored.shard));
    }
    declared.attach.iter().find_map(|attach| {
        let by_volume = record.namespaces.iter().find(|there| there.volume == attach.volume);
        let by_nsid = record.namespaces.iter().find(|there| Some(there.nsid) == attach.nsid);
        match (by_volume, by_nsid) {
            (Some(there), _) if attach.nsid.is_some_and(|nsid| nsid != there.nsid) => Some(format!(
                "volume {} is namespace {} in the file and {} in the state",
                attach.volume,
                attach.nsid.unwrap_or_default(),
                there.nsid
            )),
            (Some(there), _) if there.read_only != attach.read_only => Some(format!(
                "read_only of namespace {} is {} in the file and {} in the state",
                there.nsid, attach.read_only, there.read_only
            )),
            (None, Some(there)) => Some(format!(
                "namespace {} is volume {} in the file and {} in the state",
                there.nsid, attach.volume, there.volume
            )),
            _ => None,
        }
    })
}
