//! placeholder
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod codec;
mod device;
mod listener;
mod server;
mod transport;

pub use codec::{Capabilities, ProtocolError, VersionError};
pub use device::{
    Device, DeviceInfo, DmaMap, DmaUnmap, IrqAction, IrqData, IrqFlags, IrqInfo, IrqSet, MmapArea, Outcome,
    RegionFlags, RegionInfo, pci,
};
pub use listener::{Listener, ListenerError};
pub use rustix::io::Errno;
pub use server::{Connection, ConnectionError, DmaError, Message, Progress, Reply, RequestId};
pub use transport::{Frame, TransportError};
