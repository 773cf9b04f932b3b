//! The event trace: what becomes of each request, from the guest's queue to its interrupt, in one clock.
//!
//! ```text
//!   front end: Site::seen, fetched ─► under(key) ─► Volume::submit ─► Switch, Tap: Entered … Left ─► back end
//!              Site::completed, interrupted                             │ whose key, under which span: this thread's `NOW`
//!                        └──────────────┬───────────────────────────────┘
//!                                       ▼
//!                      the thread's own Ring ── drained by the control plane ─► file
//! ```
//!
//! Off, a front end pays one branch for each event on a field of its own, a [`Switch`](crate::Switch) nothing (it looks at the word that
//! says whether it is paused in any case), and a [`Tap`] between two services one branch on a plain load. Nothing is
//! written, and nothing is locked.
//!
//! Invariants:
//! * A shard writes to its own ring only, and never waits for whoever reads it: what finds no room is dropped and counted.
//! * Events of one device are in its shard's order: an identifier is completed before it is fetched again.
//!
//! It knows nothing of files and of who wants to know; those are `control` and the crate `trace`.

mod event;
mod ring;
mod tap;
#[cfg(test)]
mod tests;

use std::{
    cell::{Cell, RefCell},
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

pub use event::{Event, EventKind, EventOperation, Key};
pub use ring::Ring;
pub use tap::Tap;
pub(crate) use tap::{submit, submit_bytes, submit_tagged};

use crate::{Lba, clock};

/// On whose behalf the thread works at the moment.
#[derive(Clone, Copy, Debug, Default)]
struct Now {
    key: Key,
    /// The span that is open around; 0: none.
    span: u32,
}

thread_local! {
    static NOW: Cell<Now> = const { Cell::new(Now { key: Key::NOBODY, span: 0 }) };
    static SPANS: Cell<u32> = const { Cell::new(0) };
    static RING: RefCell<Option<Arc<Ring>>> = const { RefCell::new(None) };
}

/// Has the calling thread's events go into this ring from now on, or nowhere. A ring has one thread that writes to it.
pub fn install(ring: Option<Arc<Ring>>) {
    RING.set(ring);
}

/// Records an event now, if the thread has a ring.
fn record(event: Event) {
    RING.with_borrow(|ring| {
        if let Some(ring) = ring {
            ring.push(&Event { time: clock::now(), ..event });
        }
    });
}

/// A number for a span that no other span of this thread has had lately; never 0.
fn next_span() -> u32 {
    let span = SPANS.get().wrapping_add(1).max(1);
    SPANS.set(span);
    span
}

/// While it is there, the thread works on behalf of a request. Dropping it goes back to what was before.
#[derive(Debug)]
#[must_use]
pub struct Under {
    before: Now,
    _local: std::marker::PhantomData<*const ()>,
}

impl Under {
    fn new(now: Now) -> Self {
        Self { before: NOW.replace(now), _local: std::marker::PhantomData }
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        NOW.set(self.before);
    }
}

/// A future that goes on on behalf of whoever started it.
#[derive(Debug)]
pub struct Carried<F> {
    key: Key,
    future: F,
}

/// Has a future go on on behalf of the present request, whenever it is polled.
pub fn carry<F: Future>(future: F) -> Carried<F> {
    Carried { key: NOW.get().key, future }
}

impl<F: Future> Future for Carried<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let key = self.key;
        // SAFETY: the field is pinned with the whole: nothing moves it out, there is no Drop, and the whole is Unpin only if it is.
        let future = unsafe { self.map_unchecked_mut(|carried| &mut carried.future) };
        if key == Key::NOBODY {
            return future.poll(cx);
        }
        let _under = Under::new(Now { key, span: 0 });
        future.poll(cx)
    }
}

/// Where a device's events come from; as made by default, it is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// The device's number in the trace; 0: it is not traced.
    device: u16,
    /// The only namespace whose requests are recorded; 0: all are. Others share its queues, so that they are told apart from its own.
    nsid: u32,
}

/// A request, as a front end has found it in its queue.
#[derive(Clone, Copy, Debug)]
pub struct Fetched {
    /// The namespace; a virtio disk has number 1.
    pub nsid: u32,
    /// What it asks for.
    pub operation: EventOperation,
    /// First block, in the device's own.
    pub lba: Lba,
    /// How many.
    pub count: u64,
}

impl Site {
    /// A device that is traced under this number, which is not 0; one namespace of it, or all.
    pub fn new(device: u16, nsid: Option<u32>) -> Self {
        assert_ne!(device, 0, "0 is no device");
        Self { device, nsid: nsid.unwrap_or(0) }
    }

    /// Whether there is anything to record.
    #[inline]
    pub fn is_on(self) -> bool {
        self.device != 0
    }

    fn wants(self, nsid: u32) -> bool {
        self.is_on() && (self.nsid == 0 || self.nsid == nsid)
    }

    fn key(self, queue: u16, command: u16) -> Key {
        Key { device: self.device, queue, command }
    }

    /// A queue was seen to have so many requests that were not taken yet.
    #[inline]
    pub fn seen(self, queue: u16, pending: u32) {
        if self.is_on() {
            let key = self.key(queue, 0);
            record(Event { kind: EventKind::Seen, key, count: pending, ..Event::default() });
        }
    }

    /// A request was copied out of its queue.
    #[inline]
    pub fn fetched(self, queue: u16, command: u16, fetched: impl FnOnce() -> Fetched) {
        if self.is_on() {
            self.record_fetched(self.key(queue, command), fetched());
        }
    }

    #[cold]
    fn record_fetched(self, key: Key, fetched: Fetched) {
        let Fetched { nsid, operation, lba, count } = fetched;
        let place = nsid as u16;
        if self.wants(nsid) {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            record(Event { kind: EventKind::Fetched, key, operation, lba: lba.0, count, place, ..Event::default() });
        } else {
            record(Event { kind: EventKind::Passed, key, place, ..Event::default() });
        }
    }

    /// Until the guard goes, the thread works on behalf of a request; of none, when it is not recorded.
    #[inline]
    pub fn under(self, nsid: u32, queue: u16, command: u16) -> Option<Under> {
        if !self.is_on() {
            return None;
        }
        self.wants(nsid).then(|| Under::new(Now { key: self.key(queue, command), span: 0 }))
    }

    /// The guest can see that a request has ended; `vector` will interrupt it, if any does.
    #[inline]
    pub fn completed(self, queue: u16, command: u16, status: u16, vector: Option<u16>) {
        if self.is_on() {
            let (key, place) = (self.key(queue, command), vector.unwrap_or(u16::MAX));
            record(Event { kind: EventKind::Completed, key, status, place, ..Event::default() });
        }
    }

    /// The guest was interrupted.
    #[inline]
    pub fn interrupted(self, vector: u16) {
        if self.is_on() {
            let key = self.key(0, 0);
            record(Event { kind: EventKind::Interrupted, key, place: vector, ..Event::default() });
        }
    }

    /// The device begins anew: none of what is waiting or under way will be completed.
    pub fn reset(self) {
        if self.is_on() {
            record(Event { kind: EventKind::Reset, key: self.key(0, 0), ..Event::default() });
        }
    }
}
