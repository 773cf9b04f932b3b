//! Copies of volumes, as jobs. Each that runs has a thread; volumes are read and written on shards.
//!
//! ```text
//!   create: checked, stored; the target is the copy's ─► thread: step, step … flush, stored, step … ─► done; the target is free
//!             ▲ resume, and every start of the daemon       └─ paused, cancelled, failed, the daemon stops
//! ```
//!
//! Invariants:
//! * What is stored of a copy's progress was durable on the target before. Nothing that does not outlive a process counts.
//! * While a copy runs or is paused, nobody else writes its target, and its source neither goes nor changes its size.
//! * A copy has ended when that is stored, not before: what is stored as running goes on at the next start.
//! * A copy has its thread until that has ended: only then its target is free, and another thread may go on with it.

mod pump;

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use millrace_block::Switch;
use millrace_services::{
    Leaf, Node,
    copy::{self, Copier},
};

use self::pump::{Live, Pump, Wish};
use super::{Inner, Manager, Volume, views::CopyView};
use crate::{
    Name, Size,
    error::ControlError,
    model::{CopyChange, CopySpec, CopyState},
    store::{Changes, CopyRecord},
};

/// Copies that have ended and are remembered; after that the one whose end is the longest ago is forgotten.
pub(super) const ENDED: usize = 64;
/// How long the end of copies is waited for when the daemon stops.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long an order waits for the end of a copy's present step: behind a slow volume that takes long, behind one that hangs for ever.
const MOMENT: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(2);
/// Least bytes per second, as of a migration.
const LEAST_RATE: u64 = 4096;

/// A copy, and its thread while it has one.
pub(super) struct Copy {
    pub(super) record: CopyRecord,
    thread: Option<Running>,
    /// Why it has failed, while that could not be stored.
    failing: Option<String>,
    /// When it ended; `None`: it has not, or that was before the last start.
    ended: Option<Instant>,
}

struct Running {
    live: Arc<Live>,
    handle: JoinHandle<()>,
}

impl Copy {
    fn new(record: CopyRecord) -> Self {
        Self { record, thread: None, failing: None, ended: None }
    }

    /// Whether its thread was told to end and has not yet.
    fn is_ending(&self) -> bool {
        self.thread.as_ref().is_some_and(|running| running.live.wish() != Wish::GoOn && !running.handle.is_finished())
    }

    fn is_of(&self, live: &Arc<Live>) -> bool {
        self.thread.as_ref().is_some_and(|running| Arc::ptr_eq(&running.live, live))
    }

    /// It runs no longer, whatever can be stored of that.
    fn pause(&mut self) {
        if self.record.state == CopyState::Running {
            self.record.state = CopyState::Paused;
        }
    }

    /// Its thread is told to end, if there is one.
    fn tell(&self, wish: Wish) -> Option<Arc<Live>> {
        let running = self.thread.as_ref()?;
        running.live.tell(wish);
        Some(Arc::clone(&running.live))
    }

    pub(super) fn view(&self) -> CopyView {
        let mut record = self.record.clone();
        if let Some(running) = &self.thread
            && record.state == CopyState::Running
        {
            running.live.progress().apply(&mut record);
        }
        let ending = || self.is_ending().then(|| "its present step has not ended yet".to_owned());
        record.reason = record.reason.or_else(|| self.failing.clone()).or_else(ending);
        CopyView::of(&record)
    }

    /// Whether its volumes are not free.
    fn holds(&self) -> bool {
        is_open(&self.record)
    }
}

impl Manager {
    /// All copies, by name.
    pub fn copies(&self) -> Vec<CopyView> {
        self.peek().copies.values().map(Copy::view).collect()
    }

    /// One copy.
    pub fn copy(&self, name: &str) -> Result<CopyView, ControlError> {
        self.peek().copy(name).map(Copy::view)
    }

    /// Begins a copy.
    pub fn create_copy(&self, spec: &CopySpec) -> Result<CopyView, ControlError> {
        let mut inner = self.lock()?;
        let name = match &spec.name {
            Some(name) => name.clone(),
            None => inner.free_copy_name().ok_or(ControlError::TooManyCopies)?,
        };
        if inner.copies.contains_key(&name) {
            return Err(ControlError::CopyExists { name });
        }
        check_rate(&name, spec.rate)?;
        inner.check_copy(&spec.source, &spec.target)?;
        let (source, target) = inner.switches(&spec.source, &spec.target)?;
        let bytes = copy::check(&*source, &*target).map_err(|source| ControlError::Copy { copy: name.clone(), source })?;
        let record = CopyRecord::new(name.clone(), spec, bytes);
        let forgotten: Vec<_> = inner.forgettable().into_iter().cloned().collect();
        let remove_copies = forgotten.iter().collect();
        self.store.apply(&Changes { put_copies: vec![&record], remove_copies, ..Changes::default() })?;
        inner.copies.retain(|name, _| !forgotten.contains(name));
        inner.copies.insert(name.clone(), Copy::new(record));
        tracing::info!(copy = %name, source = %spec.source, target = %spec.target, bytes, "copy begins");
        self.launch(&mut inner, &name);
        inner.copy(name.as_str()).map(Copy::view)
    }

    /// Pauses a copy, has it go on, or sets how fast it may be.
    pub fn change_copy(&self, name: &str, change: &CopyChange) -> Result<CopyView, ControlError> {
        check_rate(&self.copy(name)?.name, change.rate)?;
        match change.state {
            None => self.set_copy_rate(name, change.rate),
            Some(CopyState::Running) => self.resume_copy(name, change.rate),
            Some(CopyState::Paused) => self.pause_copy(name, change.rate),
            Some(CopyState::Done | CopyState::Failed) => {
                let name = self.peek().copy(name)?.record.name.clone();
                Err(ControlError::invalid("copy", &name, "a copy can be made running or paused"))
            }
        }
    }

    fn set_copy_rate(&self, name: &str, rate: Option<Size>) -> Result<CopyView, ControlError> {
        let Some(rate) = rate else { return self.copy(name) };
        let mut inner = self.lock()?;
        let mut record = inner.copy(name)?.record.clone();
        if record.state == CopyState::Done {
            return Err(ControlError::untimely("copy", &record.name, "it is done: begin another one"));
        }
        take_rate(&mut record, Some(rate));
        self.store.apply(&Changes { put_copies: vec![&record], ..Changes::default() })?;
        if let Some(copy) = inner.copies.get_mut(name) {
            copy.record = record;
            if let Some(running) = &copy.thread {
                running.live.set_rate(rate.0);
            }
        }
        inner.copy(name).map(Copy::view)
    }

    fn pause_copy(&self, name: &str, rate: Option<Size>) -> Result<CopyView, ControlError> {
        let mut inner = self.lock()?;
        let mut record = inner.copy(name)?.record.clone();
        match record.state {
            CopyState::Paused => {
                drop(inner);
                return self.set_copy_rate(name, rate);
            }
            CopyState::Running => {}
            CopyState::Done | CopyState::Failed => {
                return Err(ControlError::untimely("copy", &record.name, "it has ended: there is nothing to pause"));
            }
        }
        record.state = CopyState::Paused;
        take_rate(&mut record, rate);
        self.store.apply(&Changes { put_copies: vec![&record], ..Changes::default() })?;
        let live = inner.copies.get_mut(name).and_then(|copy| {
            copy.record = record.clone();
            copy.tell(Wish::Keep)
        });
        drop(inner);
        self.wait_for_copy(&record.name, live)?;
        self.copy(name)
    }

    /// Waits until the thread of a copy has ended, but no longer than a moment. The manager must not be locked.
    fn wait_for_copy(&self, name: &Name, live: Option<Arc<Live>>) -> Result<(), ControlError> {
        let Some(live) = live else { return Ok(()) };
        let deadline = Instant::now() + MOMENT;
        loop {
            match self.peek().copies.get(name).filter(|copy| copy.is_of(&live)) {
                Some(copy) if copy.is_ending() => {}
                _ => return Ok(()),
            }
            if Instant::now() >= deadline {
                return Err(ControlError::CopyEnding { name: name.clone() });
            }
            thread::sleep(LOOK);
        }
    }

    fn resume_copy(&self, name: &str, rate: Option<Size>) -> Result<CopyView, ControlError> {
        let mut inner = self.lock()?;
        let copy = inner.copy(name)?;
        let mut record = copy.record.clone();
        if copy.is_ending() {
            return Err(ControlError::CopyEnding { name: record.name });
        }
        match record.state {
            CopyState::Running => {
                drop(inner);
                return self.set_copy_rate(name, rate);
            }
            CopyState::Done => return Err(ControlError::untimely("copy", &record.name, "it is done: begin another one")),
            CopyState::Failed => {
                inner.check_copy(&record.source, &record.target)?;
                let (source, target) = inner.switches(&record.source, &record.target)?;
                let wrong = |source| ControlError::Copy { copy: record.name.clone(), source };
                record.bytes = copy::check(&*source, &*target).map_err(wrong)?;
                // Nothing was kept from its volumes meanwhile: they may be others of the same name.
                record.forget_progress();
            }
            // As for a new one.
            CopyState::Paused => drop(inner.idle_volume(record.source.as_str())?),
        }
        (record.state, record.reason) = (CopyState::Running, None);
        take_rate(&mut record, rate);
        self.store.apply(&Changes { put_copies: vec![&record], ..Changes::default() })?;
        if let Some(copy) = inner.copies.get_mut(name) {
            (copy.record, copy.failing) = (record.clone(), None);
        }
        self.launch(&mut inner, &record.name);
        inner.copy(name).map(Copy::view)
    }

    /// Ends a copy and forgets it. What it has copied stays on the target, which is free when the copy's present step has ended.
    pub fn delete_copy(&self, name: &str) -> Result<(), ControlError> {
        let mut inner = self.lock()?;
        let name = inner.copy(name)?.record.name.clone();
        let Some(copy) = inner.copies.get_mut(&name) else { return Ok(()) };
        let live = copy.tell(Wish::Cancel);
        if copy.is_ending() {
            // Whatever comes, it does not go on.
            copy.pause();
            let stored = self.store.apply(&Changes { put_copies: vec![&copy.record], ..Changes::default() });
            drop(inner);
            self.wait_for_copy(&name, live.clone())?;
            stored?;
            inner = self.lock()?;
        }
        self.forget_copy(&mut inner, &name, live.as_ref())
    }

    /// Forgets a copy that was cancelled, if it is that one still: has the same thread, or none as then.
    fn forget_copy(&self, inner: &mut Inner, name: &Name, live: Option<&Arc<Live>>) -> Result<(), ControlError> {
        let Some(copy) = inner.copies.get_mut(name) else { return Ok(()) };
        if !live.map_or(copy.thread.is_none(), |live| copy.is_of(live)) {
            return Err(ControlError::untimely("copy", name, "it was begun again meanwhile"));
        }
        copy.pause();
        self.store.apply(&Changes { remove_copies: vec![name], ..Changes::default() })?;
        inner.copies.remove(name);
        tracing::info!(copy = %name, "copy cancelled");
        Ok(())
    }

    /// A copy is resumed between the two looks of who cancels it.
    #[cfg(test)]
    pub(super) fn cancel_what_is_resumed_for_tests(&self, name: &str) -> Result<(), ControlError> {
        let live = self.peek().copies.get(name).and_then(|copy| Some(Arc::clone(&copy.thread.as_ref()?.live)));
        self.change_copy(name, &CopyChange { state: Some(CopyState::Running), rate: None })?;
        let mut inner = self.lock()?;
        let name = inner.copy(name)?.record.name.clone();
        self.forget_copy(&mut inner, &name, live.as_ref())
    }

    /// Starts the thread of a copy that runs; one that cannot run has failed.
    pub(super) fn launch(&self, inner: &mut Inner, name: &Name) {
        let Some(copy) = inner.copies.get(name) else { return };
        let record = copy.record.clone();
        let made = inner.switches(&record.source, &record.target).and_then(|(source, target)| {
            let copier = Copier::new(source, target, Arc::clone(&inner.means.spawner))
                .map_err(|source| ControlError::Copy { copy: name.clone(), source })?;
            if copier.bytes() < record.bytes {
                let why = format!("volume {} is smaller than when it began", record.source);
                return Err(ControlError::invalid("copy", name, why));
            }
            let live = Arc::new(Live::new(&record));
            let pump = Pump::new(self.itself.clone(), &record, copier, Arc::clone(&live));
            let spawned = thread::Builder::new().name("millrace-copy".to_owned()).spawn(move || pump.run());
            let handle = spawned.map_err(|error| ControlError::invalid("copy", name, format!("no thread: {error}")))?;
            Ok(Running { live, handle })
        });
        let Some(copy) = inner.copies.get_mut(name) else { return };
        match made {
            Ok(running) => (copy.thread, copy.failing) = (Some(running), None),
            Err(error) => self.fail_copy(copy, error.to_string()),
        }
    }

    /// A copy without a thread has failed. While that cannot be stored it is as it was, and has its target.
    fn fail_copy(&self, copy: &mut Copy, reason: String) {
        let name = &copy.record.name;
        if copy.failing.is_none() {
            tracing::error!(copy = %name, %reason, "the copy does not go on");
        }
        let failed = CopyRecord { state: CopyState::Failed, reason: Some(reason.clone()), ..copy.record.clone() };
        match self.store.apply(&Changes { put_copies: vec![&failed], ..Changes::default() }) {
            Ok(()) => (copy.record, copy.failing, copy.ended) = (failed, None, Some(Instant::now())),
            Err(error) => {
                if copy.failing.replace(reason).is_none() {
                    tracing::warn!(copy = %name, %error, "a copy's failure could not be stored yet; its target is not free");
                }
            }
        }
    }

    /// Tries again to store which copies have failed.
    pub(super) fn settle_copies(&self) {
        let Ok(mut inner) = self.lock() else { return };
        for copy in inner.copies.values_mut() {
            if let Some(reason) = copy.failing.clone() {
                self.fail_copy(copy, reason);
            }
        }
    }

    /// Takes copies up after a start: from now on they have their targets. `outlived`: another process was served here just before.
    pub(super) fn take_up_copies(&self, inner: &mut Inner, mut records: Vec<CopyRecord>, outlived: bool) {
        // Of two that write one target the one that was begun first has it.
        records.sort_by_key(|record| record.begun);
        // All before the first is there: they ran together, and one may write what another reads.
        let faults: Vec<_> = records.iter().map(|record| inner.why_not_up(record, outlived)).collect();
        for (mut record, fault) in records.into_iter().zip(faults) {
            if record.state != CopyState::Done && inner.is_in_memory(&record.target) {
                record.forget_progress();
            }
            let holder = inner.copy_to(record.target.as_str()).filter(|_| is_open(&record));
            let taken = |copy: &Name| ControlError::Copying { name: record.target.clone(), copy: copy.clone() }.to_string();
            let fault = fault.or_else(|| holder.map(taken));
            let mut copy = Copy::new(record);
            if let Some(reason) = fault {
                self.fail_copy(&mut copy, reason);
            }
            inner.copies.insert(copy.record.name.clone(), copy);
        }
    }

    /// Has the copies that run go on, but for those of volumes that are not opened yet because their files do not answer.
    pub(super) fn launch_copies(&self, inner: &mut Inner) {
        let is_heard = |name: &Name| !inner.late.may_hang(name);
        let runs = |copy: &&Copy| {
            let record = &copy.record;
            let is_due = record.state == CopyState::Running && copy.thread.is_none() && copy.failing.is_none();
            is_due && is_heard(&record.source) && is_heard(&record.target)
        };
        let names: Vec<_> = inner.copies.values().filter(runs).map(|copy| copy.record.name.clone()).collect();
        for name in names {
            self.launch(inner, &name);
        }
    }

    /// Ends the threads of all copies, which go on after the next start.
    pub(super) fn leave_copies(&self) {
        for running in self.peek().copies.values().filter_map(|copy| copy.thread.as_ref()) {
            if running.live.wish() == Wish::GoOn {
                running.live.tell(Wish::Keep);
            }
        }
        let deadline = Instant::now() + PATIENCE;
        while self.peek().copies.values().any(Copy::is_ending) {
            if Instant::now() >= deadline {
                tracing::error!("a copy does not come to its end; it goes with the process");
                return;
            }
            thread::sleep(LOOK);
        }
    }
}

/// Whether it has not ended.
fn is_open(record: &CopyRecord) -> bool {
    matches!(record.state, CopyState::Running | CopyState::Paused)
}

/// Refuses a rate at which nothing would seem to happen: one whose unit was forgotten.
fn check_rate(name: &Name, rate: Option<Size>) -> Result<(), ControlError> {
    match rate {
        Some(Size(1..LEAST_RATE)) => {
            Err(ControlError::invalid("copy", name, "rate: at least 4K a second; 0: as fast as it goes"))
        }
        _ => Ok(()),
    }
}

/// Has a copy be as fast as is asked for, if that is asked for: with whatever else changes, or not at all.
fn take_rate(record: &mut CopyRecord, rate: Option<Size>) {
    if let Some(rate) = rate {
        record.rate = Some(rate).filter(|rate| rate.0 > 0);
    }
}

impl Inner {
    fn copy(&self, name: &str) -> Result<&Copy, ControlError> {
        self.copies.get(name).ok_or_else(|| ControlError::NoCopy { name: name.to_owned() })
    }

    /// Why a copy that has not ended does not go on after a start.
    fn why_not_up(&self, record: &CopyRecord, outlived: bool) -> Option<String> {
        if !is_open(record) {
            return None;
        }
        if !outlived && self.is_in_memory(&record.source) {
            return Some(format!("volume {} is in memory, and what it held went with the daemon", record.source));
        }
        // Whatever is stored: what somebody uses is not written over.
        self.check_copy(&record.source, &record.target).err().map(|error| error.to_string())
    }

    fn free_copy_name(&self) -> Option<Name> {
        let name = |number: u32| format!("copy{number}").parse().ok();
        (1..=u32::from(u16::MAX)).filter_map(name).find(|name: &Name| !self.copies.contains_key(name))
    }

    /// Copies that have ended and are too many. Who waits for one that took long finds it: it goes by its end.
    fn forgettable(&self) -> Vec<&Name> {
        let mut ended: Vec<_> = self.copies.values().filter(|copy| !copy.holds()).collect();
        // Those from before the last start are the first, and of them is known when they began.
        ended.sort_by_key(|copy| (copy.ended, copy.record.begun));
        let surplus = (ended.len() + 1).saturating_sub(ENDED);
        ended.into_iter().take(surplus).map(|copy| &copy.record.name).collect()
    }

    /// The copy that a volume is the target of.
    pub(super) fn copy_to(&self, volume: &str) -> Option<&Name> {
        let holder = self.copies.values().find(|copy| copy.holds() && copy.record.target.as_str() == volume);
        holder.map(|copy| &copy.record.name)
    }

    /// A volume that is being copied stays there, and as large as it is.
    pub(super) fn check_not_copied(&self, volume: &Name) -> Result<(), ControlError> {
        let holder = self.copies.values().find(|copy| copy.holds() && copy.record.source == *volume);
        match holder {
            Some(copy) => Err(ControlError::Copying { name: volume.clone(), copy: copy.record.name.clone() }),
            None => Ok(()),
        }
    }

    /// Whether one volume may be copied to another.
    fn check_copy(&self, source: &Name, target: &Name) -> Result<(), ControlError> {
        let wrong = |why: String| Err(ControlError::invalid("volume", target, why));
        let from = self.idle_volume(source.as_str())?;
        let to = self.idle_volume(target.as_str())?;
        let (from, to) = (&from.record, &to.record);
        if source == target {
            return wrong("it is the source, too: choose another target".to_owned());
        }
        if self.is_over(target.as_str(), source.as_str()) || self.is_over(source.as_str(), target.as_str()) {
            return wrong(format!("it and volume {source} share their blocks: choose another target"));
        }
        if to.spec.read_only {
            return Err(ControlError::ReadOnly { name: target.clone() });
        }
        let users: Vec<_> =
            self.users(target.as_str()).map(|(device, nsid)| (device.record.spec.name.clone(), nsid)).collect();
        if !users.is_empty() {
            return Err(ControlError::VolumeAttached { name: target.clone(), users });
        }
        self.check_not_below(target)?;
        if let Some(owner) = &to.created_by {
            return wrong(format!("the guest of device {owner} created it for itself"));
        }
        if let Some(disk) = [from, to].into_iter().find(|record| record.spec.stack.is_disk()) {
            let disk = &disk.spec.name;
            let why = "it is a disk: copy the volumes on it, or migrate it (\"millrace volume migrate\")";
            return Err(ControlError::invalid("volume", disk, why));
        }
        Ok(())
    }

    /// What two volumes are to whoever reads and writes them.
    fn switches(&self, source: &Name, target: &Name) -> Result<(Arc<Switch>, Arc<Switch>), ControlError> {
        let switch = |name: &Name| {
            let volume = self.volume(name.as_str())?;
            volume.live()?;
            let live = volume.graph.as_ref().ok_or_else(|| ControlError::Changing { name: name.clone() })?;
            Ok::<_, ControlError>(Arc::clone(&live.switch))
        };
        Ok((switch(source)?, switch(target)?))
    }

    /// Whether any of a volume's blocks are in memory and nowhere else.
    pub(super) fn is_in_memory(&self, volume: &Name) -> bool {
        self.volumes.get(volume).is_some_and(|volume: &Volume| self.is_node_in_memory(&volume.record.spec.stack))
    }

    fn is_node_in_memory(&self, node: &Node) -> bool {
        match (node, node.legs()) {
            (Node::Leaf(leaf), _) => self.is_leaf_in_memory(leaf),
            // The slow leg has all of it.
            (_, [_, slow]) if node.word() == "cache" && node.settings().text("mode") == Some("through") => {
                self.is_node_in_memory(slow)
            }
            (_, legs) if node.word() == "mirror" => legs.iter().all(|leg| self.is_node_in_memory(leg)),
            (_, legs) => legs.iter().any(|leg| self.is_node_in_memory(leg)),
        }
    }

    fn is_leaf_in_memory(&self, leaf: &Leaf) -> bool {
        match leaf.volume().map(str::parse::<Name>) {
            Some(Ok(volume)) => self.is_in_memory(&volume),
            Some(Err(_)) => false,
            None => leaf.is_memory(),
        }
    }

    /// What a copy's thread tells while it runs, and at its end. Only what is stored is so; whether it is.
    fn note_copy(&mut self, manager: &Manager, name: &Name, live: &Arc<Live>, change: impl FnOnce(&mut CopyRecord)) -> bool {
        let Some(copy) = self.copies.get_mut(name).filter(|copy| copy.is_of(live)) else { return true };
        let mut record = copy.record.clone();
        change(&mut record);
        match manager.store.apply(&Changes { put_copies: vec![&record], ..Changes::default() }) {
            Ok(()) => {
                copy.ended = (!is_open(&record)).then(Instant::now);
                copy.record = record;
                true
            }
            Err(error) => {
                tracing::warn!(copy = %name, %error, "a copy's progress could not be stored; after a crash it is made again");
                false
            }
        }
    }
}
