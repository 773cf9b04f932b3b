//! What the cache keeps on its fast leg: docs/formats/cache.md.
//!
//! ```text
//!   0            16 KiB        data
//!   │ superblock │ table pages │ slot 0 │ slot 1 │ …
//! ```

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use millrace_block::{BlockSize, Volume};

use super::table::Entry;
use crate::{
    record::{Found, Region},
    service::ServiceError,
};

/// Bytes of the superblock's two copies; the table follows.
const HEAD: u64 = 16 << 10;
/// Where the table begins.
pub(super) const TABLE: u64 = HEAD;
/// Where the superblock is.
pub(super) const REGION: Region = Region { magic: *b"MRLCACHE", version: 1, offset: 0, len: HEAD };
/// Bytes of the superblock's content.
const CONTENT: usize = 128;
/// Bytes of the label at most.
const LABEL: usize = 64;
/// Bytes of a page before its entries.
const PAGE_HEAD: usize = 16;
/// Bytes of an entry.
const ENTRY: usize = 24;
/// Slots at least: fewer are no cache.
const LEAST_SLOTS: u64 = 8;
/// Slots at most.
const MOST_SLOTS: u64 = 1 << 28;
/// Smallest line, as a power of two.
pub(super) const LEAST_LINE: u32 = 12;
/// Largest line, as a power of two: 64 blocks of 4096 bytes.
pub(super) const MOST_LINE: u32 = 18;

/// Where everything is on the fast leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Power of two of a line's bytes.
    pub(super) line_shift: u32,
    /// Lines that there is room for.
    pub(super) slots: u32,
}

/// Slots of which a page of this size tells.
pub(super) fn per_page(block_size: BlockSize) -> u32 {
    ((block_size.bytes() as usize - PAGE_HEAD) / ENTRY) as u32
}

impl Plan {
    /// As many lines as a leg has room for.
    pub(super) fn for_leg(bytes: u64, line_shift: u32) -> Option<Self> {
        let fits = |slots: u64| Self { line_shift, slots: slots as u32 }.end() <= bytes;
        let mut slots = (bytes.saturating_sub(HEAD) >> line_shift).min(MOST_SLOTS);
        while slots >= LEAST_SLOTS && !fits(slots) {
            // The table is never more than a hundredth of what the lines take.
            slots -= (slots / 128).max(1);
        }
        (slots >= LEAST_SLOTS).then_some(Self { line_shift, slots: slots as u32 })
    }

    /// Bytes of the table: enough for either block size.
    pub(super) fn table_bytes(self) -> u64 {
        let bytes = |block_size: BlockSize| u64::from(self.slots.div_ceil(per_page(block_size))) << block_size.shift();
        bytes(BlockSize::B512).max(bytes(BlockSize::B4096)).next_multiple_of(4096)
    }

    /// Where a slot begins.
    #[inline]
    pub(super) fn data(self, slot: u32) -> u64 {
        self.data_start() + (u64::from(slot) << self.line_shift)
    }

    /// Where the first slot begins.
    pub(super) fn data_start(self) -> u64 {
        HEAD + self.table_bytes()
    }

    /// The first byte that is not used.
    pub(super) fn end(self) -> u64 {
        self.data_start() + (u64::from(self.slots) << self.line_shift)
    }

    /// Number of table pages.
    pub(super) fn pages(self, block_size: BlockSize) -> u32 {
        self.slots.div_ceil(per_page(block_size))
    }
}

/// Where a cache stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Closed in an orderly way: the table says what each slot has.
    Closed,
    /// In force, or was when the power went: of the table only dirty blocks count.
    InForce,
    /// Taken out of its volume: it holds nothing.
    Left,
}

/// The superblock's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Superblock {
    /// Tells this cache from others, and its pages from theirs.
    pub(super) id: [u8; 16],
    /// Bytes of the volume, and so of the slow leg that it is the cache of.
    pub(super) bytes: u64,
    pub(super) block_size: BlockSize,
    pub(super) plan: Plan,
    pub(super) state: State,
    /// There may be blocks that only this leg has.
    pub(super) may_be_dirty: bool,
    /// The volume's name when the cache was made: for messages.
    pub(super) label: String,
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_le_bytes)
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_le_bytes)
}

impl Superblock {
    pub(super) fn encode(&self) -> Vec<u8> {
        let state = match self.state {
            State::Closed => 1,
            State::InForce => 2,
            State::Left => 3_u32,
        };
        let label = self.label.as_bytes();
        let label = label.get(..label.len().min(LABEL)).unwrap_or_default();
        let mut out = self.id.to_vec();
        out.extend_from_slice(&self.bytes.to_le_bytes());
        let numbers = [
            self.block_size.bytes(),
            self.plan.line_shift,
            self.plan.slots,
            state,
            u32::from(self.may_be_dirty),
            label.len() as u32,
        ];
        for number in numbers {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&self.plan.data_start().to_le_bytes());
        out.extend_from_slice(label);
        out.resize(CONTENT, 0);
        out
    }

    /// What the content says, or what is wrong with it. `leg_bytes` are those of the leg that it was found on.
    pub(super) fn decode(content: &[u8], leg_bytes: u64) -> Result<Self, String> {
        let short = || format!("its superblock has {} bytes and not {CONTENT}", content.len());
        if content.len() != CONTENT {
            return Err(short());
        }
        let number = |at: usize| word(content, at).ok_or_else(short);
        let (block_size, line_shift, slots) = (number(24)?, number(28)?, number(32)?);
        let block_size = BlockSize::from_bytes(block_size).ok_or_else(|| format!("it has blocks of {block_size} bytes"))?;
        let in_range = (LEAST_LINE..=MOST_LINE).contains(&line_shift)
            && line_shift <= block_size.shift() + 6
            && (LEAST_SLOTS..=MOST_SLOTS).contains(&u64::from(slots));
        if !in_range {
            return Err(format!("{slots} lines of 2^{line_shift} bytes are impossible"));
        }
        let plan = Plan { line_shift, slots };
        if long(content, 48) != Some(plan.data_start()) {
            return Err("its data begin at a place that this program does not know".to_owned());
        }
        if plan.end() > leg_bytes {
            return Err(format!("its lines end at byte {}, and the leg at {leg_bytes}: the leg was cut short", plan.end()));
        }
        let state = match number(36)? {
            1 => State::Closed,
            2 => State::InForce,
            3 => State::Left,
            other => return Err(format!("it is in a state of number {other}, which this program does not know")),
        };
        let label = content.get(56..56 + (number(44)? as usize).min(LABEL)).ok_or_else(short)?;
        Ok(Self {
            id: array(content, 0).ok_or_else(short)?,
            bytes: long(content, 16).ok_or_else(short)?,
            block_size,
            plan,
            state,
            may_be_dirty: number(40)? != 0,
            label: String::from_utf8_lossy(label).into_owned(),
        })
    }

    /// Reads the superblock; `None` where there never was one.
    pub(super) fn load(leg: &Arc<impl Volume + ?Sized + 'static>) -> Result<Option<(Self, Found)>, ServiceError> {
        let Some(found) = REGION.load(leg)? else { return Ok(None) };
        let superblock = Self::decode(&found.content, leg.geometry().bytes())
            .map_err(|what| ServiceError::Content { leg: leg.name().to_owned(), what })?;
        Ok(Some((superblock, found)))
    }

    /// Replaces both copies, so that none of an older state is left. Returns the new generation.
    pub(super) fn store(&self, leg: &Arc<impl Volume + ?Sized + 'static>, generation: u64) -> Result<u64, ServiceError> {
        let content = self.encode();
        REGION.store(leg, generation + 1, &content)?;
        REGION.store(leg, generation + 2, &content)?;
        Ok(generation + 2)
    }

    /// What its pages carry, so that those of another cache are not taken for its own.
    pub(super) fn mark(&self) -> u64 {
        long(&self.id, 0).unwrap_or(0)
    }
}

/// Fills a page of the table.
pub(super) fn encode_page(page: &mut [u8], number: u32, mark: u64, mut entry: impl FnMut(u32) -> Entry) {
    let count = ((page.len() - PAGE_HEAD) / ENTRY) as u32;
    page.fill(0);
    let mut any = false;
    for (at, bytes) in page[PAGE_HEAD..].chunks_exact_mut(ENTRY).enumerate() {
        let Entry { line, dirty, valid } = entry(number * count + at as u32);
        any |= line != 0;
        for (bytes, value) in bytes.chunks_exact_mut(8).zip([line, dirty, valid]) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }
    if !any {
        // A page of which no slot holds anything is all zeroes, as one that was never written.
        return;
    }
    page[4..8].copy_from_slice(&number.to_le_bytes());
    page[8..16].copy_from_slice(&mark.to_le_bytes());
    let crc = checksum(CrcAlgorithm::Crc32Iscsi, &page[4..]) as u32;
    page[..4].copy_from_slice(&crc.to_le_bytes());
}

/// The entries of a page; `None` when it is damaged, or of another cache.
pub(super) fn decode_page(page: &[u8], number: u32, mark: u64) -> Option<impl Iterator<Item = Entry> + '_> {
    let empty = crate::legs::is_zero(page);
    let good = || {
        let crc = checksum(CrcAlgorithm::Crc32Iscsi, page.get(4..)?) as u32;
        (word(page, 0)? == crc && word(page, 4)? == number && long(page, 8)? == mark).then_some(())
    };
    if !empty {
        good()?;
    }
    let entries = page.get(PAGE_HEAD..)?.chunks_exact(ENTRY);
    Some(entries.map(|bytes| Entry {
        line: long(bytes, 0).unwrap_or(0),
        dirty: long(bytes, 8).unwrap_or(0),
        valid: long(bytes, 16).unwrap_or(0),
    }))
}

/// The dirty blocks that the entry at this place of a page names.
pub(super) fn dirty_at(page: &[u8], at: u32) -> u64 {
    long(page, PAGE_HEAD + at as usize * ENTRY + 8).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_superblock_reads_back_and_nonsense_does_not_panic(
            id: [u8; 16], bytes: u64, line_shift in LEAST_LINE..=15_u32, state in 0..3_usize, may_be_dirty: bool,
            leg in (1_u64 << 20)..(1 << 45), noise in proptest::collection::vec(any::<(usize, u8)>(), 1..4),
        ) {
            let plan = Plan::for_leg(leg, line_shift).unwrap();
            prop_assert!(plan.end() <= leg);
            let room = u64::from(plan.slots) == MOST_SLOTS || leg - plan.end() < leg / 60 + (4 << line_shift);
            prop_assert!(room, "little is left over: {plan:?} of {leg}");
            let state = [State::Closed, State::InForce, State::Left][state];
            let block = Superblock {
                id, bytes, block_size: BlockSize::B512, plan, state, may_be_dirty, label: "a volume".to_owned(),
            };
            let mut content = block.encode();
            prop_assert_eq!(Superblock::decode(&content, leg), Ok(block));
            prop_assert!(Superblock::decode(&content, plan.end() - 1).is_err());
            for (at, byte) in noise {
                let len = content.len();
                content[at % len] = byte;
            }
            let _ = Superblock::decode(&content, leg);
            let _ = Superblock::decode(&content[..100], leg);
        }

        #[test]
        fn pages_read_back_and_damaged_ones_are_seen(
            number in 0..1000_u32, mark: u64, large: bool, seed: u64, at: usize, bit in 0..8_u32,
        ) {
            let block_size = if large { BlockSize::B4096 } else { BlockSize::B512 };
            let mut page = vec![0; block_size.bytes() as usize];
            let entry = |slot: u32| Entry { line: u64::from(slot) + 1, dirty: seed ^ u64::from(slot), valid: !seed };
            encode_page(&mut page, number, mark, entry);
            let first = number * per_page(block_size);
            let read: Vec<_> = decode_page(&page, number, mark).unwrap().collect();
            let written: Vec<_> = (first..first + per_page(block_size)).map(entry).collect();
            prop_assert_eq!(&read, &written);
            prop_assert_eq!(dirty_at(&page, 3), written[3].dirty);
            prop_assert!(decode_page(&page, number + 1, mark).is_none() && decode_page(&page, number, !mark).is_none());
            let len = page.len();
            page[at % len] ^= 1 << bit;
            prop_assert!(decode_page(&page, number, mark).is_none());
        }
    }

    #[test]
    fn a_page_of_nothing_is_zeroes() {
        let mut page = vec![7; 512];
        encode_page(&mut page, 5, 9, |_| Entry::default());
        assert!(page.iter().all(|byte| *byte == 0));
        assert_eq!(decode_page(&page, 1, 2).unwrap().filter(|entry| entry.line != 0).count(), 0);
    }

    #[test]
    fn a_leg_may_be_too_small() {
        assert_eq!(Plan::for_leg(40 << 10, 12), None);
        assert_eq!(Plan::for_leg(0, 15), None);
        let plan = Plan::for_leg(64 << 10, 12).unwrap();
        assert!(plan.slots >= 8 && plan.end() <= 64 << 10, "{plan:?}");
    }
}
