//! The file: blocks, each with a checksum of its own (docs/formats/trace.md).
//!
//! ```text
//!   Begin ─ Names ─ Events ─ Events ─ (Names) ─ Events ─ … ─ End            write: encode, one after the other
//!     │ damaged or missing?                                                read:  Reader ─► Block, and what was lost
//!     └─ looked for: the next block whose checksum is right
//! ```
//!
//! A file that ends anywhere is read up to there. A block is all right or not there.

mod follow;
mod reader;
#[cfg(test)]
mod tests;

use std::io;

use millrace_block::trace::Event;
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use follow::Follower;
pub use reader::{Damage, Reader};

/// Version of the format.
pub const VERSION: u16 = 1;
/// How every block begins.
pub const MAGIC: [u8; 8] = *b"MRTRACEB";
/// Bytes before a block's content.
pub const HEADER: usize = 32;
/// Most bytes of a block's content.
pub const MOST: usize = 1 << 20;
/// Bytes of an event.
const EVENT: usize = Event::WORDS * 8;
/// Most events of a block.
pub const EVENTS: usize = 4096;

const BEGIN: u16 = 1;
const NAMES: u16 = 2;
const EVENTS_KIND: u16 = 3;
const END: u16 = 4;

/// How a trace began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// The program that wrote it, with its version.
    pub program: String,
    /// What was to be traced: "device vm1".
    pub target: String,
    /// The trace's clock at the beginning, in nanoseconds: everything is recorded from then on.
    pub clock: u64,
    /// Nanoseconds since 1970, at the same moment.
    pub unix: u64,
    /// How long it was to last in seconds; absent: until it is told to end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
}

/// A namespace of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceName {
    /// Its identifier; 1 for a virtio disk.
    pub nsid: u32,
    /// Its volume.
    pub volume: String,
    /// Bytes of the blocks in which the device's requests are counted.
    pub block: u32,
    /// Bytes of the volume.
    pub size: u64,
}

/// A device whose requests are recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceName {
    /// Its number in events.
    pub id: u16,
    /// Its name.
    pub name: String,
    /// "nvme" or "virtio-blk".
    pub kind: String,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceName>,
}

/// A node of a volume's graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeName {
    /// Its number in events.
    pub id: u16,
    /// The volume.
    pub volume: String,
    /// Its name, unique in the volume.
    pub name: String,
    /// The service, or the leaf's specification.
    pub word: String,
    /// The node above, or 0: it is the root.
    pub above: u16,
    /// Whether it is a back end.
    pub leaf: bool,
    /// Bytes of its blocks.
    pub block: u32,
}

/// What numbers in the events that follow mean, beside what was said before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// From when on devices have these namespaces, on the trace's clock: events with an earlier time may come after it in the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<u64>,
    /// Devices.
    #[serde(default)]
    pub devices: Vec<DeviceName>,
    /// Nodes.
    #[serde(default)]
    pub nodes: Vec<NodeName>,
}

/// How a trace ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Why.
    pub reason: String,
    /// Until when everything was recorded, on the trace's clock, if whoever wrote this knew it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<u64>,
    /// Events that were written, if that is known.
    #[serde(default)]
    pub events: u64,
    /// Events that found no room, if that is known.
    #[serde(default)]
    pub dropped: u64,
    /// It ended before it was to: the daemon's worker went away, or was replaced.
    #[serde(default)]
    pub early: bool,
}

/// A block of a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// The first one.
    Begin(Begin),
    /// What numbers mean.
    Names(Names),
    /// Events of one ring, in order.
    Events {
        /// The shard's number.
        ring: u32,
        /// Events of this ring that found no room, so far.
        dropped: u64,
        /// Those that did. What has an unknown kind is left out.
        events: Vec<Event>,
    },
    /// The last one.
    End(End),
}

/// Why a file is no trace that can be read.
#[derive(Debug, Error)]
pub enum FormatError {
    /// It could not be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// There is no beginning.
    #[error("it is no trace, or its beginning is damaged")]
    NoTrace,
    /// Another version.
    #[error("it is a trace of version {0}, and this program reads version {VERSION}")]
    Version(u16),
}

/// CRC-32C of a block: of its header up to the checksum, and its content.
fn checksum(header: &[u8], content: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&header[..HEADER - 4]);
    digest.update(content);
    digest.finalize() as u32
}

fn encode(kind: u16, number: u64, ring: u32, content: &[u8]) -> Vec<u8> {
    assert!(content.len() <= MOST, "a block's content has {} bytes", content.len());
    let mut block = Vec::with_capacity(HEADER + content.len());
    block.extend(MAGIC);
    block.extend(VERSION.to_le_bytes());
    block.extend(kind.to_le_bytes());
    block.extend((content.len() as u32).to_le_bytes());
    block.extend(number.to_le_bytes());
    block.extend(ring.to_le_bytes());
    block.extend([0; 4]);
    let checksum = checksum(&block, content);
    block[HEADER - 4..].copy_from_slice(&checksum.to_le_bytes());
    block.extend(content);
    block
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("names and numbers are JSON")
}

/// Makes the blocks of one file, and numbers them.
#[derive(Debug, Default)]
pub struct Writer {
    next: u64,
}

impl Writer {
    fn block(&mut self, kind: u16, ring: u32, content: &[u8]) -> Vec<u8> {
        let number = self.next;
        self.next += 1;
        encode(kind, number, ring, content)
    }

    /// The same, its next block having this number.
    #[cfg(test)]
    pub(crate) fn numbered(&mut self, next: u64) -> &mut Self {
        self.next = next;
        self
    }

    /// The first block.
    pub fn begin(&mut self, begin: &Begin) -> Vec<u8> {
        self.block(BEGIN, 0, &json(begin))
    }

    /// A block of names; several, when there are many.
    pub fn names(&mut self, names: &Names) -> Vec<u8> {
        let content = json(names);
        if content.len() <= MOST {
            return self.block(NAMES, 0, &content);
        }
        let (devices, nodes) = (names.devices.len() / 2, names.nodes.len() / 2);
        if devices + nodes == 0 {
            // One thing with a megabyte of names is left without.
            return Vec::new();
        }
        let part = |devices: &[DeviceName], nodes: &[NodeName]| Names {
            clock: names.clock,
            devices: devices.to_vec(),
            nodes: nodes.to_vec(),
        };
        let first = part(&names.devices[..devices], &names.nodes[..nodes]);
        let second = part(&names.devices[devices..], &names.nodes[nodes..]);
        [self.names(&first), self.names(&second)].concat()
    }

    /// A block of events of one ring; at most [`EVENTS`].
    pub fn events(&mut self, ring: u32, dropped: u64, events: impl IntoIterator<Item = [u64; Event::WORDS]>) -> Vec<u8> {
        let mut content = dropped.to_le_bytes().to_vec();
        events.into_iter().flatten().for_each(|word| content.extend(word.to_le_bytes()));
        self.block(EVENTS_KIND, ring, &content)
    }

    /// The last block.
    pub fn end(&mut self, end: &End) -> Vec<u8> {
        self.block(END, 0, &json(end))
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The content of a block whose checksum is right; `None`: it makes no sense, or its kind is unknown.
fn decode(kind: u16, ring: u32, content: &[u8]) -> Option<Block> {
    match kind {
        BEGIN => serde_json::from_slice(content).ok().map(Block::Begin),
        NAMES => serde_json::from_slice(content).ok().map(Block::Names),
        END => serde_json::from_slice(content).ok().map(Block::End),
        EVENTS_KIND => {
            let (dropped, events) = content.split_at_checked(8)?;
            let words = |bytes: &[u8]| std::array::from_fn(|at| bytes.get(at * 8..).map_or(0, word));
            let events = events.chunks_exact(EVENT).filter_map(|bytes| Event::from_words(words(bytes))).collect();
            Some(Block::Events { ring, dropped: word(dropped), events })
        }
        _ => None,
    }
}
