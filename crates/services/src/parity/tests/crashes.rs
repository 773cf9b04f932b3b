//! Power cuts at every write boundary.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockError, conformance::CrashDisk};

use super::*;
use crate::testing::{Bench as Means, CrashTest, Oracle, Rig, Session, Tearing, crash_test, every_cut};

/// Blocks of a disk of [`SMALL`]: the service's own take 400 of them.
const BLOCKS: u64 = 400 + 64;
/// And of [`TWO`].
const BLOCKS_TWO: u64 = 400 + 256 + 48;

fn as_volumes(disks: &[Arc<CrashDisk>]) -> Vec<Arc<dyn Volume>> {
    disks.iter().map(|disk| Arc::<CrashDisk>::clone(disk) as Arc<dyn Volume>).collect()
}

/// Nothing is left to be done, and all parity fits.
fn all_is_well(graph: &Graph, disks: &[Arc<CrashDisk>]) {
    assert!((0..disks.len()).all(|leg| fact(graph, &format!("leg {leg}")).as_deref() == Some("good")), "{:?}", facts(graph));
    assert!(graph.tree().status.unwrap().progress.is_empty(), "{:?}", graph.tree());
    parity_fits(graph, &as_volumes(disks));
}

#[test]
fn flushed_data_survive_power_cuts_and_the_parity_fits() {
    let stack = "parity(chunk=4K, journal=128K, region=64K, rate=1T, disk:0, disk:1, disk:2)";
    crash_test(&CrashTest { blocks: BLOCKS, steps: 12, settle: 4000, verify: &all_is_well, ..CrashTest::new(stack, 3) });
}

#[test]
fn two_parity_chunks_and_large_blocks_survive_power_cuts() {
    let stack = "parity(redundancy=2, chunk=8K, journal=128K, region=64K, rate=1T, disk:0, disk:1, disk:2, disk:3)";
    let (block_size, blocks) = (BlockSize::B4096, BLOCKS_TWO / 8 + 16);
    crash_test(&CrashTest {
        blocks,
        block_size,
        steps: 8,
        settle: 4000,
        points: 3000,
        verify: &all_is_well,
        ..CrashTest::new(stack, 4)
    });
}

/// What goes through the journal is carried out again: there a torn block is mended.
#[test]
fn disks_that_tear_blocks_harm_no_others_and_the_parity_fits() {
    let cases = [
        ("", 3, BLOCKS, Tearing::Mixed),
        ("log=all, ", 3, BLOCKS, Tearing::Hidden),
        ("redundancy=2, ", 4, BLOCKS_TWO, Tearing::Mixed),
    ];
    for (settings, disks, blocks, tearing) in cases {
        let legs = (0..disks).map(|disk| format!("disk:{disk}")).collect::<Vec<_>>().join(", ");
        let stack = format!("parity({settings}chunk=8K, journal=128K, region=64K, rate=1T, {legs})");
        crash_test(&CrashTest {
            blocks: blocks / 8 + 16,
            tearing,
            steps: 8,
            points: 500,
            settle: 4000,
            verify: &all_is_well,
            ..CrashTest::new(&stack, disks)
        });
    }
}

/// Legs that fail, and when.
#[derive(Clone, Copy, Debug)]
enum Lost {
    /// Before the power goes: it is pulled after some steps.
    Before,
    /// With the power.
    AtOnce,
}

struct Case {
    form: Form,
    blocks: u64,
    lost: Lost,
    /// Legs that are lost.
    count: usize,
    /// Blocks that were written since the last flush are whole, too.
    strict: bool,
}

fn nothing_answers() -> Rule {
    Rule { kinds: vec![], ..Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NotReady)) }
}

/// Ends the tasks, and unmounts.
fn close(mut volume: Graph, mut session: Session<'_>) {
    for (_, tasks) in &volume.tasks {
        tasks.tell();
    }
    session.settle(usize::MAX);
    drop(session);
    volume.unmount();
}

/// Legs are lost and the power goes; they come back. Write boundaries that were passed.
fn lose(case: &Case, seed: u64, cut: u64) -> u64 {
    let Case { form, blocks, lost, count, strict } = *case;
    let rig = Rig::new(seed, form.legs, blocks, BlockSize::B512);
    let means = Means::new(seed);
    let legs: Vec<_> = rig.volumes().into_iter().map(|disk| FaultVolume::new(disk, seed)).collect();
    let stack = form.stack().replace("parity(", "parity(rate=1T, ");
    let open = |reason| graph(&stack, &volumes(&legs), None, reason, &rig.kept).unwrap_or_else(|error| panic!("{error}"));
    let lose: Vec<usize> = (0..count).map(|at| (seed as usize + at * 2 + at * (seed as usize / 5)) % form.legs).collect();
    let mut volume = open(Reason::Create);
    let mut oracle = Oracle::new(seed, volume.volume().geometry().blocks.0, 512);
    let mut session = Session::new(&means, &rig.kept, seed);
    let start = rig.power.boundaries();
    rig.power.cut_at(cut);
    for step in 0..8 {
        if step == 2 && matches!(lost, Lost::Before) {
            for leg in &lose {
                legs[*leg].add(nothing_answers());
            }
        }
        let good = oracle.step(&mut session, volume.volume());
        if rig.power.is_gone() {
            break;
        }
        assert!(good, "no error reaches the guest");
    }
    let boundaries = rig.power.boundaries() - start;
    drop(session);
    volume.tasks.clear();
    drop(volume);
    for leg in &legs {
        leg.clear();
    }
    if matches!(lost, Lost::AtOnce) {
        for leg in &lose {
            legs[*leg].add(nothing_answers());
        }
    }
    if !strict {
        oracle.forgive();
    }
    rig.restart();
    let volume = open(Reason::Open);
    let mut session = Session::new(&means, &rig.kept, seed);
    oracle.check(&mut session, volume.volume());
    session.settle(500);
    for _ in 0..3 {
        assert!(oracle.step(&mut session, volume.volume()), "a request failed after the restart");
    }
    oracle.check(&mut session, volume.volume());
    for leg in &legs {
        leg.clear();
    }
    for leg in 0..form.legs {
        if fact(&volume, &format!("leg {leg}")).as_deref() == Some("failed") {
            command(&volume, "rebuild", leg).unwrap();
        }
    }
    session.settle_until_done(&volume, 6000);
    oracle.check(&mut session, volume.volume());
    all_is_well(&volume, &rig.disks);
    close(volume, session);
    // What was put away is there, and nothing comes on top of it.
    let volume = open(Reason::Open);
    let mut session = Session::new(&means, &rig.kept, seed);
    oracle.check(&mut session, volume.volume());
    all_is_well(&volume, &rig.disks);
    close(volume, session);
    boundaries
}

fn try_points(case: &Case, points: usize) {
    let what = format!("{} with legs lost, {:?}", case.form.stack(), case.lost);
    every_cut(&what, SEED, points, |seed, cut| lose(case, seed, cut));
}

#[test]
fn a_leg_lost_with_the_power_loses_nothing_that_was_flushed() {
    try_points(&Case { form: SMALL, blocks: BLOCKS, lost: Lost::AtOnce, count: 1, strict: false }, 5000);
}

#[test]
fn a_leg_lost_with_the_power_tears_nothing_when_everything_is_logged() {
    let form = Form { settings: "chunk=4K, journal=128K, region=64K, log=all, ", legs: 3 };
    try_points(&Case { form, blocks: BLOCKS, lost: Lost::AtOnce, count: 1, strict: true }, 3000);
}

#[test]
fn a_leg_that_was_pulled_before_a_power_cut_is_not_missed() {
    let form = Form { settings: "chunk=4K, journal=128K, region=64K, log=all, ", legs: 3 };
    try_points(&Case { form, blocks: BLOCKS, lost: Lost::Before, count: 1, strict: true }, 3000);
    try_points(&Case { form: SMALL, blocks: BLOCKS, lost: Lost::Before, count: 1, strict: false }, 2000);
}

#[test]
fn two_legs_lost_lose_nothing_that_was_flushed() {
    let form = Form { settings: "redundancy=2, chunk=4K, journal=128K, region=64K, log=all, ", legs: 5 };
    for lost in [Lost::AtOnce, Lost::Before] {
        try_points(&Case { form, blocks: BLOCKS_TWO, lost, count: 2, strict: true }, 1500);
    }
    try_points(&Case { form: TWO, blocks: BLOCKS_TWO, lost: Lost::AtOnce, count: 2, strict: false }, 1500);
}
