//! Typed memory in a file of its own, which another process may map too.

use std::{
    io,
    marker::PhantomData,
    ops::Deref,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::fs::{MemfdFlags, SealFlags};
use zerocopy::FromBytes;

use crate::Mapping;

/// A `T` in a memfd. `T` is made of atomics where another process really writes, or of cells where it only keeps the file.
///
/// The file is sealed against shrinking, so that whoever gets its descriptor cannot take the memory away.
#[derive(Debug)]
pub struct Shared<T> {
    file: OwnedFd,
    mapping: Mapping,
    // `*mut`: a T with cells must not be reached from two threads.
    content: PhantomData<*mut T>,
}

// SAFETY: it is the one way of its thread to the mapping, like a box; only sharing it needs more of a T than moving it does.
unsafe impl<T: Send> Send for Shared<T> {}

impl<T: FromBytes> Shared<T> {
    /// A zeroed `T`; `name` appears in /proc for whoever looks.
    pub fn new(name: &str) -> io::Result<Self> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let len = size_of::<T>().max(1).next_multiple_of(4096);
        rustix::fs::ftruncate(&file, len as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = Mapping::shared(file.as_fd(), 0, len, true)?;
        assert!(align_of::<T>() <= 4096, "a mapping is page-aligned");
        Ok(Self { file, mapping, content: PhantomData })
    }

    /// A `T` that another process has left in a file of [`Self::new`]'s.
    pub fn from_file(file: OwnedFd) -> io::Result<Self> {
        let len = size_of::<T>().max(1).next_multiple_of(4096);
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let found = rustix::fs::fstat(&file)?.st_size;
        if !seals.contains(SealFlags::SHRINK) || u64::try_from(found) != Ok(len as u64) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is not of this size, or not sealed"));
        }
        let mapping = Mapping::shared(file.as_fd(), 0, len, true)?;
        Ok(Self { file, mapping, content: PhantomData })
    }

    /// Length of the file in bytes: `T` rounded up to whole pages.
    pub fn file_len(&self) -> u64 {
        self.mapping.len() as u64
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping is at least as long and as aligned as T, any bytes are a valid T (FromBytes), it lives as long
        // as self, and whatever changes behind it is behind T's own cells or atomics.
        unsafe { &*self.mapping.as_ptr().cast::<T>() }
    }
}

impl<T> AsFd for Shared<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
