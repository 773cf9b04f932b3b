//! Power cuts at every write boundary.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockError, conformance::CrashDisk};

use super::*;
use crate::testing::{Bench as Means, CrashTest, Oracle, Rig, Session, Tearing, crash_test, every_cut};

/// Blocks of a disk: the tables take 128 of them.
const BLOCKS: u64 = 384;

/// Nothing is left to be done, and all legs have the same.
fn legs_are_equal(graph: &Graph, disks: &[Arc<CrashDisk>]) {
    assert_eq!(fact(graph, "leg 1").as_deref(), Some("good"), "{:?}", facts(graph));
    assert!(graph.tree().status.unwrap().progress.is_empty(), "{:?}", graph.tree());
    let all: Vec<_> = disks.iter().map(|disk| data_of(&(Arc::<CrashDisk>::clone(disk) as Arc<dyn Volume>))).collect();
    assert!(all.iter().all(|data| *data == all[0]), "the legs differ");
}

#[test]
fn flushed_data_survive_power_cuts_and_the_legs_agree() {
    let test = CrashTest::new("mirror(region=64K, rate=1T, disk:0, disk:1)", 2);
    crash_test(&CrashTest { blocks: BLOCKS, steps: 12, verify: &legs_are_equal, ..test });
}

#[test]
fn three_legs_of_large_blocks_survive_power_cuts() {
    let test = CrashTest::new("mirror(region=64K, rate=1T, read=2, disk:0, disk:1, disk:2)", 3);
    let block_size = BlockSize::B4096;
    crash_test(&CrashTest { blocks: 80, block_size, steps: 8, points: 2000, verify: &legs_are_equal, ..test });
}

#[test]
fn blocks_that_the_disks_tear_are_the_same_on_all_legs() {
    let test = CrashTest::new("mirror(region=64K, rate=1T, disk:0, disk:1)", 2);
    let tearing = Tearing::Mixed;
    crash_test(&CrashTest { blocks: 80, tearing, steps: 8, points: 600, verify: &legs_are_equal, ..test });
}

/// A leg is pulled, and some time later the power goes; then both are back.
fn pulled(seed: u64, cut: u64) -> u64 {
    let rig = Rig::new(seed, 2, BLOCKS, BlockSize::B512);
    let means = Means::new(seed);
    let legs: Vec<_> = rig.volumes().into_iter().map(|disk| FaultVolume::new(disk, seed)).collect();
    let stack = "mirror(region=64K, rate=1T, disk:0, disk:1)";
    let open = |legs: &[Arc<FaultVolume>], reason| graph(stack, &volumes(legs), None, reason, &rig.kept).unwrap();
    let mut volume = open(&legs, Reason::Create);
    let mut oracle = Oracle::new(seed, volume.volume().geometry().blocks.0, 512);
    let mut session = Session::new(&means, &rig.kept, seed);
    let start = rig.power.boundaries();
    session.settle_until_done(&volume, 2000);
    assert_eq!(fact(&volume, "leg 1").as_deref(), Some("good"));
    rig.power.cut_at(cut);
    let pulled = (seed % 2) as usize;
    for step in 0..8 {
        if step == 2 {
            let fault = Effect::Fail(BlockError::NotReady);
            legs[pulled].add(Rule { kinds: vec![], ..Rule::new(Kind::Write, When::Always, fault) });
        }
        let good = oracle.step(&mut session, volume.volume());
        if rig.power.is_gone() {
            break;
        }
        assert!(good, "one good leg is enough");
    }
    let boundaries = rig.power.boundaries() - start;
    drop(session);
    volume.tasks.clear();
    drop(volume);
    for leg in &legs {
        leg.clear();
    }
    rig.restart();
    let mut volume = open(&legs, Reason::Open);
    let mut session = Session::new(&means, &rig.kept, seed);
    for _ in 0..3 {
        // Reads go to the legs in turn: a stale one would show.
        oracle.check(&mut session, volume.volume());
    }
    let failed = fact(&volume, &format!("leg {pulled}")).as_deref() == Some("failed");
    if failed {
        let leg = pulled.to_string();
        volume.root.service.as_ref().unwrap().command("rebuild", &arguments(&[("leg", &leg)])).unwrap();
    }
    session.settle_until_done(&volume, 5000);
    oracle.check(&mut session, volume.volume());
    legs_are_equal(&volume, &rig.disks);
    for (_, tasks) in &volume.tasks {
        tasks.tell();
    }
    session.settle(usize::MAX);
    drop(session);
    volume.unmount();
    boundaries
}

#[test]
fn a_leg_that_was_pulled_before_a_power_cut_is_not_read_after_it() {
    every_cut("pulled leg and power cut", SEED, 5000, pulled);
}
