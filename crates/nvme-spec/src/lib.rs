//! What NVM Express defines, as types.
//!
//! A vocabulary for both sides of a queue: the controller that millrace shows to a guest and the driver that talks to
//! a device. It covers the NVM Express Base Specification 2.1 ("Base"), the NVM Command Set Specification 1.1 ("NVM")
//! and the NVMe over PCIe Transport Specification 1.1 ("PCIe"); sections are cited by these short names.
//!
//! ```text
//!    host memory                    this crate                        the user's code
//!   ┌────────────┐  copied once  ┌──────────────┐  decode dwords  ┌─────────────────────┐
//!   │ 64 B entry ├──────────────►│ command::Sqe ├────────────────►│ nvm::ReadWriteCdw12 │
//!   └────────────┘               └──────────────┘                 └──────────┬──────────┘
//!   ┌────────────┐               ┌──────────────┐                 ┌──────────▼──────────┐
//!   │ 16 B entry │◄──────────────┤ command::Cqe │◄────────────────┤   status::Status    │
//!   └────────────┘               └──────────────┘                 └─────────────────────┘
//! ```
//!
//! Invariants:
//! - Every type is valid for every bit pattern: wire values are newtypes with constants, never enums, so what a peer
//!   sends can always be represented, compared and refused.
//! - Sizes and the absence of padding are checked at compile time; reserved fields are private and zero in what
//!   [`zerocopy::FromZeros::new_zeroed`] makes.
//! - The name of a 0's-based field ends in `_z`; [`from_zeros_based`] and [`to_zeros_based`] convert.
//! - Decoding never panics. The `set_…`/`with_…` methods of bit fields take the caller's own values and assert in debug
//!   builds that they fit.
//!
//! It does not read memory, keep state, or decide which status an error deserves.

#![no_std]
#![forbid(unsafe_code)]

#[macro_use]
mod macros;

pub mod admin;
pub mod command;
pub mod features;
pub mod identify;
pub mod log;
pub mod nvm;
pub mod opcode;
pub mod optional;
pub mod pci;
pub mod prp;
pub mod registers;
pub mod reservation;
pub mod sgl;
pub mod status;

pub use command::{CommandId, ControllerId, Cqe, NamespaceId, QueueId, Sqe};
pub use opcode::{AdminOpcode, NvmOpcode};
pub use registers::Version;
pub use status::{Status, StatusField};

// Wire integers are read in place as native ones.
const _: () = assert!(cfg!(target_endian = "little"), "NVMe structures are little endian; so must the host be");

/// The count that a 0's-based field stands for (Base 1.4.2): the value plus one.
#[must_use]
pub const fn from_zeros_based(value_z: u16) -> u32 {
    value_z as u32 + 1
}

/// The 0's-based value of a count (Base 1.4.2); `None` for zero and for what does not fit in 16 bits.
#[must_use]
pub const fn to_zeros_based(count: u32) -> Option<u16> {
    match count {
        1..=0x1_0000 => Some((count - 1) as u16),
        _ => None,
    }
}

#[cfg(test)]
extern crate std;
#[cfg(test)]
mod tests;
