//! Erasures that were cut off: a guest formatted its namespace when the worker before this one ended.
//!
//! ```text
//!   opened while others wait ─► has an erasure to complete: left closed ─► thread: marked, opened with nothing locked ─► taken in
//!                                                                     ▲          └► failed ─┐
//!                                                                     └──── much later ─────┘
//! ```
//!
//! A disk may take hours for it. So it is not done where all guests wait for volumes to be opened: such a volume counts as one whose files do not
//! answer ([`super::late`]). A thread of its own opens it, and its guests alone wait for that. While it is marked nobody changes or deletes it.

use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant},
};

use millrace_services::graph::GraphError;

use super::{
    Inner, Manager, WeakManager,
    graphs::{LiveGraph, Materials},
};
use crate::{Name, error::ControlError, store::VolumeRecord};

/// Whether that is all that keeps a volume from being opened.
pub(super) fn is_unfinished(error: &ControlError) -> bool {
    matches!(error, ControlError::Graph { source: GraphError::Unfinished { .. }, .. })
}

impl Manager {
    /// Sets a thread to work on each volume that has an erasure to complete, and none yet.
    pub(super) fn complete_erasures(&self, inner: &mut Inner) {
        for (name, again) in inner.late.due_erasures() {
            // A copy to a volume that is not open waits for that. What else is in the way is looked at again.
            if !matches!(inner.idle_volume(name.as_str()), Ok(_) | Err(ControlError::Copying { .. })) {
                continue;
            }
            let Some(volume) = inner.volumes.get(&name) else { continue };
            inner.changing.insert(name.clone(), volume.record.spec.stack.clone());
            inner.late.begin_erasing(&name);
            if !again {
                tracing::warn!(volume = %name, "an erasure that was cut off is completed; until then the volume is not open");
            }
            let (manager, its) = (self.itself.clone(), name.clone());
            let spawned = thread::Builder::new().name("millrace-erase".to_owned()).spawn(move || complete(&manager, &its));
            if let Err(error) = spawned {
                tracing::error!(volume = %name, %error, "no thread to complete its erasure; it is tried again");
                inner.changing.remove(&name);
                inner.late.fail_erasing(&name, Duration::ZERO);
            }
        }
    }

    /// An erasure is complete and its volume open, or that has failed.
    fn take_erased(
        &self,
        mut record: VolumeRecord,
        was: (bool, bool),
        took: Duration,
        made: Result<LiveGraph, ControlError>,
    ) {
        let name = record.spec.name.clone();
        self.reach_all();
        let mut inner = self.peek();
        if inner.stopping || !inner.volumes.contains_key(&name) {
            drop(inner);
            // The daemon has stopped meanwhile. Nobody has used it.
            if let Ok(mut live) = made {
                live.graph.unmount();
            }
            self.peek().changing.remove(&name);
            return;
        }
        inner.changing.remove(&name);
        match made {
            Ok(live) => {
                tracing::info!(volume = %name, "the erasure is complete");
                inner.late.end_erasing(&name);
                inner.late.note_opened(&name);
                record.untold |= inner.volumes.get(&name).is_some_and(|volume| volume.lost);
                inner.take_restored(record, was, Ok(live));
                let opened = BTreeSet::from([name]);
                // Before anybody is shown it.
                inner.forget_late(&opened, &*self.host);
                self.take_in(&mut inner, opened);
            }
            Err(error) => {
                inner.take_failed(&record, &error);
                inner.note_failed(&name, &error);
                inner.late.fail_erasing(&name, took);
            }
        }
    }
}

impl Inner {
    /// A stored volume, and what it is opened with.
    fn to_complete(&self, name: &Name) -> Option<(VolumeRecord, Materials)> {
        let record = self.volumes.get(name)?.record.clone();
        let materials = self.materials(&record.spec);
        Some((record, materials))
    }

    /// The first volume with an erasure that is being completed: another worker would begin it again.
    pub(super) fn why_erasing(&self) -> Option<String> {
        let name = self.late.erasing()?;
        Some(format!(
            "volume {name}: an erasure that was cut off is being completed, and another worker would begin it again: ask again when that is done"
        ))
    }
}

/// Opens a volume for as long as it takes. The manager may go meanwhile.
fn complete(manager: &WeakManager, name: &Name) {
    let to_complete = |manager: &Manager| manager.peek().to_complete(name);
    let Some((mut record, materials)) = manager.upgrade().and_then(|manager| to_complete(&manager)) else { return };
    #[cfg(test)]
    super::tests::before_look(std::path::Path::new(name.as_str()));
    let (was, began) = ((record.growing.is_some(), record.untold), Instant::now());
    let made = materials.reopen(&mut record);
    drop(materials);
    if let Some(manager) = manager.upgrade() {
        manager.take_erased(record, was, began.elapsed(), made);
    }
}
