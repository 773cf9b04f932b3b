//! Crypt's authenticated mode: what reaches the leg is enciphered (AES-256-GCM-SIV), and every block that does not come back as it
//! was written is found: flipped, exchanged, or put back from an earlier time.
//!
//! ```text
//!   record of a block: version and tag ─► page of 168 records ─► its code in a twig's page ─► branch's ─► root, in the header
//!   write ─► buffer ─ seal ─► log: old and new records (one FUA page for all who wait) ─► leg ─► new records in memory
//!   read  ─► leg ─► buffer ─ open under the record ─ no ─► again ─ no ─► read error, a line in the log
//!   save  ─► epoch e+1: the other half of the log ─► writers of e end ─► flush ─► pages, each in its other place ─► root ─► its epoch in
//!            the operator's place, if there is one (`anchor.rs`)
//!   rekey ─► everything that is written has the new key ─► blocks of the old one are written anew ─► header without the old key
//!   format ─► header: new key, empty tree, "erasing" ─► the leg's blocks are given back ─► header without that
//!   open  ─► header ─► log, if it is not empty: of each block's records, the one under which it opens ─► save
//! ```
//!
//! Crash consistency: a block and its record are in two places. Before a block is written, the log says durably which records it may
//! have; after a crash the block decides. What the tree on the leg says is never changed where it is: the root goes over to other
//! pages at once. A half of the log is used again only when a root without it is durable.
//!
//! Invariants:
//! * A root on the leg, and the logs of its epoch and the next, have for each block every record that the leg's data may need.
//! * Who changes a block holds its lock from before its changes are in the log until the data are there, or not.
//! * Nobody waits for a lock, a turn or a save with a buffer of this level in its hands, unless who has it needs none of this level;
//!   who waits for a save holds no lock and is no writer of any epoch, for the save waits for these.
//! * What is opened and what is delivered are the same bytes, in memory of our own; so are those that are sealed and written.
//!
//! It repairs nothing, and without a place of the operator's cannot know when all of the leg is put back to what it once was:
//! docs/services/crypt.md.

mod anchor;
mod control;
mod header;
mod layout;
mod log;
mod page;
mod recover;
mod rekey;
mod save;
mod size;
mod table;
#[cfg(test)]
mod tests;
mod tree;
mod volume;

use std::{sync::Arc, time::Duration};

use millrace_block::{BlockSize, Volume};
use millrace_cipher::{KeySource, Secret};

use self::{anchor::Anchor, volume::Authenticated};
use crate::{
    service::{Build, Service, ServiceError},
    settings::SettingError,
};

/// Its settings.
#[derive(Clone, Debug)]
pub(super) struct Settled {
    pub(super) key: KeySource,
    pub(super) discard: bool,
    /// How long changes may be in the log alone.
    pub(super) save_after: Duration,
    /// Bytes that are re-keyed each second; 0: no limit.
    pub(super) rekey_rate: u64,
    /// A leg that was put back on purpose.
    pub(super) accept: Option<String>,
    /// Bytes that stand at the leg in the stack.
    pub(super) stated: u64,
}

/// Bytes of the operator's place for the root.
pub(super) const PLACE_BYTES: u64 = anchor::PLACE.len;

/// The header of this mode is on the leg.
pub(in crate::crypt) use self::layout::REGION;

/// Bytes of a leg for a volume of so many bytes; `None` when there are no such legs.
pub(super) fn leg_bytes(size: u64, block_size: BlockSize) -> Option<u64> {
    layout::leg_bytes(size >> block_size.shift(), block_size)
}

/// Makes the service.
pub(super) fn build(build: Build<'_>, settled: Settled, kek: Secret<32>) -> Result<Arc<dyn Service>, ServiceError> {
    let (leg, anchor) = match &build.legs[..] {
        [place, leg] => (Arc::clone(leg), Some(Anchor::new(place, leg)?)),
        _ => (build.only_leg(), None),
    };
    if settled.accept.is_some() && anchor.is_none() {
        return Err(SettingError::new("accept", "is of use where the root has a place beside the leg only").into());
    }
    let geometry = leg.geometry();
    let room = layout::blocks_in(geometry.bytes(), geometry.block_size);
    let blocks = build.size.map_or(room, |size| size >> geometry.block_size.shift());
    if blocks > room || blocks == 0 {
        let needed = layout::leg_bytes(blocks.max(1), geometry.block_size);
        let has = geometry.bytes();
        return Err(ServiceError::Legs(match needed {
            Some(needed) => format!("its leg has {has} bytes; with log and tags {needed} are needed"),
            None => format!("a volume in this mode has at most {} blocks", layout::MOST_BLOCKS),
        }));
    }
    Ok(Authenticated::new(build.name, (leg, anchor), blocks, settled, kek))
}
