//! Legs that fail, sizes that change, keys that are exchanged: no good block is called changed, and nothing is lost.

use std::{any::Any, collections::BTreeMap, sync::Arc};

use millrace_backends::fault::{Effect, FaultVolume, Kind as Requests, Rule, When};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Lba, Operation, Volume,
    conformance::{self, SyncHarness},
};

use super::{
    super::{
        header::Header,
        layout::{LEVELS, LOG_PAGES, OFFSET, REGION, block_start, log_start, page_start},
        volume::Authenticated,
    },
    ILL, SEED, close, disk, fall_ill, kill, leg_blocks, nothing_is_called_changed, on_bench, open, open_stack, put_raw, raw,
    read, stack, write_ill,
};
use crate::{
    LegOrigin, Mount, Reason, Service,
    crypt::tests::take_over,
    graph::Graph,
    legs,
    testing::{Bench, Device, Kept, Session, grow_over_what_was_there},
};

const FAULT: BlockError = BlockError::ReadFault { errno: 5 };
const SIZE: BlockSize = BlockSize::B512;

/// All of these fail.
fn failing(kind: Requests) -> Rule {
    Rule::new(kind, When::Always, Effect::Fail(FAULT))
}

fn over(faulty: &Arc<FaultVolume>, reason: Reason) -> Graph {
    let volume: Arc<dyn Volume> = Arc::<FaultVolume>::clone(faulty);
    open(&volume, reason).unwrap()
}

/// What blocks may hold: of each, what it held when it was last durable, and what was written since.
struct Known(BTreeMap<u64, Vec<(Vec<u8>, bool)>>);

impl Known {
    fn wrote(&mut self, lba: u64, data: &[u8], good: bool) {
        self.0.entry(lba).or_insert_with(|| vec![(vec![0; data.len()], true)]).push((data.to_vec(), good));
    }

    fn flushed(&mut self) {
        for may in self.0.values_mut() {
            let last = may.iter().rposition(|(_, good)| *good).unwrap_or(0);
            may.drain(..last);
        }
    }

    fn check(&self, bench: &mut conformance::Bench<'_>) {
        for (lba, may) in &self.0 {
            let found = bench.read(*lba, 1);
            assert!(may.iter().any(|(data, _)| *data == found), "block {lba} holds none of {} versions", may.len());
        }
    }
}

/// Writes while the leg fails now and then, and the tree is saved all the time; then the power goes.
fn rounds(seed: u64, effect: Effect) {
    let faulty = FaultVolume::new(disk(400, SIZE), seed);
    let volume: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let mut known = Known(BTreeMap::new());
    let stack = stack("save-after=1ms, ");
    let tasks = Bench::new(seed);
    let mut reason = Reason::Create;
    for round in 0..4 {
        let kept = Arc::<Kept>::default();
        let mut graph = crate::testing::graph(&stack, std::slice::from_ref(&volume), None, reason, &kept)
            .unwrap_or_else(|error| panic!("seed {seed:#x}, round {round}: {error}"));
        reason = Reason::Open;
        let mut session = Session::new(&tasks, &kept, seed ^ round);
        let mut bench = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), seed ^ round << 8);
        known.check(&mut bench);
        faulty.hold_writes();
        for kind in [Requests::Write, Requests::Flush, Requests::WriteZeroes] {
            faulty.add(Rule::new(kind, When::OneIn(25), effect));
        }
        for _ in 0..150 {
            let lba = bench.random.below(400);
            match bench.random.below(8) {
                0 if bench.plain(Operation::Flush, 0, 0).is_ok() => known.flushed(),
                0 => {}
                1 => {
                    let zeroes = Operation::WriteZeroes { fua: false, deallocate: true };
                    let good = bench.plain(zeroes, lba, 1).is_ok();
                    known.wrote(lba, &[0; 512], good);
                }
                2 => {
                    let found = bench.read(lba, 1);
                    let may = known.0.get(&lba);
                    assert!(may.is_none_or(|may| may.iter().any(|(data, _)| *data == found)), "seed {seed:#x}: block {lba}");
                }
                _ => {
                    let data = bench.random.bytes(512);
                    let good = bench.write(lba, &data).is_ok();
                    known.wrote(lba, &data, good);
                }
            }
        }
        faulty.clear();
        known.check(&mut bench);
        drop(bench);
        drop(session);
        graph.tasks.clear();
        drop(graph);
        if round % 2 == 0 {
            faulty.power_loss();
        }
    }
}

#[test]
fn a_leg_that_fails_now_and_then_loses_nothing() {
    for number in 0..60 {
        let seed = SEED + number;
        eprintln!("a leg that fails now and then: seed {seed:#x}");
        let effect = if number % 2 == 0 { Effect::Tear } else { Effect::Fail(BlockError::WriteFault { errno: 5 }) };
        rounds(seed, effect);
    }
}

/// Nobody but the writers saves: the log fills up again and again, while the others go on.
#[test]
fn several_shards_fill_the_log_and_none_waits_for_ever() {
    const BLOCKS: u64 = 300;
    let disk = disk(4 * BLOCKS, SIZE);
    let graph = open_stack(&stack("save-after=10m, "), &disk, Reason::Create).unwrap();
    let written: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let volume = Arc::clone(graph.volume());
                scope.spawn(move || {
                    let mut harness = SyncHarness::new(SEED ^ number, false);
                    let mut bench = conformance::Bench::new(&mut harness, volume, SEED ^ number);
                    let mut data = vec![0; BLOCKS as usize * 512];
                    for _ in 0..1000 {
                        let lba = bench.random.below(BLOCKS);
                        let new = bench.write_random(number * BLOCKS + lba, 1);
                        data[lba as usize * 512..][..512].copy_from_slice(&new);
                        let lba = bench.random.below(BLOCKS);
                        bench.expect(number * BLOCKS + lba, &data[lba as usize * 512..][..512]);
                    }
                    data
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Each page of the log had a change of each at most.
    let header = Header::load(&disk).unwrap().unwrap().0;
    assert!(header.epoch >= 1000 / LOG_PAGES, "saved {} times", header.epoch);
    kill(graph);
    for _ in 0..2 {
        let graph = open(&disk, Reason::Open).unwrap();
        on_bench(&graph, |bench| bench.expect(0, &written.concat()));
        close(graph);
    }
}

#[test]
fn a_save_that_fails_anywhere_loses_nothing() {
    for kind in [Requests::Write, Requests::Flush] {
        for nth in 1..9 {
            for seed in 0..8 {
                let faulty = FaultVolume::new(disk(400, SIZE), seed);
                faulty.hold_writes();
                let graph = over(&faulty, Reason::Create);
                let service = Arc::clone(&graph.services("crypt")[0].1);
                let mut data = Vec::new();
                on_bench(&graph, |bench| {
                    data = bench.write_random(0, 400);
                    bench.plain(Operation::Flush, 0, 0).unwrap();
                });
                let effect = if seed % 2 == 0 { Effect::Tear } else { Effect::Fail(FAULT) };
                faulty.add(Rule::new(kind, When::Nth(nth), effect));
                assert_eq!(service.unmount().is_err(), faulty.faults() > 0);
                faulty.clear();
                drop(service);
                kill(graph);
                if seed % 4 < 2 {
                    faulty.power_loss();
                }
                let graph = over(&faulty, Reason::Open);
                on_bench(&graph, |bench| bench.expect(0, &data));
                super::nothing_is_called_changed(&graph);
                close(graph);
            }
        }
    }
}

pub(super) fn save(graph: &Graph) -> Result<(), BlockError> {
    let service: Arc<dyn Any + Send + Sync> = Arc::<dyn Service>::clone(&graph.services("crypt")[0].1);
    let volume = service.downcast::<Authenticated>().unwrap();
    let epoch = volume.log.epoch().0;
    legs::block_on(move |cx| Box::pin(async move { volume.save(cx, epoch).await })).unwrap()
}

/// Its next flush succeeds: pages that it has forgotten are written again, and the guest is told.
#[test]
fn what_a_leg_forgets_in_a_save_is_saved_again() {
    let flush = |bench: &mut conformance::Bench<'_>| bench.plain(Operation::Flush, 0, 0);
    for seed in 0..8 {
        for nth in 1..6 {
            let faulty = FaultVolume::new(disk(4000, SIZE), seed);
            faulty.hold_writes();
            let graph = over(&faulty, Reason::Create);
            let mut data = Vec::new();
            on_bench(&graph, |bench| {
                data = bench.write_random(0, 4000);
                flush(bench).unwrap();
            });
            faulty.add(Rule::new(Requests::Flush, When::Nth(nth), Effect::Forget(FAULT)));
            assert_eq!(save(&graph).is_err(), faulty.faults() > 0, "seed {seed}, flush {nth}");
            assert_eq!(faulty.faults() > 0, nth < 5, "a save has four");
            on_bench(&graph, |bench| {
                if nth < 5 {
                    assert_eq!(flush(bench), Err(BlockError::WriteFault { errno: 0 }));
                    faulty.clear();
                } else {
                    // The guest's own, between two saves.
                    assert_eq!(flush(bench), Err(FAULT));
                }
                assert_eq!(flush(bench), Ok(()));
            });
            save(&graph).unwrap();
            kill(graph);
            faulty.power_loss();
            let graph = over(&faulty, Reason::Open);
            on_bench(&graph, |bench| bench.expect(0, &data));
            super::nothing_is_called_changed(&graph);
            close(graph);
        }
    }
}

/// Before it grows it is saved; the flush behind these is for what it grows by. A re-keying begins with a header.
#[test]
fn what_a_leg_forgets_when_the_volume_grows_or_a_re_keying_begins_is_told_to_the_guest() {
    let begin = |graph: &Graph| {
        let service = &graph.services("crypt")[0].1;
        service.command("rekey", &crate::Settings::default()).map(drop).map_err(|error| error.to_string())
    };
    told_what_was_forgotten(|graph| graph.volume().resize(BlockCount(800)).map(drop).map_err(|error| error.to_string()));
    told_what_was_forgotten(begin);
}

#[test]
fn what_a_leg_forgets_in_a_format_is_told_to_the_guest() {
    told_what_was_forgotten(|graph| graph.volume().format(SIZE).map_err(|error| error.to_string()));
}

/// Whatever flush a leg refuses within this.
fn told_what_was_forgotten(act: impl Fn(&Graph) -> Result<(), String>) {
    for nth in 1.. {
        let faulty = FaultVolume::new(disk(400, SIZE), SEED);
        faulty.hold_writes();
        let graph = over(&faulty, Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, 100));
        faulty.add(Rule::new(Requests::Flush, When::Nth(nth), Effect::Forget(FAULT)));
        let (done, struck) = (act(&graph), faulty.faults() > 0);
        assert_eq!(done.is_err(), struck, "flush {nth}");
        faulty.clear();
        on_bench(&graph, |bench| {
            let told = if struck { Err(BlockError::WriteFault { errno: 0 }) } else { Ok(()) };
            assert_eq!([0; 2].map(|_| bench.plain(Operation::Flush, 0, 0)), [told, Ok(())], "flush {nth}");
        });
        kill(graph);
        if !struck {
            break;
        }
    }
}

/// What is found may be what a process that died had written.
#[test]
fn no_copy_of_the_header_is_replaced_before_the_other_one_is_durable() {
    let faulty = FaultVolume::new(disk(64, SIZE), SEED);
    close(over(&faulty, Reason::Create));
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let found = || REGION.load(&leg).unwrap().unwrap();
    let older = (found().generation + 1) % 2 * (REGION.len / 2);
    legs::write(&leg, older, vec![0; 512]).unwrap();
    faulty.add(Rule::new(Requests::Flush, When::Always, Effect::Fail(FAULT)));
    kill(over(&faulty, Reason::Open));
    assert!(found().wrong_copy().is_some(), "a copy was overwritten while the other one may not be durable");
    faulty.clear();
    kill(over(&faulty, Reason::Open));
    assert!(found().wrong_copy().is_none());
}

/// So many sectors from this byte of the leg on cannot be read.
fn unreadable(start: u64, sectors: u64) -> Rule {
    let range = Some((Lba(start / 512), BlockCount(sectors)));
    Rule { range, ..Rule::new(Requests::Read, When::Always, Effect::Fail(FAULT)) }
}

/// Nobody writes there before the volume is open, so that no disk remaps it.
#[test]
fn bad_sectors_where_the_log_has_nothing_keep_no_volume_from_being_opened() {
    for (closes, bad, opens) in [(true, 5, true), (false, 5, true), (false, 1, false), (false, 3, false)] {
        let faulty = FaultVolume::new(disk(400, SIZE), SEED);
        let graph = over(&faulty, Reason::Create);
        let mut data = Vec::new();
        // A page each.
        on_bench(&graph, |bench| (0..3).for_each(|lba| data.extend(bench.write_random(lba, 1))));
        if closes {
            close(graph);
        } else {
            kill(graph);
        }
        (0..2).for_each(|epoch| faulty.add(unreadable(log_start(epoch, bad), 8)));
        let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
        if opens {
            let graph = open(&leg, Reason::Open).unwrap();
            on_bench(&graph, |bench| bench.expect(0, &data));
            super::nothing_is_called_changed(&graph);
            kill(graph);
        } else {
            // It may say what blocks are.
            let error = open(&leg, Reason::Open).err().unwrap();
            assert!(error.contains("recover"), "page {bad}: {error}");
            faulty.clear();
            let graph = open(&leg, Reason::Open).unwrap();
            on_bench(&graph, |bench| bench.expect(0, &data));
            kill(graph);
        }
    }
}

/// The page that has the tags of blocks in the log cannot be read when the volume is opened after a crash, and can later.
#[test]
fn a_page_that_cannot_be_read_keeps_no_volume_from_being_opened() {
    let faulty = FaultVolume::new(disk(400, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 400));
    save(&graph).unwrap();
    on_bench(&graph, |bench| {
        let new = bench.write_random(0, 50);
        data[..new.len()].copy_from_slice(&new);
    });
    kill(graph);
    let page = page_start(0, 0, SIZE);
    for rounds in [1, 2] {
        faulty.add(unreadable(page, 16));
        for _ in 0..rounds {
            let graph = over(&faulty, Reason::Open);
            on_bench(&graph, |bench| {
                assert_eq!(read(bench, 5), Err(FAULT));
                bench.expect(200, &data[200 * 512..]);
                bench.write(300, &data[300 * 512..][..512]).unwrap();
            });
            save(&graph).unwrap();
            kill(graph);
        }
        faulty.clear();
        let graph = over(&faulty, Reason::Open);
        on_bench(&graph, |bench| {
            bench.expect(0, &data);
            let new = bench.write_random(0, 50);
            data[..new.len()].copy_from_slice(&new);
        });
        nothing_is_called_changed(&graph);
        kill(graph);
    }
}

/// The same of a page above, and of blocks that were written first since the tree was saved: nothing but the log knows them. What is written,
/// read and given back once it can be read again is as it should be, before anything is settled.
#[test]
fn what_only_the_log_knows_outlives_a_page_above_that_cannot_be_read() {
    // A twig has the groups of 168 times 168 blocks.
    let blocks = 2 * 168 * 168;
    let faulty = FaultVolume::new(disk(blocks, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    // So that the second twig has a page.
    let (first, fresh) = (168 * 168, 168 * 168 + 5 * 168);
    on_bench(&graph, |bench| drop(bench.write_random(first, 8)));
    save(&graph).unwrap();
    let mut data = Vec::new();
    on_bench(&graph, |bench| {
        data = bench.write_random(fresh, 30);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    kill(graph);
    faulty.add(unreadable(page_start(1, 1, SIZE), 16));
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| assert_eq!(read(bench, fresh), Err(FAULT)));
    faulty.clear();
    on_bench(&graph, |bench| {
        bench.plain(Operation::Deallocate, fresh + 20, 5).unwrap();
        data[20 * 512..25 * 512].fill(0);
        let new = bench.write_random(fresh + 5, 5);
        data[5 * 512..][..new.len()].copy_from_slice(&new);
        bench.expect(fresh, &data);
    });
    save(&graph).unwrap();
    on_bench(&graph, |bench| bench.expect(fresh, &data));
    kill(graph);
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| bench.expect(fresh, &data));
    nothing_is_called_changed(&graph);
    close(graph);
}

#[test]
fn bad_sectors_cost_no_more_than_themselves() {
    let faulty = FaultVolume::new(disk(400, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 400));
    kill(graph);
    let bad_sector = |at: u64| unreadable(at, 1);
    // A block that the log has.
    faulty.add(bad_sector(block_start(9, SIZE)));
    for _ in 0..2 {
        let graph = over(&faulty, Reason::Open);
        on_bench(&graph, |bench| {
            bench.expect(0, &data[..9 * 512]);
            assert_eq!(read(bench, 9), Err(FAULT));
            bench.expect(10, &data[10 * 512..]);
        });
        close(graph);
    }
    // What is carried over is so through a crash, too.
    for _ in 0..2 {
        kill(over(&faulty, Reason::Open));
    }
    faulty.clear();
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &data));
    close(graph);
    // A page: that is the leg's failure, and nobody is accused.
    for place in [0, 4096] {
        faulty.add(bad_sector(page_start(0, 1, SIZE) + place));
    }
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| {
        assert_eq!(read(bench, 200), Err(FAULT));
        faulty.clear();
        bench.expect(0, &data);
    });
    super::nothing_is_called_changed(&graph);
    close(graph);
}

#[test]
fn what_was_cut_off_is_zeroes_when_the_volume_grows_again() {
    // So many that there is more than one twig.
    const MOST: u64 = 30_000;
    let disk = disk(MOST, SIZE);
    let graph = open(&disk, Reason::Create).unwrap();
    on_bench(&graph, |bench| {
        let mut data = bench.write_random(0, 1000);
        let far = bench.write_random(MOST - 300, 300);
        assert!(graph.volume().resize(BlockCount(1 << 50)).is_err(), "no tree is so large");
        bench.expect(MOST - 300, &far);
        graph.volume().resize(BlockCount(520)).unwrap();
        graph.volume().resize(BlockCount(MOST)).unwrap();
        data[520 * 512..].fill(0);
        bench.expect(0, &data);
        bench.expect_zeroes(MOST - 300, 300);
        let far = bench.write_random(MOST - 300, 300);
        bench.expect(MOST - 300, &far);
        graph.volume().resize(BlockCount(100)).unwrap();
    });
    close(graph);
    let graph = open(&disk, Reason::Open).unwrap();
    graph.volume().resize(BlockCount(700)).unwrap();
    close(graph);
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| bench.expect_zeroes(100, 600));
    close(graph);
}

#[test]
fn a_volume_that_was_made_shorter_is_saved_without_what_went() {
    for fails in [false, true] {
        let faulty = FaultVolume::new(disk(1000, SIZE), SEED);
        let graph = over(&faulty, Reason::Create);
        let service = Arc::clone(&graph.services("crypt")[0].1);
        on_bench(&graph, |bench| {
            let mut data = bench.write_random(0, 100);
            // It is in memory and in the log only; or not even known.
            if fails {
                faulty.add(Rule {
                    range: Some((Lba(block_start(999, SIZE) / 512), BlockCount(1))),
                    ..Rule::new(Requests::Write, When::Always, Effect::Fail(FAULT))
                });
                assert!(bench.write(999, &[7; 512]).is_err());
                faulty.clear();
            } else {
                bench.write_random(999, 1);
            }
            graph.volume().resize(BlockCount(100)).unwrap();
            // Each has a page of the log: it is full again and again.
            for number in 0..300 {
                let lba = number % 100;
                let new = bench.write_random(lba, 1);
                data[lba as usize * 512..][..512].copy_from_slice(&new);
            }
            bench.expect(0, &data);
            graph.volume().resize(BlockCount(1000)).unwrap();
            bench.expect(0, &data);
            bench.expect_zeroes(100, 900);
            bench.write_random(999, 1);
            graph.volume().resize(BlockCount(100)).unwrap();
        });
        service.unmount().unwrap();
        kill(graph);
        close(over(&faulty, Reason::Open));
    }
}

#[test]
fn a_format_forgets_the_key() {
    let disk = disk(64, SIZE);
    let graph = open(&disk, Reason::Create).unwrap();
    on_bench(&graph, |bench| {
        let data = bench.write_random(0, 64);
        let before = legs::read(&disk, 0, OFFSET as usize).unwrap();
        let (medium, pages) = (raw(&disk, 5), legs::read(&disk, page_start(0, 0, SIZE), 8192).unwrap());
        for block_size in [BlockSize::B512, BlockSize::B4096, BlockSize::B512] {
            bench.volume.format(block_size).unwrap();
            assert!(bench.volume.erases_by_key());
            bench.expect_zeroes(0, bench.blocks());
        }
        // Not a piece of either copy's sealed key is left.
        let after = legs::read(&disk, 0, 32 << 10).unwrap();
        for at in [80, (16 << 10) + 80] {
            assert!(!before[at..at + 92].chunks(12).any(|piece| after.windows(12).any(|window| window == piece)));
        }
        // Whoever kept blocks, pages and log has nothing of them.
        put_raw(&disk, 5, &medium);
        legs::write(&disk, page_start(0, 0, SIZE), pages).unwrap();
        legs::write(&disk, 32 << 10, before[32 << 10..].to_vec()).unwrap();
        bench.expect_zeroes(0, 64);
        let new = bench.write_random(5, 1);
        bench.expect(5, &new);
        assert_ne!(new, data[5 * 512..6 * 512]);
    });
    kill(graph);
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| bench.expect_zeroes(0, 5));
    close(graph);
}

#[test]
fn nothing_plain_reaches_the_medium_and_equal_blocks_look_different() {
    let disk = disk(64, SIZE);
    let graph = open(&disk, Reason::Create).unwrap();
    on_bench(&graph, |bench| {
        let data = [&b"a secret, again and again; "[..]; 100].concat()[..512].to_vec();
        bench.write(0, &data).unwrap();
        bench.write(1, &data).unwrap();
        let first = raw(&disk, 0);
        bench.write(0, &data).unwrap();
        let blocks = [first, raw(&disk, 0), raw(&disk, 1)];
        for (at, block) in blocks.iter().enumerate() {
            assert!(!block.windows(8).any(|window| window == b"a secret"), "plain text on the medium");
            assert!(blocks[..at].iter().all(|other| other != block), "in two places, or at two times");
        }
        bench.write(2, &[0; 512]).unwrap();
        assert!(raw(&disk, 2).iter().any(|byte| *byte != 0), "a written block is enciphered, zeroes too");
    });
    close(graph);
    for (settings, shown) in [("", true), ("discard=false, ", false)] {
        let disk = super::disk(64, SIZE);
        let graph = open_stack(&stack(settings), &disk, Reason::Create).unwrap();
        on_bench(&graph, |bench| {
            assert_eq!(bench.volume.geometry().deallocate, shown);
            bench.write_random(8, 8);
            for lba in [8, 40] {
                bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, lba, 4).unwrap();
                bench.expect_zeroes(lba, 4);
                assert_eq!((lba..lba + 4).all(|lba| raw(&disk, lba).iter().all(|byte| *byte == 0)), shown);
            }
        });
        close(graph);
    }
}

#[test]
fn the_key_encryption_key_is_exchanged_in_a_running_volume() {
    let directory = tempfile::tempdir().unwrap();
    let key = directory.path().join("new-key");
    std::fs::write(&key, "17".repeat(32)).unwrap();
    let disk = disk(64, SIZE);
    let graph = open(&disk, Reason::Create).unwrap();
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 64));
    let service = take_over(&disk, &key, Some("authenticated"), &graph.services("crypt")[0].1).unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let volume: Arc<dyn Volume> = Arc::<dyn Service>::clone(&service);
    conformance::Bench::new(&mut harness, volume, SEED).expect(0, &data);
    service.unmount().unwrap();
    // The new key opens it, and the old one does no more.
    let with_new = format!("crypt(mode=authenticated, key=\"file:{}\", disk:0)", key.display());
    let graph = open_stack(&with_new, &disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| bench.expect(0, &data));
    close(graph);
    let refused = open(&disk, Reason::Open).err().unwrap();
    assert!(refused.contains("does not open it"), "{refused}");
}

/// More writes fail than a log can carry on as unknown, and their blocks cannot be read either: when the leg is well again, so is the volume.
#[test]
fn a_burst_of_failed_writes_ends_with_the_leg_s_trouble() {
    let faulty = FaultVolume::new(disk(3000, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    on_bench(&graph, |bench| {
        let ill = block_start(1200, SIZE) >> SIZE.shift();
        for kind in [Requests::Write, Requests::Read] {
            faulty.add(Rule {
                range: Some((Lba(OFFSET >> SIZE.shift()), BlockCount(ill - (OFFSET >> SIZE.shift())))),
                ..Rule::new(kind, When::Always, Effect::Fail(FAULT))
            });
        }
        for piece in 0..50 {
            assert!(bench.write(piece * 24, &[7; 24 * 512]).is_err());
        }
        // The log is full sooner or later, and then the tree cannot be saved.
        assert!(
            (0..3000).any(|lba| bench.write(2000 + lba % 1000, &[8; 512]).is_err()),
            "the pages above cannot be written"
        );
        faulty.clear();
        for lba in 2000..2300 {
            bench.write(lba, &[9; 512]).unwrap();
        }
        // Each has what it had, or what the guest was told may be there.
        for lba in 0..1200 {
            let found = bench.read(lba, 1);
            assert!([0, 7].iter().any(|byte| found.iter().all(|found| found == byte)), "block {lba}");
        }
    });
    nothing_is_called_changed(&graph);
    close(graph);
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| bench.expect(2000, &vec![9; 300 * 512]));
}

/// A guest that tries a write again and again is one doubt.
#[test]
fn a_write_that_fails_again_and_again_is_doubted_once() {
    let faulty = FaultVolume::new(disk(3000, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    on_bench(&graph, |bench| {
        let at = block_start(5, SIZE) >> SIZE.shift();
        for kind in [Requests::Write, Requests::Read] {
            faulty.add(Rule { range: Some((Lba(at), BlockCount(1))), ..Rule::new(kind, When::Always, Effect::Fail(FAULT)) });
        }
        for _ in 0..3000 {
            assert!(bench.write(5, &[7; 512]).is_err());
        }
        for lba in 2000..3000 {
            bench.write(lba, &[9; 512]).unwrap();
        }
    });
    close(graph);
}

/// The same for one that writes something else each time, and when the volume is opened again.
#[test]
fn a_block_that_cannot_be_written_costs_no_more_than_itself() {
    let faulty = FaultVolume::new(disk(3000, SIZE), SEED);
    let graph = over(&faulty, Reason::Create);
    let at = block_start(5, SIZE) >> SIZE.shift();
    for kind in [Requests::Write, Requests::Read] {
        faulty.add(Rule { range: Some((Lba(at), BlockCount(1))), ..Rule::new(kind, When::Always, Effect::Fail(FAULT)) });
    }
    on_bench(&graph, |bench| {
        for number in 0..3000_u32 {
            assert!(bench.write(5, &number.to_le_bytes().repeat(128)).is_err());
        }
        for lba in 2000..3000 {
            bench.write(lba, &[9; 512]).unwrap();
        }
    });
    save(&graph).unwrap_or_else(|error| panic!("one block keeps all from being saved: {error}"));
    kill(graph);
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| {
        bench.expect(2000, &vec![9; 1000 * 512]);
        assert_eq!(read(bench, 5), Err(FAULT));
        bench.write(6, &[8; 512]).unwrap();
        faulty.clear();
        bench.expect_zeroes(5, 1);
    });
    nothing_is_called_changed(&graph);
    close(graph);
}

#[test]
fn a_part_of_the_leg_that_fails_costs_no_more_than_itself() {
    for dies in [false, true] {
        let faulty = FaultVolume::new(disk(3000, SIZE), SEED);
        let mut graph = over(&faulty, Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(0, 3000));
        save(&graph).unwrap();
        fall_ill(&faulty, 8);
        on_bench(&graph, write_ill);
        if dies {
            kill(graph);
            graph = over(&faulty, Reason::Open);
        }
        on_bench(&graph, |bench| {
            assert_eq!(read(bench, 5), Err(FAULT));
            // Each has a page of the log: it is full again and again.
            for lba in ILL..3000 {
                let new = bench.write_random(lba, 1);
                data[lba as usize * 512..][..512].copy_from_slice(&new);
            }
            bench.expect(ILL, &data[ILL as usize * 512..]);
        });
        if !dies {
            faulty.clear();
            on_bench(&graph, |bench| bench.expect(0, &data));
            nothing_is_called_changed(&graph);
        }
        close(graph);
        let graph = over(&faulty, Reason::Open);
        on_bench(&graph, |bench| {
            bench.expect(ILL, &data[ILL as usize * 512..]);
            bench.write(ILL, &data[ILL as usize * 512..][..512]).unwrap();
            faulty.clear();
            let good: Vec<u64> = (0..ILL).filter(|lba| read(bench, *lba).is_ok()).collect();
            // The leg has what they were: so say their pages, which could not be written either.
            assert_eq!(good.len(), ILL as usize);
            for lba in &good {
                bench.expect(*lba, &data[*lba as usize * 512..][..512]);
            }
            bench.write(ILL - 1, &[3; 512]).unwrap();
            bench.expect(ILL - 1, &[3; 512]);
        });
        nothing_is_called_changed(&graph);
        close(graph);
    }
}

/// A save that gives up doubts does not come to its end: of what it has carried over the log is nearly full when the volume is opened again.
#[test]
fn a_death_behind_what_is_carried_over_keeps_nobody_out() {
    let header = Some((Lba(0), BlockCount(REGION.len / 512)));
    for boundary in [Rule { range: header, ..failing(Requests::Write) }, failing(Requests::Flush)] {
        // Part of the leg may be well again.
        for groups in [8, 3] {
            let faulty = FaultVolume::new(disk(3000, SIZE), SEED);
            let graph = over(&faulty, Reason::Create);
            let mut data = Vec::new();
            on_bench(&graph, |bench| data = bench.write_random(0, 3000));
            save(&graph).unwrap();
            fall_ill(&faulty, 8);
            on_bench(&graph, write_ill);
            kill(graph);
            let graph = over(&faulty, Reason::Open);
            faulty.add(boundary.clone());
            on_bench(&graph, |bench| {
                let is_good = |lba: &u64| bench.write(*lba, &[9; 512]).is_ok();
                let written = (ILL..3000).take_while(is_good).count();
                assert!(written < 200, "the log is full some time");
                data[ILL as usize * 512..][..written * 512].fill(9);
            });
            kill(graph);
            faulty.clear();
            fall_ill(&faulty, groups);
            let graph = over(&faulty, Reason::Open);
            on_bench(&graph, |bench| {
                bench.expect(ILL, &data[ILL as usize * 512..]);
                bench.write(2999, &[5; 512]).unwrap();
                data[2999 * 512..].fill(5);
            });
            close(graph);
            faulty.clear();
            let graph = over(&faulty, Reason::Open);
            on_bench(&graph, |bench| bench.expect(0, &data));
            nothing_is_called_changed(&graph);
            close(graph);
        }
    }
}

/// Pages of the tree, and after a crash of the log. A mirror may have read the wrong one of two.
#[test]
fn a_page_that_comes_over_badly_once_loses_nothing() {
    let badly = |start: u64, pages: u64| {
        let range = Some((Lba(start / 512), BlockCount(8 * pages)));
        Rule { range, ..Rule::new(Requests::Read, When::Nth(1), Effect::Corrupt) }
    };
    for seed in 0..12 {
        let faulty = FaultVolume::new(disk(400, SIZE), seed);
        let graph = over(&faulty, Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(0, 400));
        close(graph);
        for level in 0..LEVELS {
            faulty.clear();
            faulty.add(badly(page_start(level, 0, SIZE), 2));
            let (before, graph) = (faulty.faults(), over(&faulty, Reason::Open));
            on_bench(&graph, |bench| bench.expect(0, &data));
            assert!(faulty.faults() > before, "level {level}");
            nothing_is_called_changed(&graph);
            kill(graph);
        }
        let graph = over(&faulty, Reason::Open);
        // Several pages of the log, which are read together: one of them, or one behind them.
        on_bench(&graph, |bench| data = bench.write_random(0, 400));
        kill(graph);
        let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
        let epoch = Header::load(&leg).unwrap().unwrap().0.epoch;
        faulty.clear();
        faulty.add(badly(log_start(epoch, 0), 1));
        let (before, graph) = (faulty.faults(), over(&faulty, Reason::Open));
        assert!(faulty.faults() > before);
        on_bench(&graph, |bench| bench.expect(0, &data));
        nothing_is_called_changed(&graph);
        close(graph);
    }
}

/// Of the first write of a block nothing but the log comes to pass, and the process dies: it is zeroes.
fn cut_in_the_first_write(faulty: &Arc<FaultVolume>, graph: Graph, lba: u64) -> Graph {
    first_write_fails(faulty, &graph, lba);
    kill(graph);
    let graph = over(faulty, Reason::Open);
    on_bench(&graph, |bench| bench.expect_zeroes(lba, 1));
    nothing_is_called_changed(&graph);
    graph
}

fn first_write_fails(faulty: &Arc<FaultVolume>, graph: &Graph, lba: u64) {
    let range = Some((Lba(block_start(lba, SIZE) >> SIZE.shift()), BlockCount(1)));
    faulty.add(Rule { range, ..failing(Requests::Write) });
    on_bench(graph, |bench| assert!(bench.write(lba, &[7; 512]).is_err()));
    faulty.clear();
}

/// What a format could not erase lies under blocks that were never written since; what was written since stays.
#[test]
fn what_a_format_has_not_erased_is_nobody_s() {
    let cut_short = || {
        let faulty = FaultVolume::new(disk(400, SIZE), SEED);
        let graph = over(&faulty, Reason::Create);
        on_bench(&graph, |bench| drop(bench.write_random(0, 400)));
        faulty.add(failing(Requests::WriteZeroes));
        assert!(graph.volume().format(SIZE).is_err());
        faulty.clear();
        on_bench(&graph, |bench| bench.expect_zeroes(0, 400));
        (faulty, graph)
    };
    let lies_there = |faulty: &Arc<FaultVolume>| {
        let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(faulty);
        raw(&leg, 300).iter().any(|byte| *byte != 0)
    };
    let is_told = |graph: &Graph| {
        let facts = graph.services("crypt")[0].1.status().facts;
        facts.iter().any(|(name, value)| name == "last format" && value.contains("not erased everywhere"))
    };

    // The process dies before anything is written: the next opening goes on with it.
    let (faulty, graph) = cut_short();
    assert!(is_told(&graph) && lies_there(&faulty) && graph.services("crypt")[0].1.has_erasure());
    kill(graph);
    let graph = over(&faulty, Reason::Open);
    assert!(!is_told(&graph) && !lies_there(&faulty) && !graph.services("crypt")[0].1.has_erasure());
    close(cut_in_the_first_write(&faulty, graph, 5));

    // A change that fails, and mounts it again, makes nobody wait for that; the next opening goes on with it.
    let (faulty, graph) = cut_short();
    let service = Arc::clone(&graph.services("crypt")[0].1);
    service.unmount().unwrap();
    let mount = Mount { reason: Reason::Open, legs: vec![LegOrigin::Kept], previous: None, reformat: false };
    service.mount(&mount).unwrap();
    assert!(is_told(&graph) && lies_there(&faulty) && service.has_erasure());
    on_bench(&graph, |bench| bench.expect_zeroes(0, 400));
    drop(service);
    close(graph);
    let graph = over(&faulty, Reason::Open);
    assert!(!is_told(&graph) && !lies_there(&faulty));
    close(graph);

    // The volume is used on.
    let (faulty, graph) = cut_short();
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(200, 8));
    first_write_fails(&faulty, &graph, 7);
    on_bench(&graph, |bench| bench.expect_zeroes(7, 1));
    let mut graph = cut_in_the_first_write(&faulty, graph, 5);
    for _ in 0..2 {
        assert!(is_told(&graph) && lies_there(&faulty));
        on_bench(&graph, |bench| {
            bench.expect(200, &data);
            bench.expect_zeroes(0, 200);
        });
        close(graph);
        graph = over(&faulty, Reason::Open);
    }
    graph.volume().format(SIZE).unwrap();
    assert!(!is_told(&graph) && !lies_there(&faulty));
    close(graph);
}

/// The leg has something else where blocks are to be: those that were never written are zeroes, whatever a crash leaves of one.
#[test]
fn what_was_on_the_leg_before_is_nobody_s() {
    let dirty = || {
        let leg = disk(3000, SIZE);
        let len = (leg.geometry().bytes() - OFFSET) as usize;
        legs::write(&leg, OFFSET, vec![0xaa; len]).unwrap();
        FaultVolume::new(leg, SEED)
    };
    let faulty = dirty();
    let graph = over(&faulty, Reason::Create);
    close(cut_in_the_first_write(&faulty, graph, 5));

    // The same where it has grown.
    let (all, mut leg) = (disk(3000, SIZE), None);
    let graph = grow_over_what_was_there(&all, leg_blocks(500, SIZE), SEED, |device| {
        let faulty = leg.insert(FaultVolume::new(Arc::clone(device), SEED));
        over(faulty, Reason::Create)
    });
    cut_in_the_first_write(&leg.expect("a leg"), graph, 2450);
}

/// A change that is in the log of a tree that could not be saved is of the volume before it was made shorter: it does not come back.
#[test]
fn what_was_cut_off_does_not_come_back_after_a_crash() {
    let faulty = FaultVolume::new(Device::over(disk(3000, SIZE), leg_blocks(1000, SIZE)), SEED);
    let graph = over(&faulty, Reason::Create);
    on_bench(&graph, |bench| {
        bench.write(999, &[1; 512]).unwrap();
        // A save begins the next epoch, and fails.
        faulty.add(Rule::new(Requests::Flush, When::Always, Effect::Fail(FAULT)));
        assert!((0..100_000).any(|at| bench.write(at % 900, &[2; 512]).is_err()), "the log is full some time");
        faulty.clear();
        bench.write(999, &[3; 512]).unwrap();
    });
    graph.volume().resize(BlockCount(100)).unwrap();
    graph.volume().resize(BlockCount(1000)).unwrap();
    kill(graph);
    let graph = over(&faulty, Reason::Open);
    on_bench(&graph, |bench| bench.expect_zeroes(100, 900));
}
