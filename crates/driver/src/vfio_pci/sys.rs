//! Linux's VFIO and iommufd interfaces (`linux/vfio.h`, `linux/iommufd.h`): numbers, structures, and the one place that calls `ioctl`.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
};

const BASE: u64 = 0x3b64; // _IO(';', 100)
pub(super) const GET_API_VERSION: u64 = BASE;
pub(super) const CHECK_EXTENSION: u64 = BASE + 1;
pub(super) const SET_IOMMU: u64 = BASE + 2;
pub(super) const GROUP_GET_STATUS: u64 = BASE + 3;
pub(super) const GROUP_SET_CONTAINER: u64 = BASE + 4;
pub(super) const GROUP_GET_DEVICE_FD: u64 = BASE + 6;
pub(super) const DEVICE_GET_INFO: u64 = BASE + 7;
pub(super) const DEVICE_GET_REGION_INFO: u64 = BASE + 8;
pub(super) const DEVICE_GET_IRQ_INFO: u64 = BASE + 9;
pub(super) const DEVICE_SET_IRQS: u64 = BASE + 10;
pub(super) const DEVICE_RESET: u64 = BASE + 11;
pub(super) const IOMMU_GET_INFO: u64 = BASE + 12;
pub(super) const IOMMU_MAP_DMA: u64 = BASE + 13;
pub(super) const IOMMU_UNMAP_DMA: u64 = BASE + 14;
pub(super) const DEVICE_BIND_IOMMUFD: u64 = BASE + 18;
pub(super) const DEVICE_ATTACH_IOMMUFD: u64 = BASE + 19;
const IOMMUFD: u64 = 0x3b80; // _IO(';', 0x80)
pub(super) const IOAS_ALLOC: u64 = IOMMUFD + 1;
const IOAS_IOVA_RANGES: u64 = IOMMUFD + 4;
pub(super) const IOAS_MAP: u64 = IOMMUFD + 5;
pub(super) const IOAS_UNMAP: u64 = IOMMUFD + 6;

pub(super) const API_VERSION: i32 = 0;
pub(super) const TYPE1V2_IOMMU: u64 = 3;
pub(super) const GROUP_VIABLE: u32 = 1;
pub(super) const DEVICE_RESETS: u32 = 1;
pub(super) const DEVICE_PCI: u32 = 2;
pub(super) const REGION_MMAP: u32 = 4;
pub(super) const IRQ_EVENTFD: u32 = 1;
pub(super) const SET_NONE: u32 = 1;
pub(super) const SET_EVENTFD: u32 = 4;
pub(super) const SET_TRIGGER: u32 = 32;
pub(super) const MAP_READ: u32 = 1;
pub(super) const MAP_WRITE: u32 = 2;
pub(super) const IOAS_MAP_FIXED: u32 = 1;
pub(super) const IOAS_MAP_WRITE: u32 = 2;
pub(super) const IOAS_MAP_READ: u32 = 4;
/// Capability of a region: the parts that may be mapped.
pub(super) const CAP_SPARSE_MMAP: u16 = 1;
/// Capability of an IOMMU: the addresses that may be used.
pub(super) const CAP_IOVA_RANGE: u16 = 1;

/// Room for what the kernel appends to a structure: capabilities, each linked to the next by its offset.
const ROOM: usize = 4096;

/// A structure that begins with its own size.
///
/// # Safety
/// `repr(C)`, its first field is `argsz`, and every bit pattern is a value.
pub(super) unsafe trait Sized32: Copy + Default {}

macro_rules! structure {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default)]
        #[repr(C)]
        pub(super) struct $name {
            pub(super) argsz: u32,
            $(pub(super) $field: $type,)*
        }

        // SAFETY: `repr(C)`, `argsz` first, integers only.
        unsafe impl Sized32 for $name {}
    };
}

structure! { GroupStatus { flags: u32 } }
structure! { DeviceInfo { flags: u32, regions: u32, irqs: u32, cap_offset: u32, pad: u32 } }
structure! { RegionInfo { flags: u32, index: u32, cap_offset: u32, size: u64, offset: u64 } }
structure! { IrqInfo { flags: u32, index: u32, count: u32 } }
structure! { IommuInfo { flags: u32, page_sizes: u64, cap_offset: u32, pad: u32 } }
structure! { DmaMap { flags: u32, address: u64, iova: u64, size: u64 } }
structure! { DmaUnmap { flags: u32, iova: u64, size: u64 } }
structure! { BindIommufd { flags: u32, iommufd: i32, device: u32 } }
structure! { AttachIommufd { flags: u32, table: u32 } }
structure! { IoasAlloc { flags: u32, ioas: u32 } }
structure! { IoasRanges { ioas: u32, count: u32, reserved: u32, ranges: u64, alignment: u64 } }
structure! { IoasMap { flags: u32, ioas: u32, reserved: u32, address: u64, size: u64, iova: u64 } }
structure! { IoasUnmap { ioas: u32, iova: u64, size: u64 } }

/// An `ioctl` whose argument is a number, or nothing.
pub(super) fn plain(fd: impl AsFd, request: u64, argument: u64) -> io::Result<i32> {
    // SAFETY: the requests that are made this way take numbers: no memory of ours is reached.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request, argument) })
}

/// An `ioctl` on a structure, which may be followed by capabilities.
pub(super) fn exchange<T: Sized32>(fd: impl AsFd, request: u64, mut value: T) -> io::Result<(T, Capabilities)> {
    let mut bytes = vec![0_u64; ROOM / 8];
    assert!(size_of::<T>() <= ROOM && align_of::<T>() <= 8);
    let place: *mut T = bytes.as_mut_ptr().cast();
    // SAFETY: the room is large enough and aligned for a T, whose first field is a u32.
    unsafe {
        place.write(value);
        place.cast::<u32>().write(ROOM as u32);
    }
    // SAFETY: the kernel reads and writes at most `argsz` bytes from the structure on, which is the whole room.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request, bytes.as_mut_ptr()) })?;
    // SAFETY: as above; every bit pattern is a T.
    value = unsafe { place.read() };
    Ok((value, Capabilities(bytes.iter().flat_map(|word| word.to_ne_bytes()).collect())))
}

/// An `ioctl` on a structure whose size is known to the kernel.
pub(super) fn exact<T: Sized32>(fd: impl AsFd, request: u64, mut value: T) -> io::Result<T> {
    let place = &raw mut value;
    // SAFETY: a T begins with a u32; the kernel reads and writes at most `argsz` bytes from its start.
    check(unsafe {
        place.cast::<u32>().write(size_of::<T>() as u32);
        libc::ioctl(fd.as_fd().as_raw_fd(), request, place)
    })?;
    Ok(value)
}

/// Opens a device of a group.
pub(super) fn device_fd(group: impl AsFd, name: &str) -> io::Result<OwnedFd> {
    let name = std::ffi::CString::new(name)?;
    // SAFETY: the name ends in a zero, and is only read.
    let fd = check(unsafe { libc::ioctl(group.as_fd().as_raw_fd(), GROUP_GET_DEVICE_FD, name.as_ptr()) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts a group into a container.
pub(super) fn set_container(group: impl AsFd, container: impl AsFd) -> io::Result<()> {
    let fd: RawFd = container.as_fd().as_raw_fd();
    // SAFETY: the kernel reads one number.
    check(unsafe { libc::ioctl(group.as_fd().as_raw_fd(), GROUP_SET_CONTAINER, &raw const fd) }).map(drop)
}

/// The addresses that may be used in an address space of iommufd's, first to last.
pub(super) fn iova_ranges(iommufd: impl AsFd, ioas: u32) -> io::Result<Vec<(u64, u64)>> {
    let mut ranges = [[0_u64; 2]; ROOM / 16];
    let mut asked = IoasRanges {
        argsz: size_of::<IoasRanges>() as u32,
        ioas,
        count: ranges.len() as u32,
        ranges: ranges.as_mut_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: the kernel reads and writes the structure, whose size it is told, and at most `count` pairs of numbers at `ranges`.
    check(unsafe { libc::ioctl(iommufd.as_fd().as_raw_fd(), IOAS_IOVA_RANGES, &raw mut asked) })?;
    Ok(ranges.iter().take(asked.count as usize).map(|&[first, last]| (first, last)).collect())
}

/// Has interrupts `0..fds.len()` of an index signalled through event fds; none: forgets them all.
pub(super) fn set_irqs(device: impl AsFd, index: u32, fds: &[RawFd]) -> io::Result<()> {
    let action = SET_TRIGGER | if fds.is_empty() { SET_NONE } else { SET_EVENTFD };
    let size = (5 + fds.len()) * 4;
    let mut words = vec![size as u32, action, index, 0, fds.len() as u32];
    words.extend(fds.iter().map(|fd| fd.cast_unsigned()));
    // SAFETY: the kernel reads `argsz` bytes, which is what there are.
    match check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), DEVICE_SET_IRQS, words.as_ptr()) })? {
        0 => Ok(()),
        // As many as the machine has left, of which none was set.
        _ => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
    }
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// What the kernel appended to a structure.
pub(super) struct Capabilities(Vec<u8>);

impl Capabilities {
    fn word(&self, at: usize) -> Option<u32> {
        self.0.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_ne_bytes)
    }

    fn long(&self, at: usize) -> Option<u64> {
        self.0.get(at..at.checked_add(8)?)?.try_into().ok().map(u64::from_ne_bytes)
    }

    /// The pairs of numbers of a capability that is a list of such; `None`: it is not there.
    pub(super) fn pairs(&self, first: u32, wanted: u16) -> Option<Vec<(u64, u64)>> {
        let mut at = first as usize;
        // No more capabilities than there is room for.
        for _ in 0..ROOM / 8 {
            if at == 0 {
                return None;
            }
            let (id, next) = (self.word(at)? as u16, self.word(at + 4)?);
            if id == wanted {
                let count = self.word(at + 8)? as usize;
                return (0..count.min(ROOM / 16))
                    .map(|i| Some((self.long(at + 16 + i * 16)?, self.long(at + 24 + i * 16)?)))
                    .collect();
            }
            at = next as usize;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(words: &[(usize, u32)]) -> Capabilities {
        let mut bytes = vec![0; ROOM];
        for (at, word) in words {
            bytes[*at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        Capabilities(bytes)
    }

    #[test]
    fn structures_are_the_kernels() {
        assert_eq!(size_of::<DeviceInfo>(), 24);
        assert_eq!(size_of::<RegionInfo>(), 32);
        assert_eq!(size_of::<IrqInfo>(), 16);
        assert_eq!(size_of::<DmaMap>(), 32);
        assert_eq!(size_of::<DmaUnmap>(), 24);
        assert_eq!(size_of::<IommuInfo>(), 24);
        assert_eq!(size_of::<BindIommufd>(), 16);
        assert_eq!(size_of::<AttachIommufd>(), 12);
        assert_eq!(size_of::<IoasAlloc>(), 12);
        assert_eq!(size_of::<IoasRanges>(), 32);
        assert_eq!(size_of::<IoasMap>(), 40);
        assert_eq!(size_of::<IoasUnmap>(), 24);
    }

    #[test]
    fn a_capability_is_found_behind_others() {
        let list = room(&[(32, 7), (36, 64), (64, 1), (68, 0), (72, 2), (80, 0x1000), (88, 0x2000), (96, 5), (104, 6)]);
        assert_eq!(list.pairs(32, 1), Some(vec![(0x1000, 0x2000), (5, 6)]));
        assert_eq!(list.pairs(32, 2), None);
        assert_eq!(list.pairs(0, 1), None);
    }

    #[test]
    fn lists_that_lead_out_or_in_circles_end() {
        assert_eq!(room(&[(32, 7), (36, 32)]).pairs(32, 1), None);
        assert_eq!(room(&[(32, 1), (40, 1000)]).pairs(32, 1), None, "more than there is room for");
        assert_eq!(room(&[]).pairs(u32::MAX, 1), None);
    }
}
