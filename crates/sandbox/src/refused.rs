//! Calls that were refused: they fail with EPERM, and the operator hears of them.
//!
//! The kernel sends the thread SIGSYS in place of the call. The handler counts it and has the call return EPERM: a program
//! that makes a call it does not need goes on, and one that needs it fails where it is. It writes nothing itself, for whoever reads
//! the log may be slow, and shards wait for nobody: [`refused`] tells a thread that has the time.

use std::{
    fmt, io,
    mem::zeroed,
    ptr::null_mut,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::calls::name;

/// Numbers beyond are counted as the last one.
const NUMBERS: usize = 1024;

/// For each call: how often it was refused, and how much of that was told, in the upper half.
static COUNTS: [AtomicU64; NUMBERS] = [const { AtomicU64::new(0) }; NUMBERS];
const TOLD: u64 = 1 << 32;

/// A call that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The call's number.
    pub number: usize,
    /// How often since it was last told.
    pub count: u64,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "number {}", self.number)?;
        match name(i64::try_from(self.number).unwrap_or(-1)) {
            Some(name) => write!(f, " ({name})"),
            None => Ok(()),
        }
    }
}

/// What was refused since the last question.
pub fn refused() -> Vec<Refused> {
    let new = |(number, count): (usize, &AtomicU64)| {
        let now = count.load(Ordering::Relaxed);
        let new = (now % TOLD).saturating_sub(now / TOLD);
        if new > 0 {
            // Only whoever asks writes the upper half.
            count.fetch_add(new * TOLD, Ordering::Relaxed);
        }
        (new > 0).then_some(Refused { number, count: new })
    };
    COUNTS.iter().enumerate().filter_map(new).collect()
}

/// Takes SIGSYS over, for all threads.
pub(crate) fn watch() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is a valid value (default action, empty mask).
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = on_refusal as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: the pointer is valid, and the handler only does what a signal handler may.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The kernel's record of a refused call, as far as we read it: `siginfo_t` with its `_sigsys` part.
#[repr(C)]
struct Info {
    signal: [libc::c_int; 4],
    address: usize,
    number: libc::c_int,
}

extern "C" fn on_refusal(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid record, which for SIGSYS begins like this, and the thread's registers.
    let (number, context) = unsafe { ((*info.cast::<Info>()).number, &mut *context.cast::<libc::ucontext_t>()) };
    let number = usize::try_from(number).unwrap_or(NUMBERS).min(NUMBERS - 1);
    // A count that reaches the upper half would take four thousand million calls that fail.
    COUNTS[number].fetch_add(1, Ordering::Relaxed);
    set_result(context, -i64::from(libc::EPERM));
}

#[cfg(target_arch = "x86_64")]
fn set_result(context: &mut libc::ucontext_t, result: i64) {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = result;
}

#[cfg(target_arch = "aarch64")]
fn set_result(context: &mut libc::ucontext_t, result: i64) {
    context.uc_mcontext.regs[0] = result.cast_unsigned();
}
