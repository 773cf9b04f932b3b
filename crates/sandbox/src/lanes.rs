//! The worker's end of its broker: a call that is not the worker's is sent there, with what its arguments lead to, and comes back as if
//! the kernel had made it. Runs in the handler of SIGSYS: no allocation, no lock that the interrupted code could hold, no call that is not
//! on every thread's list.
//!
//! ```text
//!   lane (SOCK_SEQPACKET, one request at a time)   head │ bytes that arguments lead to, in their order │ descriptors  ──►
//!                                                  ◄──  result │ bytes to be written, in their order │ new descriptors
//! ```
//!
//! Shards have lanes of their own and ask only for what waits for no disk: whatever control's threads wait for keeps no shard.

use std::{
    io,
    mem::zeroed,
    os::fd::{IntoRawFd, OwnedFd},
    ptr::null_mut,
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
};

use libc::{c_int, iovec};

use crate::{
    forms::{ARGS, Arg, Form, Gives, MOST, TEXT},
    instead::{own_process, remember_own_process},
};

/// Lanes there are: calls that may be under way at once.
pub(crate) const LANES: usize = 16;
/// Of them, the first ones are the shards'.
pub(crate) const SHARD_LANES: usize = 2;
/// In place of a length: the argument leads nowhere, or is no descriptor of the worker's.
pub(crate) const NOTHING: u32 = u32::MAX;
/// In place of a text's length: it is the name of a descriptor of the worker's own, which comes along.
pub(crate) const OWN: u32 = u32::MAX - 1;
/// Where the names of a process's own descriptors are.
pub(crate) const OWN_FDS: &[u8] = b"/proc/self/fd/";
/// Descriptors that go with a request at most: two directories, and two files by their own names.
pub(crate) const MOST_FDS: usize = 4;

/// The beginning of a request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    pub(crate) number: i64,
    pub(crate) args: [u64; ARGS],
    pub(crate) lens: [u32; ARGS],
}

static SOCKETS: [AtomicI32; LANES] = [const { AtomicI32::new(-1) }; LANES];
/// Lanes that nobody uses, a bit each: the shards', and the others'.
static FREE: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
/// Threads that wait for one.
static WAITING: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];

/// Room for descriptors beside a message, aligned as the system wants it.
#[repr(C, align(8))]
struct Ancillary([u8; 48]);

/// From now on calls go through these.
pub(crate) fn open(lanes: [OwnedFd; LANES]) {
    for (place, lane) in SOCKETS.iter().zip(lanes) {
        place.store(lane.into_raw_fd(), Ordering::Relaxed);
    }
    let (all, shards) = ((1 << LANES) - 1, (1 << SHARD_LANES) - 1);
    FREE[0].store(shards, Ordering::Release);
    FREE[1].store(all & !shards, Ordering::Release);
}

/// Makes a system call; the result as the kernel gives it, with errors as negative numbers.
pub(crate) fn call(number: libc::c_long, args: [u64; ARGS]) -> i64 {
    let [first, second, third, fourth, fifth, sixth] = args;
    // SAFETY: who calls passes what the interrupted code passed, or numbers and places of its own that live through the call.
    let result = unsafe { libc::syscall(number, first, second, third, fourth, fifth, sixth) };
    if result == -1 { -i64::from(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)) } else { result }
}

/// An argument as the descriptor that the kernel takes it for.
pub(crate) fn as_fd(value: u64) -> c_int {
    (value as u32).cast_signed()
}

pub(crate) fn address<T>(place: *const T) -> u64 {
    place as u64
}

/// A lane of one's own, for one call.
struct Lane {
    group: usize,
    number: u32,
}

impl Lane {
    fn take(group: usize) -> Self {
        let free = &FREE[group];
        loop {
            let now = free.load(Ordering::SeqCst);
            if now != 0 {
                let rest = now & (now - 1);
                if free.compare_exchange_weak(now, rest, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                    return Self { group, number: now.trailing_zeros() };
                }
                continue;
            }
            // SeqCst, with `drop`: we say that we wait and look, the other gives back and looks. One of the two sees the other, and the
            // kernel looks again before it has us sleep.
            WAITING[group].fetch_add(1, Ordering::SeqCst);
            let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
            call(libc::SYS_futex, [address(free.as_ptr()), u64::from(wait.unsigned_abs()), 0, 0, 0, 0]);
            WAITING[group].fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn socket(&self) -> u64 {
        let socket = SOCKETS[self.number as usize].load(Ordering::Relaxed);
        u64::from(socket.cast_unsigned())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let free = &FREE[self.group];
        // SeqCst: see `take`.
        free.fetch_or(1 << self.number, Ordering::SeqCst);
        if WAITING[self.group].load(Ordering::SeqCst) > 0 {
            let wake = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
            call(libc::SYS_futex, [address(free.as_ptr()), u64::from(wake.unsigned_abs()), 1, 0, 0, 0]);
        }
    }
}

/// A request that is being put together.
struct Parts {
    head: Head,
    sent: [iovec; 1 + ARGS],
    sent_count: usize,
    written: [iovec; 1 + ARGS],
    written_count: usize,
    fds: [c_int; MOST_FDS],
    fd_count: usize,
}

impl Parts {
    fn new(form: &Form, args: [u64; ARGS]) -> Result<Self, c_int> {
        let nowhere = iovec { iov_base: null_mut(), iov_len: 0 };
        let head = Head { number: form.number, args: [0; ARGS], lens: [NOTHING; ARGS] };
        // The first place of each is the head's and the result's.
        let (sent, written) = ([nowhere; 1 + ARGS], [nowhere; 1 + ARGS]);
        let mut parts = Self { head, sent, sent_count: 1, written, written_count: 1, fds: [-1; MOST_FDS], fd_count: 0 };
        for (at, arg) in form.args.iter().enumerate() {
            parts.add(at, *arg, args)?;
        }
        Ok(parts)
    }

    fn add(&mut self, at: usize, arg: Arg, args: [u64; ARGS]) -> Result<(), c_int> {
        let value = args[at];
        match arg {
            Arg::Num => self.head.args[at] = value,
            // The working directory, or no descriptor at all.
            Arg::Dir if as_fd(value) < 0 => self.head.args[at] = value,
            Arg::Fd | Arg::Dir => self.descriptor(at, as_fd(value)),
            _ if value == 0 => {}
            Arg::Text => {
                let len = length(value)?;
                match own_descriptor(value, len) {
                    Some(fd) => {
                        self.descriptor(at, fd);
                        self.head.lens[at] = OWN;
                    }
                    None => self.reads(at, value, len)?,
                }
            }
            Arg::In(of) => self.reads(at, value, args[of as usize] as usize)?,
            Arg::Both(len) => {
                self.reads(at, value, len as usize)?;
                self.writes(at, value, len as usize);
            }
            Arg::Out(len) => self.writes(at, value, len as usize),
            Arg::OutOf(of) => self.writes(at, value, args[of as usize] as usize),
            // SAFETY: the call's own argument, which the kernel would read as a number of four bytes.
            Arg::OutUpTo(of) => match unsafe { (args[of as usize] as *const u32).as_ref() } {
                Some(room) => self.writes(at, value, *room as usize),
                None => return Err(libc::EFAULT),
            },
        }
        Ok(())
    }

    fn descriptor(&mut self, at: usize, fd: c_int) {
        self.fds[self.fd_count] = fd;
        self.fd_count += 1;
        self.head.lens[at] = 0;
    }

    fn reads(&mut self, at: usize, place: u64, len: usize) -> Result<(), c_int> {
        if len > MOST {
            return Err(libc::EINVAL);
        }
        self.head.lens[at] = len as u32;
        self.sent[self.sent_count] = iovec { iov_base: place as *mut _, iov_len: len };
        self.sent_count += 1;
        Ok(())
    }

    fn writes(&mut self, at: usize, place: u64, len: usize) {
        let len = len.min(MOST);
        self.head.lens[at] = len as u32;
        self.written[self.written_count] = iovec { iov_base: place as *mut _, iov_len: len };
        self.written_count += 1;
    }
}

/// Bytes of a text, its zero included.
fn length(text: u64) -> Result<usize, c_int> {
    // SAFETY: the call's own argument, which the kernel would read up to its zero.
    let len = unsafe { libc::strnlen(text as *const _, TEXT) };
    if len < TEXT { Ok(len + 1) } else { Err(libc::ENAMETOOLONG) }
}

/// The descriptor whose name in `/proc/self/fd` the text is: that folder is another one in another process.
fn own_descriptor(text: u64, len: usize) -> Option<c_int> {
    // SAFETY: `length` has just found so many bytes there, the last of them a zero.
    let bytes = unsafe { std::slice::from_raw_parts(text as *const u8, len - 1) };
    let digits = bytes.strip_prefix(OWN_FDS).filter(|digits| (1..=9).contains(&digits.len()))?;
    digits.iter().try_fold(0, |number, digit| digit.is_ascii_digit().then(|| number * 10 + c_int::from(digit - b'0')))
}

/// Has the broker make a call; its result as the kernel gives it.
pub(crate) fn ask(form: &Form, args: [u64; ARGS], is_shard: bool) -> i64 {
    let mut parts = match Parts::new(form, args) {
        Ok(parts) => parts,
        Err(errno) => return -i64::from(errno),
    };
    let head = parts.head;
    parts.sent[0] = iovec { iov_base: (&raw const head).cast_mut().cast(), iov_len: size_of::<Head>() };
    let lane = Lane::take(usize::from(!is_shard));
    match send(&lane, &mut parts) {
        Ok(()) => receive(&lane, form, &mut parts, args),
        Err(errno) => -i64::from(errno),
    }
}

fn send(lane: &Lane, parts: &mut Parts) -> Result<(), c_int> {
    let mut ancillary = Ancillary([0; 48]);
    // SAFETY: an all-zero header is a valid value.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (parts.sent.as_mut_ptr(), parts.sent_count as _);
    if parts.fd_count > 0 {
        let len = size_of::<c_int>() * parts.fd_count;
        message.msg_control = ancillary.0.as_mut_ptr().cast();
        // SAFETY: numbers only; the room holds `MOST_FDS` descriptors and what stands before them.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(len as u32) as _;
            let first = libc::CMSG_FIRSTHDR(&raw const message);
            ((*first).cmsg_level, (*first).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
            (*first).cmsg_len = libc::CMSG_LEN(len as u32) as _;
            std::ptr::copy_nonoverlapping(parts.fds.as_ptr(), libc::CMSG_DATA(first).cast(), parts.fd_count);
        }
    }
    let flags = u64::from(libc::MSG_NOSIGNAL.unsigned_abs());
    loop {
        let sent = call(libc::SYS_sendmsg, [lane.socket(), address(&raw const message), flags, 0, 0, 0]);
        match c_int::try_from(-sent).unwrap_or(0) {
            libc::EINTR => {}
            // What the call itself would have been told.
            errno @ (libc::EBADF | libc::EFAULT | libc::EINVAL | libc::EMSGSIZE | libc::ENOMEM | libc::ENOBUFS) => {
                return Err(errno);
            }
            libc::ETOOMANYREFS => return Err(libc::EMFILE),
            _ if sent >= 0 => return Ok(()),
            _ => die(),
        }
    }
}

fn receive(lane: &Lane, form: &Form, parts: &mut Parts, args: [u64; ARGS]) -> i64 {
    let (mut result, mut ancillary) = (0_i64, Ancillary([0; 48]));
    parts.written[0] = iovec { iov_base: (&raw mut result).cast(), iov_len: size_of::<i64>() };
    // SAFETY: an all-zero header is a valid value.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (parts.written.as_mut_ptr(), parts.written_count as _);
    (message.msg_control, message.msg_controllen) = (ancillary.0.as_mut_ptr().cast(), ancillary.0.len() as _);
    let flags = u64::from(libc::MSG_CMSG_CLOEXEC.unsigned_abs());
    loop {
        let received = call(libc::SYS_recvmsg, [lane.socket(), address(&raw mut message), flags, 0, 0, 0]);
        match received {
            received if received >= 8 => break,
            received if received == -i64::from(libc::EINTR) => {}
            // A place that cannot be written: the answer is gone, and the lane is free.
            received if received == -i64::from(libc::EFAULT) => return received,
            _ => die(),
        }
    }
    if result < 0 || form.gives == Gives::Number {
        return result;
    }
    let [first, second] = new_descriptors(&message);
    match form.gives {
        Gives::Descriptor if first >= 0 => i64::from(first),
        Gives::Two(at) if second >= 0 => {
            // SAFETY: the call's own argument, a place for two descriptors.
            unsafe { (args[at as usize] as *mut [c_int; 2]).write([first, second]) };
            result
        }
        // There was no room for them here: the kernel has closed those that it could not give.
        _ => {
            if first >= 0 {
                call(libc::SYS_close, [first.unsigned_abs().into(), 0, 0, 0, 0, 0]);
            }
            -i64::from(libc::EMFILE)
        }
    }
}

/// Up to two descriptors that came; -1 for none.
fn new_descriptors(message: &libc::msghdr) -> [c_int; 2] {
    let mut fds = [-1; 2];
    // SAFETY: the kernel has filled the header in, and the room after it is still there.
    unsafe {
        let first = libc::CMSG_FIRSTHDR(message);
        if !first.is_null() && (*first).cmsg_level == libc::SOL_SOCKET && (*first).cmsg_type == libc::SCM_RIGHTS {
            let bytes = (*first).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
            let count = (bytes / size_of::<c_int>()).min(fds.len());
            std::ptr::copy_nonoverlapping(libc::CMSG_DATA(first).cast(), fds.as_mut_ptr(), count);
        }
    }
    fds
}

/// Ends a worker that has lost what only another one gets: the keeper starts that. By this signal no device is blamed.
pub fn end_worker() -> ! {
    // Where there is no broker, nobody has asked for it before.
    remember_own_process();
    die()
}

/// The end, because nobody makes the worker's calls any more. Another worker comes with another broker; by this signal no device is blamed.
fn die() -> ! {
    loop {
        let thread = call(libc::SYS_gettid, [0; ARGS]).unsigned_abs();
        let kill = u64::from(libc::SIGKILL.unsigned_abs());
        call(libc::SYS_tgkill, [own_process(), thread, kill, 0, 0, 0]);
    }
}
