//! File volumes on block devices: loop devices, where the tests may make them (as root).

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Operation, Volume, VolumeError,
    conformance::{self, Bench, Subject, SyncHarness, Wanted},
};

use super::{SEED, bytes, on_disk, options, patiently};
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
            eprintln!("skipped: block devices: losetup cannot make a loop device here");
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
        Some(patiently("device", &FileOptions { read_only: wanted.read_only, ..options }).unwrap())
    };
    let mut subject = Subject::new(SEED, &mut make);
    subject.starts_zeroed = false;
    conformance::run(&mut SyncHarness::new(SEED, true), &mut subject);
}

#[test]
fn what_a_block_device_has_lost_is_neither_read_as_zeroes_nor_taken_for_full() {
    let directory = on_disk();
    let Some(device) = Loop::attach(directory.path(), 512) else { return };
    let volume = patiently("device", &options(&device.0, None, BlockSize::B512)).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    let data = bench.write_random(0, 8);
    bench.write_random(SIZE / 512 - 8, 8);
    // The file below shrinks, and the device with it.
    std::fs::File::options().write(true).open(directory.path().join("loop-512.img")).unwrap().set_len(SIZE / 2).unwrap();
    let resized = Command::new("losetup").arg("--set-capacity").arg(&device.0).status();
    assert!(resized.is_ok_and(|status| status.success()));
    bench.expect(0, &data);
    let fault = Err(BlockError::ReadFault { errno: libc::EIO });
    let gone = Err(BlockError::WriteFault { errno: libc::ENODEV });
    // Beyond the new end, and across it; in memory that suits direct I/O and in memory that does not.
    for (lba, place) in [(SIZE / 512 - 8, 0), (SIZE / 1024 - 4, 0), (SIZE / 512 - 8, 1)] {
        let segment = bench.memory.segment(place, 4096);
        assert_eq!(bench.moving(Operation::Read, lba, &[segment]), fault, "{lba} {place}");
        for fua in [false, true] {
            assert_eq!(bench.moving(Operation::Write { fua }, lba, &[segment]), gone, "{lba} {place} {fua}");
        }
    }
    // A thin one that is full says the same where it does not end.
    let volume = bench.volume.clone();
    harness.io().foretell(-libc::ENOSPC);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    let segment = bench.memory.segment(0, 4096);
    assert_eq!(bench.moving(Operation::Write { fua: false }, 8, &[segment]), Err(BlockError::NoSpace));
}

/// It is zeroed on the disk, and not in the page cache: the write tells of itself alone.
#[test]
fn a_bad_sector_fails_no_flush_of_a_block_device() {
    let directory = on_disk();
    let Some(device) = Loop::attach(directory.path(), 512) else { return };
    let volume = patiently("device", &options(&device.0, None, BlockSize::B512)).unwrap();
    assert!(volume.is_direct());
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
    bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, 9, 6).unwrap();
    harness.io().foretell(-libc::EIO);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    let segment = bench.memory.segment(0, 4096);
    let fault = Err(BlockError::WriteFault { errno: libc::EIO });
    assert_eq!(bench.moving(Operation::Write { fua: true }, 64, &[segment]), fault);
    assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
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
