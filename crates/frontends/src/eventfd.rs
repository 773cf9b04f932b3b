//! Eventfds that a client hands in.

use std::{
    cell::Cell,
    ffi::CString,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    rc::Rc,
};

use millrace_engine::{closer::Received, interruptible};
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl, readlink},
    io::Errno,
};

/// Whether one of a device's clients has had an eventfd block. What one eventfd costs, many would cost one after the other: none of the
/// device's is used from then on, whoever comes.
#[derive(Clone, Debug, Default)]
pub(crate) struct HasBlocked(Rc<Cell<bool>>);

/// A client's eventfd. The client may have it block at any time, by O_NONBLOCK, which is not ours alone, and a counter that is full or
/// empty: the shard's watch then ends the call.
#[derive(Debug)]
pub(crate) struct Eventfd {
    fd: OwnedFd,
    /// The device that it is for, for the log.
    device: Box<str>,
    has_blocked: HasBlocked,
}

impl Eventfd {
    /// A client could hand in any descriptor: a shard uses eventfds alone, which do not block as they come, nor when they are closed.
    pub(crate) fn new(fd: impl Into<Received>, device: &str, has_blocked: &HasBlocked) -> Result<Self, Errno> {
        let fd: Received = fd.into();
        if kind(&fd)?.as_bytes() != b"anon_inode:[eventfd]" {
            return Err(Errno::INVAL);
        }
        fcntl_setfl(&*fd, fcntl_getfl(&*fd)? | OFlags::NONBLOCK)?;
        Ok(Self::known(fd.into_known(), device, has_blocked))
    }

    /// One that was looked at by the worker before this one.
    pub(crate) fn known(fd: OwnedFd, device: &str, has_blocked: &HasBlocked) -> Self {
        Self { fd, device: device.into(), has_blocked: has_blocked.clone() }
    }

    /// Whether it is not used any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.has_blocked.0.get()
    }

    /// Signals it. One that is full is signalled already, and whatever else fails is its owner's loss.
    #[inline]
    pub(crate) fn ring(&self) {
        if !self.is_given_up() {
            self.ended(interruptible(|| rustix::io::write(&self.fd, &1_u64.to_ne_bytes())));
        }
    }

    /// Takes its signals, so that it is not readable any more. Whether there were any.
    pub(crate) fn silence(&self) -> bool {
        !self.is_given_up() && self.ended(interruptible(|| rustix::io::read(&self.fd, &mut [0_u8; 8])))
    }

    fn ended(&self, result: Result<usize, Errno>) -> bool {
        if result == Err(Errno::INTR) {
            self.has_blocked.0.set(true);
            let device = &*self.device;
            tracing::error!(
                device,
                "its client has made an eventfd block: none of the device's is used any more; make the device anew for another guest"
            );
        }
        result.is_ok()
    }
}

/// What a descriptor is, by the name that the system has for it. Its other side is not asked, as it would be for its state.
fn kind(fd: &OwnedFd) -> Result<CString, Errno> {
    readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())
}

/// Whether a client's descriptor is a socket. Files' names begin with a slash, whatever they are called.
pub(crate) fn is_socket(fd: &OwnedFd) -> Result<bool, Errno> {
    Ok(kind(fd)?.as_bytes().starts_with(b"socket:["))
}

impl AsFd for Eventfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
