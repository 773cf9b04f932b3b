//! A host and disks around an engine, for its tests: guests' memory in one piece, disks that carry commands out at once.
//!
//! ```text
//!   Rig ── push, ring ──► Engine ──► disks (blocks in a map) ──► what each disk was asked, what each queue was answered
//! ```
//!
//! Guest address `a` of function `f` is host address `BASE + f * SIZE + a`, so that an address that nobody translated leads nowhere.

use std::collections::{BTreeMap, VecDeque};

use millrace_nvme_spec::command::{Cqe, Sqe};
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    Around, Engine, HostError,
    map::{self, NamespaceWord, PageRow, Place, QueueBase, QueueSizes, QueueStatus},
};

/// Host address of the first guest's address 0.
pub const BASE: u64 = 0x40_0000_0000;
/// Bytes of a guest's memory.
pub const SIZE: u64 = 4 << 20;
/// Where a guest's queue pair `n` has its submission queue; the completion queue lies a page behind it.
pub const QUEUES: u64 = 0x10_0000;
/// log2 of the block size.
const BLOCK: u32 = 9;

/// What is around the engine.
pub struct World {
    memory: Vec<u8>,
    doorbells: VecDeque<(u8, u8, bool, u16)>,
    /// Interrupts: function and vector.
    pub interrupts: Vec<(u8, u8)>,
    /// Writes that reached no memory.
    pub lost: usize,
}

impl World {
    fn range(&self, address: u64, len: usize) -> Option<std::ops::Range<usize>> {
        let at = usize::try_from(address.checked_sub(BASE)?).ok()?;
        (at.checked_add(len)? <= self.memory.len()).then(|| at..at + len)
    }
}

impl Around for World {
    fn read_host(&mut self, address: u64, out: &mut [u8]) -> Result<(), HostError> {
        let range = self.range(address, out.len()).ok_or(HostError)?;
        out.copy_from_slice(&self.memory[range]);
        Ok(())
    }

    fn write_host(&mut self, address: u64, data: &[u8]) {
        match self.range(address, data.len()) {
            Some(range) => self.memory[range].copy_from_slice(data),
            None => self.lost += 1,
        }
    }

    fn interrupt(&mut self, function: u8, vector: u8) {
        self.interrupts.push((function, vector));
    }

    fn disk_doorbell(&mut self, disk: u8, core: u8, completion: bool, value: u16) {
        self.doorbells.push_back((disk, core, completion, value));
    }
}

/// A core's queue pair on a disk, as the disk has it.
#[derive(Clone, Default)]
struct Pair {
    head: u16,
    tail: u16,
    cq_tail: u16,
    laps: u16,
}

/// A disk.
#[derive(Clone, Default)]
pub struct Disk {
    pairs: Vec<Pair>,
    /// Its blocks; those that are not here are zero.
    pub blocks: BTreeMap<u64, Vec<u8>>,
    /// Commands that it was given, in order, and their data's host pages (the first with its offset).
    pub commands: Vec<Sqe>,
    /// See `commands`.
    pub pages: Vec<Vec<u64>>,
    /// What it says to the next commands, instead of carrying them out.
    pub failures: VecDeque<u16>,
}

/// A guest's side of a queue pair.
#[derive(Clone)]
struct Guest {
    entries: u32,
    tail: u32,
    head: u32,
    phase: bool,
}

/// See the module.
pub struct Rig {
    /// The engine.
    pub engine: Box<dyn Engine>,
    /// What is around it.
    pub world: World,
    /// Its disks.
    pub disks: Vec<Disk>,
    queues: BTreeMap<(u8, u16), Guest>,
}

impl Rig {
    /// An engine with as many guests as `functions`, all on core 0 and on disk 0, each with 4096 blocks of 512 bytes.
    pub fn new(engine: Box<dyn Engine>, functions: u8) -> Self {
        let shape = engine.shape();
        let memory = vec![0; (u64::from(functions) * SIZE) as usize];
        let world = World { memory, doorbells: VecDeque::new(), interrupts: Vec::new(), lost: 0 };
        let disk = Disk { pairs: vec![Pair::default(); shape.cores.into()], ..Disk::default() };
        let mut rig = Self { engine, world, disks: vec![disk; shape.ssds.into()], queues: BTreeMap::new() };
        for core in 0..shape.cores {
            (0..shape.ssds).for_each(|disk| rig.write(map::core(core, map::disk(disk)), 1));
        }
        for function in 0..functions {
            rig.write(map::place(function), Place::new().with_enabled(true).with_local(function).into_bits());
            for page in 0..(SIZE / map::PAGE) as u32 {
                let at = BASE + u64::from(function) * SIZE + u64::from(page) * map::PAGE;
                rig.write(map::page(shape.pages, function, page), PageRow::at(at, true).into_bits());
            }
            rig.configure(function, 1, 4096, &[]);
        }
        rig
    }

    /// Writes a register.
    pub fn write(&mut self, address: u32, value: u64) {
        self.engine.write(address, value, &mut self.world);
    }

    /// Reads a register.
    pub fn read(&mut self, address: u32) -> u64 {
        self.engine.read(address, &mut self.world)
    }

    /// A function's namespace 1, and the words of its configuration behind the first two.
    pub fn configure(&mut self, function: u8, disks: u16, blocks: u64, words: &[(u32, u64)]) {
        let switches: u64 = words.iter().filter(|(word, _)| *word == 0).map(|(_, bits)| bits).sum();
        let first = NamespaceWord::new().with_nsid(1).with_block_log2(BLOCK as u8).with_enabled(true).with_disks(disks);
        self.write(map::configuration(function, 1), blocks);
        for (word, value) in words.iter().filter(|(word, _)| *word != 0) {
            self.write(map::configuration(function, *word), *value);
        }
        self.write(map::configuration(function, 0), first.into_bits() | switches);
    }

    /// Makes a queue pair of a function; it interrupts by the vector of its own number.
    pub fn queue(&mut self, function: u8, qid: u16, entries: u8) {
        let queue = u32::from(function) * u32::from(self.engine.shape().queue_pairs) + u32::from(qid) - 1;
        let page = (BASE + u64::from(function) * SIZE + QUEUES) / 4096 + u64::from(qid) * 2;
        let sizes = QueueSizes::new().with_sq(entries).with_cq(entries).with_interrupts(true).with_vector(qid as u8);
        self.world.memory[((page << 12) - BASE) as usize..][..8192].fill(0);
        self.write(map::queue(queue, 1), sizes.into_bits());
        self.write(map::queue(queue, 2), QueueBase::new().with_page(page + 1).into_bits());
        self.write(map::queue(queue, 0), QueueBase::new().with_enabled(true).with_page(page).into_bits());
        self.queues.insert((function, qid), Guest { entries: entries.into(), tail: 0, head: 0, phase: true });
    }

    /// What the engine says of a queue.
    pub fn status(&mut self, function: u8, qid: u16) -> QueueStatus {
        let queue = u32::from(function) * u32::from(self.engine.shape().queue_pairs) + u32::from(qid) - 1;
        QueueStatus::from_bits(self.read(map::queue(queue, 3)))
    }

    /// A guest's bytes.
    pub fn memory(&mut self, function: u8, address: u64, len: usize) -> &mut [u8] {
        &mut self.world.memory[(u64::from(function) * SIZE + address) as usize..][..len]
    }

    /// Puts a command into a queue.
    pub fn push(&mut self, function: u8, qid: u16, sqe: &Sqe) {
        let guest = self.queues.get_mut(&(function, qid)).expect("a queue that was made");
        let at = QUEUES + u64::from(qid) * 8192 + u64::from(guest.tail) * 64;
        guest.tail = (guest.tail + 1) % guest.entries;
        self.memory(function, at, 64).copy_from_slice(sqe.as_bytes());
    }

    /// Rings a doorbell with any value.
    pub fn doorbell(&mut self, function: u8, offset: u16, value: u32) {
        self.engine.doorbell(function, offset, value, &mut self.world);
    }

    /// Rings for what was pushed.
    pub fn ring(&mut self, function: u8, qid: u16) {
        let tail = self.queues[&(function, qid)].tail;
        self.doorbell(function, qid * 8, tail);
    }

    /// The next completion, if there is one. The head is told.
    pub fn poll(&mut self, function: u8, qid: u16) -> Option<Cqe> {
        let guest = self.queues[&(function, qid)].clone();
        let at = QUEUES + u64::from(qid) * 8192 + 4096 + u64::from(guest.head) * 16;
        let cqe = Cqe::read_from_bytes(self.memory(function, at, 16)).expect("as many bytes");
        if cqe.phase() != guest.phase {
            return None;
        }
        let known = self.queues.get_mut(&(function, qid)).expect("it is there");
        known.head += 1;
        if known.head == known.entries {
            (known.head, known.phase) = (0, !known.phase);
        }
        let head = known.head;
        self.doorbell(function, qid * 8 + 4, head);
        Some(cqe)
    }

    /// Lets engine and disks work until there is nothing to do.
    pub fn settle(&mut self) {
        for _ in 0..100_000 {
            self.engine.run(64, &mut self.world);
            if let Some((disk, core, completion, value)) = self.world.doorbells.pop_front() {
                self.serve(disk, core, completion, value);
            } else if !self.engine.is_busy() {
                return;
            }
        }
        panic!("the engine does not come to rest");
    }

    /// All completions of a queue, once everything has settled.
    pub fn answers(&mut self, function: u8, qid: u16) -> Vec<Cqe> {
        self.settle();
        let mut all = Vec::new();
        while let Some(cqe) = self.poll(function, qid) {
            all.push(cqe);
            self.settle();
        }
        all
    }

    fn serve(&mut self, disk: u8, core: u8, completion: bool, value: u16) {
        if completion {
            return;
        }
        let entries = self.engine.shape().disk_entries();
        let window = u32::from(core) * map::chip::WINDOW;
        self.disks[usize::from(disk)].pairs[usize::from(core)].tail = value;
        loop {
            let known = &mut self.disks[usize::from(disk)];
            let pair = &mut known.pairs[usize::from(core)];
            if pair.head == pair.tail {
                return;
            }
            let (index, place) = (pair.head, pair.cq_tail);
            pair.head = (pair.head + 1) % entries;
            let (head, phase) = (pair.head, pair.laps.is_multiple_of(2));
            pair.cq_tail = (pair.cq_tail + 1) % entries;
            pair.laps += u16::from(pair.cq_tail == 0);
            let mut bytes = [0; 64];
            let part = u32::from(disk) * u32::from(entries);
            let at = window + map::chip::SUBMISSION + (part + u32::from(index)) * 64;
            self.engine.read_chip(disk, at, &mut bytes, &mut self.world);
            let sqe = Sqe::read_from_bytes(&bytes).expect("as many bytes");
            let status = self.carry_out(disk, &sqe);
            let entry = [0, 0, u32::from(head), u32::from(sqe.cid.0) | u32::from(status << 1 | u16::from(phase)) << 16];
            let mut bytes = [0; 16];
            bytes.copy_from_slice(entry.as_bytes());
            let at = window + map::chip::COMPLETION + (part + u32::from(place)) * 16;
            self.engine.write_chip(disk, at, &bytes, &mut self.world);
        }
    }

    /// The host pages of a command: the first with its offset.
    fn pages(&mut self, disk: u8, sqe: &Sqe, len: u64) -> Vec<u64> {
        let first = 4096 - sqe.dptr.prp1 % 4096;
        let mut pages = vec![sqe.dptr.prp1];
        match len.saturating_sub(first).div_ceil(4096) {
            0 => {}
            1 => pages.push(sqe.dptr.prp2),
            count => {
                let mut list = [0; map::chip::LIST as usize];
                let at = u32::try_from(sqe.dptr.prp2).expect("a list's chip address");
                self.engine.read_chip(disk, at, &mut list, &mut self.world);
                let entries = list.chunks_exact(8).take(count as usize);
                pages.extend(entries.map(|entry| u64::from_le_bytes(entry.try_into().expect("8 bytes"))));
            }
        }
        pages
    }

    fn carry_out(&mut self, disk: u8, sqe: &Sqe) -> u16 {
        let moved = if matches!(sqe.opcode, 1 | 2 | 5) { (u64::from(sqe.cdw12 as u16) + 1) << BLOCK } else { 0 };
        let pages = if moved > 0 { self.pages(disk, sqe, moved) } else { Vec::new() };
        self.disks[usize::from(disk)].commands.push(*sqe);
        self.disks[usize::from(disk)].pages.push(pages.clone());
        if let Some(status) = self.disks[usize::from(disk)].failures.pop_front() {
            return status;
        }
        let (blocks, lba) = (u64::from(sqe.cdw12 as u16) + 1, sqe.cdw10_11());
        let len = if sqe.opcode == 5 { 0 } else { moved };
        if sqe.opcode == 8 {
            (lba..lba + blocks).for_each(|block| drop(self.disks[usize::from(disk)].blocks.remove(&block)));
        }
        let mut done = 0;
        for page in pages {
            let here = (4096 - page % 4096).min(len - done);
            for at in (0..here).step_by(1 << BLOCK) {
                let range = self.world.range(page + at, 1 << BLOCK).expect("a disk is given host addresses");
                let block = lba + ((done + at) >> BLOCK);
                if sqe.opcode == 1 {
                    let bytes = self.world.memory[range].to_vec();
                    self.disks[usize::from(disk)].blocks.insert(block, bytes);
                } else {
                    match self.disks[usize::from(disk)].blocks.get(&block) {
                        Some(bytes) => self.world.memory[range].copy_from_slice(bytes),
                        None => self.world.memory[range].fill(0),
                    }
                }
            }
            done += here;
        }
        0
    }
}
