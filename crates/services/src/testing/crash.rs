//! Power cuts at every write boundary.

use std::sync::Arc;

use millrace_block::{BlockSize, Volume, conformance::CrashDisk};

use super::{Bench, Oracle, Rig, Session, Tearing, every_cut, graph};
use crate::{
    Reason,
    graph::{Graph, GraphError},
};

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
    /// What is promised of blocks that were not flushed, where disks write less than a block as a whole: 512 bytes of 4096. Blocks are of
    /// [`Self::block_size`] where they do not.
    pub tearing: Tearing,
    /// Steps of the workload, each of some requests together.
    pub steps: usize,
    /// Crash points at least.
    pub points: usize,
    /// Where everything random comes from.
    pub seed: u64,
    /// Turns that background tasks get at most after a restart before everything is checked; the check comes before that as well.
    pub settle: usize,
    /// Every second time the process dies on the way and comes back, which must lose nothing; what the disks had not made durable is still in
    /// their caches.
    pub dies: bool,
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
            tearing: Tearing::Never,
            steps: 30,
            points: 10_000,
            seed: 0x6d69_6c6c_7261_6365,
            settle: 10_000,
            dies: true,
            verify: &|_, _| {},
            view: &Arc::clone,
        }
    }
}

/// A volume in use.
struct Opened<'a> {
    graph: Graph,
    view: Arc<dyn Volume>,
    session: Session<'a>,
}

impl<'a> Opened<'a> {
    fn open(test: &CrashTest<'_>, rig: &Rig, bench: &'a Bench, reason: Reason, seed: u64) -> Result<Self, GraphError> {
        let graph = graph(test.stack, &rig.volumes(), None, reason, &rig.kept)?;
        let view = (test.view)(graph.volume());
        Ok(Self { graph, view, session: Session::new(bench, &rig.kept, seed) })
    }

    /// The process dies with what it has in memory: nothing is unmounted.
    fn die(self, rig: &Rig) {
        let Self { mut graph, view, session } = self;
        drop((session, view));
        graph.tasks.clear();
        drop(graph);
        rig.kept.forget();
    }
}

/// One workload, cut at a boundary. Returns how many it passed before that.
fn run(test: &CrashTest<'_>, seed: u64, cut: u64) -> u64 {
    let rig = if test.tearing == Tearing::Never {
        Rig::new(seed, test.disks, test.blocks, test.block_size)
    } else {
        Rig::torn(seed, test.disks, test.blocks)
    };
    let bench = Bench::new(seed);
    let opened = Opened::open(test, &rig, &bench, Reason::Create, seed);
    let mut opened = Some(opened.unwrap_or_else(|error| panic!("{}: {error}", test.stack)));
    let geometry = opened.as_ref().expect("it was opened").graph.volume().geometry();
    let oracle = Oracle::new(seed, geometry.blocks.0.min(1024), geometry.block_size.bytes() as usize);
    let mut oracle = oracle.torn(test.tearing);
    let start = rig.power.boundaries();
    rig.power.cut_at(cut);
    let death = (test.dies && seed % 2 == 1).then_some(seed / 2 % test.steps as u64);
    for step in 0..test.steps as u64 {
        if death == Some(step) {
            opened.take().expect("it dies once").die(&rig);
            opened = match Opened::open(test, &rig, &bench, Reason::Open, !seed) {
                Ok(opened) => Some(opened),
                Err(_) if rig.power.is_gone() => break,
                Err(error) => panic!("{}: mount after the process died: {error}", test.stack),
            };
            let Opened { view, session, .. } = opened.as_mut().expect("it is open");
            assert!(oracle.expect_last(session, view) || rig.power.is_gone(), "a block cannot be read");
        }
        let Opened { view, session, .. } = opened.as_mut().expect("it is open");
        let good = oracle.step(session, view);
        if rig.power.is_gone() {
            break;
        }
        assert!(good, "a request failed without reason");
    }
    let boundaries = rig.power.boundaries() - start;
    if let Some(opened) = opened {
        opened.die(&rig);
    }
    rig.restart();
    for round in 0..2 {
        let opened = Opened::open(test, &rig, &bench, Reason::Open, seed + round);
        let opened = opened.unwrap_or_else(|error| panic!("{}: mount {round} after the crash: {error}", test.stack));
        let Opened { mut graph, view, mut session } = opened;
        oracle.check(&mut session, &view);
        session.settle_until_done(&graph, test.settle);
        (test.verify)(&graph, &rig.disks);
        // The second time it comes back from an orderly end, where there was nothing to make good.
        if round == 0 {
            oracle.check(&mut session, &view);
            for _ in 0..3 {
                assert!(oracle.step(&mut session, &view), "a request failed after the restart");
            }
            oracle.check(&mut session, &view);
        }
        // This time it ends in an orderly way: tasks are told, and get their turns.
        for (_, tasks) in &graph.tasks {
            tasks.tell();
        }
        session.settle(usize::MAX);
        drop((session, view));
        graph.unmount();
    }
    boundaries
}

/// Cuts the power at every write boundary of random workloads, until there were enough crash points.
///
/// # Panics
/// With the seed and the point, when anything is not as it must be after a crash.
pub fn crash_test(test: &CrashTest<'_>) {
    let what = format!("crash test of {}, blocks torn: {:?}", test.stack, test.tearing);
    every_cut(&what, test.seed, test.points, |seed, cut| run(test, seed, cut));
}
