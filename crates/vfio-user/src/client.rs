//! A blocking client: what a test, the benchmark and the user-level driver speak.
//!
//! One request at a time; while its reply is awaited, the server's own requests for memory are answered.

mod memory;
mod migration;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

pub use memory::ClientMemory;

use crate::codec::{self, Capabilities, Command, Header, Kind, MAX_FDS, MAX_TRANSFER, RegionReplyError, VersionError, wire};
use crate::device::{DeviceInfo, DmaUnmap, IrqAction, IrqFlags, IrqInfo, MmapArea, RegionFlags};
use crate::received::Received;
use crate::transport::{Frame, Transport, TransportError};

/// The most bytes of region capabilities that are asked for.
const MAX_REGION_REPLY: u32 = 64 * 1024;

/// Why a call to the server failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers on the path.
    #[error("{}: cannot connect", path.display())]
    Connect {
        /// The socket's path.
        path: PathBuf,
        /// How it failed.
        #[source]
        source: std::io::Error,
    },
    /// The socket or the framing.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// No common version.
    #[error("version negotiation failed")]
    Negotiation(#[from] VersionError),
    /// The server refused.
    #[error("the server refuses {command:?}")]
    Refused {
        /// What was asked.
        command: Command,
        /// The server's error.
        #[source]
        errno: Errno,
    },
    /// No reply in time. The connection cannot be used any more: a late reply would be taken for another's.
    #[error("no reply to {command:?} within {timeout:?}")]
    Timeout {
        /// What was asked.
        command: Command,
        /// How long it was waited for.
        timeout: Duration,
    },
    /// An earlier call timed out.
    #[error("the connection was given up after an earlier failure")]
    GivenUp,
    /// A reply that does not fit its request.
    #[error("a reply to {command:?} that makes no sense: {detail}")]
    BadReply {
        /// What was asked.
        command: Command,
        /// What is wrong.
        detail: &'static str,
    },
    /// A region's description that makes no sense.
    #[error("region {index}")]
    BadRegion {
        /// Which region.
        index: u32,
        /// What is wrong.
        #[source]
        source: RegionReplyError,
    },
    /// More than the server moves with one message.
    #[error("{command:?}: {count} bytes, the server moves at most {limit} with one message")]
    TooLarge {
        /// What was asked.
        command: Command,
        /// Bytes wanted.
        count: usize,
        /// Bytes possible.
        limit: u32,
    },
    /// Waiting for the socket failed.
    #[error("poll failed")]
    Poll(#[source] Errno),
}

impl ClientError {
    /// The server's errno, when it was the server that refused.
    pub fn refused(&self) -> Option<Errno> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

/// Client memory as [`Client::dma_map`] announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First device-visible address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Where the range starts in the file.
    pub offset: u64,
    /// The device may read it.
    pub readable: bool,
    /// The device may write it.
    pub writable: bool,
}

/// A region as a server describes it.
#[derive(Debug)]
pub struct ClientRegion {
    /// How messages may access it.
    pub flags: RegionFlags,
    /// Bytes.
    pub size: u64,
    /// Where the region starts in `fd`.
    pub offset: u64,
    /// The parts that may be mapped; empty with a file means all of it.
    pub areas: Vec<MmapArea>,
    /// What to map: byte `b` of the region is at `offset + b`.
    pub fd: Option<OwnedFd>,
}

/// One write of [`Client::region_write_multi`].
#[derive(Clone, Copy, Debug)]
pub struct SmallWrite<'a> {
    /// Which region.
    pub region: u32,
    /// From the start of the region.
    pub offset: u64,
    /// At most 8 bytes.
    pub data: &'a [u8],
}

/// A connection to a server, negotiated. Calls block, at most for the timeout.
pub struct Client {
    transport: Transport,
    capabilities: Capabilities,
    memory: Option<Box<dyn ClientMemory>>,
    timeout: Duration,
    next_id: u16,
    given_up: bool,
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.transport.as_fd()
    }
}

impl Client {
    /// Connects to the server on `path` and negotiates. `timeout` bounds every call from now on.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(path).map_err(|source| ClientError::Connect { path: path.to_owned(), source })?;
        Self::from_stream(stream, timeout)
    }

    /// Negotiates on a socket that is connected.
    pub fn from_stream(stream: UnixStream, timeout: Duration) -> Result<Self, ClientError> {
        let mut client = Self {
            transport: Transport::new(stream, None)?,
            capabilities: Capabilities::default(),
            memory: None,
            timeout,
            next_id: 1,
            given_up: false,
        };
        let version = codec::our_version();
        let reply = client.call(Command::Version, [version.as_bytes(), codec::proposal().as_bytes()], &[])?;
        let (version, data) =
            wire::Version::read_from_prefix(&reply.payload).map_err(|_| VersionError::TooShort(reply.payload.len()))?;
        client.capabilities = codec::parse_reply(version.major, version.minor, data)?;
        Ok(client)
    }

    /// Whom the server's DMA_READ and DMA_WRITE reach. Without it they are refused with `EFAULT`.
    pub fn set_memory(&mut self, memory: Box<dyn ClientMemory>) {
        self.memory = Some(memory);
    }

    /// What the server can do.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// DEVICE_GET_INFO.
    pub fn device_info(&mut self) -> Result<DeviceInfo, ClientError> {
        let command = Command::DeviceGetInfo;
        let ask = wire::DeviceInfo { argsz: size_of::<wire::DeviceInfo>() as u32, ..Default::default() };
        let reply = self.call(command, [ask.as_bytes(), &[]], &[])?;
        let info: wire::DeviceInfo = fixed(command, &reply)?;
        Ok(DeviceInfo { reset: info.flags & wire::DEVICE_RESET != 0, regions: info.num_regions, irqs: info.num_irqs })
    }

    /// DEVICE_GET_REGION_INFO, asked again with more room where the server needs it.
    pub fn region_info(&mut self, index: u32) -> Result<ClientRegion, ClientError> {
        let command = Command::DeviceGetRegionInfo;
        let mut argsz = size_of::<wire::RegionInfo>() as u32;
        loop {
            let ask = wire::RegionInfo { argsz, index, ..Default::default() };
            let mut reply = self.call(command, [ask.as_bytes(), &[]], &[])?;
            let needed: wire::RegionInfo = fixed(command, &reply)?;
            if needed.argsz > argsz && needed.argsz <= MAX_REGION_REPLY {
                argsz = needed.argsz;
                continue;
            }
            if reply.fds.len() > 1 {
                return Err(ClientError::BadReply { command, detail: "more than one file descriptor" });
            }
            let fd = reply.fds.pop().map(Received::into_inner);
            let (info, areas) =
                codec::parse_region(&reply.payload).map_err(|source| ClientError::BadRegion { index, source })?;
            self.transport.recycle(reply.payload);
            let flags = RegionFlags::from_wire(info.flags);
            return Ok(ClientRegion { flags, size: info.size, offset: info.offset, areas, fd });
        }
    }

    /// DEVICE_GET_IRQ_INFO.
    pub fn irq_info(&mut self, index: u32) -> Result<IrqInfo, ClientError> {
        let command = Command::DeviceGetIrqInfo;
        let ask = wire::IrqInfo { argsz: size_of::<wire::IrqInfo>() as u32, index, ..Default::default() };
        let reply = self.call(command, [ask.as_bytes(), &[]], &[])?;
        let info: wire::IrqInfo = fixed(command, &reply)?;
        Ok(IrqInfo { flags: IrqFlags::from_bits(info.flags), count: info.count })
    }

    /// REGION_READ of `buf.len()` bytes.
    pub fn region_read(&mut self, region: u32, offset: u64, buf: &mut [u8]) -> Result<(), ClientError> {
        let command = Command::RegionRead;
        let access = wire::RegionAccess { offset, region, count: self.transfer_size(command, buf.len())? };
        let reply = self.call(command, [access.as_bytes(), &[]], &[])?;
        match wire::RegionAccess::read_from_prefix(&reply.payload) {
            Ok((head, data)) if head.count == access.count && data.len() == buf.len() => buf.copy_from_slice(data),
            _ => return Err(ClientError::BadReply { command, detail: "not as many bytes as were asked for" }),
        }
        self.transport.recycle(reply.payload);
        Ok(())
    }

    /// REGION_WRITE, done when this returns.
    pub fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let command = Command::RegionWrite;
        let access = wire::RegionAccess { offset, region, count: self.transfer_size(command, data.len())? };
        let reply = self.call(command, [access.as_bytes(), data], &[])?;
        self.transport.recycle(reply.payload);
        Ok(())
    }

    /// REGION_WRITE without a reply: it happens before whatever is asked for next, and errors are not told.
    pub fn region_write_posted(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let command = Command::RegionWrite;
        let access = wire::RegionAccess { offset, region, count: self.transfer_size(command, data.len())? };
        let deadline = deadline(self.timeout);
        self.send(command, [access.as_bytes(), data], &[], true)?;
        while self.transport.output_bytes() > 0 {
            self.wait(command, deadline)?;
            self.answer_requests(command)?;
        }
        Ok(())
    }

    /// REGION_WRITE_MULTI; returns how many of the writes were done. Only if the server's capabilities say so.
    pub fn region_write_multi(&mut self, writes: &[SmallWrite<'_>]) -> Result<u64, ClientError> {
        let command = Command::RegionWriteMulti;
        let mut entries = Vec::with_capacity(size_of_val(writes));
        for write in writes {
            let mut entry = wire::SingleWrite {
                offset: write.offset,
                region: write.region,
                count: write.data.len() as u32,
                data: [0; 8],
            };
            let limit = entry.data.len() as u32;
            let room = entry.data.get_mut(..write.data.len());
            room.ok_or(ClientError::TooLarge { command, count: write.data.len(), limit })?.copy_from_slice(write.data);
            entries.extend_from_slice(entry.as_bytes());
        }
        self.transfer_size(command, entries.len())?;
        let head = wire::WriteMulti { count: writes.len() as u64 };
        let reply = self.call(command, [head.as_bytes(), &entries], &[])?;
        Ok(fixed::<wire::WriteMulti>(command, &reply)?.count)
    }

    /// DMA_MAP. Without `fd` the server reaches the range through [`ClientMemory`] only.
    pub fn dma_map(&mut self, map: &Mapping, fd: Option<BorrowedFd<'_>>) -> Result<(), ClientError> {
        let read = if map.readable { wire::DMA_READ } else { 0 };
        let write = if map.writable { wire::DMA_WRITE } else { 0 };
        let ask = wire::DmaMap {
            argsz: size_of::<wire::DmaMap>() as u32,
            flags: read | write,
            offset: map.offset,
            address: map.address,
            size: map.size,
        };
        self.call(Command::DmaMap, [ask.as_bytes(), &[]], fd.as_slice())?;
        Ok(())
    }

    /// DMA_UNMAP: when this returns, the server does not touch the memory any more.
    pub fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), ClientError> {
        let (flags, address, size) = match unmap {
            DmaUnmap::Range { address, size } => (0, address, size),
            DmaUnmap::All => (wire::UNMAP_ALL, 0, 0),
        };
        let ask = wire::DmaUnmap { argsz: size_of::<wire::DmaUnmap>() as u32, flags, address, size };
        self.call(Command::DmaUnmap, [ask.as_bytes(), &[]], &[])?;
        Ok(())
    }

    /// Sets the event fds of the interrupts from `start` on; in as many messages as the server's limit wants.
    pub fn set_irq_eventfds(&mut self, index: u32, start: u32, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let mut start = start;
        for chunk in fds.chunks(self.capabilities.max_msg_fds.clamp(1, MAX_FDS)) {
            let count = chunk.len() as u32;
            self.set_irqs(wire::IRQ_DATA_EVENTFD | wire::IRQ_ACTION_TRIGGER, index, start, count, chunk)?;
            start = start.saturating_add(count);
        }
        Ok(())
    }

    /// Masks, unmasks or triggers interrupts. `Trigger` with `start` and `count` 0 forgets all event fds of the type.
    pub fn irq_action(&mut self, index: u32, start: u32, count: u32, action: IrqAction) -> Result<(), ClientError> {
        let action = match action {
            IrqAction::Mask => wire::IRQ_ACTION_MASK,
            IrqAction::Unmask => wire::IRQ_ACTION_UNMASK,
            IrqAction::Trigger => wire::IRQ_ACTION_TRIGGER,
        };
        self.set_irqs(wire::IRQ_DATA_NONE | action, index, start, count, &[])
    }

    /// DEVICE_RESET.
    pub fn reset(&mut self) -> Result<(), ClientError> {
        self.call(Command::DeviceReset, [&[], &[]], &[])?;
        Ok(())
    }

    /// Waits up to `timeout` for the server's requests for memory and answers those that are there. True if there were any.
    pub fn serve_memory(&mut self, timeout: Duration) -> Result<bool, ClientError> {
        let deadline = deadline(timeout);
        loop {
            if self.answer_requests(Command::DmaRead)? {
                return Ok(true);
            }
            if !self.wait_until(deadline)? {
                return Ok(false);
            }
        }
    }

    fn set_irqs(
        &mut self,
        flags: u32,
        index: u32,
        start: u32,
        count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let ask = wire::SetIrqs { argsz: size_of::<wire::SetIrqs>() as u32, flags, index, start, count };
        self.call(Command::DeviceSetIrqs, [ask.as_bytes(), &[]], fds)?;
        Ok(())
    }

    fn transfer_size(&self, command: Command, count: usize) -> Result<u32, ClientError> {
        let limit = self.capabilities.max_data_xfer_size.min(MAX_TRANSFER);
        match u32::try_from(count) {
            Ok(size) if size <= limit => Ok(size),
            _ => Err(ClientError::TooLarge { command, count, limit }),
        }
    }

    /// One request and its reply. The reply's descriptors belong to the caller.
    fn call(&mut self, command: Command, payload: [&[u8]; 2], fds: &[BorrowedFd<'_>]) -> Result<Frame, ClientError> {
        let deadline = deadline(self.timeout);
        let id = self.send(command, payload, fds, false)?;
        loop {
            while let Some(frame) = self.receive()? {
                match frame.header.kind().map_err(TransportError::from)? {
                    Kind::Request => self.answer(frame)?,
                    Kind::Reply if frame.header.id == id && frame.header.command == command as u16 => {
                        return match frame.header.reply_error() {
                            None => Ok(frame),
                            Some(errno) => Err(ClientError::Refused { command, errno }),
                        };
                    }
                    Kind::Reply => return Err(self.stray(command)),
                }
            }
            self.wait(command, deadline)?;
        }
    }

    fn send(
        &mut self,
        command: Command,
        payload: [&[u8]; 2],
        fds: &[BorrowedFd<'_>],
        no_reply: bool,
    ) -> Result<u16, ClientError> {
        if self.given_up {
            return Err(ClientError::GivenUp);
        }
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let header = Header::request(id, command, payload[0].len() + payload[1].len(), no_reply);
        self.transport.send(&header, payload, fds)?;
        Ok(id)
    }

    fn receive(&mut self) -> Result<Option<Frame>, ClientError> {
        let received = self.transport.receive();
        self.given_up |= received.is_err();
        Ok(received?)
    }

    /// Answers what the server asks, while no reply is awaited. True if there was something.
    fn answer_requests(&mut self, command: Command) -> Result<bool, ClientError> {
        let mut any = false;
        while let Some(frame) = self.receive()? {
            match frame.header.kind().map_err(TransportError::from)? {
                Kind::Request => self.answer(frame)?,
                Kind::Reply => return Err(self.stray(command)),
            }
            any = true;
        }
        Ok(any)
    }

    fn answer(&mut self, frame: Frame) -> Result<(), ClientError> {
        memory::answer(&mut self.transport, self.memory.as_deref_mut(), frame)?;
        Ok(())
    }

    fn stray(&mut self, command: Command) -> ClientError {
        self.given_up = true;
        ClientError::BadReply { command, detail: "it answers another message" }
    }

    fn wait(&mut self, command: Command, deadline: Option<Instant>) -> Result<(), ClientError> {
        if self.wait_until(deadline)? {
            return Ok(());
        }
        self.given_up = true;
        Err(ClientError::Timeout { command, timeout: self.timeout })
    }

    /// Sleeps until the socket can do something, and sends what waits. False when the deadline has passed.
    fn wait_until(&mut self, deadline: Option<Instant>) -> Result<bool, ClientError> {
        self.transport.flush()?;
        let mut events = PollFlags::IN;
        if self.transport.output_bytes() > 0 {
            events |= PollFlags::OUT;
        }
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            // A time too long for the system is no limit.
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut poll = [PollFd::new(&self.transport, events)];
            match rustix::event::poll(&mut poll, left.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(ClientError::Poll(errno)),
            }
        }
    }
}

/// `None`: never.
fn deadline(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}

fn fixed<T: FromBytes>(command: Command, reply: &Frame) -> Result<T, ClientError> {
    match T::read_from_prefix(&reply.payload) {
        Ok((value, _)) => Ok(value),
        Err(_) => Err(ClientError::BadReply { command, detail: "it is too short" }),
    }
}
