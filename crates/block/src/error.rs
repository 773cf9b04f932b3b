//! What can go wrong, on the data path and beside it.

use std::{io, path::PathBuf};

use thiserror::Error;

/// Why a request failed, in terms every front end can tell its guest. Small and `Copy`: it travels on the data path.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum BlockError {
    /// The range does not lie within the volume.
    #[error("range lies outside the volume")]
    OutOfRange,
    /// The volume cannot be written.
    #[error("volume is read-only")]
    ReadOnly,
    /// The data could not be read from the medium.
    #[error("unrecovered read error (errno {errno})")]
    ReadFault {
        /// What the system said; 0 when a service found it.
        errno: i32,
    },
    /// The data could not be written to the medium, or made durable.
    #[error("write fault (errno {errno})")]
    WriteFault {
        /// What the system said; 0 when a service found it.
        errno: i32,
    },
    /// The medium is full (ENOSPC, EDQUOT).
    #[error("no space left on the medium")]
    NoSpace,
    /// A compare found other data.
    #[error("data differ from what was compared")]
    Miscompare,
    /// The memory of the request could not be reached (EFAULT: its owner took it away).
    #[error("the request's memory is gone")]
    Memory,
    /// The volume cannot do this operation; its geometry says so.
    #[error("operation not supported by the volume")]
    Unsupported,
    /// The volume is being replaced or is gone (a disk was pulled, the daemon is stopping).
    #[error("volume is not ready")]
    NotReady,
    /// Nobody waits for the request any more: see [`Volume::call_off`](crate::Volume::call_off).
    #[error("nobody waits for the request any more")]
    CalledOff,
}

impl BlockError {
    /// The error for a failed system call that read from the medium.
    pub fn from_read_errno(errno: i32) -> Self {
        match errno {
            libc::EFAULT => Self::Memory,
            _ => Self::ReadFault { errno },
        }
    }

    /// The error for a failed system call that wrote to the medium or made it durable.
    pub fn from_write_errno(errno: i32) -> Self {
        match errno {
            libc::EFAULT => Self::Memory,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpace,
            libc::EROFS | libc::EPERM => Self::ReadOnly,
            libc::EOPNOTSUPP => Self::Unsupported,
            _ => Self::WriteFault { errno },
        }
    }
}

/// Why a volume could not be created, opened or changed: told to the operator.
#[derive(Debug, Error)]
pub enum VolumeError {
    /// A size of 0, or not a multiple of the block size, or beyond what the volume can hold.
    #[error("volume {volume}: size of {size} bytes is not usable: {why}")]
    BadSize {
        /// The volume's name.
        volume: String,
        /// The size asked for, in bytes.
        size: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A block size other than 512 and 4096, or one that this volume cannot have.
    #[error("volume {volume}: block size {block_size} is not usable: {why}")]
    BadBlockSize {
        /// The volume's name.
        volume: String,
        /// The block size asked for, in bytes.
        block_size: u32,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Another process, or another volume of this one, writes to the same file.
    #[error("volume {volume}: {path} is in use by another volume or process; stop it, or choose another file")]
    InUse {
        /// The volume's name.
        volume: String,
        /// The file.
        path: PathBuf,
    },
    /// A system call on the volume's file or memory failed.
    #[error("volume {volume}: cannot {action} {path}: {source}")]
    Io {
        /// The volume's name.
        volume: String,
        /// What was tried, as a verb.
        action: &'static str,
        /// The file, or a word for the memory.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// What it is made of does not allow it now (a shared disk that is full).
    #[error("volume {volume}: {why}")]
    Refused {
        /// The volume's name.
        volume: String,
        /// Why, and what to do.
        why: String,
    },
    /// This kind of volume cannot do it.
    #[error("volume {volume}: {what} is not possible for a volume of this kind")]
    Unsupported {
        /// The volume's name.
        volume: String,
        /// The operation.
        what: &'static str,
    },
}
