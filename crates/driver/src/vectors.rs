//! Interrupt vectors, and their masks in the function's MSI-X table (PCI 6.8.2.6), where that is mapped.
//!
//! A masked vector sends no message. What it would have sent is pending, and is sent when the mask is taken off: so a queue is polled
//! without interrupts, and none is lost when they are wanted again. Both are a store to the device; the kernel's own way to the masks
//! would be a system call, which VFIO does not have for MSI-X. The kernel lets the table be mapped because the IOMMU remaps interrupts:
//! a device can send only those that it was given, whatever is in its table.

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use millrace_memory::Mapping;
use millrace_nvme_spec::pci::{CapabilityId, MsixControl, MsixEntry, MsixLocation};
use rustix::event::{EventfdFlags, eventfd};

use crate::{
    admin::CONFIG,
    controller::Controller,
    doorbell::BAR0,
    error::{DriverError, during},
    shared::SharedU32,
    transport::MappedArea,
};

/// Vector Control: Mask Bit.
const MASKED: u32 = 1;

/// The MSI-X table, as far as it is mapped.
#[derive(Debug)]
pub(crate) struct VectorTable {
    mapping: Arc<Mapping>,
    start: usize,
}

impl VectorTable {
    fn new(place: MsixLocation, areas: &[MappedArea]) -> Option<Self> {
        areas.iter().find_map(|area| {
            let start = usize::try_from(u64::from(place.offset()).checked_sub(area.offset)?).ok()?;
            (start < area.mapping.len()).then(|| Self { mapping: Arc::clone(&area.mapping), start })
        })
    }

    /// The mask of a vector; `None`: it is not mapped, or reads as what is gone.
    pub(crate) fn mask(&self, vector: u16) -> Option<VectorMask> {
        let at = self.start + usize::from(vector) * size_of::<MsixEntry>() + std::mem::offset_of!(MsixEntry, control);
        let control = SharedU32::new(&self.mapping, at)?;
        let rest = control.load();
        (rest != u32::MAX).then_some(VectorMask { control, rest: rest & !MASKED })
    }
}

/// One vector's mask.
#[derive(Debug)]
pub(crate) struct VectorMask {
    control: SharedU32,
    /// What else is in its word.
    rest: u32,
}

impl VectorMask {
    pub(crate) fn set(&self) {
        self.control.store(self.rest | MASKED);
    }

    /// Takes it off; false: it is still on, for the device is gone. Reading it back also brings in what the device has written to memory
    /// before it saw the store: whoever looks at a completion queue now sees all that no message will tell of.
    #[must_use]
    pub(crate) fn clear(&self) -> bool {
        self.control.store(self.rest);
        self.control.load() & MASKED == 0
    }
}

impl Controller {
    /// Has MSI-X vectors `0..count` signalled through event fds, for queues created from now on, and enables MSI-X.
    pub fn enable_vectors(&mut self, count: u16) -> Result<(), DriverError> {
        let make = |_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let fds = (0..count).map(make).collect::<Result<Vec<_>, _>>();
        let fds = fds.map_err(|errno| DriverError::EventFd(errno.into()))?;
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        self.transport.get().set_vectors(&borrowed).map_err(during("setting interrupt event fds"))?;
        self.vectors = fds;
        self.set_msix(true)?;
        self.vector_table = self.find_vector_table()?;
        Ok(())
    }

    /// Disables MSI-X and forgets the event fds. Queues that use them get no more interrupts.
    pub fn disable_vectors(&mut self) -> Result<(), DriverError> {
        self.set_msix(false)?;
        self.vectors.clear();
        self.vector_table = None;
        self.transport.get().disable_vectors().map_err(during("clearing interrupt event fds"))
    }

    /// Whether queues with vectors can be polled without interrupts: see [`QueuePair::mask_interrupt`](crate::QueuePair::mask_interrupt).
    pub fn masks_vectors(&self) -> bool {
        self.vector_table.is_some()
    }

    fn set_msix(&self, enable: bool) -> Result<(), DriverError> {
        let at = self.find_capability(CapabilityId::MSI_X)?.ok_or(DriverError::NoMsix)? + 2;
        let mut transport = self.transport.get();
        let mut bytes = [0; 2];
        transport.region_read(CONFIG, at, &mut bytes).map_err(during("reading MSI-X Message Control"))?;
        let control = MsixControl::from_bits(u16::from_le_bytes(bytes)).with_enable(enable);
        let bytes = control.with_function_mask(false).into_bits().to_le_bytes();
        transport.region_write(CONFIG, at, &bytes).map_err(during("writing MSI-X Message Control"))
    }

    fn find_vector_table(&self) -> Result<Option<VectorTable>, DriverError> {
        let Some(at) = self.find_capability(CapabilityId::MSI_X)? else { return Ok(None) };
        let mut bytes = [0; 4];
        let mut transport = self.transport.get();
        transport.region_read(CONFIG, at + 4, &mut bytes).map_err(during("reading where the MSI-X table is"))?;
        let place = MsixLocation::from_bits(u32::from_le_bytes(bytes));
        if u32::from(place.bir()) == BAR0 {
            return Ok(VectorTable::new(place, self.doorbells.areas()));
        }
        // Vectors work without: what cannot be mapped is not masked.
        let areas = transport.map_region(place.bir().into()).unwrap_or_default();
        Ok(VectorTable::new(place, &areas))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_found_in_the_table_and_leave_the_rest_of_their_word() {
        let mapping = Arc::new(Mapping::anonymous_shared(8192).unwrap());
        let areas = [MappedArea { offset: 0x2000, mapping: Arc::clone(&mapping) }];
        let table = VectorTable::new(MsixLocation::at(0, 0x3000).unwrap(), &areas).unwrap();
        let word = SharedU32::new(&mapping, 0x1000 + 3 * 16 + 12).unwrap();
        word.store(0xab00_0001);
        let mask = table.mask(3).unwrap();
        assert!(mask.clear());
        assert_eq!(word.load(), 0xab00_0000);
        mask.set();
        assert_eq!(word.load(), 0xab00_0001);
    }

    #[test]
    fn a_table_that_is_not_mapped_or_is_gone_has_no_masks() {
        let mapping = Arc::new(Mapping::anonymous_shared(4096).unwrap());
        let areas = [MappedArea { offset: 0x2000, mapping: Arc::clone(&mapping) }];
        for offset in [0x1000, 0x3000] {
            assert!(VectorTable::new(MsixLocation::at(0, offset).unwrap(), &areas).is_none(), "{offset:#x}");
        }
        let table = VectorTable::new(MsixLocation::at(0, 0x2ff0).unwrap(), &areas).unwrap();
        assert!(table.mask(0).is_some());
        assert!(table.mask(1).is_none(), "beyond what is mapped");
        SharedU32::new(&mapping, 0xffc).unwrap().store(u32::MAX);
        assert!(table.mask(0).is_none(), "it reads as ones");
    }
}
