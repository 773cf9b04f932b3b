//! Pieces that held nothing when the walk began, as far as the legs knew, and that nobody has written to since.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

use millrace_block::{Lba, Volume};

/// Questions that are put to a leg at most, because requests wait meanwhile. What lies behind them is read.
const QUESTIONS: usize = 4096;

/// A bit per piece.
type Bits = Box<[AtomicU64]>;

#[derive(Debug)]
pub(super) struct Holes {
    /// Bytes of a piece.
    piece: u64,
    /// Pieces that hold nothing in OLD.
    old: Bits,
    /// Pieces that hold nothing in either leg.
    both: Bits,
}

/// Pieces that a volume says it holds nothing of; `None` when it knows nothing.
fn unused(volume: &dyn Volume, bytes: u64, piece: u64) -> Option<Vec<u64>> {
    let pieces = bytes.div_ceil(piece);
    let mut bits = vec![0; pieces.div_ceil(64) as usize];
    let shift = volume.geometry().block_size.shift();
    let mut at = 0;
    for _ in 0..QUESTIONS {
        if at >= bytes {
            break;
        }
        let extent = volume.extent(Lba(at >> shift))?;
        let end = at.saturating_add(extent.blocks.0 << shift).min(bytes);
        // The last piece may be shorter.
        let whole = if end == bytes { pieces } else { end / piece };
        if extent.unused {
            (at.div_ceil(piece)..whole).for_each(|number| bits[(number / 64) as usize] |= 1 << (number % 64));
        }
        at = end;
    }
    Some(bits)
}

impl Holes {
    /// What the legs know, while nobody writes to them; `None` when OLD knows of no hole. May wait: not to be called on a shard.
    pub(super) fn of(old: &dyn Volume, new: &dyn Volume, bytes: u64, piece: u64) -> Option<Self> {
        let old = unused(old, bytes, piece).filter(|old| old.iter().any(|word| *word != 0))?;
        let new = unused(new, bytes, piece).unwrap_or_else(|| vec![0; old.len()]);
        let both = old.iter().zip(new).map(|(old, new)| AtomicU64::new(old & new)).collect();
        Some(Self { piece, old: old.into_iter().map(AtomicU64::new).collect(), both })
    }

    /// Whether they are of pieces of this length.
    pub(super) fn fit(&self, piece: u64) -> bool {
        self.piece == piece
    }

    /// Nothing is known any more.
    pub(super) fn forget(&self) {
        self.old.iter().chain(&self.both).for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Something may be written there. Called under the range's lock, which orders it for the walk.
    #[inline]
    pub(super) fn fill(&self, bytes: &Range<u64>) {
        for number in bytes.start / self.piece..bytes.end.div_ceil(self.piece) {
            let (at, bit) = ((number / 64) as usize, 1 << (number % 64));
            // What a format has made the volume longer by was never looked at.
            for word in [self.old.get(at), self.both.get(at)].into_iter().flatten() {
                if word.load(Ordering::Relaxed) & bit != 0 {
                    word.fetch_and(!bit, Ordering::Relaxed);
                }
            }
        }
    }

    /// Where the hole of OLD at this byte ends; the byte itself where none is. What is said stays so under the range's lock.
    pub(super) fn end_in_old(&self, at: u64, most: u64) -> u64 {
        self.end(&self.old, at, most)
    }

    /// The same of a hole that both legs have.
    pub(super) fn end_in_both(&self, at: u64, most: u64) -> u64 {
        self.end(&self.both, at, most)
    }

    fn end(&self, bits: &Bits, at: u64, most: u64) -> u64 {
        let is_set = |number: u64| {
            bits.get((number / 64) as usize).is_some_and(|word| word.load(Ordering::Relaxed) & 1 << (number % 64) != 0)
        };
        let (first, last) = (at / self.piece, at.saturating_add(most).div_ceil(self.piece));
        (first..last).take_while(|number| is_set(*number)).last().map_or(at, |number| (number + 1) * self.piece)
    }
}
