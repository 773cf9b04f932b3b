//! Calls that a client can make block do not block their shard for long.
//!
//! Whether a write to an eventfd waits is its client's to say at any time: O_NONBLOCK belongs to all who have the descriptor.
//!
//! ```text
//!   shard   counts to odd ─► write(2) ─► counts to even            one that blocks: EINTR, and its owner gives the descriptor up
//!                                                                     ▲ a signal, to this thread alone
//!   watch   looks every 100 ms (while nobody calls, every second): odd, and the same as the last time?
//! ```
//!
//! A signal may come late, when the shard is in another call: all that shards make go on after one (EINTR). Both counts are looked at
//! without a fence: a count that is seen late makes a look late.

use std::{
    cell::OnceCell,
    mem::zeroed,
    ptr::null_mut,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// Between two looks, while shards make such calls; a call is interrupted after one to two of them.
const LOOK: Duration = Duration::from_millis(100);
/// While none does.
const IDLE_LOOK: Duration = Duration::from_secs(1);
/// Nobody else has a use for it, and where it is not handled it is ignored.
const SIGNAL: libc::c_int = libc::SIGURG;

/// A shard's thread.
struct Watched {
    thread: libc::pid_t,
    /// Odd while it is in a call.
    calls: AtomicU64,
}

static SHARDS: Mutex<Vec<Weak<Watched>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: OnceCell<Arc<Watched>> = const { OnceCell::new() };
}

/// Makes a call that fails by EINTR when it blocks for longer than a moment (two seconds at the most), if this thread is a shard.
#[inline]
pub fn interruptible<R>(call: impl FnOnce() -> R) -> R {
    OWN.with(|own| {
        let Some(own) = own.get() else { return call() };
        let count = own.calls.load(Ordering::Relaxed);
        own.calls.store(count + 1, Ordering::Relaxed);
        let result = call();
        own.calls.store(count + 2, Ordering::Relaxed);
        result
    })
}

/// Starts the watch, if it does not run yet: shards may be forbidden to start threads later.
pub(crate) fn be_ready() {
    static WATCH: OnceLock<()> = OnceLock::new();
    WATCH.get_or_init(|| {
        let started = handle_signal().and_then(|()| thread::Builder::new().name("millrace-watch".into()).spawn(watch));
        if let Err(error) = started {
            tracing::warn!(%error, "no watch over shards: a client whose eventfd blocks can stop one");
        }
    });
}

/// This thread is watched from now on, until it ends.
pub(crate) fn join() {
    let new = || Arc::new(Watched { thread: rustix::thread::gettid().as_raw_pid(), calls: AtomicU64::new(0) });
    unblock();
    OWN.with(|own| {
        let own = own.get_or_init(new);
        SHARDS.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(own));
    });
}

fn watch() {
    let mut seen: Vec<(libc::pid_t, u64)> = Vec::new();
    loop {
        let mut shards = SHARDS.lock().unwrap_or_else(PoisonError::into_inner);
        shards.retain(|shard| shard.strong_count() > 0);
        let now: Vec<_> = shards.iter().filter_map(Weak::upgrade).map(|shard| shard.state()).collect();
        drop(shards);
        for &(thread, calls) in now.iter().filter(|state| state.1 % 2 == 1 && seen.contains(state)) {
            tracing::warn!(thread, calls, "a shard is in a write to a client's eventfd that blocks: interrupted");
            interrupt(thread);
        }
        let look = if now == seen && now.iter().all(|(_, calls)| calls % 2 == 0) { IDLE_LOOK } else { LOOK };
        seen = now;
        thread::park_timeout(look);
    }
}

impl Watched {
    fn state(&self) -> (libc::pid_t, u64) {
        (self.thread, self.calls.load(Ordering::Relaxed))
    }
}

/// A thread that has ended meanwhile needs none; another one of this process that has its number by now goes on.
fn interrupt(thread: libc::pid_t) {
    // SAFETY: numbers only.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL) };
}

/// Whoever started the process may have held the signal back.
fn unblock() {
    // SAFETY: an all-zero set is a valid value, and both calls get pointers to it alone.
    unsafe {
        let mut set: libc::sigset_t = zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, SIGNAL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, null_mut());
    }
}

extern "C" fn nothing(_: libc::c_int) {}

/// Without SA_RESTART: the call is to fail.
fn handle_signal() -> std::io::Result<()> {
    // SAFETY: an all-zero sigaction is a valid value (default action, empty mask, no flags).
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: the pointer is valid, and the handler does nothing.
    match unsafe { libc::sigaction(SIGNAL, &raw const action, null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
