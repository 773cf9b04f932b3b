//! Pages of the tree and of the log, and the codes by which they are known.

use millrace_cipher::{NONCE_BYTES, Sealer, TAG_BYTES};

use super::layout::{FAN, PAGE};

const HEAD: usize = 64;
const TREE: &[u8; 8] = b"MILLTREE";
const LOG: &[u8; 8] = b"MILLSLOG";
/// Bytes of a record.
pub(super) const RECORD: usize = 8 + TAG_BYTES;
const CHANGE: usize = 8 + 2 * RECORD;
/// Changes that a page of the log has room for.
pub(super) const CHANGES: usize = (PAGE - HEAD) / CHANGE;

const _: () = assert!(HEAD + FAN as usize * RECORD == PAGE && HEAD + CHANGES * CHANGE == PAGE);

/// In a version: which of two keys it is of. Each re-keying turns it over.
pub(super) const TURNED: u64 = 1 << 60;

/// Identifies a volume.
pub(super) type Uuid = [u8; 16];

/// What is known of a block, or of a page of the level below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Counts the changes of a block; of a page, those that were saved, and 0 is none. With [`TURNED`].
    pub(super) version: u64,
    /// The block's tag, or the page's code.
    pub(super) tag: [u8; TAG_BYTES],
}

impl Record {
    /// Of what was never written.
    pub(super) const FRESH: Self = Self { version: 0, tag: [0; TAG_BYTES] };
    /// Of what cannot be known any more: no block or page has this tag.
    pub(super) const LOST: Self = Self { version: 0, tag: [0xff; TAG_BYTES] };

    /// Whether there is a block that was sealed, under whatever key.
    pub(super) fn is_sealed(&self) -> bool {
        !self.is_zero() && self.tag != Self::LOST.tag
    }

    /// Whether the block is zeroes: those have no tag.
    pub(super) fn is_zero(&self) -> bool {
        self.tag == [0; TAG_BYTES]
    }

    /// This record's successor, for a block of zeroes.
    pub(super) fn zeroed(&self) -> Self {
        Self { version: self.version + 1, ..Self::FRESH }
    }

    fn put(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&self.version.to_le_bytes());
        out[8..RECORD].copy_from_slice(&self.tag);
    }

    /// # Panics
    /// When there are fewer bytes than a record has.
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self { version: u64::from_le_bytes(array(bytes, 0)), tag: array(bytes, 8) }
    }

    pub(super) fn bytes(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        self.put(&mut bytes);
        bytes
    }
}

/// A block that is about to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) lba: u64,
    pub(super) old: Record,
    pub(super) new: Record,
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the length is this")
}

/// The nonce of a code: what kind of thing, and which one.
fn nonce(kind: u8, number: u64) -> [u8; NONCE_BYTES] {
    let mut nonce = [0; NONCE_BYTES];
    nonce[0] = kind;
    nonce[4..].copy_from_slice(&number.to_le_bytes());
    nonce
}

/// The nonce of a block's cipher, and what it is bound to besides.
pub(super) fn binding(uuid: &Uuid, lba: u64, version: u64) -> ([u8; NONCE_BYTES], [u8; 32]) {
    let (lba, version) = (lba.to_le_bytes(), version.to_le_bytes());
    let (mut nonce, mut extra) = ([0; NONCE_BYTES], [0; 32]);
    nonce[..6].copy_from_slice(&lba[..6]);
    nonce[6..].copy_from_slice(&version[..6]);
    extra[..16].copy_from_slice(uuid);
    extra[16..24].copy_from_slice(&lba);
    extra[24..].copy_from_slice(&version);
    (nonce, extra)
}

/// The code of the header's content.
pub(super) fn root_code(sealer: &Sealer, generation: u64, content: &[u8]) -> [u8; TAG_BYTES] {
    sealer.code(&nonce(0xff, generation), content)
}

/// Whether the header's content has this code.
pub(super) fn is_root(sealer: &Sealer, generation: u64, content: &[u8], code: &[u8; TAG_BYTES]) -> bool {
    sealer.is_code(&nonce(0xff, generation), content, code)
}

/// Which page of the tree it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) level: usize,
    pub(super) number: u64,
}

/// A page of the tree, and its code.
pub(super) fn encode_tree(
    sealer: &Sealer,
    uuid: &Uuid,
    place: Place,
    sequence: u64,
    record: impl Fn(usize) -> Record,
) -> ([u8; PAGE], [u8; TAG_BYTES]) {
    let mut page = [0; PAGE];
    page[..8].copy_from_slice(TREE);
    page[8..12].copy_from_slice(&(place.level as u32).to_le_bytes());
    page[16..32].copy_from_slice(uuid);
    page[32..40].copy_from_slice(&place.number.to_le_bytes());
    page[40..48].copy_from_slice(&sequence.to_le_bytes());
    for (at, out) in page[HEAD..].chunks_exact_mut(RECORD).enumerate() {
        record(at).put(out);
    }
    let code = sealer.code(&nonce(place.level as u8, place.number), &page);
    (page, code)
}

/// The records of a page of the tree, if it is the one that this record says. (The code covers the page's head, which says which
/// page of which volume it is; the nonce says so, too.)
pub(super) fn decode_tree<'a>(
    sealer: &Sealer,
    place: Place,
    known: &Record,
    page: &'a [u8],
) -> Option<impl Iterator<Item = Record> + 'a> {
    let good = page.len() == PAGE
        && sealer.is_code(&nonce(place.level as u8, place.number), page, &known.tag)
        && array(page, 40) == known.version.to_le_bytes();
    good.then(|| page[HEAD..].chunks_exact(RECORD).map(Record::of))
}

/// A page of the log: its code is in it.
pub(super) fn encode_log(sealer: &Sealer, uuid: &Uuid, (epoch, number): (u64, u64), changes: &[Change]) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    page[..8].copy_from_slice(LOG);
    page[8..12].copy_from_slice(&(changes.len() as u32).to_le_bytes());
    page[12..16].copy_from_slice(&(number as u32).to_le_bytes());
    page[16..32].copy_from_slice(uuid);
    page[32..40].copy_from_slice(&epoch.to_le_bytes());
    for (out, change) in page[HEAD..].chunks_exact_mut(CHANGE).zip(changes) {
        out[..8].copy_from_slice(&change.lba.to_le_bytes());
        change.old.put(&mut out[8..]);
        change.new.put(&mut out[8 + RECORD..]);
    }
    let code = sealer.code(&nonce(0x80 | (number % 128) as u8, epoch), &page);
    page[40..56].copy_from_slice(&code);
    page
}

/// The changes of a page of the log, if it is this one.
pub(super) fn decode_log(sealer: &Sealer, uuid: &Uuid, (epoch, number): (u64, u64), page: &[u8]) -> Option<Vec<Change>> {
    let mut plain: [u8; PAGE] = page.try_into().ok()?;
    if plain[..8] != LOG[..] || plain[16..32] != uuid[..] || array(&plain, 32) != epoch.to_le_bytes() {
        return None;
    }
    let code: [u8; TAG_BYTES] = array(&plain, 40);
    plain[40..56].fill(0);
    let count = u32::from_le_bytes(array(&plain, 8)) as usize;
    let good = sealer.is_code(&nonce(0x80 | (number % 128) as u8, epoch), &plain, &code)
        && array(&plain, 12) == (number as u32).to_le_bytes()
        && count <= CHANGES;
    let change = |bytes: &[u8]| Change {
        lba: u64::from_le_bytes(array(bytes, 0)),
        old: Record::of(&bytes[8..]),
        new: Record::of(&bytes[8 + RECORD..]),
    };
    good.then(|| plain[HEAD..].chunks_exact(CHANGE).take(count).map(change).collect())
}

#[cfg(test)]
mod tests {
    use millrace_cipher::Secret;
    use proptest::prelude::*;

    use super::*;

    fn record(seed: u64) -> Record {
        Record { version: seed, tag: u128::from(seed).wrapping_mul(0x1234_5678_9abc_def1_2345_6789).to_le_bytes() }
    }

    proptest! {
        #[test]
        fn a_page_is_read_where_it_belongs_and_as_it_was_written(
            uuid: [u8; 16], number in 0..1_u64 << 40, level in 0..3_usize, sequence: u64, seed: u64, at in 0..PAGE * 8,
        ) {
            let sealer = Sealer::new(&Secret::generate().unwrap()).unwrap();
            let place = Place { level, number };
            let records = |at: usize| record(seed ^ at as u64);
            let (mut page, tag) = encode_tree(&sealer, &uuid, place, sequence, records);
            let known = Record { version: sequence, tag };
            let read = |place, known: &Record, page: &[u8]| decode_tree(&sealer, place, known, page).map(Iterator::collect::<Vec<_>>);
            prop_assert_eq!(read(place, &known, &page), Some((0..FAN as usize).map(records).collect()));
            let others = [
                (Place { number: number + 1, ..place }, known),
                (Place { level: (level + 1) % 3, ..place }, known),
                (place, Record { version: sequence ^ 1, ..known }),
            ];
            prop_assert!(others.iter().all(|(place, known)| read(*place, known, &page).is_none()));
            page[at / 8] ^= 1 << (at % 8);
            prop_assert!(read(place, &known, &page).is_none());
            prop_assert!(read(place, &known, &page[..at / 8]).is_none());
        }

        #[test]
        fn a_page_of_the_log_is_read_as_it_was_written(
            uuid: [u8; 16], epoch: u64, number in 0..124_u64, count in 0..=CHANGES, seed: u64, at in 0..PAGE * 8,
        ) {
            let sealer = Sealer::new(&Secret::generate().unwrap()).unwrap();
            let change = |lba: u64| Change { lba, old: record(seed ^ lba), new: record(!seed ^ lba) };
            let changes: Vec<_> = (0..count as u64).map(change).collect();
            let mut page = encode_log(&sealer, &uuid, (epoch, number), &changes);
            let read = |which, page: &[u8]| decode_log(&sealer, &uuid, which, page);
            prop_assert_eq!(read((epoch, number), &page), Some(changes));
            prop_assert!(read((epoch ^ 1, number), &page).is_none());
            prop_assert!(read((epoch, number ^ 1), &page).is_none());
            page[at / 8] ^= 1 << (at % 8);
            prop_assert!(read((epoch, number), &page).is_none());
            prop_assert!(read((epoch, number), &page[..at / 8]).is_none());
        }
    }
}
