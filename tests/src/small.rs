//! A file system with little room, which can be given more.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// A tmpfs. Taken away when dropped, as soon as nobody uses it.
#[derive(Debug)]
pub struct SmallFiles(PathBuf);

impl SmallFiles {
    /// One with room for `mib` MiB at `place`, an empty folder; or why this system gives us none.
    pub fn mount(place: &Path, mib: u64) -> Result<Self, String> {
        mount(&format!("size={mib}M"), place)?;
        Ok(Self(place.to_owned()))
    }

    /// Gives it more room.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn grow(&self, mib: u64) {
        mount(&format!("remount,size={mib}M"), &self.0).expect("more room");
    }
}

fn mount(options: &str, place: &Path) -> Result<(), String> {
    let output = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(place).output();
    let output = output.map_err(|error| format!("mount: {error}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()) }
}

impl Drop for SmallFiles {
    fn drop(&mut self) {
        // Lazily: a daemon that is being killed may have files open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
