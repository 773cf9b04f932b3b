//! Where everything is in a stripe, and how a write is cut up.
//!
//! ```text
//!   five legs, one parity (P goes round):        chunk 0 of a stripe follows its parity, so that reads of neighbours go to all legs
//!   stripe 0:  D0 D1 D2 D3 P
//!   stripe 1:  D1 D2 D3 P  D0
//!   stripe 2:  D2 D3 P  D0 D1
//! ```
//!
//! A row is what lies at one offset of all legs. Rows are written on their own: parity of a row needs this row only.

use std::ops::Range;

/// The shape of a volume with parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Bytes of a chunk: a power of two.
    pub(super) chunk: u64,
    /// Legs.
    pub(super) legs: usize,
    /// Of them, parity in each stripe: 1 or 2.
    pub(super) parity: usize,
}

/// A rectangle of a stripe: some chunks, next to each other, and of each the same rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Band {
    pub(super) stripe: u64,
    /// Data chunks.
    pub(super) chunks: Range<usize>,
    /// Bytes within a chunk.
    pub(super) rows: Range<u64>,
}

/// How a band is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// It has all data of its rows: nothing is read.
    Full,
    /// What it replaces and the parity are read.
    Modify,
    /// What it does not replace is read.
    Reconstruct,
}

impl Layout {
    /// Data chunks in a stripe.
    pub(super) fn data(&self) -> usize {
        self.legs - self.parity
    }

    /// Bytes of data in a stripe.
    pub(super) fn width(&self) -> u64 {
        self.chunk * self.data() as u64
    }

    /// Bytes of each leg that so many bytes of data need.
    pub(super) fn leg_bytes(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.width()).saturating_mul(self.chunk)
    }

    /// The leg of a part of a stripe: data chunks first, then P and Q.
    pub(super) fn leg(&self, stripe: u64, part: usize) -> usize {
        let legs = self.legs as u64;
        let first_parity = legs - 1 - stripe % legs;
        let after = if part < self.data() { self.parity + part } else { part - self.data() };
        ((first_parity + after as u64) % legs) as usize
    }

    /// The part of a stripe that is on a leg.
    pub(super) fn part(&self, stripe: u64, leg: usize) -> usize {
        let legs = self.legs as u64;
        let after = ((leg as u64 + legs + 1 + stripe % legs) % legs) as usize;
        if after < self.parity { self.data() + after } else { after - self.parity }
    }

    /// Where a byte of the volume is: stripe, data chunk, byte within it.
    pub(super) fn locate(&self, byte: u64) -> (u64, usize, u64) {
        let chunk = byte / self.chunk;
        (chunk / self.data() as u64, (chunk % self.data() as u64) as usize, byte % self.chunk)
    }

    /// The byte of the volume at a place.
    pub(super) fn byte(&self, stripe: u64, chunk: usize, row: u64) -> u64 {
        (stripe * self.data() as u64 + chunk as u64) * self.chunk + row
    }

    /// Cuts a range of bytes, none of them empty, into bands of one stripe: at most three for each.
    pub(super) fn bands(&self, bytes: Range<u64>) -> impl Iterator<Item = Band> + use<> {
        let (layout, width) = (*self, self.width());
        let stripes = bytes.start / width..bytes.end.div_ceil(width);
        stripes.flat_map(move |stripe| {
            let base = stripe * width;
            layout.bands_of(stripe, bytes.start.max(base) - base..bytes.end.min(base + width) - base)
        })
    }

    /// Bands of one stripe, of a range within its data.
    fn bands_of(&self, stripe: u64, range: Range<u64>) -> impl Iterator<Item = Band> + use<> {
        let chunk = self.chunk;
        let (first, start) = ((range.start / chunk) as usize, range.start % chunk);
        // The chunk of the last byte, and the end within it.
        let (last, end) = (((range.end.max(1) - 1) / chunk) as usize, (range.end.max(1) - 1) % chunk + 1);
        let cuts = if first == last { [start, start, end, end] } else { [0, start.min(end), start.max(end), chunk] };
        (0..3).filter_map(move |at| {
            let rows = cuts[at]..cuts[at + 1];
            let from = if start <= rows.start { first } else { first + 1 };
            let to = if end >= rows.end { last + 1 } else { last };
            let empty = rows.is_empty() || from >= to || range.is_empty();
            (!empty).then_some(Band { stripe, chunks: from..to, rows })
        })
    }

    /// How a band is written while all legs are there: with the fewest reads.
    pub(super) fn way(&self, written: usize) -> Way {
        let data = self.data();
        if written == data {
            Way::Full
        } else if written + self.parity < data - written {
            Way::Modify
        } else {
            Way::Reconstruct
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn layouts() -> impl Strategy<Value = Layout> {
        (1..=2_usize, 2..=6_usize, 12..=14_u32).prop_map(|(parity, data, shift)| Layout {
            chunk: 1 << shift,
            legs: data + parity,
            parity,
        })
    }

    proptest! {
        #[test]
        fn every_part_has_its_own_leg_and_comes_round(layout in layouts(), stripe in 0..1_000_000_u64) {
            let legs: BTreeSet<_> = (0..layout.legs).map(|part| layout.leg(stripe, part)).collect();
            prop_assert_eq!(legs.len(), layout.legs);
            for part in 0..layout.legs {
                prop_assert_eq!(layout.part(stripe, layout.leg(stripe, part)), part);
                let round: BTreeSet<_> = (0..layout.legs as u64).map(|more| layout.leg(stripe + more, part)).collect();
                prop_assert_eq!(round.len(), layout.legs, "no leg has more of it than others");
            }
        }

        #[test]
        fn bands_cover_a_range_exactly_once(layout in layouts(), start in 0..400_u64, len in 1..600_u64) {
            let (start, len) = (start * 512, len * 512);
            let mut seen = BTreeSet::new();
            for band in layout.bands(start..start + len) {
                prop_assert!(!band.rows.is_empty() && !band.chunks.is_empty() && band.chunks.end <= layout.data());
                for chunk in band.chunks.clone() {
                    for row in band.rows.clone().step_by(512) {
                        let byte = layout.byte(band.stripe, chunk, row);
                        prop_assert_eq!(layout.locate(byte), (band.stripe, chunk, row));
                        prop_assert!((start..start + len).contains(&byte) && seen.insert(byte));
                    }
                }
            }
            prop_assert_eq!(seen.len() as u64, len / 512);
        }

        #[test]
        fn the_way_reads_least(layout in layouts(), count in 1..=6_usize) {
            prop_assume!(count <= layout.data());
            let (modify, reconstruct) = (count + layout.parity, layout.data() - count);
            match layout.way(count) {
                Way::Full => prop_assert_eq!(reconstruct, 0),
                Way::Modify => prop_assert!(modify < reconstruct),
                Way::Reconstruct => prop_assert!(reconstruct > 0 && reconstruct <= modify),
            }
        }
    }
}
