//! What can go wrong, for people and as numbers.

use std::{io, path::PathBuf};

use millrace_driver::{CommandError, DmaError, DriverError, QueueError, spec::status::Status};
use rustix::io::Errno;
use thiserror::Error;

use crate::door;

/// Why a space could not be opened, or a request not be made or finished.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The daemon could not be asked.
    #[error("{}: the daemon cannot be asked for a volume: {source}; is it running, and is this its run directory?", path.display())]
    Door {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The daemon did not give the volume.
    #[error("volume {volume}: {detail}")]
    Refused {
        /// The volume asked for.
        volume: String,
        /// The error's number.
        errno: i32,
        /// What the daemon said.
        detail: String,
    },
    /// No volume was named.
    #[error("no volume is named: give its name, or set MILLRACE_VOLUME")]
    NoVolume,
    /// The options are not possible.
    #[error("{0}")]
    Options(&'static str),
    /// The engine's own front was asked for.
    #[error("the daemon cannot take requests for its engine: {0}")]
    NoEngine(&'static str),
    /// The connection could not be held a second time.
    #[error("no second descriptor for the daemon's connection: {0}")]
    Descriptor(#[source] io::Error),
    /// Processes that are forked could not be told apart.
    #[error("no page that a fork clears: {0}")]
    Home(#[source] io::Error),
    /// The controller could not be brought up.
    #[error("bringing up the volume's controller: {0}")]
    Driver(#[from] DriverError),
    /// No memory to share.
    #[error(transparent)]
    Memory(#[from] DmaError),
    /// The command could not be made.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The queue failed: the space is of no use any more.
    #[error("the connection to the daemon is lost: {0}")]
    Queue(#[from] QueueError),
    /// The daemon, or the device, is gone.
    #[error("the daemon has gone away, or has ended the space, or another process opened this and was forked: open another")]
    Gone,
    /// As many requests are in progress, or completions not taken, as the space holds.
    #[error("the space holds no more requests and completions; poll or reap first")]
    Full,
    /// Not whole blocks, or nothing.
    #[error("{len} bytes at {offset} are no whole blocks of {block_size} bytes")]
    Blocks {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// The volume's block size.
        block_size: u32,
    },
    /// Past the end.
    #[error("{len} bytes at {offset} are not within the volume's {size}")]
    PastEnd {
        /// Where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// The volume's size in bytes.
        size: u64,
    },
    /// FP_DIRECT with memory of another kind.
    #[error("a direct request moves whole blocks at multiples of 4 bytes of the space's own buffer")]
    NotDirect,
    /// An operation, flag or pointer that cannot be.
    #[error("{0}")]
    Invalid(&'static str),
    /// The request failed in the daemon.
    #[error("the request failed: {status}")]
    Status {
        /// What the controller answered.
        status: Status,
    },
    /// A request that was waited for failed.
    #[error("the request failed: {}", io::Error::from_raw_os_error(*errno))]
    Failed {
        /// What went wrong, a number of errno.h.
        errno: i32,
    },
    /// The wait was longer than allowed.
    #[error("nothing has finished in time")]
    TimedOut,
}

impl Error {
    /// The error as a number of errno.h.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Self::Door { source, .. } if source.kind() == io::ErrorKind::TimedOut => Errno::TIMEDOUT,
            // No medium has failed: nobody has answered.
            Self::Door { source, .. } if door::is_cut_off(source) => Errno::CONNREFUSED,
            Self::Door { source, .. } | Self::Descriptor(source) | Self::Home(source) => {
                return source.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
            }
            Self::Refused { errno, .. } | Self::Failed { errno } => return *errno,
            Self::Driver(error) if error.is_timeout() => Errno::TIMEDOUT,
            Self::Memory(_) | Self::Driver(DriverError::Memory(_)) => Errno::NOMEM,
            Self::Driver(_) | Self::Queue(_) | Self::Gone => Errno::NODEV,
            Self::Full => Errno::AGAIN,
            Self::PastEnd { .. } => Errno::NXIO,
            Self::Status { status } => errno_of(*status),
            Self::TimedOut => Errno::TIMEDOUT,
            Self::NoEngine(_) => Errno::OPNOTSUPP,
            Self::NoVolume
            | Self::Options(_)
            | Self::Command(_)
            | Self::Blocks { .. }
            | Self::NotDirect
            | Self::Invalid(_) => Errno::INVAL,
        };
        errno.raw_os_error()
    }
}

/// What a command's status is for a program.
fn errno_of(status: Status) -> Errno {
    match status.code() {
        Status::NAMESPACE_WRITE_PROTECTED | Status::WRITE_TO_READ_ONLY_RANGE => Errno::ROFS,
        Status::CAPACITY_EXCEEDED => Errno::NOSPC,
        Status::LBA_OUT_OF_RANGE => Errno::NXIO,
        Status::RESERVATION_CONFLICT => Errno::BUSY,
        Status::INVALID_OPCODE => Errno::OPNOTSUPP,
        Status::INVALID_NAMESPACE_OR_FORMAT => Errno::NODEV,
        _ => Errno::IO,
    }
}
