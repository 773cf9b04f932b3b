//! The checks of ranges, abilities and shape. Those of data are in `data`, the long random one in `workload`.

use super::{Bench, Job, Subject, data, workload};
use crate::{BlockCount, BlockError, BlockSize, Operation, VolumeError};

/// Blocks of the volumes that checks get: 2 MiB or 16 MiB.
pub(super) const BLOCKS: u64 = 4096;

/// What the subject promises, without the means to make more of them.
pub(super) struct Promises {
    pub(super) stores_data: bool,
    pub(super) starts_zeroed: bool,
    pub(super) resizes: bool,
    pub(super) shrinks: bool,
    pub(super) formats: bool,
}

impl Promises {
    pub(super) fn of(subject: &Subject<'_>) -> Self {
        let Subject { stores_data, starts_zeroed, resizes, shrinks, formats, .. } = *subject;
        Self { stores_data, starts_zeroed, resizes, shrinks, formats }
    }
}

/// One check.
pub(super) struct Check {
    pub(super) name: &'static str,
    pub(super) needs_data: bool,
    pub(super) read_only: bool,
    pub(super) run: fn(&mut Bench<'_>, &Promises),
}

const fn check(name: &'static str, run: fn(&mut Bench<'_>, &Promises)) -> Check {
    Check { name, needs_data: false, read_only: false, run }
}

const fn of_data(name: &'static str, run: fn(&mut Bench<'_>, &Promises)) -> Check {
    Check { name, needs_data: true, read_only: false, run }
}

pub(super) const ALL: &[Check] = &[
    check("geometry", geometry),
    check("ranges", ranges),
    check("resize", resize),
    check("format", format),
    Check { name: "read-only", needs_data: false, read_only: true, run: read_only },
    of_data("fresh volume reads as zeroes", data::fresh),
    of_data("first and last block", data::ends),
    of_data("refused writes change nothing", data::refused),
    of_data("partial overlap", data::overlap),
    of_data("odd segments", data::odd_segments),
    of_data("many segments", data::many_segments),
    of_data("flush and forced unit access", data::durable),
    of_data("erasing", data::erasing),
    of_data("what holds nothing", data::extents),
    of_data("compare", data::compare),
    of_data("copy", data::copy),
    of_data("requests in flight together", data::together),
    of_data("overlapping writes in flight", data::collide),
    of_data("shrunk and grown", data::shrink_and_grow),
    of_data("format erases", data::format_erases),
    of_data("random work", workload::random_work),
];

/// Every operation, for checks that all must pass.
pub(super) const OPERATIONS: &[Operation] = &[
    Operation::Read,
    Operation::Write { fua: false },
    Operation::Write { fua: true },
    Operation::WriteZeroes { fua: false, deallocate: false },
    Operation::WriteZeroes { fua: true, deallocate: true },
    Operation::Deallocate,
    Operation::Compare,
    Operation::Copy { source: crate::Lba(0) },
];

fn geometry(bench: &mut Bench<'_>, _: &Promises) {
    let geometry = bench.volume.geometry();
    assert_eq!(geometry.blocks.0, BLOCKS);
    assert!(!geometry.read_only);
    assert!(!bench.volume.name().is_empty(), "a volume has a name");
    assert_eq!(bench.plain(Operation::Flush, u64::MAX, u64::MAX), Ok(()), "a flush ignores its range");
}

fn ranges(bench: &mut Bench<'_>, _: &Promises) {
    let blocks = bench.blocks();
    let outside = [(blocks, 1), (blocks - 1, 2), (0, blocks + 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)];
    for &operation in OPERATIONS {
        for (lba, count) in outside {
            let result = bench.plain(operation, lba, count);
            assert_eq!(result, Err(BlockError::OutOfRange), "{operation:?} of {count} blocks at {lba}");
        }
        assert_eq!(bench.plain(operation, blocks, 0), Ok(()), "{operation:?} of nothing at the end");
        assert_eq!(bench.plain(operation, blocks + 1, 0), Err(BlockError::OutOfRange), "{operation:?} of nothing past it");
    }
    for source in [blocks, blocks - 1, u64::MAX, u64::MAX - 1] {
        let result = bench.plain(Operation::Copy { source: crate::Lba(source) }, 0, 2);
        assert_eq!(result, Err(BlockError::OutOfRange), "copy from {source}");
    }
    for (lba, count) in [(0, 1), (blocks - 1, 1), (blocks - 2, 2), (0, blocks)] {
        for &operation in OPERATIONS.iter().filter(|operation| !matches!(operation, Operation::Copy { .. })) {
            let mut job = Job::new(operation, lba, count);
            if operation.has_data() {
                job.segments = vec![bench.memory.segment(0, count as usize * bench.block())];
                if operation == Operation::Compare {
                    assert_eq!(bench.job(Job { operation: Operation::Read, ..job.clone() }), Ok(()));
                }
            }
            assert_eq!(bench.job(job), Ok(()), "{operation:?} of {count} blocks at {lba}");
        }
    }
}

fn resize(bench: &mut Bench<'_>, promises: &Promises) {
    for blocks in [BLOCKS * 2, BLOCKS * 2, BLOCKS / 2, 1, BLOCKS] {
        let before = bench.volume.geometry();
        let result = bench.volume.resize(BlockCount(blocks));
        if !promises.resizes || (!promises.shrinks && blocks < before.blocks.0) {
            let as_it_is = result.is_ok() && blocks == before.blocks.0;
            let refused = matches!(result, Err(VolumeError::Unsupported { .. } | VolumeError::Refused { .. }));
            assert!(refused || as_it_is, "{result:?}");
            assert_eq!(bench.volume.geometry(), before);
            continue;
        }
        result.expect("resize");
        assert_eq!(bench.blocks(), blocks);
        assert_eq!(bench.plain(Operation::Deallocate, blocks - 1, 1), Ok(()));
        assert_eq!(bench.plain(Operation::Deallocate, blocks, 1), Err(BlockError::OutOfRange));
    }
    let before = bench.volume.geometry();
    for blocks in [0, u64::MAX, u64::MAX >> 9, 1 << 55] {
        let result = bench.volume.resize(BlockCount(blocks));
        assert!(result.is_err(), "a resize to {blocks} blocks");
        assert_eq!(bench.volume.geometry(), before, "a resize that failed changed nothing");
    }
}

fn other(block_size: BlockSize) -> BlockSize {
    match block_size {
        BlockSize::B512 => BlockSize::B4096,
        BlockSize::B4096 => BlockSize::B512,
    }
}

fn format(bench: &mut Bench<'_>, promises: &Promises) {
    let before = bench.volume.geometry();
    for block_size in [other(before.block_size), before.block_size, before.block_size] {
        let result = bench.volume.format(block_size);
        if !promises.formats {
            // It may still erase itself.
            assert!(result.is_err() || block_size == before.block_size, "this kind of volume is not formatted");
            assert_eq!(bench.volume.geometry(), before);
            continue;
        }
        result.expect("format");
        assert_eq!(bench.volume.geometry().block_size, block_size);
        assert_eq!(bench.volume.geometry().bytes(), before.bytes());
        let last = bench.blocks() - 1;
        assert_eq!(bench.plain(Operation::Deallocate, last, 1), Ok(()));
        assert_eq!(bench.plain(Operation::Deallocate, last, 2), Err(BlockError::OutOfRange));
    }
    if promises.formats && promises.resizes && promises.shrinks && before.block_size == BlockSize::B512 {
        // What does not fill a larger block is left out.
        bench.volume.resize(BlockCount(15)).expect("resize");
        bench.volume.format(BlockSize::B4096).expect("format");
        assert_eq!(bench.blocks(), 1);
        bench.volume.format(BlockSize::B512).expect("format");
        bench.volume.resize(BlockCount(7)).expect("resize");
        let refused = bench.volume.format(BlockSize::B4096);
        assert!(matches!(refused, Err(VolumeError::BadBlockSize { .. })), "{refused:?}");
        assert_eq!((bench.blocks(), bench.block()), (7, 512), "a format that failed changed nothing");
    }
}

fn read_only(bench: &mut Bench<'_>, promises: &Promises) {
    assert!(bench.volume.geometry().read_only);
    for &operation in OPERATIONS {
        let mut job = Job::new(operation, 1, 2);
        if operation.has_data() {
            job.segments = vec![bench.memory.segment(0, 2 * bench.block())];
        }
        let result = bench.job(job);
        match operation {
            Operation::Read => assert_eq!(result, Ok(())),
            Operation::Compare => assert_eq!(result, Ok(()), "what was read is found"),
            _ => assert_eq!(result, Err(BlockError::ReadOnly), "{operation:?}"),
        }
    }
    assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
    let before = bench.volume.geometry();
    assert!(bench.volume.resize(BlockCount(BLOCKS * 2)).is_err());
    assert!(bench.volume.format(before.block_size).is_err());
    assert_eq!(bench.volume.geometry(), before);
    assert!(promises.stores_data, "only what holds data is worth protecting");
}
