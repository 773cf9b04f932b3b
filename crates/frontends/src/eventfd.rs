//! Eventfds that a client hands in.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

/// Signals an eventfd. One that is full is signalled already, and whatever else fails is its owner's loss.
#[inline]
pub(crate) fn ring(eventfd: &OwnedFd) {
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

/// Takes an eventfd's signals, so that it is not readable any more.
pub(crate) fn silence(eventfd: &OwnedFd) {
    let _ = rustix::io::read(eventfd, &mut [0_u8; 8]);
}

/// A client could hand in any descriptor: only an eventfd that does not block may be used from a shard.
pub(crate) fn check(fd: &OwnedFd) -> Result<(), Errno> {
    use std::os::fd::AsRawFd;
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
    if link.as_bytes() != b"anon_inode:[eventfd]" {
        return Err(Errno::INVAL);
    }
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd.as_fd(), flags | rustix::fs::OFlags::NONBLOCK)
}
