//! Legs that fail, power that goes at the wrong moment, sizes that change: no good block is called bad, and a mirror above makes
//! good what is bad.

use std::sync::Arc;

use millrace_backends::fault::{Effect, FaultVolume, Kind as Requests, Rule, When};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Lba, Operation, Volume,
    conformance::{Bench, SyncHarness},
};

use super::{
    super::page::{PAGE, REGION, block_start, group_start},
    SEED, close, disk, open,
    promise::{ROTTEN, read, rot},
};
use crate::{
    Health, LegOrigin, Mount, Node, Reason, SharedObjects,
    background::Spawner,
    graph::{Graph, GraphError, Plan},
    legs,
    record::Region,
    testing::{Disks, Kept, grow_over_what_was_there},
};

const FAULT: BlockError = BlockError::ReadFault { errno: 5 };
const SIZE: BlockSize = BlockSize::B512;

fn on_bench(graph: &Graph, test: impl FnOnce(&mut Bench<'_>)) {
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED));
}

fn over(faulty: &Arc<FaultVolume>, reason: Reason) -> Graph {
    let volume: Arc<dyn Volume> = Arc::<FaultVolume>::clone(faulty);
    open(&volume, reason).unwrap()
}

/// The process dies.
fn kill(mut graph: Graph) {
    graph.tasks.clear();
}

#[test]
fn a_group_that_could_not_be_closed_is_opened_again_before_it_is_written() {
    for kind in [Requests::Write, Requests::Flush] {
        for nth in 1..5 {
            for seed in 0..20 {
                let faulty = FaultVolume::new(disk(1100, SIZE), seed);
                faulty.hold_writes();
                let graph = over(&faulty, Reason::Create);
                let service = Arc::clone(&graph.services("integrity")[0].1);
                on_bench(&graph, |bench| {
                    bench.write_random(0, 1100);
                    let effect = if seed % 2 == 0 { Effect::Tear } else { Effect::Fail(FAULT) };
                    faulty.add(Rule::new(kind, When::Nth(nth), effect));
                    // It closes all groups.
                    assert_eq!(service.unmount().is_err(), faulty.faults() > 0);
                    faulty.clear();
                    let data = bench.write_random(0, 1100);
                    bench.expect(0, &data);
                });
                drop(service);
                kill(graph);
                faulty.power_loss();
                let graph = over(&faulty, Reason::Open);
                on_bench(&graph, |bench| {
                    bench.read(0, 1100);
                });
                close(graph);
            }
        }
    }
}

/// The flush was for another group's page: what was acknowledged may be lost with it, and its next flush succeeds.
#[test]
fn the_guest_is_told_what_a_leg_forgot_in_a_flush_for_a_page() {
    let faulty = FaultVolume::new(disk(1100, SIZE), SEED);
    faulty.hold_writes();
    let graph = over(&faulty, Reason::Create);
    on_bench(&graph, |bench| {
        let flush = |bench: &mut Bench<'_>| bench.plain(Operation::Flush, 0, 0);
        bench.write_random(0, 100);
        faulty.add(Rule::new(Requests::Flush, When::Nth(1), Effect::Forget(FAULT)));
        assert_eq!(bench.write(600, &[9; 512]), Err(FAULT));
        assert_eq!(flush(bench), Err(BlockError::WriteFault { errno: 0 }));
        assert_eq!(flush(bench), Ok(()), "once");
        faulty.clear();
        // Of its own it is told by that, and a page that it may have taken along is written again.
        faulty.add(Rule::new(Requests::Flush, When::Nth(1), Effect::Forget(FAULT)));
        assert_eq!(flush(bench), Err(FAULT));
        assert_eq!(flush(bench), Ok(()));
        bench.write_random(600, 100);
        assert_eq!(flush(bench), Ok(()));
    });
    close(graph);
}

/// The flush was for what the volume grew by. The group is whole, so that no other flush comes before.
#[test]
fn the_guest_is_told_what_a_leg_forgot_when_the_volume_grew() {
    let faulty = FaultVolume::new(disk(1008, SIZE), SEED);
    faulty.hold_writes();
    let graph = over(&faulty, Reason::Create);
    on_bench(&graph, |bench| {
        bench.write_random(0, 100);
        faulty.add(Rule::new(Requests::Flush, When::Nth(1), Effect::Forget(FAULT)));
        assert!(graph.volume().resize(BlockCount(1512)).is_err());
        let flushes = [0; 2].map(|_| bench.plain(Operation::Flush, 0, 0));
        assert_eq!(flushes, [Err(BlockError::WriteFault { errno: 0 }), Ok(())]);
        graph.volume().resize(BlockCount(1512)).unwrap();
        assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
    });
    close(graph);
}

/// The flush was for the header's word that blocks are being erased. Nothing was yet, so the volume goes on.
#[test]
fn the_guest_is_told_what_a_leg_forgot_in_a_format() {
    let faulty = FaultVolume::new(disk(1008, SIZE), SEED);
    faulty.hold_writes();
    let graph = over(&faulty, Reason::Create);
    on_bench(&graph, |bench| {
        bench.write_random(0, 100);
        faulty.add(Rule::new(Requests::Flush, When::Nth(1), Effect::Forget(FAULT)));
        assert!(graph.volume().format(SIZE).is_err());
        let flushes = [0; 2].map(|_| bench.plain(Operation::Flush, 0, 0));
        assert_eq!(flushes, [Err(BlockError::WriteFault { errno: 0 }), Ok(())]);
    });
    close(graph);
}

#[test]
fn a_group_that_could_not_be_opened_loses_nothing() {
    for nth in 1..4 {
        for seed in 0..20 {
            let faulty = FaultVolume::new(disk(1100, SIZE), seed);
            let graph = over(&faulty, Reason::Create);
            let mut data = Vec::new();
            on_bench(&graph, |bench| data = bench.write_random(0, 1100));
            close(graph);
            faulty.hold_writes();
            let graph = over(&faulty, Reason::Open);
            on_bench(&graph, |bench| {
                for kind in [Requests::Write, Requests::Flush] {
                    faulty.add(Rule::new(kind, When::Nth(nth), Effect::Tear));
                }
                let new = bench.random.bytes(512);
                for lba in [3, 510, 1050] {
                    let _ = bench.write(lba, &new);
                }
                faulty.clear();
            });
            kill(graph);
            faulty.power_loss();
            let graph = over(&faulty, Reason::Open);
            on_bench(&graph, |bench| {
                for lba in (0..1100).filter(|lba| ![3, 510, 1050].contains(lba)) {
                    bench.expect(lba, &data[lba as usize * 512..][..512]);
                }
                for lba in [3, 510, 1050] {
                    let _ = bench.read(lba, 1);
                }
            });
            close(graph);
        }
    }
}

#[test]
fn bad_sectors_among_checksums_and_data_cost_no_more_than_themselves() {
    let faulty = FaultVolume::new(disk(1100, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 1100));
    kill(graph);
    let bad_sector = |at: u64| Rule {
        range: Some((Lba(at / 512), BlockCount(1))),
        ..Rule::new(Requests::Read, When::Always, Effect::Fail(FAULT))
    };
    // One of a group's pages, and a block of a group that was open.
    faulty.add(bad_sector(group_start(1, SIZE)));
    faulty.add(bad_sector(block_start(9, SIZE)));
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| {
        bench.expect(0, &data[..9 * 512]);
        assert_eq!(read(bench, 9), Err(FAULT));
        bench.expect(10, &data[10 * 512..]);
    });
    kill(graph);
    // Both pages: that is the leg's failure and not the checksums' loss.
    faulty.add(bad_sector(group_start(1, SIZE) + PAGE as u64));
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| {
        assert_eq!(read(bench, 600), Err(FAULT));
        faulty.clear();
        bench.expect(0, &data);
    });
    close(graph);
}

/// The leg works again while the volume is in use.
#[test]
fn a_block_that_could_not_be_read_after_a_crash_is_there_when_it_can_be() {
    let faulty = FaultVolume::new(disk(1100, SIZE), SEED);
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let graph = over(&faulty, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 1100));
    kill(graph);
    let range = Some((Lba(block_start(9, SIZE) / 512), BlockCount(1)));
    faulty.add(Rule { range, ..Rule::new(Requests::Read, When::Always, Effect::Fail(FAULT)) });
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| {
        assert_eq!(read(bench, 9), Err(FAULT));
        faulty.clear();
        bench.expect(0, &data);
    });
    let facts = graph.services("integrity")[0].1.status().facts;
    assert!(facts.iter().any(|(name, said)| name.contains("could not be read after a crash") && said == "1"), "{facts:?}");
    close(graph);
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| {
        bench.expect(0, &data);
        // What is written is checked again.
        bench.write_random(9, 1);
        rot(&leg, 9, 3);
        assert_eq!(read(bench, 9), ROTTEN);
    });
    close(graph);
}

/// Nothing was written there, and the medium fails: an erasure may have it mapped anew.
#[test]
fn an_erasure_of_zeroes_that_cannot_be_read_goes_to_the_leg() {
    let faulty = FaultVolume::new(disk(1100, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    on_bench(&graph, |bench| {
        let erase = Operation::WriteZeroes { fua: false, deallocate: true };
        let erasures = || faulty.requests(Requests::WriteZeroes);
        let before = erasures();
        bench.plain(erase, 9, 1).unwrap();
        assert_eq!(erasures(), before, "it is zeroes already");
        faulty.add(Rule::new(Requests::Read, When::Nth(2), Effect::Fail(FAULT)));
        assert_eq!([read(bench, 9), read(bench, 9)], [Ok(()), Err(FAULT)]);
        faulty.clear();
        bench.plain(erase, 9, 1).unwrap();
        assert!(erasures() > before);
        bench.expect_zeroes(9, 1);
    });
    close(graph);
}

#[test]
fn a_header_is_read_from_the_copy_that_can_be_read() {
    let faulty = FaultVolume::new(disk(64, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 64));
    close(graph);
    let spoil = |copy: u64| {
        let range = Some((Lba(copy * 8192 / 512), BlockCount(1)));
        faulty.add(Rule { range, ..Rule::new(Requests::Read, When::Always, Effect::Fail(FAULT)) });
    };
    for copy in [0, 1] {
        spoil(copy);
        let graph = over(&faulty, Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &data));
        let facts = graph.services("integrity")[0].1.status().facts;
        let says = format!("copy {copy} of its record is damaged: it cannot be read");
        assert!(facts.iter().any(|(name, said)| name == "header repaired" && said.contains(&says)), "{facts:?}");
        close(graph);
        faulty.clear();
    }
    spoil(0);
    spoil(1);
    let volume: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    assert!(open(&volume, Reason::Open).is_err(), "it is not taken for a leg without a header");
}

#[test]
fn what_was_cut_off_is_zeroes_when_the_volume_grows_again() {
    let disk = disk(1100, SIZE);
    let graph = open(&disk, Reason::Create).unwrap();
    on_bench(&graph, |bench| {
        let mut data = bench.write_random(0, 1100);
        assert!(graph.volume().resize(BlockCount(1 << 50)).is_err(), "no memory is so large");
        bench.expect(0, &data);
        graph.volume().resize(BlockCount(520)).unwrap();
        graph.volume().resize(BlockCount(1100)).unwrap();
        data[520 * 512..].fill(0);
        bench.expect(0, &data);
        graph.volume().resize(BlockCount(100)).unwrap();
    });
    close(graph);
    let graph = open(&disk, Reason::Open).unwrap();
    graph.volume().resize(BlockCount(700)).unwrap();
    close(graph);
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| bench.expect(100, &vec![0; 600 * 512]));
    close(graph);
}

#[test]
fn an_erasure_that_was_cut_short_is_completed() {
    let disk = disk(1100, SIZE);
    let graph = open(&disk, Reason::Create).unwrap();
    on_bench(&graph, |bench| _ = bench.write_random(0, 1100));
    close(graph);
    // The header says so, and some of it is gone: pages without their blocks, and blocks without their pages.
    let found = REGION.load(&disk).unwrap().unwrap();
    let mut content = found.content;
    content[32] = 1;
    REGION.store(&disk, found.generation + 1, &content).unwrap();
    legs::write(&disk, group_start(0, SIZE), vec![0; 2 * PAGE]).unwrap();
    legs::write(&disk, block_start(600, SIZE), vec![0; 9 * 512]).unwrap();
    for _ in 0..2 {
        let graph = open(&disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| bench.expect(0, &vec![0; 1100 * 512]));
        close(graph);
    }
}

/// With a service below that is taken out of force again.
#[test]
fn who_has_no_time_for_an_erasure_that_was_cut_short_leaves_it_as_it_is() {
    for (stack, phase) in [("integrity(close-after=1ms, meter(disk:0))", 32), ("metadata(meter(disk:0))", 28)] {
        let disks = [disk(1100, SIZE)];
        close(crate::testing::graph(stack, &disks, None, Reason::Create, &Arc::default()).unwrap());
        let region = if phase == 32 { REGION } else { Region { magic: *b"MILLMETA", ..REGION } };
        let node: Node = stack.parse().unwrap();
        let plan = Plan { volume: "test", stack: &node, size: None, block_size: SIZE };
        let built = || {
            let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
            Graph::build(&plan, &Disks(disks.to_vec()), &SharedObjects::default(), &spawner, None).unwrap()
        };
        let mut graph = built();
        graph.mount_at_once().unwrap();
        close(graph);
        let found = region.load(&disks[0]).unwrap().unwrap();
        let mut content = found.content;
        content[phase] = 1;
        region.store(&disks[0], found.generation + 1, &content).unwrap();
        let before = region.load(&disks[0]).unwrap().unwrap().generation;
        let refused = built().mount_at_once().unwrap_err();
        assert!(matches!(refused, GraphError::Unfinished { .. }), "{refused}");
        assert_eq!(region.load(&disks[0]).unwrap().unwrap().generation, before, "nothing was done");
        let mut graph = built();
        graph.mount(Reason::Open).unwrap();
        close(graph);
        let mut graph = built();
        graph.mount_at_once().expect("it is complete");
        close(graph);
    }
}

#[test]
fn a_used_leg_is_erased_before_its_first_use() {
    let disk = disk(6000, SIZE);
    // Beyond what is looked at.
    legs::write(&disk, 3 << 19, vec![0xaa; 64 << 10]).unwrap();
    let graph = open(&disk, Reason::Create).unwrap();
    on_bench(&graph, |bench| bench.expect(2000, &vec![0; 2000 * 512]));
    close(graph);
}

fn mirrored(disks: &[Arc<dyn Volume>], reason: Reason) -> Graph {
    let stack = "mirror(read=0, integrity(disk:0), integrity(disk:1))";
    crate::testing::graph(stack, disks, None, reason, &Arc::default()).unwrap()
}

#[test]
fn a_mirror_above_delivers_what_the_other_leg_has_and_makes_the_rotten_one_good() {
    let disks = [disk(2000, SIZE), disk(2000, SIZE)];
    let graph = mirrored(&disks, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| {
        data = bench.write_random(0, 1500);
        rot(&disks[0], 7, 100);
        bench.expect(7, &data[7 * 512..8 * 512]);
        // Neither leg has all of a piece, and in some pieces that is so in turn.
        for lba in [10, 20, 503, 1400] {
            rot(&disks[0], lba, 0);
            rot(&disks[1], lba + 1, 511);
        }
        bench.expect(0, &data);
        rot(&disks[0], 30, 1);
        rot(&disks[1], 31, 1);
        let (len, blocks) = (data.len(), data[20 * 512..].to_vec());
        bench.expect(20, &blocks[..len - 20 * 512]);
        // Both have lost it: then the guest is told.
        rot(&disks[0], 40, 1);
        rot(&disks[1], 40, 1);
        assert_eq!(read(bench, 40), ROTTEN);
        assert_eq!(bench.moving(Operation::Compare, 40, &[bench.memory.segment(0, 512)]), ROTTEN);
        let new = bench.write_random(40, 1);
        data[40 * 512..41 * 512].copy_from_slice(&new);
        bench.expect(0, &data);
    });
    let status = graph.tree().status.unwrap();
    assert_eq!(status.health, Health::Good, "no leg was dropped: {status:?}");
    close(graph);
    // Each leg has all of it now.
    for disk in &disks {
        let graph = open(disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| bench.expect(0, &data));
        close(graph);
    }
}

#[test]
fn a_mirror_above_scrubs_what_nobody_reads() {
    let disks = [disk(2000, SIZE), disk(2000, SIZE)];
    let graph = mirrored(&disks, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| {
        data = bench.write_random(0, 1500);
        for (disk, lba) in [(0, 5), (1, 6), (1, 777)] {
            rot(&disks[disk], lba, 8);
        }
    });
    let kept = Arc::<crate::testing::Kept>::default();
    close(graph);
    let stack = "mirror(read=0, integrity(disk:0), integrity(disk:1))";
    let mut graph = crate::testing::graph(stack, &disks, None, Reason::Open, &kept).unwrap();
    let service = Arc::clone(&graph.services("mirror")[0].1);
    let tasks = crate::testing::Bench::new(SEED);
    let mut session = crate::testing::Session::new(&tasks, &kept, SEED);
    service.command("scrub", &crate::settings::Settings::default()).unwrap();
    let is_done = || !service.status().progress.iter().any(|progress| progress.what == "scrub");
    for _ in 0..10_000 {
        session.settle(10);
        if is_done() {
            break;
        }
    }
    let facts = service.status().facts;
    assert!(facts.iter().any(|(name, said)| name == "scrub" && said == "3 blocks repaired, 0 differ"), "{facts:?}");
    graph.tasks.iter().for_each(|(_, tasks)| tasks.tell());
    session.settle(usize::MAX);
    drop(session);
    graph.unmount();
    for disk in &disks {
        let graph = open(disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| bench.expect(0, &data));
        close(graph);
    }
}

#[test]
fn what_lay_on_a_device_beyond_the_end_is_not_seen_when_the_volume_grows() {
    let blocks = super::leg_blocks(500, SIZE);
    let graph = grow_over_what_was_there(&disk(3000, SIZE), blocks, SEED, |leg| open(leg, Reason::Create).unwrap());
    close(graph);
}

#[test]
fn after_a_format_that_failed_nothing_is_acknowledged_that_the_next_opening_erases() {
    let faulty = FaultVolume::new(disk(1100, SIZE), SEED);
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let graph = over(&faulty, Reason::Create);
    let service = Arc::clone(&graph.services("integrity")[0].1);
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.write_random(0, 1100);
    faulty.add(Rule::new(Requests::WriteZeroes, When::Nth(1), Effect::Fail(FAULT)));
    assert!(graph.volume().format(SIZE).is_err());
    let closed = Err(BlockError::NotReady);
    assert_eq!(bench.write(3, &[7; 512]), closed, "it would be erased");
    let segment = [bench.memory.segment(0, 512)];
    assert_eq!(bench.moving(Operation::Read, 3, &segment), closed);
    assert_eq!(bench.plain(Operation::Flush, 0, 0), closed);
    assert_eq!(service.status().health, crate::Health::Failed);
    faulty.clear();
    graph.volume().format(SIZE).unwrap();
    bench.write(3, &[8; 512]).unwrap();
    bench.expect_zeroes(0, 3);
    assert_eq!(service.status().health, crate::Health::Good);
    drop(service);
    close(graph);
    let graph = open(&leg, Reason::Open).unwrap();
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.expect(3, &[8; 512]);
    bench.expect_zeroes(4, 1096);
}

#[test]
fn a_leg_with_an_old_header_is_erased_when_it_may_be() {
    let leg = disk(1100, SIZE);
    let graph = open(&leg, Reason::Create).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let old = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(0, 1100);
    close(graph);
    // It comes anew into a stack, as it was, and as one whose data may go.
    let graph = open(&leg, Reason::Open).unwrap();
    let service = Arc::clone(&graph.services("integrity")[0].1);
    for reformat in [false, true] {
        service.unmount().unwrap();
        let mount = Mount { reason: Reason::Change, legs: vec![LegOrigin::New], previous: None, reformat };
        service.mount(&mount).unwrap();
        let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        if reformat { bench.expect_zeroes(0, 1100) } else { bench.expect(0, &old) }
    }
    let data = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).write_random(100, 900);
    drop(service);
    close(graph);
    let graph = open(&leg, Reason::Open).unwrap();
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.expect_zeroes(0, 100);
    bench.expect(100, &data);
}

/// A leg that finds out in the middle that it cannot deallocate ignores it from then on: the blocks are zeroes all the same.
#[test]
fn what_is_deallocated_is_zeroes_also_where_the_leg_ignores_it() {
    let faulty = FaultVolume::new(disk(1100, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    on_bench(&graph, |bench| {
        bench.write_random(0, 1100);
        faulty.add(Rule::new(Requests::Deallocate, When::Always, Effect::Lose));
        bench.plain(Operation::Deallocate, 0, 1100).unwrap();
        bench.expect_zeroes(0, 1100);
    });
}
