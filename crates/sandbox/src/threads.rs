//! One system call on every thread of the process.
//!
//! Landlock's restriction is the calling thread's and that of the threads it starts. Before Linux 7.0 there is no call for all at once, so
//! that each thread is interrupted by a signal, whose handler makes the call.

use std::{
    fs, io,
    mem::zeroed,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::null_mut,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI32, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a thread may leave its signal lying.
const PATIENCE: Duration = Duration::from_secs(2);

static RULESET: AtomicI32 = AtomicI32::new(-1);
static DONE: AtomicUsize = AtomicUsize::new(0);
/// The last error of any thread.
static ERROR: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    // SAFETY: the thread's own place for errors, which the interrupted code may be about to read.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // SAFETY: numbers only; the descriptor is open until every thread has been here.
    if unsafe { libc::syscall(libc::SYS_landlock_restrict_self, RULESET.load(Ordering::Acquire), 0) } != 0 {
        // SAFETY: as above.
        ERROR.store(unsafe { *errno }, Ordering::Relaxed);
    }
    // SAFETY: as above.
    unsafe { *errno = before };
    DONE.fetch_add(1, Ordering::Release);
}

/// Restricts every thread of the process by a ruleset of Landlock's. Threads must have given up new privileges.
pub(crate) fn restrict_all(ruleset: BorrowedFd<'_>) -> io::Result<()> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let signal = libc::SIGRTMAX() - 1;
    RULESET.store(ruleset.as_raw_fd(), Ordering::Release);
    // SAFETY: an all-zero sigaction is a valid value (default action, empty mask).
    let (mut action, mut before): (libc::sigaction, libc::sigaction) = unsafe { (zeroed(), zeroed()) };
    action.sa_sigaction = on_signal as *const () as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: both pointers are valid, and the handler makes one call and touches atomics.
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
        let left: Vec<_> = own_threads()?.into_iter().filter(|thread| !visited.contains(thread)).collect();
        // This one last: it may not list its threads after it.
        let Some(thread) = left.iter().copied().find(|thread| *thread != own).or_else(|| left.first().copied()) else {
            return Ok(());
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
