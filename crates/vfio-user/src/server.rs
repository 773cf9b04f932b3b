//! The server's end of one connection: negotiation, strict order, deferred replies, requests of our own.

mod dispatch;
mod feature;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::codec::{Capabilities, Command, Header, Kind, MAX_FDS, MAX_TRANSFER, ProtocolError, VersionError, wire};
use crate::device::Device;
use crate::transport::{Frame, Keep, Transport, TransportError};

/// While this many bytes wait for a client that does not read, no further request of it is handled.
const OUTPUT_HIGH: usize = 256 * 1024;
/// The same for file descriptors: the process has few of them for all its clients.
const OUTPUT_FDS: usize = MAX_FDS;
/// Requests of our own that may be unanswered.
const MAX_OUTSTANDING: usize = 64;
/// Bytes of requests of our own that may wait for the socket.
const MAX_OUTSTANDING_BYTES: usize = 4 << 20;
/// Requests that may be read past a deferred one, in search of replies.
const MAX_BACKLOG: usize = 1024;
/// Bytes of such requests.
const MAX_BACKLOG_BYTES: usize = 4 << 20;
/// File descriptors of such requests.
const MAX_BACKLOG_FDS: usize = 4 * MAX_FDS;

/// Why a connection is over. Drop it; then unmap the client's memory and forget its event fds.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The socket or the framing.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// No common version; the client was told.
    #[error("version negotiation failed")]
    Negotiation(#[from] VersionError),
    /// A reply to nothing, or of another shape than its request wants.
    #[error("a reply (id {id}, command {command}, {length} bytes) that was not asked for")]
    UnexpectedReply {
        /// Message id.
        id: u16,
        /// Command number.
        command: u16,
        /// Bytes of payload.
        length: usize,
    },
    /// The client sent far too much while a reply of its was awaited.
    #[error("{messages} requests pipelined behind one that is not finished")]
    Flood {
        /// How many.
        messages: usize,
    },
}

impl ConnectionError {
    /// True when the client just went away, between two messages.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Transport(TransportError::Closed))
    }
}

/// Why a request to the client could not be made.
#[derive(Debug, thiserror::Error)]
pub enum DmaError {
    /// Before the version is negotiated, or on a connection that outlives its server.
    #[error("the version is not negotiated yet, or the connection outlives its server")]
    NotReady,
    /// Empty, or more than the client moves with one message: split it.
    #[error("{count} bytes; the client moves 1 to {limit} with one message")]
    Size {
        /// Bytes asked for.
        count: usize,
        /// Bytes that are possible.
        limit: u32,
    },
    /// Too many requests are unanswered, or the socket is full. Try again after the next reply.
    #[error("too many requests to the client are unanswered")]
    Busy,
    /// The connection is over.
    #[error(transparent)]
    Connection(#[from] TransportError),
}

/// What [`Connection::serve`] came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing more to do until the socket says so.
    Idle,
    /// The budget is used up: call again.
    More,
    /// A request waits for [`Connection::finish_deferred`].
    Deferred,
}

/// Names a request to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(u16);

/// What [`Connection::receive`] found.
#[derive(Debug)]
pub enum Message {
    /// A request of the client.
    Request(Frame),
    /// The answer to a request to the client.
    Reply(Reply),
}

/// The answer to a request to the client.
#[derive(Debug)]
pub struct Reply {
    id: RequestId,
    error: Option<Errno>,
    payload: Vec<u8>,
}

impl Reply {
    /// Which request is answered.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The bytes read (none for a write), or what went wrong.
    pub fn result(&self) -> Result<&[u8], Errno> {
        match self.error {
            Some(errno) => Err(errno),
            None => Ok(self.payload.get(size_of::<wire::DmaAccess>()..).unwrap_or_default()),
        }
    }
}

/// A request whose answer comes later.
struct Deferred {
    header: Header,
    /// What the answer carries if all goes well.
    payload: Vec<u8>,
}

/// A request of our own without an answer.
struct Outstanding {
    id: u16,
    command: Command,
    address: u64,
    count: u32,
}

/// One client, served by one thread. Never blocks. Dropping it disconnects the client.
pub struct Connection {
    transport: Transport,
    /// The client's, once negotiated.
    capabilities: Option<Capabilities>,
    deferred: Option<Deferred>,
    /// Requests that were read past a deferred one.
    backlog: VecDeque<Frame>,
    backlog_bytes: usize,
    backlog_fds: usize,
    outstanding: Vec<Outstanding>,
    next_id: u16,
    /// Where replies with data are built.
    scratch: Vec<u8>,
    rejection: Option<ProtocolError>,
    /// What a server before this one was handling.
    resumed: Option<Resumed>,
    /// The request being handled may have been handled before.
    again: bool,
}

/// What the server before this one was doing when it ended, as its [`Keep`] remembered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// The client's, once negotiated.
    pub capabilities: Option<Capabilities>,
    /// The request being handled: its message id and command.
    pub handling: Option<(u16, u16)>,
    /// Whether its reply went out.
    pub replied: bool,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.transport.as_fd()
    }
}

impl Connection {
    /// Takes a client's socket; it becomes non-blocking.
    pub fn new(stream: UnixStream) -> Result<Self, ConnectionError> {
        Ok(Self::with(Transport::new(stream, None)?, Resumed::default()))
    }

    /// As [`Self::new`], for a connection that outlives this process; what a server before this one was doing is gone on with.
    /// A client that numbers its messages, as all do, sees each request answered exactly once.
    pub fn kept(stream: UnixStream, keep: Rc<dyn Keep>, resumed: Resumed) -> Result<Self, ConnectionError> {
        Ok(Self::with(Transport::new(stream, Some(keep))?, resumed))
    }

    /// Has `close` close what the client hands in and is not kept, and the socket, which may have such things in it: that can take as long as
    /// the client likes. Without this it is done at once.
    pub fn closing_with(self, close: fn(OwnedFd)) -> Self {
        Self { transport: self.transport.closing_with(close), ..self }
    }

    fn with(transport: Transport, resumed: Resumed) -> Self {
        Self {
            transport,
            capabilities: resumed.capabilities.clone(),
            again: false,
            resumed: resumed.handling.is_some().then_some(resumed),
            deferred: None,
            backlog: VecDeque::new(),
            backlog_bytes: 0,
            backlog_fds: 0,
            outstanding: Vec::new(),
            next_id: 0,
            scratch: Vec::new(),
            rejection: None,
        }
    }

    /// Sends what waits, then handles up to `budget` messages. To be called when the socket is readable or writable,
    /// after [`Self::finish_deferred`], and again after [`Progress::More`].
    pub fn serve(&mut self, device: &mut dyn Device, budget: usize) -> Result<Progress, ConnectionError> {
        for _ in 0..budget {
            match self.receive()? {
                Some(message) => self.dispatch(message, device)?,
                None if self.deferred.is_some() => return Ok(Progress::Deferred),
                None => return Ok(Progress::Idle),
            }
        }
        Ok(Progress::More)
    }

    /// The next message, if a whole one is there and may be handled now: no request while one is deferred or while
    /// the client does not take its replies.
    pub fn receive(&mut self) -> Result<Option<Message>, ConnectionError> {
        self.transport.flush()?;
        if self.takes_requests()
            && let Some(frame) = self.backlog.pop_front()
        {
            self.backlog_bytes -= frame.payload.len();
            self.backlog_fds -= frame.fds.len();
            return Ok(Some(Message::Request(frame)));
        }
        while self.wants_read() {
            let Some(frame) = self.transport.receive()? else { break };
            if self.is_over(&frame.header)? {
                continue;
            }
            match frame.header.kind().map_err(TransportError::from)? {
                Kind::Reply => return self.match_reply(frame).map(|reply| Some(Message::Reply(reply))),
                Kind::Request if self.takes_requests() => return Ok(Some(Message::Request(frame))),
                Kind::Request => self.put_off(frame)?,
            }
        }
        Ok(None)
    }

    /// Whether a request was answered by the server before this one, which had no time to take it out of the socket.
    fn is_over(&mut self, header: &Header) -> Result<bool, ConnectionError> {
        let Some(resumed) = self.resumed.take() else { return Ok(false) };
        let same = resumed.handling == Some((header.id, header.command));
        // Whether a request that wants no reply was taken out tells the socket alone; it is handled again if it was not.
        self.again = same && !resumed.replied;
        let over = same && resumed.replied;
        if over {
            self.transport.consume(false)?;
        }
        if !self.again
            && let Some(keep) = self.transport.keep()
        {
            keep.done();
        }
        Ok(over)
    }

    /// Whether the request being handled may have been handled before, by a server that ended meanwhile: it must come to the same.
    pub fn is_again(&self) -> bool {
        self.again
    }

    /// Whether part of a message is there, and the rest is to be looked for by and by: the socket's readability says nothing.
    pub fn has_part(&self) -> bool {
        self.transport.has_part() && self.deferred.is_none()
    }

    /// The request was answered, if it wants to be: it goes. Whether the device holds what came with it.
    fn finish_request(&mut self, held: bool) -> Result<(), ConnectionError> {
        self.again = false;
        if self.transport.keep().is_some() {
            self.transport.consume(held)?;
        }
        if let Some(keep) = self.transport.keep() {
            keep.done();
        }
        Ok(())
    }

    /// Handles a message from [`Self::receive`].
    pub fn dispatch(&mut self, message: Message, device: &mut dyn Device) -> Result<(), ConnectionError> {
        match message {
            Message::Reply(reply) => {
                device.dma_reply(reply.id, reply.result());
                self.transport.recycle(reply.payload);
                Ok(())
            }
            Message::Request(frame) => {
                assert!(self.deferred.is_none(), "a request is handled while another is deferred");
                self.request(frame, device)
            }
        }
    }

    /// Answers the deferred request. Requests that came after it may be waiting inside the connection: call
    /// [`Self::serve`] next.
    ///
    /// # Panics
    /// If none is deferred.
    pub fn finish_deferred(&mut self, result: Result<(), Errno>) -> Result<(), ConnectionError> {
        let deferred = self.deferred.take().expect("no request is deferred");
        match result {
            Ok(()) => self.reply(&deferred.header, [&deferred.payload, &[]], &[]),
            Err(errno) => self.reply_error(&deferred.header, errno),
        }?;
        self.finish_request(false)
    }

    /// True while a request waits for [`Self::finish_deferred`].
    pub fn is_deferred(&self) -> bool {
        self.deferred.is_some()
    }

    /// Sends what waits, as far as the socket takes it.
    pub fn flush(&mut self) -> Result<(), ConnectionError> {
        Ok(self.transport.flush()?)
    }

    /// Whether readability of the socket matters now. It does not while a request is deferred (unless the client owes
    /// us replies) or while the client does not take its replies; a client that goes away then is noticed afterwards.
    pub fn wants_read(&self) -> bool {
        !self.outstanding.is_empty() || (self.backlog.is_empty() && self.takes_requests())
    }

    fn takes_requests(&self) -> bool {
        self.deferred.is_none() && self.transport.output_bytes() < OUTPUT_HIGH && self.transport.output_fds() < OUTPUT_FDS
    }

    /// Whether writability of the socket matters now.
    pub fn wants_write(&self) -> bool {
        self.transport.output_bytes() > 0
    }

    /// What the client can do, once the version is negotiated.
    pub fn capabilities(&self) -> Option<&Capabilities> {
        self.capabilities.as_ref()
    }

    /// The latest request that was refused for its form, for a log; a second call returns `None` until there is
    /// another.
    pub fn take_rejection(&mut self) -> Option<ProtocolError> {
        self.rejection.take()
    }

    /// Asks the client for its memory. [`Device::dma_reply`] gets the answer.
    pub fn dma_read(&mut self, address: u64, count: u32) -> Result<RequestId, DmaError> {
        self.ask(Command::DmaRead, address, count as usize, &[])
    }

    /// Asks the client to change its memory. [`Device::dma_reply`] gets the answer.
    pub fn dma_write(&mut self, address: u64, data: &[u8]) -> Result<RequestId, DmaError> {
        self.ask(Command::DmaWrite, address, data.len(), data)
    }

    fn ask(&mut self, command: Command, address: u64, count: usize, data: &[u8]) -> Result<RequestId, DmaError> {
        let limit = self.capabilities.as_ref().ok_or(DmaError::NotReady)?.max_data_xfer_size.min(MAX_TRANSFER);
        if self.transport.keep().is_some() {
            // Its answer would come behind requests that have to stay where they are.
            return Err(DmaError::NotReady);
        }
        if count == 0 || count > limit as usize {
            return Err(DmaError::Size { count, limit });
        }
        if self.outstanding.len() >= MAX_OUTSTANDING || self.transport.output_bytes() >= MAX_OUTSTANDING_BYTES {
            return Err(DmaError::Busy);
        }
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let access = wire::DmaAccess { address, count: count as u64 };
        let header = Header::request(id, command, size_of_val(&access) + data.len(), false);
        self.transport.send(&header, [access.as_bytes(), data], &[])?;
        self.outstanding.push(Outstanding { id, command, address, count: count as u32 });
        Ok(RequestId(id))
    }

    /// Keeps a request for later. Bounded: a client that does not answer but goes on asking loses the connection.
    fn put_off(&mut self, frame: Frame) -> Result<(), ConnectionError> {
        self.backlog_bytes += frame.payload.len();
        self.backlog_fds += frame.fds.len();
        self.backlog.push_back(frame);
        let too_large = self.backlog_bytes > MAX_BACKLOG_BYTES || self.backlog_fds > MAX_BACKLOG_FDS;
        if too_large || self.backlog.len() > MAX_BACKLOG {
            return Err(ConnectionError::Flood { messages: self.backlog.len() });
        }
        Ok(())
    }

    fn match_reply(&mut self, frame: Frame) -> Result<Reply, ConnectionError> {
        let Frame { header, payload, fds: _ } = frame;
        let unexpected = ConnectionError::UnexpectedReply { id: header.id, command: header.command, length: payload.len() };
        let position =
            self.outstanding.iter().position(|request| request.id == header.id && request.command as u16 == header.command);
        let Some(position) = position else {
            return Err(unexpected);
        };
        let request = self.outstanding.swap_remove(position);
        let error = header.reply_error();
        if error.is_none() && request.command == Command::DmaRead {
            let matches = wire::DmaAccess::read_from_prefix(&payload).is_ok_and(|(access, data)| {
                access.address == request.address
                    && access.count == u64::from(request.count)
                    && data.len() == request.count as usize
            });
            if !matches {
                return Err(unexpected);
            }
        }
        // What answers a write differs between clients (QEMU sends no payload); nobody needs it.
        let payload = if request.command == Command::DmaRead { payload } else { Vec::new() };
        Ok(Reply { id: RequestId(header.id), error, payload })
    }

    fn reply(&mut self, request: &Header, payload: [&[u8]; 2], fds: &[BorrowedFd<'_>]) -> Result<(), ConnectionError> {
        if request.no_reply() {
            return Ok(());
        }
        let header = Header::reply_to(request, payload[0].len() + payload[1].len());
        Ok(self.transport.send(&header, payload, fds)?)
    }

    fn reply_error(&mut self, request: &Header, errno: Errno) -> Result<(), ConnectionError> {
        if request.no_reply() {
            return Ok(());
        }
        Ok(self.transport.send(&Header::error_to(request, errno), [&[], &[]], &[])?)
    }
}
