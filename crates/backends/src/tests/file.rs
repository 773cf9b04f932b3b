//! What file volumes do beyond the suite: opening, sharing, errors of the system below.

use std::{
    fs,
    os::unix::fs::{FileExt as _, symlink},
    path::Path,
    sync::Arc,
};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Lba, Operation, Volume as _, VolumeError,
    conformance::{Bench, Job, SyncHarness},
};

use super::{SEED, in_memory, on_disk, options, patiently};
use crate::{FileOptions, FileVolume};

const MIB: u64 = 1 << 20;

fn open(path: &Path, size: Option<u64>) -> Result<Arc<FileVolume>, VolumeError> {
    patiently("disk", &options(path, size, BlockSize::B512))
}

fn reader(path: &Path, size: Option<u64>) -> Result<Arc<FileVolume>, VolumeError> {
    patiently("reader", &FileOptions { read_only: true, ..options(path, size, BlockSize::B512) })
}

#[test]
fn a_missing_file_is_created_sparse_and_stays() {
    let directory = on_disk();
    let path = directory.path().join("new.img");
    assert!(matches!(open(&path, None), Err(VolumeError::Io { action: "open", .. })));
    assert!(matches!(reader(&path, Some(MIB)), Err(VolumeError::Io { action: "open", .. })));
    assert!(!path.exists());
    let data = {
        let volume = open(&path, Some(1 << 40)).unwrap();
        assert_eq!(volume.geometry().bytes(), 1 << 40);
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
        let data = bench.write_random((1 << 31) - 9, 9);
        assert!(volume.usage().allocated < MIB, "{:?}", volume.usage());
        data
    };
    let volume = open(&path, None).unwrap();
    Bench::new(&mut SyncHarness::new(SEED, false), volume, SEED).expect((1 << 31) - 9, &data);
}

#[test]
fn a_file_that_could_not_be_made_is_not_left_behind() {
    let directory = on_disk();
    let path = directory.path().join("new.img");
    for size in [0, 1000, u64::MAX - 511, (1 << 63) - 512] {
        assert!(open(&path, Some(size)).is_err(), "{size}");
        assert!(!path.exists(), "{size}");
    }
    let result = open(&directory.path().join("no/such/dir.img"), Some(MIB));
    assert!(matches!(result, Err(VolumeError::Io { action: "create" | "open", .. })), "{result:?}");
}

#[test]
fn what_is_no_disk_is_refused() {
    let directory = on_disk();
    let fifo = directory.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    for path in [directory.path(), &fifo, Path::new("/dev/null")] {
        assert!(matches!(open(path, Some(MIB)), Err(VolumeError::Io { .. })), "{}", path.display());
        assert!(matches!(reader(path, Some(MIB)), Err(VolumeError::Io { .. })), "{}", path.display());
    }
    let path = directory.path().join("short");
    fs::write(&path, [1; 511]).unwrap();
    assert!(matches!(open(&path, None), Err(VolumeError::BadSize { size: 511, .. })));
}

#[test]
fn one_writer_or_many_readers() {
    let directory = on_disk();
    let (path, link) = (directory.path().join("a.img"), directory.path().join("b.img"));
    let writer = open(&path, Some(MIB)).unwrap();
    symlink(&path, &link).unwrap();
    for other in [&path, &link] {
        assert!(matches!(open(other, None), Err(VolumeError::InUse { path, .. }) if path == *other));
        assert!(matches!(reader(other, None), Err(VolumeError::InUse { .. })));
    }
    drop(writer);
    let readers = [reader(&path, None).unwrap(), reader(&link, None).unwrap()];
    assert!(matches!(open(&path, None), Err(VolumeError::InUse { .. })));
    drop(readers);
    open(&path, None).unwrap();
}

#[test]
fn another_process_is_kept_out() {
    let directory = on_disk();
    let path = directory.path().join("a.img");
    let _writer = open(&path, Some(MIB)).unwrap();
    let taken = std::process::Command::new("flock").arg("--nonblock").arg(&path).arg("true").status();
    assert!(!taken.expect("flock, of util-linux").success());
}

#[test]
fn a_file_of_another_length_than_the_volume() {
    for directory in [on_disk(), in_memory()] {
        another_length(directory.path());
    }
}

fn another_length(directory: &Path) {
    let path = directory.join("a.img");
    let mut content = vec![7; 10 * 512 + 100];
    fs::write(&path, &content).unwrap();
    assert_eq!(open(&path, None).unwrap().geometry().blocks, BlockCount(10));
    // A longer file than asked for keeps what it has.
    assert_eq!(open(&path, Some(512)).unwrap().geometry().blocks, BlockCount(1));
    assert_eq!(fs::read(&path).unwrap(), content);
    // Beyond the end of a shorter one are zeroes, whether it may be lengthened or not.
    content.resize(64 * 512, 0);
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        let options = FileOptions { read_only: true, ..options(&path, Some(64 * 512), block_size) };
        let volume = patiently("reader", &options).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, volume, SEED);
        bench.expect(0, &content);
        let last = bench.blocks() - 1;
        bench.expect_zeroes(last, 1);
        let odd = bench.memory.segment(3, content.len());
        assert_eq!(bench.moving(Operation::Read, 0, &[odd]), Ok(()));
        assert_eq!(bench.memory.bytes(3, content.len()), content);
    }
    let volume = open(&path, Some(64 * 512)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 64 * 512);
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    bench.expect(0, &content);
    // Somebody cuts the file while it is in use.
    fs::File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    content[1000..].fill(0);
    bench.expect(0, &content);
    let data = bench.write_random(63, 1);
    bench.expect(63, &data);
}

#[test]
fn what_a_write_in_flight_left_behind_a_shrunk_volume_is_not_its_own() {
    let directory = on_disk();
    let path = directory.path().join("a.img");
    let volume = open(&path, Some(MIB)).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
    let kept = bench.write_random(0, 1024);
    volume.resize(BlockCount(1024)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), MIB / 2);
    fs::File::options().write(true).open(&path).unwrap().write_all_at(&[9; 8192], MIB / 2 + 4096).unwrap();
    volume.resize(BlockCount(2048)).unwrap();
    bench.expect(0, &kept);
    bench.expect_zeroes(1024, 1024);
}

#[test]
fn the_page_cache_is_bypassed_where_it_can_be() {
    let directory = on_disk();
    let path = directory.path().join("a.img");
    let volume = open(&path, Some(MIB)).unwrap();
    let asked = rustix::fs::StatxFlags::DIOALIGN;
    let answer = rustix::fs::statx(rustix::fs::CWD, &path, rustix::fs::AtFlags::empty(), asked).unwrap();
    if answer.stx_mask & asked.bits() == 0 {
        return;
    }
    let fits = |block: u32| (1..=block).contains(&answer.stx_dio_offset_align) && answer.stx_dio_mem_align <= 4096;
    assert_eq!(volume.is_direct(), fits(512));
    volume.format(BlockSize::B4096).unwrap();
    assert_eq!(volume.is_direct(), fits(4096));
    volume.format(BlockSize::B512).unwrap();
    assert_eq!(volume.is_direct(), fits(512));
}

#[test]
fn errors_of_the_system_become_errors_of_the_request() {
    let directory = on_disk();
    let mut harness = SyncHarness::new(SEED, false);
    let eio = BlockError::WriteFault { errno: libc::EIO };
    let write = Operation::Write { fua: false };
    let zeroes = Operation::WriteZeroes { fua: true, deallocate: true };
    let cases = [
        (Operation::Read, libc::EIO, BlockError::ReadFault { errno: libc::EIO }),
        (Operation::Read, libc::EFAULT, BlockError::Memory),
        (Operation::Read, libc::ECANCELED, BlockError::ReadFault { errno: libc::ECANCELED }),
        (Operation::Compare, libc::EIO, BlockError::ReadFault { errno: libc::EIO }),
        (write, libc::EIO, eio),
        (write, libc::ENOSPC, BlockError::NoSpace),
        (write, libc::EDQUOT, BlockError::NoSpace),
        (write, libc::EROFS, BlockError::ReadOnly),
        (write, libc::EFAULT, BlockError::Memory),
        (Operation::Flush, libc::EIO, eio),
        (Operation::Flush, libc::ENOSPC, BlockError::NoSpace),
        (zeroes, libc::EIO, eio),
        (zeroes, libc::ENOSPC, BlockError::NoSpace),
        (Operation::Deallocate, libc::EIO, eio),
        // No whole pages: those may be the system's own affair.
        (Operation::Copy { source: Lba(17) }, libc::EIO, BlockError::ReadFault { errno: libc::EIO }),
    ];
    for (operation, errno, expected) in cases {
        let volume = open(&directory.path().join("a.img"), Some(MIB)).unwrap();
        harness.io().foretell(-errno);
        let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
        let result = if operation.has_data() {
            let segment = bench.memory.segment(0, 4096);
            bench.moving(operation, 8, &[segment])
        } else {
            bench.plain(operation, 8, 8)
        };
        assert_eq!(result, Err(expected), "{operation:?} with errno {errno}");
        let data = bench.write_random(8, 8);
        bench.expect(8, &data);
    }
}

#[test]
fn a_flush_that_failed_is_not_made_good_by_the_next() {
    let directory = on_disk();
    let path = directory.path().join("a.img");
    let mut harness = SyncHarness::new(SEED, false);
    let flush = Operation::Flush;
    let zeroes = Operation::WriteZeroes { fua: true, deallocate: false };
    for errno in [libc::EIO, libc::ENOSPC] {
        let volume = open(&path, Some(MIB)).unwrap();
        Bench::new(&mut harness, volume.clone(), SEED).plain(flush, 0, 0).unwrap();
        harness.io().foretell(-errno);
        let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
        let lost = bench.plain(flush, 0, 0).unwrap_err();
        // The system would say now that all is well.
        for operation in [flush, flush, zeroes] {
            let (lba, blocks) = if operation == flush { (0, 0) } else { (8, 8) };
            assert_eq!(bench.plain(operation, lba, blocks), Err(lost), "{operation:?}");
        }
        let data = bench.write_random(8, 8);
        bench.expect(8, &data);
        drop((bench, volume));
        let volume = open(&path, None).unwrap();
        assert_eq!(Bench::new(&mut harness, volume, SEED).plain(flush, 0, 0), Ok(()));
    }
}

/// As a leg is that is taken into use again. In the page cache may be what the disk has not.
#[test]
fn what_is_written_anew_past_the_page_cache_is_flushed_again() {
    let mut harness = SyncHarness::new(SEED, false);
    for directory in [on_disk(), in_memory()] {
        let volume = open(&directory.path().join("a.img"), Some(MIB)).unwrap();
        assert!(volume.trust_again(), "no flush has failed");
        harness.io().foretell(-libc::EIO);
        let lost = Bench::new(&mut harness, volume.clone(), SEED).plain(Operation::Flush, 0, 0);
        assert!(lost.is_err());
        assert_eq!(volume.trust_again(), volume.is_direct());
        let flushed = Bench::new(&mut harness, volume.clone(), SEED).plain(Operation::Flush, 0, 0);
        assert_eq!(flushed, if volume.is_direct() { Ok(()) } else { lost });
    }
}

#[test]
fn a_durable_write_by_way_of_the_page_cache_fails_flushes_only_by_what_others_lost() {
    let directory = in_memory();
    let mut harness = SyncHarness::new(SEED, false);
    for (errno, lost) in [
        // Its client took the memory away, and others may have the same file.
        (libc::EFAULT, false),
        // There was no room for it, but there will be.
        (libc::ENOSPC, false),
        (libc::EIO, false),
        (libc::ENOSPC, true),
        (libc::EIO, true),
    ] {
        let volume = open(&directory.path().join("a.img"), Some(MIB)).unwrap();
        assert!(!volume.is_direct(), "the page cache is in use");
        if lost {
            harness.io().lose(errno);
        } else {
            harness.io().foretell(-errno);
        }
        let mut bench = Bench::new(&mut harness, volume, SEED);
        let segment = bench.memory.segment(0, 4096);
        let failed = Err(BlockError::from_write_errno(errno));
        let flushed = if lost { failed } else { Ok(()) };
        let (write, flush) = (Operation::Write { fua: true }, Operation::Flush);
        assert_eq!(bench.moving(write, 1024, &[segment]), failed, "errno {errno}, {lost}");
        assert_eq!(bench.plain(flush, 0, 0), flushed, "errno {errno}, {lost}");
        assert_eq!(bench.moving(write, 1024, &[segment]), flushed, "it promises what a flush does");
        assert_eq!(bench.moving(Operation::Write { fua: false }, 1024, &[segment]), Ok(()));
    }
}

/// Whichever of the two the system has told.
#[test]
fn a_durable_write_and_a_flush_beside_it_both_fail_by_what_was_lost() {
    let directory = in_memory();
    let lost = Err(BlockError::WriteFault { errno: libc::EIO });
    for seed in 0..40 {
        let volume = open(&directory.path().join("a.img"), Some(MIB)).unwrap();
        assert!(!volume.is_direct(), "the page cache is in use");
        let mut harness = SyncHarness::new(seed, false);
        harness.io().lose(libc::EIO);
        let mut bench = Bench::new(&mut harness, volume, seed);
        let segments = vec![bench.memory.segment(0, 4096)];
        let write = Job { operation: Operation::Write { fua: true }, lba: Lba(1024), count: BlockCount(8), segments };
        assert_eq!(bench.jobs(&[write, Job::new(Operation::Flush, 0, 0)]), [lost; 2], "seed {seed}");
    }
}

#[test]
fn what_direct_io_leaves_in_the_page_cache_is_not_lost_unsaid() {
    let directory = on_disk();
    let mut harness = SyncHarness::new(SEED, false);
    // What disks say of a sector, a path and themselves; and of no room.
    for errno in [libc::EIO, libc::ENODATA, libc::ENOLINK, libc::ETIMEDOUT, libc::ENOSPC] {
        // Whole pages, a part of one, and one that a flush has made durable; and where the write fails before anybody is told anything.
        for (lba, blocks, flushes, own, is_lost) in [
            (1024, 1024, false, false, false),
            (9, 6, false, false, true),
            (9, 6, true, false, false),
            (9, 6, false, true, false),
        ] {
            let volume = open(&directory.path().join("a.img"), Some(MIB)).unwrap();
            if !volume.is_direct() {
                return;
            }
            let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
            bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, lba, blocks).unwrap();
            if flushes {
                bench.plain(Operation::Flush, 0, 0).unwrap();
            }
            if own {
                harness.io().foretell(-errno);
            } else {
                harness.io().lose(errno);
            }
            let mut bench = Bench::new(&mut harness, volume, SEED);
            let segment = bench.memory.segment(0, 4096);
            let failed = Err(BlockError::from_write_errno(errno));
            assert_eq!(bench.moving(Operation::Write { fua: true }, 64, &[segment]), failed);
            let flushed = if is_lost { failed } else { Ok(()) };
            assert_eq!(bench.plain(Operation::Flush, 0, 0), flushed, "errno {errno}: {lba}+{blocks}, {flushes}, {own}");
        }
    }
}

#[test]
fn a_format_cuts_off_nothing_that_lies_behind_the_volume() {
    let directory = on_disk();
    let path = directory.path().join("a.img");
    fs::write(&path, [7; 8192]).unwrap();
    let volume = open(&path, Some(4096)).unwrap();
    volume.format(BlockSize::B512).unwrap();
    assert_eq!(fs::read(&path).unwrap()[4096..], [7; 4096]);
    // Where the system erases no ranges.
    assert_eq!(volume.begin_anew(4096), Err(rustix::io::Errno::OPNOTSUPP));
    assert_eq!(fs::read(&path).unwrap()[4096..], [7; 4096]);
    drop(volume);
    fs::write(&path, [7; 8192]).unwrap();
    let volume = open(&path, Some(8192)).unwrap();
    volume.begin_anew(8192).unwrap();
    assert_eq!(fs::read(&path).unwrap(), [0; 8192]);
}

#[test]
fn a_write_that_moves_nothing_is_a_fault_and_a_busy_system_is_asked_again() {
    let directory = on_disk();
    let volume = open(&directory.path().join("a.img"), Some(MIB)).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    for _ in 0..20 {
        // Every second operation is the pause before the next try.
        harness.io().foretell(-libc::EAGAIN);
        harness.io().foretell(0);
    }
    let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
    let data = bench.write_random(1, 5);
    bench.expect(1, &data);
    assert!(harness.io().started() >= 42, "{}", harness.io().started());
}

/// Wherever its data lie, and however many pieces they are in; where the page cache is in use, a durable write is one more.
#[test]
fn a_request_of_many_pieces_is_one_operation() {
    for directory in [on_disk(), in_memory()] {
        let volume = open(&directory.path().join("a.img"), Some(MIB)).unwrap();
        for pieces in [1, 2, 40, 128] {
            let mut harness = SyncHarness::new(SEED, false);
            let mut started = 0;
            for operation in [Operation::Write { fua: false }, Operation::Write { fua: true }, Operation::Read] {
                let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
                let segments: Vec<_> = (0..pieces).map(|piece| bench.memory.segment(piece * 8192, 4096)).collect();
                if operation.is_write() {
                    segments.iter().zip(1..).for_each(|(segment, byte)| segment.write_at(0, &[byte; 4096]));
                }
                bench.moving(operation, 8, &segments).unwrap();
                for (piece, byte) in (0..pieces).zip(1..) {
                    assert_eq!(bench.memory.bytes(piece * 8192, 4096), [byte; 4096]);
                }
                started += 1 + u64::from(operation == Operation::Write { fua: true } && !volume.is_direct());
                assert_eq!(harness.io().started(), started, "{operation:?} of {pieces} pieces");
            }
        }
    }
}

#[test]
fn direct_io_that_is_refused_is_given_up() {
    let directory = on_disk();
    let volume = open(&directory.path().join("a.img"), Some(MIB)).unwrap();
    if !volume.is_direct() {
        return;
    }
    let mut harness = SyncHarness::new(SEED, false);
    harness.io().foretell(-libc::EINVAL);
    let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
    let data = bench.write_random(1, 5);
    assert!(!volume.is_direct());
    let odd = bench.memory.segment(1, data.len());
    assert_eq!(bench.moving(Operation::Read, 1, &[odd]), Ok(()));
    assert_eq!(bench.memory.bytes(1, data.len()), data);
    harness.io().foretell(-libc::EINVAL);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    let segment = bench.memory.segment(0, 512);
    let result = bench.moving(Operation::Read, 1, &[segment]);
    assert_eq!(result, Err(BlockError::ReadFault { errno: libc::EINVAL }), "the page cache has nothing to be given up for");
}

#[test]
fn space_is_given_back_and_zeroes_without_help_are_written() {
    for directory in [on_disk(), in_memory()] {
        let volume = open(&directory.path().join("a.img"), Some(4 * MIB)).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
        bench.write_random(0, 8192);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        let full = volume.usage().allocated;
        assert!(full >= 4 * MIB, "{full}");
        bench.plain(Operation::WriteZeroes { fua: false, deallocate: false }, 0, 8192).unwrap();
        bench.plain(Operation::Flush, 0, 0).unwrap();
        assert!(volume.usage().allocated >= 4 * MIB, "zeroes that were not to be deallocated keep their space");
        bench.expect_zeroes(0, 8192);
        assert!(volume.geometry().deallocate);
        bench.plain(Operation::Deallocate, 4096, 4096).unwrap();
        assert!(volume.usage().allocated <= full - 2 * MIB + 65536, "{:?}", volume.usage());
        volume.format(BlockSize::B4096).unwrap();
        assert!(volume.usage().allocated < MIB, "{:?}", volume.usage());
    }
    // The system refuses both ways: punching, then zeroing.
    let directory = on_disk();
    let volume = open(&directory.path().join("a.img"), Some(4 * MIB)).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    Bench::new(&mut harness, volume.clone(), SEED).write_random(0, 8192);
    harness.io().foretell(-libc::EOPNOTSUPP);
    harness.io().foretell(-libc::EOPNOTSUPP);
    let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
    bench.plain(Operation::WriteZeroes { fua: true, deallocate: true }, 1, 8000).unwrap();
    bench.expect_zeroes(1, 8000);
    assert!(!volume.geometry().deallocate, "what was found impossible is not promised any more");
}

#[test]
fn a_copy_of_a_hole_is_a_hole() {
    for directory in [on_disk(), in_memory()] {
        let volume = open(&directory.path().join("a.img"), Some(4 * MIB)).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
        bench.write_random(4096, 4096);
        // A hole with some data in its middle.
        let data = bench.write_random(2048, 8);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        assert!(volume.usage().allocated >= 2 * MIB, "{:?}", volume.usage());
        bench.plain(Operation::Copy { source: Lba(0) }, 4096, 4096).unwrap();
        bench.plain(Operation::Flush, 0, 0).unwrap();
        assert!(volume.usage().allocated < MIB, "{:?}", volume.usage());
        bench.expect_zeroes(4096, 2048);
        bench.expect(6144, &data);
        bench.expect_zeroes(6152, 2040);
    }
}

/// However its data got there.
#[test]
fn a_file_in_memory_whose_holes_are_filled_is_reached_as_memory() {
    let directory = in_memory();
    let volume = patiently("disk", &options(&directory.path().join("a.img"), Some(4 * MIB), BlockSize::B4096)).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let is_read_at_once = |harness: &mut SyncHarness, lba| {
        let before = harness.io().started();
        Bench::new(harness, volume.clone(), SEED).read(lba, 1);
        harness.io().started() == before
    };
    assert!(!is_read_at_once(&mut harness, 0));
    // Memory that direct I/O does not take.
    let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
    let odd = bench.memory.segment(1, 2 << 20);
    bench.moving(Operation::Write { fua: false }, 0, &[odd]).unwrap();
    assert!(is_read_at_once(&mut harness, 0) && !is_read_at_once(&mut harness, 512));
    // Zeroes that the system has to be given.
    let zeroes = Operation::WriteZeroes { fua: false, deallocate: false };
    Bench::new(&mut harness, volume.clone(), SEED).plain(zeroes, 512, 512).unwrap();
    assert!(is_read_at_once(&mut harness, 512));
}

#[test]
fn what_must_be_durable_is_made_so() {
    let directory = on_disk();
    let volume = open(&directory.path().join("a.img"), Some(MIB)).unwrap();
    assert!(volume.geometry().volatile_cache);
    let mut harness = SyncHarness::new(SEED, false);
    let zeroes = |fua, deallocate| Operation::WriteZeroes { fua, deallocate };
    for (operation, start, expected) in [
        (Operation::Read, 0, 0),
        (Operation::Write { fua: false }, 0, 0),
        (Operation::Write { fua: true }, 0, 1),
        // By way of a buffer, whose every piece must be durable.
        (Operation::Write { fua: true }, 1, 1),
        (zeroes(false, false), 0, 0),
        (zeroes(true, false), 0, 1),
        (zeroes(true, true), 0, 1),
        (Operation::Deallocate, 0, 0),
        (Operation::Flush, 0, 1),
    ] {
        let before = harness.io().durable();
        let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
        if operation.has_data() {
            let segment = bench.memory.segment(start, 65536);
            bench.moving(operation, 8, &[segment]).unwrap();
        } else {
            bench.plain(operation, 8, 128).unwrap();
        }
        assert_eq!(harness.io().durable() - before, expected, "{operation:?}");
    }
}

#[test]
fn a_format_to_larger_blocks_and_back_keeps_what_the_file_has() {
    for directory in [on_disk(), in_memory()] {
        // A size of its own, and one that was told.
        for size in [None, Some(5120)] {
            let path = directory.path().join("a.img");
            fs::write(&path, [7; 5300]).unwrap();
            let volume = open(&path, size).unwrap();
            for (block_size, blocks) in [(BlockSize::B4096, 1), (BlockSize::B512, 10), (BlockSize::B4096, 1)] {
                volume.format(block_size).unwrap();
                assert_eq!(volume.geometry().blocks, BlockCount(blocks), "{size:?}");
            }
            drop(volume);
            let volume = patiently("disk", &options(&path, size, BlockSize::B4096)).unwrap();
            assert_eq!(volume.geometry().blocks, BlockCount(1));
            volume.format(BlockSize::B512).unwrap();
            let mut harness = SyncHarness::new(SEED, false);
            let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
            bench.expect_zeroes(0, 10);
            let data = bench.write_random(0, 10);
            volume.resize(BlockCount(9)).unwrap();
            volume.format(BlockSize::B4096).unwrap();
            volume.format(BlockSize::B512).unwrap();
            assert_eq!((volume.geometry().blocks, data.len()), (BlockCount(9), 5120), "a resize says how long it is");
            drop(volume);
            fs::remove_file(&path).unwrap();
        }
    }
}

#[test]
fn flushes_at_once_go_to_the_system_one_after_the_other_and_share_its_answer() {
    let directory = on_disk();
    let path = directory.path().join("a.img");
    let (mut asked, jobs) = (0, [0; 4].map(|_| Job::new(Operation::Flush, 0, 0)));
    for seed in 0..40 {
        let volume = open(&path, Some(MIB)).unwrap();
        let mut harness = SyncHarness::new(seed, false);
        let before = harness.io().durable();
        assert_eq!(Bench::new(&mut harness, volume.clone(), seed).jobs(&jobs), [Ok(()); 4]);
        asked += harness.io().durable() - before;
        harness.io().foretell(-libc::EIO);
        let lost = Err(BlockError::WriteFault { errno: libc::EIO });
        let results = Bench::new(&mut harness, volume, seed).jobs(&jobs);
        assert_eq!(results, [lost; 4], "seed {seed}: the system tells of an error once");
    }
    assert!((40..=40 * 3).contains(&asked), "{asked} for {} flushes", 40 * 4);
}
