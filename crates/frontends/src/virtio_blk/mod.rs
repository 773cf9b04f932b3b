//! A virtio disk for a guest, over vhost-user.
//!
//! ```text
//!            socket                               rings, guest memory (shared)
//!   front end ══════════╗                       ╔═══════════════════════════ guest
//!                       ▼                       ▼
//!   transport.rs ─ message.rs ─ session.rs   disk.rs ── take: ring/ ── request.rs ──► Volume
//!             (device.rs: socket and shard)     │           ▲ memory.rs
//!                                               └── give back: ring/, inflight.rs, dirty.rs, one interrupt for a batch
//! ```
//!
//! Invariants:
//! * A chain of descriptors becomes one request on the volume, whatever its number of pieces.
//! * What a guest or front end says is copied once, then checked, then used. What is wrong costs the device (`disk::Fault`), the
//!   connection or one request, and nobody else anything.
//! * A request's memory stays mapped until the request has ended: changes of the memory table, stops, resets and the end of the
//!   connection wait for those in flight.
//! * The record of requests under way (`inflight`) is right between any two stores, so that a daemon that is killed loses no
//!   request and does none again that the guest has seen end.
//! * The guest is told of a batch once, and only if it wants to be.
//!
//! It emulates no PCI device: the front end (QEMU, Cloud Hypervisor, libblkio) does. What must migrate beside the
//! rings is the write cache mode: front ends that ask take it along (`state`), for those that do not the volume keeps it (`modes`). It does not
//! use requests in order (VIRTIO_F_IN_ORDER), for its volumes do not end them so.

mod config;
mod device;
mod dirty;
mod disk;
mod inflight;
mod memory;
mod message;
mod modes;
mod queue;
mod request;
mod ring;
mod session;
mod state;
mod transport;

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod tests;

pub use config::{Config, Kind};
pub use device::{DeviceCounters, DeviceError, DevicePhase, DeviceStatus, VirtioBlkDevice};
pub use modes::WriteModes;

/// The first of the tokens that queues' kicks are watched under.
const KICKS: u32 = 16;
