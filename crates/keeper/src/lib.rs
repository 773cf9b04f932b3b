//! The keeper: the process that does not die, so that guests do not notice when the one that serves them does.
//!
//! ```text
//!   keeper (millrace serve)                                    worker (millrace worker)
//!   ┌─────────────────────────┐   HELD key+fd …, BEGIN   ┌──────────────────────────────────┐
//!   │ held: key → fd, replies │ ───────────────────────► │ Link: what was held, then puts,  │
//!   │                         │ ◄─────────────────────── │ drops and replies of its own     │
//!   │ restarts, gives back    │   PUT, DROP, READY,      │ control plane, shards, devices   │
//!   └───────────┬─────────────┘   REPLY                  └────────────────┬─────────────────┘
//!               └── reply bytes, not looked at ──► client's socket ──► requests, peeked until they are answered
//! ```
//!
//! The worker puts every descriptor here that must outlive it: listening sockets, its clients' connections, their memory and
//! event descriptors, and the memory files that hold the devices' states. When it dies, for any reason, another one is started at
//! once and gets them all back. The keeper knows none of these: a [`Key`] is a number to it.
//!
//! Invariants:
//! * Nothing a guest sends is read here. A client's socket is only written to, with bytes of the worker's (*REPLY*), and how often
//!   is counted: so the next worker knows whether its predecessor's last reply went out.
//! * A message of a worker that has died counts when it was sent: all are read before the next worker starts.
//! * What is held is bounded for each owner and in total. The largest message has a buffer from the start.
//! * It has one thread, waits for nothing but its worker, and no worker's fault is fatal to it.
//!
//! It does not decide what can be taken over: the worker does, which may let go of everything and begin anew.

mod link;
mod process;
mod wire;

pub use link::{Held, Link, LinkError, Predecessor};
pub use process::{Event, Keeper, KeeperError, Outcome};

/// Reply bytes that one message takes at most: more than the largest region of a device.
pub const MAX_REPLY: usize = 32 * 1024;
/// Descriptors that one owner may have here: a device's regions of memory, its vectors, and a few more.
pub const MAX_HELD_BY_OWNER: usize = 6000;
/// Descriptors that are held at most, of all owners.
pub const MAX_HELD: usize = 200_000;

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
