//! A small record on a leg that is replaced as a whole: a service's superblock or table.
//!
//! ```text
//!   region:  copy 0 (half of the region) │ copy 1 (the other half)
//!   copy:    magic[8] version:u32 length:u32 generation:u64 crc32c:u32 reserved:u32 │ content (length bytes) │ zeroes
//! ```
//!
//! A store writes the older copy and flushes: a crash leaves the new record or the old one, never neither. What is loaded may be what a process
//! that died had not flushed: who has records of several sectors flushes the leg before the first store. All numbers are
//! little-endian. The checksum (CRC-32C) covers the copy's first 24 bytes and the content. docs/formats/record.md.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};
use millrace_block::Volume;

use crate::{legs, service::ServiceError};

/// Bytes before the content.
const HEADER: usize = 32;

/// Where a kind of record is, and what it is called.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Tells this kind of record from others.
    pub magic: [u8; 8],
    /// The layout of its content. Records of a newer layout are refused.
    pub version: u32,
    /// First byte on the leg; a multiple of 4096.
    pub offset: u64,
    /// Bytes of both copies together; a multiple of 8192.
    pub len: u64,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Counts stores.
    pub generation: u64,
    /// The layout of the content: at most the region's.
    pub version: u32,
    /// The content.
    pub content: Vec<u8>,
    /// What is wrong with the other copy, if it was there once and is damaged.
    pub damaged: Option<String>,
    /// Generation and content of the other copy, if it is good.
    other: Option<(u64, Vec<u8>)>,
    /// The number of the other copy, if there is none.
    missing: Option<u64>,
}

impl Found {
    /// Whether both copies are good and say the same.
    pub fn is_even(&self) -> bool {
        self.other.as_ref().is_some_and(|(_, content)| *content == self.content)
    }

    /// What is wrong with the other copy of a record that is always stored in both.
    pub fn wrong_copy(&self) -> Option<String> {
        self.damaged.clone().or_else(|| self.missing.map(gone))
    }

    /// Whether the place of one copy holds something else. Of a record that is always stored in both, it was given to another since.
    pub fn lacks_copy(&self) -> bool {
        self.missing.is_some()
    }

    /// What the record said before its last store.
    pub fn before(&self) -> Option<&[u8]> {
        let (generation, content) = self.other.as_ref()?;
        (self.generation.checked_sub(1) == Some(*generation)).then_some(content)
    }
}

/// One copy, as found.
enum Copy {
    /// Nothing of ours was ever there.
    Empty,
    Good {
        generation: u64,
        version: u32,
        content: Vec<u8>,
    },
    Damaged(String),
    Newer(u32),
}

fn gone(copy: u64) -> String {
    format!("copy {copy} of its record is not there")
}

/// What the leg said, without its name.
fn cause(error: &ServiceError) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn checksum(head: &[u8], content: &[u8]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(head);
    digest.update(content);
    digest.finalize() as u32
}

impl Region {
    fn half(&self) -> usize {
        (self.len / 2) as usize
    }

    /// Bytes of content that fit.
    pub fn room(&self) -> usize {
        self.half() - HEADER
    }

    fn decode(&self, bytes: &[u8]) -> Copy {
        let damaged = |what: &str| Copy::Damaged(what.to_owned());
        if bytes.get(..8) != Some(&self.magic[..]) {
            return Copy::Empty;
        }
        let (Some(version), Some(length), Some(crc)) = (word(bytes, 8), word(bytes, 12), word(bytes, 24)) else {
            return damaged("it is too short");
        };
        let (Some(low), Some(high)) = (word(bytes, 16), word(bytes, 20)) else { return damaged("it is too short") };
        let content = (length as usize).checked_add(HEADER).and_then(|end| bytes.get(HEADER..end));
        let (Some(content), Some(head)) = (content, bytes.get(..24)) else { return damaged("its length is impossible") };
        if checksum(head, content) != crc {
            return damaged("its checksum does not match");
        }
        if version > self.version {
            return Copy::Newer(version);
        }
        let generation = u64::from(high) << 32 | u64::from(low);
        Copy::Good { generation, version, content: content.to_vec() }
    }

    fn encode(&self, generation: u64, content: &[u8]) -> Vec<u8> {
        let mut copy = Vec::with_capacity(self.half());
        copy.extend_from_slice(&self.magic);
        copy.extend_from_slice(&self.version.to_le_bytes());
        copy.extend_from_slice(&(content.len() as u32).to_le_bytes());
        copy.extend_from_slice(&generation.to_le_bytes());
        let crc = checksum(&copy, content);
        copy.extend_from_slice(&crc.to_le_bytes());
        copy.extend_from_slice(&[0; 4]);
        copy.extend_from_slice(content);
        copy
    }

    /// What is written to store a record, and where.
    ///
    /// # Panics
    /// When the content is longer than [`Self::room`].
    pub(crate) fn copy(&self, generation: u64, content: &[u8]) -> (u64, Vec<u8>) {
        let mut copy = self.encode(generation, content);
        assert!(copy.len() <= self.half(), "the caller keeps within the record's room");
        copy.resize(copy.len().next_multiple_of(4096).min(self.half()), 0);
        (self.offset + (generation % 2) * self.half() as u64, copy)
    }

    /// Reads the record; `None` when there never was one.
    ///
    /// # Errors
    /// [`ServiceError::Newer`], or [`ServiceError::Content`] when neither copy is good; the leg's own where no copy is good and one
    /// cannot be read.
    pub fn load(&self, leg: &Arc<impl Volume + ?Sized + 'static>) -> Result<Option<Found>, ServiceError> {
        let wrong = |what: String| ServiceError::Content { leg: leg.name().to_owned(), what };
        let (mut best, mut damage): (Option<Found>, Option<String>) = (None, None);
        let (mut missing, mut unreadable) = (None, None);
        let both = legs::read(leg, self.offset, self.len as usize);
        for number in 0..2 {
            let at = number as usize * self.half();
            let half = match &both {
                Ok(bytes) => Ok(self.decode(&bytes[at..at + self.half()])),
                // Each by itself: sectors that went bad take one copy with them, not both.
                Err(_) => legs::read(leg, self.offset + at as u64, self.half()).map(|bytes| self.decode(&bytes)),
            };
            let copy = half.unwrap_or_else(|error| {
                let damaged = Copy::Damaged(format!("it cannot be read: {}", cause(&error)));
                unreadable = Some(error);
                damaged
            });
            match copy {
                Copy::Empty => missing = Some(number),
                Copy::Newer(has) => {
                    return Err(ServiceError::Newer { leg: leg.name().to_owned(), has, known: self.version });
                }
                Copy::Damaged(what) => damage = Some(format!("copy {number} of its record is damaged: {what}")),
                Copy::Good { generation, version, content } => {
                    let copy = Found { generation, version, content, damaged: None, other: None, missing: None };
                    let (newer, older) = match best.take() {
                        Some(best) if best.generation >= generation => (best, Some(copy)),
                        best => (copy, best),
                    };
                    best = Some(Found { other: older.map(|older| (older.generation, older.content)), ..newer });
                }
            }
        }
        match (best, damage) {
            (Some(found), damaged) => {
                // The second store has written the other copy.
                let damaged = damaged.or_else(|| missing.filter(|_| found.generation > 1).map(gone));
                Ok(Some(Found { damaged, missing, ..found }))
            }
            (None, Some(damage)) => {
                Err(unreadable.unwrap_or_else(|| wrong(format!("{damage}; the other copy is not there"))))
            }
            (None, None) => Ok(None),
        }
    }

    /// Replaces the record; when it returns, the new one is durable.
    ///
    /// # Errors
    /// When the leg refuses. Then the old record or the new one is there.
    ///
    /// # Panics
    /// When the content is longer than [`Self::room`].
    pub fn store(
        &self,
        leg: &Arc<impl Volume + ?Sized + 'static>,
        generation: u64,
        content: &[u8],
    ) -> Result<(), ServiceError> {
        let (offset, copy) = self.copy(generation, content);
        legs::write(leg, offset, copy)
    }

    /// [`Self::store`] within a task of a shard.
    ///
    /// # Errors
    /// What the leg said.
    ///
    /// # Panics
    /// When the content is longer than [`Self::room`].
    pub async fn store_in(
        &self,
        cx: millrace_block::TaskContext<'_>,
        leg: &dyn Volume,
        generation: u64,
        content: &[u8],
    ) -> Result<(), millrace_block::BlockError> {
        self.write_in(cx, leg, generation, content).await?;
        legs::flush(cx, leg).await
    }

    /// [`Self::store_in`] for who flushes the leg himself.
    ///
    /// # Errors
    /// What the leg said.
    ///
    /// # Panics
    /// As [`Self::store_in`].
    pub(crate) async fn write_in(
        &self,
        cx: millrace_block::TaskContext<'_>,
        leg: &dyn Volume,
        generation: u64,
        content: &[u8],
    ) -> Result<(), millrace_block::BlockError> {
        let (offset, copy) = self.copy(generation, content);
        legs::write_bytes(cx, leg, offset, copy).await
    }
}
