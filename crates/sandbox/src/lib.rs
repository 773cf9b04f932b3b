//! What a worker gives up, so that whoever takes it over has little of the machine (docs/sandbox.md).
//!
//! ```text
//!   one thread:   Policy::enter ── limits, user, capabilities, no new privileges, no dumps, the helper for key commands
//!   threads run:  Sandbox::close ── Landlock and the list of calls for control, on every thread there is
//!   on a shard:   ShardFilter::apply ── its own list, of at most 40 calls
//! ```
//!
//! Invariants:
//! * Nothing that was given up comes back: neither by exec (there is none) nor in a thread that starts later (it inherits).
//! * A call that is refused fails with EPERM, is counted, and is told to the operator ([`refused`]).
//! * With [`Mode::On`] a part that cannot be had is an error that names it; with [`Mode::Auto`] it is in [`Sandbox::missing`].
//!
//! It knows neither volumes nor devices: whoever uses it says which paths are whose. Threads share their memory, so that a thread's own
//! list narrows what a fault in it can do, and is no wall against the other threads: the wall is around the process.

mod calls;
mod commands;
mod filter;
mod paths;
mod peer;
mod policy;
mod refused;
mod rights;
mod threads;

pub use commands::{Helper, help};
pub use filter::ShardFilter;
pub use paths::Grant;
pub use peer::groups_of_peer;
pub use policy::{Mode, Policy, Sandbox, SandboxError, harden_keeper};
pub use refused::{Refused, refused};

/// Calls that shards have at most.
pub const MOST_SHARD_CALLS: usize = 40;
