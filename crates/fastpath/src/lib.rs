//! FastPath: a volume of a running daemon for a program without a virtual machine, by memory that both share and no system call per
//! request. `libmillrace` is this crate for C; `include/millrace.h` says what it promises.
//!
//! ```text
//!   FastPath::open ── volume's name ──► door (apps.sock) ──► the daemon makes a controller for us, and hands its connection over
//!        │ read, write, submit                                                      │
//!        ▼ one lock                                                                 ▼
//!      Space: requests ──► pieces of at most one command ──► QueuePair ══ shared memory ══► shard ─ volume
//!        ▲ poll, wait          Direct: the space's own buffer      completions ◄══
//!        └───────────────────  Copy: by way of a bounce page run, for any memory of the program
//!      (Options::engine: words in a page and records, where the daemon's engine has its own front for them: way.rs)
//! ```
//!
//! # Invariants
//!
//! - A space is one controller, one queue pair and one buffer; its connection's life is theirs. Whatever a program does to that memory
//!   spoils its own requests only: the daemon copies entries once and checks them.
//! - A request ends once, when its last piece has; its error is its first piece's to fail.
//! - After start, a request costs no allocation and no system call unless it waits; the lock is uncontended where each thread has a space.
//!
//! # What it does not do
//!
//! Cache, merge or order requests, retry, or reconnect: a space whose daemon has stopped says so (`ENODEV`) and is to be opened again. A
//! worker that dies under it is replaced without its notice.

mod door;
mod error;
mod ffi;
mod home;
mod memory;
mod requests;
mod shared;
mod space;
mod statistics;
mod way;

pub use door::default_run_dir;
pub use error::Error;
pub use requests::{Completion, Direct, Operation};
pub use shared::FastPath;
pub use space::Options;
pub use statistics::{Latencies, Statistics};
