//! The record of requests under way, in memory that outlives us: what a successor needs so that no request is lost or done twice
//! after the guest has seen its end. Layouts and rules are those of vhost-user.rst, "Inflight I/O tracking".
//!
//! ```text
//!   queue 0: header, one state per descriptor │ queue 1 … │ ours: MAGIC, write cache mode, block size
//! ```
//!
//! The front end keeps the file and hands it back when it connects again. It may scribble over it: everything that is read back is
//! checked, and what we need while we run we keep ourselves. Stores become visible to a successor in program order (it maps the
//! file only after we are gone), so where two stores must not trade places a compiler fence stands between them.

use std::{
    io,
    os::fd::OwnedFd,
    rc::Rc,
    sync::atomic::{Ordering, compiler_fence},
};

use millrace_block::BlockSize;
use millrace_memory::{MapError, PeerBytes};
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::message::Inflight;

const VERSION: u16 = 1;
/// Queues' parts start on cache lines of their own.
const ALIGN: usize = 64;
/// The last part: what of the device itself must outlive us. "MRvblk01".
const MAGIC: u64 = u64::from_le_bytes(*b"MRvblk01");
const OWN_SIZE: usize = 64;

/// Why a record cannot be used.
#[derive(Debug, Error)]
pub(crate) enum InflightError {
    #[error("the record of requests under way is garbled: {0}")]
    Garbled(&'static str),
    #[error("the record of requests under way has version {0}, not {VERSION}")]
    Version(u16),
    #[error("the record of requests under way has room for {room} descriptors, and the queue has {size}")]
    Room { room: u16, size: u16 },
    #[error("the record of requests under way: {0}")]
    Map(#[from] MapError),
    #[error("no memory for a record of requests under way: {0}")]
    Create(#[from] io::Error),
}

#[inline]
fn commit() {
    compiler_fence(Ordering::Release);
}

/// The whole file.
#[derive(Clone, Debug)]
pub(crate) struct InflightRegion {
    bytes: Rc<PeerBytes>,
    queues: u16,
    queue_size: u16,
}

/// Bytes of one queue's part: room for either kind of ring.
fn stride(queue_size: u16) -> usize {
    let split = split::HEADER + usize::from(queue_size) * split::STATE;
    let packed = packed::HEADER + usize::from(queue_size) * packed::STATE;
    split.max(packed).next_multiple_of(ALIGN)
}

fn total(queues: u16, queue_size: u16) -> usize {
    stride(queue_size) * usize::from(queues) + OWN_SIZE
}

impl InflightRegion {
    /// A fresh file for so many queues, and the answer to `GET_INFLIGHT_FD`.
    pub(crate) fn create(queues: u16, queue_size: u16) -> Result<(OwnedFd, Inflight), InflightError> {
        let size = total(queues, queue_size) as u64;
        let (_, file) = PeerBytes::create("millrace-inflight", size)?;
        Ok((file, Inflight { size, offset: 0, queues, queue_size, padding: 0 }))
    }

    /// A file that the front end kept.
    pub(crate) fn open(what: &Inflight, file: &OwnedFd) -> Result<Self, InflightError> {
        let Inflight { size, offset, queues, queue_size, .. } = *what;
        if queues == 0 || queue_size == 0 || size < total(queues, queue_size) as u64 {
            return Err(InflightError::Garbled("it is too small for its queues"));
        }
        Ok(Self { bytes: Rc::new(PeerBytes::map(file, offset, size)?), queues, queue_size })
    }

    /// The part of one queue.
    pub(crate) fn record(&self, queue: usize) -> Option<Record> {
        (queue < usize::from(self.queues)).then(|| Record {
            bytes: Rc::clone(&self.bytes),
            at: stride(self.queue_size) * queue,
            room: self.queue_size,
        })
    }

    /// Whether the front end took the memory away.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.bytes.is_poisoned()
    }

    fn own(&self) -> usize {
        stride(self.queue_size) * usize::from(self.queues)
    }

    /// The write cache mode that the guest had chosen, if it had.
    pub(crate) fn write_back(&self) -> Option<bool> {
        let [magic, mode]: [u64; 2] = self.bytes.read_value(self.own());
        (magic == MAGIC && mode <= 1).then_some(mode == 1)
    }

    /// Remembers the write cache mode.
    pub(crate) fn set_write_back(&self, on: bool) {
        self.bytes.store_u64(self.own() + 8, on.into());
        commit();
        self.bytes.store_u64(self.own(), MAGIC);
    }

    /// The block size that the guest was told, if that is known. Earlier workers left a zero here.
    pub(crate) fn block_size(&self) -> Option<BlockSize> {
        let [magic, _, bytes]: [u64; 3] = self.bytes.read_value(self.own());
        u32::try_from(bytes).ok().filter(|_| magic == MAGIC).and_then(BlockSize::from_bytes)
    }

    /// Remembers the block size; it counts once the mode is there.
    pub(crate) fn set_block_size(&self, block_size: BlockSize) {
        self.bytes.store_u64(self.own() + 16, block_size.bytes().into());
    }
}

/// One queue's part of the file.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    bytes: Rc<PeerBytes>,
    at: usize,
    /// Descriptors it has states for.
    room: u16,
}

impl Record {
    fn load<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        self.bytes.read_value(self.at + offset)
    }

    fn store<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.bytes.write_value(self.at + offset, value);
    }

    fn store_u8(&self, offset: usize, value: u8) {
        self.bytes.store_u8(self.at + offset, value);
    }

    fn store_u16(&self, offset: usize, value: u16) {
        self.bytes.store_u16(self.at + offset, value);
    }

    fn store_u64(&self, offset: usize, value: u64) {
        self.bytes.store_u64(self.at + offset, value);
    }

    /// Whether it was set up before.
    fn check(&self, version: u16, room: u16, size: u16) -> Result<bool, InflightError> {
        if size > self.room {
            return Err(InflightError::Room { room: self.room, size });
        }
        match version {
            0 => Ok(false),
            VERSION if room == self.room => Ok(true),
            VERSION => Err(InflightError::Garbled("its parts have another size")),
            other => Err(InflightError::Version(other)),
        }
    }
}

pub(crate) use packed::{PackedHeader, PackedRecord, PackedState};
pub(crate) use split::SplitRecord;

mod split {
    use super::{FromBytes, Immutable, InflightError, IntoBytes, Record, VERSION, commit};

    #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
    #[repr(C)]
    struct Header {
        features: u64,
        version: u16,
        desc_num: u16,
        last_batch_head: u16,
        used_idx: u16,
    }

    #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
    #[repr(C)]
    struct State {
        inflight: u8,
        padding: [u8; 5],
        next: u16,
        counter: u64,
    }

    pub(super) const HEADER: usize = size_of::<Header>();
    pub(super) const STATE: usize = size_of::<State>();
    const VERSION_AT: usize = 8;
    const LAST_BATCH_HEAD: usize = 12;
    const USED_IDX: usize = 14;
    const NEXT: usize = 6;
    const COUNTER: usize = 8;

    fn state(head: u16) -> usize {
        HEADER + usize::from(head) * STATE
    }

    /// What is under way in a split ring; without a file nothing is kept.
    #[derive(Debug, Default)]
    pub(crate) struct SplitRecord {
        record: Option<Record>,
        counter: u64,
        last_batch_head: u16,
        left_over: Vec<u16>,
    }

    impl SplitRecord {
        /// Takes up a queue's part for a ring of `size` entries whose used index is `used_index`.
        pub(crate) fn join(record: Record, size: u16, used_index: u16) -> Result<Self, InflightError> {
            let header: Header = record.load(0);
            if !record.check(header.version, header.desc_num, size)? {
                Self::set_up(&record, used_index);
                return Ok(Self { record: Some(record), ..Self::default() });
            }
            let behind = used_index.wrapping_sub(header.used_idx);
            if behind > record.room {
                return Err(InflightError::Garbled("its used index is not near the ring's"));
            }
            // The last batch became visible to the guest, but was not crossed off.
            let mut head = header.last_batch_head;
            for _ in 0..behind {
                if head >= record.room {
                    return Err(InflightError::Garbled("its last batch names no descriptor"));
                }
                record.store_u8(state(head), 0);
                head = record.load::<State>(state(head)).next;
            }
            commit();
            record.store_u16(USED_IDX, used_index);
            let mut found: Vec<(u64, u16)> = (0..size)
                .map(|head| (record.load::<State>(state(head)), head))
                .filter(|(state, _)| state.inflight == 1)
                .map(|(state, head)| (state.counter, head))
                .collect();
            found.sort_unstable();
            let counter = found.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
            let left_over = found.into_iter().map(|(_, head)| head).collect();
            Ok(Self { record: Some(record), counter, last_batch_head: header.last_batch_head, left_over })
        }

        fn set_up(record: &Record, used_index: u16) {
            let empty = State { inflight: 0, padding: [0; 5], next: 0, counter: 0 };
            (0..record.room).for_each(|head| record.store(state(head), &empty));
            let header = Header { features: 0, version: 0, desc_num: record.room, last_batch_head: 0, used_idx: used_index };
            record.store(0, &header);
            commit();
            record.store_u16(VERSION_AT, VERSION);
        }

        /// Whether there is a file.
        pub(crate) fn is_shared(&self) -> bool {
            self.record.is_some()
        }

        /// Heads that an earlier process had taken, in its order.
        pub(crate) fn take_left_over(&mut self) -> Vec<u16> {
            std::mem::take(&mut self.left_over)
        }

        /// A head was taken from the available ring.
        #[expect(clippy::inline_always, reason = "without a record nothing is left of it")]
        #[inline(always)]
        pub(crate) fn taken(&mut self, head: u16) {
            let Some(record) = &self.record else { return };
            record.store_u64(state(head) + COUNTER, self.counter);
            self.counter = self.counter.wrapping_add(1);
            commit();
            record.store_u8(state(head), 1);
            commit();
        }

        /// A head is in the batch that is about to become visible.
        #[expect(clippy::inline_always, reason = "without a record nothing is left of it")]
        #[inline(always)]
        pub(crate) fn giving_back(&mut self, head: u16) {
            let Some(record) = &self.record else { return };
            record.store_u16(state(head) + NEXT, self.last_batch_head);
            commit();
            self.last_batch_head = head;
            record.store_u16(LAST_BATCH_HEAD, head);
        }

        /// The batch with this head is visible.
        #[expect(clippy::inline_always, reason = "without a record nothing is left of it")]
        #[inline(always)]
        pub(crate) fn given_back(&mut self, head: u16) {
            if let Some(record) = &self.record {
                record.store_u8(state(head), 0);
            }
        }

        /// All of the batch is crossed off.
        #[expect(clippy::inline_always, reason = "without a record nothing is left of it")]
        #[inline(always)]
        pub(crate) fn batch_ends(&mut self, used_index: u16) {
            if let Some(record) = &self.record {
                commit();
                record.store_u16(USED_IDX, used_index);
                commit();
            }
        }
    }
}

mod packed {
    use super::{FromBytes, Immutable, InflightError, IntoBytes, Record, VERSION, commit};

    /// A packed ring's part begins so.
    #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
    #[repr(C)]
    pub(crate) struct PackedHeader {
        features: u64,
        version: u16,
        desc_num: u16,
        pub(crate) free_head: u16,
        pub(crate) old_free_head: u16,
        pub(crate) used_idx: u16,
        pub(crate) old_used_idx: u16,
        pub(crate) used_wrap: u8,
        pub(crate) old_used_wrap: u8,
        padding: [u8; 10],
    }

    /// One descriptor that was fetched, or an entry of the free list.
    #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
    #[repr(C)]
    pub(crate) struct PackedState {
        pub(crate) inflight: u8,
        padding: u8,
        pub(crate) next: u16,
        pub(crate) last: u16,
        pub(crate) num: u16,
        pub(crate) counter: u64,
        pub(crate) id: u16,
        pub(crate) flags: u16,
        pub(crate) len: u32,
        pub(crate) addr: u64,
    }

    pub(super) const HEADER: usize = size_of::<PackedHeader>();
    pub(super) const STATE: usize = size_of::<PackedState>();
    const VERSION_AT: usize = 8;
    const FREE_HEAD: usize = 12;
    const OLD_FREE_HEAD: usize = 14;
    /// Both used positions: one aligned word, so that one store moves them.
    const USED: usize = 16;
    const NEXT: usize = 2;
    const LAST: usize = 4;
    const NUM: usize = 6;
    const COUNTER: usize = 8;
    const ID: usize = 16;

    fn state(index: u16) -> usize {
        HEADER + usize::from(index) * STATE
    }

    /// The word at [`USED`]: positions are an index and a wrap counter.
    fn used_word(used: (u16, bool), old: (u16, bool)) -> u64 {
        u64::from(used.0) | u64::from(old.0) << 16 | u64::from(used.1) << 32 | u64::from(old.1) << 40
    }

    /// The file's view of a packed ring; without a file nothing is kept.
    #[derive(Debug, Default)]
    pub(crate) struct PackedRecord(Option<Record>);

    impl PackedRecord {
        /// Takes up a queue's part: `Some` when it was in use before.
        pub(crate) fn join(
            record: Record,
            size: u16,
            used: (u16, bool),
        ) -> Result<(Self, Option<PackedHeader>), InflightError> {
            let header: PackedHeader = record.load(0);
            if record.check(header.version, header.desc_num, size)? {
                return Ok((Self(Some(record)), Some(header)));
            }
            for index in 0..record.room {
                record.store(state(index), &[0_u8; STATE]);
                record.store_u16(state(index) + NEXT, index + 1);
            }
            let (used_idx, wrap) = (used.0, used.1.into());
            let header = PackedHeader {
                features: 0,
                version: 0,
                desc_num: record.room,
                free_head: 0,
                old_free_head: 0,
                used_idx,
                old_used_idx: used_idx,
                used_wrap: wrap,
                old_used_wrap: wrap,
                padding: [0; 10],
            };
            record.store(0, &header);
            commit();
            record.store_u16(VERSION_AT, VERSION);
            Ok((Self(Some(record)), None))
        }

        /// States there are.
        pub(crate) fn room(&self) -> Option<u16> {
            self.0.as_ref().map(|record| record.room)
        }

        /// The state of a descriptor, for recovery.
        pub(crate) fn state(&self, index: u16) -> Option<PackedState> {
            self.0.as_ref().filter(|record| index < record.room).map(|record| record.load(state(index)))
        }

        /// A descriptor was fetched into a state.
        #[inline]
        pub(crate) fn fetched(&self, index: u16, addr: u64, len: u32, flags: u16, id: u16) {
            let Some(record) = &self.0 else { return };
            let words = [u64::from(id) | u64::from(flags) << 16 | u64::from(len) << 32, addr];
            record.store(state(index) + ID, &words);
        }

        /// A whole chain was fetched: from now on it is under way.
        #[inline]
        pub(crate) fn taken(&self, head: u16, last: u16, num: u16, counter: u64, free_head: u16) {
            let Some(record) = &self.0 else { return };
            record.store_u16(state(head) + LAST, last);
            record.store_u16(state(head) + NUM, num);
            record.store_u64(state(head) + COUNTER, counter);
            record.store_u8(state(head), 1);
            record.store_u16(FREE_HEAD, free_head);
            commit();
            // The one store that counts.
            record.store_u16(OLD_FREE_HEAD, free_head);
            commit();
        }

        /// A chain's states go to the head of the free list; not for good before [`Self::batch_ends`].
        #[inline]
        pub(crate) fn freeing(&self, head: u16, last: u16, free_head: u16) {
            let Some(record) = &self.0 else { return };
            record.store_u16(state(last) + NEXT, free_head);
            record.store_u16(FREE_HEAD, head);
        }

        /// Where the used position will be once the batch is visible, and where it is.
        #[inline]
        pub(crate) fn moving(&self, used: (u16, bool), old: (u16, bool)) {
            let Some(record) = &self.0 else { return };
            commit();
            record.store_u64(USED, used_word(used, old));
            commit();
        }

        /// A chain of the batch that is visible now.
        #[inline]
        pub(crate) fn given_back(&self, head: u16) {
            if let Some(record) = &self.0 {
                record.store_u8(state(head), 0);
            }
        }

        /// All of the batch is crossed off.
        #[inline]
        pub(crate) fn batch_ends(&self, free_head: u16, used: (u16, bool)) {
            let Some(record) = &self.0 else { return };
            commit();
            record.store_u16(OLD_FREE_HEAD, free_head);
            commit();
            record.store_u64(USED, used_word(used, used));
            commit();
        }

        /// A rolled back, or completed, position.
        pub(crate) fn settle(&self, header: &PackedHeader) {
            let Some(record) = &self.0 else { return };
            record.store_u16(FREE_HEAD, header.free_head);
            record.store_u16(OLD_FREE_HEAD, header.free_head);
            commit();
            let used = (header.used_idx, header.used_wrap != 0);
            record.store_u64(USED, used_word(used, used));
            commit();
        }
    }
}
