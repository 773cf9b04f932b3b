//! Guests do not choose the names of what they make, and workers that do not ask each other may have chosen one twice.

use std::collections::BTreeMap;

use millrace_services::Leaf;
use uuid::Uuid;

use super::Stored;
use crate::{
    Name,
    manager::twin_name,
    store::{Changes, StoreError, VolumeRecord},
};

/// Gives volumes that guests made other names where another worker's volume has theirs: nobody is kept from starting for them. What the
/// operator named stays as it is.
pub(super) fn rename(states: &mut [Stored]) -> Result<(), StoreError> {
    let mut holders: BTreeMap<Name, Vec<(Uuid, bool)>> = BTreeMap::new();
    for record in states.iter().flat_map(|state| &state.volumes) {
        let holders = holders.entry(record.spec.name.clone()).or_default();
        // In two states it may be one thing.
        if holders.iter().all(|(uuid, _)| *uuid != record.uuid) {
            holders.push((record.uuid, is_guests(record)));
        }
    }
    for (name, holders) in &mut holders {
        holders.sort_by_key(|(_, is_guests)| *is_guests);
        for (uuid, _) in holders.iter().skip(1).filter(|(_, is_guests)| *is_guests) {
            rename_one(states, name, *uuid)?;
        }
    }
    Ok(())
}

/// Whether a guest made it: it may be the operator's by now.
fn is_guests(record: &VolumeRecord) -> bool {
    record.created_by.is_some() || record.owns_file
}

fn rename_one(states: &mut [Stored], old: &Name, uuid: Uuid) -> Result<(), StoreError> {
    let Ok(new) = twin_name(old.as_str(), uuid).parse::<Name>() else { return Ok(()) };
    let mut volumes = states.iter().flat_map(|state| &state.volumes);
    let is_leaf = |record: &VolumeRecord| {
        record.spec.stack.leaves().into_iter().filter_map(Leaf::volume).any(|leaf| leaf == old.as_str())
    };
    // Those are the operator's to put right: the start says so.
    // Of itself, one state may have had it renamed before a crash.
    if volumes.any(|record| (record.spec.name == new && record.uuid != uuid) || is_leaf(record)) {
        return Ok(());
    }
    for state in states {
        let Some(volume) = state.volumes.iter_mut().find(|record| record.spec.name == *old && record.uuid == uuid) else {
            continue;
        };
        volume.spec.name = new.clone();
        let shown =
            state.devices.iter_mut().flat_map(|device| &mut device.namespaces).map(|namespace| &mut namespace.volume);
        let copied = state.copies.iter_mut().flat_map(|copy| [&mut copy.source, &mut copy.target]);
        shown.chain(copied).filter(|name| **name == *old).for_each(|name| *name = new.clone());
        let changes = Changes {
            put_volumes: vec![volume],
            put_devices: state.devices.iter().collect(),
            put_copies: state.copies.iter().collect(),
            remove_volumes: vec![old],
            ..Changes::default()
        };
        state.store.apply(&changes)?;
        tracing::warn!(volume = %old, now = %new, %uuid, "another worker has a volume of this name; the one that a guest made has another now");
    }
    Ok(())
}
