//! The end: guests lose their devices, and what their volumes hold becomes durable.
//!
//! ```text
//!   devices: all at once ─► each volume: flush ─► what is made of it is closed ─► close ─► whether its guest is to be told of a loss
//! ```
//!
//! Whatever hangs keeps nothing else waiting, and the end no longer than [`Limits`]: it is left as a kill would leave it.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    sync::{
        Arc, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, Step, Volume as Blocks};
use millrace_engine::{EngineError, Launch, ShardHandle};
use millrace_services::Leaf;
use thiserror::Error;

use super::{Device, Inner, Manager, Volume, crew::Crew, devices::stop};
use crate::{Name, devices::ANSWER};

/// How often is looked whether a shard has room for a flush.
const LOOK: Duration = Duration::from_millis(10);

/// How long each part of the end may take (docs/survival.md). Service managers give a process 90 s and kill it then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// For changes of stacks. They wait no longer for requests in flight either.
    pub(super) changes: Duration,
    /// For resizes, and guests' formats.
    pub(super) resizes: Duration,
    /// For devices.
    pub(super) devices: Duration,
    /// For volumes.
    pub(super) volumes: Duration,
}

impl Limits {
    pub(super) const USUAL: Self = Self {
        changes: Duration::from_secs(6),
        resizes: Duration::from_secs(15),
        devices: Duration::from_secs(10),
        volumes: Duration::from_secs(30),
    };
}

/// Why a volume was not flushed.
#[derive(Debug, Error)]
pub(super) enum FlushError {
    #[error(transparent)]
    Volume(#[from] BlockError),
    #[error("no answer in time")]
    NoAnswer,
}

/// What has become of a volume.
enum Ended {
    Flushed(Result<(), FlushError>),
    /// Its second flush, after one that failed.
    FlushedAgain(Result<(), FlushError>),
    Closed {
        /// Whether it was stored before that its guest is to be told of a loss, and whether that is so now.
        was_untold: bool,
        is_untold: bool,
    },
}

/// Volumes on their way out.
#[derive(Default)]
struct Leaving {
    volumes: BTreeMap<Name, Volume>,
    /// What is made of each, and is not closed yet: services write to their legs until they are.
    over: BTreeMap<Name, BTreeSet<Name>>,
    /// The other way round.
    below: BTreeMap<Name, BTreeSet<Name>>,
    /// What somebody is in the midst of: never closed.
    unfinished: BTreeSet<Name>,
    /// Of those, the ones that take no requests, nor a flush: a leg that refuses it would be taken for an ill one.
    formatting: BTreeSet<Name>,
    flushed: BTreeSet<Name>,
    /// Those of which a flush has failed, that is, was told what their guests were not.
    lost: BTreeSet<Name>,
}

impl Leaving {
    fn new(inner: &mut Inner) -> Self {
        let mut leaving = Self::default();
        for (over, stack) in inner.stacks() {
            for below in stack.leaves().into_iter().filter_map(Leaf::volume).filter_map(|below| below.parse::<Name>().ok()) {
                leaving.over.entry(below.clone()).or_default().insert(over.clone());
                leaving.below.entry(over.clone()).or_default().insert(below);
            }
        }
        leaving.unfinished.extend(inner.resizing.iter().chain(inner.changing.keys()).chain(&inner.formatting).cloned());
        leaving.formatting = std::mem::take(&mut inner.formatting);
        leaving.volumes = std::mem::take(&mut inner.volumes);
        leaving
    }

    /// Takes a volume that can be closed.
    fn take(&mut self, name: &Name) -> Option<Volume> {
        let waits = self.over.get(name).is_some_and(|over| !over.is_empty());
        if waits || self.unfinished.contains(name) || !self.flushed.contains(name) {
            return None;
        }
        self.volumes.remove(name)
    }

    fn note_flushed(&mut self, name: &Name, crew: &mut Crew<Ended>) {
        self.flushed.insert(name.clone());
        self.close(name, crew);
    }

    /// Those below may be closed then.
    fn note_closed(&mut self, name: &Name, crew: &mut Crew<Ended>) {
        for below in self.below.remove(name).unwrap_or_default() {
            if let Some(over) = self.over.get_mut(&below) {
                over.remove(name);
            }
            self.close(&below, crew);
        }
    }

    fn close(&mut self, name: &Name, crew: &mut Crew<Ended>) {
        let Some(mut volume) = self.take(name) else { return };
        crew.add(name, move || {
            let was_untold = volume.record.untold;
            volume.close();
            Ended::Closed { was_untold, is_untold: volume.record.untold }
        });
    }
}

impl Manager {
    /// Stops all devices (their sockets go), flushes all volumes, stops the shards. Nothing is changed after it; a second
    /// call does nothing.
    pub fn shutdown(&self) {
        self.shutdown_within(&Limits::USUAL);
    }

    pub(super) fn shutdown_within(&self, limits: &Limits) {
        self.peek().stopping = true;
        let devices = {
            let mut inner = self.at_rest_within(limits.changes, Some(limits.resizes));
            // While it is known which devices they are: of the moment until they stand still only their volumes are.
            self.leave_account(&inner);
            std::mem::take(&mut inner.devices)
        };
        self.leave_copies();
        self.find_silent(ANSWER);
        stop_all(devices, Instant::now() + limits.devices);
        let Some(engine) = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        self.find_silent(ANSWER);
        self.put_volumes_away(Instant::now() + limits.volumes);
        if let Err(error) = engine.stop() {
            tracing::error!(%error, "while the shards were stopped");
        }
    }

    /// Flushes and closes all volumes. Services leave a clean mark; their tasks need the shards for that.
    fn put_volumes_away(&self, deadline: Instant) {
        let mut leaving = {
            let mut inner = self.peek();
            self.close_account(&inner, inner.volumes.keys());
            // Of those that hang, this is the last that is known.
            self.note_legs_now(&mut inner);
            Leaving::new(&mut inner)
        };
        let mut crew = Crew::new();
        let mut written = Vec::new();
        for (name, volume) in leaving.volumes.iter().filter(|(name, _)| !leaving.formatting.contains(*name)) {
            let live = volume.live.as_ref().ok().map(|live| &live.volume);
            written.push((name.clone(), live.filter(|volume| !volume.geometry().read_only).cloned()));
        }
        for (name, volume) in written {
            let Some(volume) = volume else {
                leaving.note_flushed(&name, &mut crew);
                continue;
            };
            let shards = self.shards.clone();
            crew.add(&name, move || Ended::Flushed(flush(&shards, &volume, deadline)));
        }
        while let Some((name, ended)) = crew.next_done(deadline) {
            self.note_ended(&mut leaving, &mut crew, (&name, ended), deadline);
        }
        for name in leaving.volumes.keys().chain(crew.names()).collect::<BTreeSet<_>>() {
            tracing::error!(
                volume = %name,
                "it, or what it has to do with, does not answer or is being changed: it is left as a kill would leave it"
            );
        }
        // Whoever puts a file away that hangs hangs, too.
        std::mem::forget((leaving, crew));
    }

    fn note_ended(&self, leaving: &mut Leaving, crew: &mut Crew<Ended>, (name, ended): (&Name, Ended), deadline: Instant) {
        match ended {
            Ended::Flushed(Ok(())) | Ended::FlushedAgain(Ok(()) | Err(FlushError::Volume(_))) => {
                leaving.note_flushed(name, crew);
            }
            Ended::Flushed(Err(FlushError::Volume(error))) => {
                tracing::error!(volume = %name, %error, "the volume could not be flushed");
                leaving.lost.insert(name.clone());
                let Some(volume) = leaving.volumes.get_mut(name) else { return };
                if !std::mem::replace(&mut volume.record.untold, true) {
                    self.store_untold(name, true);
                }
                // What this flush was told its guest was not. It may have been told of what came before, and have done nothing else.
                let Ok(live) = &volume.live else { return };
                let (shards, volume) = (self.shards.clone(), Arc::clone(&live.volume));
                crew.add(name, move || Ended::FlushedAgain(flush(&shards, &volume, deadline)));
            }
            // It may have been, and its guest is told of nothing: as after a kill.
            Ended::Flushed(Err(error)) | Ended::FlushedAgain(Err(error)) => {
                tracing::error!(volume = %name, %error, "it is not known whether the volume was flushed");
            }
            Ended::Closed { was_untold, is_untold } => {
                let is_untold = is_untold || leaving.lost.contains(name);
                if is_untold != was_untold {
                    self.store_untold(name, is_untold);
                }
                leaving.note_closed(name, crew);
            }
        }
    }

    /// Whether a volume's guest is to be told, after the next start, that what it wrote may be lost.
    fn store_untold(&self, name: &Name, untold: bool) {
        if let Err(error) = self.store.amend([name], |record| record.untold = untold) {
            tracing::error!(
                volume = %name,
                untold,
                %error,
                "whether it may have lost writes could not be stored: its guest will not be told, or once more than it should"
            );
        }
    }
}

fn stop_all(devices: BTreeMap<Name, Device>, deadline: Instant) {
    let mut crew = Crew::new();
    for (name, device) in devices {
        // One that does not finish, or whose shard hangs, goes with the process.
        crew.add(&name, move || drop(stop(device)));
    }
    while crew.next_done(deadline).is_some() {}
}

/// Flushes a volume by way of any shard that answers and has room for it, and waits for it.
pub(super) fn flush(shards: &[ShardHandle], volume: &Arc<dyn Blocks>, deadline: Instant) -> Result<(), FlushError> {
    loop {
        for shard in shards.iter().filter(|shard| !shard.is_silent()) {
            let Ok(result) = begin_flush(shard, Arc::clone(volume)) else { continue };
            match result.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(answer) => return Ok(answer?),
                Err(RecvTimeoutError::Timeout) => return Err(FlushError::NoAnswer),
                // Requests that hang have all its slots.
                Err(RecvTimeoutError::Disconnected) => {}
            }
        }
        if Instant::now() >= deadline {
            return Err(FlushError::NoAnswer);
        }
        thread::sleep(LOOK);
    }
}

/// Has a shard flush a volume. Without a slot, the report is dropped.
fn begin_flush(shard: &ShardHandle, volume: Arc<dyn Blocks>) -> Result<Receiver<Result<(), BlockError>>, EngineError> {
    let (report, result) = sync_channel(1);
    shard.call(move |shard| {
        let cx = shard.context();
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
    })?;
    Ok(result)
}
