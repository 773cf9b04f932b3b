//! Messages over a non-blocking unix socket: what is half received is kept, what cannot be sent waits.
//!
//! Descriptors belong to the first byte they were sent with, and a message's header is received by itself, so that they cannot
//! go to a neighbour. Memory is bounded: one message of at most [`MAX_PAYLOAD`] bytes comes in at a time, and nothing is
//! received while an answer waits to be taken.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use millrace_engine::closer::Received;
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};
use thiserror::Error;
use zerocopy::IntoBytes;

use super::message::{BadMessage, Header, MAX_FDS, MAX_PAYLOAD};

/// Descriptors that can come with one byte at all: those that there is no room for are closed by the kernel, in our call.
const MOST_FDS: usize = 253;

/// Why a connection ended.
#[derive(Debug, Error)]
pub(crate) enum TransportError {
    #[error("the front end closed the connection")]
    Closed,
    #[error(transparent)]
    Bad(#[from] BadMessage),
    #[error("a message with more than {MAX_FDS} file descriptors")]
    TooManyFds,
    #[error("{operation} on the socket: {errno}")]
    Io { operation: &'static str, errno: Errno },
}

/// A whole message.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<Received>,
}

/// The message being received.
#[derive(Default)]
struct Input {
    header: Header,
    header_filled: usize,
    payload: Vec<u8>,
    payload_filled: usize,
    fds: Vec<Received>,
}

/// An answer that the socket has not taken in full.
#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    sent: usize,
    fd: Option<OwnedFd>,
}

/// One connection.
pub(crate) struct Transport {
    /// Descriptors that nobody has received are closed with it.
    stream: Received,
    input: Input,
    output: Option<Output>,
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Transport {
    pub(crate) fn new(stream: UnixStream) -> std::io::Result<Self> {
        // The standard library's way is an ioctl, which shards do not have.
        rustix::fs::fcntl_setfl(&stream, rustix::fs::fcntl_getfl(&stream)? | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self { stream: Received::from(OwnedFd::from(stream)), input: Input::default(), output: None })
    }

    /// Whether an answer waits for the front end to read.
    pub(crate) fn is_stuck(&self) -> bool {
        self.output.is_some()
    }

    /// The next whole message; `None` when the rest of it is not there yet.
    pub(crate) fn receive(&mut self) -> Result<Option<Frame>, TransportError> {
        let Input { header, header_filled, payload, payload_filled, fds } = &mut self.input;
        while *header_filled < Header::SIZE {
            let Some(room) = header.as_mut_bytes().get_mut(*header_filled..) else { break };
            match receive_some(&self.stream, room, fds)? {
                None => return Ok(None),
                Some(count) => *header_filled += count,
            }
            if *header_filled == Header::SIZE {
                payload.clear();
                payload.resize(header.payload_size()?, 0);
            }
        }
        while *payload_filled < payload.len() {
            let Some(room) = payload.get_mut(*payload_filled..) else { break };
            match receive_some(&self.stream, room, fds)? {
                None => return Ok(None),
                Some(count) => *payload_filled += count,
            }
        }
        let Input { header, payload, fds, .. } = std::mem::take(&mut self.input);
        Ok(Some(Frame { header, payload, fds }))
    }

    /// Sends an answer, or keeps what the socket does not take for [`Self::flush`].
    pub(crate) fn send(&mut self, request: u32, payload: &[u8], fd: Option<OwnedFd>) -> Result<(), TransportError> {
        assert!(self.output.is_none(), "one answer at a time");
        assert!(payload.len() <= MAX_PAYLOAD, "an answer of our own is short");
        let header = Header::reply(request, payload.len());
        self.output = Some(Output { bytes: [header.as_bytes(), payload].concat(), sent: 0, fd });
        self.flush()
    }

    /// Sends what waits, as far as the socket takes it.
    pub(crate) fn flush(&mut self) -> Result<(), TransportError> {
        let Some(output) = &mut self.output else { return Ok(()) };
        while let Some(rest) = output.bytes.get(output.sent..).filter(|rest| !rest.is_empty()) {
            match send_some(self.stream.as_fd(), rest, output.fd.as_ref().map(AsFd::as_fd))? {
                0 => return Ok(()),
                sent => output.sent += sent,
            }
            // It went with the first byte.
            output.fd = None;
        }
        self.output = None;
        Ok(())
    }
}

/// One receive call. `None` when nothing is there.
fn receive_some(stream: &OwnedFd, room: &mut [u8], fds: &mut Vec<Received>) -> Result<Option<usize>, TransportError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(stream, &mut [IoSliceMut::new(room)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET) => return Err(TransportError::Closed),
            Err(errno) => return Err(TransportError::Io { operation: "recvmsg", errno }),
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights.map(Received::from));
        }
    }
    // What we had no numbers for was closed by the kernel: which descriptors are missing is unknown.
    if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
        return Err(TransportError::TooManyFds);
    }
    if received.bytes == 0 { Err(TransportError::Closed) } else { Ok(Some(received.bytes)) }
}

/// One send call; 0 when the socket is full.
fn send_some(stream: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<usize, TransportError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights: &[BorrowedFd<'_>] = fd.as_slice();
    if !rights.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(rights)), "the control buffer holds one descriptor");
    }
    loop {
        match sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => return Ok(sent),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(TransportError::Closed),
            Err(errno) => return Err(TransportError::Io { operation: "sendmsg", errno }),
        }
    }
}

/// The back end's own channel: we tell, and wait for no answer.
pub(crate) struct BackendChannel {
    fd: Received,
    /// Something could not be told yet.
    owed: bool,
}

impl BackendChannel {
    pub(crate) fn new(fd: Received) -> Self {
        Self { fd, owed: false }
    }

    /// Tells the front end that the device configuration has changed. When the channel is full, it is told later.
    pub(crate) fn config_changed(&mut self) -> Result<(), TransportError> {
        let header = Header::request(super::message::code::BACKEND_CONFIG_CHANGE);
        // A message this short is taken whole or not at all: the kernel does not split what fits into one buffer.
        self.owed = send_some(self.fd.as_fd(), header.as_bytes(), None)? == 0;
        Ok(())
    }

    /// Tries again what could not be told.
    pub(crate) fn retry(&mut self) -> Result<(), TransportError> {
        if self.owed { self.config_changed() } else { Ok(()) }
    }

    /// Whether something waits to be told.
    pub(crate) fn is_owed(&self) -> bool {
        self.owed
    }
}
