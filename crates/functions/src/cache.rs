//! A cache's lookup: which lines of the slow disk a fast one has, in rows of four.
//!
//! ```text
//!   block      │        tag        │  set (10 bits)  │ in the line (3) │
//!                        │                 └──► row: four ways
//!              same tag? ▼   way │ valid │ filling │ age │ readers │ tag │
//!   read:   valid ─► fast        not there ─► slow, and fill the oldest way that nobody reads
//!   write:  slow, and no way is valid for it any more
//! ```
//!
//! The slow disk has everything at any time, so a row may be forgotten whenever it suits. What is counted in a row makes that true of the fast disk's
//! blocks too: a way is not filled with another line while it is read, no line is filled while one of its row is written, and none is written while it is
//! filled. A command that reaches into another line is answered for the first one only ([`Decision::nlb_z`]), and asked again for the rest.

use crate::{Command, Config, LBA_MASK};

/// Bits of a block's place in its line: eight blocks.
pub const LINE_BITS: u32 = 3;
/// Bits of a row's number.
pub const SET_BITS: u32 = 10;
/// Lines of a row.
pub const WAYS: usize = 4;

const TAG_MASK: u64 = LBA_MASK >> (LINE_BITS + SET_BITS);
const READERS: u32 = 44;
const READERS_MASK: u64 = 15 << READERS;
const AGE: u32 = 50;
const AGE_MASK: u64 = 3 << AGE;
const FILLING: u64 = 1 << 62;
const VALID: u64 = 1 << 63;
/// Writes of a row that are counted at most.
const MOST_WRITES: u8 = 255;

/// A row of the table; all zeroes is an empty one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Bits 34:0 tag, 47:44 readers, 51:50 age, 62 filling, 63 valid.
    pub ways: [u64; WAYS],
    /// Writes to the row's lines that have not ended.
    pub writes: u8,
}

/// Where a command goes, as far as the blocks that it is answered for.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// First block, on the disk that it goes to.
    pub lba: u64,
    /// Fill: where the line's first block comes to be, on the fast disk.
    pub line: u64,
    /// Blocks that this is about, 0's based.
    pub nlb_z: u16,
    /// Fast, fill: the way. To be told when the command, or the filling, ends.
    pub way: u8,
    /// [`Self::FAST`], [`Self::SLOW`], [`Self::FILL`] or [`Self::HOLD`].
    pub kind: u8,
}

impl Decision {
    /// It is read from the fast disk.
    pub const FAST: u8 = 0;
    /// It goes to the slow disk.
    pub const SLOW: u8 = 1;
    /// It is read from the slow disk; the line is to be copied to the fast one.
    pub const FILL: u8 = 2;
    /// It is to be asked again, when something of the row has ended.
    pub const HOLD: u8 = 3;
}

/// The row that a command's first block needs.
#[inline]
pub fn key(lba: u64) -> u16 {
    (lba >> LINE_BITS) as u16 & ((1 << SET_BITS) - 1)
}

/// The ways of a row as used, with the one in `used` (a bit) as the youngest.
#[inline]
fn aged(ways: [u64; WAYS], used: u8) -> [u64; WAYS] {
    let mut age = 0;
    for (at, way) in ways.iter().enumerate() {
        age |= if used >> at & 1 != 0 { way & AGE_MASK } else { 0 };
    }
    let mut after = ways;
    for (at, way) in after.iter_mut().enumerate() {
        let own = *way & AGE_MASK;
        let older = if (own <= age) & (own != AGE_MASK) { *way + (1 << AGE) } else { *way };
        *way = if used >> at & 1 != 0 { *way & !AGE_MASK } else { older };
    }
    after
}

/// The way to fill, a bit: an empty one, or the oldest that nobody reads; 0: none.
#[inline]
fn victim(ways: &[u64; WAYS]) -> u8 {
    let (mut chosen, mut best) = (0, 0);
    for (at, way) in ways.iter().enumerate() {
        // Free ways come first, then the oldest.
        let rank = if way & VALID == 0 { 5 } else { 1 + ((way & AGE_MASK) >> AGE) as u8 };
        let busy = (way & (READERS_MASK | FILLING)) != 0;
        if !busy & (rank > best) {
            (chosen, best) = (1 << at, rank);
        }
    }
    chosen
}

/// The number of a way, from its bit.
#[inline]
fn number(way: u8) -> u8 {
    u8::from(way & 0b1010 != 0) | (u8::from(way & 0b1100 != 0) << 1)
}

/// Where a command goes, and its row from then on. `command.slba` is a block of the slow disk.
#[inline]
pub fn submit(command: &Command, row: &Row, config: &Config) -> (Decision, Row) {
    let lba = command.slba & LBA_MASK;
    let tag = lba >> (LINE_BITS + SET_BITS);
    let (mut hit, mut filling, mut room) = (0, false, true);
    for (at, way) in row.ways.iter().enumerate() {
        let same = way & TAG_MASK == tag;
        hit |= u8::from(same & (way & VALID != 0)) << at;
        filling |= same & (way & FILLING != 0);
        room &= !(same & (way & READERS_MASK == READERS_MASK));
    }
    let offset = (lba & 7) as u16;
    let rest = 7 - offset;
    let mut decision =
        Decision { lba, nlb_z: if command.nlb_z < rest { command.nlb_z } else { rest }, ..Decision::default() };
    let mut after = *row;
    let (victim, reads) = (victim(&row.ways), command.only_reads());
    let fast = reads & (hit != 0) & room;
    let fill = reads & (hit == 0) & !filling & (victim != 0) & (row.writes == 0);
    let used = if fast { hit } else { victim };
    decision.way = number(used);
    decision.line = config.cache_start() + (u64::from(key(lba)) << (LINE_BITS + 2)) + (u64::from(decision.way) << LINE_BITS);
    if fast {
        decision.lba = decision.line + u64::from(offset);
        decision.kind = Decision::FAST;
    } else if !reads & (filling | (row.writes == MOST_WRITES)) {
        decision.kind = Decision::HOLD;
        return (decision, after);
    } else {
        decision.kind = if fill { Decision::FILL } else { Decision::SLOW };
    }
    after.writes = if reads { row.writes } else { row.writes.wrapping_add(1) };
    let aged = aged(row.ways, used);
    for (at, way) in after.ways.iter_mut().enumerate() {
        let this = used >> at & 1 != 0;
        if fast | fill {
            *way = aged[at];
        }
        if fast & this {
            *way = way.wrapping_add(1 << READERS);
        } else if fill & this {
            *way = FILLING | tag;
        } else if !reads & (hit >> at & 1 != 0) {
            *way &= !VALID;
        }
    }
    (decision, after)
}

/// Something of a row that ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Its way, if it has one.
    pub way: u8,
    /// [`Self::READ`], [`Self::WRITE`], [`Self::FILLED`] or [`Self::NOT_FILLED`].
    pub kind: u8,
}

impl Ended {
    /// A read of the fast disk.
    pub const READ: u8 = 0;
    /// A write to the slow disk.
    pub const WRITE: u8 = 1;
    /// A way has its line.
    pub const FILLED: u8 = 2;
    /// A way could not be filled.
    pub const NOT_FILLED: u8 = 3;
}

/// A row from then on.
#[inline]
pub fn complete(ended: &Ended, row: &Row) -> Row {
    let mut after = *row;
    if ended.kind == Ended::WRITE {
        after.writes = row.writes.saturating_sub(1);
        return after;
    }
    for (at, way) in after.ways.iter_mut().enumerate() {
        let this = ended.way == at as u8;
        if this & (ended.kind == Ended::READ) & (*way & READERS_MASK != 0) {
            *way -= 1 << READERS;
        } else if this & (ended.kind != Ended::READ) & (*way & FILLING != 0) {
            *way = (*way & !FILLING) | if ended.kind == Ended::FILLED { VALID } else { 0 };
        }
    }
    after
}
