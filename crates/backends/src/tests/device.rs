//! File volumes on block devices: loop devices, where the tests may make them (as root).

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use millrace_block::{
    BlockCount, BlockSize, Volume, VolumeError,
    conformance::{self, Subject, SyncHarness, Wanted},
};

use super::{SEED, bytes, on_disk, options};
use crate::{FileOptions, FileVolume};

const SIZE: u64 = 64 << 20;

/// A loop device over a file of `SIZE` bytes; detached on drop.
struct Loop(PathBuf);

impl Loop {
    /// `None` where this is not allowed.
    fn attach(directory: &Path, block_size: u32) -> Option<Self> {
        let file = directory.join(format!("loop-{block_size}.img"));
        std::fs::File::create(&file).unwrap().set_len(SIZE).unwrap();
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--sector-size", &block_size.to_string()]).arg(&file);
        let output = losetup.output().ok().filter(|output| output.status.success());
        let Some(output) = output else {
            eprintln!("losetup cannot make a loop device here; block devices stay untested");
            return None;
        };
        Some(Self(String::from_utf8(output.stdout).unwrap().trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.0).status();
        assert!(detached.is_ok_and(|status| status.success()), "detaching {}", self.0.display());
    }
}

#[test]
fn a_block_device_conforms() {
    let directory = on_disk();
    let Some(device) = Loop::attach(directory.path(), 512) else { return };
    let mut make = |wanted: Wanted| -> Option<Arc<dyn Volume>> {
        let options = options(&device.0, Some(bytes(wanted)), wanted.block_size);
        Some(FileVolume::open("device", &FileOptions { read_only: wanted.read_only, ..options }).unwrap())
    };
    let mut subject = Subject::new(SEED, &mut make);
    subject.starts_zeroed = false;
    conformance::run(&mut SyncHarness::new(SEED, true), &mut subject);
}

#[test]
fn a_block_device_has_a_size_and_blocks_of_its_own_and_one_user() {
    let directory = on_disk();
    let Some(device) = Loop::attach(directory.path(), 4096) else { return };
    let open = |size, block_size| FileVolume::open("device", &options(&device.0, size, block_size));
    let small = open(None, BlockSize::B512);
    assert!(matches!(small, Err(VolumeError::BadBlockSize { block_size: 512, .. })), "{small:?}");
    let large = open(Some(SIZE + 4096), BlockSize::B4096);
    assert!(matches!(large, Err(VolumeError::BadSize { .. })), "{large:?}");
    let volume = open(None, BlockSize::B4096).unwrap();
    assert_eq!(volume.geometry().bytes(), SIZE);
    assert!(volume.is_direct() && volume.geometry().deallocate);
    let second = open(None, BlockSize::B4096);
    assert!(matches!(second, Err(VolumeError::InUse { .. })), "{second:?}");
    assert!(matches!(volume.resize(BlockCount(SIZE / 4096 + 1)), Err(VolumeError::BadSize { .. })));
    assert!(matches!(volume.format(BlockSize::B512), Err(VolumeError::BadBlockSize { .. })));
    assert_eq!(volume.geometry().bytes(), SIZE);
}
