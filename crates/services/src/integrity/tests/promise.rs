//! What it promises: rot, misdirected and lost writes are found, and only those.

use std::sync::Arc;

use millrace_backends::fault::{Effect, FaultVolume, Kind as Requests, Late, Rule, When};
use millrace_block::{
    BlockError, BlockSize, Operation, Volume,
    conformance::{self, Job, SyncHarness},
};

use super::{
    super::page::{PAGE, block_start, group_start},
    SEED, close, disk, open,
};
use crate::{
    Reason, legs,
    settings::Settings,
    testing::{Bench, Session},
};

pub(super) const ROTTEN: Result<(), BlockError> = Err(BlockError::ReadFault { errno: 0 });

pub(super) fn read(bench: &mut conformance::Bench<'_>, lba: u64) -> Result<(), BlockError> {
    let segment = bench.memory.segment(0, bench.block());
    bench.moving(Operation::Read, lba, &[segment])
}

/// Changes a byte of a block behind its back.
pub(super) fn rot(disk: &Arc<dyn Volume>, lba: u64, at: usize) {
    let block_size = disk.geometry().block_size;
    let (start, len) = (block_start(lba, block_size), block_size.bytes() as usize);
    let mut block = legs::read(disk, start, len).unwrap();
    block[at] ^= 1;
    legs::write(disk, start, block).unwrap();
}

#[test]
fn a_flipped_bit_is_found_at_once_and_after_a_restart() {
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        let disk = disk(1100, block_size);
        let graph = open(&disk, Reason::Create).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        let data = bench.write_random(0, 1100);
        for lba in [0, 503, 504, 1099] {
            rot(&disk, lba, 77);
            assert_eq!(read(&mut bench, lba), ROTTEN, "block {lba}");
            rot(&disk, lba, 77);
            assert_eq!(read(&mut bench, lba), Ok(()));
        }
        bench.expect(0, &data);
        drop(bench);
        let status = graph.services("integrity")[0].1.status();
        assert_eq!((status.facts[1].1.as_str(), status.health), ("4", crate::Health::Degraded));
        close(graph);

        rot(&disk, 600, 0);
        let graph = open(&disk, Reason::Open).unwrap();
        let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        let segment = bench.memory.segment(0, 300 * bench.block());
        assert_eq!(bench.moving(Operation::Read, 500, &[segment]), ROTTEN, "within a longer read");
        assert_eq!(bench.moving(Operation::Compare, 600, &[bench.memory.segment(0, bench.block())]), ROTTEN);
        bench.expect(601, &data[601 * bench.block()..]);
        // What is written is good again.
        let new = bench.write_random(600, 1);
        bench.expect(600, &new);
        // A block that was never written is known as well.
        bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, 10, 1).unwrap();
        rot(&disk, 10, 5);
        assert_eq!(read(&mut bench, 10), ROTTEN);
        // An erasure makes it good, though zeroes are what it was to be.
        bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, 10, 1).unwrap();
        bench.expect_zeroes(10, 1);
    }
}

#[test]
fn a_rotten_block_that_was_never_written_is_erased_when_the_guest_says_so() {
    let disk = disk(1100, BlockSize::B512);
    let graph = open(&disk, Reason::Create).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    let zeroes = |deallocate| Operation::WriteZeroes { fua: false, deallocate };
    for (lba, operation) in [(10, zeroes(true)), (520, zeroes(false)), (1080, Operation::Deallocate)] {
        rot(&disk, lba, 5);
        assert_eq!(read(&mut bench, lba), ROTTEN);
        bench.plain(operation, lba, 1).unwrap();
        bench.expect_zeroes(lba, 1);
    }
}

#[test]
fn misdirected_and_lost_writes_are_found() {
    let inner = disk(1100, BlockSize::B512);
    let faulty = FaultVolume::new(Arc::clone(&inner), SEED);
    let disk: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let graph = open(&disk, Reason::Create).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    let data = bench.write_random(0, 64);
    // The disk says that it has written block 7, and has not.
    faulty.add(Rule::new(Requests::Write, When::Nth(1), Effect::Lose));
    bench.write_random(7, 1);
    faulty.clear();
    assert_eq!(read(&mut bench, 7), ROTTEN);
    // It writes block 9 to where block 20 is: both are found.
    let before = legs::read(&inner, block_start(9, BlockSize::B512), 512).unwrap();
    bench.write_random(9, 1);
    let written = legs::read(&inner, block_start(9, BlockSize::B512), 512).unwrap();
    legs::write(&inner, block_start(20, BlockSize::B512), written).unwrap();
    legs::write(&inner, block_start(9, BlockSize::B512), before).unwrap();
    assert_eq!((read(&mut bench, 9), read(&mut bench, 20)), (ROTTEN, ROTTEN));
    bench.expect(21, &data[21 * 512..]);
}

#[test]
fn a_failed_write_leaves_a_block_that_can_be_read() {
    let faulty = FaultVolume::new(disk(600, BlockSize::B512), SEED);
    let volume: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let graph = open(&volume, Reason::Create).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    let data = bench.write_random(0, 64);
    faulty.add(Rule::new(Requests::Write, When::Nth(1), Effect::Tear));
    let new = bench.random.bytes(64 * 512);
    assert!(bench.write(0, &new).is_err());
    let found = bench.read(0, 64);
    let either = |at: usize| [&data, &new].iter().any(|data| data[at * 512..][..512] == found[at * 512..][..512]);
    assert!((0..64).all(either), "each block is the old or the new one");
    // A page that cannot be written, a flush that fails: the write fails, and nothing else.
    for (kind, lba) in [(Requests::Write, 504), (Requests::Flush, 510)] {
        faulty.clear();
        faulty.add(Rule::new(kind, When::Nth(1), Effect::Fail(BlockError::WriteFault { errno: 5 })));
        let (data, before) = (bench.random.bytes(512), faulty.faults());
        let first = bench.write(lba, &data);
        assert_eq!(first.is_err(), faulty.faults() > before);
        faulty.clear();
        bench.write(lba, &data).unwrap();
        bench.expect(lba, &data);
    }
}

#[test]
fn a_scrub_finds_what_nobody_reads() {
    let disk = disk(1100, BlockSize::B512);
    let kept = Arc::default();
    let graph = crate::testing::graph(super::STACK, std::slice::from_ref(&disk), None, Reason::Create, &kept).unwrap();
    let services = graph.services("integrity");
    let service = &services[0].1;
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, &kept, SEED);
    conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED).write_random(0, 1000);
    rot(&disk, 3, 1);
    rot(&disk, 777, 500);
    rot(&disk, 1050, 8);
    assert!(service.command("scrub", &Settings::default()).unwrap().contains("has begun"));
    assert!(service.command("scrub", &Settings::default()).is_err());
    for ended in ["the scrub is ended, at 0 %", "no scrub was running"] {
        assert_eq!(service.command("stop", &Settings::default()).unwrap(), ended);
    }
    service.command("scrub", &Settings::default()).unwrap();
    assert_eq!(service.status().progress[0].total, 1100);
    for _ in 0..10_000 {
        session.settle(10);
        if service.status().progress.is_empty() {
            break;
        }
    }
    let status = service.status();
    let said = status.facts.iter().find(|(name, _)| name == "last scrub").map(|(_, said)| said.as_str());
    assert_eq!(said, Some("3 of 1100 blocks cannot be trusted"));
}

#[test]
fn damaged_pages_are_found_and_the_other_one_is_used() {
    let prepared = || {
        let disk = disk(1100, BlockSize::B512);
        let graph = open(&disk, Reason::Create).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        let data = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(0, 1100);
        close(graph);
        (disk, data)
    };
    let spoil = |disk: &Arc<dyn Volume>, group: u64, copy: u64| {
        let start = group_start(group, BlockSize::B512) + copy * PAGE as u64 + 512;
        let mut bytes = legs::read(disk, start, 512).unwrap();
        bytes[100] ^= 0x80;
        legs::write(disk, start, bytes).unwrap();
    };
    let mut harness = SyncHarness::new(SEED, false);
    for copy in 0..2 {
        let (disk, data) = prepared();
        spoil(&disk, 1, copy);
        let graph = open(&disk, Reason::Open).unwrap();
        conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).expect(0, &data);
    }
    // Both: the group's blocks cannot be read, and can be written; other groups are as they were.
    let (disk, data) = prepared();
    spoil(&disk, 1, 0);
    spoil(&disk, 1, 1);
    let graph = open(&disk, Reason::Open).unwrap();
    let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.expect(0, &data[..504 * 512]);
    bench.expect(1008, &data[1008 * 512..]);
    assert_eq!((read(&mut bench, 504), read(&mut bench, 1007)), (ROTTEN, ROTTEN));
    let new = bench.write_random(504, 3);
    bench.expect(504, &new);
    assert_eq!(read(&mut bench, 507), ROTTEN);
}

#[test]
fn a_block_that_is_written_and_erased_while_it_is_read_is_not_called_rotten() {
    for seed in 0..200 {
        let volume: Arc<dyn Volume> = Late::new(disk(600, BlockSize::B512), 4, 4);
        let graph = open(&volume, Reason::Create).unwrap();
        let mut harness = SyncHarness::new(seed, false);
        let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), seed);
        bench.write_random(0, 8);
        let erase = Operation::WriteZeroes { fua: false, deallocate: false };
        bench.plain(erase, 0, 8).unwrap();
        let segment = |at: usize| vec![bench.memory.segment(at * 512, 512)];
        segment(0)[0].fill(5);
        let job = |at: usize| match at % 3 {
            0 => Job { segments: segment(1 + at), ..Job::new(Operation::Read, 3, 1) },
            1 => Job { segments: segment(0), ..Job::new(Operation::Write { fua: false }, 3, 1) },
            _ => Job::new(erase, 3, 1),
        };
        let jobs: Vec<_> = (0..30).map(job).collect();
        let results = bench.jobs(&jobs);
        assert!(results.iter().all(Result::is_ok), "seed {seed}: {results:?}");
    }
}
