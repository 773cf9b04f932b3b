//! What metadata keeps on its leg: docs/formats/metadata.md.

use crc_fast::{CrcAlgorithm, checksum};
use millrace_block::{BlockSize, NO_METADATA};

use crate::{legs::is_zero, record::Region};

/// Bytes before the first group.
pub(super) const OFFSET: u64 = 64 << 10;
/// Where the header is.
pub(super) const REGION: Region = Region { magic: *b"MILLMETA", version: 1, offset: 0, len: 16 << 10 };
/// Bytes of a page.
pub(super) const PAGE: usize = 4096;
/// Bytes of a group's two pages.
pub(super) const PAGES: u64 = 2 * PAGE as u64;
/// Blocks of a group.
pub(super) const BLOCKS: u64 = 160;

const MAGIC: &[u8; 8] = b"MILLTAGS";
/// Where the kinds of the entries are.
const KINDS: usize = 64;
/// Where the entries are.
const ENTRIES: usize = KINDS + BLOCKS as usize;
/// Bytes of an entry: two candidates.
const ENTRY: usize = 24;

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

/// The checksum of a block's data.
pub(super) fn checksum_of(data: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, data) as u32
}

/// What a block's metadata may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Candidate {
    /// These, if its data have this checksum.
    Value { tag: u64, checksum: u32 },
    /// None, whatever its data are.
    Absent,
    /// They are lost.
    Lost,
}

/// No metadata.
pub(super) const NO_TAG: u64 = u64::from_le_bytes(NO_METADATA);

impl Candidate {
    /// As a page has it: its kind from 1 on, the metadata, the checksum.
    pub(super) fn parts(self) -> (u8, u64, u32) {
        match self {
            Self::Value { tag, checksum } => (1, tag, checksum),
            Self::Absent => (2, NO_TAG, 0),
            Self::Lost => (3, NO_TAG, 0),
        }
    }

    /// Of [`Self::parts`]; `None`: there is none.
    pub(super) fn of(kind: u8, tag: u64, checksum: u32) -> Option<Self> {
        match kind & 3 {
            0 => None,
            1 => Some(Self::Value { tag, checksum }),
            2 => Some(Self::Absent),
            _ => Some(Self::Lost),
        }
    }

    /// Whether these are the metadata of data with this checksum.
    pub(super) fn belongs(self, data: u32) -> bool {
        match self {
            Self::Value { checksum, .. } => checksum == data,
            Self::Absent | Self::Lost => true,
        }
    }
}

/// What is known of a block: its newest metadata, and those that it has if the newest data never came to the leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) newest: Candidate,
    pub(super) other: Option<Candidate>,
}

impl Entry {
    pub(super) const FRESH: Self = Self { newest: Candidate::Absent, other: None };
    pub(super) const LOST: Self = Self { newest: Candidate::Lost, other: None };
}

/// A group's entries, as of some moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Page {
    /// Counts the pages of this group; its lowest bit says in which place it lies.
    pub(super) sequence: u64,
    pub(super) entries: Box<[Entry]>,
}

impl Page {
    /// What it says where its successor may be there and cannot be read: that one may have given metadata to blocks that have none by this one.
    fn succeeded_unread(mut self) -> Self {
        let known = |said: Candidate| if said == Candidate::Absent { Candidate::Lost } else { said };
        self.entries.iter_mut().for_each(|Entry { newest, other }| {
            (*newest, *other) = (known(*newest), other.map(known));
        });
        self
    }
}

/// One of a group's two places for a page.
enum Copy {
    Empty,
    Good(Page),
    /// Not as it was written: it did not come to its end, or has rotted.
    Damaged,
    /// Nobody knows. A crash leaves none such.
    Unreadable,
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
}

/// The page of a group, for a volume of this identifier. `entry` gives its entries.
pub(super) fn encode(uuid: &[u8; 16], group: u64, sequence: u64, entry: impl Fn(u64) -> Entry) -> [u8; PAGE] {
    let mut out = [0; PAGE];
    out[..8].copy_from_slice(MAGIC);
    out[16..32].copy_from_slice(uuid);
    out[32..40].copy_from_slice(&group.to_le_bytes());
    out[40..48].copy_from_slice(&sequence.to_le_bytes());
    for at in 0..BLOCKS {
        let Entry { newest, other } = entry(at);
        let (kind, tag, checksum) = newest.parts();
        let (other_kind, other_tag, other_checksum) = other.map_or((0, 0, 0), Candidate::parts);
        out[KINDS + at as usize] = kind | other_kind << 2;
        let place = &mut out[ENTRIES + at as usize * ENTRY..][..ENTRY];
        place[..8].copy_from_slice(&tag.to_le_bytes());
        place[8..16].copy_from_slice(&other_tag.to_le_bytes());
        place[16..20].copy_from_slice(&checksum.to_le_bytes());
        place[20..].copy_from_slice(&other_checksum.to_le_bytes());
    }
    let crc = checksum_of(&out);
    out[12..16].copy_from_slice(&crc.to_le_bytes());
    out
}

/// What stands in one of the places.
fn decode(bytes: &[u8], uuid: &[u8; 16], group: u64) -> Copy {
    if is_zero(bytes) {
        return Copy::Empty;
    }
    let mut plain = bytes.to_vec();
    if let Some(crc) = plain.get_mut(12..16) {
        crc.fill(0);
    }
    let good = bytes.len() == PAGE
        && bytes.starts_with(MAGIC)
        && array(bytes, 12) == checksum_of(&plain).to_le_bytes()
        && array(bytes, 16) == *uuid
        && array(bytes, 32) == group.to_le_bytes();
    let entry = |at: usize| {
        let (kinds, place) = (bytes[KINDS + at], ENTRIES + at * ENTRY);
        let number = |at: usize| u32::from_le_bytes(array(bytes, at));
        let newest = Candidate::of(kinds, u64::from_le_bytes(array(bytes, place)), number(place + 16))?;
        let other = Candidate::of(kinds >> 2, u64::from_le_bytes(array(bytes, place + 8)), number(place + 20));
        Some(Entry { newest, other })
    };
    let entries = || (0..BLOCKS as usize).map(entry).collect::<Option<Box<[Entry]>>>();
    match good.then(entries).flatten() {
        Some(entries) => Copy::Good(Page { sequence: u64::from_le_bytes(array(bytes, 40)), entries }),
        None => Copy::Damaged,
    }
}

/// What a group's pages say.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// No block of the group ever had metadata.
    Fresh,
    Pages {
        /// The one that counts.
        newer: Page,
        /// The one before it, if it is there.
        older: Option<Page>,
        /// The other one is damaged, or cannot be read.
        alone: bool,
        /// It cannot be read.
        unread: bool,
    },
    /// Both pages are damaged.
    Lost,
    /// What metadata there are, if any, is in a page that cannot be read.
    Unread {
        /// The group's next page comes after this one, and so in that one's place: it may have any sequence, and would count again.
        sequence: u64,
    },
}

/// Which page counts, of both places; `None`: it cannot be read.
pub(super) fn choose(places: [Option<&[u8]>; 2], uuid: &[u8; 16], group: u64) -> Found {
    let mut found = places.map(|bytes| bytes.map_or(Copy::Unreadable, |bytes| decode(bytes, uuid, group)));
    for (place, copy) in (0..).zip(&mut found) {
        if matches!(copy, Copy::Good(page) if page.sequence % 2 != place) {
            // In the other one's place.
            *copy = Copy::Damaged;
        }
    }
    match found {
        [Copy::Good(one), Copy::Good(other)] => {
            let (newer, older) = if one.sequence > other.sequence { (one, other) } else { (other, one) };
            Found::Pages { newer, older: Some(older), alone: false, unread: false }
        }
        [Copy::Good(newer), Copy::Empty] | [Copy::Empty, Copy::Good(newer)] => {
            Found::Pages { newer, older: None, alone: false, unread: false }
        }
        [Copy::Good(newer), Copy::Damaged] | [Copy::Damaged, Copy::Good(newer)] => {
            Found::Pages { newer, older: None, alone: true, unread: false }
        }
        [Copy::Good(newer), Copy::Unreadable] | [Copy::Unreadable, Copy::Good(newer)] => {
            Found::Pages { newer: newer.succeeded_unread(), older: None, alone: true, unread: true }
        }
        // The first page of all, which comes to the second place, did not come to its end, and no data before it.
        [Copy::Empty | Copy::Damaged | Copy::Unreadable, Copy::Empty] | [Copy::Empty, Copy::Damaged] => Found::Fresh,
        [Copy::Damaged, Copy::Damaged] => Found::Lost,
        [_, Copy::Unreadable] => Found::Unread { sequence: 0 },
        [Copy::Unreadable, Copy::Damaged] => Found::Unread { sequence: 1 },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(seed: u64) -> Entry {
        let candidate = |seed: u64| Candidate::of((seed >> 3) as u8, seed, seed as u32);
        let plain = |candidate| match candidate {
            Some(Candidate::Absent | Candidate::Lost) | None => Candidate::Absent,
            Some(value) => value,
        };
        Entry { newest: plain(candidate(seed)), other: candidate(seed.rotate_left(17)) }
    }

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
            prop_assert!(start >= group_start(lba / BLOCKS, block_size) + PAGES && start % u64::from(block_size.bytes()) == 0);
        }

        #[test]
        fn a_page_reads_back_and_a_damaged_one_does_not(
            uuid: [u8; 16], group: u64, sequence in 0_u64..u64::MAX / 2, seed: u64, at in 0..PAGE, bit in 0_u8..8,
        ) {
            let seed = seed | 1;
            let entry = |at: u64| entry(at.wrapping_mul(seed).rotate_left(at as u32));
            let (sequence, other) = (sequence & !1, sequence | 1);
            let first = encode(&uuid, group, sequence, entry);
            let second = encode(&uuid, group, other, |_| Entry::FRESH);
            let page = Page { sequence, entries: (0..BLOCKS).map(entry).collect() };
            let empty = [0; PAGE];
            let both = |one: &[u8], other: &[u8], group| choose([Some(one), Some(other)], &uuid, group);
            let alone = Found::Pages { newer: page.clone(), older: None, alone: false, unread: false };
            prop_assert_eq!(both(&first, &empty, group), alone);
            prop_assert_eq!(both(&empty, &first, group), Found::Fresh, "in the other's place");
            prop_assert_eq!(both(&first, &second, group ^ 1), Found::Lost, "another group's");
            let counts = |found: &Found| matches!(found, Found::Pages { newer, older: Some(_), .. } if newer.sequence == other);
            prop_assert!(counts(&both(&first, &second, group)));
            let mut damaged = second;
            damaged[at] ^= 1 << bit;
            prop_assert_eq!(both(&first, &damaged, group), Found::Pages { newer: page, older: None, alone: true, unread: false });
            let mut both_damaged = first;
            both_damaged[at] ^= 1 << bit;
            prop_assert_eq!(both(&both_damaged, &damaged, group), Found::Lost);
        }
    }

    #[test]
    fn a_page_that_cannot_be_read_may_have_said_anything() {
        let (uuid, empty) = ([7; 16], [0; PAGE]);
        let value = Candidate::Value { tag: 5, checksum: 6 };
        let entry = |at| if at == 0 { Entry { newest: value, other: Some(Candidate::Absent) } } else { Entry::FRESH };
        let [second, first] = [1, 2].map(|sequence| encode(&uuid, 3, sequence, entry));
        let read = |first: Option<&[u8]>, second: Option<&[u8]>| choose([first, second], &uuid, 3);
        for (found, sequence) in [(read(None, Some(&second)), 1), (read(Some(&first), None), 2)] {
            let Found::Pages { newer, older: None, alone: true, unread: true } = found else { panic!("{found:?}") };
            assert_eq!(newer.sequence, sequence);
            assert_eq!(newer.entries[0], Entry { newest: value, other: Some(Candidate::Lost) });
            assert!(newer.entries[1..].iter().all(|entry| *entry == Entry::LOST));
        }
        assert_eq!(read(Some(&empty), None), Found::Unread { sequence: 0 });
        assert_eq!(read(None, Some(&empty)), Found::Fresh, "the first place is taken after the second");
        let damaged = [1; PAGE];
        // What is written next takes its place.
        let found = [read(Some(&damaged), None), read(None, Some(&damaged))];
        assert_eq!(found, [Found::Unread { sequence: 0 }, Found::Unread { sequence: 1 }]);
    }

    #[test]
    fn sizes_beyond_all_legs_are_no_sizes() {
        assert_eq!(leg_bytes(u64::MAX, BlockSize::B512), None);
        assert_eq!(leg_bytes(1 << 60, BlockSize::B4096), None);
        assert_eq!((blocks_in(0, BlockSize::B512), blocks_in(OFFSET + PAGES, BlockSize::B512)), (0, 0));
    }
}
