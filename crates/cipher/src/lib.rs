//! Ciphers and keys for volumes at rest: the one place that touches a key, and the only one that calls the C library.
//!
//! ```text
//!   key source ("file:…", "keyring:…", "command:…") ─► Secret<32> ─┐ seals / opens
//!   random ─► Secret<64> (volume key) ◄──────────── superblock ◄──┘ (AES-256-GCM-SIV)
//!                 │
//!                 ├─► Xts: segment ─► segment, one data unit per block (AES-256-XTS)      by the processor, or the library
//!                 ├─► Aead: segment + tag ─► segment (AES-256-GCM)
//!                 └─► Sealer: segment + tag, in its place, and codes of pages (AES-256-GCM-SIV)
//! ```
//!
//! Invariants:
//! * A key, and everything that is computed from one ahead of time, lives in the arena of `arena.rs`: locked into memory (never
//!   swapped), left out of core dumps and of children, zeroed when it is given back. That includes what the C library
//!   allocates.
//! * Nothing here prints a key: secrets have no `Display`, and their `Debug` says only how long they are.
//! * Data are taken from and put into [`Segment`](millrace_memory::Segment)s, whose bytes a guest may change at any time: the
//!   cipher reads each byte once and makes nothing of it but other bytes.
//!
//! It does not know volumes, blocks on a medium or where a sealed key is kept: that is the crypt service's. It has one
//! piece of cryptography of its own: `vaes.rs`, AES-256-XTS out of the processor's AES instructions, where there are wide ones. All else
//! is the library's.

mod aead;
mod arena;
mod error;
mod library;
mod secret;
mod source;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod vaes;
mod xts;

pub use aead::{Aead, NONCE_BYTES, Sealer, TAG_BYTES, open, seal};
pub use error::{CipherError, KeyError};
pub use secret::{Secret, random};
pub use source::{KeySource, Runner, Running, is_open_to_all, run_commands_by};
pub use xts::{Run, Xts, foresee};
