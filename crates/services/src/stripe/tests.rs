use std::sync::Arc;

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockSize, Volume,
    conformance::{self, Bench, Subject, SyncHarness, Wanted},
    trace::Tap,
};

use super::*;
use crate::{
    Reason,
    testing::{CrashTest, Device, crash_test, graph, subject},
};

const SEED: u64 = 0x7374_7269;

fn memory(wanted: Wanted, leg: usize) -> Arc<dyn Volume> {
    let bytes = wanted.blocks << wanted.block_size.shift();
    MemoryVolume::create(&format!("leg{leg}"), bytes, wanted.block_size).unwrap()
}

/// Blocks of a leg of three: whole chunks of at most 64 KiB.
fn third(blocks: u64, block_size: BlockSize) -> u64 {
    let chunk = (64 << 10) >> block_size.shift();
    blocks.div_ceil(chunk).div_ceil(3) * chunk
}

#[test]
fn it_conforms_with_small_and_large_chunks() {
    for stack in ["stripe(chunk=4K, disk:0, disk:1, disk:2)", "stripe(chunk=64K, disk:0, disk:1, disk:2)"] {
        let mut make = subject(stack, 3, third, memory);
        conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
    }
}

#[test]
fn it_conforms_over_the_fault_volume_and_wide() {
    let faulty = |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED + leg as u64);
        volume.hold_writes();
        volume
    };
    let twelfth = |blocks: u64, block_size: BlockSize| {
        let chunk = 4096 >> block_size.shift();
        blocks.div_ceil(chunk).div_ceil(12) * chunk
    };
    let legs = (0..12).map(|leg| format!("disk:{leg}")).collect::<Vec<_>>().join(", ");
    let stack = format!("stripe(chunk=4K, {legs})");
    let mut make = subject(&stack, 12, twelfth, faulty);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}

#[test]
fn errors_of_legs_are_the_guests() {
    crate::testing::each_leg_fails_in_turn("stripe(chunk=4K, disk:0, disk:1, disk:2)", 3, 64, None);
}

#[test]
fn unequal_legs_are_used_in_full_and_each_block_has_its_own_place() {
    let rows = [3, 1, 2, 6];
    let chunk = 8;
    let legs: Vec<_> = rows
        .iter()
        .map(|rows| Tap::new(memory(Wanted { block_size: BlockSize::B512, blocks: rows * chunk, read_only: false }, 0)))
        .collect();
    let map = StripeMap::new(4096, &legs, BlockSize::B512, true);
    assert_eq!(map.capacity(&legs), 12 * chunk);
    let mut seen = std::collections::BTreeSet::new();
    for lba in 0..12 * chunk {
        let Place { leg, lba: at, run } = map.locate(lba);
        assert!(at < rows[leg] * chunk, "block {lba} is block {at} of leg {leg}");
        assert_eq!(run, chunk - lba % chunk);
        assert!(seen.insert((leg, at)), "block {lba} has the place of another");
    }
}

/// The example of docs/formats/arrangement.md.
#[test]
fn chunks_are_where_the_page_says() {
    let chunk = 8;
    let leg = |rows| Tap::new(memory(Wanted { block_size: BlockSize::B512, blocks: rows * chunk, read_only: false }, 0));
    let map = StripeMap::new(4096, &[3, 4, 2].map(leg), BlockSize::B512, true);
    let places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (1, 3)];
    for (number, (leg, row)) in (0..).zip(places) {
        let place = map.locate(number * chunk + 5);
        assert_eq!((place.leg, place.lba), (leg, row * chunk + 5), "chunk {number}");
    }
}

#[test]
fn unequal_legs_do_not_grow_together() {
    let legs: Vec<_> =
        [16, 32].map(|blocks| memory(Wanted { block_size: BlockSize::B512, blocks, read_only: false }, 0)).into();
    let graph = graph("stripe(chunk=4K, disk:0, disk:1)", &legs, None, Reason::Create, &Arc::default()).unwrap();
    let volume = graph.volume();
    assert_eq!(volume.geometry().blocks.0, 48);
    let refused = |blocks: u64, why: &str| {
        let refused = volume.resize(BlockCount(blocks)).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
        assert_eq!(legs[0].geometry().blocks.0, 16);
    };
    // With a size it would be opened over equal legs, and have less of them: what lies on the longer one alone would be elsewhere.
    for blocks in [64, 48, 40, 33] {
        refused(blocks, "a stripe over unequal legs, which its stack does not state, beyond what all of them have");
    }
    assert_eq!(volume.geometry().blocks.0, 48);
    volume.resize(BlockCount(20)).unwrap();
    volume.resize(BlockCount(32)).unwrap();
    refused(33, "resizing a stripe");
    assert_eq!(volume.geometry().blocks.0, 32);
}

#[test]
fn legs_of_stated_sizes_are_opened_again_with_those() {
    let stripe = |stated: &str, second: u64| {
        let legs: Vec<_> =
            [16, second].map(|blocks| memory(Wanted { block_size: BlockSize::B512, blocks, read_only: false }, 0)).into();
        let stack = format!("stripe(chunk=4K, disk:0(size=8K), disk:1{stated})");
        graph(&stack, &legs, None, Reason::Create, &Arc::default()).unwrap()
    };
    // The second one's own size is known to nobody when the first has grown.
    let graph = stripe("", 16);
    let volume = graph.volume();
    let refused = volume.resize(BlockCount(64)).unwrap_err().to_string();
    assert!(refused.contains("growing a stripe of whose legs only some have a size= in the stack"), "{refused}");
    volume.resize(BlockCount(20)).unwrap();
    volume.resize(BlockCount(32)).unwrap();
    // Unequal ones do not grow, and are what they are whatever the volume's size is.
    let graph = stripe("(size=16K)", 32);
    let volume = graph.volume();
    let refused = volume.resize(BlockCount(64)).unwrap_err().to_string();
    assert!(refused.contains("growing a stripe over unequal legs"), "{refused}");
    volume.resize(BlockCount(40)).unwrap();
    volume.resize(BlockCount(48)).unwrap();
    // Equal ones grow.
    let graph = stripe("(size=8K)", 16);
    graph.volume().resize(BlockCount(64)).unwrap();
    graph.volume().resize(BlockCount(20)).unwrap();
}

#[test]
fn a_request_goes_to_all_legs_at_once() {
    let legs: Vec<Arc<FaultVolume>> = (0..4)
        .map(|leg| FaultVolume::new(memory(Wanted { block_size: BlockSize::B512, blocks: 1024, read_only: false }, leg), 1))
        .collect();
    let volumes: Vec<Arc<dyn Volume>> = legs.iter().map(|leg| Arc::<FaultVolume>::clone(leg) as _).collect();
    let graph = graph("stripe(chunk=4K, disk:0, disk:1, disk:2, disk:3)", &volumes, None, Reason::Create, &Arc::default());
    let graph = graph.unwrap();
    let mut harness = SyncHarness::new(SEED, false);
    let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
    let data = bench.write_random(0, 512);
    bench.expect(0, &data);
    for leg in &legs {
        // 64 chunks over four legs are neighbours on each: one request.
        let requests =
            [millrace_backends::fault::Kind::Write, millrace_backends::fault::Kind::Read].map(|kind| leg.requests(kind));
        assert_eq!(requests, [1, 1]);
    }
}

#[test]
fn nonsense_is_refused_by_name() {
    let refused = |stack: &str| stack.parse::<crate::Node>().unwrap_err().to_string();
    assert_eq!(
        refused("stripe(chunk=5000, null)"),
        "stack, column 8: stripe: chunk: a power of two from 4K to 64M is possible"
    );
    assert_eq!(refused("stripe(chunk=2K, null)"), refused("stripe(chunk=1G, null)").replace("1G", "2K"));
    assert!(refused("stripe()").contains("it is over 0 legs; 1 to 64 are possible"));
    let small = [memory(Wanted { block_size: BlockSize::B512, blocks: 7, read_only: false }, 0)];
    let error = graph("stripe(chunk=4K, disk:0)", &small, None, Reason::Create, &Arc::default()).err().unwrap();
    assert_eq!(error.to_string(), "stripe: leg 0 is smaller than a chunk of 4096 bytes");
    let [a, b] =
        [BlockSize::B512, BlockSize::B4096].map(|block_size| memory(Wanted { block_size, blocks: 64, read_only: false }, 0));
    let error = graph("stripe(chunk=4K, disk:0, disk:1)", &[a, b], None, Reason::Create, &Arc::default()).err().unwrap();
    assert!(error.to_string().contains("blocks of 4096 bytes and the volume of 512"), "{error}");
}

#[test]
fn flushed_data_survive_power_cuts() {
    crash_test(&CrashTest::new("stripe(chunk=4K, disk:0, disk:1, disk:2)", 3));
}

/// A growth that failed on the other leg has left it longer.
#[test]
fn a_leg_that_alone_has_grown_adds_nothing() {
    let wanted = Wanted { block_size: BlockSize::B512, blocks: 24, read_only: false };
    let legs: Vec<_> = (0..2).map(|leg| Tap::new(memory(wanted, leg))).collect();
    let map = StripeMap::new(4096, &legs, BlockSize::B512, true);
    assert_eq!(map.capacity(&legs), 48);
    legs[0].resize(BlockCount(48)).unwrap();
    assert_eq!(map.capacity(&legs), 48);
    legs[1].resize(BlockCount(40)).unwrap();
    assert_eq!(map.capacity(&legs), 80);
}

#[test]
fn legs_that_keep_their_size_are_opened_again_with_it() {
    let mirrors = "stripe(chunk=4K, mirror(region=64K, disk:0, disk:1), meter | mirror(region=64K, disk:2, disk:3))";
    let parities = "stripe(chunk=4K, parity(chunk=4K, journal=128K, disk:0, disk:1, disk:2), \
                    parity(chunk=4K, journal=128K, disk:3, disk:4, disk:5))";
    for (stack, count) in [(mirrors, 4), (parities, 6)] {
        let wanted = Wanted { block_size: BlockSize::B512, blocks: 8192, read_only: false };
        let legs: Vec<_> = (0..count).map(|leg| memory(wanted, leg)).collect();
        let open = |blocks: u64, reason| {
            let made = graph(stack, &legs, Some(blocks << 9), reason, &Arc::default());
            made.unwrap_or_else(|error| panic!("{stack}: {error}"))
        };
        let opened = open(1024, Reason::Create);
        let mut harness = SyncHarness::new(SEED, false);
        let data = Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).write_random(0, 1024);
        let refused = opened.volume().resize(BlockCount(768)).unwrap_err().to_string();
        assert!(refused.contains("would have to have 196608, or not open again"), "{refused}");
        assert_eq!(opened.volume().geometry().blocks.0, 1024);
        Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).expect(0, &data);
        // Within the last row they need be as long.
        opened.volume().resize(BlockCount(1020)).unwrap();
        drop(opened);
        let opened = open(1020, Reason::Open);
        Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).expect(0, &data[..1020 << 9]);
    }
}

/// What one leg grew by and another refused does not count when the volume is opened again, however often it was tried.
#[test]
fn legs_that_keep_their_size_have_it_back_when_another_cannot_grow() {
    // With the mirrors' own 64 KiB. The last one is a device, which has no more.
    let blocks = 512 + 128;
    let disk = |leg| memory(Wanted { block_size: BlockSize::B512, blocks, read_only: false }, leg);
    let legs = [disk(0), disk(1), disk(2), Device::over(disk(3), blocks)];
    let stack = "stripe(chunk=4K, mirror(region=64K, disk:0, disk:1), mirror(region=64K, disk:2, disk:3))";
    let open = |reason| {
        graph(stack, &legs, Some(1024 << 9), reason, &Arc::default()).unwrap_or_else(|error| panic!("{stack}: {error}"))
    };
    let opened = open(Reason::Create);
    let mut harness = SyncHarness::new(SEED, false);
    let data = Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).write_random(0, 1024);
    for more in [2048, 4096] {
        let refused = opened.volume().resize(BlockCount(more)).unwrap_err().to_string();
        assert!(refused.contains("the device is smaller"), "{refused}");
        assert_eq!(legs.each_ref().map(|leg| leg.geometry().blocks.0), [blocks; 4]);
    }
    drop(opened);
    let opened = open(Reason::Open);
    Bench::new(&mut harness, Arc::clone(opened.volume()), SEED).expect(0, &data);
}
