//! The cache as a whole. Its parts are tested where they are.

mod bad;
mod crashes;
mod failures;
mod formats;
mod in_memory;
mod live;

use std::sync::Arc;

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockError, BlockSize, Operation, Volume,
    conformance::{self, Bench, Job, Subject, SyncHarness, Wanted},
};

use super::*;
use crate::{
    Reason,
    graph::Graph,
    legs,
    testing::{
        graph, subject,
        waiting::{Gate, copy_and_write, erase_beside, until},
    },
};

const SEED: u64 = 0x6361_6368;

fn memory(name: &str, bytes: u64, block_size: BlockSize) -> Arc<dyn Volume> {
    MemoryVolume::create(name, bytes, block_size).unwrap()
}

/// Bytes of a fast leg for so many lines.
fn fast_bytes(lines: u64, line: u64) -> u64 {
    (24 << 10) + lines * (line + 32)
}

/// A fast leg of some lines of 4 KiB and a slow one of 1 MiB, both of which can fail.
fn faulty(lines: u64) -> Vec<Arc<FaultVolume>> {
    let fast = memory("fast", fast_bytes(lines, 4096) >> 9 << 9, BlockSize::B512);
    vec![FaultVolume::new(fast, SEED), FaultVolume::new(memory("slow", 1 << 20, BlockSize::B512), SEED + 1)]
}

fn volumes(legs: &[Arc<FaultVolume>]) -> Vec<Arc<dyn Volume>> {
    legs.iter().map(|leg| Arc::<FaultVolume>::clone(leg) as Arc<dyn Volume>).collect()
}

fn stack(settings: &str) -> String {
    format!("cache({settings}, disk:0) | disk:1")
}

fn open(settings: &str, legs: &[Arc<dyn Volume>], reason: Reason) -> Graph {
    graph(&stack(settings), legs, None, reason, &Arc::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// Closes it in an orderly way; its tasks never ran, and would be waited for.
fn close(graph: &mut Graph) {
    graph.tasks.clear();
    graph.unmount();
}

fn fails(settings: &str, legs: &[Arc<dyn Volume>], reason: Reason) -> String {
    graph(&stack(settings), legs, None, reason, &Arc::default()).err().expect("it is refused").to_string()
}

/// The cache at a graph's root.
fn cache(graph: &Graph) -> Arc<Cache> {
    let services = graph.services("cache");
    let service: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(&services[0].1) as _;
    service.downcast().expect("a cache")
}

fn fact(graph: &Graph, name: &str) -> Option<String> {
    let facts = graph.tree().status.expect("a service has a status").facts;
    facts.into_iter().find(|(known, _)| known == name).map(|(_, value)| value)
}

fn count(cache: &Cache, counter: fn(&Counters) -> &AtomicU64) -> u64 {
    cache.counters.sum(counter)
}

fn on_bench(graph: &Graph, test: impl FnOnce(&mut Bench<'_>)) {
    test(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED));
}

/// What the slow leg has of the volume's data.
fn slow_data(legs: &[Arc<dyn Volume>], lba: u64, blocks: usize) -> Vec<u8> {
    let block = legs[1].geometry().block_size.bytes() as usize;
    legs::read(&legs[1], lba * block as u64, blocks * block).unwrap()
}

fn conforms(settings: &str, lines: u64, wrap: &dyn Fn(Arc<dyn Volume>, usize) -> Arc<dyn Volume>) {
    let stack = stack(settings);
    let line = 32 << 10;
    let make_leg = |wanted: Wanted, leg: usize| {
        let bytes = wanted.blocks << wanted.block_size.shift();
        let bytes = if leg == 0 { fast_bytes(lines, line) >> 12 << 12 } else { bytes };
        wrap(memory("leg", bytes, wanted.block_size), leg)
    };
    let mut make = subject(&stack, 2, |blocks, _| blocks, make_leg);
    let mut subject = Subject { resizes: false, ..Subject::new(SEED, &mut make) };
    conformance::run(&mut SyncHarness::new(SEED, false), &mut subject);
}

#[test]
fn a_write_needs_no_buffer_of_the_copies_that_wait_for_its_range() {
    let gate = Gate::before(memory("fast", 4 << 20, BlockSize::B512), |operation| operation == Operation::Read);
    let fast: Arc<dyn Volume> = Arc::<Gate>::clone(&gate);
    let crypt = concat!("crypt(key=\"file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key\", disk:0)");
    let stack = format!("cache(mode=back, ack=fast, line=4K, {crypt}, disk:1)");
    let legs = [fast, memory("slow", 1 << 20, BlockSize::B512)];
    let graph = graph(&stack, &legs, None, Reason::Create, &Arc::default()).unwrap();
    // What is copied, and where it goes, is on the fast leg.
    on_bench(&graph, |bench| drop(bench.write_random(0, 128)));
    copy_and_write(graph.volume(), &gate, 64, 0, 1);
    // More pieces than go on at once go through a buffer.
    copy_and_write(graph.volume(), &gate, 72, 8, 64);
}

#[test]
fn it_conforms_in_both_modes() {
    for mode in ["through", "back"] {
        // Much smaller than the volume, and larger than it.
        for lines in [9, 600] {
            conforms(&format!("mode={mode}"), lines, &|leg, _| leg);
            conforms(&format!("mode={mode}, line=4K, around=0"), lines, &|leg, _| leg);
        }
    }
}

#[test]
fn it_conforms_over_disks_that_hold_writes() {
    for mode in ["through", "back"] {
        conforms(&format!("mode={mode}, line=8K"), 20, &|leg, number| {
            let leg = FaultVolume::new(leg, SEED + number as u64);
            leg.hold_writes();
            leg
        });
    }
}

#[test]
fn it_conforms_while_the_fast_leg_fails() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    use millrace_block::{BlockCount, Lba};
    // Where lines are with either block size, so that a format, which must reach both legs, is left alone.
    let first = Lba((20 << 10) >> 9);
    let conforms = |settings: &str, rule: Rule| {
        conforms(settings, 50, &|leg, number| {
            let leg = FaultVolume::new(leg, SEED + number as u64);
            if number == 0 {
                leg.add(Rule { range: Some((first, BlockCount(u64::MAX))), ..rule.clone() });
            }
            leg
        });
    };
    // Through: whatever fails there, the guest does not notice.
    let fault = Effect::Fail(BlockError::ReadFault { errno: 5 });
    for (kind, when) in [
        (Kind::Read, When::Nth(20)),
        (Kind::Read, When::OneIn(3)),
        (Kind::Write, When::Nth(1)),
        (Kind::Write, When::Nth(40)),
    ] {
        conforms("mode=through, line=4K", Rule::new(kind, when, fault));
    }
    // Back: neither for a write that fails, as long as the leg takes the table and gives what is dirty.
    conforms("mode=back, line=4K", Rule::new(Kind::Write, When::Nth(30), Effect::Tear));
}

#[test]
fn a_second_read_does_not_reach_the_slow_leg() {
    use millrace_backends::fault::Kind;
    for mode in ["through", "back"] {
        let legs = faulty(100);
        let graph = open(&format!("mode={mode}, line=4K"), &volumes(&legs), Reason::Create);
        let data = vec![7; 4096 * 8];
        legs::write(&volumes(&legs)[1], 64 << 10, data.clone()).unwrap();
        on_bench(&graph, |bench| {
            bench.expect(128, &data);
            let before = legs[1].requests(Kind::Read);
            bench.expect(128, &data);
            bench.expect(130, &data[..1024]);
            assert_eq!(legs[1].requests(Kind::Read), before);
        });
        let cache = cache(&graph);
        assert_eq!(count(&cache, |here| &here.read_misses), 8);
        assert_eq!(fact(&graph, "read hits").unwrap(), "9 of 17 (52.9 %)");
    }
}

#[test]
fn through_puts_writes_on_both_legs_and_back_on_the_fast_one() {
    for (mode, there) in [("through", true), ("back", false)] {
        let legs = volumes(&faulty(100));
        let graph = open(&format!("mode={mode}, line=4K"), &legs, Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| data = bench.write_random(3, 30));
        assert_eq!(slow_data(&legs, 3, 30) == data, there, "{mode}");
        on_bench(&graph, |bench| bench.expect(3, &data));
        if mode == "back" {
            assert_eq!(fact(&graph, "dirty lines").as_deref(), Some("5"));
            assert!(!cache(&graph).leg_is_whole(SLOW));
            cache(&graph).drain_now().unwrap();
            assert!(cache(&graph).leg_is_whole(SLOW) && !cache(&graph).leg_is_whole(FAST));
            assert_eq!(slow_data(&legs, 3, 30), data);
        }
    }
}

/// The slow leg has nothing yet.
#[test]
fn a_volume_of_which_all_is_dirty_does_not_seem_empty() {
    let legs = volumes(&faulty(100));
    let graph = open("mode=back, line=4K", &legs, Reason::Create);
    let held = || graph.volume().usage().allocated;
    assert_eq!(held(), 0);
    on_bench(&graph, |bench| {
        bench.write_random(0, 16);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    assert_eq!((held(), legs[SLOW].usage().allocated), (8192, 0));
    cache(&graph).drain_now().unwrap();
    assert_eq!(held(), legs[SLOW].usage().allocated);
    // More than there can be is not told of.
    on_bench(&graph, |bench| (0..256).for_each(|line| drop(bench.write_random(line * 8, 8))));
    assert!(held() <= legs[SLOW].usage().allocated.max(1 << 20));
}

#[test]
fn nothing_takes_a_cache_of_which_all_is_dirty_for_a_blank_leg() {
    for service in ["integrity", "metadata"] {
        let legs = volumes(&faulty(100));
        let mut graph = open("mode=back, line=4K", &legs, Reason::Create);
        let mut data = Vec::new();
        on_bench(&graph, |bench| {
            data = bench.write_random(0, 16);
            bench.plain(Operation::Flush, 0, 0).unwrap();
        });
        close(&mut graph);
        drop(graph);
        let over = format!("{service} | {}", stack("mode=back, line=4K"));
        let refused = crate::testing::graph(&over, &legs, None, Reason::Create, &Arc::default());
        let refused = refused.err().expect("it is refused").to_string();
        assert!(refused.contains("holds something else"), "{refused}");
        let graph = open("mode=back, line=4K", &legs, Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &data));
    }
}

/// Where others are always at work a long range is never free as a whole.
#[test]
fn an_erasure_goes_on_beside_who_has_a_part_of_it() {
    for mode in ["through", "back"] {
        let fast = memory("fast", fast_bytes(100, 4096) >> 9 << 9, BlockSize::B512);
        let legs = [fast, memory("slow", 4 << 20, BlockSize::B512)].map(|leg| FaultVolume::new(leg, SEED));
        let graph = open(&format!("mode={mode}, line=4K"), &volumes(&legs), Reason::Create);
        on_bench(&graph, |bench| _ = bench.write_random(0, 8192));
        let cache = cache(&graph);
        erase_beside(&cache.core().unwrap().ranges, 3 << 20..(3 << 20) + 4096, &legs[SLOW], || {
            let zeroes = Operation::WriteZeroes { fua: false, deallocate: true };
            on_bench(&graph, |bench| bench.plain(zeroes, 0, 8192).unwrap());
        });
        on_bench(&graph, |bench| bench.expect_zeroes(0, 8192));
    }
}

#[test]
fn long_requests_pass_by_and_see_what_is_dirty() {
    let legs = volumes(&faulty(100));
    let graph = open("mode=back, line=4K, around=64K", &legs, Reason::Create);
    on_bench(&graph, |bench| {
        let small = bench.write_random(20, 3);
        let mut whole = bench.read(0, 256);
        assert_eq!(whole[20 * 512..23 * 512], small);
        // A long write makes clean what it covers.
        let long = bench.write_random(10, 200);
        whole[10 * 512..210 * 512].copy_from_slice(&long);
        bench.expect(0, &whole);
        bench.expect(21, &whole[21 * 512..22 * 512]);
    });
    assert_eq!(fact(&graph, "dirty lines").as_deref(), Some("0"));
    assert_eq!(fact(&graph, "passed by").as_deref(), Some("3"));
}

#[test]
fn a_scan_leaves_what_is_used_in_the_cache() {
    use millrace_backends::fault::Kind;
    let legs = faulty(60);
    let graph = open("mode=through, line=4K, around=0", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| {
        for _ in 0..4 {
            (0..20).for_each(|line| drop(bench.read(line * 8, 8)));
        }
        // A scan of far more than the cache has, in small pieces.
        (400..2000).step_by(4).for_each(|lba| drop(bench.read(lba, 4)));
        let before = legs[1].requests(Kind::Read);
        (0..20).for_each(|line| drop(bench.read(line * 8, 8)));
        assert_eq!(legs[1].requests(Kind::Read), before, "all of it is still there");
    });
    assert!(count(&cache(&graph), |here| &here.evicted) > 100);
}

#[test]
fn everything_is_there_after_an_orderly_restart_and_warm() {
    use millrace_backends::fault::Kind;
    for mode in ["through", "back"] {
        let legs = faulty(100);
        let settings = format!("mode={mode}, line=4K");
        let mut graph = open(&settings, &volumes(&legs), Reason::Create);
        let (mut data, mut read) = (Vec::new(), Vec::new());
        on_bench(&graph, |bench| {
            data = bench.write_random(100, 50);
            read = bench.read(1000, 16);
        });
        close(&mut graph);
        drop(graph);
        let graph = open(&settings, &volumes(&legs), Reason::Open);
        let before = legs[1].requests(Kind::Read);
        on_bench(&graph, |bench| {
            bench.expect(100, &data);
            bench.expect(1000, &read);
        });
        assert_eq!(legs[1].requests(Kind::Read), before, "it is warm");
    }
}

#[test]
fn format_erases_both_legs() {
    let legs = volumes(&faulty(100));
    let graph = open("mode=back, line=8K", &legs, Reason::Create);
    on_bench(&graph, |bench| drop(bench.write_random(0, 100)));
    graph.volume().format(BlockSize::B4096).unwrap();
    assert_eq!(graph.volume().geometry().blocks.0, 256);
    on_bench(&graph, |bench| {
        bench.expect_zeroes(0, 256);
        let data = bench.write_random(3, 9);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        bench.expect(3, &data);
    });
    drop(graph);
    // After a crash, too.
    let graph = open("mode=back, line=8K", &legs, Reason::Open);
    on_bench(&graph, |bench| assert!(bench.read(3, 9).iter().any(|byte| *byte != 0)));
}

#[test]
fn a_format_waits_for_what_is_being_written_back() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    use std::time::Duration;
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        let legs = faulty(100);
        let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
        on_bench(&graph, |bench| drop(bench.write_random(0, 100)));
        for leg in &legs {
            leg.add(Rule::new(Kind::Read, When::Always, Effect::Delay(Duration::from_millis(50))));
            leg.add(Rule::new(Kind::Write, When::Always, Effect::Delay(Duration::from_millis(50))));
        }
        let before = legs[0].requests(Kind::Read);
        let beside = cache(&graph);
        let drain = std::thread::spawn(move || beside.drain_now());
        while legs[0].requests(Kind::Read) == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        if block_size == BlockSize::B512 {
            // It is on its way to the slow leg.
            std::thread::sleep(Duration::from_millis(70));
        }
        graph.volume().format(block_size).unwrap();
        drain.join().unwrap().unwrap();
        for leg in &legs {
            leg.clear();
        }
        let blocks = graph.volume().geometry().blocks.0;
        let mut data = Vec::new();
        on_bench(&graph, |bench| {
            bench.expect_zeroes(0, blocks);
            data = bench.write_random(200, 9);
        });
        cache(&graph).drain_now().unwrap();
        assert_eq!(slow_data(&volumes(&legs), 200, 9), data);
        drop(graph);
        let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Open);
        on_bench(&graph, |bench| {
            bench.expect_zeroes(0, 200);
            bench.expect(200, &data);
        });
    }
}

/// A page of the table keeps the size that it had when it was copied.
#[test]
fn a_format_waits_for_a_commit() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    use std::time::Duration;
    let fast = memory("fast", fast_bytes(900, 4096) >> 12 << 12, BlockSize::B512);
    let legs = [fast, memory("slow", 4 << 20, BlockSize::B512)].map(|leg| FaultVolume::new(leg, SEED));
    let graph = open("mode=back, ack=fast, line=4K", &volumes(&legs), Reason::Create);
    // More pages of 512 bytes than there is room for of 4096.
    on_bench(&graph, |bench| (0..800).for_each(|line| drop(bench.write_random(line * 8, 8))));
    let before = legs[SLOW].requests(Kind::Flush);
    legs[SLOW].add(Rule::new(Kind::Flush, When::Always, Effect::Delay(Duration::from_millis(300))));
    let beside = cache(&graph);
    let commit = std::thread::spawn(move || beside.wait_for(|me, cx| Box::pin(async move { me.commit(cx).await })));
    until("the commit flushes", || legs[SLOW].requests(Kind::Flush) != before);
    graph.volume().format(BlockSize::B4096).unwrap();
    commit.join().unwrap().unwrap().unwrap();
    legs[SLOW].clear();
    let blocks = graph.volume().geometry().blocks.0;
    let mut data = Vec::new();
    on_bench(&graph, |bench| {
        bench.expect_zeroes(0, blocks);
        data = bench.write_random(200, 9);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    drop(graph);
    let graph = open("mode=back, ack=fast, line=4K", &volumes(&legs), Reason::Open);
    on_bench(&graph, |bench| {
        bench.expect_zeroes(0, 200);
        bench.expect(200, &data);
    });
}

#[test]
fn overlapping_writes_and_reads_of_one_line_never_mix_lines_up() {
    // Far more lines than slots, so that lines come and go while they are read.
    let legs = faulty(12);
    for leg in &legs {
        use millrace_backends::fault::{Effect, Kind, Rule, When};
        leg.add(Rule::new(Kind::Write, When::OneIn(2), Effect::Delay(std::time::Duration::from_micros(5))));
        leg.add(Rule::new(Kind::Read, When::OneIn(2), Effect::Delay(std::time::Duration::from_micros(5))));
    }
    for mode in ["through", "back"] {
        let graph = open(&format!("mode={mode}, line=4K"), &volumes(&legs), Reason::Create);
        on_bench(&graph, |bench| {
            // Each block is stamped with its number.
            let stamp = |lba: u64, round: u8| [&lba.to_le_bytes()[..], &[round; 504]].concat();
            for lba in (0..2048).step_by(64) {
                let data: Vec<u8> = (lba..lba + 64).flat_map(|lba| stamp(lba, 0)).collect();
                bench.write(lba, &data).unwrap();
            }
            for round in 1..150_u8 {
                let mut jobs = Vec::new();
                for number in 0..8_u64 {
                    let (lba, count) = (bench.random.below(2000), 1 + bench.random.below(20));
                    let segment = bench.memory.segment(number as usize * 65536, count as usize * 512);
                    let operation = if number % 2 == 0 { Operation::Write { fua: number == 4 } } else { Operation::Read };
                    if operation.is_write() {
                        let data: Vec<u8> = (lba..lba + count).flat_map(|lba| stamp(lba, round)).collect();
                        segment.write_at(0, &data);
                    }
                    jobs.push(Job { segments: vec![segment], ..Job::new(operation, lba, count) });
                }
                assert!(bench.jobs(&jobs).iter().all(Result::is_ok));
                for job in jobs.iter().filter(|job| job.operation == Operation::Read) {
                    for at in 0..job.count.0 {
                        let mut found = [0; 8];
                        job.segments[0].read_at(at as usize * 512, &mut found);
                        assert_eq!(u64::from_le_bytes(found), job.lba.0 + at, "round {round}");
                    }
                }
            }
            for lba in 0..2048 {
                assert_eq!(bench.read(lba, 1)[..8], lba.to_le_bytes());
            }
        });
        drop(graph);
        // The next mode begins with an empty one.
        legs::write(&volumes(&legs)[0], 0, vec![0; 16 << 10]).unwrap();
    }
}
