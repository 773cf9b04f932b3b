mod absent;
mod ahead;
mod anew;
mod back;
mod live;
mod reach;
mod sizes;

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockCount, BlockError, ChangeError, Geometry, Lba, Operation, Request, Scratch, ShardSlot, Step, Switch, TaskContext,
    Usage,
    conformance::{Bench, Memory, SyncHarness, SyncIo},
};
use millrace_memory::BufferPool;

use super::*;
use crate::{
    Reason,
    testing::{Disks, Kept, RandomStacks, graph as mounted, random_stacks, random_stacks_with_errors},
};

const SEED: u64 = 0x6772_6170;

fn memory(count: usize, blocks: u64) -> Vec<Arc<dyn Volume>> {
    (0..count).map(|_| MemoryVolume::create("disk", blocks * 512, BlockSize::B512).unwrap() as _).collect()
}

fn beside(old: &Graph, disks: &[Arc<dyn Volume>], stack: &str) -> Result<Graph, GraphError> {
    let node: Node = stack.parse().unwrap();
    let plan = Plan { volume: "test", stack: &node, size: None, block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    Graph::build(&plan, &Disks(disks.to_vec()), &SharedObjects::default(), &spawner, Some(old))
}

fn terms(store: &mut dyn FnMut() -> Result<(), String>, reformat: bool) -> Terms<'_> {
    Terms { patience: Duration::from_secs(1), reformat, scratch: 1 << 20, below: &[], store, restore: None }
}

#[test]
fn nodes_that_stay_are_kept() {
    let disks = memory(3, 64);
    let old = mounted("concat(stripe(chunk=4K, disk:0, disk:1), disk:2)", &disks, None, Reason::Create, &Arc::default());
    let old = old.unwrap();
    let new = beside(&old, &disks, "concat(disk:2, stripe(chunk=4K, disk:0, disk:1))").unwrap();
    let kept = |one: &Graph, other: &Graph, word: &str| {
        let find = |graph: &Graph| graph.nodes().into_iter().find(|node| node.node.word() == word).unwrap();
        Arc::ptr_eq(&find(one), &find(other))
    };
    assert!(kept(&old, &new, "stripe") && kept(&old, &new, "disk:2") && !kept(&old, &new, "concat"));
    let other = beside(&old, &disks, "concat(stripe(chunk=8K, disk:0, disk:1), disk:2)").unwrap();
    assert!(!kept(&old, &other, "stripe") && kept(&old, &other, "disk:0"));
    let twice = beside(&old, &disks, "stripe(chunk=4K, disk:0, disk:0)").err().unwrap();
    assert_eq!(
        twice.to_string(),
        "stripe.1 (disk:0): disk:0 is a leg already, of stripe.0 (disk:0): a leaf can be used once"
    );
    let missing = beside(&old, &disks, "concat(disk:0, disk:7)").err().unwrap();
    assert_eq!(missing.to_string(), "concat.1 (disk:7): there is no disk:7");
}

#[test]
fn a_change_that_shows_other_data_is_refused_unless_it_is_meant() {
    let disks = memory(2, 64);
    let mut old = mounted("stripe(chunk=4K, disk:0, disk:1)", &disks, None, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(old.volume()));
    let mut store = || Ok(());
    let mut change_to = |old: &mut Graph, stack: &str, reformat| {
        let mut new = beside(old, &disks, stack).unwrap();
        change(&switch, old, &mut new, terms(&mut store, reformat)).map(|_| new)
    };
    let refused = change_to(&mut old, "stripe(chunk=8K, disk:0, disk:1)", false).err().unwrap();
    assert!(refused.to_string().contains("--reformat"), "{refused}");
    let refused = change_to(&mut old, "stripe(chunk=4K, disk:1, disk:0)", false).err().unwrap();
    assert!(matches!(refused, ChangeFailed::OtherData { .. }), "{refused}");
    let refused = change_to(&mut old, "disk:0", true).err().unwrap();
    assert!(matches!(refused, ChangeFailed::Size { old: 65536, new: 32768, .. }), "{refused}");
    assert!(refused.to_string().ends_with("resize it apart from the change"), "{refused}");
    let new = change_to(&mut old, "stripe(chunk=8K, disk:0, disk:1)", true).unwrap();
    assert!(Arc::ptr_eq(&switch.root(), new.volume()));
}

/// No resize helps there, of the volume or of its leg.
#[test]
fn who_does_not_come_or_go_by_a_change_is_told_the_way() {
    let disks = memory(2, 4096);
    let by_migration = "goes by a migration, \"millrace volume migrate NAME --to STACK\"";
    let mut old = mounted("integrity(disk:0)", &disks, None, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(old.volume()));
    let mut new = beside(&old, &disks, "disk:0").unwrap();
    let mut store = || Ok(());
    let refused = change(&switch, &mut old, &mut new, terms(&mut store, false)).err().unwrap().to_string();
    assert!(refused.ends_with(by_migration), "{refused}");
    let plain = mounted("disk:1", &disks, None, Reason::Create, &Arc::default()).unwrap();
    let node: Node = "integrity(disk:1)".parse().unwrap();
    let plan = Plan { volume: "test", stack: &node, size: Some(4096 * 512), block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    let built = Graph::build(&plan, &Disks(disks.clone()), &SharedObjects::default(), &spawner, Some(&plain));
    let refused = built.err().unwrap().to_string();
    assert!(refused.contains("it has 2097152 bytes and ") && refused.ends_with(by_migration), "{refused}");
}

#[test]
fn a_change_that_cannot_be_stored_changes_nothing() {
    let disks = memory(2, 64);
    let mut old = mounted("concat(disk:0, disk:1)", &disks, None, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(old.volume()));
    let mut new = beside(&old, &disks, "stripe(chunk=4K, disk:0, disk:1)").unwrap();
    let mut full = || Err("no space".to_owned());
    let failed = change(&switch, &mut old, &mut new, terms(&mut full, true)).err().unwrap();
    assert!(failed.to_string().contains("no space"), "{failed}");
    assert!(Arc::ptr_eq(&switch.root(), old.volume()));
    let mut harness = SyncHarness::new(SEED, false);
    let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&switch);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    let data = bench.write_random(60, 8);
    bench.expect(60, &data);
}

/// Both legs of a mirror that goes refuse its last flush, and forget what the guest has written.
#[test]
fn what_a_service_that_went_has_not_told_is_told_once() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    let legs: Vec<_> = memory(2, 4096).into_iter().map(|disk| FaultVolume::new(disk, SEED)).collect();
    let mut disks: Vec<Arc<dyn Volume>> = Vec::new();
    for leg in &legs {
        leg.hold_writes();
        disks.push(Arc::<FaultVolume>::clone(leg));
    }
    let mut old = mounted("mirror(disk:0, disk:1)", &disks, None, Reason::Create, &Arc::default()).unwrap();
    disks.push(MemoryVolume::create("disk", old.volume().geometry().bytes(), BlockSize::B512).unwrap());
    let switch = Switch::new("test", Arc::clone(old.volume()));
    let mut harness = SyncHarness::new(SEED, false);
    let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&switch);
    let mut bench = Bench::new(&mut harness, volume, SEED);
    bench.write_random(0, 100);
    for leg in &legs {
        leg.add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(BlockError::WriteFault { errno: 5 })));
    }
    let mut new = beside(&old, &disks, "disk:2").unwrap();
    // Its tasks are not run here, and so have ended.
    old.tasks.clear();
    let mut store = || Ok(());
    change(&switch, &mut old, &mut new, terms(&mut store, true)).unwrap();
    assert!(old.has_untold() && !new.has_untold() && switch.is_untold());
    assert_eq!(bench.plain(Operation::Flush, 0, 0), Err(BlockError::WriteFault { errno: 0 }));
    assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()));
}

/// The leg that is to stay forgets what the guest has written when the mirror goes: only the one that is to go has it.
#[test]
fn a_leg_that_forgets_what_it_has_is_not_gone_on_with_alone() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    for next in ["mirror(disk:0, disk:2)", "mirror(disk:0)"] {
        let legs: Vec<_> = memory(3, 4096).into_iter().map(|disk| FaultVolume::new(disk, SEED)).collect();
        let mut disks: Vec<Arc<dyn Volume>> = Vec::new();
        for leg in &legs {
            leg.hold_writes();
            disks.push(Arc::<FaultVolume>::clone(leg));
        }
        let mut old = mounted("mirror(disk:0, disk:1)", &disks, None, Reason::Create, &Arc::default()).unwrap();
        let switch = Switch::new("test", Arc::clone(old.volume()));
        let mut store = || Ok(());
        let mut change_to = |old: &mut Graph, stack: &str| {
            let mut new = beside(old, &disks, stack).unwrap();
            // Its tasks are not run here, and so have ended.
            old.tasks.clear();
            change(&switch, old, &mut new, terms(&mut store, false)).map(|_| new)
        };
        let mut harness = SyncHarness::new(SEED, false);
        let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&switch);
        let mut bench = Bench::new(&mut harness, volume, SEED);
        let data = bench.write_random(0, 2000);
        legs[0].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(BlockError::WriteFault { errno: 5 })));
        let refused = change_to(&mut old, next).err().unwrap().to_string();
        assert!(refused.starts_with("mirror.0 (disk:0): it failed when the last was written"), "{refused}");
        bench.expect(0, &data);
        assert_eq!(old.tree().status.unwrap().health, Health::Degraded);
        // The other way round it goes.
        let new = change_to(&mut old, "mirror(disk:1, disk:2)").unwrap();
        bench.expect(0, &data);
        assert!(Arc::ptr_eq(&switch.root(), new.volume()));
    }
}

/// A change is refused where they do not end in time; they have been told to, and may be there when others are started.
#[test]
fn tasks_begin_when_those_before_them_have_ended() {
    use crate::background::Stop;
    use std::task::{Context, Waker};
    let disks = memory(1, 64);
    let graph = mounted("throttle(iops=9) | disk:0", &disks, None, Reason::Create, &Arc::default()).unwrap();
    let began = Arc::new(AtomicBool::new(false));
    let work = || {
        let began = Arc::clone(&began);
        let task = Task::new("work", move |_, _| Box::pin(async move { began.store(true, Ordering::Relaxed) }));
        graph.root.in_turn(vec![task])
    };
    let (first, mut second) = (work(), work());
    let (io, buffers, scratch) = (SyncIo::new(SEED, false).hasty(), BufferPool::new(1).unwrap(), Scratch::new(1 << 12));
    let stop = Stop::default();
    stop.set();
    let task = second.pop().expect("one task");
    let mut second = task.begin(TaskContext::new(&scratch, &buffers, &io), stop);
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..100 {
        assert!(second.as_mut().poll(&mut cx).is_pending(), "the first one is there still");
    }
    assert!(!began.load(Ordering::Relaxed));
    drop(first);
    while second.as_mut().poll(&mut cx).is_pending() {}
    assert!(began.load(Ordering::Relaxed));
}

/// Never ends before it is told to.
struct Held {
    volume: Arc<dyn Volume>,
    open: Arc<AtomicBool>,
}

impl Volume for Held {
    fn name(&self) -> &str {
        self.volume.name()
    }

    fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if self.open.load(Ordering::Relaxed) {
            return self.volume.submit(cx, request);
        }
        Step::Wait(cx.scratch.place_future(std::future::pending()))
    }

    fn scratch_bytes(&self) -> usize {
        self.volume.scratch_bytes() + 64
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.volume.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.volume.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.volume.usage()
    }
}

/// Notes what is stored, in order, and how many requests were in flight then.
#[derive(Default)]
struct Stored(Mutex<Vec<String>>);

impl Stored {
    fn change(&self, switch: &Switch, old: &mut Graph, new: &mut Graph, reformat: bool) -> Result<Duration, ChangeFailed> {
        let note = |what: &str| self.0.lock().unwrap().push(format!("{what}, {} in flight", switch.in_flight()));
        let mut store = || {
            note("new");
            Ok(())
        };
        let mut restore = || note("old");
        let patience = Duration::from_millis(20);
        change(
            switch,
            old,
            new,
            Terms { patience, reformat, scratch: 1 << 20, below: &[], store: &mut store, restore: Some(&mut restore) },
        )
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[test]
fn what_keeps_nothing_is_stored_before_the_pause_and_taken_back() {
    let _own = ShardSlot::claim();
    let open = Arc::new(AtomicBool::new(true));
    let held = |volume| Arc::new(Held { volume, open: Arc::clone(&open) }) as Arc<dyn Volume>;
    let disks: Vec<_> = memory(2, 64).into_iter().map(held).collect();
    let mut old = mounted("concat(disk:0, disk:1)", &disks, None, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(old.volume()));
    let stored = Stored::default();
    let (io, buffers, memory) = (SyncIo::new(SEED, false), BufferPool::new(1).unwrap(), Memory::new(512));
    let scratch = Scratch::new(1 << 16);
    let segments = [memory.segment(0, 512)];
    let read = || {
        let request = Request { operation: Operation::Read, lba: Lba(0), count: BlockCount(1), segments: &segments };
        switch.submit(TaskContext::new(&scratch, &buffers, &io), request)
    };
    let throttled = "throttle(iops=9) | concat(disk:0, disk:1)";

    // A request is in flight when the change is stored; it does not end in time, and so the change is taken back.
    open.store(false, Ordering::Relaxed);
    let stuck = read();
    let mut new = beside(&old, &disks, throttled).unwrap();
    let failed = stored.change(&switch, &mut old, &mut new, false).err().unwrap();
    assert!(matches!(failed, ChangeFailed::Switch(ChangeError::Busy { in_flight: 1, .. })), "{failed}");
    assert_eq!(stored.take(), ["new, 1 in flight", "old, 1 in flight"]);

    drop(stuck);
    open.store(true, Ordering::Relaxed);
    let mut new = beside(&old, &disks, throttled).unwrap();
    stored.change(&switch, &mut old, &mut new, false).unwrap();
    assert_eq!(stored.take(), ["new, 0 in flight"]);

    // What arranges its legs is stored when no request goes on: with one that does not end it never is.
    open.store(false, Ordering::Relaxed);
    let mut old = new;
    let stuck = read();
    let mut new = beside(&old, &disks, "throttle(iops=9) | stripe(chunk=4K, disk:0, disk:1)").unwrap();
    let failed = stored.change(&switch, &mut old, &mut new, true).err().unwrap();
    assert!(matches!(failed, ChangeFailed::Switch(ChangeError::Busy { .. })), "{failed}");
    assert!(stored.take().is_empty());
    drop(stuck);
}

/// Leaves in memory, each a new one.
struct InMemory;

impl Leaves for InMemory {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        Ok(MemoryVolume::create(&request.name, request.size.unwrap_or(32 << 10), BlockSize::B512)?)
    }
}

#[test]
fn leaves_that_look_alike_stay_in_their_places() {
    let build_of = |size: u64, old: Option<&Graph>, stack: &str| {
        let node: Node = stack.parse().unwrap();
        let plan = Plan { volume: "test", stack: &node, size: Some(size), block_size: BlockSize::B512 };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
        Graph::build(&plan, &InMemory, &SharedObjects::default(), &spawner, old).unwrap()
    };
    let build = |old: Option<&Graph>, stack: &str| build_of(160 << 10, old, stack);
    let legs =
        |graph: &Graph| graph.leaves().into_iter().map(|(_, leaf)| Arc::as_ptr(&leaf).cast::<()>()).collect::<Vec<_>>();
    let old = build(None, "stripe(chunk=4K, memory, memory, memory, memory, memory)");
    let new = build(Some(&old), "throttle(iops=9) | stripe(chunk=4K, memory, memory, memory, memory, memory)");
    assert_eq!(legs(&old), legs(&new));
    let fewer = build(Some(&new), "concat(memory(size=32K), memory(size=32K), memory(size=96K))");
    assert_eq!(legs(&fewer)[..2], legs(&old)[..2]);
    // The small one comes first and is another one.
    let plain = build_of(64 << 20, None, "memory");
    let fast = build_of(64 << 20, Some(&plain), "cache(mode=through, memory(size=16M), memory)");
    assert!(legs(&fast)[0] != legs(&plain)[0] && legs(&fast)[1] == legs(&plain)[0]);
}

#[test]
fn a_leaf_that_looks_like_the_old_one_does_not_show_its_data() {
    let alone = |stack: &str, size: u64| {
        let node: Node = stack.parse().unwrap();
        let plan = Plan { volume: "test", stack: &node, size: Some(size), block_size: BlockSize::B512 };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
        Graph::build(&plan, &InMemory, &SharedObjects::default(), &spawner, None).unwrap()
    };
    let mut before = alone("memory", 64 << 10);
    let switch = Switch::new("test", Arc::clone(before.volume()));
    let mut store = || Ok(());
    // Built without regard to the old one: its leaf is empty.
    let mut other = alone("throttle(iops=9) | memory", 64 << 10);
    let refused = change(&switch, &mut before, &mut other, terms(&mut store, false)).err().unwrap();
    assert!(matches!(refused, ChangeFailed::OtherData { .. }), "{refused}");
}

#[test]
fn random_stacks_behave_like_a_plain_disk() {
    random_stacks(&RandomStacks { seed: SEED, stacks: 60, steps: 30, crashes: 4 });
}

#[test]
fn random_stacks_over_failing_legs_keep_what_was_flushed_and_hide_what_they_can() {
    random_stacks_with_errors(&RandomStacks { seed: SEED, stacks: 60, steps: 20, crashes: 4 });
}

/// A request that opened several of integrity's groups, each with a page that could not be read at once, took more scratch than was said.
#[test]
fn pages_of_checksums_leave_nothing_in_the_scratch() {
    let disks = [FaultVolume::new(memory(1, 20_000).remove(0), SEED) as Arc<dyn Volume>];
    let mut harness = SyncHarness::new(SEED, false);
    let mut model = Vec::new();
    for reason in [Reason::Create, Reason::Open] {
        let graph = mounted("integrity(disk:0)", &disks, None, reason, &Arc::default()).unwrap();
        // The harness gives each request what the volume asks for, and looks whether it was enough.
        let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        if reason == Reason::Open {
            bench.expect(0, &model);
        }
        model = bench.write_random(0, 16_000);
    }
}

/// Notes where it is read, and what it is told to bring near.
struct Watched {
    volume: Arc<dyn Volume>,
    leg: usize,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    near: Vec<(usize, u64)>,
    read: Vec<(usize, u64)>,
}

impl Volume for Watched {
    fn name(&self) -> &str {
        self.volume.name()
    }

    fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if request.operation == Operation::Read {
            self.seen.lock().unwrap().read.push((self.leg, request.lba.0));
        }
        self.volume.submit(cx, request)
    }

    fn prefetch(&self, lba: Lba, _: BlockCount) -> bool {
        self.seen.lock().unwrap().near.push((self.leg, lba.0));
        true
    }

    fn scratch_bytes(&self) -> usize {
        self.volume.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.volume.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.volume.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.volume.usage()
    }
}

#[test]
fn what_will_be_read_is_brought_near_where_it_is_read() {
    let key = concat!("file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key");
    let crypt = format!("crypt(key={key}, disk:0)");
    let stacks = [
        "disk:0",
        "concat(disk:0, disk:1, disk:2)",
        "stripe(chunk=4K, disk:0, disk:1)",
        "parity(chunk=4K, disk:0, disk:1, disk:2)",
        "throttle(iops=1M, disk:0)",
        "meter(tenant=test, disk:0)",
        &crypt,
    ];
    for stack in stacks {
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let watch = |(leg, volume)| Arc::new(Watched { volume, leg, seen: Arc::clone(&seen) }) as Arc<dyn Volume>;
        let disks: Vec<_> = memory(3, 4096).into_iter().enumerate().map(watch).collect();
        let graph =
            mounted(stack, &disks, None, Reason::Create, &Arc::default()).unwrap_or_else(|error| panic!("{stack}: {error}"));
        // As every named volume is.
        let volume: Arc<dyn Volume> = Switch::new("test", Arc::clone(graph.volume()));
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, Arc::clone(&volume), SEED);
        let blocks = bench.blocks();
        for lba in [0, 1, 8, 9, 100, blocks / 2, blocks - 1] {
            *seen.lock().unwrap() = Seen::default();
            assert!(volume.prefetch(Lba(lba), BlockCount(1)), "{stack}");
            bench.read(lba, 1);
            let seen = seen.lock().unwrap();
            assert_eq!(seen.near, seen.read, "{stack}, block {lba}");
        }
        // Nothing is promised beyond the end, but it is asked for: a guest names any block.
        for lba in [blocks, u64::MAX] {
            let _ = volume.prefetch(Lba(lba), BlockCount(1));
        }
    }
}

#[test]
fn copies_are_settled_late_only_where_nobody_else_could_look_before() {
    let key = concat!("file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key");
    let crypt = format!("crypt(key={key}, disk:0)");
    let stacks = [
        ("disk:0", true),
        ("concat(disk:0, disk:1, disk:2)", true),
        ("stripe(chunk=4K, disk:0, disk:1)", true),
        ("throttle(iops=1M, disk:0)", true),
        ("meter(tenant=test, disk:0)", true),
        ("share(disk(extent=64K, disk:0))", true),
        (&crypt, true),
        ("concat(disk:0, mirror(disk:1, disk:2))", true),
        // Their locks and tables are passed on by ordinary stores, or their legs are worked on beside requests.
        ("parity(chunk=4K, disk:0, disk:1, disk:2)", false),
        ("integrity(disk:0)", false),
        ("cache(mode=through, disk:0, disk:1)", false),
        ("concat(disk:0, integrity(disk:1))", false),
        ("mirror(disk:0, integrity(disk:1))", false),
    ];
    for (stack, late) in stacks {
        let made = mounted(stack, &memory(3, 32768), None, Reason::Create, &Arc::default());
        let graph = made.unwrap_or_else(|error| panic!("{stack}: {error}"));
        assert_eq!(Switch::new("test", Arc::clone(graph.volume())).settles_late(), late, "{stack}");
    }
}

#[test]
fn a_leg_with_a_stated_size_has_what_a_volume_that_has_grown_needs() {
    let key = format!("key=\"file:{}/src/crypt/tests/test.key\"", env!("CARGO_MANIFEST_DIR"));
    for stack in [
        "integrity(memory(size=128K))",
        "metadata(memory(size=128K))",
        "disk(extent=16K, memory(size=64K))",
        &format!("crypt({key}, memory(size=128K))"),
        &format!("crypt({key}, mode=authenticated, memory(size=64M))"),
        "stripe(chunk=4K, memory(size=64K), memory(size=64K))",
        "stripe(chunk=64K, memory(size=64K), memory(size=65K))",
        "mirror(memory(size=64K), memory(size=64K))",
        "concat(memory(size=64K), memory(size=64K))",
    ] {
        let node: Node = stack.parse().unwrap_or_else(|error| panic!("{stack}: {error}"));
        let plan = Plan { volume: "test", stack: &node, size: Some(128 << 20), block_size: BlockSize::B512 };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
        let built = Graph::build(&plan, &InMemory, &SharedObjects::default(), &spawner, None);
        let graph = built.unwrap_or_else(|error| panic!("{stack}: {error}"));
        assert_eq!(graph.volume().geometry().bytes(), 128 << 20, "{stack}");
    }
    // Legs of a stripe that are unequal on purpose stay what they are: their chunks would move.
    let node: Node = "stripe(chunk=4K, memory(size=64K), memory(size=32K))".parse().unwrap();
    let plan = Plan { volume: "test", stack: &node, size: Some(1 << 20), block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    let refused = Graph::build(&plan, &InMemory, &SharedObjects::default(), &spawner, None).err().unwrap().to_string();
    assert_eq!(refused, "stripe: its legs have 98304 bytes together; 1048576 are asked for");
}
