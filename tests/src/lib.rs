//! What the tests of the whole share: the repository's places, a daemon, stock Linux guests beside it, and loads of our own.
//!
//! ```text
//!   Daemon ── target/.../millrace serve, in a folder of its own ──┬── Guest: scripts/guest, its lines, its marks
//!     │  commands of the client, log, fds and memory              ├── Load: millrace bench --verify, in the background
//!     │                                                           └── Hostile: clients that mean harm
//!     └─ finish(): still alive, nothing panicked, everything given back
//! ```
//!
//! # Invariants
//!
//! - Nothing is skipped: what a test needs and does not find is a failure that says what to run. Where a system cannot give what the test
//!   is about (huge pages, a control group, a file system that becomes full or shares blocks, a block device), [`skip()`] says so and why.
//! - A failure shows what the guest and the daemon had said by then.
//! - Time limits are there to end a hang, never to judge a speed.
//!
//! # What it does not do
//!
//! Stand in for anything: the daemon, QEMU and the guests' kernels are the real ones.

mod cage;
mod daemon;
mod guest;
mod hostile;
mod load;
mod loops;
mod monitor;
mod pages;
mod process;
mod programs;
mod seats;
mod sharing;
mod skip;
mod small;
mod wait;

use std::path::PathBuf;

pub use cage::Cage;
pub use daemon::{Daemon, OneDisk};
pub use guest::{Boot, Guest, Kernel};
pub use hostile::{Hostile, Trick};
pub use load::{Load, Work};
pub use loops::LoopDevice;
pub use monitor::Monitor;
pub use pages::GuestMemory;
pub use process::Usage;
pub use programs::{Programs, guest_root, run_monitor};
pub use seats::{Seats, seats};
pub use sharing::SharingFiles;
pub use skip::skip;
pub use small::SmallFiles;
pub use wait::{PATIENCE, eventually, within};

/// The repository's root.
pub fn repository() -> PathBuf {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the tests live in the repository").to_path_buf()
}

/// Whether to run the long variants: `MILLRACE_HEAVY=1`.
pub fn heavy() -> bool {
    std::env::var_os("MILLRACE_HEAVY").is_some_and(|value| value != "0")
}

/// `usual`, or `long` when [`heavy`].
pub fn unless_heavy<T>(usual: T, long: T) -> T {
    if heavy() { long } else { usual }
}
