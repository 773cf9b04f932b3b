//! A physical PCI function, given to this process by Linux (VFIO) behind an IOMMU.
//!
//! ```text
//!   /sys/bus/pci/devices/ADDRESS ── class, driver, IOMMU group: is it ours? what to do if not
//!   /dev/vfio/devices/vfioN, /dev/iommu ─────┐ where the kernel has both
//!   /dev/vfio/GROUP, container /dev/vfio/vfio ┴──► Iommu: device addresses ◄── memory (pinned while mapped)
//!        └──► device fd: regions (BAR 0 mapped), configuration, MSI-X and error event fds, reset
//! ```
//!
//! # Invariants
//!
//! - The function reaches what was mapped for it and nothing else: the IOMMU refuses the rest.
//! - What is mapped for it is memory that Rust owns nothing in: [`DmaMemory`](crate::DmaMemory), and memory that peers shared.
//! - When the last descriptor closes, also by a crash, the kernel stops its transfers, resets it and takes all its mappings away.
//! - A function that is gone reads as ones: that is an error at the next look, never a crash.
//!
//! # What it does not do
//!
//! Bind drivers: that is root's. Devices of one group in several processes: a group is one owner's.

mod address;
mod error;
mod iommu;
mod sys;
mod take;

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    sync::Arc,
};

use millrace_memory::Mapping;
use rustix::event::{EventfdFlags, eventfd};

pub use address::{ParseAddressError, PciAddress};
pub use error::VfioError;
pub use iommu::Iommu;
pub use take::device_files;

use crate::{
    dma::DmaRange,
    transport::{MappedArea, Transport, TransportError},
};

const IRQ_MSIX: u32 = 2;
const IRQ_ERROR: u32 = 3;
const IRQ_REQUEST: u32 = 4;

/// A physical function.
pub struct VfioPci {
    address: PciAddress,
    device: File,
    iommu: Arc<Iommu>,
    /// By index: offset in the device's file, and size.
    regions: Vec<(u64, u64)>,
    resets: bool,
    /// Signalled when the kernel sees an error, and when it wants the device back.
    error: Option<OwnedFd>,
    request: Option<OwnedFd>,
    /// Our own mappings of what is mapped for the device, by device address.
    mapped: BTreeMap<u64, Mapping>,
}

impl VfioPci {
    /// Takes the NVMe controller at this address.
    ///
    /// # Errors
    /// With what to do when it is not bound to vfio-pci, has no IOMMU, or is in use.
    pub fn open(address: PciAddress) -> Result<Self, VfioError> {
        let (device, iommu) = take::take(address)?;
        let kernel = |action| move |source| VfioError::Kernel { address, action, source };
        let (info, _) =
            sys::exchange(&device, sys::DEVICE_GET_INFO, sys::DeviceInfo::default()).map_err(kernel("describe it"))?;
        if info.flags & sys::DEVICE_PCI == 0 {
            return Err(VfioError::Unknown("PCI functions"));
        }
        let regions = (0..info.regions.min(16)).map(|index| {
            // A region that there is not (VGA) is one of no bytes.
            let asked = sys::exchange(&device, sys::DEVICE_GET_REGION_INFO, sys::RegionInfo { index, ..Default::default() });
            asked.map_or((0, 0), |(region, _)| (region.offset, region.size))
        });
        let regions = regions.collect();
        let resets = info.flags & sys::DEVICE_RESETS != 0;
        let [error, request] = [IRQ_ERROR, IRQ_REQUEST].map(|index| signal(&device, index, info.irqs));
        Ok(Self {
            address,
            device: File::from(device),
            iommu: Arc::new(iommu),
            regions,
            resets,
            error,
            request,
            mapped: BTreeMap::new(),
        })
    }

    /// Where it is.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// Its device addresses, to map more memory beside the driver's own.
    pub fn iommu(&self) -> Arc<Iommu> {
        Arc::clone(&self.iommu)
    }

    /// What becomes readable when the kernel reports an error or wants the device back; [`check`](Transport::check) says which.
    pub fn signals(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.error.iter().chain(&self.request).map(AsFd::as_fd)
    }

    /// Where bytes of a region are in the device's file.
    fn place(&self, region: u32, offset: u64, size: usize) -> Result<u64, VfioError> {
        let bad = VfioError::NoRegion { address: self.address, region, offset, size };
        let Some((start, len)) = self.regions.get(region as usize) else { return Err(bad) };
        match offset.checked_add(size as u64) {
            Some(end) if end <= *len => Ok(start + offset),
            _ => Err(bad),
        }
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> VfioError {
        let address = self.address;
        move |source| VfioError::Kernel { address, action, source }
    }
}

impl Transport for VfioPci {
    fn region_read(&mut self, region: u32, offset: u64, buf: &mut [u8]) -> Result<(), TransportError> {
        let at = self.place(region, offset, buf.len())?;
        Ok(self.device.read_exact_at(buf, at).map_err(self.failed("read its registers"))?)
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError> {
        let at = self.place(region, offset, data.len())?;
        Ok(self.device.write_all_at(data, at).map_err(self.failed("write its registers"))?)
    }

    fn region_write_posted(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError> {
        self.region_write(region, offset, data)
    }

    fn map_region(&mut self, region: u32) -> Result<Vec<MappedArea>, TransportError> {
        let asked = sys::RegionInfo { index: region, ..Default::default() };
        let asked = sys::exchange(&self.device, sys::DEVICE_GET_REGION_INFO, asked);
        let (info, more) = asked.map_err(self.failed("describe a region"))?;
        if info.flags & sys::REGION_MMAP == 0 {
            return Ok(Vec::new());
        }
        // Older kernels leave out the page with the MSI-X table.
        let parts = more.pairs(info.cap_offset, sys::CAP_SPARSE_MMAP).unwrap_or_else(|| vec![(0, info.size)]);
        let map = |(offset, size): (u64, u64)| {
            let failed = |source| TransportError::Map { region, offset, size, source };
            let wrong = || failed(io::ErrorKind::InvalidInput.into());
            if offset.checked_add(size).is_none_or(|end| end > info.size) {
                return Err(wrong());
            }
            let len = usize::try_from(size).map_err(|_| wrong())?;
            let mapping = Mapping::shared(self.device.as_fd(), info.offset + offset, len, true).map_err(failed)?;
            Ok(MappedArea { offset, mapping: Arc::new(mapping) })
        };
        parts.into_iter().filter(|(_, size)| *size > 0).map(map).collect()
    }

    fn dma_map(&mut self, range: DmaRange, fd: BorrowedFd<'_>, offset: u64) -> Result<(), TransportError> {
        let mapping = Mapping::shared(fd, offset, range.len, true).map_err(self.failed("map memory for it"))?;
        self.iommu.map_at(range, &mapping)?;
        self.mapped.insert(range.iova, mapping);
        Ok(())
    }

    fn dma_unmap(&mut self, range: DmaRange) -> Result<(), TransportError> {
        self.iommu.unmap(range)?;
        self.mapped.remove(&range.iova);
        Ok(())
    }

    fn keep_free(&mut self, range: DmaRange) -> bool {
        self.iommu.keep_free(range)
    }

    fn vectors(&mut self) -> Result<u32, TransportError> {
        let asked =
            sys::exact(&self.device, sys::DEVICE_GET_IRQ_INFO, sys::IrqInfo { index: IRQ_MSIX, ..Default::default() });
        Ok(asked.map(|info| info.count).map_err(self.failed("describe its interrupts"))?)
    }

    fn set_vectors(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        let fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        Ok(sys::set_irqs(&self.device, IRQ_MSIX, &fds).map_err(self.failed("set its interrupts"))?)
    }

    fn disable_vectors(&mut self) -> Result<(), TransportError> {
        Ok(sys::set_irqs(&self.device, IRQ_MSIX, &[]).map_err(self.failed("clear its interrupts"))?)
    }

    fn reset(&mut self) -> Result<(), TransportError> {
        if !self.resets {
            // Not a success: whoever asks relies on it that the device touches no memory any more.
            return Err(VfioError::NoReset(self.address).into());
        }
        Ok(sys::plain(&self.device, sys::DEVICE_RESET, 0).map(drop).map_err(self.failed("reset it"))?)
    }

    fn check(&mut self) -> Result<(), TransportError> {
        if self.request.as_ref().is_some_and(is_signalled) {
            return Err(VfioError::Removing(self.address).into());
        }
        if self.error.as_ref().is_some_and(is_signalled) {
            return Err(VfioError::Broken(self.address).into());
        }
        // What is gone reads as ones.
        let mut vendor = [0; 2];
        let at = self.place(super::admin::CONFIG, 0, vendor.len())?;
        match self.device.read_exact_at(&mut vendor, at) {
            Ok(()) if vendor != [0xff; 2] => Ok(()),
            _ => Err(VfioError::Removing(self.address).into()),
        }
    }
}

/// Whether an event fd was ever signalled. It is not read: once is for good.
fn is_signalled(fd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// An event fd for one of the device's own signals; `None`: it has none.
fn signal(device: &OwnedFd, index: u32, irqs: u32) -> Option<OwnedFd> {
    if index >= irqs {
        return None;
    }
    let info = sys::exact(device, sys::DEVICE_GET_IRQ_INFO, sys::IrqInfo { index, ..Default::default() }).ok()?;
    if info.count == 0 || info.flags & sys::IRQ_EVENTFD == 0 {
        return None;
    }
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
    sys::set_irqs(device, index, &[fd.as_raw_fd()]).ok()?;
    Some(fd)
}
