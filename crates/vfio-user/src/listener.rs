//! The unix socket clients connect to.

#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;

/// Of its own files, a user may give one to a group that he is in.
const CHOWN: &str = "giving it to its group (which its owner must be in)";

/// Why a socket could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ListenerError {
    /// Another process answers on the path.
    #[error("{}: another process is listening here", path.display())]
    InUse {
        /// The socket's path.
        path: PathBuf,
    },
    /// Something that is not a socket has the path; it is left alone.
    #[error("{}: exists and is not a socket", path.display())]
    NotASocket {
        /// The socket's path.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{}: {operation} failed", path.display())]
    Io {
        /// The socket's path.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// How it failed.
        #[source]
        source: std::io::Error,
    },
}

/// A listening socket. It owns its path and removes it when dropped, unless somebody else has taken that on.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    place: Option<SocketPlace>,
}

/// A socket's place among the files. Dropping it removes it.
#[derive(Debug)]
pub struct SocketPlace {
    path: PathBuf,
    /// Device and inode of the path: only what we made is removed.
    identity: (u64, u64),
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Listener {
    /// Makes a socket that only its owner may connect to. A socket that nobody answers on any more is replaced.
    pub fn bind(path: &Path) -> Result<Self, ListenerError> {
        Self::bind_for(path, None)
    }

    /// As [`bind`](Self::bind), with a socket that this group may connect to as well.
    pub fn bind_for(path: &Path, group: Option<u32>) -> Result<Self, ListenerError> {
        let failed =
            |operation| move |errno: Errno| ListenerError::Io { path: path.to_owned(), operation, source: errno.into() };
        let address = SocketAddrUnix::new(path).map_err(failed("using the path"))?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed("socket"))?;
        // The path takes the socket's mode: there is no moment in which others could connect.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed("chmod"))?;
        match rustix::net::bind(&socket, &address) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                rustix::net::bind(&socket, &address).map_err(failed("bind"))?;
            }
            Err(errno) => return Err(failed("bind")(errno)),
        }
        let status = rustix::fs::lstat(path).map_err(failed("stat"))?;
        let listener = Self::at(path, socket.into(), (status.st_dev, status.st_ino));
        group.map_or(Ok(()), |group| listener.open_to(group))?;
        rustix::net::listen(&listener.socket, BACKLOG).map_err(failed("listen"))?;
        Ok(listener)
    }

    /// Lets a group connect, beside the owner. Nobody else can at any moment: the group's part comes when it is that group's.
    pub fn open_to(&self, group: u32) -> Result<(), ListenerError> {
        let path = &self.path;
        let failed =
            |operation| move |errno: Errno| ListenerError::Io { path: path.clone(), operation, source: errno.into() };
        // Held by what it is: the path may lead elsewhere by the time that its rights are changed.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let place = rustix::fs::open(path, flags, Mode::empty()).map_err(failed("open"))?;
        let status = rustix::fs::fstat(&place).map_err(failed("stat"))?;
        if self.place.as_ref().map(|place| place.identity) != Some((status.st_dev, status.st_ino)) {
            return Err(failed("finding what was made here")(Errno::NOENT));
        }
        let name = format!("/proc/self/fd/{}", place.as_raw_fd());
        if status.st_gid != group {
            rustix::fs::chownat(CWD, &name, None, Some(Gid::from_raw(group)), AtFlags::empty()).map_err(failed(CHOWN))?;
        }
        let both = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP;
        if Mode::from_raw_mode(status.st_mode) != both {
            rustix::fs::chmodat(CWD, &name, both, AtFlags::empty()).map_err(failed("chmod"))?;
        }
        Ok(())
    }

    /// A socket that another process has bound to a path and left to us.
    pub fn resume(socket: OwnedFd, path: &Path) -> Result<Self, ListenerError> {
        let found = std::fs::symlink_metadata(path);
        let io = |operation| move |source| ListenerError::Io { path: path.to_owned(), operation, source };
        let found = found.map_err(io("stat"))?;
        let socket = UnixListener::from(socket);
        socket.set_nonblocking(true).map_err(io("set_nonblocking"))?;
        Ok(Self::at(path, socket, (found.dev(), found.ino())))
    }

    fn at(path: &Path, socket: UnixListener, identity: (u64, u64)) -> Self {
        let place = SocketPlace { path: path.to_owned(), identity };
        Self { socket, path: path.to_owned(), place: Some(place) }
    }

    /// Leaves the path to somebody who may remove files: this end goes where nobody may.
    pub fn take_place(&mut self) -> Option<SocketPlace> {
        self.place.take()
    }

    /// The next client, if one waits.
    pub fn accept(&self) -> Result<Option<UnixStream>, ListenerError> {
        loop {
            return match self.socket.accept() {
                Ok((stream, _)) => Ok(Some(stream)),
                Err(error) => match error.kind() {
                    std::io::ErrorKind::WouldBlock => Ok(None),
                    std::io::ErrorKind::Interrupted | std::io::ErrorKind::ConnectionAborted => continue,
                    _ => Err(ListenerError::Io { path: self.path.clone(), operation: "accept", source: error }),
                },
            };
        }
    }

    /// Gives the path up: from now on it may be another's. Whoever has connected stays.
    pub fn withdraw(&mut self) {
        drop(self.take_place());
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketPlace {
    fn drop(&mut self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.identity) {
            // Nothing could be done about a failure; the next bind replaces what is left.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket's path if connecting to it is refused: its process is gone.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenerError> {
    let io = |operation| move |source| ListenerError::Io { path: path.to_owned(), operation, source };
    let found = std::fs::symlink_metadata(path).map_err(io("stat"))?;
    if !found.file_type().is_socket() {
        return Err(ListenerError::NotASocket { path: path.to_owned() });
    }
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|errno| io("socket")(errno.into()))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(io("removing the old socket")),
        // EAGAIN: somebody listens and is busy.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenerError::InUse { path: path.to_owned() }),
        Err(errno) => Err(io("connecting to the old socket")(errno.into())),
    }
}
