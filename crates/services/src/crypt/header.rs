//! What crypt keeps on its leg: docs/formats/crypt.md.
//!
//! ```text
//!   0        16 KiB          80 KiB          144 KiB   256 KiB
//!   │ header │ journal slot 0 │ journal slot 1 │ free │ block 0 of the volume …
//! ```

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use millrace_block::{BlockSize, Volume};
use millrace_cipher::{CipherError, NONCE_BYTES, Secret, TAG_BYTES, open, random, seal};

use crate::{
    flushes::Flushes,
    legs::Leg,
    record::{Found, Region},
    service::ServiceError,
};

/// Bytes before the volume's first block.
pub(super) const OFFSET: u64 = 256 << 10;
/// Where the header is.
pub(super) const REGION: Region = Region { magic: *b"MILLCRYP", version: 1, offset: 0, len: 16 << 10 };
/// Where the first slot of the journal is.
pub(super) const JOURNAL: u64 = 16 << 10;
/// Bytes of a slot: a page that says what it is, and blocks.
pub(super) const SLOT: usize = 64 << 10;
/// Bytes of that page.
pub(super) const PAGE: usize = 4096;
/// Bytes that are re-enciphered at once.
pub(super) const CHUNK: usize = SLOT - PAGE;

const JOURNAL_MAGIC: &[u8; 8] = b"MILLRKEY";
/// Bytes of a sealed volume key.
const SEALED: usize = NONCE_BYTES + 64 + TAG_BYTES;
/// Bytes of the header's content.
const CONTENT: usize = 40 + 16 + 2 * SEALED;
/// What is under a key is AES-256-XTS, a data unit per block.
const CIPHER_XTS: u32 = 1;
const STATE_PLAIN: u32 = 0;
const STATE_REKEYING: u32 = 1;

/// A volume key as it lies on the medium.
type Sealed = [u8; SEALED];

/// A re-keying under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rekeying {
    /// Tells its journal from those of others.
    pub(super) id: [u8; 16],
    pub(super) next: Sealed,
}

/// The header's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Tells this volume from others.
    pub(super) uuid: [u8; 16],
    pub(super) block_size: BlockSize,
    pub(super) current: Sealed,
    pub(super) rekeying: Option<Rekeying>,
}

fn sealed(key: &Secret<32>, extra: &[u8], secret: &Secret<64>) -> Result<Sealed, CipherError> {
    let sealed = seal(key, extra, secret)?;
    Ok(sealed.try_into().expect("a sealed key has a fixed length"))
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

impl Header {
    /// A header with a new key.
    pub(super) fn create(
        key: &Secret<32>,
        uuid: [u8; 16],
        block_size: BlockSize,
    ) -> Result<(Self, Secret<64>), CipherError> {
        let volume_key = Secret::generate()?;
        let mut header = Self { uuid, block_size, current: [0; SEALED], rekeying: None };
        header.current = sealed(key, &header.extra(), &volume_key)?;
        Ok((header, volume_key))
    }

    /// What a sealed key is bound to: it opens in this header only.
    fn extra(&self) -> Vec<u8> {
        let numbers = [CIPHER_XTS, self.block_size.bytes()].map(u32::to_le_bytes);
        [&b"millrace crypt"[..], &self.uuid, &numbers[0], &numbers[1], &OFFSET.to_le_bytes()].concat()
    }

    /// The key that is (also) in force.
    pub(super) fn open_current(&self, key: &Secret<32>) -> Result<Secret<64>, CipherError> {
        open(key, &self.extra(), &self.current)
    }

    /// The key that a re-keying brings into force.
    pub(super) fn open_next(&self, key: &Secret<32>, rekeying: &Rekeying) -> Result<Secret<64>, CipherError> {
        open(key, &self.extra(), &rekeying.next)
    }

    /// This header with a re-keying begun.
    pub(super) fn begin_rekeying(&self, key: &Secret<32>) -> Result<(Self, Secret<64>), CipherError> {
        let next_key = Secret::generate()?;
        let rekeying = Rekeying { id: random()?, next: sealed(key, &self.extra(), &next_key)? };
        Ok((Self { rekeying: Some(rekeying), ..self.clone() }, next_key))
    }

    /// This header after its re-keying.
    pub(super) fn end_rekeying(&self) -> Self {
        let current = self.rekeying.as_ref().map_or(self.current, |rekeying| rekeying.next);
        Self { current, rekeying: None, ..self.clone() }
    }

    /// This header with its keys sealed under another key.
    pub(super) fn reseal(
        &self,
        key: &Secret<32>,
        current: &Secret<64>,
        next: Option<&Secret<64>>,
    ) -> Result<Self, CipherError> {
        let extra = self.extra();
        let rekeying = match (&self.rekeying, next) {
            (Some(rekeying), Some(next)) => Some(Rekeying { id: rekeying.id, next: sealed(key, &extra, next)? }),
            _ => None,
        };
        Ok(Self { current: sealed(key, &extra, current)?, rekeying, ..self.clone() })
    }

    fn encode(&self) -> Vec<u8> {
        let (state, id, next) = match &self.rekeying {
            Some(Rekeying { id, next }) => (STATE_REKEYING, *id, *next),
            None => (STATE_PLAIN, [0; 16], [0; SEALED]),
        };
        let mut out = self.uuid.to_vec();
        for number in [CIPHER_XTS, self.block_size.bytes(), state, 0] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&OFFSET.to_le_bytes());
        out.extend_from_slice(&id);
        out.extend_from_slice(&self.current);
        out.extend_from_slice(&next);
        assert_eq!(out.len(), CONTENT, "the header has a fixed length");
        out
    }

    /// Whether both are the same but for what their keys are sealed under.
    pub(super) fn is_alike(&self, other: &Self) -> bool {
        let id = |header: &Self| header.rekeying.as_ref().map(|rekeying| rekeying.id);
        (self.uuid, self.block_size, id(self)) == (other.uuid, other.block_size, id(other))
    }

    /// What the content says, or what is wrong with it.
    pub(super) fn decode(content: &[u8]) -> Result<Self, String> {
        let numbers = [16, 20, 24].map(|at| word(content, at));
        let ([Some(cipher), Some(block_size), Some(state)], CONTENT) = (numbers, content.len()) else {
            return Err(format!("its header has {} bytes and not {CONTENT}", content.len()));
        };
        if cipher != CIPHER_XTS {
            return Err(format!("it has a cipher of number {cipher}, which this program does not know"));
        }
        let block_size = BlockSize::from_bytes(block_size).ok_or_else(|| format!("it has blocks of {block_size} bytes"))?;
        let fields =
            (array(content, 0), long(content, 32), array(content, 40), array(content, 56), array(content, 56 + SEALED));
        let (Some(uuid), Some(offset), Some(id), Some(current), Some(next)) = fields else {
            return Err("its header is too short".to_owned());
        };
        if offset != OFFSET {
            return Err(format!("its first block is at byte {offset}, which this program does not know"));
        }
        let rekeying = match state {
            STATE_PLAIN => None,
            STATE_REKEYING => Some(Rekeying { id, next }),
            _ => return Err(format!("it is in a state of number {state}, which this program does not know")),
        };
        Ok(Self { uuid, block_size, current, rekeying })
    }

    /// Reads the header; `None` where there is none.
    pub(super) fn load(leg: &Arc<impl Volume + ?Sized + 'static>) -> Result<Option<(Self, Found)>, ServiceError> {
        let Some(found) = REGION.load(leg)? else { return Ok(None) };
        let header =
            Self::decode(&found.content).map_err(|what| ServiceError::Content { leg: leg.name().to_owned(), what })?;
        Ok(Some((header, found)))
    }

    /// Replaces both copies of the header, so that nothing of the one before is left. `generation` says which one is durable, whatever
    /// happens: who goes on from there overwrites no copy that may be the only good one.
    pub(super) fn store(&self, leg: &Leg, flushes: &Flushes, generation: &mut u64) -> Result<(), ServiceError> {
        self.store_once(leg, flushes, generation)?;
        self.store_once(leg, flushes, generation)
    }

    /// Replaces the older copy.
    pub(super) fn store_once(&self, leg: &Leg, flushes: &Flushes, generation: &mut u64) -> Result<(), ServiceError> {
        flushes.store(leg, &REGION, *generation + 1, &self.encode())?;
        *generation += 1;
        Ok(())
    }

    /// [`Self::store`] within a task.
    pub(super) async fn store_in(
        &self,
        cx: millrace_block::TaskContext<'_>,
        leg: &dyn Volume,
        flushes: &Flushes,
        generation: &mut u64,
    ) -> Result<(), millrace_block::BlockError> {
        let content = self.encode();
        for _ in 0..2 {
            REGION.write_in(cx, leg, *generation + 1, &content).await?;
            flushes.flush_alone(cx, leg).await?;
            *generation += 1;
        }
        Ok(())
    }
}

/// What a slot of the journal holds: some blocks as they were before they were re-enciphered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JournalPage {
    pub(super) id: [u8; 16],
    /// First block.
    pub(super) start: u64,
    /// Bytes that follow the page.
    pub(super) len: u32,
    /// CRC-32C of these.
    pub(super) data_crc: u32,
}

pub(super) fn crc(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

impl JournalPage {
    pub(super) fn encode(&self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        let head = [&JOURNAL_MAGIC[..], &1_u32.to_le_bytes(), &self.len.to_le_bytes(), &self.id, &self.start.to_le_bytes()];
        let head = [&head.concat()[..], &self.data_crc.to_le_bytes()].concat();
        page[..head.len()].copy_from_slice(&head);
        page[head.len()..head.len() + 4].copy_from_slice(&crc(&head).to_le_bytes());
        page
    }

    /// The page and its blocks, if the slot holds a whole record of this re-keying.
    pub(super) fn decode<'a>(slot: &'a [u8], id: &[u8; 16]) -> Option<(Self, &'a [u8])> {
        let page = Self { id: array(slot, 16)?, start: long(slot, 32)?, len: word(slot, 12)?, data_crc: word(slot, 40)? };
        let data = slot.get(PAGE..PAGE.checked_add(page.len as usize)?)?;
        let good = slot.get(..8)? == JOURNAL_MAGIC
            && word(slot, 8)? == 1
            && crc(slot.get(..44)?) == word(slot, 44)?
            && page.id == *id
            && page.data_crc == crc(data);
        good.then_some((page, data))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_header_reads_back_and_nonsense_is_refused(uuid: [u8; 16], small: bool, rekeying: bool, noise: [u8; 8], at in 0_usize..CONTENT) {
            let key = Secret::generate().unwrap();
            let block_size = if small { BlockSize::B512 } else { BlockSize::B4096 };
            let (mut header, _) = Header::create(&key, uuid, block_size).unwrap();
            if rekeying {
                header = header.begin_rekeying(&key).unwrap().0;
            }
            let content = header.encode();
            prop_assert_eq!(Header::decode(&content), Ok(header.clone()));
            header.open_current(&key).unwrap();
            // Whatever stands there: no panic, and no key is opened that was not sealed there.
            let mut spoiled = content.clone();
            for (to, from) in spoiled[at..].iter_mut().zip(noise) {
                *to ^= from;
            }
            if let Ok(other) = Header::decode(&spoiled)
                && (other.uuid != header.uuid || other.current != header.current || other.block_size != block_size)
            {
                prop_assert!(other.open_current(&key).is_err());
            }
            prop_assert!(Header::decode(&content[..at]).is_err());
        }

        #[test]
        fn a_journal_page_reads_back_and_a_torn_slot_does_not(id: [u8; 16], start: u64, len in 0_usize..CHUNK, at: usize) {
            let data: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
            let page = JournalPage { id, start, len: len as u32, data_crc: crc(&data) };
            let mut slot = [page.encode().to_vec(), data.clone()].concat();
            slot.resize(SLOT, 0);
            let (found, blocks) = JournalPage::decode(&slot, &id).unwrap();
            prop_assert_eq!((found, blocks), (page, &data[..]));
            prop_assert!(JournalPage::decode(&slot, &id.map(|byte| !byte)).is_none());
            slot[at % (48 + len)] ^= 0x10;
            let relevant = at % (48 + len) < 48;
            prop_assert!(!relevant || JournalPage::decode(&slot, &id).is_none());
        }
    }
}
