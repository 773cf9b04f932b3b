//! QEMU's storage daemon, with virtio disks that do nothing.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{Subject, Work};
use crate::{error::Failure, process::Daemon};

/// `qemu-storage-daemon` on one core, with an I/O thread that polls as it does by default.
#[derive(Debug)]
pub(crate) struct Qemu {
    folder: PathBuf,
    daemon: Daemon,
}

impl Qemu {
    /// Starts it in a folder with a disk of this name; `in_root` runs programs of the private root.
    pub(crate) fn start(in_root: &Path, folder: &Path, core: usize, name: &str, bytes: u64) -> Result<Self, Failure> {
        // What an earlier section left there is not this one's.
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).map_err(|source| Failure::Write { path: folder.to_owned(), source })?;
        let socket = folder.join(name);
        let mut command = storage_daemon(in_root, core);
        command.args(["--object", "iothread,id=io"]);
        command.arg("--blockdev").arg(format!("driver=null-co,node-name={name},size={bytes},read-zeroes=off"));
        command.arg("--export").arg(format!(
            "vhost-user-blk,id=e-{name},node-name={name},addr.type=unix,addr.path={},writable=on,iothread=io",
            socket.display()
        ));
        let daemon = Daemon::start(&mut command, &folder.join("qsd.log"), || socket.exists())?;
        Ok(Self { folder: folder.to_owned(), daemon })
    }
}

/// The daemon on one core, without anything to serve.
pub(crate) fn storage_daemon(in_root: &Path, core: usize) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string()]).arg(in_root).arg("qemu-storage-daemon");
    command
}

impl Subject for Qemu {
    fn name(&self) -> &'static str {
        "qsd"
    }

    fn folder(&self, device: &str) -> PathBuf {
        self.folder.join(device)
    }

    fn daemon(&mut self) -> &mut Daemon {
        &mut self.daemon
    }

    /// It does not say.
    fn work(&self) -> Result<Work, Failure> {
        Ok(Work { busy_cycles: 0.0, commands: 0.0 })
    }
}
