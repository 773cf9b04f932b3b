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
pub(crate) const FEW: u16 = 2;

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

/// How the descriptors of an indirect table follow each other, and where their flags are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// A split ring's: linked.
    Linked,
    /// A packed ring's: all of them, in order. What they are called, and other flags than these, is not looked at.
    InOrder,
}

/// Where a request lay, and the words that said so. A guest with few requests under way has the next one there as well: what is told apart only
/// step by step, each from another of its lines, is asked for at once then, and where the words are the same, so is what they mean.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guess {
    /// What the ring's descriptor said of the table.
    leads: [u64; 2],
    table: Segment,
    words: [u64; 6],
    plain: Plain,
    /// Of the guest's memory, when all of this was found in it.
    generation: u64,
}

impl Guess {
    #[inline]
    pub(super) fn after(memory: &MemoryTable, found: &Found, words: [u64; 6], plain: &Plain) -> Self {
        let &Found { leads, table } = found;
        Self { leads, table, words, plain: *plain, generation: memory.guest.generation() }
    }

    /// Has the lines fetched, whatever is there by now. The status first: it often lies in the header's line.
    #[inline]
    pub(super) fn fetch(&self) {
        fetch_table(&self.table);
        self.plain.status.prefetch_to_write();
        self.plain.header.prefetch(0, HEADER as usize);
    }

    /// The request that a descriptor leads to, if it is as the last one was but for its data's place: no word waits for another.
    #[expect(clippy::inline_always, reason = "what it finds stays in registers")]
    #[inline(always)]
    pub(super) fn again(&self, memory: &MemoryTable, descriptor: &Segment, form: Form) -> Option<Plain> {
        // Otherwise the table need not be mapped any more.
        if self.generation != memory.guest.generation() {
            return None;
        }
        let leads = said(descriptor.read_words(0), form);
        let words: [u64; 6] = self.table.read_words(0);
        let [header, header_rest, data, data_rest, status, status_rest] = words;
        if leads != self.leads || [header, header_rest, self.words[2], data_rest, status, status_rest] != self.words {
            return None;
        }
        let Plain { data: last, writable, .. } = self.plain;
        let data = memory.guest.find_whole(GuestAddress(data), last.len() as u64, access(writable))?;
        Some(Plain { data, ..self.plain })
    }
}

/// A table that may be a plain request's, and what led to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    leads: [u64; 2],
    pub(super) table: Segment,
}

/// How the memory of data is accessed.
#[inline]
const fn access(writable: bool) -> Access {
    if writable { Access::Write } else { Access::Read }
}

/// What a ring's descriptor says of a table: a packed ring's has its buffer's name as well, and flags that change with each round.
#[inline]
const fn said([addr, word]: [u64; 2], form: Form) -> [u64; 2] {
    match form {
        Form::Linked => [addr, word],
        Form::InOrder => [addr, word & (u32::MAX as u64 | ((flag::INDIRECT | flag::NEXT) as u64) << 48)],
    }
}

/// It may lie in two lines.
#[inline]
fn fetch_table(table: &Segment) {
    table.prefetch(0, 1);
    table.prefetch(TABLE as usize - 1, 1);
}

/// The second word of a split ring's descriptor: length, flags and link.
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

    /// The request that a table of three descriptors names; its header's and status's lines are fetched.
    #[expect(clippy::inline_always, reason = "with several callers it would be a call, and what it finds go through memory")]
    #[inline(always)]
    pub(super) fn of(memory: &MemoryTable, words: [u64; 6], form: Form) -> Option<Self> {
        let [header, header_rest, data, data_rest, status, status_rest] = words;
        let len = data_rest as u32;
        let writable = match form {
            Form::Linked => linked(header_rest, data_rest, status_rest),
            Form::InOrder => in_order(header_rest, data_rest, status_rest),
        }?;
        if len == 0 || !header.is_multiple_of(8) {
            return None;
        }
        let find = |addr, len, access| memory.guest.find_whole(GuestAddress(addr), len, access);
        let status = find(status, 1, Access::Write)?;
        let header = find(header, HEADER, Access::Read)?;
        status.prefetch_to_write();
        header.prefetch(0, HEADER as usize);
        Some(Self { header, data: find(data, len.into(), access(writable))?, status, writable })
    }
}

/// Whether the data are for us to write, where three descriptors are linked as a plain request's are.
#[inline]
fn linked(header: u64, data: u64, status: u64) -> Option<bool> {
    let (len, flags) = (data as u32, (data >> 32) as u16);
    let writable = flags == flag::NEXT | flag::WRITE;
    let shape = header == rest(HEADER as u32, flag::NEXT, 1)
        && data == rest(len, if writable { flags } else { flag::NEXT }, 2)
        // What the last one would be linked to is not looked at.
        && status << 16 == rest(1, flag::WRITE, 0) << 16;
    shape.then_some(writable)
}

/// The same for three descriptors that follow each other.
#[inline]
fn in_order(header: u64, data: u64, status: u64) -> Option<bool> {
    let direction = |word: u64| (word >> 48) as u16 & (flag::WRITE | flag::INDIRECT);
    let shape = header as u32 == HEADER as u32
        && direction(header) == 0
        && matches!(direction(data), 0 | flag::WRITE)
        && status as u32 == 1
        && direction(status) == flag::WRITE;
    shape.then_some(direction(data) == flag::WRITE)
}

/// The table that a ring's descriptor leads to, if it may be a plain request's; its lines are fetched.
#[expect(clippy::inline_always, reason = "as above")]
#[inline(always)]
pub(super) fn table(memory: &MemoryTable, descriptor: &Segment, form: Form) -> Option<Found> {
    let leads @ [addr, word] = said(descriptor.read_words(0), form);
    let may_be = match form {
        Form::Linked => word << 16 == rest(TABLE, flag::INDIRECT, 0) << 16,
        Form::InOrder => word == u64::from(TABLE) | u64::from(flag::INDIRECT) << 48,
    };
    if !may_be || !addr.is_multiple_of(8) {
        return None;
    }
    let table = memory.guest.find_whole(GuestAddress(addr), TABLE.into(), Access::Read)?;
    fetch_table(&table);
    Some(Found { leads, table })
}
