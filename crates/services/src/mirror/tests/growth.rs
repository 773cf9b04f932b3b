//! A mirror grows: legs that cannot, legs that fail, a power cut at every write boundary, and requests beside it.

use std::sync::{atomic::AtomicU64, mpsc::TryRecvError};

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockError, Lba, Operation, Request, Step, TaskContext, Usage, VolumeError, conformance::Random};

use super::*;
use crate::testing::{Bench as Means, Oracle, Rig, Session, beside, every_cut};

/// The first part of a disk, as a file is that is longer than what it is opened with.
struct Part {
    disk: Arc<dyn Volume>,
    blocks: AtomicU64,
    /// It cannot be longer than this.
    most: u64,
    /// Of a device, which has its length: what it grows by is as it was.
    is_device: bool,
}

impl Part {
    fn new(disk: &Arc<dyn Volume>, blocks: u64, most: u64) -> Arc<Self> {
        Arc::new(Self { disk: Arc::clone(disk), blocks: AtomicU64::new(blocks), most, is_device: false })
    }

    fn of_device(disk: &Arc<dyn Volume>, blocks: u64) -> Arc<dyn Volume> {
        let most = disk.geometry().blocks.0;
        Arc::new(Self { disk: Arc::clone(disk), blocks: AtomicU64::new(blocks), most, is_device: true })
    }
}

/// A disk that cannot be longer.
pub(super) fn of_fixed_size(disk: Arc<dyn Volume>) -> Arc<dyn Volume> {
    let blocks = disk.geometry().blocks.0;
    Arc::new(Part { blocks: AtomicU64::new(blocks), most: blocks, disk, is_device: false })
}

impl Volume for Part {
    fn name(&self) -> &str {
        self.disk.name()
    }

    fn geometry(&self) -> Geometry {
        Geometry { blocks: BlockCount(self.blocks.load(Ordering::Relaxed)), ..self.disk.geometry() }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        match millrace_block::check(&self.geometry(), &request) {
            Err(error) => Step::Done(Err(error)),
            Ok(_) => self.disk.submit(cx, request),
        }
    }

    fn scratch_bytes(&self) -> usize {
        self.disk.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        let before = self.blocks.load(Ordering::Relaxed);
        if blocks.0 > self.most {
            return Err(VolumeError::BadSize { volume: self.name().to_owned(), size: blocks.0 * 512, why: "it is full" });
        }
        if !self.is_device {
            if blocks.0 > before {
                self.disk.resize(BlockCount(before))?;
            }
            self.disk.resize(blocks)?;
        }
        self.blocks.store(blocks.0, Ordering::Relaxed);
        Ok(())
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let bytes = self.geometry().bytes();
        self.disk.format(block_size)?;
        self.blocks.store(bytes >> block_size.shift(), Ordering::Relaxed);
        Ok(())
    }

    fn usage(&self) -> Usage {
        self.disk.usage()
    }
}

/// Parts of disks that hold a mirror of so many blocks of 512 bytes.
fn parts(disks: &[Arc<dyn Volume>], blocks: u64, most: u64) -> Vec<Arc<dyn Volume>> {
    disks.iter().map(|disk| Part::new(disk, leg_blocks(blocks, BlockSize::B512), most) as Arc<dyn Volume>).collect()
}

fn grows(graph: &Graph, blocks: u64) {
    graph.volume().resize(BlockCount(blocks)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(graph.volume().geometry().blocks.0, blocks);
}

fn opens(legs: &[Arc<dyn Volume>], blocks: u64) -> Option<Graph> {
    graph(&stack("region=64K, ", legs.len()), legs, Some(blocks * 512), Reason::Open, &Arc::default()).ok()
}

#[test]
fn what_it_grew_by_is_zeroes_on_all_legs_and_the_old_size_counts_until_it_is_used() {
    // The second leg is longer than need be: its area stays where it is, the first time.
    let disks: Vec<_> =
        [0, 1].map(|leg| memory(Wanted { block_size: BlockSize::B512, blocks: 8192, read_only: false }, leg)).into();
    on_disks_that_hold_rubbish(&disks);
    let legs = |blocks| [Part::of_device(&disks[0], leg_blocks(blocks, BlockSize::B512)), Part::of_device(&disks[1], 2048)];
    let made = graph(&stack("region=64K, ", 2), &legs(1000), Some(1000 * 512), Reason::Create, &Arc::default()).unwrap();
    assert!(resync(&made));
    let mut model = Vec::new();
    on_bench(&made, |bench| model = bench.write_random(0, 1000));
    grows(&made, 1500);
    // Marks, and a leg that fails and comes back, while both sizes can be opened.
    on_bench(&made, |bench| model[..512].copy_from_slice(&bench.write_random(0, 1)));
    drop(made);
    let legs_of_old = legs(1000);
    let old = opens(&legs_of_old, 1000).expect("nobody has used what is new");
    on_bench(&old, |bench| bench.expect(0, &model));
    grows(&old, 1500);
    grows(&old, 1700);
    on_bench(&old, |bench| {
        bench.expect(0, &model);
        bench.expect_zeroes(1000, 700);
        let data = bench.write_random(1100, 600);
        model.resize(1100 * 512, 0);
        model.extend(data);
    });
    assert!(legs_of_old.iter().all(|leg| crate::legs::read(leg, 0, 1700 * 512).unwrap() == model));
    drop(old);
    assert!(opens(&legs(1000), 1000).is_none() && opens(&legs(1500), 1500).is_none(), "these ends are data now");
    let new = opens(&legs(1700), 1700).expect("it has grown");
    on_bench(&new, |bench| bench.expect(0, &model));
    assert_eq!((fact(&new, "leg 0").as_deref(), fact(&new, "leg 1").as_deref()), (Some("good"), Some("good")));
}

#[test]
fn a_growth_that_was_not_used_is_taken_back() {
    let disks: Vec<_> =
        [0, 1].map(|leg| memory(Wanted { block_size: BlockSize::B512, blocks: 1152, read_only: false }, leg)).into();
    let made = open("region=64K, ", &disks, Reason::Create);
    let mut model = Vec::new();
    on_bench(&made, |bench| model = bench.write_random(0, 1024));
    grows(&made, 2048);
    grows(&made, 1024);
    assert!(disks.iter().all(|disk| disk.geometry().blocks.0 == 1152));
    on_bench(&made, |bench| {
        bench.expect(0, &model);
        assert_eq!(bench.plain(Operation::Deallocate, 1024, 1), Err(BlockError::OutOfRange));
    });
    grows(&made, 2048);
    on_bench(&made, |bench| bench.expect_zeroes(2047, 1));
    let refused = made.volume().resize(BlockCount(1024)).unwrap_err();
    assert!(matches!(refused, VolumeError::Unsupported { .. }), "{refused}");
}

#[test]
fn a_leg_that_cannot_grow_leaves_all_as_it_was_and_is_named() {
    let disks: Vec<_> =
        [0, 1].map(|leg| memory(Wanted { block_size: BlockSize::B512, blocks: 1152, read_only: false }, leg)).into();
    let legs: Vec<Arc<dyn Volume>> = vec![Part::new(&disks[0], 1152, 1 << 20), Part::new(&disks[1], 1152, 1500)];
    let made = open("region=64K, ", &legs, Reason::Create);
    let mut model = Vec::new();
    on_bench(&made, |bench| model = bench.write_random(0, 1024));
    let refused = |blocks, what: &str| {
        let error = made.volume().resize(BlockCount(blocks)).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
        assert_eq!(made.volume().geometry().blocks.0, 1024);
        assert!(legs.iter().all(|leg| leg.geometry().blocks.0 == 1152));
    };
    refused(2000, "leg 1 cannot grow, and so no leg did: volume leg1: size of 1089536 bytes is not usable: it is full");
    refused(32256 * 128 + 1, "a volume of this size needs 131072 bytes at least (there are 32256 regions)");
    refused(1040, "it grows by 65536 bytes at least");
    grows(&made, 1300);
    on_bench(&made, |bench| bench.expect(0, &model));
    made.root.service.as_ref().unwrap().command("fail", &arguments(&[("leg", "0")])).unwrap();
    let error = made.volume().resize(BlockCount(1500)).unwrap_err().to_string();
    assert!(error.contains("leg 0 (leg0) is out of use and cannot grow with the others"), "{error}");
}

/// What is on a disk before it is a leg.
fn on_disks_that_hold_rubbish(disks: &[Arc<dyn Volume>]) {
    for (at, disk) in disks.iter().enumerate() {
        crate::legs::write(disk, 0, vec![0x77 + at as u8; (disk.geometry().bytes()) as usize]).unwrap();
    }
}

/// A leg fails between the growth and its first use, and is rebuilt: it has nothing of what lay there before.
#[test]
fn a_leg_that_fails_before_what_is_new_is_used_misses_nothing() {
    let legs = faulty(2, 1024);
    let volumes = volumes(&legs);
    let made = open("region=64K, ", &volumes, Reason::Create);
    let mut model = Vec::new();
    on_bench(&made, |bench| model = bench.write_random(0, 1024));
    grows(&made, 4096);
    legs[1].add(Rule { kinds: vec![], ..Rule::new(Kind::Read, When::Always, Effect::Fail(BlockError::NotReady)) });
    on_bench(&made, |bench| {
        bench.expect_zeroes(1024, 3072);
        model.resize(4096 * 512, 0);
        model[3000 * 512..3001 * 512].copy_from_slice(&bench.write_random(3000, 1));
    });
    assert_eq!(fact(&made, "leg 1").as_deref(), Some("failed"));
    legs[1].clear();
    drop(made);
    let made = opens(&volumes, 4096).expect("one leg is enough");
    made.root.service.as_ref().unwrap().command("rebuild", &arguments(&[("leg", "1")])).unwrap();
    assert!(resync(&made));
    assert_eq!(fact(&made, "leg 1").as_deref(), Some("good"));
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
    drop(made);
    let made = opens(&volumes, 4096).expect("both legs are good");
    assert_eq!(fact(&made, "leg 1").as_deref(), Some("good"));
}

/// A mirror whose leg 0 is being filled, and what it holds.
fn with_one_good_leg() -> (Vec<Arc<FaultVolume>>, Graph, Vec<u8>) {
    let legs = faulty(2, 1024);
    let made = open("region=64K, ", &volumes(&legs), Reason::Create);
    let mut model = Vec::new();
    on_bench(&made, |bench| model = bench.write_random(0, 1024));
    for command in ["fail", "rebuild"] {
        made.root.service.as_ref().unwrap().command(command, &arguments(&[("leg", "0")])).unwrap();
    }
    (legs, made, model)
}

/// The one leg that is good takes data and no table, and the other one both: however often it is tried, the good one is one event behind.
#[test]
fn the_good_leg_refuses_its_tables_while_what_is_new_is_to_be_used() {
    let (legs, made, model) = with_one_good_leg();
    let volumes = volumes(&legs);
    grows(&made, 4096);
    legs[1].add(refuses_tables(&volumes[1]));
    on_bench(&made, |bench| {
        for _ in 0..4 {
            assert!(bench.plain(Operation::WriteZeroes { fua: false, deallocate: false }, 3000, 1).is_err());
        }
    });
    drop(made);
    legs[1].clear();
    let made = opens(&volumes, 4096).expect("a good leg that is one event behind");
    on_bench(&made, |bench| {
        bench.expect(0, &model);
        bench.expect_zeroes(1024, 3072);
    });
    assert!(resync(&made));
    assert_eq!((fact(&made, "leg 0").as_deref(), fact(&made, "leg 1").as_deref()), (Some("good"), Some("good")));
}

/// The same at the mount, which is an event as well.
#[test]
fn the_good_leg_refuses_its_tables_when_it_is_opened() {
    let (legs, made, model) = with_one_good_leg();
    let volumes = volumes(&legs);
    drop(made);
    legs[1].add(refuses_tables(&volumes[1]));
    for _ in 0..4 {
        assert!(opens(&volumes, 1024).is_none(), "the only good leg does not take its table");
    }
    legs[1].clear();
    let made = opens(&volumes, 1024).expect("a good leg that is one event behind");
    on_bench(&made, |bench| bench.expect(0, &model));
}

/// No table is written where one is at the leg's end.
fn refuses_tables(leg: &Arc<dyn Volume>) -> Rule {
    let range = Some((Lba(RULES.area_of(&**leg) / 512), BlockCount(TABLES / 2 / 512)));
    Rule { range, ..Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })) }
}

/// Writers write beside it all the time, from another thread.
#[test]
fn writes_go_on_while_it_grows() {
    let legs = faulty(2, 1024);
    let made = open("region=64K, ", &volumes(&legs), Reason::Create);
    let (volume, end) = (Arc::clone(made.volume()), std::sync::atomic::AtomicBool::new(false));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut bench_harness = SyncHarness::new(SEED, false);
            let mut bench = Bench::new(&mut bench_harness, Arc::clone(&volume), SEED);
            let (mut model, mut rounds) = (vec![0; 1024 * 512], 0);
            while !end.load(Ordering::Acquire) || rounds < 100 {
                let blocks = volume.geometry().blocks.0;
                model.resize(blocks as usize * 512, 0);
                let count = 1 + bench.random.below(200);
                let lba = bench.random.below(blocks - count);
                let data = bench.write_random(lba, count);
                model[lba as usize * 512..][..data.len()].copy_from_slice(&data);
                rounds += 1;
            }
            model
        });
        for step in 1..=20_u64 {
            grows(&made, 1024 + step * 333);
            std::thread::sleep(std::time::Duration::from_millis(step % 5));
        }
        end.store(true, Ordering::Release);
        let mut model = writer.join().expect("the writer ends");
        // The last growth may have come after the last write: until what is new is used, the old areas lie there.
        model.resize(made.volume().geometry().bytes() as usize, 0);
        on_bench(&made, |bench| bench.expect(0, &model));
    });
    let volumes = volumes(&legs);
    let blocks = made.volume().geometry().blocks.0 as usize;
    let data = |leg| crate::legs::read(leg, 0, blocks * 512).unwrap();
    assert!(data(&volumes[0]) == data(&volumes[1]));
}

const FIRST: u64 = 200;

/// The sizes that the power may find, as whoever manages the volume has stored them: the larger one is tried first.
struct Story {
    sizes: Vec<u64>,
    /// One of these was given to whoever asked for it.
    known: u64,
}

impl Story {
    fn open(&self, rig: &Rig) -> (Graph, Vec<Arc<dyn Volume>>, u64) {
        let mut errors = Vec::new();
        for blocks in self.sizes.iter().rev() {
            let disks = rig.volumes();
            let needed = leg_blocks(*blocks, BlockSize::B512);
            if disks.iter().any(|disk| disk.geometry().blocks.0 < needed) {
                continue;
            }
            let legs = parts(&disks, *blocks, u64::MAX >> 10);
            let settings = "region=64K, rate=1T, ";
            match graph(&stack(settings, legs.len()), &legs, Some(blocks * 512), Reason::Open, &rig.kept) {
                Ok(graph) => return (graph, legs, *blocks),
                Err(error) => errors.push(error.to_string()),
            }
            rig.kept.forget();
        }
        panic!("no size can be opened: {errors:?}");
    }
}

fn equal(graph: &Graph, legs: &[Arc<dyn Volume>]) {
    for leg in 0..legs.len() {
        assert_eq!(fact(graph, &format!("leg {leg}")).as_deref(), Some("good"), "{:?}", facts(graph));
    }
    let bytes = graph.volume().geometry().bytes() as usize;
    let ready = bytes.min(mirror(graph).members.ready() as usize);
    let all: Vec<_> = legs.iter().map(|leg| crate::legs::read(leg, 0, ready).unwrap()).collect();
    assert!(all.iter().all(|data| *data == all[0]), "the legs differ");
}

/// On a thread of its own, as whoever manages volumes does it.
fn resize_under_load(
    graph: &Graph,
    blocks: u64,
    oracle: &mut Oracle,
    session: &mut Session<'_>,
    rig: &Rig,
) -> Result<(), VolumeError> {
    let volume = Arc::clone(graph.volume());
    let resize = beside(move || volume.resize(BlockCount(blocks)));
    loop {
        match resize.try_recv() {
            Ok(resized) => return resized,
            Err(TryRecvError::Disconnected) => panic!("a resize panicked"),
            Err(TryRecvError::Empty) if rig.power.is_gone() => session.settle(1),
            Err(TryRecvError::Empty) => {
                let good = oracle.step(session, graph.volume());
                assert!(good || rig.power.is_gone(), "a request failed without reason");
            }
        }
    }
}

/// A mirror grows twice under load, and the power goes at a boundary, or the process dies.
fn grown(seed: u64, cut: u64) -> u64 {
    let mut random = Random::new(seed);
    let rig = Rig::new(seed, 1 + (seed % 3) as usize, leg_blocks(FIRST, BlockSize::B512), BlockSize::B512);
    let means = Means::new(seed);
    let legs = parts(&rig.volumes(), FIRST, u64::MAX >> 10);
    let text = stack("region=64K, rate=1T, ", legs.len());
    let graph = graph(&text, &legs, Some(FIRST * 512), Reason::Create, &rig.kept).unwrap();
    let mut oracle = Oracle::new(seed, FIRST, 512);
    let mut session = Session::new(&means, &rig.kept, seed);
    session.settle_until_done(&graph, 2000);
    let mut story = Story { sizes: vec![FIRST], known: FIRST };
    let start = rig.power.boundaries();
    rig.power.cut_at(cut);
    for step in 0..9 {
        if step % 4 == 2 {
            let blocks = story.known + 128 + random.below(150);
            story.sizes = vec![story.known, blocks];
            match resize_under_load(&graph, blocks, &mut oracle, &mut session, &rig) {
                // Stored by who asked for it, or not yet.
                Ok(()) if random.below(2) == 0 => story.sizes = vec![blocks],
                Ok(()) => {}
                Err(error) => assert!(rig.power.is_gone(), "{error}"),
            }
            if !rig.power.is_gone() {
                story.known = blocks;
                oracle.resize(blocks);
            }
        }
        if rig.power.is_gone() {
            break;
        }
        let good = oracle.step(&mut session, graph.volume());
        assert!(good || rig.power.is_gone(), "a request failed without reason");
    }
    let boundaries = rig.power.boundaries() - start;
    drop(session);
    let mut graph = graph;
    graph.tasks.clear();
    drop((graph, legs));
    rig.restart();
    for round in 0..2 {
        let (mut graph, legs, blocks) = story.open(&rig);
        assert!(blocks >= story.known, "{blocks} blocks, and {} were there", story.known);
        if blocks > story.known {
            oracle.resize(blocks);
        }
        story = Story { sizes: vec![blocks], known: blocks };
        let mut session = Session::new(&means, &rig.kept, seed + round);
        oracle.check(&mut session, graph.volume());
        session.settle_until_done(&graph, 5000);
        oracle.check(&mut session, graph.volume());
        equal(&graph, &legs);
        grow_once_more(&graph, &mut oracle, &mut story, blocks + 130);
        for _ in 0..3 {
            assert!(oracle.step(&mut session, graph.volume()), "a request failed after the restart");
        }
        oracle.check(&mut session, graph.volume());
        for (_, tasks) in &graph.tasks {
            tasks.tell();
        }
        session.settle(usize::MAX);
        drop(session);
        equal(&graph, &legs);
        graph.unmount();
    }
    boundaries
}

fn grow_once_more(graph: &Graph, oracle: &mut Oracle, story: &mut Story, blocks: u64) {
    grows(graph, blocks);
    oracle.resize(blocks);
    *story = Story { sizes: vec![blocks], known: blocks };
}

#[test]
fn nothing_is_lost_when_the_power_goes_while_it_grows() {
    every_cut("growth and power cut", SEED, 4000, grown);
}
