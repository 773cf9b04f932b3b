//! What volumes are made of: graphs of services over back ends, opened, changed and commanded.
//!
//! ```text
//!   VolumeSpec.stack ─► check: files and volumes are free ─► Graph::build, mount ─► Switch ─► Namespace
//!   change: exchange.rs
//! ```

mod exchange;

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs, io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use millrace_backends::{BackendSpec, FileOptions, FileVolume};
use millrace_block::{BlockSize, Ledger, Switch, Volume as Blocks, VolumeError};
use millrace_engine::{ShardConfig, ShardHandle};
use millrace_keeper::Link;
use millrace_services::{
    Health, Leaf, MAX_DEPTH, Node, Reason, Service, Settings, SharedObjects, Status,
    background::{OnShards, Spawner},
    find,
    graph::{Graph, GraphError, LeafError, LeafRequest, Leaves, Plan, Stored, Tree, place_and_word, told_apart},
    meter::{self, Meters},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{
    Inner, Manager, VolumeView,
    leaves::KeptLeaves,
    shapes::Shapes,
    volumes::{FileChange, FileIdentity, forget_kept},
};
use crate::{
    Name, Size,
    error::ControlError,
    model::{ServiceAnswer, ServiceCommand, VolumeChange, VolumeSpec},
    store::Store,
    usage::{Metered, UsageQuestion, UsageRow},
};
pub(super) use exchange::Watched;

/// How long a file may be kept by requests of a worker of which nobody knows: its keeper died as well, or the file is somebody else's. And how
/// often is looked.
const FILE_PATIENCE_ALONE: Duration = Duration::from_secs(3);
const FILE_LOOK: Duration = Duration::from_millis(1);
/// How long the kernel may keep a file or device that was closed: a thread of its own that worked on a request has it for a moment after the
/// request's completion was seen.
const FILE_LET_GO: Duration = Duration::from_millis(100);

/// A stack that a volume had, or was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HistoryEntry {
    /// When it came, in seconds since 1970.
    pub time: u64,
    /// The stack.
    #[schema(value_type = String)]
    pub stack: Node,
    /// How long requests were held back for it, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
    /// Why it came, where the daemon knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl HistoryEntry {
    pub(super) fn now(stack: &Node) -> Self {
        Self { time: seconds_now(), stack: stack.clone(), pause_us: None, note: None }
    }
}

/// The time, in seconds since 1970.
pub(crate) fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// What graphs are made with.
#[derive(Clone)]
pub(super) struct Means {
    pub(super) shared: Arc<SharedObjects>,
    pub(super) spawner: Arc<dyn Spawner>,
    /// Where their shapes are kept.
    pub(super) store: Option<Arc<Store>>,
}

impl Means {
    pub(super) fn new(shards: &[ShardHandle], store: Option<&Arc<Store>>) -> Self {
        Self { shared: Arc::default(), spawner: Arc::new(OnShards::new(shards.to_vec())), store: store.cloned() }
    }

    fn ledger(&self, name: &Name) -> Option<Arc<dyn Ledger>> {
        self.store.as_ref().map(|store| Shapes::new(store, name) as _)
    }
}

impl Default for Means {
    fn default() -> Self {
        Self::new(&[], None)
    }
}

/// A volume's inside.
pub(super) struct LiveGraph {
    pub(super) switch: Arc<Switch>,
    pub(super) graph: Graph,
    /// The files of its leaves, as they were when they were opened.
    pub(super) files: BTreeMap<PathBuf, FileIdentity>,
}

impl LiveGraph {
    /// Whether the guest is yet to be told of a loss.
    pub(super) fn is_untold(&self) -> bool {
        self.watch().is_untold()
    }

    pub(super) fn tree(&self) -> Tree {
        self.graph.tree()
    }
}

/// Volumes by their names, as what is made of them has them.
type Others = BTreeMap<Name, Arc<dyn Blocks>>;

/// What a volume's inside is made of, as it is when this is taken. What exists need not be locked while it is made, as long as its name and stack
/// are marked ([`Inner::changing`]).
pub(super) struct Materials {
    means: Means,
    keeper: Option<Arc<Link>>,
    others: Arc<Others>,
    /// How long a stored volume's file is waited for at most.
    patience: Duration,
    /// When this worker began to open files.
    began: u64,
    /// Others wait for a stored volume: what takes long is left to do ([`erasures`](super::erasures)).
    at_once: bool,
}

/// How leaves are opened.
struct Opener<'a> {
    spec: &'a VolumeSpec,
    /// What other volumes are.
    volumes: Arc<Others>,
    /// What is known of a stored volume: files must be there in full, and are neither made nor lengthened.
    stored: Option<Stored<'a>>,
    /// Where blocks in memory are kept for the next worker.
    kept: Option<KeptLeaves>,
    /// How long a stored volume's file is waited for at most.
    patience: Duration,
    /// When this worker began to open files.
    began: u64,
    /// What was done to files so far.
    files: RefCell<Vec<FileChange>>,
    /// The files that were opened.
    opened: RefCell<BTreeMap<PathBuf, FileIdentity>>,
}

/// How long a volume's file is waited for that somebody else has; `kept`, if anything, as the dead worker's keeper says, and `most` where it is
/// a stored volume's.
fn file_patience(stored: bool, kept: Option<Duration>, most: Duration) -> Duration {
    if !stored {
        return FILE_LET_GO;
    }
    // After a worker's death its file stays locked until the kernel has finished its requests: nothing may be done to the file
    // before, or what the dead one wrote could come after what its successor writes.
    kept.unwrap_or_default().max(FILE_PATIENCE_ALONE).min(most)
}

impl Opener<'_> {
    fn backend(&self, request: &LeafRequest<'_>, spec: &BackendSpec) -> Result<Arc<dyn Blocks>, VolumeError> {
        let LeafRequest { name, size, block_size, .. } = request;
        let path = match (spec, &self.kept, size) {
            (BackendSpec::File(path), ..) => path,
            (BackendSpec::Memory, Some(kept), Some(size)) => return kept.open(name, *size, *block_size),
            _ => return millrace_backends::open(spec, name, *size, *block_size),
        };
        let change = if self.stored.is_some() {
            check_file(name, path, *size)?;
            FileChange::None
        } else {
            FileChange::foresee(path, size.map(Size))
        };
        let options =
            FileOptions { path: path.clone(), size: *size, block_size: *block_size, read_only: self.spec.read_only };
        let kept = self.kept.as_ref().and_then(|kept| kept.patience(self.began));
        let deadline = Instant::now() + file_patience(self.stored.is_some(), kept, self.patience);
        loop {
            match FileVolume::open(name, &options) {
                Err(VolumeError::InUse { .. }) if Instant::now() < deadline => thread::sleep(FILE_LOOK),
                // Whoever has it may have made it since.
                Err(error @ VolumeError::InUse { .. }) => return Err(error),
                result => {
                    self.files.borrow_mut().push(change);
                    let identity = result.as_ref().ok().and_then(|_| FileIdentity::of(path));
                    self.opened.borrow_mut().extend(identity.map(|identity| (path.clone(), identity)));
                    return result.map(|volume| volume as _);
                }
            }
        }
    }
}

impl Leaves for Opener<'_> {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Blocks>, LeafError> {
        if let Some(name) = request.leaf.volume() {
            let missing = || LeafError::Refused(format!("there is no volume {name} that works"));
            let volume = self.volumes.get(name).ok_or_else(missing)?;
            let has = volume.geometry().bytes();
            return match request.size.filter(|wanted| *wanted > has) {
                Some(wanted) => Err(LeafError::Refused(format!("it has {has} bytes and {wanted} are needed"))),
                None => Ok(Arc::clone(volume)),
            };
        }
        let spec: BackendSpec = request.leaf.spec.parse().map_err(|error| LeafError::Refused(format!("{error}")))?;
        Ok(self.backend(request, &spec)?)
    }

    fn stored(&self) -> Option<Stored<'_>> {
        self.stored
    }
}

/// Unlike a new one, a stored volume's file must be there in full.
fn check_file(volume: &str, path: &Path, size: Option<u64>) -> Result<(), VolumeError> {
    let failed = |action, source| {
        let (volume, path) = (volume.to_owned(), path.to_owned());
        VolumeError::Io { volume, action, path, source }
    };
    let found = fs::metadata(path).map_err(|error| failed("open", error))?;
    match size {
        Some(size) if found.is_file() && found.len() < size => {
            let (length, size) = (Size(found.len()), Size(size));
            let why = format!("the file has {length} and the volume {size}: part of its data is missing");
            Err(failed("use", io::Error::other(why)))
        }
        _ => Ok(()),
    }
}

/// A graph that was just made, and what its making did to files.
pub(super) struct Made {
    pub(super) live: LiveGraph,
    pub(super) files: Vec<FileChange>,
}

fn failed(name: &Name, error: GraphError) -> ControlError {
    match error {
        // What a back end says names itself, and is told apart.
        GraphError::Leaf { source: LeafError::Volume(error), .. } => ControlError::Volume(error),
        source => ControlError::Graph { name: name.clone(), source },
    }
}

impl Inner {
    /// What a volume's inside is made of now. Of other volumes it is those that its stack names: who has it keeps them open.
    pub(super) fn materials(&self, spec: &VolumeSpec) -> Materials {
        let live = |leaf: &Leaf| {
            let (name, volume) = self.volumes.get_key_value(leaf.volume()?)?;
            let blocks: Arc<dyn Blocks> = Arc::<Switch>::clone(&volume.graph.as_ref()?.switch);
            Some((name.clone(), blocks))
        };
        let others = Arc::new(spec.stack.leaves().into_iter().filter_map(live).collect());
        let (patience, began) = (self.late.patience(&spec.name), self.late.began());
        Materials { means: self.means.clone(), keeper: self.keeper.clone(), others, patience, began, at_once: false }
    }
}

impl Materials {
    /// The same while others wait: what takes long is left to do.
    pub(super) fn at_once(self) -> Self {
        Self { at_once: true, ..self }
    }

    /// Who holds what must outlive this process.
    pub(super) fn keeper(&self) -> Option<&Arc<Link>> {
        self.keeper.as_ref()
    }

    /// What the graph of a volume may use.
    fn opener<'a>(&self, spec: &'a VolumeSpec, stored: Option<Stored<'a>>, kept: Option<KeptLeaves>) -> Opener<'a> {
        let (volumes, patience, began) = (Arc::clone(&self.others), self.patience, self.began);
        Opener { spec, volumes, stored, kept, patience, began, files: RefCell::default(), opened: RefCell::default() }
    }

    /// Makes a volume's inside. `size` is what its legs are told; `None`: it follows from them. `leaves` are the numbers of those in memory.
    /// Where it fails, `lost` is set if a service has found out that acknowledged writes may be lost: what is below tells that once.
    pub(super) fn make_graph(
        &self,
        spec: &VolumeSpec,
        size: Option<u64>,
        block_size: BlockSize,
        (uuid, leaves): (Uuid, Vec<u32>),
        stored: Option<Stored<'_>>,
        lost: &mut bool,
    ) -> Result<Made, ControlError> {
        let kept = self.keeper.as_ref().map(|keeper| KeptLeaves::of(keeper, uuid, leaves));
        let opener = self.opener(spec, stored, kept);
        let made = self.build_and_mount(spec, size, block_size, &opener, lost);
        let files = opener.files.into_inner();
        match made {
            Ok(live) => Ok(Made { live, files }),
            Err(error) => {
                files.into_iter().for_each(FileChange::undo);
                if stored.is_none() {
                    forget_kept(self.keeper(), &spec.name, uuid);
                }
                Err(error)
            }
        }
    }

    fn build_and_mount(
        &self,
        spec: &VolumeSpec,
        size: Option<u64>,
        block_size: BlockSize,
        opener: &Opener<'_>,
        lost: &mut bool,
    ) -> Result<LiveGraph, ControlError> {
        let name = &spec.name;
        let plan = Plan { volume: name.as_str(), stack: &spec.stack, size, block_size };
        let graph = Graph::build(&plan, opener, &self.means.shared, &self.means.spawner, None);
        let mut graph = graph.map_err(|error| failed(name, error))?;
        let has = graph.volume().geometry().bytes();
        if let Some(size) = size.filter(|size| has != *size) {
            let why = format!("its stack has {}", Size(has));
            return Err(ControlError::BadSize { name: name.clone(), size: Size(size), why });
        }
        let switch = Switch::kept(name.as_str(), Arc::clone(graph.volume()), self.means.ledger(name));
        check_scratch(name, switch.scratch_bytes())?;
        let mounted = match opener.stored {
            Some(_) if self.at_once => graph.mount_at_once(),
            Some(_) => graph.mount(Reason::Open),
            None => graph.mount(Reason::Create),
        };
        if let Err(error) = mounted {
            *lost |= graph.has_untold();
            return Err(failed(name, error));
        }
        Ok(LiveGraph { switch, graph, files: opener.opened.take() })
    }
}

impl Inner {
    /// Whether the leaves of a stack are free: no file and no volume in two places, no volume over itself.
    pub(super) fn check_leaves(&self, spec: &VolumeSpec) -> Result<(), ControlError> {
        let wrong = |why: String| ControlError::invalid("volume", &spec.name, why);
        let mut identities: Vec<(FileIdentity, &Path)> = Vec::new();
        for leaf in spec.stack.leaves() {
            if let Some(path) = leaf.file() {
                self.check_file_is_free(spec, path)?;
                let Some(identity) = FileIdentity::of(path) else { continue };
                if let Some((_, other)) = identities.iter().find(|(known, _)| *known == identity) {
                    return Err(wrong(format!("{} and {} are one file", other.display(), path.display())));
                }
                identities.push((identity, path));
            }
        }
        for (above, leaf) in volume_leaves(&spec.stack, None) {
            self.check_volume_leaf(spec, above, leaf)?;
        }
        let depth = self.depth(&spec.stack);
        if depth > MAX_DEPTH {
            return Err(wrong(format!(
                "its stack has {depth} levels, those of its volumes counted; {MAX_DEPTH} are possible"
            )));
        }
        Ok(())
    }

    /// Whether a disk may be told to release what it has under a name: the volume of that name may be closed, as one that failed is.
    fn check_not_declared(&self, disk: &Name, command: &ServiceCommand) -> Result<(), ControlError> {
        let Some(name) = command.arguments.get("name") else { return Ok(()) };
        let has_failed = self.volumes.get(name.as_str()).is_some_and(|volume| volume.live.is_err());
        if has_failed && self.volumes_over(disk.as_str()).any(|(over, sharing)| sharing && over.as_str() == name) {
            let why = format!(
                "volume {name} is over it, though it could not be opened: its data would go; delete the volume for that"
            );
            return Err(ControlError::untimely("volume", disk, why));
        }
        Ok(())
    }

    fn check_volume_leaf(&self, spec: &VolumeSpec, above: Option<&str>, leaf: &Leaf) -> Result<(), ControlError> {
        let Some(name) = leaf.volume() else { return Ok(()) };
        let missing = || ControlError::NoLeaf { name: spec.name.clone(), leaf: name.to_owned() };
        let volume = self.volumes.get(name).ok_or_else(missing)?;
        let wrong = |why: String| Err(ControlError::invalid("volume", &spec.name, why));
        let untimely = |why: String| Err(ControlError::untimely("volume", &spec.name, why));
        if self.is_over(name, spec.name.as_str()) {
            return wrong(format!("volume {name} is over it already: a volume cannot be over itself"));
        }
        if let Some((device, nsid)) = self.users(name).next() {
            let device = &device.record.spec.name;
            return untimely(format!("volume {name} is attached to {device} as namespace {nsid}: detach it first"));
        }
        if volume.record.spec.read_only {
            return untimely(format!("volume {name} is read-only"));
        }
        if let Some(copy) = self.copy_to(name) {
            return untimely(format!("copy {copy} writes to volume {name}: wait for it, or cancel it"));
        }
        if self.resizing.contains(name) {
            return untimely(format!("volume {name} is being resized: try again when that is done"));
        }
        if self.changing.contains_key(name) {
            return untimely(format!("volume {name} is being changed: try again when that is done"));
        }
        let shares = above.and_then(find).is_some_and(|kind| kind.shares_legs);
        match (shares, volume.record.spec.stack.is_disk()) {
            (true, true) | (false, false) => {}
            (false, true) => {
                return wrong(format!("volume {name} is a disk: volumes have parts of it (share | volume:{name})"));
            }
            (true, false) => {
                return wrong(format!("volume {name} is no disk; \"millrace disk create NAME STACK\" makes one to share"));
            }
        }
        match self.volumes_over(name).find(|(other, sharing)| **other != spec.name && !(shares && *sharing)) {
            Some((other, _)) => untimely(format!("volume {name} is part of volume {other} already")),
            None => Ok(()),
        }
    }

    /// Volumes that have a volume for a leaf, or will have it when their change is done, and whether their service there shares it.
    pub(super) fn volumes_over<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a Name, bool)> {
        self.stacks().flat_map(move |(over, stack)| {
            let leaves = volume_leaves(stack, None).into_iter();
            let here = leaves.filter(move |(_, leaf)| leaf.volume() == Some(name));
            here.map(move |(above, _)| (over, above.and_then(find).is_some_and(|kind| kind.shares_legs)))
        })
    }

    /// The stacks of all volumes; of those that are being changed both.
    pub(super) fn stacks(&self) -> impl Iterator<Item = (&Name, &Node)> {
        let present = self.volumes.values().map(|volume| (&volume.record.spec.name, &volume.record.spec.stack));
        present.chain(&self.changing)
    }

    /// Whether `volume` is `other`, or has it somewhere below.
    pub(super) fn is_over(&self, volume: &str, other: &str) -> bool {
        let below = |name: &str| {
            let stacks = self.stacks().filter(|(volume, _)| volume.as_str() == name);
            let leaves = stacks.flat_map(|(_, stack)| stack.leaves());
            leaves.filter_map(Leaf::volume).map(str::to_owned).collect::<Vec<_>>()
        };
        let mut look = vec![volume.to_owned()];
        let mut seen: Vec<String> = Vec::new();
        while let Some(name) = look.pop() {
            if name == other {
                return true;
            }
            if !seen.contains(&name) {
                look.extend(below(&name));
                seen.push(name);
            }
        }
        false
    }

    /// The volumes that this one is made of, wherever they stand, less disks: what volumes share has its size for itself.
    pub(super) fn below(&self, name: &str) -> Vec<Name> {
        self.below_with(name, false)
    }

    /// The same, with disks and what these are made of, or without.
    pub(super) fn below_with(&self, name: &str, disks: bool) -> Vec<Name> {
        let mut below: Vec<Name> = Vec::new();
        let mut look = vec![name];
        while let Some(stack) = look.pop().and_then(|name| self.volumes.get(name)).map(|volume| &volume.record.spec.stack) {
            for name in stack.leaves().into_iter().filter_map(Leaf::volume) {
                let Some((name, volume)) = self.volumes.get_key_value(name) else { continue };
                if (disks || !volume.record.spec.stack.is_disk()) && !below.contains(name) {
                    below.push(name.clone());
                    look.push(name.as_str());
                }
            }
        }
        below
    }

    /// Levels of a stack, those of its volumes counted.
    fn depth(&self, stack: &Node) -> usize {
        let below = stack.leaves().into_iter().filter_map(|leaf| self.volumes.get(leaf.volume()?));
        stack.depth() + below.map(|volume| self.depth(&volume.record.spec.stack)).max().unwrap_or(0)
    }

    /// A disk belongs to the volumes that share it, whatever its size.
    pub(super) fn check_resizable(&self, volume: &super::Volume) -> Result<(), ControlError> {
        let spec = &volume.record.spec;
        if spec.stack.is_disk() { Ok(()) } else { self.check_not_below(&spec.name) }
    }

    /// Nobody may touch a volume that others are made of.
    pub(super) fn check_not_below(&self, name: &Name) -> Result<(), ControlError> {
        match self.volumes_over(name.as_str()).next() {
            Some((by, _)) => Err(ControlError::VolumeInStack { name: name.clone(), by: by.clone() }),
            None => Ok(()),
        }
    }
}

/// Leaves of a stack that are volumes, each with the service right above it.
fn volume_leaves<'a>(node: &'a Node, above: Option<&'a str>) -> Vec<(Option<&'a str>, &'a Leaf)> {
    match node {
        Node::Leaf(leaf) => vec![(above, leaf)].into_iter().filter(|(_, leaf)| leaf.volume().is_some()).collect(),
        Node::Service(node) => node.legs.iter().flat_map(|leg| volume_leaves(leg, Some(&node.service))).collect(),
    }
}

fn check_scratch(name: &Name, needed: usize) -> Result<(), ControlError> {
    let room = ShardConfig::VOLUME_SCRATCH;
    if needed <= room {
        return Ok(());
    }
    let why = format!("its stack needs {needed} bytes for a request, and {room} are there: it is too deep or too wide");
    Err(ControlError::invalid("volume", name, why))
}

impl Manager {
    /// Changes a volume's size or its stack.
    pub fn change_volume(&self, name: &str, change: &VolumeChange) -> Result<VolumeView, ControlError> {
        match (&change.size, &change.stack) {
            (Some(size), None) if !change.reformat && change.from.is_none() => {
                self.resize_volume(name, *size, change.shrink)
            }
            (None, Some(stack)) if !change.shrink => {
                self.change_stack_from(name, change.from.as_ref(), stack, change.reformat)
            }
            _ => {
                let inner = self.peek();
                let name = &inner.volume(name)?.record.spec.name;
                Err(ControlError::invalid("volume", name, change.fault()))
            }
        }
    }

    /// The stacks that a volume had, the latest last.
    pub fn volume_history(&self, name: &str) -> Result<Vec<HistoryEntry>, ControlError> {
        Ok(self.peek().volume(name)?.record.history.clone())
    }

    /// Gives a command to a service of a volume. A disk does not give up what a volume has that is there but could not be opened.
    pub fn command_service(&self, name: &str, command: &ServiceCommand) -> Result<ServiceAnswer, ControlError> {
        let mut arguments = Settings::default();
        for (name, value) in &command.arguments {
            arguments.add(name, value);
        }
        let refused = |volume: &Name, source| failed(volume, GraphError::Service { node: command.service.clone(), source });
        let (volume, service) = {
            let mut inner = self.lock()?;
            let volume = inner.idle_volume(name)?;
            volume.live()?;
            let name = volume.record.spec.name.clone();
            if command.command == "release" {
                inner.check_not_declared(&name, command)?;
            }
            let services = volume.graph.as_ref().map(|live| live.graph.services(&command.service)).unwrap_or_default();
            let [(node, service)] = &services[..] else {
                let place = |(node, _): &(String, _)| told_apart(place_and_word(node).0).to_owned();
                let places: Vec<_> = services.iter().map(place).collect();
                let why = match &places[..] {
                    [] => format!("it has no service {}; {}", command.service, commanded(&volume.record.spec.stack)),
                    places => format!("it has several services {}: say which, {}", command.service, places.join(" or ")),
                };
                return Err(ControlError::invalid("volume", &name, why));
            };
            if let Some(kind) = find(place_and_word(node).1) {
                kind.check_arguments(&command.command, &arguments).map_err(|error| refused(&name, error))?;
            }
            let service = Arc::clone(service);
            // A change in the middle of it would have another service go on with what this one is about to do.
            inner.commanded.insert(name.clone());
            (name, service)
        };
        // A panic must not leave it marked.
        let answer = catch_unwind(AssertUnwindSafe(|| service.command(&command.command, &arguments)));
        self.peek().commanded.remove(&volume);
        let answer = answer.unwrap_or_else(|panic| resume_unwind(panic));
        answer.map(|answer| ServiceAnswer { answer }).map_err(|error| refused(&volume, error))
    }
}

/// The services of a stack, and what each takes; where there are several of one, the places that tell them apart.
fn commanded(stack: &Node) -> String {
    fn collect<'a>(node: &'a Node, place: &str, into: &mut Vec<(&'a str, Vec<String>)>) {
        let Node::Service(node) = node else { return };
        match into.iter_mut().find(|(name, _)| *name == node.service) {
            Some((_, places)) => places.push(told_apart(place).to_owned()),
            None => into.push((node.service.as_str(), vec![told_apart(place).to_owned()])),
        }
        for (at, leg) in node.legs.iter().enumerate() {
            collect(leg, &format!("{place}.{at}"), into);
        }
    }
    let mut names = Vec::new();
    collect(stack, stack.word(), &mut names);
    let takes = |(name, places): &(&str, Vec<String>)| {
        let commands: Vec<_> = find(name).into_iter().flat_map(|kind| kind.commands).map(|command| command.name).collect();
        let commands = if commands.is_empty() { "no commands".to_owned() } else { commands.join(", ") };
        let which = if places.len() > 1 { format!(", as {}", places.join(" and ")) } else { String::new() };
        format!("{name}{which} ({commands})")
    };
    match &names[..] {
        [] => "it has none at all: its stack is a back end, which takes no commands".to_owned(),
        names => format!("it has {}", names.iter().map(takes).collect::<Vec<_>>().join("; ")),
    }
}

/// A volume's meters. The first one, which is the uppermost, counts for the account.
fn meters_of(live: &LiveGraph) -> Vec<Arc<dyn Service>> {
    live.graph.services("meter").into_iter().map(|(_, meter)| meter).collect()
}

impl Inner {
    fn metered(&self, volume: &super::Volume, meter: &Arc<dyn Service>) -> Option<Metered> {
        let name = &volume.record.spec.name;
        let users: BTreeMap<u32, &Name> = self
            .users(name.as_str())
            .filter_map(|(device, _)| Some((device.live.as_ref().ok()?.asker().number(), &device.record.spec.name)))
            .collect();
        let Meters { all, apart, counted } = meter::read(meter)?;
        let apart = apart.into_iter().map(|(asker, reading)| (users.get(&asker).copied().cloned(), asker, reading));
        Some(Metered {
            volume: name.clone(),
            meter: counted,
            device: self.users(name.as_str()).next().map(|(device, _)| device.record.spec.name.clone()),
            reading: all,
            apart: apart.collect(),
            provisioned: volume.record.size().0,
            used: volume.live.as_ref().ok()?.measured(),
        })
    }

    /// The meter of a volume that counts for the account.
    fn meter_of(&self, volume: &super::Volume) -> Option<Arc<dyn Service>> {
        match &volume.graph {
            Some(live) => meters_of(live).into_iter().next(),
            // A change may have the graph, and may take long.
            None => self.metering.get(&volume.record.spec.name).cloned(),
        }
    }

    pub(super) fn all_metered<'a>(&self, volumes: impl IntoIterator<Item = &'a super::Volume>) -> Vec<Metered> {
        let metered = |volume: &super::Volume| self.metered(volume, &self.meter_of(volume)?);
        volumes.into_iter().filter_map(metered).collect()
    }

    /// Which meter counts for the account while a change has the graph.
    fn keep_meter(&mut self, name: &Name, meter: Option<&Arc<dyn Service>>) {
        // What is taken out the change has as well: nothing is closed here.
        match meter {
            Some(meter) => drop(self.metering.insert(name.clone(), Arc::clone(meter))),
            None => drop(self.metering.remove(name)),
        }
    }
}

impl Manager {
    /// Writes what meters have counted since the last time.
    pub(super) fn keep_account(&self) {
        let inner = self.peek();
        let metered = inner.all_metered(inner.volumes.values());
        drop(inner);
        self.account.write(&metered);
    }

    /// Writes what the meters of some volumes have counted to the last: they go.
    pub(super) fn close_account<'a>(&self, inner: &Inner, names: impl IntoIterator<Item = &'a Name>) {
        let volumes = names.into_iter().filter_map(|name| inner.volumes.get(name));
        self.account.close(&inner.all_metered(volumes), true);
    }

    /// Writes what a device has done: it goes, and what comes later is of others.
    pub(super) fn settle_account(&self, inner: &Inner, device: &Name) {
        let shown = inner.devices.get(device).map(|device| &device.record.namespaces[..]).unwrap_or_default();
        let volumes = shown.iter().filter_map(|namespace| inner.volumes.get(&namespace.volume));
        self.account.close(&inner.all_metered(volumes), false);
    }

    /// The same of a volume that is about to be shown by another device: the time until now is not that one's.
    pub(super) fn settle_volume(&self, inner: &Inner, volume: &str) {
        self.account.close(&inner.all_metered(inner.volumes.get(volume)), false);
    }

    /// The same for all volumes, of a process that ends at once.
    pub(super) fn leave_account(&self, inner: &Inner) {
        self.account.close(&inner.all_metered(inner.volumes.values()), false);
    }

    /// The same for a meter that a change has taken out, or has made another's: from then on the new graph's counts for the account. `before`:
    /// those of the old graph.
    fn close_meter(&self, inner: &mut Inner, name: &Name, before: &[Arc<dyn Service>], after: &LiveGraph) {
        let after = meters_of(after);
        self.end_meter(inner, name, before, &after);
        inner.keep_meter(name, after.first());
    }

    fn end_meter(&self, inner: &Inner, name: &Name, before: &[Arc<dyn Service>], after: &[Arc<dyn Service>]) {
        let Some(volume) = inner.volumes.get(name) else { return };
        let metered = |meter: &Arc<dyn Service>| inner.metered(volume, meter);
        let Some(last) = before.first().and_then(metered) else { return };
        let next = after.first().and_then(metered);
        let counts_on = next.as_ref().is_some_and(|next| next.meter.ptr_eq(&last.meter));
        if counts_on && next.as_ref().is_some_and(|next| next.reading.tenant == last.reading.tenant) {
            return;
        }
        let ended = last.meter.clone();
        self.account.close(&[last], true);
        if counts_on {
            return;
        }
        // One that was there below the last has counted what is on the account by that, and so has one that came above it in the meantime.
        let is_below = after.iter().filter_map(metered).any(|there| there.meter.ptr_eq(&ended));
        let was_below = |next: &Metered| before.iter().filter_map(metered).any(|old| old.meter.ptr_eq(&next.meter));
        let counted = next.filter(|next| is_below || was_below(next));
        self.account.end(&ended, counted.as_ref());
    }

    /// Somebody is about to sum up the account.
    pub(crate) fn expect_usage(&self) -> Result<(), ControlError> {
        self.account.expect().map_err(|source| ControlError::Account { source })
    }

    /// Sums up a part of the account.
    pub fn usage(&self, question: &UsageQuestion) -> Result<Vec<UsageRow>, ControlError> {
        self.account.sums(question).map_err(|source| ControlError::Account { source })
    }
}

/// How a service is that is not well, and its name, with the legs that it goes without: worth a line in the daemon's status. One that has failed
/// goes before others. Of several of its kind it is named with its place, as everywhere.
pub(super) fn unwell(tree: &Tree) -> Option<(Health, String)> {
    let (health, unwell, place) = first_unwell(tree, &tree.node)?;
    let node = &unwell.node;
    let is_one_of_many = tree.count(node) > 1;
    let name = if is_one_of_many { format!("{} ({node})", told_apart(&place)) } else { node.clone() };
    let legs = if health == Health::Degraded { missing_legs(unwell) } else { Vec::new() };
    Some((health, if legs.is_empty() { name } else { format!("{name}: {}", legs.join(", ")) }))
}

/// The same, the service and the place by themselves.
fn first_unwell<'a>(tree: &'a Tree, place: &str) -> Option<(Health, &'a Tree, String)> {
    let here = tree.status.as_ref().map(|status: &Status| status.health);
    let own = |health| (health, tree, place.to_owned());
    match here {
        // What outlives a leg says itself how it is.
        Some(Health::Failed) => Some(own(Health::Failed)),
        Some(Health::Degraded) if outlives_legs(&tree.node) => Some(own(Health::Degraded)),
        _ => {
            let legs = tree.over.iter().enumerate();
            let below: Vec<_> = legs.filter_map(|(at, leg)| first_unwell(leg, &format!("{place}.{at}"))).collect();
            let failed = below.iter().find(|(health, ..)| *health == Health::Failed).cloned();
            let own = here.filter(|health| *health != Health::Good).map(own);
            failed.or(own).or_else(|| below.into_iter().next())
        }
    }
}

/// What a service says of its legs that are not good.
fn missing_legs(tree: &Tree) -> Vec<String> {
    let facts = tree.status.iter().flat_map(|status| &status.facts);
    let missing = facts.filter(|(name, is)| name.starts_with("leg ") && ["failed", "being filled"].contains(&is.as_str()));
    missing.map(|(name, is)| format!("{name} {is}")).collect()
}

fn outlives_legs(service: &str) -> bool {
    ["mirror", "parity"].contains(&service)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_waited_for_as_long_as_its_volume_may_be() {
        assert_eq!(file_patience(false, None, Duration::MAX), FILE_LET_GO, "it may just have been closed");
        let kept = Duration::from_secs(10);
        assert_eq!(file_patience(true, Some(kept), Duration::MAX), kept);
        assert_eq!(file_patience(true, None, Duration::MAX), FILE_PATIENCE_ALONE);
        // All guests wait for the start, and have waited long enough.
        assert_eq!(file_patience(true, Some(kept), Duration::ZERO), Duration::ZERO);
    }
}
