//! The end: guests lose their devices, and what their volumes hold becomes durable.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    rc::Rc,
    sync::{Arc, PoisonError, mpsc::sync_channel},
    time::{Duration, Instant},
};

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, Step, Volume};
use millrace_engine::{Launch, ShardHandle};
use thiserror::Error;

use super::{Inner, Manager, devices::stop};
use crate::store::{Changes, VolumeRecord};

/// How long the end of a change is waited for. It waits no longer for requests in flight either.
const CHANGE_PATIENCE: Duration = Duration::from_secs(6);
/// How long all flushes together may take before the daemon leaves without them.
const FLUSH_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Error)]
enum FlushError {
    #[error(transparent)]
    Volume(#[from] BlockError),
    #[error("no answer in time")]
    NoAnswer,
}

impl Manager {
    /// Stops all devices (their sockets go), flushes all volumes, stops the shards. Nothing is changed after it; a second
    /// call does nothing.
    pub fn shutdown(&self) {
        self.peek().stopping = true;
        let (devices, volumes) = {
            let mut inner = self.at_rest(CHANGE_PATIENCE);
            let volumes: Vec<_> = inner.volumes.values().filter_map(|volume| volume.live.clone().ok()).collect();
            // While it is known which devices they are: of the moment until they stand still only their volumes are.
            self.leave_account(&inner);
            (std::mem::take(&mut inner.devices), volumes)
        };
        self.leave_copies();
        for device in devices.into_values() {
            // One that does not finish, or whose shard hangs, goes with the process.
            drop(stop(device));
        }
        let Some(engine) = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        self.reach_all();
        // Any shard can flush any volume, if it answers.
        let shard = self.shards.iter().find(|shard| !shard.is_silent()).unwrap_or(&self.shards[0]);
        let deadline = Instant::now() + FLUSH_LIMIT;
        let mut failed = BTreeSet::new();
        for namespace in volumes {
            let volume = &namespace.volume;
            if volume.geometry().read_only {
                continue;
            }
            if let Err(error) = flush(shard, Arc::clone(volume), deadline) {
                tracing::error!(volume = volume.name(), %error, "the volume could not be flushed");
                // What this flush was told its guest was not. It may have been told of what came before, and have done nothing else.
                failed.insert(volume.name().to_owned());
                let _ = flush(shard, Arc::clone(volume), deadline);
            }
        }
        {
            let inner = self.peek();
            self.close_account(&inner, inner.volumes.keys());
        }
        // Services leave a clean mark; their tasks need the shards for that.
        let mut last = Inner { volumes: std::mem::take(&mut self.peek().volumes), ..Inner::default() };
        let names = last.volumes.keys().cloned().collect();
        let known: BTreeSet<_> =
            last.volumes.values().filter(|volume| volume.record.untold).map(|volume| volume.record.uuid).collect();
        let untold = RefCell::new(Vec::new());
        last.close_all(names, |_, volume| {
            let is_untold = volume.record.untold || failed.contains(volume.record.spec.name.as_str());
            if is_untold != known.contains(&volume.record.uuid) {
                untold.borrow_mut().push(VolumeRecord { untold: is_untold, ..volume.record.clone() });
            }
        });
        drop(last);
        self.store_untold(&untold.into_inner());
        if let Err(error) = engine.stop() {
            tracing::error!(%error, "while the shards were stopped");
        }
    }

    /// Whether their guests are to be told, after the next start, that what they wrote may be lost.
    fn store_untold(&self, records: &[VolumeRecord]) {
        let put_volumes: Vec<_> = records.iter().collect();
        if put_volumes.is_empty() {
            return;
        }
        if let Err(error) = self.store.apply(&Changes { put_volumes, ..Changes::default() }) {
            let volumes: Vec<_> = records.iter().map(|record| record.spec.name.as_str()).collect();
            tracing::error!(?volumes, %error, "that these may have lost writes could not be stored: their guests will not be told");
        }
    }
}

/// Flushes a volume by way of a shard, and waits for it.
fn flush(shard: &ShardHandle, volume: Arc<dyn Volume>, deadline: Instant) -> Result<(), FlushError> {
    let (report, result) = sync_channel(1);
    let asked = shard.call(move |shard| {
        let cx = shard.context();
        // Without a slot, the report is dropped: no answer.
        let Some(slot) = cx.reserve() else { return };
        let shared = Rc::new((volume, report));
        let started = slot.run_with(&shared, |tcx, (volume, report)| {
            let request = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };
            match volume.submit(tcx, request) {
                Step::Done(result) => {
                    let _ = report.send(result);
                    Launch::Done(())
                }
                Step::Wait(future) => Launch::Wait(tcx.scratch.place_future(async move {
                    let _ = report.send(future.await);
                })),
            }
        });
        drop(started);
    });
    asked.map_err(|_| FlushError::NoAnswer)?;
    let answer = result.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    Ok(answer.map_err(|_| FlushError::NoAnswer)??)
}
