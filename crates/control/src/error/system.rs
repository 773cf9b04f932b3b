//! What the layers below said: what kind of failure it is, and what to do about it.

use std::{
    error::Error,
    io::{self, ErrorKind},
    iter::successors,
};

use millrace_block::{BlockError, ChangeError, VolumeError};
use millrace_frontends::{nvme, virtio_blk};
use millrace_services::{
    ServiceError,
    copy::CopyError,
    graph::{ChangeFailed, GraphError, LeafError},
};
use millrace_vfio_user::ListenerError;
use rustix::io::Errno;

use super::{Class, ControlError};
use crate::store::StoreError;

/// Whoever asked may ask for another file or another size; all else is the system's failure, and may be over by the next time.
fn of_io(error: &io::Error) -> Class {
    match error.kind() {
        ErrorKind::NotFound
        | ErrorKind::PermissionDenied
        | ErrorKind::AlreadyExists
        | ErrorKind::InvalidInput
        | ErrorKind::InvalidFilename
        | ErrorKind::IsADirectory
        | ErrorKind::NotADirectory
        | ErrorKind::ReadOnlyFilesystem
        | ErrorKind::FileTooLarge
        | ErrorKind::Unsupported => Class::Invalid,
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Class::NoRoom,
        _ => Class::Failed,
    }
}

pub(super) fn of_volume(error: &VolumeError) -> Class {
    match error {
        VolumeError::InUse { .. } | VolumeError::Refused { .. } => Class::Conflict,
        VolumeError::Io { source, .. } => of_io(source),
        VolumeError::BadSize { .. } | VolumeError::BadBlockSize { .. } | VolumeError::Unsupported { .. } => Class::Invalid,
    }
}

/// What to do about a size that a service in a volume's stack does not take.
pub(super) fn about_unsupported(volume: &str, what: &str) -> Option<String> {
    let name = volume.split('/').next().unwrap_or(volume);
    match what {
        "resizing" => Some(format!(
            "take a cache out first (\"millrace volume remove {name} cache\"), and put it in again when the volume is resized; of parity make another \
             volume, and \"millrace copy\""
        )),
        "resizing while it is being migrated" => {
            Some(format!("wait for its end, or \"millrace volume migrate {name} --cancel\" first"))
        }
        _ => None,
    }
}

pub(super) fn of_graph(error: &GraphError) -> Class {
    match error {
        GraphError::Leaf { source: LeafError::Volume(error), .. } => of_volume(error),
        GraphError::Service { source, .. } => of_service(source),
        GraphError::WayBack { .. } => Class::Failed,
        GraphError::Unfinished { .. } => Class::Conflict,
        GraphError::Leaf { source: LeafError::Refused(_), .. } | GraphError::Twice { .. } => Class::Invalid,
    }
}

fn of_service(error: &ServiceError) -> Class {
    match error {
        ServiceError::Volume(error) => of_volume(error),
        ServiceError::File { source, .. } => of_io(source),
        ServiceError::NotNow(_) => Class::Conflict,
        ServiceError::HalfWay(error) => of_service(error),
        ServiceError::Leg { source: BlockError::NoSpace, .. } => Class::NoRoom,
        ServiceError::Leg { .. } | ServiceError::Engine(_) => Class::Failed,
        ServiceError::Setting(_)
        | ServiceError::Legs(_)
        | ServiceError::Content { .. }
        | ServiceError::Newer { .. }
        | ServiceError::Command(_) => Class::Invalid,
    }
}

pub(super) fn of_change(error: &ChangeFailed) -> Class {
    match error {
        ChangeFailed::Graph(error) | ChangeFailed::Switch(ChangeError::Refused(error)) => of_graph(error),
        ChangeFailed::Store(_) | ChangeFailed::Switch(ChangeError::Barrier(_)) => Class::Failed,
        ChangeFailed::TooDeep { .. } => Class::Invalid,
        _ => Class::Conflict,
    }
}

pub(super) fn of_copy(error: &CopyError) -> Class {
    match error {
        CopyError::Shape(_) => Class::Invalid,
        CopyError::Write { source: BlockError::NoSpace, .. } => Class::NoRoom,
        CopyError::Read { .. } | CopyError::Write { .. } | CopyError::Memory(_) | CopyError::Engine(_) => Class::Failed,
    }
}

pub(super) fn of_listener(error: &ListenerError) -> Class {
    match error {
        ListenerError::InUse { .. } | ListenerError::NotASocket { .. } => Class::Conflict,
        ListenerError::Io { source, .. } => of_io(source),
    }
}

/// Of the daemon's own state: whoever asked can do nothing about it, but for room.
pub(super) fn of_store(error: &ControlError) -> Class {
    match said(error).map(of_io) {
        Some(Class::NoRoom) => Class::NoRoom,
        _ => Class::Failed,
    }
}

pub(super) fn of_device(error: &nvme::DeviceError) -> Class {
    match error {
        nvme::DeviceError::Memory { .. } | nvme::DeviceError::Socket { .. } => Class::Failed,
        nvme::DeviceError::Full { .. } => Class::Conflict,
        nvme::DeviceError::Missing { .. } => Class::Missing,
        _ => Class::Invalid,
    }
}

pub(super) fn of_disk(error: &virtio_blk::DeviceError) -> Class {
    match error {
        virtio_blk::DeviceError::Socket { .. } => Class::Failed,
        virtio_blk::DeviceError::OtherKind { .. } => Class::Conflict,
        _ => Class::Invalid,
    }
}

/// What the system said, where that is the cause.
pub(super) fn said(error: &ControlError) -> Option<&io::Error> {
    // The database's errors do not tell their causes.
    if let ControlError::Store(StoreError::Database { source, .. }) = error
        && let redb::Error::Io(error) = &**source
    {
        return Some(error);
    }
    successors(error.source(), |&cause| cause.source()).find_map(|cause| cause.downcast_ref())
}

/// What to do about it, where it does not say so itself.
pub(super) fn about(error: &io::Error) -> Option<&'static str> {
    Some(match Errno::from_io_error(error)? {
        Errno::NOSPC | Errno::DQUOT => "make room on that file system (or raise the quota), and try again",
        Errno::NOMEM => {
            "choose a smaller size, or see to more memory: the machine's, or the daemon's own limit (--memory-limit)"
        }
        Errno::FBIG => {
            "its file system, or the daemon's own limit (LimitFSIZE= in its unit), has no file as large: choose a smaller \
             size, or another file system"
        }
        Errno::MFILE => "the daemon has as many files open as it may: give it more (--file-limit, LimitNOFILE= in its unit)",
        Errno::NFILE => "all of the machine has as many files open as it may: raise fs.file-max",
        Errno::IO => "the disk or its file system has failed: the kernel's log (\"dmesg\") says more",
        _ => return None,
    })
}

/// What to do about a device's socket that cannot be made.
pub(super) fn about_socket(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        ErrorKind::InvalidFilename => {
            Some("the path of a socket has 107 bytes at most: give a shorter --socket, or the daemon a shorter --run-dir")
        }
        ErrorKind::NotFound => Some("make its directory first, or choose another --socket"),
        ErrorKind::PermissionDenied => Some(
            "the daemon's user must be allowed to make it there, and so must the sandbox: choose another --socket, or name its place by \
             \"allow\" under [sandbox] in the daemon's configuration, or serve --allow PATH, from its next start on (docs/sandbox.md)",
        ),
        _ => about(error),
    }
}
