//! The table of a guest's memory regions and the checked way from guest addresses to [`Segment`]s.

use std::{cell::Cell, io, ops::Range, os::fd::BorrowedFd, sync::Arc};

use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{
    Mapping, Segment, guard,
    room::{self, Account, NoRoom, Room, Share},
    tlb::{self, Tlb},
    written::WriteLog,
};

/// An address as the guest's device sees it (guest physical, or I/O virtual behind a vIOMMU), in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestAddress(pub u64);

impl GuestAddress {
    /// The address `bytes` further on; `None` past the end of the address space.
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

/// What a request will do to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// We read guest memory (a write command's data, an SQE, a PRP list).
    Read,
    /// We write guest memory (a read command's data, a CQE).
    Write,
}

/// What the guest's owner allows a device to do with a region (vfio-user `DMA_MAP` flags).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// The device may read the region.
    pub read: bool,
    /// The device may write the region.
    pub write: bool,
}

/// Why an access was refused; each is a guest's fault or its owner's.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum AccessError {
    /// No region holds (all of) the range.
    #[error("guest address {addr:#x}+{len:#x} is not mapped")]
    Unmapped {
        /// First byte asked for.
        addr: u64,
        /// Bytes asked for.
        len: u64,
    },
    /// The region does not allow this access.
    #[error("guest address {0:#x} does not allow the access")]
    Denied(u64),
    /// The region was announced without a file descriptor, so that its bytes cannot be reached directly.
    #[error("guest address {0:#x} lies in a region without a file descriptor")]
    NoDescriptor(u64),
}

/// Why a map or unmap request was refused.
#[derive(Debug, Error)]
pub enum MapError {
    /// Size 0, or not a multiple of the page size, or a range past the end of the address space or of the file's offsets, or
    /// a file offset within a page.
    #[error("region {addr:#x}+{size:#x} is empty, misaligned or wraps")]
    BadRange {
        /// First byte.
        addr: u64,
        /// Bytes.
        size: u64,
    },
    /// A region there already.
    #[error("region {addr:#x}+{size:#x} overlaps one that is mapped")]
    Overlap {
        /// First byte.
        addr: u64,
        /// Bytes.
        size: u64,
    },
    /// The file is on a disk, on the network or in another process's hands, where a touch of its pages may block.
    #[error("region {addr:#x}+{size:#x} is not backed by memory: share a memfd, or a file on tmpfs or hugetlbfs")]
    NotMemory {
        /// First byte.
        addr: u64,
        /// Bytes.
        size: u64,
    },
    /// The file is shorter than the region it should back.
    #[error("file of {file} bytes is too short for offset {offset:#x} and size {size:#x}")]
    ShortFile {
        /// The file's length.
        file: u64,
        /// Offset of the region within the file.
        offset: u64,
        /// The region's size.
        size: u64,
    },
    /// There is no such region, though it was announced.
    #[error("no region {addr:#x}+{size:#x} is mapped")]
    Missing {
        /// First byte.
        addr: u64,
        /// Bytes.
        size: u64,
    },
    /// The range to be unmapped begins or ends within a region.
    #[error("range {addr:#x}+{size:#x} cuts a region")]
    Cut {
        /// First byte.
        addr: u64,
        /// Bytes.
        size: u64,
    },
    /// Too many regions.
    #[error("more than {0} regions")]
    TooMany(usize),
    /// More than one device may have mapped.
    #[error(
        "region {addr:#x}+{size:#x}: one device may have {most:#x} bytes mapped, in {mappings} pieces, with what it has unmapped and \
         commands still use"
    )]
    TooLarge {
        /// First byte.
        addr: u64,
        /// Bytes.
        size: u64,
        /// Bytes that it may have.
        most: u64,
        /// Mappings that it may have.
        mappings: usize,
    },
    /// All devices have as much mapped as they may.
    #[error(
        "region {addr:#x}+{size:#x}: this process has as much memory of others mapped as it may; the last eighth is for those who \
         have little: move devices to other workers, or end those that map more than they need"
    )]
    Full {
        /// First byte.
        addr: u64,
        /// Bytes.
        size: u64,
    },
    /// The kernel refused to map it.
    #[error("mapping region {addr:#x}+{size:#x}")]
    Kernel {
        /// First byte.
        addr: u64,
        /// Bytes.
        size: u64,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// Granularity of maps: vfio-user's `pgsizes` is a multiple of it.
pub const PAGE_SIZE: u64 = 4096;

/// Regions one device may have: ten times what a large machine behind a vIOMMU uses, and so few that one device cannot take
/// all the mappings that the system allows a process (`vm.max_map_count`, 65,530 unless changed).
pub const MAX_REGIONS: usize = 4096;

#[derive(Debug)]
struct Region {
    start: u64,
    size: u64,
    protection: Protection,
    backing: Option<Backing>,
}

impl Region {
    /// The last address; the one after it may be past the end of the address space.
    fn last(&self) -> u64 {
        self.start + (self.size - 1)
    }
}

/// Where a region's bytes are.
#[derive(Debug)]
pub(crate) struct Backing {
    /// Other tables may have it as well.
    pub(crate) mapping: Arc<guard::GuardedMapping>,
    /// Where the region begins in the mapping: huge pages are only mapped whole.
    pub(crate) skip: usize,
}

/// A region that has a file, or a piece of one, for another table to have as well.
#[derive(Debug)]
pub struct Loan {
    mapping: Arc<guard::GuardedMapping>,
    /// Where it begins in the mapping.
    skip: usize,
    size: u64,
    protection: Protection,
}

impl Loan {
    /// Whether the device may write it.
    pub fn is_writable(&self) -> bool {
        self.protection.write
    }
}

/// All the memory one guest shares with one device. Owned by the device's shard, so that no lock is needed.
#[derive(Debug)]
pub struct GuestMemory {
    /// Sorted by start, never overlapping.
    regions: Vec<Region>,
    /// As many there may be.
    room: usize,
    /// Of what all peers may have mapped, what this one has.
    account: Arc<Account>,
    /// Index of the region used last: almost always the next one's too.
    last: Cell<usize>,
    /// Translations of whole pages; empty after every change of `regions`.
    tlb: Tlb,
    /// Unmapped by the guest but possibly still under a request in flight.
    retired: Vec<Arc<guard::GuardedMapping>>,
    poison: guard::Poison,
    /// Devices may keep what is mapped: its pages stay the same ones.
    pinnable: bool,
    /// Pages that were translated for writing, while somebody wants to know. The translations that are kept do not allow
    /// writing meanwhile: all that write come by the table, and there alone is looked whether there is a log.
    written: Option<WriteLog>,
}

impl Default for GuestMemory {
    fn default() -> Self {
        Self::new()
    }
}

impl GuestMemory {
    /// No memory at all.
    pub fn new() -> Self {
        Self::with_room(MAX_REGIONS)
    }

    /// No memory at all, of a program: it needs less than a guest, and takes nothing of guests' room.
    pub fn for_program() -> Self {
        Self::within(&room::PROGRAMS, room::PROGRAM_REGIONS)
    }

    /// The same, with room for so many regions: several devices' together.
    pub fn with_room(room: usize) -> Self {
        Self::within(&room::GUESTS, room)
    }

    pub(crate) fn within(peers: &'static Room, room: usize) -> Self {
        Self {
            regions: Vec::new(),
            room,
            account: Account::new(peers),
            last: Cell::new(0),
            tlb: Tlb::new(),
            retired: Vec::new(),
            poison: guard::Poison::new(),
            pinnable: true,
            written: None,
        }
    }

    /// The same, of a guest that may give pages back, as to a balloon: its owner takes them out of the file, and the guest gets others in their
    /// place. Who maps them anew with each access sees those. A physical device goes on with the ones that it knows, so that it is to know none:
    /// [`guard::with_region`] finds no region of this memory.
    pub fn unpinned(mut self) -> Self {
        self.pinnable = false;
        self
    }

    /// Makes `size` bytes at `addr` reachable. With `backing`, the file's bytes from its offset on are mapped; without, the
    /// range is known but every access answers [`AccessError::NoDescriptor`]. The mapping has the file: the descriptor is needed no more.
    pub fn map(
        &mut self,
        addr: GuestAddress,
        size: u64,
        protection: Protection,
        backing: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), MapError> {
        self.put(addr, size, protection, backing, size)
    }

    /// As [`Self::map`], what the last worker had mapped: it stays, though there may be less room now.
    pub fn map_again(
        &mut self,
        addr: GuestAddress,
        size: u64,
        protection: Protection,
        backing: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), MapError> {
        let at = self.place(addr, size, MAX_REGIONS.max(self.room))?;
        self.insert(at, addr, size, protection, backing, (size, true))
    }

    /// Regions that there may be.
    pub fn room(&self) -> usize {
        self.room
    }

    /// As [`Self::map`] with a file, for a peer whose regions may end within a page (vhost-user does not forbid it, and libblkio
    /// does it): all of that page belongs to the region, as far as the file goes to the region's end at least. Returns the
    /// region's size, with which it is unmapped.
    pub fn map_to_page_end(
        &mut self,
        addr: GuestAddress,
        size: u64,
        protection: Protection,
        (fd, offset): (BorrowedFd<'_>, u64),
    ) -> Result<u64, MapError> {
        let bad = MapError::BadRange { addr: addr.0, size };
        let whole = size.checked_next_multiple_of(PAGE_SIZE).ok_or(bad)?;
        self.put(addr, whole, protection, Some((fd, offset)), size).map(|()| whole)
    }

    /// A region that has a file, or a piece of one, for another table; `None` where that is not what lies there.
    pub fn lend(&self, addr: GuestAddress, size: u64) -> Option<Loan> {
        let region = self.find(addr.0)?;
        let offset = addr.0 - region.start;
        let Backing { mapping, skip } = region.backing.as_ref().filter(|_| size <= region.size - offset)?;
        // It fits, as in `walk`.
        let skip = skip + offset as usize;
        Some(Loan { mapping: Arc::clone(mapping), skip, size, protection: region.protection })
    }

    /// Makes what another table has reachable at `addr`. The pages stay mapped until both have unmapped and [reclaimed](Self::reclaim) them;
    /// when the peer takes them away, it is the other table that is [poisoned](Self::is_poisoned).
    pub fn map_lent(&mut self, addr: GuestAddress, loan: &Loan) -> Result<(), MapError> {
        let Loan { mapping, skip, size, protection } = loan;
        let at = self.place(addr, *size, self.room)?;
        let backing = Some(Backing { mapping: Arc::clone(mapping), skip: *skip });
        self.regions.insert(at, Region { start: addr.0, size: *size, protection: *protection, backing });
        self.tlb.flush();
        Ok(())
    }

    /// Where in the list a new region belongs.
    fn place(&self, addr: GuestAddress, size: u64, room: usize) -> Result<usize, MapError> {
        let bad = MapError::BadRange { addr: addr.0, size };
        let Some(last) = size.checked_sub(1).and_then(|rest| addr.0.checked_add(rest)) else { return Err(bad) };
        if !addr.0.is_multiple_of(PAGE_SIZE) || !size.is_multiple_of(PAGE_SIZE) {
            return Err(bad);
        }
        if self.regions.len() >= room {
            return Err(MapError::TooMany(room));
        }
        let at = self.regions.partition_point(|r| r.start < addr.0);
        let before = at.checked_sub(1).and_then(|i| self.regions.get(i));
        if before.is_some_and(|r| r.last() >= addr.0) || self.regions.get(at).is_some_and(|r| r.start <= last) {
            return Err(MapError::Overlap { addr: addr.0, size });
        }
        Ok(at)
    }

    /// Makes whole pages reachable, of which the file has `in_file` bytes at least.
    fn put(
        &mut self,
        addr: GuestAddress,
        size: u64,
        protection: Protection,
        backing: Option<(BorrowedFd<'_>, u64)>,
        in_file: u64,
    ) -> Result<(), MapError> {
        let at = self.place(addr, size, self.room)?;
        self.insert(at, addr, size, protection, backing, (in_file, false))
    }

    /// The same at its place in the list; `again`: the last worker had it mapped.
    fn insert(
        &mut self,
        at: usize,
        addr: GuestAddress,
        size: u64,
        protection: Protection,
        backing: Option<(BorrowedFd<'_>, u64)>,
        (in_file, again): (u64, bool),
    ) -> Result<(), MapError> {
        let backing = match backing {
            Some((fd, offset)) => Some(map_file(
                |bytes| self.account.take(bytes, again),
                |mapping, share| {
                    let guard = if self.pinnable { guard::GuardedMapping::shared } else { guard::GuardedMapping::hidden };
                    guard(mapping, &self.poison, share)
                },
                addr,
                in_file,
                protection.write,
                fd,
                offset,
            )?),
            None => None,
        };
        self.regions.insert(at, Region { start: addr.0, size, protection, backing });
        self.tlb.flush();
        Ok(())
    }

    /// Makes the regions of a range unreachable at once, be there any or none; one that lies there only in part stays, and all
    /// others with it. Their pages stay mapped until [`Self::reclaim`].
    pub fn unmap(&mut self, addr: GuestAddress, size: u64) -> Result<(), MapError> {
        let range = self.range(addr, size)?;
        self.tlb.flush();
        self.retire(range);
        Ok(())
    }

    /// Takes regions out of the table: their pages wait for [`Self::reclaim`].
    fn retire(&mut self, regions: Range<usize>) {
        for Backing { mapping, .. } in self.regions.drain(regions).filter_map(|r| r.backing) {
            mapping.retire(&self.account);
            self.retired.push(mapping);
        }
    }

    /// Whether a range has regions that could be unmapped.
    pub fn has_regions(&self, addr: GuestAddress, size: u64) -> Result<bool, MapError> {
        Ok(!self.range(addr, size)?.is_empty())
    }

    /// The regions of a range, none of which reaches beyond it.
    fn range(&self, addr: GuestAddress, size: u64) -> Result<Range<usize>, MapError> {
        let last = size.checked_sub(1).and_then(|rest| addr.0.checked_add(rest));
        let last = last.ok_or(MapError::BadRange { addr: addr.0, size })?;
        let from = self.regions.partition_point(|r| r.last() < addr.0);
        let to = self.regions.partition_point(|r| r.start <= last);
        let found = self.regions.get(from..to).unwrap_or_default();
        let is_cut = |r: &Region| r.start < addr.0 || r.last() > last;
        // Those in between lie between the two.
        if found.first().is_some_and(is_cut) || found.last().is_some_and(is_cut) {
            return Err(MapError::Cut { addr: addr.0, size });
        }
        Ok(from..to)
    }

    /// Makes every region unreachable at once.
    pub fn unmap_all(&mut self) {
        self.tlb.flush();
        self.retire(0..self.regions.len());
    }

    /// Whether unmapped regions wait for [`Self::reclaim`].
    pub fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// Hands out the pages of regions unmapped since the last call; dropping them unmaps them, unless another table has them as well
    /// (which may take long for a large guest, so the caller may do it on another thread).
    ///
    /// # Safety
    /// No segment translated before the regions were unmapped may still be in use by anybody: no request in flight, no
    /// system call or device that still knows the pointer.
    pub unsafe fn reclaim(&mut self) -> Vec<Arc<guard::GuardedMapping>> {
        std::mem::take(&mut self.retired)
    }

    /// Whether a peer took away memory that it had shared (its file was truncated): the device must be failed.
    pub fn is_poisoned(&self) -> bool {
        self.poison.is_set()
    }

    /// Begins or ends a log of the pages that are translated for writing. It says nothing of translations that were made before,
    /// nor when the bytes come: whoever keeps a [`Segment`] [marks](Self::mark_written) it for as long.
    pub fn log_writes(&mut self, on: bool) {
        self.tlb.flush();
        self.written = on.then(WriteLog::default);
    }

    /// Whether there is a log.
    pub fn logs_writes(&self) -> bool {
        self.written.is_some()
    }

    /// Adds what of a range is mapped to the log. A region without a file is not written by us, however large it is said to be.
    pub fn mark_written(&self, addr: GuestAddress, len: u64) {
        let (Some(log), Some(rest)) = (&self.written, len.checked_sub(1)) else { return };
        let last = addr.0.saturating_add(rest);
        let is_there = |region: &&Region| region.backing.is_some() && region.start <= last && region.last() >= addr.0;
        for region in self.regions.iter().filter(is_there) {
            let (from, to) = (region.start.max(addr.0), region.last().min(last));
            log.mark(from, to - from + 1);
        }
    }

    /// Takes the pages of a range out of the log: bit `n` of `bitmap` is set when the range's page `n`, of `page_size` bytes (a
    /// multiple of 4096), may have been written since it was last taken. What the bitmap has no room for is forgotten.
    pub fn take_written(&self, addr: GuestAddress, len: u64, page_size: u64, bitmap: &mut [u8]) {
        let Some(log) = &self.written else { return };
        let (pages, bits) = ((page_size / PAGE_SIZE).max(1), bitmap.len() as u64 * 8);
        log.take(addr.0, len, |from, to| {
            for bit in from / pages..(to / pages + 1).min(bits) {
                bitmap[(bit / 8) as usize] |= 1 << (bit % 8);
            }
        });
    }

    /// The regions, for the device's record of its DMA map: (address, size, protection, has a file descriptor).
    pub fn regions(&self) -> impl Iterator<Item = (GuestAddress, u64, Protection, bool)> + '_ {
        self.regions.iter().map(|r| (GuestAddress(r.start), r.size, r.protection, r.backing.is_some()))
    }

    fn find(&self, addr: u64) -> Option<&Region> {
        let holds = |r: &Region| addr >= r.start && addr <= r.last();
        if let Some(r) = self.regions.get(self.last.get()).filter(|r| holds(r)) {
            return Some(r);
        }
        let at = self.regions.partition_point(|r| r.start <= addr).checked_sub(1)?;
        let region = self.regions.get(at).filter(|r| holds(r))?;
        self.last.set(at);
        Some(region)
    }

    /// The longest run of bytes from `addr` on, at most `len`, that lies in one region: at least one byte. A range over
    /// adjacent regions takes several calls.
    #[inline]
    pub fn translate_some(&self, addr: GuestAddress, len: u64, access: Access) -> Result<Segment, AccessError> {
        match self.tlb.find(addr.0, len, access) {
            Some(segment) => Ok(segment),
            None => self.walk(addr, len, access),
        }
    }

    /// Translates by the region table.
    #[inline(never)]
    fn walk(&self, addr: GuestAddress, len: u64, access: Access) -> Result<Segment, AccessError> {
        let region = self.find(addr.0).ok_or(AccessError::Unmapped { addr: addr.0, len })?;
        let allowed = match access {
            Access::Read => region.protection.read,
            Access::Write => region.protection.write,
        };
        if !allowed {
            return Err(AccessError::Denied(addr.0));
        }
        let Backing { mapping, skip } = region.backing.as_ref().ok_or(AccessError::NoDescriptor(addr.0))?;
        let offset = addr.0 - region.start;
        let page = offset.checked_sub(addr.0 % tlb::PAGE);
        if let Some(page) = page.filter(|page| region.size - page >= tlb::PAGE) {
            // SAFETY: as below; all of the page lies within the region.
            let whole = unsafe { mapping.segment(skip + page as usize, tlb::PAGE as usize) };
            if let Some(whole) = whole {
                let write = region.protection.write && self.written.is_none();
                self.tlb.remember(addr.0, whole, Protection { write, ..region.protection });
            }
        }
        let run = len.min(region.size - offset);
        if access == Access::Write
            && let Some(log) = &self.written
        {
            log.mark(addr.0, run);
        }
        // All fit: the mapping is at least as long as `skip` and the region together, and its length is a usize.
        let (offset, run) = (skip + offset as usize, run as usize);
        // SAFETY: the mapping lives until `reclaim`, whose caller vouches that the segment is out of use by then; write
        // access was checked against the protection the mapping was made with.
        unsafe { mapping.segment(offset, run) }.ok_or(AccessError::Unmapped { addr: addr.0, len })
    }

    /// As [`Self::translate`], for those who need not know why there is none: what is found stays in registers.
    #[expect(clippy::inline_always, reason = "a few instructions, in the way of every request")]
    #[inline(always)]
    pub fn find_whole(&self, addr: GuestAddress, len: u64, access: Access) -> Option<Segment> {
        self.tlb.find(addr.0, len, access).or_else(|| self.walk_whole(addr, len, access))
    }

    /// Another one whenever something may be found elsewhere, or otherwise, than before: what was found at the same one is found again.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.tlb.generation()
    }

    #[cold]
    #[inline(never)]
    fn walk_whole(&self, addr: GuestAddress, len: u64, access: Access) -> Option<Segment> {
        self.translate(addr, len, access).ok()
    }

    /// All of `len` bytes from `addr` on as one segment; an error when they do not lie in one region.
    #[inline]
    pub fn translate(&self, addr: GuestAddress, len: u64, access: Access) -> Result<Segment, AccessError> {
        let segment = self.translate_some(addr, len, access)?;
        if segment.len() as u64 == len { Ok(segment) } else { Err(AccessError::Unmapped { addr: addr.0, len }) }
    }

    /// Copies a value out of guest memory (it may straddle adjacent regions).
    pub fn read_value<T: FromBytes + IntoBytes>(&self, addr: GuestAddress) -> Result<T, AccessError> {
        let mut value = T::new_zeroed();
        self.read(addr, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Copies a value into guest memory (it may straddle adjacent regions).
    pub fn write_value<T: IntoBytes + Immutable>(&self, addr: GuestAddress, value: &T) -> Result<(), AccessError> {
        self.write(addr, value.as_bytes())
    }

    /// Copies bytes out of guest memory.
    pub fn read(&self, addr: GuestAddress, out: &mut [u8]) -> Result<(), AccessError> {
        self.runs(addr, out.len(), Access::Read, |segment, at| segment.read_at(0, &mut out[at..at + segment.len()]))
    }

    /// Copies bytes into guest memory. Nothing is written unless all of the range can be.
    pub fn write(&self, addr: GuestAddress, data: &[u8]) -> Result<(), AccessError> {
        self.runs(addr, data.len(), Access::Write, |_, _| {})?;
        self.runs(addr, data.len(), Access::Write, |segment, at| segment.write_at(0, &data[at..at + segment.len()]))
    }

    fn runs(
        &self,
        addr: GuestAddress,
        len: usize,
        access: Access,
        mut each: impl FnMut(Segment, usize),
    ) -> Result<(), AccessError> {
        let mut done = 0;
        while done < len {
            let left = (len - done) as u64;
            let at = addr.checked_add(done as u64).ok_or(AccessError::Unmapped { addr: addr.0, len: len as u64 })?;
            let segment = self.translate_some(at, left, access)?;
            each(segment, done);
            done += segment.len();
        }
        Ok(())
    }
}

/// Maps `size` bytes of a file, where there is room, and has the mapping guarded; `addr` is for messages.
pub(crate) fn map_file(
    room: impl FnOnce(u64) -> Result<Share, NoRoom>,
    guard: impl FnOnce(Mapping, Share) -> io::Result<guard::GuardedMapping>,
    addr: GuestAddress,
    size: u64,
    writable: bool,
    fd: BorrowedFd<'_>,
    offset: u64,
) -> Result<Backing, MapError> {
    let bad = || MapError::BadRange { addr: addr.0, size };
    let kernel = |source: io::Error| MapError::Kernel { addr: addr.0, size, source };
    // First: only memory files have seals, and asking for them never waits, as asking a file system in user space would.
    if rustix::fs::fcntl_get_seals(fd).is_err() {
        return Err(MapError::NotMemory { addr: addr.0, size });
    }
    let file_len = u64::try_from(rustix::fs::fstat(fd).map_err(|e| kernel(e.into()))?.st_size).unwrap_or(0);
    if offset.checked_add(size).is_none_or(|end| end > file_len) {
        return Err(MapError::ShortFile { file: file_len, offset, size });
    }
    if !offset.is_multiple_of(PAGE_SIZE) {
        return Err(bad());
    }
    let page = page_size(fd).map_err(kernel)?;
    let skip = offset % page;
    let len = skip.checked_add(size).and_then(|len| len.checked_next_multiple_of(page));
    let len = len.and_then(|len| usize::try_from(len).ok()).ok_or_else(bad)?;
    let share = room(len as u64).map_err(|why| match why {
        NoRoom::Own(most) => MapError::TooLarge { addr: addr.0, size, most: most.bytes, mappings: most.mappings },
        NoRoom::All => MapError::Full { addr: addr.0, size },
    })?;
    let mapping = Mapping::shared(fd, offset - skip, len, writable).map_err(kernel)?;
    let mapping = guard(mapping, share).map_err(kernel)?;
    Ok(Backing { mapping: Arc::new(mapping), skip: skip as usize })
}

/// Granularity of a memory file's mappings in bytes: the size of its huge pages, if it has them.
fn page_size(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let system = rustix::fs::fstatfs(fd)?;
    // The type's width differs between architectures.
    #[allow(clippy::unnecessary_cast)]
    let is_huge = system.f_type as i64 == libc::HUGETLBFS_MAGIC as i64;
    let page = if is_huge { u64::try_from(system.f_bsize).unwrap_or(PAGE_SIZE) } else { PAGE_SIZE };
    Ok(page.max(PAGE_SIZE))
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // Whoever drops the table without `reclaim` has not vouched that nothing is in flight: leak rather than fault.
        for region in self.regions.drain(..) {
            std::mem::forget(region.backing);
        }
        self.retired.drain(..).for_each(std::mem::forget);
        self.account.leave();
    }
}
