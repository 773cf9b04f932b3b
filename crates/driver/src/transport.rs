//! The way to a PCI function: registers, mapped areas, DMA maps, interrupts.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use millrace_memory::Mapping;
use millrace_vfio_user as vfio;
use thiserror::Error;

use crate::{dma::DmaRange, vfio_pci::VfioError};

/// Why the function could not be reached.
#[derive(Debug, Error)]
pub enum TransportError {
    /// The vfio-user connection.
    #[error(transparent)]
    VfioUser(#[from] vfio::ClientError),
    /// The physical function.
    #[error(transparent)]
    VfioPci(#[from] VfioError),
    /// A part of a region that the function offers for mapping could not be mapped.
    #[error("mapping {size:#x} bytes at {offset:#x} of region {region}")]
    Map {
        /// The region's index.
        region: u32,
        /// Where the part starts in the region.
        offset: u64,
        /// Bytes.
        size: u64,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// A part of a region that is mapped into this process.
#[derive(Clone, Debug)]
pub struct MappedArea {
    /// Where it starts in the region, in bytes.
    pub offset: u64,
    /// The memory.
    pub mapping: Arc<Mapping>,
}

/// A PCI function as its driver reaches it. Calls may block.
pub trait Transport: Send {
    /// Reads `buf.len()` bytes of a region.
    fn region_read(&mut self, region: u32, offset: u64, buf: &mut [u8]) -> Result<(), TransportError>;
    /// Writes bytes of a region; they have taken effect on return.
    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError>;
    /// Writes bytes of a region; they take effect in order, but perhaps later, and errors may go unheard.
    fn region_write_posted(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError>;
    /// Maps all that the function lets one map of a region.
    fn map_region(&mut self, region: u32) -> Result<Vec<MappedArea>, TransportError>;
    /// Lets the function read and write `range`, which is backed by `fd` from `offset` on.
    fn dma_map(&mut self, range: DmaRange, fd: BorrowedFd<'_>, offset: u64) -> Result<(), TransportError>;
    /// Takes `range` away: the function does not touch it any more on return.
    fn dma_unmap(&mut self, range: DmaRange) -> Result<(), TransportError>;
    /// Has nothing mapped at `range` from now on; false: something is, or was asked for otherwise. Where nobody but the caller maps
    /// anything, there is nothing to do.
    fn keep_free(&mut self, _range: DmaRange) -> bool {
        true
    }
    /// Number of MSI-X vectors.
    fn vectors(&mut self) -> Result<u32, TransportError>;
    /// Has vectors `0..fds.len()` signalled through event fds.
    fn set_vectors(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), TransportError>;
    /// Forgets the event fds of all vectors.
    fn disable_vectors(&mut self) -> Result<(), TransportError>;
    /// Resets the function: it touches no memory any more on return.
    ///
    /// # Errors
    /// Also when it has no reset.
    fn reset(&mut self) -> Result<(), TransportError>;
    /// Fails when the function is gone. Does not block.
    fn check(&mut self) -> Result<(), TransportError>;
}

/// The transport, shared by a controller and the queue pairs that ring doorbells through it: these may be on other threads.
#[derive(Clone)]
pub(crate) struct SharedTransport(Arc<Mutex<dyn Transport>>);

impl SharedTransport {
    pub(crate) fn new(transport: impl Transport + 'static) -> Self {
        Self(Arc::new(Mutex::new(transport)))
    }

    /// Whoever panicked with it has left it as it is: it keeps no state between calls that could be half made.
    pub(crate) fn get(&self) -> MutexGuard<'_, dyn Transport + 'static> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A PCI function behind a vfio-user socket.
pub struct VfioUser {
    client: vfio::Client,
}

// SAFETY: what keeps the client from being `Send` by itself is the `Rc` of a server's connection that outlives the server; a client's
// connection never has one, for both ways to make a client below make none.
unsafe impl Send for VfioUser {}

impl VfioUser {
    /// Connects to the server on `path`; `timeout` bounds every call.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, TransportError> {
        Ok(Self { client: vfio::Client::connect(path, timeout)? })
    }

    /// Speaks over a connection that was made already.
    pub fn from_stream(stream: UnixStream, timeout: Duration) -> Result<Self, TransportError> {
        Ok(Self { client: vfio::Client::from_stream(stream, timeout)? })
    }

    /// The client, for messages that are not in [`Transport`].
    pub fn client(&mut self) -> &mut vfio::Client {
        &mut self.client
    }
}

impl Transport for VfioUser {
    fn region_read(&mut self, region: u32, offset: u64, buf: &mut [u8]) -> Result<(), TransportError> {
        Ok(self.client.region_read(region, offset, buf)?)
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError> {
        Ok(self.client.region_write(region, offset, data)?)
    }

    fn region_write_posted(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError> {
        Ok(self.client.region_write_posted(region, offset, data)?)
    }

    fn map_region(&mut self, region: u32) -> Result<Vec<MappedArea>, TransportError> {
        let info = self.client.region_info(region)?;
        let Some(fd) = info.fd else { return Ok(Vec::new()) };
        let whole = [vfio::MmapArea { offset: 0, size: info.size }];
        let areas = if info.areas.is_empty() { &whole[..] } else { &info.areas[..] };
        let map = |area: &vfio::MmapArea| {
            let failed = |source| TransportError::Map { region, offset: area.offset, size: area.size, source };
            let too_large = || failed(io::ErrorKind::InvalidInput.into());
            let size = usize::try_from(area.size).map_err(|_| too_large())?;
            let offset = info.offset.checked_add(area.offset).ok_or_else(too_large)?;
            let mapping = Arc::new(Mapping::shared(fd.as_fd(), offset, size, true).map_err(failed)?);
            Ok(MappedArea { offset: area.offset, mapping })
        };
        areas.iter().map(map).collect()
    }

    fn dma_map(&mut self, range: DmaRange, fd: BorrowedFd<'_>, offset: u64) -> Result<(), TransportError> {
        let map = vfio::Mapping { address: range.iova, size: range.len as u64, offset, readable: true, writable: true };
        Ok(self.client.dma_map(&map, Some(fd))?)
    }

    fn dma_unmap(&mut self, range: DmaRange) -> Result<(), TransportError> {
        Ok(self.client.dma_unmap(vfio::DmaUnmap::Range { address: range.iova, size: range.len as u64 })?)
    }

    fn vectors(&mut self) -> Result<u32, TransportError> {
        Ok(self.client.irq_info(vfio::pci::IRQ_MSIX)?.count)
    }

    fn set_vectors(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        Ok(self.client.set_irq_eventfds(vfio::pci::IRQ_MSIX, 0, fds)?)
    }

    fn disable_vectors(&mut self) -> Result<(), TransportError> {
        Ok(self.client.irq_action(vfio::pci::IRQ_MSIX, 0, 0, vfio::IrqAction::Trigger)?)
    }

    fn reset(&mut self) -> Result<(), TransportError> {
        Ok(self.client.reset()?)
    }

    fn check(&mut self) -> Result<(), TransportError> {
        self.client.serve_memory(Duration::ZERO)?;
        Ok(())
    }
}
