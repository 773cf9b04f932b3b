//! What is declared: volumes, devices, and which volume a device shows. The same types are the API's requests, the objects of
//! a configuration file and, with what the daemon adds to them, the stored state.

use std::{collections::BTreeMap, path::PathBuf};

use millrace_backends::{BackendSpec, ParseSpecError};
use millrace_block::BlockSize;
use millrace_frontends::{
    nvme::{Config, DoorbellMode, ParseFunctionsError, StorageFunctions},
    virtio_blk,
};
use millrace_services::{
    Leaf, Node, SettingError, Settings,
    throttle::{Caps, Weight},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{Name, Size, error::ControlError};

mod changes;
#[cfg(test)]
mod tests;

pub use changes::{MigrationChange, MigrationSpec, VolumeChange};

/// A volume as declared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "VolumeForm", into = "VolumeForm")]
pub struct VolumeSpec {
    /// Its name.
    #[schema(value_type = String, example = "disk0")]
    pub name: Name,
    /// Its size: bytes, or text such as "1G". May be left out for a file that exists: then its whole length is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, example = 1_073_741_824)]
    pub size: Option<Size>,
    /// What it is made of: a back end ("memory", "null" or "file:PATH" with an absolute path to a regular file or block device), or
    /// services over back ends, as an expression or a table (docs/services). "backend" in its place names a back end only.
    #[schema(value_type = String, example = "stripe(chunk=64K, file:/srv/a.img, file:/srv/b.img)")]
    pub stack: Node,
    /// Size of its logical blocks in bytes: 512 or 4096.
    #[serde(default)]
    #[schema(value_type = u32, example = 512)]
    pub block_size: LogicalBlock,
    /// It is never written. Several read-only volumes may share a file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// What guests know it by; a new one when left out. Given where a machine moves here that has seen the volume elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub uuid: Option<Uuid>,
}

/// A volume as written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VolumeForm {
    name: Name,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    size: Option<Size>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    backend: Option<Backend>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stack: Option<Node>,
    #[serde(default)]
    block_size: LogicalBlock,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    read_only: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uuid: Option<Uuid>,
}

impl TryFrom<VolumeForm> for VolumeSpec {
    type Error = &'static str;

    fn try_from(form: VolumeForm) -> Result<Self, &'static str> {
        let VolumeForm { name, size, backend, stack, block_size, read_only, uuid } = form;
        let stack = match (stack, backend) {
            (Some(stack), None) => stack,
            (None, Some(backend)) => backend.into(),
            (None, None) => return Err("missing field `stack` (or `backend`)"),
            (Some(_), Some(_)) => return Err("`stack` and `backend` say the same: write one of them"),
        };
        Ok(Self { name, size, stack, block_size, read_only, uuid })
    }
}

impl From<VolumeSpec> for VolumeForm {
    fn from(spec: VolumeSpec) -> Self {
        let VolumeSpec { name, size, stack, block_size, read_only, uuid } = spec;
        Self { name, size, backend: None, stack: Some(stack), block_size, read_only, uuid }
    }
}

/// A back end in its written form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Backend(pub BackendSpec);

impl TryFrom<String> for Backend {
    type Error = ParseSpecError;

    fn try_from(text: String) -> Result<Self, ParseSpecError> {
        text.parse().map(Self)
    }
}

impl From<Backend> for String {
    fn from(backend: Backend) -> Self {
        backend.0.to_string()
    }
}

impl From<Backend> for Node {
    fn from(backend: Backend) -> Self {
        Self::leaf(backend.0.to_string())
    }
}

impl Backend {
    /// The file, if there is one.
    pub fn path(&self) -> Option<&PathBuf> {
        match &self.0 {
            BackendSpec::File(path) => Some(path),
            BackendSpec::Memory | BackendSpec::Null | BackendSpec::Nvme(_) => None,
        }
    }

    /// Makes a relative path absolute: it starts from `base`.
    #[must_use]
    pub fn resolved(self, base: &std::path::Path) -> Self {
        match self.0 {
            BackendSpec::File(path) => Self(BackendSpec::File(tidy(&base.join(path)))),
            other => Self(other),
        }
    }
}

/// The path without its `.` components.
fn tidy(path: &std::path::Path) -> PathBuf {
    path.components().collect()
}

/// A logical block size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct LogicalBlock(pub BlockSize);

/// A number that is no logical block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block size {0} is not usable; it is 512 or 4096")]
pub struct LogicalBlockError(u32);

impl Default for LogicalBlock {
    fn default() -> Self {
        Self(BlockSize::B512)
    }
}

impl TryFrom<u32> for LogicalBlock {
    type Error = LogicalBlockError;

    fn try_from(bytes: u32) -> Result<Self, LogicalBlockError> {
        BlockSize::from_bytes(bytes).map(Self).ok_or(LogicalBlockError(bytes))
    }
}

impl From<LogicalBlock> for u32 {
    fn from(block: LogicalBlock) -> Self {
        block.0.bytes()
    }
}

impl std::str::FromStr for LogicalBlock {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size: Size = text.parse().map_err(|error: crate::SizeError| error.to_string())?;
        let bytes = u32::try_from(size.0).unwrap_or(u32::MAX);
        bytes.try_into().map_err(|error: LogicalBlockError| error.to_string())
    }
}

/// A device as declared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "DeviceForm", into = "DeviceForm")]
pub struct DeviceSpec {
    /// Its name.
    pub name: Name,
    /// What it is.
    pub kind: DeviceKind,
    /// Its socket, an absolute path; RUN_DIR/NAME.sock when left out.
    pub socket: Option<PathBuf>,
    /// The shard it lives on; the placement policy decides when left out.
    pub shard: Option<usize>,
    /// Whose it is.
    pub tenant: Option<Name>,
}

/// What a device is to its guest, with the properties of its kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// An NVMe controller, over vfio-user.
    Nvme(NvmeSpec),
    /// A virtio disk, over vhost-user.
    VirtioBlk(VirtioBlkSpec),
}

/// A device in its written form: it says one of the kinds.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = DeviceSpec)]
pub(crate) struct DeviceForm {
    /// Its name.
    #[schema(value_type = String, example = "vm0")]
    name: Name,
    /// It is an NVMe controller, with these properties.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nvme: Option<NvmeSpec>,
    /// It is a virtio disk over vhost-user, with these properties. Exactly one of the kinds must be there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    virtio_blk: Option<VirtioBlkSpec>,
    /// Its socket, an absolute path; RUN_DIR/NAME.sock when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    socket: Option<PathBuf>,
    /// The shard it lives on; the placement policy decides when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shard: Option<usize>,
    /// Whose it is: a tenant's devices may have a worker of their own (docs/isolation.md).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "acme")]
    tenant: Option<Name>,
}

/// A device that is nothing, or two things.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a device is either nvme or virtio_blk: give the properties of one of them (they may be empty)")]
pub struct DeviceKindError;

impl DeviceKind {
    /// The kind that is there.
    pub(crate) fn of(nvme: Option<NvmeSpec>, virtio_blk: Option<VirtioBlkSpec>) -> Result<Self, DeviceKindError> {
        match (nvme, virtio_blk) {
            (Some(nvme), None) => Ok(Self::Nvme(nvme)),
            (None, Some(disk)) => Ok(Self::VirtioBlk(disk)),
            _ => Err(DeviceKindError),
        }
    }

    /// The properties of a controller, if it is one.
    pub fn nvme(&self) -> Option<&NvmeSpec> {
        match self {
            Self::Nvme(nvme) => Some(nvme),
            Self::VirtioBlk(_) => None,
        }
    }

    /// The properties of a virtio disk, if it is one.
    pub fn virtio_blk(&self) -> Option<&VirtioBlkSpec> {
        match self {
            Self::Nvme(_) => None,
            Self::VirtioBlk(disk) => Some(disk),
        }
    }

    /// Makes relative paths absolute: they start from `base`.
    #[must_use]
    pub fn resolved(self, base: &std::path::Path) -> Self {
        match self {
            Self::Nvme(nvme) => Self::Nvme(NvmeSpec { ns_backend: nvme.ns_backend.resolved(base), ..nvme }),
            disk @ Self::VirtioBlk(_) => disk,
        }
    }
}

impl TryFrom<DeviceForm> for DeviceSpec {
    type Error = DeviceKindError;

    fn try_from(form: DeviceForm) -> Result<Self, DeviceKindError> {
        let DeviceForm { name, nvme, virtio_blk, socket, shard, tenant } = form;
        Ok(Self { name, kind: DeviceKind::of(nvme, virtio_blk)?, socket, shard, tenant })
    }
}

impl From<DeviceSpec> for DeviceForm {
    fn from(spec: DeviceSpec) -> Self {
        let DeviceSpec { name, kind, socket, shard, tenant } = spec;
        let (nvme, virtio_blk) = match kind {
            DeviceKind::Nvme(nvme) => (Some(nvme), None),
            DeviceKind::VirtioBlk(disk) => (None, Some(disk)),
        };
        Self { name, nvme, virtio_blk, socket, shard, tenant }
    }
}

/// Properties of a virtio disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VirtioBlkSpec {
    /// Request queues; a front end uses as many as it wants of them.
    pub queues: u16,
    /// Serial number, at most 20 printable ASCII characters; made from the name when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// The machine's monitor may take the disk's state along (`VHOST_USER_PROTOCOL_F_DEVICE_STATE`).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub migration: bool,
    /// The machine has no balloon, no free page reporting and no virtio-mem: a physical disk may keep its memory mapped.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub pin_memory: bool,
}

impl Default for VirtioBlkSpec {
    fn default() -> Self {
        Self { queues: virtio_blk::Config::new("").queues, serial: None, migration: false, pin_memory: false }
    }
}

/// Properties of an NVMe controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NvmeSpec {
    /// I/O queue pairs.
    pub queues: u16,
    /// MSI-X vectors; one more than there are queue pairs when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vectors: Option<u16>,
    /// Entries a queue may have.
    pub queue_entries: u32,
    /// Largest namespace identifier.
    pub namespaces: u32,
    /// Largest transfer of one command: a power of two from 8 KiB to 2 MiB.
    #[schema(value_type = u64)]
    pub mdts: Size,
    /// How the guest rings: through memory it shares with us, or by messages.
    pub doorbells: Doorbells,
    /// Bytes of namespaces that the guest may create itself; 0: none.
    #[schema(value_type = u64)]
    pub ns_quota: Size,
    /// Where the blocks of namespaces that the guest creates are: "memory" or "file:DIRECTORY".
    #[schema(value_type = String)]
    pub ns_backend: Backend,
    /// Serial number, at most 20 printable ASCII characters; made from the name when left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// What its subsystem is named by; a new one when left out. Given where a machine moves here that has seen the device elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub uuid: Option<Uuid>,
    /// The machine's monitor may read and write the controller's state by messages, and have the pages that it writes logged.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub migration: bool,
    /// What an engine's storage functions do for the device (`serve --engine`): share=FIRST+BLOCKS,iops=N,bytes=N,replicate.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub functions: Option<Functions>,
}

/// Storage functions in their written form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Functions(pub StorageFunctions);

impl TryFrom<String> for Functions {
    type Error = ParseFunctionsError;

    fn try_from(text: String) -> Result<Self, ParseFunctionsError> {
        text.parse().map(Self)
    }
}

impl From<Functions> for String {
    fn from(functions: Functions) -> Self {
        functions.0.to_string()
    }
}

/// How doorbells arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Doorbells {
    /// In a page that guest and daemon share.
    #[default]
    Shared,
    /// As messages on the socket.
    Messages,
}

impl Default for NvmeSpec {
    fn default() -> Self {
        let usual = Config::new("");
        Self {
            queues: usual.queues,
            vectors: None,
            queue_entries: usual.queue_entries,
            namespaces: usual.namespaces,
            mdts: Size(usual.max_transfer()),
            doorbells: Doorbells::Shared,
            ns_quota: Size(0),
            ns_backend: Backend(BackendSpec::Memory),
            serial: None,
            uuid: None,
            migration: false,
            functions: None,
        }
    }
}

/// A volume shown by a device, as declared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachSpec {
    /// The volume's name.
    #[schema(value_type = String, example = "disk0")]
    pub volume: Name,
    /// Its namespace identifier; the lowest free one when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// The device's guest cannot write it.
    #[serde(default)]
    pub read_only: bool,
}

/// A group as declared: what all volumes have together whose stacks name it, and all groups that are in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupSpec {
    /// Its name.
    #[schema(value_type = String, example = "gold")]
    pub name: Name,
    /// A group that it is in: what is in this one counts there as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub within: Option<Name>,
    /// Its caps.
    #[serde(default)]
    pub caps: GroupCaps,
    /// Its part of a saturated disk beside the others' weights, 1 to 1000; 1 when left out.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub weight: u32,
}

fn one() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_one(weight: &u32) -> bool {
    *weight == 1
}

/// What of a group is to be changed; what is left out stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupChange {
    /// Caps in the place of all that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caps: Option<GroupCaps>,
    /// Its weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// Caps of a group, or of a user's applications. What is left out is not capped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupCaps {
    /// Operations per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Reads per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<u64>,
    /// Writes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<u64>,
    /// Bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub bandwidth: Option<Size>,
    /// Bytes read per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub read_bandwidth: Option<Size>,
    /// Bytes written per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub write_bandwidth: Option<Size>,
    /// What may be saved up while idle, as time at the full rate: "10ms" when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<String>,
}

impl GroupCaps {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Understood.
    pub(crate) fn read(&self) -> Result<Caps, SettingError> {
        let mut settings = Settings::default();
        for (name, value) in self.settings() {
            settings.add(name, &value);
        }
        Caps::read(&settings)
    }

    /// Those that are there, with their names and values as settings.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let Self { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst } = self;
        let operations = [("iops", iops), ("read_iops", read_iops), ("write_iops", write_iops)];
        let bytes = [("bandwidth", bandwidth), ("read_bandwidth", read_bandwidth), ("write_bandwidth", write_bandwidth)];
        let operations = operations.into_iter().filter_map(|(name, count)| Some((name, count.as_ref()?.to_string())));
        let bytes = bytes.into_iter().filter_map(|(name, size)| Some((name, size.as_ref()?.0.to_string())));
        operations.chain(bytes).chain(burst.clone().map(|burst| ("burst", burst))).collect()
    }
}

impl GroupSpec {
    /// Its caps and its weight, understood.
    pub(crate) fn read(&self) -> Result<(Caps, Weight), ControlError> {
        let read = self.caps.read().and_then(|caps| Ok((caps, Weight::new(self.weight)?)));
        read.map_err(|error| ControlError::invalid("group", &self.name, error.to_string()))
    }
}

/// A copy to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CopySpec {
    /// Its name; one that is free when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub name: Option<Name>,
    /// The volume that is read. A guest may use it: then what is written meanwhile is copied, or not.
    #[schema(value_type = String, example = "disk0")]
    pub source: Name,
    /// The volume that is written, from its beginning on. No device may have it, and it is nobody else's until the copy has ended.
    #[schema(value_type = String, example = "disk1")]
    pub target: Name,
    /// Bytes per second at most, 4096 or more; 0 or left out: as fast as it goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate: Option<Size>,
}

/// What of a copy is to be changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyChange {
    /// "paused", or "running" to have it go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<CopyState>,
    /// Bytes per second at most from now on, 4096 or more; 0: as fast as it goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub rate: Option<Size>,
}

/// How a copy is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CopyState {
    /// It goes on, after every start of the daemon too.
    Running,
    /// It stands still until it is told to go on; its target is not free.
    Paused,
    /// Everything is durable on the target.
    Done,
    /// It cannot go on as it is; the reason stands beside it. It can be told to try again.
    Failed,
}

/// A command to a service of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceCommand {
    /// The service: its name, or its node as messages and the tree name it when there are several.
    pub service: String,
    /// The command.
    pub command: String,
    /// Its arguments.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub arguments: BTreeMap<String, String>,
}

/// What a service answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServiceAnswer {
    /// Text for the operator.
    pub answer: String,
}

/// A device may not have these names: its socket would be one of the daemon's own.
const OWN_NAMES: [&str; 2] = ["api", "apps"];

impl VolumeSpec {
    /// Checks what the types cannot say.
    pub(crate) fn validate(&self) -> Result<(), ControlError> {
        let wrong = |why: String| Err(ControlError::invalid("volume", &self.name, why));
        for leaf in self.stack.leaves() {
            match (leaf.file(), leaf.volume()) {
                (Some(path), _) if !path.is_absolute() => return wrong("the path of its file must be absolute".to_owned()),
                (None, None) => {
                    if let Err(error) = leaf.spec.parse::<BackendSpec>() {
                        return wrong(error.to_string());
                    }
                }
                _ => {}
            }
        }
        let leaf = self.stack.as_leaf();
        let needs_size = |leaf: &Leaf| matches!(leaf.spec.parse(), Ok(BackendSpec::Memory | BackendSpec::Null));
        if leaf.is_some_and(needs_size) && self.size.is_none() {
            return wrong("this back end needs a size: --size, or size in the configuration file".to_owned());
        }
        if self.read_only && leaf.is_none_or(|leaf| leaf.file().is_none()) {
            return wrong("only a file can be read-only; attach it read-only instead".to_owned());
        }
        Ok(())
    }

    /// Checks of a new volume that each of its legs is told its size. Those of one that is there have theirs.
    pub(crate) fn check_sizes(&self) -> Result<(), ControlError> {
        let checked = self.stack.check_sizes(self.size.map(|size| size.0), self.block_size.0);
        checked.map_err(|error| ControlError::invalid("volume", &self.name, error.to_string()))
    }
}

impl DeviceSpec {
    /// Checks what the types cannot say.
    pub(crate) fn validate(&self, shards: usize) -> Result<(), ControlError> {
        let wrong = |why: String| Err(ControlError::invalid("device", &self.name, why));
        if OWN_NAMES.contains(&self.name.as_str()) {
            return wrong("this name is the API's own; choose another".to_owned());
        }
        if self.socket.as_ref().is_some_and(|socket| !socket.is_absolute()) {
            return wrong("the path of its socket must be absolute".to_owned());
        }
        if let Some(shard) = self.shard
            && shard >= shards
        {
            return wrong(format!("there is no shard {shard}; the last one is {}", shards.saturating_sub(1)));
        }
        match &self.kind {
            DeviceKind::Nvme(nvme) => nvme.validate(),
            DeviceKind::VirtioBlk(disk) => disk.validate(),
        }
        .or_else(wrong)
    }

    /// The serial number that the guest sees.
    pub(crate) fn serial(&self) -> String {
        match &self.kind {
            DeviceKind::Nvme(nvme) => nvme.serial.clone().unwrap_or_else(|| Config::new(self.name.as_str()).serial),
            DeviceKind::VirtioBlk(_) => self.disk_config().serial,
        }
    }

    /// A virtio disk's configuration.
    pub(crate) fn disk_config(&self) -> virtio_blk::Config {
        let usual = virtio_blk::Config::new(self.name.as_str());
        let disk = self.kind.virtio_blk().cloned().unwrap_or_default();
        let VirtioBlkSpec { queues, serial, migration, pin_memory } = disk;
        let serial = serial.unwrap_or(usual.serial);
        virtio_blk::Config { name: usual.name, serial, queues, migration, pin_memory }
    }

    /// A controller's configuration.
    pub(crate) fn controller_config(&self, cntlid: u16, uuid: Uuid) -> Config {
        let usual = Config::new(self.name.as_str());
        let nvme = self.kind.nvme().cloned().unwrap_or_default();
        Config {
            serial: nvme.serial.clone().unwrap_or_else(|| usual.serial.clone()),
            // The form for subsystems without a domain of their own (Base 4.7).
            subnqn: format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"),
            cntlid,
            queues: nvme.queues,
            queue_entries: nvme.queue_entries,
            vectors: nvme.vectors(),
            namespaces: nvme.namespaces,
            mdts: (nvme.mdts.0 / 4096).trailing_zeros() as u8,
            doorbells: match nvme.doorbells {
                Doorbells::Shared => DoorbellMode::Shared,
                Doorbells::Messages => DoorbellMode::Messages,
            },
            quota: millrace_frontends::nvme::NamespaceQuota { bytes: nvme.ns_quota.0 },
            migration: nvme.migration,
            functions: nvme.functions.map(|functions| functions.0).unwrap_or_default(),
            ..usual
        }
    }
}

impl NvmeSpec {
    /// The least `mdts`. One page has no value of its own: an MDTS of 0 says that there is no limit.
    pub const LEAST_MDTS: Size = Size(8 << 10);
    /// The largest `mdts`: the most single pages that one request may consist of.
    pub const MOST_MDTS: Size = Size(2 << 20);

    /// MSI-X vectors.
    pub fn vectors(&self) -> u16 {
        self.vectors.unwrap_or(self.queues.saturating_add(1))
    }

    fn validate(&self) -> Result<(), String> {
        let range = |what: &str, value: u32, least: u32, most: u32| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(format!("{value} {what}: {least} to {most} are possible"))
            }
        };
        range("queues", self.queues.into(), 1, Config::MAX_QUEUES.into())?;
        range("vectors", self.vectors().into(), 1, Config::MAX_VECTORS.into())?;
        range("queue entries", self.queue_entries, 2, 65_536)?;
        range("namespaces", self.namespaces, 1, Config::MAX_NAMESPACES)?;
        let (least, most) = (Self::LEAST_MDTS, Self::MOST_MDTS);
        if !self.mdts.0.is_power_of_two() || !(least..=most).contains(&self.mdts) {
            return Err(format!("mdts of {}: a power of two from {least} to {most} is possible", self.mdts));
        }
        match &self.ns_backend.0 {
            BackendSpec::Null | BackendSpec::Nvme(_) => {
                return Err("ns_backend: memory or file:DIRECTORY is possible".to_owned());
            }
            BackendSpec::File(path) if !path.is_absolute() => {
                return Err("ns_backend: the path of the directory must be absolute".to_owned());
            }
            BackendSpec::File(path) if !path.is_dir() => {
                return Err(format!("ns_backend: there is no directory {}; create it first", path.display()));
            }
            BackendSpec::File(_) | BackendSpec::Memory => {}
        }
        check_serial(self.serial.as_deref())
    }
}

impl VirtioBlkSpec {
    fn validate(&self) -> Result<(), String> {
        let most = virtio_blk::Config::MAX_QUEUES;
        if !(1..=most).contains(&self.queues) {
            return Err(format!("{} queues: 1 to {most} are possible", self.queues));
        }
        check_serial(self.serial.as_deref())
    }
}

fn check_serial(serial: Option<&str>) -> Result<(), String> {
    let printable = |serial: &str| {
        (1..=20).contains(&serial.len()) && serial.bytes().all(|b| (0x20..0x7f).contains(&b)) && serial.trim() == serial
    };
    if serial.is_none_or(printable) {
        Ok(())
    } else {
        Err("serial: 1 to 20 printable ASCII characters are possible, no space at either end".to_owned())
    }
}
