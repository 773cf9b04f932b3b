//! A virtio disk on the controller, served by a daemon: what was written through it is read back.

use std::{
    fs::File,
    iter,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use millrace_driver::{
    PAGE_SIZE, Pages, SECTOR, VirtioOptions, VirtioQueue,
    vhost_user::{VhostUser, code},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, memfd_create},
};

use super::{Random, SEED};

const PATIENCE: Duration = Duration::from_secs(60);
/// How long who waits sleeps between two looks.
const NAP: Duration = Duration::from_micros(200);

/// Requests of one piece, of any size, many in flight; then such of many pieces.
pub(super) fn virtio(socket: &Path) {
    for packed in [false, true] {
        for (depth, bytes) in [(64, 512), (48, 12_288), (16, 64 << 10), (4, 1 << 20)] {
            let options = VirtioOptions { depth, bytes, write: true, packed, pages: Pages::Small, timeout: PATIENCE };
            one_piece_each(socket, &options);
        }
    }
    many_pieces_each(socket);
}

/// What request `id` writes: other bytes for each size and kind of queue.
fn pattern(id: usize, options: &VirtioOptions) -> Vec<u8> {
    let salt = options.bytes / 512 + usize::from(options.packed) * 5;
    (0..options.bytes).map(|at| (id * 31 + at / 512 * 7 + at % 251 + salt) as u8).collect()
}

/// Begins all requests, each at a place of its own, shifted by `round`, and waits for them.
fn go_round(queue: &mut VirtioQueue, options: &VirtioOptions, round: usize) {
    let (depth, sectors, patience) = (queue.depth(), options.bytes as u64 / SECTOR, Instant::now() + PATIENCE);
    for id in 0..depth {
        queue.begin(id as u16, ((id + round) % depth) as u64 * sectors);
    }
    queue.ring().unwrap_or_else(|error| panic!("{error}"));
    let mut taken = Vec::new();
    while queue.in_flight() > 0 {
        queue.take(1, &mut taken).and_then(|()| queue.check()).unwrap_or_else(|error| panic!("{error}"));
        assert!(Instant::now() < patience, "{} requests of {} bytes never end", queue.in_flight(), options.bytes);
        if taken.is_empty() {
            thread::sleep(NAP);
        }
    }
}

/// Writes by one front end, reads by the next.
fn one_piece_each(socket: &Path, options: &VirtioOptions) {
    let stride = options.bytes.next_multiple_of(PAGE_SIZE);
    let connect = |write| {
        let options = VirtioOptions { write, ..*options };
        VirtioQueue::connect(socket, &options).unwrap_or_else(|error| panic!("{options:?}: {error}"))
    };
    let mut queue = connect(true);
    let depth = queue.depth();
    (0..depth).for_each(|id| queue.data().write_at(id * stride, &pattern(id, options)));
    // Round the ring more than once; the last time counts.
    (0..3).for_each(|round| go_round(&mut queue, options, round));
    drop(queue);
    let mut queue = connect(false);
    go_round(&mut queue, options, 0);
    for place in 0..depth {
        let found = queue.data().read_vec(place * stride, options.bytes);
        assert!(found == pattern((place + depth - 2) % depth, options), "{options:?}: other data at place {place}");
    }
}

/// Pieces of a request: as many as the disk takes.
const PIECES: u64 = 126;

/// Whole pages apart from each other, and pieces at odd places, one request after the other.
fn many_pieces_each(socket: &Path) {
    let mut guest = Guest::connect(socket);
    let mut random = Random(SEED);
    let pages: Vec<(u64, u64)> = (0..PIECES).map(|i| (DATA + i * 8192, 4096)).collect();
    let odd: Vec<(u64, u64)> = (0..PIECES).map(|i| (DATA + i * 8192 + 2 * i + 1, 511 + 2 * (i % 2))).collect();
    for round in 0..8 {
        for pieces in [&pages, &odd] {
            let mut bytes = |len: u64| (0..len).map(|_| random.below(256) as u8).collect::<Vec<_>>();
            let data: Vec<Vec<u8>> = pieces.iter().map(|(_, len)| bytes(*len)).collect();
            pieces.iter().zip(&data).for_each(|((at, _), data)| guest.put(*at, data));
            guest.request(true, round * 1024, pieces);
            for (at, len) in pieces {
                guest.put(*at, &vec![0xee; *len as usize]);
            }
            guest.request(false, round * 1024, pieces);
            for ((at, len), data) in pieces.iter().zip(&data) {
                assert!(guest.get(*at, *len) == *data, "round {round}: other data in the {len} bytes at {at:#x}");
            }
        }
    }
}

/// Where a guest's memory is, for itself and for its monitor; its bytes.
const GUEST: u64 = 1 << 32;
const USER: u64 = 1 << 40;
const MEMORY: u64 = 4 << 20;
/// Entries of its queue, whose descriptors are the first in its memory.
const ENTRIES: u16 = 16;
/// Where the rest is.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const STATUS: u64 = 0x3800;
const TABLE: u64 = 0x4000;
const DATA: u64 = 0x10_0000;
/// Flags of a descriptor (Virtio 1.2, 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// VIRTIO_F_VERSION_1 and VIRTIO_F_INDIRECT_DESC. Without the protocol's own features a queue runs from its first kick on.
const FEATURES: u64 = 1 << 32 | 1 << 28;

fn descriptor(at: u64, len: u64, flags: u16, next: u16) -> Vec<u8> {
    let mut bytes = (GUEST + at).to_le_bytes().to_vec();
    bytes.extend((len as u32).to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(next.to_le_bytes());
    bytes
}

/// A guest with one request at a time, of as many pieces as wanted: `VirtioQueue` has one each. Its memory is reached by system calls, which the
/// processor does in their order.
struct Guest {
    memory: File,
    kick: OwnedFd,
    next: u16,
    /// Kept for their lives.
    _wire: VhostUser,
    _call: OwnedFd,
}

impl Guest {
    fn connect(socket: &Path) -> Self {
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory"));
        memory.set_len(MEMORY).expect("memory");
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event fd");
        let (kick, call) = (event(), event());
        let mut wire = VhostUser::connect(socket, PATIENCE).unwrap_or_else(|error| panic!("{error}"));
        let offered = wire.ask(code::GET_FEATURES).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(offered & FEATURES, FEATURES, "what every disk offers");
        let mut tell = |request, words: &[u64], fd| wire.tell(request, words, fd).unwrap_or_else(|error| panic!("{error}"));
        tell(code::SET_OWNER, &[], None);
        tell(code::SET_FEATURES, &[FEATURES], None);
        tell(code::SET_MEM_TABLE, &[1, GUEST, MEMORY, USER, 0], Some(memory.as_fd()));
        tell(code::SET_VRING_NUM, &[u64::from(ENTRIES) << 32], None);
        tell(code::SET_VRING_BASE, &[0], None);
        tell(code::SET_VRING_ADDR, &[0, USER, USER + USED, USER + AVAILABLE, 0], None);
        tell(code::SET_VRING_CALL, &[0], Some(call.as_fd()));
        tell(code::SET_VRING_KICK, &[0], Some(kick.as_fd()));
        wire.check().unwrap_or_else(|error| panic!("{error}"));
        Self { memory, kick, next: 0, _wire: wire, _call: call }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at).expect("memory of the guest's");
    }

    fn get(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.memory.read_exact_at(&mut bytes, at).expect("memory of the guest's");
        bytes
    }

    /// A read or a write of these pieces, each a place and a length, through an indirect table.
    fn request(&mut self, write: bool, sector: u64, pieces: &[(u64, u64)]) {
        self.put(HEADER, &[u64::from(write).to_le_bytes(), sector.to_le_bytes()].concat());
        self.put(STATUS, &[0xff]);
        let direction = if write { 0 } else { WRITE };
        let data = pieces.iter().map(|(at, len)| (*at, *len, direction | NEXT));
        let parts = iter::once((HEADER, 16, NEXT)).chain(data).chain([(STATUS, 1, WRITE)]);
        let table: Vec<u8> = parts.zip(1..).flat_map(|((at, len, flags), next)| descriptor(at, len, flags, next)).collect();
        self.put(TABLE, &table);
        self.put(0, &descriptor(TABLE, table.len() as u64, INDIRECT, 0));
        // Descriptor 0 each time.
        self.put(AVAILABLE + 4 + u64::from(self.next % ENTRIES) * 2, &[0, 0]);
        self.next = self.next.wrapping_add(1);
        self.put(AVAILABLE + 2, &self.next.to_le_bytes());
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).expect("a kick");
        let patience = Instant::now() + PATIENCE;
        while self.get(USED + 2, 2) != self.next.to_le_bytes() {
            assert!(Instant::now() < patience, "a request of {} pieces never ends", pieces.len());
            thread::sleep(NAP);
        }
        assert_eq!(self.get(STATUS, 1), [0], "the status of {} pieces at sector {sector}", pieces.len());
    }
}
