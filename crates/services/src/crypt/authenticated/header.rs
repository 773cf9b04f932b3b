//! The header: the sealed key, and the root of the tree.

use std::sync::Arc;

use millrace_block::{BlockError, BlockSize, TaskContext, Volume};
use millrace_cipher::{CipherError, NONCE_BYTES, Sealer, Secret, TAG_BYTES, open, seal};

use super::{
    layout::{BRANCHES, LOG_PAGES, OFFSET, REGION},
    page::{RECORD, Record, Uuid, is_root, root_code},
};
use crate::{flushes::Flushes, legs::Leg, record::Found, service::ServiceError};

/// AES-256-GCM-SIV, a record per block.
const CIPHER: u32 = 2;
const SEALED: usize = NONCE_BYTES + 64 + TAG_BYTES;
/// Bytes before the root's records.
const FIXED: usize = 168;
/// Where the code is.
const CODE: usize = 152;

const _: () = assert!(FIXED + SEALED + BRANCHES as usize * RECORD <= (REGION.len / 2) as usize - 32);

/// The key bit of what is written.
const TURNED: u32 = 1;
/// Some of what is there has the key before this one.
const REKEYING: u32 = 2;
/// Blocks that were never written may hold what was there before a format. Programs that do not know it refuse the state.
const ERASING: u32 = 4;

/// What is there while the volume is re-keyed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rekeying {
    /// The key before, sealed.
    old: [u8; SEALED],
    /// Blocks before this one have the new key, if no log says otherwise.
    done: u64,
}

/// What the header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) uuid: Uuid,
    pub(super) block_size: BlockSize,
    /// Counts the turns in which the tree was saved.
    pub(super) epoch: u64,
    key: [u8; SEALED],
    /// What is of this key has [`super::page::TURNED`] in its version.
    pub(super) turned: bool,
    rekeying: Option<Rekeying>,
    /// An erasure was begun and has not ended: blocks that were never written need not be zeroes on the leg.
    pub(super) erasing: bool,
    /// The branches' records, up to the last one that is not fresh.
    pub(super) root: Vec<Record>,
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the length is this")
}

impl Header {
    /// A header with a new key and nothing in the tree.
    pub(super) fn create(kek: &Secret<32>, uuid: Uuid, block_size: BlockSize) -> Result<(Self, Secret<64>), CipherError> {
        let key = Secret::generate()?;
        let (rekeying, root) = (None, Vec::new());
        let mut header =
            Self { uuid, block_size, epoch: 0, key: [0; SEALED], turned: false, rekeying, erasing: false, root };
        header.key = header.sealed(kek, &key)?;
        Ok((header, key))
    }

    /// This header with another key, the one of now being the one before.
    pub(super) fn begin_rekeying(&self, kek: &Secret<32>) -> Result<(Self, Secret<64>), CipherError> {
        let key = Secret::generate()?;
        let rekeying = Some(Rekeying { old: self.key, done: 0 });
        Ok((Self { key: self.sealed(kek, &key)?, turned: !self.turned, rekeying, ..self.clone() }, key))
    }

    /// This header without the key before.
    pub(super) fn end_rekeying(&self) -> Self {
        Self { rekeying: None, ..self.clone() }
    }

    /// Whether an erasure is to be completed that was cut off: nothing was written since it began, as far as this says.
    pub(super) fn is_to_be_erased(&self) -> bool {
        self.erasing && self.root.is_empty()
    }

    /// How far re-keying is, if there is one.
    pub(super) fn rekeyed(&self) -> Option<u64> {
        Some(self.rekeying.as_ref()?.done)
    }

    /// What a sealed key is bound to: it opens in this header only.
    fn extra(&self) -> Vec<u8> {
        let numbers = [CIPHER, self.block_size.bytes()].map(u32::to_le_bytes).concat();
        [&b"millrace crypt"[..], &self.uuid, &numbers, &OFFSET.to_le_bytes()].concat()
    }

    fn sealed(&self, kek: &Secret<32>, key: &Secret<64>) -> Result<[u8; SEALED], CipherError> {
        Ok(seal(kek, &self.extra(), key)?.try_into().expect("a sealed key has a fixed length"))
    }

    /// Seals the volume's key, and the one before, under this key-encryption key.
    pub(super) fn reseal(
        &mut self,
        kek: &Secret<32>,
        key: &Secret<64>,
        old: Option<&Secret<64>>,
    ) -> Result<(), CipherError> {
        let old = old.map(|old| self.sealed(kek, old)).transpose()?;
        self.key = self.sealed(kek, key)?;
        if let (Some(rekeying), Some(old)) = (&mut self.rekeying, old) {
            rekeying.old = old;
        }
        Ok(())
    }

    /// The volume's key.
    pub(super) fn open(&self, kek: &Secret<32>) -> Result<Secret<64>, CipherError> {
        open(kek, &self.extra(), &self.key)
    }

    /// The key before, while the volume is re-keyed.
    pub(super) fn open_old(&self, kek: &Secret<32>) -> Result<Option<Secret<64>>, CipherError> {
        self.rekeying.as_ref().map(|rekeying| open(kek, &self.extra(), &rekeying.old)).transpose()
    }

    /// This header with another tree.
    pub(super) fn with_root(&self, epoch: u64, root: Vec<Record>, done: u64) -> Self {
        let rekeying = self.rekeying.as_ref().map(|rekeying| Rekeying { done, ..rekeying.clone() });
        Self { epoch, rekeying, root, ..self.clone() }
    }

    /// Whether both are the same but for what their keys are sealed under.
    pub(super) fn is_alike(&self, other: &Self) -> bool {
        let plain = |header: &Self| {
            let rekeying = header.rekeying.as_ref().map(|rekeying| Rekeying { old: [0; SEALED], ..rekeying.clone() });
            Self { key: [0; SEALED], rekeying, ..header.clone() }
        };
        plain(self) == plain(other)
    }

    fn encode(&self, sealer: &Sealer) -> Vec<u8> {
        let mut out = self.uuid.to_vec();
        for number in [CIPHER, self.block_size.bytes(), LOG_PAGES as u32, self.root.len() as u32] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&OFFSET.to_le_bytes());
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.key);
        let bits = [(TURNED, self.turned), (REKEYING, self.rekeying.is_some()), (ERASING, self.erasing)];
        let state = bits.iter().filter(|(_, is_set)| *is_set).fold(0_u32, |state, (bit, _)| state | *bit);
        out.extend_from_slice(&state.to_le_bytes());
        out.extend_from_slice(&self.rekeyed().unwrap_or(0).to_le_bytes());
        out.resize(FIXED, 0);
        self.rekeying.iter().for_each(|rekeying| out.extend_from_slice(&rekeying.old));
        self.root.iter().for_each(|record| out.extend_from_slice(&record.bytes()));
        let code = root_code(sealer, self.epoch, &out);
        out[CODE..CODE + TAG_BYTES].copy_from_slice(&code);
        out
    }

    /// What the content says, or what is wrong with it. Whether it is what it was is for [`Self::is_whole`].
    pub(super) fn decode(content: &[u8]) -> Result<Self, String> {
        if content.len() < FIXED {
            return Err(format!("its header has {} bytes, fewer than {FIXED}", content.len()));
        }
        let number = |at: usize| u32::from_le_bytes(array(content, at));
        let (cipher, block_size, log, count) = (number(16), number(20), number(24), number(28) as usize);
        if cipher != CIPHER {
            return Err(format!("it has a cipher of number {cipher}, which this program does not know"));
        }
        let block_size = BlockSize::from_bytes(block_size).ok_or_else(|| format!("it has blocks of {block_size} bytes"))?;
        let offset = u64::from_le_bytes(array(content, 32));
        if u64::from(log) != LOG_PAGES || offset != OFFSET {
            return Err("it is laid out in a way that this program does not know".to_owned());
        }
        let state = number(140);
        if state & !(TURNED | REKEYING | ERASING) != 0 {
            return Err(format!("it is in a state of number {state}, which this program does not know"));
        }
        let root = FIXED + if state & REKEYING == 0 { 0 } else { SEALED };
        if count as u64 > BRANCHES || content.len() != root + count * RECORD {
            return Err(format!("its header has {} bytes, which does not fit {count} records", content.len()));
        }
        Ok(Self {
            uuid: array(content, 0),
            block_size,
            epoch: u64::from_le_bytes(array(content, 40)),
            key: array(content, 48),
            turned: state & TURNED != 0,
            rekeying: (root > FIXED)
                .then(|| Rekeying { old: array(content, FIXED), done: u64::from_le_bytes(array(content, 144)) }),
            erasing: state & ERASING != 0,
            root: content[root..].chunks_exact(RECORD).map(Record::of).collect(),
        })
    }

    /// Whether content that was understood is what was written under this key.
    pub(super) fn is_whole(&self, sealer: &Sealer, content: &[u8]) -> bool {
        let mut plain = content.to_vec();
        plain[CODE..CODE + TAG_BYTES].fill(0);
        is_root(sealer, self.epoch, &plain, &array(content, CODE))
    }

    /// What tells a header that was understood from all others, for the operator.
    pub(super) fn name(&self, content: &[u8]) -> String {
        let code: [u8; 4] = array(content, CODE);
        format!("{}-{:08x}", self.epoch, u32::from_be_bytes(code))
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
    pub(super) fn store(
        &self,
        leg: &Leg,
        flushes: &Flushes,
        generation: &mut u64,
        sealer: &Sealer,
    ) -> Result<(), ServiceError> {
        self.store_once(leg, flushes, generation, sealer)?;
        self.store_once(leg, flushes, generation, sealer)
    }

    /// Replaces the older copy.
    pub(super) fn store_once(
        &self,
        leg: &Leg,
        flushes: &Flushes,
        generation: &mut u64,
        sealer: &Sealer,
    ) -> Result<(), ServiceError> {
        flushes.store(leg, &REGION, *generation + 1, &self.encode(sealer))?;
        *generation += 1;
        Ok(())
    }

    /// The content for [`Self::store_in`].
    pub(super) fn content(&self, sealer: &Sealer) -> Vec<u8> {
        self.encode(sealer)
    }

    /// [`Self::store`] within a task.
    pub(super) async fn store_in(
        cx: TaskContext<'_>,
        leg: &dyn Volume,
        flushes: &Flushes,
        generation: &mut u64,
        content: &[u8],
    ) -> Result<(), BlockError> {
        for _ in 0..2 {
            REGION.write_in(cx, leg, *generation + 1, content).await?;
            flushes.flush_alone(cx, leg).await?;
            *generation += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_header_reads_back_and_every_change_is_noticed(uuid: [u8; 16], small: bool, epoch: u64, count in 0..9_u64, states: [bool; 2], at: u64, bit in 0_u8..8) {
            let kek = Secret::generate().unwrap();
            let block_size = if small { BlockSize::B512 } else { BlockSize::B4096 };
            let (mut header, mut key) = Header::create(&kek, uuid, block_size).unwrap();
            let [half, erasing] = states;
            if half {
                (header, key) = header.begin_rekeying(&kek).unwrap();
            }
            (header.epoch, header.erasing) = (epoch, erasing);
            header.root = (0..count).map(|version| Record { version, tag: [version as u8; 16] }).collect();
            let sealer = Sealer::new(&key).unwrap();
            let content = header.encode(&sealer);
            prop_assert_eq!(Header::decode(&content), Ok(header.clone()));
            prop_assert!(header.is_whole(&sealer, &content));
            let mut spoiled = content.clone();
            let at = (at % content.len() as u64) as usize;
            spoiled[at] ^= 1 << bit;
            if let Ok(other) = Header::decode(&spoiled) {
                let opened = other.open(&kek).ok().and_then(|key| Sealer::new(&key).ok());
                prop_assert!(opened.is_none_or(|sealer| !other.is_whole(&sealer, &spoiled)));
            }
            prop_assert!(Header::decode(&content[..at]).is_err());
        }
    }
}
