//! The vocabulary every room of the data path speaks: units, requests, volumes, errors.
//!
//! ```text
//!   front end ──Request──► Volume::submit ──► Step::Done(result)        finished at once: no task, no wake-up
//!                             │
//!                             └────────────► Step::Wait(future)         must wait: the future lives in the task's Scratch
//!                                               │ awaits
//!                                               ▼
//!                                   TaskContext::io (the shard's ring), buffers
//! ```
//!
//! I/O model: a request names a range of blocks and the memory it moves as [`Segment`](millrace_memory::Segment)s; data are
//! moved directly between those and the medium. A volume answers at once or with a future that was placed in the request's
//! own [`Scratch`], so that no I/O allocates. A future that was started is always driven to its end: cancellation does not
//! exist, because a back end or device may be writing to the memory.
//!
//! Error model: [`BlockError`] says what happened in the terms a guest can be told; the name of the volume and the cause are
//! logged where the error arises, at a limited rate. One place in each front end maps it to the protocol's status.
//!
//! Durability: a completed flush or a completed write with FUA is durable against power loss. Anything else may be lost or
//! torn at block granularity, never misplaced. Overlapping writes in flight may land in either order.
//!
//! It does no I/O itself, and knows no protocol and no executor.

mod asker;
mod bias;
pub mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod epochs;
mod error;
mod geometry;
mod held;
mod helpers;
mod io;
mod metadata;
mod parallel;
mod per_shard;
mod request;
mod scratch;
mod switch;
#[cfg(test)]
mod tests;
pub mod trace;
mod units;
mod volume;

pub use asker::Asker;
pub use bias::{Bias, Favoured};
pub use epochs::{Epochs, ReplaceError, Retired, Visit};
pub use error::{BlockError, VolumeError};
pub use geometry::{BlockSize, Geometry};
pub use held::{Held, held_bytes, submit_held};
pub use helpers::{
    check, check_tagged, compare_by_reading, copy_by_bounce, future_bytes, helpers_scratch_bytes, pieces, tagged_bytes,
    yield_now,
};
pub use io::{IoFuture, IoOperation, ShardIo, TaskContext};
pub use metadata::{METADATA_SIZE, Metadata, MetadataFormat, NO_METADATA, TaggedRequest};
pub use parallel::{all, submit_together, together_bytes};
pub use per_shard::{PerShard, ShardSlot};
pub use request::{Operation, Request, Transfer};
pub use scratch::{Scratch, ScratchBox, placed_bytes};
pub use switch::{ChangeError, Ledger, Switch};
pub use units::{BlockCount, ByteOffset, Lba};
pub use volume::{Extent, PlainFile, Step, TaskFuture, Usage, Volume};
