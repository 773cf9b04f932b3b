//! A virtio-blk disk behind a vhost-user socket, driven at next to no cost per request: for measuring, as [`LeanQueue`](crate::LeanQueue) is.
//!
//! ```text
//!   begin(id, lba) … ring ──► available ring ──► back end ──► used ring ──► take(at least n): the requests that are free again
//! ```
//!
//! One split queue (Virtio 1.2, 2.7). Every request has its indirect table, its header, its data and its status from the start, as a Linux guest
//! would lay them out; one that begins costs its sector and a place in the available ring. Nobody interrupts, and the back end is notified only when it asks for it.

use std::{
    io::{self, IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::atomic::{Ordering, fence},
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use thiserror::Error;
use zerocopy::{Immutable, IntoBytes};

use crate::{
    dma::{DmaBuffer, DmaError, DmaMemory, PAGE_SIZE, Pages},
    shared::{SharedRing, SharedU32},
};

/// Bytes of a sector, the unit of every virtio disk.
pub const SECTOR: u64 = 512;

/// Requests (QEMU, docs/interop/vhost-user.rst).
mod code {
    pub(super) const GET_FEATURES: u32 = 1;
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const SET_OWNER: u32 = 3;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(super) const SET_VRING_ENABLE: u32 = 18;
    pub(super) const GET_CONFIG: u32 = 24;
}

const INDIRECT: u64 = 1 << 28;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;
/// The protocol feature by which a disk tells its size.
const CONFIG: u64 = 1 << 9;

/// Flags of a descriptor (Virtio 1.2, 2.7.5), of the used ring and of the available ring.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const TABLE: u16 = 4;
const NO_NOTIFY: u32 = 1;
const NO_INTERRUPT: u32 = 1;

/// Where the memory begins, for the guest that we are and for its monitor.
const BASE: u64 = 1 << 32;
/// Most requests: a queue of as many entries is what all back ends take.
const MOST: u16 = 256;

/// Why a disk could not be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VirtioError {
    /// The socket failed.
    #[error("{}: {what}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
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
    /// What their memory consists of.
    pub pages: Pages,
    /// Longest wait for an answer of the back end while it is set up.
    pub timeout: Duration,
}

#[derive(Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// A disk with one queue, used by one thread.
pub struct VirtioQueue {
    stream: UnixStream,
    kick: OwnedFd,
    /// Flags and index, as one word each.
    available: SharedU32,
    used: SharedU32,
    /// The available ring with its flags and index before it; the used ring's elements.
    heads: SharedRing<u16>,
    elements: SharedRing<u64>,
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
                let descriptor = Descriptor { address, len: len as u32, flags, next };
                tables.write_value(id * 48 + (usize::from(next) - 1) * 16, &descriptor);
            }
            let head = Descriptor { address: tables.iova() + id as u64 * 48, len: 48, flags: TABLE, next: 0 };
            rings.write_value(id * 16, &head);
            headers.write_value(id * 16, &[u32::from(options.write), 0]);
        }
        let (kick, call) = (event(path)?, event(path)?);
        let (available, used) = (PAGE_SIZE, 2 * PAGE_SIZE + 4);
        let mut wire = Wire::connect(path, options.timeout)?;
        let capacity = wire.negotiate()?;
        wire.share(&memory)?;
        let addresses = [0, used, available].map(|at| rings.iova() + at as u64);
        wire.start(entries, addresses, &kick, &call)?;
        let whole = "parts lie within the buffers that were allocated for them";
        Ok(Self {
            stream: wire.stream,
            kick,
            available: rings.word(available).expect(whole),
            used: rings.word(used).expect(whole),
            heads: rings.ring_at(available, u32::from(entries) + 2).expect(whole),
            // The used ring begins in the middle of a word, so that its elements are words.
            elements: rings.ring_at(used + 4, u32::from(entries)).expect(whole),
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

    /// Begins a request at this sector, without telling of it.
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
        if *head != id {
            *head = id;
            self.heads.write(u32::from(slot) + 2, id);
        }
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Tells of what was begun.
    ///
    /// # Errors
    /// [`VirtioError::Gone`] when the back end cannot be notified.
    #[inline]
    pub fn ring(&mut self) -> Result<(), VirtioError> {
        // Release: who sees the index sees the heads and headers before it.
        self.available.store(u32::from(self.next_available) << 16 | NO_INTERRUPT);
        // Between our store of the index and our load of the flags: a back end that begins to want notifications stores that and then looks
        // at the index once more, with a full fence between. Without both fences each could miss the other's store, and a request would lie unseen.
        fence(Ordering::SeqCst);
        if self.used.load() & NO_NOTIFY != 0 {
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
        // Acquire: the elements and statuses were written before the index.
        let index = (self.used.load() >> 16) as u16;
        let ended = usize::from(index.wrapping_sub(self.next_used));
        if self.in_flight == 0 || ended < at_least.clamp(1, self.in_flight) {
            return Ok(());
        }
        while self.next_used != index {
            let id = self.elements.load_word(u32::from(self.next_used & (self.entries - 1)), 0) as u32;
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

    /// Fails when the back end's process is gone: shared memory alone does not tell.
    pub fn check(&self) -> Result<(), VirtioError> {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) if fds[0].revents().intersects(gone) => Err(VirtioError::Gone),
            _ => Ok(()),
        }
    }
}

fn event(path: &Path) -> Result<OwnedFd, VirtioError> {
    let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    made.map_err(|errno| VirtioError::Socket { path: path.to_owned(), what: "making an event fd", source: errno.into() })
}

/// The connection while it is set up.
struct Wire {
    stream: UnixStream,
    path: PathBuf,
    /// Queues are off until they are told to be on.
    enables: bool,
}

impl Wire {
    fn connect(path: &Path, timeout: Duration) -> Result<Self, VirtioError> {
        let failed = |source| VirtioError::Socket { path: path.to_owned(), what: "connecting", source };
        let stream = UnixStream::connect(path).map_err(failed)?;
        stream.set_read_timeout(Some(timeout)).map_err(failed)?;
        stream.set_write_timeout(Some(timeout)).map_err(failed)?;
        Ok(Self { stream, path: path.to_owned(), enables: false })
    }

    fn failed(&self, what: &'static str) -> impl Fn(io::Error) -> VirtioError + use<> {
        let path = self.path.clone();
        move |source| VirtioError::Socket { path: path.clone(), what, source }
    }

    fn lacks(&self, what: &'static str) -> VirtioError {
        VirtioError::NotOffered { path: self.path.clone(), what }
    }

    /// Features; the disk's size in sectors.
    fn negotiate(&mut self) -> Result<u64, VirtioError> {
        let offered = self.ask(code::GET_FEATURES)?;
        for (feature, what) in [
            (VERSION_1, "virtio 1 (VIRTIO_F_VERSION_1)"),
            (INDIRECT, "indirect descriptors (VIRTIO_F_INDIRECT_DESC)"),
            (PROTOCOL_FEATURES, "the protocol's own features (VHOST_USER_F_PROTOCOL_FEATURES)"),
        ] {
            if offered & feature == 0 {
                return Err(self.lacks(what));
            }
        }
        self.enables = true;
        if self.ask(code::GET_PROTOCOL_FEATURES)? & CONFIG == 0 {
            return Err(self.lacks("its configuration (VHOST_USER_PROTOCOL_F_CONFIG)"));
        }
        self.tell(code::SET_PROTOCOL_FEATURES, &[CONFIG], &[])?;
        self.tell(code::SET_OWNER, &[], &[])?;
        self.tell(code::SET_FEATURES, &[VERSION_1 | INDIRECT | PROTOCOL_FEATURES], &[])?;
        // Offset 0, 60 bytes, which is what all have; flags 0. The capacity is the first of them.
        let mut payload = [0; 72];
        payload[4] = 60;
        self.send(code::GET_CONFIG, &payload, &[])?;
        let answer = self.answer()?;
        let capacity = answer.get(12..20).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
        capacity.ok_or_else(|| self.failed("reading its configuration")(io::ErrorKind::InvalidData.into()))
    }

    /// One region: where it is for the guest, its size, where it is for the monitor, and in the file.
    fn share(&mut self, memory: &DmaMemory) -> Result<(), VirtioError> {
        self.tell(code::SET_MEM_TABLE, &[1, BASE, memory.range().len as u64, BASE, 0], &[memory.fd()])
    }

    /// Queue 0, with descriptors, used ring and available ring at these addresses.
    fn start(
        &mut self,
        entries: u16,
        [descriptors, used, available]: [u64; 3],
        kick: &OwnedFd,
        call: &OwnedFd,
    ) -> Result<(), VirtioError> {
        self.tell(code::SET_VRING_NUM, &[u64::from(entries) << 32], &[])?;
        self.tell(code::SET_VRING_BASE, &[0], &[])?;
        self.tell(code::SET_VRING_ADDR, &[0, descriptors, used, available, 0], &[])?;
        self.tell(code::SET_VRING_CALL, &[0], &[call.as_fd()])?;
        self.tell(code::SET_VRING_KICK, &[0], &[kick.as_fd()])?;
        if self.enables {
            self.tell(code::SET_VRING_ENABLE, &[1 << 32], &[])?;
        }
        // Whoever answers has heard all before.
        self.ask(code::GET_FEATURES).map(drop)
    }

    fn tell(&mut self, request: u32, words: &[u64], fds: &[BorrowedFd<'_>]) -> Result<(), VirtioError> {
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.send(request, &payload, fds)
    }

    fn send(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), VirtioError> {
        // Version 1, no flags.
        let mut bytes: Vec<u8> = [request, 1, payload.len() as u32].into_iter().flat_map(u32::to_le_bytes).collect();
        bytes.extend(payload);
        let failed = self.failed("sending a message");
        if fds.is_empty() {
            return self.stream.write_all(&bytes).map_err(failed);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "a message has one descriptor at most");
        sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
            .map(drop)
            .map_err(|errno| failed(errno.into()))
    }

    /// Asks for a number.
    fn ask(&mut self, request: u32) -> Result<u64, VirtioError> {
        self.send(request, &[], &[])?;
        let answer = self.answer()?;
        let number = answer.try_into().map(u64::from_le_bytes);
        number.map_err(|_| self.failed("asking for a number")(io::ErrorKind::InvalidData.into()))
    }

    /// An answer's payload.
    fn answer(&mut self) -> Result<Vec<u8>, VirtioError> {
        let failed = self.failed("waiting for an answer");
        let mut header = [0; 12];
        self.stream.read_exact(&mut header).map_err(&failed)?;
        let len = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        if len > 4096 {
            return Err(failed(io::ErrorKind::InvalidData.into()));
        }
        let mut payload = vec![0; len as usize];
        self.stream.read_exact(&mut payload).map_err(&failed)?;
        Ok(payload)
    }
}
