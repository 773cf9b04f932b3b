//! Memory that the device may read and write, and its page-granular allocator.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use millrace_memory::{Mapping, Segment, SegmentCursor};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::shared::{SharedRing, SharedU32};

/// Granularity of allocations, and the memory page size the driver selects (CC.MPS = 0), in bytes.
pub const PAGE_SIZE: usize = 4096;

/// What memory consists of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// Pages of 4 KiB.
    #[default]
    Small,
    /// Pages of 2 MiB, of those that the system has set aside (`/proc/sys/vm/nr_hugepages`).
    Huge,
    /// Pages of 2 MiB where the system has some to give (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`), others where not.
    Transparent,
}

impl Pages {
    /// What sizes and addresses are multiples of.
    pub fn granularity(self) -> usize {
        match self {
            Self::Small => PAGE_SIZE,
            Self::Huge | Self::Transparent => 2 << 20,
        }
    }
}

/// Why memory could not be made or given out.
#[derive(Debug, Error)]
pub enum DmaError {
    /// Size 0, or size or address not a multiple of the page size, or past the end of the address space.
    #[error("{size:#x} bytes at {iova:#x} are no whole pages or wrap")]
    BadRange {
        /// First address.
        iova: u64,
        /// Bytes.
        size: usize,
    },
    /// No run of free pages is long enough.
    #[error("no {wanted} contiguous bytes are free in a pool of {size}")]
    Exhausted {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes of the pool.
        size: usize,
    },
    /// The kernel refused the file or the mapping.
    #[error("making {size:#x} bytes of shared memory")]
    Kernel {
        /// Bytes.
        size: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// Addresses as the device sees them: what goes into PRP entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaRange {
    /// First address.
    pub iova: u64,
    /// Length in bytes.
    pub len: usize,
}

#[derive(Debug)]
struct Pool {
    mapping: Arc<Mapping>,
    fd: OwnedFd,
    iova: u64,
    free: Mutex<Free>,
}

/// Which pages are free, and which were used. It costs as much as there are runs of free pages, however long they are: a program's memory may
/// have a terabyte of addresses.
#[derive(Debug)]
pub(crate) struct Free {
    /// Runs of free pages: the first, and the one after the last. They neither overlap nor adjoin.
    free: BTreeMap<usize, usize>,
    /// The first page that was never given out: the file has only zeroes from there on, and no memory yet.
    fresh: usize,
}

impl Free {
    pub(crate) fn all_free(count: usize) -> Self {
        Self { free: BTreeMap::from([(0, count)]), fresh: 0 }
    }

    /// Takes `count` pages, the first ones that lie side by side; the first of them, and how many of them were given out before.
    pub(crate) fn take(&mut self, count: usize) -> Option<(usize, usize)> {
        let (first, end) = self.free.iter().map(|(first, end)| (*first, *end)).find(|(first, end)| end - first >= count)?;
        self.free.remove(&first);
        let after = first + count;
        if after < end {
            self.free.insert(after, end);
        }
        let used = self.fresh.saturating_sub(first).min(count);
        self.fresh = self.fresh.max(after);
        Some((first, used))
    }

    pub(crate) fn give_back(&mut self, first: usize, count: usize) {
        let (before, after) = (self.free.range(..first).next_back(), first + count);
        let start = before.filter(|(_, end)| **end == first).map_or(first, |(start, _)| *start);
        let end = self.free.remove(&after).unwrap_or(after);
        self.free.insert(start, end);
    }
}

/// A memfd mapped here and, once announced with [`Transport::dma_map`](crate::Transport::dma_map), known to the device
/// under addresses of our choosing. Clones share it.
#[derive(Clone, Debug)]
pub struct DmaMemory(Arc<Pool>);

impl DmaMemory {
    /// Makes `size` bytes at device address `iova`, both multiples of [`PAGE_SIZE`]. Pages are backed on first use.
    pub fn new(iova: u64, size: usize) -> Result<Self, DmaError> {
        Self::of_pages(Pages::Small, iova, size)
    }

    /// As [`new`](Self::new), of other pages; size and address are multiples of [`Pages::granularity`].
    pub fn of_pages(pages: Pages, iova: u64, size: usize) -> Result<Self, DmaError> {
        let page = pages.granularity();
        if size == 0
            || !size.is_multiple_of(page)
            || !iova.is_multiple_of(page as u64)
            || iova.checked_add(size as u64).is_none()
        {
            return Err(DmaError::BadRange { iova, size });
        }
        let kernel = |source: io::Error| DmaError::Kernel { size, source };
        let huge = if pages == Pages::Huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
        let fd = memfd_create("millrace-driver", MemfdFlags::CLOEXEC | huge).map_err(|errno| kernel(errno.into()))?;
        ftruncate(&fd, size as u64).map_err(|errno| kernel(errno.into()))?;
        let mapping = Arc::new(Mapping::shared(fd.as_fd(), 0, size, true).map_err(kernel)?);
        if pages == Pages::Transparent {
            mapping.advise_huge().map_err(kernel)?;
        }
        let free = Mutex::new(Free::all_free(size / PAGE_SIZE));
        Ok(Self(Arc::new(Pool { mapping, fd, iova, free })))
    }

    /// All its addresses.
    pub fn range(&self) -> DmaRange {
        DmaRange { iova: self.0.iova, len: self.0.mapping.len() }
    }

    /// The file behind it, whole from offset 0.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }

    /// Takes at least `len` contiguous bytes, whole pages, zeroed. Freed on drop. For setting up, not per I/O. Pages that were never used are
    /// not touched: they are the memory of who touches them first, the device or us.
    pub fn alloc(&self, len: usize) -> Result<DmaBuffer, DmaError> {
        let exhausted = DmaError::Exhausted { wanted: len, size: self.0.mapping.len() };
        let count = len.max(1).div_ceil(PAGE_SIZE);
        let taken = self.0.free.lock().unwrap_or_else(PoisonError::into_inner).take(count);
        let Some((first, used)) = taken else { return Err(exhausted) };
        let buffer = DmaBuffer { pool: Arc::clone(&self.0), offset: first * PAGE_SIZE, len: count * PAGE_SIZE };
        if used > 0 {
            buffer.segment(0, used * PAGE_SIZE).fill(0);
        }
        Ok(buffer)
    }
}

/// Contiguous pages of a [`DmaMemory`]. The device may change them at any instant, so bytes are only copied in and out.
///
/// Dropping it while a command still uses it lets the device write into whatever is allocated there next; that is never
/// memory of Rust's.
#[derive(Debug)]
pub struct DmaBuffer {
    pool: Arc<Pool>,
    offset: usize,
    len: usize,
}

impl DmaBuffer {
    /// Length in bytes, a multiple of [`PAGE_SIZE`].
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: the smallest buffer is a page.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte's address as the device sees it.
    #[inline]
    pub fn iova(&self) -> u64 {
        self.pool.iova + self.offset as u64
    }

    /// All its addresses.
    pub fn range(&self) -> DmaRange {
        DmaRange { iova: self.iova(), len: self.len }
    }

    /// Where the first byte is mapped in this process. The pages stay mapped while the buffer lives, and the device may change them at any
    /// instant: for those who hand memory out to programs that know this.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        // An offset within the mapping, by construction.
        self.pool.mapping.as_ptr().wrapping_add(self.offset)
    }

    /// The addresses of `len` bytes from `offset` on.
    ///
    /// # Panics
    /// When they do not lie within the buffer.
    #[inline]
    pub fn slice(&self, offset: usize, len: usize) -> DmaRange {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{len} bytes at {offset} of {}", self.len);
        DmaRange { iova: self.iova() + offset as u64, len }
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// When they do not fit into the buffer at `offset`.
    pub fn write_at(&self, offset: usize, data: &[u8]) {
        self.segment(offset, data.len()).write_at(0, data);
    }

    /// Copies bytes out.
    ///
    /// # Panics
    /// When they do not lie within the buffer.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) {
        self.segment(offset, out.len()).read_at(0, out);
    }

    /// Copies a value in.
    ///
    /// # Panics
    /// When it does not fit into the buffer at `offset`.
    pub fn write_value<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.write_at(offset, value.as_bytes());
    }

    /// Copies a value out.
    ///
    /// # Panics
    /// When it does not lie within the buffer.
    pub fn read_value<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        let mut value = T::new_zeroed();
        self.read_at(offset, value.as_mut_bytes());
        value
    }

    /// Copies `len` bytes out.
    ///
    /// # Panics
    /// When they do not lie within the buffer.
    pub fn read_vec(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read_at(offset, &mut bytes);
        bytes
    }

    /// Copies the next `len` bytes of a list of segments to the buffer's start.
    ///
    /// # Panics
    /// When they do not fit into the buffer.
    pub fn fill_from(&self, from: &mut SegmentCursor<'_>, len: usize) {
        from.copy_to(self.segment(0, len));
    }

    /// Copies the first `len` bytes over the next ones of a list of segments.
    ///
    /// # Panics
    /// When the buffer has not as many.
    pub fn drain_to(&self, to: &mut SegmentCursor<'_>, len: usize) {
        to.copy_from(self.segment(0, len));
    }

    /// Fills the whole buffer with one byte.
    pub fn fill(&self, byte: u8) {
        self.segment(0, self.len).fill(byte);
    }

    /// The 32-bit word at `offset`; `None` when it does not lie within the buffer or is not aligned.
    pub(crate) fn word(&self, offset: usize) -> Option<SharedU32> {
        if offset.checked_add(4)? > self.len {
            return None;
        }
        SharedU32::new(&self.pool.mapping, self.offset + offset)
    }

    /// The buffer's start as a ring of entries; `None` when they are more than fit.
    pub(crate) fn ring<T: Copy>(&self, entries: u32) -> Option<SharedRing<T>> {
        self.ring_at(0, entries)
    }

    /// As [`ring`](Self::ring), from `offset` bytes on.
    pub(crate) fn ring_at<T: Copy>(&self, offset: usize, entries: u32) -> Option<SharedRing<T>> {
        if size_of::<T>().checked_mul(entries as usize)?.checked_add(offset)? > self.len {
            return None;
        }
        SharedRing::new(&self.pool.mapping, self.offset + offset, entries)
    }

    fn segment(&self, offset: usize, len: usize) -> Segment {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{len} bytes at {offset} of {}", self.len);
        // SAFETY: the segment is used and dropped within the methods above, while `self` keeps the writable mapping.
        unsafe { self.pool.mapping.segment(self.offset + offset, len) }.expect("a buffer lies within its pool")
    }
}

impl Drop for DmaBuffer {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.give_back(self.offset / PAGE_SIZE, self.len / PAGE_SIZE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_do_not_overlap_and_come_back() {
        let memory = DmaMemory::new(1 << 32, 4 * PAGE_SIZE).unwrap();
        let first = memory.alloc(1).unwrap();
        let second = memory.alloc(PAGE_SIZE + 1).unwrap();
        assert_eq!((first.iova(), first.len()), (1 << 32, PAGE_SIZE));
        assert_eq!((second.iova(), second.len()), ((1 << 32) + 4096, 2 * PAGE_SIZE));
        assert!(matches!(memory.alloc(2 * PAGE_SIZE), Err(DmaError::Exhausted { .. })));
        first.fill(0xee);
        assert_eq!(second.read_vec(0, 2 * PAGE_SIZE), vec![0; 2 * PAGE_SIZE]);
        drop(first);
        let third = memory.alloc(PAGE_SIZE).unwrap();
        assert_eq!(third.iova(), 1 << 32);
        assert_eq!(third.read_vec(0, PAGE_SIZE), vec![0; PAGE_SIZE], "given out zeroed");
    }

    #[test]
    fn what_was_never_used_costs_nothing_and_what_was_is_zeroed() {
        let memory = DmaMemory::new(1 << 32, (1 << 30) + 16 * PAGE_SIZE).unwrap();
        let blocks = || rustix::fs::fstat(memory.fd()).unwrap().st_blocks;
        let small = memory.alloc(4 * PAGE_SIZE).unwrap();
        let large = memory.alloc(1 << 30).unwrap();
        assert_eq!(blocks(), 0, "nothing was touched");
        small.fill(0xee);
        drop(small);
        // Part of it was used before: the whole is zeroes.
        large.write_at(0, &[0xee]);
        drop(large);
        let both = memory.alloc(5 * PAGE_SIZE).unwrap();
        assert_eq!((both.iova(), both.read_vec(0, 5 * PAGE_SIZE)), (1 << 32, vec![0; 5 * PAGE_SIZE]));
    }

    /// Runs of free pages, as they are on record.
    fn free(memory: &DmaMemory) -> Vec<(usize, usize)> {
        memory.0.free.lock().unwrap().free.iter().map(|(first, end)| (*first, *end)).collect()
    }

    #[test]
    fn a_large_buffer_costs_no_more_than_a_small_one() {
        // The most that a program may have: a flag for each page would be 256 MiB.
        let (size, pages) = (1 << 40, (1 << 40) / PAGE_SIZE);
        let memory = DmaMemory::new(1 << 32, size).unwrap();
        let large = memory.alloc(size - 16 * PAGE_SIZE).unwrap();
        assert_eq!(free(&memory), [(pages - 16, pages)]);
        let small = memory.alloc(1).unwrap();
        assert_eq!(small.iova(), (1 << 32) + large.len() as u64);
        drop(large);
        assert_eq!(free(&memory), [(0, pages - 16), (pages - 15, pages)]);
        drop(small);
        assert_eq!(free(&memory), [(0, pages)]);
    }

    #[test]
    fn the_first_run_that_is_long_enough_is_taken_and_neighbours_become_one() {
        let memory = DmaMemory::new(1 << 32, 64 * PAGE_SIZE).unwrap();
        let (hole, large) = (memory.alloc(1).unwrap(), memory.alloc(32 * PAGE_SIZE).unwrap());
        drop(hole);
        let runs = [2, 2, 2].map(|pages| memory.alloc(pages * PAGE_SIZE).unwrap());
        assert_eq!(runs[0].iova(), (1 << 32) + 33 * 4096, "too large for the hole");
        assert_eq!(free(&memory), [(0, 1), (39, 64)]);
        let rest = memory.alloc(25 * PAGE_SIZE).unwrap();
        assert!(matches!(memory.alloc(2 * PAGE_SIZE), Err(DmaError::Exhausted { .. })));
        assert_eq!(memory.alloc(1).unwrap().iova(), 1 << 32);
        let [first, second, third] = runs;
        drop((first, third));
        assert_eq!(free(&memory), [(0, 1), (33, 35), (37, 39)]);
        drop(second);
        assert_eq!(free(&memory), [(0, 1), (33, 39)]);
        drop(rest);
        assert_eq!(free(&memory), [(0, 1), (33, 64)]);
        drop(large);
        assert_eq!(free(&memory), [(0, 64)]);
    }

    #[test]
    fn refuses_ranges_that_are_no_pages_or_wrap() {
        for (iova, size) in [(0, 0), (1, PAGE_SIZE), (0, 100), (u64::MAX - 4095, 2 * PAGE_SIZE)] {
            assert!(matches!(DmaMemory::new(iova, size), Err(DmaError::BadRange { .. })), "{iova:#x} {size}");
        }
    }

    #[test]
    #[should_panic(expected = "bytes at")]
    fn copies_stay_within_the_buffer() {
        let memory = DmaMemory::new(0, 2 * PAGE_SIZE).unwrap();
        memory.alloc(PAGE_SIZE).unwrap().write_at(PAGE_SIZE - 1, &[1, 2]);
    }
}
