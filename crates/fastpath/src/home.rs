//! Whether this is still the process that opened a space. What `fork` makes has the space's queue in common with it, but not what is known of
//! it: two that go on there would take each other's answers.

use std::{
    ptr::{NonNull, null_mut},
    sync::atomic::{AtomicBool, Ordering},
};

use millrace_driver::PAGE_SIZE;
use rustix::{
    io::Result,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap},
};

/// A page that the system clears in whatever is forked. One load tells, without a system call.
#[derive(Debug)]
pub(crate) struct Home(NonNull<AtomicBool>);

// SAFETY: an atomic that lives as long as this.
unsafe impl Send for Home {}
// SAFETY: as above.
unsafe impl Sync for Home {}

impl Home {
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: a mapping of its own, wherever there is room.
        let page = unsafe { mmap_anonymous(null_mut(), PAGE_SIZE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }?;
        let home = Self(NonNull::new(page.cast()).expect("a mapping has an address"));
        // SAFETY: the page is ours alone, and holds nothing yet.
        unsafe { madvise(page, PAGE_SIZE, Advice::LinuxWipeOnFork) }?;
        home.mark().store(true, Ordering::Relaxed);
        Ok(home)
    }

    fn mark(&self) -> &AtomicBool {
        // SAFETY: the page is there until this is dropped, zeroed at first, and nobody else writes it.
        unsafe { self.0.as_ref() }
    }

    /// As in a process that was forked.
    #[cfg(test)]
    pub(crate) fn leave(&self) {
        self.mark().store(false, Ordering::Relaxed);
    }

    /// Whether this process has opened the space, and was not forked since.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        // Relaxed: only `fork` changes it, and that orders everything.
        self.mark().load(Ordering::Relaxed)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nothing refers to any more.
        let unmapped = unsafe { munmap(self.0.as_ptr().cast(), PAGE_SIZE) };
        debug_assert_eq!(unmapped, Ok(()), "a page of our own");
    }
}
