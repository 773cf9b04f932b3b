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
pub(super) const REGION: Region = Region { magic: *b"MRLCACHE", version: 2, offset: 0, len: HEAD };
/// Bytes of the superblock's content.
const CONTENT: usize = 128;
/// Bytes of the label at most.
const LABEL: usize = 64;
/// Where the superblock's content says how many bytes a part has.
const PARTS_AT: usize = 120;
/// Bytes of a part of a page: what every disk writes as a whole, or not at all.
const PART: usize = 512;
/// Bytes of a part before its entries.
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
    /// A page is one part, whatever its size, as it was in version 1: it is lost when a disk writes half of it.
    pub(super) whole_pages: bool,
}

/// Slots of which a part of so many bytes tells.
const fn per_part(part: usize) -> u32 {
    ((part - PAGE_HEAD) / ENTRY) as u32
}

impl Plan {
    /// As many lines as a leg has room for.
    pub(super) fn for_leg(bytes: u64, line_shift: u32) -> Option<Self> {
        let plan = |slots: u64| Self { line_shift, slots: slots as u32, whole_pages: false };
        let fits = |slots: u64| plan(slots).end() <= bytes;
        let mut slots = (bytes.saturating_sub(HEAD) >> line_shift).min(MOST_SLOTS);
        while slots >= LEAST_SLOTS && !fits(slots) {
            // The table is never more than a hundredth of what the lines take.
            slots -= (slots / 128).max(1);
        }
        (slots >= LEAST_SLOTS).then(|| plan(slots))
    }

    /// Bytes of the table: enough for either block size.
    pub(super) fn table_bytes(self) -> u64 {
        (u64::from(self.slots.div_ceil(per_part(PART))) * PART as u64).next_multiple_of(4096)
    }

    /// Bytes of a part of a page of so many bytes.
    pub(super) fn part(self, page: usize) -> usize {
        if self.whole_pages { page } else { page.min(PART) }
    }

    /// Slots of which a page tells.
    pub(super) fn per_page(self, block_size: BlockSize) -> u32 {
        let page = block_size.bytes() as usize;
        let part = self.part(page);
        per_part(part) * (page / part) as u32
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
        self.slots.div_ceil(self.per_page(block_size))
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
        out.resize(PARTS_AT, 0);
        let part = if self.has_parts() { PART as u32 } else { 0 };
        out.extend_from_slice(&part.to_le_bytes());
        out.resize(CONTENT, 0);
        out
    }

    /// Whether a page has several parts, of which version 1 knows nothing.
    fn has_parts(&self) -> bool {
        self.block_size == BlockSize::B4096 && !self.plan.whole_pages
    }

    /// Where it is stored, as the version that it needs.
    pub(super) fn region(&self) -> Region {
        Region { version: if self.has_parts() { 2 } else { 1 }, ..REGION }
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
        let whole_pages = match number(PARTS_AT)? {
            // Of one sector, it is the same.
            0 => block_size == BlockSize::B4096,
            512 if block_size == BlockSize::B4096 => false,
            part => return Err(format!("its table has parts of {part} bytes, which this program does not know")),
        };
        let plan = Plan { line_shift, slots, whole_pages };
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
        let (region, content) = (self.region(), self.encode());
        region.store(leg, generation + 1, &content)?;
        region.store(leg, generation + 2, &content)?;
        Ok(generation + 2)
    }

    /// What its pages carry, so that those of another cache are not taken for its own.
    pub(super) fn mark(&self) -> u64 {
        long(&self.id, 0).unwrap_or(0)
    }
}

/// Fills a page of the table, whose parts have so many bytes.
pub(super) fn encode_page(page: &mut [u8], part: usize, number: u32, mark: u64, mut entry: impl FnMut(u32) -> Entry) {
    let first = number * (page.len() / part) as u32;
    for (number, part) in (first..).zip(page.chunks_exact_mut(part)) {
        encode_part(part, number, mark, &mut entry);
    }
}

fn encode_part(part: &mut [u8], number: u32, mark: u64, entry: &mut impl FnMut(u32) -> Entry) {
    let count = per_part(part.len());
    part.fill(0);
    let mut any = false;
    for (at, bytes) in part[PAGE_HEAD..].chunks_exact_mut(ENTRY).enumerate() {
        let Entry { line, dirty, valid } = entry(number * count + at as u32);
        any |= line != 0;
        for (bytes, value) in bytes.chunks_exact_mut(8).zip([line, dirty, valid]) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }
    if !any {
        // A part of which no slot holds anything is all zeroes, as one that was never written.
        return;
    }
    part[4..8].copy_from_slice(&number.to_le_bytes());
    part[8..16].copy_from_slice(&mark.to_le_bytes());
    let crc = checksum(CrcAlgorithm::Crc32Iscsi, &part[4..]) as u32;
    part[..4].copy_from_slice(&crc.to_le_bytes());
}

/// Whether a part is whole, and of this cache.
fn is_good(part: &[u8], number: u32, mark: u64) -> bool {
    let is_ours = || {
        let crc = checksum(CrcAlgorithm::Crc32Iscsi, part.get(4..)?) as u32;
        Some(word(part, 0)? == crc && word(part, 4)? == number && long(part, 8)? == mark)
    };
    crate::legs::is_zero(part) || is_ours() == Some(true)
}

/// The entries of a page; `None` when any of its parts is damaged, or of another cache.
pub(super) fn decode_page(page: &[u8], part: usize, number: u32, mark: u64) -> Option<impl Iterator<Item = Entry> + '_> {
    let parts = page.chunks_exact(part);
    let first = number * parts.len() as u32;
    let good = (first..).zip(parts.clone()).all(|(number, part)| is_good(part, number, mark));
    let entries = parts.flat_map(|part| part[PAGE_HEAD..].chunks_exact(ENTRY));
    good.then_some(entries.map(|bytes| Entry {
        line: long(bytes, 0).unwrap_or(0),
        dirty: long(bytes, 8).unwrap_or(0),
        valid: long(bytes, 16).unwrap_or(0),
    }))
}

/// The dirty blocks that the entry at this place of a page names.
pub(super) fn dirty_at(page: &[u8], part: usize, at: u32) -> u64 {
    let (number, at) = ((at / per_part(part)) as usize, (at % per_part(part)) as usize);
    long(page, number * part + PAGE_HEAD + at * ENTRY + 8).unwrap_or(0)
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
            number in 0..1000_u32, mark: u64, large: bool, whole_pages: bool, seed: u64, at: usize, bit in 0..8_u32,
        ) {
            let block_size = if large { BlockSize::B4096 } else { BlockSize::B512 };
            let plan = Plan { line_shift: 15, slots: 8, whole_pages };
            let mut page = vec![0; block_size.bytes() as usize];
            let (part, count) = (plan.part(page.len()), plan.per_page(block_size));
            let entry = |slot: u32| Entry { line: u64::from(slot) + 1, dirty: seed ^ u64::from(slot), valid: !seed };
            encode_page(&mut page, part, number, mark, entry);
            let first = number * count;
            let read: Vec<_> = decode_page(&page, part, number, mark).unwrap().collect();
            let written: Vec<_> = (first..first + count).map(entry).collect();
            prop_assert_eq!(&read, &written);
            for at in [3, count - 1] {
                prop_assert_eq!(dirty_at(&page, part, at), written[at as usize].dirty);
            }
            prop_assert!(decode_page(&page, part, number + 1, mark).is_none());
            prop_assert!(decode_page(&page, part, number, !mark).is_none());
            let len = page.len();
            page[at % len] ^= 1 << bit;
            prop_assert!(decode_page(&page, part, number, mark).is_none());
        }
    }

    #[test]
    fn a_page_of_nothing_is_zeroes() {
        let mut page = vec![7; 512];
        encode_page(&mut page, 512, 5, 9, |_| Entry::default());
        assert!(page.iter().all(|byte| *byte == 0));
        assert_eq!(decode_page(&page, 512, 1, 2).unwrap().filter(|entry| entry.line != 0).count(), 0);
    }

    #[test]
    fn a_page_of_which_power_tore_the_parts_has_old_and_new_ones() {
        let page = |line: u64| {
            let mut page = vec![0; 4096];
            encode_page(&mut page, PART, 7, 9, |_| Entry { line, dirty: line, valid: line });
            page
        };
        let torn = [&page(1)[..3 * PART], &page(2)[3 * PART..]].concat();
        let lines: Vec<_> = decode_page(&torn, PART, 7, 9).unwrap().map(|entry| entry.line).collect();
        assert_eq!(lines, [vec![1; 60], vec![2; 100]].concat());
    }

    #[test]
    fn the_cache_of_a_program_before_this_one_is_read_as_it_is() {
        let plan = Plan { whole_pages: true, ..Plan::for_leg(1 << 24, 15).unwrap() };
        let label = String::new();
        let (block_size, state) = (BlockSize::B4096, State::InForce);
        let old = Superblock { id: [3; 16], bytes: 1 << 30, block_size, plan, state, may_be_dirty: true, label };
        assert_eq!((old.region().version, Superblock::decode(&old.encode(), 1 << 24)), (1, Ok(old.clone())));
        let new = Superblock { plan: Plan { whole_pages: false, ..plan }, ..old.clone() };
        assert_eq!((new.region().version, Superblock::decode(&new.encode(), 1 << 24)), (2, Ok(new)));
        // Of one sector it is the same.
        let small = Superblock { block_size: BlockSize::B512, ..old };
        assert_eq!(small.region().version, 1);
        assert!(!Superblock::decode(&small.encode(), 1 << 24).unwrap().plan.whole_pages);
    }

    #[test]
    fn a_leg_may_be_too_small() {
        assert_eq!(Plan::for_leg(40 << 10, 12), None);
        assert_eq!(Plan::for_leg(0, 15), None);
        let plan = Plan::for_leg(64 << 10, 12).unwrap();
        assert!(plan.slots >= 8 && plan.end() <= 64 << 10, "{plan:?}");
    }
}
