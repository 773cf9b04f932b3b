//! Programs of the host's in a guest that is a host itself.

use std::{path::PathBuf, process::Command};

use tempfile::TempDir;

use crate::{Boot, Daemon, guest::prepare, repository, seats};

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

/// Runs a scenario in a machine where QEMU emulates what KVM needs, with Millrace, this machine monitor, and what the monitor's own guest
/// boots from. Returns the machine's lines.
///
/// # Panics
/// When no such monitor is on PATH and the variable names none, and when the scenario fails.
pub fn run_monitor(variable: &str, name: &str, scenario: &str) -> Vec<String> {
    let monitor = program(variable, name).unwrap_or_else(|| panic!("no {name} on PATH, and {variable} names none"));
    let folder = TempDir::with_prefix("millrace-monitor-").expect("a temporary folder");
    let boot = guest_root().join("boot");
    let mut files = vec![boot.join("kernel-stable"), repository().join("target/guest/initramfs.cpio")];
    files.extend(["kvm", "kvm-amd", "kvm-intel"].map(|name| boot.join(format!("modules-stable/{name}.ko"))));
    let programs = Programs::make(folder.path().join("programs.img"), &[Daemon::binary(), monitor], &files);
    programs.on(Boot::scenario(scenario).memory(2048)).run(&seats(1))
}

/// The private tree with QEMU, the kernels and the guests' tools.
pub fn guest_root() -> PathBuf {
    std::env::var_os("MILLRACE_GUEST_ROOT").map_or_else(|| repository().join("target/guest-root"), PathBuf::from)
}

/// A program by an environment variable, or else by its name on PATH.
fn program(variable: &str, name: &str) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Some(path.into());
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}
