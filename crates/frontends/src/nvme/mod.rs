//! An NVMe controller for a guest, over vfio-user.
//!
//! ```text
//!            socket                          doorbell page, guest memory
//!   guest ═════════════╗                   ╔══════════════════════════ guest
//!                      ▼                   ▼
//!               device.rs (vfio-user)   controller.rs  take SQEs: queue.rs
//!                 pci.rs registers.rs        │
//!                                  ┌─────────┴─────────┐
//!                               admin/                io/ ── data.rs (PRP, SGL → segments)
//!                                  └─────────┬─────────┘        namespace.rs ──► Volume
//!                                            ▼
//!                                  post CQE, interrupts.rs
//! ```
//!
//! Invariants:
//! * Whatever a guest can observe lives in `state::DeviceState`, a shared-memory region, and nowhere else; stores to it are
//!   ordered so that a reader that stops us between any two finds a state that was true.
//! * A command is taken from a submission queue only when its completion has room: a task slot and a completion queue entry
//!   are reserved first.
//! * A command's memory stays mapped until the command has completed: reset, queue deletion, unmap and disconnect wait for
//!   the commands in flight.
//! * An SQE is copied once; what is checked is the copy.
//! * A guest's mistake costs that guest a status code, or its controller (CFS), and nobody else anything.
//!
//! It does not emulate a PCI bus, and keeps no queue of its own: what cannot be taken yet stays in the guest's queue.

mod admin;
mod card;
mod config;
mod controller;
#[cfg(test)]
mod cut;
mod data;
mod device;
mod errors;
#[cfg(test)]
mod fixture;
mod interrupts;
mod io;
mod keep;
mod lasting;
mod migration;
mod namespace;
mod pci;
mod queue;
mod records;
mod registers;
mod reservation;
mod shadow;
mod state;
mod status;

pub use card::{CLOCK, CardSpec, MakeEngine, ParseFunctionsError, StorageFunctions};
pub use config::{Config, DoorbellMode, NamespaceQuota};
pub use device::{DeviceCounters, DeviceError, DevicePhase, DeviceStatus, NamespaceStatus, NvmeDevice};
pub use keep::{Kept, layouts};
pub use migration::SavedStateError;
pub use millrace_nvme_spec::status::Status;
pub use namespace::{Host, HostReply, Identity, Namespace, NewFormat};
#[doc(hidden)]
pub use records::exercise as exercise_records;
#[doc(hidden)]
pub use state::use_next_layouts;
