//! Stripe (RAID 0): the volume's chunks go round over the legs.
//!
//! ```text
//!   chunk   0 1 2 3 4 5 6 7 8         legs of different size: the longer ones go on without the shorter
//!   leg 0:  0 . . 3 . . 6 . .         leg 0:  0 . . 3 . . 6 8 9
//!   leg 1:  . 1 . . 4 . . 7 .         leg 1:  . 1 . . 4 . 7 . .
//!   leg 2:  . . 2 . . 5 . . 8         leg 2:  . . 2 . . 5 . . .
//! ```
//!
//! It keeps nothing on its legs: chunk, order and sizes of the legs say where everything is. So it has only sizes with which it is opened
//! again as it is: legs are told equal parts of the volume's, or, where the stack states unequal ones, those. A leg that opens with no other
//! size than it had (a mirror) refuses all others.

#[cfg(test)]
mod tests;

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use millrace_block::{BlockCount, BlockSize, Volume, VolumeError};

use crate::{
    background::Task,
    legs::{Leg, common_block_size},
    pieces::{Map, Mapped, Place, fit_legs, give_back},
    service::{Build, Keeps, Kind, Layout, Mount, Plan, Service, ServiceError, Status, Word},
    settings::{SettingError, Settings},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "stripe",
    help: "chunks go round over the legs (RAID 0): all of them work together, none may be lost",
    legs: 1..=64,
    settings: &[Word { name: "chunk", help: "size of a chunk: a power of two from 4K to 64M [64K]" }],
    commands: &[],
    shares_legs: false,
    is_disk: false,
    samples: &["stripe(chunk=4K, ?, ?)", "stripe(chunk=16K, ?, ?, ?)"],
    plan,
};

/// Sizes a chunk may have.
const CHUNKS: std::ops::RangeInclusive<u64> = 4096..=64 << 20;

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let chunk = settings.size("chunk")?.unwrap_or(64 << 10);
    if !chunk.is_power_of_two() || !CHUNKS.contains(&chunk) {
        return Err(SettingError::new("chunk", "a power of two from 4K to 64M is possible"));
    }
    Ok(Box::new(StripePlan { chunk }))
}

#[derive(Debug)]
struct StripePlan {
    /// Bytes.
    chunk: u64,
}

/// Whether legs of which the stack states these sizes are to be equal.
fn are_even(stated: &[Option<u64>], chunk: u64) -> bool {
    let rows = |stated: &Option<u64>| stated.map(|size| size / chunk);
    stated.windows(2).all(|two| rows(&two[0]) == rows(&two[1]))
}

/// Bytes that each of so many legs needs.
fn share(size: u64, legs: u64, chunk: u64) -> u64 {
    size.div_ceil(chunk).div_ceil(legs.max(1)).saturating_mul(chunk)
}

impl Plan for StripePlan {
    fn is_plain(&self) -> bool {
        true
    }

    fn layout(&self, _: usize) -> Layout {
        Layout::Own(format!("stripe {}", self.chunk))
    }

    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], _: BlockSize) -> Vec<Option<u64>> {
        let equal = share(size, stated.len() as u64, self.chunk);
        if !are_even(stated, self.chunk) {
            // Legs of stated sizes that are unequal are so on purpose, and do not grow.
            return stated.to_vec();
        }
        stated.iter().map(|stated| (*stated).max(Some(equal))).collect()
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let block_size = common_block_size(&build.legs)?;
        let (even, keeps) = (are_even(build.stated, self.chunk), build.keeping());
        let map = StripeMap { keeps, ..StripeMap::new(self.chunk, &build.legs, block_size, even) };
        let room = map.capacity(&build.legs);
        if let Some(small) = build.legs.iter().position(|leg| leg.geometry().bytes() < self.chunk) {
            return Err(ServiceError::Legs(format!("leg {small} is smaller than a chunk of {} bytes", self.chunk)));
        }
        let blocks = build.size.map_or(room, |size| size >> block_size.shift());
        if blocks > room || blocks == 0 {
            let (bytes, wanted) = (room << block_size.shift(), build.size.unwrap_or_default());
            return Err(ServiceError::Legs(format!("its legs have {bytes} bytes together; {wanted} are asked for")));
        }
        map.set_blocks(blocks);
        Ok(Arc::new(Mapped::new(build.name, build.legs, map, block_size)))
    }
}

/// Chunks from some row on, over the legs that are long enough to have it.
struct Zone {
    /// Its first chunk, in the volume.
    first: u64,
    /// Its first row: the chunk in each of its legs.
    row: u64,
    legs: Box<[usize]>,
}

/// Where chunks are.
pub(crate) struct StripeMap {
    chunk: u64,
    /// Power of two of the blocks in a chunk.
    shift: AtomicU32,
    blocks: AtomicU64,
    /// From the first row to the last. Only one when the legs are equal: it goes on as far as they grow.
    zones: Box<[Zone]>,
    /// Whoever opens it with a size tells each leg an equal part.
    even: bool,
    /// Legs that do not open with a smaller size than they had, each with the size that stands at it.
    keeps: Box<[(usize, Keeps, u64)]>,
}

impl StripeMap {
    fn new(chunk: u64, legs: &[Leg], block_size: BlockSize, even: bool) -> Self {
        let rows: Vec<u64> = legs.iter().map(|leg| leg.geometry().bytes() / chunk).collect();
        let shift = AtomicU32::new(chunk.trailing_zeros() - block_size.shift());
        Self { chunk, shift, blocks: AtomicU64::new(0), zones: zones(&rows), even, keeps: Box::default() }
    }

    fn shift(&self) -> u32 {
        self.shift.load(Ordering::Relaxed)
    }
}

fn zones(rows: &[u64]) -> Box<[Zone]> {
    let (mut zones, mut row, mut first) = (Vec::new(), 0, 0);
    loop {
        let legs: Box<[usize]> = (0..rows.len()).filter(|leg| rows[*leg] > row || zones.is_empty()).collect();
        let Some(end) = legs.iter().map(|leg| rows[*leg]).min() else { return zones.into() };
        let chunks = (end - row).saturating_mul(legs.len() as u64);
        zones.push(Zone { first, row, legs });
        (row, first) = (end, first + chunks);
    }
}

impl Map for StripeMap {
    fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    #[inline]
    fn locate(&self, lba: u64) -> Place {
        let shift = self.shift();
        let (chunk, within) = (lba >> shift, lba & ((1 << shift) - 1));
        let zone = match &*self.zones {
            [only] => only,
            zones => zones.iter().rev().find(|zone| chunk >= zone.first).unwrap_or(&zones[0]),
        };
        let (number, legs) = (chunk - zone.first, zone.legs.len() as u64);
        // A division takes as long as all the rest.
        let (row, at) = if legs.is_power_of_two() {
            (number >> legs.trailing_zeros(), number & (legs - 1))
        } else {
            (number / legs, number % legs)
        };
        let leg = zone.legs[at as usize];
        Place { leg, lba: (zone.row + row) << shift | within, run: (1 << shift) - within }
    }

    fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    fn capacity(&self, legs: &[Leg]) -> u64 {
        let rows = legs.iter().map(|leg| leg.geometry().bytes() / self.chunk);
        let chunks = match &*self.zones {
            // Legs alike, but for what a growth that failed has left.
            [_] => rows.min().unwrap_or(0).saturating_mul(legs.len() as u64),
            _ => rows.fold(0, u64::saturating_add),
        };
        chunks.saturating_mul(1 << self.shift())
    }

    fn check_size(&self, name: &str, blocks: u64) -> Result<(), VolumeError> {
        let chunks = blocks.div_ceil(1 << self.shift());
        match self.zones.get(1) {
            // Of equal parts only what lies on all legs is where it was.
            Some(next) if self.even && chunks > next.first => Err(VolumeError::Unsupported {
                volume: name.to_owned(),
                what: "resizing a stripe over unequal legs, which its stack does not state, beyond what all of them have",
            }),
            _ => Ok(()),
        }
    }

    fn fit(&self, name: &str, legs: &[Leg], blocks: u64) -> Result<(), VolumeError> {
        if !self.even {
            // Whatever its size is, its legs are told what the stack states.
            return Ok(());
        }
        let equal = blocks.div_ceil(1 << self.shift()).div_ceil(legs.len() as u64) << self.shift();
        let block = self.chunk >> self.shift();
        let told = |&(leg, keeps, stated): &(usize, Keeps, u64)| (leg, keeps, BlockCount(equal.max(stated / block)));
        fit_legs(name, legs, &self.keeps.iter().map(told).collect::<Vec<_>>())
    }

    fn enlarge(&self, name: &str, legs: &[Leg], blocks: u64) -> Result<(), VolumeError> {
        // The longer legs' last chunks would move; and legs that are told what the stack states are not told that they have grown.
        let what = match (self.zones.len(), self.even) {
            (1, true) => None,
            (1, false) => Some("growing a stripe of whose legs only some have a size= in the stack"),
            _ => Some("growing a stripe over unequal legs"),
        };
        if let Some(what) = what {
            return Err(VolumeError::Unsupported { volume: name.to_owned(), what });
        }
        let chunks = blocks.div_ceil(1 << self.shift()).div_ceil(legs.len() as u64);
        let mut to_give_back = Vec::new();
        for (at, leg) in legs.iter().enumerate() {
            let before = leg.geometry().blocks;
            let after = BlockCount(chunks << self.shift());
            if after.0 <= before.0 {
                continue;
            }
            if let Err(error) = leg.resize(after) {
                // Others before it stay longer than they need be: harmless, and they would be needed by the next try.
                tracing::debug!(volume = name, leg = at, %error, "a leg could not be enlarged");
                give_back(name, legs, &to_give_back);
                return Err(error);
            }
            if self.keeps.iter().any(|(leg, ..)| *leg == at) {
                to_give_back.push((at, before));
            }
        }
        Ok(())
    }

    fn formatted(&self, _: &[Leg], block_size: BlockSize) {
        self.shift.store(self.chunk.trailing_zeros() - block_size.shift(), Ordering::Relaxed);
    }
}

impl Service for Mapped<StripeMap> {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        if let Some(previous) = mount.previous::<Self>() {
            self.take_over(&previous);
        }
        Ok(())
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn has_untold(&self) -> bool {
        self.is_untold()
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        // No leg shows the volume.
        false
    }

    fn status(&self) -> Status {
        let rows = self.map().zones.iter().map(|zone| zone.legs.len().to_string()).collect::<Vec<_>>();
        Status::good([("chunk", self.map().chunk.to_string()), ("legs side by side", rows.join(", then "))])
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::no_command(&KIND, command))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}
