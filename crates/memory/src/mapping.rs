//! A range of this process's address space that we mapped and will unmap.

use std::{io, os::fd::BorrowedFd, ptr::NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::Segment;

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
        // SAFETY: a fresh mapping at an address of the kernel's choosing cannot alias anything of ours.
        let ptr = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, offset) }?;
        Self::from_raw(ptr.cast(), len, writable)
    }

    /// Maps `len` bytes of zeroed memory of our own.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
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

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours since `from_raw`, and by the contract of `segment` nothing uses it any more.
        // It fails where the system would have to cut a range in two and may not have another one: then the range is leaked,
        // which costs addresses. A panic here could end the process.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}
