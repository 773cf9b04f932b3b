//! What it promises: nothing plain on the medium, keys that can be changed and forgotten.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_backends::fault::{Effect, FaultVolume, Kind as Requests, Rule, When};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Lba, Operation, Volume,
    conformance::{self, SyncHarness},
};

use super::{
    super::{
        header::{JOURNAL, SLOT},
        volume::Crypt,
    },
    OFFSET, SEED, disk, open, stack, take_over,
};
use crate::{
    Health, Node, Reason, Service,
    graph::Graph,
    legs,
    service::of_type,
    settings::Settings,
    testing::{Bench, Kept, Session},
};

fn on_medium(disk: &Arc<dyn Volume>, lba: u64, blocks: usize) -> Vec<u8> {
    let block = disk.geometry().block_size.bytes();
    legs::read(disk, OFFSET + lba * u64::from(block), blocks * block as usize).unwrap()
}

#[test]
fn nothing_plain_reaches_the_medium() {
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        let disk = disk(64, block_size);
        let graph = open(&stack(""), &disk, Reason::Create).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        let block = bench.block();
        let data = [&b"a secret, again and again; "[..]; 1000].concat()[..8 * 512].repeat(block / 512);
        let data = &data[..8 * block.min(data.len() / 8)];
        bench.write(0, data).unwrap();
        bench.write(32, data).unwrap();
        bench.expect(0, data);
        let (here, there) = (on_medium(&disk, 0, 8), on_medium(&disk, 32, 8));
        for medium in [&here, &there] {
            assert!(!medium.windows(8).any(|window| window == b"a secret"), "plain text on the medium");
        }
        assert!(here.chunks(16).zip(there.chunks(16)).all(|(here, there)| here != there), "each block has its own cipher");
        // A second volume of the same key-encryption key has another key.
        let other = super::disk(64, block_size);
        let graph = open(&stack(""), &other, Reason::Create).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write(0, data).unwrap();
        assert_ne!(on_medium(&other, 0, 8), here);
    }
}

#[test]
fn zeroes_show_or_not_as_it_was_set() {
    for (settings, shown) in [("", true), ("discard=false, ", false)] {
        let disk = disk(64, BlockSize::B512);
        let graph = open(&stack(settings), &disk, Reason::Create).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        assert_eq!(bench.volume.geometry().deallocate, shown);
        bench.write(0, &[0; 512]).unwrap();
        assert!(on_medium(&disk, 0, 1).iter().any(|byte| *byte != 0), "a written block is enciphered, zeroes too");
        bench.write_random(8, 8);
        bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, 8, 4).unwrap();
        bench.expect_zeroes(8, 4);
        let zero = on_medium(&disk, 8, 4).chunks(512).all(|block| block.iter().all(|byte| *byte == 0));
        assert_eq!(zero, shown);
    }
}

#[test]
fn a_format_forgets_the_key() {
    let disk = disk(64, BlockSize::B512);
    let graph = open(&stack(""), &disk, Reason::Create).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    let data = bench.write_random(0, 64);
    let before = legs::read(&disk, 0, 16 << 10).unwrap();
    let medium = on_medium(&disk, 0, 64);
    for block_size in [BlockSize::B512, BlockSize::B4096, BlockSize::B512] {
        bench.volume.format(block_size).unwrap();
        bench.expect_zeroes(0, bench.blocks());
    }
    // Not a piece of either copy's sealed key is left.
    let after = legs::read(&disk, 0, 16 << 10).unwrap();
    for key in [&before[88..180], &before[8192 + 88..8192 + 180]] {
        assert!(!key.chunks(12).any(|piece| after.windows(12).any(|window| window == piece)));
    }
    // Whoever kept the ciphertext has nothing of it.
    legs::write(&disk, OFFSET, medium).unwrap();
    let found = bench.read(0, 64);
    assert!(found.chunks(16).zip(data.chunks(16)).all(|(found, data)| found != data));
}

fn rekey(service: &Arc<dyn Service>) -> String {
    service.command("rekey", &Settings::default()).unwrap()
}

#[test]
fn a_new_key_comes_while_the_volume_is_used() {
    let disk = disk(1000, BlockSize::B512);
    let kept = Arc::default();
    let graph = crate::testing::graph(&stack(""), std::slice::from_ref(&disk), None, Reason::Create, &kept).unwrap();
    let services = graph.services("crypt");
    let service = &services[0].1;
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, &kept, SEED);
    let data = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED).write_random(100, 700);
    let before = on_medium(&disk, 0, 1000);
    assert!(rekey(service).contains("has begun"));
    assert!(service.command("rekey", &Settings::default()).unwrap_err().to_string().contains("already"));
    assert_eq!((service.status().progress[0].done, service.status().progress[0].total), (0, 1000));
    for _ in 0..1000 {
        session.settle(10);
        if service.status().progress.is_empty() {
            break;
        }
        conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED).expect(100, &data);
    }
    assert!(service.status().progress.is_empty(), "{:?}", service.status());
    let mut bench = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED);
    bench.expect(100, &data);
    bench.expect_zeroes(0, 100);
    let after = on_medium(&disk, 0, 1000);
    for (number, (before, after)) in before.chunks(512).zip(after.chunks(512)).enumerate() {
        assert_eq!(
            before == after,
            !(100..800).contains(&number),
            "block {number}: written ones have another key, others none"
        );
    }
    let mut settings = Settings::default();
    settings.add("x", "1");
    assert!(crate::crypt::KIND.check_arguments("rekey", &settings).is_err());
}

#[test]
fn a_leg_that_fails_stops_a_re_keying_and_spoils_nothing() {
    // The chunk's journal, the flushes before and behind it, its own write; and what ends the re-keying.
    for (kind, nth) in [
        (Requests::Write, 1),
        (Requests::Flush, 1),
        (Requests::Flush, 2),
        (Requests::Write, 2),
        (Requests::Write, 4),
        (Requests::Read, 2),
    ] {
        for tear in [false, true] {
            let faulty = FaultVolume::new(disk(300, BlockSize::B512), SEED + nth);
            let disk: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
            let kept = Arc::default();
            let graph = crate::testing::graph(&stack(""), &[disk], None, Reason::Create, &kept).unwrap();
            let services = graph.services("crypt");
            let service = &services[0].1;
            let tasks = Bench::new(SEED);
            let mut session = Session::new(&tasks, &kept, SEED);
            let data = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED).write_random(0, 300);
            rekey(service);
            let effect = if tear { Effect::Tear } else { Effect::Fail(BlockError::WriteFault { errno: 5 }) };
            faulty.add(Rule::new(kind, When::Nth(nth), effect));
            // It is tried again after a second.
            let end = Instant::now() + Duration::from_secs(60);
            while !service.status().progress.is_empty() && Instant::now() < end {
                session.settle(1000);
                let mut bench = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED);
                let segment = bench.memory.segment(0, 300 * 512);
                match bench.moving(Operation::Read, 0, &[segment]) {
                    Ok(()) => assert_eq!(bench.memory.bytes(0, 300 * 512), data),
                    // What is half done cannot be used until it is done, and the guest is told to come again.
                    Err(error) => assert!(matches!(error, BlockError::NotReady | BlockError::WriteFault { .. }), "{error}"),
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(service.status().progress.is_empty() && faulty.faults() > 0, "{kind:?} {nth}: {:?}", service.status());
            conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED).expect(0, &data);
        }
    }
}

#[test]
fn what_is_written_after_a_failed_journal_is_there_after_a_restart() {
    // The journal's flush fails; the second time what takes it back fails, too.
    for failures in [1, 2] {
        let memory = disk(300, BlockSize::B512);
        let faulty = FaultVolume::new(Arc::clone(&memory), SEED);
        let disk: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
        let kept = Arc::default();
        let mut graph = crate::testing::graph(&stack(""), &[disk], None, Reason::Create, &kept).unwrap();
        let services = graph.services("crypt");
        let service = &services[0].1;
        let tasks = Bench::new(SEED);
        let mut session = Session::new(&tasks, &kept, SEED);
        let mut data = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED).write_random(0, 300);
        rekey(service);
        // Before the journal comes a flush of what it says.
        for nth in 2..2 + failures {
            faulty.add(Rule::new(Requests::Flush, When::Nth(nth), Effect::Fail(BlockError::WriteFault { errno: 5 })));
        }
        while service.status().health == Health::Good {
            session.settle(1);
        }
        let mut bench = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED);
        let new = bench.memory.segment(0, 512);
        new.fill(0x17);
        match bench.moving(Operation::Write { fua: false }, 7, &[new]) {
            Ok(()) => data[7 * 512..][..512].fill(0x17),
            Err(error) => assert_eq!((error, failures), (BlockError::NotReady, 2)),
        }
        bench.expect(0, &data);
        // The process dies.
        drop(session);
        graph.tasks.clear();
        drop(graph);
        let graph = open(&stack(""), &memory, Reason::Open).unwrap();
        conformance::Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED).expect(0, &data);
    }
}

/// Its next flush succeeds: the chunk that it has forgotten is re-enciphered once more, and the guest is told.
#[test]
fn what_a_leg_forgets_while_it_is_re_keyed_is_re_enciphered_again() {
    for seed in 0..8 {
        for nth in 1..12 {
            let faulty = FaultVolume::new(disk(400, BlockSize::B512), seed);
            faulty.hold_writes();
            let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
            let kept = Arc::default();
            let mut graph = crate::testing::graph(&stack(""), &[Arc::clone(&leg)], None, Reason::Create, &kept).unwrap();
            let service = Arc::clone(&graph.services("crypt")[0].1);
            let tasks = Bench::new(seed);
            let mut session = Session::new(&tasks, &kept, seed);
            let mut bench = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), seed);
            let data = bench.write_random(0, 400);
            bench.plain(Operation::Flush, 0, 0).unwrap();
            drop(bench);
            rekey(&service);
            let forgets = Effect::Forget(BlockError::WriteFault { errno: 5 });
            faulty.add(Rule::new(Requests::Flush, When::Nth(nth), forgets));
            while !service.status().progress.is_empty() {
                session.settle(1);
            }
            let mut bench = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), seed);
            if faulty.faults() > 0 {
                assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::WriteFault { errno: 0 }), "flush {nth}");
            }
            bench.expect(0, &data);
            faulty.clear();
            drop(bench);
            drop(session);
            graph.tasks.clear();
            drop((service, graph));
            faulty.power_loss();
            let graph = open(&stack(""), &leg, Reason::Open).unwrap();
            conformance::Bench::new(&mut SyncHarness::new(seed, false), Arc::clone(graph.volume()), seed).expect(0, &data);
        }
    }
}

/// A volume of 400 blocks whose process died when two chunks of 120 had another key; and its data.
fn half_re_keyed() -> (Arc<FaultVolume>, Arc<dyn Volume>, Vec<u8>) {
    let faulty = FaultVolume::new(disk(400, BlockSize::B512), SEED);
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let kept = Arc::default();
    let mut graph = crate::testing::graph(&stack(""), &[Arc::clone(&leg)], None, Reason::Create, &kept).unwrap();
    let service = Arc::clone(&graph.services("crypt")[0].1);
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, &kept, SEED);
    let data = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED).write_random(0, 400);
    rekey(&service);
    while service.status().progress[0].done < 240 {
        session.settle(1);
    }
    drop(session);
    graph.tasks.clear();
    (faulty, leg, data)
}

/// A sector that fails.
fn bad(kind: Requests, at: u64) -> Rule {
    let error =
        if kind == Requests::Read { BlockError::ReadFault { errno: 5 } } else { BlockError::WriteFault { errno: 5 } };
    Rule { range: Some((Lba(at / 512), BlockCount(1))), ..Rule::new(kind, When::Always, Effect::Fail(error)) }
}

fn write(bench: &mut conformance::Bench<'_>, lba: u64, data: &mut [u8]) -> Result<(), BlockError> {
    bench.write(lba, &[0x17; 512])?;
    data[lba as usize * 512..][..512].fill(0x17);
    Ok(())
}

/// Its tasks go on until everything has the new key.
fn end_re_keying(graph: &Graph, kept: &Arc<Kept>, data: &[u8]) {
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, kept, SEED);
    while !graph.services("crypt")[0].1.status().progress.is_empty() {
        session.settle(1000);
    }
    conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED).expect(0, data);
}

/// After a crash in the middle of a re-keying, part of the journal or of the last chunk cannot be read, or not be written.
#[test]
fn a_bad_sector_costs_a_chunk_that_is_re_keyed_and_not_the_volume() {
    let home = OFFSET + 125 * 512;
    for (kind, at, held) in [
        (Requests::Read, home, 120),
        (Requests::Write, home, 120),
        (Requests::Read, JOURNAL, 240),
        (Requests::Read, JOURNAL + SLOT as u64, 120),
        (Requests::Write, JOURNAL + SLOT as u64, 120),
    ] {
        let (faulty, leg, mut data) = half_re_keyed();
        faulty.add(bad(kind, at));
        let kept = Arc::default();
        let graph = crate::testing::graph(&stack(""), &[leg], None, Reason::Open, &kept)
            .unwrap_or_else(|error| panic!("{kind:?} of byte {at}: {error}"));
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        for (lba, blocks) in [(0, 120), (120, 120), (240, 120), (360, 40)] {
            let segment = bench.memory.segment(0, blocks * 512);
            let found = bench.moving(Operation::Read, lba, &[segment]);
            assert_eq!(found, if lba == held { Err(BlockError::NotReady) } else { Ok(()) }, "{kind:?} of byte {at}: {lba}");
            if lba != held {
                assert_eq!(bench.memory.bytes(0, blocks * 512), &data[lba as usize * 512..][..blocks * 512]);
            }
        }
        // Where the journal is known, what is written has the new key.
        let written = write(&mut bench, held + 7, &mut data);
        assert_eq!(written, if at == home { Ok(()) } else { Err(BlockError::NotReady) }, "{kind:?} of byte {at}");
        drop(bench);
        faulty.clear();
        end_re_keying(&graph, &kept, &data);
    }
}

/// The leg tells once that it has dropped something; opening the volume flushes, too.
#[test]
fn what_a_leg_forgets_before_a_re_keying_goes_on_is_told_to_the_guest() {
    // Before anything else; the chunk before in its place; the last one's journal; that in its place.
    for nth in 1..=4 {
        let (faulty, leg, _) = half_re_keyed();
        let refused = BlockError::WriteFault { errno: 5 };
        faulty.add(Rule::new(Requests::Flush, When::Nth(nth), Effect::Fail(refused)));
        let kept = Arc::default();
        let graph = crate::testing::graph(&stack(""), &[leg], None, Reason::Open, &kept).unwrap();
        assert_eq!(faulty.faults(), 1, "flush {nth}");
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        let flushes = [0; 2].map(|_| bench.plain(Operation::Flush, 0, 0));
        assert_eq!(flushes, [Err(BlockError::WriteFault { errno: 0 }), Ok(())], "flush {nth}");
    }
}

/// Neither flush is the guest's, and the leg's next one succeeds.
#[test]
fn what_a_leg_forgets_when_the_volume_grows_or_a_re_keying_begins_is_told_to_the_guest() {
    for grows in [true, false] {
        let faulty = FaultVolume::new(disk(400, BlockSize::B512), SEED);
        faulty.hold_writes();
        let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
        let graph = open(&stack(""), &leg, Reason::Create).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        bench.write_random(0, 400);
        let forgets = Effect::Forget(BlockError::WriteFault { errno: 5 });
        faulty.add(Rule::new(Requests::Flush, When::Nth(1), forgets));
        if grows {
            assert!(graph.volume().resize(BlockCount(800)).is_err());
        } else {
            assert!(graph.services("crypt")[0].1.command("rekey", &Settings::default()).is_err());
        }
        let flushes = [0; 2].map(|_| bench.plain(Operation::Flush, 0, 0));
        assert_eq!(flushes, [Err(BlockError::WriteFault { errno: 0 }), Ok(())], "it grows: {grows}");
    }
}

/// Disks remap a bad sector when it is written, and not before.
#[test]
fn a_guest_s_write_heals_a_bad_sector_of_a_chunk_that_is_re_keyed() {
    for dies in [false, true] {
        let (faulty, leg, mut data) = half_re_keyed();
        faulty.add(bad(Requests::Read, OFFSET + 125 * 512));
        let kept = Arc::default();
        let mut graph = crate::testing::graph(&stack(""), &[Arc::clone(&leg)], None, Reason::Open, &kept).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        write(&mut bench, 125, &mut data).unwrap();
        drop(bench);
        faulty.clear();
        if !dies {
            end_re_keying(&graph, &kept, &data);
            continue;
        }
        graph.tasks.clear();
        drop(graph);
        let kept = Arc::default();
        let graph = crate::testing::graph(&stack(""), &[leg], None, Reason::Open, &kept).unwrap();
        conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).expect(0, &data);
        end_re_keying(&graph, &kept, &data);
    }
}

#[test]
fn bad_sectors_of_two_chunks_that_were_re_keyed_cost_no_more_than_the_last_one() {
    let (faulty, leg, data) = half_re_keyed();
    for block in [119, 120] {
        faulty.add(bad(Requests::Read, OFFSET + block * 512));
    }
    let kept = Arc::default();
    let graph = crate::testing::graph(&stack(""), &[leg], None, Reason::Open, &kept).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.expect(0, &data[..119 * 512]);
    bench.expect(240, &data[240 * 512..]);
    for (lba, error) in [(119, BlockError::ReadFault { errno: 5 }), (120, BlockError::NotReady), (239, BlockError::NotReady)]
    {
        let segment = bench.memory.segment(0, 512);
        assert_eq!(bench.moving(Operation::Read, lba, &[segment]), Err(error), "block {lba}");
    }
    drop(bench);
    faulty.clear();
    end_re_keying(&graph, &kept, &data);
}

/// Re-keys a volume over a disk that is slow to flush until every block has the new key and it has not ended, lets it go on for so many
/// turns, and makes the volume larger.
fn grow_at_the_end(turns: usize, then: impl FnOnce(&mut Session<'_>, &Graph, Vec<u8>)) -> Arc<FaultVolume> {
    let faulty = FaultVolume::new(disk(300, BlockSize::B512), SEED);
    faulty.hold_writes();
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let kept = Arc::default();
    let mut graph = crate::testing::graph(&stack(""), &[leg], None, Reason::Create, &kept).unwrap();
    let service = Arc::clone(&graph.services("crypt")[0].1);
    let tasks = Bench::new(SEED + turns as u64);
    let mut session = Session::new(&tasks, &kept, SEED);
    let mut bench = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED);
    let data = bench.write_random(0, 300);
    bench.plain(Operation::Flush, 0, 0).unwrap();
    rekey(&service);
    while service.status().progress[0].done < 300 {
        session.settle(1);
    }
    faulty.add(Rule::new(Requests::Flush, When::Always, Effect::Delay(Duration::from_millis(1))));
    session.settle(turns);
    let volume = Arc::clone(graph.volume());
    let growing = std::thread::spawn(move || volume.resize(BlockCount(500)));
    while !growing.is_finished() {
        session.settle(1);
    }
    growing.join().unwrap().unwrap();
    then(&mut session, &graph, data);
    // The process dies.
    drop(session);
    graph.tasks.clear();
    faulty
}

#[test]
fn what_a_volume_grows_by_while_a_re_keying_ends_keeps_its_data() {
    for turns in 0..40 {
        let mut all = Vec::new();
        let disk = grow_at_the_end(turns, |session, graph, data| {
            all = data;
            let mut bench = conformance::Bench::new(session, Arc::clone(graph.volume()), SEED);
            all.extend(bench.write_random(300, 200));
            let end = Instant::now() + Duration::from_secs(60);
            while !graph.services("crypt")[0].1.status().progress.is_empty() && Instant::now() < end {
                session.settle(10);
            }
            assert!(graph.services("crypt")[0].1.status().progress.is_empty());
            conformance::Bench::new(session, Arc::clone(graph.volume()), SEED).expect(0, &all);
        });
        let leg: Arc<dyn Volume> = disk;
        let graph = open(&stack(""), &leg, Reason::Open).unwrap();
        conformance::Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED).expect(0, &all);
    }
}

#[test]
fn a_volume_that_grew_while_it_was_re_keyed_survives_a_power_cut() {
    for turns in 0..40 {
        let mut all = Vec::new();
        let disk = grow_at_the_end(0, |session, _, data| {
            all = data;
            session.settle(turns);
        });
        disk.power_loss();
        let leg: Arc<dyn Volume> = disk;
        let graph = open(&stack(""), &leg, Reason::Open).unwrap();
        conformance::Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED).expect(0, &all);
    }
}

#[test]
fn blocks_that_come_back_after_a_crash_have_the_key_that_the_journal_says() {
    let memory = disk(240, BlockSize::B512);
    let kept = Arc::default();
    let mut graph = crate::testing::graph(&stack(""), std::slice::from_ref(&memory), None, Reason::Create, &kept).unwrap();
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, &kept, SEED);
    let service = Arc::clone(&graph.services("crypt")[0].1);
    conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED).write_random(0, 240);
    rekey(&service);
    while service.status().progress[0].done < 240 {
        session.settle(1);
    }
    drop(session);
    graph.tasks.clear();
    graph.volume().resize(BlockCount(100)).unwrap();
    drop((service, graph));
    // The journal still knows blocks that are gone. They come back, are written, and the process dies again.
    let graph = open(&stack(""), &memory, Reason::Open).unwrap();
    graph.volume().resize(BlockCount(240)).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let data = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(100, 140);
    drop(graph);
    let graph = open(&stack(""), &memory, Reason::Open).unwrap();
    conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).expect(100, &data);
}

#[test]
fn blocks_that_come_back_have_the_key_that_the_journal_says_of_a_chunk_that_had_failed() {
    let faulty = FaultVolume::new(disk(240, BlockSize::B512), SEED);
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let (kept, settings) = (Arc::default(), stack("rekey-rate=50K, "));
    let mut graph = crate::testing::graph(&settings, &[Arc::clone(&leg)], None, Reason::Create, &kept).unwrap();
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, &kept, SEED);
    let service = Arc::clone(&graph.services("crypt")[0].1);
    let mut harness = SyncHarness::new(SEED, false);
    let before = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(0, 240);
    let range = Some((Lba(OFFSET >> 9), BlockCount(120)));
    let fails = Effect::Fail(BlockError::WriteFault { errno: 5 });
    faulty.add(Rule { range, ..Rule::new(Requests::Write, When::Always, fails) });
    rekey(&service);
    while faulty.faults() == 0 {
        session.settle(1);
    }
    graph.volume().resize(BlockCount(100)).unwrap();
    faulty.clear();
    while service.status().progress[0].done < 100 {
        session.settle(1);
    }
    // The next chunk waits for its turn. The blocks come back and are written, and the process dies.
    drop(session);
    graph.tasks.clear();
    graph.volume().resize(BlockCount(240)).unwrap();
    let after = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(100, 140);
    drop((service, graph));
    let graph = open(&stack(""), &leg, Reason::Open).unwrap();
    let mut bench = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.expect(0, &before[..100 * 512]);
    bench.expect(100, &after);
}

/// It has the new key in its place, and would get that once more.
#[test]
fn a_chunk_whose_keys_cannot_be_exchanged_at_once_is_re_keyed_once() {
    let faulty = FaultVolume::new(disk(240, BlockSize::B512), SEED);
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let kept = Arc::default();
    let graph = crate::testing::graph(&stack(""), &[leg], None, Reason::Create, &kept).unwrap();
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, &kept, SEED);
    let service = Arc::clone(&graph.services("crypt")[0].1);
    let crypt = of_type::<Crypt>(&service).expect("it is one");
    let mut harness = SyncHarness::new(SEED, false);
    let data = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(0, 240);
    let range = Some((Lba(OFFSET >> 9), BlockCount(120)));
    let delay = Effect::Delay(Duration::from_millis(1));
    faulty.add(Rule { range, ..Rule::new(Requests::Write, When::Nth(1), delay) });
    rekey(&service);
    while faulty.faults() == 0 {
        session.settle(1);
    }
    // It is on its way to its place, and while another exchange is under way there is no other.
    let keys = crypt.keys.visit().clone();
    let retired = crypt.keys.replace(keys).unwrap();
    let end = Instant::now() + Duration::from_millis(50);
    while Instant::now() < end {
        session.settle(1);
    }
    drop(retired);
    let end = Instant::now() + Duration::from_secs(60);
    while !service.status().progress.is_empty() && Instant::now() < end {
        session.settle(10);
    }
    assert!(service.status().progress.is_empty());
    conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).expect(0, &data);
}

#[test]
fn the_key_encryption_key_is_exchanged_in_a_running_volume() {
    let directory = tempfile::tempdir().unwrap();
    let key = directory.path().join("new-key");
    std::fs::write(&key, "17".repeat(32)).unwrap();
    let disk = disk(64, BlockSize::B512);
    let graph = open(&stack(""), &disk, Reason::Create).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let data = conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(0, 64);
    rekey(&graph.services("crypt")[0].1);
    let service = take_over(&disk, &key, None, &graph.services("crypt")[0].1).unwrap();
    let volume: Arc<dyn Volume> = Arc::<dyn Service>::clone(&service);
    conformance::Bench::new(&mut harness, volume, SEED).expect(0, &data);
    service.unmount().unwrap();
    // The new key opens it, and the old one does no more.
    let with_new = format!("crypt(key=\"file:{}\", disk:0)", key.display());
    let graph = open(&with_new, &disk, Reason::Open).unwrap();
    conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).expect(0, &data);
    drop(graph);
    let refused = open(&stack(""), &disk, Reason::Open).err().unwrap();
    assert!(refused.contains("does not open it"), "{refused}");
}

#[test]
fn keys_are_nowhere_in_what_is_shown() {
    let disk = disk(64, BlockSize::B512);
    let graph = open(&stack(""), &disk, Reason::Create).unwrap();
    let service = &graph.services("crypt")[0].1;
    let key = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key")).unwrap();
    let shown = format!("{:?} {:?}", service.status(), stack("").parse::<Node>().unwrap());
    assert!(shown.contains("test.key") && !shown.contains(key.trim()));
    let header = legs::read(&disk, 0, 16 << 10).unwrap();
    let bytes: Vec<u8> = (0..32).map(|at| u8::from_str_radix(&key[2 * at..2 * at + 2], 16).unwrap()).collect();
    assert!(!header.windows(8).any(|window| window == &bytes[..8]));
}
