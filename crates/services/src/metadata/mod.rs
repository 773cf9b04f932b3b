//! Metadata: eight bytes kept with each block, for NVMe namespaces with protection information. It looks at none of them.
//!
//! ```text
//!   leg:    header │ group 0: page A, page B, 160 blocks │ group 1 …        a page has the metadata of its group
//!   write ─► lock blocks ─► page: old and new metadata of each, with the checksums of the data they belong to ─► flush ─► data
//!   read  ─► data, and metadata from memory; again if a write came between
//!   open  ─► of old and new, those whose checksum the data have                    (`load.rs`)
//! ```
//!
//! Crash consistency: a block and its metadata are in two places and must change as one. So before a block is written, its page says
//! durably what the block's metadata are if the write comes to pass, and what they are if it does not; the data decide. A block
//! is its data, so that only the page needs two places.
//!
//! Invariants:
//! * Of a group's two pages at most one is not durable. The other one and it have, together, the metadata that belong to whatever
//!   data the leg may hold after a crash: what an entry forgets was overwritten by data that a flush has made durable since.
//! * Who changes a block holds its lock from before the new metadata are in the table until the data are there, or not.
//! * Locks are taken all at once or not at all. Who waits for a lock, a claim or a turn may have a buffer of this level in its hands, and
//!   a copy one of the next: who has it has its own buffer, and all that goes to the leg goes two levels down.
//! * Blocks that were written without metadata, in groups that never had any, cost nothing but their lock.

mod control;
mod load;
mod page;
mod size;
mod table;
#[cfg(test)]
mod tests;
mod volume;

use std::sync::Arc;

use millrace_block::{BlockSize, MetadataFormat, Volume};

use self::volume::Tagged;
use crate::{
    service::{Build, Kind, Layout, Plan, Service, ServiceError, Word},
    settings::{SettingError, Settings},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "metadata",
    help: "eight bytes of metadata with each block: for NVMe namespaces with protection information",
    legs: 1..=1,
    settings: &[
        Word { name: "protection", help: "type of protection information of a new volume: 1, 2, 3, or none [1]" },
        Word {
            name: "transfer",
            help: "metadata of a new volume come separate, or extended: at the end of each block [separate]",
        },
        Word { name: "position", help: "protection information is the last or the first bytes of the metadata [last]" },
    ],
    commands: &[],
    shares_legs: false,
    is_disk: false,
    samples: &["metadata(?)", "metadata(protection=none, transfer=extended, ?)"],
    plan,
};

/// Its settings.
#[derive(Clone, Copy, Debug)]
struct MetadataPlan {
    /// How a new volume shows its metadata; a guest may change it by Format NVM.
    format: MetadataFormat,
}

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let one_of = |name: &'static str, words: &[&str]| match settings.text(name) {
        None => Ok(0),
        Some(text) => words
            .iter()
            .position(|word| *word == text)
            .ok_or_else(|| SettingError::new(name, format!("one of {} is possible", words.join(", ")))),
    };
    let protection = [1, 2, 3, 0][one_of("protection", &["1", "2", "3", "none"])?];
    let extended = one_of("transfer", &["separate", "extended"])? == 1;
    let first = one_of("position", &["last", "first"])? == 1;
    Ok(Box::new(MetadataPlan { format: MetadataFormat { protection, extended, first } }))
}

impl Plan for MetadataPlan {
    fn layout(&self, _: usize) -> Layout {
        Layout::Own(format!("metadata {}", self.format.bits()))
    }

    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], block_size: BlockSize) -> Vec<Option<u64>> {
        let needed = page::leg_bytes(size >> block_size.shift(), block_size);
        stated.iter().map(|stated| (*stated).max(needed)).collect()
    }

    fn needs_by_blocks(&self) -> bool {
        true
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let leg = build.only_leg();
        let geometry = leg.geometry();
        let room = page::blocks_in(geometry.bytes(), geometry.block_size);
        let blocks = build.size.map_or(room, |size| size >> geometry.block_size.shift());
        if blocks > room || blocks == 0 {
            let (has, wanted) = (geometry.bytes(), page::leg_bytes(blocks.max(1), geometry.block_size).unwrap_or(u64::MAX));
            return Err(ServiceError::Legs(format!("its leg has {has} bytes; with the metadata {wanted} are needed")));
        }
        let stated = build.stated_of(0);
        Ok(Tagged::new(build.name, (leg, stated), blocks, *self))
    }
}
