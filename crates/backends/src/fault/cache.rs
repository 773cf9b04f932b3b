//! A disk's volatile cache: what was written since the last flush, and what a power loss makes of it.

use std::collections::BTreeMap;

use millrace_block::conformance::Random;

/// Versions of one block that are remembered.
const VERSIONS: usize = 4;

#[derive(Debug)]
struct Version {
    /// Counts up over all writes.
    number: u64,
    data: Box<[u8]>,
}

#[derive(Debug, Default)]
struct Block {
    /// Oldest first.
    versions: Vec<Version>,
    /// The first version survived a power loss: it is on the medium, only not in the inner volume yet.
    settled: bool,
}

/// Blocks written since the last flush.
#[derive(Debug, Default)]
pub(super) struct Cache {
    blocks: BTreeMap<u64, Block>,
    last: u64,
}

/// Blocks to be written, and the mark to call [`Cache::flushed`] with.
pub(super) struct Snapshot {
    pub(super) blocks: Vec<(u64, Box<[u8]>)>,
    pub(super) mark: u64,
}

impl Cache {
    /// Records a write of one block.
    pub(super) fn write(&mut self, lba: u64, data: Box<[u8]>) {
        self.last += 1;
        let block = self.blocks.entry(lba).or_default();
        if block.versions.len() == VERSIONS {
            // The second oldest: the oldest may be on the medium, the newest is what is read.
            block.versions.remove(1);
        }
        block.versions.push(Version { number: self.last, data });
    }

    /// What the block holds, if it was written.
    pub(super) fn latest(&self, lba: u64) -> Option<&[u8]> {
        self.blocks.get(&lba)?.versions.last().map(|version| &*version.data)
    }

    /// Everything that a flush must make durable.
    pub(super) fn snapshot(&self) -> Snapshot {
        let latest = |(lba, block): (&u64, &Block)| Some((*lba, block.versions.last()?.data.clone()));
        Snapshot { blocks: self.blocks.iter().filter_map(latest).collect(), mark: self.last }
    }

    /// Forgets what was written up to the mark: the inner volume has it.
    pub(super) fn flushed(&mut self, mark: u64) {
        self.blocks.retain(|_, block| {
            let before = block.versions.len();
            block.versions.retain(|version| version.number > mark);
            block.settled &= block.versions.len() == before;
            !block.versions.is_empty()
        });
    }

    /// Forgets a range: it was written through, erased, or cut off.
    pub(super) fn forget(&mut self, lba: u64, count: u64) {
        let end = lba.saturating_add(count);
        self.blocks.retain(|at, _| !(lba..end).contains(at));
    }

    /// Lets each block fall back, by itself, to some version since the last flush or to what the medium held then. So writes
    /// are lost, torn between blocks, and out of order. Returns how many blocks lost their last version.
    pub(super) fn power_loss(&mut self, random: &mut Random) -> u64 {
        let mut lost = 0;
        self.blocks.retain(|_, block| {
            let versions = block.versions.len() as u64;
            // 0 stands for the medium's own version, unless that is the first of ours.
            let choices = if block.settled { versions } else { versions + 1 };
            let chosen = random.below(choices) + u64::from(block.settled);
            lost += u64::from(chosen != versions);
            if chosen == 0 {
                return false;
            }
            block.versions.truncate(chosen as usize);
            block.versions.drain(..chosen as usize - 1);
            block.settled = true;
            true
        });
        lost
    }
}
