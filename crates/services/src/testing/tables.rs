//! What a leg says of the set that it belongs to.

use std::sync::Arc;

use millrace_block::Volume;

use crate::{
    members::{Rules, state::Table},
    record::Region,
};

/// Changes it, and which member it is of that, in both copies, which are as whole as before.
pub(crate) fn change_record(rules: Rules, leg: &Arc<dyn Volume>, change: impl FnOnce(&mut Table, &mut usize)) {
    let region = rules.table_region(rules.area_of(&**leg));
    let found = region.load(leg).expect("its record can be read").expect("it has one");
    let (mut table, mut own) = Table::decode(&found.content).expect("a table");
    change(&mut table, &mut own);
    let stored = Region { version: table.version(), ..region };
    (1..=2).for_each(|more| stored.store(leg, found.generation + more, &table.encode(own)).expect("the leg takes it"));
}
