//! What a leg says of the set that it belongs to.

use std::sync::Arc;

use millrace_block::Volume;
#[cfg(test)]
use millrace_block::{
    Operation,
    conformance::{Bench, SyncHarness},
};

#[cfg(test)]
use crate::{
    graph::Graph,
    legs,
    service::{Health, LegOrigin, Mount, Reason},
};
use crate::{
    members::{Rules, state::Table},
    record::Region,
};

#[cfg(test)]
const SEED: u64 = 0x7461_626c;

/// Changes it, and which member it is of that, in both copies, which are as whole as before.
pub(crate) fn change_record(rules: Rules, leg: &Arc<dyn Volume>, change: impl FnOnce(&mut Table, &mut usize)) {
    let region = rules.table_region(rules.area_of(&**leg));
    let found = region.load(leg).expect("its record can be read").expect("it has one");
    let (mut table, mut own) = Table::decode(&found.content).expect("a table");
    change(&mut table, &mut own);
    let stored = Region { version: table.version(), ..region };
    (1..=2).for_each(|more| stored.store(leg, found.generation + more, &table.encode(own)).expect("the leg takes it"));
}

/// The way back of a change that has overwritten the tables of a set, which has the area of so many bytes: nobody is answered until they are there
/// again. What the mount said without them.
#[cfg(test)]
pub(crate) fn answers_nobody_without(rules: Rules, bytes: u64, legs: &[Arc<dyn Volume>], graph: &Graph) -> String {
    let on_bench = |test: &mut dyn FnMut(&mut Bench<'_>)| {
        test(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED));
    };
    let service = Arc::clone(graph.root.service.as_ref().expect("a service"));
    let mut data = Vec::new();
    on_bench(&mut |bench| data = bench.write_random(0, 1024));
    service.unmount().expect("it goes");
    let area = |leg: &Arc<dyn Volume>| rules.area_of(&**leg);
    let tables: Vec<_> = legs.iter().map(|leg| legs::read(leg, area(leg), bytes as usize).expect("its tables")).collect();
    for leg in legs {
        legs::write(leg, area(leg), vec![0; bytes as usize]).expect("the leg takes it");
    }
    let mount = Mount { reason: Reason::Open, legs: vec![LegOrigin::Kept; legs.len()], previous: None, reformat: false };
    let error = service.mount(&mount).expect_err("there are no tables").to_string();
    on_bench(&mut |bench| {
        let segment = [bench.memory.segment(0, 512)];
        assert!(bench.moving(Operation::Read, 3, &segment).is_err());
        assert!(bench.write(3, &[7; 512]).is_err());
        assert!(bench.plain(Operation::Flush, 0, 0).is_err());
    });
    assert_eq!(service.status().health, Health::Failed);
    for (leg, tables) in legs.iter().zip(tables) {
        legs::write(leg, area(leg), tables).expect("the leg takes it");
    }
    service.mount(&mount).expect("the tables are there");
    on_bench(&mut |bench| bench.expect(0, &data));
    error
}
