//! Shards: one poll-mode thread per core, which owns devices, their waiting requests, a ring and a mailbox.
//!
//! ```text
//!            ┌────────────────────────────── one turn ───────────────────────────────┐
//!            ▼                                                                       │
//!   Device::poll ──► ring: submit, reap ──► timers ──► ready tasks ──► mailbox, fds ─┤ (every 50 µs)
//!    │ reserve                ▲    │ wake                  │ done                    │
//!    ▼                        │    ▼                       ▼                         │ nothing for a while:
//!   TaskSlot::run ─ Wait ─► future in the slot's scratch ─ free                      └─ arm ► epoll_pwait2 ► disarm
//!    └ Done: no task at all
//! ```
//!
//! Invariants:
//! * Everything on a shard belongs to its thread: no lock, no atomic on the data path. Others ask by [`ShardHandle`].
//! * Nothing is allocated per request: slots, scratch, ring entries, timers and buffers are made with the shard. When slots or
//!   ring entries run out, requests wait, first come first served.
//! * A task that was started is polled to its end: there is no cancellation. It borrows only its slot's scratch and the
//!   shard's ring and buffers, and these outlive it (argued in `slots.rs`).
//! * A panic in a device or a task fences that device; everybody else goes on. The one exception: a panic that drops an I/O
//!   operation in flight aborts the process, for the kernel would go on writing to memory that nobody guards any more.
//! * Wakers stay on their shard (checked). Other threads wake a task by [`remote`].
//! * No wake-up is lost: a shard arms its devices and its ring, which then look once more, before it sleeps; descriptors and
//!   bells are level-triggered. The other halves of the argument are in `mailbox.rs` and `ring.rs`.
//!
//! Sleeping: while a device can only be served by looking at memory, the shard naps. A nap costs a context switch and a timer:
//! 2 µs of CPU on good hardware, 13 µs on a small virtual machine, where naps of 45 µs would take a quarter of a core. So naps grow
//! with the pause, and the shard measures what they cost (`naps.rs`): they become no longer than it takes to stay within a share of
//! the core. When all devices can be woken, the shard blocks and costs nothing. Where pauses are alike, it sleeps until shortly before
//! the present one should end (`foresight.rs`).
//!
//! Many devices: those that had nothing to do for a while are looked at in turn, one every 2 µs (`devices.rs`).
//!
//! It does not know what a device speaks or where its blocks are, and it is no general async runtime: tasks can wait for the
//! ring, timers, buffers and [`remote`] answers.
#![deny(unsafe_code)]

pub mod closer;
mod config;
mod core;
mod device;
mod devices;
mod engine;
mod error;
mod foresight;
mod mailbox;
mod naps;
mod pace;
mod placement;
mod poller;
pub mod reaper;
mod remote;
#[allow(unsafe_code)] // the kernel's view of our memory
mod ring;
mod shard;
#[allow(unsafe_code)] // the one lengthened lifetime
mod slots;
#[allow(unsafe_code)] // the time stamp counter
pub mod stages;
mod stats;
mod timers;
#[allow(unsafe_code)] // RawWaker
mod wake;
#[allow(unsafe_code)] // a signal
mod watch;

#[cfg(test)]
#[allow(unsafe_code)] // segments are made of raw memory
mod tests;

pub use config::{Polling, ShardConfig, parse_shards};
pub use device::{Device, DeviceKey, Readiness, ShardContext};
pub use engine::Engine;
pub use error::{EngineError, ShardsError};
pub use mailbox::ShardHandle;
pub use placement::{DiskKey, Placement, ShardLoad, place};
pub use remote::{RemoteAnswer, RemoteSender, remote};
pub use ring::MAX_SEGMENTS;
pub use shard::Shard;
pub use slots::{Launch, Outcome, TaskSlot};
pub use stats::StatsSnapshot;
pub use watch::interruptible;
