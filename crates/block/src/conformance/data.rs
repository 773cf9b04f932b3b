//! The checks of what is stored.

use millrace_memory::Segment;

use super::{
    Bench, Job, Random,
    bench::{MOST, gather, scatter},
    checks::{BLOCKS, OPERATIONS, Promises},
};
use crate::{BlockCount, BlockError, BlockSize, Extent, Lba, Operation};

pub(super) fn fresh(bench: &mut Bench<'_>, promises: &Promises) {
    if promises.starts_zeroed {
        bench.expect_zeroes(0, bench.blocks().min((MOST / bench.block()) as u64));
        bench.expect_zeroes(bench.blocks() - 1, 1);
    }
}

pub(super) fn ends(bench: &mut Bench<'_>, _: &Promises) {
    let last = bench.blocks() - 1;
    let first_data = bench.write_random(0, 1);
    let last_data = bench.write_random(last, 1);
    let inner = bench.write_random(1, 3);
    bench.expect(0, &first_data);
    bench.expect(last, &last_data);
    bench.expect(0, &[first_data, inner].concat());
}

pub(super) fn refused(bench: &mut Bench<'_>, _: &Promises) {
    let last = bench.blocks() - 1;
    let data = bench.write_random(last, 1);
    for &operation in OPERATIONS.iter().filter(|operation| operation.is_write()) {
        let mut job = Job::new(operation, last, 2);
        if operation.has_data() {
            job.segments = vec![bench.memory.segment(MOST, 2 * bench.block())];
        }
        assert_eq!(bench.job(job), Err(BlockError::OutOfRange), "{operation:?}");
    }
    bench.expect(last, &data);
}

pub(super) fn overlap(bench: &mut Bench<'_>, _: &Promises) {
    let block = bench.block();
    let mut model = bench.write_random(0, 32);
    for (lba, count) in [(0, 8), (4, 8), (5, 1), (8, 4), (0, 5), (11, 21), (1, 30)] {
        let data = bench.write_random(lba, count);
        model[lba as usize * block..][..data.len()].copy_from_slice(&data);
        bench.expect(0, &model);
    }
    for lba in 0..31 {
        bench.expect(lba, &model[lba as usize * block..][..2 * block]);
    }
}

/// What is said to hold nothing reads as zeroes, and is not where something was written.
pub(super) fn extents(bench: &mut Bench<'_>, _: &Promises) {
    let (last, most) = (bench.blocks() - 1, (MOST / bench.block()) as u64);
    for (lba, count) in [(40, 3), (last, 1)] {
        bench.write_random(lba, count);
    }
    assert_eq!(bench.volume.extent(Lba(last + 1)), None);
    assert_eq!(bench.volume.extent(Lba(u64::MAX)), None);
    let mut lba = 0;
    while let Some(Extent { blocks, unused }) = bench.volume.extent(Lba(lba)) {
        assert!((1..=last + 1 - lba).contains(&blocks.0), "an extent of {blocks} at {lba}");
        if unused {
            bench.expect_zeroes(lba, blocks.0.min(most));
            assert!(![40, 42, last].iter().any(|written| (lba..lba + blocks.0).contains(written)), "{blocks} at {lba}");
        }
        lba += blocks.0;
    }
    assert!([0, last + 1].contains(&lba), "all is known, or nothing");
}

/// Cuts `len` bytes of the bench's memory, from `start` on, into pieces of the given lengths, which repeat. Every second
/// piece is separated from the next by a byte that must stay as it is.
fn cut(bench: &Bench<'_>, start: usize, len: usize, lengths: &[usize]) -> Vec<Segment> {
    let (mut segments, mut at, mut left) = (Vec::new(), start, len);
    for (i, length) in lengths.iter().cycle().enumerate() {
        if left == 0 {
            return segments;
        }
        let length = (*length).min(left);
        segments.push(bench.memory.segment(at, length));
        at += length + i % 2;
        left -= length;
    }
    unreachable!("lengths are not all 0")
}

/// Writes and reads through segments; what lies between them must not change.
fn through(bench: &mut Bench<'_>, lba: u64, blocks: usize, start: usize, lengths: &[usize]) {
    let len = blocks * bench.block();
    let segments = cut(bench, start, len, lengths);
    let data = bench.random.bytes(len);
    let around = bench.memory.segment(0, (start + 2 * len + 8192).min(2 * MOST));
    around.fill(0x5a);
    scatter(&segments, &data);
    assert_eq!(bench.moving(Operation::Write { fua: false }, lba, &segments), Ok(()), "write in {lengths:?} at {start}");
    bench.expect(lba, &data);
    around.fill(0xc3);
    assert_eq!(bench.moving(Operation::Read, lba, &segments), Ok(()), "read in {lengths:?} at {start}");
    assert!(gather(&segments) == data, "read in {lengths:?} at {start}: data differ");
    assert_eq!(bench.moving(Operation::Compare, lba, &segments), Ok(()), "compare in {lengths:?} at {start}");
    for segment in &segments {
        segment.fill(0xc3);
    }
    assert!(gather(&[around]).iter().all(|byte| *byte == 0xc3), "read in {lengths:?} at {start}: wrote elsewhere");
}

pub(super) fn odd_segments(bench: &mut Bench<'_>, _: &Promises) {
    let block = bench.block();
    let layouts: &[&[usize]] =
        &[&[1], &[block], &[block - 1, 2, 1], &[3, 0, 500, 9], &[block + 1, 7], &[512], &[4096, 512, 3584], &[usize::MAX]];
    for lengths in layouts {
        for start in [0, 1, 4, 511, 512, 4095] {
            through(bench, 3, 5, start, lengths);
        }
    }
}

pub(super) fn many_segments(bench: &mut Bench<'_>, _: &Promises) {
    // More than the system takes in one call: 1 MiB and a bit, aligned pages apart from each other and then not.
    let blocks = 2500 * 512 / bench.block();
    through(bench, 7, blocks, 0, &[512]);
    through(bench, 7, blocks, 4, &[512, 4, 508]);
    let pages: Vec<Segment> = (0..1030).map(|i| bench.memory.segment(i * 2 * 4096 % (2 * MOST), 4096)).collect();
    let data = bench.random.bytes(1030 * 4096);
    scatter(&pages, &data);
    bench.moving(Operation::Write { fua: true }, 0, &pages).unwrap_or_else(|error| {
        // A volume of 512-byte blocks is too small for this one.
        assert_eq!((error, bench.block()), (BlockError::OutOfRange, 512));
    });
    if bench.block() == 4096 {
        bench.expect(0, &data);
    }
}

pub(super) fn durable(bench: &mut Bench<'_>, _: &Promises) {
    let data = bench.random.bytes(9 * bench.block());
    let segment = bench.memory.segment(MOST, data.len());
    segment.write_at(0, &data);
    assert_eq!(bench.moving(Operation::Write { fua: true }, 5, &[segment]), Ok(()));
    assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
    bench.expect(5, &data);
    assert_eq!(bench.plain(Operation::WriteZeroes { fua: true, deallocate: false }, 6, 2), Ok(()));
    assert_eq!(bench.plain(Operation::WriteZeroes { fua: true, deallocate: true }, 9, 2), Ok(()));
    assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
    bench.expect_zeroes(6, 2);
    bench.expect_zeroes(9, 2);
    bench.expect(5, &data[..bench.block()]);
}

pub(super) fn erasing(bench: &mut Bench<'_>, _: &Promises) {
    let block = bench.block();
    let zeroing = [
        Operation::WriteZeroes { fua: false, deallocate: false },
        Operation::WriteZeroes { fua: false, deallocate: true },
        Operation::WriteZeroes { fua: true, deallocate: false },
        Operation::Deallocate,
    ];
    let most = 1100;
    for operation in zeroing {
        if operation == Operation::Deallocate && !bench.volume.geometry().deallocate {
            assert_eq!(bench.plain(operation, 0, 9), Ok(()), "advice is taken or not, but no error");
            continue;
        }
        for (lba, count) in [(0, 1), (1, 7), (3, 13), (7, 9), (17, 1024), (1, most - 2), (0, most)] {
            let mut model = bench.write_random(0, most);
            assert_eq!(bench.plain(operation, lba, count), Ok(()), "{operation:?} of {count} at {lba}");
            model[lba as usize * block..(lba + count) as usize * block].fill(0);
            bench.expect(0, &model);
        }
        assert_eq!(bench.plain(operation, 0, bench.blocks()), Ok(()), "{operation:?} of everything");
        bench.expect_zeroes(0, most);
    }
}

pub(super) fn compare(bench: &mut Bench<'_>, _: &Promises) {
    let (block, blocks) = (bench.block(), 300);
    let data = bench.write_random(2, blocks);
    let mine = bench.memory.segment(MOST, data.len());
    mine.write_at(0, &data);
    assert_eq!(bench.moving(Operation::Compare, 2, &[mine]), Ok(()));
    for at in [0, 1, block - 1, block, 128 * block - 1, 128 * block, data.len() - 1] {
        mine.write_at(at, &[data[at] ^ 0x10]);
        assert_eq!(bench.moving(Operation::Compare, 2, &[mine]), Err(BlockError::Miscompare), "byte {at} differs");
        mine.write_at(at, &[data[at]]);
    }
    assert_eq!(bench.moving(Operation::Compare, 1, &[mine]), Err(BlockError::Miscompare), "other blocks");
    bench.expect(2, &data);
}

pub(super) fn copy(bench: &mut Bench<'_>, _: &Promises) {
    let (block, last) = (bench.block(), bench.blocks() - 1);
    let low = bench.write_random(0, 400);
    let high = bench.write_random(last, 1);
    let copy = |source| Operation::Copy { source: Lba(source) };
    for (source, target, count) in [(0, 1000, 1), (1, 1001, 2), (0, 1003, 400), (9, 2001, 129), (0, 10, 10)] {
        assert_eq!(bench.plain(copy(source), target, count), Ok(()), "copy of {count} from {source} to {target}");
        let expected = low[source as usize * block..][..count as usize * block].to_vec();
        bench.expect(target, &expected);
    }
    assert_eq!(bench.plain(copy(last), 0, 1), Ok(()));
    bench.expect(0, &[high.clone(), low[block..10 * block].to_vec()].concat());
    assert_eq!(bench.plain(copy(5), last, 1), Ok(()));
    bench.expect(last, &low[5 * block..6 * block]);
    assert_eq!(bench.plain(copy(last - 1), 0, 2), Ok(()), "a source that ends with the volume");
    bench.expect(1, &low[5 * block..6 * block]);
}

pub(super) fn together(bench: &mut Bench<'_>, _: &Promises) {
    let block = bench.block();
    let before = bench.write_random(0, 64 * 8);
    let mut expected = before.clone();
    let mut jobs = Vec::new();
    for i in 0..64_usize {
        let (lba, place) = (i as u64 * 8, MOST + i * 8 * block);
        let mine = bench.memory.segment(place, 8 * block);
        let range = i * 8 * block..(i + 1) * 8 * block;
        let mut job = Job::new(Operation::Read, lba, 8);
        match i % 4 {
            0 => mine.fill(0),
            1 => {
                let data = bench.random.bytes(8 * block);
                mine.write_at(0, &data);
                expected[range].copy_from_slice(&data);
                job.operation = Operation::Write { fua: i % 8 == 1 };
            }
            2 => {
                expected[range].fill(0);
                job.operation = Operation::WriteZeroes { fua: false, deallocate: i % 8 == 2 };
            }
            _ => {
                mine.write_at(0, &before[range]);
                job.operation = Operation::Compare;
            }
        }
        if job.operation.has_data() {
            job.segments = vec![mine];
        }
        jobs.push(job);
    }
    jobs.push(Job::new(Operation::Flush, 0, 0));
    jobs.push(Job::new(Operation::Read, u64::MAX, 1));
    let mut results = bench.jobs(&jobs);
    assert_eq!(results.pop(), Some(Err(BlockError::OutOfRange)), "one failure among them");
    assert_eq!(results.iter().find(|result| result.is_err()), None);
    for i in (0..64).step_by(4) {
        let read = bench.memory.bytes(MOST + i * 8 * block, 8 * block);
        assert!(read == before[i * 8 * block..(i + 1) * 8 * block], "read {i} among others");
    }
    bench.expect(0, &expected);
}

/// Writes in flight to the same blocks: each block ends as one of them wrote it.
pub(super) fn collide(bench: &mut Bench<'_>, _: &Promises) {
    let (block, blocks) = (bench.block(), 200_u64);
    for _ in 0..8 {
        let writers = [1_u8, 2, 3].map(|byte| {
            let mine = bench.memory.segment(usize::from(byte) * (2 << 20) + usize::from(byte) % 2, blocks as usize * block);
            mine.fill(byte);
            Job { segments: vec![mine], ..Job::new(Operation::Write { fua: false }, 50, blocks) }
        });
        assert_eq!(bench.jobs(&writers), vec![Ok(()); 3]);
        for (i, found) in bench.read(50, blocks).chunks(block).enumerate() {
            assert!((1..=3).contains(&found[0]) && found.iter().all(|byte| *byte == found[0]), "block {i} is torn");
        }
    }
}

pub(super) fn shrink_and_grow(bench: &mut Bench<'_>, promises: &Promises) {
    if !promises.resizes {
        return;
    }
    let half = if promises.shrinks { BLOCKS / 2 } else { BLOCKS };
    let kept = bench.write_random(half - 100, 100);
    if promises.shrinks {
        bench.write_random(half, 100);
        bench.write_random(BLOCKS - 1, 1);
        bench.volume.resize(BlockCount(half)).expect("shrink");
        bench.expect(half - 100, &kept);
    }
    bench.volume.resize(BlockCount(BLOCKS * 3)).expect("grow");
    bench.expect(half - 100, &kept);
    if promises.starts_zeroed {
        bench.expect_zeroes(half, 1000);
        bench.expect_zeroes(half.max(BLOCKS - 1), 1000);
        bench.expect_zeroes(BLOCKS * 3 - 1000, 1000);
    }
    let end = bench.write_random(BLOCKS * 3 - 7, 7);
    let middle = bench.write_random(BLOCKS - 3, 6);
    bench.expect(BLOCKS * 3 - 7, &end);
    bench.expect(BLOCKS - 3, &middle);
}

pub(super) fn format_erases(bench: &mut Bench<'_>, promises: &Promises) {
    if !promises.formats {
        return;
    }
    for block_size in [BlockSize::B4096, BlockSize::B512, BlockSize::B512] {
        bench.write_random(0, 100);
        bench.write_random(bench.blocks() - 10, 10);
        bench.volume.format(block_size).expect("format");
        bench.expect_zeroes(0, 100);
        bench.expect_zeroes(bench.blocks() - 100, 100);
        through(bench, 9, 5, 1, &[700]);
        through(bench, 9, 5, 0, &[4096]);
    }
}

/// Cuts memory into pieces at random: mostly whole and aligned as guests do, sometimes not at all.
pub(super) fn random_cut(bench: &Bench<'_>, random: &mut Random, start: usize, len: usize) -> Vec<Segment> {
    match random.below(4) {
        0 => vec![bench.memory.segment(start, len)],
        1 => cut(bench, start, len, &[512]),
        2 => cut(bench, start + random.below(600) as usize, len, &[1 + random.below(5000) as usize, 4096]),
        _ => cut(bench, start, len, &[4096 - 512 * random.below(8) as usize, 4096, 4096]),
    }
}
