//! The client's end of the socket: messages as bytes, right ones and wrong ones.
//!
//! It never blocks, for the server runs on the same thread: whoever waits for a reply lets the server have its turns.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use millrace_vfio_user::codec::{Command, HEADER_SIZE, Header, MAX_FDS};
use rustix::{
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags},
};
use zerocopy::{FromBytes, IntoBytes};

/// The server has closed the connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Closed;

/// A whole message from the server.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Reply {
    /// The errno, when the reply reports one.
    pub(crate) fn errno(&self) -> Option<Errno> {
        self.header.reply_error()
    }
}

/// The socket, and what was received of the next message.
pub(crate) struct Wire {
    stream: UnixStream,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    next_id: u16,
}

impl Wire {
    pub(crate) fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("the device listens");
        stream.set_nonblocking(true).expect("a socket can be made non-blocking");
        Self { stream, bytes: Vec::new(), fds: Vec::new(), next_id: 0 }
    }

    /// Header of a request with `payload` bytes.
    pub(crate) fn header(&mut self, command: Command, payload: usize, no_reply: bool) -> Header {
        self.next_id = self.next_id.wrapping_add(1);
        Header::request(self.next_id, command, payload, no_reply)
    }

    /// Sends as much as the socket takes: how much that was.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Closed> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "room for {} descriptors", fds.len());
        }
        match rustix::net::sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => Ok(sent),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Closed),
            Err(errno) => panic!("sendmsg: {errno}"),
        }
    }

    /// The next whole message, if it is there.
    pub(crate) fn receive(&mut self) -> Result<Option<Reply>, Closed> {
        loop {
            let size = Header::read_from_prefix(&self.bytes).map_or(HEADER_SIZE, |(header, _)| {
                let size = header.size as usize;
                assert!((HEADER_SIZE..=2 << 20).contains(&size), "the server sent a message of {size} bytes");
                size
            });
            if size > HEADER_SIZE && self.bytes.len() == size || size == HEADER_SIZE && self.is_bare() {
                let bytes = std::mem::take(&mut self.bytes);
                let (header, payload) = Header::read_from_prefix(&bytes).expect("a header");
                return Ok(Some(Reply { header, payload: payload.to_vec(), fds: std::mem::take(&mut self.fds) }));
            }
            let have = self.bytes.len();
            self.bytes.resize(size, 0);
            let received = self.receive_some(have)?;
            self.bytes.truncate(have + received.unwrap_or(0));
            if received.is_none() {
                return Ok(None);
            }
        }
    }

    fn is_bare(&self) -> bool {
        Header::read_from_bytes(&self.bytes).is_ok_and(|header| header.size as usize == HEADER_SIZE)
    }

    fn receive_some(&mut self, at: usize) -> Result<Option<usize>, Closed> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let room = &mut self.bytes[at..];
        let received =
            rustix::net::recvmsg(&self.stream, &mut [IoSliceMut::new(room)], &mut control, RecvFlags::CMSG_CLOEXEC);
        match received {
            Ok(received) if received.bytes == 0 => Err(Closed),
            Ok(received) => {
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(rights) = message {
                        self.fds.extend(rights);
                    }
                }
                Ok(Some(received.bytes))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(Errno::CONNRESET) => Err(Closed),
            Err(errno) => panic!("recvmsg: {errno}"),
        }
    }
}

/// A message as bytes.
pub(crate) fn message(header: &Header, parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = header.as_bytes().to_vec();
    for part in parts {
        bytes.extend_from_slice(part);
    }
    bytes
}
