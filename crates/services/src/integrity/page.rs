//! What integrity keeps on its leg: docs/formats/integrity.md.

use crc_fast::{CrcAlgorithm, checksum};
use millrace_block::BlockSize;

use super::entry::{LOCKED, ZERO};
use crate::{legs::is_zero, record::Region};

/// Bytes before the first group.
pub(super) const OFFSET: u64 = 64 << 10;
/// Where the header is.
pub(super) const REGION: Region = Region { magic: *b"MILLINTG", version: 1, offset: 0, len: 16 << 10 };
/// Bytes of a page.
pub(super) const PAGE: usize = 4096;
/// Bytes of a group's two pages.
pub(super) const PAGES: u64 = 2 * PAGE as u64;
/// Blocks of a group.
pub(super) const BLOCKS: u64 = 504;

const HEAD: usize = 64;
const MAGIC: &[u8; 8] = b"MILLPAGE";
const OPEN: u32 = 1;

/// Bytes of a group of whole size.
fn group_bytes(block_size: BlockSize) -> u64 {
    PAGES + (BLOCKS << block_size.shift())
}

/// Where a group's first page is.
pub(super) fn group_start(group: u64, block_size: BlockSize) -> u64 {
    OFFSET + group * group_bytes(block_size)
}

/// Where a block is.
pub(super) fn block_start(lba: u64, block_size: BlockSize) -> u64 {
    group_start(lba / BLOCKS, block_size) + PAGES + ((lba % BLOCKS) << block_size.shift())
}

/// Bytes of a leg for so many blocks; `None` when there are no such legs.
pub(super) fn leg_bytes(blocks: u64, block_size: BlockSize) -> Option<u64> {
    let pages = blocks.div_ceil(BLOCKS).checked_mul(PAGES)?;
    let data = blocks.checked_mul(u64::from(block_size.bytes()))?;
    OFFSET.checked_add(pages)?.checked_add(data).filter(|bytes| *bytes <= 1 << 62)
}

/// Blocks that a leg of so many bytes has room for.
pub(super) fn blocks_in(bytes: u64, block_size: BlockSize) -> u64 {
    let room = bytes.saturating_sub(OFFSET);
    let (whole, rest) = (room / group_bytes(block_size), room % group_bytes(block_size));
    whole * BLOCKS + (rest.saturating_sub(PAGES) >> block_size.shift())
}

/// A group's checksums, as of some moment.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Page {
    /// Counts the pages of this group; its lowest bit says in which place it lies.
    pub(super) sequence: u64,
    /// Blocks may have been written since.
    pub(super) open: bool,
    pub(super) entries: Box<[u64]>,
}

/// One of a group's two places for a page.
pub(super) enum Copy {
    Empty,
    Good(Page),
    Damaged,
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
}

impl Page {
    /// The page of a group, for a volume of this identifier.
    pub(super) fn encode(&self, uuid: &[u8; 16], group: u64) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&u32::from(self.open).to_le_bytes());
        out.extend_from_slice(&0_u32.to_le_bytes());
        out.extend_from_slice(uuid);
        out.extend_from_slice(&group.to_le_bytes());
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.resize(HEAD, 0);
        for entry in &self.entries {
            out.extend_from_slice(&(entry & !LOCKED).to_le_bytes());
        }
        assert_eq!(out.len(), PAGE, "a page has an entry for each block of its group");
        let crc = checksum(CrcAlgorithm::Crc32Iscsi, &out) as u32;
        out[12..16].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// What stands in one of the places.
    pub(super) fn decode(bytes: &[u8], uuid: &[u8; 16], group: u64) -> Copy {
        if is_zero(bytes) {
            return Copy::Empty;
        }
        let mut plain = bytes.to_vec();
        if let Some(crc) = plain.get_mut(12..16) {
            crc.fill(0);
        }
        let crc = checksum(CrcAlgorithm::Crc32Iscsi, &plain) as u32;
        let open = u32::from_le_bytes(array(bytes, 8));
        let good = bytes.len() == PAGE
            && bytes.starts_with(MAGIC)
            && array(bytes, 12) == crc.to_le_bytes()
            && array(bytes, 16) == *uuid
            && array(bytes, 32) == group.to_le_bytes()
            && open <= OPEN;
        if !good {
            return Copy::Damaged;
        }
        let entries = bytes.get(HEAD..).unwrap_or(&[]).chunks(8).map(|entry| u64::from_le_bytes(array(entry, 0)) & !LOCKED);
        let sequence = u64::from_le_bytes(array(bytes, 40));
        Copy::Good(Page { sequence, open: open == OPEN, entries: entries.collect() })
    }
}

/// What a group's pages say.
pub(super) enum Found {
    /// Nothing was written to the group.
    Fresh,
    Page {
        page: Page,
        /// The other one is damaged. It may have been a newer one, that said "open" or not.
        alone: bool,
    },
    /// Both pages are damaged.
    Lost,
}

/// The page that counts, of both places.
pub(super) fn choose(bytes: &[u8], uuid: &[u8; 16], group: u64) -> Found {
    let places = bytes.split_at(PAGE.min(bytes.len()));
    let mut found = [places.0, places.1].map(|bytes| Page::decode(bytes, uuid, group));
    for (place, copy) in (0..).zip(&mut found) {
        if matches!(copy, Copy::Good(page) if page.sequence % 2 != place) {
            // In the other one's place.
            *copy = Copy::Damaged;
        }
    }
    match found {
        [Copy::Good(one), Copy::Good(other)] => {
            Found::Page { page: if one.sequence > other.sequence { one } else { other }, alone: false }
        }
        [Copy::Good(page), Copy::Empty] | [Copy::Empty, Copy::Good(page)] => Found::Page { page, alone: false },
        [Copy::Good(page), Copy::Damaged] | [Copy::Damaged, Copy::Good(page)] => Found::Page { page, alone: true },
        [Copy::Empty, Copy::Empty] => Found::Fresh,
        // The first page of all, which says "open": a group is closed only after that.
        [Copy::Damaged, Copy::Empty] | [Copy::Empty, Copy::Damaged] => {
            let page = Page { sequence: 0, open: true, entries: vec![ZERO; BLOCKS as usize].into() };
            Found::Page { page, alone: true }
        }
        [Copy::Damaged, Copy::Damaged] => Found::Lost,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn blocks_and_pages_do_not_meet(lba in 0_u64..1 << 40, blocks in 1_u64..1 << 40, small: bool) {
            let block_size = if small { BlockSize::B512 } else { BlockSize::B4096 };
            let bytes = leg_bytes(blocks, block_size).unwrap();
            prop_assert_eq!(blocks_in(bytes, block_size), blocks);
            prop_assert!(blocks_in(bytes - 1, block_size) < blocks);
            prop_assert_eq!(block_start(blocks - 1, block_size) + u64::from(block_size.bytes()), bytes);
            let (start, next) = (block_start(lba, block_size), block_start(lba + 1, block_size));
            let gap = if (lba + 1) % BLOCKS == 0 { PAGES } else { 0 };
            prop_assert_eq!(next - start, u64::from(block_size.bytes()) + gap);
            prop_assert!(start >= group_start(lba / BLOCKS, block_size) + PAGES);
        }

        #[test]
        fn a_page_reads_back_and_a_damaged_one_does_not(uuid: [u8; 16], group: u64, sequence: u64, open: bool, seed: u64, at in 0..PAGE, bit in 0_u8..8) {
            let entries = (0..BLOCKS).map(|at| at.wrapping_mul(seed | 1) & !LOCKED).collect();
            let page = Page { sequence, open, entries };
            let mut bytes = page.encode(&uuid, group);
            let good = |bytes: &[u8], group| matches!(Page::decode(bytes, &uuid, group), Copy::Good(found) if found == page);
            prop_assert!(good(&bytes, group));
            prop_assert!(matches!(Page::decode(&bytes, &uuid, group ^ 1), Copy::Damaged), "a page in another's place");
            bytes[at] ^= 1 << bit;
            prop_assert!(matches!(Page::decode(&bytes, &uuid, group), Copy::Damaged));
            prop_assert!(matches!(Page::decode(&bytes[..at], &uuid, group), Copy::Damaged | Copy::Empty));
        }
    }

    #[test]
    fn sizes_beyond_all_legs_are_no_sizes() {
        assert_eq!(leg_bytes(u64::MAX, BlockSize::B512), None);
        assert_eq!(leg_bytes(1 << 60, BlockSize::B4096), None);
        assert_eq!((blocks_in(0, BlockSize::B512), blocks_in(OFFSET + PAGES, BlockSize::B512)), (0, 0));
    }
}
