//! A new key while the volume is in use.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_backends::fault::{Effect, FaultVolume, Kind as Requests, Rule, When};
use millrace_block::{BlockCount, BlockError, BlockSize, Operation, Volume, conformance};

use super::{
    super::{
        header::Header,
        layout::{LEVELS, PAGES, REGION, page_start},
    },
    CHANGED, SEED, close, disk, leg_blocks, nothing_is_called_changed, on_bench, open, put_raw, raw, read, stack,
};
use crate::{
    Health, Reason,
    crypt::tests::{
        crashes::{Rekeyed, begin, is_rekeying},
        take_over,
    },
    graph::Graph,
    legs,
    testing::{Bench, Kept, Session, Tearing},
};

/// More than two groups.
const BLOCKS: u64 = 500;
const SIZES: [BlockSize; 2] = [BlockSize::B512, BlockSize::B4096];

#[test]
fn a_re_keying_survives_power_cuts() {
    // Those that are saved all the time, and those of which the log has everything.
    for (settings, points) in [("save-after=1ms, ", 3000), ("save-after=10m, ", 1000)] {
        let leg_blocks = leg_blocks(BLOCKS, BlockSize::B512);
        let test = Rekeyed {
            stack: stack(settings),
            leg_blocks,
            blocks: BLOCKS,
            tearing: Tearing::Never,
            points,
            seed: SEED,
            verify: nothing_is_called_changed,
        };
        test.test();
    }
}

#[test]
fn a_re_keying_of_blocks_that_the_disk_tears_survives_power_cuts() {
    // More than a group.
    let (blocks, leg_blocks) = (180, leg_blocks(180, BlockSize::B4096));
    let (stack, tearing) = (stack("save-after=1ms, "), Tearing::Told);
    Rekeyed { stack, leg_blocks, blocks, tearing, points: 300, seed: SEED, verify: |_| {} }.test();
}

fn with_tasks(disk: &Arc<dyn Volume>, reason: Reason) -> (Graph, Arc<Kept>) {
    let kept = Arc::default();
    let graph = crate::testing::graph(&stack(""), std::slice::from_ref(disk), None, reason, &kept).unwrap();
    (graph, kept)
}

/// Lets tasks work until everything has the new key; `look` is called meanwhile.
fn finish(graph: &Graph, session: &mut Session<'_>, mut look: impl FnMut(&mut conformance::Bench<'_>)) {
    let end = Instant::now() + Duration::from_secs(120);
    while is_rekeying(graph) {
        assert!(Instant::now() < end, "it does not end: {:?}", graph.services("crypt")[0].1.status());
        session.settle(20);
        look(&mut conformance::Bench::new(session, Arc::clone(graph.volume()), SEED));
    }
}

fn all_of(disk: &Arc<dyn Volume>) -> Vec<u8> {
    legs::read(disk, 0, disk.geometry().bytes() as usize).unwrap()
}

/// Its tasks end in an orderly way, and so does the volume.
fn end(graph: Graph, mut session: Session<'_>) {
    graph.tasks.iter().for_each(|(_, tasks)| tasks.tell());
    session.settle(usize::MAX);
    drop(session);
    close(graph);
}

/// A volume with data and a hole, closed; and its data.
fn prepared(block_size: BlockSize) -> (Arc<dyn Volume>, Vec<u8>) {
    let disk = disk(BLOCKS, block_size);
    let graph = open(&disk, Reason::Create).unwrap();
    let mut data = Vec::new();
    on_bench(&graph, |bench| {
        data = bench.write_random(0, BLOCKS);
        bench.plain(Operation::WriteZeroes { fua: false, deallocate: true }, 20, 9).unwrap();
        let block = bench.block();
        data[20 * block..29 * block].fill(0);
    });
    close(graph);
    (disk, data)
}

#[test]
fn everything_has_the_new_key_and_nothing_the_old_one() {
    for block_size in SIZES {
        let (disk, data) = prepared(block_size);
        let first = all_of(&disk);
        // Twice: the third key has the mark of the first one.
        for round in 0..2 {
            let before = all_of(&disk);
            let sealed = REGION.load(&disk).unwrap().unwrap().content[48..140].to_vec();
            let (graph, kept) = with_tasks(&disk, Reason::Open);
            assert!(begin(&graph).unwrap().contains("has begun"));
            assert!(begin(&graph).unwrap_err().contains("already"));
            let tasks = Bench::new(SEED);
            let mut session = Session::new(&tasks, &kept, SEED);
            let progress = graph.services("crypt")[0].1.status().progress[0].clone();
            assert_eq!((progress.done, progress.total), (0, BLOCKS));
            finish(&graph, &mut session, |bench| bench.expect(0, &data));
            nothing_is_called_changed(&graph);
            end(graph, session);
            let header = legs::read(&disk, 0, REGION.len as usize).unwrap();
            assert!(!sealed.chunks(12).any(|piece| header.windows(12).any(|window| window == piece)), "round {round}");
            for lba in 0..BLOCKS {
                let start = super::block_start(lba, block_size) as usize;
                let same = raw(&disk, lba) == before[start..start + block_size.bytes() as usize];
                assert_eq!(same, (20..29).contains(&lba), "block {lba}");
            }
            // What has the keys before is nobody's: blocks, and pages, in whichever place.
            for older in [&before, &first] {
                let now = all_of(&disk);
                let put_back = |start: u64, len: usize| {
                    legs::write(&disk, start, older[start as usize..start as usize + len].to_vec()).unwrap();
                };
                put_back(super::block_start(5, block_size), block_size.bytes() as usize);
                let graph = open(&disk, Reason::Open).unwrap();
                on_bench(&graph, |bench| assert_eq!(read(bench, 5), CHANGED));
                close(graph);
                for level in 0..LEVELS {
                    put_back(page_start(level, 0, block_size), PAGES as usize);
                }
                let graph = open(&disk, Reason::Open).unwrap();
                on_bench(&graph, |bench| assert_eq!(read(bench, 100), CHANGED));
                close(graph);
                legs::write(&disk, 0, now).unwrap();
            }
            let graph = open(&disk, Reason::Open).unwrap();
            on_bench(&graph, |bench| bench.expect(0, &data));
            nothing_is_called_changed(&graph);
            close(graph);
        }
    }
}

#[test]
fn it_goes_on_where_it_was_and_in_between_the_volume_is_like_any_other() {
    let (disk, mut data) = prepared(BlockSize::B512);
    let (graph, _) = with_tasks(&disk, Reason::Open);
    begin(&graph).unwrap();
    close(graph);
    let mut dones = Vec::new();
    for round in 0.. {
        let (graph, kept) = with_tasks(&disk, Reason::Open);
        if !is_rekeying(&graph) {
            close(graph);
            break;
        }
        dones.push(graph.services("crypt")[0].1.status().progress[0].done);
        on_bench(&graph, |bench| {
            bench.expect(0, &data);
            let lba = bench.random.below(BLOCKS) ^ round;
            let lba = lba.min(BLOCKS - 1);
            let new = bench.write_random(lba, 1);
            data[lba as usize * 512..][..512].copy_from_slice(&new);
        });
        let tasks = Bench::new(SEED);
        let mut session = Session::new(&tasks, &kept, SEED + round);
        session.settle(4);
        end(graph, session);
    }
    assert!(dones.is_sorted() && dones.iter().any(|done| (1..BLOCKS).contains(done)), "{dones:?}");
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| bench.expect(0, &data));
    nothing_is_called_changed(&graph);
    close(graph);
}

#[test]
fn a_volume_that_is_re_keyed_can_be_erased_and_change_its_size() {
    let (disk, mut data) = prepared(BlockSize::B512);
    let (graph, kept) = with_tasks(&disk, Reason::Open);
    begin(&graph).unwrap();
    graph.volume().resize(BlockCount(200)).unwrap();
    graph.volume().resize(BlockCount(BLOCKS)).unwrap();
    data[200 * 512..].fill(0);
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, &kept, SEED);
    finish(&graph, &mut session, |bench| bench.expect(0, &data));
    end(graph, session);
    let (graph, kept) = with_tasks(&disk, Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &data));
    begin(&graph).unwrap();
    let keys = REGION.load(&disk).unwrap().unwrap().content;
    graph.volume().format(BlockSize::B512).unwrap();
    assert!(!is_rekeying(&graph));
    let header = legs::read(&disk, 0, REGION.len as usize).unwrap();
    for key in [&keys[48..140], &keys[168..260]] {
        assert!(!key.chunks(12).any(|piece| header.windows(12).any(|window| window == piece)), "a key is left");
    }
    let mut session = Session::new(&tasks, &kept, SEED);
    session.settle(1000);
    let mut bench = conformance::Bench::new(&mut session, Arc::clone(graph.volume()), SEED);
    bench.expect_zeroes(0, BLOCKS);
    let data = bench.write_random(0, BLOCKS);
    end(graph, session);
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| bench.expect(0, &data));
    close(graph);
}

#[test]
fn a_block_that_was_changed_is_not_made_good_by_a_new_key() {
    let (disk, data) = prepared(BlockSize::B512);
    let mut spoilt = raw(&disk, 100);
    spoilt[9] ^= 4;
    put_raw(&disk, 100, &spoilt);
    put_raw(&disk, 300, &raw(&disk, 301));
    let (graph, kept) = with_tasks(&disk, Reason::Open);
    begin(&graph).unwrap();
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, &kept, SEED);
    finish(&graph, &mut session, |_| {});
    graph.tasks.iter().for_each(|(_, tasks)| tasks.tell());
    session.settle(usize::MAX);
    drop(session);
    let status = graph.services("crypt")[0].1.status();
    assert_eq!((status.facts[2].1.as_str(), status.health), ("2", Health::Degraded), "{status:?}");
    for graph in [graph, open(&disk, Reason::Open).unwrap()] {
        on_bench(&graph, |bench| {
            bench.expect(0, &data[..100 * 512]);
            bench.expect(101, &data[101 * 512..300 * 512]);
            bench.expect(301, &data[301 * 512..]);
            assert_eq!((read(bench, 100), read(bench, 300)), (CHANGED, CHANGED));
        });
        close(graph);
    }
    let graph = open(&disk, Reason::Open).unwrap();
    on_bench(&graph, |bench| {
        let new = bench.write_random(100, 1);
        bench.expect(100, &new);
    });
    close(graph);
}

#[test]
fn a_leg_that_fails_stops_it_for_a_while_and_spoils_nothing() {
    for (kind, most) in [(Requests::Write, 14), (Requests::Flush, 6), (Requests::Read, 6)] {
        for nth in 1..=most {
            let tear = nth % 2 == 0 && kind == Requests::Write;
            let faulty = FaultVolume::new(disk(200, BlockSize::B512), SEED + nth);
            let disk: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
            let graph = open(&disk, Reason::Create).unwrap();
            let mut data = Vec::new();
            on_bench(&graph, |bench| data = bench.write_random(0, 200));
            close(graph);
            let (graph, kept) = with_tasks(&disk, Reason::Open);
            let effect = if tear { Effect::Tear } else { Effect::Fail(BlockError::ReadFault { errno: 5 }) };
            faulty.add(Rule::new(kind, When::Nth(nth), effect));
            // It may be refused, and then be there all the same.
            if begin(&graph).is_err() {
                assert!(!is_rekeying(&graph));
                on_bench(&graph, |bench| bench.expect(0, &data));
                begin(&graph).unwrap();
            }
            let tasks = Bench::new(SEED);
            let mut session = Session::new(&tasks, &kept, SEED);
            finish(&graph, &mut session, |bench| {
                let segment = bench.memory.segment(0, 200 * 512);
                if bench.moving(Operation::Read, 0, &[segment]).is_ok() {
                    assert_eq!(bench.memory.bytes(0, 200 * 512), data);
                }
            });
            assert_eq!(faulty.faults(), 1, "{kind:?} {nth}");
            nothing_is_called_changed(&graph);
            end(graph, session);
            let graph = open(&disk, Reason::Open).unwrap();
            on_bench(&graph, |bench| bench.expect(0, &data));
            close(graph);
        }
    }
}

#[test]
fn the_key_encryption_key_is_exchanged_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let key = directory.path().join("new-key");
    std::fs::write(&key, "17".repeat(32)).unwrap();
    let (disk, data) = prepared(BlockSize::B512);
    let graph = open(&disk, Reason::Open).unwrap();
    begin(&graph).unwrap();
    let service = take_over(&disk, &key, Some("authenticated"), &graph.services("crypt")[0].1).unwrap();
    service.unmount().unwrap();
    let kept = Arc::default();
    let with_new = format!("crypt(mode=authenticated, key=\"file:{}\", disk:0)", key.display());
    let graph = crate::testing::graph(&with_new, std::slice::from_ref(&disk), None, Reason::Open, &kept).unwrap();
    let tasks = Bench::new(SEED);
    let mut session = Session::new(&tasks, &kept, SEED);
    assert!(is_rekeying(&graph));
    finish(&graph, &mut session, |bench| bench.expect(0, &data));
    assert_eq!(Header::load(&disk).unwrap().unwrap().0.rekeyed(), None);
    end(graph, session);
    let refused = open(&disk, Reason::Open).err().unwrap();
    assert!(refused.contains("does not open it"), "{refused}");
}
