//! Where things are on the leg: docs/formats/crypt.md.
//!
//! ```text
//!   header │ log, half 0 │ log, half 1 │ branch 0 │ branch 1 …
//!   branch:  its page (two places) │ 168 twigs          twig:  its page (two places) │ 168 groups
//!   group:   its page (two places) │ 168 blocks
//! ```

use millrace_block::BlockSize;

use crate::record::Region;

/// Bytes before the first branch.
pub(super) const OFFSET: u64 = 1 << 20;
/// Where the header is.
pub(in crate::crypt) const REGION: Region = Region { magic: *b"MILLSEAL", version: 2, offset: 0, len: 32 << 10 };
/// Bytes of a page.
pub(super) const PAGE: usize = 4096;
/// Bytes of a page's two places.
pub(super) const PAGES: u64 = 2 * PAGE as u64;
/// What a page covers: blocks, or pages of the level below.
pub(super) const FAN: u64 = 168;
/// Levels of pages; a level above them is the root, in the header.
pub(super) const LEVELS: usize = 3;
/// Branches that the root has room for.
pub(super) const BRANCHES: u64 = 670;
/// Pages of one half of the log.
pub(super) const LOG_PAGES: u64 = 124;
/// Where the log is.
const LOG: u64 = REGION.len;

const _: () = assert!(LOG + 2 * LOG_PAGES * PAGE as u64 == OFFSET);

/// Blocks of the largest volume.
pub(super) const MOST_BLOCKS: u64 = BRANCHES * FAN * FAN * FAN;

/// Blocks under a page of this level.
pub(super) fn blocks_under(level: usize) -> u64 {
    FAN.pow(level as u32 + 1)
}

/// Bytes of a page's two places and of all that it covers.
fn span(level: usize, block_size: BlockSize) -> u64 {
    (0..level).fold(PAGES + (FAN << block_size.shift()), |below, _| PAGES + FAN * below)
}

/// Where the places of a page are.
pub(super) fn page_start(level: usize, number: u64, block_size: BlockSize) -> u64 {
    let above = level + 1;
    let start = if above == LEVELS { OFFSET } else { page_start(above, number / FAN, block_size) + PAGES };
    let at = if above == LEVELS { number } else { number % FAN };
    start + at * span(level, block_size)
}

/// Where a block is.
pub(super) fn block_start(lba: u64, block_size: BlockSize) -> u64 {
    page_start(0, lba / FAN, block_size) + PAGES + ((lba % FAN) << block_size.shift())
}

/// Where a page of the log is.
pub(super) fn log_start(epoch: u64, page: u64) -> u64 {
    LOG + ((epoch % 2) * LOG_PAGES + page) * PAGE as u64
}

/// Bytes of a leg for so many blocks; `None` when there are no such legs.
pub(super) fn leg_bytes(blocks: u64, block_size: BlockSize) -> Option<u64> {
    let last = blocks.checked_sub(1).filter(|last| *last < MOST_BLOCKS)?;
    Some(block_start(last, block_size) + u64::from(block_size.bytes()))
}

/// Blocks that a leg of so many bytes has room for.
pub(super) fn blocks_in(bytes: u64, block_size: BlockSize) -> u64 {
    let (mut room, mut blocks) = (bytes.saturating_sub(OFFSET), 0);
    for level in (0..LEVELS).rev() {
        let span = span(level, block_size);
        blocks += room / span * blocks_under(level);
        room = (room % span).saturating_sub(PAGES);
    }
    (blocks + (room >> block_size.shift())).min(MOST_BLOCKS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn blocks_and_pages_do_not_meet(lba in 0..MOST_BLOCKS - 1, blocks in 1..MOST_BLOCKS, small: bool) {
            let block_size = if small { BlockSize::B512 } else { BlockSize::B4096 };
            let bytes = leg_bytes(blocks, block_size).unwrap();
            prop_assert_eq!(blocks_in(bytes, block_size), blocks);
            prop_assert!(blocks_in(bytes - 1, block_size) < blocks);
            let (start, next) = (block_start(lba, block_size), block_start(lba + 1, block_size));
            let new_pages = (0..LEVELS).filter(|level| (lba + 1) % blocks_under(*level) == 0).count() as u64;
            prop_assert_eq!(next - start, u64::from(block_size.bytes()) + new_pages * PAGES);
            for level in 0..LEVELS {
                let page = page_start(level, (lba + 1) / blocks_under(level), block_size);
                prop_assert!(page >= OFFSET && page + PAGES <= next);
                prop_assert_eq!(page > start, (lba + 1) % blocks_under(level) == 0);
            }
        }
    }

    #[test]
    fn sizes_beyond_all_legs_are_no_sizes() {
        assert_eq!(leg_bytes(0, BlockSize::B512), None);
        assert_eq!(leg_bytes(MOST_BLOCKS + 1, BlockSize::B512), None);
        assert_eq!(blocks_in(u64::MAX, BlockSize::B4096), MOST_BLOCKS);
        assert_eq!((blocks_in(0, BlockSize::B512), blocks_in(OFFSET + 3 * PAGES, BlockSize::B512)), (0, 0));
        assert_eq!(log_start(1, LOG_PAGES - 1) + PAGE as u64, OFFSET);
    }
}
