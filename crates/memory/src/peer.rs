//! Bookkeeping that a peer shares with us: a log of changed pages, a record of requests under way.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::fs::{MemfdFlags, SealFlags};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{
    MapError, PAGE_SIZE, Segment,
    guard::{self, GuardedMapping},
    guest,
    room::{Account, BOOKKEEPING},
};

/// A range of a file in memory, mapped and guarded ([`guard`]), reached by copies and single stores only.
///
/// The peer may change any byte at any instant. Offsets are ours: one beyond the range is a fault of ours and panics.
#[derive(Debug)]
pub struct PeerBytes {
    backing: guest::Backing,
    len: usize,
    poison: guard::Poison,
}

impl PeerBytes {
    /// Maps `len` bytes of a peer's file from `offset` (a multiple of [`PAGE_SIZE`]) on. As for guest memory, the file must be
    /// memory: a memfd, tmpfs or hugetlbfs.
    pub fn map(fd: &OwnedFd, offset: u64, len: u64) -> Result<Self, MapError> {
        let bad = || MapError::BadRange { addr: offset, size: len };
        let size = usize::try_from(len).ok().filter(|len| *len > 0).ok_or_else(bad)?;
        if !offset.is_multiple_of(PAGE_SIZE) {
            return Err(bad());
        }
        let poison = guard::Poison::new();
        // Hidden, for it comes and goes on shards.
        let guard = |mapping, share| GuardedMapping::hidden(mapping, &poison, share);
        let account = Account::new(&BOOKKEEPING);
        let share = |bytes| account.take(bytes, false);
        let backing = guest::map_file(share, guard, guest::GuestAddress(offset), len, true, fd.as_fd(), offset)?;
        Ok(Self { backing, len: size, poison })
    }

    /// `len` zeroed bytes in a file of our own, to be given to the peer. It cannot be shrunk.
    pub fn create(name: &str, len: u64) -> io::Result<(Self, OwnedFd)> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, len.next_multiple_of(PAGE_SIZE))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let bytes = Self::map(&file, 0, len).map_err(io::Error::other)?;
        Ok((bytes, file.as_fd().try_clone_to_owned()?))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a range of no bytes (there is none).
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the peer took the memory away.
    pub fn is_poisoned(&self) -> bool {
        self.poison.is_set()
    }

    #[inline]
    fn segment(&self, offset: usize, len: usize) -> Segment {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "an access within the peer's bytes");
        // SAFETY: the segment is used within a method of the object that owns the mapping, which is writable, and is not handed
        // out.
        unsafe { self.backing.mapping.segment(self.backing.skip + offset, len) }.expect("the range lies within the mapping")
    }

    /// Copies a value out.
    pub fn read_value<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        self.segment(offset, size_of::<T>()).read_value(0)
    }

    /// Copies a value in.
    pub fn write_value<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.segment(offset, size_of::<T>()).write_value(0, value);
    }

    /// Stores one byte, whole.
    #[inline]
    pub fn store_u8(&self, offset: usize, value: u8) {
        self.segment(offset, 1).store_u8(0, value);
    }

    /// Stores an aligned 16-bit word, whole.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16) {
        self.segment(offset, 2).store_u16(0, value);
    }

    /// Stores an aligned 64-bit word, whole.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) {
        self.segment(offset, 8).store_u64(0, value);
    }

    /// Sets bits of one byte that the peer may be clearing at this moment: none of either's changes is lost.
    #[inline]
    pub fn set_bits(&self, offset: usize, bits: u8) {
        self.segment(offset, 1).set_bits(0, bits);
    }
}
