//! Whether who is on the other side of a socket has left it.

use std::os::fd::AsFd;

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

/// Whether the other side has hung up, though messages of its may be left that nobody has read.
pub(crate) fn is_gone(socket: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    match poll(&mut fds, Some(&Timespec::default())) {
        Ok(_) => fds.iter().any(|fd| fd.revents().intersects(gone)),
        Err(Errno::INTR) => false,
        Err(_) => true,
    }
}
