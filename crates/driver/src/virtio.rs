//! A virtio-blk disk behind a vhost-user socket, driven at next to no cost per request: for measuring, as [`LeanQueue`](crate::LeanQueue) is.
//!
//! ```text
//!   begin(id, lba) … ring ──► available ring ──► back end ──► used ring ──► take(at least n): the requests that are free again
//! ```
//!
//! One queue, split (Virtio 1.2, 2.7) or packed (2.8). Every request has its indirect table, its header, its data and its status from the start, as a Linux guest
//! would lay them out; one that begins costs its sector and a place in the available ring, or a descriptor in the packed one. Nobody interrupts, and the back end is
//! notified only when it asks for it.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{Ordering, fence},
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};
use thiserror::Error;
use zerocopy::{Immutable, IntoBytes};

use crate::{
    dma::{DmaBuffer, DmaError, DmaMemory, PAGE_SIZE, Pages},
    shared::{SharedRing, SharedU32},
    vhost_user::{VhostUser, VhostUserError, code},
};

/// Bytes of a sector, the unit of every virtio disk.
pub const SECTOR: u64 = 512;

const INDIRECT: u64 = 1 << 28;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;
const PACKED: u64 = 1 << 34;
/// The protocol feature by which a disk tells its size.
const CONFIG: u64 = 1 << 9;

/// Flags of a descriptor (Virtio 1.2, 2.7.5), of the used ring and of the available ring.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const TABLE: u16 = 4;
/// Bytes of a request's table.
const TABLE_BYTES: u64 = 48;
const NO_NOTIFY: u32 = 1;
const NO_INTERRUPT: u32 = 1;
/// Flags of a packed ring's descriptor (2.8.1), and of an area that says what is to be told (2.8.14): nothing.
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
const NOTHING: u32 = 1 << 16;

/// Where the memory begins, for the guest that we are and for its monitor.
const BASE: u64 = 1 << 32;
/// Most requests: a queue of as many entries is what all back ends take.
const MOST: u16 = 256;

/// Why a disk could not be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VirtioError {
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] VhostUserError),
    /// The back end lacks something that is needed.
    #[error("{}: the back end does not offer {what}", path.display())]
    NotOffered {
        /// The socket.
        path: PathBuf,
        /// What it lacks.
        what: &'static str,
    },
    /// More requests than a queue has.
    #[error("{wanted} requests at a time: 1 to {MOST} are possible")]
    Depth {
        /// As many as were asked for.
        wanted: u32,
    },
    /// No memory to share.
    #[error(transparent)]
    Memory(#[from] DmaError),
    /// No event fd.
    #[error("making an event fd")]
    EventFd(#[source] io::Error),
    /// The back end used a request that is not in flight.
    #[error("the back end says that request {id} has ended, which is not in flight")]
    NotInFlight {
        /// The request.
        id: u32,
    },
    /// The request failed.
    #[error("request {id} ended with status {status}")]
    Failed {
        /// The request.
        id: u16,
        /// 1: an I/O error, 2: not supported.
        status: u8,
    },
    /// The back end has hung up.
    #[error("the back end has hung up")]
    Gone,
}

/// What all requests do.
#[derive(Clone, Copy, Debug)]
pub struct VirtioOptions {
    /// Requests, which is the most that can be in flight.
    pub depth: u32,
    /// Bytes of each.
    pub bytes: usize,
    /// They write; otherwise they read.
    pub write: bool,
    /// The queue is a packed one.
    pub packed: bool,
    /// What their memory consists of.
    pub pages: Pages,
    /// Longest wait for an answer of the back end while it is set up.
    pub timeout: Duration,
}

/// A descriptor of a split ring, or of a packed one.
#[derive(Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
struct Descriptor {
    address: u64,
    len: u32,
    /// Flags and the next one, or a name and flags.
    more: [u16; 2],
}

impl Descriptor {
    fn new(packed: bool, address: u64, len: u32, flags: u16, next: u16) -> Self {
        Self { address, len, more: if packed { [0, flags] } else { [flags, next] } }
    }
}

/// Where requests become known to the back end, and their ends to us.
enum Ring {
    Split {
        /// Flags and index, as one word each.
        available: SharedU32,
        used: SharedU32,
        /// The available ring with its flags and index before it; the used ring's elements.
        heads: SharedRing<u16>,
        elements: SharedRing<u64>,
    },
    Packed {
        /// Two words a descriptor, of which the second has length, name and flags.
        descriptors: SharedRing<u64>,
        /// What the back end wants to be told.
        wish: SharedU32,
        /// Of request 0; those of the others follow.
        tables: u64,
    },
}

impl Ring {
    /// Of so many entries, with descriptors at the beginning of `rings`; `tables` are those of a packed one.
    fn new(rings: &DmaBuffer, (available, used): (usize, usize), entries: u16, tables: Option<u64>) -> Self {
        let whole = "parts lie within the buffer that was allocated for them";
        let Some(tables) = tables else {
            return Self::Split {
                available: rings.word(available).expect(whole),
                used: rings.word(used).expect(whole),
                heads: rings.ring_at(available, u32::from(entries) + 2).expect(whole),
                // The used ring begins in the middle of a word, so that its elements are words.
                elements: rings.ring_at(used + 4, u32::from(entries)).expect(whole),
            };
        };
        rings.word(available).expect(whole).store(NOTHING);
        let descriptors = rings.ring_at(0, u32::from(entries) * 2).expect(whole);
        Self::Packed { descriptors, wish: rings.word(used).expect(whole), tables }
    }
}

/// A disk with one queue, used by one thread.
pub struct VirtioQueue {
    wire: VhostUser,
    kick: OwnedFd,
    ring: Ring,
    /// Two words for each request, of which the second is the sector.
    headers: SharedRing<u64>,
    /// A word for each request, of which the first byte is the status.
    statuses: SharedRing<u64>,
    /// What was last written: what would be the same again is left alone.
    sectors: Box<[u64]>,
    slots: Box<[u16]>,
    busy: Box<[bool]>,
    entries: u16,
    in_flight: usize,
    next_available: u16,
    next_used: u16,
    capacity: u64,
    data: DmaBuffer,
    /// Kept for their lives.
    _parts: [DmaBuffer; 4],
    _call: OwnedFd,
}

impl VirtioQueue {
    /// Connects, negotiates, and makes all requests.
    pub fn connect(path: &Path, options: &VirtioOptions) -> Result<Self, VirtioError> {
        let depth = u16::try_from(options.depth).ok().filter(|depth| (1..=MOST).contains(depth));
        let depth = depth.ok_or(VirtioError::Depth { wanted: options.depth })?;
        let entries = depth.next_power_of_two().max(2);
        let stride = options.bytes.next_multiple_of(PAGE_SIZE);
        let size = usize::from(depth) * (stride + 64) + 8 * PAGE_SIZE;
        let granularity = options.pages.granularity().max(2 << 20);
        let memory = DmaMemory::of_pages(options.pages, BASE, size.next_multiple_of(granularity))?;
        let rings = memory.alloc(3 * PAGE_SIZE)?;
        let tables = memory.alloc(usize::from(depth) * 48)?;
        let headers = memory.alloc(usize::from(depth) * 16)?;
        let statuses = memory.alloc(usize::from(depth) * 8)?;
        let data = memory.alloc(usize::from(depth) * stride)?;
        for id in 0..usize::from(depth) {
            let direction = if options.write { 0 } else { WRITE };
            let table = [
                (headers.iova() + id as u64 * 16, 16, NEXT),
                (data.iova() + (id * stride) as u64, options.bytes, NEXT | direction),
                (statuses.iova() + id as u64 * 8, 1, WRITE),
            ];
            for ((address, len, flags), next) in table.into_iter().zip(1..) {
                let descriptor = Descriptor::new(options.packed, address, len as u32, flags, next);
                tables.write_value(id * 48 + (usize::from(next) - 1) * 16, &descriptor);
            }
            if !options.packed {
                let head = Descriptor::new(false, tables.iova() + id as u64 * TABLE_BYTES, TABLE_BYTES as u32, TABLE, 0);
                rings.write_value(id * 16, &head);
            }
            headers.write_value(id * 16, &[u32::from(options.write), 0]);
        }
        let (kick, call) = (event()?, event()?);
        let (available, used) = (PAGE_SIZE, 2 * PAGE_SIZE + 4);
        let mut wire = VhostUser::connect(path, options.timeout)?;
        let capacity = negotiate(&mut wire, path, options.packed)?;
        wire.share(BASE, BASE, memory.range().len as u64, memory.fd())?;
        let whole = "parts lie within the buffers that were allocated for them";
        let ring = Ring::new(&rings, (available, used), entries, options.packed.then(|| tables.iova()));
        let addresses = [0, used, available].map(|at| rings.iova() + at as u64);
        start(&mut wire, (entries, options.packed), addresses, &kick, &call)?;
        Ok(Self {
            wire,
            kick,
            ring,
            headers: headers.ring(u32::from(depth) * 2).expect(whole),
            statuses: statuses.ring(u32::from(depth)).expect(whole),
            sectors: vec![0; depth.into()].into(),
            slots: vec![u16::MAX; entries.into()].into(),
            busy: vec![false; depth.into()].into(),
            entries,
            in_flight: 0,
            next_available: 0,
            next_used: 0,
            capacity,
            data,
            _parts: [rings, tables, headers, statuses],
            _call: call,
        })
    }

    /// The disk's size in sectors, as it was when it was connected.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The memory of all requests, one after the other.
    pub fn data(&self) -> &DmaBuffer {
        &self.data
    }

    /// The number of requests.
    pub fn depth(&self) -> usize {
        self.busy.len()
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Begins a request at this sector, without telling of it. (In a packed ring, who looks finds it already.)
    ///
    /// # Panics
    /// When it is in flight.
    #[inline]
    pub fn begin(&mut self, id: u16, sector: u64) {
        let busy = &mut self.busy[usize::from(id)];
        assert!(!*busy, "request {id} is in flight");
        *busy = true;
        self.in_flight += 1;
        let last = &mut self.sectors[usize::from(id)];
        if *last != sector {
            *last = sector;
            self.headers.write(u32::from(id) * 2 + 1, sector);
        }
        // A queue has a power of two of entries, so that indexes may wrap (2.7.13).
        let slot = self.next_available & (self.entries - 1);
        let head = &mut self.slots[usize::from(slot)];
        let is_other = std::mem::replace(head, id) != id;
        match &self.ring {
            Ring::Split { heads, .. } if is_other => heads.write(u32::from(slot) + 2, id),
            Ring::Split { .. } => {}
            Ring::Packed { descriptors, tables, .. } => {
                if is_other {
                    descriptors.write(u32::from(slot) * 2, tables + u64::from(id) * TABLE_BYTES);
                }
                let flags = TABLE | if self.round(self.next_available) { AVAILABLE } else { USED };
                // Length and name are the back end's from the last round.
                descriptors.publish(u32::from(slot) * 2 + 1, TABLE_BYTES | u64::from(id) << 32 | u64::from(flags) << 48);
            }
        }
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Tells of what was begun.
    ///
    /// # Errors
    /// [`VirtioError::Gone`] when the back end cannot be notified.
    #[inline]
    pub fn ring(&mut self) -> Result<(), VirtioError> {
        if let Ring::Split { available, .. } = &self.ring {
            // Release: who sees the index sees the heads and headers before it.
            available.store(u32::from(self.next_available) << 16 | NO_INTERRUPT);
        }
        // Between our store of the index (or of the last descriptor's flags) and our load of the wish: a back end that begins to want notifications stores
        // that and then looks once more, with a full fence between. Without both fences each could miss the other's store, and a request would lie unseen.
        fence(Ordering::SeqCst);
        let unwanted = match &self.ring {
            Ring::Split { used, .. } => used.load() & NO_NOTIFY != 0,
            Ring::Packed { wish, .. } => wish.load() & NOTHING != 0,
        };
        if unwanted {
            return Ok(());
        }
        match rustix::io::write(&self.kick, &1_u64.to_ne_bytes()) {
            // Full is as good as rung.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(_) => Err(VirtioError::Gone),
        }
    }

    /// Takes all requests that have ended, once there are `at_least` (or as many as are in flight, if that is less).
    ///
    /// # Errors
    /// [`VirtioError::Failed`], [`VirtioError::NotInFlight`].
    #[inline]
    pub fn take(&mut self, at_least: usize, taken: &mut Vec<u16>) -> Result<(), VirtioError> {
        taken.clear();
        if self.in_flight == 0 {
            return Ok(());
        }
        let at_least = at_least.clamp(1, self.in_flight);
        let index = match &self.ring {
            // Acquire: the elements and statuses were written before the index.
            Ring::Split { used, .. } => Some((used.load() >> 16) as u16),
            // The first of a batch is shown last, and there may be several batches: the last one's end tells nothing of those before it.
            Ring::Packed { .. } => {
                let shown = (0..at_least as u16).rev().all(|i| self.used_at(self.next_used.wrapping_add(i)).is_some());
                (!shown).then_some(self.next_used)
            }
        };
        if index.is_some_and(|index| usize::from(index.wrapping_sub(self.next_used)) < at_least) {
            return Ok(());
        }
        while index.is_none_or(|index| index != self.next_used) {
            let id = match &self.ring {
                Ring::Split { elements, .. } => elements.load_word(u32::from(self.next_used & (self.entries - 1)), 0) as u32,
                Ring::Packed { .. } if self.in_flight == 0 => break,
                Ring::Packed { .. } => match self.used_at(self.next_used) {
                    Some(id) => id,
                    None => break,
                },
            };
            match usize::try_from(id).ok().and_then(|id| self.busy.get_mut(id)) {
                Some(busy) if *busy => *busy = false,
                _ => return Err(VirtioError::NotInFlight { id }),
            }
            self.next_used = self.next_used.wrapping_add(1);
            self.in_flight -= 1;
            let status = self.statuses.load_word(id, 0) as u8;
            if status != 0 {
                return Err(VirtioError::Failed { id: id as u16, status });
            }
            taken.push(id as u16);
        }
        Ok(())
    }

    /// The wrap counter of a packed ring's place: whether it is visited for an odd time.
    #[inline]
    fn round(&self, place: u16) -> bool {
        place & self.entries == 0
    }

    /// Which request a place of a packed ring says has ended, if it says so.
    #[inline]
    fn used_at(&self, place: u16) -> Option<u32> {
        let Ring::Packed { descriptors, .. } = &self.ring else { return None };
        // Acquire: all else was written before the flags.
        let word = descriptors.load_word(u32::from(place & (self.entries - 1)) * 2 + 1, 0);
        let both = AVAILABLE | USED;
        let ended = (word >> 48) as u16 & both == if self.round(place) { both } else { 0 };
        ended.then_some((word >> 32) as u32 & 0xffff)
    }

    /// Fails when the back end's process is gone: shared memory alone does not tell.
    pub fn check(&self) -> Result<(), VirtioError> {
        if self.wire.is_gone() { Err(VirtioError::Gone) } else { Ok(()) }
    }
}

fn event() -> Result<OwnedFd, VirtioError> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| VirtioError::EventFd(errno.into()))
}

/// Agrees on features; the disk's size in sectors.
fn negotiate(wire: &mut VhostUser, path: &Path, packed: bool) -> Result<u64, VirtioError> {
    let lacks = |what| VirtioError::NotOffered { path: path.to_owned(), what };
    let offered = wire.ask(code::GET_FEATURES)?;
    let packed = if packed { PACKED } else { 0 };
    for (feature, what) in [
        (packed, "packed rings (VIRTIO_F_RING_PACKED)"),
        (VERSION_1, "virtio 1 (VIRTIO_F_VERSION_1)"),
        (INDIRECT, "indirect descriptors (VIRTIO_F_INDIRECT_DESC)"),
        (PROTOCOL_FEATURES, "the protocol's own features (VHOST_USER_F_PROTOCOL_FEATURES)"),
    ] {
        if offered & feature != feature {
            return Err(lacks(what));
        }
    }
    if wire.ask(code::GET_PROTOCOL_FEATURES)? & CONFIG == 0 {
        return Err(lacks("its configuration (VHOST_USER_PROTOCOL_F_CONFIG)"));
    }
    wire.tell(code::SET_PROTOCOL_FEATURES, &[CONFIG], None)?;
    wire.tell(code::SET_OWNER, &[], None)?;
    wire.tell(code::SET_FEATURES, &[VERSION_1 | INDIRECT | PROTOCOL_FEATURES | packed], None)?;
    Ok(wire.capacity()?)
}

/// Starts queue 0, with descriptors, used ring and available ring (or the back end's and our areas of wishes) at these addresses.
fn start(
    wire: &mut VhostUser,
    (entries, packed): (u16, bool),
    [descriptors, used, available]: [u64; 3],
    kick: &OwnedFd,
    call: &OwnedFd,
) -> Result<(), VhostUserError> {
    wire.tell(code::SET_VRING_NUM, &[u64::from(entries) << 32], None)?;
    // A packed ring begins with both wrap counters at one.
    wire.tell(code::SET_VRING_BASE, &[if packed { 0x8000_8000 << 32 } else { 0 }], None)?;
    wire.tell(code::SET_VRING_ADDR, &[0, descriptors, used, available, 0], None)?;
    wire.tell(code::SET_VRING_CALL, &[0], Some(call.as_fd()))?;
    wire.tell(code::SET_VRING_KICK, &[0], Some(kick.as_fd()))?;
    // With the protocol's own features a queue is off until it is told to be on.
    wire.tell(code::SET_VRING_ENABLE, &[1 << 32], None)?;
    wire.check()
}
