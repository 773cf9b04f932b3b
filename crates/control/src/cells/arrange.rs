//! Who belongs where, when the daemon starts: every device to its cell, with all that it shows.
//!
//! Cells and the daemon have a state each, of the same format. No worker runs yet: what has to go elsewhere, because isolation was
//! set otherwise before or a move was not finished, is put there first, and removed where it was then. So nothing is ever in no state.

mod twins;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use millrace_services::{Leaf, Node, throttle::groups_of};
use thiserror::Error;
use uuid::Uuid;

use super::{Kind, MAIN, Unsaid, door::Part, folder, forget, stored};
use crate::{
    Name,
    config::{Declared, IsolationMode},
    dirs::{DirError, make_private},
    manager::settle_files,
    model::{CopyState, GroupSpec},
    store::{Changes, CopyRecord, DeviceRecord, Store, StoreError, VolumeRecord},
};

/// How long cells of a daemon that was killed may take to end.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(20);

/// Why objects cannot be spread over workers.
#[derive(Debug, Error)]
pub enum ArrangeError {
    /// A state cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A folder cannot be used.
    #[error(transparent)]
    Dir(#[from] DirError),
    /// The cells cannot be listed.
    #[error("{}: {source}", path.display())]
    List {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Devices that show the same are to be apart.
    #[error(
        "devices {one} and {other} show the same volumes, or volumes of one disk, and isolation wants them in two workers ({here} and \
         {there}); give both one tenant, or start with --isolation shared and detach one of them"
    )]
    Apart {
        /// A device.
        one: Name,
        /// Its worker.
        here: String,
        /// Another device.
        other: Name,
        /// Its worker.
        there: String,
    },
    /// A worker would have the name of the daemon's own.
    #[error(
        "device {device} would have a worker called main, as the daemon's own is; start with --isolation shared, or rename it"
    )]
    Main {
        /// The device.
        device: Name,
    },
    /// Two workers have something of one name.
    #[error(
        "workers {here} and {there} have a {kind} {name} each; take the folder cells/{here} out of the state directory, start \
         without --config, delete the {kind} {name} that is left, stop, and put the folder back"
    )]
    Twice {
        /// "volume" or "device".
        kind: &'static str,
        /// The name.
        name: Name,
        /// A worker that is not the daemon's own.
        here: String,
        /// Another one.
        there: String,
    },
}

/// Who is where.
#[derive(Debug, Default)]
pub(crate) struct Arranged {
    /// The cells that are to run.
    pub(crate) cells: BTreeSet<Name>,
    /// What of the configuration file is whose; `None`: the daemon's own worker's.
    pub(super) parts: BTreeMap<Option<Name>, Part>,
    /// What cells have in their states.
    pub(super) stored: BTreeMap<Name, Unsaid>,
}

impl Arranged {
    /// These cells run, and nothing is to be made sure of.
    pub(crate) fn of(cells: BTreeSet<Name>) -> Self {
        Self { cells, ..Self::default() }
    }

    /// What of a configuration file is a worker's to make sure of: a cell's, or the daemon's own.
    pub(crate) fn part(&self, declared: &Declared, cell: Option<&Name>) -> Declared {
        let part = self.parts.get(&cell.cloned());
        let nothing = Part::default();
        let part = part.unwrap_or(&nothing);
        declared.part(&part.volumes, &part.devices)
    }
}

/// A state, and what is in it.
struct Stored {
    cell: Option<Name>,
    store: Store,
    volumes: Vec<VolumeRecord>,
    devices: Vec<DeviceRecord>,
    copies: Vec<CopyRecord>,
    groups: Vec<GroupSpec>,
    /// Of the volumes, those that have come and were not opened.
    received: BTreeSet<Name>,
}

/// Spreads what is stored and what is declared over workers. `own` is the daemon's state.
pub(crate) fn arrange(
    own: Store,
    state_dir: &Path,
    mode: IsolationMode,
    declared: Option<&Declared>,
) -> Result<(Store, Arranged), ArrangeError> {
    let list = |source| ArrangeError::List { path: state_dir.join(super::DIR), source };
    let mut states = vec![load(None, own)?];
    let cells = stored(state_dir).map_err(list)?;
    for cell in &cells {
        states.push(load(Some(cell.clone()), open(&folder(state_dir, cell))?)?);
    }
    end_moves(&mut states)?;
    twins::rename(&mut states)?;
    for (uuid, one, other) in of_one_uuid(&states) {
        tracing::warn!(%uuid, "{one} and {other} have one UUID, and whoever knows them by it takes them for one; delete one of them");
    }
    let mut families = Families::default();
    families.note_all(&states, mode, declared)?;
    let mut arranged = families.arranged(&states, mode, declared);
    for cell in arranged.cells.difference(&cells) {
        let path = folder(state_dir, cell);
        make_private(&path)?;
        states.push(load(Some(cell.clone()), open(&path)?)?);
    }
    put_right(&states, &mut families, mode)?;
    let volumes: Vec<&VolumeRecord> = states.iter().flat_map(|state| &state.volumes).collect();
    for state in &states {
        let Some(cell) = &state.cell else { continue };
        if arranged.cells.contains(cell) {
            arranged.stored.insert(cell.clone(), what_is_in(&state.store)?);
        } else {
            // Nobody reads of these files any more where their state goes. A worker that stays settles its own.
            settle_files(&state.store, &volumes)?;
        }
    }
    let mut states = states.into_iter();
    let own = states.next().expect("the first is the daemon's own").store;
    drop(states);
    for cell in cells.difference(&arranged.cells) {
        forget(state_dir, cell);
    }
    Ok((own, arranged))
}

/// What of a configuration file will be a cell's, as far as it can tell by itself: what was stored elsewhere and belongs to it has come before
/// it began. `own` is its state.
pub(crate) fn part_of(
    own: Store,
    cell: &Name,
    mode: IsolationMode,
    declared: Option<&Declared>,
) -> Result<(Store, Arranged), ArrangeError> {
    // Guests may wait.
    if declared.is_none() {
        return Ok((own, Arranged::default()));
    }
    let state = load(Some(cell.clone()), own)?;
    let states = std::slice::from_ref(&state);
    let mut families = Families::default();
    let parts = match families.note_all(states, mode, declared) {
        Ok(()) => families.arranged(states, mode, declared).parts,
        // The file was changed since the daemon started, which had no fault to find with it.
        Err(error) => {
            tracing::warn!(%error, "what the configuration file declares is left aside");
            BTreeMap::new()
        }
    };
    Ok((state.store, Arranged { parts, ..Arranged::default() }))
}

fn load(cell: Option<Name>, store: Store) -> Result<Stored, ArrangeError> {
    let ((volumes, devices), copies) = (store.load()?, store.load_copies()?);
    let (groups, received) = (store.load_groups()?, store.load_received()?);
    let devices = devices.into_iter().filter(|device| device.session.is_none()).collect();
    Ok(Stored { cell, store, volumes, devices, copies, groups, received })
}

/// What a worker will find in its state.
fn what_is_in(store: &Store) -> Result<Unsaid, StoreError> {
    let ((volumes, devices), copies) = (store.load()?, store.load_copies()?);
    let mut unsaid = Unsaid::default();
    for record in volumes {
        unsaid.note(Kind::Volumes, &record.spec.name, Some(record.uuid));
    }
    for record in devices.iter().filter(|record| record.session.is_none()) {
        unsaid.note(Kind::Devices, &record.spec.name, Some(record.uuid));
    }
    for record in copies {
        unsaid.note(Kind::Copies, &record.name, None);
    }
    Ok(unsaid)
}

/// Opens a cell's state. Its worker may be about to end.
fn open(path: &Path) -> Result<Store, StoreError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Store::open(path) {
            Err(StoreError::InUse { .. }) if Instant::now() < deadline => thread::sleep(LOOK),
            result => return result,
        }
    }
}

/// A volume that is where it was and has been received elsewhere is the former: it may have been changed since. Of one that was let go
/// what was received is all there is. A move gives none another name: what has another is no former one, though both be known by one UUID.
fn end_moves(states: &mut [Stored]) -> Result<(), StoreError> {
    let open_in = |state: &Stored| -> Vec<(Uuid, Name)> {
        let open = state.volumes.iter().filter(|record| !state.received.contains(&record.spec.name));
        open.map(|record| (record.uuid, record.spec.name.clone())).collect()
    };
    let open: Vec<(Uuid, Name)> = states.iter().flat_map(open_in).collect();
    for state in states.iter_mut().filter(|state| !state.received.is_empty()) {
        let received = std::mem::take(&mut state.received);
        let is_old = |record: &mut VolumeRecord| {
            let name = &record.spec.name;
            received.contains(name) && open.iter().any(|(uuid, former)| (uuid, former) == (&record.uuid, name))
        };
        let old: Vec<VolumeRecord> = state.volumes.extract_if(.., is_old).collect();
        let remove_volumes = old.iter().map(|record| &record.spec.name).collect();
        let remove_received = received.iter().collect();
        state.store.apply(&Changes { remove_volumes, remove_received, ..Changes::default() })?;
    }
    Ok(())
}

fn text(cell: Option<&Name>) -> String {
    cell.map_or(MAIN, Name::as_str).to_owned()
}

/// Volumes that must be together: each has a representative, and some a place, with a device for whose sake.
#[derive(Default)]
struct Families {
    parents: BTreeMap<Name, Name>,
    places: BTreeMap<Name, (Option<Name>, Name)>,
}

impl Families {
    fn root(&mut self, volume: &Name) -> Name {
        let mut at = volume.clone();
        loop {
            let parent = self.parents.entry(at.clone()).or_insert_with(|| at.clone()).clone();
            if parent == at {
                return at;
            }
            at = parent;
        }
    }

    fn join(&mut self, a: &Name, b: &Name) {
        let (a, b) = (self.root(a), self.root(b));
        self.parents.insert(a, b);
    }

    fn join_leaves(&mut self, volume: &Name, stack: &Node) {
        self.root(volume);
        for leaf in stack.leaves().into_iter().filter_map(Leaf::volume).filter_map(|leaf| leaf.parse().ok()) {
            self.join(volume, &leaf);
        }
    }

    fn note_all(&mut self, states: &[Stored], mode: IsolationMode, declared: Option<&Declared>) -> Result<(), ArrangeError> {
        check_names(states)?;
        for record in states.iter().flat_map(|state| &state.volumes) {
            self.join_leaves(&record.spec.name, &record.spec.stack);
        }
        for volume in declared.iter().flat_map(|declared| &declared.volumes) {
            self.join_leaves(&volume.value.name, &volume.value.stack);
        }
        // One that goes on has both its volumes in its place.
        for record in states.iter().flat_map(|state| &state.copies) {
            if matches!(record.state, CopyState::Running | CopyState::Paused) {
                self.join(&record.source, &record.target);
            }
        }
        // A device's volumes are together before anybody has a place.
        let mut shown: Vec<(Option<Name>, Name, Vec<Name>)> = Vec::new();
        for record in states.iter().flat_map(|state| &state.devices) {
            let volumes = record.namespaces.iter().map(|namespace| namespace.volume.clone()).collect();
            shown.push((mode.cell_of(&record.spec), record.spec.name.clone(), volumes));
        }
        for device in declared.iter().flat_map(|declared| &declared.devices) {
            let (spec, volumes) = (device.value.spec(), device.value.attach.iter().map(|attach| attach.volume.clone()));
            shown.push((mode.cell_of(&spec), spec.name, volumes.collect()));
        }
        for (_, _, volumes) in &shown {
            volumes.windows(2).for_each(|pair| self.join(&pair[0], &pair[1]));
        }
        for (cell, device, volumes) in shown {
            if cell.as_ref().is_some_and(|cell| cell.as_str() == MAIN) {
                return Err(ArrangeError::Main { device });
            }
            let Some(root) = volumes.first().map(|volume| self.root(volume)) else { continue };
            match self.places.insert(root, (cell.clone(), device.clone())) {
                Some((there, other)) if there != cell => {
                    let (here, there) = (text(cell.as_ref()), text(there.as_ref()));
                    return Err(ArrangeError::Apart { one: device, here, other, there });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Where a volume belongs: to the devices that show it, or to the daemon's own worker.
    fn place(&mut self, volume: &Name) -> Option<Name> {
        let root = self.root(volume);
        self.places.get(&root).and_then(|(cell, _)| cell.clone())
    }

    fn arranged(&mut self, states: &[Stored], mode: IsolationMode, declared: Option<&Declared>) -> Arranged {
        let mut arranged = Arranged::default();
        let devices = states.iter().flat_map(|state| &state.devices);
        arranged.cells.extend(devices.filter_map(|record| mode.cell_of(&record.spec)));
        for volume in declared.iter().flat_map(|declared| &declared.volumes) {
            let name = volume.value.name.clone();
            arranged.parts.entry(self.place(&name)).or_default().volumes.insert(name);
        }
        for device in declared.iter().flat_map(|declared| &declared.devices) {
            let spec = device.value.spec();
            let cell = mode.cell_of(&spec);
            arranged.cells.extend(cell.clone());
            arranged.parts.entry(cell).or_default().devices.insert(spec.name);
        }
        arranged
    }
}

/// One name, one thing; a move that was not finished has left one thing in two places.
fn check_names(states: &[Stored]) -> Result<(), ArrangeError> {
    let mut seen = BTreeMap::new();
    for state in states {
        let volumes = state.volumes.iter().map(|record| ("volume", &record.spec.name, record.uuid));
        let devices = state.devices.iter().map(|record| ("device", &record.spec.name, record.uuid));
        for (kind, name, uuid) in volumes.chain(devices) {
            match seen.insert((kind, name), (uuid, &state.cell)) {
                Some((other, there)) if other != uuid => {
                    // The daemon's own state comes first: `here` is a cell.
                    let (here, there) = (text(state.cell.as_ref()), text(there.as_ref()));
                    return Err(ArrangeError::Twice { kind, name: name.clone(), here, there });
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// What has one UUID in two states without being one thing. A worker gives no UUID twice, but may not have known of another's.
fn of_one_uuid(states: &[Stored]) -> Vec<(Uuid, String, String)> {
    let mut seen: BTreeMap<Uuid, (&'static str, &Name, Option<&Name>)> = BTreeMap::new();
    let mut found = Vec::new();
    for state in states {
        let volumes = state.volumes.iter().map(|record| (record.uuid, "volume", &record.spec.name));
        let devices = state.devices.iter().map(|record| (record.uuid, "device", &record.spec.name));
        for (uuid, kind, name) in volumes.chain(devices) {
            let here = state.cell.as_ref();
            let (other_kind, other, there) = *seen.entry(uuid).or_insert((kind, name, here));
            if (other_kind, other) != (kind, name) {
                let said = |kind: &str, name: &Name, cell| format!("{kind} {name} (worker {})", text(cell));
                found.push((uuid, said(other_kind, other, there), said(kind, name, here)));
            }
        }
    }
    found
}

/// Puts everything where it belongs, then removes it from where it was.
fn put_right(states: &[Stored], families: &mut Families, mode: IsolationMode) -> Result<(), StoreError> {
    for state in states {
        let others = || states.iter().filter(|other| other.cell != state.cell);
        let mut volumes: BTreeMap<&Name, &VolumeRecord> = BTreeMap::new();
        for record in others().flat_map(|other| &other.volumes) {
            let known = state.volumes.iter().any(|own| own.spec.name == record.spec.name);
            if !known && families.place(&record.spec.name) == state.cell {
                volumes.insert(&record.spec.name, record);
            }
        }
        let mut taken: BTreeSet<u16> = state.devices.iter().map(|record| record.cntlid).collect();
        let mut devices: BTreeMap<&Name, DeviceRecord> = BTreeMap::new();
        for record in others().flat_map(|other| &other.devices) {
            let known = state.devices.iter().any(|own| own.spec.name == record.spec.name);
            if known || mode.cell_of(&record.spec) != state.cell || devices.contains_key(&record.spec.name) {
                continue;
            }
            // Within one worker, no two have one identifier.
            let free = (1..=u16::MAX).find(|cntlid| !taken.contains(cntlid)).unwrap_or(record.cntlid);
            let cntlid = if taken.contains(&record.cntlid) { free } else { record.cntlid };
            taken.insert(cntlid);
            devices.insert(&record.spec.name, DeviceRecord { cntlid, ..record.clone() });
        }
        let copies = copies_to_come(state, states, families);
        let groups = groups_to_come(state, states, volumes.values().copied());
        let (put_volumes, put_devices) = (volumes.into_values().collect(), devices.values().collect());
        let (put_copies, put_groups) = (copies.iter().collect(), groups.values().copied().collect());
        state.store.apply(&Changes { put_volumes, put_devices, put_copies, put_groups, ..Changes::default() })?;
    }
    for state in states {
        let volumes = state.volumes.iter().map(|record| &record.spec.name);
        let remove_volumes = volumes.filter(|name| families.place(name) != state.cell).collect();
        let devices = state.devices.iter().filter(|record| mode.cell_of(&record.spec) != state.cell);
        let remove_devices = devices.map(|record| &record.spec.name).collect();
        let copies = state.copies.iter().filter(|record| families.place(&record.target) != state.cell);
        let remove_copies = copies.map(|record| &record.name).collect();
        state.store.apply(&Changes { remove_volumes, remove_devices, remove_copies, ..Changes::default() })?;
    }
    Ok(())
}

/// Groups that volumes bring with them, and those that these are in: where they come to, they hold for themselves. Those that are there already are
/// as the daemon's own worker has them: a change may not have reached every cell. It comes to know those that only a cell has, for it is who is
/// asked to change them.
fn groups_to_come<'a>(
    state: &Stored,
    states: &'a [Stored],
    volumes: impl Iterator<Item = &'a VolumeRecord>,
) -> BTreeMap<&'a str, &'a GroupSpec> {
    let here = states.iter().filter(|other| state.cell.is_none() || other.cell == state.cell);
    let held = here.flat_map(|other| &other.groups);
    let brought = volumes.flat_map(|record| groups_of(&record.spec.stack));
    let mut look: Vec<&str> = brought.chain(held.map(|group| group.name.as_str())).collect();
    let (mut seen, mut groups) = (BTreeSet::new(), BTreeMap::new());
    while let Some(name) = look.pop() {
        let is_it = |group: &&GroupSpec| group.name.as_str() == name;
        // The first state is the daemon's own.
        let found = states.iter().flat_map(|other| &other.groups).find(is_it).filter(|_| seen.insert(name));
        let Some(group) = found else { continue };
        look.extend(group.within.as_ref().map(Name::as_str));
        if state.groups.iter().find(is_it) != found {
            groups.insert(group.name.as_str(), group);
        }
    }
    groups
}

/// Copies that are elsewhere and belong here, under names that are free here.
fn copies_to_come(state: &Stored, states: &[Stored], families: &mut Families) -> Vec<CopyRecord> {
    let same = |a: &CopyRecord, b: &CopyRecord| (&a.source, &a.target, a.begun) == (&b.source, &b.target, b.begun);
    let mut copies: Vec<CopyRecord> = Vec::new();
    for record in states.iter().filter(|other| other.cell != state.cell).flat_map(|other| &other.copies) {
        let is_here = state.copies.iter().chain(&copies).any(|own| same(own, record));
        if is_here || families.place(&record.target) != state.cell {
            continue;
        }
        let taken = |name: &Name| state.copies.iter().chain(&copies).any(|own| own.name == *name);
        let others = (1..=u32::from(u16::MAX)).filter_map(|number| format!("copy{number}").parse().ok());
        let name = std::iter::once(record.name.clone()).chain(others).find(|name| !taken(name));
        copies.extend(name.map(|name| CopyRecord { name, ..record.clone() }));
    }
    copies
}

#[cfg(test)]
mod tests;
