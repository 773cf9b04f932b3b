//! Memory that a guest shares with us, and the only way to reach it.
//!
//! ```text
//!   guest address ──► GuestMemory::translate ──► Segment ──► copy / io_uring
//!   (hostile)          region table, checked      host pointer + length
//! ```
//!
//! Invariants:
//! * A [`Segment`] points into a mapping that stays mapped until [`GuestMemory::reclaim`], whose caller vouches that no
//!   segment made earlier is still in use. Unmapping only makes addresses unreachable at once; the pages go at `reclaim`.
//! * Bytes behind a segment may change at any instant. Nothing here hands out a Rust reference to them: data are copied
//!   out once, then checked, then used.
//! * A peer that truncates the file behind a mapping costs its own device only: see [`guard`].
//! * A peer that maps as much as it can keeps no other out: see `room`.
//!
//! It does not know NVMe: PRP and SGL walking lives with the front end that understands them.

mod bounce;
mod copy;
mod cursor;
mod desk;
mod fence;
mod file;
pub mod guard;
mod guest;
mod huge;
mod mapping;
mod once;
pub mod parity;
mod peer;
mod reach;
mod room;
mod segment;
mod shared;
mod store;
pub mod taker;
#[cfg(test)]
mod tests;
mod tlb;
mod written;

pub use bounce::{BUFFER_SIZE, BounceBuffer, BufferPool, Owner};
pub use copy::{Target, Unsettled, prefetch_to_write, settle_streams, streams_made};
pub use cursor::SegmentCursor;
pub use desk::{DESK_SIZE, Desk};
pub use fence::full_fence;
pub use file::FileMap;
pub use guest::{Access, AccessError, GuestAddress, GuestMemory, Loan, MAX_REGIONS, MapError, PAGE_SIZE, Protection};
pub use mapping::Mapping;
pub use once::{MOST_PLACES, Places, copy_and_sum, copy_to_all};
pub use peer::PeerBytes;
pub use reach::{Lent, Reach};
pub use segment::{Segment, copy_segments, total_len};
pub use shared::Shared;
pub use store::{ByteStore, OnFile};
