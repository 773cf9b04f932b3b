//! What is measured: daemons behind vfio-user or vhost-user sockets.

mod ours;
mod qemu;
mod spdk;

use std::path::PathBuf;

pub(crate) use ours::{Ours, Setup};
pub(crate) use qemu::{Qemu, storage_daemon};
pub(crate) use spdk::{Spdk, Tree};

use crate::{error::Failure, process::Daemon};

/// What a daemon's poll threads have done since they started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Cycles of the time stamp counter in passes that found work.
    pub(crate) busy_cycles: f64,
    /// I/O commands finished.
    pub(crate) commands: f64,
}

impl Work {
    /// Cycles per command since an earlier look; `None` when there were no commands.
    pub(crate) fn cycles_since(self, earlier: Self) -> Option<f64> {
        let commands = self.commands - earlier.commands;
        (commands > 0.0).then(|| (self.busy_cycles - earlier.busy_cycles) / commands)
    }
}

/// A daemon with devices by name.
pub(crate) trait Subject {
    /// `ours` or the peer's.
    fn name(&self) -> &'static str;
    /// The folder that holds a device's vfio-user socket, `cntrl`; a virtio disk's socket itself.
    fn folder(&self, device: &str) -> PathBuf;
    /// Its process.
    fn daemon(&mut self) -> &mut Daemon;
    /// What it has done.
    fn work(&self) -> Result<Work, Failure>;
}
