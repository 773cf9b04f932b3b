//! Traces: a device's or a volume's requests are recorded for whoever asked, for as long as he listens.
//!
//! ```text
//!   start ─► a ring for each shard ─► names ─► sites on: devices, switches, taps ─┐
//!                                                                                 ▼
//!   asker ◄── blocks ◄── its own thread: drains the rings every few milliseconds ◄── shards
//!              │
//!              └─ the time is over, told to end, nobody listens, the daemon ends ─► sites off ─► the rest, an end
//! ```
//!
//! Invariants:
//! * One trace at a time: a shard has one ring.
//! * A number is named before the first event that has it.
//! * What is switched on is what the trace is about: whoever changes what devices show, or its shape, says so ([`Manager::retrace_all`]).
//! * Shards wait for nothing here. When the asker is slow, rings fill up, and what finds no room is counted.
//! * A trace that is over stops recording, and makes room for another, within seconds, whatever its asker does.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use millrace_block::{
    Switch, Volume as _, clock,
    trace::{self, Ring, Site, Tap},
};
use millrace_engine::EngineError;
use millrace_services::graph::{Graph, TracePoint};
use millrace_trace::format::{Begin, DeviceName, EVENTS, End, Names, NamespaceName, NodeName, Writer};
use tokio::sync::mpsc::{self, error::TrySendError};

use super::{Device, Inner, Manager, WeakManager};
use crate::{Name, devices::ANSWER, error::ControlError, model::DeviceKind};

/// Events of a shard that may wait to be taken: some milliseconds of the fastest guest.
const RING: usize = 1 << 17;
/// How often rings are drained: when there was much in them, and when not.
const SOON: Duration = Duration::from_millis(1);
const LATER: Duration = Duration::from_millis(5);
/// Blocks that may wait for the asker.
const WAITING: usize = 64;
/// How long a trace that is over waits for an asker who takes nothing, and for one who takes little, in all.
const PATIENCE: Duration = Duration::from_secs(2);
const PATIENCE_IN_ALL: Duration = Duration::from_secs(6);
/// How long an upgrade waits for a trace to be brought to its end.
const UPGRADE_PATIENCE: Duration = Duration::from_millis(500);

/// What is traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// All requests of a device's guest.
    Device(String),
    /// Those of all guests for a volume.
    Volume(String),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(name) => write!(f, "device {name}"),
            Self::Volume(name) => write!(f, "volume {name}"),
        }
    }
}

/// Why a trace ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    TimeIsOver,
    Told,
    NobodyListens,
    Stopping,
    Upgrade,
    NumbersUsedUp,
}

impl Ending {
    fn reason(self) -> &'static str {
        match self {
            Self::TimeIsOver => "the time was over",
            Self::Told => "it was told to end",
            Self::NobodyListens => "nobody listened any more",
            Self::Stopping => "the daemon was stopped",
            Self::Upgrade => "another binary took the daemon's place",
            Self::NumbersUsedUp => "its numbers for devices and nodes were used up",
        }
    }

    fn is_early(self) -> bool {
        matches!(self, Self::NobodyListens | Self::Stopping | Self::Upgrade | Self::NumbersUsedUp)
    }
}

/// The nodes of a volume's graph, as they are named.
struct Nodes {
    names: Vec<NodeName>,
    /// Where their requests come by. Files that are gone are not kept open.
    taps: Vec<Weak<Tap>>,
}

impl Nodes {
    fn new(volume: &Name, points: &[TracePoint], block: u32, ids: &[u16]) -> Self {
        let leaf = |at: usize| !points.iter().any(|point| point.above == Some(at));
        let named = points.iter().zip(ids).enumerate().map(|(at, (point, id))| NodeName {
            id: *id,
            volume: volume.to_string(),
            name: point.name.clone(),
            word: point.word.clone(),
            above: point.above.map_or(0, |above| ids[above]),
            leaf: leaf(at),
            block,
        });
        Self { names: named.collect(), taps: points.iter().map(|point| Arc::downgrade(&point.tap)).collect() }
    }

    fn ids(&self) -> Vec<u16> {
        self.names.iter().map(|node| node.id).collect()
    }

    /// Whether they are those of the same graph.
    fn is_like(&self, other: &Self) -> bool {
        let same = |(one, other): (&Weak<Tap>, &Weak<Tap>)| one.ptr_eq(other);
        self.names == other.names && self.taps.iter().zip(&other.taps).all(same)
    }
}

/// What is switched on.
#[derive(Default)]
struct On {
    /// Devices, each with when it was made: one that has come back is yet to be told.
    devices: BTreeMap<Name, (Site, Instant)>,
    volumes: BTreeSet<Name>,
}

/// A trace under way.
pub(super) struct Running {
    target: Target,
    pub(super) rings: Vec<Arc<Ring>>,
    /// Names that are to be written before the next events.
    names: Mutex<Vec<Names>>,
    devices: Mutex<BTreeMap<Name, u16>>,
    /// Devices as they were named last.
    named: Mutex<BTreeMap<u16, DeviceName>>,
    /// Volumes' nodes as they were named last.
    nodes: Mutex<BTreeMap<Name, Nodes>>,
    last_node: AtomicU16,
    /// Changed under the manager's lock only.
    on: Mutex<On>,
    ending: Mutex<Option<Ending>>,
    /// Nothing is recorded any more, whatever changes until the last blocks were taken; written under the manager's lock.
    finished: AtomicBool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Running {
    fn new(target: &Target, shards: usize) -> Self {
        Self {
            target: target.clone(),
            rings: (0..shards).map(|_| Arc::new(Ring::new(RING))).collect(),
            names: Mutex::default(),
            devices: Mutex::default(),
            named: Mutex::default(),
            nodes: Mutex::default(),
            last_node: AtomicU16::new(0),
            on: Mutex::default(),
            ending: Mutex::default(),
            finished: AtomicBool::new(false),
        }
    }

    /// A device's number, always the same. Without one the trace ends.
    fn number(&self, device: &Name) -> Option<u16> {
        let mut devices = locked(&self.devices);
        if let Some(number) = devices.get(device) {
            return Some(*number);
        }
        let Ok(next) = u16::try_from(devices.len() + 1) else {
            self.end(Ending::NumbersUsedUp);
            return None;
        };
        devices.insert(device.clone(), next);
        Some(next)
    }

    /// Numbers for so many nodes. Without them the trace ends: what is recorded without would be nobody's.
    pub(super) fn next_nodes(&self, count: usize) -> Option<Vec<u16>> {
        let next = |last: u16| last.checked_add(u16::try_from(count).ok()?);
        let Ok(last) = self.last_node.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) else {
            self.end(Ending::NumbersUsedUp);
            return None;
        };
        Some((0..count).map(|at| last + 1 + at as u16).collect())
    }

    /// The numbers of a volume's nodes: those that they have, or new ones, which are named.
    fn name_nodes(&self, volume: &Name, points: &[TracePoint], block: u32) -> Option<Vec<u16>> {
        let mut known = locked(&self.nodes);
        if let Some(before) = known.get(volume).filter(|before| before.names.len() == points.len()) {
            let ids = before.ids();
            if before.is_like(&Nodes::new(volume, points, block, &ids)) {
                return Some(ids);
            }
        }
        let ids = self.next_nodes(points.len())?;
        let nodes = Nodes::new(volume, points, block, &ids);
        self.add_names(Names { nodes: nodes.names.clone(), ..Names::default() });
        known.insert(volume.clone(), nodes);
        Some(ids)
    }

    /// Names devices that are not known, or not as they are now.
    fn name_devices(&self, devices: impl Iterator<Item = DeviceName>) {
        let mut named = locked(&self.named);
        let devices: Vec<_> = devices.filter(|device| named.get(&device.id) != Some(device)).collect();
        named.extend(devices.iter().map(|device| (device.id, device.clone())));
        if !devices.is_empty() {
            self.add_names(Names { devices, ..Names::default() });
        }
    }

    fn add_names(&self, names: Names) {
        locked(&self.names).push(Names { clock: Some(clock::now()), ..names });
    }

    pub(super) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Relaxed)
    }

    fn end(&self, ending: Ending) {
        locked(&self.ending).get_or_insert(ending);
    }
}

impl Inner {
    /// Devices and volumes that a trace is about, and the one namespace of each device, if it is about one.
    fn traced(&self, target: &Target) -> (BTreeMap<Name, Option<u32>>, BTreeSet<Name>) {
        match target {
            Target::Device(name) => {
                let device = self.devices.get(name.as_str());
                let volumes = device.into_iter().flat_map(|device| &device.record.namespaces);
                let devices = device.map(|device| (device.record.spec.name.clone(), None)).into_iter().collect();
                (devices, volumes.map(|namespace| namespace.volume.clone()).collect())
            }
            Target::Volume(name) => {
                let users = self.users(name).map(|(device, nsid)| (device.record.spec.name.clone(), Some(nsid))).collect();
                (users, self.volumes.get(name.as_str()).map(|volume| volume.record.spec.name.clone()).into_iter().collect())
            }
        }
    }

    fn device_name(&self, name: &Name, id: u16) -> Option<DeviceName> {
        let record = &self.devices.get(name)?.record;
        let (kind, sectors) = match record.spec.kind {
            DeviceKind::Nvme(_) => ("nvme", false),
            DeviceKind::VirtioBlk(_) => ("virtio-blk", true),
        };
        let namespace = |namespace: &crate::store::NamespaceRecord| {
            let geometry = self.volumes.get(&namespace.volume)?.graph.as_ref()?.switch.geometry();
            let block = if sectors { 512 } else { geometry.block_size.bytes() };
            let volume = namespace.volume.to_string();
            Some(NamespaceName { nsid: namespace.nsid, volume, block, size: geometry.bytes() })
        };
        let namespaces = record.namespaces.iter().filter_map(namespace).collect();
        Some(DeviceName { id, name: name.to_string(), kind: kind.to_owned(), namespaces })
    }

    /// Records what comes by a volume's nodes, or no more.
    fn trace_volume(&self, name: &Name, running: Option<&Running>) {
        let Some(live) = self.volumes.get(name).and_then(|volume| volume.graph.as_ref()) else { return };
        let points = live.graph.trace_points();
        let block = live.switch.geometry().block_size.bytes();
        let ids = running.and_then(|running| running.name_nodes(name, &points, block));
        for (point, id) in points.iter().zip(ids.unwrap_or_else(|| vec![0; points.len()])) {
            if point.above.is_some() {
                point.tap.set(id);
            } else {
                live.switch.trace(id);
                // It may have been a leg before.
                point.tap.set(0);
            }
        }
    }

    /// Brings what is switched on to what a trace is about now. The first of what could not be.
    fn trace_on(&self, running: &Running) -> Result<(), ControlError> {
        let (devices, volumes) = self.traced(&running.target);
        let mut on = locked(&running.on);
        on.devices.retain(|name, _| {
            let stays = devices.contains_key(name);
            if !stays && let Some(device) = self.devices.get(name) {
                device.trace_off();
            }
            stays
        });
        for gone in on.volumes.difference(&volumes) {
            self.trace_volume(gone, None);
        }
        running.name_devices(devices.keys().filter_map(|name| self.device_name(name, running.number(name)?)));
        for volume in &volumes {
            self.trace_volume(volume, Some(running));
        }
        on.volumes = volumes;
        let mut result = Ok(());
        for (name, nsid) in devices {
            let Some(number) = running.number(&name) else { continue };
            let told = self.trace_device(running, &name, Site::new(number, nsid), &mut on);
            result = result.and(told);
        }
        result
    }

    /// Has a device's requests recorded, if they are not yet.
    fn trace_device(&self, running: &Running, name: &Name, site: Site, on: &mut On) -> Result<(), ControlError> {
        let device = self.device(name.as_str())?;
        if on.devices.get(name) == Some(&(site, device.since)) {
            return Ok(());
        }
        match device.live()?.trace(site) {
            // It does nothing, and learns of the trace when it is back.
            Err(ControlError::Silent { .. }) if matches!(running.target, Target::Volume(_)) => {}
            told => told?,
        }
        on.devices.insert(name.clone(), (site, device.since));
        Ok(())
    }

    /// Records nothing any more.
    fn trace_off(&self) {
        self.devices.values().for_each(Device::trace_off);
        for volume in self.volumes.keys() {
            self.trace_volume(volume, None);
        }
    }
}

impl Device {
    /// One that has failed, or does not answer, does nothing that could be recorded.
    fn trace_off(&self) {
        let _ = self.live().and_then(|live| live.trace(Site::default()));
    }
}

impl Manager {
    pub(super) fn tracing(&self) -> MutexGuard<'_, Option<Arc<Running>>> {
        locked(&self.traced)
    }

    /// Begins a trace; its file comes in pieces. It ends after so many seconds, when it is told to, or when nobody listens.
    pub(crate) fn start_trace(
        &self,
        target: &Target,
        seconds: Option<u64>,
    ) -> Result<mpsc::Receiver<Vec<u8>>, ControlError> {
        self.reach_all();
        let inner = self.lock()?;
        match target {
            Target::Device(name) => drop(inner.device(name)?.live()?),
            Target::Volume(name) => drop(inner.volume(name)?.live()?),
        }
        let mut slot = self.tracing();
        if let Some(running) = &*slot {
            return Err(ControlError::Tracing { target: running.target.to_string() });
        }
        let running = Arc::new(Running::new(target, self.shards.len()));
        let (out, blocks) = mpsc::channel(WAITING);
        let begun = self.install_rings(&running.rings).and_then(|()| inner.trace_on(&running)).and_then(|()| {
            // Longer than the clock goes on is without end.
            let deadline = seconds.and_then(|seconds| Instant::now().checked_add(Duration::from_secs(seconds)));
            let running = Arc::clone(&running);
            let drain = Drain { manager: self.itself.clone(), running, out, deadline, last: None, events: 0 };
            let begin = begin(target, seconds);
            let spawned = thread::Builder::new().name("millrace-trace".to_owned()).spawn(move || drain.run(&begin));
            spawned.map(drop).map_err(|source| ControlError::TraceThread { source })
        });
        if let Err(error) = begun {
            inner.trace_off();
            self.remove_rings();
            return Err(error);
        }
        tracing::info!(%target, seconds, "a trace begins");
        *slot = Some(running);
        Ok(blocks)
    }

    /// Tells a trace to end.
    pub(crate) fn stop_trace(&self, target: &Target) -> Result<(), ControlError> {
        match &*self.tracing() {
            Some(running) if running.target == *target => running.end(Ending::Told),
            _ => return Err(ControlError::NoTrace { target: target.to_string() }),
        }
        Ok(())
    }

    /// The daemon ends: so does the trace.
    pub(crate) fn end_trace(&self, ending: Ending) {
        if let Some(running) = &*self.tracing() {
            running.end(ending);
        }
    }

    /// As [`Self::end_trace`], and waits a moment until its last blocks were taken.
    pub(super) fn end_trace_now(&self, ending: Ending) {
        self.end_trace(ending);
        let deadline = Instant::now() + UPGRADE_PATIENCE;
        while self.tracing().is_some() && Instant::now() < deadline {
            thread::sleep(SOON);
        }
    }

    /// A volume is about to have another graph: its requests are recorded from the first one on.
    pub(super) fn trace_next(&self, inner: &Inner, volume: &Name, switch: &Switch, graph: &Graph) {
        let slot = self.tracing();
        let recording = slot.as_ref().filter(|running| !running.is_finished());
        let Some(running) = recording.filter(|running| inner.traced(&running.target).1.contains(volume)) else { return };
        let points = graph.trace_points();
        let Some(ids) = running.name_nodes(volume, &points, switch.geometry().block_size.bytes()) else { return };
        for (point, id) in points.iter().zip(ids) {
            // Where the root was a leg before, requests still come by.
            match point.above {
                Some(_) => point.tap.set(id),
                None => switch.trace_next(id),
            }
        }
    }

    /// A volume has other nodes, or a device another volume: what a trace is about may have changed.
    pub(super) fn retrace(&self, inner: &Inner, volume: &str) {
        let Some(name) = inner.volumes.get(volume).map(|volume| &volume.record.spec.name) else { return };
        let is_traced = |running: &Arc<Running>| !running.is_finished() && inner.traced(&running.target).1.contains(name);
        if !self.tracing().as_ref().is_some_and(is_traced) {
            // A trace may have ended, or have nothing to do with it any more, while the volume was being changed.
            inner.trace_volume(name, None);
        }
        self.retrace_all(inner);
    }

    /// Devices show something else, or of another shape: what a trace is about may have changed.
    pub(super) fn retrace_all(&self, inner: &Inner) {
        let slot = self.tracing();
        let Some(running) = slot.as_ref().filter(|running| !running.is_finished()) else { return };
        if let Err(error) = inner.trace_on(running) {
            tracing::warn!(%error, target = %running.target, "the trace does not have all that it should");
        }
    }

    /// Gives every shard its ring. One that hangs records nothing.
    fn install_rings(&self, rings: &[Arc<Ring>]) -> Result<(), ControlError> {
        for (shard, ring) in self.shards.iter().zip(rings) {
            let ring = Arc::clone(ring);
            match shard.call_within(ANSWER, move |_| trace::install(Some(ring))) {
                Err(EngineError::Silent { shard }) => tracing::warn!(shard, "it does not answer: the trace is without it"),
                done => done?,
            }
        }
        Ok(())
    }

    /// Takes all rings away. One that hangs gives up its own when it is back.
    fn remove_rings(&self) {
        for shard in &self.shards {
            let told = shard.call(|_| trace::install(None)).and_then(|()| shard.call_within(ANSWER, |_| ()));
            if let Err(error) = told {
                tracing::debug!(%error, "a shard keeps its ring");
            }
        }
    }

    /// Nothing is recorded any more.
    pub(super) fn finish_trace(&self, running: &Running) {
        self.reach_all();
        {
            let inner = self.peek();
            running.finished.store(true, Ordering::Relaxed);
            inner.trace_off();
        }
        self.remove_rings();
    }
}

fn begin(target: &Target, seconds: Option<u64>) -> Begin {
    Begin {
        program: concat!("millrace ", env!("CARGO_PKG_VERSION")).to_owned(),
        target: target.to_string(),
        clock: clock::now(),
        unix: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64),
        seconds,
    }
}

/// The thread that empties the rings.
struct Drain {
    manager: WeakManager,
    running: Arc<Running>,
    out: mpsc::Sender<Vec<u8>>,
    deadline: Option<Instant>,
    /// Until when blocks wait for the asker; set once the trace is over.
    last: Option<Instant>,
    /// Of the blocks that he was given.
    events: u64,
}

impl Drain {
    fn run(mut self, begin: &Begin) {
        let mut writer = Writer::default();
        self.send(writer.begin(begin));
        let ending = loop {
            if let Some(ending) = self.is_over() {
                break ending;
            }
            thread::sleep(if self.drain(&mut writer) > RING / 32 { SOON } else { LATER });
        };
        let last = clock::now();
        let manager = self.manager.upgrade();
        if let Some(manager) = &manager {
            manager.finish_trace(&self.running);
        }
        while self.drain(&mut writer) > 0 {}
        let dropped = self.dropped();
        let end = End {
            reason: ending.reason().to_owned(),
            clock: Some(last),
            events: self.events,
            dropped,
            early: ending.is_early(),
        };
        let ended = self.send(writer.end(&end));
        tracing::info!(target = %self.running.target, events = self.events, dropped, "a trace has ended: {}", ending.reason());
        let deadline = Instant::now() + PATIENCE;
        while ended && self.out.capacity() < self.out.max_capacity() && !self.out.is_closed() && Instant::now() < deadline {
            thread::sleep(SOON);
        }
        if let Some(manager) = manager {
            *manager.tracing() = None;
        }
    }

    fn is_over(&self) -> Option<Ending> {
        let over = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let told = *locked(&self.running.ending);
        told.or_else(|| self.out.is_closed().then_some(Ending::NobodyListens)).or_else(|| over.then_some(Ending::TimeIsOver))
    }

    fn dropped(&self) -> u64 {
        self.running.rings.iter().map(|ring| ring.dropped()).sum()
    }

    /// Writes what there is; how many events.
    fn drain(&mut self, writer: &mut Writer) -> usize {
        let mut count = 0;
        for (number, ring) in self.running.rings.clone().iter().enumerate() {
            loop {
                let mut events = Vec::with_capacity(EVENTS);
                let taken = ring.drain(EVENTS, |words| events.push(words));
                if taken == 0 {
                    break;
                }
                // What these events say was named before they came into being.
                self.send_names(writer);
                if self.send(writer.events(number as u32, ring.dropped(), events)) {
                    self.events += taken as u64;
                }
                count += taken;
                if !self.running.is_finished() && self.is_over().is_some() {
                    // Recording ends first.
                    return count;
                }
                if count > RING {
                    // The others have their turn.
                    break;
                }
            }
        }
        self.send_names(writer);
        count
    }

    fn send_names(&mut self, writer: &mut Writer) {
        // The lock is free while the asker is waited for: the manager names what changes under its own.
        let names = std::mem::take(&mut *locked(&self.running.names));
        for names in names {
            self.send(writer.names(&names));
        }
    }

    /// Gives a block to the asker, and waits while he has enough; whether he was given it.
    fn send(&mut self, block: Vec<u8>) -> bool {
        let (mut block, mut patience) = (block, None);
        loop {
            match self.out.try_send(block) {
                Ok(()) => return true,
                Err(TrySendError::Closed(_)) => return false,
                Err(TrySendError::Full(back)) => block = back,
            }
            if self.is_over().is_some() {
                let now = Instant::now();
                let last = *self.last.get_or_insert(now + PATIENCE_IN_ALL);
                if now >= *patience.get_or_insert(last.min(now + PATIENCE)) {
                    // The others find him as they find him.
                    self.last = Some(now);
                    return false;
                }
            }
            thread::sleep(SOON);
        }
    }
}
