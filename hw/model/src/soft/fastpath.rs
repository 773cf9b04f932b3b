//! FastPath's front: requests become commands of a queue on the chip, and their ends records.
//!
//! ```text
//!   a program's words ─► request ─► commands ─► the window's queues and lists ◄──┐ reads
//!                            ▲                                                   │
//!   record ◄── around ───────┴─── joined ◄─────── completion entries ◄────── Through ◄── core
//! ```

use std::collections::VecDeque;

use millrace_functions::opcode;
use millrace_nvme_spec::{
    command::{Cqe, DataPointer, NamespaceId, Sqe},
    status::Status,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::core::Core;
use crate::{
    Around, HostError, Shape,
    map::{
        self,
        fastpath::{self as chip, Go, Space as SpaceWord},
    },
};

/// Bytes of a command's data at most.
const COMMAND: u64 = 128 << 10;
const PAGE_SIZE: u64 = 4096;
const FUA: u32 = 1 << 30;
const TAGS: usize = chip::TAGS as usize;

/// A request that was accepted and has no record yet.
#[derive(Clone, Copy)]
struct Request {
    go: Go,
    offset: u64,
    lba: u64,
    blocks: u64,
    /// What is wrong with it, or what the first of its commands that failed ended with.
    status: Status,
    /// When it came, in cycles.
    began: u64,
    /// Commands made and not ended.
    left: u32,
    /// Blocks of which commands were made.
    made: u64,
}

/// A command in flight.
#[derive(Clone, Copy)]
struct Made {
    tag: u8,
    sqe: Sqe,
}

#[derive(Clone)]
struct Space {
    word: SpaceWord,
    block: u64,
    pages: u64,
    ring: u64,
    words: [Option<u32>; 3],
    requests: [Option<Request>; TAGS],
    /// Tags of requests that commands are still to be made of.
    order: VecDeque<u8>,
    commands: [Option<Made>; chip::ENTRIES as usize],
    tail: u8,
    /// The completion queue's head, when it is to be told.
    head: Option<u16>,
    refused: u16,
    records: u64,
    statistics: [u64; 32],
}

impl Default for Space {
    fn default() -> Self {
        Self {
            word: SpaceWord::new(),
            block: 512,
            pages: 0,
            ring: 0,
            words: [None; 3],
            requests: [None; TAGS],
            order: VecDeque::new(),
            commands: [None; chip::ENTRIES as usize],
            tail: 0,
            head: None,
            refused: 0,
            records: 0,
            statistics: [0; 32],
        }
    }
}

impl Space {
    fn write(&mut self, word: u32, value: u64) {
        match word {
            0 if value >> 63 != 0 => {
                let (block, pages, ring) = (self.block, self.pages, self.ring);
                *self = Self { word: SpaceWord::from_bits(value), block, pages, ring, ..Self::default() };
            }
            0 => self.word.set_enabled(false),
            chip::BUFFER => {
                self.block = if value >> 32 & 1 != 0 { 4096 } else { 512 };
                self.pages = value & 0x7_ffff;
            }
            chip::RING => self.ring = value & 0xffff_ffff_fe00,
            _ => {}
        }
    }

    fn read(&self, word: u32) -> u64 {
        match word {
            0 => self.word.into_bits(),
            chip::STATUS => self.requests.iter().flatten().count() as u64 | u64::from(self.refused) << 16,
            _ => {
                word.checked_sub(chip::STATISTICS).and_then(|row| self.statistics.get(row as usize)).map_or(0, |word| *word)
            }
        }
    }

    /// A program's word.
    fn take(&mut self, offset: u16, value: u32, now: u64) {
        let at = usize::from(offset - chip::PAGE) / 4;
        if offset.is_multiple_of(4) && at < 3 {
            self.words[at] = Some(value);
            return;
        }
        let words = std::mem::take(&mut self.words);
        let go = Go::from_bits(value);
        let free = self.requests.get_mut(usize::from(go.tag())).filter(|_| offset.is_multiple_of(4) && at == 3);
        let Some(free) = free.filter(|free| free.is_none()) else {
            // Only a go takes the words.
            if at != 3 || !offset.is_multiple_of(4) {
                self.words = words;
            }
            self.refused = self.refused.wrapping_add(1);
            return;
        };
        let [offset, low, high] = words.map(Option::unwrap_or_default).map(u64::from);
        let (lba, blocks) = (low | (high & 0xffff) << 32, high >> 16);
        let (offset, whole) = (offset, words.iter().all(Option::is_some));
        let status = check(go, offset, blocks, whole, self.pages * PAGE_SIZE, self.block).err().unwrap_or(Status::SUCCESS);
        *free = Some(Request { go, offset, lba, blocks, status, began: now, left: 0, made: 0 });
        self.order.push_back(go.tag() as u8);
    }

    /// Makes the next command, if there is a request and a place. True: something was done.
    fn make(&mut self, number: u8, last_page: u64, now: u64, around: &mut dyn Around) -> bool {
        let Some(tag) = self.order.front().copied() else { return false };
        let after = (self.tail + 1) % chip::ENTRIES;
        if self.commands[usize::from(after)].is_some() {
            return false;
        }
        let request = self.requests[usize::from(tag)].as_mut().expect("what has a tag in the order is there");
        if request.status != Status::SUCCESS && request.made == 0 && request.left == 0 {
            self.order.pop_front();
            self.record(tag, now, around);
            return true;
        }
        let flush = request.go.opcode() == opcode::FLUSH;
        let blocks = if flush { 1 } else { (request.blocks - request.made).min(COMMAND / self.block) };
        let from = request.offset + request.made * self.block;
        let mut sqe = Sqe::new_zeroed();
        (sqe.opcode, sqe.nsid, sqe.cid.0) = (request.go.opcode(), NamespaceId(1), self.tail.into());
        let next_page = from / PAGE_SIZE * PAGE_SIZE + PAGE_SIZE;
        let listed = (from % PAGE_SIZE + blocks * self.block - 1) / PAGE_SIZE > 1;
        let list =
            last_page + u64::from(number) * chip::SPACE + chip::LISTS + u64::from(self.tail) * u64::from(map::chip::LIST);
        sqe.dptr = DataPointer::prps(from, if listed { list } else { next_page });
        sqe.set_cdw10_11(request.lba + request.made);
        sqe.cdw12 = (blocks - 1) as u32 | if request.go.durable() { FUA } else { 0 };
        request.made += blocks;
        request.left += 1;
        if flush || request.made == request.blocks {
            self.order.pop_front();
        }
        self.commands[usize::from(self.tail)] = Some(Made { tag, sqe });
        self.tail = after;
        true
    }

    /// A completion entry was written at this place.
    fn completed(&mut self, place: u16, entry: &Cqe, now: u64, around: &mut dyn Around) {
        self.head = Some((place + 1) % u16::from(chip::ENTRIES));
        let Some(made) = self.commands.get_mut(usize::from(entry.cid.0)).and_then(Option::take) else { return };
        let Some(request) = self.requests[usize::from(made.tag)].as_mut() else { return };
        request.left -= 1;
        if request.status == Status::SUCCESS {
            request.status = entry.status();
        }
        if request.left == 0 && !self.order.contains(&made.tag) {
            self.record(made.tag, now, around);
        }
    }

    fn record(&mut self, tag: u8, now: u64, around: &mut dyn Around) {
        let request = self.requests[usize::from(tag)].take().expect("a request ends once");
        let took = now - request.began;
        let phase = u32::from((self.records / u64::from(chip::TAGS)).is_multiple_of(2));
        let last = u32::from(request.status.into_bits()) << 17 | phase << 16 | u32::from(tag);
        let record = [took as u32, 0, self.refused.into(), last];
        let place = self.records % u64::from(chip::TAGS);
        around.write_host(self.ring + place * chip::RECORD, record.as_bytes());
        self.records += 1;
        let [count, sum, least, most, ..] = &mut self.statistics;
        *least = if *count == 0 { took } else { took.min(*least) };
        (*count, *sum, *most) = (*count + 1, *sum + took, took.max(*most));
        self.statistics[took.max(16).ilog2().min(31) as usize] += 1;
    }

    /// Eight bytes of the window.
    fn word(&self, at: u64) -> u64 {
        let made = |index: u64| self.commands.get(index as usize).and_then(|made| *made).map(|made| made.sqe);
        if at < chip::COMPLETION {
            let bytes = made(at / 64).map(|sqe| <[u8; 64]>::try_from(sqe.as_bytes()).expect("an entry's bytes"));
            let part = (at % 64 / 8 * 8) as usize;
            return bytes.map_or(0, |bytes| u64::from_le_bytes(std::array::from_fn(|byte| bytes[part + byte])));
        }
        let Some(at) = at.checked_sub(chip::LISTS) else { return 0 };
        let (index, entry) = (at / u64::from(map::chip::LIST), at % u64::from(map::chip::LIST) / 8);
        made(index).map_or(0, |sqe| (sqe.dptr.prp1 / PAGE_SIZE + 1 + entry) * PAGE_SIZE)
    }
}

/// What is wrong with a request before there are commands.
fn check(go: Go, offset: u64, blocks: u64, whole: bool, buffer: u64, block: u64) -> Result<(), Status> {
    let known = [opcode::FLUSH, opcode::WRITE, opcode::READ, opcode::COMPARE, opcode::WRITE_ZEROES];
    let moves = [opcode::WRITE, opcode::READ, opcode::COMPARE].contains(&go.opcode());
    if !known.contains(&go.opcode()) {
        return Err(Status::INVALID_OPCODE.do_not_retry());
    }
    let odd = moves && (!offset.is_multiple_of(4) || offset >> 30 != 0);
    if !whole || go.reserved() != 0 || odd || (go.opcode() != opcode::FLUSH && blocks == 0) {
        return Err(Status::INVALID_FIELD.do_not_retry());
    }
    if moves && offset + blocks * block > buffer {
        return Err(Status::DATA_TRANSFER_ERROR.do_not_retry());
    }
    Ok(())
}

/// See the module.
pub(super) struct FastPath {
    spaces: Vec<Space>,
    queue_pairs: u16,
    /// Guest address of the window: the last page of the tables.
    last_page: u64,
}

impl FastPath {
    pub(super) fn new(shape: &Shape) -> Self {
        let spaces = vec![Space::default(); shape.spaces.into()];
        let last_page = (u64::from(shape.pages) - 1) * map::PAGE;
        Self { spaces, queue_pairs: shape.queue_pairs.into(), last_page }
    }

    fn space_of(&mut self, address: u32) -> Option<(&mut Space, u32)> {
        let at = address.checked_sub(chip::space(0, 0))?;
        self.spaces.get_mut((at / 0x40) as usize).map(|space| (space, at % 0x40))
    }

    pub(super) fn write(&mut self, address: u32, value: u64) {
        if let Some((space, word)) = self.space_of(address) {
            space.write(word, value);
        }
    }

    /// A register, if it is a space's.
    pub(super) fn read(&mut self, address: u32) -> Option<u64> {
        self.space_of(address).map(|(space, word)| space.read(word))
    }

    /// A write to a function's page: whether it was a space's.
    pub(super) fn doorbell(&mut self, function: u8, offset: u16, value: u32, now: u64) -> bool {
        let mine = |space: &&mut Space| space.word.enabled() && space.word.function() == function;
        let space = self.spaces.iter_mut().find(mine).filter(|_| offset >= chip::PAGE);
        space.map(|space| space.take(offset, value, now)).is_some()
    }

    /// Makes commands and rings for them and for what was taken. True: something was done.
    pub(super) fn step(&mut self, cores: &mut [Core], now: u64, around: &mut dyn Around) -> bool {
        let mut worked = false;
        for (number, space) in self.spaces.iter_mut().enumerate() {
            let tail = space.tail;
            while space.make(number as u8, self.last_page, now, around) {
                worked = true;
            }
            let queue = u16::from(space.word.local()) * self.queue_pairs;
            let Some(core) = cores.get_mut(usize::from(space.word.core())) else { continue };
            if space.tail != tail {
                core.doorbell(queue, false, space.tail.into());
            }
            if let Some(head) = space.head.take() {
                core.doorbell(queue, true, head);
                worked = true;
            }
        }
        worked
    }

    /// What cores have around them.
    pub(super) fn through<'a>(&'a mut self, now: u64, around: &'a mut dyn Around) -> Through<'a> {
        Through { spaces: &mut self.spaces, now, around }
    }
}

/// The host, but for the window.
pub(super) struct Through<'a> {
    spaces: &'a mut [Space],
    now: u64,
    around: &'a mut dyn Around,
}

/// The space whose address it is, and the place in it.
fn place(spaces: &mut [Space], address: u64) -> Option<(&mut Space, u64)> {
    let at = address.checked_sub(chip::WINDOW).filter(|at| *at < map::PAGE)?;
    let space = spaces.get_mut((at / chip::SPACE) as usize)?;
    Some((space, at % chip::SPACE))
}

impl Around for Through<'_> {
    fn read_host(&mut self, address: u64, out: &mut [u8]) -> Result<(), HostError> {
        let Some((space, at)) = place(self.spaces, address) else { return self.around.read_host(address, out) };
        for (index, part) in out.chunks_mut(8).enumerate() {
            let word = space.word(at + index as u64 * 8).to_le_bytes();
            part.copy_from_slice(&word[..part.len()]);
        }
        Ok(())
    }

    fn write_host(&mut self, address: u64, data: &[u8]) {
        let Some((space, at)) = place(self.spaces, address) else { return self.around.write_host(address, data) };
        let size = Cqe::SIZE as u64;
        let index = at.checked_sub(chip::COMPLETION).map(|at| at / size).filter(|index| *index < chip::ENTRIES.into());
        if let Some((index, entry)) = index.zip(Cqe::read_from_bytes(data).ok()) {
            space.completed(index as u16, &entry, self.now, self.around);
        }
    }

    fn interrupt(&mut self, function: u8, vector: u8) {
        self.around.interrupt(function, vector);
    }

    fn disk_doorbell(&mut self, disk: u8, core: u8, completion: bool, value: u16) {
        self.around.disk_doorbell(disk, core, completion, value);
    }
}
