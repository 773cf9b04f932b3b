//! Where blocks end up: the volumes at the bottom of every stack.
//!
//! ```text
//!   "file:/srv/a.img" ──BackendSpec──► open ──► Arc<dyn Volume>
//!                                                 ├─ memory  copies at once between segments and memory files, which the keeper holds, too
//!                                                 ├─ null    answers at once, moves nothing
//!                                                 ├─ file    the shard's ring: O_DIRECT straight into the segments where
//!                                                 │          alignment allows, else by way of the shard's buffers
//!                                                 ├─ nvme    a physical controller's own queues, one pair for each shard
//!                                                 └─ fault   (tests) spoils another volume by rule and seed
//! ```
//!
//! Invariants:
//! * Every volume here passes `millrace_block::conformance`.
//! * Nothing is allocated per request, and nothing blocks: what would take long is handed to the ring or cut in pieces.
//! * A file, or a namespace, is written by one volume at a time, in this process or any other.
//!
//! It knows no protocol, no guest and no other volume: services live above.

#![forbid(unsafe_code)]

mod ahead;
#[cfg(any(test, feature = "fault"))]
pub mod fault;
mod file;
mod log;
mod memory;
mod naps;
mod null;
mod nvme;
mod shape;
mod spec;
#[cfg(test)]
mod tests;

pub use file::{FileOptions, FileVolume};
pub use memory::MemoryVolume;
pub use null::NullVolume;
pub use nvme::{NvmePlace, NvmeVolume, Patience, Waits};
pub use spec::{BackendSpec, ParseSpecError, open};
