//! The shape that nearly all requests have, found before their turn.
//!
//! ```text
//!   heads, descriptors ──► tables ──► headers ──► the volume
//!                  └ fetch ─┘  └ fetch ─┘
//! ```
//!
//! Each arrow is a line that was last in the guest's processor. Several requests are looked at together, so that what one step needs was
//! asked for while the others were looked at. Nothing is taken by that, and nothing is refused: what has another shape, or a fault, is found
//! out when its turn comes.

use millrace_memory::{Access, GuestAddress, Segment};

use super::{
    super::{memory::MemoryTable, request::kind},
    chain::{Descriptor, flag},
};

/// Requests that are looked at together.
pub(crate) const AHEAD: usize = 16;
/// With more requests than this at once, the next one is hardly where the last one was, and steps overlap anyway.
pub(super) const FEW: u16 = 2;

/// Bytes of an indirect table that names header, data and status.
const TABLE: u32 = 3 * Descriptor::SIZE as u32;
/// Bytes of a request's header.
const HEADER: u64 = 16;

/// A header, one piece of data, and a status: each within a page of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    header: Segment,
    pub(crate) data: Segment,
    pub(crate) status: Segment,
    /// The data are for us to write.
    pub(crate) writable: bool,
}

/// Where a request lay. A guest with few requests under way has the next one there as well: what is told apart only step by step, each
/// from another of its lines, is asked for at once then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guess {
    /// The head's descriptor.
    pub(super) head: u16,
    /// Only asked for: whatever is there by now.
    table: Segment,
    header: Segment,
    status: Segment,
}

impl Guess {
    #[inline]
    pub(super) fn after(head: u16, table: Segment, plain: &Plain) -> Self {
        Self { head, table, header: plain.header, status: plain.status }
    }

    /// Has the lines fetched.
    #[inline]
    pub(super) fn fetch(&self) {
        fetch_table(&self.table);
        self.header.prefetch(0, HEADER as usize);
        self.status.prefetch_to_write();
    }
}

/// It may lie in two lines.
#[inline]
fn fetch_table(table: &Segment) {
    table.prefetch(0, 1);
    table.prefetch(TABLE as usize - 1, 1);
}

/// A descriptor as two words, of which the second has length, flags and link.
const fn rest(len: u32, flags: u16, next: u16) -> u64 {
    len as u64 | (flags as u64) << 32 | (next as u64) << 48
}

impl Plain {
    /// Copies the header out: where the data belong, if they are to be read or written in the direction that their memory is for.
    #[inline]
    pub(crate) fn sector(&self) -> Option<u64> {
        let [kind, sector] = self.header.read_words(0);
        (kind as u32 == if self.writable { kind::IN } else { kind::OUT }).then_some(sector)
    }

    /// The request that a linked table of three descriptors names; its header's and status's lines are fetched.
    #[inline]
    pub(super) fn of(memory: &MemoryTable, table: &Segment) -> Option<Self> {
        let [header, header_rest, data, data_rest, status, status_rest] = table.read_words(0);
        let (len, flags) = (data_rest as u32, (data_rest >> 32) as u16);
        let writable = flags == flag::NEXT | flag::WRITE;
        let shape = header_rest == rest(HEADER as u32, flag::NEXT, 1)
            && data_rest == rest(len, if writable { flags } else { flag::NEXT }, 2)
            && len != 0
            // What the last one would be linked to is not looked at.
            && status_rest << 16 == rest(1, flag::WRITE, 0) << 16
            && header.is_multiple_of(8);
        if !shape {
            return None;
        }
        let access = if writable { Access::Write } else { Access::Read };
        let find = |addr, len, access| memory.guest.translate(GuestAddress(addr), len, access).ok();
        let status = find(status, 1, Access::Write)?;
        let header = find(header, HEADER, Access::Read)?;
        status.prefetch_to_write();
        header.prefetch(0, HEADER as usize);
        Some(Self { header, data: find(data, len.into(), access)?, status, writable })
    }
}

/// The table that a ring's descriptor leads to, if it may be a plain request's; its lines are fetched.
#[inline]
pub(super) fn table(memory: &MemoryTable, [addr, word]: [u64; 2]) -> Option<Segment> {
    if word << 16 != rest(TABLE, flag::INDIRECT, 0) << 16 || !addr.is_multiple_of(8) {
        return None;
    }
    let table = memory.guest.translate(GuestAddress(addr), TABLE.into(), Access::Read).ok()?;
    fetch_table(&table);
    Some(table)
}
