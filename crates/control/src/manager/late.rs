//! Devices whose guests do not go on with the others when a worker takes over, and what they wait for.
//!
//! ```text
//!   restore ─► a device whose guest had a namespace that is not there ────────────┐
//!           └► one into whose guest's memory the dead worker may still read ─┐    │
//!                                                                            ▼    ▼
//!                                              a thread looks again ─► volumes are opened, the guest goes on
//! ```
//!
//! A guest whose commands were carried out without their namespace would get errors that it does not come back from. And what it was told is
//! completed it uses for something else: a read that the dead worker had begun must not come after that (`crate::witness`).
//!
//! How long for? A hung back end is not a death: its guests wait for it without a limit. But nobody else should, and there is one witness for
//! all requests of a worker. So a device waits for it only on account of volumes in [`Doubt`]:
//! * Of a file that is written the lock is this worker's alone: once it has it, the dead worker's requests there have ended. No doubt, no wait.
//! * A file that is only read may be locked by several at once, so that its lock tells nothing. But this worker has opened it, which is to say that
//!   its disk answers. The same where a leg was out of use before the dead worker ended. After [`PATIENCE`] it is others' requests that have not ended.
//! * Of what this worker has not opened, it knows nothing but what the witness tells.
//!
//! A file system that does not answer would hang whoever opens a volume there, and so would the source of its key. So the files are looked at and keys
//! fetched before, and volumes of which that does not end in time are taken for missing ones until it does ([`super::looks`]), whether there was a worker
//! before this one or not. So are those with an erasure to complete ([`super::erasures`]).
//!
//! The API waits for none of it, but while volumes are being opened, and for a shard's answer: what exists is locked then.
//!
//! Nobody else would do better: another worker does not find a file either that is not there, and waits for one that is kept, for a second with
//! all guests. So there is no upgrade meanwhile ([`Inner::why_waited_for`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    iter, thread,
    time::{Duration, Instant},
};

use millrace_block::VolumeError;
use millrace_services::{FetchedKey, FetchedKeys, Leaf, key_sources, migrate::stacks};

use super::{
    Device, Inner, Manager, Volume, WeakManager,
    erasures::is_unfinished,
    looks::{Found, Looks, mount_points},
    restore::go_on,
};
use crate::{
    Name,
    daemon::monotonic_micros,
    devices::Restored,
    disks::Live,
    error::ControlError,
    model::CopyState,
    store::{CopyRecord, DeviceRecord, NamespaceRecord, VolumeRecord},
    witness::Earlier,
};

/// How long a read of a disk that answers may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long all guests wait for files that the dead worker's requests keep. From then on only those of the volumes that are made of them do.
const HASTE: Duration = Duration::from_secs(1);
/// The same later, for one that nobody kept a moment ago.
const MOMENT: Duration = Duration::from_millis(100);
/// How long nobody is served for a file system that does not answer. Where no guest waits, a disk may have to start turning.
const ANSWER: Duration = Duration::from_secs(1);
const ANSWER_AT_START: Duration = Duration::from_secs(3);
/// How long for files that answer one by one, and slowly.
const ALL_ANSWERS: Duration = Duration::from_secs(2);
/// How soon is looked again, at first and at last.
const FIRST_LOOK: Duration = Duration::from_millis(2);
const LOOK: Duration = Duration::from_secs(1);
/// A try to open volumes, while which nothing can be changed, is followed by so many times its length without one.
const REST: u32 = 30;
/// And an erasure that failed by as much, at least so long.
const REST_OF_ERASURES: Duration = Duration::from_secs(60);
/// Why a virtio disk does not show a volume that is there.
pub(super) const HELD_UP: &str = "its guest does not go on yet";

/// Why the dead worker may still have requests under way for a volume that this one has looked at: see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doubt {
    /// Its disks answer.
    Brief,
    /// Not all of it was opened.
    Lasting,
}

/// How far the completion of an erasure is that was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Erasure {
    Due,
    /// A thread is at it.
    UnderWay,
    /// It has failed, and is tried again from then on.
    Failed(Instant),
}

/// Who waits.
#[derive(Default)]
pub(super) struct Late {
    earlier: Earlier,
    /// When this worker began to open files, by the system's clock in microseconds.
    began: u64,
    /// Until when volumes in brief doubt are waited for. `None`: there was no worker before this one.
    until: Option<Instant>,
    /// Volumes that are opened later if their files are in use, and until when they are waited for before.
    hasty: BTreeSet<Name>,
    hurry: Option<Instant>,
    /// Volumes whose files did not answer in time, and what is made of them; whether they are free since, for all that is known.
    unheard: BTreeMap<Name, bool>,
    /// Of these, whose key commands have not ended.
    keyless: BTreeSet<Name>,
    /// And those with an erasure to complete.
    erasing: BTreeMap<Name, Erasure>,
    /// What the last looks at volumes that are missed have found.
    found: BTreeMap<Name, Found>,
    /// Volumes that were opened later, and are not shown to guests that do not wait.
    unshown: BTreeSet<Name>,
    /// Devices whose shards have not come to what the dead worker had begun.
    silent: BTreeSet<Name>,
    /// The worker lets go: whatever is late is the next one's.
    leaves: bool,
    doubts: BTreeMap<Name, Doubt>,
    /// The devices, with the volumes that they showed and that were in doubt.
    devices: BTreeMap<Name, BTreeSet<Name>>,
}

impl Late {
    /// How long a stored volume's files are waited for at most.
    pub(super) fn patience(&self, volume: &Name) -> Duration {
        let hurry = self.hurry.filter(|_| self.hasty.contains(volume) || self.unheard.contains_key(volume));
        hurry.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()))
    }

    /// When this worker began to open files, by the system's clock in microseconds.
    pub(super) fn began(&self) -> u64 {
        self.began
    }

    /// A volume has an erasure to complete: it, and what is made of it, waits for that as for files that do not answer.
    pub(super) fn note_erasing(&mut self, volume: &Name) {
        self.unheard.insert(volume.clone(), false);
        self.erasing.entry(volume.clone()).or_insert(Erasure::Due);
    }

    /// Volumes to whose erasures a thread is to be set, and whether one was before.
    pub(super) fn due_erasures(&self) -> Vec<(Name, bool)> {
        let now = Instant::now();
        let due = self.erasing.iter().filter_map(|(name, erasure)| match erasure {
            Erasure::Due => Some((name.clone(), false)),
            Erasure::Failed(until) => (*until <= now).then(|| (name.clone(), true)),
            Erasure::UnderWay => None,
        });
        due.collect()
    }

    /// A thread is set to it.
    pub(super) fn begin_erasing(&mut self, volume: &Name) {
        self.erasing.insert(volume.clone(), Erasure::UnderWay);
    }

    /// It is complete.
    pub(super) fn end_erasing(&mut self, volume: &Name) {
        self.erasing.remove(volume);
    }

    /// It has failed after so long. Where the volume is still waited for, it is tried again later: meanwhile that can be deleted, and keeps no other
    /// worker away, which could try it as well.
    pub(super) fn fail_erasing(&mut self, volume: &Name, took: Duration) {
        if !self.unheard.contains_key(volume) {
            self.erasing.remove(volume);
            self.hasty.remove(volume);
            return;
        }
        let until = Instant::now() + (took * REST).max(REST_OF_ERASURES);
        self.erasing.insert(volume.clone(), Erasure::Failed(until));
        self.found.insert(volume.clone(), Found::Free);
    }

    /// The first volume with an erasure that is not complete, nor has failed.
    pub(super) fn erasing(&self) -> Option<&Name> {
        let (name, _) = self.erasing.iter().find(|(_, erasure)| !matches!(erasure, Erasure::Failed(_)))?;
        Some(name)
    }

    /// A volume was opened later, or is not waited for any more.
    pub(super) fn note_opened(&mut self, volume: &Name) {
        self.hasty.remove(volume);
        self.unheard.remove(volume);
        self.keyless.remove(volume);
    }

    pub(super) fn has(&self, device: &Name) -> bool {
        self.devices.contains_key(device)
    }

    /// It is gone.
    pub(super) fn forget(&mut self, device: &Name) {
        self.devices.remove(device);
        self.silent.remove(device);
    }

    /// A volume is gone, or not this worker's to open.
    pub(super) fn forget_volume(&mut self, volume: &Name) {
        self.found.remove(volume);
        self.note_opened(volume);
        self.erasing.remove(volume);
        self.unshown.remove(volume);
    }

    /// Whether a volume's files have not answered up to now.
    pub(super) fn is_unheard(&self, volume: &Name) -> bool {
        self.unheard.get(volume) == Some(&false)
    }

    /// Whether a volume's files had not answered when it was last to be opened, whatever they have done since.
    pub(super) fn may_hang(&self, volume: &Name) -> bool {
        self.unheard.contains_key(volume)
    }

    /// From now on nothing is opened or shown any more.
    pub(super) fn leave(&mut self) {
        self.leaves = true;
    }

    /// Whether requests of dead workers may be under way for one of these volumes.
    fn holds_up(&self, volumes: &BTreeSet<Name>) -> bool {
        let brief = self.until.is_some_and(|until| Instant::now() < until);
        let holds = |doubt: &Doubt| *doubt == Doubt::Lasting || brief;
        !self.earlier.have_ended() && volumes.iter().filter_map(|volume| self.doubts.get(volume)).any(holds)
    }
}

// ---- before guests go on --------------------------------------------------------------------------------------------

impl Inner {
    /// Which volumes may be opened later, if the dead worker's requests keep their files: those that devices show. Not where more would be
    /// lost than time: what others are made of is a leg that they would go without, a migration or a growth would be given up, a copy fail.
    pub(super) fn be_hasty(&mut self, volumes: &[VolumeRecord], devices: &[DeviceRecord], copies: &[CopyRecord]) {
        if self.keeper.as_ref().is_none_or(|keeper| keeper.predecessor().is_none()) {
            return;
        }
        self.late.began = monotonic_micros();
        let shown = devices.iter().flat_map(|device| &device.namespaces).map(|namespace| &namespace.volume);
        let copied = copies.iter().filter(|copy| matches!(copy.state, CopyState::Running | CopyState::Paused));
        let copied: BTreeSet<_> = copied.flat_map(|copy| [&copy.source, &copy.target]).collect();
        let below: BTreeSet<_> =
            volumes.iter().flat_map(|volume| volume.spec.stack.leaves()).filter_map(Leaf::volume).collect();
        let is_whole = |volume: &&VolumeRecord| {
            let (name, is_moving) = (&volume.spec.name, stacks::migration(&volume.spec.stack).is_some());
            !is_moving && volume.growing.is_none() && !copied.contains(name) && !below.contains(name.as_str())
        };
        let whole: BTreeSet<_> = volumes.iter().filter(is_whole).map(|volume| &volume.spec.name).collect();
        self.late.hasty = shown.filter(|name| whole.contains(name)).cloned().collect();
        self.late.hurry = Some(Instant::now() + HASTE);
    }

    /// Finds the volumes whose files do not answer, nor the sources of their keys, before they are opened: what hangs then keeps everybody waiting.
    /// Where no guest waits there is no end to it as long as some others do answer: they may be many, and slow.
    pub(super) fn look_first(&mut self, volumes: &[VolumeRecord]) -> Looks {
        let is_asked = |record: &&VolumeRecord| {
            let stack = &record.spec.stack;
            stack.leaves().into_iter().any(|leaf| leaf.file().is_some()) || !key_sources(stack).is_empty()
        };
        let limit = if self.late.hurry.is_some() { ANSWER } else { ANSWER_AT_START };
        let mut looks = Looks::default();
        looks.ask(volumes.iter().filter(is_asked).cloned().collect(), mount_points());
        let end = self.late.hurry.map(|_| Instant::now() + ALL_ANSWERS);
        let until = |soon: Instant| end.map_or(soon, |end| soon.min(end));
        while looks.next_done(until(Instant::now() + limit), true).is_some() {}
        self.late.unheard = looks.unanswered().map(|name| (name.clone(), false)).collect();
        self.late.keyless = looks.keyless().cloned().collect();
        looks
    }

    /// Opens volumes with keys that were fetched for that. Nobody gets them later: by then their sources may have others.
    pub(super) fn with_keys<R>(&mut self, keys: Vec<FetchedKey>, open: impl FnOnce(&mut Self) -> R) -> R {
        let fetched = FetchedKeys::of(&self.means.shared);
        fetched.add(keys);
        let opened = open(self);
        fetched.forget();
        opened
    }

    /// Why a stored volume is not opened yet: it, or something that it is made of, does not answer. All of it waits: without a leg it would go on
    /// with less, and a growth or a migration be given up.
    pub(super) fn why_unheard(&mut self, record: &VolumeRecord) -> Option<String> {
        let (name, stack) = (&record.spec.name, &record.spec.stack);
        let leaves = stack.leaves().into_iter();
        let is_unheard = self.late.is_unheard(name);
        let what = if is_unheard && self.late.keyless.contains(name) {
            let sources: Vec<_> = key_sources(stack).iter().map(ToString::to_string).collect();
            format!("the source of its key, {}, does not answer", sources.join(" or "))
        } else if is_unheard {
            let files = leaves.filter_map(Leaf::file).chain(stack.setting_files());
            let files: Vec<_> = files.map(|path| path.display().to_string()).collect();
            format!("the file system of {} does not answer", files.join(" or "))
        } else {
            let mut below = leaves.filter_map(|leaf| self.volumes.get_key_value(leaf.volume()?));
            let (below, _) = below.find(|(below, _)| self.late.is_unheard(below))?;
            if self.late.erasing.contains_key(below) {
                let why = format!("volume {below}, of which it is made, is being erased; it is opened when that is done");
                self.late.unheard.insert(name.clone(), false);
                return Some(why);
            }
            format!("volume {below}, of which it is made, does not answer")
        };
        self.late.unheard.insert(name.clone(), false);
        Some(format!("{what}; it is opened when that does: see to the disk, file system or network, or delete the volume"))
    }

    /// Notes what is in doubt of volumes that have just been opened, or not. Nobody is in a hurry any more.
    pub(super) fn note_doubts(&mut self) {
        self.late.hurry = None;
        let volumes = &self.volumes;
        self.late.hasty.retain(|name| volumes.get(name).is_some_and(|volume| volume.live.is_err()));
        let Some(keeper) = self.keeper.as_ref().filter(|keeper| keeper.predecessor().is_some()) else { return };
        self.late.earlier = Earlier::of(keeper);
        self.late.until = Some(Instant::now() + PATIENCE);
        let doubt = |(name, volume): (&Name, &Volume)| Some((name.clone(), self.doubt(volume)?));
        self.late.doubts = self.volumes.iter().filter_map(doubt).collect();
    }

    fn doubt(&self, volume: &Volume) -> Option<Doubt> {
        let record = &volume.record;
        let Some(live) = &volume.graph else { return Some(Doubt::Lasting) };
        let out_of_use = live.graph.out_of_use();
        // What is stored was so while the dead worker lived.
        let is_new = |leg: &String| !record.out_of_use.contains(leg);
        if out_of_use.iter().any(is_new) || self.given_up.contains(&record.spec.name) {
            return Some(Doubt::Lasting);
        }
        let reads_files = record.spec.read_only && record.spec.stack.leaves().into_iter().any(|leaf| leaf.file().is_some());
        (reads_files || !out_of_use.is_empty()).then_some(Doubt::Brief)
    }

    /// The volumes in doubt that a device shows, and what they are made of.
    fn in_doubt(&self, record: &DeviceRecord) -> BTreeSet<Name> {
        let shown = record.namespaces.iter().map(|namespace| &namespace.volume);
        let all = shown.flat_map(|name| iter::once(name.clone()).chain(self.below_with(name.as_str(), true)));
        all.filter(|name| self.late.doubts.contains_key(name)).collect()
    }

    /// Whether a device is to be brought back without its volume: a virtio disk's guest goes on as soon as that is there.
    pub(super) fn is_held_up(&self, record: &DeviceRecord, live: &Live) -> bool {
        let is_there = |at: &NamespaceRecord| self.namespace_of(&at.volume).is_ok();
        let is_ready = matches!(live, Live::Disk(_)) && record.namespaces.iter().all(is_there);
        is_ready && self.late.holds_up(&self.in_doubt(record))
    }

    /// Shows a namespace that a device had.
    pub(super) fn show_again(&self, live: &Live, at: &NamespaceRecord) -> Result<(), ControlError> {
        let by_guest = self.volumes.get(&at.volume).is_some_and(|volume| volume.record.created_by.is_some());
        let namespace = self.namespace_of(&at.volume)?;
        let (nsid, read_only, attached) = (at.nsid, at.read_only, at.attached);
        live.restore(Restored { nsid, namespace, read_only, by_guest, attached })
    }

    /// Finds the devices that are to wait.
    pub(super) fn hold_back(&mut self) {
        // Where there was no worker before this one, a virtio disk still is to show what is opened later.
        let may_wait = |device: &&Device| {
            let mut shown = device.record.namespaces.iter();
            self.late.until.is_some() || shown.any(|at| self.late.unheard.contains_key(&at.volume))
        };
        let late = self.devices.values().filter(may_wait).filter_map(|device| {
            let volumes = self.in_doubt(&device.record);
            // What it was held up by may be over by now: then that is found at the first look.
            let is_late = self.is_late(device, &volumes) || device.failed.values().any(|reason| reason == HELD_UP);
            is_late.then(|| (device.record.spec.name.clone(), volumes))
        });
        self.late.devices = late.collect();
        for device in self.late.devices.keys().filter_map(|name| self.devices.get(name)) {
            if let Some(why) = self.why_late(device) {
                tracing::warn!(device = %device.record.spec.name, "{why}");
            }
        }
    }

    /// Whether a device's guest has to wait; these of its volumes are in doubt.
    fn is_late(&self, device: &Device, volumes: &BTreeSet<Name>) -> bool {
        let is_held_up = self.late.holds_up(volumes);
        if device.failed.is_empty() && !is_held_up {
            return false;
        }
        match &device.live {
            Ok(Live::Controller(live)) => match live.misses(device.failed.keys().copied().collect()) {
                Ok(Some(missing)) => is_held_up || !missing.is_empty(),
                // It is asked again when its shard is back.
                Err(ControlError::Silent { .. }) => true,
                Ok(None) | Err(_) => false,
            },
            Ok(Live::Disk(_)) => {
                let mut shown = device.record.namespaces.iter();
                !device.failed.is_empty() && (is_held_up || shown.any(|at| self.namespace_of(&at.volume).is_err()))
            }
            Err(_) => false,
        }
    }

    /// Why a device's guest waits, if it does.
    pub(super) fn why_late(&self, device: &Device) -> Option<String> {
        let volumes = self.late.devices.get(&device.record.spec.name)?;
        if let Some((nsid, reason)) = device.failed.iter().find(|(_, reason)| *reason != HELD_UP) {
            return Some(format!(
                "its guest waits for namespace {nsid} ({reason}), which is tried again: put that right, or detach the namespace"
            ));
        }
        if self.late.silent.contains(&device.record.spec.name) {
            return Some("its guest waits for its shard, which does not answer, to go on with what was begun".to_owned());
        }
        let volumes: Vec<_> = volumes.iter().map(Name::as_str).collect();
        Some(format!(
            "its guest waits until the kernel has ended what the worker before this one asked of disks, for which volume {} may be one",
            volumes.join(", ")
        ))
    }

    /// Until its guest goes on, a device shows what it showed.
    pub(super) fn check_goes_on(&self, device: &str) -> Result<(), ControlError> {
        let device = self.device(device)?;
        match self.why_late(device) {
            Some(why) => Err(ControlError::untimely("device", &device.record.spec.name, why)),
            None => Ok(()),
        }
    }
}

// ---- afterwards -----------------------------------------------------------------------------------------------------

impl Manager {
    /// Looks after those that wait, and after the dead worker's last requests, in a thread of its own.
    pub(super) fn attend_late(&self, inner: &Inner, looks: Looks) {
        if inner.is_all_over() {
            return;
        }
        let manager = self.itself.clone();
        let spawned = thread::Builder::new().name("millrace-late".to_owned()).spawn(move || attend(&manager, looks));
        if let Err(error) = spawned {
            tracing::error!(%error, "no thread for devices that wait: their guests do so until the next worker takes over");
        }
    }

    /// One look at those that wait, with what was found of volumes' files, and the keys of those. Whether some still do.
    fn look_at_late(&self, found: BTreeMap<Name, Found>, keys: Vec<FetchedKey>) -> bool {
        self.reach_all();
        let inner = &mut *self.peek();
        if inner.stopping || inner.late.leaves {
            return false;
        }
        inner.late.earlier.look();
        let is_free = |(_, found): &(&Name, &Found)| !matches!(found, Found::Kept(_));
        let free: BTreeSet<_> = found.iter().filter(is_free).map(|(name, _)| name.clone()).collect();
        inner.note_found(found);
        let opened = inner.with_keys(keys, |inner| inner.open_again(&free));
        self.complete_erasures(inner);
        if !opened.is_empty() {
            // Before anybody is shown them.
            inner.forget_late(&opened, &*self.host);
            self.take_in(inner, opened);
        }
        // Those of volumes that answer now: one that cannot be opened all the same has failed.
        self.launch_copies(inner);
        // A shard that was silent may have kept more from being shown.
        let unasked = inner.show_missing();
        inner.show_others(&unasked);
        inner.let_go_on();
        if inner.is_nobody_late() && !self.is_on_trial() {
            self.drop_untaken(inner);
        }
        !inner.is_all_over()
    }

    /// Notes volumes that were opened later, for devices to show.
    pub(super) fn take_in(&self, inner: &mut Inner, opened: BTreeSet<Name>) {
        inner.renew_doubts(&opened);
        if let Err(error) = self.store_settled(inner) {
            tracing::error!(%error, "the sizes of volumes that had grown could not be stored");
        }
        self.note_legs(inner);
        inner.late.unshown.extend(opened);
        self.attend_migrations(inner);
        self.retrace_all(inner);
    }

    /// Volumes that somebody waits for, and that may be looked at.
    fn missed(&self) -> Vec<VolumeRecord> {
        let inner = self.peek();
        let names = inner.missed();
        let asked = names.iter().filter(|name| !inner.late.erasing.contains_key(*name));
        asked.filter_map(|name| Some(inner.volumes.get(name)?.record.clone())).collect()
    }
}

/// Looks after those that wait until nobody does.
fn attend(weak: &WeakManager, mut looks: Looks) {
    let (mut pause, mut next) = (FIRST_LOOK, Instant::now());
    loop {
        let until = Instant::now() + pause;
        let is_time = Instant::now() >= next;
        if is_time {
            let Some(manager) = weak.upgrade() else { return };
            let missed = manager.missed();
            drop(manager);
            let mounts = if missed.is_empty() { Vec::new() } else { mount_points() };
            looks.ask(missed, mounts);
        }
        let found: BTreeMap<_, _> = iter::from_fn(|| looks.next_done(until, is_time)).collect();
        thread::sleep(until.saturating_duration_since(Instant::now()));
        pause = (pause * 2).min(LOOK);
        let Some(manager) = weak.upgrade() else { return };
        let (began, tries) = (Instant::now(), found.values().any(|found| !matches!(found, Found::Kept(_))));
        if !manager.look_at_late(found, looks.take_keys()) {
            return;
        }
        if tries {
            next = Instant::now() + began.elapsed() * REST;
        }
    }
}

impl Inner {
    fn is_all_over(&self) -> bool {
        self.is_nobody_late() && self.late.earlier.have_ended()
    }

    /// Whether no volume and no guest is waited for.
    pub(super) fn is_nobody_late(&self) -> bool {
        self.late.devices.is_empty() && self.late.unshown.is_empty() && self.missed().is_empty()
    }

    /// Whether a volume could not be opened. One on its way here is not this worker's to open yet.
    fn is_missing(&self, volume: &Name) -> bool {
        self.volumes.get(volume).is_some_and(|volume| volume.live.is_err() && !volume.is_received())
    }

    /// Volumes that are to be opened.
    fn missed(&self) -> BTreeSet<Name> {
        let late = self.late.devices.keys().filter_map(|name| self.devices.get(name));
        let shown = late.flat_map(|device| &device.record.namespaces).map(|namespace| &namespace.volume);
        let below = shown.flat_map(|name| iter::once(name.clone()).chain(self.below_with(name.as_str(), true)));
        let later = self.late.hasty.iter().chain(self.late.unheard.keys()).cloned();
        below.chain(later).filter(|name| self.is_missing(name)).collect()
    }

    /// Why no other worker may take this one's place: it would do no better, and all guests wait meanwhile. Nothing is looked at here: a file
    /// system may not answer.
    pub(super) fn why_waited_for(&self) -> Option<String> {
        self.missed().into_iter().find_map(|name| {
            let device = self.who_shows(&name).map(|device| &device.record.spec.name);
            let what = match self.late.found.get(&name) {
                Some(Found::Free) => return None,
                // Nobody's namespace would be missed.
                Some(Found::Gone(_)) if device.is_none() => return None,
                Some(Found::Gone(path)) => format!("{} is not there", path.display()),
                Some(Found::Kept(path)) => {
                    format!("{} is in use, by requests of the worker before this one or by somebody else", path.display())
                }
                None => "its files have not been looked at yet, for which their disk has to answer".to_owned(),
            };
            let why = "another worker would do no better, and all guests would wait for it";
            Some(match device {
                Some(device) => format!(
                    "volume {name}, which device {device} is to show: {what}; {why}: put the file back, or have its disk answer; or detach the \
                     namespace (\"millrace device detach\"), or delete the device"
                ),
                None => format!("volume {name}: {what}; {why}: have its disk answer, or delete the volume"),
            })
        })
    }

    /// Takes what was found of volumes' files. What is made of one that somebody keeps waits on: it would be opened without it.
    fn note_found(&mut self, found: BTreeMap<Name, Found>) {
        for (name, found) in &found {
            let Some(heard) = self.late.unheard.get_mut(name) else { continue };
            *heard = !matches!(found, Found::Kept(_));
            let failed = self.volumes.get_mut(name).filter(|volume| volume.live.is_err());
            if let (Found::Kept(path), Some(volume)) = (found, failed) {
                volume.live = Err(format!("{} is in use; the volume is opened when that is over", path.display()));
            }
        }
        self.late.found.extend(found);
    }

    /// A volume could not be opened. One that did not answer before is waited for on account of its lock, or of a device that is to show it.
    pub(super) fn note_failed(&mut self, name: &Name, error: &ControlError) {
        if is_unfinished(error) {
            return;
        }
        let Some(heard) = self.late.unheard.get_mut(name) else { return };
        if matches!(error, ControlError::Volume(VolumeError::InUse { .. })) {
            *heard = false;
        } else if self.who_shows(name).is_none() {
            self.late.unheard.remove(name);
        }
    }

    /// A device that is to show a volume, or something that is made of it.
    fn who_shows(&self, name: &Name) -> Option<&Device> {
        let shows =
            |device: &&Device| device.record.namespaces.iter().any(|at| self.is_over(at.volume.as_str(), name.as_str()));
        self.devices.values().find(shows)
    }

    /// Opens those of these volumes that are not open; which it did.
    fn open_again(&mut self, free: &BTreeSet<Name>) -> BTreeSet<Name> {
        let is_closed = |name: &&Name| self.is_missing(name) && self.idle_volume(name.as_str()).is_ok();
        let mut left: Vec<_> = free.iter().filter(is_closed).cloned().collect();
        let mut opened = BTreeSet::new();
        while !left.is_empty() {
            // One that is made of others is opened after them.
            let is_first = |name: &Name| self.below_with(name.as_str(), true).iter().all(|below| !left.contains(below));
            let at = left.iter().position(is_first).unwrap_or(0);
            let name = left.remove(at);
            let waits = |below: &Name| self.late.is_unheard(below) && self.is_missing(below);
            if self.below_with(name.as_str(), true).iter().any(waits) {
                continue;
            }
            self.late.hurry = Some(Instant::now() + MOMENT);
            if let Err(error) = self.reopen_failed(&name) {
                self.note_failed(&name, &error);
                continue;
            }
            self.late.note_opened(&name);
            opened.insert(name);
        }
        self.late.hurry = None;
        opened
    }

    fn renew_doubts(&mut self, opened: &BTreeSet<Name>) {
        for name in opened {
            match self.volumes.get(name).and_then(|volume| self.doubt(volume)) {
                Some(doubt) => self.late.doubts.insert(name.clone(), doubt),
                None => self.late.doubts.remove(name),
            };
        }
    }

    /// Has controllers show volumes that were opened later: those whose guests wait, or the others. Which could not be asked.
    fn show_opened(&mut self, opened: &BTreeSet<Name>, late: bool) -> BTreeSet<Name> {
        let names: Vec<_> = self.devices.keys().filter(|name| self.late.has(name) == late).cloned().collect();
        let mut unasked = BTreeSet::new();
        for name in names {
            let is_controller = matches!(self.devices.get(&name), Some(Device { live: Ok(Live::Controller(_)), .. }));
            if is_controller && !self.show_failed(&name, opened) {
                unasked.insert(name);
            }
        }
        unasked
    }

    /// Has controllers whose guests wait show what they could not show, where it is there. Which could not be asked.
    fn show_missing(&mut self) -> BTreeSet<Name> {
        let there: BTreeSet<_> =
            self.volumes.values().filter(|it| it.live.is_ok()).map(|it| it.record.spec.name.clone()).collect();
        self.show_opened(&there, true)
    }

    /// Has devices whose guests do not wait show volumes that were opened later, once what the dead worker's guests had begun to write there
    /// goes before what these write. A shard that hangs keeps nobody waiting but for its own devices' volumes. `unasked`: without a namespace,
    /// a device begins no pair there, whether it answers by now or not.
    fn show_others(&mut self, unasked: &BTreeSet<Name>) {
        if self.late.unshown.is_empty() && self.late.silent.is_empty() {
            return;
        }
        let late = self.late.devices.keys().filter_map(|name| self.devices.get(name));
        let begin = |device: &Device| match device.live.as_ref().map(Live::begin_pairs) {
            Ok(Err(ControlError::Silent { .. })) => false,
            Ok(Err(error)) => {
                tracing::error!(device = %device.record.spec.name, %error, "what was begun is not finished");
                true
            }
            Ok(Ok(())) | Err(_) => true,
        };
        let is_silent = |device: &&Device| unasked.contains(&device.record.spec.name) || !begin(device);
        let silent: Vec<&Device> = late.filter(is_silent).collect();
        let theirs = silent.iter().flat_map(|device| &device.record.namespaces).map(|at| &at.volume);
        let theirs: BTreeSet<Name> = theirs.cloned().collect();
        self.late.silent = silent.iter().map(|device| device.record.spec.name.clone()).collect();
        let unshown = std::mem::take(&mut self.late.unshown).into_iter();
        let (kept, ready): (BTreeSet<_>, BTreeSet<_>) = unshown.partition(|name| theirs.contains(name));
        self.late.unshown = kept;
        if !self.show_opened(&ready, false).is_empty() {
            self.late.unshown.extend(ready);
        }
    }

    /// Has a device show those of these volumes that it could not show. Whether its shard answered.
    fn show_failed(&mut self, name: &Name, volumes: &BTreeSet<Name>) -> bool {
        let Some(device) = self.devices.get(name) else { return true };
        let Ok(live) = &device.live else { return true };
        let failed = |at: &&NamespaceRecord| device.failed.contains_key(&at.nsid) && volumes.contains(&at.volume);
        let shown = device.record.namespaces.iter().filter(failed).map(|at| (at.nsid, self.show_again(live, at)));
        let shown: Vec<_> = shown.collect();
        let is_new = shown.iter().any(|(_, shown)| shown.is_ok());
        let answered = !shown.iter().any(|(_, shown)| matches!(shown, Err(ControlError::Silent { .. })));
        let Some(device) = self.devices.get_mut(name) else { return true };
        for (nsid, shown) in shown {
            match shown {
                Ok(()) => drop(device.failed.remove(&nsid)),
                Err(error) => {
                    let reason = error.to_string();
                    if device.failed.get(&nsid) != Some(&reason) {
                        tracing::error!(device = %name, nsid, reason, "a namespace could not be restored");
                        device.failed.insert(nsid, reason);
                    }
                }
            }
        }
        if is_new {
            self.lead_limited(&self.devices[name]);
        }
        answered
    }

    /// Has devices go on with their guests that have nothing more to wait for.
    fn let_go_on(&mut self) {
        let is_late = |name: &Name, volumes: &BTreeSet<Name>| {
            self.devices.get(name).is_some_and(|device| self.is_late(device, volumes))
        };
        let is_over = |name: &Name, volumes: &BTreeSet<Name>| !self.late.silent.contains(name) && !is_late(name, volumes);
        let over = self.late.devices.iter().filter(|(name, volumes)| is_over(name, volumes));
        let over: Vec<_> = over.map(|(name, _)| name.clone()).collect();
        for name in over {
            let device = self.devices.get(&name);
            let disk = device.filter(|device| matches!(device.live, Ok(Live::Disk(_))));
            let shown = disk.map(|disk| disk.record.namespaces.iter().map(|at| at.volume.clone()).collect());
            if shown.is_some_and(|shown| !self.show_failed(&name, &shown)) {
                // It is shown at a later look.
                continue;
            }
            self.late.forget(&name);
            let Some(device) = self.devices.get(&name) else { continue };
            if let Ok(live @ Live::Controller(_)) = &device.live {
                go_on(&name, live);
            }
            tracing::info!(device = %name, "has nothing more to wait for");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::looks::tests::record;

    #[test]
    fn who_waits_for_the_dead_workers_last_request_and_how_long() {
        let volumes: BTreeSet<Name> = ["v", "w"].into_iter().map(|name| name.parse().unwrap()).collect();
        let late = |doubt, until| {
            let doubts = volumes.first().map(|name| (name.clone(), doubt)).into_iter().collect();
            Late { earlier: Earlier::unfinished(), until, doubts, ..Late::default() }
        };
        let (now, later) = (Some(Instant::now()), Some(Instant::now() + Duration::from_secs(3600)));
        assert!(late(Doubt::Brief, later).holds_up(&volumes));
        assert!(!late(Doubt::Brief, now).holds_up(&volumes), "its disk answers");
        assert!(late(Doubt::Lasting, now).holds_up(&volumes), "nobody knows of its disk");
        let others = volumes.iter().skip(1).cloned().collect();
        assert!(!late(Doubt::Lasting, later).holds_up(&others), "whose files are locked");
        let over = Late { earlier: Earlier::default(), ..late(Doubt::Lasting, later) };
        assert!(!over.holds_up(&volumes), "the last request has ended");
    }

    /// With one volume that could not be opened, for this reason.
    fn missing(reason: &str) -> (Inner, Name) {
        let mut inner = Inner::default();
        let name: Name = "v".parse().unwrap();
        let record = record("v", "file:/away.img");
        inner.volumes.insert(name.clone(), Volume { record, live: Err(reason.to_owned()), graph: None, lost: false });
        inner.late.hasty.insert(name.clone());
        (inner, name)
    }

    #[test]
    fn nobody_takes_the_place_of_a_worker_that_waits_for_a_file() {
        let (mut inner, name) = missing("in use");
        let why = |inner: &Inner| inner.why_waited_for().unwrap_or_default();
        assert!(why(&inner).contains("have not been looked at"), "{}", why(&inner));
        inner.late.found.insert(name.clone(), Found::Kept("/away.img".into()));
        assert!(why(&inner).contains("volume v: /away.img is in use"), "{}", why(&inner));
        for harmless in [Found::Free, Found::Gone("/away.img".into())] {
            inner.late.found.insert(name.clone(), harmless);
            assert_eq!(inner.why_waited_for(), None, "out of this worker's reach, or nobody's");
        }
    }

    #[test]
    fn a_volume_on_its_way_here_is_not_opened_before_its_time() {
        let (inner, name) = missing(super::super::RECEIVED);
        assert_eq!((inner.missed().len(), inner.is_nobody_late()), (0, true));
        let (mut inner, _) = missing("in use");
        assert_eq!((inner.missed().len(), inner.is_nobody_late()), (1, false));
        inner.late.forget_volume(&name);
        assert_eq!((inner.missed().len(), inner.is_nobody_late()), (0, true));
    }

    #[test]
    fn only_the_start_is_in_a_hurry() {
        let (mut inner, name) = missing("in use");
        inner.late.hurry = Some(Instant::now());
        assert_eq!(inner.late.patience(&name), Duration::ZERO);
        inner.note_doubts();
        assert_eq!(inner.late.patience(&name), Duration::MAX);
    }

    #[test]
    fn what_answers_late_is_not_waited_for_with_everything_locked() {
        let late = Late { hurry: Some(Instant::now()), unheard: [("v".parse().unwrap(), true)].into(), ..Late::default() };
        let [there, other] = ["v", "w"].map(|name| late.patience(&name.parse().unwrap()));
        assert_eq!((there, other), (Duration::ZERO, Duration::MAX));
    }

    #[test]
    fn what_is_made_of_a_volume_that_is_kept_waits_with_it() {
        let (mut inner, name) = missing("does not answer");
        let made: Name = "m".parse().unwrap();
        let record = record("m", "mirror(volume:v, memory)");
        let live = Err("does not answer".to_owned());
        inner.volumes.insert(made.clone(), Volume { record, live, graph: None, lost: false });
        inner.late.unheard = [(name.clone(), false), (made.clone(), false)].into();
        let found = [(name.clone(), Found::Kept("/away.img".into())), (made.clone(), Found::Free)];
        inner.note_found(found.into());
        assert!(inner.late.is_unheard(&name) && !inner.late.is_unheard(&made));
        let why = inner.volumes[&name].live.as_ref().err().unwrap();
        assert!(why.contains("/away.img is in use"), "{why}");
        assert!(inner.open_again(&[made.clone()].into()).is_empty());
        let why = inner.volumes[&made].live.as_ref().err().unwrap();
        assert_eq!(why, "does not answer", "it is not even tried");
        // What could be locked a moment ago may be kept now.
        let in_use = VolumeError::InUse { volume: "v".to_owned(), path: "/away.img".into() };
        inner.late.unheard.insert(name.clone(), true);
        inner.note_failed(&name, &in_use.into());
        assert!(inner.late.is_unheard(&name));
        inner.note_failed(&name, &ControlError::NoVolume { name: "v".to_owned() });
        assert!(!inner.late.unheard.contains_key(&name), "nobody shows it");
    }

    #[test]
    fn an_erasure_that_failed_is_tried_again_much_later() {
        let (mut late, name): (Late, Name) = (Late::default(), "v".parse().unwrap());
        late.note_erasing(&name);
        assert_eq!((late.due_erasures(), late.erasing()), (vec![(name.clone(), false)], Some(&name)));
        late.begin_erasing(&name);
        assert_eq!((late.due_erasures(), late.erasing()), (Vec::new(), Some(&name)));
        late.fail_erasing(&name, Duration::ZERO);
        late.note_erasing(&name);
        assert_eq!((late.due_erasures(), late.erasing()), (Vec::new(), None), "others may change it");
        late.erasing.insert(name.clone(), Erasure::Failed(Instant::now()));
        assert_eq!(late.due_erasures(), [(name.clone(), true)]);
        late.note_opened(&name);
        late.hasty.insert(name.clone());
        late.fail_erasing(&name, Duration::ZERO);
        assert!(late.erasing.is_empty() && late.hasty.is_empty(), "nobody waits for it");
    }

    /// It may have begun a pair there, and begins it again only once it has it.
    #[test]
    fn what_a_silent_device_was_not_shown_nobody_else_is() {
        let (mut inner, name) = missing("in use");
        let device: Name = "d".parse().unwrap();
        let record = DeviceRecord {
            spec: serde_json::from_str(r#"{"name":"d","nvme":{}}"#).unwrap(),
            cntlid: 1,
            uuid: uuid::Uuid::nil(),
            namespaces: vec![NamespaceRecord { nsid: 1, volume: name.clone(), read_only: false, attached: true }],
            session: None,
            disk_kind: None,
        };
        let live = Err("none in this test".to_owned());
        inner.devices.insert(device.clone(), Device { record, live, failed: BTreeMap::new(), since: Instant::now() });
        inner.late.devices.insert(device.clone(), BTreeSet::new());
        inner.late.unshown.insert(name.clone());
        inner.show_others(&[device.clone()].into());
        assert!(inner.late.unshown.contains(&name) && inner.late.silent.contains(&device));
        inner.show_others(&BTreeSet::new());
        assert!(inner.late.unshown.is_empty() && inner.late.silent.is_empty());
    }
}
