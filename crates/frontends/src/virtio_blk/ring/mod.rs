//! Virtqueues (virtio 1.3, 2.7 and 2.8): descriptors become requests, results become used descriptors.
//!
//! ```text
//!   available ──take──► Buffers: what we may read, what we may write ──► a request, named by its token
//!       ▲                                                                      │
//!       └── the guest ◄── one index store, one notification ◄── give_back ◄────┘  (a batch of tokens)
//! ```
//!
//! Invariants:
//! * What is checked and used is a copy. What was looked at ahead may be read again: for the record, or when its turn comes and all of it is
//!   checked anew.
//! * Everything a guest can say wrong is a [`RingError`]: the device fails, and only it.
//! * A token stands for one request from `take` or `take_plain` to `give_back`; there are never more than the ring has entries.
//! * The record of requests under way ([`super::inflight`]) is written in an order that is right between any two stores.

mod ahead;
mod chain;
mod packed;
mod split;
#[cfg(test)]
mod tests;

use std::num::NonZeroU16;

use millrace_memory::{AccessError, GuestAddress, Segment};
use thiserror::Error;

pub(crate) use ahead::{AHEAD, FEW, Plain};
pub(crate) use chain::Buffers;
pub(crate) use packed::PackedRing;
pub(crate) use split::SplitRing;

use super::{dirty::DirtyLog, inflight::InflightError, memory::MemoryTable, message::VringAddr};

/// Virtio features a ring must know of.
pub(crate) mod feature {
    pub(crate) const INDIRECT: u64 = 1 << 28;
    pub(crate) const EVENT_IDX: u64 = 1 << 29;
    pub(crate) const PACKED: u64 = 1 << 34;
}

/// Entries a queue may have.
pub(crate) const MAX_SIZE: u32 = 32_768;

/// What a guest, or its front end, did wrong with a queue.
#[derive(Debug, Error)]
pub(crate) enum RingError {
    #[error("a queue of {0} entries: a power of two up to {MAX_SIZE} is possible")]
    Size(u32),
    #[error("the {part} of the queue at {user:#x} is not aligned, or not within one region of memory")]
    Place { part: &'static str, user: u64 },
    #[error("the guest made {pending} descriptors available in a queue of {size}")]
    TooManyAvailable { pending: u16, size: u16 },
    #[error("descriptor {index} of a table of {size}")]
    Index { index: u16, size: u32 },
    #[error("descriptor {0} was made available again while it is in use")]
    Twice(u16),
    #[error("a chain with a loop, or longer than its table")]
    Endless,
    #[error("a descriptor changed after it was made available")]
    Changed,
    #[error("an indirect table of {0} bytes")]
    IndirectSize(u32),
    #[error("an indirect table where none may be")]
    Indirect,
    #[error("a descriptor without length")]
    Empty,
    #[error("a descriptor, or a whole chain, with more bytes than there are addresses")]
    TooLong,
    #[error("more than {} pieces of memory", chain::MAX_SEGMENTS)]
    TooManySegments,
    #[error("what we may read comes after what we may write")]
    Order,
    #[error("memory: {0}")]
    Memory(#[from] AccessError),
    #[error(transparent)]
    Inflight(#[from] InflightError),
}

/// What a ring is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) size: u32,
    pub(crate) addr: VringAddr,
    /// Where to go on: as `SET_VRING_BASE` said.
    pub(crate) base: u32,
    pub(crate) features: u64,
}

impl Setup {
    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }
}

/// A part of a ring in guest memory.
#[derive(Clone, Copy, Debug)]
struct Part {
    segment: Segment,
    guest: GuestAddress,
}

impl Part {
    /// Finds `len` bytes at an address of the front end's process.
    fn find(memory: &MemoryTable, part: &'static str, user: u64, len: usize, align: u64) -> Result<Self, RingError> {
        let wrong = RingError::Place { part, user };
        let found = memory.guest_address(user, len as u64).filter(|guest| guest.0.is_multiple_of(align));
        let Some(guest) = found else { return Err(wrong) };
        let segment = memory.guest.translate(guest, len as u64, millrace_memory::Access::Write).map_err(|_| wrong)?;
        Ok(Self { segment, guest })
    }
}

/// Whether the other side asked to be told of `event`, when we go from `old` to `new` (virtio 1.3, 2.7.10).
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// One request's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) token: u16,
    /// How it ended, for the trace: its guest has it in its memory.
    pub(crate) status: u16,
    /// Bytes written to the guest.
    pub(crate) len: u32,
}

/// A virtqueue of either kind.
#[derive(Debug)]
pub(crate) enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

impl Ring {
    /// A ring over the guest's memory. `size` is checked here.
    pub(crate) fn new(memory: &MemoryTable, setup: &Setup) -> Result<Self, RingError> {
        let wrong = RingError::Size(setup.size);
        let packed = setup.has(feature::PACKED);
        let possible = (1..=MAX_SIZE).contains(&setup.size) && (packed || setup.size.is_power_of_two());
        let size = u16::try_from(setup.size).ok().and_then(NonZeroU16::new).filter(|_| possible).ok_or(wrong)?;
        Ok(if packed {
            Self::Packed(PackedRing::new(memory, setup, size)?)
        } else {
            Self::Split(SplitRing::new(memory, setup, size)?)
        })
    }

    /// The memory table or the queue's place has changed: the ring's parts are found again.
    pub(crate) fn relocate(&mut self, memory: &MemoryTable, addr: &VringAddr) -> Result<(), RingError> {
        match self {
            Self::Split(ring) => ring.relocate(memory, addr),
            Self::Packed(ring) => ring.relocate(memory, addr),
        }
    }

    /// Takes the next request: those that an earlier process left first. `None` when there is none.
    #[inline]
    pub(crate) fn take(&mut self, memory: &MemoryTable, buffers: &mut Buffers) -> Result<Option<u16>, RingError> {
        match self {
            Self::Split(ring) => ring.take(memory, buffers),
            Self::Packed(ring) => ring.take(memory, buffers),
        }
    }

    /// Whether there is something to take: of an idle queue all that is asked.
    #[expect(clippy::inline_always, reason = "what it finds stays in registers")]
    #[inline(always)]
    pub(crate) fn has_more(&mut self) -> Result<bool, RingError> {
        match self {
            Self::Split(ring) => ring.has_more(),
            Self::Packed(ring) => Ok(ring.has_more()),
        }
    }

    /// Whether only a new look at the index would find more; packed rings have none.
    #[inline]
    pub(crate) fn is_drained(&self) -> bool {
        match self {
            Self::Split(ring) => ring.is_drained(),
            Self::Packed(_) => false,
        }
    }

    /// Looks at requests that are there to be taken, at most `most`: heads, and what they lead to if it is plain. Returns how many; none
    /// where only [`Self::take`] will do.
    #[inline]
    pub(crate) fn look_ahead(
        &mut self,
        memory: &MemoryTable,
        ahead: &mut Vec<(u16, Option<Plain>)>,
        most: usize,
    ) -> Result<usize, RingError> {
        ahead.clear();
        match self {
            Self::Split(ring) => ring.look_ahead(memory, ahead, most)?,
            Self::Packed(ring) => ring.look_ahead(memory, ahead, most),
        }
        Ok(ahead.len())
    }

    /// Whether one request is there by itself, after [`Self::has_more`] has found some: not one of an earlier process.
    #[inline]
    pub(crate) fn has_one(&self) -> bool {
        match self {
            Self::Split(ring) => ring.has_one(),
            Self::Packed(ring) => ring.has_one(),
        }
    }

    /// The head of the one request [that is there](Self::has_one), and what it leads to, if it may be taken and is plain.
    #[expect(clippy::inline_always, reason = "what it finds stays in registers")]
    #[inline(always)]
    pub(crate) fn only(&mut self, memory: &MemoryTable) -> Option<(u16, Plain)> {
        match self {
            Self::Split(ring) => ring.only(memory),
            Self::Packed(ring) => ring.only(memory),
        }
    }

    /// Has the line fetched whose change tells the guest of an answer, where that is another one than its request's: it is about to be changed.
    #[inline]
    pub(crate) fn fetch_index(&self) {
        match self {
            Self::Split(ring) => ring.fetch_index(),
            Self::Packed(_) => {}
        }
    }

    /// Takes the request that was looked at as the next one.
    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    pub(crate) fn take_plain(&mut self, head: u16) -> Result<(), RingError> {
        match self {
            Self::Split(ring) => ring.accept(head),
            Self::Packed(ring) => ring.accept(head),
        }
    }

    /// Gives requests back as one batch.
    #[expect(clippy::inline_always, reason = "of a batch of one, and without a log, little is left")]
    #[inline(always)]
    pub(crate) fn give_back(&mut self, batch: &[Done], log: Option<&DirtyLog>) {
        match self {
            Self::Split(ring) => ring.give_back(batch, log),
            Self::Packed(ring) => ring.give_back(batch, log),
        }
    }

    /// Whether the guest wants to be interrupted for what was given back since the last call.
    #[inline]
    pub(crate) fn wants_call(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.wants_call(),
            Self::Packed(ring) => ring.wants_call(),
        }
    }

    /// Asks the guest to kick, then looks once more whether there is something to take.
    pub(crate) fn arm(&mut self, log: Option<&DirtyLog>) -> bool {
        match self {
            Self::Split(ring) => ring.arm(log),
            Self::Packed(ring) => ring.arm(log),
        }
    }

    /// Tells the guest that kicks are not needed.
    pub(crate) fn disarm(&mut self, log: Option<&DirtyLog>) {
        match self {
            Self::Split(ring) => ring.disarm(log),
            Self::Packed(ring) => ring.disarm(log),
        }
    }

    /// Marks all that is ours to write, whoever wrote it.
    pub(crate) fn mark(&self, log: &DirtyLog) {
        match self {
            Self::Split(ring) => ring.mark(log),
            Self::Packed(ring) => ring.mark(log),
        }
    }

    /// Where to go on after a stop: what `GET_VRING_BASE` answers.
    pub(crate) fn base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.base(),
            Self::Packed(ring) => ring.base(),
        }
    }

    /// Whether nothing was ever given back in its memory since a driver made it: used descriptors are never all zeroes, for each of our
    /// requests has a status, and the last place is used before the first one is used again.
    pub(crate) fn is_fresh(&self) -> bool {
        match self {
            Self::Split(ring) => ring.is_fresh(),
            Self::Packed(ring) => ring.is_fresh(),
        }
    }

    /// Requests that were taken and not given back.
    pub(crate) fn in_flight(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.in_flight(),
            Self::Packed(ring) => ring.in_flight(),
        }
    }

    /// Requests that the guest has made available and that are not taken yet, as far as is known: for who counts them only.
    #[cold]
    pub(crate) fn pending(&mut self) -> Result<u32, RingError> {
        match self {
            Self::Split(ring) => ring.pending(),
            Self::Packed(ring) => Ok(ring.pending()),
        }
    }

    /// Whether requests of an earlier process wait to be taken.
    pub(crate) fn has_left_over(&self) -> bool {
        match self {
            Self::Split(ring) => ring.has_left_over(),
            Self::Packed(ring) => ring.has_left_over(),
        }
    }

    /// Whether what is taken is on record: whoever goes on with that does it again.
    pub(crate) fn is_on_record(&self) -> bool {
        match self {
            Self::Split(ring) => ring.is_on_record(),
            Self::Packed(ring) => ring.is_on_record(),
        }
    }

    /// Joins the record of requests under way: what an earlier process left is taken up.
    pub(crate) fn recover(&mut self, record: super::inflight::Record) -> Result<(), RingError> {
        match self {
            Self::Split(ring) => ring.recover(record),
            Self::Packed(ring) => ring.recover(record),
        }
    }
}
