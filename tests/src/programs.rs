//! Programs of the host's in a guest that is a host itself.

use std::{path::PathBuf, process::Command};

use crate::{Boot, guest::prepare, repository};

/// A disk with programs, their libraries and other files: `scripts/guest-programs`.
#[derive(Debug)]
pub struct Programs(PathBuf);

impl Programs {
    /// Makes it at `image`. The files may be those that guests boot from: they are made first.
    ///
    /// # Panics
    /// When a program or a file is missing.
    pub fn make(image: PathBuf, programs: &[PathBuf], files: &[PathBuf]) -> Self {
        prepare();
        let mut command = Command::new(repository().join("scripts/guest-programs"));
        command.arg(&image).args(programs);
        if !files.is_empty() {
            command.arg("--").args(files);
        }
        let made = command.output().expect("scripts/guest-programs");
        assert!(made.status.success(), "scripts/guest-programs: {}", String::from_utf8_lossy(&made.stderr));
        Self(image)
    }

    /// Gives it to a guest, as the first virtio disk.
    pub fn on(&self, boot: Boot) -> Boot {
        let drive = format!("id=programs,file={},if=none,format=raw,readonly=on", self.0.display());
        boot.qemu(&["-drive", &drive, "-device", "virtio-blk-pci,drive=programs"])
    }
}

/// The private tree with QEMU, the kernels and the guests' tools.
pub fn guest_root() -> PathBuf {
    std::env::var_os("MILLRACE_GUEST_ROOT").map_or_else(|| repository().join("target/guest-root"), PathBuf::from)
}

/// A program by an environment variable, or else by its name on PATH.
pub fn program(variable: &str, name: &str) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Some(path.into());
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}
