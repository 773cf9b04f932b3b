//! What is put in by mistake.

use super::{rebuild::look_at_marks, *};
use crate::{
    members::state::LegState,
    testing::{answers_nobody_without, change_record},
};

fn fails(form: Form, legs: &[Arc<dyn Volume>], reason: Reason) -> String {
    graph(&form.stack(), legs, None, reason, &Arc::default()).err().expect("it is refused").to_string()
}

#[test]
fn nonsense_is_refused_by_name() {
    let refused = |stack: &str| stack.parse::<crate::Node>().unwrap_err().to_string();
    for (stack, why) in [
        ("parity(chunk=5000, null, null, null)", "chunk: a power of two from 4K to 16M is possible"),
        ("parity(chunk=32M, null, null, null)", "chunk: a power of two from 4K to 16M is possible"),
        ("parity(redundancy=3, null, null, null)", "redundancy: 1 or 2 is possible"),
        ("parity(redundancy=0, null, null, null)", "redundancy: 1 or 2 is possible"),
        ("parity(journal=64K, null, null, null)", "journal: a multiple of 64K from 128K to 64M is possible"),
        ("parity(log=none, null, null, null)", "log: partial or all"),
        ("parity(safe=perhaps, null, null, null)", "safe: \"perhaps\" is not true or false"),
        ("parity(region=1000, null, null, null)", "region: a power of two of at least 64K is possible"),
        ("parity(rate=1, null, null, null)", "rate: at least 4K a second"),
    ] {
        assert!(refused(stack).ends_with(why), "{}", refused(stack));
    }
    assert!(refused("parity(null, null)").contains("it is over 2 legs; 3 to 8 are possible"));
    let legs = volumes(&SMALL.faulty(1024));
    let three = Form { settings: "redundancy=2, journal=128K, ", legs: 3 };
    assert!(fails(three, &legs, Reason::Create).ends_with("3 legs; with redundancy=2 there must be 4"));
    let twice = [&legs[0], &legs[1], &legs[0]].map(Arc::clone);
    assert!(fails(SMALL, &twice, Reason::Create).ends_with("leg 2 (leg0) stands there twice"));
    let small: Vec<_> =
        (0..3).map(|leg| memory(Wanted { block_size: BlockSize::B512, blocks: 128, read_only: false }, leg)).collect();
    assert!(fails(SMALL, &small, Reason::Create).contains("the smallest leg has 65536 bytes"));
    let mut mixed = legs.clone();
    mixed[1] = memory(Wanted { block_size: BlockSize::B4096, blocks: 1024, read_only: false }, 1);
    assert!(fails(SMALL, &mixed, Reason::Create).contains("4096"));
}

#[test]
fn legs_in_another_order_or_of_another_volume_are_refused() {
    let legs = volumes(&SMALL.faulty(1024));
    assert!(fails(SMALL, &legs, Reason::Open).contains("it holds no parity, and nor do the others"));
    let graph = SMALL.open(&legs, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 1024));
    drop(graph);
    let turned = [&legs[1], &legs[0], &legs[2]].map(Arc::clone);
    let refused = fails(SMALL, &turned, Reason::Open);
    assert!(refused.contains("it is leg 1 and stands in the place of leg 0"), "{refused}");
    let other = volumes(&SMALL.faulty(1024));
    drop(SMALL.open(&other, Reason::Create));
    let mixed = [&legs[0], &legs[1], &other[2]].map(Arc::clone);
    let refused = fails(SMALL, &mixed, Reason::Open);
    assert!(refused.contains("it belongs to a parity of volume"), "{refused}");
    let coarse = Form { settings: "chunk=8K, journal=128K, ", ..SMALL };
    let refused = fails(coarse, &legs, Reason::Open);
    assert!(refused.ends_with("other settings: chunk=4K; write these in the stack"), "{refused}");
    let graph = SMALL.open(&legs, Reason::Open);
    on_bench(&graph, |bench| bench.expect(0, &data));
}

#[test]
fn damaged_tables_take_a_leg_out_and_newer_ones_are_refused() {
    let legs = volumes(&SMALL.faulty(1024));
    let graph = SMALL.open(&legs, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 1024));
    let rules = parity(&graph).members.rules;
    drop(graph);
    let region = rules.table_region(rules.area_of(&*legs[0]));
    for copy in 0..2 {
        let at = region.offset + copy * region.len / 2;
        let mut bad = crate::legs::read(&legs[0], at, 4096).unwrap();
        bad[40] ^= 1;
        crate::legs::write(&legs[0], at, bad).unwrap();
        let graph = SMALL.open(&legs, Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &data));
        if copy == 0 {
            assert!(fact(&graph, "table of leg 0 repaired").is_some_and(|said| said.contains("is damaged")));
            // The other copy is used, and both are written anew; so both are spoilt now.
            let mut bad = crate::legs::read(&legs[0], at, 4096).unwrap();
            bad[40] ^= 1;
            drop(graph);
            crate::legs::write(&legs[0], at, bad).unwrap();
        } else {
            assert_eq!(fact(&graph, "leg 0").as_deref(), Some("failed"));
            drop(graph);
        }
    }
    let region = rules.table_region(rules.area_of(&*legs[1]));
    let newer = crate::record::Region { version: 4, ..region };
    let found = region.load(&legs[1]).unwrap().unwrap();
    newer.store(&legs[1], found.generation + 1, &found.content).unwrap();
    let held = |legs: &[Arc<dyn Volume>]| -> Vec<_> {
        legs.iter().map(|leg| crate::legs::read(leg, 0, leg.geometry().bytes() as usize).unwrap()).collect()
    };
    let before = held(&legs);
    let refused = fails(SMALL, &legs, Reason::Open);
    assert!(refused.contains("layout 4") && refused.contains("use a newer millrace"), "{refused}");
    assert!(held(&legs) == before, "nothing was written");
}

#[test]
fn a_leg_that_was_used_apart_is_refused() {
    let legs = volumes(&SMALL.faulty(1024));
    let graph = SMALL.open(&legs, Reason::Create);
    let rules = parity(&graph).members.rules;
    command(&graph, "fail", 1).unwrap();
    drop(graph);
    change_record(rules, &legs[1], |table, _| {
        table.event += 2;
        table.members[0].state = LegState::Failed;
    });
    assert!(fails(SMALL, &legs, Reason::Open).contains("used apart from each other"));
}

/// What it got meanwhile no mark of the others tells.
#[test]
fn a_leg_that_was_used_apart_and_is_rebuilt_gets_everything() {
    let legs = volumes(&SMALL.faulty(1024));
    let graph = SMALL.open(&legs, Reason::Create);
    let rules = parity(&graph).members.rules;
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 1024));
    (0..2).for_each(|_| look_at_marks(&graph));
    command(&graph, "fail", 1).unwrap();
    change_record(rules, &legs[1], |table, _| {
        table.event += 3;
        (table.members[0].state, table.members[0].failed_at) = (LegState::Failed, table.event);
    });
    crate::legs::write(&legs[1], 3 * 4096, vec![0xee; 4096]).unwrap();
    assert!(command(&graph, "rebuild", 1).unwrap().ends_with("with everything"));
    assert!(resync(&graph));
    parity_fits(&graph, &legs);
    on_bench(&graph, |bench| bench.expect(0, &data));
}

/// What it says is whole, and cannot be: no leg is so long.
#[test]
fn a_table_of_more_bytes_than_a_leg_has_is_refused() {
    let legs = volumes(&SMALL.faulty(1024));
    let graph = SMALL.open(&legs, Reason::Create);
    let rules = parity(&graph).members.rules;
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 1024));
    drop(graph);
    let say = |bytes: u64| legs.iter().for_each(|leg| change_record(rules, leg, |table, _| table.bytes = bytes));
    say(1 << 40);
    let refused = fails(SMALL, &legs, Reason::Open);
    assert!(refused.contains("it is of a parity of 1099511627776 bytes, and this one has 262144"), "{refused}");
    say(1024 * 512 / 2);
    let graph = SMALL.open(&legs, Reason::Open);
    assert!((0..SMALL.legs).all(|leg| fact(&graph, &format!("leg {leg}")).as_deref() == Some("good")));
    on_bench(&graph, |bench| bench.expect(0, &data));
}

/// The way back of a change that has overwritten them.
#[test]
fn without_its_tables_it_answers_no_request() {
    let legs = volumes(&SMALL.faulty(1024));
    let graph = SMALL.open(&legs, Reason::Create);
    answers_nobody_without(SMALL.plan().rules(&parity(&graph).layout), TABLES, &legs, &graph);
}

#[test]
fn nonsense_in_the_journal_is_not_carried_out() {
    let legs = volumes(&SMALL.faulty(1024));
    let graph = SMALL.open(&legs, Reason::Create);
    let mut data = Vec::new();
    on_bench(&graph, |bench| data = bench.write_random(0, 1024));
    let places: Vec<u64> = (0..3).map(|leg| parity(&graph).journal_of(leg)).collect();
    drop(graph);
    let mut random = conformance::Random::new(SEED);
    for round in 0..200 {
        for (leg, at) in legs.iter().zip(&places) {
            // Random bytes in a slot, with and without the magic; in its record of what is void only now and then.
            let mut bytes = random.bytes(4096);
            if round % 2 == 0 {
                bytes[..12].copy_from_slice(b"MPJOURNL\x01\0\0\0");
            }
            crate::legs::write(leg, at + 8192 + random.below(2) * 65536, bytes).unwrap();
            if round % 50 == 49 {
                crate::legs::write(leg, *at, random.bytes(8192)).unwrap();
            }
        }
        let graph = SMALL.open(&legs, Reason::Open);
        on_bench(&graph, |bench| bench.expect(0, &data));
    }
}
