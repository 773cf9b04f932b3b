//! What can go wrong, for people and as numbers.

use std::{error::Error as _, io, path::PathBuf};

use millrace_driver::{CommandError, DmaError, DriverError, QueueError, spec::status::Status};
use rustix::io::Errno;
use thiserror::Error;

use crate::door;

/// Why a space could not be opened, or a request not be made or finished.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The daemon could not be asked.
    #[error("{}: the daemon cannot be asked for a volume: {source}{}", path.display(), advice(source))]
    Door {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Whoever answers there need not be the daemon.
    #[error(
        "{} belongs to another user, or others may write to it, so who answers there need not be the daemon; have it removed, or name \
         the daemon's run directory (MILLRACE_RUN_DIR)",
        path.display()
    )]
    NotOurs {
        /// The run directory.
        path: PathBuf,
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
    /// The controller does not say what the volume is now.
    #[error("asking how large the volume is: {0}")]
    Look(#[source] DriverError),
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
    /// As long as one may wait, there was no room for what was to be waited for.
    #[error("there was no room for this request in all that time: nothing of it was begun")]
    NoRoom,
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
    /// The error with all of its causes.
    pub(crate) fn in_full(&self) -> String {
        let (mut text, mut cause) = (self.to_string(), self.source());
        while let Some(error) = cause {
            let said = error.to_string();
            // Some say their cause themselves.
            if !text.contains(&said) {
                text = format!("{text}: {said}");
            }
            cause = error.source();
        }
        text
    }

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
            Self::Driver(error) | Self::Look(error) if error.is_timeout() => Errno::TIMEDOUT,
            Self::Driver(error) | Self::Look(error) => match error.shortage() {
                Some(errno) => return errno,
                None if matches!(error, DriverError::Memory(_)) => Errno::NOMEM,
                None => Errno::NODEV,
            },
            Self::Memory(_) => Errno::NOMEM,
            Self::NotOurs { .. } => Errno::ACCESS,
            Self::Queue(_) | Self::Gone => Errno::NODEV,
            Self::Full => Errno::AGAIN,
            Self::PastEnd { .. } => Errno::NXIO,
            Self::Status { status } => errno_of(*status),
            Self::TimedOut | Self::NoRoom => Errno::TIMEDOUT,
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

/// What to look at where nobody answers at the door.
fn advice(source: &io::Error) -> &'static str {
    match Errno::from_io_error(source) {
        // The daemon is not to blame.
        Some(Errno::MFILE) => "; this process has as many descriptors as it may, see \"ulimit -n\"",
        Some(Errno::NFILE) => "; the system has as many files open as it may, see fs.file-max",
        _ => "; is it running, and is this its run directory?",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_names_the_last_cause_and_each_one_once() {
        let many = || io::Error::from(Errno::MFILE);
        let said = many().to_string();
        let making = Error::Driver(DriverError::EventFd(many()));
        assert_eq!(making.in_full(), format!("bringing up the volume's controller: making event fds: {said}"));
        let memory = DmaError::Kernel { size: 4096, source: many() };
        let sharing = Error::Driver(DriverError::Memory(memory));
        assert!(sharing.in_full().ends_with(&format!("bytes of shared memory: {said}")), "{}", sharing.in_full());
        let looking = Error::Look(DriverError::Gone).in_full();
        assert!(looking.starts_with("asking how large the volume is: the controller does not answer"), "{looking}");
        let door = Error::Door { path: "apps.sock".into(), source: many() };
        assert_eq!(door.in_full(), door.to_string());
        assert_eq!(door.to_string().matches(&said).count(), 1, "{door}");
        assert!(door.to_string().ends_with("see \"ulimit -n\""), "{door}");
        for error in [making, sharing, door] {
            assert_eq!(error.errno(), Errno::MFILE.raw_os_error(), "{error}");
        }
    }
}
