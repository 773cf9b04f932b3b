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
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStrExt, process::ExitStatusExt},
    },
    path::Path,
    process::ExitStatus,
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::net::RecvFlags;

use crate::{
    Key, Kind, MAX_LAYOUTS, UpgradeResult,
    link::LET_GO as LET_GO_FLAG,
    process::{Keeper, Worker, failed, is_fault, monotonic_micros, open_binary, place_of},
    wire::{self, Message, What},
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
    id: [u8; 16],
    trial: Duration,
    /// When the old one was told to let go: an instant, and the system's clock.
    asked: Option<(Instant, u64)>,
    deadline: Instant,
}

/// A binary has taken another one's place, which takes it again if the new one fails.
pub(crate) struct Trial {
    previous: Rc<OwnedFd>,
    /// What the previous worker said of the layouts that it understands.
    pub(crate) layouts: Box<[u8]>,
    id: [u8; 16],
    length: Duration,
    /// It has served.
    served: bool,
    /// It has died, though not by a fault of its own.
    died: bool,
    /// It did not serve in time.
    late: bool,
    /// When it must serve, and when it has proved itself.
    deadline: Instant,
}

impl Keeper<'_> {
    /// Starts the binary at a path beside the worker.
    pub(crate) fn upgrade(&mut self, worker: &Worker, message: Message, path: &[u8]) {
        let id = message.key.owner;
        if self.next.is_some() || self.stopping {
            let _ = wire::tell(worker.socket.as_fd(), result(id, UpgradeResult::Busy), &[]);
            return;
        }
        let opened = open_binary(Path::new(OsStr::from_bytes(path))).map_err(failed("open the binary"));
        let place = opened.as_ref().ok().and_then(|binary| place_of(binary).ok().flatten());
        if opened.is_ok() && !place.is_some_and(|place| self.places.contains(&place)) {
            return self.tell_result(worker, id, UpgradeResult::NotAllowed);
        }
        match opened.and_then(|binary| self.start(&Rc::new(binary))) {
            Ok(next) => {
                let trial = Duration::from_millis(message.number).min(LONGEST_TRIAL);
                let deadline = Instant::now() + START_LIMIT;
                self.next = Some(Next { worker: next, id, trial, asked: None, deadline });
            }
            Err(error) => {
                let errno = error.source.raw_os_error().unwrap_or(0);
                self.tell_result(worker, id, UpgradeResult::CannotRun(errno));
            }
        }
    }

    /// Hears what the new binary's worker says, which can only be that it is warm, and that it has ended.
    pub(crate) fn listen_to_next(&mut self, worker: &mut Worker, ended: bool) {
        let Some(next) = &mut self.next else { return };
        let mut buffer = [0; wire::SIZE + MAX_LAYOUTS];
        let received = wire::receive(next.worker.socket.as_fd(), &mut buffer, RecvFlags::DONTWAIT);
        next.worker.silent = matches!(received, Ok(None));
        let said =
            received.ok().flatten().and_then(|received| received.message.map(|message| (message.what, received.data)));
        if let Some((What::WARM, layouts)) = said.filter(|_| next.asked.is_none()) {
            next.worker.layouts = layouts.into();
            next.asked = Some((Instant::now(), monotonic_micros()));
            next.deadline = Instant::now() + LET_GO_LIMIT;
            // A worker that does not hear it is ended by the deadline.
            let _ = wire::tell(worker.socket.as_fd(), Message::plain(What::LET_GO), layouts);
            return;
        }
        // When the old one lets go already, it is the next one's to die.
        if ended && next.asked.is_none() {
            let id = next.id;
            let how = next.worker.child.wait().map_or(0, ExitStatusExt::into_raw);
            self.next = None;
            self.tell_result(worker, id, UpgradeResult::DiedAtStart(how));
        }
    }

    /// The old worker does not let go.
    pub(crate) fn refused(&mut self, worker: &Worker) {
        if let Some(id) = self.give_up_next() {
            self.tell_result(worker, id, UpgradeResult::Refused);
        }
    }

    /// The new one does not get its turn.
    pub(crate) fn give_up_next(&mut self) -> Option<[u8; 16]> {
        let mut next = self.next.take()?;
        let _ = next.worker.child.kill();
        let _ = next.worker.child.wait();
        Some(next.id)
    }

    /// When the time is to be looked at.
    pub(crate) fn deadline(&self, worker: &Worker) -> Option<Instant> {
        let next = self.next.as_ref().map(|next| next.deadline);
        let trial = self.trial.as_ref().filter(|trial| worker.ready.is_some() || !trial.late).map(|trial| trial.deadline);
        next.into_iter().chain(trial).chain(self.next_cell()).min()
    }

    /// Does what is due.
    pub(crate) fn keep_time(&mut self, worker: &mut Worker) {
        let now = Instant::now();
        if let Some(next) = self.next.as_mut().filter(|next| now >= next.deadline) {
            if next.asked.is_some() {
                // It had its time: what it leaves is what a dead worker leaves.
                let _ = worker.child.kill();
                next.deadline = now + LONGEST_TRIAL;
            } else if let Some(id) = self.give_up_next() {
                self.tell_result(worker, id, UpgradeResult::SilentAtStart);
            }
        }
        let Some(trial) = self.trial.as_mut().filter(|trial| now >= trial.deadline) else { return };
        if worker.ready.is_none() {
            trial.late = true;
            let _ = worker.child.kill();
        } else {
            self.settle(worker);
        }
    }

    /// The new binary has proved itself.
    pub(crate) fn settle(&mut self, worker: &Worker) {
        self.trial = None;
        let _ = wire::tell(worker.socket.as_fd(), Message::plain(What::SETTLED), &[]);
    }

    /// The worker serves.
    pub(crate) fn serves(&mut self, worker: &Worker) {
        let Some(trial) = &mut self.trial else { return };
        trial.deadline = Instant::now() + trial.length;
        if !std::mem::replace(&mut trial.served, true) {
            let (id, pause) = (trial.id, self.idle_since.elapsed().as_micros());
            self.tell_result(worker, id, UpgradeResult::Done(u64::try_from(pause).unwrap_or(u64::MAX)));
        }
    }

    /// Who follows a worker that has ended: the new binary's, or `None`: one of [`Self::binary`], to be started.
    pub(crate) fn successor(&mut self, ended: &Worker, status: ExitStatus, begin: &mut Message) -> Option<Worker> {
        if self.next.as_ref().is_some_and(|next| next.asked.is_none()) {
            let id = self.give_up_next()?;
            self.upgraded = Some(result(id, UpgradeResult::OldDied));
        }
        if let Some(Next { worker, id, trial, asked, .. }) = self.next.take() {
            if let Some((since, micros)) = asked.filter(|_| ended.ready.is_some()) {
                self.idle_since = since;
                begin.set_died_micros(micros);
            }
            begin.number |= if status.success() { LET_GO_FLAG } else { 0 };
            // That one is told how this ends, and not how the last one did.
            self.upgraded = None;
            let previous = std::mem::replace(&mut self.binary, Rc::clone(&worker.binary));
            let (layouts, deadline) = (ended.layouts.clone(), Instant::now() + READY_LIMIT);
            let (served, died, late) = (false, false, false);
            self.trial = Some(Trial { previous, layouts, id, length: trial, served, died, late, deadline });
            return Some(worker);
        }
        let trial = self.trial.as_mut()?;
        let died_before = std::mem::replace(&mut trial.died, true);
        if ended.ready.is_some() && !is_fault(status.signal()) && !died_before {
            // Somebody has killed it, once.
            trial.deadline = Instant::now() + READY_LIMIT;
            return None;
        }
        let Trial { previous, id, late, .. } = self.trial.take()?;
        self.binary = previous;
        let how = if late { UpgradeResult::Silent } else { UpgradeResult::Died(status.into_raw()) };
        self.upgraded = Some(result(id, how));
        // The new binary is to blame, and no device.
        begin.number = begin.number & !0xffff | u64::from(libc::SIGKILL.unsigned_abs());
        None
    }

    /// Remembers how an upgrade ended, and tells the worker.
    fn tell_result(&mut self, worker: &Worker, id: [u8; 16], how: UpgradeResult) {
        let message = result(id, how);
        self.upgraded = Some(message);
        let _ = wire::tell(worker.socket.as_fd(), message, &[]);
    }
}

fn result(id: [u8; 16], how: UpgradeResult) -> Message {
    let (slot, number) = how.encode();
    Message { number, ..Message::new(What::UPGRADED, Key { owner: id, kind: Kind(0), slot }) }
}
