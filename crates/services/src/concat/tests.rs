use std::sync::{Arc, atomic::Ordering};

use millrace_backends::{
    FileOptions, FileVolume, MemoryVolume,
    fault::{Effect, FaultVolume, Kind as Requests, Rule, When},
};
use millrace_block::{
    BlockError, BlockSize, Operation, Volume,
    conformance::{self, Bench, Subject, SyncHarness, Wanted},
    trace::Tap,
};

use super::*;
use crate::{
    LegOrigin, Node, Reason, SharedObjects,
    background::Spawner,
    graph::{Graph, LeafError, LeafRequest, Leaves, Plan as GraphPlan},
    testing::{
        CrashTest, Kept, crash_test, graph, open_file, subject,
        waiting::{Gate, until},
    },
};

const SEED: u64 = 0x636f_6e63;

fn memory(wanted: Wanted, leg: usize) -> Arc<dyn Volume> {
    // The first leg ends in the middle of what the suite works on.
    let blocks = [200, 104, wanted.blocks][leg];
    MemoryVolume::create(&format!("leg{leg}"), blocks << wanted.block_size.shift(), wanted.block_size).unwrap()
}

#[test]
fn it_conforms() {
    let mut make = subject("concat(disk:0, disk:1, disk:2)", 3, |blocks, _| blocks - 304, memory);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn it_conforms_over_the_fault_volume() {
    let faulty = |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED);
        volume.hold_writes();
        volume
    };
    let mut make = subject("concat(disk:0, disk:1, disk:2)", 3, |blocks, _| blocks - 304, faulty);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn errors_of_legs_are_the_guests() {
    crate::testing::each_leg_fails_in_turn("concat(disk:0, disk:1, disk:2)", 3, 64, None);
}

#[test]
fn sizes_are_those_of_the_legs() {
    let legs: Vec<Arc<dyn Volume>> =
        [100, 50].iter().map(|blocks| MemoryVolume::create("leg", blocks * 512, BlockSize::B512).unwrap() as _).collect();
    let make = |size| graph("concat(disk:0, disk:1)", &legs, size, Reason::Create, &Arc::default());
    assert_eq!(make(None).unwrap().volume().geometry().blocks.0, 150);
    assert_eq!(make(Some(120 * 512)).unwrap().volume().geometry().blocks.0, 120);
    let error = make(Some(151 * 512)).err().unwrap();
    assert_eq!(error.to_string(), "concat: its legs have 76800 bytes together; 77312 are asked for");
    let plan = (KIND.plan)(&Settings::default()).unwrap();
    let sizes = |stated: &[Option<u64>]| plan.leg_sizes(10 << 9, stated, BlockSize::B512);
    let sizes = |stated: &[Option<u64>]| {
        let stated: Vec<_> = stated.iter().map(|size| size.map(|size| size << 9)).collect();
        sizes(&stated).into_iter().map(|size| size.map(|size| size >> 9)).collect::<Vec<_>>()
    };
    assert_eq!(sizes(&[Some(4), None]), [Some(4), Some(6)]);
    assert_eq!(sizes(&[Some(4), Some(3)]), [Some(4), Some(6)], "the last leg is what the others leave");
    assert_eq!(sizes(&[None, None]), [None, None]);
    assert_eq!(sizes(&[Some(12), Some(3)]), [Some(12), Some(3)]);
    assert_eq!(sizes(&[None, Some(3)]), [None, Some(3)]);
    for (others, told, last) in [(4, Some(3), Some(6)), (8, Some(3), Some(3)), (12, Some(3), Some(3)), (4, None, None)] {
        let bytes = |blocks: u64| blocks << 9;
        let size = plan.last_size(bytes(10), &[bytes(others) + 100], told.map(bytes), BlockSize::B512);
        assert_eq!(size, last.map(bytes), "what others have that state nothing is known when they are there");
    }
    let sizes = |stated: &[Option<u64>]| plan.leg_sizes(8192, stated, BlockSize::B4096);
    assert_eq!(sizes(&[Some(5120), None]), [Some(5120), Some(4096)], "of the others whole blocks are used");
}

/// Files in a directory, as long as they are, or as they are told to be.
struct Files(tempfile::TempDir);

impl Leaves for Files {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        let path = self.0.path().join(request.leaf.file().expect("a file"));
        let options = FileOptions { path, size: request.size, block_size: request.block_size, read_only: false };
        Ok(open_file(&request.name, &options)?)
    }
}

#[test]
fn a_last_leg_that_has_grown_is_found_beside_those_that_state_no_size() {
    for stack in [
        "concat(file:a, file:b(size=32K))",
        "concat(concat(file:a), file:b(size=32K))",
        "concat(file:a, stripe(chunk=4K, file:b(size=16K), file:c(size=16K)))",
        "concat(file:a, concat(file:b(size=16K), file:c(size=16K)))",
    ] {
        let files = Files(tempfile::tempdir().unwrap());
        std::fs::write(files.0.path().join("a"), vec![0_u8; 64 << 10]).unwrap();
        let node: Node = stack.parse().unwrap();
        let open = |size: Option<u64>| {
            let plan = GraphPlan { volume: "test", stack: &node, size, block_size: BlockSize::B512 };
            let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
            let built = Graph::build(&plan, &files, &SharedObjects::default(), &spawner, None);
            let mut graph = built.unwrap_or_else(|error| panic!("{stack}: {error}"));
            graph.mount(Reason::Open).unwrap();
            graph
        };
        let opened = open(None);
        opened.volume().resize(BlockCount(512)).unwrap();
        crate::legs::write(opened.volume(), 200 << 10, vec![7; 4096]).unwrap();
        drop(opened);
        let opened = open(Some(256 << 10));
        assert_eq!(crate::legs::read(opened.volume(), 200 << 10, 4096).unwrap(), [7; 4096]);
        // What was made smaller has a last leg of at least what is stated.
        opened.volume().resize(BlockCount(70)).unwrap();
        drop(opened);
        open(Some(70 << 9)).volume().resize(BlockCount(64 + 192)).unwrap();
    }
}

#[test]
fn a_last_leg_that_keeps_its_size_is_opened_again_with_it() {
    let disk = |blocks: u64| MemoryVolume::create("leg", blocks * 512, BlockSize::B512).unwrap() as Arc<dyn Volume>;
    let legs = [128, 8192, 8192].map(disk);
    let open = |stack: &str, size: Option<u64>, reason| {
        graph(stack, &legs, size, reason, &Arc::default()).unwrap_or_else(|error| panic!("{stack}: {error}"))
    };
    let stack = "concat(disk:0(size=64K), mirror(region=64K, disk:1, disk:2))";
    let opened = open(stack, Some(1024 << 9), Reason::Create);
    let mut harness = SyncHarness::new(SEED, false);
    let data = Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).write_random(0, 1024);
    for smaller in [1000, 128, 64] {
        let refused = opened.volume().resize(BlockCount(smaller)).unwrap_err().to_string();
        assert!(refused.contains("or not open again"), "{refused}");
        assert_eq!(opened.volume().geometry().blocks.0, 1024);
    }
    drop(opened);
    let opened = open(stack, Some(1024 << 9), Reason::Open);
    Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).expect(0, &data);
    opened.volume().resize(BlockCount(2048)).unwrap();
    drop(opened);
    let opened = open(stack, Some(2048 << 9), Reason::Open);
    Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).expect(0, &data);
    drop(opened);
    // Told nothing, it would be opened over legs as short as they were.
    let stack = "concat(disk:0, mirror(region=128K, disk:1(size=4M), disk:2(size=4M)))";
    let legs = [128, 8192, 8192].map(disk);
    let opened = graph(stack, &legs, None, Reason::Create, &Arc::default()).unwrap();
    let refused = opened.volume().resize(BlockCount(16384)).unwrap_err().to_string();
    assert!(refused.contains("it would not open again"), "{refused}");
    assert!(legs[1..].iter().all(|leg| leg.geometry().blocks.0 == 8192));
}

/// A volume over two legs that hold writes until they are flushed.
fn over_held(stack: &str) -> (Vec<Arc<FaultVolume>>, Graph) {
    let wanted = Wanted { block_size: BlockSize::B512, blocks: 128, read_only: false };
    let legs: Vec<_> = (0..2).map(|leg| FaultVolume::new(memory(wanted, 2), SEED + leg)).collect();
    let mut volumes: Vec<Arc<dyn Volume>> = Vec::new();
    for leg in &legs {
        leg.hold_writes();
        volumes.push(Arc::<FaultVolume>::clone(leg));
    }
    let made = graph(stack, &volumes, None, Reason::Create, &Arc::default());
    (legs, made.unwrap_or_else(|error| panic!("{stack}: {error}")))
}

const PLAIN: [&str; 2] = ["concat(disk:0, disk:1)", "stripe(chunk=4K, disk:0, disk:1)"];

#[test]
fn what_is_shown_again_stays_zeroes_when_the_power_fails() {
    for stack in PLAIN {
        let (legs, graph) = over_held(stack);
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        let data = bench.write_random(0, 256);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        for blocks in [20, 256] {
            graph.volume().resize(BlockCount(blocks)).unwrap();
        }
        for leg in &legs {
            leg.power_loss();
        }
        bench.expect(0, &data[..20 << 9]);
        bench.expect_zeroes(20, 236);
    }
}

#[test]
fn the_guest_is_told_what_a_leg_forgot_when_the_volume_grew() {
    for stack in PLAIN {
        let (legs, graph) = over_held(stack);
        let service_of = |graph: &Graph| Arc::clone(&graph.services(graph.stack().word())[0].1);
        let service = service_of(&graph);
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        graph.volume().resize(BlockCount(20)).unwrap();
        bench.write_random(0, 20);
        legs[1].add(Rule::new(Requests::Flush, When::Nth(1), Effect::Forget(BlockError::WriteFault { errno: 5 })));
        let refused = graph.volume().resize(BlockCount(256)).unwrap_err().to_string();
        assert!(refused.contains("cannot flush its legs"), "{refused}");
        assert!(graph.volume().geometry().blocks.0 == 20 && service.has_untold());
        // Whoever takes its place has it to tell.
        let (kept, previous) = (vec![LegOrigin::Kept; 2], Some(Arc::clone(&service)));
        let mount = Mount { reason: Reason::Change, legs: kept, previous, reformat: false };
        let next = service_of(&over_held(stack).1);
        next.mount(&mount).unwrap();
        assert!(next.has_untold());
        let flushes = [0; 2].map(|_| bench.plain(Operation::Flush, 0, 0));
        assert_eq!(flushes, [Err(BlockError::WriteFault { errno: 0 }), Ok(())], "once");
        graph.volume().resize(BlockCount(256)).unwrap();
        bench.expect_zeroes(20, 236);
    }
}

#[test]
fn what_a_leg_refuses_is_known_before_the_others_have_answered() {
    let wanted = Wanted { block_size: BlockSize::B512, blocks: 128, read_only: false };
    let gate = Gate::before(memory(wanted, 2), |operation| operation == Operation::Flush);
    let faulty = FaultVolume::new(memory(wanted, 2), SEED);
    let legs: [Arc<dyn Volume>; 2] = [Arc::<Gate>::clone(&gate), Arc::<FaultVolume>::clone(&faulty)];
    let graph = graph("concat(disk:0, disk:1)", &legs, None, Reason::Create, &Arc::default()).unwrap();
    let service = Arc::clone(&graph.services("concat")[0].1);
    let volume = graph.volume();
    volume.resize(BlockCount(20)).unwrap();
    faulty.add(Rule::new(Requests::Flush, When::Nth(1), Effect::Fail(BlockError::WriteFault { errno: 5 })));
    gate.open.store(false, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let growth = scope.spawn(|| volume.resize(BlockCount(256)));
        // Its next flush would succeed, and so would the guest's.
        until("the guest is to be told", || service.has_untold());
        gate.open.store(true, Ordering::Relaxed);
        assert!(growth.join().unwrap().is_err());
    });
}

#[test]
fn legs_of_different_block_sizes_are_refused_by_name() {
    let legs =
        [BlockSize::B512, BlockSize::B4096].map(|block_size| memory(Wanted { block_size, blocks: 64, read_only: false }, 2));
    let refused = graph("concat(disk:0, disk:1)", &legs, None, Reason::Create, &Arc::default()).err().unwrap();
    assert_eq!(refused.to_string(), "concat.1 (disk:1): it has blocks of 4096 bytes and the volume of 512");
    let build = Build {
        name: "concat".to_owned(),
        volume: "test",
        legs: legs.into_iter().map(Tap::new).collect(),
        stated: &[],
        sizing: &[],
        size: None,
        block_size: BlockSize::B512,
        shared: &crate::SharedObjects::default(),
    };
    let refused = (KIND.plan)(&Settings::default()).unwrap().build(build).err().unwrap();
    assert_eq!(refused.to_string(), "leg 0 has blocks of 512 bytes and leg 1 of 4096: they must be alike");
}

#[test]
fn a_volume_with_a_leg_that_is_only_read_is_only_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(64 * 512).unwrap();
    let options = FileOptions { path: file.path().to_owned(), size: None, block_size: BlockSize::B512, read_only: true };
    let writable = memory(Wanted { block_size: BlockSize::B512, blocks: 200, read_only: false }, 0);
    let legs: Vec<Arc<dyn Volume>> = vec![writable, FileVolume::open("file", &options).unwrap()];
    let graph = graph("concat(disk:0, disk:1)", &legs, None, Reason::Create, &Arc::default()).unwrap();
    assert!(graph.volume().geometry().read_only);
    // All of it lies on the leg that could be written.
    let written = crate::legs::write(graph.volume(), 0, vec![1; 512]);
    assert!(matches!(written, Err(ServiceError::Leg { source: BlockError::ReadOnly, .. })), "{written:?}");
    assert_eq!(crate::legs::read(graph.volume(), 0, 512).unwrap(), [0; 512]);
}

#[test]
fn flushed_data_survive_power_cuts() {
    crash_test(&CrashTest::new("concat(disk:0, disk:1)", 2));
}

#[test]
fn blocks_stay_in_their_places_when_legs_are_no_multiple_of_the_larger_blocks() {
    // A leg's own length, a stated one, and a volume of two legs below.
    for (stack, stated) in [("concat(disk:0, disk:1)", None), ("concat(disk:0(size=5120), disk:1)", Some(5120))]
        .into_iter()
        .chain([("concat(concat(disk:0, disk:1), disk:2)", None)])
    {
        let files = [5120 + 600, 9 << 9, 16 << 10].map(|len| {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(len).unwrap();
            file
        });
        let open = |size: Option<u64>, block_size: BlockSize, reason| {
            let legs: Vec<Arc<dyn Volume>> = files
                .iter()
                .enumerate()
                .map(|(at, file)| {
                    let size = stated.filter(|_| at == 0);
                    let options = FileOptions { path: file.path().to_owned(), size, block_size, read_only: false };
                    open_file("leg", &options).unwrap() as _
                })
                .collect();
            graph(stack, &legs, size, reason, &Arc::default()).unwrap_or_else(|error| panic!("{stack}: {error}"))
        };
        let opened = open(None, BlockSize::B512, Reason::Create);
        opened.volume().format(BlockSize::B4096).unwrap();
        let size = opened.volume().geometry().bytes();
        drop(opened);
        let opened = open(Some(size), BlockSize::B4096, Reason::Open);
        opened.volume().format(BlockSize::B512).unwrap();
        let geometry = opened.volume().geometry();
        let mut harness = SyncHarness::new(SEED, false);
        let data = Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).write_random(0, geometry.blocks.0);
        drop(opened);
        let opened = open(Some(geometry.bytes()), BlockSize::B512, Reason::Open);
        Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).expect(0, &data);
    }
}
