//! Changes that fail late: what the volume had, and what its legs were, is as before, or it is told what is not.

use super::*;
use crate::{LegOrigin, settings::Settings};

const KEY: &str = concat!("file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key");
/// Blocks of a disk.
const BLOCKS: u64 = 16384;
/// Blocks that are written.
const WRITTEN: u64 = 500;

/// A volume with a guest's data on it.
struct Running {
    disks: Vec<Arc<dyn Volume>>,
    graph: Graph,
    switch: Arc<Switch>,
    data: Vec<u8>,
}

impl Running {
    fn new(stack: &str) -> Self {
        let disks = memory(6, BLOCKS);
        let graph = mounted(stack, &disks, None, Reason::Create, &Arc::default());
        let graph = graph.unwrap_or_else(|error| panic!("{stack}: {error}"));
        let switch = Switch::new("test", Arc::clone(graph.volume()));
        let mut running = Self { disks, graph, switch, data: Vec::new() };
        running.data = running.guest(|bench| bench.write_random(0, WRITTEN));
        running
    }

    fn guest<T>(&self, test: impl FnOnce(&mut Bench<'_>) -> T) -> T {
        let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&self.switch);
        test(&mut Bench::new(&mut SyncHarness::new(SEED, false), volume, SEED))
    }

    fn change(&mut self, stack: &str, reformat: bool, refused: Option<&str>) -> Result<(), ChangeFailed> {
        let mut new = beside(&self.graph, &self.disks, stack).unwrap_or_else(|error| panic!("{stack}: {error}"));
        // Its tasks are not run here, and so have ended.
        self.graph.tasks.clear();
        let mut store = || refused.map_or(Ok(()), |why| Err(why.to_owned()));
        change(&self.switch, &mut self.graph, &mut new, terms(&mut store, reformat))?;
        self.graph = new;
        Ok(())
    }

    fn expect_data(&self) {
        self.guest(|bench| bench.expect(0, &self.data));
    }

    fn legs(&self) -> Vec<(String, String)> {
        let facts = self.graph.tree().status.expect("a service").facts;
        facts.into_iter().filter(|(name, _)| name.starts_with("leg ")).collect()
    }
}

fn is_dirty(cache: &Built) -> bool {
    !cache.service.as_ref().expect("a cache").leg_is_whole(1)
}

#[test]
fn a_cache_that_gets_another_one_above_it_goes_on_over_its_own_legs() {
    for reformat in [false, true] {
        let mut running = Running::new("cache(mode=back, line=4K, around=0, disk:0, disk:1)");
        assert!(is_dirty(&running.graph.root), "written back already");
        let stack = "cache(mode=through, line=4K, disk:2, cache(mode=back, line=4K, around=0, rate=8K, disk:0, disk:1))";
        running.change(stack, reformat, None).unwrap();
        assert!(is_dirty(&running.graph.root.legs[1]), "it begins anew");
        running.expect_data();
        // The upper one goes, and the lower one is set otherwise with that.
        running.change("cache(mode=back, line=4K, around=0, rate=4K, disk:0, disk:1)", reformat, None).unwrap();
        assert!(is_dirty(&running.graph.root), "it begins anew");
        running.expect_data();
    }
}

/// Each with a leg replaced, and left out where that can be.
const CHANGES: [(&str, &str, usize); 4] = [
    ("mirror(region=64K, disk:0, disk:1)", "mirror(region=64K, disk:0, disk:3)", 2),
    ("mirror(region=64K, disk:0, disk:1)", "mirror(region=64K, disk:0)", 2),
    ("parity(region=64K, chunk=4K, disk:0, disk:1, disk:2)", "parity(region=64K, chunk=4K, disk:0, disk:3, disk:2)", 3),
    (
        "parity(region=64K, chunk=4K, redundancy=2, disk:0, disk:1, disk:2, disk:4)",
        "parity(region=64K, chunk=4K, redundancy=2, disk:0, disk:3, disk:2, disk:4)",
        4,
    ),
];

#[test]
fn a_change_that_fails_leaves_the_legs_as_they_were() {
    for (stack, next, count) in CHANGES {
        for is_above in [false, true] {
            let mut running = Running::new(stack);
            let legs = running.legs();
            assert!(legs.len() == count && legs.iter().all(|(_, state)| state == "good"), "{stack}: {legs:?}");
            // Twice: the second one finds what the first one has left.
            for _ in 0..2 {
                let failed = if is_above {
                    Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(&running.disks[5]), SEED).write_random(0, 100);
                    running.change(&format!("cache(mode=through, line=4K, disk:5, {next})"), false, None)
                } else {
                    running.change(next, false, Some("no space"))
                };
                let failed = failed.unwrap_err().to_string();
                assert!(failed.contains("no space") || failed.contains("it holds something else"), "{failed}");
                assert_eq!(running.legs(), legs, "{stack}, {next}");
                assert!(running.graph.tree().status.unwrap().progress.is_empty(), "{stack}, {next}");
            }
            running.expect_data();
            // And so the volume does without another one, now and after it was closed.
            running.graph.tasks.clear();
            running.graph.unmount();
            running.disks[0] = memory(1, BLOCKS).remove(0);
            let graph = mounted(stack, &running.disks, None, Reason::Open, &Arc::default());
            running.graph = graph.unwrap_or_else(|error| panic!("{stack}: {error}"));
            running.switch = Switch::new("test", Arc::clone(running.graph.volume()));
            assert_eq!(running.legs()[1], legs[1], "{stack}, {next}");
            running.expect_data();
        }
    }
}

#[test]
fn a_leg_that_was_out_of_use_stays_so_when_a_change_fails() {
    for (stack, next, _) in CHANGES {
        let mut running = Running::new(stack);
        let service = running.graph.root.service.clone().unwrap();
        let mut leg = Settings::default();
        assert!(leg.add("leg", "1"));
        service.command("fail", &leg).unwrap();
        let legs = running.legs();
        assert_eq!(legs[1].1, "failed", "{stack}");
        running.change(next, false, Some("no space")).unwrap_err();
        assert_eq!(running.legs(), legs, "{stack}, {next}");
        running.expect_data();
    }
}

/// The cache wrote its superblock by way of the mirror that was taken back: the leg which that one did without has not got it.
#[test]
fn a_leg_that_missed_what_a_change_wrote_is_filled_when_that_fails() {
    let mut running = Running::new("cache(mode=through, line=4K, mirror(region=64K, disk:0, disk:1), disk:2)");
    let next = "cache(mode=through, line=4K, mirror(region=64K, disk:0), disk:2)";
    running.change(next, false, Some("no space")).unwrap_err();
    let facts = running.graph.root.legs[0].service.as_ref().unwrap().status().facts;
    assert!(facts.contains(&("leg 1".to_owned(), "being filled".to_owned())), "{facts:?}");
    running.expect_data();
}

/// A stack of a mebibyte, over what this one is over.
fn small(stack: &str, disks: &[Arc<dyn Volume>], old: Option<&Graph>) -> Graph {
    let node: Node = stack.parse().unwrap();
    let plan = Plan { volume: "test", stack: &node, size: Some(1 << 20), block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    let built = Graph::build(&plan, &Disks(disks.to_vec()), &SharedObjects::default(), &spawner, old);
    built.unwrap_or_else(|error| panic!("{stack}: {error}"))
}

/// A cache that is in use, and the stack that a change is about to put over its fast leg alone.
fn crypt_over_a_fast_leg() -> (Graph, Arc<Switch>, Graph) {
    let disks = memory(2, BLOCKS);
    let mut old = small("cache(mode=through, line=4K, disk:0, disk:1)", &disks, None);
    old.mount(Reason::Create).unwrap();
    let switch = Switch::new("test", Arc::clone(old.volume()));
    let new = small(&format!("crypt(key={KEY}, disk:1)"), &disks, Some(&old));
    // Its tasks are not run here, and so have ended.
    old.tasks.clear();
    (old, switch, new)
}

#[test]
fn it_is_told_what_a_change_that_failed_has_erased() {
    let (mut old, switch, mut new) = crypt_over_a_fast_leg();
    let mut full = || Err("no space".to_owned());
    let failed = change(&switch, &mut old, &mut new, terms(&mut full, true)).unwrap_err().to_string();
    for says in ["no space", "the volume is not as before", "disk:1: what the volume had there may be gone"] {
        assert!(failed.contains(says), "{failed}");
    }
    assert!(switch.is_untold(), "nor is the guest told");
}

/// Who has dirty lines is asked before anything that comes in is mounted, and erases.
#[test]
fn a_change_that_a_cache_refuses_erases_nothing() {
    let disks = memory(3, BLOCKS);
    let mut old = small("cache(mode=back, line=4K, around=0, disk:0, disk:1)", &disks, None);
    old.mount(Reason::Create).unwrap();
    let switch = Switch::new("test", Arc::clone(old.volume()));
    let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&switch);
    let mut harness = SyncHarness::new(SEED, false);
    let data = Bench::new(&mut harness, Arc::clone(&volume), SEED).write_random(0, WRITTEN);
    let before = Bench::new(&mut harness, Arc::clone(&disks[1]), SEED).read(0, WRITTEN);
    let mut new = small(&format!("cache(mode=back, line=4K, disk:2, crypt(key={KEY}, disk:1))"), &disks, Some(&old));
    // Its tasks are not run here, and so have ended.
    old.tasks.clear();
    let mut store = || Ok(());
    let failed = change(&switch, &mut old, &mut new, terms(&mut store, true)).unwrap_err().to_string();
    assert!(failed.contains("dirty lines are on the fast leg that is to go"), "{failed}");
    Bench::new(&mut harness, Arc::clone(&disks[1]), SEED).expect(0, &before);
    assert!(is_dirty(&old.root) && !switch.is_untold());
    Bench::new(&mut harness, volume, SEED).expect(0, &data);
}

#[test]
fn a_cache_whose_dirty_lines_were_erased_meanwhile_does_not_come_back() {
    let running = Running::new("cache(mode=back, line=4K, around=0, disk:0, disk:1)");
    assert!(is_dirty(&running.graph.root), "written back already");
    let kept = Mount { reason: Reason::Open, legs: vec![LegOrigin::Kept; 2], previous: None, reformat: false };
    let service = running.graph.root.service.clone().unwrap();
    service.unmount().unwrap();
    service.mount(&kept).unwrap();
    running.expect_data();
    service.unmount().unwrap();
    let other = beside(&running.graph, &running.disks, "cache(mode=back, line=4K, disk:0, disk:2)").unwrap();
    let other = other.root.service.clone().unwrap();
    other.mount(&Mount { reason: Reason::Change, legs: vec![LegOrigin::New; 2], previous: None, reformat: true }).unwrap();
    other.unmount().unwrap();
    let refused = service.mount(&kept).unwrap_err().to_string();
    assert!(refused.contains("lines that were not written back"), "{refused}");
    assert_eq!(running.graph.tree().status.unwrap().health, Health::Failed);
}

#[test]
fn a_cache_without_dirty_lines_comes_back_over_a_fast_leg_that_another_one_had() {
    let running = Running::new("cache(mode=through, line=4K, disk:0, disk:1)");
    let service = running.graph.root.service.clone().unwrap();
    service.unmount().unwrap();
    let other = beside(&running.graph, &running.disks, "cache(mode=back, line=4K, around=0, disk:0, disk:2)").unwrap();
    let between = other.root.service.clone().unwrap();
    between.mount(&Mount { reason: Reason::Change, legs: vec![LegOrigin::New; 2], previous: None, reformat: true }).unwrap();
    Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(other.volume()), SEED + 1).write_random(0, WRITTEN);
    between.unmount().unwrap();
    assert!(is_dirty(&other.root), "written back already");
    service.mount(&Mount { reason: Reason::Open, legs: vec![LegOrigin::Kept; 2], previous: None, reformat: false }).unwrap();
    running.expect_data();
}

/// What is left there is nobody's, whatever it is: nothing that was only on the fast leg is lost.
#[test]
fn a_cache_without_dirty_lines_comes_back_over_a_fast_leg_that_is_no_cache_any_more() {
    let running = Running::new("cache(mode=through, line=4K, disk:0, disk:1)");
    let service = running.graph.root.service.clone().unwrap();
    service.unmount().unwrap();
    let other = beside(&running.graph, &running.disks, &format!("crypt(key={KEY}, disk:0)")).unwrap();
    let between = other.root.service.clone().unwrap();
    between.mount(&Mount { reason: Reason::Change, legs: vec![LegOrigin::New], previous: None, reformat: true }).unwrap();
    Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(other.volume()), SEED + 1).write_random(0, WRITTEN);
    between.unmount().unwrap();
    service.mount(&Mount { reason: Reason::Open, legs: vec![LegOrigin::Kept; 2], previous: None, reformat: false }).unwrap();
    running.expect_data();
    assert_eq!(running.graph.tree().status.unwrap().health, Health::Good);
}

/// The header of the other form is on the leg, and what was there is erased: nobody is served in a form that he does not know.
#[test]
fn metadata_that_a_change_to_another_form_has_erased_do_not_come_back_in_that_form() {
    let stack = "metadata(protection=1, disk:0)";
    let mut running = Running::new(stack);
    let form = running.switch.metadata();
    let next = "metadata(protection=2, transfer=extended, disk:0)";
    // Twice: the second one finds what the first one has left.
    for _ in 0..2 {
        let failed = running.change(next, true, Some("no space")).unwrap_err().to_string();
        for says in ["no space", "the volume is not as before", "a change that failed has erased it"] {
            assert!(failed.contains(says), "{failed}");
        }
        assert!(running.switch.is_untold(), "nor is the guest told");
        assert_eq!(running.switch.metadata(), form);
        assert_eq!(running.guest(|bench| bench.write(0, &[1; 512])), Err(BlockError::NotReady));
        assert_eq!(running.graph.tree().status.unwrap().health, Health::Failed);
    }
    running.graph.tasks.clear();
    running.graph.unmount();
    let graph = mounted(stack, &running.disks, None, Reason::Open, &Arc::default()).unwrap();
    assert_eq!(graph.volume().metadata(), form, "a guest may have outlived the restart");
    Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED).expect_zeroes(0, WRITTEN);
}

#[test]
fn metadata_that_a_change_to_another_form_has_erased_can_be_formatted() {
    let stack = "metadata(protection=1, disk:0)";
    let mut running = Running::new(stack);
    let next = "metadata(protection=2, transfer=extended, disk:0)";
    running.change(next, true, Some("no space")).unwrap_err();
    let form = running.graph.volume().metadata();
    running.graph.volume().format(BlockSize::B512).unwrap();
    assert_eq!(running.graph.tree().status.unwrap().health, Health::Good);
    let mut harness = SyncHarness::new(SEED, false);
    let data = Bench::new(&mut harness, Arc::clone(running.graph.volume()), SEED).write_random(0, 50);
    running.graph.tasks.clear();
    running.graph.unmount();
    let graph = mounted(stack, &running.disks, None, Reason::Open, &Arc::default()).unwrap();
    assert_eq!(graph.volume().metadata(), form);
    Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).expect(0, &data);
}

/// Has erased its leg by the time it refuses.
struct Erased(Arc<dyn Volume>);

impl Volume for Erased {
    millrace_block::passes_on!(0);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.0.submit(cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }
}

impl Service for Erased {
    fn mount(&self, _: &Mount) -> Result<(), ServiceError> {
        Err(ServiceError::HalfWay(Box::new(ServiceError::NotNow("no memory".to_owned()))))
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        false
    }

    fn status(&self) -> Status {
        Status::default()
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::Command(command.to_owned()))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}

#[test]
fn it_is_told_what_a_service_has_erased_that_refused_by_itself_then() {
    let (mut old, switch, mut new) = crypt_over_a_fast_leg();
    let crypt = Arc::clone(&new.root);
    new.root = Arc::new(Built {
        node: crypt.node.clone(),
        name: crypt.name.clone(),
        volume: Arc::clone(&crypt.volume),
        tap: Arc::clone(&crypt.tap),
        service: Some(Arc::new(Erased(Arc::clone(&crypt.volume)))),
        legs: crypt.legs.clone(),
        absent: None,
        at_work: Mutex::default(),
    });
    let failed = change(&switch, &mut old, &mut new, terms(&mut || Ok(()), true)).unwrap_err().to_string();
    for says in ["no memory", "disk:1: what the volume had there may be gone"] {
        assert!(failed.contains(says), "{failed}");
    }
    assert!(switch.is_untold(), "nor is the guest told");
}
