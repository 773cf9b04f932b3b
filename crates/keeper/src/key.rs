//! What descriptors are called. To the keeper these are numbers.

/// Names a descriptor. The keeper gives it no meaning, but for the order of kinds: a range of them is dropped at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// A device's or a volume's identifier; zeroes for the daemon itself.
    pub owner: [u8; 16],
    /// What it is.
    pub kind: Kind,
    /// Which one of its kind.
    pub slot: u32,
}

impl Key {
    /// The daemon's own.
    pub fn of_daemon(kind: Kind) -> Self {
        Self { owner: [0; 16], kind, slot: 0 }
    }

    /// The only one of its kind.
    pub fn of(owner: [u8; 16], kind: Kind) -> Self {
        Self { owner, kind, slot: 0 }
    }
}

/// What a descriptor is, to workers. Numbers, because a worker of another version may have others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind(pub u32);

impl Kind {
    /// The lock on the run directory.
    pub const RUN_LOCK: Self = Self(1);
    /// The API's listening socket.
    pub const API: Self = Self(2);
    /// The applications' listening socket.
    pub const APPS: Self = Self(3);
    /// The end of a pipe whose other end a worker's rings have. In each worker's own slot.
    pub const WITNESS: Self = Self(4);
    /// A device's listening socket.
    pub const LISTENER: Self = Self(16);
    /// A device's state region.
    pub const STATE: Self = Self(17);
    /// The memory behind a device's doorbells.
    pub const DOORBELLS: Self = Self(18);
    /// A device's commands in flight.
    pub const RECORDS: Self = Self(19);
    /// A device's client.
    pub const CONNECTION: Self = Self(32);
    /// A region of the client's memory.
    pub const MEMORY: Self = Self(33);
    /// The event descriptor of a vector.
    pub const VECTOR: Self = Self(34);
    /// The event descriptor of the interrupt pin, and the one that unmasks it.
    pub const PIN: Self = Self(35);
    /// The client's, to unmask the pin.
    pub const PIN_UNMASK: Self = Self(36);
    /// What is remembered of the client.
    pub const CLIENT: Self = Self(37);
    /// The last of the kinds that go with a client, from [`Self::CONNECTION`] on.
    pub const LAST_OF_CLIENT: Self = Self(47);
    /// A part of a memory volume's blocks.
    pub const BLOCKS: Self = Self(64);
    /// A namespace's reservations.
    pub const RESERVATIONS: Self = Self(65);
    /// A namespace's blocks that are marked as uncorrectable.
    pub const UNCORRECTABLE: Self = Self(66);
}
