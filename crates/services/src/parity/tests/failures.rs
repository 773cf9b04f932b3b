//! Legs that fail or rot, and what becomes of them.

use std::{thread, time::Duration};

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, BlockError, Lba, Operation, trace::Tap};

use super::*;
use crate::{service::Health, testing::sector::BadSector};

const READ_FAULT: BlockError = BlockError::ReadFault { errno: 5 };
pub(super) const WRITE_FAULT: BlockError = BlockError::WriteFault { errno: 5 };

/// Everything on this leg fails from now on.
pub(super) fn pull(leg: &FaultVolume) {
    leg.add(Rule { kinds: vec![], ..Rule::new(Kind::Read, When::Always, Effect::Fail(BlockError::NotReady)) });
}

pub(super) fn state(graph: &Graph, leg: usize) -> String {
    fact(graph, &format!("leg {leg}")).unwrap()
}

/// A block of a leg cannot be read so many times.
fn cannot_read(leg: &FaultVolume, block: u64, times: u64) {
    let range = Some((Lba(block), BlockCount(1)));
    for number in 1..=times {
        leg.add(Rule { range, ..Rule::new(Kind::Read, When::Nth(number), Effect::Fail(READ_FAULT)) });
    }
}

/// Upkeep looks whether the journal can be voided.
pub(super) fn void_when_quiet(graph: &Graph) {
    let parity = parity(graph);
    crate::legs::block_on(move |cx| Box::pin(async move { parity.void_when_quiet(cx).await })).unwrap();
}

/// Spoils a byte of a leg, below the service.
pub(super) fn rot(leg: &Arc<dyn Volume>, at: u64) {
    let block = at / 512 * 512;
    let mut bytes = crate::legs::read(leg, block, 512).unwrap();
    bytes[(at % 512) as usize] ^= 0x24;
    crate::legs::write(leg, block, bytes).unwrap();
}

#[test]
fn each_leg_may_fail_and_come_back() {
    for form in [SMALL, WIDE, TWO] {
        for pulled in 0..form.legs {
            let legs = form.faulty(2048);
            let volumes = volumes(&legs);
            let graph = form.open(&volumes, Reason::Create);
            let mut model = Vec::new();
            on_bench(&graph, |bench| {
                model = bench.write_random(0, 2048);
                pull(&legs[pulled]);
                // Reads alone do no harm; the first write finds out.
                bench.expect(0, &model);
                for (lba, count) in [(3, 1), (100, 9), (500, 300), (1999, 49)] {
                    let data = bench.write_random(lba, count);
                    model[lba as usize * 512..][..data.len()].copy_from_slice(&data);
                }
                bench.plain(Operation::WriteZeroes { fua: true, deallocate: true }, 900, 200).unwrap();
                model[900 * 512..1100 * 512].fill(0);
                bench.plain(Operation::Flush, 0, 0).unwrap();
                bench.expect(0, &model);
            });
            assert_eq!((state(&graph, pulled).as_str(), graph.tree().status.unwrap().health), ("failed", Health::Degraded));
            assert!(command(&graph, "rebuild", pulled).is_err(), "it still does not answer");
            if form.plan().redundancy == 1 {
                let other = command(&graph, "fail", (pulled + 1) % form.legs).unwrap_err().to_string();
                assert!(other.ends_with("there would be too few good legs: it stays"), "{other}");
            }
            legs[pulled].clear();
            command(&graph, "rebuild", pulled).unwrap();
            on_bench(&graph, |bench| bench.expect(0, &model));
            assert!(resync(&graph));
            assert_eq!((state(&graph, pulled).as_str(), graph.tree().status.unwrap().health), ("good", Health::Good));
            parity_fits(&graph, &volumes);
            on_bench(&graph, |bench| bench.expect(0, &model));
        }
    }
}

#[test]
fn a_leg_is_filled_while_it_is_written_and_read() {
    let legs = WIDE.faulty(4096);
    let volumes = volumes(&legs);
    let graph = WIDE.open(&volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        model = bench.write_random(0, 4096);
        command(&graph, "fail", 2).unwrap();
        // Nothing of it is left.
        let leg: &Arc<dyn Volume> = &volumes[2];
        let blocks = leg.geometry().blocks.0;
        crate::legs::write(leg, 0, vec![0xee; blocks as usize * 512]).unwrap();
        assert!(command(&graph, "rebuild", 2).unwrap().ends_with("with everything"));
        for round in 0..40 {
            let lba = bench.random.below(4000);
            let data = bench.write_random(lba, 1 + round % 90);
            model[lba as usize * 512..][..data.len()].copy_from_slice(&data);
            if round == 20 {
                bench.expect(0, &model);
            }
        }
    });
    assert_eq!(state(&graph, 2), "being filled");
    assert!(resync(&graph));
    assert_eq!(state(&graph, 2), "good");
    parity_fits(&graph, &volumes);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

#[test]
fn a_write_that_began_without_a_leg_does_not_cost_it_again() {
    let legs = SMALL.faulty(1024);
    let volumes = volumes(&legs);
    let graph = SMALL.open(&volumes, Reason::Create);
    let area = parity(&graph).members.rules.area_of(&*volumes[1]) / 512;
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        model = bench.write_random(0, 1024);
        command(&graph, "fail", 0).unwrap();
        let slow = Effect::Delay(Duration::from_millis(300));
        legs[1].add(Rule { range: Some((Lba(0), BlockCount(area))), ..Rule::new(Kind::Write, When::Always, slow) });
        let data = bench.random.bytes(512 * 512);
        thread::scope(|scope| {
            let before = legs[1].requests(Kind::Write);
            let (graph, leg) = (&graph, &legs[1]);
            scope.spawn(move || {
                while leg.requests(Kind::Write) == before {
                    thread::sleep(Duration::from_micros(20));
                }
                command(graph, "rebuild", 0).unwrap();
            });
            assert_eq!(bench.write(0, &data), Ok(()));
        });
        model[..data.len()].copy_from_slice(&data);
    });
    legs[1].clear();
    assert_eq!(state(&graph, 0), "being filled");
    assert!(resync(&graph));
    assert_eq!(state(&graph, 0), "good");
    parity_fits(&graph, &volumes);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

#[test]
fn a_leg_is_replaced_in_the_running_volume() {
    for (form, replaced) in [(SMALL, 1), (TWO, 3)] {
        let mut legs = volumes(&form.faulty(2048));
        let graph = form.open(&legs, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 2048));
        graph.root.service.as_ref().unwrap().unmount().unwrap();
        legs[replaced] = volumes(&form.faulty(2048)).swap_remove(0);
        let shared = crate::SharedObjects::default();
        let build = Build {
            name: "new".to_owned(),
            volume: "test",
            legs: legs.iter().cloned().map(Tap::new).collect(),
            stated: &[],
            sizing: &[],
            size: None,
            block_size: BlockSize::B512,
            shared: &shared,
        };
        let service = form.plan().build(build).unwrap();
        let mut origins = vec![crate::LegOrigin::Kept; form.legs];
        origins[replaced] = crate::LegOrigin::New;
        let mount = crate::Mount { reason: Reason::Change, legs: origins, previous: None, reformat: false };
        service.mount(&mount).unwrap();
        assert!(!service.leg_is_whole(replaced) && service.leg_is_whole(0));
        service.unmount().unwrap();
        drop(service);
        let graph = form.open(&legs, Reason::Open);
        assert_eq!(state(&graph, replaced), "being filled");
        on_bench(&graph, |bench| bench.expect(0, &model));
        assert!(resync(&graph));
        assert_eq!(state(&graph, replaced), "good");
        parity_fits(&graph, &legs);
    }
}

#[test]
fn stacks_that_differ_in_a_leg_show_the_same_and_in_two_they_do_not() {
    let stack = |text: &str| text.parse::<crate::Node>().unwrap();
    let three = stack("parity(file:/a, file:/b, file:/c)");
    assert!(crate::graph::compatible(&three, &stack("parity(rate=1M, file:/a, file:/x, file:/c)")));
    assert!(!crate::graph::compatible(&three, &stack("parity(file:/a, file:/x, file:/y)")));
    assert!(!crate::graph::compatible(&three, &stack("parity(file:/b, file:/a, file:/c)")));
    assert!(!crate::graph::compatible(&three, &stack("parity(chunk=8K, file:/a, file:/b, file:/c)")));
    let four = stack("parity(redundancy=2, file:/a, file:/b, file:/c, file:/d)");
    assert!(crate::graph::compatible(&four, &stack("parity(redundancy=2, file:/a, file:/x, file:/y, file:/d)")));
}

#[test]
fn what_a_leg_cannot_read_is_computed_and_written_again() {
    let legs = SMALL.faulty(1024);
    let volumes = volumes(&legs);
    let graph = SMALL.open(&volumes, Reason::Create);
    on_bench(&graph, |bench| {
        let data = bench.write_random(0, 1024);
        // Not even when it is asked again, nor for a block alone.
        for number in 1..=3 {
            legs[0].add(Rule::new(Kind::Read, When::Nth(number), Effect::Fail(READ_FAULT)));
        }
        for lba in (0..1024).step_by(8) {
            bench.expect(lba, &data[lba as usize * 512..][..8 * 512]);
        }
        assert!(fact(&graph, "repaired").is_some());
        assert!((0..3).all(|leg| state(&graph, leg) == "good"));
        // A leg that cannot read even what was just written is of no use.
        let range = Some((Lba(9), BlockCount(1)));
        legs[0].add(Rule { range, ..Rule::new(Kind::Read, When::Always, Effect::Fail(READ_FAULT)) });
        bench.expect(0, &data);
        assert_eq!(state(&graph, 0), "failed");
        // Then the others' errors are the guest's.
        legs[1].add(Rule::new(Kind::Read, When::Always, Effect::Fail(READ_FAULT)));
        let segment = bench.memory.segment(0, 1024 * 512);
        assert_eq!(bench.moving(Operation::Read, 0, &[segment]), Err(READ_FAULT));
        legs[1].clear();
        bench.expect(0, &data);
    });
}

#[test]
fn a_write_counts_only_when_the_failure_is_on_record() {
    let legs = SMALL.faulty(1024);
    let volumes = volumes(&legs);
    let graph = SMALL.open(&volumes, Reason::Create);
    let area = Lba(parity(&graph).members.rules.area_of(&*volumes[0]) / 512);
    on_bench(&graph, |bench| {
        let model = bench.write_random(0, 1024);
        pull(&legs[1]);
        // Another leg takes data and refuses its tables.
        let tables = Some((area, BlockCount(64)));
        legs[0].add(Rule { range: tables, ..Rule::new(Kind::Write, When::Always, Effect::Fail(WRITE_FAULT)) });
        let data = bench.random.bytes(64 * 512);
        assert!(bench.write(0, &data).is_err(), "two legs out of three are too many");
        legs[0].clear();
        assert_eq!(bench.write(0, &data), Ok(()));
        bench.expect(0, &data);
        bench.expect(64, &model[64 * 512..]);
    });
    drop(graph);
    legs[1].clear();
    assert_eq!(state(&SMALL.open(&volumes, Reason::Open), 1), "failed");
}

#[test]
fn a_journal_that_cannot_be_read_costs_its_leg_and_no_more() {
    let legs = SMALL.faulty(1024);
    let volumes = volumes(&legs);
    let graph = SMALL.open(&volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        model = bench.write_random(0, 1024);
        // In part, so that the journal has it.
        model[5 * 512..6 * 512].copy_from_slice(&bench.write_random(5, 1));
    });
    let slots = Lba((parity(&graph).journal_of(1) + 8192) / 512);
    drop(graph);
    let range = Some((slots, BlockCount(256)));
    legs[1].add(Rule { range, ..Rule::new(Kind::Read, When::Always, Effect::Fail(READ_FAULT)) });
    let graph = SMALL.open(&volumes, Reason::Open);
    assert_eq!(state(&graph, 1), "failed");
    assert!(fact(&graph, "journal entries carried out again").is_some(), "{:?}", facts(&graph));
    on_bench(&graph, |bench| bench.expect(0, &model));
}

#[test]
fn rot_is_found_by_a_scrub_and_repaired_where_it_is_known_what_is_wrong() {
    for form in [SMALL, TWO] {
        let legs = form.faulty(1024);
        let volumes = volumes(&legs);
        let graph = form.open(&volumes, Reason::Create);
        let mut model = Vec::new();
        on_bench(&graph, |bench| model = bench.write_random(0, 1024));
        // A byte of each leg, in rows of their own, and a block that cannot be read, until it is written.
        (0..form.legs).for_each(|leg| rot(&volumes[leg], leg as u64 * 8192 + 700));
        cannot_read(&legs[0], 100, 2);
        let found = scrubbed(&graph);
        if form.plan().redundancy == 2 {
            assert_eq!((found.differing, found.repaired, &found.listed), (0, form.legs as u64 + 1, &vec![]));
            parity_fits(&graph, &volumes);
            on_bench(&graph, |bench| bench.expect(0, &model));
        } else {
            assert_eq!((found.differing, found.repaired, &found.listed), (3, 1, &vec![1, 17, 33]));
            // The operator knows which leg is wrong.
            rot(&volumes[1], 8192 + 700);
            rot(&volumes[2], 16384 + 700);
            command(&graph, "fail", 0).unwrap();
            on_bench(&graph, |bench| bench.expect(0, &model));
        }
        let again = scrubbed(&graph);
        assert_eq!((again.differing, again.repaired), (0, 0));
    }
}

#[test]
fn a_safe_volume_gives_no_rotten_data() {
    for form in [
        Form { settings: "safe=true, chunk=4K, journal=128K, ", legs: 3 },
        Form { settings: "safe=true, redundancy=2, chunk=4K, journal=128K, ", legs: 4 },
    ] {
        let legs = form.faulty(1024);
        let volumes = volumes(&legs);
        let graph = form.open(&volumes, Reason::Create);
        on_bench(&graph, |bench| {
            let data = bench.write_random(0, 1024);
            let layout = parity(&graph).layout;
            // Block 9 of the volume, where it lies.
            let (stripe, chunk, row) = layout.locate(9 * 512);
            rot(&volumes[layout.leg(stripe, chunk)], stripe * layout.chunk + row + 5);
            let segment = bench.memory.segment(0, 512);
            let read = bench.moving(Operation::Read, 9, &[segment]);
            if form.plan().redundancy == 2 {
                assert_eq!(read, Ok(()));
                bench.expect(0, &data);
                parity_fits(&graph, &volumes);
                // Two at once are too many to tell.
                rot(&volumes[layout.leg(stripe, 0)], stripe * layout.chunk + row);
                rot(&volumes[layout.leg(stripe, 1)], stripe * layout.chunk + row + 1);
                assert!(bench.moving(Operation::Read, 9, &[segment]).is_err());
            } else {
                assert_eq!(graph.tree().status.unwrap().health, Health::Degraded);
                assert_eq!(read, Err(BlockError::ReadFault { errno: 0 }));
                assert_eq!(fact(&graph, "reads refused").as_deref(), Some("1"));
            }
            // Other blocks are as good as ever, and a new write makes the rows good again.
            bench.expect(64, &data[64 * 512..]);
            let fresh = bench.write_random(0, 64);
            bench.expect(0, &fresh);
        });
    }
}

/// With checksums on its legs it is known which one is wrong: the guest gets its data, and the leg gets them again.
#[test]
fn a_safe_volume_over_checksums_makes_rotten_data_good() {
    let disk = |at| MemoryVolume::create(&format!("disk{at}"), 2 << 20, BlockSize::B512).unwrap() as Arc<dyn Volume>;
    let disks: Vec<_> = (0..3).map(disk).collect();
    let stack = "parity(safe=true, chunk=4K, journal=128K, integrity(disk:0), integrity(disk:1), integrity(disk:2))";
    let kept = Arc::default();
    let graph = graph(stack, &disks, Some(512 << 10), Reason::Create, &kept).unwrap();
    let found = |graph: &Graph| -> Vec<String> {
        let facts = graph.services("integrity").into_iter().flat_map(|(_, service)| service.status().facts);
        facts.filter(|(name, _)| name == "reads that found a mismatch").map(|(_, count)| count).collect()
    };
    on_bench(&graph, |bench| {
        let data = bench.write_random(0, 1024);
        // Each disk in turn, where the data of its leg are: a byte that the volume wrote, found by looking for it.
        for (at, disk) in disks.iter().enumerate() {
            let bytes = crate::legs::read(disk, 0, 2 << 20).unwrap();
            let block = (0..1024).find_map(|lba| {
                let block = &data[lba * 512..][..512];
                bytes.chunks(512).position(|chunk| chunk == block)
            });
            rot(disk, block.expect("some block lies there") as u64 * 512 + 5);
            let before = found(&graph);
            bench.expect(0, &data);
            let after = found(&graph);
            assert!(after[at] != before[at], "disk {at}: {before:?} and {after:?}");
            // It was written again: nothing is found the next time.
            bench.expect(0, &data);
            assert_eq!(found(&graph), after);
        }
    });
    let repaired = fact(&graph, "repaired").and_then(|count| count.parse().ok());
    assert!(repaired >= Some(3), "{repaired:?}");
    assert_eq!(fact(&graph, "reads refused"), None);
    assert_eq!(graph.tree().status.unwrap().health, Health::Good, "it has data, parity and checksums that fit");
}

#[test]
fn small_writes_read_and_write_only_what_they_must() {
    let legs = WIDE.faulty(4096);
    let graph = WIDE.open(&volumes(&legs), Reason::Create);
    let sum = |kind| legs.iter().map(|leg| leg.requests(kind)).sum::<u64>();
    on_bench(&graph, |bench| {
        // One full stripe: all legs once, and nothing is read.
        bench.write_random(0, 1);
        let (reads, writes) = (sum(Kind::Read), sum(Kind::Write));
        bench.write_random(128, 128);
        assert_eq!(sum(Kind::Read) - reads, 0);
        // 16 KiB of each of five legs, in pieces of 8 KiB.
        assert_eq!(sum(Kind::Write) - writes, 10);
        // A block: the old one and the parity are read; the journal, the block and the parity are written.
        let (reads, writes) = (sum(Kind::Read), sum(Kind::Write));
        bench.write_random(300, 1);
        assert_eq!((sum(Kind::Read) - reads, sum(Kind::Write) - writes), (2, 3));
        // Three of four chunks: the fourth is read.
        let (reads, writes) = (sum(Kind::Read), sum(Kind::Write));
        bench.write_random(512, 96);
        assert_eq!((sum(Kind::Read) - reads, sum(Kind::Write) - writes), (2, 2 * (1 + 4)));
    });
}

/// Every block is what it was, or an error.
pub(super) fn nothing_wrong_is_read(bench: &mut Bench<'_>, lba: u64, model: &[u8]) {
    let segment = bench.memory.segment(0, 512);
    for (at, block) in (lba..).zip(model.chunks(512)) {
        let mut found = vec![0; 512];
        if bench.moving(Operation::Read, at, &[segment]).is_ok() {
            segment.read_at(0, &mut found);
            assert!(found == block, "block {at}");
        }
    }
}

#[test]
fn what_is_missing_stays_what_it_was_when_a_leg_that_must_stay_refuses_a_write() {
    // Of stripe 0: the first chunk is written, the second one is missing, and this leg has P.
    for (form, missing, refusing) in [(SMALL, &[1][..], 2), (TWO, &[2, 0][..], 3)] {
        for (when, filling) in [(When::Nth(1), false), (When::Always, false), (When::Nth(1), true), (When::Always, true)] {
            let legs = form.faulty(1024);
            let volumes = volumes(&legs);
            let graph = form.open(&volumes, Reason::Create);
            let mut model = Vec::new();
            on_bench(&graph, |bench| {
                model = bench.write_random(0, 1024);
                for leg in missing {
                    command(&graph, "fail", *leg).unwrap();
                }
                if filling {
                    command(&graph, "rebuild", missing[0]).unwrap();
                }
                let range = Some((Lba(0), BlockCount(8)));
                legs[refusing].add(Rule { range, ..Rule::new(Kind::Write, when, Effect::Fail(WRITE_FAULT)) });
                let data = bench.random.bytes(512);
                let written = bench.write(0, &data);
                assert_eq!(written, if when == When::Nth(1) { Ok(()) } else { Err(WRITE_FAULT) });
                model[..512].copy_from_slice(&data);
                assert_eq!(fact(&graph, "stopped").is_none(), written.is_ok());
                nothing_wrong_is_read(bench, 8, &model[8 * 512..]);
                legs[refusing].clear();
                void_when_quiet(&graph);
                resync(&graph);
                nothing_wrong_is_read(bench, 8, &model[8 * 512..]);
                if written.is_err() {
                    assert!(bench.plain(Operation::Flush, 0, 0).is_err() && bench.write(9, &data).is_err());
                    assert!(
                        graph.volume().format(BlockSize::B512).is_err() && command(&graph, "rebuild", missing[0]).is_err()
                    );
                    graph.root.service.as_ref().unwrap().unmount().unwrap();
                }
            });
            drop(graph);
            let graph = form.open(&volumes, Reason::Open);
            on_bench(&graph, |bench| bench.expect(0, &model));
            for leg in missing {
                _ = command(&graph, "rebuild", *leg);
            }
            assert!(resync(&graph));
            assert!((0..form.legs).all(|leg| state(&graph, leg) == "good"));
            parity_fits(&graph, &volumes);
            on_bench(&graph, |bench| bench.expect(0, &model));
        }
    }
}

#[test]
fn what_a_leg_loses_when_it_refuses_a_flush_is_in_the_journal() {
    let legs = SMALL.faulty(1024);
    let volumes = volumes(&legs);
    let graph = SMALL.open(&volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        model = bench.write_random(0, 1024);
        command(&graph, "fail", 1).unwrap();
        legs[2].hold_writes();
        // One chunk of two.
        model[..8 * 512].copy_from_slice(&bench.write_random(0, 8));
        legs[2].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(WRITE_FAULT)));
        assert!(legs[2].power_loss() > 0);
        assert!(bench.plain(Operation::Flush, 0, 0).is_err());
        _ = bench.plain(Operation::Flush, 0, 0);
        void_when_quiet(&graph);
        nothing_wrong_is_read(bench, 8, &model[8 * 512..]);
    });
    drop(graph);
    let graph = SMALL.open(&volumes, Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

#[test]
fn a_block_that_cannot_be_read_costs_none_of_its_neighbours() {
    // The first chunk rots, and of the second one another block cannot be read.
    for form in [SMALL, TWO] {
        for way in ["scrub", "read", "write", "resync"] {
            let legs = form.faulty(1024);
            let volumes = volumes(&legs);
            let graph = form.open(&volumes, Reason::Create);
            let layout = parity(&graph).layout;
            on_bench(&graph, |bench| {
                let mut model = bench.write_random(0, 1024);
                rot(&volumes[layout.leg(0, 0)], 3 * 512 + 5);
                let times = match way {
                    "read" => 3,
                    "write" => 1,
                    _ => 2,
                };
                cannot_read(&legs[layout.leg(0, 1)], 0, times);
                match way {
                    "scrub" => _ = scrubbed(&graph),
                    "read" => bench.expect(8, &model[8 * 512..16 * 512]),
                    "write" => model[..512].copy_from_slice(&bench.write_random(0, 1)),
                    _ => {
                        parity(&graph).members.intent().unwrap().suspect(&(0..=0));
                        assert!(resync(&graph));
                    }
                }
                let found = scrubbed(&graph);
                if form.plan().redundancy == 2 && way != "resync" {
                    assert_eq!(found.differing, 0);
                    parity_fits(&graph, &volumes);
                    bench.expect(0, &model);
                } else {
                    bench.expect(8, &model[8 * 512..]);
                }
            });
        }
    }
}

/// The disk refuses a write of a part of it.
#[test]
fn a_sector_of_several_blocks_that_goes_bad_costs_no_leg() {
    for (form, way) in [SMALL, TWO].into_iter().flat_map(|form| ["read", "read a block", "scrub"].map(|way| (form, way))) {
        let layout = form.plan().layout(form.legs);
        // The sector is the first chunk of the second stripe.
        let (bad, lba) = (layout.leg(1, 0), layout.width() / 512);
        let mut legs = volumes(&form.faulty(1024));
        let disk = BadSector::on(Arc::clone(&legs[bad]));
        legs[bad] = Arc::<BadSector>::clone(&disk);
        let graph = form.open(&legs, Reason::Create);
        on_bench(&graph, |bench| {
            let model = bench.write_random(0, 1024);
            disk.goes_bad();
            match way {
                "read" => bench.expect(0, &model),
                "read a block" => bench.expect(lba + 2, &model[(lba as usize + 2) * 512..][..512]),
                _ => assert_eq!(scrubbed(&graph).differing, 0),
            }
            assert_eq!((disk.is_bad(), state(&graph, bad).as_str()), (false, "good"), "{way}");
            bench.expect(0, &model);
        });
        parity_fits(&graph, &legs);
    }
}

#[test]
fn what_is_computed_is_not_written_where_it_does_not_fit() {
    let legs = TWO.faulty(1024);
    let volumes = volumes(&legs);
    let graph = TWO.open(&volumes, Reason::Create);
    let layout = parity(&graph).layout;
    on_bench(&graph, |bench| {
        let model = bench.write_random(0, 1024);
        // In one row: one chunk rots, and the other one cannot be read.
        rot(&volumes[layout.leg(0, 0)], 5);
        cannot_read(&legs[layout.leg(0, 1)], 0, 2);
        let found = scrubbed(&graph);
        assert_eq!((found.differing, found.repaired), (1, 0));
        // Later it can be.
        let found = scrubbed(&graph);
        assert_eq!((found.differing, found.repaired), (0, 1));
        bench.expect(0, &model);
    });
    parity_fits(&graph, &volumes);
}

/// Nor as a part of a sector that is written for the other blocks in it.
#[test]
fn what_does_not_fit_is_not_written_with_the_sector_around_it() {
    let layout = TWO.plan().layout(TWO.legs);
    // The sector is the first chunk of the second stripe, and in one row with it the second chunk rots.
    let (bad, rotten) = (layout.leg(1, 0), layout.leg(1, 1));
    let mut legs = volumes(&TWO.faulty(1024));
    let disk = BadSector::on(Arc::clone(&legs[bad]));
    legs[bad] = Arc::<BadSector>::clone(&disk);
    let graph = TWO.open(&legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    rot(&legs[rotten], 11 * 512 + 5);
    let has = |leg: usize| crate::legs::read(&legs[leg], 4096, 4096).unwrap();
    let before = has(rotten);
    disk.goes_bad();
    for _ in 0..2 {
        let found = scrubbed(&graph);
        assert_eq!((found.differing, found.repaired, found.listed), (1, 0, vec![11]));
        assert_eq!((disk.is_bad(), state(&graph, bad).as_str()), (true, "good"));
        assert!(has(rotten) == before);
    }
    // The operator knows which leg is wrong.
    command(&graph, "fail", rotten).unwrap();
    on_bench(&graph, |bench| bench.expect(0, &model));
    assert!(!disk.is_bad());
    command(&graph, "rebuild", rotten).unwrap();
    assert!(resync(&graph));
    assert!((0..TWO.legs).all(|leg| state(&graph, leg) == "good"));
    parity_fits(&graph, &legs);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

/// Each could be written with what the other has, and neither has it.
#[test]
fn two_bad_sectors_of_one_row_cost_no_leg() {
    let layout = TWO.plan().layout(TWO.legs);
    let mut legs = volumes(&TWO.faulty(1024));
    let bad = [0, 1].map(|chunk| layout.leg(1, chunk));
    let disks = bad.map(|leg| {
        let disk = BadSector::on(Arc::clone(&legs[leg]));
        legs[leg] = Arc::<BadSector>::clone(&disk);
        disk
    });
    let graph = TWO.open(&legs, Reason::Create);
    on_bench(&graph, |bench| {
        let model = bench.write_random(0, 1024);
        for disk in &disks {
            disk.goes_bad();
        }
        let block = layout.data() * 8 + 2;
        bench.expect(block as u64, &model[block * 512..(block + 1) * 512]);
        assert!((0..TWO.legs).all(|leg| state(&graph, leg) == "good"));
        // All of both at once can be computed, and written.
        bench.expect(0, &model);
        assert!((0..TWO.legs).all(|leg| state(&graph, leg) == "good"));
        bench.expect(0, &model);
    });
    parity_fits(&graph, &legs);
}

/// What is known to be wrong, and cannot be put right there.
#[test]
fn a_repair_that_the_leg_refuses_is_none() {
    for (error, stays) in [(WRITE_FAULT, false), (BlockError::Memory, true)] {
        let legs = TWO.faulty(1024);
        let volumes = volumes(&legs);
        let graph = TWO.open(&volumes, Reason::Create);
        let leg = parity(&graph).layout.leg(0, 0);
        on_bench(&graph, |bench| {
            let model = bench.write_random(0, 1024);
            rot(&volumes[leg], 5);
            let range = Some((Lba(0), BlockCount(8)));
            legs[leg].add(Rule { range, ..Rule::new(Kind::Write, When::Nth(1), Effect::Fail(error)) });
            let found = scrubbed(&graph);
            assert_eq!((found.repaired, found.differing), (0, u64::from(stays)));
            assert_eq!(state(&graph, leg), if stays { "good" } else { "failed" });
            assert_eq!(scrubbed(&graph).repaired, u64::from(stays));
            bench.expect(0, &model);
        });
    }
}

/// It refuses the right block, of which no mark tells.
#[test]
fn a_leg_that_was_wrong_is_filled_with_everything() {
    let legs = TWO.faulty(1024);
    let volumes = volumes(&legs);
    let graph = TWO.open(&volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| model = bench.write_random(0, 1024));
    (0..2).for_each(|_| super::rebuild::look_at_marks(&graph));
    let leg = parity(&graph).layout.leg(0, 0);
    rot(&volumes[leg], 5);
    let range = Some((Lba(0), BlockCount(8)));
    legs[leg].add(Rule { range, ..Rule::new(Kind::Write, When::Always, Effect::Fail(WRITE_FAULT)) });
    assert_eq!(scrubbed(&graph).repaired, 0);
    assert_eq!(state(&graph, leg), "failed");
    legs[leg].clear();
    assert!(command(&graph, "rebuild", leg).unwrap().ends_with("with everything"));
    assert!(resync(&graph));
    assert_eq!(state(&graph, leg), "good");
    parity_fits(&graph, &volumes);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

/// Over disks that are full.
#[test]
fn an_erasure_takes_no_space_while_a_leg_is_missing() {
    let legs = SMALL.faulty(1024);
    let volumes = volumes(&legs);
    let graph = SMALL.open(&volumes, Reason::Create);
    on_bench(&graph, |bench| _ = bench.write_random(0, 1024));
    command(&graph, "fail", 0).unwrap();
    let area = parity(&graph).members.rules.area_of(&*volumes[1]) / 512;
    for leg in &legs[1..] {
        let range = Some((Lba(0), BlockCount(area)));
        leg.add(Rule { range, ..Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NoSpace)) });
    }
    on_bench(&graph, |bench| {
        bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, 0, 1024).unwrap();
        bench.expect_zeroes(0, 1024);
    });
    for leg in &legs {
        leg.clear();
    }
    command(&graph, "rebuild", 0).unwrap();
    assert!(resync(&graph));
    assert!((0..3).all(|leg| state(&graph, leg) == "good"));
    parity_fits(&graph, &volumes);
    on_bench(&graph, |bench| bench.expect_zeroes(0, 1024));
}

#[test]
fn repairs_are_durable() {
    for unread in [true, false] {
        let legs = TWO.faulty(1024);
        let volumes = volumes(&legs);
        let graph = TWO.open(&volumes, Reason::Create);
        on_bench(&graph, |bench| {
            let model = bench.write_random(0, 1024);
            for (number, leg) in legs.iter().enumerate() {
                for block in number as u64 * 16..number as u64 * 16 + 8 {
                    if unread {
                        cannot_read(leg, block, 2);
                    } else {
                        rot(&volumes[number], block * 512);
                    }
                }
            }
            bench.plain(Operation::Flush, 0, 0).unwrap();
            for leg in &legs {
                leg.hold_writes();
            }
            assert!(scrubbed(&graph).repaired > 0);
            assert!(legs.iter().all(|leg| leg.power_loss() == 0));
            parity_fits(&graph, &volumes);
            bench.expect(0, &model);
        });
    }
}

/// Rows are newer than the entry of theirs that is void in the journal; what is read, and where the third leg's journal is.
fn written_past_the_journal() -> (Vec<Arc<dyn Volume>>, Vec<u8>, u64) {
    let legs = volumes(&SMALL.faulty(1024));
    let graph = SMALL.open(&legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        model = bench.write_random(0, 1024);
        bench.write_random(0, 1);
        void_when_quiet(&graph);
        // The whole rows, past the journal.
        model[..16 * 512].copy_from_slice(&bench.write_random(0, 16));
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    let journal = parity(&graph).journal_of(2);
    (legs, model, journal)
}

#[test]
fn a_damaged_copy_of_what_is_void_brings_no_entry_back() {
    let (legs, model, offset) = written_past_the_journal();
    let region = crate::record::Region { magic: *b"MPJNVOID", version: 1, offset, len: 8192 };
    let newest = region.load(&legs[2]).unwrap().unwrap().generation;
    rot(&legs[2], offset + newest % 2 * 4096 + 32);
    let graph = SMALL.open(&legs, Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &model));
    parity_fits(&graph, &legs);
}

/// What lies beside it may be older than the data.
#[test]
fn a_leg_that_does_not_say_what_is_void_brings_no_entry_back() {
    let (legs, model, record) = written_past_the_journal();
    rot(&legs[2], record + 32);
    rot(&legs[2], record + 4096 + 32);
    let graph = SMALL.open(&legs, Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &model));
    assert_eq!(state(&graph, 2), "failed");
    command(&graph, "rebuild", 2).unwrap();
    assert!(resync(&graph));
    assert_eq!(state(&graph, 2), "good");
    parity_fits(&graph, &legs);
    on_bench(&graph, |bench| bench.expect(0, &model));
}

/// As after a change that made the volume, when it was never quiet.
#[test]
fn legs_that_were_never_told_what_is_void_stay() {
    for form in [SMALL, TWO] {
        let legs = volumes(&form.faulty(1024));
        let graph = form.open(&legs, Reason::Create);
        let (layout, mut model) = (parity(&graph).layout, Vec::new());
        on_bench(&graph, |bench| {
            model = bench.write_random(0, 1024);
            // Each leg has an entry.
            for stripe in 0..form.legs as u64 {
                let lba = stripe * layout.width() / 512;
                model[lba as usize * 512..][..512].copy_from_slice(&bench.write_random(lba, 1));
            }
        });
        let records: Vec<_> = (0..form.legs).map(|leg| parity(&graph).journal_of(leg)).collect();
        drop(graph);
        for (leg, record) in legs.iter().zip(records) {
            crate::legs::write(leg, record, vec![0; journal::VOID_RECORD as usize]).unwrap();
        }
        let graph = form.open(&legs, Reason::Open);
        assert!((0..form.legs).all(|leg| state(&graph, leg) == "good"));
        on_bench(&graph, |bench| bench.expect(0, &model));
        assert!(resync(&graph));
        parity_fits(&graph, &legs);
    }
}

#[test]
fn a_leg_that_is_being_filled_and_refuses_the_journal_is_left_out() {
    let legs = SMALL.faulty(1024);
    let volumes = volumes(&legs);
    let graph = SMALL.open(&volumes, Reason::Create);
    let area = parity(&graph).members.rules.area_of(&*volumes[2]) / 512;
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        model = bench.write_random(0, 1024);
        command(&graph, "fail", 2).unwrap();
        command(&graph, "rebuild", 2).unwrap();
        // It has the data, and another leg the parity and the journal.
        model[16 * 512..17 * 512].copy_from_slice(&bench.write_random(16, 1));
    });
    drop(graph);
    let tables = TABLES / 512;
    for range in [(Lba(0), BlockCount(area)), (Lba(area + tables), BlockCount(1 << 20))] {
        let kinds = vec![Kind::Write, Kind::WriteZeroes, Kind::Deallocate];
        let refuses = Rule::new(Kind::Write, When::Always, Effect::Fail(WRITE_FAULT));
        legs[2].add(Rule { kinds, range: Some(range), ..refuses });
    }
    let graph = SMALL.open(&volumes, Reason::Open);
    assert!(fact(&graph, "journal entries carried out again").is_some());
    assert_eq!(state(&graph, 2), "failed");
    on_bench(&graph, |bench| bench.expect(0, &model));
}

/// Its second leg is gone, and the first one takes data and no table: it has to stay. The first of every eight blocks up to 320 may be zeroes.
fn with_one_leg_gone_and_one_without_tables(legs: &[Arc<FaultVolume>], volumes: &[Arc<dyn Volume>]) -> (Graph, Vec<u8>) {
    let graph = SMALL.open(volumes, Reason::Create);
    let area = Lba(parity(&graph).members.rules.area_of(&*volumes[0]) / 512);
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        model = bench.write_random(0, 2048);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        pull(&legs[1]);
        let tables = Some((area, BlockCount(TABLES / 2 / 512)));
        legs[0].add(Rule { range: tables, ..Rule::new(Kind::Write, When::Always, Effect::Fail(WRITE_FAULT)) });
        let zeroes = Operation::WriteZeroes { fua: false, deallocate: false };
        let refused = (0..40).filter(|lba| bench.plain(zeroes, 8 * lba, 1).is_err()).count();
        assert!(refused > 5, "{refused} requests found out, and nothing could be done about it");
    });
    (graph, model)
}

/// One leg is gone, and another one takes data and no table: it has to stay. However often that is tried, the volume opens when both are well.
#[test]
fn a_leg_that_has_to_stay_and_refuses_its_table_comes_back() {
    let legs = SMALL.faulty(2048);
    let volumes = volumes(&legs);
    let (graph, model) = with_one_leg_gone_and_one_without_tables(&legs, &volumes);
    drop(graph);
    for leg in &legs {
        leg.clear();
    }
    let graph = SMALL.open(&volumes, Reason::Open);
    on_bench(&graph, |bench| {
        for lba in (0..2048).filter(|lba| lba % 8 != 0 || *lba >= 320) {
            bench.expect(lba, &model[lba as usize * 512..][..512]);
        }
    });
}

/// The same, and the leg that is gone comes back while the other one still refuses its table: it is filled, and then that one goes.
#[test]
fn a_leg_is_filled_while_one_that_has_to_stay_refuses_its_table() {
    let legs = SMALL.faulty(2048);
    let volumes = volumes(&legs);
    let (graph, mut model) = with_one_leg_gone_and_one_without_tables(&legs, &volumes);
    legs[1].clear();
    graph.root.service.as_ref().unwrap().command("rebuild", &arguments(&[("leg", "1")])).unwrap();
    on_bench(&graph, |bench| {
        model[..4 * 512].copy_from_slice(&bench.write_random(0, 4));
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    assert!(resync(&graph));
    let states = |graph: &Graph| ["leg 0", "leg 1"].map(|leg| fact(graph, leg));
    let expected = ["failed", "good"].map(|state| Some(state.to_owned()));
    assert_eq!(states(&graph), expected);
    let check = |graph: &Graph| {
        on_bench(graph, |bench| {
            for lba in (0..2048).filter(|lba| lba % 8 != 0 || *lba >= 320 || *lba < 4) {
                bench.expect(lba, &model[lba as usize * 512..][..512]);
            }
        });
    };
    check(&graph);
    drop(graph);
    legs[0].clear();
    let graph = SMALL.open(&volumes, Reason::Open);
    assert_eq!(states(&graph), expected);
    check(&graph);
}
