//! What is put in by mistake: clear errors, and nothing is changed.

use super::*;
use crate::{record::Region, testing::graph_of_plan};

#[test]
fn nonsense_is_refused_by_name() {
    let refused = |stack: &str| stack.parse::<crate::Node>().unwrap_err().to_string();
    assert!(refused("cache(null, null)").contains("mode: is needed"));
    assert!(refused("cache(mode=around, null, null)").contains("\"around\" is neither through nor back"));
    for line in ["5000", "2K", "512K"] {
        assert!(refused(&format!("cache(mode=back, line={line}, null, null)")).contains("a power of two from 4K to 256K"));
    }
    assert!(refused("cache(mode=back, rate=1, null, null)").contains("rate: at least 4K a second"));
    assert!(refused("cache(mode=back, around=much, null, null)").contains("around"));
    assert!(refused("cache(mode=back, null)").contains("it is over 1 legs; "));
    assert!(refused("cache(mode=back, ack=soon, null, null)").contains("\"soon\" is neither durable nor fast"));
    let legs = volumes(&faulty(50));
    assert!(fails("mode=back, line=64K", &legs, Reason::Create).contains("a line has 64 blocks at most: 32K"));
    let twice = [Arc::clone(&legs[1]), Arc::clone(&legs[1])];
    assert!(fails("mode=back", &twice, Reason::Create).contains("slow stands there twice"));
    let tiny = [memory("tiny", 48 << 10, BlockSize::B512), Arc::clone(&legs[1])];
    assert!(
        fails("mode=back, line=4K", &tiny, Reason::Create)
            .contains("the fast leg (tiny) has 49152 bytes, which is too small")
    );
    let other = [memory("fast", 1 << 20, BlockSize::B4096), Arc::clone(&legs[1])];
    assert!(fails("mode=back", &other, Reason::Create).contains("4096"));
    let graph = graph(&stack("mode=back, line=4K"), &legs, Some(2 << 20), Reason::Create, &Arc::default());
    assert!(graph.err().unwrap().to_string().contains("the slow leg (slow) has 1048576 bytes and the volume 2097152"));
    let graph = open("mode=back, line=4K", &legs, Reason::Create);
    let command = |name: &str| cache(&graph).command(name, &Settings::default()).unwrap_err().to_string();
    assert_eq!(command("jump"), "\"jump\" is no command of cache; there are flush, resume");
    assert!(command("resume").contains("in use"));
}

#[test]
fn a_fast_leg_without_a_cache_opens_nothing() {
    let legs = volumes(&faulty(50));
    let refused = fails("mode=back, line=4K", &legs, Reason::Open);
    assert!(refused.contains("it holds no cache") && refused.contains("leg fast"), "{refused}");
}

#[test]
fn a_fast_leg_that_holds_something_else_is_left_alone() {
    // Such as a volume's data, when the legs were confused.
    let legs = volumes(&faulty(50));
    legs::write(&legs[0], 4096, vec![0x5a; 512]).unwrap();
    for reason in [Reason::Create, Reason::Change] {
        let refused = fails("mode=through, line=4K", &legs, reason);
        assert!(refused.contains("leg fast: it holds something else"), "{refused}");
    }
    assert_eq!(legs::read(&legs[0], 4096, 512).unwrap(), [0x5a; 512]);
}

/// A cache with dirty data, after a crash.
fn dirty() -> (Vec<Arc<dyn Volume>>, Vec<u8>) {
    let legs = volumes(&faulty(50));
    let graph = open("mode=back, line=4K", &legs, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| {
        data = bench.write_random(0, 40);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    (legs, data)
}

fn expect(legs: &[Arc<dyn Volume>], settings: &str, data: &[u8]) {
    let graph = open(settings, legs, Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, data));
}

#[test]
fn a_leg_with_dirty_data_of_another_volume_is_refused() {
    let (legs, data) = dirty();
    let before = legs::read(&legs[0], 0, legs[0].geometry().bytes() as usize).unwrap();
    // Another size: certainly another volume's.
    let other = [Arc::clone(&legs[0]), memory("other", 2 << 20, BlockSize::B512)];
    for reason in [Reason::Open, Reason::Create, Reason::Change] {
        let refused = fails("mode=back, line=4K", &other, reason);
        assert!(refused.contains("is the cache of volume \"test\"") && refused.contains("not written back"), "{refused}");
    }
    // The same size, put under a running volume, which has that name and may have taken it out.
    let same = [Arc::clone(&legs[0]), memory("other", 1 << 20, BlockSize::B512)];
    let refused = fails("mode=through, line=4K", &same, Reason::Change);
    assert!(refused.contains("they are older than the slow leg: --reformat begins an empty one"), "{refused}");
    assert!(!refused.contains("open that volume and flush it"), "{refused}");
    // The same size, of a new volume of another name.
    let node: crate::Node = stack("mode=back, line=4K").parse().unwrap();
    let plan = crate::graph::Plan { volume: "another", stack: &node, size: None, block_size: BlockSize::B512 };
    let refused = graph_of_plan(&plan, &same, Reason::Create, &Arc::default()).err().unwrap().to_string();
    assert!(
        refused.contains("is the cache of volume \"test\"") && refused.contains("flush it. If nothing of it is needed"),
        "{refused}"
    );
    assert!(legs::read(&legs[0], 0, before.len()).unwrap() == before, "nothing was changed");
    // The volume made again from its own legs has everything.
    drop(open("mode=back, line=4K", &legs, Reason::Create));
    expect(&legs, "mode=back, line=4K", &data);
}

#[test]
fn a_changed_line_size_is_refused_while_anything_is_dirty() {
    let (legs, data) = dirty();
    let refused = fails("mode=back, line=8K", &legs, Reason::Open);
    assert!(refused.contains("line: the cache has lines of 4K and dirty ones among them: write line=4K"), "{refused}");
    // Where none is set, that of the cache counts.
    expect(&legs, "mode=back", &data);
    let mut graph = open("mode=through", &legs, Reason::Open);
    cache(&graph).drain_now().unwrap();
    close(&mut graph);
    drop(graph);
    expect(&legs, "mode=back, line=8K", &data);
}

#[test]
fn a_slow_leg_that_holds_other_data_is_refused_or_the_cache_begins_empty() {
    for dirty in [true, false] {
        let legs = volumes(&faulty(50));
        let mut graph = open("mode=back, line=4K", &legs, Reason::Create);
        on_bench(&graph, |bench| drop(bench.write_random(0, 80)));
        cache(&graph).drain_now().unwrap();
        if dirty {
            on_bench(&graph, |bench| drop(bench.write_random(800, 8)));
        }
        close(&mut graph);
        drop(graph);
        let other = [Arc::clone(&legs[0]), memory("other", 1 << 20, BlockSize::B512)];
        if dirty {
            let refused = fails("mode=back, line=4K", &other, Reason::Open);
            assert!(refused.contains("(other) holds other data than were there"), "{refused}");
        } else {
            let graph = open("mode=back, line=4K", &other, Reason::Open);
            on_bench(&graph, |bench| bench.expect_zeroes(0, 2048));
        }
    }
}

#[test]
fn a_damaged_superblock_is_read_from_its_other_copy_and_a_newer_one_is_refused() {
    let (legs, data) = dirty();
    let spoil = |at: u64| {
        let mut bytes = legs::read(&legs[0], at, 512).unwrap();
        bytes[50] ^= 1;
        legs::write(&legs[0], at, bytes).unwrap();
    };
    let repaired = |graph: &Graph| {
        let facts = graph.tree().status.unwrap().facts;
        facts.into_iter().find_map(|(name, what)| (name == "superblock repaired").then_some(what))
    };
    for at in [0, 8192] {
        spoil(at);
        let graph = open("mode=back", &legs, Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &data));
        assert!(repaired(&graph).is_some_and(|what| what.contains("is damaged")), "{:?}", repaired(&graph));
    }
    assert_eq!(repaired(&open("mode=back", &legs, Reason::Open)), None);
    let found = disk::REGION.load(&legs[0]).unwrap().unwrap();
    let newer = Region { version: 3, ..disk::REGION };
    newer.store(&legs[0], found.generation + 1, &found.content).unwrap();
    assert!(fails("mode=back", &legs, Reason::Open).contains("layout 3"));
    let (legs, _) = dirty();
    for at in [0, 8192] {
        let mut bytes = legs::read(&legs[0], at, 512).unwrap();
        bytes[50] ^= 1;
        legs::write(&legs[0], at, bytes).unwrap();
    }
    assert!(fails("mode=back", &legs, Reason::Open).contains("is damaged"));
}

#[test]
fn a_damaged_table_is_refused_while_anything_may_be_dirty() {
    let (legs, data) = dirty();
    let at = 16 << 10;
    let good = legs::read(&legs[0], at, 512).unwrap();
    let mut bad = good.clone();
    bad[20] ^= 1;
    legs::write(&legs[0], at, bad.clone()).unwrap();
    let refused = fails("mode=back", &legs, Reason::Open);
    assert!(refused.contains("page 0 of its table is damaged") && refused.contains("(slow)"), "{refused}");
    // A line that points outside the volume, with a good checksum.
    let (superblock, _) = Superblock::load(&legs[0]).unwrap().unwrap();
    let mut page = vec![0; 512];
    disk::encode_page(&mut page, 512, 0, superblock.mark(), |slot| super::table::Entry {
        line: if slot == 0 { 257 } else { 0 },
        dirty: 1,
        valid: 1,
    });
    legs::write(&legs[0], at, page).unwrap();
    assert!(fails("mode=back", &legs, Reason::Open).contains("slot 0 has line 256, which lies outside the volume"));
    let mut page = vec![0; 512];
    disk::encode_page(&mut page, 512, 0, superblock.mark(), |slot| super::table::Entry {
        line: if slot < 2 { 3 } else { 0 },
        dirty: u64::from(slot < 2),
        valid: 1,
    });
    legs::write(&legs[0], at, page).unwrap();
    assert!(fails("mode=back", &legs, Reason::Open).contains("line 2 in two places"));
    legs::write(&legs[0], at, good).unwrap();
    expect(&legs, "mode=back", &data);
    // With nothing dirty, lines are only read again from the slow leg.
    let mut graph = open("mode=back", &legs, Reason::Open);
    cache(&graph).drain_now().unwrap();
    close(&mut graph);
    drop(graph);
    legs::write(&legs[0], at, bad).unwrap();
    expect(&legs, "mode=back", &data);
}
