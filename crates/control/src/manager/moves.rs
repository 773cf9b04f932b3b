//! Volumes that go to another worker, with all that they are made of: nobody uses them meanwhile (docs/isolation.md).
//!
//! ```text
//!   here: look ─► there: receive, stored but not opened ─► here: release, closed and forgotten ─► there: open
//! ```
//!
//! Whatever ends between two of the steps, the declaration is stored somewhere; where it is stored twice, the one that is not open goes.

use std::{
    collections::BTreeSet,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use millrace_services::{Leaf, Node, throttle::groups_of};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    Inner, Manager, REST_LOOK, Volume,
    leaves::in_memory,
    shutdown::{FlushError, flush},
    volumes::look_at_files,
    warnings::forgetful,
};
use crate::{
    Name,
    daemon::monotonic_micros,
    error::ControlError,
    store::{Changes, VolumeRecord},
};

/// Why a volume that was received is not open.
pub(crate) const RECEIVED: &str = "it is on its way to this worker";

/// How long what was written to a volume may take to become durable before it goes.
const FLUSH_LIMIT: Duration = Duration::from_secs(20);

/// How long is waited for somebody else who opens a volume that has come.
const OPENING_LIMIT: Duration = Duration::from_secs(2);

/// A part of a move.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum Step {
    /// What goes with a volume, if it can go.
    Look { volume: String },
    /// Store these.
    Receive { records: Vec<VolumeRecord> },
    /// Close these and forget them; what they are then. Their files stay. Not after `before`, by the system's clock in microseconds: then nobody waits for it
    /// any more, and who has them may be settled otherwise.
    Release {
        volumes: Vec<Name>,
        #[serde(default = "never")]
        before: u64,
        /// As they were received elsewhere: what was changed since stays. Empty: whatever they are.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        looked: Vec<VolumeRecord>,
    },
    /// Open what was received.
    Open {
        volumes: Vec<Name>,
        /// Those that found out something when they were closed where they were, with that.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        closed: Vec<VolumeRecord>,
    },
}

/// The end of a release of a worker that says none.
fn never() -> u64 {
    u64::MAX
}

/// This much later, by the system's clock in microseconds.
fn after(limit: Duration) -> u64 {
    monotonic_micros().saturating_add(u64::try_from(limit.as_micros()).unwrap_or(u64::MAX))
}

impl Step {
    /// A release that is waited for this long.
    pub(crate) fn release(volumes: &[Name], limit: Duration) -> Self {
        Self::Release { volumes: volumes.to_vec(), before: after(limit), looked: Vec::new() }
    }

    /// The same of what was received elsewhere.
    pub(crate) fn release_looked(records: &[VolumeRecord], limit: Duration) -> Self {
        let volumes = records.iter().map(|record| record.spec.name.clone()).collect();
        Self::Release { volumes, before: after(limit), looked: records.to_vec() }
    }
}

/// Volumes that are being opened, as long as this lives; what exists is not locked when it goes. Who asks for the same does not hang, too.
struct Opening<'a> {
    manager: &'a Manager,
    volumes: &'a [Name],
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        let mut inner = self.manager.peek();
        for name in self.volumes {
            inner.opening.remove(name);
        }
    }
}

impl Manager {
    /// Whether there is a volume that has come, and was not opened, and nobody opens it.
    pub(crate) fn has_received(&self) -> bool {
        let inner = self.peek();
        inner.volumes.iter().any(|(name, volume)| volume.is_received() && !inner.opening.contains(name))
    }

    /// Volumes that have come, and that somebody opens.
    pub(crate) fn opening(&self) -> BTreeSet<Name> {
        self.peek().opening.clone()
    }

    /// Whether nothing in this worker is known by a UUID that something in another one is to have.
    pub(crate) fn check_unused(&self, kind: &'static str, name: &Name, uuid: Uuid) -> Result<(), ControlError> {
        self.peek().check_unused(kind, name, uuid)
    }

    /// Does a part of a move; what it is about.
    pub(crate) fn step(&self, step: &Step) -> Result<Vec<VolumeRecord>, ControlError> {
        // It ends after the lock.
        let _opening = self.prepare(step)?;
        let mut inner = self.lock()?;
        if matches!(step, Step::Look { .. } | Step::Release { .. }) {
            // What was found out since that was looked at last goes along.
            self.note_legs(&mut inner);
        }
        match step {
            Step::Look { volume } => inner.family(volume),
            Step::Receive { records } => self.receive(&mut inner, records),
            Step::Release { volumes, before, looked } => {
                inner.check_unchanged(looked)?;
                let gone = self.release(&mut inner, volumes, *before)?;
                // Their files are closed while nothing is locked: a file system may take its time for that.
                drop(inner);
                Ok(gone.into_iter().map(|volume| volume.record.clone()).collect())
            }
            Step::Open { volumes, .. } => {
                // From here on it is this worker's, whatever becomes of it.
                self.store.apply(&Changes { remove_received: volumes.iter().collect(), ..Changes::default() })?;
                let opened = inner.open_received(volumes);
                self.store_settled(&mut inner)?;
                self.note_legs(&mut inner);
                self.attend_migrations(&mut inner);
                opened
            }
        }
    }

    /// What may have to wait for a file system or a shard, while nothing is locked.
    fn prepare<'a>(&'a self, step: &'a Step) -> Result<Option<Opening<'a>>, ControlError> {
        match step {
            Step::Release { volumes, .. } => {
                for name in volumes {
                    self.measure_now(name.as_str());
                }
                self.flush_before(volumes)?;
                Ok(None)
            }
            Step::Open { volumes, closed } => {
                let (opening, stacks) = self.begin_opening(volumes, closed)?;
                stacks.iter().for_each(look_at_files);
                Ok(Some(opening))
            }
            Step::Look { .. } | Step::Receive { .. } => Ok(None),
        }
    }

    /// Marks volumes as being opened; their stacks. One that somebody else opens is waited for, but not for long.
    fn begin_opening<'a>(
        &'a self,
        volumes: &'a [Name],
        closed: &[VolumeRecord],
    ) -> Result<(Opening<'a>, Vec<Node>), ControlError> {
        let deadline = Instant::now() + OPENING_LIMIT;
        let mut inner = loop {
            let inner = self.lock()?;
            let Some(name) = volumes.iter().find(|name| inner.opening.contains(*name)) else { break inner };
            if Instant::now() >= deadline {
                let why = "it is being opened already, and what it lies on has not answered yet; try again then";
                return Err(ControlError::untimely("volume", name, why));
            }
            drop(inner);
            thread::sleep(REST_LOOK);
        };
        // Before anything hangs: whoever opens them then may not have been told of it.
        self.note_closed(&mut inner, closed)?;
        inner.opening.extend(volumes.iter().cloned());
        let here = volumes.iter().filter_map(|name| inner.volumes.get(name));
        let stacks = here.map(|volume| volume.record.spec.stack.clone()).collect();
        Ok((Opening { manager: self, volumes }, stacks))
    }

    /// Makes durable what was written to volumes that are to go: a failure is found out here, where their next guest can be told of it. What is
    /// known of one already goes along with it.
    fn flush_before(&self, names: &[Name]) -> Result<(), ControlError> {
        self.reach_all();
        let tops: Vec<_> = {
            let inner = self.peek();
            let is_top = |name: &&Name| inner.volumes_over(name.as_str()).next().is_none();
            let unused = names.iter().filter(is_top).filter(|name| inner.users(name.as_str()).next().is_none());
            let live = |name: &Name| {
                let volume = inner.volumes.get(name)?;
                volume.graph.as_ref().filter(|live| !live.is_untold())?;
                let live = volume.live.as_ref().ok()?;
                (!live.volume.geometry().read_only).then(|| (name.clone(), Arc::clone(&live.volume)))
            };
            unused.filter_map(live).collect()
        };
        let deadline = Instant::now() + FLUSH_LIMIT;
        for (name, volume) in tops {
            let why = match flush(&self.shards, &volume, deadline) {
                Ok(()) => continue,
                Err(FlushError::Volume(error)) => {
                    // This flush was told, and no guest.
                    if let Some(live) = self.peek().volumes.get(&name).and_then(|volume| volume.graph.as_ref()) {
                        live.switch.note_loss();
                    }
                    format!(
                        "what was written to it could not be made durable ({error}), and its next guest will be told so at its first flush; \
                         when this is asked for again, it goes all the same"
                    )
                }
                Err(FlushError::NoAnswer) => {
                    "it does not answer: nobody knows whether what was written to it is durable".to_owned()
                }
            };
            return Err(ControlError::NotMovable { volume: name, why });
        }
        Ok(())
    }

    /// Stores what received volumes found out when they were closed, before anybody uses them.
    fn note_closed(&self, inner: &mut Inner, closed: &[VolumeRecord]) -> Result<(), ControlError> {
        let found = |name: &Name| closed.iter().find(|record| record.spec.name == *name);
        let note = |record: &mut VolumeRecord| {
            if let Some(found) = found(&record.spec.name) {
                record.untold |= found.untold;
                record.out_of_use.clone_from(&found.out_of_use);
            }
        };
        let is_it = |record: &&VolumeRecord| {
            let here = inner.volumes.get(&record.spec.name);
            here.is_some_and(|volume| volume.is_received() && volume.record.uuid == record.uuid)
        };
        let names: Vec<&Name> = closed.iter().filter(is_it).map(|record| &record.spec.name).collect();
        self.store.amend(names.iter().copied(), note)?;
        for name in names {
            if let Some(volume) = inner.volumes.get_mut(name) {
                note(&mut volume.record);
            }
        }
        Ok(())
    }

    fn receive(&self, inner: &mut Inner, records: &[VolumeRecord]) -> Result<Vec<VolumeRecord>, ControlError> {
        for record in records {
            match inner.volumes.get(&record.spec.name) {
                Some(there) if there.record.uuid != record.uuid => {
                    return Err(ControlError::VolumeExists { name: record.spec.name.clone() });
                }
                Some(_) => {}
                None if inner.creating.contains_key(&record.spec.name) => {
                    return Err(ControlError::VolumeExists { name: record.spec.name.clone() });
                }
                None => inner.check_unused("volume", &record.spec.name, record.uuid)?,
            }
        }
        // One that came before may have been changed since, where it is.
        let new = |record: &&VolumeRecord| inner.volumes.get(&record.spec.name).is_none_or(Volume::is_received);
        let new: Vec<_> = records.iter().filter(new).collect();
        let put_received = new.iter().map(|record| &record.spec.name).collect();
        self.store.apply(&Changes { put_volumes: new.clone(), put_received, ..Changes::default() })?;
        for record in new {
            inner.note_received(record.clone());
        }
        Ok(Vec::new())
    }

    fn release(&self, inner: &mut Inner, names: &[Name], before: u64) -> Result<Vec<Volume>, ControlError> {
        if let Some(name) = names.first().filter(|_| monotonic_micros() >= before) {
            let why = "this worker came to it too late".to_owned();
            return Err(ControlError::NotMovable { volume: name.clone(), why });
        }
        for name in names.iter().filter(|name| inner.volumes.contains_key(*name)) {
            inner.check_movable(name)?;
            if let Some((over, _)) = inner.volumes_over(name.as_str()).find(|(over, _)| !names.contains(over)) {
                let why = format!("volume {over} is made of it");
                return Err(ControlError::NotMovable { volume: name.clone(), why });
            }
        }
        // Of those that nothing is made of: the services of the others have requests of their own in them.
        let tops: Vec<_> = names.iter().filter(|name| inner.volumes_over(name.as_str()).next().is_none()).collect();
        let released = tops.iter().try_for_each(|name| inner.end_requests(name)).and_then(|()| {
            self.close_account(inner, names);
            Ok(self.store.apply(&Changes { remove_volumes: names.iter().collect(), ..Changes::default() })?)
        });
        if let Err(error) = released {
            for name in tops {
                inner.admit_requests(name);
            }
            return Err(error);
        }
        let closed = inner.close_all(names.to_vec());
        for Volume { record, .. } in &closed {
            let name = &record.spec.name;
            inner.received.remove(&record.uuid);
            inner.forget_kept(name, record.uuid);
            tracing::info!(volume = %name, "the volume goes to another worker");
        }
        Ok(closed)
    }
}

impl Inner {
    /// Takes volumes out of force, those that are made of others before them: services write to their legs until they are closed. What they are
    /// then.
    fn close_all(&mut self, mut names: Vec<Name>) -> Vec<Volume> {
        let mut closed = Vec::new();
        names.retain(|name| self.volumes.contains_key(name));
        while !names.is_empty() {
            let at = names.iter().position(|name| self.volumes_over(name.as_str()).next().is_none()).unwrap_or(0);
            if let Some(mut volume) = self.volumes.remove(&names.remove(at)) {
                self.late.forget_volume(&volume.record.spec.name);
                volume.close();
                closed.push(volume);
            }
        }
        closed
    }

    /// Fails when one of these is not what it was, or something else is made of it now.
    fn check_unchanged(&self, looked: &[VolumeRecord]) -> Result<(), ControlError> {
        for record in looked {
            let name = &record.spec.name;
            let known = |over: &Name| looked.iter().any(|record| record.spec.name == *over);
            let is_same = self.volumes.get(name).is_none_or(|volume| volume.record == *record);
            if !is_same || self.volumes_over(name.as_str()).any(|(over, _)| !known(over)) {
                let why = "it was changed meanwhile: try again".to_owned();
                return Err(ControlError::NotMovable { volume: name.clone(), why });
            }
        }
        Ok(())
    }

    /// A volume, what it is made of, and what is made of that.
    fn family(&self, name: &str) -> Result<Vec<VolumeRecord>, ControlError> {
        let mut look = vec![self.volume(name)?.record.spec.name.clone()];
        let mut family: BTreeSet<Name> = BTreeSet::new();
        while let Some(name) = look.pop() {
            if family.contains(&name) {
                continue;
            }
            look.extend(self.volumes_over(name.as_str()).map(|(over, _)| over.clone()));
            let leaves = self.volumes.get(&name).map(|volume| volume.record.spec.stack.leaves()).unwrap_or_default();
            let below = leaves.into_iter().filter_map(Leaf::volume).filter_map(|below| below.parse().ok());
            look.extend(below.filter(|below: &Name| self.volumes.contains_key(below)));
            family.insert(name);
        }
        family.iter().try_for_each(|name| self.check_movable(name).and_then(|()| self.check_here(name)))?;
        Ok(family.iter().filter_map(|name| Some(self.volumes.get(name)?.record.clone())).collect())
    }

    /// Whether a volume is not on its way already: another worker may have it open.
    fn check_here(&self, name: &Name) -> Result<(), ControlError> {
        if !self.volumes.get(name).is_some_and(Volume::is_received) {
            return Ok(());
        }
        Err(ControlError::NotMovable { volume: name.clone(), why: format!("{RECEIVED}, and that is not finished") })
    }

    /// Whether nobody needs a volume where it is.
    fn check_movable(&self, name: &Name) -> Result<(), ControlError> {
        let volume = self.idle_volume(name.as_str())?;
        self.check_not_copied(name)?;
        let refused = |why: String| Err(ControlError::NotMovable { volume: name.clone(), why });
        if let Some((device, nsid)) = self.users(name.as_str()).next() {
            return refused(format!("device {} shows it, as namespace {nsid}", device.record.spec.name));
        }
        if let Some(owner) = &volume.record.created_by {
            return refused(format!("the guest of device {owner} created it"));
        }
        if let Some(group) = groups_of(&volume.record.spec.stack).first() {
            return refused(format!("it is in group {group}, which is in this worker"));
        }
        // Of one that has failed, the keeper may have blocks that nobody sees; one that has come has none.
        let may_have_blocks = || volume.allocated().map_or(!self.received.contains(&volume.record.uuid), |bytes| bytes > 0);
        if in_memory(&volume.record.spec.stack) > 0 && may_have_blocks() {
            return refused("its blocks are in the memory of that worker".to_owned());
        }
        // One that has come is not open here, and goes back to what it left.
        let is_here = !self.received.contains(&volume.record.uuid);
        if let Some(node) = forgetful(&volume.record.spec.stack, &Leaf::is_memory).first().filter(|_| is_here) {
            let word = node.word();
            return refused(format!("its service {word} keeps in the memory of that worker what it finds nowhere else"));
        }
        Ok(())
    }

    /// A volume that another worker may have open.
    pub(super) fn note_received(&mut self, record: VolumeRecord) {
        self.received.insert(record.uuid);
        self.late.forget_volume(&record.spec.name);
        let volume = Volume { record: record.clone(), live: Err(RECEIVED.to_owned()), graph: None, lost: false };
        self.volumes.insert(record.spec.name, volume);
    }

    fn open_received(&mut self, names: &[Name]) -> Result<Vec<VolumeRecord>, ControlError> {
        let is_closed = |name: &&Name| self.volumes.get(*name).is_some_and(|volume| volume.live.as_ref().err().is_some());
        let closed: Vec<_> = names.iter().filter(is_closed).cloned().collect();
        let records = closed.iter().filter_map(|name| self.volumes.remove(name)).map(|volume| volume.record).collect();
        // Also where that takes long: nobody looks after it later.
        self.restore_volumes(records, false);
        for name in names {
            let volume = self.volume(name.as_str())?;
            let uuid = volume.live().map(|_| volume.record.uuid)?;
            self.received.remove(&uuid);
        }
        Ok(Vec::new())
    }
}

impl Volume {
    /// It has come from another worker, and was not opened.
    pub(super) fn is_received(&self) -> bool {
        self.live.as_ref().is_err_and(|reason| reason == RECEIVED)
    }
}
