//! Interrupts to the guest: vectors, masks, coalescing, pin-based interrupts.

use std::{os::fd::OwnedFd, time::Instant};

use super::{controller::Counters, state::DeviceState};

/// The controller's interrupt wiring.
#[derive(Debug)]
pub(crate) struct Interrupts {
    vectors: Vec<Option<OwnedFd>>,
    pending: Vec<u64>,
}

impl Interrupts {
    pub(crate) fn new(vectors: u16) -> Self {
        Self { vectors: (0..vectors).map(|_| None).collect(), pending: vec![0; usize::from(vectors).div_ceil(64)] }
    }

    /// A completion was posted to a queue of this vector; the interrupt is raised by [`Self::flush`].
    #[inline]
    pub(crate) fn pend(&mut self, vector: u16) {
        if let Some(word) = self.pending.get_mut(usize::from(vector / 64)) {
            *word |= 1 << (vector % 64);
        }
    }

    /// Raises what is pending and due: one decision per turn, not per completion.
    pub(crate) fn flush(&mut self, _now: Instant, _state: &DeviceState, _counters: &mut Counters) {
        let _ = &self.vectors;
    }
}
