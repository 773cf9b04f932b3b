//! The keeper's end: one thread, one worker at a time.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    io::{self, IoSlice},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::{ffi::OsStrExt, process::ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags},
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, socketpair, sockopt},
    process::{PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit},
};
use thiserror::Error;

use crate::{
    Key, Kind, MAX_HELD, MAX_HELD_BY_OWNER, MAX_REPLY,
    cells::Cell,
    link::{BEGIN_AGAIN, ON_TRIAL},
    score,
    upgrade::{Next, Trial},
    wire::{self, Message, What},
};

/// A worker that served this long has not failed to start.
pub(crate) const SETTLED: Duration = Duration::from_secs(1);
/// Failures in a row after which restarts are put off, the first wait, and the longest.
const PATIENCE: u32 = 3;
pub(crate) const FIRST_WAIT: Duration = Duration::from_millis(50);
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How long a worker may leave what it is handed lying.
const HAND_LIMIT: Duration = Duration::from_secs(4);

/// Why the keeper cannot go on: a system call failed.
#[derive(Debug, Error)]
#[error("the keeper cannot {action}: {source}")]
pub struct KeeperError {
    /// What was tried.
    pub action: &'static str,
    /// What the system said.
    #[source]
    pub source: io::Error,
}

pub(crate) fn failed<E: Into<io::Error>>(action: &'static str) -> impl Fn(E) -> KeeperError {
    move |source| KeeperError { action, source: source.into() }
}

/// How it came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was told to stop, and its worker did.
    Stopped,
    /// The first worker never served anyone, or did not stop in order: what it says is the reason. Its exit code, if it had one.
    Failed(Option<i32>),
}

struct Place {
    fd: OwnedFd,
    replies: u64,
}

/// A worker.
pub(crate) struct Worker {
    pub(crate) child: Child,
    /// What it runs, to be started again even if another version has been installed in its place.
    pub(crate) binary: Rc<OwnedFd>,
    /// Readable when it has ended.
    pub(crate) end: OwnedFd,
    pub(crate) socket: OwnedFd,
    /// It has said all that it will.
    pub(crate) silent: bool,
    pub(crate) ready: Option<Instant>,
    /// What it said of the layouts that it understands: for other workers to read.
    pub(crate) layouts: Box<[u8]>,
}

/// Makes the command that starts a cell of this name from the binary at a path.
type CellCommand<'a> = Box<dyn Fn(&Path, &OsStr) -> Command + 'a>;

/// See the crate's page.
pub struct Keeper<'a> {
    /// Makes the command that starts a worker from the binary at a path.
    pub(crate) command: Box<dyn Fn(&Path) -> Command + 'a>,
    /// A cell is a keeper with a worker of its own.
    pub(crate) cell: CellCommand<'a>,
    /// The cells that are to run, and those that have not ended yet.
    pub(crate) cells: BTreeMap<OsString, Cell>,
    /// Folders whose programs may take over: a worker, whatever has become of it, must not be able to write there.
    pub(crate) places: Vec<PathBuf>,
    /// Told when guests are served for the first time.
    started: Option<Box<dyn FnOnce() + 'a>>,
    held: BTreeMap<Key, Place>,
    /// What workers are started from.
    pub(crate) binary: Rc<OwnedFd>,
    /// Beside the worker: the one that is to take its place.
    pub(crate) next: Option<Next>,
    /// The worker runs a new binary that has to prove itself.
    pub(crate) trial: Option<Trial>,
    /// How the last upgrade ended.
    pub(crate) upgraded: Option<Message>,
    signals: OwnedFd,
    /// What the kernel's memory killer is told of workers.
    pub(crate) score: Option<i32>,
    buffer: Box<[u8]>,
    pub(crate) stopping: bool,
    /// Workers that did not settle, in a row.
    failures: u32,
    /// Since when nobody is served.
    pub(crate) idle_since: Instant,
}

impl<'a> Keeper<'a> {
    /// Takes over SIGTERM and SIGINT of this process, which may have no other threads yet. `command` makes what starts a worker from
    /// the binary at a path; its standard input becomes the link. `started` is called when guests are served for the first time.
    /// `places` are folders, by their real paths, whose programs may take over, beside that of this program. `cell` makes what starts a
    /// keeper with a worker of its own, by its name.
    pub fn new(
        command: impl Fn(&Path) -> Command + 'a,
        cell: impl Fn(&Path, &OsStr) -> Command + 'a,
        started: impl FnOnce() + 'a,
        mut places: Vec<PathBuf>,
    ) -> Result<Self, KeeperError> {
        let limit = getrlimit(Resource::Nofile);
        // Fewer descriptors are no reason not to start.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
        let binary = open_binary(Path::new("/proc/self/exe")).map_err(failed("open its own binary"))?;
        places.extend(place_of(&binary).map_err(failed("find its own binary"))?);
        Ok(Self {
            command: Box::new(command),
            cell: Box::new(cell),
            cells: BTreeMap::new(),
            places,
            started: Some(Box::new(started)),
            held: BTreeMap::new(),
            binary: Rc::new(binary),
            next: None,
            trial: None,
            upgraded: None,
            signals: watch_signals().map_err(failed("watch signals"))?,
            score: score::protect_own(),
            buffer: vec![0; wire::SIZE + MAX_REPLY].into_boxed_slice(),
            stopping: false,
            failures: 0,
            idle_since: Instant::now(),
        })
    }

    /// Keeps a worker running until told to stop.
    pub fn run(mut self) -> Result<Outcome, KeeperError> {
        let outcome = self.keep_worker();
        self.end_cells();
        outcome
    }

    fn keep_worker(&mut self) -> Result<Outcome, KeeperError> {
        let mut begin = Message::plain(What::BEGIN);
        let mut current = self.start(&self.binary)?;
        loop {
            self.hand_over(&mut current, begin);
            self.attend(&mut current)?;
            let status = current.child.wait().map_err(failed("wait for the worker"))?;
            if self.stopping {
                self.give_up_next();
                return Ok(if status.success() { Outcome::Stopped } else { Outcome::Failed(status.code()) });
            }
            if self.started.is_some() {
                return Ok(Outcome::Failed(status.code()));
            }
            self.note_end(&current, status, &mut begin);
            current = match self.successor(&current, status, &mut begin) {
                Some(next) => next,
                None if self.wait_before_restart()? => return Ok(Outcome::Failed(status.code())),
                None => self.start(&self.binary)?,
            };
        }
    }

    /// What the next worker is to know of this one's end.
    fn note_end(&mut self, ended: &Worker, status: ExitStatus, begin: &mut Message) {
        let served = ended.ready.map_or(Duration::ZERO, |ready| ready.elapsed());
        if ended.ready.is_some() {
            self.idle_since = Instant::now();
            begin.set_died_micros(monotonic_micros());
        }
        begin.key.slot = ended.child.id();
        begin.number = BEGIN_AGAIN | u64::from(status.signal().unwrap_or(0).unsigned_abs());
        begin.more = u64::try_from(served.as_millis()).unwrap_or(u64::MAX);
        // One that served and was killed did not fail.
        let failed = ended.ready.is_none() || is_fault(status.signal()) && served < SETTLED;
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
    }

    /// Puts a restart off when the last ones failed. Whether we are told to stop meanwhile.
    fn wait_before_restart(&mut self) -> Result<bool, KeeperError> {
        let Some(step) = self.failures.checked_sub(PATIENCE) else { return Ok(false) };
        let wait = FIRST_WAIT.saturating_mul(1 << step.min(16)).min(LONGEST_WAIT);
        let mut fds = [PollFd::new(&self.signals, PollFlags::IN)];
        match poll(&mut fds, Some(&until(Instant::now() + wait))) {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(failed("wait")(errno)),
        }
    }

    /// Starts a worker, which waits for its turn.
    pub(crate) fn start(&self, binary: &Rc<OwnedFd>) -> Result<Worker, KeeperError> {
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(failed("make a socket"))?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(HAND_LIMIT)).map_err(failed("make a socket"))?;
        let mut command = (self.command)(Path::new(&format!("/proc/self/fd/{}", binary.as_raw_fd())));
        let child = command.stdin(Stdio::from(theirs)).spawn().map_err(failed("start a worker"))?;
        // Its copy of the other end goes with the command: the worker's death must be the end of the socket.
        drop(command);
        self.score.into_iter().for_each(|score| score::expose(child.id(), score));
        let pid = rustix::process::Pid::from_child(&child);
        let end = pidfd_open(pid, PidfdFlags::empty()).map_err(failed("watch the worker"))?;
        Ok(Worker { child, binary: Rc::clone(binary), end, socket, silent: false, ready: None, layouts: Box::default() })
    }

    /// Gives a worker what is held, and its turn.
    fn hand_over(&mut self, worker: &mut Worker, mut begin: Message) {
        let held = self.held.iter().try_for_each(|(key, place)| {
            let message = Message { number: place.replies, ..Message::new(What::HELD, *key) };
            wire::send(worker.socket.as_fd(), message, &[&[]; 3], &[place.fd.as_fd()])
        });
        let before = self.trial.as_ref().map_or(&[][..], |trial| &trial.layouts);
        begin.number |= if self.trial.is_some() { ON_TRIAL } else { 0 };
        let begun = held.and_then(|()| wire::send(worker.socket.as_fd(), begin, &[before, &[], &[]], &[]));
        if begun.is_err_and(|errno| !matches!(errno, Errno::PIPE | Errno::CONNRESET)) {
            // It takes nothing. One that has let go of its end is about to say why, and to end.
            let _ = worker.child.kill();
        }
        if let Some(upgraded) = self.upgraded {
            let _ = wire::tell(worker.socket.as_fd(), upgraded, &[]);
        }
    }

    /// Serves a worker until it has ended and everything it said is done.
    fn attend(&mut self, worker: &mut Worker) -> Result<(), KeeperError> {
        loop {
            let watch = |silent: bool| if silent { PollFlags::empty() } else { PollFlags::IN };
            let next = self.next.as_ref().map(|next| &next.worker);
            let mut fds = vec![
                PollFd::new(&worker.end, PollFlags::IN),
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::new(&worker.socket, watch(worker.silent)),
                PollFd::new(next.map_or(&self.signals, |next| &next.end), watch(next.is_none())),
                PollFd::new(next.map_or(&self.signals, |next| &next.socket), watch(next.is_none_or(|next| next.silent))),
            ];
            fds.extend(self.cells.values().filter_map(Cell::end).map(|end| PollFd::new(end, PollFlags::IN)));
            match poll(&mut fds, self.deadline(worker).map(until).as_ref()) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(failed("wait")(errno)),
            }
            let mut told = fds.iter().map(|fd| !fd.revents().is_empty());
            let [ended, signalled, said, next_ended, next_said] = [(); 5].map(|()| told.next().unwrap_or(false));
            drop(told);
            drop(fds);
            if signalled {
                self.take_signal();
                self.stopping = true;
                self.give_up_next();
                self.stop_cells();
                let _ = wire::send(worker.socket.as_fd(), Message::plain(What::STOP), &[&[]; 3], &[]);
            }
            if next_said || next_ended {
                self.listen_to_next(worker, next_ended);
            }
            if said || ended {
                // All of it when it has ended: that is what its successor goes by.
                worker.silent |= self.listen(worker);
            }
            if ended {
                return Ok(());
            }
            self.keep_time(worker);
            self.keep_cells();
        }
    }

    fn take_signal(&self) {
        let mut info = [0; 128];
        // What it says does not matter, and it is readable.
        let _ = rustix::io::read(&self.signals, &mut info);
    }

    /// Does what the worker has said so far. Whether it will say no more.
    fn listen(&mut self, worker: &mut Worker) -> bool {
        let mut buffer = std::mem::take(&mut self.buffer);
        let over = loop {
            match wire::receive(worker.socket.as_fd(), &mut buffer, RecvFlags::DONTWAIT) {
                Ok(Some(received)) => {
                    let Some(message) = received.message else { continue };
                    match message.what {
                        What::PUT => self.put(message.key, received.fds),
                        What::DROP => self.drop_kinds(message),
                        What::DROP_ONE => drop(self.held.remove(&message.key)),
                        What::REPLY => self.reply(message.key, received.data, &received.fds),
                        What::READY if worker.ready.is_none() => {
                            worker.ready = Some(Instant::now());
                            if let Some(started) = self.started.take() {
                                started();
                            }
                            self.serves(worker);
                        }
                        What::WARM => worker.layouts = received.data.into(),
                        What::UPGRADE => self.upgrade(worker, message, received.data),
                        What::REFUSE => self.refused(worker),
                        What::SETTLE => self.settle(worker),
                        What::START_CELL => self.start_cell(OsStr::from_bytes(received.data)),
                        What::STOP_CELL => self.stop_cell(OsStr::from_bytes(received.data)),
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

/// A binary to be run, whatever happens to its path afterwards.
pub(crate) fn open_binary(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// The folder that a binary really lies in.
pub(crate) fn place_of(binary: &OwnedFd) -> io::Result<Option<PathBuf>> {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", binary.as_raw_fd()))?;
    Ok(path.parent().map(Path::to_owned))
}

/// Until then.
fn until(deadline: Instant) -> Timespec {
    // One millisecond more than the clock says: a deadline has passed when one wakes for it.
    let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() }
}

/// Whether a process that ended so ended by a fault of its own. Without a signal it has ended itself, though nobody asked.
pub(crate) fn is_fault(signal: Option<i32>) -> bool {
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGABRT, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];
    signal.is_none_or(|signal| faults.contains(&signal))
}

pub(crate) fn monotonic_micros() -> u64 {
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
