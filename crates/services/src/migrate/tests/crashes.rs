//! Power cuts at every write boundary: during the walk, and before and after the new leg has taken the old one's place.

use millrace_block::conformance::CrashDisk;

use super::{holes::Knowing, *};
use crate::testing::{CrashTest, Tearing, crash_test, every_cut};

const BLOCKS: u64 = 128;
const MOVING: &str = "move(piece=8K, disk:0, disk:1)";

/// Where the volume is, as a daemon would have stored it.
const STACKS: [&str; 3] = ["disk:0", MOVING, "disk:1"];

fn is_whole(graph: &Graph, disks: &[Arc<CrashDisk>]) {
    assert!(move_of(graph).is_whole(), "{:?}", graph.tree());
    let [old, new] = [OLD, NEW].map(|leg| data_of(&(Arc::<CrashDisk>::clone(&disks[leg]) as Arc<dyn Volume>)));
    assert!(old == new, "the legs differ");
}

#[test]
fn a_walk_survives_power_cuts() {
    crash_test(&CrashTest { steps: 12, points: 3000, verify: &is_whole, ..CrashTest::new(MOVING, 2) });
}

#[test]
fn a_walk_over_disks_that_tear_blocks_survives_power_cuts() {
    let (tearing, verify) = (Tearing::Mixed, &is_whole);
    crash_test(&CrashTest { blocks: 32, tearing, steps: 12, points: 500, verify, ..CrashTest::new(MOVING, 2) });
}

/// The disks; every other time they know where they hold nothing.
fn disks(rig: &Rig, seed: u64) -> Vec<Arc<dyn Volume>> {
    let knowing = |disk| -> Arc<dyn Volume> { Arc::new(Knowing(disk)) };
    if seed.is_multiple_of(2) { rig.volumes() } else { rig.volumes().into_iter().map(knowing).collect() }
}

/// A volume that goes through the stacks, and its power.
struct Way<'a> {
    rig: &'a Rig,
    disks: Vec<Arc<dyn Volume>>,
    volume: Graph,
    switch: Arc<Switch>,
    /// Number of its stack.
    at: usize,
}

impl Way<'_> {
    fn open(rig: &Rig, seed: u64, at: usize, reason: Reason) -> Way<'_> {
        let disks = disks(rig, seed);
        let volume = graph(STACKS[at], &disks, None, reason, &rig.kept).unwrap_or_else(|error| panic!("{error}"));
        let switch = Switch::new("test", Arc::clone(volume.volume()));
        Way { rig, disks, volume, switch, at }
    }

    fn shown(&self) -> Arc<dyn Volume> {
        Arc::<Switch>::clone(&self.switch)
    }

    /// Ends the tasks, for whoever is about to change or to close.
    fn rest(&mut self, session: &mut Session<'_>) {
        self.volume.tasks.iter().for_each(|(_, tasks)| tasks.tell());
        session.settle(usize::MAX);
    }

    /// Puts the next stack in the place of the one that is there, if that can be.
    fn go_on(&mut self, session: &mut Session<'_>) {
        let ready = match self.at {
            0 => true,
            1 => move_of(&self.volume).is_whole(),
            _ => false,
        };
        if !ready || self.rig.power.is_gone() {
            return;
        }
        self.rest(session);
        let node: Node = STACKS[self.at + 1].parse().unwrap();
        let plan = GraphPlan { volume: "test", stack: &node, size: None, block_size: BlockSize::B512 };
        let spawner: Arc<dyn Spawner> = Arc::<crate::testing::Kept>::clone(&self.rig.kept);
        let disks = Disks(self.disks.clone());
        let mut new = Graph::build(&plan, &disks, &SharedObjects::default(), &spawner, Some(&self.volume)).unwrap();
        let mut store = || Ok(());
        let patience = std::time::Duration::from_secs(1);
        let terms = Terms { patience, reformat: false, scratch: 1 << 20, below: &[], store: &mut store, restore: None };
        change(&self.switch, &mut self.volume, &mut new, terms).unwrap();
        self.volume = new;
        self.at += 1;
    }

    /// The process dies with what it has in memory.
    fn die(mut self) -> usize {
        self.volume.tasks.clear();
        self.at
    }
}

/// A volume is migrated under load, and the power goes; then it is migrated to the end, and its old leg is spoilt. Returns the write
/// boundaries that there were, and where the cut found it.
fn migrated(seed: u64, cut: u64) -> (u64, usize) {
    let rig = Rig::new(seed, 2, BLOCKS, BlockSize::B512);
    let means = Means::new(seed);
    let mut oracle = Oracle::new(seed, BLOCKS, 512);
    let mut random = Random::new(seed);
    if seed % 4 == 3 {
        // What lay there before.
        legs::write(&rig.volumes()[NEW], 8 * 512, vec![0xd1; 64 * 512]).unwrap();
    }
    let start = rig.power.boundaries();
    let mut way = Way::open(&rig, seed, 0, Reason::Create);
    let mut session = Session::new(&means, &rig.kept, seed);
    rig.power.cut_at(cut);
    for step in 0..20 {
        if step >= 2 && random.below(3) == 0 {
            way.go_on(&mut session);
        }
        let good = oracle.step(&mut session, &way.shown());
        if rig.power.is_gone() {
            break;
        }
        assert!(good, "a request failed without reason");
        session.settle(random.below(20) as usize);
    }
    let boundaries = rig.power.boundaries() - start;
    drop(session);
    let at = way.die();
    rig.restart();
    if at == 2 {
        // It is not asked any more.
        legs::write(&rig.volumes()[OLD], 0, vec![0xd1; BLOCKS as usize * 512]).unwrap();
    }
    let mut way = Way::open(&rig, seed, at, Reason::Open);
    let mut session = Session::new(&means, &rig.kept, seed);
    oracle.check(&mut session, &way.shown());
    while way.at < 2 {
        assert!(oracle.step(&mut session, &way.shown()), "a request failed after the restart");
        session.settle(20);
        way.go_on(&mut session);
    }
    legs::write(&rig.volumes()[OLD], 0, vec![0xd1; BLOCKS as usize * 512]).unwrap();
    oracle.check(&mut session, &way.shown());
    assert!(oracle.step(&mut session, &way.shown()), "a request failed after the migration");
    oracle.check(&mut session, &way.shown());
    way.rest(&mut session);
    drop(session);
    way.volume.unmount();
    (boundaries, at)
}

#[test]
fn a_volume_is_whole_wherever_a_power_cut_finds_its_migration() {
    let mut found = [0; STACKS.len()];
    every_cut("migration and power cut", SEED, 10_000, |seed, cut| {
        let (boundaries, at) = migrated(seed, cut);
        found[at] += 1;
        boundaries
    });
    println!("before the migration, during it, after it: {found:?}");
    assert!(found.iter().all(|points| *points > 500), "{found:?}");
}
