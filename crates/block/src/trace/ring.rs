//! A ring of events: one thread writes, another reads, neither waits.
//!
//! ```text
//!   writer ─ push ─► head ┄┄┄ events ┄┄┄ tail ◄─ drain ─ reader           full: the event is dropped and counted
//! ```
//!
//! Events are words of atomics that are written and read relaxed, which costs what plain memory does; the head's release and acquire
//! order them. Memory is there, and was touched, before the first event.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Event;

/// Its own pair of cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

#[derive(Debug, Default)]
struct Writer {
    head: AtomicU64,
    dropped: AtomicU64,
}

/// See the module.
#[derive(Debug)]
pub struct Ring {
    slots: Box<[[AtomicU64; Event::WORDS]]>,
    writer: Line<Writer>,
    tail: Line<AtomicU64>,
}

impl Ring {
    /// A ring with room for this many events.
    ///
    /// # Panics
    /// When that is no power of two.
    pub fn new(events: usize) -> Self {
        assert!(events.is_power_of_two(), "a ring's size is a power of two");
        // Not all zeroes: memory that was never written is not there yet.
        let slots = (0..events).map(|at| std::array::from_fn(|_| AtomicU64::new(at as u64))).collect();
        Self { slots, writer: Line::default(), tail: Line::default() }
    }

    fn slot(&self, at: u64) -> &[AtomicU64; Event::WORDS] {
        &self.slots[at as usize & (self.slots.len() - 1)]
    }

    /// Adds an event. Only one thread may: events of others could be mixed up with its own.
    #[inline]
    pub fn push(&self, event: &Event) {
        let Writer { head, dropped } = &self.writer.0;
        let at = head.load(Ordering::Relaxed);
        // Acquire: what the reader has read is read before it is written over.
        if at - self.tail.0.load(Ordering::Acquire) >= self.slots.len() as u64 {
            dropped.store(dropped.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            return;
        }
        for (cell, word) in self.slot(at).iter().zip(event.to_words()) {
            cell.store(word, Ordering::Relaxed);
        }
        head.store(at + 1, Ordering::Release);
    }

    /// Takes up to `most` events out, oldest first; how many. Only one thread may.
    pub fn drain(&self, most: usize, mut take: impl FnMut([u64; Event::WORDS])) -> usize {
        let tail = self.tail.0.load(Ordering::Relaxed);
        let there = self.writer.0.head.load(Ordering::Acquire) - tail;
        let count = there.min(most as u64);
        for at in tail..tail + count {
            take(self.slot(at).each_ref().map(|cell| cell.load(Ordering::Relaxed)));
        }
        self.tail.0.store(tail + count, Ordering::Release);
        count as usize
    }

    /// Events that found no room so far.
    pub fn dropped(&self) -> u64 {
        self.writer.0.dropped.load(Ordering::Relaxed)
    }
}
