//! Changes whose data may go: what has another leg begins anew, and of a change that fails it is told what became of the graph before it.

use super::*;

const BLOCKS: u64 = 2000;
const KEY: &str = concat!("file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key");

fn read(bench: &mut Bench<'_>) -> Result<(), BlockError> {
    let segment = bench.memory.segment(0, bench.block());
    bench.moving(Operation::Read, 0, &[segment])
}

/// The new leg has chunks of the old one: its header, or none, and blocks that belong to other checksums and keys.
#[test]
fn a_service_over_a_leg_that_is_another_one_in_part_begins_anew() {
    let services = ["integrity(".to_owned(), format!("crypt(key={KEY}, "), format!("crypt(mode=authenticated, key={KEY}, ")];
    for (service, has_zeroes) in services.iter().zip([true, false, true]) {
        for legs in ["disk:0, disk:2", "disk:2, disk:1"] {
            let stack = |legs: &str| format!("{service}stripe(chunk=64K, {legs}))");
            let disks = memory(3, 65536);
            let mut old = mounted(&stack("disk:0, disk:1"), &disks, None, Reason::Create, &Arc::default()).unwrap();
            let switch = Switch::new("test", Arc::clone(old.volume()));
            let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&switch);
            let mut harness = SyncHarness::new(SEED, false);
            let before = Bench::new(&mut harness, Arc::clone(&volume), SEED).write_random(0, BLOCKS);
            let mut new = beside(&old, &disks, &stack(legs)).unwrap();
            // Its tasks are not run here, and so have ended.
            old.tasks.clear();
            let changed = change(&switch, &mut old, &mut new, terms(&mut || Ok(()), true));
            changed.unwrap_or_else(|error| panic!("{service}{legs}: {error}"));
            let mut bench = Bench::new(&mut harness, volume, SEED);
            let found = bench.read(0, BLOCKS);
            assert!(found.chunks(512).zip(before.chunks(512)).all(|(found, before)| found != before), "{service}{legs}");
            assert!(!has_zeroes || found.iter().all(|byte| *byte == 0), "{service}{legs}");
            let data = bench.write_random(100, 900);
            drop(bench);
            new.tasks.clear();
            new.unmount();
            let graph = mounted(&stack(legs), &disks, None, Reason::Open, &Arc::default()).unwrap();
            let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
            bench.expect(0, &found[..100 * 512]);
            bench.expect(100, &data);
            bench.expect(1000, &found[1000 * 512..]);
        }
    }
}

/// What came first overwrote the header, and then the change could not be stored.
#[test]
fn integrity_whose_header_is_gone_answers_nobody_until_it_is_formatted() {
    let disks = memory(1, 4096);
    // What fits beside crypt's header as well.
    let size = Some(1 << 20);
    let mut old = mounted("integrity(disk:0)", &disks, size, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(old.volume()));
    let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&switch);
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    bench.write_random(0, 100);
    let node: Node = format!("crypt(key={KEY}, disk:0)").parse().unwrap();
    let plan = Plan { volume: "test", stack: &node, size, block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    let built = Graph::build(&plan, &Disks(disks.clone()), &SharedObjects::default(), &spawner, Some(&old));
    let mut new = built.unwrap();
    // Its tasks are not run here, and so have ended.
    old.tasks.clear();
    let mut full = || Err("no space".to_owned());
    let failed = change(&switch, &mut old, &mut new, terms(&mut full, true)).err().unwrap().to_string();
    for says in ["no space", "the volume is not as before", "it has no integrity header"] {
        assert!(failed.contains(says), "{failed}");
    }
    assert_eq!(read(&mut bench), Err(BlockError::NotReady));
    assert_eq!(bench.write(0, &[1; 512]), Err(BlockError::NotReady), "nobody would find it again");
    assert_eq!(old.tree().status.unwrap().health, Health::Failed);
    old.volume().format(BlockSize::B512).unwrap();
    assert_eq!(old.tree().status.unwrap().health, Health::Good);
    let data = bench.write_random(50, 10);
    drop(bench);
    old.tasks.clear();
    old.unmount();
    let graph = mounted("integrity(disk:0)", &disks, size, Reason::Open, &Arc::default()).unwrap();
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    bench.expect_zeroes(0, 50);
    bench.expect(50, &data);
}
