//! Exchanging the key-encryption key under a volume in use, in both modes: when the change does not come into force the old key is good,
//! when it does the new one alone.

use std::{path::Path, sync::Arc, time::Duration};

use millrace_backends::fault::{Effect, FaultVolume, Kind, Rule, When};
use millrace_block::{
    BlockError, BlockSize, Operation, Switch, Volume,
    conformance::{self, SyncHarness, Wanted},
};

use super::{SEED, memory, open};
use crate::{
    Node, Reason, SharedObjects,
    background::Spawner,
    graph::{Graph, Plan, Terms, change},
    legs,
    testing::{Bench, Disks, Kept, Session},
};

const MODES: [&str; 2] = ["xts", "authenticated"];

fn blank() -> Arc<dyn Volume> {
    memory(Wanted { block_size: BlockSize::B512, blocks: 4096, read_only: false }, 0)
}

fn whole(disk: &Arc<dyn Volume>) -> Vec<u8> {
    legs::read(disk, 0, disk.geometry().bytes() as usize).unwrap()
}

fn disk_of(image: &[u8]) -> Arc<dyn Volume> {
    let disk = blank();
    legs::write(&disk, 0, image.to_vec()).unwrap();
    disk
}

/// A volume in use.
struct Used {
    mode: &'static str,
    keys: tempfile::TempDir,
    disk: Arc<dyn Volume>,
    graph: Graph,
    kept: Arc<Kept>,
    switch: Arc<Switch>,
    data: Vec<u8>,
}

impl Used {
    fn new(mode: &'static str) -> Self {
        Self::over(mode, blank())
    }

    fn over(mode: &'static str, disk: Arc<dyn Volume>) -> Self {
        let (keys, kept) = (tempfile::tempdir().unwrap(), Arc::<Kept>::default());
        for key in 0..3 {
            std::fs::write(keys.path().join(key.to_string()), format!("1{key}").repeat(32)).unwrap();
        }
        let stack = stack(mode, &keys.path().join("0"));
        let graph = crate::testing::graph(&stack, std::slice::from_ref(&disk), None, Reason::Create, &kept).unwrap();
        let switch = Switch::new("test", Arc::clone(graph.volume()));
        let mut used = Self { mode, keys, disk, graph, kept, switch, data: Vec::new() };
        used.data = used.bench(|bench| bench.write_random(0, 64));
        used
    }

    fn stack(&self, key: u32) -> String {
        stack(self.mode, &self.keys.path().join(key.to_string()))
    }

    fn bench<T>(&self, work: impl FnOnce(&mut conformance::Bench<'_>) -> T) -> T {
        let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&self.switch);
        work(&mut conformance::Bench::new(&mut SyncHarness::new(SEED, false), volume, SEED))
    }

    fn change(&mut self, key: u32, store: &mut dyn FnMut() -> Result<(), String>) -> Result<(), String> {
        let node: Node = self.stack(key).parse().unwrap();
        let plan = Plan { volume: "test", stack: &node, size: None, block_size: BlockSize::B512 };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::clone(&self.kept);
        let leaves = Disks(vec![Arc::clone(&self.disk)]);
        let mut new = Graph::build(&plan, &leaves, &SharedObjects::default(), &spawner, Some(&self.graph)).unwrap();
        // Its tasks did not run, and so have ended.
        self.kept.forget();
        self.graph.tasks.clear();
        let terms =
            Terms { patience: Duration::from_secs(1), reformat: false, scratch: 1 << 20, below: &[], store, restore: None };
        change(&self.switch, &mut self.graph, &mut new, terms).map_err(|error| error.to_string())?;
        self.graph = new;
        Ok(())
    }

    /// Whether this key opens what lies on a disk; if so, the data are there.
    fn opens(&self, disk: &Arc<dyn Volume>, key: u32) -> bool {
        match open(&self.stack(key), disk, Reason::Open) {
            Ok(mut graph) => {
                let mut harness = SyncHarness::new(SEED, false);
                conformance::Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).expect(0, &self.data);
                graph.tasks.clear();
                true
            }
            Err(error) => {
                assert!(error.contains("does not open it"), "{error}");
                false
            }
        }
    }

    /// The process dies.
    fn kill(&mut self) {
        self.kept.forget();
        self.graph.tasks.clear();
    }
}

fn stack(mode: &str, key: &Path) -> String {
    format!("crypt(mode={mode}, key=\"file:{}\", disk:0)", key.display())
}

#[test]
fn a_key_that_does_not_come_into_force_is_taken_back() {
    for mode in MODES {
        let mut used = Used::new(mode);
        let (disk, mut image) = (Arc::clone(&used.disk), Vec::new());
        let mut full = || {
            image = whole(&disk);
            Err("no room".to_owned())
        };
        let failed = used.change(1, &mut full).unwrap_err();
        assert!(failed.contains("no room"), "{failed}");
        // The process died instead: the old key is good, or the new one when that was stored; the one that came next, alone.
        for (now, other) in [(0, 1), (1, 0)] {
            let disk = disk_of(&image);
            assert!(used.opens(&disk, now) && !used.opens(&disk, other) && used.opens(&disk, now), "{mode}: {now}");
        }
        let data = used.bench(|bench| {
            bench.expect(0, &used.data);
            bench.write_random(9, 3)
        });
        used.data[9 * 512..][..3 * 512].copy_from_slice(&data);
        used.bench(|bench| bench.plain(Operation::Flush, 0, 0)).unwrap();
        used.kill();
        assert!(used.opens(&used.disk, 0) && !used.opens(&used.disk, 1), "{mode}");
    }
}

#[test]
fn a_leg_that_refuses_the_way_back_does_not_lose_the_key_to_the_next_attempt() {
    for mode in MODES {
        let leg = FaultVolume::new(blank(), SEED);
        let mut used = Used::over(mode, Arc::<FaultVolume>::clone(&leg));
        let mut full = || {
            leg.add(Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NoSpace)));
            Err("no room".to_owned())
        };
        used.change(1, &mut full).unwrap_err();
        leg.clear();
        // The newest copy is of the key that did not come into force, and it does not now.
        used.change(1, &mut || Err("no room".to_owned())).unwrap_err();
        used.bench(|bench| bench.expect(0, &used.data));
        used.kill();
        assert!(used.opens(&used.disk, 0) && !used.opens(&used.disk, 1), "{mode}");
    }
}

#[test]
fn the_old_key_opens_nothing_soon_after_the_new_one_is_in_force() {
    for mode in MODES {
        let mut used = Used::new(mode);
        used.change(1, &mut || Ok(())).unwrap();
        used.bench(|bench| bench.expect(0, &used.data));
        let image = whole(&used.disk);
        let bench = Bench::new(SEED);
        let kept = Arc::clone(&used.kept);
        let mut session = Session::new(&bench, &kept, SEED);
        session.settle(1000);
        // Nothing but what lies there counts: the service goes on.
        let disk = disk_of(&whole(&used.disk));
        assert!(!used.opens(&disk, 0) && used.opens(&disk, 1), "{mode}");
        drop(session);
        used.kill();
        // It died before the task had its turn.
        let disk = disk_of(&image);
        assert!(used.opens(&disk, 1) && !used.opens(&disk, 0), "{mode}");
    }
}

#[test]
fn a_key_in_force_outlives_a_next_one_that_is_not() {
    for mode in MODES {
        let mut used = Used::new(mode);
        used.change(1, &mut || Ok(())).unwrap();
        for key in [2, 0] {
            used.change(key, &mut || Err("no room".to_owned())).unwrap_err();
            used.bench(|bench| bench.expect(0, &used.data));
        }
        used.kill();
        assert!(!used.opens(&used.disk, 0) && !used.opens(&used.disk, 2) && used.opens(&used.disk, 1), "{mode}");
    }
}

#[test]
fn a_format_leaves_nothing_for_the_key_before() {
    for mode in MODES {
        let mut used = Used::new(mode);
        used.change(1, &mut || Ok(())).unwrap();
        used.graph.volume().format(BlockSize::B512).unwrap();
        used.data.fill(0);
        used.bench(|bench| bench.expect(0, &used.data));
        used.kill();
        assert!(!used.opens(&used.disk, 0) && used.opens(&used.disk, 1), "{mode}");
    }
}

#[test]
fn a_copy_of_before_is_not_taken_for_one_that_somebody_changed() {
    let region = crate::crypt::authenticated::REGION;
    // In the volume's key, and in the root.
    for at in [60, 175] {
        let mut used = Used::new("authenticated");
        let (disk, mut image) = (Arc::clone(&used.disk), Vec::new());
        let mut full = || {
            image = whole(&disk);
            Err("no room".to_owned())
        };
        used.change(1, &mut full).unwrap_err();
        used.kill();
        let disk = disk_of(&image);
        let found = region.load(&disk).unwrap().unwrap();
        let mut content = found.content;
        content[at] ^= 1;
        region.store(&disk, found.generation, &content).unwrap();
        assert!(!used.opens(&disk, 0), "byte {at}");
    }
}

/// Whether the change goes through or not: what the guest had written and not flushed may be gone, and the leg's next flush succeeds.
#[test]
fn what_a_leg_forgets_within_a_change_is_told_to_the_guest() {
    for mode in MODES {
        for nth in 1.. {
            let leg = FaultVolume::new(blank(), SEED);
            leg.hold_writes();
            let mut used = Used::over(mode, Arc::<FaultVolume>::clone(&leg));
            leg.add(Rule::new(Kind::Flush, When::Nth(nth), Effect::Forget(BlockError::WriteFault { errno: 5 })));
            let _ = used.change(1, &mut || Ok(()));
            let struck = leg.faults() > 0;
            leg.clear();
            let flushes = used.bench(|bench| [0; 2].map(|_| bench.plain(Operation::Flush, 0, 0)));
            let told = if struck { Err(BlockError::WriteFault { errno: 0 }) } else { Ok(()) };
            assert_eq!(flushes, [told, Ok(())], "{mode}, flush {nth}");
            used.kill();
            if !struck {
                assert!(nth > 1, "{mode}: a change flushes");
                break;
            }
        }
    }
}
