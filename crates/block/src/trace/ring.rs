//! A ring of events: one thread writes, another reads, neither waits.
//!
//! ```text
//!   writer ─ push ─► head ┄┄┄ events ┄┄┄ tail ◄─ drain ─ reader           full: the event is dropped and counted;
//!                                                                       the next one comes after one that says so
//! ```
//!
//! Events are words of atomics that are written and read relaxed, which costs what plain memory does; the head's release and acquire
//! order them. Memory is there, and was touched, before the first event.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Event, EventKind};

/// Its own pair of cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

#[derive(Debug, Default)]
struct Writer {
    head: AtomicU64,
    dropped: AtomicU64,
    /// How many of those dropped a [`EventKind::Lost`] has told of; the writer's own.
    told: AtomicU64,
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
        let Writer { head, dropped, told } = &self.writer.0;
        let at = head.load(Ordering::Relaxed);
        let all = dropped.load(Ordering::Relaxed);
        let lost = all - told.load(Ordering::Relaxed);
        // Acquire: what the reader has read is read before it is written over.
        let room = self.slots.len() as u64 - (at - self.tail.0.load(Ordering::Acquire));
        // After a gap there must be room for two: what comes after it is misunderstood by whoever does not know of it.
        if room < 1 + u64::from(lost > 0) {
            dropped.store(all + 1, Ordering::Relaxed);
            return;
        }
        let at = if lost > 0 { self.tell(at, lost, event.time) } else { at };
        self.write(at, event);
        head.store(at + 1, Ordering::Release);
    }

    /// Says that events are not there; where the next one goes.
    #[cold]
    fn tell(&self, at: u64, lost: u64, time: u64) -> u64 {
        let count = u32::try_from(lost).unwrap_or(u32::MAX);
        self.write(at, &Event { time, count, kind: EventKind::Lost, ..Event::default() });
        let Writer { dropped, told, .. } = &self.writer.0;
        told.store(dropped.load(Ordering::Relaxed), Ordering::Relaxed);
        at + 1
    }

    #[inline]
    fn write(&self, at: u64, event: &Event) {
        for (cell, word) in self.slot(at).iter().zip(event.to_words()) {
            cell.store(word, Ordering::Relaxed);
        }
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
