//! What guests see: one folder per kind of device.
//!
//! ```text
//!   guest ──vfio-user──► nvme/ ────────┬─Request──► millrace_block::Volume
//!         ──vhost-user─► virtio_blk/ ──┘
//! ```
//!
//! Front ends translate a guest's protocol into requests on volumes, and nothing else. They never meet back ends or services
//! by name, and they trust nothing that comes from a guest.

mod eventfd;
mod hangup;
mod log_limit;
pub mod nvme;
mod pace;
pub mod virtio_blk;
