//! The thread of a copy.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_services::copy::{Copied, Copier, CopyError};

use crate::{Name, manager::WeakManager, model::CopyState, store::CopyRecord};

/// Bytes of a step where there is no rate.
const STEP: u64 = 16 << 20;
/// Steps of a second where there is one.
const STEPS: u64 = 8;
/// Bytes of a step at least.
const LEAST: u64 = 64 << 10;
/// How often progress is made durable and stored.
const STORED_EVERY: Duration = Duration::from_secs(1);
/// How long what could not be stored is left alone.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// Longest sleep of a copy that keeps to a rate, before it looks whether it must end.
const LOOK: Duration = Duration::from_millis(20);

/// What a copy's thread is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    GoOn,
    /// End, and keep what was done.
    Keep,
    /// End; the copy is forgotten.
    Cancel,
}

/// How far a copy came.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    done: u64,
    copied: Copied,
}

impl Progress {
    pub(super) fn apply(self, record: &mut CopyRecord) {
        let Copied { moved, offloaded, skipped } = self.copied;
        (record.done, record.moved, record.offloaded, record.skipped) = (self.done, moved, offloaded, skipped);
    }
}

/// What a copy's thread and the manager tell each other.
pub(super) struct Live {
    wish: Mutex<Wish>,
    progress: Mutex<Progress>,
    /// Bytes per second; 0: as many as there can be.
    rate: AtomicU64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Live {
    pub(super) fn new(record: &CopyRecord) -> Self {
        let CopyRecord { done, moved, offloaded, skipped, .. } = *record;
        Self {
            wish: Mutex::new(Wish::GoOn),
            progress: Mutex::new(Progress { done, copied: Copied { moved, offloaded, skipped } }),
            rate: AtomicU64::new(record.rate.map_or(0, |rate| rate.0)),
        }
    }

    pub(super) fn tell(&self, wish: Wish) {
        *locked(&self.wish) = wish;
    }

    pub(super) fn wish(&self) -> Wish {
        *locked(&self.wish)
    }

    pub(super) fn progress(&self) -> Progress {
        *locked(&self.progress)
    }

    pub(super) fn set_rate(&self, rate: u64) {
        self.rate.store(rate, Ordering::Relaxed);
    }
}

/// See the module.
pub(super) struct Pump {
    manager: WeakManager,
    name: Name,
    copier: Copier,
    live: Arc<Live>,
    /// What was copied before this thread began.
    before: Copied,
    bytes: u64,
    at: u64,
}

/// How a copy's thread comes to its end.
enum End {
    Done,
    Told(Wish),
}

impl Pump {
    pub(super) fn new(manager: WeakManager, record: &CopyRecord, copier: Copier, live: Arc<Live>) -> Self {
        let (before, name, bytes, at) = (live.progress().copied, record.name.clone(), record.bytes, record.done);
        Self { manager, name, copier, live, before, bytes, at }
    }

    pub(super) fn run(mut self) {
        let end = self.copy();
        match end {
            Ok(End::Done) => {
                tracing::info!(copy = %self.name, "copy done");
                self.end(|record| record.state = CopyState::Done);
            }
            // What the last steps did is not durable, and does not count.
            Ok(End::Told(Wish::Cancel)) => {}
            Ok(End::Told(_)) => match self.copier.flush() {
                Ok(()) => drop(self.keep(|_| ())),
                Err(error) => self.fail(&error),
            },
            Err(error) => self.fail(&error),
        }
        if self.live.wish() == Wish::Cancel {
            self.forget();
        }
    }

    fn copy(&mut self) -> Result<End, CopyError> {
        let mut stored = Instant::now();
        while self.at < self.bytes {
            match self.live.wish() {
                Wish::GoOn => {}
                told => return Ok(End::Told(told)),
            }
            let rate = self.live.rate.load(Ordering::Relaxed);
            let most = if rate == 0 { STEP } else { (rate / STEPS).clamp(LEAST, STEP) };
            let (begun, before) = (Instant::now(), self.copier.worked());
            self.at = self.copier.step(self.at, most)?;
            *locked(&self.live.progress) = self.progress();
            let worked = self.copier.worked() - before;
            if self.at < self.bytes {
                self.keep_to_rate(rate, worked, begun);
            }
            if stored.elapsed() >= STORED_EVERY {
                self.copier.flush()?;
                let _ = self.keep(|_| ());
                stored = Instant::now();
            }
        }
        self.copier.flush()?;
        Ok(End::Done)
    }

    /// Waits as long as so many bytes take, from `begun` on, at the rate that there was or the one that there is by then, whichever is faster.
    fn keep_to_rate(&self, before: u64, bytes: u64, begun: Instant) {
        while self.live.wish() == Wish::GoOn {
            let now = self.live.rate.load(Ordering::Relaxed);
            if before == 0 || now == 0 {
                return;
            }
            let rate = before.max(now);
            let takes = Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(rate)) as u64);
            let left = takes.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return;
            }
            thread::sleep(left.min(LOOK));
        }
    }

    fn progress(&self) -> Progress {
        let (now, before) = (self.copier.copied(), self.before);
        let copied = Copied {
            moved: before.moved + now.moved,
            offloaded: before.offloaded + now.offloaded,
            skipped: before.skipped + now.skipped,
        };
        Progress { done: self.at, copied }
    }

    /// Stores how far it came, which must be durable; whether that could be.
    fn keep(&self, change: impl FnOnce(&mut CopyRecord)) -> bool {
        let progress = self.progress();
        self.note(|record| {
            progress.apply(record);
            change(record);
        })
    }

    fn note(&self, change: impl FnOnce(&mut CopyRecord)) -> bool {
        let Some(manager) = self.manager.upgrade() else { return true };
        manager.peek().note_copy(&manager, &self.name, &self.live, change)
    }

    /// It was cancelled. Where that cannot be stored it stays, paused, until it is cancelled again.
    fn forget(self) {
        let Self { manager, name, live, copier, .. } = self;
        // Who may have its volumes then finds nobody there.
        drop(copier);
        let Some(manager) = manager.upgrade() else { return };
        let forgotten = manager.forget_copy(&mut manager.peek(), &name, Some(&live));
        if let Err(error) = forgotten {
            tracing::warn!(copy = %name, %error, "a copy that was cancelled could not be forgotten yet: it is paused");
        }
    }

    /// Stores that it is done. Until then it has its target: a start of the daemon would have it go on.
    fn end(&self, change: impl Fn(&mut CopyRecord)) {
        self.insist(|| self.keep(&change));
    }

    fn fail(&self, error: &CopyError) {
        tracing::error!(copy = %self.name, %error, "the copy has failed");
        self.insist(|| self.note(|record| (record.state, record.reason) = (CopyState::Failed, Some(error.to_string()))));
    }

    /// Tries until it is stored, or the thread is to end.
    fn insist(&self, stored: impl Fn() -> bool) {
        while !stored() {
            let again = Instant::now() + TRY_AGAIN;
            while Instant::now() < again {
                if self.live.wish() != Wish::GoOn {
                    return;
                }
                thread::sleep(LOOK);
            }
        }
    }
}
