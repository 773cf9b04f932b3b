//! Memory and null volumes, and the names of back ends.

use std::{
    future::Future as _,
    pin::Pin,
    task::{Context, Waker},
};

use millrace_block::{
    BlockCount, BlockSize, Lba, Operation, Request, Scratch, TaskContext, Volume as _, VolumeError,
    conformance::{Bench, SyncHarness, SyncIo},
};
use millrace_memory::BufferPool;

use super::SEED;
use crate::{BackendSpec, MemoryVolume, NullVolume, ParseSpecError, open};

const GIB: u64 = 1 << 30;

#[test]
fn sizes_that_cannot_be_are_refused() {
    for (bytes, block_size) in
        [(0, BlockSize::B512), (513, BlockSize::B512), (512, BlockSize::B4096), (1 << 63, BlockSize::B512)]
    {
        for result in [
            MemoryVolume::create("m", bytes, block_size).map(|_| ()),
            NullVolume::create("n", bytes, block_size).map(|_| ()),
        ] {
            assert!(matches!(result, Err(VolumeError::BadSize { size, .. }) if size == bytes), "{bytes}: {result:?}");
        }
    }
    let beyond = MemoryVolume::create("m", 1 << 60, BlockSize::B512);
    assert!(matches!(beyond, Err(VolumeError::Io { action: "reserve", .. })), "{beyond:?}");
    NullVolume::create("n", 1 << 60, BlockSize::B512).unwrap();
}

#[test]
fn memory_is_taken_as_it_is_written_and_given_back() {
    let volume = MemoryVolume::create("sparse", 1024 * GIB, BlockSize::B4096).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
    assert_eq!(volume.usage().allocated, 0);
    let data = [0, 100, 200].map(|gib| bench.write_random(gib * GIB / 4096, 3));
    let end = bench.write_random(bench.blocks() - 1, 1);
    assert_eq!(volume.usage().allocated, 4 * (2 << 20));
    for (gib, data) in [0, 100, 200].into_iter().zip(&data) {
        bench.expect(gib * GIB / 4096, data);
    }
    bench.expect(bench.blocks() - 1, &end);
    // Part of an extent stays counted, a whole one does not.
    bench.plain(Operation::Deallocate, 0, 3).unwrap();
    assert_eq!(volume.usage().allocated, 4 * (2 << 20));
    bench.plain(Operation::Deallocate, 0, 512).unwrap();
    assert_eq!(volume.usage().allocated, 3 * (2 << 20));
    bench.plain(Operation::Deallocate, 1, 1024 * GIB / 4096 - 2).unwrap();
    assert_eq!(volume.usage().allocated, 2 << 20);
    bench.expect(bench.blocks() - 1, &end);
    volume.format(BlockSize::B512).unwrap();
    assert_eq!(volume.usage().allocated, 0);
}

#[test]
fn memory_grows_in_place_while_it_is_used() {
    let volume = MemoryVolume::create("grows", 8192, BlockSize::B512).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut harness = SyncHarness::new(SEED, false);
            let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let data = bench.write_random(3, 13);
                bench.expect(3, &data);
            }
        });
        for blocks in (16..4000).chain((16..4000).rev()).step_by(7) {
            volume.resize(BlockCount(blocks)).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_shrunk_volume_keeps_nothing_of_what_lay_beyond() {
    const SIZE: u64 = 64 << 20;
    let half = BlockCount(SIZE / 4096 / 2);
    let volume = MemoryVolume::create("shrinks", SIZE, BlockSize::B4096).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
    let kept = bench.write_random(0, 2000);
    bench.write_random(half.0, 2000);
    let before = volume.usage().allocated;
    volume.resize(half).unwrap();
    assert!(volume.usage().allocated <= before - 2000 * 4096 + (2 << 20), "the memory is given back");

    // A copy that is under way while its target is cut off.
    volume.resize(BlockCount(2 * half.0)).unwrap();
    let (scratch, buffers) = (Scratch::new(volume.scratch_bytes()), BufferPool::new(1).unwrap());
    let io = SyncIo::new(SEED, false);
    let operation = Operation::Copy { source: Lba(0) };
    let copy = Request { operation, lba: Lba(half.0), count: BlockCount(2000), segments: &[] };
    let mut step = volume.submit(TaskContext::new(&scratch, &buffers, &io), copy);
    let mut cx = Context::from_waker(Waker::noop());
    assert!(Pin::new(&mut step).poll(&mut cx).is_pending(), "it is cut in pieces");
    volume.resize(half).unwrap();
    while Pin::new(&mut step).poll(&mut cx).is_pending() {}
    volume.resize(BlockCount(2 * half.0)).unwrap();
    bench.expect(0, &kept);
    bench.expect_zeroes(half.0, 2000);
}

#[test]
fn null_leaves_the_memory_alone() {
    let volume = NullVolume::create("void", GIB, BlockSize::B512).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    let segment = bench.memory.segment(0, 1024);
    segment.fill(0x77);
    assert_eq!(bench.moving(Operation::Read, 5, &[segment]), Ok(()));
    assert_eq!(bench.memory.bytes(0, 1024), vec![0x77; 1024]);
}

#[test]
fn back_ends_are_named_as_documented() {
    for text in ["memory", "null", "file:disk.img", "file:/dev/vdb", "file:a b:c"] {
        assert_eq!(text.parse::<BackendSpec>().unwrap().to_string(), text);
    }
    assert_eq!("file:x".parse(), Ok(BackendSpec::File("x".into())));
    assert_eq!("file:".parse::<BackendSpec>(), Err(ParseSpecError::NoPath));
    for text in ["", "mem", "Memory", "disk.img", "rbd:pool/x", " memory"] {
        assert_eq!(text.parse::<BackendSpec>(), Err(ParseSpecError::Unknown(text.to_owned())));
    }
}

#[test]
fn the_registry_opens_what_is_named() {
    let directory = super::on_disk();
    let path = directory.path().join("disk.img");
    let file = BackendSpec::File(path.clone());
    for spec in [BackendSpec::Memory, BackendSpec::Null, file.clone()] {
        let volume = open(&spec, "vol", Some(1 << 20), BlockSize::B4096).unwrap();
        assert_eq!((volume.name(), volume.geometry().blocks), ("vol", BlockCount(256)));
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
    assert_eq!(open(&file, "vol", None, BlockSize::B512).unwrap().geometry().blocks, BlockCount(2048));
    for spec in [BackendSpec::Memory, BackendSpec::Null] {
        let result = open(&spec, "vol", None, BlockSize::B512).map(|_| ());
        assert!(matches!(result, Err(VolumeError::BadSize { .. })), "{result:?}");
    }
}
