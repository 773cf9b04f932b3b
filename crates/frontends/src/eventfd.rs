//! Eventfds that a client hands in.

use std::{
    cell::Cell,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use millrace_engine::interruptible;
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl, readlink},
    io::Errno,
};

/// A client's eventfd. The client may have it block at any time, by O_NONBLOCK, which is not ours alone, and a counter that is full or
/// empty: the shard's watch then ends the call, and the eventfd is not used again.
#[derive(Debug)]
pub(crate) struct Eventfd {
    fd: OwnedFd,
    /// The device that it is for, for the log.
    device: Box<str>,
    has_blocked: Cell<bool>,
}

impl Eventfd {
    /// A client could hand in any descriptor: a shard uses eventfds alone, which do not block as they come.
    pub(crate) fn new(fd: OwnedFd, device: &str) -> Result<Self, Errno> {
        let link = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
        if link.as_bytes() != b"anon_inode:[eventfd]" {
            return Err(Errno::INVAL);
        }
        fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        Ok(Self::known(fd, device))
    }

    /// One that was looked at by the worker before this one.
    pub(crate) fn known(fd: OwnedFd, device: &str) -> Self {
        Self { fd, device: device.into(), has_blocked: Cell::new(false) }
    }

    /// Signals it. One that is full is signalled already, and whatever else fails is its owner's loss.
    #[inline]
    pub(crate) fn ring(&self) {
        if !self.has_blocked.get() {
            self.ended(interruptible(|| rustix::io::write(&self.fd, &1_u64.to_ne_bytes())));
        }
    }

    /// Takes its signals, so that it is not readable any more. Whether there were any.
    pub(crate) fn silence(&self) -> bool {
        !self.has_blocked.get() && self.ended(interruptible(|| rustix::io::read(&self.fd, &mut [0_u8; 8])))
    }

    fn ended(&self, result: Result<usize, Errno>) -> bool {
        if result == Err(Errno::INTR) {
            self.has_blocked.set(true);
            tracing::error!(
                device = &*self.device,
                "its client has made an eventfd block the shard: it is not used any more"
            );
        }
        result.is_ok()
    }
}

impl AsFd for Eventfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
