//! What bring-up and admin commands fail with.

use std::{io, path::PathBuf, time::Duration};

use millrace_block::BlockCount;
use millrace_nvme_spec::{NamespaceId, QueueId, registers::ControllerStatus};
use millrace_vfio_user::{self as vfio, ClientError};
use rustix::io::Errno;
use thiserror::Error;

use crate::{dma::DmaError, namespace::CommandError, queue::QueueError, transport::TransportError};

/// Why a controller could not be brought up or used.
#[derive(Debug, Error)]
pub enum DriverError {
    /// The connection could not be made.
    #[error("connecting to {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: TransportError,
    },
    /// The function could not be reached.
    #[error("{what}")]
    Transport {
        /// What was being done.
        what: &'static str,
        /// Why.
        #[source]
        source: TransportError,
    },
    /// No memory to share with the device.
    #[error(transparent)]
    Memory(#[from] DmaError),
    /// An admin or I/O command.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A command that cannot be made.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The controller does not have it.
    #[error("the controller does not offer {0}")]
    NotOffered(&'static str),
    /// Each Abort that the controller takes at once is waited for.
    #[error("the controller takes {most} Abort commands at once, and has not answered those that it has")]
    AbortLimit {
        /// How many (ACL).
        most: usize,
    },
    /// The smallest page the controller knows is larger than ours (CAP.MPSMIN).
    #[error("the controller's smallest memory page is 2^{0} bytes, the driver's is 2^12")]
    PageSize(u32),
    /// The controller has no NVM command set (CAP.CSS).
    #[error("the controller does not offer the NVM command set")]
    NoNvmCommandSet,
    /// CSTS.RDY did not follow CC.EN within CAP.TO, or shutdown did not complete.
    #[error("the controller did not become {state} within {waited:?} (CSTS {:#x})", csts.into_bits())]
    NotReady {
        /// What was waited for.
        state: &'static str,
        /// How long.
        waited: Duration,
        /// What it reported last.
        csts: ControllerStatus,
    },
    /// Its registers read as ones: nothing is there.
    #[error("the controller does not answer: it was removed, or is switched off")]
    Gone,
    /// Controller Fatal Status (CSTS.CFS).
    #[error("the controller reports a fatal error (CSTS {:#x})", csts.into_bits())]
    Fatal {
        /// What it reported.
        csts: ControllerStatus,
    },
    /// Queue sizes are 2 to CAP.MQES + 1.
    #[error("a queue of {wanted} entries; the controller takes 2 to {most}")]
    QueueSize {
        /// Entries asked for.
        wanted: u32,
        /// Entries possible.
        most: u32,
    },
    /// All the queues that the controller gave are in use, or the one asked for.
    #[error("queue {wanted} is not free, {granted} are granted")]
    NoQueue {
        /// The queue asked for, or the first that would be free.
        wanted: QueueId,
        /// I/O queues that the controller gave.
        granted: u16,
    },
    /// No event fd was set for this vector.
    #[error("interrupt vector {vector} of {enabled} enabled ones")]
    NoVector {
        /// The vector asked for.
        vector: u16,
        /// Enabled ones.
        enabled: usize,
    },
    /// The controller has no Doorbell Buffer Config command.
    #[error("the controller does not offer shadow doorbells")]
    NoShadowDoorbells,
    /// The namespace is not active, or its format is not one that the driver knows.
    #[error("namespace {nsid} ({size}) is not active or has an unknown format")]
    BadNamespace {
        /// Which.
        nsid: NamespaceId,
        /// Its size.
        size: BlockCount,
    },
    /// A kernel call around event fds.
    #[error("making event fds")]
    EventFd(#[source] io::Error),
    /// The capability list in configuration space does not end.
    #[error("the PCI capability list does not end")]
    CapabilityLoop,
    /// The function has no MSI-X capability.
    #[error("the function has no MSI-X capability")]
    NoMsix,
    /// The function offers no function level reset (PCI Express Device Capabilities).
    #[error("the function offers no function level reset")]
    NoFunctionReset,
}

impl DriverError {
    /// What there is not enough of, as a number of errno.h: room or memory, in this process or in the function's server; descriptors, in this
    /// process or the whole system.
    pub fn shortage(&self) -> Option<i32> {
        let errno = match self {
            Self::Memory(DmaError::Kernel { source, .. }) | Self::EventFd(source) => Errno::from_io_error(source),
            Self::Connect { source, .. } | Self::Transport { source, .. } => match source {
                TransportError::Map { source, .. } => Errno::from_io_error(source),
                // Of the server's descriptors nobody here could make more.
                TransportError::VfioUser(ClientError::Refused { errno, .. }) => {
                    Some(*errno).filter(|errno| !matches!(*errno, Errno::MFILE | Errno::NFILE))
                }
                TransportError::VfioUser(ClientError::Transport(vfio::TransportError::NoDescriptors)) => Some(Errno::MFILE),
                _ => None,
            },
            _ => None,
        };
        let is_shortage = |errno: &Errno| matches!(*errno, Errno::NOSPC | Errno::NOMEM | Errno::MFILE | Errno::NFILE);
        errno.filter(is_shortage).map(Errno::raw_os_error)
    }
}

/// Says what was being done when the transport failed.
pub(crate) fn during(what: &'static str) -> impl FnOnce(TransportError) -> DriverError {
    move |source| DriverError::Transport { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_server_has_no_descriptors_for_is_no_shortage_of_ours() {
        let refused = |errno| {
            let command = vfio::codec::Command::DmaMap;
            let source = TransportError::VfioUser(ClientError::Refused { command, errno });
            DriverError::Transport { what: "a test", source }.shortage()
        };
        assert_eq!([Errno::MFILE, Errno::NFILE].map(refused), [None, None]);
        assert_eq!(refused(Errno::NOSPC), Some(Errno::NOSPC.raw_os_error()));
        let ours = DriverError::EventFd(Errno::NFILE.into());
        assert_eq!(ours.shortage(), Some(Errno::NFILE.raw_os_error()));
    }
}
