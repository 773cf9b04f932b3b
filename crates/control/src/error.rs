//! Why the daemon could not do what it was asked.

use std::path::{Path, PathBuf};

use millrace_block::VolumeError;
use millrace_engine::EngineError;
use millrace_frontends::{
    nvme::{DeviceError, SavedStateError},
    virtio_blk,
};
use millrace_services::{
    Leaf, Node,
    copy::CopyError,
    graph::{ChangeFailed, GraphError},
};
use millrace_vfio_user::ListenerError;
use thiserror::Error;

use crate::{Name, Size, store::StoreError};

mod system;
#[cfg(test)]
mod tests;

/// What programs are told who have as many sessions as they may have.
pub(crate) const TOO_MANY_SESSIONS: &str = "too-many-sessions";
/// What programs are told whose change was made from a stack that is the volume's no more.
pub const CHANGED_MEANWHILE: &str = "changed-meanwhile";
/// Part of the reason of a volume that has failed for good: nothing can be put right there, it is to be made anew.
pub const EMPTIED: &str = "it was in memory, which the daemon's stop has emptied";

/// A failed request: what, about which object, and why. Whatever it is, the state is as it was before; but for [`Self::CopyEnding`]: that is done later.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// There is no such volume.
    #[error("volume {name} does not exist")]
    NoVolume {
        /// The name asked for.
        name: String,
    },
    /// There is no such device.
    #[error("device {name} does not exist")]
    NoDevice {
        /// The name asked for.
        name: String,
    },
    /// There is no such group.
    #[error("group {name} does not exist")]
    NoGroup {
        /// The name asked for.
        name: String,
    },
    /// The name is taken by another group.
    #[error("group {name} exists already")]
    GroupExists {
        /// The name.
        name: Name,
    },
    /// The group cannot go while something is in it.
    #[error("group {name} is in use: {}", members(volumes, groups))]
    GroupInUse {
        /// The group.
        name: Name,
        /// Volumes whose stacks name it.
        volumes: Vec<Name>,
        /// Groups that are in it.
        groups: Vec<Name>,
    },
    /// A device's state was not saved, or a saved one not taken.
    #[error("device {device}: its state: {source}")]
    SavedState {
        /// The device.
        device: Name,
        /// Why.
        #[source]
        source: SavedStateError,
    },
    /// One trace at a time.
    #[error("{target} is being traced, and a worker makes one trace at a time")]
    Tracing {
        /// What is traced.
        target: String,
    },
    /// There is no trace of it.
    #[error("{target} is not being traced")]
    NoTrace {
        /// What was named.
        target: String,
    },
    /// There is no thread for a trace.
    #[error("no thread for the trace: {source}")]
    TraceThread {
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// There is no such copy.
    #[error("copy {name} does not exist")]
    NoCopy {
        /// The name asked for.
        name: String,
    },
    /// The name is taken by another copy.
    #[error("copy {name} exists already")]
    CopyExists {
        /// The name.
        name: Name,
    },
    /// There is no name left for one.
    #[error("there are too many copies; forget some that have ended")]
    TooManyCopies,
    /// A copy reads or writes the volume.
    #[error("volume {name} is being copied, by {copy}")]
    Copying {
        /// The volume.
        name: Name,
        /// The copy.
        copy: Name,
    },
    /// A copy was told to end, and has not yet.
    #[error(
        "copy {name} ends when its present step does, and holds its target until then: one of its volumes is slow, or does not answer"
    )]
    CopyEnding {
        /// The copy.
        name: Name,
    },
    /// A copy cannot be made.
    #[error("copy {copy}: {source}")]
    Copy {
        /// Its name.
        copy: Name,
        /// Why.
        #[source]
        source: CopyError,
    },
    /// The name is taken by another volume.
    #[error("volume {name} exists already")]
    VolumeExists {
        /// The name.
        name: Name,
    },
    /// The name is taken by another device.
    #[error("device {name} exists already")]
    DeviceExists {
        /// The name.
        name: Name,
    },
    /// The volume cannot go while devices show it.
    #[error("volume {name} is attached to {}", list(users, |device, nsid| format!("{device} as namespace {nsid}")))]
    VolumeAttached {
        /// The volume.
        name: Name,
        /// The devices, each with the namespace identifier there.
        users: Vec<(Name, u32)>,
    },
    /// Requests of a device that had the volume have not ended.
    #[error("volume {name}: {in_flight} requests of a device that had it have not ended")]
    RequestsLeft {
        /// The volume.
        name: Name,
        /// How many.
        in_flight: u64,
    },
    /// The volume is being erased for a guest that formats it.
    #[error("volume {name} is being formatted")]
    Formatting {
        /// The volume.
        name: Name,
    },
    /// The volume's stack is being changed.
    #[error("volume {name} is being changed")]
    Changing {
        /// The volume.
        name: Name,
    },
    /// The change was made from another stack than the volume has.
    #[error("volume {name}: its stack has been changed, and is {stack} by now")]
    ChangedMeanwhile {
        /// The volume.
        name: Name,
        /// Its stack.
        stack: Node,
    },
    /// The volume would not go where it is being migrated to.
    #[error("volume {name} is being migrated to {to}, and this stack would end that")]
    Migrating {
        /// The volume.
        name: Name,
        /// Where it goes.
        to: Node,
    },
    /// A service of the volume carries out a command.
    #[error("volume {name}: a command to one of its services is not done yet")]
    Commanded {
        /// The volume.
        name: Name,
    },
    /// It, or a volume that it is made of or that is made of it, is being resized.
    #[error("volume {name}: volume {by} is being resized")]
    Resizing {
        /// The volume.
        name: Name,
        /// The one that is being resized.
        by: Name,
    },
    /// Another volume is made of it.
    #[error("volume {name} is part of volume {by}")]
    VolumeInStack {
        /// The volume.
        name: Name,
        /// The other one.
        by: Name,
    },
    /// A node of the volume's stack refused.
    #[error("volume {name}: {source}")]
    Graph {
        /// The volume.
        name: Name,
        /// The node, and why.
        #[source]
        source: GraphError,
    },
    /// The volume's stack was not changed; the old one goes on.
    #[error("volume {name}: {source}")]
    Change {
        /// The volume.
        name: Name,
        /// Why.
        #[source]
        source: ChangeFailed,
    },
    /// Another volume has the file.
    #[error("volume {name}: {} is the file of volume {other}", .path.display())]
    FileTaken {
        /// The volume asked for.
        name: Name,
        /// The file.
        path: PathBuf,
        /// The volume that has it.
        other: Name,
    },
    /// The volume could not be opened when the daemon started.
    #[error("volume {name} is not available: {reason}")]
    VolumeFailed {
        /// The volume.
        name: Name,
        /// What went wrong.
        reason: String,
    },
    /// The device could not be made when the daemon started.
    #[error("device {name} is not available: {reason}")]
    DeviceFailed {
        /// The device.
        name: Name,
        /// What went wrong.
        reason: String,
    },
    /// The volume is read-only.
    #[error("volume {name} is read-only")]
    ReadOnly {
        /// The volume.
        name: Name,
    },
    /// The namespace identifier is in use.
    #[error("device {device}: namespace {nsid} is volume {volume}")]
    NsidTaken {
        /// The device.
        device: Name,
        /// The identifier.
        nsid: u32,
        /// What it names.
        volume: Name,
    },
    /// The namespace identifier is 0 or too large.
    #[error("device {device}: namespace identifier {nsid} is out of range: 1 to {largest} are possible")]
    NsidRange {
        /// The device.
        device: Name,
        /// The identifier.
        nsid: u32,
        /// The largest.
        largest: u32,
    },
    /// The device has as many namespaces as it can.
    #[error("device {device} has all its {largest} namespaces already")]
    NoNsidFree {
        /// The device.
        device: Name,
        /// How many that is.
        largest: u32,
    },
    /// The device shows the volume already.
    #[error("device {device} has volume {volume} already, as namespace {nsid}")]
    AttachedAlready {
        /// The device.
        device: Name,
        /// The volume.
        volume: Name,
        /// Its identifier there.
        nsid: u32,
    },
    /// There is no such namespace.
    #[error("device {device} has no namespace {nsid}")]
    NotAttached {
        /// The device.
        device: Name,
        /// The identifier.
        nsid: u32,
    },
    /// A property has a value it cannot have.
    #[error("{kind} {name}: {why}")]
    Invalid {
        /// "volume", "device", "group" or "user".
        kind: &'static str,
        /// The object's name.
        name: Name,
        /// What is wrong.
        why: String,
    },
    /// What is asked for may be had at another time, or when something else is other than it is now.
    #[error("{kind} {name}: {why}")]
    Untimely {
        /// "volume", "device", "copy" or "user".
        kind: &'static str,
        /// The object's name.
        name: Name,
        /// What is in the way.
        why: String,
    },
    /// A volume is to be made of one that is not there.
    #[error("volume {name}: there is no volume {leaf}")]
    NoLeaf {
        /// The volume.
        name: Name,
        /// The one that its stack names.
        leaf: String,
    },
    /// The size does not fit the volume.
    #[error("volume {name}: size {size} is not usable: {why}")]
    BadSize {
        /// The volume.
        name: Name,
        /// The size asked for.
        size: Size,
        /// What is wrong with it, and which would be right.
        why: String,
    },
    /// The size is smaller than the volume's, and nobody said that this is meant.
    #[error(
        "volume {name} has {has}, and {size} is smaller: what lies in its last {} would be lost",
        Size(has.0.saturating_sub(size.0))
    )]
    WouldShrink {
        /// The volume.
        name: Name,
        /// The size that it has now.
        has: Size,
        /// The size asked for.
        size: Size,
    },
    /// The volume's back end refused.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The virtio disk refused.
    #[error(transparent)]
    Disk(#[from] virtio_blk::DeviceError),
    /// A namespace identifier for a device that has none.
    #[error("device {device} is a virtio disk: it shows one volume, without a namespace identifier")]
    NoNamespaces {
        /// The device.
        device: Name,
    },
    /// A virtio disk shows a volume already.
    #[error("device {device} is a virtio disk and shows volume {volume} already; it can show one")]
    DiskTaken {
        /// The device.
        device: Name,
        /// Its volume.
        volume: Name,
    },
    /// Devices of two kinds cannot have one volume.
    #[error(
        "volume {volume} is attached to {other}, a device of another kind: NVMe controllers and virtio disks do not share a volume, \
         for reservations and formats of the one would not bind the other"
    )]
    OtherKind {
        /// The volume.
        volume: Name,
        /// Who has it.
        other: Name,
    },
    /// The device's socket could not be made.
    #[error("device {device}: its socket: {source}")]
    Socket {
        /// The device.
        device: Name,
        /// What is wrong with it.
        #[source]
        source: ListenerError,
    },
    /// The device did not answer: a fault of ours has fenced it.
    #[error("device {device} does not answer: a fault of ours in it was contained")]
    Fenced {
        /// The device.
        device: Name,
    },
    /// The device has not answered in time.
    #[error("device {device} does not answer: shard {shard} has been busy with something else for longer than {millis} ms")]
    Silent {
        /// The device.
        device: Name,
        /// Its shard.
        shard: usize,
        /// How long it was waited for.
        millis: u64,
    },
    /// A shard did not answer.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The change could not be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The account of what volumes did could not be read.
    #[error("the account (usage.log in the state directory) could not be read: {source}")]
    Account {
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// An upgrade cannot begin.
    #[error("no upgrade: {why}")]
    Upgrade {
        /// What kind of failure it is.
        class: Class,
        /// Why.
        why: String,
    },
    /// One upgrade at a time.
    #[error("an upgrade is under way")]
    Upgrading,
    /// There was none.
    #[error("there was no upgrade since the daemon started")]
    NoUpgrade,
    /// Nothing is said of the user.
    #[error("user {uid} has not been given any volumes")]
    NoApp {
        /// The user's number.
        uid: u32,
    },
    /// Something is said of the user already.
    #[error("user {uid} has been given volumes already")]
    AppExists {
        /// The user's number.
        uid: u32,
    },
    /// The user may not open the volume.
    #[error("user {uid} may not open volume {volume}, or not in this way")]
    NotAllowed {
        /// The user's number.
        uid: u32,
        /// The volume asked for, whether it exists or not.
        volume: String,
    },
    /// The user has as many sessions as it may have.
    #[error("user {uid} has {limit} sessions, and may have no more")]
    TooManySessions {
        /// The user's number.
        uid: u32,
        /// Sessions it may have.
        limit: usize,
    },
    /// A session's device was made and could not be reached.
    #[error("device {device} was made for an application and cannot be reached: {source}")]
    SessionLost {
        /// The device.
        device: Name,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The volume stays with its worker.
    #[error("volume {volume} cannot go to another worker: {why}")]
    NotMovable {
        /// The volume.
        volume: Name,
        /// Who needs it there.
        why: String,
    },
    /// The daemon is on its way out.
    #[error("the daemon is stopping")]
    Stopping,
}

fn list(users: &[(Name, u32)], text: impl Fn(&Name, u32) -> String) -> String {
    users.iter().map(|(device, nsid)| text(device, *nsid)).collect::<Vec<_>>().join(", ")
}

fn members(volumes: &[Name], groups: &[Name]) -> String {
    let volumes = volumes.iter().map(|name| format!("volume {name}"));
    volumes.chain(groups.iter().map(|name| format!("group {name}"))).collect::<Vec<_>>().join(", ")
}

/// What to do about a file that is not there. A leg is named by its way in the stack, and has its size there.
fn missing_file(volume: &str, path: &Path) -> String {
    let is_missing =
        |directory: &&Path| directory.metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
    if let Some(directory) = path.parent().filter(is_missing) {
        return format!("there is no directory {}: make it first", directory.display());
    }
    if volume.contains('/') {
        let leaf = Leaf::new(format!("file:{}", path.display()));
        return format!("with a size of its own in the stack the file is created: {leaf}(size=…)");
    }
    "with a size (--size) the file is created".to_owned()
}

/// What kind of failure it is, for whoever made the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The request cannot be right.
    Invalid,
    /// The object does not exist.
    Missing,
    /// The request does not fit the present state.
    Conflict,
    /// The daemon or the system below it failed.
    Failed,
    /// The system below has no room for it.
    NoRoom,
    /// Not now.
    Unavailable,
    /// Not for this user.
    Denied,
}

impl ControlError {
    pub(crate) fn invalid(kind: &'static str, name: &Name, why: impl Into<String>) -> Self {
        Self::Invalid { kind, name: name.clone(), why: why.into() }
    }

    pub(crate) fn untimely(kind: &'static str, name: &Name, why: impl Into<String>) -> Self {
        Self::Untimely { kind, name: name.clone(), why: why.into() }
    }

    /// What kind of failure it is.
    pub fn class(&self) -> Class {
        self.kind().0
    }

    /// A word for programs.
    pub fn code(&self) -> &'static str {
        self.kind().1
    }

    fn kind(&self) -> (Class, &'static str) {
        match self {
            Self::NoVolume { .. } | Self::NoLeaf { .. } => (Class::Missing, "no-volume"),
            Self::NoDevice { .. } => (Class::Missing, "no-device"),
            Self::NoCopy { .. } => (Class::Missing, "no-copy"),
            Self::Tracing { .. } => (Class::Conflict, "tracing"),
            Self::NoTrace { .. } => (Class::Missing, "no-trace"),
            Self::TraceThread { .. } => (Class::Failed, "trace-thread"),
            Self::CopyExists { .. } => (Class::Conflict, "copy-exists"),
            Self::TooManyCopies => (Class::Conflict, "too-many-copies"),
            Self::Copying { .. } => (Class::Conflict, "copying"),
            Self::CopyEnding { .. } => (Class::Conflict, "copy-ending"),
            Self::Copy { source, .. } => (system::of_copy(source), "copy"),
            Self::NoGroup { .. } => (Class::Missing, "no-group"),
            Self::GroupExists { .. } => (Class::Conflict, "group-exists"),
            Self::GroupInUse { .. } => (Class::Conflict, "group-in-use"),
            Self::NoApp { .. } => (Class::Missing, "no-app"),
            Self::AppExists { .. } => (Class::Conflict, "app-exists"),
            Self::NotAllowed { .. } => (Class::Denied, "not-allowed"),
            Self::TooManySessions { .. } => (Class::Conflict, TOO_MANY_SESSIONS),
            Self::SessionLost { .. } => (Class::Failed, "session-lost"),
            Self::VolumeExists { .. } => (Class::Conflict, "volume-exists"),
            Self::DeviceExists { .. } => (Class::Conflict, "device-exists"),
            Self::VolumeAttached { .. } => (Class::Conflict, "volume-attached"),
            Self::RequestsLeft { .. } => (Class::Conflict, "requests-left"),
            Self::Formatting { .. } => (Class::Conflict, "formatting"),
            Self::Changing { .. } => (Class::Conflict, "changing"),
            Self::ChangedMeanwhile { .. } => (Class::Conflict, CHANGED_MEANWHILE),
            Self::Migrating { .. } => (Class::Conflict, "migrating"),
            Self::Commanded { .. } => (Class::Conflict, "commanded"),
            Self::Resizing { .. } => (Class::Conflict, "resizing"),
            Self::WouldShrink { .. } => (Class::Conflict, "would-shrink"),
            Self::VolumeInStack { .. } => (Class::Conflict, "volume-in-stack"),
            Self::Graph { source, .. } => (system::of_graph(source), "stack"),
            Self::Change { source, .. } => (system::of_change(source), "change"),
            Self::FileTaken { .. } => (Class::Conflict, "file-taken"),
            Self::VolumeFailed { .. } => (Class::Conflict, "volume-failed"),
            Self::DeviceFailed { .. } => (Class::Conflict, "device-failed"),
            Self::ReadOnly { .. } => (Class::Conflict, "read-only"),
            Self::NsidTaken { .. } => (Class::Conflict, "nsid-taken"),
            Self::NsidRange { .. } => (Class::Invalid, "nsid-range"),
            Self::NoNsidFree { .. } => (Class::Conflict, "no-nsid-free"),
            Self::AttachedAlready { .. } => (Class::Conflict, "attached-already"),
            Self::NotAttached { .. } => (Class::Missing, "not-attached"),
            Self::Invalid { .. } => (Class::Invalid, "invalid"),
            Self::Untimely { .. } => (Class::Conflict, "not-now"),
            Self::BadSize { .. } => (Class::Invalid, "bad-size"),
            Self::Volume(error) => (system::of_volume(error), "volume"),
            Self::Device(error) => (system::of_device(error), "device"),
            Self::Disk(error) => (system::of_disk(error), "device"),
            Self::NoNamespaces { .. } => (Class::Invalid, "no-namespaces"),
            Self::DiskTaken { .. } => (Class::Conflict, "disk-taken"),
            Self::OtherKind { .. } => (Class::Conflict, "other-kind"),
            Self::Socket { source, .. } => (system::of_listener(source), "socket"),
            Self::Fenced { .. } => (Class::Failed, "fenced"),
            Self::Silent { .. } => (Class::Failed, "silent"),
            Self::Engine(_) => (Class::Failed, "engine"),
            Self::Store(_) => (system::of_store(self), "store"),
            Self::Account { .. } => (Class::Failed, "account"),
            Self::Upgrade { class, .. } => (*class, "upgrade"),
            Self::Upgrading => (Class::Conflict, "upgrading"),
            Self::NoUpgrade => (Class::Missing, "no-upgrade"),
            Self::SavedState { source, .. } if source.is_untimely() => (Class::Conflict, "saved-state"),
            Self::SavedState { .. } => (Class::Invalid, "saved-state"),
            Self::NotMovable { .. } => (Class::Conflict, "not-movable"),
            Self::Stopping => (Class::Unavailable, "stopping"),
        }
    }

    /// What to do about it, as a command where there is one.
    pub fn advice(&self) -> Option<String> {
        Some(match self {
            Self::NoVolume { .. } | Self::NoLeaf { .. } => "\"millrace volume list\" shows what there is".to_owned(),
            Self::NoDevice { .. } => "\"millrace device list\" shows what there is".to_owned(),
            Self::NoCopy { .. } => "\"millrace copy list\" shows what there is".to_owned(),
            Self::Tracing { .. } => "wait for its end, or end it: Ctrl-C where it runs".to_owned(),
            Self::CopyExists { name } => format!("choose another --name, or forget it (\"millrace copy cancel {name}\")"),
            Self::Copying { copy, .. } => format!("wait for it, or cancel it: \"millrace copy cancel {copy}\""),
            Self::CopyEnding { name } => {
                format!("wait for it (\"millrace copy show {name}\"); while it is there, the same command may be given again")
            }
            Self::NoGroup { .. } => "\"millrace group list\" shows what there is".to_owned(),
            Self::GroupInUse { volumes, groups, .. } => match (&volumes[..], &groups[..]) {
                ([], _) => "delete those groups first".to_owned(),
                (_, []) => "give those volumes another stack (\"millrace volume change\") first".to_owned(),
                _ => "give those volumes another stack (\"millrace volume change\"), and delete those groups first".to_owned(),
            },
            Self::VolumeExists { .. } | Self::DeviceExists { .. } | Self::GroupExists { .. } => {
                "choose another name, or delete the old one first".to_owned()
            }
            // Its reason says what to do.
            Self::VolumeFailed { reason, .. } if reason.contains(EMPTIED) => return None,
            Self::VolumeFailed { .. } => "put that right and \"millrace upgrade\" (to the same binary: guests go on) or restart the daemon; or delete the volume".to_owned(),
            Self::DeviceFailed { .. } => "put that right and \"millrace upgrade\" (to the same binary: guests go on) or restart the daemon; or delete the device".to_owned(),
            Self::NsidTaken { .. } | Self::NsidRange { .. } => "choose another --nsid, or leave it out".to_owned(),
            Self::NotAttached { device, .. } => format!("\"millrace device show {device}\" lists its namespaces"),
            Self::NoNamespaces { .. } => "leave the identifier out".to_owned(),
            Self::DiskTaken { device, .. } => format!("\"millrace device detach {device}\" first"),
            Self::NoNsidFree { device, .. } => {
                format!("detach one (\"millrace device show {device}\" lists them), or make a device with more --namespaces")
            }
            Self::Fenced { device } => format!("the log says more; \"millrace device delete {device}\" and create it again"),
            Self::Silent { .. } => {
                "it is as it was: ask again. \"millrace status\" shows the shards, the log what they wait for. One that does not come back goes \
                 with its worker (\"kill -9\" of the process that \"millrace device show\" names): another goes on with the guests"
                    .to_owned()
            }
            Self::Socket { source: ListenerError::InUse { .. }, .. } => {
                "choose another --socket, or stop that process".to_owned()
            }
            Self::Socket { source: ListenerError::NotASocket { .. }, .. } => "choose another --socket".to_owned(),
            Self::Socket { source: ListenerError::Io { source, .. }, .. } => return system::about_socket(source).map(str::to_owned),
            Self::Volume(VolumeError::Io { volume, path, source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                missing_file(volume, path)
            }
            Self::Volume(VolumeError::Io { source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => {
                "who serves it must be allowed to (root, too: it has given up the right to open everything), and so must the \
                 sandbox: \"allow\" under [sandbox] in the daemon's configuration, or serve --allow PATH, from its next start on \
                 (docs/sandbox.md)"
                    .to_owned()
            }
            Self::WouldShrink { .. } => "if that is meant, say so: --shrink (over the API: \"shrink\": true)".to_owned(),
            Self::Upgrading => "\"millrace upgrade --show\" tells how it goes".to_owned(),
            Self::NoApp { .. } => "\"millrace app list\" shows who has".to_owned(),
            Self::AppExists { uid } => format!("\"millrace app change {uid}\" gives others"),
            Self::NotAllowed { .. } => {
                "who may is said by \"millrace app\", or by [[app]] in the daemon's configuration (docs/fastpath.md)".to_owned()
            }
            Self::TooManySessions { uid, .. } => {
                format!("close one, or let the user have more: \"millrace app change {uid} --sessions N\"")
            }
            Self::NotMovable { .. } => {
                "devices that share volumes need one worker: one tenant under \"serve --isolation tenant\", or \"--isolation shared\""
                    .to_owned()
            }
            _ => return self.advice_on_use(),
        })
    }

    /// The same where something else has the volume, or its stack.
    fn advice_on_use(&self) -> Option<String> {
        Some(match self {
            Self::VolumeAttached { users, .. } => {
                let command = |device: &Name, nsid| format!("\"millrace device detach {device} {nsid}\"");
                format!("detach it first: {}", list(users, command))
            }
            Self::RequestsLeft { .. } => {
                "what it lies on does not answer: see the log and \"millrace volume show\", and try again when they have ended".to_owned()
            }
            Self::Formatting { .. } => "a guest does that; try again when it is done".to_owned(),
            Self::Changing { .. } | Self::Resizing { .. } | Self::Commanded { .. } => "try again when that is done".to_owned(),
            Self::ChangedMeanwhile { .. } => "look at it, and ask for a change that begins with this one".to_owned(),
            Self::Migrating { name, .. } => {
                format!("wait for its end, or \"millrace volume migrate {name} --cancel\" first: then the volume is where it was")
            }
            Self::VolumeInStack { by, .. } => format!("change or delete that one first (\"millrace volume show {by}\")"),
            Self::Volume(VolumeError::Unsupported { volume, what }) => return system::about_unsupported(volume, what),
            Self::FileTaken { .. } => "choose another file, or make both volumes read-only".to_owned(),
            Self::OtherKind { volume, other } => {
                format!("\"millrace device detach {other} {volume}\" first, or copy the volume")
            }
            Self::ReadOnly { name } => {
                format!("take another volume, or make it anew without --read-only (\"millrace volume delete {name}\" leaves its file)")
            }
            Self::AttachedAlready { device, nsid, .. } => {
                format!("to show it in another way, \"millrace device detach {device} {nsid}\" first")
            }
            Self::NoUpgrade => "\"millrace upgrade\" begins one".to_owned(),
            Self::Stopping => "try again when it is back".to_owned(),
            Self::SessionLost { source, .. } => system::about(source).unwrap_or("open the volume once more").to_owned(),
            Self::Account { source } => system::about(source)
                .unwrap_or("see to it that it is whole, and that the daemon's user can read and write it (docs/formats/usage.md)")
                .to_owned(),
            _ => return system::said(self).and_then(system::about).map(str::to_owned),
        })
    }
}
