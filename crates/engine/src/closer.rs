//! Threads that close what clients handed in, so that no shard has to.
//!
//! Closing a descriptor may take as long as its other side likes: a socket may linger, a file system in user space is asked first. A shard
//! uses such a descriptor only once it knows what it is, and never closes one of which it does not.
//!
//! ```text
//!   shard ── Received is dropped ─► a queue ─► one of a few threads ─► close(2)
//!                                      └ full: the descriptor stays open for good, and is counted
//! ```
//!
//! A client can keep all of the threads waiting. What others hand in stays open then, which costs descriptors and nobody's time; whoever would
//! rather wait is no better off, and another thread for each would be what the client is after.
#![forbid(unsafe_code)]

use std::{
    ops::Deref,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
};

/// How many descriptors may wait for their sides at once. All threads are there from the start: shards may be forbidden to start any later.
const THREADS: usize = 4;
/// How many more may wait for a thread.
const ROOM: usize = 1024;

static CLOSER: OnceLock<Option<SyncSender<OwnedFd>>> = OnceLock::new();
static LEFT_OPEN: AtomicU64 = AtomicU64::new(0);

/// A descriptor that a client handed in, whatever it is. It is closed on a thread that may wait.
#[derive(Debug)]
pub struct Received(Option<OwnedFd>);

impl Received {
    /// The descriptor itself, to be closed where it is dropped: for who knows that closing it does not wait.
    pub fn into_known(mut self) -> OwnedFd {
        self.0.take().expect("a descriptor is there until it is dropped")
    }
}

impl From<OwnedFd> for Received {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

impl Deref for Received {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        self.0.as_ref().expect("a descriptor is there until it is dropped")
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if let Some(fd) = self.0.take() {
            close_later(fd);
        }
    }
}

/// Descriptors that stay open for good because too many wait to be closed.
#[cfg(test)]
fn left_open() -> u64 {
    LEFT_OPEN.load(Ordering::Relaxed)
}

/// Starts the threads, if they do not run yet: shards may be forbidden to start threads later.
pub(crate) fn be_ready() {
    CLOSER.get_or_init(start);
}

/// Closes a descriptor on a background thread, some time soon.
fn close_later(fd: OwnedFd) {
    let Some(queue) = CLOSER.get_or_init(start) else { return drop(fd) };
    if let Err(TrySendError::Full(fd) | TrySendError::Disconnected(fd)) = queue.try_send(fd) {
        std::mem::forget(fd);
        let count = LEFT_OPEN.fetch_add(1, Ordering::Relaxed) + 1;
        // Few words for many of them.
        if count.is_power_of_two() {
            tracing::warn!(count, "clients' descriptors stay open for good: closing others of theirs does not end");
        }
    }
}

fn start() -> Option<SyncSender<OwnedFd>> {
    let (sender, receiver) = sync_channel(ROOM);
    let queue = Arc::new(Mutex::new(receiver));
    let mut started = 0;
    for _ in 0..THREADS {
        let queue = Arc::clone(&queue);
        match thread::Builder::new().name("millrace-closer".into()).spawn(move || close_all(&queue)) {
            Ok(_) => started += 1,
            Err(error) => tracing::warn!(%error, started, "fewer threads than wanted close clients' descriptors"),
        }
    }
    if started == 0 {
        tracing::warn!("no thread closes clients' descriptors: they can delay the shards");
        return None;
    }
    Some(sender)
}

fn close_all(queue: &Mutex<Receiver<OwnedFd>>) {
    loop {
        // Whoever waits for the next one holds the lock, the others wait for that; it is free while a descriptor is closed.
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match next {
            Ok(fd) => drop(fd),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _, pipe},
        net::{Ipv4Addr, TcpListener, TcpStream},
        os::fd::AsRawFd as _,
        time::Duration,
    };

    use super::*;

    /// A connection whose end waits, for as long as its peer is there and reads nothing.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        ours.set_nonblocking(true).unwrap();
        let bytes = vec![0; 65536];
        while ours.write(&bytes).is_ok_and(|written| written > 0) {}
        rustix::net::sockopt::set_socket_linger(&ours, Some(Duration::from_secs(3600))).unwrap();
        (ours, theirs)
    }

    /// A plain close would not come back within the hour.
    #[test]
    fn a_close_that_waits_is_waited_for_by_nobody() {
        let (stuck, peers): (Vec<_>, Vec<_>) = (1..THREADS).map(|_| lingering()).unzip();
        for ours in stuck {
            drop(Received::from(OwnedFd::from(ours)));
        }
        for _ in 0..3 {
            let (mut reader, writer) = pipe().unwrap();
            drop(Received::from(OwnedFd::from(writer)));
            assert_eq!(reader.read(&mut [0]).unwrap(), 0, "it is closed");
        }
        assert_eq!(left_open(), 0);
        drop(peers);
    }

    #[test]
    fn what_is_known_is_kept() {
        let (mut reader, writer) = pipe().unwrap();
        let number = writer.as_raw_fd();
        let received = Received::from(OwnedFd::from(writer));
        assert_eq!(received.as_raw_fd(), number);
        drop(received.into_known());
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }
}
