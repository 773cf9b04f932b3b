//! What `--verify` writes into a block, and what a block that differs from it says about the fault.

use std::fmt;

use millrace_block::Lba;
use thiserror::Error;

/// Bytes before the pattern: seed, LBA, generation, 8 each.
const STAMP: usize = 24;

/// The content of one block: a function of these three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// The run's own number, so that an earlier run's blocks never pass.
    pub(super) seed: u64,
    pub(super) lba: Lba,
    /// Counts the writes to the block; the first is 1.
    pub(super) generation: u64,
}

impl Stamp {
    /// Word `index` of the block.
    fn word(self, index: u64) -> u64 {
        match index {
            0 => self.seed,
            1 => self.lba.0,
            2 => self.generation,
            _ => {
                let base = self.seed ^ self.lba.0.rotate_left(32) ^ self.generation.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                // The finalizer of splitmix64: each word depends on all of the stamp.
                let mut word = base.wrapping_add(index.wrapping_mul(0xbf58_476d_1ce4_e5b9));
                word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                word ^ (word >> 31)
            }
        }
    }

    /// Fills a block, whose length is a multiple of 8.
    pub(super) fn fill(self, block: &mut [u8]) {
        for (index, word) in block.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&self.word(index as u64).to_le_bytes());
        }
    }

    /// Offset of the first byte that differs.
    fn first_difference(self, block: &[u8]) -> Option<usize> {
        let (words, _) = block.as_chunks::<8>();
        let index = (0..words.len()).find(|&index| words[index] != self.word(index as u64).to_le_bytes())?;
        let expected = self.word(index as u64).to_le_bytes();
        words[index].iter().zip(expected).position(|(got, expected)| *got != expected).map(|byte| index * 8 + byte)
    }

    /// Checks a block to the byte.
    pub(super) fn check(self, block: &[u8]) -> Result<(), Box<Miscompare>> {
        let Some(offset) = self.first_difference(block) else { return Ok(()) };
        let mut expected = vec![0; block.len()];
        self.fill(&mut expected);
        let shown = offset..block.len().min(offset + 16);
        Err(Box::new(Miscompare {
            stamp: self,
            offset,
            expected: expected[shown.clone()].to_vec(),
            got: block[shown].to_vec(),
            content: self.classify(block),
        }))
    }

    fn classify(self, block: &[u8]) -> Content {
        let (words, _) = block.as_chunks::<8>();
        let word = |index: usize| words.get(index).map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let found = Stamp { seed: word(0), lba: Lba(word(1)), generation: word(2) };
        if block.iter().all(|byte| *byte == 0) {
            Content::Zeroes
        } else if found.seed != self.seed {
            Content::Unknown
        } else {
            match found.first_difference(block) {
                None => Content::Whole(found),
                Some(offset) => Content::Torn { found, offset },
            }
        }
    }
}

/// What a wrong block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Zeroes,
    /// Not this run's.
    Unknown,
    /// A block of this run, whole, but of another place or time.
    Whole(Stamp),
    /// A block of this run up to `offset`.
    Torn {
        found: Stamp,
        offset: usize,
    },
}

/// A block that is not what was last written.
#[derive(Debug, Error)]
#[error(
    "{}: wrong from byte {offset} on: expected {}, got {}; {content} (generation {} was written; seed {:#x})",
    stamp.lba, hex(expected), hex(got), stamp.generation, stamp.seed
)]
pub(crate) struct Miscompare {
    stamp: Stamp,
    offset: usize,
    expected: Vec<u8>,
    got: Vec<u8>,
    content: Content,
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zeroes => write!(f, "the block is all zeroes"),
            Self::Unknown => write!(f, "the block was not written by this run"),
            Self::Whole(found) => write!(f, "it holds generation {} of {}, whole", found.generation, found.lba),
            Self::Torn { found, offset } if *offset < STAMP => {
                write!(f, "its stamp says generation {} of {}", found.generation, found.lba)
            }
            Self::Torn { found, offset } => {
                write!(f, "it holds generation {} of {} up to byte {offset}", found.generation, found.lba)
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP_A: Stamp = Stamp { seed: 0x5eed, lba: Lba(77), generation: 3 };

    fn block(stamp: Stamp) -> Vec<u8> {
        let mut block = vec![0; 512];
        stamp.fill(&mut block);
        block
    }

    #[test]
    fn every_single_wrong_byte_is_found() {
        let good = block(STAMP_A);
        assert!(STAMP_A.check(&good).is_ok());
        for offset in 0..good.len() {
            let mut bad = good.clone();
            bad[offset] ^= 0x10;
            let error = STAMP_A.check(&bad).unwrap_err();
            assert_eq!((error.offset, error.stamp.lba), (offset, Lba(77)));
            assert_eq!(error.got[0], good[offset] ^ 0x10);
            assert_eq!(error.expected[0], good[offset]);
        }
    }

    #[test]
    fn names_the_fault() {
        let check = |block: &[u8]| STAMP_A.check(block).unwrap_err().to_string();
        let older = Stamp { generation: 2, ..STAMP_A };
        assert!(check(&block(older)).contains("it holds generation 2 of LBA 77, whole"));
        let elsewhere = Stamp { lba: Lba(78), ..STAMP_A };
        assert!(check(&block(elsewhere)).contains("it holds generation 3 of LBA 78, whole"));
        assert!(check(&[0; 512]).contains("all zeroes"));
        let earlier_run = Stamp { seed: 1, ..STAMP_A };
        assert!(check(&block(earlier_run)).contains("not written by this run"));
        let mut torn = block(STAMP_A);
        torn[256..].copy_from_slice(&block(older)[256..]);
        assert!(check(&torn).contains("generation 3 of LBA 77 up to byte 256"));
    }

    #[test]
    fn stamps_that_differ_share_no_pattern_words() {
        let others =
            [Stamp { seed: 0x5eee, ..STAMP_A }, Stamp { lba: Lba(78), ..STAMP_A }, Stamp { generation: 4, ..STAMP_A }];
        for other in others {
            let (a, b) = (block(STAMP_A), block(other));
            assert!(a[STAMP..].chunks(8).zip(b[STAMP..].chunks(8)).all(|(a, b)| a != b));
        }
    }
}
