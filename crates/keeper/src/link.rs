//! The worker's end.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::{io::Errno, net::RecvFlags};
use thiserror::Error;

use crate::{
    Key, Kind, MAX_REPLY,
    process::is_fault,
    wire::{self, Message, What},
};

/// Why a worker cannot work with its keeper.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The socket.
    #[error("the keeper's socket: {action}: {source}")]
    Socket {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It has gone.
    #[error("the keeper is gone")]
    Gone,
    /// A message that is none.
    #[error("the keeper sent what is not understood: it is of another version")]
    Strange,
}

fn failed(action: &'static str) -> impl Fn(Errno) -> LinkError {
    move |errno| match errno {
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => LinkError::Gone,
        errno => LinkError::Socket { action, source: errno.into() },
    }
}

/// A descriptor that the keeper held.
#[derive(Debug)]
pub struct Held {
    /// Ours now too; the keeper goes on holding it.
    pub fd: OwnedFd,
    /// Of a connection: replies that were forwarded to it.
    pub replies: u64,
}

/// How the worker before this one ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Predecessor {
    /// The signal that ended it; `None`: it ended by itself.
    pub signal: Option<i32>,
    /// How long guests were served by it, in milliseconds.
    pub served_millis: u64,
    /// Its process.
    pub pid: u32,
    /// When nobody served guests any more, by the system's monotonic clock in microseconds.
    pub died_micros: u64,
}

impl Predecessor {
    /// Whether it ended by a fault of its own: what it was doing may be to blame.
    pub fn was_faulty(&self) -> bool {
        is_fault(self.signal)
    }
}

/// What a worker says to its keeper, from any thread.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    held: Mutex<BTreeMap<Key, Held>>,
    predecessor: Option<Predecessor>,
}

impl Link {
    /// Begins: receives what is held. `socket` is the worker's standard input.
    pub fn begin(socket: OwnedFd) -> Result<Self, LinkError> {
        let mut held = BTreeMap::new();
        let mut buffer = [0; wire::SIZE];
        loop {
            let received = wire::receive(socket.as_fd(), &mut buffer, RecvFlags::empty()).map_err(failed("receiving"))?;
            let mut received = received.ok_or(LinkError::Gone)?;
            let message = received.message.ok_or(LinkError::Strange)?;
            match message.what {
                What::Held => {
                    let fd = received.fds.pop().ok_or(LinkError::Strange)?;
                    held.insert(message.key, Held { fd, replies: message.number });
                }
                What::Begin => {
                    let signal = i32::try_from(message.number & 0xffff).ok().filter(|signal| *signal != 0);
                    let was_one = message.number & BEGIN_AGAIN != 0;
                    let died_micros = message.died_micros();
                    let (served_millis, pid) = (message.more, message.key.slot);
                    let predecessor = was_one.then_some(Predecessor { signal, served_millis, pid, died_micros });
                    return Ok(Self { socket, held: Mutex::new(held), predecessor });
                }
                _ => return Err(LinkError::Strange),
            }
        }
    }

    /// The worker before this one, if this one takes over.
    pub fn predecessor(&self) -> Option<Predecessor> {
        self.predecessor
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<Key, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what was held under a key. The keeper goes on holding it.
    pub fn take(&self, key: Key) -> Option<Held> {
        self.held().remove(&key)
    }

    /// Takes all of a kind, by slot.
    pub fn take_all(&self, owner: [u8; 16], kind: Kind) -> Vec<(u32, Held)> {
        let mut held = self.held();
        let keys: Vec<_> =
            held.range(Key { owner, kind, slot: 0 }..=Key { owner, kind, slot: u32::MAX }).map(|(key, _)| *key).collect();
        keys.into_iter().filter_map(|key| Some((key.slot, held.remove(&key)?))).collect()
    }

    /// Lets go of what nobody took: devices and volumes that are no more. Returns how many descriptors that were.
    pub fn drop_untaken(&self) -> Result<usize, LinkError> {
        let untaken = std::mem::take(&mut *self.held());
        for key in untaken.keys() {
            self.drop_one(*key)?;
        }
        Ok(untaken.len())
    }

    fn say(&self, message: Message, data: &[&[u8]; 3], fds: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        wire::send(self.socket.as_fd(), message, data, fds).map_err(failed("sending"))
    }

    /// Has the keeper hold a descriptor, from now on and whatever happens to this process.
    pub fn put(&self, key: Key, fd: BorrowedFd<'_>) -> Result<(), LinkError> {
        self.say(Message::new(What::Put, key), &[&[]; 3], &[fd])
    }

    /// Has the keeper let go of one descriptor.
    pub fn drop_one(&self, key: Key) -> Result<(), LinkError> {
        self.say(Message::new(What::DropOne, key), &[&[]; 3], &[])
    }

    /// Has the keeper let go of an owner's descriptors of these kinds, in one step.
    pub fn drop_kinds(&self, owner: [u8; 16], first: Kind, last: Kind) -> Result<(), LinkError> {
        let message = Message { number: last.0.into(), ..Message::new(What::Drop, Key::of(owner, first)) };
        self.say(message, &[&[]; 3], &[])
    }

    /// Has the keeper let go of all that an owner has.
    pub fn drop_owner(&self, owner: [u8; 16]) -> Result<(), LinkError> {
        self.held().retain(|key, _| key.owner != owner);
        self.drop_kinds(owner, Kind(0), Kind(u32::MAX))
    }

    /// Sends a reply to the client of a connection, by way of the keeper.
    ///
    /// # Panics
    /// When it is longer than [`MAX_REPLY`].
    pub fn reply(&self, connection: Key, parts: &[&[u8]; 3], fds: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        assert!(bytes <= MAX_REPLY, "a reply of {bytes} bytes");
        self.say(Message::new(What::Reply, connection), parts, fds)
    }

    /// Says that guests are served.
    pub fn ready(&self) -> Result<(), LinkError> {
        self.say(Message::plain(What::Ready), &[&[]; 3], &[])
    }

    /// Waits until the keeper says to stop, or is gone.
    pub fn wait_for_stop(&self) {
        let mut buffer = [0; wire::SIZE];
        loop {
            match wire::receive(self.socket.as_fd(), &mut buffer, RecvFlags::empty()) {
                Ok(Some(received)) if received.message.is_some_and(|message| message.what == What::Stop) => return,
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return,
            }
        }
    }
}

/// Set in the number of BEGIN when there was a worker before.
pub(crate) const BEGIN_AGAIN: u64 = 1 << 32;
