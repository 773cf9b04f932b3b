//! The broker: a small process of the worker's that makes the calls which open, name, make and remove something. It is the worker's user,
//! has no capabilities, reaches the named paths only, and has a list of calls of its own.
//!
//! ```text
//!   worker, one thread:  Broker::start ─► process
//!                        Broker::wait_for_turn ─► it takes a lock file: what the last worker's broker was asked for is done
//!                        Broker::open ─► grants, lanes ─► it confines itself, answers, and hears the lanes
//!   worker, all threads: lanes ◄─► one thread for each
//! ```
//!
//! It believes nothing that comes over a lane: the table of [`forms`] says what a call's arguments are, lengths are checked against what came, numbers of
//! descriptors are those that came along, and pointers are its own. Who has taken a worker over can have it make any of these calls, and nothing else.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio, exit},
    sync::Arc,
    thread,
};

use rustix::{
    fs::{AtFlags, CWD, FileType, FlockOperation, Gid, Mode, OFlags, fstat, readlink},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
};

use crate::{
    filter,
    forms::{self, ARGS, Arg, Form, Gives, MOST, TEXT},
    lanes::{self, Head, LANES, MOST_FDS, NOTHING, OWN, OWN_FDS, as_fd},
    paths::{self, Grant},
    rights,
};

#[cfg(test)]
mod tests;

/// Most bytes of a request: its head and what two arguments lead to.
const REQUEST: usize = size_of::<Head>() + 2 * MOST;
/// What each thread needs: little beside what a request is.
const STACK: usize = 64 << 10;

const NOT_ALLOWED: Errno = Errno::from_raw_os_error(forms::REFUSED);

/// What the worker says before there are lanes: a letter, and what it is about.
const LOCK: u8 = b'l';
const USE: u8 = b'u';
const READ: u8 = b'r';
const SOCKETS: u8 = b's';
const GROUP: u8 = b'g';
const OPEN: u8 = b'o';
const OPEN_STRICT: u8 = b'O';

/// A broker that has not begun. It ends with the worker.
#[derive(Debug)]
pub(crate) struct Broker(OwnedFd);

impl Broker {
    /// Starts it: a program that calls [`broker`] with its standard input.
    pub(crate) fn start(mut command: Command) -> io::Result<Self> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // Nobody waits for it: it ends after us.
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn()?;
        Ok(Self(ours))
    }

    /// Waits until nothing is done any more of what a broker was asked for that has taken this lock before.
    pub(crate) fn wait_for_turn(&self, lock: &Path) -> io::Result<()> {
        self.say(LOCK, lock, &[])?;
        self.hear()
    }

    /// Has it confine itself, and puts it in the kernel's place for what this process has no call for: `None` for all paths, as they are.
    /// Sockets may be given to `group`.
    pub(crate) fn open(self, grants: Option<&[Grant]>, group: Option<u32>) -> io::Result<()> {
        if let Some(group) = group {
            self.say(GROUP, Path::new(&group.to_string()), &[])?;
        }
        for grant in grants.unwrap_or_default() {
            let letter = match grant {
                Grant::Use(_) => USE,
                Grant::Read(_) => READ,
                Grant::Sockets(_) => SOCKETS,
            };
            self.say(letter, grant.path(), &[])?;
        }
        let pair = |_| socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..LANES).map(pair).collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        let letter = if grants.is_some() { OPEN_STRICT } else { OPEN };
        self.say(letter, Path::new(""), &theirs)?;
        drop(theirs);
        self.hear()?;
        lanes::open(ours.try_into().expect("as many as there are lanes"));
        // Its other end would tell it to end.
        std::mem::forget(self.0);
        Ok(())
    }

    fn say(&self, letter: u8, path: &Path, fds: &[OwnedFd]) -> io::Result<()> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LANES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let fits = control.push(SendAncillaryMessage::ScmRights(&fds));
            assert!(fits, "the control buffer holds all lanes");
        }
        let letter = [letter];
        let parts = [IoSlice::new(&letter), IoSlice::new(path.as_os_str().as_bytes())];
        sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Its answer: that it is done, or an error in words.
    fn hear(&self) -> io::Result<()> {
        let mut answer = [0; TEXT];
        let len = rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut answer))?;
        match &answer[..len] {
            [0] => Ok(()),
            [_, words @ ..] => Err(io::Error::other(String::from_utf8_lossy(words).into_owned())),
            [] => Err(io::Error::other("the broker has ended; the log says why")),
        }
    }
}

/// A message with its descriptors; `None` at the end.
fn receive<const FDS: usize>(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    // As large as is needed for the most of all users.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LANES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if fds.len() > FDS {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((received.bytes > 0).then_some((received.bytes, fds)))
}

/// Makes calls for the worker at the other end of `socket` until it is gone.
///
/// # Errors
/// What the system refused before there were lanes. Then the worker has heard of it, if it still listens.
pub fn broker(socket: BorrowedFd<'_>) -> io::Result<()> {
    heed_the_worker_alone()?;
    rights::end_with_parent()?;
    rights::keep_to_itself()?;
    let (mut grants, mut group, mut buffer, mut _lock) = (Vec::new(), None, [0; TEXT], None);
    let answer = |result: io::Result<()>| -> io::Result<()> {
        let (kind, text) = result.map_or_else(|error| (1, error.to_string()), |()| (0, String::new()));
        rustix::io::write(socket, &[&[kind], text.as_bytes()].concat())?;
        Ok(())
    };
    while let Some((len, fds)) = receive::<LANES>(socket, &mut buffer)? {
        let (letter, path) = (buffer[0], Path::new(std::ffi::OsStr::from_bytes(&buffer[1..len])).to_owned());
        match letter {
            LOCK => answer(lock(&path).map(|held| _lock = Some(held)))?,
            USE => grants.push(Grant::Use(path)),
            READ => grants.push(Grant::Read(path)),
            SOCKETS => grants.push(Grant::Sockets(path)),
            GROUP => group = path.to_str().and_then(|number| number.parse().ok()),
            OPEN | OPEN_STRICT => {
                let grants = (letter == OPEN_STRICT).then_some(&grants[..]);
                let opened = confine(grants, group, fds);
                let failed = opened.is_err();
                answer(opened)?;
                if failed {
                    return Ok(());
                }
                // Nothing more is taken from here: it says when the worker is gone, and whatever else it says, the worker is none any more.
                let _ = receive::<LANES>(socket, &mut buffer);
                exit(0)
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
    // It is gone before it began.
    Ok(())
}

/// Signals that a terminal or a service manager sends to all processes are the keeper's to understand: the worker may still need us.
fn heed_the_worker_alone() -> io::Result<()> {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGPIPE] {
        // SAFETY: no handler is set, the signals are ignored from now on.
        if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Takes a lock that goes when the last thread of this process has ended, and is waited for as long as that takes.
fn lock(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let lock = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
    rustix::io::retry_on_intr(|| rustix::fs::flock(&lock, FlockOperation::LockExclusive))?;
    Ok(lock)
}

/// What all lanes' threads know.
struct Shared {
    lanes: Vec<OwnedFd>,
    /// The folders, by their real paths, in which modes may be changed; `None`: any.
    folders: Option<Vec<PathBuf>>,
    /// Whom sockets there may be given to.
    group: Option<u32>,
}

/// Gives up what no call of the table needs, and starts to hear the lanes.
fn confine(grants: Option<&[Grant]>, group: Option<u32>, lanes: Vec<OwnedFd>) -> io::Result<()> {
    if lanes.len() != LANES {
        return Err(io::Error::other("not all lanes have come"));
    }
    let real = |grant: &Grant| grant.path().canonicalize().ok();
    let folders = grants.map(|grants| grants.iter().filter_map(real).collect());
    paths::restrict_this_thread(grants)?;
    filter::confine_broker().map_err(io::Error::other)?;
    let shared = Arc::new(Shared { lanes, folders, group });
    (0..LANES).try_for_each(|lane| start(&shared, lane))
}

fn start(shared: &Arc<Shared>, lane: usize) -> io::Result<()> {
    let shared = Arc::clone(shared);
    let thread = thread::Builder::new().name(format!("broker-{lane}")).stack_size(STACK);
    let serve = move || {
        let _all_or_none = EndsAll;
        serve(&shared, lane);
    };
    thread.spawn(serve).map(drop)
}

/// A thread that ends leaves a lane that nobody hears, and who uses it would wait forever. Another worker gets another broker.
struct EndsAll;

impl Drop for EndsAll {
    fn drop(&mut self) {
        exit(1);
    }
}

/// Makes the calls of one lane.
fn serve(shared: &Shared, lane: usize) {
    let socket = shared.lanes[lane].as_fd();
    let mut buffer = vec![0; REQUEST];
    loop {
        // The worker is gone, or is none any more.
        let Ok(Some((len, fds))) = receive::<MOST_FDS>(socket, &mut buffer) else { exit(0) };
        let sockets = Sockets { folders: shared.folders.as_deref(), group: shared.group };
        let reply = make(&buffer[..len], &fds, sockets).unwrap_or_else(Reply::refused);
        // Before the worker hears of it: what it closes then is closed, with its locks.
        drop(fds);
        let fds: Vec<_> = reply.fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds));
        assert!(fits, "the control buffer holds two descriptors");
        let result = reply.result.to_ne_bytes();
        let parts = [IoSlice::new(&result), IoSlice::new(&reply.bytes)];
        let sent = match sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL) {
            // Too many descriptors are on their way to processes of this user.
            Err(Errno::TOOMANYREFS) => {
                let refused = i64::from(libc::EMFILE).wrapping_neg().to_ne_bytes();
                sendmsg(socket, &[IoSlice::new(&refused)], &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)
            }
            other => other,
        };
        if sent.is_err() {
            exit(0);
        }
    }
}

/// Which sockets' rights may be changed.
#[derive(Clone, Copy)]
struct Sockets<'a> {
    /// The folders that they are in; `None`: any.
    folders: Option<&'a [PathBuf]>,
    /// The only group that they may be given to.
    group: Option<u32>,
}

/// What a call came to.
#[derive(Debug)]
struct Reply {
    result: i64,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Reply {
    fn refused(errno: Errno) -> Self {
        Self { result: -i64::from(errno.raw_os_error()), bytes: Vec::new(), fds: Vec::new() }
    }
}

/// What an argument leads to, in this process. Whole words, so that every structure of the kernel's lies right, and one more of zeroes.
#[derive(Default)]
struct Place(Vec<u64>);

impl Place {
    fn of(bytes: &[u8]) -> Self {
        let mut copy = Self::with_room(bytes.len());
        copy.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        copy
    }

    fn with_room(len: usize) -> Self {
        Self(vec![0; len.div_ceil(8) + 1])
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let len = size_of_val(&self.0[..]);
        // SAFETY: words without padding, of which any bytes are values; borrowed for as long as the slice lives.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }

    fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= size_of_val(&self.0[..]));
        // SAFETY: so many bytes are there, as in `bytes_mut`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), len) }
    }
}

/// A call's arguments in this process.
#[derive(Default)]
struct Arguments {
    values: [u64; ARGS],
    copies: [Place; ARGS],
}

impl Arguments {
    /// Takes a request apart. Nothing of it is believed.
    fn of(form: &Form, head: &Head, mut bytes: &[u8], fds: &[OwnedFd]) -> Result<Self, Errno> {
        let (mut arguments, mut fds) = (Self::default(), fds.iter());
        let mut descriptor = || Ok(fds.next().ok_or(Errno::BADF)?.as_raw_fd());
        let mut came = |len: usize| bytes.split_off(..len).ok_or(Errno::INVAL);
        for (at, arg) in form.args.iter().enumerate() {
            let (value, len) = (head.args[at], head.lens[at]);
            let is_missing = len == NOTHING;
            let len = len as usize;
            let said = |of: u8| head.args[of as usize] == len as u64;
            let copy = match *arg {
                Arg::Num => {
                    arguments.values[at] = value;
                    continue;
                }
                // A number of the worker's own means nothing here; below zero it is the working directory, or none.
                Arg::Dir if is_missing && as_fd(value) < 0 => {
                    arguments.values[at] = value;
                    continue;
                }
                Arg::Fd | Arg::Dir => {
                    arguments.values[at] = u64::from(descriptor()?.cast_unsigned());
                    continue;
                }
                _ if is_missing => continue,
                Arg::Text if head.lens[at] == OWN => Place::of(&[OWN_FDS, descriptor()?.to_string().as_bytes()].concat()),
                Arg::Text if (1..=TEXT).contains(&len) => Place::of(came(len)?),
                Arg::In(of) if len <= MOST && said(of) => Place::of(came(len)?),
                Arg::Both(room) if len == room as usize => Place::of(came(len)?),
                Arg::Out(room) if len == room as usize => Place::with_room(len),
                // The call may do less than it was asked for: as much as there is room.
                Arg::OutOf(of) if len <= MOST && len as u64 <= head.args[of as usize] => Place::with_room(len),
                Arg::OutUpTo(_) if len <= MOST => Place::with_room(len),
                _ => return Err(Errno::INVAL),
            };
            arguments.copies[at] = copy;
            arguments.values[at] = arguments.copies[at].0.as_mut_ptr() as u64;
        }
        arguments.check_rooms(form, head)?;
        Ok(arguments)
    }

    /// What comes after a length is known now: lengths of results are cut to their rooms, and numbers that say one say no more.
    fn check_rooms(&mut self, form: &Form, head: &Head) -> Result<(), Errno> {
        for (at, arg) in form.args.iter().enumerate() {
            let room = u64::from(head.lens[at]);
            match *arg {
                Arg::OutOf(of) if head.lens[at] != NOTHING => self.values[of as usize] = room,
                Arg::OutUpTo(of) if head.lens[at] != NOTHING => {
                    let said = self.copies[of as usize].0.first_mut().ok_or(Errno::FAULT)?;
                    *said = (*said & u64::from(u32::MAX)).min(room);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Makes a call of the table.
fn make(request: &[u8], fds: &[OwnedFd], sockets: Sockets<'_>) -> Result<Reply, Errno> {
    let (head, bytes) = request.split_at_checked(size_of::<Head>()).ok_or(Errno::INVAL)?;
    // SAFETY: so many bytes are there, and any are a value of this type.
    let head = unsafe { head.as_ptr().cast::<Head>().read_unaligned() };
    let form = forms::of(head.number).ok_or(Errno::NOSYS)?;
    let mut arguments = Arguments::of(form, &head, bytes, fds)?;
    if form.number == libc::SYS_openat {
        // A mode that no filter looks at, for it matters only where a file is made.
        arguments.values[3] &= u64::from(!forms::MODES.cast_unsigned());
    }
    let result = match form.number {
        libc::SYS_fchmod => fds.first().ok_or(Errno::BADF).and_then(|fd| change_mode(fd, arguments.values[1], sockets)),
        libc::SYS_fchmodat => named(&arguments).and_then(|fd| change_mode(&fd, arguments.values[2], sockets)),
        libc::SYS_fchownat => named(&arguments).and_then(|fd| change_group(&fd, &arguments.values[2..], sockets)),
        // SAFETY: numbers, descriptors of ours, and places that are as long as the table says and live through the call.
        _ => unsafe { call(form.number, arguments.values) },
    }?;
    let mut reply = Reply { result, bytes: Vec::new(), fds: Vec::new() };
    for (at, arg) in form.args.iter().enumerate() {
        if head.lens[at] != NOTHING && matches!(arg, Arg::Out(_) | Arg::OutOf(_) | Arg::OutUpTo(_) | Arg::Both(_)) {
            reply.bytes.extend_from_slice(arguments.copies[at].bytes(head.lens[at] as usize));
        }
    }
    match form.gives {
        Gives::Number => {}
        // SAFETY: the call has just made it, and nobody else knows it.
        Gives::Descriptor => reply.fds.push(unsafe { OwnedFd::from_raw_fd(result as i32) }),
        Gives::Two(at) => {
            let (both, _) = arguments.copies[at as usize].bytes(8).as_chunks::<4>();
            // SAFETY: as above.
            reply.fds.extend(both.iter().map(|fd| unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes(*fd)) }));
        }
    }
    Ok(reply)
}

/// # Safety
/// Each value is what the call wants: a number, or a place that lives as long and is as large as the call uses it.
unsafe fn call(number: libc::c_long, args: [u64; ARGS]) -> Result<i64, Errno> {
    match lanes::call(number, args) {
        failed if failed < 0 => Err(Errno::from_raw_os_error(i32::try_from(-failed).unwrap_or(libc::EIO))),
        result => Ok(result),
    }
}

/// A socket's own name in this process; `None`: it has no place among the files yet. No rule of Landlock's is about modes and owners, and a
/// worker changes no other ones.
fn own_name(fd: &OwnedFd, sockets: Sockets<'_>) -> Result<Option<Vec<u8>>, Errno> {
    if FileType::from_raw_mode(fstat(fd)?.st_mode) != FileType::Socket {
        return Err(NOT_ALLOWED);
    }
    let own_name = [OWN_FDS, fd.as_raw_fd().to_string().as_bytes()].concat();
    let place = readlink(&own_name[..], Vec::new())?;
    if !place.as_bytes().starts_with(b"/") {
        return Ok(None);
    }
    let place = Path::new(std::ffi::OsStr::from_bytes(place.as_bytes()));
    if sockets.folders.is_some_and(|folders| !folders.iter().any(|folder| place.starts_with(folder))) {
        return Err(NOT_ALLOWED);
    }
    // By the descriptor's name: what the path leads to may have changed since.
    Ok(Some(own_name))
}

/// Says who may connect to a socket.
fn change_mode(fd: &OwnedFd, mode: u64, sockets: Sockets<'_>) -> Result<i64, Errno> {
    let mode = Mode::from_raw_mode(mode as u32);
    if mode.bits() & forms::MODES.cast_unsigned() != 0 {
        return Err(NOT_ALLOWED);
    }
    match own_name(fd, sockets)? {
        // One without a name yet will give it its mode.
        None => rustix::fs::fchmod(fd, mode),
        Some(own_name) => rustix::fs::chmodat(CWD, &own_name[..], mode, AtFlags::empty()),
    }?;
    Ok(0)
}

/// Gives a socket to the group that may connect, as the call's owner, group and flags say.
fn change_group(fd: &OwnedFd, values: &[u64], sockets: Sockets<'_>) -> Result<i64, Errno> {
    let (Some(group), [owner, wanted, flags, ..]) = (sockets.group, values) else { return Err(NOT_ALLOWED) };
    // As the kernel takes them: half a word each.
    if *owner as u32 != forms::NOBODY || *wanted as u32 != group || *flags as u32 != 0 {
        return Err(NOT_ALLOWED);
    }
    let own_name = own_name(fd, sockets)?.ok_or(NOT_ALLOWED)?;
    rustix::fs::chownat(CWD, &own_name[..], None, Some(Gid::from_raw(group)), AtFlags::empty()).map(|()| 0)
}

/// What a call's directory and path lead to.
fn named(arguments: &Arguments) -> Result<OwnedFd, Errno> {
    let flags = (OFlags::PATH | OFlags::CLOEXEC).bits();
    let [dir, path, ..] = arguments.values;
    // SAFETY: a directory and a text of ours; the result is new.
    unsafe {
        let fd = call(libc::SYS_openat, [dir, path, u64::from(flags), 0, 0, 0])?;
        Ok(OwnedFd::from_raw_fd(fd as i32))
    }
}
