//! The decisions of the classic storage functions, once for software and hardware.
//!
//! ```text
//!                 configuration   state (128 bits)   row of a table
//!                        │              │                  │
//!   command ──key──►  ┌──▼──────────────▼──────────────────▼──┐ ──► verdict: pass, fan out, hold, reject
//!                     │ submit      complete      step        │ ──► the state from then on
//!                     └──────────────────────────────────────-┘
//!      this crate, called as it is     ·or·     hw/rtl/generated/fn_*.sv, made from it by hw/translate
//! ```
//!
//! Every function is pure: what it decides follows from its arguments alone. Who calls it owns everything else — where the state is kept, which command comes
//! first, when one that was held is asked again, how the disks' answers are gathered. `key` tells which state, or which row, a command needs;
//! a second command with the same key is asked only when what the first one left has been stored.
//!
//! Invariants, which make the same text a program and a circuit:
//! * No loop without a bound, no division, no allocation, no panic: all arithmetic is wrapping, saturating or of known width.
//! * All types are `repr(C)` words of fixed width. What is laid out in bits of a word has a method here, and nowhere else.
//! * A verdict other than pass or fan out leaves the state as it was: who is held or refused has paid nothing.

#![no_std]
#![forbid(unsafe_code)]
#![allow(
    clippy::needless_bitwise_bool,
    reason = "both sides of an `&` are circuits side by side; a branch is a choice after another"
)]

#[cfg(test)]
extern crate std;

pub mod cache;
pub mod chain;
mod command;
mod config;
pub mod copy;
pub mod hardware;
pub mod namespace;
pub mod replicate;
pub mod share;
mod state;
pub mod status;
#[cfg(test)]
mod tests;
pub mod throttle;
mod verdict;

pub use command::{Command, opcode};
pub use config::Config;
pub use state::State;
pub use verdict::Verdict;

/// Bits of a block's number: 128 PiB with blocks of 512 bytes.
pub const LBA_BITS: u32 = 48;
/// The largest block's number.
pub const LBA_MASK: u64 = (1 << LBA_BITS) - 1;
/// Bits of a set of disks.
pub const DISKS: u32 = 16;
