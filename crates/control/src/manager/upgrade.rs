//! Another binary takes this one's place: devices are held, their state is left as the other understands it, and this process ends.
//!
//! All devices are handed over at once. What happens here makes the pause shorter and the successor's work less; what would happen
//! without it is what happens when a worker dies.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use millrace_keeper::{Layouts, Upgraded};
use millrace_services::{FetchedKey, KeySource, key_sources};
use uuid::Uuid;

use super::{Device, Ending, Inner, Manager, crew::Crew};
use crate::{
    Name,
    cells::folder,
    error::{Class, ControlError},
    upgrade::{Asked, UpgradeSpec, UpgradeState, UpgradeView, layouts},
};

/// How long shards are waited for, and then the end of a change: part of what the keeper gives.
const CHANGE_PATIENCE: Duration = Duration::from_millis(500);
/// How long commands in flight are waited for. The successor carries out again what has not finished then.
const QUIET_LIMIT: Duration = Duration::from_millis(100);
/// How long key commands are waited for: each has 10 s, and may have to wait for a thread.
const KEYS_LIMIT: Duration = Duration::from_secs(30);
/// How often is looked whether they have finished.
const LOOK: Duration = Duration::from_micros(200);

/// The last upgrade, as far as it is known.
#[derive(Debug, Default)]
pub(super) struct LastUpgrade {
    view: Option<UpgradeView>,
    /// Why this worker did not let go.
    refusal: Option<String>,
    /// It has let go: nothing is called off any more.
    has_let_go: bool,
}

impl Manager {
    /// Begins an upgrade; [`Self::last_upgrade`] tells how it goes.
    ///
    /// `is_asked`: whether whoever asked for it still waits, once all that may take long is done.
    pub fn upgrade(&self, spec: &UpgradeSpec, is_asked: impl FnOnce() -> bool) -> Result<UpgradeView, ControlError> {
        let id = Uuid::new_v4();
        let view = self.prepare_upgrade(spec, id, is_asked)?;
        if let Err(error) = self.begin_upgrade(spec, id) {
            self.last().view = None;
            return Err(error);
        }
        Ok(view)
    }

    /// From now on an upgrade is under way, of others at first: [`Self::begin_upgrade`] or [`Self::fail_upgrade`] follows.
    pub(crate) fn prepare_upgrade(
        &self,
        spec: &UpgradeSpec,
        id: Uuid,
        is_asked: impl FnOnce() -> bool,
    ) -> Result<UpgradeView, ControlError> {
        if !spec.binary.is_absolute() {
            let why = "the binary's path is not absolute".to_owned();
            return Err(ControlError::Upgrade { class: Class::Invalid, why });
        }
        // The lock is free: a file system may take its time.
        let (open, keys) = {
            let inner = self.peek();
            (inner.open_files(), inner.keys_in_use())
        };
        let why = open.iter().find_map(|(name, path)| lost(name, path));
        if let Some(why) = why.or_else(|| keyless(keys)).or_else(|| self.peek().in_the_midst()) {
            return Err(ControlError::Upgrade { class: Class::Conflict, why });
        }
        if !is_asked() {
            // The binary at that path may be another by now, and nobody looks after it.
            let why = "who asked for it has gone meanwhile".to_owned();
            return Err(ControlError::Upgrade { class: Class::Conflict, why });
        }
        let mut last = self.last();
        if last.view.as_ref().is_some_and(|view| view.state == UpgradeState::Running) {
            return Err(ControlError::Upgrading);
        }
        let view = UpgradeView::running(id, &spec.binary);
        *last = LastUpgrade { view: Some(view.clone()), ..LastUpgrade::default() };
        Ok(view)
    }

    /// This worker's turn.
    pub(crate) fn begin_upgrade(&self, spec: &UpgradeSpec, id: Uuid) -> Result<(), ControlError> {
        let refused = |class, why: String| Err(ControlError::Upgrade { class, why });
        let Some(keeper) = &self.settings.keeper else {
            return refused(Class::Invalid, "nothing keeps guests alive here".to_owned());
        };
        tracing::info!(binary = %spec.binary.display(), %id, "an upgrade begins");
        Asked::begin(&self.own_folder(), id, &spec.binary);
        match keeper.upgrade(id.into_bytes(), &spec.binary, spec.trial_millis()) {
            Ok(()) => Ok(()),
            Err(error) => refused(Class::Failed, error.to_string()),
        }
    }

    /// The upgrade under way has failed before this worker's turn.
    pub(crate) fn fail_upgrade(&self, id: Uuid, reason: String) {
        tracing::warn!(%id, "the upgrade failed: {reason}");
        let mut last = self.last();
        let binary = last.view.take().and_then(|view| view.binary);
        last.view = Some(UpgradeView::failed(id, binary, reason));
    }

    /// Has the new binary not get its turn, if one is starting beside this worker: whether one is. Where this one has let go already, whoever
    /// follows is to be asked.
    pub(crate) fn call_off_upgrade(&self) -> bool {
        let mut last = self.last();
        let is_running = last.view.as_ref().is_some_and(|view| view.state == UpgradeState::Running);
        let Some(keeper) = self.settings.keeper.as_ref().filter(|_| is_running) else { return false };
        if last.has_let_go {
            return true;
        }
        tracing::warn!("the upgrade is called off while the new binary starts");
        last.refusal = Some("the upgrade of all workers was called off".to_owned());
        if let Err(error) = keeper.refuse() {
            tracing::error!(%error, "the keeper was not told that the upgrade is called off");
        }
        true
    }

    /// Whether the binary before this one takes over again if this one fails.
    pub(crate) fn is_on_trial(&self) -> bool {
        self.settings.keeper.as_ref().is_some_and(|keeper| keeper.is_on_trial())
    }

    /// Ends this worker's trial before its time.
    pub(crate) fn settle_upgrade(&self) -> Result<(), ControlError> {
        let settled = self.settings.keeper.as_ref().filter(|keeper| keeper.is_on_trial()).map(|keeper| keeper.settle());
        settled.unwrap_or(Ok(())).map_err(|error| ControlError::Upgrade { class: Class::Failed, why: error.to_string() })
    }

    /// This worker's own run directory.
    fn own_folder(&self) -> PathBuf {
        let run_dir = &self.settings.run_dir;
        self.settings.cell.as_ref().map_or_else(|| run_dir.clone(), |cell| folder(run_dir, cell))
    }

    fn last(&self) -> MutexGuard<'_, LastUpgrade> {
        self.upgraded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last upgrade since the daemon started.
    pub fn last_upgrade(&self) -> Result<UpgradeView, ControlError> {
        self.last().view.clone().ok_or(ControlError::NoUpgrade)
    }

    /// The keeper tells how an upgrade ended.
    pub(crate) fn note_upgraded(&self, upgraded: &Upgraded) {
        let asked = Asked::of(&self.own_folder(), upgraded.id);
        let mut last = self.last();
        let view = UpgradeView::ended(upgraded, last.refusal.take(), asked);
        if let Some(reason) = &view.reason {
            tracing::warn!(id = view.id, "the upgrade failed: {reason}");
        }
        last.view = Some(view);
    }

    /// Leaves everything to a worker that understands these layouts. Nothing is changed after it, and nothing answers: the process is to
    /// end. When the other one cannot go on, or it is no time to end, nothing has happened.
    pub(crate) fn let_go(&self, theirs: &Layouts) -> Result<(), ControlError> {
        let common = layouts().iter().map(|layout| theirs.common(layout)).collect::<Result<Vec<_>, _>>();
        let why = common.as_ref().err().map(ToString::to_string).or_else(|| self.peek().in_the_midst());
        {
            let mut last = self.last();
            // Or it was called off meanwhile, and the keeper has nobody any more who would follow.
            last.refusal = last.refusal.take().or(why);
            if let Some(why) = last.refusal.clone() {
                return Err(ControlError::Upgrade { class: Class::Conflict, why });
            }
            last.has_let_go = true;
        }
        // The state region's comes first (`nvme::layouts`).
        self.leave_all(common.unwrap_or_default().first().copied().unwrap_or_default());
        Ok(())
    }

    pub(super) fn leave_all(&self, state_version: u16) {
        // Devices that wait are the next worker's: opening volumes for them now would keep everybody else waiting.
        self.peek().late.leave();
        // Before the rest: the trace's end reaches all shards, too.
        self.find_silent(CHANGE_PATIENCE);
        self.end_trace_now(Ending::Upgrade);
        // Most of it while guests do not wait, and not durably: a slow disk must not use up the time that the keeper gives.
        self.leave_account(&self.peek());
        self.note_legs(&mut self.peek());
        let held = self.hold_all();
        let deadline = Instant::now() + QUIET_LIMIT;
        while Instant::now() < deadline && !self.is_held() {
            thread::sleep(LOOK);
        }
        let mut inner = self.at_rest(Duration::ZERO);
        for (_, device) in inner.devices.iter().filter(|(name, _)| held.contains(*name)) {
            let _ = device.live().and_then(|live| live.leave(state_version));
        }
        // Only what has changed since a moment ago.
        self.note_legs(&mut inner);
        self.leave_account(&inner);
        // Whoever wants to change something waits, for the next worker.
        std::mem::forget(inner);
    }

    /// Finds the shards that hang, all at once: nobody waits for them afterwards.
    pub(super) fn find_silent(&self, limit: Duration) {
        thread::scope(|scope| {
            for shard in &self.shards {
                let ask = move || drop(shard.call_within(limit, |_| ()));
                // Without a thread it is waited for with its first device.
                drop(thread::Builder::new().spawn_scoped(scope, ask));
            }
        });
    }

    /// Holds the devices; those that are. One that does not answer has failed, and is left as it is.
    fn hold_all(&self) -> BTreeSet<Name> {
        // What a resize stores on its way is not left half done.
        let inner = self.at_rest(CHANGE_PATIENCE);
        let is_held = |device: &&Device| device.live().is_ok_and(|live| live.hold().is_ok());
        inner.devices.values().filter(is_held).map(|device| device.record.spec.name.clone()).collect()
    }

    /// Whether all that was taken is completed. A device that does not answer keeps nobody waiting, nor one whose guest waits.
    fn is_held(&self) -> bool {
        let inner = self.peek();
        let mut devices = inner.devices.iter().filter(|(name, _)| !inner.late.has(name));
        devices.all(|(_, device)| device.live.as_ref().map_or(true, |live| live.is_held().unwrap_or(true)))
    }

    /// Nobody goes back to the worker before this one.
    pub(crate) fn end_trial(&self) {
        self.reach_all();
        let inner = self.peek();
        for (name, device) in &inner.devices {
            let Ok(live) = &device.live else { continue };
            if let Err(error) = live.settle() {
                tracing::warn!(device = %name, %error, "its state keeps the layout of the binary before");
            }
        }
        self.drop_untaken(&inner);
    }
}

impl Inner {
    /// The volumes that devices show, and what they are made of.
    fn in_use(&self) -> BTreeSet<Name> {
        let shown = self.devices.values().flat_map(|device| &device.record.namespaces).map(|namespace| &namespace.volume);
        shown.flat_map(|name| [vec![name.clone()], self.below_with(name.as_str(), true)].concat()).collect()
    }

    /// The sources of keys of volumes that devices show, each with the first volume that needs it.
    fn keys_in_use(&self) -> Vec<(Name, KeySource)> {
        let mut keys: Vec<(Name, KeySource)> = Vec::new();
        for name in self.in_use() {
            let Some(volume) = self.volumes.get(&name).filter(|volume| volume.graph.is_some()) else { continue };
            for source in key_sources(&volume.record.spec.stack) {
                if !keys.iter().any(|(_, known)| *known == source) {
                    keys.push((name.clone(), source));
                }
            }
        }
        keys
    }

    /// The files of volumes that devices show, with the volumes; without those of legs that are out of use.
    fn open_files(&self) -> Vec<(Name, PathBuf)> {
        let mut files = Vec::new();
        for name in self.in_use() {
            let Some(live) = self.volumes.get(&name).and_then(|volume| volume.graph.as_ref()) else { continue };
            let leaves = live.graph.leaves_in_use();
            files.extend(leaves.iter().filter_map(|leaf| Some((name.clone(), leaf.file()?.to_owned()))));
        }
        files
    }
}

/// Why the next worker would not find a file, though this one has it open.
fn lost(volume: &Name, path: &Path) -> Option<String> {
    let error = fs::metadata(path).err()?;
    Some(format!(
        "volume {volume}: {}: {error}; this worker has it open still, and the next one would not find it: put it back, or have the \
         volume go elsewhere out of the open file (\"millrace volume migrate\"; for a leg of a mirror or parity \"millrace volume \
         replace\" does it too)",
        path.display()
    ))
}

/// Why the next worker would not get a key, though this one has it. Commands run beside each other; a file that hangs keeps who asks waiting, as
/// one of a volume does.
fn keyless(keys: Vec<(Name, KeySource)>) -> Option<String> {
    let (commands, others): (Vec<_>, Vec<_>) =
        keys.into_iter().partition(|(_, source)| matches!(source, KeySource::Command(_)));
    let missing = |volume: &Name, why: &str| {
        format!(
            "volume {volume}: {why}; this worker has the key still, and the next one would not get it, so that its guests would wait: put its \
             source right"
        )
    };
    let failed = others.iter().find_map(|(name, source)| Some(missing(name, &FetchedKey::fetch(source).failure()?)));
    if failed.is_some() {
        return failed;
    }
    let mut by_volume: BTreeMap<Name, Vec<KeySource>> = BTreeMap::new();
    for (name, source) in commands {
        by_volume.entry(name).or_default().push(source);
    }
    let mut crew = Crew::new();
    for (name, sources) in by_volume {
        crew.add(&name, move || sources.iter().find_map(|source| FetchedKey::fetch(source).failure()));
    }
    let deadline = Instant::now() + KEYS_LIMIT;
    while let Some((name, failed)) = crew.next_done(deadline) {
        if let Some(why) = failed {
            return Some(missing(&name, &why));
        }
    }
    let slow = crew.names().next()?;
    Some(missing(slow, "the source of its key does not answer"))
}

impl Inner {
    /// What takes its time and nothing may end in the middle of, a keeper's patience with a worker that is to let go least of all; or what the
    /// next worker would wait for in vain.
    fn in_the_midst(&self) -> Option<String> {
        let resized = self.resizing.first();
        let resized = resized.map(|name| format!("volume {name} is being resized: ask again when that is done"));
        resized.or_else(|| self.why_erasing()).or_else(|| self.why_waited_for())
    }
}
