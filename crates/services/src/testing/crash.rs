//! Power cuts at every write boundary.

use std::sync::Arc;

use millrace_block::{BlockSize, Volume, conformance::CrashDisk};

use super::{Bench, Oracle, Rig, Session, graph};
use crate::{Reason, graph::Graph};

/// A service, and how it is tried.
pub struct CrashTest<'a> {
    /// An expression over `disk:0`, `disk:1` and so on.
    pub stack: &'a str,
    /// How many disks there are.
    pub disks: usize,
    /// Blocks of each.
    pub blocks: u64,
    /// Their block size.
    pub block_size: BlockSize,
    /// Steps of the workload, each of some requests together.
    pub steps: usize,
    /// Crash points at least.
    pub points: usize,
    /// Where everything random comes from.
    pub seed: u64,
    /// Turns that background tasks get after a restart before everything is checked; the check comes before that as well.
    pub settle: usize,
    /// Looks at the volume and the disks after each restart and settling: legs equal, metadata consistent.
    pub verify: &'a dyn Fn(&Graph, &[Arc<CrashDisk>]),
    /// What the requests go to: the volume, or something over it that sees more of it than plain requests do.
    pub view: &'a View,
}

/// Makes a view of a volume.
pub(crate) type View = dyn Fn(&Arc<dyn Volume>) -> Arc<dyn Volume>;

impl<'a> CrashTest<'a> {
    /// A usual test of this stack: 10,000 points.
    pub fn new(stack: &'a str, disks: usize) -> Self {
        Self {
            stack,
            disks,
            blocks: 128,
            block_size: BlockSize::B512,
            steps: 30,
            points: 10_000,
            seed: 0x6d69_6c6c_7261_6365,
            settle: 10_000,
            verify: &|_, _| {},
            view: &Arc::clone,
        }
    }
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Run {
    /// Write boundaries that it passed before the cut.
    boundaries: u64,
}

fn run(test: &CrashTest<'_>, seed: u64, cut: Option<u64>) -> Run {
    let rig = Rig::new(seed, test.disks, test.blocks, test.block_size);
    let bench = Bench::new(seed);
    let mut volume = graph(test.stack, &rig.volumes(), None, Reason::Create, &rig.kept)
        .unwrap_or_else(|error| panic!("{}: {error}", test.stack));
    let geometry = volume.volume().geometry();
    let mut oracle = Oracle::new(seed, geometry.blocks.0.min(1024), geometry.block_size.bytes() as usize);
    let start = rig.power.boundaries();
    if let Some(cut) = cut {
        rig.power.cut_at(cut);
    }
    let mut session = Session::new(&bench, &rig.kept, seed);
    let view = (test.view)(volume.volume());
    for _ in 0..test.steps {
        let good = oracle.step(&mut session, &view);
        if rig.power.is_gone() {
            break;
        }
        assert!(good, "a request failed without reason");
    }
    let boundaries = rig.power.boundaries() - start;
    // The process dies with what it has in memory: nothing is unmounted.
    drop((session, view));
    volume.tasks.clear();
    drop(volume);
    rig.restart();
    for round in 0..2 {
        let mut volume = graph(test.stack, &rig.volumes(), None, Reason::Open, &rig.kept)
            .unwrap_or_else(|error| panic!("{}: mount {round} after the crash: {error}", test.stack));
        let mut session = Session::new(&bench, &rig.kept, seed + round);
        let view = (test.view)(volume.volume());
        oracle.check(&mut session, &view);
        session.settle(test.settle);
        oracle.check(&mut session, &view);
        (test.verify)(&volume, &rig.disks);
        for _ in 0..3 {
            assert!(oracle.step(&mut session, &view), "a request failed after the restart");
        }
        oracle.check(&mut session, &view);
        // This time it ends in an orderly way: tasks are told, and get their turns.
        for (_, tasks) in &volume.tasks {
            tasks.tell();
        }
        session.settle(usize::MAX);
        drop((session, view));
        volume.unmount();
    }
    Run { boundaries }
}

/// Cuts the power at every write boundary of random workloads, until there were enough crash points.
///
/// # Panics
/// With the seed and the point, when anything is not as it must be after a crash.
pub fn crash_test(test: &CrashTest<'_>) {
    let mut points = 0;
    let mut seed = test.seed;
    while points < test.points {
        eprintln!("crash test of {}: seed {seed:#x}, {points} points so far", test.stack);
        let whole = run(test, seed, None);
        assert!(whole.boundaries > 0, "the workload writes");
        for cut in 0..whole.boundaries {
            let case = std::panic::AssertUnwindSafe(|| run(test, seed, Some(cut)));
            if let Err(panic) = std::panic::catch_unwind(case) {
                eprintln!("crash test of {}: failed at seed {seed:#x}, boundary {cut}", test.stack);
                std::panic::resume_unwind(panic);
            }
            points += 1;
            if points >= test.points {
                break;
            }
        }
        seed = seed.wrapping_add(1);
    }
}
