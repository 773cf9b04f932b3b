//! Parts of a row in memory: what is missing is computed from the rest.
//!
//! ```text
//!   P = D0 + D1 + …            Q = D0 + 2 D1 + 4 D2 + …        in GF(2^8)
//!   one part is missing:       from P, or from Q
//!   two data are missing:      P' = Dx + Dy, Q' = 2^x Dx + 2^y Dy  (P and Q without what is there)
//! ```

use millrace_memory::{
    Segment, Target,
    parity::{add_into, add_product_into, inverse, power, scale, sum_into},
};

/// Parts of a row at most: legs.
pub(super) const MOST_PARTS: usize = crate::members::state::MOST_LEGS;

/// Numbers of the parts of a set.
pub(super) use crate::members::state::legs_of as parts_of;

/// What a look at whole rows tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The parity fits the data.
    Right,
    /// It does not, and this part is wrong.
    Wrong(usize),
    /// It does not, and nothing tells what is wrong.
    Unknown,
}

/// Some rows of a stripe in memory: data parts first, then parity, each a segment of one length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    pub(super) all: &'a [Segment],
    /// How many of them are data.
    pub(super) data: usize,
}

impl Parts<'_> {
    /// What a data part is multiplied with in a parity part (numbered from 0: P, Q).
    pub(super) fn factor(parity: usize, part: usize) -> u8 {
        if parity == 0 { 1 } else { power(part as u8) }
    }

    /// Makes a parity part anew from all data, without those in `except`.
    fn sum(&self, into: usize, parity: usize, except: u8) {
        let (all, mut left) = (self.all, parts_of(!except & data_set(self.data)));
        match (left.next(), left.next()) {
            (None, _) => all[into].fill(0),
            (Some(only), None) => {
                all[only].copy_to(&all[into], Target::Near);
                scale(&all[into], Self::factor(parity, only));
            }
            (Some(first), Some(second)) if parity == 0 => sum_into(&all[into], &all[first], &all[second]),
            (Some(first), Some(second)) => {
                all[first].copy_to(&all[into], Target::Near);
                scale(&all[into], Self::factor(parity, first));
                add_product_into(&all[into], &all[second], Self::factor(parity, second));
            }
        }
        left.for_each(|part| add_product_into(&all[into], &all[part], Self::factor(parity, part)));
    }

    /// Computes these parity parts from the data.
    pub(super) fn encode(&self, which: u8) {
        for part in parts_of(which).filter(|part| (self.data..self.all.len()).contains(part)) {
            self.sum(part, part - self.data, 0);
        }
    }

    /// Adds (or, which is the same, takes away) what a data part holds to these parity parts.
    pub(super) fn account(&self, part: usize, parity: u8) {
        for into in parts_of(parity).filter(|into| *into >= self.data) {
            add_product_into(&self.all[into], &self.all[part], Self::factor(into - self.data, part));
        }
    }

    /// Computes the parts that are missing from the others; false when there are too many.
    #[must_use]
    pub(super) fn solve(&self, missing: u8) -> bool {
        let lost = missing & data_set(self.data);
        let parity: u8 = (self.data..self.all.len()).fold(0, |set, part| set | 1 << part);
        let there = parity & !missing;
        match lost.count_ones() {
            0 => {}
            1 if there != 0 => {
                let (part, from) = (lost.trailing_zeros() as usize, there.trailing_zeros() as usize);
                let factor = Self::factor(from - self.data, part);
                self.sum(part, from - self.data, lost);
                add_into(&self.all[part], &self.all[from]);
                scale(&self.all[part], inverse(factor));
            }
            2 if there.count_ones() == 2 => {
                let x = lost.trailing_zeros() as usize;
                let y = (lost & !(1 << x)).trailing_zeros() as usize;
                // y: P' = Dx + Dy; x: Q' = 2^x Dx + 2^y Dy.
                self.sum(y, 0, lost);
                add_into(&self.all[y], &self.all[self.data]);
                self.sum(x, 1, lost);
                add_into(&self.all[x], &self.all[self.data + 1]);
                // 2^y P' + Q' = (2^x + 2^y) Dx.
                add_product_into(&self.all[x], &self.all[y], power(y as u8));
                scale(&self.all[x], inverse(power(x as u8) ^ power(y as u8)));
                add_into(&self.all[y], &self.all[x]);
            }
            _ => return false,
        }
        self.encode(missing);
        true
    }

    /// Whether the parity fits the data, in one block's rows: all parts are there. `spare` has as many segments as there are
    /// parity parts; afterwards they hold what must be added to each parity part to make it right.
    pub(super) fn verdict(&self, spare: &[Segment]) -> Verdict {
        let count = self.all.len() - self.data;
        let mut wrong = 0_u8;
        for (parity, spare) in spare.iter().enumerate().take(count) {
            self.all[self.data + parity].copy_to(spare, Target::Near);
            for part in 0..self.data {
                add_product_into(spare, &self.all[part], Self::factor(parity, part));
            }
            wrong |= u8::from(!is_zero(spare)) << parity;
        }
        match (wrong, count) {
            (0, _) => Verdict::Right,
            (_, 1) => Verdict::Unknown,
            (1, _) => Verdict::Wrong(self.data),
            (2, _) => Verdict::Wrong(self.data + 1),
            // One data part is off by e: P by e, and Q by 2^part times e.
            _ => (0..self.data)
                .find(|part| {
                    add_product_into(&spare[1], &spare[0], power(*part as u8));
                    let fits = is_zero(&spare[1]);
                    add_product_into(&spare[1], &spare[0], power(*part as u8));
                    fits
                })
                .map_or(Verdict::Unknown, Verdict::Wrong),
        }
    }
}

/// The set of all data parts.
fn data_set(data: usize) -> u8 {
    (u16::MAX >> (16 - data)) as u8
}

/// Whether all bytes are 0.
fn is_zero(segment: &Segment) -> bool {
    let mut piece = [0; 512];
    (0..segment.len()).step_by(piece.len()).all(|at| {
        let piece = &mut piece[..(segment.len() - at).min(512)];
        segment.read_at(at, piece);
        piece.iter().all(|byte| *byte == 0)
    })
}

#[cfg(test)]
mod tests {
    use millrace_block::conformance::{Memory, Random};

    use super::*;

    const LEN: usize = 512;

    fn rows(memory: &Memory, data: usize, parity: usize, random: &mut Random) -> Vec<Segment> {
        let all: Vec<_> = (0..data + parity).map(|part| memory.segment(part * LEN, LEN)).collect();
        all[..data].iter().for_each(|part| part.write_at(0, &random.bytes(LEN)));
        Parts { all: &all, data }.encode(u8::MAX);
        all
    }

    fn bytes(all: &[Segment]) -> Vec<Vec<u8>> {
        let copy = |part: &Segment| {
            let mut bytes = vec![0; LEN];
            part.read_at(0, &mut bytes);
            bytes
        };
        all.iter().map(copy).collect()
    }

    #[test]
    fn whatever_may_be_missing_is_found_again() {
        let (memory, mut random) = (Memory::new(16 * LEN), Random::new(5));
        for (data, parity) in (1..=7).map(|data| (data, 1)).chain((2..=6).map(|data| (data, 2))) {
            let all = rows(&memory, data, parity, &mut random);
            let (parts, before) = (Parts { all: &all, data }, bytes(&all));
            for missing in 0..1_u16 << all.len() {
                let missing = missing as u8;
                if missing.count_ones() as usize > parity {
                    continue;
                }
                parts_of(missing).for_each(|part| all[part].fill(0xcc));
                assert!(parts.solve(missing));
                assert!(bytes(&all) == before, "{data}+{parity}, missing {missing:#b}");
            }
            let too_many = (1_u16 << (parity + 1)) - 1;
            assert!(all.len() <= parity || data <= parity || !parts.solve(too_many as u8), "{data}+{parity}");
        }
    }

    #[test]
    fn parity_follows_a_changed_part() {
        let (memory, mut random) = (Memory::new(16 * LEN), Random::new(6));
        let all = rows(&memory, 5, 2, &mut random);
        let parts = Parts { all: &all, data: 5 };
        parts.account(3, 0b110_0000);
        all[3].write_at(0, &random.bytes(LEN));
        parts.account(3, 0b110_0000);
        let after = bytes(&all);
        parts.encode(u8::MAX);
        assert!(bytes(&all) == after);
    }

    #[test]
    fn two_parity_parts_tell_which_part_is_wrong_and_one_does_not() {
        let (memory, mut random) = (Memory::new(16 * LEN), Random::new(7));
        let spare: Vec<_> = (10..12).map(|at| memory.segment(at * LEN, LEN)).collect();
        for parity in 1..=2 {
            let all = rows(&memory, 5, parity, &mut random);
            let parts = Parts { all: &all, data: 5 };
            assert_eq!(parts.verdict(&spare), Verdict::Right);
            for (wrong, part) in all.iter().enumerate() {
                let at = random.below(LEN as u64) as usize;
                let before: u8 = part.read_value(at);
                part.write_value(at, &(before ^ 0x41));
                let expected = if parity == 1 { Verdict::Unknown } else { Verdict::Wrong(wrong) };
                assert_eq!(parts.verdict(&spare), expected);
                part.write_value(at, &before);
            }
            // Two wrong parts are never taken for one, unless they happen to look like one.
            all[0].write_at(0, &[1, 2, 3]);
            all[1].write_at(0, &[9, 8, 7]);
            assert_eq!(parts.verdict(&spare), Verdict::Unknown);
        }
    }
}
