//! A file system whose files can share blocks.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{LoopDevice, repository};

/// A btrfs on a loop device. Taken away when dropped, as soon as nobody uses it.
#[derive(Debug)]
pub struct SharingFiles {
    place: PathBuf,
    /// It ends after the file system.
    _device: LoopDevice,
}

impl SharingFiles {
    /// One of `mib` MiB in a new file `image`, at `place`, an empty folder; or why this system gives us none.
    ///
    /// # Panics
    /// When the private root has nothing to make it with.
    pub fn mount(image: &Path, place: &Path, mib: u64) -> Result<Self, String> {
        let device = LoopDevice::over(image, mib)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let in_root = repository().join("scripts/in-root");
        let made = Command::new(in_root).args(["mkfs.btrfs", "--quiet"]).arg(device.path()).output();
        let made = made.expect("scripts/in-root");
        assert!(made.status.success(), "mkfs.btrfs: {}", text(&made.stderr));
        let mounted = Command::new("mount").args(["-t", "btrfs"]).args([device.path(), place]).output();
        let mounted = mounted.map_err(|error| format!("mount: {error}"))?;
        if !mounted.status.success() {
            return Err(text(&mounted.stderr));
        }
        Ok(Self { place: place.to_owned(), _device: device })
    }

    /// Bytes of it that are in use.
    ///
    /// # Panics
    /// When it cannot tell.
    pub fn used(&self) -> u64 {
        let folder = File::open(&self.place).expect("its folder");
        // What is not written yet has no blocks.
        rustix::fs::syncfs(&folder).expect("all of it is written");
        let now = rustix::fs::fstatvfs(&folder).expect("its room");
        (now.f_blocks - now.f_bfree) * now.f_frsize
    }
}

impl Drop for SharingFiles {
    fn drop(&mut self) {
        // Lazily: a daemon that is being killed may have files open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.place).status();
    }
}
