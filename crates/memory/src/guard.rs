//! SIGBUS costs one device, not the process.
//!
//! A peer that shared memory with us may truncate the file behind it; the next touch then raises SIGBUS on whichever thread
//! touches it. The handler looks the address up among the guarded mappings, puts zeroed memory of our own in the whole
//! mapping's place, sets the owner's [`Poison`] and lets the instruction run again. The owner polls its poison and fails its
//! device. Any other SIGBUS goes to whoever handled it before (by default: the process dies).
//!
//! The same table says which memory is shared with peers: who has such memory mapped for a device ([`with_region`]) is told before it
//! goes ([`watch`]).

use std::{
    io,
    mem::{self, ManuallyDrop},
    ops::Range,
    os::fd::{AsRawFd, OwnedFd},
    ptr::null_mut,
    sync::{
        Arc, Mutex, Once, OnceLock, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence},
    },
};

use crate::{
    Mapping, Segment, huge,
    room::{Account, Share},
};

/// Mappings that may be guarded at once in one process: half of what the system allows it (`vm.max_map_count`), so that all
/// clients together cannot take the mappings that the allocator needs.
const SLOTS: usize = 1 << 15;

/// Times that a mapping's memory is replaced: once for each thread that touches it at the moment. When it is still not there, the system has
/// none left, and the touch would be tried for ever.
const TRIES: usize = 1024;

struct Slot {
    /// Counts changes: odd while one is being made.
    changes: AtomicUsize,
    start: AtomicUsize,
    /// Address after the last byte; 0 while the slot is free.
    end: AtomicUsize,
    poison: AtomicPtr<AtomicBool>,
    /// No segment of it goes anywhere, or no device may keep it mapped: [`with_region`] does not find it.
    hidden: AtomicBool,
    /// Times that other memory has taken the mapping's place; 0 while that has its own.
    replaced: AtomicUsize,
}

impl Slot {
    const fn free() -> Self {
        Self {
            changes: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            poison: AtomicPtr::new(null_mut()),
            hidden: AtomicBool::new(false),
            replaced: AtomicUsize::new(0),
        }
    }

    /// Changes the slot; only its owner does.
    fn set(&self, start: usize, end: usize, poison: *mut AtomicBool, hidden: bool) {
        let changes = self.changes.load(Ordering::Relaxed);
        self.changes.store(changes.wrapping_add(1), Ordering::Relaxed);
        // Race: a handler on another thread scans the slot at this moment, and must never mix one mapping's start with
        // another's end. This fence puts the odd count before the new values; `get`'s acquire fence is the other side: who
        // read a new value also reads a changed count.
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.poison.store(poison, Ordering::Relaxed);
        self.hidden.store(hidden, Ordering::Relaxed);
        self.replaced.store(0, Ordering::Relaxed);
        // Release: who reads the new even count (`get`, acquire) also reads the new values.
        self.changes.store(changes.wrapping_add(2), Ordering::Release);
    }

    /// The slot's range and poison, and whether it is hidden; `None` while it is free or being changed. (The slot of a mapping that
    /// somebody is just touching is neither.)
    fn get(&self) -> Option<(Range<usize>, *mut AtomicBool, bool)> {
        let before = self.changes.load(Ordering::Acquire);
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        let (poison, hidden) = (self.poison.load(Ordering::Relaxed), self.hidden.load(Ordering::Relaxed));
        // The other side of the release fence in `set`.
        fence(Ordering::Acquire);
        let unchanged = before.is_multiple_of(2) && self.changes.load(Ordering::Relaxed) == before;
        (unchanged && end != 0).then_some((start..end, poison, hidden))
    }
}

/// Memory that a peer shares with us, while it is mapped here: nothing of Rust's own is in it, and anybody may write to it at any time.
/// It cannot be kept.
#[derive(Debug)]
pub struct Region {
    start: usize,
    len: usize,
}

impl Region {
    /// Address of its first byte here.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Whoever uses a region has it for reading; who unmaps one waits for them.
static IN_USE: RwLock<()> = RwLock::new(());

/// Does something with the region that holds an address, which stays mapped meanwhile; `None`, and nothing, for memory that is nobody
/// else's, and for such that [must not be pinned](crate::GuestMemory::unpinned).
pub fn with_region<R>(addr: usize, use_it: impl FnOnce(&Region) -> R) -> Option<R> {
    let _stays = IN_USE.read().unwrap_or_else(PoisonError::into_inner);
    let slots = &TABLE[..USED.load(Ordering::Relaxed).min(SLOTS)];
    let found = slots.iter().filter_map(Slot::get).find(|(range, _, hidden)| !hidden && range.contains(&addr));
    found.map(|(range, ..)| use_it(&Region { start: range.start, len: range.len() }))
}

/// Who must know of memory before it is unmapped: it may be given to others right after.
pub trait Watcher: Send + Sync {
    /// The region is not found any more, and is about to be unmapped. No request that uses it is in flight.
    fn going(&self, region: &Region);
}

static WATCHERS: RwLock<Vec<Weak<dyn Watcher>>> = RwLock::new(Vec::new());

/// Has the watcher told of every region that goes, for as long as somebody else keeps it.
pub fn watch(watcher: Weak<dyn Watcher>) {
    let mut watchers = WATCHERS.write().unwrap_or_else(PoisonError::into_inner);
    watchers.retain(|known| known.strong_count() > 0);
    watchers.push(watcher);
}

static TABLE: [Slot; SLOTS] = [const { Slot::free() }; SLOTS];
/// Slots below this index have been used at least once: what the handler scans.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Free slots below `USED`. The handler never takes this lock.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Set once memory was taken from under one of its owner's mappings; never cleared.
#[derive(Clone, Debug)]
pub struct Poison(Arc<AtomicBool>);

impl Poison {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    /// Whether memory was taken away.
    #[inline]
    pub fn is_set(&self) -> bool {
        // Relaxed: the handler ran on a thread of ours. Who decides by it what a copy was worth (`FileMap`) puts a fence between.
        self.0.load(Ordering::Relaxed)
    }
}

/// A mapping whose loss is survived.
#[derive(Debug)]
pub struct GuardedMapping {
    slot: usize,
    /// `Drop` unmaps it once the slot is free, unless its addresses must not be used again.
    mapping: ManuallyDrop<Mapping>,
    /// After the mapping: its addresses are free when their room is given back.
    share: Option<Share>,
    _poison: Poison,
    hidden: bool,
}

impl GuardedMapping {
    /// Guards `mapping`; `poison` is set when its memory is taken away.
    pub fn new(mapping: Mapping, poison: &Poison) -> io::Result<Self> {
        Self::with(mapping, poison, None, false)
    }

    /// The same for a peer's memory, with the room that was taken for it.
    pub(crate) fn shared(mapping: Mapping, poison: &Poison, share: Share) -> io::Result<Self> {
        Self::with(mapping, poison, Some(share), false)
    }

    /// The same for one of which nobody is given a segment, or whose pages may be others at any time: nobody uses it as a region, and it
    /// goes without waiting for those who use others.
    pub(crate) fn hidden(mapping: Mapping, poison: &Poison, share: Share) -> io::Result<Self> {
        Self::with(mapping, poison, Some(share), true)
    }

    fn with(mapping: Mapping, poison: &Poison, share: Option<Share>, hidden: bool) -> io::Result<Self> {
        static INSTALL: Once = Once::new();
        INSTALL.call_once(install_handler);
        let start = mapping.as_ptr() as usize;
        let slot = {
            let mut free = FREE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            match free.pop() {
                Some(slot) => slot,
                None if USED.load(Ordering::Relaxed) < SLOTS => USED.fetch_add(1, Ordering::Relaxed),
                None => return Err(io::Error::other("too many guarded memory mappings in one process")),
            }
        };
        TABLE[slot].set(start, start + mapping.len(), Arc::as_ptr(&poison.0).cast_mut(), hidden);
        Ok(Self { slot, mapping: ManuallyDrop::new(mapping), share, _poison: poison.clone(), hidden })
    }

    /// A peer has unmapped it, though something may still use it.
    pub(crate) fn retire(&self, peer: &Arc<Account>) {
        if let Some(share) = &self.share {
            share.retire(peer);
        }
    }

    /// A piece of the mapping; `None` when it does not lie within.
    ///
    /// # Safety
    /// As for [`Mapping::segment`].
    pub unsafe fn segment(&self, offset: usize, len: usize) -> Option<Segment> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.mapping.segment(offset, len) }
    }

    /// As [`huge::make`].
    pub(crate) fn collapse(&self, offset: usize) -> bool {
        huge::make(&self.mapping, offset)
    }

    /// As [`Mapping::resident`].
    pub(crate) fn resident(&self, offset: usize, len: usize) -> io::Result<usize> {
        self.mapping.resident(offset, len)
    }
}

impl Drop for GuardedMapping {
    fn drop(&mut self) {
        let slot = &TABLE[self.slot];
        let is_replaced = slot.replaced.load(Ordering::Relaxed) != 0;
        // The slot dies before the range is unmapped, so no other mapping can take the range while the slot names it.
        slot.set(0, 0, null_mut(), false);
        if !self.hidden {
            // Who found it before that has done with it from here on.
            drop(IN_USE.write().unwrap_or_else(PoisonError::into_inner));
            let region = Region { start: self.mapping.as_ptr() as usize, len: self.mapping.len() };
            let watchers = WATCHERS.read().unwrap_or_else(PoisonError::into_inner);
            watchers.iter().filter_map(Weak::upgrade).for_each(|watcher| watcher.going(&region));
        }
        // What was written in its place in the spare file is nobody's any more, and the next mapping at these addresses has that place.
        if is_replaced && self.mapping.punch(0, self.mapping.len()).is_err() {
            // There is no next one: the addresses are lost, and their room with them.
            mem::forget(self.share.take());
        } else {
            // SAFETY: nobody uses it after this, and it is dropped nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.mapping) };
        }
        FREE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(self.slot);
    }
}

/// Memory that takes the place of what peers take away: a file of our own. Each mapping's place in it is its address, which no other has as
/// long as it is there. Not anonymous memory: where the system does not overcommit, that has to be there for a whole guest at once, and this
/// only for the pages that are touched.
static SPARE: OnceLock<OwnedFd> = OnceLock::new();
/// Bytes of that file, none of which is memory before it is touched: as many as there are addresses.
const SPARE_SIZE: u64 = 1 << 56;

/// Without it, taken memory is replaced as long as the system has enough.
fn make_spare() -> io::Result<OwnedFd> {
    // Where files may not be as long (RLIMIT_FSIZE) the system would end the process, and not say so with an error.
    // SAFETY: the signal is ignored from now on; no handler runs.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let file = rustix::fs::memfd_create("millrace-spare", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, SPARE_SIZE)?;
    Ok(file)
}

/// What handled SIGBUS before us.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());

fn install_handler() {
    if let Ok(file) = make_spare() {
        let _ = SPARE.set(file);
    }
    // SAFETY: an all-zero sigaction is a valid value (default action, empty mask).
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: as above.
    let mut previous: Box<libc::sigaction> = Box::new(unsafe { std::mem::zeroed() });
    // SAFETY: both pointers are valid, and the handler only does what a signal handler may.
    let rc = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut *previous) };
    assert_eq!(rc, 0, "sigaction(SIGBUS): {}", io::Error::last_os_error());
    PREVIOUS.store(Box::into_raw(previous), Ordering::Release);
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo, and for SIGBUS si_addr is its address field.
    let addr = unsafe { (*info).si_addr() } as usize;
    if !replace_mapping(addr) {
        forward(signal, info, context);
    }
}

/// Puts zeroed memory in the place of the guarded mapping that holds `addr`. Async-signal-safe: atomics and `mmap`.
fn replace_mapping(addr: usize) -> bool {
    for slot in &TABLE[..USED.load(Ordering::Relaxed).min(SLOTS)] {
        let Some((range, poison, _)) = slot.get().filter(|(range, ..)| range.contains(&addr)) else {
            continue;
        };
        // Shared with nobody, and yet not private: a guest's memory may be larger than the private memory that we may have.
        let flags = libc::MAP_FIXED | libc::MAP_SHARED | libc::MAP_NORESERVE;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // Relaxed: whoever drops the mapping knows already that nothing touches it any more.
        if slot.replaced.fetch_add(1, Ordering::Relaxed) >= TRIES {
            return false;
        }
        // First: who finds the poison not set after a copy knows that it copied the file's own bytes. The other side is the
        // copying thread, which reaches the new pages by a fault, after the system call below.
        // SAFETY: a live slot's poison is kept alive by the guarded mapping that owns the slot.
        unsafe { (*poison).store(true, Ordering::Relaxed) };
        let replace = |more: libc::c_int, file: libc::c_int, at: libc::off_t| {
            let start = range.start as *mut libc::c_void;
            // SAFETY: the slot is live, so the range is a mapping of ours from which we replace every page; segments into it
            // stay valid memory.
            let ptr = unsafe { libc::mmap(start, range.len(), prot, flags | more, file, at) };
            ptr != libc::MAP_FAILED
        };
        let place = SPARE.get().zip(libc::off_t::try_from(range.start).ok());
        let from_file = place.is_some_and(|(file, at)| replace(0, file.as_raw_fd(), at));
        return from_file || replace(libc::MAP_ANONYMOUS, -1, 0);
    }
    false
}

/// Gives a SIGBUS that is not ours to the previous handler, or lets it kill the process.
fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: once set, PREVIOUS points to a leaked, immutable sigaction.
    let handler = if previous.is_null() { libc::SIG_DFL } else { unsafe { (*previous).sa_sigaction } };
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: resetting to the default action is always allowed; the instruction then faults again and the process dies
        // with the true reason.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    // SAFETY: a handler other than SIG_DFL and SIG_IGN is a function; Rust's and sanitizers' handlers use SA_SIGINFO.
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
        unsafe { std::mem::transmute(handler) };
    handler(signal, info, context);
}
