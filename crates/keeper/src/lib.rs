//! The keeper: the process that does not die, so that guests do not notice when the one that serves them does.
//!
//! ```text
//!   keeper (millrace serve)                                    worker (millrace worker)
//!   ┌─────────────────────────┐ ◄───────── WARM ──────── ┌──────────────────────────────────┐
//!   │                         │   HELD key+fd …, BEGIN   │                                  │
//!   │ held: key → fd, replies │ ───────────────────────► │ Link: what was held, then puts,  │
//!   │                         │ ◄─────────────────────── │ drops and replies of its own     │
//!   │ restarts, gives back    │   PUT, DROP, READY,      │ control plane, shards, devices   │
//!   └───────────┬─────────────┘   REPLY                  └────────────────┬─────────────────┘
//!               └── reply bytes, not looked at ──► client's socket ──► requests, peeked until they are answered
//! ```
//!
//! Beside its worker it runs cells: keepers with workers of their own, which share nothing with this one.
//!
//! In an upgrade a worker of another binary is started beside the old one, and gets all this when it is warm.
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
//! * When memory is short the kernel takes the worker, not this process.
//! * It has one thread, waits for nothing but its worker, and no worker's fault is fatal to it. Whatever wakes it, it looks at
//!   everything: what was told of too early or twice is not missed and does no harm.
//! * It looks at no path but in the places whose programs may take over: elsewhere may be a file system that does not answer.
//!
//! It does not decide what can be taken over: the worker does, which may let go of everything and begin anew.

mod cells;
mod key;
mod layout;
mod link;
mod process;
mod score;
mod upgrade;
mod wire;

pub use key::{Key, Kind};
pub use layout::{Incompatible, Layout, Layouts};
pub use link::{Held, Link, LinkError, Predecessor, UpgradeResult, Upgraded, Word};
pub use process::{Keeper, KeeperError, Outcome};

/// Reply bytes that one message takes at most: more than the largest region of a device.
pub const MAX_REPLY: usize = 32 * 1024;
/// Bytes in which a worker says which layouts it understands at most.
pub const MAX_LAYOUTS: usize = 1024;
/// Descriptors that one owner may have here: a device's regions of memory, its vectors, and a few more.
pub const MAX_HELD_BY_OWNER: usize = 6000;
/// Descriptors that the keeper has at most, where the system allows it so many; all but [`SPARE`] of them are held.
pub const MAX_HELD: usize = 200_000;
/// Those that are not for holding: the keeper's own, and what starting a worker takes.
pub const SPARE: usize = 64;
