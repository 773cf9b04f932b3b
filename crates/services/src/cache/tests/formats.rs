//! Formats that a leg does not let come to their end.

use std::sync::atomic::AtomicBool;

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{Request, Step, TaskContext, Usage, VolumeError};

use super::*;
use crate::service::Health;

/// A leg that refuses formats while it is told to.
struct Stubborn {
    inner: Arc<FaultVolume>,
    refuses: AtomicBool,
    /// From the next format on it takes no writes.
    breaks: AtomicBool,
}

impl Stubborn {
    /// It takes no writes, or takes them again.
    fn spoil(&self, on: bool) {
        self.inner.clear();
        if on {
            for kind in [Kind::Write, Kind::WriteZeroes] {
                self.inner.add(Rule::new(kind, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })));
            }
        }
    }
}

impl Volume for Stubborn {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.inner.submit(cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        self.inner.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.inner.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        if self.breaks.swap(false, Ordering::Relaxed) {
            self.spoil(true);
        }
        if self.refuses.load(Ordering::Relaxed) {
            return Err(VolumeError::Unsupported { volume: self.name().to_owned(), what: "formatting" });
        }
        self.inner.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}

struct Legs {
    stubborn: Vec<Arc<Stubborn>>,
}

impl Legs {
    fn new() -> Self {
        let stubborn = |inner| Arc::new(Stubborn { inner, refuses: AtomicBool::new(false), breaks: AtomicBool::new(false) });
        Self { stubborn: faulty(100).into_iter().map(stubborn).collect() }
    }

    fn volumes(&self) -> Vec<Arc<dyn Volume>> {
        self.stubborn.iter().map(|leg| Arc::clone(leg) as Arc<dyn Volume>).collect()
    }

    fn refuse(&self, leg: usize, on: bool) {
        self.stubborn[leg].refuses.store(on, Ordering::Relaxed);
    }

    fn spoil(&self, leg: usize, on: bool) {
        self.stubborn[leg].spoil(on);
    }

    fn spoil_at_format(&self, leg: usize) {
        self.stubborn[leg].breaks.store(true, Ordering::Relaxed);
    }
}

/// A cache with dirty and with clean lines.
fn used(legs: &Legs, mode: &str) -> Graph {
    let graph = open(&format!("mode={mode}, line=4K"), &legs.volumes(), Reason::Create);
    on_bench(&graph, |bench| drop(bench.write_random(0, 64)));
    cache(&graph).drain_now().unwrap();
    on_bench(&graph, |bench| drop(bench.write_random(100, 64)));
    graph
}

fn health(graph: &Graph) -> Health {
    graph.tree().status.unwrap().health
}

fn resume(graph: &Graph) -> Result<String, crate::ServiceError> {
    cache(graph).command("resume", &crate::settings::Settings::default())
}

/// What is written is there, durable, and all else is zero.
fn works(graph: &Graph) -> Vec<u8> {
    let mut data = Vec::new();
    on_bench(graph, |bench| {
        let blocks = graph.volume().geometry().blocks.0;
        bench.expect_zeroes(0, blocks);
        data = bench.write_random(101, 20);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        bench.expect_zeroes(0, 101);
        bench.expect(101, &data);
    });
    data
}

fn is_there_after_a_restart(graph: Graph, legs: &Legs, mode: &str, data: &[u8]) {
    drop(graph);
    let graph = open(&format!("mode={mode}, line=4K"), &legs.volumes(), Reason::Open);
    on_bench(&graph, |bench| {
        bench.expect_zeroes(0, 101);
        bench.expect(101, data);
    });
}

#[test]
fn a_volume_whose_cache_cannot_begin_anew_goes_on_without_it() {
    for mode in ["through", "back"] {
        for block_size in [BlockSize::B512, BlockSize::B4096] {
            let legs = Legs::new();
            let graph = used(&legs, mode);
            legs.spoil_at_format(FAST);
            graph.volume().format(block_size).unwrap();
            assert_eq!(graph.volume().geometry().block_size, block_size);
            assert_eq!(health(&graph), Health::Degraded);
            let data = works(&graph);
            assert!(resume(&graph).is_err(), "the leg is not well yet");
            on_bench(&graph, |bench| bench.expect(101, &data));
            legs.spoil(FAST, false);
            resume(&graph).unwrap();
            assert_eq!(health(&graph), Health::Good);
            on_bench(&graph, |bench| {
                bench.expect_zeroes(0, 101);
                bench.expect(101, &data);
                let other = bench.write_random(101, 20);
                bench.plain(Operation::Flush, 0, 0).unwrap();
                bench.expect(101, &other);
                bench.write(101, &data).unwrap();
                bench.plain(Operation::Flush, 0, 0).unwrap();
            });
            is_there_after_a_restart(graph, &legs, mode, &data);
        }
    }
}

#[test]
fn a_leg_that_is_well_again_is_told_that_it_holds_nothing() {
    for orderly in [false, true] {
        let legs = Legs::new();
        let mut graph = used(&legs, "back");
        legs.spoil_at_format(FAST);
        graph.volume().format(BlockSize::B4096).unwrap();
        let data = works(&graph);
        legs.spoil(FAST, false);
        if orderly {
            close(&mut graph);
        } else {
            // As upkeep does.
            cache(&graph).wait_for(|me, cx| Box::pin(async move { me.say_void(cx).await })).unwrap().unwrap();
        }
        is_there_after_a_restart(graph, &legs, "back", &data);
    }
}

#[test]
fn a_fast_leg_that_refuses_leaves_an_empty_volume_as_it_was() {
    for mode in ["through", "back"] {
        let legs = Legs::new();
        let graph = used(&legs, mode);
        legs.refuse(FAST, true);
        graph.volume().format(BlockSize::B4096).unwrap_err();
        assert_eq!(graph.volume().geometry().block_size, BlockSize::B512);
        assert_eq!(health(&graph), Health::Good);
        let data = works(&graph);
        is_there_after_a_restart(graph, &legs, mode, &data);
    }
}

#[test]
fn what_a_dead_fast_leg_calls_dirty_replaces_nothing() {
    let legs = Legs::new();
    let graph = used(&legs, "back");
    legs.refuse(FAST, true);
    legs.spoil_at_format(FAST);
    graph.volume().format(BlockSize::B512).unwrap_err();
    assert_eq!(health(&graph), Health::Failed);
    on_bench(&graph, |bench| {
        let segment = bench.memory.segment(0, 512);
        assert_eq!(bench.moving(Operation::Write { fua: false }, 3, &[segment]), Err(BlockError::NotReady));
    });
    assert!(resume(&graph).is_err(), "the leg is not well yet");
    // By either way it goes on: a format, or the command.
    for again in [true, false] {
        legs.refuse(FAST, !again);
        legs.spoil(FAST, false);
        if again {
            graph.volume().format(BlockSize::B512).unwrap();
        } else {
            legs.spoil_at_format(FAST);
            graph.volume().format(BlockSize::B512).unwrap_err();
            legs.spoil(FAST, false);
            resume(&graph).unwrap();
        }
        assert_eq!(health(&graph), Health::Good);
        works(&graph);
    }
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.read(101, 20));
    is_there_after_a_restart(graph, &legs, "back", &data);
    // What never had anything dirty goes on without its cache.
    let legs = Legs::new();
    let graph = used(&legs, "through");
    legs.refuse(FAST, true);
    legs.spoil_at_format(FAST);
    graph.volume().format(BlockSize::B4096).unwrap_err();
    assert_eq!((health(&graph), graph.volume().geometry().block_size), (Health::Degraded, BlockSize::B512));
    let data = works(&graph);
    legs.spoil(FAST, false);
    is_there_after_a_restart(graph, &legs, "through", &data);
}

#[test]
fn a_slow_leg_that_refuses_changes_nothing() {
    let legs = Legs::new();
    let graph = used(&legs, "back");
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.read(0, 200));
    legs.refuse(SLOW, true);
    graph.volume().format(BlockSize::B4096).unwrap_err();
    on_bench(&graph, |bench| bench.expect(0, &data));
    assert_eq!(health(&graph), Health::Good);
}

#[test]
fn a_fast_leg_that_takes_no_writes_is_found_before_anything_is_erased() {
    for mode in ["through", "back"] {
        let legs = Legs::new();
        let graph = used(&legs, mode);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.read(0, 200));
        legs.spoil(FAST, true);
        graph.volume().format(BlockSize::B4096).unwrap_err();
        on_bench(&graph, |bench| bench.expect(0, &data));
        legs.spoil(FAST, false);
        on_bench(&graph, |bench| bench.expect(0, &data));
        graph.volume().format(BlockSize::B4096).unwrap();
        works(&graph);
    }
}
