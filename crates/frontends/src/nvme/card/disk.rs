//! A disk of the card: one of our own controllers, whose queues lie in the engine's memory.
//!
//! ```text
//!   engine's memory                     window (a memory of our own)             Controller
//!   submission queue ──chip read──────► submission queue ──────────────────────► takes it, moves data by host addresses
//!   completion queue ◄─chip write, not before its time── completion queue ◄────── posts
//! ```
//!
//! The controller sees chip addresses (below 256 KiB) as memory, the window, and behind it all guests' memory by host addresses. The
//! window is kept in step by the engine's ports: an entry and its list come before the controller's doorbell is rung, a completion
//! goes once the disk's latency is over. Guests' mistakes do not come so far; a controller that fails all the same fails its commands.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::fd::AsFd,
    sync::{Arc, atomic::Ordering},
};

use millrace_block::BlockSize;
use millrace_engine::{ShardContext, reaper};
use millrace_engine_model::{Engine, Shape, map::chip};
use millrace_memory::{GuestAddress, GuestMemory, Loan, MAX_REGIONS, MapError, Protection};
use millrace_nvme_spec::{
    command::{Cqe, Sqe},
    opcode::NvmOpcode,
    registers::offset,
};

use super::{
    super::{
        Config, Host, HostReply, NewFormat, Status,
        controller::Controller,
        namespace::{Allocated, Namespace},
    },
    host::{Bell, HostSide, function_of},
};

/// Bytes of all cores' windows.
const WINDOW: u64 = 16 * chip::WINDOW as u64;
/// Where the admin queues lie, which nobody uses.
const ADMIN: u64 = WINDOW;
/// The disk's namespace.
const NSID: u32 = 1;

/// A core's queue pair.
#[derive(Clone, Default)]
struct Pair {
    /// Entries up to here are in the window.
    tail: u16,
    /// Where the next completion is expected, and its phase tag.
    head: u16,
    phase: bool,
    /// When each slot's command may complete.
    due: HashMap<u16, u64>,
}

/// See the module.
pub(super) struct Disk {
    number: u8,
    controller: Controller,
    pairs: Vec<Pair>,
    entries: u16,
    latency: u64,
    namespace: Option<Arc<Namespace>>,
    /// Functions that use it.
    users: Vec<u8>,
    next_due: Option<u64>,
}

impl Disk {
    pub(super) fn new(number: u8, shape: &Shape, latency: u64) -> io::Result<Self> {
        let entries = shape.disk_entries();
        let config = Config {
            queues: shape.cores.into(),
            queue_entries: entries.into(),
            vectors: 1,
            namespaces: NSID,
            mdts: super::port::MDTS,
            ..Config::new(&format!("card-disk-{number}"))
        };
        let mut controller = Controller::new(config, Arc::new(NoHost))?;
        let window = File::from(rustix::fs::memfd_create("millrace-card", rustix::fs::MemfdFlags::CLOEXEC)?);
        window.set_len(WINDOW + 8192)?;
        let all = Protection { read: true, write: true };
        // As many as each guest may have, and the window.
        controller.memory = GuestMemory::with_room(usize::from(shape.functions) * MAX_REGIONS + 1);
        let mapped = controller.memory.map(GuestAddress(0), WINDOW + 8192, all, Some((window.as_fd(), 0)));
        mapped.map_err(io::Error::other)?;
        let pairs = vec![Pair { phase: true, ..Pair::default() }; shape.cores.into()];
        let mut disk =
            Self { number, controller, pairs, entries, latency, namespace: None, users: Vec::new(), next_due: None };
        disk.enable();
        Ok(disk)
    }

    fn enable(&mut self) {
        let controller = &mut self.controller;
        controller.register_write(offset::AQA, &(1_u32 << 16 | 1).to_le_bytes());
        controller.register_write(offset::ASQ, &ADMIN.to_le_bytes());
        controller.register_write(offset::ACQ, &(ADMIN + 4096).to_le_bytes());
        // IOCQES 16 bytes, IOSQES 64 bytes, enabled.
        controller.register_write(offset::CC, &(4_u32 << 20 | 6 << 16 | 1).to_le_bytes());
        for (core, qid) in (0..self.pairs.len() as u32).zip(1..) {
            let (sq, cq) = self.places(core);
            let controller = &mut self.controller;
            controller.create_cq(qid, cq, self.entries.into(), None);
            controller.create_sq(qid, sq, self.entries.into(), qid, 0);
        }
    }

    /// Chip addresses of a core's queues on this disk.
    fn places(&self, core: u32) -> (u64, u64) {
        let (part, window) = (u64::from(self.number) * u64::from(self.entries), u64::from(core * chip::WINDOW));
        let sq = window + u64::from(chip::SUBMISSION) + part * Sqe::SIZE as u64;
        (sq, window + u64::from(chip::COMPLETION) + part * Cqe::SIZE as u64)
    }

    // ---- what lies on it --------------------------------------------------------------------------------------------

    pub(super) fn namespace(&self) -> Option<&Arc<Namespace>> {
        self.namespace.as_ref()
    }

    /// A function uses the namespace, which is this disk's from now on.
    pub(super) fn give(&mut self, namespace: &Arc<Namespace>, function: u8) {
        if self.namespace.is_none() {
            let allocated = Allocated { namespace: Arc::clone(namespace), read_only: false, by_guest: false };
            let known = &mut self.controller.namespaces;
            known
                .allocate(NSID, allocated)
                .and_then(|()| known.attach(NSID))
                .expect("a disk without a namespace has room for one");
            self.namespace = Some(Arc::clone(namespace));
        }
        if !self.users.contains(&function) {
            self.users.push(function);
        }
    }

    /// A function uses it no more, and has nothing in flight.
    pub(super) fn leave(&mut self, function: u8) {
        self.users.retain(|user| *user != function);
        if self.users.is_empty() && self.namespace.take().is_some() {
            self.controller.namespaces.detach(NSID);
            self.controller.namespaces.release(NSID);
        }
    }

    pub(super) fn map(&mut self, address: u64, loan: &Loan) -> Result<(), MapError> {
        self.controller.memory.map_lent(GuestAddress(address), loan)
    }

    /// Takes a region away of whose function nothing is in flight; others' commands go on.
    pub(super) fn unmap(&mut self, address: u64, size: u64) {
        // A region without a file was never mapped here.
        if self.controller.memory.unmap(GuestAddress(address), size).is_err() {
            return;
        }
        // SAFETY: the engine ends a command when all its disks have, so no command of this disk has a segment of the region
        // (`Port::unmap` asserts that its function is quiet, and `Port::map` takes away only what nobody was told of). The queues lie
        // in the window, which stays. Regions that went before were reclaimed then.
        let regions = unsafe { self.controller.memory.reclaim() };
        // Unmapping a large guest takes milliseconds.
        reaper::drop_later(Box::new(regions));
    }

    // ---- commands ---------------------------------------------------------------------------------------------------

    /// The engine rang.
    pub(super) fn ring(&mut self, bell: &Bell, engine: &mut dyn Engine, host: &mut HostSide) {
        let (core, qid) = (u32::from(bell.core), usize::from(bell.core) + 1);
        let Some(pair) = self.pairs.get(usize::from(bell.core)) else { return };
        if bell.completion {
            self.controller.doorbells.words[qid * 2 + 1].store(bell.value.into(), Ordering::Relaxed);
            return;
        }
        let mut tail = pair.tail;
        while tail != bell.value && bell.value < self.entries {
            self.fetch(core, tail, engine, host);
            tail = if tail + 1 == self.entries { 0 } else { tail + 1 };
        }
        self.pairs[usize::from(bell.core)].tail = tail;
        self.controller.doorbells.words[qid * 2].store(tail.into(), Ordering::Relaxed);
    }

    /// Brings one entry into the window, and its list.
    fn fetch(&mut self, core: u32, index: u16, engine: &mut dyn Engine, host: &mut HostSide) {
        let at = self.places(core).0 + u64::from(index) * Sqe::SIZE as u64;
        let mut bytes = [0; Sqe::SIZE];
        engine.read_chip(self.number, at as u32, &mut bytes, host);
        let sqe: Sqe = zerocopy::transmute!(bytes);
        let block = self.namespace.as_ref().map_or(BlockSize::B512, |known| known.volume.geometry().block_size);
        let bytes = (u64::from(sqe.cdw12 as u16) + 1) << block.shift();
        let moved = match sqe.nvm_opcode() {
            NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE => bytes,
            _ => 0,
        };
        if let Some(news) = function_of(sqe.dptr.prp1).and_then(|function| host.news(function)).filter(|_| moved > 0) {
            let counter = if sqe.nvm_opcode() == NvmOpcode::WRITE { &mut news.writes } else { &mut news.reads };
            *counter = (counter.0 + 1, counter.1 + moved);
        }
        let list = sqe.dptr.prp2;
        if (1..WINDOW).contains(&list) && moved.saturating_sub(4096 - sqe.dptr.prp1 % 4096) > 4096 {
            let mut entries = [0; chip::LIST as usize];
            engine.read_chip(self.number, list as u32, &mut entries, host);
            self.put(list, &entries);
        }
        self.put(at, &zerocopy::transmute!(sqe) as &[u8; Sqe::SIZE]);
        let due = engine.now() + self.latency;
        if let Some(pair) = self.pairs.get_mut(core as usize) {
            pair.due.insert(sqe.cid.0, due);
        }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        let put = self.controller.memory.write(GuestAddress(at), bytes);
        put.expect("the window is mapped for as long as the disk lives");
    }

    /// Whether commands are in its volume's hands.
    pub(super) fn is_at_work(&self) -> bool {
        self.controller.in_flight > 0
    }

    /// Whether a turn finds something to do.
    pub(super) fn has_work(&self) -> bool {
        self.next_due.is_some() || self.controller.sink.has_results()
    }

    /// When the next completion may go, of those that are there.
    pub(super) fn next_due(&self) -> Option<u64> {
        self.next_due
    }

    /// The controller's turn, and completions whose time has come. Returns the work done.
    pub(super) fn turn(&mut self, cx: &mut ShardContext<'_>, engine: &mut dyn Engine, host: &mut HostSide) -> usize {
        let mut work = self.controller.turn(cx);
        self.next_due = None;
        for core in 0..self.pairs.len() {
            while let Some((at, bytes, cid)) = self.posted(core as u32) {
                let due = self.pairs[core].due.get(&cid).copied().unwrap_or(0);
                if engine.now() < due {
                    self.next_due = Some(self.next_due.map_or(due, |next| next.min(due)));
                    break;
                }
                engine.write_chip(self.number, at as u32, &bytes, host);
                let pair = &mut self.pairs[core];
                pair.due.remove(&cid);
                pair.head = if pair.head + 1 == self.entries { 0 } else { pair.head + 1 };
                pair.phase ^= pair.head == 0;
                work += 1;
            }
        }
        work
    }

    /// The next completion in the window: where it lies, its bytes, its command.
    fn posted(&self, core: u32) -> Option<(u64, [u8; Cqe::SIZE], u16)> {
        let pair = self.pairs.get(core as usize)?;
        let at = self.places(core).1 + u64::from(pair.head) * Cqe::SIZE as u64;
        let bytes: [u8; Cqe::SIZE] = self.controller.memory.read_value(GuestAddress(at)).ok()?;
        let cqe: Cqe = zerocopy::transmute!(bytes);
        (cqe.phase() == pair.phase).then_some((at, bytes, cqe.cid.0))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Otherwise the memory stays mapped for ever: tasks that are under way may still use it.
        if self.controller.is_quiet() {
            self.controller.memory.unmap_all();
            self.controller.drained();
        }
    }
}

/// A disk's controller asks nothing: nobody sends it an admin command.
struct NoHost;

impl Host for NoHost {
    fn create_namespace(&self, _: &str, _: u32, _: u64, _: BlockSize, reply: HostReply<Arc<Namespace>>) {
        reply.send(Err(Status::INVALID_OPCODE));
    }

    fn delete_namespace(&self, _: &str, _: u32, reply: HostReply<()>) {
        reply.send(Err(Status::INVALID_OPCODE));
    }

    fn format(&self, _: &str, _: Arc<Namespace>, _: NewFormat, reply: HostReply<()>) {
        reply.send(Err(Status::INVALID_OPCODE));
    }

    fn attachment_changed(&self, _: &str, _: u32, _: bool) {}

    fn reservation_notice(&self, _: &Arc<Namespace>, _: &[([u8; 16], u8)]) {}
}
