//! Changes of what volumes are made of, while their guests go on.
//!
//! ```text
//!   begin: marked, its graph taken ─► exchange: built beside, stored in the pause ─► end: stored is what is known now, the mark goes
//!             ├─► Watched: whoever notes legs and losses meanwhile asks it
//!             └─► its meter: whoever keeps the account meanwhile reads it
//! ```
//!
//! What is noted of legs and losses may change as long as a change takes. So of a record these are stored as they are then, not as they were
//! when it began.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::Arc,
    time::Duration,
};

use millrace_block::Switch;
use millrace_engine::ShardConfig;
use millrace_services::{
    Node, Service,
    graph::{self, Graph, Plan, Terms, Watch},
};

use super::{HistoryEntry, KeptLeaves, LiveGraph, Means, failed, meters_of};
use crate::{
    error::ControlError,
    manager::{Inner, Manager, VolumeView, volumes::FileChange},
    store::{StoreError, VolumeRecord, words},
};

/// How long a change waits for requests in flight.
const PATIENCE: Duration = Duration::from_secs(5);
/// Stacks of a volume that are remembered.
const HISTORY: usize = 32;

/// Why a change could not be stored, and what to do, for who passes on words alone.
fn unstored(error: StoreError) -> String {
    let error = ControlError::from(error);
    match error.advice() {
        Some(advice) => format!("{error}; {advice}"),
        None => error.to_string(),
    }
}

/// What a volume knows of its legs and losses, whoever has its graph.
#[derive(Clone)]
pub(in crate::manager) struct Watched {
    switch: Arc<Switch>,
    graph: Watch,
}

impl Watched {
    /// Whether the guest is yet to be told of a loss.
    pub(in crate::manager) fn is_untold(&self) -> bool {
        self.switch.is_untold() || self.graph.has_untold()
    }

    /// The legs that it goes without.
    pub(in crate::manager) fn out_of_use(&self) -> Vec<String> {
        self.graph.out_of_use()
    }
}

impl LiveGraph {
    pub(in crate::manager) fn watch(&self) -> Watched {
        Watched { switch: Arc::clone(&self.switch), graph: self.graph.watch() }
    }
}

impl VolumeRecord {
    /// Adds to its history, of which the oldest goes.
    pub(in crate::manager) fn remember(&mut self, entry: HistoryEntry) {
        self.history.push(entry);
        let surplus = self.history.len().saturating_sub(HISTORY);
        self.history.drain(..surplus);
    }
}

/// Does what has requests wait. Where it panics the process ends, for they would wait for ever; the next one finds the old stack stored, or
/// the new one.
fn or_end<T>(volume: &str, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let why = words(&*panic);
        tracing::error!(volume, why, "a change of the volume panicked, and so the process ends");
        // The log has a thread of its own, which may not come to that line any more.
        eprintln!("millrace: a change of volume {volume} panicked, and so the process ends: {why}");
        process::abort()
    })
}

/// A change under way.
pub(in crate::manager) struct Change {
    live: LiveGraph,
    before: VolumeRecord,
    after: VolumeRecord,
    /// Those of the graph before it.
    meters: Vec<Arc<dyn Service>>,
}

impl Manager {
    /// Puts another stack, which follows from what is there, in a volume's place while guests go on; `note` is for the history.
    pub(in crate::manager) fn change_with(
        &self,
        name: &str,
        reformat: bool,
        note: Option<String>,
        next: impl FnOnce(&VolumeRecord) -> Result<Node, ControlError>,
    ) -> Result<VolumeView, ControlError> {
        let mut change = self.begin_change(name, note, next)?;
        // The lock is free: services may take their time to leave.
        let result = self.exchange(&mut change, reformat);
        self.end_change(change, result)
    }

    /// Marks the volume and takes its graph.
    pub(in crate::manager) fn begin_change(
        &self,
        name: &str,
        note: Option<String>,
        next: impl FnOnce(&VolumeRecord) -> Result<Node, ControlError>,
    ) -> Result<Change, ControlError> {
        let mut inner = self.lock()?;
        let volume = inner.idle_volume(name)?;
        volume.live()?;
        let before = volume.record.clone();
        let mut after = before.clone();
        after.spec.stack = next(&before)?;
        after.keep_own_file(&before);
        after.spec.validate()?;
        if before.spec.read_only {
            return Err(ControlError::ReadOnly { name: before.spec.name });
        }
        if before.spec.stack.is_disk() != after.spec.stack.is_disk() {
            let why = "a disk stays a disk, and a volume a volume: create another one";
            return Err(ControlError::invalid("volume", &before.spec.name, why.to_owned()));
        }
        inner.check_leaves(&after.spec)?;
        inner.check_disk_idle(name)?;
        if before.spec.stack.is_disk() {
            inner.check_shares_idle(name)?;
        }
        let missing = || ControlError::VolumeFailed { name: before.spec.name.clone(), reason: "it has no graph".to_owned() };
        let live = inner.volumes.get_mut(name).and_then(|volume| volume.graph.take()).ok_or_else(missing)?;
        after.remember(HistoryEntry { note, ..HistoryEntry::now(&after.spec.stack) });
        inner.changing.insert(before.spec.name.clone(), after.spec.stack.clone());
        inner.watched.insert(before.spec.name.clone(), live.watch());
        let meters = meters_of(&live);
        inner.keep_meter(&before.spec.name, meters.first());
        Ok(Change { live, before, after, meters })
    }

    /// Builds what is to come beside what is there, and puts it in its place.
    pub(in crate::manager) fn exchange(&self, change: &mut Change, reformat: bool) -> Result<VolumeRecord, ControlError> {
        let Change { live, before, after, .. } = change;
        let (before, after) = (&*before, &*after);
        let name = &before.spec.name;
        let kept = self.settings.keeper.as_ref().map(|keeper| KeptLeaves::beside(keeper, before));
        let numbers = before.leaf_numbers();
        let materials = self.peek().materials(&after.spec);
        let opener = materials.opener(&after.spec, None, kept);
        let Means { shared, spawner, .. } = &materials.means;
        let size = Some(before.size().0);
        let block_size = before.block_size().0;
        let plan = Plan { volume: name.as_str(), stack: &after.spec.stack, size, block_size };
        let built = Graph::build_next(&plan, &opener, shared, spawner, (&live.graph, before.own_size));
        let mut record = after.clone();
        let result = built.map_err(|error| failed(name, error)).and_then(|(new, own_size)| {
            record.own_size = own_size;
            if let Some(kept) = &opener.kept {
                kept.renumber(&live.graph, &mut record, &numbers, &new);
            }
            let pause = self.put_in_force(live, new, before, &mut record, reformat)?;
            live.files.extend(opener.opened.take());
            let leaves = after.spec.stack.leaves();
            live.files.retain(|path, _| leaves.iter().any(|leaf| leaf.file() == Some(path.as_path())));
            Ok(pause)
        });
        if let Some(kept) = &opener.kept {
            kept.forget_all_but(&numbers, if result.is_ok() { &record } else { before }.leaf_numbers().as_slice());
        }
        match result {
            Ok(pause) => {
                if let Some(entry) = record.history.last_mut() {
                    entry.pause_us = u64::try_from(pause.as_micros()).ok();
                }
                Ok(record)
            }
            Err(error) => {
                opener.files.into_inner().into_iter().for_each(FileChange::undo);
                Err(error)
            }
        }
    }

    /// Puts a graph in the place of a volume's, and stores that. How long requests waited for it.
    fn put_in_force(
        &self,
        live: &mut LiveGraph,
        mut new: Graph,
        before: &VolumeRecord,
        record: &mut VolumeRecord,
        reformat: bool,
    ) -> Result<Duration, ControlError> {
        let name = &before.spec.name;
        let below = self.peek().services_below(name);
        let is_settled = !self.is_on_trial();
        let (going, coming) = (live.watch(), new.watch());
        let mut store = || {
            // Legs are known by what stands in the stack, which is another one now.
            record.out_of_use = coming.out_of_use();
            let untold = is_settled && (going.is_untold() || coming.has_untold());
            let stored = self.store.amend([name], |stored| {
                *stored = VolumeRecord { untold: stored.untold || untold, ..record.clone() };
            });
            stored.map_err(unstored)
        };
        let mut restore = || {
            let stored = self.store.amend([name], |stored| {
                // Its legs as they are by now, in the words of its stack.
                let untold = stored.untold;
                *stored = VolumeRecord { out_of_use: going.out_of_use(), untold, ..before.clone() };
            });
            if let Err(error) = stored {
                tracing::error!(volume = %name, %error, "a change failed, and its stack stays stored: the next start has it");
            }
        };
        self.trace_next(&self.peek(), name, &live.switch, &new);
        let scratch = ShardConfig::VOLUME_SCRATCH;
        let (patience, below, store) = (PATIENCE, &below[..], &mut store);
        let terms = Terms { patience, reformat, scratch, below, store, restore: Some(&mut restore) };
        let changed = or_end(name.as_str(), || graph::change(&live.switch, &mut live.graph, &mut new, terms));
        let pause = changed.map_err(|source| ControlError::Change { name: name.clone(), source })?;
        live.graph = new;
        Ok(pause)
    }

    /// The volume has its graph again, or another one.
    pub(in crate::manager) fn end_change(
        &self,
        change: Change,
        result: Result<VolumeRecord, ControlError>,
    ) -> Result<VolumeView, ControlError> {
        let Change { mut live, before, meters, .. } = change;
        let name = before.spec.name.as_str();
        let gone = self.peek().watched.insert(before.spec.name.clone(), live.watch());
        // Nothing is locked: its files are closed here, and one may hang.
        drop(gone);
        // Shards may take their time as well: what is done meanwhile is the next meter's.
        self.close_meter(&mut self.peek(), &before.spec.name, &meters, &live);
        self.reach_users(name);
        let mut inner = self.peek();
        inner.changing.remove(name);
        inner.watched.remove(name);
        inner.metering.remove(name);
        match inner.volumes.get_mut(name) {
            Some(volume) => {
                volume.graph = Some(live);
                if let Ok(record) = &result {
                    volume.record = record.clone();
                }
            }
            // The daemon has stopped meanwhile.
            None => live.graph.unmount(),
        }
        self.note_change(&mut inner, name);
        self.retrace(&inner, name);
        let record = result?;
        tracing::info!(
            volume = name, stack = %record.spec.stack, pause_us = record.history.last().and_then(|entry| entry.pause_us),
            "volume changed"
        );
        self.attend_migrations(&mut inner);
        inner.volume_view(name)
    }

    /// Stores what the pause was too early for: its length, and what is known of legs and losses, of which the graph before may have had the
    /// last word.
    fn note_change(&self, inner: &mut Inner, name: &str) {
        let on_trial = self.is_on_trial();
        let Some(volume) = inner.volumes.get_mut(name) else { return };
        let Some(known) = volume.graph.as_ref().map(LiveGraph::watch) else { return };
        let record = &mut volume.record;
        // As in `note_legs_now`.
        let untold = if on_trial { record.untold } else { known.is_untold() };
        let before = (mem::replace(&mut record.out_of_use, known.out_of_use()), mem::replace(&mut record.untold, untold));
        let noted = self.store.amend([&record.spec.name], |stored| {
            stored.out_of_use.clone_from(&record.out_of_use);
            stored.untold = record.untold;
            stored.history.clone_from(&record.history);
        });
        if let Err(error) = noted {
            tracing::warn!(volume = name, %error, "how long requests waited for a change could not be stored");
            // So that it is tried again.
            (record.out_of_use, record.untold) = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::ExitStatusExt, process::Command};

    use super::*;

    const CHILD: &str = "MILLRACE_TEST_PANIC_IN_CHANGE";
    const SIGABRT: i32 = 6;

    #[test]
    fn a_change_that_panics_ends_the_process() {
        assert_eq!(or_end("v", || 5), 5);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "manager::graphs::exchange::tests::panicking_child", "--nocapture"]).env(CHILD, "1");
        let ended = command.output().unwrap();
        assert_eq!(ended.status.signal(), Some(SIGABRT), "{}", ended.status);
        let told = String::from_utf8_lossy(&ended.stderr);
        let why = "a change of volume v panicked, and so the process ends: an invariant does not hold";
        assert!(told.contains(why), "{told}");
    }

    /// Not a test by itself: a process for the one above.
    #[test]
    fn panicking_child() {
        if std::env::var_os(CHILD).is_some() {
            or_end::<()>("v", || panic!("an invariant does not hold"));
        }
    }
}
