//! The front end's side of a vhost-user connection, no more of it than a driver of our own needs (QEMU, docs/interop/vhost-user.rst).

use std::{
    io::{self, IoSlice, Read},
    mem::MaybeUninit,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use thiserror::Error;

/// Largest answer in bytes.
const ANSWER: u32 = 4096;
/// Bytes of a disk's configuration that all have; the capacity is the first eight.
const CONFIGURATION: u8 = 60;

/// Requests.
pub mod code {
    /// VHOST_USER_GET_FEATURES.
    pub const GET_FEATURES: u32 = 1;
    /// VHOST_USER_SET_FEATURES.
    pub const SET_FEATURES: u32 = 2;
    /// VHOST_USER_SET_OWNER.
    pub const SET_OWNER: u32 = 3;
    /// VHOST_USER_SET_MEM_TABLE.
    pub const SET_MEM_TABLE: u32 = 5;
    /// VHOST_USER_SET_VRING_NUM.
    pub const SET_VRING_NUM: u32 = 8;
    /// VHOST_USER_SET_VRING_ADDR.
    pub const SET_VRING_ADDR: u32 = 9;
    /// VHOST_USER_SET_VRING_BASE.
    pub const SET_VRING_BASE: u32 = 10;
    /// VHOST_USER_SET_VRING_KICK.
    pub const SET_VRING_KICK: u32 = 12;
    /// VHOST_USER_SET_VRING_CALL.
    pub const SET_VRING_CALL: u32 = 13;
    /// VHOST_USER_GET_PROTOCOL_FEATURES.
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    /// VHOST_USER_SET_PROTOCOL_FEATURES.
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    /// VHOST_USER_SET_VRING_ENABLE.
    pub const SET_VRING_ENABLE: u32 = 18;
    /// VHOST_USER_GET_CONFIG.
    pub const GET_CONFIG: u32 = 24;
}

/// Why the back end could not be told or asked something.
#[derive(Debug, Error)]
#[error("{}: {what}", path.display())]
pub struct VhostUserError {
    path: PathBuf,
    what: &'static str,
    #[source]
    source: io::Error,
}

/// A connection to a back end.
pub struct VhostUser {
    stream: UnixStream,
    path: PathBuf,
}

impl VhostUser {
    /// Connects; `timeout` bounds every call.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, VhostUserError> {
        let failed = |source| VhostUserError { path: path.to_owned(), what: "connecting", source };
        let stream = UnixStream::connect(path).map_err(failed)?;
        stream.set_read_timeout(Some(timeout)).map_err(failed)?;
        stream.set_write_timeout(Some(timeout)).map_err(failed)?;
        Ok(Self { stream, path: path.to_owned() })
    }

    /// Sends a message of 64-bit words, and a descriptor with it.
    pub fn tell(&mut self, request: u32, words: &[u64], fd: Option<BorrowedFd<'_>>) -> Result<(), VhostUserError> {
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.send(request, &payload, fd)
    }

    /// Asks for a number.
    pub fn ask(&mut self, request: u32) -> Result<u64, VhostUserError> {
        self.send(request, &[], None)?;
        let answer = self.answer()?;
        let number = answer.try_into().map(u64::from_le_bytes);
        number.map_err(|_| self.failed("asking for a number", io::ErrorKind::InvalidData.into()))
    }

    /// Shares one region: where it is for the guest, where it is for its monitor, its size, and its file, from the beginning.
    pub fn share(&mut self, guest: u64, user: u64, size: u64, file: BorrowedFd<'_>) -> Result<(), VhostUserError> {
        self.tell(code::SET_MEM_TABLE, &[1, guest, size, user, 0], Some(file))
    }

    /// Waits for an answer: all that was said before has been heard then.
    pub fn check(&mut self) -> Result<(), VhostUserError> {
        self.ask(code::GET_FEATURES).map(drop)
    }

    /// Whether the back end has hung up. Does not wait.
    pub fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().intersects(gone)
    }

    /// A disk's size in sectors, from its configuration.
    pub(crate) fn capacity(&mut self) -> Result<u64, VhostUserError> {
        // Offset 0, the size, flags 0; then room for what is asked for.
        let mut payload = [0; 12 + CONFIGURATION as usize];
        payload[4] = CONFIGURATION;
        self.send(code::GET_CONFIG, &payload, None)?;
        let answer = self.answer()?;
        let capacity = answer.get(12..20).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
        capacity.ok_or_else(|| self.failed("reading its configuration", io::ErrorKind::InvalidData.into()))
    }

    fn send(&mut self, request: u32, payload: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), VhostUserError> {
        // Version 1, no flags.
        let mut bytes: Vec<u8> = [request, 1, payload.len() as u32].into_iter().flat_map(u32::to_le_bytes).collect();
        bytes.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = fd.as_ref().is_none_or(|fd| control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd))));
        assert!(fits, "there is room for one descriptor");
        let sent = sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        sent.map(drop).map_err(|errno| self.failed("sending a message", errno.into()))
    }

    /// An answer's payload.
    fn answer(&mut self) -> Result<Vec<u8>, VhostUserError> {
        let mut header = [0; 12];
        let read = self.stream.read_exact(&mut header);
        read.map_err(|source| self.failed("waiting for an answer", source))?;
        let len = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        if len > ANSWER {
            return Err(self.failed("waiting for an answer", io::ErrorKind::InvalidData.into()));
        }
        let mut payload = vec![0; len as usize];
        let read = self.stream.read_exact(&mut payload);
        read.map_err(|source| self.failed("waiting for an answer", source))?;
        Ok(payload)
    }

    fn failed(&self, what: &'static str, source: io::Error) -> VhostUserError {
        VhostUserError { path: self.path.clone(), what, source }
    }
}
