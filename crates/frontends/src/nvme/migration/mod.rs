//! Moving a controller: to another daemon while its machine goes on, or to a file and back (docs/migration.md).
//!
//! ```text
//!   Running ── pause, wait until nothing is in flight ──► Stop ──► StopCopy: stream.rs ──► MIG_DATA_READ, or a file
//!      ▲                                                   │
//!      └── every vector raised once ◄── Stop ◄── checked ◄─┴─ Resuming ◄── MIG_DATA_WRITE, or a file
//! ```
//!
//! Invariants:
//! * A controller that stands still takes no command, posts nothing and touches no guest memory.
//! * A saved state is checked as a whole before anything of it is taken; what is refused has changed nothing.
//! * While a state is being taken the region says that a reset has begun: a worker that takes over brings the controller to
//!   power-on, and never goes on with half a state.
//! * The log of written pages is complete: what is translated for writing is marked at once (`millrace_memory`), and what may be
//!   written by what was translated before a report is marked again after it.
//!
//! Where the controller stands outlives the worker; a saved state on its way does not. A worker that takes over a controller whose
//! state was being read stands still; one whose state was being written is in error, until it is reset.

mod stream;

use millrace_memory::{Access, GuestAddress};
use millrace_nvme_spec::{
    command::{Cqe, Fuse, Sqe},
    opcode::NvmOpcode,
};
use millrace_vfio_user::{Errno, LogRange, MigrationState};

pub use self::stream::SavedStateError;
use super::{
    admin::is_reachable,
    controller::Controller,
    queue::QueueCaches,
    registers::{Phase, Reset},
    state,
};

/// Bytes that one message moves: less than what a keeper passes on.
const PART: usize = 16 << 10;
/// Bytes of a saved state at most.
const LONGEST: usize = 4 << 20;
/// In the region: it stands still with a state that an operator restored, until its guest's memory is there.
const HELD: u32 = 16;

/// A saved state on its way.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    /// What is yet to be read.
    outgoing: Vec<u8>,
    /// How far it was.
    read: usize,
    /// What was written.
    incoming: Vec<u8>,
}

impl Controller {
    /// Where it stands.
    pub(crate) fn migration_state(&self) -> MigrationState {
        match self.state.survival.migration.get() {
            0 => MigrationState::Running,
            HELD => MigrationState::Stop,
            // Error is the protocol's zero.
            value => MigrationState::from_wire(value).unwrap_or(MigrationState::Error),
        }
    }

    fn stand(&mut self, state: MigrationState) {
        let value = match state {
            MigrationState::Running => 0,
            MigrationState::Error => u32::MAX,
            other => other as u32,
        };
        let still = !matches!(state, MigrationState::Running | MigrationState::PreCopy);
        (self.lifecycle.stopped, self.lifecycle.paused) = (still, still);
        state::commit();
        self.state.survival.migration.set(value);
    }

    /// Goes towards a state as far as it can now. `None`: commands are in flight; to be tried again.
    pub(crate) fn migrate(&mut self, to: MigrationState) -> Option<Result<(), Errno>> {
        use MigrationState::{PreCopy, Resuming, Running, Stop, StopCopy};
        loop {
            let from = self.migration_state();
            if from == to {
                return Some(Ok(()));
            }
            let Some(next) = from.towards(to) else { return Some(Err(Errno::INVAL)) };
            if matches!((from, next), (Running, Stop) | (PreCopy, StopCopy)) {
                self.lifecycle.paused = true;
                if !self.is_settled() {
                    return None;
                }
            }
            if (from, next) == (Resuming, Stop)
                && let Err(error) = self.take_incoming()
            {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(device = self.config.name, error, "a saved state is refused; the device is as it was");
                return Some(Err(Errno::INVAL));
            }
            self.transfer = Transfer::default();
            if next == StopCopy {
                self.transfer.outgoing = self.save();
            }
            self.stand(next);
            if next == Running {
                self.raise_all();
            }
        }
    }

    /// The next part of the saved state.
    pub(crate) fn read_saved(&mut self, most: usize) -> Result<Vec<u8>, Errno> {
        match self.migration_state() {
            MigrationState::PreCopy => return Ok(Vec::new()),
            MigrationState::StopCopy => {}
            _ => return Err(Errno::INVAL),
        }
        let transfer = &mut self.transfer;
        let left = transfer.outgoing.get(transfer.read..).unwrap_or_default();
        let part = left.get(..most.min(PART)).unwrap_or(left).to_vec();
        transfer.read += part.len();
        Ok(part)
    }

    /// The next part of a state to take.
    pub(crate) fn write_saved(&mut self, part: &[u8]) -> Result<(), Errno> {
        if self.migration_state() != MigrationState::Resuming {
            return Err(Errno::INVAL);
        }
        if self.transfer.incoming.len() + part.len() > LONGEST {
            return Err(Errno::FBIG);
        }
        self.transfer.incoming.extend_from_slice(part);
        Ok(())
    }

    /// Nothing was written: nothing changes.
    fn take_incoming(&mut self) -> Result<(), SavedStateError> {
        let incoming = std::mem::take(&mut self.transfer.incoming);
        if incoming.is_empty() { Ok(()) } else { self.take_saved(&incoming) }
    }

    /// Takes a saved state, after checking all of it.
    fn take_saved(&mut self, saved: &[u8]) -> Result<(), SavedStateError> {
        if !self.is_settled() {
            return Err(SavedStateError::Running);
        }
        let saved = self.parse_saved(saved)?;
        self.reset(Reset::PowerOn);
        let resetting = &self.state.survival.resetting;
        resetting.set(Reset::PowerOn as u32 + 1);
        state::commit();
        self.adopt(&saved);
        state::commit();
        self.state.survival.resetting.set(0);
        self.caches = QueueCaches::new(self.config.queues);
        self.recover_records();
        self.go_on();
        Ok(())
    }

    /// A device that has no client yet takes a saved state, and goes on with it once its guest's memory is there.
    pub(crate) fn hold_saved(&mut self, saved: &[u8]) -> Result<(), SavedStateError> {
        self.take_saved(saved)?;
        self.stand(MigrationState::Stop);
        self.state.survival.migration.set(HELD);
        Ok(())
    }

    /// Whether it has a state that an operator restored, and waits for its guest.
    pub(crate) fn awaits_guest(&self) -> bool {
        self.state.survival.migration.get() == HELD
    }

    /// The client's memory has changed: goes on with the state that an operator restored, if all its queues can be reached.
    pub(crate) fn release(&mut self) {
        if !self.awaits_guest() || !self.are_queues_reachable() {
            return;
        }
        self.stand(MigrationState::Running);
        self.raise_all();
        // Not before: a worker that is killed as it writes to the log has gone on.
        tracing::info!(device = self.config.name, "goes on with the state that was restored");
    }

    fn are_queues_reachable(&self) -> bool {
        let reach = |base: u64, len: u64, access| is_reachable(&self.memory, base, len, access);
        let registers = &self.state.registers;
        let shadows = [&registers.shadow_doorbells, &registers.event_indexes].map(state::Cell::get);
        let page = (u64::from(self.config.queues) + 1) * 8;
        shadows.into_iter().all(|base| base == 0 || reach(base, page, Access::Write))
            && self.state.sq.iter().all(|sq| reach(sq.base.get(), u64::from(sq.entries.get()) * 64, Access::Read))
            && self.state.cq.iter().all(|cq| reach(cq.base.get(), u64::from(cq.entries.get()) * 16, Access::Write))
    }

    /// The client is gone before the device went on with the state that an operator restored: that state goes as well. To be called while the
    /// client is on record: without one, a worker that takes over would take it for a device that still waits for its guest.
    pub(crate) fn give_up_saved(&mut self) {
        if self.awaits_guest() {
            self.state.survival.resetting.set(Reset::PowerOn as u32 + 1);
            state::commit();
            self.leave_migration();
        }
    }

    /// The controller is about to be reset by its registers, which only a guest that runs does: not the one whose state an operator
    /// restored. To this one the controller is as after any such reset: configuration space and the MSI-X table stay, those of the restored state
    /// where it has not written its own. A function level reset that came before was taken for a restored machine's.
    pub(crate) fn lose_saved(&mut self) {
        if self.awaits_guest() {
            self.give_up_saved();
            tracing::warn!(
                device = self.config.name,
                "another guest than that of the restored state resets the controller: the state is given up"
            );
        }
    }

    /// It is reset, or its client is gone: it runs.
    pub(crate) fn leave_migration(&mut self) {
        self.transfer = Transfer::default();
        self.stand(MigrationState::Running);
    }

    /// The worker before this one has ended.
    pub(crate) fn resume_migration(&mut self) {
        match self.migration_state() {
            _ if self.awaits_guest() => (self.lifecycle.stopped, self.lifecycle.paused) = (true, true),
            MigrationState::StopCopy => self.stand(MigrationState::Stop),
            MigrationState::Resuming => self.stand(MigrationState::Error),
            other => self.stand(other),
        }
    }

    /// What the interrupts of completions before were is not known: every vector in use is raised once.
    pub(crate) fn raise_all(&mut self) {
        for cq in self.state.cq.iter().filter(|cq| cq.entries.get() != 0 && cq.interrupts.get() != 0) {
            self.interrupts.pend(cq.vector.get(), 0);
        }
    }

    /// Whether nothing is in flight that could change anything: event requests wait in their list, and first halves of pairs,
    /// which have touched nothing, on record; also those that it took over, as long as it stands still.
    pub(crate) fn is_settled(&self) -> bool {
        self.in_flight == self.state.events.outstanding.get() + self.io_parked() + self.standing()
            && (self.lifecycle.stopped || self.again.is_empty())
            && !self.sink.has_results()
            && !self.has_jobs()
            && self.phase != Phase::Resetting
            && !self.is_shutting_down()
            && self.interrupts.next_deadline().is_none()
    }

    /// Whether, moreover, its guest has rung for nothing that is not done.
    pub(crate) fn is_at_rest(&mut self) -> bool {
        self.is_settled() && !(self.phase == Phase::Ready && self.can_take())
    }

    // ---- the log of written pages -----------------------------------------------------------------------------------

    /// Begins the log.
    pub(crate) fn start_logging(&mut self) {
        if let Some(client) = &self.client {
            client.set_logging(true);
        }
        self.memory.log_writes(true);
        self.caches.forget_translations();
        self.mark_standing();
    }

    /// Ends it.
    pub(crate) fn stop_logging(&mut self) {
        if let Some(client) = &self.client {
            client.set_logging(false);
        }
        self.memory.log_writes(false);
    }

    /// What the worker before this one had logged is lost: everything may have been written.
    pub(crate) fn resume_logging(&mut self) {
        self.memory.log_writes(true);
        self.memory.mark_written(GuestAddress(0), u64::MAX);
    }

    /// Tells and forgets what is in the log.
    pub(crate) fn report(&mut self, range: LogRange, bitmap: &mut [u8]) -> Result<(), Errno> {
        if !self.memory.logs_writes() {
            return Err(Errno::INVAL);
        }
        if bitmap.len() > PART {
            return Err(Errno::TOOBIG);
        }
        self.memory.take_written(GuestAddress(range.address), range.size, range.page_size, bitmap);
        if !self.lifecycle.stopped {
            self.mark_standing();
        }
        Ok(())
    }

    /// Marks what may be written without being translated again: completion queues, shadow doorbells, and the data and metadata of
    /// reads that are in flight.
    fn mark_standing(&mut self) {
        for cq in &self.state.cq {
            self.memory.mark_written(GuestAddress(cq.base.get()), u64::from(cq.entries.get()) * Cqe::SIZE as u64);
        }
        let registers = &self.state.registers;
        if registers.shadow_doorbells.get() != 0 {
            let len = (u64::from(self.config.queues) + 1) * 8;
            for page in [&registers.shadow_doorbells, &registers.event_indexes] {
                self.memory.mark_written(GuestAddress(page.get()), len);
            }
        }
        // What says that it is one of a pair is refused in the end, and may wait for that as long as its guest likes.
        let is_read =
            |(sqid, sqe): &(u16, Sqe)| *sqid != 0 && sqe.nvm_opcode() == NvmOpcode::READ && sqe.flags.fuse() == Fuse::NORMAL;
        let mut reads = self.records.commands().into_iter().filter(is_read);
        // What one of them writes may be anywhere: then so may what the others do, and all is marked once.
        if !reads.all(|(_, sqe)| self.mark_read(&sqe)) {
            self.memory.mark_written(GuestAddress(0), u64::MAX);
        }
    }
}

#[cfg(test)]
mod tests;
