//! Who is at the other end of a unix socket, beyond what the standard library tells.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Most groups that a process can have.
const MOST: usize = 65536;
/// The same on all machines that we know.
const SO_PEERGROUPS: libc::c_int = 59;

/// The groups that the peer had when it connected, beside its own.
///
/// # Errors
/// It is not a unix socket.
pub fn groups_of_peer(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; 64];
    loop {
        let mut len = libc::socklen_t::try_from(size_of_val(&groups[..])).unwrap_or(0);
        // SAFETY: the system writes at most `len` bytes of numbers, and how many they are.
        let result = unsafe {
            let place = groups.as_mut_ptr().cast();
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERGROUPS, place, &raw mut len)
        };
        match (result, io::Error::last_os_error()) {
            (0, _) => {
                groups.truncate(len as usize / size_of::<u32>());
                return Ok(groups);
            }
            (_, error) if error.raw_os_error() == Some(libc::ERANGE) && groups.len() < MOST => groups.resize(MOST, 0),
            (_, error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::{fd::AsFd, unix::net::UnixStream};

    use super::*;

    #[test]
    fn a_peers_groups_are_told() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let own: Vec<_> = rustix::process::getgroups().unwrap().into_iter().map(rustix::process::Gid::as_raw).collect();
        assert_eq!(groups_of_peer(ours.as_fd()).unwrap(), own);
        assert!(groups_of_peer(std::fs::File::open("/dev/null").unwrap().as_fd()).is_err());
    }
}
