//! Migrations: what a volume is made of goes to another place while guests use it.
//!
//! ```text
//!   migrate: move(OLD, NEW) in OLD's place ─► thread: looks ─┬─ NEW is whole: NEW in its place
//!     cancel: OLD in its place                 ▲             └─ it has failed: OLD in its place
//!                                              └─ every start of the daemon
//! ```
//!
//! Invariants:
//! * Every step is a change of the volume's stack like any other: stored, or not made. The stored stack says that there is a migration.
//! * OLD has everything until NEW is in its place. So a volume whose NEW cannot be opened is opened without it.
//!
//! It copies nothing: that is the service's (`millrace_services::migrate`).

use std::{fmt, thread, time::Duration};

use millrace_services::{
    Node,
    migrate::{
        self, Progress,
        stacks::{self, Stays},
    },
};

use super::{HistoryEntry, Inner, Manager, VolumeView, WeakManager, graphs::LiveGraph, views::MigrationView};
use crate::{
    Name, Size,
    error::ControlError,
    model::{MigrationChange, MigrationSpec},
    store::{Changes, VolumeRecord},
};

/// How often is looked how a migration is doing.
const LOOK: Duration = Duration::from_millis(50);
/// How long a change that could not be made is left alone: at first, and at most.
const TRY_AGAIN: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(10);

/// Whether there is anything left to look after.
pub(super) enum Watch {
    Again(Duration),
    Over,
}

/// What history says of a migration.
enum Note<'a> {
    Begins(&'a Node),
    Done(&'a Node),
    Cancelled(&'a Node),
    Failed(&'a Node, &'a str),
}

impl fmt::Display for Note<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begins(to) => write!(f, "migration to {to} begins"),
            Self::Done(from) => write!(f, "migrated from {from}"),
            Self::Cancelled(to) => write!(f, "migration to {to} cancelled"),
            Self::Failed(to, why) => write!(f, "migration to {to} failed: {why}"),
        }
    }
}

fn none(record: &VolumeRecord) -> ControlError {
    ControlError::untimely("volume", &record.spec.name, "it is not being migrated")
}

impl Manager {
    /// Begins a migration.
    pub fn migrate_volume(&self, name: &str, spec: &MigrationSpec) -> Result<VolumeView, ControlError> {
        super::volumes::look_at_files(&spec.to);
        self.look_at_unopened();
        let note = Note::Begins(&spec.to).to_string();
        self.change_with(name, false, Some(note), |record| {
            let wrong = |why: String| ControlError::invalid("volume", &record.spec.name, why);
            if let Some(under_way) = stacks::migration(&record.spec.stack) {
                let why = format!(
                    "it is being migrated to {} already: wait for the end (\"volume show\" tells), or cancel it (--cancel)",
                    under_way.to
                );
                return Err(ControlError::untimely("volume", &record.spec.name, why));
            }
            if let Some(owner) = &record.created_by {
                return Err(wrong(format!("the guest of device {owner} created it for itself")));
            }
            let rate = spec.rate.filter(|rate| rate.0 > 0).map(|rate| rate.0);
            stacks::begin(&record.spec.stack, spec.leg.as_deref(), &spec.to, rate).map_err(wrong)
        })
    }

    /// Sets how fast a migration may be.
    pub fn change_migration(&self, name: &str, change: &MigrationChange) -> Result<VolumeView, ControlError> {
        self.change_with(name, false, None, |record| {
            stacks::migration(&record.spec.stack).ok_or_else(|| none(record))?;
            Ok(stacks::with_rate(&record.spec.stack, Some(change.rate.0).filter(|rate| *rate > 0)))
        })
    }

    /// Ends a migration: the volume stays where it was. What has been copied stays, too.
    pub fn cancel_migration(&self, name: &str) -> Result<VolumeView, ControlError> {
        let to = {
            let inner = self.peek();
            let record = &inner.volume(name)?.record;
            stacks::migration(&record.spec.stack).map(|migration| migration.to.clone()).ok_or_else(|| none(record))?
        };
        self.end_migration(name, Stays::Old, Note::Cancelled(&to).to_string())
    }

    fn end_migration(&self, name: &str, stays: Stays, note: String) -> Result<VolumeView, ControlError> {
        self.change_with(name, false, Some(note), |record| {
            stacks::migration(&record.spec.stack).ok_or_else(|| none(record))?;
            Ok(stacks::without(&record.spec.stack, stays))
        })
    }

    /// The same by itself, and so again and again until it is done: a change that cannot be stored has guests wait all the same, and the
    /// migration begins anew. Whether it can be is asked before.
    fn end_by_itself(&self, name: &Name, stays: Stays, note: &Note<'_>) -> Result<(), ControlError> {
        self.store.try_room(name)?;
        self.end_migration(name.as_str(), stays, note.to_string()).map(drop)
    }

    /// Stores which migrations were given up when volumes were opened, and has every other one looked after.
    pub(super) fn attend_migrations(&self, inner: &mut Inner) {
        let given_up = std::mem::take(&mut inner.given_up);
        let put_volumes: Vec<_> = given_up.iter().filter_map(|name| Some(&inner.volumes.get(name)?.record)).collect();
        if !put_volumes.is_empty()
            && let Err(error) = self.store.apply(&Changes { put_volumes, ..Changes::default() })
        {
            tracing::warn!(%error, "that a migration was given up could not be stored; the next start finds out again");
        }
        let moving = |volume: &&super::Volume| volume.live.is_ok() && stacks::migration(&volume.record.spec.stack).is_some();
        let names: Vec<_> = inner.volumes.values().filter(moving).map(|volume| volume.record.spec.name.clone()).collect();
        for name in names {
            if !inner.attended.insert(name.clone()) {
                continue;
            }
            let (manager, volume) = (self.itself.clone(), name.clone());
            let spawned =
                thread::Builder::new().name("millrace-migrate".to_owned()).spawn(move || attend(&manager, &volume));
            if let Err(error) = spawned {
                tracing::error!(volume = %name, %error, "no thread for a migration: it does not come to its end");
                inner.attended.remove(&name);
            }
        }
    }

    /// One look at a migration.
    pub(super) fn look_after(&self, name: &Name) -> Result<Watch, ControlError> {
        let mut inner = self.peek();
        let stopping = inner.stopping;
        let volume = inner.volumes.get(name).filter(|volume| volume.live.is_ok() && !stopping);
        let found = volume.and_then(|volume| Some((volume, stacks::migration(&volume.record.spec.stack)?)));
        let Some((volume, migration)) = found else {
            inner.attended.remove(name);
            return Ok(Watch::Over);
        };
        let (from, to) = (migration.from.clone(), migration.to.clone());
        // Without the service it is not known how far it came.
        let there = volume.graph.as_ref().filter(|live| !live.graph.services(migrate::SERVICE).is_empty());
        let progress = there.map(progress_of);
        drop(inner);
        match progress {
            // Absent: it is being changed.
            None | Some(Progress::Copying(..)) => return Ok(Watch::Again(LOOK)),
            Some(Progress::Whole) => {
                self.end_by_itself(name, Stays::New, &Note::Done(&from))?;
                tracing::info!(volume = %name, %from, %to, "migrated");
            }
            Some(Progress::Failed(why)) => {
                self.end_by_itself(name, Stays::Old, &Note::Failed(&to, &why))?;
                tracing::error!(volume = %name, %from, %to, "the migration has failed, and the volume is where it was: {why}");
            }
        }
        Ok(Watch::Again(LOOK))
    }
}

/// When is looked next.
struct Pace {
    after_failure: Duration,
}

impl Pace {
    /// None: it is over. An end that could not be made may have had guests wait, and the copying begins anew: so one that is copying in between is
    /// not tried sooner for it.
    fn after(&mut self, looked: &Result<Watch, ControlError>) -> Option<Duration> {
        match looked {
            Ok(Watch::Again(wait)) => Some(*wait),
            Ok(Watch::Over) => None,
            Err(_) => {
                let wait = self.after_failure;
                self.after_failure = (wait * 2).min(LONGEST);
                Some(wait)
            }
        }
    }
}

/// Looks after a migration until it is over.
fn attend(manager: &WeakManager, name: &Name) {
    let (mut wait, mut pace, mut told) = (LOOK, Pace { after_failure: TRY_AGAIN }, String::new());
    loop {
        thread::sleep(wait);
        let Some(manager) = manager.upgrade() else { return };
        let looked = manager.look_after(name);
        if let Err(error) = &looked {
            let error = error.to_string();
            if error != told {
                tracing::warn!(volume = %name, %error, "a migration cannot be brought to its end yet");
                told = error;
            }
        }
        let Some(next) = pace.after(&looked) else { return };
        wait = next;
    }
}

/// How all migrations of a volume are doing together.
fn progress_of(live: &LiveGraph) -> Progress {
    let moves = live.graph.services(migrate::SERVICE);
    let mut all = Progress::Whole;
    let (mut done, mut total) = (0, 0);
    for progress in moves.iter().filter_map(|(_, service)| migrate::progress(service)) {
        match progress {
            Progress::Failed(why) => return Progress::Failed(why),
            Progress::Whole => {}
            Progress::Copying(here, bytes) => {
                (done, total) = (done + here, total + bytes);
                all = Progress::Copying(done, total);
            }
        }
    }
    all
}

/// What is shown of a volume's migration.
pub(super) fn view(volume: &super::Volume) -> Option<MigrationView> {
    let migration = stacks::migration(&volume.record.spec.stack)?;
    let total = volume
        .graph
        .as_ref()
        .and_then(|live| live.graph.services(migrate::SERVICE).first().map(|(_, s)| s.geometry().bytes()));
    let total = total.unwrap_or_default();
    let (done, reason) = match volume.graph.as_ref().map(progress_of) {
        None => (0, None),
        Some(Progress::Copying(done, _)) => (done, None),
        Some(Progress::Whole) => (total, None),
        Some(Progress::Failed(why)) => (0, Some(why)),
    };
    let (from, to, rate) = (migration.from.clone(), migration.to.clone(), migration.rate.map(Size));
    Some(MigrationView { from, to, rate, done, total, reason })
}

impl Inner {
    /// Opens a volume that cannot be opened with what it was being migrated to: that is given up.
    pub(super) fn reopen_old(&mut self, record: &mut VolumeRecord, error: ControlError) -> Result<LiveGraph, ControlError> {
        let Some(migration) = stacks::migration(&record.spec.stack) else { return Err(error) };
        let note = Note::Failed(migration.to, &error.to_string()).to_string();
        let mut old = record.clone();
        old.spec.stack = stacks::without(&record.spec.stack, Stays::Old);
        let numbers = record.leaf_numbers().into_iter().zip(in_memory(&record.spec.stack, false));
        old.set_leaf_numbers(numbers.filter(|(_, goes)| !goes).map(|(number, _)| number).collect());
        let Ok(live) = self.reopen(&mut old) else {
            record.untold |= old.untold;
            return Err(error);
        };
        tracing::error!(volume = %record.spec.name, "{note}; the volume is where it was");
        old.remember(HistoryEntry { note: Some(note), ..HistoryEntry::now(&old.spec.stack) });
        self.given_up.push(old.spec.name.clone());
        *record = old;
        Ok(live)
    }
}

/// The leaves in memory from left to right: whether each goes when a migration is given up.
fn in_memory(stack: &Node, goes: bool) -> Vec<bool> {
    match stack {
        Node::Leaf(leaf) if leaf.is_memory() => vec![goes],
        Node::Leaf(_) => Vec::new(),
        Node::Service(node) => {
            let moves = node.service == migrate::SERVICE;
            let legs = node.legs.iter().enumerate();
            legs.flat_map(|(at, leg)| in_memory(leg, goes || (moves && at == 1))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_fails_is_tried_less_and_less_often_also_when_it_copies_in_between() {
        let mut pace = Pace { after_failure: TRY_AGAIN };
        for wait in [1, 2, 4, 8, 10, 10].map(Duration::from_secs) {
            let failed = Err(ControlError::NoVolume { name: "v".to_owned() });
            assert_eq!(pace.after(&failed), Some(wait));
            assert_eq!(pace.after(&Ok(Watch::Again(LOOK))), Some(LOOK));
        }
        assert_eq!(pace.after(&Ok(Watch::Over)), None);
    }
}
