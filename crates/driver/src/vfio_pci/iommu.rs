//! The addresses that a device sees: which memory is behind them.

use std::{
    collections::BTreeMap,
    fs::File,
    ops::Range,
    os::fd::AsFd,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use millrace_memory::{Mapping, guard::Region};

use super::{
    PciAddress, VfioError, sys,
    take::{CONTAINER, open},
};
use crate::dma::DmaRange;

/// Smallest unit of a mapping.
const PAGE: u64 = 4096;
/// Where addresses of ours begin: past what a driver chooses for itself, and past all that machines keep for interrupts.
const FIRST: u64 = 1 << 36;
/// Memory lies at the same place within such a piece for the device as for us, so that the IOMMU can use large pages.
const LARGE: u64 = 2 << 20;

/// Who of the kernel keeps the mappings.
#[derive(Debug)]
enum Keeper {
    /// A container, with the device's group in it.
    Container(File),
    /// An address space of iommufd's.
    Space { iommufd: File, ioas: u32 },
}

/// The device's addresses. Dropping them, when the device is closed as well, takes all mappings away.
#[derive(Debug)]
pub struct Iommu {
    address: PciAddress,
    keeper: Keeper,
    /// Addresses that may be used, first to last.
    usable: Vec<(u64, u64)>,
    /// Sizes, by first device address.
    taken: Mutex<BTreeMap<u64, u64>>,
}

impl Iommu {
    /// Those of a device that is opened through its group.
    pub(super) fn of_group(address: PciAddress, group: &File) -> Result<Self, VfioError> {
        let container = open(Path::new(CONTAINER))?;
        let kernel = |action| move |source| VfioError::Kernel { address, action, source };
        let version = sys::plain(&container, sys::GET_API_VERSION, 0).map_err(kernel("ask for VFIO's version"))?;
        if version != sys::API_VERSION {
            return Err(VfioError::Unknown("version 0 of its interface"));
        }
        let type1 = sys::plain(&container, sys::CHECK_EXTENSION, sys::TYPE1V2_IOMMU).map_err(kernel("ask for its IOMMU"))?;
        if type1 == 0 {
            return Err(VfioError::Unknown("the type 1 IOMMU"));
        }
        sys::set_container(group, &container).map_err(kernel("open its group"))?;
        sys::plain(&container, sys::SET_IOMMU, sys::TYPE1V2_IOMMU).map_err(kernel("set its IOMMU up"))?;
        let (info, more) = sys::exchange(&container, sys::IOMMU_GET_INFO, sys::IommuInfo::default())
            .map_err(kernel("describe its IOMMU"))?;
        // Kernels before 5.4 do not tell; 39 bits is the least that translates.
        let usable = more.pairs(info.cap_offset, sys::CAP_IOVA_RANGE).unwrap_or_else(|| vec![(0, (1 << 39) - 1)]);
        Ok(Self { address, keeper: Keeper::Container(container), usable, taken: Mutex::default() })
    }

    /// Those of a device that is opened by itself, and bound to this iommufd.
    pub(super) fn of_device(address: PciAddress, device: impl AsFd, iommufd: File) -> Result<Self, VfioError> {
        let kernel = |action| move |source| VfioError::Kernel { address, action, source };
        let made = sys::exact(&iommufd, sys::IOAS_ALLOC, sys::IoasAlloc::default());
        let ioas = made.map_err(kernel("make an address space for it"))?.ioas;
        let attach = sys::AttachIommufd { table: ioas, ..Default::default() };
        sys::exact(device, sys::DEVICE_ATTACH_IOMMUFD, attach).map_err(kernel("set its IOMMU up"))?;
        // Only now are those left out that the device's place in the machine does not allow.
        let usable = sys::iova_ranges(&iommufd, ioas).map_err(kernel("describe its IOMMU"))?;
        Ok(Self { address, keeper: Keeper::Space { iommufd, ioas }, usable, taken: Mutex::default() })
    }

    /// The interface of the kernel's that keeps the mappings.
    pub fn interface(&self) -> &'static str {
        match self.keeper {
            Keeper::Container(_) => "group",
            Keeper::Space { .. } => "iommufd",
        }
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps memory at a device address of the caller's choice.
    pub(super) fn map_at(&self, range: DmaRange, memory: &Mapping) -> Result<(), VfioError> {
        let DmaRange { iova, len: size } = range;
        let last = (size as u64).checked_sub(1).and_then(|rest| iova.checked_add(rest));
        let fits = last.is_some_and(|last| self.usable.iter().any(|(first, end)| *first <= iova && last <= *end));
        if !fits || size > memory.len() || !iova.is_multiple_of(PAGE) {
            return Err(VfioError::BadRange { address: self.address, iova, size });
        }
        let mut taken = self.taken();
        if !is_free(&taken, iova, size as u64) {
            return Err(VfioError::BadRange { address: self.address, iova, size });
        }
        self.map(iova, memory.as_ptr() as u64, size as u64)?;
        taken.insert(iova, size as u64);
        Ok(())
    }

    /// Finds free addresses for memory that a peer shared with us, and keeps them for it until they are [unmapped](Self::unmap).
    pub fn place_region(&self, region: &Region) -> Result<DmaRange, VfioError> {
        let (start, size) = (region.start() as u64, region.len() as u64);
        let mut taken = self.taken();
        let free =
            self.usable.iter().find_map(|(first, last)| free_place(&taken, (*first).max(FIRST), *last, start % LARGE, size));
        let iova = free.ok_or(VfioError::BadRange { address: self.address, iova: FIRST, size: region.len() })?;
        taken.insert(iova, size);
        Ok(DmaRange { iova, len: region.len() })
    }

    /// Makes a part of a region reachable for the device, at its place behind the address `iova` that was [found](Self::place_region) for the
    /// region. It is pinned until [unmapped](Self::unmap), also when it is not mapped here any more. Takes the longer the larger the part is.
    pub fn map_part(&self, region: &Region, iova: u64, part: Range<usize>) -> Result<(), VfioError> {
        let size = part.end.checked_sub(part.start).filter(|_| part.end <= region.len());
        let size = size.filter(|_| self.taken().get(&iova) == Some(&(region.len() as u64)));
        let bad = VfioError::BadRange { address: self.address, iova, size: region.len() };
        let size = size.ok_or(bad)? as u64;
        // No overflow: both ends lie within ranges that do not wrap.
        self.map(iova + part.start as u64, (region.start() + part.start) as u64, size)
    }

    /// Has nothing mapped at these addresses from now on; false: something is.
    pub(super) fn keep_free(&self, DmaRange { iova, len }: DmaRange) -> bool {
        let mut taken = self.taken();
        let free = is_free(&taken, iova, len as u64);
        if free {
            taken.insert(iova, len as u64);
        }
        // Asked for once more.
        free || taken.get(&iova) == Some(&(len as u64))
    }

    fn map(&self, iova: u64, address: u64, size: u64) -> Result<(), VfioError> {
        // The kernel checks that the memory is there and may be written, and keeps its pages.
        let mapped = match &self.keeper {
            Keeper::Container(container) => {
                let map = sys::DmaMap { flags: sys::MAP_READ | sys::MAP_WRITE, address, iova, size, argsz: 0 };
                sys::exact(container, sys::IOMMU_MAP_DMA, map).map(drop)
            }
            Keeper::Space { iommufd, ioas } => {
                let flags = sys::IOAS_MAP_FIXED | sys::IOAS_MAP_READ | sys::IOAS_MAP_WRITE;
                sys::exact(
                    iommufd,
                    sys::IOAS_MAP,
                    sys::IoasMap { flags, ioas: *ioas, address, size, iova, ..Default::default() },
                )
                .map(drop)
            }
        };
        mapped.map_err(|source| VfioError::Kernel { address: self.address, action: "map memory for it", source })
    }

    /// Takes memory away, in however many parts it was mapped: the device does not reach it any more on return. `range` is what was mapped of
    /// it; with nothing, only its addresses are given back.
    pub fn unmap(&self, range: DmaRange) -> Result<(), VfioError> {
        let mut taken = self.taken();
        let (iova, size) = (range.iova, range.len as u64);
        let unmapped = match &self.keeper {
            _ if size == 0 => Ok(()),
            Keeper::Container(container) => {
                sys::exact(container, sys::IOMMU_UNMAP_DMA, sys::DmaUnmap { iova, size, ..Default::default() }).map(drop)
            }
            Keeper::Space { iommufd, ioas } => {
                sys::exact(iommufd, sys::IOAS_UNMAP, sys::IoasUnmap { ioas: *ioas, iova, size, argsz: 0 }).map(drop)
            }
        };
        unmapped.map_err(|source| VfioError::Kernel { address: self.address, action: "unmap memory of it", source })?;
        taken.remove(&iova);
        Ok(())
    }
}

/// Whether nothing lies at `size` bytes from `iova` on.
fn is_free(taken: &BTreeMap<u64, u64>, iova: u64, size: u64) -> bool {
    let Some(last) = size.checked_sub(1).and_then(|rest| iova.checked_add(rest)) else { return false };
    // They do not overlap: the one that starts last ends last.
    taken.range(..=last).next_back().is_none_or(|(start, len)| start + len <= iova)
}

/// The first free address from `first` to `last` for `size` bytes that lies `within` a large page as wanted.
fn free_place(taken: &BTreeMap<u64, u64>, first: u64, last: u64, within: u64, size: u64) -> Option<u64> {
    let place = |from: u64| {
        let at = (from - from % LARGE).checked_add(within)?;
        if at < from { at.checked_add(LARGE) } else { Some(at) }
    };
    let mut at = place(first)?;
    for (start, len) in taken {
        let end = at.checked_add(size)?;
        if end <= *start {
            break;
        }
        if start + len > at {
            at = place(start + len)?;
        }
    }
    (at.checked_add(size)?.checked_sub(1)? <= last).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_not_free() {
        let taken = BTreeMap::from([(0x1000, 0x1000), (0x4000, 0x2000)]);
        for (iova, size) in [(0, 0x1000), (0x2000, 0x2000), (0x6000, 1), (u64::MAX, 1)] {
            assert!(is_free(&taken, iova, size), "{iova:#x} {size:#x}");
        }
        let not = [
            (0, 0x1001),
            (0x1fff, 1),
            (0x1800, 0x10),
            (0x3fff, 2),
            (0x4000, 0x2000),
            (0, 0x10000),
            (0x6000, 0),
            (u64::MAX, 2),
        ];
        for (iova, size) in not {
            assert!(!is_free(&taken, iova, size), "{iova:#x} {size:#x}");
        }
    }

    #[test]
    fn places_are_free_and_suit_large_pages() {
        let taken = BTreeMap::from([(0x10_0000, 0x1000), (0x40_0000, 0x20_0000)]);
        assert_eq!(free_place(&taken, 0, u64::MAX, 0, 0x10_0000), Some(0), "before the first");
        assert_eq!(free_place(&taken, 0, u64::MAX, 0, 0x20_0000), Some(0x20_0000), "between");
        assert_eq!(free_place(&taken, 0, u64::MAX, 0x3000, 0x20_0000), Some(0x60_3000), "after the last");
        assert_eq!(free_place(&taken, 0, 0x80_0000, 0, 0x20_0000 + 1), Some(0x60_0000));
        assert_eq!(free_place(&taken, 0, 0x7f_fffe, 0, 0x20_0000 + 1), None, "no room before the end");
        assert_eq!(free_place(&BTreeMap::new(), u64::MAX - 10, u64::MAX, 0, 1), None);
        assert_eq!(free_place(&BTreeMap::new(), 0, u64::MAX, 0, u64::MAX), Some(0));
        assert_eq!(free_place(&BTreeMap::new(), 0, u64::MAX, 1, u64::MAX), None);
    }
}
