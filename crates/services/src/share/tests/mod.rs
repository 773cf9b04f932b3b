//! Shares of one disk, each in a graph of its own as in the daemon.

mod bad;
mod buffers;
mod changes;
mod crashes;
mod flushes;
mod groups;
mod refused;
mod saturated;
mod turns;

use std::sync::Arc;

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockSize, Operation, Volume,
    conformance::{self, Bench, Subject, SyncHarness, Wanted},
};

use crate::{
    Node, Reason, Room, Settings, SharedObjects,
    background::Spawner,
    graph::{Graph, GraphError, LeafError, LeafRequest, Leaves, Plan},
    testing::{CrashTest, Kept, Rig, Tearing, crash_test, subject},
};

const SEED: u64 = 0x7368_6172;
/// The longest wait before a hang is called one: far longer than anything takes on a busy machine.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(180);
/// Bytes of an extent in most tests.
const EXTENT: u64 = 16 << 10;

fn memory(bytes: u64) -> Arc<dyn Volume> {
    MemoryVolume::create("disk", bytes, BlockSize::B512).unwrap()
}

/// Whatever the leaf is called: this volume.
struct Below(Arc<dyn Volume>);

impl Leaves for Below {
    fn open(&self, _: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        Ok(Arc::clone(&self.0))
    }
}

/// A disk in force, and what makes volumes of it.
struct Pool {
    shared: SharedObjects,
    disk: Graph,
    kept: Arc<Kept>,
}

impl Pool {
    fn open(leg: &Arc<dyn Volume>, stack: &str, reason: Reason) -> Result<Self, GraphError> {
        let (shared, kept) = (SharedObjects::default(), Arc::<Kept>::default());
        let disk = make("pool", &format!("{stack} | disk:0"), leg, None, &shared, &kept, reason)?;
        Ok(Self { shared, disk, kept })
    }

    /// A new disk of so many extents, the first one counted.
    fn new(extents: u64) -> Self {
        Self::open(&memory(extents * EXTENT), "disk(extent=16K)", Reason::Create).unwrap()
    }

    fn volume(&self, name: &str, stack: &str, size: Option<u64>, reason: Reason) -> Result<Graph, GraphError> {
        make(name, &format!("{stack} | volume:pool"), self.disk.volume(), size, &self.shared, &self.kept, reason)
    }

    fn create(&self, name: &str, size: u64) -> Graph {
        self.volume(name, "share", Some(size), Reason::Create).unwrap_or_else(|error| panic!("{error}"))
    }

    fn fact(&self, name: &str) -> Option<String> {
        let facts = self.disk.tree().status.expect("a disk has a status").facts;
        facts.into_iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// What a program is told of it.
    fn room(&self) -> (u64, u64) {
        let Room { free, total } = self.disk.tree().status.and_then(|status| status.room).expect("a disk has room");
        (free, total)
    }

    fn command(&self, command: &str, name: &str) -> Result<String, String> {
        let mut arguments = Settings::default();
        arguments.add("name", name);
        self.disk.services("disk")[0].1.command(command, &arguments).map_err(|error| error.to_string())
    }
}

fn make(
    name: &str,
    stack: &str,
    below: &Arc<dyn Volume>,
    size: Option<u64>,
    shared: &SharedObjects,
    kept: &Arc<Kept>,
    reason: Reason,
) -> Result<Graph, GraphError> {
    let node: Node = stack.parse().unwrap_or_else(|error| panic!("{error}"));
    let plan = Plan { volume: name, stack: &node, size, block_size: below.geometry().block_size };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::clone(kept);
    let mut graph = Graph::build(&plan, &Below(Arc::clone(below)), shared, &spawner, None)?;
    graph.mount(reason)?;
    Ok(graph)
}

fn on_bench<T>(graph: &Graph, test: impl FnOnce(&mut Bench<'_>) -> T) -> T {
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED))
}

/// Blocks of a leg for a share that the suite lets grow to three times its size.
fn roomy(blocks: u64, block_size: BlockSize) -> u64 {
    ((blocks << block_size.shift()) * 4).next_multiple_of(1 << 20) >> block_size.shift()
}

fn conforms(stack: &str, make_leg: impl FnMut(Wanted, usize) -> Arc<dyn Volume>) {
    let mut make = subject(stack, 1, roomy, make_leg);
    let mut subject = Subject { formats: false, ..Subject::new(SEED, &mut make) };
    conformance::run(&mut SyncHarness::new(SEED, false), &mut subject);
}

fn leg(wanted: Wanted) -> Arc<dyn Volume> {
    MemoryVolume::create("leg", wanted.blocks << wanted.block_size.shift(), wanted.block_size).unwrap()
}

#[test]
fn it_conforms_with_small_and_large_extents() {
    for stack in ["share | disk(extent=16K) | disk:0", "share(weight=3) | disk(extent=256K, depth=2) | disk:0"] {
        conforms(stack, |wanted, _| leg(wanted));
    }
}

#[test]
fn it_conforms_over_a_saturated_disk_that_holds_writes() {
    for (depth, terms) in [(1, ""), (3, ""), (2, "(min_iops=10, min_bandwidth=1M, latency=1us)")] {
        conforms(&format!("share{terms} | disk(extent=16K, depth={depth}) | disk:0"), |wanted, _| {
            let volume = FaultVolume::new(leg(wanted), SEED);
            volume.hold_writes();
            volume
        });
    }
}

#[test]
fn zeroes_that_are_written_count_their_bytes() {
    let key = concat!("file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key");
    let hidden = format!("disk(extent=16K) | crypt(discard=false, key=\"{key}\")");
    for (stack, written) in [("disk(extent=16K)", 0), (&*hidden, 1024)] {
        let pool = Pool::open(&memory(64 * EXTENT), stack, Reason::Create).unwrap_or_else(|error| panic!("{error}"));
        let graph = pool.create("a", EXTENT);
        let service: Arc<dyn std::any::Any + Send + Sync> = Arc::<dyn crate::Service>::clone(&graph.services("share")[0].1);
        let share = service.downcast::<super::Share>().unwrap();
        let bytes = |operation| share.bytes(operation, millrace_block::BlockCount(2));
        assert_eq!(bytes(Operation::WriteZeroes { fua: false, deallocate: true }), written, "{stack}");
        assert_eq!(bytes(Operation::WriteZeroes { fua: false, deallocate: false }), 1024);
        assert_eq!(bytes(Operation::Deallocate), 0);
    }
}

/// And each gives its turn back: the disk takes one at a time.
#[test]
fn errors_of_the_disk_are_the_guests() {
    crate::testing::each_leg_fails_in_turn("share | disk(extent=16K, depth=1) | disk:0", 1, 1024, Some(128 << 10));
}

#[test]
fn flushed_data_survive_power_cuts() {
    let test = CrashTest::new("share | disk(extent=16K, depth=2) | disk:0", 1);
    crash_test(&CrashTest { blocks: 256, points: 3000, ..test });
}

#[test]
fn flushed_data_survive_power_cuts_of_a_disk_that_tears_blocks() {
    let test = CrashTest::new("share | disk(extent=16K, depth=2) | disk:0", 1);
    crash_test(&CrashTest { blocks: 64, tearing: Tearing::Mixed, steps: 15, points: 400, ..test });
}

#[test]
fn volumes_come_and_go_and_never_show_what_others_left() {
    let pool = Pool::new(9);
    assert_eq!(pool.fact("free").as_deref(), Some("131072 bytes of 131072 bytes"));
    assert_eq!(pool.room(), (8 * EXTENT, 8 * EXTENT));
    let mut a = pool.create("a", 3 * EXTENT);
    let b = pool.create("b", 2 * EXTENT + 512);
    assert_eq!((a.volume().geometry().bytes(), b.volume().usage().allocated), (3 * EXTENT, 3 * EXTENT));
    assert_eq!(pool.room(), (2 * EXTENT, 8 * EXTENT));
    let (in_a, in_b) = (on_bench(&a, |bench| bench.write_random(0, 96)), on_bench(&b, |bench| bench.write_random(0, 65)));
    on_bench(&a, |bench| bench.expect(0, &in_a));
    on_bench(&b, |bench| bench.expect(0, &in_b));
    // A volume grows around another one, and is seen as one all the same.
    a.volume().resize(millrace_block::BlockCount(5 * 32)).unwrap();
    let grown = on_bench(&a, |bench| {
        bench.expect(0, &in_a);
        bench.expect_zeroes(96, 64);
        bench.write_random(80, 80)
    });
    let full = b.volume().resize(millrace_block::BlockCount(4 * 32)).unwrap_err().to_string();
    assert_eq!(full, "volume b: the disk has 0 bytes free, and volume b needs 16384 more");
    // Within its last extent it can grow; what it had there before is gone.
    on_bench(&b, |bench| bench.expect(0, &in_b));
    b.volume().resize(millrace_block::BlockCount(96)).unwrap();
    on_bench(&b, |bench| bench.write_random(65, 31));
    b.volume().resize(millrace_block::BlockCount(70)).unwrap();
    b.volume().resize(millrace_block::BlockCount(90)).unwrap();
    on_bench(&b, |bench| bench.expect_zeroes(70, 20));
    on_bench(&a, |bench| bench.expect(80, &grown));
    a.discard(true);
    assert_eq!((pool.fact("volume a"), pool.room()), (None, (5 * EXTENT, 8 * EXTENT)));
    let c = pool.create("c", 5 * EXTENT);
    on_bench(&c, |bench| bench.expect_zeroes(0, 160));
    on_bench(&b, |bench| bench.expect(0, &in_b));
}

#[test]
fn a_format_erases_this_volume_only() {
    let pool = Pool::new(9);
    let (a, b) = (pool.create("a", 3 * EXTENT), pool.create("b", 2 * EXTENT));
    on_bench(&a, |bench| bench.write_random(0, 96));
    let in_b = on_bench(&b, |bench| bench.write_random(0, 64));
    a.volume().format(BlockSize::B512).unwrap();
    on_bench(&a, |bench| bench.expect_zeroes(0, 96));
    on_bench(&b, |bench| bench.expect(0, &in_b));
    let refused = a.volume().format(BlockSize::B4096).unwrap_err().to_string();
    assert!(refused.contains("it is that of its disk"), "{refused}");
}

#[test]
fn a_disk_grows_and_shrinks_with_its_volumes_in_use() {
    let leg = memory(5 * EXTENT);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let a = pool.create("a", 4 * EXTENT);
    let in_a = on_bench(&a, |bench| bench.write_random(0, 128));
    let blocks = |extents: u64| millrace_block::BlockCount(extents * 32);
    pool.disk.volume().resize(blocks(20)).unwrap();
    assert_eq!(leg.geometry().bytes(), 21 * EXTENT);
    let b = pool.create("b", 10 * EXTENT);
    let refused = pool.disk.volume().resize(blocks(13)).unwrap_err().to_string();
    assert_eq!(refused, "volume pool/disk: its volumes reach to byte 229376: shrink or delete them first");
    pool.disk.volume().resize(blocks(14)).unwrap();
    assert!(b.volume().resize(blocks(11)).is_err());
    on_bench(&a, |bench| bench.expect(0, &in_a));
    drop((a, b, pool));
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Open).unwrap();
    let a = pool.volume("a", "share", None, Reason::Open).unwrap();
    assert_eq!(a.volume().geometry().bytes(), 4 * EXTENT);
    on_bench(&a, |bench| bench.expect(0, &in_a));
    assert_eq!(pool.fact("volume b").unwrap(), "163840 bytes, not in use");
}

#[test]
fn a_format_is_durable_when_it_is_done() {
    let rig = Rig::new(SEED, 1, 9 * (EXTENT >> 9), BlockSize::B512);
    let leg = rig.volumes().remove(0);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let a = pool.create("a", 3 * EXTENT);
    on_bench(&a, |bench| {
        bench.write_random(0, 96);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    a.volume().format(BlockSize::B512).unwrap();
    rig.power.cut_at(0);
    on_bench(&a, |bench| assert!(bench.plain(Operation::Flush, 0, 0).is_err(), "the power is gone"));
    drop((a, pool));
    rig.restart();
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Open).unwrap();
    let a = pool.volume("a", "share", None, Reason::Open).unwrap();
    on_bench(&a, |bench| bench.expect_zeroes(0, 96));
}
