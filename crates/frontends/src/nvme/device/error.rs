//! What is told to the operator when a device does not become what it is to be.

use std::io;

use thiserror::Error;

/// Why a device could not be made or changed: told to the operator.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A setting is out of its range.
    #[error("device {device}: {what}")]
    Config {
        /// The device's name.
        device: String,
        /// Which, and its range.
        what: &'static str,
    },
    /// Shared memory for the controller could not be made.
    #[error("device {device}: cannot make its shared memory: {source}")]
    Memory {
        /// The device's name.
        device: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The socket cannot be watched.
    #[error("device {device}: cannot watch its socket: {source}")]
    Socket {
        /// The device's name.
        device: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// There is no card for it.
    #[error("device {device}: no place on an engine: {why}")]
    Card {
        /// The device's name.
        device: String,
        /// Why not, and what to do.
        why: String,
    },
    /// The namespace identifier is 0, larger than the device allows, or taken.
    #[error("device {device}: namespace identifier {nsid} is taken, or not between 1 and {largest}")]
    Nsid {
        /// The device's name.
        device: String,
        /// The identifier asked for.
        nsid: u32,
        /// The largest possible.
        largest: u32,
    },
    /// Every namespace identifier is taken.
    #[error("device {device}: all {largest} namespace identifiers are taken")]
    Full {
        /// The device's name.
        device: String,
        /// How many there are.
        largest: u32,
    },
    /// No such namespace.
    #[error("device {device}: no namespace {nsid}")]
    Missing {
        /// The device's name.
        device: String,
        /// The identifier asked for.
        nsid: u32,
    },
}
