//! Another binary in the place of the one that runs.
//!
//! ```text
//!   worker: UPGRADE path ─► keeper starts the new binary ─► new one: WARM, layouts ─► keeper: LET_GO, layouts ─► worker
//!   worker ends ─► new one: HELD …, BEGIN (on trial) ─► READY ─► trial over: SETTLED
//!                                          └── fails ─► the old binary: HELD …, BEGIN
//! ```
//!
//! Until LET_GO the old worker serves and notices nothing. From then on one of the two binaries serves next, whatever happens: what is
//! handed over is what any worker's death hands over, so that there is nothing to undo.

use std::{
    ffi::OsStr,
    io,
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, process::ExitStatusExt},
    },
    path::Path,
    process::ExitStatus,
    time::{Duration, Instant},
};

use rustix::fs::OFlags;

use crate::{
    Key, Kind, UpgradeResult,
    cells::Cell,
    link::LET_GO as LET_GO_FLAG,
    process::{Keeper, Worker, is_fault, is_link, monotonic_micros, open_binary},
    wire::{Message, What},
};

/// How long a new binary may take until it is warm.
const START_LIMIT: Duration = Duration::from_secs(10);
/// How long the old worker may take to let go.
const LET_GO_LIMIT: Duration = Duration::from_secs(2);
/// How long the new one may take until it serves: a machine monitor waits 5 seconds for an answer.
const READY_LIMIT: Duration = Duration::from_secs(4);
/// The longest trial, so that no clock overflows.
const LONGEST_TRIAL: Duration = Duration::from_secs(24 * 3600);

/// A worker of another binary, which has not had its turn.
pub(crate) struct Next {
    pub(crate) worker: Worker,
    binary: OwnedFd,
    id: [u8; 16],
    trial: Duration,
    /// When the old one was told to let go, by the system's clock.
    pub(crate) asked: Option<u64>,
    /// When it must be warm, and then when the old one must have ended. `None`: it had its time.
    deadline: Option<Instant>,
}

/// A binary has taken another one's place, which takes it again if the new one fails.
pub(crate) struct Trial {
    previous: OwnedFd,
    /// What the previous worker said of the layouts that it understands.
    pub(crate) layouts: Box<[u8]>,
    id: [u8; 16],
    length: Duration,
    /// It has served and died, though not by a fault of its own.
    died: bool,
    /// When it must serve, and then when it has proved itself. `None`: it did not serve in time.
    deadline: Option<Instant>,
}

impl Keeper<'_> {
    /// Starts the binary at a path, which names one of the allowed places as it really is, beside the worker.
    pub(crate) fn upgrade(&mut self, message: Message, path: &[u8]) -> Result<(), UpgradeResult> {
        if self.next.is_some() || self.stopping {
            return Err(UpgradeResult::Busy);
        }
        let cannot = |error: io::Error| UpgradeResult::CannotRun(error.raw_os_error().unwrap_or(0));
        let path = Path::new(OsStr::from_bytes(path));
        // By its text first: a look may wait for a file system that does not answer, and everybody would wait with this thread. So no
        // link is followed either: where it leads, a look would tell.
        let place = self.places.iter().find(|place| path.parent() == Some(place.as_path()));
        let (Some(place), Some(name)) = (place, path.file_name()) else { return Err(UpgradeResult::NotAllowed) };
        let (binary, place) = open_binary(&place.join(name), OFlags::NOFOLLOW).map_err(cannot)?;
        if !self.places.contains(&place) || is_link(&binary).map_err(cannot)? {
            return Err(UpgradeResult::NotAllowed);
        }
        let worker = self.start(&binary).map_err(cannot)?;
        let (id, trial) = (message.key.owner, Duration::from_millis(message.number).min(LONGEST_TRIAL));
        let deadline = Some(Instant::now() + START_LIMIT);
        self.next = Some(Next { worker, binary, id, trial, asked: None, deadline });
        Ok(())
    }

    /// Hears what the new binary's worker says, which can only be that it is warm, and that it has ended.
    pub(crate) fn listen_to_next(&mut self, worker: &Worker, buffer: &mut [u8]) {
        // When the old one lets go already, it is the next one's to die.
        let Some(next) = self.next.as_mut().filter(|next| next.asked.is_none()) else { return };
        let ended = next.worker.child.try_wait().ok().flatten();
        let received = next.worker.hear(buffer);
        if let Some(warm) = received.filter(|said| said.message.is_some_and(|message| message.what == What::WARM)) {
            next.worker.layouts = warm.data.into();
            next.asked = Some(monotonic_micros());
            next.deadline = Some(Instant::now() + LET_GO_LIMIT);
            // A worker that does not hear it is ended by the deadline.
            worker.tell(Message::plain(What::LET_GO), warm.data);
        } else if let Some(status) = ended {
            self.call_off(worker, UpgradeResult::DiedAtStart(status.into_raw()));
        }
    }

    /// The new one does not get its turn.
    pub(crate) fn call_off(&mut self, worker: &Worker, how: UpgradeResult) {
        if let Some(next) = self.next.take() {
            self.tell_result(worker, next.id, how);
        }
    }

    /// When the time is to be looked at.
    pub(crate) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        let next = self.next.iter().filter_map(|next| next.deadline);
        let trial = self.trial.iter().filter_map(|trial| trial.deadline);
        next.chain(trial).chain(self.cells.values().filter_map(Cell::due))
    }

    /// Does what is due.
    pub(crate) fn keep_time(&mut self, worker: &mut Worker) {
        let now = Instant::now();
        let is_over = |deadline: &mut Option<Instant>| deadline.take_if(|deadline| now >= *deadline).is_some();
        let next_is_over = self.next.as_mut().is_some_and(|next| is_over(&mut next.deadline));
        let trial_is_over = self.trial.as_mut().is_some_and(|trial| is_over(&mut trial.deadline));
        if next_is_over && self.next.as_ref().is_some_and(|next| next.asked.is_none()) {
            self.call_off(worker, UpgradeResult::SilentAtStart);
        }
        if next_is_over && self.next.is_some() || trial_is_over && worker.ready.is_none() {
            // It had its time: what it leaves is what a dead worker leaves.
            let _ = worker.child.kill();
        } else if trial_is_over {
            self.settle(worker);
        }
    }

    /// The new binary has proved itself.
    pub(crate) fn settle(&mut self, worker: &Worker) {
        self.trial = None;
        worker.tell(Message::plain(What::SETTLED), &[]);
    }

    /// The worker serves.
    pub(crate) fn serves(&mut self, worker: &Worker) {
        let Some(trial) = &mut self.trial else { return };
        trial.deadline = Some(Instant::now() + trial.length);
        if !trial.died {
            let (id, pause) = (trial.id, monotonic_micros().saturating_sub(self.idle_since));
            self.tell_result(worker, id, UpgradeResult::Done(pause));
        }
    }

    /// Who follows a worker that has ended: the new binary's, or `None`: one of [`Self::binary`], to be started.
    pub(crate) fn successor(&mut self, ended: &Worker, status: ExitStatus) -> Option<Worker> {
        let next = self.next.take_if(|next| next.asked.is_some());
        let Some(Next { worker, binary, id, trial: length, asked: Some(asked), .. }) = next else {
            self.call_off(ended, UpgradeResult::OldDied);
            self.judge(ended, status);
            return None;
        };
        if ended.ready.is_some() {
            self.idle_since = asked;
        }
        self.begin.number |= if status.success() { LET_GO_FLAG } else { 0 };
        // That one is told how this ends, and not how the last one did.
        self.upgraded = None;
        let previous = std::mem::replace(&mut self.binary, binary);
        let (layouts, deadline) = (ended.layouts.clone(), Some(Instant::now() + READY_LIMIT));
        self.trial = Some(Trial { previous, layouts, id, length, died: false, deadline });
        Some(worker)
    }

    /// A worker has ended: if its binary was on trial, that is all, unless somebody has killed it, once.
    fn judge(&mut self, ended: &Worker, status: ExitStatus) {
        let Some(trial) = self.trial.take() else { return };
        if ended.ready.is_some() && !is_fault(status.signal()) && !trial.died {
            let deadline = Some(Instant::now() + READY_LIMIT);
            self.trial = Some(Trial { died: true, deadline, ..trial });
            return;
        }
        let how = if trial.deadline.is_none() { UpgradeResult::Silent } else { UpgradeResult::Died(status.into_raw()) };
        self.tell_result(ended, trial.id, how);
        self.binary = trial.previous;
        // The new binary is to blame, and no device.
        self.begin.number = self.begin.number & !0xffff | u64::from(libc::SIGKILL.unsigned_abs());
    }

    /// Remembers how an upgrade ended, and tells the worker.
    pub(crate) fn tell_result(&mut self, worker: &Worker, id: [u8; 16], how: UpgradeResult) {
        let (slot, number) = how.encode();
        let message = Message { number, ..Message::new(What::UPGRADED, Key { owner: id, kind: Kind(0), slot }) };
        self.upgraded = Some(message);
        worker.tell(message, &[]);
    }
}
