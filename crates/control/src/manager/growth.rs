//! Growth: which sizes volumes may get, and which one they have that were growing when the daemon ended.
//!
//! ```text
//!   growing ─► all of the new size is there ─ yes ─► what is new can be given back ─ yes ─► it has the old one
//!                 │                                      no └─► it has the new one
//!                 no └─► own_size: each leaf with what it had ─► files are cut back ─► it has the old one, and its own
//!                           no └─► told the old one ─► it has that
//! ```

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use millrace_block::{BlockCount, VolumeError};
use millrace_services::{Leaf, Node};

use super::{Inner, Volume, graphs::LiveGraph};
use crate::{Size, error::ControlError, store::VolumeRecord};

impl Inner {
    /// Whether a volume may get this size, and those that it is made of what follows from it: of one that never had a size but that of its
    /// legs, whether it opens with it.
    pub(super) fn check_first_sizes(&self, volume: &Volume, size: u64) -> Result<(), ControlError> {
        let Some(live) = &volume.graph else { return Ok(()) };
        let (record, block_size) = (&volume.record, volume.record.block_size().0);
        if record.own_size {
            if size >= record.size().0 && self.keeper.as_ref().is_some_and(|keeper| keeper.is_on_trial()) {
                let why = "how it gets its first size is stored so that the program before this one cannot read it, and that one may take \
                           over again: try again when the upgrade is done";
                return Err(ControlError::untimely("volume", &record.spec.name, why));
            }
            let checked = live.graph.check_first_size(size, block_size);
            checked.map_err(|source| ControlError::Graph { name: record.spec.name.clone(), source })?;
        }
        let told = live.graph.told_volumes(size, block_size);
        told.iter().try_for_each(|(name, told)| match self.volumes.get(name.as_str()) {
            Some(below) if *told >= below.record.size().0 => self.check_first_sizes(below, *told),
            // What is to become smaller may stay as it is; where not, its services refuse.
            _ => Ok(()),
        })
    }

    /// Opens a stored volume, and settles which size it has when it was growing: the new one where all of it is there.
    pub(super) fn reopen_any(&self, record: &mut VolumeRecord) -> Result<LiveGraph, ControlError> {
        let Some(size) = record.growing else { return self.reopen(record) };
        let mut grown = settled(record, size);
        match self.reopen(&mut grown) {
            Ok(live) => {
                *record = if gives_back(&live, record.size()) { settled(record, record.size()) } else { grown };
                return Ok(live);
            }
            Err(error) => {
                record.untold |= grown.untold;
                tracing::warn!(volume = %record.spec.name, %error, "the volume did not get its new size, and keeps the old one");
            }
        }
        if record.own_size {
            match self.reopen_ungrown(record) {
                Ok(live) => return Ok(live),
                Err(error) => {
                    tracing::warn!(volume = %record.spec.name, %error, "it does not open with what its legs had before");
                }
            }
        }
        let mut old = settled(record, record.size());
        let live = self.reopen(&mut old).inspect_err(|_| record.untold |= old.untold)?;
        *record = old;
        Ok(live)
    }

    /// Opens a volume whose size does not follow from anything but its legs' as it was before a growth that was cut off after some of them, or
    /// none, had become longer.
    fn reopen_ungrown(&self, record: &mut VolumeRecord) -> Result<LiveGraph, ControlError> {
        self.shorten(record)?;
        let mut as_it_was = VolumeRecord { growing: None, lengths: BTreeMap::new(), ..record.clone() };
        let live = self.reopen(&mut as_it_was).inspect_err(|_| record.untold |= as_it_was.untold)?;
        *record = as_it_was;
        Ok(live)
    }

    /// Gives files the lengths back that they had, if the volume opens with those: then nothing of it is behind them. The record tells of
    /// losses that were found out.
    fn shorten(&self, record: &mut VolumeRecord) -> Result<(), ControlError> {
        let lengths = &record.lengths;
        if lengths.is_empty() {
            return Ok(());
        }
        let mut short = record.clone();
        short.spec.stack = shortened(&record.spec.stack, lengths);
        let mut live = self.reopen(&mut short).inspect_err(|_| record.untold |= short.untold)?;
        live.graph.unmount();
        record.untold |= live.is_untold();
        drop(live);
        for (path, length) in lengths {
            cut(path, *length).map_err(|source| {
                let volume = record.spec.name.to_string();
                VolumeError::Io { volume, action: "give its old length back to", path: path.clone(), source }
            })?;
        }
        Ok(())
    }
}

/// A record that says that a volume has this size. Its legs are told theirs from now on: they may be longer.
fn settled(record: &VolumeRecord, size: Size) -> VolumeRecord {
    let mut settled = VolumeRecord { growing: None, lengths: BTreeMap::new(), own_size: false, ..record.clone() };
    settled.spec.size = Some(size);
    settled
}

/// Makes a volume smaller again: a growth that was cut off may not have come to erase what was there before the volume was made smaller, and
/// erasing it now may keep everybody waiting. Nobody has been told of the new size; the next growth erases. Whoever cannot be made smaller
/// never was. Volumes below have settled what is theirs to erase; they keep the new size, unless more than that was to be erased.
fn gives_back(live: &LiveGraph, before: Size) -> bool {
    let (root, stack) = (live.graph.volume(), live.graph.stack());
    let geometry = root.geometry();
    let before = BlockCount(before.0 >> geometry.block_size.shift());
    let is_plain = stack.as_leaf().is_some();
    let over_volumes = live.graph.leaves().iter().any(|(leaf, _)| leaf.volume().is_some());
    let is_theirs = is_plain || (over_volumes && !erases(stack));
    !is_theirs && before < geometry.blocks && root.resize(before).is_ok()
}

/// Whether all of a volume is what a service shows that erases what its leg has grown by, whatever the leg is: it lengthens the leg before.
fn erases(stack: &Node) -> bool {
    match stack {
        Node::Service(node) if ["integrity", "metadata", "crypt"].contains(&node.service.as_str()) => true,
        Node::Service(node) => matches!(&node.legs[..], [leg] if erases(leg)),
        Node::Leaf(_) => false,
    }
}

/// How long the files of a volume are that the stack states no size of.
pub(super) fn lengths(record: &VolumeRecord) -> BTreeMap<PathBuf, u64> {
    let leaves = record.spec.stack.leaves();
    let files = leaves.into_iter().filter(|leaf| leaf.settings.text("size").is_none()).filter_map(Leaf::file);
    let length = |path: &Path| fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|found| found.len());
    files.filter_map(|path| Some((path.to_owned(), length(path)?))).collect()
}

/// A stack over files of these lengths.
fn shortened(node: &Node, lengths: &BTreeMap<PathBuf, u64>) -> Node {
    let mut node = node.clone();
    match &mut node {
        Node::Leaf(leaf) => {
            if let Some(length) = leaf.file().and_then(|path| lengths.get(path)).copied() {
                leaf.settings.add("size", &length.to_string());
            }
        }
        Node::Service(service) => service.legs.iter_mut().for_each(|leg| *leg = shortened(leg, lengths)),
    }
    node
}

/// Makes a file as short as this, if it is longer.
fn cut(path: &Path, length: u64) -> io::Result<()> {
    if fs::metadata(path)?.len() <= length {
        return Ok(());
    }
    let file = fs::OpenOptions::new().write(true).open(path)?;
    file.set_len(length)?;
    file.sync_all()
}
