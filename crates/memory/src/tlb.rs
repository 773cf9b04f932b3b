//! Translations of whole 2 MiB pages, kept in front of the region table: what nearly every request needs.

use std::{cell::Cell, fmt, ptr::NonNull};

use crate::{Access, Protection, Segment};

/// Power of two of a page's bytes.
const BITS: u32 = 21;
/// Bytes of a page.
pub(crate) const PAGE: u64 = 1 << BITS;
/// Entries, each for the pages whose number leaves the same rest.
const ENTRIES: usize = 256;

const READ: u64 = 1;
const WRITE: u64 = 2;

/// A page's number above what may be done with it, and where its first byte lies.
#[derive(Clone, Copy)]
struct Entry {
    key: u64,
    base: *mut u8,
}

impl Entry {
    /// No address has this page number.
    const EMPTY: Self = Self { key: u64::MAX, base: std::ptr::null_mut() };
}

/// A direct-mapped cache. Whoever changes the region table calls [`Self::flush`].
pub(crate) struct Tlb {
    entries: Box<[Cell<Entry>; ENTRIES]>,
    /// How often everything was forgotten.
    generation: Cell<u64>,
}

// SAFETY: the addresses are of mappings that belong to the cache's owner and move with it; they are only turned into segments,
// which have a contract of their own.
unsafe impl Send for Tlb {}

impl fmt::Debug for Tlb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tlb")
    }
}

impl Tlb {
    pub(crate) fn new() -> Self {
        Self { entries: Box::new([const { Cell::new(Entry::EMPTY) }; ENTRIES]), generation: Cell::new(0) }
    }

    /// Forgets everything.
    pub(crate) fn flush(&self) {
        self.entries.iter().for_each(|entry| entry.set(Entry::EMPTY));
        self.generation.set(self.generation.get() + 1);
    }

    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// The range as a segment, if its page is known, holds all of it and allows the access.
    #[expect(clippy::inline_always, reason = "a few instructions, in the way of every request")]
    #[inline(always)]
    pub(crate) fn find(&self, addr: u64, len: u64, access: Access) -> Option<Segment> {
        let page = addr >> BITS;
        let entry = self.entries[page as usize % ENTRIES].get();
        let within = addr & (PAGE - 1);
        let right = match access {
            Access::Read => READ,
            Access::Write => WRITE,
        };
        if entry.key >> 2 != page || entry.key & right == 0 || len > PAGE - within {
            return None;
        }
        // SAFETY: `remember` was given the address of a whole mapped page with these rights; the range lies within it. It stays
        // mapped for as long as segments may live (the crate's invariant), and the entry goes when the region does.
        Some(unsafe { Segment::new(NonNull::new_unchecked(entry.base.add(within as usize)), len as usize) })
    }

    /// Keeps the translation of the page that holds `addr`. `page` is all of it, with the rights of `protection`.
    pub(crate) fn remember(&self, addr: u64, page: Segment, protection: Protection) {
        assert_eq!(page.len() as u64, PAGE, "a whole page");
        let number = addr >> BITS;
        let rights = if protection.read { READ } else { 0 } | if protection.write { WRITE } else { 0 };
        self.entries[number as usize % ENTRIES].set(Entry { key: number << 2 | rights, base: page.as_ptr() });
    }
}
