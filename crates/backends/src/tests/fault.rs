//! The volume that spoils others.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use millrace_block::{
    BlockCount, BlockError, BlockSize, Lba, Operation, Volume,
    conformance::{Bench, Job, SyncHarness},
};

use super::SEED;
use crate::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Late, Rule, When},
};

const BLOCKS: u64 = 256;

fn volume(seed: u64) -> Arc<FaultVolume> {
    FaultVolume::new(MemoryVolume::create("inner", BLOCKS * 512, BlockSize::B512).unwrap(), seed)
}

fn on_bench(volume: &Arc<FaultVolume>, test: impl FnOnce(&mut Bench<'_>)) {
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), volume.clone(), SEED));
}

#[test]
fn rules_strike_whom_they_say() {
    let volume = volume(1);
    let fault = BlockError::ReadFault { errno: libc::EIO };
    volume.add(Rule::new(Kind::Read, When::Nth(3), Effect::Fail(fault)));
    volume.add(Rule {
        range: Some((Lba(100), BlockCount(10))),
        ..Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NoSpace))
    });
    on_bench(&volume, |bench| {
        let segment = bench.memory.segment(0, 512);
        for i in 1..6 {
            let expected = if i == 3 { Err(fault) } else { Ok(()) };
            assert_eq!(bench.moving(Operation::Read, 5, &[segment]), expected);
        }
        for (lba, expected) in
            [(99, Ok(())), (100, Err(BlockError::NoSpace)), (109, Err(BlockError::NoSpace)), (110, Ok(()))]
        {
            assert_eq!(bench.moving(Operation::Write { fua: true }, lba, &[segment]), expected, "{lba}");
        }
        assert_eq!((volume.requests(Kind::Read), volume.requests(Kind::Write), volume.faults()), (5, 4, 3));
        volume.clear();
        volume.add(Rule { kinds: vec![], ..Rule::new(Kind::Read, When::Every(2), Effect::Fail(BlockError::NotReady)) });
        let results: Vec<_> = (0..4).map(|_| bench.plain(Operation::Flush, 0, 0)).collect();
        assert_eq!(results, [Ok(()), Err(BlockError::NotReady), Ok(()), Err(BlockError::NotReady)]);
    });
}

#[test]
fn a_seed_repeats_its_faults() {
    let strikes = |seed| {
        let volume = volume(seed);
        volume.add(Rule::new(Kind::Flush, When::OneIn(3), Effect::Fail(BlockError::NotReady)));
        let mut results = Vec::new();
        on_bench(&volume, |bench| results.extend((0..200).map(|_| bench.plain(Operation::Flush, 0, 0).is_err())));
        results
    };
    assert_eq!(strikes(1), strikes(1));
    assert_ne!(strikes(1), strikes(2));
    let struck = strikes(1).into_iter().filter(|struck| *struck).count();
    assert!((30..110).contains(&struck), "{struck} of 200, one in three");
}

#[test]
fn writes_are_lost_torn_and_corrupted() {
    let volume = volume(3);
    on_bench(&volume, |bench| {
        let old = bench.write_random(0, 64);
        volume.add(Rule::new(Kind::Write, When::Nth(1), Effect::Lose));
        bench.write_random(0, 64);
        bench.expect(0, &old);

        volume.clear();
        volume.add(Rule::new(Kind::Write, When::Nth(1), Effect::Tear));
        let new = bench.random.bytes(64 * 512);
        assert_eq!(bench.write(0, &new), Err(BlockError::WriteFault { errno: 0 }));
        let found = bench.read(0, 64);
        let blocks = || found.chunks(512).zip(old.chunks(512)).zip(new.chunks(512));
        assert!(blocks().all(|((found, old), new)| found == old || found == new));
        let reached = blocks().filter(|((found, _), new)| found == new).count();
        assert!((10..54).contains(&reached), "{reached} of 64 blocks");

        volume.clear();
        volume.add(Rule::new(Kind::Read, When::Nth(1), Effect::Corrupt));
        let spoiled = bench.read(0, 64);
        let bits: u32 = spoiled.iter().zip(&found).map(|(a, b)| (a ^ b).count_ones()).sum();
        assert_eq!(bits, 1);
        bench.expect(0, &found);
    });
}

#[test]
fn a_delay_only_delays() {
    let volume = volume(4);
    volume.add(Rule::new(Kind::Read, When::Always, Effect::Delay(Duration::from_millis(3))));
    on_bench(&volume, |bench| {
        let data = bench.write_random(0, 4);
        let start = std::time::Instant::now();
        bench.expect(0, &data);
        assert!(start.elapsed() >= Duration::from_millis(3));
    });
}

#[test]
fn a_power_loss_takes_only_what_was_not_flushed() {
    let mut outcomes = BTreeSet::new();
    for seed in 0..40 {
        let volume = volume(seed);
        volume.hold_writes();
        assert!(volume.geometry().volatile_cache);
        on_bench(&volume, |bench| {
            let flushed = bench.write_random(0, 32);
            bench.plain(Operation::Flush, 0, 0).unwrap();
            assert_eq!(volume.power_loss(), 0);
            bench.expect(0, &flushed);

            let versions = [flushed, bench.write_random(0, 32), bench.write_random(0, 32)];
            let forced = bench.random.bytes(4 * 512);
            let segment = bench.memory.segment(0, forced.len());
            segment.write_at(0, &forced);
            bench.moving(Operation::Write { fua: true }, 32, &[segment]).unwrap();
            bench.expect(0, &versions[2]);
            let lost = volume.power_loss();

            let found = bench.read(0, 32);
            let which = |i: usize| versions.iter().position(|version| version[i * 512..][..512] == found[i * 512..][..512]);
            let kept: Vec<_> = (0..32).map(|i| which(i).expect("some version of the block")).collect();
            assert_eq!(kept.iter().filter(|version| **version != 2).count() as u64, lost);
            outcomes.extend(kept);
            bench.expect(32, &forced);
            bench.expect(0, &found);
            // What survived is on the medium: the next loss does not take it.
            assert_eq!(volume.power_loss(), 0);
            bench.expect(0, &found);
            bench.plain(Operation::Flush, 0, 0).unwrap();
            assert_eq!(volume.power_loss(), 0);
            bench.expect(0, &found);
        });
    }
    assert_eq!(outcomes, BTreeSet::from([0, 1, 2]), "each version survives somewhere");
}

#[test]
fn a_flush_that_failed_promises_nothing_and_loses_nothing() {
    let volume = volume(5);
    volume.hold_writes();
    on_bench(&volume, |bench| {
        let data = bench.write_random(7, 3);
        volume.add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(BlockError::WriteFault { errno: libc::EIO })));
        assert!(bench.plain(Operation::Flush, 0, 0).is_err());
        bench.expect(7, &data);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        assert_eq!(volume.power_loss(), 0);
        bench.expect(7, &data);
    });
}

#[test]
fn a_read_beside_a_flush_has_what_was_written_before() {
    for seed in 0..10 {
        let inner = MemoryVolume::create("inner", BLOCKS * 512, BlockSize::B512).unwrap();
        let volume = FaultVolume::new(Late::new(inner, 0, 200), seed);
        volume.hold_writes();
        let mut harness = SyncHarness::new(seed, false);
        let mut bench = Bench::new(&mut harness, volume, seed);
        let data = bench.write_random(3, 2);
        let segment = bench.memory.segment(0, data.len());
        segment.fill(0);
        let read = Job { segments: vec![segment], ..Job::new(Operation::Read, 3, 2) };
        assert_eq!(bench.jobs(&[read, Job::new(Operation::Flush, 0, 0)]), [Ok(()), Ok(())]);
        assert_eq!(bench.memory.bytes(0, data.len()), data, "seed {seed}");
    }
}
