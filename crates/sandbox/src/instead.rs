//! Calls that a worker does not have, in the form of calls that it has, or that its broker makes. Runs in the handler of SIGSYS.
//!
//! Libraries ask for the same thing in many ways: `pread64`, `preadv` and `readv` are `preadv2`, and `open` is `openat` in the working
//! directory. One form of each is enough.

#![allow(clippy::wildcard_imports, non_upper_case_globals, reason = "nearly all of it is the system's names")]

use std::{
    mem::zeroed,
    sync::atomic::{AtomicI32, Ordering},
};

use Instead::{Answer, Ask};
use libc::*;

use crate::{
    forms::ARGS,
    lanes::{address, call},
};

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instead {
    /// It is answered.
    Answer(i64),
    /// It is this call to somebody who makes it.
    Ask(c_long, [u64; ARGS]),
}

/// The working directory, as an argument.
const HERE: u64 = (AT_FDCWD as i64).cast_unsigned();
/// In place of a position: where the file stands.
const CURRENT: u64 = u64::MAX;
const NANOS: i64 = 1_000_000_000;

/// This process. It has no call that asks.
static OWN: AtomicI32 = AtomicI32::new(0);

/// To be called before the call is gone.
pub(crate) fn remember_own_process() {
    OWN.store(std::process::id().cast_signed(), Ordering::Relaxed);
}

pub(crate) fn own_process() -> u64 {
    u64::from(OWN.load(Ordering::Relaxed).cast_unsigned())
}

/// The other form of a call, if it has one.
pub(crate) fn of(number: c_long, args: [u64; ARGS]) -> Option<Instead> {
    let [a, b, c, d, ..] = args;
    Some(match number {
        SYS_renameat => Ask(SYS_renameat2, [a, b, c, d, 0, 0]),
        SYS_pread64 => Answer(one(SYS_preadv2, a, (b, c), d)),
        SYS_pwrite64 => Answer(one(SYS_pwritev2, a, (b, c), d)),
        SYS_readv => Answer(call(SYS_preadv2, [a, b, c, CURRENT, CURRENT, 0])),
        SYS_writev => Answer(call(SYS_pwritev2, [a, b, c, CURRENT, CURRENT, 0])),
        SYS_preadv => Answer(call(SYS_preadv2, [a, b, c, d, args[4], 0])),
        SYS_pwritev => Answer(call(SYS_pwritev2, [a, b, c, d, args[4], 0])),
        SYS_recvfrom => Answer(message(SYS_recvmsg, args)),
        SYS_sendto => Answer(message(SYS_sendmsg, args)),
        SYS_epoll_pwait => Answer(wait_for_events(args)),
        SYS_dup => Answer(call(SYS_fcntl, [a, F_DUPFD as u64, 0, 0, 0, 0])),
        SYS_nanosleep => Answer(sleep(CLOCK_MONOTONIC, 0, a)),
        SYS_clock_nanosleep => Answer(sleep(a as clockid_t, b as c_int, c)),
        // Who waits for a thread that is off its processor leaves it this one.
        SYS_sched_yield => Answer(pause(1)),
        SYS_getpid => Answer(own_process().cast_signed()),
        // Advice.
        SYS_fadvise64 => Answer(0),
        // The C library moves the bytes itself.
        SYS_mremap => Answer(-i64::from(ENOMEM)),
        // What a stop has interrupted: whoever waited looks again.
        SYS_restart_syscall => Answer(-i64::from(EINTR)),
        _ => return older(number, args),
    })
}

/// Older names, which only this kind of machine has.
#[cfg(target_arch = "x86_64")]
fn older(number: c_long, args: [u64; ARGS]) -> Option<Instead> {
    let [a, b, c, ..] = args;
    Some(match number {
        SYS_open => Ask(SYS_openat, [HERE, a, b, c, 0, 0]),
        SYS_stat => Ask(SYS_newfstatat, [HERE, a, b, 0, 0, 0]),
        SYS_lstat => Ask(SYS_newfstatat, [HERE, a, b, AT_SYMLINK_NOFOLLOW as u64, 0, 0]),
        SYS_access => Ask(SYS_faccessat, [HERE, a, b, 0, 0, 0]),
        SYS_readlink => Ask(SYS_readlinkat, [HERE, a, b, c, 0, 0]),
        SYS_unlink => Ask(SYS_unlinkat, [HERE, a, 0, 0, 0, 0]),
        SYS_rmdir => Ask(SYS_unlinkat, [HERE, a, AT_REMOVEDIR as u64, 0, 0, 0]),
        SYS_mkdir => Ask(SYS_mkdirat, [HERE, a, b, 0, 0, 0]),
        SYS_rename => Ask(SYS_renameat2, [HERE, a, HERE, b, 0, 0]),
        SYS_chmod => Ask(SYS_fchmodat, [HERE, a, b, 0, 0, 0]),
        SYS_poll => Answer(poll_for(args)),
        SYS_epoll_wait => Answer(wait_for_events([a, b, c, args[3], 0, 0])),
        SYS_accept => Ask(SYS_accept4, [a, b, c, 0, 0, 0]),
        _ => return None,
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn older(_: c_long, _: [u64; ARGS]) -> Option<Instead> {
    None
}

/// Reads or writes one piece at a position.
fn one(number: c_long, fd: u64, (place, len): (u64, u64), position: u64) -> i64 {
    if position.cast_signed() < 0 {
        return -i64::from(EINVAL);
    }
    let piece = iovec { iov_base: place as *mut _, iov_len: len as usize };
    call(number, [fd, address(&raw const piece), 1, position, 0, 0])
}

/// Sends or receives one piece, with an address or without.
fn message(number: c_long, [fd, place, len, flags, name, name_len]: [u64; ARGS]) -> i64 {
    let mut piece = iovec { iov_base: place as *mut _, iov_len: len as usize };
    // SAFETY: an all-zero header is a valid value.
    let mut header: msghdr = unsafe { zeroed() };
    (header.msg_iov, header.msg_iovlen, header.msg_name) = (&raw mut piece, 1, name as *mut _);
    let room = name_len as *mut socklen_t;
    header.msg_namelen = match number {
        SYS_sendmsg => name_len as socklen_t,
        // SAFETY: the call's own argument, which the kernel would read as a length.
        _ if name != 0 && name_len != 0 => unsafe { room.read() },
        _ => 0,
    };
    let result = call(number, [fd, address(&raw const header), flags, 0, 0, 0]);
    if number == SYS_recvmsg && result >= 0 && name != 0 && name_len != 0 {
        // SAFETY: as above; the kernel would write the length there.
        unsafe { room.write(header.msg_namelen) };
    }
    result
}

/// A time that many milliseconds long.
fn milliseconds(millis: c_int) -> timespec {
    timespec { tv_sec: i64::from(millis) / 1000, tv_nsec: i64::from(millis) % 1000 * (NANOS / 1000) }
}

/// `epoll_pwait`, whose time is in milliseconds: none if it is negative.
fn wait_for_events([epoll, place, room, millis, mask, mask_len]: [u64; ARGS]) -> i64 {
    let millis = millis as c_int;
    let time = milliseconds(millis);
    let time = if millis < 0 { 0 } else { address(&raw const time) };
    call(SYS_epoll_pwait2, [epoll, place, room, time, mask, mask_len])
}

#[cfg(target_arch = "x86_64")]
fn poll_for([place, count, millis, ..]: [u64; ARGS]) -> i64 {
    let millis = millis as c_int;
    let time = milliseconds(millis);
    let time = if millis < 0 { 0 } else { address(&raw const time) };
    call(SYS_ppoll, [place, count, time, 0, 0, 0])
}

/// Waits so many nanoseconds, or until a signal comes.
fn pause(nanos: i64) -> i64 {
    let mut time = timespec { tv_sec: nanos / NANOS, tv_nsec: nanos % NANOS };
    call(SYS_ppoll, [0, 0, address(&raw mut time), 0, 0, 0])
}

fn nanoseconds(time: timespec) -> i64 {
    time.tv_sec.saturating_mul(NANOS).saturating_add(time.tv_nsec)
}

fn now(clock: clockid_t) -> Option<i64> {
    let mut now = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes a time to the place given.
    (unsafe { clock_gettime(clock, &raw mut now) } == 0).then(|| nanoseconds(now))
}

/// Sleeps to the end, whatever signals come: ours are for handlers, and nobody is to be woken by them.
fn sleep(clock: clockid_t, flags: c_int, time: u64) -> i64 {
    // SAFETY: the call's own argument, which the kernel would read as a time.
    let Some(time) = (unsafe { (time as *const timespec).as_ref() }) else { return -i64::from(EFAULT) };
    if time.tv_sec < 0 || !(0..NANOS).contains(&time.tv_nsec) {
        return -i64::from(EINVAL);
    }
    let Some(began) = now(clock) else { return -i64::from(EINVAL) };
    let until = if flags & TIMER_ABSTIME == 0 { began.saturating_add(nanoseconds(*time)) } else { nanoseconds(*time) };
    while let Some(left) = now(clock).map(|now| until.saturating_sub(now)).filter(|left| *left > 0) {
        pause(left);
    }
    0
}
