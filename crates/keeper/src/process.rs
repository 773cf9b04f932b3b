//! The keeper's end: one thread, one worker at a time.

use std::{
    collections::BTreeMap,
    io::{self, IoSlice},
    os::fd::{AsFd, FromRawFd, OwnedFd},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, socketpair},
    process::{PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit},
};
use thiserror::Error;

use crate::{
    Key, Kind, MAX_HELD, MAX_HELD_BY_OWNER, MAX_REPLY,
    link::BEGIN_AGAIN,
    wire::{self, Message, What},
};

/// A worker that served this long has not failed to start.
const SETTLED: Duration = Duration::from_secs(1);
/// Failures in a row after which restarts are put off, the first wait, and the longest.
const PATIENCE: u32 = 3;
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Why the keeper cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KeeperError {
    /// A system call failed.
    #[error("the keeper cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

fn failed<E: Into<io::Error>>(action: &'static str) -> impl Fn(E) -> KeeperError {
    move |source| KeeperError::Io { action, source: source.into() }
}

/// How it came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was told to stop, and its worker did.
    Stopped,
    /// The first worker never served anyone: what it says is the reason. Its exit code, if it had one.
    NeverServed(Option<i32>),
    /// The worker, told to stop, ended badly.
    StoppedBadly(Option<i32>),
}

/// What happens to a keeper, for a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Guests are served; `first` by the first worker.
    Ready {
        /// Nobody served them before.
        first: bool,
        /// From the death of the worker before, or the start, in microseconds.
        micros: u64,
    },
    /// The worker died, and another one is started.
    Died {
        /// Its process.
        pid: u32,
        /// What ended it.
        signal: Option<i32>,
        /// Its exit code otherwise.
        code: Option<i32>,
    },
}

struct Place {
    fd: OwnedFd,
    replies: u64,
}

/// The worker that runs.
struct Worker {
    child: Child,
    /// Readable when it has ended.
    end: OwnedFd,
    socket: OwnedFd,
    ready: Option<Instant>,
}

/// See the crate's page.
pub struct Keeper {
    held: BTreeMap<Key, Place>,
    signals: OwnedFd,
    buffer: Box<[u8]>,
    stopping: bool,
    /// Workers that did not settle, in a row.
    failures: u32,
    ever_ready: bool,
    /// Since when nobody is served.
    idle_since: Instant,
}

impl Keeper {
    /// Takes over SIGTERM and SIGINT of this process, which may have no other threads yet.
    pub fn new() -> Result<Self, KeeperError> {
        let limit = getrlimit(Resource::Nofile);
        // Fewer descriptors are no reason not to start.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
        Ok(Self {
            held: BTreeMap::new(),
            signals: watch_signals().map_err(failed("watch signals"))?,
            buffer: vec![0; wire::SIZE + MAX_REPLY].into_boxed_slice(),
            stopping: false,
            failures: 0,
            ever_ready: false,
            idle_since: Instant::now(),
        })
    }

    /// Keeps a worker running until told to stop. `worker` makes the command that starts one; its standard input becomes the
    /// link. `tell` hears what happens.
    pub fn run(mut self, worker: impl Fn() -> Command, mut tell: impl FnMut(Event)) -> Result<Outcome, KeeperError> {
        let mut begin = Message::plain(What::Begin);
        loop {
            let mut current = self.start(worker(), begin)?;
            self.attend(&mut current, &mut tell)?;
            let status = current.child.wait().map_err(failed("wait for the worker"))?;
            if self.stopping {
                return Ok(if status.success() { Outcome::Stopped } else { Outcome::StoppedBadly(status.code()) });
            }
            if !self.ever_ready {
                return Ok(Outcome::NeverServed(status.code()));
            }
            let signal = std::os::unix::process::ExitStatusExt::signal(&status);
            tell(Event::Died { pid: current.child.id(), signal, code: status.code() });
            let served = current.ready.map_or(Duration::ZERO, |ready| ready.elapsed());
            if current.ready.is_some() {
                self.idle_since = Instant::now();
                begin.set_died_micros(monotonic_micros());
            }
            begin.key.slot = current.child.id();
            begin.number = BEGIN_AGAIN | u64::from(signal.unwrap_or(0).unsigned_abs());
            begin.more = u64::try_from(served.as_millis()).unwrap_or(u64::MAX);
            // One that served and was killed did not fail.
            let failed = current.ready.is_none() || is_fault(signal) && served < SETTLED;
            self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
            if self.wait_before_restart()? {
                return Ok(Outcome::StoppedBadly(status.code()));
            }
        }
    }

    /// Puts a restart off when the last ones failed. Whether we are told to stop meanwhile.
    fn wait_before_restart(&mut self) -> Result<bool, KeeperError> {
        let Some(step) = self.failures.checked_sub(PATIENCE) else { return Ok(false) };
        let wait = FIRST_WAIT.saturating_mul(1 << step.min(16)).min(LONGEST_WAIT);
        let mut fds = [PollFd::new(&self.signals, PollFlags::IN)];
        let timeout = Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: wait.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(failed("wait")(errno)),
        }
    }

    /// Starts a worker and gives it what is held.
    fn start(&self, mut command: Command, begin: Message) -> Result<Worker, KeeperError> {
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(failed("make a socket"))?;
        let child = command.stdin(Stdio::from(theirs)).spawn().map_err(failed("start a worker"))?;
        // Its copy of the other end goes with the command: the worker's death must be the end of the socket.
        drop(command);
        let pid = rustix::process::Pid::from_child(&child);
        let end = pidfd_open(pid, PidfdFlags::empty()).map_err(failed("watch the worker"))?;
        for (key, place) in &self.held {
            let message = Message { number: place.replies, ..Message::new(What::Held, *key) };
            if wire::send(socket.as_fd(), message, &[&[]; 3], &[place.fd.as_fd()]).is_err() {
                // It is dead already, as will be noticed.
                break;
            }
        }
        let _ = wire::send(socket.as_fd(), begin, &[&[]; 3], &[]);
        Ok(Worker { child, end, socket, ready: None })
    }

    /// Serves a worker until it has ended and everything it said is done.
    fn attend(&mut self, worker: &mut Worker, tell: &mut impl FnMut(Event)) -> Result<(), KeeperError> {
        let mut silent = false;
        loop {
            let watched = if silent { PollFlags::empty() } else { PollFlags::IN };
            let mut fds = [
                PollFd::new(&worker.end, PollFlags::IN),
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::new(&worker.socket, watched),
            ];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(failed("wait")(errno)),
            }
            let [ended, signalled, said] = fds.map(|fd| !fd.revents().is_empty());
            if signalled {
                self.take_signal();
                self.stopping = true;
                let _ = wire::send(worker.socket.as_fd(), Message::plain(What::Stop), &[&[]; 3], &[]);
            }
            if said || ended {
                // All of it when it has ended: that is what its successor goes by.
                silent |= self.listen(worker, tell);
            }
            if ended {
                return Ok(());
            }
        }
    }

    fn take_signal(&self) {
        let mut info = [0; 128];
        // What it says does not matter, and it is readable.
        let _ = rustix::io::read(&self.signals, &mut info);
    }

    /// Does what the worker has said so far. Whether it will say no more.
    fn listen(&mut self, worker: &mut Worker, tell: &mut impl FnMut(Event)) -> bool {
        let mut buffer = std::mem::take(&mut self.buffer);
        let over = loop {
            match wire::receive(worker.socket.as_fd(), &mut buffer, RecvFlags::DONTWAIT) {
                Ok(Some(received)) => {
                    let Some(message) = received.message else { continue };
                    match message.what {
                        What::Put => self.put(message.key, received.fds),
                        What::Drop => self.drop_kinds(message),
                        What::DropOne => drop(self.held.remove(&message.key)),
                        What::Reply => self.reply(message.key, received.data, &received.fds),
                        What::Ready if worker.ready.is_none() => {
                            worker.ready = Some(Instant::now());
                            let micros = u64::try_from(self.idle_since.elapsed().as_micros()).unwrap_or(u64::MAX);
                            tell(Event::Ready { first: !self.ever_ready, micros });
                            self.ever_ready = true;
                        }
                        _ => {}
                    }
                }
                Err(Errno::AGAIN) => break false,
                Ok(None) | Err(_) => break true,
            }
        };
        self.buffer = buffer;
        over
    }

    fn put(&mut self, key: Key, mut fds: Vec<OwnedFd>) {
        let Some(fd) = fds.pop() else { return };
        let first = Key { owner: key.owner, kind: Kind(0), slot: 0 };
        let last = Key { owner: key.owner, kind: Kind(u32::MAX), slot: u32::MAX };
        // Counting is for when there are many at all.
        let full = self.held.len() >= MAX_HELD
            || self.held.len() >= MAX_HELD_BY_OWNER && self.held.range(first..=last).count() >= MAX_HELD_BY_OWNER;
        if !full || self.held.contains_key(&key) {
            self.held.insert(key, Place { fd, replies: 0 });
        }
    }

    fn drop_kinds(&mut self, message: Message) {
        let (owner, first) = (message.key.owner, message.key.kind);
        let last = Kind(u32::try_from(message.number).unwrap_or(u32::MAX));
        if first > last {
            return;
        }
        let range = Key { owner, kind: first, slot: 0 }..=Key { owner, kind: last, slot: u32::MAX };
        let keys: Vec<_> = self.held.range(range).map(|(key, _)| *key).collect();
        for key in keys {
            self.held.remove(&key);
        }
    }

    /// Sends bytes to a client, all or nothing. One that does not take them, though it asked, is cut off: nothing waits here.
    fn reply(&mut self, connection: Key, bytes: &[u8], fds: &[OwnedFd]) {
        let Some(place) = self.held.get_mut(&connection) else { return };
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = wire::send_parts(place.fd.as_fd(), &[IoSlice::new(bytes)], &fds, flags);
        if sent != Ok(bytes.len()) {
            // It may be gone already.
            let _ = rustix::net::shutdown(&place.fd, Shutdown::Both);
        }
        place.replies += 1;
    }
}

/// Whether a process that ended so ended by a fault of its own. Without a signal it has ended itself, though nobody asked.
pub(crate) fn is_fault(signal: Option<i32>) -> bool {
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGABRT, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];
    signal.is_none_or(|signal| faults.contains(&signal))
}

fn monotonic_micros() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1000
}

/// SIGTERM and SIGINT become readable instead of deadly.
fn watch_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset before anything reads it; the calls read and write only it and the
    // thread's own mask; the descriptor is checked, new and ours.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}
