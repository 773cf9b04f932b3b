//! Cells: keepers beside this one, each with a worker of its own, for devices that are to fail alone (docs/isolation.md).
//!
//! To this keeper a cell is a child with a name, which is to run. What it holds and what it serves is its own affair: the two have no
//! link, so that whoever takes over a cell's worker has nobody to talk to but that cell's keeper.

use std::{
    ffi::{OsStr, OsString},
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    process::{Child, Stdio},
    time::Instant,
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::{
    process::{FIRST_WAIT, Keeper, LONGEST_WAIT, SETTLED},
    score,
};

/// Cells at most.
const MAX_CELLS: usize = 4096;

/// A cell, running or not.
pub(crate) struct Cell {
    running: Option<Running>,
    /// It is started again when it ends.
    wanted: bool,
    /// Ends in a row soon after its start.
    failures: u32,
    /// Not before this.
    due: Instant,
}

struct Running {
    child: Child,
    /// Readable when it has ended.
    end: OwnedFd,
    since: Instant,
}

impl Cell {
    /// What is readable when it has ended.
    pub(crate) fn end(&self) -> Option<&OwnedFd> {
        self.running.as_ref().map(|running| &running.end)
    }

    fn tell_to_stop(&self) {
        if let Some(running) = &self.running {
            // It may have ended already.
            let _ = pidfd_send_signal(&running.end, Signal::TERM);
        }
    }

    /// Looks whether it has ended.
    fn look(&mut self) {
        let Some(running) = &mut self.running else { return };
        if matches!(running.child.try_wait(), Ok(None)) {
            return;
        }
        self.failures = if running.since.elapsed() < SETTLED { self.failures.saturating_add(1) } else { 0 };
        let wait = FIRST_WAIT.saturating_mul(1 << self.failures.min(16)).min(LONGEST_WAIT);
        self.due = Instant::now() + wait;
        self.running = None;
    }
}

impl Keeper<'_> {
    /// A cell is to run.
    pub(crate) fn start_cell(&mut self, name: &OsStr) {
        if self.stopping || self.cells.len() >= MAX_CELLS {
            return;
        }
        let new = || Cell { running: None, wanted: true, failures: 0, due: Instant::now() };
        self.cells.entry(name.to_owned()).or_insert_with(new).wanted = true;
        self.keep_cells();
    }

    /// A cell is not to run any more.
    pub(crate) fn stop_cell(&mut self, name: &OsStr) {
        let Some(cell) = self.cells.get_mut(name) else { return };
        cell.wanted = false;
        cell.tell_to_stop();
    }

    /// When a cell is to be started.
    pub(crate) fn next_cell(&self) -> Option<Instant> {
        let waiting = self.cells.values().filter(|cell| cell.wanted && cell.running.is_none());
        waiting.map(|cell| cell.due).min()
    }

    /// Starts the cells that are to run and do not, and forgets those that have ended as they should.
    pub(crate) fn keep_cells(&mut self) {
        self.cells.values_mut().for_each(Cell::look);
        self.cells.retain(|_, cell| cell.wanted || cell.running.is_some());
        let now = Instant::now();
        let is_due = |cell: &Cell| cell.wanted && cell.running.is_none() && cell.due <= now;
        let due: Vec<OsString> = self.cells.iter().filter(|(_, cell)| is_due(cell)).map(|(name, _)| name.clone()).collect();
        for name in due {
            let started = self.spawn_cell(&name);
            let Some(cell) = self.cells.get_mut(&name) else { continue };
            cell.running = started.ok();
            cell.due = now + LONGEST_WAIT;
        }
    }

    fn spawn_cell(&self, name: &OsStr) -> std::io::Result<Running> {
        let binary = format!("/proc/self/fd/{}", self.binary.as_raw_fd());
        let mut child = (self.cell)(Path::new(&binary), name).stdin(Stdio::null()).spawn()?;
        // What this keeper was given and not what it has: the cell's does with that what this one did.
        self.score.into_iter().for_each(|score| score::expose(child.id(), score));
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(end) => Ok(Running { child, end, since: Instant::now() }),
            Err(errno) => {
                // Nobody would notice its end.
                child.kill()?;
                child.wait()?;
                Err(errno.into())
            }
        }
    }

    /// All of them are to end in order.
    pub(crate) fn stop_cells(&mut self) {
        for cell in self.cells.values_mut() {
            cell.wanted = false;
            cell.tell_to_stop();
        }
    }

    /// Ends them, and waits for it.
    pub(crate) fn end_cells(&mut self) {
        self.stop_cells();
        for running in std::mem::take(&mut self.cells).into_values().filter_map(|cell| cell.running) {
            let mut child = running.child;
            // Their keepers give them the time that they need.
            let _ = child.wait();
        }
    }
}
