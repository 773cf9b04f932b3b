//! A guest that does everything a guest can do, mostly right and sometimes wrong, and knows what must come of it.
//!
//! ```text
//!   seed ─► bytes ─► operations ─► Guest ═ vfio-user socket, shared memory ═► NvmeDevice ─► volumes: slow, failing, torn
//!                       ▲            │                                           ▲
//!                       │            └── Contents: what every block may hold     └── shard.turn(), on the same thread
//!                       └── cut down when something is wrong
//! ```
//!
//! The device is the real one, on a real shard and a real socket, but everything happens on one thread, turn by turn: a seed
//! does the same every time (but for the naps of Compare-and-Write pairs that wait for each other, which are timed).
//!
//! What is checked:
//! * every block read holds something that some write may have left there, and nothing else;
//! * every command completes exactly once, in its queue, with the right phase and one of the statuses that fit it;
//! * what was not given to a command is not written by it;
//! * nothing panics, nothing hangs, and no file descriptor or mapping is left over.
//!
//! It does not look for races between threads, and does not judge what Identify and the log pages say.

#![forbid(unsafe_code)]

mod admin;
mod choices;
mod contents;
mod guest;
mod hostile;
mod io;
mod layout;
mod memory;
mod messages;
mod operator;
mod queues;
mod run;
mod wire;
mod world;

pub use choices::{OP_BYTES, Op};
pub use run::{Failure, OPERATIONS, Sequence, check, minimise, report, run, try_seed};
