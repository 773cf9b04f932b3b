//! Calls that are not on a thread's list: they are made in another form, by the broker, or fail with EPERM, and then the operator hears
//! of them.
//!
//! The kernel sends the thread SIGSYS in place of the call, always at the call itself and never in the middle of something else. The
//! handler has the thread go on with a result, as after any call: a program that makes a call it does not need goes on, and one that needs
//! what is refused fails where it is. The handler writes no log, for whoever reads it may be slow, and shards wait for nobody: [`refused`]
//! tells a thread that has the time.

use std::{
    cell::Cell,
    fmt, io,
    mem::zeroed,
    ptr::null_mut,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    calls::name,
    forms::{self, ARGS},
    instead::{self, Instead},
    lanes,
};

/// Numbers beyond are counted as the last one.
const NUMBERS: usize = 1024;

/// For each call: how often it was refused, and how much of that was told, in the upper half.
static COUNTS: [AtomicU64; NUMBERS] = [const { AtomicU64::new(0) }; NUMBERS];
const TOLD: u64 = 1 << 32;

thread_local! {
    /// Constant and without an end, so that the handler may look at it.
    static IS_SHARD: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is a shard: it gets the shards' list when the sandbox is closed, and never asks for what may wait for a disk.
pub fn this_is_a_shard() {
    IS_SHARD.set(true);
}

pub(crate) fn is_shard() -> bool {
    IS_SHARD.get()
}

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

/// Takes SIGSYS over, for all threads. The handler runs where the call was made, not on the small stack for faults.
pub(crate) fn watch() -> io::Result<()> {
    instead::remember_own_process();
    // SAFETY: an all-zero sigaction is a valid value (default action, empty mask).
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = on_call as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
    // SAFETY: the pointer is valid, and the handler only does what a signal handler may.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The kernel's record of a call, as far as we read it: `siginfo_t` with its `_sigsys` part.
#[repr(C)]
struct Info {
    signal: [libc::c_int; 4],
    address: usize,
    number: libc::c_int,
}

extern "C" fn on_call(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid record, which for SIGSYS begins like this, and the thread's registers.
    let (number, context) = unsafe { ((*info.cast::<Info>()).number, &mut *context.cast::<libc::ucontext_t>()) };
    // SAFETY: the thread's own place for errors, which the interrupted code may be about to read.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let result = answer(number.into(), arguments(context));
    // SAFETY: as above.
    unsafe { *errno = before };
    set_result(context, result);
}

/// What the thread is told.
fn answer(number: libc::c_long, args: [u64; ARGS]) -> i64 {
    let (number, args) = match instead::of(number, args) {
        Some(Instead::Answer(result)) => return result,
        Some(Instead::Ask(number, args)) => (number, args),
        None => (number, args),
    };
    if let Some(form) = forms::of(number).filter(|form| form.of_shards || !is_shard()) {
        let result = lanes::ask(form, args, is_shard());
        if result != -i64::from(forms::REFUSED) {
            return result;
        }
    }
    let number = usize::try_from(number).unwrap_or(NUMBERS).min(NUMBERS - 1);
    // A count that reaches the upper half would take four thousand million calls that fail.
    COUNTS[number].fetch_add(1, Ordering::Relaxed);
    -i64::from(libc::EPERM)
}

#[cfg(target_arch = "x86_64")]
fn arguments(context: &libc::ucontext_t) -> [u64; ARGS] {
    [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9]
        .map(|register| context.uc_mcontext.gregs[register.cast_unsigned() as usize].cast_unsigned())
}

#[cfg(target_arch = "x86_64")]
fn set_result(context: &mut libc::ucontext_t, result: i64) {
    context.uc_mcontext.gregs[libc::REG_RAX as usize] = result;
}

#[cfg(target_arch = "aarch64")]
fn arguments(context: &libc::ucontext_t) -> [u64; ARGS] {
    std::array::from_fn(|at| context.uc_mcontext.regs[at])
}

#[cfg(target_arch = "aarch64")]
fn set_result(context: &mut libc::ucontext_t, result: i64) {
    context.uc_mcontext.regs[0] = result.cast_unsigned();
}
