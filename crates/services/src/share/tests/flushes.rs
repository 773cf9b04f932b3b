//! What a disk may have lost is told to all whom it concerns.

use std::{sync::atomic::Ordering, thread};

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, BlockError, Lba, Request, Scratch, Switch, TaskContext, conformance::SyncIo};
use millrace_memory::BufferPool;

use super::*;
use crate::testing::waiting::{Gate, come_on, end_all, until};

const REFUSED: Effect = Effect::Fail(BlockError::WriteFault { errno: 5 });
const TOLD: Result<(), BlockError> = Err(BlockError::WriteFault { errno: 0 });
const FLUSH: Request<'static> = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };

/// A disk that can refuse flushes, with a gate below that before those that it takes.
fn gated() -> (Arc<Gate>, Arc<FaultVolume>, Pool) {
    let gate = Gate::before(memory(64 * EXTENT), |operation| operation == Operation::Flush);
    let fault = FaultVolume::new(Arc::<Gate>::clone(&gate), SEED);
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&fault);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    (gate, fault, pool)
}

fn flushed(graph: &Graph) -> Result<(), BlockError> {
    on_bench(graph, |bench| bench.plain(Operation::Flush, 0, 0))
}

fn means(volume: &Arc<dyn Volume>) -> (SyncIo, BufferPool, Scratch) {
    (SyncIo::new(SEED, false).hasty(), BufferPool::new(1).unwrap(), Scratch::new(volume.scratch_bytes()))
}

#[test]
fn a_flush_that_the_disk_refuses_is_told_once_to_each_volume_that_had_written() {
    let fault = FaultVolume::new(memory(64 * EXTENT), SEED);
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&fault);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let [first, second, idle, later] = ["first", "second", "idle", "later"].map(|name| pool.create(name, EXTENT));
    let flush = |graph: &Graph| on_bench(graph, |bench| bench.plain(Operation::Flush, 0, 0));
    let write = |graph: &Graph| on_bench(graph, |bench| _ = bench.write_random(0, 8));
    for graph in [&first, &second, &idle] {
        write(graph);
    }
    flush(&idle).unwrap();
    let refused = BlockError::WriteFault { errno: 5 };
    fault.add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(refused)));
    assert_eq!(flush(&first), Err(refused));
    assert!(second.has_untold() && [&first, &idle, &later].iter().all(|graph| !graph.has_untold()));
    write(&later);
    assert_eq!([&first, &idle, &later].map(flush), [Ok(()); 3]);
    assert_eq!(flush(&second), Err(BlockError::WriteFault { errno: 0 }));
    assert!(!second.has_untold());
    assert_eq!(flush(&second), Ok(()));
}

/// The disk's own table is made durable together with what guests have written.
#[test]
fn a_table_that_the_disk_refuses_is_told_as_well() {
    let fault = FaultVolume::new(memory(64 * EXTENT), SEED);
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&fault);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Create).unwrap();
    let volume = pool.create("volume", EXTENT);
    on_bench(&volume, |bench| _ = bench.write_random(0, 8));
    fault.add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(BlockError::WriteFault { errno: 5 })));
    assert!(pool.volume("other", "share", Some(EXTENT), Reason::Create).is_err());
    let flush = |bench: &mut Bench<'_>| bench.plain(Operation::Flush, 0, 0);
    assert_eq!(on_bench(&volume, flush), Err(BlockError::WriteFault { errno: 0 }));
    assert_eq!(on_bench(&volume, flush), Ok(()));
}

/// To put the table before in its place again takes a while.
#[test]
fn a_table_that_the_disk_refuses_is_known_before_it_is_put_back() {
    let (gate, fault, pool) = gated();
    let [shrunk, other] = ["shrunk", "other"].map(|name| pool.create(name, 2 * EXTENT));
    on_bench(&other, |bench| _ = bench.write_random(0, 8));
    gate.open.store(false, Ordering::Relaxed);
    fault.add(Rule::new(Kind::Flush, When::Nth(1), REFUSED));
    let (before, volume) = (fault.requests(Kind::Flush), Arc::clone(shrunk.volume()));
    let shrinks = thread::spawn(move || volume.resize(BlockCount(32)));
    until("the table before is put back", || fault.requests(Kind::Flush) == before + 2);
    assert!(other.has_untold());
    gate.open.store(true, Ordering::Relaxed);
    assert!(shrinks.join().unwrap().is_err());
    assert_eq!([&other, &other].map(flushed), [TOLD, Ok(())]);
}

/// Beside the table's it would take the disk's error away before anybody has counted that.
#[test]
fn a_guests_flush_waits_for_that_of_the_table() {
    let (gate, fault, pool) = gated();
    let [shrunk, other] = ["shrunk", "other"].map(|name| pool.create(name, 2 * EXTENT));
    gate.open.store(false, Ordering::Relaxed);
    let (before, volume) = (fault.requests(Kind::Flush), Arc::clone(shrunk.volume()));
    let shrinks = thread::spawn(move || volume.resize(BlockCount(32)));
    until("the table is flushed", || fault.requests(Kind::Flush) > before);
    let volume = Arc::clone(other.volume());
    let (io, buffers, scratch) = means(&volume);
    let mut steps = [Some(volume.submit(TaskContext::new(&scratch, &buffers, &io), FLUSH))];
    come_on(&mut steps);
    assert_eq!(fault.requests(Kind::Flush), before + 1);
    gate.open.store(true, Ordering::Relaxed);
    shrinks.join().unwrap().unwrap();
    end_all(&mut steps);
}

/// Flushes that come while the stack of a disk changes wait before its switch, and have nothing there that its table needs.
#[test]
fn a_disk_changes_while_guests_flushes_wait() {
    let mut pool = Pool::new(64);
    let root = Arc::clone(pool.disk.volume());
    let switch = Switch::new("pool", Arc::clone(&root));
    let below: Arc<dyn Volume> = Arc::<Switch>::clone(&switch);
    let graph = make("v", "share | volume:pool", &below, Some(EXTENT), &pool.shared, &pool.kept, Reason::Create).unwrap();
    let volume = Arc::clone(graph.volume());
    let (io, buffers, scratch) = means(&volume);
    let mut steps = [None];
    let changed = switch.change(&root, PATIENCE, || {
        steps[0] = Some(volume.submit(TaskContext::new(&scratch, &buffers, &io), FLUSH));
        come_on(&mut steps);
        assert!(steps[0].is_some(), "it waits");
        pool.disk.unmount();
        pool.disk.mount(Reason::Open)
    });
    changed.unwrap();
    end_all(&mut steps);
}

#[test]
fn a_disk_that_refuses_its_first_flush_is_opened_and_its_volumes_are_told() {
    let (_gate, fault, pool) = gated();
    let a = pool.create("a", EXTENT);
    let data = on_bench(&a, |bench| bench.write_random(0, 8));
    drop((a, pool));
    fault.add(Rule::new(Kind::Flush, When::Nth(1), REFUSED));
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&fault);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Open).unwrap();
    let a = pool.volume("a", "share", None, Reason::Open).unwrap();
    on_bench(&a, |bench| bench.expect(0, &data));
    assert_eq!([&a, &a].map(flushed), [TOLD, Ok(())]);
    // The copy that may not be there is stored again before the other one is replaced.
    let before = fault.requests(Kind::Write);
    let b = pool.create("b", EXTENT);
    assert_eq!(fault.requests(Kind::Write) - before, 3);
    drop((a, b, pool));
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Open).unwrap();
    assert!(pool.fact("volume a").is_some() && pool.fact("volume b").is_some());
}

#[test]
fn who_takes_a_volume_that_could_not_be_released_is_told() {
    let (_gate, fault, pool) = gated();
    let a = pool.create("a", EXTENT);
    on_bench(&a, |bench| _ = bench.write_random(0, 8));
    drop((a, pool));
    fault.add(Rule::new(Kind::Flush, When::Nth(1), REFUSED));
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&fault);
    let pool = Pool::open(&leg, "disk(extent=16K)", Reason::Open).unwrap();
    fault.add(Rule::new(Kind::Write, When::Nth(1), REFUSED));
    assert!(pool.command("release", "a").is_err());
    let a = pool.volume("a", "share(existing=true)", None, Reason::Create).unwrap();
    assert_eq!([&a, &a].map(flushed), [TOLD, Ok(())]);
}

#[test]
fn a_table_that_cannot_be_read_is_no_loss() {
    let (_gate, fault, mut pool) = gated();
    let a = pool.create("a", EXTENT);
    on_bench(&a, |bench| _ = bench.write_random(0, 8));
    pool.disk.unmount();
    fault.add(Rule::new(Kind::Read, When::Always, Effect::Fail(BlockError::ReadFault { errno: 5 })));
    assert!(pool.disk.mount(Reason::Open).is_err());
    fault.clear();
    pool.disk.mount(Reason::Open).unwrap();
    assert!(!a.has_untold());
    assert_eq!(flushed(&a), Ok(()));
}
