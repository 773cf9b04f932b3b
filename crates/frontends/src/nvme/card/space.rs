//! FastPath's front as a function of the card has it: a space in the place of its queues (docs/hardware.md, "FastPath").
//!
//! ```text
//!   Open Space (admin) ──► Port::open_space ──► page table, queue 1, the space's registers
//!   words of the program, each a register write ──► Port::take_word ──► (while commands are taken) Engine::doorbell
//!   records ◄── the engine, by host addresses
//! ```
//!
//! To the controller the space is I/O queue pair 1, whose entries lie on the chip: it goes when that is deleted, or with a reset.

use std::collections::VecDeque;

use millrace_engine_model::map::{
    self, QueueBase, QueueSizes,
    fastpath::{self, Space as SpaceWord},
};

use super::{Card, host::host_address, port::Port};

/// The queue pair that a space takes.
pub(crate) const QUEUE: u16 = 1;
/// Words that may wait: of as many requests as a space holds. Whoever sends more has requests that would be refused.
const WORDS: usize = 4 * fastpath::TAGS as usize;
/// Where records are to lie: at a multiple of what they take.
pub(crate) const RING: u64 = fastpath::TAGS as u64 * fastpath::RECORD;

/// A space that the function has.
pub(super) struct Space {
    number: u8,
    /// Pages of 4 KiB, and log2 of the blocks' size.
    buffer: (u32, u8),
    /// Requests are accepted.
    open: bool,
    /// What came while no commands are taken: offsets in the page, and values.
    words: VecDeque<(u16, u32)>,
}

/// Why there is no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpaceError {
    /// Others have all that the card has.
    AllTaken,
    /// Guest memory lies where the engine must see the space's own.
    PageInUse,
}

impl Port {
    /// Spaces that the card was built with.
    pub(crate) fn spaces(&self) -> u8 {
        self.card.borrow().engine.shape().spaces
    }

    /// The most pages of 4 KiB that a space's buffer may have: the last row of the table is not for memory.
    pub(crate) fn space_pages(&self) -> u32 {
        (u32::from(self.card.borrow().engine.shape().pages) - 1) * (map::PAGE / 4096) as u32
    }

    /// Opens a space: records go to `ring`, the buffer is `pages` of guest memory from address 0 on. Nothing of queue 1 is in flight.
    pub(crate) fn open_space(&mut self, ring: u64, pages: u32, block_log2: u8) -> Result<(), SpaceError> {
        self.forget_space();
        let shape = self.card.borrow().engine.shape();
        let last = u32::from(shape.pages) - 1;
        if self.has_memory_in(u64::from(last) * map::PAGE) {
            return Err(SpaceError::PageInUse);
        }
        let Some(free) = self.card.borrow().spaces.iter().position(|taken| !taken) else {
            return Err(SpaceError::AllTaken);
        };
        let number = free as u8;
        let window = fastpath::WINDOW + u64::from(number) * fastpath::SPACE;
        let (queue, place) = (self.index(QUEUE), self.place);
        self.write(map::queue(queue, 0), 0);
        let sizes = QueueSizes::new().with_sq(fastpath::ENTRIES).with_cq(fastpath::ENTRIES);
        self.write(map::queue(queue, 1), sizes.into_bits());
        self.write(map::queue(queue, 2), window + fastpath::COMPLETION);
        self.write(map::queue(queue, 0), QueueBase::new().with_page(window / 4096).with_enabled(true).into_bits());
        {
            let mut card = self.card.borrow_mut();
            card.spaces[free] = true;
            // A function's page has doorbells or a space.
            card.write(map::place(self.function), 0);
            card.write(fastpath::space(number, fastpath::RING), host_address(self.function, ring).unwrap_or(0));
        }
        let words = VecDeque::with_capacity(WORDS);
        self.space = Some(Space { number, buffer: (pages, block_log2), open: true, words });
        self.write_buffer();
        self.write_pages(u64::from(last) * map::PAGE, 1);
        let word = SpaceWord::new().with_enabled(true).with_function(self.function);
        let word = word.with_core(place.core()).with_local(place.local());
        self.card.borrow_mut().write(fastpath::space(number, 0), word.into_bits());
        self.enabled[usize::from(QUEUE)] = true;
        self.used[usize::from(QUEUE)] = true;
        self.cq_entries[usize::from(QUEUE)] = fastpath::ENTRIES.into();
        Ok(())
    }

    /// Has the engine know the buffer, and in which blocks the function's namespace is.
    fn write_buffer(&self) {
        let Some(Space { number, buffer: (pages, block_log2), .. }) = &self.space else { return };
        let value = u64::from(*pages) | u64::from(*block_log2 == 12) << 32;
        self.card.borrow_mut().write(fastpath::space(*number, fastpath::BUFFER), value);
    }

    /// The namespace that the function shows has blocks of this size now.
    pub(super) fn fit_space(&mut self, block_log2: u8) {
        if let Some(space) = self.space.as_mut().filter(|space| space.buffer.1 != block_log2) {
            space.buffer.1 = block_log2;
            self.write_buffer();
        }
    }

    /// Whether the function has a space that accepts requests.
    pub(crate) fn has_space(&self) -> bool {
        self.space.as_ref().is_some_and(|space| space.open)
    }

    /// A program's word, at this offset of its page.
    pub(crate) fn take_word(&mut self, offset: u16, value: u32) {
        if let Some(space) = self.space.as_mut().filter(|space| space.open && space.words.len() < WORDS) {
            space.words.push_back((offset, value));
        }
    }

    /// Whether words wait for the engine.
    pub(super) fn has_words(&self) -> bool {
        self.space.as_ref().is_some_and(|space| !space.words.is_empty())
    }

    /// Passes words on. How many there were.
    pub(super) fn pass_words(&mut self) -> usize {
        let Some(space) = &mut self.space else { return 0 };
        let Card { engine, host, .. } = &mut *self.card.borrow_mut();
        let passed = space.words.len();
        for (offset, value) in space.words.drain(..) {
            engine.doorbell(self.function, offset, value, host);
        }
        passed
    }

    /// Accepts no more requests; those that were accepted go on. True if there was a space.
    pub(super) fn close_space(&mut self) -> bool {
        let Some(space) = self.space.as_mut().filter(|space| space.open) else { return false };
        space.open = false;
        space.words.clear();
        let number = space.number;
        self.card.borrow_mut().write(fastpath::space(number, 0), 0);
        true
    }

    /// Requests that have no record yet.
    pub(super) fn has_requests(&self) -> bool {
        let Some(space) = &self.space else { return false };
        let status = self.card.borrow_mut().read(fastpath::space(space.number, fastpath::STATUS));
        status & 0x3f != 0
    }

    /// Gives a closed space back to the card, once nothing of it is in flight: the function has doorbells again.
    pub(crate) fn forget_space(&mut self) {
        let closed = self.space.as_ref().is_some_and(|space| !space.open);
        if !closed || self.has_requests() || self.status(QUEUE).in_flight() != 0 {
            return;
        }
        let Some(space) = self.space.take() else { return };
        self.write(map::queue(self.index(QUEUE), 0), 0);
        let pages = self.card.borrow().engine.shape().pages;
        self.write_pages(u64::from(pages - 1) * map::PAGE, 1);
        let mut card = self.card.borrow_mut();
        card.write(map::place(self.function), self.place.into_bits());
        card.spaces[usize::from(space.number)] = false;
    }
}
