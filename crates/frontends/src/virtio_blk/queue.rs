//! One request queue as its front end has set it up.

use super::{
    dirty::DirtyLog,
    inflight::InflightRegion,
    memory::MemoryTable,
    message::VringAddr,
    ring::{Done, MAX_SIZE, Ring, RingError, Setup, feature},
};
use crate::eventfd::Eventfd;

/// A queue.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) size: u32,
    pub(crate) base: u32,
    pub(crate) addr: Option<VringAddr>,
    /// The guest signals it when it has made requests available and was asked to.
    pub(crate) kick: Option<Eventfd>,
    /// We signal it when requests have ended.
    call: Option<Eventfd>,
    /// We signal it when the queue has failed.
    err: Option<Eventfd>,
    pub(crate) enabled: bool,
    /// There from start to stop.
    pub(crate) ring: Option<Ring>,
    /// The ring went with its memory; it goes on from `base` where that comes back.
    displaced: bool,
    /// The front end waits for the queue to come to rest: nothing new is taken.
    pub(crate) stopping: bool,
    /// Requests that wait for their volume.
    pub(crate) waiting: u16,
    /// Requests that have ended, to be given back in one batch.
    pub(crate) done: Vec<Done>,
    /// The ring was asked to kick.
    pub(crate) armed: bool,
}

impl Queue {
    /// Makes the ring, where there is none yet. What an earlier process left is taken up from the record.
    pub(crate) fn start(
        &mut self,
        memory: &MemoryTable,
        features: u64,
        record: Option<(&InflightRegion, usize)>,
    ) -> Result<(), RingError> {
        if self.ring.is_some() {
            return Ok(());
        }
        let addr = self.addr.ok_or(RingError::Place { part: "descriptor table", user: 0 })?;
        let mut ring = Ring::new(memory, &Setup { size: self.size, addr, base: self.base, features })?;
        if let Some(record) = record.and_then(|(region, index)| region.record(index)) {
            ring.recover(record)?;
        }
        self.done.clear();
        self.done.reserve(self.size.min(MAX_SIZE) as usize);
        self.ring = Some(ring);
        (self.stopping, self.displaced) = (false, false);
        // An earlier process may have given requests back without a word.
        self.call();
        Ok(())
    }

    /// The ring's memory is gone. At rest nothing is lost.
    pub(crate) fn displace(&mut self) {
        if let Some(ring) = self.ring.take() {
            (self.base, self.displaced) = (ring.base(), true);
        }
    }

    /// Whether the ring waits for its memory to come back.
    pub(crate) fn is_displaced(&self) -> bool {
        self.displaced
    }

    /// Whether it starts as a guest's driver makes it, and does not go on from elsewhere, as far as its base says.
    pub(crate) fn begins(&self, features: u64) -> bool {
        // A packed ring's positions are told with their wrap counters, in the highest bit of each half (vhost-user, "Vring state
        // description"); they begin as 1 (virtio 1.2, 2.8.1). At 0 with another counter it has gone round.
        let first = if features & feature::PACKED == 0 { 0 } else { 0x8000_8000 };
        self.base == first
    }

    /// Gives back what has ended, and leaves it in the list. Returns how many.
    #[inline]
    pub(crate) fn give_back(&mut self, log: Option<&DirtyLog>) -> usize {
        if let Some(ring) = self.ring.as_mut().filter(|_| !self.done.is_empty()) {
            ring.give_back(&self.done, log);
        }
        self.done.len()
    }

    /// Whether nothing is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        let left_over = self.ring.as_ref().is_some_and(Ring::has_left_over);
        self.waiting == 0 && self.done.is_empty() && (!left_over || !self.enabled)
    }

    /// Ends the ring; where it would go on.
    pub(crate) fn stop(&mut self) -> u32 {
        assert!(self.waiting == 0 && self.done.is_empty(), "a queue is stopped when it is at rest");
        if let Some(ring) = self.ring.take() {
            self.base = ring.base();
        }
        (self.stopping, self.displaced, self.kick, self.armed) = (false, false, None, false);
        self.base
    }

    /// The descriptor to interrupt the guest with.
    pub(crate) fn set_call(&mut self, call: Option<Eventfd>) {
        self.call = call;
        if self.ring.is_some() {
            self.call();
        }
    }

    /// The descriptor to tell of failures with.
    pub(crate) fn set_err(&mut self, err: Option<Eventfd>) {
        self.err = err;
    }

    /// Interrupts the guest; whether there is a way to.
    #[inline]
    pub(crate) fn call(&self) -> bool {
        if let Some(call) = &self.call {
            call.ring();
        }
        self.call.is_some()
    }

    /// Tells the front end that the queue has failed.
    pub(crate) fn report_failure(&self) {
        if let Some(err) = &self.err {
            err.ring();
        }
    }
}
