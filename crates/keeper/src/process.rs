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
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FileType, Mode, OFlags},
    io::{Errno, retry_on_intr},
    net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, socketpair, sockopt},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use thiserror::Error;

use crate::{
    Key, Kind, MAX_HELD, MAX_HELD_BY_OWNER, MAX_REPLY, SPARE, UpgradeResult,
    cells::Cell,
    link::{BEGIN_AGAIN, Held, ON_TRIAL},
    score,
    upgrade::{Next, Trial},
    wire::{self, Message, Received, What},
};

/// What served this long has not failed to start.
pub(crate) const SETTLED: Duration = Duration::from_secs(1);
/// Failures in a row after which restarts are put off, the first wait, and the longest.
const PATIENCE: u32 = 3;
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How much of what a worker says is done before signals and deadlines are looked at again: one that never ends keeps nobody from those.
const AT_ONCE: usize = 256;
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

fn failed<E: Into<io::Error>>(action: &'static str) -> impl Fn(E) -> KeeperError {
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

/// A worker.
pub(crate) struct Worker {
    pub(crate) child: Child,
    socket: OwnedFd,
    /// It has said all that it will.
    silent: bool,
    pub(crate) ready: Option<Instant>,
    /// What it said of the layouts that it understands: for other workers to read.
    pub(crate) layouts: Box<[u8]>,
}

impl Worker {
    /// Tells it something. One that is far behind does not hear it; what it does, or does not, tells.
    pub(crate) fn tell(&self, message: Message, data: &[u8]) {
        let _ = wire::send(self.socket.as_fd(), message, &[data, &[], &[]], &[], SendFlags::DONTWAIT);
    }

    /// It may take its time to hear that.
    fn tell_to_stop(&self) {
        let _ = wire::send(self.socket.as_fd(), Message::plain(What::STOP), &[&[]; 3], &[], SendFlags::empty());
    }

    /// What it says, message by message.
    pub(crate) fn hear<'a>(&mut self, buffer: &'a mut [u8]) -> Option<Received<'a>> {
        let received = wire::receive(self.socket.as_fd(), buffer, RecvFlags::DONTWAIT);
        self.silent = !matches!(received, Ok(Some(_)) | Err(Errno::AGAIN));
        received.ok().flatten()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Of one that has ended already this is nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes the command that starts a worker, or the cell of this name, from the binary at a path.
type MakeCommand<'a> = Box<dyn Fn(&Path, Option<&OsStr>) -> Command + 'a>;

/// See the crate's page.
pub struct Keeper<'a> {
    command: MakeCommand<'a>,
    /// The cells that are to run, and those that have not ended yet.
    pub(crate) cells: BTreeMap<OsString, Cell>,
    /// Otherwise a worker that asks for some has been taken over.
    pub(crate) may_have_cells: bool,
    /// Folders whose programs may take over: a worker, whatever has become of it, must not be able to write there.
    pub(crate) places: Vec<PathBuf>,
    /// Told when guests are served for the first time.
    started: Option<Box<dyn FnOnce() + 'a>>,
    held: BTreeMap<Key, Held>,
    /// What workers are started from, even if another version has been installed in its place.
    pub(crate) binary: OwnedFd,
    /// Beside the worker: the one that is to take its place.
    pub(crate) next: Option<Next>,
    /// The worker runs a new binary that has to prove itself.
    pub(crate) trial: Option<Trial>,
    /// How the last upgrade ended.
    pub(crate) upgraded: Option<Message>,
    signals: OwnedFd,
    /// What the kernel's memory killer is told of workers.
    score: Option<i32>,
    pub(crate) stopping: bool,
    /// Workers that did not settle, in a row.
    failures: u32,
    /// What the next worker is told of the last one's end.
    pub(crate) begin: Message,
    /// Since when nobody is served, in microseconds of the system's clock.
    pub(crate) idle_since: u64,
}

impl<'a> Keeper<'a> {
    /// Takes over SIGTERM, SIGINT and SIGCHLD of this process, which may have no other threads yet. `command` makes what starts a worker
    /// from the binary at a path, whose standard input becomes the link, or, with a name, a keeper with a worker of its own. `started` is
    /// called when guests are served for the first time. `places` are folders, by their real paths, whose programs may take over, beside
    /// that of this program. Only who `may_have_cells` starts keepers with a name, whatever the worker says.
    pub fn new(
        command: impl Fn(&Path, Option<&OsStr>) -> Command + 'a,
        started: impl FnOnce() + 'a,
        mut places: Vec<PathBuf>,
        may_have_cells: bool,
    ) -> Result<Self, KeeperError> {
        let limit = getrlimit(Resource::Nofile);
        // Fewer descriptors are no reason not to start.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
        let own = open_binary(Path::new("/proc/self/exe"), OFlags::empty());
        let (binary, place) = own.map_err(failed("open its own binary"))?;
        places.push(place);
        Ok(Self {
            command: Box::new(command),
            cells: BTreeMap::new(),
            may_have_cells,
            places,
            started: Some(Box::new(started)),
            held: BTreeMap::new(),
            binary,
            next: None,
            trial: None,
            upgraded: None,
            signals: watch_signals().map_err(failed("watch signals"))?,
            score: score::protect_own(),
            stopping: false,
            failures: 0,
            begin: Message::plain(What::BEGIN),
            idle_since: monotonic_micros(),
        })
    }

    /// Keeps a worker running until told to stop.
    pub fn run(mut self) -> Result<Outcome, KeeperError> {
        // The largest message has room from the start.
        let mut buffer = vec![0; wire::SIZE + MAX_REPLY];
        let mut current = self.start(&self.binary).map_err(failed("start a worker"))?;
        loop {
            self.hand_over(&mut current);
            let status = self.attend(&mut current, &mut buffer)?;
            // One that has let go has put nothing in order: whoever was to follow it does, and is told to stop then.
            let has_let_go = self.next.as_ref().is_some_and(|next| next.asked.is_some());
            if self.stopping && !has_let_go || self.started.is_some() {
                let failed = Outcome::Failed(status.code());
                return Ok(if self.stopping && status.success() { Outcome::Stopped } else { failed });
            }
            self.note_end(&current, status);
            let mut next = self.successor(&current, status);
            while next.is_none() {
                // It is put off when the last ones failed, as they do while memory is short: what is held does not go for that.
                let due = Instant::now() + pause(self.failures);
                while Instant::now() < due {
                    if self.wait(None, Some(due))? {
                        return Ok(Outcome::Failed(status.code()));
                    }
                    self.keep_cells();
                }
                next = self.start(&self.binary).inspect_err(|_| self.failures += 1).ok();
            }
            current = next.unwrap_or(current);
        }
    }

    /// What the next worker is to know of this one's end.
    fn note_end(&mut self, ended: &Worker, status: ExitStatus) {
        let served = ended.ready.map_or(Duration::ZERO, |ready| ready.elapsed());
        if ended.ready.is_some() {
            self.idle_since = monotonic_micros();
        }
        self.begin.key.slot = ended.child.id();
        self.begin.number = BEGIN_AGAIN | u64::from(status.signal().unwrap_or(0).unsigned_abs());
        self.begin.more = u64::try_from(served.as_millis()).unwrap_or(u64::MAX);
        // One that served and was killed did not fail.
        let failed = ended.ready.is_none() || is_fault(status.signal()) && served < SETTLED;
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
    }

    /// Starts a worker, which waits for its turn.
    pub(crate) fn start(&self, binary: &OwnedFd) -> io::Result<Worker> {
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(HAND_LIMIT))?;
        let child = self.spawn(binary, None, Stdio::from(theirs))?;
        Ok(Worker { child, socket, silent: false, ready: None, layouts: Box::default() })
    }

    /// Starts a worker or a cell.
    pub(crate) fn spawn(&self, binary: &OwnedFd, cell: Option<&OsStr>, input: Stdio) -> io::Result<Child> {
        // The command goes at once, and its copy of the input with it: the worker's death must be the end of the socket.
        let child = (self.command)(&path_of(binary), cell).stdin(input).spawn()?;
        // What this keeper was given and not what it has: a cell's does with that what this one did.
        self.score.into_iter().for_each(|score| score::expose(child.id(), score));
        Ok(child)
    }

    /// Gives a worker what is held, and its turn.
    fn hand_over(&mut self, worker: &mut Worker) {
        let socket = worker.socket.as_fd();
        let held = self.held.iter().try_for_each(|(key, held)| {
            let message = Message { number: held.replies, ..Message::new(What::HELD, *key) };
            wire::send(socket, message, &[&[]; 3], &[held.fd.as_fd()], SendFlags::empty())
        });
        let (on_trial, before) = self.trial.as_ref().map_or((0, &[][..]), |trial| (ON_TRIAL, &trial.layouts[..]));
        self.begin.key.owner = u128::from(self.idle_since).to_le_bytes();
        let begin = Message { number: self.begin.number | on_trial, ..self.begin };
        let begun = held.and_then(|()| wire::send(socket, begin, &[before, &[], &[]], &[], SendFlags::empty()));
        if begun.is_err_and(|errno| !matches!(errno, Errno::PIPE | Errno::CONNRESET)) {
            // It takes nothing. One that has let go of its end is about to say why, and to end.
            let _ = worker.child.kill();
        }
        self.upgraded.into_iter().for_each(|upgraded| worker.tell(upgraded, &[]));
    }

    /// Serves a worker until it has ended and everything it said is done.
    fn attend(&mut self, worker: &mut Worker, buffer: &mut [u8]) -> Result<ExitStatus, KeeperError> {
        if self.stopping {
            worker.tell_to_stop();
        }
        loop {
            self.listen_to_next(worker, buffer);
            // All that it said when it has ended: that is what its successor goes by.
            let ended = worker.child.try_wait().map_err(failed("wait for the worker"))?;
            self.listen(worker, buffer, if ended.is_some() { usize::MAX } else { AT_ONCE });
            if let Some(status) = ended {
                return Ok(status);
            }
            self.keep_time(worker);
            self.keep_cells();
            if self.wait(Some(worker), None)? {
                self.stopping = true;
                self.next.take_if(|next| next.asked.is_none());
                self.cells.values_mut().for_each(Cell::stop);
                worker.tell_to_stop();
            }
        }
    }

    /// Until somebody says something, a child ends, or it is time. Whether we are told to stop.
    fn wait(&self, worker: Option<&Worker>, due: Option<Instant>) -> Result<bool, KeeperError> {
        // What the next one says once it is warm is heard at its turn.
        let next = self.next.as_ref().filter(|next| next.asked.is_none()).map(|next| &next.worker);
        let talking = worker.into_iter().chain(next).filter(|worker| !worker.silent).map(|worker| &worker.socket);
        let mut fds: Vec<_> = talking.chain([&self.signals]).map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let left = self.deadlines().chain(due).min().map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // One millisecond more than the clock says: a deadline has passed when one wakes for it.
        let left = left.and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
        retry_on_intr(|| poll(&mut fds, left.as_ref())).map_err(failed("wait"))?;
        let (mut told, mut info) = (false, [0; 128]);
        while rustix::io::read(&self.signals, &mut info).is_ok() {
            // Children that have ended are looked for anyway.
            told |= !info.starts_with(&libc::SIGCHLD.to_ne_bytes());
        }
        Ok(told)
    }

    /// Does what the worker has said so far, `most` messages of it.
    fn listen(&mut self, worker: &mut Worker, buffer: &mut [u8], most: usize) {
        for _ in 0..most {
            let Some(received) = worker.hear(buffer) else { return };
            let Some(message) = received.message else { continue };
            match message.what {
                What::PUT => received.fds.into_iter().for_each(|fd| self.put(worker, message.key, fd)),
                What::DROP => self.drop_kinds(message),
                What::DROP_ONE => drop(self.held.remove(&message.key)),
                What::REPLY => self.reply(message.key, received.data, &received.fds),
                What::READY if worker.ready.is_none() => {
                    worker.ready = Some(Instant::now());
                    self.started.take().into_iter().for_each(|started| started());
                    self.serves(worker);
                }
                What::WARM => worker.layouts = received.data.into(),
                What::UPGRADE => {
                    if let Err(how) = self.upgrade(message, received.data) {
                        self.tell_result(worker, message.key.owner, how);
                    }
                }
                What::REFUSE => self.call_off(worker, UpgradeResult::Refused),
                What::SETTLE => self.settle(worker),
                What::START_CELL => self.start_cell(OsStr::from_bytes(received.data)),
                What::STOP_CELL => self.cells.get_mut(OsStr::from_bytes(received.data)).into_iter().for_each(Cell::stop),
                _ => {}
            }
        }
    }

    /// What an owner has of these kinds.
    fn keys(&self, owner: [u8; 16], first: Kind, last: Kind) -> impl Iterator<Item = Key> {
        let from = self.held.range(Key::of(owner, first)..).map(|(key, _)| *key);
        from.take_while(move |key| key.owner == owner && key.kind <= last)
    }

    fn put(&mut self, worker: &Worker, key: Key, fd: OwnedFd) {
        let own = self.keys(key.owner, Kind(0), Kind(u32::MAX)).count();
        // What starting a worker takes is left.
        let most = getrlimit(Resource::Nofile).current.map_or(MAX_HELD, |limit| MAX_HELD.min(limit as usize));
        let room = most.saturating_sub(SPARE);
        // What clients hand in leaves a quarter to devices and volumes: a client that comes again loses less than a volume in memory.
        let is_clients = (Kind::CONNECTION..=Kind::LAST_OF_CLIENT).contains(&key.kind);
        let room = if is_clients { room / 4 * 3 } else { room };
        if self.held.len() < room && own < MAX_HELD_BY_OWNER || self.held.contains_key(&key) {
            self.held.insert(key, Held { fd, replies: 0 });
        } else if key.kind == Kind::CONNECTION {
            // Its replies would go nowhere: a client that is cut off knows, one that waits does not.
            let _ = rustix::net::shutdown(&fd, Shutdown::Both);
        } else {
            worker.tell(Message::new(What::NOT_HELD, key), &[]);
        }
    }

    fn drop_kinds(&mut self, message: Message) {
        let last = Kind(u32::try_from(message.number).unwrap_or(u32::MAX));
        let keys: Vec<_> = self.keys(message.key.owner, message.key.kind, last).collect();
        keys.iter().map(|key| self.held.remove(key)).for_each(drop);
    }

    /// Sends bytes to a client, all or nothing. One that does not take them, though it asked, is cut off: nothing waits here.
    fn reply(&mut self, connection: Key, bytes: &[u8], fds: &[OwnedFd]) {
        let Some(place) = self.held.get_mut(&connection) else { return };
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let sent = wire::send_parts(place.fd.as_fd(), &[IoSlice::new(bytes)], &fds, SendFlags::DONTWAIT);
        if sent != Ok(bytes.len()) {
            // It may be gone already.
            let _ = rustix::net::shutdown(&place.fd, Shutdown::Both);
        }
        place.replies += 1;
    }
}

/// A binary to be run, whatever happens to its path afterwards, and the folder that it really lies in.
pub(crate) fn open_binary(path: &Path, flags: OFlags) -> io::Result<(OwnedFd, PathBuf)> {
    let binary = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty())?;
    let mut place = std::fs::read_link(path_of(&binary))?;
    place.pop();
    Ok((binary, place))
}

/// Whether it is a symbolic link itself.
pub(crate) fn is_link(binary: &OwnedFd) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(binary)?.st_mode) == FileType::Symlink)
}

/// Where this process and its children find a file that is open.
fn path_of(binary: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", binary.as_raw_fd()).into()
}

/// How long a restart is put off after so many failures in a row.
pub(crate) fn pause(failures: u32) -> Duration {
    let wait = |step: u32| FIRST_WAIT.saturating_mul(1 << step.min(16)).min(LONGEST_WAIT);
    failures.checked_sub(PATIENCE).map_or(Duration::ZERO, wait)
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

/// SIGTERM, SIGINT and SIGCHLD become readable.
fn watch_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset before anything reads it; the calls read and write only it and the
    // thread's own mask; the descriptor is checked, new and ours.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGCHLD] {
            libc::sigaddset(&raw mut set, signal);
        }
        // It fails only where it is asked for what it does not know.
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}
