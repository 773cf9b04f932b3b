//! What guests see: one folder per kind of device.
//!
//! ```text
//!   guest ──vfio-user──► nvme/ ──Request──► millrace_block::Volume
//! ```
//!
//! Front ends translate a guest's protocol into requests on volumes, and nothing else. They never meet back ends or services
//! by name, and they trust nothing that comes from a guest.

pub mod nvme;
