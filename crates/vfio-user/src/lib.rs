//! The vfio-user protocol: a device in one process, the machine that uses it in another, a unix socket between them.
//! Server and client; nothing here knows what the device is.
//!
//! ```text
//!                     one unix socket, one client, one thread on each side
//!   client                                                              server
//!   Client ── call ──> Transport ══ header | payload | fds ══> Transport ──> Connection::receive
//!      ^                                                                        │ Request::parse (lengths, flags, fds)
//!      │                                                                        │ dispatch       (indexes, ranges)
//!      │                                                                        v
//!      └──────────────────────────── reply ◄──────────────────────────────── dyn Device
//!   ClientMemory ◄──────── DMA_READ, DMA_WRITE ◄──────── Connection::dma_read, dma_write
//! ```
//!
//! # Invariants
//!
//! - [`Connection`] never blocks and holds bounded memory, whatever the client sends or does not read: messages have a
//!   largest size, memory is taken as bytes arrive, and a client that does not take its replies is not read from.
//! - Requests are handled one at a time, in order. One whose [`Outcome`] is `Later` holds back all that follow.
//! - A file descriptor belongs to the message whose bytes it came with, or the connection ends. All are owned, so what
//!   nobody wants is closed: by whoever has the connection, for that may wait ([`Received`]).
//! - A message that is framed wrongly ends the connection; one that is wrong inside is answered with an errno.
//! - On a connection that outlives its server ([`Keep`]), a request stays in the socket until it is answered, and is answered once.
//! - A [`Device`] sees only checked values: region, interrupt and DMA ranges exist and do not wrap.
//!
//! # What it does not do
//!
//! - Twin sockets and I/O event fds, which are not offered, and the first migration protocol. The second one ([`Migration`]) is
//!   answered with `EOPNOTSUPP` by a device that has none.
//! - Mapping memory: it hands over file descriptors, and says nothing about what lies behind them. A file may be shorter
//!   than its announced range, or become so.
//! - Reaching QEMU's memory by messages: up to version 11.1 QEMU takes and gives the data of DMA_READ and DMA_WRITE four
//!   bytes before where the protocol has it. A front end should refuse memory without a file (`share=on` is missing),
//!   or use it only where losing data is harmless.

#![forbid(unsafe_code)]

mod client;
pub mod codec;
mod device;
mod listener;
mod migration;
mod received;
mod server;
#[cfg(test)]
mod toy;
mod transport;

pub use client::{Client, ClientError, ClientMemory, ClientRegion, Mapping, SmallWrite};
pub use codec::{Capabilities, ProtocolError, VersionError};
pub use device::{
    Device, DeviceInfo, DmaMap, DmaUnmap, IrqAction, IrqData, IrqFlags, IrqInfo, IrqSet, MmapArea, Outcome, RegionFlags,
    RegionInfo, pci,
};
pub use listener::{Listener, ListenerError, SocketPlace};
pub use migration::{LogRange, Migration, MigrationState};
pub use received::Received;
pub use rustix::io::Errno;
pub use server::{Connection, ConnectionError, DmaError, Message, Progress, Reply, RequestId, Resumed};
pub use transport::{Frame, Keep, TransportError};
