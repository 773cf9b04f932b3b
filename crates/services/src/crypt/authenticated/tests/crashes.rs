//! Power that goes again while the volume is opened, and while it is formatted or changes its size.

use std::sync::Arc;

use millrace_block::{
    BlockCount, BlockSize, Operation,
    conformance::{self, Random, SyncHarness},
};

use super::{SEED, leg_blocks, nothing_is_called_changed, raw, rooted, stack};
use crate::{
    Reason,
    graph::Graph,
    testing::{Bench, Oracle, Rig, Session, every_cut, graph},
};

const SIZE: BlockSize = BlockSize::B512;
const BLOCKS: u64 = 400;
const POINTS: usize = 2000;

fn open(rig: &Rig, reason: Reason) -> Result<Graph, String> {
    // With a second disk the root is there as well.
    let stack = if rig.disks.len() > 1 { rooted("save-after=1ms, ") } else { stack("save-after=1ms, ") };
    graph(&stack, &rig.volumes(), None, reason, &rig.kept).map_err(|error| error.to_string())
}

fn kill(mut graph: Graph) {
    graph.tasks.clear();
}

/// One workload, cut at a boundary; then what was begun is completed, cut at another one, again and again. Returns how many
/// boundaries the workload had.
fn run(seed: u64, cut: u64, disks: usize) -> u64 {
    let rig = Rig::new(seed, disks, leg_blocks(BLOCKS, SIZE), SIZE);
    let mut oracle = Oracle::new(seed, BLOCKS, 512);
    let bench = Bench::new(seed);
    let volume = open(&rig, Reason::Create).unwrap();
    let mut session = Session::new(&bench, &rig.kept, seed);
    let start = rig.power.boundaries();
    rig.power.cut_at(cut);
    for _ in 0..25 {
        let good = oracle.step(&mut session, volume.volume());
        if rig.power.is_gone() {
            break;
        }
        assert!(good, "a request failed without reason");
    }
    let boundaries = rig.power.boundaries() - start;
    drop(session);
    kill(volume);
    rig.restart();
    let mut random = Random::new(seed ^ cut);
    for _ in 0..3 {
        rig.power.cut_at(random.below(14));
        if let Ok(volume) = open(&rig, Reason::Open) {
            kill(volume);
        }
        rig.restart();
    }
    let mut volume = open(&rig, Reason::Open).unwrap_or_else(|error| panic!("after the crashes: {error}"));
    let mut session = Session::new(&bench, &rig.kept, !seed);
    oracle.check(&mut session, volume.volume());
    nothing_is_called_changed(&volume);
    assert!((0..3).all(|_| oracle.step(&mut session, volume.volume())), "a request failed after the restart");
    oracle.check(&mut session, volume.volume());
    // This time it ends in an orderly way: tasks are told, and get their turns.
    volume.tasks.iter().for_each(|(_, tasks)| tasks.tell());
    session.settle(usize::MAX);
    drop(session);
    volume.unmount();
    let volume = open(&rig, Reason::Open).unwrap();
    let mut session = Session::new(&bench, &Arc::default(), seed);
    oracle.check(&mut session, volume.volume());
    boundaries
}

#[test]
fn power_that_goes_while_a_crash_is_made_good_loses_nothing() {
    for disks in [1, 2] {
        let what = format!("power cuts while the volume over {disks} is opened");
        every_cut(&what, SEED, POINTS, |seed, cut| run(seed, cut, disks));
    }
}

/// A volume with data that are durable, and these.
fn filled(seed: u64, disks: usize) -> (Rig, Graph, Vec<u8>) {
    let rig = Rig::new(seed, disks, leg_blocks(BLOCKS, SIZE), SIZE);
    let volume = open(&rig, Reason::Create).unwrap();
    let mut data = Vec::new();
    on_bench(&volume, |bench| {
        data = bench.write_random(0, BLOCKS);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    (rig, volume, data)
}

fn on_bench(graph: &Graph, test: impl FnOnce(&mut conformance::Bench<'_>)) {
    let mut harness = SyncHarness::new(SEED, false);
    test(&mut conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED));
}

#[test]
fn a_format_that_is_cut_short_leaves_all_or_nothing() {
    for cut in 0..22 {
        for seed in 0..8 {
            let (rig, volume, data) = filled(seed, 1 + seed as usize % 2);
            rig.power.cut_at(cut);
            let formatted = volume.volume().format(SIZE).is_ok();
            kill(volume);
            rig.restart();
            let volume = open(&rig, Reason::Open).unwrap_or_else(|error| panic!("seed {seed}, cut {cut}: {error}"));
            on_bench(&volume, |bench| {
                let found = bench.read(0, BLOCKS);
                let is_zero = found.iter().all(|byte| *byte == 0);
                assert!(is_zero || (found == data && !formatted), "seed {seed}, cut {cut}");
                // The opening has erased what the format had not come to.
                let is_erased = |lba: &u64| raw(&rig.volumes()[0], *lba).iter().all(|byte| *byte == 0);
                assert!(!is_zero || [0, 200, BLOCKS - 1].iter().all(is_erased), "seed {seed}, cut {cut}");
                let new = bench.write_random(0, BLOCKS);
                bench.expect(0, &new);
            });
            nothing_is_called_changed(&volume);
            kill(volume);
        }
    }
}

#[test]
fn a_growth_that_is_cut_short_brings_nothing_back() {
    for cut in 0..24 {
        for seed in 0..6 {
            let (rig, volume, data) = filled(seed, 1 + seed as usize % 2);
            volume.volume().resize(BlockCount(250)).unwrap();
            rig.power.cut_at(cut);
            let _ = volume.volume().resize(BlockCount(BLOCKS));
            kill(volume);
            rig.restart();
            let volume = open(&rig, Reason::Open).unwrap_or_else(|error| panic!("seed {seed}, cut {cut}: {error}"));
            let blocks = volume.volume().geometry().blocks.0;
            assert!([250, BLOCKS].contains(&blocks), "{blocks} blocks");
            on_bench(&volume, |bench| {
                bench.expect(0, &data[..250 * 512]);
                bench.expect_zeroes(250, blocks - 250);
            });
            nothing_is_called_changed(&volume);
            kill(volume);
        }
    }
}
