//! The disk's state as a front end takes it elsewhere (vhost-user.rst, "Migrating back-end state"): what rings do not carry, and what must
//! be the same there. The bytes are those of docs/formats/virtio-state.md.
//!
//! ```text
//!   SET_DEVICE_STATE_FD ─► a memory file as long as a record, for the front end to read or to write ─► CHECK_DEVICE_STATE
//! ```
//!
//! The front end's own descriptor is not used: it may be anything, and whether a call on it waits is the front end's to say at any instant. The
//! protocol lets us give another channel. Ours cannot grow, shrink or keep anybody waiting.

use std::{io, os::fd::OwnedFd};

use millrace_memory::PeerBytes;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{
    config::{SECTOR, acceptable, feature},
    disk::Disk,
    message::StateTransfer,
};

const _: () = assert!(cfg!(target_endian = "little"), "numbers are written as they lie in memory");

const MAGIC: [u8; 8] = *b"MRVBLKST";
/// Any change of the record is a new one.
const VERSION: u32 = 1;
/// Bytes of a record.
pub(crate) const SIZE: usize = 4096;
/// Bytes before what the checksum covers: magic, version, checksum.
const HEAD: usize = 16;
/// Bytes that mean something.
const USED: usize = 40;

/// Why the state is not given, or one that came is not taken. Nothing has changed then.
#[derive(Debug, Error)]
pub(crate) enum StateError {
    #[error("nothing is known of direction {direction} in phase {phase}")]
    Unknown { direction: u32, phase: u32 },
    #[error("queue {0} runs: it moves when all are stopped")]
    Running(usize),
    #[error("no memory for it: {0}")]
    Create(#[from] io::Error),
    #[error("it was not asked for, or it was refused")]
    NotBegun,
    #[error("what came is no state of a virtio disk, or not all of it")]
    Magic,
    #[error("what came is of version {0}; this daemon knows version {VERSION}")]
    Version(u32),
    #[error("what came is damaged: its checksum does not fit")]
    Checksum,
    #[error("what came contradicts itself: its write cache mode is {0}")]
    Mode(u8),
    #[error("what came is of another disk: {what} is {theirs} there and {ours} here")]
    Shape { what: &'static str, theirs: u64, ours: u64 },
    #[error("what came is of a guest that uses features {0:#x}, which are not offered here")]
    Features(u64),
}

/// The record.
#[derive(Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Record {
    magic: [u8; 8],
    version: u32,
    checksum: u32,
    /// In sectors.
    capacity: u64,
    /// What the guest and its front end chose, but for the log.
    features: u64,
    block_size: u32,
    queues: u16,
    read_only: u8,
    write_cache: u8,
    zeroes: [u8; SIZE - USED],
}

const _: () = assert!(size_of::<Record>() == SIZE);

impl Record {
    fn of(disk: &Disk) -> Self {
        let geometry = disk.geometry();
        let mut record = Self {
            magic: MAGIC,
            version: VERSION,
            checksum: 0,
            capacity: geometry.bytes() / SECTOR,
            features: disk.core.features & !feature::LOG_ALL,
            block_size: geometry.block_size.bytes(),
            queues: disk.core.config.queues,
            read_only: disk.kind().unwrap_or_default().read_only.into(),
            write_cache: disk.core.write_cache.into(),
            zeroes: [0; SIZE - USED],
        };
        record.checksum = record.sum();
        record
    }

    fn sum(&self) -> u32 {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &self.as_bytes()[HEAD..]) as u32
    }

    /// Whether it can be this disk's; its write cache mode.
    fn check(&self, disk: &Disk) -> Result<bool, StateError> {
        if self.magic != MAGIC {
            return Err(StateError::Magic);
        }
        if self.version != VERSION {
            return Err(StateError::Version(self.version));
        }
        if self.checksum != self.sum() {
            return Err(StateError::Checksum);
        }
        let here = Self::of(disk);
        // A guest was told of so many blocks and queues: it does not mind if there are more.
        let shape: [(&'static str, u64, u64, bool); 4] = [
            ("the block size", self.block_size.into(), here.block_size.into(), self.block_size == here.block_size),
            ("read-only", self.read_only.into(), here.read_only.into(), self.read_only == here.read_only),
            ("the number of sectors", self.capacity, here.capacity, self.capacity <= here.capacity),
            ("the number of queues", self.queues.into(), here.queues.into(), self.queues <= here.queues),
        ];
        if let Some((what, theirs, ours, _)) = shape.into_iter().find(|&(.., fits)| !fits) {
            return Err(StateError::Shape { what, theirs, ours });
        }
        match self.features & !acceptable(disk.offered()) {
            0 => {}
            missing => return Err(StateError::Features(missing)),
        }
        match self.write_cache {
            mode @ 0..=1 => Ok(mode == 1),
            mode => Err(StateError::Mode(mode)),
        }
    }
}

/// A state on its way, from the message that begins it to the one that asks how it went.
#[derive(Debug)]
pub(crate) enum Transfer {
    /// The front end has all of it.
    Saved,
    /// The front end writes it here.
    Loading(PeerBytes),
}

impl Transfer {
    /// Begins; where the front end reads or writes.
    pub(crate) fn begin(disk: &Disk, what: StateTransfer) -> Result<(Self, OwnedFd), StateError> {
        let StateTransfer { direction, phase } = what;
        if direction > StateTransfer::LOAD || phase != StateTransfer::STOPPED {
            return Err(StateError::Unknown { direction, phase });
        }
        must_be_stopped(disk)?;
        let (bytes, channel) = PeerBytes::create("millrace-disk-state", SIZE as u64)?;
        if direction != StateTransfer::SAVE {
            return Ok((Self::Loading(bytes), channel));
        }
        bytes.write_value(0, &Record::of(disk));
        Ok((Self::Saved, channel))
    }

    /// Ends: a state that has come is this disk's from now on.
    pub(crate) fn end(self, disk: &mut Disk) -> Result<(), StateError> {
        let Self::Loading(bytes) = self else { return Ok(()) };
        // The front end may have gone on meanwhile.
        must_be_stopped(disk)?;
        // Copied once, then checked: who wrote it may write on.
        let record: Record = bytes.read_value(0);
        let write_cache = record.check(disk)?;
        disk.set_write_cache(write_cache);
        Ok(())
    }
}

/// A queue whose memory has gone is not stopped: it goes on when that comes back.
fn must_be_stopped(disk: &Disk) -> Result<(), StateError> {
    let runs = disk.queues.iter().position(|queue| queue.ring.is_some() || queue.is_displaced());
    runs.map_or(Ok(()), |queue| Err(StateError::Running(queue)))
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn fields_lie_where_the_format_has_them() {
        assert_eq!(offset_of!(Record, checksum), 12);
        assert_eq!(offset_of!(Record, capacity), HEAD);
        assert_eq!(offset_of!(Record, features), 24);
        assert_eq!(offset_of!(Record, block_size), 32);
        assert_eq!(offset_of!(Record, queues), 36);
        assert_eq!(offset_of!(Record, read_only), 38);
        assert_eq!(offset_of!(Record, write_cache), 39);
        assert_eq!(offset_of!(Record, zeroes), USED);
    }
}
