//! A block device over a file.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// A loop device. It ends when it is dropped, as soon as nobody uses it.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// One over a new file of `mib` MiB; or why this system gives us none.
    pub fn over(file: &Path, mib: u64) -> Result<Self, String> {
        let made = std::fs::File::create(file).and_then(|file| file.set_len(mib << 20));
        made.map_err(|error| format!("{}: {error}", file.display()))?;
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let output = output.map_err(|error| format!("losetup: {error}"))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(Self(text(&output.stdout).into())) } else { Err(text(&output.stderr)) }
    }

    /// Its path in `/dev`.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether it is there; after it has ended, whether somebody still uses it.
    pub fn is_there(&self) -> bool {
        let name = self.0.file_name().expect("a name in /dev");
        Path::new("/sys/block").join(name).join("loop/backing_file").exists()
    }

    /// Ends it. The system has it go when its last user has.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn end(&self) {
        let ended = Command::new("losetup").arg("--detach").arg(&self.0).status();
        assert!(ended.is_ok_and(|status| status.success()), "detaching {}", self.0.display());
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
        }
    }
}
