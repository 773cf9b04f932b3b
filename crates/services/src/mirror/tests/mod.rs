//! The mirror as a whole. Its parts are tested where they are.

mod crashes;
mod failures;
mod format;
mod growth;
mod kept;
mod membership;
mod progress;
mod rebuild;
mod refused;

use std::sync::Arc;

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockSize, Volume,
    conformance::{self, Bench, Subject, SyncHarness, Wanted},
};

use super::*;
use crate::{
    Reason,
    graph::Graph,
    testing::{graph, subject},
};

const SEED: u64 = 0x6d69_7272;

fn memory(wanted: Wanted, leg: usize) -> Arc<dyn Volume> {
    let bytes = wanted.blocks << wanted.block_size.shift();
    MemoryVolume::create(&format!("leg{leg}"), bytes, wanted.block_size).unwrap()
}

/// Blocks of a leg for a mirror of so many.
fn leg_blocks(blocks: u64, block_size: BlockSize) -> u64 {
    RULES.leg_bytes(blocks << block_size.shift()) >> block_size.shift()
}

/// Fault volumes over memory, for a mirror of so many blocks of 512 bytes.
fn faulty(legs: usize, blocks: u64) -> Vec<Arc<FaultVolume>> {
    let wanted = Wanted { block_size: BlockSize::B512, blocks: leg_blocks(blocks, BlockSize::B512), read_only: false };
    (0..legs).map(|leg| FaultVolume::new(memory(wanted, leg), SEED + leg as u64)).collect()
}

fn volumes(legs: &[Arc<FaultVolume>]) -> Vec<Arc<dyn Volume>> {
    legs.iter().map(|leg| Arc::<FaultVolume>::clone(leg) as Arc<dyn Volume>).collect()
}

fn stack(settings: &str, legs: usize) -> String {
    let legs = (0..legs).map(|leg| format!("disk:{leg}")).collect::<Vec<_>>().join(", ");
    format!("mirror({settings}{legs})")
}

fn open(settings: &str, legs: &[Arc<dyn Volume>], reason: Reason) -> Graph {
    graph(&stack(settings, legs.len()), legs, None, reason, &Arc::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// The mirror at a graph's root.
fn mirror(graph: &Graph) -> Arc<Mirror> {
    let services = graph.services("mirror");
    let service: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(&services[0].1) as _;
    service.downcast().expect("a mirror")
}

fn facts(graph: &Graph) -> Vec<(String, String)> {
    graph.tree().status.expect("a service has a status").facts
}

fn fact(graph: &Graph, name: &str) -> Option<String> {
    facts(graph).into_iter().find(|(known, _)| known == name).map(|(_, value)| value)
}

fn arguments(text: &[(&str, &str)]) -> Settings {
    let mut settings = Settings::default();
    assert!(text.iter().all(|(name, value)| settings.add(name, value)));
    settings
}

/// What lies in the data area of a leg.
fn data_of(leg: &Arc<dyn Volume>) -> Vec<u8> {
    let bytes = (leg.geometry().bytes() - RULES.area) as usize;
    crate::legs::read(leg, 0, bytes).expect("the leg can be read")
}

fn on_bench(graph: &Graph, test: impl FnOnce(&mut Bench<'_>)) {
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED));
}

/// Does upkeep's work on the calling thread, as often as it takes.
fn resync(graph: &Graph) -> bool {
    let mirror = mirror(graph);
    crate::legs::block_on(move |cx| {
        Box::pin(async move {
            let pool = millrace_memory::BufferPool::new(MOST_LEGS).unwrap();
            mirror.resync(cx, &crate::background::Stop::default(), &pool).await
        })
    })
    .unwrap()
}

fn conforms(settings: &str, legs: usize, resizes: bool, make_leg: impl FnMut(Wanted, usize) -> Arc<dyn Volume>) {
    let stack = stack(settings, legs);
    let mut make = subject(&stack, legs, leg_blocks, make_leg);
    let mut subject = Subject { resizes, shrinks: false, ..Subject::new(SEED, &mut make) };
    conformance::run(&mut SyncHarness::new(SEED, false), &mut subject);
}

#[test]
fn it_conforms_with_each_policy() {
    for (settings, legs) in [("", 2), ("read=shortest-queue, region=64K, ", 3), ("read=1, stable=false, ", 2), ("", 1)] {
        conforms(settings, legs, true, memory);
    }
}

#[test]
fn it_conforms_over_disks_that_hold_writes() {
    conforms("region=64K, ", 2, true, |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED + leg as u64);
        volume.hold_writes();
        volume
    });
}

#[test]
fn it_conforms_while_legs_fail_now_and_then() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    // The second leg's writes fail one day; the third leg's reads fail often.
    // With a leg less it does not grow, and this is so from the beginning.
    conforms("region=64K, ", 3, false, |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED + leg as u64);
        let fault = millrace_block::BlockError::WriteFault { errno: 5 };
        match leg {
            1 => volume.add(Rule::new(Kind::Write, When::Nth(60), Effect::Fail(fault))),
            2 => volume.add(Rule::new(
                Kind::Read,
                When::OneIn(5),
                Effect::Fail(millrace_block::BlockError::ReadFault { errno: 5 }),
            )),
            _ => {}
        }
        growth::of_fixed_size(volume)
    });
}

#[test]
fn every_leg_has_every_byte_at_its_own_place() {
    let legs = faulty(3, 4096);
    let volumes = volumes(&legs);
    let graph = open("", &volumes, Reason::Create);
    let mut model = vec![0; 4096 * 512];
    on_bench(&graph, |bench| {
        for (lba, count) in [(0, 1), (4095, 1), (7, 300), (1000, 129), (2000, 2000)] {
            let data = bench.write_random(lba, count);
            model[lba as usize * 512..][..data.len()].copy_from_slice(&data);
        }
        bench.plain(millrace_block::Operation::WriteZeroes { fua: false, deallocate: true }, 100, 50).unwrap();
        model[100 * 512..150 * 512].fill(0);
    });
    assert!(volumes.iter().all(|leg| data_of(leg) == model));
    assert!((0..3).all(|leg| graph.root.service.as_ref().unwrap().leg_is_whole(leg)));
}

#[test]
fn reads_go_round() {
    let legs = faulty(2, 1024);
    let graph = open("", &volumes(&legs), Reason::Create);
    let before: Vec<u64> = legs.iter().map(|leg| leg.requests(millrace_backends::fault::Kind::Read)).collect();
    on_bench(&graph, |bench| (0..10).for_each(|at| bench.expect_zeroes(at, 1)));
    let reads: Vec<u64> =
        legs.iter().zip(before).map(|(leg, before)| leg.requests(millrace_backends::fault::Kind::Read) - before).collect();
    assert_eq!(reads, [5, 5]);
}

#[test]
fn overlapping_writes_in_flight_leave_the_legs_equal() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    let legs = faulty(3, 1024);
    for leg in &legs {
        // They answer in any order.
        leg.add(Rule::new(Kind::Write, When::OneIn(2), Effect::Delay(std::time::Duration::from_micros(10))));
    }
    let volumes = volumes(&legs);
    let graph = open("", &volumes, Reason::Create);
    on_bench(&graph, |bench| {
        for round in 0..200_u64 {
            let jobs: Vec<_> = (0..6_u64)
                .map(|number| {
                    let (lba, count) = (bench.random.below(40), 1 + bench.random.below(150));
                    let segment = bench.memory.segment(number as usize * (1 << 20), count as usize * 512);
                    segment.fill((round * 6 + number) as u8);
                    conformance::Job {
                        segments: vec![segment],
                        ..conformance::Job::new(millrace_block::Operation::Write { fua: false }, lba, count)
                    }
                })
                .collect();
            assert!(bench.jobs(&jobs).iter().all(Result::is_ok));
        }
    });
    let first = data_of(&volumes[0]);
    assert!(volumes.iter().all(|leg| data_of(leg) == first));
}

/// Writes of 4 KiB to the first 64 KiB, each of one byte throughout, settled now and then, as a shard makes them.
fn write_as_a_shard(volume: &Arc<dyn Volume>, seed: u64, writes: u32) {
    let _place = millrace_block::ShardSlot::claim();
    let (io, buffers) = (conformance::SyncIo::new(seed, false), millrace_memory::BufferPool::new(2).unwrap());
    let mut scratch = millrace_block::Scratch::new(volume.scratch_bytes());
    let (memory, mut random) = (conformance::Memory::new(4096), conformance::Random::new(seed));
    let unsettled = millrace_memory::Unsettled::new();
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    for number in 0..writes {
        let segments = [memory.segment(0, 4096)];
        segments[0].fill(random.below(256) as u8);
        let (operation, lba) = (millrace_block::Operation::Write { fua: false }, millrace_block::Lba(random.below(120)));
        let request = millrace_block::Request { operation, lba, count: BlockCount(8), segments: &segments };
        let mut step = volume.submit(millrace_block::TaskContext::new(&scratch, &buffers, &io), request);
        let result = loop {
            if let std::task::Poll::Ready(result) = std::pin::Pin::new(&mut step).poll(&mut cx) {
                break result;
            }
        };
        result.unwrap();
        drop(step);
        scratch.reset();
        if number % 8 == 7 {
            unsettled.settle();
        }
    }
}

#[test]
fn writes_that_are_settled_late_are_the_same_on_all_legs_for_whoever_locks() {
    // Large enough to be written past the caches.
    let wanted = Wanted { block_size: BlockSize::B512, blocks: leg_blocks(1 << 16, BlockSize::B512), read_only: false };
    let legs: Vec<_> = (0..2).map(|leg| memory(wanted, leg)).collect();
    let graph = open("", &legs, Reason::Create);
    let (volume, mirror) = (graph.volume(), mirror(&graph));
    std::thread::scope(|scope| {
        // One after the other is alone for a while: long enough to be favoured.
        let one = scope.spawn(|| write_as_a_shard(volume, SEED, 60_000));
        while !one.is_finished() {
            let (mirror, legs) = (Arc::clone(&mirror), legs.clone());
            let equal = crate::legs::block_on(move |cx| {
                Box::pin(async move {
                    let _range = mirror.members.ranges.lock(cx, 0..1 << 16).await;
                    let first = crate::legs::read_bytes(cx, &*legs[0], 0, 1 << 16).await.unwrap();
                    first == crate::legs::read_bytes(cx, &*legs[1], 0, 1 << 16).await.unwrap()
                })
            });
            assert!(equal.unwrap(), "a write was seen on one leg alone");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        scope.spawn(|| write_as_a_shard(volume, !SEED, 20_000));
        scope.spawn(|| write_as_a_shard(volume, SEED + 1, 20_000));
    });
    assert!(data_of(&legs[0]) == data_of(&legs[1]));
}
