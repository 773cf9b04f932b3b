//! Traces of requests: the file, what is in it, and what it means. It needs no daemon.
//!
//! ```text
//!   daemon ─► format::Writer ─► file ─► format::Reader ─► requests::Trace ─┬─► report ─► text, JSON, plot
//!                                                                          ├─► guest: joined with the guest's own trace
//!                                                                          └─► export: Perfetto, blktrace
//! ```
//!
//! A file may be damaged, cut off, or somebody else's: nothing here panics on one, and what is lost is said.
//!
//! It records nothing; that is `millrace_block::trace`.

#![forbid(unsafe_code)]
#![allow(clippy::cast_precision_loss, clippy::cast_sign_loss, reason = "what is shown to people is rounded")]

pub mod export;
pub mod format;
pub mod guest;
pub mod plot;
pub mod report;
pub mod requests;
#[cfg(test)]
mod samples;

pub use format::FormatError;
pub use report::Report;
pub use requests::Trace;
