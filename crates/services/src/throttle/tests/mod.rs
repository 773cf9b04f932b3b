mod promise;

use std::{thread, time::Instant};

use millrace_backends::{MemoryVolume, NullVolume, fault::FaultVolume};
use millrace_block::{
    BlockSize, ShardSlot, Volume,
    conformance::{self, Harness, Job, Subject, SyncHarness, Wanted},
};

use super::*;
use crate::{
    Node, Reason, SharedObjects,
    graph::{Graph, GraphError},
    testing::{CrashTest, Disks, Kept, crash_test, graph, subject},
};

const SEED: u64 = 0x7468_726f;

fn memory(wanted: Wanted, _: usize) -> Arc<dyn Volume> {
    MemoryVolume::create("leg", wanted.blocks << wanted.block_size.shift(), wanted.block_size).unwrap()
}

#[test]
fn errors_of_the_leg_are_the_guests() {
    crate::testing::each_leg_fails_in_turn("throttle(iops=1000000, bandwidth=10G) | disk:0", 1, 256, None);
}

#[test]
fn it_conforms() {
    for stack in ["throttle(iops=100M) | disk:0", "throttle(iops=20K, bandwidth=4G, burst=1ms) | disk:0"] {
        let mut make = subject(stack, 1, |blocks, _| blocks, memory);
        conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
    }
    let faulty = |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED);
        volume.hold_writes();
        volume
    };
    let mut make = subject("throttle(write_bandwidth=2G) | disk:0", 1, |blocks, _| blocks, faulty);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn a_way_to_a_volume_is_as_the_volume() {
    let group = Group::alone("user", &caps("iops=100M"));
    let mut make = |wanted: Wanted| (!wanted.read_only).then(|| limited(&memory(wanted, 0), &group));
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn a_way_counts_bytes_in_the_blocks_that_its_volume_has_now() {
    let volume = memory(Wanted { blocks: 64, block_size: BlockSize::B512, read_only: false }, 0);
    let way = limit::way(&volume, &Group::alone("user", &caps("iops=5")));
    let request = Request { operation: Operation::Write { fua: false }, lba: Lba(0), count: BlockCount(2), segments: &[] };
    let cost = |bytes| Some(Cost { writes: true, bytes });
    assert_eq!(way.cost(&request), cost(1024));
    // By whoever goes straight there.
    volume.format(BlockSize::B4096).unwrap();
    assert_eq!(way.cost(&request), cost(8192));
    // Memory gives blocks back, unless it is not to.
    let erasure = |operation| way.cost(&Request { operation, lba: Lba(0), count: BlockCount(2), segments: &[] });
    assert_eq!(erasure(Operation::WriteZeroes { fua: false, deallocate: false }), cost(8192));
    assert_eq!(erasure(Operation::WriteZeroes { fua: true, deallocate: true }), cost(0));
    assert_eq!(erasure(Operation::Deallocate), cost(0));
}

/// Requests of one block that end within a time, with so many in flight.
fn served(volumes: &[Arc<dyn Volume>], operation: Operation, depth: usize, time: Duration) -> Vec<u64> {
    let memory = conformance::Memory::new(4096);
    let mut job = Job::new(operation, 0, 1);
    if operation.has_data() {
        job.segments = vec![memory.segment(0, 512)];
    }
    let mut harness = SyncHarness::new(SEED, false);
    let start = Instant::now();
    let mut counts = vec![0; volumes.len()];
    while start.elapsed() < time {
        for (volume, count) in volumes.iter().zip(&mut counts) {
            let jobs = vec![job.clone(); depth];
            assert!(harness.run(volume, &jobs).iter().all(Result::is_ok));
            *count += depth as u64;
        }
    }
    counts
}

fn null() -> Arc<dyn Volume> {
    NullVolume::create("null", 1 << 30, BlockSize::B512).unwrap()
}

fn throttled(stack: &str) -> Arc<dyn Volume> {
    Arc::clone(graph(stack, &[null()], None, Reason::Create, &Arc::default()).unwrap().volume())
}

/// The most that a cap lets through in a time: a burst and one request of each client more.
fn tokens(cap: u64, time: Duration) -> u64 {
    u64::try_from(u128::from(cap) * (time.as_micros() + 12_000) / 1_000_000).unwrap() + 4
}

/// The wall clock can only be too fast for us: what is asserted are upper limits.
fn within_cap(stack: &str, operation: Operation, cap: u64) {
    let volume = throttled(stack);
    let start = Instant::now();
    let count = served(std::slice::from_ref(&volume), operation, 4, Duration::from_millis(600))[0];
    let time = start.elapsed();
    let most = tokens(cap, time);
    assert!(count <= most, "{stack}: {count} in {time:?}");
    assert!(count > 0);
}

#[test]
fn caps_hold() {
    within_cap("throttle(iops=200) | disk:0", Operation::Read, 200);
    within_cap("throttle(write_iops=500) | disk:0", Operation::Write { fua: false }, 500);
    within_cap("throttle(bandwidth=102400) | disk:0", Operation::Read, 200);
    within_cap("throttle(iops=5000) | disk:0", Operation::Deallocate, 5000);
}

#[test]
fn what_is_not_capped_is_free() {
    let volume = throttled("throttle(read_iops=1, bandwidth=1) | disk:0");
    let mut harness = SyncHarness::new(SEED, false);
    // At one a second they would take an hour.
    for operation in [Operation::Deallocate, Operation::Flush] {
        let free = vec![Job::new(operation, 0, 1); 4000];
        assert!(harness.run(&volume, &free).iter().all(Result::is_ok));
    }
}

/// Caps as in an expression.
fn caps(text: &str) -> Caps {
    let mut settings = Settings::default();
    let mut words = text.split(", ").filter_map(|word| word.split_once('='));
    assert!(words.all(|(name, value)| settings.add(name, value)));
    Caps::read(&settings).unwrap()
}

/// A volume in force, among what is shared with others.
fn sharing(shared: &SharedObjects, name: &str, stack: &str, leg: Arc<dyn Volume>) -> Result<Graph, GraphError> {
    let node: Node = stack.parse().unwrap();
    let plan = crate::graph::Plan { volume: name, stack: &node, size: None, block_size: BlockSize::B512 };
    let spawner: Arc<dyn crate::background::Spawner> = Arc::<Kept>::default();
    let mut graph = Graph::build(&plan, &Disks(vec![leg]), shared, &spawner, None)?;
    graph.mount(Reason::Create)?;
    Ok(graph)
}

#[test]
fn a_group_has_its_caps_together() {
    let shared = SharedObjects::default();
    let _group = Group::declare(&shared, "gold", None, &caps("iops=400")).unwrap();
    let make = |name: &str| sharing(&shared, name, "throttle(group=gold) | disk:0", null()).unwrap();
    let graphs = ["a", "b"].map(make);
    let volumes: Vec<_> = graphs.iter().map(|graph| Arc::clone(graph.volume())).collect();
    let start = Instant::now();
    let counts = served(&volumes, Operation::Read, 2, Duration::from_millis(500));
    let most = tokens(400, start.elapsed());
    let sum: u64 = counts.iter().sum();
    assert!(sum <= most && counts.iter().all(|count| *count > 0), "{counts:?}");
}

#[test]
fn shards_have_their_caps_together() {
    let volume = throttled("throttle(iops=20K, bandwidth=1G) | disk:0");
    let start = Instant::now();
    let serve = || {
        let _own = ShardSlot::claim();
        served(std::slice::from_ref(&volume), Operation::Read, 4, Duration::from_millis(400))[0]
    };
    let counts: Vec<u64> = thread::scope(|scope| {
        let threads = [0; 4].map(|_| scope.spawn(serve));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let most = tokens(20_000, start.elapsed());
    assert!(counts.iter().sum::<u64>() <= most && counts.iter().all(|count| *count > 0), "{counts:?} of {most}");
}

#[test]
fn waiting_requests_do_not_keep_a_change() {
    let null = null();
    let first = graph("throttle(iops=1) | disk:0", &[Arc::clone(&null)], None, Reason::Create, &Arc::default()).unwrap();
    let (_, service) = first.services("throttle").remove(0);
    let volume = Arc::clone(first.volume());
    let hurry = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        service.hurry(true);
    });
    // At one a second they would take ten minutes.
    let jobs = vec![Job::new(Operation::Deallocate, 0, 1); 600];
    assert!(SyncHarness::new(SEED, false).run(&volume, &jobs).iter().all(Result::is_ok));
    hurry.join().unwrap();
}

#[test]
fn nonsense_is_refused() {
    let refused = |stack: &str| stack.parse::<Node>().unwrap_err().to_string();
    assert!(refused("throttle | null").contains("a throttle needs a cap"));
    assert!(refused("throttle(iops=0) | null").starts_with("stack, column 10: throttle: iops: 1 at least is possible"));
    assert!(refused("throttle(iops=fast) | null").contains("\"fast\" is not a number"));
    assert!(refused("throttle(iops=1, burst=2h) | null").contains("is not a time"));
    assert!(refused("throttle(iops=1, burst=61m) | null").contains("an hour at most"));
    assert!(refused("throttle(burst=1s, group=gold) | null").contains("it is of caps, and there are none"));
    assert!(refused("throttle(bandwidth=99999999999T) | null").contains("is not a size"));
    assert!(refused("throttle(iops=1, null, null)").contains("it is over 2 legs; 1 are possible"));
}

#[test]
fn a_group_must_be_there() {
    let shared = SharedObjects::default();
    let refused = |stack: &str| sharing(&shared, "v", stack, null()).map(|_| ()).unwrap_err().to_string();
    let error = refused("throttle(group=gold) | disk:0");
    assert!(
        error.contains("there is no group gold; \"millrace group create gold\" makes one; with isolation it is at"),
        "{error}"
    );
    let group = Group::declare(&shared, "gold", None, &caps("iops=1K")).unwrap();
    assert!(sharing(&shared, "v", "throttle(iops=1, group=gold) | disk:0", null()).is_ok());
    drop(group);
    assert!(refused("throttle(group=gold) | disk:0").contains("there is no group gold"));
}

#[test]
fn groups_are_within_groups_and_not_without_end() {
    let shared = SharedObjects::default();
    let mut groups: Vec<Arc<Group>> = Vec::new();
    for name in ["daemon", "tenant", "team", "gold"] {
        groups.push(Group::declare(&shared, name, groups.last(), &caps("iops=1K")).unwrap());
    }
    assert!(sharing(&shared, "v", "throttle(iops=1, group=gold) | disk:0", null()).is_ok());
    let deeper = Group::declare(&shared, "silver", groups.last(), &caps("iops=1"));
    assert!(deeper.map(|_| ()).unwrap_err().to_string().contains("4 groups within each other are possible"));
    let stack: Node =
        "throttle(iops=1, group=a) | mirror(throttle(group=b) | null, share(group=c) | volume:pool)".parse().unwrap();
    assert_eq!(groups_of(&stack), ["a", "b", "c"]);
}

#[test]
fn flushed_data_survive_power_cuts() {
    crash_test(&CrashTest { points: 2000, ..CrashTest::new("throttle(iops=10M) | disk:0", 1) });
}
