//! The move as a whole: requests on both sides of the walk, failures, changes of a running volume, and power cuts.

mod crashes;
mod holes;

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
    thread,
    time::{Duration, Instant},
};

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{
    BlockCount, BlockError, BlockSize, Operation, Scratch, Switch, TaskContext, Volume, VolumeError,
    conformance::{self, Bench, Random, Subject, SyncHarness, SyncIo, Wanted},
};
use millrace_engine::EngineError;
use millrace_memory::BufferPool;

use super::*;
use crate::{
    Node, Reason, SharedObjects,
    background::{Running, Spawner, Stop, Task},
    graph::{ChangeFailed, Graph, Plan as GraphPlan, Terms, change},
    legs,
    service::{Mount, Status},
    testing::{
        Bench as Means, Disks, Formatted, Oracle, Rig, Session, graph,
        waiting::{Gate, PATIENCE, copy_and_write, erase_beside},
    },
};

const SEED: u64 = 0x6d6f_7665;
const STACK: &str = "move(piece=16K, disk:0, disk:1)";

fn memory(wanted: Wanted, leg: usize) -> Arc<dyn Volume> {
    let bytes = wanted.blocks << wanted.block_size.shift();
    MemoryVolume::create(&format!("disk:{leg}"), bytes, wanted.block_size).unwrap()
}

fn small(blocks: u64) -> Wanted {
    Wanted { block_size: BlockSize::B512, blocks, read_only: false }
}

fn memories(count: usize, blocks: u64) -> Vec<Arc<dyn Volume>> {
    (0..count).map(|leg| memory(small(blocks), leg)).collect()
}

/// Two legs of which each can fail.
fn faulty(blocks: u64) -> [Arc<FaultVolume>; 2] {
    [0, 1].map(|leg| FaultVolume::new(memory(small(blocks), leg), SEED + leg as u64))
}

fn volumes(legs: &[Arc<FaultVolume>]) -> Vec<Arc<dyn Volume>> {
    legs.iter().map(|leg| Arc::<FaultVolume>::clone(leg) as _).collect()
}

fn move_of(graph: &Graph) -> Arc<Move> {
    let (_, service) = graph.services(SERVICE).remove(0);
    of_type(&service).expect("a move")
}

/// Does the walk's work on the calling thread, for so many steps at most.
fn walk(moving: &Arc<Move>, steps: usize) {
    let moving = Arc::clone(moving);
    legs::block_on(move |cx| {
        Box::pin(async move {
            for _ in 0..steps {
                match moving.phase() {
                    Phase::Ended => return,
                    _ if moving.mark() < moving.bytes() => {
                        moving.enter(Phase::Copying);
                        moving.step(cx, moving.mark()).await;
                    }
                    Phase::Flushed => return,
                    _ => moving.flush_new(cx).await,
                }
            }
        })
    })
    .unwrap();
}

fn to_the_end(moving: &Arc<Move>) {
    walk(moving, usize::MAX);
}

fn data_of(leg: &Arc<dyn Volume>) -> Vec<u8> {
    legs::read(leg, 0, leg.geometry().bytes() as usize).expect("the leg can be read")
}

fn on_bench<T>(volume: &Arc<dyn Volume>, test: impl FnOnce(&mut Bench<'_>) -> T) -> T {
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(volume), SEED))
}

/// The suite, with the walk so many steps far. Where it ended well, both legs have the same.
fn conforms(steps: usize, mut make_leg: impl FnMut(Wanted, usize) -> Arc<dyn Volume>) {
    let mut made = Vec::new();
    let mut make = |wanted: Wanted| {
        if wanted.read_only {
            return None;
        }
        let legs: Vec<_> = (0..2).map(|leg| make_leg(wanted, leg)).collect();
        let size = Some(wanted.blocks << wanted.block_size.shift());
        let graph = graph(STACK, &legs, size, Reason::Create, &Arc::default()).unwrap();
        let moving = move_of(&graph);
        walk(&moving, steps);
        made.push((moving, legs));
        Some(Arc::clone(graph.volume()))
    };
    let mut subject = Subject { resizes: false, ..Subject::new(SEED, &mut make) };
    conformance::run(&mut SyncHarness::new(SEED, false), &mut subject);
    assert!(!made.is_empty());
    for (moving, legs) in made {
        to_the_end(&moving);
        if moving.failure().is_none() {
            assert!(moving.is_whole() && data_of(&legs[OLD]) == data_of(&legs[NEW]), "the legs differ");
        }
    }
}

#[test]
fn it_conforms_wherever_the_walk_is() {
    for steps in [0, 1, 3, usize::MAX] {
        conforms(steps, memory);
    }
}

#[test]
fn it_conforms_over_disks_that_hold_writes() {
    for steps in [1, usize::MAX] {
        conforms(steps, |wanted, leg| -> Arc<dyn Volume> {
            let volume = FaultVolume::new(memory(wanted, leg), SEED + leg as u64);
            volume.hold_writes();
            volume
        });
    }
}

#[test]
fn it_conforms_when_the_new_leg_fails() {
    for (kind, nth) in [(Kind::Write, 0), (Kind::Write, 40), (Kind::Flush, 2), (Kind::WriteZeroes, 3), (Kind::Compare, 7)] {
        conforms(usize::MAX, |wanted, leg| -> Arc<dyn Volume> {
            let volume = FaultVolume::new(memory(wanted, leg), SEED);
            if leg == NEW {
                let fault = BlockError::WriteFault { errno: 5 };
                volume.add(Rule::new(kind, When::Nth(nth), Effect::Fail(fault)));
            }
            volume
        });
    }
}

/// Requests and the walk, interleaved at random; then both legs have the same.
#[test]
fn both_legs_have_what_was_written_while_they_were_walked_over() {
    for seed in SEED..SEED + 60 {
        eprintln!("seed {seed:#x}");
        let rig = Rig::new(seed, 2, 512, BlockSize::B512);
        // What lay there before.
        legs::write(&rig.volumes()[NEW], 0, vec![0xd1; 512 * 512]).unwrap();
        let means = Means::new(seed);
        let mut volume = graph("move(piece=4K, disk:0, disk:1)", &rig.volumes(), None, Reason::Create, &rig.kept).unwrap();
        let mut oracle = Oracle::new(seed, 512, 512);
        let mut session = Session::new(&means, &rig.kept, seed);
        for _ in 0..40 {
            assert!(oracle.step(&mut session, volume.volume()));
        }
        while progress(&(move_of(&volume) as Arc<dyn Service>)) != Some(Progress::Whole) {
            session.settle(10);
        }
        for _ in 0..10 {
            assert!(oracle.step(&mut session, volume.volume()));
        }
        oracle.check(&mut session, volume.volume());
        assert!(move_of(&volume).is_whole());
        assert!(data_of(&rig.volumes()[OLD]) == data_of(&rig.volumes()[NEW]), "the legs differ");
        volume.tasks.iter().for_each(|(_, tasks)| tasks.tell());
        session.settle(usize::MAX);
        drop(session);
        volume.unmount();
    }
}

#[test]
fn overlapping_writes_in_flight_leave_the_legs_equal() {
    let pair = faulty(1024);
    for leg in &pair {
        // They answer in any order.
        leg.add(Rule::new(Kind::Write, When::OneIn(2), Effect::Delay(Duration::from_micros(10))));
    }
    let volumes = volumes(&pair);
    let graph = graph(STACK, &volumes, None, Reason::Create, &Arc::default()).unwrap();
    let moving = move_of(&graph);
    to_the_end(&moving);
    on_bench(graph.volume(), |bench| {
        for round in 0..200_u64 {
            let jobs: Vec<_> = (0..6_u64)
                .map(|number| {
                    let (lba, count) = (bench.random.below(40), 1 + bench.random.below(150));
                    let segment = bench.memory.segment(number as usize * (1 << 20), count as usize * 512);
                    segment.fill((round * 6 + number) as u8);
                    let write = Operation::Write { fua: false };
                    conformance::Job { segments: vec![segment], ..conformance::Job::new(write, lba, count) }
                })
                .collect();
            assert!(bench.jobs(&jobs).iter().all(Result::is_ok));
        }
    });
    assert!(moving.is_whole() && data_of(&volumes[OLD]) == data_of(&volumes[NEW]));
}

#[test]
fn an_error_of_the_new_leg_ends_it_and_is_no_guests() {
    for far in [1, usize::MAX] {
        let pair = faulty(1024);
        let volumes = volumes(&pair);
        let graph = graph(STACK, &volumes, None, Reason::Create, &Arc::default()).unwrap();
        let moving = move_of(&graph);
        walk(&moving, far);
        pair[NEW].add(Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NoSpace)));
        let data = on_bench(graph.volume(), |bench| {
            let data = bench.write_random(0, 300);
            bench.expect(0, &data);
            data
        });
        to_the_end(&moving);
        let service: Arc<dyn Service> = Arc::clone(&moving) as _;
        let Some(Progress::Failed(why)) = progress(&service) else { panic!("{:?}", moving.progress()) };
        assert!(why.contains("disk:1 cannot be written: no space left"), "{why}");
        assert!(!moving.leg_is_whole(NEW) && moving.leg_is_whole(OLD));
        let before = pair[NEW].requests(Kind::Write);
        on_bench(graph.volume(), |bench| drop(bench.write_random(500, 100)));
        assert_eq!(pair[NEW].requests(Kind::Write), before, "it is left alone");
        assert!(data_of(&volumes[OLD])[..data.len()] == data);
    }
}

#[test]
fn a_write_that_the_old_leg_refuses_is_the_guests_error_and_is_walked_over_again() {
    let pair = faulty(1024);
    let volumes = volumes(&pair);
    let graph = graph(STACK, &volumes, None, Reason::Create, &Arc::default()).unwrap();
    let moving = move_of(&graph);
    to_the_end(&moving);
    assert!(moving.is_whole());
    pair[OLD].add(Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })));
    on_bench(graph.volume(), |bench| {
        let segment = bench.memory.segment(0, 512 * 8);
        segment.fill(7);
        let write = Operation::Write { fua: false };
        let job = conformance::Job { segments: vec![segment], ..conformance::Job::new(write, 500, 8) };
        assert_eq!(bench.jobs(&[job])[0], Err(BlockError::WriteFault { errno: 5 }));
    });
    assert!(!moving.is_whole() && moving.failure().is_none(), "nobody knows what is there");
    assert_eq!(moving.mark(), 500 * 512);
    pair[OLD].clear();
    to_the_end(&moving);
    assert!(moving.is_whole() && data_of(&volumes[OLD]) == data_of(&volumes[NEW]));
}

#[test]
fn an_old_leg_that_cannot_be_read_ends_it() {
    let pair = faulty(1024);
    let graph = graph(STACK, &volumes(&pair), None, Reason::Create, &Arc::default()).unwrap();
    let moving = move_of(&graph);
    pair[OLD].add(Rule::new(Kind::Read, When::Nth(2), Effect::Fail(BlockError::ReadFault { errno: 5 })));
    to_the_end(&moving);
    let why = moving.failure().unwrap();
    assert!(why.contains("disk:0 cannot be read at byte"), "{why}");
    assert!(!moving.is_whole());
}

#[test]
fn what_is_there_already_is_not_written_again() {
    let pair = faulty(1024);
    let volumes = volumes(&pair);
    let data = Random::new(SEED).bytes(300 * 512);
    for volume in &volumes {
        legs::write(volume, 0, data.clone()).unwrap();
    }
    legs::write(&volumes[NEW], 256 * 512, vec![0xd1; 512 * 700]).unwrap();
    let before = pair[NEW].requests(Kind::Write);
    let graph = graph(STACK, &volumes, None, Reason::Open, &Arc::default()).unwrap();
    to_the_end(&move_of(&graph));
    assert!(data_of(&volumes[OLD]) == data_of(&volumes[NEW]));
    // One piece begins with data that differ; what is zeroes in OLD is given back.
    assert_eq!(pair[NEW].requests(Kind::Write) - before, 2);
}

/// Tasks end before they begin: the tests do their work.
struct Nowhere;

impl Spawner for Nowhere {
    fn spawn(&self, _: Task, _: Stop, _: Running) -> Result<(), EngineError> {
        Ok(())
    }
}

/// A volume with stacks to come.
struct Live {
    switch: Arc<Switch>,
    graph: Graph,
    disks: Vec<Arc<dyn Volume>>,
    spawner: Arc<dyn Spawner>,
    /// Services of its disks: see [`Terms`].
    below: Vec<Arc<dyn Service>>,
}

impl Live {
    fn new(stack: &str, disks: Vec<Arc<dyn Volume>>) -> Self {
        let spawner: Arc<dyn Spawner> = Arc::new(Nowhere);
        let mut graph = Self::build(stack, &disks, &spawner, None);
        graph.mount(Reason::Create).unwrap();
        let switch = Switch::new("test", Arc::clone(graph.volume()));
        Self { switch, graph, disks, spawner, below: Vec::new() }
    }

    fn build(stack: &str, disks: &[Arc<dyn Volume>], spawner: &Arc<dyn Spawner>, old: Option<&Graph>) -> Graph {
        let node: Node = stack.parse().unwrap();
        let plan = GraphPlan { volume: "test", stack: &node, size: None, block_size: BlockSize::B512 };
        Graph::build(&plan, &Disks(disks.to_vec()), &SharedObjects::default(), spawner, old).unwrap()
    }

    fn change_to(&mut self, stack: &str) -> Result<(), ChangeFailed> {
        let mut new = Self::build(stack, &self.disks, &self.spawner, Some(&self.graph));
        let mut store = || Ok(());
        let (patience, below) = (PATIENCE, &self.below[..]);
        let terms = Terms { patience, reformat: false, scratch: 1 << 20, below, store: &mut store, restore: None };
        change(&self.switch, &mut self.graph, &mut new, terms)?;
        self.graph = new;
        Ok(())
    }

    fn volume(&self) -> Arc<dyn Volume> {
        Arc::<Switch>::clone(&self.switch)
    }
}

/// What is above the move writes its last when it goes out of force: where the new place fails then, the volume stays where it is.
#[test]
fn a_place_that_fails_at_the_last_moment_is_not_moved_to() {
    let pair = faulty(16384);
    let mut running = Live::new("integrity | move(piece=16K, disk:0, disk:1)", volumes(&pair));
    to_the_end(&move_of(&running.graph));
    let data = on_bench(&running.volume(), |bench| bench.write_random(100, 50));
    pair[NEW].add(Rule::new(Kind::Flush, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })));
    let failed = running.change_to("integrity | disk:1").unwrap_err().to_string();
    assert!(failed.contains("the new leg failed"), "{failed}");
    on_bench(&running.volume(), |bench| bench.expect(100, &data));
    running.change_to("integrity | disk:0").unwrap();
    on_bench(&running.volume(), |bench| bench.expect(100, &data));
}

#[test]
fn a_leg_of_any_running_volume_goes_to_another_place() {
    for stack in [
        "?",
        "throttle(iops=1M) | ?",
        "concat(disk:2, ?)",
        "stripe(chunk=4K, ?, disk:2)",
        "integrity | ?",
        "mirror(region=64K, disk:2, ?)",
        "integrity | mirror(region=64K, ?, disk:2)",
        "cache(mode=back, line=4K, disk:2, ?)",
        "parity(chunk=4K, disk:2, ?, disk:3)",
    ] {
        eprintln!("{stack}");
        let with = |leg: &str| stack.replace('?', leg);
        let mut running = Live::new(&with("disk:0"), memories(4, 16384));
        let blocks = running.switch.geometry().blocks.0;
        let mut random = Random::new(SEED);
        let mut model = vec![0; (blocks * 512) as usize];
        let mut write = |running: &Live, model: &mut Vec<u8>| {
            on_bench(&running.volume(), |bench| {
                for _ in 0..20 {
                    let count = 1 + random.below(200);
                    let lba = random.below(blocks - count);
                    let data = bench.write_random(lba, count);
                    model[lba as usize * 512..][..data.len()].copy_from_slice(&data);
                }
            });
        };
        write(&running, &mut model);
        running.change_to(&with("move(piece=16K, disk:0, disk:1)")).unwrap();
        write(&running, &mut model);
        walk(&move_of(&running.graph), 20);
        write(&running, &mut model);
        if !stack.contains("mirror") && !stack.contains("parity") {
            // Not yet. Redundancy would fill it without the move.
            let refused = running.change_to(&with("disk:1")).unwrap_err();
            assert!(matches!(refused, ChangeFailed::OtherData { .. }), "{refused}");
        }
        // At another pace, it goes on where it is.
        let mark = move_of(&running.graph).mark();
        running.change_to(&with("move(rate=1G, piece=16K, disk:0, disk:1)")).unwrap();
        assert_eq!((move_of(&running.graph).mark(), mark > 0), (mark, true));
        to_the_end(&move_of(&running.graph));
        write(&running, &mut model);
        running.change_to(&with("disk:1")).unwrap();
        // Nobody needs it any more.
        legs::write(&running.disks[0], 0, vec![0xd1; 16384 * 512]).unwrap();
        on_bench(&running.volume(), |bench| bench.expect(0, &model));
        write(&running, &mut model);
        on_bench(&running.volume(), |bench| bench.expect(0, &model));
        let tree = serde_json::to_string(&running.graph.tree()).unwrap();
        assert!(!tree.contains("degraded") && !tree.contains("being filled"), "{tree}");
    }
}

#[test]
fn a_migration_that_is_cancelled_leaves_the_old_leg() {
    for stack in ["?", "integrity | ?", "mirror(region=64K, disk:2, ?)"] {
        let with = |leg: &str| stack.replace('?', leg);
        let mut running = Live::new(&with("disk:0"), memories(3, 16384));
        let data = on_bench(&running.volume(), |bench| bench.write_random(100, 3000));
        for steps in [0, 3, usize::MAX] {
            running.change_to(&with("move(disk:0, disk:1)")).unwrap();
            walk(&move_of(&running.graph), steps);
            running.change_to(&with("disk:0")).unwrap();
            legs::write(&running.disks[1], 0, vec![0xd1; 16384 * 512]).unwrap();
            on_bench(&running.volume(), |bench| bench.expect(100, &data));
        }
    }
}

/// What goes shows the data in no leg of its own, or cannot be brought into order: nobody needs it.
#[test]
fn a_migration_leaves_parity_and_comes_to_it_and_away_again() {
    let parity = "parity(chunk=4K, disk:0, disk:1, disk:2)";
    let mut running = Live::new(parity, memories(4, 8192));
    let blocks = running.switch.geometry().blocks.0;
    running.disks[3] = memory(small(blocks), 3);
    let mut data = on_bench(&running.volume(), |bench| bench.write_random(0, blocks.min(4000)));
    running.change_to(&format!("move({parity}, disk:3)")).unwrap();
    to_the_end(&move_of(&running.graph));
    running.change_to("disk:3").unwrap();
    on_bench(&running.volume(), |bench| {
        bench.expect(0, &data);
        data = bench.write_random(0, blocks.min(4000));
    });
    for disk in &running.disks[..3] {
        legs::write(disk, 0, vec![0; 8192 * 512]).unwrap();
    }
    running.change_to(&format!("move(disk:3, {parity})")).unwrap();
    walk(&move_of(&running.graph), 3);
    running.change_to("disk:3").unwrap();
    on_bench(&running.volume(), |bench| bench.expect(0, &data));
}

#[test]
fn a_new_leg_with_services_is_made_for_it() {
    let mut running = Live::new("disk:0", memories(4, 16384));
    // As large as what the mirror keeps for itself leaves.
    let blocks = 16384 - 128;
    running.disks[0] = memory(small(blocks), 0);
    let mut running = Live::new("disk:0", running.disks);
    let data = on_bench(&running.volume(), |bench| bench.write_random(100, 3000));
    running.change_to("move(disk:0, mirror(region=64K, disk:1, disk:2))").unwrap();
    to_the_end(&move_of(&running.graph));
    running.change_to("mirror(region=64K, disk:1, disk:2)").unwrap();
    legs::write(&running.disks[0], 0, vec![0xd1; blocks as usize * 512]).unwrap();
    on_bench(&running.volume(), |bench| bench.expect(100, &data));
}

#[test]
fn nothing_goes_to_a_leg_that_has_not_everything() {
    let mut running = Live::new("disk:0", {
        let pair = faulty(1024);
        pair[NEW].add(Rule::new(Kind::Write, When::Nth(200), Effect::Fail(BlockError::NotReady)));
        volumes(&pair)
    });
    // The other way round it would be empty.
    let refused = running.change_to("move(disk:1, disk:0)").unwrap_err();
    assert!(matches!(refused, ChangeFailed::OtherData { .. }), "{refused}");
    running.change_to("move(disk:0, disk:1)").unwrap();
    to_the_end(&move_of(&running.graph));
    assert!(move_of(&running.graph).is_whole());
    on_bench(&running.volume(), |bench| (0..300).for_each(|lba| drop(bench.write_random(lba, 1))));
    assert!(move_of(&running.graph).failure().is_some());
    let refused = running.change_to("disk:1").unwrap_err();
    assert!(matches!(refused, ChangeFailed::OtherData { .. }), "{refused}");
    running.change_to("disk:0").unwrap();
}

/// As a service it is opened when a change is about to wait for what is in flight.
impl Service for Gate {
    fn mount(&self, _: &Mount) -> Result<(), ServiceError> {
        Ok(())
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn hurry(&self, on: bool) {
        self.open.fetch_or(on, Ordering::Relaxed);
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        true
    }

    fn status(&self) -> Status {
        Status::default()
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::NotNow(command.to_owned()))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}

/// A mirror of a whole migration and disk:2; the disks, and what is below the old one.
fn mirror_of_a_migration() -> (Live, [Arc<FaultVolume>; 2], Arc<Gate>) {
    let gate = Gate::before(memory(small(16384), OLD), |operation| matches!(operation, Operation::Write { .. }));
    let old: Arc<dyn Volume> = Arc::<Gate>::clone(&gate);
    let pair = [FaultVolume::new(old, SEED), FaultVolume::new(memory(small(16384), NEW), SEED + 1)];
    let mut disks = volumes(&pair);
    disks.push(memory(small(16384), 2));
    let mut running = Live::new("mirror(region=64K, disk:0, disk:2)", disks);
    on_bench(&running.volume(), |bench| drop(bench.write_random(0, 3000)));
    running.change_to("mirror(region=64K, move(piece=16K, disk:0, disk:1), disk:2)").unwrap();
    to_the_end(&move_of(&running.graph));
    assert!(move_of(&running.graph).is_whole());
    (running, pair, gate)
}

/// It reads as it should, whichever leg is asked.
fn has_everywhere(running: &Live, lba: u64, data: &[u8]) {
    for _ in 0..20 {
        on_bench(&running.volume(), |bench| bench.expect(lba, data));
    }
}

#[test]
fn a_leg_that_fails_while_the_change_waits_is_not_taken_for_whole() {
    let (mut running, pair, gate) = mirror_of_a_migration();
    gate.open.store(false, Ordering::Relaxed);
    running.below.push(gate);
    pair[NEW].add(Rule::new(Kind::Write, When::Nth(1), Effect::Fail(BlockError::NotReady)));
    let late = {
        let volume = running.volume();
        thread::spawn(move || on_bench(&volume, |bench| bench.write_random(100, 8)))
    };
    let end = Instant::now() + PATIENCE;
    while pair[NEW].faults() == 0 {
        assert!(Instant::now() < end, "the new leg is not written");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(move_of(&running.graph).is_whole(), "the write is under way, and nobody knows yet");
    // What was judged while the write was under way does not count.
    running.change_to("mirror(region=64K, disk:1, disk:2)").unwrap();
    let data = late.join().unwrap();
    has_everywhere(&running, 100, &data);
}

#[test]
fn what_a_migration_has_left_is_not_taken_for_a_good_leg() {
    for cancelled in [false, true] {
        let (mut running, pair, _) = mirror_of_a_migration();
        if cancelled {
            running.change_to("mirror(region=64K, disk:0, disk:2)").unwrap();
        } else {
            pair[NEW].add(Rule::new(Kind::Write, When::Nth(1), Effect::Fail(BlockError::NotReady)));
        }
        let data = on_bench(&running.volume(), |bench| bench.write_random(100, 8));
        assert!(cancelled || move_of(&running.graph).failure().is_some());
        // It has all that the mirror keeps on the leg before, and not the last data.
        running.change_to("mirror(region=64K, disk:1, disk:2)").unwrap();
        has_everywhere(&running, 100, &data);
    }
}

#[test]
fn a_leg_is_as_good_as_it_was_when_something_is_put_over_it() {
    let mut running = Live::new("mirror(region=64K, disk:0, disk:1)", memories(2, 16384));
    let data = on_bench(&running.volume(), |bench| bench.write_random(100, 3000));
    for stack in [
        "mirror(region=64K, throttle(iops=1M, disk:0), disk:1)",
        "mirror(region=64K, throttle(iops=2M, disk:0), meter(disk:1))",
        "mirror(region=64K, disk:0, disk:1)",
    ] {
        running.change_to(stack).unwrap();
        let tree = serde_json::to_string(&running.graph.tree()).unwrap();
        assert!(!tree.contains("degraded") && !tree.contains("being filled"), "{stack}: {tree}");
        has_everywhere(&running, 100, &data);
    }
}

#[test]
fn legs_that_do_not_fit_are_refused() {
    let disks = [memory(small(1024), 0), memory(small(1000), 1), memory(small(1100), 2)];
    let other = memory(Wanted { block_size: BlockSize::B4096, blocks: 128, read_only: false }, 3);
    let refused = |stack: &str, disks: &[Arc<dyn Volume>]| {
        graph(stack, disks, Some(512 << 10), Reason::Create, &Arc::default()).err().unwrap().to_string()
    };
    assert!(
        refused("move(disk:0, disk:1)", &disks)
            .contains("disk:1 is too small: it has 512000 bytes, and what is to go there 524288")
    );
    assert!(refused("move(disk:0, disk:2)", &disks).contains("disk:2 is too large: it has 563200 bytes"));
    assert!(refused("move(disk:0, disk:1)", &[Arc::clone(&disks[0]), other]).contains("blocks"));
    for (stack, why) in [
        ("move(rate=1, null, null)", "rate: at least 4K a second"),
        ("move(piece=5K, null, null)", "piece: a power of two"),
        ("move(null)", "it is over 1 legs; 2 are possible"),
    ] {
        let error = stack.parse::<Node>().unwrap_err().to_string();
        assert!(error.contains(why), "{stack}: {error}");
    }
}

#[test]
fn a_write_needs_no_buffer_of_the_copies_that_wait_for_its_range() {
    let gate = Gate::before(memory(small(4096), OLD), |operation| operation == Operation::Read);
    let old: Arc<dyn Volume> = Arc::<Gate>::clone(&gate);
    let legs = [old, memory(small(4096), NEW)];
    let crypt = concat!("crypt(key=\"file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key\", disk:0)");
    let graph = graph(&format!("move(piece=16K, {crypt}, disk:1)"), &legs, None, Reason::Create, &Arc::default()).unwrap();
    copy_and_write(graph.volume(), &gate, 0, 64, 1);
    // And behind the walk.
    to_the_end(&move_of(&graph));
    copy_and_write(graph.volume(), &gate, 0, 64, 1);
}

/// Where others are always at work a long range is never free as a whole.
#[test]
fn an_erasure_goes_on_beside_who_has_a_part_of_it() {
    let pair = faulty(8192);
    let graph = graph(STACK, &volumes(&pair), None, Reason::Create, &Arc::default()).unwrap();
    let moving = move_of(&graph);
    // Before the walk, and behind it.
    for steps in [0, usize::MAX] {
        walk(&moving, steps);
        on_bench(graph.volume(), |bench| drop(bench.write_random(0, 8192)));
        erase_beside(&moving.ranges, 3 << 20..(3 << 20) + 4096, &pair[OLD], || {
            let zeroes = Operation::WriteZeroes { fua: false, deallocate: true };
            on_bench(graph.volume(), |bench| bench.plain(zeroes, 0, 8192).unwrap());
        });
        on_bench(graph.volume(), |bench| bench.expect_zeroes(0, 8192));
    }
    // What the walk has not come to is given back as the guest says.
    moving.step_back(0);
    let before = pair[OLD].requests(Kind::Deallocate);
    on_bench(graph.volume(), |bench| bench.plain(Operation::Deallocate, 0, 8192).unwrap());
    assert_eq!(pair[OLD].requests(Kind::Deallocate), before + 1);
}

#[test]
fn a_format_that_comes_before_the_walk_does_not_end_it() {
    // It is no whole number of the blocks to come.
    let legs = memories(2, 1023);
    let graph = graph(STACK, &legs, None, Reason::Create, &Arc::default()).unwrap();
    let moving = move_of(&graph);
    on_bench(graph.volume(), |bench| drop(bench.write_random(0, 1023)));
    let last = (1023 << 9) / (16 << 10);
    walk(&moving, last);
    assert_eq!(moving.mark(), last as u64 * (16 << 10));
    let held = moving.ranges.try_lock(moving.mark()..moving.bytes()).unwrap();
    let (io, buffers) = (SyncIo::new(SEED, false).hasty(), BufferPool::new(4).unwrap());
    let scratch = Scratch::new(64 << 10);
    {
        let mut step = pin!(moving.step(TaskContext::new(&scratch, &buffers, &io), moving.mark()));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(step.as_mut().poll(&mut cx).is_pending(), "it waits for the range");
        drop(held);
        moving.format(BlockSize::B4096).unwrap();
        let ended = (0..10_000).any(|_| step.as_mut().poll(&mut cx).is_ready());
        assert!(ended, "the walk goes on");
    }
    assert_eq!(moving.failure(), None);
    to_the_end(&moving);
    assert!(moving.is_whole() && data_of(&legs[OLD]) == data_of(&legs[NEW]));
}

/// A leg whose format erases the first half and then fails.
fn half_erased(leg: &Arc<dyn Volume>) -> Arc<dyn Volume> {
    Formatted::over(leg, |leg, _| {
        legs::write(leg, 0, vec![0; leg.geometry().bytes() as usize / 2]).unwrap();
        Err(VolumeError::Refused { volume: leg.name().to_owned(), why: "it cannot be erased".to_owned() })
    })
}

/// The guest has read what was erased.
#[test]
fn what_a_format_that_failed_has_erased_stays_erased_at_the_new_place() {
    for far in [20, usize::MAX] {
        let mut legs = memories(2, 1024);
        legs[OLD] = half_erased(&legs[OLD]);
        let graph = graph(STACK, &legs, None, Reason::Create, &Arc::default()).unwrap();
        let moving = move_of(&graph);
        let data = on_bench(graph.volume(), |bench| bench.write_random(0, 1024));
        walk(&moving, far);
        assert_eq!(moving.is_whole(), far == usize::MAX);
        let error = moving.format(BlockSize::B512).unwrap_err().to_string();
        assert!(error.contains("cannot be erased"), "{error}");
        assert!(!moving.is_whole() && moving.failure().is_none());
        on_bench(graph.volume(), |bench| bench.expect_zeroes(0, 512));
        to_the_end(&moving);
        assert!(moving.is_whole() && data_of(&legs[OLD]) == data_of(&legs[NEW]));
        assert!(data_of(&legs[NEW])[512 * 512..] == data[512 * 512..]);
    }
}

#[test]
fn a_format_is_of_both_legs() {
    let legs = memories(2, 1024);
    let graph = graph(STACK, &legs, None, Reason::Create, &Arc::default()).unwrap();
    let moving = move_of(&graph);
    on_bench(graph.volume(), |bench| drop(bench.write_random(0, 1000)));
    walk(&moving, 5);
    moving.format(BlockSize::B4096).unwrap();
    assert_eq!((moving.geometry().block_size, moving.mark()), (BlockSize::B4096, 0));
    on_bench(graph.volume(), |bench| drop(bench.write_random(3, 7)));
    to_the_end(&moving);
    assert!(moving.is_whole() && data_of(&legs[OLD]) == data_of(&legs[NEW]));
    assert!(moving.resize(BlockCount(64)).is_err());
}
