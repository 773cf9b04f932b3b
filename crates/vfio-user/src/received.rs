//! Descriptors that the peer sent.

use std::ops::Deref;
use std::os::fd::OwnedFd;

/// A descriptor that the peer handed in, whatever it is. Closing it may take as long as its other side likes (a socket lingers, a file
/// system in user space is asked first), so whoever has the connection says what closes it.
#[derive(Debug)]
pub struct Received {
    /// There until it is dropped.
    fd: Option<OwnedFd>,
    close: fn(OwnedFd),
}

impl Received {
    /// A descriptor that `close` closes, or has closed elsewhere.
    pub(crate) fn new(fd: OwnedFd, close: fn(OwnedFd)) -> Self {
        Self { fd: Some(fd), close }
    }

    /// Another one of the same peer's.
    pub(crate) fn likewise(&self, fd: OwnedFd) -> Self {
        Self::new(fd, self.close)
    }

    /// The descriptor itself, to be closed where it is dropped: for who knows that closing it does not wait.
    pub fn into_inner(mut self) -> OwnedFd {
        self.fd.take().expect("a descriptor is there until it is dropped")
    }
}

/// One that is closed where it is dropped.
impl From<OwnedFd> for Received {
    fn from(fd: OwnedFd) -> Self {
        Self::new(fd, drop)
    }
}

impl Deref for Received {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        self.fd.as_ref().expect("a descriptor is there until it is dropped")
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            (self.close)(fd);
        }
    }
}
