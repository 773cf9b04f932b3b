//! Graphs: stacks made real, and exchanged under a running volume.
//!
//! ```text
//!   build:  sizes downward ─► leaves opened ─► services built upward      (kept from the old graph where nothing changed)
//!   mount:  upward, each service; on failure those mounted are unmounted
//!   change: mount what is over other leaves ─► leave ─► end tasks ─► Switch: pause, drain ─► unmount old, mount new ─► exchange ─► start tasks
//! ```

mod absent;
mod again;
mod change;
mod mount;
#[cfg(test)]
mod tests;
mod view;
mod watch;

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use millrace_block::{BlockSize, IoOperation, Switch, Volume, VolumeError, trace::Tap};
use thiserror::Error;

use crate::{
    background::{Background, Spawner, Task},
    migrate::stacks,
    registry,
    service::{self, Build, Health, Layout, Mount, Service, ServiceError, Status},
    settings::SettingError,
    shared::SharedObjects,
    stack::{Leaf, Node, ServiceNode, node_name},
};

pub use change::{ChangeFailed, Terms, change, hurry};
pub use view::{compatible, follows_blocks};
pub use watch::Watch;

/// How often a volume is looked at that is to become empty.
const DRAIN_LOOK: Duration = Duration::from_millis(1);
/// How often a task looks whether those before it have ended.
const END_LOOK: Duration = Duration::from_millis(5);

/// A leaf to be opened.
#[derive(Clone, Debug)]
pub struct LeafRequest<'a> {
    /// What it is.
    pub leaf: &'a Leaf,
    /// Its name in messages.
    pub name: String,
    /// Its size in bytes; `None`: its own.
    pub size: Option<u64>,
    /// Its block size.
    pub block_size: BlockSize,
}

/// Opens back ends and finds volumes.
pub trait Leaves {
    /// Opens a leaf.
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError>;

    /// What is known of a stored volume, of which a leg that was there may be gone; `None`: it is new, or changed.
    fn stored(&self) -> Option<Stored<'_>> {
        None
    }
}

/// What is known of a stored volume beside what its legs say.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// Its size in bytes.
    pub size: u64,
    /// Legs that were out of use when this was looked at last: [`Graph::out_of_use`].
    pub out_of_use: &'a [String],
}

/// Why a leaf cannot be had.
#[derive(Debug, Error)]
pub enum LeafError {
    /// The back end refused.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// It cannot be used here.
    #[error("{0}")]
    Refused(String),
}

/// Why a graph cannot be: the node and the reason.
#[derive(Debug, Error)]
pub enum GraphError {
    /// A leaf cannot be opened.
    #[error("{node}: {source}")]
    Leaf {
        /// The leaf.
        node: String,
        /// Why.
        #[source]
        source: LeafError,
    },
    /// A service cannot be made or brought into force.
    #[error("{node}: {source}")]
    Service {
        /// The service's node.
        node: String,
        /// Why.
        #[source]
        source: ServiceError,
    },
    /// One leaf stands in two places.
    #[error("{node}: {spec} is a leg already, of {other}: a leaf can be used once")]
    Twice {
        /// The second node.
        node: String,
        /// What it is.
        spec: String,
        /// The first node.
        other: String,
    },
    /// A service has an erasure to complete, and was to come into force at once.
    #[error("{node}: an erasure that was cut off is to be completed first, which takes as long as its disk does")]
    Unfinished {
        /// The service's node.
        node: String,
    },
    /// A change failed, and what was before did not come into force again, or may have been erased in part.
    #[error("{change}; and the volume is not as before ({back}): change, reopen or restore it")]
    WayBack {
        /// Why it failed.
        #[source]
        change: Box<GraphError>,
        /// Why the way back did.
        back: Box<GraphError>,
    },
}

/// What a graph is to be.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// The volume's name.
    pub volume: &'a str,
    /// Its stack.
    pub stack: &'a Node,
    /// Its size in bytes; `None`: what the legs have.
    pub size: Option<u64>,
    /// Its block size.
    pub block_size: BlockSize,
}

/// A node that is there.
pub(crate) struct Built {
    pub(crate) node: Node,
    /// Its name in messages.
    pub(crate) name: String,
    pub(crate) volume: Arc<dyn Volume>,
    /// The same, as the service above has it.
    tap: Arc<Tap>,
    pub(crate) service: Option<Arc<dyn Service>>,
    pub(crate) legs: Vec<Arc<Built>>,
    /// Why it is not there, where something else stands in its place.
    absent: Option<String>,
    /// What the tasks have that were started last, until they end.
    at_work: Mutex<Weak<()>>,
}

/// A node that can be traced.
pub struct TracePoint {
    /// Its name in messages.
    pub name: String,
    /// The service, or the leaf's specification.
    pub word: String,
    /// The place in the list of the node that it is a leg of.
    pub above: Option<usize>,
    /// Where its requests come by, but for the root: the root's come by the volume's switch.
    pub tap: Arc<Tap>,
}

/// A volume's stack, made real.
pub struct Graph {
    pub(crate) root: Arc<Built>,
    /// Tasks of the services that are in force, by the service they belong to.
    pub(crate) tasks: Vec<(Arc<Built>, Background)>,
    spawner: Arc<dyn Spawner>,
}

/// A node as it is shown.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Tree {
    /// The service, or the leaf's specification.
    pub node: String,
    /// Its settings, as written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<(String, String)>,
    /// Its size in bytes.
    pub size: u64,
    /// How a service is doing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    /// What it is over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub over: Vec<Tree>,
}

/// A service's settings, understood, and the sizes of its legs: those that stand in the stack, and those that they are told.
type Planned = (Box<dyn service::Plan>, [Vec<Option<u64>>; 2]);

struct Builder<'a> {
    plan: &'a Plan<'a>,
    leaves: &'a dyn Leaves,
    shared: &'a SharedObjects,
    /// Nodes of the running graph that may be kept.
    old: Vec<Arc<Built>>,
    /// Taps of the nodes so far, and of those that may be kept.
    taps: Vec<Arc<Tap>>,
    /// Leaves so far: specification and node.
    used: Vec<(String, String)>,
    /// Leaves that look alike and are yet to come, in order, with their sizes.
    later: VecDeque<Option<u64>>,
    /// There is no old graph: what is opened may have been out of use when the volume was formatted.
    is_first: bool,
}

/// Whether every leaf with this specification is another one, with data of its own.
pub(crate) fn is_one_of_many(leaf: &Leaf) -> bool {
    leaf.is_memory()
}

impl Graph {
    /// Builds a graph without touching what its leaves hold. Nodes of `old` that are defined alike are kept.
    ///
    /// # Errors
    /// The node that cannot be, and why.
    pub fn build(
        plan: &Plan<'_>,
        leaves: &dyn Leaves,
        shared: &SharedObjects,
        spawner: &Arc<dyn Spawner>,
        old: Option<&Graph>,
    ) -> Result<Self, GraphError> {
        let is_first = old.is_none();
        let old = old.map(Graph::nodes).unwrap_or_default();
        let taps = old.iter().map(|node| Arc::clone(&node.tap)).collect();
        let mut builder = Builder { plan, leaves, shared, old, taps, used: Vec::new(), later: VecDeque::new(), is_first };
        builder.foresee(plan.stack, plan.size);
        let root = builder.build(plan.stack, plan.volume, plan.stack.word(), plan.size, false)?;
        Ok(Self { root, tasks: Vec::new(), spawner: Arc::clone(spawner) })
    }

    /// What a namespace holds, by way of a [`Switch`].
    pub fn volume(&self) -> &Arc<dyn Volume> {
        &self.root.volume
    }

    /// The definition.
    pub fn stack(&self) -> &Node {
        &self.root.node
    }

    /// Its leaves from left to right, with what they were opened as; without those that are not there.
    pub fn leaves(&self) -> Vec<(Leaf, Arc<dyn Volume>)> {
        let nodes = self.nodes();
        let there = nodes.iter().filter(|node| node.absent.is_none());
        there.filter_map(|node| Some((node.node.as_leaf()?.clone(), Arc::clone(&node.volume)))).collect()
    }

    /// The legs that a service goes without now, as written in the stack. What they hold may be old, and they may not know it.
    pub fn out_of_use(&self) -> Vec<String> {
        self.watch().out_of_use()
    }

    /// Its leaves, but for those of legs that are out of use.
    pub fn leaves_in_use(&self) -> Vec<Leaf> {
        fn collect(node: &Built, into: &mut Vec<Leaf>) {
            into.extend(node.node.as_leaf().cloned());
            node.legs.iter().enumerate().filter(|(at, _)| node.uses(*at)).for_each(|(_, leg)| collect(leg, into));
        }
        let mut leaves = Vec::new();
        collect(&self.root, &mut leaves);
        leaves
    }

    /// All nodes, each before its legs.
    pub(crate) fn nodes(&self) -> Vec<Arc<Built>> {
        Built::nodes(&self.root)
    }

    /// All nodes, each before its legs, for who wants to trace them.
    pub fn trace_points(&self) -> Vec<TracePoint> {
        fn collect(node: &Built, above: Option<usize>, into: &mut Vec<TracePoint>) {
            let (at, tap) = (into.len(), Arc::clone(&node.tap));
            into.push(TracePoint { name: node.name.clone(), word: node.node.word().to_owned(), above, tap });
            node.legs.iter().for_each(|leg| collect(leg, Some(at), into));
        }
        let mut points = Vec::new();
        collect(&self.root, None, &mut points);
        points
    }

    /// Starts the tasks of services that have none yet.
    pub(crate) fn start(&mut self, nodes: &[Arc<Built>]) {
        for node in nodes {
            let Some(service) = &node.service else { continue };
            if self.tasks.iter().any(|(known, _)| Arc::ptr_eq(known, node)) {
                continue;
            }
            let tasks = node.in_turn(Arc::clone(service).tasks());
            let background = Background::start(tasks, &*self.spawner);
            self.tasks.push((Arc::clone(node), background));
        }
    }

    /// Ends the tasks of these services; the first that does not end. What is started again begins when that has.
    pub(crate) fn stop(&mut self, nodes: &[Arc<Built>]) -> Result<(), GraphError> {
        let mut stuck = None;
        self.tasks.retain(|(node, background)| {
            let stop = nodes.iter().any(|gone| Arc::ptr_eq(gone, node));
            if stop && !background.stop() {
                stuck.get_or_insert_with(|| node.name.clone());
            }
            !stop
        });
        let not_now = |node| {
            let source = ServiceError::NotNow("its background work does not end".to_owned());
            GraphError::Service { node, source }
        };
        stuck.map(not_now).map_or(Ok(()), Err)
    }

    /// Waits, at most so long, until no request is in the volume, which is behind this switch: what services hold back they let go. Returns
    /// how many are left. With none left the switch is closed: between two requests of one long command none is inside, and the next one
    /// would come. Blocks; not to be called on a shard.
    pub fn drain(&self, switch: &Switch, patience: Duration) -> u64 {
        let end = Instant::now() + patience;
        switch.close();
        let services = self.all_services();
        hurry(&services, true);
        while switch.in_flight() > 0 && Instant::now() < end {
            std::thread::sleep(DRAIN_LOOK);
        }
        hurry(&services, false);
        let left = switch.in_flight();
        if left > 0 {
            switch.open();
        }
        left
    }

    /// The services of all nodes.
    pub fn all_services(&self) -> Vec<Arc<dyn Service>> {
        self.nodes().iter().filter_map(|node| node.service.clone()).collect()
    }

    /// Whether a service knows of a loss that the guest is yet to be told of: it goes with the graph.
    pub fn has_untold(&self) -> bool {
        self.watch().has_untold()
    }

    /// Takes the graph out of force; no request may be in flight. What fails is logged: the volume goes anyway.
    pub fn unmount(&mut self) {
        let nodes = self.nodes();
        if let Err(error) = self.stop(&nodes) {
            tracing::error!(%error, "while a volume was closed");
        }
        for node in nodes.iter().filter(|node| node.service.is_some()) {
            node.unmount();
        }
    }

    /// [`Self::unmount`] for good: the volume is deleted, or, when not `stored`, could not be made.
    pub fn discard(&mut self, stored: bool) {
        self.unmount();
        self.nodes().iter().for_each(|node| node.discard(stored));
    }

    /// How everything is, for the operator.
    pub fn tree(&self) -> Tree {
        self.root.tree()
    }

    /// The services of this kind, node name or place, from the root on, or the one at the [`TOP`], with their nodes' names as they stand now: a
    /// node that was kept in a change has the name of where it was first.
    pub fn services(&self, kind: &str) -> Vec<(String, Arc<dyn Service>)> {
        fn collect(node: &Built, name: &str, kind: &str, into: &mut Vec<(String, Arc<dyn Service>)>) {
            let (place, _) = place_and_word(name);
            if let Some(service) = node.service.as_ref().filter(|_| [node.node.word(), name, place].contains(&kind)) {
                into.push((name.to_owned(), Arc::clone(service)));
            }
            for (at, leg) in node.legs.iter().enumerate() {
                collect(leg, &node_name(name, leg.node.word(), Some(at)), kind, into);
            }
        }
        let root = self.root.node.word();
        if kind == TOP {
            return self.root.service.iter().map(|service| (root.to_owned(), Arc::clone(service))).collect();
        }
        let mut found = Vec::new();
        collect(&self.root, root, kind, &mut found);
        found
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        for (_, tasks) in &self.tasks {
            tasks.tell();
        }
    }
}

/// A task that begins when nobody has `before` any more, and has `own` until it ends.
fn after(task: Task, before: Weak<()>, own: Arc<()>) -> Task {
    Task::new(task.name(), move |cx, stop| {
        Box::pin(async move {
            // Told to stop or not: who waits for its end waits for theirs.
            while before.strong_count() > 0 {
                cx.io(IoOperation::Sleep(END_LOOK)).await;
            }
            task.begin(cx, stop).await;
            drop(own);
        })
    })
}

impl Built {
    /// Tasks that begin when those before them have ended: one that did not do so in time may be there still.
    fn in_turn(&self, tasks: Vec<Task>) -> Vec<Task> {
        let own = Arc::new(());
        let mut at_work = self.at_work.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *at_work, Arc::downgrade(&own));
        drop(at_work);
        tasks.into_iter().map(|task| after(task, Weak::clone(&before), Arc::clone(&own))).collect()
    }

    /// Whether its service knows of a loss that the guest is yet to be told of.
    fn has_untold(&self) -> bool {
        self.service.as_ref().is_some_and(|service| service.has_untold())
    }

    /// It and all below it, each before its legs.
    pub(crate) fn nodes(root: &Arc<Self>) -> Vec<Arc<Self>> {
        fn collect(node: &Arc<Built>, into: &mut Vec<Arc<Built>>) {
            into.push(Arc::clone(node));
            node.legs.iter().for_each(|leg| collect(leg, into));
        }
        let mut nodes = Vec::new();
        collect(root, &mut nodes);
        nodes
    }

    pub(crate) fn mount(&self, mount: &Mount) -> Result<(), GraphError> {
        let Some(service) = &self.service else { return Ok(()) };
        service.mount(mount).map_err(|source| GraphError::Service { node: self.name.clone(), source })
    }

    pub(crate) fn unmount(&self) {
        let Some(service) = &self.service else { return };
        if let Err(error) = service.unmount() {
            tracing::error!(node = self.name, %error, "a service could not be closed in an orderly way");
        }
    }

    pub(crate) fn discard(&self, stored: bool) {
        if let Some(service) = &self.service {
            service.discard(stored);
        }
    }

    /// Whether a leg is there, and not gone without.
    fn uses(&self, leg: usize) -> bool {
        let is_there = self.legs.get(leg).is_some_and(|leg| leg.absent.is_none());
        is_there && self.service.as_ref().is_none_or(|service| service.leg_is_used(leg))
    }

    /// How a leg is that is not there.
    fn absence(&self) -> Option<Status> {
        let why = self.absent.clone()?;
        let again = "put it right and \"millrace upgrade\" (to the same binary), or \"volume replace\" it";
        let facts = vec![("not there".to_owned(), why), ("to do".to_owned(), again.to_owned())];
        Some(Status { health: Health::Failed, facts, ..Status::default() })
    }

    fn tree(&self) -> Tree {
        let settings = self.node.settings().iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Tree {
            node: self.node.word().to_owned(),
            settings,
            size: self.volume.geometry().bytes(),
            status: self.service.as_ref().map_or_else(|| self.absence(), |service| Some(service.status())),
            over: self.legs.iter().map(|leg| leg.tree()).collect(),
        }
    }
}

impl Tree {
    /// The tree of a stack that is not there (its volume has failed).
    pub fn of(node: &Node) -> Self {
        let settings = node.settings().iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let over = node.legs().iter().map(Self::of).collect();
        Self { node: node.word().to_owned(), settings, size: 0, status: None, over }
    }

    /// How many of this service there are: where it is several, operators and commands tell them apart by their places.
    pub fn count(&self, service: &str) -> usize {
        usize::from(self.node == service) + self.over.iter().map(|leg| leg.count(service)).sum::<usize>()
    }
}

/// How operators call a stack's uppermost service: its place is its name, which others of its kind have as well.
pub const TOP: &str = "top";

/// The place that a node's name says, and what it is: of the uppermost one both are the same.
pub fn place_and_word(name: &str) -> (&str, &str) {
    name.split_once(" (").map_or((name, name), |(place, word)| (place, word.trim_end_matches(')')))
}

/// How operators tell the service at a place from others of its kind.
pub fn told_apart(place: &str) -> &str {
    if place.contains('.') { place } else { TOP }
}

/// The size that stands at a leg; one that is being migrated keeps what it had.
fn stated_size(leg: &Node) -> Option<u64> {
    match leg {
        Node::Leaf(leaf) => leaf.settings.size("size").ok().flatten(),
        Node::Service(_) if view::is_moving(leg) => leg.legs().first().and_then(stated_size),
        Node::Service(_) => None,
    }
}

/// What stands at the legs of their sizes, and what they are told where the service has this one.
fn sizes_of(plan: &dyn service::Plan, legs: &[Node], size: Option<u64>, block_size: BlockSize) -> [Vec<Option<u64>>; 2] {
    let stated: Vec<_> = legs.iter().map(stated_size).collect();
    let told = size.map_or_else(|| stated.clone(), |size| plan.leg_sizes(size, &stated, block_size));
    [stated, told]
}

/// What a leaf is told, or what its definition says.
fn size_of(leaf: &Leaf, told: Option<u64>) -> Option<u64> {
    told.or(leaf.settings.size("size").ok().flatten())
}

impl Builder<'_> {
    /// A tap before a volume; always the same one, so that services see when one volume stands in two places.
    fn tap(&mut self, volume: &Arc<dyn Volume>) -> Arc<Tap> {
        if let Some(known) = self.taps.iter().find(|tap| tap.is_before(volume)) {
            return Arc::clone(known);
        }
        let tap = Tap::new(Arc::clone(volume));
        self.taps.push(Arc::clone(&tap));
        tap
    }

    /// `spared`: a service above goes without it when its blocks are others than the volume's.
    fn build(
        &mut self,
        node: &Node,
        path: &str,
        name: &str,
        size: Option<u64>,
        spared: bool,
    ) -> Result<Arc<Built>, GraphError> {
        if let Node::Leaf(leaf) = node {
            return self.leaf(node, leaf, path, name, size, spared);
        }
        let Node::Service(service) = node else { unreachable!("a node is a leaf or a service") };
        if let Some(at) = self.old.iter().position(|old| old.absent.is_some() && old.node == *node) {
            return Ok(self.old.remove(at));
        }
        let failed = |source: ServiceError| GraphError::Service { node: name.to_owned(), source };
        let (plan, [stated, sizes]) = self.plan_of(service, size).map_err(|error| failed(error.into()))?;
        let goes_without = self.is_first && plan.goes_without_others();
        let spared = spared || goes_without;
        let (mut legs, mut lost) = (Vec::new(), None);
        for (at, (leg, told)) in service.legs.iter().zip(&sizes).enumerate() {
            let name = node_name(name, leg.word(), Some(at));
            let is_last = at + 1 == sizes.len();
            let block_size = self.plan.block_size;
            let size = if is_last { again::told_last(&*plan, size, &legs, leg, *told, block_size) } else { *told };
            let built = self.build(leg, &format!("{path}/{}.{at}", service.service), &name, size, spared);
            legs.push(match built {
                Err(error) if goes_without && self.can_lack(leg, &error) => {
                    let size = size.or_else(|| self.known_size(service, &*plan, at));
                    let absent = self.absent(leg, &name, size, &error);
                    lost.get_or_insert(error);
                    absent
                }
                built => built?,
            });
        }
        if let Some(error) = lost.filter(|_| !self.can_go_on(&*plan, &legs)) {
            return Err(error);
        }
        if let Some(kept) = self.keep(node, &legs) {
            return Ok(kept);
        }
        let sizing: Vec<_> = service.legs.iter().map(view::sizing).collect();
        let build = Build {
            name: format!("{path}/{}", service.service),
            volume: self.plan.volume,
            legs: legs.iter().map(|leg| Arc::<Tap>::clone(&leg.tap) as _).collect(),
            stated: &stated,
            sizing: &sizing,
            size,
            block_size: self.plan.block_size,
            shared: self.shared,
        };
        let service = plan.build(build).map_err(failed)?;
        let volume: Arc<dyn Volume> = Arc::<dyn Service>::clone(&service);
        let tap = self.tap(&volume);
        let (node, name) = (node.clone(), name.to_owned());
        Ok(Arc::new(Built {
            node,
            name,
            volume,
            tap,
            service: Some(service),
            legs,
            absent: None,
            at_work: Mutex::default(),
        }))
    }

    /// Whether a leg that could not be built is one that is not there any more.
    fn can_lack(&self, leg: &Node, error: &GraphError) -> bool {
        let is_lost = matches!(error, GraphError::Leaf { source, .. } if absent::is_loss(source));
        is_lost && self.leaves.stored().is_some() && absent::can_be_missing(leg)
    }

    /// Whether the legs that are there may be gone on with. One that was out of use does not count: its own record may not know it, and
    /// those that do may be the ones that are gone. How it was written does not matter: a migration of it may be given up by now.
    fn can_go_on(&self, plan: &dyn service::Plan, legs: &[Arc<Built>]) -> bool {
        let needed = match plan.layout(legs.len()) {
            Layout::Spread { spare, .. } => legs.len().saturating_sub(spare),
            _ => 1,
        };
        let out = self.leaves.stored().map_or(&[][..], |stored| stored.out_of_use);
        let is_out = |leg: &Node| {
            let is_it = |out: &Node| stacks::place(out) == stacks::place(leg);
            out.iter().any(|out| *out == leg.to_string() || out.parse::<Node>().is_ok_and(|out| is_it(&out)))
        };
        let counts = |leg: &&Arc<Built>| leg.absent.is_none() && !is_out(&leg.node);
        legs.iter().filter(counts).count() >= needed
    }

    /// The size of a leg of the stack's top that is told none: what follows from the volume's.
    fn known_size(&self, service: &ServiceNode, plan: &dyn service::Plan, at: usize) -> Option<u64> {
        let is_top = matches!(self.plan.stack, Node::Service(top) if std::ptr::eq(top, service));
        let stored = self.leaves.stored().filter(|_| is_top)?;
        let [_, told] = sizes_of(plan, &service.legs, Some(stored.size), self.plan.block_size);
        told.get(at).copied().flatten()
    }

    /// What stands in the place of a leg that is not there.
    fn absent(&mut self, leg: &Node, name: &str, size: Option<u64>, error: &GraphError) -> Arc<Built> {
        let why = match error {
            GraphError::Leaf { source, .. } => source.to_string(),
            error => error.to_string(),
        };
        tracing::error!(volume = self.plan.volume, leg = name, "the volume is opened without this leg: {why}");
        let block_size = self.plan.block_size;
        let volume: Arc<dyn Volume> = Arc::new(absent::Absent::new(name.to_owned(), size, block_size));
        let (node, tap) = (leg.clone(), self.tap(&volume));
        Arc::new(Built {
            node,
            name: name.to_owned(),
            volume,
            tap,
            service: None,
            legs: Vec::new(),
            absent: Some(why),
            at_work: Mutex::default(),
        })
    }

    /// A service's settings, understood, and what its legs are told of their sizes.
    fn plan_of(&self, service: &ServiceNode, size: Option<u64>) -> Result<Planned, SettingError> {
        let kind = registry::find(&service.service).expect("a stack is checked before it is built");
        let plan = (kind.plan)(&service.settings)?;
        let sizes = sizes_of(&*plan, &service.legs, size, self.plan.block_size);
        Ok((plan, sizes))
    }

    /// Notes the sizes of the leaves that look alike, as they will be opened. What is wrong with the stack is told when it is built.
    fn foresee(&mut self, node: &Node, size: Option<u64>) {
        match node {
            Node::Leaf(leaf) if is_one_of_many(leaf) => self.later.push_back(size_of(leaf, size)),
            Node::Leaf(_) => {}
            Node::Service(service) => {
                let Ok((_, [_, told])) = self.plan_of(service, size) else { return };
                service.legs.iter().zip(told).for_each(|(leg, size)| self.foresee(leg, size));
            }
        }
    }

    /// The place among the old nodes of the leaf that this one is. Of those that look alike it is the first of the same size, or else a
    /// larger one that no later leaf has the size of.
    fn find_old(&self, leaf: &Leaf, size: Option<u64>) -> Option<usize> {
        let same = |old: &Built| old.node.as_leaf().is_some_and(|old| old.spec == leaf.spec) && old.service.is_none();
        if !is_one_of_many(leaf) {
            // The same back end is the same leaf, whatever else is set on it: it cannot be opened twice.
            return self.old.iter().position(|old| same(old));
        }
        let has = |old: &Built| Some(old.volume.geometry().bytes());
        let exact = self.old.iter().position(|old| same(old) && has(old) == size);
        exact.or_else(|| self.old.iter().position(|old| same(old) && has(old) >= size && !self.later.contains(&has(old))))
    }

    /// A node of the old graph that is the same, over the same legs.
    fn keep(&mut self, node: &Node, legs: &[Arc<Built>]) -> Option<Arc<Built>> {
        let same = |old: &Arc<Built>| {
            old.node == *node
                && old.legs.len() == legs.len()
                && old.legs.iter().zip(legs).all(|(old, new)| Arc::ptr_eq(old, new))
        };
        let at = self.old.iter().position(same)?;
        Some(self.old.remove(at))
    }

    fn leaf(
        &mut self,
        node: &Node,
        leaf: &Leaf,
        path: &str,
        name: &str,
        size: Option<u64>,
        spared: bool,
    ) -> Result<Arc<Built>, GraphError> {
        let failed = |source| GraphError::Leaf { node: name.to_owned(), source };
        if leaf.spec.contains(':') {
            if let Some((_, other)) = self.used.iter().find(|(spec, _)| *spec == leaf.spec) {
                let (node, spec, other) = (name.to_owned(), leaf.spec.clone(), other.clone());
                return Err(GraphError::Twice { node, spec, other });
            }
            self.used.push((leaf.spec.clone(), name.to_owned()));
        }
        let size = size_of(leaf, size);
        if is_one_of_many(leaf) {
            self.later.pop_front();
        }
        if let Some(at) = self.find_old(leaf, size) {
            // In their order: those that look alike must not change places.
            let kept = self.old.remove(at);
            let has = kept.volume.geometry().bytes();
            if let Some(wanted) = size.filter(|wanted| *wanted > has) {
                let why = format!("it has {has} bytes and {wanted} are needed; {}", change::BY_MIGRATION);
                return Err(failed(LeafError::Refused(why)));
            }
            return Ok(kept);
        }
        let of_absent =
            |old: &Arc<Built>| old.absent.is_some() && old.node.leaves().iter().any(|lost| lost.spec == leaf.spec);
        if let Some(why) = self.old.iter().find(|old| of_absent(old)).and_then(|old| old.absent.as_ref()) {
            return Err(failed(LeafError::Refused(format!("it is not there ({why}): leave what is over it as it is"))));
        }
        let name_of = if path == self.plan.volume { self.plan.volume.to_owned() } else { format!("{path}:{}", leaf.spec) };
        let request = LeafRequest { leaf, name: name_of, size, block_size: self.plan.block_size };
        let volume = self.leaves.open(&request).map_err(failed)?;
        let has = volume.geometry().block_size;
        if has != self.plan.block_size && !spared {
            let why = format!("it has blocks of {} bytes and the volume of {}", has.bytes(), self.plan.block_size.bytes());
            return Err(failed(LeafError::Refused(why)));
        }
        let tap = self.tap(&volume);
        Ok(Arc::new(Built {
            node: node.clone(),
            name: name.to_owned(),
            volume,
            tap,
            service: None,
            legs: Vec::new(),
            absent: None,
            at_work: Mutex::default(),
        }))
    }
}
