//! A user-level NVMe host driver: brings up a controller and drives its queues from one thread, by polling or interrupts.
//!
//! ```text
//!   Controller ──admin commands──► Identify, features, queues       Transport: vfio-user socket, or a physical function (VFIO)
//!       │ create_queue_pair                                             ▲ registers, DMA maps, event fds
//!       ▼                                                               │
//!   QueuePair::submit ──SQE──► DmaMemory (memfd, mapped by the device) ─┘
//!            ::ring ────tail──► doorbell page, shadow doorbell, or message
//!            ::next_completion ◄──CQE, by its phase── DmaMemory
//!   Namespace: commands with their ranges checked
//!   Space: FastPath's front of an engine, in the place of a queue pair
//!   VirtioQueue: a virtio-blk disk behind a vhost-user socket, for measuring
//!   LeanQueue: a QueuePair whose commands are all made beforehand, for measuring what is faster than a driver
//! ```
//!
//! For tests, fuzzers and the benchmark: [`QueuePair::ring_tail_raw`], [`Controller::write_doorbell`], [`Controller::write32`]
//! and their like do whatever they are told.
//!
//! # Invariants
//!
//! - Memory shared with the device is only copied in and out, and is never Rust's own: a device that writes where it should
//!   not spoils data, not this process.
//! - What the device writes is checked before it is used: a completion names a command in flight, or is an error.
//! - An I/O costs the entry, a share of a doorbell and a poll: no allocation, no lock, and no system call unless doorbells
//!   are messages. Waiting calls (`execute`, `wait_…`) are for setting up and for tests.
//!
//! # What it does not do
//!
//! Retry, time commands of I/O queues out by itself ([`Controller::abort`] is for who does), metadata, or sharing one queue between threads at once.

mod admin;
mod cid;
mod cmb;
mod command;
mod controller;
mod dma;
mod doorbell;
mod error;
mod format;
mod maintenance;
mod manage;
mod namespace;
mod optional;
mod prp;
mod queue;
mod reservation;
mod sgl;
mod shared;
mod space;
mod transport;
mod vectors;
mod vfio_pci;
pub mod vhost_user;
mod virtio;

pub use command::Command;
pub use controller::{Controller, Options, QueueOptions};
pub use dma::{DmaBuffer, DmaError, DmaMemory, DmaRange, PAGE_SIZE, Pages};
pub use error::DriverError;
pub use format::Format;
pub use maintenance::{Sanitize, SecurityProtocol};
pub use manage::NewNamespace;
pub use namespace::{CommandError, Metadata, Namespace, Protection};
pub use optional::{LbaStatus, Lockdown, Virtualization};
pub use prp::PrpError;
pub use queue::{Fused, LeanQueue, QueueError, QueuePair};
pub use reservation::Reservation;
pub use sgl::{SglError, SglLimits};
pub use space::Space;
pub use transport::{MappedArea, Transport, TransportError, VfioUser};
pub use vfio_pci::{Iommu, ParseAddressError, PciAddress, VfioError, VfioPci, device_files};
pub use virtio::{SECTOR, VirtioError, VirtioOptions, VirtioQueue};

/// The wire types that the interface speaks in.
pub use millrace_nvme_spec as spec;
