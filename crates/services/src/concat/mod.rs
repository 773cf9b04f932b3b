//! Concat: one volume after the other.
//!
//! ```text
//!   volume  0 ........ a-1 │ a ........ a+b-1 │ ...
//!   leg     0: 0 .... a-1  │ 1: 0 ...... b-1  │ ...
//! ```

#[cfg(test)]
mod tests;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use millrace_block::{BlockCount, BlockSize, Volume, VolumeError};

use crate::{
    background::Task,
    legs::{Leg, common_block_size},
    pieces::{Map, Mapped, Place, fit_legs},
    service::{Build, Kind, Layout, Mount, Plan, Service, ServiceError, Sizing, Status},
    settings::{SettingError, Settings},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "concat",
    help: "one volume after the other",
    legs: 1..=64,
    settings: &[],
    commands: &[],
    shares_legs: false,
    is_disk: false,
    samples: &["concat(?, ?)", "concat(?, ?, ?)"],
    plan,
};

#[expect(clippy::unnecessary_wraps)] // as the table wants it
fn plan(_: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    Ok(Box::new(ConcatPlan))
}

/// What services that keep their size make of their legs' room: whole ones.
const PAGE: u32 = 4096;

#[derive(Debug)]
struct ConcatPlan;

impl Plan for ConcatPlan {
    fn is_plain(&self) -> bool {
        true
    }

    fn layout(&self, _: usize) -> Layout {
        Layout::Own("concat".to_owned())
    }

    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], block_size: BlockSize) -> Vec<Option<u64>> {
        // The last leg has what the others leave: it is the one that grows.
        let mut sizes = stated.to_vec();
        let whole = |size: u64| size >> block_size.shift() << block_size.shift();
        if let Some((last, others)) = sizes.split_last_mut() {
            let sum = others.iter().try_fold(0_u64, |sum, size| sum.checked_add(whole((*size)?)));
            *last = sum.and_then(|sum| size.checked_sub(sum)).filter(|rest| *rest > 0).or(*last);
        }
        sizes
    }

    fn last_size(&self, size: u64, others: &[u64], told: Option<u64>, block_size: BlockSize) -> Option<u64> {
        // Of legs that state no size it is known only now what they leave: more than the last one's, when the volume has grown.
        let whole = |size: u64| size >> block_size.shift() << block_size.shift();
        let sum = others.iter().fold(0_u64, |sum, size| sum.saturating_add(whole(*size)));
        told.map(|told| told.max(size.saturating_sub(sum)))
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        let block_size = common_block_size(&build.legs)?;
        let last = build.sizing_of(build.legs.len().saturating_sub(1));
        let map = ConcatMap { last, stated: build.stated.into(), ..ConcatMap::new(&build.legs) };
        let room = map.capacity(&build.legs);
        let blocks = build.size.map_or(room, |size| size >> block_size.shift());
        if blocks > room || blocks == 0 {
            let (bytes, wanted) = (room << block_size.shift(), build.size.unwrap_or_default());
            return Err(ServiceError::Legs(format!("its legs have {bytes} bytes together; {wanted} are asked for")));
        }
        map.set_blocks(blocks);
        Ok(Arc::new(Mapped::new(build.name, build.legs, map, block_size)))
    }
}

pub(crate) struct ConcatMap {
    /// Where each leg begins, and an end that no block is behind.
    starts: Box<[AtomicU64]>,
    blocks: AtomicU64,
    /// The sizes that stand at the legs.
    stated: Box<[Option<u64>]>,
    /// The last leg, which is told what the others leave.
    last: Sizing,
}

impl ConcatMap {
    fn new(legs: &[Leg]) -> Self {
        let starts = (0..=legs.len()).map(|_| AtomicU64::new(u64::MAX)).collect();
        let map = Self { starts, blocks: AtomicU64::new(0), stated: Box::default(), last: Sizing::default() };
        map.measure(legs);
        map
    }

    /// Looks where legs begin.
    fn measure(&self, legs: &[Leg]) {
        let mut start = 0_u64;
        for (place, leg) in self.starts.iter().zip(legs) {
            place.store(start, Ordering::Relaxed);
            start = start.saturating_add(leg.geometry().blocks.0);
        }
    }

    fn start(&self, leg: usize) -> u64 {
        self.starts[leg].load(Ordering::Relaxed)
    }

    /// The blocks that the last leg is told when the volume is opened with so many; `None`: it is told nothing.
    fn told_last(&self, legs: &[Leg], blocks: u64) -> Option<BlockCount> {
        let block_size = legs.first()?.geometry().block_size;
        let size = blocks.saturating_mul(u64::from(block_size.bytes()));
        let others: Vec<_> = legs.split_last()?.1.iter().map(|leg| leg.geometry().bytes()).collect();
        let told = ConcatPlan.leg_sizes(size, &self.stated, block_size).last().copied().flatten();
        ConcatPlan.last_size(size, &others, told, block_size).map(|size| BlockCount(size >> block_size.shift()))
    }
}

impl Map for ConcatMap {
    fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    #[inline]
    fn locate(&self, lba: u64) -> Place {
        // All are looked at, and there is an end behind the last: which leg it is cannot be foreseen, and a branch on it would be taken
        // wrongly half of the time.
        let mut leg = 0;
        for start in &self.starts[1..self.starts.len() - 1] {
            leg += usize::from(start.load(Ordering::Relaxed) <= lba);
        }
        let (start, end) = (self.start(leg), self.start(leg + 1));
        Place { leg, lba: lba.saturating_sub(start), run: end.saturating_sub(lba) }
    }

    fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    fn capacity(&self, legs: &[Leg]) -> u64 {
        legs.iter().fold(0, |sum: u64, leg| sum.saturating_add(leg.geometry().blocks.0))
    }

    fn fit(&self, name: &str, legs: &[Leg], blocks: u64) -> Result<(), VolumeError> {
        let (before, after) = (self.told_last(legs, self.blocks()), self.told_last(legs, blocks));
        if before == after {
            return Ok(());
        }
        // One that is told nothing any more has what its own legs have, which nobody knows to be the same.
        fit_legs(name, legs, &[(legs.len() - 1, self.last.keeps, after.unwrap_or(BlockCount(0)))])
    }

    fn enlarge(&self, name: &str, legs: &[Leg], blocks: u64) -> Result<(), VolumeError> {
        let last = legs.len() - 1;
        if self.last.is_stated_below && !self.last.is_plain && self.told_last(legs, blocks).is_none() {
            let why = "it would not open again: what is below its last leg is opened with the sizes that the stack states \
                       there, and the legs before it state none, from which it would follow what it has grown to";
            return Err(VolumeError::Refused { volume: name.to_owned(), why: why.to_owned() });
        }
        let (rest, block) = (blocks.saturating_sub(self.start(last)), legs[last].geometry().block_size.bytes());
        if self.last.is_plain || self.told_last(legs, blocks).is_some() {
            return legs[last].resize(BlockCount(rest));
        }
        // Told nothing, it has when it is opened again what its own legs have room for: of a mirror, whole pages.
        legs[last].resize(BlockCount(rest.next_multiple_of(u64::from(PAGE / block))))
    }

    fn formatted(&self, legs: &[Leg], _: BlockSize) {
        self.measure(legs);
    }
}

impl Service for Mapped<ConcatMap> {
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
        Status::good([])
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::no_command(&KIND, command))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        Vec::new()
    }
}
