//! Power cuts at every write boundary.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockError, conformance::CrashDisk};

use super::{
    rebuild::{command, look_at_marks, resync_half},
    *,
};
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

/// A leg is filled while another one is out, and what is done of it is recorded; the power goes, and the other one comes back.
fn filled_beside_one_that_is_out(seed: u64, cut: u64) -> u64 {
    let rig = Rig::new(seed, 3, 768, BlockSize::B512);
    let means = Means::new(seed);
    let stack = "mirror(region=64K, rate=1T, disk:0, disk:1, disk:2)";
    let open = |reason| {
        let volume = graph(stack, &rig.volumes(), None, reason, &rig.kept).unwrap();
        // The test does upkeep's work.
        rig.kept.forget();
        volume
    };
    let mut volume = open(Reason::Create);
    let mut oracle = Oracle::new(seed, volume.volume().geometry().blocks.0, 512);
    let mut session = Session::new(&means, &rig.kept, seed);
    let start = rig.power.boundaries();
    rig.power.cut_at(cut);
    for step in 0..10 {
        match step {
            // From then on the power may be gone.
            2 => [2, 1].iter().for_each(|leg| _ = command(&volume, "fail", *leg)),
            4 => _ = command(&volume, "rebuild", 1),
            5 | 7 => resync_half(&volume),
            6 | 8 => (0..2).for_each(|_| look_at_marks(&volume)),
            9 => _ = resync(&volume),
            _ => {}
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
    rig.restart();
    let mut volume = open(Reason::Open);
    let mut session = Session::new(&means, &rig.kept, seed);
    let is = |volume: &Graph, leg: usize, what: &str| fact(volume, &format!("leg {leg}")).as_deref() == Some(what);
    oracle.check(&mut session, volume.volume());
    assert!(resync(&volume));
    for leg in [1, 2] {
        // From the one that was filled last alone.
        if is(&volume, leg, "failed") {
            command(&volume, "rebuild", leg).unwrap();
            assert!(resync(&volume));
        }
        if leg == 1 {
            command(&volume, "fail", 0).unwrap();
            oracle.check(&mut session, volume.volume());
        }
    }
    oracle.check(&mut session, volume.volume());
    command(&volume, "rebuild", 0).unwrap();
    assert!(resync(&volume) && (0..3).all(|leg| is(&volume, leg, "good")));
    legs_are_equal(&volume, &rig.disks);
    drop(session);
    volume.tasks.clear();
    boundaries
}

#[test]
fn what_was_filled_while_another_leg_was_out_is_right_after_a_power_cut() {
    every_cut("filled beside one that is out", SEED, 3000, filled_beside_one_that_is_out);
}

#[test]
fn a_leg_that_was_pulled_before_a_power_cut_is_not_read_after_it() {
    every_cut("pulled leg and power cut", SEED, 5000, pulled);
}
