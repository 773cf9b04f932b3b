//! A disk that does not take its table.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, BlockError};

use super::*;

const FAULT: Effect = Effect::Fail(BlockError::WriteFault { errno: 5 });

/// A disk of eight extents that can fail, with a volume of four.
fn faulty() -> (Arc<FaultVolume>, Pool, Graph) {
    let leg = FaultVolume::new(memory(9 * EXTENT), SEED);
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
