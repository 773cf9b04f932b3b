//! Integrity: a checksum and a generation for every block, so that rot, misdirected and lost writes are found when a block is
//! read.
//!
//! ```text
//!   leg:    header │ group 0: page A, page B, 504 blocks │ group 1 …        a page has the checksums of its group
//!   write ─► group open on the leg? ─► lock the blocks' entries ─► copy ─► leg ─► new checksums in memory, unlock
//!   read  ─► leg ─► guest's memory ─► do they match? ─ no ─► again by way of a buffer ─ no ─► read error, a line in the log
//!   idle group ─► flush ─► page with its checksums, closed ─► flush                     (`page.rs`, `upkeep.rs`)
//! ```
//!
//! Crash consistency: before the first write to a group, a page that says "open" is made durable; the page with the new checksums
//! follows when the group has been idle for a while. A group that is found open was in use when the process died: what does not
//! match then is a write that was not recorded yet, and its checksum is made anew (and counted). All other groups are strict.
//!
//! Invariants:
//! * Who writes a block holds its entry's lock from before the write until the new checksum is there.
//! * Locks are taken all at once or not at all; nobody waits for a lock, a claim or a turn with a buffer of this level in its hands.
//!   What goes to the leg under a lock or a claim has the buffers of the level below.
//! * Of a group's two pages at most one is not durable, and a group whose page might say "closed" is opened again before a write.
//! * What is checked and what is delivered are the same bytes, whatever the guest does to its memory meanwhile: a mismatch there
//!   is looked at again in memory of our own.
//!
//! It repairs nothing: a mirror or parity above it does, for which the leg has failed to read a block.

mod control;
mod entry;
mod page;
mod scrub;
mod size;
mod table;
#[cfg(test)]
mod tests;
mod upkeep;
mod volume;

use std::{sync::Arc, time::Duration};

use millrace_block::{BlockSize, Volume};

use self::volume::Integrity;
use crate::{
    service::{Build, Kind, Layout, Plan, Service, ServiceError, Word},
    settings::{SettingError, Settings},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "integrity",
    help: "a checksum and a generation for every block: rot, misdirected and lost writes are found",
    legs: 1..=1,
    settings: &[
        Word { name: "close-after", help: "time without a write after which a group's checksums are written [10s]" },
        Word { name: "rate", help: "bytes per second at most for a scrub [256M]" },
    ],
    commands: &[
        Word { name: "scrub", help: "reads everything and checks it, while the volume is in use" },
        Word { name: "stop", help: "ends a scrub" },
    ],
    shares_legs: false,
    is_disk: false,
    samples: &["integrity(?)", "integrity(close-after=1ms, ?)"],
    plan,
};

/// Its settings.
#[derive(Clone, Copy, Debug)]
struct IntegrityPlan {
    close_after: Duration,
    /// Bytes per second of a scrub.
    rate: u64,
}

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let close_after = settings.duration("close-after")?.unwrap_or(Duration::from_secs(10));
    if !(Duration::from_millis(1)..=Duration::from_secs(3600)).contains(&close_after) {
        return Err(SettingError::new("close-after", "from 1ms to an hour (60m) is possible"));
    }
    let rate = settings.size("rate")?.unwrap_or(256 << 20);
    if rate < 4096 {
        return Err(SettingError::new("rate", "at least 4K a second"));
    }
    Ok(Box::new(IntegrityPlan { close_after, rate }))
}

impl Plan for IntegrityPlan {
    fn layout(&self, _: usize) -> Layout {
        Layout::Own("integrity".to_owned())
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
            return Err(ServiceError::Legs(format!("its leg has {has} bytes; with the checksums {wanted} are needed")));
        }
        let stated = build.stated_of(0);
        Ok(Integrity::new(build.name, (leg, stated), blocks, *self))
    }
}
