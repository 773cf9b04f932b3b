//! The controller on a shard and on a socket: `millrace_engine::Device` and `millrace_vfio_user::Device`.

use std::io;

use thiserror::Error;

/// Why a device could not be made or changed: told to the operator.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// Shared memory for the controller could not be made.
    #[error("device {device}: cannot make its shared memory: {source}")]
    Memory {
        /// The device's name.
        device: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// What a device is doing, for the operator.
#[derive(Clone, Debug, Default)]
pub struct DeviceStatus {}

/// An NVMe controller with its listening socket and, at most, one client.
pub struct NvmeDevice {}
