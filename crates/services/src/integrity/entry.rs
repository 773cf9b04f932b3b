//! What is known of a block: its checksum, its generation, and whether somebody is writing it.

use crc_fast::{CrcAlgorithm, checksum};

/// Somebody writes the block.
pub(super) const LOCKED: u64 = 1 << 63;
/// Nothing was written: the block is zeroes.
pub(super) const ZERO: u64 = 0;
/// A write failed, so that the block may hold anything: it is not checked.
pub(super) const UNKNOWN: u64 = 1;
/// The block's checksum is lost: it cannot be read before it is written.
pub(super) const LOST: u64 = 2;

const GENERATIONS: u64 = (1 << 31) - 1;

/// The entry of a block of these bytes: CRC-32C in the low half, mixed with the block's number and generation; the generation, from 1
/// on, in the high half.
pub(super) fn of(lba: u64, generation: u64, data: &[u8]) -> u64 {
    let crc = checksum(CrcAlgorithm::Crc32Iscsi, data) & 0xffff_ffff;
    let place = (lba ^ generation << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    generation << 32 | (crc ^ place)
}

fn generation(entry: u64) -> u64 {
    (entry & !LOCKED) >> 32
}

/// The entry of the next version of a block.
pub(super) fn next(before: u64, lba: u64, data: &[u8]) -> u64 {
    // From 1 to the largest, and from 1 again.
    of(lba, generation(before) % GENERATIONS + 1, data)
}

/// Whether these bytes are what an entry (that is not locked) says.
pub(super) fn matches(entry: u64, lba: u64, data: &[u8]) -> bool {
    match entry {
        ZERO => crate::legs::is_zero(data),
        UNKNOWN => true,
        _ => generation(entry) > 0 && of(lba, generation(entry), data) == entry,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_entry_knows_its_block(lba: u64, other: u64, before: u64, data: [u8; 32], bit in 0_usize..512 * 8) {
            let data = data.repeat(16);
            let before = before & !LOCKED;
            let entry = next(before, lba, &data);
            prop_assert!(entry & LOCKED == 0 && entry > LOST && matches(entry, lba, &data));
            prop_assert_eq!(generation(entry), if generation(before) == GENERATIONS { 1 } else { generation(before) + 1 });
            let mut rotten = data.clone();
            rotten[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!matches(entry, lba, &rotten));
            prop_assert!(lba == other || lba ^ other > 1 << 20 || !matches(entry, other, &data), "a block in another's place");
            // A write that got lost: the block before, with the same data or others, has another entry.
            let after = next(entry, lba, &rotten);
            prop_assert!(!matches(after, lba, &data));
            prop_assert!(!matches(LOST, lba, &data) && !matches(ZERO, lba, &rotten.iter().map(|byte| byte | 1).collect::<Vec<_>>()));
        }
    }
}
