//! The worker's end.

use std::{
    collections::BTreeMap,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags},
};
use thiserror::Error;

use crate::{
    Key, Kind, Layout, Layouts, MAX_LAYOUTS, MAX_REPLY,
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
    /// It speaks another version.
    #[error(
        "the keeper speaks version {found} of its protocol, and this worker {} to {}: restart the daemon with this binary",
        Link::LAYOUT.oldest, Link::LAYOUT.newest
    )]
    Version {
        /// The keeper's.
        found: u32,
    },
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
    /// It has let go in an upgrade.
    pub let_go: bool,
}

impl Predecessor {
    /// Whether it ended by a fault of its own: what it was doing may be to blame.
    pub fn was_faulty(&self) -> bool {
        !self.let_go && is_fault(self.signal)
    }
}

/// What a keeper says to its worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// Stop in order; the keeper is gone, which means the same.
    Stop,
    /// A worker is warm that understands these layouts: leave it what it understands and end, or [refuse](Link::refuse).
    LetGo(Layouts),
    /// An upgrade has ended.
    Upgraded(Upgraded),
    /// Nobody goes back to the worker before this one any more: what is left may have the newest layouts.
    Settled,
    /// The keeper has no room for what was put under this key: it goes with this worker.
    NotHeld(Key),
}

/// How an upgrade ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upgraded {
    /// The name that it was given.
    pub id: [u8; 16],
    /// The rest.
    pub result: UpgradeResult,
}

/// How an upgrade ended. Unless it is done, the old binary serves on, or again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpgradeResult {
    /// The new one serves; for how many microseconds nobody did.
    Done(u64),
    /// Another one was under way.
    Busy,
    /// The file cannot be run, by this error number.
    CannotRun(i32),
    /// It ended before it was warm, with this wait status.
    DiedAtStart(i32),
    /// It was not warm in time.
    SilentAtStart,
    /// The old worker does not let go: the new one does not understand its layouts.
    Refused,
    /// The old worker died meanwhile, and another one of its binary has taken over.
    OldDied,
    /// It ended before it served, with this wait status, or too soon after it.
    Died(i32),
    /// It did not serve in time.
    Silent,
    /// The file does not lie where programs may take over from.
    NotAllowed,
}

impl UpgradeResult {
    pub(crate) fn encode(self) -> (u32, u64) {
        let status = |status: i32| u64::from(status.cast_unsigned());
        match self {
            Self::Done(micros) => (0, micros),
            Self::Busy => (1, 0),
            Self::CannotRun(errno) => (2, status(errno)),
            Self::DiedAtStart(how) => (3, status(how)),
            Self::SilentAtStart => (4, 0),
            Self::Refused => (5, 0),
            Self::OldDied => (6, 0),
            Self::Died(how) => (7, status(how)),
            Self::Silent => (8, 0),
            Self::NotAllowed => (9, 0),
        }
    }

    fn decode(what: u32, detail: u64) -> Self {
        let status = (detail as u32).cast_signed();
        match what {
            0 => Self::Done(detail),
            1 => Self::Busy,
            2 => Self::CannotRun(status),
            3 => Self::DiedAtStart(status),
            4 => Self::SilentAtStart,
            6 => Self::OldDied,
            7 => Self::Died(status),
            8 => Self::Silent,
            9 => Self::NotAllowed,
            // And what another version of the keeper may know.
            _ => Self::Refused,
        }
    }
}

/// What a worker says to its keeper, from any thread.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    held: Mutex<BTreeMap<Key, Held>>,
    predecessor: Option<Predecessor>,
    /// What the worker understands that takes over again if this one fails.
    before: Layouts,
    on_trial: AtomicBool,
}

impl Link {
    /// The versions of the keeper's protocol that a worker understands.
    pub const LAYOUT: Layout = Layout { name: "keeper-protocol", oldest: 1, newest: wire::PROTOCOL as u16 };

    /// Begins: says that all is ready and which layouts this worker understands, waits for its turn, and receives what is held.
    /// `socket` is the worker's standard input.
    pub fn begin(socket: OwnedFd, layouts: &[Layout]) -> Result<Self, LinkError> {
        let (known, warm) = (Layout::encode(layouts), Message::plain(What::WARM));
        let sent = wire::send(socket.as_fd(), warm, &[&known, &[], &[]], &[], SendFlags::empty());
        sent.map_err(failed("sending"))?;
        let mut held = BTreeMap::new();
        let mut buffer = [0; wire::SIZE + MAX_LAYOUTS];
        loop {
            let received = wire::receive(socket.as_fd(), &mut buffer, RecvFlags::empty()).map_err(failed("receiving"))?;
            let mut received = received.ok_or(LinkError::Gone)?;
            let message = received.message.ok_or(LinkError::Strange)?;
            let found = message.protocol;
            if found < Self::LAYOUT.oldest.into() || found > wire::PROTOCOL {
                return Err(LinkError::Version { found });
            }
            match message.what {
                What::HELD => {
                    let fd = received.fds.pop().ok_or(LinkError::Strange)?;
                    held.insert(message.key, Held { fd, replies: message.number });
                }
                What::BEGIN => {
                    return Ok(Self {
                        predecessor: predecessor(&message),
                        before: Layouts::decode(received.data),
                        on_trial: AtomicBool::new(message.number & ON_TRIAL != 0),
                        held: Mutex::new(held),
                        socket,
                    });
                }
                _ => return Err(LinkError::Strange),
            }
        }
    }

    /// The worker before this one, if this one takes over.
    pub fn predecessor(&self) -> Option<Predecessor> {
        self.predecessor
    }

    /// Whether the worker before this one, of another binary, takes over again if this one fails.
    pub fn is_on_trial(&self) -> bool {
        self.on_trial.load(Ordering::Acquire)
    }

    /// The version of a structure that is to be left now: the newest that whoever may take over understands.
    pub fn version_of(&self, layout: &Layout) -> u16 {
        if self.is_on_trial() { self.before.common(layout).unwrap_or(layout.newest) } else { layout.newest }
    }

    /// Whether something was held under a key that nobody took yet.
    pub fn is_held(&self, key: Key) -> bool {
        self.held().contains_key(&key)
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<Key, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what was held under a key. The keeper goes on holding it.
    pub fn take(&self, key: Key) -> Option<Held> {
        self.held().remove(&key)
    }

    /// Another descriptor of what was held under a key, which may be asked for again.
    ///
    /// # Errors
    /// The process has as many descriptors as it may have.
    pub fn copy(&self, key: Key) -> io::Result<Option<OwnedFd>> {
        self.held().get(&key).map(|held| held.fd.try_clone()).transpose()
    }

    /// Takes all of a kind, by slot.
    pub fn take_all(&self, owner: [u8; 16], kind: Kind) -> Vec<(u32, Held)> {
        let mut held = self.held();
        let keys: Vec<_> =
            held.range(Key { owner, kind, slot: 0 }..=Key { owner, kind, slot: u32::MAX }).map(|(key, _)| *key).collect();
        keys.into_iter().filter_map(|key| Some((key.slot, held.remove(&key)?))).collect()
    }

    /// Lets go of what nobody took: devices and volumes that are no more. What is needed the keeper goes on holding. Returns how many
    /// descriptors were given up.
    pub fn drop_untaken(&self, is_needed: impl Fn(Key) -> bool) -> Result<usize, LinkError> {
        let mut untaken = std::mem::take(&mut *self.held());
        untaken.retain(|key, _| !is_needed(*key));
        for key in untaken.keys() {
            self.drop_one(*key)?;
        }
        Ok(untaken.len())
    }

    fn say(&self, message: Message, data: &[&[u8]; 3], fds: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        wire::send(self.socket.as_fd(), message, data, fds, SendFlags::empty()).map_err(failed("sending"))
    }

    /// Has the keeper hold a descriptor, from now on and whatever happens to this process.
    pub fn put(&self, key: Key, fd: BorrowedFd<'_>) -> Result<(), LinkError> {
        self.say(Message::new(What::PUT, key), &[&[]; 3], &[fd])
    }

    /// Has the keeper let go of one descriptor.
    pub fn drop_one(&self, key: Key) -> Result<(), LinkError> {
        self.held().remove(&key);
        self.say(Message::new(What::DROP_ONE, key), &[&[]; 3], &[])
    }

    /// Has the keeper let go of an owner's descriptors of these kinds, in one step.
    pub fn drop_kinds(&self, owner: [u8; 16], first: Kind, last: Kind) -> Result<(), LinkError> {
        let message = Message { number: last.0.into(), ..Message::new(What::DROP, Key::of(owner, first)) };
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
        self.say(Message::new(What::REPLY, connection), parts, fds)
    }

    /// Says that guests are served.
    pub fn ready(&self) -> Result<(), LinkError> {
        self.say(Message::plain(What::READY), &[&[]; 3], &[])
    }

    /// Asks for another binary in the place of this one; [`Word::Upgraded`] tells how it ended, to this worker or the next.
    ///
    /// `id` names the attempt. For `trial_millis` after it serves, the keeper goes back to this binary if the new one fails.
    pub fn upgrade(&self, id: [u8; 16], binary: &Path, trial_millis: u64) -> Result<(), LinkError> {
        let message = Message { number: trial_millis, ..Message::new(What::UPGRADE, Key::of(id, Kind(0))) };
        self.say(message, &[binary.as_os_str().as_bytes(), &[], &[]], &[])
    }

    /// Ends this worker's trial before its time: nobody goes back to the one before.
    pub fn settle(&self) -> Result<(), LinkError> {
        self.say(Message::plain(What::SETTLE), &[&[]; 3], &[])
    }

    /// Has the keeper run a cell of this name, from now on. One that runs already goes on.
    pub fn start_cell(&self, name: &str) -> Result<(), LinkError> {
        self.say(Message::plain(What::START_CELL), &[name.as_bytes(), &[], &[]], &[])
    }

    /// Has the keeper end a cell in order, and not start it again.
    pub fn stop_cell(&self, name: &str) -> Result<(), LinkError> {
        self.say(Message::plain(What::STOP_CELL), &[name.as_bytes(), &[], &[]], &[])
    }

    /// Does not let go.
    pub fn refuse(&self) -> Result<(), LinkError> {
        self.say(Message::plain(What::REFUSE), &[&[]; 3], &[])
    }

    /// Waits for the keeper's next word.
    ///
    /// # Errors
    /// The system does not let it be heard, which says nothing of what it wants.
    pub fn listen(&self) -> Result<Word, LinkError> {
        let mut buffer = [0; wire::SIZE + MAX_LAYOUTS];
        loop {
            let received =
                wire::receive(self.socket.as_fd(), &mut buffer, RecvFlags::empty()).map_err(failed("receiving"))?;
            let Some(received) = received else { return Ok(Word::Stop) };
            let Some(message) = received.message else { continue };
            match message.what {
                What::STOP => return Ok(Word::Stop),
                What::LET_GO => return Ok(Word::LetGo(Layouts::decode(received.data))),
                What::UPGRADED => {
                    let result = UpgradeResult::decode(message.key.slot, message.number);
                    return Ok(Word::Upgraded(Upgraded { id: message.key.owner, result }));
                }
                What::NOT_HELD => return Ok(Word::NotHeld(message.key)),
                What::SETTLED => {
                    self.on_trial.store(false, Ordering::Release);
                    return Ok(Word::Settled);
                }
                _ => {}
            }
        }
    }
}

/// The worker before this one, as BEGIN tells.
fn predecessor(begin: &Message) -> Option<Predecessor> {
    let was_one = begin.number & BEGIN_AGAIN != 0;
    was_one.then(|| Predecessor {
        signal: i32::try_from(begin.number & 0xffff).ok().filter(|signal| *signal != 0),
        served_millis: begin.more,
        pid: begin.key.slot,
        died_micros: u128::from_le_bytes(begin.key.owner) as u64,
        let_go: begin.number & LET_GO != 0,
    })
}

/// Set in the number of BEGIN when there was a worker before.
pub(crate) const BEGIN_AGAIN: u64 = 1 << 32;
/// And when it has let go, in an upgrade.
pub(crate) const LET_GO: u64 = 1 << 33;
/// Set when a worker of another binary takes over again if this one fails: its layouts follow.
pub(crate) const ON_TRIAL: u64 = 1 << 34;
