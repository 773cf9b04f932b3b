//! One event: five words, in memory as in the file (docs/formats/trace.md).

use crate::{BlockError, Operation, Transfer};

/// Whose request it is: identifiers as the guest has chosen them, unique while the request is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The device's number in the trace; 0: no traced device's.
    pub device: u16,
    /// The queue.
    pub queue: u16,
    /// The command's identifier, or the index of the chain's first descriptor.
    pub command: u16,
}

impl Key {
    /// No guest's: a service's own work, a copy, or a guest that is not traced.
    pub const NOBODY: Self = Self { device: 0, queue: 0, command: 0 };
}

/// What happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    /// A queue has `count` requests that were not taken yet.
    #[default]
    Seen = 1,
    /// A request was copied out of its queue; `place` is its namespace.
    Fetched = 2,
    /// A node of a volume was given a request; `place` is the node.
    Entered = 3,
    /// It has finished it.
    Left = 4,
    /// The guest can see that its request has ended; `place` is the interrupt's vector, or 65535.
    Completed = 5,
    /// The guest was interrupted; `place` is the vector.
    Interrupted = 6,
    /// A request that the trace is not about was copied out of its queue: it was among those that were seen, and will be completed.
    Passed = 7,
    /// `count` events of this ring, which would stand here, found no room.
    Lost = 8,
    /// The device begins anew: what its guest had waiting or under way has no end.
    Reset = 9,
}

impl EventKind {
    fn of(number: u8) -> Option<Self> {
        let requests = [Self::Seen, Self::Fetched, Self::Entered, Self::Left, Self::Completed, Self::Interrupted];
        requests.into_iter().chain([Self::Passed, Self::Lost, Self::Reset]).find(|kind| *kind as u8 == number)
    }
}

/// What a request asks for. The highest bit: durable when completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventOperation(pub u8);

impl EventOperation {
    /// None of those below.
    pub const OTHER: Self = Self(0);
    /// Read.
    pub const READ: Self = Self(1);
    /// Write.
    pub const WRITE: Self = Self(2);
    /// Flush.
    pub const FLUSH: Self = Self(3);
    /// Write zeroes.
    pub const ZERO: Self = Self(4);
    /// Deallocate.
    pub const DEALLOCATE: Self = Self(5);
    /// Compare.
    pub const COMPARE: Self = Self(6);
    /// Copy.
    pub const COPY: Self = Self(7);
    const FUA: u8 = 0x80;

    /// The same, durable when completed.
    #[must_use]
    pub fn with_fua(self, fua: bool) -> Self {
        if fua { Self(self.0 | Self::FUA) } else { self }
    }

    /// Whether it is to be durable when completed.
    pub fn fua(self) -> bool {
        self.0 & Self::FUA != 0
    }

    /// What it is, durable or not.
    #[must_use]
    pub fn base(self) -> Self {
        Self(self.0 & !Self::FUA)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self.base() {
            Self::READ => "read",
            Self::WRITE => "write",
            Self::FLUSH => "flush",
            Self::ZERO => "write zeroes",
            Self::DEALLOCATE => "deallocate",
            Self::COMPARE => "compare",
            Self::COPY => "copy",
            _ => "other",
        }
    }
}

impl From<Operation> for EventOperation {
    fn from(operation: Operation) -> Self {
        match operation {
            Operation::Read => Self::READ,
            Operation::Write { fua } => Self::WRITE.with_fua(fua),
            Operation::Flush => Self::FLUSH,
            Operation::WriteZeroes { fua, .. } => Self::ZERO.with_fua(fua),
            Operation::Deallocate => Self::DEALLOCATE,
            Operation::Compare => Self::COMPARE,
            Operation::Copy { .. } => Self::COPY,
        }
    }
}

impl From<Transfer> for EventOperation {
    fn from(transfer: Transfer) -> Self {
        Operation::from(transfer).into()
    }
}

/// How a node finished a request, as a number; 0 is success.
pub(super) fn status_of(result: Result<(), BlockError>) -> u16 {
    match result {
        Ok(()) => 0,
        Err(BlockError::OutOfRange) => 1,
        Err(BlockError::ReadOnly) => 2,
        Err(BlockError::ReadFault { .. }) => 3,
        Err(BlockError::WriteFault { .. }) => 4,
        Err(BlockError::NoSpace) => 5,
        Err(BlockError::Miscompare) => 6,
        Err(BlockError::Memory) => 7,
        Err(BlockError::NotReady) => 8,
        Err(BlockError::Unsupported) => 9,
        Err(BlockError::CalledOff) => 10,
    }
}

/// One event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// When, in nanoseconds of the trace's clock.
    pub time: u64,
    /// First block: the device's (fetched) or the node's.
    pub lba: u64,
    /// The visit of a node that begins or ends; 0 for the other kinds.
    pub span: u32,
    /// The visit within which it is, or 0.
    pub parent: u32,
    /// How many blocks, or requests.
    pub count: u32,
    /// Whose.
    pub key: Key,
    /// What happened.
    pub kind: EventKind,
    /// What the request asks for.
    pub operation: EventOperation,
    /// How it ended; 0 is success.
    pub status: u16,
    /// Where; see [`EventKind`].
    pub place: u16,
}

impl Event {
    /// Words of an event.
    pub const WORDS: usize = 5;

    /// As it lies in memory and, each word in little endian, in a file.
    #[inline]
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let Key { device, queue, command } = self.key;
        let small = u64::from(self.kind as u8) | u64::from(self.operation.0) << 8;
        [
            self.time,
            self.lba,
            u64::from(self.span) | u64::from(self.parent) << 32,
            u64::from(self.count) | u64::from(device) << 32 | u64::from(queue) << 48,
            u64::from(command) | small << 16 | u64::from(self.status) << 32 | u64::from(self.place) << 48,
        ]
    }

    /// The event of these words; `None`: its kind is unknown.
    pub fn from_words([time, lba, spans, third, fourth]: [u64; Self::WORDS]) -> Option<Self> {
        Some(Self {
            time,
            lba,
            span: spans as u32,
            parent: (spans >> 32) as u32,
            count: third as u32,
            key: Key { device: (third >> 32) as u16, queue: (third >> 48) as u16, command: fourth as u16 },
            kind: EventKind::of((fourth >> 16) as u8)?,
            operation: EventOperation((fourth >> 24) as u8),
            status: (fourth >> 32) as u16,
            place: (fourth >> 48) as u16,
        })
    }
}
