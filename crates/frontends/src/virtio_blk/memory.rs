//! The guest's memory as a vhost-user front end announces it: guest addresses for data, addresses of its own process for queues.

use std::os::fd::AsFd;

use millrace_engine::closer::Received;
use millrace_memory::{GuestAddress, GuestMemory, MapError, PAGE_SIZE, Protection};

use super::message::Region;

/// Regions that may be added one by one: what `GET_MAX_MEM_SLOTS` says.
pub(crate) const MAX_SLOTS: u64 = 509;

/// All regions of one front end.
#[derive(Debug)]
pub(crate) struct MemoryTable {
    pub(crate) guest: GuestMemory,
    regions: Vec<Region>,
}

const ALL: Protection = Protection { read: true, write: true };

impl MemoryTable {
    /// `pinnable`: the operator says that the guest gives no pages back. The front end does not: QEMU knows that back ends may pin memory of
    /// vfio-user devices, and lets no balloon work beside one, but takes those of vhost-user for programs that only map it.
    pub(crate) fn new(pinnable: bool) -> Self {
        let guest = GuestMemory::new();
        Self { guest: if pinnable { guest } else { guest.unpinned() }, regions: Vec::new() }
    }

    /// Replaces all regions. On an error none is left.
    pub(crate) fn replace(&mut self, regions: &[Region], fds: Vec<Received>) -> Result<(), MapError> {
        self.clear();
        for (region, fd) in regions.iter().zip(fds) {
            if let Err(error) = self.add(*region, fd) {
                self.clear();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Makes a region reachable.
    pub(crate) fn add(&mut self, region: Region, fd: Received) -> Result<(), MapError> {
        let bad = MapError::BadRange { addr: region.user, size: region.size };
        if region.user.checked_add(region.size).is_none() {
            return Err(bad);
        }
        if self.regions.len() as u64 >= MAX_SLOTS {
            return Err(MapError::TooMany(MAX_SLOTS as usize));
        }
        let overlaps = |other: &&Region| region.user < other.user + other.size && other.user < region.user + region.size;
        if let Some(other) = self.regions.iter().find(overlaps) {
            return Err(MapError::Overlap { addr: other.user, size: other.size });
        }
        self.guest.map_to_page_end(GuestAddress(region.guest), region.size, ALL, (fd.as_fd(), region.offset))?;
        // The mapping has the file: this is not its end, and need not wait behind what others have handed in.
        drop(fd.into_known());
        self.regions.push(region);
        Ok(())
    }

    /// Makes a region unreachable; its pages go when the caller reclaims.
    pub(crate) fn remove(&mut self, region: &Region) -> Result<(), MapError> {
        let same = |known: &Region| (known.guest, known.size, known.user) == (region.guest, region.size, region.user);
        let Some(at) = self.regions.iter().position(same) else {
            return Err(MapError::Missing { addr: region.guest, size: region.size });
        };
        self.guest.unmap(GuestAddress(region.guest), region.size.next_multiple_of(PAGE_SIZE))?;
        self.regions.swap_remove(at);
        Ok(())
    }

    /// Makes everything unreachable.
    pub(crate) fn clear(&mut self) {
        self.guest.unmap_all();
        self.regions.clear();
    }

    /// The guest address of `len` bytes at an address of the front end's process, if they lie in one region.
    pub(crate) fn guest_address(&self, user: u64, len: u64) -> Option<GuestAddress> {
        let end = user.checked_add(len)?;
        let region = self.regions.iter().find(|region| user >= region.user && end <= region.user + region.size)?;
        region.guest.checked_add(user - region.user).map(GuestAddress)
    }
}

/// Pages a range of guest addresses touches.
pub(crate) fn pages(addr: u64, len: u64) -> std::ops::Range<u64> {
    let last = addr.saturating_add(len.saturating_sub(1));
    if len == 0 { 0..0 } else { addr / PAGE_SIZE..(last / PAGE_SIZE).saturating_add(1) }
}
