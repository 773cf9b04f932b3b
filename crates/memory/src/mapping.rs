//! A range of this process's address space that we mapped and will unmap.

use std::{
    io,
    os::fd::BorrowedFd,
    ptr::{NonNull, null_mut},
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::{PAGE_SIZE, Segment};

/// Size of a huge page.
const HUGE: usize = 2 << 20;

/// Owns one `mmap`; unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: a mapping is plain address space; moving its owner to another thread moves only the right to unmap it.
unsafe impl Send for Mapping {}
// SAFETY: shared access only yields Segments and raw pointers, which carry their own contract.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file, shared with everybody else who maps it.
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize, writable: bool) -> io::Result<Self> {
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let proposal = aligned_place(offset, len);
        // SAFETY: a fresh mapping cannot alias anything of ours: the kernel takes the proposal only if nothing is there.
        let ptr = unsafe { mmap(proposal, len, prot, MapFlags::SHARED, fd, offset) }?;
        Self::from_raw(ptr.cast(), len, writable)
    }

    /// Maps `len` bytes of zeroed memory of our own.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choosing cannot alias anything of ours.
        let ptr = unsafe { mmap_anonymous(null_mut(), len, prot, flags) }?;
        Self::from_raw(ptr.cast(), len, true)
    }

    /// As [`Self::anonymous`], of the kind of memory that files in memory have.
    pub fn anonymous_shared(len: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choosing cannot alias anything of ours.
        let ptr = unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, flags) }?;
        Self::from_raw(ptr.cast(), len, true)
    }

    fn from_raw(ptr: *mut u8, len: usize, writable: bool) -> io::Result<Self> {
        let ptr = NonNull::new(ptr).ok_or_else(|| io::Error::other("the kernel mapped memory at address 0"))?;
        Ok(Self { ptr, len, writable })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for an empty mapping (the kernel refuses to make one).
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the mapping may be written.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// First byte of the mapping.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Asks for huge pages behind the mapping (transparent ones).
    pub fn advise_huge(&self) -> io::Result<()> {
        // SAFETY: the range is ours, and the advice changes no byte of it.
        Ok(unsafe { madvise(self.ptr.as_ptr().cast(), self.len, Advice::LinuxHugepage) }?)
    }

    /// Puts huge pages in the place of the small ones behind a range of a memory file, which must be of whole huge pages: about a
    /// millisecond each, and who touches the range meanwhile waits. `false`: another time it may work.
    pub(crate) fn collapse(&self, offset: usize, len: usize) -> io::Result<bool> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let start = self.ptr.as_ptr().wrapping_add(offset);
        // SAFETY: the range lies within the mapping, and no byte of it changes.
        match unsafe { libc::madvise(start.cast(), len, libc::MADV_COLLAPSE) } {
            0 => Ok(true),
            _ => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
                error => Err(error),
            },
        }
    }

    /// How many pages of a range are in memory.
    pub(crate) fn resident(&self, offset: usize, len: usize) -> io::Result<usize> {
        const AT_ONCE: usize = 512;
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let page = PAGE_SIZE as usize;
        let mut present = [0_u8; AT_ONCE];
        let mut count = 0;
        for at in (offset..offset + len).step_by(AT_ONCE * page) {
            let pages = (offset + len - at).div_ceil(page).min(AT_ONCE);
            let start = self.ptr.as_ptr().wrapping_add(at);
            // SAFETY: the range lies within the mapping, and there is a byte for each of its pages.
            let rc = unsafe { libc::mincore(start.cast(), pages * page, present.as_mut_ptr()) };
            if rc != 0 {
                return Err(io::Error::last_os_error());
            }
            count += present[..pages].iter().filter(|state| **state & 1 != 0).count();
        }
        Ok(count)
    }

    /// Gives the pages of a range back to the system. In an anonymous mapping they read as zeroes afterwards.
    ///
    /// `offset` and `len` must be multiples of the page size, and the range must lie within the mapping.
    pub fn discard(&self, offset: usize, len: usize) -> io::Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the range lies within the mapping, which stays mapped; its bytes are only ever reached by copies, which
        // expect them to change at any time.
        Ok(unsafe { madvise(self.ptr.as_ptr().add(offset).cast(), len, Advice::LinuxDontNeed) }?)
    }

    /// As [`Self::discard`], in a mapping of a memory file of our own: the file loses the pages.
    pub fn punch(&self, offset: usize, len: usize) -> io::Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: as in `discard`.
        Ok(unsafe { madvise(self.ptr.as_ptr().add(offset).cast(), len, Advice::LinuxRemove) }?)
    }

    /// A piece of the mapping; `None` when it does not lie within.
    ///
    /// # Safety
    /// The mapping must outlive every use of the segment, and a segment of a read-only mapping must never be written.
    pub unsafe fn segment(&self, offset: usize, len: usize) -> Option<Segment> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: offset + len lies within the mapping; the caller vouches for its life and for writes.
        Some(unsafe { Segment::new(self.ptr.add(offset), len) })
    }
}

/// An address at which a file's huge pages can be mapped as such: their places in the file and in memory are aligned alike. Nothing is
/// there at this moment; it is a proposal, and null where it makes no difference.
fn aligned_place(offset: u64, len: usize) -> *mut core::ffi::c_void {
    let Some(room) = len.checked_add(HUGE).filter(|_| len >= HUGE) else { return null_mut() };
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choosing, which nobody may touch.
    let Ok(start) = (unsafe { mmap_anonymous(null_mut(), room, ProtFlags::empty(), flags) }) else { return null_mut() };
    // SAFETY: nothing uses what was just mapped. Should it fail, addresses are lost, and nothing else.
    let _ = unsafe { munmap(start, room) };
    start.wrapping_byte_add((offset as usize).wrapping_sub(start.addr()) % HUGE)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours since `from_raw`, and by the contract of `segment` nothing uses it any more.
        // It fails where the system would have to cut a range in two and may not have another one: then the range is leaked,
        // which costs addresses. A panic here could end the process.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}
