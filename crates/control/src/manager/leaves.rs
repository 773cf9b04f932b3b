//! Leaves in memory: each has a number within its volume, by which the keeper has its memory files, so that what is in them outlives a
//! worker, however many there are and wherever a change of the stack puts them.

use std::{cell::Cell, io, os::fd::BorrowedFd, sync::Arc, time::Duration};

use millrace_backends::MemoryVolume;
use millrace_block::{BlockSize, Volume as Blocks, VolumeError};
use millrace_keeper::{Key, Kind, Link, LinkError, Predecessor};
use millrace_services::{Node, graph::Graph};
use uuid::Uuid;

use crate::{daemon::monotonic_micros, store::VolumeRecord};

/// Files that a leaf may have: more than a store in memory makes, each of which doubles it.
const FILES: u32 = 64;
/// How long the requests of a dead worker may keep a file.
const FILE_PATIENCE: Duration = Duration::from_secs(60);

/// Leaves of a stack that are in memory.
pub(super) fn in_memory(stack: &Node) -> usize {
    stack.leaves().into_iter().filter(|leaf| leaf.is_memory()).count()
}

/// A file of a leaf.
fn key(owner: Uuid, leaf: u32, file: u32) -> Key {
    Key { owner: owner.into_bytes(), kind: Kind::BLOCKS, slot: leaf * FILES + file }
}

impl VolumeRecord {
    /// Whether what is kept under a key of its own is a file of one of its leaves.
    pub(super) fn has_leaf_of(&self, key: Key) -> bool {
        key.kind == Kind::BLOCKS && self.leaf_numbers().contains(&(key.slot / FILES))
    }

    /// Whether the keeper has something of its leaves in memory.
    pub(super) fn has_memory_in(&self, keeper: &Link) -> bool {
        self.leaf_numbers().into_iter().any(|number| keeper.is_held(key(self.uuid, number, 0)))
    }

    /// The numbers of its leaves in memory, from left to right.
    pub(super) fn leaf_numbers(&self) -> Vec<u32> {
        if self.memory_leaves.is_empty() {
            return (0_u32..).take(in_memory(&self.spec.stack)).collect();
        }
        self.memory_leaves.clone()
    }

    pub(super) fn set_leaf_numbers(&mut self, numbers: Vec<u32>) {
        let is_plain = numbers.iter().zip(0_u32..).all(|(number, at)| *number == at);
        self.memory_leaves = if is_plain { Vec::new() } else { numbers };
    }
}

/// What is left of the time for a dead worker's requests.
fn left(before: &Predecessor, began: u64, now: u64) -> Duration {
    // Of one that served nobody, the end of the last that did is known: it may have asked disks for something since.
    let since = if before.served_millis == 0 { before.died_micros.max(began) } else { before.died_micros };
    FILE_PATIENCE.saturating_sub(Duration::from_micros(now.saturating_sub(since)))
}

/// Opens the leaves in memory of one graph.
pub(super) struct KeptLeaves {
    keeper: Arc<Link>,
    owner: Uuid,
    /// The number of the next one.
    numbers: Numbers,
    opened: Cell<usize>,
}

enum Numbers {
    /// A volume's own, which may be there from an earlier worker.
    Of(Vec<u32>),
    /// Ones that its leaves do not have.
    From(u32),
}

impl KeptLeaves {
    /// For a volume that is made, or was stored with these numbers.
    pub(super) fn of(keeper: &Arc<Link>, owner: Uuid, numbers: Vec<u32>) -> Self {
        Self { keeper: Arc::clone(keeper), owner, numbers: Numbers::Of(numbers), opened: Cell::new(0) }
    }

    /// For another stack of a volume that is there.
    pub(super) fn beside(keeper: &Arc<Link>, before: &VolumeRecord) -> Self {
        let first = before.leaf_numbers().into_iter().max().map_or(0, |last| last + 1);
        Self { keeper: Arc::clone(keeper), owner: before.uuid, numbers: Numbers::From(first), opened: Cell::new(0) }
    }

    /// How long requests of the worker before this one may still keep files, from its end on, for all of them; `None`: there was none. `began`:
    /// when this one did.
    pub(super) fn patience(&self, began: u64) -> Option<Duration> {
        Some(left(&self.keeper.predecessor()?, began, monotonic_micros()))
    }

    /// The next leaf, from left to right.
    pub(super) fn open(&self, name: &str, size: u64, block_size: BlockSize) -> Result<Arc<dyn Blocks>, VolumeError> {
        let at = self.opened.replace(self.opened.get() + 1);
        let (owner, keeper) = (self.owner, Arc::clone(&self.keeper));
        let number = match &self.numbers {
            Numbers::Of(numbers) => numbers.get(at).copied(),
            Numbers::From(first) => u32::try_from(at).ok().and_then(|at| first.checked_add(at)),
        };
        let number = number.filter(|number| *number < u32::MAX / FILES).ok_or_else(|| VolumeError::Io {
            volume: name.to_owned(),
            action: "find",
            path: "memory".into(),
            source: io::Error::other("the volume's record has no number for it"),
        })?;
        if matches!(self.numbers, Numbers::From(_)) {
            // A leaf that had the number once may have left something, if nobody had the time to clear it away.
            self.forget(number);
        }
        // Copies: a graph that does not come to be because of another leaf is followed by a second try.
        let files: Result<Vec<_>, _> =
            (0..FILES).map_while(|file| keeper.copy(key(owner, number, file)).transpose()).collect();
        let files = files.map_err(|source| VolumeError::Io {
            volume: name.to_owned(),
            action: "take over",
            path: "memory".into(),
            source,
        })?;
        let put = move |file, fd: BorrowedFd<'_>| keeper.put(key(owner, number, file), fd).map_err(io::Error::other);
        Ok(MemoryVolume::in_files(name, size, block_size, &files, Box::new(put))?)
    }

    /// Gives a volume's record the numbers that the leaves of its next graph have: those that stay keep theirs.
    pub(super) fn renumber(&self, before: &Graph, record: &mut VolumeRecord, numbers: &[u32], after: &Graph) {
        let place = |volume: &Arc<dyn Blocks>| Arc::as_ptr(volume).cast::<()>();
        let in_memory = |graph: &Graph| {
            let leaves = graph.leaves().into_iter().filter(|(leaf, _)| leaf.is_memory());
            leaves.map(|(_, volume)| place(&volume)).collect::<Vec<_>>()
        };
        let had: Vec<_> = in_memory(before).into_iter().zip(numbers.iter().copied()).collect();
        let mut fresh = self.fresh();
        let number = |place| match had.iter().find(|(known, _)| *known == place) {
            Some((_, number)) => *number,
            None => fresh.next().expect("a leaf that is not of the old graph was opened"),
        };
        record.set_leaf_numbers(in_memory(after).into_iter().map(number).collect());
    }

    /// The numbers of leaves that were opened for this graph.
    fn fresh(&self) -> impl Iterator<Item = u32> + use<> {
        let first = match &self.numbers {
            Numbers::Of(_) => 0,
            Numbers::From(first) => *first,
        };
        first..first + self.opened.get() as u32
    }

    /// Lets go of leaves that are not there any more: of the numbers `had` and those opened here, all that are not in `has`.
    pub(super) fn forget_all_but(&self, had: &[u32], has: &[u32]) {
        had.iter()
            .copied()
            .chain(self.fresh())
            .filter(|number| !has.contains(number))
            .for_each(|number| self.forget(number));
    }

    fn forget(&self, number: u32) {
        let gone: Result<(), LinkError> =
            (0..FILES).try_for_each(|file| self.keeper.drop_one(key(self.owner, number, file)));
        if let Err(error) = gone {
            tracing::warn!(%error, "the keeper could not be told that a leaf in memory is gone");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_a_worker_that_served_nobody_have_their_time_too() {
        let before =
            |served_millis| Predecessor { signal: None, served_millis, pid: 1, died_micros: 1_000_000, let_go: false };
        let (began, now) = (58_000_000, 59_000_000);
        assert_eq!(left(&before(5), began, now), Duration::from_secs(2), "from its end on");
        assert_eq!(left(&before(0), began, now), Duration::from_secs(59), "it ended when this one began, or before");
        assert_eq!(left(&before(5), began, 90_000_000), Duration::ZERO);
    }
}
