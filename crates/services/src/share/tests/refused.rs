//! A disk that does not take its table, and a volume that goes while requests of it are still under way.

use std::{sync::atomic::Ordering, thread, time::Duration};

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{
    BlockCount, BlockError,
    conformance::{Harness, Job, Memory},
};

use super::*;
use crate::testing::waiting::{Gate, until};

const FAULT: Effect = Effect::Fail(BlockError::WriteFault { errno: 5 });

/// A disk of eight extents that can fail, with a volume of four.
fn faulty() -> (Arc<FaultVolume>, Pool, Graph) {
    faulty_over(memory(9 * EXTENT))
}

fn faulty_over(medium: Arc<dyn Volume>) -> (Arc<FaultVolume>, Pool, Graph) {
    let leg = FaultVolume::new(medium, SEED);
    let below: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&leg);
    let pool = Pool::open(&below, "disk(extent=16K)", Reason::Create).unwrap();
    let a = pool.create("a", 4 * EXTENT);
    (leg, pool, a)
}

/// The daemon comes back, and the volume with the size that was stored of it.
fn reopened(leg: &Arc<FaultVolume>, size: u64) -> (Pool, Graph) {
    leg.clear();
    let below: Arc<dyn Volume> = Arc::<FaultVolume>::clone(leg);
    let pool = Pool::open(&below, "disk(extent=16K)", Reason::Open).unwrap();
    let a = pool.volume("a", "share", Some(size), Reason::Open).unwrap();
    (pool, a)
}

#[test]
fn a_smaller_size_that_was_refused_does_not_come_back_later() {
    let (leg, pool, a) = faulty();
    // The table is there by then.
    leg.add(Rule::new(Kind::Flush, When::Nth(1), FAULT));
    let refused = a.volume().resize(BlockCount(64)).unwrap_err().to_string();
    assert!(refused.contains("volume a"), "{refused}");
    assert_eq!(a.volume().geometry().blocks, BlockCount(128));
    let data = on_bench(&a, |bench| {
        let data = bench.write_random(127, 1);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        data
    });
    drop((a, pool));
    let (_pool, a) = reopened(&leg, 4 * EXTENT);
    on_bench(&a, |bench| bench.expect(127, &data));
}

#[test]
fn a_size_of_which_nobody_knows_whether_it_was_stored_is_the_smaller_one() {
    for restart in [false, true] {
        let (leg, pool, a) = faulty();
        let data = on_bench(&a, |bench| bench.write_random(0, 128));
        // The smaller table is there, and the one before cannot be put in its place.
        leg.add(Rule::new(Kind::Flush, When::Nth(1), FAULT));
        leg.add(Rule::new(Kind::Write, When::Nth(2), FAULT));
        a.volume().resize(BlockCount(64)).unwrap();
        assert_eq!((a.volume().geometry().blocks, leg.faults()), (BlockCount(64), 2));
        let (pool, a) = if restart {
            drop((a, pool));
            reopened(&leg, 2 * EXTENT)
        } else {
            (pool, a)
        };
        on_bench(&a, |bench| bench.expect(0, &data[..64 * 512]));
        // What it gave up is not seen again, by it neither.
        a.volume().resize(BlockCount(96)).unwrap();
        let b = pool.create("b", 5 * EXTENT);
        on_bench(&a, |bench| {
            bench.expect(0, &data[..64 * 512]);
            bench.expect_zeroes(64, 32);
        });
        on_bench(&b, |bench| bench.expect_zeroes(0, 160));
        drop((a, b, pool));
        let (_pool, a) = reopened(&leg, 3 * EXTENT);
        on_bench(&a, |bench| bench.expect(0, &data[..64 * 512]));
    }
}

/// Writes one block.
fn write(volume: &Arc<dyn Volume>) -> Result<(), BlockError> {
    let memory = Memory::new(512);
    memory.segment(0, 512).fill(7);
    let job = Job { segments: vec![memory.segment(0, 512)], ..Job::new(Operation::Write { fua: false }, 5, 1) };
    SyncHarness::new(SEED, false).run(volume, &[job]).remove(0)
}

#[test]
fn room_is_given_away_when_the_last_request_has_ended_and_later_ones_are_refused() {
    let (leg, pool, mut a) = faulty();
    let volume = Arc::clone(a.volume());
    let before = leg.requests(Kind::Write);
    leg.add(Rule::new(Kind::Write, When::Nth(1), Effect::Delay(Duration::from_millis(300))));
    let late = {
        let volume = Arc::clone(&volume);
        thread::spawn(move || write(&volume))
    };
    until("the write begins", || leg.requests(Kind::Write) > before);
    a.discard(true);
    let b = pool.create("b", 8 * EXTENT);
    assert_eq!(late.join().unwrap(), Ok(()));
    on_bench(&b, |bench| bench.expect_zeroes(0, 256));
    // One that was held back somewhere above.
    assert_eq!(write(&volume), Err(BlockError::NotReady));
    assert!(volume.format(BlockSize::B512).is_err() && volume.resize(BlockCount(256)).is_err());
    on_bench(&b, |bench| bench.expect_zeroes(0, 256));
}

#[test]
fn a_volume_that_was_closed_comes_back_as_it_was() {
    let (_leg, pool, mut a) = faulty();
    let data = on_bench(&a, |bench| bench.write_random(0, 128));
    a.unmount();
    assert_eq!(write(a.volume()), Err(BlockError::NotReady));
    assert_eq!(pool.fact("volume a").as_deref(), Some("65536 bytes, not in use"));
    a.mount(Reason::Open).unwrap();
    on_bench(&a, |bench| bench.expect(0, &data));
}

/// A disk clears what a volume grows by, which takes long: meanwhile other volumes' stacks change under their guests, and the operator sees the disk.
#[test]
fn nobody_waits_for_a_disk_that_clears_extents() {
    let gate = Gate::before(memory(9 * EXTENT), |operation| matches!(operation, Operation::WriteZeroes { .. }));
    let (leg, pool, mut a) = faulty_over(Arc::<Gate>::clone(&gate));
    let b = pool.create("b", EXTENT);
    let before = leg.requests(Kind::WriteZeroes);
    gate.open.store(false, Ordering::Relaxed);
    let volume = Arc::clone(b.volume());
    let grows = thread::spawn(move || volume.resize(BlockCount(64)));
    until("the clearing begins", || leg.requests(Kind::WriteZeroes) > before);
    assert!(pool.fact("free").is_some());
    a.unmount();
    a.mount(Reason::Open).unwrap();
    assert!(!grows.is_finished(), "they were done meanwhile");
    gate.open.store(true, Ordering::Relaxed);
    grows.join().unwrap().unwrap();
    assert_eq!(b.volume().geometry().blocks, BlockCount(64));
    on_bench(&a, |bench| bench.expect_zeroes(0, 128));
}
