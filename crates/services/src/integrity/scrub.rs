//! Scrub: reads everything and checks it, while the volume is in use.

use std::sync::atomic::Ordering;

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, Volume as _};
use millrace_memory::BUFFER_SIZE;

use super::{
    entry::{self, LOCKED, ZERO},
    page::{BLOCKS, Found},
    table::State,
    upkeep::Means,
    volume::{Integrity, Piece},
};

/// A scrub under way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scrub {
    /// The next block.
    pub(super) at: u64,
    mismatches: u64,
}

/// The checksums of a group that nobody has needed since the volume was opened: what only a scrub reads does not stay in memory.
pub(super) struct Seen {
    group: u64,
    entries: Box<[u64]>,
}

impl Integrity {
    /// Reads the next blocks and checks them; returns how many bytes, and 0 when there is nothing to do.
    pub(super) async fn scrub_some(&self, means: Means<'_>, seen: &mut Option<Seen>) -> u64 {
        let Some(Scrub { at, mut mismatches }) = self.control().scrub else { return 0 };
        let blocks = self.blocks.load(Ordering::Relaxed);
        if at >= blocks {
            let said = format!("{mismatches} of {blocks} blocks cannot be trusted");
            tracing::info!(volume = self.name, "the scrub is done: {said}");
            let mut control = self.control();
            (control.scrub, control.scrubbed) = (None, Some(said));
            return 0;
        }
        let shift = self.block_size().shift();
        let count = (blocks - at).min(BLOCKS - at % BLOCKS).min(BUFFER_SIZE as u64 >> shift);
        for lba in self.suspects(means, Piece { lba: at, count }, seen).await {
            // Once more, as a guest would: it may have been written meanwhile.
            mismatches += u64::from(self.read_one(means, lba).await.is_err());
        }
        if let Some(scrub) = &mut self.control().scrub
            && scrub.at == at
        {
            *scrub = Scrub { at: at + count, mismatches };
        }
        count << shift
    }

    /// Those of the blocks that do not match at a first look.
    async fn suspects(&self, means: Means<'_>, piece: Piece, seen: &mut Option<Seen>) -> Vec<u64> {
        let all = || (piece.lba..piece.lba + piece.count).collect();
        let Ok(entries) = self.entries(means, piece, seen).await else { return all() };
        let Ok(data) = self.read_blocks(means, piece.lba, piece.count).await else { return all() };
        let blocks = (piece.lba..).zip(data.chunks(self.block_size().bytes() as usize)).zip(&entries);
        let suspect = blocks.filter(|((lba, data), known)| **known & LOCKED != 0 || !entry::matches(**known, *lba, data));
        suspect.map(|((lba, _), _)| lba).collect()
    }

    /// The entries of blocks: from memory, or from the leg's page if it says everything.
    async fn entries(&self, means: Means<'_>, piece: Piece, seen: &mut Option<Seen>) -> Result<Vec<u64>, BlockError> {
        let number = piece.lba / BLOCKS;
        let known = |entries: &[u64]| {
            let wanted = entries.iter().skip(piece.at() as usize).take(piece.count as usize);
            wanted.copied().collect::<Vec<_>>()
        };
        if let Some(group) = self.table.get(number).filter(|group| group.state() != State::Unread) {
            *seen = None;
            return Ok((0..piece.count).map(|at| group.entry(piece.at() + at)).collect());
        }
        if let Some(seen) = seen
            && seen.group == number
        {
            return Ok(known(&seen.entries));
        }
        let entries = match self.find(means, number).await? {
            Found::Fresh => vec![ZERO; BLOCKS as usize].into(),
            Found::Page { page, alone: false } if !page.open => page.entries,
            _ => {
                let group = self.ready(means.cx, number).await?;
                return Ok((0..piece.count).map(|at| group.entry(piece.at() + at)).collect());
            }
        };
        let found = known(&entries);
        *seen = Some(Seen { group: number, entries });
        Ok(found)
    }

    async fn read_one(&self, means: Means<'_>, lba: u64) -> Result<(), BlockError> {
        let segments = [means.buffer.segment(self.block_size().bytes() as usize)];
        let (lba, count) = (Lba(lba), BlockCount(1));
        self.submit(means.cx, Request { operation: Operation::Read, lba, count, segments: &segments }).await
    }
}
