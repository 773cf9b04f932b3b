//! Cells: keepers beside this one, each with a worker of its own, for devices that are to fail alone (docs/isolation.md).
//!
//! To this keeper a cell is a child with a name, which is to run. What it holds and what it serves is its own affair: the two have no
//! link, so that whoever takes over a cell's worker has nobody to talk to but that cell's keeper.

use std::{
    ffi::OsStr,
    process::{Child, Stdio},
    time::Instant,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::process::{Keeper, SETTLED, pause};

/// Cells at most.
const MAX_CELLS: usize = 4096;

/// A cell, running or not.
pub(crate) struct Cell {
    running: Option<Child>,
    /// It is started again when it ends.
    wanted: bool,
    /// Starts in a row without a long life since.
    failures: u32,
    /// When it was started, or has ended.
    since: Instant,
}

impl Cell {
    /// It is to end in order, and not to run any more.
    pub(crate) fn stop(&mut self) {
        self.wanted = false;
        if let Some(child) = &self.running {
            // It may have ended already, but its number is its own until somebody has waited for it.
            let _ = kill_process(Pid::from_child(child), Signal::TERM);
        }
    }

    /// When it is to be started.
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.wanted && self.running.is_none()).then(|| self.since + pause(self.failures))
    }
}

impl Keeper<'_> {
    /// A cell is to run.
    pub(crate) fn start_cell(&mut self, name: &OsStr) {
        if self.stopping || !self.may_have_cells || self.cells.len() >= MAX_CELLS {
            return;
        }
        let new = || Cell { running: None, wanted: true, failures: 0, since: Instant::now() };
        self.cells.entry(name.to_owned()).or_insert_with(new).wanted = true;
    }

    /// Starts the cells that are to run and do not, and forgets those that have ended as they should.
    pub(crate) fn keep_cells(&mut self) {
        let now = Instant::now();
        let mut cells = std::mem::take(&mut self.cells);
        for (name, cell) in &mut cells {
            if cell.running.as_mut().is_some_and(|child| !matches!(child.try_wait(), Ok(None))) {
                cell.failures = if now - cell.since < SETTLED { cell.failures } else { 0 };
                cell.since = now;
                cell.running = None;
            }
            if cell.due().is_some_and(|due| due <= now) {
                cell.running = self.spawn(&self.binary, Some(name), Stdio::null()).ok();
                cell.failures = cell.failures.saturating_add(1);
                cell.since = now;
            }
        }
        cells.retain(|_, cell| cell.wanted || cell.running.is_some());
        self.cells = cells;
    }
}

impl Drop for Keeper<'_> {
    fn drop(&mut self) {
        self.cells.values_mut().for_each(Cell::stop);
        for mut child in std::mem::take(&mut self.cells).into_values().filter_map(|cell| cell.running) {
            // Their keepers give them the time that they need.
            let _ = child.wait();
        }
    }
}
