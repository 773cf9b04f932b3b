//! Every volume here through the conformance suite, and what each does beyond it.

mod device;
mod fault;
mod file;
mod shard;
mod simple;

use std::{
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use millrace_block::{
    BlockSize, Volume, VolumeError,
    conformance::{self, Harness, Subject, SyncHarness, Wanted},
};

use self::shard::ShardHarness;
use crate::{FileOptions, FileVolume, MemoryVolume, NullVolume, fault::FaultVolume};

const SEED: u64 = 20_261;

fn bytes(wanted: Wanted) -> u64 {
    wanted.blocks << wanted.block_size.shift()
}

fn make_memory(wanted: Wanted) -> Option<Arc<dyn Volume>> {
    (!wanted.read_only).then(|| MemoryVolume::create("mem", bytes(wanted), wanted.block_size).unwrap() as _)
}

fn make_null(wanted: Wanted) -> Option<Arc<dyn Volume>> {
    (!wanted.read_only).then(|| NullVolume::create("void", bytes(wanted), wanted.block_size).unwrap() as _)
}

/// Makes file volumes, each in a fresh file.
fn make_file(directory: &Path) -> impl FnMut(Wanted) -> Option<Arc<dyn Volume>> {
    let mut made = 0;
    move |wanted| {
        made += 1;
        let path = directory.join(format!("{made}.img"));
        let mut options = options(&path, Some(bytes(wanted)), wanted.block_size);
        let volume = patiently("disk", &options).unwrap();
        if !wanted.read_only {
            return Some(volume);
        }
        drop(volume);
        options.read_only = true;
        Some(patiently("disk", &options).unwrap())
    }
}

fn options(path: &Path, size: Option<u64>, block_size: BlockSize) -> FileOptions {
    FileOptions { path: path.to_owned(), size, block_size, read_only: false }
}

/// Opens a file that this test has closed: a program that another test was just starting may hold it a moment longer, from its
/// fork to its exec.
fn patiently(name: &str, options: &FileOptions) -> Result<Arc<FileVolume>, VolumeError> {
    let deadline = Instant::now() + Duration::from_secs(1);
    loop {
        match FileVolume::open(name, options) {
            Err(VolumeError::InUse { .. }) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            result => return result,
        }
    }
}

/// A directory on the file system the tests are built on, where direct I/O usually works.
fn on_disk() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

/// A directory in memory, where direct I/O may be refused and ranges cannot be zeroed.
fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn conform(harness: &mut dyn Harness, make: &mut dyn FnMut(Wanted) -> Option<Arc<dyn Volume>>) {
    conformance::run(harness, &mut Subject::new(SEED, make));
}

#[test]
fn memory_conforms() {
    conform(&mut SyncHarness::new(SEED, false), &mut make_memory);
}

#[test]
fn memory_conforms_on_a_shard() {
    conform(&mut ShardHarness::new(), &mut make_memory);
}

#[test]
fn null_keeps_its_part_of_the_contract() {
    let mut make = make_null;
    let mut subject = Subject::new(SEED, &mut make);
    subject.stores_data = false;
    conformance::run(&mut SyncHarness::new(SEED, false), &mut subject);
}

#[test]
fn file_conforms() {
    let directory = on_disk();
    conform(&mut SyncHarness::new(SEED, false), &mut make_file(directory.path()));
}

#[test]
fn file_conforms_over_rough_io() {
    let directory = on_disk();
    conform(&mut SyncHarness::new(SEED, true), &mut make_file(directory.path()));
}

#[test]
fn file_conforms_on_a_file_system_in_memory() {
    let directory = in_memory();
    conform(&mut SyncHarness::new(SEED, true), &mut make_file(directory.path()));
}

#[test]
fn file_conforms_on_a_shard() {
    let directory = on_disk();
    conform(&mut ShardHarness::new(), &mut make_file(directory.path()));
}

#[test]
fn fault_conforms_while_nothing_goes_wrong() {
    let directory = on_disk();
    let mut files = make_file(directory.path());
    let mut make = |wanted| Some(FaultVolume::new(files(wanted)?, SEED) as _);
    conform(&mut SyncHarness::new(SEED, false), &mut make);
}

#[test]
fn fault_conforms_while_it_holds_writes() {
    let mut make = |wanted| {
        let volume = FaultVolume::new(make_memory(wanted)?, SEED);
        volume.hold_writes();
        Some(volume as _)
    };
    conform(&mut SyncHarness::new(SEED, false), &mut make);
}
