//! From descriptors to pieces of memory.

use millrace_memory::{Access, GuestAddress, Segment};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{super::memory::MemoryTable, RingError};

/// Pieces of memory a request may have: what one vectored system call takes.
pub(super) const MAX_SEGMENTS: usize = 1024;
/// Descriptors an indirect table may have: as many pieces, a header and a status. (More than the queue has entries is against the
/// specification, but drivers do it and devices let them.)
const MAX_INDIRECT: u32 = MAX_SEGMENTS as u32 + 2;

/// Descriptor flags (virtio 1.3, 2.7.5 and 2.8.1).
pub(super) mod flag {
    pub(crate) const NEXT: u16 = 1;
    pub(crate) const WRITE: u16 = 2;
    pub(crate) const INDIRECT: u16 = 4;
    pub(crate) const AVAIL: u16 = 1 << 7;
    pub(crate) const USED: u16 = 1 << 15;
}

/// A descriptor of a split ring or an indirect table.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Descriptor {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    pub(crate) const SIZE: usize = size_of::<Self>();
}

/// One request's memory; the lists' room is reused.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// What the guest gave us to read, in order.
    pub(crate) readable: Vec<Segment>,
    /// What it gave us to write, in order.
    pub(crate) writable: Vec<Segment>,
    /// Bytes of either.
    pub(crate) readable_bytes: u64,
    pub(crate) writable_bytes: u64,
    /// Descriptors that were followed to them.
    pub(crate) followed: u32,
    /// Guest addresses of what we may write, kept while changes are logged.
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) keep_ranges: bool,
}

impl Buffers {
    pub(crate) fn new() -> Self {
        Self {
            readable: Vec::with_capacity(MAX_SEGMENTS),
            writable: Vec::with_capacity(MAX_SEGMENTS),
            readable_bytes: 0,
            writable_bytes: 0,
            followed: 0,
            ranges: Vec::with_capacity(MAX_SEGMENTS),
            keep_ranges: false,
        }
    }

    pub(super) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        self.ranges.clear();
        (self.readable_bytes, self.writable_bytes, self.followed) = (0, 0, 0);
    }

    /// Adds a descriptor's memory.
    #[inline]
    pub(super) fn add(&mut self, memory: &MemoryTable, addr: u64, len: u32, flags: u16) -> Result<(), RingError> {
        let bytes = u64::from(len);
        self.followed += 1;
        if len == 0 {
            return Err(RingError::Empty);
        }
        if addr.checked_add(bytes - 1).is_none() {
            return Err(RingError::TooLong);
        }
        if flags & flag::WRITE != 0 {
            self.writable_bytes += bytes;
            if self.keep_ranges {
                self.ranges.push((addr, bytes));
            }
            if self.writable_bytes > u64::from(u32::MAX) {
                return Err(RingError::TooLong);
            }
            return add_runs(&mut self.writable, memory, addr, bytes, Access::Write);
        }
        if self.writable_bytes != 0 {
            return Err(RingError::Order);
        }
        self.readable_bytes += bytes;
        if self.readable_bytes > u64::from(u32::MAX) {
            return Err(RingError::TooLong);
        }
        add_runs(&mut self.readable, memory, addr, bytes, Access::Read)
    }

    /// Adds what an indirect table names. In a split ring's table descriptors are linked; a packed ring's are all used, in order.
    pub(super) fn add_indirect(&mut self, memory: &MemoryTable, addr: u64, len: u32, linked: bool) -> Result<(), RingError> {
        let count = len / Descriptor::SIZE as u32;
        if count == 0 || count > MAX_INDIRECT || !len.is_multiple_of(Descriptor::SIZE as u32) {
            return Err(RingError::IndirectSize(len));
        }
        // A table over several regions is read entry by entry.
        let table = memory.guest.translate(GuestAddress(addr), u64::from(len), Access::Read).ok();
        let mut index = 0_u32;
        for _ in 0..count {
            let offset = index as usize * Descriptor::SIZE;
            let descriptor: Descriptor = if let Some(table) = table {
                table.read_value(offset)
            } else {
                let at = GuestAddress(addr).checked_add(offset as u64).ok_or(RingError::TooLong)?;
                memory.guest.read_value(at)?
            };
            // A packed ring's descriptor has its buffer's name and then the flags where a split ring's has flags and link.
            let flags = if linked { descriptor.flags } else { descriptor.next };
            if flags & flag::INDIRECT != 0 {
                return Err(RingError::Indirect);
            }
            self.add(memory, descriptor.addr, descriptor.len, flags)?;
            index += 1;
            if linked {
                if flags & flag::NEXT == 0 {
                    return Ok(());
                }
                index = u32::from(descriptor.next);
                if index >= count {
                    return Err(RingError::Index { index: descriptor.next, size: count });
                }
            }
        }
        if linked { Err(RingError::Endless) } else { Ok(()) }
    }
}

#[inline]
fn add_runs(list: &mut Vec<Segment>, memory: &MemoryTable, addr: u64, len: u64, access: Access) -> Result<(), RingError> {
    let mut done = 0;
    while done < len {
        // No overflow: the last byte's address was checked.
        let segment = memory.guest.translate_some(GuestAddress(addr + done), len - done, access)?;
        done += segment.len() as u64;
        let count = list.len();
        match list.last_mut() {
            Some(last) if last.adjoins(&segment) => last.extend_over(&segment),
            _ if count >= MAX_SEGMENTS => return Err(RingError::TooManySegments),
            _ => list.push(segment),
        }
    }
    Ok(())
}
