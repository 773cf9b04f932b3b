//! Bytes to checked requests and back, without any socket.

mod feature;
mod region;
mod request;
#[cfg(test)]
mod tests;
mod version;
pub mod wire;

use rustix::io::Errno;
use zerocopy::FromBytes;

pub use feature::{FeatureRequest, Probe};
pub(crate) use region::encode_region;
pub use region::{RegionReplyError, parse_region};
pub use request::{Request, WriteMulti};
pub use version::{Capabilities, VersionError};
pub(crate) use version::{negotiate, our_version, parse_reply, proposal};
pub use wire::Header;

/// Bytes of the header before every message.
pub const HEADER_SIZE: usize = size_of::<Header>();
/// The most data one message moves, in bytes; told to the peer as `max_data_xfer_size`, and the protocol's default.
pub const MAX_TRANSFER: u32 = 1 << 20;
/// The largest message that is accepted or sent, in bytes, header included.
pub const MAX_MESSAGE: usize = MAX_TRANSFER as usize + 4096;
/// The most file descriptors one message carries; told to the peer as `max_msg_fds`. QEMU refuses a larger number.
pub const MAX_FDS: usize = 16;

/// DMA ranges that one client may map at once; told to the client as `max_dma_maps`.
pub const MAX_DMA_MAPS: u32 = 4096;
/// The most writes of one REGION_WRITE_MULTI, so that no message keeps the server's thread for long. QEMU sends fewer.
pub const MAX_WRITES: usize = 256;

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        /// What a message asks for ("Commands").
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Command { $($(#[$doc])* $name = $value,)* }

        impl Command {
            /// The command with this number, if there is one.
            pub fn from_wire(value: u16) -> Option<Self> {
                match value { $($value => Some(Self::$name),)* _ => None }
            }
        }
    };
}

commands! {
    /// Agree on version and capabilities: the first message.
    Version = 1,
    /// Make client memory known.
    DmaMap = 2,
    /// Take client memory back.
    DmaUnmap = 3,
    /// What the device is.
    DeviceGetInfo = 4,
    /// What a region is.
    DeviceGetRegionInfo = 5,
    /// Which event fds stand for parts of a region.
    DeviceGetRegionIoFds = 6,
    /// What an interrupt type is.
    DeviceGetIrqInfo = 7,
    /// Set up, mask, unmask or trigger interrupts.
    DeviceSetIrqs = 8,
    /// Read from a region.
    RegionRead = 9,
    /// Write to a region.
    RegionWrite = 10,
    /// Server to client: read client memory.
    DmaRead = 11,
    /// Server to client: write client memory.
    DmaWrite = 12,
    /// Reset the device.
    DeviceReset = 13,
    /// Dirty page tracking of the first migration protocol.
    DirtyPages = 14,
    /// Several small region writes in one message.
    RegionWriteMulti = 15,
    /// Get, set or probe a feature (migration).
    DeviceFeature = 16,
    /// Read migration data.
    MigDataRead = 17,
    /// Write migration data.
    MigDataWrite = 18,
}

/// Whether a message asks or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A request.
    Request,
    /// A reply.
    Reply,
}

/// A header that cannot belong to any message: the stream is lost from here on.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The size does not even cover the header, or is beyond [`MAX_MESSAGE`].
    #[error("message {id} (command {command}) claims {size} bytes; {HEADER_SIZE} to {MAX_MESSAGE} are possible")]
    Size {
        /// Message id.
        id: u16,
        /// Command number.
        command: u16,
        /// Claimed size.
        size: u32,
    },
    /// Neither request nor reply.
    #[error("message {id} (command {command}) has the unknown type {kind}")]
    Kind {
        /// Message id.
        id: u16,
        /// Command number.
        command: u16,
        /// Type bits.
        kind: u32,
    },
}

impl Header {
    /// Head of a request with `payload` bytes after the header.
    pub fn request(id: u16, command: Command, payload: usize, no_reply: bool) -> Self {
        let flags = wire::TYPE_REQUEST | if no_reply { wire::NO_REPLY } else { 0 };
        Self { id, command: command as u16, size: message_size(payload), flags, error: 0 }
    }

    /// Head of the reply to `request` with `payload` bytes after the header.
    pub fn reply_to(request: &Self, payload: usize) -> Self {
        Self { size: message_size(payload), flags: wire::TYPE_REPLY, error: 0, ..*request }
    }

    /// The whole reply to `request` that reports `errno`.
    pub fn error_to(request: &Self, errno: Errno) -> Self {
        Self {
            size: message_size(0),
            flags: wire::TYPE_REPLY | wire::ERROR,
            error: errno.raw_os_error().unsigned_abs(),
            ..*request
        }
    }

    /// Checks what every message must satisfy.
    pub fn kind(&self) -> Result<Kind, FrameError> {
        let Self { id, command, size, flags, .. } = *self;
        if !(HEADER_SIZE..=MAX_MESSAGE).contains(&(size as usize)) {
            return Err(FrameError::Size { id, command, size });
        }
        match flags & wire::TYPE_MASK {
            wire::TYPE_REQUEST => Ok(Kind::Request),
            wire::TYPE_REPLY => Ok(Kind::Reply),
            kind => Err(FrameError::Kind { id, command, kind }),
        }
    }

    /// Bytes after the header; 0 for a size that [`Self::kind`] refuses as too small.
    pub fn payload_size(&self) -> usize {
        (self.size as usize).saturating_sub(HEADER_SIZE)
    }

    /// True for a request that must not be answered.
    pub fn no_reply(&self) -> bool {
        self.flags & wire::NO_REPLY != 0
    }

    /// The error a reply reports. A peer may leave the number out: then `EIO`.
    pub fn reply_error(&self) -> Option<Errno> {
        if self.flags & wire::ERROR == 0 {
            return None;
        }
        Some(match i32::try_from(self.error) {
            Ok(raw @ 1..4096) => Errno::from_raw_os_error(raw),
            _ => Errno::IO,
        })
    }
}

fn message_size(payload: usize) -> u32 {
    let size = HEADER_SIZE + payload;
    assert!(size <= MAX_MESSAGE, "a message of our own is too large: {size} bytes");
    size as u32
}

/// Splits the fixed structure `T` off the front of a payload.
fn fixed<T: FromBytes>(command: Command, payload: &[u8]) -> Result<(T, &[u8]), ProtocolError> {
    T::read_from_prefix(payload).map_err(|_| ProtocolError::TooShort {
        command,
        length: payload.len(),
        needed: size_of::<T>(),
    })
}

/// A request that is well framed but wrong. It is answered with [`Self::errno`]; the connection goes on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// No such command.
    #[error("unknown command {0}")]
    UnknownCommand(u16),
    /// A command that is known and not offered (migration where it is off, or one that only a server sends).
    #[error("{0:?} is not supported")]
    Unsupported(Command),
    /// Fewer bytes than the fixed part has.
    #[error("{command:?}: {length} bytes of payload, {needed} are needed")]
    TooShort {
        /// Which command.
        command: Command,
        /// Bytes that came.
        length: usize,
        /// Bytes of the fixed part.
        needed: usize,
    },
    /// `argsz` cannot hold the structure.
    #[error("{command:?}: argsz {argsz} is below {needed}")]
    ArgumentSize {
        /// Which command.
        command: Command,
        /// What the message says.
        argsz: u32,
        /// The least that works.
        needed: u32,
    },
    /// Flags that are unknown or contradict each other.
    #[error("{command:?}: flags {flags:#x} are not valid")]
    Flags {
        /// Which command.
        command: Command,
        /// As sent.
        flags: u32,
    },
    /// Flags that are valid and not supported.
    #[error("{command:?}: flags {flags:#x} are not supported")]
    UnsupportedFlags {
        /// Which command.
        command: Command,
        /// As sent.
        flags: u32,
    },
    /// More or fewer file descriptors than the command takes.
    #[error("{command:?}: {count} file descriptors, {expected} expected")]
    FdCount {
        /// Which command.
        command: Command,
        /// How many came.
        count: usize,
        /// How many make sense.
        expected: usize,
    },
    /// An empty DMA range, or one that runs past the end of the address space or of the file's offsets.
    #[error("{command:?}: bad range, address {address:#x} size {size:#x} offset {offset:#x}")]
    DmaRange {
        /// Which command.
        command: Command,
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
        /// File offset.
        offset: u64,
    },
    /// The data that follows does not have the announced length.
    #[error("{command:?}: {count} announced, but {length} bytes of data came")]
    DataLength {
        /// Which command.
        command: Command,
        /// Announced number (of bytes, booleans or writes).
        count: u64,
        /// Bytes that came.
        length: usize,
    },
    /// More bytes, or more writes, than one message may have.
    #[error("{command:?}: {count} are more than one message may have")]
    TooLarge {
        /// Which command.
        command: Command,
        /// Announced number.
        count: u64,
    },
    /// No such region.
    #[error("{command:?}: there is no region {index}")]
    RegionIndex {
        /// Which command.
        command: Command,
        /// As sent.
        index: u32,
    },
    /// An access beyond the region's end.
    #[error("{command:?}: offset {offset:#x} + {count} leaves region {index} of {size:#x} bytes")]
    RegionRange {
        /// Which command.
        command: Command,
        /// Which region.
        index: u32,
        /// As sent.
        offset: u64,
        /// As sent.
        count: usize,
        /// The region's bytes.
        size: u64,
    },
    /// Reading what is write-only, or the other way round.
    #[error("{command:?}: region {index} does not allow it")]
    RegionAccess {
        /// Which command.
        command: Command,
        /// Which region.
        index: u32,
    },
    /// No such interrupt type.
    #[error("{command:?}: there is no interrupt type {index}")]
    IrqIndex {
        /// Which command.
        command: Command,
        /// As sent.
        index: u32,
    },
    /// Interrupts beyond the type's count.
    #[error("interrupts {start} + {count} leave type {index}, which has {available}")]
    IrqRange {
        /// Which type.
        index: u32,
        /// As sent.
        start: u32,
        /// As sent.
        count: u32,
        /// What the type has.
        available: u32,
    },
    /// A page size that is none, a range that is not made of such pages, or one whose bitmap no message holds.
    #[error("{command:?}: no log of pages of {page_size:#x} bytes at {address:#x} + {size:#x}")]
    LogRange {
        /// Which command.
        command: Command,
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
        /// Bytes of a page.
        page_size: u64,
    },
    /// A migration state that there is none of, or none that a client may ask for.
    #[error("there is no migration state {0} to go to")]
    MigrationState(u32),
    /// VERSION a second time.
    #[error("the version is already negotiated")]
    VersionTwice,
}

impl ProtocolError {
    /// What the client is told.
    pub fn errno(&self) -> Errno {
        match self {
            Self::UnknownCommand(_) => Errno::NOSYS,
            Self::Unsupported(_) | Self::UnsupportedFlags { .. } => Errno::OPNOTSUPP,
            Self::TooLarge { .. } => Errno::TOOBIG,
            Self::RegionAccess { .. } => Errno::PERM,
            _ => Errno::INVAL,
        }
    }
}
