//! What a worker gives up, so that whoever takes it over has little of the machine (docs/sandbox.md).
//!
//! ```text
//!   one thread:   Policy::enter ── limits, user, capabilities, no new privileges, no dumps; the broker and the helper for key commands
//!   threads run:  Sandbox::close ── Landlock and a list of calls on every thread, the shards' or the others'
//!
//!   a call ── on the thread's list? ── yes ───────────────────────────────► kernel
//!                  └─ no: SIGSYS ─► trap ─► instead: another form of it ──►   "
//!                                     ├───► lanes ─► broker: its own list, the named paths ─► "
//!                                     └───► EPERM, counted
//! ```
//!
//! Invariants:
//! * A worker has at most [`MOST_CALLS`] calls, all its threads together. None of them opens, names, makes or removes anything but memory and threads.
//! * Nothing that was given up comes back: neither by exec (there is none) nor in a thread that starts later (it inherits).
//! * A call that is refused fails with EPERM, is counted, and is told to the operator ([`refused`]).
//! * With [`Mode::On`] a part that the system does not have is an error that names it; with [`Mode::Auto`] it is in [`Sandbox::missing`].
//!
//! It knows neither volumes nor devices: whoever uses it says which paths are whose. Threads share their memory, so that a shard's shorter
//! list narrows what a fault in it can do, and is no wall against the other threads: the wall is around the process.

mod broker;
mod calls;
mod commands;
mod filter;
mod forms;
mod instead;
mod lanes;
mod paths;
mod peer;
mod policy;
mod rights;
mod threads;
mod trap;

pub use broker::broker;
pub use commands::{Helper, help};
pub use lanes::end_worker;
pub use paths::Grant;
pub use peer::groups_of_peer;
pub use policy::{Mode, Policy, Sandbox, SandboxError, harden_keeper};
pub use rights::Group;
pub use trap::{Refused, refused, this_is_a_shard};

/// The number of the machine's user of this name.
///
/// # Errors
/// There is none, or the machine's tables cannot be read.
pub fn uid_of(name: &str) -> std::io::Result<u32> {
    rights::User::find(name).map(|user| user.uid())
}

/// Calls that a worker has at most.
pub const MOST_CALLS: usize = 40;
