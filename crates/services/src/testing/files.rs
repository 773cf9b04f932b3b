//! Files that a test opens again.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use millrace_backends::{FileOptions, FileVolume};
use millrace_block::VolumeError;

/// Opens a file that this test may just have closed: the kernel, or a program that another test was just starting, may have it a moment longer.
pub(crate) fn open_file(name: &str, options: &FileOptions) -> Result<Arc<FileVolume>, VolumeError> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match FileVolume::open(name, options) {
            Err(VolumeError::InUse { .. }) if Instant::now() < deadline => thread::sleep(Duration::from_millis(1)),
            result => return result,
        }
    }
}
