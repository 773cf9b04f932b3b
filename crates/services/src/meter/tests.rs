use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    Asker, Switch, Volume,
    clock::SimulatedTime,
    conformance::{self, Bench, Job, Subject, SyncHarness, Wanted},
};

use super::*;
use crate::{
    Node, Reason, SharedObjects,
    background::Spawner,
    graph::{ChangeFailed, Graph, Plan, Terms, change},
    testing::{Disks, Kept, graph, subject},
};

const SEED: u64 = 0x6d65_7465;

fn memory(wanted: Wanted, _: usize) -> Arc<dyn Volume> {
    MemoryVolume::create("leg", wanted.blocks << wanted.block_size.shift(), wanted.block_size).unwrap()
}

#[test]
fn it_conforms() {
    let mut make = subject("meter(tenant=a) | disk:0", 1, |blocks, _| blocks, memory);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
    let faulty = |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED);
        volume.hold_writes();
        volume
    };
    let mut make = subject("meter | disk:0", 1, |blocks, _| blocks, faulty);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn errors_of_the_leg_are_the_guests() {
    crate::testing::each_leg_fails_in_turn("meter(tenant=a) | disk:0", 1, 256, None);
}

#[test]
fn everything_is_counted_once() {
    let leg = memory(Wanted { block_size: BlockSize::B512, blocks: 64, read_only: false }, 0);
    let graph = graph("meter(tenant=\"Ä & Co\") | disk:0", &[leg], None, Reason::Create, &Arc::default()).unwrap();
    let (_, service) = graph.services("meter").remove(0);
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    let data = bench.write_random(0, 3);
    bench.expect(0, &data);
    bench.expect(0, &data);
    for operation in [Operation::Flush, Operation::Deallocate, Operation::WriteZeroes { fua: false, deallocate: true }] {
        bench.job(Job::new(operation, 5, 2)).unwrap();
    }
    assert!(bench.job(Job::new(Operation::Deallocate, 64, 1)).is_err());
    let found = read(&service).unwrap().all;
    let tenant = "Ä & Co".to_owned();
    let expected =
        Reading { tenant, reads: 2, writes: 1, others: 3, read_bytes: 3072, written_bytes: 1536, throttled_us: 0 };
    assert_eq!(found, expected, "a request beyond the end is none");
}

/// Zeroes that take a write's time and room are one.
#[test]
fn zeroes_that_are_written_are_a_write() {
    for (operation, expected) in [
        (Operation::WriteZeroes { fua: false, deallocate: false }, (1, 1024, 0)),
        (Operation::WriteZeroes { fua: false, deallocate: true }, (0, 0, 1)),
        (Operation::Deallocate, (0, 0, 1)),
    ] {
        let leg = memory(Wanted { block_size: BlockSize::B512, blocks: 64, read_only: false }, 0);
        let graph = graph("meter | disk:0", &[leg], None, Reason::Create, &Arc::default()).unwrap();
        let mut harness = SyncHarness::new(SEED, false);
        Bench::new(&mut harness, Arc::clone(graph.volume()), SEED).job(Job::new(operation, 5, 2)).unwrap();
        let all = read(&graph.services("meter")[0].1).unwrap().all;
        assert_eq!((all.writes, all.written_bytes, all.others), expected, "{operation:?}");
    }
}

/// A volume, or what is to follow one, whose services share what those of one daemon do.
fn built(shared: &SharedObjects, leg: &Arc<dyn Volume>, stack: &str, old: Option<&Graph>) -> Graph {
    let node: Node = stack.parse().unwrap();
    let plan = Plan { volume: "v", stack: &node, size: None, block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    Graph::build(&plan, &Disks(vec![Arc::clone(leg)]), shared, &spawner, old).unwrap()
}

fn changed(
    shared: &SharedObjects,
    old: &mut Graph,
    leg: &Arc<dyn Volume>,
    stack: &str,
    stored: bool,
) -> Result<Graph, ChangeFailed> {
    let mut new = built(shared, leg, stack, Some(&*old));
    let switch = Switch::new("v", Arc::clone(old.volume()));
    let mut store = || if stored { Ok(()) } else { Err("no room".to_owned()) };
    let patience = Duration::from_secs(180);
    let terms = Terms { patience, reformat: false, scratch: 1 << 20, below: &[], store: &mut store, restore: None };
    change(&switch, old, &mut new, terms)?;
    Ok(new)
}

fn write(graph: &Graph, writes: usize) {
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    for _ in 0..writes {
        drop(bench.write_random(0, 2));
    }
}

/// One that comes above another, which stays, has counters of its own, and takes nothing of the other's along when it goes.
#[test]
fn each_of_two_meters_counts_once() {
    let shared = SharedObjects::default();
    let leg = memory(Wanted { block_size: BlockSize::B512, blocks: 64, read_only: false }, 0);
    let (lower, both) = ("meter(tenant=b) | disk:0", "meter(tenant=a) | meter(tenant=b) | disk:0");
    let mut one = built(&shared, &leg, lower, None);
    one.mount(Reason::Create).unwrap();
    write(&one, 3);
    let mut two = changed(&shared, &mut one, &leg, both, true).unwrap();
    write(&two, 5);
    let counts = |graph: &Graph| -> Vec<(String, u64)> {
        let readings = graph.services("meter").into_iter().map(|(_, meter)| read(&meter).unwrap().all);
        readings.map(|all| (all.tenant, all.writes)).collect()
    };
    assert_eq!(counts(&two), [("a".to_owned(), 5), ("b".to_owned(), 8)]);
    let last = changed(&shared, &mut two, &leg, lower, true).unwrap();
    throttle::held_in(&shared, "v").add(|nanoseconds| nanoseconds, 7000);
    let all = read(&last.services("meter")[0].1).unwrap().all;
    assert_eq!((all.writes, all.throttled_us), (8, 7));
}

/// Another tenant's meter counts on, and the one before it has what was done to its end.
#[test]
fn what_follows_a_meter_counts_on() {
    let shared = SharedObjects::default();
    let leg = memory(Wanted { block_size: BlockSize::B512, blocks: 64, read_only: false }, 0);
    let mut one = built(&shared, &leg, "meter(tenant=x) | disk:0", None);
    one.mount(Reason::Create).unwrap();
    write(&one, 3);
    let next = "meter(tenant=y) | disk:0";
    assert!(changed(&shared, &mut one, &leg, next, false).is_err());
    write(&one, 1);
    let (_, first) = one.services("meter").remove(0);
    assert_eq!(read(&first).unwrap().all.writes, 4, "a change that comes to nothing changes nothing");
    let two = changed(&shared, &mut one, &leg, next, true).unwrap();
    write(&two, 5);
    let (before, now) = (read(&first).unwrap(), read(&two.services("meter")[0].1).unwrap());
    assert_eq!((before.all.tenant.as_str(), before.all.writes), ("x", 4));
    assert_eq!((now.all.tenant.as_str(), now.all.writes), ("y", 9));
    assert!(before.counted.ptr_eq(&now.counted));
}

/// Each device has a place; one that is gone leaves it to the next, and those that are too many only count among all.
#[test]
fn devices_are_counted_apart() {
    let leg = memory(Wanted { block_size: BlockSize::B512, blocks: 64, read_only: false }, 0);
    let graph = graph("meter | disk:0", &[leg], None, Reason::Create, &Arc::default()).unwrap();
    let (_, service) = graph.services("meter").remove(0);
    let work = |asker: Asker, writes: usize| {
        let before = asker.enter();
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        for _ in 0..writes {
            drop(bench.write_random(0, 2));
        }
        before.enter();
    };
    let look = |of: &[Asker]| {
        let Meters { all, apart, .. } = read(&service).unwrap();
        let found = |asker: &Asker| apart.iter().find(|(of, _)| *of == asker.number()).map(|(_, reading)| reading);
        assert!(of.iter().filter_map(found).all(|reading| reading.written_bytes == reading.writes * 1024));
        (all.writes, of.iter().map(|asker| found(asker).map(|reading| reading.writes)).collect::<Vec<_>>())
    };
    let [one, other] = [Asker::new(), Asker::new()];
    work(one, 1);
    work(other, 2);
    work(Asker::NOBODY, 4);
    assert_eq!(look(&[one, other]), (7, vec![Some(1), Some(2)]));
    // The first one is gone: who comes begins at 0 in its place, and nothing of all is lost.
    one.leave();
    let third = Asker::new();
    work(third, 3);
    work(other, 1);
    assert_eq!(look(&[one, other, third]), (11, vec![None, Some(3), Some(3)]));
    let more: Vec<Asker> = (2..PLACES).map(|_| Asker::new()).collect();
    for asker in &more {
        work(*asker, 1);
    }
    let (all, last) = (11 + more.len() as u64, more[more.len() - 1]);
    assert_eq!(look(&[more[0], last]), (all, vec![Some(1), None]), "the last one found no place");
    // One is free again.
    more[0].leave();
    work(last, 5);
    assert_eq!(look(&[more[0], last]), (all + 5, vec![None, Some(5)]));
}

#[test]
fn a_meter_knows_since_when_it_counts() {
    let time = SimulatedTime::new();
    let leg = memory(Wanted { block_size: BlockSize::B512, blocks: 64, read_only: false }, 0);
    let graph = graph("meter | disk:0", &[leg], None, Reason::Create, &Arc::default()).unwrap();
    let (_, service) = graph.services("meter").remove(0);
    let counted = read(&service).unwrap().counted;
    assert_eq!(age(&counted), Some(Duration::ZERO));
    time.advance_to(clock::now() + 5_000_000_000);
    assert_eq!(age(&counted), Some(Duration::from_secs(5)));
    let other: Arc<dyn Any + Send + Sync> = Arc::new(());
    assert_eq!(age(&Arc::downgrade(&other)), None);
}

#[test]
fn nonsense_is_refused() {
    let refused = |stack: &str| stack.parse::<Node>().unwrap_err().to_string();
    assert!(refused(&format!("meter(tenant={}) | null", "x".repeat(65))).contains("at most 64 characters"));
    assert!(refused("meter(tenants=a) | null").contains("there is no such setting; there are tenant"));
}
