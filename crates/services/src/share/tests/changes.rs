//! Volumes that go to a disk while their guests are at work.

use std::{
    sync::atomic::Ordering,
    thread::{self, JoinHandle},
    time::Duration,
};

use millrace_backends::fault::Kind;
use millrace_block::{BlockCount, ChangeError, Switch};

use super::*;
use crate::{
    graph::{ChangeFailed, Terms, change},
    testing::waiting::{Gate, until},
};

/// A disk of eleven extents whose clearing waits at the gate, once that is closed; what is in between counts.
fn slow_to_clear() -> (Arc<Gate>, Arc<FaultVolume>, Pool) {
    let gate = Gate::before(memory(12 * EXTENT), |operation| matches!(operation, Operation::WriteZeroes { .. }));
    let medium: Arc<dyn Volume> = Arc::<Gate>::clone(&gate);
    let leg = FaultVolume::new(medium, SEED);
    let below: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&leg);
    let pool = Pool::open(&below, "disk(extent=16K)", Reason::Create).unwrap();
    (gate, leg, pool)
}

/// A volume's own place, at whose gate writes wait.
fn own_place() -> Arc<Gate> {
    Gate::before(memory(4 * EXTENT), |operation| matches!(operation, Operation::Write { .. }))
}

/// The place that a volume comes from, and the disk that it goes to.
struct Places<'a> {
    own: Arc<dyn Volume>,
    pool: &'a Arc<dyn Volume>,
}

impl Leaves for Places<'_> {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        Ok(Arc::clone(if request.leaf.volume().is_some() { self.pool } else { &self.own }))
    }
}

fn build(pool: &Pool, own: &Arc<Gate>, stack: &str, old: Option<&Graph>) -> Graph {
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::clone(&pool.kept);
    let places = Places { own: Arc::<Gate>::clone(own), pool: pool.disk.volume() };
    let node: Node = stack.parse().unwrap_or_else(|error| panic!("{error}"));
    let plan = Plan { volume: "vm", stack: &node, size: Some(4 * EXTENT), block_size: BlockSize::B512 };
    Graph::build(&plan, &places, &pool.shared, &spawner, old).unwrap_or_else(|error| panic!("{error}"))
}

/// A volume in its own place.
fn in_place(pool: &Pool, own: &Arc<Gate>) -> (Graph, Arc<Switch>) {
    let mut graph = build(pool, own, "disk:0", None);
    graph.mount(Reason::Create).unwrap();
    let switch = Switch::new("vm", Arc::clone(graph.volume()));
    (graph, switch)
}

/// The same on its way to the disk.
fn on_its_way(pool: &Pool, own: &Arc<Gate>, old: &Graph) -> Graph {
    build(pool, own, "move(piece=16K, disk:0, share | volume:pool)", Some(old))
}

/// A change that another thread makes: the graph that is in force then, and what became of it.
fn begin(
    switch: &Arc<Switch>,
    mut old: Graph,
    mut new: Graph,
    patience: Duration,
    stored: bool,
) -> JoinHandle<(Graph, Result<(), ChangeFailed>)> {
    let switch = Arc::clone(switch);
    thread::spawn(move || {
        let mut store = || if stored { Ok(()) } else { Err("no space".to_owned()) };
        let terms = Terms { patience, reformat: false, scratch: 1 << 20, below: &[], store: &mut store, restore: None };
        match change(&switch, &mut old, &mut new, terms) {
            Ok(_) => (new, Ok(())),
            Err(error) => (old, Err(error)),
        }
    })
}

fn guest<T>(switch: &Arc<Switch>, test: impl FnOnce(&mut Bench<'_>) -> T) -> T {
    let volume: Arc<dyn Volume> = Arc::<Switch>::clone(switch);
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), volume, SEED))
}

/// A write that is in flight until the gate opens.
fn write_at_the_gate(switch: &Arc<Switch>, own: &Arc<Gate>) -> JoinHandle<Vec<u8>> {
    own.open.store(false, Ordering::Relaxed);
    let volume = Arc::clone(switch);
    let late = thread::spawn(move || guest(&volume, |bench| bench.write_random(0, 8)));
    until("the write begins", || switch.in_flight() > 0);
    late
}

#[test]
fn a_guest_goes_on_while_a_disk_clears_what_its_volume_is_to_have() {
    let (gate, leg, pool) = slow_to_clear();
    let own = own_place();
    let (old, switch) = in_place(&pool, &own);
    let new = on_its_way(&pool, &own, &old);
    let cleared = leg.requests(Kind::WriteZeroes);
    gate.open.store(false, Ordering::Relaxed);
    let changes = begin(&switch, old, new, PATIENCE, true);
    until("the clearing begins", || leg.requests(Kind::WriteZeroes) > cleared);
    let data = guest(&switch, |bench| {
        let data = bench.write_random(0, 128);
        bench.expect(0, &data);
        data
    });
    assert!(!changes.is_finished(), "they were done meanwhile");
    gate.open.store(true, Ordering::Relaxed);
    let (_graph, result) = changes.join().unwrap();
    result.unwrap();
    guest(&switch, |bench| bench.expect(0, &data));
    assert_eq!(pool.fact("volume vm").as_deref(), Some("65536 bytes"));
}

/// It is what another volume grows by, and begins when the one that comes has its room.
#[test]
fn a_pause_does_not_wait_for_what_a_disk_clears() {
    let (gate, leg, pool) = slow_to_clear();
    let b = pool.create("b", EXTENT);
    let own = own_place();
    let (old, switch) = in_place(&pool, &own);
    let new = on_its_way(&pool, &own, &old);
    let late = write_at_the_gate(&switch, &own);
    let changes = begin(&switch, old, new, PATIENCE, true);
    until("it has room", || pool.fact("volume vm").as_deref() == Some("65536 bytes"));
    let cleared = leg.requests(Kind::WriteZeroes);
    gate.open.store(false, Ordering::Relaxed);
    let volume = Arc::clone(b.volume());
    let grows = thread::spawn(move || volume.resize(BlockCount(64)));
    until("the clearing begins", || leg.requests(Kind::WriteZeroes) > cleared);
    own.open.store(true, Ordering::Relaxed);
    let data = late.join().unwrap();
    let (_graph, result) = changes.join().unwrap();
    result.unwrap();
    guest(&switch, |bench| bench.expect(0, &data));
    assert!(!grows.is_finished(), "they were done meanwhile");
    gate.open.store(true, Ordering::Relaxed);
    grows.join().unwrap().unwrap();
}

#[test]
fn what_was_cleared_for_a_change_that_is_not_made_is_given_back() {
    let (_gate, _leg, pool) = slow_to_clear();
    let own = own_place();
    let (old, switch) = in_place(&pool, &own);
    let free = pool.fact("free");
    let is_as_before = || assert_eq!((pool.fact("volume vm"), pool.fact("free")), (None, free.clone()));

    // It gets no pause.
    let late = write_at_the_gate(&switch, &own);
    let new = on_its_way(&pool, &own, &old);
    let (old, result) = begin(&switch, old, new, Duration::ZERO, true).join().unwrap();
    let refused = result.unwrap_err();
    assert!(matches!(refused, ChangeFailed::Switch(ChangeError::Busy { .. })), "{refused}");
    is_as_before();
    own.open.store(true, Ordering::Relaxed);
    let data = late.join().unwrap();

    // It is not stored.
    let new = on_its_way(&pool, &own, &old);
    let (old, result) = begin(&switch, old, new, PATIENCE, false).join().unwrap();
    let refused = result.unwrap_err().to_string();
    assert!(refused.contains("no space"), "{refused}");
    is_as_before();

    let new = on_its_way(&pool, &own, &old);
    let (_graph, result) = begin(&switch, old, new, PATIENCE, true).join().unwrap();
    result.unwrap();
    guest(&switch, |bench| bench.expect(0, &data));
    assert_eq!(pool.fact("volume vm").as_deref(), Some("65536 bytes"));
}
