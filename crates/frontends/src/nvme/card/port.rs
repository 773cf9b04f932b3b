//! A controller's place on the card: its function's registers.
//!
//! What the guest set up is compared with what was last written, and written where it differs: so that every way a change can come
//! (the guest's commands, the operator's, a reset) ends here.

use std::{cell::RefCell, rc::Rc};

use millrace_engine::ShardContext;
use millrace_engine_model::map::{self, Coalescing, Fault, PageRow, Place, QueueBase, QueueSizes, QueueStatus, fastpath};
use millrace_memory::{GuestAddress, GuestMemory, MapError};

use super::{
    Card, CardSpec, StorageFunctions,
    disk::Disk,
    host::{News, host_address},
    show::Shown,
    space::{QUEUE, Space},
};

/// MDTS of a function: 128 KiB.
pub(crate) const MDTS: u8 = 5;
/// Entries of a queue at most: it lies in one page.
pub(crate) const QUEUE_ENTRIES: u32 = 64;
/// Vectors of a function at most: as many as can be masked.
pub(crate) const VECTORS: u16 = 32;
/// Commands of a function in its turn at the arbiter.
const WEIGHT: u64 = 4;

/// A queue pair as the guest made it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) sq: (u64, u32),
    pub(crate) cq: (u64, u32),
    pub(crate) vector: Option<u16>,
}

/// A region of the guest's memory, and whether it may be written.
#[derive(Debug)]
struct Region {
    address: u64,
    size: u64,
    writable: bool,
}

/// See the module.
pub(crate) struct Port {
    pub(super) card: Rc<RefCell<Card>>,
    pub(super) function: u8,
    pub(super) place: Place,
    /// FastPath's, in the place of queue 1.
    pub(super) space: Option<Space>,
    pub(super) functions: StorageFunctions,
    /// What it shows.
    pub(super) shown: Shown,
    /// Doorbells as they were last passed on, by their index in the page.
    rung: Vec<u32>,
    regions: Vec<Region>,
    coalescing: Coalescing,
    /// By queue identifier: whether commands are taken.
    pub(super) enabled: Vec<bool>,
    /// Entries of the completion queues.
    pub(super) cq_entries: Vec<u32>,
    /// Completion queues that a submission queue had: the engine would begin anew in them, where the guest goes on.
    pub(super) used: Vec<bool>,
}

impl Port {
    /// A function of the shard's card.
    pub(crate) fn new(spec: &CardSpec, functions: &StorageFunctions, queues: u16) -> Result<Self, String> {
        let shared = Card::of_shard(spec)?;
        let mut card = shared.borrow_mut();
        let shape = card.engine.shape();
        let free = card.functions.iter().position(|taken| !taken);
        let function = free.ok_or_else(|| format!("all {} functions of the card are taken", shape.functions))?;
        // As many functions on every core.
        let (core, local) = (function as u8 % shape.cores, function as u8 / shape.cores);
        if local >= shape.local_functions {
            return Err(format!("the card's cores serve {} functions each, and all are taken", shape.local_functions));
        }
        card.functions[function] = true;
        let function = function as u8;
        let place = Place::new().with_enabled(true).with_core(core).with_local(local);
        card.write(map::place(function), place.into_bits());
        card.write(map::core(core, map::weight(local)), WEIGHT);
        for page in 0..u32::from(shape.pages) {
            card.write(map::core(core, map::page(shape.pages, local, page)), 0);
        }
        drop(card);
        let port = Self {
            card: shared,
            function,
            place,
            space: None,
            functions: *functions,
            shown: Shown::default(),
            rung: vec![0; (usize::from(queues) + 1) * 2],
            regions: Vec::new(),
            coalescing: Coalescing::new(),
            enabled: vec![false; usize::from(queues) + 1],
            cq_entries: vec![2; usize::from(queues) + 1],
            used: vec![false; usize::from(queues) + 1],
        };
        port.write(map::interrupts(local), 0);
        port.write(map::configuration(local, 0), 0);
        Ok(port)
    }

    fn address(&self, word: u32) -> u32 {
        map::core(self.place.core(), word)
    }

    pub(super) fn write(&self, word: u32, value: u64) {
        self.card.borrow_mut().write(self.address(word), value);
    }

    fn read(&self, word: u32) -> u64 {
        self.card.borrow_mut().read(self.address(word))
    }

    /// A queue's index in its core.
    pub(super) fn index(&self, qid: u16) -> u32 {
        let pairs = self.card.borrow().engine.shape().queue_pairs;
        u32::from(self.place.local()) * u32::from(pairs) + u32::from(qid) - 1
    }

    // ---- queues -----------------------------------------------------------------------------------------------------

    /// Begins a queue pair.
    pub(crate) fn create(&mut self, qid: u16, pair: &Pair) {
        self.forget_space();
        let queue = self.index(qid);
        let sizes = QueueSizes::new().with_sq(pair.sq.1 as u8).with_cq(pair.cq.1 as u8);
        let sizes = sizes.with_interrupts(pair.vector.is_some()).with_vector(pair.vector.unwrap_or(0) as u8);
        let page = |address| host_address(self.function, address).unwrap_or(0) >> 12;
        self.write(map::queue(queue, 1), sizes.into_bits());
        self.write(map::queue(queue, 2), QueueBase::new().with_page(page(pair.cq.0)).into_bits());
        self.write(map::queue(queue, 0), QueueBase::new().with_page(page(pair.sq.0)).with_enabled(true).into_bits());
        self.rung[usize::from(qid) * 2..][..2].fill(0);
        self.enabled[usize::from(qid)] = true;
        self.used[usize::from(qid)] = true;
        self.cq_entries[usize::from(qid)] = pair.cq.1;
    }

    /// A completion queue was made.
    pub(crate) fn begin_cq(&mut self, cqid: u16) {
        self.used[usize::from(cqid)] = false;
    }

    /// Whether a submission queue had this completion queue before.
    pub(crate) fn is_used(&self, cqid: u16) -> bool {
        self.used[usize::from(cqid)]
    }

    fn qids(&self) -> impl Iterator<Item = u16> + use<> {
        1..self.enabled.len() as u16
    }

    /// Takes no more commands of a queue.
    pub(crate) fn stop(&mut self, qid: u16) {
        let was = std::mem::take(&mut self.enabled[usize::from(qid)]);
        if was && !(qid == QUEUE && self.close_space()) {
            self.write(map::queue(self.index(qid), 0), 0);
        }
    }

    /// Takes no more commands.
    pub(crate) fn stop_all(&mut self) {
        self.qids().for_each(|qid| self.stop(qid));
    }

    /// Whether commands of a queue are taken.
    pub(crate) fn is_enabled(&self, qid: u16) -> bool {
        self.enabled[usize::from(qid)]
    }

    /// What the engine says of a queue.
    pub(crate) fn status(&self, qid: u16) -> QueueStatus {
        QueueStatus::from_bits(self.read(map::queue(self.index(qid), 3)))
    }

    /// Whether no command of a queue is in flight.
    pub(crate) fn is_idle(&self, qid: u16) -> bool {
        self.status(qid).in_flight() == 0 && !(qid == QUEUE && self.has_requests())
    }

    /// Whether nothing of the function is in flight, nor will be before a doorbell is rung.
    pub(crate) fn is_quiet(&self) -> bool {
        !self.has_requests()
            && self.qids().all(|qid| {
                let status = self.status(qid);
                // Who does not read completions has no commands taken, and rings no doorbell that we pass on meanwhile.
                let next = (u32::from(status.cq_tail()) + 1) % self.cq_entries[usize::from(qid)];
                let full = next == u32::from(status.cq_head());
                // All else that was rung for is taken, be it when others' commands have left the engine room.
                let waits = self.is_enabled(qid) && !status.stopped() && !full && status.sq_head() != status.sq_tail();
                status.in_flight() == 0 && !waits
            })
    }

    /// Whether a turn finds something to do.
    pub(crate) fn has_work(&self) -> bool {
        if self.waits_for_quiet() && self.is_quiet() {
            return true;
        }
        let card = self.card.borrow();
        card.has_work() || card.host.has_news(self.function) || card.engine.faults() != 0
    }

    /// Whether engine or disks are at work.
    pub(crate) fn is_card_at_work(&self) -> bool {
        let card = self.card.borrow();
        card.has_work() || card.disks.iter().any(Disk::is_at_work)
    }

    /// Passes a doorbell on, if it was rung since.
    pub(crate) fn ring(&mut self, index: usize, value: u32) -> bool {
        if self.rung[index] == value {
            return false;
        }
        self.rung[index] = value;
        let Card { engine, host, .. } = &mut *self.card.borrow_mut();
        engine.doorbell(self.function, index as u16 * 4, value, host);
        true
    }

    /// Whether a doorbell was rung that was not passed on.
    pub(crate) fn is_rung(&self, index: usize, value: u32) -> bool {
        self.rung[index] != value
    }

    /// Lets the card go on. Returns the work done, and what happened for this function.
    pub(crate) fn turn(&mut self, cx: &mut ShardContext<'_>) -> (usize, News) {
        let mut card = self.card.borrow_mut();
        let work = card.turn(cx);
        (work, card.host.news(self.function).map(std::mem::take).unwrap_or_default())
    }

    /// The next fault of one of this function's queues: its identifier and the fault's code.
    pub(crate) fn next_fault(&mut self) -> Option<(u16, u16)> {
        let pairs = u16::from(self.card.borrow().engine.shape().queue_pairs);
        let (core, local) = (self.place.core(), u16::from(self.place.local()));
        let mut card = self.card.borrow_mut();
        if card.engine.faults() >> core & 1 != 0 {
            let fault = Fault::from_bits(card.read(map::core(core, map::FAULT)));
            if fault.valid() {
                card.faults.push((core, fault));
            }
        }
        let ours = |(of, fault): &(u8, Fault)| *of == core && fault.queue() / pairs == local;
        let at = card.faults.iter().position(ours)?;
        let (_, fault) = card.faults.swap_remove(at);
        Some((fault.queue() % pairs + 1, fault.code()))
    }

    /// Sets how interrupts are coalesced, and which vectors are masked.
    pub(crate) fn set_interrupts(&mut self, coalescing: Coalescing) {
        if self.coalescing != coalescing {
            self.coalescing = coalescing;
            self.write(map::interrupts(self.place.local()), coalescing.into_bits());
        }
    }

    // ---- memory -----------------------------------------------------------------------------------------------------

    /// Makes a region of the guest's memory reachable, or a piece of one; what has no file is for nobody.
    pub(crate) fn map(&mut self, memory: &GuestMemory, address: u64, size: u64) -> Result<(), MapError> {
        let end = host_address(self.function, address.saturating_add(size));
        let Some((end, loan)) = end.zip(memory.lend(GuestAddress(address), size)) else { return Ok(()) };
        let at = end - size;
        let mut card = self.card.borrow_mut();
        let Card { host, disks, .. } = &mut *card;
        let mut having = 0;
        let mut mapped = disks.iter_mut().try_for_each(|disk| -> Result<(), MapError> {
            disk.map(at, &loan)?;
            having += 1;
            Ok(())
        });
        if mapped.is_ok() {
            mapped = host.map(at, &loan);
        }
        if let Err(error) = mapped {
            // What one of them could not map, none has.
            disks.iter_mut().take(having).for_each(|disk| disk.unmap(at, size));
            return Err(error);
        }
        drop(card);
        self.regions.push(Region { address, size, writable: loan.is_writable() });
        self.write_pages(address, size);
        Ok(())
    }

    /// Takes the regions of a range away; nothing of the function is in flight.
    pub(crate) fn unmap(&mut self, address: u64, size: u64) {
        // The disks let the pages go at once, whatever they do for others.
        assert!(self.is_quiet(), "commands in flight may use the memory of function {}", self.function);
        let last = address.saturating_add(size - 1);
        let is_inside = |known: &Region| known.address >= address && known.address + (known.size - 1) <= last;
        while let Some(at) = self.regions.iter().position(is_inside) {
            let Region { address, size, .. } = self.regions.swap_remove(at);
            self.forget(address, size);
        }
    }

    /// A region was taken out of the list, and nothing of the function is in flight.
    fn forget(&mut self, address: u64, size: u64) {
        self.write_pages(address, size);
        let mut card = self.card.borrow_mut();
        let Some(host) = host_address(self.function, address) else { return };
        card.host.unmap(host, size);
        card.disks.iter_mut().for_each(|disk| disk.unmap(host, size));
    }

    /// Takes all memory away; nothing of the function is in flight.
    pub(crate) fn unmap_all(&mut self) {
        assert!(self.is_quiet(), "commands in flight may use the memory of function {}", self.function);
        while let Some(Region { address, size, .. }) = self.regions.pop() {
            self.forget(address, size);
        }
    }

    /// Whether memory is mapped in the page of 2 MiB that begins there.
    pub(super) fn has_memory_in(&self, page: u64) -> bool {
        let touches = |region: &Region| region.address < page + map::PAGE && region.address + (region.size - 1) >= page;
        self.regions.iter().any(touches)
    }

    /// Writes the rows of the pages that a region touches.
    pub(super) fn write_pages(&self, address: u64, size: u64) {
        let pages = self.card.borrow().engine.shape().pages;
        let last = (address + (size - 1)) / map::PAGE;
        for page in address / map::PAGE..=last.min(u64::from(pages) - 1) {
            let (from, to) = (page * map::PAGE, (page + 1) * map::PAGE);
            let touches = |region: &&Region| region.address < to && region.address + (region.size - 1) >= from;
            let mut regions = self.regions.iter().filter(touches).peekable();
            let present = regions.peek().is_some();
            let writable = regions.any(|region| region.writable);
            let mut row = host_address(self.function, from).filter(|_| present).map(|at| PageRow::at(at, writable));
            if self.space.is_some() && page == u64::from(pages) - 1 {
                row = Some(PageRow::at(fastpath::WINDOW, false));
            }
            self.write(map::page(pages, self.place.local(), page as u32), row.unwrap_or_default().into_bits());
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.stop_all();
        self.show_nothing();
        // A device that goes has nothing in flight; one that a fault of ours fenced keeps its memory where it is.
        if self.is_quiet() {
            self.forget_space();
            self.leave_disks();
            self.unmap_all();
            let mut card = self.card.borrow_mut();
            card.write(map::place(self.function), 0);
            card.functions[usize::from(self.function)] = false;
        }
        while self.next_fault().is_some() {}
    }
}
