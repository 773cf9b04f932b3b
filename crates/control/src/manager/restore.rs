//! Start: what is stored comes back, then what a configuration file declares is added.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Arc,
    time::Instant,
};

use millrace_block::Switch;
use millrace_keeper::Key;
use millrace_services::{Leaf, migrate::stacks};
use thiserror::Error;

use super::{
    Device, Inner, Manager, Volume,
    erasures::is_unfinished,
    graphs::LiveGraph,
    late::HELD_UP,
    volumes::{FileChange, namespace},
    warnings::forgetful,
};
use crate::{
    Name,
    config::{ConfigError, Declared, DeclaredDevice, Located},
    disks::Live,
    error::{ControlError, EMPTIED},
    model::{AttachSpec, GroupSpec, VolumeSpec},
    store::{Changes, DeviceRecord, NamespaceRecord, StoreError, VolumeRecord},
};

/// Why the daemon cannot start with what it has.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The stored state cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The configuration file cannot be applied.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The binary before this one can serve a guest as this one cannot.
    #[error("{what}; the upgrade is called off")]
    Trial {
        /// What is missing.
        what: String,
    },
    /// The system gave no thread.
    #[error("no thread for guests' requests: {0}")]
    Thread(#[source] io::Error),
}

/// Undone when a configuration file cannot be applied in full.
#[derive(Default)]
struct Created {
    groups: Vec<Name>,
    files: Vec<FileChange>,
    volumes: Vec<Name>,
    devices: Vec<Name>,
    /// What devices were that were there, and got namespaces.
    changed: Vec<DeviceRecord>,
}

/// A device goes on with its guest.
pub(super) fn go_on(name: &Name, live: &Live) {
    match live.resume() {
        Ok(()) => {}
        Err(error @ ControlError::Silent { .. }) => {
            tracing::warn!(device = %name, %error, "it goes on with its guest when its shard is back");
        }
        Err(error) => tracing::error!(device = %name, %error, "the device does not go on with its guest"),
    }
}

impl Manager {
    pub(super) fn restore(&self, declared: Option<&Declared>) -> Result<(), RestoreError> {
        let (groups, (volumes, devices)) = (self.store.load_groups()?, self.store.load()?);
        let copies = self.store.load_copies()?;
        if let Some(declared) = declared {
            declared.compare(&groups, &volumes, &devices)?;
        }
        let received = self.store.load_received()?;
        let (received, volumes) =
            volumes.into_iter().partition(|record: &VolumeRecord| received.contains(&record.spec.name));
        let mut inner = self.peek();
        inner.restore_groups(groups);
        Vec::into_iter(received).for_each(|record| inner.note_received(record));
        inner.be_hasty(&volumes, &devices, &copies);
        let mut looks = inner.look_first(&volumes);
        inner.with_keys(looks.take_keys(), |inner| inner.restore_volumes(volumes, true));
        inner.note_doubts();
        self.store_settled(&mut inner)?;
        // Before guests write to what is there.
        self.note_legs(&mut inner);
        // Applications outlive a worker that dies, not a daemon that was stopped.
        let go_on = self.settings.keeper.as_ref().is_some_and(|keeper| keeper.predecessor().is_some());
        let (over, devices): (Vec<_>, Vec<_>) = devices.into_iter().partition(|device| device.session.is_some() && !go_on);
        self.restore_apps(&mut inner, go_on)?;
        // What cannot be stored of it the next start does: nobody is to be without a disk for that.
        if let Err(error) = self.forget_over(&over) {
            tracing::warn!(%error, "the end of sessions of the daemon before this one could not be stored; the next start does it");
        }
        // Guests first: what programs have mapped takes no room from them.
        let (sessions, guests): (Vec<_>, Vec<_>) = devices.into_iter().partition(|device| device.session.is_some());
        for record in guests.into_iter().chain(sessions) {
            self.restore_device(&mut inner, record);
        }
        inner.forget_late(inner.volumes.keys(), &*self.host);
        // Before anything is declared: their targets are not free.
        self.take_up_copies(&mut inner, copies, go_on);
        if let Some(declared) = declared {
            self.apply(&mut inner, declared)?;
        }
        self.stand_trial(&inner)?;
        inner.hold_back();
        self.resume(&inner);
        self.complete_erasures(&mut inner);
        self.attend_late(&inner, looks);
        self.attend_migrations(&mut inner);
        self.launch_copies(&mut inner);
        Ok(())
    }

    /// Makes sure of what a file declares, in a daemon that runs.
    pub(crate) fn declare(&self, declared: &Declared) -> Result<(), RestoreError> {
        let mut inner = self.peek();
        let (groups, (volumes, devices)) = (self.store.load_groups()?, self.store.load()?);
        declared.compare(&groups, &volumes, &devices)?;
        self.apply(&mut inner, declared)?;
        self.attend_migrations(&mut inner);
        Ok(())
    }

    /// Stores the sizes of volumes whose growth was settled, before anybody uses them: the next start would look for all of the growth again,
    /// and another growth begin where this one did. What was written beyond could be cut off.
    pub(super) fn store_settled(&self, inner: &mut Inner) -> Result<(), StoreError> {
        let settled = std::mem::take(&mut inner.settled);
        let put_volumes: Vec<_> = settled.iter().filter_map(|name| Some(&inner.volumes.get(name)?.record)).collect();
        if put_volumes.is_empty() { Ok(()) } else { self.store.apply(&Changes { put_volumes, ..Changes::default() }) }
    }

    /// Stores which legs volumes go without, and of which losses guests are yet to be told, where that has changed. A leg that is gone may be
    /// the only one that knows, and so is a service that goes with this worker.
    pub(super) fn note_legs(&self, inner: &mut Inner) {
        // The end has its own last word.
        if !inner.stopping {
            self.note_legs_now(inner);
        }
    }

    /// The same, at the end, too.
    pub(super) fn note_legs_now(&self, inner: &mut Inner) {
        // What the binary before this one would not understand waits until nobody goes back to it.
        let on_trial = self.settings.keeper.as_ref().is_some_and(|keeper| keeper.is_on_trial());
        let mut changed = Vec::new();
        let Inner { volumes, watched, .. } = &mut *inner;
        for (name, volume) in volumes {
            // A change may have the graph, and may take long.
            let known = volume.graph.as_ref().map(LiveGraph::watch).or_else(|| watched.get(name).cloned());
            let (out_of_use, is_untold) = match known {
                Some(known) => (known.out_of_use(), known.is_untold()),
                // Nobody else knows what its opening has found out.
                None if volume.lost => (volume.record.out_of_use.clone(), true),
                None => continue,
            };
            // On trial nothing is taken back either: below a volume that failed by it, it would be known to nobody. Better told twice.
            let untold = if on_trial { volume.record.untold } else { is_untold };
            let record = &mut volume.record;
            if (&out_of_use, untold) != (&record.out_of_use, record.untold) {
                let before =
                    (std::mem::replace(&mut record.out_of_use, out_of_use), std::mem::replace(&mut record.untold, untold));
                changed.push((record.spec.name.clone(), before));
            }
        }
        if changed.is_empty() {
            return;
        }
        // No more than that: a resize or a format stores its steps meanwhile, and what is known here is older.
        let noted = self.store.amend(changed.iter().map(|(name, _)| name), |stored| {
            if let Some(Volume { record, .. }) = inner.volumes.get(&stored.spec.name) {
                // Within a change it may be another stack, in which the legs have other words: what is in force notes them (`exchange`).
                let is_same = stored.spec.stack == record.spec.stack;
                if is_same {
                    stored.out_of_use.clone_from(&record.out_of_use);
                }
                stored.untold = record.untold || (stored.untold && !is_same);
            }
        });
        let Err(error) = noted else { return };
        tracing::warn!(%error, "which legs are out of use, and what guests are to be told, could not be stored; it is tried again");
        for (name, before) in changed {
            if let Some(volume) = inner.volumes.get_mut(&name) {
                (volume.record.out_of_use, volume.record.untold) = before;
            }
        }
    }

    /// While another binary can take over again, no guest loses a device or a namespace that this one cannot bring back. Whose file system does not
    /// answer waits for it, as it would there.
    fn stand_trial(&self, inner: &Inner) -> Result<(), RestoreError> {
        if !self.settings.keeper.as_ref().is_some_and(|keeper| keeper.is_on_trial()) {
            return Ok(());
        }
        for (name, device) in &inner.devices {
            let shown = &device.record.namespaces;
            let waits = |nsid: u32| shown.iter().any(|at| at.nsid == nsid && inner.late.is_unheard(&at.volume));
            let lost = device.failed.iter().find(|(nsid, reason)| *reason != HELD_UP && !waits(**nsid));
            let what = match (&device.live, lost) {
                (Err(reason), _) => format!("device {name}: {reason}"),
                (Ok(_), Some((nsid, reason))) => format!("device {name}: namespace {nsid}: {reason}"),
                (Ok(_), None) => continue,
            };
            return Err(RestoreError::Trial { what });
        }
        Ok(())
    }

    /// Everything that is stored is there: guests of the worker before this one go on, all of them only now, for what one of them did
    /// to a shared volume may have to be finished first; but for those that [have to wait](super::late).
    fn resume(&self, inner: &Inner) {
        let lives = || inner.devices.values().filter_map(|device| Some((device, device.live.as_ref().ok()?)));
        for (device, live) in lives() {
            if let Err(error) = live.finish_pairs() {
                tracing::error!(device = %device.record.spec.name, %error, "what was begun is not finished");
            }
        }
        for (device, live) in lives().filter(|(device, _)| !inner.late.has(&device.record.spec.name)) {
            go_on(&device.record.spec.name, live);
        }
        // The binary before this one may know what is strange to this one.
        if !self.settings.keeper.as_ref().is_some_and(|keeper| keeper.is_on_trial()) {
            self.drop_untaken(inner);
        }
    }

    /// Lets go of what is kept and nobody needs: not the leaves of volumes, and nothing of a volume or device that failed, which may come up
    /// next time. Later, if volumes are still to be opened: what the keeper goes on holding is let go of here all the same.
    pub(super) fn drop_untaken(&self, inner: &Inner) {
        let Some(keeper) = self.settings.keeper.as_ref().filter(|_| inner.is_nobody_late()) else { return };
        let owners: BTreeMap<_, _> =
            inner.volumes.values().map(|volume| (volume.record.uuid.into_bytes(), volume)).collect();
        let failed: BTreeSet<_> = inner
            .devices
            .values()
            .filter(|device| device.live.is_err())
            .map(|device| device.record.uuid.into_bytes())
            .collect();
        let is_needed = |key: Key| {
            let owner = owners.get(&key.owner);
            failed.contains(&key.owner) || owner.is_some_and(|volume| volume.live.is_err() || volume.record.has_leaf_of(key))
        };
        match keeper.drop_untaken(is_needed) {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "descriptors that nobody needs any more are closed"),
            Err(error) => tracing::error!(%error, "the keeper could not be told what is not needed"),
        }
    }

    /// A device whose socket cannot be made is shown as failed; the others do not suffer.
    fn restore_device(&self, inner: &mut Inner, record: DeviceRecord) {
        let disk = record.namespaces.first().and_then(|namespace| inner.disk(&namespace.volume));
        let live = self.start_device(inner, &record, disk);
        let mut failed = BTreeMap::new();
        if let Ok(live) = &live {
            for at in &record.namespaces {
                if inner.is_held_up(&record, live) {
                    failed.insert(at.nsid, HELD_UP.to_owned());
                } else if let Err(error) = inner.show_surely(live, at) {
                    tracing::error!(device = %record.spec.name, nsid = at.nsid, %error, "a namespace could not be restored");
                    failed.insert(at.nsid, error.to_string());
                }
            }
        }
        let live = live.map_err(|error| {
            tracing::error!(device = %record.spec.name, %error, "the device could not be restored");
            error.to_string()
        });
        let name = record.spec.name.clone();
        inner.devices.insert(name.clone(), Device { record, live, failed, since: Instant::now() });
        inner.restore_limit(&name);
    }

    /// Makes what is declared and not there, and stores it as one change.
    fn apply(&self, inner: &mut Inner, declared: &Declared) -> Result<(), RestoreError> {
        let mut created = Created::default();
        let result = self.make_all(inner, declared, &mut created).map_err(RestoreError::from).and_then(|()| {
            let changes = Changes {
                put_groups: created.groups.iter().filter_map(|name| Some(&inner.groups.get(name)?.spec)).collect(),
                put_volumes: created.volumes.iter().filter_map(|name| Some(&inner.volumes.get(name)?.record)).collect(),
                put_devices: created.touched().filter_map(|name| Some(&inner.devices.get(name)?.record)).collect(),
                ..Changes::default()
            };
            Ok(self.store.apply(&changes)?)
        });
        if result.is_err() {
            created.undo(inner);
        }
        result
    }

    fn make_all(&self, inner: &mut Inner, declared: &Declared, created: &mut Created) -> Result<(), ConfigError> {
        inner.make_declared_groups(declared, created)?;
        let mut left: Vec<_> = declared.volumes.iter().collect();
        while !left.is_empty() {
            // What is made of other volumes comes after them, wherever it stands in the file.
            let here: BTreeSet<_> = left.iter().map(|volume| volume.value.name.as_str()).collect();
            let waits = |volume: &&Located<VolumeSpec>| {
                volume.value.stack.leaves().into_iter().filter_map(Leaf::volume).any(|name| here.contains(name))
            };
            let at = left.iter().position(|volume| !waits(volume)).unwrap_or(0);
            let volume = left.remove(at);
            inner.make_declared_volume(volume, created).map_err(|error| declared.failed(volume.line, error))?;
        }
        for device in &declared.devices {
            self.make_declared_device(inner, declared, device, created)?;
        }
        Ok(())
    }

    fn make_declared_device(
        &self,
        inner: &mut Inner,
        declared: &Declared,
        device: &Located<DeclaredDevice>,
        created: &mut Created,
    ) -> Result<(), ConfigError> {
        let spec = &device.value.spec();
        let is_new = !inner.devices.contains_key(&spec.name);
        if is_new {
            let disk = device.value.attach.first().and_then(|attach| inner.disk(&attach.volume));
            let made = self.make_device(inner, spec, None, disk).map_err(|error| declared.failed(device.line, error))?;
            created.devices.push(spec.name.clone());
            inner.devices.insert(spec.name.clone(), made);
        }
        for attach in &device.value.attach {
            if inner.has(&spec.name, attach) {
                continue;
            }
            if !is_new && !created.changed.iter().any(|before| before.spec.name == spec.name) {
                created.changed.extend(inner.devices.get(&spec.name).map(|device| device.record.clone()));
            }
            inner.make_attachment(spec.name.as_str(), attach).map_err(|error| declared.failed(device.line, error))?;
        }
        Ok(())
    }
}

impl Created {
    fn touched(&self) -> impl Iterator<Item = &Name> {
        self.devices.iter().chain(self.changed.iter().map(|before| &before.spec.name))
    }

    fn undo(self, inner: &mut Inner) {
        // A cell goes on, with guests that must not see what is undone.
        for before in self.changed {
            let name = before.spec.name.clone();
            let now = inner.devices.get(&name).map(|device| device.record.namespaces.clone()).unwrap_or_default();
            let had = |nsid| before.namespaces.iter().any(|at| at.nsid == nsid);
            for at in now.iter().filter(|at| !had(at.nsid)) {
                inner.take_attachment(name.as_str(), at.nsid);
            }
            if let Some(device) = inner.devices.get_mut(&name) {
                device.record = before;
            }
        }
        for name in self.devices {
            if let Some(device) = inner.devices.remove(&name) {
                inner.retire(device);
            }
        }
        // Those that are made of others come after them.
        for name in self.volumes.into_iter().rev() {
            if let Some(mut volume) = inner.volumes.remove(&name) {
                volume.close_for_good(false);
                inner.forget_kept(&name, volume.record.uuid);
            }
        }
        for group in self.groups {
            inner.groups.remove(&group);
        }
        self.files.into_iter().for_each(FileChange::undo);
    }
}

impl Inner {
    fn make_declared_groups(&mut self, declared: &Declared, created: &mut Created) -> Result<(), ConfigError> {
        let mut left: Vec<_> = declared.groups.iter().filter(|group| !self.groups.contains_key(&group.value.name)).collect();
        while !left.is_empty() {
            // What is in another one comes after it, wherever it stands in the file.
            let waits =
                |group: &Located<GroupSpec>| left.iter().any(|other| Some(&other.value.name) == group.value.within.as_ref());
            let at = left.iter().position(|group| !waits(group)).unwrap_or(0);
            let group = left.remove(at);
            let made = self.make_group(&group.value).map_err(|error| declared.failed(group.line, error))?;
            created.groups.push(group.value.name.clone());
            self.groups.insert(group.value.name.clone(), made);
        }
        Ok(())
    }

    fn make_declared_volume(&mut self, volume: &Located<VolumeSpec>, created: &mut Created) -> Result<(), ControlError> {
        if self.volumes.contains_key(&volume.value.name) {
            return Ok(());
        }
        let warning = super::warnings::of(&volume.value);
        let new = self.make_volume(&volume.value, None)?;
        if let Some(warning) = warning {
            tracing::warn!(volume = %volume.value.name, "{warning}");
        }
        created.files.extend(new.files);
        created.volumes.push(volume.value.name.clone());
        self.volumes.insert(volume.value.name.clone(), new.volume);
        Ok(())
    }

    /// Opens stored volumes, each after those that it is made of. `later`: those that take long may be opened when nobody else waits.
    pub(super) fn restore_volumes(&mut self, mut left: Vec<VolumeRecord>, later: bool) {
        while !left.is_empty() {
            let names: BTreeSet<_> = left.iter().map(|record| record.spec.name.clone()).collect();
            let waits = |record: &VolumeRecord| {
                record.spec.stack.leaves().into_iter().filter_map(Leaf::volume).any(|name| names.contains(name))
            };
            // None that can go first: a circle, which no change makes. They fail one by one.
            let at = left.iter().position(|record| !waits(record)).unwrap_or(0);
            let record = left.remove(at);
            self.restore_volume(record, later);
        }
    }

    /// A volume that cannot be opened is shown as failed; the others do not suffer.
    fn restore_volume(&mut self, mut record: VolumeRecord, later: bool) {
        let was = (record.growing.is_some(), record.untold);
        if let Some(why) = self.why_unheard(&record) {
            tracing::error!(volume = %record.spec.name, "{why}");
            self.take_restored(record, was, Err(why));
            return;
        }
        let made = self.reopen_stored(&mut record, later).map_err(|error| {
            let reason = self.why_failed(&record, &error);
            tracing::error!(volume = %record.spec.name, reason, "the volume could not be restored");
            reason
        });
        self.take_restored(record, was, made);
    }

    /// Opens a stored volume in one of the ways that there may be. `later`: one that has an erasure to complete waits for who does that.
    fn reopen_stored(&mut self, record: &mut VolumeRecord, later: bool) -> Result<LiveGraph, ControlError> {
        // That there is something to erase is no reason to take another way.
        let is_plain = record.growing.is_none() && stacks::migration(&record.spec.stack).is_none();
        if !later || !is_plain {
            return self.reopen_any(record).or_else(|error| self.reopen_old(record, error));
        }
        self.materials(&record.spec).at_once().reopen(record).inspect_err(|error| {
            if is_unfinished(error) {
                self.late.note_erasing(&record.spec.name);
            }
        })
    }

    /// Why a volume could not be opened. Where what its services look for was in memory and nobody has it any more, there is but one way on.
    pub(super) fn why_failed(&self, record: &VolumeRecord, error: &ControlError) -> String {
        let name = &record.spec.name;
        if is_unfinished(error) {
            return format!("{error}; the volume is opened when that is done");
        }
        if !self.is_emptied(record) {
            return error.to_string();
        }
        format!("{error}; {EMPTIED}: \"millrace volume delete {name}\", and make it anew")
    }

    /// Whether all of it is gone: where a leg still has data, they are not to be deleted, and what the error proposes counts.
    fn is_emptied(&self, record: &VolumeRecord) -> bool {
        let is_held = |record: &VolumeRecord| self.keeper.as_ref().is_some_and(|keeper| record.has_memory_in(keeper));
        let is_empty = |below: &VolumeRecord| !is_held(below) && below.spec.stack.leaves().into_iter().all(Leaf::is_memory);
        let in_memory = |leaf: &Leaf| match leaf.volume() {
            Some(below) => self.volumes.get(below).is_some_and(|below| is_empty(&below.record)),
            None => leaf.is_memory(),
        };
        let stack = &record.spec.stack;
        !is_held(record) && stack.leaves().into_iter().all(in_memory) && !forgetful(stack, &in_memory).is_empty()
    }

    /// Tries again to open a volume that could not be opened.
    pub(super) fn reopen_failed(&mut self, name: &Name) -> Result<(), ControlError> {
        let volume = self.volume(name.as_str())?;
        let mut record = volume.record.clone();
        let was = (record.growing.is_some(), record.untold);
        record.untold |= volume.lost;
        match self.reopen_stored(&mut record, true) {
            Ok(made) => {
                tracing::info!(volume = %name, "the volume could be opened after all");
                self.take_restored(record, was, Ok(made));
                Ok(())
            }
            Err(error) => {
                self.take_failed(&record, &error);
                Err(error)
            }
        }
    }

    /// A volume could not be opened once more; the record tells of losses that were found out.
    pub(super) fn take_failed(&mut self, record: &VolumeRecord, error: &ControlError) {
        let (name, reason) = (&record.spec.name, self.why_failed(record, error));
        let Some(volume) = self.volumes.get_mut(name) else { return };
        volume.lost |= record.untold;
        if volume.live.as_ref().err() != Some(&reason) {
            tracing::error!(volume = %name, reason, "the volume could not be restored");
            volume.live = Err(reason);
        }
    }

    /// `was`: whether it was growing, and whether its record told of a loss, before it was to be opened.
    pub(super) fn take_restored(&mut self, mut record: VolumeRecord, was: (bool, bool), made: Result<LiveGraph, String>) {
        let (was_growing, was_untold) = was;
        // What the opening has found out is stored by who compares it with the record (`note_legs`).
        let is_untold = std::mem::replace(&mut record.untold, was_untold);
        if let Ok(made) = made.as_ref()
            && is_untold
        {
            made.switch.note_loss();
        }
        let lost = is_untold && made.is_err();
        let (live, graph) = match made {
            Ok(made) => (Ok(namespace(Arc::<Switch>::clone(&made.switch), &record, self.keeper.as_ref())), Some(made)),
            Err(reason) => (Err(reason), None),
        };
        let (name, is_settled) = (record.spec.name.clone(), was_growing && record.growing.is_none());
        self.volumes.insert(name.clone(), Volume { record, live, graph, lost });
        if is_settled {
            self.follow_below(&name);
            self.settled.push(name);
        }
    }

    /// Shows a namespace that a controller had, also where its shard does not answer, when that is back: without it a pair that was begun there
    /// would not be finished, and others' guests go on with the volume, and write between its Compare and its Write.
    pub(super) fn show_surely(&self, live: &Live, at: &NamespaceRecord) -> Result<(), ControlError> {
        loop {
            match self.show_again(live, at) {
                Err(ControlError::Silent { .. }) if matches!(live, Live::Controller(_)) => live.finish_pairs()?,
                shown => return shown,
            }
        }
    }

    /// Whether the device has the volume already.
    fn has(&self, device: &Name, attach: &AttachSpec) -> bool {
        let record = self.devices.get(device).map(|device| &device.record);
        record.is_some_and(|record| record.namespaces.iter().any(|namespace| namespace.volume == attach.volume))
    }
}
