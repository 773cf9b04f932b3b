//! Messages over a non-blocking unix socket: keeps what is half received and half sent.
//!
//! File descriptors belong to the bytes they were sent with. The kernel delivers them with the first of these bytes,
//! and may glue the end of one message to the start of the next unless told where to stop; so no receive call here
//! asks for bytes beyond the header, or beyond the message, that it is in.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::codec::{FrameError, HEADER_SIZE, Header, MAX_FDS};
use crate::received::Received;

/// A payload grows by at most this many bytes ahead of what was received: a claimed size alone costs no memory.
const GROWTH: usize = 64 * 1024;
/// Bytes that are looked at first, where a connection outlives its server.
const PEEK: usize = 512;
/// The most descriptors that Linux lets one message carry: the kernel closes those that find no room, on the thread that receives.
const MOST_FDS: usize = 253;
/// A buffer larger than this is not kept for the next message.
const KEEP: usize = 64 * 1024;

/// The longest message of a connection that outlives its server: it has to fit the socket's buffer as a whole.
const KEPT_MESSAGE: usize = 64 * 1024;
/// Bytes that such a message moves at most, besides its heads.
pub(crate) const KEPT_TRANSFER: u32 = 60 * 1024;

/// Makes a connection outlive the process that serves it, by what is remembered elsewhere.
///
/// A request stays in the socket until its reply is out: whoever serves the connection next finds it there. The calls come in this
/// order: `begin`, (`negotiated`), `reply` unless none is wanted, then, when the request was taken out of the socket, `done`.
pub trait Keep {
    /// A request is about to be handled; from now on it may have had an effect.
    fn begin(&self, id: u16, command: u16);

    /// What the client can do: known before the reply to VERSION.
    fn negotiated(&self, capabilities: &crate::Capabilities);

    /// Sends a reply, exactly once, whatever happens to this process afterwards.
    fn reply(&self, parts: &[&[u8]; 3], fds: &[BorrowedFd<'_>]) -> Result<(), Errno>;

    /// The request is over, and out of the socket.
    fn done(&self);
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The peer closed the connection, between two messages.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer closed the connection inside a message.
    #[error("the peer closed the connection inside a message, {received} bytes into it")]
    Truncated {
        /// Bytes of the message that came.
        received: usize,
    },
    /// The stream cannot be followed any further.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// More file descriptors than one message may carry.
    #[error("a message with more than {MAX_FDS} file descriptors")]
    TooManyFds,
    /// The kernel has left out what came with a message.
    #[error("a message came without its file descriptors: this process has as many as it may")]
    NoDescriptors,
    /// More than fits the socket's buffer, where a message must stay until it is answered.
    #[error("a message of {size} bytes, where at most {KEPT_MESSAGE} are possible")]
    TooLong {
        /// Bytes of the message.
        size: usize,
    },
    /// The socket failed.
    #[error("{operation} on the socket failed")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// How it failed.
        #[source]
        errno: Errno,
    },
}

/// A whole message: its header is consistent, its payload has the announced length.
#[derive(Debug)]
pub struct Frame {
    /// The header.
    pub header: Header,
    /// What follows the header.
    pub payload: Vec<u8>,
    /// What came along.
    pub fds: Vec<Received>,
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

/// A message, or the rest of one, that the socket did not take yet.
struct Pending {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

/// A connection that outlives its server.
struct Kept {
    keep: Rc<dyn Keep>,
    /// Bytes of the request that was peeked and is still in the socket.
    peeked: usize,
    /// Where they go when they are taken out.
    room: Vec<u8>,
}

pub(crate) struct Transport {
    /// It is closed as what the peer hands in is: descriptors may lie in it, unread.
    stream: Received,
    kept: Option<Kept>,
    input: Input,
    output: VecDeque<Pending>,
    output_bytes: usize,
    output_fds: usize,
    spare: Vec<u8>,
}

/// The standard library's way is an ioctl, which shards do not have.
fn do_not_block(stream: &UnixStream) -> Result<(), Errno> {
    rustix::fs::fcntl_setfl(stream, rustix::fs::fcntl_getfl(stream)? | rustix::fs::OFlags::NONBLOCK)
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Transport {
    pub(crate) fn new(stream: UnixStream, keep: Option<Rc<dyn Keep>>) -> Result<Self, TransportError> {
        do_not_block(&stream).map_err(|errno| TransportError::Io { operation: "fcntl", errno })?;
        Ok(Self {
            stream: Received::from(OwnedFd::from(stream)),
            kept: keep.map(|keep| Kept { keep, peeked: 0, room: vec![0; PEEK] }),
            input: Input::default(),
            output: VecDeque::new(),
            output_bytes: 0,
            output_fds: 0,
            spare: Vec::new(),
        })
    }

    /// Has `close` see to the socket and to what the peer hands in.
    pub(crate) fn closing_with(self, close: fn(OwnedFd)) -> Self {
        Self { stream: Received::new(self.stream.into_inner(), close), ..self }
    }

    /// Bytes that wait for the socket.
    pub(crate) fn output_bytes(&self) -> usize {
        self.output_bytes
    }

    /// File descriptors that wait for the socket.
    pub(crate) fn output_fds(&self) -> usize {
        self.output_fds
    }

    #[cfg(test)]
    pub(crate) fn input_capacity(&self) -> usize {
        self.input.payload.capacity()
    }

    /// Gives a payload's memory back for the next message.
    pub(crate) fn recycle(&mut self, mut payload: Vec<u8>) {
        if payload.capacity() <= KEEP && payload.capacity() > self.spare.capacity() {
            payload.clear();
            self.spare = payload;
        }
    }

    /// The connection's keeper, if it outlives its server.
    pub(crate) fn keep(&self) -> Option<&Rc<dyn Keep>> {
        self.kept.as_ref().map(|kept| &kept.keep)
    }

    /// Whether part of a message is in the socket, which stays readable without being whole.
    pub(crate) fn has_part(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.peeked > 0)
    }

    /// Looks at the next whole message, and leaves it in the socket. Behind part of one the socket never ends, whatever becomes of the peer.
    fn peek(&mut self) -> Result<Option<Frame>, TransportError> {
        let found = self.peek_whole()?;
        if found.is_some() || !self.has_part() || !has_hung_up(&self.stream) {
            return Ok(found);
        }
        // The rest may have come in between.
        let received = self.kept.as_ref().map_or(0, |kept| kept.peeked);
        self.peek_whole()?.map(Some).ok_or(TransportError::Truncated { received })
    }

    fn peek_whole(&mut self) -> Result<Option<Frame>, TransportError> {
        if let Some(kept) = &mut self.kept {
            kept.peeked = 0;
        }
        let mut payload = std::mem::take(&mut self.spare);
        payload.resize(PEEK.max(payload.len()), 0);
        let (header, count, has_fds) = loop {
            let Some((count, has_fds)) = receive_bytes(&self.stream, &mut payload, RecvFlags::PEEK)? else {
                return Ok(None);
            };
            if let Some(kept) = &mut self.kept {
                kept.peeked = count;
            }
            let Ok((header, _)) = Header::read_from_prefix(payload.get(..count).unwrap_or_default()) else {
                return if count == 0 { Err(TransportError::Closed) } else { Ok(None) };
            };
            header.kind()?;
            let size = HEADER_SIZE + header.payload_size();
            if size > KEPT_MESSAGE {
                return Err(TransportError::TooLong { size });
            }
            if payload.len() > size {
                break (header, count, has_fds);
            }
            payload.resize(size + 1, 0);
        };
        let total = HEADER_SIZE + header.payload_size();
        payload.truncate(total);
        if count < total {
            return Ok(None);
        }
        let mut fds = Vec::new();
        // A look ends behind the first bytes that came with descriptors, also when it would take fewer: they are this message's only if
        // nothing of another was seen. (Clients send a message with descriptors in one piece, by itself.)
        if has_fds && count == total && receive_some(&self.stream, &mut payload, &mut fds, RecvFlags::PEEK)? != Some(total) {
            return Ok(None);
        }
        if let Some(kept) = &mut self.kept {
            kept.peeked = total;
        }
        payload.drain(..HEADER_SIZE);
        Ok(Some(Frame { header, payload, fds }))
    }

    /// Takes the request that was peeked out of the socket: it was answered.
    ///
    /// With one call, which no signal cuts in two, as all of it is there: whoever goes on after us must not find a part.
    ///
    /// Its descriptors come again with it. What is `held` by whoever handled it, by a mapping at least, may end in the call, for it is not the
    /// last of its kind; what is not is closed as everything of the peer's.
    pub(crate) fn consume(&mut self, held: bool) -> Result<(), TransportError> {
        let Some(kept) = &mut self.kept else { return Ok(()) };
        let size = std::mem::take(&mut kept.peeked);
        if size == 0 {
            return Ok(());
        }
        // Bounded by KEPT_MESSAGE.
        kept.room.resize(size.max(kept.room.len()), 0);
        let (room, _) = kept.room.split_at_mut(size);
        let taken = if held {
            receive_bytes(&self.stream, room, RecvFlags::empty())?.map(|(count, _)| count)
        } else {
            receive_some(&self.stream, room, &mut Vec::new(), RecvFlags::empty())?
        };
        match taken {
            Some(count) if count == size => Ok(()),
            count => Err(TransportError::Truncated { received: count.unwrap_or(0) }),
        }
    }

    /// The next whole message, or `None` when the rest of it is not there yet.
    pub(crate) fn receive(&mut self) -> Result<Option<Frame>, TransportError> {
        if self.kept.is_some() {
            return self.peek();
        }
        while self.input.header_filled < HEADER_SIZE {
            let Input { header, header_filled, fds, .. } = &mut self.input;
            let (_, room) = header.as_mut_bytes().split_at_mut(*header_filled);
            match receive_some(&self.stream, room, fds, RecvFlags::empty())? {
                None => return Ok(None),
                Some(0) if *header_filled == 0 => return Err(TransportError::Closed),
                Some(0) => return Err(TransportError::Truncated { received: *header_filled }),
                Some(count) => *header_filled += count,
            }
            if *header_filled == HEADER_SIZE {
                header.kind()?;
                self.input.payload = std::mem::take(&mut self.spare);
            }
        }
        let total = self.input.header.payload_size();
        while self.input.payload_filled < total {
            let Input { payload, payload_filled, fds, .. } = &mut self.input;
            if payload.len() == *payload_filled {
                payload.resize(total.min(*payload_filled + GROWTH), 0);
            }
            let (_, room) = payload.split_at_mut(*payload_filled);
            match receive_some(&self.stream, room, fds, RecvFlags::empty())? {
                None => return Ok(None),
                Some(0) => return Err(TransportError::Truncated { received: HEADER_SIZE + *payload_filled }),
                Some(count) => *payload_filled += count,
            }
        }
        let Input { header, payload, fds, .. } = std::mem::take(&mut self.input);
        Ok(Some(Frame { header, payload, fds }))
    }

    /// Sends a message, or keeps what the socket does not take for [`Self::flush`]. Keeping `fds` duplicates them.
    pub(crate) fn send(
        &mut self,
        header: &Header,
        payload: [&[u8]; 2],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), TransportError> {
        let parts = [header.as_bytes(), payload[0], payload[1]];
        let total: usize = parts.iter().map(|part| part.len()).sum();
        assert_eq!(total, header.size as usize, "a message of our own has the wrong size");
        if let Some(kept) = &self.kept {
            return kept.keep.reply(&parts, fds).map_err(|errno| TransportError::Io { operation: "reply", errno });
        }
        let sent = if self.output.is_empty() { send_some(&self.stream, &parts, fds)? } else { 0 };
        if sent == total {
            return Ok(());
        }
        let mut bytes = Vec::with_capacity(total - sent);
        let mut skip = sent;
        for part in parts {
            let (_, rest) = part.split_at(skip.min(part.len()));
            skip -= part.len() - rest.len();
            bytes.extend_from_slice(rest);
        }
        let mut kept = Vec::new();
        // Descriptors travel with the first byte.
        if sent == 0 {
            for fd in fds {
                kept.push(fd.try_clone_to_owned().map_err(|error| TransportError::Io {
                    operation: "dup",
                    errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
                })?);
            }
        }
        self.output_bytes += bytes.len();
        self.output_fds += kept.len();
        self.output.push_back(Pending { bytes, sent: 0, fds: kept });
        Ok(())
    }

    /// Sends what is kept, as far as the socket takes it.
    pub(crate) fn flush(&mut self) -> Result<(), TransportError> {
        while let Some(pending) = self.output.front_mut() {
            let (_, rest) = pending.bytes.split_at(pending.sent);
            let fds: Vec<_> = pending.fds.iter().map(AsFd::as_fd).collect();
            let sent = send_some(&self.stream, &[rest, &[], &[]], &fds)?;
            if sent == 0 {
                break;
            }
            self.output_fds -= pending.fds.drain(..).len();
            pending.sent += sent;
            self.output_bytes -= sent;
            if pending.sent == pending.bytes.len() {
                self.output.pop_front();
            }
        }
        Ok(())
    }
}

/// Whether the peer sends no more, or is gone.
fn has_hung_up(stream: &OwnedFd) -> bool {
    let flags = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut ends = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut ends, Some(&Timespec::default())).is_ok_and(|count| count > 0) && ends[0].revents().intersects(flags)
}

/// One receive call without room for descriptors. `None` when nothing is there; whether descriptors are with it.
fn receive_bytes(stream: &OwnedFd, room: &mut [u8], flags: RecvFlags) -> Result<Option<(usize, bool)>, TransportError> {
    loop {
        let mut no_control = RecvAncillaryBuffer::default();
        match recvmsg(stream, &mut [IoSliceMut::new(room)], &mut no_control, flags) {
            Ok(received) => return Ok(Some((received.bytes, received.flags.contains(ReturnFlags::CTRUNC)))),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET) => return Ok(Some((0, false))),
            Err(errno) => return Err(TransportError::Io { operation: "recvmsg", errno }),
        }
    }
}

/// One receive call. `None` when nothing is there, 0 when the peer has closed.
fn receive_some(
    stream: &Received,
    room: &mut [u8],
    fds: &mut Vec<Received>,
    flags: RecvFlags,
) -> Result<Option<usize>, TransportError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&**stream, &mut [IoSliceMut::new(room)], &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET) => return Ok(Some(0)),
            Err(errno) => return Err(TransportError::Io { operation: "recvmsg", errno }),
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights.map(|fd| stream.likewise(fd)));
        }
    }
    if fds.len() > MAX_FDS {
        return Err(TransportError::TooManyFds);
    }
    // There was room for all that a message can carry, so this process has no numbers for them. Which of them are missing is unknown.
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(TransportError::NoDescriptors);
    }
    Ok(Some(received.bytes))
}

/// One send call; 0 when the socket is full.
fn send_some(stream: &OwnedFd, parts: &[&[u8]; 3], fds: &[BorrowedFd<'_>]) -> Result<usize, TransportError> {
    assert!(fds.len() <= MAX_FDS, "a message of our own has {} file descriptors", fds.len());
    let slices = parts.map(IoSlice::new);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "the control buffer holds {MAX_FDS} file descriptors");
    }
    loop {
        match sendmsg(stream, &slices, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => return Ok(sent),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(0),
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(TransportError::Closed),
            Err(errno) => return Err(TransportError::Io { operation: "sendmsg", errno }),
        }
    }
}
