//! Physical Region Page entries (Base 4.3.1).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// One PRP entry: a page's base address and an offset in it. The page size is CC.MPS's (Base 4.3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(transparent)]
pub struct PrpEntry(pub u64);

impl PrpEntry {
    /// Bytes of an entry, and so the alignment a list's address must have at least.
    pub const SIZE: usize = 8;

    /// The offset in a page of `page_size` bytes, a power of two.
    #[must_use]
    pub const fn offset(self, page_size: u64) -> u64 {
        debug_assert!(page_size.is_power_of_two());
        self.0 & (page_size - 1)
    }

    /// The address of the page of `page_size` bytes, a power of two.
    #[must_use]
    pub const fn page(self, page_size: u64) -> u64 {
        self.0 - self.offset(page_size)
    }

    /// Whether the offset is a multiple of four; the first entry's must be, others' must be zero.
    #[must_use]
    pub const fn is_dword_aligned(self) -> bool {
        self.0.is_multiple_of(4)
    }
}

/// Entries in a list that starts `offset` bytes into a page of `page_size` bytes and ends with the page; when more pages
/// remain than entries, the last entry points to the next list (Base 4.3.1). Zero if `offset` is not inside the page.
#[must_use]
pub const fn entries_in_list(offset: u64, page_size: u64) -> u64 {
    page_size.saturating_sub(offset) / PrpEntry::SIZE as u64
}

assert_size!(PrpEntry: 8);
