//! What a thread gives up for itself alone, given up by every thread of the process.
//!
//! Landlock's restriction is the calling thread's and that of the threads it starts. Before Linux 7.0 there is no call for all at once;
//! for lists of calls there is one, but shards have another list than the rest. So each thread is interrupted by a signal, whose handler
//! makes the calls: the list last, for none of the others is on it.

use std::{
    fs, io,
    mem::zeroed,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::null_mut,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use seccompiler::BpfProgram;

use crate::{filter::Programs, trap::is_shard};

/// How long a thread may leave its signal lying.
const PATIENCE: Duration = Duration::from_secs(2);

static RULESET: AtomicI32 = AtomicI32::new(-1);
static ABSENT: AtomicPtr<libc::sock_fprog> = AtomicPtr::new(null_mut());
static SHARDS: AtomicPtr<libc::sock_fprog> = AtomicPtr::new(null_mut());
static OTHERS: AtomicPtr<libc::sock_fprog> = AtomicPtr::new(null_mut());
static DONE: AtomicUsize = AtomicUsize::new(0);
/// The last error of any thread.
static ERROR: AtomicI32 = AtomicI32::new(0);

const SET_MODE_FILTER: libc::c_long = 1;

extern "C" fn on_signal(_: libc::c_int) {
    // SAFETY: the thread's own place for errors, which the interrupted code may be about to read.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let ruleset = RULESET.load(Ordering::Acquire);
    // SAFETY: numbers only; the descriptor is open until every thread has been here.
    if ruleset >= 0 && unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) } != 0 {
        // SAFETY: as above.
        ERROR.store(unsafe { *errno }, Ordering::Relaxed);
    }
    for program in [&ABSENT, if is_shard() { &SHARDS } else { &OTHERS }] {
        let program = program.load(Ordering::Acquire);
        // SAFETY: the program lives until every thread has been here.
        if !program.is_null() && unsafe { libc::syscall(libc::SYS_seccomp, SET_MODE_FILTER, 0, program) } != 0 {
            // SAFETY: as above.
            ERROR.store(unsafe { *errno }, Ordering::Relaxed);
        }
    }
    // SAFETY: as above.
    unsafe { *errno = before };
    DONE.fetch_add(1, Ordering::Release);
}

fn as_program(instructions: &mut BpfProgram) -> libc::sock_fprog {
    // Two types of two libraries for one structure of the kernel's.
    const { assert!(size_of::<seccompiler::sock_filter>() == size_of::<libc::sock_filter>()) };
    let len = u16::try_from(instructions.len()).expect("the kernel takes 4,096 instructions, and there are fewer");
    libc::sock_fprog { len, filter: instructions.as_mut_ptr().cast() }
}

/// Restricts every thread of the process, by a ruleset of Landlock's and by lists of calls: what there is of both. Threads must have given
/// up new privileges.
pub(crate) fn restrict_all(ruleset: Option<BorrowedFd<'_>>, programs: Option<Programs>) -> io::Result<()> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let signal = libc::SIGRTMAX() - 1;
    RULESET.store(ruleset.map_or(-1, |ruleset| ruleset.as_raw_fd()), Ordering::Release);
    let mut programs = programs;
    let mut headers = programs.as_mut().map(|all| [&mut all.absent, &mut all.shard, &mut all.other].map(as_program));
    for (place, header) in [&ABSENT, &SHARDS, &OTHERS].into_iter().zip(headers.iter_mut().flatten()) {
        place.store(header, Ordering::Release);
    }
    // SAFETY: an all-zero sigaction is a valid value (default action, empty mask).
    let (mut action, mut before): (libc::sigaction, libc::sigaction) = unsafe { (zeroed(), zeroed()) };
    action.sa_sigaction = on_signal as *const () as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: both pointers are valid, and the handler makes three calls and touches atomics.
    if unsafe { libc::sigaction(signal, &raw const action, &raw mut before) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let result = visit_all(signal);
    // SAFETY: as above; no thread has the signal pending unless it hung, and then the process is about to give up.
    unsafe { libc::sigaction(signal, &raw const before, null_mut()) };
    result
}

/// Has every thread handle the signal, those too that one not yet visited has started meanwhile.
fn visit_all(signal: libc::c_int) -> io::Result<()> {
    let (mut visited, own) = (Vec::new(), rustix::thread::gettid().as_raw_pid());
    ERROR.store(0, Ordering::Relaxed);
    loop {
        let other = || -> io::Result<_> {
            Ok(own_threads()?.into_iter().find(|thread| *thread != own && !visited.contains(thread)))
        };
        // A list that is made while a thread ends may lack another one: twice. This one last: it may not list its threads after it.
        let thread = match other()? {
            Some(thread) => thread,
            None => other()?.unwrap_or(own),
        };
        visited.push(thread);
        let done = DONE.load(Ordering::Acquire);
        // SAFETY: numbers only.
        if unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal) } != 0 {
            match io::Error::last_os_error() {
                // It has ended by itself.
                error if error.raw_os_error() == Some(libc::ESRCH) => continue,
                error => return Err(error),
            }
        }
        let deadline = Instant::now() + PATIENCE;
        while DONE.load(Ordering::Acquire) == done {
            if Instant::now() > deadline {
                // It may have ended before it came to it.
                if own_threads()?.contains(&thread) {
                    return Err(io::Error::other(format!("thread {thread} does not take its signal")));
                }
                break;
            }
            thread::sleep(Duration::from_micros(20));
        }
        match ERROR.load(Ordering::Relaxed) {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
        if thread == own {
            return Ok(());
        }
    }
}

fn own_threads() -> io::Result<Vec<libc::pid_t>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir("/proc/self/task")? {
        threads.extend(entry?.file_name().to_str().and_then(|name| name.parse::<libc::pid_t>().ok()));
    }
    Ok(threads)
}
